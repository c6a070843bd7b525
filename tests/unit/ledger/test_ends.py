"""Jobs that start and end between two polls, one after the other: with known ends, each job gets its own time."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.agent.ledger.records import HolderPresence
from gpu_exporter.common.model.holders import Allocation, AllocationId, Holder, HolderKey
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


@pytest.mark.parametrize("late", [0.0, 0.4, 3.9])
@pytest.mark.parametrize("was_seen", [False, True])
def test_an_end_that_is_reported_after_its_successor_was_polled_keeps_its_hours_and_no_time_counts_twice(
    was_seen: bool, late: float
) -> None:
    """As when a poll comes while the epilog still runs, so that the epilog's date is late."""
    first, second = chain(UNITS[0], [(0.0, 7.0), (0.0, 20.0)])
    third = Job(3, UNITS[0], START + 2.0, START + 9.0 + late)  # begins before the end of the first, as with shards
    polls: list[tuple[float, list[Job], list[ConfirmedAllocation]]] = [
        (10.0, [second], []),
        (15.0, [second], [first.entry(first.end + late)]),
        (20.0, [second], [third.entry(third.end)]),
    ]
    ledger = Ledger(RULES, START)
    for now, held, ended in [(5.0, [first], [])] * was_seen + polls:
        ledger.charge_poll(START + now, WALL, [job.entry(START + now) for job in held], ended)
    found = {tenant.user: totals.held_s for tenant, totals in ledger.tenants.totals()}
    assert {"u1": found["u1"], "u2": found["u2"]} == {"u1": pytest.approx(7.0), "u2": pytest.approx(12.0)}
    assert sum(found.values()) == pytest.approx(19.0), "the time from the start of the first job to the last poll"


@pytest.mark.parametrize("is_listed", [False, True])
def test_a_nameless_holder_that_one_answer_showed_takes_no_hours_from_the_job(is_listed: bool) -> None:
    """As when slurmctld reports a GPU in use before it lists the job, and no prolog writes files."""
    (job,) = chain(UNITS[0], [(0.0, 18.0)])
    nameless = Holder(HolderKey("slurm", "lab/hidden/0"), identity="hidden")
    ledger = Ledger(RULES, START)
    ledger.charge_poll(START, WALL, [])
    hidden = ConfirmedAllocation(Allocation(UNITS[0], nameless, running=False), START + 5.0, None)
    for now in (5.0, 10.0):
        ledger.charge_poll(START + now, WALL, [hidden])
    if is_listed:
        ledger.charge_poll(START + 15.0, WALL, [job.entry(START + 15.0)])
    ledger.charge_poll(START + 20.0, WALL, [], [job.entry(job.end)])
    found = {tenant.user: totals for tenant, totals in ledger.tenants.totals()}
    assert found["u1"].held_s == pytest.approx(18.0)
    assert (found["u1"].idle_s, found["u1"].known_s, found[""].held_s) == (0.0, 0.0, 0.0)


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


class Late(NamedTuple):
    """A job, and how much later its epilog reports the end (seconds, less than an interval of polls)."""

    pause: float
    length: float
    late: float


