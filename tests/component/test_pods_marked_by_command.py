"""The command `reconcile`: dry run, --apply, --remove-all, and targets that are unavailable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kubernetes import client

from gpu_exporter.reconciler.decision.policy import LABEL
from tests.component.pods_bench import Bench, metrics_of_an_idle_pod
from tests.testbed.chart import Helm
from tests.testbed.pages import serve_page
from tests.testbed.processes import run_exporter, wait_for

pytestmark = pytest.mark.kubernetes


def test_the_command_writes_only_with_apply_audits_and_removes_all_marks(bench: Bench, tmp_path: Path) -> None:
    uid = bench.run_pod("train", started_s_ago=20000.0)
    access = (f"--kubernetes.kubeconfig={bench.plane.admin}", "--no-slurm")
    with serve_page(lambda: metrics_of_an_idle_pod(bench.namespace, "train", uid)) as address:
        command = ("reconcile", "--once", f"--source.exporter={address}", *access)
        done = run_exporter(*command)
        assert (done.returncode, LABEL in bench.labels("train")) == (0, False), done.stderr
        assert f"{LABEL}=underused" in done.stdout
        done = run_exporter(*command, "--apply")
        assert (done.returncode, bench.labels("train").get(LABEL)) == (0, "underused"), done.stderr
        assert "marked underused: its one GPU idle for 3.0 h" in done.stderr
        command = ("reconcile", f"--source.exporter={address}", *access)
        audit = f"--audit.file={tmp_path / 'audit.jsonl'}"
        bench.plane.core.patch_namespaced_pod("train", bench.namespace, {"metadata": {"labels": {LABEL: None}}})
        done = run_exporter(*command, "--once", "--apply", audit)
        assert (done.returncode, bench.labels("train").get(LABEL)) == (0, "underused"), done.stderr
        past = "Z marked underused: its one GPU idle for 3.0 h (1 of 1 GPUs seen)\n"
        done = run_exporter("explain", f"{bench.namespace}/train", *command[1:], audit)
        assert done.returncode == 0 and past in done.stdout and "idle run" in done.stdout, done.stdout
    with serve_page(lambda: metrics_of_an_idle_pod(bench.namespace, "another", uid)) as address:
        command = ("explain", f"--source.exporter={address}", *access, audit)
        done = run_exporter(*command, f"{bench.namespace}/train")
        assert done.stdout.startswith(
            f"{bench.namespace}/train: not in the evidence. Earlier marks of this holder:\n  20"
        ), done.stderr
        assert past in done.stdout
        assert run_exporter(*command, f"{bench.namespace}/absent").returncode == 2
        done = run_exporter(*command)
        assert (
            done.returncode == 2
            and "name a holder: NAMESPACE/POD, POD, job/ID, the UUID of its GPU, or NODE:INDEX" in done.stderr
        )
    remove = ("reconcile", "--remove-all", *access)
    done = run_exporter(*remove)
    assert done.stdout == f"{bench.namespace}/train: underused: would be withdrawn with --apply\n", done.stderr
    assert LABEL in bench.labels("train")
    done = run_exporter(*remove, "--apply")
    assert done.stdout == f"{bench.namespace}/train: underused: withdrawn\n", done.stderr
    assert bench.annotations("train") == {} and LABEL not in bench.labels("train")
    assert bench.events("train")[-1] == ("GpuMarkWithdrawn", "all marks are removed")
    bench.plane.core.patch_namespaced_pod("train", bench.namespace, {"metadata": {"labels": {LABEL: "underused"}}})
    done = run_exporter(*remove, "--apply")
    assert done.stdout == f"{bench.namespace}/train: underused: withdrawn\n", "a label without our annotations"
    assert LABEL not in bench.labels("train")


def test_the_dry_run_shows_what_apply_would_refuse(bench: Bench, tmp_path: Path) -> None:
    """Checks the table, JSON and --explain, with the rights of the chart's dry run."""
    pages = []
    for name, metadata in (("train", {}), ("other", {"labels": {LABEL: "mine"}})):
        uid = bench.run_pod(name, started_s_ago=20000.0, **metadata)
        pages.append(metrics_of_an_idle_pod(bench.namespace, name, uid))
    reader = bench.plane.authority.kubeconfig("reader", bench.plane.url, "reader")
    rbac = client.RbacAuthorizationV1Api(bench.plane.api)
    (role,) = (
        each
        for each in Helm(tmp_path).objects({})
        if each["kind"] == "ClusterRole" and each["metadata"]["name"].endswith("-reconciler")
    )
    role = {"metadata": {"name": "pod-reader"}, "rules": role["rules"]}
    with serve_page(lambda: "".join(pages)) as address:
        command = ("reconcile", "--once", f"--source.exporter={address}", "--no-slurm")
        allowed = (*command, f"--kubernetes.kubeconfig={reader}")
        done = run_exporter(*allowed)
        assert (done.returncode, LABEL in done.stdout) == (4, False), "what surrounds pods is not known"
        assert (
            f"the evidence is incomplete: the pods of namespace {bench.namespace} and their owners cannot be read: "
            in done.stderr
        )
        assert "status 403" in done.stderr
        rbac.create_cluster_role(role)
        subject = {"kind": "User", "name": "reader", "apiGroup": "rbac.authorization.k8s.io"}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "pod-reader"}
        rbac.create_cluster_role_binding(
            {"metadata": {"name": "pod-reader"}, "roleRef": reference, "subjects": [subject]}
        )
        wait_for(lambda: "REFUSED" in run_exporter(*allowed).stdout, "the rights to count", each_s=0.2)
        done = run_exporter(*allowed)
        rows = {line.split()[0]: line for line in done.stdout.splitlines()}
        assert rows[f"{bench.namespace}/other"].endswith("REFUSED: foreign"), done.stdout
        assert rows[f"{bench.namespace}/train"].endswith(f"{LABEL}=underused")
        assert done.stderr == ""
        rows = {row["name"]: row for row in json.loads(run_exporter(*allowed, "--format=json").stdout)["holders"]}
        assert (rows["other"]["refused"], rows["train"]["refused"]) == ("foreign", "")
        done = run_exporter("explain", f"{bench.namespace}/other", *[each for each in allowed[1:] if each != "--once"])
        assert f"  REFUSED: foreign: {LABEL} has a value that the reconciler never sets\n" in done.stdout
        done = run_exporter(*command, "--no-kubernetes")
        assert done.stderr.count("cannot connect to the API server") == 1
        assert "REFUSED" not in done.stdout
    assert (bench.labels("other"), bench.labels("train")) == ({LABEL: "mine"}, {})


