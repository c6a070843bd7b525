"""Remembers which values one device refuses, so that the exporter does not read them every second.

A refused question (a call with its arguments) is retried after RETRY_S, because MIG mode, ECC, permissions and drivers
may change. A failed question that was never answered is retried at growing intervals. A question that was answered
before is always asked.
"""

from __future__ import annotations

from collections.abc import Container, Hashable

from gpu_exporter.agent.devices.errors import DENIED, DeviceError, NoPermission, NotSupported, is_unsupported
from gpu_exporter.common.clock import Clock

RETRY_S = 600.0
FAILURES = 3  # failures in a row after which a question that was never answered is asked less often
PAUSES_MAX = 10  # doublings: 2^10 s are more than RETRY_S


class SupportMatrix:
    """Remembers the refused and the answered questions (calls with arguments) of one device. Used by one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refused: dict[Hashable, tuple[float, str, str]] = {}  # until when (monotonic seconds), call and error
        self._failed: dict[Hashable, int] = {}  # number of failures of questions that were never answered
        self.answered: set[Hashable] = set()
        self._known: set[Hashable] = set()  # answered at least once, also before `clear`

    def check(self, question: Hashable) -> None:
        """Raises NotSupported while a refusal of this question is still valid."""
        known = self._refused.get(question)
        if known is not None:
            until, call, error = known
            if self._clock.monotonic() < until:
                raise NotSupported(call, error)  # a new exception each time: a stored one would collect tracebacks
            del self._refused[question]

    def note(self, question: Hashable, refusal: NotSupported | NoPermission) -> None:
        """Remembers a refusal. Until the retry, `check` raises NotSupported, even if the refusal was NoPermission. So a
        missing permission counts as one error, not as one in each cycle.
        """
        self._refused[question] = (self._clock.monotonic() + RETRY_S, refusal.call, refusal.error)

    def note_failure(self, question: Hashable, failure: DeviceError) -> None:
        """Records the failure of a question that was never answered. After the third failure in a row, the question is
        not asked for a while. Each further failure doubles this pause.
        """
        times = self._failed[question] = self._failed.get(question, 0) + 1
        if times < FAILURES:
            return
        pause_s = min(RETRY_S, 2.0 ** min(times, PAUSES_MAX))
        self._refused[question] = (self._clock.monotonic() + pause_s, failure.call, failure.error)

    def give_up(self, question: Hashable, refusal: NotSupported) -> None:
        """Treats this question as refused, and retries it only every RETRY_S."""
        self.answered.discard(question)
        if self._failed.pop(question, 0) or not self.is_refused(question):
            self.note(question, refusal)

    def is_refused(self, question: Hashable) -> bool:
        known = self._refused.get(question)
        return known is not None and self._clock.monotonic() < known[0]

    def first_failure(self, signs: Container[str]) -> str:
        """Returns a failure that proves that the GPU no longer answers, as a text. "" without such a failure.

        A failure is proof if the question was answered before, or if every GPU answers the call (`signs`). A missing
        permission is returned only if there is no other failure.
        """
        failures = sorted(
            (error == DENIED, f"{call} {error}")
            for question, (_, call, error) in self._refused.items()
            if not is_unsupported(error) and (question in self._known or call in signs)
        )
        return failures[0][1] if failures else ""

    def note_answer(self, question: Hashable) -> None:
        """Records that this question was answered. From now on, a missing answer is a failure."""
        self.answered.add(question)
        self._known.add(question)

    def forget(self, question: Hashable) -> None:
        self._refused.pop(question, None)

    def clear(self) -> None:
        """Forgets refusals and failures, because the handle or the mode has changed.

        `first_failure` still uses the questions that were answered before.
        """
        self._refused.clear()
        self._failed.clear()
        self.answered.clear()
