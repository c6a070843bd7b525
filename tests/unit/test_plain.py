"""Names that users and peers choose: for any content, a name is one line, one series, one label."""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Callable
from functools import partial

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpu_exporter.agent.attribution.kubelet.grpc_unix import CallError
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.agent.devices.errors import DriverUnavailable
from gpu_exporter.agent.exposition.series import Series
from gpu_exporter.agent.exposition.table import layout
from gpu_exporter.agent.exposition.text import MAX_LABEL_VALUE, TextRenderer
from gpu_exporter.agent.runtime.once import DaemonUnreadable
from gpu_exporter.common.commands import CommandError, NotFound
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import FetchError
from gpu_exporter.common.logs import JsonFormatter, LogfmtFormatter
from gpu_exporter.common.model.metrics import Family
from gpu_exporter.common.plain import LINE_MAX, describe_yaml, encodable, nearest, one_line, shorten, utc
from gpu_exporter.reconciler.marks import MarkError, Refused, timestamp
from gpu_exporter.reconciler.pause import PauseUnreadable
from gpu_exporter.reconciler.report import format_time

HOSTILE = ("\x1b[2J", "a\nb", "a\rb", "\u202egpj.x", "\x9b31m", "\ud83d", "\udcff", "\x00", "\u2028")
ANY = st.text(st.characters(), max_size=300)  # with surrogates


@given(ANY)
def test_one_line_is_printable_and_of_the_same_length(text: str) -> None:
    assert one_line(text).isprintable()
    assert len(one_line(text)) == len(text)


def test_a_long_text_becomes_a_short_line() -> None:
    assert len(one_line("\x1b" * 70_000)) == LINE_MAX and one_line("\x1b" * 70_000).isprintable()
    assert one_line("\x1b[31m" + "a" * 500, 40).endswith("a~" + shorten("\x1b[31m" + "a" * 500, 40)[-16:])


@pytest.mark.parametrize(
    "error",
    [
        *(AnswerError, FetchError, SourceError, CommandError, NotFound, CallError, DaemonUnreadable, DriverUnavailable),
        *(PauseUnreadable, partial(MarkError, "error"), partial(Refused, "gone")),
    ],
)
def test_an_error_that_repeats_text_of_others_is_a_short_line(error: Callable[[str], Exception]) -> None:
    text = str(error("\x1b]0;own\x07\r\u202e" + "a" * 64_000))
    assert text.isprintable() and len(text) == LINE_MAX and "own" in text


def test_a_yaml_error_names_the_place_and_quotes_nothing() -> None:
    for text in ("a: *s3cret", "a: [s3cret", "a: s3cret: b", "\x07s3cret", "a: 's3cret"):
        with pytest.raises(yaml.YAMLError) as caught:
            yaml.safe_load(text)
        assert describe_yaml(caught.value).startswith("not valid YAML") and "s3cret" not in describe_yaml(caught.value)
    with pytest.raises(yaml.YAMLError) as caught:
        yaml.safe_load("b: 1\na: *s3cret")
    assert describe_yaml(caught.value) == "not valid YAML: see line 2, column 4"


@given(ANY, ANY, st.integers(20, 40))
def test_two_different_texts_remain_different_after_every_conversion(one: str, other: str, most: int) -> None:
    for change in (encodable, lambda text: shorten(text, most)):
        assert (change(one) == change(other)) == (one == other) or "\\u" in one + other
    encodable(one).encode()
    assert len(shorten(one, most)) <= most


@pytest.mark.parametrize("name", HOSTILE)
def test_a_table_has_one_line_per_row(name: str) -> None:
    (_, row) = layout(("HOLDER", "STATE"), [(name, "held_idle")])
    assert row.isprintable()
    assert row.endswith("held_idle")


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("formatter", [LogfmtFormatter(), JsonFormatter()])
def test_a_log_record_is_one_line_without_escapes(name: str, formatter: logging.Formatter) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    handler.emit(logging.LogRecord("gpu_exporter.x", logging.INFO, "", 0, "%s", (name,), None))
    out.seek(0)
    (line,) = out.read().splitlines()
    assert line.isprintable()
    if isinstance(formatter, JsonFormatter):
        assert json.loads(line)["msg"] == name


def test_long_names_with_the_same_beginning_are_two_series() -> None:
    names = ["x" * 300 + end for end in ("a", "b")]
    family = Family("a", "h")
    text = TextRenderer().render([Series(family, ("pod",), [((name,), 1.0) for name in (*names, "\ud83d", "\ud83e")])])
    (read,) = parse_text(text.encode().decode())
    labels = [sample.labels["pod"] for sample in read.samples]
    assert len(set(labels)) == 4
    assert all(len(label) <= MAX_LABEL_VALUE for label in labels)
    assert labels[2:] == ["\\ud83d", "\\ud83e"]


@pytest.mark.parametrize("wall", [4e11, 1e17, -1e17, math.inf, -math.inf, math.nan, -1e10])
def test_a_clock_in_the_year_14000_breaks_no_cycle_and_no_log(wall: float) -> None:
    assert utc(wall).year in (1970, 9999)
    assert len(timestamp(wall)) == len(format_time(wall)) == 20
    record = logging.LogRecord("gpu_exporter.x", logging.INFO, "", 0, "m", (), None)
    record.created = wall
    assert "msg=m" in LogfmtFormatter().format(record)


def test_a_date_in_range_is_that_of_the_clock() -> None:
    assert timestamp(1_800_000_000.4) == "2027-01-15T08:00:00Z"


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("h10", "H100"),
        ("a100", "A100"),
        ("A10", "A100"),
        ("polcy", "policy"),
        ("xyz", ""),
        ("", ""),
        ("policy" * 9999, ""),
    ],
)
def test_the_nearest_word_is_found_in_any_letters(word: str, found: str) -> None:
    assert nearest(word, ("H100", "A100", "policy")) == found
