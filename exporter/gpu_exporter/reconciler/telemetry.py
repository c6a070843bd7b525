"""The reconciler's own metrics, with prometheus_client."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Collection, Mapping, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)

from gpu_exporter.common.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.common.web.own_metrics import OwnMetrics
from gpu_exporter.reconciler.decision.brakes import FREEZES
from gpu_exporter.reconciler.decision.outcomes import DROPPED, OUTCOMES, Account, tenant_of
from gpu_exporter.reconciler.decision.policy import MARKED, Decision
from gpu_exporter.reconciler.decision.spared import why_spared
from gpu_exporter.reconciler.decision.surroundings import EXEMPT_BY
from gpu_exporter.reconciler.evidence.records import Demand, HolderName
from gpu_exporter.reconciler.series import DemandSeries, LastSuccess, OddObjects, Stages

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
    """The metrics gpu_reconciler_*. Series for known label values exist from the start, so that their first increase is
    visible.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # for the whole process, before the first metric
        self.registry = CollectorRegistry()
        self._clock = clock
        self._last_end = clock.monotonic()
        self._spared_next: Tally[tuple[str, str]] = Tally()
        ProcessCollector(registry=self.registry)
        self.own = OwnMetrics("gpu_reconciler")
        self.registry.register(self.own)
        self._cycles = Counter("gpu_reconciler_cycles", "Cycles begun.", registry=self.registry)
        self._duration = Histogram(
            "gpu_reconciler_cycle_duration_seconds",
            "Duration of cycles.",
            registry=self.registry,
            buckets=(0.1, 0.5, 1, 2, 5, 10, 30, 60),
        )
        self._success = LastSuccess()
        self.registry.register(self._success)
        self._stages = Stages()
        self.registry.register(self._stages)
        self._demand = DemandSeries()
        self.registry.register(self._demand)
        self._odd_objects = OddObjects()
        self.registry.register(self._odd_objects)
        self._foreign = Gauge(
            "gpu_reconciler_foreign_marks",
            "Pods whose mark label the reconciler did not set and does not change: the pod has not started, requests "
            "no devices, or the label has a foreign value.",
            registry=self.registry,
        )
        self._labelled = Gauge("gpu_reconciler_labelled", "Marks that exist.", ["stage"], registry=self.registry)
        self._writes = Counter(
            "gpu_reconciler_writes",
            "Marks written, renewed and withdrawn, and failed writes. replaced: the pod or job was replaced, or is "
            "gone. fenced: another replica holds the Lease.",
            ["result"],
            registry=self.registry,
        )
        self._skipped = Counter(
            "gpu_reconciler_skipped", "Marks not set, in every cycle, by reason.", ["reason"], registry=self.registry
        )
        self._frozen = Gauge(
            "gpu_reconciler_frozen",
            "1 while a brake prevents new marks, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._exempt = Gauge(
            "gpu_reconciler_exempt",
            "Idle GPUs and MIG instances of exempt holders, by the source of the exemption.",
            ["source"],
            registry=self.registry,
        )
        self._underused = Counter(
            "gpu_reconciler_underused",
            "Groups, single pods and single jobs that became underused by the evidence, marked or not, by the policy "
            "that decided and by class.",
            ["policy", "class"],
            registry=self.registry,
        )
        self._outcomes = Counter(
            "gpu_reconciler_outcomes",
            "Outcomes of gpu_reconciler_underused_total. regret: work began again within an hour. right: observed idle "
            "for that whole hour, or ended by itself. unknown: anything else.",
            ["policy", "class", "outcome"],
            registry=self.registry,
        )
        self._dropped = Counter(
            "gpu_reconciler_record_dropped",
            "Parts of the record of decisions that were dropped because it was full. watches: decisions whose outcome "
            "became unknown. tenants: counted without their name. acts: no longer watched for an undo. days: lost.",
            ["what"],
            registry=self.registry,
        )
        for what in DROPPED:
            self._dropped.labels(what)
        self._spared = Gauge(
            "gpu_reconciler_spared_gpus",
            "GPUs and MIG instances that have been idle for long enough but stay with their holder, by reason and by "
            "namespace or account.",
            ["reason", "tenant"],
            registry=self.registry,
        )
        self._unreadable = Gauge(
            "gpu_reconciler_unreadable",
            "Idle holders without a decision because their pod, namespace or a controller cannot be read, by reason "
            "and kind.",
            ["reason", "kind"],
            registry=self.registry,
        )
        self._surveyed = Gauge(
            "gpu_reconciler_surveyed",
            "Idle holders whose surroundings were read.",
            registry=self.registry,
        )
        self._applies = Gauge(
            "gpu_reconciler_apply", "1 when marks are written, 0 in a dry run.", registry=self.registry
        )
        self._actions = Counter(
            "gpu_reconciler_actions",
            "Actions on underused holders, by action and result. shadow: the action would be done. unconfirmed: the "
            "effect of the action is unknown, or its owner could not be told.",
            ["action", "result"],
            registry=self.registry,
        )
        self._acts_skipped = Counter(
            "gpu_reconciler_actions_skipped",
            "Underused groups that were not acted on, in every cycle, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._audit_errors = Counter(
            "gpu_reconciler_audit_errors", "Lines of the audit file that could not be written.", registry=self.registry
        )
        self._leader = Gauge(
            "gpu_reconciler_leader",
            "1 in the process that decides, 0 in a process that waits for the Lease.",
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
        """Notes that another process decides. This process is healthy, but publishes no marks and no holders."""
        self._leader.set(0)
        self._last_end = self._clock.monotonic()
        self._note_state({}, (), ())

    def note_demand(self, demand: Demand | None) -> None:
        """Publishes the GPUs that pending jobs wait for, by partition; None while this is not known."""
        self._demand.demand = demand

    def since_last_cycle_s(self) -> float:
        """Seconds since the end of the last cycle, with or without evidence; since the start if no cycle has ended."""
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
        for decision in decisions:
            self._spared_next[reason, tenant_of(decision)] += len(decision.units)

    def note_surveyed(self, surveyed: int, unreadable: Collection[tuple[str, str]]) -> None:
        self._surveyed.set(surveyed)
        self._unreadable.clear()
        tally: Tally[tuple[str, str]] = Tally(unreadable)
        for at, ((reason, kind), count) in enumerate(tally.most_common()):
            # The creator of a pod chooses the kind in its reference.
            self._unreadable.labels(reason, kind if at < KINDS_MAX else OTHER).inc(count)

    def note_odd(self, counts: Mapping[tuple[str, str], int], foreign: int = 0) -> None:
        """Publishes how many objects were malformed or too large. `counts`: since the start, by kind and reason.
        `foreign`: as in Marker.
        """
        self._odd_objects.counts = dict(counts)
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
    ) -> None:
        """Notes the end of a cycle.

        `began`: its start (monotonic seconds). `complete`: whether it had no problem. `standing`: the stage of every
        existing mark. `frozen`: reasons of the active brakes.
        """
        self._leader.set(1)
        self._note_state(standing, decisions, frozen)
        self._last_end = self._clock.monotonic()
        self._cycles.inc()
        self._duration.observe(self._last_end - began)
        self._publish_spared(decisions)
        if complete:
            self._success.wall = self._clock.wall()

    def _publish_spared(self, decisions: Sequence[Decision]) -> None:
        """Publishes the GPUs that were idle long enough, but stay with their holders. The tenants with the most such
        GPUs get their own series. All others share one series.
        """
        tally, self._spared_next = self._spared_next, Tally()
        for decision in decisions:
            if reason := why_spared(decision):
                tally[reason, tenant_of(decision)] += len(decision.units)
        by_tenant: Tally[str] = Tally()
        for (_, tenant), gpus in tally.items():
            by_tenant[tenant] += gpus
        named = {tenant for tenant, _ in by_tenant.most_common(TENANTS_MAX)}
        self._spared.clear()
        for (reason, tenant), gpus in tally.items():
            self._spared.labels(reason, tenant if tenant in named else OTHER).inc(gpus)

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
