"""A node of a Slurm cluster without Slurm's commands: one log line, and `--once` ends with status 4."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from gpu_exporter.agent.attribution import registry
from gpu_exporter.agent.attribution.poller import Poller
from gpu_exporter.agent.attribution.registry import is_slurm_node
from gpu_exporter.agent.attribution.slurm.source import SlurmOptions, SlurmSource
from gpu_exporter.agent.collectors.names import COLLECTORS
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.exposition.health import judge_health
from gpu_exporter.agent.exposition.json_format import list_rows
from gpu_exporter.agent.runtime.once import EXITS
from gpu_exporter.agent.runtime.reading import make_readers, take_one_view
from gpu_exporter.agent.runtime.simulation import build_simulation
from gpu_exporter.common import commands
from gpu_exporter.common.clock import SYSTEM_CLOCK, ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.vendor import NVIDIA


@pytest.fixture
def without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "PLACES", ())
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))


def test_one_reading_is_partial_and_reports_no_gpu_as_free(without_slurm: None) -> None:
    backend, *_ = build_simulation(parse_scenario({"gpus": [{"model": "T4"}]}), SYSTEM_CLOCK)
    readers = make_readers(Settings(), backend, SYSTEM_CLOCK, COLLECTORS, 10.0)
    slurm = SlurmSource(SlurmOptions(node="n0"), vendor=NVIDIA)
    view = take_one_view(Settings(), backend, readers, [slurm], SYSTEM_CLOCK)
    assert EXITS[judge_health(view)] == Exit.PARTIAL
    assert view.status.sources[0].error.startswith("scontrol is neither on PATH nor in ")
    assert [row.state for row in list_rows(view)] == ["unknown"]


def test_missing_slurm_commands_are_logged_once_and_not_at_every_poll(
    without_slurm: None, caplog: pytest.LogCaptureFixture
) -> None:
    poller = Poller([SlurmSource(SlurmOptions(node="n0"), vendor=NVIDIA)], ManualClock(), 300.0)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            poller.poll()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_node_with_a_slurm_configuration_is_asked_about_jobs(
    without_slurm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "runs_slurmd", lambda _: False)
    if not Path("/etc/slurm/slurm.conf").exists():
        assert not is_slurm_node()
    (tmp_path / "slurm.conf").touch()
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    assert is_slurm_node()
    monkeypatch.delenv("SLURM_CONF")
    monkeypatch.setattr(registry, "runs_slurmd", lambda _: True)
    assert is_slurm_node()
