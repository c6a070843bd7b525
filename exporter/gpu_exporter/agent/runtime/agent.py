"""The running set of one node: driver, one loop per GPU, attribution, state file, publisher."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from gpu_exporter.agent.attribution.identity import Identity
from gpu_exporter.agent.attribution.poller import Poller
from gpu_exporter.agent.attribution.source import Source
from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.collectors.contract import Collector
from gpu_exporter.agent.devices.kmsg import slot_of
from gpu_exporter.agent.devices.protocol import Backend
from gpu_exporter.agent.inventory.expected import ExpectedDevices
from gpu_exporter.agent.inventory.inventory import InventoryKeeper
from gpu_exporter.agent.inventory.pci import UNBOUND
from gpu_exporter.agent.ledger.state import StateFile, read_boot_id
from gpu_exporter.agent.node.keeping import StateKeeper
from gpu_exporter.agent.node.place import Placed, count_answering, count_expected, place
from gpu_exporter.agent.node.state import NodeState
from gpu_exporter.agent.runtime.surroundings import Host, Publishing
from gpu_exporter.agent.runtime.wiring import activity_rules, asks_slurm, flatten_counts, settle_poll
from gpu_exporter.agent.sampling.driver import Driver, DriverView, warn_of_persistence
from gpu_exporter.agent.sampling.kernel_log import KernelLogLoop
from gpu_exporter.agent.sampling.manager import SOON_S, DeviceManager
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.views import AgentStatus, View
from gpu_exporter.common.threads import start
from gpu_exporter.common.version import VERSION
from gpu_exporter.diagnosis.loop import DiagnosisLoop

log = logging.getLogger(__name__)
PATIENCE_S = 2.0  # how long one source of holders may delay the answers of the others
STOP_S = 0.5  # how long all loops together may take to end
PUBLISHING, HOST = Publishing(), Host()


class Agent:
    """Everything that runs until it is asked to stop."""

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        sources: Sequence[Source],
        clock: Clock,
        state: StateFile | None = None,
        enabled: Sequence[Collector] = registry.DEFAULT,
        publishing: Publishing = PUBLISHING,
        host: Host = HOST,
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._clock = clock
        self._state = state
        self._publishing = publishing
        processes = host.processes
        works = host.reader.works if host.reader is not None else None
        self.node = NodeState(settings, clock, state, processes, asks_slurm=asks_slurm(sources), host=works)
        self._keeper = StateKeeper(self.node, state, clock) if state is not None else None
        directory = state.path.parent if state is not None else None
        boot_id = read_boot_id()
        self._inventory = InventoryKeeper(ExpectedDevices(directory, boot_id), host.sysfs, backend.vendor, boot_id)
        self.driver = Driver(backend, clock, settings.sampling.deadline, self._expects_gpus)
        self.devices = DeviceManager(
            self.driver,
            backend,
            clock,
            self.node,
            self._inventory,
            enabled,
            activity_rules(settings, publishing.driver_period_max_s),
            settings.sampling.deadline,
        )
        self.diagnosis = DiagnosisLoop(settings, lambda: self.node.evidence(self._place(self.devices.observe())), clock)
        self._kernel_log = (
            KernelLogLoop(
                host.kmsg, self.node.xids, self._list_gpus, clock, self.node.touch, self._inventory.note_failed_probes
            )
            if host.kmsg is not None
            else None
        )
        identity = Identity(settings.identity.user, directory)
        self.poller = Poller(sources, clock, settings.attribution.keep_last, identity, PATIENCE_S)
        self._processes = processes
        self._host = host.reader
        self._first_poll = threading.Event()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Restore what the state file proves and start the threads."""
        reason = self.node.restore()
        if reason:
            log.info("counters start at 0: %s", reason)
        self.devices.start()
        if self._kernel_log is not None:
            self._kernel_log.start()
        self._spawn("attribution", self._attribute)
        self._spawn("diagnosis", lambda: self.diagnosis.run(self._stop))
        if self._host is not None:
            host = self._host
            self._spawn("host", lambda: host.run(self._stop, self.node.host_node(self.diagnosis.unwell)))
        if self._keeper is not None:
            keeper = self._keeper
            self._spawn("state", lambda: keeper.run(self._stop))

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        start(thread)
        self._threads.append(thread)

    def stop(self) -> bool:
        """Stop all threads and save the state. Returns false if a driver call hangs, because the driver is then not
        closed.
        """
        self._stop.set()
        if self._kernel_log is not None:
            self._kernel_log.ask_to_stop()
        ended = self.devices.stop(STOP_S)
        for thread in self._threads:
            thread.join(STOP_S / 2)  # no thread may change the final state
        if self._state is not None:
            try:
                self.node.write_state()
            except OSError as exc:
                log.warning("state could not be saved: %s", exc)
            self._state.release()
        return ended

    def _list_gpus(self) -> dict[str, str]:
        """UUID by PCI slot of every GPU whose name is known, lost GPUs included."""
        identities = [placed.snapshot.identity for placed in self._place(self.devices.observe()).values()]
        named = (identity for identity in identities if identity.uuid and identity.pci_bus_id)
        return {slot_of(identity.pci_bus_id): identity.uuid for identity in named}

    def _place(self, driver: DriverView) -> dict[str, Placed]:
        """The GPUs as they are shown at this moment."""
        known = self.node.known()
        return place(driver, self._inventory.value, known, self._clock.monotonic(), self._clock.wall())

    def _expects_gpus(self) -> bool:
        """Whether a driver that does not answer is a fault: this node should have a GPU."""
        inventory = self._inventory.value
        expected = count_expected(self.devices.observe(), inventory)
        return expected > 0 or any(driver == UNBOUND for driver, _ in inventory.unmanaged())

    def _attribute(self) -> None:
        # Grants are resolved against the first snapshots. If the driver hangs, attribution starts without snapshots.
        while not self._stop.is_set() and not (self.driver.is_silent or self.devices.is_ready()):
            self._clock.wait(self.devices.progress, SOON_S)  # a stop ends this wait too
            self.devices.progress.clear()
        while not self._stop.is_set():
            try:
                # the poll comes first: a process that started after the answer is judged at the next poll
                grants = self.poller.poll()
                driver = self.devices.observe()
                placed, expected = self._place(driver), count_expected(driver, self._inventory.value)
                settle_poll(self.node, self.poller, grants, placed, expected, self._processes)
            except Exception:  # an error of the exporter must not end attribution; mappings then age, which is visible
                log.exception("a poll of the attribution sources failed")
            self._first_poll.set()
            self._clock.wait(self._stop, self._settings.attribution.interval)

    def is_complete(self) -> bool:
        """True after the first complete cycle: the driver was asked, each GPU was read or hangs, attribution was
        polled.
        """
        return self._first_poll.is_set()

    def readiness(self) -> tuple[bool, str]:
        if self.is_complete():
            return True, "ready"
        return False, "first cycle is not complete yet"

    def version(self) -> tuple[int, int]:
        """Changes with every snapshot and poll, and every second, because ages grow."""
        return self.node.version(), int(self._clock.monotonic())

    def view(self) -> View:
        """The node as it is known at this moment. Changes nothing."""
        driver = self.devices.observe()
        return self.node.view(self._place(driver), self._status(driver), self.diagnosis.findings)

    def _status(self, driver: DriverView) -> AgentStatus:
        inventory = self._inventory.value
        state = self.node.state_status()
        logged = self._kernel_log.outcome if self._kernel_log else None
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
            errors=flatten_counts(self.devices.error_counts()),
            note=self._publishing.note,
            unmanaged=inventory.unmanaged(),
            outcomes=(*self.devices.outcomes(), *([logged] if logged else [])),
            warnings=(
                *warn_of_persistence(self.devices.without_persistence()),
                *self.poller.warnings(),
                *([self._keeper.warn(state.error)] if self._keeper and state and state.error else []),
            ),
            state=state,
            driver_missed=self.driver.is_missed,
        )
