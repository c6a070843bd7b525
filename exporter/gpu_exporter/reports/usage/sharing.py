"""Divides the hours of GPUs that several pods share (time slicing, MPS), if the exporter names only one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpu_exporter.reports.usage.cells import WINDOW_S, Cell, HolderId

REPLICAS = 1.5  # times its GPUs: a node that offers more has replicas. A broken GPU makes a smaller difference
HALF = 0.5  # GPUs that pods must request more than the node has. Pods that follow each other seem to request a bit more


def has_replicas(boards: int, pods: Mapping[HolderId, float], offered: float | None) -> bool:
    """Returns whether pods get parts of the GPUs of a node. `boards`: its GPUs. `pods`: requested seconds by pod.
    `offered`: its GPUs for Kubernetes, None if unknown.
    """
    if not boards:
        return False
    if offered is not None:
        return offered > REPLICAS * boards
    return len(pods) > 1 and sum(pods.values()) / WINDOW_S > boards + HALF


def share_out(
    template: Cell, units: Sequence[Cell], rests: Mapping[HolderId, float], requested: float, missing: float
) -> Iterator[Cell]:
    """Yields the cells of a node with replicas in one window.

    Pods that no exporter names may be on units without samples, or on units in use without a holder. Otherwise, they
    share the units of the pods that the exporter names, in proportion to their requests. Then nobody knows whose work
    a unit did.

    `template`: a cell for pods whose unit is not known. `rests`: requested seconds for which no exporter names the pod.
    `requested`: all requested seconds. `missing`: seconds of units without samples.
    """
    rest = sum(rests.values())
    held = sum(cell.seconds for cell in units if cell.holder is not None)
    outside = sum(_in_use(cell) for cell in units if cell.holder is None)
    unseen = min(rest, missing)
    on_others = min(rest - unseen, outside)
    shared = rest - unseen - on_others
    kept = 1.0 / (1.0 + shared / max(held, requested - rest))
    for cell in units:
        if cell.holder is None:
            claimed = on_others * _in_use(cell) / outside if outside else 0.0
            yield cell._replace(is_free=True, claimed=claimed)
        elif shared > 0.0:
            given = (1.0 - kept) * cell.seconds
            yield _keep(cell, kept, shared)
            yield Cell(
                cell.unit, None, cell.start, given, 0, unknown=given, claimed=given, is_free=True, source=cell.source
            )
        else:
            yield cell
    for holder, seconds in rests.items():
        part = seconds / rest
        for given, is_seen in ((part * unseen, False), (part * (on_others + held * (1.0 - kept)), True)):
            if given > 0.0:
                number = max(2, round(given / WINDOW_S))
                is_shared = is_seen and shared > 0.0
                yield template._replace(
                    holder=holder, seconds=given, samples=number, unknown=given, is_seen=is_seen, is_shared=is_shared
                )


def _in_use(cell: Cell) -> float:
    return cell.used + cell.low + cell.unknown


def _keep(cell: Cell, kept: float, shared: float) -> Cell:
    """The part of a unit of the pod that the exporter names. Work may be that of others for `shared` seconds."""
    work = cell.used + cell.low
    own = max(0.0, work - shared) / work if work else 0.0
    parts = {"used": own * cell.used, "low": own * cell.low, "idle": kept * cell.idle, "unproven": kept * cell.unproven}
    seconds = kept * cell.seconds
    return cell._replace(
        **parts,  # type: ignore[arg-type]
        seconds=seconds,
        unknown=max(0.0, seconds - sum(parts.values())),
        at_floors=tuple([kept * each for each in cell.at_floors]),
        busy=own * cell.busy,
        known=own * cell.known,
        peak_memory=None,
        is_shared=True,
    )
