"""Watches all whole GPUs of one node for stalls. Each watch belongs to the only holder of its GPU."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.common.model.holders import HolderKey
from gpu_exporter.common.model.readings import DeviceSnapshot, Effort, HostProgress
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.model.views import HourOfWork, Spin
from gpu_exporter.diagnosis.stalls.floor import BoardFloor
from gpu_exporter.diagnosis.stalls.hour import HOUR_S, WorkHour
from gpu_exporter.diagnosis.stalls.rules import MINUTE_S, StallRules
from gpu_exporter.diagnosis.stalls.run import SpinMemory
from gpu_exporter.diagnosis.stalls.waits import Around, HolderWaits, Waited
from gpu_exporter.diagnosis.stalls.watch import GRACE_S, SpinWatch
from gpu_exporter.diagnosis.stalls.work import WorkHistory

NO_PROCESS = "the GPU is busy without a process: the reason is unknown"
DRAWS = "a process with a graphics context is on the GPU, and drawing looks the same as a hang"  # H200: 3 % of the SMs
SILENT = "does not answer"
SUSPECT_S = 20.0  # known seconds of a run after which the holder's host is read: normal work ends a run at once


class HeldBoard(NamedTuple):
    """The only holder of a whole GPU, with the data that the exporter saved about it before its restart."""

    unit: UnitId
    key: HolderKey
    memory: SpinMemory | None = None
    work_s: float = 0.0
    work_w: float = 0.0
    waited: Waited = Waited()


class _Board:
    """One GPU. Times are monotonic seconds.

    - `key`: the watched holder. `process_at`: the last time at which the holder may have had a process on the GPU.
    - `is_left`: the holder provably has no process on the GPU now. `worked_at`: when the GPU last worked.
    - `fault`, `fault_at`: the GPU's last fault, and when it was reported.
    """

    def __init__(self, floor: BoardFloor) -> None:
        self.floor = floor
        self.is_armed = False
        self.key: HolderKey | None = None
        self.watch: SpinWatch | None = None
        self.hour: WorkHour | None = None
        self.held: HeldBoard | None = None
        self.name = ""
        self.process_at = -math.inf
        self.is_left = False
        self.worked_at = -math.inf
        self.fault, self.fault_at = "", -math.inf


class Boards:
    """The watched GPUs of one node. Not thread-safe: the node holds its lock during each call."""

    def __init__(self, rules: StallRules) -> None:
        self._rules = rules
        self._boards: dict[UnitId, _Board] = {}
        self._waits: dict[HolderKey, HolderWaits] = {}
        self._stopped: dict[HolderKey, tuple[float, int]] = {}  # when processes were last seen stopped, and how many

    def restore(self, floors: Mapping[UnitId, float]) -> None:
        """Restores each board's power at rest (watts), which the exporter saved before its restart."""
        for unit, watts in floors.items():
            self._boards[unit] = _Board(BoardFloor(watts))

    def floors(self) -> dict[UnitId, float]:
        """Returns the power at rest of each board, in watts, where it is known."""
        return {unit: board.floor.seen_w for unit, board in self._boards.items() if board.floor.seen_w is not None}

    def drop(self, proven: Collection[tuple[UnitId, HolderKey]]) -> None:
        """Stops watching all holders that are not in `proven`."""
        for unit, board in self._boards.items():
            if board.key is not None and (unit, board.key) not in proven:
                board.key = board.watch = None

    def hold(self, held: Iterable[HeldBoard]) -> None:
        """Watches these holders, starting with the next reading."""
        for each in held:
            board = self._boards.setdefault(each.unit, _Board(BoardFloor()))
            if board.key != each.key:
                board.key, board.watch, board.held = each.key, None, each
                board.process_at, board.is_left = -math.inf, False
            self._waits.setdefault(each.key, HolderWaits(self._rules, each.waited))
        keys = {board.key for board in self._boards.values()}
        self._waits = {key: waits for key, waits in self._waits.items() if key in keys}
        self._stopped = {key: stopped for key, stopped in self._stopped.items() if key in keys}

    def note_fault(self, unit: UnitId, fault: str, at: float) -> None:
        """Notes a fault of a GPU: an XID, or no answer. `at`: monotonic seconds."""
        if (board := self._boards.get(unit)) is not None and board.fault_at < at:
            board.fault, board.fault_at = fault, at

    def read(self, snapshot: DeviceSnapshot, *, without_process: bool) -> tuple[HolderKey, SpinWatch] | None:
        """Takes one reading of a GPU. Returns the watched holder and its watch, None if no holder is watched.

        `without_process`: the GPU provably has no process with a context.
        """
        unit, effort = UnitId(snapshot.identity.uuid), snapshot.effort
        if effort is None:
            return None
        if snapshot.instances or snapshot.identity.mig_mode == "enabled":
            board = self._boards.get(unit)
            if board is None or board.watch is None or board.key is None:
                return None
            board.watch.end(effort.end, "the GPU is divided into MIG instances")
            return board.key, board.watch
        board = self._boards.setdefault(unit, _Board(BoardFloor()))
        watch = board.watch
        if watch is None:
            watch = board.watch = self._make_watch(board, snapshot, effort.start)
            board.hour = WorkHour(HOUR_S)
        spans = snapshot.activity.spans if snapshot.activity is not None else ()
        draws = DRAWS if snapshot.facts.graphics_processes else ""
        watch.read(effort, spans, snapshot.contradiction or (NO_PROCESS if without_process else draws))
        board.is_armed |= watch.is_armed
        board.name, board.is_left = f"gpu {snapshot.identity.index}", without_process
        if not without_process:
            board.process_at = effort.end
        if board.fault == SILENT:  # it answers again
            board.fault_at = -math.inf
        self._follow(unit, board, watch, effort)
        if board.hour is not None:
            board.hour.add(effort, spans)
        return (board.key, watch) if board.key is not None else None

    def _follow(self, unit: UnitId, board: _Board, watch: SpinWatch, effort: Effort) -> None:
        """Updates the holder's waits from a reading, and passes the state of its other GPUs to the watch."""
        if board.key is None or (waits := self._waits.get(board.key)) is None:
            return
        if watch.known_s >= SUSPECT_S and watch.begin is not None:
            waits.spin(unit, watch.begin, effort.memory_bytes)
        elif watch.works_s:
            board.worked_at = effort.end
            waits.work(unit, watch.works_s, effort.end)
        waits.note_memory(unit, effort.memory_bytes)
        if watch.begin is not None:
            others = [other for other in self._boards.values() if other.key == board.key and other is not board]
            at_work = next((other.name for other in others if other.worked_at > watch.begin + MINUTE_S), "")
            proof, alone = "", f"{at_work} of the holder still works, so the others may wait for it" if at_work else ""
            if not at_work:
                proof = self._find_proof(board.key, board, others, watch.begin, effort.end)
            if not (at_work or proof or watch.polls) and all(other.is_left for other in others):
                alone = "no other GPU takes part and the GPU polls no network, so it waits for no collective"
            watch.around = Around(proof, alone, waits.expected_s(), waits.waited)

    def _find_proof(self, key: HolderKey, board: _Board, others: Sequence[_Board], begin: float, now: float) -> str:
        """Returns the reason why a member of the gang (the processes that work together) cannot continue, "" without
        proof.

        Counts a process only if it had ended or stopped when the run began, and a fault only if it is not older than
        the run.
        """
        for each in (board, *others):
            if each.fault_at >= begin - MINUTE_S:
                return f"{each.name} {each.fault}"
        for other in others:
            if other.is_left and abs(other.process_at - begin) <= MINUTE_S:
                return f"the process on {other.name} ended when the others began to wait"
        at, count = self._stopped.get(key, (-math.inf, 0))
        rests = [other for other in others if other.watch is not None and other.watch.begin is None]
        if count and now - at <= GRACE_S and any(abs(other.worked_at - begin) <= MINUTE_S for other in rests):
            return f"{count} of its processes on GPUs at rest are stopped by a signal"
        return ""

    def _make_watch(self, board: _Board, snapshot: DeviceSnapshot, at: float) -> SpinWatch:
        """Makes a watch for the present holder. Without a holder, it only learns the power at rest."""
        work, held = WorkHistory(), board.held if board.key is not None else None
        limit_w = snapshot.effort.default_limit_w if snapshot.effort is not None else None
        watch = SpinWatch(self._rules, snapshot.identity.name, board.floor, work)
        watch.is_armed = board.is_armed
        if held is not None:
            if held.work_s and limit_w:
                work.add(held.work_w, held.work_s, limit_w)
            if held.memory is not None:
                watch.resume(held.memory, at)
            board.held = None
        return watch

    def hear(self, unit: UnitId, key: HolderKey, host: HostProgress) -> SpinWatch | None:
        """Takes a holder's activity on its host. Returns the holder's watch, None if the holder is not watched."""
        board = self._boards.get(unit)
        if board is None or board.key != key or board.watch is None:
            return None
        if (waits := self._waits.get(key)) is not None:
            members = {each for each, other in self._boards.items() if other.key == key and not other.is_left}
            waits.hear(host, members)
        if host.stopped is not None:
            self._stopped[key] = (host.end, host.stopped)
        board.watch.hear(host)
        return board.watch

    def waited(self, key: HolderKey) -> Waited:
        """Returns the number and length of a holder's waits."""
        return waits.waited if (waits := self._waits.get(key)) is not None else Waited()

    def suspects(self) -> set[tuple[UnitId, HolderKey]]:
        """Returns the holders whose hosts must be read: in a run without progress, or in a wait that may have just
        ended.

        Also holders of a fully busy GPU whose progress the exporter cannot see.
        """
        waiting = {key for key, waits in self._waits.items() if waits.is_open}
        return {
            (unit, board.key)
            for unit, board in self._boards.items()
            if board.key is not None
            and board.watch is not None
            and (max(board.watch.known_s, board.watch.quiet_s) >= SUSPECT_S or board.key in waiting)
        }

    def watch_of(self, unit: UnitId, key: HolderKey) -> SpinWatch | None:
        board = self._boards.get(unit)
        return board.watch if board is not None and board.key == key else None

    def means(self, unit: UnitId, key: HolderKey) -> HourOfWork | None:
        """Returns the means of a holder's last hour. None while too little of the hour is known."""
        board = self._boards.get(unit)
        return board.hour.means() if board is not None and board.key == key and board.hour is not None else None

    def report(self, unit: UnitId, key: HolderKey) -> Spin | None:
        """Returns the holder's run without progress. None if the holder is not watched."""
        watch = self.watch_of(unit, key)
        return watch.report() if watch is not None else None
