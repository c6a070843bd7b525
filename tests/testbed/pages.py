"""An exporter that publishes a page of the test."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from gpu_exporter.common.address import parse_address
from gpu_exporter.common.fetch import FetchError, fetch_text


@contextmanager
def serve_pages(render: Callable[[str], str]) -> Iterator[str]:
    """Answer each request with the present result of `render` for its path; yields host:port on loopback."""

    class Exporter(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = render(self.path).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: Any) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Exporter)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def serve_page(render: Callable[[], str]) -> AbstractContextManager[str]:
    """As serve_pages, with the same page for every path."""
    return serve_pages(lambda _path: render())


def is_served(url: str, text: str) -> bool | None:
    """True if the page exists and contains this text; None if not yet."""
    try:
        return text in fetch_text(parse_address(url)) or None
    except FetchError:
        return None
