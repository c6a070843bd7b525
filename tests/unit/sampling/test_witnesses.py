"""Idleness rests on witnesses: each alone denies it, and one that cannot be read is not counted."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_exporter import collectors
from gpu_exporter.app.books import Books
from gpu_exporter.app.wiring import activity_rules
from gpu_exporter.clock import ManualClock
from gpu_exporter.defaults import Settings
from gpu_exporter.devices.scenario import parse_scenario
from gpu_exporter.devices.simulated import SimulatedDevice, Stage
from gpu_exporter.model import UnitId, UnitTotals
from gpu_exporter.sampling.sampler import DeviceSampler

ALL_WITNESSES = 10  # utilization, four engines, GPM graphics and SM, PCIe, NVLink, power
WITNESSES = ("encoder", "decoder", "jpeg", "ofa", "graphics", "sm", "pcie", "nvlink", "power")
# Calls without which a witness is mute, and how many are left.
MUTE = {
    "encoder": (["nvmlDeviceGetEncoderUtilization"], 9),
    "decoder": (["nvmlDeviceGetDecoderUtilization"], 9),
    "jpeg": (["nvmlDeviceGetJpgUtilization"], 9),
    "ofa": (["nvmlDeviceGetOfaUtilization"], 9),
    "GPM (graphics and SM)": (["nvmlGpmMetricsGet"], 8),
    "traffic (PCIe and NVLink), by counters and GPM": (["nvmlDeviceGetFieldValues", "nvmlGpmMetricsGet"], 6),
    "power": (["nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption"], 9),
    "power, by its limit": (["nvmlDeviceGetEnforcedPowerLimit"], 9),
    "traffic by counters, which GPM tells too": (["nvmlDeviceGetFieldValues"], ALL_WITNESSES),
}


def run(**gpu: Any) -> UnitTotals:
    """A minute of an H100 at utilization 0, read each second."""
    clock, settings = ManualClock(), Settings()
    scenario = parse_scenario({"gpus": [{"model": "H100", **gpu}]})
    device = SimulatedDevice(Stage(scenario, clock), scenario.gpus[0])
    sampler = DeviceSampler(device, collectors.DEFAULT, clock, activity_rules(settings))
    books = Books(settings, clock)
    for _ in range(60):
        clock.advance(1.0)
        books.on_snapshot(sampler.sample())
    totals = books.ledger.unit_totals(UnitId(device.identity.uuid), clock.monotonic(), clock.wall())
    assert totals is not None
    return totals


def test_with_every_witness_quiet_the_time_is_idle() -> None:
    totals = run()
    assert totals.witnesses == ALL_WITNESSES
    assert totals.idle_s == totals.observed_s > 55.0


@pytest.mark.parametrize("witness", WITNESSES)
def test_utilization_zero_with_one_witness_active_is_never_idle(witness: str) -> None:
    totals = run(**{witness: {"kind": "constant", "value": 0.6 if witness == "power" else 0.3}})
    assert (totals.busy_s, totals.idle_s) == (0.0, 0.0)
    assert totals.observed_s > 55.0  # known, and neither busy nor idle
    assert totals.last_active_wall is not None


@pytest.mark.parametrize("witness", MUTE)
def test_a_witness_that_cannot_be_read_is_not_counted(witness: str) -> None:
    calls, left = MUTE[witness]
    faults = [{"at": 0, "call": call, "error": "NVML_ERROR_NOT_SUPPORTED"} for call in calls]
    assert run(faults=faults).witnesses == left


# Noise below the floors: a thousandth of the time, a trickle over the links, a few watts. Engines have none: they are
# told in whole percent, and any is work.
NOISE = {"graphics": 0.0008, "sm": 0.0008, "pcie": 5e6 / (2 * 64e9), "nvlink": 5e5 / (2 * 450e9), "power": 0.1}


@pytest.mark.parametrize("witness", NOISE)
def test_what_a_board_at_rest_does_is_no_activity(witness: str) -> None:
    totals = run(**{witness: {"kind": "constant", "value": NOISE[witness]}})
    assert totals.idle_s == totals.observed_s > 55.0


@pytest.mark.parametrize("part", ["graphics", "sm"])
def test_an_instance_whose_sms_work_is_not_idle(part: str) -> None:
    from gpu_exporter.collectors.contract import InstanceCycle
    from gpu_exporter.devices.protocol import Gpm

    clock = ManualClock()
    scenario = parse_scenario({"gpus": [{"model": "H100", "mig": []}]})
    device = SimulatedDevice(Stage(scenario, clock), scenario.gpus[0])
    sampler = DeviceSampler(device, collectors.DEFAULT, clock, activity_rules(Settings()))
    quiet = Gpm(1.0, graphics=0.0, sm=0.0)
    for gpm, idle in ((quiet, True), (quiet._replace(**{part: 0.2}), False)):
        reading = sampler._read_instance(InstanceCycle("MIG-1", "1/0", "1g.10gb", 1, (), gpm, None), 100.0)
        assert reading.activity is not None
        (span,) = reading.activity.spans
        assert (span.ratio == 0.0 and not span.other) is idle
        assert reading.activity.witnesses == 2
