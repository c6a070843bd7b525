"""Measures the cost of making batches: the CPU time of the worker processes (without workers: of the loop's thread
inside `next`), and the time for which workers wait for a CPU.

Only the parent process reads these times: nothing is wrapped or changed in a worker, and no thread is started. The
times are unknown if they cannot be read, e.g. on other systems than Linux or in a framework's own loop.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from time import process_time_ns, thread_time_ns
from typing import NamedTuple

FIRST_NS = 100_000_000  # between the first two looks at the workers of an iterator; each next one is twice as late ...
EVERY_NS = 1_000_000_000  # ... up to this time
WORKERS_MAX = 16  # workers that are read: the others count as equal to them, so a look costs about half a millisecond
NS = 1_000_000_000


class Used(NamedTuple):
    """CPU time of a process since its start. `delay_ns`: time for which it was ready to run but had no CPU, None if the
    kernel does not count it.
    """

    cpu_ns: int
    delay_ns: int | None


class MakingCpu:
    """Counts the CPU time of making batches. Not thread-safe: only the loop's thread may call it.

    `cpu_ns`: CPU time that was used to make `batches` batches. `delay_ns`: time for which workers waited for a CPU
    during that work. `take_ns`: CPU time of the loop's thread in `next`, for `taken` batches. `loop_ns`: CPU time of
    the loop's whole process, for the same batches.
    """

    def __init__(self) -> None:
        self.cpu_ns = self.batches = self.take_ns = self.loop_ns = self.taken = 0
        self.delay_ns: int | None = 0
        self._pids: Sequence[int] = ()
        self._scale = 1.0
        self._is_own = False
        self._last: tuple[int, Used] | None = None  # the last look and its time
        self._since = self._began = self._process = 0
        self._every_ns = FIRST_NS

    def begin(self, inner: object | None) -> None:
        """Notes that the loop has made a new iterator. `inner`: this iterator, None if it is unknown."""
        workers = getattr(inner, "_workers", None)  # of torch's own iterator with workers
        pids = [getattr(worker, "pid", None) for worker in workers] if isinstance(workers, (list, tuple)) else []
        found = [pid for pid in pids if isinstance(pid, int)]
        self._pids, self._last, self._since = found[:WORKERS_MAX], None, 0
        self._every_ns = FIRST_NS
        self._scale = len(found) / len(self._pids) if self._pids else 1.0
        self._is_own = inner is not None and not found

    def ask(self) -> None:
        """Notes that the loop asks for a batch."""
        self._began = thread_time_ns()

    def get(self, now: int, *, is_first: bool) -> None:
        """Notes that the loop has received the batch. `is_first`: the first batch of the iterator, which also waits for
        the start of workers.
        """
        took, process = thread_time_ns() - self._began, process_time_ns()
        if not is_first:
            self.taken += 1
            self.take_ns += took
            self.loop_ns += process - self._process
            if self._is_own:
                self.cpu_ns += took
                self.batches += 1
        self._process = process
        if self._pids:
            self._since += 1
            if self._last is None or now - self._last[0] >= self._every_ns:
                self._look(now)

    def seconds(self) -> Mapping[str, float | None]:
        """Returns the mean seconds per batch, for the report; None is unknown."""
        return {
            "make_cpu_seconds": _mean(self.cpu_ns, self.batches),
            "make_delay_seconds": None if self._is_own else _mean(self.delay_ns, self.batches),
            "take_cpu_seconds": _mean(self.take_ns, self.taken),
            "loop_cpu_seconds": _mean(self.loop_ns, self.taken),
        }

    def _look(self, now: int) -> None:
        used = [each for pid in self._pids if (each := read_used(pid)) is not None]
        if len(used) < len(self._pids):  # a worker has ended, or this is no Linux
            self._last = None
            return
        delays = [each.delay_ns for each in used if each.delay_ns is not None]
        total = Used(
            round(self._scale * sum(each.cpu_ns for each in used)),
            round(self._scale * sum(delays)) if len(delays) == len(used) else None,
        )
        if self._last is not None:
            before = self._last[1]
            self.cpu_ns += total.cpu_ns - before.cpu_ns
            self.batches += self._since
            is_known = self.delay_ns is not None and total.delay_ns is not None and before.delay_ns is not None
            self.delay_ns = self.delay_ns + total.delay_ns - before.delay_ns if is_known else None  # type: ignore[operator]
            self._every_ns = min(EVERY_NS, 2 * self._every_ns)
        self._last, self._since = (now, total), 0


def _mean(total_ns: int | None, number: int) -> float | None:
    return total_ns / number / NS if number and total_ns is not None else None


def read_used(pid: int) -> Used | None:
    """Returns the CPU time of a process since its start, None if it cannot be read.

    In /proc/PID/stat the kernel may count only whole ticks of 10 ms, and misses short runs between two waits.
    /proc/PID/schedstat (CONFIG_SCHED_INFO) has the exact time of the first thread, and the time for which it waited for
    a CPU.
    """
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        ticks = (int(fields[11]) + int(fields[12])) * NS // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    try:
        ran, waited = map(int, _read(f"/proc/{pid}/schedstat").split()[:2])
    except (OSError, ValueError):
        return Used(ticks, None)
    return Used(max(ticks, ran), waited)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123  -- in the loop's own time
        return file.read(4096)
