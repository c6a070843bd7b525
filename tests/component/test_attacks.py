"""Attacks by hostile clients, peers and files on the running programs. Writes the second table of docs/faults.md."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import yaml
from kubernetes import client

from gpu_exporter.attribution.slurm.collected import ANSWERS
from gpu_exporter.reconciler.decision.policy import LABEL
from tests.component.pods_bench import Bench, metrics_of_an_idle_pod
from tests.testbed.cgroups import MemoryLimit
from tests.testbed.chart import CHART
from tests.testbed.control_plane import ControlPlane, start_control_plane
from tests.testbed.node import static_pod
from tests.testbed.odd_host import OddHost
from tests.testbed.pages import serve_page
from tests.testbed.pki import Authority
from tests.testbed.processes import GPU_EXPORTER, Processes, Running, cpu_s, fetch, free_port, wait_for

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
MARK = "\n## Attacks\n"
HEADER = """
`tests/component/test_attacks.py` writes this table from its measurements, on two cores that also run other tests. Every test
run compares the text, but not the numbers. GPUs are simulated; clients and peers use loopback. For the defences, see
[security.md](security.md).

| attack | result |
| --- | --- |
"""
ORDER = [
    "64 clients request pages and read nothing, 24 send nothing, 8 send half a request head; all of them reconnect",
    "500 connections to a process that may have 128 file descriptors",
    "with TLS, at the chart's memory limit: 256 connections that send nothing, and 256 that only begin a TLS handshake",
    "with TLS, at the chart's memory limit: 8 clients on one address and 8 on 8 addresses guess passwords without a pause",
    "an endless request head, a request with a body, an unsupported method, random bytes",
    "a source that sends one byte from time to time",
    "a source with an endless answer",
    "a source with an endlessly nested answer",
    "a source that redirects to another server",
    "names with half of a surrogate pair and terminal escapes",
    "a recording for replay that unpacks to 1 GiB",
    "a state file and a device list that a user has changed",
    "a textfile directory in which every user can rename files",
    "the running exporter cannot start another thread, and gets signals",
    "the exporter cannot start a thread at its start",
    "a wall clock that jumps by an hour",
    "at the chart's memory limit, the reconciler reads 500 pods, each with its label and 250 kB of annotations",
    "at the chart's memory limit, the reconciler reads 50 pods, 40 Jobs, 50 Services, EndpointSlices and autoscalers of maximum size",
    "at the chart's memory limit, a collector reads 8,000 jobs with names and comments of 1 kB",
]
HOSTILE, HONEST, PROBE = "127.0.0.2", "127.0.0.3", "127.0.0.4"
SCENARIO = "gpus: [{model: T4}, {model: H100}]\n"


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The result of every attack. A run of all tests compares the results with the page, or writes the page."""
    rows: dict[str, str] = {}
    yield rows
    if rows.keys() != set(ORDER):  # not all tests ran: there is nothing to compare
        return
    table = HEADER + "".join(f"| {attack} | {rows[attack]} |\n" for attack in ORDER)
    first, _, before = PAGE.read_text("utf-8").partition(MARK)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(first + MARK + table, encoding="utf-8")
        return
    assert _without_figures(table) == _without_figures(before), (
        "docs/faults.md is stale: run `make faults` and review it"
    )


def _without_figures(text: str) -> str:
    return re.sub(r"\d[\d.,]*", "#", text)


@pytest.fixture
def start(processes: Processes, tmp_path: Path) -> Callable[..., tuple[Running, int]]:
    """An exporter of simulated GPUs."""
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(SCENARIO)

    def start(*flags: str, host: OddHost | None = None, **limits: int) -> tuple[Running, int]:
        port = free_port()
        listen = f"--web.listen-address=127.0.0.1:{port}"
        command = [*GPU_EXPORTER, f"--devices.scenario={scenario}", "--state.directory=", listen, *flags]
        if limits:
            command = ["prlimit", *(f"--{name}={value}" for name, value in limits.items()), "--", *command]
        running = processes.start(command, host.environment if host is not None else None)
        wait_for(lambda: fetch(f"http://127.0.0.1:{port}/-/ready"), "the exporter")
        return running, port

    return start


