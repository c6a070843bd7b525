"""Request heads: accepted and refused ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.common.web.request import BadRequest, Request, parse_head, parse_listen_address

PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


def head(*headers: str, first: str = "GET / HTTP/1.1") -> Request:
    return parse_head("\r\n".join([first, *headers, "", ""]).encode())


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (PROMETHEUS, True),
        ("text/plain;version=0.0.4;q=0.5,application/openmetrics-text;q=0.2", False),
        ("", False),
        ("application/openmetrics-text;q=oops;q=0", False),
    ],
)
def test_the_accept_header_decides_the_metrics_format(accept: str, expected: bool) -> None:
    assert head(f"Accept: {accept}").takes_openmetrics() is expected


@pytest.mark.parametrize(
    ("encodings", "expected"),
    [
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("gzip;q=0", False),
        ("identity", False),
        ("*", True),
        ("*, gzip;q=0.0", False),
        ("gzipped", False),
        ("gzip;q=nonsense", False),
    ],
)
def test_gzip_is_used_only_if_the_client_accepts_it(encodings: str, expected: bool) -> None:
    assert head(f"Accept-Encoding: {encodings}").takes_gzip() is expected
    assert not head().takes_gzip()


@pytest.mark.parametrize(
    ("first", "wish", "keeps"),
    [
        ("GET / HTTP/1.1", None, True),
        ("GET / HTTP/1.1", "Close", False),
        ("GET / HTTP/1.0", None, False),
        ("GET / HTTP/1.0", "Keep-Alive", True),
    ],
)
def test_version_and_header_decide_whether_the_connection_stays_open(first: str, wish: str | None, keeps: bool) -> None:
    assert head(*([f"Connection: {wish}"] if wish else []), first=first).keeps is keeps


def test_the_query_selects_families() -> None:
    request = head(first="GET /metrics?name[]=gpu_up&name%5B%5D=gpu_%70ower_watts&x=%ff HTTP/1.1")
    assert request.path == "/metrics"
    assert request.names() == {"gpu_up", "gpu_power_watts"}
    assert head(first="GET /metrics?name[]=%ff%ed%a0%80 HTTP/1.1").names()


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("GET /\r\n\r\n", 400),
        ("GET  / HTTP/1.1\r\n\r\n", 400),
        ("GET / HTTP/2.0\r\n\r\n", 400),
        ("\x16\x03\x01\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost localhost\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nContent-Length : 3\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\n folded: 3\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nContent-Length: 3\r\n\r\n", 413),
        ("GET / HTTP/1.1\r\nContent-Length: 0\r\nContent-Length: 3\r\n\r\n", 413),
        ("GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
        ("POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 405),
    ],
)
def test_malformed_or_unsupported_requests_are_refused(text: str, status: int) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_head(text.encode("latin-1"))
    assert caught.value.status == status


@pytest.mark.parametrize("control", sorted({*map(chr, range(32)), "\x7f"} - {"\t"}))
@pytest.mark.parametrize(
    "text",
    [
        "GET /metrics?x={} HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nX: a{}Transfer-Encoding: chunked\r\n\r\n",
        "GET / HTTP/1.1\r\nX: a{}\r\n\r\n",
        "GET / HTTP/1.1\r\nX{}: a\r\n\r\n",
        "GET / HTTP/1.1{}\r\n\r\n",
    ],
)
def test_a_control_character_in_a_head_is_refused(text: str, control: str) -> None:
    """Some proxies end a line at a bare LF or CR: they would see two headers, or two requests."""
    with pytest.raises(BadRequest) as caught:
        parse_head(text.format(control).encode("latin-1"))
    assert caught.value.status == 400


def test_a_tab_is_allowed_in_values_only() -> None:
    assert head("X: a\tb").headers["x"] == "a\tb"
    for text in ("GET /\t HTTP/1.1\r\n\r\n", "GET / HTTP/1.1\r\nX\t: a\r\n\r\n"):
        with pytest.raises(BadRequest):
            parse_head(text.encode())


@pytest.mark.parametrize(
    ("target", "path", "query", "host"),
    [
        ("http://node:9836/metrics?name[]=gpu_up", "/metrics", "name[]=gpu_up", "node:9836"),
        ("HTTPS://evil.example/", "/", "", "evil.example"),
        ("http://node", "/", "", "node"),
        ("http://node?x=1", "/", "x=1", "node"),
        ("//node/metrics", "//node/metrics", "", "localhost"),
        ("http:///metrics", "http:///metrics", "", "localhost"),
        ("http://user:password@node/metrics", "http://user:password@node/metrics", "", "localhost"),
    ],
)
def test_an_absolute_target_is_read_as_its_path_with_its_host(target: str, path: str, query: str, host: str) -> None:
    request = head("Host: localhost", first=f"GET {target} HTTP/1.1")
    assert (request.path, request.query, request.headers["host"]) == (path, query, host)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_request_or_refused(data: bytes) -> None:
    try:
        request = parse_head(data)
    except BadRequest:
        return
    request.names(), request.takes_gzip(), request.takes_openmetrics()


def test_listen_addresses_are_parsed() -> None:
    assert parse_listen_address(":9836") == ("", 9836)
    assert parse_listen_address("127.0.0.1:0") == ("127.0.0.1", 0)
    assert parse_listen_address("[::1]:9836") == ("::1", 9836)
    for text in ("9836", ":x", ":", ":65536", ":²"):
        with pytest.raises(ValueError, match="is not"):
            parse_listen_address(text)
