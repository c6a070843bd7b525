"""The HTTP server among honest and hostile clients, over real sockets."""

from __future__ import annotations

import base64
import contextlib
import gc
import http.client
import itertools
import os
import resource
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import bcrypt
import pytest
from tests.testbed.pki import Authority

from gpu_exporter.web import crowd
from gpu_exporter.web import door as door_keeper
from gpu_exporter.web import server as web
from gpu_exporter.web.request import Request
from gpu_exporter.web.server import TEXT, HttpServer, Reply

PAGE = b"x" * 1_000_000
HOSTILE, HONEST, PROBE = "127.0.0.2", "127.0.0.3", "127.0.0.4"


class Site:
    """A probe, a large page that is ready, and a slow page."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.asked = 0

    def answer_at_once(self, request: Request) -> Reply | None:
        if request.path == "/-/healthy":
            return Reply(200, TEXT, b"healthy\n")
        return Reply(200, TEXT, PAGE) if request.path == "/page" else None

    def answer(self, request: Request) -> Reply:
        self.asked += 1
        if request.path == "/fault":
            raise ValueError("an internal secret")
        self.go_on.wait(20)
        return Reply(200, TEXT, b"slow\n")


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.go_on.set()


@pytest.fixture
def server(site: Site) -> Iterator[HttpServer]:
    server = HttpServer("127.0.0.1:0", site)
    server.start()
    yield server
    server.stop()


def connect(server: HttpServer, source: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 10.0, source_address=(source, 0))


def get(server: HttpServer, path: str, source: str = HONEST) -> tuple[int, bytes]:
    client = http.client.HTTPConnection("127.0.0.1", server.port, 10.0, source_address=(source, 0))
    with contextlib.closing(client):
        client.request("GET", path)
        answer = client.getresponse()
        return answer.status, answer.read()


def until(condition: object, within_s: float = 10.0) -> None:
    end = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.005)


def test_one_connection_serves_several_requests(server: HttpServer) -> None:
    client = http.client.HTTPConnection("127.0.0.1", server.port, 10.0)
    with contextlib.closing(client):
        for method, path, size in (("GET", "/page", len(PAGE)), ("HEAD", "/page", 0), ("GET", "/-/healthy", 8)):
            client.request(method, path)
            answer = client.getresponse()
            assert len(answer.read()) == size
            assert answer.headers["Connection"] == "keep-alive"


def test_requests_in_one_packet_are_answered_in_order(server: HttpServer) -> None:
    with connect(server, HONEST) as client:
        client.sendall(b"GET /page HTTP/1.1\r\n\r\nGET /-/healthy HTTP/1.1\r\nConnection: close\r\n\r\n")
        whole = b"".join(iter(lambda: client.recv(1 << 20), b""))
    assert whole.count(b"HTTP/1.1 200 OK") == 2
    assert whole.endswith(b"\r\n\r\nhealthy\n")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /page HTTP/1.1\r\nContent-Length: 20\r\n\r\nGET /page HTTP/1.1\r\n", 413),
        (b"PUT /page HTTP/1.1\r\n\r\n", 405),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 20_000 + b"\r\n\r\n", 431),
    ],
)
def test_a_refused_request_gets_one_reply_and_its_connection_is_closed(
    server: HttpServer, request_: bytes, status: int
) -> None:
    with connect(server, HONEST) as client:
        client.sendall(request_)
        whole = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := client.recv(65536):
                whole += chunk
    assert whole.startswith(b"HTTP/1.1 %d " % status)
    assert whole.count(b"HTTP/1.1 ") == 1


def test_an_internal_error_is_reported_without_its_text(server: HttpServer) -> None:
    assert get(server, "/fault") == (500, b"internal error: see the log of the exporter\n")


def test_probes_and_scrapes_are_answered_during_an_attack(server: HttpServer) -> None:
    """64 clients request large pages and read nothing, 24 send nothing, 8 send half a head. All of them reconnect."""
    stop = threading.Event()
    kinds = [b"GET /page HTTP/1.1\r\n\r\n" * 50] * 64 + [b""] * 24 + [b"GET /page HT"] * 8

    def attack(sent: bytes) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError), connect(server, HOSTILE) as client:
                client.settimeout(0.2)
                client.sendall(sent)
                stop.wait(0.5)

    attackers = [threading.Thread(target=attack, args=(sent,)) for sent in kinds]
    for attacker in attackers:
        attacker.start()
    time.sleep(0.3)  # the attack has begun; the measurements below would also hold before it
    probes: list[float] = []
    scrapes: list[int] = []

    def scrape() -> None:
        scrapes.append(len(get(server, "/page")[1]))

    clients = [threading.Thread(target=scrape) for _ in range(50)]
    for client in clients:
        client.start()
    for _ in range(20):
        began = time.monotonic()
        assert get(server, "/-/healthy", PROBE) == (200, b"healthy\n")
        probes.append(time.monotonic() - began)
    for client in clients:
        client.join()
    stop.set()
    for attacker in attackers:
        attacker.join()
    assert scrapes == [len(PAGE)] * 50
    assert sorted(probes)[len(probes) // 2] < 0.5


@pytest.mark.parametrize("late", [1, 40])
def test_clients_that_connect_while_the_server_stops_are_closed(site: Site, late: int) -> None:
    """The loop sees the new clients and the stop in the same iteration."""
    busy, go_on, called = threading.Event(), threading.Event(), threading.Event()

    def hold(request: Request) -> Reply:
        busy.set()
        assert go_on.wait(10.0)
        return Reply(200, TEXT, b"")

    site.answer_at_once = hold  # type: ignore[method-assign]
    server = HttpServer("127.0.0.1:0", site)
    server.start()
    with contextlib.ExitStack() as stack, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        stack.enter_context(connect(server, HONEST)).sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert busy.wait(10.0)
        clients = [stack.enter_context(connect(server, HONEST)) for _ in range(late)]
        own = server._end
        server._end = lambda: [own(), called.set()]  # type: ignore[assignment, return-value, func-returns-value]
        ending = threading.Thread(target=server.stop)
        ending.start()
        assert called.wait(10.0)
        go_on.set()
        ending.join()
        for client in clients:
            client.settimeout(10.0)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
        gc.collect()
        assert [str(each.message) for each in seen if "unclosed" in str(each.message)] == []


def test_without_file_descriptors_the_server_waits_and_then_answers(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger=web.log.name)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(contextlib.closing(socket.socket()))
        client.settimeout(10.0)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, most[1]))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(client.fileno()))
        client.connect(("127.0.0.1", server.port))
        until(lambda: len(caplog.records) >= 3)
        time.sleep(0.2)  # a server that spins would log more here
        assert len(caplog.records) < 60
        assert "Too many open files" in caplog.text
    with contextlib.closing(connect(server, HONEST)) as late:
        late.sendall(b"GET /-/healthy HTTP/1.1\r\n\r\n")
        assert late.recv(65536).endswith(b"healthy\n")


def test_requests_get_503_if_all_workers_are_busy_and_the_queue_is_full(server: HttpServer, site: Site) -> None:
    answers: list[int] = []
    askers = [
        threading.Thread(target=lambda i=i: answers.append(get(server, "/slow", f"127.0.0.{10 + i % 4}")[0]))
        for i in range(web.WAITING_MAX + 5)
    ]
    for asker in askers:
        asker.start()
    until(lambda: answers.count(503) == 5)
    assert get(server, "/-/healthy", HONEST) == (200, b"healthy\n")
    site.go_on.set()
    for asker in askers:
        asker.join()
    assert (answers.count(200), answers.count(503)) == (web.WAITING_MAX, 5)


def test_at_the_limit_of_an_address_its_oldest_idle_connection_is_closed(server: HttpServer) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(server, HOSTILE)) for _ in range(crowd.ADDRESS_MAX + 3)]
        for client in clients[:3]:
            client.settimeout(10.0)
            with contextlib.suppress(ConnectionResetError):
                assert client.recv(1) == b""
        for client in clients[3:]:
            client.sendall(b"GET /-/healthy HTTP/1.1\r\n\r\n")
            assert client.recv(65536).endswith(b"healthy\n")


def test_if_no_connection_may_be_closed_a_new_one_gets_only_probes(server: HttpServer, site: Site) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(server, HOSTILE)) for _ in range(crowd.ADDRESS_MAX)]
        for client in clients:
            client.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        until(lambda: site.asked == web.WORKERS)
        time.sleep(0.1)  # the other requests arrive too
        assert get(server, "/slow", HOSTILE)[0] == 503
        assert get(server, "/-/healthy", HOSTILE) == (200, b"healthy\n")
        site.go_on.set()
        for client in clients:
            assert b"slow\n" in client.recv(65536)


@pytest.mark.parametrize(
    ("limit", "sent"),
    [
        ("HEAD_S", b"GET / HT"),
        ("IDLE_S", b""),
        ("IDLE_S", b"GET /-/healthy HTTP/1.1\r\n\r\n"),
        ("WRITE_S", b"GET /page HTTP/1.1\r\n\r\n" * 30),
    ],
)
def test_no_client_is_waited_for_beyond_the_limit(
    site: Site, monkeypatch: pytest.MonkeyPatch, limit: str, sent: bytes
) -> None:
    monkeypatch.setattr(web, limit, 0.2)
    server = HttpServer("127.0.0.1:0", site)
    server.start()
    try:
        with connect(server, HOSTILE) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.sendall(sent)
            time.sleep(0.6 if limit == "WRITE_S" else 0.0)  # this client does not read
            began = time.monotonic()
            with contextlib.suppress(ConnectionResetError):
                while client.recv(1 << 20):
                    pass
            assert time.monotonic() - began < 5.0
    finally:
        server.stop()


def test_stopping_the_server_waits_for_no_client(site: Site) -> None:
    server = HttpServer("127.0.0.1:0", site)
    server.start()
    with connect(server, HOSTILE) as idle, connect(server, HOSTILE) as greedy:
        greedy.sendall(b"GET /page HTTP/1.1\r\n\r\n" * 50)
        until(lambda: greedy.recv(1))
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 2.0
        with contextlib.suppress(ConnectionResetError):
            assert idle.recv(1) == b""


def test_a_unix_socket_is_served_too_and_removed_with_the_server(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    server = HttpServer("127.0.0.1:0", site, path, 0o600)
    server.start()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"GET /-/healthy HTTP/1.0\r\n\r\n")
        assert b"".join(iter(lambda: client.recv(4096), b"")).endswith(b"healthy\n")
    server.stop()
    assert not path.exists()


def test_an_address_in_use_is_named(server: HttpServer, site: Site) -> None:
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{server.port}: Address already in use"):
        HttpServer(f"127.0.0.1:{server.port}", site)


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
                client.settimeout(5.0)
                with contextlib.suppress(ConnectionResetError):
                    assert client.recv(1) == b""
            with context.wrap_socket(connect(server, PROBE), server_hostname="localhost") as probe:
                probe.sendall(b"GET /-/healthy HTTP/1.1\r\nConnection: close\r\n\r\n")
                assert b"".join(iter(lambda: probe.recv(4096), b"")).endswith(b"healthy\n")
    finally:
        server.stop()


class Door:
    """A server with a password, and requests to it."""

    def __init__(self, site: Site, directory: Path, rounds: int = 9) -> None:
        config = directory / "web.yaml"
        hashed = bcrypt.hashpw(b"right", bcrypt.gensalt(rounds)).decode()
        config.write_text(f"basic_auth_users: {{ada: {hashed}}}\n")
        self.server = HttpServer("127.0.0.1:0", site, web_config=config)
        self.server.start()

    def ask(self, password: str, source: str) -> int:
        client = http.client.HTTPConnection("127.0.0.1", self.server.port, 20.0, source_address=(source, 0))
        with contextlib.closing(client):
            word = base64.b64encode(f"ada:{password}".encode()).decode()
            client.request("HEAD", "/page", headers={"Authorization": f"Basic {word}"})
            return client.getresponse().status


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


def test_wrong_passwords_of_one_address_do_not_delay_other_addresses(knocking: tuple[Door, list[int]]) -> None:
    door, answers = knocking
    assert door.ask("right", HONEST) == 200
    assert set(answers) <= {401, 429}


def test_a_client_that_shares_the_address_of_an_attacker_is_admitted(
    knocking: tuple[Door, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_keeper, "DELAY_MAX_S", 0.1)
    door, _ = knocking
    until(lambda: door.ask("right", HOSTILE) == 200, 30.0)
    began = time.monotonic()
    assert door.ask("right", HOSTILE) == 200
    assert time.monotonic() - began < 1.0, "its password is remembered from now on"


def test_a_wrong_password_is_not_checked_again(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[bytes] = []
    check = bcrypt.checkpw
    monkeypatch.setattr(bcrypt, "checkpw", lambda word, hashed: checked.append(word) or check(word, hashed))
    door = Door(site, tmp_path)
    try:
        checked.clear()
        assert [door.ask("wrong", HOSTILE) for _ in range(5)] == [401] * 5
        assert [door.ask("right", HONEST) for _ in range(5)] == [200] * 5
        assert checked == [b"wrong", b"right"]
    finally:
        door.server.stop()


def test_password_checks_use_a_limited_share_of_a_core(site: Site, tmp_path: Path) -> None:
    """From forty addresses at once, none of which has sent a wrong password before."""
    door = Door(site, tmp_path, rounds=10)
    spent: list[float] = []
    real = door_keeper._check

    def measured(entry: door_keeper._Waiting) -> tuple[bool | None, float]:
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
    assert len(spent) > 10
    assert sum(spent) <= door_keeper.BURST_S + door_keeper.SHARE * took_s + one


def test_clients_that_read_no_reply_are_closed_for_new_ones(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the limit for writing is over: all connections of the address are stalled, and a new one gets full service."""
    monkeypatch.setattr(crowd, "STALLED_S", 0.1)
    made: list[crowd.Connection] = []
    begin = crowd.Connection.__init__
    monkeypatch.setattr(crowd.Connection, "__init__", lambda self, *given: (made.append(self), begin(self, *given))[1])
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
    begin, made = crowd.Connection.__init__, list[crowd.Connection]()

    def begin_small(self: crowd.Connection, client: socket.socket, address: str) -> None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the kernel's default buffer would take all of it
        begin(self, client, address)
        made.append(self)

    monkeypatch.setattr(crowd.Connection, "__init__", begin_small)
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
            client.settimeout(5.0)
            client.sendall(b"GET /-/healthy HTTP/1.1\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
            assert server.is_open()
            more = "client_ca_file: ca.crt, client_auth_type: RequireAndVerifyClientCert"
            config.write_text(f"tls_server_config: {{{files}, {more}}}\n")
            until(lambda: not server.is_open())
            for each in (client, silent):
                each.settimeout(5.0)
                with contextlib.suppress(OSError):
                    each.sendall(b"GET /page HTTP/1.1\r\n\r\n")
                    assert each.recv(4096) == b""
    finally:
        server.stop()
