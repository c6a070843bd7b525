"""Objects and jobs of maximum size, at the memory limits of the chart.

These tests have to run after those of the other files, and by their name they do: they make this process large, and
Linux counts the memory of a process as the peak of each child that it starts.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from gpu_exporter.agent.attribution.slurm.collected import ANSWERS
from gpu_exporter.reconciler.decision.policy import LABEL
from tests.component.attacks.attack_bench import ORDER, probe_ms
from tests.component.pods_bench import Bench, metrics_of_an_idle_pod
from tests.testbed.cgroups import MemoryLimit
from tests.testbed.control_plane import ControlPlane
from tests.testbed.node import static_pod
from tests.testbed.pages import serve_page
from tests.testbed.processes import GPU_EXPORTER, Processes, fetch, free_port, wait_for


class Besieged:
    """A reconciler at the chart's limit of memory, in a cluster where a tenant has filled a namespace."""

    def __init__(self, processes: Processes, limit: MemoryLimit, bench: Bench, address: str) -> None:
        self.port = free_port()
        flags = ("--apply", "--interval=1s", f"--web.listen-address=127.0.0.1:{self.port}", "--no-slurm")
        access = (f"--source.exporter={address}", f"--kubernetes.kubeconfig={bench.plane.admin}")
        self.running = processes.start(limit.wrap([*GPU_EXPORTER, "reconcile", *access, *flags]), name="reconciler")

    def value(self, series: str) -> float | None:
        found = re.search(rf"^{re.escape(series)} (\S+)", fetch(f"http://127.0.0.1:{self.port}/metrics") or "", re.M)
        return float(found[1]) if found else None

    def last_success(self) -> float:
        assert self.running.process.poll() is None, self.running.log()
        return self.value("gpu_reconciler_last_success_timestamp_seconds") or 0.0

    def cycles(self, count: int) -> None:
        """Wait for this number of successful cycles."""
        for _ in range(count):
            before = self.last_success()
            wait_for(lambda before=before: self.last_success() > before or None, "a cycle that succeeds")


def fill(create: Callable[[str, dict[str, Any]], Any], namespace: str, bodies: Iterator[dict[str, Any]]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda body: create(namespace, body), bodies))


@pytest.mark.kubernetes
@pytest.mark.parametrize("limit", ["reconciler"], indirect=True)
def test_the_reconciler_survives_hundreds_of_forged_labels(
    processes: Processes, limit: MemoryLimit, seen: dict[str, str], plane: ControlPlane
) -> None:
    bench, count = Bench(plane, "labels"), 500
    uid = bench.run_pod("train", started_s_ago=20000.0)
    note = "x" * 250_000
    marked = {"labels": {LABEL: "underused"}, "annotations": {"note": note}}
    pods = (static_pod(f"p{i}", 1, **marked) for i in range(count))
    fill(
        plane.core.create_namespaced_pod,
        "labels",
        ({**each, "metadata": {**each["metadata"], "namespace": "labels"}} for each in pods),
    )
    with serve_page(lambda: metrics_of_an_idle_pod("labels", "train", uid)) as address:
        besieged = Besieged(processes, limit, bench, address)
        wait_for(lambda: bench.labels("train").get(LABEL) == "underused" or None, "the honest mark")
        besieged.cycles(3)
        # On a busy machine the list of a cycle may reach its limit of time.
        foreign = wait_for(lambda: besieged.value("gpu_reconciler_foreign_marks") == count and count, "all marks")
    assert bench.labels("p7").get(LABEL) == "underused", "left alone"
    seen[ORDER[19]] = (
        f"peak {limit.peak_mib():.0f} of {limit.limit / 2**20:.0f} MiB; {foreign} labels that the reconciler did not set "
        "are counted and remain; another pod is marked; every cycle succeeds"
    )
    plane.core.delete_collection_namespaced_pod("labels", grace_period_seconds=0)


