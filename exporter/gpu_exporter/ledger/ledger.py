"""The ledger: what is known about how units and holders spent their time.

Rules (docs/concepts.md explains them to users):
- Everything is CLOCK_MONOTONIC. Time that no span covers is unknown: it is neither busy nor idle nor observed.
- No stretch of time is counted twice, and none before this process started.
- A holder is charged from the first poll that shows it to the last that shows it (a Slurm job from its start). So
  spans wait until the next poll confirms who held the unit; the interval of a change goes to nobody.
- While a mapping is not confirmed, its holder's observed, busy and idle time do not grow. Held time does, also over our
  own absence: so observed / held is the share of the holder's time that is known.
- The one holder of a unit is charged for all that the unit does, and only for time at both ends of which it was the
  only one. Several are charged for what their own processes do (division.py).
- What no holder was charged for is unattributed: busy(holders) + unattributed = busy(unit).
- The idle run is the unbroken run of known zero since the unit's last activity: unknown time does not add to it, and
  too much of that, in sequence or in all, ends it. So does a start of the holder's container within it. Activity ends
  it the moment it is known, whichever holder is charged; where holders share the unit, with the next poll.
Pure: no clock, no lock, no file. The caller passes the time and keeps other threads out.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_exporter.ledger.accounts import HolderAccount, UnitAccount, read_date
from gpu_exporter.ledger.division import Charge, Division, Waiting, divide_joules, merge_active
from gpu_exporter.ledger.ring import Ring
from gpu_exporter.ledger.tenants import HolderId, Tenants
from gpu_exporter.model.holders import Allocation, HolderKey
from gpu_exporter.model.readings import UTILIZATION, Activity, Span, Split
from gpu_exporter.model.totals import HolderTotals, UnitTotals
from gpu_exporter.model.units import UnitId
from gpu_exporter.shares import REST_MAX_SHARE

KEEP_ABSENT_S = 900.0  # a holder may be missing this long (an outage of its source) and go on where it was
KEEP_ABSENT = 4  # ... and at most so many of one unit: pods that come and go each few seconds must not fill the memory
LATE_S = 15.0  # after a holder's last poll its readings may come so late: a long cycle, and what a ring lags
WAIT_S = 300.0  # readings wait so long for the poll that says whose they are; a slow one takes some ten seconds
EDGE_S = 0.05  # stamps of periods and of spans, both of the driver's clock, are converted at moments of their own
REST_MIN_S = 0.5  # over less than this the steps of the driver's energy counter make any power
RESTART_S = 1.0  # a container start that moved by less is the same one, read from another clock


class LedgerRules(NamedTuple):
    """`poll_interval_s`: attribution's interval; `history_s`, `bucket_s`: the ring of each unit."""

    poll_interval_s: float
    stale_after_polls: int
    low_ratio: float
    high_ratio: float
    idle_run_unknown_reset_s: float
    idle_run_unknown_max_ratio: float = 0.1
    history_s: float = 600.0
    bucket_s: float = 1.0

    def longest_unconfirmed_s(self, renewed_s: float = 0.0) -> float:
        """A mapping older than this charges nobody. `renewed_s`: so often its source makes it again."""
        return self.stale_after_polls * max(self.poll_interval_s, renewed_s)


class ConfirmedAllocation(NamedTuple):
    """An allocation, when its source last said so, (Slurm) since when it provably holds, and since when its holder can
    work where that is known; monotonic seconds. `renewed_s` as in Grant.
    """

    allocation: Allocation
    confirmed: float
    start: float | None
    working: float | None = None
    renewed_s: float = 0.0


@dataclass(slots=True)
class _Pending:
    """Readings of one unit that wait for the next poll to say whose they are. `rest_w`: least power ever drawn."""

    spans: deque[Waiting] = field(default_factory=deque)
    energy: deque[Charge] = field(default_factory=deque)
    divisions: deque[Division] = field(default_factory=deque)
    energy_at: float | None = None
    rest_w: float | None = None


