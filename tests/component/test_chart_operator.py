"""Beside NVIDIA's GPU operator: its label removes the agent's pod before a driver changes, and brings it back afterwards.

The nodes are objects of a real API server, and have no kubelet. The real controller manager makes and removes the pods.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from tests.testbed.chart import CHART, RELEASE, Helm
from tests.testbed.control_plane import ControlPlane
from tests.testbed.gpu_operator import DEPLOY as LABEL
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.kubernetes
NAMESPACE = "gpu-exporter"
NODES = {  # labels and taints: mixed clusters have all of these
    "gpu-1": ({LABEL: "true"}, [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]),
    "gpu-2": ({LABEL: "true"}, [{"key": "team", "value": "bio", "effect": "NoExecute"}]),
    "cpu-1": ({}, []),
    "virtual": ({LABEL: "true", "type": "virtual-kubelet"}, []),
    "fargate": ({LABEL: "true", "eks.amazonaws.com/compute-type": "fargate"}, []),
}


@pytest.fixture
def installed(plane: ControlPlane, tmp_path: Path) -> Iterator[Helm]:
    for name, (labels, taints) in NODES.items():
        plane.core.create_node(
            {
                "metadata": {"name": name, "labels": {"kubernetes.io/os": "linux", **labels}},
                "spec": {"taints": taints},
            }
        )
    runtimes = client.NodeV1Api(plane.api)
    runtimes.create_runtime_class({"metadata": {"name": "nvidia"}, "handler": "nvidia"})  # the operator makes it
    helm = Helm(tmp_path, plane.admin)
    where = (f"--namespace={NAMESPACE}", "--create-namespace", "--values", CHART / "presets" / "gpu-operator.yaml")
    helm.run("install", RELEASE, CHART, *where)
    yield helm
    helm.run("uninstall", RELEASE, f"--namespace={NAMESPACE}")
    for name in NODES:
        plane.core.delete_node(name)
    runtimes.delete_runtime_class("nvidia")


def agents(plane: ControlPlane) -> set[str]:
    """The nodes that have an agent's pod. Does the scheduler's and the kubelet's part: binds pods, and lets them end."""
    found = set()
    for pod in plane.core.list_namespaced_pod(NAMESPACE, label_selector="app.kubernetes.io/component=agent").items:
        name, node = pod.metadata.name, pod.spec.node_name
        if pod.metadata.deletion_timestamp is not None:
            plane.core.delete_namespaced_pod(name, NAMESPACE, grace_period_seconds=0)
        elif node is not None:
            found.add(node)
        else:  # a DaemonSet's pod names its node in its affinity
            terms = pod.spec.affinity.node_affinity.required_during_scheduling_ignored_during_execution
            node = terms.node_selector_terms[0].match_fields[0].values[0]
            binding = {"metadata": {"name": name}, "target": {"kind": "Node", "name": node}}
            plane.core.create_namespaced_pod_binding(name, NAMESPACE, binding, _preload_content=False)
    return found


def test_the_operators_label_removes_the_agent_before_a_driver_changes_and_restores_it(
    plane: ControlPlane, installed: Helm
) -> None:
    wait_for(lambda: agents(plane) == {"gpu-1", "gpu-2"}, "an agent on each node with GPUs, and on no other")
    for value, expected in (
        ("paused-for-driver-upgrade", {"gpu-2"}),
        ("true", {"gpu-1", "gpu-2"}),
        ("paused-for-mig-change", {"gpu-2"}),
        ("true", {"gpu-1", "gpu-2"}),
    ):
        began = time.monotonic()
        plane.core.patch_node("gpu-1", {"metadata": {"labels": {LABEL: value}}})
        wait_for(lambda expected=expected: agents(plane) == expected, f"the agents while the label is {value}")
        print(f"{value}: {time.monotonic() - began:.1f} s")