@pytest.mark.kubernetes
@pytest.mark.parametrize("limit", ["reconciler"], indirect=True)
def test_the_reconciler_survives_objects_of_maximum_size(
    processes: Processes, limit: MemoryLimit, seen: dict[str, str], plane: ControlPlane
) -> None:
    bench, namespace = Bench(plane, "large"), "large"
    uid = bench.run_pod("train", started_s_ago=20000.0, labels={"app": "mine"})
    note = {"note": "x" * 250_000}
    job_spec = {"parallelism": 0, "template": {"spec": {"restartPolicy": "Never", "containers": [
        {"name": "x", "image": "x", "args": ["y" * 1_100_000]}
    ]}}}  # fmt: skip
    batch = client.BatchV1Api(plane.api)
    fill(
        batch.create_namespaced_job,
        namespace,
        ({"metadata": {"name": f"j{i}", "annotations": note}, "spec": job_spec} for i in range(40)),
    )
    owners = [batch.read_namespaced_job(f"j{i}", namespace).metadata.uid for i in range(40)]

    def pod(at: int) -> dict[str, Any]:
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": f"j{at % 40}",
            "uid": owners[at % 40],
            "controller": True,
        }
        made = static_pod(f"p{at}", 1, annotations=note, ownerReferences=[owner])
        made["metadata"]["namespace"] = namespace
        # The API server writes "<" as six characters in JSON, so some of the objects are too large to be read.
        made["spec"]["containers"][0]["args"] = [("<" if at % 5 == 0 else "z") * 1_100_000]
        return made

    fill(plane.core.create_namespaced_pod, namespace, (pod(i) for i in range(50)))
    fill(plane.core.create_namespaced_service, namespace, (
        {"metadata": {"name": f"s{i}", "annotations": note}, "spec": {"selector": {"app": f"a{i}"}, "ports": [{"port": 1}]}}
        for i in range(50)
    ))  # fmt: skip
    slices = client.DiscoveryV1Api(plane.api).create_namespaced_endpoint_slice
    fill(slices, namespace, (
        {"metadata": {"name": f"e{i}", "annotations": note, "labels": {"kubernetes.io/service-name": f"s{i}"}},
         "addressType": "IPv4", "ports": [], "endpoints": [
            {"addresses": [f"10.{i}.{n // 250}.{n % 250 + 1}"], "targetRef": {"kind": "Pod", "name": "q" * 200, "uid": "u" * 30}}
            for n in range(1000)
        ]}
        for i in range(50)
    ))  # fmt: skip
    scalers = client.AutoscalingV2Api(plane.api).create_namespaced_horizontal_pod_autoscaler
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "none"}
    fill(scalers, namespace, (
        {"metadata": {"name": f"h{i}", "annotations": note}, "spec": {"maxReplicas": 2, "scaleTargetRef": target}} for i in range(50)
    ))  # fmt: skip
    with serve_page(lambda: metrics_of_an_idle_pod(namespace, "train", uid)) as address:
        besieged = Besieged(processes, limit, bench, address)
        wait_for(lambda: bench.labels("train").get(LABEL) == "underused" or None, "the honest mark")
        besieged.cycles(3)
        began = time.monotonic()
        assert besieged.last_success() > 0.0
        assert (besieged.value('gpu_reconciler_odd_objects_total{kind="Pod",reason="size"}') or 0.0) >= 10
        answered = 1e3 * (time.monotonic() - began)
    seen[ORDER[20]] = (
        f"peak {limit.peak_mib():.0f} of {limit.limit / 2**20:.0f} MiB; another pod is marked; every cycle succeeds; metrics "
        f"answer in {answered:.0f} ms"
    )


@pytest.mark.parametrize("limit", ["reconciler"], indirect=True)
def test_a_collector_survives_8000_long_jobs(
    processes: Processes, limit: MemoryLimit, seen: dict[str, str], tmp_path: Path
) -> None:
    row = {
        "job_state": ["RUNNING"], "nodes": "n0", "gres_detail": ["gpu:1(IDX:0)"], "user_name": "ada", "account": "phys",
        "partition": "gpu", "name": "x" * 1_000, "comment": "\u001b[2J" + "y" * 1_000, "start_time": {"set": True, "number": 7},
    }  # fmt: skip
    jobs = json.dumps({"jobs": [{"job_id": i + 1, **row} for i in range(8_000)], "errors": []})
    node = "NodeName=n0 Arch=x\n   Gres=gpu:h100:1\n   GresUsed=gpu:h100:1(IDX:0)\n   SlurmdStartTime=1\n"
    (tmp_path / "jobs.json").write_text(jobs)
    (tmp_path / "node.txt").write_text(node)
    (tmp_path / "config.txt").write_text(
        "ClusterName = lab\nSLURM_CONF = /etc/slurm/slurm.conf\nSlurmdSpoolDir = /x\nPrivateData = none\n"
    )
    places = {name: tmp_path / name for name in ("squeue", "scontrol")}
    places["squeue"].write_text(f"#!/bin/sh\nexec cat {tmp_path}/jobs.json\n")
    places["scontrol"].write_text(
        f"#!/bin/sh\ncase $2 in config) exec cat {tmp_path}/config.txt;; *) exec cat {tmp_path}/node.txt;; esac\n"
    )
    for place in places.values():
        place.chmod(0o755)
    port = free_port()
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [*GPU_EXPORTER, "slurm-collector", f"--web.listen-address=127.0.0.1:{port}", "--interval=1s"]
    running = processes.start(limit.wrap(command), environment=environment, name="collector")

    def rounds() -> float:
        assert running.process.poll() is None, running.log()
        found = re.search(r'rounds_total\{result="success"\} (\S+)', fetch(f"http://127.0.0.1:{port}/metrics") or "")
        return float(found[1]) if found else 0.0

    wait_for(lambda: rounds() >= 2 or None, "two rounds")
    assert fetch(f"http://127.0.0.1:{port}{ANSWERS}n0")
    slowest = probe_ms(port)
    seen[ORDER[21]] = (
        f"peak {limit.peak_mib():.0f} of {limit.limit / 2**20:.0f} MiB for an answer of {len(jobs) / 2**20:.0f} MiB; "
        f"probes take {slowest:.0f} ms meanwhile"
    )
