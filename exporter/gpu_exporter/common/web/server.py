"""The HTTP server. One thread serves all connections; a few workers render pages that are not ready.

No client can block the others. Every step has a time limit, and every address a limit of connections and of CPU time.
Above the limit of connections, the oldest waiting or stalled connection is closed. The event loop's thread never
blocks, so it always answers probes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple, Protocol

from gpu_exporter.common.service import repeat
from gpu_exporter.common.tasks import Task
from gpu_exporter.common.threads import start
from gpu_exporter.common.web.budget import BYTES_PER_S, CONNECTION_S, HANDSHAKE_S, REQUEST_S, CpuBudget, measure
from gpu_exporter.common.web.crowd import Connection, Crowd
from gpu_exporter.common.web.door import Doorkeeper
from gpu_exporter.common.web.listen import listen_tcp, listen_unix
from gpu_exporter.common.web.request import HEAD_MAX, BadRequest, Request, parse_head
from gpu_exporter.common.web.secure import Security, WebConfig

log = logging.getLogger(__name__)
WORKERS = 4  # threads that render bodies; they share the rendered bodies
WAITING_MAX = 64  # requests that wait for a worker; further ones get 503
HEAD_S = 10.0  # from the first byte of a request to the end of its head, and for a TLS handshake
IDLE_S = 75.0  # without a request on an open connection: longer than the time between two scrapes
WRITE_S = 10.0  # for a whole reply
END_S = 0.3  # for connections that end with the server
PROBES = ("/-/healthy", "/-/ready")  # without a password, because kubelets have none; probes show nothing about GPUs
ACCEPT_AGAIN_S = (
    0.01  # pause after an accept that failed because no descriptor was left; a connection was closed for it
)
RELOAD_S = 5.0  # between two looks for new certificates and passwords
RELOAD_LATE_S = 60.0  # without a look: the disk of the files hangs
CHUNK = 64 * 1024
TEXT = "text/plain; charset=utf-8"
# For browsers: they must not guess another content type, no other page may frame or read a reply, and the status page
# loads nothing from other servers.
HEADERS = (
    "X-Content-Type-Options: nosniff",
    "X-Frame-Options: DENY",
    "Cross-Origin-Resource-Policy: same-origin",
    "Referrer-Policy: no-referrer",
    "Content-Security-Policy: default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
)


class Reply(NamedTuple):
    status: int
    content_type: str
    body: bytes
    is_zipped: bool = False


UNAUTHORIZED = Reply(401, TEXT, b"user and password are required\n")
TOO_MUCH = Reply(429, TEXT, b"this address used too much CPU time of the exporter; retry in a second\n")
TOO_MANY = Reply(429, TEXT, b"too many passwords to check; retry in a few seconds\n")
BUSY = Reply(503, TEXT, b"too many requests; retry in a second\n")


class Site(Protocol):
    """The pages of a port."""

    def answer_at_once(self, request: Request) -> Reply | None:
        """Returns a reply that needs no time (probes, errors, ready pages), else None. Runs in the event loop."""

    def answer(self, request: Request) -> Reply:
        """Returns the reply. Called in a worker. Any exception becomes status 500."""


class _Listener:
    """The connections of one listening socket. Used only in the event loop's thread."""

    def __init__(
        self,
        listener: socket.socket,
        site: Site,
        workers: ThreadPoolExecutor,
        security: Security | None,
        doorkeeper: Doorkeeper,
    ) -> None:
        self.security = security
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._again: asyncio.TimerHandle | None = None
        self._site = site
        self._doorkeeper = doorkeeper
        self._workers = workers
        self._asked = 0  # requests that workers answer now or have to answer
        self._crowd = Crowd()
        self._budget = CpuBudget()

    def begin(self) -> None:
        """Accepts connections until `end`. A callback does this, because cancelling a task could lose a connection."""
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accepts the next connection, and counts it before its handshake, which a client may never complete."""
        try:
            client, peer = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as exc:
            log.debug("cannot accept a connection: %s", exc)
            self._crowd.give_way(self._crowd.all())
            self._loop.remove_reader(self._listener)
            self._again = self._loop.call_later(ACCEPT_AGAIN_S, self.begin)
            return
        client.setblocking(False)
        connection = Connection(client, peer[0] if isinstance(peer, tuple) else "local")
        has_tls = self.security is not None and self.security.context is not None
        only_probes = not self._crowd.take(connection, has_tls=has_tls)
        connection.task = asyncio.create_task(self._serve(connection, only_probes))

    async def _serve(self, connection: Connection, only_probes: bool) -> None:
        """Serves one connection until it ends."""
        loop = asyncio.get_running_loop()
        context = self.security.context if self.security is not None else None
        reader = asyncio.StreamReader(limit=HEAD_MAX, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        try:
            owns_socket = True
            await self._budget.pace(connection.address, HANDSHAKE_S if context is not None else CONNECTION_S)
            if context is not None:
                await asyncio.wait_for(_readable(connection.client), HEAD_S)  # a silent client costs only a socket
                if not self._crowd.begin_to_shake(connection):
                    return
            owns_socket = False  # from here on asyncio closes the socket
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol, connection.client, ssl=context, ssl_handshake_timeout=HEAD_S if context else None
            )
            connection.is_shaking = False
            connection.writer = asyncio.StreamWriter(transport, protocol, reader, loop)
            transport.set_write_buffer_limits(high=CHUNK)
            keeps = True
            while keeps:
                keeps = await self._serve_one(reader, connection, only_probes)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as exc:
            log.debug("connection of %s ended: %r", connection.address, exc)
        finally:
            if owns_socket:
                connection.client.close()
            try:
                await self._close(connection)
            finally:
                self._crowd.leave(connection)

    @staticmethod
    async def _close(connection: Connection) -> None:
        """Closes a connection. The connection counts until its socket is closed, because a client may never read the
        rest or acknowledge the end.
        """
        if connection.is_writing or connection.writer is None:
            connection.break_off()  # a slow client does not get the data that it has not read by now
            return
        connection.turn(writing=True)
        connection.writer.close()
        try:
            await asyncio.wait_for(connection.writer.wait_closed(), WRITE_S)
        except (OSError, asyncio.TimeoutError):
            connection.break_off()
        except asyncio.CancelledError:
            connection.break_off()
            raise

    async def _serve_one(self, reader: asyncio.StreamReader, connection: Connection, only_probes: bool) -> bool:
        """Answers one request. Returns whether the connection remains open."""
        connection.turn(waiting=True)
        first = await asyncio.wait_for(reader.read(1), IDLE_S if not only_probes else HEAD_S)
        if not first:
            return False
        try:
            head = first + await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_S)
            request = parse_head(head)
        except asyncio.LimitOverrunError:
            await self._write(connection, Reply(431, TEXT, b"the request head is too long\n"), keeps=False)
            return False
        except BadRequest as exc:
            await self._write(connection, Reply(exc.status, TEXT, f"{exc}\n".encode()), keeps=False)
            return False
        is_over = await self._budget.pace(connection.address, REQUEST_S)  # while it waits, it may be closed for another
        connection.turn()
        # A scrape from an address that it shares with a flood is late, and not lost: its body is rendered once for all.
        if is_over and request.query:
            reply: Reply | None = TOO_MUCH
        else:
            reply = await self._refuse(request, connection) or self._site.answer_at_once(request)
        if reply is None:
            reply = BUSY if only_probes else await self._ask(request, connection.address)
        self._budget.charge(connection.address, len(reply.body) / BYTES_PER_S)
        keeps = request.keeps and not only_probes and not connection.is_old
        await self._write(connection, reply, keeps=keeps, is_head=request.method == "HEAD")
        return keeps and not connection.is_old  # it may have become old meanwhile

    async def _refuse(self, request: Request, connection: Connection) -> Reply | None:
        """The reply to a client without the correct password; None if the client is admitted."""
        security = self.security
        if security is None or not security.wants_password or request.path in PROBES:
            return None
        given = request.headers.get("authorization", "")
        if not given:
            return UNAUTHORIZED
        connection.turn(waiting=True)  # while it waits for the check, it may be closed for another connection
        admitted = await self._doorkeeper.admits(security, given, connection.address)
        connection.turn()
        if admitted is None:
            return TOO_MANY
        return None if admitted else UNAUTHORIZED

    async def _ask(self, request: Request, address: str) -> Reply:
        if self._asked >= WAITING_MAX:
            return BUSY
        try:
            answer = asyncio.get_running_loop().run_in_executor(self._workers, measure, self._site.answer, request)
        except RuntimeError as exc:  # the first requests start the workers, and the host may have no thread left
            log.debug("cannot start a worker: %s", exc)
            return BUSY
        self._asked += 1
        try:
            reply, cpu_s = await answer
            self._budget.charge(address, cpu_s)
            return reply
        except Exception:
            log.exception("cannot answer %s", request.path)
            return Reply(500, TEXT, b"internal error: see the log of the exporter\n")
        finally:
            self._asked -= 1

    @staticmethod
    async def _write(connection: Connection, reply: Reply, *, keeps: bool, is_head: bool = False) -> None:
        writer = connection.writer
        assert writer is not None
        connection.turn(writing=True)
        body = memoryview(b"" if is_head else reply.body)

        async def write() -> None:
            writer.write(_head_of(reply, keeps=keeps) + bytes(body[:CHUNK]))
            for at in range(CHUNK, len(body), CHUNK):
                await writer.drain()
                writer.write(body[at : at + CHUNK])
            await writer.drain()

        await asyncio.wait_for(write(), WRITE_S)
        connection.is_writing = False

    def renew(self, security: Security) -> None:
        """Uses new certificates and passwords. Closes waiting connections now, others after their reply."""
        self.security = security
        for connection in self._crowd.all():
            connection.is_old = True
            if connection.is_waiting:
                connection.break_off()

    def end(self) -> None:
        """Accepts no more connections, and closes the existing ones."""
        self._loop.remove_reader(self._listener)
        if self._again is not None:
            self._again.cancel()
        for connection in self._crowd.all():
            connection.break_off()


async def _readable(client: socket.socket) -> None:
    """Waits for the first byte or the end of a connection."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def note() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(client, note)
    try:
        await readable
    finally:
        loop.remove_reader(client)


