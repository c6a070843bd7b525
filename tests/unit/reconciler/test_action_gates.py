"""The gates before an act, each by itself, with a scheduler in memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from tests.unit.reconciler.actions_bench import NAME, WALL, Bench, decision

from gpu_exporter.common.model.readings import CORE
from gpu_exporter.reconciler.actions.gates import ACT_FRESH_S
from gpu_exporter.reconciler.actions.proofs import Work
from gpu_exporter.reconciler.actions.runner import (
    READ_S,
)
from gpu_exporter.reconciler.decision.outcomes import REGRET_S, key_of
from gpu_exporter.reconciler.decision.policy import Windows
from gpu_exporter.reconciler.decision.surroundings import Surroundings
from gpu_exporter.reconciler.decision.target import Part, Skipped
from gpu_exporter.reconciler.evidence.records import HolderName


def test_if_all_gates_are_open_the_target_is_suspended() -> None:
    bench = Bench()
    assert bench.run(decision()) == ([("suspend", "done")], [])
    assert bench.acted == bench.told == ["batch/v1/Job/train"]
    (entry,) = bench.entries()
    assert (entry.told, entry.gpus, entry.waited_for) == ("done", 1, (("pool", 8.0),))
    assert [act.ident for act in bench.record.acts] == [entry.ident]


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
        ({"target": {"obstacle": Skipped("ended", "it has ended")}}, "ended"),
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


@pytest.mark.parametrize(
    ("windows", "used", "cpus", "reason"),
    [
        (Windows(3600.0, 14_400.0, CORE), 1.0, 16.0, "host_work"),
        (Windows(3600.0, 14_400.0, CORE), 0.89, 16.0, ""),
        (Windows(3600.0, 14_400.0, CORE), 1.0, None, ""),  # an older exporter
        (Windows(3600.0, 7200.0), 1.0, 16.0, ""),  # not interactive
    ],
)
def test_no_act_on_an_interactive_holder_that_computes_in_one_thread(
    windows: Windows, used: float, cpus: float | None, reason: str
) -> None:
    bench = Bench()
    bench.works = {NAME: Work(used / 16, 0.0, cpus)}
    held = decision(windows=windows)
    held = held._replace(idle_since_wall=WALL - 90_000, units=(held.units[0]._replace(idle_run_s=90_000.0),))
    assert bench.run(held)[1] == ([reason] if reason else [])


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
