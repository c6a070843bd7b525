"""Opens and closes the driver. One table of transitions defines its states.

A thread that calls the driver may hang. Other threads can therefore read every state. A release that is requested
during a call happens when the call ends.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from gpu_exporter.agent.devices.errors import DeviceError, DriverUnavailable
from gpu_exporter.agent.devices.protocol import Backend
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.readings import DeviceSnapshot
from gpu_exporter.common.model.units import DeviceIdentity
from gpu_exporter.common.plain import describe_bug

log = logging.getLogger(__name__)
RELEASED_TEXT = "the driver was released on request (SIGUSR1); SIGHUP reopens it"
NOT_ASKED = "the driver has not been asked yet"
SILENT = "the driver does not answer"
ALL_DENIED = (
    "the driver lists GPUs, but refuses all of them (NVML_ERROR_NO_PERMISSION): run as root, or give this container "
    "its GPUs"
)


class DriverState(enum.Enum):
    ABSENT = "absent"  # not opened yet, or the last attempt failed; the exporter retries
    OPENING = "opening"  # being opened, or queried for its list again
    OPEN = "open"
    RELEASING = "releasing"  # a close was requested, but a thread may still be inside a call
    RELEASED = "released"  # closed on request, until a request to open it again
    REPLACED = "replaced"  # another version was loaded while it was open: the exporter must restart


class DriverEvent(enum.Enum):
    """The events that change the state."""

    ASK = "it is opened, or queried again"
    ANSWERED = "it answered"
    FAILED = "it did not answer"
    RELEASE = "its release was requested"
    CLOSED = "it was closed"
    TAKE = "it may be opened again"
    REPLACED = "it was replaced"


TRANSITIONS: Mapping[tuple[DriverState, DriverEvent], DriverState] = {
    (DriverState.ABSENT, DriverEvent.ASK): DriverState.OPENING,
    (DriverState.OPEN, DriverEvent.ASK): DriverState.OPENING,
    (DriverState.OPENING, DriverEvent.ANSWERED): DriverState.OPEN,
    (DriverState.OPENING, DriverEvent.FAILED): DriverState.ABSENT,
    (DriverState.ABSENT, DriverEvent.RELEASE): DriverState.RELEASING,
    (DriverState.OPENING, DriverEvent.RELEASE): DriverState.RELEASING,
    (DriverState.OPEN, DriverEvent.RELEASE): DriverState.RELEASING,
    (DriverState.RELEASING, DriverEvent.CLOSED): DriverState.RELEASED,
    (DriverState.RELEASING, DriverEvent.TAKE): DriverState.ABSENT,
    (DriverState.RELEASED, DriverEvent.TAKE): DriverState.ABSENT,
    **{(state, DriverEvent.REPLACED): DriverState.REPLACED for state in DriverState},
}


def transition(state: DriverState, event: DriverEvent) -> DriverState:
    """Returns the state after `event`. A pair that TRANSITIONS lacks changes nothing."""
    return TRANSITIONS.get((state, event), state)


class Position(NamedTuple):
    """One position in the driver's list of GPUs.

    - `identity`: None while the GPU's identity cannot be read; `error` is the reason.
    - `snapshot`: None before the first reading has ended.
    - `hung`: a driver call has exceeded its deadline.
    - `denied`: the driver lists the GPU, but this process has no permission to use it, because the GPU belongs to
      others.
    """

    identity: DeviceIdentity | None = None
    snapshot: DeviceSnapshot | None = None
    hung: bool = False
    error: str = ""
    denied: bool = False

    @property
    def answers(self) -> bool:
        return self.snapshot is not None and self.snapshot.up and not self.hung


class DriverView(NamedTuple):
    """The driver's results so far.

    - `error`: why there is no GPU data, "" while there is data.
    - `complete`: the driver was queried, and each of its GPUs was read or hangs. Before that, no GPU counts as missing.
    - `released`: the driver was released on request.
    """

    positions: Mapping[int, Position]
    error: str = ""
    complete: bool = True
    released: bool = False


class Driver:
    """Opens, lists and closes one backend.

    Only one thread at a time may call `ask` and `close`. Any thread may call the other methods.
    """

    def __init__(self, backend: Backend, clock: Clock, deadline_s: float, expects_gpus: Callable[[], bool]) -> None:
        """`deadline_s`: a longer call counts as hanging. `expects_gpus`: returns whether this host should have GPUs,
        for the log.
        """
        self.state = DriverState.ABSENT
        self.asked = threading.Event()  # queried since the start or the last release, with or without success
        self.replaced = threading.Event()
        self._backend = backend
        self._clock = clock
        self._deadline_s = deadline_s
        self._expects_gpus = expects_gpus
        self._lock = threading.Lock()
        self._error = NOT_ASKED
        self._is_absent = False
        self._asking_since: float | None = None
        self._touched = False  # opened, or partly opened: must be closed
        self._has_listed = False  # it has listed GPUs since this process started

    def ask(self) -> int | None:
        """Opens the driver, or queries it again. Returns the number of GPUs in its list, None if it is not open."""
        if self._step(DriverEvent.ASK) is not DriverState.OPENING:
            return None
        self._asking_since = self._clock.monotonic()
        try:
            self._touched = True
            self._backend.open()
            count = self._backend.count()
        except Exception as exc:  # any error: the process keeps running, logs the error and retries
            self._note_failure(exc)
            return None
        finally:
            self._asking_since = None
        if self._step(DriverEvent.ANSWERED) is not DriverState.OPEN:
            return None  # a release was requested during the call
        self._error = ""
        self._has_listed |= count > 0
        return count

    def release(self) -> None:
        """Requests that the driver is closed until `take`."""
        self._step(DriverEvent.RELEASE)

    def take(self) -> None:
        """Allows the driver to be opened again. Its GPUs are unknown until then."""
        if self.is_released:
            log.info("the driver is opened again")
            self._error = NOT_ASKED
            self.asked.clear()
        self._step(DriverEvent.TAKE)

    def close(self) -> None:
        """Closes the driver. No thread may be inside a driver call."""
        if self._touched:
            self._touched = False
            self._backend.close()
        self._step(DriverEvent.CLOSED)

    def note_replaced(self, reason: str) -> None:
        """Records that the library no longer matches the loaded driver. `reason`: the error that shows this."""
        if not self.replaced.is_set():
            self._error = f"the driver was replaced while this process used it: {reason}"
            log.error("%s", self._error)
            self._step(DriverEvent.REPLACED)
            self.replaced.set()

    def _note_failure(self, exc: Exception) -> None:
        known = isinstance(exc, (DriverUnavailable, DeviceError))
        reason = str(exc) if known else describe_bug(exc)
        if isinstance(exc, DriverUnavailable) and exc.changed and self._has_listed:
            self.note_replaced(reason)
            return
        self._is_absent = isinstance(exc, DriverUnavailable) and exc.absent
        if reason != self._error:
            if self._is_absent and not self._expects_gpus():
                log.info("the exporter expects no GPU on this host, so it needs no driver: %s", reason)
            else:
                log.warning("no GPU data: %s", reason, exc_info=not known)
        self._error = reason
        self._step(DriverEvent.FAILED)

    def _step(self, event: DriverEvent) -> DriverState:
        with self._lock:
            self.state = transition(self.state, event)
            return self.state

    @property
    def is_released(self) -> bool:
        """Whether the driver must not be queried, because a user requested its release."""
        return self.state in (DriverState.RELEASING, DriverState.RELEASED)

    @property
    def is_silent(self) -> bool:
        """Whether a call hangs that opens the driver or lists its GPUs."""
        since = self._asking_since
        return since is not None and self._clock.monotonic() - since > self._deadline_s

    @property
    def is_missed(self) -> bool:
        """Whether the driver should answer but does not (AgentStatus.driver_missed)."""
        failed = bool(self._error) and not self._is_absent and not self.is_released
        return not self.asked.is_set() or failed

    @property
    def error(self) -> str:
        """Why there is no GPU data, "" while there is data."""
        if self.is_silent:
            return SILENT
        return RELEASED_TEXT if self.is_released else self._error


def warn_of_persistence(off: int) -> tuple[str, ...]:
    """Returns a warning that `off` GPUs have persistence mode off. Empty if `off` is 0."""
    if not off:
        return ()
    return (
        f"persistence mode is off on {off} GPU{'s' if off > 1 else ''}: each program that opens them waits seconds, "
        "and their counters restart at 0; run nvidia-persistenced",
    )
