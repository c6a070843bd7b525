"""pynvml and the NVML backend on the fake C library: every value equals the scenario's value, in base units."""

from __future__ import annotations

import pytest

from gpu_exporter.agent.devices.errors import (
    NotSupported,
)
from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.agent.devices.protocol import ENGINES, XidEvent
from gpu_exporter.agent.devices.scenario import parse_scenario
from tests.component.nvml.nvml_bench import feed, first_device
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.nvml.layout import UNSET


def test_every_value_is_converted_to_base_units(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    """The numbers are chosen so that a wrong unit gives another result."""
    feed(nvml_table)
    with nvml_table.writing(0) as out:
        out.utilization, out.memory_utilization = 37, 23
        out.encoder, out.decoder, out.jpeg, out.ofa = 11, 13, 17, 19
        out.power_mw, out.power_limit_mw, out.energy_mj = 345_678, 700_000, 123_456_789
        out.default_limit_mw = 690_000
        out.temperature, out.margin, out.performance_state = 61, -3, 2
        out.thresholds[0], out.thresholds[1], out.thresholds[2], out.thresholds[3] = 95, 92, 105, 0
        out.sm_clock_mhz, out.memory_clock_mhz, out.sm_clock_max_mhz = 1755, 2619, 1980
        out.memory_total, out.memory_used, out.memory_free, out.memory_reserved = 1000, 300, 600, 100
        out.reasons, out.reasons_supported = 0x44, 0x4 | 0x40 | 0x80
        out.ecc[0], out.ecc[1] = 5, 7
        out.remapped[0], out.remapped[1], out.remapped[2], out.remapped[3] = 1, 2, 1, 0
        out.field_count = 0
        for field, value in {
            74: 1_500_000_000,
            75: 2_000_000_000,
            271: 250_000_000,
            82: 71,
            197: 11_000,
            198: 22_000,
        }.items():
            nvml_table.set_field(0, field, value)
        nvml_table.set_field(0, 94, 9, kind=1)
        nvml_table.set_field(0, 230, 4, kind=1)
        nvml_table.set_field(0, 138, 3, scope=0xFFFFFFFF)
        nvml_table.set_field(0, 139, 5, scope=0xFFFFFFFF)
    device = first_device(backend)
    assert device.read_utilization() == (0.37, 0.23)
    assert [device.read_engine(engine) for engine in ENGINES] == [0.11, 0.13, 0.17, 0.19]
    assert device.read_power() == 345.678
    assert device.read_power_limit() == 700.0
    assert device.read_default_power_limit() == 690.0
    assert device.read_energy() == 123_456.789
    assert (device.read_temperature(), device.read_memory_temperature()) == (61.0, 71.0)
    assert device.read_temperature_margin() == -3.0
    assert device.read_temperature_limits() == {"shutdown": 95.0, "slowdown": 92.0, "memory_max": 105.0}
    assert device.read_performance_state() == 2
    assert device.read_clocks() == (1.755e9, 2.619e9, 1.98e9)
    assert device.read_memory() == (1000, 300, 600, 100)
    assert device.read_throttle_seconds() == {"power_cap": 1.5, "thermal": 2.0, "hw_power_brake": 0.25}
    assert device.read_throttle_active() == {"power_cap": True, "hw_thermal": True, "hw_power_brake": False}
    assert device.read_pcie() == ((22_000.0, 11_000.0), 9)
    assert device.read_nvlink() == (5 * 1024.0, 3 * 1024.0)
    assert device.read_ecc_errors() == {"corrected": 5, "uncorrected": 7}
    assert device.read_row_remaps() == (1, 2, True, False)
    assert device.read_recovery_action() == 4
    assert device.read_persistence_mode() is True


def test_a_number_that_is_not_set_is_unsupported_and_all_ones_are_an_answer(
    backend: NvmlBackend, nvml_table: NvmlTable
) -> None:
    """The fake library must be able to give the number that drivers answer for "no value"."""
    feed(nvml_table)
    device = first_device(backend)
    with nvml_table.writing(0) as out:
        out.power_limit_mw, out.default_limit_mw = 0xFFFFFFFF, UNSET
    assert device.read_power_limit() == 4_294_967.295
    with pytest.raises(NotSupported):
        device.read_default_power_limit()


def test_an_invalid_name_affects_only_the_name(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    feed(nvml_table)
    with nvml_table.writing(0) as out:
        out.name = b"NVIDIA \xff\xfe"
    device = first_device(backend)
    assert device.identity.uuid.startswith("GPU-") and device.identity.name == ""
    assert device.read_power() > 0.0
    assert ("nvmlDeviceGetName", "OUT_OF_RANGE") in {(error.call, error.error) for error in device.take_errors()}


def test_throttle_reasons_with_all_bits_set_are_not_throttling(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    feed(nvml_table)
    device = first_device(backend)
    for reasons in (2**64 - 1, 2**32 - 1):
        with nvml_table.writing(0) as out:
            out.reasons, out.reasons_supported = reasons, 2**64 - 1
        with pytest.raises(NotSupported):
            device.read_throttle_active()
    with nvml_table.writing(0) as out:
        out.reasons = 0x4
    assert [reason for reason, is_on in device.read_throttle_active().items() if is_on] == ["power_cap"]


def test_xids_are_events_of_their_gpu(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}] * 2}), nvml_table)
    backend.open()
    devices = [backend.find(0), backend.find(1)]
    watch = backend.watch_events(devices)
    assert watch.covered == {device.identity.uuid for device in devices}
    assert watch.wait(0.01) is None
    nvml_table.push_event(1, 79)
    nvml_table.push_event(0, 31)
    assert watch.wait(20.0) == XidEvent(devices[1].identity.uuid, 79)
    assert watch.wait(20.0) == XidEvent(devices[0].identity.uuid, 31)
    assert watch.wait(0.01) is None
    watch.close()


