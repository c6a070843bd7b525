"""From the fake driver to the owner's notification: every program is the real one, and only the windows are short."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.podresources import Kubelet, begin_container
from tests.testbed.processes import GPU_EXPORTER, Processes, wait_for
from tests.testbed.servers import Prometheus, Webhook, start_alertmanager

ROOT = Path(__file__).resolve().parents[2]
IDLE_FOR_S = 12
IDLE, FREE, MISSING, BUSY = range(4)

SHORT = (f"idle_for={IDLE_FOR_S}s", "interval=1s", "owners_interval=1s", "wait=1s", "keep=1s")

pytestmark = pytest.mark.servers


def test_an_idle_allocation_notifies_its_owner_once_and_no_other_owner(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    scenario = parse_scenario(
        {"gpus": [{"model": "H100"}] * 3 + [{"model": "H100", "load": {"kind": "square", "high": 0.9, "period": 2}}]}
    )
    uuids = [gpu.uuid for gpu in scenario.gpus]
    feeder = ScenarioFeeder(scenario, nvml_table)
    for call in ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetSamples"):
        nvml_table.set_call(MISSING, call, "NVML_ERROR_UNKNOWN")
    feeder.start()
    kubelet = Kubelet(tmp_path / "kubelet.sock")
    for index, pod in ((IDLE, "forgotten-0"), (MISSING, "mute-0"), (BUSY, "busy-0")):
        kubelet.pods["ml", pod] = {"main": {"nvidia.com/gpu": [uuids[index]]}}
        begin_container(tmp_path / "pods", f"ml_{pod}_uid-{index}")
    kubelet.start()
    config = tmp_path / "config.yaml"
    config.write_text(
        # Windows of seconds need an interval of a second. The default of 5 s would be half of such a window.
        f"sampling: {{interval_max: 1s}}\nattribution: {{interval: 1s}}\npolicy: {{candidate_after: {IDLE_FOR_S}s, underused_after: {2 * IDLE_FOR_S}s,"
        " startup_grace: 1s}\n",
        encoding="utf-8",
    )
    _, url = processes.start_exporter(
        f"--config.file={config}",
        *kubelet.flags(tmp_path / "pods"),
        environment=nvml_environment,
    )
    build = [sys.executable, "-m", "tools.rules", "--output", str(tmp_path / "rules")]
    subprocess.run([*build, *(f"--set={each}" for each in SHORT)], cwd=ROOT, check=True)
    webhook = Webhook()
    _, alertmanager = start_alertmanager(processes, tmp_path / "alertmanager", webhook.url)
    prometheus = Prometheus(
        processes,
        tmp_path / "prometheus",
        {"gpu-node-1": url.removeprefix("http://")},
        rules=sorted((tmp_path / "rules").glob("*.yaml")),
        alertmanager=alertmanager,
    )
    started = time.time()
    notification = wait_for(lambda: webhook.received[0] if webhook.received else None, "a notification", each_s=0.2)
    print(f"notification after {time.time() - started:.1f} s")
    (alert,) = notification["alerts"]
    assert (notification["status"], alert["status"]) == ("firing", "firing")
    labels, description = alert["labels"], alert["annotations"]["description"]
    assert (labels["alertname"], labels["namespace"], labels["pod"]) == ("GpuHolderIdle", "ml", "forgotten-0")
    assert (labels["gpus"], labels["audience"]) == ("1", "owner")
    year = time.strftime("%Y-", time.gmtime(started))
    assert description.startswith(f"Pod ml/forgotten-0 holds a GPU and has not used it since {year}")

    # After three times as long there is still one notification, and no other alert has fired.
    wait_for(lambda: time.time() - started > 3 * IDLE_FOR_S, "the quiet ones to have had their time", each_s=1.0)
    window = int(time.time() - started) + 5
    fired = prometheus.query(
        f'count by (alertname, pod) (count_over_time(ALERTS{{alertstate="firing",audience="owner"}}[{window}s]))'
    )
    assert [labels.get("pod") for labels, _ in fired] == ["forgotten-0"]
    assert len(webhook.received) == 1
    observed = {labels["gpu"]: value for labels, value in prometheus.query("gpu_observed_seconds_total")}
    assert observed[str(FREE)] > IDLE_FOR_S  # the free GPU is known to be idle
    assert prometheus.query("gpu_allocated == 0")[0][0]["gpu"] == str(FREE)
    assert str(MISSING) not in observed

    # The reconciler makes the same decision from Prometheus and from the exporter, and writes nothing.
    for source in (f"--source.prometheus={prometheus.url}", f"--source.exporter={url}/metrics"):
        done = subprocess.run(
            [*GPU_EXPORTER, "reconcile", "--once", f"--config.file={config}", source],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if "underused" in line or "candidate" in line]
        assert line.startswith("ml/forgotten-0")

    # The first activity ends the alert.
    with nvml_table.writing(IDLE) as out:
        out.encoder = 50
    feeder.stop()
    with nvml_table.writing(IDLE) as out:
        out.encoder, out.utilization = 50, 40
        nvml_table.push_sample(IDLE, time.time(), 40)
    resolved = wait_for(
        lambda: next((n for n in webhook.received if n["status"] == "resolved"), None), "the alert to be resolved"
    )
    assert resolved["alerts"][0]["labels"]["pod"] == "forgotten-0"
    kubelet.stop()
    webhook.close()
