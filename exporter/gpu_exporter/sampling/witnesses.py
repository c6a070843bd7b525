"""The witnesses of idleness beside utilization: engines, GPM, traffic and power. A new one is one class here.

Each is an object of one unit, which remembers what it must of earlier cycles. Whole GPUs and MIG instances are given
the same; what a unit does not have is absent. Utilization itself is judged in activity.py, since it covers time.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from gpu_exporter.collectors.contract import Cycle
from gpu_exporter.devices.protocol import ENGINES, Gpm, Traffic


class Observation(enum.Enum):
    """What a witness says of the time since the last cycle."""

    ACTIVE = "active"
    QUIET = "quiet"
    UNKNOWN = "unknown"  # known to exist, and not known before the next cycle: quiet others prove nothing
    ABSENT = "absent"  # this unit has no such witness, or it has never answered


ACTIVE, QUIET, UNKNOWN, ABSENT = Observation


class Moment(NamedTuple):
    """What one cycle read of a unit that a witness may look at. Traffic and energy are counters of the driver.

    `is_instance`: a MIG instance, of which only GPM reports.
    """

    gpm: Gpm | None = None
    is_instance: bool = False
    engines: Mapping[str, float] = {}
    pcie: Traffic | None = None
    pcie_at: float = 0.0
    nvlink: Traffic | None = None
    nvlink_at: float = 0.0
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    energy_at: float = 0.0


FACTS = tuple(name for name in Moment._fields if name != "is_instance")  # which Cycle has under the same names


def moment_of(cycle: Cycle) -> Moment:
    """What a cycle read of the whole GPU."""
    return Moment(**{name: getattr(cycle, name) for name in FACTS})


class ActivityRules(NamedTuple):
    """`interval_s`, `interval_max_s`: sampling interval, and the one of a device whose driver keeps what lies between
    two cycles; see defaults.yaml for the rest.

    `driver_period_max_s`: the longest time that one utilization of the driver stands for; nvmlUtilization_t says that
    its sample period is between 1/6 and 1 s.
    """

    interval_s: float
    gap_intervals: int
    power_floor_max_ratio: float
    power_active_step: float
    driver_period_max_s: float = 1.0
    gpm_idle_max_ratio: float = 0.001
    pcie_idle_max_bytes_per_second: float = 10e6
    nvlink_idle_max_bytes_per_second: float = 1e6
    interval_max_s: float = 0.0


class PowerFloor:
    """Learns the power of the GPU at rest, and judges whether a draw is clearly above it.

    The floor never rises, so that long work is not taken for rest. It is the lowest median of three readings in a row:
    a single wrong reading would otherwise lower it for good, and the GPU would never be idle again.
    """

    READINGS = 3
    LEAST = (
        0.5  # of the floor: what is drawn at less is a wrong reading, until a median says that the floor was too high
    )

    def __init__(self, rules: ActivityRules) -> None:
        self._rules = rules
        self._recent: deque[float] = deque(maxlen=self.READINGS)
        self._floor = float("inf")

    def is_active(self, power_w: float, limit_w: float) -> bool | None:
        """True when `power_w` lies more than a step of the way from the floor to the limit.

        None when it is so far below the floor that it cannot be true.
        """
        self._recent.append(power_w)
        if len(self._recent) == self.READINGS:
            self._floor = min(self._floor, sorted(self._recent)[1])
        # Two readings have no median: until there are three the lower one stands in, and is not remembered.
        learned = min(self._recent) if self._floor == float("inf") else self._floor
        floor = min(learned, self._rules.power_floor_max_ratio * limit_w)
        if power_w < self.LEAST * floor:
            return None
        return power_w > floor + self._rules.power_active_step * (limit_w - floor)


class TrafficRate:
    """Bytes per second from counters of the driver that may wrap."""

    def __init__(self) -> None:
        self._last: tuple[float, Traffic] | None = None

    def step(self, traffic: Traffic | None, at: float) -> float | None:
        """The most that a second since the last step can have had, both directions together; None while not known."""
        last, self._last = self._last, None if traffic is None else (at, traffic)
        if last is None or traffic is None or at <= last[0]:
            return None
        moved, span_s = (traffic.rx - last[1].rx, traffic.tx - last[1].tx), at - last[0]
        return in_one_second(sum(moved) / span_s, span_s) if min(moved) >= 0 else None


def in_one_second(mean: float, span_s: float) -> float:
    """The mean of a second in which everything was done that `mean` says of a longer time.

    Work that is short may be thinned out over the time since the last cycle, and must not fall below a floor by that.
    """
    return mean * max(1.0, span_s)


class Witness(Protocol):
    """One witness of one unit. `name` is its label value in gpu_other_activity_seconds_total.

    `is_moment`: whether what it said last is of a moment. Work between two cycles may then be over before it looks, and
    the GPU is read each second, unless a ring of the driver of this name has kept what lay between.
    """

    name: str
    is_moment: bool

    def observe(self, moment: Moment) -> Observation:
        """What it says of this cycle; called once each cycle, in order."""


class Engine:
    """A fixed-function engine by NVML's own call: encoder, decoder, JPEG, optical flow."""

    is_moment = True

    def __init__(self, name: str) -> None:
        self.name = name

    def observe(self, moment: Moment) -> Observation:
        value = moment.engines.get(self.name)
        return ABSENT if value is None else ACTIVE if value > 0.0 else QUIET


