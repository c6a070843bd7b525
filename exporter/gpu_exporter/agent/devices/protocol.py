"""The interface between collectors and backends (NVML, a replayed log, a simulation).

A backend counts its devices and finds each by its position. A device has one method for each value. Every method may
raise DeviceError and its subclasses. NotSupported means that this hardware lacks the value. Backends convert the
driver's units: all values are in base units.
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
    """One entry of the driver's ring buffer: the mean ratio over a period that ends at `wall` (Unix seconds).

    `span_s`: length of this period in seconds, None if the driver does not report it.
    """

    wall: float
    ratio: float
    span_s: float | None = None


class Rates(NamedTuple):
    """Ratios (0 to 1) of the driver's last sample period (1/6 to 1 s).

    `gpu`: time in which a kernel ran. `memory`: time in which memory was read or written.
    """

    gpu: float
    memory: float | None


class Memory(NamedTuple):
    """Device memory in bytes. `reserved`: memory of the driver. None if `used` contains it."""

    total: int
    used: int
    free: int
    reserved: int | None


class Processes(NamedTuple):
    """The processes with a context on the device that are visible to the exporter.

    `compute`, `graphics`: their numbers. `listed`: the processes, None if the driver reports only their number.
    """

    compute: int
    graphics: int
    listed: tuple[GpuProcess, ...] | None = None


class ProcessUtilization(NamedTuple):
    """One process's use of the device since a given time. All values are raw values of the driver.

    - `wall`: Unix seconds of the newest sample.
    - `ratio`: mean share of the time in which kernels of the process ran. A value above 1 is invalid.
    - `is_active`: the process has used the device, including its engines.
    - `pid`: used only to find the process's cgroup on this host.
    """

    pid: int
    wall: float
    ratio: float
    is_active: bool

    def __repr__(self) -> str:
        return "ProcessUtilization(...)"


class Clocks(NamedTuple):
    """Clocks in hertz, None if not reported."""

    sm: float | None
    memory: float | None
    sm_max: float | None


class Traffic(NamedTuple):
    """Bytes received and sent since the driver was loaded, summed over all links. The counters may wrap."""

    rx: float
    tx: float


class Pcie(NamedTuple):
    """PCIe traffic since the driver was loaded, None if unknown. `replays`: number of packets that were sent again."""

    traffic: Traffic | None
    replays: int | None


class PcieLink(NamedTuple):
    """Present and maximum generation and lanes of the PCIe link in this slot. None if unknown."""

    generation: int | None
    generation_max: int | None
    width: int | None
    width_max: int | None


class Gpm(NamedTuple):
    """GPU performance monitoring over the last `span_s` seconds. Ratios are the driver's values, None if not available.

    - `engines`: ratio of the busiest video, JPEG or optical-flow engine.
    - `missing`: a value that is normally available is missing now (an error, NaN, or not a ratio). The other values
      then do not prove idleness.
    - `pcie`, `nvlink`: bytes per second, sum of both directions.
    - `elapsed_cycles`, `active_cycles`: counters of the SMs that never fall, None on drivers without them.
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

    `pending`: 1 if a remap waits for a reset. `failed`: 1 if a remap has failed.
    """

    corrected: int
    uncorrected: int
    pending: int
    failed: int


NOT_STARTED, IN_PROGRESS, COMPLETED, FAILED = 1, 2, 3, 4
"""Of Fabric.status, as DCGM_FI_DEV_FABRIC_MANAGER_STATUS. The first three are NVML's states."""


class Fabric(NamedTuple):
    """The GPU's registration with the NVLink fabric of NVSwitches, which CUDA needs on a board with NVSwitches.

    - `status`: NOT_STARTED, IN_PROGRESS, COMPLETED or FAILED.
    - `problem`: why it failed, or what is degraded; "" without a problem.
    """

    status: int
    problem: str = ""


