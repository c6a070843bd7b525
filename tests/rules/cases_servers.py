"""Servers that wait for requests at night, in a cluster without a reconciler: as far as kube-state-metrics shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tests.rules.expected import END, FIRES, KEPT, idle
from tests.rules.promtool import Case, Firing
from tests.rules.world import BUSY, IDLE, RECONCILER, Activity, Node, Values, World, always, between, until

DAYS = 3 * 24 * 60
PODS = ("llm-5d9f7b6c8-aaaaa", "llm-5d9f7b6c8-bbbbb", "llm-5d9f7b6c8-ccccc")
REPORTED = [
    "GpuHolderIdle",
    "cluster:gpu_service_sources:count",
    "holder:gpu_reported:bool",
    "holder:gpu_served:bool",
    "pod:gpu_served:info",
]
ALWAYS: Values = always(1.0)
# The labels that Prometheus adds where the scrape of kube-state-metrics keeps those of its target.
TARGET = {
    "job": "kube-state-metrics",
    "instance": "ksm-0",
    "pod": "kube-state-metrics-0",
    "service": "kube-state-metrics",
    "endpoint": "http",
    "namespace": "monitoring",
}


def by_day(t: int) -> float:
    """30 % from 8 to 22 o'clock, and no request at night."""
    return 0.3 if 8 * 60 <= t % 1440 < 22 * 60 else 0.0


@dataclass
class KubeState:
    """The series of kube-state-metrics in namespace ml. `values`: when it answers. `labels`: in place of those of its target."""

    world: World
    values: Values = ALWAYS
    labels: Mapping[str, str] = field(default_factory=dict)

    def put(self, name: str, labels: Mapping[str, str], values: Values | None = None) -> None:
        own = values or ALWAYS
        both: Values = lambda t: own(t) if self.values(t) else None  # noqa: E731
        self.world.put(name, {**TARGET, "namespace": "ml", **self.labels, **labels}, both)

    def service(self, name: str = "llm", cluster_ip: str = "10.96.0.7", values: Values | None = None) -> None:
        self.put("kube_service_info", {"service": name, "cluster_ip": cluster_ip}, values)

    def slice(
        self, name: str = "llm-x7k2p", *pods: str, port: str = "8000", kind: str = "Pod", values: Values | None = None
    ) -> None:
        """An EndpointSlice, as kube-state-metrics 2.18 shows it."""
        of = {"endpointslice": name}
        self.put("kube_endpointslice_ports", {**of, "port_name": "http", "port_number": port}, values)
        for number, pod in enumerate(pods or PODS):
            target = {"targetref_kind": kind, "targetref_name": pod, "address": f"10.0.0.{number}", "ready": "false"}
            self.put("kube_endpointslice_endpoints", {**of, **target}, values)

    def addresses(self, name: str = "llm", *pods: str, port: str = "8000", host_network: bool = False) -> None:
        """Endpoints, as kube-state-metrics shows them before 2.18, and the pods' addresses."""
        self.put("kube_endpoint_ports", {"endpoint": name, "port_name": "http", "port_number": port})
        for number, pod in enumerate(pods or PODS):
            ip = f"10.0.0.{number}"
            self.put("kube_endpoint_address", {"endpoint": name, "ip": ip, "ready": "true"})
            info = {"pod": pod, "pod_ip": ip, "host_network": str(host_network).lower()}
            self.put("kube_pod_info", info)

    def scaler(self, kind: str = "Deployment", name: str = "llm") -> None:
        target = {"scaletargetref_kind": kind, "scaletargetref_name": name}
        self.put("kube_horizontalpodautoscaler_info", {"horizontalpodautoscaler": "any", **target})

    def owners(self, kind: str = "ReplicaSet", name: str = "llm-5d9f7b6c8", *, controls: bool = True) -> None:
        """The owner of the pods; a ReplicaSet has a Deployment."""
        controller = {"owner_is_controller": str(controls).lower()}
        for pod in PODS:
            self.put("kube_pod_owner", {**controller, "pod": pod, "owner_kind": kind, "owner_name": name})
        if kind == "ReplicaSet":
            owner = {"owner_kind": "Deployment", "owner_name": "llm"}
            self.put("kube_replicaset_owner", {**controller, "replicaset": name, **owner})


