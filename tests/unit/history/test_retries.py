"""Refusals of a server of history: some pass after a pause, some need a smaller query, some are final."""

from __future__ import annotations

import json
import operator
import re
import socket
from collections.abc import Callable, Iterable, Mapping

import pytest
from tests.testbed.peers import Peer, plain, serve

from gpu_exporter.common.address import Address, parse_address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import FetchError, fetch_text
from gpu_exporter.reports.history.asking import History, WindowSpan

HOUR = 3600.0
SPAN = WindowSpan(0.0, 4 * HOUR, HOUR)
TOO_LONG = "the query time range exceeds the limit (query length: 24h0m0s, limit: 12h0m0s)"
BREAKS_OFF = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"
HANGS_UP = b""


def page(at: Iterable[float] = (HOUR,), value: float = 1.0) -> str:
    row = {"metric": {"UUID": "GPU-1"}, "values": [[time, str(value)] for time in at]}
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": [row]}})


def refusal(status: str, reason: str = "", *headers: str) -> bytes:
    return plain(status, json.dumps({"status": "error", "error": reason}) if reason else "upstream", *headers)


def ask(*answers: bytes) -> tuple[float, int]:
    """Asks a server that gives these answers first, and right ones after. Returns seconds of pauses, and requests."""
    left, clock = list(answers), ManualClock()

    def answer(_path: str) -> bytes:
        return left.pop(0) if left else plain("200 OK", page())

    with serve(Peer(raw=answer)) as peer:
        history = History(parse_address(f"http://{peer.place}"), fetch_text, clock=clock)
        began = clock.monotonic()
        assert [series.values for series in history.ask_windows("held", "up", SPAN)][-1] == {0.0: 1.0}
        return clock.monotonic() - began, sum("query_range" in each for each in peer.seen)


RIGHT = plain("200 OK", page())


@pytest.mark.parametrize(
    ("answers", "pauses"),
    [
        ([refusal("503 Unavailable")], 1.0),
        ([refusal("502 Bad Gateway"), refusal("504 Timeout")], 5.0),
        ([refusal("500 Internal", "boom")] * 3, 20.0),
        ([refusal("429 Too Many Requests", "too many outstanding requests", "Retry-After: 7")], 7.0),
        ([refusal("429 Too Many Requests", "", "Retry-After: 86400")], 60.0),
        ([refusal("503 Unavailable", "", "Retry-After: Wed, 21 Oct 2026 07:28:00 GMT")], 1.0),
        ([refusal("503 Unavailable", "", "Retry-After: -5")], 1.0),
        ([refusal("503 Unavailable", "", "Retry-After: ²")], 1.0),
    ],
    ids=["503", "502-504", "500", "429", "tomorrow", "date", "negative", "odd"],
)
def test_a_query_waits_for_a_busy_server_and_is_sent_again(answers: list[bytes], pauses: float) -> None:
    assert ask(*answers) == (pauses, len(answers) + 1)


@pytest.mark.parametrize(
    "broken",
    [
        BREAKS_OFF,
        HANGS_UP,
        plain("200 OK", '{"status":"success","data":{"resultType":"matrix","result":[{"metr'),
        plain("200 OK", "<html>login"),
        plain("200 OK", page().replace("success", 'success", "isPartial": true, "x": "')),
    ],
    ids=["breaks off", "hangs up", "torn", "page", "partial"],
)
def test_an_answer_that_breaks_is_asked_for_again_after_the_first(broken: bytes) -> None:
    clock, left = ManualClock(), [RIGHT, broken, broken]
    with serve(Peer(raw=lambda _path: left.pop(0) if left else RIGHT)) as peer:
        history = History(parse_address(f"http://{peer.place}"), fetch_text, clock=clock)
        for _ in range(2):
            assert next(history.ask_windows("held", "up", SPAN)).values == {0.0: 1.0}
    assert clock.monotonic() == ManualClock().monotonic() + 5.0
    with serve(Peer(raw=lambda _path: broken)) as peer:
        history = History(parse_address(f"http://{peer.place}"), fetch_text, clock=clock)
        with pytest.raises(AnswerError):
            list(history.ask_windows("held", "up", SPAN))
    assert clock.monotonic() == ManualClock().monotonic() + 5.0, "at the first query it is no PromQL API"


def test_without_a_server_the_first_query_fails_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
    clock = ManualClock()
    with pytest.raises(AnswerError, match="refused"):
        History(parse_address(f"http://{place}"), fetch_text, clock=clock).ask_now("prices", "up", 10.0)
    assert clock.monotonic() == ManualClock().monotonic()


def test_a_server_that_stays_away_ends_the_report_after_three_more_tries() -> None:
    clock = ManualClock()
    with serve(Peer(raw=lambda _path: RIGHT)) as peer:
        history = History(parse_address(f"http://{peer.place}"), fetch_text, clock=clock)
        list(history.ask_windows("held", "up", SPAN))
    with pytest.raises(AnswerError, match="refused.*also after 3 more tries"):
        list(history.ask_windows("held", "up", SPAN))
    assert clock.monotonic() == ManualClock().monotonic() + 20.0


@pytest.mark.parametrize("status", ["400 Bad Request", "401 Unauthorized", "403 Forbidden", "404 Not Found"])
def test_a_refusal_that_does_not_pass_ends_the_report_at_once(status: str) -> None:
    clock, seen = ManualClock(), Peer(raw=lambda _path: refusal(status, "parse error"))
    with serve(seen) as peer, pytest.raises(AnswerError, match=status[:3]):
        list(History(parse_address(f"http://{peer.place}"), fetch_text, clock=clock).ask_windows("held", "up", SPAN))
    assert (clock.monotonic(), sum("query" in each for each in seen.seen)) == (ManualClock().monotonic(), 1)


