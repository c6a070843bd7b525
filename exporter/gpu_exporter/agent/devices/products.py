"""Facts about GPU products, for simulations.

Memory, board power, maximum SM clock and PCIe generation are from NVIDIA's public data sheets. The values of GB200,
GB300 and B300, and the PCIe link of GH200 (generation 4, one lane: its CPU is not on PCIe), are from published
nvidia-smi outputs. The idle power of V100 to H100 is from measurements in the SC'24 power study (arXiv 2312.02741),
rounded to 5 W. The idle power of GH200 and Blackwell is the middle of such outputs at 0 % without a process, rounded to
5 W: GH200 73 to 100 W, B200 136 to 145, GB200 156 to 181, B300 135 to 185 (once 238), GB300 171 to 237. The idle power
of other products is an assumption. The API reference lists the values that each generation reports through NVML (see
docs/metrics.md).

RTX PRO 6000 is not here: no publication shows whether this product has GPM and a sensor of its memory.
"""

from __future__ import annotations

from typing import NamedTuple

MIB, GIB = 1024**2, 1024**3


class Product(NamedTuple):
    """One GPU product: `memory` in bytes, power in watts, clocks in hertz.

    - `pcie`, `nvlink`: bytes per second in one direction. 0: no such link, or its rate is not published; then NVML
      reports no traffic.
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


B200 = Product(
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
)
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
    "B200": B200,
    "GH200": Product(
        "NVIDIA GH200 480GB", 96 * GIB, 85.0, 900.0, 1980e6, 2619e6, True, 2e9, 450e9, True, True, margin=True
    ),
    "GB200": B200._replace(
        name="NVIDIA GB200", memory=189471 * MIB, idle_power=170.0, power_limit=1200.0, sm_clock=2062e6, pcie=0.0
    ),
    "B300": B200._replace(
        name="NVIDIA B300 SXM6 AC", memory=275040 * MIB, idle_power=160.0, power_limit=1100.0, sm_clock=2032e6
    ),
    "GB300": B200._replace(
        name="NVIDIA GB300", memory=284208 * MIB, idle_power=205.0, power_limit=1400.0, sm_clock=2070e6, pcie=0.0
    ),
}