@dataclass(slots=True)
class _Signs:
    """Who showed that a unit is not idle, as in UnitTotals; not kept over a restart."""

    active_by: tuple[str, ...] = ()
    other_s: dict[str, float] = field(default_factory=dict)


def _id_of(entry: ConfirmedAllocation) -> HolderId:
    return entry.allocation.unit, entry.allocation.holder.key


class Ledger:
    """All accounts of one node."""

    def __init__(self, rules: LedgerRules, started: float) -> None:
        self.rules = rules
        self.started = started
        self.units: dict[UnitId, UnitAccount] = {}
        self.holders: dict[HolderId, HolderAccount] = {}
        self.restored_units: dict[UnitId, UnitAccount] = {}
        self.restored_holders: dict[HolderId, HolderAccount] = {}
        self.rings: dict[UnitId, Ring] = {}
        self.holder_rings: dict[HolderId, Ring] = {}  # of holders that share their unit
        self.tenants = Tenants()
        self.long_run_ended = False  # an idle run worth remembering ended: the state file should learn it soon
        self._pending: dict[UnitId, _Pending] = {}
        self._signs: dict[UnitId, _Signs] = {}
        self._leaving: dict[HolderId, HolderAccount] = {}  # gone since a moment ago, also in restored_holders

    def record(self, activity: Activity) -> None:
        """Book what one reading knows about its unit."""
        account = self._unit(activity.unit)
        account.witnesses = activity.witnesses or account.witnesses
        for raw in activity.spans:
            if not _is_idle(raw):
                self._end_runs(activity.unit, account, raw)
            start = max(raw.start, account.covered_until)
            if raw.end <= start:
                continue
            span = Span(start, raw.end, raw.ratio, raw.other, activity.witnesses)
            length = span.end - span.start
            account.covered_until = span.end
            account.observed_s += length
            account.busy_s += length * span.ratio
            if _is_idle(span):
                account.idle_s += length
            elif span.ratio == 0.0:
                other_s = self._signs.setdefault(activity.unit, _Signs()).other_s
                other_s[span.other[0]] = other_s.get(span.other[0], 0.0) + length
            self._ring(activity.unit).add(span.start, span.end, span.ratio)
            waiting = self._pending.setdefault(activity.unit, _Pending()).spans
            waiting.append(Waiting(span))
            while waiting[0].span.end < span.end - WAIT_S:
                dropped = waiting.popleft()  # while polls hang; no later one may charge it
                self._end_unbooked(activity.unit, dropped, dropped.span.end)
                account.unattributed_s += dropped.unclaimed_s

    def record_energy(self, unit: UnitId, monotonic: float, joules: float, limit_w: float | None) -> None:
        """Book the driver's energy counter of a whole GPU; a counter that fell was reset with the driver."""
        pending = self._pending.setdefault(unit, _Pending())
        account = self._unit(unit)
        account.power_limit_w = limit_w
        previous, account.energy_j = account.energy_j, joules
        since, pending.energy_at = pending.energy_at, monotonic
        if previous is not None and since is not None and joules >= previous:
            charge = Charge(since, monotonic, joules - previous)
            pending.energy.append(charge)
            if charge.joules and monotonic - since >= REST_MIN_S:
                power_w = charge.joules / (monotonic - since)
                pending.rest_w = min(power_w, pending.rest_w if pending.rest_w is not None else power_w)
            while pending.energy[0].end < monotonic - WAIT_S:
                self._drop_charge(account, pending)

    def record_split(self, unit: UnitId, split: Split) -> None:
        """Book what the processes on a shared unit did, whose activity of that time was recorded before."""
        pending = self._pending.setdefault(unit, _Pending())
        if pending.divisions and split.start < pending.divisions[-1].end:
            split = split._replace(start=pending.divisions[-1].end)
        if split.end > split.start:
            pending.divisions.append(Division(split, (waiting.span for waiting in pending.spans)))
            pending.spans = merge_active(pending.spans, split)

    @staticmethod
    def _drop_charge(account: UnitAccount, pending: _Pending) -> None:
        """What nobody has had of the oldest charge is nobody's."""
        charge = pending.energy.popleft()
        account.unattributed_j = (account.unattributed_j or 0.0) + charge.unclaimed_j

    def _unit(self, unit: UnitId) -> UnitAccount:
        account = self.units.get(unit)
        if account is None:
            account = self.restored_units.pop(unit, None) or UnitAccount(covered_until=self.started)
            account.covered_until = max(account.covered_until, self.started)
            self.units[unit] = account
        return account

    def _ring(self, unit: UnitId) -> Ring:
        ring = self.rings.get(unit)
        if ring is None:
            ring = self.rings[unit] = Ring(self.rules.history_s, self.rules.bucket_s)
        return ring

    def _end_runs(self, unit: UnitId, account: UnitAccount, active: Span) -> None:
        """Activity is known, be it late, before our start, or in a time that nobody is charged for."""
        active_until = active.end
        if account.last_active is None or active_until >= account.last_active:
            account.last_active = active_until
            self._signs.setdefault(unit, _Signs()).active_by = (UTILIZATION,) if active.ratio else active.other
        for holder_id, holder in (*self.holders.items(), *self.restored_holders.items()):
            if holder_id[0] != unit:
                continue
            if holder_id in self.holders and not holder.alone and active.end > active.start:
                continue  # it is judged by its own processes, with the next poll
            self._end_run(holder)
            if active_until > holder.known_until:
                holder.last_active = active_until

    def charge_poll(
        self,
        now: float,
        wall: float,
        confirmed: Sequence[ConfirmedAllocation],
        ended: Sequence[ConfirmedAllocation] = (),
    ) -> None:
        """Charge the waiting readings to those who are shown to have held the units.

        `ended`: of holders that have ended since the last poll, `confirmed` at their end: as if each end were a poll of
        its own, so that who came and went between two polls, one after the other, has its time.
        """
        past = sorted(ended, key=lambda each: each.confirmed)
        ends: set[HolderId] = set()
        for number, entry in enumerate(past):
            ends.add(_id_of(entry))
            # Who was not there at the last poll may have come after this end: whole seconds of starts do not say.
            there = [each for each in (*confirmed, *past[number + 1 :]) if _id_of(each) in self.holders.keys() - ends]
            self._charge_poll(now, wall, [entry, *there], ends)
        self._charge_poll(now, wall, confirmed, ends)

    def _charge_poll(
        self, now: float, wall: float, confirmed: Sequence[ConfirmedAllocation], ends: Collection[HolderId]
    ) -> None:
        shown: set[HolderId] = set()
        holders_of: dict[UnitId, int] = {}
        latest: dict[UnitId, float] = {}  # when a holder of the unit was last confirmed
        for (unit, _), known_account in (*self.holders.items(), *self.restored_holders.items()):
            latest[unit] = max(known_account.confirmed, latest.get(unit, known_account.confirmed))
        for entry in confirmed:
            unit = entry.allocation.unit
            holders_of[unit] = holders_of.get(unit, 0) + 1
        for entry in confirmed:
            holder_id = (entry.allocation.unit, entry.allocation.holder.key)
            shown.add(holder_id)
            is_alone = holders_of[entry.allocation.unit] == 1 and not entry.allocation.is_shared
            # Neither a holder that cannot work nor one whose mapping is contradicted has a time that is known.
            known = entry.allocation.running and not entry.allocation.contradiction
            account = self.holders.get(holder_id)
            if account is None:
                account = self._open(holder_id, entry, now, wall, latest.get(holder_id[0]), has_ended=holder_id in ends)
                account.alone, account.running = is_alone, known
            alone = account.alone and is_alone
            running, account.running = account.running and known, known
            if not known:
                self.long_run_ended |= account.idle_run_s > self.rules.idle_run_unknown_reset_s
                account.end_run()
            account.renewed_s = entry.renewed_s
            self._note_working(account, entry.working)
            share = 1.0 / holders_of[entry.allocation.unit]
            self._charge(holder_id, account, entry, share, alone=alone, running=running)
            account.alone = is_alone  # what was not booked is of the time before
            latest[holder_id[0]] = max(account.confirmed, latest.get(holder_id[0], account.confirmed))
        for holder_id in self.holders.keys() - shown:
            account = self.holders.pop(holder_id)
            self._end_unjudged(holder_id[0], account)
            self._leaving[holder_id] = self.restored_holders[holder_id] = account
        self._book_late(now)
        longest = self.rules.longest_unconfirmed_s
        self.tenants.charge_poll(now, longest, confirmed, self.holders, self._leaving, ends)
        self._forget(now)
        self.tenants.forget((*self.holders, *self.restored_holders))

    def _book_late(self, now: float) -> None:
        """Readings of the time before a holder's last poll that come after it are still its own."""
        for holder_id, account in list(self._leaving.items()):
            if self.restored_holders.get(holder_id) is not account or now - account.confirmed > LATE_S:
                del self._leaving[holder_id]  # it came back, or was forgotten
                continue
            if account.running and account.alone:
                self._book_waiting(holder_id[0], account, account.confirmed)
            elif account.running:
                self._book_divided(holder_id, account, account.confirmed, share=0.0)
            account.end_run()  # should it come back, nothing is known of the time in between

    @staticmethod
    def _note_working(account: HolderAccount, working: float | None) -> None:
        """Another start is a restart: the time before it says nothing of the program that runs now."""
        before = account.working
        if working is None or working == before:
            return
        if before is None or not abs(working - before) <= RESTART_S:
            account.working = working
            account.end_run()

    def _open(
        self,
        holder_id: HolderId,
        entry: ConfirmedAllocation,
        now: float,
        wall: float,
        other: float | None,
        *,
        has_ended: bool,
    ) -> HolderAccount:
        """The account of a holder that was not there at the last poll: restored, or new.

        `other`: when another holder of the unit was last confirmed. `has_ended`: both ends of its time are dated.
        """
        holder = entry.allocation.holder
        restored = self.restored_holders.pop(holder_id, None)
        if restored is not None and not holder.identity:  # a name alone may be another holder by now
            # The same incarnation held the unit all the time, whether we were there or not.
            restored.held_s += max(0.0, entry.confirmed - restored.confirmed)
            restored.confirmed = restored.booked = restored.energy_booked = max(entry.confirmed, self.started)
            self.holders[holder_id] = restored
            return restored
        begin = entry.confirmed
        if entry.start is not None:  # provable start: charged from there, but never for time before our own
            oldest = self.started if has_ended else now - self.rules.longest_unconfirmed_s(entry.renewed_s)
            begin = min(entry.confirmed, max(entry.start, self.started, oldest, other if other is not None else oldest))
        start_wall = holder.start_wall if holder.start_wall is not None else wall - (now - entry.confirmed)
        account = HolderAccount(begin, begin, begin, start_wall, known_until=begin)
        self.holders[holder_id] = account
        return account

    def _charge(
        self,
        holder_id: HolderId,
        account: HolderAccount,
        entry: ConfirmedAllocation,
        share: float,
        *,
        alone: bool,
        running: bool,
    ) -> None:
        """`share`: of the unit, by the number of holders. `alone`, `running`: at both ends of the time since the holder
        was confirmed before.
        """
        until = entry.confirmed
        gap = until - account.confirmed
        if gap <= 0:
            return
        account.confirmed = until
        account.held_s += gap
        if gap > self.rules.longest_unconfirmed_s(account.renewed_s) or not running:
            # no source says who held it in between, or it cannot work
            pending = self._pending.get(holder_id[0])
            for waiting in pending.spans if pending is not None else ():
                self._end_unbooked(holder_id[0], waiting, until)
            account.booked = account.energy_booked = until
        elif alone:
            self._book_waiting(holder_id[0], account, until)
        else:
            self._book_divided(holder_id, account, until, share)

    def _book_waiting(self, unit: UnitId, account: HolderAccount, until: float) -> None:
        """Book the readings up to `until` that this holder has not had yet."""
        pending = self._pending.get(unit)
        if pending is None:
            return
        for waiting in pending.spans:
            start, end = max(waiting.span.start, account.booked), min(waiting.span.end, until)
            if end > start:
                self._book(account, waiting, waiting.span._replace(start=start, end=end), self.units[unit].last_active)
        for charge in pending.energy:
            start, end = max(charge.start, account.energy_booked), min(charge.end, until)
            if end > start:
                self._book_energy(account, charge, charge.joules * (end - start) / (charge.end - charge.start))
                account.energy_booked = end

    def _book_divided(self, holder_id: HolderId, account: HolderAccount, until: float, share: float) -> None:
        """Book what this holder did on a unit that others use too; what is not known to be its own is nobody's."""
        unit, key = holder_id
        pending = self._pending.get(unit)
        if pending is None:
            return
        # A period that is not over when the holder was confirmed waits for the next poll, and so do readings to come.
        until = min([until, *(division.start for division in pending.divisions if division.end > until)])
        until = min(until, self._unit(unit).covered_until)
        ring = self.holder_rings.get(holder_id)
        if ring is None:
            ring = self.holder_rings[holder_id] = Ring(self.rules.history_s, self.rules.bucket_s)
        begin = account.booked
        for waiting in pending.spans:
            for own in _own_parts(waiting.span, pending.divisions, key, begin, until):
                if own is None:
                    self._end_run(account)
                else:
                    self._book(account, waiting, own, account.last_active)
                    ring.add(own.start, own.end, own.ratio)
        account.booked = max(begin, until)
        self._divide_energy(unit, pending, account, until, share, key)

    def _divide_energy(
        self, unit: UnitId, pending: _Pending, account: HolderAccount, until: float, share: float, key: HolderKey
    ) -> None:
        limit_w = self.units[unit].power_limit_w if unit in self.units else None
        rest_w = pending.rest_w or 0.0
        if limit_w is not None:
            rest_w = min(rest_w, REST_MAX_SHARE * limit_w)
        for charge in pending.energy:
            begin, end = max(charge.start, account.energy_booked), min(charge.end, until)
            if end <= begin:
                continue
            power_w = charge.joules / (charge.end - charge.start)
            edges = sorted({begin, end, *(d.end for d in pending.divisions if begin < d.end < end)})
            for start, stop in itertools.pairwise(edges):
                division = next((d for d in pending.divisions if d.start <= start and stop <= d.end), None)
                part = None if division is None else division.part_of(key)
                length = stop - start
                self._book_energy(account, charge, divide_joules(power_w * length, rest_w * length, share, part))
            account.energy_booked = end

    @staticmethod
    def _book_energy(account: HolderAccount, charge: Charge, joules: float) -> None:
        charge.booked_j += joules
        account.energy_j = (account.energy_j or 0.0) + joules

    def _book(self, account: HolderAccount, waiting: Waiting, span: Span, last_active: float | None) -> None:
        """`span`: the holder's own part of what waits; `last_active`: of the unit, or where that is shared its own."""
        length = span.end - span.start
        waiting.booked_s += length * span.ratio
        self._bridge(account, span.start)
        account.known = True
        account.known_until = account.booked = span.end
        account.observed_s += length
        account.busy_s += length * span.ratio
        if span.ratio < self.rules.low_ratio:
            account.low_s += length
        elif span.ratio >= self.rules.high_ratio:
            account.high_s += length
        if _is_idle(span):
            account.idle_s += length
            begin = max(t for t in (span.start, last_active, account.working) if t is not None)
            if span.end > begin:
                account.run_witnesses = min(span.witnesses, account.run_witnesses or span.witnesses)
                account.idle_run_s += span.end - begin
        else:
            self._end_run(account)
            account.last_active = max(account.last_active or span.end, span.end)

    def _end_run(self, account: HolderAccount) -> None:
        """Work ended it."""
        self.long_run_ended |= account.idle_run_s > self.rules.idle_run_unknown_reset_s
        account.longest_gap_s = max(account.longest_gap_s, account.idle_run_s)
        account.end_run()

    def _end_unbooked(self, unit: UnitId, waiting: Waiting, until: float) -> None:
        """Activity of a shared unit up to `until` that a holder was not judged by may be that holder's."""
        if _is_idle(waiting.span):
            return
        for (held, _), account in self.holders.items():
            if held == unit and not account.alone and account.booked < min(waiting.span.end, until):
                self._end_run(account)

    def _end_unjudged(self, unit: UnitId, account: HolderAccount) -> None:
        """A holder goes that shared the unit: activity that it was not judged by may be its own."""
        pending = self._pending.get(unit)
        spans = (waiting.span for waiting in pending.spans) if pending is not None else ()
        if not account.alone and any(not _is_idle(span) and span.end > account.booked for span in spans):
            self._end_run(account)

    def _bridge(self, account: HolderAccount, start: float) -> None:
        """Take the unknown time up to `start` into the idle run, or end the run where it would be too much."""
        gap = max(0.0, start - account.known_until)
        unknown = account.run_unknown_s + gap
        most = max(
            self.rules.idle_run_unknown_reset_s,
            self.rules.idle_run_unknown_max_ratio * (account.idle_run_s + unknown),
        )
        if gap > self.rules.idle_run_unknown_reset_s or unknown > most:
            account.end_run()
        elif account.idle_run_s > 0.0:
            account.run_unknown_s = unknown

    def _forget(self, now: float) -> None:
        """Drop readings that no later poll may charge, and holders and instances that have been gone for long."""
        absent: dict[UnitId, int] = {}
        for holder_id, gone in sorted(self.restored_holders.items(), key=lambda item: -item[1].confirmed):
            absent[holder_id[0]] = absent.get(holder_id[0], 0) + 1
            # What a state file gave back is absent since our start, however long we were away.
            since = max(gone.confirmed, self.started)
            if now - since > KEEP_ABSENT_S or absent[holder_id[0]] > KEEP_ABSENT:
                del self.restored_holders[holder_id]
        self._forget_instances(now)
        oldest = now - self.rules.longest_unconfirmed_s()
        settled: dict[UnitId, float] = {}
        for (unit, _), account in self.holders.items():
            booked = min(account.booked, account.energy_booked)
            booked = max(booked, now - self.rules.longest_unconfirmed_s(account.renewed_s))
            settled[unit] = min(booked, settled.get(unit, booked))
        for unit, pending in self._pending.items():
            until = settled.get(unit, oldest)
            of_unit = self._unit(unit)
            while pending.spans and pending.spans[0].span.end <= until:
                waiting = pending.spans.popleft()
                self._end_unbooked(unit, waiting, waiting.span.end)
                of_unit.unattributed_s += waiting.unclaimed_s
            while pending.energy and pending.energy[0].end <= until:
                self._drop_charge(of_unit, pending)
            while pending.divisions and pending.divisions[0].end <= until:
                pending.divisions.popleft()
        for holder_id in self.holder_rings.keys() - self.holders.keys() - self._leaving.keys():
            del self.holder_rings[holder_id]

    def _forget_instances(self, now: float) -> None:
        """MIG instances that were not read for long: each new layout has new ones, while GPUs stay few."""
        held = {unit for unit, _ in self.holders}
        for accounts in (self.units, self.restored_units):
            for unit, account in list(accounts.items()):
                if unit.mig_uuid and unit not in held and now - account.covered_until > KEEP_ABSENT_S:
                    del accounts[unit]
                    self.rings.pop(unit, None)
                    self._pending.pop(unit, None)
                    self._signs.pop(unit, None)

    def unit_totals(self, unit: UnitId, now: float, wall: float) -> UnitTotals | None:
        """Totals of a unit, None while it never had a source of activity."""
        account = self.units.get(unit)
        if account is None or account.witnesses == 0:
            return None
        signs = self._signs.get(unit) or _Signs()
        return UnitTotals(
            account.busy_s,
            account.observed_s,
            account.idle_s,
            account.witnesses,
            read_date(account, now, wall),
            signs.active_by,
            dict(signs.other_s),
            account.unattributed_s,
            account.unattributed_j,
        )

    def holder_totals(self, allocation: Allocation, now: float, wall: float) -> HolderTotals | None:
        """Totals of a holder, None before its first poll was settled."""
        account = self.holders.get((allocation.unit, allocation.holder.key))
        if account is None:
            return None
        last_active, start = read_date(account, now, wall), round(account.start_wall, 3)
        return HolderTotals(
            held_s=account.held_s,
            known=account.known,
            busy_s=account.busy_s,
            observed_s=account.observed_s,
            idle_s=account.idle_s,
            low_s=account.low_s,
            high_s=account.high_s,
            energy_j=account.energy_j,
            idle_run_s=self._idle_run(account, now) if account.running else None,
            idle_run_witnesses=account.run_witnesses,
            longest_gap_s=account.longest_gap_s,
            start_wall=start,
            last_active_wall=(last_active if last_active is not None else start) if account.known else None,
        )

    def newest_ratio(self, allocation: Allocation, now: float) -> float | None:
        """Mean utilization of a holder that shares its unit over the newest bucket that is known; None where the last
        poll brought none.
        """
        ring = self.holder_rings.get((allocation.unit, allocation.holder.key))
        values = ring.values(now, self.rules.longest_unconfirmed_s()) if ring is not None else ()
        return next((value for value in reversed(values) if value is not None), None)

    def _idle_run(self, account: HolderAccount, now: float) -> float | None:
        """The run as of now, None when too much time up to now is unknown, or its program is not known to run."""
        late_s = now - account.known_until - account.renewed_s  # readings wait until the holder is confirmed
        if late_s > self.rules.idle_run_unknown_reset_s or (account.working or 0.0) > now:
            return None
        return account.idle_run_s


def _own_parts(
    span: Span, divisions: Iterable[Division], key: HolderKey, begin: float, until: float
) -> Iterator[Span | None]:
    """What a span of a shared unit says of one holder, within (begin, until], in order of time.

    None is activity that may be this holder's: it is not booked, and ends the idle run.
    """
    start, end = max(span.start, begin), min(span.end, until)
    if end <= start:
        return
    is_idle, judged_until = _is_idle(span), start
    for division in divisions:
        first, last = max(start, division.start), min(end, division.end)
        if last <= first:
            continue
        if is_idle and first > judged_until:
            yield span._replace(start=judged_until, end=first)
        elif first - judged_until > EDGE_S:
            yield None
        part = span._replace(start=first, end=last)
        if is_idle:
            yield None if division.contradicts_rest(key) else part
        else:
            yield division.judge(part, key)
        judged_until = last
    if is_idle and judged_until < end:
        yield span._replace(start=judged_until, end=end)
    elif judged_until == start or end - judged_until > EDGE_S:
        yield None


def _is_idle(span: Span) -> bool:
    return span.ratio == 0.0 and not span.other
