"""The HTTP server among hostile clients: handshakes, passwords, clients that do not read."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import bcrypt
import pytest
from tests.testbed.pki import Authority
from tests.unit.web.server_bench import HONEST, HOSTILE, PROBE, Door, Site, connect, get, note_connections, until

from gpu_exporter.common.web import crowd
from gpu_exporter.common.web import door as door_keeper
from gpu_exporter.common.web import server as web
from gpu_exporter.common.web.server import HttpServer


@pytest.fixture
def knocking(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Door, list[int]]]:
    """Twelve clients of one address that guess passwords without end, and the statuses that they get."""
    monkeypatch.setattr(door_keeper, "DELAY_S", 0.02)
    door, answers, stop = Door(site, tmp_path), list[int](), threading.Event()

    def guess(seed: int) -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            with contextlib.suppress(OSError, http.client.HTTPException):  # while the server stops
                answers.append(door.ask(f"{seed}-{number}", HOSTILE))

    attackers = [threading.Thread(target=guess, args=(seed,)) for seed in range(12)]
    for attacker in attackers:
        attacker.start()
    try:
        until(lambda: len(answers) > 3)
        yield door, answers
    finally:
        stop.set()
        door.server.stop()
        for attacker in attackers:
            attacker.join()


def note_checks(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """A list to which every password is added that is checked from now on."""
    checked: list[bytes] = []
    check = bcrypt.checkpw
    monkeypatch.setattr(bcrypt, "checkpw", lambda word, hashed: checked.append(word) or check(word, hashed))
    return checked


def test_clients_that_never_complete_the_handshake_are_closed_for_new_ones(site: Site, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("server", "agent")
    config = tmp_path / "web.yaml"
    config.write_text("tls_server_config: {cert_file: server.crt, key_file: server.key}\n")
    server = HttpServer("127.0.0.1:0", site, web_config=config)
    server.start()
    context = ssl.create_default_context(cafile=authority.certificate)
    try:
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(connect(server, HOSTILE)) for _ in range(crowd.TLS_ADDRESS_MAX + 3)]
            for client in clients[:3]:
                client.settimeout(60.0)
                with contextlib.suppress(ConnectionResetError):
                    assert client.recv(1) == b""
            with context.wrap_socket(connect(server, PROBE), server_hostname="localhost") as probe:
                probe.sendall(b"GET /-/healthy HTTP/1.1\r\nConnection: close\r\n\r\n")
                assert b"".join(iter(lambda: probe.recv(4096), b"")).endswith(b"healthy\n")
    finally:
        server.stop()


def test_a_client_that_shares_the_address_of_an_attacker_is_admitted(
    knocking: tuple[Door, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_keeper, "DELAY_MAX_S", 0.1)
    door, answers = knocking
    assert door.ask("right", HONEST) == 200, "another address does not wait"
    until(lambda: door.ask("right", HOSTILE) == 200)
    assert set(answers) <= {401, 429}
    checked = note_checks(monkeypatch)
    assert door.ask("right", HOSTILE) == 200
    assert b"right" not in checked, "its password is remembered from now on"


def test_a_wrong_password_is_not_checked_again(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    door, checked = Door(site, tmp_path), note_checks(monkeypatch)
    try:
        assert [door.ask("wrong", HOSTILE) for _ in range(5)] == [401] * 5
        assert [door.ask("right", HONEST) for _ in range(5)] == [200] * 5
        assert checked == [b"wrong", b"right"]
    finally:
        door.server.stop()


@pytest.mark.slow
def test_password_checks_use_a_limited_share_of_a_core(site: Site, tmp_path: Path) -> None:
    """From forty addresses at once, none of which has sent a wrong password before."""
    door = Door(site, tmp_path, rounds=10)
    spent: list[float] = []
    real = door_keeper._check

    def measured(entry: door_keeper._WaitingCheck) -> tuple[bool | None, float]:
        answer = real(entry)
        spent.append(answer[1])
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(door_keeper, "_check", measured)
        began = time.monotonic()
        threads = [threading.Thread(target=door.ask, args=(f"w{i}", f"127.0.1.{i}")) for i in range(1, 41)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took_s = time.monotonic() - began
    door.server.stop()
    one = max(spent)
    assert len(spent) > 2  # a busy machine gets to fewer of the forty
    assert sum(spent) <= door_keeper.BURST_S + door_keeper.SHARE * took_s + one


def test_clients_that_read_no_reply_are_closed_for_new_ones(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the limit for writing is over: all connections of the address are stalled, and a new one gets full service."""
    monkeypatch.setattr(crowd, "STALLED_S", 0.1)
    made = note_connections(monkeypatch)
    with contextlib.ExitStack() as stack:
        for _ in range(crowd.ADDRESS_MAX):
            client = stack.enter_context(connect(server, HOSTILE))
            client.sendall(b"GET /page HTTP/1.1\r\n\r\n" * 50)
            assert client.recv(1) == b"H"
        until(lambda: all(each.is_writing and time.monotonic() - each.since > 0.2 for each in made))
        assert get(server, "/fault", HOSTILE)[0] == 500  # 503 if no connection was closed


