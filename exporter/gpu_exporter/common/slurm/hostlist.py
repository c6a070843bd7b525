"""Slurm's list expressions: `n[0-1,7],login`, `r[1-2]n[1-4]`, `/dev/nvidia[0-3]`, and plain number ranges.

Rules: slurm.conf(5), "NodeName"; pdsh and clush read them too. The text may come from a file that users edit, so the
size of a list is checked before the list is built.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import zip_longest

from gpu_exporter.common.outside import need_wholes, whole

MAX_NAMES = 65_536  # Slurm's own MAX_RANGE is a similar limit for one expression
_NUMBER = "[0-9]{1,9}"
_RANGE = re.compile(rf"({_NUMBER})(?:-({_NUMBER}))?")


def parse_ranges(text: str) -> list[int]:
    """Converts `0,2-3` to [0, 2, 3]. Raises ValueError."""
    return list(need_wholes(_expand_ranges(text)))


def parse_names(text: str) -> list[str]:
    """Returns the names of an expression, in its order. Zero padding is kept.

    Raises ValueError for unmatched brackets, for an invalid range, and for more than MAX_NAMES names.
    """
    names: list[str] = []
    for part in _split(text):
        names += _expand(part)
        if len(names) > MAX_NAMES:
            raise ValueError(f"{text[:80]!r} expands to more than {MAX_NAMES} names")
    return names


def render_names(names: Iterable[str]) -> str:
    """Returns the expression for these names, such as `gpu-[01-40],login`, which parse_names can parse. The expression
    contains each name once, in natural order.

    If names differ in several numbers, only the last of these numbers becomes a range. A name with a bracket or a comma
    is not changed, and parse_names cannot parse the expression.
    """
    by_words: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for name in names:
        parts = re.split(f"({_NUMBER})", name)
        by_words.setdefault(tuple(parts[::2]), set()).add(tuple(parts[1::2]))
    ranges: dict[
        tuple[str, str, bool], set[str]
    ] = {}  # by the text before and after a number, and whether there is one
    for words, rows in by_words.items():
        at = max((i for i in range(len(words) - 1) if len({row[i] for row in rows}) > 1), default=0)
        for row in rows:
            before, after = _join(words[: at + 1], row[:at]), _join(("", *words[at + 1 :]), ("", *row[at + 1 :]))
            ranges.setdefault((before, after, bool(row)), set()).update(row[at : at + 1])
    return ",".join(
        f"{before}{_render_ranges(numbers)}{after}"
        for (before, after, _), numbers in sorted(ranges.items(), key=lambda each: [*map(_natural, each[0][:2])])
    )


def _join(words: Iterable[str], numbers: Iterable[str]) -> str:
    return "".join(word + number for word, number in zip_longest(words, numbers, fillvalue=""))


def _natural(text: str) -> list[tuple[str, int]]:
    """A key that sorts `n9` before `n10`."""
    return [(word, whole(number) or 0) for word, number in re.findall(f"([^0-9]*)({_NUMBER}|$)", text)]


def _render_ranges(numbers: Collection[str]) -> str:
    """The ranges of these numbers: `[01-40,42]`, or a single number without brackets. A range has the zero padding of
    its first number.
    """
    padded = {len(number) for number in numbers if len(number) > 1 and number.startswith("0")}
    runs: list[list[str]] = []
    for number in sorted(numbers, key=lambda each: (len(each) if len(each) in padded else 0, whole(each))):
        if runs and number == f"{(whole(runs[-1][-1]) or 0) + 1:0{len(runs[-1][0])}d}":
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"[{texts}]" if len(numbers) > 1 else texts


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
    """The names in `r[1-2]n[1-4]`. The last bracket changes fastest."""
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
            raise ValueError(f"{text[:80]!r}: {part[:40]!r} is descending, or the list exceeds {MAX_NAMES} numbers")
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers
