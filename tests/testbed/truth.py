"""A GPU whose true work is known, behind a driver that misbehaves: for the fuzzer of sampling and ledger.

Work is a list of intervals that do not overlap, each of one kind. The driver reports it as NVML would (a ring of
periods, rates over the last complete period, moments, counters, GPM windows), with the faults of real drivers: late,
duplicate or lost entries, calls that fail or are slow, invalid values, GPM that stops or reads 0, and clocks that
differ. Each answer is drawn from the run's own random numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from gpu_exporter.agent.devices.errors import DeviceError, NotSupported
from gpu_exporter.agent.devices.protocol import (
    Device,
    Gpm,
    Instance,
    InstanceIdentity,
    Memory,
    Pcie,
    Rates,
    Traffic,
    UtilizationSample,
)
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.model.units import DeviceIdentity

SENTINELS = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF, -1.0)
KINDS = ("kernel", "encoder", "copy")
ENGINE_PERIOD_S = 1.0
POWER_PERIOD_S = 1.0
GLITCHES_APART = 3  # readings: at most one of three in a row is wrong


class Work(NamedTuple):
    """Seconds since the start of the run."""

    start: float
    end: float
    kind: str


class Driver(NamedTuple):
    """The properties of driver and board, and their faults until `calm_from`; shares are probabilities."""

    source: str  # ring, rate or mig
    period_s: float
    has_gpm: bool
    has_cycles: bool
    has_energy: bool
    kernels_draw_power: bool
    rest_w: float
    limit_w: float
    clock_lead_s: float
    stamp_jitter_s: float
    clock_goes_back: bool
    calm_from: float
    lag_s: float = 0.0
    loses: float = 0.0
    duplicates: float = 0.0
    fails: float = 0.0
    nonsense: float = 0.0
    glitches: float = 0.0  # single power readings of 0 or 1 W
    stalls: float = 0.0  # calls that take up to 2.5 s
    gpm_lies: str = ""  # stuck, zero
    lies: Sequence[tuple[float, float]] = ()
    has_engine_ring: bool = False
    ring_keeps_s: float = 20.0


class TrueDevice(Device):
    """A device whose answers are derived from the true work."""

    def __init__(self, work: Sequence[Work], driver: Driver, clock: ManualClock, random: Random) -> None:
        self.work, self.driver, self.clock, self.random = work, driver, clock, random
        self.answers = 0
        self.identity = DeviceIdentity(
            0, "GPU-0", "NVIDIA H100", "1", "0000:00", 0, "enabled" if driver.source == "mig" else "disabled"
        )
        self._start = clock.monotonic()
        self._told: set[str] = set()
        self._to_lose = 0  # entries that are still to be lost
        self._steady = 0  # correct power readings since the last wrong reading
        # The time from which an entry can be read, the entry, and the encoder's entry with the same stamp.
        self._ring: list[tuple[float, UtilizationSample, UtilizationSample]] = []
        self._periods = 0
        self._gpm_at: dict[str, float] = {}
        self._frozen_cycles: dict[str, float] = {}
        self.gpm_windows: dict[str, tuple[float, float]] = {}  # the last window that was read, by subject

    def now(self) -> float:
        return self.clock.monotonic() - self._start

    def busy(self, start: float, end: float, *kinds: str) -> float:
        """Seconds of work of these kinds (without kinds: of any kind) in (start, end]."""
        return sum(max(0.0, min(end, w.end) - max(start, w.start)) for w in self.work if not kinds or w.kind in kinds)

    def share(self, start: float, end: float, *kinds: str) -> float:
        start = max(0.0, start)
        return self.busy(start, end, *kinds) / (end - start) if end > start else 0.0

    def calm(self) -> bool:
        return self.now() >= self.driver.calm_from

    def chance(self, share: float) -> bool:
        return not self.calm() and self.random.random() < share

    def _answer(self, call: str, value: float) -> float:
        """The value, or a sentinel in its place, unless the call fails."""
        if self.chance(self.driver.fails):
            raise DeviceError(call, "NVML_ERROR_UNKNOWN", once_answered=call in self._told)
        self.answers += 1
        self._told.add(call)
        return float(self.random.choice(SENTINELS)) if self.chance(self.driver.nonsense) else value

    def advance_ring(self) -> None:
        """Complete the periods that have ended by now. Called often, so that each period gets the stamp of its time."""
        period, wall_zero = self.driver.period_s, self.clock.wall() - self.now()
        while (self._periods + 1) * period <= self.now():
            self._periods += 1
            end = self._periods * period
            ratio = int(100.0 * self.share(end - period, end, "kernel") + 1e-9) / 100.0
            encoder = -int(-100.0 * self.share(end - period, end, "encoder")) / 100.0
            if self._to_lose or self.chance(self.driver.loses):
                self._to_lose = self._to_lose - 1 if self._to_lose else self.random.randint(0, 4)
                continue
            jitter = self.random.uniform(-1, 1) * self.driver.stamp_jitter_s
            stamp = round(wall_zero + end + self.driver.clock_lead_s + jitter, 6)
            readable = end + self.random.uniform(0.0, self.driver.lag_s)
            if self.chance(self.driver.nonsense):
                ratio = self.random.choice(SENTINELS) / 100.0
            same = [ratio, 0.0] if self.chance(self.driver.duplicates) else [ratio]
            self.random.shuffle(same)
            engine = UtilizationSample(stamp, encoder)
            self._ring += [(readable, UtilizationSample(stamp, value), engine) for value in same]
        self._ring = [entry for entry in self._ring if entry[0] > self.now() - self.driver.ring_keeps_s]

    def read_utilization_samples(self, since_wall: float) -> Sequence[UtilizationSample]:
        if self.driver.source != "ring":
            raise NotSupported("nvmlDeviceGetSamples", "NVML_ERROR_NOT_SUPPORTED")
        self._answer("nvmlDeviceGetSamples", 0.0)
        return [entry for entry, _ in self._readable() if entry.wall > since_wall]

    def read_engine_samples(self, engine: str, since_wall: float) -> Sequence[UtilizationSample]:
        if engine != "encoder" or self.driver.source != "ring" or not self.driver.has_engine_ring:
            raise NotSupported("nvmlDeviceGetSamples", "NVML_ERROR_NOT_SUPPORTED")
        self._answer(f"nvmlDeviceGetSamples {engine}", 0.0)
        return [entry for _, entry in self._readable() if entry.wall > since_wall]

    def _readable(self) -> list[tuple[UtilizationSample, UtilizationSample]]:
        """Entries up to the first late entry: all later entries wait for it."""
        ready = itertools.takewhile(lambda entry: entry[0] <= self.now(), self._ring)
        return [(entry, engine) for _, entry, engine in ready]

    def read_utilization(self) -> Rates:
        call, period = "nvmlDeviceGetUtilizationRates", self.driver.period_s
        if self.driver.source == "mig":
            raise NotSupported(call, "NVML_ERROR_NOT_SUPPORTED")
        end = int(self.now() / period) * period  # of the last complete period
        ratio = int(100.0 * self.share(end - period, end, "kernel") + 1e-9) / 100.0
        return Rates(self._answer(call, ratio), None)

    def read_engine(self, engine: str) -> float:
        call = f"nvmlDeviceGet{engine.capitalize()}Utilization"
        if engine != "encoder" or self.driver.source == "mig":
            raise NotSupported(call, "NVML_ERROR_NOT_SUPPORTED")
        share = self.share(self.now() - ENGINE_PERIOD_S, self.now(), "encoder")
        return self._answer(call, -int(-100.0 * share) / 100.0)

    def _draw(self, start: float, end: float) -> float:
        """Mean power in watts."""
        share = self.share(start, end, "kernel") if self.driver.kernels_draw_power else 0.0
        return self.driver.rest_w + (0.9 * self.driver.limit_w - self.driver.rest_w) * share

    def read_power(self) -> float:
        watts = self._draw(self.now() - POWER_PERIOD_S, self.now())
        watts += 0.001 * (int(1000.0 * self.now()) % 7)  # no true sensor repeats the milliwatts while the load changes
        answer = self._answer("nvmlDeviceGetPowerUsage", watts)
        if self._steady >= GLITCHES_APART and self.chance(self.driver.glitches):
            self._steady = 0
            return self.random.choice((0.0, 1.0))
        self._steady += answer == watts
        return answer

    def read_power_limit(self) -> float:
        return self._answer("nvmlDeviceGetEnforcedPowerLimit", self.driver.limit_w)

    def read_energy(self) -> float:
        if not self.driver.has_energy:
            raise NotSupported("nvmlDeviceGetTotalEnergyConsumption", "NVML_ERROR_NOT_SUPPORTED")
        now = self.now()
        return self._answer("nvmlDeviceGetTotalEnergyConsumption", 1e6 + self._draw(0.0, now) * now)

    def read_pcie(self) -> Pcie:
        moved = 10e9 * self.busy(0.0, self.now(), "copy")
        return Pcie(Traffic(self._answer("nvmlDeviceGetFieldValues", moved), moved / 2), 0)

    def window(self, subject: str) -> Gpm | None:
        """The GPM window of a subject since its last read."""
        now, begin = self.now(), self._gpm_at.get(subject)
        self._answer("nvmlGpmMetricsGet", 0.0)
        if begin is not None and now - begin <= 0.1:
            return None
        self._gpm_at[subject] = now
        if begin is None:
            return None
        lies = self.driver.gpm_lies and any(start <= now < end for start, end in self.driver.lies)
        if not (lies and self.driver.gpm_lies == "stuck"):
            self._frozen_cycles[subject] = now
        cycles = 1.5e9 * self._frozen_cycles.get(subject, 0.0) if self.driver.has_cycles else None
        ratio = 0.0 if lies else self.share(begin, now, "kernel")
        if self.chance(self.driver.nonsense):
            ratio = float(self.random.choice(SENTINELS))
        moved = 0.0 if lies else 1e3 + 15e9 * self.share(begin, now, "copy")
        engines = 0.0 if lies else self.share(begin, now, "encoder")
        missing = self.chance(self.driver.fails)
        self.gpm_windows[subject] = (begin, now)
        return Gpm(
            now - begin,
            graphics=None if missing else ratio,
            sm=0.8 * ratio,
            dram=0.3 * ratio,
            pcie=moved,
            engines=engines if subject else None,
            missing=missing,
            elapsed_cycles=cycles,
        )

    def read_gpm(self) -> Gpm | None:
        if not self.driver.has_gpm:
            raise NotSupported("nvmlGpmMetricsGet", "NVML_ERROR_NOT_SUPPORTED")
        return self.window("")

    def reopen_gpm(self, subject: str) -> None:
        self._gpm_at.pop(subject, None)

    def list_instances(self) -> Sequence[Instance]:
        self._answer("nvmlDeviceGetMigMode", 0.0)
        return [TrueInstance(self)] if self.driver.source == "mig" else []


class TrueInstance:
    """The only MIG instance of the board, which does all of the board's work."""

    def __init__(self, device: TrueDevice) -> None:
        self.identity = InstanceIdentity("MIG-1", "1/0", "7g.80gb", 7, 8)
        self._device = device

    def read_memory(self) -> Memory:
        return Memory(1000, 10, 990, 0)

    def read_gpm(self) -> Gpm | None:
        return self._device.window(self.identity.uuid)
