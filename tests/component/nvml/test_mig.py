"""MIG instances: found, changed at run time, with their own slices."""

from __future__ import annotations

import pytest

from gpu_exporter.agent.devices.errors import (
    NotSupported,
)
from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.common.clock import ManualClock
from tests.component.nvml.nvml_bench import MakeBackend, feed, first_device
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder


def test_mig_instances_are_found_if_their_indexes_have_gaps(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    feed(nvml_table, mig=[{"profile": "3g.40gb"}, {"profile": "1g.10gb"}, {"profile": "2g.20gb"}])
    with nvml_table.writing(0) as out:
        out.instances[1].uuid = b""
    device = first_device(backend)
    assert device.identity.mig_mode == "enabled"
    instances = device.list_instances()
    assert [i.identity.profile for i in instances] == ["3g.40gb", "2g.20gb"]
    assert [i.identity.mig for i in instances] == ["1/0", "3/0"]
    assert [i.identity.memory_slices for i in instances] == [4, 2]
    assert instances[1].read_memory().total == 20 * 1024**3
    with pytest.raises(NotSupported):
        device.read_utilization()


def test_compute_instances_have_their_own_slices(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    """NVML reports both numbers for every instance: the slices of the GPU instance and of the compute instance."""
    profiles = ("1c.3g.40gb", "2c.3g.40gb", "4g.40gb")
    places = ((1, 0), (1, 1), (2, 0))
    mig = [{"profile": name, "gi": gi, "ci": ci} for name, (gi, ci) in zip(profiles, places, strict=True)]
    feed(nvml_table, mig=mig)
    device = first_device(backend)
    assert [i.identity.sm_slices for i in device.list_instances()] == [1.0, 2.0, 4.0]
    with nvml_table.writing(0) as out:
        out.instances[1].compute_slices = 0  # a driver that does not report one of them
    assert [i.identity.sm_slices for i in device.list_instances()] == [1.5, 1.5, 4.0]


def test_mig_mode_and_instances_change_at_run_time(make_backend: MakeBackend, nvml_table: NvmlTable) -> None:
    clock = ManualClock()
    half, full = ({"kind": "constant", "value": value} for value in (0.5, 1.0))
    scenario = {
        "model": "H100",
        "mig_from": 10,
        "mig_to": 30,
        "mig": [
            {"profile": "1g.10gb", "gi": 7, "to": 20, "load": half},
            {"profile": "2g.20gb", "gi": 7, "from": 20, "load": full},
            {"profile": "1c.3g.40gb", "gi": 1, "ci": 0, "load": half},
            {"profile": "2c.3g.40gb", "gi": 1, "ci": 1, "load": full},
        ],
    }
    feeder = ScenarioFeeder(parse_scenario({"gpus": [scenario]}), nvml_table, clock)
    device = first_device(make_backend(clock))

    def step(seconds: float) -> list[tuple[str, str, float | None]]:
        clock.advance(seconds)
        feeder.feed()
        read = []
        for instance in device.list_instances():
            gpm = instance.read_gpm()
            read.append((instance.identity.mig, instance.identity.profile, gpm and gpm.graphics))
        return read

    assert step(5.0) == []
    assert device.identity.mig_mode == "disabled"
    assert device.read_utilization().gpu == 0.0
    assert step(6.0) == [("7/0", "1g.10gb", None), ("1/0", "1c.3g.40gb", None), ("1/1", "2c.3g.40gb", None)]
    assert device.identity.mig_mode == "enabled"
    with pytest.raises(NotSupported):
        device.read_utilization()
    # Two compute instances of one GPU instance are distinguished.
    assert step(1.0) == [("7/0", "1g.10gb", 0.5), ("1/0", "1c.3g.40gb", 0.5), ("1/1", "2c.3g.40gb", 1.0)]
    # A new instance with the same id is not compared with the earlier instance.
    assert step(9.0) == [("7/0", "2g.20gb", None), ("1/0", "1c.3g.40gb", 0.5), ("1/1", "2c.3g.40gb", 1.0)]
    assert step(1.0)[0] == ("7/0", "2g.20gb", 1.0)
    assert step(9.0) == []
    assert device.identity.mig_mode == "disabled"
    assert device.read_utilization().gpu == 0.0  # refused while MIG mode was on, and answered at once afterwards


def test_mig_instances_on_ampere_have_no_activity(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    ScenarioFeeder(parse_scenario({"gpus": [{"model": "A100", "mig": [{"profile": "1g.10gb"}]}]}), nvml_table)
    (instance,) = first_device(backend).list_instances()
    with pytest.raises(NotSupported):
        instance.read_gpm()
