"""Requeues jobs whose owners allow it. Cancels other jobs if the site allows that.

`scontrol requeue` and `scancel` take the id of a job, and cannot select one run of the job. So the job is read right
before the command. A note about the action is first written into the job's mark, and read back. After a crash, the note
remains, and prevents a second command.

A heterogeneous job is one target: either command ends all of its components.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.outside import need_whole
from gpu_exporter.reconciler.actor import DONE, GONE, NOT_DONE, UNCLEAR, Entry
from gpu_exporter.reconciler.decision.policy import UNDERUSED
from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.decision.target import Part, Skipped, Target
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import Refused, timestamp
from gpu_exporter.reconciler.slurm.live import LiveJob
from gpu_exporter.reconciler.slurm.marker import JobMarker, acted_on, add_note, object_to_job, run_slurm
from gpu_exporter.reconciler.slurm.survey import (
    CANCEL,
    REQUEUE,
    SCHEDULER,
    describe,
    find_dependent,
    may_requeue,
    why_not_again,
)


class JobActor:
    """Acts on the jobs of one cluster."""

    scheduler = SCHEDULER

    def __init__(self, marker: JobMarker, policy: Policy, run: Callable[..., str] = run_slurm) -> None:
        """`run`: runs one of Slurm's commands and returns its output; raises MarkError."""
        self._marker = marker
        self._policy = policy
        self._run = run

    def read(self, reference: Reference, namespace: str, verbs: Sequence[str], idle_s: float, wall: float) -> Target:
        jobs = self._marker.recent_jobs()
        components = _components(jobs, reference.name)
        if not components:
            raise Refused("replaced", "the job is gone")
        verb, undo = self._verb(components, verbs)
        return Target(
            reference,
            "",
            verb,
            tuple(self._part(job, jobs, idle_s) for job in components),
            {},
            above=find_dependent(components, jobs) if verb == CANCEL else "",
            note=next((note for job in components if (note := acted_on(job))), ""),
            obstacle=_unmarked([job for job in components if _holds_gpus(job)]) or _obstacle(components, verb),
            undo=undo,
            live=components,
        )

    def rehearse(self, target: Target) -> None:
        """See Actor.rehearse. There is nothing to check, because Slurm obeys the command or reports an error."""

    def open_entry(self, target: Target, ident: str, wall: float) -> Entry:
        components: Sequence[LiveJob] = target.live
        lever = target.reference._replace(uid=components[0].incarnation)
        note = f"{target.verb}@{timestamp(wall)}.{ident}"
        return Entry(ident, wall, self.scheduler, "", target.verb, target.reference, lever, note, undo=target.undo)

    def act(self, target: Target, entry: Entry) -> None:
        before: Sequence[LiveJob] = target.live
        now = self._read_again(before)
        holding = [job for job in now if _holds_gpus(job)]
        if held := _unmarked(holding):
            raise Refused(*held)
        for job in holding:
            self._marker.set_text(job, add_note(job.text, entry.note))
        again = self._read_again(before)
        if any(acted_on(job) != entry.note for job in again if _holds_gpus(job)):
            raise Refused(
                "changed",
                "the reconciler wrote a note about the action to the job, but cannot read it back, so it does not act",
            )
        first = now[0]
        if target.verb == REQUEUE:
            # `Incomplete` excludes jobs that have ended since they were read: they would run again from the beginning.
            self._run("scontrol", "requeue", "Incomplete", first.target)
        else:
            self._run("scancel", "--state=RUNNING", first.leader or first.target)

    def look(self, entry: Entry) -> str:
        """See Actor.look. Slurm lists a job for some minutes after its end."""
        try:
            job = self._marker.read(entry.target.name, ended=True)
        except Refused:
            return UNCLEAR
        if job.incarnation != entry.lever.uid:
            return DONE if entry.verb == REQUEUE else GONE
        if job.has_ended:
            return DONE if entry.verb == CANCEL and "CANCELLED" in job.words else GONE
        return NOT_DONE if job.runs and acted_on(job) != entry.note else UNCLEAR

    def read_left(self, entry: Entry) -> str:
        """See Actor.read_left. A job that is COMPLETING still has its GPUs, also if it was requeued."""
        for ended in entry.ends:
            try:
                job = self._marker.read(ended.name, ended=True)
            except Refused:
                continue
            is_this_run = job.incarnation == ended.incarnation and not job.has_ended
            if is_this_run or "COMPLETING" in job.words:
                return f"job {job.target} is {job.state}"
        return ""

    def tell(self, entry: Entry, text: str) -> None:
        """See Actor.tell. There is nothing to do, because the mark contains the note, and sacct shows the mark."""

    def _verb(self, components: Sequence[LiveJob], verbs: Sequence[str]) -> tuple[str, str]:
        """Returns the action, and a text about how the job can run again."""
        if REQUEUE in verbs and may_requeue(components):
            return REQUEUE, "Slurm starts it again by itself"
        return CANCEL, "its owner has to submit it again"

    def _part(self, job: LiveJob, jobs: Sequence[LiveJob], idle_s: float) -> Part:
        around = describe(job, jobs, self._policy)
        keep = around.idle_after_by.why if around.idle_after_by is not None and around.idle_after_s > idle_s else ""
        units = job.gpus if job.gpus is not None or job.asks else 0
        waits = "" if job.runs else f"is {job.state}"
        name = HolderName(SCHEDULER, "", job.job_id)
        wish = keep or around.ceiling
        return Part(name, job.incarnation, units, waits=waits, wish=wish, grace_s=self._marker.kill_wait_s)

    def _read_again(self, before: Sequence[LiveJob]) -> list[LiveJob]:
        """Reads the components again. Raises Refused if more than a mark has changed, e.g. if one was restarted."""
        now = [self._marker.read(job.job_id) for job in before]
        if [_fixed(job) for job in now] != [_fixed(job) for job in before]:
            raise Refused(
                "changed", "the job was started again, or its Comment was changed, since the reconciler read the job"
            )
        for job in now:
            object_to_job(job)
        return now


