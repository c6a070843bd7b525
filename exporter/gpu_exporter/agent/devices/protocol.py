"""The interface between collectors and backends (NVML, a replayed log, a simulation).

A backend counts its devices and finds each by its position. A device has one method for each value. Every method may
raise DeviceError and its subclasses. NotSupported means that this hardware does not have the value. All values are in
base units; the backends convert the driver's units.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from gpu_exporter.agent.devices.errors import DeviceError, NotSupported
from gpu_exporter.common.model.readings import GpuProcess
from gpu_exporter.common.model.units import DeviceIdentity
from gpu_exporter.common.vendor import Vendor

ENGINES = ("encoder", "decoder", "jpeg", "ofa")  # the fixed-function engines with their own utilization


class UtilizationSample(NamedTuple):
    """One entry of the driver's ring buffer: the mean over a period that ends at `wall` (Unix seconds).

    `span_s`: length of this period in seconds, None if the driver does not report it.
    """

    wall: float
    ratio: float
    span_s: float | None = None


class Rates(NamedTuple):
    """Shares (0 to 1) of the driver's last sample period (1/6 to 1 s).

    `gpu`: time in which a kernel ran. `memory`: time in which memory was read or written.
    """

    gpu: float
    memory: float | None


class Memory(NamedTuple):
    """Device memory in bytes. `reserved`: memory of the driver beside `used` and `free`. None if `used` has it."""

    total: int
    used: int
    free: int
    reserved: int | None


class Processes(NamedTuple):
    """The processes with a context on the device that are visible to the exporter.

    `listed`: the compute and graphics processes, None if the driver reports only their number.
    """

    compute: int
    graphics: int
    listed: tuple[GpuProcess, ...] | None = None


class ProcessUtilization(NamedTuple):
    """One process's use of the device since a given time.

    `wall`: Unix seconds of the newest sample. `ratio`: mean share of the time in which kernels of the process ran.
    `is_active`: the process has used the device, including its engines. Both are raw values of the driver: a `ratio`
    above 1 is invalid. The exporter uses the pid only to find the process's cgroup on this host.
    """

    pid: int
    wall: float
    ratio: float
    is_active: bool

    def __repr__(self) -> str:
        return "ProcessUtilization(...)"


class Clocks(NamedTuple):
    """Hertz; None if not reported."""

    sm: float | None
    memory: float | None
    sm_max: float | None


class Traffic(NamedTuple):
    """Bytes received and sent since the driver was loaded, summed over all links. The counters may wrap."""

    rx: float
    tx: float


class Pcie(NamedTuple):
    """PCIe traffic since the driver was loaded, and the number of packets that were sent again (None if unknown)."""

    traffic: Traffic | None
    replays: int | None


class PcieLink(NamedTuple):
    """Present and maximum generation and number of lanes of the PCIe link, for this slot. None if unknown."""

    generation: int | None
    generation_max: int | None
    width: int | None
    width_max: int | None


class Gpm(NamedTuple):
    """GPU performance monitoring over the last `span_s` seconds. Ratios are the driver's values, None if not available.

    `engines`: the busiest of the video, JPEG and optical-flow engines. `missing`: a value that is normally available is
    missing in this reading (an error, NaN, or not a share), so the other values do not prove idleness. `pcie`,
    `nvlink`: bytes per second, sum of both directions. `elapsed_cycles`, `active_cycles`: counters of the SMs that only
    grow, None on drivers without them.
    """

    span_s: float
    graphics: float | None = None
    sm: float | None = None
    occupancy: float | None = None
    tensor: float | None = None
    dram: float | None = None
    fp64: float | None = None
    fp32: float | None = None
    fp16: float | None = None
    pcie: float | None = None
    nvlink: float | None = None
    engines: float | None = None
    missing: bool = False
    elapsed_cycles: float | None = None
    active_cycles: float | None = None


class RowRemaps(NamedTuple):
    """Numbers of remapped memory rows, by cause.

    Also whether a remap waits for a reset, and whether a remap has failed (0 or 1).
    """

    corrected: int
    uncorrected: int
    pending: int
    failed: int


class InstanceIdentity(NamedTuple):
    """One MIG instance. `mig` is "gpu instance id/compute instance id".

    `sm_slices`: the instance's compute slices; a fraction if compute instances share a GPU instance and report no
    slices. `placement`: as in model.InstanceReading. `memory`: "own" if the compute instance is alone on its GPU
    instance. If several share it, the memory is counted once: "first" for the compute instance that gets it, "none" for
    the others.
    """

    uuid: str
    mig: str
    profile: str
    sm_slices: float
    memory_slices: int = 0  # 0 is unknown
    placement: tuple[int, int] | None = None
    memory: Literal["own", "first", "none"] = "own"


class Instance(Protocol):
    """One MIG instance of a device. Valid only in one cycle, because the driver may reuse the handle."""

    identity: InstanceIdentity

    def read_memory(self) -> Memory: ...

    def read_gpm(self) -> Gpm | None:
        """Activity since the last read of the instance. None at the first read, and if the last read is too old."""


class Device:
    """One physical GPU. Each read method raises NotSupported unless a backend overrides it.

    `answers`: number of calls that the driver has answered, to detect a GPU that no longer answers.
    `instances_complete`: whether the last list of instances is complete. `reason`: the NVML error to raise for a
    missing value.
    """

    identity: DeviceIdentity
    answers = 0
    instances_complete = True
    reason = "NVML_ERROR_NOT_SUPPORTED"

    def _nothing(self, call: str) -> NotSupported:
        return NotSupported(call, self.reason)

    def identify(self) -> None:
        """Read the missing parts of the identity. Never raises: `take_errors` returns the errors."""
        return

    def is_alive(self) -> bool:
        """Whether the GPU still answers other calls, after one call has reported a lost GPU or a changed driver."""
        return False

    def first_failure(self) -> str:
        """Name one failed call and its error, "" if no call has failed. An unsupported value is not a failure."""
        return ""

    def read_utilization(self) -> Rates:
        raise self._nothing("nvmlDeviceGetUtilizationRates")

    def read_utilization_samples(self, since_wall: float) -> Sequence[UtilizationSample]:
        """The driver's samples newer than `since_wall` (Unix seconds), oldest first. Empty without new samples."""
        raise self._nothing("nvmlDeviceGetSamples")

    def read_engine(self, engine: str) -> float:
        """Share of time that one of ENGINES was busy, 0 to 1."""
        raise self._nothing(f"nvmlDeviceGet{engine.capitalize()}Utilization")

    def read_engine_samples(self, engine: str, since_wall: float) -> Sequence[UtilizationSample]:
        """The driver's samples of one of ENGINES, as in `read_utilization_samples`."""
        raise self._nothing("nvmlDeviceGetSamples")

    def read_gpm(self) -> Gpm | None:
        """Activity since the last read. None at the first read, and if the last read is too old."""
        raise self._nothing("nvmlGpmMetricsGet")

    def reopen_gpm(self, subject: str) -> None:
        """Close the GPM window of the board (`subject` is "") or of the MIG instance with this UUID. Never raises.

        The next read begins a new window.
        """
        return

    def read_memory(self) -> Memory:
        raise self._nothing("nvmlDeviceGetMemoryInfo")

    def read_power(self) -> float:
        """Watts."""
        raise self._nothing("nvmlDeviceGetPowerUsage")

    def read_power_limit(self) -> float:
        """Watts, the enforced limit."""
        raise self._nothing("nvmlDeviceGetEnforcedPowerLimit")

    def read_default_power_limit(self) -> float:
        """The manufacturer's power limit in watts. It stays the same if an administrator sets another limit."""
        raise self._nothing("nvmlDeviceGetPowerManagementDefaultLimit")

    def read_energy(self) -> float:
        """Joules since the driver was loaded."""
        raise self._nothing("nvmlDeviceGetTotalEnergyConsumption")

    def read_temperature(self) -> float:
        """Degrees Celsius of the GPU sensor."""
        raise self._nothing("nvmlDeviceGetTemperature")

    def read_memory_temperature(self) -> float:
        """Degrees Celsius of the hottest memory sensor."""
        raise self._nothing("nvmlDeviceGetFieldValues")

    def read_temperature_margin(self) -> float:
        """Degrees Celsius below the temperature at which the GPU slows down. Negative above this temperature."""
        raise self._nothing("nvmlDeviceGetMarginTemperature")

    def read_temperature_limits(self) -> Mapping[str, float]:
        """The temperature limits in degrees Celsius (shutdown, slowdown, gpu_max, memory_max). Unsupported limits are
        omitted.
        """
        raise self._nothing("nvmlDeviceGetTemperatureThreshold")

    def read_clocks(self) -> Clocks:
        raise self._nothing("nvmlDeviceGetClockInfo")

    def read_performance_state(self) -> int:
        """0 (highest) to 15 (lowest)."""
        raise self._nothing("nvmlDeviceGetPerformanceState")

    def read_throttle_seconds(self) -> Mapping[str, float]:
        """Seconds for which each throttle reason was active. Reasons without a counter are omitted."""
        raise self._nothing("nvmlDeviceGetFieldValues")

    def read_throttle_active(self) -> Mapping[str, bool]:
        """Whether each throttle reason is active now. Reasons that the device does not support are omitted."""
        raise self._nothing("nvmlDeviceGetCurrentClocksEventReasons")

    def read_pcie(self) -> Pcie:
        raise self._nothing("nvmlDeviceGetFieldValues")

    def read_pcie_link(self) -> PcieLink:
        raise self._nothing("nvmlDeviceGetCurrPcieLinkWidth")

    def read_nvlink(self) -> Traffic:
        raise self._nothing("nvmlDeviceGetFieldValues")

    def read_ecc_errors(self) -> Mapping[str, int]:
        """Errors since the driver was loaded, by severity: corrected, uncorrected."""
        raise self._nothing("nvmlDeviceGetTotalEccErrors")

    def read_row_remaps(self) -> RowRemaps:
        raise self._nothing("nvmlDeviceGetRemappedRows")

    def read_retired_pages(self) -> Mapping[str, int]:
        """The number of retired pages by cause (single_bit, double_bit), on GPUs before Ampere."""
        raise self._nothing("nvmlDeviceGetFieldValues")

    def read_recovery_action(self) -> int:
        """The recovery action that the driver requests, as in nvmlDeviceGpuRecoveryAction_t. 0 is no action."""
        raise self._nothing("nvmlDeviceGetFieldValues")

    def read_processes(self) -> Processes:
        raise self._nothing("nvmlDeviceGetComputeRunningProcesses")

    def read_process_utilization(self, since_wall: float) -> Sequence[ProcessUtilization]:
        """The work of each process that has used the device since `since_wall` (Unix seconds).

        Some entries of the driver have pids that do not exist.
        """
        raise self._nothing("nvmlDeviceGetProcessUtilization")

    def read_persistence_mode(self) -> bool:
        """Whether the driver keeps the GPU initialised while no process uses it."""
        raise self._nothing("nvmlDeviceGetPersistenceMode")

    def list_instances(self) -> Sequence[Instance]:
        """MIG instances; empty if MIG is off. Raises NotSupported if the hardware has no MIG."""
        return ()

    def take_errors(self) -> Sequence[DeviceError]:
        """Return and clear the errors of single values, in calls that otherwise succeeded."""
        return ()

    def renew(self) -> None:
        """Get this device from the driver again after it was lost. Raises DeviceError while it is still lost."""
        return


