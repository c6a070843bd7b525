"""Ctrl-C and streams without a reader end every command without a traceback, whatever it does at that moment."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from gpu_exporter.cli.commands import COMMANDS
from gpu_exporter.common.exits import Exit
from tests.testbed.bursts import Place, open_place, wait_until_ours
from tests.testbed.pages import serve_pages
from tests.testbed.processes import GPU_EXPORTER, run_exporter

NODE = ("--devices.scenario={node}", "--state.directory=")
DRY = ("--no-kubernetes", "--no-slurm")
# What each command is asked here: it prints something where it can, and ends by itself. `{url}`: of an exporter.
ASKED: Mapping[str, tuple[str, ...]] = {
    "": ("--once", *NODE),
    "holders": NODE,
    "top": ("--from={url}",),
    "reconcile": ("--once", *DRY, "--source.exporter={url}"),
    "explain": ("ml/a", *DRY, "--source.exporter={url}"),
    "pause": ("--pause.file={directory}/pause",),
    "digest": ("--source.prometheus={url}",),
    "report": ("--source.prometheus={url}",),
    "backtest": ("--source.prometheus={url}",),
    "job": ("ml/a", "--source.prometheus={url}", "--records={directory}"),
    "slurm-collector": ("--once", "--directory={directory}", "--slurmrestd={url}", "--slurmrestd.token-file={token}"),
    "demo": ("--duration=500ms",),
    "check-config": ("{config}", "--format=json"),
    "check-monitors": ("--kubernetes.kubeconfig={directory}/none",),
    "record": ("{directory}/node.rec.gz", "--duration=100ms", "--interval=50ms"),
    "forget": ("GPU-0", "--state.directory={directory}"),
    "contrib": (),
    "completion": ("bash",),
    "version": (),
}
TRACES = ("Traceback", "Exception ignored", "KeyboardInterrupt", "Fatal Python error")


@pytest.fixture
def place() -> Iterator[Place]:
    with open_place() as place:
        yield place


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """An exporter whose answers are those of one reading."""
    with open_place() as place:
        flags = [word.format(node=place.node) for word in NODE]
        bodies = {form: run_exporter("--once", f"--format={form}", *flags).stdout for form in ("prometheus", "json")}

    with serve_pages(lambda path: bodies["prometheus" if path.endswith("/metrics") else "json"]) as server:
        yield f"http://{server}"


def start(name: str, place: Place, url: str, **streams: object) -> subprocess.Popen[bytes]:
    assert name in ASKED, f"write into ASKED what the new command {name!r} is asked here"
    words = [word.format(**vars(place), url=url) for word in ASKED[name]]
    command = [*GPU_EXPORTER, *([name] if name else []), *words]
    return subprocess.Popen(command, env=place.environment(), **streams)  # type: ignore[call-overload, no-any-return]


def end_of(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, (out or b"").decode(), (err or b"").decode()


def close(*numbers: int) -> Callable[[], None]:
    return lambda: [os.close(number) for number in numbers]  # type: ignore[func-returns-value, return-value]


@pytest.fixture
def unread() -> Iterator[int]:
    """A pipe whose reader has left."""
    ours, its = os.pipe()
    os.close(ours)
    yield its
    os.close(its)


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_a_command_whose_output_has_no_reader_ends_as_usual(name: str, place: Place, url: str, unread: int) -> None:
    piped = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    usual, out, _ = end_of(start(name, place, url, **piped))
    with Path("/dev/full").open("wb") as full:
        runs = [
            (start(name, place, url, **{**piped, "stdout": unread}), usual),
            (start(name, place, url, **{**piped, "preexec_fn": close(0, 1)}), usual),
            (start(name, place, url, **{**piped, "stdout": full}), usual or bool(out)),
        ]
    for process, expected in runs:
        code, _, err = end_of(process)
        assert (code, [trace for trace in TRACES if trace in err]) == (expected, []), err
    assert ("cannot write to standard output: No space left" in err) == bool(out)


@pytest.mark.parametrize("flag", ["--once", "--wrong"])
def test_a_command_whose_errors_have_no_reader_ends_as_usual(flag: str, unread: int, url: str) -> None:
    command = [*GPU_EXPORTER, "top", flag, f"--from={url}"]
    codes = [
        subprocess.run(command, check=False, timeout=60, stdout=subprocess.PIPE, **streams).returncode  # type: ignore[call-overload]
        for streams in ({"stderr": subprocess.PIPE}, {"stderr": unread}, {"preexec_fn": close(0, 1, 2)})
    ]
    assert codes == [2 if flag == "--wrong" else 0] * 3


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_ctrl_c_ends_a_command_at_any_moment_without_a_traceback(name: str, place: Place) -> None:
    """The server that it asks never answers."""
    process = start(name, place, place.silent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    wait_until_ours(process.pid)
    time.sleep(random.uniform(0, 0.3))
    process.send_signal(signal.SIGINT)
    code, _, err = end_of(process)
    assert not [trace for trace in TRACES if trace in err], err
    assert code == -signal.SIGINT or code in set(Exit), err
