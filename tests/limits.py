"""Limits of size advise first: at its limit a size is printed as a warning, and a fifth above the limit the test fails.

So the change that arrives at a limit is not the one that has to tidy up. A commit may raise a number, with the reason
written beside it.
"""

from __future__ import annotations

import warnings

SLACK = 1.2  # times the limit


class Advice(UserWarning):
    """Something to look at that fails no test. conftest.py lets this warning pass."""


def advise(what: str, size: float, limit: float, *, so: str = "divide it") -> None:
    """Warn at the limit, fail a fifth above it. `so`: what to do about it."""
    if size < limit:
        return
    said = f"{what}: {size:,g} of {limit:,g}; {so}"
    assert size <= SLACK * limit, f"{said}, or raise the limit and write the reason beside it"
    warnings.warn(said, Advice, stacklevel=2)
