"""Detects pods that the kubelet still lists although they have ended: their cgroups are gone.

Before 1.34, the kubelet also lists terminated pods of the node (kubernetes#119423, #132020). It removes a pod's cgroup
when the whole pod has ended, and keeps it while a container waits for a restart. So a pod that has started and has no
cgroup has ended, and holds nothing.

A missing cgroup proves the end only if the exporter would see an existing cgroup. Three facts together show that. The
number of found pods shows nothing: a node may keep four ended pods for each living one (kubernetes-mixin#442), and a
mount may hide the pods with guaranteed resources.

- The search was complete, and it found the exporter's own pod, which certainly lives.
- The kubelet's own folder, which contains all pods of this kubelet, is above that pod. Otherwise (another mount or
  layout), the check proves only the end of pods whose cgroup this exporter has seen in the same mount.
- No pod that lacks a cgroup has a process, as far as processes are visible. Otherwise some cgroups are hidden.

A pod counts as ended only after two valid checks. An invalid check changes nothing.

The kubelet lists pods by name, and the UID comes from the folder of the pod's logs. A pod that replaces an ended pod of
the same name (a StatefulSet, a Job of Kubeflow) gets its cgroup at once, but its folder of logs only with its volumes.
While a pod in the kubelet's list has no such folder, this pod may hold the GPU of an ended pod, and this GPU does
not count as free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from gpu_exporter.common.cgroup import parse_cgroup

LOOK_S = 60.0  # seconds between two checks; a check takes about 20 us for each cgroup of the host
OWN_CGROUP = Path("/proc/self/cgroup")
# The kubelet makes this folder below its --cgroup-root. systemd's names repeat the parent: foo.slice/foo-kubepods.slice
# (kubernetes, pkg/kubelet/cm: defaultNodeAllocatableCgroupName).
KUBEPODS = re.compile(r"(?:.+-)?kubepods\.slice|kubepods")
FindPods: TypeAlias = Callable[[Set[str]], Mapping[str, PurePosixPath] | None]
"""Takes UIDs of pods. Returns those with a cgroup, each with its path below the mount. None if the search was not
complete."""


class PodLives:
    """Remembers the results of the last checks of the host's cgroups."""

    def __init__(
        self,
        find: FindPods,
        own: str,
        list_running: Callable[[], Set[str] | None] = lambda: None,
        list_inside: Callable[[PurePosixPath], Set[str] | None] = lambda folder: frozenset(),
    ) -> None:
        """- `own`: UID of the exporter's own pod. If it is "" (unknown), no pod counts as ended.
        - `list_running`: returns the UIDs of pods that have a process, None if processes are not visible.
        - `list_inside`: returns the UIDs of the pods in a kubelet's folder, None if it cannot be read.
        """
        self._find = find
        self._own = own
        self._list_running = list_running
        self._list_inside = list_inside
        self._looked: float | None = None
        self._place: PurePosixPath | None = None  # of the own pod at the last valid check
        self._seen: Set[str] = frozenset()  # listed pods that had a cgroup at a valid check in the present mount
        self._without: Set[str] = frozenset()  # pods without a cgroup at the last valid check
        self._ended: Set[str] = frozenset()  # pods without a cgroup at the last two valid checks

    def ended(self, listed: Set[str], begun: Set[str], now: float) -> Set[str]:
        """Returns the UIDs of listed pods that have ended.

        `listed`: UIDs of all pods in the kubelet's list. `begun`: those that hold a GPU and have had a process, so that
        they have had a cgroup. `now`: monotonic seconds.
        """
        if not self._own:
            return frozenset()
        self._ended &= listed
        if self._looked is None or now - self._looked >= LOOK_S:
            self._looked = now
            found = self._find(listed | {self._own})
            if found is not None:
                self._judge(found, listed, begun)
        return self._ended

    def may_be_replaced(self, logged: Set[str]) -> bool:
        """Returns whether the kubelet's cgroup folder has a pod whose name is unknown, or cannot be read.

        Such a pod may have replaced an ended one. `logged`: UIDs of the pods whose names are known, from their log
        folders.
        """
        folder = None if self._place is None else _find_kubelet(self._place)
        inside = None if folder is None else self._list_inside(folder)
        return inside is None or not inside <= {self._own, *logged}

    def are_there(self, uids: Set[str]) -> bool:
        """Returns whether at least one of these pods has a cgroup. True also if cgroups are not visible."""
        found = self._find(uids)
        return bool(uids) and (found is None or bool(found))

    def _judge(self, found: Mapping[str, PurePosixPath], listed: Set[str], begun: Set[str]) -> None:
        """Updates the ended pods after a complete search."""
        self._ended -= found.keys()  # an existing cgroup needs no further proof
        self._without -= found.keys()
        place = found.get(self._own)
        if place is None:
            return
        if place != self._place:  # a cgroup never moves, so the mount shows another part of the tree than before
            self._place, self._seen = place, frozenset()
        self._seen = (self._seen | found.keys()) & listed
        without = (self._seen | begun if _find_kubelet(place) else self._seen) - found.keys()
        hidden = (self._list_running() or frozenset()) & without if without else frozenset[str]()
        if hidden:
            self._ended -= hidden
            return
        self._ended |= without & self._without
        self._without = without


def _find_kubelet(own: PurePosixPath) -> PurePosixPath | None:
    """Returns the kubelet's folder, None if it is not in the mount. `own`: path of the own pod.

    Between that folder and a pod is at most the folder of the pod's class (burstable, besteffort).
    """
    return next((folder for folder in own.parents[:2] if KUBEPODS.fullmatch(folder.name)), None)


def find_own_pod() -> str:
    """Returns the UID of the pod that runs this process, "" if the cgroup shows no pod."""
    try:
        pods = parse_cgroup(OWN_CGROUP.read_text("ascii", "replace")).pods
    except OSError:
        return ""
    return pods[-1] if pods else ""
