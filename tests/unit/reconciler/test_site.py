"""The HTTP endpoints of the reconciler: its probes and its metrics."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gpu_exporter.common.tasks import Task
from gpu_exporter.common.web.request import parse_head
from gpu_exporter.common.web.server import HttpServer
from gpu_exporter.reconciler.evidence.records import EVIDENCE_S
from gpu_exporter.reconciler.site import ReconcilerSite
from gpu_exporter.reconciler.telemetry import Telemetry


def ask(site: ReconcilerSite, path: str) -> tuple[int, str]:
    request = parse_head(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    reply = site.answer_at_once(request) or site.answer(request)
    return reply.status, reply.body.decode()


def test_a_reconciler_is_alive_while_its_cycles_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    telemetry = Telemetry()
    site = ReconcilerSite(telemetry, 30.0)
    now += 3 * 30.0 + 2 * EVIDENCE_S
    assert ask(site, "/-/healthy") == (200, "the last cycle ended 150 s ago\n")
    now += 1.0
    assert ask(site, "/-/healthy") == (503, "no cycle has ended for 151 s, more than 150 s\n")
    telemetry.note_cycle(now, False, {})  # a cycle without evidence that ended
    assert ask(site, "/-/healthy") == (200, "the last cycle ended 0 s ago\n")
    assert ask(site, "/-/ready") == (200, "ready\n")


def test_a_reconciler_with_a_task_that_no_longer_turns_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    telemetry, task = Telemetry(), Task("lease", 60.0)
    telemetry.own.tasks.add(task)
    site = ReconcilerSite(telemetry, 30.0)
    with task:
        now += 61.0
    status, text = ask(site, "/-/healthy")
    assert (status, text.splitlines()) == (503, telemetry.own.tasks.list_late())
    with task:
        assert ask(site, "/-/healthy")[0] == 200


def test_the_metrics_of_the_process_are_served_with_those_of_its_port(tmp_path: Path) -> None:
    config = tmp_path / "web.yaml"
    config.write_text("{}\n")
    telemetry = Telemetry()
    site = ReconcilerSite(telemetry, 30.0)
    assert "\ngpu_reconciler_web_config_success " not in ask(site, "/metrics")[1]
    server = HttpServer("127.0.0.1:0", site, web_config=config)
    telemetry.own.note_server(server)
    try:
        text = ask(site, "/metrics")[1]
        assert "\ngpu_reconciler_web_config_success 1.0\n" in text
        assert '\ngpu_reconciler_task_failures_total{task="web-config"} 0.0\n' in text
    finally:
        server.stop()


def test_the_metrics_of_the_reconciler_are_served_at_their_path_only() -> None:
    site = ReconcilerSite(Telemetry(), 30.0)
    status, text = ask(site, "/metrics")
    assert status == 200
    assert 'gpu_reconciler_skipped_total{reason="node"} 0.0' in text
    assert ask(site, "/") == (404, "no such page; try /metrics\n")
