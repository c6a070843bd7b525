"""A kubelet's PodResources server with the real gRPC and protobuf implementations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc

from tests.testbed.stubs import compile_stubs


def messages() -> ModuleType:
    """The generated message classes."""
    return compile_stubs("podresources")[0]


def begin_container(logs: Path, pod: str, number: int = 0, container: str = "main") -> Path:
    """Write the log files of a container's start `number` below /var/log/pods; returns the folder.

    `pod` is NAMESPACE_NAME_UID.
    """
    folder = logs / pod / container
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{number}.log").touch()
    return folder


class Kubelet:
    """Answers List from `pods`: (namespace, pod) to {container: {resource: device ids}}.

    `claims`: for dynamic resource allocation, (namespace, pod, container) to [(driver, names of CDI devices)], as
    kubelets before 1.34 list them. `claimed`: likewise to [(driver, device, share id or "")].
    """

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.pods: dict[tuple[str, str], Mapping[str, Mapping[str, Sequence[str]]]] = {}
        self.claims: dict[tuple[str, str, str], Sequence[tuple[str, Sequence[str]]]] = {}
        self.claimed: dict[tuple[str, str, str], Sequence[tuple[str, str, str]]] = {}
        self.allocatable: list[str] = []
        self.status: grpc.StatusCode | None = None
        self.listed = 0  # number of List calls that were answered
        self._server: grpc.Server | None = None

    def flags(self, logs: Path) -> tuple[str, ...]:
        """Flags that make gpu-exporter query only this kubelet; `logs`: the folder that begin_container writes to."""
        return (
            "--attribution.kubelet",
            f"--attribution.kubelet.socket={self.socket}",
            f"--attribution.kubelet.logs={logs}",
            "--no-attribution.slurm",
        )

    def start(self) -> None:
        pb, pb_grpc = compile_stubs("podresources")
        kubelet = self

        class Servicer(pb_grpc.PodResourcesListerServicer):  # type: ignore[misc, name-defined]
            def List(self, request: Any, context: Any) -> Any:
                kubelet.listed += 1
                if kubelet.status is not None:
                    context.abort(kubelet.status, "rejected by rate limit")
                response = pb.ListPodResourcesResponse()
                for (namespace, name), containers in kubelet.pods.items():
                    pod = response.pod_resources.add(name=name, namespace=namespace)
                    for container_name, resources in containers.items():
                        container = pod.containers.add(name=container_name)
                        for resource, ids in resources.items():
                            container.devices.add(resource_name=resource, device_ids=ids)
                        for driver, names in kubelet.claims.get((namespace, name, container_name), ()):
                            dynamic = container.dynamic_resources.add(claim_name="claim", claim_namespace=namespace)
                            claim = dynamic.claim_resources.add(driver_name=driver)
                            for cdi in names:
                                claim.cdi_devices.add(name=cdi)
                        for driver, device, share in kubelet.claimed.get((namespace, name, container_name), ()):
                            dynamic = container.dynamic_resources.add(claim_name="claim", claim_namespace=namespace)
                            claim = dynamic.claim_resources.add(driver_name=driver, pool_name="node")
                            claim.device_name = device
                            claim.cdi_devices.add(name=f"k8s.{driver}/claim=uid-{device}")
                            if share:
                                claim.share_id = share
                return response

            def GetAllocatableResources(self, request: Any, context: Any) -> Any:
                response = pb.AllocatableResourcesResponse()
                if kubelet.allocatable:
                    response.devices.add(resource_name="nvidia.com/gpu", device_ids=kubelet.allocatable)
                return response

        self._server = grpc.server(ThreadPoolExecutor(2))
        pb_grpc.add_PodResourcesListerServicer_to_server(Servicer(), self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None
