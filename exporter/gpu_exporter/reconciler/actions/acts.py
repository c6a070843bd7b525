"""What was begun, and what became of it: the journal, the owners, the audit log and the counters told in that order.

An entry of the journal is written before an act and completed by what the live object says afterwards, by this process
or by the next one. So nothing is done twice, and every owner hears of what was done.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.clock import Clock
from gpu_exporter.plain import utc
from gpu_exporter.reconciler.actions.actor import DONE, GONE, NOT_DONE, Actor
from gpu_exporter.reconciler.actions.journal import CONFIRM_S, GIVE_UP_S, Entry, Journal, begun_within
from gpu_exporter.reconciler.actions.proofs import Warned
from gpu_exporter.reconciler.actions.propose import Proposal
from gpu_exporter.reconciler.audit import AuditLog
from gpu_exporter.reconciler.decision.outcomes import account_of
from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import MarkError, Refused, guard
from gpu_exporter.reconciler.record import Record, Standing
from gpu_exporter.reconciler.target import Target

log = logging.getLogger(__name__)
LOST = "lost"  # whether an act had an effect is unknown, since its answer did not come
MAY_BE_DONE = ("", "done", "unconfirmed", LOST)  # said of an act that may have freed GPUs
HOLDERS_KEPT, NAMES_KEPT = 16, 1500  # names in an entry of the journal, and characters of them


class ActionObserver(Protocol):
    """Counts what was done, and what was not."""

    def count_action(self, action: str, result: str) -> None:
        """done, unconfirmed, shadow, or why it failed: as in MarkError, and refused."""

    def count_held(self, reason: str) -> None:
        """Nothing was done to an underused group in this cycle, for this reason."""

    def note_spared(self, decisions: Sequence[Decision], reason: str) -> None:
        """These are underused, and keep their GPUs for this reason."""


class Receipt(NamedTuple):
    """What was proven before an action, for the audit log. `standing`: None where the site's override stands for it."""

    warned: Mapping[HolderName, Warned]
    standing: Standing | None
    demand: Mapping[str, float]
    override: str = ""


class Acts:
    """Begins acts, and completes those that were begun."""

    def __init__(
        self,
        journal: Journal,
        actors: Mapping[str, Actor],
        record: Record,
        audit: AuditLog | None,
        observer: ActionObserver,
        clock: Clock,
    ) -> None:
        """`actors`: by scheduler. `audit`: None for none."""
        self._journal = journal
        self._actors = actors
        self._record = record
        self._audit = audit
        self._observer = observer
        self._clock = clock
        self._entries: tuple[Entry, ...] = ()

    @property
    def notes(self) -> set[str]:
        """What the journal says was written on objects."""
        return {entry.note for entry in self._entries}

    def begun_within_an_hour(self) -> int:
        return begun_within(self._entries, self._clock.wall())

    def is_pending(self, title: str) -> bool:
        """Whether an act on this target was begun, of which it is not known whether it had an effect."""
        return any(not entry.told and entry.title == title for entry in self._entries)

    def freed(self) -> Sequence[tuple[float, int, Mapping[str, float]]]:
        """Of each act that may have had an effect: its age (seconds), GPUs, and by pool how many were waited for."""
        wall = self._clock.wall()
        entries = [entry for entry in self._entries if entry.told in MAY_BE_DONE]
        return [(max(0.0, wall - entry.wall), entry.gpus, dict(entry.waited_for)) for entry in entries]

    def begin(self, actor: Actor, proposal: Proposal, target: Target, receipt: Receipt) -> str:
        """Write down what is intended, do it, and complete the entry by what the object says; what the entry says then,
        or LOST after an answer that shows nothing.

        Raises Refused and MarkError where nothing was begun.
        """
        entry = actor.open_entry(target, secrets.token_hex(4), self._clock.wall())._replace(
            gpus=proposal.gpus,
            since_wall=proposal.since_wall,
            record=account_of(proposal.first),
            holders=_some(sorted(name.name for name in proposal.names)),
            waited_for=tuple(receipt.demand.items()),
        )
        if not self._note_begin(proposal, entry, receipt):
            raise Refused("audit", "the audit log cannot be written, so nothing is done")
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
        """Go on with what was begun, here or by a process before this one. Raises MarkError where that is not known."""
        self._entries = self._journal.read()
        for entry in self._entries:
            if not entry.told and (actor := self._actors.get(entry.scheduler)) is not None:
                self._complete(actor, entry)
        self._look_at_acts()

    def _complete(self, actor: Actor, entry: Entry) -> None:
        """Say of an entry what the live object says, once it does. Raises nothing."""
        age_s = self._clock.wall() - entry.wall
        try:
            sight = guard(actor.look, entry)
            if sight == DONE:
                since = utc(entry.since_wall).strftime("%Y-%m-%d %H:%MZ")
                told = f"All of its {entry.gpus} GPUs were idle since {since}, and its owner was warned"
                self._record.note_act(entry)
                guard(actor.tell, entry, told)
        except (MarkError, Refused) as exc:
            log.warning("%s: what became of %s is not known yet: %s", entry.title, entry.verb, exc)
            if age_s >= GIVE_UP_S:
                self._finish(entry, "unconfirmed")
            return
        if sight == DONE:
            self._finish(entry, "done")
        elif sight == GONE:
            self._finish(entry, "replaced")
        elif age_s >= CONFIRM_S:  # until then a request whose answer was lost may still arrive
            self._finish(entry, "error" if sight == NOT_DONE else "unconfirmed")

    def _finish(self, entry: Entry, result: str) -> None:
        """Keep, log and count what became of an entry."""
        try:
            self._journal.complete(entry.ident, result)
        except MarkError as exc:  # the next cycle does it
            log.warning("%s: the journal is not written: %s", entry.title, exc)
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
        """Whether owners have taken up again what was put to rest."""
        for entry in self._record.acts_due():
            actor = self._actors.get(entry.scheduler)
            if actor is None or not entry.target.kind:  # a cancelled job cannot be taken up again
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
                log.info("%s: its owner has taken it up again", entry.title)
                self._record.note_resumed(entry)
            elif sight == GONE:
                self._record.note_gone(entry)

    def _note_begin(self, proposal: Proposal, entry: Entry, receipt: Receipt) -> bool:
        """Write to the audit log what is about to be done, and why; False where that failed."""
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
    """The first of these names, so many as an entry of the journal keeps."""
    kept = names[:HOLDERS_KEPT]
    while sum(map(len, kept)) > NAMES_KEPT:
        kept = kept[:-1]
    return tuple(kept)
