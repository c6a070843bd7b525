"""The energy of a board is divided among its instances: no energy is created or lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.samples import value

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.collectors.mig import divide_energy
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.devices.simulated import ScenarioTime, SimulatedDevice
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.readings import DeviceSnapshot

PARTS = st.lists(
    st.tuples(st.uuids().map(str), st.integers(1, 7), st.none() | st.floats(0, 1)), max_size=7, unique_by=lambda p: p[0]
)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.sampled_from([4, 7]), PARTS)
def test_shares_and_remainder_add_up_to_the_whole(
    joules: float, idle: float, slices: int, parts: list[tuple[str, int, float | None]]
) -> None:
    shares, rest = divide_energy(joules, idle, slices, parts)
    assert set(shares) == {uuid for uuid, *_ in parts}
    assert sum(shares.values()) + rest == pytest.approx(joules, rel=1e-9, abs=1e-9)
    assert min(shares.values(), default=0.0) >= 0.0
    assert rest >= -1e-9 * joules - 1e-9


def test_idle_energy_is_divided_by_slices_and_the_remainder_by_activity() -> None:
    shares, rest = divide_energy(170.0, 70.0, 7, [("a", 3, 1.0), ("b", 2, 0.0)])
    assert shares == pytest.approx({"a": 30.0 + 100.0, "b": 20.0})
    assert rest == pytest.approx(20.0)  # two slices that belong to no instance
    shares, _ = divide_energy(170.0, 70.0, 7, [("a", 3, 0.5), ("b", 2, 0.5)])
    assert shares == pytest.approx({"a": 30.0 + 60.0, "b": 20.0 + 40.0})


def test_all_energy_is_divided_by_slices_if_any_activity_is_unknown() -> None:
    assert divide_energy(70.0, 10.0, 7, [("a", 3, None), ("b", 1, 0.9)]) == ({"a": 30.0, "b": 10.0}, 30.0)


def joules(snapshot: DeviceSnapshot, family: str) -> float:
    """The sum of a family over a snapshot and its instances."""
    samples = [*snapshot.samples, *(sample for instance in snapshot.instances for sample in instance.samples)]
    return sum(sample.value for sample in samples if sample.family.name == family)


LOADS = st.fixed_dictionaries(
    {"kind": st.just("square"), "low": st.floats(0, 1), "high": st.floats(0, 1), "period": st.floats(2, 60)}
)
INSTANCE = st.fixed_dictionaries(
    {"profile": st.sampled_from(["1g.10gb", "2g.20gb", "3g.40gb"]), "load": LOADS, "from": st.sampled_from([0, 7, 20])}
)


@given(st.sampled_from(["A100", "H100", "B200"]), st.lists(INSTANCE, max_size=3))
def test_instances_and_remainder_grow_as_fast_as_the_board(model: str, instances: list[dict[str, object]]) -> None:
    """For half a minute in which instances appear. No instance counts in the board's family, and none counts twice."""
    clock = ManualClock()
    scenario = parse_scenario({"gpus": [{"model": model, "mig": instances}]})
    device = SimulatedDevice(ScenarioTime(scenario, clock), scenario.gpus[0])
    sampler = DeviceSampler(device, registry.DEFAULT, clock, activity_rules(Settings()))
    clock.advance(1.0)
    begin = joules(sampler.sample(), "gpu_energy_joules_total")
    now = begin
    for _ in range(30):
        clock.advance(1.0)
        snapshot = sampler.sample()
        before, now = now, joules(snapshot, "gpu_energy_joules_total")
        assert joules(snapshot, "gpu_mig_power_watts") <= (now - before) * (1 + 1e-9)  # one second
    board = joules(snapshot, "gpu_energy_joules_total") - begin
    divided = joules(snapshot, "gpu_mig_energy_joules_total")
    rest = joules(snapshot, "gpu_mig_unassigned_energy_joules_total")
    assert divided + rest == pytest.approx(board, rel=1e-3)


