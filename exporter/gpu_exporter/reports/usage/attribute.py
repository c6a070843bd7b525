"""Finds the holders of units whose exporter does not name them, from the GPU requests of the pods on their node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from gpu_exporter.reports.usage.cells import WINDOW_S, Cell, HolderId, Unit
from gpu_exporter.reports.usage.sources.kube import PodName

ALL = 0.95  # share of a node's GPUs from which a pod has the whole node; of a window that a pod did not run
ZERO = 0.999
OVER = 1.02  # of a node's GPUs: the node offers replicas of its GPUs
SHORT_S = 300.0  # a difference that the start or the end of a pod explains: a lookback of Prometheus
Windows = Mapping[float, float]


class _NodeWindow(NamedTuple):
    cluster: str
    node: str
    start: float


class Cluster(NamedTuple):
    """The data of kube-state-metrics. Times are GPU-seconds by start of the window, if not named otherwise.

    - `requests`: by pod and node. `completed`: seconds in which a pod was completed.
    - `offers`: GPU-seconds of the whole chunk, by cluster and node. `span_s`: length of the chunk in seconds.
    - `blind`: windows in which it did not answer all the time, by cluster. `bare`: nodes that offer no GPU.
    """

    requests: Mapping[tuple[PodName, str], Windows]
    completed: Mapping[PodName, Windows]
    offers: Mapping[tuple[str, str], float]
    span_s: float
    blind: Collection[tuple[str, float]] = ()
    bare: Collection[tuple[str, str]] = ()


def attribute(cells: Iterable[Cell], known: Cluster | None) -> Iterator[Cell]:
    """Yields the cells, and cells of pods that requested GPUs but that no exporter names.

    The use of such a pod is unknown, except in two cases: all GPUs of the node were at zero, or the pod has all of
    them. The unit of such a cell is unknown, so it has no uuid. A pod that did not run holds nothing, even if the
    exporter still names it. A unit without a holder is free if kube-state-metrics knows its node.
    """
    if known is None:
        yield from cells
        return
    units: defaultdict[_NodeWindow, list[Cell]] = defaultdict(list)
    held: defaultdict[tuple[Unit, float], float] = defaultdict(float)
    on_units: defaultdict[tuple[HolderId, float], set[Unit]] = defaultdict(set)
    gone = _find_gone(known)
    for cell in cells:
        pod = cell.pod or cell.holder
        if pod is not None and cell.holder == pod and (pod, cell.start) in gone:
            cell = cell._replace(holder=None, pod=None, is_free=True)
        elif pod is not None:
            held[cell.unit, cell.start] += cell.seconds
            on_units[pod, cell.start].add(cell.unit)
        units[_NodeWindow(cell.unit.cluster, short_name(cell.unit.node), cell.start)].append(cell)
    asked: defaultdict[_NodeWindow, dict[HolderId, float]] = defaultdict(dict)
    for (pod_name, node), windows in known.requests.items():
        holder = HolderId(pod_name.cluster, "kubernetes", pod_name.namespace, pod_name.name)
        for start, seconds in windows.items():
            of_node = asked[_NodeWindow(pod_name.cluster, short_name(node), start)]
            of_node[holder] = of_node.get(holder, 0.0) + seconds
    # Of the whole chunk: a GPU has a price, and is one of its node, while no exporter shows it.
    models: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    boards: defaultdict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)
    bare = {(cluster, short_name(node)) for cluster, node in known.bare}
    for place, of_place in units.items():
        if any(cell.holder is not None for cell in of_place):  # the exporter names its holders nevertheless
            bare.discard((place.cluster, place.node))
        models[place.cluster, place.node].update(cell.unit.model for cell in of_place)
        boards[place.cluster, place.node].update((cell.unit.uuid, cell.unit.gi) for cell in of_place)
    offers = {(cluster, short_name(node)): gpus / known.span_s for (cluster, node), gpus in known.offers.items()}
    for place in sorted({*units, *asked}, key=lambda place: (place.start, place)):
        pods = asked.get(place, {})
        # Other pods on the same unit count too: of a shared unit, the pod has a part, and nothing of it is missing.
        named = {pod: sum(held[unit, place.start] for unit in sorted(on_units[pod, place.start])) for pod in pods}
        rests = {pod: _rest(seconds, named[pod]) for pod, seconds in pods.items()}
        rests = {pod: rest for pod, rest in sorted(rests.items()) if rest > 0.0}
        offered = offers.get((place.cluster, place.node))
        found = models[place.cluster, place.node]
        unit = Unit(place.cluster, place.node, "", model=next(iter(found)) if len(found) == 1 else "")
        is_blind = (place.cluster, place.start) in known.blind or (place.cluster, place.node) in bare
        number, requested = len(boards[place.cluster, place.node]), sum(pods.values())
        yield from _of_node(
            _Node(unit, place.start, units.get(place, []), number, requested, offered, is_blind=is_blind), rests
        )


def _find_gone(known: Cluster) -> set[tuple[HolderId, float]]:
    """Returns the windows in which a pod was completed. The kubelet and the exporter may still name the pod
    (kubernetes#119423).
    """
    return {
        (HolderId(pod.cluster, "kubernetes", pod.namespace, pod.name), start)
        for pod, windows in known.completed.items()
        for start, seconds in windows.items()
        if seconds >= ALL * WINDOW_S
    }


def find_suspects(cells: Iterable[Cell], requests: Mapping[tuple[PodName, str], Windows]) -> set[str]:
    """Returns names of pods that an exporter names in a window, although no running pod of this name requested a
    GPU.
    """
    running = {(pod.name, start) for (pod, _), windows in requests.items() for start in windows}
    held = {(cell.holder.name, cell.start) for cell in cells if cell.holder and cell.holder.scheduler == "kubernetes"}
    return {name for name, start in held if (name, start) not in running}


def _rest(asked: float, named: float) -> float:
    """Returns the requested seconds for which no exporter names the pod. `named`: seconds of the units that name it."""
    rest = max(0.0, asked - named)
    return 0.0 if named and rest <= SHORT_S else rest


class _Node(NamedTuple):
    """A node in one window.

    - `unit`: for pods whose GPU is not known. `boards`: the number of its GPUs in this chunk.
    - `requested`: GPU-seconds of its pods. `offered`: its GPUs for Kubernetes, None if unknown.
    - `is_blind`: kube-state-metrics did not answer all the time, or shows no GPUs of this node.
    """

    unit: Unit
    start: float
    units: list[Cell]
    boards: int
    requested: float
    offered: float | None
    is_blind: bool


def _of_node(node: _Node, rests: Mapping[HolderId, float]) -> Iterator[Cell]:
    """The cells of a node in one window. `rests`: seconds of pods that no exporter names."""
    units, boards = node.units, node.boards
    seen = sum(cell.seconds for cell in units)
    held = sum(cell.seconds for cell in units if cell.holder is not None)
    is_known = node.offered is not None or bool(rests) or node.requested > 0.0
    is_nameless = seen > 0.0 and not held
    gpus = node.requested / WINDOW_S if node.offered is None else node.offered
    is_shared = bool(units) and gpus > OVER * boards
    part = 1.0
    if is_shared and rests:  # a replica is a part of a GPU; together no more than what the exporter names no holder for
        part = min(boards / gpus, max(0.0, seen - held) / sum(rests.values()))
    profiles = {cell.unit.profile for cell in units}
    unit = node.unit._replace(profile=profiles.pop() if len(profiles) == 1 else "")
    of_pods = part * sum(rests.values())
    free = [_unknown(cell) if node.is_blind and is_nameless else cell for cell in units if cell.holder is None]
    outside = sum(cell.used + cell.low + cell.unknown for cell in free)
    claimed = min(1.0, of_pods / outside) if outside else 0.0
    yield from (cell for cell in units if cell.holder is not None)
    for cell in free:
        is_free = cell.is_free or is_known
        yield cell._replace(is_free=is_free, claimed=claimed * (cell.used + cell.low + cell.unknown))
    missing = max(0.0, boards * WINDOW_S - seen)
    zero = sum(cell.idle + cell.unproven for cell in units)
    for holder, rest in rests.items():
        seconds = rest * part
        cell = Cell(unit, holder, node.start, seconds, samples=max(2, round(seconds / WINDOW_S)))
        has_all = len(rests) == 1 and rest >= ALL * seen
        if is_nameless and not is_shared and (has_all or zero >= ZERO * seen):
            yield _like(cell, units, seen, missing)
        else:
            # Its GPU has samples without a holder, unless as much time has no samples.
            is_seen = is_nameless or is_shared or (seen - held >= ALL * rest and missing < ALL * rest)
            yield cell._replace(unknown=seconds, is_seen=is_seen)


def _unknown(cell: Cell) -> Cell:
    """Makes the time of a cell unknown: a pod may have held the unit."""
    return Cell(*cell[:5], unknown=cell.seconds, source=cell.source, is_free=True)


def _like(cell: Cell, units: list[Cell], seen: float, missing: float) -> Cell:
    """The cell with a part of these units.

    `seen`: their seconds. `missing`: those without samples. All of them may be of this pod, so they are unknown.
    """
    known = min(seen, max(0.0, cell.seconds - missing))
    part = known / seen
    return cell._replace(
        used=part * sum(each.used for each in units),
        low=part * sum(each.low for each in units),
        idle=part * sum(each.idle for each in units),
        unproven=part * sum(each.unproven for each in units),
        unknown=part * sum(each.unknown for each in units) + cell.seconds - known,
        busy=part * sum(each.busy for each in units),
        known=part * sum(each.known for each in units),
        at_floors=_add_floors(units, part),
    )


def _add_floors(units: list[Cell], part: float) -> tuple[float, ...]:
    if not all(cell.at_floors for cell in units):
        return ()
    return tuple(part * sum(values) for values in zip(*(cell.at_floors for cell in units), strict=True))


@lru_cache(10_000)
def short_name(node: str) -> str:
    """Returns a host name without its domain, because exporters and Kubernetes may use different forms. Keeps an IP
    address.
    """
    return node if node.replace(".", "").isdigit() else node.partition(".")[0]
