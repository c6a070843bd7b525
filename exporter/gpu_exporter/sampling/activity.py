"""From raw answers to known activity: which stretch of time does a reading cover, and was anything going on?

Idleness rests on witnesses: a utilization of 0 counts as idle only while every other readable witness is quiet.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from gpu_exporter.collectors.contract import Cycle
from gpu_exporter.devices.protocol import Gpm
from gpu_exporter.model.readings import UTILIZATION, Activity, Span
from gpu_exporter.model.units import UnitId
from gpu_exporter.sampling.driver_ring import (
    LATENESS,
    RING_AGE_MAX_S,
    WALL_STEP_S,
    DriverRing,
    agreeing,
    pieces,
)
from gpu_exporter.sampling.engine_rings import EngineRings
from gpu_exporter.sampling.gpm_trust import GpmTrust
from gpu_exporter.sampling.watches import Track, WitnessPeriod
from gpu_exporter.sampling.witnesses import UNKNOWN, ActivityRules, Moment, Witnesses, active_names, moment_of

log = logging.getLogger(__name__)
RING_ASK_S = 10.0  # how often a ring that held little is asked for everything: it may just have been emptied
RING_LAG_MAX_S = 2.0  # a ring whose newest entry is older is asked at the short interval
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
        self._engines = EngineRings(rules.driver_period_max_s)
        self._rings_asked_at: float | None = None  # when they were last asked for all that they hold
        self._asks_all = True
        self._was_covered = False
        self._track = Track()
        self.interval_s = rules.interval_s
        """how long the next cycle may wait: until then no witness loses anything"""

    @property
    def samples_since(self) -> Mapping[str, float]:
        """Stamp of the newest entry of each ring of the driver that was read, Unix seconds; empty asks for all."""
        if self._asks_all:
            return {}
        return {name: ring.newest_wall for name, ring in ((UTILIZATION, self._ring), *self._engines)}

    def newest_wall(self, monotonic: float) -> float | None:
        """Up to when the driver's ring has told the utilization, Unix seconds; None while it tells nothing."""
        return self._ring.newest_wall if self._has_ring(monotonic) else None

    def read(self, cycle: Cycle, monotonic: float, wall: float) -> Activity | None:
        """Activity of the whole GPU, None when it has no source (MIG mode, or every call failed).

        GPM readings that the other witnesses contradict are taken out of the cycle.
        """
        # The first witness was read when the cycle began: of what came later its silence says nothing.
        watched_until = monotonic if cycle.begin is None else cycle.begin
        previous, self._last_monotonic = self._last_monotonic, watched_until
        self._note_absence(previous, watched_until)
        stepped = self._note_offset(wall - monotonic)
        seen = self._witnesses.observe(moment_of(cycle))
        self._trust.review(cycle, seen, monotonic)
        wall_watched = wall - (monotonic - watched_until)
        worked = self._engines.read(cycle, watched_until, wall_watched, stepped=stepped)
        active = active_names(seen)
        unknown = sum(observation is UNKNOWN for observation in seen.values())
        known = not unknown and not cycle.witness_missing
        covers = self._witnesses.momentary(seen) <= cycle.engine_samples.keys()
        if previous is not None:
            read_at = monotonic if cycle.witnessed_at is None else cycle.witnessed_at
            self._note_watch(previous, watched_until, read_at, active, known=known, covers=covers)
        if stepped:
            self._ring.restart(wall)
            spans: tuple[Span, ...] = ()
        else:
            # What was stamped later is read again in the next cycle, when its time was watched.
            spans = self._read_ring(cycle, watched_until, wall_watched)
        self._choose_interval(monotonic, wall, covered=covers and known and not cycle.instances)
        if self._ring.answered:
            self._last_samples_monotonic = monotonic
        elif cycle.utilization is not None and self._covers_gap(previous, monotonic):
            end = cycle.utilization_at
            start = max(self._last_utilization_at, end - self._longest())
            spans = (Span(start, end, cycle.utilization),)
        self._last_utilization_at = cycle.utilization_at
        spans = tuple(judged for span in spans for judged in self._judge_run(span))
        reported = cycle.utilization is not None or bool(cycle.driver_samples)
        alive = active or worked or ((UTILIZATION,) if cycle.utilization or self._ring.contradicted else ())
        if alive and not any(_is_active(span) for span in spans):
            # Nothing that covers time, but a sign of life: a span without length books nothing and ends idle runs.
            spans = (*spans, Span(monotonic, monotonic, cycle.utilization or 0.0, alive))
        if not reported and not spans:
            return None
        return Activity(self._unit, spans, 1 + len(seen) - unknown if reported else 0)

    def _read_ring(self, cycle: Cycle, until: float, wall: float) -> tuple[Span, ...]:
        """What the driver's ring says of the time up to `until` (monotonic, `wall` at that moment)."""
        spans = self._ring.read(cycle.driver_samples, until, wall)
        if not cycle.utilization:
            return spans
        entries = [piece for span in spans for piece in self._entries(span)]
        return agreeing(entries, cycle.utilization_at, self._longest())

    def _longest(self) -> float:
        """The longest time that one utilization of the driver may stand for."""
        return LATENESS * self._rules.driver_period_max_s

    def _choose_interval(self, now: float, wall: float, *, covered: bool) -> None:
        """The next cycle may wait longer after two in a row that missed nothing, and half as long as the rings keep."""
        rules, rings = self._rules, [self._ring, *(ring for _, ring in self._engines)]
        covered &= all(ring.is_gapless and ring.newest_wall > wall - RING_LAG_MAX_S for ring in rings)
        kept_s = min(ring.length_s for ring in rings)
        longest = rules.interval_max_s if covered and self._was_covered else 0.0
        self.interval_s = max(rules.interval_s, min(longest, kept_s / 2))
        self._was_covered = covered
        if self._rings_asked_at is None or self._asks_all:
            self._rings_asked_at = now
        self._asks_all = kept_s < 2 * rules.interval_max_s and now - self._rings_asked_at > RING_ASK_S

    def _note_watch(
        self, previous: float, until: float, read_at: float, active: tuple[str, ...], *, known: bool, covers: bool
    ) -> None:
        """Remember what the witnesses, read from `until` to `read_at`, say of the time since the last cycle.

        Quiet ones cover the time that each of them saw: up to the first read, and from one period of the driver before
        the last one, since an engine's utilization stands for no more; or all of it where the driver `covers` it with
        rings and sums. What an active one saw lies anywhere up to the last read.
        """
        if known and not active:
            seen_s = self._longest()
            # Twice the interval is what the rings keep. Where a site reads less often, sums are too coarse to tell.
            if covers and read_at - previous <= 2 * min(self.interval_s, self._rules.interval_max_s):
                seen_s = read_at - previous
            self._track.note(WitnessPeriod(max(previous, read_at - seen_s), until, active, known))
        else:
            self._track.note(WitnessPeriod(previous, read_at, active, known))

    def _entries(self, span: Span) -> Iterable[Span]:
        """The entries of the driver's ring that a span stands for, of one length."""
        return (span,) if span.ratio > 0.0 else pieces(span, LATENESS * self._ring.period_s)

    def _judge_run(self, span: Span) -> Iterable[Span]:
        """A span of many entries is judged as one where it is idle, else entry by entry."""
        whole = self._judge(span)
        if whole is not None and not whole.other:
            return (whole,)
        return [judged for entry in self._entries(span) if (judged := self._judge(entry)) is not None]

    def _judge(self, span: Span) -> Span | None:
        """A span of no utilization is other activity when a witness saw any in it, and unknown when not all of it was
        watched; a span with utilization is what it is.
        """
        if span.ratio > 0.0 or span.end <= span.start:
            return span
        unknown = False
        for track in (self._track, *self._engines.tracks()):
            active = track.judge(span)
            if active:
                return span._replace(other=(*span.other, *active))
            unknown |= active is None
        return None if unknown else span

    def _note_absence(self, previous: float | None, now: float) -> None:
        """Our absence is not the silence of the driver's ring."""
        if previous is None or self._last_samples_monotonic is None or now - previous <= self._max_gap:
            return
        self._last_samples_monotonic += now - previous

    def _note_offset(self, offset: float) -> bool:
        """Whether the wall clock was stepped since last time, against the monotonic one; logged."""
        previous, self._offset = self._offset, offset
        step = 0.0 if previous is None else offset - previous
        if abs(step) <= WALL_STEP_S:
            return False
        log.warning(
            "gpu %s: the wall clock was stepped by %+.0f s; the driver stamps its samples with it, so activity may "
            "be unknown for up to %.0f s",
            self._unit.uuid,
            step,
            RING_AGE_MAX_S,
        )
        return True

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
