"""The agent keeps no memory for twelve thousand pods that have come and gone."""

from __future__ import annotations

import json
import shutil
import statistics
from itertools import combinations
from pathlib import Path

import pytest

from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.podresources import Kubelet, begin_container
from tests.testbed.processes import Processes, fetch, wait_for

pytestmark = pytest.mark.slow

INSTANCES = [{"profile": "1g.10gb", "gi": 7 + position} for position in range(7)]
SCENARIO = parse_scenario({"gpus": [{"model": "H100", "mig": INSTANCES}] * 8})
UNITS = [instance.uuid for gpu in SCENARIO.gpus for instance in gpu.instances]
PODS = 12_000
STRETCH = 500  # pods between two looks at the memory
SETTLED = 6_000  # by then every cache has been filled once, and the heap is fragmented
GROWTH_MAX_KIB = 0.3  # for each pod; a dict that keeps only the names of pods grows by 0.6


def test_the_agent_keeps_no_memory_for_pods_that_have_gone(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    ScenarioFeeder(SCENARIO, nvml_table)
    logs = tmp_path / "pods"
    logs.mkdir()
    config = tmp_path / "config.yaml"
    config.write_text("attribution: {interval: 20ms}\nsampling: {interval: 1s}\n", encoding="utf-8")
    kubelet = Kubelet(tmp_path / "kubelet.sock")
    kubelet.allocatable = UNITS
    kubelet.start()
    flags = (*kubelet.flags(logs), f"--config.file={config}", f"--state.directory={tmp_path / 'state'}")
    running, url = processes.start_exporter(*flags, environment=nvml_environment)
    sizes: list[int] = []
    try:
        for first in range(0, PODS, len(UNITS)):
            if first >= SETTLED + STRETCH * len(sizes):
                sizes.append(resident_kib(running.process.pid))
            names = [f"pod-{first + position}" for position in range(len(UNITS))]
            shutil.rmtree(logs)
            for name in names:
                begin_container(logs, f"team-{first % 40}_{name}_uid-{name}")
            kubelet.pods = {
                (f"team-{first % 40}", name): {"main": {"nvidia.com/gpu": [unit]}}
                for name, unit in zip(names, UNITS, strict=True)
            }
            seen = kubelet.listed + 2  # one list may be in progress
            wait_for(lambda seen=seen: kubelet.listed >= seen, "two polls", each_s=0.01)
            if first % (10 * len(UNITS)) == 0:
                fetch(f"{url}/metrics")
        sizes.append(resident_kib(running.process.pid))
        held = {entry["pod"] for entry in json.loads(fetch(f"{url}/api/v1/status") or "{}")["allocations"]}
        assert held == set(names)
    finally:
        kubelet.stop()
    print(f"KiB from pod {SETTLED} on, every {STRETCH} pods: {sizes}")
    # The heap takes or gives back a MiB now and then, so the slope is the median over all pairs of looks (Theil-Sen).
    looks = combinations(enumerate(sizes), 2)
    assert (
        statistics.median((late - early) / ((to - at) * STRETCH) for (at, early), (to, late) in looks) < GROWTH_MAX_KIB
    )


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    return int(status.partition("VmRSS:")[2].split()[0])
