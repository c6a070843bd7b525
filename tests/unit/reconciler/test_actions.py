"""The gates before an action, each by itself, on a scheduler in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.testbed.marker_book import Book

from gpu_exporter.app.takeback import ProofPlaces, check_actions, is_same_server
from gpu_exporter.clock import ManualClock
from gpu_exporter.config.rules import PolicyRule
from gpu_exporter.defaults import Actions, Policy, Settings
from gpu_exporter.reconciler.actions import runner as runner_module
from gpu_exporter.reconciler.actions.actor import DONE, UNCONFIRMED, Found
from gpu_exporter.reconciler.actions.proofs import ALERT, Record, Warned, parse_alerts
from gpu_exporter.reconciler.actions.propose import Proposal, propose, what_may_follow
from gpu_exporter.reconciler.actions.runner import (
    ACT_FRESH_S,
    FAILED_S,
    FREED_S,
    PATIENCE_S,
    UNSEEN_MAX_S,
    ActionRunner,
    _Sight,
)
from gpu_exporter.reconciler.audit import AuditLog
from gpu_exporter.reconciler.evidence import EvidenceError, HolderName, UnitEvidence
from gpu_exporter.reconciler.kubernetes.actor import object_to
from gpu_exporter.reconciler.marks import MarkError, Refused
from gpu_exporter.reconciler.policy import Decision
from gpu_exporter.reconciler.report import explain
from gpu_exporter.reconciler.rulebook import Rulebook
from gpu_exporter.reconciler.surroundings import Exemption, Member, Surroundings, Unreadable

ROOT = Path(__file__).resolve().parents[3]
WALL = 1_000_000.0
ALL = ("suspend", "deactivate", "stop", "requeue", "cancel")


def decision(
    pod: str = "a", group: str = "batch/v1/Job/train", kind: str = "batch", members: Sequence[str] = (), **more: Any
) -> Decision:
    name = HolderName("kubernetes", "ml", pod)
    lot = tuple(Member(HolderName("kubernetes", "ml", each), "uid", 1) for each in members)
    unit = UnitEvidence("n", "0", f"GPU-{pod}", "", WALL - 90_000, 9000.0, 5.0, 1.0, 2)
    around = Surroundings(group, lot, kind=kind)
    facts = {"incarnation": "uid", "observed_wall": WALL, "around": around, **more}
    return Decision(name, "", "underused", "idle", (unit,), 1, WALL - 9000, **facts)


def job(number: str = "7", kind: str = "batch", **more: Any) -> Decision:
    name = HolderName("slurm", "", number)
    return decision(group=f"job/{number}", kind=kind, **more)._replace(name=name)


class Bench:
    """A runner whose sources, scheduler and target say what a test wants."""

    scheduler = "kubernetes"

    def __init__(self, **settings: Any) -> None:
        self.settings = Actions(mode="act", kinds="suspend, stop", **settings)
        self.clock = ManualClock(wall=WALL)
        self.book = Book()
        self.warned_s = 7200.0
        self.records: dict[tuple[str, str], Record] = {("policy", "batch"): Record(50.0, 2.0)}
        self.waiting: dict[str, float] = {"pool": 8.0}
        self.trouble = ""
        self.asked = self.asked_about = 0
        self.result: str | Exception = DONE
        self.acted: list[str] = []
        self.done: list[tuple[str, str]] = []
        self.held: list[str] = []
        self.leads = True
        self.find_s = 0.0
        self.has_watched = True
        self.unwarned = False
        self.pools: dict[HolderName, Mapping[str, float]] = {}
        self.runner = ActionRunner(
            self.settings,
            self,  # type: ignore[arg-type]
            [self],
            {"kubernetes": self.book},
            self,
            self.clock,
            None,
            lambda: self.leads,
        )

    def read_warnings(self, names: Collection[HolderName]) -> Mapping[HolderName, Warned]:
        self.asked += 1
        if self.trouble:
            raise EvidenceError(self.trouble)
        self.asked_about = len(names)
        if self.unwarned:
            return {}
        return dict.fromkeys(names, Warned(self.clock.wall() - self.warned_s, ("owners",)))

    def read_records(self) -> Mapping[tuple[str, str], Record]:
        return self.records

    def read_demand(self, names: Collection[HolderName]) -> Mapping[HolderName, Mapping[str, float]]:
        return self.pools or dict.fromkeys(names, self.waiting)

    def find(self, proposal: Proposal, kinds: Sequence[str], wall: float) -> Found:
        self.clock.advance(self.find_s)
        return Found(proposal.possible[0], None, "undo")

    def act(self, proposal: Proposal, found: Found, wall: float) -> str:
        self.acted.append(proposal.target.title)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def count_action(self, action: str, result: str) -> None:
        self.done.append((action, result))

    def count_held(self, reason: str) -> None:
        self.held.append(reason)

    def run(self, *decisions: Decision) -> tuple[list[tuple[str, str]], list[str]]:
        """A cycle of a process that has seen the warnings all the time, but for what a test says."""
        self.done, self.held = [], []
        if self.has_watched:
            now = self.clock.monotonic()
            self.runner._warned = {each.name: _Sight(now - 1e6, now) for each in decisions}
        for each in decisions:
            if each.around is not None:
                self.book.around.setdefault(each.name, each.around)
        self.runner.run(decisions)
        return self.done, self.held


def test_all_gates_open_is_an_action() -> None:
    bench = Bench()
    assert bench.run(decision()) == ([("suspend", "done")], [])
    assert bench.acted == ["batch/v1/Job/train"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"warned_s": 7199.0}, "not_warned"),
        ({"warned_s": -60.0}, "not_warned"),
        ({"records": {}}, "shadow"),
        ({"records": {("policy", "interactive"): Record(500.0, 0.0)}}, "shadow"),
        ({"records": {("policy", "batch"): Record(49.9, 0.0)}}, "shadow"),
        ({"records": {("policy", "batch"): Record(50.0, 2.6)}}, "regret"),
        ({"waiting": {}}, "no_demand"),
        ({"waiting": {"pool": 0.5}}, "no_demand"),
        ({"trouble": "down"}, "proof"),
        ({"leads": False}, "fenced"),
    ],
)
def test_each_gate_by_itself_holds(change: dict[str, Any], reason: str) -> None:
    bench = Bench()
    for name, value in change.items():
        setattr(bench, name, value)
    assert bench.run(decision()) == ([], [reason])
    assert bench.acted == []


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (Surroundings("batch/v1/Job/train", kind="serving"), "changed"),
        (Surroundings("batch/v1/Job/other", kind="batch"), "changed"),
        (
            Surroundings("batch/v1/Job/train", (Member(HolderName("kubernetes", "ml", "z"), "u", 1),), kind="batch"),
            "changed",
        ),
        (Surroundings("batch/v1/Job/train", kind="batch", exemption=Exemption("pod", "mine")), "exempt"),
        (Surroundings("batch/v1/Job/train", kind="batch", ceiling="do-not-disrupt"), "exempt"),
        (Surroundings("batch/v1/Job/train", kind="batch", idle_after_s=1.0), "exempt"),
        (Unreadable("gone"), "unknown"),
    ],
)
def test_what_surrounds_it_is_looked_at_once_more(now: Surroundings | Unreadable, reason: str) -> None:
    bench = Bench()
    bench.book.around[decision().name] = now
    assert bench.run(decision()) == ([], [reason])
    assert bench.book.surveyed == [([decision().name], [decision().name])], "fresh"
    assert bench.acted == []


def test_an_alert_on_an_earlier_holder_of_the_same_name_warned_nobody() -> None:
    bench = Bench()
    assert bench.run(decision(start_wall=WALL - 7199.0)) == ([], ["not_warned"])
    assert bench.run(decision(start_wall=WALL - 7200.0))[0] == [("suspend", "done")]


def test_a_live_object_that_does_not_fit_the_evidence_is_left_alone() -> None:
    bench = Bench()
    bench.book.refuse[decision().name] = "replaced"
    assert bench.run(decision()) == ([], ["replaced"])


def test_old_evidence_is_no_evidence() -> None:
    bench = Bench()
    bench.clock.advance(ACT_FRESH_S - 5.0)
    assert bench.run(decision())[0] == [("suspend", "done")]
    bench = Bench()
    bench.clock.advance(ACT_FRESH_S - 4.0)
    assert bench.run(decision()) == ([], ["stale"])
    bench = Bench()
    bench.find_s = ACT_FRESH_S
    assert bench.run(decision()) == ([], ["stale"]), "the look at the live object took too long"
    (unit,) = decision().units
    unknown = decision()._replace(units=(unit._replace(sample_age_s=None),))
    assert Bench().run(unknown) == ([], ["stale"])


def test_a_policy_of_the_site_is_judged_by_its_own_record() -> None:
    bench = Bench()
    strict = decision(rule=PolicyRule("night"))
    assert bench.run(strict) == ([], ["shadow"])
    bench.records["night", "batch"] = Record(60.0, 0.0)
    assert bench.run(strict)[0] == [("suspend", "done")]


def test_an_override_stands_for_the_record_and_ignored_demand_for_demand() -> None:
    bench = Bench(override="trial, A. Admin", demand="ignored")
    bench.records, bench.waiting = {}, {}
    assert bench.run(decision())[0] == [("suspend", "done")]


def test_limits_hold_in_a_cycle_and_in_an_hour_and_failures_count() -> None:
    bench = Bench(cycle_max=2, hour_max=3)
    bench.result = MarkError("error", "500")
    groups = [decision(pod, f"batch/v1/Job/{pod}") for pod in "abcd"]
    assert bench.run(*groups) == ([("suspend", "error")] * 2, ["limit"] * 2)
    bench.result = UNCONFIRMED
    assert bench.run(*groups) == ([("suspend", "unconfirmed")], ["failed", "failed", "limit"])
    bench.clock.advance(3599.0)
    fresh = [each._replace(observed_wall=bench.clock.wall()) for each in groups]
    assert bench.run(*fresh)[0] == []
    bench.clock.advance(1.0)
    assert len(bench.run(*fresh)[0]) == 2


def test_what_always_fails_takes_no_others_place() -> None:
    bench = Bench(cycle_max=1, hour_max=100)
    first, second = (decision(pod, f"batch/v1/Job/{pod}") for pod in "ab")
    bench.result = ValueError("a proxy's page")
    assert bench.run(first, second) == ([("suspend", "error")], ["limit"])
    bench.result = DONE
    assert bench.run(first, second) == ([("suspend", "done")], ["failed"])
    bench.clock.advance(FAILED_S)
    assert bench.run(first._replace(observed_wall=bench.clock.wall()))[0] == [("suspend", "done")]


def test_what_was_freed_is_not_wanted_twice() -> None:
    bench = Bench(hour_max=100)
    bench.waiting = {"pool": 1.0}
    first, second = (decision(pod, f"batch/v1/Job/{pod}") for pod in "ab")
    assert bench.run(first)[0] == [("suspend", "done")]
    assert bench.run(second) == ([], ["no_demand"])
    bench.clock.advance(FREED_S - 1.0)
    later = second._replace(observed_wall=bench.clock.wall())
    assert bench.run(later) == ([], ["no_demand"]), "it may be a pod that can never be scheduled"
    bench.waiting = {}
    assert bench.run(later) == ([], ["no_demand"])
    bench.clock.advance(1.0)
    bench.waiting = {"pool": 1.0}
    assert bench.run(second._replace(observed_wall=bench.clock.wall()))[0] == [("suspend", "done")]


def test_what_was_freed_is_forgotten_when_so_many_fewer_are_waited_for() -> None:
    bench = Bench(hour_max=100)
    bench.waiting = {"pool": 5.0}
    first, second = (decision(pod, f"batch/v1/Job/{pod}") for pod in "ab")
    assert bench.run(first)[0] == [("suspend", "done")]
    bench.waiting = {"pool": 1.0}
    assert bench.run(second)[0] == [("suspend", "done")]


def test_a_group_is_taken_for_a_pool_that_all_of_it_is_of() -> None:
    bench = Bench()
    pair = [decision(pod, members="ab") for pod in "ab"]
    bench.pools = {pair[0].name: {"x": 4.0, "y": 4.0}, pair[1].name: {"y": 4.0}}
    assert bench.run(*pair)[0] == [("suspend", "done")]
    bench = Bench()
    bench.pools = {pair[0].name: {"x": 4.0}, pair[1].name: {"y": 4.0}}
    assert bench.run(*pair) == ([], ["no_demand"])


def test_every_member_has_its_own_class_and_policy() -> None:
    pair = [decision("a", members="ab"), decision("b", kind="unclear", members="ab")]
    assert Bench().run(*pair) == ([], ["class"])
    pair[1] = decision("b", members="ab", rule=PolicyRule("night"))
    assert Bench().run(*pair) == ([], ["shadow"])


def test_an_owner_is_warned_as_long_as_this_process_has_seen_it_without_a_gap() -> None:
    bench = Bench(warned_for=600.0)
    bench.has_watched = False

    def look(after_s: float) -> tuple[list[tuple[str, str]], list[str]]:
        bench.clock.advance(after_s)
        return bench.run(decision(observed_wall=bench.clock.wall()))

    assert look(0.0) == look(300.0) == ([], ["not_warned"]), (
        "the alert says two hours; a silence may have ended just now"
    )
    bench.unwarned = True
    assert look(10.0) == ([], ["not_warned"])
    bench.unwarned = False
    assert look(10.0) == look(599.0) == ([], ["not_warned"]), "silenced for a moment: it counts from then"
    assert look(1.0)[0] == [("suspend", "done")]
    assert look(UNSEEN_MAX_S + 1.0) == ([], ["not_warned"]), "nobody looked for too long"


def test_where_turns_are_rare_a_warning_lasts_from_one_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "ASKED_MAX", 1)
    monkeypatch.setattr(runner_module, "UNSEEN_MAX_S", 1.0)
    bench = Bench(warned_for=3600.0, cycle_max=9, hour_max=99)
    bench.has_watched = False
    crowd = [decision(pod, f"batch/v1/Job/{pod}") for pod in "abc"]
    for _ in range(45):
        bench.clock.advance(100.0)  # so each has its turn in five minutes
        bench.run(*(each._replace(observed_wall=bench.clock.wall()) for each in crowd))
        if bench.clock.wall() - WALL < 3600.0:
            assert bench.acted == []
    assert len(set(bench.acted)) == 3


def test_a_process_that_stood_still_has_seen_nothing_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "ASKED_MAX", 1)
    bench = Bench(warned_for=3600.0)
    bench.has_watched = False
    crowd = [decision(pod, f"batch/v1/Job/{pod}") for pod in "ab"]
    for after_s in (0.0, 30.0, 3600.0, 30.0):
        bench.clock.advance(after_s)
        held = bench.run(*(each._replace(observed_wall=bench.clock.wall()) for each in crowd))[1]
        assert (held, bench.acted) == (["not_warned"], [])


def test_an_audit_log_that_cannot_be_written_stops_every_act(tmp_path: Path) -> None:
    bench = Bench()
    path = tmp_path / "audit.jsonl"
    bench.runner._audit = AuditLog(path, Rulebook(Policy()), bench.clock, lambda: None)
    path.unlink()
    path.mkdir()
    assert bench.run(decision()) == ([], ["audit"])
    path.rmdir()
    assert bench.run(decision())[0] == [("suspend", "done")]
    assert len(path.read_text().splitlines()) == 2


def test_shadow_counts_one_name_in_two_namespaces_as_two_and_keeps_the_limits() -> None:
    bench = Bench(hour_max=3)
    bench.runner._settings = bench.settings._replace(mode="shadow")
    crowd = [decision(f"p{n}")._replace(name=HolderName("kubernetes", f"team-{n}", "p")) for n in range(4)]
    counted = [len(bench.run(*crowd)[0]) for _ in range(4)]
    assert sum(counted) == 3 and bench.acted == []


def test_a_site_of_many_asks_about_so_many_at_a_time_and_forgets_nobody() -> None:
    bench = Bench(cycle_max=1000, hour_max=1000)
    bench.waiting = {"pool": 1e6}
    crowd = [decision(f"p{number}", f"batch/v1/Job/{number}") for number in range(250)]
    asked: set[str] = set()
    for _ in range(3):
        bench.acted.clear()
        bench.run(*crowd)
        assert bench.asked_about == len(bench.acted) == 100, "of 250"
        asked |= set(bench.acted)
    assert len(asked) == 250


def test_a_source_of_proofs_that_fails_is_left_alone_for_a_while() -> None:
    bench = Bench()
    bench.trouble = "Alertmanager is slow"
    assert bench.run(decision()) == bench.run(decision()) == ([], ["proof"])
    assert bench.asked == 1
    bench.trouble = ""
    bench.clock.advance(PATIENCE_S)
    fresh = decision()._replace(observed_wall=bench.clock.wall())
    assert bench.run(fresh)[0] == [("suspend", "done")]


def test_nothing_unforeseen_leaves_the_runner(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.result = ZeroDivisionError()
    assert bench.run(decision()) == ([("suspend", "error")], [])
    assert "unforeseen" in caplog.text
    bench.book.around.clear()
    bench.book.survey = None  # type: ignore[assignment, method-assign]
    other = decision("b", "batch/v1/Job/b")
    assert bench.run(other) == ([], ["error"])


def test_a_throttled_server_gets_no_more_requests() -> None:
    bench = Bench()
    bench.book.fail = MarkError("throttled", "429")
    assert bench.run(decision("a", "batch/v1/Job/a"), decision("b", "batch/v1/Job/b")) == ([], ["throttled"])


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
        ([job(members="ab")], ALL, "kind"),
    ],
)
def test_what_may_be_done_to_whom(decisions: list[Decision], kinds: tuple[str, ...], expected: object) -> None:
    proposals, held = propose(decisions, kinds)
    if isinstance(expected, str):
        assert ([each.reason for each in held], proposals) == ([expected], [])
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
        ({"around": None}, {"mode": "act", "kinds": "suspend"}, "what surrounds it is not known"),
    ],
)
def test_explain_says_what_may_follow(change: dict[str, Any], settings: dict[str, str], expected: str) -> None:
    asked = decision()._replace(**change)
    text = what_may_follow(asked, Actions(**settings))  # type: ignore[arg-type]
    assert expected in text and (bool(text) == bool(expected))
    assert ("  action: " in explain(asked, Policy(), action=text)) == bool(text)


def test_the_longest_idle_comes_first_and_a_group_is_as_idle_as_its_busiest() -> None:
    old, young = decision("a", "batch/v1/Job/a"), decision("b", "batch/v1/Job/b")
    young = young._replace(idle_since_wall=WALL - 8000)
    pair = [decision(pod, "batch/v1/Job/c", members="cd") for pod in "cd"]
    pair[1] = pair[1]._replace(idle_since_wall=WALL - 7300)
    proposals, _ = propose([young, *pair, old], ALL)
    assert [each.target.name for each in proposals] == ["a", "b", "c"]
    assert proposals[2].since_wall == WALL - 7300 and proposals[2].gpus == 2


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"labels": {}}]', "[" * 100_000, '{"status": "error"}'])
def test_what_is_no_answer_of_alertmanager_is_no_proof(text: str) -> None:
    if text == "{}":
        assert parse_alerts(text) == ({}, set())
        return
    with pytest.raises(EvidenceError, match="not an answer of Alertmanager"):
        parse_alerts(text)


def test_the_alert_that_proves_a_warning_is_the_one_that_owners_get() -> None:
    groups = yaml.safe_load((ROOT / "alerts" / "rules" / "owners.yaml").read_text("utf-8"))["groups"]
    (alert,) = [rule for group in groups for rule in group["rules"] if rule.get("alert") == ALERT]
    assert alert["labels"]["audience"] == "owner"


@pytest.mark.parametrize(
    ("changes", "witnesses", "audit", "problem"),
    [
        ({"mode": "none"}, ("", ""), False, ""),
        ({"mode": "shadow", "kinds": "stop"}, ("http://p", "http://a"), False, ""),
        ({"mode": "act", "kinds": "stop"}, ("http://p", "http://a"), True, ""),
        ({"mode": "act", "kinds": "stop"}, ("http://p", "http://a"), False, "--audit.file"),
        ({"mode": "shadow", "kinds": "stop"}, ("http://p", ""), True, "--alertmanager.url"),
        ({"mode": "shadow", "kinds": "stop"}, ("", "http://a"), True, "--source.prometheus"),
        ({"mode": "act"}, ("http://p", "http://a"), True, "actions.kinds allows nothing"),
        ({"mode": "act", "kinds": "stop"}, ("http://p", "localhost:9093"), True, "write it as http://HOST:9093"),
    ],
)
def test_actions_without_proofs_or_an_account_of_them_do_not_start(
    changes: dict[str, str], witnesses: tuple[str, str], audit: bool, problem: str
) -> None:
    settings = Settings()._replace(actions=Actions(**changes))  # type: ignore[arg-type]
    given = ProofPlaces(witnesses[0], "", witnesses[1], ())
    if not problem:
        check_actions(settings, given, has_audit=audit)
        return
    with pytest.raises(ValueError, match=problem):
        check_actions(settings, given, has_audit=audit)


def test_credentials_go_to_the_same_server_only() -> None:
    assert is_same_server("https://mimir:443/prometheus", "https://mimir:443/alertmanager")
    for other in ("http://mimir:443/", "https://mimir/", "https://alertmanager:443/", ""):
        assert not is_same_server("https://mimir:443/prometheus", other)


def test_reasons_of_refusal_have_their_series_from_the_start() -> None:
    from gpu_exporter.reconciler.telemetry import Telemetry

    telemetry = Telemetry()
    telemetry.note_actions(["suspend"])
    assert (
        telemetry.registry.get_sample_value("gpu_reconciler_actions_total", {"action": "suspend", "result": "done"})
        == 0
    )
    names: dict[str, str] = {"reason": "not_warned"}
    assert telemetry.registry.get_sample_value("gpu_reconciler_actions_held_total", names) == 0


def test_refused_in_the_act_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.result = Refused("changed", "meanwhile")
    assert bench.run(decision()) == ([("suspend", "refused")], [])
    assert "meanwhile" in caplog.text


@pytest.mark.parametrize(
    ("live", "reason"),
    [
        ({"metadata": {"deletionTimestamp": "2027-01-01T00:00:00Z"}}, "terminating"),
        ({"metadata": {"annotations": {"gpu-exporter.io/acted": "suspend 2027"}}}, "acted"),
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
def test_an_object_that_ends_or_rests_or_was_acted_on_is_left_alone(live: dict[str, Any], reason: str) -> None:
    try:
        object_to(live, "it")
        found = ""
    except Refused as exc:
        found = exc.reason
    assert found == reason
