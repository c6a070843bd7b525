"""Finds the pod, job or container that owns each process on a GPU. The driver lists the pids, /proc shows their owners.

For each process, the exporter reads its cgroup, its start time, and whether it is NVIDIA's MPS server (procfs.py). The
driver's pids are pids of the host, so /proc must be the host's: a pod needs hostPID, or the host's /proc as a mount
with --path.procfs. The process kthreadd, which only the kernel starts, shows that a /proc is the host's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.common.cgroup import ProcessOwner, parse_cgroup
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.holders import Use
from gpu_exporter.common.model.readings import DeviceSnapshot, GpuProcess, ProcessList, ProcessPeriod
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.procfs import Procfs

UNIT_MAX = 256  # most processes of one GPU to look up; the owners of others are unknown
# NVIDIA's MPS server runs the kernels of all its clients, and may run in its own pod. Linux keeps 15 bytes of its name.
MPS_SERVER = "nvidia-cuda-mps"


class UnitOwners(NamedTuple):
    """The distinct owners of the processes on one unit, each with its use of the unit.

    `is_complete`: the owner of every process on the unit is known.
    """

    uses: Mapping[ProcessOwner, Use]
    is_complete: bool


Owners = Mapping[UnitId, UnitOwners]
"""For each unit whose processes the driver has listed. The owners of a missing unit are unknown."""


class OwnedPeriod(NamedTuple):
    """The work of each owner's processes on one whole GPU over (start, end], monotonic seconds.

    `shares`: (owner, ratio 0 to 1). The owner is None if the lookup failed; the ratio is None if the driver lists the
    process with zeros only.
    `problem`: why the driver reports nothing, "" if it reports.
    """

    start: float
    end: float
    shares: tuple[tuple[ProcessOwner | None, float | None], ...]
    problem: str = ""


def without_owners(period: ProcessPeriod) -> OwnedPeriod:
    """Converts a period without looking up owners, for a node on which the owners of processes are not visible."""
    return OwnedPeriod(period.start, period.end, tuple((None, each.ratio) for each in period.shares), period.problem)


class ProcessOwners:
    """Looks up the owners of processes. `procfs`: path of the host's /proc."""

    def __init__(
        self,
        procfs: Path,
        clock: Clock,
        since_boot: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        pod_logs: Path | None = None,
    ) -> None:
        """`pod_logs`: the kubelet's directory of pod logs. Its folder names map UIDs to pods."""
        self._pod_logs = pod_logs
        self._procfs = Procfs(procfs)
        self._clock = clock
        self._since_boot = since_boot

    def is_host(self) -> bool:
        """Returns whether the host's processes are visible."""
        return self._procfs.is_host()

    def read(self, snapshots: Iterable[DeviceSnapshot]) -> Owners:
        """Returns the owners of the processes on each unit. Omits GPUs for which the driver listed no processes."""
        owners: dict[UnitId, UnitOwners] = {}
        for snapshot in snapshots:
            if not (snapshot.up and snapshot.processes is not None and snapshot.identity.uuid):
                continue
            uuid = snapshot.identity.uuid
            has_mig = snapshot.identity.mig_mode == "enabled"
            units = {i.mig: UnitId(uuid, i.uuid) for i in snapshot.instances} if has_mig else {"": UnitId(uuid)}
            listed = snapshot.processes
            # A process on an unlisted instance, or on no instance, is on no known unit.
            nowhere = any(process.mig not in units for process in listed.processes)
            for mig, unit in units.items():
                here = [process for process in listed.processes if process.mig == mig]
                owners[unit] = self._read_unit(here, listed, is_complete=not nowhere)
        return owners

    def list_pods(self) -> Set[str] | None:
        """Returns the UIDs of all pods that have a process on this host, None if no pod's process is visible."""
        found: set[str] = set()
        for pid in self._procfs.list_pids():
            text = self._procfs.text(pid, "cgroup")
            if text is not None and "pod" in text:
                found.update(parse_cgroup(text).pods)
        return found or None  # if even the exporter's own pod is missing, processes are hidden

    def name_pod(self, uid: str) -> tuple[str, str] | None:
        """Returns namespace and name of the pod with this UID, None if the kubelet's directories do not show them."""
        if self._pod_logs is None:
            return None
        try:
            names = [entry.name for entry in self._pod_logs.iterdir() if entry.name.endswith(f"_{uid}")]
        except OSError:
            return None
        namespace, _, pod = names[0].removesuffix(f"_{uid}").partition("_") if len(names) == 1 else ("", "", "")
        return (namespace, pod) if namespace and pod else None

    def own(self, period: ProcessPeriod) -> OwnedPeriod:
        """Looks up the owners of the processes that worked on a GPU in a period. Call it while they still run."""
        known = [(self._owner(each.pid, each.monotonic), each.ratio) for each in period.shares[:UNIT_MAX]]
        rest = sum(each.ratio or 0.0 for each in period.shares[UNIT_MAX:])
        shares = (*known, (None, rest)) if rest else tuple(known)
        return OwnedPeriod(period.start, period.end, shares, period.problem)

    def _read_unit(self, here: Sequence[GpuProcess], listed: ProcessList, is_complete: bool) -> UnitOwners:
        uses: dict[ProcessOwner, Use] = {}
        for process in here[:UNIT_MAX]:
            owner = self._owner(process.pid, listed.monotonic)
            if owner is None:
                is_complete = False
            else:
                uses[owner] = uses.get(owner, Use()).plus(Use(1, process.memory_bytes))
        return UnitOwners(uses, is_complete and len(here) <= UNIT_MAX)

    def _owner(self, pid: int, seen: float) -> ProcessOwner | None:
        """Returns the owner of a process, None if unknown. `seen`: when the driver saw the process (monotonic seconds).

        The owner is unknown if the process has ended or cannot be read, or if its pid was reused. An MPS server has
        many clients, so that it has no single owner.
        """
        stat = self._procfs.stat(pid)
        if stat is None or stat.name.startswith(MPS_SERVER):
            return None
        age_s = self._clock.monotonic() - seen
        if stat.start_s > self._since_boot() - age_s:
            return None  # started after the driver saw the pid
        text = self._procfs.text(pid, "cgroup")
        again = self._procfs.stat(pid)
        if text is None or again is None or again.start_s != stat.start_s:
            return None
        return parse_cgroup(text)
