"""`top` reads nodes: addresses, answers, and malformed answers."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.statuses import ROW, status_of

from gpu_exporter.cli import top
from gpu_exporter.cli.reports import job
from gpu_exporter.common.address import Address
from gpu_exporter.common.fetch import FetchError
from gpu_exporter.common.version import VERSION
from gpu_exporter.reports.jobs.entries import read_exporters
from gpu_exporter.reports.jobs.names import AskedJob
from gpu_exporter.reports.top.nodes import (
    ROWS_MAX,
    SENTENCE_MAX,
    NodeRow,
    list_problems,
    name_of,
    parse,
    parse_node,
    read_nodes,
)
from gpu_exporter.reports.top.screen import table

STATUS = status_of()
(GPU,), (HELD,) = STATUS["gpus"], STATUS["allocations"]


@pytest.mark.parametrize(
    ("text", "url", "name"),
    [
        ("gpu-1", "http://gpu-1:9836/api/v1/status", "gpu-1"),
        ("gpu-1:80", "http://gpu-1:80/api/v1/status", "gpu-1:80"),
        ("10.0.0.1:9836", "http://10.0.0.1:9836/api/v1/status", "10.0.0.1"),
        ("https://gpu.example.org/", "https://gpu.example.org/api/v1/status", "gpu.example.org"),
        ("http://[::1]:9836", "http://[::1]:9836/api/v1/status", "::1"),
        ("http://ada:secret@gpu-1:9836", "http://gpu-1:9836/api/v1/status", "gpu-1"),
    ],
)
def test_a_node_is_named_by_its_host_and_an_unusual_port(text: str, url: str, name: str) -> None:
    assert (str(parse_node(text)), name_of(parse_node(text))) == (url, name)


@pytest.mark.parametrize("text", ["", "ftp://x", "http://", "gpu-1:port"])
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_node(text)


def test_a_silent_node_does_not_affect_the_rows_of_others() -> None:
    def fetch(node: Address, **_: Any) -> str:
        if "b" in node.place:
            raise FetchError("connection refused")
        if "c" in node.place:
            return "<html>"
        source = {"source": "slurm", "error": "slurmctld is silent"}
        return json.dumps(STATUS | {"attribution": [source], "driver_up": False, "driver_error": "no driver"})

    urls = [parse_node(name) for name in ("a1", "b1", "c1", "a2")]
    reading = read_nodes(urls, fetch)
    assert [(each.node, each.row.holder) for each in reading.rows] == [("a1", "job 7"), ("a2", "job 7")]
    assert reading.answered == 2
    assert reading.problems["b1"] == "connection refused"
    assert reading.problems["c1"] == "the answer is not the status of a gpu-exporter (JSONDecodeError)"
    assert reading.problems["a1"] == "no driver; slurm: slurmctld is silent"


def test_the_remedy_for_a_password_names_flags_of_the_command() -> None:
    def fetch(node: Address, **_: Any) -> str:
        raise FetchError(f"{node}: HTTP 401", 401)

    node = parse_node("gpu-1")
    _, problems = read_exporters(AskedJob("7"), [node], fetch)
    for command, problem in ((job, problems[0]), (top, read_nodes([node], fetch).problems["gpu-1"])):
        flags = re.findall(r"--[a-z.-]+", problem)
        assert len(flags) == 2 and set(flags) <= command.build_parser()._option_string_actions.keys(), problem


def test_nodes_with_the_same_problem_are_one_host_list() -> None:
    def fetch(node: Address, **_: Any) -> str:
        raise FetchError(f"{node}: {'no route' if '17' in node.place else 'connection refused'}")

    names = [f"gpu-{number:02d}" for number in range(1, 41)]
    reading = read_nodes([parse_node(name) for name in names], fetch)
    assert list_problems(reading) == ["gpu-[01-16,18-40]: connection refused", "gpu-17: no route"]


def test_null_means_unknown_and_not_zero() -> None:
    ((row,), problem) = parse(json.dumps(STATUS))
    assert (row.power_w, row.idle_s, row.utilization, problem) == (None, None, 0.5, "")
    assert row.stalled_s is None
    ((row,), _) = parse(json.dumps(status_of([ROW._replace(stalled_s=900.0)])))
    assert row.stalled_s == 900.0


def test_a_reason_is_read_whole() -> None:
    ((row,), _) = parse(json.dumps(status_of([ROW._replace(why="w" * 500, advice="a" * 500)])))
    assert (row.why, row.advice) == ("w" * 500, "a" * 500)


@pytest.mark.parametrize("number", ["Infinity", "NaN", "-1", "1e308", "9" * 400])
def test_an_impossible_number_affects_only_its_node(number: str) -> None:
    text = json.dumps(status_of([ROW._replace(idle_s=12321)])).replace("12321", number)
    reading = read_nodes(
        [parse_node("a"), parse_node("b")], lambda url, **_: text if "a" in url.place else json.dumps(STATUS)
    )
    assert ([each.node for each in reading.rows], list(reading.problems)) == (["b"], ["a"])


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*GPU, *HELD, *STATUS, "source", "text", "mig", "mig_uuid"]), inner)
    ),
    max_leaves=12,
)


@given(JSON, st.sampled_from([*STATUS, *GPU, *HELD]))
def test_a_malformed_answer_affects_only_its_node(strange: Any, key: str) -> None:
    answer = json.loads(json.dumps(STATUS))
    for part in (answer, *answer["gpus"], *answer["allocations"]):
        part |= {key: strange} if key in part else {}
    reading = read_nodes([parse_node("a")], lambda url, **_: json.dumps(answer))
    assert reading.answered + (not reading.answered and bool(reading.problems)) == 1


def test_a_name_of_megabytes_is_shortened_to_one_cell() -> None:
    """Every row is as wide as the widest: two hundred rows and a name of 3 MB would be 600 MB."""
    huge = ROW._replace(holder="x" * 3_000_000, why="y" * 100_000)
    source = {"source": "s" * 10_000, "error": "e" * 10_000}
    rows, problem = parse(json.dumps(status_of([huge, *[ROW] * 200], attribution=[source] * 50)))
    lines = table([NodeRow("a", row) for row in rows], with_node=True)
    assert len(rows) == 201 and max(map(len, lines)) < 1_000 and len(problem) < 5_000
    assert rows[0].holder.startswith("xxx") and rows[1].holder == "job 7"


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(ValueError):
        parse(json.dumps(status_of([ROW] * 5_000)))


@pytest.mark.parametrize("key", ["reason", "read_error", "name", "uuid", "conditions"])
def test_a_text_that_many_rows_of_a_gpu_repeat_is_shortened_once(key: str) -> None:
    """The join repeats it: 4000 rows with a text of 2 MB are 8 GB."""
    status = status_of([ROW._replace(gpu=f"0:{number}/0") for number in range(2_000)] + [ROW] * 2_000)
    (gpu,) = status["gpus"]
    gpu |= {key: "é" * 2_000_000, "gpu": None, "pci_bus_id": ""} if key != "conditions" else {}
    gpu["up"] = key != "reason"  # a GPU that does not answer gives its reason to all of its rows
    gpu["conditions"] = [{"text": f"condition {number}"} for number in range(50_000)] if key == "conditions" else []
    begin = time.process_time()
    rows, _ = parse(json.dumps(status))
    assert time.process_time() - begin < 3
    assert 2_000 <= len(rows) <= ROWS_MAX and max(len(row.why) for row in rows) <= SENTENCE_MAX


def test_an_exporter_of_another_version_is_named_with_both_versions() -> None:
    answers = {"old": {**STATUS, "version": "0.0.9"}, "new": {**STATUS, "version": "7.1\x1b[2J", "gpus": [{}]}}
    del answers["old"]["allocations"]
    reading = read_nodes([parse_node(name) for name in answers], lambda url, **_: json.dumps(answers[url.host]))
    assert reading.problems == {
        node: f"the answer of gpu-exporter {version} lacks the field '{key}', but this gpu-exporter {VERSION} needs it: "
        "update the older of the two"
        for node, version, key in (("old", "0.0.9", "allocations"), ("new", "7.1\ufffd[2J", "conditions"))
    }
