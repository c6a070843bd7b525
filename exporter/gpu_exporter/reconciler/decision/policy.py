"""Decides on one holder from metrics alone. `unknown` takes precedence over idle. Pure.

A holder is judged as a whole: all of its GPUs must be idle. If evidence is missing, stale or contradictory, the stage
is `unknown` and no mark is set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.config.rules import PolicyRule
from gpu_exporter.common.model.readings import WITNESSES_MIN
from gpu_exporter.reconciler.decision.surroundings import Surroundings
from gpu_exporter.reconciler.evidence.records import Evidence, HolderEvidence, HolderName, UnitEvidence, title

LABEL = "gpu-exporter.io/utilization"
UNDERUSED = "underused"  # the stage on which other tools act
LABELLED = ("candidate", UNDERUSED, "partial")
SHARING = "sharing-candidate"  # for servers: no GPU of them is idle, but a part of a GPU may be enough
MARKED = (*LABELLED, SHARING)
NOT_RUNNING = "not_running"
OBSTACLES = {  # by the exporter's reason for a missing idle run: its meaning and remedy, where activity is unknown
    "away": "its exporter has released the driver",
    "contradiction": "two sources contradict each other, see gpu-exporter holders",
    "hidden": "its job is hidden by Slurm",
    "no_answer": "the GPU does not answer",
    "no_sample": "its activity was not measured recently",
    "no_source": "its activity was never measured: it is new, or the hardware does not report it",
    "other": "the state of its job cannot be parsed",
    "shared": "it is shared, and the owners of its active processes are not known",
    "slurmd": "its pod runs slurmd, and the job that has this GPU is not known",
    "start_unknown": "the start time of its container is not known: mount /var/log/pods into the agent",
    "unconfirmed": "its scheduler has not confirmed the holder recently",
    "undeclared": "no scheduler gave it this GPU",
}
HALTS = {  # likewise, where the holder cannot work; other reasons are states of a Slurm job
    "no_process": "no process of the pod runs: it has ended, or waits for a restart",
    "not_started": "its container has not started",
    "stopped": "all processes of the job are stopped",
}
FRESH_INTERVALS = 4  # a sample is fresh for policy.fresh_min, or this many sampling intervals where that is longer


class Windows(NamedTuple):
    """The idle time that one holder needs for each stage (seconds)."""

    candidate_s: float
    underused_s: float

    def needed_s(self, stage: str) -> float:
        """Seconds for which a holder must have been idle, and able to work, for a mark of this stage."""
        return self.underused_s if stage == UNDERUSED else self.candidate_s


class Decision(NamedTuple):
    """The decision on one holder.

    `stage`: with a mark: candidate, underused, partial, sharing-candidate. Without a mark: active, starting,
    not_running, unknown; and because of the surroundings: serving, exempt, waiting.
    `held`: units as in HolderEvidence.
    `incarnation`: the pod's UID; "" for jobs and if unknown.
    `start_wall`: when the newest of its units was allocated (Unix seconds).
    `needed_s`: how long the holder must have been idle, and able to work, for this stage (seconds).
    `active`: a fresh sample shows a unit that is not idle, even if other units are unknown.
    `observed_wall`: time of the evidence (Unix seconds).
    `users_id`: as in HolderEvidence.
    `cluster`: the Slurm cluster of the evidence; "" for pods and if unknown.
    `windows`: the windows of this holder, which its class or its owner may extend; None for the windows of the policy.
    `around`: its surroundings, once they are known.
    `exempt_by`: for stage exempt, the source of the exemption, one of EXEMPT_BY.
    `rule`: the ordered policy that decided; None if only the section `policy` applied.
    `stall`: whether its gang makes no progress: stalled, spinning (for a server), unknown, or "". `stall_why`: the
    reason in words. A stall never leads to a mark or an action.
    """

    name: HolderName
    owner: str
    stage: str
    reason: str
    units: tuple[UnitEvidence, ...]
    held: int | None
    idle_since_wall: float | None
    incarnation: str = ""
    start_wall: float | None = None
    needed_s: float = 0.0
    active: bool = False
    observed_wall: float = 0.0
    users_id: str = ""
    cluster: str = ""
    windows: Windows | None = None
    around: Surroundings | None = None
    exempt_by: str = ""
    rule: PolicyRule | None = None
    stall: str = ""
    stall_why: str = ""

    @property
    def title(self) -> str:
        """The holder's name for people."""
        return title(self.name, self.users_id)

    def is_named(self, text: str, asked: HolderName | None) -> bool:
        """Whether `text` names this holder. `asked`: the result of parse_asked for `text`."""
        if asked is not None and asked.scheduler == self.name.scheduler == "slurm":
            return asked.name in (self.name.name, self.users_id)
        return self.name == asked or text in (str(self.name), self.name.name)

    def holds(self, given: int) -> bool:
        """Whether the evidence covers all `given` GPUs of the scheduler. Replicas of one GPU count as one GPU."""
        if self.held is None:
            return False
        are_replicas = bool(self.units) and all(unit.is_shared for unit in self.units)
        return given == self.held or (given > self.held and are_replicas)

    def has_lasted(self, seconds: float) -> bool:
        """Whether the holder has been idle for at least `seconds`; false if its idle time is not known."""
        since = self.idle_since_wall
        return since is not None and self.observed_wall - since >= seconds

    @property
    def is_capped(self) -> bool:
        """Whether annotations or a policy keep the holder from rising above `candidate`."""
        by_sign = self.around is not None and bool(self.around.ceiling)
        return by_sign or (self.rule is not None and bool(self.rule.ceiling))

    @property
    def is_doubtful(self) -> bool:
        """Whether its idle runs prove too little for `underused`, however long they are."""
        return bool(_doubt(self.units))

    @property
    def underused_wall(self) -> float | None:
        """Unix seconds at which this candidate becomes underused if its GPUs stay idle.

        None for other stages, for a candidate that is capped or not proven idle, and if the time is past or unknown.
        """
        since = self.idle_since_wall
        if self.stage != "candidate" or self.is_capped or self.is_doubtful or since is None or self.windows is None:
            return None
        wall = since + self.windows.underused_s
        return wall if wall > self.observed_wall else None

    @property
    def label(self) -> str:
        """The mark for this stage; "" for no mark. Pods get a label, jobs a text in AdminComment."""
        if self.stage not in MARKED:
            return ""
        if self.name.scheduler == "slurm":
            return f"AdminComment={LABEL}={self.stage}"
        return f"{LABEL}={self.stage}"


