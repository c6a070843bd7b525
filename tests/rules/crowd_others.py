"""Two clusters with dcgm-exporter or nvidia_gpu_exporter, or with tools that read dcgm-exporter's metrics."""

from __future__ import annotations

from collections.abc import Iterator

from tests.rules.crowd_ours import CLUSTERS, NODES, dimmed, level
from tests.rules.world import Activity, Node, World, always, between, until

NOISE = 0.0008  # of an idle GPU's profiling counters; the golden file has 0


def compatible(world: World) -> None:
    """gpu-exporter for tools that read dcgm-exporter's metrics. dcgm-exporter still reports one GPU of a node."""
    for c, cluster in enumerate(CLUSTERS):
        for n, name in enumerate(NODES):
            for second in (False, True):
                target = {"cluster": cluster, "instance": f"{name}-{'second' if second else 'first'}"}
                node = Node(world, name, gpus=4, target=target)
                part = 0.5 if second else 1
                for index, uuid in enumerate(node.uuids):
                    gpu = {"gpu": str(index), "uuid": uuid}
                    amount = level(c, n, index) * part
                    for metric, factor in (
                        ("gpu_utilization_ratio", 1.0),
                        ("gpu_memory_used_bytes", 2.0**30),
                        ("gpu_power_watts", 700.0),
                        ("gpu_temperature_celsius", 90.0),
                        ("gpu_sm_clock_hertz", 2e9),
                        ("gpu_graphics_active_ratio", 0.9),
                        ("gpu_tensor_active_ratio", 0.3),
                    ):
                        if index != 1 or not metric.endswith("_active_ratio"):
                            node.put(metric, gpu, amount * factor)
                node.put("gpu_info", {"gpu": "0", "uuid": node.uuids[0], "name": "Tesla V100-too"}, 1)
                for number, profile in (("1", "1g.10gb"), ("12", "2g.20gb"), ("13", "1g.10gb")):
                    mig = f"{number}/0"
                    place = {"gpu": "1", "uuid": node.uuids[1], "mig": mig, "mig_uuid": f"MIG-{node.uuids[1]}-{mig}"}
                    amount = level(c, n, int(number)) * part
                    node.put("gpu_mig_info", {**place, "profile": profile}, 1)
                    node.put("gpu_mig_memory_used_bytes", place, amount * 2.0**30)
                    node.put("gpu_mig_graphics_active_ratio", place, amount)
                    node.put("gpu_mig_tensor_active_ratio", place, amount / 3)
                node.hold(0, always(0.5), pod=f"p{c}{n}")
                node.hold(1, always(0.5), mig="1/0", share=1 / 7, pod=f"slice-{c}")
                node.hold(1, always(0.5), mig="12/0", share=2 / 7, job_id="42")
                for pod in ("half-0", "half-1"):
                    node.hold(2, always(0.5), share=0.5, pod=pod)
                for job in ("50", "51"):
                    node.hold(1, always(0.5), mig="13/0", share=1 / 14, job_id=job)
            if c == n:
                real = {"job": "whatever", "cluster": cluster, "UUID": f"GPU-{name}-3", "gpu": "3"}
                for metric in ("DEV_GPU_UTIL", "DEV_FB_USED", "DEV_POWER_USAGE", "DEV_GPU_TEMP", "DEV_SM_CLOCK"):
                    world.put(f"DCGM_FI_{metric}", real, 7)
                for metric in ("PROF_GR_ENGINE_ACTIVE", "PROF_PIPE_TENSOR_ACTIVE"):
                    world.put(f"DCGM_FI_{metric}", real, 0.7)


def dcgm(world: World) -> None:
    """dcgm-exporter alone, on nodes of the same names."""
    for c, cluster in enumerate(CLUSTERS):
        for n, name in enumerate(NODES):
            for second in (False, True):
                target = {"job": "dcgm-exporter", "cluster": cluster, "instance": f"{name}-{second}"}
                for index, activity, pod, instance in dcgm_units(c, n):
                    labels = {"UUID": f"GPU-{name}-{index}", "gpu": str(index), "modelName": "NVIDIA A100-SXM4-80GB"}
                    labels |= {"Hostname" if n else "hostname": name}
                    holder = dict(zip(("namespace", "pod", "container"), (*pod.split("/"), "main"), strict=True))
                    if index % 2:  # as without honor_labels
                        holder = {f"exported_{key}": value for key, value in holder.items()}
                        holder |= {"namespace": "monitoring", "pod": "dcgm-exporter-x", "container": "exporter"}
                    number, _, profile = instance.partition(" ")
                    if second and profile == "1g.6gb":
                        profile = "2g.20gb"  # an older layout
                    labels |= {**target, **holder, "GPU_I_ID": number, "GPU_I_PROFILE": profile}
                    seen = dimmed(activity, second)
                    world.put("DCGM_FI_PROF_GR_ENGINE_ACTIVE", labels, seen)
                    # The counter of GPU 7 stays at 0 while the GPU works. GPU 3 has MIG instances, so its utilization is absent.
                    work = always(0.5 if not second else 0.0) if index == 7 else seen
                    if index == 7 and c:
                        work = until(97 if n else 95, always(0.5), always(0.0))
                    if not number and index != 3:
                        world.put("DCGM_FI_DEV_GPU_UTIL", labels, lambda t, work=work: _percent(work(t)))


def dcgm_units(c: int, n: int) -> Iterator[tuple[int, Activity, str, str]]:
    """GPU, its activity, its holder, and the instance with its profile."""

    def works(gpu: int) -> Activity:
        return lambda t: level(c, n, gpu) + 0.01 * (t % 7)

    def idle_since(minute: int) -> Activity:
        return until(minute, always(0.3), always(NOISE))

    def away(begin: int, end: int, activity: Activity) -> Activity:
        return between(begin, end, always(None), activity)

    nobody = "monitoring/dcgm-exporter-x"
    yield 0, works(0), f"{('ml', 'dev')[n]}/train-0", ""
    yield 1, always(0.0) if c else idle_since(20), f"ml/pair-{n}", ""
    yield 2, idle_since(25 + 5 * c), f"ml/pair-{n}" if c else nobody, ""
    yield 3, always(0.0), nobody, ""
    yield 3, away(94 - 2 * n, 97, always(NOISE)), f"ml/slice-{n}", ("1 1g.10gb", "2 2g.20gb")[n]
    yield 3, works(3), f"ml/slice-{n}", ("5 3g.40gb", "6 4g.40gb")[n]
    yield 4, works(4) if c else away(93, 97, always(0.0)), "ml/next-0", ("3 1g.6gb", "4 2g.12gb")[n]
    yield 5, away(60, 80, always(0.0)), "ml/next-0", ("3 4g.24gb", "0 7g.80gb")[n]
    yield 5, works(5), "ml/next-0", "9 1x.9gb"
    yield 6, until(30 if n else 60, always(0.1), always(None)), nobody, ""
    yield 7, always(0.0), "ml/zero-0" if c else f"ml/pair-{n}", ""
    yield 8, always(1.5), "ml/zero-0", ""


def _percent(value: float | None) -> float | None:
    return None if value is None else round(100 * value)  # as the driver reports it


def instances(world: World) -> None:
    """MIG instances of A100: gpu-exporter reports their holders, and dcgm-exporter their activity."""
    for c, cluster in enumerate(CLUSTERS):
        for n, name in enumerate(("m1", "m2")):
            node = Node(world, name, target={"cluster": cluster}, model="NVIDIA A100-SXM4-80GB")
            more = {"cluster": cluster, "instance": f"{name}-second"}
            again = Node(world, name, target=more, model="NVIDIA A100-SXM4-80GB")
            for number, supported in (("1", 0), ("2", 0), ("3", 1), ("4", 0)):
                mig = f"{number}/0"
                place = {"gpu": "0", "uuid": node.uuids[0], "mig": mig, "mig_uuid": f"MIG-{node.uuids[0]}-{mig}"}
                node.put("gpu_mig_activity_supported", place, supported)
                again.put("gpu_mig_activity_supported", place, 1 if number == "4" else supported)
                held = always(level(c, n, 3)) if supported else always(None)
                node.hold(0, held, mig=mig, share=1 / 7, start=3 * n, pod=f"a100-{number}")
                activity = always(0.0) if number in "14" else always(level(c, n, int(number)))
                labels = {
                    "job": "dcgm-exporter",
                    "cluster": cluster,
                    "Hostname": name,
                    "UUID": node.uuids[0],
                    "gpu": "0",
                }
                labels |= {"GPU_I_ID": number, "GPU_I_PROFILE": "1g.10gb", "modelName": "NVIDIA A100-SXM4-80GB"}
                labels |= {"namespace": "ml", "pod": f"a100-{number}", "container": "main"}
                world.put("DCGM_FI_PROF_GR_ENGINE_ACTIVE", labels, activity)
                asked = {"job": "kube-state-metrics", "cluster": cluster, "namespace": "ml", "pod": f"a100-{number}"}
                asked |= {"container": "main", "node": name, "resource": "nvidia_com_mig_1g_10gb"}
                world.put("kube_pod_container_resource_requests", asked, 1)


