"""Reads the files of a site's prolog and epilog: they show which jobs hold GPUs of this node, without slurmctld.

The content of a file shows its layout:

- gpu-exporter (contrib/slurm): JOBID with lines `gpus=0,3` (SLURM_JOB_GPUS, positions) and `visible=...` (the prolog's
  CUDA_VISIBLE_DEVICES; its UUIDs count if it has any: since Slurm 25.11 with AutoDetect=nvml, and for MIG), and the
  job's data from the prolog's environment: mps (`yes`, or empty), user, uid, account, partition, cluster, restarts,
  start (since 23.02), nodes. Earlier versions of the prolog wrote fewer lines.
- plazonic/nvidia_gpu_prometheus_exporter and jobstats (/run/gpustat): GPU-<uuid>, MIG-<uuid> or a number, with `JOBID
  UID`.
- dcgm-exporter (--hpc-job-mapping-dir): GPU or GPU.INSTANCE, with one job id in each line. A number there is an index
  of the driver at the time of the prolog, so only UUIDs show the GPU. A number still shows that the job is here.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.common.files import open_regular, read_within
from gpu_exporter.common.outside import WHOLE_MAX, need_whole, whole
from gpu_exporter.common.slurm.hostlist import parse_ranges

DEFAULT_PLACE = Path("/run/gpu-exporter/jobs")
FILES_MAX = 1024  # jobs, or GPUs and instances, of a node; a prolog never writes more
ENDED = ".ended"  # subdirectory in which gpu-exporter's epilog keeps the files of the last jobs
Stamp: TypeAlias = "tuple[int, int]"
"""The state of a file: its inode, and when the inode was changed (ns)."""
READ_MAX = 4096  # bytes of one file
GPUS_MAX = 64  # more than any node has: a file with this or a higher number as its name belongs to a job
JOB = re.compile(r"[1-9][0-9]{0,17}")
UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]{1,100}")
NUMBER = re.compile(r"[0-9]{1,4}(?:[.:][0-9]{1,4})?")
ENDED_NAME = re.compile(r"(?:([1-9][0-9]{9})\.)?[1-9][0-9]{0,17}")
WORD = re.compile(r"[A-Za-z0-9._@+-]{1,128}")
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class FiledRun(NamedTuple):
    """The owner and the run of a job, from the prolog's environment.

    - `start`: Unix seconds of slurmctld's clock, None before Slurm 23.02.
    - `account`, `partition`: may be "".
    - `nodes`: number of the job's nodes.
    """

    user: str
    uid: str
    account: str
    partition: str
    cluster: str
    restarts: str
    start: float | None
    nodes: int


class JobFile(NamedTuple):
    """The prolog's record of one job.

    - `indexes`, `uuids`: positions (IDX) and UUIDs, in the same order; each may be missing.
    - `written_wall`, `began_wall`: when the file was written, and when the prolog ran (Unix seconds).
    - `run`: None if the record is incomplete.
    - `mps`: whether the job has parts of GPUs by MPS, None if the prolog did not write it.
    """

    indexes: tuple[int, ...] = ()
    uuids: tuple[str, ...] = ()
    written_wall: float = 0.0
    run: FiledRun | None = None
    began_wall: float | None = None
    mps: bool | None = None

    @property
    def start_wall(self) -> float:
        """The job's start in whole Unix seconds, as in Slurm: from slurmctld, otherwise the time of its prolog."""
        if self.run is not None and self.run.start is not None:
            return self.run.start
        return math.floor(self.written_wall) if self.began_wall is None else self.began_wall


class EndedJob(NamedTuple):
    """A job whose GPUs became free at `end_wall` (Unix seconds, whole if the epilog wrote them).

    - `number`: the number in the name of the epilog's file, 0 without a number.
    - `by_steps`: no epilog has reported the end. The job counts as ended because it no longer has a step.
    - `is_again`: an end of this run was already reported, by its steps.
    """

    job_id: str
    file: JobFile
    end_wall: float
    number: int = 0
    by_steps: bool = False
    is_again: bool = False

    @property
    def run(self) -> str:
        """The job id, restart count and start, which identify a run."""
        run, began = self.file.run, self.file.began_wall
        start = began if began is not None else run.start if run is not None else None
        return (
            f"{self.job_id}/{run.restarts if run is not None else ''}/{self.end_wall if start is None else start:.0f}"
        )


