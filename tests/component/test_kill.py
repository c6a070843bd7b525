"""kill -9 at many points: in a real Prometheus no counter ever resets or gains more than one write interval a kill."""

from __future__ import annotations

import itertools
import math
import random
import signal
import time
from pathlib import Path

import pytest

from gpu_exporter.devices.scenario import parse_scenario
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.podresources import Kubelet, begin_container
from tests.testbed.processes import Processes, free_port, wait_for
from tests.testbed.servers import Prometheus

WRITE_INTERVAL_S = 3.0
MARGIN_S = WRITE_INTERVAL_S / 2  # how far ahead of a counter its mark is (docs/decisions/0004)
KILLS = 10
LOAD = 0.6
SCRAPE_S = 0.5
CONFIG = f"sampling: {{interval: 250ms}}\nattribution: {{interval: 500ms}}\nstate: {{write_interval: {WRITE_INTERVAL_S:g}s}}\n"
# What each counter gains in a second, and with a kill, at most: busy and idle get one margin each, so observed and held,
# which are never below their sum, get two.
GAINS = {
    "gpu_busy_seconds_total": (LOAD, MARGIN_S),
    "gpu_observed_seconds_total": (1.0, 2 * MARGIN_S),
    "gpu_allocation_held_seconds_total": (1.0, 2 * MARGIN_S),
    "gpu_allocation_busy_seconds_total": (LOAD, MARGIN_S),
    "gpu_allocation_observed_seconds_total": (1.0, 2 * MARGIN_S),
}

pytestmark = pytest.mark.servers


def last_in_time(moment: float, kills: list[float]) -> float:
    """When a counter that is read at this moment may last have been up to date.

    A life publishes no more than its file promises until it has written its own, half a write interval after its first
    poll; what it counts meanwhile shows later. So lives that are too short for that add up.
    """
    past = [killed for killed in kills if killed <= moment]
    while len(past) > 1 and past[-1] - past[-2] < WRITE_INTERVAL_S:
        past.pop()
    return past[-1] if past else moment


def test_counters_survive_kills_at_random_moments(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    scenario = parse_scenario({"gpus": [{"model": "H100", "load": {"kind": "constant", "value": LOAD}}]})
    feeder = ScenarioFeeder(scenario, nvml_table)
    feeder.start()
    kubelet = Kubelet(tmp_path / "kubelet.sock")
    kubelet.pods["ml", "train-0"] = {"main": {"nvidia.com/gpu": [scenario.gpus[0].uuid]}}
    begin_container(tmp_path / "pods", "ml_train-0_uid-1")
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
    kills: list[float] = []
    wait_for(lambda: prometheus.query("gpu_allocation_busy_seconds_total > 1"), "some history", 30)
    for _ in range(KILLS):
        time.sleep(dice.uniform(0.5, 3.5))  # the moment of the kill is the point of the test
        running.process.send_signal(signal.SIGKILL)
        kills.append(time.time())
        running.process.wait()
        running, _ = processes.start_exporter(*flags, environment=nvml_environment, port=port)
    ended = time.time()
    wait_for(lambda: prometheus.query(f"timestamp(up == 1) > {ended}"), "a scrape after the last start")
    feeder.stop()
    kubelet.stop()
    span = int(time.time() - began) + 5
    for name, (rate, gain) in GAINS.items():
        (resets,) = prometheus.query(f"resets({name}[{span}s])")
        assert resets[1] == 0, f"{name} fell"
        (samples,) = prometheus.samples(f"{name}[{span}s]").values()
        worst = -math.inf
        for (before, low), (now, high) in itertools.combinations(samples, 2):
            since = last_in_time(before, kills)
            between = sum(before < killed <= now for killed in kills)
            worst = max(worst, high - low - (now - since) * rate - between * gain)
        (t_first, v_first), (t_last, v_last) = samples[0], samples[-1]
        (increase,) = prometheus.query(f"increase({name}[{span}s])", t_last)
        true = (t_last - t_first) * rate
        print(
            f"{name}: at worst {worst:+.2f} s beside {gain:g} s a kill, "
            f"increase() {increase[1]:.1f} s, raw {v_last - v_first:.1f} s, at most {true:.1f} s of true time, {KILLS} kills"
        )
        assert worst <= WRITE_INTERVAL_S
        assert v_last - v_first >= true - KILLS * WRITE_INTERVAL_S
