"""Proofs from a real Prometheus with two weeks of history, and from a real Alertmanager that routes and silences."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import pytest

from gpu_exporter.clock import SYSTEM_CLOCK
from gpu_exporter.reconciler.actions.proofs import ALERT, Proofs, Record
from gpu_exporter.reconciler.evidence import EvidenceError, HolderName
from gpu_exporter.reconciler.fetch import fetch_text
from tests.testbed.processes import Processes, fetch, wait_for
from tests.testbed.servers import Prometheus, Webhook, require, start_alertmanager

pytestmark = pytest.mark.servers
DAY_S = 86_400
A, B, JOB = HolderName("kubernetes", "ml", "a"), HolderName("kubernetes", "ml", "b"), HolderName("slurm", "", "7")
ALL = (A, B, JOB, *(HolderName("kubernetes", "ml", f"other.{number}" + 200 * "x") for number in range(100)))
SERIES = 'job="gpu-exporter-reconciler"'


def line(family: str, value: float, at: float, **labels: str) -> str:
    text = ",".join(f'{key}="{each}"' for key, each in labels.items())
    return f"{family}{{{text}}} {value} {at:.0f}"


def history(now: int, days: int = 15) -> Iterator[str]:
    """A reconciler, restarted once, that decided four times a day; who waits for GPUs; of which pools GPUs are."""
    job = {"job": "gpu-exporter-reconciler"}
    for second in range(0, days * DAY_S, 240):
        at = now - days * DAY_S + second
        since = second if second < 5 * DAY_S else second - 5 * DAY_S  # counters begin at 0 again
        yield line("gpu_reconciler_cycles_total", since / 30, at, **job)
        for kind, each_day in (("batch", 4), ("interactive", 1)):
            decided = since * each_day // DAY_S
            yield line("gpu_reconciler_underused_total", decided, at, policy="policy", **{"class": kind}, **job)
            yield line("gpu_reconciler_regrets_total", decided // 20, at, policy="policy", **{"class": kind}, **job)
    for second in range(-3600, 61, 30):
        at = now + second
        yield line("gpu_reconciler_cycles_total", 10 * DAY_S / 30 + 120 + second / 30, at, **job)
        yield line("pool:gpu_pending_gpus:sum", 3, at, pool="nvidia_com_gpu")
        if second > -300:  # nobody waits: there is no sample, and no zero either
            yield line("pool:gpu_pending_gpus:sum", 8, at, pool="gpu-long")
        yield line("allocation:gpu_pool:info", 1, at, **whose("a"), pool="nvidia_com_gpu", uuid="GPU-1", node="n")
        yield line("allocation:gpu_pool:info", 1, at, **whose("a"), pool="nvidia_com_gpu", uuid="GPU-2", node="n")
        yield line("allocation:gpu_pool:info", 1, at, **whose("b"), pool="nvidia_com_mig", uuid="GPU-3", node="n")
        yield line("allocation:gpu_pool:info", 1, at, scheduler="slurm", job_id="7", pool="gpu-long", uuid="GPU-4")


def whose(pod: str) -> dict[str, str]:
    return {"scheduler": "kubernetes", "namespace": "ml", "pod": pod}


def backfill(directory: Path, lines: Iterator[str]) -> None:
    text = directory / "history.txt"
    families: dict[str, list[str]] = {}
    for each in lines:
        families.setdefault(each.partition("{")[0], []).append(each)
    body = [
        each
        for family, rows in sorted(families.items())
        for each in (f"# TYPE {family.removesuffix('_total')} unknown", *rows)
    ]
    text.write_text("\n".join([*body, "# EOF", ""]), encoding="utf-8")
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(text), str(directory / "data")]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, str, Webhook]]:
    require("prometheus", "promtool", "prometheus-alertmanager")
    directory = tmp_path_factory.mktemp("proofs")
    (directory / "prometheus").mkdir()
    backfill(directory / "prometheus", history(int(time.time())))
    webhook = Webhook()
    flags = ("--storage.tsdb.retention.time=30d",)
    with Processes(directory) as processes:
        prometheus = Prometheus(processes, directory / "prometheus", {}, flags=flags)
        _, alertmanager = start_alertmanager(processes, directory / "alertmanager", webhook.url)
        yield prometheus, f"http://{alertmanager}", webhook
    webhook.close()


def proofs(
    servers: tuple[Prometheus, str, Webhook], reconcilers: str = SERIES, filters: tuple[str, ...] = (), days: float = 14
) -> Proofs:
    prometheus, alertmanager, _ = servers
    where = prometheus.url, alertmanager, filters, reconcilers
    return Proofs(*where, 'job="gpu-exporter"', days * DAY_S, 30.0, SYSTEM_CLOCK, fetch_text, fetch_text)


def alert(name: HolderName, since_s: float, alertname: str = ALERT, **more: str) -> dict[str, Any]:
    who = {"namespace": name.namespace, "pod": name.name} if name.namespace else {"job_id": name.name}
    labels = {"alertname": alertname, "audience": "owner", "severity": "warning", "scheduler": name.scheduler}
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - since_s))
    return {"labels": {**labels, **who, **more}, "annotations": {}, "startsAt": moment}


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read() or b"null")


def test_decisions_and_regrets_are_counted_by_policy_and_class_over_restarts(
    servers: tuple[Prometheus, str, Webhook],
) -> None:
    records = proofs(servers).read_records()
    batch, interactive = records["policy", "batch"], records["policy", "interactive"]
    assert 50 <= batch.decisions <= 57
    assert 1 <= batch.regrets <= 3
    assert 11 <= interactive.decisions <= 15


def test_two_weeks_are_two_weeks_and_of_this_reconciler(servers: tuple[Prometheus, str, Webhook]) -> None:
    with pytest.raises(EvidenceError, match="no reconciler has been seen for 90% of the last 20 days"):
        proofs(servers, days=20).read_records()
    with pytest.raises(EvidenceError, match="no reconciler"):
        proofs(servers, 'job="another"').read_records()
    assert proofs(servers, days=16).read_records(), "fifteen days are nine tenths of sixteen"


def test_demand_is_what_has_been_waited_for_all_the_time_in_the_pools_of_the_holder(
    servers: tuple[Prometheus, str, Webhook],
) -> None:
    assert proofs(servers).read_demand([A, B, JOB]) == {A: {"nvidia_com_gpu": 3.0}}


def test_an_owner_counts_as_warned_once_a_receiver_has_the_alert_and_while_nobody_silences_it(
    servers: tuple[Prometheus, str, Webhook],
) -> None:
    _, url, webhook = servers
    asks = proofs(servers)
    assert asks.read_warnings(ALL) == {}
    ours = [alert(A, 9000), alert(A, 300, gpus="2"), alert(JOB, 9000), alert(B, 9000, "GpuHolderLow")]
    post(f"{url}/api/v2/alerts", [*ours, alert(B, 9000, audience="operations")])
    wait_for(lambda: len(asks.read_warnings(ALL)) == 2, "both owners to be warned")
    wait_for(lambda: webhook.received, "the notification itself")
    warnings = asks.read_warnings(ALL)
    assert set(warnings) == {A, JOB}
    assert time.time() - warnings[A].since_wall < 400, "of two alerts on one holder the younger"
    assert time.time() - warnings[JOB].since_wall > 8990
    assert warnings[JOB].receivers == ("gpu-owners",)

    matcher = {"name": "job_id", "value": "7", "isRegex": False, "isEqual": True}
    end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 600))
    silence = {
        "matchers": [matcher],
        "startsAt": "2020-01-01T00:00:00Z",
        "endsAt": end,
        "createdBy": "x",
        "comment": "x",
    }
    post(f"{url}/api/v2/silences", silence)
    wait_for(lambda: set(asks.read_warnings(ALL)) == {A}, "the silence to hold")

    post(f"{url}/api/v2/alerts", [alert(A, 9000, cluster="a"), alert(B, 9000, cluster="b")])
    wait_for(lambda: '"b"' in (fetch(f"{url}/api/v2/alerts") or ""), "alerts of two clusters")
    with pytest.raises(EvidenceError, match=r"clusters \['', 'a', 'b'\] in one answer: choose one with --alertmanager"):
        asks.read_warnings(ALL)
    assert set(proofs(servers, filters=('cluster="b"',)).read_warnings(ALL)) == {B}


def test_alerts_of_a_cluster_that_nobody_chose_prove_nothing() -> None:
    urls: list[str] = []

    def answer(url: str, form: Any, most_bytes: int, within_s: float) -> str:
        urls.append(unquote_plus(url))
        shown = {**alert(A, 9000, cluster="b"), "receivers": [{"name": "owners"}], "status": {"state": "active"}}
        return json.dumps([shown])

    def asks(matcher: str, *filters: str) -> Proofs:
        return Proofs("http://p", "http://a", filters, SERIES, matcher, DAY_S, 60.0, SYSTEM_CLOCK, answer, answer)

    with pytest.raises(
        EvidenceError, match="alerts are of cluster b: say that it is this one with --alertmanager.filter"
    ):
        asks('job="gpu-exporter"').read_warnings([A])
    assert set(asks("", 'cluster="b"').read_warnings([A])) == {A}
    assert set(asks('job="gpu-exporter",cluster="b"').read_warnings([A])) == {A}
    assert 'filter=cluster="b"' in urls[-1] and 'filter=cluster="b"' not in urls[0]


def test_servers_that_are_away_are_no_proof(servers: tuple[Prometheus, str, Webhook]) -> None:
    nowhere = "http://127.0.0.1:9"
    asks = Proofs(nowhere, nowhere, (), SERIES, "", DAY_S, 60.0, SYSTEM_CLOCK, fetch_text, fetch_text)
    for ask in (lambda: asks.read_warnings(ALL), asks.read_records, lambda: asks.read_demand([A])):
        with pytest.raises(EvidenceError, match="refused"):
            ask()


def test_the_record_of_a_class_without_regrets_of_its_own_is_no_proof() -> None:
    """A counter that was lost is not a zero."""
    rows = {"underused": [{"policy": "p", "class": "batch"}], "regrets": []}

    def answer(url: str, form: Any, most_bytes: int, within_s: float) -> str:
        query = form["query"]
        found = [{}] if "cycles" in query else rows["regrets" if "regrets" in query else "underused"]
        result = [{"metric": labels, "value": [0, "60"]} for labels in found]
        return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}})

    asks = Proofs("http://p", "http://a", (), SERIES, "", DAY_S, 60.0, SYSTEM_CLOCK, answer, answer)
    assert asks.read_records() == {("p", "batch"): Record(60.0, 60.0)}


def test_only_the_cluster_of_the_evidence_is_asked_about() -> None:
    queries: list[str] = []

    def answer(url: str, form: Any, most_bytes: int, within_s: float) -> str:
        queries.append(form["query"])
        return json.dumps({"status": "success", "data": {"resultType": "vector", "result": []}})

    matcher = 'job="gpu-exporter",cluster="a",slurm_cluster="x"'
    asks = Proofs("http://p", "http://a", (), SERIES, matcher, DAY_S, 60.0, SYSTEM_CLOCK, answer, answer)
    with pytest.raises(EvidenceError, match="no reconciler"):
        asks.read_records()
    asks.read_demand([A])
    assert f'gpu_reconciler_cycles_total{{{SERIES},cluster="a"}}' in queries[0]
    assert 'pod=~"a",cluster="a"}' in queries[1]
