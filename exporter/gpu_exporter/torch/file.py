"""Writes the report where the exporter looks for it: rarely, whole or not at all, and never slowly."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "GPU_EXPORTER_TRAINING_DIR"
DEFAULT = Path("/run/gpu-exporter/training")  # in Kubernetes an emptyDir; in Slurm with a folder for each job
INTERVAL_S = 10.0
INTERVAL_MAX_S = 600.0
COST_MAX = 0.001  # share of the loop's time that writing may take
READABLE = 0o644
OLD_S = 3600.0  # files of processes that ended longer ago are removed


def find_directory() -> Path | None:
    """The folder of this job's reports; None if the site has none: then no file is written."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named and Path(named).is_dir() else None
    job = os.environ.get("SLURM_JOB_ID", "")
    if job.isascii() and job.isdecimal():
        return DEFAULT / job if (DEFAULT / job).is_dir() else None
    return DEFAULT if DEFAULT.is_dir() else None


class ReportFile:
    """One file. Only the process that made this object writes it, not the workers that it forks."""

    def __init__(self, directory: Path, run: str) -> None:
        self._directory, self._run = directory, run
        self._pid = os.getpid()
        self._due = time.monotonic()
        self._interval_s = INTERVAL_S
        self._path: Path | None = None
        self._last: Mapping[str, Any] | None = None

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def write(self, report: Mapping[str, Any]) -> None:
        """Raises OSError. Slow storage is written to less often."""
        if os.getpid() != self._pid:
            return
        began = time.monotonic()
        name = f"run-{self._run}.json"
        if self._path is None:
            self._remove_old()
        self._path, self._last = self._directory / name, report
        fresh = self._directory / f".{name}.{self._run}"
        fresh.unlink(missing_ok=True)
        handle = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            os.fchmod(handle, READABLE)  # whatever the umask: the exporter may run as another user
            json.dump({**report, "interval_seconds": self._interval_s}, file, allow_nan=False)
        fresh.replace(self._path)
        now = time.monotonic()
        self._interval_s = min(INTERVAL_MAX_S, max(INTERVAL_S, (now - began) / COST_MAX))
        self._due = now + self._interval_s

    def end(self) -> None:
        """Write that nothing follows, unless the last report has it already. Raises nothing."""
        if self._last is not None and self._last["state"] != "ended":
            with contextlib.suppress(Exception):  # it may run while the interpreter ends
                self.write({**self._last, "state": "ended"})

    def _remove_old(self) -> None:
        """Remove what earlier processes left here, so that restarts do not fill the folder."""
        before = time.time() - OLD_S
        for path in self._directory.glob("run-*.json"):
            try:
                if path.lstat().st_mtime < before:
                    path.unlink()
            except OSError:
                continue
