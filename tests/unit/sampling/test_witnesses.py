"""Witnesses of idleness: each witness alone can contradict it, and a witness that cannot be read is not counted."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.collectors.contract import Collector, Cycle, Totals
from gpu_exporter.agent.devices.protocol import Gpm, UtilizationSample
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.devices.simulated import ScenarioTime, SimulatedDevice
from gpu_exporter.agent.node.state import NodeState
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.activity.spans import ActivityReader, instance_activity
from gpu_exporter.agent.sampling.activity.witnesses import Moment, Observation, TrafficAtRest, Witnesses, active_names
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.readings import Activity, Span
from gpu_exporter.common.model.totals import UnitTotals
from gpu_exporter.common.model.units import UnitId

ALL_WITNESSES = 6  # utilization, GPM graphics and SM, PCIe, NVLink, power; engines only contradict
ENGINES = ("encoder", "decoder", "jpeg", "ofa")
WITNESSES = (*ENGINES, "gpm_graphics", "gpm_sm", "pcie", "nvlink", "power")
# Calls that a witness needs, and the number of witnesses left without them.
MUTE = {
    "encoder": (["nvmlDeviceGetEncoderUtilization"], 6),
    "decoder": (["nvmlDeviceGetDecoderUtilization"], 6),
    "jpeg": (["nvmlDeviceGetJpgUtilization"], 6),
    "ofa": (["nvmlDeviceGetOfaUtilization"], 6),
    "GPM": (["nvmlGpmMetricsGet"], 4),
    "traffic (PCIe and NVLink), by counters and GPM": (["nvmlDeviceGetFieldValues", "nvmlGpmMetricsGet"], 2),
    "power": (["nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEnergyConsumption"], 5),
    "power, by its limit": (["nvmlDeviceGetEnforcedPowerLimit"], 5),
    "traffic by counters, which GPM reports too": (["nvmlDeviceGetFieldValues"], ALL_WITNESSES),
}


def run(**gpu: Any) -> UnitTotals:
    """The totals of a minute of an H100 at utilization 0, read every second."""
    clock, settings = ManualClock(), Settings()
    scenario = parse_scenario({"gpus": [{"model": "H100", **gpu}]})
    device = SimulatedDevice(ScenarioTime(scenario, clock), scenario.gpus[0])
    sampler = DeviceSampler(device, registry.DEFAULT, clock, activity_rules(settings))
    node = NodeState(settings, clock)
    for _ in range(60):
        clock.advance(1.0)
        node.on_snapshot(sampler.sample())
    totals = node.ledger.unit_totals(UnitId(device.identity.uuid), clock.monotonic(), clock.wall())
    assert totals is not None
    return totals


def test_if_every_witness_is_quiet_the_time_is_idle() -> None:
    totals = run()
    assert totals.witnesses == ALL_WITNESSES
    assert totals.idle_s == totals.observed_s > 55.0


def test_memory_that_remains_used_is_not_a_witness() -> None:
    """On GH200 the operating system keeps pages in the GPU's memory after the program has ended."""
    totals = run(model="GH200", kept_gib=20)
    assert totals.idle_s == totals.observed_s > 55.0


@pytest.mark.parametrize("witness", WITNESSES)
def test_utilization_zero_with_one_witness_active_is_never_idle(witness: str) -> None:
    totals = run(**{witness.removeprefix("gpm_"): {"kind": "constant", "value": 0.6 if witness == "power" else 0.3}})
    assert totals.other_s == {witness: pytest.approx(totals.observed_s)}
    assert totals.active_by == (witness,)
    assert (totals.busy_s, totals.idle_s) == (0.0, 0.0)
    assert totals.observed_s > 55.0  # known, and neither busy nor idle
    assert totals.last_active_wall is not None


@pytest.mark.parametrize("witness", MUTE)
def test_a_witness_that_cannot_be_read_is_not_counted(witness: str) -> None:
    calls, left = MUTE[witness]
    faults = [{"at": 0, "call": call, "error": "NVML_ERROR_NOT_SUPPORTED"} for call in calls]
    assert run(faults=faults).witnesses == left


