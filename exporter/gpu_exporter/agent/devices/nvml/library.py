"""Calls NVML. Only this module does that. Answers are plain values, errors are the exporter's own exceptions.

`CALLS` lists all calls that the exporter makes to the driver, under their NVML names. A test compares it with an
allow-list: no call may change state or sleep (nvmlDeviceGetPcieThroughput sleeps for 20 ms). Answers are numbers, texts
and tuples in NVML's units, so that recording.py can store and replay them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import pynvml

from gpu_exporter.agent.devices.errors import OUT_OF_RANGE, DriverUnavailable, NotSupported, device_error
from gpu_exporter.agent.devices.nvml import constants as nvml
from gpu_exporter.agent.devices.nvml import processes, structures
from gpu_exporter.agent.devices.nvml.gpm import GpmWindows
from gpu_exporter.common.clock import SYSTEM_CLOCK, Clock


class Handle(NamedTuple):
    """A device handle from the driver. `name`: "0" is GPU 0, "0/2" is the MIG device at position 2 of GPU 0."""

    name: str
    raw: Any = None


SYSTEM = Handle("")


class Library(Protocol):
    """The interface to NVML. One implementation calls the driver, another replays a recording."""

    def open(self) -> None:
        """Opens the driver. Raises DriverUnavailable."""

    def close(self) -> None:
        """Closes the driver. Never raises."""

    def ask(self, call: str, handle: Handle = SYSTEM, *arguments: Any) -> Any:
        """Makes one of CALLS. Returns its answer. Raises DeviceError or one of its subclasses."""


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _raw(name: str) -> Any:
    """Returns a function of the loaded NVML library, even if this version of pynvml lacks it.

    Raises NotSupported if the library lacks the function.
    """
    try:
        return getattr(pynvml.nvmlLib, name)
    except AttributeError as exc:  # also while no library is loaded
        raise NotSupported(name, "NVML_ERROR_FUNCTION_NOT_FOUND") from exc


def _check(call: str, code: int) -> None:
    if code != nvml.NVML_SUCCESS:
        raise device_error(call, nvml.error_name(code))


def _version_1(structure: type[ctypes.Structure]) -> int:
    """Returns the version number that NVML expects in a structure: its size, with version 1 in the highest byte."""
    return ctypes.sizeof(structure) | 1 << 24


def _temperature(handle: Handle) -> int:
    call = "nvmlDeviceGetTemperatureV"
    found = structures.Temperature(_version_1(structures.Temperature), nvml.NVML_TEMPERATURE_GPU)
    _check(call, _raw(call)(handle.raw, ctypes.byref(found)))
    return int(found.celsius)


def _margin(handle: Handle) -> int:
    call = "nvmlDeviceGetMarginTemperature"
    found = structures.Margin(_version_1(structures.Margin))
    _check(call, _raw(call)(handle.raw, ctypes.byref(found)))
    return int(found.celsius)


def _fabric(handle: Handle) -> tuple[int, int, int]:
    """Returns state, status (a return code) and health mask of the GPU's registration with the fabric."""
    call = "nvmlDeviceGetGpuFabricInfoV"
    found = structures.FabricInfo()
    code = nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH
    for version, size in ((3, ctypes.sizeof(found)), (2, structures.FabricInfo.summary.offset)):
        if code == nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH:
            found.version = size | version << 24
            code = _raw(call)(handle.raw, ctypes.byref(found))
    _check(call, code)
    return found.state, found.status, found.health


def _fabric_before_v(handle: Handle) -> tuple[int, int, int]:
    """Does the same as `_fabric` on drivers that report no health."""
    call = "nvmlDeviceGetGpuFabricInfo"
    found = structures.FabricInfo()
    _check(call, _raw(call)(handle.raw, ctypes.byref(found, structures.FabricInfo.cluster.offset)))
    return found.state, found.status, 0


RING_MAX = 65536  # entries; no driver is known to keep more than some hundred
PROCESSES_MAX = 4096  # entries; some drivers list a hundred invalid entries (Syllo/nvtop issue 110)


