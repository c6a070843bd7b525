"""Days of which everything is known, decided by the policy: nobody who works is underused, and who does not work is.

The seed is fresh in each run and printed; GPU_EXPORTER_DAY_SEED repeats one. Adversaries: 200 ms of work each 50 minutes,
bursts and requests between scrapes, pods recreated under their name, gangs of which one member works, GPUs whose
utilization reads 0 while they work, restarts, failed readings, failed scrapes.
"""

from __future__ import annotations

import math
import os
import secrets
from collections import Counter
from pathlib import Path
from random import Random
from urllib.parse import urlsplit

from gpu_exporter.clock import ManualClock
from gpu_exporter.defaults import Policy
from gpu_exporter.reconciler.direct import ExporterSource
from gpu_exporter.reconciler.evidence import EvidenceError
from gpu_exporter.reconciler.judge import Judge
from gpu_exporter.reconciler.policy import UNDERUSED, Decision
from gpu_exporter.reconciler.regret import Regrets
from gpu_exporter.reconciler.rulebook import Rulebook
from tests.rules.day import GPUS, MINUTES, NODES, Day, TrueHolder, simulate, stretches

SEED = int(os.environ.get("GPU_EXPORTER_DAY_SEED", "0")) or secrets.randbits(32)
DAYS = 2
POLICY = Policy()._replace(freeze_exporters=0.5)  # of four exporters, one may be away for a moment
SLACK_S = 600.0  # a scrape that failed, coverage that is just short, half a minute for a cycle


class Tally:
    """How often a decision was regretted."""

    def __init__(self) -> None:
        self.underused = self.regrets = 0

    def count_underused(self, policy: str, kind: str) -> None:
        self.underused += 1

    def count_regret(self, policy: str, kind: str) -> None:
        self.regrets += 1


def decide_day(day: Day, tally: Tally) -> dict[int, list[Decision]]:
    """The decisions of a reconciler that looks once a minute, without a Prometheus: by minute, those on underused."""
    clock = ManualClock(wall=0.0)

    def fetch(url: str) -> str:
        page = day.pages.get((int(urlsplit(url).port or 0), round(clock.wall() / 60)))
        if page is None:
            raise EvidenceError(f"{url}: no answer")
        return page

    source = ExporterSource([f"http://node:{node}" for node in range(NODES)], POLICY.underused_after, clock, fetch)
    regrets = Regrets(tally, clock)
    judge = Judge(source, lambda _scheduler: None, Rulebook(POLICY), clock, regrets=regrets)
    found: dict[int, list[Decision]] = {}
    for minute in range(1, MINUTES + 1):
        clock.advance(60.0)
        try:
            decisions = judge.judge().decisions
        except EvidenceError:
            continue
        assert all(decision.reason for decision in decisions), "every decision says why"
        found[minute] = [decision for decision in decisions if decision.stage == UNDERUSED]
    return found


def truth_of(day: Day, decision: Decision, now: float) -> TrueHolder | None:
    """The holder that a decision is about, if it existed then."""
    there = (each for each in day.holders if each.name == decision.name.name and each.start <= now <= each.end + 60)
    return next((each for each in there if each.is_job or each.uid == decision.incarnation), None)


def worked(day: Day, holder: TrueHolder, start: float, end: float) -> bool:
    pieces = (piece for unit in holder.units for piece in unit.seen_work(day.disturbed[unit.node]))
    return any(begin < end and until > start for begin, until in pieces)


def needed_s(day: Day, holder: TrueHolder, before: float) -> float:
    """For how long it must be idle at the end of a stretch that begins at `before`: its own gaps count twice."""
    gaps = [end - start for start, end in holder.idle_stretches(day.disturbed) if end <= before]
    return max(POLICY.underused_after, min(POLICY.gap_max, 2 * max(gaps, default=0.0)))


def test_who_works_is_never_underused_and_who_does_not_is(tmp_path: Path) -> None:
    print(f"GPU_EXPORTER_DAY_SEED={SEED}")
    random, tally = Random(SEED), Tally()
    false: list[tuple[int, str, str, float]] = []
    missed: list[tuple[int, str, str, float, float, float]] = []
    found, holders, kinds = 0, 0, Counter[str]()
    for number in range(DAYS):
        (tmp_path / str(number)).mkdir()
        day = simulate(random, tmp_path / str(number))
        holders += len(day.holders)
        marked: dict[tuple[str, str], list[float]] = {}
        for minute, decisions in decide_day(day, tally).items():
            now = 60.0 * minute
            for decision in decisions:
                holder = truth_of(day, decision, now)
                if holder is None or worked(day, holder, now - POLICY.underused_after, now):
                    false.append((number, str(decision.name), decision.reason, now))
                else:
                    marked.setdefault((holder.name, holder.uid), []).append(now)
                    kinds[holder.kind] += 1
        for holder, (start, end), known in stretches(day):
            if end - known > needed_s(day, holder, start) + SLACK_S:
                seen = any(start < now <= end + 60 for now in marked.get((holder.name, holder.uid), []))
                found += seen
                missed += [] if seen else [(number, holder.name, holder.kind, start, known, end)]
    years = DAYS * NODES * GPUS * MINUTES / (365 * 24 * 60)
    most = -math.log(0.05) / years  # upper end of the interval of 95 % where none was seen
    print(
        f"{DAYS} days, {holders} holders, {sum(kinds.values())} minutes of underused {dict(kinds)}, {len(false)} of them "
        f"false: at most {most:.0f} a GPU-year; {found} of {found + len(missed)} idle times found; "
        f"{tally.regrets} of {tally.underused} worked again within an hour"
    )
    assert false == []
    assert found + len(missed) >= DAYS, "days without idle holders prove nothing"
    assert found / (found + len(missed)) >= 0.95, missed