@settings(deadline=None)
@given(
    st.lists(st.builds(Late, st.floats(0.0, 6.0), st.floats(0.3, 13.0), st.floats(0.0, 3.9)), min_size=1, max_size=9),
    st.sets(st.integers(1, 30), max_size=6),
    st.booleans(),
)
@example([Late(0.0, 1.5, 0.0), Late(0.0, 8.0, 7.0), Late(0.0, 5.0, 0.0)], set(), True)
@example([Late(0.0, 1.0, 2.0), Late(0.0, 2.0, 7.0), Late(0.0, 4.0, 3.9)], set(), True)
@example([Late(0.0, 6.0, 3.0), Late(0.0, 1.0, 0.5)], set(), True)
def test_late_epilogs_and_lost_polls_never_count_time_of_a_whole_gpu_twice_and_lose_no_job_silently(
    lengths: list[Late], lost_polls: set[int], knows_ends: bool
) -> None:
    jobs = chain(UNITS[0], [(each.pause, each.length) for each in lengths])
    ends = {job: float(math.floor(job.end + each.late)) for job, each in zip(jobs, lengths, strict=True)}
    ledger, missed, told = Ledger(RULES, START), set[HolderKey](), set[Job]()
    ledger.charge_poll(START, WALL, [])
    last, number, now = max(ends.values()) + 20.0, 0, START
    while now < last:
        now, number = now + 5.0, number + 1
        if number in lost_polls:
            continue
        held = [job.entry(now) for job in jobs if job.begin <= now < job.end]
        over = [job for job, each in zip(jobs, lengths, strict=True) if job.end + each.late <= now and job not in told]
        told.update(over)
        ended = [job.entry(ends[job]) for job in over] if knows_ends else []
        missed |= {key for _, key in ledger.charge_poll(now, WALL + now, held, ended)}
    found = {tenant.user: totals.held_s for tenant, totals in ledger.tenants.totals()}
    in_use, until = 0.0, 0.0
    for job in jobs:
        begin, end = math.floor(job.begin), ends[job] if knows_ends else last
        in_use, until = in_use + max(0.0, end - max(begin, until)), max(end, until)
    assert sum(found.values()) <= in_use + 1e-6
    for job in jobs if knows_ends and not lost_polls else ():
        is_counted = found.get(job.holder.user, 0.0) > 0.0 or job.holder.key in missed
        assert is_counted or ends[job] <= math.floor(job.begin), (job, found)


def test_a_short_job_on_a_part_of_a_gpu_has_half_of_its_time_beside_another_job() -> None:
    """Each second of a GPU counts once."""
    long, short = Job(1, UNITS[0], START + 1.0, START + 50.0), Job(2, UNITS[0], START + 6.0, START + 9.0)
    ledger = Ledger(RULES, START)
    for now in (5.0, 10.0, 15.0):
        ended = [short.entry(short.end, "shard")] if now == 10.0 else []
        lost = ledger.charge_poll(START + now, WALL, [long.entry(START + now, "shard")], ended)
        assert not lost
    assert {tenant.user: totals.held_s for tenant, totals in ledger.tenants.totals()} == {"u1": 12.5, "u2": 1.5}


def share(jobs: list[Job], now: float) -> list[ConfirmedAllocation]:
    """What a poll shows of jobs that share a GPU."""
    held = [job.entry(now, "shard") for job in jobs]
    return [each._replace(allocation=each.allocation._replace(share_ratio=1.0 / len(held))) for each in held]


PARTS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=8)


@given(PARTS)
@example([(0, 30), (7, 2), (8, 12)])
def test_each_second_of_a_shared_gpu_counts_once_in_equal_parts(lengths: list[tuple[int, int]]) -> None:
    """Polls come at any moment between begins and ends. One in two jobs ends before the poll after its begin."""
    jobs = [Job(number, UNITS[0], START + begin, START + begin + s) for number, (begin, s) in enumerate(lengths)]
    ledger, expected = Ledger(RULES, START - 1.0), dict.fromkeys((job.holder.user for job in jobs), 0.0)
    for second in range(101):
        there = [job.holder.user for job in jobs if job.begin <= START + second < job.end]
        expected |= {user: expected[user] + 1.0 / len(there) for user in there}
    for at in range(-1, 120, 5):
        now = START + at + 0.4
        held = share([job for job in jobs if job.begin <= now < job.end], now)
        ended = [job.entry(job.end, "shard") for job in jobs if now - 5.0 < job.end <= now]
        assert not ledger.charge_poll(now, WALL, held, ended)
    found = {tenant.user: totals.held_s for tenant, totals in ledger.tenants.totals()}
    assert found == pytest.approx(expected)


