"""Cases with one fault each, and the alerts that must fire or not. The minutes were calculated by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.rules.cases_disturbed import owners_disturbed
from tests.rules.cases_exporters import exporters
from tests.rules.cases_fleet import fleet, tenants
from tests.rules.cases_hardware import hardware
from tests.rules.cases_owners import low, named, owners, owners_causes, owners_reconciled, owners_stalled, partly_until
from tests.rules.cases_servers import servers
from tests.rules.crowd import crowds
from tests.rules.disagree import disagreements
from tests.rules.others import others
from tests.rules.promtool import Case, Firing
from tests.rules.world import BUSY, RECONCILER, Node, World, always, throttled


def all_cases() -> list[Case]:
    """Every case."""
    short = [replace(case, settings={"low_over": "2h"}) for case in (*low(), *named())]
    cases = [
        *owners(),
        *owners_disturbed(),
        *owners_reconciled(),
        *owners_stalled(),
        *owners_causes(),
        *partly_until(),
        *short,
        *hardware(),
        *exporters(),
        *fleet(),
        *tenants(),
        *servers(),
        *others(),
        *disagreements(),
        *crowds(),
    ]
    return [*cases, *(beside_another_cluster(case) for case in cases if case.name in BESIDE), *clusters()]


# One case for each alert, or for each half of an alert: these run again together with another cluster.
BESIDE = (
    "one busy GPU of sixteen",
    "a pod at a tenth",
    "throttled: hw_power_brake",
    "an XID of class hardware",
    "GpuUnusable",
    "GpuDegraded",
    "GpuEccUncorrected",
    "one of eight GPUs is lost",
    "the driver is down for a while",
    "scrapes of one node fail",
    "an exporter that never answered, on a node that offers GPUs",
    "a node that offers GPUs and has no exporter",
    "no source of holders answers",
    "a source that never answered",
    "a state file that cannot be written, so that counters stop",
    "a clock that is ahead",
    "2 GPUs of 3 nodes, hw_power_brake 0.6",
    "a reconciler with 3 marks that hangs",
    "a reconciler without evidence",
    "pods wait while GPUs are idle",
)


# Cases with other minutes in Prometheus 3, whose ranges are open on the left.
SHIFTED = (
    "a state file that cannot be written, so that counters stop",
    "a reconciler that was removed",
    "a reconciler with 3 marks that hangs",
    "a reconciler with 3 marks that is gone",
    "a reconciler with 0 marks that hangs",
    "a reconciler with 0 marks that is gone",
    "a reconciler that was replaced by one that has ended",
    "dcgm: a pod that stops working",
    "dcgm: two failed scrapes",
    "an exporter that is down for more than a day",
    "a reconciler with marks that is gone for more than a day",
    "a state file that the exporter no longer tries to write",
    "six hot GPUs without power brake, until they cool down",
    "two replicas: both replicas have ended",
    "two replicas: one mark, and the reconciler has ended",
    "a reconciler without evidence, and then no cycles either",
    "jobs begin to wait, and get their GPUs",
    "jobs wait, and a second GPU becomes idle",
    "Prometheus was down for half of the window",
    "half of the time was unknown, and the time since is known",
    "servers: the Service goes",
    "servers: the Service goes, and a shard of kube-state-metrics was added",
)


def beside_another_cluster(case: Case) -> Case:
    """The same case in cluster a, while a node, a pod and a reconciler of the same names have no fault in cluster b."""
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
    return replace(case, name=f"{case.name}; another cluster has no fault", world=world, firing=firing, values=values)


def clusters() -> Iterator[Case]:
    """A fault in one cluster mutes no alert in another cluster."""
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
