"""Causes by what the training loop says of itself, and how it changes the certainty of others."""

from __future__ import annotations

from typing import Any

import pytest
from tests.testbed.cases import case, found, the

from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.causes import Cause
from gpu_exporter.common.model.training import TrainingPace
from gpu_exporter.diagnosis.causes.case import CauseCase, HeldGpu
from gpu_exporter.diagnosis.causes.inside import add_inside
from gpu_exporter.diagnosis.causes.numbers import CauseRules, cause_rules
from gpu_exporter.diagnosis.causes.rules import INSIDE, find_causes

ALONE = {
    "loaders": 1,
    "named_loaders": 0,
    "busy_loaders": 1,
    "full_loaders": 1,
    "loader_cores": 0.99,
    "loader_most": 0.99,
}
DELAY = ("starting", "checkpointing", "remote_io", "steps_elsewhere")  # they delay a mark (docs/causes.md)


def pace(wait: float | None = 0.02, *, is_gpu: bool = True, **changes: Any) -> TrainingPace:
    values: dict[str, Any] = {
        "ranks": 1,
        "world_size": 1,
        "steps": 500,
        "seen": 500,
        "step_s": 0.1,
        "waiting_rank": 0,
        "phases": {},
        "silent_s": 3.0,
    }
    return TrainingPace(wait=wait, is_gpu=is_gpu, **values | changes)


def inside(wait: float | None = 0.02, *, is_gpu: bool = True, state: str = "low", **changes: Any) -> CauseCase:
    processes = changes.pop("processes", None)
    about = changes.pop("about", {})
    extra = {} if processes is None else {"processes": processes}
    return case(state, about={**about, "training": pace(wait, is_gpu=is_gpu, **changes)}, **extra)


@pytest.mark.parametrize(
    ("one", "confidence"),
    [
        (inside(0.61), "low"),
        (inside(0.61, is_gpu=False), "low"),
        (inside(0.15), "low"),
        (inside(0.05), None),
        (inside(None), None),
        (inside(0.61, steps=19), None),
        (inside(0.61, silent_s=400.0), None),  # the loop has stopped
        (inside(0.61, state="healthy"), None),
    ],
)
def test_a_wait_alone_is_a_fact_and_accuses_nobody(one: CauseCase, confidence: str | None) -> None:
    assert found(one).get("input_wait") == confidence
    assert not find_causes(one).published


def test_the_fact_names_the_share_the_rank_and_the_setting() -> None:
    cause = the(inside(0.61, ranks=8, waiting_rank=3, facts={"num_workers": 2}, late="rank 3 is late"), "input_wait")
    assert cause.evidence == (
        "its loop waits for data in 61% of each step on rank 3; its DataLoader has 2 workers; rank 3 is late"
    )
    assert (cause.advice, cause.gain) == ("", "")


def test_a_cause_of_slow_input_says_why_so_the_wait_is_its_evidence() -> None:
    before = the(case(processes=ALONE), "too_few_workers")
    assert (before.confidence, before.advice) == ("low", ""), "one process uses a CPU, for whatever"
    one = inside(0.61, processes=ALONE)
    assert found(one) == {"too_few_workers": "high"}
    assert "its loop waits for data in 61% of each step" in the(one, "too_few_workers").evidence
    assert the(one, "too_few_workers").advice.startswith("set num_workers of the DataLoader to ")


def test_loaders_that_wait_for_files_are_too_few_where_the_loop_waits_for_them() -> None:
    waiting = {"loaders": 8, "named_loaders": 8, "loader_cores": 0.4}
    looks = case(processes=waiting, received=4e7).looks
    one = inside(0.61, about={"looks": looks})
    assert found(one) == {"too_few_workers": "medium"}
    assert the(one, "too_few_workers").advice == (
        "set num_workers of the DataLoader to 16: loaders that wait need no CPU"
    )


HALF = {"loaders": 2, "named_loaders": 2, "busy_loaders": 2, "loader_cores": 1.0, "loader_most": 0.5}


