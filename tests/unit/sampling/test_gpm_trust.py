"""GPM zeros that other witnesses contradict: withheld at once, counted and logged if they last, then reopened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.testbed.samples import value

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.collectors.gpm import GPM
from gpu_exporter.agent.collectors.mig import RATIOS
from gpu_exporter.agent.devices.errors import DeviceError, NotSupported
from gpu_exporter.agent.devices.protocol import Gpm, Pcie, Rates
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.devices.simulated import ScenarioTime, SimulatedDevice
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.readings import DeviceSnapshot, Span

COUNT = "nvmlGpmMetricsGet", "CONTRADICTED"
STUCK = "nvmlGpmMetricsGet", "STUCK"
ZERO: dict[str, float] = dict.fromkeys(("graphics", "sm", "occupancy", "tensor", "dram"), 0.0)
Change = Callable[[Gpm], Gpm]


class Bench:
    """An H100 whose GPM answers are changed by `board` and, for each instance, by `instances`."""

    def __init__(self, **gpu: Any) -> None:
        self.clock = ManualClock()
        scenario = parse_scenario({"gpus": [{"model": "H100", **gpu}]})
        self.stage = ScenarioTime(scenario, self.clock)
        self.device = SimulatedDevice(self.stage, scenario.gpus[0])
        self.sampler = DeviceSampler(self.device, registry.DEFAULT, self.clock, activity_rules(Settings()))
        self.board: Change = lambda gpm: gpm
        self.instances: dict[str, Change] = {}
        self.reopened: list[str] = []
        read, reopen = self.stage.read_gpm, self.device.reopen_gpm

        def read_gpm(uuid: str, *arguments: Any, **more: Any) -> Gpm | None:
            gpm = read(uuid, *arguments, **more)
            change = self.board if uuid == self.device.identity.uuid else self.instances.get(uuid, lambda gpm: gpm)
            return gpm and change(gpm)

        def reopen_gpm(subject: str) -> None:
            self.reopened.append(subject)
            reopen(subject)

        self.stage.read_gpm = read_gpm  # type: ignore[method-assign]
        self.device.reopen_gpm = reopen_gpm  # type: ignore[method-assign]

    def step(self, times: int = 1) -> DeviceSnapshot:
        for _ in range(times):
            self.clock.advance(1.0)
            snapshot = self.sampler.sample()
        return snapshot


def constant(value: float) -> dict[str, object]:
    return {"kind": "constant", "value": value}


def idle(spans: tuple[Span, ...]) -> float:
    return sum(span.end - span.start for span in spans if span.ratio == 0.0 and not span.other)


def families(snapshot: DeviceSnapshot) -> set[str]:
    return {sample.family.name for sample in snapshot.samples}


GPM_FAMILIES = {family.name for family in GPM.families}
INSTANCE_FAMILIES = {family.name for family in RATIOS.values()}


def zero(gpm: Gpm) -> Gpm:
    return gpm._replace(**ZERO)


def dead(gpm: Gpm) -> Gpm:
    return gpm._replace(pcie=0.0, nvlink=0.0, engines=None, **ZERO)


@pytest.mark.parametrize(
    ("load", "change", "named"),
    [
        ({"load": constant(0.5)}, zero, "power, utilization"),
        ({"load": constant(0.02)}, zero, "utilization"),
        ({"power": constant(0.9)}, zero, "power"),
        ({"encoder": constant(0.4)}, dead, "encoder"),
        ({"pcie": constant(0.2)}, dead, "pcie"),
        ({"nvlink": constant(0.2)}, dead, "nvlink"),
    ],
    ids=["work", "a little work", "power alone", "encoder", "PCIe", "NVLink"],
)
def test_a_gpm_zero_that_another_witness_contradicts_is_withheld_counted_and_logged(
    load: dict[str, object], change: Change, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(**load)
    bench.board = change
    bench.step()  # the first window has no earlier sample
    for second in range(1, 11):
        snapshot = bench.step()
        assert not families(snapshot) & GPM_FAMILIES  # gauges and integrals, from the first window on
        assert snapshot.activity is not None
        assert idle(snapshot.activity.spans) == 0.0
        assert bench.sampler.error_counts[COUNT] == max(0, second - 2)
    assert [record.getMessage() for record in caplog.records] == [
        f"gpu 0: GPM reads 0 while {named} shows work: the exporter publishes no GPM series and counts no idle "
        "time; it tries GPM again in 60 s"
    ]


def test_a_gpm_zero_with_some_traffic_is_not_contradicted_by_an_engine() -> None:
    """The encoder works without kernels, but it reads memory."""
    bench = Bench(encoder=constant(0.4))
    bench.board = lambda gpm: gpm._replace(dram=0.02)
    snapshot = bench.step(10)
    assert value(snapshot, "gpu_graphics_active_ratio") == 0.0
    assert not bench.sampler.error_counts


def test_traffic_that_gpm_does_not_report_contradicts_nothing() -> None:
    bench = Bench(pcie=constant(0.2))
    bench.board = lambda gpm: dead(gpm)._replace(pcie=None)
    assert value(bench.step(10), "gpu_graphics_active_ratio") == 0.0
    assert not bench.sampler.error_counts


@pytest.mark.parametrize(
    "change",
    [lambda gpm: gpm._replace(sm=None), lambda gpm: gpm._replace(graphics=0.0)],
    ids=["a driver without SM activity", "SM activity without graphics"],
)
def test_a_gpm_window_with_work_in_one_ratio_is_not_a_zero(change: Change) -> None:
    bench = Bench(load=constant(0.5))
    bench.board = change
    assert families(bench.step(10)) & GPM_FAMILIES
    assert not bench.sampler.error_counts


def test_work_that_only_the_sample_ring_shows_contradicts_gpm_zeros() -> None:
    bench = Bench(load=constant(0.02))
    bench.device.read_utilization = lambda: Rates(0.0, 0.0)  # type: ignore[method-assign]
    bench.board = zero
    assert not families(bench.step(10)) & GPM_FAMILIES
    assert bench.sampler.error_counts[COUNT] > 0


def test_gpm_zeros_of_a_board_with_utilization_count_while_power_is_missing() -> None:
    bench = Bench()
    bench.step(5)
    bench.device.read_power = bench.device.read_energy = lambda: 0.0  # type: ignore[method-assign]
    assert value(bench.step(3), "gpu_graphics_active_ratio") == 0.0


def test_gpm_zeros_of_a_resting_board_are_not_doubted() -> None:
    bench = Bench()
    bench.board = dead
    snapshot = bench.step(10)
    assert value(snapshot, "gpu_graphics_active_ratio") == 0.0
    assert snapshot.activity is not None
    assert idle(snapshot.activity.spans) > 0.9


def test_withheld_gpm_is_reopened_after_a_minute_and_used_again() -> None:
    """The board works until 20 s, but GPM reads 0; then the board rests, and GPM reads 0 correctly."""
    bench = Bench(load={"kind": "curve", "points": [[0, 0.9], [20, 0.9], [20, 0]]})
    bench.step(5)
    bench.board = zero
    bench.step(16)  # to 21 s; confirmed at 8
    assert bench.reopened == []
    silent = 0
    for _ in range(46):  # to 67 s
        snapshot = bench.step()
        assert snapshot.activity is not None
        assert idle(snapshot.activity.spans) == 0.0
        silent += not families(snapshot) & GPM_FAMILIES
    assert (silent, bench.reopened) == (46, [])
    bench.step()
    assert bench.reopened == [""]
    snapshot = bench.step(3)
    assert value(snapshot, "gpu_graphics_active_ratio") == 0.0
    assert snapshot.activity is not None
    assert idle(snapshot.activity.spans) > 0.9


def test_gpm_that_reads_work_again_is_used_at_once() -> None:
    bench = Bench(load=constant(0.9))
    bench.step(5)
    bench.board = zero
    bench.step(20)
    bench.board = lambda gpm: gpm
    assert value(bench.step(), "gpu_graphics_active_ratio") == pytest.approx(0.9)
    bench.board = zero
    bench.step(2)
    assert bench.sampler.error_counts[COUNT] == 18  # and a new contradiction has to be confirmed again


def test_a_witness_that_lags_behind_the_end_of_work_does_not_count_against_gpm() -> None:
    """Power and utilization cover up to a second before: one or two windows at the end of each burst may disagree."""
    bench = Bench(load={"kind": "square", "low": 0.0, "high": 1.0, "period": 7, "duty": 0.5})
    bench.step(60)
    assert bench.sampler.error_counts[COUNT] == 0
    assert bench.reopened == []


MIG = [{"profile": "3g.40gb"}, {"profile": "2g.20gb"}]


def instances(*loads: float) -> list[dict[str, object]]:
    """Instances whose loads begin at 3 s, so that the board's power at rest is known before."""
    return [
        {**entry, "load": {"kind": "curve", "points": [[0, 0], [3, 0], [3, load]]}}
        for entry, load in zip(MIG, loads, strict=True)
    ]


