"""The series of a simulated cluster (history.py) as a server has them that scrapes the exporters of others.

Names and labels: dcgm-exporter 4 (etc/default-counters.csv), kube-state-metrics 2, nvidia_gpu_exporter 1.9 (its recorded
scrapes), and the exporter of jobstats (plazonic/nvidia_gpu_prometheus_exporter). Each series is a line for the writer of
blocks (go/prometheus/main.go).
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

from tests.testbed.history import Cluster, Gap, Hold, Holder, Node, Piece, Target, Unit, Work, cut

Run = list[Any]  # value, samples, and the rise of a sample
Labels = dict[str, str]
MIB, GIB = 2.0**20, 2.0**30
WAVE = [round(math.sin(2 * math.pi * n / 16) / 5, 3) for n in range(16)]  # work varies by a fifth
REST_W, FULL_W = 70.0, 700.0
MEMORY_GIB = {"NVIDIA H100 80GB HBM3": 80, "NVIDIA A100-SXM4-40GB": 40, "NVIDIA L4": 24}
DCGM = {  # families by the value that they publish
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "engine",
    "DCGM_FI_DEV_GPU_UTIL": "percent",
    "DCGM_FI_DEV_FB_USED": "memory_mib",
    "DCGM_FI_DEV_FB_FREE": "free_mib",
    "DCGM_FI_DEV_POWER_USAGE": "watts",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "millijoules",
    "DCGM_FI_DEV_XID_ERRORS": "xid",
}
SMI = {
    "nvidia_smi_utilization_gpu_ratio": "ratio",
    "nvidia_smi_memory_used_bytes": "memory_bytes",
    "nvidia_smi_memory_total_bytes": "total_bytes",
    "nvidia_smi_power_draw_watts": "watts",
}
JOBSTATS = {
    "nvidia_gpu_duty_cycle": "percent",
    "nvidia_gpu_memory_used_bytes": "memory_bytes",
    "nvidia_gpu_memory_total_bytes": "total_bytes",
    "nvidia_gpu_power_usage_milliwatts": "milliwatts",
    "nvidia_gpu_jobId": "job_id",
    "nvidia_gpu_jobUid": "user_id",
}
OF_WHOLE_GPUS = ("percent", "ratio")  # no exporter has them for a GPU with MIG instances
OF_HELD_GPUS = ("job_id", "user_id")
PHASES = ("Pending", "Running", "Succeeded", "Failed", "Unknown")


class Dcgm(NamedTuple):
    """How a site runs dcgm-exporter.

    `holders`: "honoured" (honor_labels), "exported" (without), "hpc_job", or "" for no labels of holders. `copies`: a
    series for each pod that shares a GPU (--kubernetes-virtual-gpus), else only the last one has it. `host`: the label
    with the node's name.
    """

    families: tuple[str, ...] = tuple(DCGM)
    holders: str = "exported"
    copies: bool = False
    host: str = "Hostname"


def without_profiling() -> Dcgm:
    return Dcgm(tuple(name for name in DCGM if "PROF" not in name))


class Sheet:
    """Series on the times at which a target is scraped."""

    def __init__(self, cluster: Cluster, target: Target, gaps: list[Gap]) -> None:
        self.step = cluster.step
        self.first = cluster.start + zlib.crc32(target.instance.encode()) % int(1000 * self.step) / 1000
        self.count = max(0, math.ceil((cluster.end - self.first) / self.step))
        self._begin, self._end = self.index(target.start), self.index(target.end)
        self._gaps = [(self.index(gap.start), self.index(gap.end), gap.failed) for gap in gaps]
        self._gaps.append((0, self.index(cluster.retained_from), False))
        self._series: dict[tuple[tuple[str, str], ...], list[tuple[int, list[Run]]]] = defaultdict(list)
        self._cluster = {"cluster": cluster.name} if cluster.name else {}

    def index(self, moment: float) -> int:
        """The first scrape at or after `moment`."""
        return math.ceil(min(max(0.0, (moment - self.first) / self.step), self.count))

    def time(self, index: int) -> float:
        return self.first + index * self.step

    def put(self, labels: Labels, start: float, end: float, values: Callable[[int, int], list[Run]]) -> None:
        """A series with `values(first scrape, scrapes)` from `start` to before `end`. May be called again for later times."""
        first, last = max(self._begin, self.index(start)), min(self._end, self.index(end))
        if first < last:
            self._series[tuple(sorted((self._cluster | labels).items()))].append((first, values(first, last - first)))

    def lines(self) -> Iterator[dict[str, Any]]:
        for labels, parts in self._series.items():
            is_up = ("__name__", "up") in labels
            runs: list[Run] = []
            at = 0
            for first, more in sorted(parts, key=lambda part: part[0]):
                assert first >= at, f"two values at the same time: {dict(labels)}"
                if first > at:
                    runs += [["stale", 1], [None, first - at - 1]] if runs else [[None, first - at]]
                runs += more
                at = first + sum(run[1] for run in more)
            if at < self.count:
                runs.append(["stale", 1])
            for begin, end, failed in self._gaps:
                if not (failed and is_up):
                    runs = _silence(runs, begin, end, failed=failed)
            yield {
                "labels": dict(labels),
                "start": self.first,
                "step": self.step,
                "runs": [run for run in runs if run[1]],
            }


def _silence(runs: list[Run], begin: int, end: int, *, failed: bool) -> list[Run]:
    """Without the samples from `begin` to before `end`; after failed scrapes with a marker."""
    if begin >= end:
        return runs
    before, after = _slice(runs, 0, begin), _slice(runs, end, 1 << 40)
    is_there = bool(before) and before[-1][0] is not None and before[-1][0] != "stale"
    gap: list[Run] = [["stale", 1], [None, end - begin - 1]] if failed and is_there else [[None, end - begin]]
    return [*before, *gap, *after]


def _slice(runs: list[Run], begin: int, end: int) -> list[Run]:
    found: list[Run] = []
    at = 0
    for value, count, *rise in runs:
        first, last = max(begin, at) - at, min(end, at + count) - at
        if first < last:
            cut = value
            if isinstance(value, list):
                turn = first % len(value)
                cut = value[turn:] + value[:turn]
            elif rise:
                cut = value + first * rise[0]
            found.append([cut, last - first, *rise])
        at += count
    return found


def constant(value: float) -> Callable[[int, int], list[Run]]:
    """For Sheet.put."""
    return lambda first, count: [[value, count]]


class Readings:
    """The values of a unit by name, as runs of samples of one piece."""

    def __init__(self, sheet: Sheet, node: Node, unit: Unit, pieces: list[Piece]) -> None:
        self._sheet, self._node, self._unit = sheet, node, unit
        self._work = Work(pieces)
        self._watts = Work(pieces, lambda piece, start, end: _watts(piece, unit) * (end - start))
        self._noise = Random(unit.uuid + unit.instance)
        self._varying: dict[str, Callable[[Piece, int, int], Iterator[Run]]] = {
            "engine": self._engine,
            "percent": self._percent,
            "ratio": self._ratio,
            "millijoules": self._millijoules,
        }
        self._cycle = math.lcm(60, int(sheet.step)) // int(sheet.step)

    def __call__(self, name: str, piece: Piece) -> Callable[[int, int], list[Run]]:
        if name in self._varying:
            return lambda first, count: list(self._varying[name](piece, first, count))
        return constant(self._constant(name, piece))

    def _constant(self, name: str, piece: Piece) -> float:
        total = MEMORY_GIB.get(self._unit.model, 80) * self._unit.share
        used = min(total, sum(phase.memory for _, phase in piece.active))
        match name:
            case "memory_mib":
                return 1024 * used
            case "free_mib":
                return 1024 * (total - used)
            case "memory_bytes":
                return GIB * used
            case "total_bytes":
                return GIB * total
            case "watts":
                return round(_watts(piece, self._unit), 3)
            case "milliwatts":
                return round(1000 * _watts(piece, self._unit))
            case "xid":
                codes = [code for moment, code in self._node.xids.get(self._unit.gpu, ()) if moment <= piece.start]
                return codes[-1] if codes else 0
            case "job_id":
                return int(piece.active[-1][0].holder.name)
            case "user_id":
                return piece.active[-1][0].holder.user_id
        raise KeyError(name)

    def _engine(self, piece: Piece, first: int, count: int) -> Iterator[Run]:
        """Mean of the time since the scrape before. The first one of a piece contains work of the piece before."""
        sheet = self._sheet
        noise = max((phase.noise for _, phase in piece.active), default=0.0)
        if any(phase.burst_s for _, phase in piece.active):
            times = [sheet.time(first + 1 + n) for n in range(self._cycle)]
            later = [round(min(1.0, piece.work(time - sheet.step, time) / sheet.step), 6) for time in times]
        else:
            later = self._varied(piece.mean, 6)
        if noise:
            later = [round(noise * self._noise.random(), 6) for _ in range(32)]
            later[0] = noise
        mixed = self._work.between(sheet.time(first) - sheet.step, sheet.time(first)) / sheet.step
        yield [round(min(1.0, mixed), 6), 1]
        yield [later if any(later) else 0, count - 1]

    def _percent(self, piece: Piece, first: int, count: int) -> Iterator[Run]:
        """Utilization of this moment, in whole percent."""
        if any(phase.burst_s for _, phase in piece.active):
            times = [self._sheet.time(first + n) for n in range(self._cycle)]
            values = [round(100 * min(1.0, sum(phase.at(time) for _, phase in piece.active))) for time in times]
        else:
            values = [round(value) for value in self._varied(100 * piece.mean, 3, most=100.0)]
        yield [values if any(values) else 0, count]

    def _ratio(self, piece: Piece, first: int, count: int) -> Iterator[Run]:
        for value, samples in self._percent(piece, first, count):
            yield [[each / 100 for each in value] if value else 0, samples]

    def _millijoules(self, piece: Piece, first: int, count: int) -> Iterator[Run]:
        """A counter since the last restart of the node."""
        at = self._sheet.time(first)
        since = max([0.0, *(moment for moment in self._node.resets if moment <= at)])
        start = self._watts.between(since, at) + (0.0 if since else REST_W * 86400)
        yield [round(1000 * start), count, round(1000 * _watts(piece, self._unit) * self._sheet.step)]

    @staticmethod
    def _varied(mean: float, digits: int, most: float = 1.0) -> list[float]:
        mean = min(mean, most)
        width = min(mean, 5 * (most - mean))  # WAVE reaches a fifth
        return [round(mean + width * each, digits) for each in WAVE] if mean else [0.0]


def _watts(piece: Piece, unit: Unit) -> float:
    """Of the board, also for an instance of it, as exporters have it: then always half of the range."""
    return REST_W + (FULL_W - REST_W) * (0.5 if unit.instance else min(1.0, piece.mean))


def dcgm(cluster: Cluster, how: Dcgm = Dcgm()) -> Iterator[dict[str, Any]]:  # noqa: B008
    """Series of dcgm-exporter, and `up` of its targets. Its targets are pods unless it writes hpc_job."""

    def labels(node: Node, unit: Unit, target: Target, piece: Piece) -> list[Labels]:
        place = {"gpu": str(unit.gpu), "UUID": unit.uuid, "device": f"nvidia{unit.gpu}", "modelName": unit.model}
        place |= {how.host: node.name, "pci_bus_id": f"00000000:{unit.gpu + 1:02X}:00.0"}
        place["DCGM_FI_DRIVER_VERSION"] = "580.65.06"
        place |= {"GPU_I_ID": unit.instance, "GPU_I_PROFILE": unit.profile} if unit.instance else {}
        place |= own(target)
        holders = sorted((hold.start, hold.holder.namespace, hold.holder.name) for hold, _ in piece.active)
        if how.holders == "hpc_job":
            return [{**place, "hpc_job": name} for _, _, name in holders] or [place]
        named = {"honoured": "", "exported": "exported_"}.get(how.holders)
        if named is None or not holders:
            return [place]
        names = [
            {f"{named}namespace": namespace, f"{named}pod": name, f"{named}container": "main"}
            for _, namespace, name in holders
        ]
        return [place | each for each in (names if how.copies else names[-1:])]

    def own(target: Target) -> Labels:
        if how.holders == "hpc_job":
            return {"job": "dcgm-exporter", "instance": target.instance}
        pod = f"nvidia-dcgm-exporter-{zlib.crc32(target.instance.encode()):x}"
        place = {"namespace": "gpu-operator", "pod": pod, "container": "nvidia-dcgm-exporter"}
        return {"job": "nvidia-dcgm-exporter", "instance": target.instance, **place}

    yield from _by_node(cluster, {name: DCGM[name] for name in how.families}, labels, own)


def nvidia_smi(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Series of nvidia_gpu_exporter: they have the UUID without prefix, and no MIG instances."""

    def own(target: Target) -> Labels:
        return {"job": "nvidia-gpu-exporter", "instance": target.instance.replace("9400", "9835")}

    def labels(node: Node, unit: Unit, target: Target, piece: Piece) -> list[Labels]:
        return [{**own(target), "node": node.name, "uuid": unit.uuid.removeprefix("GPU-")}]

    def info(node: Node, unit: Unit) -> Labels:
        return {"index": str(unit.gpu), "name": unit.model, "driver_version": "590.48.01"}

    nodes = {}
    for name, node in cluster.nodes.items():  # the first instance stands for its GPU
        units = [unit._replace(share=1.0) for unit in node.units if unit.instance in ("", "1")]
        nodes[name] = replace(node, units=units)
    yield from _by_node(replace(cluster, nodes=nodes), SMI, labels, own, ("nvidia_smi_gpu_info", info))


