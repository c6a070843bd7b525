"""Metrics whose series are replaced as a whole. They may be absent, or have one series per holder."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from gpu_exporter.reconciler.decision.policy import MARKED, SHARING, Decision
from gpu_exporter.reconciler.decision.stalls import SPINNING, STALLED
from gpu_exporter.reconciler.evidence.records import HolderName

Family: TypeAlias = GaugeMetricFamily | CounterMetricFamily
log = logging.getLogger(__name__)
CHEAP = ("candidate", SHARING)  # stages on which nothing acts
STAGES_MAX = 30_000  # series; normally a tenth of 100,000 allocations is idle at a time, a bug could publish more


class Rows(Collector):
    """One family of metrics. `rows`: its numbers by the values of its labels; without rows, it has no series."""

    def __init__(
        self, registry: CollectorRegistry, family: type[Family], name: str, text: str, labels: Sequence[str] = ()
    ) -> None:
        self._make = partial(family, name, text, labels=labels)
        self.rows: Mapping[tuple[str, ...], float] = {}
        registry.register(self)

    def collect(self) -> Iterator[Family]:
        family = self._make()
        for labels, value in self.rows.items():
            family.add_metric(labels, value)
        yield family


class Stages:
    """One series per holder whose stage leads to a mark, and one per holder whose gang makes no progress.

    The alerts to owners use these series, so that only the reconciler decides.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("scheduler", "namespace", "pod", "job_id")
        self.stages = Rows(
            registry,
            GaugeMetricFamily,
            "gpu_reconciler_allocation_stage",
            "Stage of a pod or job after the last cycle, also in a dry run, always 1. stalled (of a server: "
            "spinning): the gang makes no progress; such a holder may have a second stage.",
            (*labels, "stage"),
        )
        self.rises = Rows(
            registry,
            GaugeMetricFamily,
            "gpu_reconciler_allocation_underused_timestamp_seconds",
            "Unix time at which a candidate becomes underused if its GPUs stay idle. Absent if an opt-out or a "
            "policy keeps it a candidate.",
            labels,
        )
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
        self.stages.rows = {(*_labels(name), stage): 1.0 for name, stage in labelled[:STAGES_MAX]}
        rises = ((_labels(each.name), wall) for each in decisions if (wall := each.underused_wall) is not None)
        self.rises.rows = dict(islice(rises, STAGES_MAX))


def _labels(name: HolderName) -> tuple[str, str, str, str]:
    """Returns the values of the labels scheduler, namespace, pod and job_id."""
    if name.scheduler == "slurm":
        return ("slurm", "", "", name.name)
    return (name.scheduler, name.namespace, name.name, "")
