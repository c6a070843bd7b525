"""The CPU time of each address: what it may use at once, what it gets back, and how a client above it is answered."""

from __future__ import annotations

import asyncio
import http.client
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from tests.testbed.processes import PROMPT_S
from tests.unit.web.server_bench import HONEST, HOSTILE, Site, get

from gpu_exporter.common.web import budget as module
from gpu_exporter.common.web.budget import ADDRESSES_MAX, BURST_S, SHARE, CpuBudget
from gpu_exporter.common.web.request import Request
from gpu_exporter.common.web.server import TEXT, HttpServer, Reply


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(module, "PACE_S", 0.0)
    return clock


def use(budget: CpuBudget, address: str, cpu_s: float = 0.01) -> bool:
    return not asyncio.run(budget.pace(address, cpu_s))


def test_an_address_gets_its_share_of_a_core_after_its_burst(clock: SimpleNamespace) -> None:
    budget = CpuBudget()
    at_once = sum(use(budget, "a") for _ in range(1000)) * 0.01
    assert at_once == pytest.approx(BURST_S, abs=0.02)
    assert use(budget, "b"), "another address has its own budget"
    later = 0.0
    for _ in range(1000):
        clock.now += 0.01
        later += 0.01 * use(budget, "a")
    assert later == pytest.approx(SHARE * 10.0, abs=0.02), "refused requests are not charged"
    clock.now += BURST_S / SHARE
    assert sum(use(budget, "a") for _ in range(1000)) * 0.01 == pytest.approx(BURST_S, abs=0.02)


def test_addresses_with_the_smallest_debt_are_forgotten_first(clock: SimpleNamespace) -> None:
    budget = CpuBudget()
    budget.charge("hostile", 2 * BURST_S)
    for number in range(2 * ADDRESSES_MAX):
        budget.charge(f"{number}", 0.001)
    assert len(budget._paid_at) == ADDRESSES_MAX
    assert not use(budget, "hostile")
    clock.now += 3 * BURST_S / SHARE
    budget.charge("a", 0.001)
    assert set(budget._paid_at) == {"a"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    monkeypatch.setattr(module, "BURST_S", 0.02)  # some hundred requests
    server = HttpServer("127.0.0.1:0", Site())
    server.start()
    yield server
    server.stop()


def test_a_client_above_its_budget_is_asked_to_retry_and_others_are_answered(server: HttpServer) -> None:
    end = time.monotonic() + 60.0
    client = http.client.HTTPConnection("127.0.0.1", server.port, 60.0, source_address=(HOSTILE, 0))
    while True:
        assert time.monotonic() < end
        client.request("GET", "/page?name[]=gpu_up")
        began, answer = time.monotonic(), client.getresponse()
        answer.read()
        if answer.status != 200:
            break
    assert time.monotonic() - began >= module.PACE_S
    assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
    client.close()
    began = time.monotonic()
    assert get(server, "/page", HONEST)[0] == 200
    assert time.monotonic() - began < PROMPT_S
    while get(server, "/page?name[]=gpu_up", HOSTILE)[0] != 200:
        assert time.monotonic() < end


@pytest.mark.parametrize("path", ["/-/healthy", "/page"])
def test_a_probe_or_a_shared_page_above_the_budget_is_late_but_answered(server: HttpServer, path: str) -> None:
    """A kubelet's probes, and a Prometheus behind the same NAT, may come from the address of a hostile client."""
    slowest = 0.0
    while slowest < module.PACE_S:
        began = time.monotonic()
        assert get(server, path, HOSTILE)[0] == 200
        slowest = max(slowest, time.monotonic() - began)


def test_the_time_of_a_worker_is_charged(monkeypatch: pytest.MonkeyPatch, server: HttpServer) -> None:
    def answer(_: Request) -> Reply:
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            pass
        return Reply(200, TEXT, b"")

    monkeypatch.setattr(server._site, "answer_at_once", lambda _: None)
    monkeypatch.setattr(server._site, "answer", answer)
    assert [get(server, "/page?name[]=gpu_up", HOSTILE)[0] for _ in range(2)] == [200, 429]
