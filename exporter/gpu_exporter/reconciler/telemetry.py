"""The reconciler's own metrics, with prometheus_client."""

from __future__ import annotations

import logging
from collections import Counter as Tally
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from gpu_exporter.common.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.common.web.own_metrics import OwnMetrics
from gpu_exporter.reconciler.decision.brakes import FREEZES
from gpu_exporter.reconciler.decision.outcomes import DROPPED, OUTCOMES, Account, tenant_of
from gpu_exporter.reconciler.decision.policy import MARKED, Decision
from gpu_exporter.reconciler.decision.spared import SPARED, SYSTEM, UNEXPLAINED, IdleExit, find_exits
from gpu_exporter.reconciler.decision.surroundings import EXEMPT_BY
from gpu_exporter.reconciler.evidence.records import Demand, HolderName
from gpu_exporter.reconciler.series import Rows, Stages

log = logging.getLogger(__name__)
NOTHING: Mapping[HolderName, str] = MappingProxyType({})
TENANTS_MAX = 50  # tenants with their own series; all others are counted as OTHER
KINDS_MAX = 20  # pairs of reason and kind with their own series, likewise
OTHER = "other"
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
    SYSTEM,
    "terminating",
    "throttled",
)

ACTION_RESULTS = ("done", "shadow", "unconfirmed", "refused", "replaced", "conflict", "throttled", "error")
SKIPPED = (  # reasons why an underused group was not acted on
    "above",
    "acted",
    "audit",
    "beside",
    "changed",
    "class",
    "ended",
    "exempt",
    "failed",
    "fenced",
    "grace",
    "host_work",
    "journal",
    "kind",
    "kueue",
    "limit",
    "members",
    "no_demand",
    "not_warned",
    "noted",
    "part",
    "paused",
    "pending",
    "proof",
    "refused",
    "regret",
    "requeued",
    "rests",
    "resumed",
    "shadow",
    "size",
    "stale",
    "stranger",
    "terminating",
    "uncounted",
    "unknown",
    "unread",
    "waiting",
    "watched",
)


