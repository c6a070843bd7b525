"""Notebooks: stopped only with their own permission."""

from __future__ import annotations

import pytest
from kubernetes import client

from gpu_exporter.reconciler.actor import ENDING
from gpu_exporter.reconciler.kubernetes.shapes import STOPPED
from tests.component.taken_back.team import ACT, NOTEBOOK, Team

pytestmark = pytest.mark.kubernetes


def test_a_notebook_is_stopped_only_with_its_own_permission(team: Team, kinds: None) -> None:
    team.policy = team.policy._replace(interactive_after=4000.0)
    team.settings = ACT._replace(kinds="suspend")
    team.restart()
    team.notebook("lab")
    assert team.act()[1] == {"kind"}
    team.settings = ACT
    team.restart()
    assert team.begin(1) == ([], set()) and team.results() == [ENDING]
    client.AppsV1Api(team.plane.api).patch_namespaced_stateful_set("lab", team.namespace, {"spec": {"replicas": 0}})
    assert team.act(0)[0] == [("stop", "done")]
    assert team.object(NOTEBOOK, "lab")["metadata"]["annotations"][STOPPED].startswith("20")
    assert [reason for reason, _ in team.told("Notebook", "lab")] == ["GpuStopped"]


def test_a_foreign_stateful_set_with_the_notebooks_name_protects_both(team: Team, kinds: None) -> None:
    """Kubeflow's controller scales any StatefulSet with the notebook's name."""
    team.policy = team.policy._replace(interactive_after=4000.0)
    team.restart()
    team.notebook("lab", owned=False)
    owner = team.object(NOTEBOOK, "lab")["metadata"]
    template = team.template(labels={"notebook-name": "lab"})
    body = {
        "metadata": {
            "name": "lab2",
            "ownerReferences": [
                {
                    "apiVersion": "kubeflow.org/v1beta1",
                    "kind": "Notebook",
                    "name": "lab",
                    "uid": owner["uid"],
                    "controller": True,
                }
            ],
        },
        "spec": {
            "serviceName": "lab2",
            "selector": {"matchLabels": {"own": "lab2"}},
            "template": {
                **template,
                "metadata": {"labels": {"notebook-name": "lab", "own": "lab2"}},
                "spec": {key: value for key, value in template["spec"].items() if key != "restartPolicy"},
            },
        },
    }
    client.AppsV1Api(team.plane.api).create_namespaced_stateful_set(team.namespace, body)
    team.run_all("own=lab2", 1)
    team.set_run("lab2-0", 8500.0)
    assert team.act()[0] == []
    assert "stranger" in team.held
    assert STOPPED not in (team.object(NOTEBOOK, "lab")["metadata"].get("annotations") or {})
