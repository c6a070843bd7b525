"""Proofs from a real Prometheus with two hours of history, and from a real Alertmanager that routes and silences."""

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

from gpu_exporter.common.address import Address, parse_address
from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import fetch_text
from gpu_exporter.reconciler.actions.proofs import ALERT, Proofs, Shown, Work
from gpu_exporter.reconciler.evidence.promql import PromQLOptions, PromQLSource
from gpu_exporter.reconciler.evidence.records import HolderName
from tests.testbed.processes import Processes, fetch, wait_for
from tests.testbed.servers import Prometheus, Webhook, require, start_alertmanager

pytestmark = pytest.mark.servers
DAY_S = 86_400
A, B, JOB = HolderName("kubernetes", "ml", "a"), HolderName("kubernetes", "ml", "b"), HolderName("slurm", "", "7")
ALL = (A, B, JOB, *(HolderName("kubernetes", "ml", f"other.{number}" + 200 * "x") for number in range(100)))
MATCHER = 'job="gpu-exporter"'


def line(family: str, value: float, at: float, **labels: str) -> str:
    text = ",".join(f'{key}="{each}"' for key, each in labels.items())
    return f"{family}{{{text}}} {value} {at:.0f}"


def history(now: int) -> Iterator[str]:
    """History of the demand for GPUs, the pools of GPUs, and the host work of holders and pods."""
    for second in range(-3600, 61, 30):
        at = now + second
        for pool, waiting in (("nvidia_com_gpu", 3), ("gpu-long", 8)):
            if pool == "nvidia_com_gpu" or second > -300:  # earlier, the demand is unknown
                yield line("pool:gpu_pending_gpus:capped", waiting, at, pool=pool)
            yield line("pool:gpu_pending_gpus:sum", 1000, at, pool=pool)  # one tenant wants all of them
        yield line("pool:gpu_pending_gpus:capped", 0 if second < -60 else 4, at, pool="gpu(short)")
        if not -600 < second < -300:
            yield line("pool:gpu_pending_gpus:capped", 0, at, pool="gap")
        yield line("allocation:gpu_pool:info", 1, at, **whose("a"), pool="nvidia_com_gpu", uuid="GPU-1", node="n")
        yield line("allocation:gpu_pool:info", 1, at, **whose("a"), pool="nvidia_com_gpu", uuid="GPU-2", node="n")
        yield line("allocation:gpu_pool:info", 1, at, **whose("b"), pool="nvidia_com_mig", uuid="GPU-3", node="n")
        yield line("allocation:gpu_pool:info", 1, at, scheduler="slurm", job_id="7", pool="gpu-long", uuid="GPU-4")
        exporter = {"job": "gpu-exporter"}
        for at_node, cpu, io in (("n1", 0.02, 1000.0), ("n2", 0.9, 5e8)):
            where = {**exporter, **whose("a"), "node": at_node, "instance": f"{at_node}:9400"}
            for uuid in ("GPU-1", "GPU-2"):
                yield line("gpu_allocation_host_activity_ratio", cpu, at, **where, uuid=uuid)
                yield line("gpu_allocation_host_io_bytes_per_second", io, at, **where, uuid=uuid)
                yield line("gpu_allocation_host_cpus", 16, at, **where, uuid=uuid)
        where = {**exporter, "scheduler": "slurm", "job_id": "7", "instance": "n9:9400"}
        yield line("gpu_allocation_host_activity_ratio", 0.5, at, **where, uuid="GPU-4")
        yield line("gpu_allocation_host_activity_ratio", 0.9, at, **{**where, "job": "another"}, uuid="GPU-4")
    yield from cadvisor(now)
    yield from holders(now)


def holders(now: int) -> Iterator[str]:
    """What exporters show, with samples until long after the tests."""
    exporter = {"job": "gpu-exporter"}
    for at in range(now - 60, now + 1800, 30):
        for node, uuid, uid in (("n1", "GPU-1", "uid-a"), ("n2", "GPU-2", "uid-b"), ("n2", "GPU-3", "")):
            where = {**exporter, **whose("a"), "node": node, "instance": f"{node}:9400", "uuid": uuid}
            yield line("gpu_allocation_info", 1, at, **where, **({"pod_uid": uid} if uid else {}))
            yield line("gpu_allocation_start_timestamp_seconds", now - 7000 - int(uuid[-1]), at, **where)
        for job, uuid in (("gpu-exporter", "GPU-4"), ("another", "GPU-5")):
            where = {"job": job, "scheduler": "slurm", "job_id": "7", "instance": "n9:9400", "uuid": uuid}
            yield line("gpu_allocation_info", 1, at, **where)
        for place, age_s in (
            ({"node": "n1"}, 0),
            ({"node": "n2"}, 61),
            ({"instance": "n9:9400"}, 1),
            ({"node": "n(1"}, 9),
        ):
            yield line(
                "gpu_exporter_last_sample_timestamp_seconds", at - age_s, at, **{"instance": "x", **exporter, **place}
            )


