"""What the tests of this subject share: the HTTP server among honest clients, over real sockets."""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import threading
import time
from pathlib import Path

import bcrypt
import pytest

from gpu_exporter.common.web import crowd
from gpu_exporter.common.web import server as web
from gpu_exporter.common.web.request import Request
from gpu_exporter.common.web.server import TEXT, HttpServer, Reply

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
        self.go_on.wait(60.0)
        return Reply(200, TEXT, b"slow\n")


def note_connections(monkeypatch: pytest.MonkeyPatch) -> list[crowd.Connection]:
    """A list to which every connection is added that a server accepts from now on."""
    made: list[crowd.Connection] = []

    class Noted(crowd.Connection):
        def __init__(self, client: socket.socket, address: str) -> None:
            super().__init__(client, address)
            made.append(self)

    # Not crowd.Connection.__init__: a function that is replaced while the server's thread is inside it ends CPython 3.11.
    monkeypatch.setattr(web, "Connection", Noted)
    return made


def connect(server: HttpServer, source: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 60.0, source_address=(source, 0))


def get(server: HttpServer, path: str, source: str = HONEST) -> tuple[int, bytes]:
    client = http.client.HTTPConnection("127.0.0.1", server.port, 60.0, source_address=(source, 0))
    with contextlib.closing(client):
        client.request("GET", path)
        answer = client.getresponse()
        return answer.status, answer.read()


def until(condition: object, within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.005)


class Door:
    """A server with a password, and requests to it."""

    def __init__(self, site: Site, directory: Path, rounds: int = 9) -> None:
        config = directory / "web.yaml"
        hashed = bcrypt.hashpw(b"right", bcrypt.gensalt(rounds)).decode()
        config.write_text(f"basic_auth_users: {{ada: {hashed}}}\n")
        self.server = HttpServer("127.0.0.1:0", site, web_config=config)
        self.server.start()

    def ask(self, password: str, source: str) -> int:
        client = http.client.HTTPConnection("127.0.0.1", self.server.port, 60.0, source_address=(source, 0))
        with contextlib.closing(client):
            word = base64.b64encode(f"ada:{password}".encode()).decode()
            client.request("HEAD", "/page", headers={"Authorization": f"Basic {word}"})
            return client.getresponse().status