def test_a_gpu_without_event_support_does_not_block_the_events_of_others(
    backend: NvmlBackend, nvml_table: NvmlTable
) -> None:
    ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}] * 2}), nvml_table)
    nvml_table.set_call(0, "nvmlDeviceRegisterEvents", "NVML_ERROR_NOT_SUPPORTED")
    backend.open()
    devices = [backend.find(0), backend.find(1)]
    watch = backend.watch_events(devices)
    assert watch.covered == {devices[1].identity.uuid}
    watch.close()
    nvml_table.set_call(1, "nvmlDeviceRegisterEvents", "NVML_ERROR_NOT_SUPPORTED")
    with pytest.raises(NotSupported):
        backend.watch_events(devices)


def test_a_driver_without_a_ring_for_an_engine_has_no_samples_for_it(
    backend: NvmlBackend, nvml_table: NvmlTable
) -> None:
    feed(nvml_table)
    nvml_table.table.devices[0].engine_rings = 1
    device = first_device(backend)
    assert device.read_engine("jpeg") == 0.0
    for _ in range(2):  # the second time it is not even asked
        with pytest.raises(NotSupported, match="NVML_ERROR_INVALID_ARGUMENT"):
            device.read_engine_samples("jpeg", 0.0)
    assert list(device.read_engine_samples("encoder", 0.0)) == []  # the ring has no entry yet


def test_the_sample_ring_is_read_from_the_last_position(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    feed(nvml_table)
    with nvml_table.writing(0) as out:
        out.sample_count = 0
        for i in range(5):
            nvml_table.push_sample(0, 1_700_000_000.0 + i / 4, i * 20)
    device = first_device(backend)
    assert [sample.ratio for sample in device.read_utilization_samples(0.0)] == [0.0, 0.2, 0.4, 0.6, 0.8]
    assert [sample.wall for sample in device.read_utilization_samples(1_700_000_000.5)] == [
        1_700_000_000.75,
        1_700_000_001.0,
    ]
    assert device.read_utilization_samples(1_700_000_001.0) == []
