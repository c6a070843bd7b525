"""Devices as NVML tells them, through pynvml.

Conversions happen here and nowhere else: percent to ratio, milliwatts to watts, millijoules to joules, MHz to hertz,
nanoseconds and microseconds to seconds. Calls that only newer drivers have fall back to the older ones (facts and
versions beside each). The library is `libnvidia-ml.so.1` as the dynamic linker finds it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pynvml

from gpu_exporter.devices.errors import DeviceError, DeviceLost, DriverUnavailable, NotSupported
from gpu_exporter.devices.nvml import constants as nvml
from gpu_exporter.devices.protocol import (
    Clocks,
    Discovered,
    Instance,
    InstanceIdentity,
    Memory,
    Processes,
    UtilizationSample,
)
from gpu_exporter.model import DeviceIdentity

T = TypeVar("T")
_LOST = (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED)
_NO_DATA = (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND)


def _error_name(error: Any) -> str:
    return nvml.ERROR_NAMES.get(error.value, f"NVML error {error.value}")


def _ask(call: str, *arguments: Any) -> Any:
    """Call the pynvml function `call` and turn its exceptions into ours."""
    function = getattr(pynvml, call, None)
    if function is None:  # a binding older than the call
        raise NotSupported(call, "NVML_ERROR_FUNCTION_NOT_FOUND")
    try:
        return function(*arguments)
    except pynvml.NVMLError as exc:
        if exc.value in _LOST:
            raise DeviceLost(call, _error_name(exc)) from exc
        if exc.value in _NO_DATA:
            raise NotSupported(call, _error_name(exc)) from exc
        raise DeviceError(call, _error_name(exc)) from exc


def _first_supported(*attempts: Callable[[], T]) -> T:
    """The first attempt that the driver knows; the last one's NotSupported when it knows none."""
    for attempt in attempts[:-1]:
        try:
            return attempt()
        except NotSupported:
            continue
    return attempts[-1]()


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _read_memory(handle: Any) -> Memory:
    """MemoryInfo_v2; v1 (drivers before 510) counts what the driver reserves as used."""
    info = _first_supported(
        lambda: _ask("nvmlDeviceGetMemoryInfo", handle, nvml.NVML_MEMORY_V2),
        lambda: _ask("nvmlDeviceGetMemoryInfo", handle),
    )
    return Memory(total=info.total, used=info.used, free=info.free, reserved=getattr(info, "reserved", 0))


class NvmlInstance:
    """One MIG instance through its own handle, for the present cycle."""

    def __init__(self, handle: Any, identity: InstanceIdentity) -> None:
        self.identity = identity
        self._handle = handle

    def read_memory(self) -> Memory:
        return _read_memory(self._handle)

    def read_graphics_active(self) -> float:
        # Utilization is never told for MIG instances; GPM tells it on Hopper and newer and is not read yet.
        raise NotSupported("nvmlGpmMetricsGet", "NVML_ERROR_NOT_SUPPORTED")


