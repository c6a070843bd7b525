"""`explain`: why one holder has its stage, now or at a time in the past, and what became of its marks."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from gpu_exporter.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.defaults import Actions
from gpu_exporter.exits import Exit
from gpu_exporter.reconciler.actions.propose import what_may_follow
from gpu_exporter.reconciler.audit import describe, read_transitions
from gpu_exporter.reconciler.evidence import (
    FORMS,
    EvidenceError,
    ExplainingSource,
    HolderName,
    OtherActivity,
    named_holder,
)
from gpu_exporter.reconciler.foresight import Foresight
from gpu_exporter.reconciler.judge import Judge
from gpu_exporter.reconciler.pause_note import PauseSource
from gpu_exporter.reconciler.policy import Decision
from gpu_exporter.reconciler.report import decisions_json, explain, format_time
from gpu_exporter.reconciler.rulebook import Rulebook

NO_ACTIONS = Actions()


def explain_once(
    source: ExplainingSource,
    book: Rulebook,
    form: str,
    holder: str,
    gpu: str,
    foresight: Foresight | None,
    audit: Path | None = None,
    pauses: Sequence[PauseSource] = (),
    clock: Clock = SYSTEM_CLOCK,
    actions: Actions = NO_ACTIONS,
) -> int:
    """Every number behind the stage of a holder, or of those of the GPU or MIG instance with this UUID; the exit code.

    `foresight`: None for a time in the past, whose live objects nobody has kept; `clock`: says which time. `audit`:
    what became of its marks until then is read there. Raises OSError.
    """
    try:
        asked = named_holder(holder) if not gpu else None
        names: list[HolderName] = []
        if gpu:
            names = list(source.find_holders(gpu))
        elif asked is not None:
            names = [asked]
        find = foresight.surveyor if foresight is not None else lambda _scheduler: None
        evidence, decisions, problems, *_ = Judge(source, find, book, clock, pauses).judge(names)
    except EvidenceError as exc:
        complain(f"nothing decided: {exc}")
        return Exit.NO_DATA
    for problem in problems:
        complain(f"not seen: {problem}")
    if gpu:
        chosen = [decision for decision in decisions if decision.name in names]
    else:
        chosen = [decision for decision in decisions if decision.is_named(holder, asked)]
        names = names or [decision.name for decision in chosen]
    past = _read_past(audit, names, clock.wall())
    if not chosen and past and form != "json":  # it is gone
        print(f"{', '.join(map(str, names))}: not in the evidence; its marks were")  # noqa: T201
    elif not chosen:
        seen = f"in the evidence of {format_time(clock.wall())}" if foresight is None else "in the evidence"
        has = f"{seen}, which has {evidence.allocations} allocations"
        complain(f"{gpu}: held by nobody {has}" if gpu else f"{holder}: no such holder {has}; {FORMS}")
        return Exit.USAGE
    outlooks = foresight.look(chosen, clock.wall()) if foresight is not None else {}
    for notice in foresight.notices if foresight is not None else ["what surrounded it at that time is not known"]:
        complain(notice)
    if form == "json":
        sys.stdout.write(decisions_json(chosen, evidence, outlooks))
    else:
        for decision in chosen:
            other = _other_activity(source, decision)
            outlook, action = outlooks.get(decision.name), what_may_follow(decision, actions)
            sys.stdout.write(explain(decision, book.site, outlook, other, book.loosest.candidate_after, action))
        sys.stdout.writelines(f"  {line}\n" for line in past)
    return Exit.PARTIAL if problems else Exit.DONE


def _read_past(audit: Path | None, names: Collection[HolderName], until_wall: float) -> list[str]:
    if audit is None:
        return []
    return [describe(record) for name in names for record in read_transitions(audit, name, until_wall)]


def _other_activity(source: ExplainingSource, decision: Decision) -> OtherActivity:
    try:
        return source.read_other_activity({unit.uuid for unit in decision.units})
    except EvidenceError as exc:
        complain(f"not known which witnesses were active: {exc}")
        return {}


def complain(text: str) -> None:
    """Say on standard error what is missing from what is printed."""
    print(f"gpu-exporter: {text}", file=sys.stderr)  # noqa: T201
