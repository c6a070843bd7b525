"""Sentinels: each family has a range. A value outside is discarded, is counted, and proves no idleness."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.board import Boards, healthy

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.collectors.contract import Cycle, Totals
from gpu_exporter.agent.collectors.memory import collect_memory
from gpu_exporter.agent.collectors.power import collect_power
from gpu_exporter.agent.devices.errors import OUT_OF_RANGE
from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.agent.devices.protocol import (
    Clocks,
    Device,
    Gpm,
    InstanceIdentity,
    Memory,
    Pcie,
    Processes,
    Rates,
    RowRemaps,
    Traffic,
    UtilizationSample,
)
from gpu_exporter.agent.exposition.catalog import fixed_groups
from gpu_exporter.agent.sampling.activity.witnesses import ActivityRules
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.model.metrics import Family, Range
from gpu_exporter.common.model.units import DeviceIdentity

RULES = ActivityRules(1.0, 3, 0.3, 0.25)
FAMILIES = [family for c in registry.ALL for family in (*c.families, *c.instance_families)]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_that_is_read_has_a_range_or_a_reason(family: Family) -> None:
    assert (family.plausible is None) == bool(family.unbounded)
    if family.plausible is not None:
        assert family.plausible.low < family.plausible.high
        for sentinel in (0xFFFFFFFFFFFFFFFF, float("inf"), float("-inf"), -(2.0**63)):
            assert not family.plausible.holds(sentinel)


def test_no_other_family_comes_directly_from_the_driver() -> None:
    """The exporter counts or integrates them from checked values, or they are events."""
    sources = {family.source for _, _, families in fixed_groups() for family in families}
    read = {source for source in sources if source.startswith("nvmlDevice")}
    assert read <= {"nvmlDeviceGetSamples, else nvmlDeviceGetUtilizationRates"}


class Nonsense(Device):
    """A device whose every value is the sentinel, in the driver's unit."""

    def __init__(self, sentinel: float) -> None:
        self.sentinel = sentinel
        self.clock = ManualClock()
        self.identity = DeviceIdentity(0, "GPU-0", "NVIDIA H100", "580", "0000:00", 0, "enabled")
        self.answers = 0

    def __getattribute__(self, name: str) -> Any:
        """A read of one number that this class does not override gives the sentinel too."""
        inherited = vars(Device).get(name) if name.startswith("read_") and name not in vars(Nonsense) else None
        if inherited is not None and inherited.__annotations__ == {"return": "float"}:
            return self._say
        return super().__getattribute__(name)

    def _say(self, unit: float = 1.0) -> Any:
        self.answers += 1
        return self.sentinel * unit

    def read_utilization(self) -> Rates:
        return Rates(self._say(0.01), self._say(0.01))

    def read_utilization_samples(self, since_wall: float) -> list[UtilizationSample]:
        wall = self.clock.wall()
        return [UtilizationSample(wall - 1.0 + i / 5, self._say(0.01)) for i in range(1, 6)]

    def read_engine(self, engine: str) -> float:
        return float(self._say(0.01))

    def read_gpm(self) -> Gpm | None:
        ratio, rate = self._say(0.01), self._say(2.0**20)
        return Gpm(1.0, ratio, ratio, ratio, ratio, ratio, rate, rate, ratio)

    def read_memory(self) -> Memory:
        return Memory(self._say(), self._say(), self._say(), self._say())

    def read_power(self) -> float:
        return float(self._say(1e-3))

    read_power_limit = read_power

    def read_energy(self) -> float:
        return float(self._say(1e-3))

    def read_temperature_limits(self) -> dict[str, float]:
        return {"slowdown": self._say()}

    def read_clocks(self) -> Clocks:
        return Clocks(self._say(1e6), self._say(1e6), self._say(1e6))

    def read_performance_state(self) -> int:
        return int(self._say())

    def read_throttle_seconds(self) -> dict[str, float]:
        return {"thermal": self._say(1e-9)}

    def read_throttle_active(self) -> dict[str, bool]:
        return {"thermal": self._say()}

    def read_pcie(self) -> Pcie:
        return Pcie(Traffic(self._say(), self._say()), self._say())

    def read_nvlink(self) -> Traffic:
        return Traffic(self._say(1024.0), self._say(1024.0))

    def read_ecc_errors(self) -> dict[str, int]:
        return {"corrected": self._say()}

    def read_row_remaps(self) -> RowRemaps:
        return RowRemaps(self._say(), self._say(), self._say(), self._say())

    def read_retired_pages(self) -> dict[str, int]:
        return {"single_bit": self._say()}

    def read_recovery_action(self) -> int:
        return int(self._say())

    def read_processes(self) -> Processes:
        return Processes(self._say(), self._say())

    def list_instances(self) -> list[Any]:
        return [NonsenseInstance(self)]


