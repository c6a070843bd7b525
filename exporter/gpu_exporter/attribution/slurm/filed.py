"""Jobs by the files of the prolog alone: what began, ended and is held is known without a question to slurmctld.

A file is believed by itself where it says everything that is needed: whose job it is, which run of it began when, and
which positions (IDX) it has of one node. It does not say whether they are parts of GPUs, so on a node that shares GPUs
(shard, mps) no file is. No release of Slurm tells a prolog the QoS and the ids of an array: slurmctld adds them to a
job that has run for FILL_S.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from gpu_exporter.attribution.slurm.controller import Known, Look
from gpu_exporter.attribution.slurm.job_files import JobFile
from gpu_exporter.attribution.slurm.parse import Job, JobGpus
from gpu_exporter.attribution.slurm.presence import Present
from gpu_exporter.outside import WHOLE_MAX, whole

FILL_S = 300.0  # a job that has run for so long is worth a question; the shortest policy waits longer
PROMPT_S = 2.0  # a prolog that ran so soon ran at once; both dates are whole seconds


class Merged(NamedTuple):
    """A look with what the files add to it. `disputed`: jobs of files that claim what another job has, which a question
    to slurmctld settles.
    """

    look: Look
    disputed: Mapping[str, str] = {}


class _Spoken(NamedTuple):
    """A run of a job whose file was believed: its restart count, and when that was so last (monotonic seconds).

    `is_over`: the epilog has told of its end.
    """

    restarts: str
    seen: float
    is_over: bool = False


class FiledJobs:
    """Which files are believed by themselves. One thread at a time."""

    def __init__(self) -> None:
        self.is_on = False
        """Whether gres.conf says that no GPU of this node is shared."""
        self._spoken: dict[str, _Spoken] = {}
        self._disputed: Set[str] = frozenset()

    def find(self, look: Look, present: Present) -> dict[str, JobFile]:
        """The files that are believed by themselves, by job."""
        used = look.node.used
        if not (self.is_on and present.is_complete) or used.unnamed or used.shared or used.unnamed_share:
            return {}
        return {job: file for job, file in present.files.items() if is_whole(file, look)}

    def settled(self, look: Look, present: Present, wall: float) -> set[str]:
        """Jobs whose files leave nothing to ask slurmctld yet. `wall`: Unix seconds."""
        return {
            job
            for job, file in self.find(look, present).items()
            if job not in self._disputed and (_is_known(look, job, file) or wall - file.written_wall < FILL_S)
        }

    def list_lost(self, look: Look, present: Present) -> set[str]:
        """Jobs that only their files told of, which cannot be believed now, and of which slurmctld has not told since.

        A job whose file has gone has ended, but not while it has a step or may have one, and not where the epilog has
        left the file.
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

    def merge(self, look: Look, present: Present, now: float) -> Merged:
        """The look, less the jobs that have ended since, and with those that have begun, by their files. `now`:
        monotonic seconds.
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
        # Of two files that claim one GPU the one with a step is right, and else the newer one.
        for job in sorted(new, key=lambda job: (job not in present.steps.pids, -new[job].written_wall, job)):
            file = new[job]
            clash = next((index for index in file.indexes if index in taken), None)
            if clash is not None:
                disputed[job] = f"the prolog's file of job {job} lists IDX {clash}, which job {taken[clash]} holds"
                continue
            taken |= dict.fromkeys(file.indexes, job)
            jobs[job] = Known(read_job(job, file), look.asked, JobGpus(file.indexes, len(file.indexes)), look.asked)
        begun = {index for job in jobs.keys() & new.keys() for index in new[job].indexes}
        used = look.node.used._replace(indexes=tuple(sorted({*look.node.used.indexes} - freed | begun)))
        self._spoken |= {job: _Spoken(file.run.restarts, now) for job, file in files.items() if file.run is not None}
        self._disputed = disputed.keys()
        return Merged(look._replace(jobs=jobs, node=look.node._replace(used=used)), disputed)

    def forget(self, look: Look, present: Present, ended: Set[str]) -> None:
        """Jobs that slurmctld has told of since, and those whose end is known. `ended`: of this poll."""
        self._spoken = {
            job: run._replace(is_over=run.is_over or job in ended)
            for job, run in self._spoken.items()
            if job in present.files or look.asked <= run.seen
        }

    def _has_ended(self, look: Look, job: str, present: Present, new: Mapping[str, JobFile]) -> bool:
        """Of a job that has neither step nor file. What slurmctld said later than its file was there counts more."""
        run = self._spoken.get(job)
        is_seen = not present.steps.unseen or (run is not None and run.is_over)
        is_over = run is not None and look.jobs[job].asked <= run.seen and job not in present.stale and is_seen
        return is_over or _is_replaced(look, job, new)


def _is_replaced(look: Look, job: str, new: Mapping[str, JobFile]) -> bool:
    """Whether a job that has neither step nor file lost its GPUs to one that began. With Contain each job that runs has
    a step; of one that has just begun it may not be there yet, so that alone frees nothing.
    """
    claimed = {index for file in new.values() for index in file.indexes}
    is_over = "contain" in look.config.prolog_flags and look.jobs[job].job.state == "RUNNING"
    return is_over and not claimed.isdisjoint(_positions(look.jobs[job]))


def is_whole(file: JobFile, look: Look) -> bool:
    """Whether a file says all that is needed of a job of this node."""
    run = file.run
    return run is not None and bool(file.indexes) and run.cluster == look.config.cluster and run.nodes == 1


def _is_known(look: Look, job: str, file: JobFile) -> bool:
    """Whether slurmctld has told of this very run, or of a later one."""
    known = look.jobs.get(job)
    run = file.run
    if known is None or run is None:
        return False
    if known.job.restarts != run.restarts:
        told, filed = (whole(text, WHOLE_MAX) for text in (known.job.restarts, run.restarts))
        return told is not None and filed is not None and told > filed
    return run.start is None or known.job.start == run.start


def _positions(known: Known) -> tuple[int, ...]:
    return known.gpus.positions() if known.gpus is not None else ()


def read_job(job: str, file: JobFile) -> Job:
    """The job as its file tells of it, which is believed by itself."""
    run = file.run
    assert run is not None
    return Job(job, run.user, run.account, run.partition, "", "RUNNING", file.start_wall, run.restarts, uid=run.uid)


def start_here(start: float | None, file: JobFile, ahead_s: float) -> float | None:
    """When a job began by this host's clock, which is `ahead_s` ahead of slurmctld's; `start`: as its row has it.

    By the date of the prolog, if that ran at once: the epilog's comes from the same clock and is as late, so that their
    difference is what slurmctld counts. A prolog may also run behind another one for minutes, in which the job has its
    GPUs.
    """
    is_by_file = file.run is not None and file.run.start is None and start == file.start_wall
    if start is None or is_by_file:
        return start
    is_prompt = file.began_wall is not None and abs(file.began_wall - start - ahead_s) <= PROMPT_S
    return file.began_wall if is_prompt else start + ahead_s
