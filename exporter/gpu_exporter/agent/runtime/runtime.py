"""Connects the parts of one node: polls, judgement, status, view. Used by the daemon and by `--once`."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from gpu_exporter.agent.attribution.identity import Identity
from gpu_exporter.agent.attribution.poller import Poller
from gpu_exporter.agent.attribution.source import Source
from gpu_exporter.agent.devices.errors import DriverUnavailable
from gpu_exporter.agent.devices.protocol import Backend
from gpu_exporter.agent.exposition.health import list_counts
from gpu_exporter.agent.inventory.expected import ExpectedDevices
from gpu_exporter.agent.inventory.inventory import InventoryKeeper
from gpu_exporter.agent.ledger.state import StateFile, read_boot_id
from gpu_exporter.agent.node.keeping import describe_unwritten
from gpu_exporter.agent.node.place import Placed, count_answering, count_expected, place
from gpu_exporter.agent.node.state import NodeState
from gpu_exporter.agent.node.view import build_view
from gpu_exporter.agent.runtime.surroundings import Host, Publishing
from gpu_exporter.agent.sampling.driver import DriverView, warn_of_persistence
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.holders import Grant
from gpu_exporter.common.model.readings import CollectorOutcome, SxidCount
from gpu_exporter.common.model.views import AgentStatus, View
from gpu_exporter.common.tasks import Tasks
from gpu_exporter.common.threads import start
from gpu_exporter.common.version import VERSION
from gpu_exporter.diagnosis.interface import NodeDiagnosis, Standings

if TYPE_CHECKING:
    from gpu_exporter.agent.sampling.reader import Readers

PUBLISHING, HOST = Publishing(), Host()


class ReadDevices(Protocol):
    """The interface to the GPUs: DeviceManager reads each in a loop, Readers reads each once."""

    def observe(self) -> DriverView:
        """Returns the results of the driver so far."""

    def is_missed(self) -> bool:
        """Returns whether the driver should answer but does not (AgentStatus.driver_missed)."""

    def sample_interval_s(self) -> float:
        """Returns the longest present interval between two readings of a GPU, in seconds."""

    def error_counts(self) -> Counter[tuple[str, str]]:
        """Returns the number of failed calls, by call and error."""

    def outcomes(self) -> tuple[CollectorOutcome, ...]:
        """Returns the outcomes of collectors that work outside the device cycles."""

    def without_persistence(self) -> int:
        """Returns the number of GPUs with persistence mode off."""


class Runtime:
    """The parts of one node. Starts no thread, except for the one poll of `run_once`."""

    devices: ReadDevices

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        sources: Sequence[Source],
        clock: Clock,
        state: StateFile | None = None,
        publishing: Publishing = PUBLISHING,
        host: Host = HOST,
        patience_s: float | None = None,
    ) -> None:
        """`patience_s`: how long a poll waits for answers. None: until each source has answered or failed."""
        self._settings, self._backend, self._clock, self._state = settings, backend, clock, state
        self._publishing, self._host = publishing, host
        self.tasks = Tasks()  # of the daemon; one reading has none
        self.node = NodeState(
            settings, clock, state, host.processes, asks_slurm=any(s.name == "slurm" for s in sources)
        )
        tenants = self.node.ledger.tenants
        tenants.first_s = max(tenants.first_s, 2 * publishing.interval_s)  # two textfiles then contain the 0
        directory = state.path.parent if state is not None else host.directory
        boot_id = read_boot_id()
        self.inventory = InventoryKeeper(ExpectedDevices(directory, boot_id), host.sysfs, backend.vendor, boot_id)
        identity = Identity(settings.identity.user, directory)
        self.poller = Poller(sources, clock, settings.attribution.keep_last, identity, patience_s)
        works = host.reader.works if host.reader is not None else None
        self.diagnosis = NodeDiagnosis(settings, clock, self.node, self._gather, works)

    def place(self, driver: DriverView) -> dict[str, Placed]:
        """Returns the GPUs as they are shown at this moment, by the keys of node/place.py."""
        known = self.node.known()
        return place(driver, self.inventory.value, known, self._clock.monotonic(), self._clock.wall())

    def settle(self, grants: Sequence[Grant]) -> None:
        """Updates the holders after a poll of the sources, and reports the result for each grant to the poller."""
        driver, processes = self.devices.observe(), self._host.processes
        placed, expected = self.place(driver), count_expected(driver, self.inventory.value)
        owners = processes.read([each.snapshot for each in placed.values()]) if processes is not None else None
        resolution = self.node.on_poll(
            grants,
            placed,
            owners,
            expected,
            is_complete=self.poller.has_all(),
            asked=self.poller.asked(),
            offers=self.poller.offers(),
            ended=self.poller.take_ended(),
            reported=self.poller.reported(),
        )
        self.diagnosis.keep(allocation for allocation, _ in resolution.allocations)
        self.poller.note_resolution(resolution.conflicts, resolution.unresolved, resolution.doubted, resolution.missed)

    def _gather(self) -> Standings:
        records = self.diagnosis.complete(self.node.records(self.place(self.devices.observe())))
        return self.node.standings(records)

    def view(self, outcomes: Iterable[CollectorOutcome] = (), sxids: tuple[SxidCount, ...] = ()) -> View:
        """Returns the view of this moment. Changes nothing.

        `outcomes`: results of collectors that do not read a GPU. `sxids`: errors of NVSwitches.
        """
        driver = self.devices.observe()
        records = self.diagnosis.complete(self.node.records(self.place(driver)))
        status = self._status(driver, outcomes)._replace(sxids=sxids)
        return build_view(records, status, self.diagnosis.loop.findings, self.node.view_rules)

    def _status(self, driver: DriverView, outcomes: Iterable[CollectorOutcome]) -> AgentStatus:
        inventory, state, writes = self.inventory.value, self._state, self.node.writes
        unwritten = [describe_unwritten(state.path, writes.error)] if state and writes and writes.error else []
        return AgentStatus(
            version=VERSION,
            backend=self._backend.name,
            driver_up=not driver.error,
            driver_error=driver.error,
            devices_visible=count_answering(driver),
            devices_expected=count_expected(driver, inventory),
            sample_interval_s=max(self.devices.sample_interval_s(), self._publishing.interval_s),
            last_sample_wall=self.node.last_sample_wall(),
            sources=self.poller.statuses(),
            attribution_known=self.poller.is_known() and self.node.is_resolved(),
            errors=tuple((call, error, count) for (call, error), count in sorted(self.devices.error_counts().items())),
            note=self._publishing.note,
            unmanaged=inventory.unmanaged(),
            outcomes=(*self.devices.outcomes(), *outcomes),
            warnings=(
                *warn_of_persistence(self.devices.without_persistence()),
                *self.poller.warnings(),
                *unwritten,
                *self.tasks.list_late(),
            ),
            state=writes,
            driver_missed=self.devices.is_missed(),
            driver_released=driver.released,
            counted=self.poller.counted(),
            task_failures=tuple(sorted(self.tasks.failures().items())),
        )

    def run_once(self, reading: Readers) -> View:
        """Returns one view of the GPUs and sources that answer in time; empty on a node without GPUs.

        Before the call, the driver must have opened or failed. Raises DriverUnavailable if a GPU is expected.
        """
        self.devices = reading
        asking = threading.Thread(target=self.poller.poll, name="attribution", daemon=True)
        start(asking)
        self.inventory.look()
        if reading.fault is not None:
            asking.join(max(0.0, reading.deadline - self._clock.monotonic()))  # a scheduler may count GPUs here
            status = self._status(reading.observe(), ())
            view = View(self._clock.wall(), status._replace(sources=(), attribution_known=False), (), ())
            if status.expects_gpus:
                raise DriverUnavailable("; ".join((str(reading.fault), *list_counts(view)))) from reading.fault
            return view
        is_complete = reading.wait(self.inventory.has_twin)
        for snapshot in reading.snapshots():
            self.node.on_snapshot(snapshot)
        # While a source is slow, the reading becomes old. It is the only one, so it is no sign of a GPU that is silent.
        self.node.view_rules = self.node.view_rules._replace(withhold_s=math.inf)
        asking.join(max(0.0, reading.deadline - self._clock.monotonic()))
        self.settle(self.poller.grants())  # the status names a source that has not answered yet
        self.diagnosis.loop.judge()
        with contextlib.suppress(OSError):  # counted, and a warning in the view
            self.node.write_state()
        view = self.view()
        if is_complete:
            self._backend.close()
        return view
