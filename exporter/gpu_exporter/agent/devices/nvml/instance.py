"""Reads one MIG instance through NVML. Also has the functions that an instance and a whole GPU share.

Converts units like device.py: percent to ratio, MiB to bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from gpu_exporter.agent.devices.errors import (
    DeviceError,
    DeviceLost,
    NotSupported,
)
from gpu_exporter.agent.devices.nvml import constants as nvml
from gpu_exporter.agent.devices.nvml.asker import Asker, refusal_of
from gpu_exporter.agent.devices.protocol import (
    Gpm,
    InstanceIdentity,
    Memory,
    Processes,
)
from gpu_exporter.common.model.readings import GpuProcess

MIB = 1024.0**2
NO_INSTANCE = 0xFFFFFFFF  # instance ids of a process that is on no MIG instance


def read_memory(ask: Asker) -> Memory:
    """Reads the memory with version 2 of the call. With version 1 (before driver 510), `used` contains `reserved`."""
    total, used, free, reserved = ask.first(
        ("nvmlDeviceGetMemoryInfo", nvml.NVML_MEMORY_V2), ("nvmlDeviceGetMemoryInfo", 0)
    )
    if not total:  # some boards with MIG report 0 instead of an error
        raise NotSupported("nvmlDeviceGetMemoryInfo", "NVML_ERROR_NO_DATA")
    return Memory(total, used, free, reserved)


def read_processes(ask: Asker, mig: str = "") -> Processes:
    """Returns the processes on the GPU or MIG instance of `ask`. `mig`: the instance of a process whose entry has none.

    Drivers since 510 have version 3 of the calls. A recording contains only the number of processes.
    """
    numbers: list[int] = []
    listed: dict[tuple[int, str], GpuProcess] = {}  # a process may have contexts of both kinds
    complete = True
    for kind in ("Compute", "Graphics"):
        answer = ask.first((f"nvmlDeviceGet{kind}RunningProcesses_v3",), (f"nvmlDeviceGet{kind}RunningProcesses_v2",))
        if isinstance(answer, int):
            numbers.append(answer)
            complete = False
            continue
        numbers.append(len(answer))
        for pid, gpu_instance, compute_instance, memory in answer:
            known = NO_INSTANCE not in (gpu_instance, compute_instance)
            place = f"{gpu_instance}/{compute_instance}" if known else mig
            listed.setdefault((pid, place), GpuProcess(pid, place, memory))  # both lists report the same memory
    return Processes(numbers[0], numbers[1], tuple(listed.values()) if complete else None)


def add_processes(parts: Sequence[Processes]) -> Processes:
    """Combines the processes of all instances of a board. The result has a list only if every instance has a list."""
    listed = [part.listed for part in parts if part.listed is not None]
    return Processes(
        sum(part.compute for part in parts),
        sum(part.graphics for part in parts),
        tuple(process for processes in listed for process in processes) if len(listed) == len(parts) else None,
    )


def _worst(codes: set[int]) -> DeviceError:
    """Returns the error to raise if no metric has a value: a lost GPU first, NotSupported last."""
    errors = [refusal_of("nvmlGpmMetricsGet", code) for code in sorted(codes)]
    errors.sort(key=lambda error: (not isinstance(error, DeviceLost), isinstance(error, NotSupported)))
    return errors[0]


def read_gpm(
    ask: Asker,
    window: str,
    gpu_instance: int = -1,
    engines: tuple[int, ...] = (),
    pipes: Mapping[str, int] = MappingProxyType({}),
) -> Gpm | None:
    """Reads GPM metrics of a window. None until the window is complete. Counts NaN as missing.

    Raises DeviceError if no metric has a value.
    """
    wanted = (*nvml.GPM_METRICS, *engines, *pipes.values())
    answer = ask("nvmlGpmMetricsGet", window, gpu_instance, wanted, about=window)
    if answer is None:
        return None
    span_s, metrics = answer
    codes = {code for _, code, _ in metrics}
    if nvml.NVML_SUCCESS not in codes:
        refusal = _worst(codes)
        if isinstance(refusal, NotSupported):
            ask.support.note(("nvmlGpmMetricsGet", window), refusal)
        raise refusal
    found = {metric: value for metric, code, value in metrics if code == nvml.NVML_SUCCESS and math.isfinite(value)}
    # A metric that this device reported before but not now is missing, unless the device now refuses it.
    known = ask.support.answered
    missing = any(
        metric not in found and (window, metric) in known and not isinstance(refusal_of("", code), NotSupported)
        for metric, code, _ in metrics
        if metric not in pipes.values()
    )
    known.update((window, metric) for metric in found)
    named = (*nvml.GPM_RATIOS.items(), *pipes.items())
    ratios = {name: found[metric] / 100.0 for name, metric in named if metric in found}  # percent
    rates = {
        name: sum(found[metric] for metric in pair) * MIB  # MiB/s
        for name, pair in nvml.GPM_RATES.items()
        if all(metric in found for metric in pair)
    }
    if not ratios and not rates:
        return None  # only NaN: the driver's samples did not change
    busiest = [found[metric] / 100.0 for metric in engines if metric in found]  # percent
    return Gpm(
        span_s,
        **ratios,
        **rates,
        engines=max(busiest, default=None),
        missing=missing,
        elapsed_cycles=found.get(nvml.NVML_GPM_METRIC_SM_CYCLES_ELAPSED),
        active_cycles=found.get(nvml.NVML_GPM_METRIC_SM_CYCLES_ACTIVE),
    )


class NvmlInstance:
    """One MIG instance, with a handle that is valid in the present cycle."""

    def __init__(
        self, ask: Asker, identity: InstanceIdentity, window: str, gpm: Asker, require_gpm: Callable[[], None]
    ) -> None:
        """`window`: name of the GPM window. `gpm`: makes the GPM calls, for the board or for the instance.

        `require_gpm` raises NotSupported on a board without GPM.
        """
        self.identity = identity
        self._ask = ask
        self._require_gpm = require_gpm
        self._window = window
        self._gpm = gpm

    def read_memory(self) -> Memory:
        return read_memory(self._ask)

    def read_gpm(self) -> Gpm | None:
        self._require_gpm()
        gpu_instance = int(self.identity.mig.partition("/")[0]) if self._gpm is not self._ask else -1
        return read_gpm(self._gpm, self._window, gpu_instance, nvml.GPM_ENGINES)
