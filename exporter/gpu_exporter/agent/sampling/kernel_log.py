"""Counts SXids, and XIDs for which the driver raises no event, from the kernel's log, in a separate thread."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.agent.collectors.xid import classify
from gpu_exporter.agent.devices.kmsg import KernelLog, Report, SwitchReport, XidLine
from gpu_exporter.agent.devices.protocol import XidEvent
from gpu_exporter.agent.sampling.activity.repeats import Repeats
from gpu_exporter.agent.sampling.events import XidBook
from gpu_exporter.agent.sampling.switches import SxidBook
from gpu_exporter.agent.sampling.worker import Worker
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.readings import CollectorOutcome
from gpu_exporter.common.tasks import Task

log = logging.getLogger(__name__)
NAME = "xid.kmsg"
LOOK_S = 0.5  # how often the log is read
SAME_S = 2.0  # an event with the same code of the same GPU within this time is the same XID
RETRY_S = 30.0  # after the log could not be opened or read
LATE_S = 120.0  # without a turn
WAITING_MAX = 1000  # lines that wait for their event; beyond this limit the oldest line is counted at once
STRANGERS_MAX = 100  # addresses without a known GPU that are logged


class _WaitingReport(NamedTuple):
    """The report of a line in the kernel's log, and when the line was read (monotonic and Unix seconds)."""

    report: Report
    monotonic: float
    wall: float


class KernelLogLoop(Worker):
    """Reads the kernel's log. Counts an XID if the driver raises no event for it within SAME_S.

    `switches`: the SXids, which have no event.
    """

    def __init__(
        self,
        path: Path,
        book: XidBook,
        list_gpus: Callable[[], Mapping[str, str]],
        clock: Clock,
        changed: Callable[[], None],
        note_probes: Callable[[frozenset[str]], None] = lambda addresses: None,
    ) -> None:
        """`list_gpus`: returns the UUID of every known GPU, also of lost GPUs, by PCI slot (devices.kmsg.slot_of).

        `note_probes`: called with the PCI addresses of GPUs that the driver could not start in this boot.
        """
        self._note_probes = note_probes
        self._counted: dict[XidLine, float] = {}  # when each line of the last SAME_S was last read
        super().__init__("kernel-log", Task("kernel-log", LATE_S))
        self.outcome: CollectorOutcome | None = None
        self._path = path
        self._book = book
        self.switches = SxidBook()
        self._list_gpus = list_gpus
        self._clock = clock
        self._changed = changed
        self._waiting: deque[_WaitingReport] = deque()
        self._strangers: set[str] = set()
        self._repeats: Repeats[XidEvent | SwitchReport | None] = Repeats(clock)  # None: overwritten records

    def _run(self) -> None:
        while not self._stop.is_set():
            with self.task:
                begin = self._clock.monotonic()
                try:
                    with contextlib.closing(KernelLog(self._path)) as kernel_log:
                        self._follow(kernel_log)
                except OSError as exc:
                    self._fail(exc, begin)
            self._clock.wait(self._stop, RETRY_S)

    def _follow(self, kernel_log: KernelLog) -> None:
        """Reads the log until a stop is requested. Raises OSError if the log can no longer be read."""
        with contextlib.suppress(OSError):  # a pipe has no past records
            self._note(kernel_log.read_past())
        while not self._stop.is_set():
            self.task.turn()
            if not self.look(kernel_log):
                self._clock.wait(self._stop, LOOK_S)

    def look(self, kernel_log: KernelLog) -> bool:
        """Reads new lines, and counts the XIDs that have waited SAME_S. Returns whether more lines may follow.

        Raises OSError.
        """
        begin = self._clock.monotonic()
        batch = kernel_log.read()
        now, wall = self._clock.monotonic(), self._clock.wall()
        self.outcome = CollectorOutcome(NAME, True, now - begin)
        if batch.lost:
            self._warn(None)
        for report in batch.reports:
            if isinstance(report, Report):
                self._waiting.append(_WaitingReport(report, now, wall))
            elif self.switches.count(report, wall, now):
                self._warn(report)
                self._changed()
        self._note(batch.probes)
        self._count_due(now)
        for repeated, times in self._repeats.take_due():
            log.warning("%s, %d times since this was last logged", self._describe(repeated), times)
        return batch.full

    def _note(self, probes: frozenset[str]) -> None:
        if probes:
            self._note_probes(probes)
            self._changed()

    def _count_due(self, now: float) -> None:
        gpus = self._list_gpus()
        for uuid in gpus.values():
            self._book.watch(uuid)
        while self._waiting and (self._waiting[0].monotonic <= now - SAME_S or len(self._waiting) > WAITING_MAX):
            self._count(self._waiting.popleft(), gpus)

    def _count(self, entry: _WaitingReport, gpus: Mapping[str, str]) -> None:
        address, xid = entry.report.line
        if not entry.report.has_number and self._is_told_twice(entry):
            return
        self._counted = {key: at for key, at in self._counted.items() if entry.monotonic - at <= SAME_S}
        self._counted[entry.report.line] = entry.monotonic
        uuid = gpus.get(address)
        if uuid is None:
            if address not in self._strangers and len(self._strangers) < STRANGERS_MAX:
                self._strangers.add(address)
                log.warning("%s: XID %d is not counted: %s is not a known GPU", self._path, xid, address)
            return
        event = XidEvent(uuid, xid, entry.report.severity)
        if self._book.count_line(event, entry.wall, since=entry.monotonic - SAME_S):
            self._warn(event)
            self._changed()

    def _is_told_twice(self, entry: _WaitingReport) -> bool:
        """Returns whether another line reports the same XID at most SAME_S before or after this line."""
        line = entry.report.line
        if entry.monotonic - self._counted.get(line, -math.inf) <= SAME_S:
            return True
        return any(other.report.line == line and other.monotonic - entry.monotonic <= SAME_S for other in self._waiting)

    def _warn(self, subject: XidEvent | SwitchReport | None) -> None:
        if self._repeats.is_due(subject):
            log.warning("%s", self._describe(subject))

    def _describe(self, subject: XidEvent | SwitchReport | None) -> str:
        if subject is None:
            return (
                f"{self._path}: the kernel overwrote records before the exporter read them; the XIDs in them are "
                "not counted"
            )
        if isinstance(subject, SwitchReport):
            severity = {"nonfatal": "not fatal", "unknown": "severity unknown"}.get(subject.severity, subject.severity)
            return f"NVSwitch {subject.address}: SXid {subject.sxid} ({severity}), reported by the kernel's log"
        kind = classify(subject.xid, subject.severity)
        return f"gpu {subject.uuid}: XID {subject.xid} ({kind}), reported by the kernel's log"

    def _fail(self, exc: OSError, begin: float) -> None:
        if self.outcome is None or self.outcome.success:
            log.warning(
                "cannot read %s as uid %d: %s; XIDs without an NVML event are not counted; grant CAP_SYSLOG "
                "(container: privileged, with the device), or omit --collector.xid.kmsg",
                self._path,
                os.getuid(),
                exc.strerror,
            )
        error = f"{self._path}: {exc.strerror}"
        self.outcome = CollectorOutcome(NAME, False, self._clock.monotonic() - begin, error)
        self._changed()