def _head_of(reply: Reply, *, keeps: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}",
        f"Content-Type: {reply.content_type}",
        f"Content-Length: {len(reply.body)}",
        f"Connection: {'keep-alive' if keeps else 'close'}",
        *HEADERS,
    ]
    lines += ["Content-Encoding: gzip", "Vary: Accept-Encoding"] if reply.is_zipped else []
    lines += ["Retry-After: 1"] if reply.status in (429, 503) else []
    lines += ['WWW-Authenticate: Basic realm="gpu-exporter"'] if reply.status == 401 else []
    return "\r\n".join([*lines, "", ""]).encode()


class HttpServer:
    """Serves one TCP address. Also serves a unix socket for `--once` if there is a state directory."""

    def __init__(
        self,
        address: str,
        site: Site,
        socket_path: Path | None = None,
        socket_mode: int = 0o660,
        web_config: Path | None = None,
    ) -> None:
        """Binds the sockets. `web_config`: TLS and passwords of the TCP port. The unix socket is protected by its file
        mode.

        Raises ValueError (address, WebConfigError), OSError (in use, not permitted).
        """
        self._config = WebConfig(web_config) if web_config is not None else None
        self._doorkeeper = Doorkeeper()
        self._reloading, self._over = Task("web-config", RELOAD_LATE_S), threading.Event()
        self.tasks = (self._reloading, self._doorkeeper.task) if self._config is not None else ()
        self._listeners = [listen_tcp(address)]
        self.port = int(self._listeners[0].getsockname()[1])
        self._socket_path = socket_path
        if socket_path is not None:
            self._listeners.append(listen_unix(socket_path, socket_mode))
        for listener in self._listeners:
            listener.setblocking(False)
        self._site = site
        self._tcp: _Listener | None = None
        self._end: Callable[[], None] = lambda: None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="http", daemon=True)

    async def _run(self) -> None:
        self._loop = loop = asyncio.get_running_loop()
        stop = asyncio.Event()

        def end() -> None:
            loop.call_soon_threadsafe(stop.set)

        self._end = end
        workers = ThreadPoolExecutor(WORKERS, "http-worker")
        workers.submit(int)  # starts one worker now, because the host may have no thread left later
        parts = [
            _Listener(listener, self._site, workers, security, self._doorkeeper)
            for listener, security in zip(self._listeners, (self._security(), None), strict=False)
        ]
        self._tcp = parts[0]
        for part in parts:
            part.begin()
        self._begun.set()
        await stop.wait()
        for part in parts:
            part.end()
        self._doorkeeper.close()
        workers.shutdown(wait=False, cancel_futures=True)
        ending = asyncio.all_tasks() - {asyncio.current_task()}
        if ending:
            await asyncio.wait(ending, timeout=END_S)

    def _reload(self) -> None:
        """Reads the certificates and passwords again, and uses them if they have changed."""
        assert self._config is not None and self._tcp is not None
        if self._config.turn():
            with contextlib.suppress(RuntimeError):  # the loop has already ended
                self._loop.call_soon_threadsafe(self._tcp.renew, self._config.security)

    def _security(self) -> Security | None:
        return self._config.security if self._config is not None else None

    def is_open(self) -> bool:
        """Returns whether the TCP port needs neither a password nor a client certificate, by the settings in use."""
        security = self._tcp.security if self._tcp is not None else self._security()
        return security is None or security.is_open

    def uses_web_config(self) -> bool | None:
        """Returns whether the TCP port uses all settings of its web configuration file; None without a file."""
        return not self._config.problem if self._config is not None else None

    def start(self) -> None:
        start(self._thread)
        self._begun.wait()
        if self._config is not None:
            args = (self._reload, RELOAD_S, self._over, self._reloading)
            start(threading.Thread(target=repeat, args=args, name=self._reloading.name, daemon=True))

    def stop(self) -> None:
        """Closes every connection. A blocked worker ends with the process."""
        self._over.set()
        with contextlib.suppress(RuntimeError):  # the loop has already ended
            self._end()
        if self._thread.is_alive():
            self._thread.join(2 * END_S)
        for listener in self._listeners:
            listener.close()
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)
