"""Checks passwords one at a time, within a CPU budget that does not depend on the number of requests.

bcrypt takes about 50 ms at cost 10. Addresses without a wrong password come first. Each wrong password doubles the
delay of its address. Within an address, the order is random. So a new Prometheus behind an attacker's address is
delayed, but not locked out.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from gpu_exporter.common.tasks import Task
from gpu_exporter.common.web.secure import Security

log = logging.getLogger(__name__)
SHARE = 0.25  # of one core, for all checks together
BURST_S = 1.0  # of CPU time that may be used at once after a pause: some twenty passwords
WAITING_MAX = 64  # headers; above this, a random header of the address with the most headers gets 429
PATIENCE_S = 9.0  # until a header that was not checked is refused: Prometheus waits ten seconds by default
DELAY_S, DELAY_MAX_S = 0.25, 4.0  # of an address after a wrong password; each further one doubles it
FORGET_S = 300.0  # seconds without a wrong password until the address is forgotten
ADDRESSES_MAX = 1024


class _WaitingCheck(NamedTuple):
    address: str
    header: str
    security: Security
    turn: asyncio.Future[bool | None]


class _Failures:
    """The number of wrong passwords of an address, and the time of the last (monotonic seconds)."""

    def __init__(self) -> None:
        self.wrong = 0
        self.last = 0.0

    @property
    def ready_at(self) -> float:
        return self.last + min(DELAY_MAX_S, DELAY_S * 2.0 ** min(self.wrong - 1, 10))


class Doorkeeper:
    """Checks Authorization headers. Used only in the event loop's thread; bcrypt runs in a separate thread."""

    def __init__(self) -> None:
        self.task = Task("http-password")
        self._thread = ThreadPoolExecutor(1, "http-password")
        self._waiting: list[_WaitingCheck] = []
        self._wrong: dict[str, _Failures] = {}  # oldest first
        self._task: asyncio.Task[None] | None = None
        self._budget_s, self._budget_at = BURST_S, time.monotonic()

    async def admits(self, security: Security, header: str, address: str) -> bool | None:
        """Whether an Authorization header is correct; None if it was not checked in time."""
        known = security.recall(header)
        if known is not None:
            return known
        loop = asyncio.get_running_loop()
        entry = _WaitingCheck(address, header, security, loop.create_future())
        self._waiting.append(entry)
        if len(self._waiting) > WAITING_MAX:
            self._give_up_one()
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._work())
        try:
            return await asyncio.wait_for(entry.turn, PATIENCE_S)
        except asyncio.TimeoutError:
            return None
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _give_up_one(self) -> None:
        """Refuses a random header of the address with the most waiting headers, without a check."""
        counts: dict[str, int] = {}
        for entry in self._waiting:
            counts[entry.address] = counts.get(entry.address, 0) + 1
        crowd = max(counts, key=counts.__getitem__)
        entry = random.choice([each for each in self._waiting if each.address == crowd])  # noqa: S311 - no secret
        self._waiting.remove(entry)
        if not entry.turn.done():
            entry.turn.set_result(None)

    async def _work(self) -> None:
        """Checks headers until none of them waits."""
        while self._waiting:
            now = time.monotonic()
            self._budget_s = min(BURST_S, self._budget_s + SHARE * (now - self._budget_at))
            self._budget_at = now
            pause_s = max(-self._budget_s / SHARE, min(map(self._ready_at, self._waiting)) - now)
            if pause_s > 0.0:
                await asyncio.sleep(min(pause_s, 0.1))  # a header of another address may arrive meanwhile
                continue
            entry = self._choose(now)
            self._waiting.remove(entry)
            is_right, took_s = None, 0.0
            with self.task:
                try:
                    is_right, took_s = await asyncio.get_running_loop().run_in_executor(self._thread, _check, entry)
                except RuntimeError as exc:  # the host may have no thread left
                    log.debug("cannot check passwords: %s", exc)
            self._budget_s -= took_s
            if is_right is False:
                self._note_wrong(entry.address)
            if not entry.turn.done():
                entry.turn.set_result(is_right)

    def _ready_at(self, entry: _WaitingCheck) -> float:
        known = self._wrong.get(entry.address)
        return 0.0 if known is None else known.ready_at

    def _choose(self, now: float) -> _WaitingCheck:
        """A random header of the addresses with the fewest wrong passwords."""
        ready = [entry for entry in self._waiting if self._ready_at(entry) <= now]
        least = min(map(self._times_wrong, ready))
        return random.choice([entry for entry in ready if self._times_wrong(entry) == least])  # noqa: S311 - no secret

    def _times_wrong(self, entry: _WaitingCheck) -> int:
        known = self._wrong.get(entry.address)
        return 0 if known is None else known.wrong

    def _note_wrong(self, address: str) -> None:
        now = time.monotonic()
        for other in [each for each, known in self._wrong.items() if now - known.last > FORGET_S]:
            del self._wrong[other]
        known = self._wrong.pop(address, None) or _Failures()
        known.wrong, known.last = known.wrong + 1, now
        while len(self._wrong) >= ADDRESSES_MAX:
            self._wrong.pop(next(iter(self._wrong)))
        self._wrong[address] = known


def _check(entry: _WaitingCheck) -> tuple[bool, float]:
    """Whether the header is correct, and the CPU seconds that the check took."""
    began = time.thread_time()
    is_right = entry.security.admits(entry.header)
    return is_right, time.thread_time() - began
