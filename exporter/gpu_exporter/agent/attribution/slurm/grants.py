"""Makes the grant of a device from a job's position (IDX), and describes the evidence for and against the grant.

Reads only the files that name MIG instances, and has no other side effects.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from gpu_exporter.agent.attribution.slurm.controller import KnownJob
from gpu_exporter.agent.attribution.slurm.gres.conf import GpuOrder
from gpu_exporter.agent.attribution.slurm.gres.mig_caps import find_instance, read_caps
from gpu_exporter.agent.attribution.slurm.on_node.job_files import JobFile
from gpu_exporter.agent.attribution.slurm.on_node.presence import Present
from gpu_exporter.agent.attribution.slurm.on_node.steps import Steps
from gpu_exporter.agent.attribution.slurm.parse import JobGpus
from gpu_exporter.common.model.holders import Grant, Holder

STATE = re.compile("[A-Z_]{1,30}")  # of a job, as Slurm writes it


def make_grant(index: int, order: GpuOrder, holder: Holder, why: str, obstacle: str) -> Grant:
    """Returns the grant of the GPU at this IDX.

    `why`: the reason why the job does not run, "" if it runs. `obstacle`: the same reason as one word. If the order of
    the GPUs is not proven, the grant gets the unit that the same number meant before, if known.
    """
    kind: Literal["minor", "index", "unproven"] = "unproven" if order.kind == "unknown" else order.kind
    device, reason = str(index), order.problem
    if order.kind == "minor":
        device = order.minors[index] if index < len(order.minors) else ""
        if not device:
            kind, reason = "unproven", f"gres.conf names no whole GPU at IDX {index}"
    return Grant(
        kind,
        device,
        holder,
        running=not why,
        why=why,
        obstacle=obstacle,
        number=f"IDX {index}",
        among=order.minors if order.kind == "index" else (),
        total=order.total,
        reason=reason,
    )


def why_not_running(known: KnownJob, steps: Steps) -> tuple[str, str]:
    """Returns why a job does not run, as a text and as one word. Both are "" if the job runs."""
    state = known.job.state
    if state != "RUNNING":
        return f"the job is {state}", state.lower() if STATE.fullmatch(state) else "other"
    if known.job.job_id in steps.stopped:
        return "all processes of the job are stopped", "stopped"
    return "", ""


def why_contradicted(gpus: JobGpus, file: JobFile) -> str:
    """Returns why the grant is contradicted: prolog and slurmctld name different GPUs. "" if it is not.

    If slurmctld names only some of the GPUs in the file, the job may have been resized, which is not a contradiction.
    """
    if not file.indexes or set(gpus.positions()) <= set(file.indexes):
        return ""
    sayings = (",".join(map(str, indexes)) for indexes in (file.indexes, gpus.positions()))
    return "the prolog's file lists IDX {}, but slurmctld reports IDX {}".format(*sayings)


def list_witnesses(job_id: str, present: Present, *, is_reported: bool) -> str:
    """Returns a text with the evidence that the job is on this node. `is_reported`: slurmctld has reported the job."""
    own = ["step"] * (job_id in present.steps.pids) + ["prolog"] * (job_id in present.files)
    return ", ".join((*own, *["slurmctld"] * is_reported))


def open_instance(grant: Grant, index: int, order: GpuOrder, procfs: Path) -> Grant:
    """Adds the MIG instance to a grant, found from the capability files that gres.conf lists for it."""
    caps = order.caps[index] if index < len(order.caps) else ()
    instance = find_instance(caps, read_caps(procfs)) if caps else ""
    return grant._replace(kind="instance", device=instance) if instance else grant


def name_by_prolog(grant: Grant, index: int, gpus: JobGpus, file: JobFile) -> Grant:
    """Adds the prolog's UUID to a grant with an unproven position. Returns the grant unchanged if the prolog wrote no
    UUID.
    """
    if file.indexes and len(file.indexes) == len(file.uuids) and index in file.indexes:
        return grant._replace(kind="uuid", device=file.uuids[file.indexes.index(index)])
    if not file.indexes and len(file.uuids) == len(gpus.positions()):
        return grant._replace(kind="uuid", device=file.uuids[sorted(gpus.positions()).index(index)])
    return grant
