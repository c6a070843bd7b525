"""Judges how complete a view is, for the exit code of `--once` and the JSON field `health`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from gpu_exporter.agent.collectors.xid import is_fault
from gpu_exporter.agent.exposition.checks import FailedCheck
from gpu_exporter.agent.node.conditions import list_conditions
from gpu_exporter.common.durations import format_age
from gpu_exporter.common.model.views import GpuView, View

NONE_ANSWER = "but 0 answer"
Health: TypeAlias = Literal["ok", "partial", "no_data", "none_expected"]
XID_S = 3600.0  # how long an XID fails the check, as the alert GpuXid
REBOOT = "reboot the node"
# The check and the remedy of each condition (conditions.py) that makes a GPU unusable, as in alerts/runbook.md.
CHECK_OF = {
    "hung": ("lost", REBOOT),
    "lost": ("lost", REBOOT),
    "stale": ("lost", REBOOT),
    "recovery_action": ("reset", "drain the node, then do this"),
    "row_remap_failed": ("remap", "replace the board"),
    "not_ready": ("ready", "attest the GPU"),
    "nvlinks_down": ("fabric", "reset the GPU"),
    "fabric_failed": ("fabric", "check Fabric Manager"),
    "fabric_not_ready": ("fabric", "check Fabric Manager"),
}
UNCHECKED = {
    "xid": "no running exporter receives the XIDs of all GPUs",
    "count": "no scheduler reports the number of GPUs here",
}


def judge_health(view: View, *, devices_only: bool = False) -> Health:
    """Returns `no_data` if no GPU answers, `partial` if there are gaps, otherwise `ok`.

    `none_expected`: no GPU answers, but this is not a fault, because the node has no GPU or the driver was released on
    request. `devices_only`: failed calls, and failed sources of holders, are no gaps.
    """
    if not view.status.driver_up or not any(_answers(gpu) for gpu in view.gpus):
        return "no_data" if view.status.expects_gpus else "none_expected"
    return "partial" if (list_failed_checks(view) if devices_only else list_gaps(view)) else "ok"


def list_gaps(view: View) -> list[str]:
    """Returns the failed checks, failed calls and failed sources of holders of a view, one line each."""
    return [*(each.text for each in list_failed_checks(view)), *_list_failures(view)]


def list_failed_checks(view: View) -> list[FailedCheck]:
    """Returns a failed check for each GPU that is unusable or reported a fault, and for GPUs that only a scheduler
    counts.
    """
    failed = []
    for gpu in view.gpus:
        label = gpu.snapshot.identity.label
        for each in (each for each in list_conditions(gpu) if each.severity == "unusable"):
            check, remedy = CHECK_OF[each.name]
            failed.append(FailedCheck(check, each.say_of(label), remedy))
        failed += [FailedCheck("xid", f"gpu {label}: {text}", "reset the GPU") for text in _list_xids(gpu, view.wall)]
    shown = sum(not gpu.snapshot.away for gpu in view.gpus)
    if (more := view.status.devices_expected - shown) > 0:
        text = f"{more} more GPU{'s' if more > 1 else ''} should answer here, but the driver does not list them"
        failed.append(FailedCheck("lost", text, REBOOT))
    return [*failed, *(FailedCheck("count", text, "check dmesg") for text in list_counts(view))]


def list_unchecked(view: View) -> list[str]:
    """Returns the checks of UNCHECKED that this view cannot make."""
    heard = all(gpu.xids is not None for gpu in view.gpus if not gpu.snapshot.away)
    counted = bool(view.status.counted) or any(source.devices is not None for source in view.status.sources)
    return [name for name, known in (("xid", heard), ("count", counted)) if not known]


def _list_xids(gpu: GpuView, wall: float) -> Iterator[str]:
    for xid, kind, _, last_wall in gpu.xids.codes if gpu.xids is not None and not gpu.snapshot.away else ():
        if is_fault(xid, kind) and (age_s := wall - last_wall) < XID_S:
            yield f"XID {xid} {format_age(age_s)} ago"


def list_counts(view: View) -> list[str]:
    """Returns a text for each scheduler that counts more GPUs than answer.

    If no GPU answers, one witness of the number is enough.
    """
    number = sum(len(gpu.snapshot.instances) or 1 for gpu in view.gpus if _answers(gpu))
    counts = {each.name: each.devices or 0 for each in view.status.sources}
    if not number and not (view.status.unmanaged or view.status.driver_released):
        counts |= dict(view.status.counted)
    return [f"{name} counts {count} GPUs here, but {number} answer" for name, count in counts.items() if count > number]


def _list_failures(view: View) -> Iterator[str]:
    for gpu in filter(_answers, view.gpus):
        for outcome in gpu.snapshot.outcomes:
            if not outcome.success:
                yield f"gpu {gpu.snapshot.identity.label}: {outcome.name}: {outcome.error or 'failed'}"
    for source in view.status.sources:
        if not source.up or source.error:
            yield f"source of holders {source.name}: {source.error or 'no answer'}"


def _answers(gpu: GpuView) -> bool:
    """Returns whether the values of the GPU are current."""
    return gpu.snapshot.up and not gpu.withheld and not gpu.hung
