"""pynvml and the NVML backend on the fake C library: every published value equals the scenario's value."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpu_exporter.clock import SYSTEM_CLOCK, ManualClock
from gpu_exporter.devices.errors import (
    DeviceError,
    DeviceLost,
    DriverChanged,
    DriverUnavailable,
    NoPermission,
    NotSupported,
)
from gpu_exporter.devices.nvml.backend import NvmlBackend
from gpu_exporter.devices.nvml.device import NvmlDevice
from gpu_exporter.devices.nvml.library import SYSTEM, Handle, LiveLibrary
from gpu_exporter.devices.nvml.support import RETRY_S
from gpu_exporter.devices.protocol import ENGINES, Gpm, Traffic, XidEvent
from gpu_exporter.devices.scenario import load_scenario, parse_scenario
from gpu_exporter.model.readings import GpuProcess, ProcessList
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import GPU_EXPORTER, run_exporter, wait_for
from tests.testbed.sysfs import add_function

MakeBackend = Callable[..., NvmlBackend]
DEMO = Path(__file__).resolve().parents[2] / "exporter" / "gpu_exporter" / "demo.yaml"


@pytest.fixture
def make_backend(nvml_directory: Path, nvml_table: NvmlTable, monkeypatch: pytest.MonkeyPatch):
    """Makes backends on the fake library in this process. The loader finds the library by name once it is loaded."""
    ctypes.CDLL(str(nvml_directory / "libnvidia-ml.so.1"), mode=ctypes.RTLD_GLOBAL)
    monkeypatch.setenv("GPU_EXPORTER_NVML_TABLE", str(nvml_table.path))
    with contextlib.ExitStack() as stack:

        def make(clock: ManualClock | None = None, library: LiveLibrary | None = None) -> NvmlBackend:
            backend = NvmlBackend(library, clock or SYSTEM_CLOCK)
            stack.callback(backend.close)
            return backend

        yield make


@pytest.fixture
def backend(make_backend: MakeBackend) -> NvmlBackend:
    return make_backend()


def first_device(backend: NvmlBackend) -> NvmlDevice:
    backend.open()
    device = backend.find(0)
    assert isinstance(device, NvmlDevice)
    return device


def feed(table: NvmlTable, **gpu: object) -> ScenarioFeeder:
    return ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100", **gpu}]}), table)


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


def test_a_failed_field_is_counted_and_affects_only_itself(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    feed(nvml_table)
    device = first_device(backend)
    nvml_table.set_field(0, 75, 0, error="NVML_ERROR_UNKNOWN")
    assert "thermal" not in device.read_throttle_seconds()
    assert "power_cap" in device.read_throttle_seconds()
    assert {(error.call, error.error) for error in device.take_errors()} == {
        ("nvmlDeviceGetFieldValues", "NVML_ERROR_UNKNOWN")
    }
    assert device.take_errors() == []
    nvml_table.set_field(0, 75, 0, error="NVML_ERROR_GPU_IS_LOST")
    assert "thermal" not in device.read_throttle_seconds()  # the other fields are answered, so the GPU is not lost
    assert [error.error for error in device.take_errors()] == ["NVML_ERROR_GPU_IS_LOST"]


def test_a_refused_call_is_remembered_and_retried_later(
    nvml_directory: Path, nvml_table: NvmlTable, make_backend: MakeBackend
) -> None:
    clock = ManualClock()
    feed(nvml_table)
    asked: list[str] = []

    class Listening(LiveLibrary):
        def ask(self, call: str, handle: Handle = SYSTEM, *arguments: object) -> object:
            asked.append(call)
            return super().ask(call, handle, *arguments)

    device = first_device(make_backend(clock, Listening()))
    nvml_table.set_call(0, "nvmlDeviceGetPowerUsage", "NVML_ERROR_NOT_SUPPORTED")
    for _ in range(3):
        with pytest.raises(NotSupported):
            device.read_power()
    assert asked.count("nvmlDeviceGetPowerUsage") == 1
    nvml_table.set_call(0, "nvmlDeviceGetPowerUsage")
    clock.advance(RETRY_S + 1)
    assert device.read_power() > 0
    for _ in range(3):
        device.read_clocks()
    assert asked.count("nvmlDeviceGetMaxClockInfo") == 1  # a static fact


def test_a_missing_permission_is_reported_once_with_the_remedy(
    make_backend: MakeBackend, nvml_table: NvmlTable, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    feed(nvml_table)
    device = first_device(make_backend(clock))
    nvml_table.set_call(0, "nvmlDeviceGetComputeRunningProcesses", "NVML_ERROR_NO_PERMISSION")
    with pytest.raises(NoPermission):
        device.read_processes()
    for _ in range(3):
        with pytest.raises(NotSupported):
            device.read_processes()
    clock.advance(RETRY_S + 1)
    with pytest.raises(NotSupported):  # refused again, which is not reported again
        device.read_processes()
    assert [record.getMessage() for record in caplog.records] == [
        "gpu 0: nvmlDeviceGetComputeRunningProcesses_v3 answered NVML_ERROR_NO_PERMISSION; to get this value, "
        "run as root with hostPID; on MIG also set NVIDIA_MIG_MONITOR_DEVICES=all"
    ]


MIB = 1024**2


def listed(pid: int, mig: str = "") -> GpuProcess:
    """The entry that `list_pids` makes."""
    return GpuProcess(pid, mig, pid * MIB)


def list_pids(table: NvmlTable, *processes: tuple[int, int, str]) -> None:
    """The first GPU's processes: (pid, kind, MIG ids or ""), each with as many MiB of memory as its pid."""
    with table.writing(0) as out:
        for position, (pid, kind, mig) in enumerate(processes):
            entry = out.processes[position]
            entry.pid, entry.graphics, entry.memory = pid, kind, pid * MIB
            ids = tuple(map(int, mig.split("/"))) if mig else (0xFFFFFFFF, 0xFFFFFFFF)
            entry.gpu_instance, entry.compute_instance = ids
        out.process_count = len(processes)


