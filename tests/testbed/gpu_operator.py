"""What a cluster with NVIDIA's GPU operator shows to the chart: labels of the nodes, and a monitor that claims every GPU."""

from __future__ import annotations

import time
from typing import Any

from tests.testbed.control_plane import ControlPlane
from tests.testbed.dra_driver import DraDriver
from tests.testbed.node import NODE, Node, static_pod
from tests.testbed.processes import wait_for

DEPLOY = "nvidia.com/gpu.deploy.dcgm-exporter"
NAMESPACE, MONITOR = "gpu-operator", "nvidia-dcgm-exporter-x"


class GpuOperator:
    """The operator's part on one real node. It also makes nodes without a kubelet: one without GPUs, one virtual."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.label("true")
        others: dict[str, dict[str, str]] = {"cpu-1": {}, "virtual": {DEPLOY: "true", "type": "virtual-kubelet"}}
        for name, labels in others.items():
            body: Any = {"metadata": {"name": name, "labels": {"kubernetes.io/os": "linux", **labels}}}
            plane.core.create_node(body)

    def label(self, value: str) -> float:
        """Set the label by which the operator lets agents run. Returns the time (monotonic)."""
        self._plane.core.patch_node(NODE, {"metadata": {"labels": {DEPLOY: value}}})
        return time.monotonic()

    def run_monitor(self, node: Node, gpus: int) -> DraDriver:
        """Run a pod that claims all of these GPUs with adminAccess. Returns the driver of the claims, which has to stop."""
        devices = [f"gpu-{minor}" for minor in range(gpus)]
        driver = DraDriver(self._plane.api, node.root, NODE, dict.fromkeys(devices, False), "example.com/gpu")
        labels = {"resource.kubernetes.io/admin-access": "true"}
        namespace: Any = {"metadata": {"name": NAMESPACE, "labels": labels}}
        self._plane.core.create_namespace(namespace)
        wait_for(lambda: self._plane.has_account(NAMESPACE), "the namespace's ServiceAccount")
        driver.claim("all", *devices, namespace=NAMESPACE, admin=True)
        pod = static_pod(MONITOR, 0, namespace=NAMESPACE)
        pod["spec"]["resourceClaims"] = [{"name": "gpus", "resourceClaimName": "all"}]
        pod["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpus"}]}
        self._plane.create_pod(pod)
        wait_for(lambda: self._plane.pod(MONITOR, NAMESPACE)["status"]["phase"] == "Running", "the monitor")
        return driver
