"""Reads the surroundings of a job: other components of a heterogeneous job, its class, and the wish in its Comment.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.slurm.live import LiveJob

SCHEDULER = "slurm"
REQUEUE, CANCEL = ACTIONS[3:]
# The wish to keep idle GPUs, anywhere in a job's Comment: gpu-keep=4h or gpu-keep=4h:reason.
KEEP = re.compile(r"(?:^|[\s;,|])gpu-keep=([^\s;,|:]*)(?::([^;,|]*))?")
# Names of interactive jobs: those that Open OnDemand starts, and servers for interactive work.
SCREENS = re.compile(r"^sys/dashboard/|jupyter|code-server|rstudio", re.IGNORECASE)
REASON_MAX = 120  # characters of an owner's words


def describe(job: LiveJob, jobs: Iterable[LiveJob], policy: Policy) -> Surroundings:
    """The surroundings of a job among all `jobs`."""
    kind, kind_why = _kind(job)
    siblings = [each for each in jobs if job.leader and each.leader == job.leader and not each.has_ended]
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
        possible=(CANCEL,) if job.leader else (REQUEUE, CANCEL),
        shown=kind,
    )


def read_keep(job: LiveJob, policy: Policy) -> tuple[float, Exemption | None, str]:
    """The job's wish to keep idle GPUs: seconds (0 for no wish), in words, and why it is unreadable ("" if it is
    not).
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


def _kind(job: LiveJob) -> tuple[str, str]:
    if SCREENS.search(job.title):
        return INTERACTIVE, f"its name, {shorten(job.title, 40)!r}"
    if job.is_batch is None:
        return UNCLEAR, ""
    return (BATCH, "a batch script") if job.is_batch else (INTERACTIVE, "it has no batch script")
