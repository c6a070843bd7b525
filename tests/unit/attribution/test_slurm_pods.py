"""Pods that run slurmd: the holders of their GPUs, with and without Slurm's report."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.testbed.simulated_node import SimulatedNode

from gpu_exporter.agent.attribution.processes import UnitOwners
from gpu_exporter.agent.attribution.slurm.pods import WHY, SlurmPods
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.common.cgroup import ProcessOwner
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.holders import Grant, Holder, HolderKey, Use
from gpu_exporter.common.model.units import UnitId

FIRST, SECOND, OTHER = (f"2c9f8a79-5391-454b-88cb-86190881cb9{number}" for number in range(3))
NAMES = {FIRST: ("slurm", "gpu-worker-0"), SECOND: ("slurm", "gpu-worker-1"), OTHER: ("ml", "train-0")}
PATTERN = "slurm/*-worker-?, hpc/slurmd-*"
GPU = UnitId("GPU-a")


def pod(uid: str, device: str = "GPU-a", known: bool = True) -> Grant:
    namespace, name = NAMES[uid]
    key = HolderKey("kubernetes", f"{uid}/main")
    return Grant("uuid", device, Holder(key, namespace, name, "main", pod_uid=uid if known else "", source="kubelet"))


def job(number: int, device: str = "GPU-a") -> Grant:
    return Grant("uuid", device, Holder(HolderKey("slurm", f"lab/{number}/0/"), job_id=str(number), source="slurm"))


def seen(*owners: ProcessOwner) -> dict[UnitId, UnitOwners]:
    return {GPU: UnitOwners({owner: Use(1, 100) for owner in owners}, is_complete=True)}


def inside(uid: str, number: int | str = "") -> ProcessOwner:
    """A process in slurmd's pod, of a job whose number the cgroup shows, or of a job under proctrack/linuxproc."""
    return ProcessOwner((uid,), bool(number), str(number), "batch" if number else "", "c" * 64)


@pytest.mark.parametrize("known", [True, False])  # without the folders of the pods' logs, the UID is unknown
def test_a_pod_that_the_site_names_holds_nothing_and_its_jobs_hold_gpus(known: bool) -> None:
    pods = SlurmPods(PATTERN, asks_slurm=True)
    held = [pod(FIRST, known=known), pod(FIRST, "GPU-b", known=known), pod(OTHER, "GPU-c"), job(42)]
    assert pods.apply(held, {})[0] == [pod(OTHER, "GPU-c"), job(42)]


def test_a_pod_with_a_process_of_a_job_is_recognized_and_remains_so() -> None:
    pods = SlurmPods("", asks_slurm=True)
    held = [pod(FIRST), pod(FIRST, "GPU-b"), pod(OTHER, "GPU-c"), job(42)]
    assert pods.apply(held, {})[0] == held
    assert pods.apply(held, seen(inside(FIRST, 42)))[0] == [pod(OTHER, "GPU-c"), job(42)]
    assert pods.apply([pod(FIRST), pod(OTHER, "GPU-c")], {})[0] == [pod(OTHER, "GPU-c")]  # the job has ended
    assert pods.apply([pod(OTHER, "GPU-c")], {})[0] == [pod(OTHER, "GPU-c")]
    # a kubelet that forgot the pod: it is shown again by its next job
    assert pods.apply([pod(FIRST)], {})[0] == [pod(FIRST)]


@pytest.mark.parametrize(
    "owner", [inside(FIRST, 43), inside(FIRST), ProcessOwner((), True, "42"), ProcessOwner((OTHER,))]
)
def test_a_job_that_slurm_does_not_have_here_proves_no_slurmd_pod(owner: ProcessOwner) -> None:
    held = [pod(FIRST), job(42, "GPU-b")]
    assert SlurmPods("", asks_slurm=True).apply(held, seen(owner)) == (held, seen(owner))


@pytest.mark.parametrize(
    ("namespace", "name", "is_node"),
    [
        ("slurm-test", "gpu-worker-0", False),
        ("ml", "gpu-worker-0", False),
        ("slurm", "gpu-worker-10", False),
        ("slurm", "-worker-1", True),
        ("hpc", "slurmd-", True),
        ("hpc", "Slurmd-1", False),
    ],
)
def test_a_pattern_must_match_the_whole_name(namespace: str, name: str, is_node: bool) -> None:
    held = [pod(FIRST)._replace(holder=pod(FIRST).holder._replace(namespace=namespace, pod=name))]
    assert SlurmPods(PATTERN, asks_slurm=True).apply(held, {})[0] == ([] if is_node else held)


