"""The processor time of a real cgroup, as the kernel counts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpu_exporter.diagnosis.host.cgroups import Cgroups
from tests.testbed.cgroups import ROOT, RealCgroups

UID = "5a89bcaa-3509-4375-83e1-b9e7a5712123"
# The process waits until the test has put it into its cgroup, works, prints a line, and ends.
WORK = """
import sys, time
sys.stdin.readline()
while time.process_time() < 1.0:
    pass
print(time.process_time(), flush=True)
"""


@pytest.fixture
def cgroups() -> Iterator[RealCgroups]:
    made = RealCgroups("cpuacct")
    yield made
    made.close()


def test_the_cpu_time_of_an_ended_process_remains_with_its_pod(cgroups: RealCgroups) -> None:
    command = [sys.executable, "-c", WORK]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        cgroups.put(worker.pid, f"kubepods/burstable/pod{UID}/{'a' * 64}")
        own_s = float(worker.communicate("go\n", timeout=60)[0])
    tree = Cgroups(ROOT)
    place = tree.find({("pod", UID)})["pod", UID]
    assert place.name == f"pod{UID}"
    reading = tree.read(place)
    assert reading is not None
    # The time before the process was moved is counted in its parent's cgroup.
    assert 0.8 <= reading.cpu_s <= own_s + 0.5
    assert reading.cpus is None or 0 < reading.cpus <= (os.cpu_count() or 1)
