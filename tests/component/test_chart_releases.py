"""The chart on a real API server: every preset applied twice, older values, upgrade, rollback, and what uninstall leaves."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes import client
from tools import manifests

from gpu_exporter.reconciler.decision.policy import LABEL
from tests.component.test_chart import VARIANTS, conform
from tests.testbed.chart import CHART, RELEASE, Helm, find
from tests.testbed.control_plane import ControlPlane
from tests.testbed.node import program
from tests.testbed.processes import wait_for
from tests.testbed.programs import prometheus_operator_crds
from tests.testbed.recorded_schemas import VERSIONS, read_recorded
from tests.testbed.schemas import read_crd, write_schemas

pytestmark = pytest.mark.kubernetes
PRESETS = sorted((CHART / "presets").glob("*.yaml"))
ROOT = Path(__file__).resolve().parents[2]
OLD = ROOT / "tests" / "fixtures" / "charts" / "gpu-exporter-da7ce79.tgz"
CASES: dict[str, dict[str, Any]] = {
    **VARIANTS,
    **{path.stem: yaml.safe_load(path.read_text("utf-8")) for path in PRESETS},
    "apply": {"reconciler": {"apply": True, "admissionPolicy": True}},
    "tests": {"tests": {"enabled": True}},
}
CONTAINER = {"name": "main", "image": "localhost/none"}
# Cluster-wide kinds of others, as group, version, plural and kind. Here they accept every field.
OTHERS = (
    ("security.openshift.io", "v1", "securitycontextconstraints", "SecurityContextConstraints"),
    ("monitoring.googleapis.com", "v1", "clusterpodmonitorings", "ClusterPodMonitoring"),
)


def free_crd(group: str, version: str, plural: str, kind: str) -> dict[str, Any]:
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    names = {"plural": plural, "singular": kind.lower(), "kind": kind}
    served = [{"name": version, "served": True, "storage": True, "schema": schema}]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "scope": "Cluster", "names": names, "versions": served},
    }


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane) -> ControlPlane:
    """The control plane with the kinds that monitors, rules and OpenShift need."""
    api = client.ApiextensionsV1Api(plane.api)
    crds = [read_crd(path) for path in prometheus_operator_crds().glob("*.yaml")]
    for crd in (*(free_crd(*other) for other in OTHERS), *crds):
        api.create_custom_resource_definition(crd)
    wait_for(
        lambda: all(
            any(each.type == "Established" and each.status == "True" for each in crd.status.conditions or ())
            for crd in api.list_custom_resource_definition().items
        ),
        "the CRDs",
    )
    for name in ("gpu-exporter", "monitoring"):
        plane.core.create_namespace({"metadata": {"name": name}})
    return plane


@pytest.fixture
def helm(tmp_path: Path, cluster: ControlPlane) -> Helm:
    return Helm(tmp_path, cluster.admin)


def kubectl(cluster: ControlPlane, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(program("kubectl")), f"--kubeconfig={cluster.admin}", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=120)


def plain(values: Path) -> str:
    """What `make manifests` writes for a site without Helm: no hook."""
    output = values.with_name("manifests.yaml")
    assert manifests.main([f"--values={values}", f"--output={output}"]) == 0
    return output.read_text("utf-8")


@pytest.fixture
def removed(cluster: ControlPlane) -> Iterator[None]:
    yield
    left = ours(cluster)
    for kind, namespace, name in left:
        kubectl(cluster, "delete", kind, name, *([f"--namespace={namespace}"] if namespace else []), "--wait=false")
    wait_for(lambda: not ours(cluster), "the objects to be gone")


def ours(cluster: ControlPlane) -> list[tuple[str, str, str]]:
    """Resource, namespace and name of every object of a release in the cluster, also Helm's own Secrets."""
    resources = kubectl(cluster, "api-resources", "--verbs=list,delete", "--output=name").stdout.split()
    found: set[tuple[str, str, str]] = set()
    for kinds, selector in (
        (",".join(resources), "app.kubernetes.io/name=gpu-exporter"),
        ("secrets", f"name={RELEASE},owner=helm"),
    ):
        done = kubectl(cluster, "get", kinds, "--all-namespaces", f"--selector={selector}", "--output=json")
        assert done.returncode == 0, done.stderr
        for each in json.loads(done.stdout)["items"]:
            about = each["metadata"]
            if not about.get("ownerReferences"):
                found.add((each["kind"], about.get("namespace", ""), about["name"]))
    return sorted(found)


