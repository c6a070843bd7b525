"""Reads the newest data of each allocation for diagnosis: its utilization in buckets, and the reasons for gaps."""

from __future__ import annotations

from gpu_exporter.agent.ledger.ledger import Ledger
from gpu_exporter.agent.node.sharing import Sharing
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.records import GpuRecord, HolderRecord
from gpu_exporter.common.model.totals import UnitTotals
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.diagnosis.interface import Boards, Window


class WindowReader:
    """Reads the newest data of each allocation. Not thread-safe: the node's lock protects it."""

    def __init__(self, ledger: Ledger, sharing: Sharing, boards: Boards, clock: Clock, window_s: float) -> None:
        """`window_s`: how far back the data reaches at most, in seconds."""
        self._ledger, self._sharing, self._boards = ledger, sharing, boards
        self._clock, self._window_s = clock, window_s

    def read(self, record: HolderRecord, gpu: GpuRecord) -> Window:
        unit, totals = record.allocation.unit, record.totals
        is_alone = not record.allocation.is_shared
        of_unit = gpu.totals.get(unit.mig_uuid)
        length_s = min(self._window_s, totals.held_s)
        return Window(
            values=self.read_unit(unit, length_s) if is_alone else self._read_own(record, length_s),
            held_s=totals.held_s,
            idle_run_s=totals.idle_run_s,
            active_by=self._ended_by(of_unit, totals.idle_run_s or 0.0, record.stale_s) if is_alone else (),
            processes=_count_processes(record, gpu, is_alone=is_alone),
            spin=record.spin,
            hour=self._boards.means(*record.id),
            gap=gpu.snapshot.contradiction or ("" if is_alone else self._sharing.doubts.get(unit, "")),
            note=gpu.snapshot.note,
            witnesses=totals.idle_run_witnesses,
            lag_s=self._ledger.rules.longest_unconfirmed_s() + record.unconfirmed_s,
        )

    def read_unit(self, unit: UnitId, length_s: float | None) -> tuple[float | None, ...]:
        """Returns the utilization of a unit over the last `length_s` seconds, by default over all buckets."""
        ring = self._ledger.unit_ring(unit)
        return ring.values(self._clock.monotonic(), length_s) if ring is not None else ()

    def _read_own(self, record: HolderRecord, length_s: float) -> tuple[float | None, ...]:
        """Returns the holder's use in buckets: 1 if the holder uses its whole share of the unit. Busy neighbours leave
        the holder only this share.
        """
        ring = self._ledger.holder_ring(record.id)
        values = ring.values(self._clock.monotonic(), length_s) if ring is not None else ()
        holders = self._sharing.count_holders(record.allocation.unit)
        return tuple(None if value is None else min(1.0, holders * value) for value in values)

    def _ended_by(self, unit: UnitTotals | None, idle_run_s: float, stale_s: float) -> tuple[str, ...]:
        """Returns the witnesses of the unit's last activity. Empty if it cannot have ended the last idle run."""
        rules = self._ledger.rules
        if unit is None or unit.last_active_wall is None:
            return ()
        unknown_s = max(rules.idle_run_unknown_reset_s, rules.idle_run_unknown_max_ratio * idle_run_s)
        reach_s = idle_run_s + unknown_s + stale_s
        return unit.active_by if self._clock.wall() - unit.last_active_wall <= reach_s else ()


def _count_processes(record: HolderRecord, gpu: GpuRecord, *, is_alone: bool) -> float | None:
    """Returns the number of the holder's GPU contexts, None if unknown."""
    if not is_alone:
        return record.use.processes if record.use is not None else None
    return gpu.snapshot.facts.contexts if not record.allocation.unit.mig_uuid else None
