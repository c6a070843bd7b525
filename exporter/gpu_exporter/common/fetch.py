"""Sends HTTP requests to any server, with limits on the time and the size of the answer."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import re
import socket
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from gpu_exporter.common.address import Address
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.plain import REASON_MAX, one_line
from gpu_exporter.common.threads import start

ANSWER_S = 10.0  # for a whole answer, from opening the connection to the last byte
CHUNK = 65536
MIB = 1024 * 1024
# For answers of unknown size: a page of 8 GPUs x 7 instances x 56 holders has 3 MiB.
MOST_BYTES = 64 * MIB


class FetchError(AnswerError):
    """No answer arrived, or it exceeded a limit. The text is the address and the reason."""

    def __init__(self, text: str, status: int | None = None, retry_after_s: int = 0) -> None:
        """`status`: the HTTP status, None if there was no HTTP answer. `retry_after_s`: seconds after which the server
        asks for the next try, 0 if it does not.
        """
        super().__init__(text)
        self.status, self.retry_after_s = status, retry_after_s


class LimitError(FetchError):
    """The answer was longer than allowed, or not complete in time."""


class _Deadline:
    """Ends the watched connections when the time is over.

    A socket timeout is not enough: it applies to each read, so a peer that now and then sends a byte never exceeds it.
    """

    def __init__(self, seconds: float) -> None:
        self.is_over = False
        self._lock = threading.Lock()
        self._watched: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def watch(self, connection: socket.socket) -> None:
        """Watches a connection, by a duplicate of its socket, because TLS takes over the original."""
        with self._lock:
            self._watched.append(connection.dup())
        if self.is_over:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self.is_over = True
            for connection in self._watched:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> _Deadline:
        start(self._timer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            for connection in self._watched:
                connection.close()
            self._watched.clear()


class _Watched(http.client.HTTPConnection):
    deadline: _Deadline

    def connect(self) -> None:
        super().connect()
        self.deadline.watch(self.sock)
        if self.deadline.is_over:  # else Python's ssl wraps a dead connection, and leaves it open
            self.close()
            raise TimeoutError


class _WatchedTls(http.client.HTTPSConnection, _Watched):
    """An HTTPS connection with a deadline that includes the TLS handshake, because connect calls _Watched.connect."""


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def __init__(self, deadline: _Deadline, context: ssl.SSLContext | None) -> None:
        super().__init__()
        self._deadline = deadline
        self._tls = context

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connect(_Watched), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connect(_WatchedTls), request, context=self._tls)

    def _connect(self, kind: type[_Watched]) -> Any:
        def connect(host: str, **options: Any) -> _Watched:
            connection = kind(host, **options)
            connection.deadline = self._deadline
            return connection

        return connect


class _SamePlace(urllib.request.HTTPRedirectHandler):
    """Follows redirects only within one server, so that no other server sees the credentials."""

    def __init__(self, address: Address) -> None:
        self._address = address

    def redirect_request(self, req: urllib.request.Request, *answer: Any) -> urllib.request.Request | None:
        target = urlsplit(answer[-1])
        if (target.scheme, target.netloc) != urlsplit(req.full_url)[:2]:
            raise FetchError(
                f"{self._address}: the server redirects to another server, and the redirect is not followed: "
                "set the final address"
            )
        return super().redirect_request(req, *answer)


def fetch_text(
    address: Address,
    form: Mapping[str, str] | None = None,
    most_bytes: int = MOST_BYTES,
    within_s: float = ANSWER_S,
    context: ssl.SSLContext | None = None,
    headers: Mapping[str, str] | None = None,
) -> str:
    """Sends GET, or POST if there is a `form`, and returns the body of the answer.

    `context`: the TLS context, None for the system's certificate authorities. `headers`: additional headers, such as a
    token.

    Raises FetchError if there is no answer, for an HTTP error, for an answer above `most_bytes`, and if the answer is
    not complete within `within_s`. Of an answer, its text quotes only the reason that a PromQL API gives for an error.
    """
    body = None if form is None else urllib.parse.urlencode(form).encode()
    sent = {**(headers or {}), **_authorization(address)}
    url = f"{address}?{address.query}" if address.query else str(address)
    request = urllib.request.Request(url, body, sent)  # noqa: S310 - an Address is http or https
    with _Deadline(within_s) as deadline:
        try:
            opener = urllib.request.build_opener(_Handler(deadline, context), _SamePlace(address))
            with opener.open(request, timeout=within_s) as answer:
                text = _read(answer, address, most_bytes)
        except FetchError:
            raise
        except urllib.error.HTTPError as exc:
            raise FetchError(f"{address}: HTTP status {exc.code}{_reason(exc)}", exc.code, _retry_after(exc)) from exc
        except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as exc:
            if deadline.is_over:
                raise LimitError(f"{address}: no complete answer within {within_s:.3g} s") from exc
            reason = one_line(str(getattr(exc, "reason", None) or exc), REASON_MAX)
            raise FetchError(f"{address}: {reason}") from exc
        if deadline.is_over:  # an answer without a length ends when its connection ends
            raise LimitError(f"{address}: no complete answer within {within_s:.3g} s")
    return text.decode("utf-8", "replace")


def _authorization(address: Address) -> dict[str, str]:
    """The header for the user and password of the address; empty if the address has none."""
    if not address.login:
        return {}
    pair = urllib.parse.unquote_to_bytes(address.login)
    return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}


def _read(answer: http.client.HTTPResponse, address: Address, most_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while chunk := answer.read1(CHUNK):
        size += len(chunk)
        if size > most_bytes:
            raise LimitError(f"{address}: the answer is longer than {most_bytes / MIB:.3g} MiB")
        chunks.append(chunk)
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)
    return b"".join(chunks)


def _reason(error: urllib.error.HTTPError) -> str:
    """The reason in a PromQL API's error answer; "" for any other body, which may hold foreign data."""
    try:
        said = json.loads(error.read(CHUNK))["error"]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return f": {one_line(said, REASON_MAX)}" if isinstance(said, str) else ""


def _retry_after(error: urllib.error.HTTPError) -> int:
    """Seconds in the header Retry-After (RFC 9110, 10.2.3); 0 without the header, or if it is a date."""
    text = error.headers.get("Retry-After", "")
    return int(text) if re.fullmatch("[0-9]{1,6}", text) else 0
