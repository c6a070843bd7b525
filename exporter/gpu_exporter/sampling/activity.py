"""From raw answers to known activity: which stretch of time does a reading cover, and was anything going on?

Idleness rests on witnesses: a utilization of 0 counts as idle only while every other readable witness is quiet.
Pure, but for the little that has to be remembered per device (last driver sample, clock offset, power floor).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from gpu_exporter.collectors.contract import Cycle
from gpu_exporter.devices.protocol import Gpm, Traffic, UtilizationSample
from gpu_exporter.model import Activity, Span, UnitId

WALL_STEP_S = 1.0  # a wall clock that moved more than this against the monotonic one has been stepped
RING_AGE_MAX_S = 120.0  # a stamp older than any ring keeps is no wall time of this host: the ring is then no source
RING_PATIENCE_S = 30.0  # after its last answer the driver's ring is waited for: it keeps some 20 s and may deliver late


class ActivityRules(NamedTuple):
    """`interval_s`: sampling interval; see defaults.yaml for the rest.

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


UNWATCHED_MAX_S = 0.05  # of a span: clocks of driver and host differ by less, a witness's silence by more
LATENESS = 1.1  # a cycle or sample that comes a tenth of a period late leaves no hole


class PowerFloor:
    """Learns the power of the GPU at rest and tells whether a draw is clearly above it."""

    def __init__(self, rules: ActivityRules) -> None:
        self._rules = rules
        self._floor: float | None = None

    def is_active(self, power_w: float, limit_w: float) -> bool:
        """True when `power_w` lies more than a step of the way from the floor to the limit."""
        highest = self._rules.power_floor_max_ratio * limit_w
        self._floor = min(power_w, highest, self._floor if self._floor is not None else highest)
        return power_w > self._floor + self._rules.power_active_step * (limit_w - self._floor)


class TrafficRate:
    """Bytes per second from counters of the driver that may wrap."""

    def __init__(self) -> None:
        self._last: tuple[float, Traffic] | None = None

    def step(self, traffic: Traffic | None, at: float) -> float | None:
        """The mean since the last step, both directions together; None while it cannot be told."""
        last, self._last = self._last, None if traffic is None else (at, traffic)
        if last is None or traffic is None or at <= last[0]:
            return None
        moved = (traffic.rx - last[1].rx, traffic.tx - last[1].tx)
        return sum(moved) / (at - last[0]) if min(moved) >= 0 else None


def gpm_witnesses(gpm: Gpm | None, rules: ActivityRules) -> list[bool]:
    """Whether each GPM ratio of a board that was told shows work."""
    told = (gpm.graphics, gpm.sm) if gpm is not None else ()
    return [ratio > rules.gpm_idle_max_ratio for ratio in told if ratio is not None]


def instance_activity(unit: UnitId, gpm: Gpm, at: float, rules: ActivityRules) -> Activity:
    """Activity of a MIG instance, of which GPM alone tells: over the window that ended at `at`."""
    ratios = (gpm.graphics, gpm.sm, gpm.tensor, gpm.dram, gpm.engines)
    witnesses = [ratio > rules.gpm_idle_max_ratio for ratio in ratios if ratio is not None]
    if gpm.pcie is not None:
        witnesses.append(gpm.pcie > rules.pcie_idle_max_bytes_per_second)
    if gpm.nvlink is not None:
        witnesses.append(gpm.nvlink > rules.nvlink_idle_max_bytes_per_second)
    active = any(witnesses)
    known = gpm.graphics is not None and gpm.span_s <= rules.gap_intervals * rules.interval_s
    ratio = gpm.graphics if gpm.graphics is not None and gpm.graphics > rules.gpm_idle_max_ratio else 0.0
    spans: tuple[Span, ...] = ()
    if known and (ratio or active or not gpm.missing):
        spans = (Span(at - gpm.span_s, at, ratio, other=active and not ratio),)
    elif active:  # nothing that covers time, but a sign of life, which ends idle runs
        spans = (Span(at, at, ratio, True),)
    return Activity(unit, spans, len(witnesses) if gpm.graphics is not None else 0)


