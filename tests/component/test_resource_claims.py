"""Dynamic resource allocation by the real scheduler and kubelet, with a driver that names devices as NVIDIA's does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.testbed.control_plane import ControlPlane, start_control_plane
from tests.testbed.dra_driver import DraDriver
from tests.testbed.node import NODE, Node, start_node, static_pod
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import Processes, fetch, wait_for

pytestmark = pytest.mark.kubelet
BOARD = {"model": "H100", "mig": [{"profile": "2g.20gb", "gi": 3}, {"profile": "1g.10gb", "gi": 9}]}
SCENARIO = parse_scenario({"gpus": [*({"model": "H100"},) * 3, BOARD, *({"model": "H100"},) * 2]})
MINORS = (3, 0, 2, 1, 5, 4)  # of NVML's list
UUID_OF_MINOR = {minor: SCENARIO.gpus[index].uuid for index, minor in enumerate(MINORS)}
EXTENDED = "example.com/gpu"
INSTANCES = ("gpu-1-mig-2g20gb-14-0", "gpu-1-mig-1g10gb-19-2")
DEVICES = {"gpu-0": False, "gpu-2": True, "gpu-3": False, "gpu-4": False, "gpu-5": False} | dict.fromkeys(
    INSTANCES, False
)
CLAIMS = {
    "own": ["gpu-0"],
    "common": ["gpu-3"],
    "instances": INSTANCES,
    "part": ["gpu-2"],
    "rest": ["gpu-2"],
    "helper": ["gpu-4"],
}
PODS = {"a": "own", "b": "common", "c": "common", "d": "instances", "e": "part", "f": "rest", "g": "helper"}


@pytest.fixture
def plane(processes: Processes, tmp_path: Path) -> Iterator[ControlPlane]:
    with start_control_plane(processes, tmp_path / "control-plane", scheduler=True) as started:
        yield started


@pytest.fixture
def node(processes: Processes, plane: ControlPlane) -> Iterator[Node]:
    with start_node(processes, (), plane.node) as started:
        yield started


@pytest.fixture
def driver(plane: ControlPlane, node: Node) -> Iterator[DraDriver]:
    started = DraDriver(plane.api, node.root, NODE, DEVICES, EXTENDED)
    yield started
    started.stop()


def run_pod(plane: ControlPlane, name: str, claim: str) -> None:
    pod = static_pod(name, 0)
    pod["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimName": claim}]
    (container,) = pod["spec"]["containers"]
    resources = {"claims": [{"name": "gpus"}]}
    if claim == "helper":
        pod["spec"]["initContainers"] = [
            {**container, "name": "helper", "restartPolicy": "Always"} | {"resources": resources}
        ]
    else:
        container["resources"] = resources
    plane.create_pod(pod)


def start_exporter(processes: Processes, node: Node, config: Path, environment: dict[str, str], *flags: str) -> str:
    return processes.start_exporter(
        f"--config.file={config}",
        "--attribution.kubelet",
        f"--attribution.kubelet.socket={node.pod_resources}",
        f"--attribution.kubelet.logs={node.pod_logs}",
        "--no-attribution.slurm",
        *flags,
        environment=environment,
    )[1]


@pytest.fixture
def url(
    node: Node, processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> str:
    """The URL of an exporter on this node."""
    ScenarioFeeder(SCENARIO, nvml_table)
    for index, minor in enumerate(MINORS):
        with nvml_table.writing(index) as out:
            out.minor = minor
    config = tmp_path / "config.yaml"
    config.write_text("attribution: {interval: 200ms}\n", encoding="utf-8")
    return start_exporter(processes, node, config, nvml_environment)


def held(url: str) -> set[tuple[str, str, str, str]]:
    """The pod, unit, sharing mode and evidence of every allocation."""
    status = json.loads(fetch(f"{url}/api/v1/status") or "{}")
    return {
        (entry["pod"], entry["mig_uuid"] or entry["uuid"], entry["share"], entry["basis"].partition(": ")[0])
        for entry in status.get("allocations", [])
    }


def phases(plane: ControlPlane) -> set[str]:
    """The phases of all pods, as the kubelet reported them."""
    return {pod.status.phase for pod in plane.core.list_namespaced_pod("default").items}


def test_claims_are_resolved_to_the_right_gpus_and_instances(
    plane: ControlPlane, node: Node, driver: DraDriver, url: str
) -> None:
    for name, devices in CLAIMS.items():
        driver.claim(name, *devices)
    for name, claim in PODS.items():
        run_pod(plane, name, claim)
    pod = static_pod("h", 0)
    pod["spec"]["containers"][0]["resources"] = {"limits": {EXTENDED: "1"}}  # the scheduler makes the claim
    plane.create_pod(pod)
    whole = {
        "a": (0, "own"),
        "b": (3, "common"),
        "c": (3, "common"),
        "e": (2, "part"),
        "f": (2, "rest"),
        "g": (4, "helper"),
    }
    expected = {
        (
            pod,
            UUID_OF_MINOR[minor],
            "time_slice" if minor in (2, 3) else "none",
            f"gpu-{minor} of claim default/{claim}",
        )
        for pod, (minor, claim) in whole.items()
    }
    placed = zip((instance.uuid for instance in SCENARIO.gpus[3].instances), INSTANCES, strict=True)
    expected |= {("d", uuid, "mig", f"{device} of claim default/instances") for uuid, device in placed}

    wait_for(lambda: {pod for pod, *_ in held(url)} == {*PODS, "h"}, "every pod to hold what it claimed")
    found = held(url)
    (made_for_h,) = found - expected
    assert expected <= found
    assert made_for_h[:3] == ("h", UUID_OF_MINOR[5], "none")
    assert made_for_h[3].startswith("gpu-5 of claim default/h-extended-resources-")

    # A kubelet that is killed while it creates a container fails the pod, which then holds nothing.
    wait_for(lambda: phases(plane) == {"Running"}, "every pod to run")
    node.stop_kubelet()
    node.start_kubelet(register=False)
    seen: list[set[tuple[str, str, str, str]]] = []
    wait_for(lambda: seen.append(held(url)) or len(seen) > 60, "polls of the new kubelet", each_s=0.05)
    changes = [(number, found - each, each - found) for number, each in enumerate(seen) if each != found]
    assert not changes, "a gap or a flip: (which look, what is gone, what is new)"

    plane.core.delete_namespaced_pod("a", "default", grace_period_seconds=0)
    wait_for(lambda: held(url) == {each for each in found if each[0] != "a"}, "the claim of the pod that ended to end")
    free = f'uuid="{UUID_OF_MINOR[0]}"}} 0'
    wait_for(lambda: free in (fetch(f"{url}/metrics") or "").partition("\ngpu_allocated{")[2], "its GPU to be free")


def add_namespace(plane: ControlPlane, name: str) -> None:
    """Make a namespace in which claims may ask for adminAccess."""
    labels = {"resource.kubernetes.io/admin-access": "true"}
    plane.core.create_namespace({"metadata": {"name": name, "labels": labels}})
    wait_for(lambda: plane.has_account(name), f"namespace {name}")


def run_in(plane: ControlPlane, namespace: str, name: str, claim: str) -> None:
    pod = static_pod(name, 0, namespace=namespace)
    pod["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimName": claim}]
    pod["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpus"}]}
    plane.create_pod(pod)


def contradictions(url: str) -> dict[str, str]:
    status = json.loads(fetch(f"{url}/api/v1/status") or "{}")
    return {entry["pod"]: entry["evidence"] for entry in status.get("allocations", [])}


def write_checkpoint(driver: DraDriver, folder: Path) -> None:
    """Write the driver's checkpoint: the status of every claim from the API server."""
    prepared = {
        claim["metadata"]["uid"]: {
            "checkpointState": "PrepareCompleted",
            "status": claim["status"],
            "name": claim["metadata"]["name"],
            "namespace": claim["metadata"]["namespace"],
        }
        for claim in driver.read_claims()
    }
    folder.mkdir(exist_ok=True)
    (folder / "new").write_text(json.dumps({"version": "v2", "checksum": 0, "v2": {"preparedClaims": prepared}}))
    (folder / "new").rename(folder / "checkpoint.json")


