"""Remembers which values one device reports and which it refuses, so that refused values are not read every second.

A refusal is kept for RETRY_S, then the question is retried: MIG mode, ECC, privileges and drivers change at run time. A
question that was never answered, for any reason, is retried at growing intervals. A question that was answered before
is asked each time.
"""

from __future__ import annotations

from collections.abc import Container, Hashable

from gpu_exporter.agent.devices.errors import DENIED, DeviceError, NoPermission, NotSupported, is_unsupported
from gpu_exporter.common.clock import Clock

RETRY_S = 600.0
FAILURES = 3  # in a row, after which a question that was never answered is asked less often
PAUSES_MAX = 10  # doublings: 2^10 s are more than RETRY_S


class SupportMatrix:
    """Refusals by call (and arguments), and the questions that were answered at least once. Used by one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refused: dict[Hashable, tuple[float, str, str]] = {}  # until when (monotonic seconds), call and error
        self._failed: dict[Hashable, int] = {}  # number of failures of questions that were never answered
        self.answered: set[Hashable] = set()
        self._known: set[Hashable] = set()  # answered at least once, also before `clear`

    def check(self, question: Hashable) -> None:
        """Raises the refusal of this question, as NotSupported, while it is still valid."""
        known = self._refused.get(question)
        if known is not None:
            until, call, error = known
            if self._clock.monotonic() < until:
                raise NotSupported(call, error)  # a new exception each time: a kept one would collect tracebacks
            del self._refused[question]

    def note(self, question: Hashable, refusal: NotSupported | NoPermission) -> None:
        """Remember a refusal. Until the retry, a missing permission counts as no data, so that it is counted once."""
        self._refused[question] = (self._clock.monotonic() + RETRY_S, refusal.call, refusal.error)

    def note_failure(self, question: Hashable, failure: DeviceError) -> None:
        """Note a failure of a question that was never answered. The third failure pauses the question, and each further
        failure doubles the pause.
        """
        times = self._failed[question] = self._failed.get(question, 0) + 1
        if times < FAILURES:
            return
        pause_s = min(RETRY_S, 2.0 ** min(times, PAUSES_MAX))
        self._refused[question] = (self._clock.monotonic() + pause_s, failure.call, failure.error)

    def give_up(self, question: Hashable, refusal: NotSupported) -> None:
        """Ask this question only every RETRY_S from now on, and expect failures."""
        self.answered.discard(question)
        if self._failed.pop(question, 0) or not self.is_refused(question):
            self.note(question, refusal)

    def is_refused(self, question: Hashable) -> bool:
        known = self._refused.get(question)
        return known is not None and self._clock.monotonic() < known[0]

    def first_failure(self, signs: Container[str]) -> str:
        """If a GPU gives no answer: the text of the failure that proves it mute; "" if there is no such failure.

        It is a failure of a question that was answered before, or of a call that every GPU answers (`signs`). A missing
        permission comes last.
        """
        failures = sorted(
            (error == DENIED, f"{call} {error}")
            for question, (_, call, error) in self._refused.items()
            if not is_unsupported(error) and (question in self._known or call in signs)
        )
        return failures[0][1] if failures else ""

    def note_answer(self, question: Hashable) -> None:
        """Note an answer: from now on, a failure of this question counts."""
        self.answered.add(question)
        self._known.add(question)

    def forget(self, question: Hashable) -> None:
        """Drop the refusal of this question."""
        self._refused.pop(question, None)

    def clear(self) -> None:
        """Drop everything except the questions that were answered once, because the handle or the mode has changed."""
        self._refused.clear()
        self._failed.clear()
        self.answered.clear()
