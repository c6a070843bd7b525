"""Reads the list of processes on a device from NVML's structures.

nvmlDeviceGetComputeRunningProcesses_v2 and _v3 fill nvmlProcessInfo_v2_t: 24 bytes with pid, memory, and the ids of the
GPU instance and compute instance (0xFFFFFFFF without MIG). Some drivers around 535.43 fill 32 bytes under the same name
_v3, which shifts every pid except the first (XuehaiPan/nvitop issue 75, flightlessmango/MangoHud 1715). So the exporter
fills the buffer with a fixed pattern before the call, and finds the size of an entry from the last byte that the driver
has written.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any, TypeAlias

from gpu_exporter.agent.devices.nvml import constants as nvml

ENTRY = struct.Struct("@IQII")  # nvmlProcessInfo_v2_t: pid, bytes of memory, GPU instance, compute instance
SIZES = (24, 32)  # of one entry; the larger entry ends with the bytes of protected memory
MARK = 0xA5
FIRST_ROOM = 65  # entries; a GPU with more processes costs one additional call
MOST_ROOM = 4097  # entries; a larger request of the driver is refused as implausible
TRIES = 4  # the list may grow between two calls

NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF  # NVML_VALUE_NOT_AVAILABLE

Row: TypeAlias = "tuple[int, int, int, int | None]"
"""pid, GPU instance, compute instance, bytes of memory. An instance is 0xFFFFFFFF if the process is on no instance."""
Answer: TypeAlias = "tuple[Row, ...] | int"
"""The processes, or only their number if the size of an entry is unclear."""


class Buffer:
    """A buffer for `room` entries of the largest size, and one more entry that the driver must not write. Used by one
    thread.

    `room` is odd: an even number of smaller entries may end at the same offset as a number of larger entries.
    """

    def __init__(self) -> None:
        self.room = 0
        self.raw: Any = None
        self.grow(FIRST_ROOM)

    def grow(self, room: int) -> None:
        self.room = room | 1
        self.raw = ctypes.create_string_buffer((self.room + 1) * SIZES[-1])

    def mark(self) -> None:
        ctypes.memset(self.raw, MARK, len(self.raw))


def list_processes(ask: Callable[[int, Any], tuple[int, int]], buffer: Buffer) -> tuple[int, Answer]:
    """Returns NVML's return code and the processes. `ask(room, buffer)` makes the call and returns (code, count).

    Returns INSUFFICIENT_SIZE only if the list still grows after TRIES calls, or is longer than MOST_ROOM.
    """
    for _ in range(TRIES):
        code, count, answer = _fill(ask, buffer, buffer.room)
        if code != nvml.NVML_ERROR_INSUFFICIENT_SIZE or not buffer.room < count <= MOST_ROOM:
            break
        buffer.grow(min(MOST_ROOM, count + FIRST_ROOM))
    if isinstance(answer, int) and answer < buffer.room:
        # Some drivers clear the whole buffer first, and with it the pattern. With an exact size they clear nothing.
        again, _, exact = _fill(ask, buffer, answer)
        if again == nvml.NVML_SUCCESS:
            return again, exact
    return code, answer


def _fill(ask: Callable[[int, Any], tuple[int, int]], buffer: Buffer, room: int) -> tuple[int, int, Answer]:
    """Returns code, count and processes of one call."""
    buffer.mark()
    code, count = ask(room, buffer.raw)
    if code != nvml.NVML_SUCCESS:
        return code, count, ()
    return code, count, parse_processes(buffer.raw.raw, min(count, room))


def parse_processes(raw: bytes, count: int) -> Answer:
    """Returns `count` entries of a buffer that was filled with the pattern before the call.

    Returns only the number of entries if their size is unclear.
    """
    if count == 0:
        return ()
    size = entry_size(raw, count)
    if size is None:
        return count
    rows = (ENTRY.unpack_from(raw, position * size) for position in range(count))
    return tuple(
        (pid, gpu_instance, compute_instance, None if memory == NOT_AVAILABLE else memory)
        for pid, memory, gpu_instance, compute_instance in rows
    )


def entry_size(raw: bytes, count: int) -> int | None:
    """Returns the size of one entry in bytes, None if no size fits.

    With this size, the driver has filled the last entry completely, and has written nothing after that entry. If
    several sizes fit, it is the smallest.
    """
    mark = bytes([MARK])
    for size in SIZES:
        end = count * size
        behind = raw[end : (count + 1) * SIZES[-1]]
        if len(raw) >= end + SIZES[0] and behind == mark * len(behind) and raw[end - 8 : end] != mark * 8:
            return size
    return None