def get(port: int, path: str, source: str) -> tuple[int, int]:
    """Status and size."""
    client = http.client.HTTPConnection("127.0.0.1", port, 20.0, source_address=(source, 0))
    with contextlib.closing(client):
        client.request("GET", path)
        answer = client.getresponse()
        return answer.status, len(answer.read())


def probe_ms(port: int, times: int = 20) -> float:
    """The slowest of some probes."""
    slowest = 0.0
    for _ in range(times):
        began = time.monotonic()
        assert get(port, "/-/healthy", PROBE)[0] == 200
        slowest = max(slowest, time.monotonic() - began)
    return 1e3 * slowest


def rss_mib(running: Running) -> float:
    pages = int(Path(f"/proc/{running.process.pid}/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_the_exporter_answers_while_clients_take_all_connections(
    start: Callable[..., tuple[Running, int]], seen: dict[str, str]
) -> None:
    running, port = start()
    quiet = rss_mib(running)
    stop = threading.Event()

    def attack(sent: bytes) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5, (HOSTILE, 0)) as client:
                client.settimeout(0.2)
                client.sendall(sent)
                stop.wait(0.5)

    kinds = [b"GET / HTTP/1.1\r\n\r\n" * 200] * 64 + [b""] * 24 + [b"GET /metrics HT"] * 8
    attackers = [threading.Thread(target=attack, args=(sent,)) for sent in kinds]
    for attacker in attackers:
        attacker.start()
    wait_for(lambda: len(os.listdir(f"/proc/{running.process.pid}/fd")) > 40 or None, "the attack to be under way")
    answers: list[int] = []
    clients = [threading.Thread(target=lambda: answers.append(get(port, "/metrics", HONEST)[0])) for _ in range(50)]
    for each in clients:
        each.start()
    slowest = probe_ms(port)
    for each in clients:
        each.join()
    grown = rss_mib(running) - quiet
    stop.set()
    for attacker in attackers:
        attacker.join()
    assert answers.count(200) + answers.count(503) == 50
    assert slowest < 2000
    assert grown < 64
    seen[ORDER[0]] = (
        f"20 probes answered, the slowest in {slowest:.0f} ms; of 50 simultaneous honest scrapes, {answers.count(200)} answered and "
        f"{answers.count(503)} asked to retry; {grown:.0f} MiB more memory"
    )


def test_the_exporter_answers_with_more_connections_than_file_descriptors(
    start: Callable[..., tuple[Running, int]], seen: dict[str, str]
) -> None:
    running, port = start(nofile=128)
    with contextlib.ExitStack() as stack:
        for i in range(500):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 5, (f"127.0.1.{i % 250 + 1}", 0)))
        before, began = cpu_s(running.process.pid), time.monotonic()
        slowest = probe_ms(port)
        scrape = get(port, "/metrics", HONEST)[0]
        time.sleep(1.0)  # a server that spins would show it here
        share = (cpu_s(running.process.pid) - before) / (time.monotonic() - began)
        handles = len(os.listdir(f"/proc/{running.process.pid}/fd"))
    assert scrape == 200
    assert slowest < 2000
    assert handles < 120
    assert share < 0.8
    seen[ORDER[1]] = (
        f"{handles} descriptors in use, {100 * share:.0f} % of a core; the slowest of 20 probes took {slowest:.0f} ms; a scrape was answered"
    )


def test_the_exporter_refuses_invalid_requests(start: Callable[..., tuple[Running, int]], seen: dict[str, str]) -> None:
    _, port = start()
    statuses = []
    for text in (
        b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000,
        b"GET /metrics HTTP/1.1\r\nContent-Length: 20\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n",
        b"DELETE /metrics HTTP/1.1\r\n\r\n",
        bytes(range(128, 256)) + b"\r\n\r\n",
    ):
        whole = b""
        with socket.create_connection(("127.0.0.1", port), 20) as client, contextlib.suppress(ConnectionResetError):
            client.sendall(text)
            while chunk := client.recv(65536):
                whole += chunk
        assert whole.count(b"HTTP/1.1 ") == 1
        statuses.append(whole.split()[1].decode())
    assert statuses == ["431", "413", "405", "400"]
    seen[ORDER[4]] = f"one answer each ({', '.join(statuses)}), then the exporter closes the connection"


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


