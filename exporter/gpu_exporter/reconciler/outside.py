"""Values from outside as bounded numbers. Pure; None for an invalid value."""

from __future__ import annotations

import re
from typing import Any

WHOLE_MAX = 1_000_000_000  # pods, seconds, GPUs: nothing that is counted here is larger
DIGITS_MAX = 10
INDEXES = re.compile(r"[0-9]{1,10}(-[0-9]{1,10})?(,[0-9]{1,10}(-[0-9]{1,10})?)*", re.ASCII)
TEXT_MAX = 100_000  # characters: of 100,000 indexes every other one


def whole(value: Any) -> int | None:
    """A number from 0 to WHOLE_MAX, or its ASCII digits."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= DIGITS_MAX:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= WHOLE_MAX else None


def count_indexes(value: Any) -> int | None:
    """How many indexes a text as `0,2-4` of a Job's status names; 0 for an empty one."""
    if value == "":
        return 0
    if not isinstance(value, str) or len(value) > TEXT_MAX or not INDEXES.fullmatch(value):
        return None
    count = 0
    for part in value.split(","):
        first, _, last = part.partition("-")
        span = int(last or first) - int(first) + 1
        if span < 1:
            return None
        count += span
    return whole(count)
