"""Two targets for one node, two sources of holders, two replicas of kube-state-metrics: alerts if they disagree.

Also other cases that a change of a guard, a window or a label would affect: a day later, several kinds of fault at once, the
moment at which an alert ends.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.rules.expected import KEPT
from tests.rules.promtool import Case, Firing
from tests.rules.world import BUSY, Node, Values, World, always, between, until

END = 120
DAY = 1440
KUBE = {"job": "kube-state-metrics", "node": "n1"}
READY = {**KUBE, "condition": "Ready", "status": "true"}
WRONG = Firing("GpuScrapeConfigWrong", 30, END, {"what": "two targets report the same GPU", "job": "gpu-exporter"})


def disagreements() -> Iterator[Case]:
    yield from targets()
    yield from neighbours()
    yield from believed()
    yield from sources()
    yield from states()
    yield from offers()
    yield from ends()


def second_of(world: World, **more: object) -> Node:
    """Another target for node n1."""
    return Node(world, target={"instance": "second"}, **more)  # type: ignore[arg-type]


def targets() -> Iterator[Case]:
    world = World(END)
    Node(world, driver_up=0)
    second_of(world)
    yield Case("a driver that one of two targets reaches", world, [WRONG], about=["GpuDriverDown"])

    world = World(END)
    Node(world, driver_up=0, gpu_up={0: always(0.0)})
    second_of(world, driver_up=0, gpu_up={0: always(0.0)}, expected=0)
    Node(world, "n2")
    down = Firing("GpuDriverDown", 10, END, {"node": "n1"})
    yield Case("a driver that neither target reaches, while one of them expects no GPU", world, [WRONG, down])

    world = World(END)
    Node(world, driver_up=0, sampled=always(0.0))
    second_of(world, sampled=always(0.0))
    blind = Firing("GpuExporterBlind", 15, END, {"what": "samples", "node": "n1"})
    yield Case("neither target has new samples, and one reports that the driver is down", world, [WRONG, blind])

    world = World(END)
    Node(world)
    second_of(world, scraped=lambda _: False)
    yield Case("one of two targets is down", world, about=["GpuExporterDown"])

    world = World(END)
    Node(world, scraped=lambda t: t < 30)
    second_of(world, gpus=0, scraped=lambda t: t < 30)
    Node(world, "n2")
    down = Firing("GpuExporterDown", 40, END, {"node": "n1"})
    yield Case("two targets are down, one of them had GPUs", world, [down])

    world = World(END)
    Node(world, sampled=lambda t: 60.0 * t + 45)
    second_of(world)
    Node(world, "n2")
    ahead = Firing("GpuNodeClockWrong", 10, END, {"node": "n1"})
    yield Case("the clock of one of two targets is ahead", world, [WRONG, ahead])

    world = World(60)
    Node(world, gpus=100, gpu_up=dict.fromkeys(range(9), always(0.0)))
    second_of(world, gpus=100, gpu_up={8: always(0.0)})
    lost = Firing("GpuLost", 10, 60, {"gpu": "8", "node": "n1"})
    wrong = Firing("GpuScrapeConfigWrong", 30, 60)
    yield Case(
        "one of two targets reports eight of nine GPUs as lost", world, [wrong, lost], about=["GpuFleetDegraded"]
    )

    world = World(60)
    Node(world, gpus=8)
    yield Case("eight GPUs of a node", world, about=["GpuScrapeConfigWrong", "GpuLost", "GpuFleetDegraded"])

    world = World(DAY + 60)
    Node(world, scraped=lambda t: t < 20)
    Node(world, "n2")
    # In the last day, no sample shows that the node had GPUs: promtool's day includes its first minute.
    down = Firing("GpuExporterDown", 30, 19 + DAY + 1 + KEPT, {"node": "n1"})
    yield Case("an exporter that is down for more than a day", world, [down])

    world = World(DAY + 60)
    Node(world)
    reconciler = {"job": "gpu-exporter-reconciler"}
    for name, labels in (("gpu_reconciler_labelled", {"stage": "underused"}), ("gpu_reconciler_cycles_total", {})):
        ended: Values = until(30, lambda t: float(t) + 1, always(None))
        world.put(name, {**reconciler, **labels}, ended)
    stuck = Firing("GpuReconcilerStuck", 50, 30 + DAY + 1 + KEPT)
    yield Case("a reconciler with marks that is gone for more than a day", world, [stuck])


def neighbours() -> Iterator[Case]:
    """Allocations that differ in only one label: an old one, the only one proven idle, and young ones."""
    world = World(9)
    pod, job = {"namespace": "a", "pod": "a", "container": "a"}, {"job_id": "1"}
    first = Node(world, gpus=2, uuid="GPU-{index}")
    second = Node(world, "n2", gpus=2, uuid="GPU-{index}")

    def idle(node: Node, holder: dict[str, str], index: int = 0, mig: str = "", begun: float = 0.0) -> None:
        node.hold(index, lambda _: 0.0, idle_run=always(7200), begun=begun, mig=mig, **holder)

    for holder in (pod, job):
        idle(first, holder, begun=-7200)
        for index, mig in ((1, ""), (0, "1/0")):
            idle(first, holder, index, mig)
        idle(second, holder)
    for changed in ({**pod, "namespace": "b"}, {**pod, "pod": "b"}, {**pod, "container": "b"}):
        idle(first, changed)
    for changed in ({"job_id": "2"}, {"job_id": "1", "scheduler": "other"}):
        idle(first, changed)
    proven = "count by (scheduler) (allocation:gpu_idle_run_seconds:proven)"
    both = [('{scheduler="kubernetes"}', 1.0), ('{scheduler="slurm"}', 1.0)]
    yield Case("allocations that differ in one label", world, values=[(9, proven, both)])


def believed() -> Iterator[Case]:
    """Limits for the age of a sample, and for the observed share of the held time."""
    world = World(60)
    for name, interval, age in (("n1", 300, 900), ("n2", 300, 1500), ("n3", 300, 900)):
        Node(world, name, interval=interval, sampled=lambda t, age=age: 60.0 * t - age).free(0)
    Node(world, "n3", target={"instance": "second"}, interval=1, sampled=lambda t: 60.0 * t - 900)
    rows = [(f'{{node="{name}"}}', float(name != "n2")) for name in ("n1", "n2", "n3")]
    fresh = (60, "sum by (node) (target:gpu_exporter_fresh:bool)", rows)
    known = (60, "sum by (node) (unit:gpu_known:bool)", [rows[0], rows[2]])
    alerts = [Firing("GpuExporterBlind", 10, 60, {"node": "n2"}), Firing("GpuScrapeConfigWrong", 30, 60)]
    yield Case("textfiles that are written every five minutes", world, alerts, values=[fresh, known])

    world = World(30)
    node = Node(world, gpus=2)
    node.hold(0, lambda t: None if t == 24 else 0.9 if t >= 26 else 0.1, pod="known")
    node.hold(1, lambda t: None if t % 3 == 0 else 0.9, pod="hardly-known")
    means = (28, "round(sum by (pod) (allocation:gpu_utilization:ratio5m), 0.001)", [('{pod="known"}', 0.7)])
    yield Case("the mean of five minutes", world, values=[means])

    world = World(9)
    for instance, resource in (("first", "nvidia.com/gpu"), ("second", "nvidia.com/gpu.shared")):
        Node(world, target={"instance": instance}).hold(0, BUSY, info={"resource": resource})
    pools = [(9, "count by (pod) (allocation:gpu_pool:info)", [('{pod="train-0"}', 1.0)])]
    yield Case("two targets name another resource", world, values=pools)

    world = World(40)
    node = Node(world)
    for pod, held, observed in (("stands", 0.0, 0.0), ("begins", 0.02, 0.01), ("overtakes", 30.0, 60.0)):
        labels = {"gpu": "0", "uuid": node.uuids[0], "scheduler": "kubernetes", "namespace": "ml", "pod": pod}
        for kind, step in (("held", held), ("observed", observed)):
            node.put(f"gpu_allocation_{kind}_seconds_total", labels, lambda t, step=step: 60.0 + step * t)
    shares = [('{pod="begins"}', 0.5), ('{pod="overtakes"}', 1.0)]
    asked = "round(sum by (pod) (allocation:gpu_coverage:ratio30m), 0.001)"
    yield Case("shares of the time held", world, values=[(40, asked, shares)])


def sources() -> Iterator[Case]:
    success = "gpu_exporter_attribution_last_success_timestamp_seconds"
    world = World(END)
    node = Node(world)
    node.put(success, {"source": "slurm"}, 0)
    node.put("gpu_exporter_attribution_up", {"source": "slurm"}, 0)
    Node(world, "n2")
    blind = Firing("GpuExporterBlind", 16, END, {"what": "holders", "node": "n1"})
    yield Case("one of two sources of holders stops answering", world, [blind])

    world = World(END)
    node = Node(world)
    node.put("gpu_exporter_attribution_up", {"source": "slurm"}, 0)
    yield Case(
        "one of two sources of holders never answers",
        world,
        [Firing("GpuExporterBlind", 10, END, {"what": "holders", "node": "n1"})],
    )

    world = World(END)
    Node(world, source_answers=lambda t: t < 2)
    second_of(world)
    yield Case("a source answers one of two targets", world, [WRONG], about=["GpuExporterBlind"])

    world = World(END)
    Node(world, source_answers=lambda _: False)
    second_of(world, source_answers=lambda _: False)
    # The source answers the second target, which does not report since when.
    says = ("gpu_exporter_attribution_up", "gpu_exporter_attribution_complete")
    world.series = {
        name: [1.0] * len(row) if name.partition("{")[0] in says and "second" in name else row
        for name, row in world.series.items()
    }
    yield Case("a source that never answered one of two targets", world, [WRONG], about=["GpuExporterBlind"])

    world = World(END)
    Node(world, source_misses=lambda t: t >= 5)
    Node(world, "n2", source_misses=lambda t: t in (5, 20))
    blind = Firing("GpuExporterBlind", 15, END, {"what": "holders", "node": "n1"})
    yield Case("one source answers in part for long, another sometimes", world, [blind])

    world = World(END)
    node = Node(world)
    node.put("gpu_exporter_attribution_up", {"source": "slurm"}, 1)
    node.put("gpu_exporter_attribution_complete", {"source": "slurm"}, 0)
    node.put(success, {"source": "slurm"}, lambda t: 60 * t)
    blind = Firing("GpuExporterBlind", 10, END, {"what": "holders", "node": "n1"})
    yield Case("Slurm answers in part, and the kubelet completely", world, [blind])

    answered = "gpu_slurm_collector_last_success_timestamp_seconds"
    for name, times, start in (
        ("ends", lambda t: 60 * t if t < 5 else None, 20),
        ("no longer gets an answer", lambda t: 60 * min(t, 4), 20),
        ("never got an answer", lambda _: None, 10),
        ("answers", lambda t: 60 * t, None),
    ):
        world = World(END)
        Node(world)
        node = Node(world, "ctl", gpus=0, expected=0, target={"job": "gpu-exporter-slurm-collector"})
        node.put("gpu_slurm_collector_nodes", {}, 0)
        node.put(answered, {}, times)
        down = [] if start is None else [Firing("GpuSlurmCollectorDown", start, END)]
        yield Case(f"a Slurm collector {name}", world, down)

    collector = {"job": "gpu-exporter-slurm-collector"}
    for name, scraped, other, start in (
        ("that was never scraped", lambda _: False, None, 10),
        ("that was never scraped, beside one that answers", lambda _: False, lambda t: 60 * t, None),
        ("that is scraped from the sixth minute on", lambda t: t > 5, None, None),
    ):
        world = World(END)
        Node(world)
        node = Node(world, "ctl", gpus=0, expected=0, target=collector, scraped=scraped)
        if start is None and other is None:
            node.put(answered, {}, lambda t: 60 * t if t > 5 else None)
        if other is not None:
            Node(world, "ctl2", gpus=0, expected=0, target=collector).put(answered, {}, other)
        down = [] if start is None else [Firing("GpuSlurmCollectorDown", start, END)]
        yield Case(f"a Slurm collector {name}", world, down, about=["GpuSlurmCollectorDown"])

    world = World(END)
    Node(world)
    Node(world, "ctl", gpus=0, expected=0, target={"job": "gpu-exporter-reconciler"}, scraped=lambda _: False)
    yield Case("a reconciler without a collector that was never scraped", world, about=["GpuSlurmCollectorDown"])

    world = World(END)
    Node(world)
    node = Node(world, "ctl", gpus=0, expected=0, target={"job": "collector"})
    node.put("gpu_slurm_collector_nodes", {}, 2)
    node.put(answered, {}, lambda t: 60 * t)
    wrong = Firing("GpuScrapeConfigWrong", 30, END, {"job": "collector"})
    yield Case("a Slurm collector in a scrape job of another name", world, [wrong])

    world = World(END)
    Node(world, sampled=always(0.0), source_answers=lambda _: False)
    both = [
        Firing("GpuExporterBlind", start, END, {"what": what}) for what, start in (("samples", 15), ("holders", 10))
    ]
    yield Case("an exporter that is blind in two ways", world, both)


def states() -> Iterator[Case]:
    written = "gpu_exporter_state_last_write_timestamp_seconds"

    def without(world: World, name: str, part: str) -> World:
        world.series = {key: row for key, row in world.series.items() if name not in key or part not in key}
        return world

    world = World(END)
    Node(world)
    yield Case("an exporter that keeps no state", without(world, written, ""), about=["GpuExporterBlind"])

    world = World(END)
    Node(world, state_fails=lambda _: True)
    second_of(world)
    Node(world, "n2")
    blind = Firing("GpuExporterBlind", 11, END, {"what": "counters", "node": "n1"})
    yield Case(
        "one of two targets cannot write its state, the other keeps none",
        without(world, written, "second"),
        [WRONG, blind],
    )

    world = World(END)
    Node(world, state_fails=lambda t: t >= 5)
    second_of(world)
    yield Case("one of two targets cannot write its state", world, [WRONG], about=["GpuExporterBlind"])

    world = World(END)
    node = Node(world, state_fails=lambda t: t >= 30)
    errors = "gpu_exporter_state_write_errors_total"
    for name, row in world.series.items():
        if name.startswith(errors):
            world.series[name] = [None if value is None else min(value, row[40] or 0.0) for value in row]
    # The last error is in minute 40. The last window of fifteen minutes (with both ends) that includes it ends at 55.
    blind = Firing("GpuExporterBlind", 41, 55 + KEPT, {"what": "counters", "node": node.name})
    yield Case("a state file that the exporter no longer tries to write", world, [blind])


def offers() -> Iterator[Case]:
    """Series of kube-state-metrics for a node without an exporter, or with an exporter that never answered."""

    def offer(world: World, resource: str, amount: float, **more: str) -> None:
        world.put("kube_node_status_allocatable", {**KUBE, "resource": resource, **more}, amount)

    for exporter, alert, start in ((True, "GpuExporterDown", 10), (False, "GpuNodeWithoutExporter", 30)):
        prefix = "never answered" if exporter else "without an exporter"
        firing = [Firing(alert, start, END, {"node": "n1"})]

        def world_of(exporter: bool = exporter) -> World:
            world = World(END)
            if exporter:
                Node(world, gpus=0, scraped=lambda _: False)
            Node(world, "n2")
            return world

        world = world_of()
        offer(world, "nvidia_com_gpu", 0)
        yield Case(f"{prefix}: a node that offers none of its GPUs", world, about=[alert])

        world = world_of()
        offer(world, "nvidia_com_gpu", 1)
        yield Case(f"{prefix}: a node that offers one GPU", world, firing)

        world = world_of()
        offer(world, "nvidia_com_gpu", 0)
        offer(world, "nvidia_com_mig_1g_10gb", 7)
        yield Case(f"{prefix}: a node that offers MIG instances", world, firing)

        world = world_of()
        offer(world, "nvidia_com_gpu", 8)
        world.put("kube_node_status_condition", {**READY, "instance": "old"}, 0)
        world.put("kube_node_status_condition", {**READY, "instance": "new"}, 1)
        yield Case(f"{prefix}: a node that one kube-state-metrics calls ready", world, firing)


def ends() -> Iterator[Case]:
    """The end of alerts that end in no other case."""
    world = World(END)
    Node(world, "n2")
    Node(world, scraped=lambda t: t >= 60)
    # Without any `up` before: the exporter is installed at 60.
    world.series = {
        name: [None if 'node="n1"' in name and t < 60 else value for t, value in enumerate(row)]
        for name, row in world.series.items()
    }
    world.put("kube_node_status_allocatable", {**KUBE, "resource": "nvidia_com_gpu"}, 1)
    yield Case("an exporter is installed", world, [Firing("GpuNodeWithoutExporter", 30, 60 + KEPT)])

    world = World(END)
    Node(world)
    second_of(world, scraped=lambda t: t < 60)
    wrong = Firing("GpuScrapeConfigWrong", 30, 60 + KEPT, {"job": "gpu-exporter"})
    yield Case("the second target is removed", world, [wrong])

    world = World(END)
    Node(world, gpus=8, gpu_up=dict.fromkeys(range(8), between(0, 59, always(0.0), always(1.0))))
    lost = [Firing("GpuLost", 10, 60 + KEPT, {"gpu": str(gpu), "node": "n1"}) for gpu in range(8)]
    yield Case("eight GPUs answer again", world, [*lost, Firing("GpuFleetDegraded", 10, 60 + KEPT)])

    world = World(END)
    Node(world).hold(0, BUSY)
    yield Case("no fault at all", world, about=["GpuExporterDown", "GpuExporterBlind", "GpuNodeClockWrong"])
