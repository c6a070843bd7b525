"""The ring of the last minutes."""

from __future__ import annotations

from gpu_exporter.ledger.ring import Ring


def test_buckets_hold_the_mean_of_what_they_know() -> None:
    ring = Ring(length_s=5.0, bucket_s=1.0)
    ring.add(100.0, 100.5, 1.0)
    ring.add(100.5, 101.0, 0.0)
    ring.add(101.0, 103.0, 0.25)
    assert ring.values(103.0) == (None, None, 0.5, 0.25, 0.25)


def test_less_than_half_a_bucket_is_unknown() -> None:
    ring = Ring(length_s=2.0, bucket_s=1.0)
    ring.add(100.0, 100.4, 1.0)
    assert ring.values(101.0) == (None, None)


def test_old_values_never_come_back_after_a_silence() -> None:
    ring = Ring(length_s=3.0, bucket_s=1.0)
    ring.add(100.0, 103.0, 1.0)
    ring.add(110.0, 111.0, 0.5)
    assert ring.values(111.0) == (None, None, 0.5)
    assert ring.values(500.0) == (None, None, None)


def test_late_spans_find_their_bucket_and_too_late_ones_none() -> None:
    ring = Ring(length_s=3.0, bucket_s=1.0)
    ring.add(105.0, 106.0, 1.0)
    ring.add(104.0, 105.0, 0.5)
    ring.add(90.0, 91.0, 0.9)
    assert ring.values(106.0) == (None, 0.5, 1.0)
