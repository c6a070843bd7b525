"""Reads the files in which jobs describe their training. A job may write anything there, also links and pipes.

A pod writes into an emptyDir of its own, which lies below the kubelet's folder of pods, named by the pod's UID. A Slurm
job writes into a folder of its own, which the prolog makes and names by the job's id. So whose file it is follows from
where it lies, never from what it says. Each part of the way is opened without following a link; only a regular file
with one link counts, of the folder's owner in Slurm. A file on which the job holds a lease is refused, since
nothing here waits for a job.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.holders import Who
from gpu_exporter.common.model.training import RankReport
from gpu_exporter.common.report_rules import FILES_MAX, SIZE_MAX
from gpu_exporter.diagnosis.training.reports import parse_report

log = logging.getLogger(__name__)
VOLUME = "gpu-exporter-training"  # name of the emptyDir in the pod's manifest
IN_POD = ("volumes", "kubernetes.io~empty-dir", VOLUME)
FILE = re.compile(r"(?:rank-[0-9]{1,6}|run-[0-9a-z]{1,32})\.json")
POD_UID = re.compile(r"[0-9a-fA-F-]{32,36}")
JOB_ID = re.compile(r"[1-9][0-9]{0,17}")
BYTES_MAX = 262_144  # of all its files together: a report of the hook has less than 2,000
NAMES_MAX = 512  # entries of its folder that are looked at
OLD_S = 24 * 3600.0  # older files are of trainings that have ended, or are no longer observed
INTERVAL_S = 15.0
SLACK_S = 1.0
CPU_SHARE = 0.002  # of one CPU, for all holders together
SAID_MAX = 8  # different reasons of one holder that are logged
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class TrainingPlaces(NamedTuple):
    """`pods`: the kubelet's folder of pods. `jobs`: where the prolog makes a folder for each job."""

    pods: Path
    jobs: Path


class TrainingFiles(NamedTuple):
    """The reports of one holder at `monotonic`. `problem`: why a file was refused, without its content; "" if none."""

    monotonic: float
    reports: tuple[RankReport, ...]
    problem: str = ""