@pytest.mark.parametrize(
    ("one", "confidence"),
    [
        (inside(0.61, processes=HALF), "medium"),
        (inside(0.61, is_gpu=False, processes=HALF), "low"),
        (inside(0.15, processes=HALF), "low"),
        (inside(0.05, processes=HALF), None),  # they wait for the loop
        (case(processes=HALF), None),
        (inside(0.61, facts={"num_workers": 2}, processes=HALF), None),  # the hook has seen that more do not help
        (inside(0.61, processes={**HALF, "named_loaders": 0}), None),
        (inside(0.61, processes={**HALF, "rank_cores": 0.98}), None),  # it makes the batch from their samples by itself
    ],
)
def test_loaders_that_pause_are_too_few_where_the_loop_waits_for_them(one: CauseCase, confidence: str | None) -> None:
    """While the loop waits, the queue is empty: no loader waits for the loop."""
    assert found(one).get("too_few_workers") == confidence


MEASURED = {"num_workers": 2, "workers_to_try": 23}


@pytest.mark.parametrize("more", [{}, {"processes": ALONE}])
def test_the_number_that_the_loop_has_measured_is_advised(more: dict[str, Any]) -> None:
    one = inside(0.61, facts=MEASURED, **more)
    assert the(one, "too_few_workers").advice == "set num_workers of the DataLoader to 23"
    assert the(one, "too_few_workers").evidence.count("waits for data") == 1
    assert "input_wait" not in found(one)
    parted = inside(0.61, facts={**MEASURED, "iterable": True}, **more)
    assert the(parted, "too_few_workers").advice.endswith("its own part of the IterableDataset (get_worker_info)")


@pytest.mark.parametrize(
    ("one", "confidence"),
    [
        (inside(0.61, facts=MEASURED), "high"),
        (inside(0.61, facts=MEASURED, is_gpu=False), "medium"),
        (inside(0.15, facts=MEASURED), "low"),
        (inside(0.05, facts=MEASURED), None),
        (inside(0.61, facts=MEASURED, silent_s=400.0), None),
    ],
)
def test_too_few_workers_by_the_loops_own_measure(one: CauseCase, confidence: str | None) -> None:
    assert found(one).get("too_few_workers") == confidence


def test_no_workers_are_measured_where_neighbours_fill_the_host() -> None:
    full = inside(0.61, facts=MEASURED, about={"looks": case(host_busy=0.999).looks})
    assert "too_few_workers" not in found(full)
    assert found(full)["input_wait"] == "low"


def test_without_the_gpus_time_line_the_wait_is_told_and_makes_nothing_more_certain() -> None:
    cause = the(inside(0.61, is_gpu=False, processes=ALONE), "too_few_workers")
    assert cause.confidence == "medium"
    assert "(the GPU may work during this time)" in cause.evidence


def test_a_loop_that_does_not_wait_speaks_against_slow_input() -> None:
    cause = the(inside(0.01, processes=ALONE), "too_few_workers")
    assert cause.confidence == "low"
    assert "its loop waits for data in only 1% of each step" in cause.against


DELAYING = {
    "remote_io": case(processes={"blocked": 2}, network_files=("nfs4",)),
    "starting": case("held_no_process", cores=2.0, about={"worked": False, "held_s": 1500.0}),
}


@pytest.mark.parametrize("name", DELAYING)
def test_no_claim_of_a_job_makes_a_cause_that_delays_a_mark_more_certain(name: str) -> None:
    plain = DELAYING[name]
    before = the(plain, name)
    assert before.confidence != "high"
    for share in (0.0, 0.9):
        assert the(plain._replace(training=pace(share, phases={"checkpoint": share})), name) == before


def test_no_claim_of_a_job_touches_any_cause_that_delays_a_mark() -> None:
    for name in DELAY:
        cause = Cause(name, "low", "evidence")
        assert add_inside(inside(0.9), cause) is cause


@pytest.mark.parametrize("state", ["held_idle", "held_no_process"])
def test_steps_beside_an_idle_gpu_are_a_claim_that_delays_a_mark_only_where_the_site_trusts_it(state: str) -> None:
    one = inside(state=state)
    assert found(one)["steps_elsewhere"] == "low", "a low cause is not published, so it delays nothing"
    trusted = one._replace(rules=one.rules._replace(steps="delay"))
    assert found(trusted)["steps_elsewhere"] == "medium"
    assert the(one, "steps_elsewhere").against and not the(trusted, "steps_elsewhere").against


@pytest.mark.parametrize(
    "one",
    [
        case("held_idle"),
        inside(state="held_idle", seen=0),
        inside(state="held_idle", silent_s=400.0),  # the loop has stopped
        inside(state="held_idle", about={"idle_run_s": 299.0}),
        inside(state="held_idle", about={"idle_run_s": None}),
        inside(state="low"),
        inside(state="unknown"),
    ],
)
def test_no_steps_elsewhere(one: CauseCase) -> None:
    assert "steps_elsewhere" not in found(one._replace(rules=one.rules._replace(steps="delay")))


