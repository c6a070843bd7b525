"""Turns a view into rows for people: one row for each allocation, and for each unit without a holder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpu_exporter.agent.exposition.health import describe_recovery, label_of
from gpu_exporter.common.durations import format_age
from gpu_exporter.common.model.causes import Causes
from gpu_exporter.common.model.meanings import STATES
from gpu_exporter.common.model.rows import UNKNOWN, Row
from gpu_exporter.common.model.units import NO_PLACE, UnitId
from gpu_exporter.common.model.views import AllocationView, GpuView, View

FAULTS = frozenset(("throttled", "stalled", "lost", "missing", "hung", "stale"))  # have an advice without a cause
IN_USE_INTERVALS = 3  # a unit that was busy within this number of sampling intervals counts as in use


def list_rows(view: View) -> list[Row]:
    """Returns the rows in the order of the GPUs. Rows of MIG instances follow the row of their board."""
    rows: list[Row] = []
    by_unit: dict[UnitId, list[AllocationView]] = {}
    for allocation in view.allocations:
        by_unit.setdefault(allocation.allocation.unit, []).append(allocation)
    for gpu in view.gpus:
        rows += _gpu_rows(gpu, view, by_unit)
    return list(_once_per_holder(rows))


def _once_per_holder(rows: Iterable[Row]) -> Iterator[Row]:
    """Yields the rows, and empties an advice that an earlier row of the same holder has."""
    said: set[tuple[str, str]] = set()
    for row in rows:
        yield row._replace(advice="") if (row.holder, row.advice) in said else row
        said.add((row.holder, row.advice))


def by_waste(rows: Iterable[Row]) -> list[Row]:
    """Sorts rows with a holder by idle or stalled time, the longest first. All other rows keep their order."""
    return sorted(rows, key=lambda row: -row.wasted_s)


def _gpu_rows(gpu: GpuView, view: View, by_unit: dict[UnitId, list[AllocationView]]) -> Iterator[Row]:
    identity = gpu.snapshot.identity
    whole = by_unit.get(UnitId(identity.uuid), [])
    for allocation in whole:
        yield _row(gpu, view, label_of(gpu), identity.name, allocation)
    if not whole:
        unheld = ("mig", "") if gpu.snapshot.instances else describe_unheld(gpu, view)
        yield _row(gpu, view, label_of(gpu), identity.name or UNKNOWN, None, unheld)
    for instance in gpu.snapshot.instances:
        label = f"{identity.index}:{instance.mig}"
        holders = by_unit.get(UnitId(identity.uuid, instance.uuid), [])
        for held in holders:
            yield _row(gpu, view, label, instance.profile, held, mig=True)
        if not holders:
            yield _row(gpu, view, label, instance.profile, None, describe_unheld(gpu, view, instance.uuid), mig=True)


def describe_unheld(gpu: GpuView, view: View, mig_uuid: str = "") -> tuple[str, str]:
    """Returns the state of a GPU or MIG instance without a holder, and the reason if it is not free.

    It is free only if every source has answered and no program uses it. Without sources, the state is unknown.
    """
    if not_free := gpu.not_free.get(mig_uuid, "") or gpu.snapshot.contradiction:
        return "unknown", not_free
    if not view.status.sources:
        return UNKNOWN, ""
    use = _describe_use(gpu, view, mig_uuid)
    return "free" if view.status.attribution_known and not use else "unknown", use


def _describe_use(gpu: GpuView, view: View, mig_uuid: str) -> str:
    """Returns a text with the use of a unit without a holder; "" if the last readings show no use."""
    if not gpu.snapshot.up or gpu.withheld:
        return ""
    instance = next((each for each in gpu.snapshot.instances if each.uuid == mig_uuid), None)
    facts = gpu.snapshot.facts if instance is None else instance.facts
    totals = gpu.instance_totals.get(mig_uuid) if mig_uuid else gpu.totals
    last = totals.last_active_wall if totals is not None else None
    since = view.wall - IN_USE_INTERVALS * view.status.sample_interval_s
    if facts.utilization or (last is not None and last >= since):
        return "in use, but its holder is unknown"
    return "a process is on it, but its holder is unknown" if facts.compute_processes else ""


def _judge_row(gpu: GpuView, allocation: AllocationView | None, unheld: tuple[str, str]) -> tuple[str, str]:
    """Returns the state of a row, and the reason. `unheld`: state and reason of a unit without a holder."""
    if gpu.snapshot.away:
        return "away", gpu.snapshot.error
    if gpu.hung:
        silent = f"the driver has not answered for {format_age(gpu.age_s)}"
        return "hung", silent if gpu.age_s >= 1.0 else gpu.snapshot.error  # a GPU that was never read has no age
    if not gpu.snapshot.up:
        return "missing" if gpu.snapshot.identity.index == NO_PLACE else "lost", gpu.snapshot.error
    if gpu.withheld:
        return "stale", f"last answer {format_age(gpu.age_s)} ago"
    if allocation is not None:
        return allocation.verdict.state, allocation.verdict.evidence
    return unheld


def _row(
    gpu: GpuView,
    view: View,
    label: str,
    name: str,
    allocation: AllocationView | None,
    unheld: tuple[str, str] = ("", ""),
    *,
    mig: bool = False,
) -> Row:
    fresh = gpu.snapshot.up and not gpu.withheld
    state, why = _judge_row(gpu, allocation, unheld)
    utilization = memory = power = temperature = held = idle = None
    if fresh and allocation is not None:
        utilization, memory = allocation.utilization, allocation.memory_used_bytes
    elif fresh and not mig:
        utilization, memory = gpu.snapshot.facts.utilization, gpu.snapshot.facts.memory_used_bytes
    if fresh and not mig:
        power, temperature = gpu.snapshot.facts.power_w, gpu.snapshot.facts.temperature_celsius
    elif fresh and allocation is not None:
        power = allocation.power_w  # the estimate for the instance
    stalled: float | None = None
    holder = owner = cause = advice = ""
    if allocation is not None:
        who = allocation.allocation.holder
        holder = who.label
        owner = "/".join(part for part in (who.user, who.account) if part)
        held = view.wall - allocation.totals.start_wall
        idle = allocation.totals.idle_run_s if allocation.totals.known else None
        stalled = allocation.stalled_run_s
        if state == allocation.verdict.state:  # the GPU answers
            cause, said, advice = describe_causes(allocation.causes)
            why = said if allocation.causes.ranked else "; ".join(filter(None, (why, said)))
    if not advice and state in FAULTS:
        advice = STATES[state].owner if allocation is not None and STATES[state].owner else STATES[state].site
    if not mig:
        failed = [outcome.error for outcome in gpu.snapshot.outcomes if not outcome.success]
        why = "; ".join(filter(None, (describe_recovery(gpu) if fresh else "", why, *failed[:1])))
    throttling = gpu.throttling if fresh and not mig else None
    age = (
        gpu.age_s if gpu.snapshot.up else None
    )  # of a GPU that is not up, age_s is the time since it last failed to answer
    return Row(
        label,
        name,
        utilization,
        memory,
        power,
        temperature,
        holder,
        owner,
        held,
        idle,
        state,
        why,
        throttling,
        age,
        stalled,
        cause,
        advice,
    )


def describe_causes(causes: Causes) -> tuple[str, str, str]:
    """Returns the most certain cause with its confidence, its evidence, and its advice.

    Without a cause: `unknown`, and the data that would be needed to find one. All are "" if the state needs no cause.
    """
    if causes.ranked:
        first = causes.ranked[0]
        return f"{first.name} {first.confidence}", first.evidence, first.advice or ""
    return ("unknown", f"not enough evidence: needs {causes.needs[0]}", "") if causes.needs else ("", "", "")
