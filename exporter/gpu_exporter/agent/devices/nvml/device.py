"""Reads one GPU through NVML.

This module converts all units: percent to ratio, milliwatts to watts, millijoules to joules, MHz to hertz, KiB to
bytes, nanoseconds and microseconds to seconds. If a driver lacks a newer call, the device uses an older one (a comment
at each call has the versions).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from gpu_exporter.agent.devices.errors import (
    OUT_OF_RANGE,
    DeviceError,
    DeviceLost,
    DriverChanged,
    NoPermission,
    NotSupported,
    is_unsupported,
)
from gpu_exporter.agent.devices.nvml import constants as nvml
from gpu_exporter.agent.devices.nvml.asker import Asker, Fields
from gpu_exporter.agent.devices.nvml.instance import NvmlInstance, add_processes, read_gpm, read_memory, read_processes
from gpu_exporter.agent.devices.nvml.library import SYSTEM, Handle, Library
from gpu_exporter.agent.devices.nvml.nvlink import NvlinkCounters
from gpu_exporter.agent.devices.nvml.support import SupportMatrix
from gpu_exporter.agent.devices.protocol import (
    COMPLETED,
    FAILED,
    Clocks,
    Device,
    Fabric,
    Gpm,
    Instance,
    InstanceIdentity,
    Memory,
    Pcie,
    PcieLink,
    Processes,
    ProcessUtilization,
    Rates,
    RowRemaps,
    Traffic,
    UtilizationSample,
)
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.units import DeviceIdentity
from gpu_exporter.common.shares import divide_gpu_instance

log = logging.getLogger(__name__)
SLOW_ANSWER_TTL_S = 5.0
PLACEMENTS_MAX = 64  # MIG instances that are remembered; dynamic MIG creates new UUIDs again and again
MIB = 1024.0**2
MIG_UNKNOWN = "unknown"
FACTS = {  # facts of an identity, each with its call
    "name": "nvmlDeviceGetName",
    "driver_version": "nvmlSystemGetDriverVersion",
    "pci_bus_id": "nvmlDeviceGetPciInfo",
    "minor": "nvmlDeviceGetMinorNumber",
    "mig_mode": "nvmlDeviceGetMigMode",
    "cpus": "nvmlDeviceGetCpuAffinity",
}
AFFINITY_WORDS = 128  # of 64 bits: 8,192 CPUs, the most that Linux supports on x86-64 (NR_CPUS)
WORD_BITS = 64
ARGUMENTS = {"cpus": (AFFINITY_WORDS,)}
# Calls that a GPU does not answer after it has left the bus. They are retried if another call reports a lost GPU.
SIGNS_OF_LIFE: tuple[tuple[Any, ...], ...] = (
    ("nvmlDeviceGetUtilizationRates",),
    ("nvmlDeviceGetMemoryInfo", 0),
    ("nvmlDeviceGetPowerUsage",),
    ("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
)


INSTANCE_CALLS = (
    "nvmlDeviceGetAttributes_v2",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetName",
)
REQUIRED_CALLS = frozenset(("nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId"))
ENGINE_CALLS = {
    "encoder": "nvmlDeviceGetEncoderUtilization",
    "decoder": "nvmlDeviceGetDecoderUtilization",
    "jpeg": "nvmlDeviceGetJpgUtilization",
    "ofa": "nvmlDeviceGetOfaUtilization",
}


def _list_bits(words: Sequence[int]) -> frozenset[int]:
    """Returns the positions of the bits that are set. The first word, of WORD_BITS bits, has the lowest."""
    whole = sum(word << (WORD_BITS * position) for position, word in enumerate(words))
    return frozenset(bit for bit in range(whole.bit_length()) if whole >> bit & 1)


class NvmlDevice(Device):
    """One GPU, read through its NVML handle."""

    def __init__(self, library: Library, handle: Handle, index: int, clock: Clock) -> None:
        self._library = library
        self._label = f"gpu {index}"
        self.ask = Asker(library, handle, SupportMatrix(clock), self._label)
        self._clock = clock
        self._fields = Fields(self.ask)
        self._once: dict[str, Any] = {}
        self._recent: dict[str, tuple[float, Any]] = {}
        self._windows: set[str] = set()  # GPM windows of the instances
        self._placements: dict[str, tuple[int, int] | None] = {}  # by UUID of the instance
        self._instance_support: dict[str, SupportMatrix] = {}
        self._instances_warned: set[str] = set()
        self._facts: dict[str, dict[str, Any]] = {}  # answers by call, by UUID of the instance
        self._nvlink = self._make_nvlink()
        self._uuid = self.ask("nvmlDeviceGetUUID")
        self.identity = DeviceIdentity(index, self._uuid, "", "", "", -1, MIG_UNKNOWN)
        self._unread = set(FACTS)
        self.identify()

    @property
    def handle(self) -> Handle:
        return self.ask.handle

    def identify(self) -> None:
        """Reads the parts of the identity that are still unknown. The next call retries a part that cannot be read."""
        if not self._unread:
            return
        for fact, call in FACTS.items():
            if fact not in self._unread:
                continue
            asks = self._library.ask if call == "nvmlSystemGetDriverVersion" else self.ask
            try:
                value: Any = self._read_mig_mode() if fact == "mig_mode" else asks(call, *ARGUMENTS.get(fact, ()))
            except NotSupported:
                continue  # no message; retried later
            except DeviceError as exc:
                self._fields.errors.append(exc)
                continue
            if fact == "pci_bus_id":
                value = value.lower()
            elif fact == "minor":
                value = int(value)
            elif fact == "cpus":
                value = _list_bits(value)
            self._unread.discard(fact)
            known: dict[str, Any] = {fact: value}
            self.identity = self.identity._replace(**known)

    def is_alive(self) -> bool:
        """Returns whether the GPU still answers most of SIGNS_OF_LIFE, after one call has reported it lost."""
        answered = lost = 0
        for call, *arguments in SIGNS_OF_LIFE:
            try:
                self._library.ask(call, self.handle, *arguments)
                answered += 1
            except (DeviceLost, DriverChanged):
                lost += 1
            except DeviceError:
                continue
        return answered > lost

    def _one(self, call: str, *arguments: Any, is_static: bool = False) -> Any:
        """Reads one of several values, None if it is not available. Counts a failure, and keeps the other values."""
        try:
            return self._static(call, *arguments) if is_static else self.ask(call, *arguments)
        except NotSupported:
            return None
        except DeviceError as exc:
            if isinstance(exc, DeviceLost | DriverChanged) and not self.is_alive():
                raise
            self._fields.errors.append(exc)
            return None

    def _make_nvlink(self) -> NvlinkCounters:
        return NvlinkCounters(self._fields, self._label, self._clock)

    def renew(self) -> None:
        """Gets a new handle from the driver, because a reset may make the old handle invalid. Raises DeviceError."""
        handle = self._library.ask("nvmlDeviceGetHandleByIndex", SYSTEM, self.identity.index)
        found = self._library.ask("nvmlDeviceGetUUID", handle)
        if found != self._uuid:
            raise DeviceLost("nvmlDeviceGetHandleByIndex", f"another GPU ({found}) now has this index")
        self.ask.handle = handle
        self._start_over()

    def first_failure(self) -> str:
        return self.ask.support.first_failure({call for call, *_ in SIGNS_OF_LIFE})

    @property
    def answers(self) -> int:  # type: ignore[override]  # the asker counts them
        return self.ask.answers

    def _start_over(self) -> None:
        """Forgets all stored answers, because the device or its mode has changed."""
        self.ask.support.clear()
        self._instance_support.clear()
        self._once.clear()
        self._recent.clear()
        self._library.ask("nvmlGpmSampleFree", SYSTEM, {self._label, *self._windows})
        self._windows = set()
        up = self._nvlink.up
        self._nvlink = self._make_nvlink()
        self._nvlink.up = up  # after a reset, the links train for some seconds

    def _slow_answer(self, call: str) -> Any:
        """Returns a value that only an administrator changes. Caches it for SLOW_ANSWER_TTL_S."""
        known = self._recent.get(call)
        now = self._clock.monotonic()
        if known is None or now - known[0] >= SLOW_ANSWER_TTL_S:
            known = self._recent[call] = (now, self.ask(call))
        return known[1]

    def _static(self, call: str, *arguments: Any) -> Any:
        """Returns a value that never changes for the same handle. Asks the driver only once."""
        key = f"{call}{arguments}"
        if key not in self._once:
            self._once[key] = self.ask(call, *arguments)
        return self._once[key]

    def _read_mig_mode(self) -> str:
        """Returns the MIG mode. Raises DeviceError if it is unknown, or if a board in MIG mode now denies MIG."""
        try:
            return "enabled" if self.ask("nvmlDeviceGetMigMode") == nvml.NVML_DEVICE_MIG_ENABLE else "disabled"
        except NotSupported as exc:
            if self.identity.mig_mode == "enabled":
                self.ask.support.forget(("nvmlDeviceGetMigMode", ()))  # retried in the next cycle
                raise DeviceError(exc.call, exc.error, once_answered=True) from exc
            if not is_unsupported(exc.error):
                raise
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
            # A driver older than this ring does not know its number.
            refusal = NotSupported(exc.call, exc.error)
            self.ask.support.note((exc.call, engine), refusal)
            raise refusal from exc

    def _require_gpm(self) -> None:
        """Raises NotSupported on a board without GPM."""
        call = "nvmlGpmQueryDeviceSupport"
        if self._static(call) == 0:
            refusal = NotSupported("nvmlGpmMetricsGet", "NVML_ERROR_NOT_SUPPORTED")
            del self._once[f"{call}()"]
            self.ask.support.note((call, ()), refusal)  # retried after a while, like every refusal
            raise refusal

    def read_gpm(self) -> Gpm | None:
        self._require_gpm()
        return read_gpm(self.ask, self._label, pipes=nvml.GPM_PIPES)

    def reopen_gpm(self, subject: str) -> None:
        # The name of an instance's window is its UUID and "board" or "own".
        names = {name for name in self._windows if name.partition(" ")[0] == subject} if subject else {self._label}
        self._library.ask("nvmlGpmSampleFree", SYSTEM, names)

    def read_memory(self) -> Memory:
        if nvml.NO_MEMORY_OF_ITS_OWN.search(self.identity.name):
            raise NotSupported("nvmlDeviceGetMemoryInfo", "NVML_ERROR_NOT_SUPPORTED")  # it reports the host's memory
        return read_memory(self.ask)

    def read_power(self) -> float:
        return float(self.ask("nvmlDeviceGetPowerUsage")) / 1e3  # milliwatts

    def read_power_limit(self) -> float:
        return float(self._slow_answer("nvmlDeviceGetEnforcedPowerLimit")) / 1e3  # milliwatts

    def read_default_power_limit(self) -> float:
        return float(self._static("nvmlDeviceGetPowerManagementDefaultLimit")) / 1e3  # milliwatts

    def read_energy(self) -> float:
        return float(self.ask("nvmlDeviceGetTotalEnergyConsumption")) / 1e3  # millijoules

    def read_temperature(self) -> float:
        # The call with V came with driver 560; the older call is removed with CUDA 14.
        return float(
            self.ask.first(("nvmlDeviceGetTemperatureV",), ("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU))
        )

    def read_memory_temperature(self) -> float:
        return float(self._fields.one(nvml.NVML_FI_DEV_MEMORY_TEMP))

    def read_temperature_margin(self) -> float:
        return float(self.ask("nvmlDeviceGetMarginTemperature"))

    def read_temperature_limits(self) -> Mapping[str, float]:
        found = {
            name: self._one("nvmlDeviceGetTemperatureThreshold", threshold, is_static=True)
            for name, threshold in nvml.TEMPERATURE_LIMITS.items()
        }
        return {name: float(celsius) for name, celsius in found.items() if celsius is not None}

    def read_clocks(self) -> Clocks:
        megahertz = (
            self._one("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            self._one("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            self._one("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM, is_static=True),
        )
        return Clocks(*(None if each is None else each * 1e6 for each in megahertz))

    def read_performance_state(self) -> int:
        state = int(self.ask("nvmlDeviceGetPerformanceState"))
        if not 0 <= state <= 15:  # NVML_PSTATE_UNKNOWN is 32
            raise NotSupported("nvmlDeviceGetPerformanceState", "NVML_PSTATE_UNKNOWN")
        return state

    def read_throttle_seconds(self) -> Mapping[str, float]:
        found = self._fields.read(*nvml.THROTTLE_FIELDS.values())
        return {name: found[field] / 1e9 for name, field in nvml.THROTTLE_FIELDS.items() if field in found}  # ns

    def read_throttle_active(self) -> Mapping[str, bool]:
        # The name with "Event" came with driver 535; older drivers have the older name.
        active = self.ask.first(
            ("nvmlDeviceGetCurrentClocksEventReasons",), ("nvmlDeviceGetCurrentClocksThrottleReasons",)
        )
        supported = self.ask.first(
            ("nvmlDeviceGetSupportedClocksEventReasons",), ("nvmlDeviceGetSupportedClocksThrottleReasons",)
        )
        if active > nvml.THROTTLE_MAX:
            raise NotSupported("nvmlDeviceGetCurrentClocksEventReasons", OUT_OF_RANGE)
        return {reason: bool(active & bit) for reason, bit in nvml.THROTTLE_BITS.items() if supported & bit}

    def read_pcie(self) -> Pcie:
        tx, rx = nvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, nvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES
        found = self._fields.read(tx, rx, nvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER)
        if not found:
            raise NotSupported(Fields.CALL, "NVML_ERROR_NOT_SUPPORTED")
        traffic = Traffic(rx=float(found[rx]), tx=float(found[tx])) if tx in found and rx in found else None
        replays = found.get(nvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER)
        return Pcie(traffic, None if replays is None else int(replays))

    def read_pcie_link(self) -> PcieLink:
        ways = ("Generation", "Width")
        found = {
            f"{limit}{way}": self._one(f"nvmlDeviceGet{limit}PcieLink{way}", is_static=limit == "Max")
            for way in ways
            for limit in ("Curr", "Max")
        }
        if all(value is None for value in found.values()):
            raise NotSupported("nvmlDeviceGetCurrPcieLinkWidth", "NVML_ERROR_NOT_SUPPORTED")
        return PcieLink(found["CurrGeneration"], found["MaxGeneration"], found["CurrWidth"], found["MaxWidth"])

    def read_nvlink(self) -> Traffic:
        return self._nvlink.read()

    def read_nvlinks_active(self) -> int:
        if self.identity.mig_mode == "enabled":  # MIG instances have no NVLink
            raise NotSupported("nvmlDeviceGetNvLinkState", "NVML_ERROR_NOT_SUPPORTED")
        return self._nvlink.count_active(self.ask)

    def read_nvlink_errors(self) -> Mapping[str, int]:
        found = self._fields.read(*nvml.NVLINK_ERRORS.values())
        return {kind: int(found[field]) for kind, field in nvml.NVLINK_ERRORS.items() if field in found}

    def read_fabric(self) -> Fabric:
        # The call with V came with driver 545; a recording may lack the health mask.
        call = "nvmlDeviceGetGpuFabricInfoV"
        state, status, *health = self.ask.first((call,), ("nvmlDeviceGetGpuFabricInfo",))
        if state == nvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED:
            raise NotSupported(call, "NVML_ERROR_NOT_SUPPORTED")
        if state < COMPLETED:
            return Fabric(state)
        if state > COMPLETED:
            raise DeviceError(call, OUT_OF_RANGE)
        if status != nvml.NVML_SUCCESS:
            reason = nvml.error_name(status).removeprefix("NVML_ERROR_").replace("_", " ").lower()
            return Fabric(FAILED, reason)
        mask = sum(health)
        problems = (
            problem for problem, bit, width, bad in nvml.FABRIC_PROBLEMS if mask >> bit & (1 << width) - 1 == bad
        )
        return Fabric(state, ", ".join(problems))

    def read_ecc_errors(self) -> Mapping[str, int]:
        found = {
            severity: self._one("nvmlDeviceGetTotalEccErrors", kind, nvml.NVML_VOLATILE_ECC)
            for severity, kind in nvml.ECC_SEVERITIES.items()
        }
        return {severity: int(count) for severity, count in found.items() if count is not None}

    def read_row_remaps(self) -> RowRemaps:
        corrected, uncorrected, pending, failed = self.ask("nvmlDeviceGetRemappedRows")
        return RowRemaps(int(corrected), int(uncorrected), int(pending), int(failed))

    def read_retired_pages(self) -> Mapping[str, int]:
        causes = {"single_bit": nvml.NVML_FI_DEV_RETIRED_SBE, "double_bit": nvml.NVML_FI_DEV_RETIRED_DBE}
        found = self._fields.read(*causes.values())
        return {cause: int(found[field]) for cause, field in causes.items() if field in found}

    def read_recovery_action(self) -> int:
        return int(self._fields.one(nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION))

    def read_processes(self) -> Processes:
        """Returns the processes of the board. With MIG, reads each instance if the board's answer is not complete.

        With MIG, the call on the board needs more permissions, and some drivers do not report the instance of a
        process.
        """
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
            return found  # the instances list fewer processes than the board
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
        if isinstance(entries, int):  # a recording contains only the number of processes
            raise NotSupported(call, "NVML_ERROR_NO_DATA")
        return [
            ProcessUtilization(pid, stamp / 1e6, sm / 100.0, any((sm, memory, encoder, decoder)))  # us, percent
            for pid, stamp, sm, memory, encoder, decoder in entries
        ]

    def read_persistence_mode(self) -> bool:
        return bool(self.ask("nvmlDeviceGetPersistenceMode") == nvml.NVML_FEATURE_ENABLED)

    def list_instances(self) -> Sequence[Instance]:
        mode = self._read_mig_mode()
        if mode != self.identity.mig_mode:  # switched at run time: values refused in the old mode may be available now
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
            # The board's call reports a whole GPU instance. If several compute instances share it, each would get the
            # work of all. The window's name has the kind of call, so that NVML never compares samples of two kinds.
            alone = parts.count(part) == 1
            gpm = Asker(self._library, self.ask.handle, support, label, self._instances_warned) if alone else ask
            window = f"{identity.uuid} {'board' if alone else 'own'}"
            windows.add(window)
            instances.append(NvmlInstance(ask, identity, window, gpm, self._require_gpm))
        self._library.ask("nvmlGpmSampleFree", SYSTEM, self._windows - windows)
        self._windows = windows
        return instances

    def _memory_slices(self, memory_mib: float) -> int:
        """Converts memory in MiB to a number of the board's memory slices. 0 if the board's memory is unknown."""
        try:
            board = self._static("nvmlDeviceGetMemoryInfo", 0)[0]
        except DeviceError:
            return 0
        slices = round(self.identity.mig_memory_slices * memory_mib * MIB / float(board)) if board else 0
        return slices if 0 < slices <= self.identity.mig_memory_slices else 0

    def _placement(self, uuid: str, gpu_instance: int) -> tuple[int, int] | None:
        """Returns the placement (profile id, first slice) of an instance, None if refused. Reads it once."""
        if uuid not in self._placements:
            placement: tuple[int, int] | None = None
            try:
                placement = self._library.ask("nvmlGpuInstanceGetInfo", self.ask.handle, gpu_instance)
            except DeviceError as exc:
                log.debug("gpu %d, mig %d: cannot read the placement: %s", self.identity.index, gpu_instance, exc)
            if len(self._placements) >= PLACEMENTS_MAX:
                self._placements.clear()
            self._placements[uuid] = placement
        return self._placements[uuid]

    def _enumerate(self) -> list[tuple[Handle, InstanceIdentity]]:
        """Lists each instance with a new handle, because the driver may reuse an old handle for another instance.

        Omits an instance that cannot be identified, and then sets `instances_complete` to False.
        """
        self.instances_complete = True
        found: list[tuple[Handle, InstanceIdentity]] = []
        compute: dict[int, list[int]] = {}  # slices of the compute instances, by GPU instance, in the order of `found`
        present: set[str] = set()
        failures: list[DeviceError] = []
        positions = self._one("nvmlDeviceGetMaxMigDeviceCount", is_static=True) or nvml.MIG_DEVICES
        for position in range(min(positions, nvml.MIG_DEVICES_MAX)):
            try:
                handle = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", position)
                uuid = self._library.ask("nvmlDeviceGetUUID", handle)
                facts = self._read_facts(handle, uuid)
            except DeviceError as exc:
                if exc.error == "NVML_ERROR_NOT_FOUND" and exc.call not in INSTANCE_CALLS:
                    continue  # a gap, or destroyed just now; other instances may follow
                is_refused = isinstance(exc, NotSupported | NoPermission)
                if is_refused and exc.call == "nvmlDeviceGetMigDeviceHandleByIndex" and not found:
                    raise
                failures.append(DeviceError(exc.call, exc.error))  # an instance exists here, but cannot be read
                continue
            present.add(uuid)
            gpu_instance = int(facts["nvmlDeviceGetGpuInstanceId"])
            # The product name ends in the profile, e.g. "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
            profile = facts.get("nvmlDeviceGetName", "").partition(" MIG ")[2]
            # Recordings made before the third value was added have only two values.
            slices, memory_mib, *own = facts.get("nvmlDeviceGetAttributes_v2") or (0, 0.0)
            if not 1 <= slices <= nvml.MIG_DEVICES:
                slices = _slices_of(profile)
            identity = InstanceIdentity(
                uuid,
                f"{gpu_instance}/{facts['nvmlDeviceGetComputeInstanceId']}",
                profile,
                slices,
                self._memory_slices(memory_mib),
                self._placement(uuid, gpu_instance),
            )
            found.append((handle, identity))
            compute.setdefault(gpu_instance, []).append(own[0] if own else 0)
        self._facts = {uuid: facts for uuid, facts in self._facts.items() if uuid in present or failures}
        if failures:
            if not found:
                raise failures[0]
            self.instances_complete = False
            self._fields.errors += failures
        return _divide(found, compute)

    def _read_facts(self, handle: Handle, uuid: str) -> Mapping[str, Any]:
        """Returns an instance's constant facts by call. If a call fails, its old answer is kept.

        Raises DeviceError if the instance cannot be identified.
        """
        answers = dict(self._facts.get(uuid, {}))
        for call in INSTANCE_CALLS:
            try:
                answers[call] = self._library.ask(call, handle)
            except DeviceError as exc:
                is_known = call in answers
                if call in REQUIRED_CALLS and not is_known:
                    raise
                if is_known or not isinstance(exc, NotSupported):
                    self._fields.errors.append(exc)
        self._facts[uuid] = answers
        return answers


def _slices_of(profile: str) -> float:
    """Returns the number of compute slices in a profile's name: 2 for 2g.10gb, 1 if the name has no number."""
    digits = profile.partition("g.")[0].rpartition(".")[2]
    return float(digits) if digits.isdecimal() and digits.isascii() else 1.0


def _divide(
    found: list[tuple[Handle, InstanceIdentity]], compute: Mapping[int, Sequence[int]]
) -> list[tuple[Handle, InstanceIdentity]]:
    """Divides the slices of each GPU instance among its compute instances. The first one gets the memory."""
    shares: dict[str, list[float]] = {}
    divided: list[tuple[Handle, InstanceIdentity]] = []
    for handle, identity in found:
        gpu_instance = identity.mig.partition("/")[0]
        is_first = gpu_instance not in shares
        if is_first:
            shares[gpu_instance] = divide_gpu_instance(int(identity.sm_slices), compute[int(gpu_instance)])
        several = len(compute[int(gpu_instance)]) > 1
        identity = identity._replace(
            sm_slices=shares[gpu_instance].pop(0),
            memory=("first" if is_first else "none") if several else "own",
        )
        divided.append((handle, identity))
    return divided
