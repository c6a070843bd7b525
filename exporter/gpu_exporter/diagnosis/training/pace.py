"""Turns the reports of training loops into counters and shares for each allocation.

A report is only the job's claim, published with the job's own labels. A report never makes a GPU count as used, and
never prevents a mark by itself (docs/torch.md). A report counts for a GPU only if the holder has that GPU.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from gpu_exporter.common.model.holders import Allocation, Who, identify
from gpu_exporter.common.model.training import Fact, RankReport, TrainingPace, TrainingView
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.report_rules import WINDOW_S, RankTime, SpentTime, find_late
from gpu_exporter.diagnosis.training.files import TrainingFiles

ProcessKey: TypeAlias = "tuple[int | None, str]"
"""Rank and run of a process."""
KEEP_S = WINDOW_S
PROCESSES_MAX = 128  # of one holder on one node whose last counters are kept
GROUPS_MAX = 32  # sets of GPUs that the ranks of one holder name: a node has at most 16 GPUs
LOOKS_MAX = 41  # one every 15 s
REPORTS_MAX = 2560  # of all looks at all holders: 56 holders with a rank each, or a hostile one's 4 kB in 10 MB
CONTRADICTION_S = 1800.0  # this long without any work of the GPU, while steps go on


class TrainingSteps(NamedTuple):
    """Steps of a holder's training loop between two readings. `steps`: the sum of its ranks, None if unknown."""

    start: float
    end: float
    steps: int | None


class _Booked:
    """Totals of all ranks on one set of GPUs since the exporter first saw them, including ranks that have ended."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds: dict[str, float] = {}

    def add(self, new: _ProcessTotals, old: _ProcessTotals | None) -> None:
        """Adds the increase of a process's counters since `old`. A counter that fell adds nothing."""
        self.steps += max(0, new.steps - (old.steps if old is not None else 0))
        before = old.seconds if old is not None else {}
        for name, value in new.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + max(0.0, value - before.get(name, 0.0))


class _ProcessTotals(NamedTuple):
    steps: int
    seconds: Mapping[str, float]


class _KeptTraining:
    """The readings (`looks`) of one holder's reports, oldest first.

    `stepped`: when the exporter last saw a new step (monotonic seconds). `booked`: totals for each set of GPUs that
    ranks report.
    """

    def __init__(self, files: TrainingFiles, watched_s: float) -> None:
        """`watched_s`: how long the exporter has run. For a process that may be older, only new steps count."""
        self.looks = deque([files], maxlen=LOOKS_MAX)
        self.booked: dict[tuple[str, ...], _Booked] = {}
        # By process, kept even if its file is missing for a while.
        self._last: dict[ProcessKey, _ProcessTotals] = {}
        for each in files.reports:
            if each.step_s is None or each.step_s > watched_s:
                self._last[_key(each)] = _ProcessTotals(each.steps, _seconds_of(each))
            self.book(each)
        self.paces: dict[frozenset[ProcessKey], TrainingPace] = {}  # of this look, by ranks and runs
        self.stepped = files.monotonic - min(each.age_s for each in files.reports)

    def book(self, new: RankReport) -> None:
        """Adds the new steps and seconds of one process.

        Counts only the first GROUPS_MAX sets of GPUs. Above PROCESSES_MAX processes, forgets the process with the
        oldest report.
        """
        if new.gpus not in self.booked and len(self.booked) >= GROUPS_MAX:
            return
        key, counters = _key(new), _ProcessTotals(new.steps, _seconds_of(new))
        self.booked.setdefault(new.gpus, _Booked()).add(counters, self._last.pop(key, None))
        self._last[key] = counters
        if len(self._last) > PROCESSES_MAX:
            del self._last[next(iter(self._last))]


