"""Ten thousand pods that start and end every few seconds: memory and state file do not grow."""

from __future__ import annotations

import gc
import statistics
import sys
from pathlib import Path

import pytest

from gpu_exporter.agent.attribution.poller import Poller
from gpu_exporter.agent.attribution.static import CallbackSource
from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.agent.exposition.text import TextRenderer
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.agent.node.place import Placed
from gpu_exporter.agent.node.state import NodeState
from gpu_exporter.agent.node.view import build_view
from gpu_exporter.agent.runtime.simulation import build_simulation
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.holders import Grant, Holder, HolderKey
from gpu_exporter.common.model.views import AgentStatus
from gpu_exporter.diagnosis.loop import Findings

GPUS, ROUNDS, POLL_S = 8, 1_250, 5.0
STATUS = AgentStatus("TEST", "simulated", True, "", GPUS, GPUS, 1.0, None, attribution_known=True)


@pytest.mark.slow
def test_memory_and_state_file_do_not_grow_with_ten_thousand_short_holders(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = Settings()
    backend, *_ = build_simulation(parse_scenario({"gpus": [{"model": "T4"}] * GPUS}), clock)
    samplers = [DeviceSampler(backend.find(i), registry.DEFAULT, clock, activity_rules(settings)) for i in range(GPUS)]
    uuids = [sampler.device.identity.uuid for sampler in samplers]
    state = StateFile(tmp_path, 10.0, "boot")
    node = NodeState(settings, clock, state)
    placed: dict[str, Placed] = {}
    renderer = TextRenderer()
    turn = 0

    def grants() -> list[Grant]:
        return [
            Grant(
                "uuid", uuid, Holder(HolderKey("kubernetes", f"uid-{turn}-{i}/main"), "ml", f"pod-{turn}-{i}", "main")
            )
            for i, uuid in enumerate(uuids)
        ]

    poller = Poller([CallbackSource("kubelet", grants)], clock, settings.attribution.keep_last)
    blocks: list[int] = []
    sizes: list[int] = []
    for turn in range(ROUNDS):
        clock.advance(POLL_S)
        for sampler in samplers if turn % 5 == 0 else ():
            snapshot = sampler.sample()
            node.on_snapshot(snapshot)
            placed[snapshot.identity.uuid] = Placed(snapshot)
        node.on_poll(poller.poll(), placed)
        body = renderer.render(list_series(build_view(node.records(placed), STATUS, Findings(), node.view_rules)))
        assert body.count("gpu_allocation_info{") == GPUS
        if turn % 50 == 49:
            node.write_state()
            gc.collect()
            blocks.append(sys.getallocatedblocks())
            sizes.append(state.path.stat().st_size)
    half = len(blocks) // 2
    slope, _ = statistics.linear_regression(range(half), blocks[-half:])  # one sample every 50 rounds of GPUS holders
    assert slope / (50 * GPUS) < 0.05, f"{blocks}: blocks that stay of each holder"
    assert max(sizes[half:]) <= 1.05 * sizes[half]
    assert max(sizes) < GPUS * 5 * 1000
