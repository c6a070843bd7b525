"""The exporter's knowledge of its node: readings, holders, counters. Feeds the ledger and keeps the state file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from gpu_exporter.agent.attribution.holders import Devices, HolderTracker, HolderUpdate, Poll
from gpu_exporter.agent.attribution.processes import OwnedPeriod, Owners, ProcessOwners, without_owners
from gpu_exporter.agent.attribution.resolve import NumberKey, Resolution
from gpu_exporter.agent.attribution.slurm.pods import SlurmPods
from gpu_exporter.agent.collectors.processes import PROCESSES
from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.agent.node.place import Placed
from gpu_exporter.agent.node.sharing import Sharing
from gpu_exporter.agent.node.spins import NodeSpins
from gpu_exporter.agent.node.view import ViewRules, build_view, list_standings
from gpu_exporter.agent.sampling.events import XidBook
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.evidence import HostEvidence
from gpu_exporter.common.model.holders import Allocation, AllocationId, Grant, TenantKey, Who, identify
from gpu_exporter.common.model.readings import DeviceSnapshot, HostProgress
from gpu_exporter.common.model.records import GpuRecord, HolderRecord, NodeRecords
from gpu_exporter.common.model.totals import TenantTotals, UnitTotals
from gpu_exporter.common.model.units import DeviceIdentity, UnitId
from gpu_exporter.common.model.views import AgentStatus, Buckets, StateStatus, View
from gpu_exporter.diagnosis.cases import NodeCases
from gpu_exporter.diagnosis.causes.case import HostLook
from gpu_exporter.diagnosis.host.loop import HostNode
from gpu_exporter.diagnosis.host.progress import Suspect
from gpu_exporter.diagnosis.host.subject import HostSubject
from gpu_exporter.diagnosis.host.work import HostWorks
from gpu_exporter.diagnosis.looks import NodeEvidence, list_subjects
from gpu_exporter.diagnosis.loop import DiagnosisInput, Findings, Subject
from gpu_exporter.diagnosis.state import Window
from gpu_exporter.diagnosis.training.files import TrainingFiles
from gpu_exporter.diagnosis.training.pace import NodeTraining

log = logging.getLogger(__name__)
NOT_OFFERED = "the kubelet does not offer it to pods: its device plugin is down, excludes it or reports it unhealthy"


class NodeState:
    """Thread-safe. It has one lock, which is never held while the thread waits for anything else."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        state: StateFile | None = None,
        processes: ProcessOwners | None = None,
        *,
        asks_slurm: bool = False,
        host: HostWorks | None = None,
    ) -> None:
        """`processes`: looks up the owners of processes on each GPU, None if owners are unknown. `asks_slurm`: Slurm is
        among the sources. `host`: reads what holders do beside their GPUs, None if that is not read.
        """
        self._host = host
        self._processes = processes
        self._sharing = Sharing()
        slurm_pods = SlurmPods(settings.attribution.slurm_pods, asks_slurm=asks_slurm)
        self._tracker = HolderTracker(processes, slurm_pods)
        self._settings = settings
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
        self._spins = NodeSpins(settings.stalls, self.ledger)
        self._evidence = NodeEvidence()
        self._training = NodeTraining()
        self._view_rules = ViewRules(
            withhold_s=max(settings.sampling.withhold_min, settings.sampling.withhold_after_intervals * longest),
            keep_last_s=settings.attribution.keep_last,
        )
        self._answered: dict[str, DeviceSnapshot] = {}  # the last snapshot in which the GPU answered
        self._held = HolderUpdate()
        self._numbers: dict[NumberKey, UnitId] = {}
        self._processes_proven = False  # a process of any owner was listed, so processes are visible
        self._version = 0
        self._last_sample: tuple[float, float] | None = None  # monotonic and wall time of the newest answer of a GPU
        self._last_write_wall: float | None = None
        self._write_errors = 0
        self._write_error = ""
        self.xids = XidBook()

    def restore(self) -> str:
        """Take over the state file's counters. Returns why nothing was restored, "" if counters were restored."""
        if self._state is None:
            return "state is off"
        reason = self._state.restore(self.ledger)
        self._spins.restore()
        self._tracker.restore(self._state.numbers, self._clock.monotonic())
        self._numbers = self._tracker.numbers()
        return reason

    def on_snapshot(self, snapshot: DeviceSnapshot) -> None:
        """Book one device cycle."""
        uuid = snapshot.identity.uuid
        period: OwnedPeriod | None = None
        if snapshot.period is not None:  # at once, while the processes live, and without the lock
            look_up = without_owners if self._processes is None else self._processes.own
            period = look_up(snapshot.period)
        with self._lock:
            self._version += 1
            if not snapshot.up:
                return
            if self._last_sample is None or snapshot.monotonic >= self._last_sample[0]:
                self._last_sample = (snapshot.monotonic, snapshot.wall)
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
            self._spins.read(snapshot, without_process=without_process)
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
        """Whether the driver must be asked for the work of single processes on this GPU."""
        return uuid in self._sharing.gpus

    def touch(self) -> None:
        """Note that something a view shows has changed elsewhere."""
        with self._lock:
            self._version += 1

    def known(self) -> dict[str, DeviceIdentity]:
        """Every GPU that has answered, by UUID, with its identity of that time."""
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
        offers: Sequence[Grant] | None = None,
        ended: Sequence[Grant] = (),
    ) -> Resolution:
        """Settle one poll of the attribution sources: their grants, and users of GPUs that no source names.

        `is_complete`: every source has answered lately. `placed`: the GPUs as they are shown. `owners`: the owners of
        the processes on each unit, as far as known. `expected`: how many GPUs should answer here. `offers`: all devices
        that may be given. `ended`: holders that have ended since the last poll, `confirmed` at their end.
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
            present = [_confirm(allocation, grant, now, wall) for allocation, grant in held.resolution.allocations]
            gone = [_confirm(allocation, grant, now, wall) for allocation, grant in held.past]
            for unit, split in self._sharing.divide(entry.allocation for entry in present):
                self.ledger.record_split(unit, split)
            proven = self._spins.drop_others(present, now)
            self.ledger.charge_poll(now, wall, present, gone)
            self._spins.watch(proven)
            self._evidence.keep(allocation for allocation, _ in held.resolution.allocations)
            self._training.keep((allocation for allocation, _ in held.resolution.allocations), now)
            return held.resolution

    def host_node(self, unwell: Callable[[], Collection[AllocationId]]) -> HostNode:
        """This node, as the reader of its holders' hosts sees it. `unwell`: whose causes are looked for."""
        return HostNode(
            self.list_held,
            self.list_suspects,
            self.hear_host,
            lambda: self.list_subjects(unwell()),
            self.note_evidence,
            self.note_training,
        )

    def list_subjects(self, unwell: Collection[AllocationId]) -> Sequence[HostSubject]:
        """The holders of these allocations, with their processes."""
        with self._lock:
            allocations = [allocation for allocation, _ in self._held.resolution.allocations]
            return list_subjects(allocations, unwell, self._answered, processes_proven=self._processes_proven)

    def note_evidence(self, who: Who, evidence: HostEvidence) -> None:
        """Keep one look at a holder's host, with the mean utilization of its GPUs here in the same time."""
        with self._lock:
            held = [each for each, _ in self._held.resolution.allocations if identify(each.holder) == who]
            units = [] if any(each.is_shared for each in held) else [each.unit for each in held]
            means = [self._mean_between(unit, evidence.start, evidence.end) for unit in units]
            known = [mean for mean in means if mean is not None]
            self._evidence.note(who, HostLook(evidence, sum(known) / len(known) if known else None))

    def note_training(self, who: Who, files: TrainingFiles) -> None:
        """Keep what a holder's training loop says of itself. Its steps end a run without progress."""
        with self._lock:
            self._version += 1
            found = self._training.note(who, files)
        if found is not None and found.steps is not None:
            self.hear_host(who, HostProgress(found.start, found.end, steps=found.steps))

    def list_suspects(self) -> Sequence[Suspect]:
        """The holders whose host shows whether they make progress, with the processes that spin."""
        with self._lock:
            allocations = [allocation for allocation, _ in self._held.resolution.allocations]
            return self._spins.list_suspects(allocations, self._answered, processes_proven=self._processes_proven)

    def hear_host(self, who: Who, progress: HostProgress) -> None:
        """Take what a holder did beside its GPUs."""
        with self._lock:
            for allocation, _ in self._held.resolution.allocations:
                if identify(allocation.holder) == who:
                    self._spins.hear((allocation.unit, allocation.holder.key), progress)

    def wants_write(self) -> bool:
        """True if an idle run ended that the state file still records."""
        return self.ledger.long_run_ended

    def list_held(self) -> tuple[Sequence[Allocation], int]:
        """The present allocations, and how many GPUs have answered."""
        with self._lock:
            return [allocation for allocation, _ in self._held.resolution.allocations], len(self._answered)

    def write_state(self) -> None:
        """Write the present counters, which may then be published. Raises OSError, and counts it."""
        if self._state is None:
            return
        with self._lock:
            self.ledger.long_run_ended = False
            self._spins.remember()
            prepared = self._state.prepare(self.ledger, self._numbers)
        try:
            self._state.commit(prepared)  # a slow disk must not hold up scrapes
        except OSError as exc:
            with self._lock:
                self._version += 1
                self._write_errors += 1
                self._write_error = exc.strerror or str(exc)
            raise
        with self._lock:
            self._version += 1
            self._state.adopt(prepared)
            self._last_write_wall = self._clock.wall()
            self._write_error = ""

    def version(self) -> int:
        """Changes with everything that a view shows, except ages."""
        return self._version

    def is_resolved(self) -> bool:
        """Whether every grant names a device that answers here. Otherwise a held GPU looks free."""
        return not self._held.resolution.unresolved

    def last_sample_wall(self) -> float | None:
        """When a GPU last answered, even if no GPU answers any more: evidence becomes older, but keeps its date."""
        with self._lock:
            return self._last_sample[1] if self._last_sample is not None else None

    def state_status(self) -> StateStatus | None:
        """The status of the state file, None if no state is kept."""
        if self._state is None:
            return None
        with self._lock:
            return StateStatus(self._last_write_wall, self._write_errors, self._write_error)

    def records(self, placed: Mapping[str, Placed]) -> NodeRecords:
        """Everything that a view of these GPUs shows, as of this moment."""
        with self._lock:
            now, wall = self._clock.monotonic(), self._clock.wall()
            gpus = {key: self._gpu_record(each, now, wall) for key, each in placed.items()}
            units: dict[Who | None, list[UnitId]] = {}  # only where a training needs them
            for each, _ in self._held.resolution.allocations if self._training.is_used else ():
                units.setdefault(identify(each.holder), []).append(each.unit)
            holders = tuple(
                record
                for allocation, grant in self._held.resolution.allocations
                if (record := self._holder_record(allocation, grant, now, wall, units)) is not None
            )
            return NodeRecords(now, wall, gpus, holders, tuple(self._tenant_totals()))

    def _gpu_record(self, placed: Placed, now: float, wall: float) -> GpuRecord:
        snapshot = placed.snapshot
        uuid = snapshot.identity.uuid
        totals = {
            mig_uuid: unit_totals
            for mig_uuid in ("", *(instance.uuid for instance in snapshot.instances))
            if (unit_totals := self._unit_totals(UnitId(uuid, mig_uuid), now, wall)) is not None
        }
        shown = snapshot if self._processes_proven else _without_processes(snapshot)
        not_free: dict[str, str] = {}
        allocatable: bool | None = None
        if self._held.offered is not None:
            offered = {unit.mig_uuid for unit in self._held.offered if unit.uuid == uuid}
            allocatable = bool(offered)
            here = ("", *(instance.uuid for instance in snapshot.instances))
            not_free = {mig_uuid: NOT_OFFERED for mig_uuid in here if mig_uuid not in offered}
        not_free |= {used.mig_uuid: text for used, text in self._held.in_use.items() if used.uuid == uuid}
        return GpuRecord(shown, placed.hung, totals, self.xids.counts(uuid), not_free, allocatable)

    def _holder_record(
        self, allocation: Allocation, grant: Grant, now: float, wall: float, units: Mapping[Who | None, list[UnitId]]
    ) -> HolderRecord | None:
        unit, key = allocation.unit, allocation.holder.key
        totals = self.ledger.holder_totals(allocation, now, wall)
        if totals is None:
            return None
        if self._state is not None:
            totals = self._state.bound_holder(unit, key, totals)
        answered = self._answered.get(unit.uuid)  # a holder keeps a GPU that was lost before the exporter's start
        instances = answered.instances if answered is not None else ()
        mig = next((instance.mig for instance in instances if instance.uuid == unit.mig_uuid), "")
        stale_s = self.ledger.rules.longest_unconfirmed_s(grant.renewed_s)
        use, ratio = self._held.uses.get((unit, key)), self.ledger.newest_ratio(allocation, now)
        who = identify(allocation.holder)
        host = self._host.works.get(who) if self._host is not None and who is not None else None
        spin, hour = self._spins.boards.report(unit, key), self._spins.boards.means(unit, key)
        idle_run_s = totals.idle_run_s if totals.known else None
        training = self._training.view(who, unit, units.get(who, ()), now, idle_run_s)
        unconfirmed_s = now - grant.confirmed
        return HolderRecord(allocation, totals, unconfirmed_s, stale_s, mig, use, ratio, host, spin, hour, training)

    def _tenant_totals(self) -> Iterator[tuple[TenantKey, TenantTotals]]:
        for key, totals in self.ledger.tenants.totals():
            shown = totals if self._state is None else self._state.bound_tenant(key, totals)
            if shown is not None:
                yield key, shown

    def _unit_totals(self, unit: UnitId, now: float, wall: float) -> UnitTotals | None:
        totals = self.ledger.unit_totals(unit, now, wall)
        if totals is None or self._state is None:
            return totals
        return self._state.bound_unit(unit, totals)

    def view(self, placed: Mapping[str, Placed], status: AgentStatus, findings: Findings) -> View:
        """The view of this moment."""
        return build_view(self.records(placed), status, findings, self._view_rules)

    def history(self, unit: UnitId, length_s: float | None = None) -> Buckets:
        """Utilization over the last `length_s` seconds, by default over all buckets."""
        with self._lock:
            ring = self.ledger.unit_ring(unit)
            values = ring.values(self._clock.monotonic(), length_s) if ring is not None else ()
        return Buckets(values, self.ledger.rules.bucket_s)

    def evidence(self, placed: Mapping[str, Placed]) -> DiagnosisInput:
        """The evidence for diagnosis."""
        records = self.records(placed)
        subjects = [
            Subject(record.id, unknown, self._window(record, gpu))
            for record, gpu, unknown in list_standings(records, self._view_rules)
        ]
        windows = {subject.id: subject.window for subject in subjects}
        running_s = 0.0 if self._polled is None else records.monotonic - self._polled
        cases = NodeCases(records, windows, self._list_looks, running_s, len(records.gpus))
        snapshots = [gpu.snapshot for gpu in records.gpus.values() if gpu.snapshot.up]
        return DiagnosisInput(snapshots, subjects, cases.describe)

    def _list_looks(self, who: Who | None) -> tuple[HostLook, ...]:
        with self._lock:
            return self._evidence.looks(who)

    def _mean_between(self, unit: UnitId, start: float, end: float) -> float | None:
        """Mean utilization of a unit between two times, None if nothing is known of it."""
        ring = self.ledger.unit_ring(unit)
        known = [value for value in ring.values(end, end - start) if value is not None] if ring is not None else []
        return sum(known) / len(known) if known else None

    def _ended_by(self, unit: UnitTotals | None, idle_run_s: float, stale_s: float) -> tuple[str, ...]:
        """The witnesses of the unit's last activity. Empty if it is too old to have ended the last idle run."""
        rules = self.ledger.rules
        if unit is None or unit.last_active_wall is None:
            return ()
        unknown_s = max(rules.idle_run_unknown_reset_s, rules.idle_run_unknown_max_ratio * idle_run_s)
        reach_s = idle_run_s + unknown_s + stale_s
        return unit.active_by if self._clock.wall() - unit.last_active_wall <= reach_s else ()

    @staticmethod
    def _process_count(record: HolderRecord, gpu: GpuRecord, *, is_alone: bool) -> float | None:
        """The holder's contexts, None if they are not known to be its own."""
        if not is_alone:
            return record.use.processes if record.use is not None else None
        return gpu.snapshot.facts.contexts if not record.allocation.unit.mig_uuid else None

    def _own_history(self, record: HolderRecord, length_s: float) -> tuple[float | None, ...]:
        """The holder's use of its share of a unit, because working neighbours leave it no more than its share."""
        with self._lock:
            ring = self.ledger.holder_ring(record.id)
            values = ring.values(self._clock.monotonic(), length_s) if ring is not None else ()
            holders = self._sharing.count_holders(record.allocation.unit)
        return tuple(None if value is None else min(1.0, holders * value) for value in values)

    def _window(self, record: HolderRecord, gpu: GpuRecord) -> Window:
        unit, totals = record.allocation.unit, record.totals
        is_alone = not record.allocation.is_shared
        of_unit = gpu.totals.get(unit.mig_uuid)
        length_s = min(self._settings.diagnosis.window, totals.held_s)
        return Window(
            values=self.history(unit, length_s).values if is_alone else self._own_history(record, length_s),
            held_s=totals.held_s,
            idle_run_s=totals.idle_run_s,
            active_by=self._ended_by(of_unit, totals.idle_run_s or 0.0, record.stale_s) if is_alone else (),
            processes=self._process_count(record, gpu, is_alone=is_alone),
            spin=record.spin,
            hour=record.hour,
            gap=gpu.snapshot.contradiction or ("" if is_alone else self._sharing.doubts.get(unit, "")),
            lag_s=self.ledger.rules.longest_unconfirmed_s() + record.unconfirmed_s,
        )


