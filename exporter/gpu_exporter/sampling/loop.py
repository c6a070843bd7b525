"""The clockwork: one daemon thread per GPU, each with its own deadline.

A thread that hangs inside the driver is marked hung and never replaced: it would hang again, and threads would pile
up. Its GPU's families are withheld by age; the other GPUs go on. The thread also finds its GPU, so that one that hangs
or fails at its very start costs nobody else a moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gpu_exporter.clock import Clock
from gpu_exporter.devices.errors import DeviceError, DriverChanged
from gpu_exporter.devices.protocol import Device
from gpu_exporter.model.readings import DeviceSnapshot
from gpu_exporter.sampling.reader import GPM_WINDOW_S
from gpu_exporter.sampling.sampler import DeviceSampler
from gpu_exporter.sampling.worker import Worker

log = logging.getLogger(__name__)
FIND_RETRY_S = 5.0  # a GPU that cannot be found, or was lost, is looked for this often


class DeviceLoop(Worker):
    """Samples the device at one position until stopped, and hands each snapshot to `deliver`.

    `interval_s`: between two cycles, until the device turns out to allow a longer one.
    """

    def __init__(
        self,
        position: int,
        find: Callable[[int], Device],
        make_sampler: Callable[[Device], DeviceSampler],
        clock: Clock,
        interval_s: float,
        deadline_s: float,
        deliver: Callable[[DeviceSnapshot], None],
        on_driver_changed: Callable[[str], None],
        on_first_cycle: Callable[[], None],
    ) -> None:
        """`on_first_cycle` is called once, when a first cycle has ended, well or not."""
        super().__init__(f"gpu-{position}")
        self.position = position
        self.sampler: DeviceSampler | None = None
        self.latest: DeviceSnapshot | None = None
        self.attempted = False  # a first cycle ended, well or not
        self.find_error = ""
        self._find = find
        self._make_sampler = make_sampler
        self._clock = clock
        self._interval_s = interval_s
        self._deadline_s = deadline_s
        self._deliver = deliver
        self._on_driver_changed = on_driver_changed
        self._on_first_cycle = on_first_cycle
        self._cycle_start: float | None = None
        self._due = 0.0
        self._renew_at = 0.0
        self._was_slow = False  # the last cycle ended, but past its deadline
        self.renewals = 0  # how often the device was found again after a loss

    @property
    def interval_s(self) -> float:
        """Seconds between two cycles, as the device allows at present."""
        return self.sampler.interval_s if self.sampler is not None else self._interval_s

    def is_hung(self) -> bool:
        """True while the present cycle is past its deadline, and until one has ended in time again."""
        start = self._cycle_start
        return self._was_slow or (start is not None and self._clock.monotonic() - start > self._deadline_s)

    def _run(self) -> None:
        self._due = self._clock.monotonic()
        while not self._stop.is_set():
            self._cycle_start = self._clock.monotonic()
            try:
                wait_s = self._cycle()
            except DriverChanged as exc:
                self._on_driver_changed(str(exc))
                return
            except Exception as exc:  # a fault of ours must not end the loop: the GPU's age shows it, the count why
                if self.sampler is not None:
                    self.sampler.error_counts["cycle", type(exc).__name__] += 1
                log.exception("gpu %d: a sampling cycle failed", self.position)
                wait_s = self._interval_s
            finally:
                self._was_slow = self._clock.monotonic() - self._cycle_start > self._deadline_s
                self._cycle_start = None
                if not self.attempted:
                    self.attempted = True
                    self._on_first_cycle()
            self._rest(wait_s)

    def _cycle(self) -> float:
        """Find the device, or sample it once; how long to rest."""
        if self.sampler is None:
            try:
                self.sampler = self._make_sampler(self._find(self.position))
            except DriverChanged:
                raise
            except DeviceError as exc:
                if self.find_error != str(exc):
                    self.find_error = str(exc)
                    log.error("gpu %d: %s; the others go on", self.position, exc)
                return FIND_RETRY_S
            self.find_error = ""
        snapshot = self.sampler.sample()
        if not snapshot.up:
            self._renew(self.sampler.device)
        if self._stop.is_set():
            return 0.0
        self._deliver(snapshot)
        self._log_change(snapshot)
        is_first, self.latest = self.latest is None, snapshot
        # GPM compares two moments: the second one follows at once, so that the first scrapes have it.
        return min(GPM_WINDOW_S, self._interval_s) if is_first else self.interval_s

    def _renew(self, device: Device) -> None:
        """Now and then ask the driver for the lost device again."""
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
                "answers again" if snapshot.up else f"{snapshot.error}; its series are withdrawn, the others go on",
            )

    def _rest(self, wait_s: float) -> None:
        """Wait for the next tick; after falling behind skip the missed ones, never sample in a burst."""
        now = self._clock.monotonic()
        self._due += wait_s
        if self._due < now:
            self._due = now + wait_s
        self._clock.wait(self._stop, self._due - now)
