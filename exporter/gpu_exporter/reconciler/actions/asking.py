"""Reads the proofs for some proposals in every cycle. After a source has failed, the reconciler does not query it for a
while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reconciler.actions.proofs import Proofs, Warned
from gpu_exporter.reconciler.actions.propose import Proposal
from gpu_exporter.reconciler.actions.warnings import SeenWarnings
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import Refused

PATIENCE_S = 120.0  # after a source of proofs failed: a slow source must not make every cycle slow
ASKED_MAX = 100  # proposals of which a cycle asks for proofs


class Proven(NamedTuple):
    """The answers of this cycle.

    `demand`: by holder and pool, the GPUs that others wait for; None if the settings ignore demand.
    """

    warnings: Mapping[HolderName, Warned]
    demand: Mapping[HolderName, Mapping[str, float]] | None


class ProofAsker:
    """Remembers the order of the proposals, the warnings of the owners, and the last failure of a source."""

    def __init__(self, proofs: Proofs, clock: Clock, *, asks_demand: bool) -> None:
        self._proofs = proofs
        self._clock = clock
        self._asks_demand = asks_demand
        self._seen = SeenWarnings(clock)
        self._turn = 0
        self._trouble: tuple[float, str] | None = None  # until when (monotonic) no proof is asked for, and why

    def take_turns(self, proposals: list[Proposal]) -> list[Proposal]:
        """At most ASKED_MAX proposals for this cycle. Later cycles take the others in turn."""
        self._seen.begin_cycle(-(-len(proposals) // ASKED_MAX))
        if len(proposals) <= ASKED_MAX:
            return proposals
        first = self._turn % len(proposals)
        self._turn = first + ASKED_MAX
        return [*proposals[first:], *proposals[:first]][:ASKED_MAX]

    def ask(self, proposals: Sequence[Proposal]) -> Proven:
        """Reads the proofs for these proposals. Raises Refused for PATIENCE_S after a source failed."""
        if self._trouble is not None and self._clock.monotonic() < self._trouble[0]:
            raise Refused("proof", self._trouble[1])
        self._trouble = None
        try:
            return self._ask(proposals)
        except AnswerError as exc:
            raise self.note_trouble(exc) from exc

    def object_to_trouble(self) -> None:
        """Raises Refused if a source has failed in this cycle."""
        if self._trouble is not None:
            raise Refused("proof", self._trouble[1])

    def note_trouble(self, trouble: AnswerError) -> Refused:
        """Queries no source for PATIENCE_S. Returns the reason why nothing is done during this time."""
        self._trouble = self._clock.monotonic() + PATIENCE_S, str(trouble)
        return Refused("proof", str(trouble))

    def _ask(self, proposals: Sequence[Proposal]) -> Proven:
        asked = {name for proposal in proposals for name in proposal.names}
        warnings = self._seen.note(self._proofs.read_warnings(asked), asked)
        if not self._asks_demand:
            return Proven(warnings, None)
        return Proven(warnings, self._proofs.read_demand(set(warnings)) if warnings else {})