def nvidia_smi(world: World) -> None:
    """nvidia_gpu_exporter alone: a node with one pod that holds all of it, a node with two pods, and a free node."""
    for c, cluster in enumerate(CLUSTERS):
        for n, name in enumerate((*NODES, "n3", "n4", "n5")):
            for second in (False, True):
                target = {
                    "job": "nvidia-gpu-exporter",
                    "cluster": cluster,
                    "node": name,
                    "instance": f"{name}-{second}",
                }
                for index in range(2):
                    gpu = {**target, "uuid": f"00000000-0000-0000-0000-0000000000{n}{index}"}
                    works = always(1.0) if (c, n, index) == (1, 0, 0) else _swinging(level(c, n, index))
                    if (c, n, index) == (1, 0, 1):
                        works = between(70, 85, always(None), works)
                    activity = works if (n + index) % 2 else until((84, 92)[c], works, always(0.0))
                    world.put("nvidia_smi_utilization_gpu_ratio", gpu, dimmed(activity, second))
                    world.put("nvidia_smi_gpu_info", {**gpu, "name": f"NVIDIA L{4 + index}" + "-too" * second}, 1)


def pods_of_nvidia_smi(world: World) -> None:
    for c, cluster in enumerate(CLUSTERS):
        for instance in ("k1", "k2"):
            state = {"job": "kube-state-metrics", "cluster": cluster, "instance": instance}
            again = instance == "k2"
            world.put("kube_node_status_allocatable", {**state, "node": "n4", "resource": "cpu"}, 8)
            for name in (*NODES, "n3", "n5"):
                offered = {**state, "node": name, "resource": "nvidia_com_gpu"}
                world.put("kube_node_status_allocatable", offered, 0 if again else 2)
                world.put("kube_node_labels", {**state, "node": name, "label_node_pool": f"pool-{name}"}, 1)
            for name, namespace, pod, containers, phase in (
                ("n1", ("ml", "dev")[c], "whole-0", {"main": 2}, "Running"),
                ("n2", "ml", "one-0", {"main": 1}, "Running"),
                ("n2", "ml", "two-0", {"main": 1 + c, "second": 0}, "Running"),
                ("n3", "ml", "done-0", {"main": 2}, "Succeeded"),
                ("n3", "dev", "plain-0", {"main": 0}, "Running"),
                ("n5", "ml", "half-0", {"main": 1}, "Running"),
                ("n5", "dev", "done-0", {"main": 1}, "Running"),
            ):
                named = {**state, "namespace": namespace, "pod": pod}
                world.put("kube_pod_start_time", named, 600 * c + (0 if again else 60))
                world.put("kube_pod_status_phase", {**named, "phase": phase}, 0 if again else 1)
                if phase != "Running":
                    world.put("kube_pod_status_phase", {**named, "phase": "Running"}, 0)
                queue = {"label_kueue_x_k8s_io_queue_name": f"q-{name}"}
                world.put("kube_pod_labels", {**named, "label_team": f"team-{c}", **queue}, 1)
                owner = {**named, "workload": f"of-{pod}", "workload_type": "job"}
                world.put("namespace_workload_pod:kube_pod_owner:relabel", owner, 1)
                for container, gpus in containers.items():
                    asked = {**named, "container": container, "node": name, "resource": "nvidia_com_gpu"}
                    world.put("kube_pod_container_resource_requests", asked, 0 if again else gpus)
                    world.put("kube_pod_container_resource_requests", {**asked, "resource": "cpu"}, 2)


def both_of_nvidia_smi(world: World) -> None:
    """gpu-exporter runs on one of these nodes too."""
    node = Node(world, "n3", target={"cluster": "b"}, uuid="GPU-00000000-0000-0000-0000-00000000002{index}")
    node.hold(0, always(0.0), pod="known-0")


def _swinging(mean: float) -> Activity:
    return lambda t: mean * (2 if t % 9 == 0 else 1)
