"""The layout of the shared table between feeder and C library, defined once.

The ctypes structures below define the layout: the feeder writes through them, and `render_header()` turns them into
the C header that the library is compiled with. A change of layout changes VERSION, which the library checks.
"""

from __future__ import annotations

import ctypes
from typing import Any

MAGIC = 0x4C4D564E  # "NVML"
VERSION = 12
MAX_DEVICES = 16
MAX_SAMPLES = 100  # the length of a real driver's ring is not documented; this ring must be finite like it
MAX_PROCESSES = 128
MAX_WORK = 512  # entries of per-process work
MAX_INSTANCES = 8
MAX_FIELDS = 96
MAX_GPM = 28
MAX_EVENTS = 64
MAX_LINKS = 18
THRESHOLDS = 4
# In a field of NUMBERS: the GPU does not support the call. Not all ones, which drivers answer for "no value".
UNSET = 0xFFFFFFFE

# Calls that answer one unsigned number of a GPU, and the field of Device that has it. The library's function for each
# follows from this line. It answers NOT_SUPPORTED until the field is set.
NUMBERS = {
    "nvmlDeviceGetMinorNumber": "minor",
    "nvmlDeviceGetPersistenceMode": "persistence",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit_mw",
    "nvmlDeviceGetPowerManagementDefaultLimit": "default_limit_mw",
}
# Calls that can fail or be slow on their own, by NVML's name without version suffix.
CALLS = (
    *NUMBERS,
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetSamples",
    "nvmlDeviceGetEncoderUtilization",
    "nvmlDeviceGetDecoderUtilization",
    "nvmlDeviceGetJpgUtilization",
    "nvmlDeviceGetOfaUtilization",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetTemperatureThreshold",
    "nvmlDeviceGetMarginTemperature",
    "nvmlDeviceGetCpuAffinity",
    "nvmlDeviceGetCurrPcieLinkGeneration",
    "nvmlDeviceGetMaxPcieLinkGeneration",
    "nvmlDeviceGetCurrPcieLinkWidth",
    "nvmlDeviceGetMaxPcieLinkWidth",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetGpuFabricInfo",
    "nvmlDeviceRegisterEvents",
    "nvmlGpmQueryDeviceSupport",
    "nvmlGpmSampleGet",
    "nvmlGpmMetricsGet",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceGetPerformanceState",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetGpuInstanceById",
)

u32, u64, i32, double = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_double


class Call(ctypes.Structure):
    """The behaviour of one call of one device: return code, and the delay before it."""

    _fields_ = (("rc", u32), ("delay_us", u32))


class RingSample(ctypes.Structure):
    """One entry of the driver's ring: all values that it samples in a period, in percent."""

    _fields_ = (
        ("time_us", u64),
        ("gpu", u32),
        ("encoder", u32),
        ("decoder", u32),
        ("jpeg", u32),
        ("ofa", u32),
        ("padding", u32),
    )


class Process(ctypes.Structure):
    """One process with a context."""

    _fields_ = (("pid", u32), ("graphics", u32), ("gpu_instance", u32), ("compute_instance", u32), ("memory", u64))


class Work(ctypes.Structure):
    """The work of one process in one period of the driver, in percent."""

    _fields_ = (("time_us", u64), ("pid", u32), ("sm", u32), ("decoder", u32), ("padding", u32))


class Field(ctypes.Structure):
    """One answer of nvmlDeviceGetFieldValues. `value`: the bits of the union. `type`: its nvmlValueType_t."""

    _fields_ = (("id", u32), ("scope", u32), ("rc", u32), ("type", u32), ("value", u64))


class GpmMetric(ctypes.Structure):
    """One GPM metric as its integral over time in the metric's unit, or as a counter (`counts` 1)."""

    _fields_ = (("id", u32), ("counts", u32), ("integral", double))


class Event(ctypes.Structure):
    """One event of the driver."""

    _fields_ = (("device", u32), ("padding", u32), ("type", u64), ("data", u64))


class Instance(ctypes.Structure):
    """One MIG instance."""

    _fields_ = (
        ("uuid", ctypes.c_char * 96),
        ("name", ctypes.c_char * 96),
        ("gpu_instance", u32),
        ("compute_instance", u32),
        ("slices", u32),
        ("compute_slices", u32),
        ("profile_id", u32),
        ("start", u32),  # first slice
        ("memory_total", u64),
        ("memory_used", u64),
        ("memory_free", u64),
        ("gpm_count", u32),
        ("padding2", u32),
        ("gpm", GpmMetric * MAX_GPM),
    )


