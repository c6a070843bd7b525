"""Schedulers that share GPUs: a reservation pod holds nothing, and pods with fractions are named by their processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.testbed.podresources import Kubelet, begin_container
from tests.testbed.process_node import Node, read, states
from tests.testbed.processes import fetch, wait_for

UIDS = ("2c9f8a79-5391-454b-88cb-86190881cb96", "7922aa99-d4aa-4885-a953-82976860b23a")
RESERVATION = "gpu-reservation-1a2b3c4d5e6f7a8b"
RESERVED = "reserved by {} for fractions, and no process shows which pods have them"
FRACTION = (
    "its scheduler shares this GPU among pods, and a pod without a process on it cannot be seen, so no pod "
    "is judged; write the holders into a file for --attribution.static"
)


def cgroup(uid: str) -> str:
    return f"kubepods/burstable/pod{uid}/{'f' * 64}"


class Cluster:
    """A node, and the kubelet that reports its pods."""

    def __init__(self, node: Node, kubelet: Kubelet, logs: Path) -> None:
        self.node, self.kubelet, self.logs = node, kubelet, logs

    def add(self, namespace: str, pod: str, device: str = "", uid: str = UIDS[0]) -> None:
        """Adds a pod whose container has begun. `device`: the id that the kubelet reports for it, "" for none."""
        begin_container(self.logs, f"{namespace}_{pod}_{uid}")
        if device:
            self.kubelet.pods[namespace, pod] = {"main": {"nvidia.com/gpu": [device]}}

    def start(self, *flags: str, holders: Sequence[dict[str, str]] = ()) -> str:
        self.node.hold(*holders)
        socket = f"--attribution.kubelet.socket={self.kubelet.socket}"
        return self.node.start("--attribution.kubelet", socket, f"--attribution.kubelet.logs={self.logs}", *flags)


@pytest.fixture
def cluster(node: Node, tmp_path: Path) -> Iterator[Cluster]:
    kubelet = Kubelet(tmp_path / "kubelet.sock")
    kubelet.start()
    yield Cluster(node, kubelet, tmp_path / "pods")
    kubelet.stop()


def table(url: str, gpu: int) -> str:
    """The state and reason of a GPU as the table shows them."""
    rows = (fetch(f"{url}/api/v1/table") or "").splitlines()
    return next((row for row in rows if row.split()[:1] == [str(gpu)]), "")


@pytest.mark.parametrize(
    ("namespace", "flags"),
    [
        ("kai-resource-reservation", ()),
        ("runai-reservation", ()),
        ("gpu-sharing", ("--attribution.reservation=gpu-sharing",)),
    ],
)
def test_a_reservation_pod_holds_nothing_and_its_gpu_is_unknown(
    cluster: Cluster, namespace: str, flags: tuple[str, ...]
) -> None:
    cluster.add(namespace, RESERVATION, cluster.node.uuids[0])
    cluster.add("ml", "trainer-0", cluster.node.uuids[1], UIDS[1])
    url = cluster.start(*flags)
    wait_for(lambda: (read(url, "gpu_allocation_idle_run_seconds", pod="trainer-0") or 0) > 1, "the idle run of a pod")
    assert RESERVED.format(namespace) in table(url, 0) and " unknown " in table(url, 0)
    assert states(url, "pod").keys() == {"trainer-0"}
    assert read(url, "gpu_allocated", gpu="0") is None
    assert f'namespace="{namespace}"' not in (fetch(f"{url}/metrics") or "")


def test_pods_with_a_process_on_a_reserved_gpu_are_its_holders(cluster: Cluster) -> None:
    cluster.add("kai-resource-reservation", RESERVATION, cluster.node.uuids[0])
    cluster.add("ml", "notebook-0", uid=UIDS[1])
    url = cluster.start()
    wait_for(lambda: RESERVED.format("kai-resource-reservation") in table(url, 0), "the reservation")
    cluster.node.list_on(0, cluster.node.start_process(cgroup(UIDS[1])))
    wait_for(lambda: states(url, "pod") == {"notebook-0": ("unknown", FRACTION)} or None, "the pod with the fraction")
    labels = {"namespace": "ml", "pod": "notebook-0"}
    assert read(url, "gpu_allocation_info", source="process", **labels) == 1
    assert read(url, "gpu_allocation_activity_unknown", reason="fraction", **labels) == 1
    assert read(url, "gpu_allocation_idle_run_seconds", gpu="0") is None
    assert read(url, "gpu_allocated", gpu="0") == 1
    assert "no source allocated" not in cluster.node.log()
    cluster.node.list_on(0)
    wait_for(lambda: states(url, "pod") == {} or None, "the end of its process")
    assert RESERVED.format("kai-resource-reservation") in table(url, 0)
    assert read(url, "gpu_allocated", gpu="0") is None


def test_a_holder_in_the_administrators_file_has_the_reserved_gpu(cluster: Cluster) -> None:
    cluster.add("kai-resource-reservation", RESERVATION, cluster.node.uuids[0])
    cluster.add("ml", "notebook-0", uid=UIDS[1])
    held = {"uuid": cluster.node.uuids[0], "pod": "ml/notebook-0/main"}
    url = cluster.start(holders=[held])
    wait_for(lambda: read(url, "gpu_allocation_info", pod="notebook-0", source="static", share="time_slice"), "the pod")
    assert states(url, "pod").keys() == {"notebook-0"}
    assert read(url, "gpu_exporter_attribution_conflicts_total", source="kubelet") == 0


def test_a_holder_beside_a_reservation_is_never_judged_by_the_whole_gpu(cluster: Cluster) -> None:
    cluster.add("kai-resource-reservation", RESERVATION, cluster.node.uuids[0])
    cluster.add("ml", "trainer-0", cluster.node.uuids[0], UIDS[1])
    url = cluster.start()
    wait_for(lambda: read(url, "gpu_allocation_info", pod="trainer-0", share="time_slice"), "a shared holder")
    assert states(url, "pod").keys() == {"trainer-0"}


def test_pods_whose_device_the_kubelet_does_not_know_are_named_by_their_processes(cluster: Cluster) -> None:
    """HAMi's ids: a UUID with a suffix. The pod works on another GPU than the kubelet reports."""
    cluster.add("ml", "trainer-0", f"{cluster.node.uuids[0]}-4")
    cluster.node.list_on(1, cluster.node.start_process(cgroup(UIDS[0])))
    url = cluster.start()
    wait_for(lambda: states(url, "pod") == {"trainer-0": ("unknown", FRACTION)} or None, "the pod")
    assert read(url, "gpu_allocation_info", pod="trainer-0", gpu="1", source="process") == 1
    assert read(url, "gpu_allocated", gpu="0") is None
    assert (
        "ml/trainer-0/main may have this GPU: its scheduler writes the chosen device into the pod's annotations"
        in table(url, 0)
    )
    assert "no source allocated" not in cluster.node.log()
