"""The real controllers of JobSet, Kubeflow and Kueue for a control plane: they create and delete pods for objects."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import yaml
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from tests.testbed.control_plane import ControlPlane, start_control_plane
from tests.testbed.node import program
from tests.testbed.processes import Processes, Running, free_port, wait_for
from tests.testbed.programs import operator_crds
from tests.testbed.schemas import read_crd

GPU = "nvidia.com/gpu"
# The MPI operator controls MPIJobs of v2beta1; the training operator has another definition of that kind.
OTHERS = ("training-operator-kubeflow.org_mpijobs.yaml",)
KUEUE = ("kueue.x-k8s.io", "v1beta2")
KUEUE_NAMESPACE = "kueue-system"
# Kueue starts only after it has written its certificate here. One version is requested, so no object is converted.
CONVERSION = {
    "strategy": "Webhook",
    "webhook": {"conversionReviewVersions": ["v1"], "clientConfig": {"url": "https://127.0.0.1:1/convert"}},
}
FRAMEWORKS = ("batch/job", "jobset.x-k8s.io/jobset", "kubeflow.org/pytorchjob")


def install_definitions(plane: ControlPlane) -> None:
    """Serve the kinds of all operators, as their authors define them."""
    extensions = client.ApiextensionsV1Api(plane.api)
    names = []
    for path in sorted(operator_crds().glob("*.yaml")):
        if path.name not in OTHERS:
            body = read_crd(path)
            if body["spec"]["group"] == KUEUE[0]:
                body["spec"]["conversion"] = CONVERSION
            extensions.create_custom_resource_definition(body)
            names.append(body["metadata"]["name"])

    def is_established(name: str) -> bool:
        found = extensions.read_custom_resource_definition(name).status.conditions or ()
        return any(each.type == "Established" and each.status == "True" for each in found)

    wait_for(lambda: all(map(is_established, names)), "the definitions to be served")


def start_operators(processes: Processes, plane: ControlPlane) -> Running:
    """JobSet, training operator and MPI operator."""
    return processes.start([str(program("operators"))], {**os.environ, "KUBECONFIG": str(plane.admin)})


def start_kueue(processes: Processes, plane: ControlPlane, directory: Path) -> Running:
    """Kueue without its webhooks: tests must write the defaults that the webhooks would set."""
    plane.core.create_namespace({"metadata": {"name": KUEUE_NAMESPACE}})
    plane.core.create_namespaced_secret(KUEUE_NAMESPACE, {"metadata": {"name": "kueue-webhook-server-cert"}})
    certificate, key = plane.authority.issue("kueue", "kueue")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tls.crt").write_bytes(Path(certificate).read_bytes())
    (directory / "tls.key").write_bytes(Path(key).read_bytes())
    settings = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": f"127.0.0.1:{free_port()}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": free_port(), "certDir": str(directory)},
        "leaderElection": {"leaderElect": False},
        "namespace": KUEUE_NAMESPACE,
        "internalCertManagement": {"enable": True},
        "integrations": {"frameworks": list(FRAMEWORKS)},
    }
    config = directory / "config.yaml"
    config.write_text(yaml.safe_dump(settings), "utf-8")
    command = [str(program("kueue")), f"--config={config}", "--feature-gates=VisibilityOnDemand=false"]
    return processes.start(command, {**os.environ, "KUBECONFIG": str(plane.admin)})


@contextlib.contextmanager
def start_with_operators(directory: Path) -> Iterator[ControlPlane]:
    """A control plane with all of these controllers."""
    with Processes(directory) as processes, start_control_plane(processes, directory) as started:
        install_definitions(started)
        start_operators(processes, started)
        start_kueue(processes, started, directory / "kueue")
        yield started


def make_queue(plane: ControlPlane, namespace: str, gpus: int) -> None:
    """Create a queue `team` of the namespace, with `gpus` GPUs."""
    custom = client.CustomObjectsApi(plane.api)

    def create(plural: str, kind: str, name: str, spec: dict[str, Any], *where: str) -> None:
        body = {"apiVersion": "/".join(KUEUE), "kind": kind, "metadata": {"name": name}, "spec": spec}
        make: Callable[..., object] = custom.create_cluster_custom_object
        if where:
            make = custom.create_namespaced_custom_object
        try:
            make(*KUEUE, *where, plural, body)
        except ApiException as exc:
            if exc.status != 409:
                raise

    create("resourceflavors", "ResourceFlavor", "any", {})
    quota = [{"name": name, "nominalQuota": str(gpus)} for name in (GPU,)]
    groups = [{"coveredResources": [GPU], "flavors": [{"name": "any", "resources": quota}]}]
    create("clusterqueues", "ClusterQueue", namespace, {"namespaceSelector": {}, "resourceGroups": groups})
    create("localqueues", "LocalQueue", "team", {"clusterQueue": namespace}, namespace)


def pod_template(gpus: int, **labels: str) -> dict[str, Any]:
    container: dict[str, Any] = {"name": "train", "image": "x"}
    if gpus:
        container["resources"] = {"limits": {GPU: str(gpus)}}
    return {"metadata": {"labels": labels}, "spec": {"containers": [container], "restartPolicy": "Never"}}


def job_spec(pods: int, gpus: int = 1, **more: Any) -> dict[str, Any]:
    return {"parallelism": pods, "completions": pods, "template": pod_template(gpus), "backoffLimit": 0, **more}


def jobset_spec(**roles: tuple[int, int, int]) -> dict[str, Any]:
    """A JobSet; by role: number of Jobs, pods per Job, GPUs per pod."""
    jobs = [
        {"name": role, "replicas": replicas, "template": {"spec": job_spec(pods, gpus, completionMode="Indexed")}}
        for role, (replicas, pods, gpus) in roles.items()
    ]
    # The values that the webhook would set.
    policies = {"successPolicy": {"operator": "All"}, "startupPolicy": {"startupPolicyOrder": "AnyOrder"}}
    network = {"enableDNSHostnames": False, "publishNotReadyAddresses": False}
    return {"replicatedJobs": jobs, **policies, "network": network, "suspend": False}


def kubeflow_spec(field: str, container: str, **roles: tuple[int, int]) -> dict[str, Any]:
    """By role: number of pods, GPUs per pod. `container`: the name that the operator requires."""
    specs = {}
    for role, (replicas, gpus) in roles.items():
        template = pod_template(gpus)
        template["spec"]["containers"][0]["name"] = container
        specs[role] = {"replicas": replicas, "template": template, "restartPolicy": "Never"}
    return {field: specs, "runPolicy": {"cleanPodPolicy": "None", "suspend": False}}


# By kind: group, version, plural, and an object; if the kind has roles, it has two, the first without GPUs.
OBJECTS: dict[str, tuple[tuple[str, str, str], dict[str, Any]]] = {
    "Job": (("batch", "v1", "jobs"), job_spec(3)),
    "JobSet": (("jobset.x-k8s.io", "v1alpha2", "jobsets"), jobset_spec(driver=(1, 1, 0), worker=(2, 2, 1))),
    "PyTorchJob": (
        ("kubeflow.org", "v1", "pytorchjobs"),
        kubeflow_spec("pytorchReplicaSpecs", "pytorch", Master=(1, 0), Worker=(3, 1)),
    ),
    "TFJob": (
        ("kubeflow.org", "v1", "tfjobs"),
        kubeflow_spec("tfReplicaSpecs", "tensorflow", PS=(1, 0), Worker=(2, 1)),
    ),
    "XGBoostJob": (
        ("kubeflow.org", "v1", "xgboostjobs"),
        kubeflow_spec("xgbReplicaSpecs", "xgboost", Master=(1, 0), Worker=(2, 1)),
    ),
    "PaddleJob": (
        ("kubeflow.org", "v1", "paddlejobs"),
        kubeflow_spec("paddleReplicaSpecs", "paddle", Master=(1, 0), Worker=(2, 1)),
    ),
    "JAXJob": (("kubeflow.org", "v1", "jaxjobs"), kubeflow_spec("jaxReplicaSpecs", "jax", Worker=(2, 1))),
    "MPIJob": (
        ("kubeflow.org", "v2beta1", "mpijobs"),
        {
            **kubeflow_spec("mpiReplicaSpecs", "mpi", Launcher=(1, 0), Worker=(2, 1)),
            "slotsPerWorker": 1,
            "sshAuthMountPath": "/root/.ssh",
            "mpiImplementation": "OpenMPI",
            "launcherCreationPolicy": "AtStartup",
        },
    ),
}


def create(
    plane: ControlPlane, namespace: str, kind: str, name: str, spec: Any = None, **labels: str
) -> dict[str, Any]:
    """Create an object of this kind, as in OBJECTS or with another spec."""
    (group, version, plural), usual = OBJECTS[kind]
    body = {
        "apiVersion": f"{group}/{version}",
        "kind": kind,
        "metadata": {"name": name, "labels": labels},
        "spec": spec or usual,
    }
    custom = client.CustomObjectsApi(plane.api)
    made = custom.create_namespaced_custom_object(group, version, namespace, plural, body)
    return cast(dict[str, Any], made)
