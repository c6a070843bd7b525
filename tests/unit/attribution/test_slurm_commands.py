"""Slurm's commands as child processes: found, limited, and with a clean environment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.testbed.processes import wait_for

from gpu_exporter.agent.attribution.registry import runs_slurmd
from gpu_exporter.agent.attribution.slurm import commands as slurm_commands
from gpu_exporter.agent.attribution.slurm.source import SlurmOptions, SlurmSource
from gpu_exporter.agent.attribution.source import SlowSource, SourceError
from gpu_exporter.common import commands as programs
from gpu_exporter.common.plain import REASON_MAX, shorten
from gpu_exporter.common.vendor import NVIDIA


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of commands, the only directory that is searched."""
    monkeypatch.setattr(programs, "PLACES", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def write(directory: Path, text: str, shell: str = "/bin/sh", setup: str = "PATH=/usr/bin:/bin") -> None:
    path = directory / "squeue"
    path.write_text(f"#!{shell}\n{setup}\n{text}\n", "utf-8")
    path.chmod(0o755)


def test_a_child_gets_no_variable_that_filters_or_formats_the_output(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SQUEUE_USERS", "SQUEUE_FORMAT", "SLURM_CLUSTERS", "SINFO_FORMAT", "SECRET", "LANG"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/opt/slurm/etc/slurm.conf")
    write(commands, "env")
    seen = dict(line.partition("=")[::2] for line in slurm_commands.run(["squeue"], 5.0).splitlines())
    assert seen["SLURM_CONF"] == "/opt/slurm/etc/slurm.conf"
    assert (seen["SLURM_TIME_FORMAT"], seen["LC_ALL"]) == ("%s", "C.UTF-8")
    assert not seen.keys() & {"SQUEUE_USERS", "SQUEUE_FORMAT", "SLURM_CLUSTERS", "SINFO_FORMAT", "SECRET", "LANG"}


def test_the_error_names_a_missing_command_with_the_remedy(commands: Path) -> None:
    with pytest.raises(SourceError) as caught:
        SlurmSource(SlurmOptions(node="n0"), vendor=NVIDIA).poll()
    assert str(caught.value).startswith("scontrol is neither on PATH nor in ")
    assert str(caught.value).endswith("add its directory to PATH, or pass --no-attribution.slurm")


@pytest.mark.parametrize("path", ["/nowhere", "/nowhere:", "", None])
def test_commands_are_found_in_usual_slurm_directories_and_not_in_the_working_directory(
    commands: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str | None
) -> None:
    places = tmp_path / "opt"
    places.mkdir()
    write(places, "echo found")
    write(commands, "echo planted")
    monkeypatch.chdir(commands)
    monkeypatch.setattr(programs, "PLACES", (str(places),))
    monkeypatch.delenv("PATH") if path is None else monkeypatch.setenv("PATH", path)
    assert slurm_commands.run(["squeue"], 5.0) == "found\n"


def test_a_wrapper_of_the_site_finds_slurms_commands_too(commands: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "PLACES", ("/opt/slurm/bin",))
    write(commands, "echo $PATH", setup="")
    assert slurm_commands.run(["squeue"], 5.0) == f"{commands}:/opt/slurm/bin\n"


def test_a_command_gets_its_arguments_and_an_empty_input(commands: Path, tmp_path: Path) -> None:
    write(commands, 'echo "$*"; cat')
    (tmp_path / "input").write_text("what the agent could read\n", "utf-8")
    own = os.dup(0)
    try:
        with (tmp_path / "input").open("rb") as file:
            os.dup2(file.fileno(), 0)
        assert slurm_commands.run(["squeue", "-h", "-a"], 5.0) == "-h -a\n"
    finally:
        os.dup2(own, 0)
        os.close(own)


def test_the_error_names_a_command_that_the_kernel_does_not_start(commands: Path) -> None:
    write(commands, "", shell="/nowhere/sh")
    with pytest.raises(SourceError, match=r"^squeue: .*No such file"):
        slurm_commands.run(["squeue"], 5.0)


def test_bytes_that_are_not_utf_8_are_replaced(commands: Path) -> None:
    write(commands, r"printf 'caf\351\n'")
    assert slurm_commands.run(["squeue"], 5.0) == "caf\ufffd\n"
    write(commands, r"printf 'caf\351\n' >&2; exit 1")
    with pytest.raises(SourceError, match="^squeue ended with status 1: caf\ufffd$"):
        slurm_commands.run(["squeue"], 5.0)


def test_an_answer_of_exactly_the_limit_is_accepted(commands: Path) -> None:
    write(commands, "echo 12345")
    assert slurm_commands.run(["squeue"], 5.0, limit=6) == "12345\n"
    with pytest.raises(SourceError, match="squeue printed more than 5 bytes"):
        slurm_commands.run(["squeue"], 5.0, limit=5)


def test_an_endless_answer_is_refused(commands: Path) -> None:
    write(commands, "exec cat /dev/zero")
    with pytest.raises(SourceError, match="squeue printed more than 100000 bytes"):
        slurm_commands.run(["squeue"], 30.0, limit=100_000)


@pytest.mark.parametrize(
    "text",
    ["sleep 60", "exec >&- 2>&-; sleep 60", "while :; do echo x; sleep 0.05; done"],
    ids=["mute", "closed", "slow"],
)
def test_a_command_that_does_not_end_is_killed_with_its_children(commands: Path, text: str) -> None:
    write(commands, f"echo $$ > {commands}/pid\n{text}")
    began = time.monotonic()
    with pytest.raises(SlowSource, match="within 1 s"):
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


@pytest.mark.filterwarnings("ignore:subprocess:ResourceWarning")
def test_the_exporter_does_not_wait_for_a_child_that_cannot_be_killed(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a child hangs in the kernel, or runs as another user."""
    write(commands, "exec sleep 30")
    left: list[int] = []

    def refuse(group: int, number: int) -> None:
        left.append(group)
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(programs, "END_S", 0.1)
        patch.setattr("os.killpg", refuse)
        began = time.monotonic()
        with pytest.raises(SlowSource, match=r"squeue did not answer within 0\.2 s"):
            slurm_commands.run(["squeue"], 0.2)
        took = time.monotonic() - began
    (group,) = left
    os.killpg(group, signal.SIGKILL)
    assert took < 20.0


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("Invalid node name specified", "; name this node with --attribution.slurm.node"),
        ("Unable to contact slurm controller (connect failure)", ""),
    ],
)
@pytest.mark.parametrize("chunk", [8, programs.CHUNK])  # words that come bit by bit are put together
def test_a_refusal_contains_slurms_error_and_the_remedy(
    commands: Path, monkeypatch: pytest.MonkeyPatch, words: str, hint: str, chunk: int
) -> None:
    monkeypatch.setattr(programs, "CHUNK", chunk)
    write(commands, f"echo 'slurm_load_jobs error: {words}' >&2; exit 1")
    with pytest.raises(SourceError) as caught:
        slurm_commands.run(["squeue"], 5.0)
    assert str(caught.value) == f"squeue ended with status 1: slurm_load_jobs error: {words}{hint}"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'Node vm not found'; exit 1", "Node vm not found; name this node with --attribution.slurm.node"),
        ("echo 'Node vm not found'; echo 'no way' >&2; exit 1", "no way"),
        (f"printf '%0{REASON_MAX + 9}d' 0; exit 1", shorten("0" * (REASON_MAX + 9), REASON_MAX)),
        ("echo Token=x; echo Token=y; exit 1", "it printed no reason"),  # several lines are data
        ("echo Token=x; exit 2", "it printed no reason"),
        ("exit 1", "it printed no reason"),
    ],
)
def test_a_refusal_on_standard_output_is_the_reason(commands: Path, script: str, reason: str) -> None:
    write(commands, script)
    with pytest.raises(SourceError) as caught:
        slurm_commands.run(["squeue"], 5.0)
    assert str(caught.value).partition(": ")[2] == reason


def test_a_running_slurmd_is_detected_by_its_name(tmp_path: Path) -> None:
    for pid, name in (("1", "systemd"), ("20", "slurmstepd")):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "comm").write_text(f"{name}\n")
    (tmp_path / "21" / "comm").mkdir(parents=True)  # an unreadable entry
    (tmp_path / "22").mkdir()
    (tmp_path / "22" / "comm").write_bytes(b"caf\xe9\n")
    assert not runs_slurmd(tmp_path)
    (tmp_path / "30").mkdir()
    (tmp_path / "30" / "comm").write_text("slurmd\n")
    assert runs_slurmd(tmp_path)
