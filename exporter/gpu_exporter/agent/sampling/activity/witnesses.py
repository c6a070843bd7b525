"""The witnesses: signals of activity beside utilization (engines, GPM, traffic, power). A new witness is one class.

Each witness object belongs to one unit, and keeps the values of earlier cycles that it needs. GPUs and MIG instances
use the same classes. spans.py judges utilization itself, because a utilization value covers a time.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from gpu_exporter.agent.collectors.contract import Cycle
from gpu_exporter.agent.devices.protocol import ENGINES, Gpm, Traffic


class Observation(enum.Enum):
    """The result of a witness for the time since the last cycle."""

    ACTIVE = "active"
    QUIET = "quiet"
    UNKNOWN = "unknown"  # supported, but unknown in this cycle; other quiet witnesses then prove nothing
    ABSENT = "absent"  # this unit does not support the witness, or it has never answered


ACTIVE, QUIET, UNKNOWN, ABSENT = Observation


class Moment(NamedTuple):
    """A unit's values of one cycle, the input of the witnesses. Traffic and energy are counters of the driver.

    `is_instance`: the unit is a MIG instance, for which only GPM has values.
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


FACTS = tuple(name for name in Moment._fields if name != "is_instance")  # fields that Cycle has with the same names


def moment_of(cycle: Cycle) -> Moment:
    return Moment(**{name: getattr(cycle, name) for name in FACTS})


class ActivityRules(NamedTuple):
    """Settings for judging activity, see defaults.yaml.

    - `interval_s`: the sampling interval.
    - `interval_max_s`: the interval for a device whose driver buffers all activity between two cycles.
    - `driver_period_max_s`: the most seconds that one utilization value of the driver covers. NVML documents a sample
      period of 1/6 to 1 s (nvmlUtilization_t).
    """

    interval_s: float
    gap_intervals: int
    power_floor_max_ratio: float
    power_active_step: float
    driver_period_max_s: float = 1.0
    gpm_idle_max_ratio: float = 0.001
    gpm_sm_idle_max_ratio: float = 1e-7
    pcie_idle_max_bytes_per_second: float = 10e6
    nvlink_idle_max_bytes_per_second: float = 1e6
    interval_max_s: float = 0.0


class PowerFloor:
    """Learns the power of the GPU at rest (the floor), in watts. Decides whether a power is clearly above it.

    The floor is the lowest median of three consecutive readings, because a single wrong reading would lower it for
    good, and the GPU would never be idle. The floor never rises, because a rise may be long work.
    """

    READINGS = 3
    LEAST = 0.5  # of the floor: a power below this is a wrong reading, until a median shows that the floor was too high

    def __init__(self, rules: ActivityRules, rest_w: float | None = None) -> None:
        """`rest_w`: the power at rest in watts, if known. Without it, the floor is too high if the GPU works during the
        exporter's start.
        """
        self._rules = rules
        self._recent: deque[float] = deque(maxlen=self.READINGS)
        self._floor = float("inf") if rest_w is None else rest_w

    def is_active(self, power_w: float, limit_w: float) -> bool | None:
        """Returns whether `power_w` is clearly above the floor. None if it is implausibly far below the floor.

        Clearly above: by more than power_active_step, a share of the range from the floor to the limit.
        """
        self._recent.append(power_w)
        if len(self._recent) == self.READINGS:
            self._floor = min(self._floor, sorted(self._recent)[1])
        # Two readings have no median: until there are three, the lower one is used but not remembered.
        learned = min(self._recent) if self._floor == float("inf") else self._floor
        floor = min(learned, self._rules.power_floor_max_ratio * limit_w)
        if power_w < self.LEAST * floor:
            return None
        return power_w > floor + self._rules.power_active_step * (limit_w - floor)


