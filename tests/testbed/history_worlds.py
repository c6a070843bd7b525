"""Two clusters for reports: a small one with everything that happens, and one of 3,000 GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

from tests.testbed.history import (
    HOUR,
    Cluster,
    Gap,
    Holder,
    Node,
    Phase,
    Target,
    Unit,
    bursts,
    idle,
    loaded,
    noisy,
    used,
)

DAY = 24 * HOUR
END = 1748822400.0  # Monday, 2 June 2025, 0:00 UTC
H100, A100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA L4"
TEAMS = {"bio": "biology", "chem": "chemistry", "ml": "", "serving": "products"}
KINDS: tuple[Callable[[float], Phase], ...] = (used, used, used, idle, loaded, noisy, bursts)


def fill(cluster: Cluster, units: Iterable[list[Unit]], seed: int, *, jobs: bool = False) -> None:
    """Give each list of units to one holder after another, with free time between them."""
    chance = Random(seed)
    for number, group in enumerate(units, 1000 * seed):
        at = cluster.start + chance.uniform(-4, 2) * HOUR
        turn = 0
        while at < cluster.end:
            phases = [
                chance.choice(KINDS)(chance.uniform(0.2, 9.0) * HOUR) if chance.random() < 0.9 else used(HOUR, 0.04)
                for _ in range(chance.randint(1, 5))
            ]
            holder = _job(number, turn) if jobs else _pod(chance, number, turn)
            end = cluster.hold(holder, group, at, *phases, pending_s=120, kept_s=chance.choice((0, 1800)))
            at = end + chance.choice((45.0, 600.0, 5 * HOUR))
            turn += 1


def _pod(chance: Random, number: int, turn: int) -> Holder:
    namespace = chance.choice(sorted(TEAMS))
    kind, name = chance.choice((("StatefulSet", "train"), ("Deployment", "ranker"), ("Job", "fit"), ("", "notebook")))
    name = f"{name}-{number}"
    pod = name if not kind else f"{name}-0" if kind == "StatefulSet" else f"{name}-{turn:x}x7k"
    return Holder(
        f"{pod}-{turn}" if not kind else pod, namespace, (kind, name if kind else ""), TEAMS[namespace], number=turn
    )


def _job(number: int, turn: int) -> Holder:
    name = str(1000 * number + turn)
    return Holder(name, user=f"u{number % 9}", user_id=2000 + number % 9, account=("phys", "chem")[number % 2])


def groups(nodes: Iterable[Node], chance: Random, most: int = 8) -> list[list[Unit]]:
    """Divide the GPUs of each node into lists of 1 to `most`."""
    found = []
    for node in nodes:
        rest = [*node.units]
        while rest:
            size = chance.choice([size for size in (1, 1, 2, 4, 8) if size <= min(most, len(rest))])
            found.append(rest[:size])
            rest = rest[size:]
    return found


def small(*, end: float = END, step: float = 30.0, name: str = "", jobs: bool = False, days: float = 7) -> Cluster:
    """200 GPUs on 25 nodes; see the comments."""
    cluster = Cluster(end - days * DAY, end, name, step)
    plain = [cluster.node(f"gpu-{n:02}", model=H100 if n < 14 else A100) for n in range(20)]
    plain += [cluster.node(f"l4-{n}", model=L4) for n in range(3)]
    divided = cluster.node("mig-0", model=A100, mig={0: ["1g.5gb"] * 7, 1: ["3g.20gb", "2g.10gb", "1g.5gb"]})
    sliced = cluster.node("sliced-0", model=L4)
    chance = Random(1)
    free = cluster.nodes["gpu-19"].units  # that nobody ever holds
    fill(cluster, (group for group in groups(plain, chance) if group[0] not in free), 2, jobs=jobs)
    fill(cluster, ([unit] for unit in divided.units), 3, jobs=jobs)
    sliced.offered = 4
    for gpu, unit in enumerate(sliced.units):  # shared by pods of which all, some or none are idle
        for n in range(gpu % 4 + 1):
            busy = (idle, used, bursts)[(n + gpu) % 3 if gpu > 3 else 0]
            holder = (
                Holder(f"{7000 + 10 * gpu + n}") if jobs else Holder(f"slice-{gpu}-{n}", "serving", team="products")
            )
            cluster.hold(holder, [unit], cluster.start + 5 * HOUR * n, busy(50 * HOUR), idle(20 * HOUR))
    _disturb(cluster)
    return cluster


def _disturb(cluster: Cluster) -> None:
    start, node = cluster.start, cluster.nodes
    node["gpu-00"].gaps += [Gap(start + 20 * HOUR, start + 23.5 * HOUR), Gap(start + 90 * HOUR, start + 90.05 * HOUR)]
    for each in node.values():  # the server itself restarted
        each.gaps.append(Gap(start + 60 * HOUR, start + 60.2 * HOUR, failed=False))
    node["gpu-01"].targets.append(Target("gpu-01.example.org:9400"))  # scraped twice
    moved = start + 70 * HOUR
    node["gpu-02"].targets[:] = [Target("10.9.9.1:9400", end=moved), Target("10.9.9.2:9400", start=moved)]
    node["gpu-03"].resets.append(start + 50 * HOUR)
    node["gpu-04"].xids[2] = [(start + 30 * HOUR, 79)]


def large(*, end: float = END, nodes: int = 375, days: float = 7) -> Cluster:
    """3,000 GPUs."""
    cluster = Cluster(end - days * DAY, end)
    made = [cluster.node(f"gpu-{n:04}") for n in range(nodes)]
    fill(cluster, groups(made, Random(4)), 5)
    return cluster