# Noise below the floors: a thousandth of the time, a little traffic over the links, a few watts. Engines and SMs have no
# noise: engines are reported in whole percent, SM activity is exactly 0 at rest, and any value above 0 is work.
NOISE = {
    "graphics": 0.0008,
    "pcie": 5e6 / (2 * 64e9),
    "nvlink": 5e5 / (2 * 450e9),
    "power": 0.1,
}


@pytest.mark.parametrize("witness", NOISE)
def test_the_noise_of_a_board_at_rest_is_no_activity(witness: str) -> None:
    totals = run(**{witness: {"kind": "constant", "value": NOISE[witness]}})
    assert totals.other_s == {}
    assert totals.idle_s == totals.observed_s > 55.0


def test_a_lasting_gpm_value_of_unused_memory_does_not_prevent_idleness() -> None:
    """NVIDIA/DCGM#65: the value remains above 0. On an instance it counts, since GPM is its only witness."""
    witnesses = Witnesses(RULES)
    reading = QUIET._replace(tensor=0.2, dram=0.3, engines=0.2)
    assert active_names(witnesses.observe(Moment(reading))) == ()
    assert active_names(witnesses.observe(Moment(reading, is_instance=True))) == (
        "gpm_tensor",
        "gpm_dram",
        "gpm_engines",
    )


@pytest.mark.parametrize(
    ("witness", "of_a_second"),
    [("gpm_graphics", 0.002), ("gpm_sm", 2e-7), ("pcie", 20e6), ("nvlink", 2e6)],
)
@pytest.mark.parametrize("span_s", [0.1, 1.0, 5.0])
def test_work_of_one_second_in_a_long_cycle_is_detected_in_the_mean(
    witness: str, of_a_second: float, span_s: float
) -> None:
    """A longer window thins short work out below the floors; a shorter window is used as it is."""
    field = witness.removeprefix("gpm_")
    for work, seen in ((of_a_second, (witness,)), (of_a_second / 4, ())):
        mean, witnesses = work / max(1.0, span_s), Witnesses(RULES)
        for _ in range(TrafficAtRest.READINGS):
            assert active_names(witnesses.observe(Moment(QUIET))) == ()
        reading = QUIET._replace(span_s=span_s, **{field: mean})
        assert active_names(witnesses.observe(Moment(reading))) == seen


@pytest.mark.parametrize(("link", "rest"), [("pcie", 3e6), ("nvlink", 3e5)])
@pytest.mark.parametrize("span_s", [1.0, 5.0])
def test_only_the_traffic_above_rest_counts_as_if_it_had_moved_in_one_second(
    link: str, rest: float, span_s: float
) -> None:
    """A board that carries a little traffic at all times is idle in long cycles too, and bursts are still seen."""
    witnesses, floor = Witnesses(RULES), getattr(RULES, f"{link}_idle_max_bytes_per_second")

    def look(mean: float) -> Observation:
        return witnesses.observe(Moment(QUIET._replace(span_s=span_s, **{link: mean})))[link]

    def observe(mean: float) -> tuple[str, ...]:
        return (link,) if look(mean) is Observation.ACTIVE else ()

    assert look(rest) is (Observation.UNKNOWN if span_s * rest > floor else Observation.QUIET), "rest is not known yet"
    for _ in range(TrafficAtRest.READINGS):
        assert witnesses.observe(Moment(QUIET._replace(**{link: rest})))[link] is Observation.QUIET
    for _ in range(20):
        assert observe(rest) == ()
        assert observe(rest + 0.9 * floor / span_s) == () or span_s == 1.0
        assert observe(rest + 1.1 * floor / span_s) == (link,)
        assert observe(1.1 * floor) == (link,), "never more than a second may have"
    for _ in range(20):
        look(0.9 * floor)
    assert observe(rest + 1.1 * floor / span_s) == (link,), "traffic of long work is not taken for rest"


UNIT = UnitId("GPU-0", "MIG-1")
QUIET = Gpm(1.0, graphics=0.0, sm=0.0, occupancy=0.0, tensor=0.0, dram=0.0, pcie=0.0, nvlink=0.0, engines=0.0)
RULES = activity_rules(Settings())


