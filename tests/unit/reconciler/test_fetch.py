"""Servers that are slow, send without end, or redirect elsewhere: each answer is limited in time and size."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
from tests.testbed.processes import PROMPT_S

from gpu_exporter.common.address import Address, parse_address
from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import FetchError, fetch_text
from gpu_exporter.common.promql.client import Client
from gpu_exporter.reconciler.evidence.exporters import ExporterSource, parse_exporter
from gpu_exporter.reconciler.evidence.promql import PromQLOptions, PromQLSource

WITHIN_S = 0.4
OK = b"HTTP/1.1 200 OK\r\n"
Answer = Callable[[socket.socket], None]
Serve = Callable[[Answer], Address]


@pytest.fixture
def requests() -> list[bytes]:
    return []


@pytest.fixture
def serve(requests: list[bytes]) -> Iterator[Serve]:
    """Starts servers on loopback that answer each connection as the test wants. Returns the address."""
    listeners: list[socket.socket] = []

    def start(answer: Answer) -> Address:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def handle(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                requests.append(connection.recv(65536))
                answer(connection)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=handle, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return parse_address(f"http://127.0.0.1:{listener.getsockname()[1]}/metrics")

    yield start
    for listener in listeners:
        listener.close()


def dribble(head: bytes) -> Answer:
    def answer(connection: socket.socket) -> None:
        connection.sendall(head)
        for _ in itertools.count():
            connection.sendall(b"a")
            time.sleep(0.02)

    return answer


def all_at_once(*parts: bytes) -> Answer:
    return lambda connection: connection.sendall(b"".join(parts))


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nX-Long: ",
        OK + b"Content-Length: 1000000\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n",
        OK + b"Connection: close\r\n\r\n",
        b"HTTP/1.1 500 Sorry\r\n\r\n",
    ],
    ids=["status line", "headers", "body", "chunks", "body without length", "body of an error"],
)
def test_the_request_to_a_server_that_sends_single_bytes_is_ended(serve: Serve, head: bytes) -> None:
    began = time.monotonic()
    with pytest.raises(AnswerError, match="no complete answer within 0.4 s|timed out$|HTTP status 500$"):
        fetch_text(serve(dribble(head)), within_s=WITHIN_S)
    assert time.monotonic() - began < PROMPT_S


def test_the_request_to_a_server_that_never_completes_the_tls_handshake_is_ended(serve: Serve) -> None:
    plain = serve(dribble(b"\x16\x03\x03\x40\x00"))
    began = time.monotonic()
    with pytest.raises(AnswerError, match="no complete answer within 0.4 s"):
        fetch_text(parse_address(f"https://{plain.place}"), within_s=WITHIN_S)
    assert time.monotonic() - began < PROMPT_S


def test_an_endless_answer_is_refused_at_its_limit(serve: Serve) -> None:
    def flood(connection: socket.socket) -> None:
        connection.sendall(OK + b"Connection: close\r\n\r\n")
        while True:
            connection.sendall(b"x" * 65536)

    with pytest.raises(AnswerError, match="the answer is longer than 1 MiB"):
        fetch_text(serve(flood), most_bytes=1 << 20, within_s=20.0)


@pytest.mark.parametrize(
    ("head", "body"),
    [(b"Content-Length: 9", b"half"), (b"Transfer-Encoding: chunked", b"9\r\nhalf")],
)
def test_an_incomplete_answer_is_an_error(serve: Serve, head: bytes, body: bytes) -> None:
    with pytest.raises(AnswerError, match="http://127"):
        fetch_text(serve(all_at_once(OK, head, b"\r\n\r\n", body)))


def test_a_complete_answer_is_read_by_get_and_post(serve: Serve, requests: list[bytes]) -> None:
    url = serve(all_at_once(OK, b"Content-Length: 5\r\n\r\n", "ä up".encode()))
    assert fetch_text(url) == "ä up"
    assert fetch_text(url, {"query": "up{}"}) == "ä up"
    assert [request.split()[0] for request in requests] == [b"GET", b"POST"]


@pytest.mark.parametrize(
    "place", ["http://169.254.169.254/latest/", "https://127.0.0.1/", "http://127.0.0.1:1/metrics"]
)
def test_a_redirect_to_another_server_is_not_followed(serve: Serve, place: str) -> None:
    url = serve(all_at_once(b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: ", place.encode(), b"\r\n\r\n"))
    with pytest.raises(AnswerError, match="redirects to another server, and the redirect is not followed"):
        fetch_text(url)


def test_a_redirect_within_the_server_is_followed(serve: Serve) -> None:
    answers = iter(
        [b"HTTP/1.1 307 Moved\r\nContent-Length: 0\r\nLocation: /other\r\n\r\n", OK + b"Content-Length: 2\r\n\r\nup"]
    )
    assert fetch_text(serve(lambda connection: connection.sendall(next(answers)))) == "up"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"status":"error","error":"too many samples"}', ": too many samples$"),
        (b"root:x:0:0", "HTTP status 422$"),
        (b'{"secret": "token"}', "HTTP status 422$"),
        (b"[" * 60_000, "HTTP status 422$"),
        (b'{"error": "two\\nlines' + b"x" * 500 + b'"}', ": two.linesx{174}~[0-9a-f]{16}$"),
    ],
)
def test_an_error_text_repeats_only_the_reason_that_a_promql_api_gives(serve: Serve, body: bytes, said: str) -> None:
    head = b"HTTP/1.1 422 Unprocessable\r\nContent-Length: %d\r\n\r\n" % len(body)
    with pytest.raises(AnswerError, match=said):
        fetch_text(serve(all_at_once(head, body)))


@pytest.mark.parametrize(
    ("body", "has_hint"), [(b"<h1>not here</h1>", True), (b'{"error": "no such tenant"}', False)], ids=["html", "api"]
)
@pytest.mark.parametrize("status", [404, 405, 501])
def test_a_server_without_a_promql_api_is_told_from_one_that_refuses(
    serve: Serve, status: int, body: bytes, has_hint: bool
) -> None:
    url = serve(all_at_once(b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n" % (status, len(body)), body))
    with pytest.raises(FetchError) as caught:
        Client()(url, {"query": "up"})
    assert caught.value.status == status
    assert ("no PromQL API answers there" in str(caught.value)) == has_hint, str(caught.value)


def test_an_error_text_does_not_contain_the_password_in_the_address() -> None:
    with pytest.raises(AnswerError) as caught:
        fetch_text(parse_address("http://ada:secret@127.0.0.1:1/metrics"))
    assert "secret" not in str(caught.value)


def test_an_exporter_whose_answer_never_ends_does_not_delay_others(serve: Serve) -> None:
    whole = OK + b"Content-Length: 5\r\n\r\nup 1\n"
    urls = [serve(dribble(OK + b"\r\n")), serve(all_at_once(whole)), serve(dribble(b""))]
    source = ExporterSource(urls, 7200.0, SYSTEM_CLOCK, within_s=2.0)  # enough for the whole answer on a busy machine
    began = time.monotonic()
    evidence = source.read_evidence()
    assert time.monotonic() - began < PROMPT_S
    assert evidence.exporters == 1
    assert evidence.problems == tuple(f"{url}: no answer within the 2 s of a cycle" for url in urls[::2])


def test_an_unforeseen_error_with_one_page_does_not_cost_the_evidence_of_others() -> None:
    def fetch(address: Address) -> str:
        if address.host == "n1":
            raise MemoryError
        return "up 1\n"

    evidence = ExporterSource(
        [parse_exporter("n1:1"), parse_exporter("n2:1")], 7200.0, SYSTEM_CLOCK, fetch
    ).read_evidence()
    assert (evidence.exporters, evidence.problems) == (1, ("http://n1:1/metrics: MemoryError: ",))


def test_slow_answers_of_one_cycle_are_limited_in_time_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    left: list[float] = []
    monkeypatch.setattr("gpu_exporter.reconciler.evidence.promql.time", SimpleNamespace(monotonic=lambda: now))

    def fetch(address: Address, form: dict[str, str], most_bytes: int, within_s: float) -> str:
        nonlocal now
        left.append(within_s)
        now += 25.0
        return '{"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}, "value": [1, "1"]}]}}'

    source = PromQLSource(
        PromQLOptions(address=parse_address("http://p"), candidate_after_s=3600.0, window_s=7200.0, matcher=""),
        clock=SYSTEM_CLOCK,
        fetch=fetch,
    )
    with pytest.raises(AnswerError, match="the evidence of a cycle took longer than 30 s"):
        source.read_evidence()
    assert len(left) == 2
    assert left[1] == 5.0 < left[0]
