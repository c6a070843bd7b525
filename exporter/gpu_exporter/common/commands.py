"""Runs other programs as child processes: finds them in the usual places, and limits their time and output.

A child that exceeds a limit is killed with all processes that it started.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, NamedTuple

from gpu_exporter.common.errors import ForeignError
from gpu_exporter.common.plain import REASON_MAX, one_line

# Directories of Slurm at sites where Slurm is not on the PATH of a service.
PLACES = ("/usr/bin", "/usr/local/bin", "/opt/slurm/bin", "/usr/local/slurm/bin", "/opt/slurm/current/bin")
END_S = 1.0  # wait for a killed child; a child that hangs in the kernel is left behind
MAX_REASON = 4096
CHUNK = 1 << 16
NO_REASON = "it printed no reason"


class CommandError(ForeignError):
    """A command without a usable result: not found, not started, too slow, too much output. The text names it."""


class NotFound(CommandError):
    """The program does not exist."""


class TooSlow(CommandError):
    """The program did not end in time."""


class Done(NamedTuple):
    """The result of a command that ended.

    `reason`: the first line of its standard error, or after status 1 the only line of its output, where Slurm prints
    errors such as `Node n0 not found`. A command that failed always has a reason.
    """

    status: int
    out: str
    reason: str


def search_path(environment: Mapping[str, str]) -> str:
    """PATH, followed by the usual places; empty parts are dropped, because they mean the working directory."""
    return os.pathsep.join(part for part in (*environment.get("PATH", "").split(os.pathsep), *PLACES) if part)


def find(command: str) -> str | None:
    """Returns the path of the program, None if it is neither on PATH nor in PLACES."""
    return shutil.which(command, path=search_path(os.environ))


def run(command: Sequence[str], environment: Mapping[str, str], timeout_s: float, limit: int) -> Done:
    """Runs a command to its end, with at most `limit` bytes of output. Raises CommandError."""
    program = find(command[0])
    if program is None:
        raise NotFound(f"{command[0]} is neither on PATH nor in {', '.join(PLACES)}: add its directory to PATH")
    try:
        process = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment, "PATH": search_path(os.environ)},
            start_new_session=True,  # so that the processes it starts are killed with it
        )
    except OSError as exc:
        raise CommandError(f"{command[0]}: {exc}") from exc
    try:
        out, reason = _read(process, command[0], timeout_s, limit)
    except BaseException:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    text = out.decode("utf-8", "replace")
    return Done(process.returncode, text, _reason(process.returncode, text, reason.decode("utf-8", "replace")))


def _reason(status: int, out: str, err: str) -> str:
    said = err.strip()
    if not said and status == 1 and "\n" not in out.strip():  # several lines are data, not a reason
        said = out.strip()
    return one_line(said.partition("\n")[0], REASON_MAX) or (NO_REASON if status else "")


def _read(process: subprocess.Popen[bytes], name: str, timeout_s: float, limit: int) -> tuple[bytes, bytes]:
    deadline = time.monotonic() + timeout_s
    assert process.stdout is not None and process.stderr is not None
    parts: dict[IO[bytes], bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as selector:
        for stream in parts:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TooSlow(f"{name} did not answer within {timeout_s:g} s")
            for key, _ in selector.select(left):
                stream = key.fileobj  # type: ignore[assignment]
                data = os.read(key.fd, CHUNK)
                if not data:
                    selector.unregister(stream)
                elif stream is process.stdout:
                    parts[stream] += data
                    if len(parts[stream]) > limit:
                        raise CommandError(f"{name} printed more than {limit} bytes")
                elif len(parts[stream]) < MAX_REASON:
                    parts[stream] += data
    try:
        process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as exc:
        raise TooSlow(f"{name} closed its output, but did not end within {timeout_s:g} s") from exc
    return bytes(parts[process.stdout]), bytes(parts[process.stderr])