def test_an_instance_is_idle_if_every_witness_is_quiet() -> None:
    assert instance_activity(UNIT, QUIET, 100.0, RULES, Witnesses(RULES)) == Activity(
        UNIT, (Span(99.0, 100.0, 0.0),), 7
    )


@pytest.mark.parametrize("part", ["sm", "tensor", "dram", "engines", "pcie", "nvlink"])
def test_an_instance_with_one_witness_active_is_not_idle(part: str) -> None:
    active = QUIET._replace(**{part: 5e9 if part in ("pcie", "nvlink") else 0.2})
    assert instance_activity(UNIT, active, 100.0, RULES, Witnesses(RULES)).spans == (
        Span(99.0, 100.0, 0.0, (part if "link" in part or part == "pcie" else f"gpm_{part}",)),
    )


@pytest.mark.parametrize(
    ("gpm", "spans"),
    [
        (
            QUIET._replace(graphics=0.9, span_s=40.0),
            (Span(100.0, 100.0, 0.9, ("gpm_graphics",)),),
        ),  # too long, but still a sign of activity
        (QUIET._replace(span_s=40.0), ()),
        (QUIET._replace(graphics=None, sm=0.9), (Span(100.0, 100.0, 0.0, ("gpm_sm",)),)),
        (QUIET._replace(graphics=None), ()),
        (QUIET._replace(missing=True), ()),  # quiet, but one value was not reported
        (QUIET._replace(graphics=0.5, missing=True), (Span(99.0, 100.0, 0.5),)),
        (
            QUIET._replace(dram=0.5, missing=True),
            (Span(99.0, 100.0, 0.0, ("gpm_dram",)),),
        ),  # one active witness is enough
        (QUIET._replace(span_s=3.0), (Span(97.0, 100.0, 0.0),)),
        (QUIET._replace(graphics=0.0008), (Span(99.0, 100.0, 0.0),)),  # noise
        (
            QUIET._replace(graphics=0.001, pcie=10e6, nvlink=1e6),
            (Span(99.0, 100.0, 0.0),),
        ),  # the highest value that is still noise
    ],
)
def test_the_spans_that_a_gpm_window_of_an_instance_proves(gpm: Gpm, spans: tuple[Span, ...]) -> None:
    assert instance_activity(UNIT, gpm, 100.0, RULES, Witnesses(RULES)).spans == spans


def pcie_of(witnesses: Witnesses, mean: float, span_s: float) -> tuple[Observation, bool]:
    """What the witness observes, and whether the GPU must be read every second now."""
    seen = witnesses.observe(Moment(QUIET._replace(span_s=span_s, pcie=mean)))
    return seen["pcie"], "pcie" in witnesses.momentary(seen)


def test_another_monitor_raises_the_traffic_at_rest_once() -> None:
    """Otherwise the GPU would never be idle again until the exporter restarts."""
    witnesses = Witnesses(RULES)
    for _ in range(TrafficAtRest.READINGS):
        pcie_of(witnesses, 2e6, 1.0)
    assert pcie_of(witnesses, 2e6, 5.0) == (Observation.QUIET, False)
    assert pcie_of(witnesses, 5e6, 5.0) == (Observation.ACTIVE, True)
    for left in range(TrafficAtRest.READINGS - 1, -1, -1):
        assert pcie_of(witnesses, 5e6, 1.0) == (Observation.QUIET, left > 0)
    for _ in range(100):
        assert pcie_of(witnesses, 5e6, 5.0) == (Observation.QUIET, False)
    for _ in range(3):
        pcie_of(witnesses, 2e6, 5.0)
    assert pcie_of(witnesses, 5e6, 5.0) == (Observation.ACTIVE, True), "the other monitor had ended"


def test_a_burst_in_every_long_cycle_never_becomes_rest() -> None:
    """Twelve megabytes in one second of five. The short cycles that follow see none of them, and are too few."""
    witnesses = Witnesses(RULES)
    for _ in range(TrafficAtRest.READINGS):
        pcie_of(witnesses, 2e6, 1.0)
    for _ in range(100):
        assert pcie_of(witnesses, 2e6 + 12e6 / 5, 5.0) == (Observation.ACTIVE, True)
        for _ in range(4):
            assert pcie_of(witnesses, 2e6, 1.0) == (Observation.QUIET, True)


