"""The exporter's textfiles through the real node_exporter, as on a Slurm site."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import GPU_EXPORTER, Processes, fetch, free_port, wait_for
from tests.testbed.servers import require

pytestmark = pytest.mark.servers
QUIET = ("--no-attribution.slurm", "--no-attribution.kubelet", "--state.directory=")


@pytest.mark.parametrize("way", ["once", "resident"])
def test_node_exporter_publishes_the_exporters_textfile(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path, way: str
) -> None:
    require("prometheus-node-exporter")
    feeder = ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}] * 2}), nvml_table)
    directory = tmp_path / "textfiles"
    directory.mkdir()
    output = directory / "gpu.prom"
    if way == "once":
        command = [*GPU_EXPORTER, "--once", f"--output={output}", *QUIET]
        subprocess.run(command, env=nvml_environment, check=True, timeout=60)
    else:
        flags = [f"--textfile.output={output}", "--textfile.interval=200ms"]
        processes.start([*GPU_EXPORTER, *flags, *QUIET], nvml_environment)
        wait_for(output.exists, "a textfile")
        first = output.read_text("utf-8")
        assert all(f'gpu_power_limit_watts{{gpu="{index}"' in first for index in range(2)), "the first file is whole"
    port = free_port()
    node_exporter = processes.start(
        [
            "prometheus-node-exporter",
            f"--web.listen-address=127.0.0.1:{port}",
            "--collector.disable-defaults",
            "--collector.textfile",
            f"--collector.textfile.directory={directory}",
        ]
    )
    body = wait_for(lambda: fetch(f"http://127.0.0.1:{port}/metrics"), "node_exporter")
    assert "node_textfile_scrape_error 0" in body
    for index, gpu in enumerate(feeder.stage.scenario.gpus):
        assert f'gpu_power_limit_watts{{gpu="{index}",uuid="{gpu.uuid}"}} 700' in body
    assert "gpu_driver_up 1" in body
    assert body.count("\nprocess_resident_memory_bytes ") == 1
    assert "error gathering metrics" not in node_exporter.log()  # node_exporter refuses a name that both publish
