"""Defines a collector, and the cycle (one pass over one GPU) in which collectors store their values.

Every read has one of three results: a value; no data (NotSupported: not logged); or a failure, which is counted.
Without a value, the series is absent. A failure affects only one value. If a call reports a lost device or a changed
driver, and most other calls confirm it, the exception ends the whole cycle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from gpu_exporter.agent.collectors.plausible import ABSURD
from gpu_exporter.agent.devices.errors import OUT_OF_RANGE, DeviceError, DeviceLost, DriverChanged, NotSupported
from gpu_exporter.agent.devices.protocol import Device, Gpm, Traffic, UtilizationSample
from gpu_exporter.common.model.metrics import Family, Sample
from gpu_exporter.common.model.readings import ProcessList

T = TypeVar("T")


class Totals:
    """Data of one device that collectors keep between cycles: running sums, and the last values of counters."""

    def __init__(self) -> None:
        self._sums: dict[Hashable, float] = {}
        self._last: dict[Hashable, float] = {}

    def grow(self, key: Hashable, amount: float) -> float:
        """Adds to a sum that starts at 0. Returns the new sum."""
        self._sums[key] = self._sums.get(key, 0.0) + amount
        return self._sums[key]

    def sum_of(self, key: Hashable) -> float | None:
        """Returns a sum, None before the first `grow`."""
        return self._sums.get(key)

    def step(self, key: Hashable, value: float) -> float | None:
        """Returns the increase of a driver counter since the last call. None at the first call, and if it fell."""
        last, self._last[key] = self._last.get(key), value
        return value - last if last is not None and value >= last else None

    def last(self, key: Hashable) -> float | None:
        """Returns the value of the last step, None before the first step."""
        return self._last.get(key)

    def forget_step(self, *keys: Hashable) -> None:
        """Forgets the last values of these counters. The next `step` of each returns None."""
        for key in keys:
            self._last.pop(key, None)

    def lowest(self, key: Hashable, value: float) -> float:
        """Returns the lowest value so far, including this value."""
        self._last[key] = min(value, self._last.get(key, value))
        return self._last[key]

    def forget_last(self) -> None:
        """Forgets the last values of all counters, but keeps the sums. The next `step` of each counter returns None."""
        self._last.clear()

    def forget(self, gone: Callable[[Hashable], bool]) -> None:
        """Forgets the sums and last values of every key for which `gone(key)` is true."""
        for known in (self._sums, self._last):
            for key in [key for key in known if gone(key)]:
                del known[key]


class InstanceCycle(NamedTuple):
    """Values of one MIG instance.

    - `gpm`: None if GPM is not supported, and until its first window is complete.
    - `has_memory`: the memory in `samples` belongs to this compute instance alone.
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
    """One pass over one device. Collectors store their samples here, and the raw values that show activity.

    A value that covers a period is stored with the time (`now()`) at which it was read, because a later call in the
    same cycle may be slow.
    """

    device: Device
    samples_since: Mapping[str, float]  # wall time of the newest known ring entry, by "utilization" or engine
    now: Callable[[], float]
    totals: Totals
    begin: float | None = None  # monotonic time of the first driver call; None: the cycle took no time
    witnessed_at: float | None = None  # monotonic time of the last witness; None: the cycle took no time
    samples: list[Sample] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)
    remarks: list[tuple[str, str]] = field(default_factory=list)  # counted, but not failures: values out of range
    answers: int = 0  # calls that did not fail
    withdrawn: int = 0  # calls that failed now, but succeeded before
    driver_samples: Sequence[UtilizationSample] = ()
    engine_samples: dict[str, Sequence[UtilizationSample]] = field(default_factory=dict)
    utilization: float | None = None
    utilization_at: float = 0.0
    engines: dict[str, float] = field(default_factory=dict)
    gpm: Gpm | None = None
    gpm_stuck: set[str] = field(
        default_factory=set
    )  # the board ("") and instances whose cycle counters do not increase
    witness_missing: bool = False  # a supported witness failed now, so quiet witnesses prove nothing
    pcie: Traffic | None = None
    pcie_at: float = 0.0
    nvlink: Traffic | None = None
    nvlink_at: float = 0.0
    power_w: float | None = None
    power_limit_w: float | None = None
    default_limit_w: float | None = None
    energy_j: float | None = None
    energy_at: float = 0.0
    instances: list[InstanceCycle] = field(default_factory=list)
    instances_known: bool = True
    processes: ProcessList | None = None

    def read(self, ask: Callable[[], T]) -> T | None:
        """Returns the answer of `ask`, None if the call fails or the value is not supported. Counts failures."""
        try:
            answer = ask()
        except (DeviceLost, DriverChanged) as exc:
            if not self.device.is_alive():
                raise
            self.note_failure(exc)  # other calls still answer, so only this value is missing
            return None
        except NotSupported:
            return None
        except DeviceError as exc:
            self.note_failure(exc)
            return None
        self.answers += 1
        return answer

    def note_failure(self, exc: DeviceError) -> None:
        """Counts a failed call, or a failed value of a call."""
        self.errors.append((exc.call, exc.error))
        self.withdrawn += exc.once_answered

    def value(self, family: Family) -> float | None:
        """Returns the present value of a family without labels, from this cycle or an earlier one. None if missing."""
        return next((sample.value for sample in self.samples if sample.family is family), None)

    def admit(self, family: Family, value: float | None, *, witness: bool = False) -> float | None:
        """Returns the driver's value if it is plausible for its family, otherwise None. None and NaN count as missing.

        Counts a value outside the family's range as implausible. `witness`: the value is a witness (a signal of
        activity), so that activity is unknown without it.
        """
        if value is None or math.isnan(value):
            return None
        if family.plausible is None or family.plausible.holds(value):
            return value
        self.note_implausible(family, witness=witness)
        return None

    def note_implausible(self, family: Family, *, witness: bool = False) -> None:
        """Counts an implausible value, under the driver call in the family's `source`.

        `witness`: the value is a witness (a signal of activity), so that activity is unknown without it.
        """
        self.remarks.append((family.source.partition(" ")[0].rstrip(",") or family.name, OUT_OF_RANGE))
        self.witness_missing |= witness

    def admit_traffic(self, received: Family, sent: Family, traffic: Traffic | None) -> Traffic | None:
        """Publishes both directions of a link's traffic. Returns the traffic, or None if a direction is missing."""
        if traffic is None:
            return None
        rx, tx = self.admit(received, traffic.rx, witness=True), self.admit(sent, traffic.tx, witness=True)
        self.samples += [
            Sample(family, (), value) for family, value in ((received, rx), (sent, tx)) if value is not None
        ]
        return None if rx is None or tx is None else traffic

    def sample(self, family: Family, value: float | None, *labels: str) -> list[Sample]:
        """Returns a list with one sample, empty if the value is missing or implausible."""
        admitted = self.admit(family, value)
        return [] if admitted is None else [Sample(family, labels, float(admitted))]

    def add(self, family: Family, value: float | None, *labels: str, witness: bool = False) -> float | None:
        """Publishes one value of the GPU. Returns it, None if missing or implausible.

        `witness`: the value is a witness (a signal of activity), so that activity is unknown without it.
        """
        admitted = self.admit(family, value, witness=witness)
        self.put(family, admitted, *labels)
        return admitted

    def add_below(self, family: Family, value: float | None, most: float | None) -> None:
        """Publishes one value of the GPU, unless it exceeds ABSURD times the board's own limit or maximum (`most`)."""
        if value is not None and most and value > ABSURD * most:
            self.note_implausible(family)
        else:
            self.add(family, value)

    def put(self, family: Family, admitted: float | None, *labels: str) -> None:
        """Publishes a value that `admit` has returned, unless it is None."""
        if admitted is not None:
            self.samples.append(Sample(family, labels, float(admitted)))


# Interval of values that are not witnesses: short enough for a scrape every 15 s.
SLOW_INTERVAL_S = 5.0


class Collector(NamedTuple):
    """A named group of metric families that a user can switch off.

    - `collect`: fills the cycle. None if the families do not come from a cycle.
    - `every_s`: seconds between two calls of `collect`, 0 for every cycle. The samples are kept until the next call.
    - `witness`: the values are witnesses. If a call that was answered before fails now, activity is unknown.
    """

    name: str
    families: tuple[Family, ...]
    collect: Callable[[Cycle], None] | None
    instance_families: tuple[Family, ...] = ()
    every_s: float = 0.0
    witness: bool = False
