"""Which exporters are missing: holders in a real Prometheus's past, against the pods of a real API server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes.client.exceptions import ApiException

from gpu_exporter.common.address import parse_address
from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.reconciler.decision.brakes import EXPORTERS
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.evidence.promql import PromQLOptions, PromQLSource
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.judge import Judgement, judge_of
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.marker import PodMarker
from tests.component.pods_bench import POLICY, Bench
from tests.component.test_spot_nodes import Pod
from tests.testbed.control_plane import ControlPlane
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.node import static_pod
from tests.testbed.processes import Processes, wait_for
from tests.testbed.servers import Prometheus, require, write_history

pytestmark = [pytest.mark.kubernetes, pytest.mark.servers]
KEEP = {"finalizers": ["example.com/keep"]}


def living(bench: Bench, *pods: tuple[str, str], namespace: str = "") -> set[str]:
    """The names of the pods among these (name, UID) that have not ended."""
    asked = [(HolderName("kubernetes", namespace or bench.namespace, name), uid) for name, uid in pods]
    return {name.name for name, _ in bench.marker.find_living(asked)}


def test_a_pod_lives_until_it_has_ended_and_only_under_its_own_uid(bench: Bench) -> None:
    pods = {name: bench.run_pod(name) for name in ("runs", "succeeded", "failed", "again")}
    for name in ("succeeded", "failed"):
        status = {"status": {"phase": name.title()}}
        bench.plane.core.patch_namespaced_pod_status(name, bench.namespace, status)
    assert living(bench, *pods.items(), ("runs", "other-uid"), ("never", "")) == {"runs", "again"}
    bench.delete_pod("again")
    bench.run_pod("again")
    assert living(bench, ("again", pods["again"])) == set(), "another pod has its name"
    assert living(bench, ("again", "")) == {"again"}, "its UID was not known"
    assert living(bench, ("runs", pods["runs"]), namespace="no-such-namespace") == set()


def test_a_finalizer_keeps_a_pod_alive_until_its_node_is_deleted(bench: Bench) -> None:
    core = bench.plane.core
    core.create_node({"metadata": {"name": "spot"}})
    manifest = static_pod("kept", 1, **KEEP)
    manifest["metadata"]["namespace"], manifest["spec"]["nodeName"] = bench.namespace, "spot"
    uid = bench.plane.create_pod(manifest)
    bench.set_running("kept", 9000.0)
    try:
        core.delete_namespaced_pod("kept", bench.namespace, grace_period_seconds=0)
        assert bench.plane.pod("kept", bench.namespace)["metadata"]["deletionTimestamp"]
        assert living(bench, ("kept", uid)) == {"kept"}, "its kubelet may be alive"
        core.delete_node("spot")
        wait_for(lambda: living(bench, ("kept", uid)) == set(), "the controller manager to end the pod", each_s=1.0)
        assert bench.plane.pod("kept", bench.namespace)["status"]["phase"] == "Failed"
    finally:
        core.patch_namespaced_pod("kept", bench.namespace, {"metadata": {"finalizers": None}})


def test_2000_pods_in_20_namespaces_cost_20_requests(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = bench.run_pod("runs")
    asked = [(HolderName("kubernetes", f"ns-{i % 19}", f"pod-{i}"), f"uid-{i}") for i in range(2000)]
    own = (HolderName("kubernetes", bench.namespace, "runs"), uid)
    listed: list[str] = []
    function = bench.marker.api.core.list_namespaced_pod
    monkeypatch.setattr(
        bench.marker.api.core,
        "list_namespaced_pod",
        lambda namespace, **options: (listed.append(namespace), function(namespace, **options))[1],
    )
    assert bench.marker.find_living([*asked, own]) == {own}
    assert len(listed) == 20


def test_pods_count_as_living_while_the_api_server_refuses(bench: Bench) -> None:
    uid = bench.run_pod("runs")
    connection = ControlPlane.connect(bench.plane.node)  # a kubelet may not list the pods of a namespace
    marker = PodMarker(Api(connection), POLICY, resources=GPU_RESOURCES)
    asked = {(HolderName("kubernetes", bench.namespace, name), uid) for name in ("runs", "ended")}
    with pytest.raises(ApiException, match="403"):
        marker.api.core.list_namespaced_pod(bench.namespace)
    assert marker.find_living(asked) == asked


@pytest.fixture
def prometheus(bench: Bench, tmp_path: Path) -> Iterator[Prometheus]:
    """Exporters that report, that have died, and that went away with their nodes, each with one pod of `bench`."""
    require("prometheus", "promtool")
    now = int(time.time()) // 60 * 60
    died, first = now - 600, now - 3 * 3600
    lines: list[str] = []
    for name, silent in {"seen": now + 1, "unseen": died, "finished": died, "held-up": died}.items():
        uid = bench.run_pod(name, **(KEEP if name == "held-up" else {}))
        text = "\n".join(Pod(name, f"n-{name}", first, silent, silent, True).lines())
        text = text.replace(f'pod_uid="{name}"', f'pod_uid="{uid}"').replace('"ml"', f'"{bench.namespace}"')
        lines += text.splitlines()
    write_history(tmp_path, lines)
    with Processes(tmp_path) as processes:
        yield Prometheus(processes, tmp_path, {})
    bench.plane.core.patch_namespaced_pod("held-up", bench.namespace, {"metadata": {"finalizers": None}})


def test_only_the_holders_of_a_missing_exporter_are_frozen(bench: Bench, prometheus: Prometheus) -> None:
    def judge() -> Judgement:
        """The judgement of a reconciler that has just started."""
        options = PromQLOptions(parse_address(prometheus.url), POLICY.candidate_after, POLICY.underused_after)
        source = PromQLSource(options, SYSTEM_CLOCK)
        return judge_of(source, [bench.marker], Rulebook(POLICY)).judge()

    bench.delete_pod("finished")
    bench.plane.core.delete_namespaced_pod("held-up", bench.namespace, grace_period_seconds=0)
    found = judge()
    assert {each.name.name: each.stage for each in found.decisions} == {"seen": "underused"}
    freeze = found.frozen[EXPORTERS]
    assert set(freeze.names or ()) == {
        HolderName("kubernetes", bench.namespace, name) for name in ("unseen", "held-up")
    }
    assert freeze.text == ("no data from n-held-up, n-unseen, where 2 holders may still run")
    assert found.problems == []
    bench.delete_pod("unseen")
    assert set(judge().frozen[EXPORTERS].names or ()) == {HolderName("kubernetes", bench.namespace, "held-up")}
