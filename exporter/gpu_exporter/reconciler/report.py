"""Renders decisions: the table, the explanation of one holder, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.durations import format_duration
from gpu_exporter.common.plain import layout, one_line, utc
from gpu_exporter.reconciler.decision.policy import (
    LABELLED,
    NOT_RUNNING,
    SHARING,
    UNDERUSED,
    Decision,
    windows_of,
)
from gpu_exporter.reconciler.decision.spared import SPARED, find_exits
from gpu_exporter.reconciler.evidence.records import (
    Evidence,
    HolderName,
    OtherActivity,
    PublishedCause,
    UnitEvidence,
    UnitUse,
    UseOfUnits,
)
from gpu_exporter.reconciler.headline import NO_USE, causes_of, headline
from gpu_exporter.reconciler.marks import EXEMPT_UNTIL
from gpu_exporter.reconciler.preview import Outlook

GIB = 2**30
NOBODY: Mapping[str, float] = {}
HEADER = ("HOLDER", "OWNER", "GPUS", "STAGE", "IDLE SINCE", "REASON", "WOULD WRITE")


def render_decisions(
    decisions: Sequence[Decision], evidence: Evidence, outlooks: Mapping[HolderName, Outlook] | None = None
) -> str:
    """Renders one line per holder, marked holders first, then the numbers of exporters and allocations."""
    outlooks = outlooks or {}
    seen = f"{_count(evidence.exporters, 'exporter')} and {_count(evidence.allocations, 'allocation')} seen"
    if evidence.hidden:
        verb = "is" if evidence.hidden == 1 else "are"
        seen += f"; {_count(evidence.hidden, 'GPU')} {verb} held by jobs that Slurm hides"
    if not decisions:
        return f"{seen}; no holder has been idle for long enough\n"
    order = {stage: place for place, stage in enumerate((UNDERUSED, "candidate", "partial", SHARING, "unknown"))}
    rows = [
        (
            decision.title,
            decision.owner or "-",
            f"{len(decision.units)}/{decision.held or '?'}",
            decision.stage,
            format_time(decision.idle_since_wall),
            decision.reason,
            _written(decision, outlooks),
        )
        for decision in sorted(decisions, key=lambda d: (order.get(d.stage, len(order)), d.name))
    ]
    return "\n".join([*layout(HEADER, rows), seen]) + "\n"


def _written(decision: Decision, outlooks: Mapping[HolderName, Outlook]) -> str:
    """Returns the mark that --apply would write, or the reason why it would refuse."""
    outlook = outlooks.get(decision.name)
    if outlook is None:
        return decision.label or "-"
    return f"REFUSED: {outlook.refused}" if outlook.refused else outlook.label


def explain(
    decision: Decision,
    policy: Policy,
    outlook: Outlook | None = None,
    other: OtherActivity | None = None,
    other_s: float = 0.0,
    action: str = "",
    use: UseOfUnits = NO_USE,
    waiting: Mapping[str, float] = NOBODY,
) -> str:
    """Explains one holder. The first line shows the use of its GPUs, the cause, and the change to make. The next lines
    show its stage, the numbers behind the stage, and the limits of the policy.

    `action`: the action that may follow, from what_may_follow. `use`: the use of its GPUs. `other`: the witnesses that
    kept its GPUs from being idle in the last `other_s` seconds. `waiting`: by pool of its GPUs, the number of GPUs that
    others wait for.
    """
    policy = decision.rule.over(policy) if decision.rule is not None else policy
    windows = decision.windows or windows_of(policy)
    known = {unit: causes_of(decision, unit, use) for unit in decision.units}
    certain = [each for unit, causes in known.items() if (unit.uuid, unit.mig) in use for each in causes]
    known_of_it = headline(decision, use, certain)
    stage = f"stage {decision.stage}: {decision.reason}"
    lines = [
        f"{decision.title}{f' of {decision.owner}' if decision.owner else ''}: {known_of_it or stage}",
        *([f"  {stage}"] if known_of_it else []),
        *(
            f"  pods or jobs wait for {number:.0f} GPU{'s' * (number > 1)} of its pool {pool}"
            for pool, number in sorted(waiting.items())
            if number >= 1.0
        ),
        f"  {_policy_of(decision)}: candidate after {format_duration(windows.candidate_s)}, underused after "
        f"{format_duration(windows.underused_s)}, coverage at least {policy.coverage_min:.0%}, "
        f"grace {format_duration(policy.startup_grace)}",
        *_explain_surroundings(decision),
    ]
    if following := _what_is_next(decision._replace(windows=windows)):
        lines.append(f"  next: {following}")
    if spared := _why_spared(decision, outlook):
        lines.append(f"  spared: idle for long enough, but it keeps its GPUs: {spared} (docs/reconciler.md)")
    if decision.stall_why:
        lines.append(f"  {decision.stall or 'not stalled'}: {decision.stall_why}")
    if action:
        lines.append(f"  action: {action}")
    said: set[PublishedCause] = set()
    for unit in decision.units:
        place = f"{unit.node} gpu {unit.gpu}" + (f" mig {unit.mig}" if unit.mig else "")
        lines.append(
            f"  {place} ({unit.uuid}): idle run {_number(unit.idle_run_s, 's')}, "
            f"held since {format_time(unit.start_wall)}, coverage {_share(unit.coverage)}, "
            f"sample age {_number(unit.sample_age_s, 's')}, witnesses {_number(unit.witnesses)}"
        )
        did = use.get((unit.uuid, unit.mig))
        if did is not None and did.peak is not None and did.memory:
            lines.append(f"    memory: at most {did.peak / GIB:.1f} of {did.memory / GIB:.1f} GiB in use {did.over}")
        lines += _explain_causes(known[unit], said)
        seen = (other or {}).get((unit.uuid, unit.mig), {})
        if seen:
            parts = [
                f"{witness} {seconds:.0f} s" for witness, seconds in sorted(seen.items(), key=lambda each: -each[1])
            ]
            lines.append(
                f"    utilization 0, but other activity in the last {format_duration(other_s)}, by witness: "
                f"{', '.join(parts)}"
            )
    if outlook is not None and outlook.refused:
        lines.append(f"  REFUSED: {outlook.refused}: {outlook.why}")
        lines.append(f"  would otherwise write: {outlook.label}")
    elif decision.label:
        lines.append(f"  would write: {outlook.label if outlook is not None else decision.label}")
    return "".join(f"{one_line(line)}\n" for line in lines)


def _policy_of(decision: Decision) -> str:
    named = f"policy {decision.rule.name}" if decision.rule is not None else "policy"
    return f"{named} ({decision.rule_why})" if decision.rule_why else named


def _why_spared(decision: Decision, outlook: Outlook | None) -> str:
    """Why the GPUs of a holder stay with it although they were idle for long enough, in one word; "" for any other
    holder. Does not know the reasons against an action.
    """
    refused = {decision.name: outlook.refused} if outlook is not None else {}
    exits = find_exits([decision], {decision.name: decision.stage}, refused)
    return next((each.reason for each in exits if each.way == SPARED), "")


def _explain_causes(causes: Sequence[PublishedCause], said: set[PublishedCause]) -> Iterator[str]:
    """Returns the causes of one unit with their numbers, the evidence against them, and the advice. Each text appears
    once per holder.
    """
    for cause in causes:
        known = cause in said
        yield f"    cause: {cause.name}, confidence {cause.confidence}{': as above' if known else ''}" + (
            f": {cause.evidence}" if cause.evidence and not known else ""
        )
        if not known:
            said.add(cause)
            parts = {"against it": cause.against, "to change": cause.advice, "gain": cause.gain}
            yield from (f"      {name}: {text}" for name, text in parts.items() if text)


def _what_is_next(decision: Decision) -> str:
    """Returns the event that would change the stage; "" if the reason already contains it."""
    if decision.stage == "candidate" and decision.is_capped:
        return "it stays a candidate; any work ends the mark"
    if decision.underused_wall is not None:
        when = format_time(decision.underused_wall)
        return f"underused at {when}, if its GPUs stay idle and its host does no work; work on a GPU ends the mark"
    if decision.stage == UNDERUSED:
        return "any work ends the mark within one cycle"
    if decision.stage == "active" and decision.rule is not None and decision.rule.exempt:
        return f"no mark, because policy {decision.rule.name} exempts it: {decision.rule.exempt}"
    if decision.stage == "active" and decision.windows is not None:
        return f"candidate after {format_duration(decision.windows.candidate_s)} without any work"
    if decision.stage == SHARING:
        return "this is only a hint; a MIG instance or a shared GPU may be enough, if it has enough memory"
    if decision.stage == NOT_RUNNING:
        return "when it runs again, its idle time restarts at zero"
    return ""


def _explain_surroundings(decision: Decision) -> list[str]:
    """Lines about the holder's class and group, and how its owner can keep the GPUs."""
    around = decision.around
    if around is None:
        return []
    taken_from = f", by {around.kind_why}" if around.kind_why else ""
    group = f"; part of {around.group}" if around.group else ""
    members = f", {len(around.members)} members with GPUs" if around.members else ""
    tenant = f"; tenant {around.tenant}" if around.tenant else ""
    lines = [f"  class {around.kind}{taken_from}{group}{members}{tenant}"]
    if decision.stage in LABELLED:
        wish = "gpu-keep=4h in its Comment" if decision.name.scheduler == "slurm" else f"the annotation {EXEMPT_UNTIL}"
        lines.append(f"  to keep its GPUs: {wish} (docs/reconciler.md, Keeping idle GPUs)")
    return lines


