"""Dynamic resource allocation by the real scheduler and kubelet, with a driver that names devices as NVIDIA's does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_exporter.devices.scenario import parse_scenario
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


@pytest.fixture
def url(
    node: Node, processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> str:
    """Of an exporter on this node."""
    ScenarioFeeder(SCENARIO, nvml_table)
    for index, minor in enumerate(MINORS):
        with nvml_table.writing(index) as out:
            out.minor = minor
    config = tmp_path / "config.yaml"
    config.write_text("attribution: {interval: 200ms}\n", encoding="utf-8")
    return processes.start_exporter(
        f"--config.file={config}",
        "--attribution.kubelet",
        f"--attribution.kubelet.socket={node.pod_resources}",
        f"--attribution.kubelet.logs={node.pod_logs}",
        "--no-attribution.slurm",
        environment=nvml_environment,
    )[1]


def held(url: str) -> set[tuple[str, str, str, str]]:
    """Pod, GPU or instance, how it is shared, and by which words, of each allocation."""
    status = json.loads(fetch(f"{url}/api/v1/status") or "{}")
    return {
        (entry["pod"], entry["mig_uuid"] or entry["uuid"], entry["share"], entry["basis"].partition(": ")[0])
        for entry in status.get("allocations", [])
    }


def test_claims_lead_to_the_right_gpus_and_instances(
    plane: ControlPlane, node: Node, driver: DraDriver, url: str
) -> None:
    for name, devices in CLAIMS.items():
        driver.claim(name, *devices)
    for name, claim in PODS.items():
        run_pod(plane, name, claim)
    pod = static_pod("h", 0)
    pod["spec"]["containers"][0]["resources"] = {"limits": {EXTENDED: "1"}}  # by a claim that the scheduler makes
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

    wait_for(lambda: {pod for pod, *_ in held(url)} == {*PODS, "h"}, "every pod to hold what it claimed", 90)
    found = held(url)
    (made_for_h,) = found - expected
    assert expected <= found
    assert made_for_h[:3] == ("h", UUID_OF_MINOR[5], "none")
    assert made_for_h[3].startswith("gpu-5 of claim default/h-extended-resources-")

    node.stop_kubelet()
    node.start_kubelet(register=False)
    seen = []
    wait_for(lambda: seen.append(held(url)) or len(seen) > 60, "polls of the new kubelet", 30, 0.05)
    assert all(each == found for each in seen), "a gap or a flip"

    plane.core.delete_namespaced_pod("a", "default", grace_period_seconds=0)
    wait_for(
        lambda: held(url) == {each for each in found if each[0] != "a"}, "the claim of the pod that ended to end", 30
    )
    free = f'uuid="{UUID_OF_MINOR[0]}"}} 0'
    wait_for(lambda: free in (fetch(f"{url}/metrics") or "").partition("\ngpu_allocated{")[2], "its GPU to be free")
