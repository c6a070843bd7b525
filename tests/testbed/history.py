"""A cluster whose work is known: who held which GPU, when it worked, and which scrapes failed.

history_series.py writes it as the exporters of others publish it. `Cluster.truth` has the GPU-hours by holder, which a
report about these series must find. Times are in Unix seconds.
"""

from __future__ import annotations

import bisect
import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

HOUR = 3600.0
LOW_BELOW = 0.1  # as ledger.low_ratio
BURST_AT = 7.0  # seconds after the full minute
SLICES = 7  # of a GPU, in shares of MIG instances


class Phase(NamedTuple):
    """What a holder does for `seconds`.

    `level`: utilization while it works. `burst_s`: it works for only so long of each minute; 0: all the time. `noise`:
    largest engine activity that the counters show without any work. `memory`: GiB in use.
    """

    seconds: float
    level: float = 0.0
    burst_s: float = 0.0
    noise: float = 0.0
    memory: float = 0.5

    @property
    def mean(self) -> float:
        return self.level * (self.burst_s / 60.0 if self.burst_s else 1.0)

    @property
    def part(self) -> str:
        return "idle" if self.mean == 0.0 else "low" if self.mean < LOW_BELOW else "used"

    def at(self, moment: float) -> float:
        """Utilization at a moment."""
        return self.level if not self.burst_s or (moment - BURST_AT) % 60.0 < self.burst_s else 0.0

    def work(self, start: float, end: float) -> float:
        """Integral of utilization."""
        return self.level * (_bursts(end, self.burst_s) - _bursts(start, self.burst_s) if self.burst_s else end - start)


def _bursts(moment: float, burst_s: float) -> float:
    """Seconds of bursts until `moment`."""
    minutes, rest = divmod(moment - BURST_AT, 60.0)
    return minutes * burst_s + min(rest, burst_s)


def idle(seconds: float) -> Phase:
    return Phase(seconds)


def loaded(seconds: float) -> Phase:
    """Idle, with a model in memory."""
    return Phase(seconds, memory=60.0)


def noisy(seconds: float) -> Phase:
    """Idle; the profiling counters show up to 0.008, as on real boards."""
    return Phase(seconds, noise=0.008, memory=2.0)


def used(seconds: float, level: float = 0.8) -> Phase:
    return Phase(seconds, level, memory=40.0)


def bursts(seconds: float, level: float = 0.9) -> Phase:
    """Six seconds of work a minute, which no sample of a gauge may meet."""
    return Phase(seconds, level, burst_s=6.0, memory=10.0)


@dataclass(frozen=True)
class Holder:
    """A pod, or a Slurm job if `namespace` is "".

    `owner`: kind and name of the controller. `above`: of the owner of its Job. `labels`: as kube-state-metrics names them. `number`: which pod of this name. `user_id`: of `user`.
    """

    name: str
    namespace: str = ""
    owner: tuple[str, str] = ("", "")
    team: str = ""
    user: str = ""
    user_id: int = 1000
    account: str = ""
    number: int = 0
    above: tuple[str, str] = ("", "")
    labels: tuple[tuple[str, str], ...] = ()

    @property
    def uid(self) -> str:
        return made_uuid(f"{self.namespace}/{self.name}/{self.number}")


class Unit(NamedTuple):
    """A GPU, or a MIG instance of it. `share`: of the GPU."""

    node: str
    model: str
    uuid: str
    gpu: int
    instance: str = ""
    profile: str = ""
    share: float = 1.0

    @property
    def resource(self) -> str:
        """As kube-state-metrics writes it."""
        return f"nvidia_com_mig_{self.profile.replace('.', '_')}" if self.profile else "nvidia_com_gpu"


class Hold(NamedTuple):
    """A holder of a unit. `pending_s`, `kept_s`: how long its pod is there before and after."""

    holder: Holder
    unit: Unit
    start: float
    phases: tuple[Phase, ...]
    pending_s: float = 0.0
    kept_s: float = 0.0

    @property
    def end(self) -> float:
        return self.start + sum(phase.seconds for phase in self.phases)


