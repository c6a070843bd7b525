"""Counts the GPU hours of each tenant: a namespace, or a Slurm account and user.

The sums include pods and jobs that start and end between two scrapes. At each poll, the growth of each holder's
account, times the holder's share of the GPU in this time (sharers.py), is added to its tenant.

A new holder started at an unknown moment after the previous poll. A holder that left ended at an unknown moment after
its last poll. So half of this interval is added to `held_s`, which is right on average. No other counter grows, because
the work in the interval is unknown. If the scheduler reports the exact start, nothing is estimated.

A new tenant is published as 0 for its first minute, because increase() counts only from the first scraped value, and
would miss half of the hours of pods that run for a minute. A tenant from the state file continues at its value.

Pure: no clock, no lock, no file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation, HolderAccount
from gpu_exporter.common.model.holders import AllocationId, Holder, TenantKey
from gpu_exporter.common.model.totals import TenantTotals
from gpu_exporter.common.model.units import UnitId

KEEP_S = 3600.0  # after the last holder: long enough for a scrape at any interval to see the end
FIRST_S = 60.0  # how long a new tenant is published as 0: the longest common interval of scrapes
TENANTS_MAX = 200  # of one node; users who can create namespaces must not be able to fill the exporter's memory
OTHER = "other"
COUNTERS = TenantTotals._fields
NOTHING = TenantTotals(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class TenantAccount:
    """GPU-seconds and joules of one tenant.

    `seen`: when the tenant last held a unit (monotonic seconds). `unmetered_s`: the part of `held_s` on boards without
    an energy counter.
    """

    seen: float
    held_s: float = 0.0
    known_s: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    energy_j: float = 0.0
    stalled_s: float = 0.0
    unproven_s: float = 0.0
    unmetered_s: float = 0.0


class _Last(NamedTuple):
    """A holder as the last poll showed it."""

    tenant: TenantKey
    share: float
    confirmed: float
    renewed_s: float


class Tenants:
    """The accounts of all tenants of one node."""

    def __init__(self) -> None:
        self.accounts: dict[TenantKey, TenantAccount] = {}
        self.first_s = FIRST_S
        self._born: dict[TenantKey, float] = {}  # first poll of each tenant that is not from the state file
        self._booked: dict[
            AllocationId, TenantTotals
        ] = {}  # the part of each holder's account that is already in its tenant's account
        self._last: dict[AllocationId, _Last] = {}
        self._before: dict[AllocationId, _Last] = {}  # at the last call of `estimate_ends`
        self._left: dict[AllocationId, _Last] = {}
        self._polled: float | None = None

    def restore(
        self, accounts: Mapping[TenantKey, TenantAccount], holders: Mapping[AllocationId, HolderAccount]
    ) -> None:
        """Takes over the accounts from a state file. A tenant's account already contains the time of its holders."""
        self.accounts.update(accounts)
        for holder_id, account in holders.items():
            booked = _read(account)
            self._booked[holder_id] = booked._replace(held_s=max(booked.held_s, account.guessed_held_s))

    def charge_poll(
        self,
        now: float,
        longest_s: Callable[[float], float],
        confirmed: Sequence[ConfirmedAllocation],
        holders: Mapping[AllocationId, HolderAccount],
        leaving: Mapping[AllocationId, HolderAccount],
        unmetered: Collection[UnitId] = (),
    ) -> None:
        """Adds the growth of the holders' accounts since the last poll to their tenants.

        - `leaving`: holders that have left, but whose accounts may still grow.
        - `longest_s`: takes the seconds between two confirmations of a holder, and returns the longest gap that counts
          as known.
        - `unmetered`: units without an energy counter.
        """
        shown: dict[AllocationId, _Last] = {}
        for entry in confirmed:
            holder_id = entry.id
            # If a holder was missing in a poll, its account already contains that time.
            is_new = holder_id not in self._booked
            tenant, share = tenant_of(entry.allocation.holder), entry.allocation.share_ratio
            account = self._account(tenant, now)
            before_s = account.held_s
            self._add(account, holder_id, holders[holder_id], share)
            if is_new and entry.start is None and self._polled is not None and _is_named(tenant):
                account.held_s += share * _half(entry.confirmed - self._polled, longest_s(entry.renewed_s))
            if holder_id[0] in unmetered:
                account.unmetered_s += account.held_s - before_s
            shown[holder_id] = _Last(tenant, share, entry.confirmed, entry.renewed_s)
        for holder_id, last in self._last.items():
            if holder_id not in shown:
                self._left[holder_id] = last
        self._left = {holder_id: last for holder_id, last in self._left.items() if holder_id in leaving}
        for holder_id, last in self._left.items():
            if _read(leaving[holder_id]) != self._booked.get(holder_id):
                self._add(self._account(last.tenant, now), holder_id, leaving[holder_id], last.share)
        self._last, self._polled = shown, now
        for key in [key for key, account in self.accounts.items() if now - account.seen > KEEP_S]:
            del self.accounts[key]
            self._born.pop(key, None)

    def estimate_ends(
        self,
        now: float,
        longest_s: Callable[[float], float],
        holders: Mapping[AllocationId, HolderAccount],
        ends: Collection[AllocationId],
        *,
        is_complete: bool = True,
    ) -> None:
        """Adds the estimated time of holders that left since the last call, at most up to the next holder's begin.

        - `longest_s`: as in `charge_poll`.
        - `holders`: all holders, also those that have left.
        - `ends`: holders whose exact end is known.
        - `is_complete`: as in `Ledger.charge_poll`. Otherwise, a missing holder may still have its unit.
        """
        if not is_complete:
            missing = {each: last for each, last in self._before.items() if each in holders}
            self._before = {each: last for each, last in (missing | self._last).items() if each not in ends}
            return
        for holder_id, last in self._before.items():
            if holder_id in self._last or holder_id in ends or not _is_named(last.tenant):
                continue
            begins = (
                account.began
                for other, account in holders.items()
                if other[0] == holder_id[0] and account.confirmed > last.confirmed
                if other not in self._before or account.began > last.confirmed
            )
            half = _half(min([now, *begins]) - last.confirmed, longest_s(last.renewed_s))
            booked = self._booked.get(holder_id)
            if half and booked is not None:
                self._account(last.tenant, now).held_s += last.share * half
                # If the exact end is reported later, the estimate is part of it.
                self._booked[holder_id] = booked._replace(held_s=booked.held_s + half)
                if holder_id in holders:
                    holders[holder_id].guessed_held_s = booked.held_s + half
        self._before = self._last

    def _add(self, tenant: TenantAccount, holder_id: AllocationId, holder: HolderAccount, share: float) -> None:
        """Adds the growth of this holder's account since the last call to the tenant's account."""
        grown, before = _read(holder), self._booked.get(holder_id, NOTHING)
        self._booked[holder_id] = grown._replace(held_s=max(grown.held_s, before.held_s))
        for counter in COUNTERS:
            more = max(0.0, getattr(grown, counter) - getattr(before, counter))
            part = 1.0 if counter == "energy_j" else share  # energy is already divided
            setattr(tenant, counter, getattr(tenant, counter) + part * more)

    def forget(self, kept: Iterable[AllocationId]) -> None:
        """Forgets all holders except `kept`."""
        for gone in self._booked.keys() - set(kept):
            del self._booked[gone]

    def _account(self, key: TenantKey, now: float) -> TenantAccount:
        key = self._key_of(key)
        if key not in self.accounts:
            self.accounts[key], self._born[key] = TenantAccount(now), now
        account = self.accounts[key]
        account.seen = now
        return account

    def _key_of(self, key: TenantKey) -> TenantKey:
        """Returns the key of the account for this tenant. Beyond TENANTS_MAX accounts, further tenants share one
        account.
        """
        if key in self.accounts or len(self.accounts) < TENANTS_MAX:
            return key
        return key._replace(namespace=key.namespace and OTHER, account="" if key.namespace else OTHER, user="")

    def totals(self, now: float = math.inf) -> Iterable[tuple[TenantKey, TenantTotals]]:
        """Yields the totals of every tenant, in order. `now` (monotonic seconds): as published at this time. Without
        `now`, the totals are exact.

        Energy is None if the tenant has held a board without an energy counter, because part of its energy is not
        counted.
        """
        for key, account in sorted(self.accounts.items()):
            totals = TenantTotals(*(getattr(account, counter) for counter in COUNTERS))
            shown = NOTHING if now < self._born.get(key, -math.inf) + self.first_s else totals
            if not totals.energy_j or account.unmetered_s:
                shown = shown._replace(energy_j=None)
            yield key, shown if totals.unproven_s else shown._replace(unproven_s=None)


def tenant_of(holder: Holder) -> TenantKey:
    """Returns the tenant of a holder: a namespace, or an account and user of Slurm."""
    if holder.key.scheduler == "kubernetes":
        return TenantKey("kubernetes", holder.namespace, "", "")
    return TenantKey(holder.key.scheduler, "", holder.account, holder.user)


def _is_named(tenant: TenantKey) -> bool:
    """Returns whether a tenant has a name. If not, a later answer may name it, from the holder's start."""
    return any(tenant[1:])


def _read(account: HolderAccount) -> TenantTotals:
    return TenantTotals(
        account.held_s,
        account.observed_s,
        account.busy_s,
        account.idle_s,
        account.energy_j or 0.0,
        account.stalled_s,
        account.unproven_s,
    )


def _half(gap_s: float, longest_s: float) -> float:
    """Returns half of the gap between two polls. 0 if the gap is longer than `longest_s`: no source was asked in that
    time.
    """
    return gap_s / 2 if 0.0 < gap_s <= longest_s else 0.0
