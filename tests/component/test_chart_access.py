"""What the chart lets agent and reconciler do and see: rights of the accounts, and the host's folders and processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from tests.testbed.chart import Helm, find
from tests.testbed.control_plane import ControlPlane
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.kubernetes
UID_OF_POD = {
    "name": "GPU_EXPORTER_ATTRIBUTION_POD_UID",
    "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}},
}


@pytest.fixture
def helm(tmp_path: Path) -> Helm:
    return Helm(tmp_path)


def test_the_agent_has_no_rights_and_the_dry_run_may_only_read_pods(helm: Helm) -> None:
    objects = helm.objects({})
    agent = find(objects, "DaemonSet")["spec"]["template"]["spec"]
    assert agent["automountServiceAccountToken"] is False
    assert not {"hostPID", "hostNetwork", "hostIPC"} & {key for key, value in agent.items() if value}
    (container,) = agent["containers"]
    assert container["securityContext"] == {
        "runAsUser": 0,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    writable = [mount["name"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
    assert writable == ["state"]
    (role,) = [each for each in objects if each["kind"] == "ClusterRole" and "annotations" not in each["metadata"]]
    assert role["metadata"]["name"].endswith("-reconciler")
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list"}
    assert all("*" not in (*rule["resources"], *rule["apiGroups"]) for rule in role["rules"])
    reconciler = find(objects, "Deployment")["spec"]["template"]["spec"]
    assert reconciler["automountServiceAccountToken"] is True
    assert "--apply" not in reconciler["containers"][0]["args"]


def test_the_agent_sees_host_processes_only_if_enabled(helm: Helm) -> None:
    """In the host's PID namespace uid 0 may end every process of uid 0, without any capability."""
    asked = find(helm.objects({"agent": {"processes": True}}), "DaemonSet")["spec"]["template"]["spec"]
    assert asked["hostPID"] is True
    assert "--attribution.process" in asked["containers"][0]["args"]
    assert "process" not in json.dumps(find(helm.objects({}), "DaemonSet"))


def test_the_agent_reads_host_cgroups_unless_disabled(helm: Helm) -> None:
    def agent(values: dict[str, Any]) -> dict[str, Any]:
        return find(helm.objects({"agent": values}), "DaemonSet")["spec"]["template"]["spec"]

    pod = agent({})
    assert "--path.cgroup=/host/cgroup" in pod["containers"][0]["args"]
    mount = {"name": "cgroup", "mountPath": "/host/cgroup", "readOnly": True}
    assert mount in pod["containers"][0]["volumeMounts"]
    assert {"name": "cgroup", "hostPath": {"path": "/sys/fs/cgroup", "type": "Directory"}} in pod["volumes"]
    assert UID_OF_POD in pod["containers"][0]["env"]
    without = json.dumps(agent({"hostActivity": False}))
    assert "cgroup" not in without and UID_OF_POD["name"] not in without


def test_the_agent_gets_the_settings_for_monitors_and_claims(helm: Helm) -> None:
    def agent(values: dict[str, Any]) -> dict[str, Any]:
        return find(helm.objects({"agent": values}), "DaemonSet")["spec"]["template"]["spec"]

    folder = "/var/lib/kubelet/plugins/gpu.nvidia.com"
    pod = agent({"monitors": ["monitoring/dcgm-.*"], "reservations": ["gpu-sharing"], "draPluginPath": folder})
    (container,) = pod["containers"]
    assert {"--attribution.monitor=monitoring/dcgm-.*", "--attribution.claims=/host/dra-plugin"} <= {*container["args"]}
    assert "--attribution.reservation=gpu-sharing" in container["args"]
    assert {"name": "dra-plugin", "mountPath": "/host/dra-plugin", "readOnly": True} in container["volumeMounts"]
    assert {"name": "dra-plugin", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}} in pod["volumes"]
    assert "dra-plugin" not in json.dumps(agent({}))
    for refused in (
        {"monitors": ["dcgm-exporter"]},
        {"monitors": [".*/dcgm"]},
        {"reservations": ["gpu-.*"]},
        {"draPluginPath": "plugins"},
    ):
        assert helm.template({"agent": refused}, check=False).returncode != 0