class NonsenseInstance:
    identity = InstanceIdentity("MIG-1", "1/0", "1g.10gb", 1, 1)

    def __init__(self, device: Nonsense) -> None:
        self.read_gpm, self.read_memory = device.read_gpm, device.read_memory


# Families for which the sentinel is a plausible value: a count of 4.3 GB, or of 4.3 s.
TRUE_PERHAPS = {
    0xFFFFFFFF: {
        "gpu_memory_used_bytes",
        "gpu_memory_free_bytes",
        "gpu_memory_reserved_bytes",
        "gpu_memory_total_bytes",
        "gpu_mig_memory_used_bytes",
        "gpu_mig_memory_total_bytes",
        "gpu_pcie_rx_bytes_total",
        "gpu_pcie_tx_bytes_total",
        "gpu_nvlink_rx_bytes_total",
        "gpu_nvlink_tx_bytes_total",
        "gpu_throttle_seconds_total",
    },
    0xFFFFFFFFFFFFFFFF: set[str](),
    -(2.0**63): set[str](),
}
OURS = {"gpu_mig_info", "gpu_mig_activity_supported"}


@pytest.mark.parametrize("sentinel", TRUE_PERHAPS)
def test_no_sentinel_of_the_driver_is_published(sentinel: float) -> None:
    device = Nonsense(sentinel)
    sampler = DeviceSampler(device, registry.ALL, device.clock, RULES)
    for _ in range(3):
        device.clock.advance(1.0)
        snapshot = sampler.sample()
        published = {s.family.name for s in snapshot.samples}
        published |= {s.family.name for i in snapshot.instances for s in i.samples}
        assert published - OURS <= TRUE_PERHAPS[sentinel]
        for reading in (snapshot, *snapshot.instances):
            assert not [s for s in (reading.activity.spans if reading.activity else ()) if s.end > s.start]
    assert {error for _, error in sampler.error_counts} == {"OUT_OF_RANGE"}
    counted = {call for call, _ in sampler.error_counts}
    assert {
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetSamples",
        "nvmlGpmMetricsGet",
        "nvmlDeviceGetPowerUsage",
    } <= (counted)
    assert {"nvmlDeviceGetOfaUtilization", "nvmlDeviceGetJpgUtilization", "nvmlDeviceGetClockInfo"} <= counted


def make_cycle(device: object, totals: Totals | None = None, now: float = 0.0) -> Cycle:
    return Cycle(device, {}, lambda: now, totals or Totals())  # type: ignore[arg-type]


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_values_out_of_range_are_discarded_and_counted(value: float) -> None:
    family = Family("gpu_x_ratio", "", source="nvmlX, else nvmlY", plausible=Range(0.0, 1.0))
    cycle = make_cycle(None)
    admitted = cycle.admit(family, value, witness=True)
    if 0.0 <= value <= 1.0:
        assert (admitted, cycle.remarks, cycle.witness_missing) == (value, [], False)
    elif value != value:
        assert (admitted, cycle.remarks, cycle.witness_missing) == (None, [], False)
    else:
        assert (admitted, cycle.remarks, cycle.witness_missing) == (None, [("nvmlX", "OUT_OF_RANGE")], True)


class Reads(Device):
    energy = power = 100.0
    memory = Memory(1000, 300, 600, 100)

    def read_power(self) -> float:
        return self.power

    read_power_limit = read_power

    def read_energy(self) -> float:
        return self.energy

    def read_memory(self) -> Memory:
        return self.memory


SENTINEL_J = 4_294_967.295  # 2^32 - 1 mJ
UPTIME_S = 1e6


