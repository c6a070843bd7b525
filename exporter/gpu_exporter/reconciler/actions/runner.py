"""Acts on holders that are marked underused, or says what it would do: the gates, in order, each with its reason.

Nothing is remembered that would be needed after a crash: what was done stands on the live object. What is kept here
only limits: how many actions there were in the last hour, and how many GPUs they freed.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.clock import Clock
from gpu_exporter.config.rules import SECTION
from gpu_exporter.defaults import Actions as Settings
from gpu_exporter.durations import describe_duration, format_duration
from gpu_exporter.reconciler.actions.actor import Actor, Found
from gpu_exporter.reconciler.actions.proofs import Proofs, Record, RecordKey, Warned
from gpu_exporter.reconciler.actions.propose import Proposal, allowed_kinds, propose
from gpu_exporter.reconciler.audit import AuditLog
from gpu_exporter.reconciler.evidence import EvidenceError, HolderName
from gpu_exporter.reconciler.marks import Marker, MarkError, Refused, guard
from gpu_exporter.reconciler.policy import Decision
from gpu_exporter.reconciler.surroundings import Surroundings

log = logging.getLogger(__name__)
ACT_FRESH_S = 60.0  # evidence that is older is of a time in which the holder may have begun to work
HOUR_S = 3600.0
FREED_S = 6 * HOUR_S  # after so long what was freed is no longer set against what is waited for
UNSEEN_MAX_S = 900.0  # a warning that was not asked about for so long is a new one
CYCLE_MAX_S = 120.0
FAILED_S = HOUR_S  # what an attempt failed on is left alone for so long, and takes no other's place
PATIENCE_S = 120.0  # after a source of proofs failed: one that is slow must not make every cycle slow
ASKED_MAX = 100  # proposals of which a cycle asks for proofs
SAID_MAX = 1000  # holders of which is remembered what was logged


class ActionObserver(Protocol):
    """Counts what was done, and what was not."""

    def count_action(self, action: str, result: str) -> None:
        """done, unconfirmed, shadow, or why it failed: as in MarkError, and refused."""

    def count_held(self, reason: str) -> None:
        """Nothing was done to an underused group in this cycle, for this reason."""


class Receipt(NamedTuple):
    """What was proven before an action, for the audit log. `record`: None where the site's override stands for it."""

    warned: Mapping[HolderName, Warned]
    record: Record | None
    demand: Mapping[str, float]


class _Proven(NamedTuple):
    """What the sources say in this cycle."""

    warnings: Mapping[HolderName, Warned]
    records: Mapping[RecordKey, Record] | None
    demand: Mapping[HolderName, Mapping[str, float]] | None


class _Freed(NamedTuple):
    """GPUs of a pool that were taken back at `at` (monotonic seconds), when so many were waited for."""

    at: float
    pool: str
    gpus: int
    waiting: float


class _Sight(NamedTuple):
    """When this process has seen a warning first, and last (monotonic seconds)."""

    first: float
    last: float


