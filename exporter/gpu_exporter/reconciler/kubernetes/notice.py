"""The texts of a mark for people and for other tools: its Event and its pod condition. Pure."""

from __future__ import annotations

from typing import Any

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.plain import utc
from gpu_exporter.reconciler.decision.policy import SHARING, UNDERUSED, Decision, windows_of
from gpu_exporter.reconciler.headline import say_cause
from gpu_exporter.reconciler.marks import EXEMPT_UNTIL, PREFIX, timestamp

CONDITION = PREFIX + "Underused"
KEEP_S = 4 * 3600.0  # time in the example that shows how to keep the GPUs; at most policy.exempt_max


def event_note(decision: Decision, policy: Policy, wall: float) -> str:
    """Returns the text of an Event: the reason of the mark, the next step, and the command that keeps the GPUs.

    `wall`: the time from which the end time in the command is computed (Unix seconds).
    """
    windows = decision.windows or windows_of(policy)
    if decision.stage == SHARING:
        may = "This is only a hint: a MIG instance or a shared GPU may be enough, if it has enough memory"
        return f"{decision.reason}. {may}{_help(policy)}"
    if decision.stage == UNDERUSED:
        comes_next = "From now on, other tools may take its GPUs back. Work on a GPU ends the mark"
    elif decision.is_capped or decision.is_doubtful:
        comes_next = "It stays at this stage"
    elif decision.stage == "partial":
        comes_next = "It does not become underused while some of its GPUs work. If these are enough, request fewer GPUs"
    else:
        comes_next = f"It becomes underused when its GPUs have been idle for {describe_duration(windows.underused_s)}"
    cause = say_cause(decision)
    why = f" Likely cause: {cause}." if cause else ""
    return (
        f"{decision.reason}.{why} {comes_next}. To keep its GPUs: {keep_command(decision, policy, wall)}{_help(policy)}"
    )


def keep_command(decision: Decision, policy: Policy, wall: float) -> str:
    """Returns the command with which an owner keeps the GPUs of a pod for some time."""
    _, namespace, name = decision.name
    until = timestamp(wall + min(KEEP_S, policy.exempt_max))
    return f"kubectl annotate --overwrite -n {namespace} pod {name} {EXEMPT_UNTIL}={until}"


def condition(decision: Decision, wall: float, since_wall: float | None) -> dict[str, Any]:
    """Returns the pod condition for the label `underused`, as an element of status.conditions.

    `wall`: time of the heartbeat (lastProbeTime, Unix seconds). `since_wall`: when the pod became underused (Unix
    seconds); None keeps the time in the existing condition.
    """
    held = decision.held or 0
    since = utc(decision.idle_since_wall or decision.observed_wall).strftime("%Y-%m-%d %H:%MZ")
    body = {
        "type": CONDITION,
        "status": "True",
        "reason": "AllIdle",
        "message": f"{held} of {held} GPUs idle since {since}; to keep them: annotation {EXEMPT_UNTIL}",
        "lastProbeTime": timestamp(wall),
    }
    return body if since_wall is None else {**body, "lastTransitionTime": timestamp(since_wall)}


def _help(policy: Policy) -> str:
    return f"; help: {policy.help_url}" if policy.help_url else ""