class TrafficRate:
    """Converts the driver's traffic counters, which may wrap, to bytes per second."""

    def __init__(self) -> None:
        self._last: tuple[float, Traffic] | None = None

    span_s = 0.0
    """seconds between the last two calls of `step`"""

    def step(self, traffic: Traffic | None, at: float) -> float | None:
        """Returns the mean bytes per second of both directions together since the last call. None if unknown."""
        last, self._last = self._last, None if traffic is None else (at, traffic)
        if last is None or traffic is None or at <= last[0]:
            return None
        moved, self.span_s = (traffic.rx - last[1].rx, traffic.tx - last[1].tx), at - last[0]
        return sum(moved) / self.span_s if min(moved) >= 0 else None


def in_one_second(mean: float, span_s: float) -> float:
    """Returns the mean rate as if all work of `span_s` seconds had been done in one second.

    Short work between two distant cycles has a low mean, which would otherwise fall below the limit.
    """
    return mean * max(1.0, span_s)


class Witness(Protocol):
    """One witness of one unit. `name`: its label value in gpu_other_activity_seconds_total.

    `is_moment`: the last observation covers only a moment, and may miss work between two observations. The GPU is then
    read every second, unless a ring buffer of the driver with the same name covers the time.
    """

    name: str

    @property
    def is_moment(self) -> bool: ...

    def observe(self, moment: Moment) -> Observation:
        """Judges this cycle's values. Call it once in every cycle, in order of time."""


class Engine:
    """A video, JPEG or optical-flow engine, which has its own NVML call."""

    is_moment = True

    def __init__(self, name: str) -> None:
        self.name = name

    def observe(self, moment: Moment) -> Observation:
        value = moment.engines.get(self.name)
        return ABSENT if value is None else ACTIVE if value > 0.0 else QUIET


class GpmRatio:
    """One ratio of GPM, over the whole time since the last cycle.

    `of_gpus`: the ratio is also a witness for whole GPUs, not only for MIG instances. The memory ratio is not, because
    it may stay above the limit while the memory is not in use (NVIDIA/DCGM#65). With it, such a GPU would never be
    idle.
    """

    is_moment = False

    def __init__(self, ratio: str, rules: ActivityRules, *, of_gpus: bool) -> None:
        self.name = f"gpm_{ratio}"
        self._of_gpus = of_gpus
        self._ratio = ratio
        # At rest SM activity is exactly 0 (an H200 in 216 windows), so its limit is lower than that of other ratios.
        self._floor = rules.gpm_sm_idle_max_ratio if ratio == "sm" else rules.gpm_idle_max_ratio

    def observe(self, moment: Moment) -> Observation:
        value: float | None = None
        if self._of_gpus or moment.is_instance:
            value = getattr(moment.gpm, self._ratio, None)
        if value is None or moment.gpm is None:
            return ABSENT
        return ACTIVE if in_one_second(value, moment.gpm.span_s) > self._floor else QUIET


class TrafficAtRest:
    """Learns the traffic of a link at rest. `rate`: bytes per second, None until known.

    - Only readings of about a second are used, because a longer reading may hide a burst.
    - The first rate is the third lowest of ten short readings in a row that do not count as work. After that, the rate
      only falls.
    - If a long cycle has more traffic, the cause is work, or another monitor that has started. Ten new short readings
      are then needed (`is_wanted`), and their rate replaces the old one.
    """

    READINGS, CHOSEN = 10, 2  # a few of the ten may be low because a counter was late
    SHORT_S = 1.5  # a reading up to this length needs no traffic at rest to be judged

    def __init__(self) -> None:
        self.rate: float | None = None
        self.is_wanted = False
        self._short: deque[float] = deque(maxlen=self.READINGS)

    def learn(self, rate: float, span_s: float) -> None:
        """Learns from the mean rate of one cycle. The caller passes only rates that do not count as work."""
        if span_s > self.SHORT_S:
            self._short.clear()
            if self.rate is not None:
                self.rate = min(self.rate, rate)
            return
        self._short.append(rate)
        if len(self._short) == self.READINGS:
            seen = sorted(self._short)[self.CHOSEN]
            self.rate = seen if self.rate is None or self.is_wanted else min(self.rate, seen)
            self.is_wanted = False

    def interrupt(self) -> None:
        """Discards the short readings, because the link worked."""
        self._short.clear()


