"""Publishes a new state only after it has lasted for a while; a milder state (busy after idle) at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.model.holders import AllocationId
from gpu_exporter.common.model.views import Verdict

STALLED = "stalled"
WEIGHT = {"held_idle": 1, "held_no_process": 2, STALLED: 3}  # how strongly a state counts against its holder
IDLE_STATES = frozenset(("held_idle", "held_no_process"))
AT_ONCE = ("unknown", STALLED)  # a run of stalls.after has lasted long enough by itself
NOT_JUDGED = Verdict("unknown", "not judged yet")


class _HeldState(NamedTuple):
    published: Verdict
    coming: str  # the state that will be published if it lasts
    since: float


class StateHold:
    """Remembers the published state of each allocation. Times are monotonic seconds. Used by one thread at a time."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._held: dict[AllocationId, _HeldState] = {}

    def publish(self, now: float, judged: Mapping[AllocationId, Verdict]) -> dict[AllocationId, Verdict]:
        """Returns the verdicts to publish. Forgets the allocations that are not in `judged`."""
        self._held = {key: self._next(now, self._held.get(key), verdict) for key, verdict in judged.items()}
        return {key: held.published for key, held in self._held.items()}

    def _next(self, now: float, before: _HeldState | None, verdict: Verdict) -> _HeldState:
        state = verdict.state
        if before is None:
            before = _HeldState(NOT_JUDGED, "unknown", now)
        published = before.published
        since = before.since if state == before.coming else now
        is_milder = WEIGHT.get(state, 0) < WEIGHT.get(published.state, 0)
        if state in (*AT_ONCE, published.state) or is_milder or now - since >= self._hold_s:
            return _HeldState(verdict, state, since)
        if published.state == "unknown":
            lasted, needed = describe_duration(now - since), describe_duration(self._hold_s)
            published = Verdict("unknown", f"{state} ({verdict.evidence}) for {lasted}, published after {needed}")
        return _HeldState(published, state, since)
