"""Notifications of owners: one holder without disturbance, holders that are not idle, and the owner's labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tests.rules.expected import END, FIRES, KEPT, absent, idle
from tests.rules.promtool import Case, Firing
from tests.rules.world import BUSY, IDLE, RECONCILER, UNKNOWN, Activity, Node, Values, World, always, until


def owners() -> Iterator[Case]:
    """One holder without disturbance, and holders that are not idle."""
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

    for witnesses, part in ((1, "unproven"), (2, "idle_long")):
        world = World(END)
        Node(world).hold(0, IDLE, witnesses=witnesses)
        yield Case(
            f"an idle pod by {witnesses} witnesses",
            world,
            idle((FIRES, END)) if witnesses > 1 else [],
            values=[(END, f'count(allocation:gpu_share:part{{part="{part}"}})', [("{}", 1)])],
            about=["GpuHolderIdle", "allocation:gpu_share:part", "allocation:gpu_idle_unproven:bool"],
        )

    world = World(END)
    Node(world).hold(0, BUSY)
    yield Case("a busy pod", world, about=["GpuHolderIdle"])

    world = World(END)
    Node(world).hold(0, lambda t: 0.0 if t % 50 else 0.2)
    yield Case("a pod that works every 50 minutes", world, about=["GpuHolderIdle"])

    world = World(END)
    Node(world).hold(0, UNKNOWN)
    yield Case("a pod whose activity is unknown", world, about=["GpuHolderIdle"])

    world = World(END)
    Node(world).free(0)
    yield Case("a free GPU", world, about=["GpuHolderIdle"])

    world = World(190)
    # As from a source without idle runs per holder: the GPU has been idle for longer than its holder exists.
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
        "half of a holder is on a node that is not scraped",
        world,
        [Firing("GpuHolderPartlyIdle", 91, END)],
        about=["GpuHolderIdle"],
    )

    world = World(END)
    node = Node(world, gpus=2)
    node.hold(0, until(79, IDLE, UNKNOWN), units=2)
    node.hold(1, IDLE, units=2)
    # The unknown half is no longer proven idle: partly idle and pending from minute 80 on.
    yield Case(
        "the use of one GPU of an idle pod becomes unknown",
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
    yield Case("a shared GPU, on which no holder is judged", world, about=["GpuHolderIdle"])

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


BEFORE_IDLE = 130  # GPUs at rest since minute 45 are reported as partly idle after it
STALLED_AT = 60  # the minute in which the exporter first publishes the stall
FULL: Activity = lambda _: 1.0  # noqa: E731
STALLED: Values = lambda t: 900.0 + 60 * (t - STALLED_AT) if t >= STALLED_AT else 0.0  # noqa: E731


def stalled(*alerts: str, end: int = END, **labels: str) -> list[Firing]:
    return [Firing(alert, STALLED_AT, end, labels) for alert in alerts or ("GpuHolderStalled",)]


def owners_causes() -> Iterator[Case]:
    """GPUs by cause: each GPU once for each of its causes, also if two targets report it."""
    world = World(END)
    node = Node(world, gpus=3)
    node.hold(0, BUSY, causes={"cpu_quota": "high", "shm_full": "medium"})
    node.hold(1, BUSY, causes={"cpu_quota": "medium"}, pod="train-1", share=0.5)
    node.hold(2, BUSY, causes={"far_numa": "medium"}, job_id="42", info={"user": "ada", "account": "phys"})
    values = [
        (100, 'sum by (namespace, cause) (tenant:gpu_cause_gpus:sum{namespace="ml"})',
         [('{namespace="ml", cause="cpu_quota"}', 1.5), ('{namespace="ml", cause="shm_full"}', 1)]),
        (100, 'sum by (account, user, cause) (tenant:gpu_cause_gpus:sum{account="phys"})',
         [('{account="phys", user="ada", cause="far_numa"}', 1)]),
    ]  # fmt: skip
    yield Case("causes of pods and of a job", world, [], values)

    world = World(END)
    for instance in ("n1:9836", "n1:9837"):
        Node(world, "n1", target={"instance": instance}).hold(0, BUSY, causes={"cpu_quota": "high"})
    values = [(100, "sum by (cause) (tenant:gpu_cause_gpus:sum)", [('{cause="cpu_quota"}', 1)])]
    twice = Firing("GpuScrapeConfigWrong", 30, END, {"what": "two targets report the same GPU"})
    yield Case("a cause that two targets of one GPU report", world, [twice], values)

    world = World(END)
    Node(world).hold(0, BUSY, causes={"cpu_quota": "high"}, end=60)
    yield Case("a cause ends with its holder", world, [], [(100, "tenant:gpu_cause_gpus:sum", [])])


def owners_stalled() -> Iterator[Case]:
    """Pods and jobs that are fully busy and make no progress."""
    about = ["GpuHolderStalled", "GpuGangStalled"]
    world = World(END)
    Node(world).hold(0, FULL, stalled=STALLED)
    values = [(100, 'sum by (part) (allocation:gpu_share:part{pod!=""})', [('{part="stalled"}', 1)])]
    yield Case("a stalled pod", world, stalled(pod="train-0"), values, about)

    world = World(END)
    Node(world).hold(0, FULL, stalled=until(99, STALLED, always(0.0)))
    yield Case("a stall that ends", world, [Firing("GpuHolderStalled", STALLED_AT, 100 + KEPT)], about=about)

    world = World(END)
    Node(world, scraped=lambda t: t < 90 or t > 94).hold(0, FULL, stalled=STALLED)
    yield Case("a stall during failed scrapes", world, stalled(pod="train-0"), about=about)

    for title, other, rest, found in (
        ("seven stalled GPUs and one at rest", always(0.0), IDLE, stalled(job_id="42", end=BEFORE_IDLE)),
        ("seven stalled GPUs and one that works", always(0.0), BUSY, []),
        ("seven stalled GPUs and one that is unknown", None, UNKNOWN, stalled(job_id="42", end=BEFORE_IDLE)),
    ):
        world = World(BEFORE_IDLE)
        node = Node(world, gpus=8)
        for gpu in range(7):
            node.hold(gpu, FULL, stalled=STALLED, units=8, job_id="42")
        node.hold(7, until(45, BUSY, rest), stalled=other, units=8, job_id="42")
        late = [('{part="late"}', 1)] if rest is IDLE else []
        parts = [(100, "count by (part) (allocation:gpu_stalled_member:info)", [*late, ('{part="stalled"}', 7)])]
        yield Case(title, world, found, parts if found else (), about=about)

    for title, host, found in (
        ("its processes use less than half of its CPUs", (0.4, 0.0), stalled(job_id="42", end=BEFORE_IDLE)),
        ("rank 0 prepares data on most of its CPUs", (0.97, 0.0), []),
        ("rank 0 writes a checkpoint", (0.1, 5e6), []),
    ):
        world = World(BEFORE_IDLE)
        node = Node(world, gpus=4)
        for gpu in range(3):
            node.hold(gpu, FULL, stalled=STALLED, host=host, units=4, job_id="42")
        node.hold(3, until(45, BUSY, IDLE), stalled=always(0.0), host=host, units=4, job_id="42")
        yield Case(f"three stalled GPUs and one at rest, and {title}", world, found, about=about)

    for cause, confidence, at in (
        ("lost_rank", "high", STALLED_AT),
        ("lost_rank", "medium", STALLED_AT + 9),
        ("late_rank", "high", STALLED_AT + 9),
    ):
        world = World(BEFORE_IDLE)
        node = Node(world, gpus=2)
        node.hold(0, FULL, stalled=STALLED, host=(0.01, 0.0), units=2, job_id="42", causes={cause: confidence})
        node.hold(1, until(54, BUSY, IDLE), stalled=always(0.0), host=(0.01, 0.0), units=2, job_id="42")
        found = [Firing("GpuHolderStalled", at, BEFORE_IDLE, {"job_id": "42"})]
        yield Case(
            f"a stalled GPU and one at rest for six minutes, with cause {cause} {confidence}", world, found, about=about
        )

    for title, host, found in (
        ("the other node of a stalled job is at rest", (0.01, 0.0), stalled(*about, job_id="42", end=BEFORE_IDLE)),
        ("the other node of a stalled job writes a checkpoint", (0.01, 5e6), []),
        ("the other node of a stalled job computes on its CPUs", (0.5, 0.0), []),
        ("the host of the other node is unknown", None, []),
    ):
        world = World(BEFORE_IDLE)
        for name in ("n1", "n2"):
            node = Node(world, name, gpus=4)
            for gpu in range(4):
                if name == "n1":
                    node.hold(gpu, FULL, stalled=STALLED, units=8, job_id="42")
                else:
                    node.hold(gpu, until(45, BUSY, IDLE), stalled=always(0.0), host=host, units=8, job_id="42")
        yield Case(title, world, found, about=about)

    bursts: Values = lambda t: 3.0 if t % 7 == 0 else 0.0  # noqa: E731
    for title, working, found in (
        (
            "a rank that works in bursts",
            {"activity": BUSY, "idle_run": bursts, "stalled": always(0.0), "host": (0.02, 0.0)},
            [],
        ),
        ("a rank that works, on a node whose scrape fails once", {"activity": BUSY, "stalled": always(0.0)}, []),
    ):
        world = World(END)
        for number in range(7):
            Node(world, f"n{number}").hold(0, FULL, stalled=STALLED, units=8, job_id="42")
        is_scraped = (lambda t: t != 100) if "fails" in title else (lambda _: True)
        activity = working.pop("activity")
        Node(world, "n7", scraped=is_scraped).hold(0, activity, units=8, job_id="42", **working)
        yield Case(f"seven stalled nodes and {title}", world, found, about=about)

    for nodes, found in ((14, stalled(*about, job_id="42")), (12, [])):
        world = World(END)
        for number in range(nodes):
            Node(world, f"n{number}").hold(0, FULL, stalled=STALLED, units=16, job_id="42")
        yield Case(f"{nodes} of 16 nodes of a stalled job are scraped", world, found, about=about)

    for stage, found in (("stalled", stalled(pod="train-0")), ("spinning", []), ("", [])):
        world = World(END)
        Node(world).hold(0, FULL, stalled=STALLED)
        world.put("gpu_reconciler_cycles_total", RECONCILER, lambda t: float(t))
        if stage:
            labels = {"scheduler": "kubernetes", "namespace": "ml", "pod": "train-0", "stage": stage}
            world.put("gpu_reconciler_allocation_stage", {**RECONCILER, **labels}, 1)
        yield Case(f"a stalled pod that the reconciler calls {stage or 'nothing'}", world, found, about=about)

    world = World(END)
    for name in ("n1", "n2"):
        Node(world, name).hold(0, FULL, stalled=until(99, STALLED, always(0.0)), units=2, job_id="42")
    yield Case("a stall on two nodes that ends", world, stalled(*about, job_id="42", end=100 + KEPT), about=about)

    world = World(END)
    for job in ("42", "43"):
        Node(world, f"n{job}").hold(0, FULL, stalled=STALLED, job_id=job)
    yield Case("two stalled jobs, each on one node", world, [*stalled(job_id="42"), *stalled(job_id="43")], about=about)

    short = 110  # the pod at rest is reported as idle after it
    gang = {"namespace": "ml", "workload": "train", "workload_type": "job"}
    for title, nodes, kind, reconciled, found in (
        ("on two nodes", ("n1", "n2"), "job", True, [Firing("GpuGangStalled", STALLED_AT, short, gang)]),
        ("on one node", ("n1", "n1"), "job", True, []),
        ("of a Deployment", ("n1", "n2"), "deployment", True, []),
        ("without a name", ("n1", "n2"), "", True, []),
        ("without a reconciler", ("n1", "n2"), "job", False, []),
        ("of which one works", ("n1", "n2"), "daemonset", True, []),
    ):
        world = World(short)
        machines = {name: Node(world, name, gpus=2) for name in nodes}
        for number, name in enumerate(nodes):
            pod = {"namespace": "ml", "pod": f"train-{number}"}
            # The second pod is at rest, so it has no alert of its own.
            works = number == 1 and "works" in title
            run, used = (always(0.0), BUSY if works else until(45, BUSY, IDLE)) if number else (STALLED, FULL)
            machines[name].hold(number, used, stalled=run, host=(0.01, 0.0), **pod)
            if kind:
                world.put("namespace_workload_pod:kube_pod_owner:relabel", {**pod, **gang, "workload_type": kind}, 1)
            if reconciled and not works:
                labels = {**RECONCILER, "scheduler": "kubernetes", **pod, "stage": "stalled"}
                world.put("gpu_reconciler_allocation_stage", labels, 1)
        if reconciled:
            world.put("gpu_reconciler_cycles_total", RECONCILER, lambda t: float(t))
        owned = {**gang, "workload_type": kind} if kind else {"namespace": "ml"}
        owner = Firing("GpuHolderStalled", STALLED_AT, short, {"pod": "train-0", **owned})
        yield Case(f"a stalled pod whose workload has pods {title}", world, [owner, *found], about=about)

    for title, processes, graphics, found in (
        ("a busy GPU without a process", 0, 0, [Firing("GpuBusyWithoutProcess", 25, END)]),
        ("a busy GPU with a process", 1, 0, []),
        ("a busy GPU with a display", 0, 1, []),
        ("a busy GPU whose processes are not visible", None, None, []),
    ):
        world = World(END)
        node = Node(world)
        gpu = {"gpu": "0", "uuid": node.uuids[0]}
        node.put("gpu_utilization_ratio", gpu, 1)
        for name, count in (("compute", processes), ("graphics", graphics)):
            if count is not None:
                node.put(f"gpu_{name}_processes", gpu, count)
        yield Case(title, world, found, about=["GpuBusyWithoutProcess"])


def owners_reconciled() -> Iterator[Case]:
    """With a reconciler, its stages decide which owners are notified. Also the labels of owners."""
    for name, stage, intervals in (
        ("a reconciler that lists the pod", "candidate", [(FIRES, END)]),
        ("a reconciler that does not list the pod, e.g. because it is exempt", "", []),
        ("a reconciler that lists the pod with a stage that is not reported", "exempt", []),
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
    # An hour after its last sample (minute 99), the rules decide alone.
    yield Case("a reconciler that was removed", world, [*idle((170, 240)), Firing("GpuReconcilerDown", 119, 240)])

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
    for place in ("10.0.0.1", "10.0.0.2"):  # two targets of kube-state-metrics, as during its rollout
        world.put("kube_pod_labels", {**pod, **labels, "instance": place}, 1)
    named = {"workload": "train", "workload_type": "job", "team": "vision", "queue": "q1"}
    yield Case("a pod whose workload, team and queue are known", world, idle((FIRES, 100), label_project="", **named))
    site = {"pod_labels": "label_project, label_absent"}
    more = {**named, "label_project": "p7", "label_phase": ""}
    yield Case(
        "a pod with one more label that the site has configured", world, idle((FIRES, 100), **more), settings=site
    )


def partly_until() -> Iterator[Case]:
    world = World(200)
    node = Node(world, gpus=2)
    node.hold(0, until(120, IDLE, BUSY), units=2)
    node.hold(1, BUSY, units=2)
    yield Case("the idle GPU of two begins to work", world, [Firing("GpuHolderPartlyIdle", 91, 120 + 30)])


def named() -> Iterator[Case]:
    """Every label of the owner, on each alert for owners: pods, tasks of arrays, components of het jobs."""
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
        yield Case(f"labels of the owner: {alert}", world, [Firing(alert, start, 210, labels) for labels in expected])


def low() -> Iterator[Case]:
    """GpuHolderLow covers six hours (here two) of a holder that is at least half an hour older."""
    minutes = 210
    lazy: Activity = lambda t: 0.1  # noqa: E731

    def firing(start: int, end: int, **labels: str) -> list[Firing]:
        return [Firing("GpuHolderLow", start, end, labels)]

    old = -3600.0 * 24
    world = World(minutes)
    Node(world).hold(0, lazy)
    # Older than 150 min at minute 151. The alert fires ten minutes later.
    yield Case("a pod at a tenth", world, firing(161, minutes, pod="train-0"))

    world = World(minutes)
    Node(world).hold(0, lazy, begun=old)
    # At minute 96 the window has 96 of its 120 recordings: the first one is made at minute 1, with two samples.
    yield Case("monitoring that started after the holder", world, firing(106, minutes))

    world = World(minutes)
    node = Node(world)
    node.hold(0, lazy, share=0.5)
    node.hold(0, lazy, share=0.5, pod="train-1")
    yield Case("two pods at a tenth of a GPU that they share", world, about=["GpuHolderLow"])

    world = World(minutes)
    Node(world).hold(0, lambda t: 0.2)
    yield Case("a pod at a fifth", world, about=["GpuHolderLow"])

    world = World(minutes)
    Node(world).hold(0, lambda t: 0.0 if t % 20 else 1.0)
    yield Case("a pod that works one minute of twenty", world, firing(161, minutes))

    world = World(minutes)
    Node(world).hold(0, IDLE)
    yield Case("an idle pod does not count as low too", world, idle((FIRES, minutes)), about=["GpuHolderLow"])

    world = World(minutes)
    node = Node(world, gpus=2)
    node.hold(0, lazy, units=2)
    node.hold(1, lambda t: 0.9, units=2)
    yield Case("one of two GPUs is busy", world, about=["GpuHolderLow"])

    world = World(minutes)
    node = Node(world, gpus=2)
    node.hold(0, lazy, units=2)
    node.hold(1, lambda t: 0.0, units=2)
    yield Case(
        "one of two GPUs is idle, which another alert reports",
        world,
        [Firing("GpuHolderPartlyIdle", 91, minutes)],
        about=["GpuHolderLow"],
    )

    world = World(minutes)
    Node(world).hold(0, lazy, units=2)
    yield Case("half of the holder is not scraped", world, about=["GpuHolderLow"])

    world = World(minutes)
    Node(world).hold(0, lambda t: None if t % 5 == 0 else 0.1)
    yield Case("a fifth of the time is unknown", world, about=["GpuHolderLow"])

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
        node.hold(index, lazy, units=2, pod=pod, start=100, begun=0.0, **more)  # it has 96 recordings at minute 197
    yield Case("one of two allocations of a pod has not been known for long enough", world, about=["GpuHolderLow"])

    world = World(300)
    Node(world).hold(0, lambda t: None if t % 2 and t < 150 else 0.1)
    yield Case("half of the time was unknown, and the time since is known", world, firing(271, 300))

    world = World(400)
    world.away = set(range(200, 260))
    Node(world).hold(0, until(199, BUSY, lazy))
    # At minute 356, 96 of the 120 recordings of two hours exist.
    yield Case("Prometheus was down for half of the window", world, [*firing(366, 400), absent(215, 274)])

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
    # Above 15 % after eight minutes at 0.9. The recordings of half an hour lag by a quarter of an hour.
    yield Case("a pod that begins to work", world, firing(161, 180 + 21 + 29))
