"""Every product and mode: every value that is published through NVML equals the scenario's value."""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import gpu_exporter.agent.devices.nvml.device as device_module
import gpu_exporter.agent.devices.nvml.instance as instance_module
import gpu_exporter.agent.devices.nvml.nvlink as nvlink_module
from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.devices.nvml import backend as backend_module
from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.agent.devices.simulated import ScenarioTime, SimulatedDevice
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.readings import DeviceSnapshot
from tests.testbed.nvml.feeder import PERIOD_S, NvmlTable, ScenarioFeeder
from tests.testbed.nvml.scenarios import GENERATIONS, build

Values = dict[tuple[str, ...], float]
Read = Callable[[str], tuple[Values, Values]]
# NVML's resolution: percent, milliwatts, whole degrees, KiB, nanoseconds. Values without an entry are exact.
STEPS = {
    "gpu_utilization_ratio": 0.005,
    "gpu_memory_busy_ratio": 0.005,
    "gpu_encoder_utilization_ratio": 0.005,
    "gpu_decoder_utilization_ratio": 0.005,
    "gpu_nvlink_rx_bytes_total": 1024.0 * 18,
    "gpu_nvlink_tx_bytes_total": 1024.0 * 18,
    "gpu_pcie_rx_bytes_total": 1.0,
    "gpu_pcie_tx_bytes_total": 1.0,
    "gpu_power_watts": 0.001,
    "gpu_sm_clock_hertz": 0.5e6,
    "gpu_energy_joules_total": 0.001,
}
COARSE = 0.01  # of sums and shares of these values


def values_of(snapshot: DeviceSnapshot) -> Values:
    """Every value that one cycle publishes, by (family, mig, labels...), and the activity that it books."""
    found = {(s.family.name, "", *s.labels): s.value for s in snapshot.samples}
    for instance in snapshot.instances:
        found.update({(s.family.name, instance.mig, *s.labels): s.value for s in instance.samples})
    for unit in (snapshot, *snapshot.instances):
        if unit.activity is not None:
            spans = [span for span in unit.activity.spans if span.end > span.start]
            mig = getattr(unit, "mig", "")
            found["covered", mig] = sum(span.end - span.start for span in spans)
            found["busy", mig] = sum((span.end - span.start) * span.ratio for span in spans)
    return found


@pytest.fixture
def read(nvml_directory: Path, nvml_table: NvmlTable, monkeypatch: pytest.MonkeyPatch) -> Iterator[Read]:
    """Three cycles of a generation, through NVML and straight from the scenario."""
    ctypes.CDLL(str(nvml_directory / "libnvidia-ml.so.1"), mode=ctypes.RTLD_GLOBAL)
    monkeypatch.setenv("GPU_EXPORTER_NVML_TABLE", str(nvml_table.path))
    with contextlib.ExitStack() as stack:

        def run(name: str) -> tuple[Values, Values]:
            clock, scenario, rules = ManualClock(), build(name), activity_rules(Settings())
            feeder = ScenarioFeeder(scenario, nvml_table, clock)
            truth = SimulatedDevice(ScenarioTime(scenario, clock, PERIOD_S), scenario.gpus[0])
            backend = NvmlBackend(clock=clock)
            stack.callback(backend.close)
            clock.advance(40.0)
            feeder.feed()
            backend.open()
            samplers = [DeviceSampler(d, registry.ALL, clock, rules) for d in (backend.find(0), truth)]
            for _ in range(3):
                clock.advance(1.0)
                feeder.feed()
                snapshots = [sampler.sample() for sampler in samplers]
            assert all(not outcome.error for snapshot in snapshots for outcome in snapshot.outcomes)
            assert [s.activity and s.activity.witnesses for s in snapshots[:1]] == [
                s.activity and s.activity.witnesses for s in snapshots[1:]
            ]
            backend.close()
            return values_of(snapshots[0]), values_of(snapshots[1])

        yield run


def differences(values: Values, truth: Values) -> list[str]:
    """The differences between the two, as text."""
    found = [f"{key} is missing" for key in truth.keys() - values.keys()]
    found += [f"{key} is invented" for key in values.keys() - truth.keys()]
    for key in values.keys() & truth.keys():
        step = STEPS.get(key[0], COARSE if "mig_power" in key[0] or "energy" in key[0] else 1e-6)
        if abs(values[key] - truth[key]) > step + 1e-9 * abs(truth[key]):
            found.append(f"{key}: {values[key]} is not {truth[key]}")
    return found


@pytest.mark.parametrize("name", GENERATIONS)
def test_published_values_equal_the_scenario(read: Read, name: str) -> None:
    values, truth = read(name)
    assert differences(values, truth) == []


