"""The life of a holder in a history: its units, when they were idle, and when no source showed them. Pure."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from gpu_exporter.common.model.readings import WITNESSES_MIN
from gpu_exporter.reconciler.decision.surroundings import UNCLEAR, Member, Surroundings
from gpu_exporter.reconciler.evidence.records import FACTS, HolderEvidence, HolderName, UnitEvidence
from gpu_exporter.reports.backtest.spans import Spans, overlap_s

# How a run or a tenure ended: the unit worked; no source saw it; the holder left it, or its node vanished for ever; the
# history ends.
WORK, UNSEEN, LEFT, LOST, OPEN = "work", "unseen", "left", "lost", "open"
SHORT_S = 900.0  # shorter idle runs are left out, unless they touch a gap: no policy has such a window


class IdleRun(NamedTuple):
    """A time without activity, from `start` to `end` (Unix seconds). `ended`: WORK, UNSEEN, LEFT, LOST or OPEN."""

    start: float
    end: float
    ended: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class Tenure:
    """The time for which one holder held one unit, from `start` to `end` (Unix seconds).

    - `runs`: its idle runs in order of time, once for each floor of model.FLOORS. Without engine activity, all are the
      same.
    - `gaps`: times in which no source showed the unit. `thin`: times in which it was missing for a part, at an unknown
      place.
    - `ended`: LEFT, UNSEEN, LOST or OPEN. `share`: the holder's part of a whole GPU, 0 to 1.
    - `doubts`: times in which work between two samples would have been missed.
    - `host_work`: times in which the holder worked outside its GPUs; empty if unknown.
    - `longest_gap_s`: the longest idle run that ended with work before the history begins (seconds).
    """

    node: str
    uuid: str
    mig: str
    model: str
    start: float
    end: float
    ended: str
    runs: tuple[Sequence[IdleRun], ...]
    gaps: Spans = ()
    doubts: Spans = ()
    thin: Spans = ()
    share: float = 1.0
    is_shared: bool = False
    host_work: Spans = ()
    longest_gap_s: float = 0.0
    records: dict[int, list[tuple[float, float]]] = field(default_factory=dict, compare=False, repr=False)

    def run_at(self, wall: float, floor: int) -> IdleRun | None:
        """Returns the idle run that contains this time, None if there is none."""
        runs = self.runs[floor]
        at = bisect_right(runs, wall, key=itemgetter(0)) - 1
        return runs[at] if at >= 0 and wall < runs[at].end else None

    def lose(self) -> None:
        """Changes the end from LEFT to UNSEEN: the holder may have continued, but no source showed it."""
        self.ended = UNSEEN
        self.runs = tuple([run._replace(ended=UNSEEN) if run.ended == LEFT else run for run in of] for of in self.runs)

    def gap_at(self, wall: float) -> tuple[float, float] | None:
        """Returns the gap that contains this time, None if there is none."""
        at = bisect_right(self.gaps, wall, key=itemgetter(0)) - 1
        return self.gaps[at] if at >= 0 and wall < self.gaps[at][1] else None

    def unseen_s(self, start: float, end: float) -> float:
        """Returns the seconds between `start` and `end` in which no source showed the unit."""
        return overlap_s(self.gaps, start, end) + overlap_s(self.thin, start, end)

    def first_work(self, after: float, floor: int) -> float | None:
        """Returns when the unit first worked after `after`, None if never. Idle time below SHORT_S counts as work."""
        quiet = sorted((*((run.start, run.end) for run in self.runs[floor]), *self.gaps))
        at = max(after, self.start)
        for start, end in quiet:
            if start > at:
                break
            at = max(at, end)
        return at if at < self.end else None

    def evidence(self, wall: float, floor: int, window_s: float, *, is_trusted: bool) -> UnitEvidence:
        """Returns the evidence that the reconciler would have had about this unit. `window_s`: window of the coverage
        (seconds). `is_trusted`: treats every zero of the source as proven.
        """
        gap, run = self.gap_at(wall), self.run_at(wall, floor)
        span_s = min(window_s, wall - self.start)
        missing_s = self.unseen_s(wall - span_s, wall)
        is_proven = run is None or not overlap_s(self.doubts, run.start, wall)
        last = self.host_work[: bisect_right(self.host_work, wall, key=itemgetter(0))][-1:]
        return UnitEvidence(
            node=self.node,
            gpu="",
            uuid=self.uuid,
            mig=self.mig,
            start_wall=self.start,
            idle_run_s=None if gap else wall - run.start if run else 0.0,
            sample_age_s=wall - gap[0] if gap else 0.0,
            coverage=1.0 - missing_s / span_s if span_s > 0.0 else None,
            witnesses=WITNESSES_MIN if is_proven or is_trusted else WITNESSES_MIN - 1,
            sample_interval_s=1.0,
            model=self.model,
            longest_gap_s=self.longest_gap(wall, floor),
            obstacle="no_sample" if gap else "",
            is_shared=self.is_shared,
            host_work_age_s=max(0.0, wall - last[0][1]) if last else None,
        )

    def longest_gap(self, wall: float, floor: int) -> float:
        """Returns the longest idle run (seconds) that had ended with work by this time."""
        records = self.record_gaps(floor)
        return records[bisect_right(records, wall, key=itemgetter(0)) - 1][1]

    def record_gaps(self, floor: int) -> Sequence[tuple[float, float]]:
        """Lists how the longest idle run grew: a time (Unix seconds), and the longest run from then on (seconds)."""
        found = self.records.get(floor)
        if found is None:
            found = self.records[floor] = [(-math.inf, self.longest_gap_s)]
            for run in self.runs[floor]:
                if run.ended == WORK and run.seconds > found[-1][1]:
                    found.append((run.end, run.seconds))
        return found


@dataclass(slots=True)
class HolderLife:
    """One pod or job from its start to its end, with all its units.

    - `held`: the number of units from its scheduler, None if unknown. `owner`: "" if unknown.
    - `facts`: for each of FACTS its values; "" if the source does not report it.
    """

    cluster: str
    name: HolderName
    tenures: list[Tenure]
    owner: str = ""
    held: int | None = None
    incarnation: str = ""
    users_id: str = ""
    facts: dict[str, frozenset[str]] = field(default_factory=dict)

    @property
    def start(self) -> float:
        return min(each.start for each in self.tenures)

    @property
    def end(self) -> float:
        return max(each.end for each in self.tenures)

    def gpus_at(self, wall: float) -> float:
        """Returns the number of whole GPUs that the holder has at this time. A part of a GPU counts by its share."""
        held = {(each.uuid, each.mig): each.share for each in self.tenures if each.start <= wall < each.end}
        return sum(held.values())

    def evidence(self, wall: float, floor: int, window_s: float, mark: str, *, is_trusted: bool) -> HolderEvidence:
        """Returns the evidence about this holder at `wall` (Unix seconds). `mark`: the stage of its mark."""
        units = tuple(
            each.evidence(wall, floor, window_s, is_trusted=is_trusted)
            for each in self.tenures
            if each.start <= wall < each.end
        )
        is_job = self.name.scheduler == "slurm"
        return HolderEvidence(
            self.name,
            self.owner,
            units,
            len(units) if self.held is None else self.held,
            frozenset(filter(None, [self.incarnation])),
            self.users_id,
            frozenset([self.cluster]) if is_job else frozenset(),
            facts={fact: self.facts.get(fact, frozenset([""])) for fact in FACTS},
            mark=mark,
        )


@dataclass(slots=True)
class PastGang:
    """Holders that are judged together. A single pod or job is a gang of one.

    - `title`: the controller whose pods work together, "" for a single holder.
    - `owner_kinds`: kinds of the known controllers, nearest first. `kind`: class of the holder. `team`: "" if unknown.
    - `starts`: when the pods of this controller, or the runs of this job, began (Unix seconds).
    """

    lives: list[HolderLife]
    title: str = ""
    owner_kinds: tuple[str, ...] = ()
    kind: str = UNCLEAR
    team: str = ""
    starts: Sequence[float] = ()

    def surroundings(self, alive: Sequence[HolderLife]) -> Surroundings:
        """Returns the surroundings that the scheduler would have shown for these members."""
        members = tuple(Member(each.name, each.incarnation, each.held) for each in alive) if self.title else ()
        kinds = self.owner_kinds or ("Pod",)
        is_pod = alive[0].name.scheduler == "kubernetes"
        return Surroundings(
            group=self.title, members=members, kind=self.kind, owner_kinds=kinds if is_pod else (), tenant=self.team
        )


def crossings(tenure: Tenure, window_s: float, shares: Sequence[float]) -> Iterator[float]:
    """Yields the times (Unix seconds) at which the coverage of a unit crosses one of `shares`."""
    if not (tenure.gaps or tenure.thin):
        return
    edges = {edge + shift for gap in (*tenure.gaps, *tenure.thin) for edge in gap for shift in (0.0, window_s)}
    edges |= {tenure.start, tenure.start + window_s, tenure.end}
    inside = sorted(edge for edge in edges if tenure.start <= edge <= tenure.end)
    for begin, end in itertools.pairwise(inside):  # between two edges, both sides of the share are linear
        for share in shares:
            low, high = (_excess(tenure, window_s, share, wall) for wall in (begin, end))
            if low * high < 0.0:
                yield begin + (end - begin) * low / (low - high)


def _excess(tenure: Tenure, window_s: float, share: float, wall: float) -> float:
    span_s = min(window_s, wall - tenure.start)
    return tenure.unseen_s(wall - span_s, wall) - (1.0 - share) * span_s
