"""Asks the sources in turn and remembers their last answers for a bounded time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpu_exporter.attribution.source import Source, SourceError
from gpu_exporter.clock import Clock
from gpu_exporter.model import Claim, SourceStatus

log = logging.getLogger(__name__)


class ConfirmedClaim(NamedTuple):
    """A claim and when its source last made it, monotonic seconds."""

    claim: Claim
    confirmed: float


@dataclass(slots=True)
class _Memory:
    claims: Sequence[Claim] = ()
    confirmed: float | None = None
    error: str = ""
    conflicts: int = 0


class Poller:
    """All sources of one node, in order of precedence."""

    def __init__(self, sources: Sequence[Source], clock: Clock, keep_last_s: float) -> None:
        self._sources = sources
        self._clock = clock
        self._keep_last_s = keep_last_s
        self._memory = {source.name: _Memory() for source in sources}

    def poll(self) -> list[ConfirmedClaim]:
        """Ask every source once; what failed answers from memory while that is not too old."""
        for source in self._sources:
            self._ask(source)
        return self.claims()

    def claims(self) -> list[ConfirmedClaim]:
        """What is known now, without asking."""
        now = self._clock.monotonic()
        known: list[ConfirmedClaim] = []
        for memory in self._memory.values():
            if memory.confirmed is not None and now - memory.confirmed <= self._keep_last_s:
                known += [ConfirmedClaim(claim, memory.confirmed) for claim in memory.claims]
        return known

    def _ask(self, source: Source) -> None:
        memory = self._memory[source.name]
        asked = self._clock.monotonic()  # before the answer: what it shows held at least until here
        try:
            claims = source.poll()
        except SourceError as exc:
            if str(exc) != memory.error:
                log.warning("attribution %s: %s", source.name, exc)
            memory.error = str(exc)
            return
        if memory.error:
            log.info("attribution %s: answers again", source.name)
        memory.claims, memory.confirmed, memory.error = claims, asked, ""

    def note_conflicts(self, claims: Sequence[Claim]) -> None:
        """Count claims that contradict a source of higher precedence."""
        for claim in claims:
            memory = self._memory.get(claim.holder.source)
            if memory is not None:
                memory.conflicts += 1

    def is_known(self) -> bool:
        """Whether what `claims` leaves out is really held by nobody: every source answered, lately enough."""
        return bool(self._memory) and all(
            status.age_s is not None and status.age_s <= self._keep_last_s for status in self.statuses()
        )

    def statuses(self) -> tuple[SourceStatus, ...]:
        now = self._clock.monotonic()
        return tuple(
            SourceStatus(
                name,
                up=memory.confirmed is not None and not memory.error,
                age_s=None if memory.confirmed is None else now - memory.confirmed,
                conflicts=memory.conflicts,
                error=memory.error,
            )
            for name, memory in self._memory.items()
        )
