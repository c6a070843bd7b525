"""Hostile clients of the exporter: connections, requests, TLS handshakes and passwords."""

from __future__ import annotations

import base64
import contextlib
import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import bcrypt
import pytest

from tests.component.attacks.attack_bench import HONEST, HOSTILE, ORDER, SCENARIO, get, probe_ms, rss_mib
from tests.testbed.cgroups import MemoryLimit
from tests.testbed.pki import Authority
from tests.testbed.processes import GPU_EXPORTER, PROMPT_S, Processes, Running, converse, cpu_s, free_port, wait_for


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
    assert slowest < 1e3 * PROMPT_S
    assert grown < 64
    seen[ORDER[0]] = (
        f"20 probes took at most {slowest:.0f} ms; of 50 simultaneous honest scrapes, {answers.count(200)} got 200, and "
        f"{answers.count(503)} got 503; {grown:.0f} MiB more memory"
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
    assert slowest < 1e3 * PROMPT_S
    assert handles < 120
    assert share < 0.8
    seen[ORDER[1]] = f"{handles} descriptors, {100 * share:.0f} % of a core; 20 probes took at most {slowest:.0f} ms"


@pytest.mark.slow
def test_valid_requests_of_one_address_do_not_hold_a_core(
    start: Callable[..., tuple[Running, int]], seen: dict[str, str]
) -> None:
    running, port = start()
    stop = threading.Event()
    statuses: list[int] = []

    def attack() -> None:
        while not stop.is_set():
            client = http.client.HTTPConnection("127.0.0.1", port, 20.0, source_address=(HOSTILE, 0))
            with contextlib.closing(client), contextlib.suppress(OSError, http.client.HTTPException):
                while not stop.is_set():
                    client.request("GET", "/metrics?name[]=gpu_up")
                    answer = client.getresponse()
                    answer.read()
                    statuses.append(answer.status)

    attackers = [threading.Thread(target=attack) for _ in range(8)]
    for attacker in attackers:
        attacker.start()
    wait_for(lambda: 429 in statuses or None, "the budget to be used")
    before, began, asked = cpu_s(running.process.pid), time.monotonic(), len(statuses)
    took = []
    while time.monotonic() < began + 5.0:  # the period over which the share of a core is measured
        at = time.monotonic()
        assert get(port, "/metrics", HONEST)[0] == 200
        took.append(1e3 * (time.monotonic() - at))
        stop.wait(0.1)
    share = (cpu_s(running.process.pid) - before) / (time.monotonic() - began)
    rate = (len(statuses) - asked) / (time.monotonic() - began)
    stop.set()
    for attacker in attackers:
        attacker.join()
    assert set(statuses) == {200, 429}
    assert share < 0.5, "a tenth of a core for the attacker, and the exporter's own work and honest scrapes"
    assert max(took) < 1e3 * PROMPT_S
    seen[ORDER[4]] = (
        f"{100 * share:.0f} % of a core for {rate:.0f} requests per second; all other requests of this "
        f"address get 429; {len(took)} honest scrapes from another address took at most {max(took):.0f} ms"
    )


def test_the_exporter_refuses_invalid_requests(start: Callable[..., tuple[Running, int]], seen: dict[str, str]) -> None:
    _, port = start()
    statuses = []
    for text in (
        b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000,
        b"GET /metrics HTTP/1.1\r\nContent-Length: 20\r\n\r\nGET /metrics HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nX: y\nTransfer-Encoding: chunked\r\n\r\n",
        b"DELETE /metrics HTTP/1.1\r\n\r\n",
        bytes(range(128, 256)) + b"\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", port), 20) as client:
            whole = converse(client, text)
        assert whole.count(b"HTTP/1.1 ") == 1
        statuses.append(whole.split()[1].decode())
    assert statuses == ["431", "413", "400", "405", "400"]
    seen[ORDER[5]] = f"one answer ({', '.join(statuses)}), then the connection is closed"


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
    assert took[0] < 1000.0 and took[-1] < 1e3 * PROMPT_S
    seen[ORDER[2]] = (
        f"peak {limit.peak_mib():.0f} of {limit.limit / 2**20:.0f} MiB; {len(took)} honest scrapes, each with a handshake "
        f"and a password, took at most {took[-1]:.0f} ms"
    )


@pytest.mark.slow
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
    wait_for(lambda: len(answers) > 8 or None, "the attack to be under way")
    began, spent = time.monotonic(), cpu_s(agent.running.process.pid)
    took = agent.scrapes(HONEST)
    time.sleep(max(0.0, began + 10.0 - time.monotonic()))  # the period over which the share of a core is measured
    share = (cpu_s(agent.running.process.pid) - spent) / (time.monotonic() - began)
    stop.set()
    for attacker in attackers:
        attacker.join()
    assert set(answers) <= {0, 401, 429}
    assert took[0] < 1000.0 and took[-1] < 1e3 * PROMPT_S
    assert share < 0.6, "a quarter of a core for passwords, and the attackers' handshakes"
    seen[ORDER[3]] = (
        f"{100 * share:.0f} % of a core; peak {limit.peak_mib():.0f} of {limit.limit / 2**20:.0f} MiB; {len(took)} "
        f"honest scrapes from another address took at most {took[-1]:.0f} ms; none got 429"
    )
