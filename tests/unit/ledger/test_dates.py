"""Dates of the ledger: to the millisecond, and unchanged until the dated event changes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation, UnitAccount, read_date
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey
from gpu_exporter.common.model.readings import Activity, Span
from gpu_exporter.common.model.units import UnitId

RULES = LedgerRules(5.0, 3, 0.1, 0.7, 60.0)
POD = Holder(HolderKey("kubernetes", "uid-1/main"), pod="train-0")
WALL = 1_700_000_000.0


class Bench:
    """A unit and its holder, busy for 10 s and then idle. The two clocks are never read at the same moment."""

    def __init__(self, unit: UnitId) -> None:
        self.unit = unit
        self.allocation = Allocation(unit, POD)
        self.ledger = Ledger(RULES, 1_000.0)
        self.now = 1_000.0
        self.set_by = 0.0
        self._random = random.Random(1)
        self.charge_poll()

    @property
    def wall(self) -> float:
        """The wall clock, a few milliseconds off, as between two calls of the clocks."""
        return WALL + self.now - 1_000.0 + self.set_by + self._random.uniform(-0.004, 0.004)

    def run(self, seconds: int, ratio: float) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.ledger.record(Activity(self.unit, (Span(self.now - 1.0, self.now, ratio),), 2))
            self.charge_poll()

    def charge_poll(self) -> None:
        self.ledger.charge_poll(self.now, self.wall, [ConfirmedAllocation(self.allocation, self.now, None)])

    def dates(self) -> tuple[float | None, float | None, float]:
        """Last activity of the unit and of its holder, and the holder's start."""
        unit = self.ledger.unit_totals(self.unit, self.now, self.wall)
        holder = self.ledger.holder_totals(self.allocation, self.now, self.wall)
        assert unit is not None
        assert holder is not None
        return unit.last_active_wall, holder.last_active_wall, holder.start_wall


@pytest.fixture(params=[UnitId("GPU-0"), UnitId("GPU-0", "MIG-0")], ids=["GPU", "MIG instance"])
def bench(request: pytest.FixtureRequest) -> Bench:
    bench = Bench(request.param)
    bench.run(10, 0.5)
    return bench


def test_dates_of_an_idle_unit_do_not_move(bench: Bench) -> None:
    first = bench.dates()
    unit, holder, start = first
    assert unit == pytest.approx(WALL + 10.0, abs=0.01)
    assert holder == pytest.approx(WALL + 10.0, abs=0.01)
    assert start == pytest.approx(WALL, abs=0.01)
    assert all(value == round(value, 3) for value in first if value is not None)
    for _ in range(300):
        bench.run(1, 0.0)
        assert bench.dates() == first


def test_new_activity_gets_a_new_date(bench: Bench) -> None:
    before = bench.dates()
    bench.run(20, 0.0)
    bench.run(1, 1.0)
    after = bench.dates()
    assert after[0] == pytest.approx(WALL + 31.0, abs=0.01)
    assert after[1] == pytest.approx(WALL + 31.0, abs=0.01)
    assert after[2] == before[2]


def test_a_clock_that_was_set_moves_the_dates_once(bench: Bench) -> None:
    """Without this, a node that booted with a wrong clock would have a wrong date until the next activity."""
    before = bench.dates()
    bench.set_by = 3_600.0
    after = bench.dates()
    assert after[0] is not None
    assert before[0] is not None
    assert after[0] - before[0] == pytest.approx(3_600.0, abs=0.02)
    assert after[2] - before[2] == pytest.approx(3_600.0, abs=0.02)
    for _ in range(60):
        bench.run(1, 0.0)
        assert bench.dates() == after


@pytest.mark.parametrize("set_by", [-7_200.0, -600.0, 86_400.0])
def test_the_age_of_a_holder_is_right_after_its_clock_was_set_also_over_a_restart(
    bench: Bench, tmp_path: Path, set_by: float
) -> None:
    """Else its idle run is longer than its age, and it is unknown for ever."""
    bench.run(3_000, 0.0)
    bench.set_by = set_by
    state = StateFile(tmp_path, 10.0, "boot")
    state.commit(state.prepare(bench.ledger))
    bench.ledger = Ledger(RULES, bench.now)
    assert state.restore(bench.ledger) == ""
    bench.charge_poll()
    bench.run(5, 0.0)
    assert bench.wall - bench.dates()[2] == pytest.approx(3_015.0, abs=0.02)


def test_a_start_that_a_scheduler_states_stays_as_stated(bench: Bench) -> None:
    bench.allocation = bench.allocation._replace(
        holder=POD._replace(key=HolderKey("slurm", "lab/7/0/100"), start_wall=WALL - 100.0)
    )
    bench.charge_poll()
    bench.run(10, 0.0)
    bench.set_by = -3_600.0
    assert bench.dates()[2] == WALL - 100.0


def test_dates_survive_a_restart(bench: Bench, tmp_path: Path) -> None:
    first = bench.dates()
    state = StateFile(tmp_path, 10.0, "boot")
    state.commit(state.prepare(bench.ledger))
    bench.now += 7.0
    bench.ledger = Ledger(RULES, bench.now)
    assert state.restore(bench.ledger) == ""
    bench.charge_poll()
    bench.run(5, 0.0)
    assert bench.dates() == first


def test_the_last_activity_of_a_holder_that_never_worked_is_its_start(bench: Bench) -> None:
    idle = Bench(bench.unit)
    idle.run(10, 0.0)
    unit, holder, start = idle.dates()
    assert unit is None
    assert holder == start == round(start, 3)


def test_a_date_is_rounded_to_the_millisecond() -> None:
    assert read_date(UnitAccount(0.0, last_active=999.25), 1_000.0, WALL + 0.0054) == WALL - 0.745
