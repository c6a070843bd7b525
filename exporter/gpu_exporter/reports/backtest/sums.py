"""Adds up the decisions of a backtest: their number, the idle GPU-hours after them, and how many were wrong. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.config.rules import PolicyRule
from gpu_exporter.reconciler.decision.brakes import find_bursts
from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reports.backtest.curves import NO_CURVE, UseCurve
from gpu_exporter.reports.backtest.lives import HolderLife, PastGang
from gpu_exporter.reports.backtest.replay import (
    AT_END,
    ENDED,
    IDLE,
    LATER,
    NODE_LOST,
    RETURNED,
    TAKEN,
    Replay,
    Replayed,
    Replayer,
)
from gpu_exporter.reports.usage.model import FLOORS

DAY_S, HOUR_S = 86400.0, 3600.0
WINDOWS_S = (1800.0, 3600.0, 5400.0, 7200.0, 10800.0, 14400.0)  # of the table
RIGHT = (LATER, IDLE, ENDED)  # as the outcome `right` of the reconciler
OF_WINDOWS = ("candidate_after", "underused_after", "interactive_after")
PriceOf: TypeAlias = Callable[[str, str], float | None]


class Measured(NamedTuple):
    """The contribution of one decision to Figures. `is_back`: the holder worked again. `is_sure`: it surely did not."""

    fate: str
    is_back: bool
    is_sure: bool
    match: str
    gpus: float
    hours: float
    cost: float
    unpriced: float


def measure(each: Replayed, price_of: PriceOf) -> Measured:
    """Returns the GPUs, idle GPU-hours and money of a decision."""
    first, idle_h = each.lives[0], (each.idle_until - each.wall) / HOUR_S
    has_account = bool(first.facts.get("account", frozenset()) - {""})
    match = "namespaces" if first.name.namespace else "accounts" if has_account else ""
    gpus = cost = unpriced = 0.0
    for life in each.lives:
        held = life.gpus_at(each.wall)
        gpus += held
        price = price_of(life.tenures[0].model, life.cluster)
        if price is None:
            unpriced += held * idle_h
        else:
            cost += held * idle_h * price
    is_back = each.back_s is not None
    return Measured(each.fate, is_back, not is_back and each.is_seen, match, gpus, gpus * idle_h, cost, unpriced)


@dataclass(slots=True)
class Figures:
    """The sums over many decisions.

    - `gpus`: GPUs of the holders; a part of a GPU counts as a part. `hours`: idle GPU-hours after the decisions.
    - `sure_hours`: those idle GPU-hours whose holder provably never worked again.
    - `cost`: money for `hours`. `unpriced`: hours without a price. `fates`: number of decisions by fate.
    - `back`: decisions whose holder worked again at any time. `stayed`: decisions whose holder provably did not, and
      ended by itself.
    - `match`: the policy key that selects the tenant of these decisions, "" if there is none.
    """

    decisions: int = 0
    gpus: float = 0.0
    hours: float = 0.0
    sure_hours: float = 0.0
    cost: float = 0.0
    unpriced: float = 0.0
    fates: Counter[str] = field(default_factory=Counter)
    back: int = 0
    stayed: int = 0
    match: str = ""

    def add(self, each: Measured) -> None:
        fate, is_back, is_sure = each.fate, each.is_back, each.is_sure
        self.decisions += 1
        self.fates[fate] += 1
        self.back += is_back
        self.stayed += is_sure and fate not in (AT_END, NODE_LOST, TAKEN)
        self.match = each.match
        self.gpus += each.gpus
        self.hours += each.hours
        self.sure_hours += each.hours * is_sure
        self.cost += each.cost
        self.unpriced += each.unpriced

    @property
    def known(self) -> int:
        """The number of decisions with a known outcome."""
        return self.fates[RETURNED] + sum(self.fates[fate] for fate in RIGHT)

    @property
    def regret(self) -> float | None:
        """The share of known decisions whose holder worked within an hour, 0 to 1. None without known decisions."""
        return self.fates[RETURNED] / self.known if self.known else None

    @property
    def ever(self) -> float | None:
        """The share of decisions whose holder ever worked again, 0 to 1. None without such decisions. Omits holders
        that did not end by themselves, and holders whose work may be hidden by a gap.
        """
        lives = self.back + self.stayed
        return self.back / lives if lives else None

    @property
    def money(self) -> float | None:
        """Money for the idle hours. None if more than 1 % of them have no price."""
        return self.cost if self.hours and self.unpriced <= 0.01 * self.hours else None


class IdleStretch(NamedTuple):
    """A long time in which all units of a gang were idle. `decided`: when the gang became underused, None if it did
    not. `curve`: the utilization around this time.
    """

    start: float
    end: float
    ended: str
    gang: PastGang
    gpus: float
    decided: float | None
    curve: UseCurve = NO_CURVE


@dataclass
class Tally:
    """The result of one policy on a period.

    - `total`: all decisions. `rows`: the decisions by each of DIMENSIONS and its values.
    - `warned`: number of mails by owner and day (Unix seconds of its start). `candidates`: number of gangs that became
      one.
    - `spared`: by reason, the number of gangs that were idle for long enough and did not become underused.
    - `begun`: as in Replay. `braked`: decisions whose marks the brake `correlated` would have delayed.
    - `limited`: number of marks that policy.new_marks_hour_max would have delayed.
    """

    total: Figures = field(default_factory=Figures)
    rows: dict[str, defaultdict[str, Figures]] = field(
        default_factory=lambda: {name: defaultdict(Figures) for name in DIMENSIONS}
    )
    warned: defaultdict[str, Counter[float]] = field(default_factory=lambda: defaultdict(Counter))
    candidates: int = 0
    spared: Counter[str] = field(default_factory=Counter)
    decided: list[Replayed] = field(default_factory=list)
    begun: list[tuple[float, Decision]] = field(default_factory=list)
    braked: Figures = field(default_factory=Figures)
    limited: int = 0


DIMENSIONS: Mapping[str, Callable[[Replayed], str]] = {
    "class": lambda each: each.gang.kind,
    "tenant": lambda each: tenant_of(each.lives[0]),
    "owner_kind": lambda each: owner_kind_of(each.gang),
    "model": lambda each: each.lives[0].tenures[0].model or "(unknown)",
    "policy": lambda each: each.rule or "policy",
}


def owner_kind_of(gang: PastGang) -> str:
    """Returns the kind of the highest known controller. Without a controller, Pod or job."""
    return gang.owner_kinds[-1] if gang.owner_kinds else "Pod" if gang.lives[0].name.namespace else "job"


def tenant_of(life: HolderLife) -> str:
    """Returns the tenant of a holder: the namespace of a pod, the account or else the user of a job."""
    return life.name.namespace or life.owner.rpartition("/")[2] or "(not named)"


def owner_of(gang: PastGang) -> str:
    """Returns the receiver of a mail about a gang: its user, its team, or all members of its tenant."""
    life = gang.lives[0]
    return life.owner or gang.team or tenant_of(life)


class Sums:
    """Replays policies on the gangs of a period, and adds up their decisions."""

    def __init__(self, gangs: Sequence[PastGang], start: float, price_of: PriceOf) -> None:
        """`start`: earlier decisions do not count (Unix seconds)."""
        self._gangs, self._start, self._price_of = gangs, start, price_of

    def add(self, figures: Figures, each: Replayed) -> None:
        figures.add(measure(each, self._price_of))

    def tally(self, book: Rulebook, floor: int, *, is_trusted: bool = False) -> Tally:
        """Returns the result of a policy. `floor`: index in model.FLOORS. `is_trusted`: every zero is idle time."""
        judge, found = Replayer(book, floor, is_trusted=is_trusted), Tally()
        for gang in self._gangs:
            replay = judge.replay(gang)
            self._count(found, gang, replay, self._measure(replay))
        self._hold_back(found, book.site)
        return found

    def _hold_back(self, found: Tally, policy: Policy) -> None:
        """Counts the decisions whose marks a brake or a limit would have delayed. Each gang member has one mark."""
        tenures = [each for gang in self._gangs for life in gang.lives for each in life.tenures]
        end = max((each.end for each in tenures), default=self._start)
        held_s = sum(max(0.0, each.end - max(each.start, self._start)) for each in tenures)
        allocations = round(held_s / max(1.0, end - self._start))
        bursts = find_bursts(found.begun, allocations, policy)
        for each in found.decided:
            waits_until = each.since + policy.candidate_after + policy.freeze_max
            if each.wall < waits_until and any(burst.covers(each.since) for burst in bursts):
                self.add(found.braked, each)
        marks = sorted(each.wall for each in found.decided for _ in each.lives)
        first = 0
        for number, wall in enumerate(marks):
            while marks[first] <= wall - HOUR_S:
                first += 1
            found.limited += number - first >= policy.new_marks_hour_max

    def grid(
        self, books: Mapping[float, Rulebook], *, is_trusted: bool, is_kept: bool = True
    ) -> dict[tuple[float, float], Tally]:
        """Returns the results of several policies, by key of the policy and by floor. `is_kept`: the results contain
        the decisions.
        """
        judges = {
            (key, number): Replayer(book, number, is_trusted=is_trusted, is_brief=True)
            for key, book in books.items()
            for number in range(len(FLOORS))
        }
        found = {(key, floor): Tally() for key in books for floor in FLOORS}
        for gang in self._gangs:
            tenures = [each for life in gang.lives for each in life.tenures]
            for key in books:
                replay: Replay | None = None
                measured: Sequence[Measured] = ()
                for number, floor in enumerate(FLOORS):
                    # Most holders have the same zeros at each floor.
                    if replay is None or any(each.runs[number] != each.runs[number - 1] for each in tenures):
                        replay = judges[key, number].replay(gang)
                        measured = self._measure(replay)
                    self._count(found[key, floor], gang, replay, measured)
                    if not is_kept:  # there are many tallies
                        found[key, floor].decided.clear()
                        found[key, floor].begun.clear()
        return found

    def _measure(self, replay: Replay) -> list[Measured]:
        return [measure(each, self._price_of) for each in replay.decisions]

    def _count(self, found: Tally, gang: PastGang, replay: Replay, measured: Sequence[Measured]) -> None:
        for each, of_each in zip(replay.decisions, measured, strict=True):
            if each.wall < self._start:
                continue
            found.total.add(of_each)
            found.decided.append(each)
            for name, of in DIMENSIONS.items():
                found.rows[name][of(each)].add(of_each)
        warned = [wall for wall in replay.warned if wall >= self._start]
        found.candidates += len(warned)
        found.begun += replay.begun
        for wall in warned:
            found.warned[owner_of(gang)][wall // DAY_S * DAY_S] += 1
        reasons = {why for wall, why in replay.spared.items() if wall >= self._start}
        found.spared.update(reasons if not replay.decisions else ())


def with_window(book: Rulebook, window_s: float) -> Rulebook:
    """Returns the policy with `window` as underused_after for all classes. All other settings stay."""
    site = book.site._replace(
        candidate_after=min(book.site.candidate_after, window_s), underused_after=window_s, interactive_after=window_s
    )
    return Rulebook(site, [_without_windows(rule) for rule in book.rules])


def _without_windows(rule: PolicyRule) -> PolicyRule:
    return rule._replace(changes=tuple(change for change in rule.changes if change[0] not in OF_WINDOWS))


def find_longest(
    gangs: Iterable[PastGang], decided: Iterable[Replayed], floor: int, start: float, top: int
) -> list[IdleStretch]:
    """Finds the longest times in which all units of a single holder were idle, by GPU-hours."""
    walls: defaultdict[int, list[float]] = defaultdict(list)
    for each in decided:
        walls[id(each.gang)].append(each.wall)
    found = []
    for gang in gangs:
        for life in gang.lives:
            for begin, end, ended in idle_spans(life, floor):
                if end > start:
                    at = next((wall for wall in walls[id(gang)] if begin <= wall < end), None)
                    found.append(
                        IdleStretch(
                            begin, end, ended, PastGang([life], gang.title, team=gang.team), life.gpus_at(begin), at
                        )
                    )
    found.sort(key=lambda each: (-each.gpus * (each.end - each.start), each.start, each.gang.lives[0].name))
    return found[:top]


def idle_spans(life: HolderLife, floor: int) -> Iterator[tuple[float, float, str]]:
    """Yields the times in which all units of a holder were idle, each with the way in which it ended."""
    first, *others = life.tenures
    for run in first.runs[floor]:
        begin, end, ended = run
        is_idle = True
        for other in others:
            beside = other.run_at(max(begin, other.start), floor) if other.start < end else None
            if beside is None and other.start < end and other.end > begin:
                is_idle = False
            elif beside is not None:
                begin = max(begin, beside.start)
                if beside.end < end:
                    end, ended = beside.end, beside.ended
        if is_idle and begin < end:
            yield begin, end, ended


def sort_rows(rows: Mapping[str, Figures]) -> list[tuple[str, Figures]]:
    """Returns the rows, most hours first."""
    return sorted(rows.items(), key=lambda item: (-item[1].hours, item[0]))
