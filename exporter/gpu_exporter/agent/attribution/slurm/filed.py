"""Finds jobs and their GPUs in the prolog's files alone, without a request to slurmctld.

A file proves its job if two conditions hold. It is complete: it has the job's owner, restart count, start, and
positions (IDX) on one node. And the job has whole GPUs.

- A prolog sees whether a job uses MPS, but not whether it uses shards. So while a job runs, its file proves no GPU that
  gres.conf divides into shards, unless slurmctld reports this GPU as used without a job.
- After the job has ended, only its hours matter, which are the same for a part of a GPU. Then every complete file
  counts, also of a job on several nodes.
- Slurm gives a prolog neither the QoS nor the ids of an array. The exporter asks slurmctld for them after FILL_S.

Tested on 22.05.8, 24.11.5 and 26.05.5, with and without PrologFlags=Contain.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple, TypeAlias

from gpu_exporter.agent.attribution.slurm.controller import KnownJob, SlurmSnapshot
from gpu_exporter.agent.attribution.slurm.gres.conf import Shares
from gpu_exporter.agent.attribution.slurm.on_node.job_files import JobFile
from gpu_exporter.agent.attribution.slurm.on_node.presence import Present
from gpu_exporter.agent.attribution.slurm.parse import Job, JobGpus
from gpu_exporter.common.outside import WHOLE_MAX, whole

FILL_S = 300.0  # a job that has run for this time is worth a request; the shortest policy waits longer
BEGUN_MAX = 16  # begins of jobs that are kept for each GPU
PROMPT_S = 2.0  # a prolog that ran within this time of the start ran "at once"; both dates are whole seconds


class Merged(NamedTuple):
    """A snapshot that was completed by the prolog's files.

    `disputed`: jobs with a file that claims a GPU of another job, each with a message. The exporter then asks
    slurmctld.
    """

    look: SlurmSnapshot
    disputed: Mapping[str, str] = {}


Begun: TypeAlias = "Mapping[str, Mapping[float, bool | None]]"
"""When jobs began (Unix seconds of this host), by GPU (Grant.number), each with whether the job has the whole GPU. None
while this is unknown."""


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
        self.shares: Shares | None = None
        """The GPUs of which jobs can get parts. None while gres.conf does not prove them; then no file counts."""
        self._spoken: dict[str, _Spoken] = {}
        self._disputed: Set[str] = frozenset()
        self._begun: dict[str, dict[float, bool | None]] = {}

    def find(self, look: SlurmSnapshot, present: Present) -> dict[str, JobFile]:
        """Returns the files that prove their job without a request to slurmctld, by job."""
        used = look.node.used
        if not present.is_complete or used.unnamed or used.unnamed_share:
            return {}
        return {job: file for job, file in present.files.items() if self.proves(file, look)}

    def proves(self, file: JobFile, look: SlurmSnapshot) -> bool:
        """Returns whether a file proves that a job of only this node has whole GPUs, and who the job is."""
        is_here_only = file.run is not None and file.run.nodes == 1
        return is_here_only and self.names(file, look) and not self.share_of(file, look)

    def names(self, file: JobFile, look: SlurmSnapshot) -> bool:
        """Returns whether a file shows who the job is, and of which GPUs of this node it has all or a part."""
        return bool(file.indexes) and file.run is not None and file.run.cluster == look.config.cluster

    def share_of(self, file: JobFile, look: SlurmSnapshot) -> str:
        """Returns how the job may share its GPUs: shard or mps, "" if the file proves that they are whole."""
        shares = self.shares
        part = "mps" if file.mps else "shard"
        # Slurm divides a GPU that gres.conf does not divide, so slurm.conf alone has the shares.
        if shares is None or any(kind not in shares.get(index, ()) for index, kind in look.node.used.shared):
            return part
        kinds = {kind for index in file.indexes for kind in shares.get(index, ())}
        return "" if not kinds or (kinds == {"mps"} and file.mps is False) else part

    def gpus_of(self, file: JobFile, look: SlurmSnapshot) -> JobGpus:
        """Returns the GPUs of this node of which a job has all or a part. The method `names` must accept `file`."""
        assert file.run is not None
        total, share = len(file.indexes) if file.run.nodes == 1 else None, self.share_of(file, look)
        if not share or all(self._begun.get(f"IDX {index}", {}).get(file.began_wall or 0.0) for index in file.indexes):
            return JobGpus(file.indexes, total)
        return JobGpus((), total, shared=tuple((index, share) for index in file.indexes))

    def list_begun(self, look: SlurmSnapshot, files: Iterable[tuple[str, JobFile]], wall: float) -> Begun:
        """Returns the begins of the last jobs on each GPU.

        `look`: slurmctld's report alone. `files`: those of the present jobs, and of jobs that have just ended.
        `wall`: the present time. Later dates are forgotten, because the clock was set back.
        """
        for job, file in files:
            if file.began_wall is None or not self.names(file, look):
                continue
            gpus = look.jobs[job].gpus if _is_known(look, job, file) else None
            for index in file.indexes:
                begun = self._begun.setdefault(f"IDX {index}", {})
                whole = True if not self.share_of(file, look) else index in gpus.indexes if gpus is not None else None
                begun[file.began_wall] = begun.get(file.began_wall) if whole is None else whole
        self._begun = {
            number: dict(sorted((at, whole) for at, whole in begun.items() if at <= wall)[-BEGUN_MAX:])
            for number, begun in self._begun.items()
        }
        return self._begun

    def settled(self, look: SlurmSnapshot, present: Present, wall: float) -> set[str]:
        """Returns the jobs whose prolog's file is sufficient. They need no request yet. `wall`: Unix seconds."""
        return {
            job
            for job, file in self.find(look, present).items()
            if job not in self._disputed and (_is_known(look, job, file) or wall - file.written_wall < FILL_S)
        }

    def list_lost(self, look: SlurmSnapshot, present: Present) -> set[str]:
        """Returns the lost jobs: only a prolog's file has reported them, and this file no longer counts.

        - The file no longer exists: the job is lost only if it has a step or may have one. Otherwise it has ended.
        - The file is stale (`Present.stale`): the job is lost.
        """
        told = {job.job_id for job in present.ended}
        is_believed = self.shares is not None and present.is_complete
        return {
            job
            for job, run in self._spoken.items()
            if look.asked <= run.seen
            and (job not in look.jobs or look.jobs[job].job.restarts != run.restarts)
            and not (run.is_over or job in told)
            and not (is_believed and job in present.files)
            and (not is_believed or present.steps.unseen or job in present.stale or job in present.steps.pids)
        }

    def merge(self, look: SlurmSnapshot, present: Present, now: float, over: Set[str] = frozenset()) -> Merged:
        """Updates the snapshot from the files: removes jobs that have ended since, and adds jobs that have started.
        Returns the result.

        `now`: monotonic seconds. `over`: jobs in the snapshot that have ended, although slurmctld still lists them. A
        GPU that it reports as in use remains in use, perhaps by the next job.
        """
        if self.shares is None or not present.is_complete:
            return Merged(look._replace(jobs={job: known for job, known in look.jobs.items() if job not in over}))
        files = self.find(look, present)
        new = {job: file for job, file in files.items() if not _is_known(look, job, file)}
        gone = {job for job in look.jobs if job not in present.jobs and self._has_ended(look, job, present, new)}
        jobs = {job: known for job, known in look.jobs.items() if job not in gone | over | new.keys()}
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
        ended = {(job.job_id, job.file.run.restarts) for job in present.ended if job.file.run is not None}
        left = [known.gpus for job, known in jobs.items() if known.gpus and (job, known.job.restarts) not in ended]
        whole = {index for gpus in left for index in gpus.indexes}
        unlisted = self._list_unlisted(look, present, {*used.indexes, *(index for index, _ in used.shared)}, whole)
        jobs |= unlisted
        parts = {index: share for known in unlisted.values() if known.gpus for index, share in known.gpus.shared}
        used = used._replace(shared=tuple(sorted((parts | dict(used.shared)).items())))
        self._spoken |= {job: _Spoken(file.run.restarts, now) for job, file in files.items() if file.run is not None}
        self._disputed = disputed.keys()
        return Merged(look._replace(jobs=jobs, node=look.node._replace(used=used)), disputed)

    def _list_unlisted(
        self, look: SlurmSnapshot, present: Present, used: Set[int], whole: Set[int]
    ) -> dict[str, KnownJob]:
        """Returns jobs whose files name GPUs that are in use, although squeue does not list the job: slurmctld is slow.

        `used`: the positions of these GPUs. `whole`: those that a job has as a whole. Such a job has parts of GPUs,
        unless its file proves more. It also counts on a GPU of which another job's end was just reported: the two may
        have had it at the same time.
        """
        near = {index for job in present.ended for index in job.file.indexes}
        return {
            job: KnownJob(read_job(job, file), look.asked, self.gpus_of(file, look), look.asked)
            for job, file in present.files.items()
            if job not in look.jobs and self.names(file, look) and whole.isdisjoint(file.indexes)
            if used | near >= set(file.indexes)
        }

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
    """Returns a Job made from its file, which must be complete (FiledJobs.proves)."""
    run = file.run
    assert run is not None
    return Job(job, run.user, run.account, run.partition, "", "RUNNING", file.start_wall, run.restarts, uid=run.uid)