class ActionRunner:
    """Remembers from one cycle to the next how much it did."""

    def __init__(
        self,
        settings: Settings,
        proofs: Proofs,
        actors: Sequence[Actor],
        markers: Mapping[str, Marker],
        observer: ActionObserver,
        clock: Clock,
        audit: AuditLog | None,
        may_write: Callable[[], bool],
    ) -> None:
        """`markers`: by scheduler. `may_write`: asked before each action."""
        self._settings = settings
        self._kinds = allowed_kinds(settings.kinds)
        self._proofs = proofs
        self._actors = {actor.scheduler: actor for actor in actors}
        self._markers = markers
        self._observer = observer
        self._clock = clock
        self._audit = audit
        self._may_write = may_write
        self._done_at: deque[float] = deque()  # monotonic
        self._freed: list[_Freed] = []
        self._warned: dict[HolderName, _Sight] = {}
        self._failed_at: dict[str, float] = {}  # monotonic; by title, what is left alone for a while
        self._said: dict[str, str] = {}
        self._turn = 0
        self._last_run: float | None = None  # monotonic
        self._unseen_max_s = UNSEEN_MAX_S
        self._trouble: tuple[float, str] | None = None  # until when (monotonic) no proof is asked for, and why

    def run(self, decisions: Collection[Decision]) -> None:
        """One cycle over the holders that are underused, and marked so. Raises nothing."""
        try:
            self._run(decisions)
        except Exception:  # the marks of this cycle stand, and those of the next must not wait for it
            log.exception("unforeseen")

    def _run(self, decisions: Collection[Decision]) -> None:
        proposals, held = propose(decisions, self._kinds)
        for each in held:
            self._hold(each.title, each.reason, each.why)
        if not proposals:
            return
        self._unseen_max_s = self._round_s(len(proposals))
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
                self._hold(proposal.title, "proof", trouble[1])
            return
        left = self._settings.cycle_max
        for proposal in proposals:
            try:
                receipt = self._check(proposal, proven, left)
                left -= guard(self._act, proposal, receipt)
            except Refused as exc:
                self._hold(proposal.title, exc.reason, str(exc))
            except MarkError as exc:
                self._failed_at[proposal.title] = self._clock.monotonic()
                self._hold(proposal.title, exc.result, str(exc))
                if exc.result == "throttled":
                    return

    def _round_s(self, proposals: int) -> float:
        """For how long a warning may go unseen: at least twice the time in which each of so many has its turn."""
        now = self._clock.monotonic()
        # A process that stood still has no long cycles: it has seen nothing meanwhile.
        cycle_s = min(now - self._last_run, CYCLE_MAX_S) if self._last_run is not None else 0.0
        self._last_run = now
        turns = math.ceil(proposals / ASKED_MAX)
        return max(UNSEEN_MAX_S, 2 * cycle_s * turns) if turns > 1 else UNSEEN_MAX_S

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
        warnings = self._watch(self._proofs.read_warnings(asked), asked)
        names = {name for proposal in proposals for name in proposal.names if name in warnings}
        if not names:
            return _Proven(warnings, None, None)
        records = None if self._settings.override else self._proofs.read_records()
        demand = None if self._settings.demand == "ignored" else self._proofs.read_demand(names)
        return _Proven(warnings, records, demand)

    def _watch(
        self, warnings: Mapping[HolderName, Warned], asked: Collection[HolderName]
    ) -> Mapping[HolderName, Warned]:
        """The warnings, each since this process has seen it without a gap: what an alert says of its own beginning is
        silent on silences that have ended since, on routes that were changed, and on an Alertmanager that was away.
        """
        now = self._clock.monotonic()
        for name in [name for name, sight in self._warned.items() if now - sight.last > self._unseen_max_s]:
            del self._warned[name]
        for name in asked:
            if name not in warnings:
                self._warned.pop(name, None)
                continue
            first = self._warned[name].first if name in self._warned else now
            self._warned[name] = _Sight(first, now)
        wall = self._clock.wall()
        return {
            name: warning._replace(since_wall=max(warning.since_wall, wall - (now - self._warned[name].first)))
            for name, warning in ((name, warnings[name]) for name in asked if name in warnings)
        }

    def _check(self, proposal: Proposal, proven: _Proven, left: int) -> Receipt:
        """What was proven. Raises Refused where something is not."""
        now = self._clock.monotonic()
        while self._done_at and now - self._done_at[0] >= HOUR_S:
            self._done_at.popleft()
        self._failed_at = {title: at for title, at in self._failed_at.items() if now - at < FAILED_S}
        if proposal.title in self._failed_at:
            raise Refused("failed", f"the last attempt failed less than {describe_duration(FAILED_S)} ago")
        if left <= 0 or len(self._done_at) >= self._settings.hour_max:
            raise Refused("limit", "actions.cycle_max or actions.hour_max is reached")
        warned = {name: proven.warnings[name] for name in proposal.names if name in proven.warnings}
        self._object_to_warnings(proposal, warned)
        return Receipt(warned, self._object_to_record(proposal, proven), self._object_to_demand(proposal, proven))

    def _object_to_age(self, proposal: Proposal) -> None:
        """Raise Refused when the newest sample of any of its GPUs is too old to act on."""
        wall = self._clock.wall()
        for decision in proposal.decisions:
            ages = [max(0.0, unit.sample_age_s) for unit in decision.units if unit.sample_age_s is not None]
            if len(ages) < len(decision.units) or wall - decision.observed_wall + max(ages) > ACT_FRESH_S:
                raise Refused("stale", f"a sample of {decision.title} is older than {ACT_FRESH_S:.0f} s")

    def _object_to_warnings(self, proposal: Proposal, warned: Mapping[HolderName, Warned]) -> None:
        wall, needed_s = self._clock.wall(), self._settings.warned_for
        for decision in proposal.decisions:
            if decision.name not in warned:
                raise Refused("not_warned", f"Alertmanager has given nobody an alert on {decision.title}")
            since_wall = warned[decision.name].since_wall
            if since_wall < (decision.start_wall or 0.0):
                raise Refused("not_warned", f"the alert is older than {decision.title}, so it is about an earlier one")
            lasted_s = wall - since_wall
            if lasted_s < needed_s:
                since = describe_duration(max(0.0, lasted_s))
                raise Refused(
                    "not_warned", f"its owner has been warned for {since}, {format_duration(needed_s)} are needed"
                )

    def _object_to_record(self, proposal: Proposal, proven: _Proven) -> Record | None:
        if self._settings.override:
            return None
        settings = self._settings
        found: list[Record] = []
        for policy, kind in sorted({_record_key(decision) for decision in proposal.decisions}):
            record = (proven.records or {}).get((policy, kind), Record(0.0, 0.0))
            what = f"of policy {policy} on class {kind} in {format_duration(settings.shadow_for)}"
            if record.decisions < settings.shadow_decisions:
                needed = settings.shadow_decisions
                raise Refused("shadow", f"{record.decisions:.0f} decisions {what}, {needed} are needed")
            if record.regrets > settings.regret_max * record.decisions:
                share = f"{record.regrets:.0f} of {record.decisions:.0f}"
                raise Refused("regret", f"{share} decisions {what} were regretted")
            found.append(record)
        return min(found)

    def _object_to_demand(self, proposal: Proposal, proven: _Proven) -> Mapping[str, float]:
        """GPUs that are waited for, by pool, in pools that all of its holders are of."""
        if proven.demand is None:
            return {}
        now = self._clock.monotonic()
        wanted = [proven.demand.get(decision.name, {}) for decision in proposal.decisions]
        pools = set(wanted[0]).intersection(*wanted[1:])
        found: dict[str, float] = {}
        for pool in pools:
            waiting = min(each[pool] for each in wanted)
            # What was freed counts until so many fewer are waited for: pods leave the numbers late, and one that can
            # never be scheduled does not leave them at all.
            self._freed = [
                freed
                for freed in self._freed
                if freed.pool != pool or (now - freed.at < FREED_S and waiting > freed.waiting - freed.gpus)
            ]
            left = waiting - sum(freed.gpus for freed in self._freed if freed.pool == pool)
            if left >= 1:
                found[pool] = left
        if not found:
            raise Refused("no_demand", "nobody waits for such GPUs, or enough were taken back for those who do")
        return found

    def _object_to_surroundings(self, proposal: Proposal) -> None:
        """Raise Refused when what surrounds the holders is no longer what was decided on."""
        marker, wall = self._markers[proposal.first.name.scheduler], self._clock.wall()
        around = marker.survey(proposal.names, proposal.names, wall)
        for decision in proposal.decisions:
            now, then = around[decision.name], decision.around
            if not isinstance(now, Surroundings) or then is None:
                raise Refused("unknown", f"what surrounds {decision.title} is not known now")
            if now.exemption is not None or now.ceiling or now.idle_after_s > then.idle_after_s:
                raise Refused("exempt", f"{decision.title}: somebody asked to keep its GPUs")
            members = {member.name for member in now.members} or {decision.name}
            if now.group != then.group or now.kind != then.kind or not members <= proposal.names:
                raise Refused("changed", f"what surrounds {decision.title} has changed")
            marker.inspect(decision, wall)

    def _act(self, proposal: Proposal, receipt: Receipt) -> int:
        """Do it, or say what would be done; how much of the limit that takes. Raises Refused, MarkError."""
        actor = self._actors.get(proposal.first.name.scheduler)
        if actor is None:
            raise Refused("kind", "there is no way to act on it")
        actor.find(proposal, self._kinds, self._clock.wall())  # cheap, and says no for good to what was acted on
        self._object_to_surroundings(proposal)
        found = actor.find(proposal, self._kinds, self._clock.wall())  # what is acted on is what was read last
        self._object_to_age(proposal)  # after all that takes time
        if self._settings.mode == "shadow":
            if not self._say(proposal.title, found.kind, f"mode act would {found.kind} it"):
                return 0
            self._observer.count_action(found.kind, "shadow")
            self._spend(proposal, receipt)
            return 1
        if not self._may_write():
            raise Refused("fenced", "another replica decides by now")
        if not self._note(proposal, found, receipt, "begins"):
            raise Refused("audit", "the audit log cannot be written, so nothing is done")
        self._spend(proposal, receipt)
        try:
            result = guard(actor.act, proposal, found, self._clock.wall())
        except (Refused, MarkError) as exc:
            result = exc.result if isinstance(exc, MarkError) else "refused"
            self._failed_at[proposal.title] = self._clock.monotonic()
            log.warning("%s: %s failed: %s", proposal.title, found.kind, exc)
        else:
            log.info("%s: %s: %s; undo: %s", proposal.title, found.kind, result, found.undo)
        self._observer.count_action(found.kind, result)
        self._note(proposal, found, receipt, result)
        return 1

    def _spend(self, proposal: Proposal, receipt: Receipt) -> None:
        """What is begun counts for the limits, since nobody knows how far it goes."""
        now = self._clock.monotonic()
        self._done_at.append(now)
        self._freed += [_Freed(now, pool, proposal.gpus, waiting) for pool, waiting in receipt.demand.items()]

    def _note(self, proposal: Proposal, found: Found, receipt: Receipt, result: str) -> bool:
        """Write to the audit log; False where that failed."""
        if self._audit is None:
            return True
        is_written = True
        for decision in proposal.decisions:
            warned, record = receipt.warned[decision.name], receipt.record
            is_written &= self._audit.note_action(
                decision,
                {
                    "act": found.kind,
                    "target": proposal.target.title,
                    "result": result,
                    "warned_since": warned.since_wall,
                    "receivers": list(warned.receivers),
                    "decisions": record.decisions if record is not None else None,
                    "regrets": record.regrets if record is not None else None,
                    "override": self._settings.override,
                    "waited_for": dict(receipt.demand),
                },
            )
        return is_written

    def _hold(self, title: str, reason: str, why: str) -> None:
        self._observer.count_held(reason)
        self._say(title, reason, f"nothing is done: {why}")

    def _say(self, title: str, reason: str, text: str) -> bool:
        """Log once, not in every cycle; whether it was now."""
        if self._said.get(title) == reason:
            return False
        if len(self._said) >= SAID_MAX:
            self._said.clear()
        self._said[title] = reason
        log.info("%s: %s", title, text)
        return True


def _record_key(decision: Decision) -> RecordKey:
    """The policy that decided, and the class of the holder, as they are counted."""
    policy = decision.rule.name if decision.rule is not None else SECTION
    return policy, decision.around.kind if decision.around is not None else ""