class Telemetry:
    """The metrics gpu_reconciler_*. Series of known label values exist from the start, so that increase() sees their
    first event.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # for the whole process, before the first metric
        self.registry = CollectorRegistry()
        self._clock = clock
        self._last_end = clock.monotonic()
        self._lost: Sequence[str] = ()  # holders without mark and reason in the last cycle
        self._not_acted: dict[HolderName, str] = {}  # the reason against an action in this cycle
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        ProcessCollector(registry=self.registry)
        self.own = OwnMetrics("gpu_reconciler")
        self.registry.register(self.own)
        self._cycles = counter("gpu_reconciler_cycles", "Cycles begun.")
        self._duration = Histogram(
            "gpu_reconciler_cycle_duration_seconds",
            "Duration of cycles.",
            registry=self.registry,
            buckets=(0.1, 0.5, 1, 2, 5, 10, 30, 60),
        )
        rows = partial(Rows, self.registry, GaugeMetricFamily)
        self._success = rows(  # absent until the first success: 0 would mean a success in 1970
            "gpu_reconciler_last_success_timestamp_seconds",
            "Unix time of the end of the last cycle that had complete evidence.",
        )
        self._stages = Stages(self.registry)
        # Absent while Slurm does not answer, and on sites without Slurm: 0 would mean that no job waits.
        self._pending = rows(
            "gpu_demand_pending_gpus",
            "GPUs that pending Slurm jobs wait for (reasons Resources and Priority), by partition. A job that asks for "
            "several partitions counts in each of them.",
            ("pool",),
        )
        self._counted = rows(
            "gpu_demand_counted_gpus",
            "Part of gpu_demand_pending_gpus for which the reconciler may take GPUs back: at most "
            "alerts.demand_pod_max for each job and alerts.demand_tenant_max for each account. A job of "
            "several partitions counts in equal parts. 0 where jobs waited earlier.",
            ("pool",),
        )
        self._odd_objects = Rows(
            self.registry,
            CounterMetricFamily,
            "gpu_reconciler_odd_objects",
            "How often an object was left out of a list because it was malformed or too large, by kind and reason.",
            ("kind", "reason"),
        )
        self._foreign = gauge(
            "gpu_reconciler_foreign_marks",
            "Pods with the label of a mark that the reconciler did not set and does not change: the pod has "
            "not started, requests no devices, or the value is not a stage.",
        )
        self._labelled = gauge("gpu_reconciler_labelled", "Marks that exist on pods and jobs, by stage.", ["stage"])
        self._writes = counter(
            "gpu_reconciler_writes",
            "Marks written, renewed and withdrawn, and failed writes. replaced: the pod or job was replaced, or is "
            "gone. fenced: another replica holds the Lease.",
            ["result"],
        )
        self._skipped = counter(
            "gpu_reconciler_skipped",
            "Marks that a cycle did not set, counted again in every cycle, by reason.",
            ["reason"],
        )
        self._frozen = gauge("gpu_reconciler_frozen", "1 while a brake prevents new marks, by reason.", ["reason"])
        self._exempt = gauge(
            "gpu_reconciler_exempt",
            "Idle GPUs and MIG instances of exempt holders, by the origin of the exemption: the pod, its owner, its "
            "namespace, the job, or a policy.",
            ["source"],
        )
        self._underused = counter(
            "gpu_reconciler_underused",
            "Groups, single pods and single jobs that became underused, marked or not, by the policy that decided "
            "and by class.",
            ["policy", "class"],
        )
        self._outcomes = counter(
            "gpu_reconciler_outcomes",
            "Outcomes of gpu_reconciler_underused_total. regret: work began again within an hour. right: the GPUs "
            "were observed idle for that whole hour, or the holder ended by itself. unknown: anything else.",
            ["policy", "class", "outcome"],
        )
        self._dropped = counter(
            "gpu_reconciler_record_dropped",
            "Entries that the reconciler dropped because the record of decisions was full. watches: decisions; their "
            "outcome is now unknown. tenants: names of tenants; their decisions still count. acts: actions; an undo "
            "by the owner is not seen. days: counts of whole days.",
            ["what"],
        )
        for what in DROPPED:
            self._dropped.labels(what)
        self._spared = gauge(
            "gpu_reconciler_spared_gpus",
            "GPUs and MIG instances that have been idle for long enough but stay with their holder, by reason and by "
            "namespace or account.",
            ["reason", "tenant"],
        )
        self._idle = gauge(
            "gpu_reconciler_idle_gpus",
            "GPUs and MIG instances that have been idle for long enough, by namespace or account, and by "
            "exit: marked (in a dry run: would be marked), acted (an action on them has begun), spared (they "
            "stay with their holder).",
            ["exit", "tenant"],
        )
        self._unexplained = counter(
            "gpu_reconciler_unexplained",
            "Holders whose GPUs have been idle for long enough, but that have no mark, and no reason for it "
            "is known. Counted in every cycle. A fault of the reconciler.",
        )
        self._unreadable = gauge(
            "gpu_reconciler_unreadable",
            "Idle holders without a decision, because the reconciler cannot read their pod, namespace or "
            "controller, by reason and kind.",
            ["reason", "kind"],
        )
        self._surveyed = gauge("gpu_reconciler_surveyed", "Idle holders whose surroundings were read.")
        self._applies = gauge("gpu_reconciler_apply", "1 when marks are written, 0 in a dry run.")
        self._actions = counter(
            "gpu_reconciler_actions",
            "Actions on underused holders, by action and result. done: the ended pods and jobs are gone. "
            "shadow: mode act would do the action. unconfirmed: a pod or job did not end in time, the effect "
            "is unknown, or the owner could not be notified.",
            ["action", "result"],
        )
        self._acts_skipped = counter(
            "gpu_reconciler_actions_skipped",
            "Underused groups on which the reconciler did not act, counted again in every cycle, by reason.",
            ["reason"],
        )
        self._audit_errors = counter(
            "gpu_reconciler_audit_errors", "Lines that could not be written into the audit file."
        )
        self._leader = gauge(
            "gpu_reconciler_leader", "1 in the process that decides, 0 in a process that waits for the Lease."
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
        """Creates the series of the actions that the site allows, with value 0."""
        for kind in kinds:
            for result in ACTION_RESULTS:
                self._actions.labels(kind, result)
        for reason in sorted({*SKIPPED, *REASONS, "conflict", "error"}):
            self._acts_skipped.labels(reason)

    def count_action(self, action: str, result: str) -> None:
        self._actions.labels(action, result).inc()

    def count_not_acted(self, reason: str) -> None:
        self._acts_skipped.labels(reason).inc()

    def note_mode(self, *, applies: bool) -> None:
        self._applies.set(applies)

    def note_standby(self) -> None:
        """Notes that another process decides, so that this process publishes no marks and no holders."""
        self._leader.set(0)
        self._last_end = self._clock.monotonic()
        self._note_state({}, (), ())
        self._publish_exits(())

    def note_demand(self, demand: Demand | None) -> None:
        """Publishes the GPUs that pending jobs wait for, by partition; None while this is not known."""
        for family, gpus in zip((self._pending, self._counted), demand or ({}, {}), strict=True):
            family.rows = {(pool,): number for pool, number in gpus.items()}

    def since_last_cycle_s(self) -> float:
        """Returns the seconds since a cycle last ended, with or without evidence, or since the start."""
        return self._clock.monotonic() - self._last_end

    def count_write(self, result: str) -> None:
        self._writes.labels(result).inc()

    def count_skip(self, reason: str) -> None:
        self._skipped.labels(reason).inc()

    def count_decision(self, account: Account) -> None:
        self._underused.labels(*account[:2]).inc()
        for outcome in OUTCOMES:
            self._outcomes.labels(*account[:2], outcome)  # so that every outcome has a series, from 0 on

    def count_outcome(self, account: Account, outcome: str) -> None:
        self._outcomes.labels(*account[:2], outcome).inc()

    def count_dropped(self, what: str, number: int) -> None:
        self._dropped.labels(what).inc(number)

    def restore(self, policy: str, kind: str, decisions: int, outcomes: Mapping[str, int]) -> None:
        self._underused.labels(policy, kind).inc(decisions)
        for outcome in OUTCOMES:
            self._outcomes.labels(policy, kind, outcome).inc(outcomes.get(outcome, 0))

    def forget(self) -> None:
        self._underused.clear()
        self._outcomes.clear()

    def note_spared(self, decisions: Sequence[Decision], reason: str) -> None:
        self._not_acted.update({decision.name: reason for decision in decisions})

    def note_surveyed(self, surveyed: int, unreadable: Collection[tuple[str, str]]) -> None:
        self._surveyed.set(surveyed)
        self._unreadable.clear()
        tally: Tally[tuple[str, str]] = Tally(unreadable)
        for at, ((reason, kind), count) in enumerate(tally.most_common()):
            # The creator of a pod chooses the kind in its reference.
            self._unreadable.labels(reason, kind if at < KINDS_MAX else OTHER).inc(count)

    def note_odd(self, counts: Mapping[tuple[str, str], int], foreign: int = 0) -> None:
        """Publishes how many objects were malformed or too large. `counts`: their numbers since the start, by kind and
        reason.
        `foreign`: the number of objects with a mark label that the reconciler did not set.
        """
        self._odd_objects.rows = dict(counts.items())
        self._foreign.set(foreign)

    def count_audit_error(self) -> None:
        self._audit_errors.inc()

    def note_cycle(
        self,
        began: float,
        complete: bool,
        standing: Mapping[HolderName, str],
        decisions: Sequence[Decision] = (),
        frozen: Collection[str] = (),
        unmarked: Mapping[HolderName, str] = NOTHING,
        would_stand: Mapping[HolderName, str] = NOTHING,
    ) -> None:
        """Notes the end of a cycle.

        `began`: its start (monotonic seconds). `complete`: whether it had no problem. `standing`: the stage of every
        existing mark. `frozen`: reasons of the active brakes. `unmarked`: by holder, why its mark was not set.
        `would_stand`: in a dry run, the stage of every mark that --apply would set.
        """
        self._leader.set(1)
        self._note_state(standing, decisions, frozen)
        self._last_end = self._clock.monotonic()
        self._cycles.inc()
        self._duration.observe(self._last_end - began)
        self._publish_exits(find_exits(decisions, {**would_stand, **standing}, {**unmarked, **self._not_acted}))
        if complete:
            self._success.rows = {(): self._clock.wall()}

    def _publish_exits(self, exits: Sequence[IdleExit]) -> None:
        """Publishes the GPUs that were idle long enough. The tenants with the most such GPUs get their own series. All
        others share one series.
        """
        self._not_acted = {}
        by_tenant: Tally[str] = Tally()
        for decision, _, _ in exits:
            by_tenant[tenant_of(decision)] += len(decision.units)
        named = {tenant for tenant, _ in by_tenant.most_common(TENANTS_MAX)}
        self._spared.clear()
        self._idle.clear()
        for decision, way, reason in exits:
            tenant = tenant_of(decision) if tenant_of(decision) in named else OTHER
            self._idle.labels(way, tenant).inc(len(decision.units))
            if way == SPARED:
                self._spared.labels(reason, tenant).inc(len(decision.units))
        if lost := [decision.title for decision, _, reason in exits if reason == UNEXPLAINED]:
            self._unexplained.inc(len(lost))
            if lost != self._lost:
                text = (
                    "fault of the reconciler: holders idle for long enough have no mark, and the reason "
                    "is unknown: %s%s"
                )
                log.error(text, ", ".join(lost[:3]), " and others" * (len(lost) > 3))
        self._lost = lost

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
        # Stages are read from live objects, which users may edit. An unknown stage gets no series of its own.
        tally = Tally(stage if stage in MARKED else "other" for stage in standing.values())
        for stage in (*MARKED, "other"):
            self._labelled.labels(stage).set(tally[stage])
