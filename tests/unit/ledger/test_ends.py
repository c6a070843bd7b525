"""Jobs that start and end between two polls, one after the other: with known ends, each job gets its own time."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.agent.ledger.records import HolderPresence
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey
from gpu_exporter.common.model.readings import Activity, Span
from gpu_exporter.common.model.totals import TenantTotals
from gpu_exporter.common.model.units import UnitId

START, WALL = 1_000.0, 1_700_000_000.0
RULES = LedgerRules(
    poll_interval_s=5.0, stale_after_polls=3, low_ratio=0.1, high_ratio=0.7, idle_run_unknown_reset_s=60.0
)
UNITS = (UnitId("GPU-0"), UnitId("GPU-1"))


class Job(NamedTuple):
    """A job on one GPU from `begin` to `end` (monotonic seconds). Its start is in whole seconds, as slurmctld reports
    it.
    """

    number: int
    unit: UnitId
    begin: float
    end: float

    @property
    def holder(self) -> Holder:
        return Holder(HolderKey("slurm", f"lab/{self.number}/0/0"), job_id=str(self.number), user=f"u{self.number}")

    def entry(self, confirmed: float, share: str = "none") -> ConfirmedAllocation:
        return ConfirmedAllocation(Allocation(self.unit, self.holder, share), confirmed, math.floor(self.begin))


class Node:
    """One reading of each GPU every second, one poll every five seconds. `knows_ends`: an epilog reports when a job
    ended.
    """

    def __init__(self, jobs: list[Job], *, knows_ends: bool = True) -> None:
        self.ledger, self.jobs, self.now = Ledger(RULES, START), jobs, START
        self.knows_ends = knows_ends
        self._told: set[int] = set()
        self.poll()

    def poll(self) -> None:
        held = [job.entry(self.now) for job in self.jobs if job.begin <= self.now < job.end]
        gone = [job for job in self.jobs if job.end <= self.now and job.number not in self._told]
        self._told |= {job.number for job in gone}
        ended = [job.entry(job.end) for job in reversed(gone)] if self.knows_ends else []  # in any order
        self.ledger.charge_poll(self.now, WALL + self.now, held, ended)

    def run(self, seconds: int, ratio: float = 1.0) -> dict[str, TenantTotals]:
        """The totals by user, after this time at this utilization."""
        for _ in range(seconds):
            self.now += 1.0
            for unit in UNITS:
                self.ledger.record(Activity(unit, (Span(self.now - 1.0, self.now, ratio, (), 3),), 3))
            if self.now % 5 == 0:
                self.poll()
        return {tenant.user: totals for tenant, totals in self.ledger.tenants.totals()}


def chain(unit: UnitId, lengths: list[tuple[float, float]], first: int = 1) -> list[Job]:
    """Jobs one after the other, each with a pause before it and a length."""
    jobs, at = [], START + 1.0
    for number, (pause, length) in enumerate(lengths, first):
        jobs.append(Job(number, unit, at + pause, at + pause + length))
        at = jobs[-1].end
    return jobs


@pytest.mark.parametrize("length", [3.0, 10.0, 20.0])
def test_jobs_directly_after_one_another_each_get_their_own_time(length: float) -> None:
    jobs = chain(UNITS[0], [(0.2, length)] * 24)
    seconds = math.ceil(jobs[-1].end - START) + 10
    found = Node(jobs).run(seconds)
    for job in jobs:
        totals = found[f"u{job.number}"]
        assert totals.held_s == pytest.approx(length, abs=0.21), "from the whole second, or the end of the job before"
        assert totals.known_s == totals.busy_s == pytest.approx(totals.held_s)
    guessed = Node(jobs, knows_ends=False).run(seconds)
    assert sum(each.known_s for each in guessed.values()) < 0.9 * sum(each.known_s for each in found.values())


def test_an_end_ends_an_idle_run_and_no_other_holder_gets_it() -> None:
    jobs = chain(UNITS[0], [(0.0, 7.0), (0.0, 400.0)])
    node = Node(jobs)
    found = node.run(300, ratio=0.0)
    assert found["u1"].idle_s == pytest.approx(7.0, abs=0.1)
    totals = node.ledger.holder_totals(Allocation(UNITS[0], jobs[1].holder), node.now, WALL + node.now)
    assert totals is not None
    assert totals.idle_run_s == pytest.approx(node.now - jobs[1].begin, abs=0.1)


def test_a_holder_of_another_gpu_is_not_affected_by_ends() -> None:
    long = Job(99, UNITS[1], START + 1.0, START + 10_000.0)
    jobs = [long, *chain(UNITS[0], [(0.5, 2.0)] * 40)]
    node = Node(jobs)
    node.run(150, ratio=0.0)
    totals = node.ledger.holder_totals(Allocation(UNITS[1], long.holder), node.now, WALL + node.now)
    assert totals is not None
    assert totals.idle_run_s == totals.held_s == pytest.approx(node.now - long.begin)


def test_a_sharer_is_not_charged_for_the_work_of_a_job_that_ends() -> None:
    """Without a report about processes, the work of each holder is unknown. Time in which the GPU is at rest is idle
    for both.
    """
    first, second = Job(1, UNITS[0], START + 1.0, START + 33.0), Job(2, UNITS[0], START + 1.0, START + 1_000.0)
    node = Node([first, second])
    found = node.run(30, ratio=1.0)
    assert found["u1"].known_s == found["u2"].known_s == 0.0
    node.run(20, ratio=0.0)
    totals = node.ledger.holder_totals(Allocation(UNITS[0], second.holder), node.now, WALL + node.now)
    assert totals is not None
    assert totals.idle_run_s == node.now - 1030.0
    assert totals.busy_s == 0.0


LENGTHS = st.lists(st.tuples(st.floats(0.0, 7.0), st.floats(0.05, 23.0)), max_size=12)


@given(LENGTHS, LENGTHS)
def test_hours_of_tenants_are_those_of_their_jobs_and_never_exceed_the_gpus(
    one: list[tuple[float, float]], two: list[tuple[float, float]]
) -> None:
    jobs = [*chain(UNITS[0], one), *chain(UNITS[1], two, 101)]
    last = max((job.end for job in jobs), default=START)
    node = Node(jobs)
    found = node.run(math.ceil(last - START) + 20)
    assert found.keys() == {f"u{job.number}" for job in jobs}
    for job in jobs:
        totals, length = found[f"u{job.number}"], job.end - job.begin
        assert length - 1e-6 <= totals.held_s <= length + 1.0 + 1e-6
        assert totals.known_s == pytest.approx(totals.held_s, abs=1e-6)
    for unit in UNITS:
        held = sum(found[f"u{job.number}"].held_s for job in jobs if job.unit == unit)
        assert held <= last - START + 1e-6
    assert not node.ledger.holders(HolderPresence.PRESENT)
