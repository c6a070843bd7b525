"""How a read of the hardware can fail.

    DeviceError               one call failed; carries the call, the NVML name of the error, and the device
      NotSupported            the hardware or driver has no such value: no data, quiet
      DeviceLost              the GPU left the bus or needs a reset: all of its series are withdrawn
    DriverUnavailable         NVML as a whole does not answer: library missing, driver not loaded, init refused

Exceptions of the binding never leave the backends; they are the `__cause__` of these.
"""

from __future__ import annotations


class DeviceError(Exception):
    """A call failed. `call` is NVML's function name, `error` NVML's constant name."""

    def __init__(self, call: str, error: str) -> None:
        super().__init__(f"{call} answered {error}")
        self.call = call
        self.error = error


class NotSupported(DeviceError):
    """Expected: this hardware or driver does not tell."""


class DeviceLost(DeviceError):
    """The GPU does not answer any more."""


class DriverUnavailable(Exception):
    """NVML does not answer at all. The text says why and is fit for people."""
