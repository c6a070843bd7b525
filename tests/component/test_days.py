"""Simulated days with a known truth, judged by the policy: no working holder is underused, and every idle holder is.

Every run prints a new seed; GPU_EXPORTER_DAY_SEED repeats a run. Difficult cases: 200 ms of work every 50 minutes,
bursts and requests between scrapes, pods recreated under their name, holders of many GPUs of which one works, Jobs of
which one pod works, pods that serve at night, notebooks at lunch, holders that work on their CPUs alone, GPUs whose
utilization reads 0 while they work, restarts, failed readings, failed scrapes.
"""

from __future__ import annotations

import math
import os
import secrets
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from random import Random

import pytest

from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reconciler.actions.record import Record
from gpu_exporter.reconciler.decision.outcomes import ENDED, REGRET, RIGHT, RUNS
from gpu_exporter.reconciler.decision.policy import UNDERUSED, Decision
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.surroundings import (
    BATCH,
    INTERACTIVE,
    SERVING,
    Incarnation,
    Member,
    Surroundings,
    Unreadable,
)
from gpu_exporter.reconciler.evidence.exporters import ExporterSource, parse_exporter
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.judge import judge_of
from tests.rules.day import GPUS, HOST_BLIND_S, MINUTES, NODES, Day, TrueHolder, simulate, stretches
from tests.testbed.proven import Tally

pytestmark = pytest.mark.slow

SEED = int(os.environ.get("GPU_EXPORTER_DAY_SEED", "0")) or secrets.randbits(32)
DAYS, DAYS_MAX = 2, 8  # more than two only if two days had too few idle holders to prove anything
POLICY = Policy()
SLACK_S = 600.0  # for a failed scrape, coverage just below the limit, and half a minute for a cycle


class TrueSurroundings:
    """The live objects of a day: the existing pods of a Job, serving pods, and owners of notebooks."""

    def __init__(self, day: Day, scheduler: str, clock: ManualClock) -> None:
        self.day, self.scheduler, self.clock = day, scheduler, clock

    def survey(
        self, names: Collection[HolderName], fresh: Collection[HolderName], wall: float
    ) -> dict[HolderName, Surroundings | Unreadable]:
        now = self.clock.wall()
        there = [each for each in self.day.holders if each.start <= now < each.end]
        alive = {each.name: each for each in there}
        gangs: dict[str, tuple[Member, ...]] = {}
        for each in there:
            if each.group and each.group not in gangs:
                gangs[each.group] = tuple(
                    Member(HolderName("kubernetes", "ml", peer.name), peer.uid, 1)
                    for peer in there
                    if peer.group == each.group
                )
        found: dict[HolderName, Surroundings | Unreadable] = {}
        for name in names:
            holder = alive.get(name.name)
            if holder is None:
                found[name] = Unreadable(f"{name} has ended or is gone")
            else:
                found[name] = Surroundings(holder.group, gangs.get(holder.group, ()), kind=class_of(holder))
        return found

    def find_living(self, holders: Collection[Incarnation]) -> set[Incarnation]:
        return {each for each in holders if self.read_fate(*each) == RUNS}

    def read_fate(self, name: HolderName, incarnation: str) -> str:
        now = self.clock.wall()
        return (
            RUNS if any(each.name == name.name and each.start <= now < each.end for each in self.day.holders) else ENDED
        )


class Outcomes(Tally):
    """Outcomes of all days. `open`: decisions whose outcome the day did not show."""

    open = 0


def class_of(holder: TrueHolder) -> str:
    if holder.kind == "notebook":
        return INTERACTIVE
    return SERVING if holder.kind == "serving" and not holder.is_job else BATCH


def decide_day(day: Day, tally: Outcomes) -> dict[int, list[Decision]]:
    """The `underused` decisions by minute, of a reconciler that runs every minute without a Prometheus."""
    clock = ManualClock(wall=0.0)

    def fetch(address: Address) -> str:
        page = day.pages.get(((address.port or 0) - 1, round(clock.wall() / 60)))
        if page is None:
            raise AnswerError(f"{address}: no answer")
        return page

    source = ExporterSource(
        [parse_exporter(f"node:{node + 1}") for node in range(NODES)], POLICY.underused_after, clock, fetch
    )
    record = Record(None, tally, clock, 30 * 86_400.0)
    surveyors = [TrueSurroundings(day, scheduler, clock) for scheduler in ("kubernetes", "slurm")]
    judge = judge_of(source, surveyors, Rulebook(POLICY), record=record)
    found: dict[int, list[Decision]] = {}
    for minute in range(1, MINUTES + 1):
        clock.advance(60.0)
        try:
            decisions = judge.judge().decisions
        except AnswerError:
            continue
        assert all(decision.reason for decision in decisions), "every decision says why"
        found[minute] = [decision for decision in decisions if decision.stage == UNDERUSED]
    tally.open += len(record.watches.open)
    return found


