"""Reads GPM (GPU performance monitoring): samples of counters, and the metrics that NVML computes from two samples.

The two samples must be more than 100 ms apart (nvmlGpmSampleGet, note). Each window therefore keeps the sample of the
last cycle, and a second buffer for the next sample. The buffers are allocated once and swapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterable
from typing import Any

import pynvml

from gpu_exporter.agent.devices.nvml import constants as nvml
from gpu_exporter.agent.devices.nvml import structures
from gpu_exporter.common.clock import Clock

SHORTEST_S = 0.1  # a shorter distance is invalid on Hopper
LONGEST_S = 60.0  # after a longer distance a new window begins, because a mean over more time is never used
UNTOUCHED = 999  # NVML_ERROR_UNKNOWN
GpmAnswer = tuple[float, tuple[tuple[int, int, float], ...]]


class _SampleWindow:
    """The GPM buffers of one GPU or instance: the last sample with its time, and a spare buffer."""

    def __init__(self) -> None:
        self.last = pynvml.nvmlGpmSampleAlloc()
        try:
            self.spare = pynvml.nvmlGpmSampleAlloc()
        except pynvml.NVMLError:
            pynvml.nvmlGpmSampleFree(self.last)
            raise
        self.at: float | None = None

    def free(self) -> None:
        for sample in (self.last, self.spare):
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(sample)


class GpmWindows:
    """The windows (pairs of samples) of this process, by name. Each has one thread and one kind of sample."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._windows: dict[str, _SampleWindow] = {}

    def read(self, raw: Any, name: str, gpu_instance: int, metrics: tuple[int, ...]) -> GpmAnswer | None:
        """Returns the metrics since the last read of this window: (length in seconds, ((metric, return code, value),
        ...)).

        Samples the GPU instance `gpu_instance` of the GPU `raw`. A negative `gpu_instance` samples `raw` itself (a GPU
        or a MIG device). None at the first read, or if the last sample is older than LONGEST_S or newer than
        SHORTEST_S. Raises NVMLError.
        """
        window = self._windows.get(name)
        if window is None:
            window = self._windows[name] = _SampleWindow()
        if window.at is not None and self._clock.monotonic() - window.at <= SHORTEST_S:
            return None
        before, window.at = window.at, None  # a failure after this line starts a new window
        if gpu_instance >= 0:
            pynvml.nvmlGpmMigSampleGet(raw, gpu_instance, window.spare)
        else:
            pynvml.nvmlGpmSampleGet(raw, window.spare)
        now = self._clock.monotonic()
        window.last, window.spare = window.spare, window.last
        window.at = now
        if before is None or now - before > LONGEST_S:
            return None
        return now - before, _compare(window.spare, window.last, metrics)

    def forget(self, names: Iterable[str]) -> None:
        """Frees the buffers of the windows with these names."""
        for name in names:
            if (window := self._windows.pop(name, None)) is not None:
                window.free()

    def free(self) -> None:
        self.forget(list(self._windows))


class _Queries(threading.local):
    """Keeps one nvmlGpmMetricsGet_t (20 KiB) for each thread, to reuse it."""

    def __init__(self) -> None:
        self.structure = structures.GpmMetrics()
        self.structure.version = nvml.NVML_GPM_METRICS_GET_VERSION
        self.entries: dict[tuple[int, ...], list[structures.GpmMetric]] = {}


_queries = _Queries()


def _compare(first: Any, second: Any, metrics: tuple[int, ...]) -> tuple[tuple[int, int, float], ...]:
    query = _queries.structure
    query.count = len(metrics)
    query.first = ctypes.cast(first, ctypes.c_void_p)
    query.second = ctypes.cast(second, ctypes.c_void_p)
    entries = _queries.entries.get(metrics)
    if entries is None:
        entries = _queries.entries[metrics] = [query.metrics[position] for position in range(len(metrics))]
    for entry, metric in zip(entries, metrics, strict=True):
        entry.metric, entry.code = metric, UNTOUCHED  # an error, in case the driver skips this metric
    pynvml.nvmlGpmMetricsGet(query)
    return tuple((entry.metric, entry.code, entry.value) for entry in entries)
