"""A server that answers as Prometheus, exporter, collector, slurmrestd, API server or proxy: rightly, wrongly or hostile."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.testbed.statuses import status_of

RIGHT, REFUSES, REDIRECTS, CLOCK, GARBAGE, BREAKS = MODES = (
    *("right", "401", "redirects", "clock", "garbage", "breaks off"),
)
STATUS = status_of(())
NODE = {"name": "n0", "gres": "gpu:h100:4", "gres_used": "gpu:h100:1(IDX:2)", "slurmd_start_time": 1000}
Raw = Callable[[str], bytes]


class Peer:
    """`mode`: how it answers. `raw`: the bytes of an answer by path, in place of `mode`. `seen`: the values of all
    headers that were sent to it, and the paths with their queries.
    """

    def __init__(self, mode: str = RIGHT, raw: Raw | None = None) -> None:
        self.mode = mode
        self.raw = raw
        self.seen: list[str] = []
        self.place = ""


@contextmanager
def serve(peer: Peer, certificate: tuple[Path, Path] | None = None) -> Iterator[Peer]:
    """Serve on loopback, by TLS with a certificate."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            form = dict(urllib.parse.parse_qsl(self.rfile.read(size).decode()))
            peer.seen += [self.path, *self.headers.values()]
            self.wfile.write(_answer(peer, urllib.parse.urlsplit(self.path).path, form))

        do_POST = do_PATCH = do_CONNECT = do_GET  # noqa: N815

        def log_message(self, format: str, *arguments: Any) -> None:
            return

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None:
            return

    server = Server(("127.0.0.1", 0), Handler)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    peer.place = f"127.0.0.1:{server.server_address[1]}"
    try:
        yield peer
    finally:
        server.shutdown()
        server.server_close()


def _answer(peer: Peer, path: str, form: dict[str, str]) -> bytes:
    if peer.raw is not None:
        return peer.raw(path)
    if peer.mode == REFUSES:
        return plain("401 Unauthorized", "", "WWW-Authenticate: Basic")
    if peer.mode == REDIRECTS:
        return plain("307 Elsewhere", "", "Location: http://127.0.0.2:1/")
    if peer.mode == GARBAGE:
        return plain("200 OK", "<html>")
    if peer.mode == BREAKS:
        return b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"
    if path.endswith("/api/v1/query"):
        return plain(
            "200 OK", json.dumps({"status": "success", "data": {"resultType": "vector", "result": _rows(peer, form)}})
        )
    if path.startswith("/apis/coordination"):
        return plain("200 OK", json.dumps({"metadata": {"annotations": {}}}), "Content-Type: application/json")
    if path.endswith("/api/v1/status"):
        return plain("200 OK", json.dumps(STATUS))
    if path.endswith("/nodes/"):
        return plain("200 OK", json.dumps({"meta": {}, "nodes": [NODE]}))
    if path.endswith("/jobs/"):
        return plain("200 OK", json.dumps({"jobs": []}))
    return plain("200 OK", f"gpu_exporter_last_sample_timestamp_seconds {time.time()}\n")


def _rows(peer: Peer, form: dict[str, str]) -> list[Any]:
    now, query = time.time(), form["query"]
    if query == "vector(time())":
        return [{"metric": {}, "value": [now, str(now - 3600.0 * (peer.mode == CLOCK))]}]
    if query.startswith("count(gpu_exporter_build_info") or "increase(gpu_tenant_held_gpu" in query:
        return [{"metric": {"namespace": "ml"}, "value": [now, "7"]}]
    return []


def plain(status: str, body: str, *headers: str) -> bytes:
    """A whole answer."""
    data = body.encode()
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(data)}", "Connection: close", *headers, "", ""]
    return "\r\n".join(lines).encode() + data