@pytest.mark.parametrize("case", CASES)
def test_plain_manifests_are_applied_twice_and_the_second_time_changes_nothing(
    cluster: ControlPlane, helm: Helm, removed: None, case: str
) -> None:
    values = helm.write_values(CASES[case])
    text = plain(values)
    assert text == plain(values), "two renders differ"
    assert "helm.sh/hook" not in text
    assert not [each for each in yaml.safe_load_all(text) if each and each["metadata"]["name"].endswith("-cleanup")]
    tried = kubectl(cluster, "apply", "--dry-run=server", "--validate=strict", "-f", "-", text=text)
    assert tried.returncode == 0, tried.stderr
    assert "Warning" not in tried.stderr, tried.stderr
    done = kubectl(cluster, "apply", "-f", "-", text=text)
    assert done.returncode == 0, done.stderr
    assert {line.rsplit(" ", 1)[1] for line in done.stdout.splitlines()} == {"created"}
    # And the rest: a pod of a test needs its account, which Helm makes first.
    hooks = helm.run("template", "gpu-exporter", CHART, "--namespace=gpu-exporter", "--values", values).stdout
    for each in yaml.safe_load_all(hooks):
        if each and each["kind"] == "ServiceAccount" and "test" in each["metadata"]["name"]:
            assert kubectl(cluster, "apply", "-f", "-", text=yaml.safe_dump(each)).returncode == 0
    checked = kubectl(cluster, "apply", "--dry-run=server", "--validate=strict", "-f", "-", text=hooks)
    assert (checked.returncode, "Warning" in checked.stderr) == (0, False), checked.stderr
    differs = kubectl(cluster, "diff", "-f", "-", text=text)
    assert differs.returncode == 0, differs.stdout
    again = kubectl(cluster, "apply", "-f", "-", text=text)
    assert again.returncode == 0, again.stderr
    # The client cannot see that some lists, such as relabelings, differ only by defaults of the server.
    changed = [line for line in again.stdout.splitlines() if not line.endswith(" unchanged")]
    assert case == "everything" or not changed


def test_the_prometheus_operators_api_accepts_the_alertmanager_configuration(cluster: ControlPlane) -> None:
    path = ROOT / "alerts" / "alertmanager" / "alertmanagerconfig.yaml"
    text = path.read_text("utf-8")
    tried = kubectl(
        cluster, "apply", "--dry-run=server", "--validate=strict", "--namespace=monitoring", "-f", "-", text=text
    )
    assert tried.returncode == 0, tried.stderr
    crd = read_crd(prometheus_operator_crds() / "alertmanagerconfigs.yaml")
    (version,) = [each for each in crd["spec"]["versions"] if each["name"] == "v1alpha1"]
    schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["route"]
    root = yaml.safe_load(text)["spec"]["route"]
    for child in root["routes"]:  # the server does not look into child routes, but the operator does
        jsonschema.validate(child, {**schema, "additionalProperties": False})
        assert not child.keys() & {"routes"}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_case_fits_the_schemas_of_older_kubernetes(version: str, helm: Helm, tmp_path: Path) -> None:
    folder = tmp_path / "schemas"
    folder.mkdir()
    schemas = write_schemas(read_recorded(version), prometheus_operator_crds(), folder)
    text = "\n---\n".join(helm.template(values).stdout for values in CASES.values())
    kinds = [f"kind: {other[3]}\n" for other in OTHERS]
    text = "\n---\n".join(each for each in text.split("\n---\n") if not any(kind in each for kind in kinds))
    done = conform(schemas, text)
    assert done.returncode == 0, done.stdout
    assert "Invalid: 0, Errors: 0, Skipped: 0" in done.stdout


def test_values_of_the_first_chart_are_kept_in_an_upgrade_and_what_they_lack_has_defaults(
    cluster: ControlPlane, helm: Helm, removed: None
) -> None:
    """Also immutable fields: the selectors of that chart."""
    given = {"agent": {"port": 9999, "nodeSelector": {"a": "b"}}, "reconciler": {"apply": True}}
    where = ("--namespace=gpu-exporter", "--kube-version=1.36")
    helm.run("install", RELEASE, OLD, where[0], "--values", helm.write_values(given))
    helm.run("upgrade", RELEASE, CHART, where[0], "--reuse-values", "--set", "reconciler.removeLabels=false")
    kept = json.loads(helm.run("get", "values", RELEASE, where[0], "--output=json").stdout)
    assert kept["agent"] == given["agent"]
    objects = [each for each in yaml.safe_load_all(helm.run("get", "manifest", RELEASE, where[0]).stdout) if each]
    assert json.loads(helm.run("get", "hooks", RELEASE, where[0]).stdout or "null") is None
    agent = find(objects, "DaemonSet")["spec"]
    assert agent["template"]["spec"]["nodeSelector"] == {"a": "b", "kubernetes.io/os": "linux"}
    assert agent["template"]["spec"]["containers"][0]["ports"] == [{"name": "metrics", "containerPort": 9999}]
    assert agent["template"]["spec"]["containers"][0]["livenessProbe"]["periodSeconds"] == 20
    helm.run("rollback", RELEASE, "1", where[0], "--no-hooks")
    helm.run("uninstall", RELEASE, where[0], "--no-hooks")
    assert ours(cluster) == []


def hooks_of(helm: Helm) -> dict[str, str]:
    """Kind of each hook of the release, and when it runs."""
    text = helm.run("get", "hooks", RELEASE, "--namespace=gpu-exporter").stdout
    return {each["kind"]: each["metadata"]["annotations"]["helm.sh/hook"] for each in yaml.safe_load_all(text) if each}


