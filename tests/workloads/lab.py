"""Runs the workloads in cgroups of their own and records the evidence: python -m tests.workloads.lab [--hook] [NAME ...]

With --hook the loops also report by the hook of docs/torch.md, into records of their own.

Needs root and a writable hierarchy of cgroups, version 1. Each record is one line of JSON in
tests/fixtures/causes/records.jsonl.gz: no pid, no path, no name of a person. A run is void if others used more than
FOREIGN_MAX of a CPU meanwhile; that is decided before its result is looked at, and the run is done again.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.model.evidence import HostEvidence
from gpu_exporter.diagnosis.host import evidence as host_evidence
from gpu_exporter.diagnosis.host.cgroups import Cgroups
from gpu_exporter.diagnosis.host.evidence import EvidenceReader
from gpu_exporter.diagnosis.host.subject import HostSubject, RankedGpu
from gpu_exporter_torch.file import VARIABLE
from tests.workloads.device import SimulatedDevice
from tests.workloads.score import HOOK_RECORDS, RECORDS
from tests.workloads.scripts import SCRIPTS, Place, Script

ROOT = Path("/sys/fs/cgroup")
LOOK_S = 5.0
SETTLE_S = 3.0  # imports, first samples
FOREIGN_MAX = 0.3  # CPUs
TRIES = 4
# The own network: lo, and a link to another namespace, which swallows what it gets.
NETWORK = (
    "ip link set lo up; ip link add out type veth peer name sink; unshare -n sleep 600 & sleep 0.5; "
    "ip link set sink netns $!; nsenter -t $! -n ip link set sink up; ip addr add 10.9.9.1/24 dev out; "
    "ip link set out up; ip neigh add 10.9.9.2 lladdr 02:00:00:00:00:02 dev out"
)
NO_LIMIT = 10**15  # bytes per second
CONTROLLERS = ("cpu", "cpuacct", "memory", "blkio")
WHO = ("job", "1")


def _disk() -> str:
    """The whole disk below the home folder, as major:minor."""
    number = Path.home().stat().st_dev
    folder = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    return ((folder if not (folder / "partition").exists() else folder.parent) / "dev").read_text().strip()


@contextmanager
def cgroup(script: Script) -> Iterator[PurePosixPath]:
    """A cgroup in each hierarchy, with the limits of the script. Its processes are ended at the end."""
    name = PurePosixPath(f"gpu-exporter-lab-{os.getpid()}")
    folders = [ROOT / controller / name for controller in CONTROLLERS]
    for folder in folders:
        folder.mkdir()
    try:
        if script.quota is not None:
            (ROOT / "cpu" / name / "cpu.cfs_quota_us").write_text(str(int(script.quota * 100_000)))
        if script.memory is not None:
            (ROOT / "memory" / name / "memory.limit_in_bytes").write_text(str(script.memory))
        for way in ("read", "write"):  # without a limit, newer kernels do not count what passes
            (ROOT / "blkio" / name / f"blkio.throttle.{way}_bps_device").write_text(f"{_disk()} {NO_LIMIT}")
        yield name
    finally:
        until = time.monotonic() + 20.0
        while pids := (folders[0] / "cgroup.procs").read_text().split():
            for pid in pids:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            assert time.monotonic() < until, "processes of the workload do not end"
            time.sleep(0.05)
        for folder in folders:
            folder.rmdir()


def start(script: Script, name: PurePosixPath, folder: Path) -> subprocess.Popen[bytes]:
    """The script in its cgroup, with its own mounts and network where it needs them."""
    into = "; ".join(f"echo $$ > {ROOT / controller / name}/cgroup.procs" for controller in CONTROLLERS)
    inside = ["python", "-m", "tests.workloads.lab", "--run", script.name, str(folder)]
    inside[0] = sys.executable
    command = " ".join(inside)
    if script.cpu is not None:
        command = f"taskset -c {script.cpu} {command}"
    if script.shm is not None:
        command = f"unshare -m sh -c 'mount -t tmpfs -o size={script.shm // 1024}k tmpfs /dev/shm && exec {command}'"
    elif script.network:
        command = f"unshare -n sh -c '{NETWORK}; exec {command}'"
    environment = {**os.environ, VARIABLE: str(folder / "training")}
    return subprocess.Popen(["sh", "-c", f"{into}; exec {command}"], stdin=subprocess.DEVNULL, env=environment)


def record(script: Script, *, with_hook: bool) -> dict[str, Any] | None:
    """One run; None if it is void."""
    host_evidence.INTERVAL_S, host_evidence.CPU_SHARE = 0.0, 1.0
    with tempfile.TemporaryDirectory(dir=Path.home()) as temporary, cgroup(script) as name:
        folder = Path(temporary)
        if with_hook:
            (folder / "training").mkdir()
        devices = [SimulatedDevice(folder / f"gpu{index}") for index in range(script.gpus)]
        child = start(script, name, folder)
        try:
            found = _watch(script, name, devices)
            if found is not None and with_hook:
                found["training"] = _read_reports(folder / "training")
            return found
        finally:
            child.kill()
            child.wait()


def _read_reports(folder: Path) -> list[dict[str, Any]]:
    """What the loop reported last, without the names of its run and its writer."""
    reports = [json.loads(path.read_text("ascii")) for path in sorted(folder.glob("*.json"))]
    return [{key: value for key, value in each.items() if key not in ("run", "writer")} for each in reports]


def _watch(script: Script, name: PurePosixPath, devices: Sequence[SimulatedDevice]) -> dict[str, Any] | None:
    reader = EvidenceReader(Cgroups(ROOT), SYSTEM_CLOCK, script.host_cpus, Path("/proc"), with_files=script.files)
    machine = os.cpu_count() or 1
    time.sleep(SETTLE_S)
    looks: list[dict[str, Any]] = []
    utilization: list[list[float]] = [[] for _ in devices]
    foreign: list[float] = []
    began = time.monotonic()
    next_look, last = began, [device.busy_s() for device in devices]
    last_at = began
    while time.monotonic() - began < script.seconds:
        if time.monotonic() >= next_look:
            next_look += LOOK_S
            for _, found in reader.read([_subject(script, devices)], {WHO: name}):
                foreign.append((found.host_busy or 0.0) * machine - (found.cores or 0.0))
                looks.append(_plain(script, found, began, machine))
        time.sleep(0.5)
        now = time.monotonic()
        for index, device in enumerate(devices):
            busy = device.busy_s()
            utilization[index].append(round(min(1.0, (busy - last[index]) / (now - last_at)), 3))
            last[index] = busy
        last_at = now
    if sum(foreign) / max(1, len(foreign)) > FOREIGN_MAX:
        print(f"{script.name}: void, others used {sum(foreign) / len(foreign):.2f} CPUs", flush=True)
        return None
    return {
        "script": script.name,
        "truth": sorted(script.truth),
        "hard": script.hard,
        "subject": script.subject,
        "is_new": script.is_new,
        "contexts": [len(device.pids()) for device in devices],
        "utilization": utilization,
        "looks": looks,
    }


def _subject(script: Script, devices: Sequence[SimulatedDevice]) -> HostSubject:
    near = frozenset(range(os.cpu_count() or 1)) - ({script.cpu} if script.cpu is not None else set())
    return HostSubject(
        WHO, tuple(RankedGpu(f"GPU-{index}", near, device.pids()) for index, device in enumerate(devices))
    )


def _plain(script: Script, found: HostEvidence, began: float, machine: int) -> dict[str, Any]:
    """A look as JSON. On a larger host, the same processes are a smaller part of its CPUs, and those that are not bound
    may run on all of them.
    """
    busy = None if found.host_busy is None else found.host_busy * machine / script.host_cpus
    seen = found.processes
    if seen is not None:
        free = {machine: script.host_cpus}
        if script.cpu is not None:  # one CPU of this machine stands for one socket
            free[1] = script.host_cpus // 2
        seen = seen._replace(
            cpus=free.get(seen.cpus, seen.cpus) if seen.cpus is not None else None,
            loader_cpus=free.get(seen.loader_cpus, seen.loader_cpus) if seen.loader_cpus is not None else None,
        )
    found = found._replace(start=found.start - began, end=found.end - began, host_busy=busy, processes=seen)
    values: Mapping[str, Any] = found._asdict() | {
        name: part._asdict() for name, part in (("processes", found.processes), ("files", found.files)) if part
    }
    return json.loads(json.dumps(values), parse_float=lambda text: float(f"{float(text):.5g}"))  # type: ignore[no-any-return]


def main(names: Sequence[str], *, with_hook: bool) -> None:
    chosen = [script for script in SCRIPTS if (script.name in names if names else not with_hook or script.hook)]
    old, path = {}, HOOK_RECORDS if with_hook else RECORDS
    if path.exists():
        with gzip.open(path, "rt", encoding="utf-8") as file:
            old = {each["script"]: each for each in map(json.loads, file)}
    for script in chosen:
        for _ in range(TRIES):
            found = record(script, with_hook=with_hook)
            if found is not None:
                old[script.name] = found
                print(f"{script.name}: {len(found['looks'])} looks", flush=True)
                break
        else:
            print(f"{script.name}: not run, the machine is too busy", flush=True)
        order = [each.name for each in SCRIPTS]
        lines = [json.dumps(old[name], separators=(",", ":")) for name in order if name in old]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), 9, mtime=0))


def run_inside(name: str, folder: str) -> None:
    """Be the workload."""
    script = next(each for each in SCRIPTS if each.name == name)
    devices = tuple(SimulatedDevice(Path(folder) / f"gpu{index}") for index in range(script.gpus))
    script.run(Place(devices, Path(folder)))


if __name__ == "__main__":
    assert shutil.which("unshare"), "unshare (util-linux) is missing"
    assert psutil.LINUX
    if sys.argv[1:2] == ["--run"]:
        run_inside(*sys.argv[2:])
    else:
        names = [name for name in sys.argv[1:] if name != "--hook"]
        main(names, with_hook="--hook" in sys.argv)
