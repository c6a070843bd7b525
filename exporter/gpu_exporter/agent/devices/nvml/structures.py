"""NVML's structures that are read every second, as plain ctypes.

pynvml creates its own structures for each call, and runs Python code at each access to a member. This would take half
of a cycle's time. The layouts are NVML's ABI. A test compares sizes and offsets with pynvml.
"""

from __future__ import annotations

import ctypes

u32, u64, i64 = ctypes.c_uint, ctypes.c_ulonglong, ctypes.c_longlong
METRICS_MAX = 512  # room of nvmlGpmMetricsGet_t; NVML_GPM_METRIC_MAX is 477 in nvidia-ml-py 13.615.71


class Value(ctypes.Union):
    """nvmlValue_t."""

    _fields_ = (
        ("dVal", ctypes.c_double),
        ("siVal", ctypes.c_int),
        ("uiVal", u32),
        ("ulVal", ctypes.c_ulong),
        ("ullVal", u64),
        ("sllVal", i64),
        ("usVal", ctypes.c_ushort),
    )


class NvmlSample(ctypes.Structure):
    """nvmlSample_t. `stamp`: microseconds of the wall clock."""

    _fields_ = (("stamp", u64), ("value", Value))


class NvmlProcessUtilization(ctypes.Structure):
    """nvmlProcessUtilizationSample_t. `stamp`: microseconds of the wall clock. Utilizations are in percent."""

    _fields_ = (("pid", u32), ("stamp", u64), ("sm", u32), ("memory", u32), ("encoder", u32), ("decoder", u32))


class FieldValue(ctypes.Structure):
    """nvmlFieldValue_t."""

    _fields_ = (
        ("field", u32),
        ("scope", u32),
        ("timestamp", i64),
        ("latency_us", i64),
        ("type", u32),
        ("code", u32),
        ("value", Value),
    )


class GpmMetric(ctypes.Structure):
    """nvmlGpmMetric_t."""

    _fields_ = (
        ("metric", u32),
        ("code", u32),
        ("value", ctypes.c_double),
        ("short_name", ctypes.c_char_p),
        ("long_name", ctypes.c_char_p),
        ("unit", ctypes.c_char_p),
    )


class GpmMetrics(ctypes.Structure):
    """nvmlGpmMetricsGet_t."""

    _fields_ = (
        ("version", u32),
        ("count", u32),
        ("first", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("metrics", GpmMetric * METRICS_MAX),
    )


class Temperature(ctypes.Structure):
    """nvmlTemperature_v1_t."""

    _fields_ = (("version", u32), ("sensor", ctypes.c_int), ("celsius", ctypes.c_int))


class Margin(ctypes.Structure):
    """nvmlMarginTemperature_v1_t."""

    _fields_ = (("version", u32), ("celsius", ctypes.c_int))


class FabricInfo(ctypes.Structure):
    """nvmlGpuFabricInfo_v3_t. Version 2 lacks the last member. The older nvmlGpuFabricInfo_t begins with `cluster`, and
    ends with `state`.
    """

    _fields_ = (
        ("version", u32),
        ("cluster", ctypes.c_ubyte * 16),
        ("status", u32),
        ("clique", u32),
        ("state", ctypes.c_ubyte),
        ("health", u32),
        ("summary", ctypes.c_ubyte),
    )
