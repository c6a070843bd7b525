"""Pods that the kubelet still lists though they have ended, by their cgroups.

Before 1.34 it lists terminated pods of the node too (kubernetes#119423, #132020). The kubelet removes the cgroup of a
pod once all of it has ended, and keeps it while a container waits to be started again. So a pod that has begun and has
no cgroup has ended, and holds nothing. A look counts only where it proves that it sees cgroups at all: it finds the
exporter's own pod and half of those that are listed and have not ended. Two looks must agree. One that counts for
nothing changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path

from gpu_exporter.attribution.cgroup import parse_cgroup

LOOK_S = 60.0  # a look at every cgroup of the host takes some 20 us for each
OWN_CGROUP = Path("/proc/self/cgroup")


class PodLives:
    """Remembers what the last looks at the host's cgroups showed."""

    def __init__(self, find: Callable[[Set[str]], Set[str] | None], own: str) -> None:
        """`find`: those of some pods' UIDs that have a cgroup, None where not all cgroups were seen. `own`: UID of the
        exporter's own pod, "" where it is not known: then nothing is said of any.
        """
        self._find = find
        self._own = own
        self._looked: float | None = None
        self._without: Set[str] = frozenset()  # had none at the last look
        self._ended: Set[str] = frozenset()  # ... and at the one before it

    def ended(self, listed: Set[str], begun: Set[str], now: float) -> Set[str]:
        """Those of `begun` that have ended.

        `listed`: UIDs of all pods in the kubelet's list; `begun`: of those that hold a GPU and had a process once;
        `now`: monotonic seconds.
        """
        if not self._own:
            return frozenset()
        if self._looked is None or now - self._looked >= LOOK_S:
            self._looked = now
            found = self._find(listed | begun | {self._own}) or frozenset()
            self._ended = (self._ended & listed) - found  # a cgroup that is there needs no further proof
            self._without = self._without - found
            if self._proves(found, listed):
                without = frozenset(begun - found)
                self._ended |= without & self._without
                self._without = without
        return self._ended & begun

    def are_there(self, uids: Set[str]) -> bool:
        """Whether one of these pods has a cgroup now, or may have one that was not seen."""
        found = self._find(uids)
        return bool(uids) and (found is None or bool(found))

    def _proves(self, found: Set[str], listed: Set[str]) -> bool:
        """Whether a look that found these would have found the others as well."""
        alive = listed - self._ended
        return self._own in found and 2 * len(found & alive) >= len(alive)


def find_own_pod(path: Path = OWN_CGROUP) -> str:
    """UID of the pod that this process runs in, "" where its cgroup does not show one."""
    try:
        pods = parse_cgroup(path.read_text("ascii", "replace")).pods
    except OSError:
        return ""
    return pods[-1] if pods else ""