def test_a_client_that_does_not_read_the_end_is_closed_within_the_limit(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the reply fits into the server's buffer, so nothing more is written. The limit must apply nevertheless."""
    monkeypatch.setattr(web, "WRITE_S", 0.5)
    made = list[crowd.Connection]()

    class Small(crowd.Connection):
        def __init__(self, client: socket.socket, address: str) -> None:
            client.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, 4096
            )  # the kernel's default buffer would take all of it
            super().__init__(client, address)
            made.append(self)

    monkeypatch.setattr(web, "Connection", Small)
    server = HttpServer("127.0.0.1:0", site)
    server.start()
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                client = socket.socket()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", server.port))
                stack.enter_context(client)
                with contextlib.suppress(OSError):
                    client.sendall(b"GET /-/healthy HTTP/1.1\r\n\r\n" * 60 + b"GET /-/healthy HTTP/1.0\r\n\r\n")
            until(lambda: len(made) == 20 and all(each.client.fileno() == -1 for each in made))
    finally:
        server.stop()


@pytest.mark.parametrize("tls", [True, False])
def test_connections_from_before_a_reload_are_closed(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool
) -> None:
    """They were admitted without the certificate or password that is required now."""
    monkeypatch.setattr(web, "RELOAD_S", 0.05)
    authority = Authority(tmp_path)
    authority.issue("server", "agent")
    config = tmp_path / "web.yaml"
    files = "cert_file: server.crt, key_file: server.key"
    config.write_text(f"tls_server_config: {{{files}}}\n" if tls else "{}\n")
    server = HttpServer("127.0.0.1:0", site, web_config=config)
    server.start()
    context = ssl.create_default_context(cafile=authority.certificate)
    try:
        with contextlib.ExitStack() as stack:
            client: socket.socket = stack.enter_context(connect(server, HONEST))
            silent = stack.enter_context(connect(server, PROBE))  # has not begun its handshake
            if tls:
                client = stack.enter_context(context.wrap_socket(client, server_hostname="localhost"))
            client.settimeout(60.0)
            client.sendall(b"GET /-/healthy HTTP/1.1\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
            assert server.is_open()
            more = "client_ca_file: ca.crt, client_auth_type: RequireAndVerifyClientCert"
            config.write_text(f"tls_server_config: {{{files}, {more}}}\n")
            until(lambda: not server.is_open())
            for each in (client, silent):
                each.settimeout(60.0)
                with contextlib.suppress(OSError):
                    each.sendall(b"GET /page HTTP/1.1\r\n\r\n")
                    assert each.recv(4096) == b""
    finally:
        server.stop()