class NodeTraining:
    """The training reports of a node's holders. Not thread-safe: NodeDiagnosis holds its lock during each call."""

    def __init__(self) -> None:
        self._kept: dict[Who, _KeptTraining] = {}
        self._since = math.inf  # monotonic; of the first poll or look

    def note(self, who: Who, files: TrainingFiles) -> TrainingSteps | None:
        """Keeps one reading of the reports. Returns the steps since the last reading, None at the first one."""
        kept = self._kept.get(who)
        self._since = min(self._since, files.monotonic)
        if kept is None:
            self._kept[who] = _KeptTraining(files, files.monotonic - self._since)
            return None
        last = kept.looks[-1]
        known = {_key(each): each for each in last.reports}
        for each in files.reports:
            kept.book(each)
        steps = _count_steps(known, files)
        if steps or any(_key(each) not in known and not each.has_ended for each in files.reports):
            kept.stepped = files.monotonic
        kept.looks.append(files)
        kept.paces = {}
        while len(kept.looks) > 2 and files.monotonic - kept.looks[1].monotonic >= KEEP_S:
            kept.looks.popleft()
        share = REPORTS_MAX // len(self._kept)
        while len(kept.looks) > 2 and sum(len(look.reports) for look in kept.looks) > share:
            kept.looks.popleft()  # many ranks, or many holders: shorter windows
        return TrainingSteps(last.monotonic, files.monotonic, steps)

    def keep(self, present: Iterable[Allocation], now: float) -> None:
        """Forgets holders that have left, and holders without files for a while."""
        self._since = min(self._since, now)
        whos = {identify(allocation.holder) for allocation in present}
        self._kept = {
            who: kept for who, kept in self._kept.items() if who in whos and now - kept.looks[-1].monotonic <= KEEP_S
        }

    @property
    def is_used(self) -> bool:
        """Whether the training of any holder is known."""
        return bool(self._kept)

    def view(
        self, who: Who | None, unit: UnitId, own: Sequence[UnitId], now: float, idle_run_s: float | None
    ) -> TrainingView | None:
        """Returns the values to publish for one allocation. None if no rank of the holder is known to use the unit.

        `own`: all units of the holder on this node. `idle_run_s`: seconds since the GPU last worked, None if unknown.
        """
        kept = self._kept.get(who) if who is not None else None
        if kept is None:
            return None
        ranks = [each for each in kept.looks[-1].reports if _is_on(each.gpus, unit, own)]
        if not ranks:
            return None
        booked = [each for gpus, each in kept.booked.items() if _is_on(gpus, unit, own)]
        names = {name for each in booked for name in each.seconds}
        own_pace = _measure(kept, ranks)
        pace = _measure(kept, kept.looks[-1].reports)._replace(silent_s=max(0.0, now - kept.stepped))
        return TrainingView(
            steps=sum(each.steps for each in booked),
            seconds={name: sum(each.seconds.get(name, 0.0) for each in booked) for name in sorted(names)},
            rank=min((each.rank for each in ranks if each.rank is not None), default=None),
            step_s=own_pace.step_s,
            pace=pace,
            contradiction=_contradict(own_pace._replace(silent_s=pace.silent_s), idle_run_s),
        )


def _contradict(pace: TrainingPace, idle_run_s: float | None) -> str:
    if idle_run_s is None or idle_run_s < CONTRADICTION_S or not pace.seen or pace.silent_s > KEEP_S:
        return ""
    return (
        f"its training reports steps, but this GPU has done nothing for {idle_run_s / 60:.0f} min: the loop "
        "uses another device, or the report is wrong"
    )


def _is_on(gpus: Sequence[str], unit: UnitId, own: Sequence[UnitId]) -> bool:
    """Whether a rank that reports these GPUs uses the unit. A rank that reports no GPU uses its holder's only unit.

    The hook in the training cannot distinguish the UUID of a MIG instance from that of its board. So prefixes are
    ignored, and a board's UUID means the instance if the holder has no other unit.
    """
    if not gpus:
        return len(own) == 1
    named = {_bare(each) for each in gpus}
    return _bare(unit.mig_uuid or unit.uuid) in named or (len(own) == 1 and _bare(unit.uuid) in named)


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def _key(report: RankReport) -> ProcessKey:
    return report.rank, report.run


def _seconds_of(report: RankReport) -> dict[str, float]:
    found = {"step": report.step_s, "wait": report.wait_s, **report.phases}
    return {name: value for name, value in found.items() if value is not None}


