"""What must fire, and what must not, in worlds of one thing gone wrong each. Minutes are worked out by hand.

An owner's alert: idle for more than 60 min is true at minute 61, `for: 10m` makes it fire at 71; `keep_firing_for: 15m`
keeps it for 14 minutes after the first in which it is no longer true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tests.rules.crowd import crowds
from tests.rules.disagree import disagreements
from tests.rules.others import others
from tests.rules.promtool import Case, Firing
from tests.rules.world import BUSY, IDLE, UNKNOWN, Activity, Node, World, always, between, throttled, until

FIRES = 71  # GpuHolderIdle of a holder that is idle from minute 0
END = 140  # of most worlds
KEPT = 14  # minutes for which an alert stays after the first in which its expression is empty


def all_cases() -> list[Case]:
    """Every case, in promtool's hands for a second or two each."""
    short = [replace(case, settings={"low_over": "2h"}) for case in (*low(), *named())]
    cases = [
        *owners(),
        *owners_disturbed(),
        *owners_reconciled(),
        *partly_until(),
        *short,
        *hardware(),
        *exporters(),
        *fleet(),
        *tenants(),
        *others(),
        *disagreements(),
        *crowds(),
    ]
    return [*cases, *(beside_another_cluster(case) for case in cases if case.name in BESIDE), *clusters()]


# One case for each alert, or each half of it, once more beside another cluster.
BESIDE = (
    "one busy GPU of sixteen",
    "a pod at a tenth",
    "throttled: hw_power_brake",
    "an XID of class hardware",
    "GpuRecoveryNeeded",
    "GpuEccUncorrected",
    "GpuRowRemapFailed",
    "GpuRowRemapPending",
    "one of eight GPUs is lost",
    "the driver is down for a while",
    "scrapes of one node fail",
    "an exporter that never answered, on a node that offers GPUs",
    "a node that offers GPUs and has no exporter",
    "no source says who holds what",
    "a source that never answered",
    "a state file that cannot be written, so that counters stop",
    "a clock that is ahead",
    "2 GPUs of 3 nodes, hw_power_brake 0.6",
    "a reconciler with 3 marks that stands still",
    "a reconciler without evidence",
    "pods wait while GPUs are idle",
)


# Cases in which Prometheus 3, whose ranges are open on the left, is a minute earlier or later somewhere.
SHIFTED = (
    "a state file that cannot be written, so that counters stop",
    "a reconciler that was removed",
    "a reconciler with 3 marks that stands still",
    "a reconciler with 3 marks that is gone",
    "dcgm: a pod that stops working",
    "an exporter that is down for more than a day",
    "a reconciler with marks that is gone for more than a day",
    "a state file that nobody tries to write any more",
    "six hot GPUs whose power is well, until they cool down",
    "two replicas: both replicas have ended",
    "two replicas: one mark, and the reconciler has ended",
    "a reconciler without evidence, and then no cycles either",
    "jobs begin to wait, and get their GPUs",
    "jobs wait, and a second GPU becomes idle",
    "Prometheus was away for half of the window",
    "half of the time was not known, and now it is",
)


def beside_another_cluster(case: Case) -> Case:
    """The same in cluster a, while in cluster b a node, a pod and a reconciler of the same names are well."""
    world = World(case.world.minutes)
    world.series = {name.replace("{", '{cluster="a", ', 1): row for name, row in case.world.series.items()}
    node = Node(world, gpus=1, target={"cluster": "b"}, uuid="GPU-n1-{index}")
    node.hold(0, BUSY, info={"resource": "nvidia.com/gpu"})
    gpu = {"gpu": "0", "uuid": node.uuids[0]}
    for name in ("gpu_recovery_action", "gpu_remapped_rows_failed", "gpu_remapped_rows_pending"):
        node.put(name, gpu, 0)
    node.put("gpu_ecc_errors_total", {**gpu, "severity": "uncorrected"}, 0)
    throttled(node, 0, "hw_power_brake", always(0.0))
    kube = {"job": "kube-state-metrics", "cluster": "b", "node": "n1"}
    world.put("kube_node_status_allocatable", {**kube, "resource": "nvidia_com_gpu"}, 8)
    world.put("kube_node_status_condition", {**kube, "condition": "Ready", "status": "true"}, 1)
    other = {**RECONCILER, "cluster": "b"}
    world.put("gpu_reconciler_cycles_total", other, lambda t: float(t))
    world.put("gpu_reconciler_last_success_timestamp_seconds", other, lambda t: 60.0 * t)
    world.put("gpu_reconciler_labelled", {**other, "stage": "underused"}, 1)
    firing = [replace(each, labels={**each.labels, "cluster": "a"}) for each in case.firing]
    values = [] if case.values else case.values
    return replace(case, name=f"{case.name}; another cluster is well", world=world, firing=firing, values=values)


