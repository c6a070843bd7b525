"""The errors that reading a GPU can raise.

    DeviceError               one call failed; has the call, the NVML name of the error, and the device
      NotSupported            the hardware or driver has no such value: no data, no message
      NoPermission            the driver refuses the call: no data, counted, and logged once with the missing permission
      DeviceLost              the GPU left the bus or needs a reset: all of its series disappear
      DriverChanged           the kernel module was replaced while the library was loaded: the process must restart
    DriverUnavailable         NVML as a whole does not answer: library missing, driver not loaded, init refused

Exceptions of pynvml never leave the backends. They are the `__cause__` of these errors.
"""

from __future__ import annotations

from gpu_exporter.common.errors import ForeignError

DENIED = "NVML_ERROR_NO_PERMISSION"
NOT_READY = "NVML_ERROR_NOT_READY"
NOT_UNIQUE = "NOT_UNIQUE"  # our own error name: two GPUs report one UUID
OUT_OF_RANGE = "OUT_OF_RANGE"  # our own error name: the call succeeded, but its value is implausible


class DeviceError(Exception):
    """A call failed. `call`: name of the NVML function. `error`: name of the NVML constant.

    `once_answered`: this device has answered the same call before, so the missing answer is a fault.
    """

    def __init__(self, call: str, error: str, *, once_answered: bool = False) -> None:
        super().__init__(f"{call} answered {error}")
        self.call = call
        self.error = error
        self.once_answered = once_answered


class NotSupported(DeviceError):
    """This hardware or driver does not report the value. This is expected."""


class NoPermission(DeviceError):
    """The driver refuses the call for this user or container."""


class DeviceLost(DeviceError):
    """The GPU does not answer any more."""


class DriverChanged(DeviceError):
    """The NVML library and the kernel module no longer match, because the driver was upgraded meanwhile."""


class DriverUnavailable(ForeignError):
    """NVML does not answer at all. The text is the reason, for messages.

    - `changed`: the library does not match the kernel module (see DriverChanged).
    - `absent`: the library or the kernel module is missing, which is normal on a host without GPUs. Every other reason
      is a fault on any host.
    """

    def __init__(self, reason: str, *, changed: bool = False, absent: bool = False) -> None:
        super().__init__(reason)
        self.changed = changed
        self.absent = absent


KINDS: dict[str, type[DeviceError]] = {
    "NVML_ERROR_NOT_SUPPORTED": NotSupported,
    "NVML_ERROR_FUNCTION_NOT_FOUND": NotSupported,
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH": NotSupported,  # the driver is older than this structure's version
    "NVML_ERROR_DEPRECATED": NotSupported,  # the driver has dropped the call
    DENIED: NoPermission,
    "NVML_ERROR_GPU_IS_LOST": DeviceLost,
    "NVML_ERROR_RESET_REQUIRED": DeviceLost,
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": DriverChanged,
}


def is_unsupported(error: str) -> bool:
    """Returns whether an error means that hardware or driver lacks the value. Any other error is a failed call."""
    return KINDS.get(error) is NotSupported or error == "NVML_ERROR_NO_DATA"


def device_error(call: str, error: str) -> DeviceError:
    return KINDS.get(error, DeviceError)(call, error)
