"""When a controller that serves a whole cluster is asked by one of its nodes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

SPREAD = 0.5  # nodes that were started together ask at different times: up to half an interval later
COST = 100.0  # a controller that is slow is asked less: it spends 1 % of the time on a node's questions at most
BACKOFF_S = 15.0  # after a question that failed; twice as long after each further one
INTERVAL_MAX_S = 240.0  # below attribution.keep_last, so that what is known does not lapse between two questions
QUIET_S = 21_600.0  # all the same, should something have changed that nobody tells a node, such as a job's size
SOON_S = 5.0  # after an answer that cannot be the last word; twice as long after each further one
BURST = 12.0  # questions before their time, since something began or ended here; they come back one an interval


class Pace:
    """One question each `each_s` seconds, spread; before its time when something has changed, and then not for ever."""

    def __init__(self, each_s: float, spread: Callable[[], float] = random.random) -> None:
        """`spread`: a number from 0 to 1 for each interval."""
        self.interval_s = each_s
        """Seconds between the last question and the next one that will be asked in any case."""
        self._each_s = each_s
        self._spread = spread
        self._asked: float | None = None
        self._extra = BURST
        self._extra_at = 0.0
        self._failed = 0
        self._soon_s = SOON_S

    def is_due(self, now: float, changed: bool) -> bool:
        """Whether to ask now. `changed`: something began or ended that the last answer does not know."""
        if self._asked is None or now - self._asked >= self.interval_s:
            return True
        if not changed:
            return False
        self._extra, self._extra_at = min(BURST, self._extra + (now - self._extra_at) / self._each_s), now
        if self._extra < 1.0:
            return False
        self._extra -= 1.0
        return True

    def answered(self, now: float, took_s: float, unsettled: bool, quiet: bool = False) -> None:
        """Set the time of the next question. `unsettled`: what was asked for is still changing; `quiet`: whatever
        changes will be known without asking.
        """
        self._failed, self._asked = 0, now
        longest = max(self._each_s * (1.0 + SPREAD * self._spread()), COST * took_s)
        self.interval_s = QUIET_S if quiet else min(longest, max(INTERVAL_MAX_S, self._each_s))
        self._soon_s = self._soon_s * 2 if unsettled else SOON_S
        if unsettled:
            self.interval_s = min(self.interval_s, self._soon_s / 2)

    def failed(self, now: float) -> None:
        """Leave the controller in peace, the longer the more often it has failed."""
        wait_s = BACKOFF_S * 2.0 ** min(self._failed, 8) * (1.0 + SPREAD * self._spread())
        self._failed, self._asked = self._failed + 1, now
        self.interval_s = min(wait_s, INTERVAL_MAX_S)


class Retry:
    """When something that is missing is asked for again: at once when there is news of it, else ever less often."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._news: float | None = None
        self._at, self._wait_s = -math.inf, first_s

    def is_due(self, now: float, news: float | None = None) -> bool:
        """Whether to ask now. `news`: what has changed, as a number of its own; None for nothing."""
        if news is not None and news != self._news:
            self.settle()
            self._news = news
        if now < self._at:
            return False
        self._at, self._wait_s = now + self._wait_s, min(self._wait_s * 2, self._most_s)
        return True

    def settle(self) -> None:
        """It is there: the next time begins anew."""
        self._at, self._wait_s = -math.inf, self._first_s
