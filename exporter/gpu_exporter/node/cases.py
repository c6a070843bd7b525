"""Allocations as the rules for causes see them: with the other GPUs of their holder, and the looks at its host."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpu_exporter.attribution.contradict import Who, identify
from gpu_exporter.diagnosis.causes.case import CauseCase, HeldGpu, HostLook
from gpu_exporter.diagnosis.hold import AllocationId
from gpu_exporter.diagnosis.state import Window
from gpu_exporter.node.view import HolderRecord, NodeRecords

FIRST_S = 60.0  # a holder that was seen within this time after the exporter's start may be much older


class NodeCases:
    """The cases of one moment."""

    def __init__(
        self,
        records: NodeRecords,
        windows: Mapping[AllocationId, Window],
        looks: Callable[[Who | None], tuple[HostLook, ...]],
        running_s: float,
    ) -> None:
        """`looks`: those at a holder. `running_s`: how long the exporter has been running."""
        self._records, self._windows, self._looks, self._running_s = records, windows, looks, running_s
        self._of: dict[Who | None, list[HolderRecord]] = {}
        self._by_id: dict[AllocationId, HolderRecord] = {}
        for record in records.holders:
            self._of.setdefault(identify(record.allocation.holder), []).append(record)
            self._by_id[record.id] = record

    def describe(self, subject: AllocationId) -> CauseCase | None:
        """One allocation; None if it is not shown any more."""
        record, window = self._by_id.get(subject), self._windows.get(subject)
        if record is None or window is None:
            return None
        who = identify(record.allocation.holder)
        own = self._of[who] if who is not None else [record]
        return CauseCase(
            state="",
            uuid=record.allocation.unit.uuid,
            held_s=self._records.wall - record.totals.start_wall,
            worked=self._has_worked(record),
            idle_run_s=window.idle_run_s,
            mean=_mean(window),
            processes=window.processes,
            spin=window.spin,
            members=tuple(member for each in own if (member := self._describe_member(each)) is not None),
            looks=self._looks(who),
        )

    def _describe_member(self, record: HolderRecord) -> HeldGpu | None:
        unit, window = record.allocation.unit, self._windows.get(record.id)
        if unit.mig_uuid or record.allocation.is_shared or window is None:
            return None
        index = self._records.gpus[unit.uuid].snapshot.identity.index
        return HeldGpu(unit.uuid, str(index), _mean(window), window.processes, window.idle_run_s, window.spin)

    def _has_worked(self, record: HolderRecord) -> bool | None:
        """Whether its GPU has ever worked for this holder; None if the holder may be older than the exporter."""
        totals = record.totals
        if totals.busy_s > 0.0 or (totals.last_active_wall or 0.0) > totals.start_wall + 1.0:
            return True
        return None if abs(self._running_s - totals.held_s) < FIRST_S else False


def _mean(window: Window) -> float | None:
    known = [value for value in window.values if value is not None]
    return sum(known) / len(known) if known else None
