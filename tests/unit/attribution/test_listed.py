"""A listed device is not always held: from entries of the kubelet to the view, for pods of every kind in any order."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.testbed.podresources import begin_container, messages
from tests.testbed.simulated_node import SimulatedNode

from gpu_exporter.agent.attribution.kubelet.alive import LOOK_S, PodLives
from gpu_exporter.agent.attribution.kubelet.consumers import Consumers, parse_monitor
from gpu_exporter.agent.attribution.kubelet.podresources import LIST
from gpu_exporter.agent.attribution.kubelet.source import KubeletOptions, KubeletSource
from gpu_exporter.agent.devices.protocol import Processes
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.views import View
from gpu_exporter.common.vendor import NVIDIA

OWN = "00000000-0000-4000-8000-000000000000"
DRIVER = "gpu.nvidia.com"
GPUS = 4
SCENARIO = parse_scenario({"gpus": [{"model": "H100", "load": {"kind": "constant", "value": 0.5}}] * GPUS})
UUIDS = [gpu.uuid for gpu in SCENARIO.gpus]


def place(uids: Iterable[str]) -> dict[str, PurePosixPath]:
    """Cgroups of these pods, in a mount that shows the kubelet's folder."""
    return {uid: PurePosixPath(f"kubepods/burstable/pod{uid}") for uid in uids}


class Pod(NamedTuple):
    """A pod in the kubelet's list. `plugin`: ids of its devices. `claims`: names of claims and their devices."""

    name: str
    namespace: str = "ml"
    plugin: Sequence[str] = ()
    claims: Sequence[tuple[str, str]] = ()
    ended: bool = False
    share: str = ""

    @property
    def uid(self) -> str:
        return f"00000000-0000-4000-8000-{abs(hash((self.namespace, self.name))) % 10**12:012d}"


class Cluster:
    """A simulated node with a kubelet that lists these pods. Ended pods have no cgroup."""

    def __init__(self, folder: Path, pods: Sequence[Pod] = (), booted_s: float = 86_400.0) -> None:
        """`booted_s`: how long the node has been up."""
        self.logs = folder
        self.booted_s = booted_s
        self.pods: list[Pod] = []
        self.offered: list[str] = []
        self.nameless: set[str] = set()  # pods without a folder of logs
        self.sees_cgroups = self.finds_itself = self.sees_processes = True
        self.node = SimulatedNode(SCENARIO, make_source=self._make_source)
        self.list(*pods)

    def _make_source(self, clock: Clock) -> KubeletSource:
        monitors = [parse_monitor(text) for text in NVIDIA.monitors]
        lives = PodLives(self._find, OWN, list_inside=self._list_inside)
        booted = clock.wall() - self.booted_s
        return KubeletSource(
            clock,
            KubeletOptions(socket=Path("/none"), logs=self.logs, boot_wall=booted),
            consumers=Consumers(monitors),
            lives=lives,
            vendor=NVIDIA,
        )

    def _find(self, wanted: Set[str]) -> dict[str, PurePosixPath]:
        there = {pod.uid for pod in self.pods if not pod.ended} | ({OWN} if self.finds_itself else set())
        return place(wanted & there if self.sees_cgroups else ())

    def _list_inside(self, folder: PurePosixPath) -> set[str]:
        assert folder == PurePosixPath("kubepods")
        return {pod.uid for pod in self.pods if not pod.ended} | {OWN} | self.nameless

    def list(self, *pods: Pod) -> None:
        self.pods = list(pods)
        for pod in pods:
            begin_container(self.logs, f"{pod.namespace}_{pod.name}_{pod.uid}")

    def answer(self, method: str) -> bytes:
        response = messages().ListPodResourcesResponse()
        if method != LIST:
            answer = messages().AllocatableResourcesResponse()
            for device_id in self.offered:
                answer.devices.add(resource_name="nvidia.com/gpu", device_ids=[device_id])
            return bytes(answer.SerializeToString())
        for pod in self.pods:
            container = response.pod_resources.add(name=pod.name, namespace=pod.namespace).containers.add(name="main")
            for device_id in pod.plugin:
                container.devices.add(resource_name="nvidia.com/gpu", device_ids=[device_id])
            for claim, device in pod.claims:
                dynamic = container.dynamic_resources.add(claim_name=claim, claim_namespace=pod.namespace)
                resource = dynamic.claim_resources.add(driver_name=DRIVER, pool_name="node", device_name=device)
                if pod.share:
                    resource.share_id = pod.share
        return bytes(response.SerializeToString())

    def run(self, seconds: float = 2 * LOOK_S + 30.0) -> View:
        """Sample and poll every 15 s, which the ledger still charges."""
        with mock.patch(
            "gpu_exporter.agent.attribution.kubelet.source.call",
            lambda socket, method, request, timeout: self.answer(method),
        ):
            if self.sees_processes:  # on one GPU, for one cycle: after that an empty list means no process
                self.sees_processes = False
                with mock.patch.object(self.node.samplers[0].device, "read_processes", lambda: Processes(1, 0)):
                    self.node.sample()
            for _ in range(int(seconds / 15)):
                self.node.clock.advance(15.0)
                self.node.sample()
                self.node.poll()
        return self.node.view()


