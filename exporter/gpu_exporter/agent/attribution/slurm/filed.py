"""Takes jobs from the prolog's files alone, so that starts, ends and GPUs need no request to slurmctld.

A file counts without slurmctld if it is complete: the job's owner, the restart count, the start, and the positions
(IDX) on one node. A file does not show whether a position is only a part of a GPU. On a node that shares GPUs (shard,
mps), no file counts. No release of Slurm gives a prolog the QoS and the ids of an array: the exporter asks slurmctld
for them when a job has run for FILL_S.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from gpu_exporter.agent.attribution.slurm.controller import KnownJob, SlurmSnapshot
from gpu_exporter.agent.attribution.slurm.job_files import JobFile
from gpu_exporter.agent.attribution.slurm.parse import Job, JobGpus
from gpu_exporter.agent.attribution.slurm.presence import Present
from gpu_exporter.common.outside import WHOLE_MAX, whole

FILL_S = 300.0  # a job that has run for this time is worth a request; the shortest policy waits longer
PROMPT_S = 2.0  # a prolog that ran within this time of the start ran "at once"; both dates are whole seconds


class Merged(NamedTuple):
    """A snapshot that was completed by the prolog's files.

    `disputed`: jobs with a file that claims a GPU of another job, each with a message. The exporter then asks
    slurmctld.
    """

    look: SlurmSnapshot
    disputed: Mapping[str, str] = {}


class _Spoken(NamedTuple):
    """A run of a job that its prolog's file has reported.

    - `restarts`: its restart count.
    - `seen`: when the file last counted (monotonic seconds).
    - `is_over`: the epilog has reported the end of the run.
    """

    restarts: str
    seen: float
    is_over: bool = False


class FiledJobs:
    """Decides which of the prolog's files prove a job without a request to slurmctld. Not thread-safe."""

    def __init__(self) -> None:
        self.is_on = False
        """True if gres.conf proves that no GPU of this node is shared."""
        self._spoken: dict[str, _Spoken] = {}
        self._disputed: Set[str] = frozenset()

    def find(self, look: SlurmSnapshot, present: Present) -> dict[str, JobFile]:
        """Returns the files that prove their job without a request to slurmctld, by job."""
        used = look.node.used
        if not (self.is_on and present.is_complete) or used.unnamed or used.shared or used.unnamed_share:
            return {}
        return {job: file for job, file in present.files.items() if is_whole(file, look)}

    def settled(self, look: SlurmSnapshot, present: Present, wall: float) -> set[str]:
        """Returns the jobs whose prolog's file is sufficient. They need no request yet. `wall`: Unix seconds."""
        return {
            job
            for job, file in self.find(look, present).items()
            if job not in self._disputed and (_is_known(look, job, file) or wall - file.written_wall < FILL_S)
        }

    def list_lost(self, look: SlurmSnapshot, present: Present) -> set[str]:
        """Returns the lost jobs: only a prolog's file has reported them, and this file no longer counts.

        - The file is gone: the job has ended and is not lost, unless it has a step or may have one.
        - The file is stale (`Present.stale`): the job is lost.
        """
        told = {job.job_id for job in present.ended}
        is_believed = self.is_on and present.is_complete
        return {
            job
            for job, run in self._spoken.items()
            if look.asked <= run.seen
            and (job not in look.jobs or look.jobs[job].job.restarts != run.restarts)
            and not (run.is_over or job in told)
            and not (is_believed and job in present.files)
            and (not is_believed or present.steps.unseen or job in present.stale or job in present.steps.pids)
        }

    def merge(self, look: SlurmSnapshot, present: Present, now: float) -> Merged:
        """Returns the snapshot without jobs that have ended since, and with jobs that have started, by the files.

        `now`: monotonic seconds.
        """
        if not (self.is_on and present.is_complete):
            return Merged(look)
        files = self.find(look, present)
        new = {job: file for job, file in files.items() if not _is_known(look, job, file)}
        gone = {job for job in look.jobs if job not in present.jobs and self._has_ended(look, job, present, new)}
        jobs = {job: known for job, known in look.jobs.items() if job not in gone and job not in new}
        freed = {index for job in gone | (look.jobs.keys() & new.keys()) for index in _positions(look.jobs[job])}
        taken = {index: job for job, known in jobs.items() for index in _positions(known)}
        disputed: dict[str, str] = {}
        # If two files claim one GPU, the file of a job with a step is right, otherwise the newer file.
        for job in sorted(new, key=lambda job: (job not in present.steps.pids, -new[job].written_wall, job)):
            file = new[job]
            clash = next((index for index in file.indexes if index in taken), None)
            if clash is not None:
                disputed[job] = f"the prolog's file of job {job} lists IDX {clash}, which job {taken[clash]} holds"
                continue
            taken |= dict.fromkeys(file.indexes, job)
            jobs[job] = KnownJob(read_job(job, file), look.asked, JobGpus(file.indexes, len(file.indexes)), look.asked)
        begun = {index for job in jobs.keys() & new.keys() for index in new[job].indexes}
        used = look.node.used._replace(indexes=tuple(sorted({*look.node.used.indexes} - freed | begun)))
        self._spoken |= {job: _Spoken(file.run.restarts, now) for job, file in files.items() if file.run is not None}
        self._disputed = disputed.keys()
        return Merged(look._replace(jobs=jobs, node=look.node._replace(used=used)), disputed)

    def forget(self, look: SlurmSnapshot, present: Present, ended: Set[str]) -> None:
        """Forgets jobs that slurmctld has reported, and jobs that have ended. `ended`: jobs that ended since the last
        poll.
        """
        self._spoken = {
            job: run._replace(is_over=run.is_over or job in ended)
            for job, run in self._spoken.items()
            if job in present.files or look.asked <= run.seen
        }

    def _has_ended(self, look: SlurmSnapshot, job: str, present: Present, new: Mapping[str, JobFile]) -> bool:
        """Returns whether a job without step and file has ended. slurmctld's report counts if it is newer than the
        file.
        """
        run = self._spoken.get(job)
        is_seen = not present.steps.unseen or (run is not None and run.is_over)
        is_over = run is not None and look.jobs[job].asked <= run.seen and job not in present.stale and is_seen
        return is_over or _is_replaced(look, job, new)


