"""A limit of size warns before it fails."""

from __future__ import annotations

import warnings

import pytest
from tests.limits import Advice, advise


def test_below_the_limit_nothing_is_printed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advise("lines", 99, 100)


@pytest.mark.parametrize("size", [100, 120])
def test_at_the_limit_and_a_fifth_above_it_a_line_is_printed(size: int) -> None:
    with pytest.warns(Advice, match=rf"^lines: {size} of 100; divide it$"):
        advise("lines", size, 100)


def test_more_than_a_fifth_above_the_limit_fails() -> None:
    with pytest.raises(AssertionError, match="lines: 121 of 100; divide it, or raise the limit and write the reason"):
        advise("lines", 121, 100)


def test_the_warning_of_a_limit_fails_no_test() -> None:
    """All other warnings do (pyproject.toml)."""
    advise("the example of this test", 100, 100)
    with pytest.raises(UserWarning, match="other"):
        warnings.warn("other", UserWarning, stacklevel=1)
