"""Judges each GPU and MIG instance as a unit of the table: its state, and the reason for it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from gpu_exporter.common.durations import format_age
from gpu_exporter.common.model.rows import UNKNOWN
from gpu_exporter.common.model.units import NO_PLACE, UnitId
from gpu_exporter.common.model.views import GpuView, View

IN_USE_INTERVALS = 3  # a unit that was busy within this number of sampling intervals counts as in use


class UnitState(NamedTuple):
    """The state of a GPU or MIG instance. `reason`: "" if the state needs no reason, or if the GPU's error is the
    reason.
    """

    state: str
    reason: str = ""


def judge_unit(gpu: GpuView, view: View, unit: UnitId, held: Collection[UnitId]) -> UnitState:
    """Returns the state of a unit. `held`: units with a holder. They get the state `held`, because each allocation has
    its own state.
    """
    snapshot = gpu.snapshot
    if snapshot.away:
        return UnitState("away")
    if gpu.hung:  # a GPU that was never read has no age
        silent = f"the driver has not answered for {format_age(gpu.age_s)}"
        return UnitState("hung", silent if gpu.age_s >= 1.0 else "")
    if not snapshot.up:
        known = snapshot.identity.uuid or snapshot.identity.index != NO_PLACE
        return UnitState("lost" if known else "missing")
    if gpu.withheld:
        return UnitState("stale", f"last answer {format_age(gpu.age_s)} ago")
    if unit in held:
        return UnitState("held")
    if snapshot.instances and not unit.mig_uuid:
        return UnitState("mig")
    return UnitState(*describe_unheld(gpu, view, unit.mig_uuid))


def describe_unheld(gpu: GpuView, view: View, mig_uuid: str = "") -> tuple[str, str]:
    """Returns the state of a GPU or MIG instance without a holder, and the reason if it is not free.

    The unit is free only if every source has answered, no program uses it, and no scheduler has closed the node.
    Without sources, the state is unknown.
    """
    if not_free := gpu.not_free.get(mig_uuid, "") or gpu.snapshot.contradiction:
        return "unknown", not_free
    if not view.status.sources:
        return UNKNOWN, ""
    use = _describe_use(gpu, view, mig_uuid)
    if use or not view.status.attribution_known:
        return "unknown", use
    closed = "; ".join(text for source in view.status.sources if (text := source.say_closed()))
    return ("closed", closed) if closed else ("free", "")


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
        return "in use by an unknown holder"
    return "a process of an unknown holder has opened it" if facts.compute_processes else ""
