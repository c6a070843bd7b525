"""Slurm's commands: found, run with a clean environment, bounded in time and size."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from gpu_exporter.attribution.source import SourceError

# Where sites put Slurm that is not on the PATH of a service.
PLACES = ("/usr/bin", "/usr/local/bin", "/opt/slurm/bin", "/usr/local/slurm/bin", "/opt/slurm/current/bin")
# SQUEUE_* and SLURM_* variables filter and reshape what is printed (SQUEUE_USERS hides jobs), so the children get these
# and no others.
KEPT = ("PATH", "SLURM_CONF", "SLURM_JWT", "SACK_SOCKET", "HOME", "LD_LIBRARY_PATH")
MAX_ANSWER = 16 * 1024 * 1024  # some 5,000 jobs of `squeue --json`, which before 23.02 prints the whole cluster's
END_S = 1.0  # for a child that was killed; one that hangs in the kernel is left behind
MAX_REASON = 4096
CHUNK = 1 << 16


def search_path(environment: Mapping[str, str]) -> str:
    """PATH and the usual places after it; an empty part would be the working directory."""
    return os.pathsep.join(part for part in (*environment.get("PATH", "").split(os.pathsep), *PLACES) if part)


def find(command: str) -> str | None:
    """The program, None when it is not on PATH nor where sites put Slurm."""
    return shutil.which(command, path=search_path(os.environ))


def runs_slurmd(procfs: Path = Path("/proc")) -> bool:
    """Whether a slurmd runs on this host, as far as its processes can be seen."""
    for entry in procfs.glob("[0-9]*/comm"):
        with suppress(OSError):
            if entry.read_text("ascii", "replace").strip() == "slurmd":
                return True
    return False


def run(command: Sequence[str], timeout_s: float, limit: int = MAX_ANSWER) -> str:
    """What the command printed. Raises SourceError that says why there is nothing to believe."""
    program = find(command[0])
    if program is None:
        raise SourceError(
            f"{command[0]} is neither on PATH nor in {', '.join(PLACES)}: add its directory to PATH, "
            "or pass --no-attribution.slurm"
        )
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    # Times as Unix seconds, and no words in the language of the user who started us.
    environment |= {"PATH": search_path(os.environ), "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}
    try:
        process = subprocess.Popen(
            [program, *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # so that whatever it starts ends with it
        )
    except OSError as exc:
        raise SourceError(f"{command[0]}: {exc}") from exc
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
    if process.returncode != 0:
        text = reason.decode("utf-8", "replace").strip().partition("\n")[0][:200]
        hint = "; name this node with --attribution.slurm.node" if "Invalid node name" in text else ""
        raise SourceError(f"{command[0]} ended with status {process.returncode}: {text}{hint}")
    return out.decode("utf-8", "replace")


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
                raise SourceError(f"{name} did not answer within {timeout_s:g} s")
            for key, _ in selector.select(left):
                stream = key.fileobj  # type: ignore[assignment]
                data = os.read(key.fd, CHUNK)
                if not data:
                    selector.unregister(stream)
                elif stream is process.stdout:
                    parts[stream] += data
                    if len(parts[stream]) > limit:
                        raise SourceError(f"{name} printed more than {limit} bytes")
                elif len(parts[stream]) < MAX_REASON:
                    parts[stream] += data
    try:
        process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as exc:
        raise SourceError(f"{name} closed its output and did not end within {timeout_s:g} s") from exc
    return bytes(parts[process.stdout]), bytes(parts[process.stderr])
