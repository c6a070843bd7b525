"""The table of meanings: complete, short, and filled with the numbers that the rules publish."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.workloads import score

from gpu_exporter.common.model.meanings import (
    CAUSES,
    STATES,
    Meaning,
    advise,
    describe_cause,
    fill,
    format_quantity,
    sentence,
)
from gpu_exporter.common.model.rows import TONES
from gpu_exporter.diagnosis.causes import rules

LINE_MAX = 100  # characters: a line of a mail
TYPICAL = {"_ratio": 0.42, "_seconds": 7500.0, "_bytes_per_second": 1.2e8, "_bytes": 6.4e10}
ALL = {**STATES, **CAUSES}


def typical(quantity: str) -> float:
    return next((value for suffix, value in TYPICAL.items() if quantity.endswith(suffix)), 128.0)


@pytest.mark.parametrize("meaning", ALL.values(), ids=ALL)
def test_each_text_fits_into_a_line_and_is_one_clause(meaning: Meaning) -> None:
    values = {name: typical(name) for name in meaning.quantities}
    texts = [meaning.title, fill(meaning.says, values), meaning.owner, fill(meaning.number, values), meaning.site]
    assert meaning.title and meaning.says
    for text in filter(None, texts):
        assert len(text) <= LINE_MAX
        assert not text.endswith(".") and "{" not in text and "\n" not in text
    assert len(meaning.quantities) <= 3
    assert (
        meaning.owner
        or meaning.site
        or meaning is CAUSES["input_wait"]
        or meaning.title
        in (
            "in use",
            "held by nobody",
            "not known",
            "not on the bus",
            "divided into MIG instances",
        )
    )


def test_each_state_that_people_see_has_a_meaning() -> None:
    assert set(STATES) == set(TONES)


def test_each_rule_has_a_meaning() -> None:
    judging = [path.stem for path in Path(rules.__file__).parent.glob("*.py") if "\n@rule(" in path.read_text()]
    assert sorted(judging) == sorted(CAUSES)


def test_the_rules_publish_only_numbers_of_the_table_and_the_sentence_has_them() -> None:
    """Over all recorded scripts: an unknown quantity would be a series that no sentence prints."""
    told = set()
    for record in score.read_records():
        for cause in score.replay(record).causes.found:
            values = dict(cause.values)
            assert values.keys() <= set(CAUSES[cause.name].quantities), cause.name
            assert describe_cause(cause.name, values)
            told.add(cause.name) if fill(CAUSES[cause.name].says, values) and values else None
    assert {"cpu_oversubscribed", "cpu_quota", "too_few_workers", "cpu_bound_input", "unused_gpu"} <= told


def test_a_number_that_is_not_known_gives_the_text_without_numbers() -> None:
    assert describe_cause("cpu_quota", {"cpus": 4.0}) == "the CPU quota runs out"
    assert describe_cause("cpu_quota", {"cpus": 4.0, "throttled_ratio": 0.4}) == (
        "its quota of 4 CPUs ran out in 40% of the periods"
    )
    assert advise("cpu_oversubscribed", {}).startswith("set OMP_NUM_THREADS to")
    assert advise("cpu_oversubscribed", {"threads_to_set": 4.0}) == "set OMP_NUM_THREADS=4"
    assert (describe_cause("of_a_later_version", {}), advise("of_a_later_version", {})) == (
        "of_a_later_version",
        "",
    )
    assert (sentence("a b"), sentence("")) == ("A b.", "")


@given(st.sampled_from(sorted({q for each in CAUSES.values() for q in each.quantities})), st.floats(0, 1e15))
def test_any_number_is_printed_on_one_short_line(quantity: str, value: float) -> None:
    text = format_quantity(quantity, value)
    assert 0 < len(text) <= 24 and "\n" not in text and "nan" not in text
