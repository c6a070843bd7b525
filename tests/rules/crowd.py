"""Crowds: the same names in two clusters, on two nodes, on several GPUs, by two targets that do not agree, with other values each.

What the rules record of them, and what fires, is in tests/golden/rules, one file a crowd. A rule that takes two of them for
one, or the wrong one of two, changes a line there. `make golden` writes the files anew; review the diff.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from tests.rules.promtool import Case, build, run
from tests.rules.world import Activity, Node, World, always, between, throttled, until

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "rules"
MINUTES = LOOK = 99  # odd: what feeds itself is there every other minute, the even ones
SETTINGS = {"low_over": "30m", "pod_labels": "label_project"}
CLUSTERS, NODES = ("a", "b"), ("n1", "n2")
ROW = re.compile(r"\{[^{}]*\} \S+?(?=, \{|$)")


def crowds() -> Iterator[Case]:
    """The cases, with what the golden files say. A file that is missing says nothing of its world."""
    for case in bare():
        path = GOLDEN / f"{case.name}.txt"
        text = path.read_text("utf-8") if path.exists() else ""
        yield replace(case, values=list(parse(text, recorded(case))))


def bare() -> Iterator[Case]:
    """The cases without what is expected of them."""
    for name, optional, fill in (
        ("crowd", "", (ours, dead, kubernetes, elsewhere)),
        ("crowd-compat-dcgm", "compat-dcgm", (compatible, elsewhere)),
        ("crowd-source-dcgm", "source-dcgm", (dcgm, instances, kubernetes)),
        ("crowd-source-nvidia-smi", "source-nvidia-smi", (nvidia_smi, pods_of_nvidia_smi, both_of_nvidia_smi)),
    ):
        world = World(MINUTES)
        for each in fill:
            each(world)
        for series, row in world.series.items():
            if (
                "-too" in series
            ):  # of two that say otherwise topk takes the larger; which of two ones it takes is chance
                world.series[series] = [None if value is None else value / 2 for value in row]
        settings = SETTINGS | ({"source_window": "80m"} if optional == "source-dcgm" else {})
        yield Case(name, world, settings=settings, optional=optional, is_golden=True)


def recorded(case: Case) -> list[str]:
    """What is looked at: every recording that the case loads, and the alerts that fire."""
    with tempfile.TemporaryDirectory() as name:
        files = build(Path(name) / "rules", case.settings, case.optional).iterdir()
        groups = [group for path in files for group in yaml.safe_load(path.read_text("utf-8"))["groups"]]
    return ["ALERTS", *sorted({rule["record"] for group in groups for rule in group["rules"] if "record" in rule})]


def ask(name: str) -> str:
    """Without the last digits, in which versions of Prometheus differ."""
    return f"round({name}, 0.000001)"


def parse(text: str, names: list[str]) -> Iterator[tuple[int, str, list[tuple[str, float]]]]:
    """A golden file as promtool is asked: what it does not have must not be there."""
    rows: dict[str, list[tuple[str, float]]] = {}
    for name, labels, value in re.findall(r"^([\w:]+)(\{.*\}) (\S+)$", text, re.M):
        rows.setdefault(name, []).append((labels, float(value)))
    for name in names:
        yield LOOK, ask(name), rows.get(name, [])


def record(case: Case) -> str:
    """What promtool gets for every name, as a golden file has it."""
    asked = [(LOOK, ask(name), [("absent{}", 0.0)]) for name in recorded(case)]
    with tempfile.TemporaryDirectory() as directory:
        rules = build(Path(directory) / "rules", case.settings, case.optional)
        _, said = run([replace(case, values=asked)], Path(directory), rules)
    lines = [
        f"{name}{row.rpartition(' ')[0]} {float(row.rpartition(' ')[2])!r}"
        for name, got in re.findall(r'expr: "round\(([\w:]+), .*\n.*\n\s+got: (.*)', said)
        for row in ROW.findall(got)
    ]
    return "".join(f"{line}\n" for line in sorted(lines))


def ours(world: World) -> None:
    """gpu-exporter on every node, twice: the second target has seen less, and some of it otherwise."""
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
                        5: between(90, MINUTES, always(0.0 if c and not n else 1.0), always(1.0)),  # lost, and held
                        6: between(90, MINUTES, always(0.0 if n and not c else 1.0), always(1.0)),
                        7: between(90, MINUTES, always(0.0 if n and (c or not second) else 1.0), always(1.0)),
                        8: until(60 if n else 30, always(1.0), always(None)),  # gone without a word
                        9: until(60 if n else 70, always(1.0), always(None)),
                    },
                    driver_up=until_second(second, 1.0, 0.0),
                    expected=8 if not second else 0,
                )
                hardware(node, c, n, second)
                holders(node, c, n, second)
                tenants(node, c, n, second)


def dead(world: World) -> None:
    """A node none of whose GPUs answers, and which is held."""
    node = Node(world, "n3", target={"cluster": "b"}, gpu_up={0: always(0.0)})
    node.hold(0, always(None), pod="waits-0")
    world.put("kube_node_labels", {"cluster": "b", "node": "n3", "label_node_pool": "third"}, 1)


def until_second(second: bool, first: float, other: float) -> Callable[[int], float | None]:
    return always(other if second else first)


def dimmed(activity: Activity, second: bool) -> Activity:
    """What the second target sees of it: half, and one minute in twenty nothing at all."""

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
        node.put("gpu_allocation_memory_used_bytes", {**place, **who}, lambda t: 1e9 * amount * (2 if t == 80 else 1))
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
    # Active 400 and 900 s ago, and the second target saw nothing of it.
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
                lambda t, share=share, size=size: 60.0 * t * share * size * part + (120 * t if t >= 43 else 0),
            )
        node.put("gpu_tenant_energy_joules_total", labels, lambda t, size=size: 6e3 * t * size * part)


def hardware(node: Node, c: int, n: int, second: bool) -> None:
    """What fails on one of the four nodes, on one GPU, as one of the two targets has it."""
    ill = (c, n, second) == (0, 1, False)
    for index, uuid in enumerate(node.uuids):
        gpu = {"gpu": str(index), "uuid": uuid}
        at = between(20, 90, always(1.0 if ill and index == 1 else 0.0), always(0.0))
        node.put("gpu_recovery_action", gpu, at)
        node.put("gpu_ecc_errors_total", {**gpu, "severity": "uncorrected"}, at)
        node.put("gpu_ecc_errors_total", {**gpu, "severity": "corrected"}, 5)
        node.put("gpu_remapped_rows_failed", gpu, at)
        node.put("gpu_remapped_rows_pending", gpu, at)
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
    """kube-state-metrics, twice as during its own rollout, kube-prometheus' rule, and a site's prices."""
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


def compatible(world: World) -> None:
    """gpu-exporter where dcgm-exporter's names are wanted; one GPU of a node is dcgm-exporter's still."""
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
                    # Of GPU 7 the counter says nothing; GPU 3 has instances, so no utilization is told.
                    work = always(0.5 if not second else 0.0) if index == 7 else seen
                    if index == 7 and c:
                        work = until(97 if n else 95, always(0.5), always(0.0))
                    if not number and index != 3:
                        world.put("DCGM_FI_DEV_GPU_UTIL", labels, lambda t, work=work: _percent(work(t)))


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def dcgm_units(c: int, n: int) -> Iterator[tuple[int, Activity, str, str]]:
    """GPU, its activity, whose it is, and the instance with its profile."""

    def works(gpu: int) -> Activity:
        return lambda t: level(c, n, gpu) + 0.01 * (t % 7)

    def idle_since(minute: int) -> Activity:
        return until(minute, always(0.3), always(0.0))

    def away(begin: int, end: int, activity: Activity) -> Activity:
        return between(begin, end, always(None), activity)

    nobody = "monitoring/dcgm-exporter-x"
    yield 0, works(0), f"{('ml', 'dev')[n]}/train-0", ""
    yield 1, always(0.0) if c else idle_since(20), f"ml/pair-{n}", ""
    yield 2, idle_since(25 + 5 * c), f"ml/pair-{n}" if c else nobody, ""
    yield 3, always(0.0), nobody, ""
    yield 3, away(94 - 2 * n, 97, always(0.0)), f"ml/slice-{n}", ("1 1g.10gb", "2 2g.20gb")[n]
    yield 3, works(3), f"ml/slice-{n}", ("5 3g.40gb", "6 4g.40gb")[n]
    yield 4, works(4) if c else away(93, 97, always(0.0)), "ml/next-0", ("3 1g.6gb", "4 2g.12gb")[n]
    yield 5, away(60, 80, always(0.0)), "ml/next-0", ("3 4g.24gb", "0 7g.80gb")[n]
    yield 5, works(5), "ml/next-0", "9 1x.9gb"
    yield 6, until(30 if n else 60, always(0.1), always(None)), nobody, ""
    yield 7, always(0.0), "ml/zero-0" if c else f"ml/pair-{n}", ""
    yield 8, always(1.5), "ml/zero-0", ""


def instances(world: World) -> None:
    """MIG instances of A100 of which gpu-exporter knows who holds them and dcgm-exporter whether they work."""
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
    """nvidia_gpu_exporter alone: a node that one pod has as a whole, one that two have, one that nobody has."""
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


def both_of_nvidia_smi(world: World) -> None:
    """gpu-exporter runs on one of these nodes as well."""
    node = Node(world, "n3", target={"cluster": "b"}, uuid="GPU-00000000-0000-0000-0000-00000000002{index}")
    node.hold(0, always(0.0), pod="known-0")


def _swinging(mean: float) -> Activity:
    return lambda t: mean * (2 if t % 9 == 0 else 1)


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


def elsewhere(world: World) -> None:
    """Rules of the site's own feed the seam as well, and say otherwise of some; a model that nobody tells."""
    mine = {"cluster": "a", "origin": "other"}
    unit = {**mine, "node": "n1", "uuid": "GPU-n1-0"}
    world.put("allocation:owner:info", {**mine, "scheduler": "slurm", "job_id": "42", "account": "other"}, 0.5)
    world.put("unit:gpu_model:info", {**unit, "name": "other"}, 0.5)
    world.put("allocation:gpu_pool:info", {**unit, "scheduler": "slurm", "job_id": "42", "pool": "other"}, 0.5)
    for name in [name for name in world.series if name.startswith("gpu_info{")]:
        if re.search(r"GPU-n2-[36]", name):
            del world.series[name]


def level(*parts: int) -> float:
    """A number of its own for each place: position in cluster, node, GPU."""
    return 0.1 + sum(part * weight for part, weight in zip(parts, (0.4, 0.2, 0.02), strict=True))