def clusters() -> Iterator[Case]:
    """What is wrong in one cluster mutes nothing in another."""
    away = {"job": "kube-state-metrics", "cluster": "b", "node": "n1", "condition": "Ready", "status": "true"}
    world = World(120)
    Node(world, target={"cluster": "a"}, scraped=lambda t: t < 30)
    Node(world, "n2", target={"cluster": "a"})
    world.put("kube_node_status_condition", away, 0)
    yield Case(
        "an exporter that is down, while its namesake in another cluster is not ready",
        world,
        [Firing("GpuExporterDown", 40, 120, {"cluster": "a", "node": "n1"})],
    )

    world = World(120)
    Node(world, "n2", target={"cluster": "a"})
    world.put("kube_node_status_allocatable", {**away, "cluster": "a", "resource": "nvidia_com_gpu"}, 8)
    world.put("kube_node_status_condition", away, 0)
    yield Case(
        "a node without an exporter, while its namesake is not ready",
        world,
        [Firing("GpuNodeWithoutExporter", 30, 120, {"cluster": "a"})],
    )

    world = World(120)
    Node(world, gpus=2, target={"cluster": "a"}, gpu_up={0: always(0.0)})
    Node(world, target={"cluster": "b"}, sampled=always(0.0))
    yield Case(
        "a GPU that is lost, while the exporter of its node's namesake is blind",
        world,
        [Firing("GpuLost", 10, 120, {"cluster": "a"}), Firing("GpuExporterBlind", 15, 120, {"cluster": "b"})],
    )

    world = World(120)
    Node(world, target={"cluster": "a"}, driver_up=0, gpu_up={0: always(0.0)})
    Node(world, target={"cluster": "b"}, gpus=0, driver_up=0)
    yield Case(
        "a driver that is down, while its namesake has no GPU",
        world,
        [Firing("GpuDriverDown", 10, 120, {"cluster": "a"})],
    )


def idle(*intervals: tuple[int, int], **labels: str) -> list[Firing]:
    return [Firing("GpuHolderIdle", start, end, labels) for start, end in intervals]


