"""Requeues jobs that asked for it, and cancels others where the site allows that.

Neither `scontrol requeue` nor `scancel` takes a run of a job, only its id, so the job is read right before. What is
about to be done is written into its mark first, and read back. A process that dies in between leaves that note, and no
second command is given while the mark stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from gpu_exporter.defaults import Policy
from gpu_exporter.reconciler.actions.actor import DONE, UNCONFIRMED, Found
from gpu_exporter.reconciler.actions.propose import CANCEL, REQUEUE, Proposal
from gpu_exporter.reconciler.marks import MarkError, Refused, timestamp
from gpu_exporter.reconciler.policy import UNDERUSED
from gpu_exporter.reconciler.slurm.live import LiveJob
from gpu_exporter.reconciler.slurm.marker import (
    JobMarker,
    acted_on,
    check_markable,
    object_to_job,
    render_mark,
    run_slurm,
)
from gpu_exporter.reconciler.slurm.survey import read_keep

SCHEDULER = "slurm"
# In a job's Comment: its script can be started again from its beginning, or goes on from a checkpoint.
REQUEUE_OK = re.compile(r"(?:^|[\s;,|])gpu-requeue-ok(?=$|[\s;,|])")
REQUEUES_MAX = 1  # of one job, by whomever: one that stages its data for longer than the windows would never end


class JobActor:
    """Acts on jobs of one cluster."""

    scheduler = SCHEDULER

    def __init__(self, marker: JobMarker, policy: Policy, run: Callable[..., str] = run_slurm) -> None:
        """`run`: one of Slurm's commands to its output; raises MarkError."""
        self._marker = marker
        self._policy = policy
        self._run = run

    def find(self, proposal: Proposal, kinds: Sequence[str], wall: float) -> Found:
        job = self._marker.read(proposal.first.name.name)
        check_markable(job, proposal.first, self._marker.cluster)
        self._object_to(job)
        if job.leader:
            raise Refused("kind", "it is a component of a heterogeneous job, and an action would end all of them")
        keep_s, asked_by, unreadable = read_keep(job, self._policy)
        if unreadable or keep_s > wall - proposal.since_wall:
            raise Refused("exempt", asked_by.why if asked_by is not None else unreadable)
        asked = job.is_batch and job.may_requeue and REQUEUE_OK.search(job.comment) is not None
        if asked and REQUEUE in proposal.possible and REQUEUE in kinds:
            if job.restarts >= REQUEUES_MAX:
                raise Refused("requeued", f"it has been started again {job.restarts} times already")
            return Found(REQUEUE, job, "Slurm starts it again by itself")
        if CANCEL in proposal.possible and CANCEL in kinds:
            return Found(CANCEL, job, "its owner has to submit it again")
        raise Refused(
            "kind", "it may not be cancelled here, and did not ask to be requeued (gpu-requeue-ok in its Comment)"
        )

    def act(self, proposal: Proposal, found: Found, wall: float) -> str:
        before: LiveJob = found.live
        job = self._read_again(before)
        acted = f"{found.kind}@{timestamp(wall)}"
        self._marker.set_text(job, render_mark(proposal.first, UNDERUSED, job.start, acted))
        if acted_on(self._read_again(before)) != acted:
            raise Refused("changed", "its mark does not say what is about to be done, so it is not done")
        if found.kind == REQUEUE:
            # Incomplete: a job that has ended since the last look would be run again from its beginning.
            self._run("scontrol", "requeue", "Incomplete", job.target)
        else:
            self._run("scancel", "--state=RUNNING", job.target)
        return UNCONFIRMED if self._still_runs(before) else DONE

    def _read_again(self, before: LiveJob) -> LiveJob:
        """The same run of the job, with nothing of it changed but its mark. Raises Refused."""
        job = self._marker.read(before.job_id)
        if job.incarnation != before.incarnation or _owners_words(job) != _owners_words(before):
            raise Refused("changed", "the job was started again, or its Comment was changed, since it was looked at")
        object_to_job(job)
        return job

    @staticmethod
    def _object_to(job: LiveJob) -> None:
        object_to_job(job)
        if job.mark is None or job.mark.stage != UNDERUSED:
            raise Refused("changed", "it has no mark of stage underused now")
        if acted := acted_on(job):
            raise Refused("acted", f"this run of it was acted on before ({acted})")

    def _still_runs(self, before: LiveJob) -> bool:
        try:
            job = self._marker.read(before.job_id)
        except Refused:
            return False  # it is gone
        except MarkError:
            return True
        return job.incarnation == before.incarnation and job.runs


def _owners_words(job: LiveJob) -> str:
    """Its Comment without a mark of ours in it."""
    return job.marked.get("Comment", job.comment)