def decide(evidence: Evidence, policy: Policy) -> list[Decision]:
    """One decision per holder from metrics alone, sorted by name."""
    return [
        decide_holder(holder, evidence.wall, policy, windows_for(holder, policy))
        for holder in sorted(evidence.holders, key=lambda holder: holder.name)
    ]


def windows_of(policy: Policy) -> Windows:
    """The windows of the policy, before any holder changes them."""
    return Windows(policy.candidate_after, policy.underused_after)


def windows_for(holder: HolderEvidence, policy: Policy) -> Windows:
    """The windows of a holder according to its metrics: it becomes underused after twice its longest idle gap, within
    the limits of the policy.
    """
    windows = windows_of(policy)
    gap_s = max((unit.longest_gap_s for unit in holder.units if math.isfinite(unit.longest_gap_s)), default=0.0)
    return windows._replace(underused_s=max(windows.underused_s, min(2 * gap_s, policy.gap_max)))


def decide_holder(holder: HolderEvidence, wall: float, policy: Policy, windows: Windows) -> Decision:
    """The decision on one holder at `wall` (Unix seconds)."""
    stage, reason = _judge(holder, wall, policy, windows)
    units = merge_units(holder.units)
    runs = [run for run in (_number(unit.idle_run_s) for unit in units) if run >= windows.candidate_s]
    since = wall - min(runs) if runs and stage in LABELLED else None
    starts = [unit.start_wall for unit in holder.units if unit.start_wall is not None]
    return Decision(
        holder.name,
        holder.owner,
        stage,
        reason,
        holder.units,
        holder.held,
        since,
        next(iter(holder.incarnations)) if len(holder.incarnations) == 1 else "",
        max(starts, default=None),
        windows.needed_s(stage),
        any(is_fresh(unit, policy) and 0 <= _number(unit.idle_run_s) < windows.candidate_s for unit in units),
        wall,
        holder.users_id,
        next(iter(holder.clusters)) if len(holder.clusters) == 1 else "",
        windows,
    )


