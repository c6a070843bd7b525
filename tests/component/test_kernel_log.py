"""XIDs that the driver reports only in the kernel's log, in addition to the driver's events, on a running exporter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testbed.faults import Rig, Seen
from tests.testbed.kmsg import Kmsg
from tests.testbed.nvml.feeder import NvmlTable
from tests.testbed.processes import Processes, run_exporter, wait_for

GPU_3 = "0000:13:00"


@pytest.fixture
def rig(nvml_table: NvmlTable, nvml_environment: dict[str, str], processes: Processes, tmp_path: Path) -> Rig:
    return Rig(nvml_table, nvml_environment, processes, tmp_path, 4)


@pytest.fixture
def kmsg(tmp_path: Path) -> Iterator[Kmsg]:
    kmsg = Kmsg(tmp_path / "kmsg")
    yield kmsg
    kmsg.close()


def events(seen: Seen, gpu: str, kind: str) -> float | None:
    """gpu_xid_events_total of one class."""
    for line in seen.text.splitlines():
        if line.startswith(f'gpu_xid_events_total{{gpu="{gpu}"') and f'class="{kind}"' in line:
            return float(line.split()[-1])
    return None


def test_an_xid_without_an_event_is_counted_too(rig: Rig, kmsg: Kmsg) -> None:
    running, url = rig.start("--collector.xid.kmsg", f"--path.kmsg={kmsg.path}")
    rig.wait_until(url, "the counts to begin at 0", lambda seen: events(seen, "3", "hardware") == 0)
    kmsg.write(f"NVRM: Xid (PCI:{GPU_3}): 62, pid=4711, name=secret, 32a5(2d48) 00000000")
    kmsg.write(f"NVRM: Xid (PCI:{GPU_3}): 79, GPU has fallen off the bus.")
    kmsg.write(f"NVRM: Xid (PCI:{GPU_3}): 92, High single-bit ECC error rate")
    kmsg.write(f"NVRM: Xid (PCI:{GPU_3}): 95, a user wrote this", priority=12)
    kmsg.write("nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 24007, Fatal, Link 46 sourcetrack timeout error (First)")
    rig.table.push_event(3, 79)  # for 79 the driver also raises an event
    seen = rig.wait_until(url, "XID 62", lambda seen: events(seen, "3", "hardware") == 2)
    assert f'gpu_xid_errors_total{{gpu="3",uuid="{rig.table.table.devices[3].uuid.decode()}",xid="62"' in seen.text
    seen = rig.wait_until(url, "XID 92", lambda seen: events(seen, "3", "information") == 1)
    assert 'xid="95"' not in seen.text
    switch = 'pci_bus_id="0000:c1:00.0",sxid="24007",severity="fatal"'
    assert f"gpu_nvswitch_sxid_errors_total{{{switch}}} 1\n" in seen.text
    assert f"gpu_nvswitch_sxid_last_timestamp_seconds{{{switch}}} " in seen.text
    assert [events(seen, str(gpu), "hardware") for gpu in range(4)] == [0, 0, 0, 2]

    def stays(seen: Seen) -> None:
        assert events(seen, "3", "hardware") == 2

    rig.hold(url, 3.0, stays)  # longer than the exporter waits for the event of a line
    assert 'gpu_exporter_collector_success{collector="xid.kmsg"} 1' in seen.text
    assert "secret" not in seen.text + running.log()
    assert running.stop() == 0


def test_a_missing_kernel_log_fails_only_its_own_collector(rig: Rig, tmp_path: Path) -> None:
    running, url = rig.start("--collector.xid.kmsg", f"--path.kmsg={tmp_path / 'none'}")
    failed = 'gpu_exporter_collector_success{collector="xid.kmsg"} 0'
    seen = rig.wait_until(url, "the failure", lambda seen: failed in seen.text)
    assert (
        'gpu_exporter_collector_success{collector="xid"} 1'
        in rig.wait_until(url, "events", lambda seen: 'collector="xid"}' in seen.text).text
    )
    assert rig.fresh(seen, "A") == rig.all()
    wait_for(lambda: running.log().count("XIDs without an NVML event are not counted") == 1, "one line in the log")


def test_without_the_flag_the_exporter_does_not_read_the_kernel_log(rig: Rig, kmsg: Kmsg) -> None:
    running, url = rig.start(f"--path.kmsg={kmsg.path}")
    seen = rig.wait_until(url, "all GPUs", lambda seen: rig.fresh(seen, "A") == rig.all())
    assert "xid.kmsg" not in seen.text
    handles = Path(f"/proc/{running.process.pid}/fd")
    assert str(kmsg.path) not in {str(handle.readlink()) for handle in handles.iterdir()}


def test_the_kernel_log_flag_without_its_collector_is_refused() -> None:
    done = run_exporter("--collector.xid.kmsg", "--no-collector.xid")
    assert done.returncode == 2
    assert "--collector.xid.kmsg requires --collector.xid, which is off" in done.stderr
