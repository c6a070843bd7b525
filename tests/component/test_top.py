"""`gpu-exporter top` against running exporters: printed, and on a terminal with keys."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyte
import pytest
import yaml

from gpu_exporter.common.model.rows import TONES
from tests.testbed.pages import serve_page
from tests.testbed.processes import GPU_EXPORTER, Processes, fetch, free_port, run_exporter, wait_for
from tests.testbed.statuses import ROW, status_of

IDLE = {"kind": "constant", "value": 0}
BUSY = {"kind": "constant", "value": 0.9}


@pytest.fixture
def nodes(processes: Processes, tmp_path: Path) -> list[str]:
    """Two nodes with two GPUs each. One GPU of each node is held."""
    urls = []
    for name, load in (("idle", IDLE), ("busy", BUSY)):
        scenario = {
            "gpus": [{"model": "H100", "load": load}, {"model": "H100", "load": IDLE}],
            "holders": [{"gpu": 0, "kind": "pod", "name": f"ml/{name}-0/main"}],
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(scenario), encoding="utf-8")
        (tmp_path / "config.yaml").write_text("attribution: {interval: 500ms}\n", encoding="utf-8")
        flags = (f"--devices.scenario={path}", f"--config.file={tmp_path / 'config.yaml'}")
        _, url = processes.start_exporter(*flags, "--no-attribution.kubelet", "--no-attribution.slurm")
        wait_for(lambda url=url, name=name: f"ml/{name}-0" in (fetch(f"{url}/api/v1/status") or ""), "its holder")  # type: ignore[misc]
        urls.append(url)
    return urls


def test_top_prints_several_nodes_and_names_the_node_that_does_not_answer(nodes: list[str]) -> None:
    silent = f"127.0.0.1:{free_port()}"
    done = run_exporter("top", "--sort=gpu", *(f"--from={node}" for node in (*nodes, silent)))
    header, *rows, said = done.stdout.splitlines()
    assert header.split()[:3] == ["NODE", "GPU", "NAME"]
    assert [row.split()[0] for row in rows] == [node.removeprefix("http://") for node in nodes for _ in range(2)]
    assert said.startswith("2 of 3 nodes, 4 GPUs and instances, 2 held")
    assert (done.returncode, silent in done.stderr) == (4, True)
    done = run_exporter("top", f"--from={nodes[1]}", "--filter=busy-0", "--sort=util")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 3)
    done = run_exporter("top", "--format=json", *(f"--from={node}" for node in (*nodes, silent)))
    found = json.loads(done.stdout)
    assert (done.returncode, [bool(node["problem"]) for node in found["nodes"]]) == (4, [False, False, True])
    assert sorted(row["holder"] for row in found["rows"]) == ["", "", "ml/busy-0/main", "ml/idle-0/main"]
    done = run_exporter("top", f"--from={silent}")
    assert (done.returncode, done.stdout, "Connection refused" in done.stderr) == (3, "", True)
    for wrong in ("--sort=age", "--from=ftp://x"):
        assert run_exporter("top", wrong).returncode == 2


@contextmanager
def terminal(*arguments: str, **more: str | None) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The command on a terminal of 30 lines. `more`: variables of its environment, None for one that is not set."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 180, 0, 0))
    # pytest-xdist sets the size in the environment, and curses prefers it to that of the terminal.
    inherited = {key: value for key, value in os.environ.items() if key not in ("LINES", "COLUMNS")}
    wanted = {**inherited, "TERM": "xterm", "ESCDELAY": "25", **more}
    environment = {key: value for key, value in wanted.items() if value is not None}
    process = subprocess.Popen([*GPU_EXPORTER, "top", *arguments], stdin=its, stdout=its, stderr=its, env=environment)
    os.close(its)
    try:
        yield ours, process
    finally:
        process.kill()
        process.wait()
        os.close(ours)


class Terminal:
    """Reads the screen of the terminal."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._screen = pyte.Screen(180, 30)
        self._feed = pyte.ByteStream(self._screen)

    def lines(self) -> list[str]:
        while select.select([self._stream], [], [], 0.05)[0]:
            self._feed.feed(os.read(self._stream, 65536))
        return [line.rstrip() for line in self._screen.display]

    def rows(self) -> list[str]:
        """The holders of the visible rows, from the top. A comma follows that of the chosen row below the table."""
        return [word for line in self.lines() for word in line.split() if word.startswith("ml/") and word[-1] != ","]

    def wait_until(self, first: str, last: str, *names: str) -> None:
        """Wait for these beginnings of the first and the last line, with the rows of these holders between them."""

        def is_drawn() -> bool:
            lines, rows = self.lines(), self.rows()
            return lines[0].startswith(first) and lines[-1].startswith(last) and rows == [f"ml/{n}/main" for n in names]

        wait_for(is_drawn, f"{last!r} with {names}")

    def type(self, keys: str) -> None:
        os.write(self._stream, keys.encode())


