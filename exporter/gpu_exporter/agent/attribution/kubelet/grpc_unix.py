"""Makes one unary gRPC call over a unix socket, with the package h2 for HTTP/2.

grpcio costs 21 MiB of resident memory in every node agent, h2 costs 5 MiB (docs/decisions/0002). Each call opens a new
connection, because a kubelet restart replaces the socket. A call takes 0.67 ms, on an open connection 0.49 ms.
Protocol: github.com/grpc/grpc, doc/PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import socket
import time
import urllib.parse

import h2.config
import h2.connection
import h2.events
import h2.exceptions

from gpu_exporter.common.errors import ForeignError
from gpu_exporter.common.outside import whole

MAX_ANSWER = 4 * 1024 * 1024  # the default limit of gRPC's own clients; a node with 250 pods answers about 100 KiB


class CallError(ForeignError):
    """The call failed. `status`: the gRPC status code, -1 for a failure below gRPC (socket, HTTP/2, timeout)."""

    def __init__(self, text: str, status: int = -1) -> None:
        super().__init__(text)
        self.status = status


def call(path: str, method: str, request: bytes, timeout_s: float) -> bytes:
    """Calls `method` ("/package.Service/Method") on the socket at `path`. Returns the reply. Raises CallError."""
    deadline = time.monotonic() + timeout_s
    connection = h2.connection.H2Connection(config=h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.settimeout(timeout_s)
            stream.connect(path)
            connection.initiate_connection()
            connection.increment_flow_control_window(MAX_ANSWER)
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
            return _receive(stream, connection, deadline)
    except (OSError, h2.exceptions.H2Error, ValueError) as exc:  # ValueError: headers that are not UTF-8
        raise CallError(f"{path}: {exc}") from exc


def _receive(stream: socket.socket, connection: h2.connection.H2Connection, deadline: float) -> bytes:
    body = bytearray()
    headers: dict[str, str] = {}
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
                body += event.data
                if len(body) > MAX_ANSWER:
                    raise CallError(f"the answer is larger than {MAX_ANSWER} bytes")
                connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                return _unwrap(bytes(body), headers)
            elif isinstance(event, (h2.events.StreamReset, h2.events.ConnectionTerminated)):
                raise CallError(f"server ended the stream with HTTP/2 error {event.error_code}")
        stream.sendall(connection.data_to_send())


def _unwrap(body: bytes, headers: dict[str, str]) -> bytes:
    if headers.get(":status") != "200":
        raise CallError(f"HTTP status {headers.get(':status')}")
    status = headers.get("grpc-status", "")
    if status != "0":
        message = urllib.parse.unquote(headers.get("grpc-message", ""))
        raise CallError(
            f"gRPC status {status or 'missing'}: {message}", -1 if (code := whole(status)) is None else code
        )
    if len(body) < 5 or body[0] != 0 or int.from_bytes(body[1:5], "big") != len(body) - 5:
        raise CallError("the answer is not a single uncompressed gRPC message")
    return body[5:]
