"""Crashes, lost answers, changes at the last moment, and limits over restarts."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes import client

from gpu_exporter.reconciler.actions.journal import CONFIRM_S, KEY, parse
from gpu_exporter.reconciler.kubernetes.actor import PodActor
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.targets import ACTED
from gpu_exporter.reconciler.marks import MarkError
from tests.component.taken_back.team import ACT, Died, Team, gone
from tests.testbed.control_plane import ControlPlane
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.kubernetes


class MortalApi(Api):
    """Dies at the call with this number: before the call, or when its answer arrives."""

    def __init__(self, connection: client.ApiClient, at: int, *, answered: bool) -> None:
        super().__init__(connection)
        self._left, self._answered = at, answered

    def call(self, function: Any, *arguments: Any, **options: Any) -> Any:
        self._left -= 1
        if self._left == 0 and not self._answered:
            raise Died
        try:
            return super().call(function, *arguments, **options)
        finally:
            if self._left == 0:
                raise Died


class MeddlingApi(Api):
    """Changes the Job right before the patch that is not a dry run."""

    def __init__(self, connection: client.ApiClient, happens: Any) -> None:
        super().__init__(connection)
        self._happens = happens

    def call(self, function: Any, *arguments: Any, **options: Any) -> Any:
        if function.__name__ == "patch_namespaced_custom_object" and "dry_run" not in options:
            self._happens()
        return super().call(function, *arguments, **options)


def test_a_change_right_before_the_patch_prevents_the_act(team: Team) -> None:
    def wish() -> None:
        team.annotate("job", "train", exempt_until="2099-01-01T00:00:00Z")

    api = MeddlingApi(ControlPlane.connect(team.plane.admin), wish)
    team.actor = PodActor(api, team.policy, team.clock, resources=GPU_RESOURCES)
    team.restart()
    team.job("train", 1)
    done, _ = team.act()
    assert done[0] == ("suspend", "conflict")
    assert not team.is_suspended("train")
    assert team.told("Job", "train") == []


class LossyApi(Api):
    """Loses the answer of each of these requests once, by name. The request itself takes effect."""

    def __init__(self, connection: client.ApiClient, *names: str) -> None:
        super().__init__(connection)
        self.names = list(names)

    def call(self, function: Any, *arguments: Any, **options: Any) -> Any:
        answer = super().call(function, *arguments, **options)
        if function.__name__ in self.names and "dry_run" not in options:
            self.names.remove(function.__name__)
            raise MarkError("error", "the answer was lost")
        return answer


@pytest.mark.parametrize(
    "lost",
    [
        ("patch_namespaced_custom_object",),
        ("create_namespaced_event",),
        ("patch_namespaced_custom_object", "create_namespaced_event"),
    ],
)
def test_a_lost_answer_changes_nothing_for_the_owner(team: Team, lost: tuple[str, ...]) -> None:
    team.actor = PodActor(
        LossyApi(ControlPlane.connect(team.plane.admin), *lost), team.policy, team.clock, resources=GPU_RESOURCES
    )
    team.restart()
    team.job("train", 1)
    assert team.act(3)[0] == [("suspend", "done")]
    assert team.is_suspended("train")
    assert len(team.told("Job", "train")) == 1
    assert [line["result"] for line in team.records()] == ["begins", "done"]
    (entry,) = parse(team.lease.read_text(KEY))
    assert entry.told == "done"


@pytest.mark.parametrize("answered", [False, True], ids=["before", "after"])
def test_a_crash_at_any_step_leaves_a_job_that_is_suspended_only_once(team: Team, answered: bool) -> None:
    """Before, during and after every read, the journal, the patch, the check of the result, and the Event."""
    deaths = 0
    team.proofs.waiting = 100.0
    team.settings = ACT._replace(hour_max=100)
    for step in range(1, 40):
        name = f"train-{step}"
        team.job(name, 1)
        generation = team.live_job(name)["metadata"]["generation"]
        api = MortalApi(ControlPlane.connect(team.plane.admin), step, answered=answered)
        team.actor, team.journal_api = PodActor(api, team.policy, team.clock, resources=GPU_RESOURCES), api
        try:
            team.restart()
            team.act()
        except Died:
            deaths += 1
        team.actor = team.journal_api = None
        team.restart()
        team.act()
        if not team.is_suspended(name):  # the act has begun, and a patch may still arrive
            team.clock.later += CONFIRM_S + 1.0
            team.restart()
            team.act(3)
        job = team.live_job(name)
        assert job["spec"]["suspend"] is True, f"step {step}: {team.held}"
        assert job["metadata"]["generation"] == generation + 1, f"step {step}: changed more than once"
        assert len(team.told("Job", name)) == 1, f"step {step}"
        note = job["metadata"]["annotations"][ACTED]
        entries = {entry.note: entry.told for entry in parse(team.lease.read_text(KEY))}
        assert entries[note] == "done", f"step {step}: {entries}"
        team.source.pods.clear()
        wait_for(lambda name=name: gone(team, f"job-name={name}"), "its pods to go", each_s=0.2)  # type: ignore[misc]
        if deaths < step:
            break
    assert deaths >= 9, "reads, the rehearsal, the journal, the patch, the look back, the Event"


def test_a_reconciler_that_restarts_often_does_not_act_more_often(team: Team) -> None:
    team.settings = ACT._replace(hour_max=2, cycle_max=1)
    for at in range(4):
        team.job(f"job-{at}", 1)
    done = []
    for _ in range(5):
        team.restart()
        done += team.act()[0]
    assert done == [("suspend", "done")] * 2
    assert "limit" in team.held


def test_an_unreadable_journal_prevents_every_act(team: Team) -> None:
    team.job("train", 1)
    team.act(1)
    lease = team.plane.api
    body = {"metadata": {"annotations": {"gpu-exporter.io/journal": "not a journal"}}}
    client.CoordinationV1Api(lease).patch_namespaced_lease("leader", team.namespace, body)
    team.restart()
    assert team.act() == ([], {"journal"})
    assert not team.is_suspended("train")


def test_a_replica_that_loses_its_lease_right_before_the_act_does_nothing(team: Team) -> None:
    team.job("train", 1)
    team.leads = False
    team.restart()
    assert team.act()[1] == {"fenced"}
    assert not team.is_suspended("train")


def test_a_namespace_that_is_too_large_to_read_prevents_the_act(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    team.job("train", 1)
    monkeypatch.setattr("gpu_exporter.reconciler.kubernetes.targets.LIST_MAX", 100)
    assert team.act() == ([], {"size"})
    assert not team.is_suspended("train")
