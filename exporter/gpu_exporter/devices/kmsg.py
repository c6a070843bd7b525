"""XIDs in the kernel's log: NVIDIA's driver prints each of them there, also those for which NVML has no event.

/dev/kmsg (Documentation/ABI/testing/dev-kmsg) gives one record a read(2):

    4,2031,8123456789,-;NVRM: Xid (PCI:0000:86:00): 62, pid=4711, name=python, 32a5(2d48) 00000000 00000000

first priority and facility, sequence, microseconds since boot and flags, then the text, in which the kernel escapes
control characters. On a GPU with MIG, ` GPU-I:05` and ` GPU-CI:00` may follow the address (krcReportXid in NVIDIA's
open kernel modules). Only the address and the number are taken: the rest names processes of users.

Users cannot forge an XID: what a process writes to /dev/kmsg never has facility 0, which is the kernel's own, and a
record is believed only when it begins with NVIDIA's words, while the kernel's other messages put at most 15
characters of a process's name first.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.model import normalize_pci

RECORD_MAX = 8192  # the kernel's own bound of a record (CONSOLE_EXT_LOG_MAX, later PRINTK_MESSAGE_MAX)
BATCH = 1000  # records of one look, so that a noisy log does not keep the reader from everything else
KERNEL_FACILITY = 0
PREFIX = re.compile(rb"(\d{1,4}),\d{1,20},\d{1,20},[^;\n]{0,200};")
XID = re.compile(
    rb"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?"
    rb"(?: GPU-I:\d{1,3})?(?: GPU-CI:\d{1,3})?\): (\d{1,5}),"
)


class XidLine(NamedTuple):
    """An XID of the GPU at `address`, spelled as `slot_of` does."""

    address: str
    xid: int


class Batch(NamedTuple):
    """What one look found. `lost`: records were overwritten before they were read. `full`: there may be more."""

    lines: list[XidLine]
    lost: bool
    full: bool


def slot_of(pci_bus_id: str) -> str:
    """Domain, bus and device without the function: `0000:86:00` for 00000000:86:00.0 and 0000:86:00."""
    return normalize_pci(pci_bus_id).partition(".")[0]


def parse_record(record: bytes) -> XidLine | None:
    """The XID that one record of /dev/kmsg reports, None for every other record."""
    prefix = PREFIX.match(record)
    if prefix is None or int(prefix[1]) >> 3 != KERNEL_FACILITY:
        return None
    found = XID.match(record, prefix.end())
    return XidLine(slot_of(found[1].decode("ascii")), int(found[2])) if found is not None else None


class KernelLog:
    """An open /dev/kmsg, from its present end on. Never blocks."""

    def __init__(self, path: Path, read: Callable[[int, int], bytes] = os.read) -> None:
        """Raises OSError: it is not there, or this process may not read it."""
        self._read = read
        self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.lseek(self._handle, 0, os.SEEK_END)
        except OSError as exc:
            if exc.errno != errno.ESPIPE:  # a pipe, which stands in for the device in tests, begins at its end
                self.close()
                raise

    def close(self) -> None:
        os.close(self._handle)

    def read(self) -> Batch:
        """The XIDs since the last look. Raises OSError."""
        lines: list[XidLine] = []
        lost = False
        for _ in range(BATCH):
            try:
                data = self._read(self._handle, RECORD_MAX)
            except BlockingIOError:
                return Batch(lines, lost, full=False)
            except OSError as exc:
                if exc.errno == errno.EPIPE:  # overwritten; the next read goes on with the oldest that is left
                    lost = True
                elif exc.errno != errno.EINVAL:  # EINVAL: longer than RECORD_MAX, and skipped by the kernel
                    raise
                continue
            if not data:
                return Batch(lines, lost, full=False)
            # A pipe may give several records at once. Further lines of a record, its properties, begin with a space.
            lines += [line for record in data.split(b"\n") if (line := parse_record(record)) is not None]
        return Batch(lines, lost, full=True)