def run_dry(peer: Peer) -> tuple[int, str, float, float]:
    """The exit status, the output, the seconds that the command took, and its peak memory in MiB."""
    began = time.monotonic()
    command = [*GPU_EXPORTER, "reconcile", "--once", "--no-kubernetes", "--no-slurm", f"--source.prometheus={peer.url}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    text = process.stdout.read().decode()
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    peer.listener.close()
    assert "Traceback" not in text
    return process.returncode, text, time.monotonic() - began, usage.ru_maxrss / 1024


OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


def test_the_reconciler_gives_up_on_a_source_that_sends_single_bytes(
    processes: Processes, seen: dict[str, str]
) -> None:
    peer, port = Peer(OK, forever(b" ", 0.2)), free_port()
    listen = f"--web.listen-address=127.0.0.1:{port}"
    running = processes.start([*GPU_EXPORTER, "reconcile", f"--source.prometheus={peer.url}", listen])
    assert peer.asked.wait(20)
    assert "the last cycle ended" in (fetch(f"http://127.0.0.1:{port}/-/healthy") or "")
    assert "gpu_reconciler_apply 0.0" in (fetch(f"http://127.0.0.1:{port}/metrics") or "")
    slowest = probe_ms(port, 5)
    wait_for(lambda: "no whole answer within 10 s" in running.log() or None, "the answer to be given up", 20)
    peer.listener.close()
    ended = 0.0
    for source in ("--source.prometheus", "--source.exporter"):
        silent = Peer(OK, forever(b" ", 0.2))
        running = processes.start([*GPU_EXPORTER, "reconcile", f"{source}={silent.url}"])
        assert silent.asked.wait(20)
        began = time.monotonic()
        assert running.stop(timeout_s=20.0) == 0
        ended = max(ended, time.monotonic() - began)
        silent.listener.close()
    assert ended < 5
    seen[ORDER[5]] = (
        f"the reconciler gives up after 10 s and logs it; probes take {slowest:.0f} ms meanwhile; SIGTERM ends it in {ended:.1f} s"
    )


def test_the_reconciler_refuses_an_endless_answer(seen: dict[str, str]) -> None:
    code, text, took, most = run_dry(Peer(OK, forever(b"x" * 2**20)))
    assert code == 3
    assert "the answer is longer than 64 MiB" in text
    assert most < 300
    seen[ORDER[6]] = f"status 3 after {took:.1f} s: the answer is longer than 64 MiB; peak memory {most:.0f} MiB"


def test_the_reconciler_refuses_an_endlessly_nested_answer(seen: dict[str, str]) -> None:
    code, text, _, most = run_dry(Peer(OK, iter([b"[" * 10_000_000])))
    assert code == 3
    assert "not an answer of a PromQL API (RecursionError)" in text
    seen[ORDER[7]] = f"status 3: not an answer of a PromQL API; peak memory {most:.0f} MiB"


def test_the_reconciler_does_not_follow_a_redirect(seen: dict[str, str]) -> None:
    head = b"HTTP/1.1 307 Elsewhere\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n"
    code, text, _, _ = run_dry(Peer(head, iter([])))
    assert code == 3
    assert "redirects to another server, which is not followed" in text
    seen[ORDER[8]] = "status 3: the redirect is not followed"


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
    wait_for(lambda: "ud83d" in (fetch(f"http://127.0.0.1:{port}/metrics") or "") or None, "the holder", 30)
    for path in ("/", "/api/v1/status", "/api/v1/table", "/api/v1/holders"):
        body = fetch(f"http://127.0.0.1:{port}{path}")
        assert body is not None
        assert "\x1b" not in body
    assert "\x1b" not in running.log()
    seen[ORDER[9]] = "metrics, page, JSON and table are answered; neither they nor the log contain an escape"


def test_a_recording_that_unpacks_to_1_gib_is_refused(tmp_path: Path, seen: dict[str, str]) -> None:
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", 1) as file:
        for _ in range(1024):
            file.write(bytes(2**20))
    began = time.monotonic()
    process = subprocess.Popen([*GPU_EXPORTER, "--once", f"--devices.replay={path}"], stderr=subprocess.PIPE)
    assert process.stderr is not None
    text = process.stderr.read().decode()
    process.stderr.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert (process.returncode, "holds more than 256 MiB" in text) == (3, True)
    seen[ORDER[10]] = (
        f"status 3 after {time.monotonic() - began:.1f} s: the file holds more than 256 MiB; peak memory {usage.ru_maxrss / 1024:.0f} MiB"
    )


def test_changed_state_files_are_ignored_and_replaced(
    start: Callable[..., tuple[Running, int]], seen: dict[str, str], tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "state").write_text("gpu-exporter-state 2 00000000\n" + "[" * 100_000)
    (state / "devices.json").write_text('{"version": 1, "boot_id": "x", "devices": ' + "[" * 100_000)
    running, port = start(f"--state.directory={state}")
    assert "counters start at 0: state file damaged" in running.log()
    assert get(port, "/metrics", HONEST)[0] == 200
    wait_for(lambda: (state / "state").read_text().startswith("gpu-exporter-state") or None, "a new state file")
    seen[ORDER[11]] = "counters start at 0 and the log gives the reason; both files are replaced"
    wait_for(lambda: "[[[" not in (state / "devices.json").read_text() or None, "a new list of devices", 30)
    wait_for(lambda: "[[[" not in (state / "state").read_text() or None, "a new state file", 30)
    assert running.stop() == 0


def test_a_textfile_is_not_written_to_a_world_writable_directory(
    processes: Processes, seen: dict[str, str], tmp_path: Path
) -> None:
    directory = tmp_path / "textfile"
    directory.mkdir()
    directory.chmod(0o777)
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    flags = (
        f"--devices.scenario={tmp_path / 'scenario.yaml'}",
        "--state.directory=",
        f"--textfile.output={directory}/gpu.prom",
        "--textfile.interval=1s",
    )
    running = processes.start([*GPU_EXPORTER, *flags])
    wait_for(lambda: "every user may write in it (mode 0777): chmod o-w" in running.log() or None, "the complaint", 30)
    assert not list(directory.iterdir())
    directory.chmod(0o755)
    wait_for(lambda: (directory / "gpu.prom").is_file() or None, "the file", 30)
    seen[ORDER[12]] = "nothing is written and the log gives the reason; after `chmod o-w`, the next write succeeds"


def test_the_exporter_keeps_running_when_no_thread_can_be_started(
    start: Callable[..., tuple[Running, int]], seen: dict[str, str], tmp_path: Path
) -> None:
    host = OddHost(tmp_path / "host")
    scenario = tmp_path / "scenario.yaml"
    running, port = start(host=host)
    host.has_threads(False)
    wait_for(lambda: "attribution scenario: no thread can be started" in running.log() or None, "the complaint")
    assert get(port, "/metrics", HONEST)[0] == 200
    slowest = probe_ms(port)
    for number, said in ((signal.SIGUSR1, "the driver was released"), (signal.SIGHUP, "the driver is opened again")):
        running.process.send_signal(number)
        wait_for(lambda said=said: said in running.log() or None, said)
    host.has_threads(True)
    wait_for(lambda: "attribution scenario: answers again" in running.log() or None, "the way back")
    wait_for(lambda: 'gpu_up{gpu="0"' in (fetch(f"http://127.0.0.1:{port}/metrics") or "") or None, "the GPUs")
    host.has_threads(False)
    assert running.stop() == 0
    assert "Traceback" not in running.log()
    seen[ORDER[13]] = (
        f"scrapes and probes are answered in at most {slowest:.0f} ms; SIGUSR1, SIGHUP and SIGTERM work; the log names the "
        "limits; attribution recovers automatically"
    )
    ended = subprocess.run(
        [*GPU_EXPORTER, f"--devices.scenario={scenario}", "--state.directory=", f"--web.listen-address=:{free_port()}"],
        env=os.environ | host.environment,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)
    assert "raise the limit of tasks (TasksMax= of the unit" in ended.stderr
    seen[ORDER[14]] = f"status {ended.returncode}; a one-line error names the limits"


def observed_s(port: int) -> float:
    found = re.search(
        r"^gpu_observed_seconds_total\{gpu=\"0\".*} (\S+)", fetch(f"http://127.0.0.1:{port}/metrics") or "", re.M
    )
    assert found is not None
    return float(found[1])


def test_activity_is_known_soon_after_a_clock_jump(
    start: Callable[..., tuple[Running, int]], seen: dict[str, str], tmp_path: Path
) -> None:
    """Only forwards. After a jump backwards, a ring may hold future timestamps for two minutes (test_driver_ring.py)."""
    host = OddHost(tmp_path / "host")
    running, port = start(host=host)
    wait_for(lambda: observed_s(port) > 0, "a first second")
    host.step(3600)
    wait_for(lambda: "the wall clock was stepped by +3600 s" in running.log() or None, "the log")
    before, began = observed_s(port), time.monotonic()
    wait_for(lambda: observed_s(port) > before + 1.0, "activity to be known again", 130)
    took = time.monotonic() - began
    assert running.stop() == 0
    seen[ORDER[15]] = f"the log reports the jump; activity is known again after {took:.0f} s"


def limit_of(part: str) -> int:
    """The chart's memory limit for a component, in bytes."""
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    return int(values[part]["resources"]["limits"]["memory"].removesuffix("Mi")) * 2**20


@pytest.fixture
def limit(request: pytest.FixtureRequest) -> Iterator[MemoryLimit]:
    """A cgroup with the chart's memory limit for the component in the test's parameter."""
    made = MemoryLimit(limit_of(request.param))
    yield made
    made.close()


class Secured:
    """An agent with TLS and a password, at the chart's limit of memory."""

    def __init__(self, processes: Processes, limit: MemoryLimit, directory: Path) -> None:
        authority = Authority(directory)
        authority.issue("server", "agent")
        hashed = bcrypt.hashpw(b"right", bcrypt.gensalt(10)).decode()
        tls = "{cert_file: server.crt, key_file: server.key}"
        (directory / "web.yaml").write_text(f"tls_server_config: {tls}\nbasic_auth_users: {{ada: {hashed}}}\n")
        (directory / "scenario.yaml").write_text(SCENARIO)
        self.port = free_port()
        self._context = ssl.create_default_context(cafile=authority.certificate)
        listen = f"--web.listen-address=127.0.0.1:{self.port}"
        flags = ("--state.directory=", f"--web.config.file={directory / 'web.yaml'}", listen)
        command = [*GPU_EXPORTER, f"--devices.scenario={directory / 'scenario.yaml'}", *flags]
        self.running = processes.start(limit.wrap(command), name="agent")
        wait_for(lambda: self.ask("right", HONEST) == 200 or None, "the agent")

    def ask(self, password: str, source: str) -> int:
        """The status of a scrape on a new connection, 0 if the connection fails."""
        client = http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=20.0, source_address=(source, 0), context=self._context
        )
        word = base64.b64encode(f"ada:{password}".encode()).decode()
        with contextlib.closing(client), contextlib.suppress(OSError, http.client.HTTPException):
            client.request("GET", "/metrics", headers={"Authorization": f"Basic {word}"})
            answer = client.getresponse()
            answer.read()
            return answer.status
        return 0

    def scrapes(self, source: str, times: int = 20) -> list[float]:
        """The durations of some honest scrapes in milliseconds, the shortest first."""
        took = []
        for _ in range(times):
            began = time.monotonic()
            assert self.ask("right", source) == 200
            took.append(1e3 * (time.monotonic() - began))
        return sorted(took)