class NvmlDevice:
    """One GPU through its NVML handle."""

    def __init__(self, handle: Any, index: int, driver_version: str) -> None:
        self._handle = handle
        # Struct of the field query, made once: pynvml would build it anew for each call.
        self._throttle_fields = tuple(nvml.THROTTLE_FIELDS.values())
        pci = _ask("nvmlDeviceGetPciInfo", handle)
        try:
            minor = int(_ask("nvmlDeviceGetMinorNumber", handle))
        except NotSupported:
            minor = -1
        self.identity = DeviceIdentity(
            index=index,
            uuid=_text(_ask("nvmlDeviceGetUUID", handle)),
            name=_text(_ask("nvmlDeviceGetName", handle)),
            driver_version=driver_version,
            pci_bus_id=_text(pci.busId).lower(),
            minor=minor,
            mig_mode=self._read_mig_mode(),
        )

    def _read_mig_mode(self) -> str:
        try:
            current, _pending = _ask("nvmlDeviceGetMigMode", self._handle)
        except NotSupported:
            return "unsupported"
        return "enabled" if current == nvml.NVML_DEVICE_MIG_ENABLE else "disabled"

    def read_utilization(self) -> float:
        return float(_ask("nvmlDeviceGetUtilizationRates", self._handle).gpu) / 100.0  # percent

    def read_utilization_samples(self, since_wall: float) -> Sequence[UtilizationSample]:
        since_us = int(since_wall * 1e6)
        try:
            kind, samples = _ask("nvmlDeviceGetSamples", self._handle, nvml.NVML_GPU_UTILIZATION_SAMPLES, since_us)
        except DeviceError as exc:
            if exc.error == "NVML_ERROR_NOT_FOUND":  # nothing newer than since_us
                return ()
            raise
        member = nvml.VALUE_MEMBERS.get(kind, "uiVal")
        read = [
            UtilizationSample(entry.timeStamp / 1e6, getattr(entry.sampleValue, member) / 100.0)  # us, percent
            for entry in samples
        ]
        read.sort()
        return read

    def read_encoder_utilization(self) -> float:
        return float(_ask("nvmlDeviceGetEncoderUtilization", self._handle)[0]) / 100.0  # percent

    def read_decoder_utilization(self) -> float:
        return float(_ask("nvmlDeviceGetDecoderUtilization", self._handle)[0]) / 100.0  # percent

    def read_memory(self) -> Memory:
        return _read_memory(self._handle)

    def read_power(self) -> float:
        return float(_ask("nvmlDeviceGetPowerUsage", self._handle)) / 1e3  # milliwatts

    def read_power_limit(self) -> float:
        return float(_ask("nvmlDeviceGetEnforcedPowerLimit", self._handle)) / 1e3  # milliwatts

    def read_energy(self) -> float:
        return float(_ask("nvmlDeviceGetTotalEnergyConsumption", self._handle)) / 1e3  # millijoules

    def read_temperature(self) -> float:
        return float(_ask("nvmlDeviceGetTemperature", self._handle, nvml.NVML_TEMPERATURE_GPU))

    def read_clocks(self) -> Clocks:
        return Clocks(
            sm=_ask("nvmlDeviceGetClockInfo", self._handle, nvml.NVML_CLOCK_SM) * 1e6,  # MHz
            memory=_ask("nvmlDeviceGetClockInfo", self._handle, nvml.NVML_CLOCK_MEM) * 1e6,
            sm_max=_ask("nvmlDeviceGetMaxClockInfo", self._handle, nvml.NVML_CLOCK_SM) * 1e6,
        )

    def read_throttle_seconds(self) -> Mapping[str, float]:
        values = _ask("nvmlDeviceGetFieldValues", self._handle, self._throttle_fields)
        seconds: dict[str, float] = {}
        for reason, value in zip(nvml.THROTTLE_FIELDS, values, strict=True):
            member = nvml.VALUE_MEMBERS.get(value.valueType)
            if value.nvmlReturn == nvml.NVML_SUCCESS and member is not None:
                seconds[reason] = getattr(value.value, member) / 1e9  # nanoseconds
        return seconds

    def read_throttle_active(self) -> Mapping[str, bool]:
        # The name with "Event" came with driver 535; the older one is what older drivers have.
        active, supported = (
            _first_supported(
                functools.partial(_ask, f"nvmlDeviceGet{which}ClocksEventReasons", self._handle),
                functools.partial(_ask, f"nvmlDeviceGet{which}ClocksThrottleReasons", self._handle),
            )
            for which in ("Current", "Supported")
        )
        return {reason: bool(active & bit) for reason, bit in nvml.THROTTLE_BITS.items() if supported & bit}

    def read_processes(self) -> Processes:
        return Processes(compute=self._count_processes("Compute"), graphics=self._count_processes("Graphics"))

    def _count_processes(self, kind: str) -> int:
        return len(
            _first_supported(
                functools.partial(_ask, f"nvmlDeviceGet{kind}RunningProcesses_v3", self._handle),
                functools.partial(_ask, f"nvmlDeviceGet{kind}RunningProcesses_v2", self._handle),
            )
        )

    def list_instances(self) -> Sequence[Instance]:
        if self._read_mig_mode() != "enabled":
            return ()
        instances: list[Instance] = []
        for position in range(_ask("nvmlDeviceGetMaxMigDeviceCount", self._handle)):
            try:
                handle = _ask("nvmlDeviceGetMigDeviceHandleByIndex", self._handle, position)
            except DeviceError as exc:
                if exc.error == "NVML_ERROR_NOT_FOUND":  # a hole, others may follow
                    continue
                raise
            attributes = _ask("nvmlDeviceGetAttributes_v2", handle)
            gpu_instance = _ask("nvmlDeviceGetGpuInstanceId", handle)
            compute_instance = _ask("nvmlDeviceGetComputeInstanceId", handle)
            # The product name ends in the profile, e.g. "NVIDIA H100 80GB HBM3 MIG 1g.10gb".
            _, _, profile = _text(_ask("nvmlDeviceGetName", handle)).partition(" MIG ")
            identity = InstanceIdentity(
                uuid=_text(_ask("nvmlDeviceGetUUID", handle)),
                mig=f"{gpu_instance}/{compute_instance}",
                profile=profile,
                sm_slices=attributes.gpuInstanceSliceCount,
            )
            instances.append(NvmlInstance(handle, identity))
        return instances


class NvmlBackend:
    """The driver of this host."""

    name = "nvml"

    def __init__(self) -> None:
        self._open = False

    def open(self) -> None:
        if self._open:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as exc:
            raise DriverUnavailable(_explain_init(exc)) from exc
        self._open = True

    def discover(self) -> Sequence[Discovered]:
        try:
            version = _text(_ask("nvmlSystemGetDriverVersion"))
            count = _ask("nvmlDeviceGetCount")
        except DeviceError as exc:
            raise DriverUnavailable(str(exc)) from exc
        found: list[Discovered] = []
        for index in range(count):
            try:
                handle = _ask("nvmlDeviceGetHandleByIndex", index)
                found.append(Discovered(index, NvmlDevice(handle, index, version)))
            except DeviceError as exc:  # one bad GPU costs one GPU
                found.append(Discovered(index, None, str(exc)))
        return found

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return  # the driver went away first: nothing is held any more


def _explain_init(exc: Any) -> str:
    name = _error_name(exc)
    if exc.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return f"libnvidia-ml.so.1 cannot be loaded ({name}): no NVIDIA driver on this host, or it is not mounted here"
    if name == "NVML_ERROR_DRIVER_NOT_LOADED":
        return f"the NVIDIA kernel driver is not loaded ({name})"
    if name == "NVML_ERROR_LIB_RM_VERSION_MISMATCH":
        return f"the driver library does not match the kernel module ({name}): reboot, or restart this container"
    return f"nvmlInit answered {name}"
