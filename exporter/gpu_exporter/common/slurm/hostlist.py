"""Slurm's list expressions: `n[0-1,7],login`, `r[1-2]n[1-4]`, `/dev/nvidia[0-3]`, and plain number ranges.

Rules: slurm.conf(5), "NodeName". The text may come from a file that any user with write access edits, so the size of a
list is checked before the list is built.
"""

from __future__ import annotations

import re

from gpu_exporter.common.outside import need_wholes

MAX_NAMES = 65_536  # Slurm's own MAX_RANGE is a similar limit for one expression
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def parse_ranges(text: str) -> list[int]:
    """Converts `0,2-3` to [0, 2, 3]. Raises ValueError."""
    return list(need_wholes(_expand_ranges(text)))


def parse_names(text: str) -> list[str]:
    """The names of an expression, in its order. Zero padding is kept.

    Raises ValueError for unmatched brackets, for an invalid range, and for more than MAX_NAMES names.
    """
    names: list[str] = []
    for part in _split(text):
        names += _expand(part)
        if len(names) > MAX_NAMES:
            raise ValueError(f"{text[:80]!r} expands to more than {MAX_NAMES} names")
    return names


def _split(text: str) -> list[str]:
    """The parts between commas outside of brackets, without empty parts."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        if depth not in (0, 1):
            raise ValueError(f"{text[:80]!r}: brackets do not match")
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    if depth:
        raise ValueError(f"{text[:80]!r}: brackets do not match")
    return [part for part in (*parts, text[start:]) if part]


def _expand(part: str) -> list[str]:
    """Expands `r[1-2]n[1-4]`: the last bracket counts fastest."""
    names = [""]
    for literal, ranges in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", part):
        endings = [literal] if literal else _expand_ranges(ranges)
        if len(names) * len(endings) > MAX_NAMES:
            raise ValueError(f"{part[:80]!r} expands to more than {MAX_NAMES} names")
        names = [name + ending for name in names for ending in endings]
    return names


def _expand_ranges(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            raise ValueError(f"{text[:80]!r}: {part[:40]!r} is not a range of numbers")
        first, last = need_wholes((match[1], match[2] or match[1]))
        if last < first or last - first >= MAX_NAMES - len(numbers):
            raise ValueError(f"{text[:80]!r}: {part[:40]!r} goes backwards, or the list exceeds {MAX_NAMES} numbers")
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers
