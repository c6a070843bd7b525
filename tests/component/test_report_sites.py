"""`gpu-exporter report` about sites whose series are odd: none is accused, and no hour counts twice or vanishes.

Each case is a small site in a real server. It has a shape that real sites have and that a sum over series gets wrong.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.testbed.history import HOUR
from tests.testbed.history_servers import prometheus, write_blocks
from tests.testbed.processes import Processes
from tests.testbed.report_sites import Case, Hours, Truth, add, check, check_case, report
from tests.testbed.site_series import KSM, WORKS, ZERO, Site, between, pulses, steady, uuid

pytestmark = pytest.mark.servers
NEVER = (0.0, 0.0)
QUARTER = pulses(3600, 2700)  # 15 minutes of each hour at zero
RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


CASES: dict[str, Case] = {}  # in one server, each with its own value of the label cluster
ALONE: dict[str, Case] = {}  # in a server of their own, without this label


case, alone = partial(add, CASES), partial(add, ALONE)


# Who works is not idle.


@case()
def idle_pods_are_idle(site: Site) -> Truth:
    site.gpu("n1", 1, "idle", ZERO)
    site.gpu("n1", 2, "quarter", QUARTER)
    site.gpu("n1", 3, "busy")
    holders = {"ml/idle": {"idle": 6}, "ml/quarter": {"idle": (1.2, 1.55), "used": (4.4, 4.8)}, "ml/busy": {"used": 6}}
    return Truth({"held": 18, "free": 0, "present": 18}, holders)


@case(interval=60)
def work_between_two_scrapes(site: Site) -> Truth:
    """Scraped every 60 s, which is the default of Prometheus; DCGM's mean covers the last 30 s."""
    for number in range(6):
        site.gpu("n1", number, f"pod-{number}", pulses(60, 10, 10 * number))
    return Truth({"held": 36, "idle": NEVER}, told=("more than 32 s apart; scrape it every 30 s",))


@case(interval=300)
def work_between_scrapes_five_minutes_apart(site: Site) -> Truth:
    for number, (period, work) in enumerate([(100, 30), (100, 50), (60, 20), (97, 20), (75, 25)]):
        site.gpu("n1", number, f"pod-{number}", pulses(period, work, 7 * number))
    return Truth({"held": 30, "idle": NEVER})


@case()
def one_of_four_scrapes_arrives(site: Site) -> Truth:
    site.gpu("n1", 1, "quarter", QUARTER, read=lambda at: at % 120 == 0)
    site.gpu("n1", 2, "half", pulses(3600, 1800), read=lambda at: at % 60 == 0)
    site.gpu("n2", 3, "busy")
    holders = {"ml/quarter": {"idle": NEVER}, "ml/half": {"idle": (0, 1.6)}, "ml/busy": {"used": 6}}
    return Truth({}, holders, ("GPU-hours between the first and the last sample of a GPU have no samples",))


@case(24)
def the_interval_changes_at_noon(site: Site) -> Truth:
    """From 60 s to 15 s, each on another node, and from 15 s to 60 s."""
    for node, before, after in (("n1", 60, 15), ("n2", 15, 60)):
        for start, end, step in ((0, 12 - before / HOUR, before), (12, None, after)):
            site.up("dcgm", f"{node}:9400", start=start, end=end, step=step)
            for number, pod, busy in ((1, "quarter", QUARTER), (2, "busy", WORKS)):
                site.gpu(node, number + after, f"{pod}-{node}", busy, start=start, end=end, step=step)
    holders = {
        f"ml/{pod}-{node}": {"held": 24, "idle": most, "used": least}
        for node in ("n1", "n2")
        for pod, most, least in (("quarter", (2, 6), (18, 19)), ("busy", NEVER, 24))
    }
    return Truth({"held": 96, "present": 96, "free": 0}, holders)


@case()
def two_intervals_in_one_job(site: Site) -> Truth:
    site.gpu("n1", 1, "fast", QUARTER, step=15)
    site.gpu("n2", 2, "slow", QUARTER, step=60)
    site.gpu("n2", 3, "busy", step=60)
    holders = {"ml/fast": {"held": 6, "idle": (1.2, 1.55)}, "ml/slow": {"held": 6, "idle": NEVER, "used": (4.3, 4.8)}}
    return Truth({"held": 18, "present": 18}, {**holders, "ml/busy": {"held": 6, "used": 6}})