@pytest.mark.parametrize(("share", "confidence"), [(0.05, None), (0.12, "medium"), (0.4, "high")])
@pytest.mark.parametrize(("name", "phase"), [("cpu_logging", "logging"), ("checkpoint_share", "checkpoint")])
def test_phases_that_take_much_of_the_steps(name: str, phase: str, share: float, confidence: str | None) -> None:
    assert found(inside(phases={phase: share})).get(name) == confidence


def test_launch_bound() -> None:
    busy = {"rank_cores": 0.98}
    one = the(inside(facts={"compiled": False}, processes=busy), "launch_bound")
    assert one.confidence == "low"
    assert ".item()" in one.against, (
        "other work of Python may fill the step, as an evaluation or an optimizer on the CPU"
    )
    placed = {"forward": 0.4, "backward": 0.35, "optimizer": 0.1}
    assert found(inside(is_gpu=False, processes=busy, phases=placed)).get("launch_bound") == "medium"
    assert found(inside(processes=busy, phases={**placed, "forward": 0.2})).get("launch_bound") == "low"
    assert "launch_bound" not in found(inside(processes={"rank_cores": 0.3}))
    assert "launch_bound" not in found(inside(0.3, processes=busy))
    assert "launch_bound" not in found(inside(processes=busy, phases={"logging": 0.3}))
    assert "launch_bound" not in found(inside(processes=busy, about={"mean": 0.9}))
    assert "torch.compile" in the(inside(facts={"compiled": False}, processes=busy), "launch_bound").advice
    assert the(inside(facts={"compiled": True}, processes=busy), "launch_bound").advice == "raise batch_size"


def test_small_batch() -> None:
    facts = {"batch_size": 16}
    assert found(inside(facts=facts, about={"memory": 0.2})).get("small_batch") == "medium"
    assert found(inside(facts=facts, is_gpu=False, about={"memory": 0.2})).get("small_batch") == "low"
    for memory in (None, 0.6):
        assert "small_batch" not in found(inside(facts=facts, about={"memory": memory}))
    assert "small_batch" not in found(inside(about={"memory": 0.2}))
    assert the(inside(facts=facts, about={"memory": 0.2}), "small_batch").advice == (
        "raise batch_size from 16 as far as the memory and the loss allow"
    )


def test_no_mixed_precision() -> None:
    facts = {"parameters": "float32", "matmul": "highest"}

    def confidence(**more: str) -> str | None:
        return found(inside(state="busy_inefficient", facts=facts | more)).get("no_mixed_precision")

    assert (confidence(), confidence(precision="float32")) == ("low", "medium")
    assert confidence(precision="mixed") is confidence(matmul="high") is confidence(parameters="bfloat16") is None


def test_data_parallel() -> None:
    two = (HeldGpu("GPU-0", "0", 0.3, 1.0), HeldGpu("GPU-1", "1", 0.3, 1.0))
    facts = {"data_parallel": True}
    assert found(inside(facts=facts, about={"members": two})).get("data_parallel") == "high"
    assert "data_parallel" not in found(inside(facts=facts))
    assert "torchrun --nproc_per_node=2" in the(inside(facts=facts, about={"members": two}), "data_parallel").advice


def test_the_inside_is_asked_for_only_while_it_is_unknown() -> None:
    assert INSIDE in find_causes(case()).needs
    assert INSIDE not in find_causes(inside()).needs


def test_a_cause_that_a_site_switches_off_is_not_looked_for() -> None:
    settings = Settings()
    off = cause_rules(settings._replace(diagnosis=settings.diagnosis._replace(without="too_few_workers, stalls")))
    one = inside(0.61, facts=MEASURED)
    assert "too_few_workers" in found(one)
    assert found(one._replace(rules=off)) == {"input_wait": "low"}
    assert cause_rules(settings)._replace(off=frozenset()) == CauseRules()


def test_every_text_is_one_line() -> None:
    for one in (inside(0.61), inside(phases={"logging": 0.4}), inside(facts={"batch_size": 4}, about={"memory": 0.1})):
        for cause in find_causes(one).found:
            assert isinstance(cause, Cause)
            assert "\n" not in "".join(map(str, cause))
