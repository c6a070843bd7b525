"""Detects pods that the kubelet still lists although they have ended: they have no process.

Before 1.34 the kubelet also lists terminated pods of the node (kubernetes#119423, #132020). Two pods may then seem to
have the same exclusive GPU. A running pod has at least one process in its cgroup: its program or the sandbox.

- A pod without a process holds nothing if another pod with processes has the same device.
- Otherwise the pod keeps the device and is not judged: with a container runtime that has no sandbox processes, the pod
  may be waiting for a restart after a crash.
- If the host's processes are not visible, no pod counts as ended.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence, Set

from gpu_exporter.agent.attribution.processes import Owners
from gpu_exporter.common.model.holders import Grant

LOOK_S = 60.0  # seconds between two checks; a check takes about 30 us for each process of the host
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
WHY = "no process of the pod runs: the pod has ended, or waits for a restart"


class EndedPods:
    """Remembers the results of the last checks of the host's processes."""

    def __init__(self, list_pods: Callable[[], Set[str] | None]) -> None:
        """`list_pods`: returns the UIDs of all pods that have a process, None if processes are not visible."""
        self._list_pods = list_pods
        self._looked: float | None = None
        self._without: Set[str] = frozenset()  # pods without a process at the last check
        self._ended: Set[str] = (
            frozenset()
        )  # pods without a process at the last two checks: a container that starts has no process for a moment

    def apply(self, grants: Sequence[Grant], owners: Owners, now: float) -> Sequence[Grant]:
        """Removes the grants of pods that hold nothing. Marks other pods that may have ended as not running.

        `owners`: the owners of the processes on each unit. `now`: monotonic seconds.
        """
        working = {uid for seen in owners.values() for owner in seen.uses for uid in owner.pods}
        doubtful = {grant.holder.pod_uid for grant in grants if has_begun(grant) and not grant.ended} - working
        if not doubtful:
            return grants
        if self._looked is None or now - self._looked >= LOOK_S:
            running = self._list_pods()
            without = frozenset[str]() if running is None else frozenset(doubtful - running)
            self._looked, self._without, self._ended = now, without, without & self._without
        ended = self._ended & doubtful
        alive: dict[tuple[str, str], set[str]] = {}
        for grant in grants:
            if grant.holder.pod_uid not in ended and not grant.ended:
                alive.setdefault(_device(grant), set()).add(grant.claim)

        def is_taken(grant: Grant) -> bool:
            """Returns whether another pod has the device, not shared by replicas or by one claim."""
            claims = alive.get(_device(grant), set())
            return bool(claims) and not grant.share and not (grant.claim and grant.claim in claims)

        return [
            _stopped(grant) if grant.holder.pod_uid in ended else grant
            for grant in grants
            if grant.holder.pod_uid not in ended or not is_taken(grant)
        ]


def _stopped(grant: Grant) -> Grant:
    if grant.why:
        return grant._replace(running=False)
    return grant._replace(running=False, why=WHY, obstacle="no_process")


def has_begun(grant: Grant) -> bool:
    """Returns whether the grant's container has started. If so, the pod has had a process.

    Only a UUID is certain to be in the name of the pod's cgroup, so other UIDs return False. The UID of a static pod
    (from a manifest file) may be a hash or a text, and the API server may use another UID.
    """
    return (
        UUID.fullmatch(grant.holder.pod_uid) is not None
        and grant.working_wall is not None
        and math.isfinite(grant.working_wall)
    )


def _device(grant: Grant) -> tuple[str, str]:
    return grant.kind, grant.device
