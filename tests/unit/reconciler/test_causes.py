"""Causes of low utilization as the reconciler reads and explains them."""

from __future__ import annotations

import json

import pytest
from tests.unit.reconciler.sources_bench import NOW, PLACE, FakeApi, page, read

from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.model.causes import OF_TRAINING
from gpu_exporter.diagnosis.causes.rules import RULES
from gpu_exporter.reconciler.decision.policy import decide, merge_units
from gpu_exporter.reconciler.decision.surroundings import Surroundings
from gpu_exporter.reconciler.evidence.causes import CAUSES_MAX, STATUS_MAX, TEXT_MAX, parse_causes
from gpu_exporter.reconciler.evidence.exporters import ExporterSource, parse_exporter
from gpu_exporter.reconciler.evidence.records import HolderName, PublishedCause, UnitEvidence
from gpu_exporter.reconciler.report import explain

QUOTA = {
    "name": "cpu_quota",
    "confidence": "high",
    "evidence": "its quota ran out",
    "against": "a hint",
    "advice": "ask for more CPUs",
    "gain": "",
}
JOB = HolderName("slurm", "", "42")
HELD = {"uuid": "GPU-0", "mig": "", "scheduler": "slurm", "job_id": "42"}
STATUS = {"allocations": [7, {**HELD, "job_id": "43", "causes": []}, {**HELD, "causes": [QUOTA]}]}


def with_cause(text: str, cause: str = "cpu_quota", confidence: str = "high") -> str:
    return f'{text}gpu_allocation_cause{{{PLACE},cause="{cause}",confidence="{confidence}"}} 1\n'


def source(text: str, status: str = json.dumps(STATUS)) -> ExporterSource:
    def fetch(address: Address) -> str:
        return status if address.path == "/api/v1/status" else text

    return ExporterSource([parse_exporter("n1:9836")], 7200.0, ManualClock(wall=NOW), fetch)


def causes_of(text: str) -> tuple[PublishedCause, ...]:
    (holder,) = source(text).read_evidence().holders
    return holder.units[0].causes


def test_both_sources_read_the_published_causes() -> None:
    text = page(8000.0, 9000.0, 8900.0)
    assert causes_of(text) == ()
    assert causes_of(with_cause(text)) == (PublishedCause("cpu_quota", "high"),)
    api = FakeApi()
    api.more["gpu_allocation_cause"] = [({"cause": "starting", "confidence": "medium"}, 1.0)]
    (holder,) = read(api).holders
    assert holder.units[0].causes == (PublishedCause("starting", "medium"),)


@pytest.mark.parametrize(
    ("cause", "confidence"), [("x" * 41, "high"), ("Bad Name", "high"), ("", "high"), ("cpu_quota", "certain")]
)
def test_a_malformed_cause_is_left_out(cause: str, confidence: str) -> None:
    assert causes_of(with_cause(page(8000.0, 9000.0, 8900.0), cause, confidence)) == ()


def test_many_causes_of_one_allocation_are_bounded() -> None:
    text = page(8000.0, 9000.0, 8900.0)
    for number in range(100):
        text = with_cause(text, f"cause_{'x' * (number % 30)}")
    assert len(causes_of(text)) == 8


def test_two_targets_of_one_gpu_add_their_causes_once() -> None:
    unit = UnitEvidence("n1", "0", "GPU-0", "", 0.0, 0.0, 0.0, 1.0, 3, causes=(PublishedCause("starting", "high"),))
    (merged,) = merge_units([unit, unit, unit._replace(causes=(PublishedCause("shm_full", "medium"),))])
    assert [cause.name for cause in merged.causes] == ["starting", "shm_full"]


def test_the_explanation_has_the_numbers_and_what_speaks_against_them() -> None:
    evidence = source(with_cause(page(8000.0, 9000.0, 8900.0))).read_evidence()
    (decision,) = decide(evidence, Policy())
    texts = source("").read_causes(JOB, decision.units)
    assert source("").read_causes(JOB, [decision.units[0]._replace(node="elsewhere:1")]) == {}
    lines = explain(decision, Policy(), causes=texts).splitlines()
    at = lines.index("    cause: cpu_quota, confidence high: its quota ran out")
    assert lines[at + 1 : at + 3] == ["      against it: a hint", "      to change: ask for more CPUs"]
    bare = explain(decision, Policy()).splitlines()  # as from Prometheus
    assert "    cause: cpu_quota, confidence high" in bare
    assert "  in short: 1 GPU of ada/phys: cause cpu_quota" in bare
    assert [line for line in lines if "in short" in line] == ["  in short: 1 GPU of ada/phys: its quota ran out"]


@pytest.mark.parametrize("name", sorted(OF_TRAINING))
def test_who_serves_requests_gets_no_advice_for_training(name: str) -> None:
    assert name in {rule.name for rule in RULES}
    (decision,) = decide(source(with_cause(page(8000.0, 9000.0, 8900.0))).read_evidence(), Policy())
    texts = {("GPU-0", ""): [PublishedCause(name, "high", "it is so", "", "set num_workers", "at most 2 times")]}
    serving = decision._replace(around=Surroundings(kind="serving", kind_why="the Service chat selects its pod"))
    assert "to change: set num_workers" in explain(decision, Policy(), causes=texts)
    text = explain(serving, Policy(), causes=texts)
    assert "to change" not in text
    assert "against it: it serves requests (the Service chat selects its pod), and the advice is for training" in text
    other = {("GPU-0", ""): [PublishedCause(**QUOTA)]}
    assert "to change: ask for more CPUs" in explain(serving, Policy(), causes=other)


def test_what_is_the_same_for_all_gpus_is_printed_once() -> None:
    (decision,) = decide(source(with_cause(page(8000.0, 9000.0, 8900.0))).read_evidence(), Policy())
    unit = decision.units[0]
    twice = decision._replace(units=(unit, unit._replace(uuid="GPU-1", gpu="1")))
    cause = PublishedCause(**QUOTA)
    text = explain(twice, Policy(), causes={("GPU-0", ""): [cause], ("GPU-1", ""): [cause]})
    assert text.count("to change: ask for more CPUs") == 1
    assert text.count("cause: cpu_quota, confidence high: as above") == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        '{"allocations": 7}',
        '{"allocations": [7]}',
        '{"allocations": [{"uuid": "GPU-0", "mig": "", "causes": 7}]}',
        '{"allocations": [{"uuid": "GPU-0", "mig": "", "causes": ["x"]}]}',
        '{"allocations": [{"uuid": "GPU-0"}]}',
        "[" * 100_000,
    ],
)
def test_a_malformed_status_has_no_causes(text: str) -> None:
    assert parse_causes(text, JOB, {"GPU-0"}) == {}


def test_a_status_that_is_too_long_has_no_causes() -> None:
    status = json.dumps(STATUS)
    assert parse_causes(status, JOB, {"GPU-0"})
    assert parse_causes(status + " " * STATUS_MAX, JOB, {"GPU-0"}) == {}


def test_texts_of_a_status_are_one_short_line() -> None:
    evil = {**QUOTA, "evidence": "a\n\x1b[31mb" + "x" * 10_000}
    status = {"allocations": [{**HELD, "causes": [evil] * 100}]}
    found = parse_causes(json.dumps(status), JOB, {"GPU-0"})["GPU-0", ""]
    assert len(found) == CAUSES_MAX
    assert len(found[0].evidence) <= TEXT_MAX
    assert "\n" not in found[0].evidence
    assert "\x1b" not in found[0].evidence
