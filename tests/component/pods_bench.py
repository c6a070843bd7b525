"""A namespace whose pods a reconciler marks, with evidence that a test sets."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from gpu_exporter.common.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reconciler.cycle import ReconcileCycle
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.evidence.records import Evidence, HolderEvidence, HolderName, PublishedCause, UnitEvidence
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.marker import PodMarker
from gpu_exporter.reconciler.kubernetes.notice import CONDITION
from tests.testbed.clocks import StoppableClock
from tests.testbed.control_plane import ControlPlane
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.node import static_pod
from tests.testbed.processes import wait_for

POLICY = Policy()._replace(candidate_after=60.0, underused_after=120.0, startup_grace=1.0, unsupported_max=600.0)


class Tally:
    """Observer of a cycle."""

    def __init__(self) -> None:
        self.writes: list[str] = []
        self.skips: list[str] = []

    def count_write(self, result: str) -> None:
        self.writes.append(result)

    def count_skip(self, reason: str) -> None:
        self.skips.append(reason)


class Source:
    """Evidence that a test sets: idle run and UID by pod name."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.pods: dict[str, tuple[str, float]] = {}
        self.answers = True
        self.sharing: dict[HolderName, str] = {}
        self.causes: tuple[PublishedCause, ...] = ()
        self.clock: Clock = SYSTEM_CLOCK

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        if not self.answers:
            raise AnswerError("Prometheus is down")
        wall = self.clock.wall()
        holders = []
        for pod, (uid, run) in self.pods.items():
            unit = UnitEvidence("n", "0", "GPU-1", "", wall - 9000, run, 1.0, 1.0, 2, causes=self.causes)
            name = HolderName("kubernetes", self.namespace, pod)
            holders.append(HolderEvidence(name, "", (unit,), 1, frozenset({uid})))
        return Evidence(wall, tuple(holders), sharing=self.sharing)

    def read_holders(self, names: Collection[HolderName]) -> Evidence:
        evidence = self.read_evidence()
        return evidence._replace(holders=tuple(each for each in evidence.holders if each.name in names))


class Bench:
    """One namespace, one source, one cycle."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane, self.namespace = plane, namespace
        body = {"metadata": {"name": namespace}}
        plane.core.create_namespace(body)
        wait_for(lambda: plane.has_account(namespace), "the namespace's ServiceAccount")
        self.source, self.tally = Source(namespace), Tally()
        self.clock = StoppableClock()
        self.policy = POLICY
        self.mark_with(sets_condition=False)

    def mark_with(self, *, sets_condition: bool) -> None:
        """Continue as a new process with this setting."""
        api = Api(ControlPlane.connect(self.plane.admin))
        self.marker = PodMarker(
            api, self.policy, instance="test", sets_condition=sets_condition, resources=GPU_RESOURCES
        )
        self.restart()

    def restart(self) -> None:
        """Continue as a new process, which knows only the marks on the pods."""
        self.source.clock = self.clock
        self.cycle = ReconcileCycle(
            judge_of(self.source, [self.marker], Rulebook(self.policy)),
            [self.marker],
            self.policy,
            self.tally,
            self.clock,
        )

    def run_pod(
        self, name: str, started_s_ago: float = 9000.0, resource: str = "nvidia.com/gpu", **metadata: Any
    ) -> str:
        """A running pod with one GPU, with the status that a kubelet would write. Returns its UID."""
        pod = static_pod(name, 1, **metadata)
        pod["spec"]["containers"][0]["resources"] = {"limits": {resource: "1"}}
        pod["metadata"]["namespace"] = self.namespace
        uid = self.plane.create_pod(pod)
        self.set_running(name, started_s_ago)
        return uid

    def set_running(self, name: str, started_s_ago: float) -> None:
        """The status that a kubelet would write."""
        self.run_in(self.namespace, name, started_s_ago)

    def run_in(self, namespace: str, name: str, started_s_ago: float = 9000.0) -> None:
        """Start the same pod in another namespace."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - started_s_ago))
        containers = self.plane.pod(name, namespace)["spec"]["containers"]
        state = {
            "state": {"running": {"startedAt": moment}},
            "ready": True,
            "restartCount": 0,
            "image": "",
            "imageID": "",
        }
        statuses = [{"name": each["name"], **state} for each in containers]
        status = {"phase": "Running", "startTime": moment, "containerStatuses": statuses}
        self.plane.core.patch_namespaced_pod_status(name, namespace, {"status": status})

    def delete_pod(self, name: str) -> None:
        self.plane.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)

    def labels(self, name: str) -> dict[str, str]:
        return self.plane.pod(name, self.namespace)["metadata"].get("labels") or {}

    def annotations(self, name: str) -> dict[str, str]:
        return self.plane.pod(name, self.namespace)["metadata"].get("annotations") or {}

    def run(self) -> tuple[list[str], list[str]]:
        """Run one cycle. Returns the writes and the skips."""
        self.tally.writes.clear()
        self.tally.skips.clear()
        self.cycle.run()
        return list(self.tally.writes), list(self.tally.skips)

    def events(self, pod: str) -> list[tuple[str, str]]:
        return self.plane.events(self.namespace, pod)


def condition_of(bench: Bench, name: str) -> dict[str, Any]:
    """The reconciler's condition on a pod, {} if the pod has no such condition."""
    conditions = bench.plane.pod(name, bench.namespace)["status"].get("conditions") or ()
    return next((each for each in conditions if each["type"] == CONDITION), {})


def metrics_of_an_idle_pod(namespace: str, pod: str, uid: str) -> str:
    """The series of an exporter for a pod whose one GPU has been idle for three hours."""
    now = time.time()
    key = f'gpu="0",uuid="GPU-1",mig="",mig_uuid="",scheduler="kubernetes",namespace="{namespace}",pod="{pod}",container="train"'
    return (
        f'gpu_allocation_info{{{key},pod_uid="{uid}"}} 1\n'
        f"gpu_allocation_start_timestamp_seconds{{{key}}} {now - 20000:.0f}\n"
        f"gpu_allocation_idle_run_seconds{{{key}}} 10800\n"
        f"gpu_allocation_held_seconds_total{{{key}}} 20000\n"
        f"gpu_allocation_observed_seconds_total{{{key}}} 20000\n"
        f"gpu_allocation_holder_units{{{key}}} 1\n"
        f"gpu_allocation_idle_run_witnesses{{{key}}} 3\n"
        f"gpu_exporter_last_sample_timestamp_seconds {now:.0f}\n"
        "gpu_exporter_sample_interval_seconds 1\n"
    )
