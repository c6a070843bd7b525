"""Programs that a test starts: they end with the test; if the test is killed, the kernel ends them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from tests.testbed.programs import DIE_WITH_PARENT

T = TypeVar("T")
PORTS = (10_000, 30_000)
# "At once", on a machine whose cores are busy with other programs. A program that waits for what it must not wait for
# takes longer: ten seconds is the shortest limit of the product.
PROMPT_S = 8.0
_given: list[socket.socket] = []


def free_port() -> int:
    """A TCP port that is free on every address, and that no running process of the tests was given.

    It is outside the ranges that the kernel uses for connections and a cluster for Services: a port of the kernel's
    choice would be free now, but might be used by a connection a second later, also by tests that run in parallel.
    """
    while True:
        port = random.randrange(*PORTS)
        mark = socket.socket(socket.AF_UNIX)  # the kernel removes it with this process
        with socket.socket() as probe, contextlib.suppress(OSError):
            mark.bind(f"\0gpu-exporter-tests-{port}")
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
            _given.append(mark)
            return port
        mark.close()


def wait_for(ask: Callable[[], T | None], what: str, timeout_s: float = 240.0, each_s: float = 0.05) -> T:
    """Call `ask` until the answer is neither None nor False; fail with `what` after `timeout_s`.

    A test that passes never waits that long. The limit is long because a busy machine is no fault.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        answer = ask()
        if answer is not None and answer is not False:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(each_s)


def fastest(measure: Callable[[], float], enough: float, tries: int = 100) -> float:
    """The smallest of several measurements: the program's own time, without the load of other programs.

    The first one that is at most `enough` ends them.
    """
    best = measure()
    while best > enough and tries > 1:
        best, tries = min(best, measure()), tries - 1
    return best


def fetch(url: str, headers: Mapping[str, str] | None = None, timeout_s: float = 5.0) -> str | None:
    """The body of a GET, None without an answer with status 200."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=dict(headers or {})), timeout=timeout_s
        ) as answer:
            return str(answer.read().decode())
    except (urllib.error.URLError, OSError):
        return None


def converse(client: socket.socket, sent: bytes) -> bytes:
    """Send, and read until the other side closes the connection, which it may do while this side still sends."""
    whole = b""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        client.sendall(sent)
    with contextlib.suppress(ConnectionResetError):
        while chunk := client.recv(1 << 20):
            whole += chunk
    return whole


def cpu_s(pid: int) -> float:
    """The CPU time that a process has used so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Running:
    """One started program with its log."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log_path = log

    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace")

    def stop(self, with_signal: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """End the program; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(with_signal)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Processes:
    """All programs that one test started; they are ended in reverse order."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: list[Running] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.print_logs()
        for running in reversed(self._running):
            with contextlib.suppress(ProcessLookupError):
                running.stop()

    def print_logs(self) -> None:
        """Print the ends of all logs, for a failed test."""
        for running in self._running:
            print(f"--- end of {running.log_path.name}\n{running.log()[-3000:]}", file=sys.stderr)

    def start(
        self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None, name: str = ""
    ) -> Running:
        """Start a program with its output in a log file, which is named after the program unless `name` is given."""
        log = self._directory / f"{name or Path(command[0]).name}-{len(self._running)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                # A program does this, not preexec_fn: Python code between fork and exec can hang if other threads
                # (gRPC's) hold locks at the fork, which was seen once in a few dozen runs.
                [*DIE_WITH_PARENT, *map(str, command)],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=None if environment is None else dict(environment),
            )
        running = Running(process, log)
        self._running.append(running)
        return running

    def start_exporter(
        self,
        *flags: str | Path,
        environment: Mapping[str, str] | None = None,
        port: int | None = None,
        program: Sequence[str] = (),
    ) -> tuple[Running, str]:
        """Start `gpu-exporter` on a free port and wait until it is ready; returns the program and its URL."""
        chosen = port or free_port()
        listen = f"--web.listen-address=127.0.0.1:{chosen}"
        default = [] if any(str(flag).startswith("--state.directory") for flag in flags) else ["--state.directory="]
        base = {key: value for key, value in os.environ.items() if not key.startswith("GPU_EXPORTER_")}
        running = self.start([*(program or GPU_EXPORTER), listen, *default, *flags], environment or base)
        url = f"http://127.0.0.1:{chosen}"

        def is_ready() -> bool | None:
            assert running.process.poll() is None, running.log()
            return fetch(f"{url}/-/ready") is not None or None

        wait_for(is_ready, "gpu-exporter to be ready")
        return running, url


GPU_EXPORTER = (sys.executable, "-m", "gpu_exporter")


def run_exporter(*flags: str | Path, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `gpu-exporter FLAGS` to its end."""
    command = [*GPU_EXPORTER, *map(str, flags)]
    env = None if environment is None else dict(environment)
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=120)
