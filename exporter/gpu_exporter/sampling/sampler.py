"""One cycle over one device: run the collectors, make the snapshot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpu_exporter.clock import Clock
from gpu_exporter.collectors import Collector, Cycle
from gpu_exporter.devices.errors import DeviceLost
from gpu_exporter.devices.protocol import Device
from gpu_exporter.model import (
    Activity,
    CollectorOutcome,
    DeviceSnapshot,
    InstanceReading,
    Span,
    UnitId,
)
from gpu_exporter.sampling.activity import ActivityReader, ActivityRules


class DeviceSampler:
    """Reads one device again and again. Not thread-safe: belongs to the device's one loop."""

    def __init__(self, device: Device, collectors: Sequence[Collector], clock: Clock, rules: ActivityRules) -> None:
        self.device = device
        self.error_counts: Counter[tuple[str, str]] = Counter()
        self._collectors = collectors
        self._clock = clock
        self._rules = rules
        self._activity = ActivityReader(UnitId(device.identity.uuid), rules)
        self._instances_seen: dict[str, float] = {}

    def sample(self) -> DeviceSnapshot:
        """Run every collector once. A lost GPU gives a snapshot with `up` false and nothing else."""
        cycle = Cycle(self.device, self._activity.newest_sample_wall)
        outcomes: list[CollectorOutcome] = []
        try:
            for collector in self._collectors:
                outcomes.append(self._collect(collector, cycle))
        except DeviceLost as exc:
            self.error_counts[exc.call, exc.error] += 1
            return DeviceSnapshot(
                self.device.identity, self._clock.monotonic(), self._clock.wall(), up=False, error=str(exc)
            )
        monotonic, wall = self._clock.monotonic(), self._clock.wall()
        self.error_counts.update(cycle.errors)
        return DeviceSnapshot(
            identity=self.device.identity,
            monotonic=monotonic,
            wall=wall,
            up=True,
            samples=tuple(cycle.samples),
            activity=self._activity.read(cycle, monotonic, wall),
            instances=tuple(self._read_instances(cycle, monotonic)),
            outcomes=tuple(outcomes),
            instances_known=cycle.instances_known,
        )

    def _collect(self, collector: Collector, cycle: Cycle) -> CollectorOutcome:
        start = self._clock.monotonic()
        errors = len(cycle.errors)
        collector.collect(cycle)
        failed = cycle.errors[errors:]
        return CollectorOutcome(
            collector.name,
            success=not failed,
            duration_s=self._clock.monotonic() - start,
            error=" ".join(failed[0]) if failed else "",
        )

    def _read_instances(self, cycle: Cycle, monotonic: float) -> list[InstanceReading]:
        """An instance's reading covers the time since it was last seen; at first sight it only seeds."""
        readings: list[InstanceReading] = []
        seen: dict[str, float] = {}
        for instance in cycle.instances:
            activity: Activity | None = None
            if instance.activity is not None:
                previous = self._instances_seen.get(instance.uuid)
                spans: tuple[Span, ...] = ()
                if previous is not None and (
                    monotonic - previous <= self._rules.gap_intervals * self._rules.interval_s
                ):
                    spans = (Span(previous, monotonic, min(1.0, instance.activity), other=False),)
                activity = Activity(UnitId(self.device.identity.uuid, instance.uuid), spans, witnesses=1)
            seen[instance.uuid] = monotonic
            readings.append(
                InstanceReading(
                    instance.uuid,
                    instance.mig,
                    instance.profile,
                    instance.sm_slices,
                    instance.samples,
                    activity,
                )
            )
        self._instances_seen = seen
        return readings