@pytest.mark.parametrize("limit", ["agent"], indirect=True)
def test_connections_without_a_tls_handshake_do_not_block_scrapes(
    processes: Processes, limit: MemoryLimit, seen: dict[str, str], tmp_path: Path
) -> None:
    agent = Secured(processes, limit, tmp_path)
    with contextlib.ExitStack() as stack:
        for i in range(512):
            with contextlib.suppress(OSError):
                client = stack.enter_context(
                    socket.create_connection(("127.0.0.1", agent.port), 5, (f"127.0.1.{i % 250 + 1}", 0))
                )
                if i % 2:
                    client.sendall(b"\x16\x03\x01\x02\x00")  # the beginning of a TLS handshake
        took = agent.scrapes(HONEST)
    assert agent.running.process.poll() is None, agent.running.log()
    assert took[len(took) // 2] < 100.0
    seen[ORDER[2]] = (
        f"peak memory {limit.peak_mib():.0f} of {limit.limit / 2**20:.0f} MiB; {len(took)} honest scrapes, each with a handshake "
        f"and a password, took at most {took[-1]:.0f} ms"
    )


@pytest.mark.parametrize("limit", ["agent"], indirect=True)
def test_guessing_passwords_does_not_block_scrapes(
    processes: Processes, limit: MemoryLimit, seen: dict[str, str], tmp_path: Path
) -> None:
    agent = Secured(processes, limit, tmp_path)
    stop = threading.Event()
    answers: list[int] = []

    def guess(seed: int) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            answers.append(agent.ask(f"{seed}-{number}", HOSTILE if seed % 2 else f"127.0.2.{seed + 1}"))

    attackers = [threading.Thread(target=guess, args=(seed,)) for seed in range(16)]
    for attacker in attackers:
        attacker.start()
    wait_for(lambda: len(answers) > 8 or None, "the attack to be under way", 30)
    began, spent = time.monotonic(), cpu_s(agent.running.process.pid)
    took = agent.scrapes(HONEST)
    time.sleep(max(0.0, began + 10.0 - time.monotonic()))  # the period over which the share of a core is measured
    share = (cpu_s(agent.running.process.pid) - spent) / (time.monotonic() - began)
    stop.set()
    for attacker in attackers:
        attacker.join()
    assert set(answers) <= {0, 401, 429}
    assert took[len(took) // 2] < 100.0
    assert share < 0.6, "a quarter of a core for passwords, and the attackers' handshakes"
    seen[ORDER[3]] = (
        f"{100 * share:.0f} % of a core; peak memory {limit.peak_mib():.0f} of {limit.limit / 2**20:.0f} MiB; {len(took)} "
        f"honest scrapes from another address took at most {took[-1]:.0f} ms; none got 429"
    )


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    directory = tmp_path_factory.mktemp("control-plane")
    with Processes(directory) as processes, start_control_plane(processes, directory) as started:
        yield started


class Besieged:
    """A reconciler at the chart's limit of memory, in a cluster where a tenant has filled a namespace."""

    def __init__(self, processes: Processes, limit: MemoryLimit, bench: Bench, address: str) -> None:
        self.port = free_port()
        flags = ("--apply", "--interval=1s", f"--web.listen-address=127.0.0.1:{self.port}", "--no-slurm")
        access = (f"--source.exporter={address}", f"--kubernetes.kubeconfig={bench.plane.admin}")
        self.running = processes.start(limit.wrap([*GPU_EXPORTER, "reconcile", *access, *flags]), name="reconciler")

    def value(self, series: str) -> float | None:
        found = re.search(rf"^{re.escape(series)} (\S+)", fetch(f"http://127.0.0.1:{self.port}/metrics") or "", re.M)
        return float(found[1]) if found else None

    def last_success(self) -> float:
        assert self.running.process.poll() is None, self.running.log()
        return self.value("gpu_reconciler_last_success_timestamp_seconds") or 0.0

    def cycles(self, count: int) -> None:
        """Wait for this number of successful cycles."""
        for _ in range(count):
            before = self.last_success()
            wait_for(lambda before=before: self.last_success() > before or None, "a cycle that succeeds", 60)


def fill(create: Callable[[str, dict[str, Any]], Any], namespace: str, bodies: Iterator[dict[str, Any]]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda body: create(namespace, body), bodies))


@pytest.mark.kubernetes
@pytest.mark.parametrize("limit", ["reconciler"], indirect=True)
def test_the_reconciler_survives_hundreds_of_forged_labels(
    processes: Processes, limit: MemoryLimit, seen: dict[str, str], plane: ControlPlane
) -> None:
    bench, count = Bench(plane, "labels"), 500
    uid = bench.run_pod("train", started_s_ago=20000.0)
    note = "x" * 250_000
    marked = {"labels": {LABEL: "underused"}, "annotations": {"note": note}}
    pods = (static_pod(f"p{i}", 1, **marked) for i in range(count))
    fill(
        plane.core.create_namespaced_pod,
        "labels",
        ({**each, "metadata": {**each["metadata"], "namespace": "labels"}} for each in pods),
    )
    with serve_page(lambda: metrics_of_an_idle_pod("labels", "train", uid)) as address:
        besieged = Besieged(processes, limit, bench, address)
        wait_for(lambda: bench.labels("train").get(LABEL) == "underused" or None, "the honest mark", 60)
        besieged.cycles(3)
        foreign = besieged.value("gpu_reconciler_foreign_marks")
    assert foreign == count
    assert bench.labels("p7").get(LABEL) == "underused", "left alone"
    seen[ORDER[16]] = (
        f"peak memory {limit.peak_mib():.0f} of {limit.limit / 2**20:.0f} MiB; counted as {foreign:.0f} foreign marks, which remain "
        "unchanged; another pod is marked; every cycle succeeds"
    )
    plane.core.delete_collection_namespaced_pod("labels", grace_period_seconds=0)


@pytest.mark.kubernetes
@pytest.mark.parametrize("limit", ["reconciler"], indirect=True)
def test_the_reconciler_survives_objects_of_maximum_size(
    processes: Processes, limit: MemoryLimit, seen: dict[str, str], plane: ControlPlane
) -> None:
    bench, namespace = Bench(plane, "large"), "large"
    uid = bench.run_pod("train", started_s_ago=20000.0, labels={"app": "mine"})
    note = {"note": "x" * 250_000}
    job_spec = {"parallelism": 0, "template": {"spec": {"restartPolicy": "Never", "containers": [
        {"name": "x", "image": "x", "args": ["y" * 1_100_000]}
    ]}}}  # fmt: skip
    batch = client.BatchV1Api(plane.api)
    fill(
        batch.create_namespaced_job,
        namespace,
        ({"metadata": {"name": f"j{i}", "annotations": note}, "spec": job_spec} for i in range(40)),
    )
    owners = [batch.read_namespaced_job(f"j{i}", namespace).metadata.uid for i in range(40)]

    def pod(at: int) -> dict[str, Any]:
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": f"j{at % 40}",
            "uid": owners[at % 40],
            "controller": True,
        }
        made = static_pod(f"p{at}", 1, annotations=note, ownerReferences=[owner])
        made["metadata"]["namespace"] = namespace
        # The API server writes "<" as six characters in JSON, so some of the objects are too large to be read.
        made["spec"]["containers"][0]["args"] = [("<" if at % 5 == 0 else "z") * 1_100_000]
        return made

    fill(plane.core.create_namespaced_pod, namespace, (pod(i) for i in range(50)))
    fill(plane.core.create_namespaced_service, namespace, (
        {"metadata": {"name": f"s{i}", "annotations": note}, "spec": {"selector": {"app": f"a{i}"}, "ports": [{"port": 1}]}}
        for i in range(50)
    ))  # fmt: skip
    slices = client.DiscoveryV1Api(plane.api).create_namespaced_endpoint_slice
    fill(slices, namespace, (
        {"metadata": {"name": f"e{i}", "annotations": note, "labels": {"kubernetes.io/service-name": f"s{i}"}},
         "addressType": "IPv4", "ports": [], "endpoints": [
            {"addresses": [f"10.{i}.{n // 250}.{n % 250 + 1}"], "targetRef": {"kind": "Pod", "name": "q" * 200, "uid": "u" * 30}}
            for n in range(1000)
        ]}
        for i in range(50)
    ))  # fmt: skip
    scalers = client.AutoscalingV2Api(plane.api).create_namespaced_horizontal_pod_autoscaler
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "none"}
    fill(scalers, namespace, (
        {"metadata": {"name": f"h{i}", "annotations": note}, "spec": {"maxReplicas": 2, "scaleTargetRef": target}} for i in range(50)
    ))  # fmt: skip
    with serve_page(lambda: metrics_of_an_idle_pod(namespace, "train", uid)) as address:
        besieged = Besieged(processes, limit, bench, address)
        wait_for(lambda: bench.labels("train").get(LABEL) == "underused" or None, "the honest mark", 60)
        besieged.cycles(3)
        began = time.monotonic()
        assert besieged.last_success() > 0.0
        assert (besieged.value('gpu_reconciler_odd_objects_total{kind="Pod",reason="size"}') or 0.0) >= 10
        answered = 1e3 * (time.monotonic() - began)
    seen[ORDER[17]] = (
        f"peak memory {limit.peak_mib():.0f} of {limit.limit / 2**20:.0f} MiB; another pod in the namespace is marked; every cycle "
        f"succeeds; the reconciler's metrics answer in {answered:.0f} ms"
    )


