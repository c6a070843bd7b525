"""Reads the reports of training loops. The files are not trusted: a job may write anything, even links and pipes.

A pod writes into its own emptyDir, below the kubelet's folder for the pod's UID. A Slurm job writes into its own
folder, which the prolog creates with the job's id as its name. So the folder of a file identifies its owner; the
content never does. Each component of the path is opened without following links. Only a regular file with one hard link
counts; in Slurm, it must belong to the folder's owner. The reader never waits for a job: it skips a file on which the
job holds a lease, and a folder on a file system that may never answer (mounts.py). If a folder still does not answer,
its thread keeps waiting, and a new reader reads the other folders.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.files import open_regular, read_named, read_within
from gpu_exporter.common.model.holders import Who
from gpu_exporter.common.model.training import RankReport
from gpu_exporter.common.report_rules import FILES_MAX, SIZE_MAX
from gpu_exporter.diagnosis.training.mounts import ForeignMount, find_foreign, list_foreign
from gpu_exporter.diagnosis.training.reports import parse_report

log = logging.getLogger(__name__)
VOLUME = "gpu-exporter-training"  # name of the emptyDir in the pod's manifest
IN_POD = ("volumes", "kubernetes.io~empty-dir", VOLUME)
FILE = re.compile(r"(?:rank-[0-9]{1,6}|run-[0-9a-z]{1,32})\.json")
POD_UID = re.compile(r"[0-9a-fA-F-]{32,36}")
JOB_ID = re.compile(r"[1-9][0-9]{0,17}")
BYTES_MAX = 262_144  # of all files of a holder together; a report of the hook is below 2,000
NAMES_MAX = 512  # entries of a holder's folder that are checked
OLD_S = 24 * 3600.0  # older files belong to trainings that have ended or are no longer observed
INTERVAL_S = 15.0
SLACK_S = 1.0
CPU_SHARE = 0.002  # of one CPU, for all holders together
STUCK_S = 60.0  # after this time, the folder of one holder does not answer
LEFT_MAX = 2  # readers that are left behind; each is a thread that waits in the kernel
MOUNTS_MAX = 16 * 2**20  # bytes of the mount table
SAID_MAX = 8  # different reasons of one holder that are logged
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class TrainingPlaces(NamedTuple):
    """The places of the reports.

    `pods`: the kubelet's folder of pods. `jobs`: the parent of the folders that the prolog creates for jobs. `mounts`:
    the mount table.
    """

    pods: Path
    jobs: Path
    mounts: Path = Path("/proc/self/mountinfo")


class TrainingFiles(NamedTuple):
    """The reports of one holder at `monotonic` (seconds). `problem`: why a file was refused, "" if all are valid."""

    monotonic: float
    reports: tuple[RankReport, ...]
    problem: str = ""


class _FolderRead:
    """A holder's folder that is being read. `since`: start (monotonic seconds). `is_said`: a warning was logged."""

    def __init__(self, who: Who, since: float) -> None:
        self.who, self.since, self.is_said = who, since, False


