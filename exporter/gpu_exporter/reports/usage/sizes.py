"""Decides whether less than a whole GPU would be enough for a holder, by the sizes of MIG instances."""

from __future__ import annotations

import re

from gpu_exporter.reports.usage.tenants.oversized import HOURS_MIN, MEAN_MAX, PEAK_MAX, PROFILES, would_do

FEW_SLICES = re.compile(r"^(1g\.6gb|2g\.12gb|4g\.24gb)")


def sufficient_size(model: str, hours: float, mean: float, peak: float) -> str:
    """Returns the MIG profile or GPU that would be enough. "" if the whole GPU is needed, or if the hours are too few
    to decide. `hours`: GPU-hours with known utilization. `mean`: utilization, 0 to 1. `peak`: bytes in use on one GPU.
    """
    if hours < HOURS_MIN or mean > MEAN_MAX or peak > PEAK_MAX:
        return ""
    return would_do(model, mean, peak)


def slice_of(model: str, profile: str) -> float:
    """Returns the share of one slice in the GPU: 1/7, or more on boards with fewer slices. Recognizes the A30 by its
    profiles.
    """
    if FEW_SLICES.match(profile):
        return 1 / 4
    return next((share for pattern, (_, _, share), *_ in PROFILES if pattern.search(model)), 1 / 7)
