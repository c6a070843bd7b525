"""The connections of one port, their limits, and the choice of the connection that gives way to a new one."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import struct
import time
from collections.abc import Iterable, Sequence

CONNECTIONS_MAX = 256
ADDRESS_MAX = 64  # connections of one client address
# With TLS a connection costs 256 KiB in asyncio and some 100 KiB in OpenSSL, so the limits are lower. They are lowest
# for connections that have not completed a TLS handshake.
TLS_CONNECTIONS_MAX = 64
TLS_ADDRESS_MAX = 32
HANDSHAKES_MAX = 16
STALLED_S = 1.0  # seconds; a connection whose client reads no answer for longer may be closed
LINGER_NOT = struct.pack("ii", 1, 0)


class Connection:
    """One client and its current step. At first it may still be in the TLS handshake."""

    def __init__(self, client: socket.socket, address: str) -> None:
        self.client = client
        self.address = address
        self.task: asyncio.Task[None] | None = None  # kept here, because asyncio keeps only weak references to tasks
        self.writer: asyncio.StreamWriter | None = None
        self.since = time.monotonic()
        self.is_shaking = False
        self.is_old = False  # began before certificates or passwords were reloaded
        self.is_waiting = True  # for a handshake, or for a request head
        self.is_writing = False

    def turn(self, *, waiting: bool = False, writing: bool = False) -> None:
        self.is_waiting, self.is_writing, self.since = waiting, writing, time.monotonic()

    def break_off(self) -> None:
        """Closes the connection immediately, and drops data that the kernel has not yet sent (possibly megabytes)."""
        with contextlib.suppress(OSError):
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
        if self.writer is not None:
            self.writer.transport.abort()
        else:  # not handed over yet, or in the handshake: asyncio has the socket, and detects its end
            with contextlib.suppress(OSError):
                self.client.shutdown(socket.SHUT_RDWR)

    def may_give_way(self, now: float) -> bool:
        return self.is_waiting or (self.is_writing and now - self.since > STALLED_S)


class Crowd:
    """The connections of one port. Used only in the event loop's thread."""

    def __init__(self) -> None:
        # The driver, the state and the sources need some of the process's descriptors too.
        self._most = min(CONNECTIONS_MAX, max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        self._connections: dict[Connection, None] = {}  # oldest first

    def all(self) -> list[Connection]:
        return list(self._connections)

    def take(self, newcomer: Connection, *, has_tls: bool) -> bool:
        """Adds a new connection. At a limit, closes the oldest connection that may give way, or returns False."""
        address_max, most = (TLS_ADDRESS_MAX, TLS_CONNECTIONS_MAX) if has_tls else (ADDRESS_MAX, CONNECTIONS_MAX)
        own = [other for other in self._connections if other.address == newcomer.address]
        has_room = True
        if len(own) >= address_max:
            has_room = self.give_way(own)
        elif len(self._connections) >= min(self._most, most):
            has_room = self.give_way(_largest(self._connections))
        self._connections[newcomer] = None
        return has_room

    def leave(self, connection: Connection) -> None:
        self._connections.pop(connection, None)

    def begin_to_shake(self, connection: Connection) -> bool:
        """Returns whether a connection may begin its TLS handshake; False if it was closed meanwhile.

        Above the limit of handshakes, closes the oldest one: a normal handshake takes only milliseconds.
        """
        if connection not in self._connections:
            return False
        shaking = [other for other in self._connections if other.is_shaking]
        if len(shaking) >= HANDSHAKES_MAX:
            self.give_way(_largest(shaking))
        connection.is_shaking = True
        return True

    def give_way(self, crowd: Sequence[Connection]) -> bool:
        """Closes the oldest of these connections that may give way. Returns False if none of them may."""
        now = time.monotonic()
        for other in crowd:
            if other.may_give_way(now):
                self._connections.pop(other, None)
                other.break_off()
                return True
        return False


def _largest(connections: Iterable[Connection]) -> list[Connection]:
    """The connections of the address with the most connections, oldest first."""
    by_address: dict[str, list[Connection]] = {}
    for each in connections:
        by_address.setdefault(each.address, []).append(each)
    return max(by_address.values(), key=len)
