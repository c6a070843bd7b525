"""NVML's numeric constants under their NVML names.

Older versions of pynvml lack some of these names, so the exporter uses this table. A test compares every row with the
newest pynvml. Source: nvml.h, as published with nvidia-ml-py 13.615.71.
"""

from __future__ import annotations

import re

NVML_SUCCESS = 0
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_INSUFFICIENT_SIZE = 7
NVML_ERROR_TIMEOUT = 10
NVML_ERROR_FUNCTION_NOT_FOUND = 13
NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25
NVML_ERROR_UNKNOWN = 999

ERROR_NAMES = {
    1: "NVML_ERROR_UNINITIALIZED",
    2: "NVML_ERROR_INVALID_ARGUMENT",
    3: "NVML_ERROR_NOT_SUPPORTED",
    4: "NVML_ERROR_NO_PERMISSION",
    5: "NVML_ERROR_ALREADY_INITIALIZED",
    6: "NVML_ERROR_NOT_FOUND",
    7: "NVML_ERROR_INSUFFICIENT_SIZE",
    8: "NVML_ERROR_INSUFFICIENT_POWER",
    9: "NVML_ERROR_DRIVER_NOT_LOADED",
    10: "NVML_ERROR_TIMEOUT",
    11: "NVML_ERROR_IRQ_ISSUE",
    12: "NVML_ERROR_LIBRARY_NOT_FOUND",
    13: "NVML_ERROR_FUNCTION_NOT_FOUND",
    14: "NVML_ERROR_CORRUPTED_INFOROM",
    15: "NVML_ERROR_GPU_IS_LOST",
    16: "NVML_ERROR_RESET_REQUIRED",
    17: "NVML_ERROR_OPERATING_SYSTEM",
    18: "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
    19: "NVML_ERROR_IN_USE",
    20: "NVML_ERROR_MEMORY",
    21: "NVML_ERROR_NO_DATA",
    22: "NVML_ERROR_VGPU_ECC_NOT_SUPPORTED",
    23: "NVML_ERROR_INSUFFICIENT_RESOURCES",
    24: "NVML_ERROR_FREQ_NOT_SUPPORTED",
    25: "NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
    26: "NVML_ERROR_DEPRECATED",
    27: "NVML_ERROR_NOT_READY",
    28: "NVML_ERROR_GPU_NOT_FOUND",
    29: "NVML_ERROR_INVALID_STATE",
    30: "NVML_ERROR_RESET_TYPE_NOT_SUPPORTED",
    999: "NVML_ERROR_UNKNOWN",
}


def error_name(code: int) -> str:
    return ERROR_NAMES.get(code, f"NVML error {code}")


NVML_GPU_UTILIZATION_SAMPLES = 1
ENGINE_SAMPLES = {"encoder": 3, "decoder": 4, "jpeg": 8, "ofa": 9}  # NVML_ENC_UTILIZATION_SAMPLES and so on
NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM = 1
NVML_CLOCK_MEM = 2
NVML_DEVICE_MIG_ENABLE = 1
NVML_FEATURE_ENABLED = 1
NVML_VALUE_ALL_LINKS = 0xFFFFFFFF  # scope of the NVLink fields: UINT_MAX is all links together
NVLINKS = 18  # links of a board on Hopper and Blackwell, used if the driver does not report the number
NVLINKS_MAX = 256  # of any board: a larger count is invalid
MIG_DEVICES = 7  # of a board, used if the driver does not report the maximum
MIG_DEVICES_MAX = 64  # of any board
# Boards that use the host's memory, which some drivers report as the board's memory: Grace Blackwell of DGX Spark, and
# Jetson (nvgpu). GH200 and GB200 have their own memory.
NO_MEMORY_OF_ITS_OWN = re.compile(r"\b(GB10|Orin|Thor|Xavier|Jetson|Tegra|nvgpu)\b")
nvmlEventTypeXidCriticalError = 0x8  # noqa: N816 - NVML's own spelling
NVML_MEMORY_V2 = 0x02000028  # nvmlMemory_v2: struct size 40, version 2

# Nanosecond counters of time spent in each clock event reason (nvmlDeviceGetFieldValues).
NVML_FI_DEV_PERF_POLICY_POWER = 74
NVML_FI_DEV_PERF_POLICY_THERMAL = 75
NVML_FI_DEV_PERF_POLICY_SYNC_BOOST = 76
NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT = 77
NVML_FI_DEV_PERF_POLICY_LOW_UTILIZATION = 78
NVML_FI_DEV_PERF_POLICY_RELIABILITY = 79
NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN = 269
NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN = 270
NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN = 271

NVML_GPU_FABRIC_STATE_NOT_SUPPORTED = 0
# NVML_GPU_FABRIC_HEALTH_MASK: problem, lowest bit, width in bits, and the value that means the problem.
FABRIC_PROBLEMS = (
    ("degraded bandwidth", 0, 2, 1),
    ("route recovery", 2, 2, 1),
    ("unhealthy route", 4, 2, 1),
    ("access timeout recovery", 6, 2, 1),
    ("incorrect system GUID", 8, 4, 2),
    ("incorrect chassis serial number", 8, 4, 3),
    ("no partition", 8, 4, 4),
    ("too few NVLinks", 8, 4, 5),
    ("incompatible GPU firmware", 8, 4, 6),
    ("invalid location", 8, 4, 7),
    ("invalid GPU state", 8, 4, 8),
)

