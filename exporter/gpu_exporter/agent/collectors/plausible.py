"""Plausible ranges of the driver's values, for each unit of measurement. Values outside the range are discarded.

A value outside is a fault or a code for "no value", such as a number with all bits set (0xFFFFFFFF: a ratio of
42,949,672.95 as percent, 4,294,967 W as milliwatts), or 0 from a silent sensor. The bounds are far beyond every
product, so that no true value is lost; they do not detect faulty boards. ABSURD also bounds the values of a board that
reports its own limit or maximum.
"""

from __future__ import annotations

from gpu_exporter.common.model.metrics import Range

ABSURD = 2.0  # a value above this many times the board's own limit or maximum is a fault of the driver
RATIO = Range(0.0, 1.0)
SWITCH = Range(0.0, 1.0)
# A board that answers draws power, so 0 means that the sensor does not answer. The largest boards draw 1.4 kW.
WATTS = Range(0.001, 10e3)
JOULES = Range(0.0, 1e13)  # thirty years at the highest power
CELSIUS = Range(-40.0, 200.0)
# The largest memory of one GPU is below 1 TB, or a few TB with the CPU memory that the GPU can address.
MEMORY_BYTES = Range(0.0, 2.0**44)
# Below 2^64 - 1, the sentinel of 64-bit counters. The sentinel of 32 bits (4.3 GB) looks like a count.
MOVED_BYTES = Range(0.0, 1.8e19)
BYTES_PER_SECOND = Range(0.0, 1e13)
HERTZ = Range(0.0, 10e9)
# Below 2^32 - 1, the sentinel of 32 bits.
COUNT = Range(0.0, 4e9)
SECONDS = Range(0.0, 1e9)  # thirty years
PERFORMANCE_STATE = Range(0.0, 15.0)
ACTION = Range(0.0, 254.0)  # nvmlDeviceGpuRecoveryAction_t has 8 values so far; 255 is a byte of all ones
PROCESS_COUNT = Range(0.0, 1e6)
