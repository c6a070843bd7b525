"""A stall through the C library, the daemon and its page, with windows of seconds, and the host of real processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.model.readings import HostProgress
from gpu_exporter.common.procfs import Procfs
from gpu_exporter.diagnosis.host.cgroups import Cgroups
from gpu_exporter.diagnosis.host.progress import ProgressReader, Suspect
from tests.testbed.cgroups import ROOT, RealCgroups
from tests.testbed.faults import QUIET, look
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import Processes, fetch, wait_for

pytestmark = pytest.mark.slow

UID = "5a89bcaa-3509-4375-83e1-b9e7a5712124"
SETTINGS = """
sampling: {interval: 1s}
attribution: {interval: 1s}
diagnosis: {interval: 1s, window: 20s}
stalls: {after: 20s, proven_after: 20s}
"""
WORK = [(0, "rest"), (4, "train"), (20, "hang"), (70, "train")]
# Each line from the test lets it work for so many seconds of processor time.
BURN = """
import sys, time
for line in sys.stdin:
    until = time.process_time() + float(line)
    while time.process_time() < until:
        pass
    print("done", flush=True)
"""


def test_a_job_that_hangs_is_named_and_its_seconds_are_stalled(
    processes: Processes, nvml_environment: dict[str, str], nvml_table: NvmlTable, tmp_path: Path
) -> None:
    work = [{"at": at, "level": level} for at, level in WORK]
    late = [{"at": at, "level": level.replace("hang", "context")} for at, level in WORK]
    scenario = parse_scenario({"gpus": [{"model": "H100", "work": work}, {"model": "H100", "work": late}]})
    uuid = scenario.gpus[0].uuid
    feeder = ScenarioFeeder(scenario, nvml_table)
    feeder.start()
    (tmp_path / "settings.yaml").write_text(SETTINGS)
    held = ", ".join(f'{{"uuid": "{gpu.uuid}", "job": "77"}}' for gpu in scenario.gpus)
    (tmp_path / "holders.yaml").write_text(f"[{held}]")
    flags = (f"--config.file={tmp_path / 'settings.yaml'}", f"--attribution.static={tmp_path / 'holders.yaml'}")
    try:
        running, url = processes.start_exporter(
            *QUIET, *flags, environment=nvml_environment, program=(sys.executable, "-m", "tests.testbed.short_stalls")
        )

        def value(name: str) -> float | None:
            lines = (line for line in look(url).text.splitlines() if line.startswith(f"{name}{{") and uuid in line)
            line = next(lines, None)
            return None if line is None else float(line.rpartition(" ")[2])

        run = wait_for(lambda: value("gpu_allocation_stalled_run_seconds") or None, "the stall", each_s=0.5)
        assert 20.0 <= run < 30.0
        wait_for(lambda: 'state="stalled"' in look(url).text or None, "the state", each_s=0.5)
        allocations = json.loads(fetch(f"{url}/api/v1/status") or "")["allocations"]
        (allocation,) = (each for each in allocations if each["uuid"] == uuid)
        assert allocation["stall"]["confidence"] == "medium", "the network of this host is not the job's own"
        assert re.search(r"100 % busy; at (99|100|101) W, .*; against it: not known", allocation["evidence"])
        # The first reading of the hang counts as busy. It is long if this host had no time for the exporter.
        assert allocation["stalled_seconds"] > 0.0 and allocation["pending_seconds"] == 0.0
        busy = allocation["busy_seconds"]
        wait_for(lambda: value("gpu_allocation_stalled_run_seconds") == 0.0 or None, "work", each_s=0.5)
        assert 30.0 <= (value("gpu_allocation_stalled_seconds_total") or 0.0) <= 56.0
        wait_for(lambda: (value("gpu_allocation_busy_seconds_total") or 0.0) > busy + 1.0 or None, "busy time")
        assert running.process.poll() is None
    finally:
        feeder.stop()


class Burner:
    """A process in the cgroup of a pod."""

    def __init__(self, cgroups: RealCgroups) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        cgroups.put(self.pid, f"kubepods/burstable/pod{UID}/{'b' * 64}")

    def burn(self, seconds: float) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def close(self) -> None:
        self._process.communicate(timeout=20)


def test_real_processes_that_spin_are_no_progress_and_their_loaders_are(cgroups: RealCgroups) -> None:
    """On cgroup v1 where the machine has it. The tests' own network is the host's, so it stays unknown."""
    tree, who = Cgroups(ROOT), ("pod", UID)
    spinner, loader = Burner(cgroups), Burner(cgroups)
    try:
        place = {who: tree.find({who})[who]}
        reader = ProgressReader(tree, SYSTEM_CLOCK, Procfs(Path("/proc")))

        def looked() -> HostProgress:
            (found,) = reader.read([Suspect(who, (spinner.pid,))], place)
            return found[1]

        assert list(reader.read([Suspect(who, (spinner.pid,))], place)) == []
        spinner.burn(1.0)
        seen = looked()
        assert seen.loaders_cores is not None and seen.loaders_cores * (seen.end - seen.start) < 0.05
        assert (seen.new_process, seen.network) == (False, None)
        loader.burn(0.5)
        seen = looked()
        assert seen.loaders_cores is not None
        assert seen.loaders_cores * (seen.end - seen.start) == pytest.approx(0.5, abs=0.1)
        another = Burner(cgroups)
        spinner.burn(0.05)
        assert looked().new_process is True
        another.close()
    finally:
        spinner.close()
        loader.close()