@pytest.mark.parametrize(
    ("energies", "published"),
    [
        ([1e6, 1e6 + 700, SENTINEL_J, 1e6 + 2100, 1e6 + 2800], [1e6, 1e6 + 700, None, 1e6 + 2100, 1e6 + 2800]),
        ([1e6, SENTINEL_J, SENTINEL_J, 1e6], [1e6, None, None, 1e6]),
        ([1e9, SENTINEL_J, 1e9 + 1400, 1e9 + 2100], [1e9, None, 1e9 + 1400, 1e9 + 2100]),
        ([1e9, SENTINEL_J, SENTINEL_J, SENTINEL_J, 1e9 + 2100], [1e9, None, None, None, 1e9 + 2100]),
        ([1e9, 2.1e6, 2.1e6, 2.1e6, 1e9 + 2100], [1e9, None, None, None, 1e9 + 2100]),
        ([4_290_000.0, SENTINEL_J, 4_291_000.0], [4_290_000.0, None, 4_291_000.0]),
        ([SENTINEL_J, 1e9, 1e9 + 700], [None, 1e9, 1e9 + 700]),
        ([1e6, 0.0, 0.0, 1e6, 1e6 + 700], [1e6, None, None, 1e6, 1e6 + 700]),
        ([1e6, 0.0, 1e6 + 1400, 1e6 + 2100], [1e6, None, 1e6 + 1400, 1e6 + 2100]),
        ([1e9, 5.0, 1e9 + 1400], [1e9, None, 1e9 + 1400]),
        ([1e6, 5.0, 705.0, 1405.0], [1e6, None, 705.0, 1405.0]),
        ([1e9, 4e6, 4e6 + 700], [1e9, None, 4e6 + 700]),
        ([1e6, 0.0, 700.0, 1400.0], [1e6, None, 700.0, 1400.0]),
        ([1e6, 5.0, 5.0, 705.0], [1e6, None, None, 705.0]),
        ([1e6, 5.0, 20_005.0], [1e6, None, 20_005.0]),
        ([1e6, 5.0, 20_006.0], [1e6, None, None]),
        ([1e6, 1e6 + 20_000.0], [1e6, 1e6 + 20_000.0]),
        ([1e6, 1e6 + 20_001.0], [1e6, None]),
        ([1e6, *[1e6 + 20_001.0] * 5, 1e6 + 2_000.0], [1e6, None, None, None, None, None, 1e6 + 2_000.0]),
        ([1e6, 1e6, 1e6, 1e6 + 700], [1e6, 1e6, 1e6, 1e6 + 700]),
    ],
    ids=[
        "a sentinel above",
        "a sentinel above that stays",
        "a sentinel below",
        "a sentinel below that stays",
        "another value that stays",
        "a sentinel that the board may have reached",
        "a sentinel first",
        "zeros",
        "a zero",
        "a small value for a moment",
        "a driver that was loaded again",
        "a driver that was loaded again long ago",
        "a driver that was loaded again, read at zero",
        "a driver that was loaded again, read within a step of the counter",
        "the largest step after a fall",
        "too large a step after a fall",
        "the largest step",
        "too large a step",
        "too large a step that stays",
        "a counter that moves in steps",
    ],
)
def test_energy_that_no_board_can_have_used_is_discarded(energies: list[float], published: list[float | None]) -> None:
    device, totals, seen = Reads(), Totals(), []
    for second, device.energy in enumerate(energies):
        cycle = make_cycle(device, totals, UPTIME_S + second)
        collect_power(cycle)
        seen.append(next((s.value for s in cycle.samples if s.family.name == "gpu_energy_joules_total"), None))
        assert cycle.witness_missing is (seen[-1] is None)
        assert cycle.energy_j == seen[-1]
        assert cycle.remarks == [("nvmlDeviceGetTotalEnergyConsumption", "OUT_OF_RANGE")] * (seen[-1] is None)
    assert seen == published


def test_a_board_that_has_never_counted_energy_has_no_counter() -> None:
    """0 from the first reading on is ignored. It is not counted as a fault, and these moments remain known."""
    device, totals, seen = Reads(), Totals(), []
    for second, device.energy in enumerate([0.0, 0.0, 1e9, 1e9 + 700]):
        cycle = make_cycle(device, totals, UPTIME_S + second)
        collect_power(cycle)
        assert (cycle.remarks, cycle.witness_missing) == ([], False)
        seen.append(cycle.energy_j)
    assert seen == [None, None, 1e9, 1e9 + 700]