def deployment(minutes: int, activity: Activity = IDLE, **more: str) -> tuple[World, KubeState]:
    """Three pods of a Deployment with a GPU each."""
    world = World(minutes)
    node = Node(world, gpus=3)
    for index, pod in enumerate(PODS):
        node.hold(index, activity, pod=pod, **more)  # type: ignore[arg-type]
    return world, KubeState(world)


def each(*found: Firing) -> list[Firing]:
    return [Firing(one.alert, one.start, one.end, {"pod": pod}) for pod in PODS for one in found]


def servers() -> Iterator[Case]:
    """The cases of hours. `nights` has those of days."""
    yield from (*services(), *older(), *scaled(), *notebooks(), *gone())
    world, kube = deployment(210, lambda _: 0.1)
    kube.slice()
    kube.service()
    yield Case("a server at a tenth", world, about=["GpuHolderLow"], settings={"low_over": "2h"})


NIGHTS = [Firing("GpuHolderIdle", *night) for night in ((71, 480 + KEPT), (1390, 1920 + KEPT), (2830, 3360 + KEPT))]
LAST_NIGHT = Firing("GpuHolderIdle", 4270, DAYS)
# The mean of six hours is below 15 % until 11 o'clock, and the GPU is not idle from 8 o'clock on.
MORNINGS = [Firing("GpuHolderLow", eight + 10, eight + 194 + 29) for eight in (480, 1920, 3360)]


def nights() -> Iterator[Case]:
    """Three days of a server."""
    world, _ = deployment(DAYS, by_day)
    yield Case("nights: no kube-state-metrics", world, each(*NIGHTS, LAST_NIGHT, *MORNINGS))

    world, kube = deployment(DAYS, by_day)
    kube.values = until(600, ALWAYS, always(None))
    kube.service("another")
    kube.owners()
    kube.scaler()
    # Recorded at minute 600 for the last time, and read until 2040.
    after = [Firing("GpuHolderLow", 2051, 2143), NIGHTS[2], LAST_NIGHT, MORNINGS[2]]
    yield Case("nights: an autoscaler, and a day after kube-state-metrics every pod counts again", world, each(*after))

    world = World(DAYS)
    node, kube = Node(world, gpus=3), KubeState(world, lambda t: None if 120 <= t % 1440 < 180 else 1.0)
    kube.service()
    for index, pod in enumerate(PODS):
        at = 2000 + 5 * index  # each replica is replaced at another time, in the morning of the second day
        new = pod.replace("llm-5d9f7b6c8", "llm-77c9c4f4b")
        node.hold(index, by_day, pod=pod, end=at)
        node.hold(index, by_day, pod=new, start=at + 1)
        kube.slice("llm-x7k2p", pod, values=until(at, ALWAYS, always(None)))
        kube.slice("llm-x7k2p", new, values=until(at + 2, always(None), ALWAYS))
    yield Case("nights: a Service, a rollout, and an hour of each night without kube-state-metrics", world)


