"""Receives XIDs from NVML. One event set covers all GPUs, and one thread waits for it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from gpu_exporter.agent.devices.errors import DeviceError, NotSupported
from gpu_exporter.agent.devices.nvml import constants as nvml
from gpu_exporter.agent.devices.nvml.library import Handle, Library
from gpu_exporter.agent.devices.protocol import XidEvent


class NvmlEventWatch:
    """A registration for the XIDs of all devices that support events. Raises DeviceError if no device supports them."""

    def __init__(self, library: Library, devices: Sequence[tuple[Handle, str]]) -> None:
        self._library = library
        self._uuids = {handle.name: uuid for handle, uuid in devices}
        self._events = library.ask("nvmlEventSetCreate")
        covered: set[str] = set()
        failures: list[DeviceError] = []
        for handle, uuid in devices:
            try:
                supported = library.ask("nvmlDeviceGetSupportedEventTypes", handle)
                types = nvml.nvmlEventTypeXidCriticalError & supported
                if types:
                    library.ask("nvmlDeviceRegisterEvents", handle, self._events, types)
                    covered.add(uuid)
            except NotSupported:
                continue
            except DeviceError as exc:  # a failure of one GPU must not stop the events of the others
                failures.append(exc)
        self.covered = frozenset(covered)
        self.complete = not failures
        if not covered:
            self.close()
            raise failures[0] if failures else NotSupported("nvmlDeviceRegisterEvents", "NVML_ERROR_NOT_SUPPORTED")

    def wait(self, timeout_s: float) -> XidEvent | None:
        event = self._library.ask("nvmlEventSetWait_v2", self._events, round(timeout_s * 1e3))  # milliseconds
        if event is None:
            return None
        place, kind, xid = event
        uuid = self._uuids.get(place)
        if uuid is None or not kind & nvml.nvmlEventTypeXidCriticalError:
            return None
        return XidEvent(uuid, int(xid))

    def close(self) -> None:
        with contextlib.suppress(DeviceError):
            self._library.ask("nvmlEventSetFree", self._events)
