"""Each cause: found with its evidence, not found without it, and what it says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.cases import case, evidence, found, the

from gpu_exporter.common.model.causes import Cause, Causes
from gpu_exporter.common.model.evidence import FileEvidence, HostEvidence, ProcessEvidence
from gpu_exporter.common.model.views import Spin
from gpu_exporter.diagnosis.causes.case import CauseCase, HeldGpu, HostLook
from gpu_exporter.diagnosis.causes.remote_io import FILES
from gpu_exporter.diagnosis.causes.rules import INSIDE, RULES, STATES, find_causes

MIB = 2.0**20
LOADER = {
    "loaders": 1,
    "named_loaders": 1,
    "busy_loaders": 1,
    "full_loaders": 1,
    "loader_cores": 0.99,
    "loader_most": 0.99,
}
WAITING = {"loaders": 8, "named_loaders": 8, "loader_cores": 0.4, "loader_most": 0.06}
CROWD = {"runnable": 96, "rank_cores": 4.0}
FOUR = {"cpus": 4.0, "quota": 4.0, "cores": 4.0}
FULL = {"cpus": 1.0, "quota": 1.0, "cores": 0.98}
FEEDERS = {"loaders": 3, "named_loaders": 3, "loader_cores": 0.8, "loader_most": 0.3, "rank_cores": 0.1, "runnable": 3}
YOUNG = {"worked": False, "held_s": 600.0}
BURST = {"written": 2e8}
THRASH = {"memory_bytes": 99.0, "memory_limit": 100.0, "refaults": 90.0}
NEAR = {"memory_bytes": 99.0, "memory_limit": 100.0}
LITTLE = {"memory_bytes": 20.0, "memory_limit": 400.0}
QUIET_MEMORY = {"pressure_memory": 0.0, "memory_full": 0.0}


def test_a_holder_whose_host_is_quiet_has_no_cause_but_the_inside_of_its_loop() -> None:
    assert find_causes(case()) == Causes((), (INSIDE, FILES.text))


@pytest.mark.parametrize(
    ("one", "confidence"),
    [
        (case("held_no_process", cores=0.0), "high"),
        (case("held_no_process", cores=3.0), "medium"),
        (case("held_no_process", cores=3.0, about={**YOUNG}), "low"),
        (case("held_no_process", looks=0), "medium"),
        (case("held_idle"), None),
    ],
)
def test_no_process(one: CauseCase, confidence: str | None) -> None:
    assert found(one).get("no_process") == confidence


def two(first: float, second: float, processes: float | None = 1.0) -> tuple[HeldGpu, ...]:
    return HeldGpu("GPU-0", "0", first, 0.0), HeldGpu("GPU-1", "1", second, processes)


def spinning(run_s: float) -> tuple[HeldGpu, ...]:
    idle, busy = two(0.0, 1.0)
    return idle, busy._replace(spin=Spin(run_s, "none"))


@pytest.mark.parametrize(
    ("about", "confidence"),
    [
        ({"members": two(0.0, 0.8), "processes": 0.0}, "high"),
        ({"members": two(0.0, 0.8, None), "processes": None}, "medium"),
        ({"members": two(0.0, 0.0), "processes": 0.0}, None),  # none works: no process at all
        ({"members": two(0.0, 0.8), "processes": 1.0}, "low"),  # it has a process, which may wait
        ({"processes": 0.0}, None),  # it holds only this one
        ({"members": spinning(30.0), "processes": 0.0}, "high"),  # a moment without progress
        ({"members": spinning(90.0), "processes": 0.0}, None),  # which may wait for this one
    ],
)
def test_unused_gpu(about: dict[str, Any], confidence: str | None) -> None:
    """A GPU in a run without progress does not work: it may wait for this one."""
    one = case("held_no_process", about=about, processes={"ranks": 2})
    assert found(one).get("unused_gpu") == confidence


@pytest.mark.parametrize(("ranks", "confidence"), [(1, "medium"), (2, "low"), (None, "low")])
def test_a_context_of_the_only_process_is_no_rank_that_waits(ranks: int | None, confidence: str) -> None:
    """TensorFlow and JAX open a context on each GPU that they see."""
    shared = (HeldGpu("GPU-0", "0", 0.0, 1.0), HeldGpu("GPU-1", "1", 0.8, 1.0))
    one = case("held_idle", about={"members": shared, "processes": 1.0}, processes={"ranks": ranks})
    assert found(one).get("unused_gpu") == confidence


@pytest.mark.parametrize(
    ("about", "changes", "confidence"),
    [
        (YOUNG, {"cores": 2.0}, "high"),
        (YOUNG, {"cores": 0.1, "received": 5e6}, "high"),
        ({**YOUNG, "held_s": 1500.0}, {"cores": 2.0}, "medium"),
        ({**YOUNG, "held_s": 1900.0}, {"cores": 2.0}, None),  # too old
        ({**YOUNG, "worked": True}, {"cores": 2.0}, None),
        ({**YOUNG, "worked": None}, {"cores": 2.0}, None),  # it may be older than the exporter
        (YOUNG, {"cores": 0.1}, None),  # nothing happens
    ],
)
def test_starting(about: dict[str, Any], changes: dict[str, Any], confidence: str | None) -> None:
    for state in ("held_idle", "held_no_process", "unknown"):
        assert found(case(state, about=about, **changes)).get("starting") == confidence


@pytest.mark.parametrize(
    ("processes", "cores", "confidence"),
    [
        ({"terminal": True}, 0.0, "medium"),
        ({"notebook": True}, 0.1, "medium"),
        ({"terminal": True}, 2.0, None),  # something computes
        ({}, 0.0, None),
    ],
)
def test_interactive(processes: dict[str, Any], cores: float, confidence: str | None) -> None:
    assert found(case("held_idle", processes=processes, cores=cores)).get("interactive") == confidence
    assert "interactive" not in found(case("low", processes=processes, cores=cores))


def spin(confidence: str) -> Spin:
    return Spin(1200.0, confidence)


@pytest.mark.parametrize(
    ("state", "members", "stopped", "confidence"),
    [
        ("stalled", (HeldGpu("GPU-0", "0", 1.0, spin=spin("high")), HeldGpu("GPU-1", "1", 0.0, idle_run_s=900.0)), 0, "high"),
        ("held_idle", (HeldGpu("GPU-1", "1", 1.0, spin=spin("medium")), HeldGpu("GPU-0", "0", 0.0, idle_run_s=900.0)), 0, "medium"),
        ("stalled", (HeldGpu("GPU-0", "0", 1.0, spin=spin("high")),), 1, "high"),  # stopped by a signal
        ("stalled", (HeldGpu("GPU-0", "0", 1.0, spin=spin("high")),), 0, None),
        ("stalled", (HeldGpu("GPU-0", "0", 1.0, spin=spin("high")), HeldGpu("GPU-1", "1", 0.0, 0.0, 900.0)), 0, None),
        ("stalled", (HeldGpu("GPU-0", "0", 1.0, spin=spin("high")), HeldGpu("GPU-1", "1", 0.0, 1.0, 18000.0)), 0, None),
        ("held_idle", (HeldGpu("GPU-1", "1", 1.0, spin=spin("low")), HeldGpu("GPU-0", "0", 0.0, idle_run_s=900.0)), 0, None),
    ],
)  # fmt: skip
def test_late_rank(state: str, members: tuple[HeldGpu, ...], stopped: int, confidence: str | None) -> None:
    one = case(state, processes={"stopped": stopped}, about={"members": members})
    assert found(one).get("late_rank") == confidence


@pytest.mark.parametrize(
    ("state", "proof", "certainty", "confidence"),
    [
        ("stalled", "gpu 1 reported XID 79", "high", "high"),
        ("stalled", "gpu 1 reported XID 79", "medium", "medium"),  # a witness is not known
        ("held_no_process", "the process on gpu 1 ended", "high", "high"),  # on the GPU of the lost rank
        ("stalled", "", "medium", None),
        ("low", "gpu 1 reported XID 79", "high", None),
    ],
)
def test_lost_rank(state: str, proof: str, certainty: str, confidence: str | None) -> None:
    spins = HeldGpu("GPU-0" if state == "stalled" else "GPU-1", "0", 1.0, spin=spin(certainty)._replace(proof=proof))
    other = HeldGpu("GPU-1" if state == "stalled" else "GPU-0", "1", 0.0, 0.0, 400.0)
    assert found(case(state, about={"members": (spins, other)})).get("lost_rank") == confidence


def test_a_stall_whose_late_rank_is_elsewhere_needs_the_other_nodes() -> None:
    one = case("stalled", about={"members": (HeldGpu("GPU-0", "0", 1.0, spin=spin("high")),)})
    assert find_causes(one).needs == ("the exporters of the job's other nodes: the late rank is not on this node",)


@pytest.mark.parametrize(
    ("changes", "processes", "confidence"),
    [
        ({**FULL, "throttled": 0.6}, {}, "high"),
        ({**FULL, "throttled": 0.15}, {}, "medium"),
        ({**FULL, "throttled": 0.05}, {}, None),
        ({**FULL, "cores": 0.3, "throttled": 0.6}, {}, "medium"),  # bursts of threads
        ({**FULL, "throttled": 0.6}, {"runnable": 30}, None),  # too many threads: another remedy
        ({**FULL, "throttled": 0.6}, FEEDERS, None),  # the loaders need it all
        ({**FULL, "throttled": 0.6}, None, "medium"),  # the threads are not known
        ({"throttled": 0.0, "quota": None, "cpus": None}, {}, None),
    ],
)
def test_cpu_quota(changes: dict[str, Any], processes: dict[str, Any] | None, confidence: str | None) -> None:
    assert found(case(processes=processes, **changes)).get("cpu_quota") == confidence


@pytest.mark.parametrize(
    ("changes", "processes", "confidence"),
    [
        ({**FOUR, "throttled": 0.71}, CROWD, "high"),
        ({**FOUR, "throttled": 0.71}, {**CROWD, "runnable": 10}, "medium"),
        ({**FOUR, "throttled": 0.71}, {**CROWD, "runnable": 7}, None),
        ({**FOUR, "throttled": 0.0, "cores": 3.9}, CROWD, "high"),  # full without a quota
        ({**FOUR, "throttled": 0.0, "cores": 1.0}, CROWD, None),  # they do not run
        ({**FOUR, "throttled": 0.0, "cores": 1.0, "pressure_cpu": 0.6}, CROWD, "low"),  # it uses one of its four CPUs
        ({**FOUR, "cpus": 0.5, "quota": 0.5, "cores": 0.5, "throttled": 0.9}, {"runnable": 3}, None),  # few threads
    ],
)
def test_cpu_oversubscribed(changes: dict[str, Any], processes: dict[str, Any], confidence: str | None) -> None:
    assert found(case(processes=processes, **changes)).get("cpu_oversubscribed") == confidence


def test_the_advice_on_threads_is_the_opposite_of_that_on_workers() -> None:
    threads = the(case(processes=CROWD, **FOUR, throttled=0.71), "cpu_oversubscribed")
    assert threads.advice == "set OMP_NUM_THREADS=4 (and the thread limit of other libraries)"
    assert threads.evidence == "96 threads are runnable on 4 CPUs; the quota ran out in 71% of the periods"
    loaders = the(
        case(processes={**CROWD, "loaders": 90, "named_loaders": 90}, **FOUR, throttled=0.71), "cpu_oversubscribed"
    )
    assert loaders.advice.startswith("ask for more CPUs") or "num_workers" in loaders.advice


@pytest.mark.parametrize(
    ("changes", "processes", "confidence"),
    [
        (FULL, FEEDERS, "high"),
        (FULL, {**FEEDERS, "rank_cores": 0.7}, "medium"),
        ({**FULL, "cores": 0.5}, FEEDERS, None),  # CPUs are left
        ({**FULL, "cores": 0.8, "throttled": 0.4}, FEEDERS, None),  # loaders that work in turns reach the quota too
        ({**FULL, "cores": 0.8, "throttled": 0.4, "pressure_cpu": 0.3}, FEEDERS, "high"),  # and wait for it
        ({**FULL, "cores": 0.8, "throttled": 0.4, "pressure_cpu": 0.05}, FEEDERS, None),
        ({**FULL, "cores": 0.8, "throttled": 0.4, "pressure_cpu": 0.3, "host_busy": 1.0}, FEEDERS, None),  # for others
        ({**FULL, "cores": 0.9, "throttled": 0.02}, FEEDERS, None),  # what is left of it is not taken
        ({**FULL, "cores": 0.9, "throttled": 0.02, "quota": None}, FEEDERS, "high"),  # a cpuset
        (FULL, {**FEEDERS, "named_loaders": 0}, "medium"),  # it is short, and only the work of these is known
        (FULL, {**FEEDERS, "loader_cores": 0.3}, None),  # others use the CPUs
        (FULL, {**FEEDERS, "runnable": 40}, None),
        (FULL, None, None),
        ({**FULL, "cpus": None, "quota": None, "host_busy": 1.0}, FEEDERS, None),  # others use the host
    ],
)
def test_cpu_bound_input(changes: dict[str, Any], processes: dict[str, Any] | None, confidence: str | None) -> None:
    assert found(case(processes=processes, **changes)).get("cpu_bound_input") == confidence


@pytest.mark.parametrize(
    ("changes", "processes", "confidence"),
    [
        ({}, LOADER, "high"),
        ({}, {**LOADER, "named_loaders": 0}, "low"),  # a server's front end, a tokenizer
        ({}, {**LOADER, "full_loaders": 0}, None),  # it waits too
        ({"cores": 3.4}, {**LOADER, "loader_cores": 2.8}, None),  # its threads use several CPUs already
        ({"cpus": 2.0, "cores": 1.4}, LOADER, None),  # no CPU is free
        ({"cores": 2.5}, {**LOADER, "loaders": 2, "busy_loaders": 2, "full_loaders": 2}, "high"),
        ({"cores": 2.5}, {**LOADER, "loaders": 32, "busy_loaders": 31, "full_loaders": 1}, None),  # the others wait
        ({"cores": 1.1, "received": 2e8}, {"rank_cores": 0.98}, "low"),  # gradients, not samples
        ({"cores": 1.1}, {"rank_cores": 0.98}, "low"),  # no loader: small kernels look the same
        ({"cores": 1.1, "read": 5e6}, {"rank_cores": 0.98}, "medium"),
        ({"cores": 1.1, "files": FileEvidence(900.0, 5e6, 0, 3)}, {"rank_cores": 0.98}, "medium"),
        ({"cores": 2.0}, {**LOADER, "rank_cores": 0.98}, None),  # both are busy
        ({"cores": 3.4, "read": 5e6}, {"rank_cores": 3.2}, None),  # it computes by itself
        ({"received": 4e7}, WAITING, "low"),  # from a bucket, or for the loop
        ({"read": 4e7}, WAITING, "low"),
        ({"read": 4e7}, {**WAITING, "loader_cores": 1.6}, "low"),
        ({"received": 1e5, "read": 0.0}, {**WAITING, "rank_cores": 0.98}, None),  # they wait for the loop
        ({"host_busy": 0.99, "cpus": None, "quota": None, "cores": 1.1}, LOADER, None),  # others use the host
    ],
)
def test_too_few_workers(changes: dict[str, Any], processes: dict[str, Any], confidence: str | None) -> None:
    assert found(case(processes=processes, **changes)).get("too_few_workers") == confidence


@pytest.mark.parametrize(
    ("changes", "processes", "advice"),
    [
        ({}, LOADER, "set num_workers of the DataLoader to 7 (8 CPUs)"),
        ({}, {**LOADER, "ranks": 2}, "set num_workers of the DataLoader to 3 (8 CPUs for 2 processes on GPUs)"),
        (
            {},
            {**LOADER, "ranks": 8},
            "ask for more CPUs: with 8 CPUs for 8 processes on GPUs, none remains for a loader",
        ),
        ({}, {**LOADER, "rank_cores": 0.8}, "set num_workers of the DataLoader to 7 (8 CPUs)"),
        (
            {"memory_limit": 1000 * MIB, "memory_bytes": 700 * MIB},
            {**LOADER, "loader_bytes": 100 * MIB},
            "set num_workers of the DataLoader to 4: more do not fit, because each needs 0.1 GiB",
        ),
        (
            {"memory_limit": 1000 * MIB, "memory_bytes": 1000 * MIB, "memory_cache": 900 * MIB},
            {**LOADER, "loader_bytes": 100 * MIB},
            "set num_workers of the DataLoader to 7 (8 CPUs)",
        ),
        (
            {"memory_limit": 1000 * MIB, "memory_bytes": 950 * MIB},
            {**LOADER, "loader_bytes": 100 * MIB},
            "ask for more memory: one more loader needs 0.1 GiB",
        ),
    ],
)
def test_the_advice_on_workers_respects_the_holder(
    changes: dict[str, Any], processes: dict[str, Any], advice: str
) -> None:
    assert the(case(processes=processes, **changes), "too_few_workers").advice == advice


@pytest.mark.parametrize(
    ("changes", "blocked", "confidence"),
    [
        ({"pressure_memory": 0.3, "memory_full": 0.1, **NEAR}, 0, "high"),
        ({"pressure_memory": 0.3, "memory_full": 0.01, **NEAR}, 0, "medium"),
        ({"pressure_memory": 0.3, "memory_full": 0.1, **LITTLE}, 0, "low"),  # the node lacks memory
        ({"pressure_memory": 0.3, "memory_full": 0.1}, 0, "low"),  # no limit
        ({"pressure_memory": 0.05}, 0, None),
        ({"pressure_memory": 0.6, "memory_full": 0.0}, 0, None),  # a sidecar
        ({"killed": 1.0, "ooms": 1.0, **LITTLE}, 0, "high"),  # afterwards it uses little
        ({"killed": 1.0, **NEAR}, 0, "high"),
        ({"killed": 1.0, "ooms": 0.0, **LITTLE}, 0, "low"),
        ({"killed": 1.0, "memory_bytes": 40.0, "memory_limit": 512.0, **QUIET_MEMORY}, 0, None),  # a sidecar
        (THRASH, 1, "medium"),
        (THRASH, 0, None),  # a stream of data is read, and nothing waits
        ({**THRASH, "refaults": 0.0}, 1, None),  # the page cache
        ({**THRASH, "memory_bytes": 50.0}, 1, None),
        ({**THRASH, **QUIET_MEMORY}, 1, None),  # PSI knows better
    ],
)
def test_memory_pressure(changes: dict[str, Any], blocked: int, confidence: str | None) -> None:
    assert found(case(processes={"blocked": blocked}, **changes)).get("memory_pressure") == confidence


@pytest.mark.parametrize(
    ("changes", "confidence"),
    [
        ({"pressure_memory": 0.3, "memory_full": 0.1, **LITTLE}, "high"),
        (
            {"pressure_memory": 0.3, "memory_full": 0.1},
            "medium",
        ),  # it may be the holder without a limit that fills the node
        ({"killed": 1.0, "ooms": 0.0, **LITTLE}, "high"),
        ({"killed": 1.0, "ooms": 1.0, **LITTLE}, None),
        ({"killed": 1.0, **LITTLE}, None),  # for whose limit is not known
        ({"pressure_memory": 0.3, "memory_full": 0.1, **NEAR}, None),
        (LITTLE, None),
    ],
)
def test_node_memory(changes: dict[str, Any], confidence: str | None) -> None:
    assert found(case(**changes)).get("node_memory") == confidence


TEN = {"loaders": 10, "named_loaders": 10, "busy_loaders": 10, "full_loaders": 10, "loader_cores": 8.8, "runnable": 11}
NO_LIMIT = {"cpus": None, "quota": None}


@pytest.mark.parametrize(
    ("changes", "about", "causes"),
    [
        # 64 CPUs, eight GPUs. One of them, without a limit, on an empty host and on a full one.
        ({"cores": 9.0, "host_busy": 0.14, **NO_LIMIT}, {"share": 0.125}, {"too_few_workers": "high"}),
        ({"cores": 8.0, "host_busy": 1.0, **NO_LIMIT}, {"share": 0.125}, {"cpu_bound_input": "high"}),
        (
            {"cores": 4.0, "host_busy": 1.0, "pressure_cpu": 0.7, **NO_LIMIT},
            {"share": 0.125},
            {"cpu_contended": "medium"},
        ),
        # A limit of 16, of which it gets six: the usual case of limits above requests.
        (
            {"cores": 6.0, "cpus": 16.0, "quota": 16.0, "host_busy": 1.0, "pressure_cpu": 0.7},
            {"share": 0.125},
            {"cpu_contended": "high"},
        ),
        ({"cores": 6.0, "cpus": 16.0, "quota": 16.0, "host_busy": 1.0, "pressure_cpu": 0.05}, {"share": 0.125}, {}),
        # Slurm binds a job to two CPUs and confines it by no cgroup: what is free elsewhere is not for it.
        ({"cores": 2.0, "host_busy": 0.14, "BOUND": 2, **NO_LIMIT}, {"share": 0.125}, {"cpu_oversubscribed": "high"}),
        ({"cores": 1.0, "host_busy": 0.14, "BOUND": 2, **NO_LIMIT}, {"share": 0.125}, {}),
        # A socket that several holders share is no entitlement to all of it.
        (
            {"cores": 8.0, "host_busy": 1.0, "pressure_cpu": 0.7, "BOUND": 32, **NO_LIMIT},
            {"share": 0.125},
            {"cpu_bound_input": "high"},
        ),
        # A container's quota runs out, and another container has none: the holder as a whole has no limit.
        (
            {"cores": 4.0, "throttled": 0.9, "host_busy": 0.1, "pressure_cpu": 0.5, **NO_LIMIT},
            {"share": 0.125},
            {"too_few_workers": "high"},
        ),
        # A set of all CPUs is no limit.
        ({"cores": 9.0, "cpus": 64.0, "quota": None, "host_busy": 0.14}, {"share": 0.125}, {"too_few_workers": "high"}),
    ],
)
def test_who_is_short_of_cpus(changes: dict[str, Any], about: dict[str, Any], causes: dict[str, str]) -> None:
    """Without a limit what is free on the host is free; what neighbours take is no fault of the owner."""
    bound = {"cpus": changes.pop("BOUND")} if "BOUND" in changes else {}
    shown = TEN if not bound else {**TEN, **bound, "loader_cores": 0.9 * changes["cores"]}
    assert found(case(processes=shown, about=about, **changes)) == causes


def test_no_more_loaders_are_advised_than_twice_those_that_would_fill_the_gpu() -> None:
    one = case(processes=LOADER, **NO_LIMIT)  # the GPU is at 30 %
    assert the(one, "too_few_workers").advice == "set num_workers of the DataLoader to 7 (64 CPUs)"


EIGHT = {"loaders": 8, "named_loaders": 8, "loader_cores": 0.98, "loader_most": 0.13, "loader_cpus": 1}


@pytest.mark.parametrize(
    ("processes", "changes", "confidence"),
    [
        (EIGHT, {}, "high"),
        ({**EIGHT, "named_loaders": 0}, {}, "medium"),
        ({**EIGHT, "loader_cpus": 2}, {}, None),  # which they do not use up
        ({**EIGHT, "loader_cpus": 2, "loader_cores": 1.9}, {}, "high"),
        ({**EIGHT, "loader_cpus": 8, "loader_cores": 7.9}, {}, None),  # as many as it may use
        ({**EIGHT, "loaders": 1}, {}, None),  # one loader needs no second CPU
        ({**EIGHT, "loader_cpus": None}, {}, None),
        (EIGHT, {"cpus": 1.0, "quota": 1.0}, None),  # it has no other CPU
        (EIGHT, NO_LIMIT, "high"),  # 64 of the host
        ({**EIGHT, "cpus": 4}, NO_LIMIT, "high"),  # of four to which its launcher is bound
        # All of it is bound, as Slurm does where it confines no job.
        ({**EIGHT, "cpus": 1}, NO_LIMIT, "medium"),
        ({**EIGHT, "cpus": 1, "loader_cores": 0.8}, {**NO_LIMIT, "cores": 0.98}, "medium"),  # beside the rank
        ({**EIGHT, "cpus": 1, "loader_cores": 0.4}, {**NO_LIMIT, "cores": 0.98}, None),
        ({**EIGHT, "cpus": 1, "loader_cores": 0.8}, {**NO_LIMIT, "cores": 0.9}, None),  # some of it is left
        ({**EIGHT, "cpus": 1}, {**NO_LIMIT, "host_busy": 0.999}, None),  # elsewhere is no free CPU
        ({**EIGHT, "loaders": 32, "loader_cpus": 32, "loader_cores": 28.0, "cpus": 32}, NO_LIMIT, None),
    ],
)
def test_pinned_loaders(processes: dict[str, Any], changes: dict[str, Any], confidence: str | None) -> None:
    one = case(processes=processes, **{"cores": 1.3, **changes})
    assert found(one).get("pinned_loaders") == confidence


@pytest.mark.parametrize(
    ("one", "confidence"),
    [
        (case("held_idle", cores=14.0), "medium"),
        (case("held_idle", cores=0.95), "medium"),  # one thread is the whole program of a notebook
        (case("held_idle", cores=0.5), None),
        (case("held_idle", cores=14.0, about={"members": two(0.0, 0.7)}), None),  # another GPU of it works
        (case("low", cores=14.0), None),
    ],
)
def test_cpu_work(one: CauseCase, confidence: str | None) -> None:
    assert found(one).get("cpu_work") == confidence


@pytest.mark.parametrize(
    ("cores", "held", "workers"),
    [(1.0, 1.0, 7), (9.0, 1.0, 15), (1.0, 0.125, 57), (1.0, 0.25, 28)],
)
def test_all_holders_that_follow_the_advice_at_once_fit_on_the_host(cores: float, held: float, workers: int) -> None:
    one = case(processes=LOADER, cores=cores, **NO_LIMIT, about={"share": 0.125, "held": held, "mean": 0.02})
    assert the(one, "too_few_workers").advice.startswith(f"set num_workers of the DataLoader to {workers} ")


@pytest.mark.parametrize(
    ("used", "limit", "confidence"),
    [
        (20480 * MIB, 64 * MIB, None),
        (62 * MIB, 64 * MIB, "medium"),
        (40 * MIB, 64 * MIB, None),
        (62 * MIB, None, None),
        (None, 64 * MIB, None),
    ],
)
def test_shm_full(used: float | None, limit: float | None, confidence: str | None) -> None:
    assert found(case(shm_bytes=used, shm_limit=limit)).get("shm_full") == confidence


def test_far_numa_needs_the_proof_in_every_look() -> None:
    far = {"far": (("GPU-0", "32-63"),)}
    assert found(case(processes=far))["far_numa"] == "medium"
    assert "32-63" in the(case(processes=far), "far_numa").evidence
    assert "far_numa" not in found(case(processes={"far": (("GPU-1", "32-63"),)}))
    once = case(processes=far)
    changed = once._replace(looks=(*once.looks[:-1], HostLook(evidence(19), 0.3)))
    assert "far_numa" not in found(changed)


@pytest.mark.parametrize(("share", "confidence"), [(0.25, "medium"), (0.5, "medium"), (1.0, None), (0.9, None)])
def test_link_degraded(share: float, confidence: str | None) -> None:
    one = case(about={"link": share, "link_text": "15.8 of 63.0 GB/s"})
    assert found(one).get("link_degraded") == confidence


def with_bursts(
    at: tuple[int, ...],
    within: float,
    between: float = 0.9,
    pauses: tuple[int, ...] = (),
    number: int = 40,
    **changes: Any,
) -> CauseCase:
    """`pauses`: looks in which the GPU rests as in a burst, but nothing is written."""
    looks = [
        HostLook(evidence(position, **(BURST | changes)), within)
        if position in at
        else HostLook(evidence(position), within if position in pauses else between)
        for position in range(number)
    ]
    return case("bursty", about={"looks": tuple(looks)})


@pytest.mark.parametrize(
    ("one", "confidence"),
    [
        (with_bursts((3, 10, 20, 30), 0.1), "high"),
        (with_bursts((3, 10, 20), 0.1), "medium"),
        (with_bursts((3, 10, 20, 30), 0.1, received=2e8), None),  # it stages data
        (with_bursts((3, 10), 0.1), None),  # twice may be chance
        (with_bursts((3, 4, 5, 6), 0.1), None),  # one long burst
        (with_bursts((3, 10, 20, 30), 0.9), None),  # the GPU works on
        (with_bursts((3, 10, 20, 30), 0.1, 0.15), None),  # it does not work between either
        (with_bursts((3, 10, 20, 30), 0.1, 0.5), "high"),
        (with_bursts((3, 10, 20, 30), 0.1, pauses=(15, 16)), "high"),  # an evaluation
        (with_bursts((3, 10, 20, 30), 0.1, pauses=(4, 5, 21, 22)), None),  # it waits for its next input
        (with_bursts((0, 2, 4, 6), 0.1, number=7), None),  # three looks do not show what it does between
        (with_bursts((3, 10, 20, 30), 0.1, written=0.0, sent=3e7), "high"),  # over the network
    ],
)
def test_checkpointing(one: CauseCase, confidence: str | None) -> None:
    assert found(one).get("checkpointing") == confidence


NFS = {"network_files": ("nfs4",)}


@pytest.mark.parametrize(
    ("changes", "processes", "confidence"),
    [
        ({**NFS, "files": FileEvidence(10.0, 5e6, 4, 0)}, {"blocked": 2}, "high"),
        ({**NFS, "files": FileEvidence(10.0, 5e5, 4, 0)}, {"blocked": 2}, "medium"),
        ({**NFS, "files": FileEvidence(10.0, 5e6, 4, 0)}, {}, None),  # the log of a job, and no process waits
        ({**NFS, "pressure_io": 0.4, "files": FileEvidence(10.0, 5e6, 4, 0)}, {}, "high"),
        ({**NFS, "files": FileEvidence(10.0, 5e6, 2, 4)}, {"blocked": 2}, None),  # most of its files are local
        ({**NFS, "files": FileEvidence(0.0, 0.0, 4, 0)}, {}, None),  # it reads nothing
        # FUSE may be local: the image of a container
        ({"network_files": ("fuse",), "files": FileEvidence(10.0, 5e6, 4, 0)}, {"blocked": 2}, None),
        ({"network_files": ("fuse", "nfs4"), "files": FileEvidence(10.0, 5e6, 0, 0)}, {"blocked": 2}, None),
        (NFS, {"blocked": 2}, "low"),  # without the right to trace
        ({**NFS, "pressure_io": 0.4}, {}, "low"),
        (NFS, {}, None),
        ({"files": FileEvidence(10.0, 5e6, 4, 0)}, {"blocked": 2}, None),
        ({**NFS, "cores": 7.9, "files": FileEvidence(10.0, 5e6, 4, 0)}, {}, None),  # its CPUs are full
    ],
)
def test_remote_io(changes: dict[str, Any], processes: dict[str, Any], confidence: str | None) -> None:
    assert found(case(processes=processes, **changes)).get("remote_io") == confidence


@pytest.mark.parametrize(
    ("files", "blocked", "confidence"),
    [
        (FileEvidence(2000.0, 2000 * 4096.0, 0, 9), 2, "high"),
        (FileEvidence(2000.0, 2000 * 4096.0, 0, 9), 0, "low"),
        (FileEvidence(2000.0, 2000 * 30_000.0, 0, 9), 2, "medium"),
        (FileEvidence(2000.0, 2000 * 200_000.0, 0, 9), 0, None),
        (FileEvidence(100.0, 100 * 4096.0, 0, 9), 2, None),
        (None, 2, None),
    ],
)
def test_small_file_io(files: FileEvidence | None, blocked: int, confidence: str | None) -> None:
    assert found(case(files=files, processes={"blocked": blocked})).get("small_file_io") == confidence


@pytest.mark.parametrize(
    ("one", "needs"),
    [
        (case(looks=0), "the holder's cgroup: mount /sys/fs/cgroup (--path.cgroup)"),
        (
            case(looks=0, about={"held_s": 60.0}),
            "more readings of its host, which take a few minutes, or longer on a crowded node",
        ),
        (case(looks=3), "more readings of its host, which take a few minutes, or longer on a crowded node"),
        (case(processes=None), "the host's processes: hostPID, or the host's /proc (--path.procfs)"),
        (case(**NFS), "the right to trace processes, for their open files (causes.files)"),
        (case(about={"link": None}), "the PCIe link of the GPU while it works (collector pcie-link)"),
    ],
)
def test_what_is_missing_is_named_with_the_remedy(one: CauseCase, needs: str) -> None:
    assert needs in find_causes(one).needs


def test_a_holder_without_a_limit_is_advised_on_its_share_of_the_host() -> None:
    """Eight holders that each take all free CPUs would take them eight times."""
    one = case(processes=LOADER, cpus=None, quota=None, about={"share": 0.125})
    part = "8 of 58.6 CPUs: other holders may need the rest"
    assert the(one, "too_few_workers").advice == f"set num_workers of the DataLoader to 7 ({part})"


def test_rare_looks_on_a_crowded_node_are_enough() -> None:
    looks = [evidence(8 * position, CROWD, **FOUR, throttled=0.7) for position in range(4)]  # one in two minutes
    one = case(about={"looks": tuple(HostLook(each, 0.3) for each in looks)})
    assert found(one)["cpu_oversubscribed"] == "high"


def test_a_look_at_a_part_of_the_processes_lowers_no_confidence_but_is_reported() -> None:
    one = case(processes={**CROWD, "is_all": False}, **FOUR, throttled=0.71)
    assert the(one, "cpu_oversubscribed").against == "the exporter looked at only 512 of its processes"


def test_work_on_cpus_only_is_no_matter_of_threads() -> None:
    assert found(case("held_no_process", processes=CROWD, **FOUR, throttled=0.71)) == {"no_process": "medium"}


def test_of_several_causes_people_see_the_most_certain_first_and_two_are_published() -> None:
    one = case(processes={**CROWD, "far": (("GPU-0", "1"),)}, **FOUR, throttled=0.71, shm_bytes=63.0, shm_limit=64.0)
    causes = find_causes(one)
    assert [cause.name for cause in causes.ranked] == ["cpu_oversubscribed", "shm_full", "far_numa"]
    assert [cause.name for cause in causes.published] == ["cpu_oversubscribed", "shm_full"]
    low = find_causes(case(cores=1.1, processes={"rank_cores": 0.98}))
    assert [cause.confidence for cause in low.found] == ["low"]
    assert low.published == ()


def test_old_looks_do_not_keep_a_cause_that_has_ended() -> None:
    crowded = [HostLook(evidence(position, CROWD, **FOUR, throttled=0.7), 0.3) for position in range(20)]
    mended = [HostLook(evidence(20 + position, {"runnable": 4}, **FOUR, throttled=0.0), 0.9) for position in range(20)]
    assert "cpu_oversubscribed" in found(case(about={"looks": tuple(crowded)}))
    assert found(case(about={"looks": (*crowded, *mended)})) == {}


# Their confidence falls with the numbers themselves.
BY_DEGREE = ("cpu_quota", "cpu_oversubscribed", "late_rank", "checkpointing", "small_file_io")
numbers = st.one_of(st.none(), st.floats(0.0, 1e9), st.sampled_from([0.0, 1.0, 0.5]))
processes = st.one_of(
    st.none(),
    st.builds(
        ProcessEvidence,
        processes=st.integers(0, 512),
        is_all=st.booleans(),
        ranks=st.one_of(st.none(), st.integers(0, 8)),
        rank_cores=numbers,
        loaders=st.one_of(st.none(), st.integers(0, 512)),
        named_loaders=st.integers(0, 9),
        loader_cores=st.floats(0, 500),
        loader_most=st.floats(0, 2),
        loader_bytes=numbers,
        runnable=st.integers(0, 900),
        blocked=st.integers(0, 9),
        stopped=st.integers(0, 9),
        terminal=st.booleans(),
    ),
)
hosts = st.builds(
    lambda values, seen, files: HostEvidence(0.0, 15.0, processes=seen, files=files, **values),
    st.fixed_dictionaries(
        {
            name: numbers
            for name in HostEvidence._fields
            if name not in ("start", "end", "processes", "files", "network_files")
        }
    ),
    processes,
    st.one_of(st.none(), st.builds(FileEvidence, st.floats(0, 1e6), st.floats(0, 1e9), st.integers(0, 9), st.integers(0, 9))),
)  # fmt: skip


@given(
    st.sampled_from(sorted(STATES)),
    st.lists(hosts, min_size=1, max_size=3).flatmap(
        lambda kinds: st.lists(st.tuples(st.sampled_from(kinds), st.one_of(st.none(), st.floats(0, 1))), max_size=8)
    ),
    st.one_of(st.none(), st.booleans()),
    numbers,
)
def test_any_evidence_gives_causes_with_evidence_and_advice_and_never_an_error(
    state: str, looks: list[tuple[HostEvidence, float | None]], worked: bool | None, mean: float | None
) -> None:
    moved = [
        HostLook(each._replace(start=15.0 * at, end=15.0 * (at + 1)), share) for at, (each, share) in enumerate(looks)
    ]
    one = case(state, about={"looks": tuple(moved), "worked": worked, "mean": mean})
    causes = find_causes(one)
    for cause in causes.found:
        assert isinstance(cause, Cause)
        assert cause.confidence in ("high", "medium", "low")
        assert cause.evidence
        assert cause.advice
        assert cause.confidence == "high" or cause.against or cause.name in BY_DEGREE
    assert len({cause.name for cause in causes.found}) == len(causes.found)


def test_every_rule_is_described() -> None:
    assert all(rule.states <= STATES and rule.needs for rule in RULES.values())
    measured = {"data_parallel", "checkpoint_share", "cpu_logging"}  # by the loop itself, so there is no doubt
    assert {name for name, rule in RULES.items() if not rule.against} == measured


def test_rank_0_that_prepares_data_on_the_cpus_is_no_gpu_that_nobody_needs() -> None:
    """As in hiyouga/LlamaFactory#2424: three ranks are at 100 % in a barrier, GPU 0 is idle, processes are not visible."""
    four = (
        HeldGpu("GPU-0", "0", 0.0, None, 6000.0),
        *(HeldGpu(f"GPU-{number}", str(number), 1.0, None, 0.0) for number in (1, 2, 3)),
    )
    about: dict[str, Any] = {"members": four, "processes": None}
    busy = case("held_idle", processes=None, cores=31.0, cpus=32.0, quota=None, about=about)
    assert found(busy)["unused_gpu"] == found(busy)["cpu_work"] == "low"
    assert "31.0 CPUs; this GPU does nothing, and 3 of its other GPUs are busy" in the(busy, "cpu_work").evidence
    calm = case("held_idle", processes=None, cores=4.0, cpus=32.0, quota=None, about=about)
    assert found(calm)["unused_gpu"] == "medium"
    assert "cpu_work" not in found(calm)


@pytest.mark.parametrize(("allowed", "causes"), [(1, {"pinned_loaders": "medium"}), (8, {"cpu_bound_input": "high"})])
def test_where_all_of_a_holder_is_bound_the_binding_is_named_and_not_who_made_it(
    allowed: int, causes: dict[str, str]
) -> None:
    """Slurm binds jobs too. On eight of eight CPUs, nothing binds it."""
    cores = 0.99 * allowed
    loaders = {"loaders": 12, "named_loaders": 12, "loader_cores": 0.9 * cores, "rank_cores": 0.1}
    seen = {**loaders, "cpus": allowed, "loader_cpus": allowed, "runnable": allowed + 1}
    one = case(processes=seen, cpus=None, quota=None, cores=cores, host_cpus=8.0, host_busy=cores / 8)
    assert found(one) == causes
    if allowed == 1:
        cause = the(one, "pinned_loaders")
        assert cause.evidence.startswith("12 loaders may run only on 1 of the host's 8 CPUs")
        assert "as Slurm does" in cause.against
        assert "or ask Slurm for more CPUs" in (cause.advice or "")
