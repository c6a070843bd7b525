"""How a read of the hardware can fail.

    DeviceError               one call failed; carries the call, the NVML name of the error, and the device
      NotSupported            the hardware or driver has no such value: no data, quiet
      NoPermission            we may not ask: no data, counted and logged once with what would grant it
      DeviceLost              the GPU left the bus or needs a reset: all of its series are withdrawn
      DriverChanged           the kernel module was replaced under the loaded library: only a new process helps
    DriverUnavailable         NVML as a whole does not answer: library missing, driver not loaded, init refused

Exceptions of the binding never leave the backends; they are the `__cause__` of these.
"""

from __future__ import annotations

DENIED = "NVML_ERROR_NO_PERMISSION"
OUT_OF_RANGE = "OUT_OF_RANGE"  # in place of NVML's name: the call succeeded, with a value that cannot be true


class DeviceError(Exception):
    """A call failed. `call` is NVML's function name, `error` NVML's constant name.

    `once_answered`: this device has answered the same question before, so that an answer is missing now.
    """

    def __init__(self, call: str, error: str, *, once_answered: bool = False) -> None:
        super().__init__(f"{call} answered {error}")
        self.call = call
        self.error = error
        self.once_answered = once_answered


class NotSupported(DeviceError):
    """Expected: this hardware or driver does not report it."""


class NoPermission(DeviceError):
    """The driver refuses the answer to this user or container."""


class DeviceLost(DeviceError):
    """The GPU does not answer any more."""


class DriverChanged(DeviceError):
    """Library and kernel module no longer match: the driver was upgraded while we ran."""


class DriverUnavailable(Exception):
    """NVML does not answer at all. The text says why and is fit for people.

    `changed`: the reason is a library that does not match the kernel module (see DriverChanged). `absent`: there is no
    library or no kernel module, which is no fault where there is no GPU; every other reason is one anywhere.
    """

    def __init__(self, reason: str, *, changed: bool = False, absent: bool = False) -> None:
        super().__init__(reason)
        self.changed = changed
        self.absent = absent


KINDS: dict[str, type[DeviceError]] = {
    "NVML_ERROR_NOT_SUPPORTED": NotSupported,
    "NVML_ERROR_FUNCTION_NOT_FOUND": NotSupported,
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH": NotSupported,  # a driver older than our version of a structure
    "NVML_ERROR_DEPRECATED": NotSupported,  # a driver that has given the call up
    DENIED: NoPermission,
    "NVML_ERROR_GPU_IS_LOST": DeviceLost,
    "NVML_ERROR_RESET_REQUIRED": DeviceLost,
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": DriverChanged,
}


def is_unsupported(error: str) -> bool:
    """Whether an error says that hardware or driver do not have the value, and not that the call has failed."""
    return KINDS.get(error) is NotSupported or error == "NVML_ERROR_NO_DATA"


def device_error(call: str, error: str) -> DeviceError:
    """The exception for an NVML error by its name."""
    return KINDS.get(error, DeviceError)(call, error)
