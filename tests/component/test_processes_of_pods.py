"""Pods of a real kubelet and containerd: the cgroups of their processes name the pods."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.common.cgroup import parse_cgroup
from gpu_exporter.common.model.holders import Who
from gpu_exporter.diagnosis.host.cgroups import Cgroups
from tests.testbed.node import Node, start_node, static_pod
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import Processes, fetch, wait_for

pytestmark = pytest.mark.kubelet
SCENARIO = parse_scenario({"gpus": [{"model": "H100"}] * 2})
UUIDS = [gpu.uuid for gpu in SCENARIO.gpus]
PODS = ("first", "second")


@pytest.fixture
def node(processes: Processes) -> Iterator[Node]:
    with start_node(processes, UUIDS) as started:
        yield started


def host_pid(node: Node, inner: int) -> int | None:
    """The pid in this namespace of the node's process with that pid inside the node."""
    for process in psutil.Process(node.sandbox.init_pid).children(recursive=True):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            status = Path(f"/proc/{process.pid}/status").read_text()
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            if fields["NSpid"].split()[1] == str(inner):
                return process.pid
    return None


def containers(node: Node) -> dict[str, tuple[str, str, int]]:
    """By pod: the UID and the container id in containerd, and the pid of the process."""
    found: dict[str, tuple[str, str, int]] = {}
    for line in node.ctr("tasks", "list").splitlines()[1:]:
        container, inner, _ = line.split()
        labels = json.loads(node.ctr("containers", "info", container))["Labels"]
        if labels.get("io.kubernetes.container.name") == "train" and (pid := host_pid(node, int(inner))) is not None:
            found[labels["io.kubernetes.pod.name"]] = (labels["io.kubernetes.pod.uid"], container, pid)
    return found


def test_processes_of_real_pods_contradict_or_confirm_the_kubelets_report(
    node: Node, processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    for name in PODS:
        (node.manifests / f"{name}.json").write_text(json.dumps(static_pod(name, 1)))
    names = [f"{name}-node1" for name in PODS]
    wait_for(lambda: set(names) <= set(node.list_pod_resources()), "the kubelet to list both pods")
    running = wait_for(lambda: found if names == sorted(found := containers(node)) else None, "both containers")
    for uid, container, pid in running.values():
        owner = parse_cgroup(Path(f"/proc/{pid}/cgroup").read_text())
        assert (owner.pods, owner.container, owner.slurm) == ((uid,), container, False)
    uids: set[Who] = {("pod", uid) for uid, _, _ in running.values()}
    cgroups = Cgroups(Path("/sys/fs/cgroup"))
    places = cgroups.find(uids)
    assert places.keys() == uids
    assert all((reading := cgroups.read(place)) and reading.cpu_s > 0.0 for place in places.values())

    feeder = ScenarioFeeder(SCENARIO, nvml_table)
    feeder.start()
    try:
        config = tmp_path / "config.yaml"
        config.write_text("attribution: {interval: 200ms}\n", encoding="utf-8")
        _, url = processes.start_exporter(
            f"--config.file={config}",
            "--attribution.kubelet",
            f"--attribution.kubelet.socket={node.pod_resources}",
            f"--attribution.kubelet.logs={node.pod_logs}",
            "--attribution.process",
            "--no-attribution.slurm",
            environment=nvml_environment,
        )

        def allocations() -> dict[str, dict]:
            status = json.loads(fetch(f"{url}/api/v1/status") or "{}")
            return {entry["pod"]: entry for entry in status.get("allocations", [])}

        wait_for(lambda: set(allocations()) == set(names), "both allocations")
        held = {pod: entry["gpu"] for pod, entry in allocations().items()}
        swapped = dict(zip(names, reversed(names), strict=True))
        for pod, gpu in held.items():
            feeder.pids[gpu] = ((running[swapped[pod]][2], ""),)
        expected = {
            p: f"processes of pod default/{swapped[p]} run here, but kubelet reports pod default/{p}" for p in names
        }
        wait_for(lambda: {p: a["evidence"] for p, a in allocations().items()} == expected, "the contradictions")
        assert {a["state"] for a in allocations().values()} == {"unknown"}
        assert "gpu_allocation_idle_run_seconds{" not in (fetch(f"{url}/metrics") or "")
        for pod, gpu in held.items():
            feeder.pids[gpu] = ((running[pod][2], ""),)

        def confirmed() -> bool:
            return (fetch(f"{url}/metrics") or "").count("gpu_allocation_idle_run_seconds{") == 2

        wait_for(confirmed, "both pods to be confirmed by their own processes")
    finally:
        feeder.stop()
