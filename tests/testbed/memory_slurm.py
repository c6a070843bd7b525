"""Slurm's commands answered from memory, in the words of two releases: a JobMarker for tests without a controller."""

from __future__ import annotations

import json
from typing import Any

from gpu_exporter.clock import ManualClock
from gpu_exporter.defaults import Policy
from gpu_exporter.reconciler.policy import LABEL
from gpu_exporter.reconciler.slurm import marker as jobs

CONFIG = "ClusterName             = lab\n"


def row_of_22_05(**fields: Any) -> dict[str, Any]:
    """As squeue 22.05.8 prints it: plain numbers."""
    row = {"job_id": 7, "array_job_id": 0, "array_task_id": None, "job_state": "RUNNING", "start_time": 1_799_991_000}
    return {**row, "restart_cnt": 1, "comment": None, **fields}


def row_of_24_11(**fields: Any) -> dict[str, Any]:
    """As squeue 24.11.5 prints it: numbers that may be unset, states as a list."""

    def number(value: int, given: bool = True) -> dict[str, Any]:
        return {"set": given, "infinite": False, "number": value}

    row = {"job_id": 7, "array_job_id": number(0), "array_task_id": number(0, False), "job_state": ["RUNNING"]}
    return {**row, "start_time": number(1_799_991_000), "restart_cnt": 1, "extra": "", **fields}


class MemorySlurm(jobs.JobMarker):
    """Jobs 1 to 50, each with the same text. `calls`: the first two words of every command."""

    def __init__(
        self, release: str = "24.11.5", settings: str = CONFIG, text: str = f"{LABEL}=underused;since=x"
    ) -> None:
        self.release, self.settings = release, settings
        make, field = (row_of_22_05, "comment") if release.startswith("22") else (row_of_24_11, "extra")
        self.rows = [make(job_id=i, **{field: text}) for i in range(1, 51)]
        self.calls: list[str] = []
        self.clock = ManualClock()
        super().__init__(self.clock, Policy())

    def text(self, job_id: int) -> str:
        """What the field of this job holds."""
        return str(next(row for row in self.rows if row["job_id"] == job_id)[self.field.lower()])

    def _run(self, *command: str) -> str:
        self.calls.append(" ".join(command[:2]))
        if command[0] == "squeue":  # 22.05 answers with all jobs whatever is asked for
            asked = command[command.index("--jobs") + 1] if "--jobs" in command else ""
            every = not asked or self.release.startswith("22")
            return json.dumps({"jobs": [row for row in self.rows if every or str(row["job_id"]) == asked]})
        if command[1] == "update":
            job, text = (word.partition("=")[2] for word in command[2:])
            next(row for row in self.rows if str(row["job_id"]) == job)[self.field.lower()] = text
            return ""
        return f"slurm-wlm {self.release}\n" if "--version" in command else self.settings
