"""Limits the CPU time of each client address, so that valid requests of one client cannot keep a core busy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")

SHARE = 0.1  # of one core, for each address: some hundred ready pages a second
BURST_S = 2.0  # of CPU time that an address may use at once after a pause
CONNECTION_S, HANDSHAKE_S = 0.0002, 0.003  # CPU seconds of a new connection, without and with TLS
REQUEST_S = 0.0002  # CPU seconds of the loop for a request; those of a worker are measured
BYTES_PER_S = 1e9  # written in a second of CPU time
# An address above its budget waits this long for each step. A probe over TLS has two steps, and kubelets wait for 1 s.
PACE_S = 0.25
ADDRESSES_MAX = 1024


class CpuBudget:
    """Tracks when each address has paid off its CPU time (monotonic seconds). Used only in the event loop's thread."""

    def __init__(self) -> None:
        self._paid_at: dict[str, float] = {}  # when SHARE of a core has paid for all that it used

    async def pace(self, address: str, cpu_s: float) -> bool:
        """Charges a step to an address and returns False. Above the budget of the address, waits and returns True."""
        if self._paid_at.get(address, 0.0) - time.monotonic() <= BURST_S / SHARE:
            self.charge(address, cpu_s)
            return False
        await asyncio.sleep(PACE_S)
        return True

    def charge(self, address: str, cpu_s: float) -> None:
        """Charges CPU time that an address has used."""
        now = time.monotonic()
        if address not in self._paid_at and len(self._paid_at) >= ADDRESSES_MAX:
            self._paid_at = {other: paid_at for other, paid_at in self._paid_at.items() if paid_at > now}
            if len(self._paid_at) >= ADDRESSES_MAX:
                del self._paid_at[min(self._paid_at, key=self._paid_at.__getitem__)]  # the smallest debt
        self._paid_at[address] = max(now, self._paid_at.get(address, now)) + cpu_s / SHARE


def measure(answer: Callable[[A], R], request: A) -> tuple[R, float]:
    """Returns the answer to a request, and the CPU seconds that it took. Runs in a worker."""
    began = time.thread_time()
    return answer(request), time.thread_time() - began
