"""Queries days and weeks from a PromQL API, in chunks that the server accepts.

Each value covers one window: the time before the value. Windows do not overlap, so no sample counts twice. If the
server refuses a chunk as too large, too long or too slow, the chunk is halved. A query that fails for a reason that may
pass is retried. All queries only read, and at most two run at the same time.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import MIB, FetchError, LimitError
from gpu_exporter.common.plain import REASON_MAX, one_line
from gpu_exporter.common.promql.client import Fetch
from gpu_exporter.common.threads import NoThread, run_ahead

ANSWER_S = 120.0  # of one query; a site's own limit is often 120 s (query.timeout of Prometheus) or less
ANSWER_BYTES = 16 * MIB  # a day of 3,000 GPUs in hours has 2 to 5; a longer answer takes ten times its size to parse
ROWS_MAX = 100_000  # series of one answer
WORKERS = 2  # one parses its answer while the server works for the other
NUMBERS_MAX = 10_000  # texts of numbers that are remembered while an answer is parsed
POINTS_MAX = 11_000  # of one series, in every Prometheus (web/api/v1: maxPoints)
TEXT_MAX = 8_000  # characters of one label; longer texts are not names
NAME_MAX = 60  # characters of a label's name in the reason why its series is skipped
REASONS_MAX = 3  # reasons in one line of a report
ODD = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)  # of parsing foreign JSON
# Refusals that a smaller chunk avoids: Prometheus (too many samples, timed out), Mimir (the query time range exceeds
# the limit, too many chunks, max-estimated...), Thanos (exceeded series or sample limits), VictoriaMetrics
# (-search.maxSamplesPerQuery, -search.maxUniqueTimeseries, maxMemoryPerQuery), and proxies in front of them.
TOO_LARGE = re.compile(
    "too many|timed? ?out|timeout|exceed|limit|deadline|too long|too large|maxSamples|not enough memory", re.IGNORECASE
)
SLOW = (408, 413, 429, 502, 503, 504)
PASSING = (429, 500, 502, 503, 504)  # of a server or a proxy that is busy or restarts
RETRIES_S = (1.0, 4.0, 15.0)  # pauses before the next tries of a query
RETRY_AFTER_MAX_S = 60.0  # the longest pause that a server may ask for
WORKED_S = 20.0  # a query that fails after such a time is too slow: sent again, it would take the same time
# Thanos: raw samples only, and an error in place of a partial answer. Other servers ignore these parameters.
FORM = {"max_source_resolution": "0s", "partial_response": "false"}

# How Prometheus writes a matrix, and what is between the labels and the values of a series and before the next series.
HEAD, TAIL = '{"status":"success","data":{"resultType":"matrix","result":[{"metric":{', "]]}]}}"
MIDDLE, NEXT = '},"values":[[', ']]},{"metric":{'

Labels: TypeAlias = tuple[tuple[str, str], ...]  # sorted, without __name__
Answers: TypeAlias = dict[Labels, Mapping[float, float]]  # values by the start of their window (Unix seconds)

T = TypeVar("T")
R = TypeVar("R")


class WindowSpan(NamedTuple):
    """Consecutive windows of `window` seconds, from `start` to `end` (Unix seconds)."""

    start: float
    end: float
    window: float

    @property
    def windows(self) -> int:
        return round((self.end - self.start) / self.window)


class WindowSeries(NamedTuple):
    """The values of one series, by start of the window (Unix seconds). `name`: name of the metric, often ""."""

    labels: Labels
    values: Mapping[float, float]
    name: str = ""


class Store(Protocol):
    """Keeps answers, so that an interrupted report can continue."""

    def get(self, key: str) -> str | None: ...

    def put(self, key: str, answer: str) -> None: ...


class QueryWatch(Protocol):
    """Shows the progress of the queries."""

    def asked(self, name: str, seconds: float) -> None: ...


class History:
    """Asks one PromQL API. Every method may raise AnswerError."""

    def __init__(
        self,
        address: Address,
        fetch: Fetch,
        store: Store | None = None,
        progress: QueryWatch | None = None,
        clock: Clock = SYSTEM_CLOCK,
        rest: Callable[[float], object] | None = None,
    ) -> None:
        """`rest`: called after each query with its duration (seconds). It may wait, so that the server has time for
        other users.
        """
        self._address, self._fetch, self._store = address, fetch, store
        self._progress, self._clock, self._rest = progress, clock, rest
        self._room = threading.BoundedSemaphore(WORKERS)  # for queries that run
        self._skipped: dict[int, str] = {}  # reasons by series
        self.queries = 0
        self._same: dict[Labels | str, Labels] = {}  # answers about the same series share its labels
        self.smallest: dict[str, int] = {}  # windows that the server accepted at once, by name of a query

    @property
    def address(self) -> Address:
        return self._address

    @property
    def skipped(self) -> int:
        """The number of series that could not be parsed, and are missing in the answers."""
        return len(self._skipped)

    def describe_skipped(self) -> str:
        """Returns a text about the series that could not be parsed, with the reasons. "" if there are none."""
        if not self._skipped:
            return ""
        reasons = sorted(set(self._skipped.values()))
        more = f"; {len(reasons) - REASONS_MAX:,} more reasons" if len(reasons) > REASONS_MAX else ""
        return f"{self.skipped:,} series that cannot be read: {'; '.join(reasons[:REASONS_MAX])}{more}"

    def ask_windows(self, name: str, expression: str, span: WindowSpan) -> Iterator[WindowSeries]:
        """Yields one value per series and window. A series may come in several parts, if the chunk was too large."""
        yield from self._ask_parts(name, span, lambda part: (expression, part))

    def ask_whole(
        self,
        name: str,
        expression_of: Callable[[float], str],
        span: WindowSpan,
        fold: Callable[[float, float], float] = max,
    ) -> dict[Labels, float]:
        """Returns one value per series for the whole span.

        Asks a single window as long as the span. If the server refuses this query as too large, asks shorter windows,
        of at least `span.window`.

        `expression_of`: the expression over a window of this many seconds. `fold`: the value of two neighbouring
        windows from their values.
        """

        def widen(part: WindowSpan) -> tuple[str, WindowSpan]:
            length = part.end - part.start
            return expression_of(length), part._replace(window=length)

        found: dict[Labels, float] = {}
        for series in self._ask_parts(name, span, widen):
            for value in series.values.values():
                before = found.get(series.labels)
                found[series.labels] = value if before is None else fold(before, value)
        return found

    def _ask_parts(
        self, name: str, span: WindowSpan, query_of: Callable[[WindowSpan], tuple[str, WindowSpan]]
    ) -> Iterator[WindowSeries]:
        """Asks the query of each part of the span. If the server refuses it as too large, asks shorter parts."""
        kind, pending = name.split()[0], [span]
        while pending:
            part = pending.pop()
            most = self.smallest.get(kind, POINTS_MAX)
            if part.windows > most:
                pending += list(_cut(part, most))[::-1]
                continue
            expression, asked = query_of(part)
            try:
                answer = self._get(name, expression, asked)
            except TooLarge as exc:
                if part.windows < 2:
                    raise _advise(exc, f"for less than {part.window:.0f} s at once", expression) from exc
                self.smallest[kind] = part.windows // 2
                pending.append(part)
                continue
            yield from answer

    def ask_table(self, name: str, expression: str, span: WindowSpan) -> Answers:
        """Returns the answer to one query, by series."""
        table: Answers = {}
        for labels, values, _ in self.ask_windows(name, expression, span):
            before = table.setdefault(labels, values)
            if before is not values:
                table[labels] = {**before, **values}
        return table

    def ask_tables(self, queries: Mapping[str, str], span: WindowSpan) -> dict[str, Answers]:
        """Returns the answers to several queries, by their name and by series. Asks WORKERS of them at a time."""

        def ask(item: tuple[str, str]) -> tuple[str, Answers]:
            return item[0], self.ask_table(*item, span)

        return dict(self.ask_ahead(ask, queries.items()))

    def ask_ahead(
        self, ask: Callable[[T], R], items: Iterable[T], workers: int = WORKERS, ahead: int = 2
    ) -> Iterator[R]:
        """Yields the result of `ask`, which may use this history, for each item. Calls it from so many threads: one
        keeps the order. Each stays at most `ahead` results ahead.
        """
        try:
            yield from run_ahead(ask, items, workers, "report", ahead=ahead)
        except NoThread as exc:
            raise AnswerError(str(exc)) from exc

    def end_chunk(self) -> None:
        """Forgets the labels of this chunk, because most labels of the next chunk are new."""
        self._same.clear()

    def ask_names(self, name: str, expression: str, span: WindowSpan) -> dict[str, tuple[int, float]]:
        """Returns, for each metric name, the number of windows with a value, and the largest value.

        `expression`: groups by __name__.
        """
        found: dict[str, tuple[int, float]] = {}
        for series in self.ask_windows(name, expression, span):
            if series.values:
                windows, most = found.get(series.name, (0, -math.inf))
                found[series.name] = windows + len(series.values), max(most, *series.values.values())
        return found

    def ask_now(self, name: str, expression: str, at: float) -> list[tuple[Labels, float]]:
        """Returns the value of each series at one time (Unix seconds)."""
        try:
            rows = self._get(name, expression, WindowSpan(at - 1.0, at, 1.0))
        except TooLarge as exc:
            raise _advise(exc, "for less than one moment", expression) from exc
        return [(row.labels, value) for row in rows for value in row.values.values()]

    def _get(self, name: str, expression: str, span: WindowSpan) -> list[WindowSeries]:
        form = {
            "query": expression,
            "start": f"{span.start + span.window:.0f}",
            "end": f"{span.end:.0f}",
            "step": f"{span.window:.0f}",
        }
        key = json.dumps([str(self._address), form], sort_keys=True)
        took, series = 0.0, self._get_kept(key, expression, span)
        if series is None:
            began = self._clock.monotonic()
            text, series = self._ask(form, span)
            took = self._clock.monotonic() - began
            if self._store is not None:
                self._store.put(key, text)
        if self._progress is not None:
            self._progress.asked(name, took)
        return series

    def _get_kept(self, key: str, expression: str, span: WindowSpan) -> list[WindowSeries] | None:
        """Returns the kept answer, None if it is missing or damaged."""
        text = self._store.get(key) if self._store is not None else None
        try:
            return None if text is None else parse_matrix(text, expression, span, self._skipped, self._same)
        except AnswerError:
            return None

    def _ask(self, form: Mapping[str, str], span: WindowSpan) -> tuple[str, list[WindowSeries]]:
        """The answer of the server. Sends the query again if it fails for a reason that may pass.

        Raises AnswerError, TooLarge if a smaller query may succeed.
        """
        page = self._address.page("/api/v1/query_range")
        for pause in (*RETRIES_S, None):
            began = self._clock.monotonic()
            try:
                with self._room:
                    text = self._fetch(page, {**form, **FORM}, ANSWER_BYTES, ANSWER_S)
                    self._leave_alone(self._clock.monotonic() - began)
                series = parse_matrix(text, form["query"], span, self._skipped, self._same)
            except AnswerError as exc:
                took = self._clock.monotonic() - began
                if pause is not None and self._may_pass(exc, took):
                    asked = exc.retry_after_s if isinstance(exc, FetchError) else 0
                    self._clock.wait(threading.Event(), max(pause, min(RETRY_AFTER_MAX_S, asked)))
                    continue
                if _is_too_large(exc):
                    self._leave_alone(took)
                    raise TooLarge(str(exc)) from exc
                if pause is None:
                    raise AnswerError(f"{exc} (also after {len(RETRIES_S)} more tries)") from exc
                raise
            self.queries += 1
            return text, series
        raise AssertionError("the last try returns or raises")

    def _leave_alone(self, took: float) -> None:
        if self._rest is not None:
            self._rest(took)

    def _may_pass(self, exc: AnswerError, took: float) -> bool:
        """Returns whether the same query may succeed a little later. Before the server's first answer, only the status
        codes of a busy server count: other failures then show a wrong address.
        """
        status = exc.status if isinstance(exc, FetchError) else None
        if status is None:
            return self.queries > 0 and isinstance(exc, (FetchError, Damaged)) and not isinstance(exc, LimitError)
        if status == 429:  # too many queries, or too many at once: not a property of this query
            return True
        return status in PASSING and took < WORKED_S and not TOO_LARGE.search(str(exc))


class Damaged(AnswerError):
    """The answer is incomplete, or not in the format of a PromQL API."""


class TooLarge(AnswerError):
    """The server refuses this query, but may accept a smaller one."""


def _advise(exc: TooLarge, least: str, expression: str) -> AnswerError:
    """Returns the error for a query that cannot be smaller."""
    return AnswerError(
        f"{exc}. The report cannot ask {least}: raise the limits of the server, or report a part of the site with "
        f"--source.matcher. The query was {expression}"
    )


def over(function: str, series: str, seconds: float) -> str:
    """Returns PromQL: a function of the samples of each window of this length."""
    # A window of exactly an hour has its first moment too in Prometheus 2, so that moment would count twice.
    return f"{function}_over_time({series}[{seconds * 1000 - 1:.0f}ms])"


def _is_too_large(exc: AnswerError) -> bool:
    if isinstance(exc, (TooLarge, LimitError)):
        return True
    if not isinstance(exc, FetchError) or exc.status is None:
        return False
    return exc.status in SLOW or TOO_LARGE.search(str(exc)) is not None


def _cut(span: WindowSpan, most: int) -> Iterator[WindowSpan]:
    """Cuts a span into parts of at most `most` windows."""
    start = span.start
    while start < span.end:
        end = min(span.end, start + most * span.window)
        yield span._replace(start=start, end=end)
        start = end


def parse_matrix(
    text: str,
    query: str,
    span: WindowSpan,
    skipped: dict[int, str] | None = None,
    same: dict[Labels | str, Labels] | None = None,
) -> list[WindowSeries]:
    """Parses the answer of /api/v1/query_range. Skips a series that cannot be read, and writes its reason to `skipped`,
    by a hash of its labels. `same`: labels of earlier answers, by the labels as the server orders them, also as text.
    Series with equal values share them.

    Raises AnswerError with a text that names the query, also its kinds TooLarge and Damaged.
    """
    same = {} if same is None else same
    if (plain := _parse_plain(text, span, same)) is not None:
        return plain
    try:
        answer: Any = json.loads(text)
        if answer["status"] != "success":
            reason = one_line(str(answer.get("error", "no reason given")), REASON_MAX)
            kind = TooLarge if TOO_LARGE.search(reason) else AnswerError
            raise kind(f"query failed: {reason}: {query}")
        if answer["data"]["resultType"] != "matrix":
            raise AnswerError(f"the source returned no matrix for the query: {query}")
        rows = answer["data"]["result"]
        if len(rows) > ROWS_MAX:
            raise TooLarge(f"the answer has more than {ROWS_MAX} series: {query}")
        series = []
        starts: dict[float, float] = {}
        for row in rows:
            try:
                labels = _share(tuple(item for item in row["metric"].items() if item[0] != "__name__"), same)
                values = _values(row["values"], span, starts)
            except ODD as exc:
                if skipped is not None:
                    _skip(row, exc, skipped)
                continue
            series.append(WindowSeries(labels, values, str(row["metric"].get("__name__", ""))))
    except ODD as exc:
        raise Damaged(f"not an answer of a PromQL API ({type(exc).__name__}): {query}") from exc
    if answer.get("isPartial") or _is_partial(answer.get("warnings")):
        raise Damaged(f"the answer is partial, so it is not used: {query}")
    return series


def _parse_plain(text: str, span: WindowSpan, same: dict[Labels | str, Labels]) -> list[WindowSeries] | None:
    """Parses an answer as Prometheus writes it, without objects for its JSON; None if anything in it is unusual.

    A quote within a JSON string has a backslash before it, so no string contains NEXT or MIDDLE.
    """
    if not (text.startswith(HEAD) and text.endswith(TAIL)):
        return None
    series, starts, numbers = [], dict[str, float](), dict[str, float]()
    shared: dict[str, dict[float, float]] = {}
    try:
        for row in text[len(HEAD) : -len(TAIL)].split(NEXT):
            given, _, pairs = row.partition(MIDDLE)
            labels, values = same.get(given), shared.get(pairs)
            if labels is None:
                metric = json.loads(f"{{{given}}}")
                if "__name__" in metric:
                    return None
                labels = same[given] = _share(tuple(metric.items()), same)
            if values is None:
                values = shared[pairs] = _split_values(pairs, span, starts, numbers)
            series.append(WindowSeries(labels, values))
    except ODD:
        return None
    return series if len(series) <= ROWS_MAX else None


def _split_values(
    pairs: str, span: WindowSpan, starts: dict[str, float], numbers: dict[str, float]
) -> dict[float, float]:
    """As _values(), of the JSON of a list without its outer brackets. `starts`, `numbers`: by the text before a value,
    and of a value. Raises one of ODD for any other text.
    """
    pieces = f"],[{pairs}".split('"')
    before, texts, end = pieces[:-1:2], pieces[1::2], pieces[-1]
    if end or not texts:
        raise ValueError
    try:
        values = [*map(numbers.__getitem__, texts)]
    except KeyError:
        values = [*map(float, texts)]
        if not pairs.isprintable():  # float() accepts spaces that JSON does not
            raise
        if len(numbers) < NUMBERS_MAX:
            numbers.update(zip(texts, values, strict=True))
    for piece in before if not starts.keys() >= {*before} else ():
        if not (piece.startswith("],[") and piece.endswith(",")):
            raise ValueError
        starts[piece] = _start(json.loads(piece[3:-1]), span)
    found = [*zip(map(starts.__getitem__, before), values, strict=True)]
    return dict(found if math.isfinite(sum(values)) else [each for each in found if math.isfinite(each[1])])


def _share(given: Labels, same: dict[Labels | str, Labels]) -> Labels:
    labels = same.get(given)
    if labels is None:
        labels = same[given] = _check_labels(given)
    return labels


def _skip(row: Any, exc: Exception, skipped: dict[int, str]) -> None:
    metric = row.get("metric") if isinstance(row, dict) else None
    texts = sorted((name, text) for name, text in metric.items() if isinstance(text, str)) if metric else []
    long = next((name for name, text in texts if len(text) > TEXT_MAX), None)
    skipped[hash(tuple(each for each in texts if each[0] != "__name__"))] = (
        f"not a series of a PromQL API ({type(exc).__name__})"
        if long is None
        else f"its label {one_line(long, NAME_MAX)} has more than {TEXT_MAX:,} characters"
    )


def _is_partial(warnings: Any) -> bool:
    """Returns whether a warning of the server shows that data is missing or wrong. Notes on the style of a query are
    harmless. Prometheus 3 puts such notes into `infos`, but other servers put them into the warnings. A "PromQL
    warning" is not harmless: it may report that samples of a wrong type were dropped.
    """
    if not warnings:
        return False
    return not isinstance(warnings, list) or any(not str(each).startswith("PromQL info:") for each in warnings)


def _check_labels(given: Labels) -> Labels:
    texts = [*chain.from_iterable(given)]
    if {*map(type, texts)} - {str} or max(map(len, texts), default=0) > TEXT_MAX:
        raise TypeError
    "".join(texts).encode()  # ValueError: half a surrogate pair, which no text in UTF-8 has
    labels = tuple(sorted(given))
    return given if labels == given else labels


def _values(pairs: Sequence[Any], span: WindowSpan, starts: dict[float, float]) -> dict[float, float]:
    """The finite values by the start of their windows. NaN and infinity are no evidence. `starts`: by the time of the
    value; all series of an answer share them.
    """
    found: dict[float, float] = {}
    # A million of them: float() accepts more than the numbers of JSON, and is ten times as fast.
    for at, text in pairs:
        start = starts.get(at)
        if start is None:
            start = starts[at] = _start(at, span)
        if type(text) is not str:
            raise TypeError
        value = float(text)
        if value - value == 0.0:  # false for NaN and the infinities
            found[start] = value
    return found


def _start(at: Any, span: WindowSpan) -> float:
    """Returns the start of the window whose value has this time."""
    if type(at) not in (int, float) or not span.start < at <= span.end:
        raise TypeError
    return float(at) - span.window
