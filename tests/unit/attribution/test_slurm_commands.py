"""Slurm's commands as children: found, bounded, and with a clean environment."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.testbed.processes import wait_for

from gpu_exporter.attribution import slurm_commands
from gpu_exporter.attribution.slurm import SlurmSource
from gpu_exporter.attribution.source import SourceError


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of commands, the only one that is searched."""
    monkeypatch.setattr(slurm_commands, "PLACES", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def write(directory: Path, text: str, name: str = "squeue") -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{text}\n", "utf-8")
    path.chmod(0o755)


def test_a_child_sees_no_variable_that_filters_or_formats(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SQUEUE_USERS", "SQUEUE_FORMAT", "SLURM_CLUSTERS", "SINFO_FORMAT", "SECRET", "LANG"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/opt/slurm/etc/slurm.conf")
    write(commands, "env")
    seen = dict(line.partition("=")[::2] for line in slurm_commands.run(["squeue"], 5.0).splitlines())
    assert seen["SLURM_CONF"] == "/opt/slurm/etc/slurm.conf"
    assert (seen["SLURM_TIME_FORMAT"], seen["LC_ALL"]) == ("%s", "C.UTF-8")
    assert not seen.keys() & {"SQUEUE_USERS", "SQUEUE_FORMAT", "SLURM_CLUSTERS", "SINFO_FORMAT", "SECRET", "LANG"}


def test_a_command_that_is_not_there_is_named_with_the_remedy(commands: Path) -> None:
    with pytest.raises(SourceError) as caught:
        SlurmSource("n0").poll()
    assert str(caught.value).startswith("scontrol is neither on PATH nor in ")
    assert str(caught.value).endswith("add its directory to PATH, or pass --no-attribution.slurm")


def test_commands_are_found_where_sites_put_slurm(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(commands, "echo found")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(slurm_commands, "PLACES", (str(commands),))
    assert slurm_commands.run(["squeue"], 5.0) == "found\n"


def test_an_answer_without_end_is_cut_off(commands: Path) -> None:
    write(commands, "exec cat /dev/zero")
    with pytest.raises(SourceError, match="squeue printed more than 100000 bytes"):
        slurm_commands.run(["squeue"], 30.0, limit=100_000)


@pytest.mark.parametrize(
    "text",
    ["sleep 60", "exec >&- 2>&-; sleep 60", "while :; do echo x; sleep 0.05; done"],
    ids=["mute", "closed", "slow"],
)
def test_a_command_that_does_not_end_is_ended_with_its_children(commands: Path, text: str) -> None:
    write(commands, f"echo $$ > {commands}/pid\n{text}")
    began = time.monotonic()
    with pytest.raises(SourceError, match="within 1 s"):
        slurm_commands.run(["squeue"], 1.0)
    assert time.monotonic() - began < 20.0
    group = int((commands / "pid").read_text())

    def is_gone() -> bool:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        return False

    wait_for(is_gone, "the command and its sleep to end")


def test_a_refusal_carries_slurms_words_and_what_to_do(commands: Path) -> None:
    write(commands, "echo 'slurm_load_jobs error: Invalid node name specified' >&2; exit 1")
    with pytest.raises(SourceError) as caught:
        slurm_commands.run(["squeue"], 5.0)
    assert str(caught.value) == (
        "squeue ended with status 1: slurm_load_jobs error: Invalid node name specified; "
        "name this node with --attribution.slurm.node"
    )


def test_a_running_slurmd_is_seen_by_its_name(tmp_path: Path) -> None:
    for pid, name in (("1", "systemd"), ("20", "slurmstepd")):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "comm").write_text(f"{name}\n")
    assert not slurm_commands.runs_slurmd(tmp_path)
    (tmp_path / "30").mkdir()
    (tmp_path / "30" / "comm").write_text("slurmd\n")
    assert slurm_commands.runs_slurmd(tmp_path)
