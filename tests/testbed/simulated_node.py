"""A simulated node without threads: sampled, polled and judged in turn on a manual clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gpu_exporter.agent.attribution.poller import Poller
from gpu_exporter.agent.attribution.processes import Owners, ProcessOwners, UnitOwners
from gpu_exporter.agent.attribution.source import Source
from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.devices.protocol import Backend
from gpu_exporter.agent.devices.scenario import Scenario
from gpu_exporter.agent.inventory.inventory import Inventory
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.agent.node.place import Placed, count_answering, count_expected, place
from gpu_exporter.agent.node.state import NodeState
from gpu_exporter.agent.node.view import build_view
from gpu_exporter.agent.runtime.simulation import build_simulation
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.driver import DriverView, Position
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.cgroup import ProcessOwner
from gpu_exporter.common.clock import Clock, ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.holders import Grant, Use
from gpu_exporter.common.model.readings import DeviceSnapshot
from gpu_exporter.common.model.records import NodeRecords
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.model.views import AgentStatus, View
from gpu_exporter.diagnosis.interface import HostWorks, NodeDiagnosis, Standings


class SimulatedNode:
    """`hung`: UUIDs of GPUs whose calls hang. `owners`: owners of the processes that are seen on each unit."""

    def __init__(
        self,
        scenario: Scenario,
        settings: Settings | None = None,
        state: StateFile | None = None,
        sample_period_s: float = 0.2,
        driver_period_max_s: float = 1.0,
        processes: ProcessOwners | None = None,
        *,
        asks_slurm: bool = False,
        host: HostWorks | None = None,
        make_source: Callable[[Clock], Source] | None = None,
        backend: Backend | None = None,
        clock: ManualClock | None = None,
    ) -> None:
        """`make_source`: creates the source of holders, if it is not the scenario. `backend`: has other GPUs. `clock`: by
        default its own.
        """
        self.clock = clock or ManualClock()
        self.sample_period_s = sample_period_s
        self.settings = settings or Settings()
        self._backend: Backend
        self._backend, self._source, self.host = build_simulation(scenario, self.clock, sample_period_s)
        self._backend = backend or self._backend
        if make_source is not None:
            self._source = make_source(self.clock)
        self._make_state = partial(NodeState, self.settings, self.clock, processes=processes, asks_slurm=asks_slurm)
        self._works = host
        self._rules = activity_rules(self.settings, driver_period_max_s)
        self.hung: set[str] = set()
        self.owners: Mapping[UnitId, Sequence[ProcessOwner]] = {}  # each owns one process with a GiB of memory
        self.inventory = Inventory()
        self.offers: list[Grant] | None = None  # devices that a scheduler may allocate
        self._elapsed = 0.0
        self._begin(state)

    def _begin(self, state: StateFile | None) -> None:
        """Create the exporter's state from only its state file."""
        self.state = self._make_state(state)
        self.poller = Poller([self._source], self.clock, self.settings.attribution.keep_last)
        self.readings: dict[int, DeviceSnapshot] = {}
        self.diagnosis = NodeDiagnosis(self.settings, self.clock, self.state, self._gather, self._works)
        self.samplers = self._make_samplers()

    def _make_samplers(self) -> list[DeviceSampler]:
        devices = [self._backend.find(i) for i in range(self._backend.count())]
        return [
            DeviceSampler(
                device,
                registry.DEFAULT,
                self.clock,
                self._rules,
                is_shared=self.state.is_shared,
                rest_w=self.state.rest_w(device.identity.uuid),
            )
            for device in devices
        ]

    def restart(self, away_s: float, state: StateFile | None = None) -> None:
        """Kill the exporter and start it again after `away_s`: only the state file remains."""
        self.clock.advance(away_s)
        self._begin(state)
        reason = self.state.restore()
        self.samplers = self._make_samplers()
        assert state is None or not reason, reason

    def run(self, seconds: float, *, sample: bool = True) -> View:
        """Let time pass, in steps of one sampling interval."""
        interval = self.settings.sampling.interval
        for _ in range(round(seconds / interval)):
            self.clock.advance(interval)
            self._elapsed += interval
            if sample:
                self.sample()
            if self._is_due(self.settings.attribution.interval):
                self.poll()
            if self._is_due(self.settings.diagnosis.interval):
                self.host.look(self.diagnosis.host_node())
                self.diagnosis.loop.judge()
        return self.view()

    def poll(self) -> None:
        """Query the source once."""
        grants, owners = self.poller.poll(), self._seen_owners()
        ended = self.poller.take_ended()
        reported = self.poller.reported()
        resolution = self.state.on_poll(
            grants, self.placed(), owners, offers=self.offers, ended=ended, reported=reported
        )
        self.diagnosis.keep(allocation for allocation, _ in resolution.allocations)
        self.poller.note_resolution(resolution.conflicts, resolution.unresolved, resolution.doubted, resolution.missed)

    def _seen_owners(self) -> Owners:
        return {
            unit: UnitOwners({owner: Use(1, 2**30) for owner in several}, is_complete=True)
            for unit, several in self.owners.items()
        }

    def sample(self) -> None:
        """Read each GPU once."""
        for position, sampler in enumerate(self.samplers):
            self.readings[position] = sampler.sample()
            self.state.on_snapshot(self.readings[position])

    def placed(self) -> dict[str, Placed]:
        """The GPUs as the exporter shows them."""
        known = self.state.known()
        return place(self._driver(), self.inventory, known, self.clock.monotonic(), self.clock.wall())

    def _driver(self) -> DriverView:
        return DriverView(
            {
                position: Position(reading.identity, reading, reading.identity.uuid in self.hung)
                for position, reading in self.readings.items()
            }
        )

    def _is_due(self, every_s: float) -> bool:
        return self._elapsed % max(every_s, self.settings.sampling.interval) == 0

    def view(self) -> View:
        status = AgentStatus(
            version="TEST",
            backend="simulated",
            driver_up=True,
            driver_error="",
            devices_visible=count_answering(self._driver()),
            devices_expected=count_expected(self._driver(), self.inventory),
            sample_interval_s=self.settings.sampling.interval,
            last_sample_wall=self.state.last_sample_wall(),
            sources=self.poller.statuses(),
            attribution_known=self.poller.is_known() and self.state.is_resolved(),
            note="Simulated GPUs.",
        )
        return build_view(self.records(), status, self.diagnosis.loop.findings, self.state.view_rules)

    def records(self) -> NodeRecords:
        """The node at this moment, with what its holders do beside their GPUs."""
        return self.diagnosis.complete(self.state.records(self.placed()))

    def _gather(self) -> Standings:
        return self.state.standings(self.records())

    def unit(self, index: int, mig_uuid: str = "") -> UnitId:
        return UnitId(self.samplers[index].device.identity.uuid, mig_uuid)