class GpmRatio:
    """A ratio of GPM, over the whole time since the last cycle.

    `of_gpus`: of whole GPUs too. Those have witnesses besides GPM, and memory that nobody uses can read above the floor
    for ever (NVIDIA/DCGM#65), which would keep a GPU from ever being idle.
    """

    is_moment = False

    def __init__(self, ratio: str, rules: ActivityRules, *, of_gpus: bool) -> None:
        self.name = f"gpm_{ratio}"
        self._of_gpus = of_gpus
        self._ratio = ratio
        self._floor = rules.gpm_idle_max_ratio

    def observe(self, moment: Moment) -> Observation:
        value: float | None = None
        if self._of_gpus or moment.is_instance:
            value = getattr(moment.gpm, self._ratio, None)
        if value is None or moment.gpm is None:
            return ABSENT
        return ACTIVE if in_one_second(value, moment.gpm.span_s) > self._floor else QUIET


class LinkTraffic:
    """Bytes over PCIe or NVLink: of the driver's counters and of GPM the higher, since a counter may have wrapped."""

    is_moment = False

    def __init__(self, name: str, floor: float) -> None:
        self.name = name
        self._floor = floor
        self._rate = TrafficRate()

    def observe(self, moment: Moment) -> Observation:
        traffic, at = (moment.pcie, moment.pcie_at) if self.name == "pcie" else (moment.nvlink, moment.nvlink_at)
        counted = self._rate.step(traffic, at)
        reported: float | None = getattr(moment.gpm, self.name, None)
        if (counted or 0.0) > self._floor:
            return ACTIVE
        if reported and moment.gpm is not None and in_one_second(reported, moment.gpm.span_s) > self._floor:
            return ACTIVE
        if traffic is not None and counted is None:
            return UNKNOWN  # a counter that needs a second reading leaves open whether a quiet GPM is right
        return ABSENT if counted is None and reported is None else QUIET


class Power:
    """Power clearly above the learned power at rest, now or as the mean since the last cycle."""

    name = "power"

    def __init__(self, rules: ActivityRules) -> None:
        self._floor = PowerFloor(rules)
        self._last_energy: tuple[float, float] | None = None
        self.is_moment = True

    def observe(self, moment: Moment) -> Observation:
        power = self._highest(moment)
        if power is None or not moment.power_limit_w:
            return ABSENT
        is_active = self._floor.is_active(power, moment.power_limit_w)
        return UNKNOWN if is_active is None else ACTIVE if is_active else QUIET

    def _highest(self, moment: Moment) -> float | None:
        """The power now, or the mean since the last cycle where that is higher: work between two reads costs energy,
        though the moment of the read (power is a moment's value before Ampere and on GA100) may be a quiet one.
        """
        before = self._last_energy
        self._last_energy = None if moment.energy_j is None else (moment.energy_at, moment.energy_j)
        self.is_moment = True
        if before is None or moment.energy_j is None or moment.energy_at <= before[0] or moment.energy_j < before[1]:
            return moment.power_w
        self.is_moment = False
        return max(moment.power_w or 0.0, (moment.energy_j - before[1]) / (moment.energy_at - before[0]))


GPM_NAMES = frozenset(f"gpm_{ratio}" for ratio in ("graphics", "sm", "tensor", "dram", "engines"))
REGISTRY: tuple[Callable[[ActivityRules], Witness], ...] = (
    *(lambda _, name=name: Engine(name) for name in ENGINES),
    partial(GpmRatio, "graphics", of_gpus=True),
    partial(GpmRatio, "sm", of_gpus=True),
    partial(GpmRatio, "tensor", of_gpus=False),
    partial(GpmRatio, "dram", of_gpus=False),
    partial(GpmRatio, "engines", of_gpus=False),
    lambda rules: LinkTraffic("pcie", rules.pcie_idle_max_bytes_per_second),
    lambda rules: LinkTraffic("nvlink", rules.nvlink_idle_max_bytes_per_second),
    Power,
)


class Witnesses:
    """The witnesses of one unit, from cycle to cycle."""

    def __init__(self, rules: ActivityRules) -> None:
        self._all = tuple(make(rules) for make in REGISTRY)

    def observe(self, moment: Moment) -> dict[str, Observation]:
        """By name, what each witness says that this unit has."""
        seen: dict[str, Observation] = {}
        for witness in self._all:
            observation = witness.observe(moment)
            if observation is not ABSENT:
                seen[witness.name] = observation
        return seen

    def momentary(self, seen: Mapping[str, Observation]) -> set[str]:
        """Of those that were `seen` last, the ones that spoke of a moment alone."""
        return {witness.name for witness in self._all if witness.is_moment and witness.name in seen}


def active_names(seen: Mapping[str, Observation]) -> tuple[str, ...]:
    """Those that saw activity."""
    return tuple([name for name, observation in seen.items() if observation is ACTIVE])
