"""Makes one unary gRPC call over a unix socket, with the package h2 for HTTP/2.

grpcio costs 21 MiB of resident memory in every node agent, h2 costs 5 MiB (docs/decisions/0002). Each call opens a new
connection, because a kubelet restart replaces the socket. A call takes 0.67 ms, on an open connection 0.49 ms.
Protocol: github.com/grpc/grpc, doc/PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import itertools
import socket
import time
import urllib.parse
from collections.abc import Iterator, Mapping

import h2.config
import h2.connection
import h2.events
import h2.exceptions

from gpu_exporter.common.errors import ForeignError
from gpu_exporter.common.outside import whole

# Twice the limit of the kubelet's own clients. A node with 250 pods answers about 100 KiB, one that offers 8 resources
# with 16,384 replicas each about 10 MiB. The answer is read in chunks, so its size takes time and no memory.
MAX_ANSWER = 32 * 1024 * 1024
PREFIX = 5  # bytes before a gRPC message: one for the compression, four for the length


class CallError(ForeignError):
    """The call failed. `status`: the gRPC status code, -1 for a failure below gRPC (socket, HTTP/2, timeout)."""

    def __init__(self, text: str, status: int = -1) -> None:
        super().__init__(text)
        self.status = status


class TooLargeError(CallError):
    """The answer has more than MAX_ANSWER bytes."""


def call(path: str, method: str, request: bytes, timeout_s: float) -> Iterator[bytes]:
    """Calls `method` ("/package.Service/Method") on the socket at `path`. Raises CallError.

    Returns the reply in chunks. The reply is complete, and has no error, only if the iterator ends without a CallError.
    """
    chunks = _call(path, method, request, timeout_s)
    return itertools.chain((next(chunks, b""),), chunks)  # a server that cannot be reached fails here


def _call(path: str, method: str, request: bytes, timeout_s: float) -> Iterator[bytes]:
    deadline = time.monotonic() + timeout_s
    connection = h2.connection.H2Connection(config=h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.settimeout(timeout_s)
            stream.connect(path)
            connection.initiate_connection()
            connection.send_headers(
                1,
                [
                    (":method", "POST"),
                    (":scheme", "http"),
                    (":authority", "localhost"),
                    (":path", method),
                    ("te", "trailers"),
                    ("content-type", "application/grpc"),
                    ("grpc-timeout", f"{timeout_s * 1000:.0f}m"),
                ],
            )
            connection.send_data(1, b"\0" + len(request).to_bytes(4, "big") + request, end_stream=True)
            stream.sendall(connection.data_to_send())
            yield from _unwrap(_receive(stream, connection, deadline))
    except (OSError, h2.exceptions.H2Error, ValueError) as exc:  # ValueError: headers that are not UTF-8
        raise CallError(f"{path}: {exc}") from exc


def _receive(stream: socket.socket, connection: h2.connection.H2Connection, deadline: float) -> Iterator[bytes]:
    """Yields the body of the answer in chunks. Raises CallError, also if its status is not OK."""
    headers: dict[str, str] = {}
    size = 0
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise CallError("no answer in time")
        stream.settimeout(left)
        data = stream.recv(65536)
        if not data:
            raise CallError("the server closed the connection before the answer was complete")
        for event in connection.receive_data(data):
            if isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
                headers.update((str(name), str(value)) for name, value in event.headers)
            elif isinstance(event, h2.events.DataReceived):
                size += len(event.data)
                if size > MAX_ANSWER:
                    raise TooLargeError(f"the answer is larger than {MAX_ANSWER} bytes")
                yield event.data
                connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                _check_status(headers)
                return
            elif isinstance(event, (h2.events.StreamReset, h2.events.ConnectionTerminated)):
                raise CallError(f"server ended the stream with HTTP/2 error {event.error_code}")
        stream.sendall(connection.data_to_send())


def _check_status(headers: Mapping[str, str]) -> None:
    if headers.get(":status") != "200":
        raise CallError(f"HTTP status {headers.get(':status')}")
    status = headers.get("grpc-status", "")
    if status != "0":
        message = urllib.parse.unquote(headers.get("grpc-message", ""))
        raise CallError(
            f"gRPC status {status or 'missing'}: {message}", -1 if (code := whole(status)) is None else code
        )


def _unwrap(body: Iterator[bytes]) -> Iterator[bytes]:
    """Yields the gRPC message in a body. Raises CallError at the end unless it is complete, and the only one."""
    prefix = b""
    left = 0  # bytes of the message that have not arrived; below 0: there is more than one message
    for chunk in body:
        missing = PREFIX - len(prefix)
        if missing:
            prefix += chunk[:missing]
            left = int.from_bytes(prefix[1:], "big") if len(prefix) == PREFIX else 0
        rest = chunk[missing:]
        left -= len(rest)
        if rest and left >= 0 and prefix[0] == 0:
            yield rest
    if len(prefix) < PREFIX or prefix[0] != 0 or left:
        raise CallError("the answer is not a single uncompressed gRPC message")
