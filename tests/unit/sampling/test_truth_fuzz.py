"""Compares the ledger's books with the truth of a device, although driver and clocks misbehave.

Each run draws a board, a driver with faults, and some minutes of work; the real sampler and the real ledger book the
work. Two claims: idle time overlaps true work by at most BOUND per piece of work, and after the faults are over, a
resting board is found idle again. Every run prints its new seed; GPU_EXPORTER_FUZZ_SEED repeats a run, and
GPU_EXPORTER_FUZZ_RUNS sets the number of runs.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import pytest
from tests.testbed.truth import KINDS, Driver, TrueDevice, Work

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.activity.driver_ring import LATENESS, UNWATCHED_MAX_S
from gpu_exporter.agent.sampling.activity.gpm_trust import APART_MAX_S
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.metrics import Sample
from gpu_exporter.common.model.readings import WITNESSES_MIN, Activity
from gpu_exporter.common.model.units import UnitId

SEED = int(os.environ.get("GPU_EXPORTER_FUZZ_SEED", "0")) or secrets.randbits(32)
RUNS = int(os.environ.get("GPU_EXPORTER_FUZZ_RUNS", "96"))
REST_S = 170.0  # at the end, without faults: more than the two minutes for which a ring is ignored after a clock was set back
JUDGED_S = 40.0  # the last part of that rest
STEP_S = 0.05  # time step of the driver


def bound(driver: Driver, kind: str) -> float:
    """How much idle time may overlap one piece of work of this kind, in seconds (docs/decisions/0010)."""
    clocks = 2 * (abs(driver.clock_lead_s) + driver.stamp_jitter_s + UNWATCHED_MAX_S)
    if driver.source == "mig":
        # GPM's own work time is compared. If GPM lies, the mean power of a second must become clear: a third of it at
        # each end, and the rest of a slow cycle between the two.
        return 0.6 + APART_MAX_S if driver.gpm_lies == "zero" else clocks
    late = 2 * (LATENESS - 1.0)  # periods, engines and cycles may come a tenth late, at each end
    percent = 0.02  # less than a percent of a period reads 0, at each end
    if driver.source == "ring" and not driver.clock_goes_back:
        return clocks + (late + percent) * (driver.period_s if kind == "kernel" else 1.0)
    # A rate covers up to 1 s, but the driver does not report which. After a clock was set back, only the rate is left.
    return clocks + 2 * LATENESS + late


def draw_work(random: Random, until: float, driver_source: str) -> list[Work]:
    work: list[Work] = []
    now = random.uniform(5.0, 20.0)
    while now < until:
        length = random.choice((0.03, 0.2, 0.5, 0.7, 1.0, 3.0, 15.0)) * random.uniform(0.8, 1.2)
        kind = random.choice(("kernel", "kernel", *KINDS))
        work.append(Work(now, now + length, kind if driver_source != "mig" else "kernel"))
        now += length + random.choice((0.1, 1.0, 4.0, 12.0)) * random.uniform(0.5, 1.5)
    return [w for w in work if w.end < until]


def draw_driver(random: Random, calm_from: float) -> Driver:
    source = random.choice(("ring", "ring", "ring", "rate", "mig"))
    has_gpm = source == "mig" or random.random() < 0.3
    lies = random.choice(("", "stuck", "zero")) if has_gpm else ""

    def sometimes(most: float) -> float:
        return random.choice((0.0, random.uniform(0.0, most)))

    begin = random.uniform(10.0, calm_from)
    return Driver(
        source=source,
        period_s=random.choice((1 / 6, 0.2, 0.5, 1.0)),
        has_gpm=has_gpm,
        has_cycles=lies == "stuck" or random.random() < 0.5,
        has_energy=random.random() < 0.5,
        kernels_draw_power=lies == "zero" or random.random() < 0.3,
        rest_w=random.choice((82.0, 40.0)),
        limit_w=300.0,
        clock_lead_s=random.choice((0.0, random.uniform(-0.04, 0.04))),
        clock_goes_back=random.random() < 0.2,
        stamp_jitter_s=random.choice((0.0, 0.004)),
        calm_from=calm_from,
        lag_s=sometimes(1.5),
        loses=sometimes(0.3),
        duplicates=sometimes(0.3),
        fails=sometimes(0.05),
        nonsense=random.choice((0.0, 0.0, random.uniform(0.0, 0.05))),
        glitches=sometimes(0.05),
        stalls=0.002,
        gpm_lies=lies,
        lies=((begin, random.uniform(begin, calm_from)),) if lies else (),
        has_engine_ring=random.random() < 0.7,
        ring_keeps_s=random.choice((3.0, 16.0, 20.0)),
    )


# Every second run has one certain fault, on a board where no other value shows the work.
BARE = {"has_gpm": False, "has_energy": False, "kernels_draw_power": False, "gpm_lies": "", "lies": ()}
MIG = {"source": "mig", "has_gpm": True, "lies": ((20.0, 55.0),)}
# A driver that buffers everything: one cycle every five seconds.
LONG_CYCLES = {
    **BARE,
    "source": "ring",
    "period_s": 1 / 6,
    "has_energy": True,
    "has_engine_ring": True,
    "clock_goes_back": False,
} | dict.fromkeys(("lag_s", "loses", "duplicates", "fails", "nonsense", "glitches", "stalls"), 0.0)
FOCUS: tuple[dict[str, object], ...] = (
    {**BARE, "source": "ring", "period_s": 0.2, "loses": 0.25, "clock_goes_back": False},
    {**BARE, "source": "ring", "duplicates": 0.3, "clock_goes_back": False},
    {**BARE, "source": "ring", "period_s": 0.2, "loses": 0.15, "clock_goes_back": False},
    {"glitches": 0.05, "rest_w": 82.0},
    LONG_CYCLES,
    {**LONG_CYCLES, "loses": 0.05},
    {**LONG_CYCLES, "stalls": 0.05},
    {**BARE, "source": "ring", "stalls": 0.1, "clock_goes_back": False},
    {**MIG, "has_cycles": True, "gpm_lies": "stuck"},
    {**MIG, "kernels_draw_power": True, "gpm_lies": "zero"},
)


@dataclass
class Books:
    """The time that the ledger books as idle, with its position."""

    ledger: Ledger
    idle: list[tuple[float, float]] = field(default_factory=list)
    proven_s: float = 0.0  # the part of it that two witnesses show

    def record(self, activity: Activity) -> None:
        record = self.ledger.units.get(activity.unit)
        covered = record.account.covered_until if record else self.ledger.started
        for span in activity.spans:
            start = max(span.start, covered)
            if span.end > start:
                covered = span.end
                if span.ratio == 0.0 and not span.other:
                    self.idle.append((start, span.end))
                    self.proven_s += span.end - start if activity.witnesses >= WITNESSES_MIN else 0.0
        self.ledger.record(activity)


def play(random: Random, focus: dict[str, object] | None = None) -> tuple[TrueDevice, Books, list[str], float]:
    """One run: the device, the books, GPM zeros published during work, and the share of long cycles."""
    calm_from = random.uniform(60.0, 150.0)
    driver = draw_driver(random, calm_from)._replace(**(focus or {}))  # type: ignore[arg-type]
    clock, settings = ManualClock(), Settings()
    device = TrueDevice(draw_work(random, calm_from, driver.source), driver, clock, random)
    chosen = [c for c in registry.DEFAULT if c.witness or c.name == "mig"]
    sampler = DeviceSampler(device, chosen, clock, activity_rules(settings))
    books = Books(Ledger(LedgerRules(5.0, 3, 0.1, 0.7, 60.0), clock.monotonic()))
    unit = UnitId("GPU-0", "MIG-1" if driver.source == "mig" else "")
    false_zeros: list[str] = []
    calm_cycles = long_cycles = 0

    def pass_time(seconds: float) -> None:
        while seconds > 0.0:
            clock.advance(min(seconds, STEP_S))
            seconds -= STEP_S
            device.advance_ring()

    answer = device._answer

    def slow_answer(call: str, value: float) -> float:
        if device.chance(driver.stalls):
            pass_time(random.choice((0.5, 1.0, 2.5)) * random.uniform(0.1, 1.0))
        return answer(call, value)

    device._answer = slow_answer  # type: ignore[method-assign]
    end: float | None = None  # the first reading of the rest still sees an earlier clock step or gap
    while end is None or device.now() < end:
        if device.chance(0.02):
            steps = (-3600.0, -7.0, -1.5) if driver.clock_goes_back else ()
            clock.step_wall(random.choice((1.5, 7.0, 3600.0, *steps)))  # less than a second is not detected as a step
        gap = device.chance(0.02)
        pass_time(random.uniform(2.0, 70.0) if gap else random.uniform(0.85, 1.15) * sampler.interval_s)
        device.gpm_windows.clear()
        snapshot = sampler.sample()
        if end is None and device.now() >= calm_from:
            end = device.now() + REST_S
        calm_cycles, long_cycles = calm_cycles + device.calm(), long_cycles + (device.calm() and sampler.interval_s > 4)
        for reading in (snapshot, *snapshot.instances):
            if reading.activity is not None and reading.activity.unit == unit:
                books.record(reading.activity)
        false_zeros += published_zeros(device, snapshot.samples, *(i.samples for i in snapshot.instances))
    record = books.ledger.units.get(unit)
    totals = record.account if record else None
    assert totals is not None
    assert totals.idle_s == pytest.approx(books.proven_s)
    return device, books, false_zeros, long_cycles / calm_cycles


def published_zeros(device: TrueDevice, *groups: Sequence[Sample]) -> list[str]:
    """GPM ratios of 0 for a window within lasting work that draws power, so that another witness certainly shows it."""
    windows = {
        f"gpu_{'mig_' if subject else ''}graphics_active_ratio": window
        for subject, window in device.gpm_windows.items()
        if device.busy(window[0] - 2.0, window[1], "kernel") >= window[1] - window[0] + 2.0 - 1e-6
    }
    return [
        f"{sample.family.name} 0 at {windows[sample.family.name][1]:.2f}"
        for group in groups
        for sample in group
        if device.driver.kernels_draw_power and sample.family.name in windows and sample.value < 0.001
    ]


@pytest.mark.parametrize("run", range(RUNS))
def test_idle_never_overlaps_work_and_rest_is_found_idle(run: int) -> None:
    focus = FOCUS[run // 2 % len(FOCUS)] if run % 2 else None
    device, books, false_zeros, long_cycles = play(Random(f"{SEED}/{run}"), focus)
    start, driver = device._start, device.driver
    about = f"GPU_EXPORTER_FUZZ_SEED={SEED} run {run}: {driver}"
    for work in device.work:
        overlap = sum(
            max(0.0, min(end - start, work.end) - max(begin - start, work.start)) for begin, end in books.idle
        )
        limit = bound(driver, work.kind)
        assert overlap <= limit, f"{overlap:.3f} s of {work} are idle, more than {limit:.3f}; {about}"
    assert false_zeros == [], about
    assert focus is not LONG_CYCLES or device.driver.ring_keeps_s < 10.0 or long_cycles > 0.6, about
    rest = device.now() - JUDGED_S
    idle = sum(max(0.0, end - start - max(rest, begin - start)) for begin, end in books.idle)
    assert idle > 0.8 * JUDGED_S, f"{idle:.1f} s of the last {JUDGED_S:.0f} s are idle; {about}"
