"""The HTTP endpoints of the reconciler: its own metrics, and probes."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from gpu_exporter.common.web.request import Request
from gpu_exporter.common.web.server import TEXT, Reply
from gpu_exporter.reconciler.evidence.records import EVIDENCE_S
from gpu_exporter.reconciler.telemetry import Telemetry

CYCLES_MISSED_MAX = 3  # intervals without the end of a cycle, in addition to the time of waiting for evidence


class ReconcilerSite:
    """The pages of the reconciler.

    The probe fails if no cycle has ended for too long, or if another task hangs. A cycle without evidence also counts:
    only the metrics show which cycles had evidence.
    """

    def __init__(self, telemetry: Telemetry, interval_s: float) -> None:
        self._telemetry = telemetry
        self._late_s = CYCLES_MISSED_MAX * interval_s + 2 * EVIDENCE_S

    def answer_at_once(self, request: Request) -> Reply | None:
        if request.path == "/-/healthy":
            age_s = self._telemetry.since_last_cycle_s()
            if age_s > self._late_s:
                text = f"no cycle has ended for {age_s:.0f} s, more than {self._late_s:.0f} s\n"
                return Reply(503, TEXT, text.encode())
            if late := self._telemetry.own.tasks.list_late():
                return Reply(503, TEXT, f"{late[0]}\n".encode())
            return Reply(200, TEXT, f"the last cycle ended {age_s:.0f} s ago\n".encode())
        if request.path == "/-/ready":
            return Reply(200, TEXT, b"ready\n")
        return None if request.path == "/metrics" else Reply(404, TEXT, b"no such page; try /metrics\n")

    def answer(self, request: Request) -> Reply:
        return Reply(200, CONTENT_TYPE_LATEST, generate_latest(self._telemetry.registry))
