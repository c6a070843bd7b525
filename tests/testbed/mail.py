"""A mail relay on a socket, as far as a client needs one (RFC 5321): it keeps what it accepts."""

from __future__ import annotations

import socketserver
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Accepted(NamedTuple):
    """A mail, with its envelope, and whether it came over TLS."""

    sender: str
    receivers: tuple[str, ...]
    text: bytes
    is_secret: bool


class Relay:
    """The relay: `port` on the loopback, `accepted` mails. `refused`: receivers that it does not know."""

    def __init__(self, context: ssl.SSLContext | None, refused: frozenset[str]) -> None:
        self.accepted: list[Accepted] = []
        self.context, self.refused, self.port = context, refused, 0


class _Session(socketserver.StreamRequestHandler):
    relay: Relay

    def handle(self) -> None:
        is_secret, sender, receivers = False, "", list[str]()
        self._say("220 relay")
        while line := self.rfile.readline():
            verb, _, rest = line.decode("ascii").strip().partition(" ")
            address = rest.partition("<")[2].partition(">")[0]
            match verb.upper():
                case "EHLO":
                    tls = self.relay.context is not None and not is_secret
                    self._say(*(["250-relay", "250 STARTTLS"] if tls else ["250 relay"]))
                case "STARTTLS" if self.relay.context is not None:
                    self._say("220 go ahead")
                    self.connection = self.relay.context.wrap_socket(self.connection, server_side=True)
                    self.rfile, self.wfile = self.connection.makefile("rb"), self.connection.makefile("wb")
                    is_secret = True
                case "MAIL":
                    sender, receivers = address, []
                    self._say("250 ok")
                case "RCPT":
                    is_known = address not in self.relay.refused
                    receivers += [address] * is_known
                    self._say("250 ok" if is_known else "550 no such user")
                case "DATA":
                    self._say("354 go ahead")
                    lines = [line.removeprefix(b".") for line in iter(self.rfile.readline, b".\r\n")]
                    self.relay.accepted.append(Accepted(sender, tuple(receivers), b"".join(lines), is_secret))
                    self._say("250 ok")
                case "QUIT":
                    self._say("221 bye")
                    return
                case _:
                    self._say("250 ok")

    def finish(self) -> None:
        super().finish()
        self.connection.close()  # also that of TLS, which the server does not know

    def _say(self, *lines: str) -> None:
        self.wfile.write("".join(f"{line}\r\n" for line in lines).encode())
        self.wfile.flush()


@contextmanager
def start_relay(context: ssl.SSLContext | None = None, refused: frozenset[str] = frozenset()) -> Iterator[Relay]:
    """Start a relay on the loopback. `context`: offers STARTTLS."""
    relay = Relay(context, refused)
    handler = type("Session", (_Session,), {"relay": relay})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        relay.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield relay
        finally:
            server.shutdown()
            thread.join()
