"""Acts on holders that are marked underused, or says what it would do: the gates, in order, each with its reason.

Each cycle first completes what an earlier one, or another process, has begun.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.clock import Clock
from gpu_exporter.defaults import Actions as Settings
from gpu_exporter.durations import describe_duration
from gpu_exporter.reconciler.actions.actor import Actor
from gpu_exporter.reconciler.actions.acts import LOST, MAY_BE_DONE, ActionObserver, Acts, Receipt
from gpu_exporter.reconciler.actions.freed import FreedGpus
from gpu_exporter.reconciler.actions.gates import Gates
from gpu_exporter.reconciler.actions.journal import HOUR_S
from gpu_exporter.reconciler.actions.proofs import Proofs, Warned
from gpu_exporter.reconciler.actions.propose import Proposal, allowed_kinds, propose
from gpu_exporter.reconciler.actions.warnings import SeenWarnings
from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.evidence.records import EvidenceError, HolderName
from gpu_exporter.reconciler.marks import Marker, MarkError, Refused, guard
from gpu_exporter.reconciler.target import Held, Target, why_not

log = logging.getLogger(__name__)
FAILED_S = HOUR_S  # what an attempt failed on is left alone for so long, and takes no other's place
PATIENCE_S = 120.0  # after a source of proofs failed: one that is slow must not make every cycle slow
ASKED_MAX = 100  # proposals of which a cycle asks for proofs
TARGETS_MAX = 10  # targets that a cycle reads: each is a list of a namespace, or of all jobs
WITHIN_S = 60.0  # of a cycle; marks are withdrawn by the next one
READ_S = 5.0  # a target that was read longer ago is read again before the act
NOT_ITS_FAULT = (
    "conflict",
    "fenced",
    "journal",
    "limit",
    "throttled",
)  # results of a target that may be tried again at once
SAID_MAX = 1000  # holders of which is remembered what was logged


class Parts(NamedTuple):
    """What a runner is made of.

    `acts`: None where nothing is done, in mode shadow. `actors`, `markers`: by scheduler. `look_again`: decisions on
    these holders by evidence and surroundings of now; raises EvidenceError, and Refused while there is a pause.
    `may_write`: asked before each action.
    """

    proofs: Proofs
    gates: Gates
    acts: Acts | None
    actors: Mapping[str, Actor]
    markers: Mapping[str, Marker]
    look_again: Callable[[Collection[HolderName]], Mapping[HolderName, Decision]]
    may_write: Callable[[], bool]


class _Proven(NamedTuple):
    """What the sources say in this cycle. `demand`: None where it does not matter."""

    warnings: Mapping[HolderName, Warned]
    demand: Mapping[HolderName, Mapping[str, float]] | None


class ActionRunner:
    """Remembers from one cycle to the next what was seen and said."""

    def __init__(self, settings: Settings, parts: Parts, observer: ActionObserver, clock: Clock) -> None:
        self._settings = settings
        self._verbs = allowed_kinds(settings.kinds)
        self._parts = parts
        self._observer = observer
        self._clock = clock
        self._seen = SeenWarnings(clock)
        self._freed: FreedGpus | None = None  # until the journal was read
        self._shadowed: deque[float] = deque()  # when each act of mode shadow was counted (monotonic)
        self._failed_at: dict[str, float] = {}  # monotonic; by title, what is left alone for a while
        self._said: dict[str, str] = {}
        self._turn = 0
        self._left = 0  # acts that this cycle may still do, and ...
        self._reads_left = 0  # ... targets that it may still read, ...
        self._until = 0.0  # ... and until when (monotonic)
        self._read_at: dict[str, float] = {}  # monotonic; by title, when a target was read last
        self._trouble: tuple[float, str] | None = None  # until when (monotonic) no proof is asked for, and why

    def run(self, decisions: Collection[Decision]) -> None:
        """One cycle over the holders that are underused, and marked so. Raises nothing."""
        try:
            self._run(decisions)
        except Exception:  # the marks of this cycle stand, and those of the next must not wait for it
            log.exception("unforeseen")

    def _run(self, decisions: Collection[Decision]) -> None:
        proposals, spared = propose(decisions, self._verbs)
        for each in spared:
            self._hold(each.title, each.held, each.decisions)
        try:
            freed = self._complete_all()
        except MarkError as exc:
            for proposal in proposals:
                self._hold(proposal.title, Held("journal", str(exc)), proposal.decisions)
            return
        if not proposals:
            return
        titles = {proposal.title for proposal in proposals}
        self._read_at = {title: at for title, at in self._read_at.items() if title in titles}
        self._seen.begin_cycle(-(-len(proposals) // ASKED_MAX))
        proposals = self._take_turns(proposals)
        now, trouble = self._clock.monotonic(), self._trouble
        if trouble is None or now >= trouble[0]:
            try:
                proven, trouble = self._prove(proposals), None
            except EvidenceError as exc:
                trouble = now + PATIENCE_S, str(exc)
        self._trouble = trouble
        if trouble is not None:
            for proposal in proposals:
                self._hold(proposal.title, Held("proof", trouble[1]), proposal.decisions)
            return
        self._left, self._reads_left, self._until = self._settings.cycle_max, TARGETS_MAX, now + WITHIN_S
        # Those that were read longest ago first: some are held after each read.
        for proposal in sorted(proposals, key=lambda each: self._read_at.get(each.title, -math.inf)):
            try:
                if self._trouble is not None:
                    raise Refused("proof", self._trouble[1])
                guard(self._consider_now, proposal, proven, freed)
            except Refused as exc:
                self._hold(proposal.title, Held(exc.reason, str(exc)), proposal.decisions)
            except MarkError as exc:
                if exc.result not in NOT_ITS_FAULT:
                    self._failed_at[proposal.title] = self._clock.monotonic()
                self._hold(proposal.title, Held(exc.result, str(exc)), proposal.decisions)
                if exc.result == "throttled":
                    return

    def _complete_all(self) -> FreedGpus:
        """Complete what was begun; what it freed. Raises MarkError where that is not known."""
        acts = self._parts.acts
        if acts is not None:
            acts.complete_all()
        if self._freed is None:
            self._freed = FreedGpus(self._clock)
            for age_s, gpus, waited_for in acts.freed() if acts is not None else ():
                self._freed.note(gpus, waited_for, age_s)
        return self._freed

    def _take_turns(self, proposals: list[Proposal]) -> list[Proposal]:
        """So many as one cycle can ask about, the next ones in the next cycle: some are held for days."""
        if len(proposals) <= ASKED_MAX:
            return proposals
        first = self._turn % len(proposals)
        self._turn = first + ASKED_MAX
        return [*proposals[first:], *proposals[:first]][:ASKED_MAX]

    def _prove(self, proposals: Sequence[Proposal]) -> _Proven:
        """What the sources say of these. Raises EvidenceError."""
        asked = {name for proposal in proposals for name in proposal.names}
        warnings = self._seen.note(self._parts.proofs.read_warnings(asked), asked)
        if self._settings.demand == "ignored":
            return _Proven(warnings, None)
        return _Proven(warnings, self._parts.proofs.read_demand(set(warnings)) if warnings else {})

    def _consider_now(self, proposal: Proposal, proven: _Proven, freed: FreedGpus) -> None:
        """As _consider; a source that fails is left alone for a while."""
        try:
            self._consider(proposal, proven, freed)
        except EvidenceError as exc:
            self._trouble = self._clock.monotonic() + PATIENCE_S, str(exc)
            raise Refused("proof", str(exc)) from exc

    def _consider(self, proposal: Proposal, proven: _Proven, freed: FreedGpus) -> None:
        """Go through the gates, and act where all are open. Raises Refused, MarkError, EvidenceError."""
        gates, actor = self._parts.gates, self._parts.actors.get(proposal.first.name.scheduler)
        self._object_to_limits(proposal)
        warned = gates.object_to_warnings(proposal, proven.warnings)
        standing = gates.object_to_record(proposal)
        demand = self._wanted(proposal, proven, freed)
        if actor is None:
            raise Refused("kind", "there is no way to act on it")
        if self._reads_left <= 0:
            raise Refused("limit", f"{TARGETS_MAX} targets were read in this cycle, others come in the next one")
        self._reads_left -= 1
        self._read_at[proposal.title] = self._clock.monotonic()
        wall = self._clock.wall()
        idle_s = wall - proposal.since_wall
        began = self._clock.monotonic()
        target = actor.read(proposal.target, proposal.namespace, self._verbs, idle_s, wall)
        self._object_to_target(target, {each.name: each for each in proposal.decisions})
        gates.object_to_work(proposal, target)
        fresh = self._look_again(proposal, target)
        if self._clock.monotonic() - began > READ_S:  # owners may have asked for something meanwhile
            now = actor.read(proposal.target, proposal.namespace, self._verbs, idle_s, self._clock.wall())
            if {part.incarnation for part in now.beside} != {part.incarnation for part in target.beside}:
                raise Refused("changed", "its members without GPUs are others than a moment ago")
            target = now
            self._object_to_target(target, fresh)
        if self._settings.mode == "act":  # which has the right to ask
            actor.rehearse(target)
        gates.object_to_age(fresh)  # after all that takes time
        if self._settings.mode == "shadow":
            if self._say(proposal.title, target.verb, f"mode act would {target.verb} it"):
                self._observer.count_action(target.verb, "shadow")
                self._shadowed.append(self._clock.monotonic())
                self._left -= 1
                freed.note(proposal.gpus, demand)
            return
        if self._parts.acts is None or not self._parts.may_write():
            raise Refused("fenced", "another replica decides by now")
        receipt = Receipt(warned, standing, demand, self._settings.override)
        self._left -= 1
        told = self._parts.acts.begin(actor, proposal, target, receipt)
        if told == LOST or told not in MAY_BE_DONE:
            self._failed_at[proposal.title] = self._clock.monotonic()
        if told in MAY_BE_DONE:
            freed.note(proposal.gpus, demand)

    def _object_to_limits(self, proposal: Proposal) -> None:
        now, acts = self._clock.monotonic(), self._parts.acts
        while self._shadowed and now - self._shadowed[0] >= HOUR_S:
            self._shadowed.popleft()
        self._failed_at = {title: at for title, at in self._failed_at.items() if now - at < FAILED_S}
        if acts is not None and acts.is_pending(proposal.title):
            raise Refused("pending", "it was acted on a moment ago, and whether that had an effect is not known yet")
        if proposal.title in self._failed_at:
            raise Refused("failed", f"the last attempt failed less than {describe_duration(FAILED_S)} ago")
        begun = acts.begun_within_an_hour() if acts is not None else len(self._shadowed)
        if now > self._until:
            raise Refused("limit", f"this cycle has spent its {WITHIN_S:.0f} s on actions, others come in the next one")
        if self._left <= 0 or begun >= self._settings.hour_max:
            raise Refused("limit", "actions.cycle_max or actions.hour_max is reached")

    def _wanted(self, proposal: Proposal, proven: _Proven, freed: FreedGpus) -> Mapping[str, float]:
        """GPUs that are waited for, by pool, in pools that all of its holders are of."""
        if proven.demand is None:
            return {}
        wanted = freed.wanted([proven.demand.get(decision.name, {}) for decision in proposal.decisions])
        if not wanted:
            raise Refused(
                "no_demand", "no GPU of this kind is waited for, or enough were taken back for those who wait"
            )
        return wanted

    def _object_to_target(self, target: Target, decisions: Mapping[HolderName, Decision]) -> None:
        notes = self._parts.acts.notes if self._parts.acts is not None else set()
        held = why_not(target, decisions, self._verbs, notes)
        if held is not None:
            raise Refused(*held)

    def _look_again(self, proposal: Proposal, target: Target) -> Mapping[HolderName, Decision]:
        """Decisions as of now on all that the target would end. Raises Refused if they differ, EvidenceError."""
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

    def _hold(self, title: str, held: Held, decisions: Sequence[Decision]) -> None:
        self._observer.count_held(held.reason)
        self._observer.note_spared(decisions, held.reason)
        self._say(title, held.reason, f"nothing is done: {held.why}")

    def _say(self, title: str, reason: str, text: str) -> bool:
        """Log once, not in every cycle; whether it was now."""
        if self._said.get(title) == reason:
            return False
        if len(self._said) >= SAID_MAX:
            self._said.clear()
        self._said[title] = reason
        log.info("%s: %s", title, text)
        return True
