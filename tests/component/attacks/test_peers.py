"""Hostile sources of the reconciler, and names from a hostile tenant."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpu_exporter.reports.usage.tenants.read import TENANT_ROWS_MAX
from tests.component.attacks.attack_bench import ORDER, probe_ms
from tests.testbed.processes import GPU_EXPORTER, PROMPT_S, Processes, Running, fetch, free_port, wait_for


class Peer:
    """A source of evidence on loopback, with the answer that the test sets."""

    def __init__(self, head: bytes, body: Iterator[bytes]) -> None:
        self.asked = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self._head, self._body = head, body
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self.listener.accept()
            with connection:
                connection.recv(65536)
                self.asked.set()
                connection.sendall(self._head)
                for part in self._body:
                    connection.sendall(part)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):  # unread bytes would reset the connection
                    pass


def forever(part: bytes, pause_s: float = 0.0) -> Iterator[bytes]:
    while True:
        yield part
        time.sleep(pause_s)


# The memory that wait4() reports of a child begins with that of the process that started it, here a large one.
MEASURED = """
import resource, subprocess, sys

code = subprocess.call(sys.argv[1:], stderr=subprocess.STDOUT)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


def run_dry(peer: Peer) -> tuple[int, str, float, float]:
    """As `measure`."""
    ended = measure("reconcile", "--once", "--no-kubernetes", "--no-slurm", f"--source.prometheus={peer.url}")
    peer.listener.close()
    return ended


def measure(*command: str) -> tuple[int, str, float, float]:
    """The exit status, the output, the seconds that the command took, and its peak memory in MiB."""
    began = time.monotonic()
    measured = [sys.executable, "-c", MEASURED, *GPU_EXPORTER, *command]
    done = subprocess.run(measured, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stdout
    return done.returncode, done.stdout, time.monotonic() - began, int(done.stderr) / 1024


OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


@pytest.mark.slow
def test_the_reconciler_gives_up_on_a_source_that_sends_one_byte_at_a_time(
    processes: Processes, seen: dict[str, str]
) -> None:
    peer, port = Peer(OK, forever(b" ", 0.2)), free_port()
    listen = f"--web.listen-address=127.0.0.1:{port}"
    running = processes.start([*GPU_EXPORTER, "reconcile", f"--source.prometheus={peer.url}", listen])
    assert peer.asked.wait(60)
    assert "the last cycle ended" in (fetch(f"http://127.0.0.1:{port}/-/healthy") or "")
    assert "gpu_reconciler_apply 0.0" in (fetch(f"http://127.0.0.1:{port}/metrics") or "")
    slowest = probe_ms(port, 5)
    wait_for(lambda: "no complete answer within 10 s" in running.log() or None, "the answer to be given up")
    peer.listener.close()
    ended = 0.0
    for source in ("--source.prometheus", "--source.exporter"):
        silent = Peer(OK, forever(b" ", 0.2))
        running = processes.start([*GPU_EXPORTER, "reconcile", f"{source}={silent.url}"])
        assert silent.asked.wait(60)
        began = time.monotonic()
        assert running.stop() == 0
        ended = max(ended, time.monotonic() - began)
        silent.listener.close()
    assert ended < PROMPT_S
    seen[ORDER[6]] = (
        f"the reconciler gives up after 10 s; probes take {slowest:.0f} ms meanwhile; SIGTERM ends the reconciler in {ended:.1f} s"
    )


def test_the_reconciler_refuses_an_endless_answer(seen: dict[str, str]) -> None:
    code, text, took, most = run_dry(Peer(OK, forever(b"x" * 2**20)))
    assert code == 3
    assert "the answer is longer than 64 MiB" in text
    assert most < 300
    seen[ORDER[7]] = f"status 3 after {took:.1f} s: the answer is longer than 64 MiB; peak {most:.0f} MiB"


def test_the_reconciler_refuses_an_endlessly_nested_answer(seen: dict[str, str]) -> None:
    code, text, _, most = run_dry(Peer(OK, iter([b"[" * 10_000_000])))
    assert code == 3
    assert "not an answer of a PromQL API (RecursionError)" in text
    seen[ORDER[8]] = f"status 3: the answer is not in the format of a PromQL API; peak {most:.0f} MiB"


@contextlib.contextmanager
def promql(rows: int) -> Iterator[str]:
    """The address of a source that answers each query with so many rows, each of another tenant and holder. The facts
    about the whole period have one row, and there is no gap between two days.
    """
    numbers = itertools.count()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = urllib.parse.parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["query"][0]
            is_fact = not query.startswith(("sum by", "topk", "avg_over_time((count by"))
            nothing = 'namespace!=""' in query or " unless (" in query
            found = () if nothing else itertools.islice(numbers, 1 if is_fact else rows)
            labels = '"cluster":"c","scheduler":"kubernetes","namespace":"n%d","pod":"p%d","cause":"x"'
            result = ",".join(f'{{"metric":{{{labels % (each, each)}}},"value":[1,"1"]}}' for each in found)
            body = f'{{"status":"success","data":{{"resultType":"vector","result":[{result}]}}}}'.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "row", "said"),
    [
        (200_000, 9, "the answer has more than 10000 rows"),
        (TENANT_ROWS_MAX, 10, "the period has more than 20000 tenants"),
    ],
)
def test_a_digest_of_too_many_rows_ends_with_its_remedy(rows: int, row: int, said: str, seen: dict[str, str]) -> None:
    with promql(rows) as url:
        status, output, took, peak = measure("digest", f"--source.prometheus={url}", "--since=14d")
    assert (status, output.count("\n")) == (3, 1)
    assert said in output and "take a shorter --since" in output
    assert peak < 256
    seen[ORDER[row]] = f"status 3 after {took:.1f} s: {said}; peak {peak:.0f} MiB"


def test_the_reconciler_does_not_follow_a_redirect(seen: dict[str, str]) -> None:
    head = b"HTTP/1.1 307 Elsewhere\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n"
    code, text, _, _ = run_dry(Peer(head, iter([])))
    assert code == 3
    assert "redirects to another server, and the redirect is not followed" in text
    seen[ORDER[11]] = "status 3: the redirect is not followed"


@pytest.mark.slow
def test_invalid_text_in_names_is_escaped_in_every_output(
    start: Callable[..., tuple[Running, int]], seen: dict[str, str], tmp_path: Path
) -> None:
    holders = tmp_path / "holders.yaml"
    holders.write_text("[]\n")
    running, port = start(f"--attribution.static={holders}")
    page = fetch(f"http://127.0.0.1:{port}/metrics") or ""
    uuid = re.search(r'gpu_up\{gpu="0",uuid="([^"]+)"', page)
    assert uuid is not None
    holders.write_text(f'- {{uuid: {uuid[1]}, job: "\\ud83d\\e[2J", user: "a\\nb"}}\n')
    wait_for(lambda: "ud83d" in (fetch(f"http://127.0.0.1:{port}/metrics") or "") or None, "the holder")
    for path in ("/", "/api/v1/status", "/api/v1/table", "/api/v1/holders"):
        body = fetch(f"http://127.0.0.1:{port}{path}")
        assert body is not None
        assert "\x1b" not in body
    assert "\x1b" not in running.log()
    seen[ORDER[12]] = "metrics, page, JSON, table and log contain no escape"
