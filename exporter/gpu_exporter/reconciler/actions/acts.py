"""Begins actions and completes them: updates the journal, notifies the owner, logs and counts, in a fixed order.

The journal entry is written before the action. Afterwards this process, or the next one after a crash, reads the live
object and completes the entry. So no action is done twice, and every owner is notified.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.plain import utc
from gpu_exporter.reconciler.actions.journal import CONFIRM_S, GIVE_UP_S, Journal, begun_within
from gpu_exporter.reconciler.actions.proofs import Warned
from gpu_exporter.reconciler.actions.propose import Proposal
from gpu_exporter.reconciler.actions.record import PolicyStanding, Record
from gpu_exporter.reconciler.actor import DONE, GONE, NOT_DONE, Actor, Entry
from gpu_exporter.reconciler.audit import AuditLog
from gpu_exporter.reconciler.decision.outcomes import account_of
from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.decision.target import Target
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import MarkError, Refused, guard

log = logging.getLogger(__name__)
LOST = "lost"  # the answer to an action did not arrive, so its effect is unknown
MAY_BE_DONE = ("", "done", "unconfirmed", LOST)  # results of actions that may have freed GPUs
HOLDERS_KEPT, NAMES_KEPT = 16, 1500  # limits of a journal entry: names of holders, and their characters together


class ActionObserver(Protocol):
    """Counts acts, and underused groups without an action. It is a Protocol because Telemetry imports this package."""

    def count_action(self, action: str, result: str) -> None:
        """Counts an action. `result`: done, unconfirmed, shadow, refused, or the `result` of a MarkError."""

    def count_not_acted(self, reason: str) -> None:
        """Counts an underused group on which this cycle did not act, by reason."""

    def note_spared(self, decisions: Sequence[Decision], reason: str) -> None:
        """Notes the underused holders that keep their GPUs for this reason."""


class Receipt(NamedTuple):
    """The grounds for an action, for the audit log.

    `standing`: how often earlier decisions of the policy were right; None if the setting `override` is the ground.
    """

    warned: Mapping[HolderName, Warned]
    standing: PolicyStanding | None
    demand: Mapping[str, float]
    override: str = ""


class Acts:
    """Begins actions, and completes the actions that have begun."""

    def __init__(
        self,
        journal: Journal,
        actors: Mapping[str, Actor],
        record: Record,
        audit: AuditLog | None,
        observer: ActionObserver,
        clock: Clock,
    ) -> None:
        """`actors`: by scheduler. `audit`: None if the site keeps no audit log."""
        self._journal = journal
        self._actors = actors
        self._record = record
        self._audit = audit
        self._observer = observer
        self._clock = clock
        self._entries: tuple[Entry, ...] = ()

    @property
    def notes(self) -> set[str]:
        """The notes on live objects that belong to the actions in the journal."""
        return {entry.note for entry in self._entries}

    def begun_within_an_hour(self) -> int:
        return begun_within(self._entries, self._clock.wall())

    def is_pending(self, title: str) -> bool:
        """Whether an action on this target has begun, and its result is still unknown."""
        return any(not entry.told and entry.title == title for entry in self._entries)

    def freed(self) -> Sequence[tuple[float, int, Mapping[str, float]]]:
        """The actions that may have had an effect: for each, its age (seconds), its GPUs, and the demand at that time
        by pool.
        """
        wall = self._clock.wall()
        entries = [entry for entry in self._entries if entry.told in MAY_BE_DONE]
        return [(max(0.0, wall - entry.wall), entry.gpus, dict(entry.waited_for)) for entry in entries]

    def begin(self, actor: Actor, proposal: Proposal, target: Target, receipt: Receipt) -> str:
        """Writes the journal entry, acts, and completes the entry from the live object. Returns the result in the
        entry.

        Returns LOST if the action failed without a clear answer and the live object does not show the result. Raises
        Refused and MarkError if the action has not begun.
        """
        entry = actor.open_entry(target, secrets.token_hex(4), self._clock.wall())._replace(
            gpus=proposal.gpus,
            since_wall=proposal.since_wall,
            record=account_of(proposal.first),
            holders=_some(sorted(name.name for name in proposal.names)),
            waited_for=tuple(receipt.demand.items()),
        )
        if not self._note_begin(proposal, entry, receipt):
            raise Refused("audit", "the reconciler cannot write the audit log")
        self._journal.begin(entry)
        self._entries = (*self._entries, entry)
        try:
            guard(actor.act, target, entry)
        except (Refused, MarkError) as exc:
            log.warning("%s: %s failed: %s", proposal.title, entry.verb, exc)
            if isinstance(exc, Refused) or exc.says_undone:
                self._finish(entry, exc.result if isinstance(exc, MarkError) else "refused")
            else:
                self._complete(actor, entry)
                return self._told(entry) or LOST
        else:
            self._complete(actor, entry)
        return self._told(entry)

    def _told(self, entry: Entry) -> str:
        return next((each.told for each in self._entries if each.ident == entry.ident), "")

    def complete_all(self) -> None:
        """Completes all actions that have begun, also in an earlier process. Raises MarkError: unreadable journal."""
        self._entries = self._journal.read()
        for entry in self._entries:
            if not entry.told and (actor := self._actors.get(entry.scheduler)) is not None:
                self._complete(actor, entry)
        self._look_at_acts()

    def _complete(self, actor: Actor, entry: Entry) -> None:
        """Completes an entry as soon as the live object shows the result. Raises nothing."""
        age_s = self._clock.wall() - entry.wall
        failed = "the object cannot be read, so the result is unknown"
        try:
            sight = guard(actor.look, entry)
            if sight == DONE:
                since = utc(entry.since_wall).strftime("%Y-%m-%d %H:%MZ")
                told = f"All of its {entry.gpus} GPUs were idle since {since}, and its owner was warned"
                failed = "the action is done, but cannot be added to the record of decisions"
                self._record.note_act(entry)
                failed = "the action is done, but its owner could not be notified"
                guard(actor.tell, entry, told)
        except (MarkError, Refused) as exc:
            is_over = age_s >= GIVE_UP_S
            then = (
                f"recorded as unconfirmed after {describe_duration(GIVE_UP_S)}" if is_over else "the next cycle retries"
            )
            log.warning("%s: %s: %s: %s; %s", entry.title, entry.verb, failed, exc, then)
            if is_over:
                self._finish(entry, "unconfirmed")
            return
        if sight == DONE:
            self._finish(entry, "done")
        elif sight == GONE:
            self._finish(entry, "replaced")
        elif age_s >= CONFIRM_S:  # until then, a request without an answer may still reach the server
            self._finish(entry, "error" if sight == NOT_DONE else "unconfirmed")

    def _finish(self, entry: Entry, result: str) -> None:
        """Writes the result of an entry to the journal and the log, and counts it."""
        try:
            self._journal.complete(entry.ident, result)
        except MarkError as exc:  # the next cycle tries again
            text = "%s: the result of %s (%s) was not written to the journal: %s; the next cycle retries"
            log.warning(text, entry.title, entry.verb, result, exc)
            return
        self._entries = tuple(each._replace(told=result) if each == entry else each for each in self._entries)
        undo = f"; undo: {entry.undo}" if result == "done" else ""
        log.info("%s: %s: %s%s", entry.title, entry.verb, result, undo)
        self._observer.count_action(entry.verb, result)
        if self._audit is not None:
            facts = {"act": entry.verb, "target": entry.target.title, "result": result, "id": entry.ident}
            for name in entry.holders:
                self._audit.note_result(HolderName(entry.scheduler, entry.namespace, name), facts)

    def _look_at_acts(self) -> None:
        """Checks whether owners have resumed what the reconciler suspended or stopped."""
        for entry in self._record.acts_due():
            actor = self._actors.get(entry.scheduler)
            if actor is None or not entry.target.kind:  # a cancelled job cannot be resumed
                continue
            try:
                sight = guard(actor.look, entry)
            except MarkError as exc:
                if exc.result == "throttled":
                    return
                continue
            except Refused:
                continue
            if sight == NOT_DONE:
                log.info("%s: its owner has resumed it", entry.title)
                self._record.note_resumed(entry)
            elif sight == GONE:
                self._record.note_gone(entry)

    def _note_begin(self, proposal: Proposal, entry: Entry, receipt: Receipt) -> bool:
        """Writes the coming action and its proofs to the audit log. Returns False if this failed."""
        if self._audit is None:
            return True
        is_written = True
        for decision in proposal.decisions:
            warned, standing = receipt.warned[decision.name], receipt.standing
            is_written &= self._audit.note_action(
                decision,
                {
                    "act": entry.verb,
                    "target": entry.target.title,
                    "result": "begins",
                    "id": entry.ident,
                    "warned_since": warned.since_wall,
                    "receivers": list(warned.receivers),
                    "decisions": round(standing.decisions, 1) if standing is not None else None,
                    "regrets": round(standing.regrets, 1) if standing is not None else None,
                    "override": receipt.override,
                    "waited_for": dict(receipt.demand),
                },
            )
        return is_written


def _some(names: Sequence[str]) -> tuple[str, ...]:
    """The first names that fit within the limits of a journal entry."""
    kept = names[:HOLDERS_KEPT]
    while sum(map(len, kept)) > NAMES_KEPT:
        kept = kept[:-1]
    return tuple(kept)
