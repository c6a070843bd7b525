"""Reads the surroundings of a job: components of a heterogeneous job, class, and the wish in its Comment. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.config.values import ACTIONS
from gpu_exporter.common.durations import format_duration, parse_duration
from gpu_exporter.common.plain import one_line, shorten
from gpu_exporter.reconciler.decision.surroundings import (
    BATCH,
    INTERACTIVE,
    UNCLEAR,
    Exemption,
    Member,
    Reference,
    Surroundings,
)
from gpu_exporter.reconciler.decision.target import Skipped
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.slurm.live import LiveJob

SCHEDULER = "slurm"
REQUEUE, CANCEL = ACTIONS[3:]
# The wish to keep idle GPUs, anywhere in a job's Comment: gpu-keep=4h or gpu-keep=4h:reason.
KEEP = re.compile(r"(?:^|[\s;,|])gpu-keep=([^\s;,|:]*)(?::([^;,|]*))?")
# Names of interactive jobs: those that Open OnDemand starts, and servers for interactive work.
SCREENS = re.compile(r"^sys/dashboard/|jupyter|code-server|rstudio", re.IGNORECASE)
REASON_MAX = 120  # characters of an owner's words
# In a job's Comment: its script can be restarted, from its beginning or from a checkpoint.
REQUEUE_OK = re.compile(r"(?:^|[\s;,|])gpu-requeue-ok(?=$|[\s;,|])")
REQUEUES_MAX = 1  # restarts of one job by any cause: a job that stages data for longer than the windows would never end


def describe(job: LiveJob, jobs: Collection[LiveJob], policy: Policy) -> Surroundings:
    kind, kind_why = _kind(job)
    siblings = [each for each in jobs if job.leader and each.leader == job.leader and not each.has_ended]
    components = siblings or [job]
    dependent = find_dependent(components, jobs)
    held = {REQUEUE: why_not_again(job), CANCEL: Skipped("above", dependent) if dependent else None}
    members = tuple(
        Member(HolderName(SCHEDULER, "", each.job_id), "", each.gpus, waits="" if each.runs else f"is {each.state}")
        for each in siblings
        if each.gpus or each.asks or each.job_id == job.job_id
    )
    keep_s, asked_by, ceiling = read_keep(job, policy)
    return Surroundings(
        group=f"job/{job.leader or job.job_id}",
        members=members if len(members) > 1 else (),
        kind=kind,
        kind_why=kind_why,
        idle_after_s=keep_s,
        idle_after_by=asked_by,
        ceiling=ceiling,
        target=Reference("", "", "", job.leader or job.job_id, ""),
        possible=(REQUEUE, CANCEL) if may_requeue(components) else (CANCEL,),
        held={verb: why for verb, why in held.items() if why is not None},
        shown=kind,
        job_facts={key: values for key, values in _facts(job).items() if values is not None},
    )


def may_requeue(components: Sequence[LiveJob]) -> bool:
    """Returns whether the owner and Slurm allow a requeue. `components`: of the job, the leader first."""
    (job, *others) = components
    return bool(not others and job.is_batch and job.may_requeue and REQUEUE_OK.search(job.comment))


def why_not_again(job: LiveJob) -> Skipped | None:
    """Returns the reason why the reconciler does not requeue a job that may be requeued, None if it may do so."""
    times = "once" if job.restarts == 1 else f"{job.restarts} times"
    return Skipped("requeued", f"Slurm has already started it again {times}") if job.restarts >= REQUEUES_MAX else None


def find_dependent(components: Collection[LiveJob], jobs: Collection[LiveJob]) -> str:
    """Returns the job of the same user or account that waits for the end of this job, "" if there is none.

    Jobs of others do not count, because any user may submit a job that waits for this one.
    """
    ids = {text for job in components for text in (job.job_id, job.leader, job.target.partition("_")[0])} - {""}
    owners = {(job.user, job.account) for job in components}
    users, accounts = {user for user, _ in owners}, {account for _, account in owners} - {""}
    for job in (each for each in jobs if not each.has_ended):
        if not ids.isdisjoint(job.waits_for) and (job.user in users or job.account in accounts):
            return f"job {job.target} waits for the end of this job"
    return ""


def read_keep(job: LiveJob, policy: Policy) -> tuple[float, Exemption | None, str]:
    """Returns for how long the job's owner wants to keep idle GPUs (seconds, 0 without a wish), the exemption that this
    wish gives, and why the wish cannot be parsed ("" if it can).
    """
    match = KEEP.search(job.comment)
    if match is None:
        return 0.0, None, ""
    try:
        keep_s = min(parse_duration(match[1]), policy.exempt_max)
    except ValueError as exc:
        return 0.0, None, f"gpu-keep in the job's Comment cannot be read: {exc}"
    because = f": {one_line(match[2].strip(), REASON_MAX)}" if match[2] else ""
    return keep_s, Exemption("job", f"its Comment has gpu-keep={format_duration(keep_s)}{because}"), ""


def _facts(job: LiveJob) -> dict[str, tuple[str, ...] | None]:
    return {"job_names": None if job.title is None else (job.title,), "reservations": job.reservations}


def _kind(job: LiveJob) -> tuple[str, str]:
    if job.title and SCREENS.search(job.title):
        return INTERACTIVE, f"its name, {shorten(job.title, 40)!r}"
    if job.is_batch is None:
        return UNCLEAR, ""
    return (BATCH, "a batch script") if job.is_batch else (INTERACTIVE, "it has no batch script")
