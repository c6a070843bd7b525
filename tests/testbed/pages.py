"""An exporter that publishes a page of the test."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpu_exporter.common.address import parse_address
from gpu_exporter.common.fetch import FetchError, fetch_text


@contextmanager
def serve_page(render: Callable[[], str]) -> Iterator[str]:
    """Answer each request with the present result of `render`; yields host:port on loopback."""

    class Exporter(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(render().encode())

        def log_message(self, format: str, *arguments: Any) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Exporter)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def is_served(url: str, text: str) -> bool | None:
    """True if the page exists and contains this text; None if not yet."""
    try:
        return text in fetch_text(parse_address(url)) or None
    except FetchError:
        return None
