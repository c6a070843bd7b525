"""Decides when this node sends requests to slurmctld. All nodes of the cluster share one slurmctld."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

SPREAD = 0.5  # nodes that started together ask at different times: up to half an interval later
COST = 100.0  # a slow slurmctld gets fewer requests: those of one node take at most 1 % of its time
BACKOFF_S = 15.0  # wait after a failed request; doubled after each further failure
INTERVAL_MAX_S = 240.0  # below attribution.keep_last, so that an answer does not expire before the next one
QUIET_S = 21_600.0  # interval if no request is needed; finds changes that a node cannot see, e.g. a job's size
SOON_S = 5.0  # wait after an answer that will soon change; doubled after each further such answer
BURST = 12.0  # most early requests because a job started or ended here; each interval adds one


class Pace:
    """Plans one request every `each_s` seconds, and a limited number of earlier requests after changes.

    A random part of the interval spreads the requests of the nodes.
    """

    def __init__(self, each_s: float, spread: Callable[[], float] = random.random) -> None:
        """`spread`: returns a number from 0 to 1 for each interval."""
        self.interval_s = each_s
        """Seconds between the last request and the next regular request."""
        self._each_s = each_s
        self._spread = spread
        self._asked: float | None = None
        self._extra = BURST
        self._extra_at = 0.0
        self._failed = 0
        self._soon_s = SOON_S

    def is_due(self, now: float, changed: bool) -> bool:
        """Returns whether to ask now. `changed`: a job started or ended since the last answer."""
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
        """Sets the time of the next request after an answer. `took_s`: duration of the last request.

        `unsettled`: a job is starting or ending, so that the answer will soon change. `quiet`: the node detects every
        change without a request.
        """
        self._failed, self._asked = 0, now
        longest = max(self._each_s * (1.0 + SPREAD * self._spread()), COST * took_s)
        self.interval_s = QUIET_S if quiet else min(longest, max(INTERVAL_MAX_S, self._each_s))
        self._soon_s = self._soon_s * 2 if unsettled else SOON_S
        if unsettled:
            self.interval_s = min(self.interval_s, self._soon_s / 2)

    def failed(self, now: float) -> None:
        """Delays the next request. The delay grows with each failure in a row."""
        wait_s = BACKOFF_S * 2.0 ** min(self._failed, 8) * (1.0 + SPREAD * self._spread())
        self._failed, self._asked = self._failed + 1, now
        self.interval_s = min(wait_s, INTERVAL_MAX_S)


class Retry:
    """Decides when to request missing data again: immediately after a change, otherwise at growing intervals."""

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._news: float | None = None
        self._at, self._wait_s = -math.inf, first_s

    def is_due(self, now: float, news: float | None = None) -> bool:
        """Returns whether to ask now. `news`: a number that identifies the last change, None if nothing changed."""
        if news is not None and news != self._news:
            self.settle()
            self._news = news
        if now < self._at:
            return False
        self._at, self._wait_s = now + self._wait_s, min(self._wait_s * 2, self._most_s)
        return True

    def settle(self) -> None:
        """Records that no data is missing. The next wait begins with the first interval."""
        self._at, self._wait_s = -math.inf, self._first_s
