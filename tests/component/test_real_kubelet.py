"""Attribution by the real kubelet: static pods, a device plugin, restarts, and cleanup afterwards."""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.testbed.device_plugin import DevicePlugin
from tests.testbed.node import PAUSE, Node, start_node, static_pod
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import Processes, fetch, wait_for
from tests.testbed.sandbox import SYSCTLS, left_behind
from tests.testbed.stubs import compile_stubs

pytestmark = pytest.mark.kubelet
ROOT = Path(__file__).resolve().parents[2]
SCENARIO = parse_scenario({"gpus": [{"model": "H100"}] * 4})
UUIDS = [gpu.uuid for gpu in SCENARIO.gpus]
POLL_S = 0.2  # short, to meet the moment in which a new kubelet lists nothing
AT_ONCE_S = 3.0  # one poll on a busy machine; a second answer would take 5 s


class Watcher:
    """Reads the metrics many times a second, and stores the number of GPUs of every pod by time."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._stop = threading.Event()
        self.seen: list[tuple[float, dict[str, int], dict[str, float]]] = []
        self.failed = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            pods: dict[str, int] = {}
            seconds: dict[str, float] = {}
            body = fetch(f"{self.url}/metrics")
            if body is None:  # a missing answer is not an answer without pods
                self.failed += 1
                continue
            for line in body.splitlines():
                if line.startswith(("gpu_allocation_info{", "gpu_allocation_held_seconds_total{")):
                    pod = line.partition('pod="')[2].partition('"')[0]
                    if line.startswith("gpu_allocation_info{"):
                        pods[pod] = pods.get(pod, 0) + 1
                    else:
                        seconds[pod] = float(line.rpartition(" ")[2])
            self.seen.append((time.monotonic(), pods, seconds))
            self._stop.wait(0.05)

    def latest(self) -> dict[str, int]:
        return self.seen[-1][1] if self.seen else {}

    def since(self, moment: float) -> list[tuple[float, dict[str, int], dict[str, float]]] | None:
        return [entry for entry in self.seen if entry[0] >= moment] or None

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def node(processes: Processes) -> Iterator[Node]:
    with start_node(processes, UUIDS) as started:
        yield started


@pytest.fixture
def watcher(
    node: Node, processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> Iterator[Watcher]:
    feeder = ScenarioFeeder(SCENARIO, nvml_table)
    feeder.start()
    config = tmp_path / "config.yaml"
    config.write_text(f"attribution: {{interval: {POLL_S:g}s}}\n", encoding="utf-8")
    _, url = processes.start_exporter(
        f"--config.file={config}",
        "--attribution.kubelet",
        f"--attribution.kubelet.socket={node.pod_resources}",
        f"--attribution.kubelet.logs={node.pod_logs}",
        "--no-attribution.slurm",
        environment=nvml_environment,
    )
    watching = Watcher(url)
    yield watching
    watching.stop()
    feeder.stop()
    assert watching.failed == 0, "the exporter did not always answer"


def run_pod(node: Node, name: str, gpus: int) -> str:
    (node.manifests / f"{name}.json").write_text(json.dumps(static_pod(name, gpus)))
    return f"{name}-node1"


def elapsed(condition: Callable[[], bool], what: str) -> float:
    began = time.monotonic()
    wait_for(condition, what, each_s=0.02)
    return time.monotonic() - began


def flood(node: Node, seconds: float) -> int:
    """Query the kubelet without a pause. Returns how many calls its rate limit refused."""
    pb, pb_grpc = compile_stubs("podresources")
    refused = 0
    until = time.monotonic() + seconds
    with grpc.insecure_channel(f"unix:{node.pod_resources}") as channel:
        stub = pb_grpc.PodResourcesListerStub(channel)
        while time.monotonic() < until:
            try:
                stub.List(pb.ListPodResourcesRequest(), timeout=10)
            except grpc.RpcError as exc:
                assert "rate limit" in exc.details()
                refused += 1
    return refused


def test_pods_are_held_over_restarts_of_the_kubelet_until_they_end(node: Node, watcher: Watcher) -> None:
    first = run_pod(node, "first", 2)
    listed = elapsed(lambda: first in str(node.list_pod_resources()), "the kubelet to list the pod")
    appeared = elapsed(lambda: watcher.latest().get(first) == 2, "its allocation")
    second = run_pod(node, "second", 1)
    wait_for(lambda: watcher.latest() == {first: 2, second: 1}, "both allocations")
    print(f"listed after {listed:.2f} s, published {appeared:.2f} s later at a poll each {POLL_S} s")
    assert appeared < AT_ONCE_S
    # After a restart the kubelet admits pods again. A pod whose container was created but does not run gets no devices.
    wait_for(lambda: node.ctr("tasks", "list").count("RUNNING") == 4, "both containers, and their sandboxes, to run")

    began = time.monotonic()
    for registers_at_once in (True, False, True):
        node.stop_kubelet()
        node.start_kubelet(register=registers_at_once)
        settled = time.monotonic() + 10 * POLL_S
        wait_for(functools.partial(watcher.since, settled), "polls after the restart")
        node.plugin.register()
    assert flood(node, 2.0) > 100, "the kubelet's rate limit was not reached"
    wait_for(functools.partial(watcher.since, time.monotonic() + 5 * POLL_S), "polls after that")
    during = watcher.since(began)
    assert during is not None and len(during) > 15
    assert all(pods == {first: 2, second: 1} for _, pods, _ in during), "a gap or a flip"
    for pod in (first, second):
        held = [seconds[pod] for _, _, seconds in during]
        assert held == sorted(held), "the pod counted as a new one"
        assert held[-1] - held[0] > 0.8 * (during[-1][0] - during[0][0])

    (node.manifests / "second.json").unlink()
    wait_for(lambda: second not in str(node.list_pod_resources()), "the kubelet to let the second pod go", each_s=0.02)
    gone = elapsed(lambda: watcher.latest() == {first: 2}, "the second pod to be gone")
    assert gone < AT_ONCE_S, f"{gone:.2f} s, while another pod stays"
    (node.manifests / "first.json").unlink()
    wait_for(lambda: first not in str(node.list_pod_resources()), "the kubelet to let the first pod go", each_s=0.02)
    gone = elapsed(lambda: not watcher.latest(), "the last pod to be gone")
    assert gone < AT_ONCE_S, f"{gone:.2f} s, with devices to allocate"


def series_of(watcher: Watcher, name: str, **labels: str) -> list[str]:
    """Lines of one family with these labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    lines = (fetch(f"{watcher.url}/metrics") or "").splitlines()
    return [line for line in lines if line.startswith(f"{name}{{") and all(part in line for part in wanted)]