def test_a_sharer_that_a_poll_shows_late_has_its_part_since_the_last_poll_and_then_counts_as_missed() -> None:
    """slurmctld was slow to report it. Its time before was charged to the other job."""
    first, late = Job(1, UNITS[0], START + 1.0, START + 60.0), Job(2, UNITS[0], START + 2.0, START + 25.0)
    ledger = Ledger(RULES, START)
    for now, jobs in ((5.0, [first]), (15.0, [first]), (20.0, [first, late])):
        assert not ledger.charge_poll(START + now, WALL, share(jobs, START + now))
    lost = ledger.charge_poll(START + 30.0, WALL, share([first], START + 30.0), [late.entry(late.end, "shard")])
    assert lost == {late.entry(0.0).id}
    assert {tenant.user: totals.held_s for tenant, totals in ledger.tenants.totals()} == {
        "u1": pytest.approx(24.0),
        "u2": pytest.approx(5.0),
    }


def test_sharers_that_come_and_leave_at_unknown_moments_have_half_of_their_part_between_two_polls() -> None:
    """As pods on a GPU with time slicing. Each second counts once."""
    long, short = (Job(number, UNITS[0], START, START) for number in (1, 2))
    ledger = Ledger(RULES, START)
    for now, jobs in ((0.0, [long]), (5.0, [long]), (10.0, [long, short]), (15.0, [long])):
        held = [entry._replace(start=None) for entry in share(jobs, START + now)]
        ledger.charge_poll(START + now, WALL, held)
    found = {tenant.user: totals.held_s for tenant, totals in ledger.tenants.totals()}
    assert found == {"u1": pytest.approx(12.5), "u2": pytest.approx(2.5)}


@pytest.mark.parametrize(("begin", "found"), [(0.0, {"u1": 3.75, "u2": 14.25}), (7.0, {"u1": 7.0, "u2": 11.0})])
def test_a_late_end_of_a_sharer_takes_no_time_that_was_charged_to_another_one(
    begin: float, found: dict[str, float]
) -> None:
    """The lists of steps have shown that it ended, so it counts as missed. It may have had its part until its end."""
    first, second = Job(1, UNITS[0], START, START + 24.0), Job(2, UNITS[0], START + begin, START + 60.0)
    ledger = Ledger(RULES, START)
    for now, jobs in ((0.0, [first, second]), (5.0, [first, second]), (10.0, [second]), (25.0, [second])):
        ended = [first.entry(first.end, "shard")] if now > first.end - START else []
        shown = [job for job in jobs if job.begin <= START + now]
        lost = ledger.charge_poll(START + now, WALL, share(shown, START + now), ended)
    assert lost == {first.entry(0.0).id}
    assert {tenant.user: totals.held_s for tenant, totals in ledger.tenants.totals()} == pytest.approx(found)


def test_a_sharer_that_was_shown_until_its_late_end_has_its_part_until_then() -> None:
    """At the second poll, its last step was gone, and its file was there."""
    first, second = Job(1, UNITS[0], START, START + 11.0), Job(2, UNITS[0], START, START + 60.0)
    ledger = Ledger(RULES, START)
    for now, is_there in ((0.0, True), (5.0, True), (10.0, True), (15.0, False)):
        held = share([first, second] if is_there else [second], START + now)
        held = [
            each._replace(confirmed=min(each.confirmed, START + 5.0)) if each.id[1] == first.holder.key else each
            for each in held
        ]
        assert not ledger.charge_poll(START + now, WALL, held, [] if is_there else [first.entry(first.end, "shard")])
    found = {tenant.user: totals.held_s for tenant, totals in ledger.tenants.totals()}
    assert found == {"u1": pytest.approx(5.5), "u2": pytest.approx(9.5)}


