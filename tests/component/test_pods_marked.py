"""Marks on pods of a real API server: set, renewed, withdrawn, refused."""

from __future__ import annotations

import calendar
import json
import re
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from gpu_exporter.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.defaults import Policy
from gpu_exporter.outside import parse_timestamp
from gpu_exporter.reconciler.cycle import ReconcileCycle
from gpu_exporter.reconciler.decision.policy import LABEL
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.evidence.records import Evidence, EvidenceError, HolderEvidence, HolderName, UnitEvidence
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.kubernetes.checks import EVIDENCE, GPUS, OBSERVED, SINCE
from gpu_exporter.reconciler.kubernetes.client.api import Api
from gpu_exporter.reconciler.kubernetes.marker import PodMarker
from gpu_exporter.reconciler.kubernetes.notice import CONDITION
from gpu_exporter.reconciler.marks import Mark, MarkError
from tests.testbed.chart import Helm
from tests.testbed.clocks import StoppableClock
from tests.testbed.control_plane import ControlPlane, start_control_plane
from tests.testbed.gpu_resources import GPU_RESOURCES
from tests.testbed.node import static_pod
from tests.testbed.pages import serve_page
from tests.testbed.processes import Processes, run_exporter, wait_for

pytestmark = pytest.mark.kubernetes
POLICY = Policy()._replace(candidate_after=60.0, underused_after=120.0, startup_grace=1.0, unsupported_max=600.0)


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    directory = tmp_path_factory.mktemp("control-plane")
    with Processes(directory) as processes, start_control_plane(processes, directory) as started:
        yield started


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
        self.clock: Clock = SYSTEM_CLOCK

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        if not self.answers:
            raise EvidenceError("Prometheus is down")
        wall = self.clock.wall()
        holders = []
        for pod, (uid, run) in self.pods.items():
            unit = UnitEvidence("n", "0", "GPU-1", "", wall - 9000, run, 1.0, 1.0, 2)
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
        wait_for(lambda: plane.has_account(namespace), "the namespace's ServiceAccount", 60)
        self.source, self.tally = Source(namespace), Tally()
        self.clock = StoppableClock()
        self.policy = POLICY
        self.mark_with(sets_condition=False)

    def mark_with(self, *, sets_condition: bool) -> None:
        """Continue as a new process with this setting."""
        api = Api(ControlPlane.connect(self.plane.admin))
        self.marker = PodMarker(api, POLICY, instance="test", sets_condition=sets_condition, resources=GPU_RESOURCES)
        self.restart()

    def restart(self) -> None:
        """Continue as a new process, which knows only the marks on the pods."""
        self.source.clock = self.clock
        self.cycle = ReconcileCycle(
            judge_of(self.source, [self.marker], Rulebook(self.policy), self.clock),
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


@pytest.fixture
def bench(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[Bench]:
    name = re.sub("[^a-z0-9]+", "-", request.node.name)
    name = f"{name[:40].strip('-')}-{name[-15:].strip('-')}"
    made = Bench(plane, name)
    yield made
    plane.core.delete_collection_namespaced_pod(name, grace_period_seconds=0)


def test_a_mark_is_set_grows_and_is_removed_at_the_first_activity(bench: Bench) -> None:
    uid = bench.run_pod("train", labels={"app": "mine"})
    bench.source.pods["train"] = (uid, 70.0)
    assert bench.run() == (["written"], [])
    assert bench.labels("train") == {"app": "mine", LABEL: "candidate"}
    version = bench.plane.pod("train", bench.namespace)["metadata"]["resourceVersion"]
    assert bench.run() == ([], [])
    assert bench.plane.pod("train", bench.namespace)["metadata"]["resourceVersion"] == version, "a write without a need"
    bench.source.pods["train"] = (uid, 130.0)
    before = time.time()
    assert bench.run() == (["written"], [])
    assert bench.labels("train")[LABEL] == "underused"
    annotations = bench.annotations("train")
    assert annotations[GPUS] == "1"
    assert annotations[EVIDENCE] == "its one GPU idle for 2 min"
    assert before - 131 <= seconds(annotations[SINCE]) <= time.time() - 129
    assert before - 1 <= seconds(annotations[OBSERVED]) <= time.time()
    bench.source.pods["train"] = (uid, 0.0)
    assert bench.run() == (["withdrawn"], [])
    assert bench.labels("train") == {"app": "mine"}
    assert bench.annotations("train") == {}
    reasons = [reason for reason, _ in bench.events("train")]
    assert reasons == ["GpuCandidate", "GpuUnderused", "GpuMarkWithdrawn"]
    assert bench.run() == ([], [])


def test_a_replaced_pod_of_the_same_name_gets_no_mark(bench: Bench) -> None:
    old = bench.run_pod("train-0")
    bench.source.pods["train-0"] = (old, 130.0)
    bench.run()
    bench.delete_pod("train-0")
    bench.run_pod("train-0")
    assert bench.run() == ([], ["replaced"])
    assert LABEL not in bench.labels("train-0")
    bench.delete_pod("train-0")
    assert bench.run() == ([], ["replaced"])


def test_a_patch_for_a_replaced_pod_is_counted_and_not_retried(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod is replaced between reading and writing: the server answers 422."""
    old = bench.run_pod("train-0")
    stale = bench.plane.pod("train-0", bench.namespace)
    bench.delete_pod("train-0")
    bench.run_pod("train-0")
    stale["metadata"]["resourceVersion"] = bench.plane.pod("train-0", bench.namespace)["metadata"]["resourceVersion"]
    monkeypatch.setattr(bench.marker, "_read", lambda name: stale)
    bench.source.pods["train-0"] = (old, 130.0)
    assert bench.run() == (["replaced"], [])
    monkeypatch.undo()
    assert LABEL not in bench.labels("train-0")
    with pytest.raises(MarkError, match="422.*field is immutable") as caught:
        bench.marker.withdraw(Mark(HolderName("kubernetes", bench.namespace, "train-0"), "underused", old), "", 0.0)
    assert caught.value.result == "replaced"


def test_a_pod_that_changed_since_it_was_read_is_marked_in_the_next_cycle(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = bench.run_pod("train")
    stale = bench.plane.pod("train", bench.namespace)
    bench.plane.core.patch_namespaced_pod("train", bench.namespace, {"metadata": {"labels": {"changed": "yes"}}})
    monkeypatch.setattr(bench.marker, "_read", lambda name: stale)
    bench.source.pods["train"] = (uid, 130.0)
    assert bench.run() == (["conflict"], [])
    monkeypatch.undo()
    assert bench.run() == (["written"], [])


def test_without_evidence_marks_remain_for_a_while_and_are_then_removed(bench: Bench) -> None:
    uid = bench.run_pod("train")
    bench.source.pods["train"] = (uid, 130.0)
    bench.run()
    bench.source.answers = False
    bench.clock.stopped = seconds(bench.annotations("train")[OBSERVED])
    bench.clock.ahead = 599.0
    assert bench.run() == ([], [])
    assert bench.labels("train")[LABEL] == "underused"
    bench.clock.ahead = 600.0
    assert bench.run() == (["withdrawn"], [])
    assert LABEL not in bench.labels("train")


def test_a_reconciler_that_restarts_often_still_removes_marks(bench: Bench) -> None:
    uid = bench.run_pod("train")
    bench.source.pods["train"] = (uid, 130.0)
    bench.run()
    bench.source.answers = False
    bench.clock.stopped = seconds(bench.annotations("train")[OBSERVED])
    done = []
    for bench.clock.ahead in range(60, 661, 60):
        bench.restart()
        done.append(bench.run()[0])
    assert done == [*[[]] * 9, ["withdrawn"], []]
    assert bench.labels("train") == {}


def test_the_reconciler_renews_the_evidence_on_a_pod_but_not_in_every_cycle(bench: Bench) -> None:
    uid = bench.run_pod("train", labels={"app": "mine"})
    bench.source.pods["train"] = (uid, 130.0)
    bench.run()
    first = bench.annotations("train")
    bench.clock.stopped = seconds(first[OBSERVED])
    written = []
    for bench.clock.ahead in range(0, 601, 30):
        bench.source.pods["train"] = (uid, 130.0 + bench.clock.ahead)
        bench.plane.core.patch_namespaced_pod(
            "train", bench.namespace, {"metadata": {"labels": {"n": str(bench.clock.ahead)}}}
        )
        written += bench.run()[0]
    assert written == ["renewed"] * 4  # every quarter of ten minutes, whatever else changed on the pod
    last = bench.annotations("train")
    assert last[EVIDENCE] == "its one GPU idle for 12 min"
    assert seconds(last[OBSERVED]) - seconds(first[OBSERVED]) == 600
    assert abs(seconds(last[SINCE]) - seconds(first[SINCE])) <= 2
    assert bench.labels("train") == {"app": "mine", "n": "600", LABEL: "underused"}
    assert [reason for reason, _ in bench.events("train")] == ["GpuUnderused"]


def test_a_renewal_does_not_overwrite_a_change_by_the_owner(bench: Bench) -> None:
    """The owner removes the mark and writes an annotation with the same name while the cycle reads its evidence."""
    uid = bench.run_pod("train")
    bench.source.pods["train"] = (uid, 130.0)
    assert bench.run() == (["written"], [])
    bench.clock.stopped = seconds(bench.annotations("train")[OBSERVED])
    bench.clock.ahead = 300.0
    read = bench.source.read_evidence

    def read_late(marked: Collection[HolderName] = ()) -> Evidence:
        change = {"labels": {LABEL: None}, "annotations": {EVIDENCE: "mine"}}
        bench.plane.core.patch_namespaced_pod("train", bench.namespace, {"metadata": change})
        return read(marked)

    bench.source.read_evidence = read_late  # type: ignore[method-assign]
    assert bench.run() == (["conflict"], [])
    assert bench.labels("train") == {}
    assert bench.annotations("train")[EVIDENCE] == "mine"


def test_a_pod_that_is_idle_from_its_start_becomes_underused_without_a_removal(bench: Bench) -> None:
    """The GPU was assigned 30 s before the container could start, because an image was pulled."""
    uid = bench.run_pod("train", started_s_ago=70.0)
    bench.clock.stopped = time.time()
    seen = []
    for bench.clock.ahead in (0.0, 40.0, 60.0):
        bench.source.pods["train"] = (uid, 100.0 + bench.clock.ahead)
        seen.append((bench.run(), bench.labels("train")[LABEL]))
    assert seen == [
        ((["written"], []), "candidate"),
        (([], ["restarted"]), "candidate"),
        ((["written"], []), "underused"),
    ]
    assert [reason for reason, _ in bench.events("train")] == ["GpuCandidate", "GpuUnderused"]


def condition_of(bench: Bench, name: str) -> dict[str, Any]:
    """The reconciler's condition on a pod, {} if the pod has no such condition."""
    conditions = bench.plane.pod(name, bench.namespace)["status"].get("conditions") or ()
    return next((each for each in conditions if each["type"] == CONDITION), {})


def test_underused_pods_have_a_condition_with_a_heartbeat(bench: Bench) -> None:
    """The heartbeat follows the evidence. The transition time and the conditions of other programs remain."""
    bench.mark_with(sets_condition=True)
    uid = bench.run_pod("train")
    others = {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    bench.plane.core.patch_namespaced_pod_status("train", bench.namespace, others)
    bench.source.pods["train"] = (uid, 70.0)
    assert bench.run() == (["written"], [])
    assert condition_of(bench, "train") == {}, "a candidate is a warning"
    bench.clock.stopped = time.time() // 1
    bench.source.pods["train"] = (uid, 130.0)
    assert bench.run() == (["written"], [])
    first = condition_of(bench, "train")
    assert (first["status"], first["reason"]) == ("True", "AllIdle")
    assert re.fullmatch(
        r"1 of 1 GPUs idle since [0-9-]+ [0-9:]+Z; to keep them: annotation gpu-exporter.io/exempt-until",
        first["message"],
    )
    assert (
        parse_timestamp(first["lastProbeTime"]) == parse_timestamp(first["lastTransitionTime"]) == bench.clock.stopped
    )
    bench.clock.ahead = 300.0
    bench.source.pods["train"] = (uid, 430.0)
    assert bench.run() == (["renewed"], [])
    later = condition_of(bench, "train")
    assert parse_timestamp(later["lastProbeTime"]) == bench.clock.stopped + 300
    assert later["lastTransitionTime"] == first["lastTransitionTime"]
    bench.source.pods["train"] = (uid, 0.0)
    assert bench.run() == (["withdrawn"], [])
    assert condition_of(bench, "train") == {}
    kept = bench.plane.pod("train", bench.namespace)["status"]["conditions"]
    assert [each["type"] for each in kept if each["type"] == "Ready"] == ["Ready"]


def test_a_missing_condition_is_added_and_a_leftover_is_removed_with_the_mark(bench: Bench) -> None:
    """The condition is enabled and then disabled while the mark remains."""
    uid = bench.run_pod("train")
    bench.source.pods["train"] = (uid, 130.0)
    bench.run()
    assert condition_of(bench, "train") == {}, "it is off by default"
    bench.clock.stopped = seconds(bench.annotations("train")[OBSERVED])
    bench.mark_with(sets_condition=True)
    bench.clock.ahead = 300.0
    assert bench.run() == (["renewed"], [])
    assert parse_timestamp(condition_of(bench, "train")["lastTransitionTime"]) == bench.clock.stopped + 300
    bench.mark_with(sets_condition=False)
    bench.source.pods["train"] = (uid, 0.0)
    assert bench.run() == (["withdrawn"], [])
    assert condition_of(bench, "train") == {}


def test_without_the_right_on_pod_status_labels_are_still_set_and_removed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    marked_meanwhile: list[bool] = []

    def refuse(*arguments: Any, **options: Any) -> None:
        marked_meanwhile.append(LABEL in bench.labels("train"))
        raise ApiException(status=403, reason="Forbidden")

    bench.mark_with(sets_condition=True)
    uid = bench.run_pod("train")
    bench.source.pods["train"] = (uid, 130.0)
    bench.run()
    monkeypatch.setattr(bench.marker.api.core, "patch_namespaced_pod_status", refuse)
    bench.source.pods["train"] = (uid, 0.0)
    assert bench.run() == (["withdrawn"], [])
    assert LABEL not in bench.labels("train") and condition_of(bench, "train")
    assert marked_meanwhile == [False], "a slow status would keep the label"
    bench.source.pods["train"] = (uid, 130.0)
    assert bench.run() == (["written"], [])
    assert bench.labels("train")[LABEL] == "underused"
    assert "needs `patch` on pods/status (chart: reconciler.condition)" in caplog.text


@pytest.mark.parametrize("silence", ["no answer", "no series", "unknown"])
@pytest.mark.parametrize("change", ["not_running", "terminating"])
def test_the_mark_of_a_pod_that_no_longer_runs_is_removed_at_once(bench: Bench, silence: str, change: str) -> None:
    uid = bench.run_pod("train", finalizers=["gpu-exporter.io/test"])
    bench.source.pods["train"] = (uid, 130.0)
    bench.run()
    bench.source.answers = silence != "no answer"
    bench.source.pods = {"train": (uid, float("nan"))} if silence == "unknown" else {}
    assert bench.run() == ([], [])
    if change == "terminating":
        bench.plane.core.delete_namespaced_pod("train", bench.namespace)
    else:
        state = {"name": "train", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "ready": False}
        status = {"containerStatuses": [{**state, "restartCount": 1, "image": "", "imageID": ""}]}
        bench.plane.core.patch_namespaced_pod_status("train", bench.namespace, {"status": status})
    assert bench.run() == (["withdrawn"], [])
    assert LABEL not in bench.labels("train")
    bench.plane.core.patch_namespaced_pod("train", bench.namespace, {"metadata": {"finalizers": None}})


def seconds(text: str) -> int:
    return calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%SZ"))


def test_a_new_reconciler_takes_over_existing_marks(bench: Bench) -> None:
    uid = bench.run_pod("train")
    bench.source.pods["train"] = (uid, 130.0)
    bench.run()
    bench.restart()
    assert bench.run() == ([], [])
    bench.source.pods["train"] = (uid, 0.0)
    assert bench.run() == (["withdrawn"], [])


def test_the_idle_time_of_a_container_starts_with_the_container(bench: Bench) -> None:
    uid = bench.run_pod("train", started_s_ago=100.0)
    bench.source.pods["train"] = (uid, 500.0)
    assert bench.run() == ([], ["restarted"])
    bench.source.pods["train"] = (uid, 70.0)
    assert bench.run() == (["written"], [])
    assert bench.labels("train")[LABEL] == "candidate"


def test_a_mark_is_removed_when_its_container_restarts(bench: Bench) -> None:
    uid = bench.run_pod("train")
    bench.source.pods["train"] = (uid, 500.0)
    bench.run()
    bench.set_running("train", started_s_ago=1.0)
    assert bench.run() == (["withdrawn"], [])
    assert LABEL not in bench.labels("train")


def test_the_mark_of_a_finished_pod_is_removed(bench: Bench) -> None:
    uid = bench.run_pod("train")
    bench.source.pods["train"] = (uid, 130.0)
    bench.run()
    bench.plane.core.patch_namespaced_pod_status("train", bench.namespace, {"status": {"phase": "Succeeded"}})
    assert bench.run()[0] == ["withdrawn"]
    assert LABEL not in bench.labels("train")


def test_a_label_with_a_foreign_value_is_left_alone(bench: Bench) -> None:
    uid = bench.run_pod("train", labels={LABEL: "mine"})
    bench.source.pods["train"] = (uid, 130.0)
    assert bench.run() == ([], ["foreign"])
    bench.source.pods.clear()
    assert bench.run() == ([], [])
    assert bench.labels("train") == {LABEL: "mine"}


def strip(bench: Bench, name: str) -> None:
    """Remove the annotations, as a tenant can on his own pod."""
    gone = dict.fromkeys(bench.annotations(name))
    bench.plane.core.patch_namespaced_pod(name, bench.namespace, {"metadata": {"annotations": gone}})
    assert bench.annotations(name) == {}


def test_a_mark_without_annotations_is_adopted_if_true_and_removed_if_not(bench: Bench) -> None:
    uid = bench.run_pod("train")
    bench.source.pods["train"] = (uid, 130.0)
    bench.run()
    strip(bench, "train")
    assert bench.run() == (["renewed"], [])
    assert set(bench.annotations("train")) == {SINCE, GPUS, EVIDENCE, OBSERVED}
    strip(bench, "train")
    bench.source.answers = False
    assert bench.run() == (["withdrawn"], [])
    assert bench.labels("train") == {}


def test_a_mark_with_evidence_from_the_future_is_still_removed(bench: Bench) -> None:
    uid = bench.run_pod("train")
    bench.source.pods["train"] = (uid, 130.0)
    bench.run()
    change = {"metadata": {"annotations": {OBSERVED: "2999-01-01T00:00:00Z"}}}
    bench.plane.core.patch_namespaced_pod("train", bench.namespace, change)
    assert bench.run() == (["renewed"], [])
    bench.plane.core.patch_namespaced_pod("train", bench.namespace, change)
    bench.source.answers = False
    assert bench.run() == (["withdrawn"], [])


def test_marks_per_cycle_are_limited_and_the_longest_idle_pods_come_first(bench: Bench) -> None:
    bench.policy = POLICY._replace(new_marks_max=1)
    bench.restart()
    for pod, run in (("a", 130.0), ("b", 500.0)):
        bench.source.pods[pod] = (bench.run_pod(pod), run)
    assert bench.run() == (["written"], ["limit"])
    assert (bench.labels("b").get(LABEL), bench.labels("a").get(LABEL)) == ("underused", None)
    assert bench.run() == (["written"], [])


def test_an_outage_of_the_api_server_loses_no_mark(bench: Bench) -> None:
    uid = bench.run_pod("train")
    bench.source.pods["train"] = (uid, 130.0)
    bench.run()
    bench.plane.apiserver.process.kill()
    bench.plane.apiserver.process.wait()
    bench.source.pods["train"] = (uid, 0.0)
    try:
        assert bench.run() == (["error"], [])
    finally:
        bench.plane.apiserver = bench.plane.start_apiserver()
    wait_for(lambda: bench.run()[0] == ["withdrawn"], "the withdrawal after the restart", 30, 0.2)
    assert LABEL not in bench.labels("train")


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
        done = run_exporter(*command, "--once", audit, f"--explain={bench.namespace}/train")
        assert done.returncode == 0 and past in done.stdout and "idle run" in done.stdout, done.stdout
    with serve_page(lambda: metrics_of_an_idle_pod(bench.namespace, "another", uid)) as address:
        command = ("reconcile", "--once", f"--source.exporter={address}", *access, audit)
        done = run_exporter(*command, f"--explain={bench.namespace}/train")
        assert done.stdout.startswith(f"{bench.namespace}/train: not in the evidence; its earlier marks:\n  20"), (
            done.stderr
        )
        assert past in done.stdout
        assert run_exporter(*command, f"--explain={bench.namespace}/absent").returncode == 2
        same = run_exporter("explain", f"{bench.namespace}/train", *command[2:])
        assert (same.returncode, same.stdout) == (done.returncode, done.stdout), same.stderr
        done = run_exporter("explain", *command[2:])
        assert (
            done.returncode == 2
            and "name either a holder, NAMESPACE/POD or job/ID, or a GPU with --gpu UUID" in done.stderr
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
            f"the evidence is incomplete: the surroundings of pods in {bench.namespace} cannot be read: " in done.stderr
        )
        assert "status 403" in done.stderr
        rbac.create_cluster_role(role)
        subject = {"kind": "User", "name": "reader", "apiGroup": "rbac.authorization.k8s.io"}
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "pod-reader"}
        rbac.create_cluster_role_binding(
            {"metadata": {"name": "pod-reader"}, "roleRef": reference, "subjects": [subject]}
        )
        wait_for(lambda: "REFUSED" in run_exporter(*allowed).stdout, "the rights to count", 30, 0.2)
        done = run_exporter(*allowed)
        rows = {line.split()[0]: line for line in done.stdout.splitlines()}
        assert rows[f"{bench.namespace}/other"].endswith("REFUSED: foreign"), done.stdout
        assert rows[f"{bench.namespace}/train"].endswith(f"{LABEL}=underused")
        assert done.stderr == ""
        rows = {row["name"]: row for row in json.loads(run_exporter(*allowed, "--format=json").stdout)["holders"]}
        assert (rows["other"]["refused"], rows["train"]["refused"]) == ("foreign", "")
        done = run_exporter(*allowed, f"--explain={bench.namespace}/other")
        assert f"  REFUSED: foreign: {LABEL} has a value that the reconciler does not set\n" in done.stdout
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
        assert "not marked underused: the pod asks for 0 GPUs, but the evidence is about 1" in done.stderr
        assert LABEL not in bench.labels("train")
        assert "REFUSED" not in run_exporter(*command, named).stdout
        done = run_exporter(*command, named, "--apply")
        assert (done.returncode, bench.labels("train").get(LABEL)) == (0, "underused"), done.stderr


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--apply", "--no-kubernetes", "--no-slurm"), "--apply finds nothing to mark"),
        (("--apply", "--kubernetes", "--no-slurm"), "cannot connect to the API server: "),
        (("--apply", "--kubernetes.kubeconfig=/nowhere", "--no-slurm"), "cannot connect to the API server: "),
        (("--kubernetes.kubeconfig=/nowhere", "--no-slurm"), "cannot connect to the API server: "),
        (("--apply", "--explain=ml/train"), "--explain and --gpu write nothing"),
    ],
)
def test_a_requested_target_that_is_unavailable_is_reported(flags: tuple[str, ...], complaint: str) -> None:
    done = run_exporter("reconcile", "--once", "--source.exporter=127.0.0.1:1", *flags)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
