"""`gpu-exporter report` and `digest`: read the usage of a period from a PromQL API, deliver it and exit."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.common.config.defaults import Alerts
from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.plain import one_line
from gpu_exporter.common.promql.client import Fetch
from gpu_exporter.reports.history.asking import History, Store, WindowSpan
from gpu_exporter.reports.usage.cells import WINDOW_S
from gpu_exporter.reports.usage.deliver import Mail, deliver
from gpu_exporter.reports.usage.gather import Gatherer, load_of
from gpu_exporter.reports.usage.model import UsageReport
from gpu_exporter.reports.usage.prices import read_prices
from gpu_exporter.reports.usage.render.view import ReportView
from gpu_exporter.reports.usage.site import find_site
from gpu_exporter.reports.usage.tenants.read import TenantReader

# Half a day of 3,000 GPUs took 6 s (Prometheus 2.42, samples every 30 s, on two cores).
CHUNK_S, SERIES_S, DAY_S = 0.5, 0.004, 86400.0
REST_MAX_S = 5.0  # the longest pause between two queries


class Wish(NamedTuple):
    """A reader's request.

    - `since_s`: length of the period in seconds. `until`: its end (Unix seconds).
    - `floor`: engine activity that counts as zero, one of model.FLOORS.
    - `prices`: pairs of model and price of a GPU-hour. The model "" means all others.
    - `alerts`: the settings from which the site's rules were generated.
    - `rest`: pause after each query, as a share of the query's time. `kept`: stores the answers, None to store none.
    """

    since_s: float
    until: float
    matcher: str
    floor: float
    prices: Sequence[tuple[str, float]]
    currency: str
    alerts: Alerts
    rest: float
    has_trend: bool
    kept: Store | None

    @property
    def period(self) -> WindowSpan:
        """The period in full hours, at least one."""
        end = self.until // WINDOW_S * WINDOW_S
        return WindowSpan(end - max(WINDOW_S, round(self.since_s / WINDOW_S) * WINDOW_S), end, WINDOW_S)


class Progress:
    """Shows on standard error the progress of the report, and its remaining time."""

    def __init__(self, command: str = "report", slower: float = 1.0, clock: Clock = SYSTEM_CLOCK) -> None:
        """`slower`: how many times as long as a report the command takes, for the same period."""
        self._name, self._slower = f"gpu-exporter {command}", slower
        self._clock, self._began = clock, clock.monotonic()
        self._chunks = self._done = self._queries = 0
        self._is_live = sys.stderr.isatty()

    def begin(self, days: Collection[WindowSpan], series: int, new: float) -> None:
        """Prints the amount of work before the first large query. `days`: the parts of the period. `series`: number of
        utilization series. `new`: those that begin in an hour.
        """
        self._chunks, self._done, self._began = len(days), 0, self._clock.monotonic()
        load = load_of(series, new) * sum(day.end - day.start for day in days) / DAY_S
        about = describe_duration(round(self._slower * (CHUNK_S * len(days) + SERIES_S * load)))
        more = f" and {round(new):,} new series an hour" if round(new) else ""
        print(  # noqa: T201
            f"{self._name}: reading {len(days)} days or parts of days, up to {series:,} series each{more}; "
            f"expect {about}",
            file=sys.stderr,
        )

    def asked(self, name: str, seconds: float) -> None:
        """Counts a query."""
        self._queries += 1

    def end_chunk(self) -> None:
        """Shows the remaining time at the present speed. Without a terminal, only after the first and last chunk."""
        self._done += 1
        took = self._clock.monotonic() - self._began
        left = took / self._done * (self._chunks - self._done)
        text = f"{self._done} of {self._chunks} read, {self._queries} queries, {describe_duration(round(left))} left"
        if self._is_live:
            end = "\n" if self._done == self._chunks else ""
            print(f"\r\x1b[K{text}", end=end, file=sys.stderr, flush=True)  # noqa: T201
        elif self._done in (1, self._chunks):
            print(f"{self._name}: {text}", file=sys.stderr)  # noqa: T201


class ServerRest:
    """Pauses after each query, to leave time for other users of the server."""

    def __init__(self, ratio: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._ratio, self._clock, self._never = ratio, clock, threading.Event()

    def __call__(self, took_s: float) -> None:
        self._clock.wait(self._never, min(REST_MAX_S, self._ratio * took_s))


def run_report(
    address: Address,
    fetch: Fetch,
    wish: Wish,
    view: ReportView,
    form: str,
    output: Path | None = None,
    mail: Mail | None = None,
) -> int:
    """Prints, writes or mails the report. Returns the exit code: NO_DATA if there is no data."""
    span, progress = wish.period, Progress()
    history = History(address, fetch, wish.kept, progress, rest=ServerRest(wish.rest))

    def read() -> UsageReport:
        try:
            prices = read_prices(history, span.end, wish.prices, wish.currency, wish.matcher)
            site = find_site(history, wish.matcher, span)
            if site.prefers_own:
                report = TenantReader(address, wish.matcher, wish.alerts, fetch).read(span.end - span.start, span.end)
                if site.rest:
                    names = ", ".join(site.exporters)
                    report.left_out.append(
                        f"{site.rest:,} GPUs without gpu-exporter ({names} shows them): install it there"
                    )
                if wish.prices:
                    report.missing.append("the prices of --price: the money is from the recordings of the site")
            else:
                gatherer = Gatherer(history, wish.matcher, prices, wish.floor, wish.alerts.team_label, progress)
                report = gatherer.read(site, span, has_trend=wish.has_trend)
                report.missing += prices.missing(report)
        except AnswerError as exc:
            skipped = history.describe_skipped()
            raise AnswerError(f"{exc}{skipped and f' (left out: {skipped})'}") from exc
        report.left_out += filter(None, [history.describe_skipped()])
        return report

    return finish("report", lambda: deliver(read(), view, form, output, mail))


def run_digest(
    reader: TenantReader,
    since_s: float,
    view: ReportView,
    form: str,
    output: Path | None = None,
    mail: Mail | None = None,
) -> int:
    """Prints, writes or mails the digest of the last `since_s` seconds. Returns the exit code: NO_DATA if there is no
    data.
    """
    return finish("digest", lambda: deliver(reader.read(since_s, SYSTEM_CLOCK.wall()), view, form, output, mail))


def finish(command: str, work: Callable[[], None]) -> int:
    """Runs the work of a command. Prints the reason if it fails. Returns the exit code: NO_DATA if there is no data."""
    try:
        work()
    except AnswerError as exc:
        code, why = Exit.NO_DATA, str(exc)
    except OSError as exc:  # of the kept answers, of the file or of the mail
        code, why = Exit.USAGE, str(exc)
    else:
        return Exit.DONE
    print(f"gpu-exporter {command}: {one_line(why)}", file=sys.stderr)  # noqa: T201
    return code
