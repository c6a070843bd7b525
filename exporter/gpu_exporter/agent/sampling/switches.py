"""Counts SXids, the error codes of NVSwitches. Only the kernel's log reports them on the hosts of the switches."""

from __future__ import annotations

import logging
import math
import threading

from gpu_exporter.agent.devices.kmsg import SwitchReport
from gpu_exporter.common.model.readings import SxidCount

log = logging.getLogger(__name__)
SAME_S = 2.0  # records of one error follow each other within microseconds
COUNTS_MAX = 500  # switches times codes; a host has at most 12 switches, and no switch shows many codes


class SxidBook:
    """Counts SXids by switch, code and severity. Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[SwitchReport, tuple[int, float]] = {}
        self._seen: dict[tuple[str, int], float] = {}  # when the last record of a switch and code was read
        self._is_full = False

    def count(self, report: SwitchReport, wall: float, monotonic: float) -> bool:
        """Counts a report, unless it only gives details of an error that was counted. Returns whether it was counted.

        A detail without its error (whose record was overwritten) counts as an error of unknown severity.
        """
        code = report.address, report.sxid
        key = report._replace(is_detail=False)
        with self._lock:
            is_told = report.is_detail and monotonic - self._seen.get(code, -math.inf) <= SAME_S
            if not is_told and key not in self._counts and len(self._counts) >= COUNTS_MAX:
                if not self._is_full:
                    self._is_full = True
                    text = "SXid %d of NVSwitch %s is not counted: the limit of %d different SXids is reached"
                    log.warning(text, report.sxid, report.address, COUNTS_MAX)
                return False
            self._seen[code] = monotonic
            if is_told:
                return False
            self._counts[key] = (self._counts.get(key, (0, 0.0))[0] + 1, wall)
            return True

    def counts(self) -> tuple[SxidCount, ...]:
        """Returns how often each SXid was reported since the exporter started."""
        with self._lock:
            return tuple(
                SxidCount(key.address, key.sxid, key.severity, *counted)
                for key, counted in sorted(self._counts.items())
            )
