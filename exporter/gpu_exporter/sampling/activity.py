"""From raw answers to known activity: which stretch of time does a reading cover, and was anything going on?

Idleness rests on witnesses: a utilization of 0 counts as idle only while every other readable witness is quiet.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

from gpu_exporter.collectors.contract import Cycle
from gpu_exporter.devices.protocol import Gpm
from gpu_exporter.model import UTILIZATION, Activity, Span, UnitId
from gpu_exporter.sampling.driver_ring import (
    LATENESS,
    RING_AGE_MAX_S,
    UNWATCHED_MAX_S,
    WALL_STEP_S,
    DriverRing,
    agreeing,
)
from gpu_exporter.sampling.gpm_trust import GpmTrust
from gpu_exporter.sampling.witnesses import UNKNOWN, ActivityRules, Moment, Witnesses, active_names, moment_of

log = logging.getLogger(__name__)
RING_PATIENCE_S = 30.0  # after its last answer the driver's ring is waited for: it keeps some 20 s and may deliver late


def instance_activity(unit: UnitId, gpm: Gpm, at: float, rules: ActivityRules, witnesses: Witnesses) -> Activity:
    """Activity of a MIG instance, which only GPM reports: over the window that ended at `at`.

    `witnesses` may be one for all instances: GPM compares two moments by itself, so that they remember nothing.
    """
    seen = witnesses.observe(Moment(gpm, is_instance=True))
    active = active_names(seen)
    known = gpm.graphics is not None and gpm.span_s <= rules.gap_intervals * rules.interval_s
    ratio = gpm.graphics if gpm.graphics is not None and gpm.graphics > rules.gpm_idle_max_ratio else 0.0
    spans: tuple[Span, ...] = ()
    if known and (ratio or active or not gpm.missing):
        spans = (Span(at - gpm.span_s, at, ratio, () if ratio else active),)
    elif active:  # nothing that covers time, but a sign of life, which ends idle runs
        spans = (Span(at, at, ratio, active),)
    return Activity(unit, spans, len(seen) if gpm.graphics is not None else 0)


class Watch(NamedTuple):
    """What the other witnesses said of the time (start, end]: those that were active, and whether all are known."""

    start: float
    end: float
    active: tuple[str, ...]
    known: bool


class ActivityReader:
    """Turns the cycles of one device into spans."""

    def __init__(self, unit: UnitId, rules: ActivityRules) -> None:
        self._unit = unit
        self._rules = rules
        self._max_gap = rules.gap_intervals * rules.interval_s
        self._witnesses = Witnesses(rules)
        self._trust = GpmTrust(rules)
        self._offset: float | None = None
        self._last_monotonic: float | None = None
        self._last_utilization_at = 0.0
        self._last_samples_monotonic: float | None = None
        self._ring = DriverRing(rules.driver_period_max_s)
        self._watches: deque[Watch] = deque()

    @property
    def newest_sample_wall(self) -> float:
        """Stamp of the newest entry of the driver's ring that was read, Unix seconds."""
        return self._ring.newest_wall

    def read(self, cycle: Cycle, monotonic: float, wall: float) -> Activity | None:
        """Activity of the whole GPU, None when it has no source (MIG mode, or every call failed).

        GPM readings that the other witnesses contradict are taken out of the cycle.
        """
        # The first witness was read when the cycle began: of what came later its silence says nothing.
        watched_until = monotonic if cycle.begin is None else cycle.begin
        previous, self._last_monotonic = self._last_monotonic, watched_until
        if (
            self._last_samples_monotonic is not None
            and previous is not None
            and watched_until - previous > self._max_gap
        ):
            self._last_samples_monotonic += watched_until - previous  # our absence is not the ring's silence
        stepped = self._note_offset(wall - monotonic)
        if stepped:
            log.warning(
                "gpu %s: the wall clock was stepped by %+.0f s; the driver stamps its samples with it, so activity may "
                "be unknown for up to %.0f s",
                self._unit.uuid,
                stepped,
                RING_AGE_MAX_S,
            )
        seen = self._witnesses.observe(moment_of(cycle))
        self._trust.review(cycle, seen, monotonic)
        active = active_names(seen)
        unknown = sum(observation is UNKNOWN for observation in seen.values())
        read_at = monotonic if cycle.witnessed_at is None else cycle.witnessed_at
        self._note_watch(previous, watched_until, read_at, active, known=not unknown and not cycle.witness_missing)
        if stepped:
            self._ring.restart(wall)
            spans: tuple[Span, ...] = ()
        else:
            # What was stamped later is read again in the next cycle, when its time was watched.
            spans = self._ring.read(cycle.driver_samples, watched_until, wall - (monotonic - watched_until))
            if cycle.utilization:
                spans = agreeing(spans, cycle.utilization_at, self._longest())
        if self._ring.answered:
            self._last_samples_monotonic = monotonic
        elif cycle.utilization is not None and self._covers_gap(previous, monotonic):
            end = cycle.utilization_at
            start = max(self._last_utilization_at, end - self._longest())
            spans = (Span(start, end, cycle.utilization),)
        self._last_utilization_at = cycle.utilization_at
        spans = tuple(judged for span in spans if (judged := self._judge(span)) is not None)
        reported = cycle.utilization is not None or bool(cycle.driver_samples)
        alive = active or ((UTILIZATION,) if cycle.utilization or self._ring.contradicted else ())
        if alive and not any(_is_active(span) for span in spans):
            # Nothing that covers time, but a sign of life: a span without length books nothing and ends idle runs.
            spans = (*spans, Span(monotonic, monotonic, cycle.utilization or 0.0, alive))
        if not reported and not spans:
            return None
        return Activity(self._unit, spans, 1 + len(seen) - unknown if reported else 0)

    def _longest(self) -> float:
        """The longest time that one utilization of the driver may stand for."""
        return LATENESS * self._rules.driver_period_max_s

    def _note_watch(
        self, previous: float | None, until: float, read_at: float, active: tuple[str, ...], *, known: bool
    ) -> None:
        """Remember what the witnesses, read from `until` to `read_at`, say of the time since the last cycle.

        Quiet ones cover the time that each of them saw: up to the first read, and from one period of the driver before
        the last one, since an engine's utilization stands for no more. What an active one saw lies anywhere up to the
        last read.
        """
        if previous is not None and known and not active:
            self._watches.append(Watch(max(previous, read_at - self._longest()), until, active, known))
        elif previous is not None:
            self._watches.append(Watch(previous, read_at, active, known))
        while self._watches and self._watches[0].end < until - RING_AGE_MAX_S:
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
                return span._replace(other=watch.active)
            unknown |= not watch.known
            watched += overlap
        missing = span.end - span.start - watched
        return None if unknown or missing > UNWATCHED_MAX_S else span

    def _note_offset(self, offset: float) -> float:
        """Remember how wall and monotonic clock lie; by how much the wall clock was stepped since last time, else 0."""
        previous, self._offset = self._offset, offset
        step = 0.0 if previous is None else offset - previous
        return step if abs(step) > WALL_STEP_S else 0.0

    def _covers_gap(self, previous: float | None, monotonic: float) -> bool:
        """Whether the reported rate may stand for the time since the last cycle."""
        near = previous is not None and monotonic - previous <= self._max_gap
        return near and not self._has_ring(monotonic)

    def _has_ring(self, monotonic: float) -> bool:
        """Whether the driver's sample ring answered lately, so that its samples are worth waiting for."""
        last = self._last_samples_monotonic
        return last is not None and monotonic - last <= max(RING_PATIENCE_S, self._max_gap)


def _is_active(span: Span) -> bool:
    return span.ratio > 0.0 or bool(span.other)