def owners() -> Iterator[Case]:
    """One holder, whole and undisturbed; and what is not idle."""
    world = World(END)
    Node(world).hold(0, IDLE)
    yield Case("an idle pod", world, idle((FIRES, END), pod="train-0", gpus="1"))

    world = World(END)
    Node(world).hold(0, IDLE, job_id="42", info={"user": "ada", "account": "phys", "partition": "gpu", "qos": "low"})
    yield Case(
        "an idle job",
        world,
        idle((FIRES, END), job_id="42", user="ada", account="phys", partition="gpu", qos="low"),
        values=[(100, "sum(ALERTS{alertname='GpuHolderIdle'} * 0 + 1)", [("{}", 1)])],
    )

    world = World(END)
    Node(world).hold(0, until(119, IDLE, BUSY))
    yield Case("an idle pod that works again", world, idle((FIRES, 120 + KEPT)))

    world = World(END)
    Node(world).hold(0, IDLE, end=119)
    yield Case("an idle pod that ends", world, idle((FIRES, 120 + KEPT)))

    world = World(END)
    Node(world).hold(0, BUSY)
    yield Case("a busy pod", world, about=["GpuHolderIdle"])

    world = World(END)
    Node(world).hold(0, lambda t: 0.0 if t % 50 else 0.2)
    yield Case("a pod that works each 50 minutes", world, about=["GpuHolderIdle"])

    world = World(END)
    Node(world).hold(0, UNKNOWN)
    yield Case("a pod whose activity is not known", world, about=["GpuHolderIdle"])

    world = World(END)
    Node(world).free(0)
    yield Case("a free GPU", world, about=["GpuHolderIdle"])

    world = World(190)
    # As a source without its own idle run would say it: the GPU is idle, its holder is young.
    Node(world).hold(0, IDLE, start=100, idle_run=lambda t: 60.0 * t if t >= 100 else None)
    yield Case("a young holder of a GPU that was idle before", world, idle((171, 190)))

    world = World(END)
    node = Node(world, gpus=16)
    for gpu in range(16):
        node.hold(gpu, IDLE if gpu else BUSY, units=16)
    yield Case(
        "one busy GPU of sixteen",
        world,
        [Firing("GpuHolderPartlyIdle", 91, END, {"pod": "train-0"})],
        values=[(130, "max(holder:gpu_units:max)", [("{}", 16)])],
        about=["GpuHolderIdle"],
    )

    world = World(END)
    for name in ("n1", "n2"):
        node = Node(world, name, gpus=8)
        for gpu in range(8):
            node.hold(gpu, IDLE, units=16, job_id="42")
    yield Case("an idle job on two nodes", world, idle((FIRES, END), job_id="42", gpus="16"))

    world = World(END)
    Node(world).hold(0, IDLE, units=2)
    yield Case(
        "half of a holder is on a node that nobody scrapes",
        world,
        [Firing("GpuHolderPartlyIdle", 91, END)],
        about=["GpuHolderIdle"],
    )

    world = World(END)
    node = Node(world, gpus=2)
    node.hold(0, until(79, IDLE, UNKNOWN), units=2)
    node.hold(1, IDLE, units=2)
    # The unknown half is no longer proven: partly idle from 80 on, pending since.
    yield Case(
        "one GPU of an idle pod is no longer known",
        world,
        [*idle((FIRES, 80 + KEPT)), Firing("GpuHolderPartlyIdle", 110, END)],
    )

    world = World(END)
    node = Node(world, gpus=1)
    node.hold(0, IDLE, mig="1/0", share=1 / 7)
    node.hold(0, BUSY, mig="2/0", share=2 / 7, pod="other-0")
    yield Case("an idle MIG instance beside a busy one", world, idle((FIRES, END), pod="train-0"))

    world = World(END)
    node = Node(world, gpus=1)
    for pod in ("a", "b"):
        node.hold(0, UNKNOWN, share=0.5, pod=pod, idle_run=always(None))
    yield Case("a shared GPU, on which nobody is judged", world, about=["GpuHolderIdle"])

    world = World(END)
    node = Node(world, gpus=2)
    node.hold(0, IDLE, units=2)
    node.hold(1, IDLE, units=2, container="second")
    yield Case("two idle containers of one pod", world, idle((FIRES, END), gpus="2"))

    world = World(END)
    Node(world).hold(0, IDLE, end=99)
    second = Node(world, uuid="GPU-{name}-{index}")
    second.hold(0, BUSY, start=101)
    yield Case("a pod replaced by a busy one of the same name", world, idle((FIRES, 100 + KEPT)))

    world = World(260)
    node = Node(world)
    node.hold(0, IDLE, end=99)
    node.hold(0, IDLE, start=101)
    yield Case(
        "a pod replaced by an idle one of the same name: a new hour",
        world,
        idle((FIRES, 100 + KEPT), (101 + 60 + 11, 260)),
    )


