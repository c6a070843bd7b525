"""How often a node asks the controller: about once a minute, at once after a change, and in a limited number."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.attribution.slurm.pace import BACKOFF_S, BURST, INTERVAL_MAX_S, SOON_S, Pace


def make(spread: float = 0.0, each_s: float = 60.0) -> Pace:
    """A Pace that has just asked, at time 0."""
    pace = Pace(each_s, lambda: spread)
    assert pace.is_due(0.0, changed=False)
    pace.answered(0.0, 0.0, unsettled=False)
    return pace


@pytest.mark.parametrize(("spread", "next_s"), [(0.0, 60.0), (0.5, 75.0), (1.0, 90.0)])
def test_nodes_ask_at_different_times_within_an_interval(spread: float, next_s: float) -> None:
    pace = make(spread)
    assert not pace.is_due(next_s - 0.1, changed=False)
    assert pace.is_due(next_s, changed=False)
    assert pace.interval_s == next_s


def test_a_change_is_asked_about_at_once_but_not_a_flood_of_changes() -> None:
    pace = make()
    asked = 0
    for step in range(1, 721):  # an hour with jobs that last five seconds
        if pace.is_due(5.0 * step, changed=True):
            asked += 1
            pace.answered(5.0 * step, 0.0, unsettled=False)
    assert 60 <= asked <= BURST + 2 * 60


def test_a_slow_controller_is_asked_less_often_but_still_asked() -> None:
    pace = make()
    pace.answered(0.0, 0.8, unsettled=False)
    assert pace.interval_s == 80.0
    pace.answered(0.0, 9.0, unsettled=False)
    assert pace.interval_s == INTERVAL_MAX_S


def test_the_wait_after_a_failed_question_grows_with_each_failure() -> None:
    pace = make()
    waits = []
    for _ in range(7):
        pace.failed(0.0)
        waits.append(pace.interval_s)
    assert waits == [BACKOFF_S, 30.0, 60.0, 120.0, 240.0, 240.0, 240.0]
    pace.answered(0.0, 0.0, unsettled=False)
    pace.failed(0.0)
    assert pace.interval_s == BACKOFF_S


def test_nodes_that_fail_together_retry_at_different_times() -> None:
    pace = make(spread=1.0)
    pace.failed(0.0)
    assert pace.interval_s == 1.5 * BACKOFF_S


def test_an_unsettled_answer_is_asked_again_soon_and_then_at_growing_intervals() -> None:
    pace = make()
    waits = []
    for _ in range(6):
        pace.answered(0.0, 0.0, unsettled=True)
        waits.append(pace.interval_s)
    assert waits == [SOON_S, 10.0, 20.0, 40.0, 60.0, 60.0]
    pace.answered(0.0, 0.0, unsettled=False)
    pace.answered(0.0, 0.0, unsettled=True)
    assert pace.interval_s == SOON_S


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["ok", "moving", "fails"])), max_size=400))
def test_the_next_question_is_never_later_than_the_longest_interval(polls: list[tuple[bool, str]]) -> None:
    pace = Pace(60.0, random.Random(1).random)
    last = 0.0
    for step, (changed, result) in enumerate(polls):
        now = 5.0 * step
        if pace.is_due(now, changed):
            last = now
            pace.failed(now) if result == "fails" else pace.answered(now, 0.0, unsettled=result == "moving")
        assert now - last <= INTERVAL_MAX_S


@given(st.lists(st.booleans(), max_size=800))
def test_any_number_of_changes_leads_to_two_questions_a_minute_at_most_in_the_long_run(changes: list[bool]) -> None:
    pace = Pace(60.0, random.Random(1).random)
    asked = 0
    for step, changed in enumerate(changes):
        if pace.is_due(5.0 * step, changed):
            asked += 1
            pace.answered(5.0 * step, 0.0, unsettled=False)
    assert asked <= 1 + BURST + 2 * 5.0 * len(changes) / 60.0
