"""The state of an allocation: unknown is checked first."""

from __future__ import annotations

import pytest

from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.model.views import HourOfWork
from gpu_exporter.diagnosis.state import StateRules, Window, judge_state

RULES = StateRules(600.0, 0.8, 0.5, 0.1, 0.7, 0.1, 0.25, 0.5, 3600.0)


@pytest.mark.parametrize(
    ("window", "state"),
    [
        (Window((), 600.0, 0.0), "unknown"),
        (Window((0.0,) * 10, 479.0, 479.0), "unknown"),
        (Window((None,) * 10, 600.0, 5000.0), "unknown"),
        (Window((0.0,) * 7 + (None,) * 3, 600.0, 5000.0), "unknown"),
        (Window((0.0,) * 10, 600.0, 0.0), "unknown"),
        (Window((0.0,) * 10, 600.0, None), "unknown"),
        (Window((0.0,) * 10, 600.0, 120.0), "unknown"),  # the encoder worked until two minutes ago
        (Window((0.0,) * 10, 600.0, 584.0, processes=0.0), "unknown"),
        (Window((0.0,) * 10, 600.0, 585.0, processes=0.0), "held_no_process"),  # the last poll is 15 s behind at most
        (Window((0.0,) * 10, 90_000.0, 585.0), "held_idle"),
        (Window((0.0,) * 8, 480.0, 465.0), "held_idle"),  # seen for the whole window
        (Window((0.0,) * 8, 480.0, 464.0), "unknown"),
        (Window((0.0,) * 9 + (None,), 600.0, 525.0), "held_idle"),  # a tenth of the window is unknown
        (Window((0.0,) * 9 + (None,), 600.0, 524.0), "unknown"),
        (Window((0.0,) * 10, 600.0, 600.0, processes=0.0), "held_no_process"),
        (Window((0.0,) * 10, 600.0, 600.0, processes=1.0), "held_idle"),
        (Window((0.0,) * 10, 600.0, 600.0, processes=None), "held_idle"),
        (Window((0.9,) * 10, 600.0, 0.0, throttled_share=0.3, throttled_reason="hw_thermal"), "throttled"),
        (Window((0.9,) * 10, 600.0, 0.0, throttled_share=0.05, throttled_reason="hw_thermal"), "healthy"),
        (Window((0.0,) * 5 + (0.9,) * 5, 600.0, 0.0), "bursty"),
        (Window((0.2,) * 10, 600.0, 0.0), "low"),
        (Window((0.51,) * 10, 600.0, 0.0), "healthy"),
    ],
)
def test_the_state_follows_from_the_window(window: Window, state: str) -> None:
    assert judge_state(window, RULES).state == state


@pytest.mark.parametrize(
    ("window", "evidence"),
    [
        (Window((None,) * 10, 600.0, 600.0), "no source of activity"),
        (Window((0.0,) * 5 + (None,) * 5, 600.0, 600.0), "only 50% of the window is known"),
        (
            Window((0.9,) * 10, 600.0, 0.0, throttled_share=0.3, throttled_reason="sw_power"),
            "sw_power for 30% of the time",
        ),
        (Window((0.0,) * 5 + (0.9,) * 5, 600.0, 0.0), "p5 0%, p95 90%, mean 45%"),
        (Window((0.0,) * 39 + (0.9,), 600.0, 0.0), "mean 2%"),  # one in forty is above the 95th percentile
        (Window((0.2,) * 10, 600.0, 0.0), "mean 20%"),
        (Window((0.6,) * 10, 600.0, 0.0), "mean 60%"),
        (Window((0.0,) * 10, 600.0, 600.0, processes=0.0), "idle for 10m, no process on the GPU"),
        (Window((0.0,) * 10, 600.0, 600.0), "idle for 10m"),
    ],
)
def test_each_state_has_its_evidence(window: Window, evidence: str) -> None:
    assert judge_state(window, RULES).evidence == evidence


@pytest.mark.parametrize(
    ("hour", "state"),
    [
        (HourOfWork(0.9, 0.2, 0.4), "busy_inefficient"),
        (HourOfWork(0.9, 0.25, 0.4), "healthy"),  # enough SMs have work
        (HourOfWork(0.9, 0.2, 0.5), "healthy"),  # its kernels wait for memory
        (HourOfWork(0.5, 0.2, 0.4), "healthy"),  # it was not busy for the whole hour
        (None, "healthy"),
    ],
)
def test_a_busy_gpu_is_inefficient_if_few_sms_have_work_and_its_memory_is_no_reason(
    hour: HourOfWork | None, state: str
) -> None:
    assert judge_state(Window((0.9,) * 10, 600.0, 0.0, hour=hour), RULES).state == state


def test_a_zero_that_another_witness_contradicts_is_unknown_with_that_reason() -> None:
    verdict = judge_state(Window((0.0,) * 10, 600.0, idle_run_s=0.0), RULES)
    assert verdict.evidence == "utilization 0, but not all witnesses are known"
    named = judge_state(Window((0.0,) * 10, 600.0, idle_run_s=0.0, active_by=("pcie", "power")), RULES)
    assert named.evidence == "utilization 0, but pcie and power showed activity"


def test_a_zero_with_work_of_another_witness_in_the_window_shows_the_quiet_time() -> None:
    """An encoder that works 80 % of the time leaves utilization at 0 and short runs of idleness."""
    verdict = judge_state(Window((0.0,) * 10, 600.0, idle_run_s=12.0), RULES)
    assert verdict == ("unknown", "utilization 0, but idle only for 12s: the time before the idle time is unknown")
    named = judge_state(Window((0.0,) * 10, 600.0, idle_run_s=12.0, active_by=("encoder",)), RULES)
    assert named.evidence == "utilization 0, but idle only for 12s: encoder showed activity before"


def test_a_new_holder_is_not_judged() -> None:
    """Four idle seconds are no state: every starting pod looks like that."""
    verdict = judge_state(Window((0.0,) * 4, 4.0, 4.0), RULES)
    assert (verdict.state, verdict.evidence) == ("unknown", "seen for only 4s; a state needs 10m")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59, "59s"),
        (75, "1m15s"),
        (7500, "2h5m"),
        (90_000, "1d1h"),
        (10_824, "3h"),
        (3_600, "1h"),
        (8_640_000, "100d"),
    ],
)
def test_durations_are_described_by_their_two_largest_units(seconds: float, text: str) -> None:
    assert describe_duration(seconds) == text
