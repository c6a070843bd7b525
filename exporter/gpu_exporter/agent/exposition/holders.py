"""Renders the table of holders, with the evidence for each holder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpu_exporter.agent.exposition.units import describe_unheld
from gpu_exporter.common.durations import format_age
from gpu_exporter.common.model.holders import SourceStatus
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.model.views import AllocationView, GpuView, View
from gpu_exporter.common.plain import layout, one_line

HEADER = ("GPU", "UUID", "HOLDER", "OWNER", "SHARE", "SOURCE", "EVIDENCE", "CONFIRMED", "SINCE", "DOUBT")
RIGHT = frozenset(("CONFIRMED", "SINCE"))
NONE = "-"


def render_holders(view: View) -> str:
    """Returns a table with one line for each allocation, and for each unit without a holder. Ends with a newline.

    After the table come the status and errors of each source.
    """
    by_unit: dict[UnitId, list[AllocationView]] = {}
    for allocation in view.allocations:
        by_unit.setdefault(allocation.allocation.unit, []).append(allocation)
    rows = [row for gpu in view.gpus for row in _rows(gpu, view, by_unit)]
    lines = layout(HEADER, rows, RIGHT)
    if not view.status.sources:
        lines.append("no source of holders is configured: see --attribution in `gpu-exporter --help`")
    for source in view.status.sources:
        said = "never answered" if source.last_success_wall is None else "does not answer"
        if source.up:
            said = "answers" if source.complete else "answers in part"
        conflicts = f", {source.conflicts} conflicts" if source.conflicts else ""
        texts = [one_line(text) for text in (source.error, source.notice) if text]
        why = f": {texts.pop(0)}" if source.error else ""  # the fault and its reason are one line
        lines.append(f"source {source.name}: {said}{conflicts}{why}")
        lines += [f"source {source.name}: {text}" for text in texts]
    return "\n".join(lines) + "\n"


def _rows(gpu: GpuView, view: View, by_unit: dict[UnitId, list[AllocationView]]) -> Iterator[tuple[str, ...]]:
    identity = gpu.snapshot.identity
    units = [(identity.label, UnitId(identity.uuid))]
    units += [(f"{identity.label}:{i.mig}", UnitId(identity.uuid, i.uuid)) for i in gpu.snapshot.instances]
    for label, unit in units:
        name = unit.mig_uuid or unit.uuid
        holders = by_unit.get(unit, [])
        for held in holders:
            yield _held(label, name, held, view.wall)
        if not holders and not (gpu.snapshot.instances and not unit.mig_uuid):
            state, why = describe_unheld(gpu, view, unit.mig_uuid)
            doubt = why or ("" if state == "free" else _why_unknown(view.status.sources))
            shown = state if state in ("free", "closed") else "unknown"
            yield (label, name, f"({shown})", *[NONE] * 6, doubt)


def _why_unknown(sources: Sequence[SourceStatus]) -> str:
    """Returns why a unit without a holder may be held."""
    silent = [source.name for source in sources if not source.up]
    if silent:
        return f"source {', '.join(silent)} does not answer"
    partial = [source.name for source in sources if not source.complete or source.error]
    if partial:
        return f"a holder of source {', '.join(partial)} may have it: the reason is below"
    return "a holder has started, and its GPU is not known yet" if sources else "no source of holders"


def _held(label: str, name: str, view: AllocationView, wall: float) -> tuple[str, ...]:
    allocation = view.allocation
    holder = allocation.holder
    share = "whole" if allocation.share == "none" else f"{allocation.share} {allocation.share_ratio:.0%}"
    return (
        label,
        name,
        holder.label,
        "/".join(part for part in (holder.user, holder.account) if part) or NONE,
        share,
        holder.source,
        allocation.basis or NONE,
        f"{format_age(view.unconfirmed_s)} ago",
        format_age(wall - view.totals.start_wall),
        allocation.contradiction or allocation.why,
    )
