"""What the GPUs of a holder do, and why, as the reconciler reads and explains it."""

from __future__ import annotations

import json
import math
import re

import pytest
from tests.unit.reconciler.sources_bench import NOW, PLACE, FakeApi, page, prometheus, read

from gpu_exporter.common.address import Address, parse_address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.model.meanings import CAUSES
from gpu_exporter.common.promql.vector import VectorRow
from gpu_exporter.reconciler.decision.policy import decide, merge_units
from gpu_exporter.reconciler.decision.surroundings import Surroundings
from gpu_exporter.reconciler.evidence.exporters import ExporterSource, parse_exporter
from gpu_exporter.reconciler.evidence.promql import PromQLOptions, PromQLSource
from gpu_exporter.reconciler.evidence.records import HolderName, PublishedCause, UnitEvidence, UnitUse, UseOfUnits
from gpu_exporter.reconciler.evidence.use import CAUSES_MAX, STATUS_MAX, SUMS, TEXT_MAX, collect_use, parse_use
from gpu_exporter.reconciler.report import decisions_json, explain

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
LOW = {"state": "low", "utilization_ratio": 0.31, "busy_seconds": 2250.0, "observed_seconds": 9000.0}
STATUS = {"allocations": [7, {**HELD, "job_id": "43", "causes": []}, {**HELD, **LOW, "causes": [QUOTA]}]}


def with_cause(text: str, cause: str = "cpu_quota", confidence: str = "high") -> str:
    return f'{text}gpu_allocation_cause{{{PLACE},cause="{cause}",confidence="{confidence}"}} 1\n'


def source(text: str, status: str = json.dumps(STATUS)) -> ExporterSource:
    def fetch(address: Address) -> str:
        return status if address.path == "/api/v1/status" else text

    return ExporterSource([parse_exporter("n1:9836")], 7200.0, ManualClock(wall=NOW), fetch)


def of(cause: PublishedCause) -> UseOfUnits:
    return {("GPU-0", ""): UnitUse("low", causes=(cause,))}


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
    use = source("").read_use(JOB, decision.units)
    assert source("").read_use(JOB, [decision.units[0]._replace(node="elsewhere:1")]) == {}
    first, *lines = explain(decision, Policy(), use=use).splitlines()
    assert first == (
        "job 42 of ada/phys: low on its GPU, used 31% now and 25% since it started; its quota ran out; "
        "to change: ask for more CPUs"
    )
    at = lines.index("    cause: cpu_quota, confidence high: its quota ran out")
    assert lines[at + 1 : at + 3] == ["      against it: a hint", "      to change: ask for more CPUs"]


def test_prometheus_alone_gives_the_sentence_with_its_numbers() -> None:
    api = FakeApi()
    one = {"node": "n1", "instance": "n1", "gpu": "0", "uuid": "GPU-0", "scheduler": "slurm", "job_id": "42"}
    cause = {**one, "cause": "cpu_oversubscribed"}
    api.series = [
        ({**one, "__name__": "gpu_allocation_state", "state": "low"}, 1.0),
        ({**one, "__name__": "gpu_allocation_utilization_ratio"}, 0.31),
        ({**cause, "__name__": "gpu_allocation_cause", "confidence": "high"}, 1.0),
        *(
            ({**cause, "__name__": "gpu_allocation_cause_value", "quantity": quantity}, value)
            for quantity, value in {"cpus": 4.0, "runnable_threads": 96.0, "threads_to_set": 4.0}.items()
        ),
    ]
    api.more["sum by (uuid, mig) (increase(gpu_allocation_busy"] = [({"uuid": "GPU-0", "mig": ""}, 900.0)]
    api.more["sum by (uuid, mig) (increase(gpu_allocation_observed"] = [({"uuid": "GPU-0", "mig": ""}, 3600.0)]
    api.more["max by (uuid, mig) (max_over_time("] = [({"uuid": "GPU-0", "mig": ""}, 31 * 2.0**30)]
    api.more["max by (uuid, mig) (gpu_memory_total"] = [({"uuid": "GPU-0", "mig": ""}, 80 * 2.0**30)]
    (decision,) = decide(read(api), Policy())
    use = prometheus(api).read_use(JOB, decision.units)
    assert "\n    memory: at most 31.0 of 80.0 GiB in use in the last 1h\n" in explain(decision, Policy(), use=use)
    (row,) = json.loads(decisions_json([decision], read(api), None, {decision.name: use}))["holders"]
    (cause,) = row["units"][0]["causes"]
    assert (cause["name"], cause["advice"]) == ("cpu_oversubscribed", "set OMP_NUM_THREADS=4")
    assert explain(decision, Policy(), use=use).splitlines()[0] == (
        "job 42 of ada/phys: low on its GPU, used 31% now and 25% in the last 1h; 96 threads are runnable on 4 CPUs; "
        "to change: set OMP_NUM_THREADS=4"
    )
    api.series = api.series[:3]  # an exporter of an older version: the cause without its numbers
    use = prometheus(api).read_use(JOB, decision.units)
    assert "too many threads on few CPUs; to change: set OMP_NUM_THREADS to" in explain(decision, Policy(), use=use)


