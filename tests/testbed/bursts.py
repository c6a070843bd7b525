"""Bursts of signals at every program that runs until a signal, or that a person may interrupt.

python -m tests.testbed.bursts 50            each program 50 times in each way
python -m tests.testbed.bursts 50 agent top  only these programs
"""

from __future__ import annotations

import contextlib
import os
import pty
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

import gpu_exporter
from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.testbed.nvml.build import build_library
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import GPU_EXPORTER, free_port, wait_for

CONTRIB = Path(gpu_exporter.__file__).parent / "contrib"
SIGNALS, APART_S = 200, 40e-6
GPUS = {"gpus": [{"model": "H100"}]}
UNSEEN_S = 0.5  # after this time, Python has had SIGINT, unnoticed by this process
PATIENCE_S = 60.0  # a program that has not ended by then hangs
ENDED_BY = {-signal.SIGTERM, -signal.SIGINT}


class Place:
    """What the programs need: a simulated node, a server that never answers, a folder for their files."""

    def __init__(self, directory: Path, silent: socket.socket) -> None:
        self.directory = directory
        self.silent = f"http://127.0.0.1:{silent.getsockname()[1]}"
        self.node = directory / "node.yaml"
        self.node.write_text(
            yaml.safe_dump({**GPUS, "holders": [{"gpu": 0, "kind": "pod", "name": "ml/a/main"}]}), "utf-8"
        )
        self.config = directory / "config.yaml"
        self.config.write_text("policy: {underused_after: 3h}\n", "utf-8")
        self.token = directory / "token"
        self.token.write_text("SLURM_JWT=x.eyJzdW4iOiJ4In0.x\n", "utf-8")  # of a user x
        self.kubeconfig = directory / "kubeconfig"
        names = {"cluster": "c", "user": "u"}
        parts = {"clusters": [{"name": "c", "cluster": {"server": self.silent}}], "users": [{"name": "u", "user": {}}]}
        whole = {**parts, "contexts": [{"name": "x", "context": names}], "current-context": "x"}
        self.kubeconfig.write_text(yaml.safe_dump(whole), "utf-8")
        self.table = NvmlTable(directory / "nvml-table")
        ScenarioFeeder(parse_scenario(GPUS), self.table)

    def environment(self) -> dict[str, str]:
        """Without settings of the machine; with our libnvidia-ml, and the variables that slurmd gives to a prolog."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("GPU_EXPORTER", "SLURM"))}
        return {
            **kept,
            "LD_LIBRARY_PATH": str(build_library()),
            "GPU_EXPORTER_NVML_TABLE": str(self.table.path),
            "GPU_EXPORTER_JOB_FILES": str(self.directory / "jobs"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_GPUS": "0",
            "TERM": "xterm",
        }


class Program(NamedTuple):
    """One program. `bound_s`: how long it may take to end on an idle machine, with the work that it finishes.

    `follows`: it has handlers of its own; the others are ended by the signal itself. `usual`: its status where it ends
    before the signal.
    """

    command: tuple[str, ...]
    bound_s: float
    follows: bool = True
    usual: int = 0


AGENT = ("--devices.scenario={node}", "--web.listen-address=127.0.0.1:{port}")
PROGRAMS: Mapping[str, Program] = {
    "agent": Program((*AGENT, "--state.directory={directory}/state"), 1.5),
    "textfile": Program(("--devices.scenario={node}", "--state.directory=", "--textfile.output={directory}/t.prom"), 1.5),
    "once": Program(("--once", "--state.directory=", "--no-attribution.slurm", "--devices.scenario={node}"), 0.5, follows=False),
    "holders": Program(("holders", "--state.directory=", "--no-attribution.slurm", "--devices.scenario={node}"), 0.5, follows=False),
    "slurm-collector": Program(
        ("slurm-collector", "--web.listen-address=127.0.0.1:{port}", "--slurmrestd={silent}", "--slurmrestd.token-file={token}"),
        1.0,
    ),
    "reconcile": Program(("reconcile", "--source.exporter={silent}", "--web.listen-address=127.0.0.1:{port}"), 1.0),
    "reconcile-once": Program(
        ("reconcile", "--once", "--no-kubernetes", "--no-slurm", "--source.exporter={silent}"), 0.5, follows=False
    ),
    "explain": Program(("explain", "ml/a", "--source.exporter={silent}"), 0.5, follows=False),
    "digest": Program(("digest", "--source.prometheus={silent}"), 0.5, follows=False),
    "report": Program(("report", "--source.prometheus={silent}"), 0.5, follows=False),
    "backtest": Program(("backtest", "--source.prometheus={silent}"), 0.5, follows=False),
    "job": Program(("job", "ml/a", "--source.prometheus={silent}"), 0.5, follows=False),
    "top": Program(("top", "--from={silent}"), 0.7),
    "top-once": Program(("top", "--once", "--from={silent}"), 0.5, follows=False),
    "record": Program(("record", "{directory}/node.rec.gz"), 3.0),
    "demo": Program(("demo", "--duration=10m"), 1.5),
    "pause": Program(("pause", "--pause.file={directory}/pause", "--for=1h"), 0.5, follows=False),
    "check-config": Program(("check-config", "{config}"), 0.5, follows=False),
    "check-monitors": Program(("check-monitors", "--kubernetes.kubeconfig={kubeconfig}"), 0.5, follows=False),
    "forget": Program(("forget", "GPU-0", "--state.directory={directory}"), 0.5, follows=False, usual=2),
    "contrib": Program(("contrib",), 0.5, follows=False),
    "completion": Program(("completion", "bash"), 0.5, follows=False),
    "version": Program(("version",), 0.5, follows=False),
    "prolog": Program(("sh", str(CONTRIB / "slurm" / "prolog.sh")), 0.5, follows=False),
    "epilog": Program(("sh", str(CONTRIB / "slurm" / "epilog.sh")), 0.5, follows=False),
}  # fmt: skip


class End(NamedTuple):
    """How a run ended: its status, the time from the first signal to the end, and what it printed on standard error."""

    status: int | None
    took_s: float
    said: str


@contextlib.contextmanager
def open_place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as directory, socket.create_server(("127.0.0.1", 0), backlog=1000) as silent:
        yield Place(Path(directory), silent)


def run(name: str, place: Place, after: str, seconds: float = 0.0) -> End:
    """Start a program, send the burst `seconds` after it is `started` or `ready`, and wait for its end."""
    program = PROGRAMS[name]
    words = [word.format(**vars(place), port=free_port()) for word in program.command]
    command = words if words[0] == "sh" else [*GPU_EXPORTER, *words]
    ours, its = pty.openpty() if name == "top" else (None, None)
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            command,
            stdin=its if its is not None else subprocess.DEVNULL,
            stdout=its if its is not None else subprocess.DEVNULL,
            stderr=said,
            env=place.environment(),
        )
        try:
            if its is not None:
                os.close(its)
            if command is not words:
                wait_until_ours(process.pid, ready=after == "ready" and program.follows)
            time.sleep(seconds)
            began = time.monotonic()
            send_burst(process.pid)
            status = process.wait(PATIENCE_S)
            took_s = time.monotonic() - began
        except subprocess.TimeoutExpired:
            status, took_s = None, PATIENCE_S
        finally:
            process.kill()
            process.wait()
            if ours is not None:
                os.close(ours)
        said.seek(0)
        return End(status, took_s, said.read().decode("utf-8", "replace"))


def wait_until_ours(pid: int, *, ready: bool = False) -> None:
    """Wait until the program has set what the signals do; with `ready`, until it has handlers of its own. Before, while
    Python itself starts, SIGINT is Python's.
    """
    was_pythons, since = False, time.monotonic()

    def is_ours() -> bool:
        nonlocal was_pythons, since
        lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
        masks = {
            line[:6]: int(line[7:].strip(), 16) for line in lines if line.startswith("Sig") and line[3:6] != "Q:\t"
        }
        caught, ignored = masks["SigCgt"], masks["SigIgn"]
        terms, ints = caught >> signal.SIGTERM - 1 & 1, caught >> signal.SIGINT - 1 & 1
        if ready:
            return bool(terms and ints)
        if not ignored >> signal.SIGPIPE - 1 & 1 or terms != ints:  # Python has not begun, or SIGINT is Python's
            was_pythons, since = was_pythons or ints > terms, time.monotonic()
            return False
        # For a moment, Python has begun and has not taken SIGINT yet. An ignored SIGINT it does not take.
        return was_pythons or bool(ignored >> signal.SIGINT - 1 & 1) or time.monotonic() > since + UNSEEN_S

    wait_for(is_ours, "the program to set what signals do", each_s=0.001)


def send_burst(pid: int) -> None:
    for index in range(SIGNALS):
        os.kill(pid, signal.SIGINT if index % 3 == 2 else signal.SIGTERM)
        until = time.monotonic() + APART_S
        while time.monotonic() < until:
            pass


def judge(name: str, after: str, end: End) -> str:
    """What is wrong with the end of a run, "" for nothing."""
    program = PROGRAMS[name]
    if end.status is None:
        return "it hangs"
    if "Traceback" in end.said or "Exception ignored" in end.said or "KeyboardInterrupt" in end.said:
        return f"it prints {end.said!r}"
    is_clean = end.status == program.usual
    if program.follows and after == "ready":
        return "" if is_clean else f"its status is {end.status}: {end.said!r}"
    if end.status in ENDED_BY or is_clean:
        return ""
    return f"its status is {end.status}: {end.said!r}"


def main(given: Sequence[str]) -> int:
    """Run the bursts; 1 if a program did not end as it should."""
    times, names = int(given[0]), given[1:] or list(PROGRAMS)
    wrong = 0
    with open_place() as place:
        print(f"{SIGNALS} signals {APART_S * 1e6:.0f} us apart, {times} runs in each way")
        for name in names:
            for after in ("started", "ready") if PROGRAMS[name].follows else ("started",):
                ends = [run(name, place, after, random.uniform(0, 0.6)) for _ in range(times)]
                faults = [fault for fault in (judge(name, after, end) for end in ends) if fault]
                wrong += len(faults)
                slowest = max(end.took_s for end in ends)
                late = sum(end.took_s > PROGRAMS[name].bound_s for end in ends)
                print(
                    f"{name:16} {after:8} ended {sum(end.status is not None for end in ends)} of {times}, "
                    f"slowest {slowest:.2f} s, above its bound of {PROGRAMS[name].bound_s:g} s: {late}"
                    + "".join(f"\n    {fault[:2000]}" for fault in sorted(set(faults)))
                )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
