"""Exporters, sources, state files, clocks and reconcilers that do not work."""

from __future__ import annotations

from collections.abc import Iterator

from tests.rules.expected import KEPT
from tests.rules.promtool import Case, Firing
from tests.rules.world import BUSY, IDLE, RECONCILER, Node, World, always, between, until


def exporters() -> Iterator[Case]:
    world = World(120)
    Node(world, gpus=0, driver_up=0)
    yield Case("a node without a GPU", world, about=["GpuDriverDown", "GpuExporterBlind"])

    world = World(120)
    closed = between(30, 80, always(0.0), always(1.0))
    Node(
        world,
        driver_up=closed,
        expected=closed,
        sampled=lambda t: 60.0 * (29 if 30 <= t <= 80 else t),
        gpu_up={0: between(30, 80, always(None), always(1.0))},
    )
    yield Case("the driver is closed for an upgrade", world, about=["GpuDriverDown", "GpuLost", "GpuExporterBlind"])

    world = World(120)
    Node(
        world,
        driver_up=between(30, 80, always(0.0), always(1.0)),
        gpu_up={0: between(30, 80, always(0.0), always(1.0))},
    )
    yield Case("the driver is down for a while", world, [Firing("GpuDriverDown", 40, 81 + KEPT, {"node": "n1"})])

    ready = {"job": "kube-state-metrics", "node": "n1", "condition": "Ready", "status": "true"}
    offers = {"job": "kube-state-metrics", "node": "n1", "resource": "nvidia_com_gpu"}
    world = World(120)
    Node(world, scraped=lambda t: not 30 <= t <= 80)
    Node(world, "n2")
    world.put("kube_node_status_condition", ready, 1)
    yield Case("scrapes of one node fail", world, [Firing("GpuExporterDown", 40, 81 + KEPT, {"node": "n1"})])

    world = World(120)
    Node(world, scraped=lambda t: t < 30)
    Node(world, "n2")
    world.put("kube_node_status_condition", ready, lambda t: float(t < 30))
    world.put("kube_node_status_condition", {**ready, "status": "false"}, lambda t: float(t >= 30))
    world.put("kube_node_status_condition", {**ready, "condition": "MemoryPressure"}, 1)
    yield Case("a node that is not ready", world, about=["GpuExporterDown"])

    world = World(120)
    Node(world, gpus=0, scraped=lambda t: t < 30)
    Node(world, "n2")
    world.put("kube_node_status_allocatable", {**offers, "resource": "cpu"}, 64)
    yield Case("the exporter of a node without GPUs is down", world, about=["GpuExporterDown"])

    world = World(120)
    Node(world, gpus=0, scraped=lambda _: False)
    Node(world, "n2")
    world.put("kube_node_status_allocatable", offers, 8)
    yield Case(
        "an exporter that never answered, on a node that offers GPUs", world, [Firing("GpuExporterDown", 10, 120)]
    )

    world = World(120)
    Node(world, "n2")
    world.put("kube_node_status_allocatable", offers, 8)
    yield Case(
        "a node that offers GPUs and has no exporter",
        world,
        [Firing("GpuNodeWithoutExporter", 30, 120, {"node": "n1"})],
    )

    for resource in ("nvidia_com_gpu_shared", "nvidia_com_mig_1g_10gb"):
        world = World(120)
        Node(world, "n2")
        world.put("kube_node_status_allocatable", offers, 0)  # the device plugin renames the resource of shared GPUs
        world.put("kube_node_status_allocatable", {**offers, "resource": resource}, 8)
        yield Case(
            f"a node that offers {resource} and has no exporter",
            world,
            [Firing("GpuNodeWithoutExporter", 30, 120, {"node": "n1"})],
        )

    world = World(120)
    Node(world, "n2")
    world.put("kube_node_status_allocatable", offers, 8)
    world.put("kube_node_status_condition", ready, 0)
    world.put("kube_node_status_condition", {**ready, "status": "false"}, 1)
    world.put("kube_node_status_condition", {**ready, "condition": "MemoryPressure"}, 1)
    yield Case("a node that offers GPUs, has no exporter, and is not ready", world, about=["GpuNodeWithoutExporter"])

    world = World(120)
    Node(world, "n2")
    world.put("kube_node_status_allocatable", {**offers, "resource": "cpu"}, 8)
    yield Case("a node that offers no GPU", world, about=["GpuNodeWithoutExporter"])

    world = World(120)
    Node(world, source_answers=lambda t: not 30 <= t <= 80)
    yield Case("no source of holders answers", world, [Firing("GpuExporterBlind", 40, 81 + KEPT, {"what": "holders"})])

    world = World(120)
    Node(world, source_answers=lambda _: False)
    yield Case("a source that never answered", world, [Firing("GpuExporterBlind", 10, 120, {"what": "holders"})])

    world = World(120)
    Node(world, source_answers=lambda t: t % 4 == 0)
    yield Case("a source that answers now and then", world, about=["GpuExporterBlind"])

    world = World(120)
    Node(world, state_fails=lambda t: t in (30, 31))
    yield Case("a state file that could not be written twice", world, about=["GpuExporterBlind"])

    world = World(120)
    Node(world, sampled=lambda t: 60.0 * t + (45 if 30 <= t <= 80 else 0))
    yield Case("a clock that is ahead", world, [Firing("GpuNodeClockWrong", 40, 81 + KEPT, {"node": "n1"})])

    world = World(120)
    Node(world, sampled=lambda t: 60.0 * t + 20)
    yield Case("a clock that is a little ahead", world, about=["GpuNodeClockWrong"])

    world = World(120)
    Node(world, scraped=lambda t: not 30 <= t <= 80)
    yield Case(
        "no exporter answers",
        world,
        [Firing("GpuMonitoringAbsent", 40, 81 + KEPT), Firing("GpuExporterDown", 40, 81 + KEPT)],
    )

    world = World(120)
    Node(world, target={"node": ""})
    yield Case("no label node", world, [Firing("GpuScrapeConfigWrong", 30, 120, {"what": "the label node is missing"})])

    world = World(120)
    node = Node(world)
    node.put("gpu_up", {"gpu": "0", "uuid": node.uuids[0], "pod": "gpu-exporter-x"}, 1)
    world.series = {name: row for name, row in world.series.items() if not name.startswith("gpu_up{") or "pod=" in name}
    yield Case(
        "series with the agent's own pod",
        world,
        [Firing("GpuScrapeConfigWrong", 30, 120, {"what": "GPU series carry the pod of the agent"})],
    )

    world = World(120)
    node = Node(world, gpus=3)
    for gpu, (pod, activity) in enumerate((("notebook-0", IDLE), ("notebook-0", BUSY), ("train-0", IDLE))):
        node.hold(gpu, activity, namespace="monitoring", pod=pod)  # team-a's, team-b's and team-c's
        node.put("gpu_up", {"gpu": str(gpu), "uuid": node.uuids[gpu], "namespace": "monitoring"}, 1)
    world.series = {k: row for k, row in world.series.items() if not k.startswith("gpu_up{") or "namespace=" in k}
    wrong = Firing("GpuScrapeConfigWrong", 30, 120, {"what": "GPU series carry a namespace that is not the holder's"})
    yield Case("a namespace that Prometheus enforces", world, [wrong], about=["GpuHolderIdle", "GpuHolderPartlyIdle"])

    for marked, cycles, fires in (
        (3.0, lambda t: float(min(t, 30)), "GpuReconcilerStuck"),
        (3.0, lambda t: float(t) if t <= 30 else None, "GpuReconcilerStuck"),
        (0.0, lambda t: float(min(t, 30)), "GpuReconcilerDown"),
        (0.0, lambda t: float(t) if t <= 30 else None, "GpuReconcilerDown"),
        (3.0, lambda t: float(t), ""),
        (0.0, lambda t: float(t), ""),
    ):
        world = World(120)
        Node(world)
        labels = {**RECONCILER, "stage": "underused"}
        world.put("gpu_reconciler_labelled", labels, lambda t, m=marked, c=cycles: None if c(t) is None else m)
        world.put("gpu_reconciler_cycles_total", RECONCILER, cycles)
        world.put(
            "gpu_reconciler_last_success_timestamp_seconds",
            RECONCILER,
            lambda t, c=cycles: None if c(t) is None else 60.0 * t,
        )
        # At minute 40 the last cycle was ten minutes ago; the alert fires ten minutes later.
        yield Case(
            f"a reconciler with {marked:g} marks that {'hangs' if cycles(100) == 30 else 'works' if cycles(100) else 'is gone'}",
            world,
            [Firing(fires, 50, 120)] if fires else [],
            about=["GpuReconcilerStuck", "GpuReconcilerDown", "GpuReconcilerFrozen"],
        )

    for name, marks, cycles, fires in (
        ("the other replica works and has no marks", (3.0, 0.0), (30, 120), False),
        ("both replicas have ended", (0.0, 3.0), (20, 30), True),
        ("one mark, and the reconciler has ended", (1.0, 0.0), (30, 30), True),
    ):
        world = World(120)
        Node(world)
        for replica, count, last in zip("ab", marks, cycles, strict=True):
            labels = {**RECONCILER, "instance": replica}
            world.put("gpu_reconciler_labelled", {**labels, "stage": "underused"}, count)
            world.put("gpu_reconciler_labelled", {**labels, "stage": "candidate"}, 5)
            world.put("gpu_reconciler_cycles_total", labels, lambda t, end=last: float(min(t, end)))
            world.put("gpu_reconciler_last_success_timestamp_seconds", labels, lambda t, end=last: 60.0 * min(t, end))
        stuck = [Firing("GpuReconcilerStuck", 50, 120)] if fires else []
        yield Case(
            f"two replicas: {name}",
            world,
            stuck,
            about=["GpuReconcilerStuck", "GpuReconcilerDown", "GpuReconcilerFrozen"],
        )

    world = World(120)
    Node(world)
    for pod, marks, first, last in (("old", 3.0, 0, 20), ("new", 0.0, 21, 30)):  # which withdrew all marks, and ended
        labels, there = {**RECONCILER, "pod": pod}, range(first, last + 1)
        world.put(
            "gpu_reconciler_labelled",
            {**labels, "stage": "underused"},
            lambda t, m=marks, r=there: m if t in r else None,
        )
        world.put("gpu_reconciler_cycles_total", labels, lambda t, f=first, r=there: float(t - f) if t in r else None)
        success = lambda t, r=there: 60.0 * t if t in r else None  # noqa: E731
        world.put("gpu_reconciler_last_success_timestamp_seconds", labels, success)
    yield Case(
        "a reconciler that was replaced by one that has ended",
        world,
        [Firing("GpuReconcilerDown", 50, 120)],
        about=["GpuReconcilerStuck", "GpuReconcilerDown"],
    )

    world = World(120)
    Node(world)
    world.put("gpu_reconciler_labelled", {**RECONCILER, "stage": "candidate"}, 5)
    world.put("gpu_reconciler_cycles_total", RECONCILER, 30)
    down = Firing("GpuReconcilerDown", 10, 120)
    yield Case(
        "a reconciler that has ended, with candidates only",
        world,
        [down],
        about=["GpuReconcilerStuck", "GpuReconcilerDown"],
    )

    for name, cycles, seen in (
        (
            "and then no cycles either",
            lambda t: float(min(t, 50)),
            [Firing("GpuReconcilerFrozen", 56, 60 + KEPT), Firing("GpuReconcilerDown", 70, 120)],
        ),
        ("one cycle every nine minutes", lambda t: float(t // 9), [Firing("GpuReconcilerFrozen", 56, 120)]),
    ):
        world = World(120)
        Node(world)
        for replica in "ab":  # replica b never had evidence and completed no cycle
            labels = {**RECONCILER, "instance": replica}
            works = float(replica == "a")
            world.put("gpu_reconciler_cycles_total", labels, lambda t, c=cycles, w=works: c(t) * w)
            success = until(30, lambda t, w=works: 60.0 * t * w, lambda _, w=works: 1800.0 * w)
            world.put("gpu_reconciler_last_success_timestamp_seconds", labels, success)
        yield Case(f"a reconciler without evidence, {name}", world, seen)

    world = World(120)
    Node(world)
    world.put("gpu_reconciler_cycles_total", RECONCILER, lambda t: float(t))
    world.put(
        "gpu_reconciler_last_success_timestamp_seconds", RECONCILER, lambda t: 60.0 * (30 if 30 <= t <= 80 else t)
    )
    yield Case("a reconciler without evidence", world, [Firing("GpuReconcilerFrozen", 56, 81 + KEPT)])

    for result, seen in (
        ("unconfirmed", True),
        ("error", True),
        ("done", False),
        ("conflict", False),
        ("shadow", False),
    ):
        world = World(120)
        Node(world)
        world.put("gpu_reconciler_cycles_total", RECONCILER, lambda t: float(t))
        for each in ("done", "error"):  # each replica exports these from the start
            labels = {**RECONCILER, "instance": "standby", "action": "suspend", "result": each}
            world.put("gpu_reconciler_actions_total", labels, 0)
        labels = {**RECONCILER, "instance": "leader", "action": "suspend", "result": result}
        world.put("gpu_reconciler_actions_total", labels, lambda t: float(t // 20))
        failed = Firing("GpuReconcilerActionFailed", 30, 120, {"action": "suspend", "result": result})
        about = ["GpuReconcilerActionFailed"]
        yield Case(f"an action whose result is {result}", world, [failed] if seen else [], about=about)

    world = World(120)
    Node(world)
    for replica, cycles in (("a", lambda t: float(t)), ("b", lambda t: 0.0)):
        labels = {**RECONCILER, "instance": replica}
        world.put("gpu_reconciler_cycles_total", labels, cycles)
        world.put("gpu_reconciler_last_success_timestamp_seconds", labels, lambda t: 60.0 * min(t, 30))
        world.put("gpu_reconciler_frozen", {**labels, "reason": "paused"}, float(replica == "a"))
    yield Case("a pause", world, about=["GpuReconcilerFrozen", "GpuReconcilerDown"])

    for unreadable, seen in ((3.0, True), (1.0, False), (0.0, False)):
        world = World(120)
        Node(world)
        world.put("gpu_reconciler_cycles_total", RECONCILER, lambda t: float(t))
        world.put("gpu_reconciler_surveyed", RECONCILER, 20)
        labels = {**RECONCILER, "reason": "forbidden", "kind": "Pipeline"}
        world.put("gpu_reconciler_unreadable", labels, unreadable)
        firing = [Firing("GpuReconcilerUnreadable", 60, 120)] if seen else []
        yield Case(f"{unreadable:.0f} of 20 holders are unreadable", world, firing, about=["GpuReconcilerUnreadable"])

    world = World(120)
    Node(world)
    world.put("gpu_reconciler_cycles_total", RECONCILER, lambda t: float(t))
    world.put("gpu_reconciler_surveyed", RECONCILER, 0)
    yield Case("a reconciler that surveys no holder", world, about=["GpuReconcilerUnreadable"])
