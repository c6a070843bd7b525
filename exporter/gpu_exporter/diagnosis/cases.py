"""Builds the input of the rules for causes: an allocation, the holder's other GPUs, and the looks at the holder's host.

A look is one reading of a holder's host: its cgroup, its processes and its files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from gpu_exporter.common.model.holders import AllocationId, Who, identify
from gpu_exporter.common.model.records import HolderRecord, NodeRecords
from gpu_exporter.diagnosis.causes.case import CauseCase, HeldGpu, HostLook
from gpu_exporter.diagnosis.state import Window

FIRST_S = 60.0  # a holder that was seen within this time after the first complete poll may be much older
STALE_S = 300.0  # without a look for this time, its cgroup is gone, or the looks fail
KNOWN_MIN = 0.9  # share of the held time that must be known before a GPU counts as never used


class NodeCases:
    """Builds the case of each allocation, from the records of one moment."""

    def __init__(
        self,
        records: NodeRecords,
        windows: Mapping[AllocationId, Window],
        looks: Callable[[Who | None], tuple[HostLook, ...]],
        running_s: float,
        gpus: int,
    ) -> None:
        """`looks`: returns the looks at a holder's host. `gpus`: number of GPUs of the node.

        `running_s`: seconds since every source of holders had answered at least once.
        """
        self._records, self._windows, self._looks = records, windows, looks
        self._running_s, self._gpus = running_s, gpus
        self._of: dict[Who | None, list[HolderRecord]] = {}
        self._by_id: dict[AllocationId, HolderRecord] = {}
        for record in records.holders:
            self._of.setdefault(identify(record.allocation.holder), []).append(record)
            self._by_id[record.id] = record
        self._held = self._share_of(records.holders)

    def describe(self, subject: AllocationId) -> CauseCase | None:
        """Returns the case of one allocation. None if the allocation is no longer shown."""
        record, window = self._by_id.get(subject), self._windows.get(subject)
        if record is None or window is None:
            return None
        who = identify(record.allocation.holder)
        own = self._of[who] if who is not None else [record]
        return CauseCase(
            state="",
            uuid=record.allocation.unit.uuid,
            held_s=self._records.wall - record.totals.start_wall,
            worked=self._have_worked(own),
            idle_run_s=window.idle_run_s,
            mean=_mean(window),
            processes=window.processes,
            spin=window.spin,
            members=tuple(member for each in own if (member := self._describe_member(each)) is not None),
            looks=self._fresh(self._looks(who)),
            memory=self._read_memory(record),
            training=record.training.pace if record.training is not None else None,
            share=self._share_of(own),
            held=self._held,
        )

    def _share_of(self, records: Sequence[HolderRecord]) -> float:
        """The share of the node's GPUs that these records hold."""
        return min(1.0, sum(each.allocation.share_ratio for each in records) / max(1, self._gpus))

    def _read_memory(self, record: HolderRecord) -> float | None:
        """The share of a whole GPU's memory that is in use. None for a MIG instance or a shared GPU, or if unknown."""
        facts = self._records.gpus[record.allocation.unit.uuid].snapshot.facts
        if record.allocation.unit.mig_uuid or record.allocation.is_shared or not facts.memory_total_bytes:
            return None
        return None if facts.memory_used_bytes is None else facts.memory_used_bytes / facts.memory_total_bytes

    def _describe_member(self, record: HolderRecord) -> HeldGpu | None:
        unit, window = record.allocation.unit, self._windows.get(record.id)
        if unit.mig_uuid or record.allocation.is_shared or window is None:
            return None
        index = self._records.gpus[unit.uuid].snapshot.identity.index
        return HeldGpu(unit.uuid, str(index), _mean(window), window.processes, window.idle_run_s, window.spin)

    def _fresh(self, looks: tuple[HostLook, ...]) -> tuple[HostLook, ...]:
        """Returns the looks, or an empty tuple if the newest look is older than STALE_S."""
        is_old = bool(looks) and self._records.monotonic - looks[-1].evidence.end > STALE_S
        return () if is_old else looks

    def _have_worked(self, records: Sequence[HolderRecord]) -> bool | None:
        """Whether any GPU has worked for this holder. False only if certainly no GPU has; None if unknown."""
        found = [self._has_worked(record) for record in records]
        return True if True in found else None if None in found else False

    def _has_worked(self, record: HolderRecord) -> bool | None:
        """Whether this GPU has ever worked for its holder. None if too little of the holder's time is known."""
        totals = record.totals
        if totals.busy_s > 0.0 or (totals.last_active_wall or 0.0) > totals.start_wall + 1.0:
            return True
        if not totals.known or totals.observed_s < KNOWN_MIN * totals.held_s:
            return None
        return None if self._running_s - totals.held_s < FIRST_S else False


def _mean(window: Window) -> float | None:
    known = [value for value in window.values if value is not None]
    return sum(known) / len(known) if known else None
