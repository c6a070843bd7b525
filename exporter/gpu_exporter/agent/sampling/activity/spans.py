"""Derives spans (times with known activity) from the driver's answers.

A utilization of 0 alone does not count as idle. Every other readable witness (engines, GPM, traffic, power) must show
no activity at the same time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from gpu_exporter.agent.collectors.contract import Cycle
from gpu_exporter.agent.devices.protocol import ENGINES, Gpm
from gpu_exporter.agent.sampling.activity.driver_ring import (
    LATENESS,
    RING_AGE_MAX_S,
    WALL_STEP_S,
    DriverRing,
    agreeing,
    pieces,
)
from gpu_exporter.agent.sampling.activity.engine_rings import EngineRings
from gpu_exporter.agent.sampling.activity.gpm_trust import GpmTrust
from gpu_exporter.agent.sampling.activity.witnesses import (
    UNKNOWN,
    ActivityRules,
    Moment,
    Observation,
    Witnesses,
    active_names,
    moment_of,
)
from gpu_exporter.agent.sampling.watches import Track, WitnessPeriod
from gpu_exporter.common.model.readings import UTILIZATION, Activity, Span
from gpu_exporter.common.model.units import UnitId

log = logging.getLogger(__name__)
RING_ASK_S = 10.0  # how often all entries of a short ring are requested again: the ring may just have been emptied
RING_LAG_MAX_S = 2.0  # a ring whose newest entry is older is read at the short interval
RING_PATIENCE_S = 30.0  # how long to wait for a silent ring: it keeps some 20 s and may deliver late


def instance_activity(unit: UnitId, gpm: Gpm, at: float, rules: ActivityRules, witnesses: Witnesses) -> Activity:
    """Returns the activity of a MIG instance over the GPM window that ended at `at`. Only GPM reports it.

    All instances may share `witnesses`: a GPM reading covers its own window, and needs no values of earlier cycles.
    Only the lowest traffic of a link is kept between cycles. The value of the quietest instance is valid for all.
    """
    seen = witnesses.observe(Moment(gpm, is_instance=True))
    active = active_names(seen)
    known = gpm.graphics is not None and gpm.span_s <= rules.gap_intervals * rules.interval_s
    ratio = gpm.graphics if gpm.graphics is not None and gpm.graphics > rules.gpm_idle_max_ratio else 0.0
    spans: tuple[Span, ...] = ()
    is_unclear = gpm.missing or UNKNOWN in seen.values()
    if known and (ratio or active or not is_unclear):
        spans = (Span(at - gpm.span_s, at, ratio, () if ratio else active),)
    elif active:  # activity without a known time: it ends idle runs
        spans = (Span(at, at, ratio, active),)
    return Activity(unit, spans, len(seen) if gpm.graphics is not None else 0)


class ActivityReader:
    """Converts the cycles of one device into spans."""

    def __init__(self, unit: UnitId, rules: ActivityRules, rest_w: float | None = None) -> None:
        """`rest_w`: the GPU's power at rest in watts, None if unknown."""
        self._unit = unit
        self._rules = rules
        self._max_gap = rules.gap_intervals * rules.interval_s
        self._witnesses = Witnesses(rules, rest_w)
        self._trust = GpmTrust(rules)
        self._offset: float | None = None
        self._last_monotonic: float | None = None
        self._last_utilization_at = 0.0
        self._last_samples_monotonic: float | None = None
        self._ring = DriverRing(rules.driver_period_max_s)
        self._engines = EngineRings(rules.driver_period_max_s)
        self._rings_asked_at: float | None = None  # when all entries of the rings were last requested
        self._asks_all = True
        self._was_covered = False
        self._track = Track()
        self.interval_s = rules.interval_s
        """seconds until the next cycle, short enough that no witness loses data"""

    @property
    def samples_since(self) -> Mapping[str, float]:
        """The stamp of the newest entry read so far (Unix seconds), for each ring buffer of the driver.

        Empty to request all entries.
        """
        if self._asks_all:
            return {}
        return {name: ring.newest_wall for name, ring in ((UTILIZATION, self._ring), *self._engines)}

    def newest_wall(self, monotonic: float) -> float | None:
        """Returns the stamp of the newest entry in the driver's ring (Unix seconds). None without a ring."""
        return self._ring.newest_wall if self._has_ring(monotonic) else None

    def read(self, cycle: Cycle, monotonic: float, wall: float) -> Activity | None:
        """Returns the activity of the whole GPU. None if nothing reports it (MIG mode, or every call failed).

        Removes GPM readings from the cycle that contradict the other witnesses.
        """
        # The first witness was read when the cycle began. If it was quiet, this proves nothing about later time.
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
            # Entries with later stamps are read again in the next cycle, when the witnesses cover their time.
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
        if alive and not any(span.ratio > 0.0 or span.other for span in spans):
            # Activity without a known time: a span without length adds no time, but ends idle runs.
            spans = (*spans, Span(monotonic, monotonic, cycle.utilization or 0.0, alive))
        if not reported and not spans:
            return None
        return Activity(self._unit, spans, 1 + self._count(seen) if reported else 0)

    @staticmethod
    def _count(seen: Mapping[str, Observation]) -> int:
        """Returns the number of witnesses that see computation. Media engines do not count: they only contradict."""
        return sum(name not in ENGINES and observation is not UNKNOWN for name, observation in seen.items())

    def _read_ring(self, cycle: Cycle, until: float, wall: float) -> tuple[Span, ...]:
        """Returns the spans of the driver's ring buffer up to `until` (monotonic seconds, the moment of `wall`)."""
        spans = self._ring.read(cycle.driver_samples, until, wall)
        if not cycle.utilization:
            return spans
        entries = [piece for span in spans for piece in self._entries(span)]
        return agreeing(entries, cycle.utilization_at, self._longest())

    def _longest(self) -> float:
        """Returns the most seconds that one utilization value of the driver may cover."""
        return LATENESS * self._rules.driver_period_max_s

    def _choose_interval(self, now: float, wall: float, *, covered: bool) -> None:
        """Chooses the seconds until the next cycle: more if the driver's rings covered the last two cycles.

        The interval is at most half of the time for which the rings keep their entries.
        """
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
        """Records whether the witnesses were active since the last cycle. They were read from `until` to `read_at`.

        - Active: a witness may have been active at any moment up to the last read.
        - Quiet: only the time that every witness covers is idle. This time ends at the first read. If the driver's ring
          buffers and sums cover everything (`covers`), it begins at the last cycle. Otherwise, it begins one driver
          period before the last read, because the utilization of an engine covers only this period.
        """
        if known and not active:
            seen_s = self._longest()
            # The rings keep twice the interval. If a site reads less often, sums are too coarse as a proof.
            if covers and read_at - previous <= 2 * min(self.interval_s, self._rules.interval_max_s):
                seen_s = read_at - previous
            self._track.note(WitnessPeriod(max(previous, read_at - seen_s), until, active, known))
        else:
            self._track.note(WitnessPeriod(previous, read_at, active, known))

    def _entries(self, span: Span) -> Iterable[Span]:
        """Splits a span of several ring entries into these entries. All have the same length."""
        return (span,) if span.ratio > 0.0 else pieces(span, LATENESS * self._ring.period_s)

    def _judge_run(self, span: Span) -> Iterable[Span]:
        """Judges a span of several ring entries: as a whole if it is idle, otherwise entry by entry."""
        whole = self._judge(span)
        if whole is not None and not whole.other:
            return (whole,)
        return [judged for entry in self._entries(span) if (judged := self._judge(entry)) is not None]

    def _judge(self, span: Span) -> Span | None:
        """Judges a span without utilization by the other witnesses. A span with utilization remains unchanged.

        If a witness was active in the span, the span gets that witness in `other`. None (unknown) if the witnesses did
        not cover the whole span.
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
        """Adds a pause in sampling to the time of the ring's last answer. The ring then does not count as silent."""
        if previous is None or self._last_samples_monotonic is None or now - previous <= self._max_gap:
            return
        self._last_samples_monotonic += now - previous

    def _note_offset(self, offset: float) -> bool:
        """Returns whether the wall clock jumped against the monotonic clock since the last cycle. Logs the jump."""
        previous, self._offset = self._offset, offset
        step = 0.0 if previous is None else offset - previous
        if abs(step) <= WALL_STEP_S:
            return False
        log.warning(
            "gpu %s: the wall clock jumped by %+.0f s. Activity may be unknown for up to %.0f s, because the "
            "driver stamps its samples with the wall clock: check NTP",
            self._unit.uuid,
            step,
            RING_AGE_MAX_S,
        )
        return True

    def _covers_gap(self, previous: float | None, monotonic: float) -> bool:
        """Returns whether the driver's present utilization value may cover the time since the last cycle."""
        near = previous is not None and monotonic - previous <= self._max_gap
        return near and not self._has_ring(monotonic)

    def _has_ring(self, monotonic: float) -> bool:
        """Returns whether the driver's ring buffer has answered recently. If so, its next entries are awaited."""
        last = self._last_samples_monotonic
        return last is not None and monotonic - last <= max(RING_PATIENCE_S, self._max_gap)
