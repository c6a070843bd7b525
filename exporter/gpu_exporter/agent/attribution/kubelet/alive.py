"""Detects pods that the kubelet still lists although they have ended: their cgroups are gone.

Before 1.34 the kubelet also lists terminated pods of the node (kubernetes#119423, #132020). The kubelet removes a pod's
cgroup when the whole pod has ended, and keeps it while a container waits for a restart. A pod that has started and has
no cgroup has therefore ended, and holds nothing.

A check of the cgroups is valid only if it proves that cgroups are visible: it must find the exporter's own pod, and
half of the listed pods that have not ended. A pod counts as ended only after two valid checks. An invalid check changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path

from gpu_exporter.common.cgroup import parse_cgroup

LOOK_S = 60.0  # seconds between two checks; a check takes about 20 us for each cgroup of the host
OWN_CGROUP = Path("/proc/self/cgroup")


class PodLives:
    """Remembers the results of the last checks of the host's cgroups."""

    def __init__(self, find: Callable[[Set[str]], Set[str] | None], own: str) -> None:
        """`find`: takes UIDs of pods, and returns those with a cgroup. None if some cgroups are not visible.

        `own`: UID of the exporter's own pod. If it is "" (unknown), no pod counts as ended.
        """
        self._find = find
        self._own = own
        self._looked: float | None = None
        self._without: Set[str] = frozenset()  # pods without a cgroup at the last check
        self._ended: Set[str] = frozenset()  # pods without a cgroup at the last two checks

    def ended(self, listed: Set[str], begun: Set[str], now: float) -> Set[str]:
        """Returns the UIDs in `begun` that belong to pods that have ended.

        `listed`: UIDs of all pods in the kubelet's list. `begun`: UIDs of pods that hold a GPU and have had a process.
        `now`: monotonic seconds.
        """
        if not self._own:
            return frozenset()
        if self._looked is None or now - self._looked >= LOOK_S:
            self._looked = now
            found = self._find(listed | begun | {self._own}) or frozenset()
            self._ended = (self._ended & listed) - found  # an existing cgroup needs no further proof
            self._without = self._without - found
            if self._proves(found, listed):
                without = frozenset(begun - found)
                self._ended |= without & self._without
                self._without = without
        return self._ended & begun

    def are_there(self, uids: Set[str]) -> bool:
        """Returns whether at least one of these pods has a cgroup. True also if cgroups are not visible."""
        found = self._find(uids)
        return bool(uids) and (found is None or bool(found))

    def _proves(self, found: Set[str], listed: Set[str]) -> bool:
        """Returns whether cgroups are visible: `found` has the exporter's own pod, and half of the
        pods that still run.
        """
        alive = listed - self._ended
        return self._own in found and 2 * len(found & alive) >= len(alive)


def find_own_pod(path: Path = OWN_CGROUP) -> str:
    """Returns the UID of the pod that runs this process, "" if the cgroup shows no pod."""
    try:
        pods = parse_cgroup(path.read_text("ascii", "replace")).pods
    except OSError:
        return ""
    return pods[-1] if pods else ""