NVML_FI_DEV_RETIRED_SBE = 29
NVML_FI_DEV_RETIRED_DBE = 30
NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL = 38
NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL = 45
NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL = 52
NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL = 59
NVML_FI_DEV_MEMORY_TEMP = 82
NVML_FI_DEV_NVLINK_LINK_COUNT = 91
NVML_FI_DEV_PCIE_REPLAY_COUNTER = 94
NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139
NVML_FI_DEV_PCIE_COUNT_TX_BYTES = 197
NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 198
NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES = 202
NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES = 204
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230

NVLINK_ERRORS = {
    "crc_flit": NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    "crc_data": NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    "replay": NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    "recovery": NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
}

# GPM metrics (nvmlGpmMetricsGet): percent, then MiB/s, then cycles since the driver was loaded.
NVML_GPM_METRIC_GRAPHICS_UTIL = 1
NVML_GPM_METRIC_SM_UTIL = 2
NVML_GPM_METRIC_SM_OCCUPANCY = 3
NVML_GPM_METRIC_ANY_TENSOR_UTIL = 5
NVML_GPM_METRIC_DRAM_BW_UTIL = 10
NVML_GPM_METRIC_FP64_UTIL = 11
NVML_GPM_METRIC_FP32_UTIL = 12
NVML_GPM_METRIC_FP16_UTIL = 13
NVML_GPM_METRIC_PCIE_TX_PER_SEC = 20
NVML_GPM_METRIC_PCIE_RX_PER_SEC = 21
NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC = 60
NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC = 61
NVML_GPM_METRIC_SM_CYCLES_ELAPSED = 248
NVML_GPM_METRIC_SM_CYCLES_ACTIVE = 249
NVML_GPM_METRICS_GET_VERSION = 1
GPM_RATIOS = {
    "graphics": NVML_GPM_METRIC_GRAPHICS_UTIL,
    "sm": NVML_GPM_METRIC_SM_UTIL,
    "occupancy": NVML_GPM_METRIC_SM_OCCUPANCY,
    "tensor": NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "dram": NVML_GPM_METRIC_DRAM_BW_UTIL,
}
# Of whole GPUs, only for the detection of stalls. They are not witnesses, so activity stays known if one fails.
GPM_PIPES = {
    "fp64": NVML_GPM_METRIC_FP64_UTIL,
    "fp32": NVML_GPM_METRIC_FP32_UTIL,
    "fp16": NVML_GPM_METRIC_FP16_UTIL,
}
GPM_RATES = {
    "pcie": (NVML_GPM_METRIC_PCIE_TX_PER_SEC, NVML_GPM_METRIC_PCIE_RX_PER_SEC),
    "nvlink": (NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC, NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC),
}
# GPM metrics of the engines NVDEC, NVJPG, OFA, NVENC, for MIG instances. No other call reports these engines there.
GPM_ENGINES = (*range(30, 38), *range(40, 48), 50, 51, *range(166, 170))
GPM_METRICS = (
    *GPM_RATIOS.values(),
    *(metric for pair in GPM_RATES.values() for metric in pair),
    NVML_GPM_METRIC_SM_CYCLES_ELAPSED,
    NVML_GPM_METRIC_SM_CYCLES_ACTIVE,
)

# nvmlTemperatureThresholds_t: limits as absolute temperatures, before Ada (newer boards report the margin).
NVML_TEMPERATURE_THRESHOLD_SHUTDOWN = 0
NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1
NVML_TEMPERATURE_THRESHOLD_MEM_MAX = 2
NVML_TEMPERATURE_THRESHOLD_GPU_MAX = 3
TEMPERATURE_LIMITS = {
    "shutdown": NVML_TEMPERATURE_THRESHOLD_SHUTDOWN,
    "slowdown": NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
    "memory_max": NVML_TEMPERATURE_THRESHOLD_MEM_MAX,
    "gpu_max": NVML_TEMPERATURE_THRESHOLD_GPU_MAX,
}

NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
ECC_SEVERITIES = {
    "corrected": NVML_MEMORY_ERROR_TYPE_CORRECTED,
    "uncorrected": NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
}

THROTTLE_FIELDS = {
    "power_cap": NVML_FI_DEV_PERF_POLICY_POWER,
    "thermal": NVML_FI_DEV_PERF_POLICY_THERMAL,
    "sync_boost": NVML_FI_DEV_PERF_POLICY_SYNC_BOOST,
    "board_limit": NVML_FI_DEV_PERF_POLICY_BOARD_LIMIT,
    "low_utilization": NVML_FI_DEV_PERF_POLICY_LOW_UTILIZATION,
    "reliability": NVML_FI_DEV_PERF_POLICY_RELIABILITY,
    "sw_thermal": NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN,
    "hw_thermal": NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN,
    "hw_power_brake": NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN,
}

# Bits of nvmlDeviceGetCurrentClocksEventReasons. GpuIdle and the two clock settings are not throttling.
THROTTLE_BITS = {
    "power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
    "board_limit": 0x200,
    "reliability": 0x400,
}

THROTTLE_MAX = 0xFFFF  # above the bits of all reasons; a number with all bits set means "no value"

# Members of the union nvmlValue_t by nvmlValueType_t.
VALUE_FORMATS = {0: "d", 1: "I", 2: "L", 3: "Q", 4: "q", 5: "i", 6: "H"}  # nvmlValueType_t, as of the module struct
VALUE_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