def test_devices_of_another_plugin_are_not_gpus(node: Node, watcher: Watcher) -> None:
    network = DevicePlugin(node.root / "device-plugins", ["0", "1"], "nvidia.com/hostdev", "hostdev.sock")
    network.register()
    try:
        wait_for(lambda: "nvidia.com/hostdev" in node.allocatable(), "the kubelet to know the cards")
        both = static_pod("both", 1)
        both["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/hostdev"] = "1"
        cards = static_pod("cards", 0)
        cards["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/hostdev": "1"}}
        for pod in (both, cards):
            (node.manifests / f"{pod['metadata']['name']}.json").write_text(json.dumps(pod))
        wait_for(lambda: set(node.list_pod_resources()) == {"both-node1", "cards-node1"}, "both cards to be held")
        wait_for(lambda: watcher.latest() == {"both-node1": 1}, "the one GPU")
        (units,) = series_of(watcher, "gpu_allocation_holder_units", pod="both-node1")
        assert units.endswith(" 1")
        assert series_of(watcher, "gpu_exporter_attribution_up", source="kubelet")[0].endswith(" 1")
        free = [line for line in series_of(watcher, "gpu_allocated") if line.endswith(" 0")]
        assert len(free) == len(UUIDS) - 1
    finally:
        network.stop()


def test_time_sliced_replicas_are_one_gpu(node: Node, watcher: Watcher) -> None:
    """Time slicing of NVIDIA's device plugin: ids are UUID::N, and one container can get several ids."""
    shared = UUIDS[3]
    replicas = [f"{shared}::{number}" for number in range(4)]
    plugin = DevicePlugin(node.root / "device-plugins", replicas, "nvidia.com/gpu.shared", "shared.sock")
    plugin.register()
    try:
        wait_for(lambda: "nvidia.com/gpu.shared" in node.allocatable(), "the kubelet to know the replicas")
        for name, count in (("three", 3), ("one", 1)):
            pod = static_pod(name, 0)
            pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu.shared": str(count)}}
            (node.manifests / f"{name}.json").write_text(json.dumps(pod))
        wait_for(lambda: set(node.list_pod_resources()) == {"three-node1", "one-node1"}, "all replicas to be held")
        wait_for(lambda: watcher.latest() == {"three-node1": 1, "one-node1": 1}, "one GPU each")
        shares = [float(line.rpartition(" ")[2]) for line in series_of(watcher, "gpu_allocation_share_ratio")]
        assert sum(shares) == pytest.approx(1.0), "two holders of one GPU hold one GPU"
        for name in ("three-node1", "one-node1"):
            (line,) = series_of(watcher, "gpu_allocation_info", pod=name)
            assert f'uuid="{shared}"' in line
            (units,) = series_of(watcher, "gpu_allocation_holder_units", pod=name)
            assert units.endswith(" 1")
        free = [line for line in series_of(watcher, "gpu_allocated") if line.endswith(" 0")]
        assert len(free) == len(UUIDS) - 1
    finally:
        plugin.stop()


