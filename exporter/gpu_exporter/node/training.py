"""The trainings of a node: the reports of the last minutes, and what they say of each allocation.

What a job writes is a claim. Here it becomes counters and shares with the job's own labels; it makes no GPU used, and
keeps nothing from a mark (docs/torch.md). A report counts for a GPU only if the holder has that GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.attribution.contradict import Who, identify
from gpu_exporter.host.training import TrainingFiles
from gpu_exporter.model.holders import Allocation
from gpu_exporter.model.training import Fact, RankReport, TrainingPace, TrainingView
from gpu_exporter.model.units import UnitId

KEEP_S = 600.0
LOOKS_MAX = 41  # one every 15 s
STEPS_MIN = 20  # measured steps that a share needs; TraceML is confident from 20 on
LATE_SHARE = 0.1  # of a step: from here on a rank is named as late; gpuprof and TraceML name it from 10 %
CONTRADICTION_S = 1800.0  # this long without any work of the GPU, while steps go on


class TrainingSteps(NamedTuple):
    """What the loop of a holder did between two looks. `steps`: that all its ranks made, None if unknown."""

    start: float
    end: float
    steps: int | None


class _KeptTraining:
    """The looks at one holder, oldest first. `stepped`: when a step was last seen to be made, monotonic seconds."""

    def __init__(self, files: TrainingFiles) -> None:
        self.looks = deque([files], maxlen=LOOKS_MAX)
        self.paces: dict[frozenset[tuple[int | None, str]], TrainingPace] = {}  # of this look, by ranks and runs
        self.stepped = files.monotonic - min(each.age_s for each in files.reports)


class NodeTraining:
    """Not thread-safe: the node's lock protects it."""

    def __init__(self) -> None:
        self._kept: dict[Who, _KeptTraining] = {}

    def note(self, who: Who, files: TrainingFiles) -> TrainingSteps | None:
        """Keep one look. What was done since the last look, None at the first one."""
        kept = self._kept.get(who)
        if kept is None:
            self._kept[who] = _KeptTraining(files)
            return None
        last = kept.looks[-1]
        steps = _count_steps(last, files)
        if steps or steps is None:  # a process that has begun is no silence either
            kept.stepped = files.monotonic
        kept.looks.append(files)
        kept.paces = {}
        while len(kept.looks) > 2 and files.monotonic - kept.looks[1].monotonic >= KEEP_S:
            kept.looks.popleft()
        return TrainingSteps(last.monotonic, files.monotonic, steps)

    def keep(self, present: Iterable[Allocation], now: float) -> None:
        """Forget holders that have left, and those whose files have gone."""
        whos = {identify(allocation.holder) for allocation in present}
        self._kept = {
            who: kept for who, kept in self._kept.items() if who in whos and now - kept.looks[-1].monotonic <= KEEP_S
        }

    def has(self, who: Who | None) -> bool:
        """Whether this holder's training is known."""
        return who in self._kept

    def view(
        self, who: Who | None, unit: UnitId, own: Sequence[UnitId], now: float, idle_run_s: float | None
    ) -> TrainingView | None:
        """What is published on one allocation; None if none of the holder's ranks is known to be on it.

        `own`: all units of the holder on this node. `idle_run_s`: how long the GPU has done nothing, None if unknown.
        """
        kept = self._kept.get(who) if who is not None else None
        if kept is None:
            return None
        ranks = [each for each in kept.looks[-1].reports if _is_on(each, unit, own)]
        if not ranks:
            return None
        seconds: dict[str, float] = {}
        for rank in ranks:
            for name, value in {"step": rank.step_s, "wait": rank.wait_s, **rank.phases}.items():
                if value is not None:
                    seconds[name] = seconds.get(name, 0.0) + value
        pace = _measure(kept, kept.looks[-1].reports)._replace(silent_s=max(0.0, now - kept.stepped))
        return TrainingView(
            steps=sum(each.steps for each in ranks),
            seconds=seconds,
            rank=min((each.rank for each in ranks if each.rank is not None), default=None),
            step_s=_measure(kept, ranks).step_s,
            pace=pace,
            contradiction=_contradict(pace, idle_run_s),
        )


def _contradict(pace: TrainingPace, idle_run_s: float | None) -> str:
    if idle_run_s is None or idle_run_s < CONTRADICTION_S or not pace.steps or pace.silent_s > KEEP_S:
        return ""
    return (
        f"its training reports steps, but this GPU has done nothing for {idle_run_s / 60:.0f} min: either the loop uses"
        " another device, or the report is wrong"
    )


def _is_on(report: RankReport, unit: UnitId, own: Sequence[UnitId]) -> bool:
    """Whether a rank uses a unit: it names the unit, or names none and the holder has no other."""
    return (unit.mig_uuid or unit.uuid) in report.gpus if report.gpus else len(own) == 1


def _pairs(before: TrainingFiles, after: TrainingFiles) -> list[tuple[RankReport, RankReport]]:
    """The reports of the same processes in two looks."""
    known = {(each.rank, each.run): each for each in before.reports}
    found = [(known.get((each.rank, each.run)), each) for each in after.reports]
    return [(old, new) for old, new in found if old is not None and new.steps >= old.steps]