def test_a_monitor_with_admin_access_holds_nothing(
    plane: ControlPlane,
    node: Node,
    driver: DraDriver,
    url: str,
    processes: Processes,
    nvml_environment: dict[str, str],
    tmp_path: Path,
) -> None:
    whole = ("gpu-0", "gpu-3", "gpu-4", "gpu-5")
    for namespace in ("gpu-operator", "team"):
        add_namespace(plane, namespace)
        driver.claim("all", *whole, *INSTANCES, namespace=namespace, admin=True)
    for claim, device in (("own", "gpu-0"), ("common", "gpu-3")):
        driver.claim(claim, device)

    run_in(plane, "gpu-operator", "nvidia-dcgm-exporter-1", "all")  # the monitor comes first
    run_in(plane, "default", "a", "own")
    for name in "bc":
        run_in(plane, "default", name, "common")
    train = {
        ("a", UUID_OF_MINOR[0], "none", "gpu-0 of claim default/own"),
        ("b", UUID_OF_MINOR[3], "time_slice", "gpu-3 of claim default/common"),
        ("c", UUID_OF_MINOR[3], "time_slice", "gpu-3 of claim default/common"),
    }
    wait_for(lambda: held(url) == train, "the three training pods, and no other")
    free = f'uuid="{UUID_OF_MINOR[4]}"}} 0'
    wait_for(lambda: free in (fetch(f"{url}/metrics") or ""), "a GPU that is only watched to be free")

    plane.core.delete_namespaced_pod("nvidia-dcgm-exporter-1", "gpu-operator", grace_period_seconds=0)
    run_in(plane, "gpu-operator", "nvidia-dcgm-exporter-2", "all")  # a second monitor comes last
    wait_for(lambda: plane.pod("nvidia-dcgm-exporter-2", "gpu-operator")["status"]["phase"] == "Running", "the monitor")
    seen = []
    wait_for(lambda: seen.append(held(url)) or len(seen) > 20, "polls", each_s=0.1)
    assert all(each == train for each in seen)

    run_in(plane, "team", "nvidia-dcgm-exporter-1", "all")  # the name of the pod alone does not make it a monitor
    wait_for(lambda: "nvidia-dcgm-exporter-1" in contradictions(url), "the tenant's pod")
    wait_for(lambda: "--attribution.monitor" in contradictions(url)["a"], "the doubt")
    assert "--attribution.monitor" in contradictions(url)["nvidia-dcgm-exporter-1"]
    assert 'state="held_idle"' not in (fetch(f"{url}/metrics") or "")

    config = tmp_path / "config.yaml"
    write_checkpoint(driver, tmp_path / "plugin")
    for flags in (
        [f"--attribution.claims={tmp_path / 'plugin'}"],
        ["--attribution.monitor=team/nvidia-dcgm-exporter-.*"],
    ):
        other = start_exporter(processes, node, config, nvml_environment, *flags)
        wait_for(lambda url=other: held(url) == train, f"the same three with {flags}")
        assert not any("adminAccess" in text for text in contradictions(other).values())

    plane.core.delete_namespaced_pod("nvidia-dcgm-exporter-1", "team", grace_period_seconds=0)
    plane.core.delete_namespaced_pod("a", "default", grace_period_seconds=0)
    wait_for(lambda: held(url) == {each for each in train if each[0] != "a"}, "the ended holder to hold nothing")
    free = f'uuid="{UUID_OF_MINOR[0]}"}} 0'
    wait_for(lambda: free in (fetch(f"{url}/metrics") or ""), "its GPU to be free")
