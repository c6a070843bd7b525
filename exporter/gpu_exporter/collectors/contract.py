"""What a collector is, and the cycle that it fills.

Three outcomes, everywhere: a value, no data (NotSupported: quiet, the series is absent), failed (counted per call,
the series is absent). A failure costs one field; DeviceLost costs the device and passes through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from gpu_exporter.devices.errors import DeviceError, DeviceLost, NotSupported
from gpu_exporter.devices.protocol import Device, UtilizationSample
from gpu_exporter.model import Family, Sample

T = TypeVar("T")


class InstanceCycle(NamedTuple):
    """What was read of one MIG instance. `activity` is a ratio, None without a source."""

    uuid: str
    mig: str
    profile: str
    sm_slices: int
    samples: tuple[Sample, ...]
    activity: float | None


@dataclass(slots=True)
class Cycle:
    """One pass over one device: collectors put samples here, and the few raw facts that activity is made of."""

    device: Device
    samples_since_wall: float
    samples: list[Sample] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)
    driver_samples: Sequence[UtilizationSample] = ()
    utilization: float | None = None
    encoder: float | None = None
    decoder: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    instances: list[InstanceCycle] = field(default_factory=list)
    instances_known: bool = True

    def read(self, ask: Callable[[], T]) -> T | None:
        """The answer, or None: quietly when the hardware does not tell, counted when the call failed."""
        try:
            return ask()
        except DeviceLost:
            raise
        except NotSupported:
            return None
        except DeviceError as exc:
            self.errors.append((exc.call, exc.error))
            return None

    def add(self, family: Family, value: float | None, *labels: str) -> None:
        """Publish one value; None and NaN are no data."""
        if value is not None and not math.isnan(value):
            self.samples.append(Sample(family, labels, float(value)))


class Collector(NamedTuple):
    """A named, switchable subject. `collect` fills the cycle."""

    name: str
    families: tuple[Family, ...]
    collect: Callable[[Cycle], None]
    instance_families: tuple[Family, ...] = ()
