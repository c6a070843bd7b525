"""The project's Helm chart: rendered and installed; its monitors become a configuration of a plain Prometheus."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.testbed.control_plane import ControlPlane
from tests.testbed.node import program

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "gpu-exporter"
RELEASE = "gpu"
RENAMED = {
    "sourceLabels": "source_labels",
    "targetLabel": "target_label",
}


class Helm:
    """Helm with its own folders, with or without a cluster."""

    def __init__(self, home: Path, kubeconfig: Path | None = None) -> None:
        self._environment = {**os.environ, "HELM_CACHE_HOME": str(home), "HELM_CONFIG_HOME": str(home)}
        self._environment |= {"HELM_DATA_HOME": str(home), "KUBECACHEDIR": str(home)}
        if kubeconfig is not None:
            self._environment["KUBECONFIG"] = str(kubeconfig)
        self._values = home / "values.yaml"

    def run(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(program("helm")), *map(str, arguments)],
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0 or not check, f"helm {arguments}: {done.stdout}{done.stderr}"
        return done

    def write_values(self, values: Mapping[str, Any]) -> Path:
        """The file of these values; the next call rewrites it."""
        self._values.write_text(json.dumps(values))
        return self._values

    def _with(self, values: Mapping[str, Any]) -> tuple[str, str]:
        return "--values", str(self.write_values(values))

    def template(self, values: Mapping[str, Any], check: bool = True) -> subprocess.CompletedProcess[str]:
        """The chart's objects as text, with these values over the defaults."""
        return self.run("template", RELEASE, CHART, "--namespace=gpu-exporter", *self._with(values), check=check)

    def objects(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The chart's objects, including hooks."""
        return [each for each in yaml.safe_load_all(self.template(values).stdout) if each]


def find(objects: list[dict[str, Any]], kind: str, ending: str = "") -> dict[str, Any]:
    """The only object of a kind whose name has this ending."""
    (found,) = [each for each in objects if each["kind"] == kind and each["metadata"]["name"].endswith(ending)]
    return found


def _meta(label: str) -> str:
    """A pod's label, with the name that Prometheus's discovery uses."""
    return "__meta_kubernetes_pod_label_" + "".join(letter if letter.isalnum() else "_" for letter in label)


def write_targets(plane: ControlPlane, namespace: str, path: Path) -> None:
    """Write the pods of a namespace as Prometheus's own discovery describes them, for a file_sd.

    Debian builds Prometheus without Kubernetes discovery. Here, pods share the machine's loopback, so the addresses are
    on loopback.
    """
    targets = []
    for pod in plane.core.list_namespaced_pod(namespace).items:
        for container in pod.spec.containers:
            for port in container.ports or ():
                labels = {
                    "__meta_kubernetes_namespace": namespace,
                    "__meta_kubernetes_pod_name": pod.metadata.name,
                    "__meta_kubernetes_pod_node_name": pod.spec.node_name or "",
                    "__meta_kubernetes_pod_container_name": container.name,
                    "__meta_kubernetes_pod_container_port_name": port.name or "",
                    **{_meta(name): value for name, value in (pod.metadata.labels or {}).items()},
                }
                targets.append({"targets": [f"127.0.0.1:{port.container_port}"], "labels": labels})
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(targets))
    fresh.rename(path)


def scrape_config(monitor: Mapping[str, Any], targets: Path) -> dict[str, Any]:
    """The scrape configuration that the Prometheus operator makes of a PodMonitor: its labels, then the relabelings."""
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    relabelings: list[dict[str, Any]] = []
    for label, value in monitor["spec"]["selector"]["matchLabels"].items():
        relabelings.append({"action": "keep", "source_labels": [_meta(label)], "regex": value})
    port = ["__meta_kubernetes_pod_container_port_name"]
    relabelings.append({"action": "keep", "source_labels": port, "regex": endpoint["port"]})
    for target, meta in (
        ("namespace", "__meta_kubernetes_namespace"),
        ("container", "__meta_kubernetes_pod_container_name"),
        ("pod", "__meta_kubernetes_pod_name"),
    ):
        relabelings.append({"source_labels": [meta], "target_label": target})
    relabelings.append({"target_label": "endpoint", "replacement": endpoint["port"]})
    for entry in endpoint["relabelings"]:
        relabelings.append({RENAMED.get(key, key): value for key, value in entry.items()})
    return {
        "job_name": monitor["metadata"]["name"],
        "honor_labels": endpoint.get("honorLabels", False),
        "scrape_interval": endpoint["interval"],
        "scrape_timeout": endpoint["interval"],
        "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}],
        "relabel_configs": relabelings,
    }


def google_scrape_config(monitoring: Mapping[str, Any], targets: Path) -> dict[str, Any]:
    """The scrape configuration that Google's operator makes of a ClusterPodMonitoring or a PodMonitoring.

    Source: pkg/operator/apis/monitoring/v1/pod_config.go of GoogleCloudPlatform/prometheus-engine. It has no honor_labels.
    """
    spec, pod = monitoring["spec"], "__meta_kubernetes_pod"
    (endpoint,) = spec["endpoints"]
    relabelings: list[dict[str, Any]] = [
        {"target_label": label, "replacement": f"the-{label}"} for label in ("project_id", "location", "cluster")
    ]
    for label, value in spec["selector"]["matchLabels"].items():
        relabelings.append({"action": "keep", "source_labels": [_meta(label)], "regex": value})
    sources = {"namespace": "__meta_kubernetes_namespace", "pod": f"{pod}_name", "node": f"{pod}_node_name"}
    sources["container"] = f"{pod}_container_name"
    wanted = list(spec["targetLabels"]["metadata"])
    if monitoring["kind"] == "PodMonitoring":
        here = monitoring["metadata"]["namespace"]
        relabelings.append({"action": "keep", "source_labels": [sources["namespace"]], "regex": here})
        wanted.append("namespace")
    relabelings += [{"source_labels": [sources[label]], "target_label": label} for label in wanted]
    instance, controlled = "__tmp_instance", [f"{pod}_controller_kind", sources["node"]]
    port = f"{pod}_container_port_name"
    relabelings += [
        {"target_label": "job", "replacement": monitoring["metadata"]["name"]},
        {"source_labels": [sources["pod"]], "target_label": instance},
        {"source_labels": controlled, "regex": "DaemonSet;(.*)", "target_label": instance},
        {"action": "keep", "source_labels": [port], "regex": endpoint["port"]},
        {"source_labels": [instance, port], "regex": "(.+);(.+)", "replacement": "$1:$2", "target_label": "instance"},
    ]
    return {
        "job_name": f"{monitoring['kind']}/{monitoring['metadata']['name']}/{endpoint['port']}",
        "honor_labels": False,
        "scheme": endpoint.get("scheme", "http"),
        "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}],
        "relabel_configs": relabelings,
    }
