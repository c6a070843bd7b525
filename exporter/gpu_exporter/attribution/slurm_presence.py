"""Which jobs are on this node, as far as the node knows by itself: by their steps, and by the files of a prolog."""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.attribution.job_files import DEFAULT_PLACE, EndedJob, Filed, JobFile, read_ended, read_job_files
from gpu_exporter.attribution.slurm_steps import StepReader, Steps
from gpu_exporter.attribution.source import SourceError
from gpu_exporter.clock import Clock

# With PrologFlags=Contain each job has a step from its prolog to its epilog; slurmd takes a moment to make it.
STALE_S = 60.0
LOOK_BACK_S = 10.0
AHEAD_MAX_S = 1.0  # an end that is later than now is of a clock that was set back
TOLD_MAX = 1024  # ends; the epilog keeps 256


class Present(NamedTuple):
    """The jobs of one moment. `files` by job id; `notices`: what is missing, for people; `ended`: jobs that have ended
    since the last look, as our epilog tells.

    `is_complete`: every job that has GPUs has a file, and every file a job that is known to be alive.
    """

    steps: Steps = Steps({})
    files: Mapping[str, JobFile] = {}
    is_complete: bool = False
    notices: tuple[str, ...] = ()
    ended: tuple[EndedJob, ...] = ()

    @property
    def jobs(self) -> frozenset[str]:
        return frozenset((*self.steps.pids, *self.files))


class Presence:
    """Reads both. `directory`: where the site's prolog writes, None for our own prolog's place, where it is used."""

    def __init__(self, steps: StepReader, directory: Path | None, clock: Clock) -> None:
        self._steps = steps
        self._directory = directory
        self._clock = clock
        self._start_wall = self._ended_wall = clock.wall()
        self._told: list[tuple[str, float]] = []  # the last ends that were told: job and Unix seconds

    def read(self, flags: Set[str] | None) -> Present:
        """`flags`: Slurm's PrologFlags, in lower case; None while they are not known."""
        notices: list[str] = []
        try:
            steps = self._steps.read()
        except SourceError as exc:
            steps = None
            notices.append(f"{exc}: so a job that begins or ends is seen when slurmctld is asked, about once a minute")
        filed = self._read_files(notices)
        if filed is None:
            return Present(steps or Steps({}), notices=tuple(notices))
        files = dict(filed.jobs)
        if filed.problem:
            notices.append(filed.problem)
        if steps is not None and "contain" in (flags or ()):
            oldest = self._clock.wall() - STALE_S
            stale = sorted(job for job in files if job not in steps.pids and files[job].written_wall < oldest)
            for job in stale:
                del files[job]
            if stale:
                notices.append(f"the files of {', '.join(stale[:3])} have no job: has the epilog failed?")
        has_prolog_first = flags is not None and bool(flags & {"alloc", "contain"})
        if flags is not None and not has_prolog_first:
            notices.append(
                "PrologFlags has no Alloc: a job may hold GPUs before its prolog has run, so slurmctld is asked"
            )
        # With Contain what has no step yet has just begun; else it may be a job that never has one, and may have ended.
        is_alive = steps is not None and ("contain" in (flags or ()) or files.keys() <= steps.pids.keys())
        is_complete = has_prolog_first and is_alive and not filed.problem
        return Present(steps or Steps({}), files, is_complete, tuple(notices), self._read_ended())

    def _read_ended(self) -> tuple[EndedJob, ...]:
        """Each once. A listing may have a file and not one that was moved just before, so it looks back a little."""
        now = self._clock.wall()  # which may have been set back
        self._start_wall, self._ended_wall = min(self._start_wall, now), min(self._ended_wall, now)
        try:
            found = read_ended(self._directory or DEFAULT_PLACE, max(self._start_wall, self._ended_wall - LOOK_BACK_S))
        except SourceError:  # the directory itself is not believed either, which is said
            return ()
        ended = [
            job for job in found if (job.job_id, job.end_wall) not in self._told and job.end_wall <= now + AHEAD_MAX_S
        ]
        self._ended_wall = max([self._ended_wall, *(job.end_wall for job in ended)])
        self._told = [*self._told, *((job.job_id, job.end_wall) for job in ended)][-TOLD_MAX:]
        return tuple(ended)

    def _read_files(self, notices: list[str]) -> Filed | None:
        """None where no prolog writes."""
        try:
            return read_job_files(self._directory or DEFAULT_PLACE)
        except FileNotFoundError:
            if self._directory is not None:
                notices.append(f"{self._directory}: no such directory: has the prolog run?")
        except SourceError as exc:
            notices.append(str(exc))
        return None
