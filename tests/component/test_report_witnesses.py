"""`gpu-exporter report` about sites whose sources contradict each other, or of which a part is not read.

No GPU at which one source saw work is idle, and no GPU that may be held is free.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.history import HOUR
from tests.testbed.history_worlds import H100
from tests.testbed.report_sites import Case, Hours, Truth, add, check_case
from tests.testbed.site_series import KSM, WORKS, ZERO, Site, Value, pulses, steady, uuid

pytestmark = pytest.mark.servers
NEVER = (0.0, 0.0)
REQUESTS = "kube_pod_container_resource_requests"
CASES: dict[str, Case] = {}
case = add(CASES)
BARE = {"namespace": "", "pod": ""}  # of a target outside Kubernetes
KSM_TARGET = "kube-state-metrics", "10.0.0.9:8080"


# One source sees work, another does not.


@case
def an_exporter_whose_values_stay_at_zero_beside_one_that_works(site: Site) -> Truth:
    """The one that stays at zero names the pods. On the second GPU, it stops to see work after half of the time."""
    for number, holder in ((1, "a"), (2, "b"), (3, "idle")):
        busy = ZERO if holder == "idle" else WORKS
        site.gpu("n1", number, busy=busy, job="own", instance="n1:9500", **BARE)
    site.gpu("n1", 1, "a", ZERO)
    site.gpu("n1", 2, "b", lambda since, _: 0.9 if since < site.start + 3 * HOUR else 0.0)
    site.gpu("n1", 3, "idle", ZERO)
    holders = {
        "ml/a": {"held": 6, "idle": NEVER, "unproven": NEVER},
        "ml/b": {"held": 6, "work": (5.0, 6), "idle": NEVER},
        "ml/idle": {"held": 6, "idle": 6},
    }
    return Truth({"held": 18, "present": 18}, holders)


@case
def two_exporters_of_a_gpu_that_rests_at_times(site: Site) -> Truth:
    """They agree, so the rest is idle."""
    quarter = pulses(3600, 2700)
    site.gpu("n1", 1, "a", quarter)
    site.gpu("n1", 1, busy=quarter, job="own", instance="n1:9500", **BARE)
    return Truth({"held": 6, "present": 6, "idle": (1.2, 1.55)})


@case
def nvidia_gpu_exporter_sees_work_where_dcgm_exporter_sees_none(site: Site) -> Truth:
    site.gpu("n1", 1, "a", ZERO)
    site.smi("n1:9835", 1, 0.9)
    site.gpu("n1", 2, "idle", ZERO)
    site.smi("n1:9835", 2, 0.0)
    holders = {"ml/a": {"held": 6, "idle": NEVER, "unproven": NEVER}, "ml/idle": {"held": 6, "idle": 6}}
    return Truth({"held": 12, "present": 12}, holders)


@case
def engine_activity_with_other_labels_than_the_utilization(site: Site) -> Truth:
    """The first pod works between the moments that the utilization shows."""
    site.up("dcgm", "n1:9400", namespace="gpu-operator", pod="dcgm-exporter-n1")
    for number, holder, engine in ((1, "a", 0.4), (2, "b", 0.0)):
        given: dict[str, Any] = {"job": "dcgm", "instance": "n1:9400", "Hostname": "n1", "UUID": uuid(number)}
        given |= {"exported_namespace": "ml", "exported_pod": holder}
        site.add("DCGM_FI_DEV_GPU_UTIL", 0.0, **given)
        site.add("DCGM_FI_PROF_GR_ENGINE_ACTIVE", engine, **given, DCGM_FI_DRIVER_VERSION="570.1")
    holders = {"ml/a": {"held": 6, "idle": NEVER, "unproven": NEVER}, "ml/b": {"held": 6, "idle": NEVER}}
    return Truth({"held": 12, "present": 12}, holders)


@case
def values_below_zero(site: Site) -> Truth:
    """They mean that the value is unknown."""
    site.gpu("n1", 1, "a", steady(-0.01), engine=-1.0)
    site.gpu("n1", 2, "b", ZERO, engine=-1.0)
    site.gpu("n1", 3, "c", has_utilization=False, engine=-1.0, GPU_I_ID="1", GPU_I_PROFILE="7g.80gb")
    return Truth({"held": 18, "idle": NEVER})


# Work of which neither the utilization nor the engine activity shows anything.


def labels_of(number: int, holder: str, **more: str) -> dict[str, Any]:
    """The labels of Site.gpu for a GPU of n1. A label "" is left out."""
    given = {"job": "dcgm", "instance": "n1:9400", "Hostname": "n1", "UUID": uuid(number), "gpu": str(number)}
    given |= {"device": f"nvidia{number}", "modelName": H100, "namespace": "gpu-operator", "pod": "dcgm-exporter-n1"}
    given |= {"exported_namespace": "ml", "exported_pod": holder, **more}
    return {name: value for name, value in given.items() if value}


@case
def video_on_a_gpu_whose_uuid_has_a_name_in_lower_case(site: Site) -> Truth:
    for number, holder in ((1, "video"), (2, "idle")):
        site.gpu("n1", number, holder, ZERO, UUID="", uuid=uuid(number))
    site.add("DCGM_FI_DEV_ENC_UTIL", 40, **labels_of(1, "video", UUID="", uuid=uuid(1)))
    return Truth({"held": 12}, {"ml/video": {"idle": NEVER, "unproven": NEVER}, "ml/idle": {"idle": 6}})


@case
def video_on_a_gpu_without_uuid(site: Site) -> Truth:
    """Other GPUs are idle nevertheless."""
    for number, holder in ((1, "video"), (2, "idle")):
        site.gpu("n1", number, holder, ZERO, UUID="")
    site.add("DCGM_FI_DEV_DEC_UTIL", 40, **labels_of(1, "video", UUID=""))
    return Truth({"held": 12}, {"ml/video": {"idle": NEVER, "unproven": NEVER}, "ml/idle": {"idle": 6}})


@case
def video_on_an_instance(site: Site) -> Truth:
    """The field is of the whole board, so it may be the work of each instance."""
    for number in (1, 2):
        mig = {"GPU_I_ID": "1", "GPU_I_PROFILE": "7g.80gb"}
        site.gpu("n1", number, f"pod-{number}", ZERO, has_utilization=False, **mig)
    site.add("DCGM_FI_DEV_DEC_UTIL", 40, **labels_of(1, ""))
    holders = {"ml/pod-1": {"held": 6, "idle": NEVER, "unproven": NEVER}, "ml/pod-2": {"held": 6, "idle": 6}}
    return Truth({"held": 12}, holders)


@case
def traffic_of_peers(site: Site) -> Truth:
    """Traffic does not confirm that a GPU is idle. A GPU at rest has a little of it."""
    mig = {"GPU_I_ID": "1", "GPU_I_PROFILE": "7g.80gb"}
    for number, holder in enumerate(("receives", "is-read", "rests", "instance")):
        more = mig if holder == "instance" else {}
        site.gpu("n1", number, holder, ZERO, has_utilization=holder != "instance", **more)
        memory, pcie = (0.3 if holder in ("is-read", "instance") else 0.001), (2e10 if holder == "receives" else 1e6)
        site.add("DCGM_FI_PROF_DRAM_ACTIVE", memory, **labels_of(number, holder, **more))
        site.add("DCGM_FI_PROF_PCIE_RX_BYTES", pcie, **labels_of(number, holder, **more))
    unproven = {f"ml/{name}": {"unproven": 6, "idle": NEVER} for name in ("receives", "is-read", "instance")}
    return Truth({"held": 24}, {**unproven, "ml/rests": {"idle": 6}})


@case
def an_exporter_that_repeats_old_values(site: Site) -> Truth:
    """The energy counter of each GPU grows, unless nobody reads it. One GPU has none, and one has zeros in its place."""
    for number, (holder, energy) in enumerate((("old", 5e9), ("new", None), ("none", None), ("zero", 0.0))):
        site.gpu("n1", number, holder, ZERO)
        if holder != "none":
            grown: Value = energy if energy is not None else lambda at: 7e4 * (at - site.start)
            site.add("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", grown, **labels_of(number, holder))
    for holder, start, end in (("first", 0.0, 2.995), ("second", 2.995, None)):  # with one sample of the counter
        site.gpu("n1", 4, holder, ZERO, start=start, end=end)
        labels = labels_of(4, holder)
        site.add("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", lambda at: 7e4 * (at - site.start + 1), start, end, **labels)
    idle: dict[str, Mapping[str, Hours]] = {f"ml/{name}": {"idle": 6} for name in ("new", "none", "zero")}
    idle |= {"ml/first": {"idle": (2.9, 3)}, "ml/second": {"idle": (2.9, 3.02)}}
    return Truth({"held": 30}, {**idle, "ml/old": {"unproven": 6, "idle": NEVER}})


# What may be held is not free.


@case
def a_pod_whose_name_is_like_that_of_an_exporter(site: Site) -> Truth:
    """Prometheus keeps the labels of the holders, and `up` names the exporter's own pod."""
    site.up("dcgm", "n1:9400", namespace="gpu-operator", pod="dcgm-exporter-n1")
    site.gpu("n1", 1, busy=ZERO, namespace="ml", pod="model-exporter-0")
    site.gpu("n1", 2, busy=ZERO)
    return Truth({"present": 12, "free": 6}, {"ml/model-exporter-0": {"held": 6, "idle": 6}})


