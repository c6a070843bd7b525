"""Series of the reconciler that are absent until known, one for each holder, or counted elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gpu_exporter.reconciler.decision.policy import MARKED, Decision
from gpu_exporter.reconciler.slurm.demand import Demand

STAGES_MAX = 30_000  # series; a tenth of a site of 100,000 allocations is idle at a time, or some bug makes it so


class LastSuccess(Collector):
    """A gauge that is absent until it has a value: 0 would be a success in 1970."""

    def __init__(self) -> None:
        self.wall: float | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "gpu_reconciler_last_success_timestamp_seconds", "End of the last cycle that had all of its evidence."
        )
        if self.wall is not None:
            family.add_metric([], self.wall)
        yield family


class Stages(Collector):
    """One series per holder that is a candidate or more: owners' alerts read it, so that one place decides."""

    def __init__(self) -> None:
        self._rows: Sequence[tuple[str, ...]] = ()

    def note(self, decisions: Sequence[Decision]) -> None:
        """Keep what is published, and nothing of the evidence behind it."""
        labelled = [(each.name, each.stage) for each in decisions if each.stage in MARKED][:STAGES_MAX]
        self._rows = [
            ("slurm", "", "", name, stage) if scheduler == "slurm" else (scheduler, namespace, name, "", stage)
            for (scheduler, namespace, name), stage in labelled
        ]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "gpu_reconciler_allocation_stage",
            "What the last cycle's evidence says of a pod or job, always 1; in a dry run too.",
            labels=("scheduler", "namespace", "pod", "job_id", "stage"),
        )
        for row in self._rows:
            family.add_metric(row, 1)
        yield family


class DemandSeries(Collector):
    """Absent while Slurm does not answer, or where there is none: 0 would say that nobody waits."""

    def __init__(self) -> None:
        self.demand: Demand | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        pending = GaugeMetricFamily(
            "gpu_demand_pending_gpus",
            "GPUs that pending Slurm jobs wait for (reasons Resources and Priority), by partition; a job that asks for "
            "several partitions is in each.",
            labels=("pool",),
        )
        counted = GaugeMetricFamily(
            "gpu_demand_counted_gpus",
            "Those of them that count before GPUs are taken back: of one job and of one account no more than "
            "alerts.demand_pod_max and alerts.demand_tenant_max.",
            labels=("pool",),
        )
        if self.demand is not None:
            for pool, gpus in self.demand.pending.items():
                pending.add_metric([pool], gpus)
            for pool, gpus in self.demand.counted.items():
                counted.add_metric([pool], gpus)
        yield pending
        yield counted


class OddObjects(Collector):
    """Counted where objects are read."""

    def __init__(self) -> None:
        self.counts: Mapping[tuple[str, str], int] = {}

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "gpu_reconciler_odd_objects",
            "Times that an object was left out of a list because it is malformed or too large, by kind and reason.",
            labels=("kind", "reason"),
        )
        for labels, count in self.counts.items():
            family.add_metric(labels, count)
        yield family
