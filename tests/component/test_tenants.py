"""GPU-hours of namespaces in the running exporter: pods of twenty seconds, and a restart between them."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.podresources import Kubelet, begin_container
from tests.testbed.processes import Processes, fetch, free_port, wait_for

pytestmark = pytest.mark.slow

GPUS = 16
POD_S, PAUSE_S = 20.0, 4.0
PODS = 2  # per GPU, one after the other
RESTART_S = 22.0
SETTLED = 6  # looks, one every second
CONFIG = "sampling: {interval: 500ms}\nattribution: {interval: 250ms}\nstate: {write_interval: 2s}\n"
ROW = re.compile(r'gpu_tenant_(held|busy|idle)_gpu_seconds_total\{.*namespace="(\w+)".*\} (\S+)')


def test_hours_of_namespaces_are_correct_over_a_restart(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    # Namespace `busy` has the first half of the GPUs, which always work. Namespace `idle` has the others.
    load = [{"kind": "constant", "value": 1.0 if gpu < GPUS // 2 else 0.0} for gpu in range(GPUS)]
    scenario = parse_scenario({"gpus": [{"model": "H100", "load": each} for each in load]})
    feeder = ScenarioFeeder(scenario, nvml_table)
    feeder.start()
    kubelet = Kubelet(tmp_path / "kubelet.sock")
    kubelet.allocatable = [gpu.uuid for gpu in scenario.gpus]
    kubelet.start()
    (tmp_path / "pods").mkdir()
    (tmp_path / "config.yaml").write_text(CONFIG, encoding="utf-8")
    flags = (
        f"--config.file={tmp_path / 'config.yaml'}",
        f"--state.directory={tmp_path / 'state'}",
        *kubelet.flags(tmp_path / "pods"),
    )
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    port = free_port()
    running, url = processes.start_exporter(*flags, environment=nvml_environment, port=port)

    def hours() -> dict[tuple[str, str], float]:
        """GPU-seconds by kind and namespace."""
        return {
            (kind, namespace): float(value) for kind, namespace, value in ROW.findall(fetch(f"{url}/metrics") or "")
        }

    wait_for(lambda: "gpu_allocated{" in (fetch(f"{url}/metrics") or "") or None, "an answer of the kubelet")
    # Seconds from now, the GPU, and whether its pod begins or ends.
    moments = []
    for gpu in range(GPUS):
        begin = dice.uniform(0.0, POD_S + PAUSE_S)
        for _ in range(PODS):
            moments += [(begin, gpu, True), (begin + POD_S, gpu, False)]
            begin += POD_S + dice.uniform(0.0, 2 * PAUSE_S)
    moments.sort()
    truth = {"busy": 0.0, "idle": 0.0}
    began: dict[int, float] = {}
    start, restarted, away = time.monotonic(), False, 0.0
    for number, (at, gpu, begins) in enumerate(moments):
        if not restarted and at > RESTART_S:
            before, stopped = hours(), time.monotonic()
            running.stop()
            running, _ = processes.start_exporter(*flags, environment=nvml_environment, port=port)
            restarted, away = True, time.monotonic() - stopped
            wait_for(lambda before=before: before.keys() <= hours().keys() or None, "the counters of before")  # type: ignore[misc]
            after = hours()
            assert all(after[key] >= value for key, value in before.items()), "a counter fell"
        time.sleep(max(0.0, start + at - time.monotonic()))  # the change has to come at this moment
        namespace = "busy" if gpu < GPUS // 2 else "idle"
        pods = dict(kubelet.pods)  # replaced in one step, because the kubelet's thread reads it
        if begins:
            name = f"pod-{gpu}-{number}"
            begin_container(tmp_path / "pods", f"{namespace}_{name}_uid-{number}")
            pods[namespace, name] = {"main": {"nvidia.com/gpu": [scenario.gpus[gpu].uuid]}}
            began[gpu] = time.monotonic()
        else:
            (mine,) = [
                key for key, held in pods.items() if held == {"main": {"nvidia.com/gpu": [scenario.gpus[gpu].uuid]}}
            ]
            del pods[mine]
            truth[namespace] += time.monotonic() - began.pop(gpu)
        kubelet.pods = pods
    wait_for(lambda: "gpu_allocation_info{" not in (fetch(f"{url}/metrics") or "") or None, "the last pod to be gone")
    # Counters are published as they were last written to the state file, every two seconds here.
    booked: list[dict[tuple[str, str], float]] = []

    def is_settled() -> bool:
        """Whether the counters have not changed for some looks."""
        booked.append(hours())
        return len(booked) > SETTLED and all(each == booked[-1] for each in booked[-SETTLED:])

    wait_for(is_settled, "the counters to settle", each_s=1.0)
    found = booked[-1]
    kubelet.stop()
    feeder.stop()
    print(f"true GPU-seconds {truth}, found {found}, away for {away:.1f} s")
    for namespace, true in truth.items():
        assert true > 0.999 * GPUS // 2 * PODS * POD_S  # more if the machine was late
        assert found["held", namespace] == pytest.approx(true, rel=0.01)
    assert found["idle", "busy"] == 0.0
    # The first moments of a pod are unknown, and so is the time without an exporter.
    unknown = GPUS // 2 * (2.0 * PODS + away + 2.0)
    assert found["busy", "busy"] >= truth["busy"] - unknown
    assert found["idle", "idle"] >= truth["idle"] - unknown
    assert found["busy", "busy"] <= found["held", "busy"] and found["idle", "idle"] <= found["held", "idle"]
