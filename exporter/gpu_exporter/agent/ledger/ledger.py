"""Counts the busy, idle and unknown seconds of units and of their holders.

To charge a holder means to add time or energy to the holder's account. A span is a time with known activity. Rules
(docs/concepts.md explains them to users):

- All times are CLOCK_MONOTONIC. Time without a span is unknown: it counts neither as busy nor as idle nor as observed.
- No time is counted twice. Time before this process started counts only as held, for holders whose source proves their
  start, and only since the last complete poll in the state file.
- A holder is charged from the first to the last poll that shows it. A Slurm job is charged from its start. If a slow
  source reports the job late, its earlier time is held, with unknown use. Spans wait until the next poll confirms who
  held the unit. An interval in which the holder changed is charged to no holder.
- While no source confirms the holder, only its held time grows, even while the exporter does not run. So observed
  divided by held time is the known share of the holder's time.
- A holder that is alone on a unit is charged for all activity of the unit, but only between two polls that both show it
  alone. Several holders are charged for the work of their own processes (division.py).
- Activity that is charged to no holder is unattributed: busy(holders) + unattributed = busy(unit).
- The idle run is the known time without activity since the unit's last activity, without unknown time. The run ends
  after too much unknown time, in a row or in total, and at a new start of the holder's container.
- Activity ends the idle run of every holder of the unit as soon as the activity is known. On a shared unit, the run
  ends at the next poll, and only if the activity may be the holder's own (division.py). Activity that cannot be divided
  is unknown time for the other holders.

Pure: no clock, no lock, no file. The caller passes the time and excludes other threads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation, HolderAccount, UnitAccount, read_date, read_start
from gpu_exporter.agent.ledger.division import Charge, Division, Waiting, divide_joules, merge_active
from gpu_exporter.agent.ledger.ends import EDGE_S, list_replaced, plan_ends
from gpu_exporter.agent.ledger.records import HolderPresence, Holding, Pending, UnitRecord
from gpu_exporter.agent.ledger.ring import Ring
from gpu_exporter.agent.ledger.sharers import share_time
from gpu_exporter.agent.ledger.spins import RunPart, book_busy, follow_run
from gpu_exporter.agent.ledger.tenants import Tenants
from gpu_exporter.common.model.holders import Allocation, AllocationId, HolderKey
from gpu_exporter.common.model.readings import UTILIZATION, WITNESSES_MIN, Activity, Span, Split
from gpu_exporter.common.model.totals import HolderTotals, UnitTotals
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.shares import REST_MAX_SHARE

KEEP_ABSENT_S = 900.0  # a holder that was missing for less (an outage of its source) continues its account
# Missing holders that are kept for each unit: pods that start and end every few seconds must not fill the memory.
KEEP_ABSENT = 4
LATE_S = 15.0  # how long after a holder's last poll its readings may arrive: a long cycle, and the lag of a ring
WAIT_S = 300.0  # how long readings wait for the poll that shows their holder; a slow poll takes about ten seconds
REST_MIN_S = 0.5  # over a shorter time, the steps of the driver's energy counter give no valid power
RESTART_S = 1.0  # a container start that moved by less is the same start, read from another clock


class LedgerRules(NamedTuple):
    """Settings of the ledger.

    - `poll_interval_s`: seconds between two polls of the sources.
    - `history_s`, `bucket_s`: length and resolution of each unit's ring, in seconds.
    """

    poll_interval_s: float
    stale_after_polls: int
    low_ratio: float
    high_ratio: float
    idle_run_unknown_reset_s: float
    idle_run_unknown_max_ratio: float = 0.1
    history_s: float = 600.0
    bucket_s: float = 1.0

    def longest_unconfirmed_s(self, renewed_s: float = 0.0) -> float:
        """Returns for how many seconds after its last confirmation an allocation is still charged to its holder.

        `renewed_s`: seconds between two confirmations of the allocation by its source.
        """
        return self.stale_after_polls * max(self.poll_interval_s, renewed_s)


class Ledger:
    """The accounts of all units, holders and tenants of one node."""

    def __init__(self, rules: LedgerRules, started: float) -> None:
        self.rules = rules
        self.started = started
        self.units: dict[UnitId, UnitRecord] = {}
        self.holdings: dict[AllocationId, Holding] = {}
        self.tenants = Tenants()
        self._forgotten: dict[UnitId, float] = {}  # until when holders without an account had the unit
        self._free: dict[UnitId, float] = {}  # until when complete polls have proven that a unit had no holder
        self._free_since: dict[UnitId, float] = {}  # the first of these polls since the unit's last holder
        self.polled: float | None = None  # when the last complete poll asked the sources, also in the state file
        self._earliest = started  # the earliest time that a new holder may be charged for
        self._is_complete = self._was_complete = False  # the last poll, and any poll since the start
        self.long_run_ended = False  # a long idle run has ended: the state file should record it soon

    def restore(
        self,
        units: Mapping[UnitId, UnitAccount],
        holders: Mapping[AllocationId, HolderAccount],
        polled: float | None = None,
    ) -> None:
        """Takes over the accounts from a state file. `polled`: time of the last complete poll in them, None if unknown.

        From this poll on, no holder was charged. So a holder that is not in the file is charged for this time too.
        """
        self.polled = polled
        if polled is not None:
            self._earliest = min(self.started, polled - self.rules.longest_unconfirmed_s())
        self.units |= {unit: UnitRecord(account, is_restored=True) for unit, account in units.items()}
        self.holdings |= {each: Holding(account, HolderPresence.ABSENT) for each, account in holders.items()}

    def holders(self, *presences: HolderPresence) -> dict[AllocationId, HolderAccount]:
        """Returns the accounts of the holders with one of these presences; without arguments, of all holders."""
        wanted = presences or tuple(HolderPresence)
        return {each: holding.account for each, holding in self.holdings.items() if holding.presence in wanted}

    def record(self, activity: Activity) -> None:
        """Adds the activity from one reading of a unit."""
        unit = self._unit(activity.unit)
        account = unit.account
        account.witnesses = activity.witnesses or account.witnesses
        for raw in activity.spans:
            if not _is_idle(raw):
                self._end_runs(activity.unit, unit, raw)
            start = max(raw.start, account.covered_until)
            if raw.end <= start:
                continue
            span = Span(start, raw.end, raw.ratio, raw.other, activity.witnesses)
            length = span.end - span.start
            account.covered_until = span.end
            account.observed_s += length
            account.busy_s += length * span.ratio
            if _is_idle(span):
                account.idle_s += length if span.witnesses >= WITNESSES_MIN else 0.0
            elif span.ratio == 0.0:
                unit.other_s[span.other[0]] = unit.other_s.get(span.other[0], 0.0) + length
            if unit.ring is None:
                unit.ring = self._new_ring()
            unit.ring.add(span.start, span.end, span.ratio)
            waiting = unit.wait().spans
            waiting.append(Waiting(span))
            while waiting[0].span.end < span.end - WAIT_S:
                dropped = waiting.popleft()  # polls hang; no later poll may charge this span
                self._end_unbooked(activity.unit, dropped, dropped.span.end)
                account.unattributed_s += dropped.unclaimed_s

    def record_energy(self, unit: UnitId, monotonic: float, joules: float, limit_w: float | None) -> None:
        """Adds a reading of a GPU's energy counter in joules. A counter that fell starts again, because the driver was
        reloaded.

        `limit_w`: the power limit in watts.
        """
        record = self._unit(unit)
        account, pending = record.account, record.wait()
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
        """Adds the work of a shared unit's processes. The activity of the whole unit must already be recorded."""
        pending = self._unit(unit).wait()
        if pending.divisions and split.start < pending.divisions[-1].end:
            split = split._replace(start=pending.divisions[-1].end)
        if split.end > split.start:
            division = Division(split, [waiting.span for waiting in pending.spans], pending.listed)
            pending.divisions.append(division)
            pending.spans = merge_active(pending.spans, split)
            for (held, key), holding in self.holdings.items():
                if held == unit and holding.presence is HolderPresence.PRESENT and division.may_be_of(key):
                    self._end_run(holding.account)
                    holding.account.last_active = max(holding.account.last_active or 0.0, division.active_until)

    @staticmethod
    def _drop_charge(account: UnitAccount, pending: Pending) -> None:
        """Drops the oldest waiting energy reading. Its joules that no holder was charged for become unattributed."""
        charge = pending.energy.popleft()
        account.unattributed_j = (account.unattributed_j or 0.0) + charge.unclaimed_j

    def _unit(self, unit: UnitId) -> UnitRecord:
        """Returns the record of a unit that is being read, and creates it if needed."""
        record = self.units.get(unit)
        if record is None:
            record = self.units[unit] = UnitRecord(UnitAccount(covered_until=self.started))
        if record.is_restored:
            record.is_restored = False
            record.account.covered_until = max(record.account.covered_until, self.started)
        return record

    def _new_ring(self) -> Ring:
        return Ring(self.rules.history_s, self.rules.bucket_s)

    def _end_runs(self, unit: UnitId, record: UnitRecord, active: Span) -> None:
        """Records new activity of a unit, and ends the idle runs of its holders. Activity before the exporter's start
        counts too, and activity in a time that is charged to no holder. A late report counts as well.
        """
        active_until, account = active.end, record.account
        if account.last_active is None or active_until >= account.last_active:
            account.last_active = active_until
            record.active_by = (UTILIZATION,) if active.ratio else active.other
        for (held, _), holding in self.holdings.items():
            if held != unit:
                continue
            holder, is_present = holding.account, holding.presence is HolderPresence.PRESENT
            if is_present and not holder.alone and active.end > active.start:
                continue  # the next poll decides, by the work of the holder's own processes
            self._end_run(holder)
            if active_until > holder.known_until:
                holder.last_active = active_until

    def charge_poll(
        self,
        now: float,
        wall: float,
        confirmed: Sequence[ConfirmedAllocation],
        ended: Sequence[ConfirmedAllocation] = (),
        *,
        is_complete: bool = True,
        asked: float | None = None,
    ) -> set[AllocationId]:
        """Charges the waiting readings to the holders that this poll shows. Returns the ended holders that lack time.

        - `is_complete`: every source has answered, so a holder that is missing in `confirmed` held nothing at `asked`.
        - `asked`: when the sources were asked, by default `now`. Answers of slow sources are older.
        - `ended`: holders that have ended since the last poll; `confirmed` is their end. Each end counts like a
          separate poll. So a holder gets its time even if it began and ended between two polls.
        """
        self._is_complete = is_complete
        self._was_complete = self._was_complete or is_complete
        if is_complete:
            self.polled = now if asked is None else asked
        replaced = {entry.id: entry for entry in list_replaced(confirmed, ended)}
        confirmed = [entry for entry in confirmed if entry.id not in replaced]
        ended = [*ended, *replaced.values()]
        longest = self.rules.longest_unconfirmed_s
        free_since = {unit: since + longest() for unit, since in self._free_since.items()}
        accounts, before = self.holders(), self.holders(HolderPresence.PRESENT).keys()
        past, lost = plan_ends(confirmed, ended, accounts, before, self._forgotten, self._earliest, free_since)
        ends = {entry.id for entry in ended} - {entry.id for entry in past}
        entries = share_time(confirmed, past, ended, accounts, before - ends, self._oldest, now)
        past, confirmed = entries[: len(past)], entries[len(past) :]
        for number, entry in enumerate(past):
            ends.add(entry.id)
            # A holder that was missing at the last poll may have started after this end: starts in whole seconds do not
            # show the order.
            still = before - ends
            there = [each for each in (*confirmed, *past[number + 1 :]) if each.id in still]
            self._charge_poll(now, wall, [entry, *there], ends)
        self._charge_poll(now, wall, confirmed, ends)
        held = {entry.allocation.unit for entry in confirmed}
        changed = held.union(entry.allocation.unit for entry in past)
        self._free_since = {unit: since for unit, since in self._free_since.items() if unit not in changed}
        if is_complete and self.polled is not None:
            free = dict.fromkeys(self.units.keys() - held, self.polled)
            self._free_since = free | self._free_since
            self._free |= {unit: polled - longest() for unit, polled in free.items()}
        self.tenants.estimate_ends(now, longest, self.holders(), ends, is_complete=is_complete)
        self.tenants.forget(self.holdings)
        return lost

    def _charge_poll(
        self,
        now: float,
        wall: float,
        confirmed: Sequence[ConfirmedAllocation],
        ends: Collection[AllocationId],
    ) -> None:
        shown: set[AllocationId] = set()
        holders_of: dict[UnitId, int] = {}
        for entry in confirmed:
            unit = entry.allocation.unit
            holders_of[unit] = holders_of.get(unit, 0) + 1
        for entry in confirmed:
            holder_id = entry.id
            shown.add(holder_id)
            is_alone = holders_of[entry.allocation.unit] == 1 and not entry.allocation.is_shared
            # If a holder cannot work, or its mapping is contradicted, its time is unknown.
            known = entry.allocation.running and not entry.allocation.contradiction
            found = self.holdings.get(holder_id)
            if found is None or found.presence is not HolderPresence.PRESENT:
                found = self._open(entry, now, wall, has_ended=holder_id in ends)
                found.account.alone, found.account.running = is_alone, known
            account = found.account
            alone = account.alone and is_alone
            running, account.running = account.running and known, known
            if not known:
                self.long_run_ended |= account.idle_run_s > self.rules.idle_run_unknown_reset_s
                account.end_run()
            account.renewed_s = entry.renewed_s
            self._note_working(account, entry.working)
            share = 1.0 / holders_of[entry.allocation.unit]
            self._charge(holder_id, found, entry, share, alone=alone, running=running)
            account.alone = is_alone  # unbooked readings belong to the time before this poll
        for holder_id, holding in self.holdings.items():
            if holding.presence is HolderPresence.PRESENT and holder_id not in shown:
                for waiting in () if holding.account.alone else self._waiting_spans(holder_id[0]):
                    if not _is_idle(waiting.span):
                        self._end_unjudged(holder_id[0], holding.account, waiting.span)
                holding.presence = HolderPresence.LEAVING
        self._book_late(now)
        longest, present = self.rules.longest_unconfirmed_s, self.holders(HolderPresence.PRESENT)
        leaving = self.holders(HolderPresence.LEAVING)
        unmetered = {
            unit
            for unit, record in self.units.items()
            if record.account.energy_j is None and not record.is_restored and record.account.witnesses
        }
        self.tenants.charge_poll(now, longest, confirmed, present, leaving, unmetered)
        self._forget(now)

    def _book_late(self, now: float) -> None:
        """Charges late readings to holders that have left, for the time before their last poll."""
        for holder_id, holding in self.holdings.items():
            if holding.presence is not HolderPresence.LEAVING:
                continue
            account = holding.account
            if now - account.confirmed > LATE_S:
                holding.presence = HolderPresence.ABSENT
                continue
            if account.running and account.alone:
                self._book_waiting(holder_id[0], account, account.confirmed)
            elif account.running:
                self._book_divided(holder_id, holding, account.confirmed, share=0.0)
            account.end_run()  # if the holder comes back, the time in between is unknown

    @staticmethod
    def _note_working(account: HolderAccount, working: float | None) -> None:
        """Records from when the holder's program can work. If this time changes, the program was restarted.

        The idle run then ends: time before the restart proves nothing about the new program.
        """
        before = account.working
        if working is None or working == before:
            return
        if before is None or not abs(working - before) <= RESTART_S:
            account.working = working
            account.end_run()

    def _open(
        self,
        entry: ConfirmedAllocation,
        now: float,
        wall: float,
        *,
        has_ended: bool,
    ) -> Holding:
        """Begins or continues the record of a holder that was missing in the last poll.

        `has_ended`: the source reports the end of the holder, whose time is planned.
        """
        holder_id, holder = entry.id, entry.allocation.holder
        before = self.holdings.pop(holder_id, None)
        if before is not None and not holder.identity:  # a name alone may belong to another holder by now
            # The same incarnation held the unit all the time, even while the exporter did not run. But if others had
            # the whole unit meanwhile, only the time after them counts: a job's file stays until its slow epilog ends.
            account = before.account
            since = account.confirmed
            if entry.allocation.is_shared:
                since = max(since, entry.start or since)  # planned
            elif not has_ended:
                since = self._held_since(holder_id[0], account)
            account.held_s += max(0.0, entry.confirmed - since)
            account.away_s += since - account.confirmed
            account.confirmed = max(entry.confirmed, account.confirmed)
            account.booked = account.energy_booked = max(entry.confirmed, self.started)
            # The holder's earlier readings are old. Its ring continues only if the holder left a moment ago.
            ring = before.ring if before.presence is HolderPresence.LEAVING else None
            found = self.holdings[holder_id] = Holding(account, ring=ring)
            return found
        begin, known = entry.confirmed, self.started
        if entry.start is not None and (has_ended or entry.allocation.is_shared):
            begin = entry.start  # planned
            known = known if has_ended else max(known, now - self.rules.longest_unconfirmed_s(entry.renewed_s))
        elif entry.start is not None and entry.start <= now:  # a proven start
            begin = min(now, max(entry.start, self._oldest(holder_id[0]), *self._list_held(holder_id[0])))
            known = max(known, now - self.rules.longest_unconfirmed_s(entry.renewed_s))
        start_wall = holder.start_wall if holder.start_wall is not None else wall - (now - entry.confirmed)
        held_s = max(0.0, min(entry.confirmed, known) - begin)  # use before the start, or without a poll, is unknown
        begin += held_s
        account = HolderAccount(begin, begin, begin, start_wall, known_until=begin, held_s=held_s)
        account.first_seen = entry.confirmed if holder.start_wall is None else None
        found = self.holdings[holder_id] = Holding(account)
        return found

    def _held_since(self, unit: UnitId, account: HolderAccount) -> float:
        """Returns when the time of this holder on the unit ended. If other holders began after that, returns when the
        last of their times ended.
        """
        held = [holding.account for (other, _), holding in self.holdings.items() if other == unit]
        after = [other for other in held if other.held_s > 0.0 and other.began >= account.confirmed - EDGE_S]
        return max([account.confirmed, *(other.confirmed for other in after)])

    def _list_held(self, unit: UnitId) -> list[float]:
        """Returns for each holder when its time on the unit ended. Omits holders without any time on it."""
        held = [holding.account for (other, _), holding in self.holdings.items() if other == unit]
        return [account.ended for account in held if account.held_s > 0.0]

    def _oldest(self, unit: UnitId) -> float:
        """Returns the earliest time of a unit that a new holder may be charged for: since the unit was last free."""
        return max(self._earliest, self._forgotten.get(unit, -math.inf), self._free.get(unit, -math.inf))

    def _charge(
        self,
        holder_id: AllocationId,
        holding: Holding,
        entry: ConfirmedAllocation,
        share: float,
        *,
        alone: bool,
        running: bool,
    ) -> None:
        """Charges a holder up to its confirmation by this poll.

        `share`: 1 divided by the number of the unit's holders. `alone`: the holder was alone on the unit, both now and
        at its last confirmation. `running`: at both times, it could work.
        """
        until, account = entry.confirmed, holding.account
        gap = until - account.confirmed
        if gap <= 0:
            return
        account.confirmed = until
        account.held_s += gap
        if gap > self.rules.longest_unconfirmed_s(account.renewed_s) or not running:
            # No source reported the holder in this gap, or the holder cannot work.
            for waiting in self._waiting_spans(holder_id[0]):
                self._end_unbooked(holder_id[0], waiting, until)
            account.booked = account.energy_booked = until
        elif alone:
            self._book_waiting(holder_id[0], account, until)
        else:
            self._book_divided(holder_id, holding, until, share)

    def _waiting_spans(self, unit: UnitId) -> Iterable[Waiting]:
        record = self.units.get(unit)
        return record.pending.spans if record is not None and record.pending is not None else ()

    def _book_waiting(self, unit: UnitId, account: HolderAccount, until: float) -> None:
        """Charges a holder that is alone on its unit for the readings up to `until`."""
        record = self.units.get(unit)
        if record is None or record.pending is None:
            return
        pending = record.pending
        for waiting in pending.spans:
            start, end = max(waiting.span.start, account.booked), min(waiting.span.end, until)
            if end > start:
                self._book(account, waiting, waiting.span._replace(start=start, end=end), record.account.last_active)
        for charge in pending.energy:
            start, end = max(charge.start, account.energy_booked), min(charge.end, until)
            if end > start:
                self._book_energy(account, charge, charge.joules * (end - start) / (charge.end - charge.start))
                account.energy_booked = end

    def _book_divided(self, holder_id: AllocationId, holding: Holding, until: float, share: float) -> None:
        """Charges a holder of a shared unit for its own part of the readings up to `until`, as far as it is known."""
        unit, key = holder_id
        record, account = self.units.get(unit), holding.account
        if record is None or record.pending is None:
            return
        pending = record.pending
        # A period that is not over when the holder was confirmed waits for the next poll, and so do later readings.
        until = min([until, *(division.start for division in pending.divisions if division.end > until)])
        until = min(until, record.account.covered_until)
        if holding.ring is None:
            holding.ring = self._new_ring()
        begin = account.booked
        for waiting in pending.spans:
            if not _is_idle(waiting.span):
                self._end_unjudged(unit, account, waiting.span, until)
            for own in _own_parts(waiting.span, pending.divisions, key, begin, until):
                self._book(account, waiting, own, account.last_active)
                holding.ring.add(own.start, own.end, own.ratio)
        account.booked = max(begin, until)
        self._divide_energy(record.account.power_limit_w, pending, account, until, share, key)

    def _divide_energy(
        self,
        limit_w: float | None,
        pending: Pending,
        account: HolderAccount,
        until: float,
        share: float,
        key: HolderKey,
    ) -> None:
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
        """Adds a span to a holder's counters and to its idle run.

        `span`: the holder's own part of `waiting`. `last_active`: last activity of the unit; on a shared unit, of the
        holder.
        """
        length = span.end - span.start
        waiting.booked_s += length * span.ratio
        self._bridge(account, span.start)
        account.known = True
        account.known_until = account.booked = span.end
        account.observed_s += length
        book_busy(account, span)
        if span.ratio < self.rules.low_ratio:
            account.low_s += length
        elif span.ratio >= self.rules.high_ratio:
            account.high_s += length
        if _is_idle(span):
            if span.witnesses >= WITNESSES_MIN:
                account.idle_s += length
            else:
                account.unproven_s += length
            begin = max(t for t in (span.start, last_active, account.working) if t is not None)
            if span.end > begin:
                account.run_witnesses = min(span.witnesses, account.run_witnesses or span.witnesses)
                account.idle_run_s += span.end - begin
        else:
            self._end_run(account)
            account.last_active = max(account.last_active or span.end, span.end)

    def follow_run(self, holder_id: AllocationId, part: RunPart | None, now: float) -> None:
        """Sets how the holder's busy seconds count from now on.

        `part`: they are part of a run without progress (pending or stalled). None: they are busy.
        """
        holding = self.holdings.get(holder_id)
        if holding is not None:
            follow_run(holding.account, part, now)

    def _end_run(self, account: HolderAccount) -> None:
        """Ends the idle run because of work. Keeps the run's length if it is the longest."""
        self.long_run_ended |= account.idle_run_s > self.rules.idle_run_unknown_reset_s
        account.longest_gap_s = max(account.longest_gap_s, account.idle_run_s)
        account.end_run()

    def _end_unbooked(self, unit: UnitId, waiting: Waiting, until: float) -> None:
        """Ends the idle runs of those holders of a shared unit that may have worked in the span, up to `until`.

        A holder may have worked if no list of processes covers the span (see _end_unjudged).
        """
        if _is_idle(waiting.span):
            return
        for (held, _), holding in self.holdings.items():
            account = holding.account
            if held == unit and holding.presence is HolderPresence.PRESENT and not account.alone:
                self._end_unjudged(unit, account, waiting.span, until)

    def _end_unjudged(self, unit: UnitId, account: HolderAccount, span: Span, until: float = math.inf) -> None:
        """Ends the idle run of a holder of a shared unit, if the holder may have worked in this span.

        The run continues in two cases: a list of processes covers the span up to `until`, or the processes of the
        minute before explain the span.
        """
        record, at, end = self.units.get(unit), max(span.start, account.booked), min(span.end, until)
        if end <= at or record is None or record.pending is None:
            return
        for division in record.pending.divisions:
            if division.start <= at + EDGE_S:
                at = max(at, division.end)
        if end - at > EDGE_S and not record.pending.listed.explain(span):
            self._end_run(account)

    def _bridge(self, account: HolderAccount, start: float) -> None:
        """Adds the unknown time up to `start` to the idle run. Too much unknown time ends the run."""
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
        """Drops readings that no later poll can charge, and holders and instances that have been absent for long.

        Drops no holder before the first complete poll. Applies the limit KEEP_ABSENT only after a complete poll. If a
        source does not answer, missing holders may still hold their unit.
        """
        absent: dict[UnitId, int] = {}
        gone = [(each, held) for each, held in self.holdings.items() if held.presence is not HolderPresence.PRESENT]
        for holder_id, holding in sorted(gone, key=lambda item: -item[1].account.confirmed):
            absent[holder_id[0]] = absent.get(holder_id[0], 0) + 1
            # An account of a state file is absent since the start of the exporter, even if the exporter was down for
            # long.
            since = max(holding.account.confirmed, self.started)
            is_replaced = self._is_complete and absent[holder_id[0]] > KEEP_ABSENT
            if self._was_complete and (now - since > KEEP_ABSENT_S or is_replaced):
                unit, until = holder_id[0], holding.account.confirmed
                self._forgotten[unit] = max(until, self._forgotten.get(unit, until))
                del self.holdings[holder_id]
            elif holding.presence is HolderPresence.ABSENT:
                holding.ring = None
        present = self.holders(HolderPresence.PRESENT)
        self._forget_instances(now, {unit for unit, _ in present})
        oldest = now - self.rules.longest_unconfirmed_s()
        settled: dict[UnitId, float] = {}
        for (unit, _), account in present.items():
            booked = min(account.booked, account.energy_booked)
            booked = max(booked, now - self.rules.longest_unconfirmed_s(account.renewed_s))
            settled[unit] = min(booked, settled.get(unit, booked))
        for unit, record in self.units.items():
            if record.pending is not None:
                self._settle(unit, record.account, record.pending, settled.get(unit, oldest))

    def _settle(self, unit: UnitId, account: UnitAccount, pending: Pending, until: float) -> None:
        """Drops a unit's readings up to `until`. Seconds and joules that are not charged to any holder become
        unattributed.
        """
        while pending.spans and pending.spans[0].span.end <= until:
            waiting = pending.spans.popleft()
            self._end_unbooked(unit, waiting, waiting.span.end)
            account.unattributed_s += waiting.unclaimed_s
        while pending.energy and pending.energy[0].end <= until:
            self._drop_charge(account, pending)
        while pending.divisions and pending.divisions[0].end <= until:
            pending.divisions.popleft()

    def _forget_instances(self, now: float, held: Collection[UnitId]) -> None:
        """Drops MIG instances that were not read for KEEP_ABSENT_S. Each new MIG layout creates new instances."""
        for unit, record in list(self.units.items()):
            if unit.mig_uuid and unit not in held and now - record.account.covered_until > KEEP_ABSENT_S:
                del self.units[unit]
                self._forgotten.pop(unit, None)
                self._free.pop(unit, None)
                self._free_since.pop(unit, None)

    def unit_totals(self, unit: UnitId, now: float, wall: float) -> UnitTotals | None:
        """Returns the totals of a unit, or None if its activity was never known."""
        record = self.units.get(unit)
        if record is None or record.is_restored or record.account.witnesses == 0:
            return None
        account = record.account
        return UnitTotals(
            account.busy_s,
            account.observed_s,
            account.idle_s,
            account.witnesses,
            read_date(account, now, wall),
            record.active_by,
            dict(record.other_s),
            account.unattributed_s,
            account.unattributed_j,
        )

    def holder_totals(self, allocation: Allocation, now: float, wall: float) -> HolderTotals | None:
        """Returns the totals of a holder, or None if the last poll did not show it."""
        holding = self.holdings.get((allocation.unit, allocation.holder.key))
        if holding is None or holding.presence is not HolderPresence.PRESENT:
            return None
        account = holding.account
        last_active, start = read_date(account, now, wall), read_start(account, now, wall)
        return HolderTotals(
            held_s=account.held_s,
            known=account.known,
            busy_s=account.busy_s,
            stalled_s=account.stalled_s,
            pending_s=account.pending_s,
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

    def unit_ring(self, unit: UnitId) -> Ring | None:
        """Returns the utilization of a unit over the last minutes, or None before its first reading."""
        record = self.units.get(unit)
        return record.ring if record is not None else None

    def holder_ring(self, holder_id: AllocationId) -> Ring | None:
        """Returns the utilization of a holder on a shared unit over the last minutes. None for other holders."""
        holding = self.holdings.get(holder_id)
        return holding.ring if holding is not None else None

    def newest_ratio(self, allocation: Allocation, now: float) -> float | None:
        """Returns the newest known utilization (0 to 1) of a holder on a shared unit: the mean over one bucket of the
        holder's ring.

        None if no bucket is known within `longest_unconfirmed_s`.
        """
        ring = self.holder_ring((allocation.unit, allocation.holder.key))
        values = ring.values(now, self.rules.longest_unconfirmed_s()) if ring is not None else ()
        return next((value for value in reversed(values) if value is not None), None)

    def _idle_run(self, account: HolderAccount, now: float) -> float | None:
        """Returns the seconds of the idle run up to now. None if recent time or the state of the program is unknown."""
        late_s = now - account.known_until - account.renewed_s  # readings wait until the holder is confirmed
        if late_s > self.rules.idle_run_unknown_reset_s or (account.working or 0.0) > now:
            return None
        return account.idle_run_s


def _own_parts(span: Span, divisions: Iterable[Division], key: HolderKey, begin: float, until: float) -> Iterator[Span]:
    """Yields the known parts of a shared unit's span that belong to one holder, within (begin, until], in order of
    time.
    """
    start, end = max(span.start, begin), min(span.end, until)
    is_idle = _is_idle(span)
    for division in divisions:
        first, last = max(start, division.start), min(end, division.end)
        if last <= first:
            continue
        if is_idle and first > start:
            yield span._replace(start=start, end=first)
        part = span._replace(start=first, end=last)
        if not is_idle:
            own = division.judge(part, key)
            if own is not None:
                yield own
        elif not division.contradicts_rest(key):
            yield part
        start = last
    if is_idle and start < end:
        yield span._replace(start=start, end=end)


def _is_idle(span: Span) -> bool:
    return span.ratio == 0.0 and not span.other
