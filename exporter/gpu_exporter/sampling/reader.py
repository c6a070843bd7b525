"""One reading of one GPU, in a thread of its own: one that hangs costs only itself."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from gpu_exporter.clock import Clock
from gpu_exporter.collectors import Collector
from gpu_exporter.devices.errors import DeviceError
from gpu_exporter.devices.protocol import Backend
from gpu_exporter.model import DeviceIdentity, DeviceSnapshot
from gpu_exporter.sampling.sampler import GPM_WINDOW_S, DeviceSampler
from gpu_exporter.sampling.witnesses import ActivityRules
from gpu_exporter.threads import start


class Reader:
    """Reads the GPU at one position, in its own thread."""

    def __init__(
        self, position: int, backend: Backend, enabled: Sequence[Collector], clock: Clock, rules: ActivityRules
    ) -> None:
        self.errors: Counter[tuple[str, str]] = Counter()
        self.persistence_off = False
        self.identity: DeviceIdentity | None = None
        self.snapshot: DeviceSnapshot | None = None
        self.error = ""
        self.is_hung = False
        self._position, self._backend, self._enabled = position, backend, enabled
        self._clock, self._rules = clock, rules
        self._thread = threading.Thread(target=self._read, name=f"gpu-{position}", daemon=True)
        start(self._thread)

    def join(self, deadline: float) -> bool:
        """Wait for the end, or until `deadline` (monotonic seconds of the clock); false when it is not over."""
        self._thread.join(max(0.0, deadline - self._clock.monotonic()))
        self.is_hung = self._thread.is_alive()
        return not self.is_hung

    def _read(self) -> None:
        try:
            device = self._backend.find(self._position)
            self.identity = device.identity
            sampler = DeviceSampler(device, self._enabled, self._clock, self._rules)
            if sampler.prime():
                self._clock.wait(threading.Event(), GPM_WINDOW_S)
            self.snapshot = sampler.sample()
            self.errors = sampler.error_counts
            self.persistence_off = not device.read_persistence_mode()
        except DeviceError as exc:
            if self.snapshot is None:
                self.errors[exc.call, exc.error] += 1
                self.error = str(exc)
