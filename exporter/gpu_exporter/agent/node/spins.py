"""Connects the detection of stalls with the ledger: how runs without progress count, and which data are saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from gpu_exporter.agent.collectors.xid import ends_work
from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation
from gpu_exporter.agent.ledger.ledger import Ledger
from gpu_exporter.agent.ledger.records import HolderPresence
from gpu_exporter.agent.ledger.spins import RunPart
from gpu_exporter.common.model.holders import Allocation, AllocationId, HolderKey, Who, identify
from gpu_exporter.common.model.readings import DeviceSnapshot, HostProgress, XidCounts
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.diagnosis.interface import (
    SILENT,
    Boards,
    HeldBoard,
    SpinMemory,
    SpinWatch,
    StallRules,
    Suspect,
    Waited,
)


class NodeSpins:
    """Passes readings to the detection of stalls, and its results to the ledger. Needs the node's lock."""

    def __init__(self, rules: StallRules, ledger: Ledger) -> None:
        self.boards = Boards(rules)
        self._rules, self._ledger = rules, ledger

    def restore(self) -> None:
        """Takes over each board's power at rest (watts) from the restored ledger."""
        units = self._ledger.units.items()
        self.boards.restore({unit: watts for unit, record in units if (watts := record.account.rest_w) is not None})

    def read(self, snapshot: DeviceSnapshot, *, without_process: bool, xids: XidCounts | None = None) -> None:
        """Takes one reading of a GPU. `without_process`: the GPU provably has no process with a context. `xids`: the
        XIDs of this GPU.
        """
        unit = UnitId(snapshot.identity.uuid)
        if not snapshot.up:
            if not snapshot.away:
                self.boards.note_fault(unit, SILENT, snapshot.monotonic)
            return
        for code, kind, _, wall in xids.codes if xids is not None else ():
            if ends_work(code, kind):
                self.boards.note_fault(unit, f"reported XID {code}", snapshot.monotonic - (snapshot.wall - wall))
        if (watched := self.boards.read(snapshot, without_process=without_process)) is not None:
            key, watch = watched
            self._follow((UnitId(snapshot.identity.uuid), key), watch, snapshot.monotonic)

    def hear(self, holder_id: AllocationId, progress: HostProgress) -> None:
        """Takes a holder's activity on its host, outside its GPUs."""
        if (watch := self.boards.hear(*holder_id, progress)) is not None:
            self._follow(holder_id, watch, progress.end)

    def _follow(self, holder_id: AllocationId, watch: SpinWatch, now: float) -> None:
        begin = watch.begin if watch.may_be_stall else None
        self._ledger.follow_run(holder_id, None if begin is None else RunPart(begin, watch.is_stall), now)

    def drop_others(self, present: Sequence[ConfirmedAllocation], now: float) -> list[AllocationId]:
        """Ends the runs of holders that cannot be watched, before the ledger charges this poll. Returns the other
        holders.

        A holder cannot be watched if it has left, shares its GPU, or is possibly not running.
        """
        proven = _list_proven(present) if not self._rules.is_off else []
        self.boards.drop(proven)
        for holder_id, account in self._ledger.holders(HolderPresence.PRESENT).items():
            if holder_id in proven:
                continue
            account.spin_since = None
            if account.spin_begin is not None:
                self._ledger.follow_run(holder_id, None, now)
        return proven

    def watch(self, proven: Iterable[AllocationId]) -> None:
        """Starts or continues to watch these holders. The ledger must already have charged them."""
        self.boards.hold(self._recall(*holder_id) for holder_id in proven)

    def _recall(self, unit: UnitId, key: HolderKey) -> HeldBoard:
        """Returns the only holder of a whole GPU, with the data that was saved before a restart."""
        account = self._ledger.holdings[unit, key].account
        memory: SpinMemory | None = None
        if account.spin_since is not None:
            memory = SpinMemory(
                account.spin_since,
                account.spin_until,
                account.spin_known_s,
                account.spin_all_known,
                account.is_stalled,
                account.spin_memory_bytes,
                account.spin_sm,
            )
        waited = Waited(account.waits, account.wait_longest_s)
        return HeldBoard(unit, key, memory, account.work_s, account.work_w, waited)

    def remember(self) -> None:
        """Copies the data that the detection of stalls needs after a restart into the accounts."""
        for unit, watts in self.boards.floors().items():
            if (record := self._ledger.units.get(unit)) is not None:
                record.account.rest_w = watts
        for (unit, key), account in self._ledger.holders(HolderPresence.PRESENT).items():
            watch = self.boards.watch_of(unit, key)
            if watch is None:
                continue
            account.work_s, account.work_w = watch.work.total_s, watch.work.median_w() or 0.0
            account.waits, account.wait_longest_s = self.boards.waited(key)
            memory = watch.remember()
            account.spin_since = memory.begin if memory is not None else None
            if memory is not None:
                account.spin_until, account.spin_known_s = memory.until, memory.known_s
                account.spin_all_known, account.spin_memory_bytes = memory.all_known, memory.memory_bytes
                account.spin_sm = memory.sm

    def list_suspects(
        self, allocations: Iterable[Allocation], answered: Mapping[str, DeviceSnapshot], *, processes_proven: bool
    ) -> list[Suspect]:
        """Returns the holders in a run without progress, with the processes on their fully busy GPUs.

        `answered`: the last answers of the GPUs, by UUID. Every fully busy GPU of such a holder counts, also one that
        cannot be watched, because its processes busy-wait too.
        """
        suspects = self.boards.suspects()
        spinning: dict[Who, set[str]] = {}
        held: dict[Who, set[str]] = {}
        wanted: set[Who] = set()
        for allocation in allocations:
            who, uuid = identify(allocation.holder), allocation.unit.uuid
            if who is None or uuid not in answered:
                continue
            if (allocation.unit, allocation.holder.key) in suspects:
                wanted.add(who)
            if (answered[uuid].facts.utilization or 0.0) >= self._rules.utilization_min:
                spinning.setdefault(who, set()).add(uuid)
            held.setdefault(who, set()).add(uuid)
        if not processes_proven:
            return [Suspect(who, None, len(spinning.get(who, ()))) for who in wanted]
        return [
            Suspect(who, _list_pids(spun, answered), len(spun), _list_pids(held[who] - spun, answered))
            for who in wanted
            for spun in [spinning.get(who, set())]
        ]


def _list_pids(uuids: Collection[str], answered: Mapping[str, DeviceSnapshot]) -> tuple[int, ...] | None:
    """Returns the pids on these GPUs, None if the processes of one GPU are unknown."""
    listed = [answered[uuid].processes for uuid in uuids]
    found = [process.pid for each in listed if each is not None for process in each.processes]
    return tuple(found) if None not in listed else None


def _list_proven(present: Sequence[ConfirmedAllocation]) -> list[AllocationId]:
    """Returns the holders that are certainly known, certainly run, and are alone on a whole GPU."""
    holders = Counter(entry.allocation.unit for entry in present)
    return [
        (allocation.unit, allocation.holder.key)
        for allocation, *_ in present
        if allocation.running
        and not (allocation.contradiction or allocation.is_shared or allocation.unit.mig_uuid)
        and holders[allocation.unit] == 1
    ]