def test_a_holder_that_its_exporter_has_only_just_seen_is_not_judged_yet() -> None:
    new = source(page(0.0, 180.0, 170.0)).read_evidence()
    (decision,) = decide(new, Policy())
    unknown = {("GPU-0", ""): UnitUse("unknown", 0.45)}
    first, stage, *_ = explain(decision, Policy(), use=unknown).splitlines()
    assert first == "job 42 of ada/phys: not judged yet on its GPU, used 45% now"
    assert stage == "  stage starting: held for 3 min; it gets no mark in its first 30 min (startup grace)"
    (of_prometheus,) = read(FakeApi()).holders
    assert of_prometheus.units[0].seen_s == 9000.0
    (old,) = decide(source(page(0.0, 900.0, 170.0)).read_evidence(), Policy())
    assert explain(old, Policy(), use=unknown).startswith("job 42 of ada/phys: unknown on its GPU")


def test_gpus_that_differ_are_counted_and_an_unknown_one_is_no_idle_one() -> None:
    (decision,) = decide(source(with_cause(page(8000.0, 9000.0, 8900.0))).read_evidence(), Policy())
    units = tuple(decision.units[0]._replace(uuid=f"GPU-{n}", gpu=str(n), causes=()) for n in range(4))
    idle = UnitUse("held_idle", 0.0, 0.0, "in the last 1h")
    many = decision._replace(units=units, owner="")
    use = {("GPU-0", ""): idle, ("GPU-1", ""): idle, ("GPU-2", ""): UnitUse("healthy", 0.9, 0.9)}
    said = "job 42: held_idle on GPU 0 and GPU 1, healthy on GPU 2, state not known on GPU 3"
    assert explain(many, Policy(), use=use).splitlines()[0] == said
    spread = many._replace(units=(*units[:3], units[3]._replace(node="n2")))
    assert "healthy on GPU 2 of n1" in explain(spread, Policy(), use=use).splitlines()[0]
    crowd = many._replace(units=(*units, units[0]._replace(uuid="GPU-4", gpu="4")))
    of_five = {**use, ("GPU-4", ""): idle}
    assert "held_idle on 3 of 5 GPUs, healthy on GPU 2" in explain(crowd, Policy(), use=of_five).splitlines()[0]
    whole = dict.fromkeys([(unit.uuid, "") for unit in units], idle)
    assert explain(many, Policy(), use=whole).splitlines()[0] == (
        "job 42: held_idle on its 4 GPUs, used 0% now and 0% in the last 1h; "
        "to change: release the GPU, or start its work"
    )
    server = many._replace(around=Surroundings(kind="serving", kind_why="the Service chat selects its pod"))
    assert "to change" not in explain(server, Policy(), use=whole)


def test_two_targets_that_contradict_each_other_give_no_state() -> None:
    rows = [
        VectorRow({"__name__": "gpu_allocation_state", "uuid": "GPU-0", "state": state}, 1.0)
        for state in ("low", "held_idle")
    ]
    assert collect_use(rows, {}, "")["GPU-0", ""].state == ""
    assert collect_use(rows[:1], {}, "")["GPU-0", ""].state == "low"


@pytest.mark.parametrize("name", sorted(name for name, meaning in CAUSES.items() if meaning.is_training))
def test_who_serves_requests_gets_no_advice_for_training(name: str) -> None:
    (decision,) = decide(source(with_cause(page(8000.0, 9000.0, 8900.0))).read_evidence(), Policy())
    texts = of(PublishedCause(name, "high", "it is so", "", "set num_workers", "at most 2 times"))
    serving = decision._replace(around=Surroundings(kind="serving", kind_why="the Service chat selects its pod"))
    assert "to change: set num_workers" in explain(decision, Policy(), use=texts)
    text = explain(serving, Policy(), use=texts)
    assert "to change" not in text
    assert "against it: it serves requests (the Service chat selects its pod), and the advice is for training" in text
    other = of(PublishedCause(**QUOTA))
    assert "to change: ask for more CPUs" in explain(serving, Policy(), use=other)


