"""Finds the jobs on this node without slurmctld, by their steps (started parts of a job) and by a prolog's files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.agent.attribution.slurm.on_node.ends import JobEnds, Recall
from gpu_exporter.agent.attribution.slurm.on_node.job_files import (
    DEFAULT_PLACE,
    EndedJob,
    Filed,
    JobFile,
    read_job_files,
)
from gpu_exporter.agent.attribution.slurm.on_node.steps import StepReader, Steps
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.common.clock import Clock

# With PrologFlags=Contain each job has a step from its prolog to its epilog. slurmd takes a moment to make the step.
STALE_S = 60.0
GONE_LISTS = 2  # complete lists without a step of the job, after which a job that had a step has ended


class _StepLife(NamedTuple):
    """The steps of a job whose file was written at `written_wall`.

    - `listed_at`: when a complete list last had a step of the job (monotonic seconds).
    - `gone`: number of complete lists since then.
    """

    written_wall: float
    listed_at: float
    gone: int = 0


class Present(NamedTuple):
    """The jobs on this node at one moment.

    - `files`: the prolog's files, by job id.
    - `notices`: texts about missing data.
    - `ended`: jobs that have ended since the last read.
    - `missed`: number of other jobs that have ended.
    - `reported`: every end that was reported, for the state file.
    - `waning`: jobs that had a step and have none in the last complete list, and when a list last had a step of them
      (monotonic seconds).
    - `over`: jobs that had a step and have none. Their files are ignored: the epilog failed, or has not run yet.
    - `stale`: jobs without a step for STALE_S, whose files are ignored: the epilog failed, or another prolog is slow.
    - `is_complete`: every job with GPUs has a file, and every job with a file still runs.
    """

    steps: Steps = Steps({})
    files: Mapping[str, JobFile] = {}
    is_complete: bool = False
    notices: tuple[str, ...] = ()
    ended: tuple[EndedJob, ...] = ()
    missed: int = 0
    reported: tuple[str, ...] = ()
    waning: Mapping[str, float] = {}
    over: frozenset[str] = frozenset()
    stale: frozenset[str] = frozenset()

    @property
    def jobs(self) -> frozenset[str]:
        return frozenset((*self.steps.pids, *self.files))


class Presence:
    """Reads the steps of jobs and the files of the prolog.

    `directory`: the directory in which the site's prolog writes its files. None: the default directory of
    gpu-exporter's prolog, if it exists.
    """

    def __init__(self, steps: StepReader, directory: Path | None, clock: Clock, recall: Recall | None = None) -> None:
        """`recall`: as in `JobEnds`."""
        self._steps = steps
        self._directory = directory
        self._clock = clock
        self._seen_at = -math.inf  # when all steps were last listed
        self._stale: dict[str, float] = {}  # files without a step at that time, and when they were written
        self._lives: dict[str, _StepLife] = {}  # jobs with a file that have or had a step
        self._ends = JobEnds(directory or DEFAULT_PLACE, clock, recall)

    def read(self, flags: Set[str] | None) -> Present:
        """Returns the present jobs. `flags`: Slurm's PrologFlags in lower case, None while unknown."""
        notices: list[str] = []
        asked = self._clock.monotonic()
        steps = self._read_steps()
        filed = self._read_files(notices)
        if filed is None:
            return Present(steps, notices=(*_tell_unseen(steps), *notices), reported=self._ends.reported)
        files = dict(filed.jobs)
        if filed.problem:
            notices.append(filed.problem)
        has_extern = "contain" in (flags or ())
        if not steps.unseen:
            self._lives = self._follow(files, steps, asked)
        waning = {job: self._lives[job] for job, file in files.items() if has_extern and self._is_waning(job, file)}
        over = {job for job, life in waning.items() if life.gone >= GONE_LISTS}
        left = [EndedJob(job, files.pop(job), self._wall(self._lives[job].listed_at), by_steps=True) for job in over]
        oldest = self._clock.wall() - STALE_S
        if has_extern and not steps.unseen:
            stale = {job for job, file in files.items() if job not in steps.pids and file.written_wall < oldest}
            self._stale = {job: files[job].written_wall for job in stale}
        stale = {job for job, wall in self._stale.items() if job in files and files[job].written_wall == wall}
        for job in stale:
            del files[job]
        if stale or over:
            named = ", ".join(sorted(stale | over)[:3])
            notices.append(f"no job belongs to the files {named}: check whether the epilog failed")
        has_prolog_first = flags is not None and bool(flags & {"alloc", "contain"})
        if flags is not None and not has_prolog_first:
            notices.append(
                "PrologFlags lacks Alloc: a job may hold GPUs before its prolog has run, so the exporter asks slurmctld"
            )
        # With Contain, a job without a step has just started. Without Contain, the job may never have a step, and may
        # have ended. A full list of steps counts for STALE_S, because a file without a step counts for the same time.
        is_seen = not steps.unseen or self._clock.monotonic() - self._seen_at <= STALE_S
        is_alive = files.keys() <= steps.pids.keys()
        if has_extern:
            is_alive = is_seen or all(job in steps.pids or file.written_wall >= oldest for job, file in files.items())
        is_complete = has_prolog_first and is_alive and not filed.problem
        if not is_complete:
            notices = [*_tell_unseen(steps), *notices]
        ended, missed, notice = self._ends.read()  # an end by the epilog is more precise
        notices += [notice] * bool(notice)
        ended += tuple(job for job in left if self._ends.add(job))
        return Present(
            steps,
            files,
            is_complete,
            tuple(notices),
            ended,
            missed,
            self._ends.reported,
            {job: life.listed_at for job, life in waning.items()},
            frozenset(over),
            frozenset(stale),
        )

    def has_file(self, job: str) -> bool:
        """Returns whether the prolog's file of a job is there now: false after its epilog, also right after a read."""
        return ((self._directory or DEFAULT_PLACE) / job).exists()

    def _follow(self, files: Mapping[str, JobFile], steps: Steps, asked: float) -> dict[str, _StepLife]:
        """Returns the present lives after a complete list of steps at `asked`."""
        lives: dict[str, _StepLife] = {}
        for job, file in files.items():
            life = self._lives.get(job)
            if job in steps.pids:
                lives[job] = _StepLife(file.written_wall, asked)
            elif life is not None:
                lives[job] = life._replace(gone=life.gone + 1)
        return lives

    def _is_waning(self, job: str, file: JobFile) -> bool:
        """Returns whether the last complete list has no step of this run, but an earlier list has.

        A file that was written again belongs to another run. A file without a start does not identify the run, so that
        the epilog's report would count as another end.
        """
        life = self._lives.get(job)
        is_dated = file.began_wall is not None or (file.run is not None and file.run.start is not None)
        return is_dated and life is not None and life.gone > 0 and life.written_wall == file.written_wall

    def _wall(self, monotonic: float) -> float:
        return self._clock.wall() - (self._clock.monotonic() - monotonic)

    def _read_steps(self) -> Steps:
        try:
            steps = self._steps.read()
        except SourceError as exc:
            steps = Steps({}, unseen=str(exc))
        if not steps.unseen:
            self._seen_at = self._clock.monotonic()
        return steps

    def _read_files(self, notices: list[str]) -> Filed | None:
        """Returns the jobs in the prolog's files, None if no prolog writes files."""
        try:
            return read_job_files(self._directory or DEFAULT_PLACE)
        except FileNotFoundError:
            if self._directory is not None:
                notices.append(f"{self._directory}: no such directory: check whether the prolog has run")
        except SourceError as exc:
            notices.append(str(exc))
        return None


def _tell_unseen(steps: Steps) -> tuple[str, ...]:
    if not steps.unseen:
        return ()
    return (f"{steps.unseen}; the exporter sees new and ended jobs only about once a minute, from slurmctld",)
