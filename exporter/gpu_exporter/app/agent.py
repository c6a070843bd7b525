"""The running set of one node: driver, one loop per GPU, attribution, state file, publisher."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from gpu_exporter import collectors
from gpu_exporter.app.books import Books
from gpu_exporter.attribution.poller import Poller
from gpu_exporter.attribution.source import Source
from gpu_exporter.clock import Clock
from gpu_exporter.collectors import Collector
from gpu_exporter.defaults import Settings
from gpu_exporter.devices.errors import DeviceError, DriverUnavailable
from gpu_exporter.devices.protocol import Backend
from gpu_exporter.ledger.state import StateFile
from gpu_exporter.model import AgentStatus, DeviceSnapshot, View
from gpu_exporter.sampling.activity import ActivityRules
from gpu_exporter.sampling.loop import DeviceLoop
from gpu_exporter.sampling.sampler import DeviceSampler
from gpu_exporter.version import VERSION

log = logging.getLogger(__name__)
DRIVER_RETRY_S = 5.0  # how often an absent driver is looked for
STOP_S = 0.5  # how long all loops together may take to end


def activity_rules(settings: Settings, driver_period_max_s: float = 1.0) -> ActivityRules:
    """The part of the settings that sampling needs; the period is the driver's (ActivityRules)."""
    return ActivityRules(
        interval_s=settings.sampling.interval,
        gap_intervals=settings.ledger.gap_intervals,
        power_floor_max_ratio=settings.ledger.power_floor_max_ratio,
        power_active_step=settings.ledger.power_active_step,
        driver_period_max_s=driver_period_max_s,
    )


def open_state(directory: Path | None, settings: Settings, boot_id: str) -> StateFile | None:
    """Take the state directory, or say once why counters will not survive a restart.

    Raises StateInUse when another process has it.
    """
    if directory is None:
        return None
    state = StateFile(directory, settings.state.write_interval, boot_id)
    try:
        state.acquire()
    except OSError as exc:
        log.warning("%s: %s; counters start at 0 after each restart (set --state.directory)", directory, exc)
        return None
    return state


