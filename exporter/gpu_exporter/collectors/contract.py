"""What a collector is, and the cycle that it fills.

Three outcomes, everywhere: a value, no data (NotSupported: quiet, the series is absent), failed (counted per call,
the series is absent). A failure costs one field; a lost device or a changed driver, which most calls confirm, costs the
device and passes through.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from gpu_exporter.devices.errors import OUT_OF_RANGE, DeviceError, DeviceLost, DriverChanged, NotSupported
from gpu_exporter.devices.protocol import Device, Gpm, Traffic, UtilizationSample
from gpu_exporter.model.metrics import Family, Sample
from gpu_exporter.model.readings import ProcessList

T = TypeVar("T")


class Totals:
    """What collectors remember of one device from cycle to cycle: running sums, and last values of counters."""

    def __init__(self) -> None:
        self._sums: dict[Hashable, float] = {}
        self._last: dict[Hashable, float] = {}

    def grow(self, key: Hashable, amount: float) -> float:
        """Add to a sum that starts at 0; the new sum."""
        self._sums[key] = self._sums.get(key, 0.0) + amount
        return self._sums[key]

    def sum_of(self, key: Hashable) -> float | None:
        """A sum, None when nothing was added to it yet."""
        return self._sums.get(key)

    def step(self, key: Hashable, value: float) -> float | None:
        """How far a counter of the driver has gone since last time; None at first, and when it fell."""
        last, self._last[key] = self._last.get(key), value
        return value - last if last is not None and value >= last else None

    def last(self, key: Hashable) -> float | None:
        """The value of the last step, None when there was none."""
        return self._last.get(key)

    def forget_step(self, *keys: Hashable) -> None:
        """Drop the last values of these counters: their next step is a first one."""
        for key in keys:
            self._last.pop(key, None)

    def lowest(self, key: Hashable, value: float) -> float:
        """The lowest value so far."""
        self._last[key] = min(value, self._last.get(key, value))
        return self._last[key]

    def forget_last(self) -> None:
        """Drop the last values, but no sum: the next step of each counter is a first one."""
        self._last.clear()

    def forget(self, gone: Callable[[Hashable], bool]) -> None:
        """Drop what belongs to somebody who is gone."""
        for known in (self._sums, self._last):
            for key in [key for key in known if gone(key)]:
                del known[key]


class InstanceCycle(NamedTuple):
    """What was read of one MIG instance. `gpm` is None without a source, and while its first window still grows.

    `has_memory`: that of its samples is its own, and not shared with other compute instances.
    """

    uuid: str
    mig: str
    profile: str
    sm_slices: float
    samples: tuple[Sample, ...]
    gpm: Gpm | None
    gpm_at: float
    energy_j: float | None
    placement: tuple[int, int] | None = None
    has_memory: bool = True


@dataclass(slots=True)
class Cycle:
    """One pass over one device: collectors put samples here, and the few raw facts that activity is made of.

    A fact that stands for a stretch of time comes with the moment (`now()`) at which it was read: a later call of the
    same cycle may have taken long.
    """

    device: Device
    samples_since: Mapping[str, float]  # wall time of the newest ring entry that is known, by "utilization" or engine
    now: Callable[[], float]
    totals: Totals
    begin: float | None = None  # when the first question was asked, monotonic; None: the cycle took no time
    witnessed_at: float | None = None  # when the last witness was read, monotonic; None: the cycle took no time
    samples: list[Sample] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)
    remarks: list[tuple[str, str]] = field(default_factory=list)  # counted, but no failure: values out of range
    answers: int = 0  # questions that did not fail
    withdrawn: int = 0  # questions that failed now and were answered before
    driver_samples: Sequence[UtilizationSample] = ()
    engine_samples: dict[str, Sequence[UtilizationSample]] = field(default_factory=dict)
    utilization: float | None = None
    utilization_at: float = 0.0
    engines: dict[str, float] = field(default_factory=dict)
    gpm: Gpm | None = None
    gpm_stuck: set[str] = field(default_factory=set)  # the board ("") and instances whose cycle counters do not move
    witness_missing: bool = False  # one that is available otherwise failed this time: quiet others prove nothing
    pcie: Traffic | None = None
    pcie_at: float = 0.0
    nvlink: Traffic | None = None
    nvlink_at: float = 0.0
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    energy_at: float = 0.0
    instances: list[InstanceCycle] = field(default_factory=list)
    instances_known: bool = True
    processes: ProcessList | None = None

    def read(self, ask: Callable[[], T]) -> T | None:
        """The answer, or None: quietly when the hardware does not have it, counted when the call failed."""
        try:
            answer = ask()
        except (DeviceLost, DriverChanged) as exc:
            if not self.device.is_alive():
                raise
            self.note_failure(exc)  # one call says so, and the others answer: it costs what it was asked for
            return None
        except NotSupported:
            return None
        except DeviceError as exc:
            self.note_failure(exc)
            return None
        self.answers += 1
        return answer

    def note_failure(self, exc: DeviceError) -> None:
        """Count a call, or one value of a call, that failed."""
        self.errors.append((exc.call, exc.error))
        self.withdrawn += exc.once_answered

    def value(self, family: Family) -> float | None:
        """What this cycle publishes of a family without labels, or what still stands of an earlier one."""
        return next((sample.value for sample in self.samples if sample.family is family), None)

    def admit(self, family: Family, value: float | None, *, witness: bool = False) -> float | None:
        """A value of the driver as far as it can be one of its family; None and NaN are no data.

        What is out of the family's range is no data either, and counted. `witness`: idleness rests on it, so a value
        that is none makes the moment unknown.
        """
        if value is None or math.isnan(value):
            return None
        if family.plausible is None or family.plausible.holds(value):
            return value
        self.note_implausible(family, witness=witness)
        return None

    def note_implausible(self, family: Family, *, witness: bool = False) -> None:
        """Count a value that cannot be true, by the call that the family names as its source."""
        self.remarks.append((family.source.partition(" ")[0].rstrip(",") or family.name, OUT_OF_RANGE))
        self.witness_missing |= witness

    def admit_traffic(self, received: Family, sent: Family, traffic: Traffic | None) -> Traffic | None:
        """Publish both directions of a witness; the traffic, unless one of them is no data."""
        if traffic is None:
            return None
        rx, tx = self.admit(received, traffic.rx, witness=True), self.admit(sent, traffic.tx, witness=True)
        self.samples += [
            Sample(family, (), value) for family, value in ((received, rx), (sent, tx)) if value is not None
        ]
        return None if rx is None or tx is None else traffic

    def sample(self, family: Family, value: float | None, *labels: str) -> list[Sample]:
        """One value as a sample, none when it is no data."""
        admitted = self.admit(family, value)
        return [] if admitted is None else [Sample(family, labels, float(admitted))]

    def add(self, family: Family, value: float | None, *labels: str) -> None:
        """Publish one value of the GPU, unless it is no data."""
        self.samples += self.sample(family, value, *labels)


# What no witness of idleness rests on is read less often: a scrape each 15 s sees it as fresh.
SLOW_INTERVAL_S = 5.0


class Collector(NamedTuple):
    """A named, switchable subject.

    `collect` fills the cycle, every `every_s` seconds (0 is each cycle); in between its samples stand. None when what
    it publishes does not come from a cycle. `default`: on, unless switched off. `witness`: idleness rests on it, so a
    call of it that fails, and was answered before, makes the moment unknown.
    """

    name: str
    families: tuple[Family, ...]
    collect: Callable[[Cycle], None] | None
    instance_families: tuple[Family, ...] = ()
    every_s: float = 0.0
    default: bool = True
    witness: bool = False