def test_the_agent_reads_the_kernel_log_only_if_enabled_and_privileged(helm: Helm) -> None:
    def agent(values: dict[str, Any]) -> dict[str, Any]:
        pod = find(helm.objects({"agent": values}), "DaemonSet")["spec"]["template"]["spec"]
        return {"volumes": pod["volumes"], **pod["containers"][0]}

    mount = {"name": "kmsg", "mountPath": "/dev/kmsg", "readOnly": True}
    asked = agent({"xidKmsg": True, "privileged": True})
    assert "--collector.xid.kmsg" in asked["args"]
    assert mount in asked["volumeMounts"]
    assert {"name": "kmsg", "hostPath": {"path": "/dev/kmsg", "type": "CharDevice"}} in asked["volumes"]
    assert asked["securityContext"]["privileged"] is True
    for values in ({}, {"privileged": True}):
        text = json.dumps(agent(values))
        assert "kmsg" not in text
    refused = helm.template({"agent": {"xidKmsg": True}}, check=False)
    assert refused.returncode != 0
    assert "agent.xidKmsg: only privileged containers may read /dev/kmsg; set agent.privileged=true" in refused.stderr


@pytest.mark.parametrize(
    ("apply", "condition", "lease"),
    [
        (False, False, {}),
        (False, True, {}),
        (True, False, {}),
        (True, True, {}),
        (False, False, {"namespace": "coordination", "name": "gpus"}),
        (True, True, {"namespace": "coordination", "name": "gpus"}),
        (True, False, {"name": "gpus"}),
    ],
    ids=[
        "dry run",
        "dry run, condition",
        "apply",
        "apply, condition",
        "dry run, lease",
        "apply, lease",
        "name of a lease",
    ],
)
def test_the_reconciler_has_the_rights_it_uses_and_no_others(
    plane: ControlPlane, helm: Helm, apply: bool, condition: bool, lease: dict[str, str]
) -> None:
    about = {"serviceAccount": {"name": "marks"}} if lease else {}
    objects = helm.objects({"reconciler": {"apply": apply, "condition": condition, "lease": lease, **about}})
    args = find(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert ("--kubernetes.condition" in args) is (apply and condition), "the command refuses it without --apply"
    rbac = client.RbacAuthorizationV1Api(plane.api)
    role, binding = find(objects, "ClusterRole", "-reconciler"), find(objects, "ClusterRoleBinding", "-reconciler")
    rbac.create_cluster_role(role)
    rbac.create_cluster_role_binding(binding)
    local = [find(objects, kind, "-reconciler") for kind in ("Role", "RoleBinding")]
    create = {"Role": rbac.create_namespaced_role, "RoleBinding": rbac.create_namespaced_role_binding}
    home = local[0]["metadata"]["namespace"]
    if home not in {each.metadata.name for each in plane.core.list_namespace().items}:
        plane.core.create_namespace({"metadata": {"name": home}})
    for each in local:
        create[each["kind"]](each["metadata"]["namespace"], each)
    (account,) = [
        each["metadata"]
        for each in objects
        if each["kind"] == "ServiceAccount"
        and each["metadata"]["labels"]["app.kubernetes.io/component"] == "reconciler"
    ]
    assert account["name"] == "marks" or not lease
    user = f"system:serviceaccount:{account['namespace']}:{account['name']}"

    def may(
        verb: str, resource: str, group: str = "", subresource: str = "", namespace: str = "ml", name: str = ""
    ) -> bool:
        attributes = {"verb": verb, "resource": resource, "group": group, "namespace": namespace, "name": name}
        attributes["subresource"] = subresource
        review = {"spec": {"user": user, "resourceAttributes": attributes}}
        answer = client.AuthorizationV1Api(plane.api).create_subject_access_review(review)
        return bool(answer.status.allowed)

    reads = [
        ("get", "pods"),
        ("list", "pods"),
        ("get", "namespaces"),
        ("list", "services"),
        ("list", "endpointslices", "discovery.k8s.io"),
        ("list", "horizontalpodautoscalers", "autoscaling"),
        ("list", "inferencepools", "inference.networking.k8s.io"),
        ("list", "inferencepools", "inference.networking.x-k8s.io"),
        ("get", "jobs", "batch"),
        ("get", "statefulsets", "apps"),
        ("get", "pytorchjobs", "kubeflow.org"),
    ]
    status = ("patch", "pods", "", "status")
    own = lease.get("name", "gpu-gpu-exporter-reconciler")
    assert home == lease.get("namespace", account["namespace"])
    assert f"--kubernetes.lease={home}/{own}" in args
    pause = ("get", "leases", "coordination.k8s.io", "", home, own)  # a dry run reads the pause
    record = [
        (verb, "leases", "coordination.k8s.io", "", home, f"{own}-record" if verb != "create" else "")
        for verb in ("create", "get", "update")
    ]
    writes = [
        ("patch", "pods"),
        ("update", "leases", "coordination.k8s.io", "", home, own),
        ("create", "events", "events.k8s.io"),
        *([status] if apply and condition else []),
    ]
    allowed = [*reads, pause, *record, *writes] if apply else [*reads, pause, *record]
    denied = [
        *(() if apply else writes),
        ("delete", "pods"),
        ("update", "pods"),
        ("create", "pods"),
        ("watch", "pods"),
        ("create", "pods", "", "eviction"),
        ("create", "pods", "", "exec"),
        *(() if apply and condition else (status,)),
        ("get", "leases", "coordination.k8s.io", "", home, "another"),
        ("update", "leases", "coordination.k8s.io", "", home, "another"),
        ("create", "leases", "coordination.k8s.io", "", "ml"),
        *([("create", "leases", "coordination.k8s.io", "", account["namespace"])] if "namespace" in lease else []),
        ("delete", "leases", "coordination.k8s.io", "", home, own),
        ("get", "secrets"),
        ("list", "nodes"),
        ("list", "jobs", "batch"),
        ("patch", "jobs", "batch"),
        ("patch", "namespaces"),
        ("patch", "deployments", "apps"),
        ("create", "events"),
        ("get", "events", "events.k8s.io"),
    ]
    try:
        wait_for(lambda: all(may(*request) for request in allowed), "the rights to count")
        assert [request for request in denied if may(*request)] == []
    finally:
        rbac.delete_cluster_role_binding(binding["metadata"]["name"])
        rbac.delete_cluster_role(role["metadata"]["name"])
        for each in local:
            delete = {"Role": rbac.delete_namespaced_role, "RoleBinding": rbac.delete_namespaced_role_binding}
            delete[each["kind"]](each["metadata"]["name"], each["metadata"]["namespace"])
    wait_for(lambda: not any(may(*request) for request in allowed), "the rights to go")


def test_the_kubelets_pods_are_mounted_only_where_trainings_are_read(helm: Helm) -> None:
    for files, expected in (("none", []), ("read", ["/var/lib/kubelet/pods"])):
        pod = find(helm.objects({"settings": {"training": {"files": files}}}), "DaemonSet")["spec"]["template"]["spec"]
        mounts = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "pods"]
        assert [each["mountPath"] for each in mounts] == expected
        # Without HostToContainer, the agent would keep volumes of ended pods busy.
        assert all(each["readOnly"] and each["mountPropagation"] == "HostToContainer" for each in mounts)
        assert [each["hostPath"]["path"] for each in pod["volumes"] if each["name"] == "pods"] == expected
