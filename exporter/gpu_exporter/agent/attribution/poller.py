"""Polls all sources of holders in parallel, and keeps their last answers for a limited time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpu_exporter.agent.attribution.identity import Identity
from gpu_exporter.agent.attribution.source import Answer, Source, SourceError
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.holders import Grant, SourceStatus
from gpu_exporter.common.plain import describe_bug
from gpu_exporter.common.threads import NoThread, start

log = logging.getLogger(__name__)
GRANTS_MAX = 4096  # of one source: 16 GPUs in 7 instances each for 36 holders; more grants would slow down scrapes
MAX_TEXTS = 3  # unresolved grants that a text lists


class _Question:
    """Polls one source once, in a separate thread, so that a slow source does not delay the others."""

    def __init__(self, source: Source, clock: Clock) -> None:
        # The answer shows the holders at least until this time.
        self.asked, self.asked_wall = clock.monotonic(), clock.wall()
        self.answer: Answer | Exception = SourceError("not asked yet")
        self.polls = 0  # polls that ended without an answer
        self._source = source
        self._thread = threading.Thread(target=self._ask, name=f"poll-{source.name}", daemon=True)
        try:
            start(self._thread)
        except NoThread as exc:
            self.answer = SourceError(str(exc))

    def _ask(self) -> None:
        try:
            self.answer = self._source.poll()
        except Exception as exc:  # an error in one source must not end attribution
            self.answer = exc

    def is_answered(self, within_s: float | None) -> bool:
        if self._thread.ident is not None:  # the thread was started
            self._thread.join(within_s)
        return not self._thread.is_alive()


@dataclass(slots=True)
class _SourceMemory:
    question: _Question | None = None
    grants: Sequence[Grant] = ()
    offers: Sequence[Grant] | None = None
    confirmed: float | None = None
    error: str = ""
    notice: str = ""
    unresolved: str = ""
    has_lost: bool = False  # a grant means no device
    answered: bool = False
    complete: bool = False
    true_wall: float | None = None  # when the source's report was true
    incomplete: bool = False
    hides_users: bool = False
    devices: int | None = None
    counted: int = 0
    closed: str = ""
    closed_reason: str = ""
    missed: int = 0
    ended: list[Grant] = field(default_factory=list)  # not taken yet
    reported: Sequence[str] = ()
    conflicts: int = 0


class Poller:
    """Polls all sources of one node. They are in order of precedence."""

    def __init__(
        self,
        sources: Sequence[Source],
        clock: Clock,
        keep_last_s: float,
        identity: Identity | None = None,
        patience_s: float | None = None,
    ) -> None:
        """`identity`: how users and accounts are shown, None to show their names.

        `patience_s`: how long a poll waits for answers; a later answer counts at the next poll. None: a poll waits
        until each source has answered or failed.
        """
        self._patience_s = patience_s
        self._sources = sources
        self._identity = identity
        self._clock = clock
        self._keep_last_s = keep_last_s
        self._memory = {source.name: _SourceMemory() for source in sources}

    def poll(self) -> list[Grant]:
        """Polls every source once, and returns all grants. If a source fails, its last answer counts for a while."""
        for source in self._sources:
            memory = self._memory[source.name]
            self._take_answer(source.name, memory, 0.0)  # an answer that came late
            memory.question = memory.question or _Question(source, self._clock)
        left_s, began = self._patience_s, time.monotonic()
        for name, memory in self._memory.items():
            if self._patience_s is not None:
                left_s = max(0.0, began + self._patience_s - time.monotonic())
            self._take_answer(name, memory, left_s)
            if memory.question is not None:
                memory.question.polls += 1
                if memory.question.polls > 1:
                    self._note(name, memory, "has not answered for more than one poll")
        return self.grants()

    def grants(self) -> list[Grant]:
        """Returns the last known grants, without a new poll. Shows users and accounts as `identity` permits."""
        now = self._clock.monotonic()
        hidden = any(memory.hides_users or memory.confirmed is None for memory in self._memory.values())
        known: list[Grant] = []
        for memory in self._memory.values():
            for grant in memory.grants:
                confirmed = grant.confirmed or memory.confirmed or 0.0
                if now - confirmed <= max(self._keep_last_s, grant.renewed_s):
                    known.append(self._show(grant, hidden)._replace(confirmed=confirmed))
        return known

    def take_ended(self) -> list[Grant]:
        """Returns the grants of holders that have ended, each only once. `confirmed` is the time of the end."""
        hidden = any(memory.hides_users or memory.confirmed is None for memory in self._memory.values())
        ended = [self._show(grant, hidden) for memory in self._memory.values() for grant in memory.ended]
        for memory in self._memory.values():
            memory.ended = []
        return ended

    def reported(self) -> list[str]:
        """Returns every end that the sources have reported, for the state file. Includes those of `take_ended`."""
        return [text for memory in self._memory.values() for text in memory.reported]

    def offers(self) -> Sequence[Grant] | None:
        """Returns the devices that schedulers may allocate. None unless every source reports its devices."""
        offers: list[Grant] = []
        for memory in self._memory.values():
            if memory.offers is None:
                return None
            offers += memory.offers
        return offers if self.is_known() else None

    def counted(self) -> tuple[tuple[str, int], ...]:
        """Returns how many GPUs of this node each scheduler counts or offers, by name of the source."""
        numbers = {
            name: max(each.counted, len({offer.device.partition("::")[0] for offer in each.offers or ()}))
            for name, each in self._memory.items()
        }
        return tuple((name, number) for name, number in numbers.items() if number)

    def _show(self, grant: Grant, hidden: bool) -> Grant:
        return grant if self._identity is None else grant._replace(holder=self._identity.apply(grant.holder, hidden))

    def warnings(self) -> tuple[str, ...]:
        """Returns warnings about holders for messages to the user, in addition to the sources' errors."""
        return (self._identity.problem,) if self._identity is not None and self._identity.problem else ()

    def _take_answer(self, name: str, memory: _SourceMemory, within_s: float | None) -> None:
        question = memory.question
        if question is None or not question.is_answered(within_s):
            return
        memory.question, answer = None, question.answer
        if isinstance(answer, SourceError):
            self._note(name, memory, str(answer))
            memory.counted = memory.counted or answer.counted
            return
        if isinstance(answer, Exception):
            self._note(name, memory, describe_bug(answer), bug=answer)
            return
        memory.ended += answer.ended
        memory.missed += answer.missed
        memory.reported = answer.reported or memory.reported
        if len(answer.grants) > GRANTS_MAX:
            self._note(
                name,
                memory,
                f"{len(answer.grants)} held devices are more than {GRANTS_MAX}, so all of them are ignored",
            )
            return
        self._note(name, memory, answer.problem)
        if answer.notice and answer.notice != memory.notice:
            log.info("attribution %s: %s", name, answer.notice)
        memory.notice = answer.notice
        memory.conflicts += answer.conflicts
        memory.offers = answer.offers
        memory.grants, memory.confirmed = answer.grants, question.asked
        age_s = 0.0 if answer.as_of is None else max(0.0, question.asked - answer.as_of)
        memory.true_wall = question.asked_wall - age_s
        memory.answered, memory.complete = not answer.is_old, not (answer.is_old or answer.problem)
        memory.incomplete = bool(answer.problem) or answer.is_late
        memory.hides_users, memory.devices, memory.counted = answer.hides_users, answer.devices, answer.counted
        memory.closed, memory.closed_reason = answer.closed, answer.closed_reason

    @staticmethod
    def _note(name: str, memory: _SourceMemory, problem: str, bug: Exception | None = None) -> None:
        """Logs a source's problem when it changes, not at every poll. `bug`: the exception to log with a traceback.

        An answer with a problem still counts as an answer.
        """
        if problem != memory.error:
            if problem:
                log.warning("attribution %s: %s", name, problem, exc_info=bug)
            else:
                log.info("attribution %s: answers again", name)
        memory.error = problem
        memory.answered = memory.complete = False

    def note_resolution(
        self,
        conflicts: Sequence[Grant],
        unresolved: Sequence[tuple[Grant, str]],
        doubted: Sequence[tuple[Grant, str]] = (),
        missed: Sequence[Grant] = (),
    ) -> None:
        """Counts the conflicts and the missed holders, and logs the unresolved and doubted grants with their reasons.

        A conflict is a grant that contradicts a source of higher precedence. A doubted grant is one whose holder may
        only watch the device. `missed`: grants of ended holders that lack time.
        """
        for source, _ in {(grant.holder.source, grant.holder.key) for grant in missed}:
            if source in self._memory:
                self._memory[source].missed += 1
        for grant in conflicts:
            memory = self._memory.get(grant.holder.source)
            if memory is not None:
                memory.conflicts += 1
        for name, memory in self._memory.items():
            texts = [
                f"{grant.holder.label}: {grant.number or grant.device} is not resolved: {reason}"
                for grant, reason in unresolved
                if grant.holder.source == name and reason and reason not in memory.error
            ]
            doubts = {
                grant.claim: f"{grant.holder.label}: {why}" for grant, why in doubted if grant.holder.source == name
            }
            texts += doubts.values()
            text = "; ".join(texts[:MAX_TEXTS]) + (f"; {len(texts) - MAX_TEXTS} more" if len(texts) > MAX_TEXTS else "")
            if text != memory.unresolved:
                if text:
                    log.warning("attribution %s: %s", name, text)
                else:
                    log.info("attribution %s: every device is resolved and certain again", name)
            memory.unresolved = text
            memory.has_lost = len(texts) > len(doubts)

    def is_known(self) -> bool:
        """Returns whether every source has answered recently and completely: then a device without a grant is free."""
        now = self._clock.monotonic()
        return bool(self._memory) and all(
            memory.confirmed is not None and now - memory.confirmed <= self._keep_last_s and not memory.incomplete
            for memory in self._memory.values()
        )

    def has_all(self) -> bool:
        """As `is_known`, but true without sources: then a pod or job without a grant has no GPU."""
        return not self._memory or self.is_known()

    def asked(self) -> float | None:
        """Returns when the oldest of the present answers was asked for (monotonic seconds), None without an answer."""
        return min((m.confirmed for m in self._memory.values() if m.confirmed is not None), default=None)

    def statuses(self) -> tuple[SourceStatus, ...]:
        return tuple(
            SourceStatus(
                name,
                up=memory.answered,
                complete=memory.complete and not memory.has_lost,
                last_success_wall=memory.true_wall,
                conflicts=memory.conflicts,
                error="; ".join(text for text in (memory.error, memory.unresolved) if text),
                notice=memory.notice,
                devices=memory.devices,
                missed=memory.missed,
                closed=memory.closed if memory.answered else "",
                closed_reason=memory.closed_reason,
            )
            for name, memory in self._memory.items()
        )
