"""When an action is done: real controllers delete the pods, and the tests are the kubelets that let them go, or hang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpu_exporter.reconciler.actions.acts import UNCONFIRMED_S
from gpu_exporter.reconciler.actions.proofs import Shown
from gpu_exporter.reconciler.actor import ENDING
from gpu_exporter.reconciler.evidence.records import HolderName
from tests.component.taken_back.team import ACT, Team
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.kubernetes
GRACE_S = 30.0  # of a pod that names none
DONE, UNCONFIRMED = ("suspend", "done"), ("suspend", "unconfirmed")
FINALIZER = "example.org/hold"


@pytest.fixture
def hung(team: Team) -> Iterator[Team]:
    """The pods are on a node whose kubelet never answers, so they stay Terminating."""
    team.node = f"n-{team.namespace[-30:].strip('-')}"
    team.plane.core.create_node({"metadata": {"name": team.node}})
    yield team
    team.plane.core.delete_node(team.node)


def with_pods(team: Team, grace: int | None = None, **metadata: Any) -> None:
    """Let further pods have this grace period and metadata."""
    plain = team.template

    def template(**more: Any) -> dict[str, Any]:
        made = plain(**more, **metadata)
        if grace is not None:
            made["spec"]["terminationGracePeriodSeconds"] = grace
        return made

    team.template = template  # type: ignore[method-assign]


def until_terminating(team: Team, *pods: str) -> None:
    def has_begun() -> bool:
        return all(team.plane.pod(pod, team.namespace)["metadata"].get("deletionTimestamp") for pod in pods)

    wait_for(has_begun, "the controller to delete the pods", 60.0, 0.2)


def why(team: Team) -> str:
    """The reason in the last audit line with a result."""
    return str([line["why"] for line in team.records() if "why" in line][-1])


def test_an_action_on_a_node_that_hangs_is_unconfirmed_and_another_one_at_the_same_time_is_done(hung: Team) -> None:
    hung.proofs.waiting = 2.0
    (first,), (second,) = hung.job("a", 1), hung.job("b", 1)
    assert hung.begin() == ([], set()) and hung.results() == [ENDING] * 2
    assert all(len(hung.told("Job", name)) == 1 for name in "ab"), "the owners know at once"
    until_terminating(hung, first, second)
    hung.job("c", 1)
    hung.restart()
    assert hung.begin()[1] >= {"no_demand"} and hung.results() == [ENDING] * 2
    ended, left = (first, second) if hung.acts.entries[0].target.name == "a" else (second, first)
    hung.delete_pod(ended)  # its kubelet has answered
    assert hung.begin(1)[0] == [DONE]
    hung.clock.later += GRACE_S + UNCONFIRMED_S
    hung.restart()
    assert hung.begin(1)[0] == [UNCONFIRMED]
    assert why(hung).startswith(f"pod {left} was to end by 20")
    assert hung.is_suspended("c"), "others still wait for the GPU that did not come free"
    assert len(hung.told("Job", "a")) == 1


@pytest.mark.parametrize("is_removed", [True, False])
def test_a_pod_with_a_finalizer_keeps_an_action_open(team: Team, is_removed: bool) -> None:
    with_pods(team, finalizers=[FINALIZER])
    (pod,) = team.job("train", 1)
    assert team.begin() == ([], set())
    until_terminating(team, pod)
    assert team.begin()[0] == [] and team.results() == [ENDING]
    if not is_removed:
        team.clock.later += GRACE_S + UNCONFIRMED_S
        assert team.begin(1)[0] == [UNCONFIRMED]
        assert f"it has the finalizers ['{FINALIZER}'" in why(team)
    team.plane.core.patch_namespaced_pod(pod, team.namespace, {"metadata": {"finalizers": None}})
    assert team.act(0)[0] == ([DONE] if is_removed else [])


@pytest.mark.parametrize("grace", [30, 3600, 31_536_000])
def test_a_long_grace_period_protects_a_job_and_its_gpus_are_counted(team: Team, grace: int) -> None:
    with_pods(team, grace=grace)
    team.job("train", 2)
    if grace == 30:
        assert team.act() == ([DONE], set())
        return
    assert team.act() == ([], {"grace"})
    assert team.spared == ["grace"] * 2 and not team.is_suspended("train")
    team.settings = ACT._replace(grace_max=40_000_000.0)
    team.restart()
    assert team.act()[0] == [DONE]


def test_an_action_is_open_while_an_exporter_shows_its_pod_or_is_silent(team: Team) -> None:
    (pod,) = team.job("train", 1)
    name, uid = HolderName("kubernetes", team.namespace, pod), team.source.pods[pod][0]
    team.proofs.shown = {name: Shown(frozenset({uid}), None)}
    assert team.begin() == ([], set())
    wait_for(lambda: not team.pods("job-name=train"), "the controller to end its pod", 60.0, 0.2)
    team.source.pods.clear()
    assert team.begin() == ([], set())
    team.proofs.shown, team.proofs.silent = {}, set(team.acts.entries[0].ends[0].nodes)
    assert team.begin() == ([], set()) and team.results() == [ENDING]
    team.proofs.shown, team.proofs.silent = {name: Shown(frozenset({"the next pod"}), None)}, set()
    assert team.begin(1)[0] == [DONE]


def test_a_new_pod_with_the_name_of_the_one_that_ended_does_not_keep_an_action_open(team: Team, kinds: None) -> None:
    team.policy = team.policy._replace(interactive_after=4000.0)
    team.restart()
    (pod,) = team.notebook("lab")
    before = team.plane.pod(pod, team.namespace)["metadata"]["uid"]
    assert team.begin() == ([], set()) and team.results() == [ENDING], "Kubeflow's controller does not run here"
    assert "no controller has deleted pod" in team.acts._ends.read_left(team.acts.entries)[team.acts.entries[0].ident]
    team.delete_pod(pod)

    def is_new() -> bool:
        return bool(team.pods("app=lab")) and team.plane.pod(pod, team.namespace)["metadata"]["uid"] != before

    wait_for(is_new, "the StatefulSet's controller to make a pod with its name", 60.0, 0.2)
    assert team.act(0)[0] == [("stop", "done")]
