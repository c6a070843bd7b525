"""The exporter reports to systemd that it is ready, and that its loop runs, also while the driver hangs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import GPU_EXPORTER, Processes, free_port, run_exporter

QUIET = ("--no-attribution.slurm", "--no-attribution.kubelet", "--state.directory=")
PATIENCE_S = 60.0


class Manager:
    """The socket of a service manager."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)
        self._socket.settimeout(PATIENCE_S)
        self.environment = {"NOTIFY_SOCKET": address}

    def next(self) -> str:
        return self._socket.recv(100).decode()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = f"{tmp_path}/notify" if request.param == "path" else f"@{tmp_path}/notify"
    manager = Manager(address)
    yield manager
    manager.close()


def write_to(textfile: Path) -> tuple[str, ...]:
    return (f"--textfile.output={textfile}", "--textfile.interval=200ms")


@pytest.mark.parametrize("way", ["serve", "textfile"])
def test_the_exporter_is_ready_and_feeds_the_watchdog_while_every_gpu_hangs(
    processes: Processes,
    nvml_environment: dict[str, str],
    nvml_table: NvmlTable,
    manager: Manager,
    tmp_path: Path,
    way: str,
) -> None:
    ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}] * 2}), nvml_table)
    for index in range(2):
        nvml_table.set_call(index, "*", delay_s=600)
    mode = write_to(tmp_path / "gpu.prom") if way == "textfile" else (f"--web.listen-address=127.0.0.1:{free_port()}",)
    processes.start([*GPU_EXPORTER, *QUIET, *mode], nvml_environment | manager.environment)
    assert [manager.next() for _ in range(3)] == ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]


@pytest.mark.parametrize("address", ["/nonexistent/notify", "tcp:1", "@"])
def test_a_service_manager_that_does_not_listen_stops_nothing(
    processes: Processes, nvml_environment: dict[str, str], address: str
) -> None:
    processes.start_exporter(*QUIET, environment=nvml_environment | {"NOTIFY_SOCKET": address})


def test_a_textfile_that_cannot_be_written_ends_the_exporter_at_its_start(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text("gpus: [{model: H100}]\n", "utf-8")
    manager = Manager(f"{tmp_path}/notify")
    missing = tmp_path / "missing" / "gpu.prom"
    done = run_exporter(
        "--no-attribution.slurm",
        "--state.directory=",
        f"--devices.scenario={tmp_path / 'node.yaml'}",
        *write_to(missing),
        environment=os.environ | manager.environment,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"gpu-exporter: cannot write {missing}: No such file or directory"
    manager._socket.settimeout(0)
    with pytest.raises(BlockingIOError):
        manager.next()
    manager.close()
