"""Finds the jobs on this node without slurmctld, by their steps (started parts of a job) and by a prolog's files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.agent.attribution.slurm.job_files import (
    DEFAULT_PLACE,
    EndedJob,
    Filed,
    JobFile,
    Stamp,
    read_ended,
    read_job_files,
)
from gpu_exporter.agent.attribution.slurm.steps import StepReader, Steps
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.common.clock import Clock

# With PrologFlags=Contain each job has a step from its prolog to its epilog. slurmd takes a moment to make the step.
STALE_S = 60.0
TOLD_MAX = 1024  # ended jobs to remember; the epilog keeps 256


class Present(NamedTuple):
    """The jobs on this node at one moment.

    - `files`: by job id.
    - `notices`: texts about missing data.
    - `ended`: jobs that have ended since the last read, from gpu-exporter's epilog.
    - `stale`: jobs with ignored files, because the jobs have had no step for STALE_S: the epilog failed, or another
      prolog is slow.
    - `is_complete`: every job with GPUs has a file, and every job with a file still runs.
    """

    steps: Steps = Steps({})
    files: Mapping[str, JobFile] = {}
    is_complete: bool = False
    notices: tuple[str, ...] = ()
    ended: tuple[EndedJob, ...] = ()
    stale: frozenset[str] = frozenset()

    @property
    def jobs(self) -> frozenset[str]:
        return frozenset((*self.steps.pids, *self.files))


class Presence:
    """Reads the steps of jobs and the files of the prolog.

    `directory`: where the site's prolog writes. None: the default directory of gpu-exporter's prolog, if it exists.
    """

    def __init__(self, steps: StepReader, directory: Path | None, clock: Clock) -> None:
        self._steps = steps
        self._directory = directory
        self._clock = clock
        self._seen_at = -math.inf  # when all steps were last listed
        self._stale: dict[str, float] = {}  # files without a step at that time, and when they were written
        self._stamps: dict[str, Stamp] = {}
        self._told: list[tuple[str, str, float]] = []  # the last reported ends: job, restarts, Unix seconds
        self._read_ended()

    def read(self, flags: Set[str] | None) -> Present:
        """Returns the present jobs. `flags`: Slurm's PrologFlags in lower case, None while unknown."""
        notices: list[str] = []
        steps = self._read_steps()
        filed = self._read_files(notices)
        if filed is None:
            return Present(steps, notices=(*_tell_unseen(steps), *notices))
        files = dict(filed.jobs)
        if filed.problem:
            notices.append(filed.problem)
        has_extern = "contain" in (flags or ())
        oldest = self._clock.wall() - STALE_S
        if has_extern and not steps.unseen:
            stale = {job for job, file in files.items() if job not in steps.pids and file.written_wall < oldest}
            self._stale = {job: files[job].written_wall for job in stale}
        stale = {job for job, wall in self._stale.items() if job in files and files[job].written_wall == wall}
        for job in stale:
            del files[job]
        if stale:
            notices.append(f"the files of {', '.join(sorted(stale)[:3])} have no job: check whether the epilog failed")
        has_prolog_first = flags is not None and bool(flags & {"alloc", "contain"})
        if flags is not None and not has_prolog_first:
            notices.append(
                "PrologFlags has no Alloc: a job may hold GPUs before its prolog has run, so slurmctld is asked"
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
        return Present(steps, files, is_complete, tuple(notices), self._read_ended(), frozenset(stale))

    def _read_steps(self) -> Steps:
        try:
            steps = self._steps.read()
        except SourceError as exc:
            steps = Steps({}, unseen=str(exc))
        if not steps.unseen:
            self._seen_at = self._clock.monotonic()
        return steps

    def _read_ended(self) -> tuple[EndedJob, ...]:
        """Returns the jobs that have ended since the exporter started, each once.

        The time in a file identifies the end. The date of the file does not, because a chmod or a clock change changes
        it.
        """
        try:
            found, self._stamps = read_ended(self._directory or DEFAULT_PLACE, self._stamps)
        except SourceError:  # the directory itself is ignored too, and a notice reports this
            return ()
        keys = [(job.job_id, job.file.run.restarts if job.file.run else "", job.end_wall) for job in found]
        new = [job for job, key in zip(found, keys, strict=True) if key not in self._told]
        self._told = [*self._told, *(key for key in keys if key not in self._told)][-TOLD_MAX:]
        return tuple(sorted(new, key=lambda job: job.end_wall))

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
    return (f"{steps.unseen}; a job that begins or ends is seen only when slurmctld is asked, about once a minute",)
