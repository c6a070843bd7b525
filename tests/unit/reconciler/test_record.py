"""The record of a policy: its conditions for acts, its tenants, and keeping it over restarts."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.marker_book import POLICY, WALL, holder
from tests.testbed.proven import Tally, Texts

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Actions
from gpu_exporter.reconciler.actions import record as record_module
from gpu_exporter.reconciler.actions.record import (
    ACT_KEEP_S,
    ACT_LOOK_S,
    ACTED,
    ACTS_MAX,
    BEYOND_CHANCE,
    COUNTS,
    DAY_S,
    DECIDED,
    KEY,
    RESUMED,
    TAKEN_OVER_S,
    TENANTS_MAX,
    TEXT_MAX,
    PolicyStanding,
    Record,
    _pool,
    chance,
)
from gpu_exporter.reconciler.actor import Ended, Entry
from gpu_exporter.reconciler.decision.outcomes import (
    DROPPED,
    ENDED,
    REGRET,
    RIGHT,
    RUNS,
    UNKNOWN,
    Account,
    Watch,
    WatchStart,
    shortest_run,
)
from gpu_exporter.reconciler.decision.policy import Decision, decide_holder, windows_of
from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.decision.target import Skipped
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import MarkError

SETTINGS = Actions(shadow_for=14 * DAY_S)
KEEP_S = SETTINGS.shadow_for


def account(tenant: str, policy: str = "policy", kind: str = "batch") -> Account:
    return Account(policy, kind, tenant)


def looked(clock: ManualClock, place: Texts | None = None, days: float = 14.5) -> Record:
    """The record of a reconciler that has run for `days` days without decisions."""
    record = Record(place, Tally(), clock, KEEP_S)
    for _ in range(int(days * DAY_S / 100)):
        clock.advance(100.0)
        record.note([], clock.wall(), lambda *_: RUNS)
    return record


def fill(record: Record, **tenants: tuple[int, int]) -> Record:
    """Count right and regretted decisions, by tenant."""
    for tenant, (right, regrets) in tenants.items():
        for outcome, count in ((RIGHT, right), (REGRET, regrets)):
            for _ in range(count):
                record.count_decision(account(tenant))
                record.count_outcome(account(tenant), outcome)
    return record


@pytest.fixture(scope="module")
def quiet() -> Texts:
    """The kept text of a record of two weeks without decisions."""
    place = Texts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_module, "SAVE_S", 600.0)  # it is written less often, for the sake of the test's time
        looked(ManualClock(wall=WALL), place)
    return place


@pytest.fixture
def record(quiet: Texts) -> Record:
    place = Texts()
    place.kept = dict(quiet.kept)
    made = Record(place, Tally(), ManualClock(wall=WALL + 14.5 * DAY_S + 1000), KEEP_S)
    made.note([], made._clock.wall(), lambda *_: RUNS)
    return made


@pytest.mark.parametrize(
    ("tenants", "asked", "expected"),
    [
        ({"a": (30, 0), "b": (30, 0), "c": (30, 0)}, "a", PolicyStanding(54.0, 0.0)),
        ({"a": (30, 0), "b": (30, 0), "c": (30, 0)}, "new", PolicyStanding(54.0, 0.0)),
        ({"a": (900, 0), "b": (10, 0), "c": (10, 0)}, "a", PolicyStanding(204.0, 0.0)),
        ({"a": (25, 0), "b": (25, 0), "c": (25, 0)}, "a", "shadow"),  # each counts for 15, so 45 in all
        ({"a": (500, 0), "b": (500, 0)}, "a", "shadow"),
        ({"a": (94, 6), "b": (94, 6), "c": (94, 6)}, "new", "regret"),
        ({"a": (85, 15), "b": (94, 6), "c": (94, 6)}, "new", "shadow"),  # without "a", only two remain
        ({"a": (94, 6), "b": (94, 6), "c": (94, 6), "d": (94, 6)}, "new", "regret"),
        ({"a": (0, 500), "b": (30, 0), "c": (30, 0), "d": (30, 0)}, "b", PolicyStanding(54.0, 0.0)),
        ({"a": (0, 500), "b": (30, 0), "c": (30, 0), "d": (30, 0)}, "a", "regret"),
        # Two tenants with nothing but regrets, against 280 right decisions.
        (dict.fromkeys("abcdefghij", (28, 0)) | {"x": (0, 15), "y": (0, 15)}, "a", PolicyStanding(280.0, 0.0)),
        # Of five tenants, one is left out at most. The regrets of the other count up to a number that chance explains.
        ({"a": (0, 5), "b": (0, 5), "c": (300, 0), "d": (300, 0), "e": (300, 0)}, "c", PolicyStanding(548.0, 0.87379)),
        # The largest fifth of the tenants count for no more than the next one.
        ({"a": (900, 0), **dict.fromkeys("bcde", (20, 0))}, "a", PolicyStanding(100.0, 0.0)),
        ({}, "a", "shadow"),
    ],
)
def test_the_record_needs_three_tenants_and_each_counts_for_at_most_a_fifth(
    record: Record, tenants: dict[str, Any], asked: str, expected: PolicyStanding | str
) -> None:
    answer = fill(record, **tenants).why_not(account(asked), SETTINGS)
    if isinstance(expected, str):
        assert isinstance(answer, Skipped) and answer.reason == expected, answer
    else:
        assert answer == pytest.approx(expected, rel=1e-4)


def test_decisions_of_another_policy_or_class_do_not_count(record: Record) -> None:
    fill(record, a=(100, 0), b=(100, 0), c=(100, 0))
    for other in (account("a", policy="night"), account("a", kind="interactive")):
        assert isinstance(record.why_not(other, SETTINGS), Skipped)


def test_the_record_must_cover_two_weeks_and_older_decisions_are_forgotten(record: Record) -> None:
    fill(record, a=(100, 0), b=(100, 0), c=(100, 0))
    assert isinstance(record.why_not(account("a"), SETTINGS), PolicyStanding)
    short = fill(looked(ManualClock(wall=WALL), days=12.0), a=(100, 0), b=(100, 0), c=(100, 0))
    answer = short.why_not(account("a"), SETTINGS)
    assert isinstance(answer, Skipped) and "run for only 12.0 days of the last 2w" in answer.why
    clock = record._clock
    assert isinstance(clock, ManualClock)
    for _ in range(int(16 * DAY_S / 100)):
        clock.advance(100.0)
        record.watches.last_wall = clock.wall() - 100.0
        record._present[int(clock.wall() // 3600)] += 100.0
    record.note([], clock.wall(), lambda *_: RUNS)
    answer = record.why_not(account("a"), SETTINGS)
    assert isinstance(answer, Skipped) and "fewer than 3 tenants" in answer.why


def test_time_in_which_no_cycle_ran_does_not_count() -> None:
    clock = ManualClock(wall=WALL)
    record = Record(None, Tally(), clock, KEEP_S)
    for _ in range(14 * 24):
        clock.advance(3600.0)  # the process is stopped between two cycles, one per hour
        record.note([], clock.wall(), lambda *_: RUNS)
    answer = fill(record, a=(99, 0), b=(99, 0), c=(99, 0)).why_not(account("a"), SETTINGS)
    assert isinstance(answer, Skipped) and "run for only 0.0 days" in answer.why


TENANT_RECORDS = st.dictionaries(
    st.sampled_from("abcdefgh"), st.builds(PolicyStanding, st.integers(1, 400), st.just(0)), min_size=3
)


@given(TENANT_RECORDS, st.integers(1, 100_000), st.integers(0, 100_000))
def test_a_tenant_beyond_chance_does_not_count_for_others_and_any_other_for_a_fifth(
    tenants: dict[str, PolicyStanding], decisions: int, regrets: int
) -> None:
    hostile = PolicyStanding(decisions, min(decisions, regrets))
    alone, beside = _pool(tenants, 0.05), _pool({**tenants, "hostile": hostile}, 0.05)
    assert alone is not None and beside is not None
    if chance(*hostile, 0.05) < BEYOND_CHANCE:
        assert alone == beside
    else:
        most = min(decisions, 0.2 * sum(t.decisions for t in [*tenants.values(), hostile]))
        assert beside.regrets <= hostile.regrets * min(1.0, most / decisions) + 1e-6
        assert beside.regrets <= 0.05 * most + 1.28 * math.sqrt(0.05 * 0.95 * decisions) * most / decisions + 1e-6


def decided(pod: str, run_s: float, gap_s: float, clock: ManualClock, tenant: str) -> Decision:
    evidence = holder(HolderName("kubernetes", tenant, pod), [run_s], clock.wall())
    (unit,) = evidence.units
    evidence = evidence._replace(units=(unit._replace(longest_gap_s=gap_s),), incarnations=frozenset({pod}))
    return decide_holder(evidence, clock.wall(), POLICY, windows_of(POLICY))


class Life(NamedTuple):
    """A simulated holder: idle from `start`, at work again after `works_after` seconds, gone after `ends_after`."""

    pod: str
    tenant: str
    start: float
    works_after: float
    ends_after: float


def lives(days: float, is_wrong: bool) -> Iterator[Life]:
    """A new holder every half hour, in five tenants."""
    for number in range(int(days * 48)):
        start = WALL + number * 1800.0
        until = POLICY.underused_after
        works = until + 1500.0 if is_wrong else until + 50_000.0
        yield Life(f"p{number}", f"team-{number % 5}", start, works, until + 7200.0)


@pytest.mark.slow
@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_reconciler_that_is_killed_every_seven_minutes_for_two_weeks_counts_every_decision(is_wrong: bool) -> None:
    """If all decisions are wrong, the record never allows an act. If all are right, it does."""
    clock, place, step_s = ManualClock(wall=WALL), Texts(), 105.0
    record = Record(place, tally := Tally(), clock, KEEP_S)
    waiting = list(lives(15.0, is_wrong))
    there: list[Life] = []
    for step in range(int(15.0 * DAY_S / step_s)):
        clock.advance(step_s)
        now = clock.wall()
        if step % 4 == 0:  # kill -9: only the kept text remains
            record = Record(place, tally := Tally(), clock, KEEP_S)
        while waiting and waiting[0].start <= now:
            there.append(waiting.pop(0))
        there = [life for life in there if now < life.start + life.ends_after]
        decisions = []
        for life in there:
            idle_s = now - life.start
            worked = idle_s >= life.works_after
            decisions.append(
                decided(life.pod, idle_s - life.works_after if worked else idle_s, life.works_after if worked else 0.0,
                        clock, life.tenant)
            )  # fmt: skip
        wanted = record.names()
        shown = [each for each in decisions if each.stage != "active" or each.name in wanted]
        record.note(shown, now, lambda *_: ENDED)
        if is_wrong and step % 500 == 0:
            assert isinstance(record.why_not(account("team-0", kind="unclear"), SETTINGS), Skipped)
    decided_, right, regret, unknown = (sum(n[at] for n in record._totals.values()) for at in range(4))
    assert decided_ == right + regret + unknown + len(record.watches.open)
    assert 600 < decided_ <= 48 * 15
    assert (right == 0 and regret > 0.9 * decided_) if is_wrong else (regret == 0 and right > 0.9 * decided_)
    answer = record.why_not(account("team-0", kind="unclear"), SETTINGS)
    assert isinstance(answer, Skipped if is_wrong else PolicyStanding), answer
    assert tally.counts()[0] == decided_, "the counters continue at their last value"


def test_a_kill_loses_no_group_that_is_watched(record: Record) -> None:
    clock, place = record._clock, record._place
    assert isinstance(clock, ManualClock) and isinstance(place, Texts)
    clock.advance(30.0)
    record.note([decided("a", 7300.0, 0.0, clock, "t")], clock.wall(), lambda *_: RUNS)
    again = Record(place, tally := Tally(), clock, KEEP_S)
    assert again.names() == {HolderName("kubernetes", "t", "a")}
    again.note([decided("a", 5.0, 7300.0, clock, "t")], clock.wall(), lambda *_: RUNS)
    assert tally.counts() == (1, {REGRET: 1})
    assert again.watches.open == {}


def test_only_one_of_two_processes_counts_decisions(record: Record) -> None:
    """The other process is a dry run, or a replica that does not know yet that another replica leads."""
    clock, place = record._clock, record._place
    assert isinstance(clock, ManualClock) and isinstance(place, Texts)
    clock.advance(30.0)
    record.note([], clock.wall(), lambda *_: RUNS)
    other = Record(place, tally := Tally(), clock, KEEP_S, "other-host")
    for record_ in (record, other, record, other):
        clock.advance(30.0)
        record_.note([decided("a", 7300.0, 0.0, clock, "t")], clock.wall(), lambda *_: RUNS)
    assert tally.counts() == (0, {})
    assert isinstance(other.why_not(account("t"), SETTINGS), Skipped)
    record.forget()
    clock.advance(TAKEN_OVER_S)
    other.note([], clock.wall(), lambda *_: ENDED)
    assert tally.counts() == (1, {RIGHT: 1}), "the first process has ended, so the second one watches its group"


@pytest.mark.parametrize(
    "text",
    [
        "garbage",
        base64.b64encode(b"garbage").decode(),
        base64.b64encode(zlib.compress(b"[]")).decode(),
        base64.b64encode(zlib.compress(json.dumps({"v": 99}).encode())).decode(),
        base64.b64encode(zlib.compress(b"[" * 100_000)).decode(),
        base64.b64encode(zlib.compress(b" " * 20_000_000)).decode(),
    ],
)
def test_a_record_that_cannot_be_read_is_not_overwritten_and_allows_no_act(text: str) -> None:
    place, clock = Texts(), ManualClock(wall=WALL)
    place.kept[KEY] = text
    record = Record(place, tally := Tally(), clock, KEEP_S)
    for _ in range(3):
        clock.advance(30.0)
        record.note([decided("a", 7300.0, 0.0, clock, "t")], clock.wall(), lambda *_: RUNS)
    assert (tally.counts(), place.kept[KEY]) == ((0, {}), text)
    assert isinstance(record.why_not(account("t"), SETTINGS), Skipped)
    place.kept.clear()
    record.note([], clock.wall(), lambda *_: RUNS)
    assert place.kept[KEY] != text


def test_decisions_are_counted_also_if_the_record_cannot_be_saved(caplog: pytest.LogCaptureFixture) -> None:
    place, clock = Texts(), ManualClock(wall=WALL)
    record = Record(place, tally := Tally(), clock, KEEP_S)
    record.note([], clock.wall(), lambda *_: RUNS)
    place.fail = MarkError("error", "no")
    for _ in range(3):
        clock.advance(30.0)
        record.note([decided("a", 7300.0, 0.0, clock, "t")], clock.wall(), lambda *_: RUNS)
    assert tally.counts() == (1, {})
    assert caplog.text.count("could not be saved") == 1


def test_the_kept_text_of_a_record_is_limited() -> None:
    place, clock = Texts(), ManualClock(wall=WALL)
    record = Record(place, tally := Tally(), clock, KEEP_S)
    record.note([], clock.wall(), lambda *_: RUNS)
    clock.advance(30.0)
    many = [decided(f"{number:064x}"[::-1] + 100 * "x", 7300.0, 0.0, clock, f"team-{number}") for number in range(4000)]
    record.note(many, clock.wall(), lambda *_: RUNS)
    assert len(place.kept[KEY]) <= TEXT_MAX
    assert len({key.tenant for key in record._days[int(clock.wall() // DAY_S)]}) <= TENANTS_MAX + 1
    decisions, outcomes = tally.counts()
    assert decisions == 4000 == outcomes.get(UNKNOWN, 0) + len(record.watches.open)


def entry(ident: str, wall: float) -> Entry:
    reference = Reference("batch", "v1", "Job", ident, "uid")
    return Entry(ident, wall, "kubernetes", "ml", "suspend", reference, reference, "note", record=account("a"))


@pytest.mark.parametrize(
    ("acts", "stopped"),
    [
        ({"a": (6, 6), **dict.fromkeys("bcdefghijklmnopqrst", (1, 0))}, "a"),  # its owner undoes them all
        ({"a": (40, 40), **dict.fromkeys("bcd", (5, 0))}, "a"),
        ({"a": (20, 5), **dict.fromkeys("bcd", (5, 0))}, "a"),
        (dict.fromkeys("abcdefghij", (5, 1)), ""),
        (dict.fromkeys("abcdefghij", (4, 2)), "abcdefghijz"),
        (dict.fromkeys("abcdefghij", (10, 3)), "abcdefghijz"),
        ({"a": (5, 5), "b": (5, 0)}, "abz"),  # too few tenants for these limits
        ({"a": (1, 0), "b": (2, 2)}, ""),  # too few actions
        ({"a": (6, 9), **dict.fromkeys("bcdef", (1, 0))}, "a"),  # the first actions are too old to count
    ],
)
def test_owners_who_undo_actions_stop_them_for_themselves_and_many_stop_them_for_all(
    record: Record, acts: dict[str, tuple[int, int]], stopped: str
) -> None:
    fill(record, a=(100, 0), b=(100, 0), c=(100, 0))
    for tenant, (acted, undone) in acts.items():
        for _ in range(acted):
            record._count(account(tenant), ACTED)
        for _ in range(undone):
            record._count(account(tenant), RESUMED)
    answers = {tenant: record.why_not(account(tenant), SETTINGS) for tenant in {*acts, "z"}}
    refused = {tenant: answer for tenant, answer in answers.items() if isinstance(answer, Skipped)}
    assert "".join(sorted(refused)) == stopped and all(each.reason == "resumed" for each in refused.values())


def test_too_many_acts_that_owners_undo_prevent_further_acts(record: Record) -> None:
    fill(record, a=(100, 0), b=(100, 0), c=(100, 0))
    clock = record._clock
    assert isinstance(clock, ManualClock)
    entries = [entry(str(number), clock.wall()) for number in range(5)]
    for each in entries:
        record.note_act(each)
    assert isinstance(record.why_not(account("a"), SETTINGS), PolicyStanding)
    assert record.acts_due() == entries and record.acts_due() == []
    record.note_resumed(entries[0])
    assert isinstance(record.why_not(account("a"), SETTINGS), PolicyStanding)
    record.note_resumed(entries[1])
    answer = record.why_not(account("b"), SETTINGS)
    assert isinstance(answer, Skipped) and answer.reason == "resumed"
    clock.advance(ACT_LOOK_S)
    assert record.acts_due() == entries[2:]
    clock.advance(60.0)
    record.note([], clock.wall(), lambda *_: RUNS)
    again = Record(record._place, Tally(), clock, KEEP_S)
    again.note([], clock.wall(), lambda *_: RUNS)
    assert again.acts_due() == entries[2:], "a restart forgets no act"
    clock.advance(ACT_KEEP_S)
    assert again.acts_due() == []


def test_an_act_counts_once_and_only_after_the_record_was_read() -> None:
    place, clock = Texts(), ManualClock(wall=WALL)
    record = Record(place, Tally(), clock, KEEP_S)
    place.fail = MarkError("error", "no")
    with pytest.raises(MarkError, match="cannot be read"):
        record.note_act(entry("a", clock.wall()))
    place.fail = None
    for _ in range(3):
        record.note_act(entry("a", clock.wall()))
    assert [each.ident for each in record.acts_due()] == ["a"]
    assert sum(numbers[COUNTS.index(ACTED)] for numbers in record._days[int(WALL // DAY_S)].values()) == 1


def test_a_record_of_many_acts_days_and_tenants_can_be_read_again() -> None:
    place, clock = Texts(), ManualClock(wall=WALL)
    record = Record(place, Tally(), clock, KEEP_S)
    record.note([], clock.wall(), lambda *_: RUNS)
    for number in range(ACTS_MAX + 10):
        long = entry(f"{number}-{'x' * 240}", clock.wall())
        record.note_act(long._replace(ends=(Ended("pod" * 80, "uid", ("n",)),) * 16, undo="kubectl " * 40))
    for day in range(14):
        for number in range(TENANTS_MAX):
            for policy in ("policy", "night", "teaching"):
                key = account(f"{number * 7919:x}-team-{number}", policy)
                record._days[int(WALL // DAY_S) - day][key] = [number * day + 1] * len(COUNTS)
    clock.advance(60.0)
    record.note([], clock.wall(), lambda *_: RUNS)
    assert len(place.kept[KEY]) <= TEXT_MAX
    again = Record(place, Tally(), clock, KEEP_S)
    again.note([], clock.wall(), lambda *_: RUNS)
    answer = again.why_not(account("a"), SETTINGS)
    assert isinstance(answer, Skipped) and answer.reason == "shadow", (
        "the record is readable, but too few cycles have run"
    )
    assert len(again._acts) == ACTS_MAX and len(again._days) == 14, "tenants lose their names before a day is lost"


def test_a_flood_of_one_tenant_costs_no_day_and_no_watch_of_another(
    record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    """900 pods of one namespace, whose names have 253 characters, become underused at the same time."""
    clock, tally = record._clock, record._telemetry
    assert isinstance(clock, ManualClock) and isinstance(tally, Tally)
    for _ in range(14):
        fill(record, a=(3, 0), b=(3, 0), c=(3, 0), d=(3, 0))
        clock.advance(DAY_S)
        record.note([], clock.wall(), lambda *_: RUNS)
    days = {day: dict(counts) for day, counts in record._days.items()}
    clock.advance(30.0)
    names = [hashlib.sha512(f"{number}".encode()).hexdigest() * 2 for number in range(3000)]
    honest = [decided("train", 7300.0, 0.0, clock, "honest")]
    record.note(
        [decided(name[:253], 7300.0, 0.0, clock, "flood") for name in names] + honest, clock.wall(), lambda *_: RUNS
    )
    assert days.items() <= record._days.items() and len(days) == 14
    assert tally.dropped["watches"] > 0 and set(tally.dropped) == {"watches"}
    assert any(watch.account.tenant == "honest" for watch in record.watches.open.values())
    assert caplog.text.count("the record of decisions is full") == 1


def totals(record: Record) -> dict[int, int]:
    """The decisions of each day."""
    return {day: sum(each[COUNTS.index(DECIDED)] for each in counts.values()) for day, counts in record._days.items()}


@given(
    days=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    watches=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), max_size=30),
    acts=st.integers(0, 8),
    longest=st.integers(400, 6000),
)
def test_what_is_cheap_is_dropped_before_what_is_dear(
    days: list[int], watches: list[tuple[str, int]], acts: int, longest: int
) -> None:
    clock = ManualClock(wall=WALL)
    record = Record(Texts(), tally := Tally(), clock, KEEP_S)
    for number in range(acts):
        record.note_act(entry(hashlib.sha512(f"{number}".encode()).hexdigest(), clock.wall()))
    for day, tenants in enumerate(days):
        for number in range(tenants):
            key = account(hashlib.sha256(f"{number}".encode()).hexdigest())
            record._days[int(WALL // DAY_S) - day][key] = [day + number + 1] * len(COUNTS)
    for number, (tenant, size) in enumerate(watches):
        names = [hashlib.sha512(f"{number} {each}".encode()).hexdigest() for each in range(size)]
        holders = {HolderName("kubernetes", tenant, name): WatchStart("uid", 7300.0, 0.0) for name in names}
        record.watches.open["kubernetes", tenant, f"{number}"] = Watch(account(tenant), WALL, holders)
    before = totals(record)
    text = record._render_within(longest)
    left = {
        "days": len(record._days) - 1,
        "acts": len(record._acts),
        "tenants": sum(key.tenant != "other" for counts in record._days.values() for key in counts),
        "watches": len(record.watches.open),
    }
    dropped = [what for what in DROPPED if tally.dropped[what]]
    assert all(left[what] <= 0 for last in dropped for what in DROPPED[: DROPPED.index(last)])
    assert len(text) <= longest or not any(each > 0 for each in left.values())
    assert totals(record).items() <= before.items(), "a tenant without its name still counts"
    assert tally.outcomes.total() == tally.dropped["watches"] == len(watches) - left["watches"]


def test_the_shortest_run_of_a_holder_is_that_of_its_least_idle_gpu() -> None:
    name = HolderName("kubernetes", "ml", "a")
    decision = decide_holder(holder(name, [50.0, 70.0]), WALL, POLICY, windows_of(POLICY))
    assert shortest_run(decision) == 50.0
