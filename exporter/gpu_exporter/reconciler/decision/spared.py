"""Finds out whether GPUs that have been idle for long enough are marked, are being taken back, or stay with their
holder. Pure.

Every holder with such GPUs is counted, so no tenant keeps idle GPUs unnoticed. A new reason to keep GPUs needs no entry
here, because the reason comes from the decision, the refused mark or the skipped action.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gpu_exporter.reconciler.decision.outcomes import shortest_run
from gpu_exporter.reconciler.decision.policy import INTERRUPTED, UNDERUSED, Decision
from gpu_exporter.reconciler.evidence.records import HolderName

MARKED, ACTED, SPARED = EXITS = ("marked", "acted", "spared")
SYSTEM = "system"  # refusal of a mark for parts of the cluster in policy.system_namespaces, which are left out
PENDING = "pending"  # reason against a further action: the effect of the first one is not known yet
UNEXPLAINED = "unexplained"  # no part of the reconciler gave a reason, which is a fault of the reconciler


class IdleExit(NamedTuple):
    """The outcome for the idle GPUs of one holder. `way`: one of EXITS. `reason`: in one word; "" for `marked`."""

    decision: Decision
    way: str
    reason: str = ""


def find_exits(
    decisions: Iterable[Decision], marks: Mapping[HolderName, str], reasons: Mapping[HolderName, str]
) -> list[IdleExit]:
    """Returns the outcome for every holder whose GPUs have been idle for long enough.

    `marks`: the stage of every mark that exists after the cycle; in a dry run, of every mark that would exist.
    `reasons`: by holder, why this cycle did not set its mark, or did not act on it.
    """
    exits: list[IdleExit] = []
    for decision in decisions:
        reason = reasons.get(decision.name, "") if decision.stage == UNDERUSED else why_spared(decision)
        if reason == SYSTEM or (decision.stage != UNDERUSED and not reason):
            continue
        if reason:
            exits.append(IdleExit(decision, ACTED if reason == PENDING else SPARED, reason))
        elif marks.get(decision.name) == UNDERUSED:
            exits.append(IdleExit(decision, MARKED))
        else:
            exits.append(IdleExit(decision, SPARED, UNEXPLAINED))
    return exits


def why_spared(decision: Decision) -> str:
    """Returns in one word why a holder whose GPUs have been idle for long enough is not `underused`.

    "" for a holder that is underused, or has not been idle for long enough.
    """
    if decision.stage == UNDERUSED:
        return ""
    if decision.stage == "exempt":  # an owner's wish may make the windows longer than the idle time
        return "exempt"
    is_long = decision.windows is not None and shortest_run(decision) >= decision.windows.underused_s
    return (decision.kept or decision.stage) if is_long or decision.kept == INTERRUPTED else ""