def _count_steps(before: TrainingFiles, after: TrainingFiles) -> int | None:
    """Steps that were made; None if no process is in both looks, so that nothing can be compared."""
    pairs = [(old, new) for old, new in _pairs(before, after) if not new.has_ended]
    return sum(new.steps - old.steps for old, new in pairs) if pairs else None


class _Change(NamedTuple):
    """What one rank did over the looks that are kept."""

    report: RankReport
    steps: int
    step_s: float
    wait: float | None
    is_gpu: bool
    phases: dict[str, float]

    @property
    def is_of_many(self) -> bool:
        """Whether it is a rank of a distributed training, so that others wait for it."""
        return self.report.rank is not None and (self.report.world_size or 0) > 1

    @property
    def each_s(self) -> float:
        return self.step_s / self.steps


def _measure(kept: _KeptTraining, reports: Sequence[RankReport]) -> TrainingPace:
    """The pace of some of the newest reports over the looks that are kept."""
    names = frozenset((each.rank, each.run) for each in reports)
    if (known := kept.paces.get(names)) is not None:
        return known
    firsts: dict[tuple[int | None, str], RankReport] = {}
    for look in kept.looks:  # a rank may have begun after the oldest look
        for each in look.reports:
            firsts.setdefault((each.rank, each.run), each)
    compared = [_compare(firsts[each.rank, each.run], each) for each in reports]
    pace = kept.paces[names] = _sum_up(reports, [change for change in compared if change is not None])
    return pace


def _sum_up(reports: Sequence[RankReport], changes: Sequence[_Change]) -> TrainingPace:
    most = max((each for each in changes if each.wait is not None), key=lambda each: each.wait or 0.0, default=None)
    names = sorted({name for change in changes for name in change.phases})
    late = find_late(changes)
    return TrainingPace(
        ranks=len(reports),
        world_size=next((each.world_size for each in reports if each.world_size), None),
        steps=min((change.steps for change in changes), default=0),
        step_s=sum(change.each_s for change in changes) / len(changes) if changes else None,
        wait=most.wait if most is not None else None,
        waiting_rank=most.report.rank if most is not None else None,
        is_gpu=most is not None and most.is_gpu,
        phases={name: sum(each.phases.get(name, 0.0) for each in changes) / len(changes) for name in names},
        silent_s=0.0,
        late=late[0] if late is not None else "",
        late_share=late[1] if late is not None else (0.0 if sum(each.is_of_many for each in changes) > 1 else None),
        facts=_common([each.facts for each in reports]),
    )


def _compare(old: RankReport, new: RankReport) -> _Change | None:
    """None if too few steps were measured to say anything.

    A first look takes the totals: it may come after the training has begun.
    """
    if new.step_s is None:
        return None
    before = old if old is not new and new.measured - old.measured >= STEPS_MIN else RankReport(new.run, 0)
    steps = new.measured - before.measured
    step_s = new.step_s - (before.step_s or 0.0)
    if steps < STEPS_MIN or step_s <= 0.0:
        return None
    waits = _difference(new.wait_s, before.wait_s)
    wait, is_gpu = (None if waits is None else min(1.0, waits / step_s)), False
    idle, work = _difference(new.starved_s, before.starved_s), _difference(new.worked_s, before.worked_s)
    if idle is not None and work is not None and idle + work > 0.0:
        wait, is_gpu = idle / (idle + work), True
    whole_s = idle + work if is_gpu and idle is not None and work is not None else step_s
    phases = {
        name: min(1.0, max(0.0, seconds - before.phases.get(name, 0.0)) / whole_s)
        for name, seconds in new.phases.items()
    }
    return _Change(new, steps, step_s, wait, is_gpu, phases)


def _difference(new: float | None, old: float | None) -> float | None:
    return None if new is None else max(0.0, new - (old or 0.0))


def find_late(changes: Sequence[_Change]) -> tuple[str, float] | None:
    """The rank that the others wait for, as a text, and by which share of a step; None if none is late.

    Durations are compared, never clocks. In a collective operation all wait for the last one: so the culprit waits
    least inside of it. Where that phase is not placed on all ranks, it is the rank that waits longest for its data.
    """
    named = [change for change in changes if change.is_of_many]
    if len(named) < 2:
        return None
    inside = [change.phases.get("collective") for change in named]
    shares = [share for share in inside if share is not None]
    if len(shares) == len(named):
        culprit = min(named, key=lambda change: change.phases["collective"])
        others = sorted(change.phases["collective"] for change in named if change is not culprit)
        share, how = others[len(others) // 2] - culprit.phases["collective"], "waits least in the collective operations"
    else:
        waiting = [change for change in named if change.wait is not None]
        if len(waiting) < 2:
            return None
        culprit = max(waiting, key=lambda change: change.wait or 0.0)
        others = sorted(change.wait or 0.0 for change in waiting if change is not culprit)
        share, how = (culprit.wait or 0.0) - others[len(others) // 2], "waits longest for its data"
    if share < LATE_SHARE:
        return None
    late_s = share * culprit.each_s
    return f"rank {culprit.report.rank} {how}: the others wait {late_s * 1e3:.3g} ms of each step for it", share


def _common(facts: Sequence[Mapping[str, Fact]]) -> dict[str, Fact]:
    """The settings that all ranks have in common."""
    if not facts:
        return {}
    first, *others = facts
    return {name: value for name, value in first.items() if all(each.get(name) == value for each in others)}
