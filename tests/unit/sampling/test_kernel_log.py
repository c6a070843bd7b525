"""XIDs of the kernel's log are counted if the driver raises no event for them, and never twice."""

from __future__ import annotations

import errno
import logging
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.devices.kmsg import KernelLog
from gpu_exporter.agent.devices.protocol import XidEvent
from gpu_exporter.agent.sampling import kernel_log
from gpu_exporter.agent.sampling.events import XidBook
from gpu_exporter.agent.sampling.kernel_log import SAME_S, WAITING_MAX, KernelLogLoop
from gpu_exporter.agent.sampling.switches import COUNTS_MAX
from gpu_exporter.common.clock import ManualClock, SystemClock

GPUS = {"0000:86:00": "GPU-0", "0000:05:00": "GPU-1"}


class Bench:
    """A loop whose `look` is called by the test."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self.clock = ManualClock()
        self.book = XidBook()
        self.changes = 0
        self.loop = KernelLogLoop(path, self.book, lambda: GPUS, self.clock, self._note)
        self._records: list[bytes | OSError] = []
        self.log = KernelLog(path, self._read)

    def _read(self, _handle: int, _size: int) -> bytes:
        record = self._records.pop(0) if self._records else b""
        if isinstance(record, OSError):
            raise record
        return record

    def _note(self) -> None:
        self.changes += 1

    def line(self, xid: int, address: str = "0000:86:00") -> None:
        self._records.append(f"4,1,1,-;NVRM: Xid (PCI:{address}): {xid}, pid=4711, name=secret, x\n".encode())

    def switch(self, sxid: int, text: str, number: int = 0) -> None:
        record = f"3,1,1,-;nvidia-nvswitch{number}: SXid (PCI:0000:c{number}:00.0): {sxid}, {text}\n"
        self._records.append(record.encode())

    def overwrite(self) -> None:
        """The ring has overwritten unread records, as the kernel reports it."""
        self._records.append(OSError(errno.EPIPE, "Broken pipe"))

    def event(self, xid: int, uuid: str = "GPU-0") -> None:
        self.book.count(XidEvent(uuid, xid), self.clock.wall(), self.clock.monotonic())

    def look(self, after_s: float = 0.0) -> None:
        self.clock.advance(after_s)
        assert not self.loop.look(self.log)

    def counts(self, uuid: str = "GPU-0") -> dict[int, int]:
        counts = self.book.counts(uuid)
        assert counts is not None
        return {xid: number for xid, _, number, _ in counts.codes}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "kmsg")


def test_an_xid_without_an_event_is_counted_for_its_gpu_at_the_time_of_its_report(bench: Bench) -> None:
    bench.look()
    assert (bench.counts(), bench.counts("GPU-1")) == ({}, {})  # before the first XID the count is 0, not unknown
    bench.line(62)
    bench.look()
    reported = bench.clock.wall()
    assert bench.counts() == {}
    bench.look(SAME_S)
    counts = bench.book.counts("GPU-0")
    assert counts is not None
    assert counts.codes == ((62, "hardware", 1, reported),)
    assert bench.counts("GPU-1") == {}
    assert bench.changes == 1
    bench.look(10.0)
    assert bench.counts() == {62: 1}


@pytest.mark.parametrize("gap_s", [-SAME_S, -1.0, 0.0, 1.0, SAME_S])
def test_a_line_and_an_event_within_two_seconds_are_one_xid(bench: Bench, gap_s: float) -> None:
    """`gap_s`: time from the line to the event."""
    if gap_s < 0:
        bench.event(79)
        bench.clock.advance(-gap_s)
    bench.line(79)
    bench.look()
    if gap_s >= 0:
        bench.clock.advance(gap_s)
        bench.event(79)
    bench.look(SAME_S)
    assert bench.counts() == {79: 1}


@pytest.mark.parametrize(("xid", "uuid"), [(62, "GPU-0"), (79, "GPU-1")], ids=["another code", "another GPU"])
def test_an_event_with_another_code_or_gpu_does_not_hide_a_line(bench: Bench, xid: int, uuid: str) -> None:
    bench.line(79)
    bench.look()
    bench.event(xid, uuid)
    bench.look(SAME_S)
    assert bench.counts()[79] == 1


def test_an_old_event_does_not_hide_a_line(bench: Bench) -> None:
    bench.event(79)
    bench.clock.advance(SAME_S + 0.1)
    bench.line(79)
    bench.look()
    bench.look(SAME_S)
    assert bench.counts() == {79: 2}


def test_an_xid_of_an_unknown_gpu_is_logged_once_and_not_counted(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        bench.line(62, "0000:99:00")
    bench.look()
    bench.look(SAME_S)
    assert (bench.counts(), bench.counts("GPU-1")) == ({}, {})
    assert [r.getMessage().partition(": ")[2] for r in caplog.records] == [
        "XID 62 is not counted: 0000:99:00 is not a known GPU"
    ]


def test_the_exporters_log_names_no_process(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    bench.line(62)
    bench.look()
    bench.look(SAME_S)
    assert [r.getMessage() for r in caplog.records] == ["gpu GPU-0: XID 62 (hardware), reported by the kernel's log"]


def test_a_flood_of_xid_lines_is_logged_once_a_minute_with_the_number_of_repeats(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(240):  # one every half second, for two minutes
        bench.line(62)
        bench.look(0.5)
    bench.line(79)
    for _ in range(300):
        bench.look(0.5)
    assert bench.counts() == {62: 240, 79: 1}
    assert [r.getMessage() for r in caplog.records] == [
        "gpu GPU-0: XID 62 (hardware), reported by the kernel's log",
        "gpu GPU-0: XID 62 (hardware), reported by the kernel's log, 120 times since this was last logged",
        "gpu GPU-0: XID 79 (hardware), reported by the kernel's log",
        "gpu GPU-0: XID 62 (hardware), reported by the kernel's log, 119 times since this was last logged",
    ]


def test_lost_records_are_logged_at_most_once_a_minute(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    path = bench.loop._path
    for _ in range(121):
        bench.overwrite()
        bench.look(0.5)
    assert [r.getMessage() for r in caplog.records] == [
        f"{path}: the kernel overwrote records before the exporter read them; the XIDs in them are not counted",
        (
            f"{path}: the kernel overwrote records before the exporter read them; the XIDs in them are not counted, "
            "120 times since this was last logged"
        ),
    ]


def test_the_number_of_waiting_lines_is_limited(bench: Bench) -> None:
    for _ in range(WAITING_MAX + 5):
        bench.line(62)
    while bench.loop.look(bench.log):
        pass
    assert bench.counts() == {62: 5}
    bench.look(SAME_S)
    assert bench.counts() == {62: WAITING_MAX + 5}


@given(st.lists(st.tuples(st.sampled_from(("line", "event")), st.integers(0, 20)), max_size=20))
def test_every_event_counts_and_every_line_without_a_near_event(steps: list[tuple[str, int]]) -> None:
    """With a look every quarter of a second, exactly the lines without an event within two seconds count additionally."""
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory) / "kmsg")
        lines: list[float] = []
        events: list[float] = []
        for kind, quarters in steps:
            for _ in range(quarters):
                bench.look(0.25)
            if kind == "line":
                lines.append(bench.clock.monotonic())
                bench.line(79)
                bench.look()
            else:
                events.append(bench.clock.monotonic())
                bench.event(79)
        for _ in range(9):
            bench.look(0.25)
        bench.log.close()
    alone = [line for line in lines if all(abs(line - event) > SAME_S for event in events)]
    # At exactly two seconds the result depends on whether the look or the event comes first.
    near = [line for line in lines if all(abs(line - event) >= SAME_S for event in events)]
    assert len(events) + len(alone) <= bench.counts().get(79, 0) <= len(events) + len(near)


def test_an_unreadable_kernel_log_is_reported_once_with_a_remedy_and_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_log, "RETRY_S", 0.01)
    path, opened = tmp_path / "kmsg", threading.Event()
    failures = 0

    def note() -> None:
        nonlocal failures
        failures += 1
        if failures == 5:
            path.touch()

    loop = KernelLogLoop(path, XidBook(), lambda: opened.set() or GPUS, SystemClock(), note)
    loop.start()
    assert opened.wait(60.0)
    loop.ask_to_stop()
    assert loop.join(60.0)
    assert failures == 5
    assert loop.outcome is not None
    assert loop.outcome.success
    (record,) = caplog.records
    assert record.getMessage().startswith(f"cannot read {path} as uid ")
    assert record.getMessage().endswith(
        ": No such file or directory; XIDs without an NVML event are not counted; grant CAP_SYSLOG "
        "(container: privileged, with the device), or omit --collector.xid.kmsg"
    )


def test_a_gpu_that_fell_off_the_bus_is_one_xid_in_every_format(bench: Bench) -> None:
    told = b"4,1,1,-;NVRM: GPU 0000:86:00.0: GPU has fallen off the bus.\n"
    bench._records += [told, told]
    bench.line(79)
    bench._records.append(told)
    bench.look()
    bench.look(SAME_S)
    assert bench.counts() == {79: 1}
    bench._records.append(told)  # without a number, as some drivers write it
    bench.look(60.0)
    bench.look(SAME_S)
    assert bench.counts() == {79: 2}


def test_the_class_of_an_nvlink_error_is_the_severity_in_its_text(bench: Bench) -> None:
    for word in ("Nonfatal", "Fatal", "Nonfatal"):
        bench._records.append(f"4,1,1,-;NVRM: Xid (PCI:0000:86:00): 145, RLW_RXPIPE {word} XC0\n".encode())
        bench.look(60.0)
    bench.look(SAME_S)
    counts = bench.book.counts("GPU-0")
    assert counts is not None
    assert [code[:3] for code in counts.codes] == [(145, "hardware", 1), (145, "information", 2)]


def test_each_failed_probe_is_reported(tmp_path: Path) -> None:
    told: list[frozenset[str]] = []
    bench = Bench(tmp_path / "kmsg")
    bench.loop._note_probes = told.append
    for _ in range(2):
        bench._records.append(b"4,1,1,-;nvidia: probe of 0000:11:00.0 failed with error -1\n")
        bench.look()
    bench.look()
    assert told == [{"0000:11:00.0"}] * 2, "it may have answered in between"


def sxids(bench: Bench) -> list[tuple[str, int, str, int]]:
    """Switch, code, severity and number."""
    return [count[:4] for count in bench.loop.switches.counts()]


def test_sxids_are_counted_by_switch_code_and_severity(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.look()
    assert sxids(bench) == []
    for link in (44, 45):
        bench.switch(22013, f"Non-fatal, Link {link} Minion Link DLREQ interrupt")
        bench.switch(22013, f"Severity 0 Engine instance {link} Sub-engine instance 00")
        bench.switch(22013, "Data {0x0000002c, 0x0000002c}")
    bench.switch(24007, "Fatal, Link 28 sourcetrack timeout error (First)", 1)
    bench.switch(10007, "IO failure", 1)
    bench.look()
    assert sxids(bench) == [
        ("0000:c0:00.0", 22013, "nonfatal", 2),
        ("0000:c1:00.0", 10007, "unknown", 1),
        ("0000:c1:00.0", 24007, "fatal", 1),
    ]
    assert {count.last_wall for count in bench.loop.switches.counts()} == {bench.clock.wall()}
    assert bench.changes == 4
    assert bench.counts() == {}
    assert [record.getMessage() for record in caplog.records] == [
        f"NVSwitch 0000:{switch}:00.0: SXid {sxid} ({severity}), reported by the kernel's log"
        for switch, sxid, severity in (
            ("c0", 22013, "not fatal"),
            ("c1", 24007, "fatal"),
            ("c1", 10007, "severity unknown"),
        )
    ]


def test_a_detail_without_the_record_of_its_error_counts_as_an_error(bench: Bench) -> None:
    bench.overwrite()
    bench.switch(12028, "Data {0x000001c0, 0x00bd5c8a}")
    bench.switch(12028, "Severity 1 Engine instance 01 Sub-engine instance 00")
    bench.look()
    assert sxids(bench) == [("0000:c0:00.0", 12028, "unknown", 1)]
    bench.switch(12028, "Data {0x000001c0, 0x00bd5c8a}", 1)  # of another switch
    bench.switch(12028, "Data {0x000001c0, 0x00bd5c8a}")
    bench.look(SAME_S + 1)
    assert sxids(bench) == [("0000:c0:00.0", 12028, "unknown", 2), ("0000:c1:00.0", 12028, "unknown", 1)]


def test_the_number_of_different_sxids_is_limited(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for sxid in range(COUNTS_MAX + 5):
        bench.switch(10000 + sxid, "Fatal, x")
    bench.switch(10000, "Fatal, x")
    bench.look()
    assert len(sxids(bench)) == COUNTS_MAX
    assert sxids(bench)[0] == ("0000:c0:00.0", 10000, "fatal", 2)
    assert caplog.text.count("is not counted: the limit of") == 1
