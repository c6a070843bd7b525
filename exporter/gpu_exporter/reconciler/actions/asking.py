"""Reads the proofs for some proposals in every cycle. After a source has failed, the reconciler pauses its queries to
this source. After a query about one target has failed, it pauses the queries about all targets of the same owner.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reconciler.actions.proofs import Proofs, Warned
from gpu_exporter.reconciler.actions.propose import Proposal
from gpu_exporter.reconciler.actions.warnings import SeenWarnings
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import Refused

PATIENCE_S = 120.0  # after a source of proofs failed: a slow source must not make every cycle slow
EVERYBODY = ""  # as owner: the questions about all proposals of a cycle
ASKED_MAX = 100  # proposals for which one cycle reads proofs


class Proven(NamedTuple):
    """The answers of this cycle.

    `demand`: the GPUs that others wait for, by holder and pool; None if the settings ignore demand.
    `pending`: GPUs that others wait for, by pool, for the pools from which GPUs were taken back; 0 if nobody waits.
    """

    warnings: Mapping[HolderName, Warned]
    demand: Mapping[HolderName, Mapping[str, float]] | None
    pending: Mapping[str, float]


class ProofAsker:
    """Remembers the order of the proposals, the warnings of the owners, and the failures of sources."""

    def __init__(self, proofs: Proofs, clock: Clock, *, asks_demand: bool) -> None:
        self._proofs = proofs
        self._clock = clock
        self._asks_demand = asks_demand
        self._seen = SeenWarnings(clock)
        self._turn = 0
        # By owner: until when (monotonic) nothing is asked about the owner's targets, and why.
        self._troubles: dict[str, tuple[float, str]] = {}

    def take_turns(self, proposals: list[Proposal]) -> list[Proposal]:
        """Returns at most ASKED_MAX proposals for this cycle. Later cycles take the others in turn."""
        self._seen.begin_cycle(-(-len(proposals) // ASKED_MAX))
        if len(proposals) <= ASKED_MAX:
            return proposals
        first = self._turn % len(proposals)
        self._turn = first + ASKED_MAX
        return [*proposals[first:], *proposals[:first]][:ASKED_MAX]

    def ask(self, proposals: Sequence[Proposal], pools: Collection[str]) -> Proven:
        """Reads the proofs for these proposals, and the demand of these pools. Raises Refused for PATIENCE_S after a
        source failed.
        """
        now = self._clock.monotonic()
        self._troubles = {of: trouble for of, trouble in self._troubles.items() if now < trouble[0]}
        self.object_to_trouble(EVERYBODY)
        try:
            return self._ask(proposals, pools)
        except AnswerError as exc:
            raise self.note_trouble(exc, EVERYBODY) from exc

    def object_to_trouble(self, owner: str) -> None:
        """Raises Refused if a query about the targets of this owner has failed less than PATIENCE_S ago."""
        if owner in self._troubles:
            raise Refused("proof", self._troubles[owner][1])

    def note_trouble(self, trouble: AnswerError, owner: str) -> Refused:
        """Stops the queries about the targets of this owner for PATIENCE_S. Returns the refusal for this time.

        The sources have answered the queries about all proposals of this cycle. So this query was too large or too
        slow, which the owner may have caused. If the sources have failed since, the next cycle finds that out.
        """
        self._troubles[owner] = self._clock.monotonic() + PATIENCE_S, str(trouble)
        return Refused("proof", str(trouble))

    def _ask(self, proposals: Sequence[Proposal], pools: Collection[str]) -> Proven:
        asked = {name for proposal in proposals for name in proposal.names}
        warnings = self._seen.note(self._proofs.read_warnings(asked), asked) if asked else {}
        if not self._asks_demand:
            return Proven(warnings, None, {})
        demand = self._proofs.read_demand(set(warnings)) if warnings else {}
        return Proven(warnings, demand, self._proofs.read_pending(pools) if pools else {})
