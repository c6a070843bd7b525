"""Runs the collectors on one GPU in each cycle, and makes a snapshot of the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpu_exporter.agent.collectors.contract import Collector, Cycle, InstanceCycle, Totals
from gpu_exporter.agent.collectors.facts import take_facts
from gpu_exporter.agent.devices.errors import DENIED, NOT_READY, DeviceLost
from gpu_exporter.agent.devices.protocol import Device
from gpu_exporter.agent.sampling.activity.effort import EffortReader
from gpu_exporter.agent.sampling.activity.power_trust import PowerTrust
from gpu_exporter.agent.sampling.activity.process_periods import ProcessPeriods
from gpu_exporter.agent.sampling.activity.spans import ActivityReader, instance_activity
from gpu_exporter.agent.sampling.activity.stuck import StuckCounter
from gpu_exporter.agent.sampling.activity.witnesses import ActivityRules, Witnesses
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.metrics import Sample
from gpu_exporter.common.model.readings import (
    Activity,
    CollectorOutcome,
    DeviceSnapshot,
    InstanceReading,
    ProcessList,
    ProcessPeriod,
)
from gpu_exporter.common.model.units import UnitId

# A GPU that is ready answers these calls. NVML_ERROR_NOT_READY of another call, e.g. of a video engine, says less.
READY_CALLS = frozenset(
    (
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetTemperatureV",
        "nvmlDeviceGetClockInfo",
    )
)


class _Kept(NamedTuple):
    """The last result of a collector that skips cycles. `due`: when it runs again (monotonic seconds)."""

    due: float
    samples: tuple[Sample, ...]
    outcome: CollectorOutcome
    processes: ProcessList | None


class DeviceSampler:
    """Reads one device in every cycle. Not thread-safe: used by the device's one thread."""

    def __init__(
        self,
        device: Device,
        collectors: Sequence[Collector],
        clock: Clock,
        rules: ActivityRules,
        totals: Totals | None = None,
        is_shared: Callable[[str], bool] = lambda uuid: False,
        rest_w: float | None = None,
    ) -> None:
        """- `totals`: sums of an earlier sampler of this device, to continue.
        - `is_shared`: takes a GPU's UUID, and returns whether the use of each process must be read.
        - `rest_w`: the GPU's power at rest in watts, as an earlier process of the exporter measured it.
        """
        self.device = device
        self.error_counts: Counter[tuple[str, str]] = Counter()
        self._collectors = [collector for collector in collectors if collector.collect is not None]
        self._clock = clock
        self._rules = rules
        self._is_shared = is_shared
        self._periods = ProcessPeriods()
        self._stuck = StuckCounter()
        self._power = PowerTrust()
        self._effort = EffortReader()
        self._activity = ActivityReader(UnitId(device.identity.uuid), rules, rest_w)
        self._witnesses = Witnesses(rules)  # shared by all instances
        self._totals = totals or Totals()
        self._kept: dict[str, _Kept] = {}
        self._has_answered = False

    def sample(self) -> DeviceSnapshot:
        """Runs every collector that is due. A lost GPU has `up` false and no data. Raises DriverChanged."""
        begin, answers, mode = self._clock.monotonic(), self.device.answers, self.device.identity.mig_mode
        cycle = Cycle(self.device, self._activity.samples_since, self._clock.monotonic, self._totals, begin)
        outcomes: list[CollectorOutcome] = []
        try:
            self.device.identify()
            for error in self.device.take_errors():
                cycle.note_failure(error)
            for collector in self._collectors:
                outcomes.append(self._collect(collector, cycle))
        except DeviceLost as exc:
            self.error_counts.update([*cycle.errors, *cycle.remarks, (exc.call, exc.error)])
            self.device.take_errors()
            return self._down(str(exc))
        if self.device.answers != answers:
            self._has_answered = True
        elif failure := self._first_failure(cycle):
            # No call was answered: the GPU is down.
            self.error_counts.update(cycle.errors)
            return self._down(f"the driver answers no call; the first error: {failure}")
        if self.device.identity.mig_mode != mode:
            self._kept.clear()  # values of the other mode
        monotonic, wall = self._clock.monotonic(), self._clock.wall()
        # In a cycle that took too long, the witnesses were read at different times.
        cycle.witness_missing |= monotonic - begin > self._rules.interval_s
        contradiction = self._power.review(cycle, monotonic) or self._stuck.judge(cycle, monotonic)
        gpm = cycle.gpm
        activity = self._activity.read(cycle, monotonic, wall)  # this also reviews the GPM readings
        effort = self._effort.read(cycle, gpm, monotonic)
        try:
            period = self._read_period(cycle, monotonic, wall)
        except DeviceLost as exc:
            self.error_counts.update([*cycle.errors, *cycle.remarks, (exc.call, exc.error)])
            return self._down(str(exc))
        self.error_counts.update([*cycle.errors, *cycle.remarks])
        return DeviceSnapshot(
            identity=self.device.identity,
            monotonic=monotonic,
            wall=wall,
            up=True,
            samples=tuple(cycle.samples),
            activity=None if contradiction else activity,
            instances=tuple(self._read_instance(instance) for instance in cycle.instances),
            outcomes=tuple(outcomes),
            instances_known=cycle.instances_known,
            processes=cycle.processes,
            facts=take_facts(cycle.samples),
            period=period,
            effort=effort,
            contradiction=contradiction,
            note=self._power.note,
            not_ready=next((call for call, error in cycle.errors if error == NOT_READY and call in READY_CALLS), ""),
        )

    def _first_failure(self, cycle: Cycle) -> str:
        """Returns the error that proves the failure of a GPU that answers no call; "" if it supports no call (Jetson).

        After a first answer of the GPU every error counts. Before that, a missing permission does not count.
        """
        failures = [*(" ".join(error) for error in cycle.errors), self.device.first_failure()]
        return next((each for each in failures if each and (self._has_answered or DENIED not in each)), "")

    def _read_period(self, cycle: Cycle, monotonic: float, wall: float) -> ProcessPeriod | None:
        """Reads the work of each process if several holders share the GPU. NVML lacks it for MIG instances."""
        if not self._is_shared(self.device.identity.uuid):
            self._periods.forget()
            return None
        newest_wall = self._activity.newest_wall(monotonic)
        return self._periods.read(cycle, wall if newest_wall is None else newest_wall, monotonic, wall)

    @property
    def interval_s(self) -> float:
        """The most seconds until the next cycle."""
        return self._activity.interval_s

    def _down(self, reason: str) -> DeviceSnapshot:
        self._kept.clear()
        self._periods.forget()
        self._totals.forget_last()
        return DeviceSnapshot(self.device.identity, self._clock.monotonic(), self._clock.wall(), up=False, error=reason)

    def _collect(self, collector: Collector, cycle: Cycle) -> CollectorOutcome:
        assert collector.collect is not None
        start = self._clock.monotonic()
        kept = self._kept.get(collector.name)
        if kept is not None and start < kept.due - self._rules.interval_s / 2:  # closer to this cycle: run now
            cycle.samples += kept.samples
            cycle.processes = kept.processes or cycle.processes
            return kept.outcome
        errors, samples, withdrawn = len(cycle.errors), len(cycle.samples), cycle.withdrawn
        processes = cycle.processes
        collector.collect(cycle)
        for error in self.device.take_errors():
            cycle.note_failure(error)
        failed = cycle.errors[errors:]
        if collector.witness:
            cycle.witnessed_at = self._clock.monotonic()
        cycle.witness_missing |= collector.witness and cycle.withdrawn > withdrawn
        outcome = CollectorOutcome(
            collector.name,
            success=not failed,
            duration_s=self._clock.monotonic() - start,
            error=" ".join(failed[0]) if failed else "",
        )
        if collector.every_s:
            due = start + (0.0 if failed else collector.every_s)  # after a failure it is due in the next cycle
            listed = cycle.processes if cycle.processes is not processes else None
            self._kept[collector.name] = _Kept(due, tuple(cycle.samples[samples:]), outcome, listed)
        return outcome

    def _read_instance(self, instance: InstanceCycle) -> InstanceReading:
        """Reads one MIG instance. Its activity covers the time between two GPM samples, None for the first."""
        activity: Activity | None = None
        if instance.gpm is not None:
            unit = UnitId(self.device.identity.uuid, instance.uuid)
            activity = instance_activity(unit, instance.gpm, instance.gpm_at, self._rules, self._witnesses)
        facts = take_facts(instance.samples)
        if not instance.has_memory:
            facts = facts._replace(memory_used_bytes=None, memory_total_bytes=None)
        return InstanceReading(
            instance.uuid,
            instance.mig,
            instance.profile,
            instance.sm_slices,
            instance.samples,
            activity,
            instance.energy_j,
            facts,
            instance.placement,
        )
