"""Thresholds for the detection of stalls, and the published power of boards at rest."""

from __future__ import annotations

import re
from typing import NamedTuple

from gpu_exporter.common.config.defaults import Settings

MINUTE_S = 60.0
STEP_S = 10.0  # power is compared as means of this long: the energy counter of older boards increases in steps of 1 s

# Power of a board at rest, in watts: the lowest published value, by a pattern of NVML's product name. With a lower
# value, fewer runs are stalls. Sources: V100 and H100 SXM, Yang et al., SC'24 (arXiv 2312.02741); A100 SXM, the
# recording A100_5050 of the same authors (56 W at utilization 0), rounded down; H200, the recording in
# tests/fixtures/recordings (79 W). The others are the lowest of several published nvidia-smi outputs at 0 % without a
# process: GH200, ubccr/ccr-examples; B200, Modal's GPU Glossary; GB200, NVIDIA/aicr (conformance evidence); B300,
# blog.john-pfeiffer.com; GB300, ishandhanani.github.io. Other hosts show up to 1.4 times as much.
RESTING_W = (
    (re.compile(r"V100-SXM2"), 40.0),
    (re.compile(r"A100-SXM4"), 55.0),
    (re.compile(r"H100 80GB HBM3"), 70.0),
    (re.compile(r"\bH200$"), 78.0),
    (re.compile(r"\bGH200 (120|480)GB$"), 73.0),
    (re.compile(r"\bB200$"), 136.0),
    (re.compile(r"\bGB200$"), 156.0),
    (re.compile(r"\bB300 SXM6 AC$"), 135.0),
    (re.compile(r"\bGB300$"), 171.0),
)
# Boards without NVLink, which need no witness of NVLink traffic. Source: NVIDIA's data sheets.
NO_NVLINK = re.compile(r"\b(T4|L4|L40S?|A2|A10|A16|P4|P40)\b")


def resting_power(name: str) -> float | None:
    """Returns the published power at rest of a product (NVML name), in watts. None if no publication is known."""
    return next((watts for pattern, watts in RESTING_W if pattern.search(name)), None)


class StallRules(NamedTuple):
    """Thresholds for the detection of stalls.

    The first ones are settings of a site (`stalls` in defaults.yaml); the others come from recordings and publications.
    """

    after: float = Settings().stalls.after
    proven_after: float = Settings().stalls.proven_after
    waits_min: int = Settings().stalls.waits_min
    wait_factor: int = Settings().stalls.wait_factor
    wait_max: float = Settings().stalls.wait_max
    gap_max: float = Settings().ledger.idle_run_unknown_reset
    """Seconds. More unknown time than this ends the run without progress, as it ends an idle run."""
    utilization_min: float = 0.95
    """Every second of a spin has at least this utilization. The driver rounds to whole percents."""
    utilization_mean: float = 0.99
    """Every minute of a spin has at least this mean. A spinning kernel never ends, and H200s report it as 99 or 100 %.
    """
    flat_over: float = 300.0
    """Seconds over which the power of a spin is flat: p95 - p5 of its means over 10 s, from the energy counter."""
    flat_watts: int = 4
    """Watts. The power is flat if p95 - p5 is at most this, or at most `flat_ratio` of the limit if that is more."""
    flat_ratio: float = 0.02
    """Share of the default limit, for `flat_watts`. The power of Acme's LLM jobs at 100 W varies by 8 W."""
    low_ratio: float = 0.25
    """Highest power of a spin whose SMs fit a collective, as a share of the range from rest to the default limit."""
    low_alone_ratio: float = 0.08
    """Highest such share if power is the only evidence. With 15 %, a sixth of Acme's A100 samples would be a spin."""
    low_of_work: float = 0.5
    """If power is the only evidence, it is also at most this share of the holder's own median at work."""
    work_ratio: float = 0.3
    """Power above this share of the range from rest to the default limit is work."""
    work_min: float = 600.0
    """Seconds of work after which the holder's median power at work is known."""
    small_board_watts: int = 100
    """Boards with a default limit up to this are not watched: a T4 hangs at 40 of 70 W (accelerate#233)."""
    pipe_max: float = 0.0001
    """Each pipe (tensor, FP64, FP32, FP16) of a spin is active for less than this. H200: a hang 0.0005 %, a renderer
    0.7 %.
    """
    dram_ratio: float = 0.01
    """The memory of a spin is less active than `pipe_max`, or than this share of its SMs. No hang over NVLink is
    recorded.
    """
    sm_flat: float = 0.02
    """The SM activity of a spin changes by at most this."""
    sm_min: float = 0.02
    """Lowest SM activity of a collective. A kernel of one block has 1/132 and one of two has 2/132, but both may be
    work.
    """
    sm_min_polling: float = 0.014
    """Lowest SM activity of a collective that polls over PCIe: two channels of NCCL have 2/132 (H200)."""
    sm_max: float = 0.3
    """Highest SM activity of a collective (NCCL: at most 32 channels of 132 SMs). Above it, power is the only evidence.
    """
    traffic_max: int = 100000000
    """Bytes per second over PCIe, and over NVLink, that are progress. ZeRO-3 over PCIe moves more."""
    polling_max: int = 9000000000
    """Bytes per second over PCIe that polling explains, if all SMs poll flags in the host's memory. H200: 8 GB/s, 60
    MB/s each.
    """
    polling_min: int = 4000000000
    """SMs poll only if PCIe carries at least this many bytes per second, scaled to all SMs."""
    loaders_max: float = 0.05
    """If the holder's processes that are not on its GPUs use at least this many CPUs, that is progress."""
    cores_each: int = 3
    """If processes are not visible, a holder may use this many CPUs for each spinning GPU without progress."""
    cores_beside: int = 2
    """CPUs allowed in addition to `cores_each`, for NCCL's proxy and the user's own threads beside a spinning rank."""
    host_bytes_max: int = 1000000
    """Bytes per second of the holder's disks, or of its network, that are progress."""
    is_off: bool = False
    """True if `diagnosis.without` disables the detection of stalls."""


def stall_rules(settings: Settings) -> StallRules:
    return StallRules(
        **settings.stalls._asdict(),
        gap_max=settings.ledger.idle_run_unknown_reset,
        is_off="stalls" in settings.diagnosis.without.replace(" ", "").split(","),
    )
