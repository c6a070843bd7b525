"""Finds the reason why a holder keeps GPUs that have been idle for long enough. Pure."""

from __future__ import annotations

from gpu_exporter.reconciler.decision.outcomes import shortest_run
from gpu_exporter.reconciler.decision.policy import Decision

BY_STAGE = ("exempt", "serving", "waiting", "unknown")  # stages that keep an idle holder from being marked


def why_spared(decision: Decision) -> str:
    """One word: the stage that prevents the mark `underused` on an idle holder, or `capped`; "" for other holders."""
    if decision.stage == "exempt":  # an owner's wish may make the windows longer than the idle time
        return "exempt"
    if decision.windows is None or shortest_run(decision) < decision.windows.underused_s:
        return ""
    if decision.stage in BY_STAGE:
        return decision.stage
    return "capped" if decision.stage == "candidate" and decision.is_capped else ""