def test_what_is_the_same_for_all_gpus_is_printed_once() -> None:
    (decision,) = decide(source(with_cause(page(8000.0, 9000.0, 8900.0))).read_evidence(), Policy())
    unit = decision.units[0]
    twice = decision._replace(units=(unit, unit._replace(uuid="GPU-1", gpu="1")))
    cause = PublishedCause(**QUOTA)
    text = explain(twice, Policy(), use={**of(cause), ("GPU-1", ""): of(cause)["GPU-0", ""]})
    assert text.count("  to change: ask for more CPUs") == 1
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
    assert parse_use(text, JOB, {"GPU-0"}) == {}


def test_a_status_that_is_too_long_has_no_causes() -> None:
    status = json.dumps(STATUS)
    assert parse_use(status, JOB, {"GPU-0"})
    assert parse_use(status + " " * STATUS_MAX, JOB, {"GPU-0"}) == {}


def test_texts_of_a_status_are_one_short_line() -> None:
    evil = {**QUOTA, "evidence": "a\n\x1b[31mb" + "x" * 10_000}
    status = {"allocations": [{**HELD, "causes": [evil] * 100}]}
    found = parse_use(json.dumps(status), JOB, {"GPU-0"})["GPU-0", ""].causes
    assert len(found) == CAUSES_MAX
    assert len(found[0].evidence) <= TEXT_MAX
    assert "\n" not in found[0].evidence
    assert "\x1b" not in found[0].evidence


def test_each_query_of_the_use_has_the_matchers_of_the_source() -> None:
    """A proxy of a shared Prometheus refuses a selector without them."""
    api = FakeApi(cluster="a")
    options = PromQLOptions(parse_address("http://p:9090"), 3600.0, 7200.0, 'cluster="a"')
    PromQLSource(options, ManualClock(wall=NOW), api).read_use(JOB, ())
    assert len(api.queries) == 1 + len(SUMS)
    for query in api.queries:
        selectors = re.findall(r"\{[^}]*\}", query)
        assert selectors and all('cluster="a"' in each for each in selectors), query
        assert not re.search(r"gpu_\w+(?![\w{])", query.replace("__name__", "")) or query.startswith("{"), query


def test_the_time_of_the_mean_begins_with_the_holder_and_not_with_one_of_the_same_name_before() -> None:
    api = FakeApi()
    unit = UnitEvidence("n1", "0", "GPU-0", "", NOW - 1020.5, 0.0, 1.0, 1.0, 3)
    older = unit._replace(uuid="GPU-1", start_wall=NOW - 9000.0)
    prometheus(api).read_use(JOB, [unit, older])
    assert {window for query in api.queries for window in re.findall(r"\[(\w+)\]", query)} == {"1020s"}
    api.queries.clear()
    prometheus(api).read_use(JOB, [unit._replace(start_wall=NOW + 60.0)])  # a clock that is wrong
    assert not any("increase(" in query for query in api.queries)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e300, -1.0])
def test_an_impossible_number_costs_only_the_numbers_of_the_sentence(value: float) -> None:
    place = {"uuid": "GPU-0", "cause": "lost_rank"}
    rows = [
        VectorRow({"__name__": "gpu_allocation_cause", **place, "confidence": "high"}, 1.0),
        VectorRow({"__name__": "gpu_allocation_cause_value", **place, "quantity": "run_seconds"}, value),
        VectorRow({"__name__": "gpu_allocation_cause_value", **place, "quantity": "gpus"}, 4.0),
        VectorRow({"__name__": "gpu_allocation_cause_value", **place, "quantity": "waiting_gpus"}, 3.0),
    ]
    use = collect_use(rows, {"peak": [VectorRow({"uuid": "GPU-0"}, value)]}, "")["GPU-0", ""]
    (cause,) = use.causes
    assert (cause.evidence, use.peak) == (CAUSES["lost_rank"].title, None)


def test_the_first_line_never_joins_the_evidence_of_one_cause_with_the_advice_of_another() -> None:
    (decision,) = decide(source(with_cause(page(8000.0, 9000.0, 8900.0))).read_evidence(), Policy())
    serving = decision._replace(around=Surroundings(kind="serving", kind_why="the Service chat selects its pod"))
    found = [
        PublishedCause("too_few_workers", "high", "its only loader never waits", "", "set num_workers to 5"),
        PublishedCause("cpu_quota", "medium", "its quota ran out", "", "ask for more CPUs"),
    ]
    use = {("GPU-0", ""): UnitUse("low", causes=tuple(found))}
    first = explain(serving, Policy(), use=use).splitlines()[0]
    assert "its only loader never waits" in first and "to change" not in first