def decisions_json(
    decisions: Sequence[Decision],
    evidence: Evidence,
    outlooks: Mapping[HolderName, Outlook] | None = None,
    uses: Mapping[HolderName, UseOfUnits] | None = None,
) -> str:
    """Renders JSON for scripts: the number of exporters and allocations, and one object per holder.

    `refused` is null where it is unknown whether --apply would refuse the mark. `uses`: the use of each holder's GPUs;
    each holder then has one object per GPU or MIG instance, with its causes.
    """
    outlooks = outlooks or {}
    holders = [
        {
            "scheduler": d.name.scheduler,
            "namespace": d.name.namespace,
            "name": d.name.name,
            "job": d.users_id or (d.name.name if d.name.scheduler == "slurm" else ""),
            "slurm_cluster": d.cluster,
            "owner": d.owner,
            "stage": d.stage,
            "stall": d.stall,
            "stall_reason": d.stall_why,
            "reason": d.reason,
            "label": outlooks[d.name].label if d.name in outlooks else d.label,
            "refused": outlooks[d.name].refused if d.name in outlooks and outlooks[d.name].checked else None,
            "spared": _why_spared(d, outlooks.get(d.name)),
            "idle_since_timestamp_seconds": d.idle_since_wall,
            "gpus_seen": len(d.units),
            "gpus_held": d.held,
            **(
                {"units": [_unit_json(d, unit, uses.get(d.name, NO_USE)) for unit in d.units]}
                if uses is not None
                else {}
            ),
        }
        for d in decisions
    ]
    seen = {"exporters": evidence.exporters, "allocations": evidence.allocations, "gpus_hidden": evidence.hidden}
    return json.dumps({**seen, "holders": holders}, indent=1) + "\n"


def _unit_json(decision: Decision, unit: UnitEvidence, use: UseOfUnits) -> dict[str, Any]:
    did = use.get((unit.uuid, unit.mig), UnitUse())
    return {
        "node": unit.node,
        "gpu": unit.gpu,
        "mig": unit.mig,
        "uuid": unit.uuid,
        "state": did.state,
        "utilization_ratio": did.now,
        "mean_utilization_ratio": did.mean,
        "memory_peak_bytes": did.peak,
        "idle_run_seconds": unit.idle_run_s,
        "causes": [cause._asdict() for cause in causes_of(decision, unit, use)],
    }


def format_time(wall: float | None) -> str:
    """UTC to the second; `-` if the time is unknown."""
    if wall is None:
        return "-"
    return utc(wall).strftime("%Y-%m-%d %H:%M:%SZ")


def _number(value: float | None, unit: str = "") -> str:
    return "unknown" if value is None else f"{value:.0f} {unit}".rstrip()


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0%}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