class Target(NamedTuple):
    """A target of the server for a node's exporter, scraped from `start` to before `end`."""

    instance: str
    start: float = 0.0
    end: float = float("inf")


class Gap(NamedTuple):
    """Time without samples. `failed`: scrapes failed, so the server marked the series stale; else it was down itself."""

    start: float
    end: float
    failed: bool = True


@dataclass
class Node:
    """`offered`: GPUs that the device plugin offers for one. `resets`: times at which counters restarted.

    `xids`: times and codes of the last error by GPU.
    """

    name: str
    model: str
    units: list[Unit]
    targets: list[Target]
    offered: int = 1
    gaps: list[Gap] = field(default_factory=list)
    resets: list[float] = field(default_factory=list)
    xids: dict[int, list[tuple[float, int]]] = field(default_factory=dict)


class Piece(NamedTuple):
    """Time in which the same holders do the same on a unit."""

    start: float
    end: float
    active: tuple[tuple[Hold, Phase], ...]

    @property
    def mean(self) -> float:
        return sum(phase.mean for _, phase in self.active)

    def work(self, start: float, end: float) -> float:
        return sum(phase.work(start, end) for _, phase in self.active)


@dataclass
class Hours:
    """GPU-hours. `used`, `low` and `idle`: of the time that was scraped; `unseen` is the rest of `held`."""

    held: float = 0.0
    used: float = 0.0
    low: float = 0.0
    idle: float = 0.0
    unseen: float = 0.0

    def add(self, part: str, hours: float) -> None:
        self.held += hours
        setattr(self, part, getattr(self, part) + hours)


class Key(NamedTuple):
    cluster: str
    namespace: str
    name: str
    model: str


@dataclass
class Truth:
    """`holders`: hours by hour of the period (its start). `free`, `free_unseen`, `present`: GPU-hours by model."""

    holders: dict[Key, dict[float, Hours]] = field(default_factory=dict)
    free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    free_unseen: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    present: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def total(self, *keys: Key) -> Hours:
        """The sum of these holders, of all without `keys`."""
        total = Hours()
        for key in keys or self.holders:
            for hours in self.holders[key].values():
                for part, value in vars(hours).items():
                    setattr(total, part, getattr(total, part) + value)
        return total

    def money(self, prices: Mapping[str, float], part: str = "held") -> float:
        """`prices`: of a GPU-hour, by model."""
        return sum(prices[key.model] * float(getattr(self.total(key), part)) for key in self.holders)