class Device(ctypes.Structure):
    """One GPU. `sequence` is odd while the feeder writes (seqlock)."""

    _fields_ = (
        ("sequence", u32),
        *((field, u32) for field in NUMBERS.values()),
        ("uuid", ctypes.c_char * 96),
        ("name", ctypes.c_char * 96),
        ("bus_id", ctypes.c_char * 32),
        ("mig_mode", u32),
        ("utilization", u32),
        ("memory_utilization", u32),
        ("encoder", u32),
        ("decoder", u32),
        ("jpeg", u32),
        ("ofa", u32),
        ("temperature", u32),
        ("margin", i32),
        ("thresholds", u32 * THRESHOLDS),  # 0: not supported
        ("link", u32 * 4),  # generation, its maximum, width, its maximum; 0: not supported
        ("cpus", u64 * 2),  # one bit for each CPU near the GPU; 0: not supported
        ("gpm_supported", u32),
        ("remapped", u32 * 4),  # corrected, uncorrected, pending, failed
        (
            "nvlinks",
            u32 * MAX_LINKS,
        ),  # state of each NVLink, plus 1; 0: the board has no such link, or reports no state
        ("fabric", u32 * 3),  # state, status, health mask; state 0: not supported
        ("fabric_version", u32),  # the newest version of the structure that the driver knows; 0: 3
        (
            "processes_by_instance",
            u32,
        ),  # not 0, with MIG: process lists have no instance ids; 1: the board also refuses, as without permission
        ("ecc", u64 * 2),  # corrected, uncorrected
        ("sm_clock_mhz", u32),
        ("memory_clock_mhz", u32),
        ("sm_clock_max_mhz", u32),
        ("performance_state", u32),
        ("power_mw", u32),
        ("energy_mj", u64),
        ("memory_total", u64),
        ("memory_used", u64),
        ("memory_free", u64),
        ("memory_reserved", u64),
        ("field_count", u32),
        ("sample_count", u32),
        ("fields", Field * MAX_FIELDS),
        ("gpm_time", double),  # seconds, when the integrals were taken
        ("gpm_count", u32),
        ("padding2", u32),
        ("gpm", GpmMetric * MAX_GPM),
        ("reasons", u64),
        ("reasons_supported", u64),
        ("samples", RingSample * MAX_SAMPLES),
        ("engine_rings", u32),  # nvmlDeviceGetSamples supports encoder and decoder (1), or all four engines (2)
        ("padding3", u32),
        ("process_count", u32),
        ("instance_count", u32),
        ("processes", Process * MAX_PROCESSES),
        ("work_count", u32),
        ("zombies", u32),  # entries without a process that nvmlDeviceGetProcessUtilization adds (Syllo/nvtop issue 110)
        ("work", Work * MAX_WORK),
        ("instances", Instance * MAX_INSTANCES),
        ("calls", Call * len(CALLS)),
    )


class Table(ctypes.Structure):
    """The whole file. `init_rc`: the answer of nvmlInit, after `init_delay_us`. `event_count`: all events so far.

    `process_bytes`: size of an entry in lists of processes; 0 means 24.
    """

    _fields_ = (
        ("magic", u32),
        ("version", u32),
        ("device_count", u32),
        ("init_rc", u32),
        ("count_rc", u32),
        ("init_delay_us", u32),
        ("count_delay_us", u32),
        ("process_bytes", u32),
        ("driver_version", ctypes.c_char * 80),
        ("event_count", u64),
        ("events", Event * MAX_EVENTS),
        ("devices", Device * MAX_DEVICES),
    )


STRUCTS = (
    (Call, "call_t"),
    (RingSample, "ring_sample_t"),
    (Process, "process_t"),
    (Work, "work_t"),
    (Field, "answer_t"),
    (GpmMetric, "gpm_metric_t"),
    (Event, "event_t"),
    (Instance, "instance_t"),
    (Device, "device_t"),
    (Table, "table_t"),
)


def render_header() -> str:
    """The C header for the structures above."""
    names: dict[Any, str] = {u32: "uint32_t", u64: "uint64_t", i32: "int32_t", double: "double", **dict(STRUCTS)}
    out = ["/* Generated from layout.py. */", "#include <stdint.h>", ""]
    constants = {
        "TABLE_MAGIC": MAGIC,
        "TABLE_VERSION": VERSION,
        "MAX_EVENTS": MAX_EVENTS,
        "MAX_GPM": MAX_GPM,
        "THRESHOLDS": THRESHOLDS,
        "MAX_LINKS": MAX_LINKS,
        "UNSET": UNSET,
    }
    out += [f"#define {name} {value}u" for name, value in constants.items()]
    out += [f"#define CALL_{name} {position}" for position, name in enumerate(CALLS)]
    out.append(" ".join(("#define NUMBERS(X)", *(f"X({name}, {field})" for name, field in NUMBERS.items()))))
    for structure, name in STRUCTS:
        out.append("typedef struct {")
        fields: Any = structure._fields_  # no structure has bit fields
        for field, kind in fields:
            if kind in names:
                out.append(f"    {names[kind]} {field};")
            else:  # an array of characters or of one of the types above
                element = "char" if kind._type_ is ctypes.c_char else names[kind._type_]
                out.append(f"    {element} {field}[{kind._length_}];")
        out += [f"}} {name};", f'_Static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "{name}");']
    return "\n".join(out) + "\n"
