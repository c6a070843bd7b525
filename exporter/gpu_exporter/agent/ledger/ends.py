"""Decides which time each ended holder gets, so that no time of a unit counts twice.

The epilog of a job, which reports the end, may run when the next job already has the GPU. Polls in between show only
the next job, and the next job may even end first. Starts and ends are in whole seconds. So an ended holder gets the
first part of its time that no other holder of the unit has. If polls showed it, its time goes on from the last of them.

On a shared unit, holders have parts at the same time. There, an ended holder gets the time since the last poll, and the
earlier time in which polls showed it. Other earlier time that was charged to other holders is lost.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation, HolderAccount
from gpu_exporter.common.model.holders import AllocationId
from gpu_exporter.common.model.units import UnitId

EDGE_S = 0.05  # times of one moment differ by less: they come from another clock, and are converted at two moments
WHOLE_S = 1.0 + EDGE_S  # Slurm, prolog and epilog write whole seconds


class PlannedEnds(NamedTuple):
    """The time of ended holders.

    - `past`: the holders in order of their ends, each with its own time: from `start` to `confirmed`. Leaves out
      holders without such a time.
    - `lost`: the holders that lack their time or a part of it.
    """

    past: list[ConfirmedAllocation]
    lost: set[AllocationId]


def plan_ends(
    confirmed: Sequence[ConfirmedAllocation],
    ended: Sequence[ConfirmedAllocation],
    accounts: Mapping[AllocationId, HolderAccount],
    present: Set[AllocationId],
    forgotten: Mapping[UnitId, float],
    oldest: float,
    free: Mapping[UnitId, float],
) -> PlannedEnds:
    """Plans the time of the ended holders.

    - `confirmed`: the holders that the poll shows.
    - `accounts`: of all holders before the poll. `present`: the holders that the last poll showed.
    - `forgotten`: until when holders without an account had a unit.
    - `oldest`: the earliest time that counts for holders without an account.
    - `free`: from when polls have proven that a unit had no holder. A later end, such as that of an epilog that ran
      hours after the last step, gives no time to a holder that had the unit before.
    """
    shown = [*confirmed, *ended]
    until = {entry.id: entry.confirmed for entry in confirmed}
    taken: dict[AllocationId, tuple[float, float]] = {}
    for holder_id, account in accounts.items():
        last = max(account.ended, until.get(holder_id, account.confirmed))
        if last > account.began or account.running:  # a hidden holder that one answer showed takes no time
            taken[holder_id] = account.began, last
    charged = {holder_id: (began, accounts[holder_id].ended) for holder_id, (began, _) in taken.items()}
    past: list[ConfirmedAllocation] = []
    lost: set[AllocationId] = set()
    for entry in sorted(ended, key=lambda each: (each.id not in accounts, _start_of(each), each.confirmed)):
        unit, found, start = entry.allocation.unit, accounts.get(entry.id), _start_of(entry)
        begin = max(start, forgotten.get(unit, oldest), oldest) if found is None else found.confirmed
        end = min([entry.confirmed, *_list_next(entry, begin, shown)])
        is_shared = entry.allocation.is_shared
        times = (charged if is_shared else taken).items() if not is_shared or entry.id not in present else ()
        others = sorted(each for other, each in times if other[0] == unit and other != entry.id)
        if begin > start and end > free.get(unit, end):
            end = begin
        for first, last in others:
            if found is None and first <= begin + EDGE_S:
                begin = max(begin, last)
            elif first >= begin - EDGE_S:
                end = min(end, first)
            elif is_shared and last > begin + EDGE_S:
                end = begin
        if end > begin:
            taken[entry.id] = (begin, end) if found is None else (found.began, max(end, found.ended))
            past.append(entry._replace(start=begin, confirmed=end))
        elif found is None and entry.confirmed > start + EDGE_S:
            lost.add(entry.id)
        held_s = max(0.0, end - begin) + (found.held_s if found is not None else 0.0)
        nexts = [*_list_next(entry, start, shown), *(first for first, _ in others if first > start and not is_shared)]
        if held_s < min([entry.confirmed, *nexts]) - start - WHOLE_S:
            lost.add(entry.id)
    return PlannedEnds(sorted(past, key=lambda each: each.confirmed), lost)


def _start_of(entry: ConfirmedAllocation) -> float:
    return entry.confirmed if entry.start is None else entry.start


def list_replaced(
    confirmed: Iterable[ConfirmedAllocation], ended: Sequence[ConfirmedAllocation]
) -> list[ConfirmedAllocation]:
    """Returns the shown holders that had their whole unit only until an ended holder began, each with this end.

    The file of such a job remains until its slow epilog runs.
    """
    nexts = [(entry, _list_next(entry, _start_of(entry), ended)) for entry in confirmed]
    return [entry._replace(confirmed=min(starts)) for entry, starts in nexts if starts]


def _list_next(entry: ConfirmedAllocation, begin: float, others: Iterable[ConfirmedAllocation]) -> list[float]:
    """Returns the starts of the next holders, unless both share the unit. Dates within one second show no order."""
    earliest, latest = max(_start_of(entry), begin - WHOLE_S), entry.confirmed - WHOLE_S
    return [
        other.start
        for other in others
        if other.allocation.unit == entry.allocation.unit
        if not (other.allocation.is_shared and entry.allocation.is_shared)
        if other.start is not None and earliest < other.start < latest and other.id != entry.id
    ]
