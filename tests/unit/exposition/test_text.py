"""The renderer, checked with the parsers of Prometheus' own Python client."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpu_exporter.agent.exposition.series import Series
from gpu_exporter.agent.exposition.text import MAX_LABEL_VALUE, TextRenderer, format_value
from gpu_exporter.common.model.metrics import Family

VALUES = st.floats(allow_nan=False, allow_infinity=False, width=64)
LABELS = st.text(st.characters(blacklist_categories=("Cs",)), max_size=40).filter(lambda t: "\r" not in t)


@given(VALUES)
def test_rendered_values_read_back_exactly(value: float) -> None:
    assert float(format_value(value)) == value


@given(st.lists(st.tuples(LABELS, LABELS, VALUES), max_size=6, unique_by=lambda row: row[:2]))
def test_any_label_value_survives_both_formats(rows: list[tuple[str, str, float]]) -> None:
    for name in ("gpu_power_watts", "gpu_energy_joules_total"):
        values = [abs(value) if name.endswith("_total") else value for _, _, value in rows]
        series = Series(
            Family(name, 'What\\is "this"\nfor'),
            ("pod", "namespace"),
            [((pod, namespace), value) for (pod, namespace, _), value in zip(rows, values, strict=True)],
        )
        expected = {
            tuple(sorted((k, v) for k, v in (("pod", pod), ("namespace", namespace)) if v)): value
            for (pod, namespace, _), value in zip(rows, values, strict=True)
        }
        renderer = TextRenderer()
        for parse, openmetrics in ((parse_text, False), (parse_openmetrics, True)):
            text = renderer.render([series], openmetrics=openmetrics)
            found = {
                tuple(sorted(sample.labels.items())): sample.value
                for family in parse(text)
                for sample in family.samples
            }
            assert found == expected, text


def test_a_hostile_label_is_cut_and_escaped() -> None:
    text = TextRenderer().render([Series(Family("a", "h"), ("pod",), [(('x"} 1\n' + "y" * 9999,), 1.0)])])
    lines = text.splitlines()
    assert len(lines) == 3
    assert len(lines[2]) < MAX_LABEL_VALUE + 40
    (family,) = parse_text(text)
    assert family.samples[0].value == 1.0


def test_openmetrics_ends_with_eof_and_names_counters_without_total() -> None:
    series = [Series(Family("gpu_energy_joules_total", "h"), (), [((), 1.0)])]
    text = TextRenderer().render(series, openmetrics=True)
    assert text == "# HELP gpu_energy_joules h\n# TYPE gpu_energy_joules counter\ngpu_energy_joules_total 1\n# EOF\n"


def test_only_the_requested_families_are_rendered() -> None:
    series = [Series(Family(name, "h"), (), [((), 1.0)]) for name in ("a", "b")]
    assert TextRenderer().render(series, names=frozenset(["b"])) == "# HELP b h\n# TYPE b gauge\nb 1\n"


ROWS = st.lists(st.tuples(st.sampled_from("pqr"), st.sampled_from([0.0, -0.0, 0.5, 2])), max_size=4)
PAGES = st.lists(st.tuples(ROWS, ROWS, st.sampled_from(["", "a", "b"]), st.booleans()), max_size=6)


@given(PAGES)
def test_a_renderer_that_keeps_lines_renders_what_a_new_one_renders(
    pages: list[tuple[list[tuple[str, float]], list[tuple[str, float]], str, bool]],
) -> None:
    kept = TextRenderer()
    for first, second, name, openmetrics in pages:
        named = (("a", first), ("b", second))
        series = [Series(Family(each, "h"), ("pod",), [((pod,), v) for pod, v in rows]) for each, rows in named if rows]
        names = frozenset([name] if name else [])
        rendered = kept.render(series, openmetrics=openmetrics, names=names)
        assert rendered == TextRenderer().render(series, openmetrics=openmetrics, names=names)


@pytest.mark.parametrize("names", [frozenset[str](), frozenset(["a"])], ids=["all", "some"])
def test_lines_of_short_lived_holders_are_dropped_whichever_families_are_requested(names: frozenset[str]) -> None:
    renderer = TextRenderer()
    for turn in range(9):
        rows = [((f"pod-{turn}",), 1.0)]
        renderer.render([Series(Family(name, "h"), ("pod",), rows) for name in ("a", "b")], names=names)
    assert [len(lines.prefixes) for lines in renderer._kept.values()] == [1] * (1 if names else 2)


def test_a_request_for_a_few_families_drops_no_lines_of_the_others() -> None:
    renderer = TextRenderer()
    series = [Series(Family(name, "h"), ("pod",), [(("p",), 1.0)]) for name in ("a", "b")]
    renderer.render(series)
    kept = dict(renderer._kept)
    renderer.render(series, names=frozenset(["a"]))
    assert renderer._kept == kept


def test_integers_have_no_fraction_and_large_numbers_are_exact() -> None:
    assert format_value(85899345920.0) == "85899345920"
    assert format_value(0.1) == "0.1"
    assert [format_value(each) for each in (3, True, 0.0, -0.0, -2.0, 1e15)] == [
        "3",
        "1",
        "0",
        "0",
        "-2",
        "1" + 15 * "0",
    ]
    assert not math.isinf(float(format_value(1e300)))
