"""Hours of namespaces, accounts and users that add up, though their pods and jobs come and go between two scrapes.

Each settling of the ledger adds what its holders' accounts have grown by, times their share of the GPU, to their
tenant. A holder that is seen at one poll and was not at the poll before came somewhere in between, and likewise when it
leaves: half of that time is added to `held_s`, which is right on average, and to nothing else, since nothing is known
of it. A start that the scheduler proves needs no such guess.

Pure: no clock, no lock, no file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpu_exporter.ledger.accounts import ConfirmedAllocation, HolderAccount, HolderId
from gpu_exporter.model.holders import Holder, TenantKey
from gpu_exporter.model.totals import TenantTotals

KEEP_S = 3600.0  # after the last holder: long enough for a scrape of any interval to see the end
TENANTS_MAX = 200  # of one node; a cluster where users shape namespaces must not shape our memory
OTHER = "other"
COUNTERS = TenantTotals._fields
NOTHING = TenantTotals(0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class TenantAccount:
    """GPU-seconds and joules; `seen`: when it last held something (monotonic seconds)."""

    seen: float
    held_s: float = 0.0
    known_s: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    energy_j: float = 0.0


class _Last(NamedTuple):
    """A holder at the last poll."""

    tenant: TenantKey
    share: float
    confirmed: float
    renewed_s: float


class Tenants:
    """All tenants of one node."""

    def __init__(self) -> None:
        self.accounts: dict[TenantKey, TenantAccount] = {}
        self._booked: dict[HolderId, TenantTotals] = {}  # what its tenant has had of each holder's account
        self._last: dict[HolderId, _Last] = {}
        self._left: dict[HolderId, _Last] = {}
        self._polled: float | None = None

    def restore(self, accounts: Mapping[TenantKey, TenantAccount], holders: Mapping[HolderId, HolderAccount]) -> None:
        """What a state file gave back: its tenants have had everything that its holders' accounts say."""
        self.accounts.update(accounts)
        self._booked.update({holder_id: _read(account) for holder_id, account in holders.items()})

    def charge_poll(
        self,
        now: float,
        longest_s: Callable[[float], float],
        confirmed: Sequence[ConfirmedAllocation],
        holders: Mapping[HolderId, HolderAccount],
        leaving: Mapping[HolderId, HolderAccount],
        ends: Collection[HolderId] = (),
    ) -> None:
        """Add what the accounts of `holders` have grown by since the last poll, and those of holders that are gone and
        may still grow. `longest_s`: the gap that is still known, for a holder that is renewed so often. `ends`: who was
        confirmed at its very end, after which there is nothing to guess.
        """
        shown: dict[HolderId, _Last] = {}
        for entry in confirmed:
            holder_id = (entry.allocation.unit, entry.allocation.holder.key)
            is_new = holder_id not in self._booked  # one that was away for a poll has that time in its account already
            tenant, share = tenant_of(entry.allocation.holder), entry.allocation.share_ratio
            account = self._account(tenant, now)
            self._add(account, holder_id, holders[holder_id], share)
            if is_new and entry.start is None and self._polled is not None:
                account.held_s += share * _half(entry.confirmed - self._polled, longest_s(entry.renewed_s))
            shown[holder_id] = _Last(tenant, share, entry.confirmed, entry.renewed_s)
        for holder_id, last in self._last.items():
            if holder_id not in shown:
                self._left[holder_id] = last
                half = _half(now - last.confirmed, longest_s(last.renewed_s))
                if half and holder_id not in ends:
                    self._account(last.tenant, now).held_s += last.share * half
        self._left = {holder_id: last for holder_id, last in self._left.items() if holder_id in leaving}
        for holder_id, last in self._left.items():
            if _read(leaving[holder_id]) != self._booked.get(holder_id):
                self._add(self._account(last.tenant, now), holder_id, leaving[holder_id], last.share)
        self._last, self._polled = shown, now
        for key in [key for key, account in self.accounts.items() if now - account.seen > KEEP_S]:
            del self.accounts[key]

    def _add(self, tenant: TenantAccount, holder_id: HolderId, holder: HolderAccount, share: float) -> None:
        """Give the tenant what this holder's account has grown by since it was last read."""
        grown, before = _read(holder), self._booked.get(holder_id, NOTHING)
        self._booked[holder_id] = grown
        for counter in COUNTERS:
            more = max(0.0, getattr(grown, counter) - getattr(before, counter))
            part = 1.0 if counter == "energy_j" else share  # an instance's energy is its own already
            setattr(tenant, counter, getattr(tenant, counter) + part * more)

    def forget(self, kept: Iterable[HolderId]) -> None:
        """Forget the holders that the ledger has forgotten."""
        for gone in self._booked.keys() - set(kept):
            del self._booked[gone]

    def _account(self, key: TenantKey, now: float) -> TenantAccount:
        account = self.accounts.setdefault(self._key_of(key), TenantAccount(now))
        account.seen = now
        return account

    def _key_of(self, key: TenantKey) -> TenantKey:
        """The account that stands for this tenant; those beyond the most share one."""
        if key in self.accounts or len(self.accounts) < TENANTS_MAX:
            return key
        return key._replace(namespace=key.namespace and OTHER, account="" if key.namespace else OTHER, user="")

    def totals(self) -> Iterable[tuple[TenantKey, TenantTotals]]:
        """Every tenant, in order."""
        for key, account in sorted(self.accounts.items()):
            totals = TenantTotals(*(getattr(account, counter) for counter in COUNTERS))
            # A board without an energy counter has used energy all the same: 0 would be a number that nobody has read.
            yield key, totals._replace(energy_j=totals.energy_j or None)


def tenant_of(holder: Holder) -> TenantKey:
    """A namespace, or an account and user of Slurm."""
    if holder.key.scheduler == "kubernetes":
        return TenantKey("kubernetes", holder.namespace, "", "")
    return TenantKey(holder.key.scheduler, "", holder.account, holder.user)


def _read(account: HolderAccount) -> TenantTotals:
    energy = account.energy_j or 0.0
    return TenantTotals(account.held_s, account.observed_s, account.busy_s, account.idle_s, energy)


def _half(gap_s: float, longest_s: float) -> float:
    """Half of the time between two polls, none of a gap in which nothing was asked."""
    return gap_s / 2 if 0.0 < gap_s <= longest_s else 0.0
