"""The result of a backtest: the figures of each policy, a table of windows, and the policy that the table suggests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.common.durations import format_duration
from gpu_exporter.common.plain import percent
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reports.backtest.lives import PastGang
from gpu_exporter.reports.backtest.replay import RETURNED
from gpu_exporter.reports.backtest.sums import (
    WINDOWS_S,
    Figures,
    IdleStretch,
    Sums,
    Tally,
    sort_rows,
    with_window,
)
from gpu_exporter.reports.usage.model import FLOORS, ReportSource

REGRET_MAX = 0.05  # as actions.regret_max
Z = 1.2816  # quantile of the normal distribution at 90 %
EVER_MAX = 0.5  # above it, most holders needed their GPUs again
KNOWN_MIN = 20  # known decisions from which a share is a reason for a policy
OF_SURE = f"{REGRET_MAX:.0%} regret (at 90 % confidence) and {EVER_MAX:.0%} ever back"
WHY_NOT = f"no window with at most {OF_SURE}, as all longer ones"
Grid = Mapping[tuple[float, float], Tally]


class PolicyResult(NamedTuple):
    """One policy. `name`: its file.

    - `tally`: decisions that the sources prove. `unproven`: by floor, further ones if each zero that a source saw were
      idle for the whole time.
    """

    name: str
    tally: Tally
    unproven: Mapping[float, Figures]


class Overlap(NamedTuple):
    """Two policies: the figures of decisions of both on the same idle time, of the first alone, and of the second."""

    both: Figures
    first: Figures
    second: Figures


class Backtest(NamedTuple):
    """Policies on the history from `start` to `end` (Unix seconds).

    - `windows`: by window (seconds) and floor, for the first policy. `are_unproven`: these are not proven, because no
      decision is. `suggested`: lines of a configuration file. `overlap`: None for a single policy.
    - `missing`: what the sources do not show, each with its effect. `left_out`: series that cannot be read.
    """

    start: float
    end: float
    floor: float
    sources: Sequence[ReportSource]
    holders: int
    policies: Sequence[PolicyResult]
    windows: Grid
    are_unproven: bool
    longest: Sequence[IdleStretch]
    suggested: Sequence[str]
    overlap: Overlap | None
    missing: Sequence[str]
    left_out: Sequence[str]
    currency: str

    @property
    def days(self) -> float:
        return (self.end - self.start) / 86400.0


def compare(sums: Sums, one: Tally, other: Tally) -> Overlap:
    """Which idle times both policies find."""
    walls: dict[int, list[tuple[float, float]]] = {}
    for each in other.decided:
        walls.setdefault(id(each.gang), []).append((each.wall, each.idle_until))
    found = Overlap(Figures(), Figures(), Figures())
    matched: set[tuple[int, float]] = set()
    for each in one.decided:
        spans = walls.get(id(each.gang), ())
        same = next((span for span in spans if span[0] < each.idle_until and each.wall < span[1]), None)
        if same is not None:
            matched.add((id(each.gang), same[0]))
        sums.add(found.first if same is None else found.both, each)
    for each in other.decided:
        if (id(each.gang), each.wall) not in matched:
            sums.add(found.second, each)
    return found


def judge_policy(sums: Sums, gangs: Sequence[PastGang], name: str, book: Rulebook, floor: float) -> PolicyResult:
    """The result of one policy."""
    unproven = {}
    has_doubts = any(each.doubts for gang in gangs for life in gang.lives for each in life.tenures)
    if has_doubts:
        proven, trusted = (sums.grid({0.0: book}, is_trusted=is_trusted) for is_trusted in (False, True))
        for each in FLOORS:
            unproven[each] = compare(sums, trusted[0.0, each], proven[0.0, each]).first
    return PolicyResult(name, sums.tally(book, FLOORS.index(floor)), unproven)


def run_table(sums: Sums, book: Rulebook, *, is_trusted: bool) -> Grid:
    """The decisions by each of WINDOWS_S, at each floor."""
    return sums.grid({window: with_window(book, window) for window in WINDOWS_S}, is_trusted=is_trusted, is_kept=False)


def suggest(windows: Grid, floor: float) -> Iterator[str]:
    """Lines of a configuration file: the shortest window that is seldom wrong, and exceptions for those it hits."""
    of = {window: windows[window, floor] for window in WINDOWS_S}
    best = _shortest({window: tally.total for window, tally in of.items()})
    if best is None:
        most = max(tally.total.known for tally in of.values())
        yield f"# {WHY_NOT} of {_list(WINDOWS_S)}"
        yield f"# in {KNOWN_MIN} decisions or more (there are up to {most}): warn only"
        yield from (f"# {format_duration(window)}: {figure(tally.total)}" for window, tally in of.items())
        yield "policies:"
        yield "- {name: warn-only, ceiling: candidate}"
        return
    total = of[best].total
    yield "policy:"
    yield f"  candidate_after: {format_duration(min(3600.0, best))}"
    yield f"  underused_after: {format_duration(best)}  # {figure(total)}"
    lines = [line for key in ("tenant", "owner_kind") for line in _exceptions(of, best, key)]
    if lines:
        yield "policies:"
        yield from lines


def _exceptions(of: Mapping[float, Tally], best: float, key: str) -> Iterator[str]:
    for number, (name, figures) in enumerate(sort_rows(of[best].rows[key]), 1):
        match = figures.match if key == "tenant" else "owner_kinds" if figures.match == "namespaces" else ""
        if not match or figures.known < KNOWN_MIN or not _is_often_wrong(figures):
            continue
        later = {window: tally.rows[key][name] for window, tally in of.items() if window > best}
        longer = _shortest(later)
        head = (
            f"- name: {key.replace('_', '-')}-{number}  # {figure(figures)}\n  match: {{{match}: ['{_quoted(name)}']}}"
        )
        if longer is None:
            yield f"{head}\n  ceiling: candidate  # {WHY_NOT}"
        else:
            yield f"{head}\n  underused_after: {format_duration(longer)}  # {figure(later[longer])}"


def _shortest(of: Mapping[float, Figures]) -> float | None:
    """The shortest window that is seldom wrong, as all longer ones are; None without any.

    Holders that work every few hours are seldom wrong at a short window too, because an hour later they are still idle.
    """
    best = None
    for window, figures in sorted(of.items(), reverse=True):
        if figures.known >= KNOWN_MIN:
            if _is_often_wrong(figures) or _upper(figures.fates[RETURNED], figures.known) > REGRET_MAX:
                break
            best = window
    return best


def _is_often_wrong(figures: Figures) -> bool:
    """Whether too many holders worked again, within an hour or ever."""
    return (figures.regret or 0.0) > REGRET_MAX or (figures.ever or 0.0) > EVER_MAX


def _upper(count: int, of: int) -> float:
    """The share that `count` of so many allow at most, with 90 % confidence: the upper end of Wilson's interval (1927).

    Of several windows, the one with the smallest share is often so by chance.
    """
    share, spread = count / of, Z * Z / of
    return (share + spread / 2.0 + math.sqrt(spread * (share * (1.0 - share) + spread / 4.0))) / (1.0 + spread)


def figure(figures: Figures) -> str:
    """The figure behind a line, for people."""
    regret = "-" if figures.regret is None else f"{figures.regret:.1%}"
    again = f"{percent(figures.ever)} ever worked again"
    return f"regret {regret} of {figures.known:,} decisions, {again}, {figures.hours:,.0f} idle GPU-hours after them"


def _quoted(name: str) -> str:
    """A name as a pattern in a YAML string with single quotes. `?` matches a character that fits into no line."""
    special = {"*": "[*]", "?": "[?]", "[": "[[]", "'": "''"}
    return "".join(special.get(char, char if char.isprintable() else "?") for char in name)


def _list(windows: Sequence[float]) -> str:
    return ", ".join(format_duration(window) for window in windows)