@given(
    st.floats(1.0, 1e10),
    st.lists(st.tuples(st.sampled_from(["count", "count", "reload", *map(str, range(4))]), st.floats(1.0, 9e3))),
)
def test_sentinels_between_true_values_are_charged_to_no_holder(start: float, steps: list[tuple[str, float]]) -> None:
    """The published counter grows by the energy that the board used, except energy that a driver reload hides."""
    nonsense = {"0": 0.0, "1": SENTINEL_J, "2": (2**64 - 1) / 1000.0, "3": 2**31 / 1000.0}
    device, totals = Reads(), Totals()
    counter, drawn, charged, before = start, 0.0, 0.0, None
    for second, (kind, joules) in enumerate([("count", 1.0), *steps]):
        counter = joules if kind == "reload" else counter + joules
        drawn += joules
        device.energy = nonsense.get(kind, counter)
        cycle = make_cycle(device, totals, UPTIME_S + second)
        collect_power(cycle)
        assert cycle.energy_j in (None, counter)
        assert cycle.energy_j is None or kind not in nonsense
        if cycle.energy_j is not None:
            charged += max(0.0, cycle.energy_j - before) if before is not None else 0.0
            before = cycle.energy_j
        assert charged <= drawn * (1 + 1e-9) + 1e-3


@pytest.mark.parametrize(
    ("memory", "sizes"),
    [
        (Memory(1000, 300, 600, 100), {"used": 300, "free": 600, "reserved": 100, "total": 1000}),
        (Memory(1000, 1001, 600, 1000), {"free": 600, "reserved": 1000, "total": 1000}),
        (Memory(1000, 300, 0xFFFFFFFF, None), {"used": 300, "total": 1000}),
        (Memory(2**64 - 1, 300, 600, None), {"used": 300, "free": 600}),
    ],
)
def test_a_part_of_memory_is_never_larger_than_the_whole(memory: Memory, sizes: dict[str, float]) -> None:
    device = Reads()
    device.memory = memory
    cycle = make_cycle(device)
    collect_memory(cycle)
    assert {s.family.name.split("_")[2]: s.value for s in cycle.samples} == sizes
    assert len(cycle.remarks) == sum(part is not None for part in memory) - len(sizes)


def test_a_power_of_zero_counts_as_a_sensor_without_an_answer() -> None:
    device = Reads()
    device.power = 0.0
    cycle = make_cycle(device)
    collect_power(cycle)
    assert (cycle.power_w, cycle.power_limit_w, cycle.witness_missing) == (None, None, True)
    assert cycle.remarks == [
        ("nvmlDeviceGetPowerUsage", "OUT_OF_RANGE"),
        ("nvmlDeviceGetEnforcedPowerLimit", "OUT_OF_RANGE"),
    ]


@pytest.mark.parametrize(("times", "is_shown"), [(2.0, True), (2.02, False)])
def test_a_value_above_twice_the_limit_of_its_board_is_discarded_and_counted(times: float, is_shown: bool) -> None:
    changes = {
        "nvmlDeviceGetClockInfo": int(times * 3105),
        "nvmlDeviceGetTemperatureV": int(times * 90),
        "nvmlDeviceGetMarginTemperature": "NVML_ERROR_NOT_SUPPORTED",
    }
    clock = ManualClock()
    backend = NvmlBackend(Boards(healthy(**changes)), clock)
    sampler = DeviceSampler(backend.find(0), registry.ALL, clock, RULES)
    shown = {sample.family.name for sample in sampler.sample().samples}
    assert ("gpu_sm_clock_hertz" in shown, "gpu_temperature_celsius" in shown) == (is_shown, is_shown)
    assert {"gpu_sm_clock_max_hertz", "gpu_temperature_limit_celsius"} <= shown
    refused = {call for (call, error), _ in sampler.error_counts.items() if error == OUT_OF_RANGE}
    assert refused == (set() if is_shown else {"nvmlDeviceGetClockInfo", "nvmlDeviceGetTemperatureV"})
