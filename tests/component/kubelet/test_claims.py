"""GPUs and MIG instances of resource claims."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_exporter.agent.attribution.kubelet.source import KubeletSource
from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.podresources import Kubelet
from tests.testbed.processes import run_exporter


@pytest.mark.parametrize(
    ("device", "share", "kind", "granted"),
    [
        ("gpu-3", "", "minor", "3"),
        ("gpu-3", "c0ffee", "minor", "3"),
        ("gpu-1-mig-2g47gb-14-4", "", "placement", "1/2g47gb/14/4"),
        ("gpu-0-mig-1g10gb-me-20-0", "", "placement", "0/1g10gb-me/20/0"),
    ],
)
def test_devices_of_a_resource_claim_are_granted_to_its_pod(
    kubelet: Kubelet, source: KubeletSource, device: str, share: str, kind: str, granted: str
) -> None:
    kubelet.pods["ml", "a"] = {"main": {}}
    kubelet.claimed["ml", "a", "main"] = [("gpu.nvidia.com", device, share)]
    answer = source.poll()
    assert [(grant.kind, grant.device, grant.number, grant.share) for grant in answer.grants] == [
        (kind, granted, f"{device} of claim ml/claim", "time_slice" if share else "")
    ]
    assert (answer.problem, answer.grants[0].holder.units) == ("", 1)


def test_a_claim_that_several_pods_use_is_held_by_each_of_them(kubelet: Kubelet, source: KubeletSource) -> None:
    for name in ("a", "b"):
        kubelet.pods["ml", name] = {"main": {}}
        kubelet.claimed["ml", name, "main"] = [("gpu.nvidia.com", "gpu-3", "")]
    assert sorted(grant.holder.pod for grant in source.poll().grants) == ["a", "b"]


@pytest.mark.parametrize("device", ["gpu-x", "gpu-1-mig-2g47gb", "mig-1", "gpu-3/../4", "gpu-99999"])
def test_a_claimed_device_with_another_name_leaves_no_gpu_free(
    kubelet: Kubelet, source: KubeletSource, device: str
) -> None:
    kubelet.pods["ml", "a"] = {"main": {}}
    kubelet.claimed["ml", "a", "main"] = [("gpu.nvidia.com", device, "")]
    answer = source.poll()
    assert answer.grants == []
    assert answer.problem == (
        f"ml/a/main has GPUs of a resource claim, but {device!r} is not a device of this node, so no GPU is reported as free"
    )


@pytest.mark.parametrize(
    ("driver", "names"),
    [
        ("gpu.nvidia.com", ["k8s.gpu.nvidia.com/grant=7-gpu-0"]),
        ("", ["k8s.gpu.nvidia.com/device=gpu-0"]),
        ("", ["nvidia.com/gpu=0"]),
    ],
)
def test_gpus_of_a_resource_claim_without_a_device_leave_no_gpu_free(
    kubelet: Kubelet, source: KubeletSource, driver: str, names: list[str]
) -> None:
    kubelet.pods["ml", "a"] = {"main": {}}
    kubelet.claims["ml", "a", "main"] = [(driver, names)]
    answer = source.poll()
    assert answer.grants == []
    assert answer.problem == (
        f"ml/a/main has GPUs of a resource claim, but {names[0]!r} is not a device of this node, "
        "so no GPU is reported as free"
    )


@pytest.mark.parametrize("driver", ["compute-domain.nvidia.com", "dra.cpu", ""])
def test_claims_on_other_devices_are_ignored(kubelet: Kubelet, source: KubeletSource, driver: str) -> None:
    kubelet.pods["ml", "a"] = {"main": {}}
    kubelet.claims["ml", "a", "main"] = [(driver, ["example.com/nic=0"])]
    assert source.poll().problem == ""


MIG_BOARD = {
    "model": "H100",
    "mig": [{"profile": "2g.20gb", "gi": 3}, {"profile": "2g.20gb", "gi": 5}, {"profile": "1g.10gb", "gi": 9}],
}


@pytest.mark.parametrize("refused", [False, True], ids=["places", "no-places"])
def test_claimed_mig_instances_are_found_by_their_placement(
    kubelet: Kubelet,
    tmp_path: Path,
    nvml_environment: dict[str, str],
    nvml_table: NvmlTable,
    refused: bool,
) -> None:
    """The driver reports the place. If the driver refuses, two instances of the same profile cannot be distinguished."""
    faults = [{"at": 0, "call": "nvmlDeviceGetGpuInstanceById", "error": "NVML_ERROR_NO_PERMISSION"}] if refused else []
    scenario = parse_scenario({"gpus": [{**MIG_BOARD, "faults": faults}]})
    ScenarioFeeder(scenario, nvml_table)
    claimed = {"a": "gpu-0-mig-2g20gb-14-2", "b": "gpu-0-mig-1g10gb-19-4", "c": "gpu-0-mig-1g10gb-19-6"}
    for name, device in claimed.items():
        kubelet.pods["ml", name] = {"main": {}}
        kubelet.claimed["ml", name, "main"] = [("gpu.nvidia.com", device, "")]
    done = run_exporter(
        "--once", "--format=json", "--state.directory=", *kubelet.flags(tmp_path), environment=nvml_environment
    )
    status = json.loads(done.stdout)
    second, last = (scenario.gpus[0].instances[position].uuid for position in (1, 2))
    held = {allocation["pod"]: allocation["mig_uuid"] for allocation in status["allocations"]}
    assert held == ({} if refused else {"a": second, "b": last})
    if not refused:
        assert status["allocations"][0]["basis"] == f"{claimed['a']} of claim ml/claim: MIG instance of device file 0"
    (kubelet_says,) = [source for source in status["attribution"] if source["source"] == "kubelet"]
    wanted = (
        "several MIG instances"
        if refused
        else "no MIG instance matches 1g10gb-19-6 on the GPU with device file number 0"
    )
    assert wanted in kubelet_says["error"]
