"""The NVML backend on the fake C library."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import pytest

from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.agent.devices.nvml.library import LiveLibrary
from gpu_exporter.common.clock import SYSTEM_CLOCK, ManualClock
from tests.component.nvml.nvml_bench import MakeBackend
from tests.testbed.nvml.feeder import NvmlTable


@pytest.fixture
def make_backend(nvml_directory: Path, nvml_table: NvmlTable, monkeypatch: pytest.MonkeyPatch):
    """Makes backends on the fake library in this process. The loader finds the library by name once it is loaded."""
    ctypes.CDLL(str(nvml_directory / "libnvidia-ml.so.1"), mode=ctypes.RTLD_GLOBAL)
    monkeypatch.setenv("GPU_EXPORTER_NVML_TABLE", str(nvml_table.path))
    with contextlib.ExitStack() as stack:

        def make(clock: ManualClock | None = None, library: LiveLibrary | None = None) -> NvmlBackend:
            backend = NvmlBackend(library, clock or SYSTEM_CLOCK)
            stack.callback(backend.close)
            return backend

        yield make


@pytest.fixture
def backend(make_backend: MakeBackend) -> NvmlBackend:
    return make_backend()
