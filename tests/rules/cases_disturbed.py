"""Owners' alerts through restarts, failed scrapes, renamed instances, frozen textfiles and second targets."""

from __future__ import annotations

from collections.abc import Iterator

from tests.rules.expected import END, FIRES, KEPT, absent, idle
from tests.rules.promtool import Case, Firing
from tests.rules.world import BUSY, IDLE, UNKNOWN, Node, World, always


def owners_disturbed() -> Iterator[Case]:
    """Failed scrapes, restarts, clocks, several targets, clusters: at most one notification."""
    for name, away, intervals in (
        ("one failed scrape", {120}, [(FIRES, END)]),
        ("three failed scrapes", {120, 121, 122}, [(FIRES, END)]),
        ("every third scrape fails", set(range(80, 140, 3)), [(FIRES, END)]),
    ):
        world = World(END)
        Node(world, scraped=lambda t, away=away: t not in away).hold(0, IDLE)
        yield Case(name, world, idle(*intervals), about=["GpuExporterDown"])

    world = World(240)
    world.away = set(range(120, 127))
    Node(world).hold(0, IDLE)
    yield Case(
        "Prometheus is down for seven minutes, and half an hour later the gap leaves the window",
        world,
        idle((FIRES, 240)),
        about=["GpuExporterBlind", "GpuMonitoringAbsent"],
    )

    world = World(240)
    Node(world, scraped=lambda t: not 120 <= t < 160).hold(0, IDLE)
    Node(world, "n2").hold(0, BUSY, pod="other-0")
    yield Case(
        "an exporter that is down for forty minutes and loses no time",
        world,
        # Again when the counters have two samples in the window (161), and ten minutes later.
        [*idle((FIRES, 120 + KEPT), (171, 240)), Firing("GpuExporterDown", 130, 160 + KEPT, {"node": "n1"})],
    )

    world = World(240)
    Node(world).hold(0, IDLE, from_zero=120)
    yield Case("counters that start again at 0", world, idle((FIRES, 240)), about=["GpuExporterBlind"])

    world = World(240)
    Node(world, state_fails=lambda t: t >= 120).hold(0, IDLE, counts=lambda t: t < 120)
    yield Case(
        "a state file that cannot be written, so that counters stop",
        world,
        # At minute 149 the window has fewer than two growing samples: no time was held, so the use is unknown.
        [*idle((FIRES, 149 + KEPT)), Firing("GpuExporterBlind", 131, 240, {"what": "counters"})],
    )

    world = World(240)
    # Its own idle run is an hour, but it observed only two thirds of the last half hour.
    Node(world).hold(0, lambda t: None if t % 3 == 0 else 0.0, idle_run=lambda t: 60.0 * t)
    yield Case("a GPU with a third of its time unknown", world, about=["GpuHolderIdle"])

    world = World(END)
    Node(world, sampled=lambda t: 60.0 * min(t, 100)).hold(0, IDLE)
    yield Case(
        "a frozen textfile",
        world,
        [*idle((FIRES, 105 + KEPT)), Firing("GpuExporterBlind", 115, END, {"what": "samples"})],
    )

    world = World(END)
    Node(world, interval=300, sampled=lambda t: 300.0 * (t // 5)).hold(0, lambda t: 0.0, counts=lambda t: True)
    yield Case("a textfile every five minutes", world, idle((FIRES, END)))

    world = World(190)
    Node(world, interval=86400, sampled=lambda t: 60.0 * min(t, 100)).hold(0, IDLE)
    yield Case(
        "an exporter that reports a sample interval of a day",
        world,
        [*idle((FIRES, 160 + KEPT)), Firing("GpuExporterBlind", 170, 190, {"what": "samples"})],
    )

    world = World(END)
    for target in ({"instance": "10.0.0.1:9836"}, {"instance": "10.0.0.2:9836"}):
        Node(world, target=target).hold(0, IDLE)
    yield Case(
        "two targets for one GPU",
        world,
        [
            *idle((FIRES, END), gpus="1"),
            Firing("GpuScrapeConfigWrong", 30, END, {"what": "two targets report the same GPU"}),
        ],
    )

    world = World(END)
    Node(world).hold(0, IDLE)
    # A textfile that was left behind: its sample is old, and its idle run is longer than the daemon's.
    Node(world, target={"instance": "left-behind"}, sampled=always(0.0)).hold(0, IDLE, idle_run=always(9e5))
    yield Case(
        "a textfile left behind beside the daemon",
        world,
        [
            Firing("GpuExporterBlind", 15, END, {"what": "samples"}),
            Firing("GpuScrapeConfigWrong", 30, END),
        ],
        about=["GpuHolderIdle"],
    )

    world = World(END)
    # The second target has observed nothing: its exporter cannot read the GPU.
    Node(world).hold(0, IDLE)
    Node(world, target={"instance": "second"}).hold(0, UNKNOWN)
    yield Case(
        "two targets, of which the one that has observed less counts",
        world,
        [Firing("GpuScrapeConfigWrong", 30, END)],
        about=["GpuHolderIdle"],
    )

    world = World(240)
    for instance, first, last in (("10.0.0.1:9836", 0, 120), ("10.0.0.9:9836", 121, 240)):
        part = _Part(world, instance, first, last)
        part.hold(0, IDLE)
    yield Case("a rollout that changes the instance", world, idle((FIRES, 240)), about=["GpuExporterDown"])

    world = World(END)
    node = Node(world, gpus=2)
    node.hold(0, IDLE, end=119)
    node.hold(0, IDLE, start=120, gpu="1", begun=0.0, idle_run=lambda t: 60.0 * t if t >= 120 else None)
    yield Case("a GPU whose index changes", world, idle((FIRES, END)))

    world = World(END)
    for cluster, activity in (("a", IDLE), ("b", BUSY)):
        Node(world, target={"cluster": cluster}).hold(0, activity)
    yield Case("two clusters with one node and pod name", world, idle((FIRES, END), cluster="a"))

    world = World(END)
    Node(world, target={"cluster": "a"}).hold(0, IDLE)
    Node(world, target={"cluster": "b"}, sampled=always(0.0)).hold(0, IDLE)
    yield Case(
        "a node that is down, with the same name in another cluster",
        world,
        [*idle((FIRES, END), cluster="a"), Firing("GpuExporterBlind", 15, END, {"cluster": "b"})],
    )

    world = World(END)
    for lab, activity in (("a", IDLE), ("b", BUSY)):
        node = Node(world, f"{lab}1", gpus=2)
        for gpu in range(2):
            node.hold(gpu, activity, job_id="42", units=2, info={"user": f"of-{lab}", "slurm_cluster": lab})
    yield Case(
        "two Slurm clusters with one job id, one busy",
        world,
        about=["GpuHolderIdle", "GpuHolderPartlyIdle", "GpuHolderLow"],
    )

    world = World(END)
    Node(world, target={"job": "another-exporter"}).hold(0, IDLE)
    yield Case("another scrape job with the same metric names", world, [absent(10, END)], about=["GpuHolderIdle"])

    world = World(END)
    node = Node(world)
    node.hold(0, IDLE, pod="gpu-exporter-x", exported_pod="train-0", exported_namespace="ml", namespace="monitoring")
    yield Case(
        "honor_labels is not set",
        world,
        [Firing("GpuScrapeConfigWrong", 30, END, {"what": "honor_labels is not set"})],
        about=["GpuHolderIdle"],
    )


class _Part(Node):
    """A node whose target, including `up`, exists only from minute `first` to minute `last`."""

    def __init__(self, world: World, instance: str, first: int, last: int) -> None:
        self.first, self.last = first, last
        super().__init__(world, target={"instance": instance}, scraped=lambda t: first <= t <= last)

    def put(self, name, labels, values, *, whatever=False):  # type: ignore[no-untyped-def]
        super().put(name, labels, values, whatever=False)
