"""What one device has been found to report, and not to report, so that it is not asked each second.

A refusal is believed for RETRY_S and then tried again: MIG mode, ECC, privileges and drivers change at run time. What
has never been answered, for whatever reason, is asked less and less often; what was answered before is asked each time.
"""

from __future__ import annotations

from collections.abc import Container, Hashable

from gpu_exporter.clock import Clock
from gpu_exporter.devices.errors import DENIED, DeviceError, NoPermission, NotSupported, is_unsupported

RETRY_S = 600.0
FAILURES = 3  # in a row, after which a question that was never answered is asked less often
PAUSES_MAX = 10  # doublings: 2^10 s are more than RETRY_S


class SupportMatrix:
    """Refusals by call (and arguments), and what was answered at least once. Belongs to one device's one thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refused: dict[Hashable, tuple[float, str, str]] = {}  # until when (monotonic seconds), call and error
        self._failed: dict[Hashable, int] = {}  # how often, of what was never answered
        self.answered: set[Hashable] = set()
        self._known: set[Hashable] = set()  # answered at least once, also before `clear`

    def check(self, question: Hashable) -> None:
        """Raises the refusal that still stands, as NotSupported."""
        known = self._refused.get(question)
        if known is not None:
            until, call, error = known
            if self._clock.monotonic() < until:
                raise NotSupported(call, error)  # a new one each time: a kept one would collect tracebacks
            del self._refused[question]

    def note(self, question: Hashable, refusal: NotSupported | NoPermission) -> None:
        """Remember a refusal. A missing permission is from now on no data, so that it is counted once."""
        self._refused[question] = (self._clock.monotonic() + RETRY_S, refusal.call, refusal.error)

    def note_failure(self, question: Hashable, failure: DeviceError) -> None:
        """A question that was never answered has failed: from the third time on it is left alone for a while, twice as
        long each time.
        """
        times = self._failed[question] = self._failed.get(question, 0) + 1
        if times < FAILURES:
            return
        pause_s = min(RETRY_S, 2.0 ** min(times, PAUSES_MAX))
        self._refused[question] = (self._clock.monotonic() + pause_s, failure.call, failure.error)

    def give_up(self, question: Hashable, refusal: NotSupported) -> None:
        """From now on this question is asked each RETRY_S only, and a failure is expected."""
        self.answered.discard(question)
        if self._failed.pop(question, 0) or not self.is_refused(question):
            self.note(question, refusal)

    def is_refused(self, question: Hashable) -> bool:
        known = self._refused.get(question)
        return known is not None and self._clock.monotonic() < known[0]

    def first_failure(self, signs: Container[str]) -> str:
        """A failure, in words, that shows that a GPU which answers nothing is mute, "" for none: of a question that it
        has answered once, or of a call that every GPU answers (`signs`). A missing permission comes last.
        """
        failures = sorted(
            (error == DENIED, f"{call} {error}")
            for question, (_, call, error) in self._refused.items()
            if not is_unsupported(error) and (question in self._known or call in signs)
        )
        return failures[0][1] if failures else ""

    def note_answer(self, question: Hashable) -> None:
        """From now on a failure of this question is one that counts."""
        self.answered.add(question)
        self._known.add(question)

    def forget(self, question: Hashable) -> None:
        """This question is nobody's any more."""
        self._refused.pop(question, None)

    def clear(self) -> None:
        """Forget everything but what the device has answered once: its handle is another one now, or its mode."""
        self._refused.clear()
        self._failed.clear()
        self.answered.clear()
