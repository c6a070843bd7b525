"""Objects of Kueue, and an API server that drops the change."""

from __future__ import annotations

import json

import pytest
from kubernetes import client

from gpu_exporter.reconciler.actor import ENDING
from gpu_exporter.reconciler.kubernetes.targets import ACTED
from tests.component.taken_back.team import ACT, WORKLOAD, Team, gone, queued
from tests.component.test_shapes import QUEUE
from tests.testbed.operators import make_queue
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.kubernetes


def test_an_object_with_a_recreated_workload_is_not_acted_on_again(team: Team) -> None:
    make_queue(team.plane, team.namespace, 8)
    reference = team.idle_object("Job", spec=queued("Job"), **QUEUE)
    assert team.act() == ([("deactivate", "done")], set())
    assert len(team.told("Job", "train")) == 1
    wait_for(lambda: gone(team, "job-name=train"), "Kueue to end its pods", each_s=0.2)
    team.source.pods.clear()
    workloads = WORKLOAD[0], WORKLOAD[1], team.namespace, WORKLOAD[2]
    (old,) = team.custom.list_namespaced_custom_object(*workloads)["items"]
    team.custom.delete_namespaced_custom_object(*workloads, old["metadata"]["name"])
    team.run_all("job-name=train", 3)
    (new,) = team.custom.list_namespaced_custom_object(*workloads)["items"]
    assert ACTED not in (new["metadata"].get("annotations") or {}), "Kueue has made another one, and let it run"
    assert team.act() == ([], {"acted"})
    assert team.ends_of(reference)


def test_an_object_of_kueue_without_a_workload_is_left_alone(team: Team) -> None:
    team.idle_object("MPIJob", **QUEUE)  # Kueue does not manage this kind here
    assert team.act()[1] == {"kueue"}


def test_an_object_of_kueue_is_not_suspended_if_deactivation_is_not_allowed(team: Team) -> None:
    """Kueue would resume the object."""
    team.settings = ACT._replace(kinds="suspend")
    team.restart()
    reference = team.idle_object("MPIJob")
    team.workload(reference)
    assert team.act() == ([], {"kind"})


def test_an_object_without_a_queue_label_can_be_managed_by_kueue(team: Team) -> None:
    reference = team.idle_object("MPIJob")
    team.workload(reference)
    assert team.begin() == ([], set()) and team.results() == [ENDING], "nothing ends its pods here"
    workload = team.object(WORKLOAD, "wl-train")
    assert workload["spec"]["active"] is False
    notes = [each["metadata"]["annotations"][ACTED] for each in (workload, team.live(reference))]
    assert notes[0] == notes[1] and notes[0].startswith("deactivate 20")
    assert not team.live(reference)["spec"]["runPolicy"].get("suspend")


def test_an_object_whose_definition_drops_suspend_gets_no_note_and_no_event(team: Team) -> None:
    """An operator that is older than runPolicy.suspend has such a definition."""
    extensions = client.ApiextensionsV1Api(team.plane.api)
    name = "paddlejobs.kubeflow.org"
    before = extensions.api_client.sanitize_for_serialization(extensions.read_custom_resource_definition(name))
    reference = team.idle_object("PaddleJob")
    old = json.loads(json.dumps(before))
    spec = old["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["runPolicy"]["properties"]["suspend"]

    def is_dropped() -> bool:
        change = {"spec": {"runPolicy": {"suspend": True}}}
        where = "kubeflow.org", "v1", team.namespace, "paddlejobs", "train", change
        options = {"dry_run": "All", "_content_type": "application/merge-patch+json"}
        would = team.custom.patch_namespaced_custom_object(*where, **options)
        return "suspend" not in would["spec"]["runPolicy"]

    extensions.replace_custom_resource_definition(name, old)
    try:
        wait_for(is_dropped, "the older definition to count", each_s=0.2)
        assert team.act() == ([], {"refused"})
        assert ACTED not in (team.live(reference)["metadata"].get("annotations") or {})
        assert team.told("PaddleJob", "train") == [] and team.records() == []
    finally:
        now = extensions.read_custom_resource_definition(name).metadata.resource_version
        before["metadata"]["resourceVersion"] = now
        extensions.replace_custom_resource_definition(name, before)
        wait_for(lambda: not is_dropped(), "the definition to be as it was", each_s=0.2)