class Watch(NamedTuple):
    """What the other witnesses said of the time (start, end]: active, quiet, or (None) not known."""

    start: float
    end: float
    active: bool | None


class ActivityReader:
    """Turns the cycles of one device into spans."""

    def __init__(self, unit: UnitId, rules: ActivityRules) -> None:
        self._unit = unit
        self._rules = rules
        self._max_gap = rules.gap_intervals * rules.interval_s
        self._floor = PowerFloor(rules)
        self._offset: float | None = None
        self._last_monotonic: float | None = None
        self._last_utilization_at = 0.0
        self._last_samples_monotonic: float | None = None
        self._last_energy: tuple[float, float] | None = None
        self._pcie, self._nvlink = TrafficRate(), TrafficRate()
        self._watches: deque[Watch] = deque()
        self._ring_from = 0.0  # samples up to this time are not believed
        self.newest_sample_wall = 0.0

    def read(self, cycle: Cycle, monotonic: float, wall: float) -> Activity | None:
        """Activity of the whole GPU, None when it has no source (MIG mode, or every call failed)."""
        previous, self._last_monotonic = self._last_monotonic, monotonic
        stepped = self._note_offset(wall - monotonic)
        others = self._other_witnesses(cycle)
        active: bool | None = any(others)
        if not active and (cycle.witness_missing or None in others):
            active = None
        self._note_watch(previous, monotonic, active)
        if stepped:
            self._ring_from = max(wall, self.newest_sample_wall)
            self.newest_sample_wall = wall
            spans: tuple[Span, ...] = ()
        else:
            spans = self._spans_of_samples(cycle.driver_samples, monotonic, wall, cycle.utilization)
        if spans:
            self._last_samples_monotonic = monotonic
        elif cycle.utilization is not None and self._covers_gap(previous, monotonic):
            end = cycle.utilization_at
            start = max(self._last_utilization_at, end - self._longest())
            spans = (Span(start, end, cycle.utilization, other=False),)
        self._last_utilization_at = cycle.utilization_at
        spans = tuple(judged for span in spans if (judged := self._judge(span)) is not None)
        told = cycle.utilization is not None or bool(cycle.driver_samples)
        if (active or cycle.utilization) and not any(_is_active(span) for span in spans):
            # Nothing that covers time, but a sign of life: a span without length books nothing and ends idle runs.
            spans = (*spans, Span(monotonic, monotonic, cycle.utilization or 0.0, True))
        if not told and not spans:
            return None
        return Activity(self._unit, spans, 1 + len(others) - others.count(None) if told else 0)

    def _longest(self) -> float:
        """The longest time that one utilization of the driver may stand for."""
        return LATENESS * self._rules.driver_period_max_s

    def _note_watch(self, previous: float | None, now: float, active: bool | None) -> None:
        """Remember what the witnesses say of the time since the last cycle.

        Quiet ones vouch for one period of the driver at most, since an engine's utilization tells of no more.
        """
        if previous is not None:
            start = max(previous, now - self._longest()) if active is False else previous
            self._watches.append(Watch(start, now, active))
        while self._watches and self._watches[0].end < now - RING_AGE_MAX_S:
            self._watches.popleft()

    def _judge(self, span: Span) -> Span | None:
        """A span of no utilization is other activity when a witness saw any in it, and unknown when not all of it was
        watched; a span with utilization is what it is.
        """
        if span.ratio > 0.0 or span.end <= span.start:
            return span
        watched = 0.0
        unknown = False
        for watch in reversed(self._watches):
            if watch.end <= span.start:
                break
            overlap = min(watch.end, span.end) - max(watch.start, span.start)
            if overlap <= 0.0:
                continue
            if watch.active:
                return span._replace(other=True)
            unknown |= watch.active is None
            watched += overlap
        missing = span.end - span.start - watched
        return None if unknown or missing > UNWATCHED_MAX_S else span

    def _note_offset(self, offset: float) -> bool:
        """Remember how wall and monotonic clock lie; true when the wall clock was stepped since last time."""
        previous, self._offset = self._offset, offset
        return previous is not None and abs(offset - previous) > WALL_STEP_S

    def _covers_gap(self, previous: float | None, monotonic: float) -> bool:
        """Whether the reported rate may stand for the time since the last cycle."""
        near = previous is not None and monotonic - previous <= self._max_gap
        return near and not self._has_ring(monotonic)

    def _has_ring(self, monotonic: float) -> bool:
        """Whether the driver's sample ring answered lately, so that its samples are worth waiting for."""
        last = self._last_samples_monotonic
        return last is not None and monotonic - last <= max(RING_PATIENCE_S, self._max_gap)

    def _other_witnesses(self, cycle: Cycle) -> list[bool | None]:
        """One entry per readable witness beside utilization: is it active? None: it cannot be told before next time."""
        rules, gpm = self._rules, cycle.gpm
        witnesses: list[bool | None] = [value > 0.0 for value in cycle.engines.values()]
        witnesses += gpm_witnesses(gpm, rules)
        # Of the driver's byte counters and the rate that GPM tells the higher: a counter may have wrapped.
        pcie = self._pcie.step(cycle.pcie, cycle.pcie_at)
        nvlink = self._nvlink.step(cycle.nvlink, cycle.nvlink_at)
        for traffic, counted, told, floor in (
            (cycle.pcie, pcie, gpm.pcie if gpm else None, rules.pcie_idle_max_bytes_per_second),
            (cycle.nvlink, nvlink, gpm.nvlink if gpm else None, rules.nvlink_idle_max_bytes_per_second),
        ):
            rates = [rate for rate in (counted, told) if rate is not None]
            if rates:
                witnesses.append(max(rates) > floor)
            elif traffic is not None:
                witnesses.append(None)
        power = self._highest_power(cycle)
        if power is not None and cycle.power_limit_w:
            witnesses.append(self._floor.is_active(power, cycle.power_limit_w))
        return witnesses

    def _highest_power(self, cycle: Cycle) -> float | None:
        """The power now, or the mean since the last cycle where that is higher: work between two reads costs energy,
        though the moment of the read (power is a moment's value before Ampere and on GA100) may be a quiet one.
        """
        before = self._last_energy
        self._last_energy = None if cycle.energy_j is None else (cycle.energy_at, cycle.energy_j)
        if before is None or cycle.energy_j is None or cycle.energy_at <= before[0] or cycle.energy_j < before[1]:
            return cycle.power_w
        return max(cycle.power_w or 0.0, (cycle.energy_j - before[1]) / (cycle.energy_at - before[0]))

    def _spans_of_samples(
        self, samples: Sequence[UtilizationSample], monotonic: float, wall: float, utilization: float | None
    ) -> tuple[Span, ...]:
        """Each sample covers (previous sample, its own stamp], at most one driver period."""
        if wall <= self._ring_from:
            self.newest_sample_wall = wall  # the clock went back: the ring still holds that time from before
            return ()
        spans: list[Span] = []
        previous = self.newest_sample_wall
        shift = monotonic - wall
        for sample in samples:
            if not previous < sample.wall <= wall + WALL_STEP_S:
                continue
            if sample.wall > wall + UNWATCHED_MAX_S:
                break  # a clock that leads: to be read again when its time was watched
            if previous > 0.0 and sample.wall > wall - RING_AGE_MAX_S and 0.0 <= sample.ratio <= 1.0:
                start = max(previous, sample.wall - self._longest())
                spans.append(Span(start + shift, sample.wall + shift, sample.ratio, other=False))
            previous = sample.wall
        self.newest_sample_wall = previous
        return self._agreeing(spans, monotonic) if utilization else tuple(spans)

    def _agreeing(self, spans: list[Span], now: float) -> tuple[Span, ...]:
        """The rate that the driver reports beside its ring says work: zeros of the time that it stands for are none,
        unless other samples of that time explain it; the newest is none in any case.
        """
        recent = [span for span in spans if span.end > now - self._longest()]
        doubtful = recent[-1:] if any(span.ratio > 0.0 for span in recent) else recent
        return tuple(span._replace(other=True) if span in doubtful else span for span in spans)


def _is_active(span: Span) -> bool:
    return span.ratio > 0.0 or span.other