def services() -> Iterator[Case]:
    """EndpointSlices, and those that show no server."""
    found = each(*idle((FIRES, END)))
    world, kube = deployment(END)
    kube.owners()
    kube.service("another")
    yield Case("servers: neither a Service nor an autoscaler", world, found, about=REPORTED)

    world, kube = deployment(END)
    kube.slice()
    kube.service(cluster_ip="None")
    KubeState(world, labels={"namespace": "web"}).service()
    yield Case("servers: a headless Service, called as a Service of another namespace", world, found, about=REPORTED)

    world, kube = deployment(END)
    kube.slice(kind="Node")
    kube.service()
    yield Case("servers: a slice of nodes that are called as the pods", world, found, about=REPORTED)

    world, kube = deployment(END)
    kube.slice()
    kube.service(cluster_ip="")
    yield Case("servers: a Service without an address", world, found, about=REPORTED)

    world, kube = deployment(END)
    kube.slice("mine")
    kube.service("kube-state-metrics")
    kube.service()
    yield Case("servers: a slice that Kubernetes has not named", world, found, about=REPORTED)

    world, kube = deployment(END)
    kube.slice()
    kube.service(values=always(None))
    yield Case("servers: kube-state-metrics shows no Service", world, found, about=REPORTED)

    world, kube = deployment(END)
    other = KubeState(world, labels={"namespace": "web"})
    other.slice()
    other.service()
    yield Case("servers: pods of these names in another namespace", world, found, about=REPORTED)

    for title, here, there in (("here", "a", "a"), ("in another cluster", "a", "b")):
        world = World(END)
        Node(world, target={"cluster": here}).hold(0, IDLE, pod=PODS[0])
        for cluster in (there, "c"):
            other = KubeState(world, labels={"cluster": cluster})
            other.slice()
            other.service()
            other.addresses()
            other.owners()
            other.scaler()
        yield Case(
            f"servers: kube-state-metrics {title} shows a server",
            world,
            [] if here == there else idle((FIRES, END), cluster=here),
            about=REPORTED,
        )

    # One of two replicas of kube-state-metrics has an old state: the Service was headless, and addresses were those of other pods.
    world, kube = deployment(END)
    kube.slice()
    kube.service()
    kube.owners()
    kube.scaler()
    kube.addresses()
    old = KubeState(world, labels={"instance": "ksm-1", "uid": "older"})
    old.slice()
    old.service(cluster_ip="None")
    old.owners()
    old.scaler()
    old.addresses("llm", *PODS[1:], PODS[0])
    yield Case("servers: two kube-state-metrics that differ", world, about=REPORTED)

    for title, labels in (("without a reconciler", {}), ("and a reconciler decides", RECONCILER)):
        world, kube = deployment(END)
        kube.slice()
        kube.service()
        for pod in PODS if labels else ():
            stage = {"stage": "underused", "scheduler": "kubernetes", "namespace": "ml", "pod": pod}
            world.put("gpu_reconciler_allocation_stage", {**labels, **stage, "node": "n1", "uuid": pod}, 1)
            world.put("gpu_reconciler_cycles_total", labels, float)
        yield Case(f"servers: idle pods behind a Service, {title}", world, found if labels else [], about=REPORTED)

    world = World(END)
    node, kube = Node(world, gpus=2), KubeState(world)
    node.hold(0, IDLE, pod=PODS[0], units=2)
    node.hold(1, BUSY, pod=PODS[0], units=2)
    kube.slice()
    kube.service()
    yield Case("servers: one of two GPUs is idle", world, about=["GpuHolderPartlyIdle", *REPORTED])

    stalled: Values = lambda t: 900.0 + 60 * (t - 60) if t >= 60 else 0.0  # noqa: E731
    for name in ("llm", "other"):
        world, kube = deployment(END, lambda _: 1.0, stalled=stalled)  # type: ignore[arg-type]
        kube.slice()
        kube.service(name)
        spins = [] if name == "llm" else each(Firing("GpuHolderStalled", 60, END))
        yield Case(f"servers: pods that spin, behind Service {name}", world, spins, about=["GpuHolderStalled"])


