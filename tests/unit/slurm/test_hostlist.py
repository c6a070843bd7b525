"""Slurm's list expressions."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_exporter.common.slurm.hostlist import MAX_NAMES, parse_names, parse_ranges, render_names


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
        ("n[3-1]", f"'3-1': '3-1' is descending, or the list exceeds {MAX_NAMES} numbers"),
        ("n[0-999]m[0-999]", f"'n[0-999]m[0-999]' expands to more than {MAX_NAMES} names"),
        (f"n[0-{MAX_NAMES - 1}],m", f"'n[0-{MAX_NAMES - 1}],m' expands to more than {MAX_NAMES} names"),
        (
            f"n[0-{MAX_NAMES}]",
            f"'0-{MAX_NAMES}': '0-{MAX_NAMES}' is descending, or the list exceeds {MAX_NAMES} numbers",
        ),
        (
            f"n[7,0-{MAX_NAMES - 1}]",
            f"'7,0-{MAX_NAMES - 1}': '0-{MAX_NAMES - 1}' is descending, or the list exceeds {MAX_NAMES} numbers",
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


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["login"], "login"),
        (["n1", "n1"], "n1"),
        ([f"gpu-{number:02d}" for number in range(1, 41)], "gpu-[01-40]"),
        (["n9", "n10", "n11", "n2"], "n[2,9-11]"),
        (["gpu08", "gpu09", "gpu10", "gpu8", "gpu100"], "gpu[8,100,08-10]"),
        (["r1n1", "r1n2", "r2n1", "r2n2", "r10n1"], "r1n[1-2],r2n[1-2],r10n1"),
        (["gpu-01.pod2.example.org", "gpu-02.pod2.example.org"], "gpu-[01-02].pod2.example.org"),
        (["10.0.0.9:9836", "10.0.0.10:9836"], "10.0.0.[9-10]:9836"),
        (["127.0.0.1:9837", "127.0.0.1:9836"], "127.0.0.1:[9836-9837]"),
        (["login", "n1", "n2", "admin"], "admin,login,n[1-2]"),
        (["n123456789012", "n123456789013"], "n123456789[012-013]"),
    ],
)
def test_names_are_rendered_as_slurm_renders_them(names: list[str], text: str) -> None:
    assert render_names(names) == text


NUMBERED = st.lists(
    st.sampled_from(["a", "b-", ".", "x"]) | st.integers(0, 120).map(str) | st.integers(0, 120).map("{:03d}".format),
    min_size=1,
    max_size=5,
).map("".join)


@example(["a", "a0"])
@given(st.lists(NUMBERED | st.text(alphabet="ab01 9-.:", min_size=1, max_size=14), max_size=40))
def test_rendered_names_are_read_back(names: list[str]) -> None:
    assert sorted(parse_names(render_names(names))) == sorted(set(names))


@given(st.integers(0, 2000), st.integers(1, 2000), st.sampled_from([1, 4]))
def test_consecutive_numbers_are_one_range(first: int, more: int, width: int) -> None:
    names = [f"n{number:0{width}d}" for number in range(first, first + more + 1)]
    assert render_names(reversed(names)) == f"n[{first:0{width}d}-{first + more:0{width}d}]"
