"""Slurm's commands answered from memory, in the formats of two releases: a JobMarker for tests without a controller."""

from __future__ import annotations

import json
from typing import Any

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.reconciler.decision.policy import LABEL
from gpu_exporter.reconciler.marks import MarkError
from gpu_exporter.reconciler.slurm import marker as jobs
from gpu_exporter.reconciler.slurm.live import FIELDS

CONFIG = "ClusterName             = lab\n"


def row_of_22_05(**fields: Any) -> dict[str, Any]:
    """A job as squeue 22.05.8 prints it: plain numbers."""
    row = {"job_id": 7, "array_job_id": 0, "array_task_id": None, "job_state": "RUNNING", "start_time": 1_799_991_000}
    return {**row, "restart_cnt": 1, "comment": None, **fields}


def row_of_24_11(**fields: Any) -> dict[str, Any]:
    """A job as squeue 24.11.5 prints it: numbers that may be unset, states as a list."""

    def number(value: int, given: bool = True) -> dict[str, Any]:
        return {"set": given, "infinite": False, "number": value}

    row = {"job_id": 7, "array_job_id": number(0), "array_task_id": number(0, False), "job_state": ["RUNNING"]}
    return {**row, "start_time": number(1_799_991_000), "restart_cnt": 1, "extra": "", **fields}


class MemorySlurm(jobs.JobMarker):
    """Jobs 1 to 50, each with the same text. `calls`: the first two words of every command."""

    def __init__(
        self,
        release: str = "24.11.5",
        settings: str = CONFIG,
        text: str = f"{LABEL}=underused;since=x",
        field: str = "",
    ) -> None:
        """`field`: as in JobMarker; by default the field with the text. `denied`: fields that may not be written."""
        self.denied: set[str] = set()
        self.slow_s = 0.0  # time that each command takes
        self.release, self.settings = release, settings
        make, own = (row_of_22_05, "Comment") if release.startswith("22") else (row_of_24_11, "Extra")
        self.own = own
        self.rows = [make(job_id=i, **{FIELDS[own]: text}) for i in range(1, 51)]
        self.calls: list[str] = []
        self.clock = ManualClock()
        super().__init__(self.clock, Policy(), field or own)

    def text(self, job_id: int, field: str = "") -> str:
        """The content of a field of this job."""
        row = next(row for row in self.rows if row["job_id"] == job_id)
        return str(row.get(FIELDS[field or self.own]) or "")

    def _run(self, *command: str) -> str:
        self.calls.append(" ".join(command[:2]))
        self.clock.advance(self.slow_s)
        if command[0] == "squeue":  # 22.05 returns all jobs for every request
            asked = command[command.index("--jobs") + 1] if "--jobs" in command else ""
            every = not asked or self.release.startswith("22")
            return json.dumps({"jobs": [row for row in self.rows if every or str(row["job_id"]) == asked]})
        if command[1] == "update":
            job, *texts = (word.partition("=") for word in command[2:])
            if denied := self.denied.intersection(field for field, _, _ in texts):
                raise MarkError("error", f"Access/permission denied for job {job[2]} {denied}")
            row = next(row for row in self.rows if str(row["job_id"]) == job[2])
            row.update({FIELDS[field]: text for field, _, text in texts})
            return ""
        return f"slurm-wlm {self.release}\n" if "--version" in command else self.settings
