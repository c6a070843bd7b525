"""Counts XIDs (the driver's error codes). A thread waits for the driver's events."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable

from gpu_exporter.agent.collectors.xid import classify
from gpu_exporter.agent.devices.errors import DeviceError, NotSupported
from gpu_exporter.agent.devices.protocol import EventWatch, XidEvent
from gpu_exporter.agent.sampling.activity.repeats import Repeats
from gpu_exporter.agent.sampling.worker import Worker
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.readings import CollectorOutcome, XidCounts
from gpu_exporter.common.tasks import Task

log = logging.getLogger(__name__)
WAIT_S = 0.25  # longest wait inside one driver call, so that the driver can be closed within two seconds
RETRY_S = 30.0  # after a failed registration
LATE_S = 120.0  # without a turn: a call hangs in the driver
MAX_CODES = 100  # distinct codes counted per GPU; NVIDIA documents some 170, and no board shows many


class XidBook:
    """Counts XIDs by GPU and code. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codes: dict[str, dict[tuple[int, str], tuple[int, float]]] = {}  # by UUID, by code and class
        self._full: set[str] = set()  # GPUs with an XID that is not counted
        self._event_at: dict[XidEvent, float] = {}  # when the driver last raised it, monotonic

    def watch(self, uuid: str) -> None:
        """Notes that XIDs of this GPU arrive from now on. If none arrives, its count is 0, not unknown."""
        with self._lock:
            self._codes.setdefault(uuid, {})

    def count(self, event: XidEvent, wall: float, monotonic: float) -> None:
        with self._lock:
            if self._add(event, wall):
                self._event_at[event] = monotonic

    def count_line(self, event: XidEvent, wall: float, since: float) -> bool:
        """Counts an XID from the kernel's log, unless the driver raised it since `since` (monotonic seconds). Returns
        whether it was counted.
        """
        raised = event._replace(severity="")
        with self._lock:
            return self._event_at.get(raised, -math.inf) < since and self._add(event, wall)

    def _add(self, event: XidEvent, wall: float) -> bool:
        codes, key = self._codes.setdefault(event.uuid, {}), (event.xid, classify(event.xid, event.severity))
        if key not in codes and len(codes) >= MAX_CODES:
            if event.uuid not in self._full:
                self._full.add(event.uuid)
                text = "XID %d of GPU %s is not counted: the GPU has reached the limit of %d different XIDs"
                log.warning(text, event.xid, event.uuid, MAX_CODES)
            return False
        codes[key] = (codes.get(key, (0, 0.0))[0] + 1, wall)
        return True

    def counts(self, uuid: str) -> XidCounts | None:
        """Returns the counts of a GPU, None if the exporter does not receive its XIDs."""
        with self._lock:
            codes = self._codes.get(uuid)
            if codes is None:
                return None
            return XidCounts(tuple((*key, *counted) for key, counted in sorted(codes.items())))


class NoGpuAnswers(Exception):
    """No GPU answers, so the exporter cannot register for events."""

    def __init__(self) -> None:
        super().__init__("no GPU answers, so the exporter cannot register for XID events")


class EventLoop(Worker):
    """Registers for XID events, counts them, and registers again after an error. Ends within WAIT_S after a request."""

    def __init__(
        self,
        open_watch: Callable[[], EventWatch],
        book: XidBook,
        clock: Clock,
        changed: Callable[[], None],
        task: Task | None = None,
    ) -> None:
        super().__init__("events", task or Task("events", LATE_S))
        self.outcome: CollectorOutcome | None = None
        self._open_watch = open_watch
        self._book = book
        self._clock = clock
        self._changed = changed
        self._repeats: Repeats[XidEvent] = Repeats(clock)

    def _run(self) -> None:
        while not self._stop.is_set():
            with self.task:
                begin = self._clock.monotonic()
                try:
                    watch = self._open_watch()
                except NotSupported:
                    self.outcome = CollectorOutcome("xid", True, self._clock.monotonic() - begin)
                    break  # no GPU of this host supports events: no data
                except Exception as exc:
                    self._fail(exc, begin)
                else:
                    for uuid in watch.covered:
                        self._book.watch(uuid)
                    error = "" if watch.complete else "nvmlDeviceRegisterEvents failed on some GPUs"
                    self.outcome = CollectorOutcome("xid", watch.complete, self._clock.monotonic() - begin, error)
                    self._changed()
                    self._listen(watch, begin)
                    self._drain(watch)
                    watch.close()
                    continue
            self._clock.wait(self._stop, RETRY_S)
        self.task.rest()

    def _listen(self, watch: EventWatch, begin: float) -> None:
        """Counts events until a stop is requested, the driver fails, or failed registrations must be retried."""
        while not self._stop.is_set():
            if not watch.complete and self._clock.monotonic() - begin > RETRY_S:
                return
            with self.task:
                try:
                    event = watch.wait(WAIT_S)
                except Exception as exc:
                    self._fail(exc, begin)
                    self._clock.wait(self._stop, RETRY_S)
                    return
                if event is not None:
                    self._count(event)
                for repeated, times in self._repeats.take_due():
                    log.warning("%s, %d times since this was last logged", _describe(repeated), times)

    def _drain(self, watch: EventWatch) -> None:
        """Counts the events that are still in the driver's queue. The end of the registration would lose them."""
        try:
            while (event := watch.wait(0.0)) is not None:
                self._count(event)
        except Exception as exc:  # the registration ends in any case
            self._note_bug(exc)
            log.debug("cannot read the queued events: %s", exc)

    def _count(self, event: XidEvent) -> None:
        self._book.count(event, self._clock.wall(), self._clock.monotonic())
        if self._repeats.is_due(event):
            log.warning("%s", _describe(event))
        self._changed()

    def _note_bug(self, exc: Exception) -> None:
        if not isinstance(exc, DeviceError | NoGpuAnswers):
            self.task.note(exc)

    def _fail(self, exc: Exception, begin: float) -> None:
        self._note_bug(exc)
        if self.outcome is None or self.outcome.success:
            log.warning("XIDs are not counted until a retry succeeds: %s", exc)
        error = f"{exc.call} {exc.error}" if isinstance(exc, DeviceError) else f"{type(exc).__name__}: {exc}"
        if isinstance(exc, NoGpuAnswers):
            error = str(exc)
        self.outcome = CollectorOutcome("xid", False, self._clock.monotonic() - begin, error)


def _describe(event: XidEvent) -> str:
    return f"gpu {event.uuid}: XID {event.xid} ({classify(event.xid)})"
