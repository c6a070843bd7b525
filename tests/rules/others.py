"""Worlds in which another exporter feeds the rules, or gpu-exporter feeds tools for another exporter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from gpu_exporter.common.model.holders import RESERVATION_NAMESPACES
from tests.rules.promtool import Case, Firing
from tests.rules.world import BUSY, IDLE, Activity, Node, Values, World, always, between, until

END = 140
# GpuHolderIdle of a GPU that is idle from minute 0 according to dcgm-exporter: three minutes are not four of five, so its run
# begins at minute 2 and is longer than 60 min at 63. promtool evaluates the owners' group before it, and `for` is 10m.
FOUND = 75
ALWAYS, ALWAYS_0 = always(1.0), always(0.0)
EXAMPLES = Path(__file__).resolve().parents[2] / "alerts" / "examples"


def others() -> Iterator[Case]:
    for case in (*dcgm(), *dcgm_noise(), *dcgm_fields(), *dcgm_beside_ours()):
        yield Case(**{**vars(case), "optional": "source-dcgm"})
    for case in nvidia_smi():
        yield Case(**{**vars(case), "optional": "source-nvidia-smi"})
    for case in compatible():
        yield Case(**{**vars(case), "optional": "compat-dcgm"})
    yield from autoscaled()
    for case in both():
        yield Case(**{**vars(case), "optional": "source-dcgm compat-dcgm"})


def dcgm_gpu(
    world: World,
    activity: Activity,
    *,
    uuid: str = "GPU-d",
    node: str = "d1",
    instance: tuple[str, str] = ("", ""),
    pod: str = "train-0",
    namespace: str = "ml",
    honoured: bool = True,
    scraped: Values = ALWAYS,
    utilization: Values | None = ALWAYS_0,
    job: str = "dcgm-exporter",
) -> None:
    """One GPU or MIG instance (profile, GPU instance id) of dcgm-exporter, held by `pod` unless that is empty."""
    holder = {"namespace": namespace, "pod": pod, "container": "main"} if pod else {}
    own = {"namespace": "monitoring", "pod": "dcgm-exporter-x", "container": "exporter"}
    names = own | {("" if honoured else "exported_") + key: value for key, value in holder.items()}
    labels = {
        "job": job,
        "gpu": "0",
        "UUID": uuid,
        "device": "nvidia0",
        "modelName": "NVIDIA A100",
        "Hostname": node,
        "GPU_I_PROFILE": instance[0],
        "GPU_I_ID": instance[1],
        **names,
    }
    world.put("DCGM_FI_PROF_GR_ENGINE_ACTIVE", labels, lambda t: activity(t) if scraped(t) else None)
    if utilization is not None and not any(instance):
        read = utilization
        world.put("DCGM_FI_DEV_GPU_UTIL", labels, lambda t: read(t) if scraped(t) else None)


def kube_pod(
    world: World,
    pod: str = "train-0",
    *,
    namespace: str = "ml",
    gpus: float = 1,
    start: float = 0,
    node: str = "d1",
    resource: str = "nvidia_com_gpu",
    running: bool = True,
) -> None:
    """The series of kube-state-metrics for a pod."""
    labels = {"job": "kube-state-metrics", "namespace": namespace, "pod": pod}
    world.put("kube_pod_start_time", labels, start)
    world.put("kube_pod_status_phase", {**labels, "phase": "Running"}, float(running))
    request = {**labels, "container": "main", "node": node, "resource": resource}
    world.put("kube_pod_container_resource_requests", request, gpus)


def parts(*expected: tuple[str, float], at: int = END) -> tuple[int, str, list[tuple[str, float]]]:
    """GPUs by part."""
    return (
        at,
        "round(sum by (part) (namespace:gpu_gpus:sum), 0.001) > 0",
        [(f'{{part="{name}"}}', round(value, 3)) for name, value in expected],
    )


def found(start: int = FOUND, end: int = END, **labels: str) -> list[Firing]:
    return [Firing("GpuHolderIdle", start, end, labels)]


def dcgm() -> Iterator[Case]:
    """Nodes on which only dcgm-exporter runs."""
    about = ["allocation:gpu_idle_run_seconds:known", "GpuMonitoringAbsent"]

    def world_of(activity: Activity, **more: object) -> World:
        world = World(END)
        dcgm_gpu(world, activity, **more)  # type: ignore[arg-type]
        return world

    world = world_of(IDLE)
    kube_pod(world)
    yield Case("dcgm: an idle pod", world, found(pod="train-0", gpus="1"), [parts(("idle_long", 1))], about)

    world = world_of(IDLE, honoured=False)
    kube_pod(world)
    yield Case("dcgm: an idle pod, honor_labels not set", world, found(pod="train-0"), [], about)

    world = world_of(BUSY)
    kube_pod(world)
    yield Case("dcgm: a busy pod", world, [], [parts(("used", 1))], about)

    for name, activity, part in (("idle", IDLE, "idle_long"), ("busy", BUSY, "unknown")):
        world = World(END)
        for pod in ("train-0", "train-1"):
            dcgm_gpu(world, activity, pod=pod)
            kube_pod(world, pod)
        offered = {"job": "kube-state-metrics", "node": "d1", "resource": "nvidia_com_gpu"}
        world.put("kube_node_status_allocatable", offered, 4)  # replicas, of which each pod requests one
        both_found = [*found(pod="train-0"), *found(pod="train-1")] if name == "idle" else []
        yield Case(f"dcgm: two pods that share a GPU, {name}", world, both_found, [parts((part, 1))], about)

    world = world_of(IDLE)
    kube_pod(world, gpus=4)
    offered = {"job": "kube-state-metrics", "node": "d1", "resource": "nvidia_com_gpu"}
    world.put("kube_node_status_allocatable", offered, 4)
    yield Case(
        "dcgm: a pod with four replicas of one GPU",
        world,
        about=["GpuHolderIdle", "GpuHolderPartlyIdle", "holder:gpu_units:max"],
    )

    world = world_of(IDLE)
    kube_pod(world, gpus=4)
    yield Case("dcgm: a pod with several GPUs on a node whose offer is unknown", world, about=["GpuHolderIdle"])

    world = World(END)
    for index in range(2):
        dcgm_gpu(world, IDLE, uuid=f"GPU-{index}")
    kube_pod(world, gpus=2)
    for scraped in ("a", "b"):  # two targets of kube-state-metrics
        world.put("kube_node_status_allocatable", {**offered, "instance": scraped}, 2)
    yield Case("dcgm: the offer of a node is counted once", world, found(gpus="2"), about=["GpuHolderIdle"])

    # Pods with fractions of a GPU work on it, and dcgm-exporter names the pod that reserves it.
    for namespace in RESERVATION_NAMESPACES:
        for honoured in (True, False):
            world = World(END)
            for uuid, pod, place in (("GPU-d", "gpu-reservation-x", namespace), ("GPU-e", "train-0", "ml")):
                dcgm_gpu(world, IDLE, uuid=uuid, pod=pod, namespace=place, honoured=honoured)
                kube_pod(world, pod, namespace=place)
            dcgm_gpu(world, IDLE, uuid="GPU-f", pod="")
            title = f"dcgm: a pod of {namespace} reserves a GPU, honor_labels {honoured}"
            kept = [parts(("free", 1), ("idle_long", 1))]
            yield Case(title, world, found(pod="train-0"), kept, [*about, "unit:gpu_known:bool"])

    world = world_of(IDLE, pod="gpu-reservation-x", namespace=RESERVATION_NAMESPACES[0])
    kube_pod(world, "gpu-reservation-x", namespace=RESERVATION_NAMESPACES[0])
    yield Case("dcgm: a node whose only GPU is reserved", world, [], [parts()], about)

    world = world_of(IDLE)
    yield Case("dcgm: an idle pod, without kube-state-metrics", world, [], [parts(("free", 1))], about)

    world = world_of(IDLE, pod="")
    yield Case("dcgm: a free GPU carries the exporter's own pod", world, [], [parts(("free", 1))], about)

    world = world_of(IDLE, pod="")
    kube_pod(world)
    yield Case("dcgm: the exporter has no holders", world, [], [parts()], about)

    world = world_of(IDLE, pod="")
    kube_pod(world, running=False)
    yield Case("dcgm: a pod that has ended requests no GPU", world, [], [parts(("free", 1))], about)

    world = world_of(until(60, lambda _: 0.4, IDLE))
    kube_pod(world)
    yield Case("dcgm: a pod that stops working", world, found(134), [parts(("idle_short", 1), at=90)], about)

    world = world_of(lambda t: 0.02 if t % 50 == 0 else 0.0)
    kube_pod(world)
    yield Case("dcgm: a minute of work every 50 minutes", world, [], [], about)

    world = world_of(IDLE, utilization=always(100.0))
    kube_pod(world)
    yield Case("dcgm: the profiling counter stays at 0 while the GPU works", world, [], [parts(("unknown", 1))], about)

    world = world_of(IDLE, utilization=None)
    kube_pod(world)
    yield Case("dcgm: a zero of a GPU without utilization", world, [], [parts(("unknown", 1))], about)

    world = world_of(IDLE, scraped=between(50, 50, always(0.0), always(1.0)))
    kube_pod(world)
    yield Case("dcgm: two failed scrapes", world, found(), [], about)

    world = world_of(IDLE, scraped=between(50, 56, always(0.0), always(1.0)))
    kube_pod(world)
    yield Case("dcgm: seven minutes without a scrape restart the idle run", world, found(132), [], about)

    world = world_of(IDLE)
    kube_pod(world)
    world.away = set(range(50, 57))
    yield Case("dcgm: Prometheus is down for seven minutes", world, found(132), [], about)

    world = World(END)
    dcgm_gpu(world, IDLE)
    labels = {"job": "kube-state-metrics", "namespace": "ml", "pod": "train-0"}
    kube_pod(world)
    world.put("kube_pod_start_time", labels, until(40, always(0.0), always(2400.0)))
    yield Case("dcgm: a pod that took over the name and GPU of an idle pod", world, found(112), [], about)

    world = world_of(IDLE)
    dcgm_gpu(world, BUSY, uuid="GPU-e")
    kube_pod(world, gpus=2)
    world.put("kube_node_status_allocatable", offered, 2)
    partly = [Firing("GpuHolderPartlyIdle", 95, END, {"pod": "train-0"})]
    yield Case("dcgm: one of two GPUs is idle", world, partly, [parts(("used", 1), ("idle_long", 1))], about)

    world = world_of(IDLE)
    kube_pod(world, gpus=2)
    world.put("kube_node_status_allocatable", offered, 2)  # as if the other GPU were a replica of this GPU
    yield Case("dcgm: one of two GPUs is not reported", world, [], [], [*about, "GpuHolderPartlyIdle"])

    world = World(END)
    dcgm_gpu(world, IDLE, instance=("3g.20gb", "2"))
    dcgm_gpu(world, BUSY, instance=("2g.10gb", "3"), pod="train-1")
    kube_pod(world, resource="nvidia_com_mig_3g_20gb")
    kube_pod(world, "train-1", resource="nvidia_com_mig_2g_10gb")
    share = [parts(("idle_long", 3 / 7), ("used", 2 / 7), ("free", 2 / 7))]
    yield Case("dcgm: MIG, one instance idle and one busy", world, found(pod="train-0"), share, about)

    world = world_of(IDLE, job="some-other-job")
    kube_pod(world)
    yield Case(
        "dcgm: series of another scrape job",
        world,
        [Firing("GpuMonitoringAbsent", 10, END)],
        [parts()],
        about,
    )

    world = world_of(IDLE)
    kube_pod(world)
    Node(world, "d1", uuid="GPU-d").hold(0, BUSY)
    yield Case("dcgm: gpu-exporter on the same node takes precedence", world, [], [parts(("used", 1))], about)

    # Both report the holder: a join with both series would be an error that ends the alert for all holders.
    world = world_of(IDLE, uuid="GPU-e")
    kube_pod(world, gpus=2)
    Node(world, "d1", uuid="GPU-d").hold(0, IDLE, units=2)
    Node(world, "n2").hold(0, IDLE, pod="other-0")
    yield Case(
        "dcgm: gpu-exporter reports one GPU of a pod, and dcgm-exporter the other",
        world,
        [*found(pod="train-0", gpus="2"), *found(71, pod="other-0")],
        [parts(("idle_long", 3))],
        about,
    )

    # No running pod of the node requests a GPU: one pod has ended, one requests no GPU, others request CPUs.
    world = world_of(IDLE, pod="")
    kube_pod(world, gpus=2, running=False)
    state = {"job": "kube-state-metrics", "namespace": "ml", "pod": "train-0"}
    world.put("kube_pod_status_phase", {**state, "phase": "Succeeded"}, 1)
    kube_pod(world, "none-0", gpus=0)
    kube_pod(world, "cpu-0", resource="cpu", gpus=4)
    world.put("kube_pod_status_phase", {**state, "namespace": "dev", "phase": "Running"}, 1)
    yield Case(
        "dcgm: no running pod of the node requests a GPU", world, [], [parts(("free", 1))], ["unit:gpu_known:bool"]
    )

    # A second dcgm-exporter with another host name sees no activity, and reports another model name.
    world = world_of(lambda _: 1.0)
    dcgm_gpu(world, lambda t: 0.0 if t >= 120 else None, node="x")
    renamed = {"job": "dcgm-exporter", "UUID": "GPU-d", "Hostname": "d1", "modelName": "NVIDIA A100-SXM4-40GB"}
    world.put("DCGM_FI_PROF_GR_ENGINE_ACTIVE", renamed, 1)
    kube_pod(world)
    most = [
        (END, f"min({name})", [("{}", value)])
        for name, value in (
            ("allocation:gpu_observed_seconds:increase30m", 1800.0),
            ("allocation:gpu_busy_seconds:increase30m", 1800.0),
            ("allocation:gpu_utilization:ratio5m", 1.0),
        )
    ]
    longest = (END, "max(allocation:gpu_unit_idle_run_seconds:known)", [("{}", 0.0)])
    models = (END, "count by (node) (unit:gpu_model:info)", [('{node="d1"}', 1.0), ('{node="x"}', 1.0)])
    yield Case("dcgm: two dcgm-exporters for one GPU", world, [], [*most, longest, models])

    # gpu-exporter counts three GPUs of the pod, the pod requests two, and two are seen.
    world = world_of(IDLE, uuid="GPU-e")
    kube_pod(world, gpus=2)
    Node(world, "d1", uuid="GPU-d").hold(0, IDLE, units=3)
    partly = [Firing("GpuHolderPartlyIdle", 91, END, {"pod": "train-0"})]
    yield Case("dcgm: two sources count the pod's GPUs differently", world, partly, about=["GpuHolderIdle"])

    world = World(END)
    for index in range(20):
        dcgm_gpu(world, BUSY, uuid=f"GPU-{index}", pod="")
    Node(world, "n1").hold(0, IDLE, job_id="7", info={"partition": "gpu"})
    world.put("gpu_demand_pending_gpus", {"job": "gpu-exporter-reconciler", "pool": "gpu"}, 8)
    yield Case("dcgm: one idle GPU among twenty of dcgm-exporter", world, found(71), about=["GpuWasteWhileQueued"])

    for units, name in ((2, "report"), (3, "count differently")):
        world = World(210)
        dcgm_gpu(world, lambda _: 0.1, uuid="GPU-e")
        kube_pod(world, gpus=2)
        Node(world, "d1", uuid="GPU-d").hold(0, lambda _: 0.1, units=units)
        hardly = [Firing("GpuHolderLow", 161, 210, {"pod": "train-0"})] if units == 2 else []
        title = f"dcgm: two sources {name} the GPUs of a holder that hardly works"
        yield Case(title, world, hardly, about=["GpuHolderLow"], settings={"low_over": "2h"})

    world = world_of(IDLE)
    kube_pod(world)
    offered = {"job": "kube-state-metrics", "node": "d1", "resource": "nvidia_com_gpu"}
    world.put("kube_node_status_allocatable", offered, 1)
    yield Case(
        "dcgm: dcgm-exporter is enough on a node without gpu-exporter",
        world,
        found(),
        [],
        [*about, "GpuNodeWithoutExporter"],
    )


NOISE = always(0.0008)  # below alerts.dcgm_idle_max_ratio


def dcgm_noise() -> Iterator[Case]:
    """Profiling counters of a GPU at rest are not exactly 0. One sample here is the mean of a minute."""

    def case_of(name: str, activity: Activity, firing: list[Firing], part: str, **more: object) -> Case:
        world = World(END)
        dcgm_gpu(world, activity, **more)  # type: ignore[arg-type]
        kube_pod(world)
        share = [] if "instance" in more or not part else [parts((part, 1))]
        return Case(f"dcgm: {name}", world, firing, share, ["unit:gpu_activity:known", "GpuHolderIdle"])

    instance = {"instance": ("3g.20gb", "2")}
    yield case_of("noise", NOISE, found(), "idle_long")
    yield case_of("exactly the noise", always(0.001), found(), "idle_long")
    yield case_of("noise of an instance", NOISE, found(), "idle_long", **instance)
    yield case_of("more than noise", always(0.004), [], "used")
    yield case_of("more than noise of an instance", always(0.004), [], "", **instance)
    yield case_of("a counter that is stuck above 0, with utilization 0", always(0.5), [], "used")

    for name, burst in (("1 s", 1 / 60), ("0.1 s, which is less than noise in two minutes", 0.0018)):
        yield case_of(f"bursts of {name}", lambda t, b=burst: b if t % 50 == 20 else 0.0, [], "idle_short")
        once = between(20, 20, always(burst), NOISE)
        yield case_of(f"noise after a burst of {name}", once, found(94), "idle_long")

    unknown = 97  # minutes 20 to 22 are unknown, so the run begins again until 25: four of five minutes are known at 26
    for name, engine in (("0", IDLE), ("noise", NOISE)):
        worked = between(20, 20, always(5.0), ALWAYS_0)
        yield case_of(f"activity {name} at utilization 5 %", engine, [], "unknown", utilization=always(5.0))
        yield case_of(f"activity {name} after a minute at 5 %", engine, found(unknown), "idle_long", utilization=worked)

    # Fewer unknown minutes than in which an idle run would continue.
    short = case_of("utilization 5 % for a moment", IDLE, found(94), "idle_long", utilization=worked)
    yield Case(**{**vars(short), "settings": {"interval": "2m"}})

    # Work between samples that are more than 40 s apart is not seen, so their zeros prove nothing.
    for every_s, firing, part in ((70, [], "unknown"), (30, found(), "idle_long")):
        seen = case_of(f"zeros, scraped every {every_s} s", IDLE, firing, part)
        yield Case(**{**vars(seen), "every_s": every_s})
    far = case_of("zeros of an instance, scraped every 70 s", IDLE, [], "unknown", **instance)
    yield Case(**{**vars(far), "every_s": 70})

    broken = between(20, 20, always(float("nan")), ALWAYS_0)
    yield case_of("a sample that is not a number", broken, found(unknown), "idle_long")
    yield case_of("samples that are not numbers", always(float("nan")), [Firing("GpuMonitoringAbsent", 10, END)], "")

    strict = case_of("a site that takes noise for work", NOISE, [], "used")
    yield Case(**{**vars(strict), "settings": {"dcgm_idle_max_ratio": "0.0001"}})


def dcgm_fields() -> Iterator[Case]:
    """The query of docs/other-exporters.md, which shows the series that there are."""
    page = (EXAMPLES.parents[1] / "docs" / "other-exporters.md").read_text("utf-8")
    (query,) = re.findall(r"```promql\n(.*?)```", page, re.S)
    for pod, utilization, honoured in (("train-0", ALWAYS_0, True), ("train-0", ALWAYS_0, False), ("", None, True)):
        world = World(5)
        dcgm_gpu(world, BUSY, pod=pod, utilization=utilization, honoured=honoured)
        kube_pod(world)
        named = [f"kube_pod_{each}" for each in ("container_resource_requests", "start_time", "status_phase")]
        rows = [('DCGM_FI_PROF_GR_ENGINE_ACTIVE{job="dcgm-exporter"}', 1.0)]
        rows += [(f'{name}{{job="kube-state-metrics"}}', 1.0) for name in named]
        rows += [('DCGM_FI_DEV_GPU_UTIL{job="dcgm-exporter"}', 1.0)] if utilization else []
        rows += [('{job="dcgm-exporter", row="GPUs with a holder"}', 1.0)] if pod else []
        rows += [('{job="dcgm-exporter", row="GPUs with a host name"}', 1.0)]
        yield Case(f"dcgm: the fields, for {pod or 'no pod'}, {honoured}", world, [], [(5, query, rows)])


def dcgm_beside_ours() -> Iterator[Case]:
    """A100 with MIG: gpu-exporter reports the holder of an instance, only dcgm-exporter its activity."""
    for idle in (True, False):
        world = World(END)
        node = Node(world, model="NVIDIA A100")
        node.hold(0, lambda _: None, mig="2/0", share=3 / 7)
        instance = {"gpu": "0", "uuid": node.uuids[0], "mig": "2/0", "mig_uuid": f"MIG-{node.uuids[0]}-2/0"}
        node.put("gpu_mig_activity_supported", instance, 0)
        dcgm_gpu(world, IDLE if idle else BUSY, uuid=node.uuids[0], node="n1", instance=("3g.20gb", "2"))
        dcgm_gpu(world, BUSY if idle else IDLE, uuid=node.uuids[0], node="n1", instance=("2g.10gb", "3"), pod="")
        part = parts(("idle_long" if idle else "used", 3 / 7), ("free", 4 / 7))
        name = f"dcgm: an instance of an A100 that gpu-exporter cannot judge is {'idle' if idle else 'busy'}"
        yield Case(name, world, found(pod="train-0") if idle else [], [part], ["allocation:gpu_idle_run_seconds:known"])

    world = World(END)
    node = Node(world, model="NVIDIA A100")
    node.hold(0, lambda _: None, mig="2/0", share=3 / 7)
    instance = {"gpu": "0", "uuid": node.uuids[0], "mig": "2/0", "mig_uuid": f"MIG-{node.uuids[0]}-2/0"}
    node.put("gpu_mig_activity_supported", instance, 0)
    seen: Values = until(100, ALWAYS, always(0.0))
    dcgm_gpu(world, BUSY, uuid=node.uuids[0], node="n1", instance=("3g.20gb", "2"), scraped=seen)
    used = [(at, "count(allocation:gpu_utilization:ratio5m)", [("{}", 1.0)] if at < 101 else []) for at in (100, 103)]
    yield Case("dcgm: the activity of an instance ends with its series", world, values=used)


def smi_gpu(world: World, activity: Activity, uuid: str = "d", node: str = "d1") -> None:
    """One GPU of nvidia_gpu_exporter, whose UUID has no prefix."""
    labels = {"job": "nvidia-gpu-exporter", "node": node, "uuid": f"00000000-0000-0000-0000-{uuid:>012}"}
    world.put("nvidia_smi_utilization_gpu_ratio", labels, activity)
    world.put("nvidia_smi_gpu_info", {**labels, "name": "NVIDIA L4"}, 1)


def nvidia_smi() -> Iterator[Case]:
    about = ["allocation:gpu_idle_run_seconds:known", "allocation:gpu_share:ratio"]
    offered = {"job": "kube-state-metrics", "node": "d1", "resource": "nvidia_com_gpu"}

    world = World(END)
    for index in range(2):
        smi_gpu(world, BUSY, str(index))
    kube_pod(world, gpus=2)
    world.put("kube_node_status_allocatable", offered, 2)
    yield Case("nvidia_smi: a pod that holds the whole node works", world, [], [parts(("used", 2))], about)

    world = World(END)
    for index in range(2):
        smi_gpu(world, until(60, BUSY, IDLE), str(index))
    kube_pod(world, gpus=2)
    world.put("kube_node_status_allocatable", offered, 2)
    runs = "count by (pod) (allocation:gpu_idle_run_seconds:known)"
    after = [
        parts(("used", 2), at=65),
        parts(("unknown", 2), at=80),
        (68, runs, [('{pod="train-0"}', 2.0)]),  # the mean of two minutes is above 0 until minute 62
        (72, runs, []),
    ]
    yield Case("nvidia_smi: a GPU without activity is unknown and never idle", world, [], after, about)

    world = World(END)
    smi_gpu(world, lambda _: 1.0)
    kube_pod(world)
    world.put("kube_node_status_allocatable", offered, 1)
    whole = [(END, "sum(allocation:gpu_busy_seconds:increase30m)", [("{}", 1800.0)])]
    yield Case("nvidia_smi: at most half an hour counts in half an hour", world, [], whole)

    world = World(END)
    for index in range(2):
        smi_gpu(world, IDLE, str(index))
    kube_pod(world, gpus=1)
    world.put("kube_node_status_allocatable", offered, 2)
    yield Case("nvidia_smi: a pod holds one of two GPUs, but which one is unknown", world, [], [parts()], about)

    world = World(END)
    smi_gpu(world, IDLE)
    kube_pod(world, running=False)
    world.put("kube_node_status_allocatable", offered, 1)
    yield Case("nvidia_smi: no running pod of the node requests a GPU", world, [], [parts(("free", 1))], about)

    for namespace in RESERVATION_NAMESPACES:
        world = World(END)
        smi_gpu(world, BUSY)
        kube_pod(world, "gpu-reservation-x", namespace=namespace)
        world.put("kube_node_status_allocatable", offered, 1)
        yield Case(f"nvidia_smi: a pod of {namespace} reserves the GPU", world, [], [parts()], about)

    world = World(END)
    smi_gpu(world, BUSY)
    kube_pod(world)
    Node(world, "d1", uuid="GPU-00000000-0000-0000-0000-00000000000d").hold(0, BUSY)
    yield Case("nvidia_smi: gpu-exporter runs on the node as well", world, [], [parts(("used", 1))], about)


def compatible() -> Iterator[Case]:
    about = ["DCGM_FI_DEV_GPU_UTIL"]
    world = World(END)
    node = Node(world, gpus=2)
    node.hold(0, BUSY)
    node.free(1)
    for index in range(2):
        gpu = {"gpu": str(index), "uuid": node.uuids[index]}
        node.put("gpu_utilization_ratio", gpu, until(60, always(0.9), lambda _: None))
        node.put("gpu_memory_used_bytes", gpu, 3 * 1024**3)
        node.put("gpu_power_watts", gpu, 300)
        node.put("gpu_temperature_celsius", gpu, 60)
        node.put("gpu_sm_clock_hertz", gpu, 1.7e9)
        node.put("gpu_graphics_active_ratio", gpu, 0.9)
        node.put("gpu_tensor_active_ratio", gpu, 0.4)
    labels = (
        '{{origin="gpu-exporter", node="n1", Hostname="n1", instance="n1", gpu="{0}", device="nvidia{0}", uuid="{1}", UUID="{1}", '
        'modelName="NVIDIA H100 80GB HBM3"{2}}}'
    )
    holder = ', namespace="ml", pod="train-0", container="main"'

    def each(name: str, value: float) -> tuple[int, str, list[tuple[str, float]]]:
        return END, name, [(name + labels.format(i, node.uuids[i], "" if i else holder), value) for i in range(2)]

    values = [
        (60, *each("DCGM_FI_DEV_GPU_UTIL", 90)[1:]),
        (70, "DCGM_FI_DEV_GPU_UTIL", []),  # no rule feeds itself: a series that has ended does not return
        each("DCGM_FI_DEV_FB_USED", 3072),
        each("DCGM_FI_DEV_POWER_USAGE", 300),
        each("DCGM_FI_DEV_GPU_TEMP", 60),
        each("DCGM_FI_DEV_SM_CLOCK", 1700),
        each("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 0.9),
        each("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 0.4),
    ]
    yield Case("compat: dcgm-exporter's metrics from gpu-exporter's data", world, [], values, about)

    world = World(END)
    node = Node(world)
    node.free(0)
    node.put("gpu_utilization_ratio", {"gpu": "0", "uuid": node.uuids[0]}, 0.9)
    real = {"job": "whatever", "UUID": node.uuids[0], "gpu": "0"}
    world.put("DCGM_FI_DEV_GPU_UTIL", real, until(60, always(91.0), lambda _: None))
    count = "count by (origin) (DCGM_FI_DEV_GPU_UTIL)"
    once = [
        (50, count, [("{}", 1)]),
        (51, count, [("{}", 1)]),
        (70, count, [('{origin="gpu-exporter"}', 1)]),
        (71, count, [('{origin="gpu-exporter"}', 1)]),
    ]
    yield Case("compat: a GPU that dcgm-exporter reports too exists once", world, [], once, about)


def both() -> Iterator[Case]:
    """Both files are loaded, against the advice: neither reads the recordings of the other."""
    world = World(END)
    node = Node(world, scraped=lambda t: t <= 60)
    node.hold(0, IDLE)
    node.put("gpu_graphics_active_ratio", {"gpu": "0", "uuid": node.uuids[0]}, 0)
    kube_pod(world, node="n1")
    values = [
        (END, "DCGM_FI_PROF_GR_ENGINE_ACTIVE", []),
        (END, "unit:gpu_activity:avg2m", []),
        (END, "allocation:gpu_share:ratio", []),
    ]
    gone = [Firing("GpuExporterDown", 71, END), Firing("GpuMonitoringAbsent", 71, END)]
    about = ["unit:gpu_activity:avg2m"]
    yield Case("both: series that have ended do not return", world, gone, values, about)
    name = "both: series that have ended do not return, for any job of dcgm-exporter"
    yield Case(name, world, gone, values, about, settings={"dcgm": 'UUID!=""'})

    # If dcgm-exporter reports a zero without utilization, gpu-exporter's utilization must not confirm the zero.
    world = World(END)
    node = Node(world)
    node.free(0)
    node.put("gpu_utilization_ratio", {"gpu": "0", "uuid": node.uuids[0]}, 0)
    dcgm_gpu(world, IDLE, uuid=node.uuids[0], node="n1", pod="", utilization=None)
    nothing = [(END, "unit:gpu_activity:known", [])]
    yield Case(
        "both: a zero of dcgm-exporter and the utilization of gpu-exporter",
        world,
        [],
        nothing,
        settings={"dcgm": 'UUID!=""'},
    )


def autoscaled() -> Iterator[Case]:
    """The values that the examples for autoscalers read, with two replicas on two nodes."""
    keda = yaml.safe_load((EXAMPLES / "keda.yaml").read_text("utf-8"))
    (trigger,) = keda["spec"]["triggers"]
    adapter, _ = yaml.safe_load_all((EXAMPLES / "prometheus-adapter.yaml").read_text("utf-8"))
    (rule,) = adapter["rules"]["external"]
    rendered = rule["metricsQuery"]
    for mark, text in {
        "<<.GroupBy>>": "namespace",
        "<<.Series>>": rule["seriesQuery"].partition("{")[0],
        "<<.LabelMatchers>>": 'workload="ranker",namespace="serving"',
    }.items():
        rendered = rendered.replace(mark, text)

    def case(name: str, second: Activity, known: bool, scraped: Values = ALWAYS, running: int = 2) -> Case:
        world = World(END)
        for index in range(2):
            pod = {"namespace": "serving", "pod": f"ranker-{index}"}
            node = Node(world, f"n{index}", scraped=(lambda t: bool(scraped(t))) if index else (lambda _: True))
            node.hold(0, second if index else BUSY, **pod)
            state = {"job": "kube-state-metrics", **pod}
            if index < running:
                world.put("kube_pod_status_phase", {**state, "phase": "Running"}, 1)
            asked = {**state, "container": "main", "resource": "nvidia_com_gpu"}
            world.put("kube_pod_container_resource_requests", asked, 1)
            owner = {**pod, "workload": "ranker", "workload_type": "deployment"}
            world.put("namespace_workload_pod:kube_pod_owner:relabel", owner, 1)
        # In the same workload: a pod that waits for its GPU, and a pod that requests no GPU.
        for index, phase, resource in ((2, "Pending", "nvidia_com_gpu"), (3, "Running", "cpu")):
            pod = {"namespace": "serving", "pod": f"ranker-{index}"}
            state = {"job": "kube-state-metrics", **pod}
            world.put("kube_pod_status_phase", {**state, "phase": phase}, 1)
            world.put("kube_pod_container_resource_requests", {**state, "container": "main", "resource": resource}, 1)
            owner = {**pod, "workload": "ranker", "workload_type": "deployment"}
            world.put("namespace_workload_pod:kube_pod_owner:relabel", owner, 1)
        total = 0.9 + (second(END) or 0)
        values = [
            (END, f"round({trigger['metadata']['query']}, 0.001)", [("{}", total)] if known else []),
            (END, f"round({rendered}, 0.001)", [('{namespace="serving"}', total)] if known else []),
        ]
        down = [] if scraped(END) else [Firing("GpuExporterDown", 110, END)]
        return Case(f"autoscaled: {name}", world, down, values, ["workload:gpu_utilization:sum"])

    yield case("both replicas are known", lambda _: 0.3, known=True)
    yield case("one replica is unknown", lambda _: None, known=False)
    yield case("the exporter of one replica is down", BUSY, known=False, scraped=until(99, ALWAYS, always(0.0)))
    yield case("a replica that waits for a GPU does not count", BUSY, known=True, running=1)