REST_S = 2 * 3600
# By pod: its kubelet, CPUs, bytes per second, and for how many seconds it has had series.
PODS: dict[str, tuple[str, float, float | None, float]] = {
    "quiet": ("k1", 0.01, 1000.0, REST_S),
    "no-io": ("k1", 0.01, None, REST_S),  # a container without I/O has no series
    "blind": ("k2", 0.01, None, REST_S),  # the kubelet has no I/O series for any pod
    "young": ("k1", 0.01, 0.0, REST_S / 2),
    "once": ("k1", 0.01, 0.0, REST_S),  # ten busy minutes, an hour ago
    "disk": ("k1", 0.01, 5e8, REST_S),
    "whole": ("k1", 0.01, 0.0, REST_S),  # the runtime has series of pods, but not of containers
}


def cadvisor(now: int) -> Iterator[str]:
    for pod, (kubelet, cpu, io, since) in PODS.items():
        where = {"namespace": "ml", "pod": pod, "instance": kubelet, "job": "kubelet"}
        container = {} if pod == "whole" else {"container": "c"}
        used = moved = 0.0
        for second in range(-int(since) - 600, 61, 30):
            busy = pod == "once" and -4200 < second <= -3600
            used += 30 * (1.0 if busy else cpu)
            moved += 30 * (io or 0.0)
            at = now + second
            yield line("container_cpu_usage_seconds_total", round(used, 3), at, **where, **container)
            if container:  # cAdvisor adds these series for the pod and its pause container
                yield line("container_cpu_usage_seconds_total", round(used, 3), at, **where)
            if io is not None:
                yield line("container_fs_writes_bytes_total", round(moved), at, **where, **container)


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
    with Processes(directory) as processes:
        prometheus = Prometheus(processes, directory / "prometheus", {})
        _, alertmanager = start_alertmanager(processes, directory / "alertmanager", webhook.url)
        yield prometheus, f"http://{alertmanager}", webhook
    webhook.close()


def proofs(servers: tuple[Prometheus, str, Webhook], filters: tuple[str, ...] = (), matcher: str = MATCHER) -> Proofs:
    prometheus, alertmanager, _ = servers
    return Proofs(
        parse_address(prometheus.url), parse_address(alertmanager), filters, matcher, 30.0, fetch_text, fetch_text
    )


def alert(name: HolderName, since_s: float, alertname: str = ALERT, **more: str) -> dict[str, Any]:
    who = {"namespace": name.namespace, "pod": name.name} if name.namespace else {"job_id": name.name}
    labels = {"alertname": alertname, "audience": "owner", "severity": "warning", "scheduler": name.scheduler}
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - since_s))
    return {"labels": {**labels, **who, **more}, "annotations": {}, "startsAt": moment}


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read() or b"null")


def test_demand_is_the_number_of_gpus_wanted_all_the_time_in_the_holders_pools(
    servers: tuple[Prometheus, str, Webhook],
) -> None:
    """The demand of one pod and of one tenant is limited."""
    assert proofs(servers).read_demand([A, B, JOB]) == {A: {"nvidia_com_gpu": 3.0}}


def test_the_demand_of_a_pool_is_zero_only_where_samples_prove_it(servers: tuple[Prometheus, str, Webhook]) -> None:
    pools = ["nvidia_com_gpu", "gpu(short)", "gpu-long", "gap", "none"]
    assert proofs(servers).read_pending(pools) == {"nvidia_com_gpu": 3.0, "gpu(short)": 0.0}


def test_explain_reads_how_many_gpus_of_the_holders_pools_are_waited_for(
    servers: tuple[Prometheus, str, Webhook],
) -> None:
    options = PromQLOptions(parse_address(servers[0].url), 3600.0, 7200.0, 'job="gpu-exporter"')
    source = PromQLSource(options, SYSTEM_CLOCK)
    assert source.read_waiting(A) == {"nvidia_com_gpu": 1000.0}
    assert source.read_waiting(JOB) == {"gpu-long": 1000.0}
    assert source.read_waiting(B) == {}, "no pod or job waits for its pool"
    assert source.read_waiting(A._replace(namespace="other")) == {}


def test_the_host_work_of_holders_is_read_per_node(servers: tuple[Prometheus, str, Webhook]) -> None:
    assert proofs(servers).read_host_work([A, B, JOB]) == {
        A: {"n1": Work(0.02, 1000.0, 16), "n2": Work(0.9, 5e8, 16)},
        JOB: {"n9:9400": Work(0.5, None)},
    }
    assert proofs(servers, matcher='job="another"').read_host_work([A, JOB]) == {JOB: {"n9:9400": Work(0.9, None)}}


def test_the_holders_that_exporters_show_are_read_with_their_pods_and_starts(
    servers: tuple[Prometheus, str, Webhook],
) -> None:
    start = round(proofs(servers).read_shown([A])[A].start_wall or 0.0)
    assert 7000 < time.time() - start < 8000
    assert proofs(servers).read_shown([A, B, JOB, A._replace(namespace="other")]) == {
        A: Shown(frozenset({"uid-a", "uid-b", ""}), float(start)),
        JOB: Shown(frozenset({""}), None),
    }


