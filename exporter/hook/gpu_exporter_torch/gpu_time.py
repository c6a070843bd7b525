"""Measures with CUDA events how long the GPU has no work. The loop records the events, and the hook reads them after
they have completed. The hook never waits for the GPU.

An event completes when the stream has finished all earlier work. The loop records one event when it asks for a batch,
and one when it has the batch. The time between these events is the time in which the GPU had no work while the loop
waited for data. If the GPU still works on earlier steps during the wait, this time is 0.

The hook never creates a CUDA context, and records nothing while a CUDA graph is captured.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any, Protocol

PENDING_MAX = 256  # events that the GPU has not reached; above this they are dropped, and the time is not known
WAIT, WORK, NOTHING = "wait", "work", ""


class Event(Protocol):
    """A torch.cuda.Event with enable_timing."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float: ...  # milliseconds


class GpuTimeline:
    """A sequence of marks. Each mark ends the interval that the mark before it began. `seconds`: the time by kind of
    interval, for all intervals that were read.

    `is_known`: false until an interval was read, and after an interval was lost.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.dropped = 0
        self.device: int | None = None
        """the index of the GPU that the loop computes on, None if it is not known"""
        self.follows = False
        """whether the loop computes on the device that is current at the first mark, if `device` is None"""
        self._pending: deque[tuple[str, Event]] = deque()
        self._free: list[Event] = []

    @property
    def is_known(self) -> bool:
        return bool(self.seconds) and not self.dropped

    def mark(self, kind: str) -> None:
        """Begins an interval of this kind; NOTHING is not counted."""
        cuda = find_cuda()
        if cuda is None or (self.device is None and not self.follows):
            return
        if self.device is None:
            self.device = cuda.current_device()
        if cuda.is_current_stream_capturing() or cuda.current_device() != self.device:
            self._forget()
            return
        if len(self._pending) >= PENDING_MAX // 2:  # many batches or phases in one step
            self.read()
        if len(self._pending) >= PENDING_MAX:
            self._forget()
            self.dropped += 1
        event = self._free.pop() if self._free else cuda.Event(enable_timing=True)
        event.record()
        self._pending.append((kind, event))

    def read(self) -> None:
        """Adds the intervals whose end the GPU has reached. Does not read the event of the last mark."""
        while len(self._pending) > 2 and self._pending[1][1].query():
            kind, begin = self._pending.popleft()
            if kind != NOTHING:
                seconds = begin.elapsed_time(self._pending[0][1]) / 1e3
                self.seconds[kind] = self.seconds.get(kind, 0.0) + max(0.0, seconds)
            self._free.append(begin)

    def cancel(self) -> None:
        """Excludes the interval that the last mark began."""
        if self._pending:
            self._pending[-1] = (NOTHING, self._pending[-1][1])

    def _forget(self) -> None:
        self._pending.clear()  # the events may still be in use by the stream, so they are not used again


def find_cuda() -> Any | None:
    """torch.cuda if the program has used it in this process, otherwise None."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None
