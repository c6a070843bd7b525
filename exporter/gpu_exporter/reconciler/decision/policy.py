"""Decides on one holder from metrics alone. `unknown` takes precedence over idle. Pure.

A holder is judged as a whole: all of its GPUs must be idle. If evidence is missing, stale or contradictory, the stage
is `unknown`, and the holder gets no mark.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.config.rules import PolicyRule
from gpu_exporter.common.model.readings import CORE, WITNESSES_MIN
from gpu_exporter.reconciler.decision.surroundings import Surroundings
from gpu_exporter.reconciler.evidence.records import (
    WORK_ELSEWHERE,
    Evidence,
    HolderEvidence,
    HolderName,
    UnitEvidence,
    title,
)

LABEL = "gpu-exporter.io/utilization"
UNDERUSED = "underused"  # the stage on which other tools act
LABELLED = ("candidate", UNDERUSED, "partial")
SHARING = "sharing-candidate"  # for servers: no GPU of them is idle, but a part of a GPU may be enough
MARKED = (*LABELLED, SHARING)
NOT_RUNNING = "not_running"
INTERRUPTED = "interrupted"  # no unit has worked for long enough, but restarts or unknown time ended idle runs
OBSTACLES = {  # by the exporter's reason for a missing idle run: its meaning and remedy, where activity is unknown
    "away": "its exporter has released the driver",
    "contradiction": "two sources contradict each other, see gpu-exporter holders",
    "fraction": "its scheduler gave it a fraction of a GPU, and not all pods on that GPU are known",
    "hidden": "Slurm hides its job",
    "no_answer": "the GPU does not answer",
    "no_sample": "its activity was not measured recently",
    "no_source": "its activity was never measured, because the holder is new or the hardware does not report activity",
    "other": "the state of its job cannot be parsed",
    "shared": "the GPU is shared, and the owners of its active processes are not known",
    "slurmd": "its pod runs slurmd, and the job that has this GPU is not known",
    "start_unknown": "the start time of its container is not known: mount /var/log/pods into the agent",
    "unconfirmed": "its scheduler has not confirmed the holder recently",
    "unusable": "the GPU is idle, but unusable (gpu_condition), so the holder may be unable to use it",
    "undeclared": "no scheduler allocated this GPU to it",
}
HALTS = {  # likewise, where the holder cannot work; other reasons are states of a Slurm job
    "no_process": "no process of the pod runs: it has ended, or waits for a restart",
    "not_started": "its container has not started",
    "stopped": "all processes of the job are stopped",
}
# A mark remains down to this much below policy.coverage_min, and while samples are this many times older than they may
# be for a new mark: otherwise values near a limit would set and withdraw it again and again. Acts have no such slack.
COVERAGE_SLACK, AGE_SLACK = 0.05, 1.5
FRESH_INTERVALS = 4  # a sample is fresh for policy.fresh_min, or this many sampling intervals where that is longer


class Windows(NamedTuple):
    """The idle time that one holder needs for each stage (seconds).

    `cores`: a holder that uses this many CPU cores counts as working on its host, even if it has many more CPUs.
    """

    candidate_s: float
    underused_s: float
    cores: float = math.inf

    def needed_s(self, stage: str) -> float:
        """Returns how long a holder must have been idle, and able to work, for a mark of this stage (seconds)."""
        return self.underused_s if stage == UNDERUSED else self.candidate_s


class Decision(NamedTuple):
    """The decision on one holder.

    `stage`: with a mark: candidate, underused, partial, sharing-candidate. Without a mark: active, starting,
    not_running, unknown; and because of the surroundings: serving, exempt, waiting.
    `held`: how many units it holds in total, as its scheduler counts them; None if this is not known.
    `incarnation`: the pod's UID; "" for jobs and if unknown.
    `start_wall`: when the newest of its units was allocated (Unix seconds).
    `needed_s`: how long the holder must have been idle, and able to work, for this stage (seconds).
    `active`: a fresh sample shows a unit that is not idle, even if other units are unknown.
    `observed_wall`: time of the evidence (Unix seconds).
    `users_id`: for array tasks and components of heterogeneous jobs, the id that users write; "" for all others.
    `cluster`: the Slurm cluster of the evidence; "" for pods and if unknown.
    `windows`: the windows of this holder, which its class or its owner may extend; None for the windows of the policy.
    `around`: its surroundings; None until they are known.
    `exempt_by`: for stage exempt, where the exemption comes from, one of EXEMPT_BY.
    `rule`: the ordered policy that decided; None if only the section `policy` applied. `rule_why`: the values of a job
    that match this policy; without a policy, why it is unknown whether one matches; "" for neither.
    `stall`: whether its gang makes no progress: stalled, spinning (for a server), unknown, or "". `stall_why`: the
    reason in words. A stall never leads to a mark or an action.
    `kept`: why its stage is below `underused` although its GPUs were idle for long enough, in one word; "" if the stage
    itself is the reason.
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
    rule_why: str = ""
    stall: str = ""
    stall_why: str = ""
    kept: str = ""

    @property
    def title(self) -> str:
        """The holder's name for people."""
        return title(self.name, self.users_id)

    def is_named(self, text: str, asked: HolderName | None) -> bool:
        """Returns whether `text` names this holder. `asked`: the result of parse_asked for `text`."""
        if asked is not None and asked.scheduler == self.name.scheduler == "slurm":
            return asked.name in (self.name.name, self.users_id)
        return self.name == asked or text in (str(self.name), self.name.name)

    def holds(self, given: int) -> bool:
        """Returns whether the evidence covers all GPUs that the scheduler gave the holder. Replicas count as one."""
        if self.held is None:
            return False
        are_replicas = bool(self.units) and all(unit.is_shared for unit in self.units)
        return given == self.held or (given > self.held and are_replicas)

    def has_lasted(self, seconds: float) -> bool:
        """Returns whether the holder has been idle for at least `seconds`; false if its idle time is not known."""
        since = self.idle_since_wall
        return since is not None and self.observed_wall - since >= seconds

    @property
    def is_capped(self) -> bool:
        """Whether annotations or a policy keep the holder from rising above `candidate`."""
        by_sign = self.around is not None and bool(self.around.ceiling)
        return by_sign or (self.rule is not None and bool(self.rule.ceiling))

    @property
    def is_doubtful(self) -> bool:
        """Whether too few witnesses show its idle runs to prove `underused`, however long the runs are."""
        return bool(_doubt(self.units))

    @property
    def underused_wall(self) -> float | None:
        """Unix seconds at which this candidate becomes underused if its GPUs stay idle.

        None for other stages, for a capped or doubtful candidate, and if the time is past or unknown.
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
    """Returns one decision per holder from metrics alone, sorted by name."""
    return [
        decide_holder(holder, evidence.wall, policy, windows_for(holder, policy))
        for holder in sorted(evidence.holders, key=lambda holder: holder.name)
    ]


def windows_of(policy: Policy) -> Windows:
    """Returns the windows of the policy, before any holder changes them."""
    return Windows(policy.candidate_after, policy.underused_after)


def windows_for(holder: HolderEvidence, policy: Policy) -> Windows:
    """Returns the windows of a holder by its metrics: it becomes underused after twice its longest idle gap, within the
    limits of the policy.
    """
    windows = windows_of(policy)
    gap_s = max((unit.longest_gap_s for unit in holder.units if math.isfinite(unit.longest_gap_s)), default=0.0)
    return windows._replace(underused_s=max(windows.underused_s, min(2 * gap_s, policy.gap_max)))


def decide_holder(holder: HolderEvidence, wall: float, policy: Policy, windows: Windows) -> Decision:
    """Returns the decision on one holder at `wall` (Unix seconds)."""
    stage, reason = _judge(holder, wall, policy, windows)
    is_held = False
    if holder.mark not in ("", UNDERUSED, stage) and stage in LABELLED:  # the slack of a mark keeps it, and sets none
        strict, why = _judge(holder._replace(mark=""), wall, policy, windows)
        if is_held := strict != stage == UNDERUSED and holder.mark == "candidate":
            stage, reason = "candidate", f"{reason}, but {why}, so it stays a candidate"
        else:
            stage, reason = strict, why
    units = merge_units(holder.units)
    runs = [run for run in (_number(unit.idle_run_s) for unit in units) if run >= windows.candidate_s]
    since = wall - min(runs) if runs and stage in LABELLED else None
    starts = [unit.start_wall for unit in holder.units if unit.start_wall is not None]
    kept = ""
    if stage == "candidate" and min(runs) >= windows.underused_s:
        known_s = math.inf if holder.counts_from is None else wall - holder.counts_from
        kept = (
            "unknown"
            if is_held
            else "doubtful"
            if _doubt(units)
            else "paused"
            if known_s < windows.underused_s
            else "host_work"
        )
    elif stage in (*LABELLED, "active", NOT_RUNNING) and stage != UNDERUSED and _is_quiet(units, policy, windows):
        kept = INTERRUPTED
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
        any(is_fresh(unit, policy) and 0 <= _number(unit.idle_run_s) < windows.candidate_s for unit in holder.units),
        wall,
        holder.users_id,
        next(iter(holder.clusters)) if len(holder.clusters) == 1 else "",
        windows,
        kept=kept,
    )


def _judge(holder: HolderEvidence, wall: float, policy: Policy, windows: Windows) -> tuple[str, str]:
    # Every comparison is written so that a missing value or NaN fails it.
    units = merge_units(holder.units)
    if len(holder.incarnations) > 1:
        return "unknown", f"{len(holder.incarnations)} pods have series under this name"
    if len(holder.clusters) > 1:
        named = ", ".join(cluster or "a cluster without a name" for cluster in sorted(holder.clusters))
        return "unknown", f"jobs of {len(holder.clusters)} Slurm clusters have this id: {named}"
    for unit in holder.units:  # each report: of two, the older one would hide a time in the future
        if _number(unit.sample_age_s) < -_fresh_s(unit, policy):
            return (
                "unknown",
                f"the newest sample is {_minutes(-_number(unit.sample_age_s))} in the future: a clock is wrong",
            )
    fresh_s = policy.fresh_min
    for unit in units:
        fresh_s = _fresh_s(unit, policy) * (AGE_SLACK if holder.mark else 1.0)
        if not _number(unit.sample_age_s) < fresh_s:
            return "unknown", f"no sample in the last {_minutes(fresh_s)}"
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
        return "starting", f"held for {_minutes(min(held_s))}; it gets no mark in its first {grace} (startup grace)"
    are_proven = [(unit.witnesses or 0) >= WITNESSES_MIN for unit in units]
    idle = sum(run >= windows.candidate_s for run in runs)
    if not idle:
        return "active", f"longest idle run {_minutes(max(runs))}, below {_minutes(windows.candidate_s)}"
    if max(runs) > min(held_s) + fresh_s:
        more = _minutes(max(runs) - min(held_s))
        why = "a clock was changed, or two holders have the same name"
        return "unknown", f"its idle run is {more} longer than its allocation: {why}"
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
    least = policy.coverage_min - COVERAGE_SLACK * bool(holder.mark)
    if not all(share >= least for share in coverage):
        known = "an unknown part" if any(map(math.isnan, coverage)) else f"only {min(coverage):.0%}"
        return "unknown", f"{known} of the time was observed; the policy requires {policy.coverage_min:.0%}"
    if holder.held is None:
        return "unknown", "the number of GPUs of the holder is unknown"
    if len(units) != holder.held:
        return "unknown", f"exporters report {len(units)} GPUs for the holder, but its scheduler reports {holder.held}"
    if idle < holder.held:
        if not any(proven for proven, run in zip(are_proven, runs, strict=True) if run >= windows.candidate_s):
            return (
                "unknown",
                f"{idle} of {holder.held} GPUs idle for {_minutes(windows.candidate_s)}, but only one witness shows it",
            )
        return "partial", f"{idle} of {holder.held} GPUs idle for {_minutes(windows.candidate_s)} and more"
    return _judge_idle(holder.held, units, min(runs), policy, windows)


def _judge_idle(
    held: int, units: Sequence[UnitEvidence], shortest: float, policy: Policy, windows: Windows
) -> tuple[str, str]:
    """Stage and reason of a holder whose units have all been idle for at least `shortest` seconds.

    `shortest` is at least candidate_s.
    """
    work = _host_work(units, policy, windows.cores)
    if doubt := _doubt(units):
        return "candidate", f"{_all(held)} idle for {_minutes(shortest)}, but {doubt}, so it stays a candidate"
    if not shortest >= windows.underused_s:
        return "candidate", f"{_all(held)} idle for {_minutes(shortest)}{_name_cores(units)}"
    if shortest < policy.host_delay_max and (
        works := work or _other_work(units) or _past_work(units, shortest, windows)
    ):
        until = _minutes(policy.host_delay_max)
        return (
            "candidate",
            f"{_all(held)} idle for {_minutes(shortest)}, but the holder {works}, so it stays a candidate until it has "
            f"been idle for {until}",
        )
    beside = f"; the holder {work}, so the reconciler takes none of its GPUs back" if work else _name_cores(units)
    return UNDERUSED, f"{_all(held)} idle for {_minutes(shortest)}{beside}"


def _is_quiet(units: Sequence[UnitEvidence], policy: Policy, windows: Windows) -> bool:
    """Returns whether no unit has worked for long enough, although the idle runs are short.

    A container that restarts more often than its windows ends each of its idle runs.
    """
    return bool(units) and all(
        _number(unit.quiet_s) >= windows.underused_s and _number(unit.coverage) >= policy.coverage_min for unit in units
    )


def _doubt(units: Sequence[UnitEvidence]) -> str:
    """Returns the reason why the idle runs prove too little for `underused`; "" if they prove enough."""
    if any(unit.witnesses is None for unit in units):
        return "the number of its witnesses is unknown"
    is_proven = all((unit.witnesses or 0) >= WITNESSES_MIN for unit in units)
    return "" if is_proven else "only one witness shows it for a part of this time"


def _silence(silent: Sequence[UnitEvidence]) -> tuple[str, str]:
    """Stage and reason for units without an idle run. Either the holder cannot work now, or its activity is unknown."""
    unclear = [unit for unit in silent if unit.obstacle in OBSTACLES or not unit.obstacle]
    if unclear:
        why = OBSTACLES.get(unclear[0].obstacle, "its activity is not known")
        return "unknown", f"the idle time of {_places(unclear)} is unknown: {why}"
    word = silent[0].obstacle
    return NOT_RUNNING, HALTS.get(word, f"the job is {word.upper()}")


HOST_HOLD_S = 1800.0  # work on the host counts for this time after it was seen; readings are means of ten minutes


def _host_work(units: Sequence[UnitEvidence], policy: Policy, cores_min: float) -> str:
    """Returns the work of a holder on its busiest host, in words; "" if the work is below the limits or unknown.

    `cores_min`: a holder that uses this many CPU cores counts as working.
    """
    cpu = max((unit.host_cpu_ratio or 0.0 for unit in units), default=0.0)
    cores, said = _host_cores(units)
    io = max((unit.host_io_bytes_per_s or 0.0 for unit in units), default=0.0)
    if cpu > policy.host_busy_ratio or cores >= cores_min:
        return said or f"uses {cpu:.0%} of its CPUs"
    if io > policy.host_busy_io:
        return f"moves {io / 1e6:.0f} MB/s to and from disks"
    return ""


def _host_cores(units: Sequence[UnitEvidence]) -> tuple[float, str]:
    """Returns the CPU cores that a holder uses on the host where it uses most, as a number and in words; 0 and "" if it
    uses less than CORE.
    """
    cores, cpus = max(((unit.host_cores or 0.0, unit.host_cpus or 0.0) for unit in units), default=(0.0, 0.0))
    return (cores, describe_cores(cores, cpus)) if cores >= CORE else (0.0, "")


def describe_cores(cores: float, cpus: float) -> str:
    """Returns the CPU cores that a holder uses, in words. `cpus`: the number of its CPUs, 0 if unknown."""
    return f"uses {cores:.1f} of its {cpus:.3g} CPU cores" if cpus else f"uses {cores:.1f} CPU cores"


def _name_cores(units: Sequence[UnitEvidence]) -> str:
    """Names CPU cores that change nothing: "" without them."""
    said = _host_cores(units)[1]
    return f"; the holder {said}" if said else ""


def _other_work(units: Sequence[UnitEvidence]) -> str:
    """Returns the work of a holder outside its GPUs, in words, from its published causes; "" without such a cause."""
    works = next((cause.name for unit in units for cause in unit.causes if cause.name in WORK_ELSEWHERE), "")
    return f"is busy outside its GPUs (cause {works})" if works else ""


def _past_work(units: Sequence[UnitEvidence], shortest: float, windows: Windows) -> str:
    """Returns the last work of a holder outside its GPUs, in words; "" if it no longer counts.

    Work counts for HOST_HOLD_S. Work that was seen when the GPUs had been idle for long enough counts for as long as
    these stay idle: otherwise a load near the limit would set and withdraw the mark again and again.
    """
    found = [unit.host_work_age_s for unit in units]
    found += [unit.cores_age_s for unit in units] if math.isfinite(windows.cores) else []
    ages = [age for age in found if age is not None]
    counts_s = max(HOST_HOLD_S, shortest - windows.underused_s)
    return f"worked outside its GPUs {_minutes(max(0.0, min(ages)))} ago" if ages and min(ages) < counts_s else ""


def merge_units(units: Sequence[UnitEvidence]) -> list[UnitEvidence]:
    """Returns one entry per GPU or MIG instance. If two reports of one unit differ, the value that makes a mark less
    likely counts.
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
        host_cores=max(a.host_cores or 0.0, b.host_cores or 0.0),
        host_cpus=max(a.host_cpus or 0.0, b.host_cpus or 0.0),
        quiet_s=worst(min, a.quiet_s, b.quiet_s),
        host_work_age_s=_least(a.host_work_age_s, b.host_work_age_s),
        cores_age_s=_least(a.cores_age_s, b.cores_age_s),
        causes=tuple(dict.fromkeys((*a.causes, *b.causes))),
        obstacle=min(filter(None, (a.obstacle, b.obstacle)), default=""),
    )


def _least(*ages: float | None) -> float | None:
    return min((age for age in ages if age is not None), default=None)


def _fresh_s(unit: UnitEvidence, policy: Policy) -> float:
    return max(policy.fresh_min, FRESH_INTERVALS * unit.sample_interval_s)


def is_fresh(unit: UnitEvidence, policy: Policy) -> bool:
    """Returns whether the last sample of a unit is recent enough to count."""
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
