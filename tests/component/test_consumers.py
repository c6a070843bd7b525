"""Consumers of marks: the real descheduler with the example policy, and real kubectl, on a real API server."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

import gpu_exporter
from gpu_exporter.reconciler.decision.policy import LABEL
from gpu_exporter.reconciler.evidence.records import EVIDENCE_S, PublishedCause
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.marker import PodMarker
from tests.component.test_surroundings import BUSY_S, IDLE_S, Site
from tests.testbed.control_plane import ControlPlane
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.node import program
from tests.testbed.processes import Processes, free_port, wait_for

pytestmark = pytest.mark.kubernetes
CONTRIB = Path(gpu_exporter.__file__).parent / "contrib" / "kubernetes"
NODES = ("gpu-a", "gpu-b")  # the descheduler does nothing with fewer than two nodes
WARNED_S = 2  # instead of half an hour


class Consumed(Site):
    """A namespace whose pods get the condition that consumers read."""

    node = NODES[0]

    def restart(self) -> None:
        api = Api(ControlPlane.connect(self.plane.admin))
        self.marker = PodMarker(api, self.policy, self.clock, sets_condition=True, resources=GPU_RESOURCES)
        super(Site, self).restart()

    def evicted(self) -> list[str]:
        """Pods that are being deleted. They remain because there is no kubelet here."""
        found = self.plane.core.list_namespaced_pod(self.namespace).items
        return sorted(pod.metadata.name for pod in found if pod.metadata.deletion_timestamp is not None)

    def cycle_through(self, rounds: Callable[[], int]) -> None:
        """Run cycles during three rounds of the descheduler. The first round may have begun earlier."""
        wanted = rounds() + 3

        def cycle() -> bool:
            self.run()
            return rounds() >= wanted

        wait_for(cycle, "three rounds of the descheduler", each_s=0.2)


def write_nodes(plane: ControlPlane) -> None:
    """Two nodes as their kubelets would write them, ready until the controller manager marks them as not ready."""
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
    for name in NODES:
        plane.core.create_node({"metadata": {"name": name}})
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        condition = {**ready, "lastHeartbeatTime": now, "lastTransitionTime": now}
        room = {"pods": "110", "cpu": "64", "memory": "1Ti", "nvidia.com/gpu": "8"}
        status = {"conditions": [condition], "capacity": room, "allocatable": room}
        plane.core.patch_node_status(name, {"status": status})


@pytest.fixture
def site(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[Consumed]:
    made = Consumed(plane, request.node.name.replace("_", "-").removeprefix("test-")[:40].strip("-"))
    write_nodes(plane)
    yield made
    client.BatchV1Api(plane.api).delete_collection_namespaced_job(made.namespace, propagation_policy="Background")
    client.AppsV1Api(plane.api).delete_collection_namespaced_deployment(made.namespace)
    plane.core.delete_collection_namespaced_pod(made.namespace, grace_period_seconds=0)
    for name in NODES:
        plane.core.delete_node(name)


def example(**lifetime: Any) -> dict[str, Any]:
    """The example with shorter times, and otherwise unchanged."""
    policy: dict[str, Any] = yaml.safe_load((CONTRIB / "descheduler.yaml").read_text("utf-8"))
    evictor, lifetimes = (each["args"] for each in policy["profiles"][0]["pluginConfig"])
    assert (evictor["minPodAge"], lifetimes["conditions"][0]["minTimeSinceLastTransitionSeconds"]) == ("1h", 1800)
    del evictor["minPodAge"]  # it is read from a status that only kubelets write
    lifetimes["conditions"][0]["minTimeSinceLastTransitionSeconds"] = WARNED_S
    return policy


def test_a_descheduler_evicts_exactly_the_marked_pods_and_none_during_a_brake(site: Consumed, tmp_path: Path) -> None:
    policy = tmp_path / "descheduler.yaml"
    policy.write_text(yaml.safe_dump(example()), "utf-8")
    idle, half, web = site.job("idle", 2), site.job("half", 2), site.deployment("web", 1)
    kept = site.job("kept", 1)
    site.annotate("job", "kept", exempt_until=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 3600)))
    site.set_run(half[0], BUSY_S)
    with Processes(tmp_path) as processes:
        flags = [f"--kubeconfig={site.plane.admin}", f"--policy-config-file={policy}", "--descheduling-interval=1s"]
        ports = [f"--secure-port={free_port()}", "--bind-address=127.0.0.1", "-v=2"]
        running = processes.start([program("descheduler"), *flags, *ports])

        def rounds() -> int:
            return running.log().count("Number of evictions/requests")

        wait_for(lambda: rounds() > 0, "the first round of the descheduler")
        site.source.answers = False  # Prometheus is down
        site.cycle_through(rounds)
        assert site.evicted() == []
        site.source.answers = True
        runs = dict(site.source.pods)
        for name, (uid, _) in runs.items():  # every GPU is unknown
            site.source.pods[name] = (uid, float("nan"))
        site.cycle_through(rounds)
        assert site.evicted() == []
        site.source.pods = runs
        site.run()
        labels = {name: site.labels(name).get(LABEL) for name in (*idle, *half, *web, *kept)}
        assert labels == {
            **dict.fromkeys(idle, "underused"),
            half[0]: None,
            half[1]: "partial",
            web[0]: "underused",
            kept[0]: None,
        }
        wait_for(lambda: site.evicted() == idle, "the eviction of the idle job's pods", each_s=0.2)
        site.cycle_through(rounds)
        assert site.evicted() == idle, "a ReplicaSet's pod, a busy gang and one that asked to stay are not touched"


def test_a_pod_that_works_again_during_its_warning_is_not_evicted(site: Consumed, tmp_path: Path) -> None:
    policy = tmp_path / "descheduler.yaml"
    policy.write_text(yaml.safe_dump(example()), "utf-8")
    (pod,) = site.job("train", 1)
    with Processes(tmp_path) as processes:
        flags = [f"--kubeconfig={site.plane.admin}", f"--policy-config-file={policy}", "--descheduling-interval=1s"]
        ports = [f"--secure-port={free_port()}", "--bind-address=127.0.0.1", "-v=2"]
        running = processes.start([program("descheduler"), *flags, *ports])

        def rounds() -> int:
            return running.log().count("Number of evictions/requests")

        wait_for(lambda: rounds() > 0, "the first round of the descheduler")
        for _ in range(3):  # idle, marked and working again, three times
            site.set_run(pod, IDLE_S)
            site.run()
            assert site.labels(pod)[LABEL] == "underused"
            site.set_run(pod, BUSY_S)
            site.run()
            assert LABEL not in site.labels(pod)
        site.cycle_through(rounds)
        assert site.evicted() == []


def typed(site: Consumed, *command: str) -> subprocess.CompletedProcess[str]:
    """A command as a user types it, with kubectl and the example scripts on PATH."""
    path = f"{program('kubectl').parent}:{CONTRIB}:{os.environ['PATH']}"
    environment = {"PATH": path, "KUBECONFIG": str(site.plane.admin), "HOME": "/nonexistent"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def kubectl(site: Consumed, *arguments: str) -> subprocess.CompletedProcess[str]:
    return typed(site, "kubectl", "gpu-idle", *arguments)


def test_kubectl_lists_explains_and_exempts_marked_pods(site: Consumed) -> None:
    pods = site.job("train", 2)
    site.source.causes = (PublishedCause("no_process", "high"),)
    site.run()
    done = kubectl(site, "-n", site.namespace)
    header, *rows = (line.split() for line in done.stdout.splitlines())
    assert header == ["NAMESPACE", "POD", "STAGE", "GPUS", "SINCE", "ACTS", "ON", "SEEN", "UNTIL"], done.stderr
    assert [row[:4] for row in rows] == [[site.namespace, pod, "underused", "1"] for pod in pods]
    assert {row[5] for row in rows} == {"batch/v1/Job/train"}
    forged = f"x\n{site.namespace}  forged  underused  8\t\x1b[2J\u202e"  # a user who may write the pod may write this
    owner = site.annotations(pods[1])["gpu-exporter.io/owner"]
    site.plane.core.patch_namespaced_pod(
        pods[1], site.namespace, {"metadata": {"annotations": {"gpu-exporter.io/owner": forged}}}
    )
    done = kubectl(site, "-n", site.namespace)
    assert len(done.stdout.splitlines()) == 3 and not {"\x1b", "\u202e", "\t"} & set(done.stdout), done.stdout
    done = kubectl(site, "why", pods[1], "-n", site.namespace)
    (line,) = [line for line in done.stdout.splitlines() if "forged" in line]
    assert line.startswith("owner: x\\n") and "\x1b" not in done.stdout
    site.plane.core.patch_namespaced_pod(
        pods[1], site.namespace, {"metadata": {"annotations": {"gpu-exporter.io/owner": owner}}}
    )
    done = kubectl(site, "why", pods[0], "-n", site.namespace)
    said = done.stdout.splitlines()
    assert said[0] == "stage: underused", done.stderr
    assert "evidence: its one GPU idle for 116 min, and so is the other member of batch/v1/Job/train" in said
    change = "to change: end the job if its work is done, or ask for a GPU only in the step that uses it"
    assert f"cause: nothing runs on the GPU (no_process, high confidence); {change}" in said, done.stdout
    assert any(line.split()[1:2] == ["GpuUnderused"] for line in said)
    for same in (
        ("-n", site.namespace, "why", pods[0]),
        (f"--namespace={site.namespace}", "why", f"pod/{pods[0]}"),
        ("why", "-n", site.namespace, f"pods/{pods[0]}"),
    ):
        assert kubectl(site, *same).stdout == done.stdout, same
    asked = kubectl(site, "keep", "-n", site.namespace, pods[0], "4h")
    assert asked.returncode == 0, asked.stderr
    until = site.annotations(pods[0])["gpu-exporter.io/exempt-until"]
    seconds = time.mktime(time.strptime(until, "%Y-%m-%dT%H:%M:%SZ")) - time.timezone - time.time()
    assert 4 * 3600 - 60 < seconds <= 4 * 3600
    site.clock.later += 2 * EVIDENCE_S + 60
    site.run()
    assert [line.split()[0] for line in kubectl(site, "-n", site.namespace).stdout.splitlines()] in ([], ["NAMESPACE"])
    assert kubectl(site, "why", pods[1], "-n", site.namespace).stdout.startswith(f"{pods[1]} carries no mark")
    for wrong in (
        ("keep", pods[0]),
        ("keep", pods[0], "4"),
        ("keep", pods[0], "-1h"),
        ("keep", pods[0], "1h30m"),
        ("keep", pods[0], "010m"),
        ("keep", pods[0], "0h"),
        ("keep", pods[0], "999999999999d"),
        ("why",),
        ("why", pods[0], pods[1]),
        ("why", f"job/{pods[0]}"),
        ("keep", pods[0], "4h", "more"),
        ("wy", pods[0]),
        ("why", pods[0], "-n"),
    ):
        done = kubectl(site, *wrong)
        assert (done.returncode, "kubectl gpu-idle keep POD DURATION" in done.stderr) == (2, True), wrong
    for asked_for in (("--help",), ("-h",), ("help",), ("why", "--help"), ("keep", pods[0], "-h")):
        done = kubectl(site, *asked_for)
        assert (done.returncode, done.stderr, "keep POD DURATION" in done.stdout) == (0, "", True), asked_for
