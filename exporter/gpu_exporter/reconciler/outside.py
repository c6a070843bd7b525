"""Values from outside as bounded numbers. Pure; None for an invalid value."""

from __future__ import annotations

from typing import Any

WHOLE_MAX = 1_000_000_000  # pods, seconds, GPUs: nothing that is counted here is larger
DIGITS_MAX = 10


def whole(value: Any) -> int | None:
    """A number from 0 to WHOLE_MAX, or its ASCII digits."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= DIGITS_MAX:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= WHOLE_MAX else None
