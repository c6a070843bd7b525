"""As the first process of a container, the command ends at SIGTERM while it still starts. Needs root for a PID namespace."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.testbed.processes import GPU_EXPORTER, wait_for
from tests.testbed.servers import require

COMMANDS = {
    "agent": ("--state.directory=", "--config.file"),
    "once": ("--once", "--config.file"),
    "reconciler": ("reconcile", "--kubernetes", "--config.file"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_still_starts_ends_at_once(command: str, tmp_path: Path) -> None:
    """The configuration is a pipe that gives nothing, so the command waits for it before it has started anything."""
    require("unshare")
    pipe = tmp_path / "config.yaml"
    os.mkfifo(pipe)
    *flags, last = COMMANDS[command]
    start = ("unshare", "--pid", "--fork", "--kill-child", *GPU_EXPORTER, *flags, f"{last}={pipe}")
    with subprocess.Popen(start, stderr=subprocess.PIPE, text=True) as outer:
        try:
            inner = wait_for(lambda: reader_of(pipe, outer.pid), "the command to open its configuration")
            os.kill(inner, signal.SIGTERM)
            assert outer.wait(60) == 128 + signal.SIGTERM
        finally:
            outer.kill()


def reader_of(pipe: Path, outer: int) -> int | None:
    """The first process of the namespace, once it waits for the pipe."""
    children = Path(f"/proc/{outer}/task/{outer}/children").read_text("ascii").split()
    for child in map(int, children):
        waits = Path(f"/proc/{child}/wchan").read_text("ascii")
        command = Path(f"/proc/{child}/cmdline").read_bytes().decode()
        if str(pipe) in command and waits in ("wait_for_partner", "fifo_open"):
            return child
    return None
