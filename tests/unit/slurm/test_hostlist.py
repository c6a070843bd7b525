"""Slurm's list expressions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.common.slurm.hostlist import MAX_NAMES, parse_names, parse_ranges


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("n0", ["n0"]),
        ("n[0-2,7]", ["n0", "n1", "n2", "n7"]),
        ("gpu[008-010]-a,login", ["gpu008-a", "gpu009-a", "gpu010-a", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("/dev/nvidia0,/dev/nvidia1", ["/dev/nvidia0", "/dev/nvidia1"]),
        ("/dev/nvidia[2-3],/dev/nvidia0", ["/dev/nvidia2", "/dev/nvidia3", "/dev/nvidia0"]),
    ],
)
def test_names_are_listed_in_their_order(text: str, expected: list[str]) -> None:
    assert parse_names(text) == expected


@pytest.mark.parametrize(
    "text", ["n[0-2", "n0-2]", "n[[0]]", "n[a]", "n[3-1]", "n[]", "n[0-99999999]", "n[0-999]m[0-999]"]
)
def test_a_text_that_is_not_a_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_names(text)


@given(st.text(alphabet="n[]0123456789,-/ \\", max_size=60))
def test_any_text_gives_a_list_of_limited_size_or_a_value_error(text: str) -> None:
    try:
        names = parse_names(text)
    except ValueError:
        return
    assert len(names) <= MAX_NAMES
    assert not any(set("[]") & set(name) for name in names)


@given(st.lists(st.integers(0, 63), min_size=1, unique=True))
def test_rendered_ranges_are_read_back(numbers: list[int]) -> None:
    assert parse_ranges(",".join(map(str, numbers))) == numbers


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("n[0[1]", "'n[0[1]': brackets do not match"),
        ("n[0-2", "'n[0-2': brackets do not match"),
        ("n[a]", "'a': 'a' is not a range of numbers"),
        ("n[3-1]", f"'3-1': '3-1' goes backwards, or the list exceeds {MAX_NAMES} numbers"),
        ("n[0-999]m[0-999]", f"'n[0-999]m[0-999]' expands to more than {MAX_NAMES} names"),
        (f"n[0-{MAX_NAMES - 1}],m", f"'n[0-{MAX_NAMES - 1}],m' expands to more than {MAX_NAMES} names"),
        (
            f"n[0-{MAX_NAMES}]",
            f"'0-{MAX_NAMES}': '0-{MAX_NAMES}' goes backwards, or the list exceeds {MAX_NAMES} numbers",
        ),
        (
            f"n[7,0-{MAX_NAMES - 1}]",
            f"'7,0-{MAX_NAMES - 1}': '0-{MAX_NAMES - 1}' goes backwards, or the list exceeds {MAX_NAMES} numbers",
        ),
    ],
)
def test_the_error_names_the_exceeded_limit_or_the_fault(text: str, error: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_names(text)
    assert str(caught.value) == error


def test_a_list_may_have_as_many_names_as_the_limit() -> None:
    assert len(parse_names(f"n[0-{MAX_NAMES - 1}]")) == MAX_NAMES
    assert len(parse_names("n[0-255]m[0-255]")) == MAX_NAMES
    assert parse_names(f"n[{MAX_NAMES}-{MAX_NAMES + 1}]") == [f"n{MAX_NAMES}", f"n{MAX_NAMES + 1}"]
