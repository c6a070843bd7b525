"""The CPU time that making batches takes: of the worker processes, or of the loop's own thread inside `next`.

Read from the parent alone: nothing is wrapped or changed in a worker, and no thread is started. Where it cannot be
read, as outside of Linux or in a framework's own loop, it is unknown.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from time import thread_time_ns

FIRST_NS = 100_000_000  # between the first two looks at the workers of an iterator; each next one is twice as late ...
EVERY_NS = 1_000_000_000  # ... up to this time
WORKERS_MAX = (
    16  # workers that are looked at: the others are taken to be like them, so a look costs about half a millisecond
)
NS = 1_000_000_000


class MakingCpu:
    """Not thread-safe: only the thread of the loop calls it. `cpu_ns` was used to make `batches`."""

    def __init__(self) -> None:
        self.cpu_ns = self.batches = 0
        self._pids: Sequence[int] = ()
        self._scale = 1.0
        self._is_own = False
        self._last: tuple[int, int] | None = None  # time and CPU time of the last look
        self._since = self._began = 0
        self._every_ns = FIRST_NS

    def begin(self, inner: object | None) -> None:
        """The loop has made this iterator; None if it is not known."""
        workers = getattr(inner, "_workers", None)  # of torch's own iterator with workers
        pids = [getattr(worker, "pid", None) for worker in workers] if isinstance(workers, (list, tuple)) else []
        found = [pid for pid in pids if isinstance(pid, int)]
        self._pids, self._last, self._since = found[:WORKERS_MAX], None, 0
        self._every_ns = FIRST_NS
        self._scale = len(found) / len(self._pids) if self._pids else 1.0
        self._is_own = inner is not None and not found

    def ask(self) -> None:
        """The loop asks for a batch."""
        if self._is_own:
            self._began = thread_time_ns()

    def get(self, now: int, *, is_first: bool) -> None:
        """The loop has got it. `is_first`: of this iterator, so its time is that of a start."""
        if self._is_own:
            if not is_first:
                self.cpu_ns += thread_time_ns() - self._began
                self.batches += 1
        elif self._pids:
            self._since += 1
            if self._last is None or now - self._last[0] >= self._every_ns:
                self._look(now)

    def _look(self, now: int) -> None:
        used = [read_cpu_ns(pid) for pid in self._pids]
        if None in used:  # a worker has ended, or this is no Linux
            self._last = None
            return
        total = round(self._scale * sum(each or 0 for each in used))
        if self._last is not None:
            self.cpu_ns += total - self._last[1]
            self.batches += self._since
            self._every_ns = min(EVERY_NS, 2 * self._every_ns)
        self._last, self._since = (now, total), 0


def read_cpu_ns(pid: int) -> int | None:
    """CPU time of a process since its start; None if it cannot be read.

    The kernel may count whole ticks of 10 ms, and misses a worker that runs for less between two waits. The time of its
    first thread is exact, where the kernel has it (CONFIG_SCHED_INFO).
    """
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        ticks = (int(fields[11]) + int(fields[12])) * NS // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None
    try:
        return max(ticks, int(_read(f"/proc/{pid}/schedstat").split()[0]))
    except (OSError, ValueError, IndexError):
        return ticks


def _read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123  -- in the loop's own time
        return file.read(4096)
