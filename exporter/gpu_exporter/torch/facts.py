"""Settings of the loop that decide how fast it can be. Only numbers, switches and a few fixed words, never names."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from gpu_exporter.torch.gpu_time import find_cuda

Fact: TypeAlias = int | float | bool | str
DTYPES = {"torch.float32": "float32", "torch.float16": "float16", "torch.bfloat16": "bfloat16"}
QUOTAS = ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us")
WHOLE_LOADER = ("num_workers", "prefetch_factor", "batch_size")
SWITCHES = ("pin_memory", "persistent_workers")


def read_facts(loader: object, optimizers: Iterable[object], model: object | None) -> dict[str, Fact]:
    """What is known of the loop's settings; what is not known is left out."""
    facts: dict[str, Fact] = {}
    for name in WHOLE_LOADER:
        value = getattr(loader, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
            facts[name] = value
    for name in SWITCHES:
        value = getattr(loader, name, None)
        if isinstance(value, bool):
            facts[name] = value
    if (dtype := _find_dtype(optimizers)) is not None:
        facts["parameters"] = dtype
    if model is not None:
        facts["data_parallel"] = type(model).__module__ == "torch.nn.parallel.data_parallel"
        is_wrapped = (
            type(model).__name__ == "OptimizedModule"
        )  # of torch.compile(model); model.compile() sets the other
        facts["compiled"] = is_wrapped or getattr(model, "_compiled_call_impl", None) is not None
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["matmul"] = str(torch.get_float32_matmul_precision())
    if (cpus := count_cpus()) is not None:
        facts["cpus"] = cpus
    return facts


def find_gpus(model: object | None) -> list[str]:
    """UUIDs of the GPUs that this process uses: the present device, and those of a DataParallel model."""
    cuda = find_cuda()
    if cuda is None:
        return []
    devices = {cuda.current_device()}
    if type(model).__module__ == "torch.nn.parallel.data_parallel":
        devices |= {each for each in getattr(model, "device_ids", ()) if isinstance(each, int)}
    found: list[str] = []
    for device in sorted(devices)[:16]:
        uuid = getattr(cuda.get_device_properties(device), "uuid", None)  # since torch 2.4
        if uuid is not None:
            text = str(uuid)
            found.append(text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}")
    return found


def count_cpus() -> float | None:
    """CPUs that this process may use: the smaller of its affinity and of its cgroup's quota."""
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


def _find_dtype(optimizers: Iterable[object]) -> str | None:
    """The type of the first parameter that is trained."""
    for optimizer in optimizers:
        groups: Any = getattr(optimizer, "param_groups", None)
        for group in groups if isinstance(groups, list) else ():
            for parameter in group.get("params", ()):
                return DTYPES.get(str(getattr(parameter, "dtype", "")))
    return None


def is_autocast() -> bool:
    """Whether mixed precision is on at this moment."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.is_autocast_enabled())


def is_profiled() -> bool:
    """Whether torch's profiler runs: then times are not those of the program alone."""
    autograd = sys.modules.get("torch.autograd")
    check = getattr(autograd, "_profiler_enabled", None)
    return bool(check()) if check is not None else False
