"""Acts on holders that are marked underused, or says what it would do: the gates, in order, each with its reason.

Nothing is remembered that would be needed after a crash: what was done stands on the live object. What is kept here
only limits: how many actions there were in the last hour, and how many GPUs they freed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.clock import Clock
from gpu_exporter.config.rules import SECTION
from gpu_exporter.defaults import Actions as Settings
from gpu_exporter.durations import describe_duration, format_duration
from gpu_exporter.reconciler.actions.actor import Actor, Found
from gpu_exporter.reconciler.actions.proofs import Proofs, Record, RecordKey, Warned
from gpu_exporter.reconciler.actions.propose import Proposal, propose
from gpu_exporter.reconciler.audit import AuditLog
from gpu_exporter.reconciler.evidence import EvidenceError, HolderName
from gpu_exporter.reconciler.marks import Marker, MarkError, Refused
from gpu_exporter.reconciler.policy import Decision
from gpu_exporter.reconciler.surroundings import Surroundings

log = logging.getLogger(__name__)
ACT_FRESH_S = 60.0  # evidence that is older is of a time in which the holder may have begun to work
HOUR_S = 3600.0
FREED_S = 900.0  # what was freed less than so long ago may not be in the numbers of what is waited for yet
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
        self._kinds = tuple(each.strip() for each in settings.kinds.split(",") if each.strip())
        self._proofs = proofs
        self._actors = {actor.scheduler: actor for actor in actors}
        self._markers = markers
        self._observer = observer
        self._clock = clock
        self._audit = audit
        self._may_write = may_write
        self._done_at: deque[float] = deque()  # monotonic
        self._freed: deque[tuple[float, str, int]] = deque()  # when (monotonic), of which pool, how many GPUs
        self._said: dict[str, str] = {}
        self._turn = 0
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
                self._hold(proposal.target.title, "proof", trouble[1])
            return
        left = self._settings.cycle_max
        for proposal in proposals:
            try:
                receipt = self._check(proposal, proven, left)
                left -= self._act(proposal, receipt)
            except Refused as exc:
                self._hold(proposal.target.title, exc.reason, str(exc))
            except MarkError as exc:
                self._hold(proposal.target.title, exc.result, str(exc))
                if exc.result == "throttled":
                    return

    def _take_turns(self, proposals: list[Proposal]) -> list[Proposal]:
        """So many as one cycle can ask about, the next ones in the next cycle: some are held for days."""
        if len(proposals) <= ASKED_MAX:
            return proposals
        first = self._turn % len(proposals)
        self._turn = first + ASKED_MAX
        return [*proposals[first:], *proposals[:first]][:ASKED_MAX]

    def _prove(self, proposals: Sequence[Proposal]) -> _Proven:
        """What the sources say of these. Raises EvidenceError."""
        warnings = self._proofs.read_warnings({name for proposal in proposals for name in proposal.names})
        names = {name for proposal in proposals for name in proposal.names if name in warnings}
        if not names:
            return _Proven(warnings, None, None)
        records = None if self._settings.override else self._proofs.read_records()
        demand = None if self._settings.demand == "ignored" else self._proofs.read_demand(names)
        return _Proven(warnings, records, demand)

    def _check(self, proposal: Proposal, proven: _Proven, left: int) -> Receipt:
        """What was proven. Raises Refused where something is not."""
        now = self._clock.monotonic()
        while self._done_at and now - self._done_at[0] >= HOUR_S:
            self._done_at.popleft()
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
        settings, first = self._settings, proposal.first
        policy = first.rule.name if first.rule is not None else SECTION
        kind = first.around.kind if first.around is not None else ""
        record = (proven.records or {}).get((policy, kind), Record(0.0, 0.0))
        what = f"of policy {policy} on class {kind} in {format_duration(settings.shadow_for)}"
        if record.decisions < settings.shadow_decisions:
            raise Refused("shadow", f"{record.decisions:.0f} decisions {what}, {settings.shadow_decisions} are needed")
        if record.regrets > settings.regret_max * record.decisions:
            raise Refused("regret", f"{record.regrets:.0f} of {record.decisions:.0f} decisions {what} were regretted")
        return record

    def _object_to_demand(self, proposal: Proposal, proven: _Proven) -> Mapping[str, float]:
        """GPUs that are waited for, by pool, in pools that all of its holders are of."""
        if proven.demand is None:
            return {}
        now = self._clock.monotonic()
        while self._freed and now - self._freed[0][0] > FREED_S:
            self._freed.popleft()
        found: dict[str, float] = {}
        for decision in proposal.decisions:
            for pool, gpus in proven.demand.get(decision.name, {}).items():
                freed = sum(count for _, where, count in self._freed if where == pool)
                if gpus - freed >= 1:
                    found[pool] = gpus - freed
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
        self._object_to_surroundings(proposal)
        found = actor.find(proposal, self._kinds, self._clock.wall())
        self._object_to_age(proposal)  # after all that takes time
        if self._settings.mode == "shadow":
            if not self._say(proposal.target.title, found.kind, f"mode act would {found.kind} it"):
                return 0
            self._observer.count_action(found.kind, "shadow")
            return 1
        if not self._may_write():
            raise Refused("fenced", "another replica decides by now")
        self._note(proposal, found, receipt, "begins")
        try:
            result = actor.act(proposal, found, self._clock.wall())
        except (Refused, MarkError) as exc:
            result = exc.result if isinstance(exc, MarkError) else "refused"
            log.warning("%s: %s failed: %s", proposal.target.title, found.kind, exc)
            self._count(proposal, found, receipt, result)
            return 1
        log.info("%s: %s: %s; undo: %s", proposal.target.title, found.kind, result, found.undo)
        self._count(proposal, found, receipt, result)
        return 1

    def _count(self, proposal: Proposal, found: Found, receipt: Receipt, result: str) -> None:
        """What was begun counts, since nobody knows how far it went."""
        now = self._clock.monotonic()
        self._done_at.append(now)
        self._freed.extend((now, pool, proposal.gpus) for pool in receipt.demand)
        self._observer.count_action(found.kind, result)
        self._note(proposal, found, receipt, result)

    def _note(self, proposal: Proposal, found: Found, receipt: Receipt, result: str) -> None:
        if self._audit is None:
            return
        for decision in proposal.decisions:
            warned, record = receipt.warned[decision.name], receipt.record
            self._audit.note_action(
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
