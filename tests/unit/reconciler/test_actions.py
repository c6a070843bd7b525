"""The gates before an act, each by itself, with a scheduler in memory."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.marker_book import Book
from tests.testbed.proven import SaidRecord, Texts

from gpu_exporter.app.reconciler.actions import ProofPlaces, check_actions, is_same_server
from gpu_exporter.clock import ManualClock
from gpu_exporter.config.rules import PolicyRule
from gpu_exporter.defaults import Actions, Policy, Settings
from gpu_exporter.reconciler.actions import asking as asking_module
from gpu_exporter.reconciler.actions import warnings as warnings_module
from gpu_exporter.reconciler.actions.actor import DONE, GONE, NOT_DONE, UNCLEAR
from gpu_exporter.reconciler.actions.acts import Acts
from gpu_exporter.reconciler.actions.asking import PATIENCE_S
from gpu_exporter.reconciler.actions.freed import FREED_S
from gpu_exporter.reconciler.actions.gates import ACT_FRESH_S, Gates
from gpu_exporter.reconciler.actions.journal import (
    CONFIRM_S,
    ENTRIES_MAX,
    GIVE_UP_S,
    KEY,
    Entry,
    Journal,
    parse,
    render,
)
from gpu_exporter.reconciler.actions.limits import FAILED_S, TARGETS_MAX, WITHIN_S
from gpu_exporter.reconciler.actions.proofs import ALERT, Warned, Work, parse_alerts
from gpu_exporter.reconciler.actions.propose import propose, what_may_follow
from gpu_exporter.reconciler.actions.runner import (
    READ_S,
    ActionRunner,
    Parts,
)
from gpu_exporter.reconciler.actions.warnings import UNSEEN_MAX_S
from gpu_exporter.reconciler.audit import AuditLog
from gpu_exporter.reconciler.decision.outcomes import REGRET_S, key_of
from gpu_exporter.reconciler.decision.policy import Decision, Windows
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.surroundings import Member, Reference, Surroundings
from gpu_exporter.reconciler.decision.target import Held, Part, Target
from gpu_exporter.reconciler.evidence.records import EvidenceError, HolderName, HostLimits, UnitEvidence
from gpu_exporter.reconciler.kubernetes.targets import _obstacle
from gpu_exporter.reconciler.marks import MarkError, Refused
from gpu_exporter.reconciler.record import PolicyStanding
from gpu_exporter.reconciler.report import explain

ROOT = Path(__file__).resolve().parents[3]
WALL = 1_000_000.0
ALL = ("suspend", "deactivate", "stop", "requeue", "cancel")
SHAPES = {"Notebook": ("stop",), "": ("requeue", "cancel")}


def reference(group: str) -> Reference | None:
    """The target of an act on a member of a group, as a survey returns it."""
    parts = group.split("/")
    if len(parts) == 2:
        return Reference("", "", "", parts[1], "")
    kinds = (("batch", "Job"), ("kubeflow.org", "MPIJob"), ("kubeflow.org", "Notebook"))
    return Reference(*parts, "uid") if len(parts) == 4 and (parts[0], parts[2]) in kinds else None


def decision(
    pod: str = "a", group: str = "batch/v1/Job/train", kind: str = "batch", members: Sequence[str] = (), **more: Any
) -> Decision:
    name = HolderName("kubernetes", "ml", pod)
    lot = tuple(Member(HolderName("kubernetes", "ml", each), "uid", 1) for each in members)
    unit = UnitEvidence("n", "0", f"GPU-{pod}", "", WALL - 90_000, 11_000.0, 5.0, 1.0, 2)
    target = reference(group)
    possible = SHAPES.get(target.kind, ("suspend", "deactivate")) if target is not None else ()
    around = Surroundings(group, lot, kind=kind, target=target, possible=possible, shown=kind)
    facts = {"incarnation": "uid", "observed_wall": WALL, "around": around, "windows": Windows(3600.0, 7200.0), **more}
    return Decision(name, "", "underused", "idle", (unit,), 1, WALL - 11_000, **facts)


def job(number: str = "7", kind: str = "batch", **more: Any) -> Decision:
    name = HolderName("slurm", "", number)
    return decision(group=f"job/{number}", kind=kind, **more)._replace(name=name)


class Bench:
    """A runner whose sources, scheduler and target answer as a test wants."""

    scheduler = "kubernetes"

    def __init__(self, **settings: Any) -> None:
        self.settings = Actions(mode="act", kinds="suspend, stop", **settings)
        self.clock = ManualClock(wall=WALL)
        self.book = Book()
        self.record = SaidRecord()
        self.texts = Texts()
        self.audit: AuditLog | None = None
        self.warned_s = 7200.0
        self.waiting: dict[str, float] = {"pool": 8.0}
        self.trouble = ""
        self.asked = self.asked_about = 0
        self.result: Exception | None = None  # of the act
        self.sights: list[str] = []  # results of `look`, one per call; then DONE
        self.untold: list[Exception] = []  # errors of `tell`, one per call; then none
        self.target: dict[str, Any] = {}  # further fields of its target
        self.parts: Sequence[Part] | None = None
        self.now: dict[HolderName, dict[str, Any]] = {}  # changes of a decision when it is read again
        self.works: dict[HolderName, Work] = {}
        self.rest: dict[str, Work] = {}
        self.paused = ""
        self.was_read: list[str] = []
        self.acted: list[str] = []
        self.told: list[str] = []
        self.done: list[tuple[str, str]] = []
        self.held: list[str] = []
        self.spared: list[str] = []
        self.leads = True
        self.read_s = 0.0
        self.has_watched = True
        self.unwarned = False
        self.pools: dict[HolderName, Mapping[str, float]] = {}
        self.cycle: dict[HolderName, Decision] = {}
        self.restart()

    def restart(self) -> None:
        """Start another process, which has only the texts."""
        actors: Any = {"kubernetes": self}
        proofs: Any = self
        record: Any = self.record
        acts = Acts(Journal(self.texts), actors, record, self.audit, self, self.clock)
        gates = Gates(self.settings, proofs, record, HostLimits(0.25, 20e6), self.clock)
        parts = Parts(
            proofs,
            gates,
            acts if self.settings.mode == "act" else None,
            actors,
            {"kubernetes": self.book},
            self.look_again,
            lambda: self.leads,
        )
        self.runner = ActionRunner(self.settings, parts, self, self.clock)

    def read_warnings(self, names: Collection[HolderName]) -> Mapping[HolderName, Warned]:
        self.asked += 1
        if self.trouble:
            raise EvidenceError(self.trouble)
        self.asked_about = len(names)
        if self.unwarned:
            return {}
        return dict.fromkeys(names, Warned(self.clock.wall() - self.warned_s, ("owners",)))

    def read_demand(self, names: Collection[HolderName]) -> Mapping[HolderName, Mapping[str, float]]:
        return self.pools or dict.fromkeys(names, self.waiting)

    def read_host_work(self, names: Collection[HolderName]) -> Mapping[HolderName, Mapping[str, Work]]:
        return {name: {"n": self.works.get(name, Work(0.0, 0.0))} for name in names}

    def read_rest(self, namespace: str, pods: Collection[str], idle_s: float) -> Mapping[str, Work]:
        return {pod: self.rest[pod] for pod in pods if pod in self.rest}

    def look_again(self, names: Collection[HolderName]) -> Mapping[HolderName, Decision]:
        if self.paused:
            raise Refused("paused", self.paused)
        wall = self.clock.wall() - self.read_s
        return {
            name: self.cycle[name]._replace(observed_wall=wall)._replace(**self.now.get(name, {}))
            for name in names
            if name in self.cycle
        }

    def read(self, reference: Reference, namespace: str, verbs: Sequence[str], idle_s: float, wall: float) -> Target:
        self.was_read.append(reference.title)
        self.clock.advance(self.read_s)
        parts = self.parts
        if parts is None:
            known = [self.cycle[name] for name in sorted(self.cycle) if name.namespace == namespace]
            below = [each for each in known if each.around is not None and each.around.target == reference]
            parts = [Part(each.name, each.incarnation, 1) for each in below]
        verb = "stop" if reference.kind == "Notebook" else "suspend"
        facts = {"wants": {"": len(parts)}, "undo": "undo", **self.target}
        return Target(reference, namespace, verb, tuple(parts), **facts)

    def open_entry(self, target: Target, ident: str, wall: float) -> Entry:
        where = target.reference, target.reference
        return Entry(ident, wall, self.scheduler, target.namespace, target.verb, *where, f"note {ident}", undo="undo")

    def rehearse(self, target: Target) -> None:
        pass

    def act(self, target: Target, entry: Entry) -> None:
        self.acted.append(target.reference.title)
        if self.result is not None:
            raise self.result

    def look(self, entry: Entry) -> str:
        return self.sights.pop(0) if self.sights else DONE

    def tell(self, entry: Entry, text: str) -> None:
        if self.untold:
            raise self.untold.pop(0)
        self.told.append(entry.target.title)

    def count_action(self, action: str, result: str) -> None:
        self.done.append((action, result))

    def count_held(self, reason: str) -> None:
        self.held.append(reason)

    def note_spared(self, decisions: Sequence[Decision], reason: str) -> None:
        self.spared += [reason] * len(decisions)

    def entries(self) -> tuple[Entry, ...]:
        return parse(self.texts.kept.get(KEY, ""))

    def run(self, *decisions: Decision) -> tuple[list[tuple[str, str]], list[str]]:
        """Run a cycle of a process that has seen the warnings all the time, unless a test changes that."""
        self.done, self.held, self.spared = [], [], []
        self.cycle = {each.name: each for each in decisions}
        if self.has_watched:
            now = self.clock.monotonic()
            self.runner._asker._seen._sights = {each.name: warnings_module._Sight(now - 1e6, now) for each in decisions}
        self.runner.run(decisions)
        return self.done, self.held


def later(bench: Bench, each: Decision) -> Decision:
    """The decision as it is now."""
    return each._replace(observed_wall=bench.clock.wall())


def test_if_all_gates_are_open_the_target_is_suspended() -> None:
    bench = Bench()
    assert bench.run(decision()) == ([("suspend", "done")], [])
    assert bench.acted == bench.told == ["batch/v1/Job/train"]
    (entry,) = bench.entries()
    assert (entry.told, entry.gpus, entry.holders, entry.waited_for) == ("done", 1, ("a",), (("pool", 8.0),))
    assert bench.record.acts == [entry._replace(told="")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"warned_s": 7199.0}, "not_warned"),
        ({"warned_s": -60.0}, "not_warned"),
        ({"waiting": {}}, "no_demand"),
        ({"waiting": {"pool": 0.5}}, "no_demand"),
        ({"trouble": "down"}, "proof"),
        ({"leads": False}, "fenced"),
        ({"paused": "storage is moved"}, "paused"),
        ({"target": {"above": "it belongs to CronJob/x"}}, "above"),
        ({"target": {"strangers": ("pod x would become one of it",)}}, "stranger"),
        ({"target": {"unread": ("pod x: forbidden",)}}, "unread"),
        ({"target": {"wants": None}}, "uncounted"),
        ({"target": {"wants": {"": 2}}}, "waiting"),
        ({"target": {"wants": {"": 1, "master": 1}}}, "waiting"),
        ({"target": {"wish": "do-not-disrupt"}}, "exempt"),
        ({"target": {"kind": "serving"}}, "class"),
        ({"target": {"note": "note 1"}}, "noted"),
        ({"target": {"obstacle": Held("ended", "it has ended")}}, "ended"),
        ({"target": {"verb": "deactivate"}}, "kind"),
    ],
)
def test_each_closed_gate_alone_prevents_the_act(change: dict[str, Any], reason: str) -> None:
    bench = Bench()
    for name, value in change.items():
        if name == "target" and "verb" in value:
            bench.settings = bench.settings._replace(kinds="stop, suspend")
        setattr(bench, name, value)
    if change.get("target", {}).get("verb"):
        read = bench.read
        bench.read = lambda *where: read(*where)._replace(verb="deactivate")  # type: ignore[method-assign]
        bench.target = {}
    assert bench.run(decision()) == ([], [reason])
    assert bench.spared == [reason]
    assert bench.acted == [] and bench.entries() == ()


NAME = decision().name


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"stage": "active"}, "changed"),
        ({"stage": "partial"}, "changed"),
        ({"stage": "unknown"}, "changed"),
        ({"stage": "exempt"}, "exempt"),
        ({"stage": "candidate", "around": Surroundings(kind="batch", ceiling="do-not-disrupt")}, "exempt"),
        ({"incarnation": "other"}, "replaced"),
        ({"held": 2}, "members"),
        ({"around": Surroundings(kind="serving", shown="serving")}, "class"),
    ],
)
def test_the_decision_on_a_holder_is_made_again_before_the_act(answer: dict[str, Any], reason: str) -> None:
    bench = Bench()
    bench.now = {NAME: answer}
    assert bench.run(decision()) == ([], [reason])
    assert bench.acted == []


@pytest.mark.parametrize(
    ("part", "rest", "reason"),
    [
        (Part(HolderName("kubernetes", "ml", "b"), "uid", 1), {}, "members"),
        (Part(HolderName("kubernetes", "ml", "b"), "uid", None), {}, "members"),
        (Part(HolderName("kubernetes", "ml", "b"), "uid", 0), {}, "beside"),
        (Part(HolderName("kubernetes", "ml", "b"), "uid", 0), {"b": Work(0.06, 0.0)}, "beside"),
        (Part(HolderName("kubernetes", "ml", "b"), "uid", 0), {"b": Work(0.01, 2e6)}, "beside"),
        (Part(HolderName("kubernetes", "ml", "b"), "uid", 0), {"b": Work(0.01, None)}, "beside"),
        # The series may be those of an earlier pod with this name, which did not work.
        (Part(HolderName("kubernetes", "ml", "b"), "uid", 0, start_wall=WALL - 600), {"b": Work(0.0, 0.0)}, "beside"),
        (Part(HolderName("slurm", "", "8"), "8/0/1", 0), {"8": Work(0.01, 0.0)}, "beside"),
        (Part(HolderName("kubernetes", "ml", "b"), "uid", 0), {"b": Work(0.05, 1e6)}, ""),
        (Part(HolderName("kubernetes", "ml", "b"), "uid", 0, waits="is Pending"), {"b": Work(0.0, 0.0)}, "waiting"),
        (Part(HolderName("kubernetes", "ml", "b"), "uid", 0, wish="exempt"), {"b": Work(0.0, 0.0)}, "exempt"),
        (Part(HolderName("kubernetes", "ml", "b"), "uid", 0, kind="serving"), {"b": Work(0.0, 0.0)}, "class"),
    ],
)
def test_every_member_that_the_act_would_end_is_checked(part: Part, rest: dict[str, Work], reason: str) -> None:
    bench = Bench()
    bench.parts, bench.rest = [Part(NAME, "uid", 1), part], rest
    bench.target = {"wants": {"": 2}}
    expected = ([], [reason]) if reason else ([("suspend", "done")], [])
    assert bench.run(decision()) == expected


@pytest.mark.parametrize(
    ("work", "settings", "reason"),
    [
        (Work(1.0, 5e8), {}, "host_work"),
        (Work(0.26, 0.0), {}, "host_work"),
        (Work(0.0, 2.1e7), {}, "host_work"),
        (Work(None, None), {}, "host_work"),
        (Work(0.25, 2e7), {}, ""),
        (Work(0.0, None), {}, ""),
        (Work(1.0, 5e8), {"host_work_max": 11_001.0}, "host_work"),
        (Work(1.0, 5e8), {"host_work_max": 11_000.0}, ""),
    ],
)
def test_no_act_on_a_holder_that_works_on_its_host(work: Work, settings: Any, reason: str) -> None:
    bench = Bench(**settings)
    bench.works = {NAME: work}
    assert bench.run(decision())[1] == ([reason] if reason else [])


def test_no_act_on_a_group_in_the_hour_after_its_decision() -> None:
    (unit,) = decision().units
    early = decision()._replace(units=(unit._replace(idle_run_s=7200.0 + REGRET_S - 1.0),))
    bench = Bench(override="trial, A. Admin")
    assert bench.run(early) == ([], ["watched"]), "not even with the setting override"
    bench.record.open = {key_of(decision())}
    assert bench.run(decision()) == ([], ["watched"])
    bench.record.open = set()
    assert bench.run(decision())[0] == [("suspend", "done")]


def test_an_alert_on_an_earlier_holder_of_the_same_name_is_no_warning() -> None:
    bench = Bench()
    assert bench.run(decision(start_wall=WALL - 7199.0)) == ([], ["not_warned"])
    assert bench.run(decision(start_wall=WALL - 7200.0))[0] == [("suspend", "done")]


def test_no_act_on_a_live_object_that_does_not_fit_the_evidence() -> None:
    bench = Bench()
    bench.book.refuse[NAME] = "replaced"
    assert bench.run(decision()) == ([], ["replaced"])


def test_no_act_on_evidence_that_is_too_old_or_of_unknown_age() -> None:
    bench = Bench()
    bench.read_s = (ACT_FRESH_S - 5.0) / 2  # the target is read twice
    assert bench.run(decision())[0] == [("suspend", "done")]
    bench = Bench()
    bench.read_s = (ACT_FRESH_S - 4.0) / 2
    assert bench.run(decision()) == ([], ["stale"])
    (unit,) = decision().units
    unknown = decision()._replace(units=(unit._replace(sample_age_s=None),))
    assert Bench().run(unknown) == ([], ["stale"])


def test_a_target_that_was_read_a_while_ago_is_read_again_before_the_act() -> None:
    """Proofs may take long, and an owner may ask to keep the GPUs meanwhile."""
    bench = Bench()
    bench.run(decision())
    assert len(bench.was_read) == 1
    for change, reason in (({"wish": "keep it"}, "exempt"), ({}, "")):
        bench = Bench()
        slow = bench.read_host_work

        def ask(names: Collection[HolderName], bench: Any = bench, slow: Any = slow, change: Any = change) -> Any:
            bench.clock.advance(READ_S + 1.0)
            bench.target = change
            return slow(names)

        bench.read_host_work = ask  # type: ignore[method-assign]
        bench.restart()
        done, held = bench.run(decision())
        assert (done, held) == (([], [reason]) if reason else ([("suspend", "done")], []))
        assert len(bench.was_read) == 2


def test_targets_that_are_held_after_every_read_do_not_block_others() -> None:
    bench = Bench()
    groups = [decision(f"p{at}", f"batch/v1/Job/j{at:02}") for at in range(TARGETS_MAX + 1)]
    read = bench.read

    def read_held(reference: Any, *what: Any) -> Target:
        found = read(reference, *what)
        return found if reference.name == f"j{TARGETS_MAX:02}" else found._replace(above="CronJob/x owns it")

    bench.read = read_held  # type: ignore[method-assign]
    bench.restart()
    assert bench.run(*groups) == ([], ["above"] * TARGETS_MAX + ["limit"])
    assert bench.run(*groups)[0] == [("suspend", "done")]


def test_a_source_that_fails_for_one_target_is_not_asked_about_the_next_targets() -> None:
    bench = Bench()
    groups = [decision(pod, f"batch/v1/Job/{pod}") for pod in "abc"]
    asked: list[Any] = []

    def fail(names: Collection[HolderName]) -> Any:
        asked.append(names)
        raise EvidenceError("timed out")

    works = bench.read_host_work
    bench.read_host_work = fail  # type: ignore[method-assign]
    bench.restart()
    assert bench.run(*groups) == ([], ["proof"] * 3) and len(asked) == 1
    bench.read_host_work = works  # type: ignore[method-assign]
    assert bench.run(*groups) == ([], ["proof"] * 3), "the source is not asked again for a while"
    bench.clock.advance(PATIENCE_S)
    assert bench.run(*(later(bench, each) for each in groups))[0] == [("suspend", "done")] * 2


def test_a_cycle_spends_at_most_a_minute_on_acts() -> None:
    bench = Bench(cycle_max=9)
    bench.read_s = WITHIN_S / 4 + 1.0
    done, held = bench.run(*(decision(pod, f"batch/v1/Job/{pod}") for pod in "abcd"))
    assert len(done) < 4 and held[-1] == "limit"


def test_a_policy_of_the_site_is_judged_by_its_own_record() -> None:
    bench = Bench()
    strict = decision(rule=PolicyRule("night"))
    assert bench.run(strict) == ([], ["shadow"])
    bench.record.answers["night", "batch"] = Held("regret", "too many")
    assert bench.run(strict) == ([], ["regret"])
    bench.record.answers["night", "batch"] = PolicyStanding(60.0, 0.0)
    assert bench.run(strict)[0] == [("suspend", "done")]


def test_an_override_replaces_the_record_and_ignored_demand_replaces_demand() -> None:
    bench = Bench(override="trial, A. Admin", demand="ignored")
    bench.record.answers, bench.waiting = {}, {}
    assert bench.run(decision())[0] == [("suspend", "done")]


def test_acts_are_limited_per_cycle_and_per_hour_and_failed_acts_count() -> None:
    bench = Bench(cycle_max=2, hour_max=3)
    bench.result = MarkError("error", "403", status=403)
    groups = [decision(pod, f"batch/v1/Job/{pod}") for pod in "abcd"]
    assert bench.run(*groups) == ([("suspend", "error")] * 2, ["limit"] * 2)
    bench.result = None
    assert bench.run(*groups) == ([("suspend", "done")], ["limit", "failed", "failed"]), (
        "targets that were not read before come first"
    )
    bench.clock.advance(3599.0)
    assert bench.run(*(later(bench, each) for each in groups))[0] == []
    bench.clock.advance(1.0)
    assert len(bench.run(*(later(bench, each) for each in groups))[0]) == 2


def test_restarts_do_not_reset_the_hourly_limit_of_acts() -> None:
    """Acts are counted in the journal."""
    bench = Bench(cycle_max=2, hour_max=3)
    groups = [decision(pod, f"batch/v1/Job/{pod}") for pod in "abcdefgh"]
    for _ in range(5):
        bench.restart()
        bench.run(*(later(bench, each) for each in groups))
        bench.clock.advance(60.0)
        groups = [each for each in groups if (each.around and each.around.group) not in bench.acted]
    assert len(bench.acted) == 3


def test_a_target_whose_act_failed_does_not_block_other_targets() -> None:
    bench = Bench(cycle_max=1, hour_max=16)
    first, second = (decision(pod, f"batch/v1/Job/{pod}") for pod in "ab")
    bench.result = MarkError("error", "403", status=403)
    assert bench.run(first, second) == ([("suspend", "error")], ["limit"])
    bench.result = None
    assert bench.run(first, second) == ([("suspend", "done")], ["failed"])
    bench.clock.advance(FAILED_S)
    assert bench.run(later(bench, first))[0] == [("suspend", "done")]


def test_freed_gpus_reduce_the_demand_also_after_a_restart() -> None:
    bench = Bench(hour_max=16)
    bench.waiting = {"pool": 1.0}
    first, second = (decision(pod, f"batch/v1/Job/{pod}") for pod in "ab")
    assert bench.run(first)[0] == [("suspend", "done")]
    assert bench.run(second) == ([], ["no_demand"])
    bench.restart()
    assert bench.run(second) == ([], ["no_demand"])
    bench.clock.advance(FREED_S - 1.0)
    assert bench.run(later(bench, second)) == ([], ["no_demand"]), "the pod that waits may never be scheduled"
    bench.waiting = {}
    assert bench.run(later(bench, second)) == ([], ["no_demand"])
    bench.clock.advance(1.0)
    bench.waiting = {"pool": 1.0}
    assert bench.run(later(bench, second))[0] == [("suspend", "done")]


def test_freed_gpus_no_longer_count_once_the_demand_has_fallen_by_as_many() -> None:
    bench = Bench(hour_max=16)
    bench.waiting = {"pool": 5.0}
    first, second = (decision(pod, f"batch/v1/Job/{pod}") for pod in "ab")
    assert bench.run(first)[0] == [("suspend", "done")]
    bench.waiting = {"pool": 1.0}
    assert bench.run(second)[0] == [("suspend", "done")]


def test_demand_counts_only_for_a_pool_that_all_members_of_a_group_belong_to() -> None:
    bench = Bench()
    pair = [decision(pod, members="ab") for pod in "ab"]
    bench.pools = {pair[0].name: {"x": 4.0, "y": 4.0}, pair[1].name: {"y": 4.0}}
    assert bench.run(*pair)[0] == [("suspend", "done")]
    bench = Bench()
    bench.pools = {pair[0].name: {"x": 4.0}, pair[1].name: {"y": 4.0}}
    assert bench.run(*pair) == ([], ["no_demand"])


def test_class_and_policy_of_every_member_are_checked() -> None:
    pair = [decision("a", members="ab"), decision("b", kind="unclear", members="ab")]
    assert Bench().run(*pair) == ([], ["class"])
    pair[1] = decision("b", members="ab", rule=PolicyRule("night"))
    assert Bench().run(*pair) == ([], ["shadow"])


@pytest.mark.parametrize(
    ("shown", "said", "own", "acts"),
    [
        ("batch", "batch", "", True),
        ("unclear", "batch", "", False),  # the label of a member may only make the class more careful
        ("unclear", "batch", "batch", True),
        ("serving", "batch", "batch", True),
        ("batch", "batch", "serving", False),
        ("batch", "unclear", "batch", False),
    ],
)
def test_only_the_label_of_the_target_may_make_its_class_less_careful(
    shown: str, said: str, own: str, acts: bool
) -> None:
    bench = Bench()
    around = decision().around
    assert around is not None
    bench.target = {"kind": own}
    one = decision()._replace(around=around._replace(kind=said, shown=shown))
    assert bool(bench.run(one)[0]) is acts


def test_a_warning_counts_only_while_this_process_has_seen_it_without_a_gap() -> None:
    bench = Bench(warned_for=600.0)
    bench.has_watched = False

    def look(after_s: float) -> tuple[list[tuple[str, str]], list[str]]:
        bench.clock.advance(after_s)
        return bench.run(later(bench, decision()))

    assert look(0.0) == look(170.0) == ([], ["not_warned"]), (
        "by its start the alert is two hours old, but a silence may have ended just now"
    )
    bench.unwarned = True
    assert look(10.0) == ([], ["not_warned"])
    bench.unwarned = False
    for after_s in (10.0, 150.0, 150.0, 150.0, 149.0):
        assert look(after_s) == ([], ["not_warned"]), "after a short silence the timer starts again"
    assert look(1.0)[0] == [("suspend", "done")]
    assert look(UNSEEN_MAX_S + 1.0) == ([], ["not_warned"]), "no check for too long"


def test_a_warning_counts_between_two_checks_of_a_holder_that_are_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_module, "ASKED_MAX", 1)
    monkeypatch.setattr(warnings_module, "UNSEEN_MAX_S", 1.0)
    bench = Bench(warned_for=3600.0, cycle_max=9, hour_max=16)
    bench.has_watched = False
    crowd = [decision(pod, f"batch/v1/Job/{pod}") for pod in "abc"]
    for _ in range(45):
        bench.clock.advance(100.0)  # so every holder is checked once in five minutes
        bench.run(*(later(bench, each) for each in crowd))
        if bench.clock.wall() - WALL < 3600.0:
            assert bench.acted == []
    assert len(set(bench.acted)) == 3


def test_warnings_do_not_count_while_the_process_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking_module, "ASKED_MAX", 1)
    bench = Bench(warned_for=3600.0)
    bench.has_watched = False
    crowd = [decision(pod, f"batch/v1/Job/{pod}") for pod in "ab"]
    for after_s in (0.0, 30.0, 3600.0, 30.0):
        bench.clock.advance(after_s)
        held = bench.run(*(later(bench, each) for each in crowd))[1]
        assert (held, bench.acted) == (["not_warned"], [])


def test_no_act_while_the_audit_log_cannot_be_written(tmp_path: Path) -> None:
    bench = Bench()
    path = tmp_path / "audit.jsonl"
    bench.audit = AuditLog(path, Rulebook(Policy()), bench.clock, lambda: None)
    bench.restart()
    path.unlink()
    path.mkdir()
    assert bench.run(decision()) == ([], ["audit"])
    assert bench.entries() == ()
    path.rmdir()
    assert bench.run(decision())[0] == [("suspend", "done")]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["result"] for line in lines] == ["begins", "done"]
    assert lines[0]["id"] == lines[1]["id"] and lines[0]["name"] == lines[1]["name"] == "a"


def test_mode_shadow_counts_one_name_in_several_namespaces_separately_and_keeps_the_limits() -> None:
    bench = Bench(hour_max=3)
    bench.settings = bench.settings._replace(mode="shadow")
    bench.restart()
    crowd = [decision(f"p{n}")._replace(name=HolderName("kubernetes", f"team-{n}", "p")) for n in range(4)]
    counted = [len(bench.run(*crowd)[0]) for _ in range(4)]
    assert sum(counted) == 3 and bench.acted == [] and bench.texts.kept == {}


def test_a_large_site_is_checked_in_turns_and_every_holder_gets_its_turn() -> None:
    bench = Bench(cycle_max=1000, hour_max=16)
    bench.waiting = {"pool": 1e6}
    crowd = [decision(f"p{number}", f"batch/v1/Job/{number}") for number in range(250)]
    asked: set[str] = set()
    for _ in range(30):
        bench.was_read.clear()
        bench.run(*(later(bench, each) for each in crowd))
        assert (bench.asked_about, len(bench.was_read)) == (100, TARGETS_MAX), "of 250"
        asked |= set(bench.acted)
        crowd = [each for each in crowd if (each.around and each.around.group) not in asked]
        crowd += [decision(f"q{len(asked)}-{n}", f"batch/v1/Job/{len(asked)}-{n}") for n in range(250 - len(crowd))]
        bench.clock.advance(3600.0)
    assert len(asked) >= 250


def test_a_source_of_proofs_that_fails_is_not_asked_again_for_a_while() -> None:
    bench = Bench()
    bench.trouble = "Alertmanager is slow"
    assert bench.run(decision()) == bench.run(decision()) == ([], ["proof"])
    assert bench.asked == 1
    bench.trouble = ""
    bench.clock.advance(PATIENCE_S)
    assert bench.run(later(bench, decision()))[0] == [("suspend", "done")]


def test_an_unforeseen_error_does_not_leave_the_runner(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.result = ZeroDivisionError()
    bench.sights = [NOT_DONE]
    assert bench.run(decision()) == ([], [])
    assert "unforeseen" in caplog.text
    bench.clock.advance(CONFIRM_S)
    bench.sights = [NOT_DONE]
    assert bench.run() == ([("suspend", "error")], [])
    bench.book.inspect = None  # type: ignore[assignment, method-assign]
    assert bench.run(later(bench, decision("b", "batch/v1/Job/b"))) == ([], ["error"])


def test_a_server_that_throttles_gets_no_more_requests() -> None:
    bench = Bench()
    bench.book.fail = MarkError("throttled", "429")
    assert bench.run(decision("a", "batch/v1/Job/a"), decision("b", "batch/v1/Job/b")) == ([], ["throttled"])


LOST = MarkError("error", "API server: timed out")  # an answer that never arrived
REFUSED = MarkError("conflict", "API server: status 409", status=409)


@pytest.mark.parametrize(
    ("result", "sights", "done", "told"),
    [
        (LOST, [DONE], [("suspend", "done")], 1),
        (LOST, [NOT_DONE], [], 0),
        (MarkError("error", "504: it did not complete in time", status=504), [DONE], [("suspend", "done")], 1),
        (MarkError("error", "403", status=403), [], [("suspend", "error")], 0),
        (LOST, [GONE], [("suspend", "replaced")], 0),
        (REFUSED, [], [("suspend", "conflict")], 0),
        (Refused("changed", "meanwhile"), [], [("suspend", "refused")], 0),
        (None, [NOT_DONE], [], 0),
        (None, [UNCLEAR], [], 0),
    ],
)
def test_the_result_of_an_act_is_what_the_live_object_shows(
    result: Exception | None, sights: list[str], done: list[tuple[str, str]], told: int
) -> None:
    bench = Bench()
    bench.result, bench.sights = result, list(sights)
    assert bench.run(decision())[0] == done
    assert len(bench.told) == told == len(bench.record.acts)
    assert len(bench.entries()) == 1


def test_an_act_whose_effect_is_not_visible_yet_is_pending_and_has_not_failed() -> None:
    bench = Bench()
    bench.sights = [UNCLEAR] * 3
    assert bench.run(decision()) == ([], [])
    for _ in range(2):
        assert bench.run(decision()) == ([], ["pending"])
    bench.target = {"note": bench.entries()[0].note}
    assert bench.run(decision()) == ([("suspend", "done")], ["acted"])


@pytest.mark.parametrize(
    ("sights", "result", "told"),
    [([DONE], "done", 1), ([NOT_DONE], "error", 0), ([UNCLEAR], "unconfirmed", 0), ([GONE], "replaced", 0)],
)
def test_an_act_whose_answer_was_lost_is_completed_by_a_later_cycle(sights: list[str], result: str, told: int) -> None:
    """Here the later cycle runs in another process, which knows the act only from the journal."""
    bench = Bench()
    bench.result, bench.sights = LOST, [NOT_DONE]
    bench.run(decision())
    bench.restart()
    bench.clock.advance(CONFIRM_S - 1.0)
    bench.sights = [NOT_DONE]
    assert bench.run(later(bench, decision())) == ([], ["pending"]), "the request may still arrive"
    bench.clock.advance(1.0)
    bench.sights = list(sights)
    assert bench.run()[0] == [("suspend", result)]
    assert len(bench.told) == told
    assert bench.run()[0] == [] and len(bench.told) == told, "once"
    assert len(bench.acted) == 1


def test_after_a_restart_freed_gpus_count_by_their_age_and_failed_acts_do_not_count() -> None:
    for age_s, result, may_act in ((60.0, None, False), (FREED_S, None, True), (60.0, REFUSED, True)):
        bench = Bench(hour_max=16)
        bench.waiting = {"pool": 1.0}
        bench.result = result
        bench.run(decision())
        bench.result = None
        bench.clock.advance(age_s)
        bench.restart()
        done, held = bench.run(later(bench, decision("b", "batch/v1/Job/b")))
        assert (done, held) == (([("suspend", "done")], []) if may_act else ([], ["no_demand"])), (age_s, result)


def test_an_owner_who_could_not_be_told_is_told_by_a_later_cycle() -> None:
    bench = Bench()
    bench.untold = [LOST, LOST]
    assert bench.run(decision())[0] == []
    assert bench.run()[0] == [] and bench.told == []
    assert bench.run() == ([("suspend", "done")], [])
    assert (bench.told, len(bench.record.acts)) == (["batch/v1/Job/train"], 1)
    bench.untold = [LOST] * 100
    bench.run(decision("b", "batch/v1/Job/b"))
    bench.clock.advance(GIVE_UP_S)
    assert bench.run()[0] == [("suspend", "unconfirmed")]


def test_no_act_begins_that_cannot_be_written_into_the_journal() -> None:
    bench = Bench()
    bench.texts.kept[KEY] = "garbage"
    assert bench.run(decision()) == ([], ["journal"])
    bench.texts.kept = {}
    bench.texts.write_text = lambda key, text: bench._fail()  # type: ignore[method-assign, attr-defined]
    bench._fail = lambda: (_ for _ in ()).throw(MarkError("fenced", "the Lease is lost"))  # type: ignore[attr-defined]
    assert bench.run(decision()) == ([], ["fenced"])
    assert bench.acted == []


def test_a_note_on_the_target_that_is_not_in_the_journal_is_an_opt_out() -> None:
    bench = Bench()
    bench.run(decision())
    (entry,) = bench.entries()
    bench.target = {"note": entry.note}
    assert bench.run(decision()) == ([], ["acted"])
    bench.target = {"note": "suspend 2027-01-01T00:00:00Z by hand"}
    assert bench.run(decision()) == ([], ["noted"])


def test_targets_that_owners_resume_are_counted_in_the_record() -> None:
    bench = Bench()
    bench.run(decision())
    (entry,) = bench.record.acts
    for sight, resumed, gone in ((DONE, 0, 0), (NOT_DONE, 1, 0), (GONE, 1, 1)):
        bench.record.due, bench.sights = [entry], [sight]
        bench.run()
        assert (len(bench.record.resumed), len(bench.record.gone)) == (resumed, gone)


def journal_entry(number: int, **more: Any) -> Entry:
    where = Reference("batch", "v1", "Job", f"job-{number}", "uid")
    return Entry(f"{number:08x}", WALL + number, "kubernetes", "ml", "suspend", where, where, "note", **more)


def test_the_journal_keeps_the_last_entries_and_never_drops_an_entry_without_a_result() -> None:
    texts = Texts()
    journal = Journal(texts)
    for number in range(ENTRIES_MAX + 3):
        journal.begin(journal_entry(number))
        if number:
            journal.complete(f"{number:08x}", "done")
    assert [entry.ident for entry in journal.read()][:2] == ["00000000", "00000004"]
    assert len(journal.read()) == ENTRIES_MAX
    texts = Texts()
    journal = Journal(texts)
    for number in range(ENTRIES_MAX):
        journal.begin(journal_entry(number))
    with pytest.raises(MarkError, match="their results are not known"):
        journal.begin(journal_entry(99))
    assert len(texts.kept[KEY]) < 16_000


@given(
    st.lists(
        st.builds(
            journal_entry,
            st.integers(0, 10**9),
            gpus=st.integers(0, 64),
            told=st.text(max_size=5),
            undo=st.text(max_size=40),
            holders=st.lists(st.text(max_size=9), max_size=3).map(tuple),
            waited_for=st.lists(st.tuples(st.text(max_size=5), st.floats(0, 1e6)), max_size=2).map(tuple),
        ),
        max_size=5,
    )
)
def test_the_journal_is_read_as_it_was_written(entries: list[Entry]) -> None:
    assert parse(render(entries)) == tuple(entries)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=20,
)


@given(st.text() | JSON.map(json.dumps) | JSON.map(lambda each: json.dumps({"v": 1, "entries": each})))
def test_any_text_is_either_a_journal_or_a_clear_error(text: str) -> None:
    try:
        entries = parse(text)
    except MarkError as exc:
        assert exc.result == "journal"
    else:
        assert all(isinstance(entry, Entry) for entry in entries)


@pytest.mark.parametrize(
    ("decisions", "kinds", "expected"),
    [
        ([decision()], ALL, ("suspend", "deactivate")),
        ([decision()], ("stop",), "kind"),
        ([decision(kind="interactive")], ALL, "class"),
        ([decision(kind="unclear")], ALL, "class"),
        ([decision(kind="serving")], ALL, "class"),
        ([decision(around=None)], ALL, "unknown"),
        ([decision(group="")], ALL, "kind"),
        ([decision(group="v1/Pod/leader")], ALL, "kind"),
        ([decision(group="apps/v1/Deployment/web")], ALL, "kind"),
        ([decision(group="apps/v1/StatefulSet/db")], ALL, "kind"),
        ([decision(group="ray.io/v1/RayCluster/r")], ALL, "kind"),
        ([decision(group="example.org/v1/Job/train")], ALL, "kind"),
        ([decision(group="kubeflow.org/v1/MPIJob/m")], ALL, ("suspend", "deactivate")),
        ([decision(group="kubeflow.org/v1/Notebook/n", kind="interactive")], ALL, ("stop",)),
        ([decision(group="kubeflow.org/v1/Notebook/n", kind="batch")], ALL, "class"),
        ([decision(members="ab")], ALL, "members"),
        ([decision("a", members="ab"), decision("b", members="ab")], ALL, ("suspend", "deactivate")),
        ([job()], ALL, ("requeue", "cancel")),
        ([job()], ("cancel",), ("cancel",)),
        ([job(kind="interactive")], ALL, ("cancel",)),
        ([job(kind="unclear")], ALL, "class"),
        ([job(members="ab")], ALL, "members"),
    ],
)
def test_the_proposed_acts_depend_on_kind_class_and_settings(
    decisions: list[Decision], kinds: tuple[str, ...], expected: object
) -> None:
    proposals, held = propose(decisions, kinds)
    if isinstance(expected, str):
        assert ([each.held.reason for each in held], proposals) == ([expected], [])
    else:
        ((proposal,), nothing) = proposals, held
        assert (proposal.possible, proposal.names, nothing) == (expected, {each.name for each in decisions}, [])


@pytest.mark.parametrize(
    ("change", "settings", "expected"),
    [
        ({}, {"mode": "none", "kinds": "suspend"}, ""),
        (
            {},
            {"mode": "act", "kinds": "suspend"},
            "suspend batch/v1/Job/train, once its owner has been warned for 2h and",
        ),
        ({}, {"mode": "shadow", "kinds": "suspend, stop"}, "(mode shadow: it is only counted)"),
        ({}, {"mode": "act", "kinds": "stop,cancel"}, "nothing is done to it: actions.kinds allows none of suspend, "),
        ({"stage": "candidate"}, {"mode": "act", "kinds": "suspend"}, ""),
        ({"around": Surroundings("", kind="batch")}, {"mode": "act", "kinds": "suspend"}, "a pod without a controller"),
        ({"around": None}, {"mode": "act", "kinds": "suspend"}, "its surroundings are not known"),
    ],
)
def test_explain_names_the_act_that_may_follow(change: dict[str, Any], settings: dict[str, str], expected: str) -> None:
    asked = decision()._replace(**change)
    text = what_may_follow(asked, Actions(**settings))  # type: ignore[arg-type]
    assert expected in text and (bool(text) == bool(expected))
    assert ("  action: " in explain(asked, Policy(), action=text)) == bool(text)


def test_the_longest_idle_group_comes_first_and_its_youngest_idle_run_counts() -> None:
    old, young = decision("a", "batch/v1/Job/a"), decision("b", "batch/v1/Job/b")
    young = young._replace(idle_since_wall=WALL - 8000)
    pair = [decision(pod, "batch/v1/Job/c", members="cd") for pod in "cd"]
    pair[1] = pair[1]._replace(idle_since_wall=WALL - 7300)
    proposals, _ = propose([young, *pair, old], ALL)
    assert [each.target.name for each in proposals] == ["a", "b", "c"]
    assert proposals[2].since_wall == WALL - 7300 and proposals[2].gpus == 2


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"labels": {}}]', "[" * 100_000, '{"status": "error"}'])
def test_a_text_that_is_no_answer_of_alertmanager_proves_nothing(text: str) -> None:
    if text == "{}":
        assert parse_alerts(text, ()) == []
        return
    with pytest.raises(EvidenceError, match="not an answer of Alertmanager"):
        parse_alerts(text, ())


def test_the_alert_that_proves_a_warning_is_an_alert_to_owners() -> None:
    groups = yaml.safe_load((ROOT / "alerts" / "rules" / "owners.yaml").read_text("utf-8"))["groups"]
    (alert,) = [rule for group in groups for rule in group["rules"] if rule.get("alert") == ALERT]
    assert alert["labels"]["audience"] == "owner"


@pytest.mark.parametrize(
    ("changes", "witnesses", "audit", "keeps", "problem"),
    [
        ({"mode": "none"}, ("", ""), False, False, ""),
        ({"mode": "shadow", "kinds": "stop"}, ("http://p", "http://a"), False, True, ""),
        ({"mode": "act", "kinds": "stop"}, ("http://p", "http://a"), True, True, ""),
        ({"mode": "act", "kinds": "stop"}, ("http://p", "http://a"), False, True, "--audit.file"),
        ({"mode": "act", "kinds": "stop"}, ("http://p", "http://a"), True, False, "--state.directory"),
        ({"mode": "shadow", "kinds": "stop"}, ("http://p", ""), True, True, "--alertmanager.url"),
        ({"mode": "shadow", "kinds": "stop"}, ("", "http://a"), True, True, "--source.prometheus"),
        ({"mode": "act"}, ("http://p", "http://a"), True, True, "actions.kinds is empty"),
        ({"mode": "act", "kinds": "stop"}, ("http://p", "localhost:9093"), True, True, "write it as http://HOST:9093"),
    ],
)
def test_the_reconciler_does_not_start_with_actions_but_without_proofs_or_audit(
    changes: dict[str, str], witnesses: tuple[str, str], audit: bool, keeps: bool, problem: str
) -> None:
    settings = Settings()._replace(actions=Actions(**changes))  # type: ignore[arg-type]
    places = ProofPlaces(witnesses[0], "", witnesses[1], ())
    if not problem:
        check_actions(settings, places, has_audit=audit, keeps_texts=keeps)
        return
    with pytest.raises(ValueError, match=problem):
        check_actions(settings, places, has_audit=audit, keeps_texts=keeps)


def test_credentials_are_sent_to_the_same_server_only() -> None:
    assert is_same_server("https://mimir:443/prometheus", "https://mimir:443/alertmanager")
    for other in ("http://mimir:443/", "https://mimir/", "https://alertmanager:443/", ""):
        assert not is_same_server("https://mimir:443/prometheus", other)


def test_the_counters_of_actions_and_of_held_reasons_exist_from_the_start() -> None:
    from gpu_exporter.reconciler.telemetry import Telemetry

    telemetry = Telemetry()
    telemetry.note_actions(["suspend"])
    assert (
        telemetry.registry.get_sample_value("gpu_reconciler_actions_total", {"action": "suspend", "result": "done"})
        == 0
    )
    names: dict[str, str] = {"reason": "not_warned"}
    assert telemetry.registry.get_sample_value("gpu_reconciler_actions_held_total", names) == 0


@pytest.mark.parametrize(
    ("live", "reason"),
    [
        ({"metadata": {"deletionTimestamp": "2027-01-01T00:00:00Z"}}, "terminating"),
        ({"metadata": {"annotations": {"kubeflow-resource-stopped": "2027"}}}, "rests"),
        ({"metadata": {}, "spec": {"suspend": True}}, "rests"),
        ({"metadata": {}, "spec": {"runPolicy": {"suspend": True}}}, "rests"),
        ({"metadata": {}, "spec": {"active": False}}, "rests"),
        *(
            ({"metadata": {}, "status": {"conditions": [{"type": kind, "status": "True"}]}}, "ended")
            for kind in ("Complete", "Failed", "Completed", "Succeeded", "Finished")
        ),
        ({"metadata": {}, "status": {"conditions": [{"type": "Failed", "status": "False"}]}}, ""),
        ({"metadata": {}, "spec": {"suspend": False, "runPolicy": None, "active": True}, "status": None}, ""),
    ],
)
def test_no_act_on_an_object_that_ends_or_is_suspended(live: dict[str, Any], reason: str) -> None:
    held = _obstacle(live, "it")
    assert (held.reason if held is not None else "") == reason
