"""Numbers, amounts, times and names in text from outside: valid texts are read, all others are refused at any length."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.common import outside

HOSTILE = ["²", "٣", "1_000", "9" * 5_000, " 1", "1 ", "1\n", "+1", "--1", "0x10", "", "nan", "inf", "١", "1,0", "\0"]
ODD: list[Any] = [None, [], {}, b"1", True, False, math.nan, math.inf, -math.inf, 10**400, -1, object()]
ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)


@pytest.mark.parametrize("value", [*HOSTILE, *ODD])
def test_invalid_whole_numbers_are_refused(value: Any) -> None:
    assert outside.whole(value) is None
    with pytest.raises(ValueError, match="is not a whole number"):
        outside.need_whole(value)


@given(st.integers(0, outside.COUNT_MAX))
def test_a_whole_number_is_read_in_every_form(number: int) -> None:
    assert outside.whole(number) == outside.whole(str(number)) == outside.whole(f"{number:012d}") == number
    assert outside.whole(float(number)) == number
    assert outside.whole(number, number) == number
    assert outside.whole(number + 1, number) is None


@pytest.mark.parametrize("value", [*(each for each in HOSTILE if each != "+1"), *(v for v in ODD if v != -1)])
def test_invalid_numbers_are_refused(value: Any) -> None:
    assert outside.real(value) is None
    with pytest.raises(ValueError, match="is not a number"):
        outside.need_real(value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_read_in_every_form(number: float) -> None:
    assert outside.real(number) == number
    assert outside.real(repr(number)) == number


@pytest.mark.parametrize(("text", "value"), [("NaN", math.nan), ("+Inf", math.inf), ("-Inf", -math.inf), ("1e3", 1e3)])
def test_values_of_prometheus_are_read(text: str, value: float) -> None:
    found = outside.need_sample(text)
    assert found == value or (math.isnan(found) and math.isnan(value))


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("2", 2), ("8k", 8000), ("8e0", 8), ("8E1", 80), ("1e3", 1000), ("16Gi", 16 * 2**30), ("500m", Decimal("0.5")),
        ("1.5", Decimal("1.5")), ("0.5k", 500), ("2000m", 2), ("1n", Decimal("1e-9")), ("1u", Decimal("1e-6")),
        ("1E", 10**18), ("1Ei", 2**60), ("-2", -2), ("+2", 2), (".5", Decimal("0.5")), ("2.", 2), (3, 3), (0.5, 0.5),
    ],
)  # fmt: skip
def test_amounts_of_the_kubernetes_api_are_read(text: Any, amount: Any) -> None:
    assert outside.quantity(text) == amount


@pytest.mark.parametrize(
    "text",
    [*(each for each in HOSTILE if each != "+1"), "1kk", "1K", "k", "1e", "1e999", "1Gib", "1 k", None, [], {}, True],
)
def test_invalid_amounts_are_refused(text: Any) -> None:
    assert outside.quantity(text) is None


@given(st.integers(0, 10**6), st.sampled_from(["", "k", "M", "Ki", "e3", "000m"]))
def test_a_count_of_devices_is_a_whole_number_or_refused(number: int, suffix: str) -> None:
    found = outside.whole(outside.quantity(f"{number}{suffix}"))
    scale = {"": 1, "k": 1000, "M": 10**6, "Ki": 1024, "e3": 1000, "000m": 1}[suffix]
    assert found == (number * scale if number * scale <= outside.COUNT_MAX else None)


@pytest.mark.parametrize(
    "text", [*HOSTILE, "2026-02-31T00:00:00Z", "2026-13-01T00:00:00Z", "2026-01-01", "2026-01-01T00:00:00",
             "2026-01-01T00:00:00+99:99", "2026-W01-1T00:00:00Z", "20260101T000000Z", "٢٠٢٦-01-01T00:00:00Z", None, 3]
)  # fmt: skip
def test_invalid_times_are_refused(text: Any) -> None:
    assert outside.parse_timestamp(text) is None


@given(st.datetimes(datetime(1971, 1, 1), datetime(9999, 1, 1)), st.sampled_from(["Z", "z", "+00:00", "-00:00"]))
def test_a_time_is_read_in_every_form(moment: datetime, zone: str) -> None:
    wall = moment.replace(microsecond=0, tzinfo=timezone.utc).timestamp()
    for part, more in (("", 0.0), (".5", 0.5), (".000001", 1e-6), (".123456789", 0.123456789)):
        found = outside.parse_timestamp(
            f"{moment:%Y-%m-%dT%H:%M:%S}{part}{zone}".rjust(len(zone) + 19 + len(part), "0")
        )
        assert found == pytest.approx(wall + more, abs=1e-5)


@given(ANYTHING)
def test_any_input_gives_a_value_or_none_and_never_an_error(value: Any) -> None:
    for parser in (
        outside.whole,
        outside.real,
        outside.quantity,
        outside.count_indexes,
        outside.parse_timestamp,
        outside.object_name,
    ):
        parser(value)


@pytest.mark.parametrize("text", ["", "a b", "a/b", "a\nb", "\x1b[2J", "x" * 254, "\u202eabc", None, 7])
def test_invalid_names_are_refused(text: Any) -> None:
    assert outside.object_name(text) is None
