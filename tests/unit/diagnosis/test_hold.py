"""Publishing of states: a new state must last first, but idleness ends at once."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.holders import HolderKey
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.model.views import Verdict
from gpu_exporter.diagnosis.hold import IDLE_STATES, WEIGHT, StateHold
from gpu_exporter.diagnosis.loop import DiagnosisInput, DiagnosisLoop, Subject
from gpu_exporter.diagnosis.state import Window

ID = (UnitId("GPU-0"), HolderKey("kubernetes", "uid/main"))
HOLD_S, STEP_S = 300.0, 15.0


def published(*judged: tuple[str, int]) -> list[str]:
    """The published state after each (state, number of judgements), with a judgement every 15 s."""
    hold, now, states = StateHold(HOLD_S), 1000.0, []
    for state, looks in judged:
        for _ in range(looks):
            now += STEP_S
            answer = hold.publish(now, {ID: Verdict(state, "")})[ID]
        states.append(answer.state)
    return states


@pytest.mark.parametrize(
    ("judged", "states"),
    [
        ([("healthy", 20), ("healthy", 1)], ["unknown", "healthy"]),
        ([("held_idle", 20), ("held_idle", 1)], ["unknown", "held_idle"]),
        ([("healthy", 21), ("low", 20), ("low", 1)], ["healthy", "healthy", "low"]),
        ([("healthy", 21), ("low", 20), ("healthy", 1), ("low", 20)], ["healthy"] * 4),  # the time begins again
        ([("healthy", 21), ("unknown", 1), ("healthy", 20)], ["healthy", "unknown", "unknown"]),
        ([("held_idle", 21), ("low", 1)], ["held_idle", "low"]),  # it works: it must not be shown as idle
        ([("held_no_process", 21), ("held_idle", 1)], ["held_no_process", "held_idle"]),
        ([("held_idle", 21), ("held_no_process", 20), ("held_no_process", 1)], ["held_idle", "held_idle", "held_no_process"]),
        ([("low", 21), ("held_idle", 20), ("held_idle", 1)], ["low", "low", "held_idle"]),
    ],
)  # fmt: skip
def test_a_state_is_published_after_it_has_lasted(judged: list[tuple[str, int]], states: list[str]) -> None:
    assert published(*judged) == states


def test_a_stall_is_published_at_once_and_so_is_its_end() -> None:
    """The run has already lasted for stalls.after."""
    assert published(("healthy", 21), ("stalled", 1), ("healthy", 1)) == ["healthy", "stalled", "healthy"]


@given(st.lists(st.sampled_from(["unknown", "healthy", "low", "bursty", "held_idle", "held_no_process"]), max_size=60))
def test_no_published_state_is_worse_for_the_holder_than_the_judged_state(judged: list[str]) -> None:
    hold, now = StateHold(HOLD_S), 0.0
    for position, state in enumerate(judged):
        now += STEP_S
        shown = hold.publish(now, {ID: Verdict(state, "")})[ID].state
        assert WEIGHT.get(shown, 0) <= WEIGHT.get(state, 0)
        assert shown == "unknown" if state == "unknown" else True
        if shown in IDLE_STATES:  # it lasted, at least as long as it must
            assert {WEIGHT.get(each, 0) >= WEIGHT[shown] for each in judged[position - 20 : position + 1]} == {True}


def test_a_coming_state_is_announced_and_its_evidence_kept_up_to_date() -> None:
    hold = StateHold(HOLD_S)
    assert hold.publish(0.0, {ID: Verdict("low", "mean 20%")})[ID].state == "unknown"
    announced = hold.publish(75.0, {ID: Verdict("low", "mean 21%")})[ID]
    assert announced == ("unknown", "low (mean 21%) for 1m15s, published after 5m")
    assert hold.publish(300.0, {ID: Verdict("low", "mean 22%")})[ID] == ("low", "mean 22%")
    assert hold.publish(315.0, {ID: Verdict("low", "mean 23%")})[ID] == ("low", "mean 23%")
    assert hold.publish(330.0, {ID: Verdict("healthy", "mean 60%")})[ID] == ("low", "mean 23%")


def test_the_state_of_an_ended_allocation_is_forgotten() -> None:
    hold = StateHold(HOLD_S)
    for now in range(0, 400, 15):
        hold.publish(float(now), {ID: Verdict("low", "")})
    assert hold.publish(400.0, {}) == {}
    assert hold.publish(415.0, {ID: Verdict("low", "")})[ID].state == "unknown"


def test_after_a_failed_judgement_no_verdict_remains(caplog: pytest.LogCaptureFixture) -> None:
    stop = threading.Event()
    subject = Subject(ID, "", Window((0.5,) * 600, 600.0, 0.0))
    shown: list[str] = []

    def gather() -> DiagnosisInput:
        shown.append(loop.findings.verdicts[ID].state if ID in loop.findings.verdicts else "none")
        if len(shown) == 23:
            stop.set()
            raise ZeroDivisionError("a bug")
        return DiagnosisInput([], [subject])

    loop = DiagnosisLoop(Settings(), gather, ManualClock())
    loop.run(stop)
    assert (shown[0], shown[1], shown[-1], loop.findings.verdicts) == ("none", "unknown", "low", {})
    assert "the task diagnosis failed" in caplog.text


def test_the_reason_of_an_unknown_state_is_published() -> None:
    clock = ManualClock()
    subject = Subject(ID, "the GPU does not answer", Window((0.0,) * 600, 600.0, 600.0))
    loop = DiagnosisLoop(Settings(), lambda: DiagnosisInput([], [subject]), clock)
    loop.judge()
    assert loop.findings.verdicts == {ID: Verdict("unknown", "the GPU does not answer")}
