"""XIDs in the kernel's log: the parts of a record that are used, and records that no user can forge."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.devices.kmsg import (
    BATCH,
    PROBES_MAX,
    RECORD_MAX,
    KernelLog,
    XidLine,
    parse_probe,
    parse_record,
    parse_report,
    parse_switch_report,
    slot_of,
)

PREFIX = b"4,2031,8123456789,-;"
XID_62 = b"NVRM: Xid (PCI:0000:86:00): 62, pid=4711, name=python, 32a5(2d48) 00000000 00000000\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (XID_62, ("0000:86:00", 62)),
        (b"NVRM: Xid (PCI:0000:05:00): 79, GPU has fallen off the bus.\n", ("0000:05:00", 79)),
        (b"NVRM: Xid (PCI:0000:3B:00 GPU-I:05): 31, pid=1, name=a, Ch 00000008\n", ("0000:3b:00", 31)),
        (
            b"NVRM: Xid (PCI:0000:3b:00 GPU-I:05 GPU-CI:00): 43, pid='<unknown>', name=<unknown>, x\n",
            ("0000:3b:00", 43),
        ),
        (b"NVRM: Xid (PCI:00000000:3b:00.0): 13, x", ("0000:3b:00", 13)),
        (b"NVRM: Xid (0000:03:00): 13, 0001 00000000", ("0000:03:00", 13)),
        (b"NVRM: Xid (PCI:10000:01:00): 79, GPU has fallen off the bus", ("10000:01:00", 79)),  # not 0000:01:00
        (b"NVRM: The NVIDIA GPU 0000:b3:00.0\n", ("0000:b3:00", 79)),  # the first of three records
        (
            b"NVRM: The NVIDIA GPU 0000:b3:00.0\\x0aNVRM: (PCI ID: 10de:2330) installed in this system has\\x0aNVRM: fallen",
            ("0000:b3:00", 79),
        ),
        (b"NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.\n", ("0000:b3:00", 79)),
        (b"NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:0dd8)\\x0aNVRM: installed in this system is not", None),
        (b"NVRM: GPU at PCI:0000:86:00: GPU-5f1c0000-0000-0000-0000-000000000000\n", None),
        (b"NVRM: Xid (PCI:0000:86:00): , pid=1\n", None),
        (b"NVRM: Xid (PCI:0000:86:00): 123456, pid=1\n", None),
        (b"NVRM: Xid (PCI:0000:86:00): 62\n", None),
        (b"NVRM: Xid (PCI:0000:86): 62, x\n", None),
        (b"", None),
    ],
)
def test_an_xid_is_read_with_its_address(text: bytes, line: tuple[str, int] | None) -> None:
    assert parse_record(PREFIX + text) == line


@pytest.mark.parametrize(
    "record",
    [
        # A record that a process writes to /dev/kmsg has a facility of its choice, but never the kernel's: 12 is 1 << 3 | 4.
        b"12,2031,8123456789,-;" + XID_62,
        b"28,2031,8123456789,-;" + XID_62,
        # A program may have any name, but a kernel message begins with at most 15 characters of it.
        PREFIX + b"NVRM: Xid (PCI:[4711]: segfault at 0 ip 00000000 NVRM: Xid (PCI:0000:86:00): 62, x\n",
        PREFIX + b"python[1]: NVRM: Xid (PCI:0000:86:00): 62, x\n",
        PREFIX + b"usb 1-1: Product: \\x0aNVRM: Xid (PCI:0000:86:00): 62, x\n",
        b" DEVICE=" + XID_62,
        XID_62,
        b"4,2031;" + XID_62,
        b"four,2031,8123456789,-;" + XID_62,
    ],
    ids=["user", "daemon", "a process's name", "a prefix", "a device's name", "a property", "bare", "cut", "no number"],
)
def test_a_record_of_another_writer_is_not_an_xid(record: bytes) -> None:
    assert parse_record(record) is None


SXID_24007 = b"nvidia-nvswitch0: SXid (PCI:0000:C3:00.0): 24007, Fatal, Link 28 sourcetrack timeout error (First)\n"


@pytest.mark.parametrize(
    ("text", "report"),
    [
        (SXID_24007, ("0000:c3:00.0", 24007, "fatal", False)),
        (
            b"nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20009, Non-fatal, Link 04 RX Short Error Rate",
            ("0000:06:00.0", 20009, "nonfatal", False),
        ),
        (
            b"nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Severity 0 Engine instance 44 Sub-engine instance 00",
            ("0000:04:00.0", 22013, "unknown", True),
        ),
        (
            b"nvidia-nvswitch1: SXid (PCI:0000:84:00.0): 12028, Data {0x000001c0, 0x00bd5c8a, 0x00000500}",
            ("0000:84:00.0", 12028, "unknown", True),
        ),
        (
            b"nvidia-nvswitch2: SXid (PCI:0000:84:00.0): 30003, Fatal, Failed to post command to SOE. Data {0x1}",
            ("0000:84:00.0", 30003, "fatal", False),
        ),
        (b"nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 10007, IO failure", ("0000:c1:00.0", 10007, "unknown", False)),
        (b"nvidia-nvswitch0: SXid (PCI:00010000:c1:00.0): 00012, x", ("10000:c1:00.0", 12, "unknown", False)),
        (b"nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 24007", None),
        (b"nvidia-nvswitch0: SXid (PCI:0000:c1): 24007, Fatal, x", None),
        (b"nvidia-nvswitch0: Xid (PCI:0000:c1:00.0): 24007, Fatal, x", None),
        (b"NVRM: SXid (PCI:0000:c1:00.0): 24007, Fatal, x", None),
        (XID_62, None),
    ],
)
def test_an_sxid_is_read_with_its_switch_and_severity(text: bytes, report: tuple[str, int, str, bool] | None) -> None:
    assert parse_switch_report(PREFIX + text) == report
    assert report is None or parse_report(PREFIX + text) is None


@pytest.mark.parametrize(
    "record",
    [
        b"12,2031,8123456789,-;" + SXID_24007,
        # "nvidia-nvswitch" has 15 characters, as many as the kernel prints of a process's name.
        PREFIX + b"nvidia-nvswitch[4711]: segfault at 0 nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Fatal, x",
        PREFIX + b"nvidia-nvswitch: SXid (PCI:0000:c3:00.0): 24007, Fatal, x",
        PREFIX + b"usb 1-1: Product: " + SXID_24007,
        SXID_24007,
    ],
    ids=["user", "a process's name", "no number", "a prefix", "bare"],
)
def test_a_record_of_another_writer_is_not_an_sxid(record: bytes) -> None:
    assert parse_switch_report(record) is None


@given(st.binary(max_size=200), st.integers(0, 40))
def test_any_bytes_are_an_sxid_in_its_limits_or_none(data: bytes, kept: int) -> None:
    for record in (data, PREFIX + data, PREFIX + SXID_24007[:kept] + data, PREFIX + SXID_24007[:52] + data):
        report = parse_switch_report(record)
        assert report is None or (0 <= report.sxid <= 99999 and report.severity in ("fatal", "nonfatal", "unknown"))


@given(st.binary(max_size=300))
def test_any_bytes_are_safe_to_parse(record: bytes) -> None:
    for candidate in (record, PREFIX + record, PREFIX + XID_62[:12] + record, PREFIX + XID_62[:26] + record):
        line = parse_record(candidate)
        assert line is None or (0 <= line.xid <= 99999 and line.address == slot_of(line.address))


@given(
    st.binary(max_size=100),
    st.integers(0, 99999),
    st.integers(0, 0xFFFF),
    st.integers(0, 255),
    st.integers(0, 31),
    st.integers(0, 7),
    st.integers(1, 23),
)
def test_only_address_and_number_of_an_xid_line_are_used(
    text: bytes, xid: int, domain: int, bus: int, device: int, level: int, facility: int
) -> None:
    words = f"NVRM: Xid (PCI:{domain:04x}:{bus:02x}:{device:02x}): {xid}, ".encode() + text
    expected = XidLine(f"{domain:04x}:{bus:02x}:{device:02x}", xid)
    assert parse_record(f"{level},1,2,-,caller=T1;".encode() + words) == expected
    assert parse_record(f"{facility << 3 | level},1,2,-;".encode() + words) is None
    assert parse_record(f"{level},1,2,-;".encode() + b"x" + words) is None


def test_addresses_of_nvml_and_of_the_kernel_give_the_same_slot() -> None:
    assert slot_of("00000000:3B:00.0") == slot_of("0000:3b:00") == slot_of("0000:3b:00.0") == "0000:3b:00"


class Script:
    """Reads of the device: records and errors in turn, then EAGAIN."""

    def __init__(self, *steps: bytes | int) -> None:
        self.steps = list(steps)

    def __call__(self, handle: int, size: int) -> bytes:
        assert size == RECORD_MAX
        step = self.steps.pop(0) if self.steps else errno.EAGAIN
        if isinstance(step, int):
            raise OSError(step, os.strerror(step))
        return step


def test_overwritten_and_oversized_records_do_not_affect_other_records(tmp_path: Path) -> None:
    (tmp_path / "kmsg").touch()
    log = KernelLog(tmp_path / "kmsg", Script(PREFIX + XID_62, errno.EPIPE, errno.EINVAL, PREFIX + XID_62))
    batch = log.read()
    assert ([report.line.xid for report in batch.reports], batch.lost, batch.full) == ([62, 62], True, False)
    assert log.read() == ([], False, False, frozenset())
    log.close()


def test_other_read_errors_of_the_log_are_raised(tmp_path: Path) -> None:
    (tmp_path / "kmsg").touch()
    log = KernelLog(tmp_path / "kmsg", Script(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        log.read()
    log.close()


def test_one_read_of_a_noisy_log_ends_after_a_batch(tmp_path: Path) -> None:
    (tmp_path / "kmsg").touch()
    log = KernelLog(tmp_path / "kmsg", Script(*[b"6,1,1,-;noise\n"] * BATCH, PREFIX + XID_62))
    assert log.read() == ([], False, True, frozenset())
    assert [report.line for report in log.read().reports] == [("0000:86:00", 62)]
    log.close()


def test_records_from_before_the_log_was_opened_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(PREFIX + XID_62)
    log = KernelLog(path)
    assert log.read() == ([], False, False, frozenset())
    with path.open("ab") as out:
        out.write(PREFIX + XID_62 + b" SUBSYSTEM=pci\n" + PREFIX + b"NVRM: Xid (PCI:0000:05:00): 79, x\n")
    assert [report.line for report in log.read().reports] == [("0000:86:00", 62), ("0000:05:00", 79)]
    log.close()


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        (b"145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x8)", "nonfatal"),
        (b"145, RLW_REMAP Fatal XC0 i0 Link 13 (0x0409a0c2 0x8)", "fatal"),
        (b"149, NETIR Fatal XC0 i0 Link -1 (0x000fe406)", "fatal"),
        (b"149, NETIR Nonfatal XC0 i0 Link -1 (0x000fe406)", "nonfatal"),
        (b"145, something else", ""),
        (b"62, RLW Nonfatal", ""),  # the severity of other codes is not read
        (b"145, pid=1, name= A Fatal", ""),
    ],
)
def test_the_severity_of_nvlink_errors_is_read(text: bytes, severity: str) -> None:
    report = parse_report(PREFIX + b"NVRM: Xid (PCI:0018:01:00): " + text)
    assert report is not None and report.severity == severity


@pytest.mark.parametrize(
    ("text", "probe"),
    [
        (b"nvidia: probe of 0000:11:00.0 failed with error -1\n", ("0000:11:00.0", False)),
        (b"nvidia 0000:11:00.0: probe with driver nvidia failed with error -1\n", ("0000:11:00.0", False)),
        (b"nvidia 10000:11:00.0: probe with driver nvidia failed with error -1\n", ("10000:11:00.0", False)),
        (b"NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:0dd8)\n", ("0000:01:00.0", True)),
        (b"nouveau: probe of 0000:11:00.0 failed with error -1\n", None),
        (b"nvidia 0000:11:00.0: enabling device (0140 -> 0142)\n", None),
        (b"usb 1-1: nvidia: probe of 0000:11:00.0 failed with error -1\n", None),
    ],
)
def test_a_failed_probe_is_read_with_its_address(text: bytes, probe: tuple[str, bool] | None) -> None:
    assert parse_probe(PREFIX + text) == probe
    assert parse_probe(b"12,1,1,-;" + text) is None, "a record of a process, not of the kernel"


def test_old_records_of_the_log_give_failed_probes_but_no_xids(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    lines = [b"NVRM: Xid (PCI:0000:86:00): 62, x", b"nvidia: probe of 0000:11:00.0 failed with error -1"]
    lines += [
        b"NVRM: The NVIDIA GPU 0000:01:00.0 (PCI ID: 10de:0dd8)",
        b"nvidia: probe of 0000:01:00.0 failed with error -1",
        b"NVRM: ignoring the legacy GPU 0000:02:00.0",
        b"nvidia: probe of 0000:02:00.0 failed with error -1",
    ]
    path.write_bytes(b"".join(PREFIX + line + b"\n" for line in lines))
    log = KernelLog(path)
    assert log.read_past() == {"0000:11:00.0"}, "a board that the driver does not support is not expected to work"
    with path.open("ab") as file:
        file.write(PREFIX + b"nvidia: probe of 0000:12:00.0 failed with error -1\n" + PREFIX + XID_62)
    batch = log.read()
    assert [report.line.xid for report in batch.reports] == [62]
    assert batch.probes == {"0000:12:00.0"}
    log.close()


def test_boards_that_the_driver_refuses_take_no_place_of_one_that_failed(tmp_path: Path) -> None:
    legacy = (b"NVRM: ignoring the legacy GPU %04x:01:00.0\n" % number for number in range(PROBES_MAX + 10))
    refused = [PREFIX + line for line in legacy]
    path = tmp_path / "kmsg"
    path.write_bytes(b"".join(refused) + PREFIX + b"nvidia: probe of ffff:11:00.0 failed with error -1\n")
    log = KernelLog(path)
    assert log.read_past() == {"ffff:11:00.0"}
    log.close()