# Values that only one generation reports, and values that it does not report.
EXPECTED = {
    "t4": ({"gpu_retired_pages", "gpu_temperature_limit_celsius"}, {"gpu_memory_temperature_celsius", "gpu_nvlink_rx_bytes_total", "gpu_remapped_rows", "gpu_sm_active_ratio"}),
    "v100": ({"gpu_retired_pages", "gpu_memory_temperature_celsius"}, {"gpu_remapped_rows", "gpu_mig_info"}),
    "a100": ({"gpu_remapped_rows", "gpu_utilization_ratio", "gpu_nvlink_rx_bytes_total"}, {"gpu_sm_active_ratio", "gpu_temperature_margin_celsius"}),
    "a100-mig": ({"gpu_mig_info", "gpu_mig_memory_used_bytes", "gpu_mig_power_watts"}, {"gpu_utilization_ratio", "gpu_mig_graphics_active_ratio", "gpu_remapped_rows"}),
    "a30-mig": ({"gpu_mig_info", "gpu_mig_memory_used_bytes", "gpu_mig_power_watts"}, {"gpu_utilization_ratio", "gpu_mig_graphics_active_ratio"}),
    "h100": ({"gpu_sm_active_ratio", "gpu_temperature_margin_celsius"}, {"gpu_temperature_limit_celsius", "gpu_retired_pages"}),
    "h100-mig": ({"gpu_mig_graphics_active_ratio", "gpu_mig_sm_active_ratio"}, {"gpu_utilization_ratio"}),
    "b200": ({"gpu_nvlink_rx_bytes_total", "gpu_sm_active_ratio"}, {"gpu_retired_pages"}),
    "gh200": ({"gpu_memory_used_bytes", "gpu_sm_active_ratio"}, {"gpu_retired_pages"}),
    "gb200": ({"gpu_nvlink_rx_bytes_total", "gpu_sm_active_ratio"}, {"gpu_retired_pages", "gpu_pcie_rx_bytes_total"}),
    "b300": ({"gpu_nvlink_rx_bytes_total", "gpu_pcie_rx_bytes_total"}, {"gpu_retired_pages"}),
    "gb300": ({"gpu_nvlink_rx_bytes_total", "gpu_sm_active_ratio"}, {"gpu_retired_pages", "gpu_pcie_rx_bytes_total"}),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_a_generation_reports_exactly_the_values_it_supports(read: Read, name: str) -> None:
    families = {key[0] for key in read(name)[0]}
    present, absent = EXPECTED[name]
    assert present <= families
    assert not absent & families


def test_activity_is_reported_per_mig_instance(read: Read) -> None:
    values, _ = read("h100-mig")
    active = {key[1]: value for key, value in values.items() if key[0] == "gpu_mig_graphics_active_ratio"}
    assert active == pytest.approx({"1/0": 0.5, "9/0": 0.75, "5/0": 1.0, "5/1": 0.0})
    supported = {key[1]: v for key, v in read("a100-mig")[0].items() if key[0] == "gpu_mig_activity_supported"}
    assert supported == {"1/0": 0.0, "2/0": 0.0}


MODULES = (device_module, instance_module, nvlink_module)
SOURCES = {module: Path(str(module.__file__)).read_text("utf-8") for module in MODULES}
CONVERSIONS = [
    (module, match.span())
    for module, source in SOURCES.items()
    for match in re.finditer(r"[*/] (?:100\.0|1e3|1e6|1e9|KIB|MIB)\b", source)
]


def name_conversion(place: tuple[types.ModuleType, tuple[int, int]]) -> str:
    module, (start, end) = place
    source = SOURCES[module]
    return f"{Path(str(module.__file__)).name} line {source.count(chr(10), 0, start) + 1}: {source[start:end]}"


def test_the_list_of_conversions_is_not_empty() -> None:
    assert len(CONVERSIONS) >= 18


@pytest.mark.parametrize("place", CONVERSIONS, ids=name_conversion)
def test_a_wrong_conversion_changes_a_published_value(
    read: Read, place: tuple[types.ModuleType, tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Doubles each factor in turn: the values of at least one generation must then be wrong."""
    module, (_, end) = place
    mutant = types.ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", mutant)  # dataclasses look for their module there
    text = f"{SOURCES[module][:end]} * 2{SOURCES[module][end:]}"
    exec(compile(text, str(module.__file__), "exec"), mutant.__dict__)
    if module is device_module:
        monkeypatch.setattr(backend_module, "NvmlDevice", mutant.NvmlDevice)
    elif module is nvlink_module:
        monkeypatch.setattr(device_module, "NvlinkCounters", mutant.NvlinkCounters)
    else:
        for name in ("NvmlInstance", "read_gpm", "read_memory"):
            monkeypatch.setattr(device_module, name, getattr(mutant, name))
    seen: list[str] = []
    for name in ("h100-mig", "h100", "b200", "a100"):
        values, truth = read(name)
        seen += differences(values, truth)
    assert seen