def _judge(holder: HolderEvidence, wall: float, policy: Policy, windows: Windows) -> tuple[str, str]:
    # Every comparison is written so that a missing value or NaN fails it.
    units = merge_units(holder.units)
    if len(holder.incarnations) > 1:
        return "unknown", f"series of {len(holder.incarnations)} pods under one name"
    if len(holder.clusters) > 1:
        named = ", ".join(cluster or "a cluster without a name" for cluster in sorted(holder.clusters))
        return "unknown", f"series of {len(holder.clusters)} Slurm clusters under one job id: {named}"
    fresh_s = policy.fresh_min
    for unit in units:
        fresh_s = _fresh_s(unit, policy)
        if _number(unit.sample_age_s) < -fresh_s:
            return "unknown", f"the newest sample is {_minutes(-_number(unit.sample_age_s))} ahead: a clock is wrong"
        if not is_fresh(unit, policy):
            return "unknown", f"no sample of the last {_minutes(fresh_s)}"
    runs = [_number(unit.idle_run_s) for unit in units]
    silent = [unit for unit, run in zip(units, runs, strict=True) if not run >= 0]
    if silent:
        return _silence(silent)
    held_s = [wall - _number(unit.start_wall) for unit in units]
    if not all(math.isfinite(seconds) for seconds in held_s):
        return "unknown", "the start of the allocation is not known"
    if min(held_s) < -fresh_s:
        ahead = _minutes(-min(held_s))
        return (
            "unknown",
            f"its start is {ahead} in the future: the clock of its node was set back, or the clock of Slurm is wrong",
        )
    if not min(held_s) >= policy.startup_grace:
        grace = _minutes(policy.startup_grace)
        return "starting", f"held for {_minutes(min(held_s))}; no mark in its first {grace} (startup grace)"
    are_proven = [(unit.witnesses or 0) >= WITNESSES_MIN for unit in units]
    idle = sum(run >= windows.candidate_s for run in runs)
    if not idle:
        return "active", f"longest idle run {_minutes(max(runs))}, below {_minutes(windows.candidate_s)}"
    if max(runs) > min(held_s) + fresh_s:
        more = _minutes(max(runs) - min(held_s))
        why = "a clock was set since its start, or two holders have the same name"
        return "unknown", f"an idle run is {more} longer than the allocation: {why}"
    if holder.counts_from is not None:
        known_s = wall - holder.counts_from
        if not known_s >= windows.candidate_s:
            ended = f"ended {_minutes(known_s)} ago" if known_s > 0 else "is active"
            return (
                "unknown",
                f"idle for {_minutes(max(runs))}, but a pause of the reconciler {ended}",
            )
        runs = [min(run, known_s) for run in runs]
    coverage = [_number(unit.coverage) for unit in units]
    if not all(share >= policy.coverage_min for share in coverage):
        known = "an unknown share" if any(map(math.isnan, coverage)) else f"only {min(coverage):.0%}"
        return "unknown", f"{known} of the time is observed, {policy.coverage_min:.0%} is needed"
    if holder.held is None:
        return "unknown", "the total number of GPUs of the holder is not published"
    if len(units) != holder.held:
        return "unknown", f"{len(units)} GPUs are seen, but the holder has {holder.held}"
    if idle < holder.held:
        if not any(proven for proven, run in zip(are_proven, runs, strict=True) if run >= windows.candidate_s):
            return (
                "unknown",
                f"{idle} of {holder.held} GPUs idle for {_minutes(windows.candidate_s)} by one witness only",
            )
        return "partial", f"{idle} of {holder.held} GPUs idle for {_minutes(windows.candidate_s)} and more"
    return _judge_idle(holder.held, units, min(runs), policy, windows)


def _judge_idle(
    held: int, units: Sequence[UnitEvidence], shortest: float, policy: Policy, windows: Windows
) -> tuple[str, str]:
    """Stage and reason of a holder whose units have all been idle for at least `shortest` seconds.

    `shortest` is at least candidate_s.
    """
    if doubt := _doubt(units):
        return "candidate", f"{_all(held)} idle for {_minutes(shortest)}, but {doubt}, so it stays a candidate"
    if not shortest >= windows.underused_s:
        return "candidate", f"{_all(held)} idle for {_minutes(shortest)}"
    if shortest < policy.host_delay_max and (work := _host_work(units, policy) or _other_work(units)):
        until = _minutes(policy.host_delay_max)
        return (
            "candidate",
            f"{_all(held)} idle for {_minutes(shortest)}, but the holder {work}, so it stays a candidate until it has "
            f"been idle for {until}",
        )
    beside = f"; it {work}, so its GPUs are not taken back" if (work := _host_work(units, policy)) else ""
    return UNDERUSED, f"{_all(held)} idle for {_minutes(shortest)}{beside}"


def _doubt(units: Sequence[UnitEvidence]) -> str:
    """The reason why the idle runs prove too little for `underused`; "" if they prove enough."""
    if any(unit.witnesses is None for unit in units):
        return "its number of witnesses is not published"
    is_proven = all((unit.witnesses or 0) >= WITNESSES_MIN for unit in units)
    return "" if is_proven else "only one witness shows a part of that"