def test_keys_choose_the_order_and_the_filter_and_q_ends_top(nodes: list[str]) -> None:
    with terminal(f"--from={nodes[0]}", f"--from={nodes[1]}", "--interval=500ms") as (stream, process):
        screen = Terminal(stream)
        screen.wait_until("2 of 2 nodes, 4 GPUs and instances, 2 held", "by waste", "idle-0", "busy-0")
        assert screen.lines()[1].split()[:3] == ["NODE", "GPU", "NAME"]
        screen.type("ss")
        screen.wait_until("2 of 2 nodes", "by util ", "busy-0", "idle-0")
        assert any("GPU 0: ml/busy-0/main, " in line for line in screen.lines())
        screen.type("\x1bOB")
        wait_for(lambda: any("GPU 0: ml/idle-0/main, " in line for line in screen.lines()), "the second row, chosen")
        screen.type("/busyx")
        screen.wait_until("2 of 2 nodes", "filter: busyx_")
        screen.type("\x7f\n")
        screen.wait_until("2 of 2 nodes", "by util, with 'busy' ", "busy-0")
        fcntl.ioctl(stream, termios.TIOCSWINSZ, struct.pack("HHHH", 5, 40, 0, 0))
        process.send_signal(signal.SIGWINCH)
        screen.type("s")
        wait_for(lambda: any(line.startswith("by memory") for line in screen.lines()), "the smaller window")
        screen.type("q")
        assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (None, "TERM is not set"),
        ("", "TERM is not set"),
        ("xterm-of-the-future", "terminals of type 'xterm-of-the-future' are unknown on this host"),
        ("dumb", "a terminal of type 'dumb' cannot move the cursor"),
    ],
)
def test_a_terminal_that_cannot_show_a_live_table_gets_one_reading(
    nodes: list[str], kind: str | None, reason: str
) -> None:
    with terminal(f"--from={nodes[0]}", TERM=kind) as (stream, process):
        said = b""
        with contextlib.suppress(OSError):  # the command has ended, and its terminal is closed
            while part := os.read(stream, 65536):
                said += part
        assert process.wait(60) == 0
    first, head, *rows, last = said.decode().split("\r\n")[:-1]
    assert first == (
        f"gpu-exporter top: warning: {reason}: this is one reading. Set TERM for a live table, e.g. TERM=xterm-256color"
    )
    assert head.split()[:2] == ["GPU", "NAME"] and len(rows) == 2 and last.startswith("2 GPUs and instances")
    assert "\x1b" not in said.decode()


@pytest.fixture
def states() -> Iterator[str]:
    """An exporter with a row for each state of TONES."""
    rows = [ROW._replace(gpu=str(number), state=state) for number, state in enumerate(TONES)]
    body = json.dumps(status_of(rows))
    with serve_page(lambda: body) as place:
        yield place


def what_is_written(node: str, **more: str | None) -> bytes:
    """What `top` has written when all states are on the screen."""
    with terminal(f"--from={node}", **more) as (stream, process):
        said = bytearray()

        def is_drawn() -> bool:
            while select.select([stream], [], [], 0.05)[0]:
                said.extend(os.read(stream, 65536))
            return list(TONES)[-1].encode() in said

        wait_for(is_drawn, "the last row")
        os.write(stream, b"q")
        assert process.wait(60) == 0
    return bytes(said)


def test_a_terminal_without_unicode_gets_a_mark_for_each_other_character(states: str) -> None:
    assert "40 °C".encode() in what_is_written(states, LC_ALL="C.UTF-8", TERM="linux")
    assert b"40 ?C" in what_is_written(states, LC_ALL="C", TERM="linux")


@pytest.mark.parametrize(
    ("kind", "no_color", "colours"),
    [
        ("xterm-256color", None, {"38;5;16", "38;5;231", "48;5;22", "48;5;124", "48;5;214"}),
        ("xterm", "", {"30", "37", "41", "42", "43"}),
        ("xterm", "1", set()),
        ("xterm-256color", "yes", set()),
        ("vt100", None, set()),
    ],
)
def test_states_have_colours_where_the_terminal_has_them_and_the_user_wants_them(
    states: str, kind: str, no_color: str | None, colours: set[str]
) -> None:
    """No other text gets a colour: it could be unreadable on the background that the user has chosen."""
    codes = re.findall(rb"\x1b\[([0-9;]+)m", what_is_written(states, TERM=kind, NO_COLOR=no_color))
    found = {each for code in codes for each in re.findall("[34]8;5;[0-9]+|\\b[34][0-7]\\b", code.decode())}
    assert found == colours
