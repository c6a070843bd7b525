"""The share of the last window in which a GPU was slowed down."""

from __future__ import annotations

from gpu_exporter.common.model.readings import DeviceSnapshot, Facts
from gpu_exporter.common.model.units import DeviceIdentity
from gpu_exporter.diagnosis.throttling import ThrottleHistory

GPU = DeviceIdentity(0, "GPU-0", "H100", "550", "0000:3b:00.0", 0)


def look(history: ThrottleHistory, at: float, **counters: float) -> None:
    history.add(DeviceSnapshot(GPU, at, at, True, facts=Facts(throttle_s=counters)))


def test_the_worst_harmful_throttle_reason_is_found_with_its_share() -> None:
    history = ThrottleHistory(600.0)
    look(history, 0.0, thermal=5.0, hw_thermal=0.0, power_cap=100.0)
    assert history.worst() is None, "a share needs two readings of the counter"
    look(history, 100.0, thermal=15.0, hw_thermal=40.0, power_cap=200.0)
    assert history.worst() == ("hw_thermal", 0.4)


def test_throttling_before_the_window_is_ignored() -> None:
    history = ThrottleHistory(600.0)
    for at in range(0, 1201, 10):
        look(history, float(at), thermal=min(float(at), 300.0))
    assert history.worst() == ("thermal", 0.0)


def test_throttling_is_unknown_after_its_counters_are_no_longer_read() -> None:
    history = ThrottleHistory(600.0)
    look(history, 0.0, thermal=0.0)
    look(history, 100.0, thermal=90.0)
    look(history, 500.0)
    assert history.worst() == ("thermal", 0.9)
    look(history, 701.0)
    assert history.worst() is None


def test_a_throttle_counter_that_fell_is_ignored_in_this_window() -> None:
    history = ThrottleHistory(600.0)
    look(history, 0.0, thermal=50.0, hw_thermal=1.0)
    look(history, 100.0, thermal=0.0, hw_thermal=3.0)
    assert history.worst() == ("hw_thermal", 0.02)
