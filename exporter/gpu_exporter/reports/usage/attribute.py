"""Finds the holders of units whose exporter does not name them, from the GPU requests of the pods on their node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from gpu_exporter.reports.usage.cells import WINDOW_S, Cell, HolderId, Unit
from gpu_exporter.reports.usage.sharing import has_replicas, share_out
from gpu_exporter.reports.usage.sources.kube import PodName

ALL = 0.95  # share of a node's GPUs from which a pod has the whole node; of a window that a pod did not run
ZERO = 0.999
SHORT_S = 300.0  # a difference that the start or the end of a pod explains: a lookback of Prometheus
Windows = Mapping[float, float]


class _NodeWindow(NamedTuple):
    cluster: str
    node: str
    start: float


class Cluster(NamedTuple):
    """The data of kube-state-metrics. Times are GPU-seconds by start of the window, if not named otherwise.

    - `requests`: by pod and node. `completed`: seconds in which a pod was completed.
    - `offers`: GPU-seconds of the whole chunk, by cluster and node. `most`: the most GPUs that the node offered.
    - `blind`: windows in which it did not answer all the time, by cluster. `bare`: nodes that offer no GPU.
    """

    requests: Mapping[tuple[PodName, str], Windows]
    completed: Mapping[PodName, Windows]
    offers: Mapping[tuple[str, str], float]
    most: Mapping[tuple[str, str], float]
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
    offers = {(cluster, short_name(node)): gpus for (cluster, node), gpus in known.most.items()}
    for place in sorted({*units, *asked}, key=lambda place: (place.start, place)):
        pods, of_place, offered = asked.get(place, {}), units.get(place, []), offers.get((place.cluster, place.node))
        number = len(boards[place.cluster, place.node])
        is_shared = bool(of_place) and has_replicas(number, pods, offered)
        # Other pods on the same unit count too: of a shared unit, the pod has a part, and nothing of it is missing.
        # Except if the exporter names one pod at a time: then each pod must be named for all of its time.
        named = {
            pod: sum(cell.wall or cell.seconds for cell in of_place if pod in (cell.pod, cell.holder))
            if is_shared
            else sum(held[unit, place.start] for unit in sorted(on_units[pod, place.start]))
            for pod in pods
        }
        rests = {pod: _rest(seconds, named[pod]) for pod, seconds in pods.items()}
        if is_shared and len(pods) == 1 and any(named.values()):  # it may have all replicas of its units
            rests = {pod: min(rest, _missing(of_place, number)) for pod, rest in rests.items()}
        rests = {pod: rest for pod, rest in sorted(rests.items()) if rest > 0.0}
        found = models[place.cluster, place.node]
        unit = Unit(place.cluster, place.node, "", model=next(iter(found)) if len(found) == 1 else "")
        is_blind = (place.cluster, place.start) in known.blind or (place.cluster, place.node) in bare
        requested = sum(pods.values())
        window = _Node(unit, place.start, of_place, number, requested, offered, is_shared=is_shared, is_blind=is_blind)
        yield from _of_node(window, rests)


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
    - `is_shared`: pods get parts of its GPUs.
    - `is_blind`: kube-state-metrics did not answer all the time, or shows no GPUs of this node.
    """

    unit: Unit
    start: float
    units: list[Cell]
    boards: int
    requested: float
    offered: float | None
    is_shared: bool
    is_blind: bool


def _of_node(node: _Node, rests: Mapping[HolderId, float]) -> Iterator[Cell]:
    """The cells of a node in one window. `rests`: seconds of pods that no exporter names."""
    units, boards = node.units, node.boards
    seen = sum(cell.seconds for cell in units)
    held = sum(cell.seconds for cell in units if cell.holder is not None)
    is_known = node.offered is not None or bool(rests) or node.requested > 0.0
    is_nameless = seen > 0.0 and not held
    missing = _missing(units, boards)
    profiles = {cell.unit.profile for cell in units}
    unit = node.unit._replace(profile=profiles.pop() if len(profiles) == 1 else "")
    if node.is_shared and held and rests:
        yield from share_out(Cell(unit, None, node.start, 0.0, 0), units, rests, node.requested, missing)
        return
    part = 1.0
    if node.is_shared and rests:  # a replica is a part of a GPU; a pod that is alone on its GPU has all of it
        gpus = node.requested / WINDOW_S if node.offered is None else node.offered
        in_use = sum(cell.used + cell.low + cell.unknown for cell in units)
        part = min(1.0, max(boards / gpus, in_use / sum(rests.values())), seen / sum(rests.values()))
    of_pods = part * sum(rests.values())
    free = [_unknown(cell) if node.is_blind and is_nameless else cell for cell in units if cell.holder is None]
    outside = sum(cell.used + cell.low + cell.unknown for cell in free)
    claimed = min(1.0, of_pods / outside) if outside else 0.0
    yield from (cell for cell in units if cell.holder is not None)
    for cell in free:
        is_free = cell.is_free or is_known
        yield cell._replace(is_free=is_free, claimed=claimed * (cell.used + cell.low + cell.unknown))
    zero = sum(cell.idle + cell.unproven for cell in units)
    for holder, rest in rests.items():
        seconds = rest * part
        cell = Cell(unit, holder, node.start, seconds, samples=max(2, round(seconds / WINDOW_S)))
        has_all = len(rests) == 1 and rest >= ALL * seen
        if is_nameless and not node.is_shared and (has_all or zero >= ZERO * seen):
            yield _like(cell, units, seen, missing)
        else:
            # Its GPU has samples without a holder, unless as much time has no samples.
            is_seen = is_nameless or (seen - held >= ALL * rest and missing < ALL * rest)
            yield cell._replace(unknown=seconds, is_seen=is_seen, is_shared=is_nameless and node.is_shared)


def _missing(units: list[Cell], boards: int) -> float:
    """Returns the seconds in which so many units have no samples."""
    return max(0.0, boards * WINDOW_S - sum(cell.seconds for cell in units))


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
