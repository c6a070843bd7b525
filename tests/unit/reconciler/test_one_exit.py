"""Idle GPUs have one exit: in 3,000 random clusters, each holder of them is marked, acted on, or spared with a reason."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.testbed.marker_book import POLICY, WALL, Bench, Book, holder

from gpu_exporter.common.config.rules import CLASSES, Match, PolicyRule
from gpu_exporter.reconciler.cycle import CycleHooks, ReconcileCycle
from gpu_exporter.reconciler.decision.policy import UNDERUSED, Decision
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.spared import SYSTEM, UNEXPLAINED, find_exits, why_spared
from gpu_exporter.reconciler.decision.surroundings import Exemption, Member, Reference, Surroundings, Unreadable
from gpu_exporter.reconciler.evidence.records import Evidence, HolderEvidence, HolderName, PublishedCause
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.marks import Mark, MarkError
from gpu_exporter.reconciler.telemetry import REASONS, Telemetry

CLUSTERS = 3_000
LONG_S = 14 * 3600.0  # longer than any class, gap, policy or wish can ask for
SHORT_S = 1500.0
RUNS_S = (LONG_S, LONG_S, 3 * 3600.0, 5000.0, SHORT_S, 0.0, None)
ERRORS = [*(MarkError(result, result) for result in ("conflict", "error", "replaced", "throttled")), ValueError("bug")]
RULES = (
    PolicyRule("warned", Match(namespaces=("b",)), ceiling="candidate"),
    PolicyRule("exempt", Match(namespaces=("c",)), exempt="teaching"),
    PolicyRule("by-account", Match(accounts=("x*",)), (("underused_after", 4 * 3600.0),)),
)


ODD: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("sample_age_s", (500.0, None)),
    ("coverage", (0.87, 0.5, None)),
    ("witnesses", (1, None)),
    ("longest_gap_s", (5 * 3600.0, 5e5)),
    ("host_cpu_ratio", (0.9,)),
    ("host_work_age_s", (60.0, 9000.0)),
    ("causes", ((PublishedCause("checkpointing", "high"),),)),
    ("obstacle", ("no_answer", "suspended")),
    ("quiet_s", (90_000.0,)),
    ("start_wall", (WALL - 900, None)),
)


class HostileBook(Book):
    """Marks whose writes and withdrawals fail for single holders."""

    def __init__(self, scheduler: str) -> None:
        super().__init__(scheduler)
        self.fails: dict[HolderName, Exception] = {}

    def write(self, decision: Decision, wall: float) -> str:
        self._fail(decision.name)
        return super().write(decision, wall)

    def withdraw(self, mark: Mark, reason: str, wall: float) -> None:
        self._fail(mark.name)
        super().withdraw(mark, reason, wall)

    def _fail(self, name: HolderName) -> None:
        if name in self.fails:
            raise self.fails[name]


class Cluster(Bench):
    """A random cluster. `acts`: by holder, what the runner of actions notes about it."""

    def __init__(self, rng: random.Random, telemetry: Telemetry) -> None:
        self.rng, self.telemetry = rng, telemetry
        self.odds = rng.choice((0.2, 1.0))  # of anything unusual
        self.pods, self.jobs = HostileBook("kubernetes"), HostileBook("slurm")
        self.acts: dict[HolderName, str] = {}
        self.noted: set[HolderName] = set()  # in this cycle
        self.found: tuple[HolderEvidence, ...] = ()
        super().__init__(*([self.pods, self.jobs] if rng.random() < 0.9 else [self.pods]))
        self.policy = POLICY._replace(new_marks_max=rng.choice((0, 1, 20, 20)), freeze_share=rng.choice((0.0, 0.05)))
        self.rules = RULES if self.may(0.2) else ()
        self.allocations = rng.choice((1, 10_000))
        writes = 0.5 if self.may(0.2) else 1.0
        judge = judge_of(self, self.books, Rulebook(self.policy, self.rules))
        hooks = CycleHooks(may_write=lambda: self.rng.random() < writes, act=self.act)
        self.cycle = ReconcileCycle(judge, self.books, self.policy, self, self.clock, hooks)
        if self.may(0.05):
            self.pods.fail_list = MarkError("error", "refused")
        names = [self.name(at) for at in range(rng.randint(1, 5))]
        self.found = tuple(map(self.holder, names))
        for name in names:
            self.surround(name, names)

    def may(self, odds: float) -> bool:
        return self.rng.random() < odds * self.odds

    def name(self, at: int) -> HolderName:
        if self.rng.random() < 0.2:
            return HolderName("slurm", "", str(at))
        return HolderName("kubernetes", self.rng.choice("abc"), f"p{at}")

    def holder(self, name: HolderName) -> HolderEvidence:
        pick, is_odd = self.rng.choice, self.may(0.3)
        runs = [pick(RUNS_S)] * pick((1, 1, 2)) if not self.may(0.1) else [pick(RUNS_S), pick(RUNS_S)]
        found = holder(name, [run or 0.0 for run in runs])
        units = [unit._replace(idle_run_s=run) for unit, run in zip(found.units, runs, strict=True)]
        facts: dict[str, Any] = {}
        if is_odd:
            key, values = pick(ODD)
            units = [unit._replace(**{key: pick(values)}) for unit in units]
            facts = pick(
                (
                    *[{}] * 4,
                    {"held": len(units) + 1},
                    {"held": None},
                    {"counts_from": WALL - pick((100, 5000))},
                    {"incarnations": frozenset({"uid", "other"})},
                )
            )
        return found._replace(**{"units": tuple(units), **facts})

    def surround(self, name: HolderName, names: Sequence[HolderName]) -> None:
        rng, book = self.rng, self.pods if name.scheduler == "kubernetes" else self.jobs
        if self.may(0.15):
            book.refuse[name] = rng.choice((*REASONS, "a-new-reason"))
        if self.may(0.2):
            book.fails[name] = rng.choice(ERRORS)
        if self.may(0.1):
            book.able_s[name] = rng.choice((600.0, 5000.0))
        if rng.random() < 0.5:
            stages = ("candidate", UNDERUSED, UNDERUSED, UNDERUSED, "partial", "sharing-candidate", "other")
            book.marks[name] = rng.choice(stages)
            book.observed[name] = rng.choice((WALL, WALL, WALL - 700, None))
            if self.may(0.2):
                book.ended.add(name)
            if self.may(0.2):
                book.unable[name] = rng.choice(REASONS)
        if rng.random() < 0.5:
            self.acts[name] = rng.choice(("pending", "not_warned", "conflict", "a-new-reason"))
        if self.may(0.1):
            book.around[name] = Unreadable("cannot be read", reason="forbidden", kind="Pipeline")
            return
        near = [each for each in names if each[:2] == name[:2]]
        is_gang = len(near) > 1 and self.may(0.5)
        members = tuple(Member(each, "uid", 1, "is Pending" if self.may(0.2) else "") for each in near)
        book.around[name] = Surroundings(
            group="batch/v1/Job/train" if is_gang else "",
            members=members if is_gang else (),
            missing=3 if self.may(0.1) else 0,
            kind=rng.choice(CLASSES) if self.may(0.5) else "batch",
            exemption=Exemption("pod", "exempt") if self.may(0.1) else None,
            idle_after_s=(wish := 12 * 3600.0 if self.may(0.2) else 0.0),
            idle_after_by=Exemption("owner", "idle-after") if wish else None,
            ceiling="do-not-disrupt" if self.may(0.2) else "",
            target=rng.choice((None, Reference("batch", "v1", "Job", "train", "uid"))),
        )

    def read_evidence(self, marked: Any = ()) -> Evidence:
        return Evidence(self.clock.wall(), self.found, self.exporters, self.allocations, usual_at=self.usual_at)

    def act(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            if reason := self.acts.get(decision.name):
                self.noted.add(decision.name)
                self.telemetry.note_spared([decision], reason)

    def go(self) -> None:
        cycle = self.cycle
        self.noted.clear()
        cycle.run()
        stages, decisions = cycle.standing, cycle.decisions
        self.telemetry.note_cycle(0.0, True, stages, decisions, cycle.frozen, cycle.unmarked)


def published(telemetry: Telemetry) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """The idle GPUs by exit and by tenant, and the spared GPUs by reason."""
    exits, tenants, reasons = Counter[str](), Counter[str](), Counter[str]()
    for sample in next(iter(telemetry._idle.collect())).samples:
        exits[sample.labels["exit"]] += int(sample.value)
        tenants[sample.labels["tenant"]] += int(sample.value)
    for sample in next(iter(telemetry._spared.collect())).samples:
        reasons[sample.labels["reason"]] += int(sample.value)
    return exits, tenants, reasons


def check(cluster: Cluster, telemetry: Telemetry) -> Counter[str]:
    """Compares the published counts with the cluster. Returns the reasons."""
    exits, tenants, reasons = published(telemetry)
    cycle, wanted, must = cluster.cycle, Counter[str](), 0
    before = {each.name: each for each in cluster.found}
    for decision in cycle.decisions:
        gpus, runs = len(decision.units), [unit.idle_run_s for unit in before[decision.name].units]
        reason = cycle.unmarked.get(decision.name, "")
        is_left_out = decision.stage == UNDERUSED and reason == SYSTEM
        if all(run == LONG_S for run in runs) or decision.stage == UNDERUSED:
            must += 0 if is_left_out else gpus
        elif decision.stage == "exempt" or any(run == 3 * 3600.0 for run in runs) or why_spared(decision):
            continue  # idle for long enough only by some windows
        else:
            assert not find_exits([decision], cycle.standing, {}), f"{decision.reason}: not idle for long enough"
        if decision.stage == UNDERUSED and not reason and decision.name not in cluster.noted:
            assert cycle.standing[decision.name] == UNDERUSED
            wanted["marked"] += gpus
    assert exits["marked"] == wanted["marked"]
    assert sum(exits.values()) == sum(tenants.values()) >= must
    assert sum(reasons.values()) == exits["spared"]
    assert UNEXPLAINED not in reasons and "" not in reasons
    return reasons


def test_in_every_cluster_each_idle_holder_is_marked_acted_or_spared() -> None:
    logging.disable(logging.CRITICAL)
    try:
        seed = random.randrange(2**32)
        telemetry, reasons, exits = Telemetry(), Counter[str](), Counter[str]()
        for number in range(CLUSTERS):
            cluster = Cluster(random.Random(f"{seed}/{number}"), telemetry)
            for _ in range(2 if number % 10 == 0 else 1):
                before = dict(cluster.cycle.standing)
                cluster.go()
                told = f"seed {seed}, cluster {number}, marks before {before}"
                try:
                    reasons += check(cluster, telemetry)
                except (AssertionError, KeyError) as exc:
                    raise AssertionError(told) from exc
                exits += published(telemetry)[0]
    finally:
        logging.disable(logging.NOTSET)
    assert telemetry.registry.get_sample_value("gpu_reconciler_unexplained_total") == 0
    assert min(exits[way] for way in ("marked", "acted", "spared")) > 20, exits
    words = "capped doubtful exempt fenced host_work interrupted limit members restarted serving unknown waiting"
    assert set(words.split()) <= reasons.keys(), "the clusters differ enough"
