"""What the tests of this subject share: the ledger's arithmetic: the rules of the ledger, one by one."""

from __future__ import annotations

from typing import Any

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey
from gpu_exporter.common.model.readings import Activity, Span
from gpu_exporter.common.model.totals import HolderTotals
from gpu_exporter.common.model.units import UnitId

UNIT = UnitId("GPU-0")
RULES = LedgerRules(
    poll_interval_s=5.0, stale_after_polls=3, low_ratio=0.1, high_ratio=0.7, idle_run_unknown_reset_s=60.0
)
START = 1_000.0
WALL = 1_700_000_000.0
POD = Holder(HolderKey("kubernetes", "uid-1/main"), namespace="ml", pod="train-0", container="main")
JOB = Holder(HolderKey("slurm", "lab/7/0/100"), job_id="7")


class Bench:
    """A ledger with the rhythm of a node: one span every second, one poll every five seconds."""

    def __init__(self) -> None:
        self.ledger = Ledger(RULES, START)
        self.now = START

    def observe(self, seconds: int, ratio: float, *, other: tuple[str, ...] = (), witnesses: int = 3) -> None:
        for _ in range(seconds):
            self.now += 1.0
            span = Span(self.now - 1.0, self.now, ratio, other)
            self.ledger.record(Activity(UNIT, (span,), witnesses))

    def silence(self, seconds: float) -> None:
        self.now += seconds

    def poll(
        self, *holders: Holder, confirmed: float | None = None, start: float | None = None, renewed_s: float = 0.0
    ) -> None:
        when = self.now if confirmed is None else confirmed
        held = [ConfirmedAllocation(Allocation(UNIT, h), when, start, renewed_s=renewed_s) for h in holders]
        self.ledger.charge_poll(self.now, self.wall, held)

    def run(self, seconds: int, ratio: float, *holders: Holder, other: tuple[str, ...] = ()) -> None:
        for _ in range(0, seconds, 5):
            self.observe(5, ratio, other=other)
            self.poll(*holders)

    def unit(self) -> Any:
        return self.ledger.unit_totals(UNIT, self.now, self.wall)

    @property
    def wall(self) -> float:
        return WALL + self.now - START

    def totals(self, holder: Holder) -> HolderTotals:
        totals = self.ledger.holder_totals(Allocation(UNIT, holder), self.now, self.wall)
        assert totals is not None
        return totals


OTHER_UNIT = UnitId("GPU-1")
MORE = Holder(HolderKey("slurm", "lab/8/0/100"), job_id="8")
LATER = Holder(HolderKey("slurm", "lab/9/0/100"), job_id="9")


def run_renewed(bench: Bench, minutes: int, ratio: float, renewed_s: float = 60.0) -> list[float | None]:
    """A job whose source confirms it every minute, while polls run every 5 s. Returns its idle run after each poll."""
    runs: list[float | None] = []
    for _ in range(minutes):
        confirmed = bench.now
        for _ in range(12):
            bench.poll(JOB, confirmed=confirmed, start=START, renewed_s=renewed_s)
            runs.append(bench.totals(JOB).idle_run_s)
            bench.observe(5, ratio)
    return runs