class XidEvent(NamedTuple):
    """One XID from the driver. `severity`: "fatal" or "nonfatal", "" if the driver does not report it."""

    uuid: str
    xid: int
    severity: str = ""


class EventWatch(Protocol):
    """A registration for events of some devices."""

    covered: frozenset[str]
    """UUIDs of the devices whose events are received here."""

    complete: bool
    """False if the registration of a device failed; it may succeed later."""

    def wait(self, timeout_s: float) -> XidEvent | None:
        """The next event, None if there is no event within `timeout_s`. Raises DeviceError."""

    def close(self) -> None:
        """End the registration. Never raises."""


class Backend(Protocol):
    """A source of devices. `name`: its name in messages. `vendor`: the manufacturer of the devices.

    `is_live`: the devices are GPUs of this host, so PCI addresses and pids refer to this host.
    """

    name: str
    vendor: Vendor
    is_live: bool

    def open(self) -> None:
        """Initialize the driver. Raises DriverUnavailable, and may then be called again later."""

    def count(self) -> int:
        """The number of positions in the driver's list of GPUs. Raises DriverUnavailable."""

    def find(self, position: int) -> Device:
        """The device at one position of the driver's list of GPUs. Raises DeviceError."""

    def watch_events(self, devices: Iterable[Device]) -> EventWatch:
        """Register for the XIDs of these devices.

        Raises NotSupported if the backend has no events, DeviceError if no device can be registered.
        """

    def close(self) -> None:
        """Close the driver. Never raises."""
