"""One reading of every GPU, each in its own thread: a GPU that hangs delays only its own reading.

Few modules are imported before the driver is queried: the rest is loaded while the GPM windows pass.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from gpu_exporter.agent.devices.errors import DeviceError, NotSupported
from gpu_exporter.agent.devices.protocol import Backend, Device
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.readings import DeviceSnapshot
from gpu_exporter.common.model.units import DeviceIdentity
from gpu_exporter.common.plain import describe_bug
from gpu_exporter.common.threads import start

if TYPE_CHECKING:
    from gpu_exporter.agent.sampling.sampler import DeviceSampler

GPM_WINDOW_S = 0.11  # NVML requires more than 100 ms between two samples


def open_windows(device: Device, enabled: Collection[str]) -> bool:
    """Begin the GPM windows of a GPU and its instances before a first cycle; true if a window was opened, so that the
    cycle should wait for it.

    `enabled`: names of collectors.
    """
    opened = False
    try:
        boards = [device] if "gpm" in enabled else []
        instances = device.list_instances() if "mig" in enabled else ()
        for ask in (*(board.read_gpm for board in boards), *(instance.read_gpm for instance in instances)):
            try:
                ask()
                opened = True
            except NotSupported:
                continue
    except DeviceError:
        return False  # the following cycle gets the same error and reports it
    return opened


log = logging.getLogger(__name__)


class Reader:
    """Reads the GPU at one position, in its own thread."""

    def __init__(
        self,
        position: int,
        backend: Backend,
        enabled: Collection[str],
        clock: Clock,
        make_sampler: Callable[[Device], DeviceSampler],
    ) -> None:
        self.errors: Counter[tuple[str, str]] = Counter()
        self.persistence_off = False
        self.identity: DeviceIdentity | None = None
        self.snapshot: DeviceSnapshot | None = None
        self.error = ""
        self.is_hung = False
        self._position, self._backend, self._enabled = position, backend, enabled
        self._clock, self._make_sampler = clock, make_sampler
        self._thread = threading.Thread(target=self._read, name=f"gpu-{position}", daemon=True)
        start(self._thread)

    def join(self, deadline: float) -> bool:
        """Wait for the end, or until `deadline` (monotonic seconds of the clock); false if it has not ended."""
        self._thread.join(max(0.0, deadline - self._clock.monotonic()))
        self.is_hung = self._thread.is_alive()
        return not self.is_hung

    def _read(self) -> None:
        try:
            device = self._backend.find(self._position)
            self.identity = device.identity
            opened, at = open_windows(device, self._enabled), self._clock.monotonic()
            sampler = self._make_sampler(device)
            if opened:
                self._clock.wait(threading.Event(), at + GPM_WINDOW_S - self._clock.monotonic())
            self.snapshot = sampler.sample()
            self.errors = sampler.error_counts
            self.persistence_off = not device.read_persistence_mode()
        except DeviceError as exc:
            if self.snapshot is None:
                self.errors[exc.call, exc.error] += 1
                self.error = str(exc)
        except Exception as exc:  # a bug in the exporter costs only this GPU, and is reported
            log.exception("gpu %d could not be read", self._position)
            self.error = describe_bug(exc)


class Readers:
    """The readers of all GPUs. The driver is opened in a separate thread, since opening may hang.

    `enabled`: names of collectors.
    """

    def __init__(
        self,
        backend: Backend,
        enabled: Collection[str],
        clock: Clock,
        make_sampler: Callable[[Device], DeviceSampler],
    ) -> None:
        self._backend, self._enabled, self._clock, self._make_sampler = backend, enabled, clock, make_sampler
        self._each: list[Reader] = []
        self._fault: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Open the driver and begin; further calls do nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._open, name="open", daemon=True)
            start(self._thread)

    def take(self, deadline: float) -> list[Reader] | None:
        """A reader for each position; some or all may still be running. None if the driver is not open by `deadline`.

        Raises DriverUnavailable.
        """
        self.start()
        assert self._thread is not None
        self._thread.join(max(0.0, deadline - self._clock.monotonic()))
        if self._thread.is_alive():
            return None
        if self._fault is not None:
            raise self._fault
        return self._each

    def _open(self) -> None:
        try:
            self._backend.open()
            self._each = [
                Reader(position, self._backend, self._enabled, self._clock, self._make_sampler)
                for position in range(self._backend.count())
            ]
        except Exception as exc:  # passed to the thread that calls `take`
            self._fault = exc