def test_ten_readings_in_a_row_prove_the_traffic_at_rest() -> None:
    """Neither work nor a long cycle may be among them."""
    for odd in ((11e6, 1.0), (1e6, 5.0)):
        witnesses = Witnesses(RULES)
        pcie_of(witnesses, 5e6, 5.0)
        for reading in (*[(2e6, 1.0)] * 9, odd, *[(2e6, 1.0)] * 9):
            assert pcie_of(witnesses, *reading)[1]
        assert pcie_of(witnesses, 2e6, 1.0) == (Observation.QUIET, False)


def test_an_instance_is_not_idle_before_its_traffic_at_rest_is_known() -> None:
    """Only in a window that is longer than a second, and has more than a second may have."""
    witnesses, gpm = Witnesses(RULES), QUIET._replace(span_s=3.0, pcie=4e6)
    assert instance_activity(UNIT, gpm, 100.0, RULES, witnesses).spans == ()
    for _ in range(TrafficAtRest.READINGS):
        instance_activity(UNIT, gpm._replace(span_s=1.0), 100.0, RULES, witnesses)
    assert instance_activity(UNIT, gpm, 100.0, RULES, witnesses).spans == (Span(97.0, 100.0, 0.0),)


def test_without_graphics_activity_an_instance_has_no_witnesses() -> None:
    assert instance_activity(UNIT, QUIET._replace(graphics=None, sm=0.9), 100.0, RULES, Witnesses(RULES)).witnesses == 0


@pytest.mark.parametrize("part", ["encoder", "decoder", "jpeg", "ofa"])
def test_an_instance_that_only_decodes_is_not_idle(part: str) -> None:
    """Runs the sampler, with engine values that only GPM reports for instances."""
    instance = {"profile": "1g.10gb", part: {"kind": "constant", "value": 0.3}}
    clock = ManualClock()
    scenario = parse_scenario({"gpus": [{"model": "H100", "mig": [instance]}]})
    device = SimulatedDevice(ScenarioTime(scenario, clock), scenario.gpus[0])
    sampler = DeviceSampler(device, registry.DEFAULT, clock, RULES)
    for _ in range(3):
        clock.advance(1.0)
        (reading,) = sampler.sample().instances
    assert reading.activity is not None
    assert [(span.ratio, span.other) for span in reading.activity.spans] == [(0.0, ("gpm_engines",))]


def test_a_gpm_window_with_a_slow_read_proves_no_idleness() -> None:
    """The sample may be from the beginning of the call: work that began later would count as part of a quiet window."""
    clock = ManualClock()
    scenario = parse_scenario({"gpus": [{"model": "H100", "mig": [{"profile": "1g.10gb"}]}]})
    stage = ScenarioTime(scenario, clock)
    sampler = DeviceSampler(SimulatedDevice(stage, scenario.gpus[0]), registry.DEFAULT, clock, RULES)
    original, slow = stage.read_gpm, False

    def read_gpm(*arguments: Any, **more: Any) -> Gpm | None:
        gpm = original(*arguments, **more)
        clock.advance(0.9 if slow and more else 0.0)  # only for the instance
        return gpm

    stage.read_gpm = read_gpm  # type: ignore[method-assign]
    quiet = []
    for step in range(7):
        slow = step == 4
        clock.advance(1.0)
        (reading,) = sampler.sample().instances
        assert reading.activity is not None or step == 0
        quiet.append(bool(reading.activity and reading.activity.spans))
    assert quiet == [False, True, True, True, False, False, True]  # the fifth window begins during the slow call


# A witness that is normally available fails for a while: the time is unknown, and never idle.
@pytest.mark.parametrize(
    "call",
    [
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetDecoderUtilization",
        "nvmlDeviceGetOfaUtilization",
        "nvmlGpmMetricsGet",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTotalEnergyConsumption",
    ],
)
def test_a_witness_that_fails_makes_the_time_unknown(call: str) -> None:
    totals = run(faults=[{"at": 10, "call": call, "error": "NVML_ERROR_UNKNOWN"}])
    assert 5.0 < totals.idle_s < 10.0


