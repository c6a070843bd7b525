"""If the clocks of the reconciler and of the API server differ, nothing is decided: a wish could end too early."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any

import pytest
from kubernetes import client
from tests.testbed.gpu_resources import GPU_RESOURCES

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.reconciler.decision.surroundings import Reference, Unreadable
from gpu_exporter.reconciler.evidence.clocks import APART_MAX_S, ahead_of
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.kubernetes.around.survey import PodSurveyor
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.owners import Owners
from gpu_exporter.reconciler.kubernetes.targets import TargetReader
from gpu_exporter.reconciler.marks import MarkError

JOB = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train", "uid": "u1"}}


class Server(http.server.BaseHTTPRequestHandler):
    """A server with one Job and an empty namespace. Its clock differs from the reconciler's by `ahead_s`."""

    ahead_s = 0.0
    date: str | None = None

    def do_GET(self) -> None:
        body = json.dumps(JOB if self.path.endswith("/train") else {"metadata": {"name": "ml"}, "items": []}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(time.time() + self.ahead_s, usegmt=True) if self.date is None else self.date

    def log_message(self, format: str, *arguments: Any) -> None:
        return


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(Server, "date", None)
    try:
        yield Api(client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{server.server_address[1]}")))
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("ahead_s", "says"), [(-3600.0, "s ahead of"), (-40.0, "s ahead of"), (40.0, "s behind")])
def test_nothing_is_decided_while_the_clocks_of_reconciler_and_server_differ(
    api: Api, monkeypatch: pytest.MonkeyPatch, ahead_s: float, says: str
) -> None:
    monkeypatch.setattr(Server, "ahead_s", ahead_s)
    name = HolderName("kubernetes", "ml", "train-0")
    found = PodSurveyor(api, Policy(), ManualClock(), resources=GPU_RESOURCES).survey([name], [], time.time())[name]
    assert isinstance(found, Unreadable)
    assert found.is_failure
    assert says in found.why
    assert "until NTP has synchronized both" in found.why
    reader = TargetReader(api, Policy(), ManualClock(), Owners(api, ManualClock()), GPU_RESOURCES)
    with pytest.raises(MarkError, match=says):
        reader.read(Reference("batch", "v1", "Job", "train", "u1"), "ml", ("suspend",), 0.0, time.time())
    monkeypatch.setattr(Server, "ahead_s", 0.0)  # the clock is corrected
    api.call(api.core.read_namespace, "ml")
    assert api.clock_fault == ""


@pytest.mark.parametrize("ahead_s", [-25.0, 0.0, 25.0])
def test_a_small_difference_of_the_clocks_is_ignored(api: Api, monkeypatch: pytest.MonkeyPatch, ahead_s: float) -> None:
    monkeypatch.setattr(Server, "ahead_s", ahead_s)
    api.call(api.core.read_namespace, "ml")
    assert api.clock_fault == ""


@pytest.mark.parametrize("date", ["", "yesterday", "Thu, 99 Nov 2026 00:00:00 GMT", "Thu, 01 Jan 9999999 00:00:00 GMT"])
def test_an_invalid_date_of_the_server_is_ignored(api: Api, monkeypatch: pytest.MonkeyPatch, date: str) -> None:
    monkeypatch.setattr(Server, "date", date)
    api.call(api.core.read_namespace, "ml")
    assert api.clock_fault == ""


def test_a_slow_answer_is_no_difference_of_the_clocks() -> None:
    asked, got = 1000.0, 1120.0
    assert [ahead_of(said, asked, got, 1.0) for said in (999.0, 1000.0, 1060.0, 1120.0)] == [0.0] * 4
    assert ahead_of(asked - 1.0 - APART_MAX_S, asked, got, 1.0) == APART_MAX_S
    assert ahead_of(got + APART_MAX_S, asked, got, 1.0) == -APART_MAX_S
