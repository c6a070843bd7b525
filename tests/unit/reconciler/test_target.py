"""An act ends only members that were seen idle: random targets pass all gates, and the test compares with the truth."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.reconciler.actions_bench import Bench, decision

from gpu_exporter.reconciler.actions.proofs import Work
from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.decision.target import Part

CLASSES = ("", "batch", "interactive", "serving", "unclear")


class Pod(NamedTuple):
    """The truth about a pod that the act would end.

    `gpus`: 0 for a pod without GPUs. `works`: it works when it is read again. `was_marked`: it was underused in the
    cycle. `is_other`: it was created again since then. `cpu`: for a pod without GPUs, None if unknown. `says`: the
    class in its own label.
    """

    role: str
    gpus: int
    works: bool
    was_marked: bool
    is_other: bool
    is_pending: bool
    cpu: float | None
    says: str
    wish: str


class Site(NamedTuple):
    """The truth about a target and its pods. `more`: roles of wanted pods that do not exist."""

    pods: tuple[Pod, ...]
    more: tuple[str, ...]
    stranger: bool
    unread: bool
    is_counted: bool
    above: str
    says: str
    wish: str
    note: str


IDLE_POD = Pod("", 1, False, True, False, False, 0.0, "", "")
GOOD = st.lists(
    st.builds(
        lambda role, gpus: IDLE_POD._replace(role=role, gpus=gpus),
        st.sampled_from(("", "worker", "launcher")),
        st.sampled_from((0, 1, 1, 2)),
    ),
    min_size=1,
    max_size=5,
).map(lambda pods: Site(tuple(pods), (), False, False, True, "", "", "", ""))
# Faults of one pod, and faults of the whole target.
OF_A_POD: tuple[dict[str, Any], ...] = (
    {"works": True},
    {"was_marked": False},
    {"is_other": True},
    {"is_pending": True},
    {"cpu": 0.2},
    {"cpu": None},
    {"wish": "keep"},
    *({"says": each} for each in CLASSES),
)
OF_ALL: tuple[dict[str, Any], ...] = (
    {"more": ("worker",)},
    {"more": ("evaluator",)},
    {"stranger": True},
    {"unread": True},
    {"is_counted": False},
    {"above": "CronJob/nightly"},
    {"says": "batch"},
    {"says": "serving"},
    {"wish": "keep"},
    {"note": "suspend 2026"},
)


@st.composite
def sites(draw: st.DrawFn) -> Site:
    """A target whose members are all idle, with up to two faults."""
    site = draw(GOOD)
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(OF_A_POD) + len(OF_ALL) - 1))
        if at < len(OF_A_POD):
            which = draw(st.integers(0, len(site.pods) - 1))
            pods = list(site.pods)
            pods[which] = pods[which]._replace(**OF_A_POD[at])
            site = site._replace(pods=tuple(pods))
        else:
            site = site._replace(**OF_ALL[at - len(OF_A_POD)])
    return site


def objection(site: Site) -> str:
    """Why an act would be wrong, by the truth alone; "" if all members are idle and no owner objects."""
    for pod in site.pods:
        if pod.gpus and (pod.works or not pod.was_marked):
            return "a pod works"
        if pod.gpus and pod.is_other:
            return "another pod has its name"
        if not pod.gpus and (pod.cpu is None or pod.cpu > 0.05):
            return "a pod without GPUs may work"
        if pod.is_pending:
            return "a pod has not started"
        if pod.wish:
            return "its owner wants to keep it"
        if pod.says not in ("", "batch"):
            return "it is no batch work"
    if not any(pod.gpus for pod in site.pods):
        return "it holds no GPU"
    if site.more or not site.is_counted:
        return "it is not complete"
    if site.stranger or site.unread or site.above:
        return "the act would affect other objects"
    return "its owner objects" if site.wish or site.note or site.says == "serving" else ""


def run(site: Site) -> tuple[Bench, list[str]]:
    """Run a cycle. Returns the bench and the reasons for which the act was held."""
    bench = Bench(beside_cpu=0.05, beside_io=1e6)
    bench.waiting = {"pool": 100.0}
    parts, decisions, rest = [], [], {}
    names = [f"p{at}" for at in range(len(site.pods))]
    holding = [name for name, pod in zip(names, site.pods, strict=True) if pod.gpus]
    for name, pod in zip(names, site.pods, strict=True):
        of: Decision = decision(name, kind=pod.says or "batch", members=holding if len(holding) > 1 else ())
        of = of._replace(held=pod.gpus, units=of.units * pod.gpus)
        uid = "made-later" if pod.is_other else "uid"
        waits = "is Pending" if pod.is_pending else ""
        parts.append(Part(of.name, uid, pod.gpus, pod.role, waits, pod.says, pod.wish))
        if pod.gpus and pod.was_marked:
            decisions.append(of)
            if pod.works:
                bench.now[of.name] = {"stage": "active"}
        elif not pod.gpus and pod.cpu is not None:
            rest[name] = Work(pod.cpu, 0.0)
    bench.parts, bench.rest = parts, rest
    roles = Counter(pod.role for pod in site.pods) + Counter(site.more)
    bench.target = {
        "wants": dict(roles) if site.is_counted else None,
        "strangers": ("a pod",) if site.stranger else (),
        "unread": ("a pod: forbidden",) if site.unread else (),
        "above": site.above,
        "kind": site.says,
        "wish": site.wish,
        "note": site.note,
    }
    return bench, bench.run(*decisions)[1]


@settings(max_examples=1000)
@given(sites())
def test_a_target_is_acted_on_exactly_if_all_its_members_are_idle_and_no_owner_objects(site: Site) -> None:
    why = objection(site)
    bench, held = run(site)
    if why:
        assert bench.acted == [], why
        assert held or not any(pod.gpus and pod.was_marked for pod in site.pods), "a held act is counted"
    else:
        assert bench.acted == ["batch/v1/Job/train"], f"no owner objects, but the act was held for {held}"


def test_the_comparison_with_the_truth_finds_both_allowed_and_wrong_acts() -> None:
    site = Site((IDLE_POD, IDLE_POD._replace(gpus=0)), (), False, False, True, "", "", "", "")
    wrong: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"works": True}, {}),
        ({"is_other": True}, {}),
        ({"was_marked": False}, {}),
        ({}, {"more": ("",)}),
        ({}, {"above": "CronJob/x"}),
    ]
    assert objection(site) == ""
    for of_pod, of_site in wrong:
        changed = site._replace(pods=(IDLE_POD._replace(**of_pod), site.pods[1]), **of_site)
        assert objection(changed) and run(changed)[0].acted == []