def test_a_call_that_never_worked_here_is_not_a_witness() -> None:
    """Otherwise one wrong answer of a driver would prevent a healthy GPU from ever being idle."""
    for call, left in (("nvmlDeviceGetOfaUtilization", ALL_WITNESSES), ("nvmlGpmMetricsGet", ALL_WITNESSES - 2)):
        totals = run(faults=[{"at": 0, "call": call, "error": "NVML_ERROR_UNKNOWN"}])
        assert totals.idle_s > 55.0
        assert totals.witnesses == left


def test_late_ring_entries_are_judged_by_the_witnesses_of_their_time() -> None:
    """The driver delivers five seconds of zeros at once; the decoder worked in four of them."""
    reader = ActivityReader(UnitId("GPU-0"), RULES)
    wall, spans = 1_700_000_000.0, []
    for second in range(1, 21):
        cycle = Cycle(None, {}, lambda: 0.0, Totals())  # type: ignore[arg-type]
        cycle.utilization, cycle.utilization_at = 0.0, float(second)
        cycle.engines = {"decoder": 0.0 if second % 5 == 0 else 0.7}
        if second % 5 == 0:
            cycle.driver_samples = [
                UtilizationSample(wall + t / 5, 0.0) for t in range(5 * second - 24, 5 * second + 1)
            ]
        activity = reader.read(cycle, float(second), wall + second)
        spans += [span for span in activity.spans if span.end > span.start] if activity else []
    idle = [span for span in spans if not span.other and span.ratio == 0.0]
    assert (
        3.0 < sum(span.end - span.start for span in idle) <= 4.0
    )  # the last second of every five, except of the first five
    assert all((span.start + 0.01) % 5 >= 4.0 for span in idle)
    assert sum(span.end - span.start for span in spans if span.other) > 10.0


def test_a_slow_cycle_proves_no_idleness() -> None:
    """After a slow call, the witnesses before it and after it cover different times."""
    clock = ManualClock()
    scenario = parse_scenario({"gpus": [{"model": "H100"}]})
    device = SimulatedDevice(ScenarioTime(scenario, clock), scenario.gpus[0])
    sampler = DeviceSampler(device, registry.DEFAULT, clock, RULES)
    original = device.read_power

    def slow() -> float:
        clock.advance(1.9)
        return original()

    idle = []
    for step in range(10):
        clock.advance(1.0)
        device.read_power = slow if step == 5 else original  # type: ignore[method-assign]
        activity = sampler.sample().activity
        idle.append(activity is not None and any(s.ratio == 0.0 and not s.other for s in activity.spans))
    assert idle[4]
    assert not idle[5]


def test_reads_after_the_last_witness_may_take_long() -> None:
    clock = ManualClock()
    scenario = parse_scenario({"gpus": [{"model": "T4"}]})
    device = SimulatedDevice(ScenarioTime(scenario, clock), scenario.gpus[0])
    last = Collector("last", (), lambda cycle: clock.advance(0.8))
    sampler = DeviceSampler(device, (*registry.DEFAULT, last), clock, RULES)
    node = NodeState(Settings(), clock)
    for _ in range(20):
        clock.advance(0.2)
        node.on_snapshot(sampler.sample())
    totals = node.ledger.unit_totals(UnitId(device.identity.uuid), clock.monotonic(), clock.wall())
    assert totals is not None
    assert totals.idle_s > 16.0