def test_a_sharer_whose_end_is_not_proven_leaves_the_other_one_its_part_until_its_last_possible_end() -> None:
    first, second = Job(1, UNITS[0], START, START + 6.0), Job(2, UNITS[0], START, START + 60.0)
    ledger = Ledger(RULES, START)
    for now, jobs in ((0.0, [first, second]), (5.0, [first, second]), (10.0, [second])):
        ended = [first.entry(first.end, "shard")._replace(possible=START + 9.0)] if now > 5.0 else []
        ledger.charge_poll(START + now, WALL, share(jobs, START + now), ended)
    found = {tenant.user: totals.held_s for tenant, totals in ledger.tenants.totals()}
    assert found == {"u1": pytest.approx(3.0), "u2": pytest.approx(2.5 + 2.0 + 1.0)}


def test_a_job_gets_no_time_that_is_already_the_estimated_time_of_a_job_that_left() -> None:
    first, second = Job(1, UNITS[0], START + 1.0, START + 6.0), Job(2, UNITS[0], START + 6.0, START + 50.0)
    ledger = Ledger(RULES, START)
    for now, held in ((5.0, [first]), (10.0, []), (15.0, [second])):
        ledger.charge_poll(START + now, WALL, [job.entry(START + now) for job in held])
    assert {tenant.user: totals.held_s for tenant, totals in ledger.tenants.totals()} == {"u1": 6.5, "u2": 7.5}


def test_a_job_whose_account_was_dropped_gets_no_time_again() -> None:
    """The ledger keeps few absent holders. The end of a dropped one comes after those of its successors."""
    first, *others = chain(UNITS[0], [(0.0, 6.0), *[(0.0, 0.5)] * 6])
    ledger = Ledger(RULES, START)
    ledger.charge_poll(START + 5.0, WALL, [first.entry(START + 5.0)])
    ledger.charge_poll(START + 10.0, WALL, [], [job.entry(job.end) for job in others])
    ledger.charge_poll(START + 15.0, WALL, [], [first.entry(START + 10.9)])
    assert sum(totals.held_s for _, totals in ledger.tenants.totals()) <= 10.0 + 1e-6


def test_a_job_that_ended_before_the_late_epilog_of_its_predecessor_keeps_its_time() -> None:
    """Both ends are reported at the same poll, and the later job ended first."""
    first, second = chain(UNITS[0], [(0.0, 6.0), (0.0, 1.0)])
    ledger = Ledger(RULES, START)
    ledger.charge_poll(START + 5.0, WALL, [first.entry(START + 5.0)])
    lost = ledger.charge_poll(START + 10.0, WALL, [], [first.entry(START + 9.0), second.entry(second.end)])
    assert {tenant.user: totals.held_s for tenant, totals in ledger.tenants.totals()} == {"u1": 6.0, "u2": 1.0}
    assert not lost


def test_work_around_a_late_epilog_is_unknown_and_never_idle() -> None:
    """A poll between the begin of the second job and the epilog of the first shows only the second."""
    first, second = chain(UNITS[0], [(0.0, 6.0), (0.0, 30.0)])
    ledger = Ledger(RULES, START)
    for at in range(1, 36):
        now = START + at
        ledger.record(Activity(UNITS[0], (Span(now - 1.0, now, 1.0, (), 3),), 3))
        if at % 5 == 0:
            held = (first if at == 5 else second).entry(now)
            ledger.charge_poll(now, WALL, [held], [first.entry(START + 9.9)] if at == 15 else [])
    found = {tenant.user: (totals.held_s, totals.known_s, totals.idle_s) for tenant, totals in ledger.tenants.totals()}
    assert found == {"u1": (6.0, 4.0, 0.0), "u2": (28.0, 23.0, 0.0)}


@pytest.mark.parametrize(("share", "held"), [("none", {"u1": 9.0, "u2": 11.0}), ("shard", {"u1": 13.5, "u2": 10.5})])
def test_a_job_that_is_shown_again_during_its_slow_epilog_gets_no_time_of_the_job_in_between(
    share: str, held: dict[str, float]
) -> None:
    """While two files name one GPU, the newer file counts. When the newer job has ended, the older file counts again.
    Sharers of a GPU hold it at the same time.
    """
    first, second = chain(UNITS[0], [(0.0, 9.0), (0.0, 11.0)])
    ledger = Ledger(RULES, START)
    for now, job in ((5.0, first), (10.0, first), (15.0, second), (20.0, second), (25.0, first)):
        ended = [second.entry(second.end, share)] if now == 25.0 else []
        ledger.charge_poll(START + now, WALL, [job.entry(START + now, share)], ended)
    assert {tenant.user: totals.held_s for tenant, totals in ledger.tenants.totals()} == held


