"""Any witness of idleness may be refused, stuck, frozen or absurd: no second counts as idle that another one contradicts.

The sampler and the ledger are real; the faults are in the answers of a simulated board. The oracle knows the load, and
which answers are true.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.testbed.simulated_node import SimulatedNode

from gpu_exporter.agent.devices.errors import DeviceError, NotSupported
from gpu_exporter.agent.devices.protocol import Gpm, Traffic, UtilizationSample
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.model.views import AllocationView

REST_S, WORK_S, ROUNDS = 130, 40, 3
EDGE_S = 6.0  # means over a second, cycles and the time that power needs to follow the load
# The calls of each source of evidence.
SOURCES: Mapping[str, tuple[str, ...]] = {
    "utilization": ("read_utilization", "read_utilization_samples"),
    "power": ("read_power",),
    "energy": ("read_energy",),
    "limit": ("read_power_limit", "read_default_power_limit"),
    "pcie": ("read_pcie",),
    "nvlink": ("read_nvlink",),
    "gpm": ("read_gpm",),
}
SEEN_BY = {"train": {"utilization", "nvlink", "gpm"}, "decode": {"utilization", "gpm"}}  # beside power
FAULTS = ("refused", "failing", "stuck", "frozen", "absurd")


def at_rest(value: Any) -> Any:
    """The value that a counter or sensor has if it sticks at rest."""
    if isinstance(value, Gpm):
        return value._replace(**{name: 0.0 for name in value._fields if name != "span_s" and getattr(value, name)})
    if isinstance(value, list | tuple) and value and isinstance(value[0], UtilizationSample):
        return [each._replace(ratio=0.0) for each in value]
    if hasattr(value, "_fields") and "gpu" in value._fields:
        return value._replace(gpu=0.0)
    return value


def absurd(value: Any, draw: random.Random) -> Any:
    factor = draw.choice((20.0, 1e4, -1.0))
    if isinstance(value, float):
        return value * factor
    if isinstance(value, Traffic):
        return Traffic(value.rx * factor, value.tx * factor)
    if isinstance(value, Gpm):
        return value._replace(**{name: -1.0 for name in value._fields if name != "span_s" and getattr(value, name)})
    if isinstance(value, list | tuple) and value and isinstance(value[0], UtilizationSample):
        return [each._replace(ratio=each.ratio * 2.55) for each in value]
    return value


def break_source(node: SimulatedNode, source: str, fault: str, draw: random.Random, begin: float) -> None:
    """From `begin` (monotonic seconds) on, the answers of this source have this fault."""
    device = node.samplers[0].device
    for name in SOURCES[source]:
        answer: Callable[..., Any] = getattr(device, name)
        kept: list[Any] = []

        def broken(*given: Any, name: str = name, answer: Callable[..., Any] = answer, kept: list[Any] = kept) -> Any:
            value = answer(*given)
            if node.clock.monotonic() < begin:
                return value
            if fault == "refused":
                raise NotSupported(name, "NVML_ERROR_NOT_SUPPORTED")
            if fault == "failing":
                if draw.random() < 0.5:
                    raise DeviceError(name, "NVML_ERROR_UNKNOWN", once_answered=True)
                return value
            if fault == "absurd":
                return absurd(value, draw)
            if not kept:
                kept.append(at_rest(value) if fault == "stuck" else value)
            if name == "read_utilization_samples":  # the ring goes on, with entries of the kept load
                ratio = 0.0 if fault == "stuck" or not kept[0] else kept[0][-1].ratio
                return [each._replace(ratio=ratio) for each in value]
            return kept[0]

        setattr(device, name, broken)


def make_node(level: str) -> SimulatedNode:
    stages: list[dict[str, Any]] = [{"at": 0, "level": "context"}]
    for number in range(ROUNDS):
        begin = (number + 1) * REST_S + number * WORK_S
        stages += [{"at": begin, "level": level}, {"at": begin + WORK_S, "level": "context"}]
    holder = {"gpu": 0, "kind": "job", "name": "7", "user": "u", "processes": 1}
    return SimulatedNode(parse_scenario({"gpus": [{"model": "H100", "work": stages}], "holders": [holder]}))


def works(second: float) -> bool:
    """Whether the board works, and has worked for longer than a witness may take to see it."""
    at = second % (REST_S + WORK_S)
    return REST_S + EDGE_S <= at <= REST_S + WORK_S


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["train", "decode"]))
def test_no_second_is_idle_that_a_true_witness_contradicts(seed: int, level: str) -> None:
    draw = random.Random(seed)
    node = make_node(level)
    started = node.clock.monotonic()
    broken = {source: draw.choice(FAULTS) for source in SOURCES if draw.random() < draw.choice((0.3, 0.7))}
    begin = started + draw.choice((0.0, REST_S / 2, REST_S + WORK_S / 2))
    for source, fault in broken.items():
        break_source(node, source, fault, draw, begin)
    true = SOURCES.keys() - broken.keys()
    contradicts = true & SEEN_BY[level] or (level == "train" and true >= {"power", "limit"})
    idle_s = 0.0
    for second in range((REST_S + WORK_S) * ROUNDS):
        node.run(1.0)
        totals = node.state.ledger.unit_totals(UnitId(node.samplers[0].device.identity.uuid), *now_of(node))
        grown, idle_s = (totals.idle_s if totals else 0.0) - idle_s, totals.idle_s if totals else 0.0
        if works(second) and contradicts:
            assert grown == 0.0, f"{second}: {broken} from {begin - started:.0f}"


def now_of(node: SimulatedNode) -> tuple[float, float]:
    return node.clock.monotonic(), node.clock.wall()


def hour_of(node: SimulatedNode, *, without: tuple[str, ...] = ()) -> AllocationView:
    for source in without:
        break_source(node, source, "refused", random.Random(1), 0.0)
    (allocation,) = node.run(3600).allocations
    return allocation


def resting(level: str = "context", *, at: int = 0, first: str = "context") -> SimulatedNode:
    holder = {"gpu": 0, "kind": "job", "name": "7", "user": "u", "processes": 1}
    stages = [{"at": 0, "level": first}, *([{"at": at, "level": level}] if at else [])]
    return SimulatedNode(parse_scenario({"gpus": [{"model": "H100", "work": stages}], "holders": [holder]}))


ALL_BUT_UTILIZATION = ("power", "energy", "limit", "pcie", "nvlink", "gpm")


def test_a_gpu_with_one_witness_is_neither_idle_nor_lost() -> None:
    """Engines for video and images do not see computation: they contradict, and prove nothing."""
    seen = hour_of(resting(), without=ALL_BUT_UTILIZATION)
    assert seen.verdict.state == "unknown"
    assert seen.verdict.evidence == "idle for 59m55s, but only one witness shows it: this GPU reports no other witness"
    assert (seen.totals.idle_s, seen.totals.idle_run_witnesses) == (0.0, 1)
    assert seen.totals.observed_s == pytest.approx(3600, abs=10), "its coverage is not lost"
    assert seen.totals.idle_run_s == pytest.approx(3600, abs=10), "so it may become a candidate, and no more"
    control = hour_of(resting(), without=ALL_BUT_UTILIZATION[1:])
    assert control.verdict.state == "unknown", "power without a limit is no witness"
    control = hour_of(resting(), without=("energy", "limit", "pcie", "gpm"))
    assert (control.verdict.state, control.totals.idle_run_witnesses) == ("held_idle", 2)
    assert control.totals.idle_s == pytest.approx(3600, abs=10)


def test_the_hours_of_a_tenant_by_one_witness_are_a_part_of_their_own() -> None:
    node = resting()
    hour_of(node, without=ALL_BUT_UTILIZATION)
    ((_, totals),) = node.view().tenants
    assert totals.idle_s == 0.0 and totals.busy_s == 0.0
    assert totals.unproven_s == pytest.approx(3600, abs=10)
    assert totals.known_s == pytest.approx(3600, abs=10)
    node = resting()
    hour_of(node)
    ((_, totals),) = node.view().tenants
    assert (totals.unproven_s, totals.idle_s) == (None, pytest.approx(3600, abs=10))


def test_power_without_a_limit_contradicts_a_utilization_that_is_stuck_at_0() -> None:
    node = resting("train", at=1800)
    break_source(node, "utilization", "stuck", random.Random(1), 0.0)
    for source in ("limit", "nvlink", "gpm"):
        break_source(node, source, "refused", random.Random(1), 0.0)
    (before,) = node.run(1790).allocations
    assert before.verdict.state == "held_idle", "the other witnesses are quiet too"
    (after,) = node.run(1000).allocations
    assert after.verdict.state == "unknown"
    assert "the driver reports utilization 0 at " in after.verdict.evidence, after.verdict
    assert "W, but at rest the board draws 1" in after.verdict.evidence
    assert after.totals.idle_s == pytest.approx(1790, abs=15)


@pytest.mark.parametrize(
    ("watts", "note"), [(588.0, "588 W on a board of 35 W"), (70.0, ""), (71.0, "71 W on a board")]
)
def test_power_above_twice_the_limit_is_no_value_and_no_witness(watts: float, note: str) -> None:
    """A driver fault of 2026: 588 W for minutes on a board of 35 W. The other witnesses decide."""
    node = resting()
    device: Any = node.samplers[0].device
    device.read_power = lambda: watts
    device.read_power_limit = device.read_default_power_limit = lambda: 35.0
    break_source(node, "energy", "refused", random.Random(1), 0.0)
    (seen,) = node.run(1800).allocations
    assert (node.readings[0].facts.power_w is None) == bool(note)
    if note:
        assert seen.verdict.state == "held_idle"
        assert f"; its power is not used: {note}" in seen.verdict.evidence
        assert seen.verdict.evidence.count("its power is not used") == 1
        assert node.samplers[0].error_counts["nvmlDeviceGetPowerUsage", "OUT_OF_RANGE"] > 1000


@pytest.mark.parametrize("energy", ["", "refused", "stuck"])
def test_a_power_that_does_not_follow_the_load_is_no_witness(energy: str) -> None:
    node = resting("train", at=600)
    if energy:
        break_source(node, "energy", energy, random.Random(1), 0.0)
    break_source(node, "power", "frozen", random.Random(1), node.clock.monotonic() + 300)
    node.run(590)
    assert node.readings[0].facts.power_w is not None, "equal values at rest prove nothing"
    node.run(60)
    assert node.readings[0].facts.power_w is None
    assert "its power is not used: it stays at 133.000 W, whatever the load" in node.readings[0].note


def test_equal_power_at_a_constant_load_is_a_value() -> None:
    """Clocks may be locked, and a board at its limit may report the same milliwatts for hours."""
    node = resting("train", at=600)
    node.run(700)
    device: Any = node.samplers[0].device
    device.read_power = lambda: 600.0
    break_source(node, "energy", "refused", random.Random(1), 0.0)
    node.run(1800)
    assert node.readings[0].facts.power_w == 600.0 and node.readings[0].note == ""


def test_a_frozen_power_under_a_constant_load_is_shown_by_the_energy_counter() -> None:
    node = resting(first="train")
    device: Any = node.samplers[0].device
    device.read_power = lambda: 133.0
    node.run(25)
    assert node.readings[0].facts.power_w == 133.0
    node.run(15)
    assert node.readings[0].facts.power_w is None


def test_the_first_minute_of_a_discarded_power_is_unknown() -> None:
    """A valid value may come back, and until then the other witnesses prove less than before."""
    node = resting()
    device: Any = node.samplers[0].device
    true = device.read_power
    node.run(600)
    device.read_power = lambda: 20_000.0 if node.clock.monotonic() % 2 else 2_000.0
    node.run(30)
    device.read_power = true
    (seen,) = node.run(60).allocations
    assert seen.totals.idle_s == pytest.approx(690 - 30, abs=7)
    device.read_power = lambda: 2_000.0
    (seen,) = node.run(600).allocations
    assert seen.totals.idle_s == pytest.approx(660 + 600, abs=12), "within ten minutes the others decide at once"
    device.read_power = true
    node.run(700)
    device.read_power = lambda: 2_000.0
    (seen,) = node.run(600).allocations
    assert seen.totals.idle_s == pytest.approx(1260 + 1300 - 60, abs=18)


def test_the_rest_of_a_board_without_limit_is_learned_with_an_open_context_only() -> None:
    """A context alone raises the power: an H200 draws 79 W without and 122 W with one."""
    node = resting()
    device: Any = node.samplers[0].device
    device.read_power = lambda: 40.0
    contexts = device.read_processes
    device.read_processes = lambda: contexts()._replace(compute=0, graphics=0)
    for source in ("limit", "energy"):
        break_source(node, source, "refused", random.Random(1), 0.0)
    node.run(300)
    device.read_power, device.read_processes = lambda: 90.0, contexts
    (seen,) = node.run(600).allocations
    assert node.readings[0].contradiction == ""
    assert seen.totals.idle_s == pytest.approx(895, abs=10)


@pytest.mark.parametrize("has_energy", [True, False])
def test_a_coarse_sensor_that_follows_bursts_is_a_value(has_energy: bool) -> None:
    """Whole watts, equal in each rest. At the edge of a burst the utilization shows the time before."""
    stages = [{"at": 40 * number, "level": "train" if number % 2 else "context"} for number in range(60)]
    holder = {"gpu": 0, "kind": "job", "name": "7", "user": "u", "processes": 1}
    node = SimulatedNode(parse_scenario({"gpus": [{"model": "H100", "work": stages}], "holders": [holder]}))
    device: Any = node.samplers[0].device
    exact = device.read_power
    device.read_power = lambda: float(round(exact() / 10.0) * 10)
    if not has_energy:
        break_source(node, "energy", "refused", random.Random(1), 0.0)
    discarded = 0
    for _ in range(1800):
        node.run(1.0)
        discarded += bool(node.readings[0].note)
    assert discarded == 0
    ((_, totals),) = node.view().tenants
    assert totals.idle_s == pytest.approx(900, rel=0.1)


def test_the_power_at_rest_survives_a_restart_under_load(tmp_path: Path) -> None:
    """Else 300 of 700 W look like rest to a new process, and a utilization that is stuck at 0 is believed."""
    state = StateFile(tmp_path, 10.0, "boot-1")
    scenario = {
        "gpus": [{"model": "H100", "work": [{"at": 0, "level": "context"}, {"at": 1000, "level": "evaluate"}]}],
        "holders": [{"gpu": 0, "kind": "job", "name": "7", "user": "u", "processes": 1}],
    }
    node = SimulatedNode(parse_scenario(scenario), state=state)

    def break_it() -> None:
        break_source(node, "utilization", "stuck", random.Random(1), 0.0)
        for source in ("pcie", "nvlink", "gpm"):
            break_source(node, source, "refused", random.Random(1), 0.0)

    break_it()
    (before,) = node.run(990).allocations
    assert before.verdict.state == "held_idle", before.verdict
    node.run(110)
    node.state.write_state()
    node.restart(5.0, state)
    break_it()
    (after,) = node.run(1800).allocations
    assert after.verdict.state == "unknown"
    totals = node.state.ledger.unit_totals(UnitId(node.samplers[0].device.identity.uuid), *now_of(node))
    assert totals is not None and totals.idle_s == pytest.approx(1000, abs=15)