@pytest.mark.parametrize("step", [-3600.0, -2.0, 3600.0])
def test_after_a_step_of_the_clock_activity_is_known_again_within_two_minutes(
    step: float, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    scenario = parse_scenario({"gpus": [{"model": "T4"}]})
    device = SimulatedDevice(ScenarioTime(scenario, clock), scenario.gpus[0])
    sampler, node = DeviceSampler(device, registry.DEFAULT, clock, RULES), NodeState(Settings(), clock)

    def idle_after(seconds: int) -> float:
        for _ in range(seconds):
            clock.advance(1.0)
            node.on_snapshot(sampler.sample())
        totals = node.ledger.unit_totals(UnitId(device.identity.uuid), clock.monotonic(), clock.wall())
        assert totals is not None
        return totals.idle_s

    idle_after(20)
    clock.step_wall(step)
    base = idle_after(120)
    assert idle_after(60) - base > 58.0
    (record,) = caplog.records
    assert f"the wall clock jumped by {step:+.0f} s" in record.getMessage()


def test_a_mute_gpu_is_down_even_if_values_are_remembered() -> None:
    clock = ManualClock()
    faults = [{"at": 5, "call": "*", "error": "NVML_ERROR_UNKNOWN"}]
    scenario = parse_scenario({"gpus": [{"model": "T4", "faults": faults}]})
    device = SimulatedDevice(ScenarioTime(scenario, clock), scenario.gpus[0])
    sampler = DeviceSampler(device, registry.DEFAULT, clock, RULES)
    ups = []
    for _ in range(12):
        clock.advance(1.0)
        ups.append(sampler.sample().up)
    assert ups == [True] * 4 + [False] * 8


@pytest.mark.parametrize(
    ("lead", "period"), [(0.0, 1 / 6), (-0.2, 1 / 6), (0.1, 1 / 6), (0.2, 1 / 6), (0.2, 1.0), (0.2, 0.2)]
)
def test_a_resting_gpu_is_idle_for_any_offset_of_the_drivers_clock(lead: float, period: float) -> None:
    """Ten minutes with cycles of different lengths; the stamps of the ring lag or lead."""
    reader, wall, idle, now, previous = ActivityReader(UnitId("GPU-0"), RULES), 1_700_000_000.0, 0.0, 100.0, 0.0
    ring = [wall + lead + i * period for i in range(int(700 / period))]
    for step in range(600):
        now = 100.0 + step + (0.3 if step % 50 == 0 else 0.02 * (step % 3))
        cycle = Cycle(None, {}, lambda: 0.0, Totals())  # type: ignore[arg-type]
        cycle.utilization, cycle.utilization_at = 0.0, now
        cycle.engines = {"decoder": 0.0}
        known = wall + now - 100.0 + max(0.0, lead)
        since = reader.samples_since.get("utilization", 0.0)
        cycle.driver_samples = [UtilizationSample(stamp, 0.0) for stamp in ring if since < stamp <= known]
        activity = reader.read(cycle, now, wall + now - 100.0)
        for span in activity.spans if activity else ():
            assert span.ratio == 0.0
            assert not span.other
            idle += max(0.0, span.end - max(span.start, previous))
            previous = max(previous, span.end)
    assert idle > 0.95 * 600


def test_a_reported_rate_of_work_contradicts_a_whole_ring_of_zeros() -> None:
    reader, wall = ActivityReader(UnitId("GPU-0"), RULES), 1_700_000_000.0
    idle = 0.0
    for second in range(1, 60):
        cycle = Cycle(None, {}, lambda: 0.0, Totals())  # type: ignore[arg-type]
        cycle.utilization, cycle.utilization_at = 0.5, float(second)
        cycle.driver_samples = [UtilizationSample(wall + second - 1 + i / 5, 0.0) for i in range(1, 6)]
        activity = reader.read(cycle, float(second), wall + second)
        idle += sum(s.end - s.start for s in activity.spans if s.ratio == 0.0 and not s.other) if activity else 0.0
    assert idle == 0.0


def test_after_a_clock_was_set_back_old_zeros_are_not_read_again() -> None:
    reader, base = ActivityReader(UnitId("GPU-0"), RULES), 1_700_000_000.0
    ring: list[UtilizationSample] = []
    idle = 0.0
    for second in range(1, 40):
        wall = base + second - (10.0 if second >= 20 else 0.0)  # at 20 the clock is set back, and work begins
        busy = 1.0 if second >= 20 else 0.0
        ring += [UtilizationSample(wall - 1 + i / 5, busy) for i in range(1, 6)]
        cycle = Cycle(None, {}, lambda: 0.0, Totals())  # type: ignore[arg-type]
        cycle.utilization_at = float(second)  # without a reported rate that would contradict
        cycle.driver_samples = sorted(s for s in ring if s.wall > reader.samples_since.get("utilization", 0.0))
        activity = reader.read(cycle, float(second), wall)
        for span in activity.spans if activity and second >= 20 else ():
            idle += span.end - span.start if span.ratio == 0.0 and not span.other else 0.0
    assert idle == 0.0