def test_the_time_of_a_job_that_was_shown_again_is_taken_before_and_after_the_job_in_between() -> None:
    """The epilog of an even older job ends last. All of its time belongs to the later jobs by now."""
    oldest, first, second = chain(UNITS[0], [(0.0, 0.5), (0.5, 8.0), (0.0, 11.0)])
    ledger = Ledger(RULES, START)
    for now, job in ((5.0, first), (10.0, first), (15.0, second), (20.0, second), (25.0, first), (30.0, first)):
        ended = {25.0: [second.entry(second.end)], 30.0: [oldest.entry(START + 30.0)]}.get(now, [])
        ledger.charge_poll(START + now, WALL, [job.entry(START + now)], ended)
    found = {tenant.user: totals.held_s for tenant, totals in ledger.tenants.totals()}
    assert found.pop("u1", 0.0) <= 1.0
    assert found == {"u2": 17.0, "u3": 11.0}


@pytest.mark.parametrize("pause", [60, 3600], ids=["", "the job has no account any more"])
def test_an_epilog_that_runs_long_after_polls_showed_a_free_gpu_adds_no_hours(pause: int) -> None:
    """Its steps have shown the job's end, and slurmd ran the epilog only when it was started again."""
    job = Job(1, UNITS[0], START + 1.0, START + 20.0)
    node = Node([job], knows_ends=False)
    node.run(30 + pause)
    node.ledger.charge_poll(node.now, WALL + node.now, [], [job.entry(node.now)])
    found = {tenant.user: totals.held_s for tenant, totals in node.ledger.tenants.totals()}
    assert found.get("u1", 0.0) <= 20.0


@pytest.mark.parametrize("is_shown", [False, True])
def test_the_begin_of_the_next_job_ends_a_job_whose_epilog_is_late(is_shown: bool) -> None:
    """The next job ends first, and the file of the first one remains."""
    first, second = Job(1, UNITS[0], START + 1.0, START + 30.0), Job(2, UNITS[0], START + 11.0, START + 14.0)
    ledger, missed = Ledger(RULES, START), set[AllocationId]()
    for now in (5.0, 10.0):
        ledger.charge_poll(START + now, WALL, [first.entry(START + now)])
    polls = {15.0: [second], 20.0: [], 30.0: [first]} if is_shown else {30.0: [second, first]}
    for now, ended in polls.items():
        held = [first.entry(START + now)] if is_shown and now == 15.0 else []
        missed |= ledger.charge_poll(START + now, WALL, held, [job.entry(job.end) for job in ended])
    found = {tenant.user: totals.held_s for tenant, totals in ledger.tenants.totals()}
    assert (found, missed) == ({"u1": 10.0, "u2": 3.0}, set())


@pytest.mark.parametrize("begin", [START - 20.0, START + 1.0])
def test_a_job_without_the_time_before_the_first_start_counts_as_missed(begin: float) -> None:
    job = Job(1, UNITS[0], begin, START + 12.0)
    ledger = Ledger(RULES, START)
    for now in (5.0, 10.0):
        assert not ledger.charge_poll(START + now, WALL, [job.entry(START + now)])
    lost = ledger.charge_poll(START + 15.0, WALL, [], [job.entry(job.end)])
    found = {tenant.user: totals.held_s for tenant, totals in ledger.tenants.totals()}
    assert found == {"u1": START + 12.0 - max(begin, START)}
    assert lost == ({job.entry(0.0).id} if begin < START else set())
