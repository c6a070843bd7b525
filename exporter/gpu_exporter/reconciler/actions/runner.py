"""Acts on holders that are marked underused. In mode shadow, logs and counts the actions that mode act would take.

Each proposal passes the gates in order. Each cycle first completes the actions that an earlier cycle or process began.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Actions as Settings
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reconciler.actions.acts import Acts, Receipt
from gpu_exporter.reconciler.actions.asking import ProofAsker, Proven
from gpu_exporter.reconciler.actions.freed import FreedGpus
from gpu_exporter.reconciler.actions.gates import Gates
from gpu_exporter.reconciler.actions.limits import ActionLimits
from gpu_exporter.reconciler.actions.proofs import Proofs
from gpu_exporter.reconciler.actions.propose import Proposal, allowed_kinds, propose
from gpu_exporter.reconciler.actor import ENDING, Actor
from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.decision.spared import PENDING
from gpu_exporter.reconciler.decision.target import Skipped, Target, why_not
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import Marker, MarkError, Refused, guard
from gpu_exporter.reconciler.telemetry import Telemetry

log = logging.getLogger(__name__)
READ_S = 5.0  # a target that was read longer ago is read again before the action
# Results that are not the target's fault: the next cycle may try again.
NOT_ITS_FAULT = ("conflict", "fenced", "journal", "limit", "throttled")
SAID_MAX = 1000  # targets whose last logged reason is remembered, and that mode shadow remembers as counted


class Parts(NamedTuple):
    """The parts of a runner.

    `acts`: None in mode shadow, which changes nothing. `actors`, `markers`: one for each scheduler. `look_again`:
    returns new decisions on these holders from present evidence and surroundings; raises AnswerError, and Refused
    during a pause.
    `may_write`: called before each action.
    """

    proofs: Proofs
    gates: Gates
    acts: Acts | None
    actors: Mapping[str, Actor]
    markers: Mapping[str, Marker]
    look_again: Callable[[Collection[HolderName]], Mapping[HolderName, Decision]]
    may_write: Callable[[], bool]


class ActionRunner:
    """Takes each proposal through the gates. Other classes contain the limits, the turns and the proofs."""

    def __init__(self, settings: Settings, parts: Parts, telemetry: Telemetry, clock: Clock) -> None:
        self._settings = settings
        self._verbs = allowed_kinds(settings.kinds)
        self._parts = parts
        self._telemetry = telemetry
        self._clock = clock
        self._asker = ProofAsker(parts.proofs, clock, asks_demand=settings.demand != "ignored")
        self._limits = ActionLimits(settings, clock)
        self._freed = FreedGpus(clock)
        self._said: dict[str, str] = {}  # by title, the reason that was logged last
        self._shadowed: dict[tuple[str, str], None] = {}  # title and UID of the targets that mode shadow has counted

    def run(self, decisions: Collection[Decision]) -> None:
        """Runs one cycle for the holders that are marked underused. Raises nothing."""
        try:
            self._run(decisions)
        except Exception:  # the marks of this cycle remain, and those of the next must not wait for it
            log.exception("internal error: this cycle takes no further action")

    def _run(self, decisions: Collection[Decision]) -> None:
        proposals, spared = propose(decisions, self._verbs)
        for each in spared:
            self._skip(each.title, each.skipped, each.decisions)
        try:
            self._complete_all()
        except MarkError as exc:
            self._skip_all(proposals, Skipped("journal", str(exc)))
            return
        if not proposals and not self._freed.pools:
            return
        self._limits.begin_cycle({proposal.title for proposal in proposals})
        proposals = self._asker.take_turns(proposals)
        try:
            proven = self._asker.ask(proposals, self._freed.pools)
        except Refused as exc:
            self._skip_all(proposals, Skipped(exc.reason, str(exc)))
            return
        self._freed.observe(proven.pending)
        if self._parts.acts is not None:
            self._parts.acts.note_used(self._freed.used)
        # The targets that were read longest ago come first: some are skipped after each read.
        for proposal in sorted(proposals, key=lambda each: self._limits.last_read(each.title)):
            try:
                self._asker.object_to_trouble(proposal.owner)
                guard(self._consider, proposal, proven)
            except AnswerError as exc:
                refused = self._asker.note_trouble(exc, proposal.owner)
                self._skip(proposal.title, Skipped(refused.reason, str(refused)), proposal.decisions)
            except Refused as exc:
                self._skip(proposal.title, Skipped(exc.reason, str(exc)), proposal.decisions)
            except MarkError as exc:
                if exc.result not in NOT_ITS_FAULT:
                    self._limits.note_failure(proposal.title)
                self._skip(proposal.title, Skipped(exc.result, str(exc)), proposal.decisions)
                if exc.result == "throttled":
                    return

    def _complete_all(self) -> None:
        """Completes the actions that have begun. Raises MarkError if it cannot read the journal."""
        acts = self._parts.acts
        if acts is not None:
            acts.complete_all()
            self._freed.follow(acts.entries, self._clock.wall())

    def _consider(self, proposal: Proposal, proven: Proven) -> None:
        """Checks all gates, then acts. Raises Refused, MarkError, AnswerError."""
        gates, acts = self._parts.gates, self._parts.acts
        actor = self._parts.actors.get(proposal.first.name.scheduler)
        self._object_to_limits(proposal)
        warned = gates.object_to_warnings(proposal, proven.warnings)
        standing = gates.object_to_record(proposal)
        demand = _require_demand(proposal, proven, self._freed)
        if actor is None:
            raise Refused("kind", f"the reconciler is not set up for {proposal.first.name.scheduler}")
        self._limits.object_to_reading()
        self._limits.note_reading(proposal.title)
        target, fresh = self._prove_target(proposal, actor)
        if self._settings.mode == "act":  # only this mode has the right to a dry run
            actor.rehearse(target)
        gates.object_to_age(fresh)  # last, because the other checks take time
        if self._settings.mode == "shadow":
            self._shadow(proposal, target, demand)
            return
        if acts is None or not self._parts.may_write():
            raise Refused("fenced", "another replica decides now")
        self._limits.note_act()
        told = acts.begin(actor, proposal, target, Receipt(warned, standing, demand, self._settings.override))
        self._telemetry.note_spared(proposal.decisions, PENDING if told in ("", ENDING) else told)
        if told not in ("", ENDING):
            self._limits.note_failure(proposal.title)
        self._freed.follow(acts.entries, self._clock.wall())

    def _prove_target(self, proposal: Proposal, actor: Actor) -> tuple[Target, Mapping[HolderName, Decision]]:
        """Returns the live target and new decisions on its holders, after all checks of the target. Raises Refused,
        MarkError, AnswerError.
        """
        wall, began = self._clock.wall(), self._clock.monotonic()
        idle_s = wall - proposal.since_wall
        target = actor.read(proposal.target, proposal.namespace, self._verbs, idle_s, wall)
        self._object_to_target(target, {each.name: each for each in proposal.decisions})
        self._parts.gates.object_to_work(proposal, target)
        fresh = self._look_again(proposal, target)
        if self._clock.monotonic() - began > READ_S:  # owners may have asked for something meanwhile
            now = actor.read(proposal.target, proposal.namespace, self._verbs, idle_s, self._clock.wall())
            if {part.incarnation for part in now.beside} != {part.incarnation for part in target.beside}:
                raise Refused("changed", "its members without GPUs changed during the check")
            target = now
            self._object_to_target(target, fresh)
        return target, fresh

    def _shadow(self, proposal: Proposal, target: Target, demand: Mapping[str, float]) -> None:
        """Counts, once for each target, the action that mode act would take, because mode act takes it only once."""
        self._say(proposal.title, target.verb, f"mode act would {target.verb} it")
        key = proposal.title, target.reference.uid
        if key not in self._shadowed:
            if len(self._shadowed) >= SAID_MAX:
                del self._shadowed[next(iter(self._shadowed))]
            self._shadowed[key] = None
            self._telemetry.count_action(target.verb, "shadow")
            self._limits.note_act(is_shadow=True)
            self._freed.note_shadow(proposal.title, proposal.gpus, demand)

    def _object_to_limits(self, proposal: Proposal) -> None:
        acts = self._parts.acts
        if acts is not None and acts.is_pending(proposal.title):
            raise Refused("pending", "an action on it has begun, and its result is not known yet")
        self._limits.object_to(proposal.title, acts.begun_within_an_hour() if acts is not None else None)

    def _object_to_target(self, target: Target, decisions: Mapping[HolderName, Decision]) -> None:
        notes = self._parts.acts.notes if self._parts.acts is not None else set()
        held = why_not(target, decisions, self._verbs, notes)
        if held is not None:
            raise Refused(*held)
        self._parts.gates.object_to_grace(target)

    def _look_again(self, proposal: Proposal, target: Target) -> Mapping[HolderName, Decision]:
        """Returns new decisions on every holder that the action would end. Raises Refused if a decision has changed,
        and AnswerError.
        """
        holding = {part.name for part in target.ends if part.units != 0}
        found = self._parts.look_again(holding | proposal.members)
        then = {decision.name: decision for decision in proposal.decisions}
        fresh = {name: found[name] for name in holding if name in found}
        for name, decision in sorted(fresh.items()):
            before = then.get(name)
            if before is None or decision.stage != before.stage:
                reason = "exempt" if decision.stage == "exempt" or decision.is_capped else "changed"
                raise Refused(reason, f"{decision.title} is {decision.stage} now: {decision.reason}")
        self._object_to_target(target, fresh)
        marker, wall = self._parts.markers[proposal.first.name.scheduler], self._clock.wall()
        for decision in fresh.values():
            marker.inspect(decision, wall)
        return fresh

    def _skip_all(self, proposals: Sequence[Proposal], skipped: Skipped) -> None:
        for proposal in proposals:
            self._skip(proposal.title, skipped, proposal.decisions)

    def _skip(self, title: str, skipped: Skipped, decisions: Sequence[Decision]) -> None:
        self._telemetry.count_not_acted(skipped.reason)
        self._telemetry.note_spared(decisions, skipped.reason)
        self._say(title, skipped.reason, f"no action: {skipped.why}")

    def _say(self, title: str, reason: str, text: str) -> None:
        """Logs a reason once, not in every cycle."""
        if self._said.get(title) == reason:
            return
        if len(self._said) >= SAID_MAX:
            self._said.clear()
        self._said[title] = reason
        log.info("%s: %s", title, text)


def _require_demand(proposal: Proposal, proven: Proven, freed: FreedGpus) -> Mapping[str, float]:
    """Returns the GPUs that others wait for, in the pools that all holders of the proposal belong to.

    Raises Refused if no pod or job waits.
    """
    if proven.demand is None:
        return {}
    waiting = [proven.demand.get(decision.name, {}) for decision in proposal.decisions]
    wanted = freed.wanted(waiting, proposal.gpus)
    if not wanted:
        why = f"others wait for fewer GPUs than its {proposal.gpus}; GPUs that were already taken back are subtracted"
        raise Refused("no_demand", why)
    return wanted
