"""Makes the result of a backtest: the figures of each policy, a table of windows, and a suggested policy."""

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
WHY_NOT = f"no window has, together with all longer ones, at most {OF_SURE}"
Grid = Mapping[tuple[float, float], Tally]


class PolicyResult(NamedTuple):
    """The result of one policy. `name`: its file.

    - `tally`: the decisions with proven idle time.
    - `unproven`: by floor, the additional decisions if every measured zero were idle time.
    """

    name: str
    tally: Tally
    unproven: Mapping[float, Figures]


class Overlap(NamedTuple):
    """Compares the decisions of two policies: about the same idle time, only by the first, and only by the second."""

    both: Figures
    first: Figures
    second: Figures


class Backtest(NamedTuple):
    """The result for policies on the history from `start` to `end` (Unix seconds).

    - `windows`: the first policy's decisions by window (seconds) and floor. `are_unproven`: their idle time is not
      proven; the table then has them because there is no proven decision.
    - `suggested`: lines of a configuration file. `overlap`: None for a single policy.
    - `missing`: data that the sources lack, each with the effect. `left_out`: series that cannot be parsed.
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
    """Finds the idle times about which both policies decide, and those about which only one does."""
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
    unproven = {}
    has_doubts = any(each.doubts for gang in gangs for life in gang.lives for each in life.tenures)
    if has_doubts:
        proven, trusted = (sums.grid({0.0: book}, is_trusted=is_trusted) for is_trusted in (False, True))
        for each in FLOORS:
            unproven[each] = compare(sums, trusted[0.0, each], proven[0.0, each]).first
    return PolicyResult(name, sums.tally(book, FLOORS.index(floor)), unproven)


def run_table(sums: Sums, book: Rulebook, *, is_trusted: bool) -> Grid:
    """Returns the decisions for each of WINDOWS_S at each floor."""
    return sums.grid({window: with_window(book, window) for window in WINDOWS_S}, is_trusted=is_trusted, is_kept=False)


def suggest(windows: Grid, floor: float) -> Iterator[str]:
    """Yields lines of a configuration file: the shortest window that is seldom wrong, and exceptions for tenants and
    kinds for which it is often wrong.
    """
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
    """Returns the shortest window for which it and all longer windows are seldom wrong. None if there is no such
    window.

    A short window may seem right for holders that work every few hours, because they are still idle an hour later. So
    the longer windows must be seldom wrong too.
    """
    best = None
    for window, figures in sorted(of.items(), reverse=True):
        if figures.known >= KNOWN_MIN:
            if _is_often_wrong(figures) or _upper(figures.fates[RETURNED], figures.known) > REGRET_MAX:
                break
            best = window
    return best


def _is_often_wrong(figures: Figures) -> bool:
    """Returns whether too many holders worked again, within an hour or at any later time."""
    return (figures.regret or 0.0) > REGRET_MAX or (figures.ever or 0.0) > EVER_MAX


def _upper(count: int, of: int) -> float:
    """Returns the upper limit of the true share if `count` of `of` decisions were wrong, at 90 % confidence (Wilson,
    1927).

    The share itself is too optimistic: the window with the smallest share is often the smallest by chance.
    """
    share, spread = count / of, Z * Z / of
    return (share + spread / 2.0 + math.sqrt(spread * (share * (1.0 - share) + spread / 4.0))) / (1.0 + spread)


def figure(figures: Figures) -> str:
    """Returns the figures for the comment after a suggested line."""
    regret = "-" if figures.regret is None else f"{figures.regret:.1%}"
    again = f"{percent(figures.ever)} ever worked again"
    return f"regret {regret} of {figures.known:,} decisions, {again}, {figures.hours:,.0f} idle GPU-hours after them"


def _quoted(name: str) -> str:
    """Escapes a name for a pattern in a YAML string with single quotes. An unprintable character becomes `?`."""
    special = {"*": "[*]", "?": "[?]", "[": "[[]", "'": "''"}
    return "".join(special.get(char, char if char.isprintable() else "?") for char in name)


def _list(windows: Sequence[float]) -> str:
    return ", ".join(format_duration(window) for window in windows)