class Filed(NamedTuple):
    """The jobs by id. `problem`: names a file that cannot be parsed, so that jobs may be missing; otherwise ""."""

    jobs: dict[str, JobFile]
    problem: str = ""


def read_job_files(directory: Path) -> Filed:
    """Returns the jobs in the files of `directory`. Raises FileNotFoundError if it is missing, otherwise SourceError.

    Only root or the exporter's user may have write access. Any other user could make any GPU look held.
    """
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as exc:
        raise SourceError(
            f"{directory}: {exc.strerror}; the exporter does not read the prolog's job files: make the directory "
            "readable for the exporter's user"
        ) from exc
    try:
        _check_writers(os.fstat(handle), str(directory))
        names = sorted(os.listdir(handle))  # noqa: PTH208 -- of the checked directory
        if len(names) > FILES_MAX:
            raise SourceError(
                f"{directory}: {len(names)} files, but a prolog writes at most {FILES_MAX}, so the exporter reads "
                "none: remove the files of ended jobs, and check whether the epilog runs"
            )
        jobs: dict[str, JobFile] = {}
        problems: list[str] = []
        for name in names:
            if name.startswith("."):
                continue  # a file that is being written
            try:
                _add(jobs, name, *_read(handle, name))
            except FileNotFoundError:  # its job has just ended
                continue
            except (OSError, ValueError, SourceError) as exc:
                problems.append(f"{directory}/{name[:80]}: {exc}")
        return Filed(jobs, problems[0] if problems else "")
    finally:
        os.close(handle)


class EndedFiles(NamedTuple):
    """The files of gpu-exporter's epilog.

    - `jobs`: the jobs in new and changed files.
    - `stamps`: the present state of each file.
    - `odd`: the new and changed files that are not read, and why.
    """

    jobs: list[EndedJob]
    stamps: dict[str, Stamp]
    odd: dict[str, str]


