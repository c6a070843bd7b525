"""The HTTP server among honest clients, over real sockets."""

from __future__ import annotations

import contextlib
import gc
import http.client
import os
import resource
import socket
import threading
import time
import warnings
from pathlib import Path

import pytest
from tests.testbed.processes import PROMPT_S, converse
from tests.unit.web.server_bench import HONEST, HOSTILE, PAGE, Site, connect, get, note_connections, until

from gpu_exporter.common.web import crowd
from gpu_exporter.common.web import server as web
from gpu_exporter.common.web.request import Request
from gpu_exporter.common.web.server import TEXT, HttpServer, Reply


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


def test_an_internal_error_is_reported_without_its_text(server: HttpServer) -> None:
    assert get(server, "/fault") == (500, b"internal error: see the log of the exporter\n")


@pytest.mark.parametrize("late", [1, 40])
def test_clients_that_connect_while_the_server_stops_are_closed(site: Site, late: int) -> None:
    """The loop sees the new clients and the stop in the same iteration."""
    busy, go_on, called = threading.Event(), threading.Event(), threading.Event()

    def hold(request: Request) -> Reply:
        busy.set()
        assert go_on.wait(60.0)
        return Reply(200, TEXT, b"")

    site.answer_at_once = hold  # type: ignore[method-assign]
    server = HttpServer("127.0.0.1:0", site)
    server.start()
    with contextlib.ExitStack() as stack, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        stack.enter_context(connect(server, HONEST)).sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert busy.wait(60.0)
        clients = [stack.enter_context(connect(server, HONEST)) for _ in range(late)]
        own = server._end
        server._end = lambda: [own(), called.set()]  # type: ignore[assignment, return-value, func-returns-value]
        ending = threading.Thread(target=server.stop)
        ending.start()
        assert called.wait(60.0)
        go_on.set()
        ending.join()
        for client in clients:
            client.settimeout(60.0)
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
        client.settimeout(60.0)
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, most[1]))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(client.fileno()))
        client.connect(("127.0.0.1", server.port))
        until(lambda: len(caplog.records) >= 3)
        began, before = time.monotonic(), len(caplog.records)
        time.sleep(0.2)  # a server that spins would log more here
        more, passed_s = len(caplog.records) - before, time.monotonic() - began
        assert more <= 2 * (passed_s / web.ACCEPT_AGAIN_S + 1)
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
            client.settimeout(60.0)
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
        until(lambda: server._tcp._asked == len(clients))  # type: ignore[union-attr]
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
    made = note_connections(monkeypatch)
    server = HttpServer("127.0.0.1:0", site)
    server.start()
    try:
        with connect(server, HOSTILE) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            began = time.monotonic()
            if limit == "WRITE_S":
                client.sendall(sent)
                until(lambda: [each.client.fileno() for each in made] == [-1])  # this client does not read
            converse(client, sent if limit != "WRITE_S" else b"")
            assert time.monotonic() - began < PROMPT_S
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
        assert time.monotonic() - began < PROMPT_S
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