class TrainingReader:
    """Reads every holder's files, at intervals of at least INTERVAL_S.

    All holders together cost at most CPU_SHARE of a CPU, divided equally. A holder whose files cost more is read less
    often; the others are not affected.
    """

    def __init__(self, places: TrainingPlaces, clock: Clock) -> None:
        self._places, self._clock = places, clock
        self._due = -math.inf  # monotonic
        self._said: dict[Who, set[str]] = {}
        self._rests: dict[Who, float] = {}  # until when a holder whose files cost much is not read, monotonic
        self._foreign: Sequence[ForeignMount] = ()
        self._lock = threading.Lock()  # of the next two
        self._reading: _FolderRead | None = None
        self._left: list[_FolderRead] = []  # by readers that were left behind

    def read(self, holders: Iterable[Who]) -> Iterator[tuple[Who, TrainingFiles]]:
        """Yields the reports of each holder that has any; nothing before the next reading is due.

        Ends if this reader has been left behind. Raises OSError if the mount table cannot be read.
        """
        now = self._clock.monotonic()
        if now < self._due:
            return
        self._due = now + INTERVAL_S - SLACK_S
        whos = list(dict.fromkeys(holders))
        self._rests = {who: until for who, until in self._rests.items() if until > now and who in whos}
        self._said = {who: text for who, text in self._said.items() if who in whos}
        self._foreign = list_foreign(read_named(self._places.mounts, MOUNTS_MAX)) if whos else ()
        for who in whos:
            if who in self._rests or any(who == left.who for left in self._left):
                continue
            began = time.thread_time()
            self._reading = reading = _FolderRead(who, self._clock.monotonic())
            found = self._try(who)
            if not self._end(reading):
                return
            spent_s = time.thread_time() - began
            if (rest_s := spent_s * len(whos) / CPU_SHARE) > INTERVAL_S:
                self._rests[who] = now + rest_s
            if found is None:
                continue
            self._say(who, found.problem)
            if found.reports:
                yield who, found

    def _end(self, reading: _FolderRead) -> bool:
        """Notes that a folder has answered. Returns False if its reader has been left behind."""
        with self._lock:
            if self._reading is reading:
                self._reading = None
                return True
            self._left.remove(reading)
            return False

    def leave_behind(self) -> bool:
        """Gives up the present reader if its folder has not answered for STUCK_S. Returns whether it gave up the
        reader.

        The caller then starts another reader, which skips this folder until the folder answers.
        """
        with self._lock:
            reading = self._reading
            if reading is None or self._clock.monotonic() - reading.since < STUCK_S:
                return False
            is_left = len(self._left) < LEFT_MAX
            if not reading.is_said:
                reading.is_said = True
                effect = "the exporter skips it until it answers"
                if not is_left:
                    until = "until one of them does, the exporter reads no reports of any job"
                    effect = f"{LEFT_MAX + 1} folders do not answer now, and {until}"
                log.warning(
                    "training of %s %s: its folder has not answered for %g s: %s", *reading.who, STUCK_S, effect
                )
            if is_left:
                self._reading = None
                self._left.append(reading)
            return is_left

    def _say(self, who: Who, problem: str) -> None:
        """Logs each problem of a holder once, because several files may be refused in turn."""
        said = self._said.setdefault(who, set())
        if problem and problem not in said and len(said) < SAID_MAX:
            said.add(problem)
            log.warning("training of %s %s: %s", *who, problem)

    def _try(self, who: Who) -> TrainingFiles | None:
        try:
            root, parts = self._find(who)
            below = [os.fsencode(part) for part in parts]
            if kind := find_foreign(self._foreign, os.fsencode(os.path.realpath(root)), below):
                problem = f"the exporter does not read its folder, because {kind} is mounted there and may never answer"
                return TrainingFiles(self._clock.monotonic(), (), problem)
            folder = _open_below(root, parts)
        except FileNotFoundError:
            return None  # the holder is not observed
        except OSError as exc:
            return TrainingFiles(self._clock.monotonic(), (), f"the folder cannot be read: {exc.strerror}")
        try:
            return self._read_folder(folder, is_job=who[0] == "job")
        except OSError as exc:
            return TrainingFiles(self._clock.monotonic(), (), f"the folder cannot be read: {exc.strerror}")
        except Exception:  # a bug that one holder's file shows must not cost the others
            log.exception("cannot read the training reports of a holder")
            return None
        finally:
            os.close(folder)

    def _find(self, who: Who) -> tuple[Path, Sequence[str]]:
        """The folder of a holder's reports, as a root and the parts of the path below it.

        Raises FileNotFoundError for a holder that cannot have such a folder, OSError for other errors.
        """
        kind, name = who
        if kind == "pod" and POD_UID.fullmatch(name):
            return self._places.pods, (name, *IN_POD)
        if kind == "job" and JOB_ID.fullmatch(name):
            parent = os.open(self._places.jobs, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                _refuse_strangers(os.fstat(parent))
            finally:
                os.close(parent)
            return self._places.jobs, (name,)
        raise FileNotFoundError(name)

    def _read_folder(self, folder: int, *, is_job: bool) -> TrainingFiles:
        owner = os.fstat(folder).st_uid if is_job else None
        names: list[tuple[float, str]] = []
        problem, wall = "", time.time()
        with os.scandir(folder) as entries:
            for number, entry in enumerate(entries):
                if number >= NAMES_MAX:
                    problem = f"its folder has more than {NAMES_MAX} entries; the others are ignored"
                    break
                if FILE.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):  # replaced at this moment
                        names.append((entry.stat(follow_symlinks=False).st_mtime, entry.name))
        names.sort(reverse=True)
        if len(names) > FILES_MAX:
            problem = f"more than {FILES_MAX} reports; only the newest are used"
        reports: list[RankReport] = []
        left = BYTES_MAX
        for _, name in names[:FILES_MAX]:
            try:
                data, age_s = _read(folder, name, owner, wall)
                left -= len(data)
                if left < 0:
                    problem = problem or f"more than {BYTES_MAX} bytes of reports; only the newest are used"
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
    """The newest report of each rank. `reports`: sorted, the newest first.

    Two trainings of one job may use the same rank numbers on different GPUs; these are different ranks.
    """
    found: dict[tuple[object, ...], RankReport] = {}
    for report in reports:
        is_rank = report.rank is not None and (report.world_size or 0) > 1
        found.setdefault((report.rank, report.world_size, report.gpus) if is_rank else (report.run,), report)
    return tuple(found.values())


def _open_below(root: Path, parts: Sequence[str]) -> int:
    """Opens a folder below `root` without following a link. Raises OSError."""
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in parts:
        try:
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=handle)
        finally:
            os.close(handle)
        handle = below
    return handle


def _refuse_strangers(status: os.stat_result) -> None:
    """Raises PermissionError if users other than root and the exporter's could have created the jobs' folders."""
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & OTHERS_WRITE:
        raise PermissionError(1, "users other than root can write to the parent of the jobs' folders: chmod go-w")


def _read(folder: int, name: str, owner: int | None, wall: float) -> tuple[bytes, float]:
    """Reads a file: its content, and its age in seconds. `owner`: uid of the owner, None to allow any owner.

    Raises OSError, or ValueError if it is not a plain file of the job.
    """

    def is_of_job(status: os.stat_result) -> None:
        if status.st_nlink != 1:
            raise ValueError(f"it has {status.st_nlink} hard links, so it may be another user's file")
        if owner is not None and status.st_uid != owner:
            raise ValueError("it does not belong to the job's user")

    with open_regular(name, is_of_job, directory=folder) as file:
        age_s = wall - os.fstat(file.fileno()).st_mtime
        return read_within(file, name, SIZE_MAX), age_s
