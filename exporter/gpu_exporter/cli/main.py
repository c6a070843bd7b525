"""Finds the requested command and runs it."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence

from gpu_exporter.cli.commands import COMMANDS, SERVE, Command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    if os.getpid() == 1:
        # The kernel discards a signal to the first process of a container that has no handler. Without one, a pod that
        # is deleted while it starts waits for its grace period. Commands that have something to finish set their own.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    given = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that the terminal cannot show must not end the command
        sys.stdout.reconfigure(errors="replace")
    if not given or given[0].startswith("-"):
        return _run(SERVE, given)
    name, rest = given[0], given[1:]
    if name == "help":
        command = SERVE if not rest else COMMANDS.get(rest[0]) or _refuse(rest[0])
        return _run(command, ["--help"])
    return _run(COMMANDS.get(name) or _refuse(name), rest)


def _run(command: Command, given: list[str]) -> int:
    code: int = command.load().run(given)
    return code


def _refuse(name: str) -> Command:
    """End the process, because the command does not exist."""
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}"
    return SERVE.load().build_parser().error(f"{name!r} is not a command; {hint}")  # type: ignore[no-any-return]
