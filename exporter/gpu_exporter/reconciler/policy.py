"""The decision: pure, one holder at a time, unknown before idle.

A holder is judged as a whole: all of its GPUs must be idle. Whatever is missing, stale or contradictory makes the
verdict `unknown`, and nobody acts on unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_exporter.defaults import Policy
from gpu_exporter.reconciler.evidence import Evidence, HolderEvidence, HolderName, UnitEvidence

LABEL = "gpu-exporter.io/utilization"
LABELLED = ("candidate", "underused", "partial")


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy says of one holder now.

    `stage`: candidate, underused, partial (labelled), or active, starting, unknown (not labelled).
    """

    name: HolderName
    owner: str
    stage: str
    reason: str
    units: tuple[UnitEvidence, ...]
    held: int
    idle_since_wall: float | None

    @property
    def label(self) -> str:
        """The mark that this stage would leave, "" for none. Pods get a label, jobs a text in Extra."""
        if self.stage not in LABELLED:
            return ""
        if self.name.scheduler == "slurm":
            return f"Extra={LABEL}={self.stage}"
        return f"{LABEL}={self.stage}"


def decide(evidence: Evidence, policy: Policy) -> list[Decision]:
    """One decision per holder, in the order of their names."""
    return [
        _decide_holder(holder, evidence, policy) for holder in sorted(evidence.holders, key=lambda holder: holder.name)
    ]


def _decide_holder(holder: HolderEvidence, evidence: Evidence, policy: Policy) -> Decision:
    stage, reason = _judge(holder, evidence, policy)
    runs = [unit.idle_run_s for unit in holder.units if unit.idle_run_s is not None]
    since = evidence.wall - min(runs) if runs and stage in LABELLED else None
    return Decision(holder.name, holder.owner, stage, reason, holder.units, holder.held, since)


def _judge(holder: HolderEvidence, evidence: Evidence, policy: Policy) -> tuple[str, str]:
    fresh_s = max(policy.fresh_min, 4 * evidence.sample_interval_s)
    ages = [unit.sample_age_s for unit in holder.units]
    if not ages or any(age is None or not -fresh_s <= age < fresh_s for age in ages):
        return "unknown", f"no sample of the last {_minutes(fresh_s)}"
    if any(unit.idle_run_s is None for unit in holder.units):
        return "unknown", "activity has no source on this hardware"
    if any(unit.start_wall is None for unit in holder.units):
        return "unknown", "the start of the allocation is not known"
    held_s = min(evidence.wall - (unit.start_wall or 0.0) for unit in holder.units)
    if held_s < policy.startup_grace:
        return "starting", f"held for {_minutes(held_s)}, judged after {_minutes(policy.startup_grace)}"
    runs = [unit.idle_run_s or 0.0 for unit in holder.units]
    idle = sum(run >= policy.candidate_after for run in runs)
    if not idle:
        return "active", f"longest idle run {_minutes(max(runs))}, below {_minutes(policy.candidate_after)}"
    if max(runs) > held_s + fresh_s:
        return "unknown", "an idle run is longer than the allocation: two holders under one name?"
    if any(unit.coverage is None or unit.coverage < policy.coverage_min for unit in holder.units):
        known = min(unit.coverage or 0.0 for unit in holder.units)
        return "unknown", f"only {known:.0%} of the time is observed, {policy.coverage_min:.0%} is needed"
    if idle < holder.held:
        return "partial", f"{idle} of {holder.held} GPUs idle for {_minutes(policy.candidate_after)} and more"
    shortest = min(runs)
    if shortest < policy.underused_after:
        return "candidate", f"{_all(holder.held)} idle for {_minutes(shortest)}"
    if any(unit.witnesses is not None and unit.witnesses < 2 for unit in holder.units):
        return "candidate", f"idle for {_minutes(shortest)}, but utilization is the only witness"
    return "underused", f"{_all(holder.held)} idle for {_minutes(shortest)}"


def _all(held: int) -> str:
    return "its one GPU" if held == 1 else f"all {held} GPUs"


def _minutes(seconds: float) -> str:
    return f"{int(seconds / 60)} min" if seconds < 3 * 3600 else f"{seconds / 3600:.1f} h"