def test_labels_are_removed_where_apply_was_on_and_a_dry_run_has_no_hook(
    cluster: ControlPlane, helm: Helm, removed: None
) -> None:
    where = ("--namespace=gpu-exporter", "--no-hooks")
    kinds = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "Job")
    dry, apply = {"reconciler": {"apply": False}}, {"reconciler": {"apply": True}}
    helm.run("install", RELEASE, CHART, *where, "--values", helm.write_values(dry))
    assert hooks_of(helm) == {}
    helm.run("upgrade", RELEASE, CHART, *where, "--values", helm.write_values(apply))
    assert hooks_of(helm) == dict.fromkeys(kinds, "post-delete")
    off = {"reconciler": {"enabled": False}}
    for values in (dry, off):
        helm.run("upgrade", RELEASE, CHART, *where, "--values", helm.write_values(values))
        assert hooks_of(helm) == dict.fromkeys(kinds, "post-upgrade")
        helm.run("upgrade", RELEASE, CHART, *where, "--values", helm.write_values(values))
        assert hooks_of(helm) == {}, "the labels were removed by the upgrade before"
        helm.run("upgrade", RELEASE, CHART, *where, "--values", helm.write_values(apply))
    helm.run("uninstall", RELEASE, *where)
    assert ours(cluster) == []


def test_a_dry_run_from_the_package_is_uninstalled_at_once_though_its_image_cannot_be_pulled(
    cluster: ControlPlane, helm: Helm, removed: None, tmp_path: Path
) -> None:
    helm.run("package", CHART, "--destination", tmp_path)
    (package,) = tmp_path.glob("gpu-exporter-*.tgz")
    helm.run("install", RELEASE, package, "--namespace=gpu-exporter")
    began = time.monotonic()
    helm.run("uninstall", RELEASE, "--namespace=gpu-exporter", "--wait", "--timeout=60s")
    assert time.monotonic() - began < 55.0, "no hook was waited for"
    assert ours(cluster) == []


def test_with_apply_on_and_an_image_that_cannot_be_pulled_uninstall_names_the_job_and_leaves_only_the_labels(
    cluster: ControlPlane, helm: Helm, removed: None
) -> None:
    """The job gives up after two minutes, here after five seconds. No kubelet could run it, as without an image."""
    where = "--namespace=gpu-exporter"
    helm.run("install", RELEASE, CHART, where, "--values", helm.write_values({"reconciler": {"apply": True}}))
    marked = {"metadata": {"name": "marked", "labels": {LABEL: "underused"}}, "spec": {"containers": [CONTAINER]}}
    cluster.core.create_namespaced_pod("gpu-exporter", marked)
    jobs, name = client.BatchV1Api(cluster.api), f"{RELEASE}-gpu-exporter-cleanup"

    def hurry() -> None:
        def find_job() -> bool:
            found = jobs.list_namespaced_job("gpu-exporter").items
            return [each.metadata.name for each in found if each.spec.active_deadline_seconds == 120] == [name]

        wait_for(find_job, "the job, with its two minutes")
        jobs.patch_namespaced_job(name, "gpu-exporter", {"spec": {"activeDeadlineSeconds": 5}})

    other = threading.Thread(target=hurry)
    other.start()
    done = helm.run("uninstall", RELEASE, where, check=False)
    other.join()
    assert done.returncode != 0
    assert name in done.stderr and "DeadlineExceeded" in done.stderr
    wait_for(lambda: ours(cluster) == [], "all objects of the release to be gone")
    assert cluster.core.read_namespaced_pod("marked", "gpu-exporter").metadata.labels == {LABEL: "underused"}
    cluster.core.delete_namespaced_pod("marked", "gpu-exporter", grace_period_seconds=0)


def test_without_a_cluster_as_for_argo_cd_no_hook_is_of_the_whole_cluster(helm: Helm) -> None:
    """Argo CD before 3.6 hangs at such a PostDelete hook: decision 35."""
    objects = helm.objects({"reconciler": {"apply": True}})
    annotated = [(each, each["metadata"].get("annotations", {})) for each in objects]
    hooks = [each for each, annotations in annotated if annotations.get("helm.sh/hook") == "post-delete"]
    assert hooks == [
        each for each, annotations in annotated if annotations.get("argocd.argoproj.io/hook") == "PostDelete"
    ]
    assert {each["kind"] for each in hooks} == {"ServiceAccount", "Role", "RoleBinding", "Job"}
    assert all(each["metadata"]["namespace"] for each in hooks)
    kept = [each for each, annotations in annotated if "argocd.argoproj.io/sync-options" in annotations]
    assert {each["kind"] for each in kept} == {"ClusterRole", "ClusterRoleBinding"}
    (job,) = [each for each in hooks if each["kind"] == "Job"]
    (binding,) = [each for each in kept if each["kind"] == "ClusterRoleBinding"]
    assert [each["name"] for each in binding["subjects"]] == [job["spec"]["template"]["spec"]["serviceAccountName"]]
