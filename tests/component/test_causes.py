"""A cause through the C library and the daemon: real threads under a real CPU quota, from the kernel to the page."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_exporter.diagnosis.host.cgroups import Cgroups
from tests.testbed.cgroups import ROOT, RealCgroups
from tests.testbed.nvml.feeder import NvmlTable
from tests.testbed.process_node import Node, job
from tests.testbed.processes import Processes, fetch, wait_for

pytestmark = pytest.mark.slow

SECRET = "hunter2-of-the-owner"
SETTINGS = """
sampling: {interval: 1s}
attribution: {interval: 1s}
diagnosis: {interval: 1s, window: 20s, hold: 1s}
"""
# Twelve threads that work outside of the interpreter's lock, as OpenMP's do.
CROWD = """
import os, threading, time, zlib
data = os.urandom(1 << 18)
def work():
    while True:
        zlib.compress(data, 6)
for _ in range(12):
    threading.Thread(target=work, daemon=True).start()
time.sleep(600)
"""


@contextlib.contextmanager
def quota_of(place: Path, cpus: float, pid: int) -> Iterator[None]:
    """A CFS quota for the same place in the hierarchy of the cpu controller.

    Its weight is the largest, so that the quota runs out on a busy machine too: otherwise others take the CPUs.
    """
    folder = ROOT / "cpu" / place
    folder.mkdir(parents=True)
    for each in (folder, *folder.parents):
        if each == ROOT / "cpu":
            break
        (each / "cpu.shares").write_text("262144")
    (folder / "cpu.cfs_quota_us").write_text(str(int(cpus * 100_000)))
    (folder / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        os.kill(pid, 9)
        until = time.monotonic() + 20.0
        while folder != ROOT / "cpu":
            with contextlib.suppress(OSError):
                folder.rmdir()
                folder = folder.parent
            assert time.monotonic() < until, f"{folder} could not be removed"


def test_threads_that_fight_for_a_quota_are_named_with_the_advice_and_without_their_secrets(
    processes: Processes,
    nvml_environment: dict[str, str],
    nvml_table: NvmlTable,
    cgroups: RealCgroups,
    tmp_path: Path,
) -> None:
    crowd = subprocess.Popen(
        [sys.executable, "-c", CROWD, SECRET], env={**os.environ, "TOKEN": SECRET}, stdin=subprocess.DEVNULL
    )
    low = [{"model": "H100", "load": {"kind": "constant", "value": 0.3}}]
    node = Node(processes, nvml_environment, nvml_table, cgroups, processes, tmp_path, low, SETTINGS)
    try:
        cgroups.put(crowd.pid, job(77))
        place = Cgroups(ROOT).find({("job", "77")})["job", "77"]
        with quota_of(Path(place), 0.3, crowd.pid):
            node.hold({"uuid": node.uuids[0], "job": "77"})
            node.list_on(0, crowd.pid)
            url = node.start("--log.level=debug")

            def cause() -> dict[str, str] | None:
                status = json.loads(fetch(f"{url}/api/v1/status") or "{}")
                found = [each for one in status.get("allocations", []) for each in one["causes"]]
                return found[0] if found else None

            found = wait_for(cause, "the cause", each_s=1.0)
            assert (found["name"], found["confidence"]) == ("cpu_oversubscribed", "high")
            assert found["advice"].startswith("set OMP_NUM_THREADS=1 ")
            texts = [fetch(f"{url}{path}") or "" for path in ("/metrics", "/", "/api/v1/status")]
            assert 'cause="cpu_oversubscribed",confidence="high"' in texts[0]
            assert "cpu_oversubscribed" in texts[1]
            everything = "".join(texts) + node.log()
            assert SECRET not in everything
            assert f"{crowd.pid}" not in "".join(texts)
    finally:
        crowd.kill()
        crowd.wait()
        node.close()
