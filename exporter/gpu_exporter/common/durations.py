"""Parses and prints durations as people write them; all values are seconds."""

from __future__ import annotations

import re

SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
DURATION = re.compile(rf"([0-9]+(?:\.[0-9]+)?)({'|'.join(SECONDS)})")
LONGEST_S = 366 * 86400.0


def parse_duration(text: str) -> float:
    """Converts `500ms`, `15s`, `1h30m`, `1w2d` to seconds. Raises ValueError, also for more than a year."""
    parts = DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is not a duration (examples: 90s, 10m, 1h30m, 2d, 1w)")
    seconds = sum(float(number) * SECONDS[unit] for number, unit in parts)
    if seconds > LONGEST_S:  # operating systems accept no longer timeouts
        raise ValueError(f"{text[:40]!r} is longer than a year")
    return seconds


def format_duration(seconds: float) -> str:
    """Writes seconds as one number with a unit, as configuration files and PromQL do: 5400 is `90m`, 0.5 is `500ms`."""
    for unit, size in reversed(SECONDS.items()):
        if seconds >= size >= 1.0 and seconds % size == 0:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds * 1000:.0f}ms" if seconds else "0s"


def describe_duration(seconds: float) -> str:
    """Returns the two largest units, for a sentence: 75 seconds are `1m15s`, 7500 seconds are `2h5m`."""
    whole = int(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m"), (whole % 60, "s")]
    first = next((i for i, (value, _) in enumerate(parts) if value), len(parts) - 1)
    return "".join(f"{value}{unit}" for i, (value, unit) in enumerate(parts[first : first + 2]) if value or not i)


def format_age(seconds: float) -> str:
    """Returns an age for a narrow column: `0s`, `59s`, `12m`, `3h05m`, `2d04h`."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m"
    if whole < 86400:
        return f"{whole // 3600}h{whole // 60 % 60:02d}m"
    return f"{whole // 86400}d{whole // 3600 % 24:02d}h"
