"""Samples the GPUs with one daemon thread for each GPU. Each thread has its own deadline.

A thread that hangs in the driver is reported as hung, and its GPU's values are no longer published. It is never
replaced, because a new thread would hang too. Other GPUs are not affected. The thread also finds its GPU, so that a GPU
that hangs at its start delays no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from gpu_exporter.agent.devices.errors import DeviceError, DriverChanged, NoPermission
from gpu_exporter.agent.devices.protocol import Device
from gpu_exporter.agent.sampling.reader import GPM_WINDOW_S
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.agent.sampling.worker import Worker
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.readings import DeviceSnapshot
from gpu_exporter.common.tasks import Task

log = logging.getLogger(__name__)
FIND_RETRY_S = 5.0  # how often the thread looks for a GPU that was not found or was lost


class LoopEvents(NamedTuple):
    """The callbacks of a loop.

    - `deliver`: called with each snapshot.
    - `driver_changed`: called with the reason; the loop then ends.
    - `first_cycle`: called once, after the first cycle has ended, even if it failed.
    """

    deliver: Callable[[DeviceSnapshot], None]
    driver_changed: Callable[[str], None]
    first_cycle: Callable[[], None]


class DeviceLoop(Worker):
    """Samples the GPU at one position of the driver's list until stopped, and delivers each snapshot.

    `interval_s`: the least seconds between two cycles. The sampler may choose a longer interval while it loses no data.
    """

    def __init__(
        self,
        position: int,
        find: Callable[[int], Device],
        make_sampler: Callable[[Device], DeviceSampler],
        clock: Clock,
        interval_s: float,
        deadline_s: float,
        events: LoopEvents,
        task: Task | None = None,
    ) -> None:
        super().__init__(f"gpu-{position}", task or Task("gpu"))
        self.position = position
        self.sampler: DeviceSampler | None = None
        self.latest: DeviceSnapshot | None = None
        self.attempted = False  # a first cycle has ended, with or without success
        self.find_error = ""
        self.is_denied = False  # the driver refuses this GPU for lack of permission
        self._find = find
        self._make_sampler = make_sampler
        self._clock = clock
        self._interval_s = interval_s
        self._deadline_s = deadline_s
        self._events = events
        self._cycle_start: float | None = None
        self._due = 0.0
        self._renew_at = 0.0
        self._was_slow = False  # the last cycle ended, but after its deadline
        self._finds_again = False
        self.renewals = 0  # how often the device was found again after a loss

    @property
    def interval_s(self) -> float:
        """The present seconds between two cycles, which the sampler chooses."""
        return self.sampler.interval_s if self.sampler is not None else self._interval_s

    def find_again(self) -> None:
        """Lets the next cycle find the device again, because its name has changed. Called from another thread."""
        self._finds_again = True

    def is_hung(self) -> bool:
        """Returns whether a cycle has exceeded its deadline, and no later cycle has ended in time."""
        start = self._cycle_start
        return self._was_slow or (start is not None and self._clock.monotonic() - start > self._deadline_s)

    def _run(self) -> None:
        self._due = self._clock.monotonic()
        while not self._stop.is_set():
            self._cycle_start, wait_s = self._clock.monotonic(), self._interval_s
            with self.task:
                try:
                    wait_s = self._cycle()
                except DriverChanged as exc:
                    self._events.driver_changed(str(exc))
                    return
                finally:
                    self._was_slow = self._clock.monotonic() - self._cycle_start > self._deadline_s
                    self._cycle_start = None
                    if not self.attempted:
                        self.attempted = True
                        self._events.first_cycle()
            self._rest(wait_s)

    def _cycle(self) -> float:
        """Finds the device if it is not known yet, and samples it once. Returns the seconds until the next cycle."""
        if self._finds_again:
            self.sampler, self._finds_again = None, False
        if self.sampler is None:
            try:
                self.sampler = self._make_sampler(self._find(self.position))
            except DriverChanged:
                raise
            except DeviceError as exc:
                self.is_denied = isinstance(exc, NoPermission)
                if self.find_error != str(exc):
                    self.find_error = str(exc)
                    if self.is_denied:
                        log.info("gpu %d: %s; no permission to use this GPU, so it is not counted", self.position, exc)
                    else:
                        text = "gpu %d: %s; the exporter retries this GPU every %g s; the other GPUs are not affected"
                        log.error(text, self.position, exc, FIND_RETRY_S)
                return FIND_RETRY_S
            self.find_error, self.is_denied = "", False
        snapshot = self.sampler.sample()
        if not snapshot.up:
            self._renew(self.sampler.device)
        if self._stop.is_set():
            return 0.0
        self._events.deliver(snapshot)
        self._log_change(snapshot)
        is_first, self.latest = self.latest is None, snapshot
        # GPM compares two moments: the second cycle follows at once, so that the first scrapes have GPM values.
        return min(GPM_WINDOW_S, self._interval_s) if is_first else self.interval_s

    def _renew(self, device: Device) -> None:
        """Asks the driver for the lost device again, at most every FIND_RETRY_S."""
        now = self._clock.monotonic()
        if now >= self._renew_at:
            self._renew_at = now + FIND_RETRY_S
            try:
                device.renew()
                self.renewals += 1
            except DriverChanged:
                raise
            except DeviceError as exc:
                log.debug("gpu %d: %s", self.position, exc)

    def _log_change(self, snapshot: DeviceSnapshot) -> None:
        was_up = self.latest.up if self.latest is not None else True
        if snapshot.up != was_up:
            identity = snapshot.identity
            log.warning(
                "gpu %d (%s, %s): %s",
                identity.index,
                identity.uuid,
                identity.pci_bus_id,
                "answers again" if snapshot.up else f"{snapshot.error}; its series stop; other GPUs continue",
            )

    def _rest(self, wait_s: float) -> None:
        """Waits for the next cycle. Skips cycles that a delay has missed, so that cycles never come in a burst."""
        now = self._clock.monotonic()
        self._due += wait_s
        if self._due < now:
            self._due = now + wait_s
        self._clock.wait(self._stop, self._due - now)
