"""Reads the traffic in a holder's own network namespace, and the network file systems that the holder has mounted.

In the host's namespace, or a namespace that may be the host's, the traffic is unknown, not 0. It is also unknown if the
holder has a network file system, whose data the kernel moves in the host's namespace.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from gpu_exporter.common.outside import WHOLE_MAX, whole
from gpu_exporter.common.procfs import Procfs

HOST_PID = 1
INTERFACES_MAX = 256
NETWORK_MAX, MOUNTS_MAX = 65_536, 262_144  # bytes: 256 interfaces, some 1,000 mounts
NETWORK_FILES = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p", "afs", "wekafs", "virtiofs")
)
Interfaces = Mapping[str, tuple[int, int]]  # by interface, bytes received and sent


class NetworkBytes(NamedTuple):
    """Bytes over all interfaces of a network namespace since its creation."""

    received: float
    sent: float


class Mount(NamedTuple):
    """One line of /proc/PID/mountinfo (proc_pid_mountinfo(5)). `options`: the options of the file system."""

    number: str
    point: str
    kind: str
    options: str

    @property
    def is_remote(self) -> bool:
        """Whether the data of this mount come over the network, or may do so (any FUSE file system)."""
        return self.kind in NETWORK_FILES or self.kind.startswith("fuse")

    @property
    def is_network(self) -> bool:
        """Whether its data come over the network for certain."""
        return self.kind in NETWORK_FILES

    @property
    def name(self) -> str:
        """The file system's type for display, without the text after `fuse.`, because the user chooses this text."""
        return self.kind if self.kind in NETWORK_FILES else "fuse"


def list_mounts(procfs: Procfs, pid: int) -> list[Mount] | None:
    """Returns the mounts that a process sees; None if they cannot be read."""
    text = procfs.text(pid, "mountinfo", MOUNTS_MAX)
    if text is None:
        return None
    found = []
    for line in text.splitlines():
        head, _, tail = line.partition(" - ")
        first, last = head.split(" "), tail.split(" ")
        if len(first) >= 6 and len(last) >= 3:
            found.append(Mount(first[0], first[4], last[0], last[2]))
    return found


def read_network(procfs: Procfs, pid: int, mounts: Collection[Mount] | None) -> NetworkBytes | None:
    """Bytes over all interfaces of a process's network namespace. None if it is the host's, or unreadable.

    `mounts`: mounts of the holder, None if they cannot be read. Without the right to trace, the exporter cannot read
    whether two processes share a namespace. So it reads the counters of `pid` between two readings of the host's
    counters. If each value lies between the host's two, the namespace may be the host's.
    """
    first, own, second = (
        _parse_interfaces(procfs.text(each, "net/dev", NETWORK_MAX)) for each in (HOST_PID, pid, HOST_PID)
    )
    if first is None or own is None or second is None or not own:
        return None
    if mounts is None or any(mount.is_remote for mount in mounts):
        return None
    is_hosts = own.keys() == first.keys() and all(
        first[name][way] <= own[name][way] <= second.get(name, own[name])[way] for name in own for way in (0, 1)
    )
    if is_hosts:
        return None
    return NetworkBytes(
        float(sum(received for received, _ in own.values())), float(sum(sent for _, sent in own.values()))
    )


def _parse_interfaces(text: str | None) -> Interfaces | None:
    """Parses /proc/PID/net/dev (proc_pid_net(5)): bytes received are in the first column, bytes sent in the ninth."""
    if text is None:
        return None
    found: dict[str, tuple[int, int]] = {}
    for line in text.splitlines()[2 : 2 + INTERFACES_MAX]:
        name, colon, rest = line.rpartition(":")
        fields = rest.split()
        if not colon or len(fields) < 9:
            return None
        received, sent = whole(fields[0], WHOLE_MAX), whole(fields[8], WHOLE_MAX)
        if received is None or sent is None:
            return None
        found[name.strip()] = (received, sent)
    return found