@contextmanager
def cluster(*pods: Pod, booted_s: float = 86_400.0) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory() as folder:
        yield Cluster(Path(folder), pods, booted_s)


def rows(view: View, family: str) -> dict[str, float]:
    """Values by UUID."""
    found = [series for series in list_series(view) if series.family.name == family]
    return {labels[1]: value for series in found for labels, value in series.rows}


def holders(view: View) -> set[tuple[str, str, str, str]]:
    return {
        (
            each.allocation.holder.pod,
            str(each.gpu),
            each.allocation.share,
            each.verdict.evidence if each.obstacle else "",
        )
        for each in view.allocations
    }


def held_s(view: View) -> dict[str, float]:
    return {tenant.namespace: totals.held_s for tenant, totals in view.tenants}


ALL = [("gpus-x1", f"gpu-{minor}") for minor in range(GPUS)]
MONITOR = Pod("nvidia-dcgm-exporter-x", "gpu-operator", claims=ALL)
STRANGER = Pod("nvidia-dcgm-exporter-x", "team", claims=ALL)
TRAIN = Pod("train", claims=[("own", "gpu-0")])


@pytest.mark.parametrize("order", [(MONITOR, TRAIN), (TRAIN, MONITOR)])
def test_a_pod_that_is_named_as_a_monitor_holds_nothing(order: tuple[Pod, ...]) -> None:
    with cluster(*order) as it:
        view = it.run()
        assert holders(view) == {("train", "0", "none", "")}
        (train,) = view.allocations
        assert train.utilization == 0.5 and train.allocation.holder.units == 1
        assert rows(view, "gpu_allocated") == {uuid: float(uuid == UUIDS[0]) for uuid in UUIDS}
        assert held_s(view).keys() == {"ml"} and held_s(view)["ml"] > 100


@pytest.mark.parametrize("order", [(STRANGER, TRAIN), (TRAIN, STRANGER)])
def test_of_two_claims_on_a_gpu_one_only_watches_and_neither_is_judged(order: tuple[Pod, ...]) -> None:
    """A pod's name alone does not make it a monitor, because a tenant chooses the name."""
    with cluster(*order) as it:
        view = it.run()
        found = {(each.allocation.holder.pod, each.gpu): each for each in view.allocations}
        assert found.keys() == {("train", 0), *((STRANGER.name, gpu) for gpu in range(GPUS))}
        for each in view.allocations:
            assert each.allocation.share == "none"
            assert each.verdict.state == "unknown" and "--attribution.monitor" in each.verdict.evidence
            assert each.totals.idle_run_s is None and each.utilization is None
        assert rows(view, "gpu_allocated") == dict.fromkeys(UUIDS, 1.0)
        assert sum(held_s(view).values()) <= GPUS * 150.0
        (status,) = view.status.sources
        assert "adminAccess" in status.error and status.up
        it.list(TRAIN)
        (train,) = it.run().allocations
        assert not train.allocation.contradiction and train.utilization == 0.5