def jobstats(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Series of the exporter of jobstats; jobid and userid are on each series of a GPU with a job."""

    def own(target: Target) -> Labels:
        return {"job": "nvidia-gpu", "instance": target.instance.replace("9400", "9445")}

    def labels(node: Node, unit: Unit, target: Target, piece: Piece) -> list[Labels]:
        number = str(unit.gpu)
        place = {**own(target), "ordinal": number, "minor_number": number, "uuid": unit.uuid, "name": unit.model}
        if unit.instance:
            place |= {"GPU_I_ID": unit.instance, "uuid": f"MIG-{unit.uuid[4:-1]}{unit.instance}"}
            place |= {"name": f"{unit.model} MIG {unit.profile}"}
        if not piece.active:
            return [place]
        holder = piece.active[-1][0].holder
        return [{**place, "jobid": holder.name, "userid": str(holder.user_id)}]

    yield from _by_node(cluster, JOBSTATS, labels, own)


def _by_node(
    cluster: Cluster,
    families: dict[str, str],
    labels: Callable[[Node, Unit, Target, Piece], list[Labels]],
    own: Callable[[Target], Labels],
    info: tuple[str, Callable[[Node, Unit], Labels]] | None = None,
) -> Iterator[dict[str, Any]]:
    """The families of each unit with `labels`, and `up` with the labels of the target. `info`: a family of 1."""
    for node in cluster.nodes.values():
        pieces = {unit: list(cluster.pieces(node, unit)) for unit in node.units}
        for target in node.targets:
            sheet = Sheet(cluster, target, node.gaps)
            failed = [gap for gap in node.gaps if gap.failed]
            for start, end, scraped in cut(cluster.start, cluster.end, failed):
                sheet.put({"__name__": "up", **own(target)}, start, end, constant(float(scraped)))
            for unit in node.units:
                readings = Readings(sheet, node, unit, pieces[unit])
                for piece in pieces[unit]:
                    for place in labels(node, unit, target, piece):
                        for family, value in _families(families, unit, piece):
                            sheet.put({"__name__": family, **place}, *piece[:2], readings(value, piece))
                        if info is not None:
                            named = {"__name__": info[0], **place, **info[1](node, unit)}
                            sheet.put(named, *piece[:2], constant(1))
            yield from sheet.lines()


def _families(families: dict[str, str], unit: Unit, piece: Piece) -> Iterator[tuple[str, str]]:
    """Those that an exporter has for this unit, with the names of their values."""
    for family, value in families.items():
        if not (unit.instance and value in OF_WHOLE_GPUS) and (piece.active or value not in OF_HELD_GPUS):
            yield family, value


def kube_state(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Series of kube-state-metrics. Those of a pod last until it is deleted, also after it has completed."""
    target = Target(f"10.0.0.9:8080{cluster.name}")
    sheet = Sheet(cluster, target, [])
    own = {"job": "kube-state-metrics", "instance": "10.0.0.9:8080"}

    def put(name: str, labels: Labels, start: float, end: float, value: float = 1) -> None:
        sheet.put({"__name__": name, **own, **labels}, start, end, constant(value))

    put("up", {}, cluster.start, cluster.end)
    for node in cluster.nodes.values():
        offers: dict[str, int] = defaultdict(int)
        for unit in node.units:
            offers[unit.resource] += node.offered
        for (resource, number), kind in itertools.product(offers.items(), ("capacity", "allocatable")):
            labels = {"node": node.name, "resource": resource, "unit": "integer"}
            put(f"kube_node_status_{kind}", labels, cluster.start, cluster.end, number)
    pods: dict[Holder, list[Hold]] = defaultdict(list)
    for hold in (hold for holds in cluster.holds.values() for hold in holds if hold.holder.namespace):
        pods[hold.holder].append(hold)
    for pod, holds in pods.items():
        _put_pod(pod, holds, put)
    sets = {(pod.namespace, _replica_set(pod), pod.owner[1]) for pod in pods if pod.owner[0] == "Deployment"}
    for namespace, name, owner in sorted(sets):
        labels = {"namespace": namespace, "replicaset": name, "owner_kind": "Deployment", "owner_name": owner}
        put("kube_replicaset_owner", {**labels, "owner_is_controller": "true"}, cluster.start, cluster.end)
    jobs = {(pod.namespace, pod.owner[1], *pod.above) for pod in pods if pod.above[0]}
    for namespace, name, kind, owner in sorted(jobs):
        labels = {"namespace": namespace, "job_name": name, "owner_kind": kind, "owner_name": owner}
        put("kube_job_owner", {**labels, "owner_is_controller": "true"}, cluster.start, cluster.end)
    yield from sheet.lines()


def _replica_set(pod: Holder) -> str:
    return f"{pod.owner[1]}-{zlib.crc32(pod.owner[1].encode()):x}"


def _put_pod(pod: Holder, holds: list[Hold], put: Callable[..., None]) -> None:
    labels = {"namespace": pod.namespace, "pod": pod.name, "uid": pod.uid}
    start, end = min(hold.start for hold in holds), max(hold.end for hold in holds)
    created, deleted = start - max(hold.pending_s for hold in holds), end + max(hold.kept_s for hold in holds)
    for resource in sorted({hold.unit.resource for hold in holds}):
        units = {hold.unit for hold in holds if hold.unit.resource == resource}
        asked = {**labels, "container": "main", "resource": resource, "unit": "integer"}
        put("kube_pod_container_resource_requests", asked, created, start, len(units))  # without a node while it waits
        node = {"node": holds[0].unit.node}
        put("kube_pod_container_resource_requests", asked | node, start, deleted, len(units))
    for (phase, begin, stop), each in itertools.product(
        (("Pending", created, start), ("Running", start, end), ("Succeeded", end, deleted)), PHASES
    ):
        put("kube_pod_status_phase", {**labels, "phase": each}, begin, stop, float(each == phase))
    put("kube_pod_start_time", labels, start, deleted, int(start))
    named = {**({"label_team": pod.team} if pod.team else {}), **dict(pod.labels)}
    put("kube_pod_labels", {**labels, **named}, created, deleted)
    kind, name = ("ReplicaSet", _replica_set(pod)) if pod.owner[0] == "Deployment" else pod.owner
    owner = {"owner_kind": kind or "<none>", "owner_name": name or "<none>"}
    put("kube_pod_owner", {**labels, **owner, "owner_is_controller": "true" if kind else "<none>"}, created, deleted)
