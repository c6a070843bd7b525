"""CPU of one attribution cycle: 8 GPUs with 7 instances each; one pod per instance, or 256 pods that share the instances.

python -m tests.bench.attribution [--polls 60]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from gpu_exporter.agent.attribution.kubelet.source import KubeletOptions, KubeletSource
from gpu_exporter.agent.attribution.poller import Poller
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.common.vendor import NVIDIA
from tests.testbed.podresources import Kubelet, begin_container
from tests.testbed.simulated_node import SimulatedNode

PODS, GPUS, INSTANCES = 256, 8, 7
BEGAN = 1e9  # Unix seconds, long ago


def measure(directory: Path, *, shares: bool, polls: int) -> tuple[int, float, float]:
    """Number of holders, and median milliseconds of CPU for the kubelet's answers and for their evaluation."""
    mig = [{"profile": "1g.10gb", "gi": INSTANCES + number} for number in range(INSTANCES)]
    scenario = parse_scenario({"gpus": [{"model": "H100", "mig": mig}] * GPUS, "holders": []})
    units = [instance.uuid for gpu in scenario.gpus for instance in gpu.instances]
    each = -(-PODS // len(units))
    kubelet, logs = Kubelet(directory / "kubelet.sock"), directory / "pods"
    kubelet.allocatable = [f"{unit}::{number}" for unit in units for number in range(each)] if shares else units
    for number in range(PODS):
        devices = {"nvidia.com/mig-1g.10gb": [units[number]]} if number < len(units) else {}
        if shares:
            devices = {"nvidia.com/mig-1g.10gb.shared": [f"{units[number % len(units)]}::{number // len(units)}"]}
        kubelet.pods["team", f"pod-{number}"] = {"main": devices}
        os.utime(begin_container(logs, f"team_pod-{number}_uid-{number}"), (BEGAN, BEGAN))
    kubelet.start()
    try:
        node = SimulatedNode(scenario)
        source = KubeletSource(node.clock, KubeletOptions(socket=kubelet.socket, logs=logs), vendor=NVIDIA)
        node.poller = Poller([source], node.clock, 300.0)
        node.run(10)
        asked, settled, holders = list[float](), list[float](), 0
        for _ in range(polls):
            node.clock.advance(5.0)
            node.sample()
            began = time.thread_time()
            source.poll()
            asked.append(time.thread_time() - began)
            grants, offers, placed = node.poller.poll(), node.poller.offers(), node.placed()
            began = time.thread_time()
            holders = len(node.state.on_poll(grants, placed, None, offers=offers).allocations)
            settled.append(time.thread_time() - began)
    finally:
        kubelet.stop()
    return holders, 1e3 * statistics.median(asked), 1e3 * statistics.median(settled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--polls", type=int, default=60)
    polls = parser.parse_args().polls
    for name, shares in (("one pod per instance", False), ("256 pods share them", True)):
        with tempfile.TemporaryDirectory() as directory:
            holders, asked_ms, settled_ms = measure(Path(directory), shares=shares, polls=polls)
        print(f"{name}: {holders} holders, kubelet {asked_ms:.1f} ms, ledger and rest {settled_ms:.1f} ms of CPU")


if __name__ == "__main__":
    main()
