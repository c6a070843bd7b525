"""Manages the GPUs of this node: keeps the driver open, and runs one loop for each GPU and one for events.

The manager continues during every fault: no driver yet, a GPU that is lost or hangs, a GPU that left the list or was
given to a virtual machine, a driver that was released on request or replaced while in use.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from gpu_exporter.agent.collectors.contract import Collector, Totals
from gpu_exporter.agent.collectors.xid import XID
from gpu_exporter.agent.devices.errors import NOT_UNIQUE, DeviceError
from gpu_exporter.agent.devices.protocol import Backend, Device, EventWatch
from gpu_exporter.agent.sampling.activity.witnesses import ActivityRules
from gpu_exporter.agent.sampling.driver import ALL_DENIED, Driver, DriverState, DriverView, Position
from gpu_exporter.agent.sampling.events import LATE_S, EventLoop, NoGpuAnswers, XidBook
from gpu_exporter.agent.sampling.loop import DeviceLoop, LoopEvents
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.agent.sampling.worker import Worker
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.readings import CollectorOutcome, DeviceSnapshot
from gpu_exporter.common.model.units import DeviceIdentity
from gpu_exporter.common.tasks import Task
from gpu_exporter.common.threads import NoThread, start

log = logging.getLogger(__name__)
SOON_S = 0.1
CHECK_S = 5.0  # how often to check for an absent driver, new GPUs and the bus
RELEASE_S = 1.5  # how long all loops together may take to end, so that the driver is free within two seconds
STILL_HANGS = "a driver call that began before the release still hangs"
EVENTS_END_S = 0.4  # a little longer than the events' loop waits inside one driver call


class SnapshotSink(Protocol):
    """Receives the readings. A Protocol, because the package `node`, which implements it, imports this one."""

    xids: XidBook

    def on_snapshot(self, snapshot: DeviceSnapshot) -> None:
        """Takes the results of one cycle of one GPU."""

    def is_shared(self, uuid: str) -> bool:
        """Returns whether several holders may share this GPU, so that the use of each process must be read."""

    def rest_w(self, uuid: str) -> float | None:
        """Returns the GPU's power at rest in watts, as an earlier process measured it; None if unknown."""

    def touch(self) -> None:
        """Records that published data about the GPUs has changed."""


class DeviceInventory(Protocol):
    """The interface to the expected GPUs and the PCI bus. A Protocol, so that sampling does not import `inventory`."""

    def look(self) -> None:
        """Reads the list of expected GPUs and the bus again."""

    def look_at_bus(self) -> None:
        """Reads the bus again."""

    def note(self, up: Iterable[DeviceIdentity], now: float, links: Mapping[str, int]) -> None:
        """Records that these GPUs answer at `now` (monotonic seconds). Raises OSError if the list cannot be saved.

        `links`: by UUID, the number of NVLinks that are up.
        """

    def has_twin(self, uuid: str) -> bool:
        """Returns whether several GPUs have reported this UUID here."""

    def remember(self, uuid: str) -> None:
        """Records that this GPU answers, even if an administrator had removed it from the list."""


