"""Reads XIDs and SXids from the kernel's log. NVIDIA's driver prints every XID there, also XIDs without an NVML event.

One read(2) of /dev/kmsg (Documentation/ABI/testing/dev-kmsg) returns one record:

4,2031,8123456789,-;NVRM: Xid (PCI:0000:86:00): 62, pid=4711, name=python, 32a5(2d48) 00000000 00000000

A record begins with priority and facility, sequence number, microseconds since boot and flags. Then comes the text, in
which the kernel escapes control characters. On a GPU with MIG, ` GPU-I:05` and ` GPU-CI:00` may follow the address
(krcReportXid in NVIDIA's open kernel modules). The exporter uses only the address, the number, and for errors of NVLink
5 the word Fatal or Nonfatal. It ignores the rest, which contains names of users' processes. A GPU that fell off the bus
may appear without a number; this is XID 79.

Errors of NVSwitches are SXids (NVSWITCH_PRINT_SXID in NVIDIA's open kernel modules). One error has up to three records,
and the first has the severity. Some errors have no severity, e.g. of temperature or of optical modules:

nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Non-fatal, Link 44 Minion Link DLREQ interrupt
nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Severity 0 Engine instance 44 Sub-engine instance 00
nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Data {0x0000002c, 0x0000002c, 0x00000000, 0x0000002c}

Users cannot forge an XID or SXid. Only the kernel can write a record with facility 0. And a record counts only if it
begins with NVIDIA's text, while users control at most the first 15 characters of a kernel message (the name of a
process).
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.common.model.units import normalize_pci

RECORD_MAX = 8192  # the kernel's limit of a record (CONSOLE_EXT_LOG_MAX, later PRINTK_MESSAGE_MAX)
BATCH = 1000  # records per read, so that a noisy log does not block the reader's other work
OLD_MAX = 100_000  # most records to read at the start; a ring of 16 MiB has no more
PROBES_MAX = 256  # number of addresses that are remembered
KERNEL_FACILITY = 0
PREFIX = re.compile(rb"(\d{1,4}),\d{1,20},\d{1,20},[^;\n]{0,200};")
ADDRESS = rb"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?"
XID = re.compile(rb"NVRM: Xid \((?:PCI:)?(" + ADDRESS + rb")(?: GPU-I:\d{1,3})?(?: GPU-CI:\d{1,3})?\): (\d{1,5}),")
SEVERITY = re.compile(rb" [A-Z0-9_]+ (Nonfatal|Fatal)\b")
SXID = re.compile(
    rb"nvidia-nvswitch\d{1,3}: SXid \(PCI:("
    + ADDRESS
    + rb")\): (\d{1,5}), (?:(Fatal|Non-fatal)\b|(Severity \d|Data \{))?"
)


# The kernel's message, before and since 6.8, if a driver could not start a device.
PROBE = re.compile(
    rb"nvidia(?:: probe of (" + ADDRESS + rb") failed with error|"
    rb" (" + ADDRESS + rb"): probe with driver nvidia failed with error)"
)
# The driver refuses a board that it does not support, in one record of two lines or in two records.
REFUSED = re.compile(
    rb"NVRM: (?:The NVIDIA GPU (" + ADDRESS + rb") \(PCI ID|ignoring the legacy GPU (" + ADDRESS + rb"))"
)
FALLEN = re.compile(
    rb"NVRM: (?:The NVIDIA GPU (" + ADDRESS + rb")(?:\\x0a|\s*$)|"
    rb"GPU (?:at )?(?:PCI:)?(" + ADDRESS + rb"): GPU has fallen off the bus)"
)
OFF_THE_BUS = 79
NVLINK5 = range(144, 151)


class XidLine(NamedTuple):
    """An XID of the GPU at this PCI address, in the form that `slot_of` returns."""

    address: str
    xid: int


class Report(NamedTuple):
    """An XID in the kernel's log.

    `severity`: "fatal" or "nonfatal" from the text, "" if missing. `has_number`: the text contains the XID's number.
    """

    line: XidLine
    severity: str = ""
    has_number: bool = True


class SwitchReport(NamedTuple):
    """A record about an SXid of the NVSwitch at this PCI address.

    `severity`: "fatal" or "nonfatal", "unknown" if the record has none. `is_detail`: a further record about an error.
    """

    address: str
    sxid: int
    severity: str
    is_detail: bool = False


class Batch(NamedTuple):
    """The result of one read.

    - `lost`: records were overwritten before the exporter read them.
    - `full`: more records may follow.
    - `probes`: PCI addresses of GPUs that the driver could not start.
    """

    reports: list[Report | SwitchReport]
    lost: bool
    full: bool
    probes: frozenset[str] = frozenset()


def slot_of(pci_bus_id: str) -> str:
    """Removes the function from a PCI address: returns `0000:86:00` for 00000000:86:00.0 and for 0000:86:00."""
    return normalize_pci(pci_bus_id).partition(".")[0]


def parse_record(record: bytes) -> XidLine | None:
    """Returns the XID in one record of /dev/kmsg, None if the record has no XID."""
    report = parse_report(record)
    return None if report is None else report.line


def parse_report(record: bytes) -> Report | None:
    """Returns the XID in one record of /dev/kmsg with its severity, None if the record has no XID."""
    begin = _begin_of(record)
    if begin is None:
        return None
    if (found := XID.match(record, begin)) is not None:
        line = XidLine(_slot(found[1]), int(found[2]))
        severity = SEVERITY.match(record, found.end()) if line.xid in NVLINK5 else None
        return Report(line, severity[1].decode("ascii").lower() if severity is not None else "")
    if (fallen := FALLEN.match(record, begin)) is not None:
        return Report(XidLine(_slot(fallen[1] or fallen[2]), OFF_THE_BUS), has_number=False)
    return None


def parse_switch_report(record: bytes) -> SwitchReport | None:
    """Returns the SXid in one record of /dev/kmsg, None if the record has no SXid."""
    begin = _begin_of(record)
    found = None if begin is None else SXID.match(record, begin)
    if found is None:
        return None
    severity = "unknown" if found[3] is None else found[3].decode("ascii").lower().replace("-", "")
    return SwitchReport(normalize_pci(found[1].decode("ascii")), int(found[2]), severity, found[4] is not None)


def parse_probe(record: bytes) -> tuple[str, bool] | None:
    """Returns the PCI address of a GPU that the driver could not start. None for other records.

    The second value is True if the driver does not support the board.
    """
    begin = _begin_of(record)
    if begin is None:
        return None
    if (failed := PROBE.match(record, begin)) is not None:
        return normalize_pci((failed[1] or failed[2]).decode("ascii")), False
    refused = REFUSED.match(record, begin)
    return None if refused is None else (normalize_pci((refused[1] or refused[2]).decode("ascii")), True)


def _begin_of(record: bytes) -> int | None:
    """Returns the position at which the text of a kernel record begins. None for a record from a process."""
    prefix = PREFIX.match(record)
    return prefix.end() if prefix is not None and int(prefix[1]) >> 3 == KERNEL_FACILITY else None


def _slot(address: bytes) -> str:
    return slot_of(address.decode("ascii"))


class KernelLog:
    """Reads the records that are written to /dev/kmsg after this object was made. Never blocks."""

    def __init__(self, path: Path, read: Callable[[int, int], bytes] = os.read) -> None:
        """Opens the log. Raises OSError if the log is missing or this process has no permission to read it."""
        self._read = read
        self._failed: set[str] = set()
        self._refused: set[str] = set()
        self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.lseek(self._handle, 0, os.SEEK_END)
        except OSError as exc:
            if exc.errno != errno.ESPIPE:  # a pipe, which replaces the device in tests, begins at its end
                self.close()
                raise

    def close(self) -> None:
        os.close(self._handle)

    def read_past(self) -> frozenset[str]:
        """Reads the old records. Returns the PCI addresses of GPUs that the driver could not start. Raises OSError.

        Does not count old XIDs, because a restart would count them a second time.
        """
        os.lseek(self._handle, 0, os.SEEK_SET)
        probes: set[str] = set()
        for _ in range(OLD_MAX // BATCH):
            batch = self.read()
            probes |= batch.probes
            if not batch.full:
                break
        os.lseek(self._handle, 0, os.SEEK_END)
        return frozenset(probes)

    def read(self) -> Batch:
        """Returns the XIDs and SXids since the last read. Raises OSError."""
        reports: list[Report | SwitchReport] = []
        lost = False
        for _ in range(BATCH):
            try:
                data = self._read(self._handle, RECORD_MAX)
            except BlockingIOError:
                return Batch(reports, lost, False, self._take_probes())
            except OSError as exc:
                if exc.errno == errno.EPIPE:  # records were overwritten; the next read returns the oldest one left
                    lost = True
                elif exc.errno != errno.EINVAL:  # EINVAL: longer than RECORD_MAX, and skipped by the kernel
                    raise
                continue
            if not data:
                return Batch(reports, lost, False, self._take_probes())
            # A pipe may return several records at once. Further lines of a record, its properties, begin with a space.
            for record in data.split(b"\n"):
                if (report := parse_report(record) or parse_switch_report(record)) is not None:
                    reports.append(report)
                elif (probe := parse_probe(record)) is not None:
                    kept = self._refused if probe[1] else self._failed  # PROBES_MAX of each kind
                    if len(kept) < PROBES_MAX:
                        kept.add(probe[0])
        return Batch(reports, lost, True, self._take_probes())

    def _take_probes(self) -> frozenset[str]:
        """Returns the PCI addresses of GPUs that the driver could not start since the last call.

        Omits boards that the driver does not support, because they are not expected to work.
        """
        probes = frozenset(self._failed - self._refused)
        self._failed.clear()
        return probes