class Agent:
    """Everything that runs until it is told to stop."""

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        sources: Sequence[Source],
        clock: Clock,
        state: StateFile | None = None,
        enabled: Sequence[Collector] = collectors.ALL,
        note: str = "",
        driver_period_max_s: float = 1.0,
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._clock = clock
        self._state = state
        self._enabled = enabled
        self._note = note
        self._rules = activity_rules(settings, driver_period_max_s)
        self.books = Books(settings, clock, state)
        self.poller = Poller(sources, clock, settings.attribution.keep_last)
        self._loops: dict[str, DeviceLoop] = {}
        self._listed = 0
        self._driver_error = "the driver has not been asked yet"
        self._driver_asked = threading.Event()
        self._first_poll = threading.Event()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Restore what the state file proves and start the threads."""
        reason = self.books.restore()
        if reason:
            log.info("counters start at 0: %s", reason)
        self._spawn("driver", self._find_devices)
        self._spawn("attribution", self._attribute)
        if self._state is not None:
            self._spawn("state", self._keep_state)

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self) -> bool:
        """End everything and save the state; false when a driver call hangs, so the driver was not let go."""
        self._stop.set()
        deadline = time.monotonic() + STOP_S
        loops = list(self._loops.values())
        for loop in loops:
            loop.ask_to_stop()
        for thread in self._threads:
            if thread.name in ("state", "attribution"):
                thread.join(STOP_S / 2)  # neither must add to the final state
        ended = [loop.join(deadline - time.monotonic()) for loop in loops]
        if self._state is not None:
            try:
                self.books.write_state(final=True)
            except OSError as exc:
                log.warning("state could not be saved: %s", exc)
            self._state.release()
        if all(ended):
            self._backend.close()
        return all(ended)

    def _find_devices(self) -> None:
        """Open the driver, again and again until it is there, and start a loop for each GPU."""
        while not self._stop.is_set():
            try:
                self._backend.open()
                found = self._backend.discover()
            except Exception as exc:  # whatever it is: the process stays up, says so, and asks again
                known = isinstance(exc, (DriverUnavailable, DeviceError))
                reason = str(exc) if known else f"unforeseen {type(exc).__name__}: {exc}"
                if reason != self._driver_error:
                    log.warning("no GPU data: %s", reason, exc_info=not known)
                self._driver_error = reason
            else:
                self._driver_error = ""
                self._listed = len(found)
                for entry in found:
                    if entry.device is None:
                        log.error("gpu %d: %s; it has no series, the others go on", entry.position, entry.error)
                    elif entry.device.identity.uuid not in self._loops:
                        self._start_loop(DeviceSampler(entry.device, self._enabled, self._clock, self._rules))
            self._driver_asked.set()
            if not self._driver_error:
                return
            self._clock.wait(self._stop, DRIVER_RETRY_S)

    def _start_loop(self, sampler: DeviceSampler) -> None:
        sampling = self._settings.sampling
        loop = DeviceLoop(sampler, self._clock, sampling.interval, sampling.deadline, self.books.on_snapshot)
        self._loops[sampler.device.identity.uuid] = loop
        loop.start()

    def _attribute(self) -> None:
        self._driver_asked.wait()
        while not self._stop.is_set() and not all(loop.attempted or loop.is_hung() for loop in self._loops.values()):
            self._stop.wait(0.01)  # claims resolve against the first snapshots
        while not self._stop.is_set():
            try:
                resolution = self.books.on_poll(self.poller.poll())
                self.poller.note_conflicts(resolution.conflicts)
            except Exception:  # a fault of ours must not end attribution; mappings then age, which is visible
                log.exception("a poll of the attribution sources failed")
            self._first_poll.set()
            self._clock.wait(self._stop, self._settings.attribution.interval)

    def _keep_state(self) -> None:
        """Renew the marks every half write interval, and at once when a long idle run ended."""
        assert self._state is not None
        warned = False
        due = 0.0
        while not self._stop.is_set():
            now = self._clock.monotonic()
            if now >= due or self.books.wants_write():
                due = now + self._state.margin_s
                try:
                    self.books.write_state()
                    warned = False
                except OSError as exc:
                    if not warned:
                        log.warning("state cannot be written, counters stand still: %s", exc)
                    warned = True
            self._clock.wait(self._stop, min(1.0, self._state.margin_s / 4))

    def is_complete(self) -> bool:
        """True after the first complete cycle: driver asked, each GPU read or hung, attribution polled."""
        return self._first_poll.is_set()

    def readiness(self) -> tuple[bool, str]:
        if self.is_complete():
            return True, "ready"
        return False, "first cycle is not complete yet"

    def version(self) -> tuple[int, int]:
        """Changes with every snapshot and poll, and each second, since ages grow."""
        return self.books.version(), int(self._clock.monotonic())

    def build_view(self) -> View:
        return self.books.build_view(self._status(), self._is_hung)

    def _is_hung(self, uuid: str) -> bool:
        loop = self._loops.get(uuid)
        return loop is not None and loop.is_hung()

    def _status(self) -> AgentStatus:
        hung = [loop.is_hung() for loop in self._loops.values()]
        errors: Counter[tuple[str, str]] = Counter()
        for loop in list(self._loops.values()):
            errors.update(dict(loop.sampler.error_counts))  # a copy: the loop goes on counting
        driver_error = self._driver_error
        if hung and all(hung):
            driver_error = "every GPU's driver call hangs"
        return AgentStatus(
            version=VERSION,
            backend=self._backend.name,
            driver_up=not driver_error,
            driver_error=driver_error,
            devices_visible=sum(loop.latest is not None and loop.latest.up for loop in self._loops.values()),
            devices_expected=self._listed,
            sample_interval_s=self._settings.sampling.interval,
            last_sample_wall=self.books.last_sample_wall(),
            sources=self.poller.statuses(),
            attribution_known=self.poller.is_known() and self.books.is_resolved(),
            errors=tuple((call, error, count) for (call, error), count in sorted(errors.items())),
            note=self._note,
        )


def take_one_view(
    settings: Settings,
    backend: Backend,
    sources: Sequence[Source],
    clock: Clock,
    enabled: Sequence[Collector],
) -> View:
    """One cycle over everything in this thread, for `--once`. Raises DriverUnavailable."""
    backend.open()
    found = backend.discover()
    books = Books(settings, clock)
    errors: Counter[tuple[str, str]] = Counter()
    snapshots: list[DeviceSnapshot] = []
    for entry in found:
        if entry.device is not None:
            sampler = DeviceSampler(entry.device, enabled, clock, activity_rules(settings))
            snapshot = sampler.sample()
            snapshots.append(snapshot)
            books.on_snapshot(snapshot)
            errors.update(sampler.error_counts)
    poller = Poller(sources, clock, settings.attribution.keep_last)
    books.on_poll(poller.poll())
    status = AgentStatus(
        version=VERSION,
        backend=backend.name,
        driver_up=True,
        driver_error="",
        devices_visible=sum(snapshot.up for snapshot in snapshots),
        devices_expected=len(found),
        sample_interval_s=settings.sampling.interval,
        last_sample_wall=books.last_sample_wall(),
        sources=poller.statuses(),
        attribution_known=poller.is_known() and books.is_resolved(),
        errors=tuple((call, error, count) for (call, error), count in sorted(errors.items())),
    )
    view = books.build_view(status, lambda _uuid: False)
    backend.close()
    return view
