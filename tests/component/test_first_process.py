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
    """Its YAML parser waits for a pipe, so the command waits for it before it has started anything."""
    require("unshare")
    pipe, config, parser = tmp_path / "pipe", tmp_path / "config.yaml", tmp_path / "yaml.py"
    os.mkfifo(pipe)
    config.write_text("{}\n", "utf-8")
    parser.write_text(f"open({str(pipe)!r})\n", "utf-8")
    *flags, last = COMMANDS[command]
    start = ("unshare", "--pid", "--fork", "--kill-child", *GPU_EXPORTER, *flags, f"{last}={config}")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(start, stderr=subprocess.PIPE, text=True, env=environment) as outer:
        try:
            inner = wait_for(lambda: waiting_child(outer.pid), "the command to read its configuration")
            os.kill(inner, signal.SIGTERM)
            assert outer.wait(60) == 128 + signal.SIGTERM
        finally:
            outer.kill()


def waiting_child(outer: int) -> int | None:
    """The first process of the namespace, once it waits for a pipe."""
    children = Path(f"/proc/{outer}/task/{outer}/children").read_text("ascii").split()
    for child in map(int, children):
        if Path(f"/proc/{child}/wchan").read_text("ascii") in ("wait_for_partner", "fifo_open"):
            return child
    return None
