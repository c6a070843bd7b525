"""Keeps the exporter's data about its node (readings, holders, counters), and passes them to ledger and state file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

from gpu_exporter.agent.attribution.holders import Devices, HolderTracker, HolderUpdate, Poll
from gpu_exporter.agent.attribution.processes import OwnedPeriod, Owners, ProcessOwners, without_owners
from gpu_exporter.agent.attribution.resolve import NumberKey, Resolution
from gpu_exporter.agent.attribution.slurm.pods import SlurmPods
from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.agent.node.ended import EndedJobs, EndedRun
from gpu_exporter.agent.node.place import Placed
from gpu_exporter.agent.node.recorder import NodeRecorder
from gpu_exporter.agent.node.sharing import Sharing
from gpu_exporter.agent.node.spins import NodeSpins
from gpu_exporter.agent.node.view import ViewRules, list_standings
from gpu_exporter.agent.node.windows import WindowReader
from gpu_exporter.agent.sampling.events import XidBook
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.holders import Allocation, Grant, Who, identify
from gpu_exporter.common.model.readings import DeviceSnapshot, HostProgress
from gpu_exporter.common.model.records import NodeRecords
from gpu_exporter.common.model.units import TWIN, DeviceIdentity, UnitId
from gpu_exporter.common.model.views import Buckets, StateStatus
from gpu_exporter.diagnosis.interface import HeldNow, Standings, Subject, Suspect, stall_rules

log = logging.getLogger(__name__)


class NodeState:
    """Keeps the node's data. Thread-safe: no thread waits for anything else while it holds the one lock."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        state: StateFile | None = None,
        processes: ProcessOwners | None = None,
        *,
        asks_slurm: bool = False,
    ) -> None:
        """`processes`: looks up the owners of the processes on each GPU, None if owners are unknown.

        `asks_slurm`: Slurm is among the sources.
        """
        self._processes = processes
        self._sharing = Sharing()
        slurm_pods = SlurmPods(settings.attribution.slurm_pods, asks_slurm=asks_slurm)
        self._tracker = HolderTracker(processes, slurm_pods)
        self._clock = clock
        self._state = state
        self._lock = threading.Lock()
        longest = max(settings.sampling.interval, settings.sampling.interval_max)
        self.ledger = Ledger(
            LedgerRules(
                poll_interval_s=settings.attribution.interval,
                stale_after_polls=settings.attribution.stale_after_polls,
                low_ratio=settings.ledger.low_ratio,
                high_ratio=settings.ledger.high_ratio,
                idle_run_unknown_reset_s=settings.ledger.idle_run_unknown_reset,
                idle_run_unknown_max_ratio=settings.ledger.idle_run_unknown_max_ratio,
                history_s=settings.diagnosis.window,
                bucket_s=settings.sampling.interval,
            ),
            clock.monotonic(),
        )
        self._polled: float | None = None  # when every source of holders had answered for the first time
        self._spins = NodeSpins(stall_rules(settings), self.ledger)
        self._windows = WindowReader(self.ledger, self._sharing, self._spins.boards, clock, settings.diagnosis.window)
        self.view_rules = ViewRules(
            withhold_s=max(settings.sampling.withhold_min, settings.sampling.withhold_after_intervals * longest),
            keep_last_s=settings.attribution.keep_last,
        )
        self._answered: dict[str, DeviceSnapshot] = {}  # the last snapshot in which the GPU answered
        self._held = HolderUpdate()
        self._numbers: dict[NumberKey, UnitId] = {}
        self._reported: Sequence[str] = ()
        self._processes_proven = False  # a process of any owner was listed, so processes are visible
        self._version = 0
        self._last_sample: tuple[float, float] | None = None  # monotonic and wall time of the newest answer of a GPU
        self.writes = None if state is None else StateStatus(None, 0, "")  # None if no state is kept
        self.xids = XidBook()
        self._ended = None if state is None else EndedJobs()

    def restore(self) -> str:
        """Takes over the state file's counters. Returns why nothing was restored, "" after a success."""
        if self._state is None:
            return "state is off"
        reason = self._state.restore(self.ledger)
        self._spins.restore()
        self._tracker.restore(self._state.numbers, self._clock.monotonic())
        self._numbers = self._tracker.numbers()
        self._reported = self._state.past.reported if self._state.past is not None else ()
        return reason

    def on_snapshot(self, snapshot: DeviceSnapshot) -> None:
        """Takes the results of one cycle of one GPU."""
        uuid = snapshot.identity.uuid
        period: OwnedPeriod | None = None
        if snapshot.period is not None:  # at once, while the processes live, and without the lock
            look_up = without_owners if self._processes is None else self._processes.own
            period = look_up(snapshot.period)
        with self._lock:
            self._version += 1
            if not snapshot.up:
                self._spins.read(snapshot, without_process=False)
                return
            if self._last_sample is None or snapshot.monotonic >= self._last_sample[0]:
                self._last_sample = (snapshot.monotonic, snapshot.wall)
            own, is_twin, _ = uuid.partition(TWIN)
            if is_twin:
                self._answered.pop(own, None)  # a first reading under the UUID that other GPUs report too
            before = self._answered.get(uuid)
            if before is not None and not snapshot.instances_known:
                listed = {instance.uuid for instance in snapshot.instances}
                left = (instance for instance in before.instances if instance.uuid not in listed)
                self._answered[uuid] = snapshot._replace(instances=(*snapshot.instances, *left))
            else:
                self._answered[uuid] = snapshot
            if snapshot.facts.contexts:
                self._processes_proven = True
            for activity in (snapshot.activity, *(i.activity for i in snapshot.instances)):
                if activity is not None:
                    self.ledger.record(activity)
            without_process = self._processes_proven and snapshot.facts.contexts == 0
            self._spins.read(snapshot, without_process=without_process, xids=self.xids.counts(uuid))
            if period is not None:
                self._sharing.note(UnitId(uuid), period)
            energy = snapshot.facts.energy_j
            if energy is not None:
                limit = snapshot.facts.power_limit_w
                self.ledger.record_energy(UnitId(uuid), snapshot.monotonic, energy, limit)
                for instance in snapshot.instances:
                    if instance.energy_j is not None:
                        unit = UnitId(uuid, instance.uuid)
                        self.ledger.record_energy(unit, snapshot.monotonic, instance.energy_j, limit)

    def is_shared(self, uuid: str) -> bool:
        """Returns whether several holders may share this GPU, so that the use of each process must be read."""
        return uuid in self._sharing.gpus

    def rest_w(self, uuid: str) -> float | None:
        """Returns the GPU's power at rest from the state file in watts, None if unknown."""
        record = self.ledger.units.get(UnitId(uuid))
        return record.account.rest_w if record is not None else None

    def touch(self) -> None:
        """Records that data of the view has changed elsewhere."""
        with self._lock:
            self._version += 1

    def known(self) -> dict[str, DeviceIdentity]:
        """Returns the identities of all GPUs that have answered, as of their last answer, by UUID."""
        with self._lock:
            return {uuid: snapshot.identity for uuid, snapshot in self._answered.items()}

    def on_poll(
        self,
        grants: Sequence[Grant],
        placed: Mapping[str, Placed],
        owners: Owners | None = None,
        expected: int = 0,
        *,
        is_complete: bool = True,
        asked: float | None = None,
        offers: Sequence[Grant] | None = None,
        ended: Sequence[Grant] = (),
        reported: Sequence[str] = (),
    ) -> Resolution:
        """Takes the grants of one poll of the sources, and finds users of GPUs without a holder. Returns the resolved
        grants.

        - `is_complete`: every source has answered recently.
        - `asked`: when the oldest of these answers was asked for (monotonic seconds), None: now.
        - `placed`: the GPUs as they are shown.
        - `owners`: the known owners of the processes on each unit.
        - `expected`: number of GPUs that should answer here.
        - `offers`: the devices that a scheduler can allocate.
        - `ended`: grants of holders that have ended since the last poll; `confirmed` is the time of the end.
        - `reported`: every end that the sources have reported, for the state file.
        """
        poll = Poll(grants, offers, ended, is_complete)
        with self._lock:
            devices = Devices(dict(self._answered), _incomplete(placed, expected), self._processes_proven)
        # may log, so it runs without the lock
        held = self._tracker.update(poll, devices, owners or {}, self._clock.monotonic())
        with self._lock:
            self._version += 1
            now, wall = self._clock.monotonic(), self._clock.wall()
            if is_complete and self._polled is None:
                self._polled = now
            self._held, self._numbers = held, self._tracker.numbers()
            self._reported = reported or self._reported
            present = [_confirm(allocation, grant, now, wall) for allocation, grant in held.resolution.allocations]
            gone = [_confirm(allocation, grant, now, wall) for allocation, grant in held.past]
            for unit, split in self._sharing.divide(entry.allocation for entry in present):
                self.ledger.record_split(unit, split)
            proven = self._spins.drop_others(present, now)
            lost = self.ledger.charge_poll(now, wall, present, gone, is_complete=is_complete, asked=asked)
            if self._ended is not None:
                self._ended.follow(self.ledger, (*gone, *present), self._answered, now, wall)
            self._spins.watch(proven)
            missed = [grant for entry, (_, grant) in zip(gone, held.past, strict=True) if entry.id in lost or grant.why]
            return held.resolution._replace(missed=[*held.resolution.missed, *missed])

    def list_suspects(self) -> Sequence[Suspect]:
        """Returns the holders in a run without progress, with their processes. Their hosts must be read."""
        with self._lock:
            allocations = [allocation for allocation, _ in self._held.resolution.allocations]
            return self._spins.list_suspects(allocations, self._answered, processes_proven=self._processes_proven)

    def hear_host(self, who: Who, progress: HostProgress) -> None:
        """Receives a holder's activity on its host, outside its GPUs."""
        with self._lock:
            for allocation, _ in self._held.resolution.allocations:
                if identify(allocation.holder) == who:
                    self._spins.hear((allocation.unit, allocation.holder.key), progress)

    def list_held(self) -> HeldNow:
        """Returns the present allocations, together with the last answers of the GPUs."""
        with self._lock:
            return HeldNow(
                [allocation for allocation, _ in self._held.resolution.allocations],
                dict(self._answered),
                self._processes_proven,
            )

    def mean_of(self, units: Sequence[UnitId], start: float, end: float) -> float | None:
        """Returns the mean utilization (0 to 1) of these units between two times (monotonic seconds), or None."""
        with self._lock:
            rings = [ring for unit in units if (ring := self.ledger.unit_ring(unit)) is not None]
            means = [mean for ring in rings if (mean := _mean(ring.values(end, end - start))) is not None]
        return _mean(means)

    def write_state(self) -> None:
        """Writes the present counters to the state file; they may then be published. Raises and counts OSError."""
        if self._state is None or self.writes is None:
            return
        with self._lock:
            self.ledger.long_run_ended = False
            self._spins.remember()
            prepared = self._state.prepare(self.ledger, self._numbers, self._reported)
        try:
            self._state.commit(prepared)  # a slow disk must not hold up scrapes
        except OSError as exc:
            with self._lock:
                self._version += 1
                reason = exc.strerror or str(exc)
                self.writes = self.writes._replace(write_errors=self.writes.write_errors + 1, error=reason)
            raise
        with self._lock:
            self._version += 1
            self._state.adopt(prepared)
            self.writes = self.writes._replace(last_write_wall=self._clock.wall(), error="")

    def take_ended(self, *, at_once: bool = False) -> Sequence[EndedRun]:
        """Returns the records of the jobs that ended since the last call. `at_once`: the exporter stops now."""
        with self._lock:
            now, wall = self._clock.monotonic(), self._clock.wall()
            return () if self._ended is None else self._ended.take(self.ledger, now, wall, at_once=at_once)

    def version(self) -> int:
        """Returns a number that changes whenever the data of a view change, except ages."""
        return self._version

    def is_resolved(self) -> bool:
        """Returns whether every grant was resolved to a unit. If not, a held GPU would look free."""
        return not self._held.resolution.unresolved

    def last_sample_wall(self) -> float | None:
        """Returns when a GPU last answered (Unix seconds). Kept while no GPU answers, as the date of the evidence."""
        with self._lock:
            return self._last_sample[1] if self._last_sample is not None else None

    def records(self, placed: Mapping[str, Placed]) -> NodeRecords:
        """Returns the records of the shown GPUs (`placed`), and of their holders and tenants, at this moment."""
        with self._lock:
            now, wall = self._clock.monotonic(), self._clock.wall()
            held, answered, proven = self._held, self._answered, self._processes_proven
            recorder = NodeRecorder(self.ledger, self._state, self._spins, self.xids, held, answered, proven, now, wall)
            return recorder.write(placed)

    def standings(self, records: NodeRecords) -> Standings:
        """Returns the input of the diagnosis, made from these records."""
        with self._lock:
            subjects = [
                Subject(record.id, unknown, self._windows.read(record, gpu))
                for record, gpu, unknown in list_standings(records, self.view_rules)
            ]
            polled = self._polled
        return Standings(records, subjects, 0.0 if polled is None else records.monotonic - polled)

    def history(self, unit: UnitId, length_s: float | None = None) -> Buckets:
        """Returns the utilization of a unit over the last `length_s` seconds, by default over all buckets."""
        with self._lock:
            return Buckets(self._windows.read_unit(unit, length_s), self.ledger.rules.bucket_s)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _incomplete(placed: Mapping[str, Placed], expected: int) -> str:
    """Returns why NVML and the schedulers may number the GPUs differently; "" if every expected GPU is here."""
    down = next((each.snapshot.identity for each in placed.values() if not each.snapshot.up), None)
    if down is not None:
        return f"gpu {down.label} ({down.uuid or 'without a name'}) does not answer"
    if len(placed) < expected:
        return f"{len(placed)} of {expected} GPUs are in the driver's list"
    return ""


def _confirm(allocation: Allocation, grant: Grant, now: float, wall: float) -> ConfirmedAllocation:
    """Returns the allocation with its dates in monotonic seconds, as the ledger needs them."""
    return ConfirmedAllocation(
        allocation,
        grant.confirmed,
        None if grant.start_here is None else now - (wall - grant.start_here),
        None if allocation.working_wall is None else now - (wall - allocation.working_wall),
        grant.renewed_s,
        grant.possible,
    )
