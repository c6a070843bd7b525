"""HTTP: bodies out, nothing else. At most WORKERS requests at a time; more are told to come back."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import socketserver
import threading
import time
import urllib.parse
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from gpu_exporter.exposition.publisher import CONTENT_TYPES, TABLE_TYPE, Publisher

log = logging.getLogger(__name__)
WORKERS = 8
REQUEST_TIMEOUT_S = 10.0
ANSWER_S = 2.0  # a client that has not taken its answer by then gives way
EVICTION_S = 0.5  # how long a new request waits for the slot of an evicted connection
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
POLL_S = 0.5  # how soon the server notices that it is to end; each look costs, and two servers look


def parse_listen_address(text: str) -> tuple[str, int]:
    """`:9836`, `127.0.0.1:9836` or `[::1]:9836` to host and port. Raises ValueError."""
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not [host]:port")
    return host.strip("[]"), int(port)


def prefers_openmetrics(accept: str) -> bool:
    """Whether an Accept header ranks OpenMetrics above the plain text format."""
    best = {"openmetrics": 0.0, "text": 0.0}
    for entry in accept.split(","):
        media, *parameters = (part.strip() for part in entry.split(";"))
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                with contextlib.suppress(ValueError):
                    quality = float(parameter[2:])
        kind = {"application/openmetrics-text": "openmetrics", "text/plain": "text"}.get(media)
        if kind:
            best[kind] = max(best[kind], quality)
    return best["openmetrics"] > best["text"]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "gpu-exporter"
    sys_version = ""
    timeout = REQUEST_TIMEOUT_S  # of one read; the head as a whole is bounded by eviction when slots run out
    disable_nagle_algorithm = True
    server: _ServerMixin

    def handle_one_request(self) -> None:
        self.server.await_head(self.connection)
        super().handle_one_request()

    def do_GET(self) -> None:  # the base class names it so
        self.server.head_arrived(self.connection)
        path, _, query = self.path.partition("?")
        if path == self.server.telemetry_path:
            form = "openmetrics" if prefers_openmetrics(self.headers.get("Accept", "")) else "prometheus"
            self._send_body(form, frozenset(urllib.parse.parse_qs(query).get("name[]", ())))
        elif path == "/":
            self._send_body("page")
        elif path == "/api/v1/status":
            self._send_body("json")
        elif path == "/api/v1/table":
            self._send_body("table")
        elif path == "/-/healthy":
            self._send(200, TABLE_TYPE, b"gpu-exporter is healthy\n")
        elif path == "/-/ready":
            ready, reason = self.server.readiness()
            self._send(200 if ready else 503, TABLE_TYPE, f"{reason}\n".encode())
        else:
            self._send(404, TABLE_TYPE, f"no such page; try {self.server.telemetry_path}\n".encode())

    do_HEAD = do_GET  # noqa: N815 - the base class names it so

    def _send_body(self, form: str, names: frozenset[str] = frozenset()) -> None:
        zipped = "gzip" in self.headers.get("Accept-Encoding", "")
        body = self.server.publisher.body(form, zipped=zipped, names=names)
        self._send(200, CONTENT_TYPES[form], body, zipped=zipped)

    def _send(self, status: int, content_type: str, body: bytes, *, zipped: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if zipped:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - the base class names it so
        log.debug(format, *arguments)


class _UnixHandler(_Handler):
    disable_nagle_algorithm = False  # there is no TCP to tune


class _ServerMixin(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 32
    handler: type[BaseHTTPRequestHandler] = _Handler

    def __init__(
        self,
        address: Any,
        publisher: Publisher,
        telemetry_path: str,
        readiness: Callable[[], tuple[bool, str]],
    ) -> None:
        self.publisher = publisher
        self.telemetry_path = telemetry_path
        self.readiness = readiness
        self._slots = threading.BoundedSemaphore(WORKERS)
        self._waiting: dict[socket.socket, None] = {}  # connections without a complete request, oldest first
        self._answering: dict[socket.socket, float] = {}  # connections that are being answered, and since when
        super().__init__(address, self.handler)

    def await_head(self, connection: socket.socket) -> None:
        self._answering.pop(connection, None)
        self._waiting.pop(connection, None)
        self._waiting[connection] = None

    def head_arrived(self, connection: socket.socket) -> None:
        self._waiting.pop(connection, None)
        self._answering[connection] = time.monotonic()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Idle and slow connections give way, oldest first, when every slot is taken."""
        if not self._slots.acquire(blocking=False):
            # list(): other threads come and go meanwhile
            slow = [c for c, since in list(self._answering.items()) if time.monotonic() - since > ANSWER_S]
            for oldest in [*list(self._waiting), *slow][:1]:
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            if not self._slots.acquire(timeout=EVICTION_S):
                with contextlib.suppress(OSError):
                    request.sendall(BUSY)
                self.shutdown_request(request)
                return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started: the slot must not go with it
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._waiting.pop(request, None)
            self._answering.pop(request, None)
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("request of %s ended early", client_address, exc_info=True)


class _IPv4Server(_ServerMixin):
    pass


class _IPv6Server(_ServerMixin):
    address_family = socket.AF_INET6

    def server_bind(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # ":9836" is both families
        super().server_bind()


class _UnixServer(_ServerMixin):
    address_family = socket.AF_UNIX
    handler = _UnixHandler

    def get_request(self) -> tuple[Any, Any]:
        request, _ = super().get_request()
        return request, ("local", 0)  # a unix socket's peer has no name, the base class wants one


class HttpServer:
    """Serves on one TCP address, and on a unix socket for `--once` where a state directory is kept."""

    def __init__(
        self,
        address: str,
        publisher: Publisher,
        readiness: Callable[[], tuple[bool, str]],
        telemetry_path: str = "/metrics",
        socket_path: Path | None = None,
        socket_mode: int = 0o660,
    ) -> None:
        """Bind. Raises ValueError (address), OSError (in use, not permitted).

        `socket_mode`: permissions of the unix socket, whatever the umask is. Call it before other threads make files.
        """
        host, port = parse_listen_address(address)
        kind: type[_ServerMixin] = _IPv6Server if ":" in host or (not host and socket.has_ipv6) else _IPv4Server
        try:
            tcp = kind((host, port), publisher, telemetry_path, readiness)
        except OSError as exc:
            if host or kind is _IPv4Server or exc.errno == errno.EADDRINUSE:
                raise OSError(f"cannot listen on {address}: {exc.strerror}") from exc
            tcp = _IPv4Server((host, port), publisher, telemetry_path, readiness)  # no IPv6 on this host
        self._servers: list[_ServerMixin] = [tcp]
        self.port = int(tcp.server_address[1])
        self._socket_path = socket_path
        if socket_path is not None:
            socket_path.unlink(missing_ok=True)
            umask = os.umask(0o777 & ~socket_mode)  # bind() makes it 0777 less the umask: never open for a moment
            try:
                self._servers.append(_UnixServer(str(socket_path), publisher, telemetry_path, readiness))
            finally:
                os.umask(umask)

    def start(self) -> None:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(POLL_S,), name="http", daemon=True).start()

    def stop(self) -> None:
        threads = [threading.Thread(target=server.shutdown, daemon=True) for server in self._servers]
        for thread in threads:
            thread.start()
        for thread, server in zip(threads, self._servers, strict=True):
            thread.join()
            server.server_close()
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)