@case()
def two_replicas_with_two_intervals(site: Site) -> Truth:
    for replica, step in (("a", 15.0), ("b", 60.0)):
        site.up("dcgm", "n1:9400", step=step, replica=replica)
        site.gpu("n1", 1, "quarter", QUARTER, step=step, replica=replica)
    return Truth({"present": 6, "free": 0}, {"ml/quarter": {"held": 6, "idle": (0, 1.55), "used": (4.4, 6)}})


@case()
def two_replicas_with_one_holder_after_another(site: Site) -> Truth:
    """Of a store without deduplication. Nobody shares the GPU, so the use of both pods is known."""
    for replica in "ab":
        site.up("dcgm", "n1:9400", prometheus_replica=replica)
        site.gpu("n1", 1, "first", end=2.5, prometheus_replica=replica)
        site.gpu("n1", 1, "second", ZERO, start=2.5, prometheus_replica=replica)
    holders = {"ml/first": {"held": 2.5, "used": (2.4, 2.5)}, "ml/second": {"held": 3.5, "idle": (3.4, 3.5)}}
    return Truth({"held": 6, "present": 6, "unknown": NEVER}, holders)


@case()
def engine_activity_for_minutes_of_each_hour(site: Site) -> Truth:
    """The profiling field is blank after 2 minutes of each hour; the work is never at the moment of the utilization."""
    site.add("DCGM_FI_DEV_GPU_UTIL", 0, **LABELS)
    site.add("DCGM_FI_PROF_GR_ENGINE_ACTIVE", lambda at: 0.0 if at % 3600 <= 120 else None, **LABELS)
    return Truth({"held": 6}, {"ml/train": {"held": 6, "idle": NEVER, "unproven": 6}})


LABELS = {"job": "dcgm", "instance": "n1:9400", "Hostname": "n1", "UUID": uuid(1), "gpu": "1", "exported_pod": "train"}
LABELS["exported_namespace"] = "ml"


@case()
def engine_activity_stuck_at_zero_under_bursts(site: Site) -> Truth:
    for number, (period, work) in enumerate([(41, 4), (61, 12), (97, 30), (110, 50), (600, 510)]):
        site.gpu("n1", number, f"pod-{number}", pulses(period, work, 3), engine=0.0)
    return Truth({"held": 30, "idle": NEVER})


@case(3)
def jobs_of_forty_seconds(site: Site) -> Truth:
    """They load for 10 s, work for 30 s, and 20 s later the next one begins."""
    for turn in range(180):
        start = 1 / 60 * turn + 5 / 3600
        work = between(site.start + start * HOUR + 10, site.start + start * HOUR + 40)
        site.gpu("n1", 1, f"job-{turn}", work, start=start, end=start + 40 / HOUR)
    return Truth({"held": (1, 2), "idle": NEVER, "present": (1, 2)})


@case()
def pods_that_load_for_a_minute(site: Site) -> Truth:
    """A pod is at zero in its part of the first two minutes, and works from then on."""
    for turn in range(36):
        start = turn / 6 + 50 / HOUR
        work = between(site.start + (turn / 6) * HOUR + 130, site.start + (turn / 6 + 1) * HOUR)
        site.gpu("n1", 1, f"pod-{turn}", work, start=start, end=start + 300 / HOUR)
    return Truth({"held": 3, "idle": NEVER, "used": (1.9, 3)})


@case()
def video_work(site: Site) -> Truth:
    """Encoders and decoders are in neither utilization nor engine activity."""
    for number, field in enumerate(("DCGM_FI_DEV_ENC_UTIL", "DCGM_FI_DEV_DEC_UTIL")):
        site.gpu("n1", number, f"video-{number}", ZERO)
        site.add(
            field,
            lambda at: 40.0 if at % 120 == 0 else 0.0,
            job="dcgm",
            instance="n1:9400",
            Hostname="n1",
            UUID=uuid(number),
            gpu=str(number),
            device=f"nvidia{number}",
            modelName="NVIDIA H100 80GB HBM3",
            namespace="gpu-operator",
            pod="dcgm-exporter-n1",
            exported_namespace="ml",
            exported_pod=f"video-{number}",
        )
    return Truth({"idle": NEVER, "unproven": NEVER, "work": 12, "held": 12})


# Every hour counts once.


@case(6, 30, "--price=1")
def slurm_in_kubernetes(site: Site) -> Truth:
    """The GPUs of a slurmd's pod run a job."""
    for number in range(4):
        site.gpu("n1", number, "slurm-worker-0", exported_namespace="slurm", hpc_job="4711")
    site.pod("slurm-worker-0", "n1", 4, namespace="slurm")
    return Truth({"held": 24, "cost": 24, "present": 24, "free": 0}, {"job 4711": {"held": 24, "used": 24}})


