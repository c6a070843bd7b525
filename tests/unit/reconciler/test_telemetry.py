"""The reconciler's own metrics, as Prometheus would scrape them."""

from __future__ import annotations

import time

import pytest
from prometheus_client import generate_latest

from gpu_exporter.reconciler import series
from gpu_exporter.reconciler.decision.policy import Decision, Windows
from gpu_exporter.reconciler.decision.surroundings import Surroundings
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.telemetry import Telemetry

A, B = HolderName("kubernetes", "ml", "a"), HolderName("slurm", "", "7")
LAST = "gpu_reconciler_last_success_timestamp_seconds"


def test_an_unknown_stage_on_a_live_object_gets_no_series_of_its_own() -> None:
    telemetry = Telemetry()
    telemetry.note_cycle(0.0, True, {A: "evil0", B: "underused"})
    value = telemetry.registry.get_sample_value
    assert value("gpu_reconciler_labelled", {"stage": "other"}) == 1
    assert value("gpu_reconciler_labelled", {"stage": "underused"}) == 1
    assert value("gpu_reconciler_labelled", {"stage": "evil0"}) is None


def test_the_time_of_the_last_success_is_absent_before_the_first_success() -> None:
    telemetry = Telemetry()
    assert telemetry.registry.get_sample_value(LAST) is None
    telemetry.note_cycle(0.0, False, {})
    assert telemetry.registry.get_sample_value(LAST) is None
    before = time.time()
    telemetry.note_cycle(0.0, True, {})
    first = telemetry.registry.get_sample_value(LAST)
    assert first is not None
    assert before <= first <= time.time()
    telemetry.note_cycle(0.0, False, {})
    assert telemetry.registry.get_sample_value(LAST) == first


def test_counters_have_no_created_series() -> None:
    telemetry = Telemetry()
    telemetry.count_write("written")
    telemetry.note_cycle(0.0, True, {})
    text = generate_latest(telemetry.registry).decode()
    assert 'gpu_reconciler_writes_total{result="written"} 1.0' in text
    assert "_created" not in text


def test_counters_have_every_reason_and_result_from_the_start() -> None:
    telemetry = Telemetry()
    value = telemetry.registry.get_sample_value
    assert value("gpu_reconciler_skipped_total", {"reason": "no_marker"}) == 0
    assert value("gpu_reconciler_writes_total", {"result": "renewed"}) == 0


def test_holders_that_are_candidates_or_more_are_published_until_the_next_cycle() -> None:
    telemetry = Telemetry()
    decisions = [
        Decision(A, "", "candidate", "idle", (), 1, None),
        Decision(B, "", "underused", "idle", (), 1, None),
        Decision(HolderName("kubernetes", "ml", "b"), "", "active", "works", (), 1, None),
    ]
    telemetry.note_cycle(0.0, True, {}, decisions)
    lines = [line for line in generate_latest(telemetry.registry).decode().splitlines() if "allocation_stage{" in line]
    assert lines == [
        'gpu_reconciler_allocation_stage{job_id="",namespace="ml",pod="a",scheduler="kubernetes",stage="candidate"} 1.0',
        'gpu_reconciler_allocation_stage{job_id="7",namespace="",pod="",scheduler="slurm",stage="underused"} 1.0',
    ]
    telemetry.note_cycle(0.0, False, {})
    assert "allocation_stage{" not in generate_latest(telemetry.registry).decode()


def test_the_time_at_which_a_candidate_becomes_underused_is_published() -> None:
    """Not for a candidate that stays one, nor once the time is over."""
    telemetry = Telemetry()
    windows = Windows(1800.0, 7200.0)
    capped = Surroundings(ceiling="an annotation")
    rising = Decision(A, "", "candidate", "idle", (), 1, 1000.0, observed_wall=3000.0, windows=windows)
    telemetry.note_cycle(0.0, True, {}, [rising, rising._replace(name=B, around=capped)])
    head = "gpu_reconciler_allocation_underused_timestamp_seconds{"
    lines = [line for line in generate_latest(telemetry.registry).decode().splitlines() if line.startswith(head)]
    assert lines == [f'{head}job_id="",namespace="ml",pod="a",scheduler="kubernetes"}} 8200.0']
    telemetry.note_cycle(0.0, True, {}, [rising._replace(observed_wall=8200.0)])
    assert head not in generate_latest(telemetry.registry).decode()


def test_too_many_stages_leave_out_candidates_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(series, "STAGES_MAX", 3)
    telemetry = Telemetry()
    stages = ("candidate", "sharing-candidate", "candidate", "underused", "partial")
    decisions = [
        Decision(HolderName("slurm", "", f"{number}"), "", stage, "idle", (), 1, None)
        for number, stage in enumerate(stages)
    ]
    decisions.append(Decision(A, "", "active", "works", (), 1, None, stall="stalled"))
    for _ in range(2):
        telemetry.note_cycle(0.0, True, {}, decisions)
    text = generate_latest(telemetry.registry).decode()
    assert [
        stage for stage in (*stages, "stalled") if f'stage="{stage}"}} 1.0' in text.partition("allocation_stage{")[2]
    ] == [
        "underused",
        "partial",
        "stalled",
    ]
    assert caplog.text.count("some candidates have no series") == 1
