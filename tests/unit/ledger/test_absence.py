"""Time in which the exporter does not run: jobs that Slurm dates are charged for it once, as held and unknown."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.ledger.test_ends import RULES, UNITS, WALL, Job

from gpu_exporter.agent.ledger.ledger import Ledger
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.common.model.readings import Activity, Span
from gpu_exporter.common.model.totals import TenantTotals

GPU = UNITS[0]


class Restarts:
    """One exporter after the other, with one state file. A poll of Slurm every five seconds."""

    def __init__(self, folder: Path, jobs: list[Job], start: float = 1_000.0) -> None:
        self.jobs, self.now, self._folder = jobs, start, folder
        self._told: set[int] = set()
        self.begin()

    def begin(self, *, boot: str = "boot") -> str:
        self.ledger = Ledger(RULES, self.now)
        self._state = StateFile(self._folder, 10.0, boot)
        reason = self._state.restore(self.ledger)
        self._told = {int(text) for text in self._state.past.reported} if self._state.past is not None else set()
        return reason

    def poll(self) -> None:
        held = [job.entry(self.now) for job in self.jobs if job.begin <= self.now < job.end]
        gone = [job for job in self.jobs if job.end <= self.now and job.number not in self._told]
        self._told |= {job.number for job in gone}
        self.ledger.charge_poll(self.now, WALL + self.now, held, [job.entry(job.end) for job in gone])

    def run(self, seconds: int) -> None:
        """Work on each GPU, with a reading every second."""
        for _ in range(seconds):
            self.now += 1.0
            for unit in UNITS:
                self.ledger.record(Activity(unit, (Span(self.now - 1.0, self.now, 1.0, (), 3),), 3))
            if self.now % 5 == 0:
                self.poll()

    def save(self) -> None:
        self._state.commit(self._state.prepare(self.ledger, reported=[str(number) for number in self._told]))

    def totals(self) -> dict[str, TenantTotals]:
        return {tenant.user: totals for tenant, totals in self.ledger.tenants.totals()}


def test_a_job_of_the_state_file_that_ended_meanwhile_is_held_until_its_end(tmp_path: Path) -> None:
    node = Restarts(tmp_path, [Job(1, GPU, 1_001.0, 1_045.0)])
    node.run(20)
    node.save()
    node.now = 1_100.0
    assert node.begin() == ""
    node.run(10)
    found = node.totals()["u1"]
    assert (found.held_s, found.idle_s, found.known_s) == (44.0, 0.0, pytest.approx(19.0, abs=0.1))


def test_jobs_that_began_and_ended_meanwhile_are_held_and_unknown(tmp_path: Path) -> None:
    jobs = [Job(number, GPU, 1_030.0 + 10 * number, 1_036.0 + 10 * number) for number in range(1, 6)]
    node = Restarts(tmp_path, [*jobs, Job(9, UNITS[1], 1_022.0, 1_099.0)])
    node.run(20)
    node.save()
    node.now = 1_100.0
    node.begin()
    node.run(10)
    found = node.totals()
    assert {user: totals.held_s for user, totals in found.items()} == {
        **{f"u{n}": 6.0 for n in range(1, 6)},
        "u9": 77.0,
    }
    assert all(totals.known_s == totals.idle_s == totals.busy_s == 0.0 for totals in found.values())


def test_a_job_that_began_meanwhile_and_runs_is_held_from_its_start(tmp_path: Path) -> None:
    node = Restarts(tmp_path, [Job(1, GPU, 1_040.0, 2_000.0)])
    node.run(20)
    node.save()
    node.now = 1_100.0
    node.begin()
    node.run(50)
    found = node.totals()["u1"]
    assert (found.held_s, found.idle_s) == (110.0, 0.0)
    assert found.known_s == pytest.approx(50.0, abs=1.0)


def test_a_job_that_appears_later_is_not_charged_for_time_in_which_it_was_missing(tmp_path: Path) -> None:
    node = Restarts(tmp_path, [])
    node.run(20)
    node.save()
    node.now = 1_100.0
    node.begin()
    node.run(50)
    node.jobs = [Job(1, GPU, 1_040.0, 2_000.0)]
    node.run(10)
    assert node.totals()["u1"].held_s <= 10.0 + RULES.longest_unconfirmed_s()


def test_polls_without_slurm_are_part_of_the_absence(tmp_path: Path) -> None:
    node = Restarts(tmp_path, [Job(1, GPU, 1_040.0, 1_090.0)])
    node.run(20)
    for now in range(1_025, 1_101, 5):
        node.ledger.charge_poll(now, WALL + now, [], is_complete=False)
    node.save()
    node.now = 1_105.0
    node.begin()
    node.run(5)
    assert node.totals()["u1"].held_s == 50.0


@pytest.mark.parametrize("boot", ["boot", "next boot"])
def test_without_the_state_file_of_this_boot_nothing_before_the_start_is_charged(tmp_path: Path, boot: str) -> None:
    node = Restarts(tmp_path, [Job(1, GPU, 1_040.0, 1_090.0), Job(2, UNITS[1], 1_040.0, 2_000.0)])
    if boot != "boot":
        node.run(20)
        node.save()
    node.now = 1_100.0
    assert node.begin(boot=boot)
    node.run(20)
    held = {user: totals.held_s for user, totals in node.totals().items()}
    assert held == {"u2": 20.0}


def test_two_starts_in_a_row_charge_a_job_once(tmp_path: Path) -> None:
    node = Restarts(tmp_path, [Job(1, GPU, 1_040.0, 1_090.0)])
    node.run(20)
    node.save()
    for _ in range(3):  # killed before it saves anything
        node.now = max(node.now, 1_100.0)
        node.begin()
        node.run(10)
    node.save()
    node.begin()
    node.run(10)
    assert node.totals()["u1"].held_s == 50.0


def test_a_state_file_from_before_the_first_poll_keeps_the_previous_one(tmp_path: Path) -> None:
    """The exporter saves its state at once. Here it is killed before Slurm answers."""
    node = Restarts(tmp_path, [Job(1, GPU, 1_001.0, 1_010.0), Job(2, GPU, 1_040.0, 1_090.0)])
    node.run(20)
    node.save()
    node.now = 1_100.0
    node.begin()
    node.save()
    node.now = 1_200.0
    node.begin()
    node.run(10)
    assert {user: totals.held_s for user, totals in node.totals().items()} == {"u1": 9.0, "u2": 50.0}


def test_a_clock_that_was_set_never_charges_more_than_the_absence(tmp_path: Path) -> None:
    node = Restarts(tmp_path, [])
    node.run(20)
    node.save()
    node.now = 1_100.0
    node.begin()
    node.jobs = [Job(1, GPU, -1e9, 1_099.0), Job(2, UNITS[1], 1_098.0, 1_099.0)]
    node.run(10)
    found = node.totals()
    assert found["u1"].held_s <= 80.0 + RULES.longest_unconfirmed_s()
    assert found["u2"].held_s == 1.0


LENGTHS = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 23)), max_size=12)


@given(LENGTHS, st.integers(1, 60), st.integers(0, 90), st.booleans())
def test_hours_of_jobs_are_complete_over_an_absence_and_never_exceed_the_gpu(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[tuple[int, int]], seen: int, away: int, is_saved: bool
) -> None:
    jobs, at = list[Job](), 1_001.0
    for number, (pause, length) in enumerate(lengths, 1):
        jobs.append(Job(number, GPU, at + pause, at + pause + length))
        at = jobs[-1].end
    node = Restarts(tmp_path_factory.mktemp("state"), jobs)
    node.poll()
    node.save()
    node.run(seen)
    if is_saved:
        node.save()
    node.now += away
    node.begin()
    node.run(math.ceil(max(0.0, at - node.now)) + 20)
    found = node.totals()
    assert sum(totals.held_s for totals in found.values()) <= at - 1_000.0 + 1e-6
    for job in jobs:
        totals = found[f"u{job.number}"]
        assert totals.held_s == pytest.approx(job.end - job.begin)
        assert totals.known_s <= totals.held_s + 1e-6 and totals.idle_s == 0.0
