"""Jobs and groups of pods: suspended as a whole, or left alone."""

from __future__ import annotations

import pytest
from kubernetes import client

from gpu_exporter.reconciler.actions.proofs import Work
from gpu_exporter.reconciler.decision.policy import LABEL
from gpu_exporter.reconciler.kubernetes.targets import ACTED
from tests.component.taken_back.team import PIPELINE, POOL, Team, gone, resume
from tests.testbed.operators import OBJECTS
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.kubernetes


def test_a_job_is_suspended_as_a_whole_and_only_once_if_its_owner_resumes_it(team: Team) -> None:
    team.job("train", 2)
    assert team.act() == ([("suspend", "done")], set())
    job = team.live_job("train")
    assert job["spec"]["suspend"] is True
    assert job["metadata"]["annotations"][ACTED].startswith("suspend 20")
    ((reason, note),) = team.told("Job", "train")
    assert reason == "GpuSuspended"
    assert "All of its 2 GPUs were idle since" in note
    assert "kubectl patch -n" in note and '{"spec":{"suspend":false}}' in note
    begun, done = (team.records()[at] for at in (0, -1))
    assert (begun["result"], done["result"], done["act"], done["target"]) == (
        "begins",
        "done",
        "suspend",
        "batch/v1/Job/train",
    )
    assert (begun["receivers"], begun["decisions"], begun["regrets"], begun["waited_for"]) == (
        ["gpu-owners"],
        50,
        2,
        {POOL: 8},
    )
    assert begun["id"] == done["id"] and begun["id"] in job["metadata"]["annotations"][ACTED]
    wait_for(lambda: gone(team, "job-name=train"), "the real controller to end its pods", each_s=0.2)
    team.source.pods.clear()
    assert team.act() == ([], set())

    resume(team, "train")
    (first, second) = team.run_all("job-name=train", 2)
    assert team.act() == ([], {"acted"})
    assert [team.labels(pod)[LABEL] for pod in (first, second)] == ["underused"] * 2, "marked, and left alone"
    assert not team.is_suspended("train")


def test_a_job_with_a_false_note_of_an_act_is_left_alone_and_counted(team: Team) -> None:
    """The owner wrote the annotation by hand to protect the Job."""
    team.job("train", 1)
    team.annotate("job", "train", acted="suspend 2026-01-01T00:00:00Z 0a0b0c0d")
    assert team.act() == ([], {"noted"})
    assert team.spared == ["noted"], "in the second cycle: the first one marks"
    assert not team.is_suspended("train")


def test_a_busy_or_unwarned_member_or_an_exemption_protects_the_whole_job(team: Team) -> None:
    pods = team.job("train", 3)
    team.proofs.unwarned = {pods[2]}
    assert team.act() == ([], {"not_warned"})
    team.proofs.unwarned = set()
    team.set_run(pods[1], 1.0)
    assert team.act() == ([], set())
    team.set_run(pods[1], 7000.0)
    # An exemption that was set after the last look at the namespace, which can be a minute old.
    team.run()
    team.annotate("job", "train", exempt_until="2099-01-01T00:00:00Z")
    assert team.act(1) == ([], {"exempt"})
    assert not team.is_suspended("train")


def test_pods_without_a_controller_of_a_known_kind_are_left_alone(team: Team, kinds: None) -> None:
    bare = team.run_pod("bare")
    team.source.pods["bare"] = (bare, 7000.0)
    team.deployment("web", 1)
    team.own(PIPELINE, "pipe", {}, 1)
    team.job("slow", 1)
    team.annotate("job", "slow", **{"class": "x"})
    done, held = team.act()
    assert done == [("suspend", "done")]
    assert held == {"kind"}
    assert team.is_suspended("slow")


def test_a_run_of_a_cron_job_is_left_alone(team: Team) -> None:
    """With `concurrencyPolicy: Forbid`, a suspended run would block all later runs."""
    team.job("run", 1)
    batch = client.BatchV1Api(team.plane.api)
    template = {"spec": {"containers": [{"name": "c", "image": "i"}], "restartPolicy": "Never"}}
    spec = {"schedule": "0 0 1 1 *", "concurrencyPolicy": "Forbid", "jobTemplate": {"spec": {"template": template}}}
    made = batch.create_namespaced_cron_job(team.namespace, {"metadata": {"name": "nightly"}, "spec": spec})
    team.control("run", {"apiVersion": "batch/v1", "kind": "CronJob", "name": "nightly", "uid": made.metadata.uid})
    assert team.act() == ([], {"above"})
    assert not team.is_suspended("run")


@pytest.mark.parametrize("kind", ["Pipeline", "OfNoApi"])
def test_a_job_below_another_controller_is_left_alone(team: Team, kinds: None, kind: str) -> None:
    team.job("step", 1)
    body = {"apiVersion": "example.org/v1", "kind": "Pipeline", "metadata": {"name": "p"}}
    made = team.custom.create_namespaced_custom_object("example.org", "v1", team.namespace, "pipelines", body)
    team.control("step", {"apiVersion": "example.org/v1", "kind": kind, "name": "p", "uid": made["metadata"]["uid"]})
    team.act()
    assert not team.is_suspended("step")
    assert team.held == ({"above"} if kind == "Pipeline" else set())


@pytest.mark.parametrize("kind", [kind for kind in OBJECTS if kind != "Job"])
def test_each_kind_of_group_has_its_own_switch(team: Team, kind: str) -> None:
    reference = team.idle_object(kind)
    spec = team.live(reference)["spec"]
    assert team.act() == ([("suspend", "done")], set())
    found = team.live(reference)
    assert found["metadata"]["annotations"][ACTED]
    switch = spec if kind == "JobSet" else spec["runPolicy"]
    switch["suspend"] = True
    assert found["spec"] == spec, "nothing else is changed"


def test_a_working_launcher_protects_its_workers(team: Team) -> None:
    reference = team.idle_object("MPIJob")
    (launcher,) = (part.name.name for part in team.read(reference).beside)
    for work in (Work(0.06, 0.0), Work(0.0, 1.1e6), Work(None, 0.0), Work(0.0, None)):
        team.proofs.beside = {launcher: work}
        assert team.act() == ([], {"beside"}), work
    team.proofs.beside = {launcher: Work(0.04, 0.9e6)}
    assert team.act(1) == ([("suspend", "done")], set())