@case
def a_pod_that_waits_on_its_node(site: Site) -> Truth:
    """Its images are loaded. The scheduler has given the GPU to it; a third pod waits without a node."""
    site.up(*KSM_TARGET)
    for number, (name, node, phase) in enumerate((("waits", "n1", "Pending"), ("runs", "n2", "Running"))):
        site.smi(f"{node}:9835", number, 0.9 * number, node=node)
        site.pod(name, node, 1, phase=phase)
        site.offer(node, 1)
    site.pod("queued", "", 8, phase="Pending")
    return Truth(
        {"present": 12, "free": 0}, {"ml/waits": {"held": 6, "idle": NEVER}, "ml/runs": {"held": 6, "used": 6}}
    )


@case
def a_pod_without_a_node_beside_renamed_labels(site: Site) -> Truth:
    """Prometheus renames the node of the other pod, because the target has the label itself."""
    site.up(*KSM_TARGET)
    site.gpu("n9", 1, busy=ZERO)
    site.offer("n9", 1)
    for name, node, phase in (("queued", "", "Pending"), ("elsewhere", "n1", "Running")):
        about: dict[str, Any] = {**KSM, "namespace": "monitoring", "pod": "ksm-0", "exported_namespace": "ml"}
        about |= {"exported_pod": name, "node": "n9"}
        renamed = {"exported_node": node, "exported_container": "main", "container": "ksm"}
        site.add(REQUESTS, 1, **renamed, resource="nvidia_com_gpu", **about)
        site.add("kube_pod_status_phase", 1, phase=phase, **about)
    return Truth({"present": 6, "free": 6}, {"ml/elsewhere": {"held": 6, "unknown": 6}})


