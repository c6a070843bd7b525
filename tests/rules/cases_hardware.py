"""Throttling, XIDs, ECC, lost GPUs and drivers."""

from __future__ import annotations

from collections.abc import Iterator

from tests.rules.expected import KEPT
from tests.rules.promtool import Case, Firing
from tests.rules.world import Node, World, always, between, throttled, until


def hardware() -> Iterator[Case]:
    reasons = ("thermal", "sw_thermal", "hw_thermal", "hw_power_brake", "board_limit", "reliability")
    for reason in reasons:
        world = World(120)
        node = Node(world)
        node.free(0)
        throttled(node, 0, reason, between(20, 80, always(0.5), always(0.0)))
        name = "thermal" if reason.endswith("thermal") else reason
        # More than a tenth of 30 min after 7 minutes at a half: minute 26. More than a tenth of 5 min until minute 84.
        yield Case(
            f"throttled: {reason}",
            world,
            [Firing("GpuThrottled", 36, 84 + KEPT, {"reason": name, "uuid": node.uuids[0]})],
        )

    unseen = {"pci_bus_id": "0000:11:00.0"}
    world = World(120)
    Node(world).put("gpu_missing", unseen, between(30, 80, always(1.0), always(None)))
    yield Case("a GPU that the driver does not list", world, [Firing("GpuMissing", 40, 81 + KEPT, unseen)])

    world = World(120)
    Node(world, driver_up=0).put("gpu_missing", unseen, 1)
    yield Case(
        "a GPU that the driver does not list, while the driver is down", world, [Firing("GpuDriverDown", 10, 120)]
    )

    for reason in ("power_cap", "low_utilization", "sync_boost"):
        world = World(120)
        node = Node(world)
        throttled(node, 0, reason, always(1.0))
        yield Case(f"no fault: {reason}", world, about=["GpuThrottled"])

    world = World(120)
    node = Node(world)
    throttled(node, 0, "thermal", always(0.05))
    yield Case("slowed down now and then", world, about=["GpuThrottled"])

    world = World(120)
    node = Node(world)
    throttled(node, 0, "thermal", between(20, 27, always(1.0), always(0.0)))
    yield Case("slowed down for eight minutes, but not any more", world, about=["GpuThrottled"])

    world = World(120)
    node = Node(world)
    throttled(node, 0, "thermal", always(0.5))
    throttled(node, 0, "sw_thermal", always(0.5))
    yield Case("two reasons with one cause", world, [Firing("GpuThrottled", 17, 120, {"reason": "thermal"})])

    for name, share in (
        ("slowed down a little for a quarter of an hour", between(40, 56, always(0.15), always(0.0))),
        ("slowed down for eight minutes", between(40, 47, always(0.5), always(0.0))),
    ):
        world = World(120)
        node = Node(world)
        throttled(node, 0, "sw_thermal", share)
        throttled(node, 0, "power_cap", always(1.0))
        yield Case(f"at its power cap all the time, {name}", world, about=["GpuThrottled"])

    world = World(60)
    for target, share in (("a", 0.5), ("b", 0.0)):
        node = Node(world, target={"instance": target}, gpu_up={0: always(1.0 if share else 0.0)})
        throttled(node, 0, "board_limit", always(share))
    wrong = Firing("GpuScrapeConfigWrong", 30, 60, {"what": "two targets report the same GPU"})
    yield Case("one of two targets sees the GPU, and its board's limit", world, [Firing("GpuThrottled", 17, 60), wrong])

    world = World(120)
    node = Node(world, gpu_up={0: until(59, always(1.0), always(0.0))}, gpus=2)
    throttled(node, 0, "thermal", always(0.5))
    yield Case(
        "a throttled GPU that is lost",
        world,
        [Firing("GpuThrottled", 17, 60 + KEPT), Firing("GpuLost", 70, 120, {"uuid": node.uuids[0]})],
    )

    gpu = {"gpu": "0", "uuid": "GPU-n1-0"}
    for kind, fires in (("hardware", True), ("application", False), ("information", False)):
        world = World(120)
        node = Node(world)
        node.put(
            "gpu_xid_last_timestamp_seconds",
            {**gpu, "xid": "79", "class": kind},
            between(30, 50, always(1750.0), always(None)),
        )
        # The event was at 29:10, before the first scrape that shows it. The exporter restarted at 50.
        yield Case(
            f"an XID of class {kind}",
            world,
            [Firing("GpuXid", 30, 89, {"xid": "79"})] if fires else [],
            about=["GpuXid"],
        )

    world = World(120)
    node = Node(world, scraped=lambda t: t != 50)
    node.free(0)
    node.put("gpu_ecc_errors_total", {**gpu, "severity": "uncorrected"}, between(30, 80, always(3.0), always(0.0)))
    yield Case("GpuEccUncorrected", world, [Firing("GpuEccUncorrected", 40, 81 + KEPT, gpu)])

    world = World(60)
    Node(world).put("gpu_ecc_errors_total", {**gpu, "severity": "uncorrected"}, 0)
    yield Case("GpuEccUncorrected: no fault", world, about=["GpuEccUncorrected"])

    for name, condition, severity in (
        ("GpuUnusable", "fabric_not_ready", "unusable"),
        ("GpuDegraded", "row_remap_pending", "degraded"),
    ):
        world = World(120)
        node = Node(world, scraped=lambda t: t != 50)
        node.free(0)
        labels = {"condition": condition, "severity": severity}
        node.put("gpu_condition", {**gpu, **labels}, between(30, 80, always(1.0), always(None)))
        yield Case(name, world, [Firing(name, 40, 81 + KEPT, {**gpu, "condition": condition})])

    for condition in ("lost", "hung", "stale"):  # GpuLost reports these
        world = World(60)
        Node(world).put("gpu_condition", {**gpu, "condition": condition, "severity": "unusable"}, 1)
        yield Case(f"a GPU that is {condition}", world, about=["GpuUnusable", "GpuDegraded"])

    world = World(120)
    node = Node(world, gpus=2, scraped=lambda t: t != 50)
    node.free(0)
    node.put("gpu_allocatable", {**gpu}, between(30, 80, always(0.0), always(1.0)))
    node.put("gpu_allocatable", {"gpu": "1", "uuid": node.uuids[1]}, always(1.0))
    yield Case("a GPU that the kubelet does not offer", world, [Firing("GpuNotAllocatable", 40, 81 + KEPT, gpu)])

    world = World(60)
    Node(world).put("gpu_allocatable", gpu, 1)
    Node(world, "n2")
    yield Case("GPUs that the kubelet offers, or whose offer is unknown", world, about=["GpuNotAllocatable"])

    world = World(60)
    for target, given in (("a", 0.0), ("b", 1.0)):
        Node(world, target={"instance": target}).put("gpu_allocatable", gpu, given)
    yield Case(
        "one of two targets reports that the kubelet offers the GPU", world, [wrong], about=["GpuNotAllocatable"]
    )

    world = World(60)
    node = Node(world, gpus=2, gpu_up={0: always(0.0)})
    node.put("gpu_allocatable", gpu, 0)
    yield Case(
        "a lost GPU that the kubelet does not offer",
        world,
        [Firing("GpuLost", 10, 60, gpu)],
        about=["GpuNotAllocatable"],
    )

    world = World(60)
    Node(world).put("gpu_ecc_errors_total", {**gpu, "severity": "corrected"}, 9)
    yield Case("corrected errors", world, about=["GpuEccUncorrected"])

    world = World(120)
    Node(world, gpus=8, gpu_up={3: between(30, 80, always(0.0), always(1.0))})
    yield Case("one of eight GPUs is lost", world, [Firing("GpuLost", 40, 81 + KEPT, {"gpu": "3"})])

    world = World(120)
    Node(world, gpu_up={0: until(29, always(1.0), always(0.0))}, driver_up=until(29, always(1.0), always(0.0)))
    yield Case("the driver and its GPUs are down", world, [Firing("GpuDriverDown", 40, 120)], about=["GpuLost"])

    world = World(120)
    Node(world, gpu_up={0: until(29, always(1.0), always(0.0))}, sampled=lambda t: 60.0 * min(t, 29))
    # Lost until the last sample is older than five minutes. After that, no GPU of the node was read.
    yield Case(
        "the only GPU of a node is lost",
        world,
        [Firing("GpuExporterBlind", 44, 120, {"what": "samples"})],
        about=["GpuLost"],
    )

    for lost, fires in ((7, False), (8, True)):
        world = World(60)
        Node(world, gpus=200, gpu_up=dict.fromkeys(range(lost), always(0.0)))
        fired = [Firing("GpuLost", 10, 60, {"gpu": str(i)}) for i in range(lost)]
        many = [Firing("GpuFleetDegraded", 10, 60)] if fires else []
        yield Case(f"{lost} of 200 GPUs are lost", world, [*fired, *many], about=["GpuFleetDegraded"])

    world = World(60)
    Node(world, gpus=500, gpu_up=dict.fromkeys(range(9), always(0.0)))
    fired = [Firing("GpuLost", 10, 60, {"gpu": str(i)}) for i in range(9)]
    yield Case("nine of 500 GPUs are lost: below 2 %", world, fired, about=["GpuFleetDegraded"])

    world = World(60)
    for cluster, lost in (("a", 4), ("b", 4)):
        Node(world, cluster, gpus=50, target={"cluster": cluster}, gpu_up=dict.fromkeys(range(lost), always(0.0)))
    fired = [Firing("GpuLost", 10, 60, {"gpu": str(i), "cluster": c}) for c in "ab" for i in range(4)]
    yield Case("four lost GPUs in each of two clusters", world, fired, about=["GpuFleetDegraded"])

    for nodes, gpus, share, reason, fires in (
        (3, 2, 0.6, "hw_thermal", True),
        (3, 2, 0.6, "hw_power_brake", True),
        (2, 4, 0.6, "hw_thermal", False),
        (4, 1, 0.6, "hw_thermal", False),
        (3, 2, 0.4, "hw_thermal", False),
        (3, 2, 0.6, "sw_thermal", False),
    ):
        world = World(60)
        each = [Node(world, f"n{i}", gpus=gpus) for i in range(nodes)]
        for node in each:
            for index in range(gpus):
                throttled(node, index, reason, always(share))
        word = "thermal" if reason.endswith("thermal") else reason
        single = [
            # A tenth of half an hour is exceeded after 5 min at 0.6, and after 8 min at 0.4.
            Firing("GpuThrottled", 16 if share == 0.6 else 18, 60, {"uuid": uuid, "reason": word})
            for node in each
            for uuid in node.uuids
        ]
        many = [Firing("GpuThrottledMany", 23, 60)] if fires else []
        yield Case(
            f"{gpus} GPUs of {nodes} nodes, {reason} {share}", world, [*single, *many], about=["GpuThrottledMany"]
        )

    world = World(120)
    each = [Node(world, f"n{i}", gpus=2) for i in range(3)]
    for node in each:
        for index in range(2):
            throttled(node, index, "hw_thermal", between(20, 59, always(0.6), always(0.0)))
            throttled(node, index, "hw_power_brake", always(0.0))
    single = [
        # More than a tenth of half an hour from minute 25 to 84, and of the last 5 min until 63.
        Firing("GpuThrottled", 35, 64 + KEPT, {"uuid": uuid, "reason": "thermal"})
        for node in each
        for uuid in node.uuids
    ]
    many = [Firing("GpuThrottledMany", 42, 62 + KEPT)]
    yield Case("six hot GPUs without power brake, until they cool down", world, [*single, *many])
