"""Wishes of owners in annotations and in a job's Comment; classes and gangs of pods."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.memory_slurm import MemorySlurm, row_of_22_05, row_of_24_11

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.outside import count_indexes
from gpu_exporter.reconciler.decision.surroundings import Surroundings
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.kubernetes.around.kinds import Signs, classify
from gpu_exporter.reconciler.kubernetes.around.optouts import OptOut, Place, read_wish
from gpu_exporter.reconciler.kubernetes.client.routes import NO_ROUTE, Route
from gpu_exporter.reconciler.kubernetes.gangs import gangs, group_keys
from gpu_exporter.reconciler.kubernetes.owners import Link, Owner, pods_wanted
from gpu_exporter.reconciler.marks import timestamp

POLICY = Policy()
WALL = 1_800_000_000.0
HOUR = 3600.0


def place(source: str = "pod", set_ago_s: float | None = 60.0, **annotations: str) -> Place:
    """An object with annotations of the reconciler. `set_ago_s`: their age in managedFields; None for no record."""
    ours = {f"gpu-exporter.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
    metadata: dict[str, Any] = {"annotations": ours, "creationTimestamp": timestamp(WALL - 100 * HOUR)}
    if set_ago_s is not None:
        fields = {"f:metadata": {"f:annotations": {f"f:{key}": {} for key in ours}}}
        other = {"f:metadata": {"f:annotations": {"f:other": {}}}}
        metadata["managedFields"] = [
            {"manager": "kubectl", "time": timestamp(WALL - set_ago_s), "fieldsV1": fields},
            {"manager": "kubelet", "time": timestamp(WALL), "fieldsV1": other},
        ]
    return Place(source, f"{source} x", metadata)


def wish(*places: Place) -> OptOut:
    return read_wish(places, POLICY, WALL)


def until(hours: float) -> str:
    return timestamp(WALL + hours * HOUR)


@pytest.mark.parametrize(
    ("places", "source"),
    [
        ([place(exempt_until=until(1))], "pod"),
        ([place(exempt_until=until(-1))], None),
        ([place(exempt_until=until(-1)), place("owner", exempt_until=until(1))], "owner"),
        ([place(exempt_until=until(1)), place("owner", exempt_until=until(2))], "pod"),
        ([place(), place("owner"), place("namespace", exempt="true")], "namespace"),
        ([place("namespace", set_ago_s=90 * HOUR, exempt_until=until(1))], "namespace"),
        ([place("namespace", exempt="false")], None),
        ([place(exempt="true")], None),
        ([place(set_ago_s=25 * HOUR, exempt_until=until(1))], None),  # set longer ago than allowed
        ([place(set_ago_s=23 * HOUR, exempt_until=until(99))], "pod"),
        ([place(set_ago_s=None, exempt_until=until(1))], None),  # counts as set with the object, a hundred hours ago
        ([place(exempt_until="2027-01-01")], None),
        ([place(exempt_until="")], None),
    ],
)
def test_the_nearest_wish_that_has_not_ended_counts(places: list[Place], source: str | None) -> None:
    exemption = wish(*places).exemption
    assert (exemption.source if exemption else None) == source


@pytest.mark.parametrize(
    ("given_place", "says"),
    [
        (place(exempt="true"), 'it is only for namespaces, with the value "true"'),
        (place(exempt_until="soon"), f"cannot be read: 'soon'; write it as {until(24)}"),
        (
            place(set_ago_s=25 * HOUR, exempt_until=until(1)),
            "ended after 1d, the most that the policy allows: set it again",
        ),
        (place(idle_after="long"), "idle-after of pod x cannot be read: 'long' is not a duration"),
        (Place("pod", "pod x", {"annotations": {"karpenter.sh/do-not-disrupt": "true"}}), "pod x has karpenter.sh/"),
        (Place("owner", "J", {"annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}}), "J has cl"),
    ],
)
def test_a_wish_that_cannot_be_obeyed_keeps_the_pod_at_candidate_and_names_the_remedy(
    given_place: Place, says: str
) -> None:
    found = wish(given_place)
    assert (found.exemption, says in found.ceiling) == (None, True), found.ceiling


def test_the_reason_of_an_exemption_shows_its_limited_end() -> None:
    exemption = wish(place(set_ago_s=HOUR, exempt_until=until(99))).exemption
    assert exemption is not None and exemption.why == f"pod x is exempt until {until(23)}"


def test_the_reason_of_an_exemption_is_one_short_line() -> None:
    exemption = wish(place(exempt_until=until(1), exempt_reason="a\nb" + "c" * 500)).exemption
    assert exemption is not None
    assert "\n" not in exemption.why and len(exemption.why) < 200


def test_idle_after_is_limited_and_the_nearest_annotation_counts() -> None:
    found = wish(place(idle_after="3h"), place("owner", idle_after="5h"))
    assert (found.idle_after_s, found.idle_after_by and found.idle_after_by.source) == (3 * HOUR, "pod")
    assert wish(place(idle_after="90h")).idle_after_s == POLICY.idle_after_max


@given(st.dictionaries(st.sampled_from(["exempt_until", "exempt", "idle_after", "exempt_reason"]), st.text()))
def test_any_annotations_are_read_without_an_error(annotations: dict[str, str]) -> None:
    found = wish(place(**annotations), place("namespace", **annotations))
    assert found.exemption is None or found.exemption.source in ("pod", "namespace")


def owner(version: str, kind: str) -> Owner:
    return Owner(Link(version, kind, "x", kind), {"name": "x", "uid": kind})


@pytest.mark.parametrize(
    ("labels", "owners", "server", "kind"),
    [
        ({}, [], "", "unclear"),
        ({}, [owner("batch/v1", "Job")], "", "batch"),
        ({}, [owner("batch/v1", "Job")], "Service/tensorboard", "serving"),
        ({}, [owner("kubeflow.org/v1", "PyTorchJob")], "", "batch"),
        ({}, [owner("example.org/v1", "Job")], "", "unclear"),
        ({}, [owner("apps/v1", "StatefulSet"), owner("kubeflow.org/v1", "Notebook")], "Service/nb", "interactive"),
        ({"component": "singleuser-server"}, [], "Service/proxy", "interactive"),
        ({"component": "worker"}, [], "", "unclear"),
        ({}, [owner("apps/v1", "ReplicaSet"), owner("apps/v1", "Deployment")], "HorizontalPodAutoscaler/x", "serving"),
        ({"serving.kserve.io/inferenceservice": "x"}, [], "", "unclear"),
        (
            {"serving.kserve.io/inferenceservice": "x"},
            [owner("serving.kserve.io/v1beta1", "InferenceService")],
            "",
            "serving",
        ),
        ({}, [owner("example.org/v1", "InferenceService")], "", "unclear"),
        ({}, [owner("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")], "", "serving"),
    ],
)
def test_the_class_of_a_pod_depends_on_labels_owners_and_services(
    labels: dict[str, str], owners: list[Owner], server: str, kind: str
) -> None:
    assert classify(labels, owners, Route(server))[0] == kind


@pytest.mark.parametrize(("kind", "found"), [("Job", "batch"), ("StatefulSet", "serving")])
def test_a_weak_route_shows_a_server_except_for_a_batch_kind(kind: str, found: str) -> None:
    owners = [owner("batch/v1" if kind == "Job" else "apps/v1", kind)]
    assert classify({}, owners, Route("headless Service/x", is_weak=True))[0] == found


@pytest.mark.parametrize(
    ("kinds", "labels", "found"),
    [
        ("Bot", "", True),
        ("example.org/Bot, Other", "", True),
        ("example.com/Bot", "", False),
        ("", "role", True),
        ("", "a=b, role=server", True),
        ("", "role=worker", False),
        ("", "role=", False),
    ],
)
def test_the_site_names_kinds_and_labels_of_servers(kinds: str, labels: str, found: bool) -> None:
    signs = Signs.of(POLICY._replace(serving_kinds=kinds, serving_labels=labels))
    of = classify({"role": "server"}, [owner("example.org/v1", "Bot")], NO_ROUTE, signs)[0]
    assert of == ("serving" if found else "unclear")


def reference(kind: str, uid: str) -> Link:
    return Link("example.org/v1", kind, "x", uid)


def test_pods_with_a_common_owner_or_a_common_group_name_are_one_gang() -> None:
    job, other = reference("Job", "j1"), reference("Job", "j2")
    named = {"labels": {"kueue.x-k8s.io/pod-group-name": "g"}}
    keys = {
        "a": group_keys({}, [job]),
        "b": group_keys(named, [job]),
        "c": group_keys(named, []),
        "d": group_keys({}, [other, reference("JobSet", "s")]),
        "e": group_keys({}, [reference("Job", "j3"), reference("JobSet", "s")]),
        "f": group_keys({}, [reference("ReplicaSet", "r"), reference("Deployment", "p")]),
        "g": group_keys({}, [reference("ReplicaSet", "r"), reference("Deployment", "p")]),
        "h": group_keys({}, [reference("Job", "j4"), reference("CronJob", "c")]),
        "i": group_keys({}, [reference("Job", "j5"), reference("CronJob", "c")]),
        "l": group_keys({}, [reference("ReplicaSet", "r2"), reference("InferenceService", "s2")]),
        "m": group_keys({}, [reference("ReplicaSet", "r3"), reference("InferenceService", "s2")]),
        "j": group_keys({"annotations": {"scheduling.k8s.io/group-name": "v"}}, []),
        "k": group_keys({"annotations": {"scheduling.k8s.io/group-name": "v"}}, []),
    }
    found = gangs(keys)
    assert {"".join(sorted(gang)) for gang in found.values()} == {"abc", "de", "f", "g", "h", "i", "jk", "l", "m"}
    assert all(pod in gang for pod, gang in found.items())


@given(st.dictionaries(st.text(max_size=3), st.frozensets(st.tuples(st.sampled_from("ab"), st.sampled_from("1234")))))
def test_every_pod_is_in_one_gang_and_pods_that_share_a_key_are_together(
    keys: dict[str, frozenset[tuple[str, str]]],
) -> None:
    found = gangs(keys)
    assert found.keys() == keys.keys()
    for pod, gang in found.items():
        assert pod in gang and all(found[other] == gang for other in gang)
        for other in keys:
            assert (other in gang) or not (keys[pod] & keys[other])


@pytest.mark.parametrize(
    ("kind", "found", "wanted"),
    [
        ("Job", {"spec": {"parallelism": 4}}, 4),
        ("Job", {"spec": {"parallelism": 4, "completions": 10}, "status": {"succeeded": 8}}, 2),
        ("Job", {"spec": {}}, None),
        ("StatefulSet", {"spec": {"replicas": 3}}, 3),
        ("StatefulSet", {"spec": {}}, 1),
        ("PyTorchJob", {"spec": {"replicas": 3}}, None),
    ],
)
def test_the_number_of_pods_that_a_controller_wants_is_read_from_its_spec(
    kind: str, found: dict[str, Any], wanted: int | None
) -> None:
    assert pods_wanted(kind, found) == wanted


def around(release: str, **fields: Any) -> Surroundings:
    """The surroundings of job 7, by its fields in squeue."""
    slurm = MemorySlurm(release)
    make = row_of_22_05 if release.startswith("22") else row_of_24_11
    slurm.rows = [make(job_id=7, **fields), *(make(job_id=i, **extra) for i, extra in ((8, {}), (9, fields)))]
    name = HolderName("slurm", "", "7")
    found = slurm.survey([name], [name], WALL)[name]
    assert isinstance(found, Surroundings)
    return found


@pytest.mark.parametrize("release", ["22.05.8", "24.11.5"])
@pytest.mark.parametrize(
    ("fields", "kind", "keep_s", "says"),
    [
        ({"batch_flag": True}, "batch", 0.0, ""),
        ({"batch_flag": False}, "interactive", 0.0, ""),
        ({}, "unclear", 0.0, ""),
        ({"batch_flag": True, "name": "sys/dashboard/sys/jupyter"}, "interactive", 0.0, ""),
        ({"batch_flag": True, "comment": "gpu-keep=4h:long compile"}, "batch", 4 * HOUR, ""),
        ({"batch_flag": True, "comment": "project=7; gpu-keep=4h"}, "batch", 4 * HOUR, ""),
        ({"batch_flag": True, "comment": "gpu-keep=99h"}, "batch", POLICY.exempt_max, ""),
        (
            {"batch_flag": True, "comment": "gpu-keep=ever"},
            "batch",
            0.0,
            "gpu-keep in the job's Comment cannot be read",
        ),
        ({"batch_flag": True, "comment": "no-gpu-keep=4h"}, "batch", 0.0, ""),
    ],
)
def test_class_and_wish_of_a_job_are_read_from_its_fields(
    release: str, fields: dict[str, Any], kind: str, keep_s: float, says: str
) -> None:
    found = around(release, **fields)
    assert (found.kind, found.idle_after_s, says in found.ceiling, bool(found.ceiling)) == (
        kind,
        keep_s,
        True,
        bool(says),
    )
    if keep_s:
        assert found.idle_after_by is not None and found.idle_after_by.source == "job"


def test_components_of_a_heterogeneous_job_that_hold_gpus_are_a_gang() -> None:
    number = {"set": True, "infinite": False, "number": 7}
    found = around(
        "24.11.5", het_job_id=number, tres_alloc_str="cpu=4,gres/gpu=2,gres/gpu:a100=2", job_state=["RUNNING"]
    )
    assert [(member.name.name, member.units, member.waits) for member in found.members] == [("7", 2, ""), ("9", 2, "")]
    assert found.group == "job/7"
    assert around("24.11.5", job_state=["SUSPENDED"]).members == ()


def test_a_job_that_squeue_no_longer_lists_has_no_surroundings() -> None:
    slurm = MemorySlurm()
    gone = HolderName("slurm", "", "4711")
    found = slurm.survey([gone], [], WALL)[gone]
    assert not isinstance(found, Surroundings) and not found.is_failure


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("0", 1), ("0,2-4", 4), ("4-2", None), ("0,", None), ("1-", None), ("²", None), ("0-99999999999", None), (7, None)],
)  # fmt: skip
def test_the_failed_indexes_of_a_job_are_counted(text: Any, count: int | None) -> None:
    assert count_indexes(text) == count


@pytest.mark.parametrize(
    ("kind", "spec", "status"),
    [
        ("Job", {"parallelism": 4, "completions": 4}, {"failedIndexes": "x"}),
        ("Job", {"parallelism": "²", "completions": 4}, {}),
        ("Job", {"parallelism": 4, "completions": 4}, {"succeeded": "many"}),
        ("StatefulSet", {"replicas": None}, {}),
    ],
)
def test_an_invalid_number_of_pods_is_an_error(kind: str, spec: Any, status: Any) -> None:
    with pytest.raises(ValueError):
        pods_wanted(kind, {"spec": spec, "status": status})


def test_pods_that_name_a_pod_as_their_owner_belong_to_its_gang() -> None:
    above = {"uid": "driver"}
    plain = {"uid": "a", "ownerReferences": [{"kind": "Pod", "uid": "driver"}]}
    keys = {name: group_keys(metadata, ()) for name, metadata in (("d", above), ("a", plain), ("b", {"uid": "b"}))}
    assert gangs(keys) == {"d": {"d", "a"}, "a": {"d", "a"}, "b": {"b"}}
