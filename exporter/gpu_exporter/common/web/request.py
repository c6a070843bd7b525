"""Parses the head of a request into the parts that decide the reply."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Mapping
from typing import NamedTuple

HEAD_MAX = 16 * 1024  # bytes; browsers send 2 KiB, Prometheus 300
# Some proxies end a line at a bare CR or LF, and would see another request than this server (RFC 9112, 2.2).
CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
ABSOLUTE = re.compile(r"https?://([^/?#@]+)(|[/?].*)", re.IGNORECASE)  # RFC 9112, 3.2.2


class BadRequest(Exception):
    """The request is refused with this status, and the connection is closed."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Request(NamedTuple):
    """One request, without a body.

    `headers`: the values by name in lower case; `host` is taken from an absolute target. `keeps`: the client keeps the
    connection open.
    """

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    keeps: bool

    def names(self) -> frozenset[str]:
        """Values of the parameter `name[]`, with which Prometheus and others restrict a page to some families."""
        return frozenset(urllib.parse.parse_qs(self.query, errors="replace").get("name[]", ()))

    def takes_gzip(self) -> bool:
        return _quality(self.headers.get("accept-encoding", ""), "gzip", "*") > 0.0

    def takes_openmetrics(self) -> bool:
        """Returns whether OpenMetrics is ranked above the plain text format."""
        accept = self.headers.get("accept", "")
        return _quality(accept, "application/openmetrics-text") > _quality(accept, "text/plain")


def parse_head(head: bytes) -> Request:
    """Parses a request of HTTP/1.0 or 1.1, up to and including its empty line. Raises BadRequest.

    A request with a body is refused: no page needs a body, and the server would parse the body as the next request.
    """
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.0", "HTTP/1.1") or not words[0].isalpha():
        raise BadRequest(400, "the request line is not valid HTTP/1.0 or HTTP/1.1")
    if CONTROL.search("".join(lines)) or not words[1].isprintable():
        raise BadRequest(400, "the request head contains a control character")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not line:
            break
        if not colon or not name or name != name.strip():
            raise BadRequest(400, "a header line is not of the form NAME: VALUE")
        headers[name.lower()] = (
            f"{headers[name.lower()]}, {value.strip()}" if name.lower() in headers else value.strip()
        )
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise BadRequest(413, "requests with a body are not accepted")
    if words[0] not in ("GET", "HEAD"):
        raise BadRequest(405, "only GET and HEAD are accepted")
    target = words[1]
    if absolute := ABSOLUTE.fullmatch(target):
        headers["host"], target = absolute[1], absolute[2] if absolute[2].startswith("/") else f"/{absolute[2]}"
    path, _, query = target.partition("?")
    wish = headers.get("connection", "").lower()
    keeps = wish != "close" if words[2] == "HTTP/1.1" else wish == "keep-alive"
    return Request(words[0], path, query, headers, keeps)


def _quality(header: str, *names: str) -> float:
    """The quality (0 to 1) that an Accept header gives to the first of `names` that it contains; 0 without one."""
    found: dict[str, float] = {}
    for entry in header.split(","):
        name, *parameters = (part.strip().lower() for part in entry.split(";"))
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    quality = float(parameter[2:])
                except ValueError:
                    quality = 0.0
        found[name] = max(found.get(name, 0.0), quality)
    return next((found[name] for name in names if name in found), 0.0)


def parse_listen_address(text: str) -> tuple[str, int]:
    """Splits `:9836`, `127.0.0.1:9836` or `[::1]:9836` into host and port. Raises ValueError."""
    host, separator, port = text.rpartition(":")
    if not separator or not port.isdecimal() or not port.isascii() or int(port) > 65535:
        raise ValueError(f"{text!r} is not [host]:port")
    return host.strip("[]"), int(port)
