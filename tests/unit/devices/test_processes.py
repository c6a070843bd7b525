"""Lists of processes: for every entry size of a driver, a pid is either right or missing."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_exporter.agent.devices.nvml import constants as nvml
from gpu_exporter.agent.devices.nvml.processes import MOST_ROOM, TRIES, Buffer, list_processes, parse_processes

U32 = st.integers(0, 2**32 - 1)
ENTRIES = st.lists(st.tuples(st.integers(1, 2**22), st.integers(0, 2**64 - 1), U32, U32), max_size=70)


class Driver:
    """Fills the buffer as NVML does, with entries of one size. `grows`: the number of new entries at each call.

    `clears`: the whole buffer is cleared first.
    """

    def __init__(
        self, entries: list[tuple[int, int, int, int]], size: int = 24, grows: int = 0, *, clears: bool = False
    ) -> None:
        self.entries, self.size, self.grows, self.clears = entries, size, grows, clears
        self.rooms: list[int] = []

    def ask(self, room: int, raw: Any) -> tuple[int, int]:
        self.rooms.append(room)
        count = len(self.entries)
        if self.clears:
            raw[: room * self.size] = bytes(room * self.size)
        self.entries = self.entries + self.entries[:1] * self.grows
        for position, entry in enumerate(self.entries[: min(room, count)]):
            data = struct.pack("@IQII", *entry).ljust(self.size, b"\0")
            raw[position * self.size : position * self.size + self.size] = data
        return (nvml.NVML_ERROR_INSUFFICIENT_SIZE if count > room else nvml.NVML_SUCCESS), count


@given(ENTRIES, st.sampled_from([24, 32]), st.booleans())
@example(entries=[(1, 0, 0, 0)] * 48, size=24, clears=True)  # three quarters of an even room
@example(entries=[(1, 0, 0, 0)] * 49, size=24, clears=True)
@example(entries=[(1, 2**64 - 1, 0, 0), (2, 2**64 - 2, 0, 0)], size=24, clears=False)
def test_pids_are_read_from_entries_of_either_size(
    entries: list[tuple[int, int, int, int]], size: int, clears: bool
) -> None:
    code, answer = list_processes(Driver(entries, size, clears=clears).ask, Buffer())
    assert code == nvml.NVML_SUCCESS
    none = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
    assert answer == tuple(
        (pid, gpu, compute, None if memory == none else memory) for pid, memory, gpu, compute in entries
    )


@given(ENTRIES.filter(len), st.sampled_from([16, 40, 48]))
def test_entries_of_an_unknown_size_give_their_number_and_no_wrong_pid(
    entries: list[tuple[int, int, int, int]], size: int
) -> None:
    """16 bytes is the first version, which no call of the exporter fills; larger sizes may appear in future drivers."""
    buffer = Buffer()
    buffer.grow(2 * len(entries))
    buffer.mark()
    for position, (pid, memory, _, _) in enumerate(entries):
        data = struct.pack("@IQ", pid, memory).ljust(size, b"\0")
        buffer.raw[position * size : (position + 1) * size] = data
    answer = parse_processes(buffer.raw.raw, len(entries))
    if size > 32:
        assert answer == len(entries)
    elif isinstance(answer, tuple):  # a size of 24 fitted, so the last entry ends with the mark
        assert [row[1:3] for row in answer][-1] == (0xA5A5A5A5, 0xA5A5A5A5)


def test_without_any_mark_only_the_number_of_processes_is_known() -> None:
    assert parse_processes(bytes(65 * 32), 3) == 3


def test_the_buffer_grows_for_a_long_list_and_keeps_its_size() -> None:
    driver, buffer = Driver([(pid, 0, 0, 0) for pid in range(1, 301)]), Buffer()
    _, answer = list_processes(driver.ask, buffer)
    assert isinstance(answer, tuple)
    assert [row[0] for row in answer] == list(range(1, 301))
    list_processes(driver.ask, buffer)
    assert driver.rooms == [65, 365, 365]


@pytest.mark.parametrize(
    ("driver", "calls"),
    [(Driver([(1, 0, 0, 0)] * 66, grows=200), TRIES), (Driver([(1, 0, 0, 0)] * (MOST_ROOM + 1)), 1)],
    ids=["grows-for-ever", "too-long"],
)
def test_an_endless_process_list_is_given_up(driver: Driver, calls: int) -> None:
    code, answer = list_processes(driver.ask, Buffer())
    assert (code, answer) == (nvml.NVML_ERROR_INSUFFICIENT_SIZE, ())
    assert len(driver.rooms) == calls


def test_old_content_of_the_buffer_is_never_returned() -> None:
    buffer = Buffer()
    list_processes(Driver([(7, 0, 0, 0), (8, 0, 0, 0)]).ask, buffer)
    assert list_processes(Driver([]).ask, buffer) == (nvml.NVML_SUCCESS, ())
    assert list_processes(Driver([(9, 0, 1, 2)]).ask, buffer) == (nvml.NVML_SUCCESS, ((9, 1, 2, 0),))
