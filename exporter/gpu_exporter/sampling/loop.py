"""The clockwork: one daemon thread per GPU, each with its own deadline.

A thread that hangs inside the driver is marked hung and never replaced: it would hang again, and threads would pile
up. Its GPU's families are withheld by age; the other GPUs go on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gpu_exporter.clock import Clock
from gpu_exporter.model import DeviceSnapshot
from gpu_exporter.sampling.sampler import DeviceSampler

log = logging.getLogger(__name__)


class DeviceLoop:
    """Samples one device every `interval_s` until stopped, and hands each snapshot to `deliver`."""

    def __init__(
        self,
        sampler: DeviceSampler,
        clock: Clock,
        interval_s: float,
        deadline_s: float,
        deliver: Callable[[DeviceSnapshot], None],
    ) -> None:
        self.sampler = sampler
        self.latest: DeviceSnapshot | None = None
        self.attempted = False  # a first cycle ended, well or not
        self._clock = clock
        self._interval_s = interval_s
        self._deadline_s = deadline_s
        self._deliver = deliver
        self._stop = threading.Event()
        self._cycle_start: float | None = None
        self._due = 0.0
        identity = sampler.device.identity
        self._thread = threading.Thread(target=self._run, name=f"gpu-{identity.index}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask_to_stop(self) -> None:
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; false when the loop hangs inside a call."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    def is_hung(self) -> bool:
        """True while the present cycle is past its deadline."""
        start = self._cycle_start
        return start is not None and self._clock.monotonic() - start > self._deadline_s

    def _run(self) -> None:
        identity = self.sampler.device.identity
        self._due = self._clock.monotonic()
        was_up = True
        while not self._stop.is_set():
            self._cycle_start = self._clock.monotonic()
            try:
                snapshot = self.sampler.sample()
                self._deliver(snapshot)
            except Exception as exc:  # a fault of ours must not end the loop: the GPU's age tells, the count says why
                self.sampler.error_counts["cycle", type(exc).__name__] += 1
                log.exception("gpu %d (%s): a sampling cycle failed", identity.index, identity.uuid)
                self._rest()
                continue
            finally:
                self._cycle_start = None
                self.attempted = True
            if self._stop.is_set():
                return
            if snapshot.up != was_up:
                was_up = snapshot.up
                log.warning(
                    "gpu %d (%s, %s): %s",
                    identity.index,
                    identity.uuid,
                    identity.pci_bus_id,
                    "answers again" if was_up else f"{snapshot.error}; its series are withdrawn, the others go on",
                )
            self.latest = snapshot
            self._rest()

    def _rest(self) -> None:
        """Wait for the next tick; after falling behind skip the missed ones, never sample in a burst."""
        now = self._clock.monotonic()
        self._due += self._interval_s
        if self._due < now:
            self._due = now + self._interval_s
        self._clock.wait(self._stop, self._due - now)
