"""The driver's ring: an entry covers its period, a lost entry leaves a hole, and the busier of two duplicates counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.devices.protocol import UtilizationSample
from gpu_exporter.agent.sampling.activity.driver_ring import LATENESS, RING_AGE_MAX_S, DriverRing, RingPeriod, agreeing
from gpu_exporter.common.model.readings import Span

WALL = 1_700_000_000.0


def entries(*pairs: tuple[float, float]) -> list[UtilizationSample]:
    return [UtilizationSample(WALL + t, ratio) for t, ratio in pairs]


def read(ring: DriverRing, now: float, *pairs: tuple[float, float]) -> list[tuple[float, float, float]]:
    spans = ring.read(entries(*pairs), now, WALL + now)
    return [(round(s.start, 3), round(s.end, 3), s.ratio) for s in spans]


@pytest.fixture
def ring() -> DriverRing:
    """A ring of 0.2 s periods, read up to 10 s."""
    ring = DriverRing(1.0)
    read(ring, 10.0, *((9.0 + i / 5, 0.0) for i in range(6)))
    return ring


@pytest.mark.parametrize("lost", [1, 2, 3, 4])
def test_a_lost_entry_leaves_a_hole(ring: DriverRing, lost: int) -> None:
    stamp = 10.0 + 0.2 * (lost + 1)
    ((start, end, _),) = read(ring, 11.0, (stamp, 0.0))
    assert end == pytest.approx(stamp)
    assert end - start == pytest.approx(LATENESS * 0.2, abs=1e-3)


def test_the_period_is_learned_though_most_entries_are_lost() -> None:
    period = RingPeriod(1.0)
    period.learn([0.4, 0.6, 0.2, 0.8, 0.4, 0.2, 0.6, 0.2])
    assert period.seconds == 0.2


@pytest.mark.parametrize(
    ("spacings", "seconds"),
    [
        ([], 1.0),
        ([20.0], 1.0),
        ([0.0, -3.0], 1.0),
        ([1.05], 1.0),
        ([0.19, 0.2, 0.21, 0.2, 0.22], 0.2),
        ([1 / 6] * 40, 1 / 6),
    ],
    ids=["nothing", "a hole", "no time", "at most the longest", "jitter", "steady"],
)
def test_the_period_is_learned_from_the_distances(spacings: list[float], seconds: float) -> None:
    period = RingPeriod(1.0)
    period.learn(spacings)
    assert period.seconds == pytest.approx(seconds)


def test_the_learned_period_follows_a_driver_that_changes_it() -> None:
    period = RingPeriod(1.0)
    period.learn([0.2] * 32)
    period.learn([0.5] * 32)
    assert period.seconds == 0.5
    period.learn([0.2] * 10)
    assert period.seconds == 0.2  # shorter at once: an entry never covers more than the shorter period


@pytest.mark.parametrize("order", [(0.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("apart", [0.0, 1e-6, 0.05])
def test_the_busiest_of_several_entries_for_one_time_counts(
    ring: DriverRing, order: tuple[float, float], apart: float
) -> None:
    first, second = order
    spans = read(ring, 11.0, (10.2, first), (10.2 + apart, second), (10.4, 0.0))
    assert [ratio for _, _, ratio in spans] == [1.0, 0.0]
    assert spans[0][0] == pytest.approx(10.0, abs=0.05)


def test_a_duplicate_with_an_invalid_share_hides_no_work_and_proves_no_idleness(ring: DriverRing) -> None:
    assert read(ring, 10.2, (10.2, 0.0), (10.2, 42_949_672.95)) == []
    assert read(ring, 10.4, (10.4, 0.5), (10.4, 42_949_672.95)) == [(10.2, 10.4, 0.5)]
    assert read(ring, 10.6, (10.6, -1.0), (10.6, 0.0)) == []
    assert read(ring, 10.8, (10.8, 0.0)) == [(10.6, 10.8, 0.0)]  # and the next entry does not cover its time


@pytest.mark.parametrize("stamp", [10.0, 10.05])
def test_a_duplicate_that_comes_a_cycle_late_contradicts_a_zero_that_was_read(ring: DriverRing, stamp: float) -> None:
    read(ring, 10.5, (stamp, 0.0))
    assert not ring.contradicted
    read(ring, 10.6, (stamp, 1.0))
    assert ring.contradicted
    read(ring, 10.7, (10.4, 0.0))
    assert not ring.contradicted


def test_an_entry_that_was_read_as_work_is_not_contradicted_by_itself(ring: DriverRing) -> None:
    read(ring, 10.5, (10.2, 1.0))
    read(ring, 10.6, (10.2, 1.0))
    assert not ring.contradicted
    read(ring, 10.8, (10.4, 0.0), (10.6, 1.0))
    assert not ring.contradicted  # rest is not contradicted by later work either


def test_the_reported_length_of_an_entry_is_used(ring: DriverRing) -> None:
    spans = ring.read([UtilizationSample(WALL + 10.9, 0.5, 0.8)], 11.0, WALL + 11.0)
    assert [(round(s.start, 3), round(s.end, 3)) for s in spans] == [(10.1, 10.9)]


def test_an_entry_covers_at_most_the_longest_period(ring: DriverRing) -> None:
    (span,) = ring.read([UtilizationSample(WALL + 30.0, 0.5, 5.0)], 30.0, WALL + 30.0)
    assert span.end - span.start == pytest.approx(LATENESS)


def test_ring_entries_from_before_the_start_are_not_booked() -> None:
    ring = DriverRing(1.0)
    assert read(ring, 10.0, (9.8, 1.0)) == []
    assert read(ring, 10.2, (10.0, 0.0), (10.2, 0.0)) == [(9.8, 10.0, 0.0), (10.0, 10.2, 0.0)]


def test_a_stamp_older_than_any_ring_keeps_is_ignored(ring: DriverRing) -> None:
    now = 10.0 + RING_AGE_MAX_S + 20.0
    assert read(ring, now, (11.0, 0.0), (now - RING_AGE_MAX_S - 0.1, 0.0)) == []
    assert len(read(ring, now, (now - RING_AGE_MAX_S + 0.1, 0.0))) == 1


def test_after_a_clock_was_set_back_stamps_are_used_again_once_no_ring_keeps_old_ones(ring: DriverRing) -> None:
    """The clock was set back an hour: two minutes later the ring has no entry from before."""
    back = WALL - 3600.0
    ring.restart(back + 11.0)

    def step(now: float) -> int:
        stamps = [UtilizationSample(back + now - 0.2 * i, 0.0) for i in range(5)]
        return len(ring.read(stamps, now, back + now))

    assert [step(now) for now in (12.0, 60.0, 11.0 + RING_AGE_MAX_S)] == [0, 0, 0]
    assert step(12.0 + RING_AGE_MAX_S) == 5


RATE = ("utilization",)
QUIET, WORK = Span(9.6, 9.8, 0.0), Span(9.4, 9.6, 0.7)
NEWEST = Span(9.8, 10.0, 0.0)


@pytest.mark.parametrize(
    ("spans", "doubted"),
    [
        ((QUIET, NEWEST), [RATE, RATE]),  # nothing explains the reported work
        ((WORK, QUIET, NEWEST), [(), (), RATE]),  # the work before explains it, except for the newest entry
        ((Span(8.0, 8.2, 0.0), QUIET, NEWEST), [(), RATE, RATE]),  # the rate covers 1.1 s
        ((Span(8.0, 8.2, 0.7), QUIET, NEWEST), [(), RATE, RATE]),
        ((), []),
    ],
)
def test_a_reported_rate_of_work_contradicts_the_zeros_of_its_time(
    spans: tuple[Span, ...], doubted: list[tuple[str, ...]]
) -> None:
    assert [span.other for span in agreeing(spans, 10.0, 1.1)] == doubted


@given(
    st.lists(st.tuples(st.floats(-5, 40), st.sampled_from([0.0, 0.3, 1.0, -1.0, 4e7])), max_size=60),
    st.lists(st.floats(0, 3), min_size=1, max_size=12),
)
def test_spans_never_overlap_nor_reach_beyond_a_period_nor_into_the_future(
    pairs: list[tuple[float, float]], steps: list[float]
) -> None:
    ring, now, covered = DriverRing(1.0), 0.0, float("-inf")
    for step in steps:
        now += step
        spans: tuple[Span, ...] = ring.read(entries(*(p for p in pairs if p[0] <= now)), now, WALL + now)
        for span in spans:
            assert covered - 1e-5 <= span.start < span.end <= now + 0.05 + 1e-5
            assert span.end - span.start <= LATENESS + 1e-5
            assert 0.0 <= span.ratio <= 1.0
            covered = span.end


def test_consecutive_entries_with_equal_values_are_one_span(ring: DriverRing) -> None:
    assert read(ring, 11.0, *((10.0 + i / 5, 0.0) for i in range(1, 6))) == [(10.0, 11.0, 0.0)]
    assert ring.is_gapless
    assert read(ring, 11.4, (11.2, 0.0), (11.4, 0.5)) == [(11.0, 11.2, 0.0), (11.2, 11.4, 0.5)]
    assert ring.is_gapless


@pytest.mark.parametrize(
    "answer",
    [[(10.4, 0.0), (10.6, 0.0)], [(10.2, 0.0), (10.6, 0.0)], [(10.2, 0.0), (10.4, 2.0)], []],
    ids=["begins late", "lost within", "no share", "empty"],
)
def test_a_ring_with_a_hole_is_not_gapless(ring: DriverRing, answer: list[tuple[float, float]]) -> None:
    read(ring, 10.6, *answer)
    assert not ring.is_gapless


def test_the_length_of_a_ring_is_learned_when_all_entries_are_read(ring: DriverRing) -> None:
    assert ring.length_s == pytest.approx(1.0)
    read(ring, 16.0, *((8.0 + i / 5, 0.0) for i in range(41)))  # all entries were requested
    assert ring.length_s == pytest.approx(8.0)
    read(ring, 17.0, *((16.0 + i / 5, 0.0) for i in range(1, 6)))
    assert ring.length_s == pytest.approx(8.0)
    read(ring, 30.0, *((27.0 + i / 5, 0.0) for i in range(16)))  # earlier entries are lost: the ring may keep no more
    assert ring.length_s == pytest.approx(3.0)


def test_a_step_of_the_clock_does_not_change_the_length_of_a_ring() -> None:
    ring = DriverRing(1.0)
    read(ring, 4000.0, *((9.0 + i / 5, 0.0) for i in range(6)), *((3999.0 + i / 5, 0.0) for i in range(6)))
    assert ring.length_s == pytest.approx(1.0)