@case(6, 30, "--price=1")
def two_exporters_of_the_same_gpus(site: Site) -> Truth:
    for number in range(4):
        site.gpu("n1", number, "train" if number < 2 else "", WORKS if number < 2 else ZERO)
        site.smi("n1:9835", number, 0.9 if number < 2 else 0.0)
    return Truth({"cost": 12, "present": 24, "free": 12}, {"ml/train": {"held": 12, "used": 12}})


@case(6, 30, "--price=1")
def two_exporters_of_the_same_gpus_and_requests(site: Site) -> Truth:
    two_exporters_of_the_same_gpus(site)
    site.pod("train", "n1", 2)
    return Truth({"cost": 12, "present": 24, "free": 12}, {"ml/train": {"held": 12, "used": 12}})


@case()
def two_exporters_of_other_gpus(site: Site) -> Truth:
    """nvidia_gpu_exporter shows a workstation that is in use."""
    for number in range(4):
        site.gpu("n1", number, "train" if number < 2 else "", WORKS if number < 2 else ZERO)
    for number in (4, 5):
        site.smi("w1:9835", number, 0.5)
    site.pod("train", "n1", 2)
    return Truth({"held": 24, "used": 24, "present": 36, "free": None}, {"ml/train": {"held": 12, "used": 12}})


@case()
def nvidia_gpu_exporter_of_the_default_service_monitor(site: Site) -> Truth:
    """The instance is the address of its pod, and no label names the node."""
    own = {"namespace": "monitoring", "pod": "nvidia-gpu-exporter-x7k2p"}
    for number in range(4):
        site.smi("10.244.3.7:9835", number, container="nvidia-gpu-exporter", endpoint="http", **own)
    site.add("kube_pod_info", **KSM, **own, node="gpu-1", pod_ip="10.244.3.7", host_ip="192.168.0.3")
    site.pod("train", "gpu-1", 4)
    site.offer("gpu-1", 4)
    return Truth({"present": 24, "free": 0, "taken": 24}, {"ml/train": {"held": 24, "used": 24}})


@alone()
def an_address_and_the_label_cluster_on_the_exporter_only(site: Site) -> Truth:
    """As the default ServiceMonitor: the instance is the address of the exporter's pod."""
    own = {"namespace": "monitoring", "pod": "nvidia-gpu-exporter-x7k2p"}
    for cluster, number in (("east", 1), ("west", 2)):
        site.smi(f"10.244.{number}.7:9835", number, 0.0, cluster=cluster, **own)
        site.add("kube_pod_info", **KSM, **own, node=f"gpu-{number}", pod_ip=f"10.244.{number}.7")
        site.pod(f"pod-{number}", f"gpu-{number}", 1)
        site.offer(f"gpu-{number}", 1)
    holders: dict[str, Mapping[str, Hours]] = {f"ml/pod-{number}": {"held": 6, "unproven": 6} for number in (1, 2)}
    return Truth({"held": 12, "present": 12, "free": NEVER}, holders)


@case()
def a_pool_without_utilization(site: Site) -> Truth:
    site.gpu("n1", 1, "a")
    site.gpu("n2", 2, "b", has_utilization=False)
    site.gpu("n2", 3, "c", ZERO, has_utilization=False)
    holders = {"ml/a": {"held": 6, "used": 6}, "ml/b": {"held": 6, "used": 6}, "ml/c": {"held": 6, "work": NEVER}}
    return Truth({"held": 18, "present": 18}, holders)


