"""Jobs that someone writes all the time: a heartbeat delays no action, and what an action depends on prevents it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kubernetes import client

from gpu_exporter.reconciler.decision.target import Target
from gpu_exporter.reconciler.kubernetes.actor import PodActor
from gpu_exporter.reconciler.kubernetes.client.api import Api
from tests.component.taken_back.team import Team
from tests.testbed.control_plane import ControlPlane
from tests.testbed.gpu_resources import GPU_RESOURCES

pytestmark = pytest.mark.kubernetes


@contextmanager
def storm(team: Team, name: str, change: Callable[[int], dict[str, Any]], each_s: float = 0.0) -> Iterator[list[int]]:
    """Patches the Job by another client, `each_s` after each answer. Yields the numbers of the patches."""
    batch = client.BatchV1Api(ControlPlane.connect(team.plane.admin))
    done, is_over, has_begun = list[int](), threading.Event(), threading.Event()

    def patch() -> None:
        for number in itertools.takewhile(lambda _: not is_over.is_set(), itertools.count()):
            batch.patch_namespaced_job(name, team.namespace, change(number))
            done.append(number)
            has_begun.set()
            is_over.wait(each_s)

    thread = threading.Thread(target=patch, daemon=True)
    thread.start()
    try:
        assert has_begun.wait(10.0)
        yield done
    finally:
        is_over.set()
        thread.join(10.0)


def test_a_heartbeat_in_an_annotation_or_a_label_does_not_block_an_action(team: Team) -> None:
    team.job("train", 1)
    team.run()
    beats = [
        lambda n: {"metadata": {"annotations": {"example.org/heartbeat": str(n)}}},
        lambda n: {"metadata": {"labels": {"example.org/heartbeat": str(n)}}},
    ]
    with storm(team, "train", lambda n: beats[n % 2](n), each_s=0.05) as patches:
        before = len(patches)
        assert team.act(1) == ([("suspend", "done")], set())
    assert len(patches) > before, "the Job was written during the cycle"
    assert team.is_suspended("train")


def test_a_job_whose_owner_changes_its_spec_for_ever_is_left_alone_and_counted(team: Team) -> None:
    team.job("train", 1)
    team.job("other", 1)
    team.run()
    with storm(team, "train", lambda n: {"spec": {"activeDeadlineSeconds": 10**6 + n}}):
        assert team.act(1) == ([("suspend", "done")], {"conflict"})
    assert (team.is_suspended("train"), team.is_suspended("other")) == (False, True)
    assert team.spared == ["conflict", "pending"] or team.spared == ["pending", "conflict"]


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"annotations": {"gpu-exporter.io/exempt-until": "2099-01-01T00:00:00Z"}}},
        {"metadata": {"labels": {"gpu-exporter.io/class": "serving"}}},
        {"spec": {"parallelism": 2}},
        {"status": {"ready": 1}},
    ],
)
def test_a_change_on_which_an_action_depends_between_reading_and_acting_prevents_it(
    team: Team, change: dict[str, Any]
) -> None:
    class Changing(PodActor):
        def rehearse(self, target: Target) -> None:
            super().rehearse(target)
            batch = client.BatchV1Api(team.plane.api)
            patch = batch.patch_namespaced_job_status if "status" in change else batch.patch_namespaced_job
            patch("train", team.namespace, change)

    admin = Api(ControlPlane.connect(team.plane.admin))
    team.actor = Changing(admin, team.policy, team.clock, resources=GPU_RESOURCES)
    team.restart()
    team.job("train", 1)
    team.run()
    done, _ = team.act(1)
    assert done == [("suspend", "conflict")]
    assert not team.is_suspended("train")
    assert team.spared == ["conflict"]