def test_if_slurm_is_not_asked_the_pod_holds_its_gpus_and_is_not_judged() -> None:
    held = [pod(FIRST), pod(OTHER, "GPU-c")]
    found, owners = SlurmPods(PATTERN, asks_slurm=False).apply(held, seen(inside(FIRST, 42)))
    assert owners == seen(inside(FIRST, 42))  # the pod's own processes
    assert found == [pod(FIRST)._replace(running=False, why=WHY, obstacle="slurmd"), pod(OTHER, "GPU-c")]


def test_of_two_slurm_nodes_on_one_host_only_the_node_with_known_jobs_has_free_gpus() -> None:
    """Slurm was asked about one node, so the jobs of the other node are unknown."""
    pods = SlurmPods(PATTERN, asks_slurm=True)
    both = [pod(FIRST), pod(SECOND, "GPU-b")]
    doubted = [grant._replace(running=False, why=WHY, obstacle="slurmd") for grant in both]
    assert pods.apply(both, {})[0] == doubted
    assert pods.apply([*both, job(42)], seen(inside(FIRST, 42)))[0] == [doubted[1], job(42)]


def test_processes_in_a_slurmd_pod_belong_to_a_job() -> None:
    pods = SlurmPods(PATTERN, asks_slurm=True)
    around = [inside(FIRST, 42), inside(FIRST), inside(FIRST)._replace(container="d" * 64), ProcessOwner((OTHER,))]
    _, found = pods.apply([pod(FIRST), job(42)], seen(*around))
    assert found[GPU].uses == {
        ProcessOwner(slurm=True, job="42", step="batch"): Use(1, 100),
        ProcessOwner(slurm=True): Use(2, 200),
        ProcessOwner((OTHER,)): Use(1, 100),
    }


TWO = {"gpus": [{"model": "H100"}, {"model": "H100"}]}


@pytest.mark.parametrize(
    ("patterns", "owner"), [(PATTERN, None), (PATTERN, inside(FIRST)), ("", inside(FIRST, 42)), (PATTERN, "rest")]
)
def test_a_slurm_job_in_a_pod_is_judged_and_the_gpu_beside_it_is_free(
    patterns: str, owner: ProcessOwner | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings()
    settings = settings._replace(attribution=settings.attribution._replace(slurm_pods=patterns))
    node = SimulatedNode(parse_scenario(TWO), settings, asks_slurm=True)
    uuids = [node.unit(index).uuid for index in range(2)]
    grants: Sequence[Grant] = [pod(FIRST, uuids[0]), pod(FIRST, uuids[1]), job(42, uuids[0])]
    monkeypatch.setattr(node.poller, "grants", lambda: [g._replace(confirmed=node.clock.monotonic()) for g in grants])
    if isinstance(owner, ProcessOwner):
        node.owners = {UnitId(uuids[0]): [owner]}
    elif owner is not None:  # slurmd runs a job under proctrack/linuxproc, while Slurm reports no job
        node.owners = {UnitId(uuids[1]): [inside(FIRST)]}
    view = node.run(60.0)
    (held,) = view.allocations
    assert (held.allocation.holder.job_id, held.allocation.contradiction) == ("42", "")
    assert held.totals.idle_run_s is not None and held.totals.idle_run_s > 40.0
    in_use = "in use by a Slurm job whose id is unknown, which no source reports"
    assert view.gpus[1].not_free == ({"": in_use} if owner == "rest" else {})


def test_slurm_and_kubelet_contradict_each_other_if_the_pod_is_not_known_to_run_slurmd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = SimulatedNode(parse_scenario(TWO), asks_slurm=True)
    uuid = node.unit(0).uuid
    grants = [pod(FIRST, uuid), job(42, uuid)]
    monkeypatch.setattr(node.poller, "grants", lambda: [g._replace(confirmed=node.clock.monotonic()) for g in grants])
    (held,) = node.run(60.0).allocations
    assert held.allocation.contradiction == "kubelet reports slurm/gpu-worker-0/main, slurm reports job 42"
