"""Finds out whether a holder and its gang make no progress, from the stalls that exporters report. Pure.

A gang is stalled if one member is stalled, and every other member is stalled or at rest, without work on its host. If
one member works, the others wait for it, and the gang is not stalled. A stall is only reported. It never leads to a
mark or an action.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.common.config.defaults import Policy, Stalls
from gpu_exporter.common.durations import describe_duration
from gpu_exporter.reconciler.decision.policy import Decision, is_fresh
from gpu_exporter.reconciler.decision.settle import Around
from gpu_exporter.reconciler.decision.surroundings import SERVING, Member, Surroundings, Unreadable
from gpu_exporter.reconciler.evidence.records import Evidence, HolderEvidence, HolderName, UnitEvidence

STALLED, SPINNING, UNKNOWN = "stalled", "spinning", "unknown"
UNKNOWN_MAX = 0.2  # share of the GPUs of a gang that may be unknown
AT_REST_S = Stalls().after  # a shorter rest is a pause of a rank that works in bursts
PROVEN_REST_S = Stalls().proven_after  # ... unless a member of the gang cannot go on
LOST = ("lost_rank", "high")  # the cause that proves it; as in alerts/src/seam.yaml
LATE_MAX = 3  # GPUs that a text names
SPINS_RATIO = 0.5  # share of its CPUs: more is work even if some processes spin; as in alerts/src/seam.yaml


class _Count(NamedTuple):
    """The GPUs of a gang.

    `working`: the work of a member that works, in words; "" if none works. `run_s`: the longest stall (seconds).
    """

    gpus: int
    stalled: int
    late: tuple[str, ...]
    working: str
    run_s: float


def with_stalls(evidence: Evidence, decisions: Sequence[Decision], around: Around, policy: Policy) -> list[Decision]:
    """Adds `stall` and `stall_why` to the decisions on holders of stalled gangs."""
    holders = {holder.name: holder for holder in evidence.holders}
    if not any(has_stall(holder) for holder in holders.values()):
        return list(decisions)
    counts: dict[int, _Count] = {}  # by the identity of the list of members, as in settle
    return [_judge(each, holders, around.get(each.name), counts, policy) for each in decisions]


def has_stall(holder: HolderEvidence) -> bool:
    return any((unit.stalled_run_s or 0.0) > 0.0 for unit in holder.units)


def _judge(
    decision: Decision,
    holders: Mapping[HolderName, HolderEvidence],
    around: Surroundings | Unreadable | None,
    counts: dict[int, _Count],
    policy: Policy,
) -> Decision:
    holder = holders[decision.name]
    if isinstance(around, Unreadable):
        return decision._replace(stall=UNKNOWN, stall_why=around.why) if has_stall(holder) else decision
    members = around.members if around is not None else ()
    if members:
        if id(members) not in counts:
            counts[id(members)] = _count(members, holders, policy)
        count = counts[id(members)]
    else:
        count = _count((Member(holder.name, "", holder.held),), holders, policy)
    if not count.stalled:
        return decision
    said = f"{count.stalled} of {count.gpus} GPUs have stalled, the longest for {describe_duration(count.run_s)}"
    if count.working:
        why = f"{said}, but {count.working}, and the stalled GPUs may wait for that work"
        return decision._replace(stall_why=why) if has_stall(holder) else decision
    unknown = count.gpus - count.stalled - len(count.late)
    if unknown > UNKNOWN_MAX * count.gpus:
        return decision._replace(stall=UNKNOWN, stall_why=f"{said}, but the state of {unknown} other GPUs is unknown")
    if count.late:
        said = f"{', '.join(count.late[:LATE_MAX])} at 0 %, so the others may wait for it; {said}"
    if around is not None and around.kind == SERVING:
        return decision._replace(stall=SPINNING, stall_why=f"{said}, and it serves requests ({around.kind_why})")
    return decision._replace(stall=STALLED, stall_why=said)


def _count(members: Collection[Member], holders: Mapping[HolderName, HolderEvidence], policy: Policy) -> _Count:
    gpus, stalled, run_s, working = 0, 0, 0.0, ""
    late: list[str] = []
    found = [holder for member in members if (holder := holders.get(member.name)) is not None]
    is_lost = any(cause[:2] == LOST for holder in found for unit in holder.units for cause in unit.causes)
    rest_s = PROVEN_REST_S if is_lost else AT_REST_S
    for member in members:
        holder = holders.get(member.name)
        units = holder.units if holder is not None else ()
        counted = member.units if member.units is not None else holder.held if holder is not None else None
        gpus += max(counted if counted is not None else 1, len(units))
        nodes = {unit.node for unit in units if (unit.stalled_run_s or 0.0) > 0.0}
        for unit in units:
            if unit.idle_run_s is not None and unit.stalled_run_s == 0.0 and unit.idle_run_s < rest_s:
                # Also where the sample is old: a node that does not answer is no reason to forget that it worked.
                working = working or f"{member.name} works on GPU {unit.gpu} of {unit.node}"
            elif not is_fresh(unit, policy):
                continue
            elif (unit.stalled_run_s or 0.0) > 0.0:
                stalled, run_s = stalled + 1, max(run_s, unit.stalled_run_s or 0.0)
            elif (unit.idle_run_s or 0.0) >= rest_s:
                if works := _describe_host(unit, SPINS_RATIO if unit.node in nodes else policy.host_busy_ratio, policy):
                    working = working or f"{member.name} works on the host of its GPU {unit.gpu} ({works})"
                late.append(f"GPU {unit.gpu} on {unit.node}")
    return _Count(gpus, stalled, tuple(late), working, run_s)


def _describe_host(unit: UnitEvidence, ratio: float, policy: Policy) -> str:
    """Returns the work of a holder on the host of a GPU at rest, in words; "" if it is below the limits or unknown."""
    if (unit.host_cpu_ratio or 0.0) > ratio:
        return f"{unit.host_cpu_ratio:.0%} of its CPUs"
    io = unit.host_io_bytes_per_s or 0.0
    return f"{io / 1e6:.0f} MB/s of its disks" if io > policy.host_busy_io else ""
