"""The few facts about GPU products that a simulation needs.

Source: NVIDIA's public data sheets (memory, board power, maximum SM clock); idle power from measurements in the
SC'24 power study (arXiv 2312.02741) rounded to 5 W.
"""

from __future__ import annotations

from typing import NamedTuple

GIB = 1024**3


class Product(NamedTuple):
    """`memory` in bytes, power in watts, clocks in hertz. `gpm`: activity per MIG instance can be told."""

    name: str
    memory: int
    idle_power: float
    power_limit: float
    sm_clock: float
    memory_clock: float
    gpm: bool


PRODUCTS = {
    "V100": Product("Tesla V100-SXM2-32GB", 32 * GIB, 40.0, 300.0, 1530e6, 877e6, False),
    "A100": Product("NVIDIA A100-SXM4-80GB", 80 * GIB, 60.0, 400.0, 1410e6, 1593e6, False),
    "H100": Product("NVIDIA H100 80GB HBM3", 80 * GIB, 70.0, 700.0, 1980e6, 2619e6, True),
    "H200": Product("NVIDIA H200", 141 * GIB, 75.0, 700.0, 1980e6, 3201e6, True),
}
