"""Finds the requested command and runs it."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from typing import NoReturn

from gpu_exporter.cli.commands import COMMANDS, SERVE, Command
from gpu_exporter.cli.output import READER_LEFT, prepare_streams
from gpu_exporter.common.exits import Exit


def main() -> NoReturn:
    """Runs the command that the arguments name, and ends the process."""
    _end_at_signals()
    out = prepare_streams()
    code = 1
    try:
        code = run_command(sys.argv[1:])
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except Exception:
        sys.excepthook(*sys.exc_info())
    sys.stdout.flush()
    if out.lost is not None and out.lost.errno not in READER_LEFT:
        sys.stderr.write(f"gpu-exporter: cannot write to standard output: {out.lost.strerror}\n")
        code = code or Exit.UNFORESEEN
    # Python's own end would wait for a thread that hangs in the driver, could crash if a thread logs meanwhile, and
    # restores the default of each signal, so that a second SIGTERM would make a clean end a failure.
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)


def _end_at_signals() -> None:
    """Makes SIGTERM and SIGINT end the process. Commands that must finish some work set their own handlers.

    KeyboardInterrupt is not used: Python raises it at any line, prints a traceback, loses it in a destructor, and does
    not raise it while a driver call hangs.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        if os.getpid() == 1:
            # The kernel discards a signal to the first process of a container that has no handler. Without one, a pod
            # that is deleted while it starts waits for its grace period.
            signal.signal(number, lambda number, _: os._exit(128 + number))
        elif signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or `&` in a script
            signal.signal(number, signal.SIG_DFL)


def run_command(given: list[str]) -> int:
    if not given or given[0].startswith("-"):
        return SERVE.run(given)
    name, rest = given[0], given[1:]
    if name == "help":
        command = SERVE if not rest else COMMANDS.get(rest[0]) or _refuse(rest[0])
        return command.run(["--help"])
    return (COMMANDS.get(name) or _refuse(name)).run(rest)


def _refuse(name: str) -> Command:
    """Ends the process with an error: the command does not exist. Never returns."""
    from gpu_exporter.common.plain import nearest

    near = nearest(name, COMMANDS)
    hint = f"did you mean {near}?" if near else f"the commands are {', '.join(COMMANDS)}"
    return SERVE.load().build_parser().error(f"{name!r} is not a command; {hint}")  # type: ignore[no-any-return]
