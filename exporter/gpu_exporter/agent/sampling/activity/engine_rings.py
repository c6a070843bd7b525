"""Reads the driver's ring buffers of the encoder, decoder, JPEG and optical-flow engines.

The driver writes these entries together with the utilization entries and with the same stamps. Entries of both rings
cover the same time.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpu_exporter.agent.collectors.contract import Cycle
from gpu_exporter.agent.sampling.activity.driver_ring import DriverRing
from gpu_exporter.agent.sampling.watches import Track, WitnessPeriod


class EngineRings:
    """The ring buffers of one device's engines, kept from cycle to cycle."""

    def __init__(self, longest_s: float) -> None:
        """`longest_s`: the longest sample period of the driver, in seconds."""
        self._longest_s = longest_s
        self._rings: dict[str, tuple[DriverRing, Track]] = {}

    def __iter__(self) -> Iterator[tuple[str, DriverRing]]:
        return ((name, ring) for name, (ring, _) in self._rings.items())

    def tracks(self) -> Iterator[Track]:
        return (track for _, track in self._rings.values())

    def read(self, cycle: Cycle, monotonic: float, wall: float, *, stepped: bool) -> tuple[str, ...]:
        """Reads the new entries up to `monotonic` (the same moment as `wall`). Returns the names of the active engines.

        `stepped`: the wall clock jumped. The present entries were stamped before the jump, and are discarded.
        """
        for name in self._rings.keys() - cycle.engine_samples.keys():
            del self._rings[name]  # its next read starts with all entries
        active: list[str] = []
        for name, samples in cycle.engine_samples.items():
            if name not in self._rings:
                self._rings[name] = (DriverRing(self._longest_s), Track())
            ring, track = self._rings[name]
            if stepped:
                ring.restart(wall)
                continue
            spans = ring.read(samples, monotonic, wall)
            for span in spans:
                track.note(WitnessPeriod(span.start, span.end, (name,) if span.ratio else (), known=True))
            if any(span.ratio for span in spans):
                active.append(name)
        return tuple(active)
