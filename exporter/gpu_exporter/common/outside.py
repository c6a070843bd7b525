"""Parsers with limits for numbers, amounts, times and names in text from outside. Pure.

`reconciler`, `attribution` and `cluster` use no other parsers, because Python's int(), float() and fromisoformat()
accept too much: digits of every script, 5,000 digits, `1_000`, `nan`. Each parser here defines the texts that it
accepts, and returns None for all others. The functions `need_*` raise ValueError, for callers that discard a whole
record at its first invalid field.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from email.utils import parsedate_to_datetime
from fractions import Fraction
from typing import Any

WHOLE_MAX = 10**18 - 1  # below 2**63, the limit of counters, sizes and times in the programs that are read
COUNT_MAX = 1_000_000_000  # limit of counted things: pods, GPUs, seconds of an owner's setting
NUMBER_MAX = 40  # characters of an amount or a time
REAL_MAX = 400  # characters of a number: some programs print 1e-300 with all of its digits
WHOLE = re.compile(r"[0-9]{1,18}", re.ASCII)
REAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?", re.ASCII)
INDEXES = re.compile(r"[0-9]{1,10}(-[0-9]{1,10})?(,[0-9]{1,10}(-[0-9]{1,10})?)*", re.ASCII)
INDEXES_MAX = 100_000  # characters: enough for every second one of 35,000 indexes
# k8s.io/apimachinery/pkg/api/resource, Quantity: a decimal number with a suffix or an exponent.
QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))([KMGTPE]i|[numkMGTPE]?|[eE][+-]?[0-9]{1,2})", re.ASCII)
SUFFIXES = {
    "": Fraction(1),
    **{suffix: Fraction(10) ** (3 * power) for power, suffix in enumerate("num", -3)},
    **{suffix: Fraction(1000) ** power for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Fraction(1024) ** power for power, suffix in enumerate("KMGTPE", 1)},
}
# RFC 3339; the seconds may be missing, as people leave them out.
TIME = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[Tt ]([0-9]{2}:[0-9]{2}(?::[0-9]{2})?)(\.[0-9]{1,9})?([Zz]|[+-][0-9]{2}:[0-9]{2})",
    re.ASCII,
)
SPECIALS = {"NaN": math.nan, "+Inf": math.inf, "Inf": math.inf, "-Inf": -math.inf}
NAME_MAX = 253  # characters of a name or UID of the Kubernetes API
NAME = re.compile(r"[^/\s\x00-\x1f\x7f]{1,253}")


def whole(value: Any, most: int = COUNT_MAX) -> int | None:
    """Parses a whole number from 0 to `most` (at most WHOLE_MAX): a number or ASCII digits; None for anything else."""
    if isinstance(value, str):
        value = int(value) if WHOLE.fullmatch(value) else None
    elif isinstance(value, Fraction | float):
        value = int(value) if math.isfinite(value) and value == math.floor(value) else None
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value <= min(most, WHOLE_MAX) else None


def real(value: Any) -> float | None:
    """Parses a finite number: a number, or ASCII text in the notation of C and JSON; None for anything else."""
    if isinstance(value, str):  # quickly, since an answer of a PromQL API has 300,000 of them
        if len(value) > REAL_MAX or not REAL.fullmatch(value):
            return None
        value = float(value)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int) and abs(value) > WHOLE_MAX:
        return None
    return float(value) if math.isfinite(value) else None


def quantity(value: Any) -> Fraction | None:
    """Parses an amount of the Kubernetes API: `2`, `500m`, `8k` for 8000, `8e0`, `16Gi`; None for anything else."""
    if not isinstance(value, str):
        plain = real(value)
        return None if plain is None else Fraction(plain)
    if len(value) > NUMBER_MAX or not (match := QUANTITY.fullmatch(value)):
        return None
    number, suffix = match.groups()
    scale = SUFFIXES.get(suffix)
    return Fraction(number) * (Fraction(10) ** int(suffix[1:]) if scale is None else scale)


def count_indexes(value: Any) -> int | None:
    """Counts the indexes in a text such as `0,2-4` of a Job's status; 0 for an empty text, None if invalid."""
    if value == "":
        return 0
    if not isinstance(value, str) or len(value) > INDEXES_MAX or not INDEXES.fullmatch(value):
        return None
    count = 0
    for part in value.split(","):
        first, _, last = part.partition("-")
        span = int(last or first) - int(first) + 1
        if span < 1:
            return None
        count += span
    return whole(count)


def parse_timestamp(value: Any) -> float | None:
    """Converts an RFC 3339 time, as APIs and people write it, to Unix seconds; None if invalid."""
    if not isinstance(value, str) or len(value) > NUMBER_MAX or not (match := TIME.fullmatch(value)):
        return None
    day, clock, part, zone = match.groups()
    zone = "+00:00" if zone in "Zz" else zone
    try:
        whole_seconds = datetime.fromisoformat(f"{day}T{clock}{zone}").timestamp()
    except (ValueError, OverflowError):  # such as February 31
        return None
    return whole_seconds + float(part or 0)


def parse_http_date(value: Any) -> float | None:
    """Converts a Date header (RFC 9110, section 5.6.7) to Unix seconds, without a fraction; None if invalid."""
    try:
        return parsedate_to_datetime(value).timestamp() if isinstance(value, str) else None
    except (ValueError, OverflowError):
        return None


def load_json(text: str, hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Returns the value of a JSON text. A number with more digits than Python reads becomes None.

    `hook`: called with each object, as by json.loads. Raises ValueError, RecursionError.
    """
    try:
        return json.loads(text, object_hook=hook)
    except json.JSONDecodeError:
        raise
    except ValueError:  # from int(), which accepts 4,300 digits
        return json.loads(text, object_hook=hook, parse_int=lambda digits: whole(digits.lstrip("-"), WHOLE_MAX))


def object_name(value: Any) -> str | None:
    """Returns the name or UID of an object if it is safe in a path and in a log line; None otherwise."""
    return value if isinstance(value, str) and NAME.fullmatch(value) and value.isprintable() else None


def need_whole(value: Any, most: int = WHOLE_MAX) -> int:
    """As `whole`, but raises ValueError."""
    number = whole(value, most)
    if number is None:
        raise ValueError(f"{value!r:.60} is not a whole number from 0 to {most}")
    return number


def need_real(value: Any) -> float:
    """As `real`, but raises ValueError."""
    number = real(value)
    if number is None:
        raise ValueError(f"{value!r:.60} is not a number")
    return number


def need_sample(value: Any) -> float:
    """As `need_real`, but also accepts NaN and the infinities, as Prometheus writes them. Raises ValueError."""
    number = real(value)
    if number is None and isinstance(value, str):
        number = SPECIALS.get(value)
    if number is None:
        raise ValueError(f"{value!r:.60} is not a number")
    return number


def need_name(value: Any) -> str:
    """As `object_name`, but raises ValueError."""
    text = object_name(value)
    if text is None:
        raise ValueError(f"{value!r:.60} is not a valid object name")
    return text


def need_wholes(values: Iterable[Any]) -> tuple[int, ...]:
    """`need_whole` of each value. Raises ValueError."""
    return tuple(map(need_whole, values))
