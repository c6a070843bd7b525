"""The PCIe link of a GPU: only readings while it works say something."""

from __future__ import annotations

import pytest

from gpu_exporter.common.model.readings import DeviceSnapshot, Facts
from gpu_exporter.common.model.units import DeviceIdentity
from gpu_exporter.diagnosis.links import LOOKS_MIN, LinkHistory

IDENTITY = DeviceIdentity(0, "GPU-0", "H100", "580", "0000:01:00.0", 0)


def read(history: LinkHistory, *utilizations: float, link: float = 15.75e9) -> None:
    for position, utilization in enumerate(utilizations):
        facts = Facts(utilization=utilization, link=link, link_max=63e9)
        history.add(DeviceSnapshot(IDENTITY, 15.0 * position, 0.0, up=True, facts=facts))


def test_a_slow_link_of_a_working_gpu_is_seen_after_some_readings() -> None:
    history = LinkHistory(600.0)
    read(history, *[0.5] * LOOKS_MIN)
    assert history.best() is None
    read(history, *[0.5] * (LOOKS_MIN + 1))
    assert history.best() == (pytest.approx(0.25), "15.8 of 63.0 GB/s")


def test_the_slow_link_at_the_begin_of_a_burst_is_no_fault() -> None:
    history = LinkHistory(600.0)
    read(history, *[0.0, 0.8] * 20)
    assert history.best() is None


def test_the_best_link_counts() -> None:
    history = LinkHistory(600.0)
    read(history, *[0.5] * 12)
    read(history, 0.5, link=63e9)
    assert history.best() == (1.0, "63.0 of 63.0 GB/s")
