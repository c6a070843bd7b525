"""Makes NVML calls for one device. Remembers refused calls, and reports each missing permission once."""

from __future__ import annotations

import logging
from typing import Any

from gpu_exporter.agent.devices.errors import (
    NOT_READY,
    DeviceError,
    DeviceLost,
    DriverChanged,
    NoPermission,
    NotSupported,
    device_error,
)
from gpu_exporter.agent.devices.nvml import constants as nvml
from gpu_exporter.agent.devices.nvml.library import Handle, Library
from gpu_exporter.agent.devices.nvml.support import SupportMatrix

log = logging.getLogger(__name__)
# The permission that a call needs if NVML answers NO_PERMISSION.
GRANTS = {
    "nvmlDeviceGetComputeRunningProcesses": "run as root with hostPID; on MIG also set NVIDIA_MIG_MONITOR_DEVICES=all",
    "nvmlDeviceGetGraphicsRunningProcesses": "run as root with hostPID; on MIG also set NVIDIA_MIG_MONITOR_DEVICES=all",
    "nvmlDeviceGetMemoryInfo": "with MIG on: run as root and set NVIDIA_MIG_MONITOR_DEVICES=all",
    "nvmlDeviceGetMigDeviceHandleByIndex": "set NVIDIA_MIG_MONITOR_DEVICES=all for this container",
    "nvmlGpmMetricsGet": "run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0",
}


class Asker:
    """Makes NVML calls for one device, and remembers refused calls. `handle` may be replaced after the GPU was lost."""

    def __init__(
        self, library: Library, handle: Handle, support: SupportMatrix, label: str, warned: set[str] | None = None
    ) -> None:
        """`warned`: calls for which a missing permission was already reported. All askers of a device share it."""
        self.library = library
        self.handle = handle
        self.support = support
        self.answers = 0
        self._label = label
        self._warned = set[str]() if warned is None else warned

    def __call__(self, call: str, *arguments: Any, about: object = None) -> Any:
        """Makes a call. Returns its answer. `about`: replaces the arguments in the key of a stored refusal."""
        question = (call, about if about is not None else arguments)
        self.support.check(question)
        try:
            answer = self.library.ask(call, self.handle, *arguments)
        except NotSupported as exc:
            self.support.note(question, exc)
            raise
        except NoPermission as exc:
            self.support.note(question, exc)
            if exc.call in self._warned:  # already counted and reported; this is a later retry
                raise NotSupported(exc.call, exc.error) from exc
            self._warn(exc)
            raise
        except DeviceError as exc:
            exc.once_answered = question in self.support.answered
            if not (exc.once_answered or exc.error == NOT_READY or isinstance(exc, DeviceLost | DriverChanged)):
                self.support.note_failure(question, exc)
            raise
        self.answers += 1
        self.support.note_answer(question)
        return answer

    def first(self, *calls: tuple[Any, ...]) -> Any:
        """Returns the answer of the first (call, *arguments) that the driver supports. Raises NotSupported."""
        for call, *arguments in calls[:-1]:
            try:
                return self(call, *arguments)
            except NotSupported as exc:
                if exc.error == "NVML_ERROR_NO_PERMISSION":  # the older call would be refused as well
                    raise
        call, *arguments = calls[-1]
        return self(call, *arguments)

    def _warn(self, exc: NoPermission) -> None:
        self._warned.add(exc.call)
        subject = exc.call.partition("_v")[0]
        grant = GRANTS.get(subject, "run as root")
        log.warning("%s: %s; to get this value, %s", self._label, exc, grant)


def refusal_of(call: str, code: int) -> DeviceError:
    """Returns the exception for the return code of one value. Some devices answer INVALID_ARGUMENT if they lack it."""
    if code == nvml.NVML_ERROR_INVALID_ARGUMENT:
        return NotSupported(call, nvml.error_name(code))
    return device_error(call, nvml.error_name(code))


class Fields:
    """Reads many field values with one call of nvmlDeviceGetFieldValues. Each value has its own return code."""

    CALL = "nvmlDeviceGetFieldValues"

    def __init__(self, ask: Asker) -> None:
        self._ask = ask
        self.errors: list[DeviceError] = []

    def read(self, *wanted: int | tuple[int, int]) -> dict[int | tuple[int, int], float]:
        """Returns the values of these fields by field (id or (id, scope)), without unsupported fields.

        If a single field fails, its error is added to `errors`. Raises DeviceError if the whole call fails.
        """
        support = self._ask.support
        asked = [field for field in wanted if not support.is_refused((self.CALL, field))]
        if not asked:
            return {}
        ids = tuple(field if isinstance(field, tuple) else (field, 0) for field in asked)
        found: dict[int | tuple[int, int], float] = {}
        for field, (code, value) in zip(asked, self._ask(self.CALL, ids), strict=True):
            question = (self.CALL, field)
            if code == nvml.NVML_SUCCESS:
                found[field] = value
                support.note_answer(question)
                continue
            error = refusal_of(self.CALL, code)
            error.once_answered = question in support.answered
            if isinstance(error, NotSupported | NoPermission):
                support.note(question, error)
            elif not error.once_answered:
                support.note_failure(question, error)
            if not isinstance(error, NotSupported):
                self.errors.append(error)
        return found

    def refuse(self, field: int | tuple[int, int]) -> None:
        """Treats a field that no longer answers as unsupported: it is then read only every RETRY_S."""
        self._ask.support.give_up((self.CALL, field), NotSupported(self.CALL, "NVML_ERROR_NO_DATA"))

    def ask_again(self, field: int | tuple[int, int]) -> None:
        """Forgets the refusal of this field. The next `read` reads it again."""
        self._ask.support.forget((self.CALL, field))

    def one(self, field: int) -> float:
        """Returns the value of a single field. Raises NotSupported if it is not available."""
        found = self.read(field)
        if field not in found:
            raise NotSupported(self.CALL, "NVML_ERROR_NOT_SUPPORTED")
        return found[field]
