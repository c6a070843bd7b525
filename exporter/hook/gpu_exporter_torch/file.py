"""Writes the report atomically, seldom, and at a bounded cost, to the place where the exporter reads it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpu_exporter_torch.report_rules import ENDED, FORMAT, INTERVAL_MAX_S, INTERVAL_S

VARIABLE = "GPU_EXPORTER_TRAINING_DIR"
DEFAULT = Path("/run/gpu-exporter/training")  # in Kubernetes an emptyDir; in Slurm with a folder for each job
COST_MAX = 0.001  # share of the loop's time that writing may take
READABLE = 0o644
OLD_S = 3600.0  # files of processes that ended longer ago are removed
OURS = re.compile(r"run-[0-9a-f]{16}\.json")
BEGINNING, HEAD = f'{{"format": "{FORMAT.partition("/")[0]}/'.encode("ascii"), 64  # of a report, in bytes


def find_directory() -> Path | None:
    """Returns the directory for this job's reports. None if the site provides none; no file is then written."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named and Path(named).is_dir() else None
    job = os.environ.get("SLURM_JOB_ID", "")
    if job.isascii() and job.isdecimal():
        return DEFAULT / job if (DEFAULT / job).is_dir() else None
    return DEFAULT if DEFAULT.is_dir() else None


class ReportFile:
    """One report file. Only the process that made this object writes it; forked workers do not."""

    def __init__(self, directory: Path, run: str) -> None:
        self._directory, self._run = directory, run
        self._pid = os.getpid()
        self._due = self._soon = time.monotonic()
        self._interval_s = INTERVAL_S
        self._path: Path | None = None
        self._last: Mapping[str, Any] | None = None

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def write(self, report: Mapping[str, Any]) -> None:
        """Writes the report. After a slow write, the next one is due later. Raises OSError."""
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
        self._due, self._soon = now + self._interval_s, now + (now - began) / COST_MAX

    def end(self) -> None:
        """Writes that the loop has ended, unless the last report already contains this. Never raises."""
        if self._last is not None and self._last["state"] != ENDED:
            with contextlib.suppress(Exception):  # it may run while the interpreter ends
                self.write({**self._last, "state": ENDED})

    def write_soon(self, make: Callable[[], Mapping[str, Any]]) -> None:
        """Writes before the file is due, unless this would take more than COST_MAX of the time since the last write.

        Raises OSError.
        """
        if time.monotonic() >= self._soon:
            self.write(make())

    def _remove_old(self) -> None:
        """Removes reports that earlier processes left here, because restarts would fill the directory. Other files of
        the user are kept.
        """
        before = time.time() - OLD_S
        for path in self._directory.glob("run-*.json"):
            try:
                if OURS.fullmatch(path.name) and path.lstat().st_mtime < before and BEGINNING in read_plain(path, HEAD):
                    path.unlink()
            except (OSError, ValueError):
                continue


def read_plain(path: Path, most: int) -> bytes:
    """Returns the beginning of a regular file. Never blocks: not on a pipe without a writer, and not on a file lease.

    Raises OSError; ValueError if it is not a regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        return file.read(most)
