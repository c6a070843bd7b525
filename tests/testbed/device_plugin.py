"""A device plugin that allocates GPUs by UUID, as NVIDIA's plugin does by default."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from tests.testbed.stubs import compile_stubs

RESOURCE = "nvidia.com/gpu"
ENDPOINT = "gpu-test.sock"


class DevicePlugin:
    """A plugin that is registered with one kubelet until `stop`.

    A restarted kubelet deletes all sockets, so the plugin must register again after each restart.
    """

    def __init__(
        self, directory: Path, uuids: Sequence[str], resource: str = RESOURCE, endpoint: str = ENDPOINT
    ) -> None:
        """`directory`: the kubelet's device-plugins folder; `uuids`: ids of the devices of `resource`."""
        self._directory = directory
        self._uuids = tuple(uuids)
        self._resource = resource
        self._endpoint = endpoint
        self._server: grpc.Server | None = None
        self._changed = threading.Condition()
        self._unhealthy: frozenset[str] = frozenset()
        self._run = 0  # number of the present server: the stream of an older server ends

    def register(self) -> None:
        """Serve, and register with the kubelet."""
        self.stop()
        pb, pb_grpc = compile_stubs("deviceplugin")
        plugin, run = self, self._run

        class Servicer(pb_grpc.DevicePluginServicer):  # type: ignore[misc, name-defined]
            def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:
                return pb.DevicePluginOptions()

            def ListAndWatch(self, request: Any, context: Any) -> Iterator[Any]:
                for unhealthy in plugin._watch(run):
                    devices = [
                        pb.Device(ID=uuid, health="Unhealthy" if uuid in unhealthy else "Healthy")
                        for uuid in plugin._uuids
                    ]
                    yield pb.ListAndWatchResponse(devices=devices)

            def Allocate(self, request: Any, context: Any) -> Any:
                return pb.AllocateResponse(
                    container_responses=[
                        pb.ContainerAllocateResponse(envs={"NVIDIA_VISIBLE_DEVICES": ",".join(each.devices_ids)})
                        for each in request.container_requests
                    ]
                )

        socket = self._directory / self._endpoint
        socket.unlink(missing_ok=True)
        self._server = grpc.server(ThreadPoolExecutor(4))
        pb_grpc.add_DevicePluginServicer_to_server(Servicer(), self._server)
        self._server.add_insecure_port(f"unix:{socket}")
        self._server.start()
        with grpc.insecure_channel(f"unix:{self._directory / 'kubelet.sock'}") as channel:
            request = pb.RegisterRequest(version="v1beta1", endpoint=self._endpoint, resource_name=self._resource)
            pb_grpc.RegistrationStub(channel).Register(request, timeout=10)

    def call_unhealthy(self, *uuids: str) -> None:
        """Report exactly these devices as unhealthy from now on."""
        with self._changed:
            self._unhealthy = frozenset(uuids)
            self._changed.notify_all()

    def _watch(self, run: int) -> Iterator[frozenset[str]]:
        """Yield the unhealthy devices now and after each change."""
        said: list[frozenset[str]] = []
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._run != run or said[-1:] != [self._unhealthy])
                if self._run != run:
                    return
                said.append(self._unhealthy)
            yield said[-1]

    def stop(self) -> None:
        with self._changed:
            self._run += 1
            self._changed.notify_all()
        if self._server is not None:
            self._server.stop(None).wait()
            self._server = None
