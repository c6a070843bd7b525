"""The numbers of the search for stalls, and the power of boards at rest that was published."""

from __future__ import annotations

import re

from gpu_exporter.common.config.defaults import Stalls

StallRules = Stalls
MINUTE_S = 60.0
STEP_S = 10.0  # power is compared as means of this long: the energy counter of older boards increases in steps of 1 s

# Power of a board at rest, in watts: the lowest published value, by a pattern of NVML's product name. A lower floor
# accuses less. Sources: V100 and H100 SXM, Yang et al., SC'24 (arXiv 2312.02741); A100 SXM, the recording A100_5050 of
# the same authors (56 W at utilization 0), rounded down; H200, the recording in tests/fixtures/recordings (79 W).
RESTING_W = (
    (re.compile(r"V100-SXM2"), 40.0),
    (re.compile(r"A100-SXM4"), 55.0),
    (re.compile(r"H100 80GB HBM3"), 70.0),
    (re.compile(r"\bH200$"), 78.0),
)
# Boards without NVLink, where an unknown NVLink traffic hides nothing. Source: NVIDIA's data sheets.
NO_NVLINK = re.compile(r"\b(T4|L4|L40S?|A2|A10|A16|P4|P40)\b")


def resting_power(name: str) -> float | None:
    """Watts at rest of the product with this NVML name, None if no source gives it."""
    return next((watts for pattern, watts in RESTING_W if pattern.search(name)), None)