class DeviceManager:
    """Manages all GPUs of this node. Any thread may call `stop`, `release` and `take`."""

    def __init__(
        self,
        driver: Driver,
        backend: Backend,
        clock: Clock,
        sink: SnapshotSink,
        inventory: DeviceInventory,
        enabled: Sequence[Collector],
        rules: ActivityRules,
        deadline_s: float,
    ) -> None:
        """`deadline_s`: seconds after which a cycle counts as hanging, and the GPU's values are not shown."""
        # The exporter publishes a hang of the first two as the state of the driver or of a GPU.
        self._watching, self._sampling, self._listening = Task("driver"), Task("gpu"), Task("events", LATE_S)
        self.tasks = (self._watching, self._sampling, self._listening)
        self.progress = threading.Event()  # the driver was asked, or a GPU was read, for the first time
        self._driver = driver
        self._backend = backend
        self._clock = clock
        self._sink = sink
        self._inventory = inventory
        self._enabled = enabled
        self._rules = rules
        self._deadline_s = deadline_s
        self._loops: dict[int, DeviceLoop] = {}
        self._stuck: list[Worker] = []  # workers that should stop but hang in a driver call; they keep the driver open
        self._stuck_at: dict[int, DeviceLoop] = {}
        self._totals: dict[str, Totals] = {}  # of each GPU, over all its loops
        self._counts: Counter[tuple[str, str]] = Counter()  # of loops that have ended
        self._events: EventLoop | None = None
        self._events_for: frozenset[tuple[str, int]] = frozenset()
        self._bus_seen = -math.inf
        self._warned: set[str] = set()
        self._persistence: dict[str, bool] = {}
        self._found: dict[int, tuple[str, bool]] = {}  # by position, the driver's UUID, and whether others have it too
        self._twins: set[str] = set()  # UUIDs that several GPUs report
        self._finding = threading.Lock()
        self._lock = threading.RLock()  # held while opening, closing, starting and stopping; never while sampling
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._settled = False

    def start(self) -> None:
        start(threading.Thread(target=self._watch_over, name="driver", daemon=True))

    def stop(self, timeout_s: float) -> bool:
        """Ends every loop and closes the driver. Returns False if a call hangs; the driver then remains open."""
        self._stop.set()
        self._wake.set()
        self.progress.set()
        return self._close(timeout_s)

    def release(self) -> bool:
        """Closes the driver until `take`, e.g. to unload it or to switch MIG. Returns False if a call hangs."""
        begin = time.monotonic()
        self._driver.release()
        clean = self._close(RELEASE_S)
        if clean:
            log.info("the exporter has released the driver; this took %.1f s", time.monotonic() - begin)
        else:
            log.error(
                "the exporter has not released the driver yet, because a call to the driver hangs. It releases the "
                "driver when the call ends"
            )
        return clean

    def take(self) -> None:
        """Opens the driver again after `release`."""
        self._driver.take()
        self._wake.set()

    def _close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s  # not of `clock`, because threads end in real time
        if not self._lock.acquire(timeout=timeout_s):
            return False  # the driver hangs during a query; the thread of the query ends all workers afterwards
        try:
            return self._end_all(deadline)
        finally:
            self._lock.release()

    def _end_all(self, deadline: float) -> bool:
        """Ends every thread, and closes the driver unless a thread hangs in it. Returns whether it is closed."""
        workers: list[Worker] = [*self._loops.values(), *([self._events] if self._events is not None else [])]
        for worker in workers:
            worker.ask_to_stop()
        self._stuck += [worker for worker in workers if not worker.join(deadline - time.monotonic())]
        loops, self._loops = self._loops, {}
        self._found.clear()
        self._events, self._events_for = None, frozenset()
        for position, loop in loops.items():
            if loop.sampler is not None:
                self._counts.update(dict(loop.sampler.error_counts))
            if loop in self._stuck:
                self._stuck_at[position] = loop
        self._sink.touch()
        self._drop_ended()
        if self._stuck:
            return False
        self._driver.close()
        return True

    def _drop_ended(self) -> None:
        """Forgets threads that have returned from a hanging driver call. They no longer prevent closing the driver."""
        self._stuck = [worker for worker in self._stuck if not worker.join(0.0)]
        self._stuck_at = {position: loop for position, loop in self._stuck_at.items() if loop in self._stuck}

    def _watch_over(self) -> None:
        while not self._stop.is_set() and not self._driver.replaced.is_set():
            with self._watching:
                try:
                    self._look()
                except NoThread as exc:
                    self._warn_once(f"the exporter does not watch a GPU or its XIDs: {exc}")
            self._driver.asked.set()
            self.progress.set()
            # The first GPUs are found within milliseconds: check for them soon, then every CHECK_S.
            is_open = self._driver.state is DriverState.OPEN
            settled = not is_open or (self._settled and self.first_cycles_done())
            self._clock.wait(self._wake, CHECK_S if settled else SOON_S)
            self._wake.clear()
            self._settled = self.first_cycles_done()

    def _look(self) -> None:
        """Opens the driver if it is closed, starts loops for new GPUs, and updates the list of expected GPUs."""
        self._inventory.look()
        self._bus_seen = self._clock.monotonic()
        with self._lock:
            count = None if self._stop.is_set() else self._driver.ask()
            if self._driver.is_released or self._stop.is_set():  # this may have been requested during the query
                self._end_all(time.monotonic() + RELEASE_S)
            else:
                if count is not None:
                    self._start_loops(count)
                self._note_answering()
                self._listen()
        self._sink.touch()

    def _start_loops(self, count: int) -> None:
        self._drop_ended()
        for position in range(count):
            if position not in self._loops and position not in self._stuck_at:
                self._start_loop(position)

    def _start_loop(self, position: int) -> None:
        loop = DeviceLoop(
            position,
            self._find,
            self._make_sampler,
            self._clock,
            self._rules.interval_s,
            self._deadline_s,
            LoopEvents(self._deliver, self._driver.note_replaced, self.progress.set),
            self._sampling,
        )
        # Listed before it starts: its thread, or a twin's, may look for it here at once.
        self._loops[position] = loop
        try:
            loop.start()
        except NoThread:
            del self._loops[position]
            raise

    def _find(self, position: int) -> Device:
        """Finds the device at a position, in its own thread. If other GPUs report the same UUID, all get other names.

        The list of expected GPUs keeps the name, so that a GPU whose twin is lost keeps its hours after a restart.
        """
        device = self._backend.find(position)
        uuid = device.identity.uuid
        with self._finding:
            others = {each for each, (found, _) in self._found.items() if found == uuid} - {position}
            is_twin = bool(others) or self._inventory.has_twin(uuid)
            self._found[position] = uuid, is_twin
            if not is_twin:
                return device
            for other in others:
                if not self._found[other][1] and other in self._loops:
                    self._loops[other].find_again()
            if uuid not in self._twins:
                self._twins.add(uuid)
                self._counts["nvmlDeviceGetUUID", NOT_UNIQUE] += 1
                log.warning(
                    "gpu %d: several GPUs of this host have reported the UUID %s, so their names contain the PCI "
                    "address too, and their holders are unknown",
                    position,
                    uuid,
                )
        device.identity = device.identity.told_apart
        return device

    def _make_sampler(self, device: Device) -> DeviceSampler:
        """Creates the sampler of a device. Runs in the device's own thread."""
        identity = device.identity
        try:
            self._persistence[identity.uuid] = device.read_persistence_mode()
        except DeviceError:
            self._persistence.pop(identity.uuid, None)
        totals = self._totals.setdefault(identity.uuid, Totals())
        totals.forget_last()
        rest_w = self._sink.rest_w(identity.uuid)
        return DeviceSampler(device, self._enabled, self._clock, self._rules, totals, self._sink.is_shared, rest_w)

    def _deliver(self, snapshot: DeviceSnapshot) -> None:
        """Delivers a snapshot. If the GPU is down, checks the PCI bus first: a GPU that was given away is not lost."""
        if snapshot.up:
            self._inventory.remember(snapshot.identity.uuid)
        elif self._clock.monotonic() - self._bus_seen > 1.0:
            self._bus_seen = self._clock.monotonic()
            self._inventory.look_at_bus()
        self._sink.on_snapshot(snapshot)

    def _devices(self) -> list[tuple[Device, int]]:
        """Returns the devices that answer, and how many times each was found again after a loss."""
        return [
            (loop.sampler.device, loop.renewals)
            for loop in list(self._loops.values())
            if loop.sampler is not None and not loop.is_hung() and loop.latest is not None and loop.latest.up
        ]

    def _listen(self) -> None:
        """Registers for events when GPUs are found. Registers again for a GPU that is new or was found again.

        A lost GPU causes no new registration, because its last XIDs may still arrive.
        """
        if XID not in self._enabled:
            return
        wanted = frozenset((device.identity.uuid, renewals) for device, renewals in self._devices())
        if wanted <= self._events_for:
            return
        if self._events is not None:
            self._events.ask_to_stop()
            if not self._events.join(EVENTS_END_S):
                self._stuck.append(self._events)
            self._events = None
        self._drop_ended()
        if any(isinstance(worker, EventLoop) for worker in self._stuck):
            return  # the old events' loop hangs in the driver, and a new loop would hang too
        events = EventLoop(self._open_watch, self._sink.xids, self._clock, self._sink.touch, self._listening)
        events.start()
        self._events_for = wanted
        self._events = events

    def _open_watch(self) -> EventWatch:
        """Registers for events. Runs in the event thread, which may call it again."""
        found = self._devices()
        if not found:
            raise NoGpuAnswers
        self._events_for = frozenset((device.identity.uuid, renewals) for device, renewals in found)
        return self._backend.watch_events([device for device, _ in found])

    def _note_answering(self) -> None:
        """Adds the GPUs that answer to the list of expected GPUs."""
        if not self.first_cycles_done():
            return
        latest = [loop.latest for loop in self._loops.values()]
        try:
            up = [snapshot for snapshot in latest if snapshot is not None and snapshot.up]
            links = {each.identity.uuid: int(each.facts.nvlinks or 0) for each in up}
            self._inventory.note([each.identity for each in up], self._clock.monotonic(), links)
        except OSError as exc:
            self._warn_once(f"the list of expected GPUs is not saved: {exc}")

    def observe(self) -> DriverView:
        """Returns the results of the driver so far. Changes nothing."""
        loops = list(self._loops.items())
        positions = {position: _observe(loop) for position, loop in loops}
        positions |= {position: Position(error=STILL_HANGS) for position in list(self._stuck_at)}
        complete = self.is_ready() or (self._driver.is_silent and not loops)
        return DriverView(positions, self.error(), complete, self._driver.is_released)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)

    def first_cycles_done(self) -> bool:
        """Returns whether each GPU was read or hangs."""
        return all(loop.attempted or loop.is_hung() for loop in list(self._loops.values()))

    def is_ready(self) -> bool:
        """Returns whether the driver was queried, and each GPU was read or hangs."""
        return self._driver.asked.is_set() and self.first_cycles_done()

    def error(self) -> str:
        """Returns why there is no GPU data, "" while there is data."""
        hung = [loop.is_hung() for loop in list(self._loops.values())]
        if hung and all(hung) and not self._driver.is_silent:
            return "every GPU's driver call hangs"
        return self._driver.error or (ALL_DENIED if self._is_denied() else "")

    def _is_denied(self) -> bool:
        """Returns whether the driver lists GPUs, and this process may use none of them."""
        loops = list(self._loops.values())
        return bool(loops) and all(loop.is_denied for loop in loops)

    def sample_interval_s(self) -> float:
        """Returns the longest present interval between two cycles of a GPU, in seconds."""
        return max((loop.interval_s for loop in list(self._loops.values())), default=self._rules.interval_s)

    def outcomes(self) -> tuple[CollectorOutcome, ...]:
        events = self._events
        return (events.outcome,) if events is not None and events.outcome is not None else ()

    def is_missed(self) -> bool:
        """Returns whether the driver should answer but does not (AgentStatus.driver_missed)."""
        return self._driver.is_missed or self._is_denied()

    def without_persistence(self) -> int:
        return sum(not on for on in list(self._persistence.values()))

    def error_counts(self) -> Counter[tuple[str, str]]:
        counts = Counter(self._counts)
        for loop in list(self._loops.values()):
            if loop.sampler is not None:
                counts.update(dict(loop.sampler.error_counts))  # a copy: the loop continues to count
        return counts


def _observe(loop: DeviceLoop) -> Position:
    if loop.sampler is None:
        return Position(hung=loop.is_hung(), error=loop.find_error, denied=loop.is_denied)
    snapshot = loop.latest
    identity = snapshot.identity if snapshot is not None else loop.sampler.device.identity
    return Position(identity, snapshot, loop.is_hung())
