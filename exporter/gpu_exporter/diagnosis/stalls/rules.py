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
# tests/fixtures/recordings (79 W).
RESTING_W = (
    (re.compile(r"V100-SXM2"), 40.0),
    (re.compile(r"A100-SXM4"), 55.0),
    (re.compile(r"H100 80GB HBM3"), 70.0),
    (re.compile(r"\bH200$"), 78.0),
)
# Boards without NVLink, which need no witness of NVLink traffic. Source: NVIDIA's data sheets.
NO_NVLINK = re.compile(r"\b(T4|L4|L40S?|A2|A10|A16|P4|P40)\b")


def resting_power(name: str) -> float | None:
    """The published power at rest of a product (NVML name), in watts. None if no publication is known."""
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
    """seconds; more unknown time than this ends the run, as it ends an idle run"""
    utilization_min: float = 0.95
    """every second of a spin; the driver rounds to whole percents"""
    utilization_mean: float = 0.99
    """... and the mean of every minute: a spinning kernel never ends, which H200s report as 99 or 100 %"""
    flat_over: float = 300.0
    """seconds; p95 - p5 of the power, in means of 10 s of the energy counter, over this time ..."""
    flat_watts: int = 4
    """... is at most this, or the next line if that is more"""
    flat_ratio: float = 0.02
    """... share of the default limit; Acme's LLM jobs at 100 W wobble by 8 W"""
    low_ratio: float = 0.25
    """power of a spin, as a share of the way from rest to the default limit, if GPM is silent"""
    low_alone_ratio: float = 0.08
    """... and if power is the only witness: 15 % would accuse a sixth of Acme's A100 samples"""
    low_of_work: float = 0.5
    """... and then at most this share of the holder's own median at work"""
    work_ratio: float = 0.3
    """work is power above this share of the way from rest to the default limit ..."""
    work_min: float = 600.0
    """seconds; ... for at least this time"""
    small_board_watts: int = 100
    """boards with a default limit up to this are not watched: a T4 hangs at 40 of 70 W (accelerate#233)"""
    pipe_max: float = 0.0001
    """tensor, FP64, FP32, FP16 pipes of a spin, each below this (H200: hangs 0.0005 %, a renderer 0.7 %) ..."""
    dram_ratio: float = 0.01
    """... and memory, if not below that, below this share of the SM activity; no hang over NVLink is recorded"""
    sm_flat: float = 0.02
    """... whose SM activity changes by at most this"""
    sm_min: float = 0.02
    """SMs of a spin: a kernel of one block has 1/132, one of two 2/132, and may be work ..."""
    sm_min_polling: float = 0.014
    """... but SMs that poll over PCIe are of a collective: two channels of NCCL have 2/132 (H200)"""
    sm_max: float = 0.3
    """more SMs than a collective uses (NCCL: at most 32 channels of 132 SMs): power must speak for itself"""
    traffic_max: int = 100000000
    """bytes per second over PCIe, and over NVLink, that are progress (ZeRO-3 over PCIe: more) ..."""
    polling_max: int = 9000000000
    """... beside SMs that poll flags in the host's memory; if all did: 8 GB/s (H200, 60 MB/s each) ..."""
    polling_min: int = 4000000000
    """... and below half of that they do not poll"""
    loaders_max: float = 0.05
    """cores used by the holder's processes that are not on its GPUs, that are progress ..."""
    cores_each: int = 3
    """... or where processes are not visible, cores of its cgroup beyond this for each GPU that spins ..."""
    cores_beside: int = 2
    """... and these: a rank that spins has NCCL's proxy and the user's own threads beside it"""
    host_bytes_max: int = 1000000
    """bytes per second, of its disks and of its network, that are progress"""
    is_off: bool = False
    """nothing is called a stall: `diagnosis.without`"""


def stall_rules(settings: Settings) -> StallRules:
    """The thresholds with the settings of a site."""
    return StallRules(
        **settings.stalls._asdict(),
        gap_max=settings.ledger.idle_run_unknown_reset,
        is_off="stalls" in settings.diagnosis.without.replace(" ", "").split(","),
    )
