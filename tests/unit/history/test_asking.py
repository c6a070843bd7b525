"""Queries over days: chunks that the server accepts, refusals, partial answers, hostile answers, kept answers."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.common.address import Address, parse_address
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import FetchError, LimitError
from gpu_exporter.reports.history.asking import (
    FORM,
    POINTS_MAX,
    ROWS_MAX,
    TEXT_MAX,
    WORKERS,
    Answers,
    History,
    TooLarge,
    WindowSpan,
    parse_matrix,
)
from gpu_exporter.reports.history.kept import Folder

HOUR = 3600.0
DAY = WindowSpan(0.0, 24 * HOUR, HOUR)
ADDRESS = parse_address("http://127.0.0.1:9090")


def matrix(*series: Mapping[str, Any], **more: Any) -> str:
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": list(series)}, **more})


class Server:
    """Answers each step of a query with the hour at which its window begins. `most`: steps that it accepts at once."""

    def __init__(self, most: int = POINTS_MAX, refusal: Exception | str = "") -> None:
        self.most, self.refusal = most, refusal
        self.asked: list[Mapping[str, str]] = []
        self.fails_after = 10**9
        self.refused = 0

    def __call__(self, address: Address, form: Mapping[str, str] | None, most_bytes: int, within_s: float) -> str:
        assert form is not None
        if len(self.asked) >= self.fails_after:
            raise KeyboardInterrupt
        self.asked.append(form)
        start, end, step = (float(form[name]) for name in ("start", "end", "step"))
        steps = round((end - start) / step) + 1
        if steps > self.most:
            self.refused += 1
            if isinstance(self.refusal, Exception):
                raise self.refusal
            return self.refusal
        values = [[start + n * step, str((start + n * step - step) / HOUR)] for n in range(steps)]
        return matrix({"metric": {"gpu": "0"}, "values": values})


# As the servers write them. Status, and the error of the PromQL API.
REFUSALS = {
    # promql/engine.go
    "prometheus-samples": (422, "query processing would load too many samples into memory in query execution"),
    "prometheus-time": (503, "query timed out in expression evaluation"),
    # web/api/v1/api.go
    "prometheus-points": (
        400,
        "exceeded maximum resolution of 11,000 points per timeseries. Try decreasing the query resolution (?step=XX)",
    ),
    # pkg/util/globalerror, pkg/querier/stats
    "mimir-length": (
        422,
        "the query time range exceeds the limit (query length: 24h0m0s, limit: 12h0m0s) (err-mimir-max-query-length)",
    ),
    "mimir-chunks": (
        422,
        "the query exceeded the maximum number of chunks (limit: 2000000 chunks) (err-mimir-max-chunks-per-query)",
    ),
    "mimir-memory": (
        422,
        "the query exceeded the maximum allowed estimated amount of memory consumed by a single query (limit: 1 bytes)"
        " (err-mimir-max-estimated-memory-consumption-per-query)",
    ),
    # pkg/store
    "thanos-series": (422, "exceeded series limit: limit 1 violated (got 2)"),
    "thanos-chunks": (422, "preload chunks: exceeded samples limit: bytes limit exceeded while fetching chunks"),
    "thanos-time": (422, "expanding series: context deadline exceeded"),
    # app/vmselect
    "victoria-samples": (
        422,
        "cannot select more than -search.maxSamplesPerQuery=1000 samples; possible solutions: increase the "
        "-search.maxSamplesPerQuery; reduce time range for the query",
    ),
    "victoria-series": (
        422,
        "the number of matching timeseries exceeds 300000; either narrow down the search or increase -search.max*",
    ),
    "victoria-memory": (422, "not enough memory for processing 8 data points across 1 time series with 8 points"),
    "victoria-time": (422, "timeout exceeded during query execution: 30.000 seconds"),
}


def refused(status: int, text: str) -> FetchError:
    return FetchError(f"http://127.0.0.1:9090: HTTP status {status}{f': {text}' if text else ''}", status)


EXCEPTIONS: dict[str, Exception | str] = {name: refused(*each) for name, each in REFUSALS.items()}
EXCEPTIONS["slow"] = LimitError("http://127.0.0.1:9090: no complete answer within 120 s")
EXCEPTIONS["long"] = LimitError("http://127.0.0.1:9090: the answer is longer than 64 MiB")
EXCEPTIONS["in-the-answer"] = json.dumps({"status": "error", "error": "too many samples"})


@pytest.mark.parametrize("refusal", EXCEPTIONS.values(), ids=EXCEPTIONS)
@pytest.mark.parametrize("most", [23, 7, 1])
def test_a_chunk_that_is_too_large_is_halved(most: int, refusal: Exception | str) -> None:
    server = Server(most, refusal)
    history = History(ADDRESS, server)
    found = history.ask_tables({"count": "x"}, DAY)["count"]
    assert found == {(("gpu", "0"),): {hour * HOUR: float(hour) for hour in range(24)}}
    first = server.refused
    assert 0 < first <= 5
    history.ask_tables({"count": "y"}, DAY)  # the second one begins with a size that the server accepts
    assert server.refused == first
    assert all(form[name] == value for form in server.asked for name, value in FORM.items())


def test_names_and_single_moments_are_asked_in_parts_too() -> None:
    server = Server(7, refused(422, "too many samples"))
    assert History(ADDRESS, server).ask_names("exporters", "x", DAY) == {"": (24, 23.0)}
    assert History(ADDRESS, Server()).ask_now("prices", "x", DAY.end) == [((("gpu", "0"),), (DAY.end - 1.0) / HOUR)]


@pytest.mark.parametrize("refusal", EXCEPTIONS.values(), ids=EXCEPTIONS)
def test_one_window_that_is_too_large_is_a_clear_error(refusal: Exception | str) -> None:
    server = Server(0, refusal)
    with pytest.raises(AnswerError) as raised:
        History(ADDRESS, server).ask_tables({"count": "count_over_time(x[1h])"}, DAY)
    for part in (
        "The report cannot ask for less than 3600 s at once",
        "raise the limits of the server",
        "--source.matcher",
        "count_over_time(x[1h])",
    ):
        assert part in str(raised.value)
    assert len(server.asked) == 5  # 24, 12, 6, 3, 1
    with pytest.raises(AnswerError) as raised:
        History(ADDRESS, server).ask_now("prices", "last_over_time(x[1d])", DAY.end)
    for part in ("The report cannot ask for less than one moment: raise the limits", "last_over_time(x[1d])"):
        assert part in str(raised.value)
    assert len(server.asked) == 6


@pytest.mark.parametrize(
    "refusal",
    [
        refused(400, "invalid parameter query: 1:2: parse error: unexpected end of input"),
        refused(401, "no credentials"),
        refused(403, "access denied"),
        refused(404, ""),
        refused(422, "found duplicate series for the match group"),
        FetchError("http://127.0.0.1:9090: Connection refused"),
        FetchError("http://127.0.0.1:9090: timed out"),  # no server at all: the next query would wait as long
        json.dumps({"status": "error", "error": "bad_data"}),
        json.dumps({"status": "error"}),
    ],
)
def test_a_query_that_a_smaller_chunk_does_not_mend_is_asked_once(refusal: Exception | str) -> None:
    server = Server(0, refusal)
    with pytest.raises(AnswerError):
        History(ADDRESS, server).ask_tables({"count": "x"}, DAY)
    assert len(server.asked) == 1


def test_more_points_than_any_server_gives_are_asked_in_parts() -> None:
    server = Server()
    span = WindowSpan(0.0, 25_000 * 60.0, 60.0)
    found = History(ADDRESS, server).ask_tables({"x": "x"}, span)["x"]
    assert len(found[("gpu", "0"),]) == 25_000
    assert [round((float(form["end"]) - float(form["start"])) / 60) + 1 for form in server.asked] == [
        11_000,
        11_000,
        3_000,
    ]


def test_at_most_two_queries_run_at_the_same_time() -> None:
    server, both, more = Server(), threading.Barrier(WORKERS, timeout=30), threading.Barrier(WORKERS + 1, timeout=1)
    crowd = list[object]()

    def fetch(address: Address, form: Mapping[str, str] | None, most_bytes: int, within_s: float) -> str:
        both.wait()
        with contextlib.suppress(threading.BrokenBarrierError):
            more.wait()  # for one more, which does not come
            crowd.append(form)
        return server(address, form, most_bytes, within_s)

    history = History(ADDRESS, fetch)

    def ask(names: str) -> dict[str, Answers]:
        return history.ask_tables({name: name for name in names}, DAY)

    tables = history.ask_ahead(ask, ("ab", "cd"))  # both at the same time, each with two workers
    assert sorted(name for found in tables for name in found) == ["a", "b", "c", "d"]
    assert not crowd


PARTIAL = [
    {"isPartial": True},  # VictoriaMetrics: a vmstorage does not answer
    {"warnings": ["fetch series for [{}] Addr: 1.2.3.4:10901: rpc error: code = Unavailable"]},  # Thanos
    {"warnings": ["No StoreAPIs matched for this query"]},
    {"warnings": ['PromQL warning: encountered a mix of histograms and floats for metric name "x" (1:1)']},
    {"warnings": ["PromQL info: x", "remote_read: 500"]},
    {"warnings": {"a": 1}},
    {"warnings": "PromQL info: x"},
    {"warnings": [["PromQL info: x"]]},
]


@pytest.mark.parametrize("more", PARTIAL)
def test_a_partial_answer_is_refused(more: Mapping[str, Any]) -> None:
    with pytest.raises(AnswerError, match="partial"):
        parse_matrix(matrix({"metric": {}, "values": []}, **more), "x", DAY)


@pytest.mark.parametrize(
    "more",
    [
        {"warnings": []},
        {"warnings": None},
        {"isPartial": False},
        {
            "warnings": [
                'PromQL info: metric might not be a counter, name does not end in _total/_sum/_count/_bucket: "x"'
            ]
        },
        {"infos": ["PromQL info: x"]},
    ],
)
def test_a_note_on_the_style_of_a_query_is_harmless(more: Mapping[str, Any]) -> None:
    assert parse_matrix(matrix({"metric": {"a": "b"}, "values": [[HOUR, "1"]]}, **more), "x", DAY)[0].values == {
        0.0: 1.0
    }


def test_values_that_are_no_evidence_are_left_out() -> None:
    values = [
        [HOUR, "NaN"],
        [2 * HOUR, "+Inf"],
        [3 * HOUR, "-Inf"],
        [4 * HOUR, "1"],
        [4 * HOUR, "2"],
        [5 * HOUR, "1e999"],
    ]
    (series,) = parse_matrix(matrix({"metric": {"__name__": "x", "b": "2", "a": "1"}, "values": values}), "x", DAY)
    assert series.values == {3 * HOUR: 2.0}
    assert (series.labels, series.name) == ((("a", "1"), ("b", "2")), "x")


GOOD = {"metric": {"gpu": "0"}, "values": [[HOUR, "1"]]}
WRONG = [
    "",
    "{",
    "null",
    "[]",
    '"success"',
    "<html>",
    "[" * 100_000,
    "{}",
    '{"status": "success"}',
    '{"status": "success", "data": null}',
    '{"status": "success", "data": {"resultType": "vector", "result": []}}',
    '{"status": "success", "data": {"resultType": "matrix"}}',
    '{"status": "success", "data": {"resultType": "matrix", "result": 7}}',
    matrix(GOOD)[:-5],
]


ODD_SERIES = [
    {"metric": None},
    {"metric": []},
    {"metric": {"gpu": 0}},
    {"metric": {"gpu": None}},
    {"metric": {"gpu": "x" * (TEXT_MAX + 1)}},
    {"metric": {"gpu": "\ud800"}},
    {"metric": {"\udfff": "x"}},
    {"values": None},
    {"values": [[HOUR]]},
    {"values": [[HOUR, "1", "2"]]},
    {"values": [HOUR, "1"]},
    {"values": [[str(HOUR), "1"]]},
    {"values": [[True, "1"]]},
    {"values": [[HOUR, 1]]},
    {"values": [[HOUR, "x"]]},
    {"values": [[HOUR, "1\0"]]},
    {"values": [[0, "1"]]},  # before the first window
    {"values": [[25 * HOUR, "1"]]},
    {"values": [[10**400, "1"]]},
    {"values": [[float("nan"), "1"]]},
    {"values": [[float("inf"), "1"]]},
    {"values": [{"a": 1}]},
]
ODD_ROWS: list[Any] = [{**GOOD, **part} for part in ODD_SERIES]
ODD_ROWS += [None, 7, [], {}, {"metric": {"a": "b"}}, {"metric": {"n" * (TEXT_MAX + 1): "x"}, "values": []}]


@pytest.mark.parametrize("row", ODD_ROWS, ids=range(len(ODD_ROWS)))
def test_a_series_that_cannot_be_read_is_skipped_and_counted(row: Any) -> None:
    skipped: dict[int, str] = {}
    first, last = parse_matrix(matrix(GOOD, row, GOOD), "count(x)", DAY, skipped)
    assert first.values and last.values and len(skipped) == 1


PLAIN = [
    '[3600,"1"]',
    '[3600,"NaN"],[7200,"1"],[7200,"+Inf"]',
    '[3600,"1e400"],[3600.5,"-0"]',
    '[3600,"\n1"]',  # no JSON, though float() accepts it
    '[3600,"\\u0031"]',
    '[3600,"1"],[7200]',
    '[3600,"1"],[7200,"2',
    '[3600,"1"]},7200,"2"]',
    '[],[3600,"1"]',
    '[3600,"1","2"]',
    '["3600","1"]',
    '[999999,"1"]',
    "",
]


def outcome(text: str) -> tuple[Any, ...]:
    """What parse_matrix() makes of a text: series and reasons, or the error."""
    skipped: dict[int, str] = {}
    try:
        return *parse_matrix(text, "x", DAY, skipped), skipped
    except AnswerError as exc:
        return type(exc), str(exc)


@pytest.mark.parametrize("pairs", PLAIN)
@pytest.mark.parametrize(
    "label",
    ['"gpu":"1"', '"gpu":"},\\"values\\":[["', '"__name__":"x","gpu":"1"', '"gpu":1', '"\\u005f_name__":"x","gpu":"1"'],
)
def test_an_answer_as_prometheus_writes_it_is_read_like_any_other(label: str, pairs: str) -> None:
    """White space before JSON changes nothing in it."""
    row, good = f'"metric":{{{label}}},"values":[{pairs}]', '"metric":{"gpu":"0"},"values":[[3600,"1"],[7200,"3"]]'
    text = f'{{"status":"success","data":{{"resultType":"matrix","result":[{{{good}}},{{{row}}}]}}}}'
    assert outcome(text) == outcome(f" {text}")


def test_series_with_equal_texts_share_them() -> None:
    rows = [{"metric": {"gpu": gpu}, "values": [[HOUR, "1"], [2 * HOUR, "0.5"]]} for gpu in "01"]
    text = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": rows}}, separators=(",", ":"))
    same: dict[Any, Any] = {}
    one, two = parse_matrix(text, "x", DAY, None, same)
    assert one.values is two.values and one.values == {0.0: 1.0, HOUR: 0.5}
    assert parse_matrix(text, "x", DAY, None, same)[1].labels is two.labels


@pytest.mark.parametrize("text", WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_an_answer_of_no_promql_api_is_an_error_that_names_the_query(text: str) -> None:
    with pytest.raises(AnswerError, match=r"count\(x\)"):
        parse_matrix(text, "count(x)", DAY)


def test_an_answer_with_too_many_series_is_too_large() -> None:
    text = matrix(*[{"metric": {}, "values": []}] * (ROWS_MAX + 1))
    with pytest.raises(TooLarge, match="100000 series"):
        parse_matrix(text, "x", DAY)


def test_labels_of_any_text_are_kept_as_they_are() -> None:
    labels = {"nul": "a\0b", "line": "a\nb", "umlaut": "ä", "emoji": "🙂", "mark": '"\\'}
    (series,) = parse_matrix(matrix({"metric": labels, "values": []}), "x", DAY)
    assert dict(series.labels) == labels


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
NUMBERS = st.sampled_from([HOUR, 24 * HOUR, 0, -1, 10**400, "1", None]) | st.floats()
PAIRS = st.lists(NUMBERS | st.text(max_size=3), min_size=2, max_size=2)
SERIES = st.fixed_dictionaries(
    {
        "metric": st.dictionaries(st.text(max_size=3), st.text(max_size=3) | JSON, max_size=3) | JSON,
        "values": st.lists(PAIRS | JSON, max_size=4) | JSON,
    }
)
ANSWERS = st.fixed_dictionaries(
    {
        "status": st.sampled_from(["success", "error"]) | JSON,
        "data": st.fixed_dictionaries(
            {"resultType": st.sampled_from(["matrix", "vector"]), "result": st.lists(SERIES, max_size=3) | JSON}
        )
        | JSON,
    },
    optional={"warnings": JSON, "isPartial": JSON, "error": JSON},
)


@given(ANSWERS.map(json.dumps) | JSON.map(json.dumps) | st.text(), st.integers(0, 30))
def test_any_answer_is_a_table_or_an_error(text: str, torn: int) -> None:
    for part in (text, text[:-torn] if torn else text):
        try:
            found = parse_matrix(part, "x", DAY)
        except AnswerError:
            continue
        for series in found:
            assert all(type(text) is str and text.encode() is not None for pair in series.labels for text in pair)
            assert all(-HOUR < start < DAY.end and value - value == 0.0 for start, value in series.values.items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


def test_an_interrupted_report_asks_only_for_the_rest(folder: Path) -> None:
    queries = {f"count {n}": f"x{n}" for n in range(10)}

    def ask(server: Server) -> Mapping[str, Any]:
        history = History(ADDRESS, server, Folder(folder))
        return {name: history.ask_tables({name: query}, DAY) for name, query in queries.items()}

    first = Server()
    first.fails_after = 4

    def until(server: Server) -> None:
        history = History(ADDRESS, server, Folder(folder))
        for name, query in queries.items():
            list(history.ask_windows(name, query, DAY))

    with pytest.raises(KeyboardInterrupt):
        until(first)
    second, third = Server(), Server()
    found = ask(second)
    assert [form["query"] for form in second.asked] == [f"x{n}" for n in range(4, 10)]
    assert ask(third) == found
    assert third.asked == []


def test_kept_answers_are_of_one_server_one_query_and_one_time(folder: Path) -> None:
    server = Server()
    for address in ("http://127.0.0.1:1", "http://127.0.0.1:2"):
        for query in ("x", "y"):
            for span in (DAY, DAY._replace(end=23 * HOUR)):
                list(History(parse_address(address), server, Folder(folder)).ask_windows("n", query, span))
    assert len(server.asked) == 8 == len(list(folder.iterdir()))
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


def _damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _foreign(path: Path) -> None:
    path.write_bytes(b"\x00\xff not gzip")


def _text(path: Path) -> None:
    path.write_bytes(gzip.compress(b"\xff\xfe"))


def _other(path: Path) -> None:
    path.write_bytes(gzip.compress(b'{"status": "error", "error": "too many samples"}'))


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _huge(path: Path) -> None:
    with gzip.open(path, "wb", 1) as file:
        for _ in range(65):
            file.write(bytes(2**20))


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    "damage", [_damage, _foreign, _text, _other, _empty, _huge, _fifo, _loop], ids=lambda each: each.__name__
)
def test_a_damaged_answer_is_asked_again(damage: Callable[[Path], None], folder: Path) -> None:
    def ask(server: Server) -> Any:
        return History(ADDRESS, server, Folder(folder)).ask_tables({"x": "x"}, DAY)

    found = ask(Server())
    (path,) = folder.iterdir()
    damage(path)
    second, third = Server(), Server()
    assert ask(second) == found
    assert len(second.asked) == 1
    assert ask(third) == found
    assert third.asked == []  # it was replaced


def test_a_folder_in_the_place_of_an_answer_is_an_os_error(folder: Path) -> None:
    """It cannot be replaced; the command ends with its name."""
    list(History(ADDRESS, Server(), Folder(folder)).ask_windows("x", "x", DAY))
    (path,) = folder.iterdir()
    _folder(path)
    with pytest.raises(OSError, match=path.name[:8]):
        list(History(ADDRESS, Server(), Folder(folder)).ask_windows("x", "x", DAY))


def test_a_file_in_the_place_of_the_folder_is_an_os_error(folder: Path) -> None:
    folder.write_text("x")
    with pytest.raises(OSError, match="kept"):
        Folder(folder)


def test_the_server_rests_after_each_query() -> None:
    rests: list[float] = []
    history = History(ADDRESS, Server(), rest=rests.append)
    list(history.ask_windows("x", "x", DAY))
    list(history.ask_windows("x", "y", DAY))
    assert len(rests) == 2 == history.queries
