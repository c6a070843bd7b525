"""Coverage has one meaning, whatever the source, and is never more than what was seen."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.reconciler.evidence.coverage import SAMPLE_EACH_S, Counters, coverage

WINDOW = 7200.0


@pytest.mark.parametrize(
    ("totals", "increases", "share"),
    [
        ((7200.0, 7200.0), (7200.0, 7200.0), 1.0),
        ((90_000.0, 10_000.0), (7200.0, 7200.0), 1.0),  # badly seen long ago: not in this window
        ((90_000.0, 86_760.0), (7200.0, 3960.0), 0.55),
        ((3600.0, 3240.0), (3600.0, 3240.0), 0.9),  # held for less than the window
        ((90_000.0, 86_400.0), (0.0, 0.0), 0.5),  # one sample: all that is unknown may lie in the window
        ((90_000.0, 10_000.0), (0.0, 0.0), 0.0),
        ((90_000.0, 90_000.0), (0.0, 0.0), 1.0),
        ((90_000.0, 88_920.0), (3600.0, 3600.0), 0.85),  # 1080 s unknown, before the samples
        ((90_000.0, 10_000.0), (3600.0, 3600.0), 0.5),
        ((90_000.0, 88_920.0), (3600.0, 3240.0), 0.85),
        ((600.0, 500.0), (7200.0, 7000.0), 7000 / 7200),  # the counters began again within the window
        ((600.0, 700.0), (0.0, 0.0), 1.0),
        ((0.0, 0.0), (0.0, 0.0), None),
        ((math.nan, 5.0), (0.0, 0.0), None),
        ((600.0, math.nan), (0.0, 0.0), None),
    ],
)
def test_share(totals: tuple[float, float], increases: tuple[float, float], share: float | None) -> None:
    assert coverage(WINDOW, *totals, *increases) == (None if share is None else pytest.approx(share))


SPANS = st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=12)


@given(SPANS, st.integers(0, 40_000))
def test_it_never_exceeds_what_was_seen_and_is_exact_over_a_whole_window(
    spans: list[tuple[int, bool]], reach: int
) -> None:
    """`spans`: how long the holder was seen and not seen, in turn. `reach`: how far back the samples go."""
    seconds = [seen for length, seen in spans for _ in range(length)]
    held, observed = float(len(seconds)), float(sum(seconds))
    within = seconds[-reach:] if reach else []
    got = coverage(WINDOW, held, observed, float(len(within)), float(sum(within)))
    window = seconds[-int(WINDOW) :]
    true = sum(window) / len(window)
    assert got is not None
    if reach <= len(window):
        assert got <= true + 1e-9
    if reach == len(window):
        assert got == pytest.approx(true)


def flapping(on_s: int, off_s: int, until_s: int, each_s: int = 30) -> Iterator[tuple[float, float, float]]:
    """What a reader each 30 s gets of an exporter that comes and goes: (time, held, observed) while it answers.

    Held goes on while it is away, observed does not.
    """
    observed = 0
    for now in range(until_s):
        is_on = now % (on_s + off_s) < on_s
        observed += is_on
        if is_on and now % each_s == 0:
            yield float(now), float(now + 1), float(observed)


def test_an_exporter_that_flaps_covers_no_more_than_it_was_there() -> None:
    counters = Counters()
    shares = [counters.cover(WINDOW, held, observed, now) for now, held, observed in flapping(70, 50, 14_400)]
    assert max(share or 0.0 for share in shares[10:]) < 0.65
    assert shares[-1] == pytest.approx(70 / 120, abs=0.01)


def test_a_reader_that_starts_late_believes_no_more_than_one_that_was_there() -> None:
    """Well observed for a day, badly for the last two hours, and the reader starts now: the day must not hide that."""
    late, there = Counters(), Counters()
    for minute in range(1440 + 121):
        held, observed = minute * 60.0, min(minute, 1440) * 60.0
        share = there.cover(WINDOW, held, observed, 0.0)
    assert share == pytest.approx(0.0)
    assert late.cover(WINDOW, held, observed, 0.0) == pytest.approx(0.0)
    for minute in range(1, 61):
        share = late.cover(WINDOW, held + minute * 60.0, observed + minute * 60.0, 0.0)
    assert share == pytest.approx(0.5)


def test_counters_that_began_again_are_not_compared_with_those_before() -> None:
    counters = Counters()
    counters.cover(WINDOW, 90_000.0, 90_000.0, 0.0)
    assert counters.cover(WINDOW, 100.0, 20.0, 30.0) == pytest.approx(0.2)
    assert counters.cover(WINDOW, 200.0, 120.0, 130.0) == pytest.approx(0.6)


@pytest.mark.parametrize("totals", [(100.0, 90_000.0), (90_100.0, 20.0)], ids=["held", "observed"])
def test_one_counter_that_fell_is_enough_to_begin_again(totals: tuple[float, float]) -> None:
    counters = Counters()
    counters.cover(WINDOW, 90_000.0, 89_000.0, 0.0)
    counters.cover(WINDOW, *totals, 30.0)
    assert list(counters.samples) == [totals]


def test_totals_that_do_not_move_are_the_same_run() -> None:
    counters = Counters()
    for held, observed in ((90_000.0, 80_000.0), (90_060.0, 80_000.0), (90_060.0, 80_000.0), (90_060.0, 80_060.0)):
        counters.cover(WINDOW, held, observed, 0.0)
    assert list(counters.samples) == [(90_000.0, 80_000.0), (90_060.0, 80_000.0)]


def test_there_is_a_sample_a_minute_and_they_are_bounded_by_the_window() -> None:
    counters = Counters()
    for second in range(0, 100_000, 10):
        counters.cover(WINDOW, float(second), float(second), float(second))
    assert len(counters.samples) == WINDOW / SAMPLE_EACH_S + 1