def test_a_gpu_that_is_not_allocatable_is_not_free(node: Node, watcher: Watcher) -> None:
    def shows(name: str) -> dict[str, float]:
        lines = series_of(watcher, name)
        return {line.partition('uuid="')[2].partition('"')[0]: float(line.rpartition(" ")[2]) for line in lines}

    pod = run_pod(node, "holder", 3)
    wait_for(lambda: watcher.latest() == {pod: 3}, "the pod to hold its GPUs")
    wait_for(lambda: shows("gpu_allocatable") == dict.fromkeys(UUIDS, 1.0), "every GPU to be allocatable")
    (left,) = (uuid for uuid, held in shows("gpu_allocated").items() if not held)
    used = next(uuid for uuid in UUIDS if uuid != left)

    node.plugin.call_unhealthy(left, used)
    expected = {uuid: float(uuid not in (left, used)) for uuid in UUIDS}
    wait_for(lambda: shows("gpu_allocatable") == expected, "both to be no longer allocatable")
    assert shows("gpu_allocated") == {uuid: 1.0 for uuid in UUIDS if uuid != left}, "a held GPU stays held"
    node.plugin.call_unhealthy()
    wait_for(
        lambda: shows("gpu_allocated") == {uuid: float(uuid != left) for uuid in UUIDS}, "the one to be free again"
    )
    node.plugin.stop()
    wait_for(lambda: shows("gpu_allocatable") == dict.fromkeys(UUIDS, 0.0), "the end of the plugin to be noticed")
    assert left not in shows("gpu_allocated")


def test_a_pod_that_still_stages_its_data_is_not_idle(node: Node, watcher: Watcher) -> None:
    pod = static_pod("staging", 1)
    stage = {"name": "stage", "image": PAUSE, "imagePullPolicy": "Never", "args": ["8"]}
    pod["spec"]["initContainers"] = [stage]
    (node.manifests / "staging.json").write_text(json.dumps(pod))
    wait_for(lambda: watcher.latest() == {"staging-node1": 1}, "the allocation")
    began = time.monotonic()

    def run() -> list[str]:
        return series_of(watcher, "gpu_allocation_idle_run_seconds", pod="staging-node1")

    wait_for(lambda: series_of(watcher, "gpu_allocation_observed_seconds_total", pod="staging-node1"), "known time")
    assert series_of(watcher, "gpu_allocation_state", pod="staging-node1", state="unknown")
    assert run() == []
    (line,) = wait_for(lambda: run() or None, "the main container to begin")
    assert float(line.rpartition(" ")[2]) < time.monotonic() - began - 3.0, "the time of staging counts"


def test_a_pod_that_has_finished_holds_nothing(node: Node, watcher: Watcher) -> None:
    (node.manifests / "short.json").write_text(json.dumps(static_pod("short", 4, seconds=3)))
    wait_for(lambda: any(pods == {"short-node1": 4} for _, pods, _ in watcher.seen), "the pod")
    wait_for(lambda: watcher.latest() == {}, "its GPUs to be free again")
    assert "short-node1" in str(node.pods()), "the pod itself is still there"


def test_a_killed_test_leaves_nothing_of_its_node_behind(tmp_path: Path) -> None:
    before = {name: Path("/proc/sys", name).read_text() for name in SYSCTLS}
    program = f"""
import json, signal, sys
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "exporter")!r}]
from tests.testbed.node import start_node, static_pod
from tests.testbed.processes import Processes, wait_for
with Processes(Path({str(tmp_path)!r})) as processes, start_node(processes, {UUIDS!r}) as node:
    (node.manifests / "a.json").write_text(json.dumps(static_pod("a", 1)))
    wait_for(lambda: any(pod["status"]["phase"] == "Running" for pod in node.pods()), "the pod to run")
    print(node.sandbox.name, node.sandbox.init_pid, flush=True)
    signal.pause()  # until it is killed
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        name, _, init = running.stdout.readline().strip().partition(" ")
        try:
            assert init, "the node did not start"
            assert len(left_behind(name)) > 5  # before the cleanup, the node's remains are visible
            namespace = Path("/proc", init, "ns", "pid").readlink()
            assert len(processes_of(namespace)) >= 5  # init, its sleep, containerd, kubelet, pause ...
        finally:
            running.kill()
    wait_for(lambda: left_behind(name) == [], "the janitor")
    assert processes_of(namespace) == []
    assert {name: Path("/proc/sys", name).read_text() for name in SYSCTLS} == before


def processes_of(namespace: Path) -> list[Path]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has just ended
            if (process / "ns" / "pid").readlink() == namespace:
                found.append(process)
    return found
