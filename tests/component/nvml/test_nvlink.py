"""NVLink: the sum over all links."""

from __future__ import annotations

import contextlib

import pytest

from gpu_exporter.agent.devices.errors import (
    DeviceError,
    NotSupported,
)
from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.agent.devices.nvml.support import RETRY_S
from gpu_exporter.agent.devices.protocol import Traffic
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.common.clock import ManualClock
from tests.component.nvml.nvml_bench import MakeBackend, first_device
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder

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
        "gpu 0: NVLink 5: no traffic counters for 60 s; the last counts stay in the sum; 17 links are still counted"
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


@pytest.mark.parametrize("has_state", [True, False])
def test_a_link_is_down_after_two_counts_and_up_at_once(
    make_backend: MakeBackend, nvml_table: NvmlTable, has_state: bool
) -> None:
    """By the driver's state of each link, or without one by the counters of each link."""
    clock = ManualClock()
    links = Nvlink(make_backend(clock), nvml_table, clock, "b200")

    if not has_state:
        nvml_table.set_call(0, "nvmlDeviceGetNvLinkState", "NVML_ERROR_NOT_SUPPORTED")

    def set_up(*down: int) -> None:
        links.missing = (
            {} if has_state else {(field, link): "NVML_ERROR_NOT_SUPPORTED" for field in (202, 204) for link in down}
        )
        if has_state:
            nvml_table.table.devices[0].nvlinks[:] = [1 if link in down else 2 for link in range(18)]

    def count() -> int:
        with contextlib.suppress(NotSupported):
            links.step(10.0)
        return links.device.read_nvlinks_active()

    set_up()
    assert count() == 18
    set_up(5)
    assert [count(), count(), count()] == [18, 17, 17], "a link that trains again is not down"
    set_up(*range(18))
    assert [count(), count()] == [17, 0]
    for _ in range(10):
        assert count() == 0
    if not has_state:
        clock.advance(RETRY_S)  # counters that were given up are asked again then
    set_up(5)
    assert count() == 17


def test_links_are_neither_counted_without_links_nor_with_mig(make_backend: MakeBackend, nvml_table: NvmlTable) -> None:
    ScenarioFeeder(parse_scenario({"gpus": [{"model": "T4"}]}), nvml_table)
    device = first_device(make_backend())
    for error in ("NVML_ERROR_NOT_SUPPORTED", "NVML_ERROR_INVALID_ARGUMENT"):
        nvml_table.set_call(0, "nvmlDeviceGetNvLinkState", error)
        with pytest.raises(NotSupported):
            device.read_nvlinks_active()
    ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100", "mig": [{"profile": "1g.10gb"}]}]}), nvml_table)
    nvml_table.table.devices[0].nvlinks[:] = [1] * 18
    with pytest.raises(NotSupported):  # the links of a board with MIG on are off
        first_device(make_backend()).read_nvlinks_active()


def test_a_state_that_cannot_be_read_is_no_link_that_is_down(make_backend: MakeBackend, nvml_table: NvmlTable) -> None:
    ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}]}), nvml_table)
    nvml_table.table.devices[0].nvlinks[:] = [2] * 18
    device = first_device(make_backend())
    assert device.read_nvlinks_active() == 18
    nvml_table.table.devices[0].nvlinks[7] = 6  # state 5
    with pytest.raises(DeviceError):
        device.read_nvlinks_active()
    nvml_table.table.devices[0].nvlinks[7] = 2
    for error in (
        "NVML_ERROR_UNKNOWN",
        "NVML_ERROR_INVALID_ARGUMENT",
        "NVML_ERROR_NO_PERMISSION",
        "NVML_ERROR_NOT_SUPPORTED",
    ):
        nvml_table.set_call(0, "nvmlDeviceGetNvLinkState", error)
        for _ in range(3):
            with pytest.raises(DeviceError):
                device.read_nvlinks_active()


def test_states_that_are_refused_are_not_judged_by_silent_counters(
    make_backend: MakeBackend, nvml_table: NvmlTable
) -> None:
    clock = ManualClock()
    links = Nvlink(make_backend(clock), nvml_table, clock, "b200")
    links.step()
    assert links.device.read_nvlinks_active() == 18
    links.missing = dict.fromkeys(links.fields, "NVML_ERROR_NOT_SUPPORTED")
    nvml_table.set_call(0, "nvmlDeviceGetNvLinkState", "NVML_ERROR_NOT_SUPPORTED")
    for _ in range(3):
        links.step(10.0)
        with pytest.raises(NotSupported):
            links.device.read_nvlinks_active()


def test_links_that_train_after_a_reset_are_not_down(make_backend: MakeBackend, nvml_table: NvmlTable) -> None:
    ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}]}), nvml_table)
    device = first_device(make_backend())
    assert device.read_nvlinks_active() == 18
    nvml_table.table.devices[0].nvlinks[:] = [1] * 18
    device.renew()
    assert [device.read_nvlinks_active(), device.read_nvlinks_active()] == [18, 0]


def test_silent_links_are_logged_in_one_line(
    make_backend: MakeBackend, nvml_table: NvmlTable, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    links = Nvlink(make_backend(clock), nvml_table, clock, "b200")
    links.step()
    links.missing = dict.fromkeys(links.fields, "NVML_ERROR_NOT_SUPPORTED")
    with contextlib.suppress(NotSupported):
        for _ in range(90):
            links.step()
    (record,) = [each for each in caplog.records if "NVLink" in each.getMessage()]
    assert "0, 1, 2" in record.getMessage() and "no link is counted any more" in record.getMessage()


def test_errors_of_nvlink_are_read_by_kind(make_backend: MakeBackend, nvml_table: NvmlTable) -> None:
    ScenarioFeeder(parse_scenario({"gpus": [{"model": "H100"}]}), nvml_table)
    for field, count in ((38, 1), (45, 2), (52, 3)):
        nvml_table.set_field(0, field, count)
    assert first_device(make_backend()).read_nvlink_errors() == {"crc_flit": 1, "crc_data": 2, "replay": 3}