def _is_replaced(look: SlurmSnapshot, job: str, new: Mapping[str, JobFile]) -> bool:
    """Returns whether a job without step and file lost its GPUs to a job that started later.

    With PrologFlags=Contain, each running job has a step, except a job that has just started. A missing step alone
    therefore frees no GPU.
    """
    claimed = {index for file in new.values() for index in file.indexes}
    is_over = "contain" in look.config.prolog_flags and look.jobs[job].job.state == "RUNNING"
    return is_over and not claimed.isdisjoint(_positions(look.jobs[job]))


def is_whole(file: JobFile, look: SlurmSnapshot) -> bool:
    """Returns whether a file contains all required data about a job, and the job runs only on this node."""
    run = file.run
    return run is not None and bool(file.indexes) and run.cluster == look.config.cluster and run.nodes == 1


def _is_known(look: SlurmSnapshot, job: str, file: JobFile) -> bool:
    """Returns whether slurmctld has reported this run, or a later run."""
    known = look.jobs.get(job)
    run = file.run
    if known is None or run is None:
        return False
    if known.job.restarts != run.restarts:
        told, filed = (whole(text, WHOLE_MAX) for text in (known.job.restarts, run.restarts))
        return told is not None and filed is not None and told > filed
    return run.start is None or known.job.start == run.start


def _positions(known: KnownJob) -> tuple[int, ...]:
    return known.gpus.positions() if known.gpus is not None else ()


def read_job(job: str, file: JobFile) -> Job:
    """Returns a Job made from its file. The file must be complete (is_whole)."""
    run = file.run
    assert run is not None
    return Job(job, run.user, run.account, run.partition, "", "RUNNING", file.start_wall, run.restarts, uid=run.uid)


def start_of_run(job: Job, file: JobFile, ahead_s: float) -> float | None:
    """Returns the start (Unix seconds) that identifies a run, the same before and after slurmctld has reported the job.

    Before 23.02, Slurm does not pass the job's start to the prolog, so the prolog's date is used. slurmctld's date may
    be slightly earlier. A file that is older than this run is from an earlier job with the same number. `ahead_s`: as
    in start_here.
    """
    run = file.run
    if job.start is None or run is None or run.start is not None or run.restarts != job.restarts:
        return job.start
    return file.start_wall if file.start_wall >= job.start + ahead_s - PROMPT_S else job.start


def start_here(start: float | None, file: JobFile, ahead_s: float) -> float | None:
    """Returns the start of a job by this host's clock, which is `ahead_s` ahead of slurmctld's clock.

    `start`: the start in the job's row. If the prolog ran at once, its date is used instead. The epilog's date has the
    same clock and the same delay, so that end minus start is the duration that slurmctld counts. If the prolog ran
    minutes later, after another prolog, its date is not used, because the job already had its GPUs.
    """
    is_by_file = file.run is not None and file.run.start is None and start == file.start_wall
    if start is None or is_by_file:
        return start
    is_prompt = file.began_wall is not None and abs(file.began_wall - start - ahead_s) <= PROMPT_S
    return file.began_wall if is_prompt else start + ahead_s
