"""The parts of the fleet, demand for GPUs, and tenants with their cost."""

from __future__ import annotations

from collections.abc import Iterator

from tests.rules.expected import END, FIRES, KEPT, idle
from tests.rules.promtool import Case, Firing
from tests.rules.world import BUSY, IDLE, RECONCILER, UNKNOWN, Node, World, always, between, until


def fleet() -> Iterator[Case]:
    """Every GPU is in one part, and the parts add up."""
    world = World(120)
    node = Node(world, gpus=9, gpu_up={8: until(59, always(1.0), always(0.0))})
    node.hold(0, BUSY, pod="busy")
    node.hold(1, IDLE, pod="idle")
    node.hold(2, UNKNOWN, pod="unknown")
    node.hold(3, lambda t: 0.9 if t % 30 == 0 else 0.0, pod="bursty")
    node.hold(4, BUSY, mig="1/0", share=3 / 7, pod="slice")
    node.hold(4, IDLE, mig="2/0", share=1 / 7, pod="slice-idle")
    node.free(5)
    node.free(6, active=lambda t: 60.0 * t)
    node.free(8, allocated=until(59, always(0.0), always(None)))
    part = "round(sum by (part) (namespace:gpu_gpus:sum), 0.001)"
    yield Case(
        "a GPU in each part",
        world,
        [
            Firing("GpuHolderIdle", FIRES, 120, {"pod": "idle"}),
            Firing("GpuHolderIdle", FIRES, 120, {"pod": "slice-idle"}),
            Firing("GpuLost", 70, 120),
        ],
        values=[
            (
                t,
                part,
                [
                    ('{part="free"}', round(free, 3)),
                    *([('{part="idle_long"}', 1.143)] if t >= 60 else [('{part="idle_short"}', 2.143)]),
                    ('{part="no_data"}', missing),
                    ('{part="outside"}', 1),
                    ('{part="unknown"}', 1),
                    ('{part="used"}', round(used, 3)),
                ],
            )
            # bursty worked at 30 and at 90
            for t, free, missing, used in ((45, 2 + 3 / 7, 1, 1 + 3 / 7), (95, 1 + 3 / 7, 2, 2 + 3 / 7))
        ],
        about=["allocation:gpu_share:part", "unit:gpu_not_held:part", "namespace:gpu_gpus:sum"],
    )

    world = World(90)
    node = Node(world, gpus=4)
    node.hold(0, BUSY, job_id="7")
    node.hold(1, BUSY, mig="1/0", share=3 / 7, job_id="8")
    node.free(2)
    node.free(3, active=lambda t: 60.0 * t)
    node.put("gpu_node_closed", {"source": "slurm", "state": "drained"}, between(30, 60, always(1.0), always(None)))
    Node(world, "n2").free(0)
    yield Case(
        "a node that Slurm has drained for half an hour",
        world,
        values=[
            (
                t,
                "round(sum by (part) (namespace:gpu_gpus:sum) > 0, 0.001)",
                [
                    *([('{part="closed"}', 1.571)] if t == 45 else []),
                    ('{part="free"}', 1 if t == 45 else 2.571),
                    ('{part="outside"}', 1),
                    ('{part="used"}', 1.429),
                ],
            )
            for t in (25, 45, 75)
        ],
        about=["unit:gpu_not_held:part", "namespace:gpu_gpus:sum"],
    )

    world = World(60)
    for name, pool in (("n1", "a"), ("n2", "b"), ("n3", "")):
        node = Node(world, name, gpus=2)
        node.hold(0, BUSY, pod=f"pod-{name}")
        node.free(1)
        if pool:
            kube = {"job": "kube-state-metrics", "node": name}
            world.put("kube_node_labels", {**kube, "label_node_pool": pool}, 1)
            world.put("kube_node_labels", {**kube, "label_node_pool": pool, "instance": "another"}, 1)
    used, free = [
        [(f'{{{label}part="{part}"}}', 1.0) for label in ('node_pool="a",', 'node_pool="b",', "")]
        for part in ("used", "free")
    ]
    query = "sum by (node_pool, part) (namespace:gpu_gpus:sum) > 0"
    yield Case("node pools", world, values=[(60, query, [*used, *free])], about=["node:node_pool:info"])

    world = World(30)
    node = Node(world, gpus=2)
    node.hold(0, BUSY, job_id="7", info={"account": "phys", "partition": "gpu"})
    node.hold(1, BUSY)
    yield Case(
        "by account, partition, namespace and model",
        world,
        values=[
            (
                20,
                "namespace:gpu_gpus:sum",
                [
                    (
                        'namespace:gpu_gpus:sum{account="phys",name="NVIDIA H100 80GB HBM3",part="used",partition="gpu",scheduler="slurm"}',
                        1,
                    ),
                    (
                        'namespace:gpu_gpus:sum{name="NVIDIA H100 80GB HBM3",namespace="ml",part="used",scheduler="kubernetes"}',
                        1,
                    ),
                    ('namespace:gpu_gpus:sum{name="NVIDIA H100 80GB HBM3",part="free"}', 0),
                ],
            )
        ],
        about=["namespace:gpu_gpus:sum"],
    )

    for name, waits, held_idle, fires in (
        ("pods wait while GPUs are idle", True, True, True),
        ("no pod waits", False, True, False),
        ("pods wait and all GPUs are busy", True, False, False),
    ):
        world = World(END)
        node = Node(world, gpus=2)
        node.hold(0, IDLE if held_idle else BUSY, info={"resource": "nvidia.com/gpu"})
        node.hold(1, BUSY, pod="busy-0", info={"resource": "nvidia.com/gpu"})
        pod = {"job": "kube-state-metrics", "namespace": "ml", "pod": "next-0"}
        world.put("kube_pod_container_resource_requests", {**pod, "container": "main", "resource": "nvidia_com_gpu"}, 4)
        world.put("kube_pod_status_unschedulable", pod, lambda t, waits=waits: 1.0 if waits else None)
        # Idle for an hour at minute 60; the expression covers a quarter of an hour, and `for` is half an hour.
        waste = [Firing("GpuWasteWhileQueued", 90, END, {"pool": "nvidia_com_gpu"})] if fires else []
        yield Case(name, world, [*(idle((FIRES, END)) if held_idle else []), *waste], about=["GpuWasteWhileQueued"])

    for resource, known_as in (
        ("gpu", "nvidia_com_gpu"),
        ("gpu.shared", "nvidia_com_gpu_shared"),
        ("mig-1g.10gb", "nvidia_com_mig_1g_10gb"),
        ("mig-1g.10gb.me", "nvidia_com_mig_1g_10gb_me"),
    ):
        world = World(END)
        for name in ("n1", "n2"):
            Node(world, name).hold(0, IDLE, pod=f"idle-{name}", info={"resource": f"nvidia.com/{resource}"})
        pod = {"job": "kube-state-metrics", "namespace": "ml", "pod": "next-0"}
        world.put("kube_pod_container_resource_requests", {**pod, "container": "main", "resource": known_as}, 1)
        world.put("kube_pod_status_unschedulable", pod, 1)
        waste = Firing("GpuWasteWhileQueued", 90, END, {"pool": known_as})
        both = [firing for name in ("n1", "n2") for firing in idle((FIRES, END), pod=f"idle-{name}")]
        yield Case(f"other pods wait for {known_as}", world, [*both, waste])

    world = World(END)
    node = Node(world, gpus=2)
    node.hold(0, IDLE, mig="1/0", share=1 / 7, info={"resource": "nvidia.com/mig-1g.10gb"})
    for pool, wanted in (("nvidia_com_mig_3g_40gb", 1), ("gpu-small", 0)):
        world.put("gpu_demand_pending_gpus", {**RECONCILER, "pool": pool}, wanted)
    yield Case("jobs wait for another pool", world, idle((FIRES, END)), about=["GpuWasteWhileQueued"])

    world = World(END)
    node = Node(world, gpus=2)
    node.hold(0, IDLE, job_id="7", info={"partition": "gpu"})
    world.put("gpu_demand_pending_gpus", {**RECONCILER, "pool": "gpu"}, 8)
    yield Case(
        "jobs wait in the partition",
        world,
        [*idle((FIRES, END)), Firing("GpuWasteWhileQueued", 90, END, {"pool": "gpu"})],
    )

    world = World(30)
    Node(world)
    for pod, namespace, asked in (("huge", "a", 64), *((f"p{n}", "b", 4) for n in range(10)), ("one", "c", 2)):
        place = {"job": "kube-state-metrics", "namespace": namespace, "pod": pod}
        world.put(
            "kube_pod_container_resource_requests", {**place, "container": "m", "resource": "nvidia_com_gpu"}, asked
        )
        world.put("kube_pod_status_unschedulable", place, 1)
    world.put("gpu_demand_counted_gpus", {**RECONCILER, "pool": "slurm"}, 5)
    place = {
        "job": "kube-state-metrics",
        "namespace": "c",
        "pod": "runs",
        "container": "m",
        "resource": "nvidia_com_mig_1g_5gb",
    }
    world.put("kube_pod_container_resource_requests", place, 7)
    demand = [
        (20, "pool:gpu_pending_gpus:sum", [('pool:gpu_pending_gpus:sum{pool="nvidia_com_gpu"}', 106.0)]),
        (
            20,
            "pool:gpu_pending_gpus:capped",
            [
                ('pool:gpu_pending_gpus:capped{pool="nvidia_com_gpu"}', 8.0 + 16.0 + 2.0),
                ('pool:gpu_pending_gpus:capped{pool="nvidia_com_mig_1g_5gb"}', 0.0),
                ('pool:gpu_pending_gpus:capped{pool="slurm"}', 5.0),
            ],
        ),
    ]
    yield Case("demand of one pod and of one namespace is capped", world, values=demand)

    pool = {"partition": "gpu"}
    wanted = {**RECONCILER, "pool": "gpu"}
    waste = Firing("GpuWasteWhileQueued", 90, END, {"pool": "gpu"})
    for gpus, expected in ((15, [waste]), (21, [])):
        world = World(END)
        Node(world, "n1").hold(0, IDLE, job_id="7", info=pool)
        second = Node(world, "n2", gpus=gpus - 1, sampled=always(0.0) if gpus > 20 else None)
        for gpu in range(gpus - 1):
            second.hold(gpu, BUSY, job_id=f"8{gpu}", info=pool)
        world.put("gpu_demand_pending_gpus", wanted, 8)
        blind = [Firing("GpuExporterBlind", 15, END)] if gpus > 20 else []
        firing = [*idle((FIRES, END)), *blind, *expected]
        yield Case(f"one idle GPU of {gpus}", world, firing, about=["GpuWasteWhileQueued"])

    for name, share, demand in (("less than a GPU is idle", 4 / 7, 8.0), ("demand is for less than a GPU", 1.0, 0.6)):
        world = World(END)
        Node(world).hold(0, IDLE, job_id="7", info=pool, share=share)
        world.put("gpu_demand_pending_gpus", wanted, demand)
        yield Case(f"jobs wait, {name}", world, idle((FIRES, END)), about=["GpuWasteWhileQueued"])

    # At minute 115 the demand has lasted a quarter of an hour; at 181 it has ended.
    world = World(220)
    Node(world).hold(0, IDLE, job_id="7", info=pool)
    world.put("gpu_demand_pending_gpus", wanted, between(100, 180, always(8.0), always(0.0)))
    waste = Firing("GpuWasteWhileQueued", 145, 181 + KEPT, {"pool": "gpu"})
    yield Case("jobs begin to wait, and get their GPUs", world, [*idle((FIRES, 220)), waste])

    world = World(220)
    node = Node(world, gpus=2)
    node.hold(0, IDLE, job_id="7", info=pool, share=0.6)
    node.hold(1, until(40, BUSY, IDLE), job_id="8", info=pool)
    world.put("gpu_demand_pending_gpus", wanted, 8)
    both = [*idle((FIRES, 220), job_id="7"), *idle((111, 220), job_id="8")]
    waste = Firing("GpuWasteWhileQueued", 145, 220, {"pool": "gpu"})
    yield Case("jobs wait, and a second GPU becomes idle", world, [*both, waste])

    world = World(30)
    node = Node(world, gpus=2)
    for index, mig, container in ((0, "", "a"), (0, "", "b"), (1, "1/0", "a"), (1, "2/0", "a")):
        node.hold(index, BUSY, mig=mig, container=container, share=0.5)
        place = {"gpu": str(index), "uuid": node.uuids[index]}
        place |= {"mig": mig, "mig_uuid": f"MIG-{node.uuids[index]}-{mig}"} if mig else {}
        holder = {"scheduler": "kubernetes", "namespace": "ml", "pod": "train-0", "container": container}
        node.put("gpu_allocation_energy_joules_total", {**place, **holder}, lambda t: 6000.0 * t)
    power = [(20, "round(namespace:gpu_power_watts:rate5m)", [('{namespace="ml",scheduler="kubernetes"}', 400.0)])]
    yield Case("power of a pod's containers and instances", world, values=power)

    world = World(END)
    for name in range(5):
        node = Node(world, f"n{name}", gpus=8)
        for gpu in range(8):
            node.hold(gpu, IDLE if name == gpu == 0 else BUSY, job_id=f"{name}{gpu}", info={"partition": "gpu"})
    world.put("gpu_demand_pending_gpus", {**RECONCILER, "pool": "gpu"}, 8)
    yield Case("one idle GPU of forty fires no alert", world, idle((FIRES, END)), about=["GpuWasteWhileQueued"])