class InstanceIdentity(NamedTuple):
    """One MIG instance. `mig` is "gpu instance id/compute instance id".

    - `sm_slices`: the instance's compute slices. A fraction if several compute instances share a GPU instance without
      reporting slices.
    - `memory_slices`: 0 if unknown.
    - `placement`: profile id and first slice of its GPU instance, None if the driver does not report them.
    - `memory`: "own" if the compute instance is alone on its GPU instance. Otherwise the memory is counted once:
      "first" for the compute instance that gets it, "none" for the others.
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
        """Returns the activity since the last read. None at the first read, or if the last read is too old."""


class Device:
    """One physical GPU. Each read method raises NotSupported unless a backend overrides it.

    - `answers`: number of calls that the driver has answered. It shows whether a GPU still answers.
    - `instances_complete`: the last list of instances is complete.
    - `reason`: the NVML error to raise for a missing value.
    """

    identity: DeviceIdentity
    answers = 0
    instances_complete = True
    reason = "NVML_ERROR_NOT_SUPPORTED"

    def _nothing(self, call: str) -> NotSupported:
        return NotSupported(call, self.reason)

    def identify(self) -> None:
        """Reads the missing parts of the identity. Never raises: `take_errors` returns the errors."""
        return

    def is_alive(self) -> bool:
        """Returns whether the GPU still answers other calls, after one has reported a lost GPU or a changed driver."""
        return False

    def first_failure(self) -> str:
        """Returns one failed call and its error, "" if no call has failed. An unsupported value is not a failure."""
        return ""

    def read_utilization(self) -> Rates:
        raise self._nothing("nvmlDeviceGetUtilizationRates")

    def read_utilization_samples(self, since_wall: float) -> Sequence[UtilizationSample]:
        """Returns the driver's samples newer than `since_wall` (Unix seconds), oldest first."""
        raise self._nothing("nvmlDeviceGetSamples")

    def read_engine(self, engine: str) -> float:
        """Returns the ratio of time for which one of ENGINES was busy."""
        raise self._nothing(f"nvmlDeviceGet{engine.capitalize()}Utilization")

    def read_engine_samples(self, engine: str, since_wall: float) -> Sequence[UtilizationSample]:
        """Returns the driver's samples of one of ENGINES, as `read_utilization_samples` does."""
        raise self._nothing("nvmlDeviceGetSamples")

    def read_gpm(self) -> Gpm | None:
        """Returns the activity since the last read. None at the first read, or if the last read is too old."""
        raise self._nothing("nvmlGpmMetricsGet")

    def reopen_gpm(self, subject: str) -> None:
        """Closes the GPM window of the board (`subject` is "") or of the MIG instance with this UUID. Never raises.

        The next read begins a new window.
        """
        return

    def read_memory(self) -> Memory:
        raise self._nothing("nvmlDeviceGetMemoryInfo")

    def read_power(self) -> float:
        """Returns the power in watts."""
        raise self._nothing("nvmlDeviceGetPowerUsage")

    def read_power_limit(self) -> float:
        """Returns the enforced power limit in watts."""
        raise self._nothing("nvmlDeviceGetEnforcedPowerLimit")

    def read_default_power_limit(self) -> float:
        """Returns the manufacturer's power limit in watts. An administrator's limit does not change it."""
        raise self._nothing("nvmlDeviceGetPowerManagementDefaultLimit")

    def read_energy(self) -> float:
        """Returns the joules since the driver was loaded."""
        raise self._nothing("nvmlDeviceGetTotalEnergyConsumption")

    def read_temperature(self) -> float:
        """Returns the temperature of the GPU sensor in degrees Celsius."""
        raise self._nothing("nvmlDeviceGetTemperature")

    def read_memory_temperature(self) -> float:
        """Returns the temperature of the hottest memory sensor in degrees Celsius."""
        raise self._nothing("nvmlDeviceGetFieldValues")

    def read_temperature_margin(self) -> float:
        """Returns the degrees Celsius left until the GPU slows down. Negative if it already slows down."""
        raise self._nothing("nvmlDeviceGetMarginTemperature")

    def read_temperature_limits(self) -> Mapping[str, float]:
        """Returns the supported limits in degrees Celsius: shutdown, slowdown, gpu_max, memory_max."""
        raise self._nothing("nvmlDeviceGetTemperatureThreshold")

    def read_clocks(self) -> Clocks:
        raise self._nothing("nvmlDeviceGetClockInfo")

    def read_performance_state(self) -> int:
        """Returns the P-state: 0 (highest performance) to 15 (lowest)."""
        raise self._nothing("nvmlDeviceGetPerformanceState")

    def read_throttle_seconds(self) -> Mapping[str, float]:
        """Returns the seconds for which each throttle reason was active. Omits reasons without a counter."""
        raise self._nothing("nvmlDeviceGetFieldValues")

    def read_throttle_active(self) -> Mapping[str, bool]:
        """Returns whether each throttle reason is active now. Omits reasons that the device does not support."""
        raise self._nothing("nvmlDeviceGetCurrentClocksEventReasons")

    def read_pcie(self) -> Pcie:
        raise self._nothing("nvmlDeviceGetFieldValues")

    def read_pcie_link(self) -> PcieLink:
        raise self._nothing("nvmlDeviceGetCurrPcieLinkWidth")

    def read_nvlink(self) -> Traffic:
        raise self._nothing("nvmlDeviceGetFieldValues")

    def read_nvlinks_active(self) -> int:
        """Returns the number of NVLinks that are up."""
        raise self._nothing("nvmlDeviceGetNvLinkState")

    def read_nvlink_errors(self) -> Mapping[str, int]:
        """Returns the errors of all NVLinks since the driver was loaded, by kind. Omits kinds without a counter."""
        raise self._nothing("nvmlDeviceGetFieldValues")

    def read_fabric(self) -> Fabric:
        raise self._nothing("nvmlDeviceGetGpuFabricInfoV")

    def read_ecc_errors(self) -> Mapping[str, int]:
        """Returns the errors since the driver was loaded, by severity: corrected, uncorrected."""
        raise self._nothing("nvmlDeviceGetTotalEccErrors")

    def read_row_remaps(self) -> RowRemaps:
        raise self._nothing("nvmlDeviceGetRemappedRows")

    def read_retired_pages(self) -> Mapping[str, int]:
        """Returns the number of retired pages by cause (single_bit, double_bit), on GPUs before Ampere."""
        raise self._nothing("nvmlDeviceGetFieldValues")

    def read_recovery_action(self) -> int:
        """Returns the recovery action that the driver requests, as in nvmlDeviceGpuRecoveryAction_t (0: none)."""
        raise self._nothing("nvmlDeviceGetFieldValues")

    def read_processes(self) -> Processes:
        raise self._nothing("nvmlDeviceGetComputeRunningProcesses")

    def read_process_utilization(self, since_wall: float) -> Sequence[ProcessUtilization]:
        """Returns the work of each process that has used the device since `since_wall` (Unix seconds).

        Some entries of the driver have pids that do not exist.
        """
        raise self._nothing("nvmlDeviceGetProcessUtilization")

    def read_persistence_mode(self) -> bool:
        """Returns whether the driver keeps the GPU initialised while no process uses it."""
        raise self._nothing("nvmlDeviceGetPersistenceMode")

    def list_instances(self) -> Sequence[Instance]:
        """Returns the MIG instances, empty if MIG is off. Raises NotSupported if the hardware has no MIG."""
        return ()

    def take_errors(self) -> Sequence[DeviceError]:
        """Returns and clears the errors of single values, in calls that otherwise succeeded."""
        return ()

    def renew(self) -> None:
        """Gets this device from the driver again after it was lost. Raises DeviceError while it is still lost."""
        return


