"""Reads the GPUs for `record`, which writes every answer of the driver to its file."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Sequence

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.devices.errors import DeviceError
from gpu_exporter.agent.devices.protocol import Backend, Device
from gpu_exporter.agent.sampling.activity.witnesses import ActivityRules
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import SYSTEM_CLOCK

log = logging.getLogger(__name__)
EVENT_WAIT_S = 0.25
FIND_S = 1.0  # longest wait for one GPU that is slow to be found, before events are registered


class Tap:
    """Reads the GPU at one position, in its own thread. A GPU that hangs at its start is recorded too."""

    def __init__(
        self, backend: Backend, position: int, rules: ActivityRules, interval_s: float, stop: threading.Event
    ) -> None:
        self.device: Device | None = None
        self.tried = threading.Event()
        self._backend, self._position, self._rules = backend, position, rules
        self._interval_s, self._stop = interval_s, stop

    def run(self) -> None:
        """Reads until `stop`. An error of the device is recorded like any other answer, and ends the reading."""
        try:
            device = self._backend.find(self._position)
            with contextlib.suppress(DeviceError):
                device.read_persistence_mode()
            self.device = device
            self.tried.set()
            sampler = DeviceSampler(device, registry.ALL, SYSTEM_CLOCK, self._rules)
            sampler.sample()
            log.info("gpu %d: %s", self._position, device.identity.name)
            while not self._stop.wait(self._interval_s):
                sampler.sample()
        except DeviceError as exc:  # the error is recorded, and no further answers will come
            log.warning("gpu %d: %s; the recording continues without this GPU", self._position, exc)
        finally:
            self.tried.set()


def listen(backend: Backend, taps: Sequence[Tap], stop: threading.Event) -> None:
    """Waits for events of the found GPUs until `stop`."""
    for tap in taps:
        tap.tried.wait(FIND_S)
    try:
        watch = backend.watch_events([tap.device for tap in taps if tap.device is not None])
        while not stop.is_set():
            watch.wait(EVENT_WAIT_S)
        watch.close()
    except DeviceError:
        return  # the error is recorded like every other answer
