"""Reads the UIDs of pods, and the start times of their containers, from the folders below /var/log/pods.

The kubelet makes a folder NAMESPACE_POD_UID for each pod. In it, the container runtime writes CONTAINER/N.log for start
number N. This module uses os functions and strings, because pathlib is too slow for hundreds of folders in each poll.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.outside import need_whole

LOG = re.compile(r"([0-9]{1,9})\.log")
MAX_STARTS = 4096
SETTLED_S = 2.0  # a folder that changed more recently may change again within one tick of the file system's clock
PodName = tuple[str, str]  # namespace, pod


class ContainerStart(NamedTuple):
    """The last start of a container: its number, and its time in Unix seconds (infinite before the start).

    - `why`: the reason why it has not started.
    - `obstacle`: the same reason as one word.
    - `changed_ns`: change time of the folder when it was read, 0 to read the folder again.
    """

    number: int
    wall: float
    why: str = ""
    obstacle: str = ""
    changed_ns: int = 0


class PodLogs:
    """Reads UIDs of pods and starts of containers, and remembers them from one poll to the next."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self._directory = str(directory)
        self._clock = clock
        self.uids: frozenset[str] = frozenset()
        """UIDs of all pods with a folder at the last poll, listed or not."""
        self._uids: dict[PodName, str] = {}
        self._left: set[str] = set()  # UIDs of replaced pods: their folders remain for a while
        self._starts: dict[tuple[str, str], ContainerStart] = {}  # by UID and container
        self._seen: dict[tuple[str, str], ContainerStart] = {}  # in this poll

    def begin_poll(self, listed: Set[PodName], gone: Set[PodName]) -> dict[PodName, str]:
        """Begins a poll. Returns the UID of each listed pod.

        If several folders have the pod's name, the newest counts. The folder of a replaced pod never counts. `gone`:
        pods that are no longer listed. If a pod with the same name returns, it is another pod, even if the old folder
        still exists.
        """
        self._starts = dict(list(self._seen.items())[-MAX_STARTS:])
        self._seen = {}
        self._left |= {uid for name in gone if (uid := self._uids.pop(name, ""))}
        try:
            entries = os.listdir(self._directory)  # noqa: PTH208
        except OSError:
            return {}  # not mounted: pods are identified by name
        found: dict[PodName, list[str]] = {}
        there: set[str] = set()
        for entry in entries:
            namespace, _, rest = entry.partition("_")
            pod, _, uid = rest.partition("_")
            there.add(uid)
            if uid and (namespace, pod) in listed:
                found.setdefault((namespace, pod), []).append(uid)
        chosen: dict[PodName, str] = {}
        for name, uids in found.items():
            fresh = [uid for uid in uids if uid not in self._left]
            if fresh:
                chosen[name] = fresh[0] if len(fresh) == 1 else max((self._date(name, uid), uid) for uid in fresh)[1]
        replaced = {uid for name, uid in self._uids.items() if name in chosen and chosen[name] != uid}
        self._left = (self._left | replaced) & there
        self.uids = frozenset(there)
        # Keep a UID while the pod's folder exists: a later pod of the same name is then known as another pod.
        self._uids = {name: uid for name, uid in self._uids.items() if uid in there} | chosen
        return chosen

    def _date(self, name: PodName, uid: str) -> float:
        """Returns when a pod's folder was last changed (Unix seconds), 0 if the kubelet has just removed it."""
        try:
            return os.stat(f"{self._directory}/{name[0]}_{name[1]}_{uid}").st_mtime  # noqa: PTH116
        except OSError:
            return 0.0

    def read_start(self, name: PodName, uid: str, container: str) -> ContainerStart:
        """Returns the container's last start. `uid`: "" while the pod's UID is unknown.

        The change time of the container's folder counts as its start. A log rotation changes it too, so it is read only
        once for each start. After an earlier rotation, the start is too late, which only shortens an idle run.
        """
        if not uid:
            return ContainerStart(
                -1, math.inf, f"the start of its container is unknown: mount {self._directory}", "start_unknown"
            )
        folder = f"{self._directory}/{name[0]}_{name[1]}_{uid}/{container}"
        known = self._starts.get((uid, container))
        try:
            changed = os.stat(folder)  # noqa: PTH116
            if known is not None and known.changed_ns == changed.st_mtime_ns:
                self._seen[uid, container] = known
                return known
            numbers = [need_whole(match[1]) for log in os.listdir(folder) if (match := LOG.fullmatch(log))]  # noqa: PTH208
        except OSError:
            numbers = []
        if not numbers:
            return ContainerStart(-1, math.inf, "its container has not started", "not_started")
        now = self._clock.wall()
        if known is None or known.number != max(numbers):
            known = ContainerStart(max(numbers), min(changed.st_mtime, now))
        known = known._replace(changed_ns=changed.st_mtime_ns if now - changed.st_mtime > SETTLED_S else 0)
        self._seen[uid, container] = known
        return known
