"""After the driver was replaced: the process is replaced once, or ends so that a service manager restarts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import pytest

from gpu_exporter.agent.runtime import restart
from gpu_exporter.agent.runtime.restart import AGAIN_S, MARK, restart_or_exit, restarted_lately
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.exits import Exit


class Replaced(Exception):
    """Represents a process that a new process has replaced."""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of the last new process."""
    taken: dict[str, str] = {}

    def execve(program: str, arguments: Sequence[str], environ: Mapping[str, str]) -> None:
        assert (program, list(arguments)) == (sys.executable, [sys.executable, *sys.orig_argv[1:]])
        taken.update(environ)
        raise Replaced

    for name in (MARK, "KUBERNETES_SERVICE_HOST", "container"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(restart, "CONTAINER_FILES", ())
    monkeypatch.setattr(os, "execve", execve)
    return taken


def test_on_a_host_the_process_replaces_itself_once_in_ten_minutes(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    with pytest.raises(Replaced):
        restart_or_exit("auto", clock.wall())
    monkeypatch.setenv(MARK, environment[MARK])
    clock.advance(AGAIN_S - 1.0)
    assert restart_or_exit("restart", clock.wall()) == Exit.DRIVER_REPLACED
    clock.advance(1.0)
    with pytest.raises(Replaced):
        restart_or_exit("restart", clock.wall())


@pytest.mark.parametrize("name", ["KUBERNETES_SERVICE_HOST", "container"])
def test_in_a_container_the_process_ends_unless_a_restart_is_requested(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "x")
    for action in ("auto", "exit"):
        assert restart_or_exit(action, 1000.0) == Exit.DRIVER_REPLACED
    with pytest.raises(Replaced):
        restart_or_exit("restart", 1000.0)


def test_the_process_ends_if_its_program_no_longer_exists(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise FileNotFoundError(2, "No such file")

    monkeypatch.setattr(os, "execve", fail)
    assert restart_or_exit("auto", 1000.0) == Exit.DRIVER_REPLACED
    assert "cannot restart" in caplog.messages[-1]


@pytest.mark.parametrize("mark", ["", "yesterday", "nan", "inf", "1100"])
def test_an_invalid_restart_time_in_the_environment_is_ignored(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, mark)
    assert not restarted_lately(1000.0)
