"""Collects the metrics that may be absent, that have one series per holder, or that the markers count."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gpu_exporter.reconciler.decision.policy import MARKED, SHARING, Decision
from gpu_exporter.reconciler.decision.stalls import SPINNING, STALLED
from gpu_exporter.reconciler.evidence.records import Demand, HolderName

log = logging.getLogger(__name__)
CHEAP = ("candidate", SHARING)  # stages on which nothing acts
STAGES_MAX = 30_000  # series; normally a tenth of 100,000 allocations is idle at a time, a bug could publish more


class LastSuccess(Collector):
    """A gauge that is absent until the first success: 0 would mean a success in 1970."""

    def __init__(self) -> None:
        self.wall: float | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "gpu_reconciler_last_success_timestamp_seconds",
            "Unix time of the end of the last cycle that had complete evidence.",
        )
        if self.wall is not None:
            family.add_metric([], self.wall)
        yield family


class Stages(Collector):
    """One series per holder whose stage leads to a mark, and one per holder whose gang makes no progress.

    The alerts to owners use these series, so that only the reconciler decides.
    """

    def __init__(self) -> None:
        self._rows: Sequence[tuple[str, ...]] = ()
        self._rises: Mapping[tuple[str, ...], float] = {}
        self._is_full = False

    def note(self, decisions: Sequence[Decision]) -> None:
        """Keeps only the published labels, not the evidence behind them."""
        labelled = [(each.name, each.stage) for each in decisions if each.stage in MARKED]
        labelled += [(each.name, each.stall) for each in decisions if each.stall in (STALLED, SPINNING)]
        if len(labelled) > STAGES_MAX:
            if not self._is_full:
                log.warning("%d stages exceed the limit %d; some candidates have no series", len(labelled), STAGES_MAX)
            labelled.sort(key=lambda row: row[1] in CHEAP)
        self._is_full = len(labelled) > STAGES_MAX
        self._rows = [(*_labels(name), stage) for name, stage in labelled[:STAGES_MAX]]
        rises = ((_labels(each.name), wall) for each in decisions if (wall := each.underused_wall) is not None)
        self._rises = dict(islice(rises, STAGES_MAX))

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "gpu_reconciler_allocation_stage",
            "Stage of a pod or job after the last cycle, also in a dry run, always 1. stalled (of a server: "
            "spinning): the gang makes no progress; such a holder may have a second stage.",
            labels=("scheduler", "namespace", "pod", "job_id", "stage"),
        )
        for row in self._rows:
            family.add_metric(row, 1)
        yield family
        rise = GaugeMetricFamily(
            "gpu_reconciler_allocation_underused_timestamp_seconds",
            "Unix time at which a candidate becomes underused if its GPUs stay idle. Absent if an opt-out or a "
            "policy keeps it a candidate.",
            labels=("scheduler", "namespace", "pod", "job_id"),
        )
        for labels, wall in self._rises.items():
            rise.add_metric(labels, wall)
        yield rise


def _labels(name: HolderName) -> tuple[str, str, str, str]:
    """Returns the values of the labels scheduler, namespace, pod and job_id."""
    if name.scheduler == "slurm":
        return ("slurm", "", "", name.name)
    return (name.scheduler, name.namespace, name.name, "")


class DemandSeries(Collector):
    """The GPUs that pending Slurm jobs wait for. Absent while Slurm does not answer, and on sites without Slurm,
    because 0 would mean that no job waits.
    """

    def __init__(self) -> None:
        self.demand: Demand | None = None

    def collect(self) -> Iterator[GaugeMetricFamily]:
        pending = GaugeMetricFamily(
            "gpu_demand_pending_gpus",
            "GPUs that pending Slurm jobs wait for (reasons Resources and Priority), by partition. A job that asks for "
            "several partitions counts in each of them.",
            labels=("pool",),
        )
        counted = GaugeMetricFamily(
            "gpu_demand_counted_gpus",
            "Part of gpu_demand_pending_gpus for which the reconciler may take GPUs back: at most "
            "alerts.demand_pod_max for each job and alerts.demand_tenant_max for each account. A job of "
            "several partitions counts in equal parts. 0 where jobs waited earlier.",
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
    """Publishes how many objects the markers omitted because they were malformed or too large."""

    def __init__(self) -> None:
        self.counts: Mapping[tuple[str, str], int] = {}

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "gpu_reconciler_odd_objects",
            "How often an object was left out of a list because it was malformed or too large, by kind and reason.",
            labels=("kind", "reason"),
        )
        for labels, count in self.counts.items():
            family.add_metric(labels, count)
        yield family