def test_a_server_that_stays_busy_gets_smaller_queries() -> None:
    pauses, requests = ask(*[refusal("503 Unavailable")] * 4)
    assert (pauses, requests) == (20.0, 4 + 2)


@pytest.mark.parametrize(
    "answer",
    [
        refusal("422 Unprocessable", TOO_LONG),
        refusal("503 Unavailable", "query timed out in expression evaluation"),
        refusal("413 Too Large"),
    ],
)
def test_a_query_that_is_too_large_becomes_two_without_a_pause(answer: bytes) -> None:
    assert ask(answer) == (0.0, 3)


def test_a_query_that_a_proxy_ends_after_a_long_time_is_not_sent_again() -> None:
    clock, ends = ManualClock(), []

    def fetch(_address: Address, form: Mapping[str, str] | None, _most: int, _within: float) -> str:
        ends.append((form or {})["end"])
        if len(ends) == 1:
            clock.advance(60.0)
            raise FetchError("HTTP status 504", 504)
        return page()

    rested: list[float] = []
    history = History(parse_address("http://x"), fetch, clock=clock, rest=rested.append)
    list(history.ask_windows("held", "up", SPAN))
    assert ends == ["14400", "7200", "14400"]
    assert rested == [60.0, 0.0, 0.0], "the server rests after a query that was too slow, too"


def limited(longest: float, value_of: Callable[[float, float], float]) -> tuple[History, list[float]]:
    """A server that refuses selectors over more than `longest` seconds. `value_of`: from start and end of a window."""
    asked: list[float] = []

    def fetch(_address: Address, form: Mapping[str, str] | None, _most: int, _within: float) -> str:
        given = form or {}
        length = float(re.findall(r"\[(\d+)s\]", given["query"])[0])
        asked.append(length)
        assert float(given["step"]) == length
        if length > longest:
            raise FetchError(f"HTTP status 422: {TOO_LONG}", 422)
        return page([float(given["end"])], value_of(float(given["end"]) - length, float(given["end"])))

    return History(parse_address("http://x"), fetch, clock=ManualClock()), asked


def query(seconds: float) -> str:
    return f"max_over_time(memory[{seconds:.0f}s])"


@pytest.mark.parametrize("hours", [1, 5, 23, 24])
@pytest.mark.parametrize("longest", [HOUR, 3 * HOUR, 12 * HOUR, 24 * HOUR])
def test_a_query_about_a_whole_day_shrinks_and_its_values_are_folded(hours: int, longest: float) -> None:
    day = WindowSpan(10 * HOUR, (10 + hours) * HOUR, HOUR)
    labels = (("UUID", "GPU-1"),)
    history, asked = limited(longest, lambda _start, end: -abs(end - 13 * HOUR))
    (peak,) = history.ask_whole("memory", query, day).values()
    assert peak <= 0.0 and asked[0] == hours * HOUR
    history, asked = limited(longest, lambda start, end: end - start)
    assert history.ask_whole("offers", query, day, operator.add) == {labels: hours * HOUR}, "each second once"
    before = len(asked)
    assert history.ask_whole("offers", query, day, operator.add) == {labels: hours * HOUR}
    assert max(asked[before:]) <= longest, "the next day begins with what the server accepted"


def test_a_query_about_an_hour_that_is_still_too_large_names_the_limit_and_the_remedy() -> None:
    history, _ = limited(HOUR / 2, lambda _start, _end: 1.0)
    with pytest.raises(AnswerError, match=r"exceeds the limit.*--source.matcher.*memory\[3600s\]"):
        history.ask_whole("memory", query, WindowSpan(0.0, 24 * HOUR, HOUR))


def test_the_names_of_a_long_period_come_from_smaller_queries_too() -> None:
    def fetch(_address: Address, form: Mapping[str, str] | None, _most: int, _within: float) -> str:
        given = {name: float(text) for name, text in (form or {}).items() if name in ("start", "end", "step")}
        if given["end"] - given["start"] > 2 * HOUR:
            raise FetchError(f"HTTP status 422: {TOO_LONG}", 422)
        times = range(int(given["start"]), int(given["end"]) + 1, int(given["step"]))
        row = {"metric": {"__name__": "up"}, "values": [[at, str(at)] for at in times]}
        return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": [row]}})

    history = History(parse_address("http://x"), fetch, clock=ManualClock())
    assert history.ask_names("names", "up", WindowSpan(0.0, 8 * HOUR, HOUR)) == {"up": (8, 8 * HOUR)}


def test_the_reasons_of_many_odd_series_are_few() -> None:
    rows = [{"metric": {f"label{at}": "x" * 9_000}, "values": []} for at in range(50)]
    text = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": rows}})
    history = History(parse_address("http://x"), lambda *_: text, clock=ManualClock())
    assert history.describe_skipped() == ""
    for _ in range(2):  # each is counted once
        assert list(history.ask_windows("held", "up", SPAN)) == []
    text = history.describe_skipped()
    assert len(text) < 300 and text.startswith(
        "50 series that cannot be read: its label label0 has more than 8,000 characters; "
    )
    assert text.endswith("; 47 more reasons")
    assert text.count("; ") == 3
