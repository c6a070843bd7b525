"""Facts about GPU products, for simulations.

Memory, board power, maximum SM clock and PCIe generation are from NVIDIA's public data sheets. The idle power of V100
to H100 is from measurements in the SC'24 power study (arXiv 2312.02741), rounded to 5 W; the idle power of other
products is an assumption. The API reference lists the values that each generation reports through NVML (see
docs/metrics.md).
"""

from __future__ import annotations

from typing import NamedTuple

GIB = 1024**3


class Product(NamedTuple):
    """One GPU product: `memory` in bytes, power in watts, clocks in hertz.

    - `pcie`, `nvlink`: bytes per second in one direction.
    - `gpm`: it has GPU performance monitoring (Hopper and newer).
    - `margin`: it reports a temperature margin (Ada and newer) instead of absolute limits.
    - `remap`: it remaps memory rows (Ampere and newer); older products retire pages.
    - `link_bytes`: NVLink counts bytes of each link (Blackwell) instead of KiB of all links.
    - `memory_slices`: number of memory slices of a board with MIG.
    """

    name: str
    memory: int
    idle_power: float
    power_limit: float
    sm_clock: float
    memory_clock: float
    gpm: bool
    pcie: float = 32e9
    nvlink: float = 0.0
    mig: bool = False
    jpeg_ofa: bool = False
    memory_sensor: bool = True
    margin: bool = False
    remap: bool = True
    link_bytes: bool = False
    memory_slices: int = 8


PRODUCTS = {
    "T4": Product("Tesla T4", 15 * GIB, 10.0, 70.0, 1590e6, 5001e6, False, 16e9, memory_sensor=False, remap=False),
    "V100": Product("Tesla V100-SXM2-32GB", 32 * GIB, 40.0, 300.0, 1530e6, 877e6, False, 16e9, 150e9, remap=False),
    "A100": Product(
        "NVIDIA A100-SXM4-80GB", 80 * GIB, 60.0, 400.0, 1410e6, 1593e6, False, 32e9, 300e9, mig=True, jpeg_ofa=True
    ),
    "A30": Product(
        "NVIDIA A30",
        24 * GIB,
        30.0,
        165.0,
        1440e6,
        1215e6,
        False,
        32e9,
        100e9,
        mig=True,
        jpeg_ofa=True,
        memory_slices=4,
    ),
    "H100": Product(
        "NVIDIA H100 80GB HBM3", 80 * GIB, 70.0, 700.0, 1980e6, 2619e6, True, 64e9, 450e9, True, True, margin=True
    ),
    "H200": Product("NVIDIA H200", 141 * GIB, 75.0, 700.0, 1980e6, 3201e6, True, 64e9, 450e9, True, True, margin=True),
    "B200": Product(
        "NVIDIA B200",
        180 * GIB,
        140.0,
        1000.0,
        1965e6,
        3996e6,
        True,
        64e9,
        900e9,
        True,
        True,
        margin=True,
        link_bytes=True,
    ),
    "GH200": Product(
        "NVIDIA GH200 480GB", 96 * GIB, 100.0, 900.0, 1980e6, 2619e6, True, 64e9, 450e9, True, True, margin=True
    ),
}
