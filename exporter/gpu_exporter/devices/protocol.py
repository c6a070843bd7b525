"""The one contract between collectors and backends.

A backend lists devices; a device answers single questions. Every method may raise DeviceError and its subclasses;
NotSupported means that this hardware has no such value. Units are base units: the backends convert at the border.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.model import DeviceIdentity


class UtilizationSample(NamedTuple):
    """One entry of the driver's sample ring: mean over the driver's own period that ends at `wall` (Unix seconds)."""

    wall: float
    ratio: float


class Memory(NamedTuple):
    """Bytes. `reserved` is the driver's own share and part of neither `used` nor `free`."""

    total: int
    used: int
    free: int
    reserved: int


class Processes(NamedTuple):
    """How many processes have a context on the device. The numbers are only as good as our sight of processes."""

    compute: int
    graphics: int


class Clocks(NamedTuple):
    """Hertz."""

    sm: float
    memory: float
    sm_max: float


class InstanceIdentity(NamedTuple):
    """One MIG instance. `mig` is "gpu instance id/compute instance id"."""

    uuid: str
    mig: str
    profile: str
    sm_slices: int


class Instance(Protocol):
    """One MIG instance of a device, valid for the present cycle only: handles may be reused for another instance."""

    identity: InstanceIdentity

    def read_memory(self) -> Memory: ...

    def read_graphics_active(self) -> float:
        """Share of time with the graphics or compute engine active, 0 to 1, over the last window (GPM)."""


class Device(Protocol):
    """One physical GPU."""

    identity: DeviceIdentity

    def read_utilization(self) -> float:
        """Share of the driver's last sample period (1/6 to 1 s) with a kernel running, 0 to 1."""

    def read_utilization_samples(self, since_wall: float) -> Sequence[UtilizationSample]:
        """The driver's samples newer than `since_wall`, oldest first; empty when there are none."""

    def read_encoder_utilization(self) -> float: ...

    def read_decoder_utilization(self) -> float: ...

    def read_memory(self) -> Memory: ...

    def read_power(self) -> float:
        """Watts."""

    def read_power_limit(self) -> float:
        """Watts, the enforced limit."""

    def read_energy(self) -> float:
        """Joules since the driver was loaded."""

    def read_temperature(self) -> float:
        """Degrees Celsius of the GPU sensor."""

    def read_clocks(self) -> Clocks: ...

    def read_throttle_seconds(self) -> Mapping[str, float]:
        """Seconds spent in each throttle reason that has a counter here; unsupported reasons are left out."""

    def read_throttle_active(self) -> Mapping[str, bool]:
        """Each throttle reason the device knows: is it active now?"""

    def read_processes(self) -> Processes: ...

    def list_instances(self) -> Sequence[Instance]:
        """MIG instances; empty when MIG is off. Raises NotSupported where the hardware has no MIG."""


class Discovered(NamedTuple):
    """One position of the driver's list: a device, or the error that its handle gave."""

    position: int
    device: Device | None
    error: str = ""


class Backend(Protocol):
    """A source of devices. `name` is shown to people."""

    name: str

    def open(self) -> None:
        """Make the driver ready. Raises DriverUnavailable; may be called again later."""

    def discover(self) -> Sequence[Discovered]:
        """All positions of the driver's list, in index order. Raises DriverUnavailable."""

    def close(self) -> None:
        """Let go of the driver. Never raises."""