@case(24)
def the_utilization_appears_in_the_evening(site: Site) -> Truth:
    labels = {"job": "dcgm", "instance": "n1:9400", "UUID": uuid(1), "exported_pod": "a", "exported_namespace": "ml"}
    site.up("dcgm", "n1:9400")
    site.add("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 0.9, **labels)
    site.add("DCGM_FI_DEV_GPU_UTIL", 90, 18.5, **labels)
    return Truth({"present": (23.5, 24)}, {"ml/a": {"held": (23.5, 24), "used": (23.5, 24)}})


@case()
def virtual_gpus(site: Site) -> Truth:
    """Copies for the pods that share a GPU stand beside the series of the GPU itself."""
    site.gpu("n1", 1)
    site.gpu("n1", 1, "one")
    site.gpu("n1", 2)
    site.gpu("n1", 3, busy=pulses(21600, 10800))
    site.gpu("n1", 3, "half", end=3)
    for number in range(3):
        site.gpu("n1", 2, f"third-{number}", steady(0.3))
    site.gpu("n1", 4, busy=ZERO)
    thirds: dict[str, Mapping[str, Hours]] = {f"ml/third-{number}": {"held": 2} for number in range(3)}
    holders = {"ml/one": {"held": 6, "used": 6}, "ml/half": {"held": 3, "used": 3}, **thirds}
    return Truth({"held": 15, "present": 24, "free": (8.9, 9.05)}, holders)


@case()
def a_gpu_of_two_targets_with_one_holder_after_another(site: Site) -> Truth:
    """Two jobs scrape the same exporter. Nobody shares the GPU, so the use of both pods is known."""
    for job in ("dcgm", "kubernetes-pods"):
        site.gpu("n1", 1, "first", end=2.5, job=job)
        site.gpu("n1", 1, "second", ZERO, start=2.5, job=job)
    holders = {"ml/first": {"held": 2.5, "used": (2.4, 2.55)}, "ml/second": {"held": 3.5, "used": (0, 0.05)}}
    return Truth({"held": 6, "present": 6, "unknown": NEVER}, holders)


@case()
def a_gpu_of_two_targets_of_which_one_names_pods(site: Site) -> Truth:
    """What the pod holds is not in use without a pod."""
    site.gpu("n1", 1, "a", end=3.5)
    site.gpu("n1", 1, busy=ZERO, start=3.5)
    site.gpu("n1", 1, busy=between(site.start, site.start + 3.5 * HOUR), job="kubernetes-pods")
    site.pod("other", "n2", 1)
    site.offer("n1", 1)
    holders = {"ml/a": {"held": 3.5}, "ml/other": {"held": 6}}
    return Truth({"present": 6, "free": (2.4, 2.55)}, holders)


@case()
def time_slicing_that_is_not_full(site: Site) -> Truth:
    """Two GPUs with four replicas each. The exporter names only the last of two pods on the first GPU."""
    site.gpu("n1", 0, "a")
    site.gpu("n1", 1, busy=ZERO)
    for name in "ab":
        site.pod(name, "n1", 1)
    site.offer("n1", 8)
    return Truth({"held": 6, "free": 6, "present": 12}, {"ml/a": {"held": 3}, "ml/b": {"held": 3}})


@case()
def without_uuid(site: Site) -> Truth:
    """metric_relabel_configs drop it."""
    for node in ("n1", "n2"):
        for number in range(3):
            site.gpu(node, number, f"{node}-{number}", UUID="")
        site.gpu(node, 3, f"{node}-3", QUARTER, UUID="")
    holders = {f"ml/n{node}-{number}": {"held": 6, "idle": NEVER} for node in (1, 2) for number in range(3)}
    quarter: dict[str, Mapping[str, Hours]] = {f"ml/n{node}-3": {"held": 6, "idle": (0, 1.55)} for node in (1, 2)}
    return Truth({"held": 48, "present": 48, "free": 0}, {**holders, **quarter})


@case()
def uuid_in_lower_case(site: Site) -> Truth:
    """Mixed hours are told apart, and shared GPUs have their parts."""
    site.gpu("n1", 1, "quarter", QUARTER, UUID="", uuid=uuid(1))
    for number in range(3):
        site.gpu("n1", 2, f"third-{number}", steady(0.3), UUID="", uuid=uuid(2))
    site.gpu("n1", 2, UUID="", uuid=uuid(2))
    thirds: dict[str, Mapping[str, Hours]] = {f"ml/third-{number}": {"held": 2} for number in range(3)}
    return Truth({"held": 12, "present": 12, "free": 0}, {**thirds, "ml/quarter": {"held": 6, "idle": (1.2, 1.55)}})


@alone()
def cluster_on_the_series_of_the_exporter_only(site: Site) -> Truth:
    site.gpu("n1", 1, "a", cluster="east")
    site.gpu("n1", 2, busy=ZERO, cluster="east")
    site.pod("a", "n1", 1)
    return Truth({"present": 12, "free": 6}, {"ml/a": {"held": 6, "used": 6}})


@alone()
def cluster_on_the_series_of_kube_state_metrics_only(site: Site) -> Truth:
    site.gpu("n1", 1, "a")
    site.gpu("n1", 2, busy=ZERO)
    site.pod("a", "n1", 1, cluster="east")
    return Truth({"present": 12, "free": 6}, {"ml/a": {"held": 6, "used": 6}})


@alone()
def clusters_with_another_label_on_kube_state_metrics(site: Site) -> Truth:
    """The label cluster is only on the series of dcgm-exporter. Both clusters have a node n1."""
    for cluster, number in (("east", 1), ("west", 2)):
        site.gpu("n1", number, f"{cluster}-a", cluster=cluster)
        site.gpu(f"{cluster}-2", number + 2, busy=ZERO, cluster=cluster)
        about = {"k8s_cluster": cluster, "instance": f"10.0.{number}.9:8080"}
        for name, node in ((f"{cluster}-a", "n1"), (f"{cluster}-b", f"{cluster}-2")):
            site.pod(name, node, 1, **about)
            site.offer(node, 1, **about)
    holders: dict[str, Mapping[str, Hours]] = {
        f"ml/{cluster}-a": {"held": 6, "used": 6} for cluster in ("east", "west")
    }
    holders |= {f"ml/{cluster}-b": {"held": 6} for cluster in ("east", "west")}
    told = "^pods that only kube-state-metrics shows on n1: several clusters have nodes of these names"
    return Truth({"held": 24, "present": 24, "free": NEVER}, holders, (told,))


@alone()
def clusters_with_another_label_on_the_exporter(site: Site) -> Truth:
    """The label cluster is only on the series of kube-state-metrics."""
    for cluster, number in (("east", 1), ("west", 2)):
        site.gpu("n1", number, f"{cluster}-a", instance=f"10.0.{number}.1:9400", k8s_cluster=cluster)
        site.gpu(f"{cluster}-2", number + 2, busy=ZERO, k8s_cluster=cluster)
        for name, node in ((f"{cluster}-a", "n1"), (f"{cluster}-b", f"{cluster}-2")):
            site.pod(name, node, 1, cluster=cluster)
            site.offer(node, 1, cluster=cluster)
    holders: dict[str, Mapping[str, Hours]] = {
        f"ml/{cluster}-a": {"held": 6, "used": 6} for cluster in ("east", "west")
    }
    holders |= {f"ml/{cluster}-b": {"held": 6} for cluster in ("east", "west")}
    return Truth({"held": 24, "present": 24, "free": NEVER}, holders)


@alone()
def clusters_of_which_one_has_another_label(site: Site) -> Truth:
    """Both exporters of the second cluster have it, so its label cluster is empty."""
    for number, about in ((1, {"cluster": "east"}), (2, {"k8s_cluster": "west"})):
        site.gpu("n1", number, f"a{number}", **about)
        site.gpu("n2", number + 2, busy=ZERO, **about)
        site.pod(f"a{number}", "n1", 1, **about)
        site.pod(f"b{number}", "n2", 1, **about)
        for node in ("n1", "n2"):
            site.offer(node, 1, **about)
    holders: dict[str, Mapping[str, Hours]] = {f"ml/a{number}": {"held": 6, "used": 6} for number in (1, 2)}
    holders |= {f"ml/b{number}": {"held": 6} for number in (1, 2)}
    return Truth({"held": 24, "present": 24, "free": NEVER}, holders)


@case()
def gpu_exporter_on_half_of_the_nodes(site: Site) -> Truth:
    """dcgm-exporter is on the other half."""
    for number in range(4):
        site.gpu(f"n{number}", number, f"pod-{number}")
        site.add("gpu_up", job="gpu-exporter", instance=f"m{number}:9401", node=f"m{number}", uuid=uuid(number + 10))
    holders: dict[str, Mapping[str, Hours]] = {f"ml/pod-{number}": {"held": 6, "used": 6} for number in range(4)}
    told = r"data of gpu-exporter, which covers only 4 GPUs, or a part of the period: `gpu-exporter digest`"
    return Truth({"held": 24, "present": 24}, holders, (told,))


@case()
def gpu_exporter_on_trial_on_one_node(site: Site) -> Truth:
    for number in range(4):
        site.gpu(f"n{number}", number, f"pod-{number}")
    site.add("gpu_up", job="gpu-exporter", instance="n0:9401", node="n0", uuid=uuid(0))
    holders: dict[str, Mapping[str, Hours]] = {f"ml/pod-{number}": {"held": 6, "used": 6} for number in range(4)}
    told = r"data of gpu-exporter, which covers only 1 GPUs, or a part of the period: `gpu-exporter digest`"
    return Truth({"held": 24, "present": 24}, holders, (told,))


@case()
def mig_profiles_of_all_boards(site: Site) -> Truth:
    """The boards of these profiles have 4, 7 or 2 slices; an instance without a profile has one of seven."""
    given = [
        ("4g.96gb", RTX, 6), ("1g.24gb", RTX, 1.5), ("2g.48gb", RTX, 3), ("1g.6gb+me", "NVIDIA A30", 1.5),
        ("1g.10gb+me", "NVIDIA H100 80GB HBM3", 6 / 7), ("1g.24gb", "NVIDIA RTX PRO 5000 Blackwell", 3),
        ("", "NVIDIA H100 80GB HBM3", 6 / 7),
    ]  # fmt: skip
    for number, (profile, model, _) in enumerate(given):
        labels = {"GPU_I_ID": "1", "GPU_I_PROFILE": profile, "modelName": model}
        site.gpu("n1", number, f"pod-{number}", has_utilization=False, **labels)
    holders = {f"ml/pod-{number}": {"held": hours, "used": hours} for number, (_, _, hours) in enumerate(given)}
    return Truth({"present": 42}, holders)


@case()
def mig_strategy_single(site: Site) -> Truth:
    """nvidia.com/gpu is an instance, and the exporter names no pods."""
    for number in range(7):
        labels = {"GPU_I_ID": str(number + 7), "GPU_I_PROFILE": "1g.10gb"}
        site.gpu("n1", 1, has_utilization=False, **labels)
        site.pod(f"pod-{number}", "n1", 1)
    holders = {f"ml/pod-{number}": {"held": 6 / 7, "idle": NEVER} for number in range(7)}
    return Truth({"held": 6, "present": 6, "free": 0}, holders)


@case()
def a_node_of_which_half_is_seen(site: Site) -> Truth:
    """Eight GPUs. The exporter shows the four of one pod; another pod has the rest. Pods that share four look alike."""
    for number in range(4):
        site.gpu("n1", number, "seen")
    for name in ("seen", "unseen"):
        site.pod(name, "n1", 4)
    holders: dict[str, Mapping[str, Hours]] = {"ml/seen": {"held": (12, 24), "idle": NEVER}}
    told = r"the use of 24\.0 GPU-hours of GPUs that several pods share"
    return Truth({"held": (24, 48)}, {**holders, "ml/unseen": {"held": (0, 24), "work": NEVER}}, (told,))


@case()
def kube_state_metrics_replaced_each_half_hour(site: Site) -> Truth:
    """Prometheus renames its labels, and the others name its own pod."""
    site.smi("n1:9835", 1, node="n1")
    for turn in range(13):
        own = {"job": "ksm", "instance": f"10.0.0.{turn}:8080", "namespace": "monitoring", "pod": f"ksm-{turn}"}
        given = {**own, "exported_namespace": "ml", "exported_pod": "train"}
        start, end = turn / 2 - 0.25, turn / 2 + 0.25
        site.up(own["job"], own["instance"], start=start, end=end)
        site.add(
            "kube_pod_container_resource_requests",
            1,
            start,
            end,
            exported_node="n1",
            node="n9",
            container="ksm",
            exported_container="main",
            resource="nvidia_com_gpu",
            **given,
        )
        site.add("kube_pod_status_phase", 1, start, end, phase="Running", **given)
    return Truth({"present": 6, "free": 0}, {"ml/train": {"held": 6, "used": 6}})


@case()
def two_kube_state_metrics_at_once(site: Site) -> Truth:
    """Both report each pod: one of 15 minutes, and one that is not scheduled for its first half hour."""
    site.smi("n1:9835", 1, node="n1")
    for instance in ("10.0.0.1:8080", "10.0.0.2:8080"):
        site.up("kube-state-metrics", instance)
        site.pod("short", "n1", 1, 0.5, 0.75, instance=instance, uid="1")
        site.pod("late", "", 1, 1.0, 2.0, phase="Pending", instance=instance, uid="2")
        site.pod("late", "n1", 1, 2.0 + 60 / HOUR, 4.0, instance=instance, uid="2")
    return Truth({"present": 6}, {"ml/short": {"held": 0.25}, "ml/late": {"held": 2}})


@case()
def a_pod_name_that_is_used_again(site: Site) -> Truth:
    """As in a StatefulSet. The second pod of this name has two GPUs, and begins within the hour of the first."""
    site.up("kube-state-metrics", "10.0.0.9:8080")
    for number in (1, 2):
        site.smi("n1:9835", number, node="n1")
    site.pod("train-0", "n1", 1, 0.0, 1.5, uid="1")
    site.pod("train-0", "n1", 2, 1.5, 3.0, uid="2")
    return Truth({"present": 12}, {"ml/train-0": {"held": 4.5}})


@case()
def pods_of_four_minutes(site: Site) -> Truth:
    """They follow each other on a node whose exporter names no pods."""
    for number in (1, 2):
        site.smi(f"n{number}:9835", number, node=f"n{number}")
    site.pod("long", "n2", 1)
    for turn in range(90):
        site.pod(f"job-{turn}", "n1", 1, turn / 15, (turn + 1) / 15, namespace="ci")
    return Truth({"held": 12, "present": 12, "free": 0})


@case(8)
def a_server_that_was_down(site: Site) -> Truth:
    """For 20 minutes of each second hour. Nothing marks the end of the series, so `up` seems to last longer."""
    site.down = tuple((hour + 1 / 3, hour + 2 / 3) for hour in (1, 3, 5))
    site.gpu("n1", 1, "a")
    return Truth({"present": 7}, {"ml/a": {"held": 7, "used": 7}}, ("^1.0 GPU-hours between the first and the last",))


# Who holds it.


@case()
def a_completed_pod_that_the_kubelet_still_names(site: Site) -> Truth:
    site.gpu("n1", 1, "done", between(site.start, site.start + HOUR))
    site.pod("done", "n1", 1, end=1)
    given = {**KSM, "namespace": "ml", "pod": "done"}
    site.add("kube_pod_status_phase", 0, 61 / 60, phase="Running", **given)
    site.add("kube_pod_status_phase", 1, 61 / 60, phase="Succeeded", **given)
    return Truth({"present": 6, "free": (4.9, 5.1)}, {"ml/done": {"held": 1, "used": 1, "idle": (0, 0.05)}})


@case()
def own_pod_without_up(site: Site) -> Truth:
    """The server has the metrics only, and the DaemonSet has its own name."""
    site.without_up("dcgm", "n1:9400")
    for number in range(4):
        site.gpu("n1", number, busy=ZERO, pod="gpu-metrics-x7k2p")
    return Truth({"present": 24, "held": 0})


@case()
def own_pod_of_any_name(site: Site) -> Truth:
    """The label pod of `up` names the exporter's own pod."""
    for number in range(3):
        site.gpu("n1", number, busy=ZERO, pod="prober-x7k2p")
    site.gpu("n1", 3, busy=ZERO, pod="train", namespace="ml")
    return Truth({"present": 24}, {"ml/train": {"idle": 6}})


@case()
def honor_labels_on_one_of_two_targets(site: Site) -> Truth:
    site.up("dcgm", "n2:9400", namespace="gpu-operator", pod="dcgm-exporter-n2")
    site.gpu("n1", 1, "a")
    site.gpu("n2", 2, pod="b", namespace="ml")
    return Truth({"free": 0, "present": 12}, {"ml/a": {"held": 6, "used": 6}, "ml/b": {"held": 6, "used": 6}})


@case()
def pods_that_reserve_gpus(site: Site) -> Truth:
    """Nobody sees here how pods with fractions of these GPUs used them."""
    for number, namespace in enumerate(("kai-resource-reservation", "runai-reservation")):
        site.gpu("n1", number, f"gpu-reservation-{number}", ZERO, exported_namespace=namespace)
    return Truth({"held": 12, "unknown": 12, "idle": 0, "unproven": 0})


@case()
def a_cluster_in_which_nobody_holds_a_gpu(site: Site) -> Truth:
    name = site.cluster
    for cluster in ("east", "west"):
        site.cluster = f"{name}-{cluster}"
        site.gpu("n1", 1, "a" if cluster == "east" else "", WORKS if cluster == "east" else ZERO)
        site.pod(
            "a" if cluster == "east" else "pending",
            "n1" if cluster == "east" else "",
            1,
            phase="Running" if cluster == "east" else "Pending",
        )
        site.offer("n1", 1)
    return Truth({"present": 12, "free": 6, "taken": 6}, {"ml/a": {"held": 6, "used": 6}})


@case()
def a_cluster_without_a_running_pod(site: Site) -> Truth:
    site.gpu("n1", 1, busy=ZERO)
    site.pod("done", "n1", 1, phase="Succeeded")
    site.pod("pending", "", 1, phase="Pending")
    return Truth({"held": 0})


@case()
def gpus_in_use_without_labels(site: Site) -> Truth:
    """By people who log in, or because the kubelet's socket is not mounted there."""
    site.gpu("n1", 1, "a")
    for number in range(2, 6):
        site.gpu("n2", number)
    return Truth(
        {"present": 30, "free": 0}, {"ml/a": {"held": 6}}, ("24.0 GPU-hours without a pod or job, in use or unknown",)
    )


# What the server has.


@case(3)
def one_long_label(site: Site) -> Truth:
    for number in range(3):
        site.gpu("n1", number, f"pod-{number}")
    site.gpu("n1", 4, hpc_job="9" * 10_000)
    site.up("blackbox", "https://x/?" + "q" * 9000)
    holders: dict[str, Mapping[str, Hours]] = {f"ml/pod-{number}": {"held": 3} for number in range(3)}
    return Truth({"present": 9}, holders, ("series that cannot be read: its label hpc_job has more than 8,000 char",))


@case(24)
def an_exporter_for_four_of_each_six_hours(site: Site) -> Truth:
    """Nodes that are there at night, and at no moment at which a report might look every six hours."""
    for start in (1, 7, 13, 19):
        site.up("dcgm", "n1:9400", start=start, end=start + 4)
        site.gpu("n1", 1, f"pod-{start}", start=start, end=start + 4)
    holders: dict[str, Mapping[str, Hours]] = {f"ml/pod-{start}": {"held": 4, "used": 4} for start in (1, 7, 13, 19)}
    return Truth({"held": 16, "present": 16}, holders)


@case()
def an_exporter_that_ended_minutes_before_the_end(site: Site) -> Truth:
    site.up("dcgm", "n1:9400", end=5.9)
    site.gpu("n1", 1, "a", end=5.9)
    return Truth({"present": 5.9}, {"ml/a": {"held": 5.9, "used": 5.9}})


@pytest.mark.parametrize("name", CASES)
def test_a_site(name: str, sites: tuple[str, Mapping[str, Truth]], tmp_path: Path) -> None:
    check_case(name, CASES[name], sites, tmp_path / "out")


@pytest.mark.parametrize("name", ALONE)
def test_a_site_in_a_server_of_its_own(name: str, tmp_path: Path) -> None:
    site = Site(ALONE[name].hours, "", ALONE[name].interval)
    truth = ALONE[name].build(site)
    write_blocks(tmp_path, site.lines)
    with Processes(tmp_path) as processes:
        found = report(prometheus(processes, tmp_path).url, ALONE[name].hours, tmp_path / "out", *ALONE[name].flags)
    check(found, truth)


@pytest.mark.parametrize("more", [0, 1])
def test_a_report_of_gpu_exporter_names_the_gpus_that_only_another_exporter_shows(more: int, tmp_path: Path) -> None:
    site = Site(6)
    for number in range(20 + more):
        site.gpu("n1", number)
    for number in range(20):
        site.add("gpu_up", job="gpu-exporter", instance="n1:9401", node="n1", uuid=uuid(number))
    held = {"job": "gpu-exporter", "instance": "n1:9401", "node": "n1", "namespace": "ml", "scheduler": "kubernetes"}
    site.add("gpu_tenant_held_gpu_seconds_total", lambda at: 20.0 * (at - site.start), **held)
    write_blocks(tmp_path, site.lines)
    with Processes(tmp_path) as processes:
        found = report(prometheus(processes, tmp_path).url, 6, tmp_path / "out")
    assert found["total"]["held_hours"] == pytest.approx(120, rel=0.01)
    told = [line for line in found["left_out"] if "without gpu-exporter" in line]
    assert told == ["1 GPUs without gpu-exporter (dcgm-exporter shows them): install it there"] * more


def test_kept_answers_of_one_tenant_are_not_shown_to_another(tmp_path: Path) -> None:
    """As in Mimir, a header chooses the tenant behind one address."""
    with (
        Processes(tmp_path) as processes,
        serve_tenants({each: of_tenant(processes, tmp_path / each, each) for each in "ab"}) as url,
    ):
        flags = [("--source.header", f"X-Scope-OrgID: {each}", f"--keep={tmp_path / 'kept'}") for each in "abab"]
        found = [report(url, 1, tmp_path / "out", *each)["holders"][0]["holder"] for each in flags]
    assert found == ["ml/of-a", "ml/of-b", "ml/of-a", "ml/of-b"]


def of_tenant(processes: Processes, directory: Path, name: str) -> str:
    site = Site(1)
    site.gpu("n1", 1, f"of-{name}")
    write_blocks(directory, site.lines)
    return prometheus(processes, directory).url


@contextmanager
def serve_tenants(urls: Mapping[str, str]) -> Iterator[str]:
    """A server that answers as one of these by the header of the tenant."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = self.rfile.read(int(self.headers["Content-Length"]))
            kind = {"Content-Type": self.headers["Content-Type"]}
            request = urllib.request.Request(urls[self.headers["X-Scope-OrgID"]] + self.path, asked, kind)
            with urllib.request.urlopen(request) as answer:
                text = answer.read()
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
