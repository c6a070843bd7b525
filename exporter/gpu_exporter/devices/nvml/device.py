"""One GPU as NVML reports it.

Conversions happen here and nowhere else: percent to ratio, milliwatts to watts, millijoules to joules, MHz to hertz,
KiB to bytes, nanoseconds and microseconds to seconds. Calls that only newer drivers have fall back to the older ones
(versions beside each).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_exporter.clock import Clock
from gpu_exporter.devices.errors import (
    DeviceError,
    DeviceLost,
    NoPermission,
    NotSupported,
)
from gpu_exporter.devices.nvml import constants as nvml
from gpu_exporter.devices.nvml.asker import Asker, Fields
from gpu_exporter.devices.nvml.instance import NvmlInstance, add_processes, read_gpm, read_memory, read_processes
from gpu_exporter.devices.nvml.library import SYSTEM, Handle, Library
from gpu_exporter.devices.nvml.nvlink import NvlinkCounters
from gpu_exporter.devices.nvml.support import SupportMatrix
from gpu_exporter.devices.protocol import (
    Clocks,
    Device,
    Gpm,
    Instance,
    InstanceIdentity,
    Memory,
    Pcie,
    Processes,
    ProcessUtilization,
    Rates,
    RowRemaps,
    Traffic,
    UtilizationSample,
)
from gpu_exporter.model import DeviceIdentity
from gpu_exporter.shares import divide_gpu_instance

log = logging.getLogger(__name__)
SLOW_ANSWER_TTL_S = 5.0
PLACEMENTS_MAX = 64  # MIG instances that are remembered; dynamic MIG makes new UUIDs again and again
MIB = 1024.0**2
ENGINE_CALLS = {
    "encoder": "nvmlDeviceGetEncoderUtilization",
    "decoder": "nvmlDeviceGetDecoderUtilization",
    "jpeg": "nvmlDeviceGetJpgUtilization",
    "ofa": "nvmlDeviceGetOfaUtilization",
}


class NvmlDevice(Device):
    """One GPU through its NVML handle."""

    def __init__(self, library: Library, handle: Handle, index: int, clock: Clock) -> None:
        self._library = library
        self._label = f"gpu {index}"
        self.ask = Asker(library, handle, SupportMatrix(clock), self._label)
        self._clock = clock
        self._fields = Fields(self.ask)
        self._once: dict[str, Any] = {}
        self._recent: dict[str, tuple[float, Any]] = {}
        self._windows: set[str] = set()  # of GPM, of the instances
        self._placements: dict[str, tuple[int, int] | None] = {}  # by UUID of the instance
        self._instance_support: dict[str, SupportMatrix] = {}
        self._instances_warned: set[str] = set()
        self._nvlink = self._make_nvlink()
        try:
            minor = int(self.ask("nvmlDeviceGetMinorNumber"))
        except NotSupported:
            minor = -1
        self.identity = DeviceIdentity(
            index=index,
            uuid=self.ask("nvmlDeviceGetUUID"),
            name=self.ask("nvmlDeviceGetName"),
            driver_version=library.ask("nvmlSystemGetDriverVersion"),
            pci_bus_id=self.ask("nvmlDeviceGetPciInfo").lower(),
            minor=minor,
            mig_mode=self._read_mig_mode(),
        )

    @property
    def handle(self) -> Handle:
        return self.ask.handle

    def _make_nvlink(self) -> NvlinkCounters:
        return NvlinkCounters(self._fields, self._label, self._clock)

    def renew(self) -> None:
        """Ask the driver for the device again: after a reset the old handle may be dead. Raises DeviceError."""
        handle = self._library.ask("nvmlDeviceGetHandleByIndex", SYSTEM, self.identity.index)
        found = self._library.ask("nvmlDeviceGetUUID", handle)
        if found != self.identity.uuid:
            raise DeviceLost("nvmlDeviceGetHandleByIndex", f"another GPU ({found}) at this index")
        self.ask.handle = handle
        self._start_over()

    @property
    def answers(self) -> int:  # type: ignore[override]  # counted where it asks
        return self.ask.answers

    def _start_over(self) -> None:
        """The device is another one now, or in another mode: nothing known of it holds."""
        self.ask.support.clear()
        self._instance_support.clear()
        self._once.clear()
        self._recent.clear()
        self._library.ask("nvmlGpmSampleFree", SYSTEM, {self.identity.uuid, *self._windows})
        self._windows = set()
        self._nvlink = self._make_nvlink()

    def _slow_answer(self, call: str) -> Any:
        """An answer that only an administrator changes: at most SLOW_ANSWER_TTL_S old."""
        known = self._recent.get(call)
        now = self._clock.monotonic()
        if known is None or now - known[0] >= SLOW_ANSWER_TTL_S:
            known = self._recent[call] = (now, self.ask(call))
        return known[1]

    def _static(self, call: str, *arguments: Any) -> Any:
        """An answer that never changes while the handle lives: asked once."""
        key = f"{call}{arguments}"
        if key not in self._once:
            self._once[key] = self.ask(call, *arguments)
        return self._once[key]

    def _read_mig_mode(self) -> str:
        try:
            return "enabled" if self.ask("nvmlDeviceGetMigMode") == nvml.NVML_DEVICE_MIG_ENABLE else "disabled"
        except NotSupported:
            return "unsupported"

    def take_errors(self) -> Sequence[DeviceError]:
        errors, self._fields.errors = self._fields.errors, []
        return errors

    def read_utilization(self) -> Rates:
        gpu, memory = self.ask("nvmlDeviceGetUtilizationRates")
        return Rates(gpu / 100.0, memory / 100.0)  # percent

    def read_utilization_samples(self, since_wall: float) -> Sequence[UtilizationSample]:
        return self._read_samples("utilization", nvml.NVML_GPU_UTILIZATION_SAMPLES, since_wall)

    def _read_samples(self, subject: str, kind: int, since_wall: float) -> Sequence[UtilizationSample]:
        samples = self.ask("nvmlDeviceGetSamples", kind, int(since_wall * 1e6), about=subject)
        found = [UtilizationSample(stamp / 1e6, value / 100.0) for stamp, value in samples]  # us, percent
        found.sort()
        return found

    def read_engine(self, engine: str) -> float:
        return float(self.ask(ENGINE_CALLS[engine])) / 100.0  # percent

    def read_engine_samples(self, engine: str, since_wall: float) -> Sequence[UtilizationSample]:
        try:
            return self._read_samples(engine, nvml.ENGINE_SAMPLES[engine], since_wall)
        except DeviceError as exc:
            if exc.error != "NVML_ERROR_INVALID_ARGUMENT" or exc.once_answered:
                raise
            # A driver from before this ring: it does not know the number.
            refusal = NotSupported(exc.call, exc.error)
            self.ask.support.note((exc.call, engine), refusal)
            raise refusal from exc

    def _require_gpm(self) -> None:
        """Raises NotSupported on a board without GPM."""
        call = "nvmlGpmQueryDeviceSupport"
        if self._static(call) == 0:
            refusal = NotSupported("nvmlGpmMetricsGet", "NVML_ERROR_NOT_SUPPORTED")
            del self._once[f"{call}()"]
            self.ask.support.note((call, ()), refusal)  # asked again after a while, like every refusal
            raise refusal

    def read_gpm(self) -> Gpm | None:
        self._require_gpm()
        return read_gpm(self.ask, self.identity.uuid)

    def reopen_gpm(self, subject: str) -> None:
        # An instance's window is named by its UUID and the way of sampling it.
        names = (
            {name for name in self._windows if name.partition(" ")[0] == subject} if subject else {self.identity.uuid}
        )
        self._library.ask("nvmlGpmSampleFree", SYSTEM, names)

    def read_memory(self) -> Memory:
        return read_memory(self.ask)

    def read_power(self) -> float:
        return float(self.ask("nvmlDeviceGetPowerUsage")) / 1e3  # milliwatts

    def read_power_limit(self) -> float:
        return float(self._slow_answer("nvmlDeviceGetEnforcedPowerLimit")) / 1e3  # milliwatts

    def read_energy(self) -> float:
        return float(self.ask("nvmlDeviceGetTotalEnergyConsumption")) / 1e3  # millijoules

    def read_temperature(self) -> float:
        # The call with V came with driver 560; the older one goes with CUDA 14.
        return float(
            self.ask.first(("nvmlDeviceGetTemperatureV",), ("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU))
        )

    def read_memory_temperature(self) -> float:
        return float(self._fields.one(nvml.NVML_FI_DEV_MEMORY_TEMP))

    def read_temperature_margin(self) -> float:
        return float(self.ask("nvmlDeviceGetMarginTemperature"))

    def read_temperature_limits(self) -> Mapping[str, float]:
        limits: dict[str, float] = {}
        for name, threshold in nvml.TEMPERATURE_LIMITS.items():
            try:
                limits[name] = float(self._static("nvmlDeviceGetTemperatureThreshold", threshold))
            except NotSupported:
                continue
        return limits

    def read_clocks(self) -> Clocks:
        return Clocks(
            sm=self.ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM) * 1e6,  # MHz
            memory=self.ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM) * 1e6,
            sm_max=self._static("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM) * 1e6,
        )

    def read_performance_state(self) -> int:
        state = int(self.ask("nvmlDeviceGetPerformanceState"))
        if not 0 <= state <= 15:  # NVML_PSTATE_UNKNOWN is 32
            raise NotSupported("nvmlDeviceGetPerformanceState", "NVML_PSTATE_UNKNOWN")
        return state

    def read_throttle_seconds(self) -> Mapping[str, float]:
        found = self._fields.read(*nvml.THROTTLE_FIELDS.values())
        return {name: found[field] / 1e9 for name, field in nvml.THROTTLE_FIELDS.items() if field in found}  # ns

    def read_throttle_active(self) -> Mapping[str, bool]:
        # The name with "Event" came with driver 535; the older one is what older drivers have.
        active = self.ask.first(
            ("nvmlDeviceGetCurrentClocksEventReasons",), ("nvmlDeviceGetCurrentClocksThrottleReasons",)
        )
        supported = self.ask.first(
            ("nvmlDeviceGetSupportedClocksEventReasons",), ("nvmlDeviceGetSupportedClocksThrottleReasons",)
        )
        return {reason: bool(active & bit) for reason, bit in nvml.THROTTLE_BITS.items() if supported & bit}

    def read_pcie(self) -> Pcie:
        tx, rx = nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES
        found = self._fields.read(tx, rx, nvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER)
        if not found:
            raise NotSupported(Fields.CALL, "NVML_ERROR_NOT_SUPPORTED")
        traffic = Traffic(rx=float(found[rx]), tx=float(found[tx])) if tx in found and rx in found else None
        replays = found.get(nvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER)
        return Pcie(traffic, None if replays is None else int(replays))

    def read_nvlink(self) -> Traffic:
        return self._nvlink.read()

    def read_ecc_errors(self) -> Mapping[str, int]:
        return {
            severity: int(self.ask("nvmlDeviceGetTotalEccErrors", kind, nvml.NVML_VOLATILE_ECC))
            for severity, kind in nvml.ECC_SEVERITIES.items()
        }

    def read_row_remaps(self) -> RowRemaps:
        corrected, uncorrected, pending, failed = self.ask("nvmlDeviceGetRemappedRows")
        return RowRemaps(int(corrected), int(uncorrected), bool(pending), bool(failed))

    def read_retired_pages(self) -> Mapping[str, int]:
        causes = {"single_bit": nvml.NVML_FI_DEV_RETIRED_SBE, "double_bit": nvml.NVML_FI_DEV_RETIRED_DBE}
        found = self._fields.read(*causes.values())
        return {cause: int(found[field]) for cause, field in causes.items() if field in found}

    def read_recovery_action(self) -> int:
        return int(self._fields.one(nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION))

    def read_processes(self) -> Processes:
        """With MIG the board's call needs more rights, and some drivers name no instance there: then each is asked."""
        found: Processes | None = None
        refusal: DeviceError | None = None
        try:
            found = read_processes(self.ask)
            if self.identity.mig_mode != "enabled" or all(process.mig for process in found.listed or ()):
                return found
        except (NotSupported, NoPermission) as exc:
            if self.identity.mig_mode != "enabled":
                raise
            refusal = exc
        instances = [self._read_instance_processes(handle, identity) for handle, identity in self._enumerate()]
        if refusal is not None and not instances:
            raise refusal
        added = add_processes(instances)
        if found is not None and len(added.listed or ()) < len(found.listed or ()):
            return found  # the instances account for fewer than the board lists
        return added

    def _read_instance_processes(self, handle: Handle, identity: InstanceIdentity) -> Processes:
        support = self._instance_support.setdefault(identity.uuid, SupportMatrix(self._clock))
        label = f"gpu {self.identity.index}, mig {identity.mig}"
        ask = Asker(self._library, handle, support, label, self._instances_warned)
        return read_processes(ask, identity.mig)

    def read_process_utilization(self, since_wall: float) -> Sequence[ProcessUtilization]:
        call = "nvmlDeviceGetProcessUtilization"
        if self.identity.mig_mode == "enabled":  # documented as not supported
            raise NotSupported(call, "NVML_ERROR_NOT_SUPPORTED")
        entries = self.ask(call, int(since_wall * 1e6), about=call)
        if isinstance(entries, int):  # a recording names no process
            raise NotSupported(call, "NVML_ERROR_NO_DATA")
        return [
            ProcessUtilization(pid, stamp / 1e6, sm / 100.0, any((sm, memory, encoder, decoder)))  # us, percent
            for pid, stamp, sm, memory, encoder, decoder in entries
        ]

    def read_persistence_mode(self) -> bool:
        return bool(self.ask("nvmlDeviceGetPersistenceMode") == nvml.NVML_FEATURE_ENABLED)

    def list_instances(self) -> Sequence[Instance]:
        mode = self._read_mig_mode()
        if mode != self.identity.mig_mode:  # switched at run time: what was refused in the old mode may be answered now
            log.info("gpu %d: MIG mode is now %s", self.identity.index, mode)
            self.identity = self.identity._replace(mig_mode=mode)
            self._start_over()
        found = self._enumerate() if mode == "enabled" else []
        if not (found or self._windows):
            return []
        parts = [identity.mig.partition("/")[0] for _, identity in found]
        known, self._instance_support = self._instance_support, {}
        instances: list[NvmlInstance] = []
        windows: set[str] = set()
        for part, (handle, identity) in zip(parts, found, strict=True):
            support = self._instance_support[identity.uuid] = known.get(identity.uuid) or SupportMatrix(self._clock)
            label = f"gpu {self.identity.index}, mig {identity.mig}"
            ask = Asker(self._library, handle, support, label, self._instances_warned)
            # The board's call is for a whole GPU instance. Where several compute instances share it, its sum would make
            # one's work everybody's. A sample of one way is never compared with one of the other.
            alone = parts.count(part) == 1
            gpm = Asker(self._library, self.ask.handle, support, label, self._instances_warned) if alone else ask
            window = f"{identity.uuid} {'board' if alone else 'own'}"
            windows.add(window)
            instances.append(NvmlInstance(ask, identity, window, gpm, self._require_gpm))
        self._library.ask("nvmlGpmSampleFree", SYSTEM, self._windows - windows)
        self._windows = windows
        return instances

    def _memory_slices(self, memory_mib: float) -> int:
        """How many of the board's memory slices that is; 0 where the board's memory may not be asked."""
        try:
            board = self._static("nvmlDeviceGetMemoryInfo", 0)[0]
        except DeviceLost:
            raise
        except DeviceError:
            return 0
        return round(self.identity.mig_memory_slices * memory_mib * MIB / float(board))

    def _placement(self, uuid: str, gpu_instance: int) -> tuple[int, int] | None:
        """Where an instance lies on the board, asked once for each; the driver tells it to some users only."""
        if uuid not in self._placements:
            placement: tuple[int, int] | None = None
            try:
                placement = self._library.ask("nvmlGpuInstanceGetInfo", self.ask.handle, gpu_instance)
            except DeviceLost:
                raise
            except DeviceError as exc:
                log.debug("gpu %d, mig %d: its place is not known: %s", self.identity.index, gpu_instance, exc)
            if len(self._placements) >= PLACEMENTS_MAX:
                self._placements.clear()
            self._placements[uuid] = placement
        return self._placements[uuid]

    def _enumerate(self) -> list[tuple[Handle, InstanceIdentity]]:
        """Each instance with its handle, found again each time: a handle may be reused for another instance."""
        found: list[tuple[Handle, InstanceIdentity]] = []
        compute: dict[int, list[int]] = {}  # slices of the compute instances, by GPU instance, in the order of `found`
        for position in range(self._static("nvmlDeviceGetMaxMigDeviceCount")):
            ask = self._library.ask
            try:
                handle = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", position)
                # Recordings made before the third value was read have two.
                slices, memory_mib, *own = ask("nvmlDeviceGetAttributes_v2", handle)
                gpu_instance = ask("nvmlDeviceGetGpuInstanceId", handle)
                compute_instance = ask("nvmlDeviceGetComputeInstanceId", handle)
                # The product name ends in the profile, e.g. "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
                _, _, profile = ask("nvmlDeviceGetName", handle).partition(" MIG ")
                uuid = ask("nvmlDeviceGetUUID", handle)
            except DeviceError as exc:
                if exc.error == "NVML_ERROR_NOT_FOUND":  # a hole, or destroyed just now; others may follow
                    continue
                if isinstance(exc, NotSupported) and exc.call != "nvmlDeviceGetMigDeviceHandleByIndex":
                    raise DeviceError(exc.call, exc.error) from exc  # an instance is there: its absence is not reported
                raise
            identity = InstanceIdentity(
                uuid,
                f"{gpu_instance}/{compute_instance}",
                profile,
                slices,
                self._memory_slices(memory_mib),
                self._placement(uuid, gpu_instance),
            )
            found.append((handle, identity))
            compute.setdefault(gpu_instance, []).append(own[0] if own else 0)
        return _divide(found, compute)


def _divide(
    found: list[tuple[Handle, InstanceIdentity]], compute: Mapping[int, Sequence[int]]
) -> list[tuple[Handle, InstanceIdentity]]:
    """Each instance with its own part of the slices of its GPU instance."""
    shares: dict[str, list[float]] = {}
    divided: list[tuple[Handle, InstanceIdentity]] = []
    for handle, identity in found:
        gpu_instance = identity.mig.partition("/")[0]
        if gpu_instance not in shares:
            shares[gpu_instance] = divide_gpu_instance(int(identity.sm_slices), compute[int(gpu_instance)])
        divided.append((handle, identity._replace(sm_slices=shares[gpu_instance].pop(0))))
    return divided