def test_pods_that_share_a_claim_share_its_gpu() -> None:
    pods = [Pod(name, claims=[("common", "gpu-1")]) for name in "ab"]
    pods[1] = pods[1]._replace(namespace="ml")
    with cluster(*pods) as it:
        assert {found[:3] for found in holders(it.run())} == {("a", "1", "time_slice"), ("b", "1", "time_slice")}
    parts = [Pod(name, claims=[(name, "gpu-1")], share="part") for name in "ab"]
    with cluster(*parts, MONITOR) as it:
        assert {found[:3] for found in holders(it.run())} == {("a", "1", "time_slice"), ("b", "1", "time_slice")}


def test_a_claim_on_a_gpu_from_a_device_plugin_only_watches() -> None:
    with cluster(Pod("main", plugin=[UUIDS[2]]), STRANGER) as it:
        view = it.run(600)
        (main,) = [each for each in view.allocations if each.gpu == 2]
        assert (main.allocation.holder.pod, main.allocation.share_ratio) == ("main", 1), (
            "a device plugin gives the device away"
        )
        assert not main.allocation.contradiction
        others = [each for each in view.allocations if each.gpu != 2]
        assert len(others) == GPUS - 1
        assert all("this claim may only watch" in each.verdict.evidence for each in others)
        assert held_s(view)["ml"] == pytest.approx(held_s(view)["team"] / (GPUS - 1))


def test_an_ended_pod_holds_nothing_after_two_looks() -> None:
    done = Pod("done", plugin=[UUIDS[0]], ended=True)
    with cluster(done, Pod("lives")) as it:
        before = it.run(LOOK_S)
        assert {each.allocation.holder.pod for each in before.allocations} == {"done"}
        view = it.run(LOOK_S)
        assert not view.allocations
        assert rows(view, "gpu_allocated") == dict.fromkeys(UUIDS, 0.0)
        charged = held_s(view)["ml"]
        assert held_s(it.run())["ml"] == charged


def test_an_empty_list_frees_no_gpu_if_no_process_was_ever_listed() -> None:
    """Inside a container without the host's PID namespace NVML lists no process, even while processes run."""
    with cluster(Pod("done", plugin=[UUIDS[0]], ended=True), Pod("lives")) as it:
        it.sees_processes = False
        view = it.run()
        assert not view.allocations
        assert UUIDS[0] not in rows(view, "gpu_allocated")
        assert "has ended, but the driver does not list the GPU's processes" in str(view.gpus[0].not_free)


def test_a_failed_look_does_not_bring_an_ended_pod_back() -> None:
    done = Pod("done", plugin=[UUIDS[0]], ended=True)
    with cluster(done, Pod("lives")) as it:
        charged = held_s(it.run())["ml"]
        for broken in ("sees_cgroups", "finds_itself"):
            setattr(it, broken, False)
            assert not it.run(300).allocations
            setattr(it, broken, True)
        more = [Pod(f"done-{number}", ended=True) for number in range(5)]
        it.list(done, Pod("lives"), *more)  # most listed pods have ended by now
        view = it.run(300)
        assert not view.allocations
        assert held_s(view)["ml"] == charged
        it.pods[0] = done._replace(ended=False)  # its cgroup exists again, so the pod had not ended
        assert [each.allocation.holder.pod for each in it.run().allocations] == ["done"]


def test_two_looks_must_agree_even_with_other_events_between_them() -> None:
    pod, own = "00000000-0000-4000-8000-000000000001", OWN
    looks = [{own}, {pod}, {own}, {own}]
    lives = PodLives(lambda uids: place(uids & looks[0]), own)
    ended = []
    for number in range(4):
        ended.append(bool(lives.ended({own, pod}, {pod}, number * LOOK_S)))
        looks = looks[1:] or looks
    assert ended == [False, False, False, True], "its cgroup was seen in between"
    assert not PodLives(lambda uids: {}, own).are_there({pod})
    assert PodLives(lambda uids: None, own).are_there({pod}), "not all cgroups were visible"


def test_a_pod_that_began_before_the_node_has_time_to_get_its_cgroup() -> None:
    done = Pod("done", plugin=[UUIDS[0]], ended=True)
    with cluster(done, Pod("lives"), booted_s=-60.0) as it:
        assert len(it.run(300).allocations) == 1, "its cgroup may come late"
        assert not it.run(1200).allocations