def _incomplete(placed: Mapping[str, Placed], expected: int) -> str:
    """Why NVML may count otherwise than the schedulers. "" if every expected GPU is here."""
    down = next((each.snapshot.identity for each in placed.values() if not each.snapshot.up), None)
    if down is not None:
        return f"gpu {down.index} ({down.uuid or 'without a name'}) does not answer"
    if len(placed) < expected:
        return f"{len(placed)} of {expected} GPUs are in the driver's list"
    return ""


def _confirm(allocation: Allocation, grant: Grant, now: float, wall: float) -> ConfirmedAllocation:
    """The allocation with dates in monotonic seconds, as the ledger counts."""
    return ConfirmedAllocation(
        allocation,
        grant.confirmed,
        None if grant.start_here is None else now - (wall - grant.start_here),
        None if allocation.working_wall is None else now - (wall - allocation.working_wall),
        grant.renewed_s,
    )


def _without_processes(snapshot: DeviceSnapshot) -> DeviceSnapshot:
    """Remove the process count. Inside a container NVML returns an empty list, so 0 is not proven until a process was
    listed.
    """
    return snapshot._replace(
        samples=tuple(sample for sample in snapshot.samples if sample.family not in PROCESSES.families),
        facts=snapshot.facts._replace(compute_processes=None, graphics_processes=None),
    )
