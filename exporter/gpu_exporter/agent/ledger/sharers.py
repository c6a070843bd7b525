"""Divides the time of a shared unit among its holders: each second counts once, in equal parts for those who have the
unit in this second.

Time that a poll has charged remains charged. So a holder that a poll shows late has its part only since the last poll.

Pure.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from operator import truediv
from typing import NamedTuple

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation, HolderAccount
from gpu_exporter.agent.ledger.ends import EDGE_S
from gpu_exporter.common.model.holders import AllocationId
from gpu_exporter.common.model.units import UnitId


class Stay(NamedTuple):
    """The time of a holder on a unit (monotonic seconds).

    - `begin`, `end`: from when and until when it is one of the unit's holders.
    - `since`, `until`: the part of its time that this poll charges.
    """

    begin: float
    end: float
    since: float
    until: float


def share_time(
    confirmed: Sequence[ConfirmedAllocation],
    past: Sequence[ConfirmedAllocation],
    ended: Sequence[ConfirmedAllocation],
    accounts: Mapping[AllocationId, HolderAccount],
    present: Set[AllocationId],
    oldest: Callable[[UnitId], float],
    now: float,
) -> list[ConfirmedAllocation]:
    """Returns `past` and then `confirmed`. In the result, a holder of a shared unit has its mean part of the time as
    `share_ratio`, and a holder that the last poll did not show has the earliest `start` that is not charged.

    - `confirmed`, `ended`: the holders that the poll shows, and those that have ended.
    - `past`: those of `ended` that get time, with this time.
    - `accounts`: all holders before the poll. `present`: those that the last poll showed, and that have not ended.
    - `oldest`: returns the earliest time that counts for a new holder of a unit.
    """
    shared = {entry.allocation.unit for entry in (*confirmed, *past) if entry.allocation.is_shared}
    counts = Counter(entry.allocation.unit for entry in confirmed)
    stays = {entry.id: Stay(_begin_of(entry), max(entry.confirmed, entry.possible), now, now) for entry in ended}
    shown: list[ConfirmedAllocation] = []
    for entry in past:
        begin, found = _begin_of(entry), accounts.get(entry.id)
        first = found.began if found is not None and entry.id in present else begin
        stays[entry.id] = Stay(first, stays[entry.id].end, begin, entry.confirmed)
    for entry in confirmed:
        if entry.allocation.unit in shared:
            found = accounts.get(entry.id)
            if found is not None and entry.id in present:
                end = math.inf if _counts(found) else found.confirmed
                stays[entry.id] = Stay(found.began, end, found.confirmed, entry.confirmed)
            else:
                entry, stays[entry.id] = _plan_start(entry, accounts, oldest(entry.allocation.unit), now)
            whole = entry.allocation.share_ratio * counts[entry.allocation.unit]
            entry = entry._replace(allocation=entry.allocation._replace(share_ratio=whole))
        shown.append(entry)
    for holder_id in present - stays.keys():  # it left at an unknown moment (Tenants.estimate_ends)
        found = accounts[holder_id]
        begins = [stay.begin for each, stay in stays.items() if each[0] == holder_id[0]]
        until = min([now, *(begin for begin in begins if begin > found.confirmed - EDGE_S)])
        end = (found.confirmed + until) / 2 if _counts(found) else found.confirmed
        stays[holder_id] = Stay(found.began, end, now, now)
    return [_share(entry, stays) if entry.allocation.unit in shared else entry for entry in (*past, *shown)]


def _begin_of(entry: ConfirmedAllocation) -> float:
    return entry.confirmed if entry.start is None else entry.start


def _counts(account: HolderAccount) -> bool:
    """Returns whether a holder takes time of others. A hidden holder that only one answer has shown does not."""
    return account.running or account.held_s > 0.0


def _plan_start(
    entry: ConfirmedAllocation, accounts: Mapping[AllocationId, HolderAccount], oldest: float, now: float
) -> tuple[ConfirmedAllocation, Stay]:
    """Returns a holder that the last poll did not show, with its start, and its stay."""
    unit, found = entry.id[0], accounts.get(entry.id)
    others = [each for (of, _), each in accounts.items() if of == unit and each is not found]
    charged = max((each.ended for each in others if each.held_s > 0.0), default=-math.inf)
    if found is not None and not entry.allocation.holder.identity:
        entry = entry._replace(start=max(found.confirmed, charged))
    elif entry.start is not None:
        entry = entry._replace(start=min(now, max(entry.start, charged, oldest)))
    if entry.start is not None:
        return entry, Stay(entry.start, math.inf, entry.start, entry.confirmed)
    # It began at an unknown moment since the last poll. A hidden holder may be one of the others.
    begin = (charged + entry.confirmed) / 2 if charged > -math.inf and entry.allocation.running else entry.confirmed
    return entry, Stay(begin, entry.confirmed, entry.confirmed, entry.confirmed)


def _share(entry: ConfirmedAllocation, stays: Mapping[AllocationId, Stay]) -> ConfirmedAllocation:
    others = [stay for each, stay in stays.items() if each[0] == entry.id[0] and each != entry.id]
    _, _, since, until = stays[entry.id]
    since = min(since, until)
    edges = sorted({since, until, *(at for stay in others for at in stay[:2] if since < at < until)})
    counts = [1 + sum(stay.begin <= at < stay.end for stay in others) for at in edges]
    lengths = [after - at for at, after in itertools.pairwise(edges)]
    mean = sum(map(truediv, lengths, counts)) / (until - since) if lengths else 1.0 / counts[0]
    return entry._replace(allocation=entry.allocation._replace(share_ratio=entry.allocation.share_ratio * mean))
