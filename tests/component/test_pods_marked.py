"""Marks on pods of a real API server: set, renewed, withdrawn, refused."""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Collection
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from gpu_exporter.common.outside import parse_timestamp
from gpu_exporter.reconciler.decision.policy import LABEL
from gpu_exporter.reconciler.evidence.records import Evidence, HolderName
from gpu_exporter.reconciler.kubernetes.checks import EVIDENCE, GPUS, OBSERVED, SINCE
from gpu_exporter.reconciler.marks import Mark, MarkError
from tests.component.pods_bench import POLICY, Bench, condition_of
from tests.testbed.processes import wait_for

pytestmark = pytest.mark.kubernetes


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
    assert "give the reconciler `patch` on pods/status (chart: reconciler.condition)" in caplog.text


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
    wait_for(lambda: bench.run()[0] == ["withdrawn"], "the withdrawal after the restart", each_s=0.2)
    assert LABEL not in bench.labels("train")