@pytest.mark.parametrize("case", ["no_cgroups", "not_begun", "own_is_missing"])
def test_a_look_that_proves_nothing_ends_no_pod(case: str) -> None:
    with cluster(Pod("done", plugin=[UUIDS[0]], ended=True), Pod("lives")) as it:
        it.sees_cgroups, it.finds_itself = case != "no_cgroups", case != "own_is_missing"
        if case == "not_begun":
            for log in it.logs.glob("ml_done*/main/*.log"):
                log.unlink()
        assert {each.allocation.holder.pod for each in it.run(600).allocations} == {"done"}


@pytest.mark.parametrize("living", [0, 1, 50])
def test_completed_pods_that_outnumber_the_living_ones_hold_nothing(living: int) -> None:
    """Batch nodes keep 200 ended pods beside 50 living ones: kubernetes-mixin#442."""
    others = [Pod(f"batch-{number}", ended=number >= living) for number in range(250)]
    with cluster(Pod("done", plugin=[UUIDS[0]], ended=True), Pod("next", plugin=[UUIDS[0]]), *others) as it:
        (held,) = it.run().allocations
        assert (held.allocation.holder.pod, held.allocation.share_ratio) == ("next", 1)
        it.pods[1] = it.pods[1]._replace(ended=True)
        view = it.run()
        assert not view.allocations and rows(view, "gpu_allocated")[UUIDS[0]] == 0.0


def test_a_gpu_of_an_ended_holder_is_not_free_while_the_driver_lists_a_process() -> None:
    with cluster(Pod("done", plugin=[UUIDS[0]], ended=True), Pod("lives")) as it:
        with mock.patch.object(it.node.samplers[0].device, "read_processes", lambda: Processes(1, 0)):
            view = it.run()
        assert not view.allocations
        assert UUIDS[0] not in rows(view, "gpu_allocated")
        assert "has ended, but the driver lists processes" in str(view.gpus[0].not_free)
        assert rows(it.run(), "gpu_allocated")[UUIDS[0]] == 0.0


def test_a_gpu_of_an_ended_pod_is_not_free_while_a_pod_of_its_name_may_have_begun() -> None:
    """The kubelet lists no UID: a pod that waits for its volumes has a cgroup, and no folder of logs that names it."""
    with cluster(Pod("train-0", plugin=[UUIDS[0]], ended=True), Pod("lives")) as it:
        assert rows(it.run(), "gpu_allocated") == dict.fromkeys(UUIDS, 0.0)
        it.nameless = {"00000000-0000-4000-8000-00000000000f"}
        view = it.run(15)
        assert not view.allocations
        assert rows(view, "gpu_allocated") == dict.fromkeys(UUIDS[1:], 0.0)
        assert "ml/train-0/main has ended, but another pod of this name may have started" in str(view.gpus[0].not_free)
        it.nameless = set()
        assert rows(it.run(15), "gpu_allocated") == dict.fromkeys(UUIDS, 0.0)


def test_replicas_of_a_gpu_count_as_one_gpu() -> None:
    with cluster(Pod("quad", plugin=[f"{UUIDS[0]}::{number}" for number in range(6000)])) as it:
        (quad,) = it.run().allocations
        assert (quad.allocation.share, quad.allocation.share_ratio, quad.allocation.holder.units) == (
            "time_slice",
            1,
            1,
        )


def test_an_id_that_begins_with_a_uuid_frees_no_gpu() -> None:
    with cluster(Pod("share", plugin=[f"{UUIDS[0]}-_-{number}" for number in range(8)])) as it:
        view = it.run()
        assert not view.allocations and not rows(view, "gpu_allocated")
        (status,) = view.status.sources
        assert "its scheduler writes the chosen device" in status.error


DEVICES = st.integers(0, GPUS - 1)
ENDED = st.builds(
    lambda device, number, how: Pod(f"ended-{number}", "old", ended=True, **_ask(device, f"old-{number}", how)),
    DEVICES,
    st.integers(0, 3),
    st.sampled_from(["plugin", "replica", "claim"]),
)
WATCHING = st.builds(
    lambda number, devices: Pod(
        f"nvidia-dcgm-exporter-{number}", "gpu-operator", claims=[(f"w{number}", f"gpu-{each}") for each in devices]
    ),
    st.integers(0, 2),
    st.sets(DEVICES, min_size=1),
)
STRANGE = st.builds(
    lambda number, devices: Pod(f"agent-{number}", "watch", claims=[(f"s{number}", f"gpu-{each}") for each in devices]),
    st.integers(0, 1),
    st.sets(DEVICES, min_size=1),
)
HOW = st.sampled_from(["free", "plugin", "claim", "replicas", "common claim", "shares", "unknown id", "gpu-mem"])