def _count_steps(known: Mapping[ProcessKey, RankReport], files: TrainingFiles) -> int | None:
    """The steps since the earlier reports `known`. None if nothing can be compared.

    A process does not write a report if it has made no step. So a process counts as making no steps only after its next
    report was due, and never while it is between two passes over its data.
    """
    pairs = [(known.get(_key(each)), each) for each in files.reports if not each.has_ended]
    found = [
        new.steps - old.steps
        for old, new in pairs
        if old is not None
        and (new.steps > old.steps or (new.steps == old.steps and new.age_s > new.interval_s and not new.is_between))
    ]
    return sum(found) if found else None


def _measure(kept: _KeptTraining, reports: Sequence[RankReport]) -> TrainingPace:
    """The pace over the kept readings, from the newest `reports` of processes that still run."""
    alive = [each for each in reports if not each.has_ended and each.age_s <= KEEP_S + each.interval_s]
    names = frozenset(map(_key, alive))
    if (known := kept.paces.get(names)) is not None:
        return known
    firsts: dict[ProcessKey, tuple[int, RankReport]] = {}
    for number, look in enumerate(kept.looks):  # a rank may have begun after the oldest look
        for each in look.reports:
            firsts.setdefault(_key(each), (number, each))
    ranks: dict[tuple[int | None, str], RankTime] = {}
    for each in alive:
        number, first = firsts[_key(each)]
        # With one look, or for a process that began after the oldest look, only its totals are known.
        is_whole = len(kept.looks) == 1 or number > 0
        spent = _compare(RankReport(each.run, 0) if is_whole else first, each)
        if spent is None:
            continue
        process = (each.rank, each.process or each.run)
        if (other := ranks.get(process)) is not None:  # such as its evaluation, which runs while the training does not
            spent = other.spent.add(spent)
        ranks[process] = RankTime(each.rank, each.world_size, spent)
    seen = sum(max(0, each.steps - firsts[_key(each)][1].steps) for each in alive)
    pace = kept.paces[names] = _sum_up(alive, list(ranks.values()))._replace(seen=seen)
    return pace


def _sum_up(reports: Sequence[RankReport], ranks: Sequence[RankTime]) -> TrainingPace:
    known = [each for each in ranks if each.spent.wait is not None]
    most = max(known, key=lambda each: each.spent.wait or 0.0, default=None)
    shares = [each.spent.phases for each in ranks]
    late = find_late(ranks)
    by_phase = {name: [each[name] for each in shares if name in each] for name in sorted(set().union(*shares))}
    return TrainingPace(
        ranks=len(reports),
        world_size=next((each.world_size for each in reports if each.world_size), None),
        steps=min((each.spent.steps for each in ranks), default=0),
        step_s=sum(each.spent.each_s for each in ranks) / len(ranks) if ranks else None,
        wait=most.spent.wait if most is not None else None,
        waiting_rank=most.rank if most is not None else None,
        is_gpu=most is not None and most.spent.is_gpu,
        phases={name: sum(found) / len(found) for name, found in by_phase.items()},
        silent_s=0.0,
        late=late.text if late is not None else "",
        late_share=late.share if late is not None else None,
        facts=_common([each.facts for each in reports]),
    )


def _compare(before: RankReport, new: RankReport) -> SpentTime | None:
    """The time that a process spent in its steps since its report `before`. None if too few steps were measured."""
    if new.step_s is None:
        return None
    spent = SpentTime(
        new.measured - before.measured,
        new.step_s - (before.step_s or 0.0),
        _difference(new.wait_s, before.wait_s),
        _difference(new.starved_s, before.starved_s),
        _difference(new.worked_s, before.worked_s),
        {name: max(0.0, seconds - before.phases.get(name, 0.0)) for name, seconds in new.phases.items()},
    )
    return spent if spent.is_enough else None


def _difference(new: float | None, old: float | None) -> float | None:
    return None if new is None else max(0.0, new - (old or 0.0))


def _common(facts: Sequence[Mapping[str, Fact]]) -> dict[str, Fact]:
    if not facts:
        return {}
    first, *others = facts
    return {name: value for name, value in first.items() if all(each.get(name) == value for each in others)}
