"""`gpu-exporter report --against sacct`: compares the hours of a report with sacct, and prints the difference."""

from __future__ import annotations

import math
from pathlib import Path

from gpu_exporter.common.address import Address
from gpu_exporter.common.promql.client import Fetch
from gpu_exporter.reports.accounting.compare import AccountHours, compare
from gpu_exporter.reports.accounting.render import FORMS
from gpu_exporter.reports.history.asking import History, WindowSpan
from gpu_exporter.reports.usage.cells import WINDOW_S
from gpu_exporter.reports.usage.deliver import put
from gpu_exporter.reports.usage.gather import Gatherer
from gpu_exporter.reports.usage.prices import given_prices
from gpu_exporter.reports.usage.run import Progress, ServerRest, Wish, finish
from gpu_exporter.reports.usage.site import find_site
from gpu_exporter.reports.usage.tenants.read import TenantReader


def run_comparison(address: Address, fetch: Fetch, wish: Wish, form: str, output: Path | None) -> int:
    """Prints the comparison, or writes it to `output`. Returns the exit code: NO_DATA if there is no data."""
    progress = Progress()
    history = History(address, fetch, wish.kept, progress, rest=ServerRest(wish.rest))

    def read() -> AccountHours:
        since_s, until = math.ceil(wish.since_s), math.floor(wish.until)  # a query has whole seconds
        site = find_site(history, wish.matcher, WindowSpan(until - max(WINDOW_S, since_s), until, WINDOW_S))
        if site.prefers_own:
            report = TenantReader(address, wish.matcher, wish.alerts, fetch).read(since_s, until)
        else:
            prices = given_prices([], "")
            gatherer = Gatherer(history, wish.matcher, prices, wish.floor, wish.alerts.team_label, progress)
            report = gatherer.read(site, wish.period, has_trend=False)
        return compare(report, history, wish.matcher, is_own=site.prefers_own)

    return finish("report", lambda: put(FORMS[form](read()), output))
