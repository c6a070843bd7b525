"""Begins actions and completes them: updates the journal, notifies the owner, logs and counts, in a fixed order.

The journal entry is written before the action. Afterwards this process, or the next one after a crash, reads the live
object and completes the entry. So no action is done twice, and every owner is notified. An action is done when all pods
and jobs that it ends are gone. An action that takes too long is unconfirmed.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Mapping
from typing import NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.plain import utc
from gpu_exporter.reconciler.actions.ends import Ends
from gpu_exporter.reconciler.actions.journal import CONFIRM_S, HOUR_S, Journal, with_result, without_demand
from gpu_exporter.reconciler.actions.proofs import Warned
from gpu_exporter.reconciler.actions.propose import Proposal
from gpu_exporter.reconciler.actions.record import PolicyStanding, Record
from gpu_exporter.reconciler.actor import DONE, ENDING, GONE, NOT_DONE, Actor, Ended, Entry
from gpu_exporter.reconciler.audit import AuditLog
from gpu_exporter.reconciler.decision.outcomes import account_of
from gpu_exporter.reconciler.decision.target import Target
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import MarkError, Refused, guard
from gpu_exporter.reconciler.telemetry import Telemetry

log = logging.getLogger(__name__)
LOST = "lost"  # the answer to an action did not arrive, so its effect is unknown
LINES_KEPT = 16  # audit lines with the result of one action
GRACE_MAX_S = 600.0  # of the time that an action waits for the end of its target
UNCONFIRMED_S = 300.0  # in addition: for the kubelet or slurmd, the exporter's next sample, and Prometheus


class Receipt(NamedTuple):
    """The reasons for an action, for the audit log. `standing`: the record of the policy; None if the setting
    `override` replaces the record.
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
        ends: Ends,
        record: Record,
        audit: AuditLog | None,
        telemetry: Telemetry,
        clock: Clock,
        grace_max_s: float,
    ) -> None:
        """`actors`: the actor of each scheduler. `audit`: None if the site keeps no audit log. `grace_max_s`: the
        setting actions.grace_max (seconds).
        """
        self._journal = journal
        self._actors = actors
        self._ends = ends
        self._patience_s = min(grace_max_s, GRACE_MAX_S)
        self._record = record
        self._audit = audit
        self._telemetry = telemetry
        self._clock = clock
        self.entries: tuple[Entry, ...] = ()
        """The actions of the journal."""

    @property
    def notes(self) -> set[str]:
        """The annotations that the journal's actions left on objects."""
        return {entry.note for entry in self.entries}

    def begun_within_an_hour(self) -> int:
        """Returns their number. One in the future counts too: a clock was wrong, so the action may be recent."""
        return sum(self._clock.wall() - entry.wall < HOUR_S for entry in self.entries)

    def is_pending(self, title: str) -> bool:
        """Returns whether an action on this target has begun, and its result is still unknown."""
        return any(entry.is_open and entry.title == title for entry in self.entries)

    def begin(self, actor: Actor, proposal: Proposal, target: Target, receipt: Receipt) -> str:
        """Writes the journal entry, acts, and looks at the live object. Returns the result in the entry.

        Returns LOST if the action failed without a clear answer and the live object does not show the result. Raises
        Refused and MarkError if the action has not begun.
        """
        wall = self._clock.wall()
        nodes = {each.name: tuple(sorted({unit.node for unit in each.units})) for each in proposal.decisions}
        entry = actor.open_entry(target, secrets.token_hex(4), wall)._replace(
            gpus=proposal.gpus,
            since_wall=proposal.since_wall,
            record=account_of(proposal.first),
            ends=tuple(Ended(part.name.name, part.incarnation, nodes.get(part.name, ())) for part in target.ends),
            waited_for=tuple(receipt.demand.items()),
            until_wall=wall + min(target.grace_s, self._patience_s) + UNCONFIRMED_S,
        )
        if not self._note_begin(proposal, entry, receipt):
            raise Refused("audit", "the reconciler cannot write the audit log")
        self._journal.begin(entry)
        self.entries = (*self.entries, entry)
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
        return next((each.told for each in self.entries if each.ident == entry.ident), "")

    def complete_all(self) -> None:
        """Completes all begun actions, also of an earlier process. Raises MarkError for an unreadable journal."""
        self.entries = self._journal.read()
        for entry in self.entries:
            actor = self._actors.get(entry.scheduler)
            if not entry.told and actor is not None:
                self._complete(actor, entry)
            elif not entry.told and self._clock.wall() >= entry.until_wall:
                self._finish(entry, "unconfirmed", f"the reconciler is not set up for {entry.scheduler}")
        self._confirm()
        self._look_at_acts()

    def note_used(self, used: Collection[tuple[str, str]]) -> None:
        """Notes in the journal, for the next process, the actions that no longer reduce the demand of these pools."""
        entries = tuple(without_demand(entry, used) for entry in self.entries)
        if entries == self.entries:
            return
        try:
            self._journal.note_used(used)
        except MarkError as exc:  # the next cycle tries again
            log.warning("cannot update the pools of earlier actions in the journal: %s; the next cycle retries", exc)
        else:
            self.entries = entries

    def _confirm(self) -> None:
        """Completes the actions whose end is confirmed, and those that took too long. Raises nothing."""
        ending = [entry for entry in self.entries if entry.told == ENDING]
        left = self._ends.read_left(ending)
        for entry in ending:
            if not left[entry.ident]:
                self._finish(entry, "done")
            elif self._clock.wall() >= entry.until_wall:
                self._finish(entry, "unconfirmed", left[entry.ident])

    def _complete(self, actor: Actor, entry: Entry) -> None:
        """Notifies the owner as soon as the live object shows the action. Raises nothing."""
        wall = self._clock.wall()
        failed = "the object cannot be read, so the result is unknown"
        try:
            sight = guard(actor.look, entry)
            if sight == DONE:
                since = utc(entry.since_wall).strftime("%Y-%m-%d %H:%MZ")
                told = f"All of its {entry.gpus} GPUs were idle since {since}, and its owner was warned"
                failed = "the action is done, but the record of decisions cannot be written"
                self._record.note_act(entry)
                failed = "the action is done, but its owner could not be notified"
                guard(actor.tell, entry, told)
        except (MarkError, Refused) as exc:
            why = f"{failed}: {exc}"
            if wall >= entry.until_wall:
                self._finish(entry, "unconfirmed", why)
            else:
                log.warning("%s: %s: %s; the next cycle retries", entry.title, entry.verb, why)
            return
        if sight == DONE:
            self._finish(entry, ENDING)
        elif sight == GONE:
            self._finish(entry, "replaced")
        elif sight == NOT_DONE and wall - entry.wall >= CONFIRM_S:  # until then, a request may still reach the server
            self._finish(entry, "error", "the object does not show the action")
        elif wall >= entry.until_wall:
            self._finish(entry, "unconfirmed", "the object does not show the action")

    def _finish(self, entry: Entry, result: str, why: str = "") -> None:
        """Writes the result of an entry to the journal and the log, and counts it. ENDING is not counted.

        `why`: the reason for a result other than `done`.
        """
        try:
            self._journal.complete(entry.ident, result)
        except MarkError as exc:  # the next cycle tries again
            text = "%s: the result of %s (%s) was not written to the journal: %s; the next cycle retries"
            log.warning(text, entry.title, entry.verb, result, exc)
            return
        self.entries = tuple(with_result(each, result) if each.ident == entry.ident else each for each in self.entries)
        undo = f"; undo: {entry.undo}" if result == "done" else ""
        level = logging.WARNING if result == "unconfirmed" else logging.INFO
        log.log(level, "%s: %s: %s%s%s", entry.title, entry.verb, result, f": {why}" if why else "", undo)
        if result == ENDING:
            return
        self._telemetry.count_action(entry.verb, result)
        if self._audit is not None:
            facts = {"act": entry.verb, "target": entry.target.title, "result": result, "why": why, "id": entry.ident}
            for ended in [each for each in entry.ends if each.nodes][:LINES_KEPT]:
                self._audit.note_result(HolderName(entry.scheduler, entry.namespace, ended.name), facts)

    def _look_at_acts(self) -> None:
        """Checks whether owners have resumed the targets of earlier actions."""
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
                log.info("%s: the owner has undone this action", entry.title)
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