@case
def kube_state_metrics_without_the_phases_of_pods(site: Site) -> Truth:
    """Some sites drop them, because they are many. Nobody knows then which pods ran."""
    site.up(*KSM_TARGET)
    for number, node in ((1, "n1"), (2, "n2")):
        site.smi(f"{node}:9835", number, 0.9 * (number - 1), node=node)
        about: dict[str, Any] = {**KSM, "namespace": "ml", "pod": f"pod-{number}"}
        site.add(REQUESTS, 1, node=node, container="main", resource="nvidia_com_gpu", **about)
        site.offer(node, 1)
    return Truth({"present": 12, "free": NEVER}, told=("which pods held GPUs: .*kube_pod_status_phase",))


def of_instance(site: Site, number: int, instance: str, silent: tuple[float, float]) -> None:
    """A pod, which this kube-state-metrics shows, except in this time (hours)."""

    def answers(at: float) -> float | None:
        return None if silent[0] <= (at - site.start) / HOUR < silent[1] else 1.0

    site.up("kube-state-metrics", instance, lambda at: answers(at) or 0.0)
    about: dict[str, Any] = {**KSM, "instance": instance, "namespace": "ml", "pod": f"pod-{number}"}
    site.add(REQUESTS, answers, node=f"n{number}", container="main", resource="nvidia_com_gpu", **about)
    site.add("kube_pod_status_phase", answers, phase="Running", **about)


def two_idle_nodes(site: Site) -> None:
    for number in (1, 2):
        site.smi(f"n{number}:9835", number, 0.0, node=f"n{number}")
        site.offer(f"n{number}", 1)


