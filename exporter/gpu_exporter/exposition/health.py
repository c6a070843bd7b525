"""Whether a view is the whole picture: what `--once` turns into its exit code, and JSON into `health`."""

from __future__ import annotations

from typing import Literal, TypeAlias

from gpu_exporter.model import View

Health: TypeAlias = Literal["ok", "partial", "no_data", "none_expected"]


def judge_health(view: View, *, devices_only: bool = False) -> Health:
    """`no_data` when no GPU answers, `partial` when a GPU, a call or a source of holders does not, else `ok`.

    `none_expected`: none answers and none should, which is not a fault: a node without a GPU, or a driver that was
    released on request. `devices_only`: `partial` is only a GPU that does not answer.
    """
    answering = [gpu for gpu in view.gpus if gpu.snapshot.up and not gpu.withheld and not gpu.hung]
    if not view.status.driver_up or not answering:
        return "no_data" if view.status.expects_gpus else "none_expected"
    wanted = sum(not gpu.snapshot.away for gpu in view.gpus)
    missing = len(answering) < max(wanted, view.status.devices_expected)
    if devices_only:
        return "partial" if missing else "ok"
    failed = any(not outcome.success for gpu in answering for outcome in gpu.snapshot.outcomes)
    mute = any(not source.up or source.error for source in view.status.sources)
    return "partial" if missing or failed or mute else "ok"