class LinkTraffic:
    """Traffic over PCIe or NVLink, in bytes per second. The driver's counters and GPM are judged separately.

    - A long cycle is judged as if all of its traffic had moved in one second.
    - A link at rest has traffic too, because reading the GPU moves bytes: 2 to 7 MB/s over the PCIe link of an H200.
      Only the traffic above this rest counts, because otherwise the GPU would never be idle.
    - If the traffic in one second exceeds the limit but the mean does not, the next cycles are short.
    """

    def __init__(self, name: str, floor: float) -> None:
        self.name = name
        self._floor = floor
        self._rate = TrafficRate()
        self._rest = {"counted": TrafficAtRest(), "reported": TrafficAtRest()}  # they do not count the same bytes

    @property
    def is_moment(self) -> bool:
        """Whether the GPU must be read every second, to learn the traffic of the link at rest."""
        return any(each.is_wanted for each in self._rest.values())

    def observe(self, moment: Moment) -> Observation:
        traffic, at = (moment.pcie, moment.pcie_at) if self.name == "pcie" else (moment.nvlink, moment.nvlink_at)
        counted = self._rate.step(traffic, at)
        reported: float | None = getattr(moment.gpm, self.name, None)
        seen = [self._judge("counted", counted, self._rate.span_s)]
        if moment.gpm is not None:
            seen.append(self._judge("reported", reported, moment.gpm.span_s))
        if traffic is not None and counted is None:
            seen.append(UNKNOWN)  # the counter needs a second reading before it can confirm a quiet GPM
        return next((each for each in (ACTIVE, UNKNOWN, QUIET) if each in seen), ABSENT)

    def _judge(self, source: str, mean: float | None, span_s: float) -> Observation:
        if mean is None:
            return ABSENT
        rest = self._rest[source]
        if mean > self._floor:
            rest.interrupt()
            return ACTIVE
        rest.learn(mean, span_s)
        if in_one_second(mean - (rest.rate or 0.0), span_s) <= self._floor:
            return QUIET
        if span_s <= rest.SHORT_S:  # a second and a little: too much for a second
            return ACTIVE
        rest.is_wanted = True
        return UNKNOWN if rest.rate is None else ACTIVE


class Power:
    """The GPU's power: active if its present value or its mean since the last cycle is clearly above rest."""

    name = "power"

    def __init__(self, rules: ActivityRules, rest_w: float | None = None) -> None:
        self._floor = PowerFloor(rules, rest_w)
        self._last_energy: tuple[float, float] | None = None
        self.is_moment = True

    def observe(self, moment: Moment) -> Observation:
        power = self._highest(moment)
        if power is None or not moment.power_limit_w:
            return ABSENT
        is_active = self._floor.is_active(power, moment.power_limit_w)
        return UNKNOWN if is_active is None else ACTIVE if is_active else QUIET

    def _highest(self, moment: Moment) -> float | None:
        """Returns the higher of the present power and the mean power since the last cycle, in watts.

        The mean also shows work that ended before this reading. Before Ampere and on GA100, the present power is only a
        momentary value.
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
    """The witnesses of one unit, kept from cycle to cycle."""

    def __init__(self, rules: ActivityRules, rest_w: float | None = None) -> None:
        """`rest_w`: the power at rest in watts, None if it is not known."""
        self._all = tuple(Power(rules, rest_w) if make is Power else make(rules) for make in REGISTRY)

    def observe(self, moment: Moment) -> dict[str, Observation]:
        """Returns the observations of the witnesses that this unit supports, by name."""
        seen: dict[str, Observation] = {}
        for witness in self._all:
            observation = witness.observe(moment)
            if observation is not ABSENT:
                seen[witness.name] = observation
        return seen

    def momentary(self, seen: Mapping[str, Observation]) -> set[str]:
        """Returns the names of the witnesses in `seen` whose last observation covers only a moment (`is_moment`)."""
        return {witness.name for witness in self._all if witness.is_moment and witness.name in seen}


def active_names(seen: Mapping[str, Observation]) -> tuple[str, ...]:
    return tuple([name for name, observation in seen.items() if observation is ACTIVE])
