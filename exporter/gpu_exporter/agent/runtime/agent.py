"""Runs all parts of one node: driver, one loop for each GPU, the sources of holders, diagnosis, state file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from gpu_exporter.agent.attribution.source import Source
from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.collectors.contract import Collector
from gpu_exporter.agent.devices.kmsg import slot_of
from gpu_exporter.agent.devices.protocol import Backend
from gpu_exporter.agent.inventory.pci import UNBOUND
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.agent.node.keeping import StateKeeper
from gpu_exporter.agent.node.place import count_expected
from gpu_exporter.agent.runtime.runtime import HOST, PUBLISHING, Runtime
from gpu_exporter.agent.runtime.surroundings import Host, Publishing
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.driver import Driver
from gpu_exporter.agent.sampling.kernel_log import KernelLogLoop
from gpu_exporter.agent.sampling.manager import SOON_S, DeviceManager
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.views import View
from gpu_exporter.common.tasks import Task
from gpu_exporter.common.threads import start

log = logging.getLogger(__name__)
PATIENCE_S = 2.0  # how long one source of holders may delay the answers of the others
LATE_S = 60.0  # a poll of the sources that takes longer than this plus three intervals is reported
STOP_S = 0.5  # how long all loops together may take to end


class Agent:
    """Runs all parts of one node until it is asked to stop."""

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
        self._clock = clock
        self._state = state
        self._runtime = Runtime(settings, backend, sources, clock, state, publishing, host, patience_s=PATIENCE_S)
        self.node, inventory = self._runtime.node, self._runtime.inventory
        self._keeper = StateKeeper(self.node, state, clock) if state is not None else None
        self.driver = Driver(backend, clock, settings.sampling.deadline, self._expects_gpus)
        self.devices = self._runtime.devices = DeviceManager(
            self.driver,
            backend,
            clock,
            self.node,
            inventory,
            enabled,
            activity_rules(settings, publishing.driver_period_max_s),
            settings.sampling.deadline,
        )
        self._kernel_log = (
            KernelLogLoop(
                host.kmsg, self.node.xids, self._list_gpus, clock, self.node.touch, inventory.note_failed_probes
            )
            if host.kmsg is not None
            else None
        )
        self._host = host.reader
        self._polling = Task("attribution", LATE_S + 3 * settings.attribution.interval)
        self.tasks = self._runtime.tasks
        self.tasks.add(*self.devices.tasks, self._polling, self._runtime.diagnosis.loop.task)
        self.tasks.add(*(self._host.tasks if self._host is not None else ()))
        self.tasks.add(*(each.task for each in (self._keeper, self._kernel_log) if each is not None))
        self._first_poll = threading.Event()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Restores the counters from the state file, and starts the threads."""
        reason = self.node.restore()
        if reason:
            log.info("counters start at 0: %s", reason)
        self.devices.start()
        if self._kernel_log is not None:
            self._kernel_log.start()
        diagnosis = self._runtime.diagnosis
        self._spawn("attribution", self._attribute)
        self._spawn("diagnosis", lambda: diagnosis.loop.run(self._stop))
        if self._host is not None:
            host = self._host
            self._spawn("host", lambda: host.run(self._stop, diagnosis.host_node()))
        if self._keeper is not None:
            keeper = self._keeper
            self._spawn("state", lambda: keeper.run(self._stop))

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        start(thread)
        self._threads.append(thread)

    def stop(self) -> None:
        """Stops all threads and saves the state. Does not close the driver if a driver call hangs."""
        self._stop.set()
        if self._kernel_log is not None:
            self._kernel_log.ask_to_stop()
        self.devices.stop(STOP_S)
        for thread in self._threads:
            thread.join(STOP_S / 2)  # no thread may change the final state
        if self._state is not None and self._keeper is not None:
            self._keeper.write_records(at_once=True)
            try:
                self.node.write_state()
            except OSError as exc:
                log.warning("cannot save the counters: %s; after a restart they continue from the last save", exc)
            self._state.release()

    def _list_gpus(self) -> dict[str, str]:
        """Returns the UUIDs of all known GPUs by PCI slot, including lost GPUs."""
        placed = self._runtime.place(self.devices.observe())
        identities = [each.snapshot.identity for each in placed.values()]
        named = (identity for identity in identities if identity.uuid and identity.pci_bus_id)
        return {slot_of(identity.pci_bus_id): identity.uuid for identity in named}

    def _expects_gpus(self) -> bool:
        """Returns whether this node should have a GPU. If so, a driver that does not answer is a fault."""
        inventory = self._runtime.inventory.value
        expected = count_expected(self.devices.observe(), inventory)
        return expected > 0 or any(driver == UNBOUND for driver, _ in inventory.unmanaged())

    def _attribute(self) -> None:
        # Grants are resolved against the first snapshots. If the driver hangs, attribution starts without snapshots.
        while not self._stop.is_set():
            with self._polling:
                if self.driver.is_silent or self.devices.is_ready():
                    break
            self._clock.wait(self.devices.progress, SOON_S)  # a stop ends this wait too
            self.devices.progress.clear()
        while not self._stop.is_set():
            with self._polling:
                # The poll comes first: a process that started after the answer is judged at the next poll.
                self._runtime.settle(self._runtime.poller.poll())
            self._first_poll.set()
            self._clock.wait(self._stop, self._settings.attribution.interval)

    def is_complete(self) -> bool:
        """Returns whether the first cycle is complete: driver queried, each GPU read or hung, each source polled."""
        return self._first_poll.is_set()

    def readiness(self) -> tuple[bool, str]:
        if self.is_complete():
            return True, "ready"
        return False, "first cycle is not complete yet"

    def version(self) -> tuple[int, int]:
        """Returns a value that changes with every snapshot and poll, and every second, as ages in the view grow."""
        return self.node.version(), int(self._clock.monotonic())

    def view(self) -> View:
        """Returns the present state of the node. Changes nothing."""
        if self._kernel_log is None:
            return self._runtime.view()
        logged = self._kernel_log.outcome
        return self._runtime.view([logged] if logged else (), self._kernel_log.switches.counts())
