"""Hostile files, too few threads, and a clock that jumps."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.component.attacks.attack_bench import HONEST, ORDER, SCENARIO, get, probe_ms
from tests.testbed.odd_host import OddHost
from tests.testbed.processes import GPU_EXPORTER, Processes, Running, fetch, free_port, wait_for


def test_a_recording_that_unpacks_to_1_gib_is_refused(tmp_path: Path, seen: dict[str, str]) -> None:
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", 1) as file:
        for _ in range(1024):
            file.write(bytes(2**20))
    began = time.monotonic()
    process = subprocess.Popen([*GPU_EXPORTER, "--once", f"--devices.replay={path}"], stderr=subprocess.PIPE)
    assert process.stderr is not None
    text = process.stderr.read().decode()
    process.stderr.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert (process.returncode, "holds more than 256 MiB" in text) == (3, True)
    seen[ORDER[13]] = (
        f"status 3 after {time.monotonic() - began:.1f} s: the file holds more than 256 MiB; peak {usage.ru_maxrss / 1024:.0f} MiB"
    )


def test_changed_state_files_are_ignored_and_replaced(
    start: Callable[..., tuple[Running, int]], seen: dict[str, str], tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "state").write_text("gpu-exporter-state 2 00000000\n" + "[" * 100_000)
    (state / "devices.json").write_text('{"version": 1, "boot_id": "x", "devices": ' + "[" * 100_000)
    running, port = start(f"--state.directory={state}")
    assert "counters start at 0: the state file is damaged" in running.log()
    assert get(port, "/metrics", HONEST)[0] == 200
    wait_for(lambda: (state / "state").read_text().startswith("gpu-exporter-state") or None, "a new state file")
    seen[ORDER[14]] = "counters start at 0; the exporter replaces both files"
    wait_for(lambda: "[[[" not in (state / "devices.json").read_text() or None, "a new list of devices")
    wait_for(lambda: "[[[" not in (state / "state").read_text() or None, "a new state file")
    assert running.stop() == 0


def test_a_textfile_is_not_written_to_a_world_writable_directory(
    processes: Processes, seen: dict[str, str], tmp_path: Path
) -> None:
    directory = tmp_path / "textfile"
    directory.mkdir()
    file = directory / "gpu.prom"
    (tmp_path / "scenario.yaml").write_text(SCENARIO)
    flags = (
        f"--devices.scenario={tmp_path / 'scenario.yaml'}",
        "--state.directory=",
        f"--textfile.output={file}",
        "--textfile.interval=1s",
    )
    complaint = f"cannot write {file}: every user can write in it (mode 0777): chmod o-w"
    directory.chmod(0o777)
    refused = subprocess.run([*GPU_EXPORTER, *flags], capture_output=True, text=True, check=False, timeout=60)
    assert (refused.returncode, complaint in refused.stderr) == (2, True), refused.stderr
    assert not list(directory.iterdir())
    directory.chmod(0o755)
    running = processes.start([*GPU_EXPORTER, *flags])
    wait_for(lambda: file.is_file() or None, "the file")
    directory.chmod(0o777)
    wait_for(lambda: "every user can write in it (mode 0777): chmod o-w" in running.log() or None, "the complaint")
    written = file.stat().st_mtime_ns
    directory.chmod(0o755)
    wait_for(lambda: file.stat().st_mtime_ns > written or None, "a newer file")
    seen[ORDER[15]] = (
        "the exporter does not write the file; at its start, it ends with status 2; a running exporter writes again after "
        "`chmod o-w`"
    )


@pytest.mark.slow
def test_the_exporter_keeps_running_when_no_thread_can_be_started(
    start: Callable[..., tuple[Running, int]], seen: dict[str, str], tmp_path: Path
) -> None:
    host = OddHost(tmp_path / "host")
    scenario = tmp_path / "scenario.yaml"
    running, port = start(host=host)
    host.has_threads(False)
    wait_for(lambda: "attribution scenario: cannot start a thread" in running.log() or None, "the complaint")
    assert get(port, "/metrics", HONEST)[0] == 200
    slowest = probe_ms(port)
    for number, said in (
        (signal.SIGUSR1, "the exporter has released the driver"),
        (signal.SIGHUP, "the driver is opened again"),
    ):
        running.process.send_signal(number)
        wait_for(lambda said=said: said in running.log() or None, said)
    host.has_threads(True)
    wait_for(lambda: "attribution scenario: answers again" in running.log() or None, "the way back")
    wait_for(lambda: 'gpu_up{gpu="0"' in (fetch(f"http://127.0.0.1:{port}/metrics") or "") or None, "the GPUs")
    host.has_threads(False)
    assert running.stop() == 0
    assert "Traceback" not in running.log()
    seen[ORDER[16]] = (
        f"scrapes and probes take at most {slowest:.0f} ms; SIGUSR1, SIGHUP and SIGTERM work; the log names the "
        "limits; attribution recovers"
    )
    ended = subprocess.run(
        [*GPU_EXPORTER, f"--devices.scenario={scenario}", "--state.directory=", f"--web.listen-address=:{free_port()}"],
        env=os.environ | host.environment,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False)
    assert "raise the limit of tasks (TasksMax= of the unit" in ended.stderr
    seen[ORDER[17]] = f"status {ended.returncode}; a one-line error names the limits"


def observed_s(port: int) -> float:
    found = re.search(
        r"^gpu_observed_seconds_total\{gpu=\"0\".*} (\S+)", fetch(f"http://127.0.0.1:{port}/metrics") or "", re.M
    )
    assert found is not None
    return float(found[1])


def test_activity_is_known_soon_after_a_clock_jump(
    start: Callable[..., tuple[Running, int]], seen: dict[str, str], tmp_path: Path
) -> None:
    """Only forwards. After a jump backwards, a ring may hold future timestamps for two minutes (test_driver_ring.py)."""
    host = OddHost(tmp_path / "host")
    running, port = start(host=host)
    wait_for(lambda: observed_s(port) > 0, "a first second")
    host.step(3600)
    wait_for(lambda: "the wall clock jumped by +3600 s" in running.log() or None, "the log")
    before, began = observed_s(port), time.monotonic()
    wait_for(lambda: observed_s(port) > before + 1.0, "activity to be known again")
    took = time.monotonic() - began
    assert running.stop() == 0
    seen[ORDER[18]] = f"a line in the log; activity is known again after {took:.0f} s"