def _silence(silent: Sequence[UnitEvidence]) -> tuple[str, str]:
    """Stage and reason for units without an idle run. Either the holder cannot work now, or its activity is unknown."""
    unclear = [unit for unit in silent if unit.obstacle in OBSTACLES or not unit.obstacle]
    if unclear:
        why = OBSTACLES.get(unclear[0].obstacle, "its activity is not known")
        return "unknown", f"no idle run is published for {_places(unclear)}: {why}"
    word = silent[0].obstacle
    return NOT_RUNNING, HALTS.get(word, f"the job is {word.upper()}")


# Causes that say what a holder does while its GPUs are idle: they delay a mark as work on its host does.
WORK_ELSEWHERE = frozenset(("starting", "checkpointing", "remote_io", "steps_elsewhere"))


def _host_work(units: Sequence[UnitEvidence], policy: Policy) -> str:
    """The work of a holder on its busiest host, in words; "" if the work is below the limits or unknown."""
    cpu = max((unit.host_cpu_ratio or 0.0 for unit in units), default=0.0)
    io = max((unit.host_io_bytes_per_s or 0.0 for unit in units), default=0.0)
    if cpu > policy.host_busy_ratio:
        return f"uses {cpu:.0%} of its CPUs"
    if io > policy.host_busy_io:
        return f"moves {io / 1e6:.0f} MB/s to and from disks"
    return ""


def _other_work(units: Sequence[UnitEvidence]) -> str:
    """The work of a holder outside its GPUs, in words, from its published causes; "" if no such cause is published."""
    works = next((cause.name for unit in units for cause in unit.causes if cause.name in WORK_ELSEWHERE), "")
    return f"is busy outside its GPUs (cause {works})" if works else ""


def merge_units(units: Sequence[UnitEvidence]) -> list[UnitEvidence]:
    """One entry per GPU or MIG instance. If two reports of one unit differ, the value that makes a mark less likely
    counts.
    """
    merged: dict[tuple[str, str], UnitEvidence] = {}
    for unit in units:
        key = (unit.uuid, unit.mig)
        other = merged.get(key)
        merged[key] = unit if other is None else _more_careful(other, unit)
    return list(merged.values())


def _more_careful(a: UnitEvidence, b: UnitEvidence) -> UnitEvidence:
    def worst(pick: Callable[[float, float], float], x: float | None, y: float | None) -> float | None:
        return None if x is None or y is None or math.isnan(x) or math.isnan(y) else pick(x, y)

    return a._replace(
        start_wall=worst(max, a.start_wall, b.start_wall),
        idle_run_s=worst(min, a.idle_run_s, b.idle_run_s),
        sample_age_s=worst(max, a.sample_age_s, b.sample_age_s),
        coverage=worst(min, a.coverage, b.coverage),
        witnesses=None if a.witnesses is None or b.witnesses is None else min(a.witnesses, b.witnesses),
        sample_interval_s=min(a.sample_interval_s, b.sample_interval_s),
        host_cpu_ratio=max(a.host_cpu_ratio or 0.0, b.host_cpu_ratio or 0.0),
        host_io_bytes_per_s=max(a.host_io_bytes_per_s or 0.0, b.host_io_bytes_per_s or 0.0),
        causes=tuple(dict.fromkeys((*a.causes, *b.causes))),
        obstacle=min(filter(None, (a.obstacle, b.obstacle)), default=""),
    )


def _fresh_s(unit: UnitEvidence, policy: Policy) -> float:
    return max(policy.fresh_min, FRESH_INTERVALS * unit.sample_interval_s)


def is_fresh(unit: UnitEvidence, policy: Policy) -> bool:
    """Whether the last sample of a unit is recent enough to count."""
    fresh_s = _fresh_s(unit, policy)
    return -fresh_s <= _number(unit.sample_age_s) < fresh_s


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _places(units: Sequence[UnitEvidence]) -> str:
    first = f"{units[0].node} gpu {units[0].gpu}" + (f" mig {units[0].mig}" if units[0].mig else "")
    return first if len(units) == 1 else f"{first} and {len(units) - 1} more"


def _all(held: int) -> str:
    return "its one GPU" if held == 1 else f"all {held} GPUs"


def _minutes(seconds: float) -> str:
    if seconds < 60:
        return f"{math.floor(seconds)} s"
    return f"{math.floor(seconds / 60)} min" if seconds < 3 * 3600 else f"{seconds / 3600:.1f} h"