@pytest.mark.parametrize("size", [24, 32], ids=["nvmlProcessInfo_v2_t", "as-some-535-drivers"])
def test_processes_are_listed_with_their_pids(backend: NvmlBackend, nvml_table: NvmlTable, size: int) -> None:
    feed(nvml_table)
    nvml_table.table.process_bytes = size
    device = first_device(backend)
    assert device.read_processes() == (0, 0, ())
    list_pids(nvml_table, (4711, 0, ""), (4712, 1, ""), (4711, 1, ""), (4713, 0, ""))
    assert device.read_processes() == (2, 2, (listed(4711), listed(4713), listed(4712)))
    many = range(6000, 6100)  # more than the first buffer holds, so the driver refuses once
    list_pids(nvml_table, *((pid, 0, "") for pid in many))
    assert device.read_processes() == (100, 0, tuple(map(listed, many)))


def test_processes_of_mig_instances_are_read_from_the_board_or_each_instance(
    make_backend: MakeBackend, nvml_table: NvmlTable
) -> None:
    clock = ManualClock()
    feed(nvml_table, mig=[{"profile": "1g.10gb", "gi": 7}, {"profile": "2g.20gb", "gi": 3, "ci": 1}])
    list_pids(nvml_table, (4711, 0, "7/0"), (4712, 0, "3/1"), (4712, 1, "3/1"))
    device = first_device(make_backend(clock))
    found = (listed(4711, "7/0"), listed(4712, "3/1"))
    assert device.read_processes() == (2, 1, found)
    with nvml_table.writing(0) as out:
        out.processes_by_instance = 1  # as without the permission to list the board's processes
    assert device.read_processes() == (2, 1, found)
    for handle in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
        nvml_table.set_call(0, handle, "NVML_ERROR_NO_PERMISSION")
    with pytest.raises((NoPermission, NotSupported)):
        device.read_processes()
    with nvml_table.writing(0) as out:
        out.instance_count = 0  # there is no instance to ask
    with pytest.raises(NotSupported):
        device.read_processes()