def older() -> Iterator[Case]:
    """kube-state-metrics before 2.18: Endpoints, by address."""
    found = each(*idle((FIRES, END)))
    world, kube = deployment(END)
    kube.addresses()
    kube.service()
    yield Case("servers: Endpoints", world, about=REPORTED)

    world, kube = deployment(END)
    kube.addresses()
    kube.service(cluster_ip="None")
    yield Case("servers: Endpoints of a headless Service", world, found, about=REPORTED)

    world, kube = deployment(END)
    kube.addresses(host_network=True)
    kube.service()
    yield Case("servers: pods on the host's network, behind the address of their node", world, found, about=REPORTED)

    world, kube = deployment(END)
    kube.addresses()
    kube.service()
    for number in range(3):  # a pod that has ended keeps its address, which another pod has by now
        kube.put("kube_pod_info", {"pod": f"old-{number}", "pod_ip": f"10.0.0.{number}", "host_network": "false"})
    yield Case("servers: ended pods with the addresses of the servers", world, about=REPORTED)


def scaled() -> Iterator[Case]:
    """Autoscalers, at any height above the pods that kube-state-metrics shows."""
    found = each(*idle((FIRES, END)))
    for title, owner, target, fires in (
        ("of a StatefulSet", ("StatefulSet", "llm"), ("StatefulSet", "llm"), []),
        ("of a ReplicaSet", ("ReplicaSet", "llm-5d9f7b6c8"), ("ReplicaSet", "llm-5d9f7b6c8"), []),
        ("of another object", ("ReplicaSet", "llm-5d9f7b6c8"), ("Deployment", "web"), found),
        ("of another kind", ("ReplicaSet", "llm-5d9f7b6c8"), ("StatefulSet", "llm"), found),
        ("of a training, made by its operator", ("PyTorchJob", "llm"), ("PyTorchJob", "llm"), found),
        ("of a RayJob", ("RayJob", "llm"), ("RayJob", "llm"), found),
        ("of a kind that only starts as a Job", ("JobServer", "llm"), ("JobServer", "llm"), []),
        ("of a StatefulSet that is called as the ReplicaSet", ("StatefulSet", "llm-5d9f7b6c8"), ("Deployment", "llm"), found),
    ):  # fmt: skip
        world, kube = deployment(END)
        kube.owners(*owner)
        kube.scaler(*target)
        if "called" in title:
            above = {"owner_kind": "Deployment", "owner_name": "llm", "owner_is_controller": "true"}
            kube.put("kube_replicaset_owner", {"replicaset": "llm-5d9f7b6c8", **above})
        yield Case(f"servers: an autoscaler {title}", world, fires, about=REPORTED)

    world, kube = deployment(END)
    kube.owners(controls=False)
    kube.owners("StatefulSet", "llm", controls=False)
    kube.scaler()
    kube.scaler("StatefulSet")
    yield Case("servers: an autoscaler of an object that does not control the pods", world, found, about=REPORTED)


def notebooks() -> Iterator[Case]:
    """A notebook has a Service, but serves its user alone."""
    found = each(*idle((FIRES, END)))
    world, kube = deployment(END)
    kube.slice(port="8888")
    kube.service()
    yield Case("servers: notebooks", world, found, about=REPORTED)

    world, kube = deployment(END)
    kube.addresses(port="8888")
    kube.service()
    yield Case("servers: notebooks, as Endpoints", world, found, about=REPORTED)

    world, kube = deployment(END)
    kube.slice(port="8888")
    kube.slice("llm-tls-m4n8q", port="8443")
    kube.service()
    kube.service("llm-tls")
    yield Case("servers: another Service beside the one on port 8888", world, about=REPORTED)

    world, kube = deployment(END)
    kube.addresses()
    kube.addresses("lab", port="8888")
    kube.service()
    kube.service("lab")
    yield Case("servers: another Service beside the one on port 8888, as Endpoints", world, about=REPORTED)

    for title, headless in (("a headless Service", "None"), ("no Service", "")):
        world, kube = deployment(END)
        kube.slice(port="8888")
        kube.slice("llm-tls-m4n8q", port="8443")
        kube.service()
        if headless:
            kube.service("llm-tls", cluster_ip=headless)
        yield Case(f"servers: notebooks with {title} beside the one on port 8888", world, found, about=REPORTED)

    world, kube = deployment(END)
    kube.slice(port="8888")
    kube.slice()
    kube.service()
    yield Case("servers: a Service on port 8888 and another", world, about=REPORTED)

    world, kube = deployment(END)
    kube.addresses(port="8888")
    kube.addresses()
    kube.service()
    yield Case("servers: a Service on port 8888 and another, as Endpoints", world, about=REPORTED)

    world, kube = deployment(END)
    kube.slice()
    kube.service()
    kube.slice("lab-m4n8q", "lab-0", port="8888")
    kube.service("lab")
    yield Case("servers: a notebook beside them", world, about=REPORTED)


