"""Per-process utilization: consecutive periods, without implausible entries."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpu_exporter.agent.collectors.contract import Cycle, Totals
from gpu_exporter.agent.devices.errors import DeviceError, DeviceLost, NotSupported
from gpu_exporter.agent.devices.protocol import Device, ProcessUtilization
from gpu_exporter.agent.sampling.activity.process_periods import LEAST, TOO_LONG, UNSUPPORTED, ProcessPeriods
from gpu_exporter.common.model.readings import ProcessPeriod, ProcessShare

WALL = 1_700_000_000.0  # at monotonic 0


class Told(Device):
    """A device with scripted process utilization."""

    def __init__(self) -> None:
        self.entries: Sequence[ProcessUtilization] | DeviceError = ()
        self.asked: list[float] = []

    def read_process_utilization(self, since_wall: float) -> Sequence[ProcessUtilization]:
        self.asked.append(since_wall - WALL)
        if isinstance(self.entries, DeviceError):
            raise self.entries
        return self.entries


@pytest.fixture
def told() -> Told:
    return Told()


class Reader:
    """Reads the device at moments of the monotonic clock."""

    def __init__(self, device: Told) -> None:
        self.device, self.periods, self.errors = device, ProcessPeriods(), 0

    def read(self, newest: float, now: float | None = None, wall: float = WALL) -> ProcessPeriod | None:
        now = newest + 0.25 if now is None else now
        cycle = Cycle(self.device, {}, lambda: now, Totals())
        period = self.periods.read(cycle, wall + newest, now, wall + now)
        self.errors += len(cycle.errors)
        return period


@pytest.fixture
def reader(told: Told) -> Reader:
    return Reader(told)


def entry(pid: int, at: float, ratio: float = 0.5, is_active: bool = True) -> ProcessUtilization:
    return ProcessUtilization(pid, WALL + at, ratio, is_active)


def test_process_periods_are_consecutive_up_to_the_newest_ring_entry(told: Told, reader: Reader) -> None:
    assert reader.read(10.0) is None
    told.entries = [entry(7, 14.5)]
    assert reader.read(15.0) == ProcessPeriod(10.0, 15.0, (ProcessShare(7, 0.5, 14.5),))
    assert reader.read(15.0) is None  # nothing new
    told.entries = []
    assert reader.read(19.0) == ProcessPeriod(15.0, 19.0)
    assert told.asked == [10.0, 15.0]


@pytest.mark.parametrize(
    "wrong",
    [
        entry(0, 14.0),
        entry(2_000_000_007, 14.0),
        entry(7, 10.0),  # reported before
        entry(7, 9.0),
    ],
)
def test_an_implausible_entry_of_a_process_is_discarded(told: Told, reader: Reader, wrong: ProcessUtilization) -> None:
    reader.read(10.0)
    told.entries = [wrong] * 50 + [entry(8, 15.5)]
    assert reader.read(15.0) == ProcessPeriod(10.0, 15.0, (ProcessShare(8, 0.5, 15.5),))


@pytest.mark.parametrize(
    "wrong", [entry(7, 14.0, 42_949_672.95), entry(7, 14.0, 1.01), entry(7, 14.0, -0.5), entry(7, 16.5)]
)
def test_a_process_with_an_implausible_share_still_counts_as_listed(
    told: Told, reader: Reader, wrong: ProcessUtilization
) -> None:
    """The process worked, so its holder is not idle."""
    reader.read(10.0)
    told.entries = [wrong] * 50 + [entry(8, 15.5)]
    assert reader.read(15.0) == ProcessPeriod(10.0, 15.0, (ProcessShare(8, 0.5, 15.5), ProcessShare(7, LEAST, 15.0)))


def test_a_process_that_is_listed_with_zeros_only_has_no_share(told: Told, reader: Reader) -> None:
    """The driver should list only processes that worked: the work of this one is unknown."""
    reader.read(10.0)
    told.entries = [entry(7, 14.0, 0.0, is_active=False), entry(8, 15.0, 0.0, is_active=False), entry(8, 14.0)]
    assert reader.read(15.0) == ProcessPeriod(10.0, 15.0, (ProcessShare(7, None, 14.0), ProcessShare(8, 0.25, 15.0)))


def test_a_listed_process_has_worked_even_if_its_share_rounds_to_zero(told: Told, reader: Reader) -> None:
    reader.read(10.0)
    told.entries = [entry(7, 12.0, 0.0)]
    assert reader.read(15.0) == ProcessPeriod(10.0, 15.0, (ProcessShare(7, LEAST, 12.0),))


def test_the_share_of_a_process_with_several_entries_is_their_mean(told: Told, reader: Reader) -> None:
    reader.read(10.0)
    told.entries = [entry(7, 12.0, 0.25), entry(7, 14.0, 0.75)]
    assert reader.read(15.0) == ProcessPeriod(10.0, 15.0, (ProcessShare(7, 0.5, 14.0),))


def test_the_reason_for_missing_process_utilization_is_reported(told: Told, reader: Reader) -> None:
    reader.read(10.0)
    told.entries = NotSupported("nvmlDeviceGetProcessUtilization", "NVML_ERROR_NOT_SUPPORTED")
    assert reader.read(15.0) == ProcessPeriod(10.0, 15.0, problem=UNSUPPORTED)
    assert reader.errors == 0
    told.entries = DeviceError("nvmlDeviceGetProcessUtilization", "NVML_ERROR_UNKNOWN")
    assert reader.read(20.0) == ProcessPeriod(15.0, 20.0, problem=UNSUPPORTED)
    assert reader.errors == 1
    told.entries = DeviceLost("nvmlDeviceGetProcessUtilization", "NVML_ERROR_GPU_IS_LOST")
    with pytest.raises(DeviceLost):
        reader.read(25.0)


def test_a_period_longer_than_the_drivers_buffer_is_unknown(told: Told, reader: Reader) -> None:
    reader.read(10.0)
    assert reader.read(25.5) == ProcessPeriod(10.0, 25.5, problem=TOO_LONG)
    assert told.asked == []
    assert reader.read(40.5) is not None and told.asked == [25.5]


def test_after_a_pause_a_new_process_period_begins(told: Told, reader: Reader) -> None:
    reader.read(10.0)
    reader.periods.forget()
    assert reader.read(15.0) is None
    assert reader.read(20.0) == ProcessPeriod(15.0, 20.0)


def test_after_the_wall_clock_was_set_back_a_new_process_period_begins(told: Told, reader: Reader) -> None:
    reader.read(10.0)
    assert reader.read(15.0, wall=WALL - 3600) is None
    assert reader.read(20.0, wall=WALL - 3600) == ProcessPeriod(15.0, 20.0)
    assert reader.read(25.0, wall=WALL) == ProcessPeriod(20.0 - 3600, 25.0, problem=TOO_LONG)
