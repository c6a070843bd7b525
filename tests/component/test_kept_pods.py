"""Pods that keep idle GPUs on a real API server: each is marked, or counted with the reason why it keeps them."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes import client

from gpu_exporter.reconciler.decision.policy import LABEL
from gpu_exporter.reconciler.telemetry import Telemetry
from tests.component.pods_bench import POLICY, Bench
from tests.testbed.node import static_pod

pytestmark = pytest.mark.kubernetes
APPS, CUSTOM = "apps/v1", "evil.example/v1"
CRITICAL = {"priorityClassName": "system-node-critical"}
IDLE_S = 130.0


def daemon_set(bench: Bench, name: str) -> str:
    """A DaemonSet whose pods run on no node. Returns its UID."""
    template = {"metadata": {"labels": {"app": name}}, "spec": {"containers": [{"name": "a", "image": "x"}]}}
    body = {"metadata": {"name": name}, "spec": {"selector": {"matchLabels": {"app": name}}, "template": template}}
    return str(client.AppsV1Api(bench.plane.api).create_namespaced_daemon_set(bench.namespace, body).metadata.uid)


def run(bench: Bench, name: str, *references: dict[str, Any], **spec: Any) -> None:
    """An idle pod with these owner references, and these fields of its spec."""
    labels = {"app": name}  # the DaemonSet of-daemonset selects it: its controller would release any other pod
    pod = static_pod(name, 1, namespace=bench.namespace, labels=labels, ownerReferences=list(references))
    uid = bench.plane.create_pod({**pod, "spec": {**pod["spec"], **spec}})
    bench.set_running(name, 9000.0)
    bench.source.pods[name] = (uid, IDLE_S)


def count(bench: Bench) -> tuple[dict[str, float], dict[str, float]]:
    """Runs a cycle. Returns the idle GPUs of the namespace by exit, and the spared GPUs by reason."""
    telemetry = Telemetry()
    bench.run()
    cycle = bench.cycle
    telemetry.note_cycle(0.0, True, cycle.standing, cycle.decisions, cycle.frozen, cycle.unmarked)
    exits: dict[str, float] = {}
    reasons: dict[str, float] = {}
    for family in telemetry.registry.collect():
        for sample in family.samples:
            if sample.labels.get("tenant") == bench.namespace:
                found, key = (exits, "exit") if "exit" in sample.labels else (reasons, "reason")
                found[sample.labels[key]] = sample.value
    assert telemetry.registry.get_sample_value("gpu_reconciler_unexplained_total") == 0
    assert sum(exits.values()) == len(bench.source.pods)
    assert sum(reasons.values()) == exits.get("spared", 0)
    return exits, reasons


def test_only_a_daemonset_that_controls_the_pod_shields_it_and_the_pod_is_counted(bench: Bench) -> None:
    uid = daemon_set(bench, "of-daemonset")
    own = {"apiVersion": APPS, "kind": "DaemonSet", "name": "of-daemonset", "uid": uid}
    run(bench, "of-daemonset", {**own, "controller": True})
    run(bench, "names-daemonset", own)
    custom = {**own, "apiVersion": CUSTOM, "name": "mine", "uid": "uid"}
    run(bench, "names-custom-kind", custom)
    run(bench, "of-custom-kind", {**custom, "controller": True})
    assert count(bench) == ({"marked": 2, "spared": 2}, {"daemonset": 1, "unknown": 1})
    marked = {name for name in bench.source.pods if bench.labels(name).get(LABEL) == "underused"}
    assert marked == {"names-daemonset", "names-custom-kind"}


def test_a_critical_pod_and_a_container_that_restarts_are_counted(bench: Bench) -> None:
    run(bench, "critical", **CRITICAL)
    run(bench, "restarts")
    bench.set_running("restarts", 100.0)
    run(bench, "idle")
    assert count(bench) == ({"marked": 1, "spared": 2}, {"critical": 1, "restarted": 1})
    assert count(bench) == ({"marked": 1, "spared": 2}, {"critical": 1, "restarted": 1}), "in each cycle"
    assert LABEL not in bench.labels("critical")


def test_in_a_namespace_of_the_cluster_daemonsets_and_critical_pods_are_left_out(bench: Bench) -> None:
    bench.policy = POLICY._replace(system_namespaces=f"kube-system, {bench.namespace}")
    bench.mark_with(sets_condition=False)
    own = {"apiVersion": APPS, "kind": "DaemonSet", "name": "of-daemonset", "uid": daemon_set(bench, "of-daemonset")}
    run(bench, "plain")
    assert count(bench) == ({"spared": 1}, {"critical": 1}), "no mark, but an ordinary pod is counted"
    del bench.source.pods["plain"]
    for name, references, spec in (("critical", (), CRITICAL), ("of-daemonset", ({**own, "controller": True},), {})):
        run(bench, name, *references, **spec)
        bench.run()
        assert bench.cycle.unmarked[next(iter(bench.cycle.unmarked))] == "system", name
        assert LABEL not in bench.labels(name)
        del bench.source.pods[name]