def test_energy_that_is_used_while_mig_is_off_belongs_to_no_instance() -> None:
    """MIG mode is switched off and on again while the exporter runs, with five minutes of full load in between."""
    clock = ManualClock()
    busy = {"kind": "constant", "value": 1}
    mig = [{"profile": "7g.80gb", "to": 100, "load": busy}, {"profile": "7g.80gb", "from": 400, "load": busy}]
    gpu = {"model": "H100", "mig": mig, "load": busy}
    switched = parse_scenario({"gpus": [{**gpu, "mig_to": 100}]})
    back_on = parse_scenario({"gpus": [{**gpu, "mig_from": 400}]})
    device = SimulatedDevice(ScenarioTime(switched, clock), switched.gpus[0])
    sampler = DeviceSampler(device, registry.DEFAULT, clock, activity_rules(Settings()))
    most = 700.0  # joules in a second at the limit
    before: dict[str, float] = {}
    seen = 0
    for second in range(500):
        if second == 250:
            device._gpu = back_on.gpus[0]
        clock.advance(1.0)
        snapshot = sampler.sample()
        now = {i.uuid: i.energy_j for i in snapshot.instances if i.energy_j is not None}
        now["rest"] = value(snapshot, "gpu_mig_unassigned_energy_joules_total") or before.get("rest", 0.0)
        assert all(joules - before.get(name, 0.0) <= most for name, joules in now.items()), second
        seen += bool(snapshot.instances)
        before = {**before, **now}
    assert 190 < seen < 210


def test_energy_used_while_the_instances_cannot_be_listed_is_unassigned() -> None:
    clock = ManualClock()
    mig = [{"profile": "3g.40gb", "load": {"kind": "constant", "value": 1}}]
    faults = [{"at": 20, "for": 60, "call": "nvmlDeviceGetMigMode", "error": "NVML_ERROR_UNKNOWN"}]
    scenario = parse_scenario({"gpus": [{"model": "H100", "mig": mig, "faults": faults}]})
    device = SimulatedDevice(ScenarioTime(scenario, clock), scenario.gpus[0])
    sampler = DeviceSampler(device, registry.DEFAULT, clock, activity_rules(Settings()))
    charged, rest, begin = 0.0, 0.0, 0.0
    for second in range(1, 101):
        clock.advance(1.0)
        snapshot = sampler.sample()
        begin = begin or value(snapshot, "gpu_energy_joules_total") or 0.0
        rest = value(snapshot, "gpu_mig_unassigned_energy_joules_total") or rest
        for instance in snapshot.instances:
            if second > 2 and instance.energy_j is not None:
                assert instance.energy_j - charged <= 700.0
            charged = instance.energy_j or charged
    board = (value(snapshot, "gpu_energy_joules_total") or 0.0) - begin
    assert charged + rest == pytest.approx(board, rel=1e-6)


def test_the_counter_of_a_deleted_instance_is_dropped_and_a_new_instance_starts_at_zero() -> None:
    clock = ManualClock()
    busy = {"kind": "constant", "value": 1}
    mig = [{"profile": "1g.10gb", "gi": 7, "to": 30, "load": busy}, {"profile": "1g.10gb", "gi": 7, "from": 30}]
    scenario = parse_scenario({"gpus": [{"model": "H100", "mig": mig}]})
    device = SimulatedDevice(ScenarioTime(scenario, clock), scenario.gpus[0])
    sampler = DeviceSampler(device, registry.DEFAULT, clock, activity_rules(Settings()))
    seen: dict[str, list[float]] = {}
    for _ in range(40):
        clock.advance(1.0)
        for instance in sampler.sample().instances:
            if instance.energy_j is not None:
                seen.setdefault(instance.uuid, []).append(instance.energy_j)
    first, second = seen.values()
    assert first == sorted(first)
    assert second[0] < first[-1] / 10
    assert not [key for key in sampler._totals._sums if isinstance(key, tuple) and key[0] == next(iter(seen))]
