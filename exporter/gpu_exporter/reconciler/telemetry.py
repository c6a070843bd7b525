"""The reconciler's own metrics, served by prometheus_client."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Collection, Iterator, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from gpu_exporter.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.reconciler.brakes import FREEZES
from gpu_exporter.reconciler.evidence import HolderName
from gpu_exporter.reconciler.policy import MARKED, Decision
from gpu_exporter.reconciler.surroundings import EXEMPT_BY

STAGES_MAX = 30_000  # series; a tenth of a site of 100,000 allocations is idle at a time, or some bug makes it so
RESULTS = ("written", "renewed", "withdrawn", "replaced", "conflict", "throttled", "fenced", "error")
REASONS = (
    "cluster",
    "critical",
    "daemonset",
    "foreign",
    "gpus",
    "identity",
    "limit",
    "no_marker",
    "node",
    "not_running",
    "replaced",
    "restarted",
    "stale",
    "static",
    "terminating",
    "throttled",
)

ACTION_RESULTS = ("done", "shadow", "unconfirmed", "refused", "replaced", "conflict", "throttled", "error")
HELD = (  # why nothing was done to a group that is underused
    "acted",
    "audit",
    "changed",
    "class",
    "ended",
    "exempt",
    "failed",
    "fenced",
    "kind",
    "kueue",
    "limit",
    "members",
    "no_demand",
    "not_warned",
    "proof",
    "regret",
    "requeued",
    "rests",
    "shadow",
    "stale",
    "terminating",
    "unknown",
)


class _LastSuccess(Collector):
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


class _Stages(Collector):
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


class _Demand(Collector):
    """Absent while Slurm does not answer, or where there is none: 0 would say that nobody waits."""

    def __init__(self) -> None:
        self.gpus: Mapping[str, float] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "gpu_demand_pending_gpus",
            "GPUs that pending Slurm jobs wait for (reasons Resources and Priority), by partition; a job that asks for "
            "several partitions is in each.",
            labels=("pool",),
        )
        for pool, gpus in self.gpus.items():
            family.add_metric([pool], gpus)
        yield family


class Telemetry:
    """gpu_reconciler_* with every label value present from the start, so that no first event is missed."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # of the whole process, before the first metric
        self.registry = CollectorRegistry()
        self._clock = clock
        self._last_end = clock.monotonic()
        ProcessCollector(registry=self.registry)
        self._cycles = Counter("gpu_reconciler_cycles", "Cycles begun.", registry=self.registry)
        self._duration = Histogram(
            "gpu_reconciler_cycle_duration_seconds",
            "Time that a cycle took.",
            registry=self.registry,
            buckets=(0.1, 0.5, 1, 2, 5, 10, 30, 60),
        )
        self._success = _LastSuccess()
        self.registry.register(self._success)
        self._stages = _Stages()
        self.registry.register(self._stages)
        self._demand = _Demand()
        self.registry.register(self._demand)
        self._labelled = Gauge("gpu_reconciler_labelled", "Marks that exist.", ["stage"], registry=self.registry)
        self._writes = Counter(
            "gpu_reconciler_writes",
            "Marks written, renewed, withdrawn, and writes that failed. replaced: by then it was another pod or job. "
            "fenced: another replica holds the Lease.",
            ["result"],
            registry=self.registry,
        )
        self._skipped = Counter(
            "gpu_reconciler_skipped", "Marks not set, each cycle, by reason.", ["reason"], registry=self.registry
        )
        self._frozen = Gauge(
            "gpu_reconciler_frozen",
            "1 while nothing new is marked, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._exempt = Gauge(
            "gpu_reconciler_exempt",
            "GPUs and MIG instances that are idle and whose holders asked to keep them, by who asked.",
            ["source"],
            registry=self.registry,
        )
        self._underused = Counter(
            "gpu_reconciler_underused",
            "Holders that became underused by the evidence, marked or not, by the policy that decided and their class.",
            ["policy", "class"],
            registry=self.registry,
        )
        self._regrets = Counter(
            "gpu_reconciler_regrets",
            "Those of them that worked again within an hour.",
            ["policy", "class"],
            registry=self.registry,
        )
        self._applies = Gauge(
            "gpu_reconciler_apply", "1 when marks are written, 0 in a dry run.", registry=self.registry
        )
        self._actions = Counter(
            "gpu_reconciler_actions",
            "What was done to underused holders, by action and result. shadow: it would have been done. unconfirmed: "
            "it was done, and did not show at once.",
            ["action", "result"],
            registry=self.registry,
        )
        self._held = Counter(
            "gpu_reconciler_actions_held",
            "Underused groups to which nothing was done, each cycle, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._audit_errors = Counter(
            "gpu_reconciler_audit_errors", "Lines of the audit file that could not be written.", registry=self.registry
        )
        self._leader = Gauge(
            "gpu_reconciler_leader",
            "1 in the process that decides, 0 in one that waits for its Lease.",
            registry=self.registry,
        )
        self._leader.set(1)
        for reason in FREEZES:
            self._frozen.labels(reason)
        for source in EXEMPT_BY:
            self._exempt.labels(source)
        for result in RESULTS:
            self._writes.labels(result)
        for reason in REASONS:
            self._skipped.labels(reason)
        for stage in (*MARKED, "other"):
            self._labelled.labels(stage)

    def note_actions(self, kinds: Collection[str]) -> None:
        """Actions that are possible here: their counters begin at 0."""
        for kind in kinds:
            for result in ACTION_RESULTS:
                self._actions.labels(kind, result)
        for reason in sorted({*HELD, *REASONS, "conflict", "error"}):
            self._held.labels(reason)

    def count_action(self, action: str, result: str) -> None:
        self._actions.labels(action, result).inc()

    def count_held(self, reason: str) -> None:
        self._held.labels(reason).inc()

    def note_mode(self, *, applies: bool) -> None:
        self._applies.set(applies)

    def note_standby(self) -> None:
        """Another process decides: this one is well, and says nothing of marks and holders."""
        self._leader.set(0)
        self._last_end = self._clock.monotonic()
        self._note_state({}, (), ())

    def note_demand(self, gpus: Mapping[str, float] | None) -> None:
        """GPUs that pending jobs wait for, by partition; None while that is not known."""
        self._demand.gpus = gpus or {}

    def since_last_cycle_s(self) -> float:
        """Seconds since a cycle ended, with or without evidence; since the start where none has."""
        return self._clock.monotonic() - self._last_end

    def count_write(self, result: str) -> None:
        self._writes.labels(result).inc()

    def count_skip(self, reason: str) -> None:
        self._skipped.labels(reason).inc()

    def count_underused(self, policy: str, kind: str) -> None:
        self._underused.labels(policy, kind).inc()
        self._regrets.labels(policy, kind)  # 0 of so many, and not nothing

    def count_regret(self, policy: str, kind: str) -> None:
        self._regrets.labels(policy, kind).inc()

    def count_audit_error(self) -> None:
        self._audit_errors.inc()

    def note_cycle(
        self,
        began: float,
        complete: bool,
        standing: Mapping[HolderName, str],
        decisions: Sequence[Decision] = (),
        frozen: Collection[str] = (),
    ) -> None:
        """A cycle that began at `began` (monotonic seconds) has ended; `frozen`: why nothing is marked."""
        self._leader.set(1)
        self._note_state(standing, decisions, frozen)
        self._last_end = self._clock.monotonic()
        self._cycles.inc()
        self._duration.observe(self._last_end - began)
        if complete:
            self._success.wall = self._clock.wall()

    def _note_state(
        self, standing: Mapping[HolderName, str], decisions: Sequence[Decision], frozen: Collection[str]
    ) -> None:
        for reason in FREEZES:
            self._frozen.labels(reason).set(reason in frozen)
        exempt = Tally(
            decision.exempt_by for decision in decisions if decision.stage == "exempt" for _ in decision.units
        )
        for source in EXEMPT_BY:
            self._exempt.labels(source).set(exempt[source])
        self._stages.note(decisions)
        # A stage is read from live objects, which others may edit: one that is not ours makes no series of its own.
        tally = Tally(stage if stage in MARKED else "other" for stage in standing.values())
        for stage in (*MARKED, "other"):
            self._labelled.labels(stage).set(tally[stage])