class TrainingReader:
    """Reads every holder's files, at least INTERVAL_S apart. All holders together cost at most CPU_SHARE of a CPU: a
    holder whose files cost more than its part is read less often, and costs the others nothing.
    """

    def __init__(self, places: TrainingPlaces, clock: Clock) -> None:
        self._places, self._clock = places, clock
        self._due = -math.inf  # monotonic
        self._said: dict[Who, set[str]] = {}
        self._rests: dict[Who, float] = {}  # until when a holder whose files cost much is not read, monotonic

    def read(self, holders: Iterable[Who]) -> Iterator[tuple[Who, TrainingFiles]]:
        """The files of each holder that has some. Nothing before the next look is due."""
        now = self._clock.monotonic()
        if now < self._due:
            return
        self._due = now + INTERVAL_S - SLACK_S
        whos = list(dict.fromkeys(holders))
        self._rests = {who: until for who, until in self._rests.items() if until > now and who in whos}
        self._said = {who: text for who, text in self._said.items() if who in whos}
        for who in whos:
            if who in self._rests:
                continue
            began = time.thread_time()
            found = self._try(who)
            spent_s = time.thread_time() - began
            if (rest_s := spent_s * len(whos) / CPU_SHARE) > INTERVAL_S:
                self._rests[who] = now + rest_s
            if found is None:
                continue
            self._say(who, found.problem)
            if found.reports:
                yield who, found

    def _say(self, who: Who, problem: str) -> None:
        """Log each reason of a holder once: several files may be refused in turn."""
        said = self._said.setdefault(who, set())
        if problem and problem not in said and len(said) < SAID_MAX:
            said.add(problem)
            log.warning("training of %s %s: %s", *who, problem)

    def _try(self, who: Who) -> TrainingFiles | None:
        try:
            folder = self._open(who)
        except FileNotFoundError:
            return None  # the holder is not observed
        except OSError as exc:
            return TrainingFiles(self._clock.monotonic(), (), f"the folder cannot be read: {exc.strerror}")
        try:
            return self._read_folder(folder, is_job=who[0] == "job")
        except OSError as exc:
            return TrainingFiles(self._clock.monotonic(), (), f"the folder cannot be read: {exc.strerror}")
        except Exception:  # a bug that one holder's file shows must not cost the others
            log.exception("cannot read the training of a holder")
            return None
        finally:
            os.close(folder)

    def _open(self, who: Who) -> int:
        """The open folder of a holder. Raises OSError; FileNotFoundError if it has none."""
        kind, name = who
        if kind == "pod" and POD_UID.fullmatch(name):
            return _open_below(self._places.pods, (name, *IN_POD))
        if kind == "job" and JOB_ID.fullmatch(name):
            parent = os.open(self._places.jobs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _refuse_strangers(os.fstat(parent))
            finally:
                os.close(parent)
            return _open_below(self._places.jobs, (name,))
        raise FileNotFoundError(name)

    def _read_folder(self, folder: int, *, is_job: bool) -> TrainingFiles:
        owner = os.fstat(folder).st_uid if is_job else None
        names: list[tuple[float, str]] = []
        problem, wall = "", time.time()
        with os.scandir(folder) as entries:
            for number, entry in enumerate(entries):
                if number >= NAMES_MAX:
                    problem = f"more than {NAMES_MAX} files"
                    break
                if FILE.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):  # replaced at this moment
                        names.append((entry.stat(follow_symlinks=False).st_mtime, entry.name))
        names.sort(reverse=True)
        if len(names) > FILES_MAX:
            problem = f"more than {FILES_MAX} reports; the newest count"
        reports: list[RankReport] = []
        left = BYTES_MAX
        for _, name in names[:FILES_MAX]:
            try:
                data, age_s = _read(folder, name, owner, wall)
                left -= len(data)
                if left < 0:
                    problem = problem or f"more than {BYTES_MAX} bytes of reports; the newest count"
                    break
                report = parse_report(data, age_s, name.removesuffix(".json"))
            except FileNotFoundError:  # replaced at this moment
                continue
            except (OSError, ValueError) as exc:
                reason = exc.strerror if isinstance(exc, OSError) else str(exc)
                problem = problem or f"{name} is ignored: {reason}"
                continue
            if report.age_s < OLD_S:
                reports.append(report)
        return TrainingFiles(self._clock.monotonic(), _newest(reports), problem)


def _newest(reports: Sequence[RankReport]) -> tuple[RankReport, ...]:
    """One report of each rank: of two, the one that was written last. `reports`: the newest first.

    Two trainings of a job have ranks of the same number, on other GPUs.
    """
    found: dict[tuple[object, ...], RankReport] = {}
    for report in reports:
        is_rank = report.rank is not None and (report.world_size or 0) > 1
        found.setdefault((report.rank, report.world_size, report.gpus) if is_rank else (report.run,), report)
    return tuple(found.values())


def _open_below(root: Path, parts: Sequence[str]) -> int:
    """Open a folder below `root` without following a link. Raises OSError."""
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in parts:
        try:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
        finally:
            os.close(handle)
        handle = below
    return handle


def _refuse_strangers(status: os.stat_result) -> None:
    """Raise PermissionError if others than root or the exporter's user could have made the jobs' folders."""
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & OTHERS_WRITE:
        raise PermissionError(1, "others than root may write where the jobs' folders are made: chmod go-w")


def _read(folder: int, name: str, owner: int | None, wall: float) -> tuple[bytes, float]:
    """The content and age of a file. Raises OSError; ValueError unless it is a plain file of the job. `owner`: the only
    uid whose file counts, None for any.
    """
    # Opening a device may act on it, so the file is looked at before it is opened.
    handle = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_nlink != 1:
            raise ValueError(f"it has {status.st_nlink} links, so it may be another user's file")
        if owner is not None and status.st_uid != owner:
            raise ValueError("it belongs to another user than the job")
        if status.st_size > SIZE_MAX:
            raise ValueError(f"longer than {SIZE_MAX} bytes")
        try:
            opened = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except BlockingIOError as exc:  # fcntl(2): without O_NONBLOCK, open would wait for lease-break-time, 45 s
            raise ValueError("its job holds a lease on it") from exc
        with os.fdopen(opened, "rb") as file:
            return file.read(SIZE_MAX + 1), wall - status.st_mtime
    finally:
        os.close(handle)