def gone() -> Iterator[Case]:
    """A Service that goes, and kube-state-metrics that goes."""
    world, kube = deployment(END)
    kube.slice("another-m4n8q", "other-0")
    kube.slice(values=until(40, ALWAYS, always(None)))
    kube.service()
    yield Case("servers: no longer behind their Service for more than 15 minutes", world, each(*idle((FIRES, END))))

    world, kube = deployment(END)
    kube.slice("another-m4n8q", "other-0")
    kube.slice(values=until(80, ALWAYS, always(None)))
    kube.service()
    # Recorded at minute 80 for the last time, and read until 95.
    yield Case("servers: the Service goes", world, each(*idle((106, END))), about=REPORTED)

    world, kube = deployment(END)
    kube.slice(values=between(80, 93, always(None), ALWAYS))
    kube.service(values=between(80, 93, always(None), ALWAYS))
    kube.service("another")
    yield Case("servers: the Service is deleted and created again", world, about=REPORTED)

    world, kube = deployment(END)
    kube.values = until(30, ALWAYS, always(None))
    kube.slice()
    kube.service()
    yield Case("servers: kube-state-metrics does not answer for two hours", world, about=REPORTED)

    world, kube = deployment(END)
    kube.values = until(30, ALWAYS, always(None))
    kube.slice()
    kube.service()
    KubeState(world, labels={"instance": "ksm-1"}).service("another")
    yield Case(
        "servers: the shard of kube-state-metrics with the Services does not answer for two hours",
        world,
        about=REPORTED,
    )

    world, kube = deployment(END)
    KubeState(world, until(30, ALWAYS, always(None))).slice()
    KubeState(world, labels={"instance": "ksm-1"}).service()
    KubeState(world, labels={"instance": "ksm-1"}).slice("another-m4n8q", "other-0")
    yield Case(
        "servers: the shard of kube-state-metrics with the slices does not answer for two hours", world, about=REPORTED
    )

    world, kube = deployment(END)
    KubeState(world, until(30, ALWAYS, always(None))).slice()
    KubeState(world, labels={"instance": "ksm-1"}).service()
    yield Case("servers: the kube-state-metrics for slices does not answer for two hours", world, about=REPORTED)

    world, kube = deployment(END)
    kube.slice(values=until(80, ALWAYS, always(None)))
    kube.service()
    kube.slice("another-m4n8q", "other-0")
    KubeState(world, until(30, always(None), ALWAYS), {"instance": "ksm-1"}).service("another")
    yield Case(
        "servers: the Service goes, and a shard of kube-state-metrics was added",
        world,
        each(*idle((106, END))),
        about=REPORTED,
    )

    world, kube = deployment(END)
    kube.values = until(30, ALWAYS, always(None))
    kube.slice()
    kube.service()
    other = KubeState(world, until(33, always(None), ALWAYS), {"instance": "ksm-2"})
    other.service("another")
    other.slice("another-m4n8q", "other-0")
    yield Case(
        "servers: the Service goes while kube-state-metrics moves", world, each(*idle((FIRES, END))), about=REPORTED
    )

    world, kube = deployment(END)
    kube.values = until(30, ALWAYS, always(None))
    kube.slice()
    kube.service()
    KubeState(world, labels={"cluster": "b"}).service()
    yield Case("servers: kube-state-metrics answers in another cluster only", world, about=REPORTED)
