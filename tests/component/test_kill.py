"""kill -9 at forty moments: in a real Prometheus no counter falls or exceeds the truth, and no work counts as idle."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.podresources import Kubelet, begin_container
from tests.testbed.processes import Processes, free_port, wait_for
from tests.testbed.servers import Prometheus

KILLS = 40
CYCLE_S = 0.25
SCRAPE_S = 0.5
SLACK_S = CYCLE_S + SCRAPE_S  # for a lost or late cycle, and for the time between a scrape and its timestamp
CONFIG = f"sampling: {{interval: {CYCLE_S * 1000:.0f}ms}}\nattribution: {{interval: {CYCLE_S * 1000:.0f}ms}}\n"
CONFIG += f"state: {{write_interval: {CYCLE_S * 1000:.0f}ms}}\n"
# The load of each GPU, and its mean.
LOADS = {
    "0": ({"kind": "constant", "value": 0.93}, 0.93),
    "1": ({"kind": "constant", "value": 0.0}, 0.0),
    "2": ({"kind": "square", "low": 0.0, "high": 1.0, "period": 4.0}, 0.5),
}
UNITS = ("gpu_busy_seconds_total", "gpu_idle_seconds_total", "gpu_observed_seconds_total")
HOLDERS = tuple(f"gpu_allocation_{name}_seconds_total" for name in ("held", "observed", "busy", "idle"))
TENANTS = tuple(f"gpu_tenant_{name}_gpu_seconds_total" for name in ("held", "known", "busy", "idle"))

pytestmark = pytest.mark.servers


def test_kills_at_random_moments_add_nothing_to_the_counters(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    scenario = parse_scenario({"gpus": [{"model": "H100", "load": load} for load, _ in LOADS.values()]})
    feeder = ScenarioFeeder(scenario, nvml_table)
    feeder.start()
    kubelet = Kubelet(tmp_path / "kubelet.sock")
    for index, gpu in enumerate(scenario.gpus):
        kubelet.pods[f"team-{index}", "train"] = {"main": {"nvidia.com/gpu": [gpu.uuid]}}
        begin_container(tmp_path / "pods", f"team-{index}_train_uid-{index}")
    kubelet.start()
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
    prometheus = Prometheus(
        processes, tmp_path / "prometheus", {"n1": url.removeprefix("http://")}, interval=f"{int(SCRAPE_S * 1000)}ms"
    )
    began = time.time()
    wait_for(lambda: len(prometheus.query("gpu_allocation_observed_seconds_total > 1")) == len(LOADS), "history")
    for _ in range(KILLS):
        time.sleep(dice.uniform(0.2, 2.0))  # the kill has to come at a random moment
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
        running, _ = processes.start_exporter(*flags, environment=nvml_environment, port=port)
    ended = time.time()
    # With the holders: before the first poll, their tenants have the hours of the state file, and none since.
    after = f"timestamp(gpu_allocation_held_seconds_total) > {ended}"
    wait_for(lambda: len(prometheus.query(after)) == len(LOADS), "a scrape of all holders after the last start")
    feeder.stop()
    kubelet.stop()
    span = int(time.time() - began) + 5

    def gains(name: str, label: str) -> Mapping[str, tuple[float, float]]:
        """The increase of a counter by GPU, and the time that it took. Checks that the counter never falls."""
        assert all(resets == 0 for _, resets in prometheus.query(f"resets({name}[{span}s])")), f"{name} fell"
        found = {}
        for place, every in prometheus.samples(f"{name}[{span}s]", label).items():
            samples = [each for each in every if each[1]] or every  # a new tenant is published as 0 for a minute
            (t_first, v_first), (t_last, v_last) = samples[0], samples[-1]
            found[place.removeprefix("team-")] = v_last - v_first, t_last - t_first
        return found

    for names, label in ((UNITS, "gpu"), (HOLDERS, "gpu"), (TENANTS, "namespace")):
        gained = {name.replace("_gpu_seconds", "_seconds").split("_")[-3]: gains(name, label) for name in names}
        of_all = gained.get("observed") or gained["known"]
        for gpu, (_, mean) in LOADS.items():
            observed, passed_s = of_all[gpu]
            busy, idle = gained["busy"][gpu][0], gained["idle"][gpu][0]
            print(f"{names[0]} gpu {gpu}: {passed_s:.1f} s, observed {observed:.1f}, busy {busy:.1f}, idle {idle:.1f}")
            assert 2.0 < observed <= passed_s + SLACK_S  # the rest is unknown; on a busy machine that is most of it
            # Of a load that changes, chance decides how much of the observed time was busy: at most all of it, plus half a period.
            there_was = min(observed, mean * passed_s + 2.0) if mean == 0.5 else mean * observed
            assert busy <= there_was + SLACK_S, "no more than there was"
            if mean == 0.93:
                assert idle == 0.0
                assert abs(busy - mean * observed) <= SLACK_S
            elif mean == 0.0:
                assert busy == 0.0
                assert abs(idle - observed) <= SLACK_S
            else:
                assert busy + idle <= observed + SLACK_S  # at 0 another witness can still be active
            if "held" in gained:
                assert abs(gained["held"][gpu][0] - passed_s) <= 2 * SLACK_S, "it was held all the time"
