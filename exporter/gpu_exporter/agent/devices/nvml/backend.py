"""The backend that uses NVML: the driver of this host, or a recording of a driver."""

from __future__ import annotations

from collections.abc import Iterable

from gpu_exporter.agent.devices.errors import (
    DeviceError,
    DriverChanged,
    DriverUnavailable,
)
from gpu_exporter.agent.devices.nvml.device import NvmlDevice
from gpu_exporter.agent.devices.nvml.events import NvmlEventWatch
from gpu_exporter.agent.devices.nvml.library import SYSTEM, Library, LiveLibrary, explain_init
from gpu_exporter.agent.devices.protocol import (
    Device,
    EventWatch,
)
from gpu_exporter.common.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.common.vendor import NVIDIA

COUNT_MAX = 1024  # GPUs of a host; the largest hosts have 16, and 16 positions of virtual GPUs


class NvmlBackend:
    """The driver of this host, or a recording of a driver."""

    def __init__(self, library: Library | None = None, clock: Clock = SYSTEM_CLOCK, name: str = "nvml") -> None:
        self.name = name
        self.vendor = NVIDIA
        self.is_live = library is None
        self.library = library or LiveLibrary(clock)
        self._clock = clock

    def open(self) -> None:
        self.library.open()

    def count(self) -> int:
        try:
            count = int(self.library.ask("nvmlDeviceGetCount"))
        except DeviceError as exc:
            text = explain_init(exc.error) if isinstance(exc, DriverChanged) else str(exc)
            raise DriverUnavailable(text, changed=isinstance(exc, DriverChanged)) from exc
        if not 0 <= count <= COUNT_MAX:
            raise DriverUnavailable(f"the driver reports {count} GPUs, which is not a valid number")
        return count

    def find(self, position: int) -> Device:
        handle = self.library.ask("nvmlDeviceGetHandleByIndex", SYSTEM, position)
        return NvmlDevice(self.library, handle, position, self._clock)

    def watch_events(self, devices: Iterable[Device]) -> EventWatch:
        known = [(device.handle, device.identity.uuid) for device in devices if isinstance(device, NvmlDevice)]
        return NvmlEventWatch(self.library, known)

    def close(self) -> None:
        self.library.close()