@pytest.mark.parametrize("limit", ["reconciler"], indirect=True)
def test_a_collector_survives_8000_long_jobs(
    processes: Processes, limit: MemoryLimit, seen: dict[str, str], tmp_path: Path
) -> None:
    row = {
        "job_state": ["RUNNING"], "nodes": "n0", "gres_detail": ["gpu:1(IDX:0)"], "user_name": "ada", "account": "phys",
        "partition": "gpu", "name": "x" * 1_000, "comment": "\u001b[2J" + "y" * 1_000, "start_time": {"set": True, "number": 7},
    }  # fmt: skip
    jobs = json.dumps({"jobs": [{"job_id": i + 1, **row} for i in range(8_000)], "errors": []})
    node = "NodeName=n0 Arch=x\n   Gres=gpu:h100:1\n   GresUsed=gpu:h100:1(IDX:0)\n   SlurmdStartTime=1\n"
    (tmp_path / "jobs.json").write_text(jobs)
    (tmp_path / "node.txt").write_text(node)
    (tmp_path / "config.txt").write_text(
        "ClusterName = lab\nSLURM_CONF = /etc/slurm/slurm.conf\nSlurmdSpoolDir = /x\nPrivateData = none\n"
    )
    places = {name: tmp_path / name for name in ("squeue", "scontrol")}
    places["squeue"].write_text(f"#!/bin/sh\nexec cat {tmp_path}/jobs.json\n")
    places["scontrol"].write_text(
        f"#!/bin/sh\ncase $2 in config) exec cat {tmp_path}/config.txt;; *) exec cat {tmp_path}/node.txt;; esac\n"
    )
    for place in places.values():
        place.chmod(0o755)
    port = free_port()
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [*GPU_EXPORTER, "slurm-collector", f"--web.listen-address=127.0.0.1:{port}", "--interval=1s"]
    running = processes.start(limit.wrap(command), environment=environment, name="collector")

    def rounds() -> float:
        assert running.process.poll() is None, running.log()
        found = re.search(r'rounds_total\{result="success"\} (\S+)', fetch(f"http://127.0.0.1:{port}/metrics") or "")
        return float(found[1]) if found else 0.0

    wait_for(lambda: rounds() >= 2 or None, "two rounds", 60)
    assert fetch(f"http://127.0.0.1:{port}{ANSWERS}n0")
    slowest = probe_ms(port)
    seen[ORDER[18]] = (
        f"peak memory {limit.peak_mib():.0f} of {limit.limit / 2**20:.0f} MiB for an answer of {len(jobs) / 2**20:.0f} MiB; "
        f"probes take {slowest:.0f} ms meanwhile"
    )