class XidEvent(NamedTuple):
    """One XID from the driver. `severity`: "fatal" or "nonfatal", "" if the driver does not report it."""

    uuid: str
    xid: int
    severity: str = ""


class EventWatch(Protocol):
    """A registration for events of some devices."""

    covered: frozenset[str]
    """UUIDs of the devices whose events arrive here."""

    complete: bool
    """False if the registration of a device failed. It may succeed later."""

    def wait(self, timeout_s: float) -> XidEvent | None:
        """Returns the next event, None after `timeout_s` without an event. Raises DeviceError."""

    def close(self) -> None:
        """Ends the registration. Never raises."""


class Backend(Protocol):
    """A source of devices. `name`: its name in messages. `vendor`: the manufacturer of the devices.

    `is_live`: the devices are GPUs of this host, so that PCI addresses and pids refer to this host.
    """

    name: str
    vendor: Vendor
    is_live: bool

    def open(self) -> None:
        """Opens the driver. Raises DriverUnavailable; the caller may then try again later."""

    def count(self) -> int:
        """Returns the number of positions in the driver's list of GPUs. Raises DriverUnavailable."""

    def find(self, position: int) -> Device:
        """Returns the device at one position of the driver's list of GPUs. Raises DeviceError."""

    def watch_events(self, devices: Iterable[Device]) -> EventWatch:
        """Registers for the XIDs of these devices.

        Raises NotSupported if the backend has no events, DeviceError if no device can be registered.
        """

    def close(self) -> None:
        """Closes the driver. Never raises."""