def start_of_run(job: Job, file: JobFile, ahead_s: float) -> float | None:
    """Returns the start (Unix seconds) that identifies a run, the same before and after slurmctld has reported the job.

    Before 23.02, Slurm does not pass the job's start to the prolog, so the prolog's date is used; slurmctld's date may
    be slightly earlier. An older file is from an earlier job with the same number. `ahead_s`: how far this host's clock
    is ahead of slurmctld's clock (seconds).
    """
    run = file.run
    if job.start is None or run is None or run.start is not None or run.restarts != job.restarts:
        return job.start
    return file.start_wall if file.start_wall >= job.start + ahead_s - PROMPT_S else job.start


def start_here(start: float | None, file: JobFile, ahead_s: float) -> float | None:
    """Returns the start of a job according to this host's clock, which is `ahead_s` ahead of slurmctld's clock.

    `start`: the start in the job's row. If the prolog ran without delay, the date of the prolog counts instead. The
    epilog's date comes from the same clock with the same delay, so end minus start is the duration that slurmctld
    counts. The date of a prolog that ran minutes later does not count, because the job already had its GPUs.
    """
    is_by_file = file.run is not None and file.run.start is None and start == file.start_wall
    if start is None or is_by_file:
        return start
    is_prompt = file.began_wall is not None and abs(file.began_wall - start - ahead_s) <= PROMPT_S
    return file.began_wall if is_prompt else start + ahead_s