def test_the_instances_are_asked_if_the_board_names_no_instance(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    feed(nvml_table, mig=[{"profile": "1g.10gb", "gi": 7}])
    list_pids(nvml_table, (4711, 0, ""))
    device = first_device(backend)
    assert device.read_processes() == (1, 0, (listed(4711),))  # no call reports the instance of the process
    with nvml_table.writing(0) as out:
        out.processes_by_instance = 2
    list_pids(nvml_table, (4711, 0, "7/0"))
    assert device.read_processes() == (1, 0, (listed(4711, "7/0"),))


def test_no_pid_is_printed() -> None:
    assert "4711" not in repr(ProcessList(1.0, (GpuProcess(4711),)))


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


def test_a_field_that_the_board_does_not_support_is_not_a_failure(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    """Some drivers answer INVALID_ARGUMENT where others answer NOT_SUPPORTED."""
    feed(nvml_table)
    device = first_device(backend)
    nvml_table.set_field(0, 82, 0, error="NVML_ERROR_INVALID_ARGUMENT")
    with pytest.raises(NotSupported):
        device.read_memory_temperature()
    assert device.take_errors() == []
    nvml_table.set_field(0, 82, 50)
    with pytest.raises(NotSupported):
        device.read_memory_temperature()  # the backend does not retry at once


def test_a_failure_reports_whether_the_call_was_answered_before(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    feed(nvml_table)
    device = first_device(backend)
    nvml_table.set_call(0, "nvmlDeviceGetOfaUtilization", "NVML_ERROR_UNKNOWN")
    with pytest.raises(DeviceError) as never:
        device.read_engine("ofa")
    nvml_table.set_call(0, "nvmlDeviceGetOfaUtilization")
    device.read_engine("ofa")
    nvml_table.set_call(0, "nvmlDeviceGetOfaUtilization", "NVML_ERROR_UNKNOWN")
    with pytest.raises(DeviceError) as lately:
        device.read_engine("ofa")
    assert (never.value.once_answered, lately.value.once_answered) == (False, True)


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


NVLINK_FIELDS = {
    "h100": [(138, 0xFFFFFFFF), (139, 0xFFFFFFFF)],
    "b200": [(f, i) for f in (202, 204) for i in range(18)],
}


class Nvlink:
    """A board whose links have equal counters, read every second."""

    def __init__(self, backend: NvmlBackend, table: NvmlTable, clock: ManualClock, model: str) -> None:
        self._table, self._clock = table, clock
        self.fields = dict.fromkeys(NVLINK_FIELDS[model], 1000)
        ScenarioFeeder(parse_scenario({"gpus": [{"model": model.upper()}]}), table)
        self.device = first_device(backend)
        self.missing: dict[tuple[int, int], str] = {}

    def step(self, seconds: float = 1.0, moved: int = 1) -> Traffic | None:
        """Advance the time. Returns the traffic, None while the witness is missing."""
        self._clock.advance(seconds)
        for (field, scope), value in self.fields.items():
            self.fields[field, scope] = value + moved
            self._table.set_field(0, field, value + moved, scope=scope, error=self.missing.get((field, scope), ""))
        try:
            return self.device.read_nvlink()
        except NotSupported:
            raise
        except DeviceError as exc:
            assert exc.once_answered  # a failure after an answer makes the moment unknown
            return None

    def errors(self) -> int:
        return len(self.device.take_errors())


@pytest.mark.parametrize("error", ["NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_UNKNOWN", "NVML_ERROR_INVALID_ARGUMENT"])
def test_a_silent_link_makes_the_moment_unknown_and_the_sum_never_falls(
    make_backend: MakeBackend, nvml_table: NvmlTable, error: str
) -> None:
    clock = ManualClock()
    links = Nvlink(make_backend(clock), nvml_table, clock, "b200")
    assert links.step() == (18 * 1001.0, 18 * 1001.0)
    links.missing = {(204, 5): error}
    assert [links.step() for _ in range(5)] == [None] * 5
    links.missing = {}
    assert links.step() == (18 * 1007.0, 18 * 1007.0)
    assert links.step() == (18 * 1008.0, 18 * 1008.0)


@pytest.mark.parametrize("error", ["NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_UNKNOWN"])
def test_after_a_minute_the_sum_continues_without_the_silent_link(
    make_backend: MakeBackend, nvml_table: NvmlTable, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes of the silent link remain in the sum. After a retry, its new bytes are added."""
    clock = ManualClock()
    links = Nvlink(make_backend(clock), nvml_table, clock, "b200")
    before = links.step()
    assert before is not None
    links.missing = {(204, 5): error}
    assert [links.step() for _ in range(60)] == [None] * 60
    traffic = links.step()
    assert traffic is not None
    assert traffic == (17 * 1062.0 + 1001.0, 18 * 1062.0)
    links.errors()
    last = traffic
    for _ in range(int(RETRY_S) + 100):  # longer than until the next retry
        traffic = links.step()
        assert traffic is not None
        assert (traffic.rx - last.rx, traffic.tx - last.tx) == (17.0, 18.0)
        last = traffic
    assert links.errors() <= 1  # the next retry
    assert [r.getMessage() for r in caplog.records if "NVLink" in r.getMessage()] == [
        "gpu 0: NVLink 5 has not answered field 204 for 60 s; the sum keeps its last count, the other links continue"
    ]
    links.missing = {}
    rises = []
    for _ in range(int(RETRY_S) + 100):
        traffic = links.step()
        assert traffic is not None
        rises.append(traffic.rx - last.rx)
        last = traffic
    assert min(rises) == 17.0
    assert rises[-1] == 18.0
    assert last.rx == pytest.approx(18 * links.fields[204, 5])


def test_a_lost_link_is_counted_once(make_backend: MakeBackend, nvml_table: NvmlTable) -> None:
    clock = ManualClock()
    links = Nvlink(make_backend(clock), nvml_table, clock, "b200")
    links.step()
    links.missing = {(202, 0): "NVML_ERROR_NOT_SUPPORTED"}
    for _ in range(60):
        links.step()
        assert links.errors() == 0  # the caller counts the failure of the whole call
    links.step()
    assert links.errors() == 1
    links.step()
    assert links.errors() == 0


def test_a_link_that_is_reset_or_appears_late_makes_no_jump_in_the_sum(
    make_backend: MakeBackend, nvml_table: NvmlTable
) -> None:
    clock = ManualClock()
    links = Nvlink(make_backend(clock), nvml_table, clock, "b200")
    links.fields[204, 9] = 5000
    late = links.fields.pop((204, 17))
    nvml_table.set_field(0, 204, 0, scope=17, error="NVML_ERROR_NOT_SUPPORTED")
    first = links.step()
    assert first is not None
    links.fields[204, 9] = 0
    assert links.step() is None  # a fall can be a wrong value: the next reading decides
    second = links.step()
    assert second == (first.rx + 33.0, first.tx + 36.0)
    clock.advance(RETRY_S + 1)
    links.fields[204, 17] = late + 10**9
    third = links.step()
    assert third == (second.rx + 17.0, second.tx + 18.0)
    assert links.step() == (third.rx + 18.0, third.tx + 18.0)


def test_a_silent_sum_over_all_links_is_missing_and_not_replaced(
    make_backend: MakeBackend, nvml_table: NvmlTable
) -> None:
    clock = ManualClock()
    links = Nvlink(make_backend(clock), nvml_table, clock, "h100")
    assert links.step() == (1001 * 1024.0, 1001 * 1024.0)
    for field, link in NVLINK_FIELDS["b200"]:
        nvml_table.set_field(0, field, 7, scope=link)
    links.missing = {(138, 0xFFFFFFFF): "NVML_ERROR_NOT_SUPPORTED", (139, 0xFFFFFFFF): "NVML_ERROR_NOT_SUPPORTED"}
    assert [links.step() for _ in range(60)] == [None] * 60
    with pytest.raises(NotSupported):
        links.step()
    links.missing = {}
    clock.advance(RETRY_S)
    assert links.step() == (1063 * 1024.0, 1063 * 1024.0)


def test_xids_are_events_of_their_gpu(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}] * 2}), nvml_table)
    backend.open()
    devices = [backend.find(0), backend.find(1)]
    watch = backend.watch_events(devices)
    assert watch.covered == {device.identity.uuid for device in devices}
    assert watch.wait(0.01) is None
    nvml_table.push_event(1, 79)
    nvml_table.push_event(0, 31)
    assert watch.wait(1.0) == XidEvent(devices[1].identity.uuid, 79)
    assert watch.wait(1.0) == XidEvent(devices[0].identity.uuid, 31)
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


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("NVML_ERROR_NOT_SUPPORTED", NotSupported),
        ("NVML_ERROR_GPU_IS_LOST", DeviceLost),
        ("NVML_ERROR_RESET_REQUIRED", DeviceLost),
        ("NVML_ERROR_UNKNOWN", DeviceError),
        ("NVML_ERROR_NO_PERMISSION", NoPermission),
        ("NVML_ERROR_LIB_RM_VERSION_MISMATCH", DriverChanged),
    ],
)
def test_errors_are_counted_by_name(
    backend: NvmlBackend, nvml_table: NvmlTable, error: str, kind: type[DeviceError]
) -> None:
    feed(nvml_table)
    device = first_device(backend)
    nvml_table.set_call(0, "nvmlDeviceGetPowerUsage", error)
    with pytest.raises(kind) as caught:
        device.read_power()
    assert type(caught.value) is kind
    assert (caught.value.call, caught.value.error) == ("nvmlDeviceGetPowerUsage", error)
    assert device.read_temperature() > 0


def test_a_lost_handle_affects_only_its_gpu(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}] * 3}), nvml_table)
    nvml_table.set_call(1, "nvmlDeviceGetHandleByIndex", "NVML_ERROR_GPU_IS_LOST")
    backend.open()
    assert backend.count() == 3
    assert [backend.find(i).identity.index for i in (0, 2)] == [0, 2]
    with pytest.raises(DeviceLost, match="nvmlDeviceGetHandleByIndex answered NVML_ERROR_GPU_IS_LOST"):
        backend.find(1)


def test_an_error_names_a_driver_that_is_not_loaded(backend: NvmlBackend, nvml_table: NvmlTable) -> None:
    nvml_table.table.init_rc = 9
    with pytest.raises(
        DriverUnavailable, match=r"the NVIDIA kernel driver is not loaded \(NVML_ERROR_DRIVER_NOT_LOADED\)"
    ):
        backend.open()
    nvml_table.table.init_rc = 18
    with pytest.raises(DriverUnavailable, match="the driver library does not match the kernel module"):
        backend.open()


def once(environment: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    quiet = ("--state.directory=", "--no-attribution.slurm", "--no-attribution.kubelet")
    return run_exporter("--once", *quiet, *flags, environment=environment)


def test_once_publishes_the_scenarios_values(nvml_environment: dict[str, str], nvml_table: NvmlTable) -> None:
    scenario = load_scenario(DEMO)
    feeder = ScenarioFeeder(scenario, nvml_table)
    feeder.start()
    try:
        wait_for(lambda: nvml_table.table.devices[0].sample_count >= 2, "the ring to fill")
        done = once(nvml_environment)
    finally:
        feeder.stop()
    assert (done.returncode, done.stderr) == (0, "")
    values = {
        (sample.name, sample.labels.get("gpu"), sample.labels.get("mig")): sample.value
        for family in text_string_to_metric_families(done.stdout)
        for sample in family.samples
    }
    for gpu in scenario.gpus:
        index = str(gpu.index)
        assert values["gpu_up", index, None] == 1
        assert values["gpu_memory_total_bytes", index, None] == gpu.product.memory
        assert values["gpu_power_limit_watts", index, None] == gpu.product.power_limit
        assert values["gpu_sm_clock_max_hertz", index, None] == gpu.product.sm_clock
    assert values["gpu_utilization_ratio", "0", None] == 0.93
    assert values["gpu_utilization_ratio", "7", None] == 0.0
    assert ("gpu_utilization_ratio", "6", None) not in values
    assert values["gpu_mig_memory_total_bytes", "6", "1/0"] == 40 * 1024**3
    assert values["gpu_mig_activity_supported", "6", "1/0"] == 1
    assert (
        0 <= values["gpu_mig_graphics_active_ratio", "6", "1/0"] <= 1
    )  # the exporter waited for the 100 ms of a GPM window
    assert values["gpu_driver_up", None, None] == 1


def test_once_prints_json_and_a_table(nvml_environment: dict[str, str], nvml_table: NvmlTable) -> None:
    feed(nvml_table, load={"kind": "constant", "value": 0.5})
    data = json.loads(once(nvml_environment, "--format=json").stdout)
    assert data["gpus"][0]["name"] == "NVIDIA H100 80GB HBM3"
    assert data["gpus"][0]["utilization_ratio"] in (0.0, 0.5)  # 0.0 before the feeder's first period
    assert once(nvml_environment, "--format=table").stdout.startswith("GPU  NAME")


def test_once_replaces_a_textfile_by_rename(
    nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    feed(nvml_table)
    output = tmp_path / "gpu.prom"
    done = once(nvml_environment, f"--output={output}")
    assert (done.returncode, done.stdout) == (0, "")
    assert "gpu_driver_up 1" in output.read_text("utf-8")
    assert output.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".gpu.prom")] == []


def test_once_reports_a_partial_result_when_a_gpu_is_lost(
    nvml_environment: dict[str, str], nvml_table: NvmlTable
) -> None:
    ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}] * 2}), nvml_table)
    nvml_table.set_call(1, "*", "NVML_ERROR_GPU_IS_LOST")
    done = once(nvml_environment)
    assert done.returncode == 4
    assert 'gpu_power_watts{gpu="0"' in done.stdout
    assert 'gpu_power_watts{gpu="1"' not in done.stdout


def test_once_gives_up_on_a_hung_driver_in_time(nvml_environment: dict[str, str], nvml_table: NvmlTable) -> None:
    feed(nvml_table)
    nvml_table.set_call(0, "nvmlDeviceGetPowerUsage", delay_s=600)
    done = once(nvml_environment, "--timeout=500ms")
    assert done.returncode == 3
    assert done.stderr == "gpu-exporter: no GPU data: the driver did not answer within 0.5 s\n"


@pytest.mark.parametrize(
    ("kernel_driver", "status", "what"),
    [
        ("nvidia", 3, "no GPU data"),
        ("", 3, "no GPU data"),
        ("vfio-pci", 0, "no GPU is expected here"),
        (None, 0, "no GPU is expected here"),
    ],
    ids=["a GPU with its driver", "a GPU whose driver is not loaded", "a GPU given away", "no GPU"],
)
def test_once_without_a_driver_prints_one_line_and_fails_only_if_a_gpu_is_missing(
    tmp_path: Path, kernel_driver: str | None, status: int, what: str
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    if kernel_driver is not None:
        add_function(tmp_path, "0000:3b:00.0", kernel_driver)
    done = once(environment, f"--output={tmp_path / 'gpu.prom'}", f"--path.sysfs={tmp_path}")
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr == (
        f"gpu-exporter: {what}: libnvidia-ml.so.1 cannot be loaded (NVML_ERROR_LIBRARY_NOT_FOUND): "
        "no NVIDIA driver on this host, or it is not mounted here\n"
    )
    assert "gpu_driver_up 0" in (tmp_path / "gpu.prom").read_text("utf-8")


FORBIDDEN = ("prometheus_client", "yaml", "psutil", "http.server", "grpc", "kubernetes", "torch", "h2")


def test_once_loads_only_what_it_needs(nvml_environment: dict[str, str], nvml_table: NvmlTable) -> None:
    feed(nvml_table)
    done = subprocess.run(
        [
            sys.executable,
            "-X",
            "importtime",
            *GPU_EXPORTER[1:],
            "--once",
            "--state.directory=",
            "--no-attribution.slurm",
        ],
        env=nvml_environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "pynvml" in modules
    for name in FORBIDDEN:
        assert not [module for module in modules if module == name or module.startswith(f"{name}.")]