def test_on_mig_the_boards_power_contradicts_the_zeros_of_all_instances(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(mig=instances(1.0, 0.0))
    bench.step(5)
    bench.board = zero
    first, second = bench.step().instances
    bench.instances[first.uuid] = zero
    for _ in range(10):
        for instance in bench.step().instances:
            assert not {sample.family.name for sample in instance.samples} & INSTANCE_FAMILIES
            assert instance.activity is not None
            assert idle(instance.activity.spans) == 0.0
    assert bench.sampler.error_counts[COUNT] == 3 * 8 + 1  # the board, which was doubted first, and two instances
    assert sum(first.uuid in r.getMessage() and "power shows work" in r.getMessage() for r in caplog.records) == 1
    bench.step(60)
    assert set(bench.reopened) == {"", first.uuid, second.uuid}


def test_an_instance_that_works_explains_the_boards_power() -> None:
    bench = Bench(mig=instances(1.0, 0.0))
    _, resting = bench.step(10).instances
    assert resting.activity is not None
    assert idle(resting.activity.spans) == 1.0
    assert {sample.family.name for sample in resting.samples} >= INSTANCE_FAMILIES
    assert not bench.sampler.error_counts


def test_while_one_instance_cannot_be_read_no_instance_of_a_working_board_is_idle() -> None:
    """The unreadable instance may be the working one: its neighbour is unknown, but not doubted."""
    bench = Bench(mig=instances(0.0, 1.0))
    bench.board = zero
    resting, working = bench.step(5).instances
    bench.instances[working.uuid] = lambda gpm: Gpm(gpm.span_s, missing=True)
    for _ in range(10):
        resting = bench.step().instances[0]
        assert resting.activity is not None
        assert resting.activity.spans == ()
        assert {sample.family.name for sample in resting.samples} >= INSTANCE_FAMILIES
    assert bench.reopened == []


def test_one_implausibly_low_power_reading_does_not_confirm_gpm_zeros() -> None:
    bench = Bench(mig=instances(1.0, 0.0))

    def no_traffic() -> Pcie:
        raise NotSupported("nvmlDeviceGetFieldValues", "NVML_ERROR_NOT_SUPPORTED")

    bench.device.read_pcie = no_traffic  # type: ignore[method-assign]
    first, _ = bench.step(5).instances
    bench.board = bench.instances[first.uuid] = dead
    bench.step(2)
    bench.device.read_power, bench.device.read_energy = lambda: 1.0, lambda: 0.0  # type: ignore[method-assign]
    for instance in bench.step().instances:
        assert instance.activity is not None
        assert idle(instance.activity.spans) == 0.0
        assert not {sample.family.name for sample in instance.samples} & INSTANCE_FAMILIES


@pytest.mark.parametrize("power", [0.0, None], ids=["0 W", "a call that fails"])
def test_while_power_is_missing_the_zeros_of_instances_prove_nothing(power: float | None) -> None:
    """Power might have contradicted the zeros. After a minute without power, it no longer counts as a witness."""
    bench = Bench(mig=instances(0.0, 0.0))
    bench.step(5)

    def missing() -> float:
        if power is None:
            raise DeviceError("nvmlDeviceGetPowerUsage", "NVML_ERROR_UNKNOWN", once_answered=True)
        return power

    def no_energy() -> float:
        raise NotSupported("nvmlDeviceGetTotalEnergyConsumption", "NVML_ERROR_NOT_SUPPORTED")

    bench.device.read_power, bench.device.read_energy = missing, no_energy  # type: ignore[method-assign]
    for _ in range(59):
        for instance in bench.step().instances:
            assert instance.activity is not None
            assert instance.activity.spans == ()
            assert not {sample.family.name for sample in instance.samples} & INSTANCE_FAMILIES
    for instance in bench.step(2).instances:
        assert instance.activity is not None
        assert idle(instance.activity.spans) == 1.0


def test_traffic_of_the_board_does_not_contradict_an_instance_with_some_activity() -> None:
    bench = Bench(mig=instances(0.0, 0.0), pcie=constant(0.2))
    uuids = [instance.uuid for instance in bench.step().instances]
    bench.instances = {uuid: lambda gpm: gpm._replace(pcie=4e3) for uuid in uuids}
    for instance in bench.step(5).instances:
        assert {sample.family.name for sample in instance.samples} >= INSTANCE_FAMILIES


def test_a_window_that_begins_during_unexplained_work_of_the_board_is_not_quiet() -> None:
    """The instances could not be listed while the board worked; the next window begins before that time."""
    work = {"kind": "curve", "points": [[0, 0], [10, 0], [10, 1], [12, 1], [12, 0]]}
    faults = [{"at": 10.5, "for": 2, "call": "nvmlDeviceGetMigMode", "error": "NVML_ERROR_UNKNOWN"}]
    bench = Bench(mig=[{"profile": "7g.80gb", "load": work}], faults=faults)
    (instance,) = bench.step(5).instances
    bench.instances[instance.uuid] = bench.board = zero
    idle_s = []
    for _ in range(15):
        readings = bench.step().instances
        idle_s.append(idle(readings[0].activity.spans) if readings and readings[0].activity else 0.0)
    assert idle_s == [1.0] * 5 + [0.0] * 3 + [1.0] * 7  # 10 to 13 s is one window, in which power shows work


def test_a_doubt_remains_after_a_cycle_in_which_the_instances_could_not_be_listed() -> None:
    faults = [{"at": 15, "for": 0.5, "call": "nvmlDeviceGetMigMode", "error": "NVML_ERROR_UNKNOWN"}]
    bench = Bench(mig=[instances(1.0, 0.0)[0]], faults=faults)
    (instance,) = bench.step(2).instances
    bench.instances[instance.uuid] = zero
    bench.step(12)
    before = bench.sampler.error_counts[COUNT]
    assert bench.step().instances == ()
    bench.step()
    assert bench.sampler.error_counts[COUNT] == before + 1


def test_the_doubt_of_a_destroyed_instance_is_forgotten() -> None:
    bench = Bench(mig=[{**instances(1.0, 0.0)[0], "to": 20}])
    bench.board = zero
    (instance,) = bench.step(2).instances
    bench.instances[instance.uuid] = zero
    bench.step(10)
    assert instance.uuid in bench.sampler._activity._trust._doubts
    bench.step(10)
    assert instance.uuid not in bench.sampler._activity._trust._doubts


def test_a_stuck_instance_is_forgotten_after_it_was_destroyed() -> None:
    bench = Bench(mig=[{**MIG[0], "to": 20}, MIG[1]])
    gone, _ = bench.step().instances
    bench.instances[gone.uuid] = lambda gpm: gpm._replace(elapsed_cycles=1e9, active_cycles=0.0)
    bench.step(10)
    assert gone.uuid in bench.sampler._activity._trust._stuck_since
    bench.step(10)
    assert bench.sampler._activity._trust._stuck_since == {}


@pytest.mark.parametrize("mig", [False, True], ids=["board", "instance"])
def test_gpm_windows_with_stuck_cycle_counters_are_withheld_logged_and_reopened(
    mig: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(**({"mig": instances(0.0, 0.0)} if mig else {}))
    cycles = [0.0]

    def count(gpm: Gpm) -> Gpm:
        return gpm._replace(elapsed_cycles=cycles[0], active_cycles=0.0)

    subject = bench.step().instances[0].uuid if mig else ""
    if mig:
        bench.instances[subject] = count
    else:
        bench.board = count

    def step() -> tuple[float, bool]:
        snapshot = bench.step()
        unit = snapshot.instances[0] if mig else snapshot
        names = {sample.family.name for sample in unit.samples}
        return idle(unit.activity.spans if unit.activity else ()), bool(
            names & (INSTANCE_FAMILIES if mig else GPM_FAMILIES)
        )

    for _ in range(5):
        cycles[0] += 1e9
        known, published = step()
    assert known == pytest.approx(1.0, abs=0.21)
    assert published
    for second in range(1, 66):
        assert step() == (0.0, False)
        assert bench.reopened == ([subject] if second > 60 else [])
    assert bench.sampler.error_counts[STUCK] >= 63  # except for the reads that begin a window
    assert len([r for r in caplog.records if "cycle counters of GPM do not move" in r.getMessage()]) == 1
    for _ in range(3):
        cycles[0] += 1e9
        known, published = step()
    assert known > 0.7
    assert published