@case
def one_shard_of_kube_state_metrics_fails(site: Site) -> Truth:
    """Each shard shows a part of the pods."""
    two_idle_nodes(site)
    of_instance(site, 1, "10.0.0.1:8080", (9, 9))
    of_instance(site, 2, "10.0.0.2:8080", (2, 5))
    return Truth({"present": 12, "free": (0, 0.05)}, {"ml/pod-1": {"held": 6}, "ml/pod-2": {"held": 3}})


@case
def one_replica_of_kube_state_metrics_fails(site: Site) -> Truth:
    """The other one shows all pods, so what they do not hold is free."""
    two_idle_nodes(site)
    of_instance(site, 1, "10.0.0.1:8080", (9, 9))
    of_instance(site, 1, "10.0.0.2:8080", (2, 5))
    return Truth({"present": 12, "free": 6}, {"ml/pod-1": {"held": 6}})


@case
def time_slicing_with_a_resource_of_its_own(site: Site) -> Truth:
    """renameByDefault of NVIDIA's device plugin. Two GPUs with four replicas each, and five pods."""
    site.up(*KSM_TARGET)
    for number, holder in ((1, "a"), (2, "e")):
        site.gpu("n1", number, holder)
    for name in "abcde":
        about: dict[str, Any] = {**KSM, "namespace": "ml", "pod": name}
        site.add(REQUESTS, 1, node="n1", container="main", resource="nvidia_com_gpu_shared", **about)
        site.add("kube_pod_status_phase", 1, phase="Running", **about)
    for resource, replicas in (("nvidia_com_gpu_shared", 8), ("nvidia_com_gpu", 0)):
        site.add("kube_node_status_allocatable", replicas, node="n1", resource=resource, **KSM)
    return Truth({"held": 12, "present": 12, "free": 0, "idle": NEVER})


@case
def a_node_that_offers_no_gpu_to_the_scheduler(site: Site) -> Truth:
    """Its GPUs are held by resource claims, or by requests of megabytes. The exporter names only other pods."""
    site.up(*KSM_TARGET)
    site.gpu("n1", 1, busy=ZERO)
    site.gpu("n2", 2, "a")
    site.gpu("n3", 3, busy=ZERO)  # not of Kubernetes
    site.pod("a", "n2", 1)
    site.offer("n2", 1)
    for node in ("n1", "n2"):
        site.add("kube_node_status_allocatable", 64, node=node, resource="cpu", **KSM)
    return Truth({"present": 18, "free": 6, "taken": 6}, {"ml/a": {"held": 6}})


def init(site: Site, name: str, gpus: int, container: str = "load") -> None:
    """The request of an init container of a pod of n1."""
    about: dict[str, Any] = {**KSM, "namespace": "ml", "pod": name}
    of_container = {"node": "n1", "container": container, "resource": "nvidia_com_gpu"}
    site.add("kube_pod_init_container_resource_requests", gpus, **about, **of_container)


@case
def init_containers_that_request_more_than_the_others(site: Site) -> Truth:
    """The scheduler gives a pod the most of its init containers, or the sum of the others if it is more."""
    site.up(*KSM_TARGET)
    for number in range(4):
        site.smi("n1:9835", number, 0.9, node="n1")
    site.pod("more", "n1", 1)
    init(site, "more", 2)
    init(site, "more", 1, "check")
    site.pod("less", "n1", 2)
    init(site, "less", 1)
    site.offer("n1", 4)
    return Truth({"present": 24, "free": 0}, {"ml/more": {"held": 12}, "ml/less": {"held": 12}})


@case
def a_pod_of_which_only_an_init_container_requests_a_gpu(site: Site) -> Truth:
    site.up(*KSM_TARGET)
    site.smi("n1:9835", 1, 0.0, node="n1")
    init(site, "only", 1)
    site.add("kube_pod_status_phase", 1.0, phase="Running", **{**KSM, "namespace": "ml", "pod": "only"})
    site.add("kube_pod_owner", owner_kind="Job", owner_name="tune", **{**KSM, "namespace": "ml", "pod": "only"})
    site.offer("n1", 1)
    return Truth({"present": 6, "free": 0}, {"ml/only": {"held": 6, "unproven": 6}})


@pytest.mark.parametrize("name", CASES)
def test_a_site(name: str, sites: tuple[str, Mapping[str, Truth]], tmp_path: Path) -> None:
    check_case(name, CASES[name], sites, tmp_path / "out")
