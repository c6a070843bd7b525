"""GPM: means between two samples."""

from __future__ import annotations

import pytest

from gpu_exporter.agent.devices.errors import (
    DeviceError,
)
from gpu_exporter.agent.devices.nvml.constants import NVML_GPM_METRIC_FP64_UTIL
from gpu_exporter.agent.devices.protocol import Gpm
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.common.clock import ManualClock
from tests.component.nvml.nvml_bench import MakeBackend, first_device
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder


def test_gpm_reports_means_between_two_samples(nvml_table: NvmlTable, make_backend: MakeBackend) -> None:
    clock = ManualClock()
    feeder = ScenarioFeeder(
        parse_scenario({"gpus": [{"model": "H100", "load": {"kind": "constant", "value": 0.5}}]}), nvml_table, clock
    )

    def step(seconds: float) -> None:
        clock.advance(seconds)
        feeder.feed()

    device = first_device(make_backend(clock))
    step(1.0)
    assert device.read_gpm() is None  # the first sample has no earlier sample to compare with
    step(0.05)
    assert device.read_gpm() is None  # a second sample within 100 ms does not count either
    step(0.95)
    gpm = device.read_gpm()
    assert gpm is not None
    assert gpm.span_s == pytest.approx(1.0)
    assert (gpm.graphics, gpm.sm, gpm.occupancy) == pytest.approx((0.5, 0.4, 0.25))
    assert (gpm.tensor, gpm.dram) == pytest.approx((0.2, 0.15))
    assert gpm.pcie == pytest.approx(2 * 64e9 * 0.005)
    assert gpm.elapsed_cycles == pytest.approx(2e9)
    assert gpm.active_cycles == pytest.approx(0.4 * 2e9)
    step(61.0)
    assert device.read_gpm() is None  # the last sample is too old for a mean
    step(1.0)
    assert device.read_gpm() is not None
    clock.advance(1.0)  # the driver's sample did not change: 0/0
    assert device.read_gpm() is None
    step(1.0)
    assert device.read_gpm() is not None  # the 0/0 did not count as a refusal


def test_gpm_metrics_with_an_error_or_nan_are_left_out(nvml_table: NvmlTable, make_backend: MakeBackend) -> None:
    clock = ManualClock()
    feeder = ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}]}), nvml_table, clock)
    device = first_device(make_backend(clock))
    device.read_gpm()
    clock.advance(1.0)
    feeder.feed()
    with nvml_table.writing(0) as out:
        out.gpm[0].integral = float("nan")
        out.gpm[1].id = 77  # SM activity is not available with this driver
    gpm = device.read_gpm()
    assert gpm is not None
    assert (gpm.graphics, gpm.sm) == (None, None)
    assert gpm.tensor == 0.0


def test_a_gpm_metric_is_missing_only_if_it_was_reported_before(
    make_backend: MakeBackend, nvml_table: NvmlTable
) -> None:
    clock = ManualClock()
    feeder = ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}]}), nvml_table, clock)
    device = first_device(make_backend(clock))

    def read(broken: int | None) -> Gpm:
        clock.advance(1.0)
        feeder.feed()
        if broken is not None:
            with nvml_table.writing(0) as out:
                out.gpm[broken].integral = float("nan")
        gpm = device.read_gpm()
        assert gpm is not None
        return gpm

    device.read_gpm()
    assert not read(1).missing  # it was never a number, so the metric is not available here
    assert not read(1).missing
    read(None)
    assert not read(None).missing
    broken = read(1)
    assert broken.missing
    assert broken.graphics == 0.0


def test_a_pipe_that_only_the_search_for_stalls_reads_is_not_missing(
    make_backend: MakeBackend, nvml_table: NvmlTable
) -> None:
    """It is no witness of idleness, so the time stays known without it."""
    clock = ManualClock()
    feeder = ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}]}), nvml_table, clock)
    device = first_device(make_backend(clock))
    device.read_gpm()
    clock.advance(1.0)
    feeder.feed()
    before = device.read_gpm()
    assert before is not None and before.fp64 == 0.0
    clock.advance(1.0)
    feeder.feed()
    with nvml_table.writing(0) as out:
        (pipe,) = (each for each in out.gpm[: out.gpm_count] if each.id == NVML_GPM_METRIC_FP64_UTIL)
        pipe.integral = float("nan")
    gpm = device.read_gpm()
    assert gpm is not None
    assert (gpm.fp64, gpm.fp32, gpm.missing) == (None, 0.0, False)


@pytest.mark.parametrize("call", ["nvmlGpmSampleGet", "nvmlGpmQueryDeviceSupport"])
def test_gpm_starts_again_after_a_failed_call(nvml_table: NvmlTable, make_backend: MakeBackend, call: str) -> None:
    clock = ManualClock()
    feeder = ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}]}), nvml_table, clock)
    device = first_device(make_backend(clock))
    nvml_table.set_call(0, call, "NVML_ERROR_UNKNOWN")
    with pytest.raises(DeviceError):
        device.read_gpm()
    nvml_table.set_call(0, call)
    assert device.read_gpm() is None
    clock.advance(1.0)
    feeder.feed()
    assert device.read_gpm() is not None
