"""The GPUs of this node: opens the driver, runs one loop for each, and knows which should be there.

Everything here outlives faults: no driver yet, a GPU that is lost or hangs, one that left the list, one that was given
to a virtual machine, the driver released on request, the driver replaced under us.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence

from gpu_exporter.app.wiring import activity_rules, persistence_warning
from gpu_exporter.clock import Clock
from gpu_exporter.collectors import Collector, Totals
from gpu_exporter.collectors.xid import XID
from gpu_exporter.defaults import Settings
from gpu_exporter.devices.errors import DeviceError, DriverUnavailable
from gpu_exporter.devices.protocol import Backend, Device, EventWatch
from gpu_exporter.inventory.inventory import InventoryKeeper
from gpu_exporter.inventory.pci import UNBOUND
from gpu_exporter.model import CollectorOutcome, DeviceSnapshot
from gpu_exporter.node.place import RELEASED, DriverView, Position, count_expected
from gpu_exporter.node.state import NodeState
from gpu_exporter.sampling.events import EventLoop
from gpu_exporter.sampling.loop import DeviceLoop
from gpu_exporter.sampling.sampler import DeviceSampler
from gpu_exporter.sampling.worker import Worker
from gpu_exporter.threads import NoThread, start

log = logging.getLogger(__name__)
SOON_S = 0.1
CHECK_S = 5.0  # how often an absent driver, new GPUs and the bus are looked for
RELEASE_S = 1.5  # how long all loops together may take to end, so that the driver is free within two seconds
STILL_HANGS = "a call from before the driver was released still hangs in it"
EVENTS_END_S = 0.4  # a little longer than it stays inside one driver call


class Fleet:
    """All GPUs. `stop`, `release` and `take` may be called from any thread."""

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        clock: Clock,
        node: NodeState,
        enabled: Sequence[Collector],
        inventory: InventoryKeeper,
        driver_period_max_s: float = 1.0,
    ) -> None:
        self.changed = threading.Event()  # the driver was replaced: only a new process can go on
        self.asked = threading.Event()  # the driver was asked for the first time, well or not
        self._settings = settings
        self._backend = backend
        self._clock = clock
        self._node = node
        self._enabled = enabled
        self._inventory = inventory
        self._rules = activity_rules(settings, driver_period_max_s)
        self._error = "the driver has not been asked yet"
        self._absent = False  # that is because there is none
        self._asking_since: float | None = None
        self._loops: dict[int, DeviceLoop] = {}
        self._stuck: list[Worker] = []  # asked to stop, but inside a driver call: while one is, the driver stays open
        self._stuck_at: dict[int, DeviceLoop] = {}
        self._totals: dict[str, Totals] = {}  # of each GPU, over all its loops
        self._counts: Counter[tuple[str, str]] = Counter()  # of loops that ended
        self._events: EventLoop | None = None
        self._events_for: frozenset[tuple[str, int]] = frozenset()
        self._bus_seen = -math.inf
        self._warned: set[str] = set()
        self._persistence: dict[str, bool] = {}
        self._lock = threading.RLock()  # over opening, closing, starting and stopping; never while sampling
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._released = False
        self._open = False
        self._worked = False
        self._settled = False

    def start(self) -> None:
        start(threading.Thread(target=self._watch_over, name="driver", daemon=True))

    def stop(self, timeout_s: float) -> bool:
        """End every loop and close the driver; false when a call hangs, so that it could not be closed."""
        self._stop.set()
        self._wake.set()
        return self._close(timeout_s)

    def release(self) -> bool:
        """Close the driver until `take`, so that it can be unloaded or MIG be switched; false when a call hangs."""
        begin = time.monotonic()
        self._released = True
        clean = self._close(RELEASE_S)
        if clean:
            log.info("the driver was released within %.1f s", time.monotonic() - begin)
        else:
            log.error("the driver is not released yet, since a call hangs in it; it will be when that ends")
        return clean

    def take(self) -> None:
        """Open the driver again after `release`."""
        if self._released:
            log.info("the driver is taken again")
        self._released = False
        self._wake.set()

    def _close(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            return False  # the driver hangs while it is asked; who asks it ends everything afterwards
        try:
            return self._end_all(deadline)
        finally:
            self._lock.release()

    def _end_all(self, deadline: float) -> bool:
        """End every worker and close the driver, unless somebody is still inside it; whether it is closed."""
        workers: list[Worker] = [*self._loops.values(), *([self._events] if self._events is not None else [])]
        for worker in workers:
            worker.ask_to_stop()
        self._stuck += [worker for worker in workers if not worker.join(deadline - time.monotonic())]
        loops, self._loops = self._loops, {}
        self._events, self._events_for = None, frozenset()
        for position, loop in loops.items():
            if loop.sampler is not None:
                self._counts.update(dict(loop.sampler.error_counts))
            if loop in self._stuck:
                self._stuck_at[position] = loop
        if self._released:
            self._error = RELEASED
            self._node.touch()
        self._drop_ended()
        if self._stuck:
            return False
        if self._open:
            self._open = False
            self._backend.close()
        return True

    def _drop_ended(self) -> None:
        """Whoever came out of the driver in the meantime no longer keeps it."""
        self._stuck = [worker for worker in self._stuck if not worker.join(0.0)]
        self._stuck_at = {position: loop for position, loop in self._stuck_at.items() if loop in self._stuck}

    def _watch_over(self) -> None:
        while not self._stop.is_set() and not self.changed.is_set():
            try:
                self._look()
            except NoThread as exc:
                if str(exc) not in self._warned:
                    log.warning("a GPU or its events are not watched: %s", exc)
                self._warned.add(str(exc))
            except Exception:  # a fault of ours must not end the watch over the others
                log.exception("looking after the driver failed")
            self.asked.set()
            # The first GPUs are found within milliseconds: look at them soon, then now and then.
            settled = self._released or bool(self._error) or (self._settled and self.first_cycles_done())
            self._clock.wait(self._wake, CHECK_S if settled else SOON_S)
            self._wake.clear()
            self._settled = self.first_cycles_done()

    def _look(self) -> None:
        """Open the driver when it is not, start loops for GPUs that are new, compare with what should be there."""
        self._inventory.look()
        self._bus_seen = self._clock.monotonic()
        with self._lock:
            if self._released:
                self._end_all(time.monotonic() + RELEASE_S)
            elif not self._stop.is_set():
                self._ask_driver()
            if not self._released and not self._stop.is_set():
                self._note_answering()
                self._listen()
        self._node.touch()

    def _ask_driver(self) -> None:
        self._asking_since = self._clock.monotonic()
        try:
            self._open = True
            self._backend.open()
            count = self._backend.count()
        except Exception as exc:  # whatever it is: the process stays up, says so, and asks again
            self._note_error(exc)
            return
        finally:
            self._asking_since = None
        if self._released or self._stop.is_set():  # asked for while the driver was being asked
            self._end_all(time.monotonic() + RELEASE_S)
            return
        self._error = ""
        self._drop_ended()
        for position in range(count):
            if position not in self._loops and position not in self._stuck_at:
                self._start_loop(position)
        self._worked = self._worked or count > 0

    def _note_error(self, exc: Exception) -> None:
        known = isinstance(exc, (DriverUnavailable, DeviceError))
        reason = str(exc) if known else f"unforeseen {type(exc).__name__}: {exc}"
        if isinstance(exc, DriverUnavailable) and exc.changed and self._worked:
            self._on_driver_changed(reason)
        elif reason != self._error:
            self._absent = isinstance(exc, DriverUnavailable) and exc.absent
            if self._absent and not self._expects_gpus():
                log.info("no GPU is expected to answer here: %s", reason)
            else:
                log.warning("no GPU data: %s", reason, exc_info=not known)
        self._error = reason

    def _on_driver_changed(self, reason: str) -> None:
        if not self.changed.is_set():
            self._error = f"the driver was replaced while this process used it: {reason}"
            log.error("%s", self._error)
            self.changed.set()

    def _start_loop(self, position: int) -> None:
        sampling = self._settings.sampling
        loop = DeviceLoop(
            position,
            self._backend.find,
            self._make_sampler,
            self._clock,
            sampling.interval,
            sampling.deadline,
            self._deliver,
            self._on_driver_changed,
        )
        loop.start()
        self._loops[position] = loop

    def _make_sampler(self, device: Device) -> DeviceSampler:
        """Runs in the device's own thread."""
        identity = device.identity
        try:
            self._persistence[identity.uuid] = device.read_persistence_mode()
        except DeviceError:
            self._persistence.pop(identity.uuid, None)
        totals = self._totals.setdefault(identity.uuid, Totals())
        totals.forget_last()
        return DeviceSampler(device, self._enabled, self._clock, self._rules, totals)

    def _deliver(self, snapshot: DeviceSnapshot) -> None:
        """One that stopped answering because it was given away is not lost: the bus is asked before it is shown."""
        if snapshot.up:
            self._inventory.remember(snapshot.identity.uuid)
        elif self._clock.monotonic() - self._bus_seen > 1.0:
            self._bus_seen = self._clock.monotonic()
            self._inventory.look_at_bus()
        self._node.on_snapshot(snapshot)

    def _devices(self) -> list[tuple[Device, int]]:
        """The devices that answer, and how often each was found again."""
        return [
            (loop.sampler.device, loop.renewals)
            for loop in list(self._loops.values())
            if loop.sampler is not None and not loop.is_hung() and loop.latest is not None and loop.latest.up
        ]

    def _listen(self) -> None:
        """Register for events once the GPUs are found, and again when one came or was found again.

        Not when one was lost: its last XIDs may still be on their way.
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
            return  # it hangs in the driver, and so would another
        events = EventLoop(self._open_watch, self._node.xids, self._clock, self._node.touch)
        events.start()
        self._events_for = wanted
        self._events = events

    def _open_watch(self) -> EventWatch:
        """Runs in the events' own thread, also when it registers again by itself."""
        found = self._devices()
        if not found:
            raise DeviceError("nvmlDeviceRegisterEvents", "without a GPU that answers")
        self._events_for = frozenset((device.identity.uuid, renewals) for device, renewals in found)
        return self._backend.watch_events([device for device, _ in found])

    def _note_answering(self) -> None:
        """Those that answer are expected from now on."""
        if not self.first_cycles_done():
            return
        latest = [loop.latest for loop in self._loops.values()]
        try:
            self._inventory.note(snapshot.identity for snapshot in latest if snapshot is not None and snapshot.up)
        except OSError as exc:
            self._warn_once(f"the list of expected GPUs is not kept: {exc}")

    def observe(self) -> DriverView:
        """What the driver has shown so far. Changes nothing."""
        loops = list(self._loops.items())
        positions = {position: _observe(loop) for position, loop in loops}
        positions |= {position: Position(error=STILL_HANGS) for position in list(self._stuck_at)}
        hangs_at_start = self.is_asking_too_long() and not loops
        complete = hangs_at_start or (self.asked.is_set() and self.first_cycles_done())
        return DriverView(positions, self.driver_error(), complete, self._released)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            log.warning("%s", text)

    def first_cycles_done(self) -> bool:
        """True once each GPU was read, or hangs."""
        return all(loop.attempted or loop.is_hung() for loop in list(self._loops.values()))

    def is_asking_too_long(self) -> bool:
        """Whether the driver's start, or its list, hangs."""
        since = self._asking_since
        return since is not None and self._clock.monotonic() - since > self._settings.sampling.deadline

    def driver_error(self) -> str:
        """Why there is no GPU data, "" while there is."""
        if self.is_asking_too_long():
            return "the driver does not answer"
        hung = [loop.is_hung() for loop in list(self._loops.values())]
        if hung and all(hung):
            return "every GPU's driver call hangs"
        return self._error

    def _expects_gpus(self) -> bool:
        inventory = self._inventory.value
        expected = count_expected(self.observe(), inventory)
        return expected > 0 or any(driver == UNBOUND for driver, _ in inventory.unmanaged())

    def is_missed(self) -> bool:
        """As AgentStatus.driver_missed."""
        return not self.asked.is_set() or bool(self._error and not self._absent and not self._released)

    def outcomes(self) -> tuple[CollectorOutcome, ...]:
        """Of collectors that work outside the device cycles."""
        events = self._events
        return (events.outcome,) if events is not None and events.outcome is not None else ()

    def warnings(self) -> tuple[str, ...]:
        """What is not wrong, but should be known."""
        off = sorted(uuid for uuid, on in list(self._persistence.items()) if not on)
        return (persistence_warning(len(off)),) if off else ()

    def error_counts(self) -> Counter[tuple[str, str]]:
        counts = Counter(self._counts)
        for loop in list(self._loops.values()):
            if loop.sampler is not None:
                counts.update(dict(loop.sampler.error_counts))  # a copy: the loop goes on counting
        return counts


def _observe(loop: DeviceLoop) -> Position:
    if loop.sampler is None:
        return Position(hung=loop.is_hung(), error=loop.find_error)
    snapshot = loop.latest
    identity = snapshot.identity if snapshot is not None else loop.sampler.device.identity
    return Position(identity, snapshot, loop.is_hung())