def test_gpus_of_a_sites_own_resource_are_counted_if_the_resource_is_named(bench: Bench) -> None:
    uid = bench.run_pod("train", started_s_ago=20000.0, resource="example.com/h100")
    page = metrics_of_an_idle_pod(bench.namespace, "train", uid)
    named = r"--attribution.resource=example\.com/h100"
    with serve_page(lambda: page) as address:
        access = (f"--kubernetes.kubeconfig={bench.plane.admin}", "--no-slurm")
        command = ("reconcile", "--once", f"--source.exporter={address}", *access)
        assert "REFUSED: gpus" in run_exporter(*command).stdout
        done = run_exporter(*command, "--apply")
        assert "not marked underused: the pod requests 0 GPUs, but exporters report 1 for it" in done.stderr
        assert LABEL not in bench.labels("train")
        assert "REFUSED" not in run_exporter(*command, named).stdout
        done = run_exporter(*command, named, "--apply")
        assert (done.returncode, bench.labels("train").get(LABEL)) == (0, "underused"), done.stderr


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--apply", "--no-kubernetes", "--no-slurm"), "--apply needs access to Kubernetes or Slurm"),
        (("--apply", "--kubernetes", "--no-slurm"), "cannot connect to the API server: "),
        (("--apply", "--kubernetes.kubeconfig=/nowhere", "--no-slurm"), "cannot connect to the API server: "),
        (("--kubernetes.kubeconfig=/nowhere", "--no-slurm"), "cannot connect to the API server: "),
    ],
)
def test_a_requested_target_that_is_unavailable_is_reported(flags: tuple[str, ...], complaint: str) -> None:
    done = run_exporter("reconcile", "--once", "--source.exporter=127.0.0.1:1", *flags)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