def tenants() -> Iterator[Case]:
    """A namespace on two nodes, of which only one has a price."""
    world = World(30)
    place = {"scheduler": "kubernetes", "namespace": "ml"}
    for name, model in (("n1", "NVIDIA H100 80GB HBM3"), ("n2", "Tesla T4")):
        node = Node(world, name, model=model)
        for instance in ("a", "b"):  # two targets for each node
            for kind, share in (("held", 1.0), ("known", 0.75), ("busy", 0.25), ("idle", 0.5)):
                counter = f"gpu_tenant_{kind}_gpu_seconds_total"
                node.put(counter, {**place, "instance": instance}, lambda t, share=share: 60.0 * t * share)
            node.put("gpu_tenant_energy_joules_total", {**place, "instance": instance}, lambda t: 6000.0 * t)
    world.put("model:gpu_price:per_hour", {"name": "NVIDIA H100 80GB HBM3"}, 4)

    def parts(name: str, used: float, idle_: float, unknown: float) -> tuple[int, str, list[tuple[str, float]]]:
        rows = [
            (f'{{namespace="ml",part="{part}",scheduler="kubernetes"}}', value)
            for part, value in (("idle", idle_), ("unknown", unknown), ("used", used))
        ]
        return 20, f"round({name}, 0.001)", rows

    yield Case(
        "GPUs and cost of a tenant",
        world,
        values=[
            parts("tenant:gpu_gpus:rate5m", 0.5, 1.0, 0.5),
            parts("tenant:gpu_cost:rate", 1.0, 2.0, 1.0),
            parts("tenant:gpu_unpriced:rate5m", 0.25, 0.5, 0.25),
            (20, "round(tenant:gpu_power_watts:rate5m, 0.001)", [('{namespace="ml",scheduler="kubernetes"}', 200.0)]),
        ],
        about=[
            "tenant:gpu_gpus:rate5m",
            "tenant:gpu_cost:rate",
            "tenant:gpu_unpriced:rate5m",
            "tenant:gpu_power_watts:rate5m",
        ],
    )

    # Four of eight GPU-hours are at utilization 0 by one witness: neither idle nor used.
    world = World(30)
    node = Node(world)
    for kind, share in (("held", 1.0), ("known", 1.0), ("idle", 0.25), ("unproven", 0.5)):
        node.put(f"gpu_tenant_{kind}_gpu_seconds_total", place, lambda t, share=share: 60.0 * t * share)
    rows = [
        (f'{{namespace="ml",part="{part}",scheduler="kubernetes"}}', value)
        for part, value in (("idle", 0.25), ("unknown", 0.0), ("unproven", 0.5), ("used", 0.25))
    ]
    yield Case(
        "a tenant with hours by one witness",
        world,
        values=[(20, "round(tenant:gpu_gpus:rate5m, 0.001)", rows)],
        about=["tenant:gpu_gpus:rate5m"],
    )

    # Without a price, by cluster, account and user. The counters of one tenant contradict each other.
    world = World(30)
    tenants = [(c, a, u) for c in ("a", "b") for a in ("bio", "phys") for u in ("u1", "u2")]
    for number, (cluster, account, user) in enumerate(tenants, 1):
        node = Node(world, target={"cluster": cluster})
        who = {"scheduler": "slurm", "account": account, "user": user}
        for kind, share in (("held", 1), ("known", 2 if number == 8 else 1), ("idle", 3 if number == 8 else 0)):
            counter = f"gpu_tenant_{kind}_gpu_seconds_total"
            node.put(counter, who, lambda t, size=number * share: 60.0 * t * size)
    rows = [
        (f'{{account="{account}",cluster="{cluster}",part="{part}",scheduler="slurm",user="{user}"}}', gpus)
        for number, (cluster, account, user) in enumerate(tenants, 1)
        for part, gpus in (
            ("idle", 24 if number == 8 else 0),
            ("unknown", 0),
            ("used", 0 if number == 8 else number),
        )
    ]
    yield Case("tenants without a price", world, values=[(20, "round(tenant:gpu_unpriced:rate5m, 0.001)", rows)])

    # The most expensive model of a node, a price without a name, and several prices for one model.
    world = World(9)
    for name, models in (("n1", ("cheap", "dear")), ("n2", ("dear", "")), ("n3", ("unlisted", "other"))):
        for index, model in enumerate(models):
            gpu = {"job": "gpu-exporter", "node": name, "gpu": str(index), "uuid": f"GPU-{name}-{index}"}
            world.put("gpu_info", {**gpu, "name": model}, 1)
    for model, price in (("cheap", 1), ("dear", 4), ("dear", 3), ("", 9), ("", 8)):
        world.put("model:gpu_price:per_hour", {"name": model, "since": str(price)}, price)
    prices = [('{node="n1"}', 4.0), ('{node="n2"}', 4.0), ('{node="n3"}', 9.0)]
    yield Case("prices of nodes", world, values=[(9, "node:gpu_price_per_hour:max + 0", prices)])

    world = World(30)
    node = Node(world)
    node.put("gpu_tenant_held_gpu_seconds_total", place, lambda t: 60.0 * t)
    node.put("gpu_tenant_known_gpu_seconds_total", place, lambda t: 60.0 * t)
    node.put("gpu_tenant_idle_gpu_seconds_total", place, 0)
    world.put("model:gpu_price:per_hour", {}, 2)
    parted = [('{part="idle"}', 0.0), ('{part="unknown"}', 0.0), ('{part="used"}', 2.0)]
    yield Case(
        "a price for all models",
        world,
        values=[(20, "sum by (part) (tenant:gpu_cost:rate)", parted)],
        about=["tenant:gpu_cost:rate"],
    )
