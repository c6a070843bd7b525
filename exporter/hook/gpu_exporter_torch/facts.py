"""Reads the settings of the loop that limit its speed. Only numbers, switches and a few words, never names."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Union

from gpu_exporter_torch.gpu_time import find_cuda
from gpu_exporter_torch.report_rules import DTYPES, GPUS_MAX, NUMBERS

Fact = Union[int, float, bool, str]
QUOTAS = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us")
WHOLE_LOADER = ("num_workers", "prefetch_factor", "batch_size")
SWITCHES = ("pin_memory", "persistent_workers")


class LoopFacts:
    """The settings of a loop. They are read at set-up, so this object keeps no reference to model and optimizers."""

    def __init__(self, loader: object, optimizers: Iterable[object], model: object | None) -> None:
        self._known: dict[str, Fact] = {}
        self.device: int | None = None
        """index of the GPU of the first parameter; None on a CPU, or if no parameter is known"""
        self.is_placed = False
        """whether a parameter shows where the loop computes; otherwise it may be on the present device of torch"""
        self._devices: list[int] = []
        for read in (_of_loader, _of_model):
            with contextlib.suppress(Exception):  # an unusual loader or model: these facts are not known
                self._known |= read(loader if read is _of_loader else model)
        with contextlib.suppress(Exception):
            self._read_parameter(optimizers, model)

    def _read_parameter(self, optimizers: Iterable[object], model: Any) -> None:
        parameter = _first_parameter(optimizers, model)
        dtype = str(getattr(parameter, "dtype", "")).partition("torch.")[2]
        if dtype in DTYPES:
            self._known["parameters"] = dtype
        device: Any = getattr(parameter, "device", None)
        self.is_placed = device is not None
        if getattr(device, "type", "") == "cuda":
            self.device = device.index if device.index is not None else 0
            self._devices = [self.device]
            if self._known.get("data_parallel"):
                self._devices = sorted({self.device, *(each for each in model.device_ids if isinstance(each, int))})

    def read(self) -> dict[str, Fact]:
        """Returns the known settings of the loop. Omits unknown settings."""
        found = dict(self._known)
        with contextlib.suppress(Exception):  # after the new settings of torch.backends, the old ones cannot be read
            found["matmul"] = _read_matmul()
        with contextlib.suppress(Exception):
            if (cpus := count_cpus()) is not None:
                found["cpus"] = cpus
        return found

    def find_gpus(self) -> list[str]:
        """UUIDs of the GPUs that the model uses. Empty if they are unknown, or if the model is on a CPU."""
        cuda, found = find_cuda(), list[str]()
        if cuda is None:
            return found
        devices = self._devices
        if not self.is_placed and cuda.device_count() == 1:
            devices = [0]
        for device in devices[:GPUS_MAX]:
            uuid = getattr(cuda.get_device_properties(device), "uuid", None)  # since torch 2.4
            if uuid is not None:
                text = str(uuid)  # without a prefix, also of a MIG instance
                found.append(text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}")
        return found


def _of_loader(loader: object) -> dict[str, Fact]:
    found: dict[str, Fact] = {}
    for name in WHOLE_LOADER:
        value = getattr(loader, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= NUMBERS[name]:
            found[name] = value
    for name in SWITCHES:
        value = getattr(loader, name, None)
        if isinstance(value, bool):
            found[name] = value
    kind = getattr(loader, "_dataset_kind", None)  # 1: an IterableDataset, which every worker reads whole by itself
    if kind in (0, 1):
        found["iterable"] = kind == 1
    return found


def _of_model(model: object) -> dict[str, Fact]:
    if model is None:
        return {}
    is_wrapped = type(model).__name__ == "OptimizedModule"  # of torch.compile(model); model.compile() sets the other
    return {
        "data_parallel": type(model).__module__ == "torch.nn.parallel.data_parallel",
        "compiled": is_wrapped or getattr(model, "_compiled_call_impl", None) is not None,
    }


def _read_matmul() -> str:
    """The precision of float32 matrix products. Raises LookupError, RuntimeError or AttributeError if it is unknown."""
    torch = sys.modules["torch"]
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:  # it was set by torch.backends.cuda.matmul.fp32_precision
        return {"ieee": "highest", "tf32": "high"}[torch.backends.cuda.matmul.fp32_precision]


def _first_parameter(optimizers: Iterable[object], model: Any) -> Any:
    """The first parameter of the optimizers, otherwise the first one of the model. None without any parameter."""
    for optimizer in optimizers:
        groups: Any = getattr(optimizer, "param_groups", None)
        for group in groups if isinstance(groups, list) else ():
            for parameter in group.get("params", ()):
                return parameter
    return None if model is None else next(iter(model.parameters()), None)


def count_cpus() -> float | None:
    """Returns the number of CPUs that this process may use: the smaller of its CPU affinity and its cgroup's quota."""
    allowed = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None
    quota = _read_quota()
    return quota if allowed is None else allowed if quota is None else min(allowed, quota)


def _read_quota() -> float | None:
    unified, quota, period = (_read(path) for path in QUOTAS)
    most, each = unified.split()[:2] if len(unified.split()) >= 2 else (quota.strip(), period.strip())
    return int(most) / int(each) if most.isdecimal() and each.isdecimal() and int(each) else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text("ascii")[:100]
    except (OSError, ValueError):
        return ""


def is_autocast() -> bool:
    """Returns whether mixed precision is on at this moment."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.is_autocast_enabled())


def is_profiled() -> bool:
    """Returns whether torch's profiler is running. It slows the program down, so times are then not measured."""
    autograd = sys.modules.get("torch.autograd")
    check = getattr(autograd, "_profiler_enabled", None)
    return bool(check()) if check is not None else False
