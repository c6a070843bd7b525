"""The ring of a unit's last minutes."""

from __future__ import annotations

import pytest

from gpu_exporter.agent.ledger.ring import Ring


def test_buckets_contain_the_mean_of_their_known_time() -> None:
    ring = Ring(length_s=5.0, bucket_s=1.0)
    ring.add(100.0, 100.5, 1.0)
    ring.add(100.5, 101.0, 0.0)
    ring.add(101.0, 103.0, 0.25)
    assert ring.values(103.0) == (None, None, 0.5, 0.25, 0.25)


def test_a_span_is_spread_over_its_buckets_by_time() -> None:
    ring = Ring(length_s=12.0, bucket_s=4.0)
    ring.add(400.0, 402.0, 0.0)
    ring.add(402.0, 407.0, 1.0)
    ring.add(407.0, 408.0, 0.0)
    ring.add(408.0, 412.0, 0.5)
    assert ring.values(412.0) == (0.5, 0.75, 0.5)


@pytest.mark.parametrize("bucket_s", [0.25, 1.0, 4.0])
@pytest.mark.parametrize(("known", "value"), [(0.4, None), (0.5, 0.5)])
def test_a_bucket_is_unknown_if_less_than_half_of_it_is_known(
    bucket_s: float, known: float, value: float | None
) -> None:
    ring = Ring(length_s=2.0 * bucket_s, bucket_s=bucket_s)
    ring.add(100.0, 100.0 + known * bucket_s, 0.5)
    assert ring.values(100.0 + bucket_s) == (None, value)


@pytest.mark.parametrize(
    ("length_s", "values"), [(None, (1, 2, 3)), (0.0, ()), (3.9, ()), (4.0, (3,)), (11.0, (2, 3)), (99.0, (1, 2, 3))]
)
def test_the_requested_number_of_whole_buckets_is_shown(length_s: float | None, values: tuple[int, ...]) -> None:
    ring = Ring(length_s=12.0, bucket_s=4.0)
    for number in range(4):
        ring.add(400.0 + 4.0 * number, 404.0 + 4.0 * number, number / 4)
    assert ring.values(416.0, length_s) == tuple(value / 4 for value in values)
    assert len(Ring(length_s=1.0, bucket_s=4.0).values(416.0)) == 1


def test_time_begins_at_0_and_no_bucket_exceeds_1() -> None:
    ring = Ring(length_s=3.0, bucket_s=1.0)
    ring.add(0.0, 1.0, 1.5)
    assert ring.values(1.0) == (None, None, 1.0)


def test_old_values_never_return_after_a_pause() -> None:
    ring = Ring(length_s=3.0, bucket_s=1.0)
    ring.add(100.0, 103.0, 1.0)
    ring.add(110.0, 111.0, 0.5)
    assert ring.values(111.0) == (None, None, 0.5)
    assert ring.values(500.0) == (None, None, None)
    for second in range(111, 120):
        ring.add(second, second + 0.75, 1.0)
    assert ring.values(120.0) == (1.0, 1.0, 1.0)
    for second in range(120, 129):
        ring.add(second, second + 0.75, 0.0)
    assert ring.values(129.0) == (0.0, 0.0, 0.0)
    assert {ring.values(float(now)) for now in range(132, 140)} == {(None, None, None)}


def test_late_spans_are_added_to_their_bucket_and_too_late_spans_are_dropped() -> None:
    ring = Ring(length_s=3.0, bucket_s=1.0)
    ring.add(105.0, 106.0, 1.0)
    ring.add(104.0, 105.0, 0.5)
    for second in range(90, 101):
        ring.add(second, second + 1.0, 0.9)
    assert ring.values(106.0) == (None, 0.5, 1.0)