def read_ended(directory: Path, known: Mapping[str, Stamp]) -> EndedFiles:
    """Returns the jobs that have ended, from the newest FILES_MAX files of gpu-exporter's epilog.

    Omits files with the same state as in `known`. Empty if no epilog writes files. Raises SourceError if other users
    can write to the directory.
    """
    ended = EndedFiles([], {}, {})
    try:
        handle = os.open(directory / ENDED, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return ended
    try:
        _check_writers(os.fstat(handle), str(directory / ENDED))
        names = filter(ENDED_NAME.fullmatch, os.listdir(handle))  # noqa: PTH208 -- of the checked directory
        for name in sorted(names, key=number_of)[-FILES_MAX:]:
            try:
                status = os.stat(name, dir_fd=handle, follow_symlinks=False)
                ended.stamps[name] = status.st_ino, status.st_ctime_ns
                if known.get(name) != ended.stamps[name]:
                    ended.jobs.append(_parse_ended(*_read(handle, name))._replace(number=number_of(name)))
            except FileNotFoundError:  # the epilog has just removed it
                continue
            except (OSError, ValueError, SourceError) as exc:
                ended.odd[name] = str(exc)
        return ended
    finally:
        os.close(handle)


def number_of(name: str) -> int:
    """Returns the number in the name of a file of gpu-exporter's epilog. 0 for the names of earlier versions."""
    match = ENDED_NAME.fullmatch(name)
    return need_whole(match[1]) if match is not None and match[1] else 0


def _parse_ended(text: str, written: float) -> EndedJob:
    """Parses a file of gpu-exporter's epilog. Raises ValueError for any other text."""
    values = dict(line.partition("=")[::2] for line in text.splitlines())
    if not {"job", "end"} <= values.keys():
        raise ValueError("lacks job= or end=")
    job, jobs = values["job"], dict[str, JobFile]()
    _add(jobs, job, text, written)
    return EndedJob(job, jobs[job], need_whole(values["end"]) + 0.0)


def read_trusted(path: Path, most: int) -> str:
    """Returns the text of a file, if other users can write neither to the file nor to its directory.

    Raises OSError, ValueError, and SourceError if other users can write to either.
    """
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        owner = os.fstat(directory)
        _check_writers(owner, str(path.parent), owner.st_uid)
        return _read(directory, path.name, most, owner.st_uid)[0]
    finally:
        os.close(directory)


def _check_writers(status: os.stat_result, name: str, owner: int = 0) -> None:
    if status.st_uid not in (0, os.geteuid(), owner) or status.st_mode & OTHERS_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        raise SourceError(
            f"{name}: not read, because other users can write to it (uid {status.st_uid}, mode {mode:04o})"
        )


def _read(directory: int, name: str, most: int = READ_MAX, owner: int = 0) -> tuple[str, float]:
    """Returns the text of a file, and when the file was written (Unix seconds).

    `owner`: a user who may own the file, besides root and the exporter's user (uid). Raises OSError, ValueError,
    SourceError.
    """
    with open_regular(name, lambda status: _check_writers(status, "the file", owner), directory=directory) as file:
        written = os.fstat(file.fileno()).st_mtime
        return read_within(file, name, most).decode("ascii"), written


def _run(values: Mapping[str, str]) -> FiledRun | None:
    """Returns the job's run. None if a value is missing or is not in slurmd's form: the record is then incomplete."""
    words = {name: value if WORD.fullmatch(value) else "" for name, value in values.items()}
    numbers = {name: whole(words.get(name, ""), WHOLE_MAX) for name in ("uid", "restarts", "start", "nodes")}
    user, cluster, start, nodes = words.get("user", ""), words.get("cluster", ""), numbers["start"], numbers["nodes"]
    if not (user and cluster and nodes) or numbers["uid"] is None or numbers["restarts"] is None:
        return None
    if any(values.get(name) and not words[name] for name in ("account", "partition")):
        return None
    if values.get("start") and not start:
        return None
    return FiledRun(
        user,
        words["uid"],
        words.get("account", ""),
        words.get("partition", ""),
        cluster,
        words["restarts"],
        None if start is None else start + 0.0,
        nodes,
    )


def _add(jobs: dict[str, JobFile], name: str, text: str, written: float) -> None:
    """Adds the jobs of a file to `jobs`. Raises ValueError for a file that cannot be parsed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines and JOB.fullmatch(name) and need_whole(name) >= GPUS_MAX:
        raise ValueError("it is empty")  # only an empty file of a GPU is valid: the GPU is free
    if JOB.fullmatch(name) and any("=" in line for line in lines):
        if not text.endswith("\n"):
            raise ValueError("its last line is incomplete")
        values = dict(line.partition("=")[::2] for line in lines)
        visible = [word for word in values.get("visible", "").split(",") if UUID.fullmatch(word)]
        indexes = tuple(parse_ranges(values.get("gpus", "")) if values.get("gpus") else ())
        began = whole(values.get("began", ""), WHOLE_MAX)
        mps = {"": False, "yes": True}.get(values.get("mps", "unknown"))
        began_wall = None if began is None else began + 0.0
        jobs[name] = JobFile(indexes, tuple(visible), written, _run(values), began_wall, mps)
        return
    if not (UUID.fullmatch(name) or NUMBER.fullmatch(name)):
        raise ValueError("its name is neither a GPU nor a job id")
    for line in lines:  # a file without lines means that the GPU is free
        job = line.split()[0]
        if not JOB.fullmatch(job):
            raise ValueError(f"{job[:40]!r} is not a job id")
        known = jobs.get(job, JobFile())
        uuids = (*known.uuids, name) if UUID.fullmatch(name) and name not in known.uuids else known.uuids
        jobs[job] = JobFile((), uuids, max(known.written_wall, written))
