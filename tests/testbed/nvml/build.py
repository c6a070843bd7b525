"""Compiles the fake NVML library into the test bed's cache, once per source and driver generation."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.testbed.nvml.layout import NUMBERS, render_header
from tests.testbed.programs import cache_root

SOURCE = Path(__file__).resolve().parent / "libnvidia_ml.c"
NAME = "libnvidia-ml.so.1"
FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", f"-Wl,-soname,{NAME}")
# Functions that older drivers do not export yet (API reference, change log by release).
_AFTER_535 = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetMarginTemperature", "nvmlDeviceGetGpuFabricInfoV")
_AFTER_470 = (
    *_AFTER_535,
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetSupportedClocksEventReasons",
    "nvmlDeviceGetGpuFabricInfo",
    "nvmlDeviceGetJpgUtilization",
    "nvmlDeviceGetOfaUtilization",
    "nvmlGpmQueryDeviceSupport",
    "nvmlGpmSampleAlloc",
    "nvmlGpmSampleFree",
    "nvmlGpmSampleGet",
    "nvmlGpmMigSampleGet",
    "nvmlGpmMetricsGet",
)
MISSING: dict[str, tuple[str, ...]] = {"580": (), "535": _AFTER_535, "470": _AFTER_470}


def render_symbols(driver: str) -> str:
    """The linker's list of functions that this driver exports."""
    functions = re.findall(r"^(?:ret_t|const char \*)\s*(nvml\w+)\(", SOURCE.read_text("utf-8"), re.MULTILINE)
    exported = "".join(f"{name}; " for name in (*NUMBERS, *functions) if name not in MISSING[driver])
    return f"{{ global: {exported}local: *; }};\n"


def build_library(driver: str = "580") -> Path:
    """The directory that holds libnvidia-ml.so.1: for LD_LIBRARY_PATH."""
    header, symbols = render_header(), render_symbols(driver)
    parts = (SOURCE.read_text("utf-8"), header, symbols, *FLAGS)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    target = cache_root() / f"nvml-{key}"
    if (target / NAME).exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        work = Path(name)
        (work / "table.h").write_text(header, encoding="utf-8")
        (work / "symbols").write_text(symbols, encoding="utf-8")
        script = f"-Wl,--version-script={work / 'symbols'}"
        subprocess.run(["gcc", *FLAGS, script, "-I", name, "-o", str(work / NAME), str(SOURCE)], check=True)
        finished = Path(tempfile.mkdtemp(dir=target.parent))
        shutil.move(str(work / NAME), str(finished / NAME))
        try:
            finished.rename(target)
        except OSError:  # another process was faster
            shutil.rmtree(finished)
    return target