def _components(jobs: Sequence[LiveJob], name: str) -> list[LiveJob]:
    """Returns the components of a job that have not ended, the leader first. An ordinary job has one component."""
    found = [job for job in jobs if name in (job.job_id, job.leader) and not job.has_ended]
    return sorted(found, key=lambda job: (job.job_id != name, need_whole(job.job_id)))


def _fixed(job: LiveJob) -> tuple[str, str]:
    """Returns the run of a job, and its Comment without the mark of the reconciler."""
    return job.incarnation, job.marked.get("Comment", job.comment)


def _holds_gpus(job: LiveJob) -> bool:
    """Returns whether Slurm gave GPUs to the job, or the job asked for GPUs."""
    return bool(job.gpus) or job.asks


def _unmarked(holding: Sequence[LiveJob]) -> Skipped | None:
    """Returns the reason why the action must not run, None if it may run.

    Each component with GPUs must have the mark `underused`, and at least one component must have GPUs.
    """
    if not holding:
        return Skipped("changed", "it holds no GPU now")
    for job in holding:
        if job.mark is None or job.mark.stage != UNDERUSED:
            return Skipped("changed", f"{job.target} has no mark of stage underused now")
    return None


def _obstacle(components: Sequence[LiveJob], verb: str) -> Skipped | None:
    first = components[0]
    if part := next((job for job in components if job.has_part), None):
        why = "has only a part of a GPU (shard or MPS), and jobs wait for whole GPUs"
        return Skipped("part", f"job {part.target} {why}")
    if unknown := next((job for job in components if job.asks and job.gpus is None), None):
        return Skipped("members", f"the number of GPUs that Slurm gave job {unknown.target} is not known")
    return why_not_again(first) if verb == REQUEUE else None