def test_only_exporters_with_a_fresh_sample_can_confirm_an_end(servers: tuple[Prometheus, str, Webhook]) -> None:
    nodes = {"n1", "n2", "n9:9400", "nowhere", "n(1", *(f"{'x' * 200}{number}" for number in range(100))}
    assert proofs(servers).read_fresh(nodes, 60.0) == {"n1", "n9:9400", "n(1"}
    assert proofs(servers).read_fresh({"n2"}, 3600.0) == {"n2"}
    assert proofs(servers, matcher='job="another"').read_fresh(nodes, 60.0) == set()


def test_pods_are_quiet_only_if_their_cgroups_were_always_quiet(servers: tuple[Prometheus, str, Webhook]) -> None:
    found = proofs(servers).read_rest("ml", [*PODS, "unseen"], REST_S)
    assert set(found) == set(PODS) - {"young"}, "half of the time is not most of it"
    cpu = {pod: round(work.cpu or 0.0, 2) for pod, work in found.items()}
    assert cpu == dict.fromkeys(found, 0.01) | {"once": 1.0}, "the most that it did in any five minutes"
    io = {pod: work.io_bytes_per_s for pod, work in found.items()}
    assert io["blind"] is None, "its kubelet shows no series of what is moved"
    assert io["no-io"] == 0.0, "its kubelet shows others'"
    assert io["disk"] == pytest.approx(5e8, rel=0.01) and io["quiet"] == pytest.approx(1000.0, rel=0.01)
    assert proofs(servers).read_rest("other", ["quiet"], REST_S) == {}


def test_an_owner_counts_as_warned_once_notified_and_while_the_alert_is_not_silenced(
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

    post(f"{url}/api/v2/alerts", [alert(A, 9000, cluster="a"), *(alert(B, 9000, cluster=each) for each in "ab")])
    wait_for(lambda: '"b"' in (fetch(f"{url}/api/v2/alerts") or ""), "alerts of two clusters")
    assert set(asks.read_warnings(ALL)) == {A}, (
        "if this site's alerts name no cluster, alerts with a cluster belong to another site"
    )
    with pytest.raises(AnswerError, match=r"alerts of several clusters \('a', 'b'\): select one with --alertmanager"):
        asks.read_warnings([B])
    assert set(proofs(servers, filters=('cluster="b"',)).read_warnings(ALL)) == {B}


def test_alerts_of_a_cluster_that_was_not_chosen_prove_nothing() -> None:
    urls: list[str] = []

    def answer(address: Address, form: Any, most_bytes: int, within_s: float) -> str:
        urls.append(unquote_plus(address.query))
        shown = {**alert(A, 9000, cluster="b"), "receivers": [{"name": "owners"}], "status": {"state": "active"}}
        return json.dumps([shown])

    def asks(matcher: str, *filters: str) -> Proofs:
        return Proofs(parse_address("http://p"), parse_address("http://a"), filters, matcher, 60.0, answer, answer)

    with pytest.raises(
        AnswerError, match="the alerts name cluster b: if it is yours, set --alertmanager.filter='cluster=\"b\"'"
    ):
        asks('job="gpu-exporter"').read_warnings([A])
    assert set(asks("", 'cluster="b"').read_warnings([A])) == {A}
    assert set(asks('job="gpu-exporter",cluster="b"').read_warnings([A])) == {A}
    assert 'filter=cluster="b"' in urls[-1] and 'filter=cluster="b"' not in urls[0]


def test_unavailable_servers_prove_nothing(servers: tuple[Prometheus, str, Webhook]) -> None:
    nowhere = parse_address("http://127.0.0.1:9")
    asks = Proofs(nowhere, nowhere, (), "", 60.0, fetch_text, fetch_text)
    for ask in (
        lambda: asks.read_warnings(ALL),
        lambda: asks.read_demand([A]),
        lambda: asks.read_pending(["p"]),
        lambda: asks.read_host_work([A]),
        lambda: asks.read_rest("ml", ["a"], 7200.0),
        lambda: asks.read_shown([A]),
        lambda: asks.read_fresh(["n1"], 60.0),
    ):
        with pytest.raises(AnswerError, match="refused"):
            ask()


def test_queries_are_limited_to_the_cluster_of_the_evidence() -> None:
    queries: list[str] = []

    def answer(address: Address, form: Any, most_bytes: int, within_s: float) -> str:
        queries.append(form["query"])
        return json.dumps({"status": "success", "data": {"resultType": "vector", "result": []}})

    matcher = 'job="gpu-exporter",cluster="a",slurm_cluster="x"'
    asks = Proofs(parse_address("http://p"), parse_address("http://a"), (), matcher, 60.0, answer, answer)
    asks.read_demand([A])
    asks.read_pending(["p"])
    asks.read_rest("ml", ["a"], 7200.0)
    asks.read_host_work([A])
    asks.read_shown([A])
    asks.read_fresh(["n1"], 60.0)
    assert 'pod=~"a",cluster="a"}' in queries[0] and '{pool=~"p",cluster="a"}' in queries[1]
    assert all('{cluster="a",namespace="ml",pod=~"a"' in query for query in queries[2:-6]) and len(queries) >= 11
    assert all(f"{{{matcher}," in query for query in queries[-6:])
