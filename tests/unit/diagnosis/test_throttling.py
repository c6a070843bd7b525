"""The share of the last window in which a GPU was slowed down."""

from __future__ import annotations

from gpu_exporter.diagnosis.throttling import ThrottleHistory
from gpu_exporter.model.readings import DeviceSnapshot, Facts
from gpu_exporter.model.units import DeviceIdentity

GPU = DeviceIdentity(0, "GPU-0", "H100", "550", "0000:3b:00.0", 0)


def look(history: ThrottleHistory, at: float, **counters: float) -> None:
    history.add(DeviceSnapshot(GPU, at, at, True, facts=Facts(throttle_s=counters)))


def test_the_worst_of_the_harmful_reasons_and_its_share() -> None:
    history = ThrottleHistory(600.0)
    look(history, 0.0, thermal=5.0, hw_thermal=0.0, power_cap=100.0)
    assert history.worst() is None, "one reading of a counter says nothing of a share"
    look(history, 100.0, thermal=15.0, hw_thermal=40.0, power_cap=200.0)
    assert history.worst() == ("hw_thermal", 0.4)


def test_what_is_older_than_the_window_no_longer_counts() -> None:
    history = ThrottleHistory(600.0)
    for at in range(0, 1201, 10):
        look(history, float(at), thermal=min(float(at), 300.0))
    assert history.worst() == ("thermal", 0.0)


def test_counters_that_are_no_longer_read_end_in_not_known() -> None:
    history = ThrottleHistory(600.0)
    look(history, 0.0, thermal=0.0)
    look(history, 100.0, thermal=90.0)
    look(history, 500.0)
    assert history.worst() == ("thermal", 0.9)
    look(history, 701.0)
    assert history.worst() is None


def test_a_counter_that_fell_says_nothing_of_this_window() -> None:
    history = ThrottleHistory(600.0)
    look(history, 0.0, thermal=50.0, hw_thermal=1.0)
    look(history, 100.0, thermal=0.0, hw_thermal=3.0)
    assert history.worst() == ("hw_thermal", 0.02)
