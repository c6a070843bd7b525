"""The GPUs of this node: opens the driver, runs one loop for each, and knows which should be there.

Everything here outlives faults: no driver yet, a GPU that is lost or hangs, one that left the list, one that was given
to a virtual machine, the driver let go on request, the driver replaced under us.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.app.books import Books, position_key
from gpu_exporter.app.wiring import HANGS, activity_rules, persistence_warning, unnamed, unread
from gpu_exporter.clock import Clock
from gpu_exporter.collectors import Collector
from gpu_exporter.collectors.xid import XID
from gpu_exporter.defaults import Settings
from gpu_exporter.devices.errors import DeviceError, DriverUnavailable
from gpu_exporter.devices.pci import MANAGED, PciFunction, list_functions, normalize
from gpu_exporter.devices.protocol import Backend, Device, EventWatch
from gpu_exporter.ledger.expected import ExpectedDevice, ExpectedDevices
from gpu_exporter.model import CollectorOutcome, DeviceIdentity, DeviceSnapshot
from gpu_exporter.sampling.events import EventLoop
from gpu_exporter.sampling.loop import DeviceLoop
from gpu_exporter.sampling.sampler import DeviceSampler
from gpu_exporter.sampling.worker import Worker

log = logging.getLogger(__name__)
SOON_S = 0.1
CHECK_S = 5.0  # how often an absent driver, new GPUs and the bus are looked for
RELEASE_S = 1.5  # how long all loops together may take to end, so that the driver is free within two seconds
FELL_OFF = "seen here before, but no longer in the driver's list"
RELEASED = "the driver was let go on request (SIGUSR1); SIGHUP takes it again"


class Bus(NamedTuple):
    """What the kernel says of the GPUs on the bus; empty where it was not asked."""

    functions: tuple[PciFunction, ...] = ()

    def driver_of(self, address: str) -> str | None:
        """The kernel driver of a PCI address; None when the bus does not show it."""
        wanted = normalize(address)
        return next((function.driver for function in self.functions if function.address == wanted), None)

    def unmanaged(self) -> tuple[tuple[str, int], ...]:
        """How many GPUs other kernel drivers have."""
        others = Counter(function.driver for function in self.functions if function.driver != MANAGED)
        return tuple(sorted(others.items()))


class Fleet:
    """All GPUs. `stop`, `release` and `take` may be called from any thread."""

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        clock: Clock,
        books: Books,
        enabled: Sequence[Collector],
        expected: ExpectedDevices,
        sysfs: Path | None = None,
        driver_period_max_s: float = 1.0,
    ) -> None:
        """`sysfs`: where to look for GPUs on the bus, None for a backend that has none."""
        self.changed = threading.Event()  # the driver was replaced: only a new process can go on
        self.asked = threading.Event()  # the driver was asked for the first time, well or not
        self._settings = settings
        self._backend = backend
        self._clock = clock
        self._books = books
        self._enabled = enabled
        self._expected = expected
        self._sysfs = sysfs
        self._rules = activity_rules(settings, driver_period_max_s)
        self._error = "the driver has not been asked yet"
        self._asking_since: float | None = None
        self._loops: dict[int, DeviceLoop] = {}
        self._counts: Counter[tuple[str, str]] = Counter()  # of loops that ended
        self._events: EventLoop | None = None
        self._events_for: frozenset[str] = frozenset()
        self._bus, self._bus_seen = Bus(), -1.0
        self._warned: set[str] = set()
        self._persistence: dict[str, bool] = {}
        self._lock = threading.RLock()  # over opening, closing, starting and stopping; never while sampling
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._released = False
        self._worked = False
        self._settled = False

    def start(self) -> None:
        threading.Thread(target=self._watch_over, name="driver", daemon=True).start()

    def stop(self, timeout_s: float) -> bool:
        """End every loop and let the driver go; false when a call hangs, so that it could not be let go."""
        self._stop.set()
        self._wake.set()
        return self._let_go(timeout_s)

    def release(self) -> bool:
        """Let the driver go, so that it can be unloaded or MIG be switched, until `take`; false when a call hangs."""
        begin = time.monotonic()
        self._released = True
        clean = self._let_go(RELEASE_S)
        self._error = RELEASED
        for snapshot in self._books.latest():
            self._books.on_snapshot(unread(snapshot.identity, RELEASED, self._clock, away=True))
        if clean:
            log.info("the driver was let go within %.1f s", time.monotonic() - begin)
        else:
            log.error("the driver cannot be let go: a call hangs in it")
        return clean

    def take(self) -> None:
        """Open the driver again after `release`."""
        self._released = False
        self._wake.set()

    def _let_go(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            return False  # the driver hangs while it is opened
        try:
            loops: list[Worker] = list(self._loops.values())
            if self._events is not None:
                loops.append(self._events)
            for loop in loops:
                loop.ask_to_stop()
            ended = [loop.join(deadline - time.monotonic()) for loop in loops]
            for device_loop in self._loops.values():
                if device_loop.sampler is not None:
                    self._counts.update(device_loop.sampler.error_counts)
            self._loops.clear()
            self._events, self._events_for = None, frozenset()
            if all(ended):
                self._backend.close()
            return all(ended)
        finally:
            self._lock.release()

    def _watch_over(self) -> None:
        while not self._stop.is_set() and not self.changed.is_set():
            if not self._released:
                self._look()
            self.asked.set()
            # The first GPUs are found within milliseconds: look at them soon, then now and then.
            settled = self._released or bool(self._error) or (self._settled and self.first_cycles_done())
            self._clock.wait(self._wake, CHECK_S if settled else SOON_S)
            self._wake.clear()
            self._settled = self.first_cycles_done()

    def _look(self) -> None:
        """Open the driver when it is not, start loops for GPUs that are new, compare with what should be there."""
        with self._lock:
            if self._released or self._stop.is_set():
                return
            self._asking_since = self._clock.monotonic()
            try:
                self._backend.open()
                count = self._backend.count()
            except Exception as exc:  # whatever it is: the process stays up, says so, and asks again
                self._note_error(exc)
            else:
                self._error = ""
                for position in range(count):
                    if position not in self._loops:
                        self._start_loop(position)
                self._worked = self._worked or count > 0
            finally:
                self._asking_since = None
        self._look_at_bus()
        self._place_missing()
        self._listen()

    def _note_error(self, exc: Exception) -> None:
        known = isinstance(exc, (DriverUnavailable, DeviceError))
        reason = str(exc) if known else f"unforeseen {type(exc).__name__}: {exc}"
        if isinstance(exc, DriverUnavailable) and exc.changed and self._worked:
            self._on_driver_changed(reason)
        elif reason != self._error:
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
        self._loops[position] = loop
        loop.start()

    def _make_sampler(self, device: Device) -> DeviceSampler:
        """Runs in the device's own thread."""
        identity = device.identity
        self._books.drop_position(identity.index)
        try:
            self._persistence[identity.uuid] = device.read_persistence_mode()
        except DeviceError:
            self._persistence.pop(identity.uuid, None)
        return DeviceSampler(device, self._enabled, self._clock, self._rules)

    def _devices(self) -> list[Device]:
        """The devices that were found, and whose thread does not hang."""
        return [
            loop.sampler.device
            for loop in list(self._loops.values())
            if loop.sampler is not None and not loop.is_hung()
        ]

    def _listen(self) -> None:
        """Register for events once the GPUs are found, and anew when another one was."""
        if XID not in self._enabled:
            return
        found = frozenset(device.identity.uuid for device in self._devices())
        if found <= self._events_for:
            return
        with self._lock:
            if self._released or self._stop.is_set():
                return
            if self._events is not None:
                self._events.ask_to_stop()
                self._events.join(RELEASE_S)
            self._events_for = found
            self._events = EventLoop(self._open_watch, self._books.xids, self._clock, self._books.touch)
            self._events.start()

    def _open_watch(self) -> EventWatch:
        return self._backend.watch_events(self._devices())

    def _look_at_bus(self) -> None:
        functions = list_functions(self._sysfs) if self._sysfs is not None else None
        self._bus = Bus(tuple(functions or ()))
        self._bus_seen = self._clock.monotonic()

    def _place_missing(self) -> None:
        """Show the GPUs that should be there and do not answer: lost ones as lost, given-away ones as away."""
        if not self.first_cycles_done():
            return
        loops = list(self._loops.values())
        up = [loop.latest.identity for loop in loops if loop.latest is not None and loop.latest.up]
        found = {loop.sampler.device.identity.uuid for loop in loops if loop.sampler is not None}
        self._expected.load()
        noted = self._expected.note(
            ExpectedDevice(identity.uuid, normalize(identity.pci_bus_id), identity.index, identity.name)
            for identity in up
        )
        if noted:
            try:
                self._expected.save()
            except OSError as exc:
                self._warn_once(f"the list of expected GPUs is not kept: {exc}")
        unfound = {loop.position: loop.find_error or HANGS for loop in loops if loop.sampler is None}
        missing = [device for uuid, device in self._expected.devices.items() if uuid not in found]
        for device in missing:
            driver = self._bus.driver_of(device.pci_bus_id)
            identity = DeviceIdentity(device.position, device.uuid, device.name, "", device.pci_bus_id, -1, "")
            if driver is not None and driver != MANAGED:
                self._books.on_snapshot(unread(identity, f"bound to kernel driver {driver}", self._clock, away=True))
                continue
            reason = unfound.pop(device.position, "") or self._error or FELL_OFF
            self._books.on_snapshot(unread(identity, reason, self._clock))
        for position, reason in unfound.items():  # the driver counts it, and nobody knows which one it is
            self._books.on_snapshot(unread(unnamed(position), reason, self._clock))
        keys = found | set(self._expected.devices) | {position_key(position) for position in unfound}
        self._books.keep_only(keys)

    def _deliver(self, snapshot: DeviceSnapshot) -> None:
        """A GPU that stopped answering because it was given away is not lost."""
        if not snapshot.up:
            if self._clock.monotonic() - self._bus_seen > 1.0:
                self._look_at_bus()
            driver = self._bus.driver_of(snapshot.identity.pci_bus_id)
            if driver is not None and driver != MANAGED:
                snapshot = unread(snapshot.identity, f"bound to kernel driver {driver}", self._clock, away=True)
        self._books.on_snapshot(snapshot)

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

    def is_hung(self, uuid: str) -> bool:
        return any(
            loop.is_hung()
            for loop in list(self._loops.values())
            if loop.sampler is not None and loop.sampler.device.identity.uuid == uuid
        )

    def driver_error(self) -> str:
        """Why there is no GPU data, "" while there is."""
        if self.is_asking_too_long():
            return "the driver does not answer"
        hung = [loop.is_hung() for loop in list(self._loops.values())]
        if hung and all(hung):
            return "every GPU's driver call hangs"
        return self._error

    def visible(self) -> int:
        """GPUs that answer."""
        return sum(loop.latest is not None and loop.latest.up for loop in list(self._loops.values()))

    def expected(self) -> int:
        """GPUs that should answer: on the bus with NVIDIA's driver, in the driver's list, or seen before."""
        taken = {function.address for function in self._bus.functions if function.driver != MANAGED}
        known = {normalize(device.pci_bus_id) for device in self._expected.devices.values()}
        bound = {function.address for function in self._bus.functions if function.driver == MANAGED}
        listed = len(self._loops) - sum(
            loop.latest is not None and normalize(loop.latest.identity.pci_bus_id) in taken
            for loop in list(self._loops.values())
        )
        return max(len((known | bound) - taken), listed)

    def unmanaged(self) -> tuple[tuple[str, int], ...]:
        return self._bus.unmanaged()

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