def owners_disturbed() -> Iterator[Case]:
    """Scrapes that fail, restarts, clocks, several targets, clusters: one notification, or none."""
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
        "Prometheus is away for seven minutes, and half an hour later the hole leaves the window",
        world,
        idle((FIRES, 240)),
        about=["GpuExporterBlind", "GpuMonitoringAbsent"],
    )

    world = World(240)
    Node(world, scraped=lambda t: not 120 <= t < 160).hold(0, IDLE)
    Node(world, "n2").hold(0, BUSY, pod="other-0")
    yield Case(
        "an exporter that is away for forty minutes and lost no time",
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
        # Within the window less than two samples of growth are left at minute 149: nothing was held, so nothing is known.
        [*idle((FIRES, 149 + KEPT)), Firing("GpuExporterBlind", 131, 240, {"what": "counters"})],
    )

    world = World(240)
    # Its own idle run says an hour, but of the last half hour it saw two thirds.
    Node(world).hold(0, lambda t: None if t % 3 == 0 else 0.0, idle_run=lambda t: 60.0 * t)
    yield Case("a GPU of which a third of the time is not known", world, about=["GpuHolderIdle"])

    world = World(END)
    Node(world, sampled=lambda t: 60.0 * min(t, 100)).hold(0, IDLE)
    yield Case(
        "a frozen textfile",
        world,
        [*idle((FIRES, 105 + KEPT)), Firing("GpuExporterBlind", 115, END, {"what": "samples"})],
    )

    world = World(END)
    Node(world, interval=300, sampled=lambda t: 300.0 * (t // 5)).hold(0, lambda t: 0.0, counts=lambda t: True)
    yield Case("a textfile each five minutes", world, idle((FIRES, END)))

    world = World(190)
    Node(world, interval=86400, sampled=lambda t: 60.0 * min(t, 100)).hold(0, IDLE)
    yield Case(
        "a page that claims to be written once a day",
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
    # A textfile left behind: its sample is old and its run says more than the daemon's.
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
    # The other one has seen nothing: a second exporter that cannot read the GPU.
    Node(world).hold(0, IDLE)
    Node(world, target={"instance": "second"}).hold(0, UNKNOWN)
    yield Case(
        "of two targets the one that has seen less counts",
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
        "a dead node of the same name in another cluster",
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
    Node(world, target={"job": "somebody-else"}).hold(0, IDLE)
    yield Case("a foreign job with our names", world, [absent(10, END)], about=["GpuHolderIdle"])

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
    """A node whose target exists, `up` included, from one minute to another only."""

    def __init__(self, world: World, instance: str, first: int, last: int) -> None:
        self.first, self.last = first, last
        super().__init__(world, target={"instance": instance}, scraped=lambda t: first <= t <= last)

    def put(self, name, labels, values, *, whatever=False):  # type: ignore[no-untyped-def]
        super().put(name, labels, values, whatever=False)


def absent(start: int, end: int) -> Firing:
    return Firing("GpuMonitoringAbsent", start, end)


RECONCILER = {"job": "gpu-exporter-reconciler"}


def owners_reconciled() -> Iterator[Case]:
    """Where a reconciler runs, its stages decide who is told; and what owners are named by."""
    for name, stage, intervals in (
        ("a reconciler that lists the pod", "candidate", [(FIRES, END)]),
        ("a reconciler that does not list the pod, e.g. since it is exempt", "", []),
        ("a reconciler that says of the pod what is no reason to report it", "exempt", []),
    ):
        world = World(END)
        Node(world).hold(0, IDLE)
        world.put("gpu_reconciler_cycles_total", RECONCILER, lambda t: float(t))
        if stage:
            holder = {"scheduler": "kubernetes", "namespace": "ml", "pod": "train-0", "stage": stage}
            world.put("gpu_reconciler_allocation_stage", {**RECONCILER, **holder}, 1)
        yield Case(name, world, idle(*intervals), about=["GpuHolderIdle", "GpuHolderPartlyIdle"])

    world = World(END)
    node = Node(world, gpus=2)
    node.hold(0, IDLE, units=2)
    node.hold(1, BUSY, units=2)
    world.put("gpu_reconciler_cycles_total", RECONCILER, lambda t: float(t))
    yield Case("a partly idle pod that the reconciler does not list", world, about=["GpuHolderPartlyIdle"])

    world = World(240)
    Node(world).hold(0, IDLE)
    world.put("gpu_reconciler_cycles_total", RECONCILER, lambda t: float(t) if t < 100 else None)
    # An hour after its last sample (99) the rules decide alone.
    yield Case("a reconciler that was removed", world, idle((170, 240)))

    world = World(END)
    Node(world, target={"cluster": "a"}).hold(0, IDLE)
    Node(world, target={"cluster": "b"}).hold(0, IDLE)
    world.put("gpu_reconciler_cycles_total", {**RECONCILER, "cluster": "b"}, lambda t: float(t))
    yield Case("a reconciler in one of two clusters", world, idle((FIRES, END), cluster="a"))

    pod = {"namespace": "ml", "pod": "train-0"}
    world = World(100)
    Node(world).hold(0, IDLE)
    world.put("namespace_workload_pod:kube_pod_owner:relabel", {**pod, "workload": "train", "workload_type": "job"}, 1)
    labels = {
        "label_team": "vision",
        "label_kueue_x_k8s_io_queue_name": "q1",
        "label_project": "p7",
        "label_phase": "x",
    }
    for place in ("10.0.0.1", "10.0.0.2"):  # two kube-state-metrics, as during its own rollout
        world.put("kube_pod_labels", {**pod, **labels, "instance": place}, 1)
    named = {"workload": "train", "workload_type": "job", "team": "vision", "queue": "q1"}
    yield Case("a pod whose workload, team and queue are known", world, idle((FIRES, 100), label_project="", **named))
    site = {"pod_labels": "label_project, label_absent"}
    more = {**named, "label_project": "p7", "label_phase": ""}
    yield Case("a pod of which the site wants one label more", world, idle((FIRES, 100), **more), settings=site)


def partly_until() -> Iterator[Case]:
    world = World(200)
    node = Node(world, gpus=2)
    node.hold(0, until(120, IDLE, BUSY), units=2)
    node.hold(1, BUSY, units=2)
    yield Case("the idle one of two GPUs begins to work", world, [Firing("GpuHolderPartlyIdle", 91, 120 + 30)])


def named() -> Iterator[Case]:
    """Every label that says whose it is, on each owners' alert: pods, tasks of arrays, components of het jobs."""
    pod = {"namespace": "ml", "pod": "train-0"}
    workload = {"workload": "train", "workload_type": "job"}
    team = {"label_team": "vision", "label_kueue_x_k8s_io_queue_name": "q1"}
    job = {"user": "mira", "account": "phys", "partition": "long", "qos": "low"}
    array, het = {"array_job_id": "6", "array_task_id": "1"}, {"het_job_id": "8", "het_job_offset": "1"}
    expected: tuple[Mapping[str, str], ...] = (
        {**pod, **workload, "team": "vision", "queue": "q1"},
        {"job_id": "7", **job, **array},
        {"job_id": "9", **job, **het},
    )
    for alert, start, first, other in (
        ("GpuHolderIdle", FIRES, IDLE, IDLE),
        ("GpuHolderPartlyIdle", 91, IDLE, BUSY),
        ("GpuHolderLow", 161, lambda _: 0.1, lambda _: 0.1),
    ):
        world = World(210)
        node = Node(world, gpus=6)
        world.put("namespace_workload_pod:kube_pod_owner:relabel", {**pod, **workload}, 1)
        world.put("kube_pod_labels", {**pod, **team}, 1)
        for index, activity in enumerate((first, other)):
            node.hold(index, activity, units=2)
            node.hold(2 + index, activity, units=2, job_id="7", info={**job, **array})
            node.hold(4 + index, activity, units=2, job_id="9", info={**job, **het})
        yield Case(f"whose it is: {alert}", world, [Firing(alert, start, 210, labels) for labels in expected])


def low() -> Iterator[Case]:
    """GpuHolderLow looks back over six hours, here two, of a holder that is half an hour older."""
    minutes = 210
    lazy: Activity = lambda t: 0.1  # noqa: E731

    def firing(start: int, end: int, **labels: str) -> list[Firing]:
        return [Firing("GpuHolderLow", start, end, labels)]

    old = -3600.0 * 24
    world = World(minutes)
    Node(world).hold(0, lazy)
    # Older than 150 min at 151; ten minutes later it fires.
    yield Case("a pod at a tenth", world, firing(161, minutes, pod="train-0"))

    world = World(minutes)
    Node(world).hold(0, lazy, begun=old)
    # The window has 96 of its 120 recordings at 96: the first is made at 1, when there are two samples.
    yield Case("monitoring that is younger than the holder", world, firing(106, minutes))

    world = World(minutes)
    Node(world).hold(0, lambda t: 0.2)
    yield Case("a pod at a fifth", world, about=["GpuHolderLow"])

    world = World(minutes)
    Node(world).hold(0, lambda t: 0.0 if t % 20 else 1.0)
    yield Case("a pod that works one minute of twenty", world, firing(161, minutes))

    world = World(minutes)
    Node(world).hold(0, IDLE)
    yield Case("an idle pod is not low besides", world, idle((FIRES, minutes)), about=["GpuHolderLow"])

    world = World(minutes)
    node = Node(world, gpus=2)
    node.hold(0, lazy, units=2)
    node.hold(1, lambda t: 0.9, units=2)
    yield Case("of two GPUs one is busy", world, about=["GpuHolderLow"])

    world = World(minutes)
    node = Node(world, gpus=2)
    node.hold(0, lazy, units=2)
    node.hold(1, lambda t: 0.0, units=2)
    yield Case(
        "of two GPUs one is idle, which is said already",
        world,
        [Firing("GpuHolderPartlyIdle", 91, minutes)],
        about=["GpuHolderLow"],
    )

    world = World(minutes)
    Node(world).hold(0, lazy, units=2)
    yield Case("half of the holder is not seen", world, about=["GpuHolderLow"])

    world = World(minutes)
    Node(world).hold(0, lambda t: None if t % 5 == 0 else 0.1)
    yield Case("a fifth of the time is not known", world, about=["GpuHolderLow"])

    world = World(200)
    first, second = (Node(world, name, gpus=5, uuid="GPU-{name}-{index}") for name in ("n1", "n2"))
    second.uuids[2] = first.uuids[2]
    for pod, node, index, more in (
        ("gpus", first, 1, {}),
        ("nodes", second, 2, {}),
        ("instances", first, 3, {"mig": "2/0"}),
        ("containers", first, 4, {"container": "second"}),
    ):
        same = {"mig": "1/0"} if "mig" in more else {}
        first.hold(0 if pod == "gpus" else index, lazy, units=2, pod=pod, **same)
        node.hold(index, lazy, units=2, pod=pod, start=100, begun=0.0, **more)  # 96 recordings of it are there at 197
    yield Case("of two allocations of a pod one is not known long enough", world, about=["GpuHolderLow"])

    world = World(300)
    Node(world).hold(0, lambda t: None if t % 2 and t < 150 else 0.1)
    yield Case("half of the time was not known, and now it is", world, firing(271, 300))

    world = World(400)
    world.away = set(range(200, 260))
    Node(world).hold(0, until(199, BUSY, lazy))
    # 96 of two hours' 120 recordings are there at 356.
    yield Case("Prometheus was away for half of the window", world, [*firing(366, 400), absent(215, 274)])

    world = World(minutes)
    Node(world, sampled=lambda t: 60.0 * min(t, 120)).hold(0, lazy)
    yield Case(
        "a frozen textfile is not low",
        world,
        [Firing("GpuExporterBlind", 135, minutes)],
        about=["GpuHolderLow"],
    )

    world = World(270)
    Node(world).hold(0, until(180, lazy, BUSY))
    # Above 15 % with the eighth minute of 0.9 in the window; the recordings of half an hour lag by a quarter.
    yield Case("a pod that begins to work", world, firing(161, 180 + 21 + 29))


def hardware() -> Iterator[Case]:
    reasons = ("thermal", "sw_thermal", "hw_thermal", "hw_power_brake", "board_limit", "reliability")
    for reason in reasons:
        world = World(120)
        node = Node(world)
        node.free(0)
        throttled(node, 0, reason, between(20, 80, always(0.5), always(0.0)))
        name = "thermal" if reason.endswith("thermal") else reason
        # Over a tenth of 30 min after 7 minutes at a half: 26; of 5 min until 84.
        yield Case(
            f"throttled: {reason}",
            world,
            [Firing("GpuThrottled", 36, 84 + KEPT, {"reason": name, "uuid": node.uuids[0]})],
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
    yield Case("slowed down for eight minutes, and that is over", world, about=["GpuThrottled"])

    world = World(120)
    node = Node(world)
    throttled(node, 0, "thermal", always(0.5))
    throttled(node, 0, "sw_thermal", always(0.5))
    yield Case("two reasons of one root", world, [Firing("GpuThrottled", 17, 120, {"reason": "thermal"})])

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
        # The event was at 29:10, before the first scrape that shows it; the exporter restarted at 50.
        yield Case(
            f"an XID of class {kind}",
            world,
            [Firing("GpuXid", 30, 89, {"xid": "79"})] if fires else [],
            about=["GpuXid"],
        )

    for name, metric, labels, bad, good in (
        ("GpuRecoveryNeeded", "gpu_recovery_action", {}, 1.0, 0.0),
        ("GpuEccUncorrected", "gpu_ecc_errors_total", {"severity": "uncorrected"}, 3.0, 0.0),
        ("GpuRowRemapFailed", "gpu_remapped_rows_failed", {}, 1.0, 0.0),
        ("GpuRowRemapPending", "gpu_remapped_rows_pending", {}, 1.0, 0.0),
    ):
        world = World(120)
        node = Node(world, scraped=lambda t: t != 50)
        node.free(0)
        node.put(metric, {**gpu, **labels}, between(30, 80, always(bad), always(good)))
        yield Case(name, world, [Firing(name, 40, 81 + KEPT, gpu)])

        world = World(60)
        Node(world).put(metric, {**gpu, **labels}, 0)
        yield Case(f"{name}: all is well", world, about=[name])

    world = World(60)
    Node(world).put("gpu_ecc_errors_total", {**gpu, "severity": "corrected"}, 9)
    yield Case("corrected errors", world, about=["GpuEccUncorrected"])

    world = World(120)
    Node(world, gpus=8, gpu_up={3: between(30, 80, always(0.0), always(1.0))})
    yield Case("one of eight GPUs is lost", world, [Firing("GpuLost", 40, 81 + KEPT, {"gpu": "3"})])

    world = World(120)
    Node(world, gpu_up={0: until(29, always(1.0), always(0.0))}, driver_up=until(29, always(1.0), always(0.0)))
    yield Case("the driver is down, and its GPUs with it", world, [Firing("GpuDriverDown", 40, 120)], about=["GpuLost"])

    world = World(120)
    Node(world, gpu_up={0: until(29, always(1.0), always(0.0))}, sampled=lambda t: 60.0 * min(t, 29))
    # Lost until the last sample is older than five minutes; then no GPU of the node was read.
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
            # A tenth of half an hour is full after 5 min at 0.6 and 8 at 0.4.
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
        # The tenth of half an hour: from 25 until 84; that of the last 5 min until 63.
        Firing("GpuThrottled", 35, 64 + KEPT, {"uuid": uuid, "reason": "thermal"})
        for node in each
        for uuid in node.uuids
    ]
    many = [Firing("GpuThrottledMany", 42, 62 + KEPT)]
    yield Case("six hot GPUs whose power is well, until they cool down", world, [*single, *many])


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

    world = World(120)
    Node(world, "n2")
    world.put("kube_node_status_allocatable", offers, 8)
    world.put("kube_node_status_condition", ready, 0)
    world.put("kube_node_status_condition", {**ready, "status": "false"}, 1)
    world.put("kube_node_status_condition", {**ready, "condition": "MemoryPressure"}, 1)
    yield Case("such a node that is not ready", world, about=["GpuNodeWithoutExporter"])

    world = World(120)
    Node(world, "n2")
    world.put("kube_node_status_allocatable", {**offers, "resource": "cpu"}, 8)
    yield Case("a node that offers no GPU", world, about=["GpuNodeWithoutExporter"])

    world = World(120)
    Node(world, source_answers=lambda t: not 30 <= t <= 80)
    # Its last answer is older than 300 s from 35 on.
    yield Case("no source says who holds what", world, [Firing("GpuExporterBlind", 45, 81 + KEPT, {"what": "holders"})])

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
        "the agent's own pod on its series",
        world,
        [Firing("GpuScrapeConfigWrong", 30, 120, {"what": "GPU series carry the pod of the agent"})],
    )

    for marked, cycles, fires in (
        (3.0, lambda t: float(min(t, 30)), True),
        (3.0, lambda t: float(t) if t <= 30 else None, True),
        (0.0, lambda t: float(min(t, 30)), False),
        (3.0, lambda t: float(t), False),
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
        # The last cycle is ten minutes ago at 40; ten more.
        yield Case(
            f"a reconciler with {marked:g} marks that {'stands still' if cycles(100) == 30 else 'goes on' if cycles(100) else 'is gone'}",
            world,
            [Firing("GpuReconcilerStuck", 50, 120)] if fires else [],
            about=["GpuReconcilerStuck", "GpuReconcilerFrozen"],
        )

    for name, marks, cycles, fires in (
        ("the other replica, which has no marks, goes on", (3.0, 0.0), (30, 120), False),
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
        yield Case(f"two replicas: {name}", world, stuck, about=["GpuReconcilerStuck", "GpuReconcilerFrozen"])

    world = World(120)
    Node(world)
    world.put("gpu_reconciler_labelled", {**RECONCILER, "stage": "candidate"}, 5)
    world.put("gpu_reconciler_cycles_total", RECONCILER, 30)
    yield Case("a reconciler that has ended, with candidates only", world, about=["GpuReconcilerStuck"])

    for name, cycles, seen in (
        ("and then no cycles either", lambda t: float(min(t, 50)), Firing("GpuReconcilerFrozen", 56, 60 + KEPT)),
        ("one cycle each nine minutes", lambda t: float(t // 9), Firing("GpuReconcilerFrozen", 56, 120)),
    ):
        world = World(120)
        Node(world)
        for replica in "ab":  # one of which has never had any evidence, nor done anything
            labels = {**RECONCILER, "instance": replica}
            works = float(replica == "a")
            world.put("gpu_reconciler_cycles_total", labels, lambda t, c=cycles, w=works: c(t) * w)
            success = until(30, lambda t, w=works: 60.0 * t * w, lambda _, w=works: 1800.0 * w)
            world.put("gpu_reconciler_last_success_timestamp_seconds", labels, success)
        yield Case(f"a reconciler without evidence, {name}", world, [seen])

    world = World(120)
    Node(world)
    world.put("gpu_reconciler_cycles_total", RECONCILER, lambda t: float(t))
    world.put(
        "gpu_reconciler_last_success_timestamp_seconds", RECONCILER, lambda t: 60.0 * (30 if 30 <= t <= 80 else t)
    )
    yield Case("a reconciler without evidence", world, [Firing("GpuReconcilerFrozen", 56, 81 + KEPT)])


def fleet() -> Iterator[Case]:
    """Every GPU in one part, and parts that add up."""
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
        ("nobody waits", False, True, False),
        ("pods wait and all GPUs are busy", True, False, False),
    ):
        world = World(END)
        node = Node(world, gpus=2)
        node.hold(0, IDLE if held_idle else BUSY, info={"resource": "nvidia.com/gpu"})
        node.hold(1, BUSY, pod="busy-0", info={"resource": "nvidia.com/gpu"})
        pod = {"job": "kube-state-metrics", "namespace": "ml", "pod": "next-0"}
        world.put("kube_pod_container_resource_requests", {**pod, "container": "main", "resource": "nvidia_com_gpu"}, 4)
        world.put("kube_pod_status_unschedulable", pod, lambda t, waits=waits: 1.0 if waits else None)
        # Idle for an hour at 60, asked over a quarter of an hour, half an hour of patience.
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
        yield Case(f"others wait for {known_as}", world, [*both, waste])

    world = World(END)
    node = Node(world, gpus=2)
    node.hold(0, IDLE, mig="1/0", share=1 / 7, info={"resource": "nvidia.com/mig-1g.10gb"})
    for pool, wanted in (("nvidia_com_mig_3g_40gb", 1), ("gpu-small", 0)):
        world.put("gpu_demand_pending_gpus", {**RECONCILER, "pool": pool}, wanted)
    yield Case("others wait for another kind", world, idle((FIRES, END)), about=["GpuWasteWhileQueued"])

    world = World(END)
    node = Node(world, gpus=2)
    node.hold(0, IDLE, job_id="7", info={"partition": "gpu"})
    world.put("gpu_demand_pending_gpus", {**RECONCILER, "pool": "gpu"}, 8)
    yield Case(
        "jobs wait in the partition",
        world,
        [*idle((FIRES, END)), Firing("GpuWasteWhileQueued", 90, END, {"pool": "gpu"})],
    )

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

    for name, share, demand in (("less than a GPU is idle", 4 / 7, 8.0), ("they wait for less than a GPU", 1.0, 0.6)):
        world = World(END)
        Node(world).hold(0, IDLE, job_id="7", info=pool, share=share)
        world.put("gpu_demand_pending_gpus", wanted, demand)
        yield Case(f"jobs wait, {name}", world, idle((FIRES, END)), about=["GpuWasteWhileQueued"])

    # Of what matters a quarter of an hour must have passed at 115, and it is over at 181.
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
    yield Case("one idle GPU of forty is not worth a mail", world, idle((FIRES, END)), about=["GpuWasteWhileQueued"])


def tenants() -> Iterator[Case]:
    """A namespace on two nodes, one of which has no price."""
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
        "GPUs and money of a tenant",
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

    # Without a price, by cluster, account and user; the counters of one are out of step.
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

    # The dearest model of a node; a model without a name; several prices for one.
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