def truth_of(day: Day, decision: Decision, now: float) -> TrueHolder | None:
    """The holder of a decision, if it existed at that time."""
    there = (each for each in day.holders if each.name == decision.name.name and each.start <= now <= each.end + 60)
    return next((each for each in there if each.is_job or each.uid == decision.incarnation), None)


def worked(day: Day, holder: TrueHolder, start: float, end: float) -> bool:
    pieces = (piece for unit in holder.units for piece in unit.seen_work(day.disturbed[unit.node]))
    return any(begin < end and until > start for begin, until in pieces)


def least_s(holder: TrueHolder) -> float:
    """The seconds without work after which the holder is underused."""
    return POLICY.interactive_after if class_of(holder) == INTERACTIVE else POLICY.underused_after


def why_false(day: Day, holder: TrueHolder, now: float) -> str:
    """The reason why `underused` is wrong for a holder, "" if it is right."""
    since = now - least_s(holder)
    if class_of(holder) == SERVING:
        return "it serves"
    for peer in peers(day, holder, now):
        if peer.start > since or worked(day, peer, since, now):
            return f"{peer.name} works"
    long_ago = now - POLICY.host_delay_max
    # Host work is unknown for a while after a restart. Work that began in that time is detected after it.
    if min(holder.host_ratio(now), holder.host_ratio(now - HOST_BLIND_S - 120.0)) > POLICY.host_busy_ratio and (
        holder.start > long_ago or worked(day, holder, long_ago, now)
    ):
        return "it works on its CPUs"
    return ""


def peers(day: Day, holder: TrueHolder, now: float) -> list[TrueHolder]:
    """The existing pods of the holder's Job, with the holder itself."""
    if not holder.group:
        return [holder]
    return [each for each in day.holders if each.group == holder.group and each.start <= now <= each.end]


def expected(day: Day) -> Iterator[tuple[TrueHolder, float, float, float]]:
    """Every idle time that must be found: the holder, the start, the time from which it can be known, and the end.

    A holder's own gaps count twice. Pods of a Job must be found if none of them ever works.
    """
    known_of: dict[str, float] = {}
    for holder, _, known in stretches(day):
        known_of[holder.group] = max(known, known_of.get(holder.group, 0.0))
    for holder, (start, end), known in stretches(day):
        team = [each for each in day.holders if each.group == holder.group] if holder.group else []
        if class_of(holder) == SERVING or any(unit.work for each in team for unit in each.units):
            continue
        gaps = [b - a for a, b in holder.idle_stretches(day.disturbed) if b <= start]
        needed_s = max(least_s(holder), min(POLICY.gap_max, 2 * max(gaps, default=0.0)))
        needed_s = max(needed_s, POLICY.host_delay_max) if holder.host else needed_s
        begins = known_of[holder.group] if team else known
        if end - begins > needed_s + SLACK_S:
            yield holder, start, begins, end


def test_working_holders_are_never_underused_and_idle_holders_are(tmp_path: Path) -> None:
    print(f"GPU_EXPORTER_DAY_SEED={SEED}")
    random, tally = Random(SEED), Outcomes()
    false: list[tuple[int, str, str, float]] = []
    missed: list[tuple[int, str, str, float, float, float]] = []
    found, holders, kinds = 0, 0, Counter[str]()
    number = 0
    while number < DAYS or (found + len(missed) < DAYS and number < DAYS_MAX):
        (tmp_path / str(number)).mkdir()
        day = simulate(random, tmp_path / str(number))
        holders += len(day.holders)
        marked: dict[tuple[str, str], list[float]] = {}
        for minute, decisions in decide_day(day, tally).items():
            now = 60.0 * minute
            for decision in decisions:
                holder = truth_of(day, decision, now)
                if holder is None or (why := why_false(day, holder, now)):
                    why = "the holder does not exist" if holder is None else why
                    false.append((number, str(decision.name), f"{decision.reason}: {why}", now))
                else:
                    marked.setdefault((holder.name, holder.uid), []).append(now)
                    kinds[holder.kind] += 1
        for holder, start, known, end in expected(day):
            seen = any(start < now <= end + 60 for now in marked.get((holder.name, holder.uid), []))
            found += seen
            missed += [] if seen else [(number, holder.name, holder.kind, start, known, end)]
        number += 1
    years = number * NODES * GPUS * MINUTES / (365 * 24 * 60)
    most = -math.log(0.05) / years  # upper end of the 95 % interval if there was no false decision
    decided, outcomes = tally.counts()
    print(
        f"{number} days, {holders} holders, {sum(kinds.values())} minutes of true underused {dict(kinds)}, "
        f"{len(false)} of false: at most {most:.0f} a GPU-year; {found} of {found + len(missed)} idle times found; "
        f"of {decided} decisions {outcomes.get(RIGHT, 0)} were right, {outcomes.get(REGRET, 0)} regretted"
    )
    assert false == []
    assert decided == sum(outcomes.values()) + tally.open, "each decision has one outcome"
    assert found + len(missed) >= DAYS, "days without idle holders prove nothing"
    assert found / (found + len(missed)) >= 0.95, missed
