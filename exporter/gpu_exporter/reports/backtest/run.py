"""`gpu-exporter backtest`: replays policies on the history in a PromQL API, and prints the result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from gpu_exporter.common.address import Address
from gpu_exporter.common.promql.client import Fetch
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reports.backtest.curves import read_curve
from gpu_exporter.reports.backtest.gather import read_gangs
from gpu_exporter.reports.backtest.lives import PastGang
from gpu_exporter.reports.backtest.model import Backtest, compare, judge_policy, run_table, suggest
from gpu_exporter.reports.backtest.render import FORMS
from gpu_exporter.reports.backtest.sums import Sums, find_longest
from gpu_exporter.reports.history.asking import History, WindowSpan
from gpu_exporter.reports.usage.cells import WINDOW_S
from gpu_exporter.reports.usage.deliver import put
from gpu_exporter.reports.usage.gather import without_garbage_collector
from gpu_exporter.reports.usage.model import FLOORS, ReportSource
from gpu_exporter.reports.usage.prices import read_prices
from gpu_exporter.reports.usage.run import Progress, ServerRest, Wish, finish
from gpu_exporter.reports.usage.site import describe, find_site

LEAD_S = 6 * 3600.0  # read before the period, so that the holders of its first hours have a past
OWN_SOURCE = ReportSource("gpu-exporter", "idle runs of its allocations")
LONGEST = 10  # idle stretches that are listed
SLOWER = 1.25  # than a report of the same time
OF_SERVERS = "which pods serve requests: a live reconciler does not mark them"
UNREAD = (
    ("labels", "labels of pods: policies that match labels are replayed as if no pod matched"),
    ("job_names", "names of jobs: if a policy needs the name of a holder, the holder is unknown"),
    ("reservations", "reservations of jobs: if a policy needs the reservation of a holder, the holder is unknown"),
)


def run_backtest(
    address: Address,
    fetch: Fetch,
    wish: Wish,
    books: Sequence[tuple[str, Rulebook]],
    form: str,
    output: Path | None = None,
) -> int:
    """Prints, writes or mails the result. Returns the exit code: NO_DATA if there is no data."""
    with without_garbage_collector():
        return finish("backtest", lambda: put(FORMS[form](read_backtest(address, fetch, wish, books)), output))


def read_backtest(address: Address, fetch: Fetch, wish: Wish, books: Sequence[tuple[str, Rulebook]]) -> Backtest:
    """Reads the history, and replays each policy. Raises AnswerError, and OSError for kept answers."""
    start, end, _ = wish.period
    progress = Progress("backtest", SLOWER)
    history = History(address, fetch, wish.kept, progress, rest=ServerRest(wish.rest))
    prices = read_prices(history, end, wish.prices, wish.currency, wish.matcher)
    longest_s = max(max(each.underused_after, each.interactive_after) for _, book in books for each in book.policies)
    lead = max(LEAD_S, math.ceil(longest_s / WINDOW_S) * WINDOW_S)
    span = WindowSpan(start - lead, end, WINDOW_S)
    site = find_site(history, wish.matcher, span)
    gangs, missing, sources = read_gangs(
        history, wish.matcher, wish.alerts.team_label, books[0][1].site, site, span, progress
    )
    if site.own and not site.prefers_own:
        missing.append(
            "gpu-exporter's own series: they cover only a part of the period or of the GPUs, and are not used"
        )
    missing += _limits(gangs, [book for _, book in books], is_own=site.prefers_own)
    sums = Sums(gangs, start, prices.of)
    results = [judge_policy(sums, gangs, name, book, wish.floor) for name, book in books]
    first = results[0]
    are_unproven = not first.tally.total.decisions and any(each.decisions for each in first.unproven.values())
    windows = run_table(sums, books[0][1], is_trusted=are_unproven)
    longest = [
        each._replace(curve=read_curve(history, sources, each.gang.lives[0], each.start, each.end, end))
        for each in find_longest(gangs, first.tally.decided, FLOORS.index(wish.floor), start, LONGEST)
    ]
    left_out = history.describe_skipped()
    return Backtest(
        start,
        end,
        wish.floor,
        [OWN_SOURCE] if site.prefers_own else list(describe(site)),
        sum(len(gang.lives) for gang in gangs),
        results,
        windows,
        are_unproven,
        longest,
        ["# no decision is proven, so none is a reason for a policy"]
        if are_unproven
        else list(suggest(windows, wish.floor)),
        compare(sums, results[0].tally, results[1].tally) if len(results) > 1 else None,
        missing,
        [left_out] if left_out else [],
        prices.currency if prices else "",
    )


def _limits(gangs: Sequence[PastGang], books: Sequence[Rulebook], *, is_own: bool) -> list[str]:
    """Lists what a live reconciler considers and the history lacks."""
    found = ["opt-outs of owners, and controllers above a StatefulSet or above the owner of a ReplicaSet or Job"]
    if any(life.name.namespace for gang in gangs for life in gang.lives):
        found.append(OF_SERVERS)
    if not is_own:
        found.append("work on hosts: a live reconciler delays some marks for it, for up to policy.host_delay_max")
    rules = [rule for book in books for rule in book.rules]
    found += [text for key, text in UNREAD if any(getattr(rule.match, key) for rule in rules)]
    if any(book.site.pause_when for book in books):
        found.append("pauses (policy.pause_when): here, idle time during a pause counts")
    return found
