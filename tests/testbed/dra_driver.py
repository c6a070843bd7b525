"""A driver of dynamic resource allocation with NVIDIA's device names: a ResourceSlice, and a plugin of the kubelet."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, cast

import grpc
from kubernetes import client

from tests.testbed.processes import wait_for
from tests.testbed.stubs import compile_stubs

DRIVER = "gpu.nvidia.com"
GROUP = ("resource.k8s.io", "v1")
INSIDE = PurePosixPath("/var/lib/kubelet/plugins") / DRIVER / "dra.sock"  # as the kubelet sees it


class DraDriver:
    """Serves one kubelet until `stop`."""

    def __init__(
        self, api: client.ApiClient, directory: Path, node: str, devices: Mapping[str, bool], resource: str
    ) -> None:
        """`directory`: the kubelet's folder, as the test sees it. `devices`: by name, whether several claims may each
        have a part of the device. `resource`: the resource of pods that get a whole GPU without a claim.
        """
        self._resource = resource
        self._objects = client.CustomObjectsApi(api)
        self._plugin = directory / INSIDE.relative_to("/var/lib/kubelet")
        self._registry = directory / "plugins_registry" / f"{DRIVER}-reg.sock"
        self._node = node
        self._devices = dict(devices)
        self._registered = threading.Event()
        self.refusal = ""  # why the kubelet refused this driver
        self._servers = [self._serve(self._plugin), self._serve(self._registry)]
        wait_for(self._registered.is_set, "the kubelet to register the driver")
        assert not self.refusal, self.refusal
        self._publish()

    def _serve(self, socket: Path) -> grpc.Server:
        socket.parent.mkdir(parents=True, exist_ok=True)
        socket.unlink(missing_ok=True)
        server = grpc.server(ThreadPoolExecutor(4))
        if socket == self._plugin:
            self._add_plugin(server)
        else:
            self._add_registration(server)
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        return server

    def _add_registration(self, server: grpc.Server) -> None:
        pb, pb_grpc = compile_stubs("pluginregistration")
        driver = self

        class Servicer(pb_grpc.RegistrationServicer):  # type: ignore[misc, name-defined]
            def GetInfo(self, request: Any, context: Any) -> Any:
                return pb.PluginInfo(
                    type="DRAPlugin", name=DRIVER, endpoint=str(INSIDE), supported_versions=["v1.DRAPlugin"]
                )

            def NotifyRegistrationStatus(self, request: Any, context: Any) -> Any:
                driver.refusal = request.error
                driver._registered.set()
                return pb.RegistrationStatusResponse()

        pb_grpc.add_RegistrationServicer_to_server(Servicer(), server)

    def _add_plugin(self, server: grpc.Server) -> None:
        pb, pb_grpc = compile_stubs("dra")
        driver = self

        class Servicer(pb_grpc.DRAPluginServicer):  # type: ignore[misc, name-defined]
            def NodePrepareResources(self, request: Any, context: Any) -> Any:
                answer = pb.NodePrepareResourcesResponse()
                for claim in request.claims:
                    for result in driver._results(claim.namespace, claim.name):
                        device = answer.claims[claim.uid].devices.add(
                            request_names=[result["request"]], pool_name=result["pool"], device_name=result["device"]
                        )
                        device.cdi_device_ids.append(f"k8s.{DRIVER}/claim={claim.uid}-{result['device']}")
                        if "shareID" in result:
                            device.share_id = result["shareID"]
                return answer

            def NodeUnprepareResources(self, request: Any, context: Any) -> Any:
                answer = pb.NodeUnprepareResourcesResponse()
                for claim in request.claims:
                    answer.claims[claim.uid].error = ""
                return answer

        pb_grpc.add_DRAPluginServicer_to_server(Servicer(), server)

    def _results(self, namespace: str, claim: str) -> list[dict[str, Any]]:
        """The devices that the scheduler allocated to the claim."""
        found = self._objects.get_namespaced_custom_object(*GROUP, namespace, "resourceclaims", claim)
        return list(cast(Any, found)["status"]["allocation"]["devices"]["results"])

    def _publish(self) -> None:
        ours = f'device.driver == "{DRIVER}"'
        self._add_class(DRIVER, {"selectors": [{"cel": {"expression": ours}}]})
        whole = {"selectors": [{"cel": {"expression": f"{ours} && !device.allowMultipleAllocations"}}]}
        self._add_class("whole", {**whole, "extendedResourceName": self._resource})
        devices = [
            {
                "name": name,
                "attributes": {"name": {"string": name}},
                **({"allowMultipleAllocations": True} if many else {}),
            }
            for name, many in self._devices.items()
        ]
        self._objects.create_cluster_custom_object(
            *GROUP,
            "resourceslices",
            {
                "apiVersion": "/".join(GROUP),
                "kind": "ResourceSlice",
                "metadata": {"name": f"{self._node}-gpus"},
                "spec": {
                    "driver": DRIVER,
                    "nodeName": self._node,
                    "pool": {"name": self._node, "generation": 1, "resourceSliceCount": 1},
                    "devices": devices,
                },
            },
        )

    def _add_class(self, name: str, spec: dict[str, Any]) -> None:
        body = {"apiVersion": "/".join(GROUP), "kind": "DeviceClass", "metadata": {"name": name}, "spec": spec}
        self._objects.create_cluster_custom_object(*GROUP, "deviceclasses", body)

    def read_claims(self) -> list[dict[str, Any]]:
        """Every claim of the cluster, as the API server returns it."""
        found = self._objects.list_cluster_custom_object(*GROUP, "resourceclaims")
        return list(cast(Any, found)["items"])

    def claim(self, name: str, *devices: str, namespace: str = "default", admin: bool = False) -> None:
        """Request these devices of this driver in one claim. `admin`: only to monitor them; the API server allows that
        in a namespace with the label for it.
        """
        requests = [
            {
                "name": f"r{position}",
                "exactly": {
                    "deviceClassName": DRIVER,
                    **({"adminAccess": True} if admin else {}),
                    "selectors": [{"cel": {"expression": f'device.attributes["{DRIVER}"].name == "{device}"'}}],
                },
            }
            for position, device in enumerate(devices)
        ]
        self._objects.create_namespaced_custom_object(
            *GROUP,
            namespace,
            "resourceclaims",
            {
                "apiVersion": "/".join(GROUP),
                "kind": "ResourceClaim",
                "metadata": {"name": name},
                "spec": {"devices": {"requests": requests}},
            },
        )

    def stop(self) -> None:
        for server in self._servers:
            server.stop(None).wait()
