"""Coverage means the same for every source, and is never more than the observed share."""

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
        ((90_000.0, 10_000.0), (7200.0, 7200.0), 1.0),  # unobserved time long before the window does not count
        ((90_000.0, 86_760.0), (7200.0, 3960.0), 0.55),
        ((3600.0, 3240.0), (3600.0, 3240.0), 0.9),  # held for less than the window
        ((90_000.0, 86_400.0), (0.0, 0.0), 0.5),  # one sample: all unobserved time may lie in the window
        ((90_000.0, 10_000.0), (0.0, 0.0), 0.0),
        ((90_000.0, 90_000.0), (0.0, 0.0), 1.0),
        ((90_000.0, 88_920.0), (3600.0, 3600.0), 0.85),  # 1080 s unobserved, before the samples
        ((90_000.0, 10_000.0), (3600.0, 3600.0), 0.5),
        ((90_000.0, 88_920.0), (3600.0, 3240.0), 0.85),
        ((600.0, 500.0), (7200.0, 7000.0), 7000 / 7200),  # the counters were reset within the window
        ((600.0, 700.0), (0.0, 0.0), 1.0),
        ((0.0, 0.0), (0.0, 0.0), None),
        ((math.nan, 5.0), (0.0, 0.0), None),
        ((600.0, math.nan), (0.0, 0.0), None),
    ],
)
def test_coverage_by_totals_and_increases(
    totals: tuple[float, float], increases: tuple[float, float], share: float | None
) -> None:
    assert coverage(WINDOW, *totals, *increases) == (None if share is None else pytest.approx(share))


SPANS = st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=12)


@given(SPANS, st.integers(0, 40_000))
def test_coverage_never_exceeds_the_observed_share_and_is_exact_over_a_whole_window(
    spans: list[tuple[int, bool]], reach: int
) -> None:
    """`spans`: lengths of time with and without observation. `reach`: how far back the samples go."""
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
    """The samples (time, held, observed) of an exporter that comes and goes, read every 30 s while it answers.

    While the exporter is away, held time grows and observed time does not.
    """
    observed = 0
    for now in range(until_s):
        is_on = now % (on_s + off_s) < on_s
        observed += is_on
        if is_on and now % each_s == 0:
            yield float(now), float(now + 1), float(observed)


def test_coverage_of_an_exporter_that_flaps_is_the_share_of_its_uptime() -> None:
    counters = Counters()
    shares = [counters.cover(WINDOW, held, observed, now) for now, held, observed in flapping(70, 50, 14_400)]
    assert max(share or 0.0 for share in shares[10:]) < 0.65
    assert shares[-1] == pytest.approx(70 / 120, abs=0.01)


def test_a_reader_that_starts_late_computes_no_higher_coverage_than_an_older_reader() -> None:
    """The holder was observed for a day but not in the last two hours. The day must not hide this from a new reader."""
    late, there = Counters(), Counters()
    for minute in range(1440 + 121):
        held, observed = minute * 60.0, min(minute, 1440) * 60.0
        share = there.cover(WINDOW, held, observed, 0.0)
    assert share == pytest.approx(0.0)
    assert late.cover(WINDOW, held, observed, 0.0) == pytest.approx(0.0)
    for minute in range(1, 61):
        share = late.cover(WINDOW, held + minute * 60.0, observed + minute * 60.0, 0.0)
    assert share == pytest.approx(0.5)


def test_counters_are_not_compared_across_a_reset() -> None:
    counters = Counters()
    counters.cover(WINDOW, 90_000.0, 90_000.0, 0.0)
    assert counters.cover(WINDOW, 100.0, 20.0, 30.0) == pytest.approx(0.2)
    assert counters.cover(WINDOW, 200.0, 120.0, 130.0) == pytest.approx(0.6)


@pytest.mark.parametrize("totals", [(100.0, 90_000.0), (90_100.0, 20.0)], ids=["held", "observed"])
def test_one_counter_that_fell_is_enough_for_a_reset(totals: tuple[float, float]) -> None:
    counters = Counters()
    counters.cover(WINDOW, 90_000.0, 89_000.0, 0.0)
    counters.cover(WINDOW, *totals, 30.0)
    assert list(counters.samples) == [totals]


def test_totals_that_do_not_grow_are_no_reset() -> None:
    counters = Counters()
    for held, observed in ((90_000.0, 80_000.0), (90_060.0, 80_000.0), (90_060.0, 80_000.0), (90_060.0, 80_060.0)):
        counters.cover(WINDOW, held, observed, 0.0)
    assert list(counters.samples) == [(90_000.0, 80_000.0), (90_060.0, 80_000.0)]


def test_one_sample_per_minute_is_kept_and_only_for_the_window() -> None:
    counters = Counters()
    for second in range(0, 100_000, 10):
        counters.cover(WINDOW, float(second), float(second), float(second))
    assert len(counters.samples) == WINDOW / SAMPLE_EACH_S + 1
