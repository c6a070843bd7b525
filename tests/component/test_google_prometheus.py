"""Google's managed Prometheus, as far as its operator's configuration tells: a real Prometheus scrapes by it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from tests.component.test_absence import Page, ask
from tests.testbed.chart import CHART, Helm, find, google_scrape_config, scrape_config
from tests.testbed.control_plane import ControlPlane
from tests.testbed.node import static_pod
from tests.testbed.processes import Processes, wait_for
from tests.testbed.servers import Prometheus

pytestmark = pytest.mark.kubernetes
ROOT = Path(__file__).resolve().parents[2]
PRESET = yaml.safe_load((CHART / "presets" / "google-managed-prometheus.yaml").read_text("utf-8"))
SERIES = (ROOT / "tests" / "golden" / "demo.prom").read_text("utf-8")
OF_TARGET = {"job", "instance", "node", "project_id", "location", "cluster"}
# The operator refuses other metadata, and a relabeling onto these labels (its CRDs and pod_config.go).
METADATA = {"container", "namespace", "node", "pod", "top_level_controller_name", "top_level_controller_type"}
PROTECTED = {"project_id", "location", "cluster", "namespace", "job", "instance", "__address__"}


@pytest.fixture
def objects(tmp_path: Path) -> list[dict[str, Any]]:
    return Helm(tmp_path).objects({**PRESET, "podMonitor": {"enabled": True}})


@pytest.fixture
def page() -> Iterator[Page]:
    made = Page(SERIES)
    yield made
    made.close()


def target(objects: list[dict[str, Any]], address: str, **changed: str) -> dict[str, Any]:
    """The agent's pod, as Prometheus's discovery describes it."""
    agent = find(objects, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    names = {"name": "gpu-exporter-agent-x7x2p", "node_name": "gpu-1", "controller_kind": "DaemonSet"}
    names |= {"container_name": "agent", "container_port_name": "metrics", **changed}
    meta = {f"__meta_kubernetes_pod_{name}": value for name, value in names.items()}
    for label, value in agent.items():
        meta["__meta_kubernetes_pod_label_" + "".join(c if c.isalnum() else "_" for c in label)] = value
    return {"targets": [address], "labels": {"__meta_kubernetes_namespace": "gpu-exporter", **meta}}


def series(server: Prometheus, job: str) -> set[str]:
    """Every series of the exporter, without the labels of its target."""
    rows = [labels for labels, _ in server.query(f'{{__name__=~"gpu_.+",job="{job}"}}')]
    return {json.dumps({k: v for k, v in each.items() if k not in OF_TARGET}, sort_keys=True) for each in rows}


def test_the_preset_keeps_every_label_that_a_pod_monitor_keeps(
    processes: Processes, tmp_path: Path, objects: list[dict[str, Any]], page: Page
) -> None:
    targets = tmp_path / "targets.json"
    targets.write_text(
        json.dumps([target(objects, page.address), target(objects, page.address, container_port_name="x")])
    )
    (agent, reconciler) = [each for each in objects if each["kind"] == "ClusterPodMonitoring"]
    usual = scrape_config(find(objects, "PodMonitor", "-agent"), targets)
    usual["relabel_configs"].append({"target_label": "job", "replacement": "usual"})
    wrong = {**agent, "kind": "PodMonitoring", "metadata": {"name": "wrong", "namespace": "gpu-exporter"}}
    server = Prometheus(
        *(processes, tmp_path / "prometheus", {}),
        scrape_configs=[usual, *(google_scrape_config(each, targets) for each in (agent, reconciler, wrong))],
    )
    wait_for(lambda: len(server.query("up == 1")) == 3, "three scrapes")
    (labels,) = (labels for labels, _ in server.query('up{job="gpu-exporter"}'))
    given = {each: f"the-{each}" for each in ("project_id", "location", "cluster")}
    assert labels == {"__name__": "up", "job": "gpu-exporter", "instance": "gpu-1:metrics", "node": "gpu-1", **given}
    managed = series(server, "gpu-exporter")
    assert managed == series(server, "usual") and len(managed) > 1000
    holders = server.query('count by (namespace) (gpu_allocation_info{job="gpu-exporter",namespace!=""})')
    assert {labels["namespace"] for labels, _ in holders} == {"cv", "nlp", "serving", "vision"}
    # A PodMonitoring renames the holder's namespace whatever its metadata: then nothing is decided.
    assert server.query('gpu_allocation_info{job="wrong",exported_namespace="cv",namespace="gpu-exporter"}')
    code, said = ask(server, "reconcile", "--once", '--source.matcher=job="wrong"')
    assert (code, "made no decisions" in said, "preset google-managed-prometheus" in said) == (3, True, True), said
    code, said = ask(server, "reconcile", "--once")
    assert code == 0, said


@pytest.mark.parametrize("parts", [(), ("agent",), ("reconciler",)])
def test_only_the_parts_of_the_release_are_scraped(tmp_path: Path, parts: tuple[str, ...]) -> None:
    switched = {part: {"enabled": part in parts} for part in ("agent", "reconciler")}
    found = Helm(tmp_path).objects({**PRESET, **switched})
    selected = [each["spec"]["selector"]["matchLabels"] for each in found if each["kind"] == "ClusterPodMonitoring"]
    assert tuple(labels["app.kubernetes.io/component"] for labels in selected) == parts
    assert any(each["kind"] == "ValidatingAdmissionPolicy" for each in found) == bool(parts)


def test_the_operator_would_accept_the_preset(objects: list[dict[str, Any]]) -> None:
    found = [each for each in objects if each["kind"] == "ClusterPodMonitoring"]
    assert [each["metadata"]["name"] for each in found] == ["gpu-exporter", "gpu-exporter-reconciler"]
    for each in found:
        assert "namespace" not in each["metadata"], "the kind belongs to the cluster"
        assert each["spec"].keys() == {"selector", "endpoints", "targetLabels"}
        (endpoint,) = each["spec"]["endpoints"]
        assert endpoint.keys() == {"port", "interval", "scheme"} and endpoint["scheme"] == "http"
        metadata = set(each["spec"]["targetLabels"]["metadata"])
        assert metadata <= METADATA and not metadata & {"namespace", "pod", "container"}


def test_no_series_has_a_label_that_google_sets() -> None:
    for text in (SERIES, (ROOT / "docs" / "metrics.md").read_text("utf-8")):
        for label in PROTECTED - {"namespace"}:
            assert f'{label}="' not in text and f"`{label}`" not in text


def test_only_the_release_may_have_pods_with_its_labels(plane: ControlPlane, objects: list[dict[str, Any]]) -> None:
    api = client.AdmissionregistrationV1Api(plane.api)
    labels = find(objects, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    for name in ("gpu-exporter", "tenant"):
        plane.core.create_namespace({"metadata": {"name": name}})
        wait_for(lambda name=name: plane.has_account(name), "the account")  # type: ignore[misc]

    def make(namespace: str, name: str, **given: str) -> int:
        pod = static_pod(name, 0)
        pod["metadata"] |= {"namespace": namespace, "labels": given}
        try:
            plane.core.create_namespaced_pod(namespace, pod)
        except client.ApiException as exc:
            return int(exc.status or 0)
        return 201

    def change(name: str, given: dict[str, str | None], part: str = "") -> int:
        call = getattr(plane.core, f"patch_namespaced_pod{part}")
        try:
            call(
                name,
                "tenant",
                {"metadata": {"labels": given}, "status": {"message": name}}
                if part
                else {"metadata": {"labels": given}},
            )
        except client.ApiException as exc:
            return int(exc.status or 0)
        return 200

    assert make("tenant", "before", **labels) == 201
    api.create_validating_admission_policy(find(objects, "ValidatingAdmissionPolicy"))
    api.create_validating_admission_policy_binding(find(objects, "ValidatingAdmissionPolicyBinding"))
    names = iter(range(100))
    wait_for(lambda: make("tenant", f"try-{next(names)}", **labels) == 422, "the policy", each_s=0.5)
    assert make("gpu-exporter", "agent", **labels) == 201
    assert make("tenant", "own", app="own") == 201
    mine = {key: str(value) for key, value in labels.items()}
    assert (change("own", {"app": "b"}), change("own", mine), change("own", mine, "_status")) == (200, 422, 422)
    assert change("before", {}, "_status") == 200, "its kubelet still reports"
    assert change("before", {"app.kubernetes.io/name": None}) == 200