def _processes(call: str, handle: Handle) -> processes.Answer:
    function = _raw(call)

    def ask(count: int, buffer: Any) -> tuple[int, int]:
        size = ctypes.c_uint(count)
        code = function(handle.raw, ctypes.byref(size), buffer)
        return code, size.value

    code, answer = processes.list_processes(ask, _buffers.processes)
    _check(call, code)
    return answer


class _Buffers(threading.local):
    """Buffers for NVML's structures, one set for each thread. Every call reuses them."""

    def __init__(self) -> None:
        self.fields: dict[tuple[tuple[int, int], ...], Any] = {}
        self.samples: Any = (structures.NvmlSample * 256)()
        self.utilizations: Any = (structures.NvmlProcessUtilization * 128)()
        self.processes = processes.Buffer()


_buffers = _Buffers()


def _samples(handle: Handle, kind: int, since_us: int) -> tuple[tuple[int, float], ...]:
    """Returns the samples newer than `since_us` as (stamp in microseconds, value). Empty if NVML answers NOT_FOUND.

    Enlarges a full buffer and repeats the call. pynvml would make two calls each time.
    """
    call = "nvmlDeviceGetSamples"
    value_type, since = ctypes.c_uint(0), ctypes.c_ulonglong(since_us)
    while True:
        buffer = _buffers.samples
        count = ctypes.c_uint(len(buffer))
        code = _raw(call)(handle.raw, kind, since, ctypes.byref(value_type), ctypes.byref(count), buffer)
        is_full = code == nvml.NVML_ERROR_INSUFFICIENT_SIZE or (not code and count.value >= len(buffer))
        if not is_full or len(buffer) >= RING_MAX:
            break
        _buffers.samples = (structures.NvmlSample * (2 * len(buffer)))()
    if nvml.error_name(code) == "NVML_ERROR_NOT_FOUND":
        return ()
    _check(call, code)
    words = memoryview(buffer).cast("B")[: count.value * ctypes.sizeof(structures.NvmlSample)]
    stamps = words.cast("Q").tolist()[::2]
    values: list[Any] = words.cast(nvml.VALUE_FORMATS.get(value_type.value, "I")).tolist()  # type: ignore[call-overload]
    step = len(values) // len(stamps) if stamps else 1
    return tuple(zip(stamps, values[step // 2 :: step], strict=True))


def _process_utilization(handle: Handle, since_us: int) -> tuple[tuple[int, int, int, int, int, int], ...] | int:
    """Returns the processes that worked since `since_us`. Empty if NVML answers NOT_FOUND, for which pynvml raises an
    error.

    Each is (pid, stamp in microseconds, percent of SM, memory, encoder, decoder).
    """
    call = "nvmlDeviceGetProcessUtilization"
    while True:
        buffer = _buffers.utilizations
        count = ctypes.c_uint(len(buffer))
        code = _raw(call)(handle.raw, buffer, ctypes.byref(count), ctypes.c_ulonglong(since_us))
        if code != nvml.NVML_ERROR_INSUFFICIENT_SIZE or len(buffer) >= PROCESSES_MAX:
            break
        _buffers.utilizations = (structures.NvmlProcessUtilization * (2 * len(buffer)))()
    if nvml.error_name(code) == "NVML_ERROR_NOT_FOUND":
        return ()
    _check(call, code)
    return tuple(
        (entry.pid, entry.stamp, entry.sm, entry.memory, entry.encoder, entry.decoder)
        for entry in buffer[: min(count.value, len(buffer))]
    )


def _fields(handle: Handle, ids: tuple[tuple[int, int], ...]) -> tuple[tuple[int, float], ...]:
    """Reads fields. `ids`: (field, scope) of each. Returns (return code, value) of each, in the same order."""
    query = _buffers.fields.get(ids)
    if query is None:
        query = _buffers.fields[ids] = (structures.FieldValue * len(ids))()
        for entry, (field, scope) in zip(query, ids, strict=True):
            entry.field, entry.scope = field, scope
    for entry in query:
        entry.code = nvml.NVML_ERROR_UNKNOWN  # in case the driver skips this field
    call = "nvmlDeviceGetFieldValues"
    _check(call, _raw(call)(handle.raw, len(ids), query))
    found: list[tuple[int, float]] = []
    for entry in query:
        member = nvml.VALUE_MEMBERS.get(entry.type)
        if entry.code == nvml.NVML_SUCCESS and member is not None:
            found.append((nvml.NVML_SUCCESS, getattr(entry.value, member)))
        else:  # a value of an unknown type cannot be read
            found.append((entry.code or nvml.NVML_ERROR_FUNCTION_NOT_FOUND, 0))
    return tuple(found)


def _rates(handle: Handle) -> tuple[int, int]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle.raw)
    return rates.gpu, rates.memory


def _memory(handle: Handle, version: int) -> tuple[int, int, int, int | None]:
    info = (
        pynvml.nvmlDeviceGetMemoryInfo(handle.raw, version) if version else pynvml.nvmlDeviceGetMemoryInfo(handle.raw)
    )
    return info.total, info.used, info.free, getattr(info, "reserved", None)


def _attributes(handle: Handle) -> tuple[int, int, int]:
    """Returns (compute slices of the GPU instance, its memory in MiB, compute slices of the compute instance)."""
    attributes = pynvml.nvmlDeviceGetAttributes_v2(handle.raw)
    return attributes.gpuInstanceSliceCount, attributes.memorySizeMB, attributes.computeInstanceSliceCount


def _placement(handle: Handle, gpu_instance: int) -> tuple[int, int]:
    """Returns profile id and first slice of a GPU instance. NVML needs a handle of the GPU instance for this call."""
    info = pynvml.nvmlGpuInstanceGetInfo(pynvml.nvmlDeviceGetGpuInstanceById(handle.raw, gpu_instance))
    return int(info.profileId), int(info.placement.start)


def _simple(call: str) -> Callable[..., Any]:
    """Returns a function for an NVML call whose answer needs no conversion."""

    def ask(handle: Handle, *arguments: Any) -> Any:
        return getattr(pynvml, call)(handle.raw, *arguments)

    return ask


def _first(call: str) -> Callable[..., Any]:
    """Returns a function for an NVML call that answers (percent, period). The function returns only the percent."""

    def ask(handle: Handle) -> Any:
        return getattr(pynvml, call)(handle.raw)[0]

    return ask


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


CALLS: dict[str, Callable[..., Any]] = {
    "nvmlSystemGetDriverVersion": lambda _: _text(pynvml.nvmlSystemGetDriverVersion()),
    "nvmlDeviceGetCount": lambda _: pynvml.nvmlDeviceGetCount(),
    "nvmlDeviceGetHandleByIndex": lambda _, index: Handle(str(index), pynvml.nvmlDeviceGetHandleByIndex(index)),
    "nvmlDeviceGetUUID": lambda handle: _text(pynvml.nvmlDeviceGetUUID(handle.raw)),
    "nvmlDeviceGetName": lambda handle: _text(pynvml.nvmlDeviceGetName(handle.raw)),
    "nvmlDeviceGetPciInfo": lambda handle: _text(pynvml.nvmlDeviceGetPciInfo(handle.raw).busId),
    "nvmlDeviceGetMinorNumber": _simple("nvmlDeviceGetMinorNumber"),
    "nvmlDeviceGetPersistenceMode": _simple("nvmlDeviceGetPersistenceMode"),
    "nvmlDeviceGetCpuAffinity": lambda handle, words: tuple(
        int(word) for word in pynvml.nvmlDeviceGetCpuAffinity(handle.raw, words)
    ),
    "nvmlDeviceGetCurrPcieLinkGeneration": _simple("nvmlDeviceGetCurrPcieLinkGeneration"),
    "nvmlDeviceGetMaxPcieLinkGeneration": _simple("nvmlDeviceGetMaxPcieLinkGeneration"),
    "nvmlDeviceGetCurrPcieLinkWidth": _simple("nvmlDeviceGetCurrPcieLinkWidth"),
    "nvmlDeviceGetMaxPcieLinkWidth": _simple("nvmlDeviceGetMaxPcieLinkWidth"),
    "nvmlDeviceGetUtilizationRates": _rates,
    "nvmlDeviceGetSamples": _samples,
    "nvmlDeviceGetEncoderUtilization": _first("nvmlDeviceGetEncoderUtilization"),
    "nvmlDeviceGetDecoderUtilization": _first("nvmlDeviceGetDecoderUtilization"),
    "nvmlDeviceGetJpgUtilization": _first("nvmlDeviceGetJpgUtilization"),
    "nvmlDeviceGetOfaUtilization": _first("nvmlDeviceGetOfaUtilization"),
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetPowerUsage": _simple("nvmlDeviceGetPowerUsage"),
    "nvmlDeviceGetEnforcedPowerLimit": _simple("nvmlDeviceGetEnforcedPowerLimit"),
    "nvmlDeviceGetPowerManagementDefaultLimit": _simple("nvmlDeviceGetPowerManagementDefaultLimit"),
    "nvmlDeviceGetTotalEnergyConsumption": _simple("nvmlDeviceGetTotalEnergyConsumption"),
    "nvmlDeviceGetTemperatureV": _temperature,
    "nvmlDeviceGetTemperature": _simple("nvmlDeviceGetTemperature"),
    "nvmlDeviceGetTemperatureThreshold": _simple("nvmlDeviceGetTemperatureThreshold"),
    "nvmlDeviceGetMarginTemperature": _margin,
    "nvmlDeviceGetClockInfo": _simple("nvmlDeviceGetClockInfo"),
    "nvmlDeviceGetMaxClockInfo": _simple("nvmlDeviceGetMaxClockInfo"),
    "nvmlDeviceGetPerformanceState": _simple("nvmlDeviceGetPerformanceState"),
    "nvmlDeviceGetFieldValues": _fields,
    "nvmlDeviceGetCurrentClocksEventReasons": _simple("nvmlDeviceGetCurrentClocksEventReasons"),
    "nvmlDeviceGetSupportedClocksEventReasons": _simple("nvmlDeviceGetSupportedClocksEventReasons"),
    "nvmlDeviceGetCurrentClocksThrottleReasons": _simple("nvmlDeviceGetCurrentClocksThrottleReasons"),
    "nvmlDeviceGetSupportedClocksThrottleReasons": _simple("nvmlDeviceGetSupportedClocksThrottleReasons"),
    "nvmlDeviceGetTotalEccErrors": _simple("nvmlDeviceGetTotalEccErrors"),
    "nvmlDeviceGetRemappedRows": _simple("nvmlDeviceGetRemappedRows"),
    "nvmlDeviceGetNvLinkState": _simple("nvmlDeviceGetNvLinkState"),
    "nvmlDeviceGetGpuFabricInfoV": _fabric,
    "nvmlDeviceGetGpuFabricInfo": _fabric_before_v,
    **{
        f"nvmlDeviceGet{kind}RunningProcesses_{version}": (
            lambda handle, call=f"nvmlDeviceGet{kind}RunningProcesses_{version}": _processes(call, handle)
        )
        for kind in ("Compute", "Graphics")
        for version in ("v3", "v2")
    },
    "nvmlDeviceGetProcessUtilization": _process_utilization,
    "nvmlDeviceGetMigMode": lambda handle: int(pynvml.nvmlDeviceGetMigMode(handle.raw)[0]),
    "nvmlDeviceGetMaxMigDeviceCount": _simple("nvmlDeviceGetMaxMigDeviceCount"),
    "nvmlDeviceGetMigDeviceHandleByIndex": lambda handle, position: Handle(
        f"{handle.name}/{position}", pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle.raw, position)
    ),
    "nvmlDeviceGetGpuInstanceId": _simple("nvmlDeviceGetGpuInstanceId"),
    "nvmlDeviceGetComputeInstanceId": _simple("nvmlDeviceGetComputeInstanceId"),
    "nvmlDeviceGetAttributes_v2": _attributes,
    "nvmlGpuInstanceGetInfo": _placement,
    "nvmlGpmQueryDeviceSupport": lambda handle: int(pynvml.nvmlGpmQueryDeviceSupport(handle.raw).isSupportedDevice),
    "nvmlDeviceGetSupportedEventTypes": _simple("nvmlDeviceGetSupportedEventTypes"),
    "nvmlEventSetCreate": lambda _: Handle("events", pynvml.nvmlEventSetCreate()),
    "nvmlDeviceRegisterEvents": lambda handle, events, types: pynvml.nvmlDeviceRegisterEvents(
        handle.raw, types, events.raw
    ),
    "nvmlEventSetFree": lambda events: pynvml.nvmlEventSetFree(events.raw),
}
# These calls need state of the live library: the device of each handle, and the samples of GPM windows.
LIVE_CALLS = ("nvmlEventSetWait_v2", "nvmlGpmMetricsGet", "nvmlGpmSampleFree")


class LiveLibrary:
    """The driver of this host. Calls, through pynvml, the `libnvidia-ml.so.1` that the dynamic linker finds."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._open = False
        self._windows = GpmWindows(clock)
        self._places: dict[int, str] = {}
        self._live: dict[str, Callable[..., Any]] = {
            "nvmlEventSetWait_v2": self._wait,
            "nvmlGpmMetricsGet": lambda handle, *arguments: self._windows.read(handle.raw, *arguments),
            "nvmlGpmSampleFree": lambda _, names: self._windows.forget(names),
        }

    def open(self) -> None:
        if self._open:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as exc:
            name = nvml.error_name(exc.value)
            changed = name == "NVML_ERROR_LIB_RM_VERSION_MISMATCH"
            absent = name in ("NVML_ERROR_LIBRARY_NOT_FOUND", "NVML_ERROR_DRIVER_NOT_LOADED")
            raise DriverUnavailable(explain_init(name), changed=changed, absent=absent) from exc
        self._open = True

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._places.clear()
        self._windows.free()
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            return  # the driver was closed or removed before: no resource is held any more

    def ask(self, call: str, handle: Handle = SYSTEM, *arguments: Any) -> Any:
        try:
            function = CALLS.get(call)
            if function is not None:
                answer = function(handle, *arguments)
                if call == "nvmlDeviceGetHandleByIndex":
                    self._places[_address(answer.raw)] = answer.name
                return answer
            return self._live[call](handle, *arguments)
        except pynvml.NVMLError as exc:
            raise device_error(call, nvml.error_name(exc.value)) from exc
        except ValueError as exc:  # a name or a UUID that is not UTF-8
            raise device_error(call, OUT_OF_RANGE) from exc
        except AttributeError as exc:
            if not hasattr(pynvml, call):  # a binding older than the call
                raise NotSupported(call, "NVML_ERROR_FUNCTION_NOT_FOUND") from exc
            raise

    def _wait(self, events: Handle, timeout_ms: int) -> tuple[str, int, int] | None:
        """Waits for an event: (name of the device's handle, event type, event data). None after the timeout."""
        try:
            event = pynvml.nvmlEventSetWait_v2(events.raw, timeout_ms)
        except pynvml.NVMLError as exc:
            if exc.value == nvml.NVML_ERROR_TIMEOUT:
                return None
            raise
        return self._places.get(_address(event.device), ""), int(event.eventType), int(event.eventData)


def explain_init(name: str) -> str:
    """Returns the meaning of an error of nvmlInit and the remedy, for messages."""
    explanations = {
        "NVML_ERROR_LIBRARY_NOT_FOUND": "libnvidia-ml.so.1 cannot be loaded ({}): no NVIDIA driver on this host, "
        "or it is not mounted here",
        "NVML_ERROR_DRIVER_NOT_LOADED": "the NVIDIA kernel driver is not loaded ({})",
        "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "the driver library does not match the kernel module ({}): reboot, or "
        "restart this container",
        "NVML_ERROR_NO_PERMISSION": "the NVIDIA device files cannot be opened ({}): run as root, or mount them here",
        "NVML_ERROR_UNKNOWN": "the driver gives no reason ({}): in a container, recreate it, because `systemctl "
        "daemon-reload` on the host may have revoked its devices",
    }
    return explanations.get(name, "nvmlInit answered {}").format(name)
