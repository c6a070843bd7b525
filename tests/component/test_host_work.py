"""The processor time of a real cgroup, as the kernel counts it."""

from __future__ import annotations

import os
import subprocess
import sys

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.diagnosis.host.cgroups import Cgroups
from gpu_exporter.diagnosis.host.work import SPAN_MIN_S, HostWorks
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


def test_the_cores_of_a_pod_are_its_cpu_seconds_per_second(cgroups: RealCgroups) -> None:
    """One thread on a host of many CPUs: a share says nothing without the number of CPUs."""
    clock, host_cpus = ManualClock(), 1024
    works = HostWorks(Cgroups(ROOT), clock, host_cpus)
    held = [Allocation(UnitId("GPU-0"), Holder(HolderKey("kubernetes", UID), pod_uid=UID))]
    with subprocess.Popen(
        [sys.executable, "-c", WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as one:
        cgroups.put(one.pid, f"kubepods/burstable/pod{UID}/{'a' * 64}")
        works.read(held, 4)
        own_s = float(one.communicate("go\n", timeout=60)[0])
    clock.advance(SPAN_MIN_S)
    works.read(held, 4)
    work = works.works["pod", UID]
    assert work.cpus == host_cpus / 4
    assert 0.8 <= work.cpu_ratio * work.cpus * SPAN_MIN_S <= own_s + 0.5
