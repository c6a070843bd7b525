"""Reads every GPU once, each in its own thread. A GPU that hangs delays only its own reading.

Few modules are imported before the driver is queried. The others are loaded during GPM's first measurement.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from gpu_exporter.agent.devices.errors import (
    NOT_UNIQUE,
    DeviceError,
    DriverUnavailable,
    NoPermission,
    NotSupported,
)
from gpu_exporter.agent.devices.protocol import Backend, Device
from gpu_exporter.agent.sampling.driver import ALL_DENIED, DriverView, Position
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.readings import CollectorOutcome, DeviceSnapshot
from gpu_exporter.common.model.units import DeviceIdentity
from gpu_exporter.common.plain import describe_bug
from gpu_exporter.common.threads import start

if TYPE_CHECKING:
    from gpu_exporter.agent.sampling.sampler import DeviceSampler

PATIENCE = 0.8  # share of the time limit for the GPUs; the rest is for the view of the GPUs that answered
GPM_WINDOW_S = 0.11  # NVML requires more than 100 ms between two samples


def open_windows(device: Device, enabled: Collection[str]) -> bool:
    """Opens the GPM windows of a GPU and its instances before a first cycle. `enabled`: names of collectors.

    Returns True if a window was opened; the caller should then wait GPM_WINDOW_S before the cycle.
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
        self.is_denied = False
        self._position, self._backend, self._enabled = position, backend, enabled
        self._clock, self._make_sampler = clock, make_sampler
        self._thread = threading.Thread(target=self._read, name=f"gpu-{position}", daemon=True)
        start(self._thread)

    def join(self, deadline: float) -> bool:
        """Waits for the reading to end until `deadline` (monotonic seconds). Returns whether it has ended."""
        self._thread.join(max(0.0, deadline - self._clock.monotonic()))
        self.is_hung = self._thread.is_alive()
        return not self.is_hung

    def tell_apart(self) -> None:
        """Renames the GPU, because another GPU of the host reports the same UUID."""
        assert self.identity is not None
        self.errors["nvmlDeviceGetUUID", NOT_UNIQUE] += 1
        identity = self.identity = self.identity.told_apart
        if self.snapshot is not None:
            self.snapshot = self.snapshot.rename(identity)

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
                self.is_denied = self.identity is None and isinstance(exc, NoPermission)
        except Exception as exc:  # a bug in the exporter costs only this GPU, and is reported
            log.exception("gpu %d could not be read", self._position)
            self.error = describe_bug(exc)


class Readers:
    """The readers of all GPUs. A separate thread opens the driver, because opening may hang.

    `deadline`: when the caller needs the readings (monotonic seconds). `fault`: why the driver is closed, None if it is
    open.
    """

    def __init__(
        self,
        backend: Backend,
        enabled: Collection[str],
        clock: Clock,
        make_sampler: Callable[[Device], DeviceSampler],
        interval_s: float,
        timeout_s: float,
    ) -> None:
        """`enabled`: names of collectors. `interval_s`: the sampling interval that the status shows."""
        self.deadline = clock.monotonic() + PATIENCE * timeout_s
        self.fault: DriverUnavailable | None = None
        self._backend, self._enabled, self._clock, self._make_sampler = backend, enabled, clock, make_sampler
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self.each: list[Reader] = []
        self._bug: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Opens the driver and begins to read. Further calls do nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._open, name="open", daemon=True)
            start(self._thread)

    def wait_open(self) -> None:
        """Waits until the driver is open or has failed (`fault` is the reason). Raises DriverUnavailable if late."""
        self.start()
        assert self._thread is not None
        self._thread.join(max(0.0, self.deadline - self._clock.monotonic()))
        if self._thread.is_alive():
            raise self._late()
        if self._bug is not None:
            raise self._bug

    def wait(self, has_twin: Callable[[str], bool] = lambda uuid: False) -> bool:
        """Waits until every GPU was read. `has_twin`: takes a UUID, and returns whether several GPUs have reported it.

        Returns False if a GPU hangs. Raises DriverUnavailable if no GPU answers in
        time.
        """
        ended = [reader.join(self.deadline) for reader in self.each]
        uuids = Counter(reader.identity.uuid for reader in self.each if reader.identity is not None)
        for reader in self.each:
            uuid = reader.identity.uuid if reader.identity is not None else ""
            if uuid and (uuids[uuid] > 1 or has_twin(uuid)):
                reader.tell_apart()
        if not all(ended) and not any(position.answers for position in self.observe().positions.values()):
            raise self._late()
        return all(ended)

    def _late(self) -> DriverUnavailable:
        return DriverUnavailable(f"the driver did not answer within {self._timeout_s:g} s")

    def snapshots(self) -> list[DeviceSnapshot]:
        return [reader.snapshot for reader in self.each if reader.snapshot is not None]

    def observe(self) -> DriverView:
        """Returns the results so far."""
        found = (Position(each.identity, each.snapshot, each.is_hung, each.error, each.is_denied) for each in self.each)
        error = str(self.fault) if self.fault is not None else ALL_DENIED if self._is_denied() else ""
        return DriverView(dict(enumerate(found)), error)

    def _is_denied(self) -> bool:
        return bool(self.each) and all(reader.is_denied for reader in self.each)

    def is_missed(self) -> bool:
        """Returns whether the driver should answer but does not (AgentStatus.driver_missed)."""
        return (self.fault is not None and not self.fault.absent) or self._is_denied()

    def sample_interval_s(self) -> float:
        return self._interval_s

    def error_counts(self) -> Counter[tuple[str, str]]:
        errors: Counter[tuple[str, str]] = Counter()
        for reader in self.each:
            errors.update(reader.errors)
        return errors

    def outcomes(self) -> tuple[CollectorOutcome, ...]:
        """Returns no outcomes, because a single reading uses no events."""
        return ()

    def without_persistence(self) -> int:
        return sum(reader.persistence_off for reader in self.each)

    def _open(self) -> None:
        try:
            self._backend.open()
            self.each = [
                Reader(position, self._backend, self._enabled, self._clock, self._make_sampler)
                for position in range(self._backend.count())
            ]
        except DriverUnavailable as exc:
            self.fault = exc
        except Exception as exc:  # passed to the thread that waits
            self._bug = exc