@dataclass
class Cluster:
    """`name`: the label `cluster`, "" for none. `retained_from`: the server has forgotten all before."""

    start: float
    end: float
    name: str = ""
    step: float = 30.0
    retained_from: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    holds: dict[Unit, list[Hold]] = field(default_factory=lambda: defaultdict(list))

    def node(
        self,
        name: str,
        gpus: int = 8,
        model: str = "NVIDIA H100 80GB HBM3",
        mig: Mapping[int, Iterable[str]] | None = None,
    ) -> Node:
        """Add a node. `mig`: profiles of the instances by GPU; the other GPUs are not divided."""
        units = []
        for gpu in range(gpus):
            whole = Unit(name, model, f"GPU-{made_uuid(f'{self.name}/{name}/{gpu}')}", gpu)
            profiles = (mig or {}).get(gpu)
            units += [whole] if profiles is None else [_instance(whole, *each) for each in enumerate(profiles, 1)]
        address = zlib.crc32(name.encode()) % 65536
        target = Target(f"10.1.{address // 256}.{address % 256}:9400")
        self.nodes[name] = Node(name, model, units, [target])
        return self.nodes[name]

    def hold(
        self,
        holder: Holder,
        units: Iterable[Unit],
        start: float,
        *phases: Phase,
        pending_s: float = 0,
        kept_s: float = 0,
    ) -> float:
        """`holder` holds the units and does the same on each. Returns the end."""
        holds = [Hold(holder, unit, start, phases, pending_s, kept_s) for unit in units]
        for each in holds:
            self.holds[each.unit].append(each)
        return holds[0].end

    def pieces(self, node: Node, unit: Unit) -> Iterator[Piece]:
        """All time until the end, cut wherever something changes; from the start, or from an earlier holder."""
        spans = []
        for hold in self.holds.get(unit, ()):
            at = hold.start
            for phase in hold.phases:
                spans.append((at, at + phase.seconds, hold, phase))
                at += phase.seconds
        spans.sort(key=lambda span: span[0])
        changes = {self.start, self.end, *node.resets, *(moment for moment, _ in node.xids.get(unit.gpu, ()))}
        bounds = sorted(changes.union(*(span[:2] for span in spans)))
        active: list[tuple[float, float, Hold, Phase]] = []
        position = 0
        for start, end in itertools.pairwise(bounds):
            active = [span for span in active if span[1] > start]
            while position < len(spans) and spans[position][0] <= start:
                active += [spans[position]] if spans[position][1] > start else []
                position += 1
            if start < self.end:
                yield Piece(start, end, tuple((hold, phase) for _, _, hold, phase in active))

    def truth(self, start: float | None = None, end: float | None = None) -> Truth:
        """GPU-hours from `start` to `end`: a holder's share is that of the unit, divided by the number of its holders."""
        truth = Truth()
        since, until = start or self.start, end or self.end
        for node in self.nodes.values():
            gaps = [*node.gaps, Gap(0.0, self.retained_from)]
            for unit in node.units:
                truth.present[node.model] += unit.share * (until - since) / HOUR
                for piece in self.pieces(node, unit):
                    for begin, stop, seen in cut(max(piece.start, since), min(piece.end, until), gaps):
                        self._count(truth, unit, piece, (begin, stop), seen=seen)
        return truth

    def _count(self, truth: Truth, unit: Unit, piece: Piece, span: tuple[float, float], *, seen: bool) -> None:
        hours = unit.share * (span[1] - span[0]) / HOUR
        if not piece.active:
            (truth.free if seen else truth.free_unseen)[unit.model] += hours
        for hold, phase in piece.active:
            key = Key(self.name, hold.holder.namespace, hold.holder.name, unit.model)
            by_hour = truth.holders.setdefault(key, {})
            hour = span[0] // HOUR * HOUR
            by_hour.setdefault(hour, Hours()).add(phase.part if seen else "unseen", hours / len(piece.active))


def cut(start: float, end: float, gaps: Iterable[Gap]) -> Iterator[tuple[float, float, bool]]:
    """The time from `start` to `end`, cut at full hours and gaps; with False in gaps."""
    if start >= end:
        return
    hours = (hour * HOUR for hour in range(int(start // HOUR) + 1, math.ceil(end / HOUR)))
    edges = (edge for gap in gaps for edge in gap[:2] if start < edge < end)
    for begin, stop in itertools.pairwise(sorted({start, end, *hours, *edges})):
        yield begin, stop, not any(gap.start <= begin < gap.end for gap in gaps)


def _instance(gpu: Unit, number: int, profile: str) -> Unit:
    return gpu._replace(instance=str(number), profile=profile, share=int(profile.partition("g")[0]) / SLICES)


def made_uuid(name: str) -> str:
    """A UUID that is always the same for this name."""
    number = f"{zlib.crc32(name.encode()):08x}{zlib.crc32(name[::-1].encode()):08x}"
    return f"{number[:8]}-{number[8:12]}-4{number[13:16]}-8000-{number[::-1][:12]}"


class Work:
    """Integral of `work(piece, start, end)` of a unit up to any moment."""

    def __init__(self, pieces: list[Piece], work: Callable[[Piece, float, float], float] = Piece.work) -> None:
        self._pieces, self._work = pieces, work
        self._starts = [piece.start for piece in pieces]
        self._before = list(itertools.accumulate((work(piece, *piece[:2]) for piece in pieces), initial=0.0))

    def until(self, moment: float) -> float:
        position = bisect.bisect_right(self._starts, moment) - 1
        if position < 0:
            return 0.0
        piece = self._pieces[position]
        return self._before[position] + self._work(piece, piece.start, moment)

    def between(self, start: float, end: float) -> float:
        return self.until(end) - self.until(start)
