"""Calculates with spans: times from a start to an end (Unix seconds). Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import TypeAlias

Span: TypeAlias = tuple[float, float]
Spans: TypeAlias = tuple[Span, ...]  # by time, without overlaps


def extend(spans: list[Span], start: float, end: float) -> None:
    """Adds a span that begins no earlier than the last one. Joins spans that touch."""
    if spans and start <= spans[-1][1]:
        spans[-1] = spans[-1][0], max(spans[-1][1], end)
    else:
        spans.append((start, end))


def merge(spans: Iterable[Span]) -> list[Span]:
    """Returns the spans in order of time, and joins spans that overlap."""
    found: list[Span] = []
    for start, end in sorted(spans):
        extend(found, start, end)
    return found


def subtract(spans: Sequence[Span], gaps: Sequence[Span], start: float, end: float) -> list[Span]:
    """Returns the parts of these spans between `start` and `end` that are in no gap."""
    found = []
    for begin, stop in spans[max(0, bisect_right(spans, start, key=itemgetter(0)) - 1) :]:
        if begin >= end:
            break
        at, last = max(begin, start), min(stop, end)
        for number in range(bisect_right(gaps, at, key=itemgetter(1)), len(gaps)):
            gap_start, gap_end = gaps[number]
            if gap_start >= last:
                break
            if gap_start > at:
                found.append((at, gap_start))
            at = max(at, gap_end)
        if at < last:
            found.append((at, last))
    return found


def overlap_s(spans: Spans, start: float, end: float) -> float:
    """Returns how many seconds of these spans lie between `start` and `end`."""
    total = 0.0
    for at in range(max(0, bisect_right(spans, start, key=itemgetter(0)) - 1), len(spans)):
        begin, stop = spans[at]
        if begin >= end:
            break
        total += max(0.0, min(stop, end) - max(begin, start))
    return total
