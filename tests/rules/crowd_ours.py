"""Two clusters with gpu-exporter: nodes, pods, jobs and GPUs of the same names, and two targets for each."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.rules.world import Activity, Node, World, always, between, throttled, until

MINUTES = 99
CLUSTERS, NODES = ("a", "b"), ("n1", "n2")


def ours(world: World) -> None:
    """gpu-exporter on every node, with two targets: the second one has observed less, and some values differ."""
    for c, cluster in enumerate(CLUSTERS):
        for n, name in enumerate(NODES):
            for second in (False, True):
                node = Node(
                    world,
                    name,
                    gpus=10,
                    target={"cluster": cluster, "instance": f"{name}-{'second' if second else 'first'}"},
                    model=("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")[c],
                    sampled=lambda t, late=second: 60.0 * t - (50 if late else 0),
                    interval=20 if second else 1,
                    gpu_up={
                        5: between(90, MINUTES, always(0.0 if c and not n else 1.0), always(1.0)),  # lost while held
                        6: between(90, MINUTES, always(0.0 if n and not c else 1.0), always(1.0)),
                        7: between(90, MINUTES, always(0.0 if n and (c or not second) else 1.0), always(1.0)),
                        8: until(60 if n else 30, always(1.0), always(None)),  # its series end
                        9: until(60 if n else 70, always(1.0), always(None)),
                    },
                    driver_up=_of(second, 1.0, 0.0),
                    expected=8 if not second else 0,
                )
                hardware(node, c, n, second)
                holders(node, c, n, second)
                tenants(node, c, n, second)


def dead(world: World) -> None:
    """A node whose only GPU is held, but does not answer."""
    node = Node(world, "n3", target={"cluster": "b"}, gpu_up={0: always(0.0)})
    node.hold(0, always(None), pod="waits-0")
    world.put("kube_node_labels", {"cluster": "b", "node": "n3", "label_node_pool": "third"}, 1)


def _of(second: bool, first: float, other: float) -> Callable[[int], float | None]:
    return always(other if second else first)


def dimmed(activity: Activity, second: bool) -> Activity:
    """The activity that the second target reports: half of it, and no value in one minute of twenty."""

    def seen(t: int) -> float | None:
        value = activity(t)
        return value if not second or value is None else None if t % 20 == 7 else value / 2

    return seen


def holders(node: Node, c: int, n: int, second: bool) -> None:
    def hold(gpu: int, activity: Activity, *, start: int = 0, units: float = 1, share: float = 1, **more: str) -> None:
        info = {key: more.pop(key) for key in ("resource", "user", "account", "partition", "qos") if key in more}
        if second and "user" in info:
            info["user"] += "-too"
        node.hold(
            gpu,
            dimmed(activity, second),
            start=start,
            units=units - second,
            share=share * (0.5 if second else 1),
            begun=60.0 * start - 30 * second,
            info=info,
            **more,
        )
        place = {"gpu": str(gpu), "uuid": node.uuids[gpu]}
        if mig := more.pop("mig", ""):
            place |= {"mig": mig, "mig_uuid": f"MIG-{node.uuids[gpu]}-{mig}"}
        pod = {"scheduler": "kubernetes", "namespace": "ml", "container": "main"}
        who = {"scheduler": "slurm", **more} if "job_id" in more else {**pod, **more}
        amount = level(c, n, gpu) * (0.5 if second else 1)
        node.put(
            "gpu_allocation_memory_used_bytes", {**place, **who}, lambda t: 1e9 * amount * {50: 3, 80: 2}.get(t, 1)
        )
        node.put(
            "gpu_allocation_energy_joules_total",
            {**place, **who},
            lambda t: (6000.0 * t + 900 * max(0, t - 95)) * amount,
        )

    def mean(gpu: int) -> Activity:
        return lambda _: level(c, n, gpu)

    third = {"user": "u2", "account": "third", "partition": "long", "qos": "low"}
    hold(8 if n else 9, mean(3), job_id="43", **third)
    slurm = {"user": f"u{c}", "account": ("phys", "bio")[c], "partition": "gpu", "qos": ("low", "high")[c]}
    hold(0, always(0.0) if c == 0 else lambda _: 0.05 + 0.04 * n, units=2, job_id="42", **slurm)
    hold(1, mean(1), namespace=("ml", "dev")[n], pod="train-0", resource="nvidia.com/gpu")
    hold(
        2,
        always(0.0) if c == n else mean(2),
        share=1 / 7,
        mig="1/0",
        pod=f"slice-{n}",
        resource="nvidia.com/mig-1g.10gb",
    )
    hold(2, mean(2), share=2 / 7, mig="2/0", pod=f"slice-{n}", container="second", resource="nvidia.com/mig-2g.20gb")
    hold(4, always(0.0), units=2, pod=f"pair-{n}", start=5 * n, resource="nvidia.com/gpu.shared")
    hold(5, always(0.0) if c else mean(5), units=2, pod=f"pair-{n}", start=5 * n, resource="nvidia.com/gpu.shared")
    hold(6, lambda _: None, share=0.5, pod="half-0", namespace="ml")
    hold(6, lambda t: 0.0 if t < 95 + 3 * n else 0.3, share=0.25 + n / 2, pod="quarter-0", namespace="ml")
    # Active 400 and 900 s ago, which the second target did not observe.
    node.free(3, active=lambda t: 60.0 * t - (400 if n else 900) - 3000 * second, allocated=0)
    node.free(7, active=lambda t: 60.0 * t - (60 if c else 2000))
    for gpu in (1, 5):
        active = {"gpu": str(gpu), "uuid": node.uuids[gpu]}
        node.put("gpu_last_active_timestamp_seconds", active, lambda t: 60.0 * t)


def tenants(node: Node, c: int, n: int, second: bool) -> None:
    part = 0.5 if second else 1
    for place in ({"namespace": "ml"}, {"account": "phys", "user": "u0"}, {"account": "phys", "user": "u1"}):
        labels = {"scheduler": "slurm" if "account" in place else "kubernetes", **place}
        size = 1 + level(c, n, len(labels) + labels.get("user", "").count("1"))
        for kind, share in (("held", 1.0), ("known", 0.8), ("busy", 0.2), ("idle", 0.5)):
            node.put(
                f"gpu_tenant_{kind}_gpu_seconds_total",
                labels,
                lambda t, share=share, size=size: (
                    (60.0 * t * share + 20 * max(0, t - 96)) * size * part + (120 * t if t >= 43 else 0)
                ),
            )
        node.put(
            "gpu_tenant_energy_joules_total",
            labels,
            lambda t, size=size: (6e3 * t + 3e3 * max(0, t - 96)) * size * part,
        )


def hardware(node: Node, c: int, n: int, second: bool) -> None:
    """Faults of one GPU on one of the four nodes, reported by one of the two targets."""
    ill = (c, n, second) == (0, 1, False)
    for index, uuid in enumerate(node.uuids):
        gpu = {"gpu": str(index), "uuid": uuid}
        at = between(20, 90, always(1.0 if ill and index == 1 else 0.0), always(0.0))
        node.put("gpu_ecc_errors_total", {**gpu, "severity": "uncorrected"}, at)
        node.put("gpu_ecc_errors_total", {**gpu, "severity": "corrected"}, 5)
        for condition, severity in (("recovery_action", "unusable"), ("row_remap_pending", "degraded")):
            labels = {**gpu, "condition": condition, "severity": severity}
            while_ill = always(1.0 if ill and index == 1 else None)
            node.put("gpu_condition", labels, between(20, 90, while_ill, always(None)))
        for reason, share in (
            ("thermal", 0.3),
            ("sw_thermal", 0.4),
            ("hw_power_brake", 0.6),
            ("board_limit", 0.0),
            ("power_cap", 0.9),
        ):
            throttled(node, index, reason, always(share if ill and index in (1, 2) else 0.01 * c))
    if (c, n) == (0, 1):
        for index in (2, 3):
            gpu = {"gpu": str(index), "uuid": node.uuids[index]}
            for xid, kind in (("79", "hardware"), ("13", "application")):
                at = 60.0 if second else 3000.0 + 60 * index
                labels = {**gpu, "xid": xid, "class": kind}
                node.put("gpu_xid_last_timestamp_seconds", labels, between(55, 70, always(at), always(None)))


def kubernetes(world: World) -> None:
    """Two targets of kube-state-metrics, as during its rollout, the rule of kube-prometheus, and the site's prices."""
    for c, cluster in enumerate(CLUSTERS):
        state = {"job": "kube-state-metrics", "cluster": cluster}
        for instance in ("k1", "k2"):
            again = instance == "k2"
            for n, node in enumerate(NODES):
                place = {**state, "instance": instance, "node": node}
                world.put("kube_node_labels", {**place, "label_node_pool": ("small", "large")[n] + "-too" * again}, 1)
                world.put("kube_node_status_allocatable", {**place, "resource": "nvidia_com_gpu"}, 0 if again else 8)
                world.put("kube_node_status_condition", {**place, "condition": "Ready", "status": "true"}, 1)
                for namespace, pod in ((("ml", "dev")[n], "train-0"), ("ml", f"slice-{n}"), ("ml", f"pair-{n}")):
                    named = {**state, "instance": instance, "namespace": namespace, "pod": pod}
                    world.put(
                        "kube_pod_labels",
                        {
                            **named,
                            "label_team": f"team-{c}" + "-too" * again,
                            "label_kueue_x_k8s_io_queue_name": f"q{n}",
                            "label_project": f"p{c}{n}",
                        },
                        1,
                    )
                    workload = {"workload": pod[:-2] + "-too" * again, "workload_type": "job"}
                    world.put("namespace_workload_pod:kube_pod_owner:relabel", {**named, **workload}, 1)
                    world.put("kube_pod_status_phase", {**named, "phase": "Running"}, 1)
                    world.put("kube_pod_start_time", named, 60 * (3 * c + n + (0 if again else 2)))
                    resource = "nvidia_com_mig_1g_10gb" if pod.startswith("slice") else "nvidia_com_gpu"
                    asked = {**named, "container": "main", "node": node, "resource": resource}
                    wanted = (2 if pod.startswith("pair") else 1) - again
                    world.put("kube_pod_container_resource_requests", asked, wanted)
                    if pod.startswith("slice"):
                        asked["resource"] = "nvidia_com_mig_2g_20gb"
                        world.put("kube_pod_container_resource_requests", asked, 2)
            none = {**state, "instance": instance, "namespace": "ml", "pod": "zero-0", "container": "main"}
            world.put("kube_pod_container_resource_requests", {**none, "resource": "nvidia_com_gpu"}, 0)
            for namespace, pod, since in (
                ("ml", "next-0", 20),
                ("dev", "next-0", 92),
                ("dev", "next-1", 60),
                ("dev", "next-2", 96),
            ):
                named = {**state, "instance": instance, "namespace": namespace, "pod": pod}
                for container, amount in (("main", 4), ("second", 1)):
                    asked = {**named, "container": container}
                    shared = {**asked, "resource": "nvidia_com_gpu_shared"}
                    world.put("kube_pod_container_resource_requests", shared, amount - again + c)
                    world.put("kube_pod_container_resource_requests", {**asked, "resource": "cpu"}, 16)
                    world.put("kube_pod_container_resource_requests", {**asked, "resource": "nvidia_com_mig_1g_6gb"}, 1)
                world.put("kube_pod_start_time", named, 120 + c)
                waits = between(since, MINUTES, always(1.0), always(0.0))
                world.put("kube_pod_status_unschedulable", named, always(0.0) if again else waits)
        reconciler = {"job": "gpu-exporter-reconciler", "cluster": cluster}
        world.put("gpu_demand_pending_gpus", {**reconciler, "pool": "gpu"}, 3 * c)
    world.put("model:gpu_price:per_hour", {"name": "NVIDIA H100 80GB HBM3"}, 4)
    world.put("model:gpu_price:per_hour", {"name": "NVIDIA H100 80GB HBM3", "source": "old"}, 3)
    world.put("model:gpu_price:per_hour", {"source": "any"}, 1)


def elsewhere(world: World) -> None:
    """The site's own rules feed the seam too, with other values for one GPU. The model of two GPUs is unknown."""
    mine = {"cluster": "a", "origin": "other"}
    unit = {**mine, "node": "n1", "uuid": "GPU-n1-0"}
    world.put("allocation:owner:info", {**mine, "scheduler": "slurm", "job_id": "42", "account": "other"}, 0.5)
    world.put("unit:gpu_model:info", {**unit, "name": "other"}, 0.5)
    world.put("allocation:gpu_pool:info", {**unit, "scheduler": "slurm", "job_id": "42", "pool": "other"}, 0.5)
    for name in [name for name in world.series if name.startswith("gpu_info{")]:
        if re.search(r"GPU-n2-[36]", name):
            del world.series[name]


def level(*parts: int) -> float:
    """A different number for each place: position of cluster, node, GPU."""
    return 0.1 + sum(part * weight for part, weight in zip(parts, (0.4, 0.2, 0.02), strict=True))