def _ask(device: int, name: str, how: str) -> dict[str, Any]:
    if how == "claim":
        return {"claims": [(f"c-{name}", f"gpu-{device}")]}
    return {"plugin": [f"{UUIDS[device]}::7" if how == "replica" else UUIDS[device]]}


def _holding(device: int, how: str) -> list[Pod]:
    """Pods that hold this device, in one of the ways in which a scheduler allocates it."""
    names = [f"p{device}-{number}" for number in range(2)]
    return {
        "free": [],
        "plugin": [Pod(names[0], plugin=[UUIDS[device]])],
        "claim": [Pod(names[0], claims=[(names[0], f"gpu-{device}")])],
        "replicas": [Pod(name, plugin=[f"{UUIDS[device]}::{at}{n}" for n in "012"]) for at, name in enumerate(names)],
        "common claim": [Pod(name, claims=[(f"both-{device}", f"gpu-{device}")]) for name in names],
        "shares": [Pod(name, claims=[(name, f"gpu-{device}")], share=name) for name in names],
        "unknown id": [Pod(names[0], plugin=["nvidia9/gi1/ci3"])],
        "gpu-mem": [Pod(names[0], plugin=[f"{UUIDS[device]}-_-{number}" for number in range(3)])],
    }[how]


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.lists(HOW, min_size=GPUS, max_size=GPUS),
    st.lists(st.one_of(ENDED, WATCHING, STRANGE), max_size=6, unique_by=lambda pod: pod.name),
    st.randoms(use_true_random=False),
)
def test_for_any_list_no_pod_gets_anothers_gpu_and_no_held_gpu_is_free(
    ways: list[str], others: list[Pod], order: Any
) -> None:
    holding = [_holding(device, how) for device, how in enumerate(ways)]
    pods = [pod for several in holding for pod in several] + others
    order.shuffle(pods)
    with cluster(*pods) as it:
        began = it.node.clock.monotonic()
        it.run()
        order.shuffle(it.pods)
        view = it.run(60)
        elapsed = it.node.clock.monotonic() - began
        assert sum(held_s(view).values()) <= GPUS * elapsed * 1.001
        assert held_s(view).get("gpu-operator", 0.0) == 0.0
        shown = {each.allocation.holder.pod for each in view.allocations}
        assert not any(name.startswith(("ended-", "nvidia-dcgm-")) for name in shown)
        free = {uuid for uuid, held in rows(view, "gpu_allocated").items() if not held}
        unclear = {"unknown id", "gpu-mem"} & set(ways)
        taken = {UUIDS[device] for device, how in enumerate(ways) if how != "free"}
        assert not free & taken
        assert not (free and unclear), "some GPU is held, and it is unknown which"
        watched = {int(device[-1]) for pod in others if pod.namespace == "watch" for _, device in pod.claims}
        for device, how in enumerate(ways):
            if how == "free" and device not in watched and not unclear:
                assert UUIDS[device] in free
            if how in ("plugin", "claim", "replicas", "common claim", "shares"):
                names = {pod.name for pod in holding[device]}
                here = [each for each in view.allocations if each.gpu == device and each.allocation.holder.pod in names]
                assert {each.allocation.holder.pod for each in here} == names
                assert all(each.allocation.holder.units == 1 for each in here)
                if device not in watched:
                    assert not any(each.allocation.contradiction for each in here)


def test_with_resource_claims_the_kubelets_offers_are_unknown() -> None:
    """A GPU that no claim holds may be reserved. GetAllocatableResources does not list it, and it is not withheld."""
    for claims, offers in (((("own", "gpu-0"),), None), ((), 1)):
        with cluster(Pod("main", plugin=[UUIDS[1]], claims=claims)) as it:
            it.offered = [UUIDS[1]]
            it.run(30)
            told = it.node.poller.offers()
            assert (told if told is None else len(told)) == offers
