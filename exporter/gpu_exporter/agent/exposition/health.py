"""Judges how complete a view is, for the exit code of `--once` and the JSON field `health`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from gpu_exporter.common.model.views import GpuView, View

Health: TypeAlias = Literal["ok", "partial", "no_data", "none_expected"]
# nvmlDeviceGpuRecoveryAction_t: the action of each number. An unlisted number also is an action.
ACTIONS = {
    1: "a reset",
    2: "a reboot of the node",
    3: "its peers to be drained",
    4: "to be drained and reset",
    5: "a restart of IMEX",
    6: "a reset of its bus",
    7: "a reboot of the system",
}


def judge_health(view: View, *, devices_only: bool = False) -> Health:
    """Returns `no_data` if no GPU answers, `partial` if there are gaps, otherwise `ok`.

    `none_expected`: no GPU answers, but this is not a fault, because the node has no GPU or the driver was released on
    request. `devices_only`: as in `list_gaps`.
    """
    if not view.status.driver_up or not any(_answers(gpu) for gpu in view.gpus):
        return "no_data" if view.status.expects_gpus else "none_expected"
    return "partial" if list_gaps(view, devices_only=devices_only) else "ok"


def list_gaps(view: View, *, devices_only: bool = False) -> list[str]:
    """Returns the gaps of a view, one line each.

    A gap is a GPU that does not answer, that needs a recovery action, or that only a scheduler counts. Unless
    `devices_only` is set, failed calls and failed sources of holders are gaps too.
    """
    gaps = [f"gpu {label_of(gpu)}: {_silence(gpu)}" for gpu in view.gpus if is_missed(gpu)]
    shown = sum(not gpu.snapshot.away for gpu in view.gpus)
    if (more := view.status.devices_expected - shown) > 0:
        gaps.append(f"{more} more GPU{'s' if more > 1 else ''} should answer here, but the driver does not list them")
    answering = [gpu for gpu in view.gpus if _answers(gpu)]
    gaps += [f"gpu {label_of(gpu)} {wish}" for gpu in answering if (wish := describe_recovery(gpu))]
    number = sum(len(gpu.snapshot.instances) or 1 for gpu in answering)
    gaps += [
        f"{source.name} counts {source.devices} GPUs here, but {number} answer"
        for source in view.status.sources
        if source.devices is not None and source.devices > number
    ]
    return gaps if devices_only else [*gaps, *_list_failures(view, answering)]


def _list_failures(view: View, answering: list[GpuView]) -> Iterator[str]:
    for gpu in answering:
        for outcome in gpu.snapshot.outcomes:
            if not outcome.success:
                yield f"gpu {label_of(gpu)}: {outcome.name}: {outcome.error or 'failed'}"
    for source in view.status.sources:
        if not source.up or source.error:
            yield f"source of holders {source.name}: {source.error or 'no answer'}"


def label_of(gpu: GpuView) -> str:
    """Returns the index of a GPU, or its PCI address if it is not in the driver's list."""
    identity = gpu.snapshot.identity
    return str(identity.index) if identity.index >= 0 else identity.pci_bus_id


def describe_recovery(gpu: GpuView) -> str:
    """Returns `asks for a reset` or the like, "" without a recovery action."""
    action = gpu.snapshot.facts.recovery_action
    return f"asks for {ACTIONS.get(int(action), f'recovery action {action:g}')}" if action else ""


def is_missed(gpu: GpuView) -> bool:
    """Returns whether the GPU should answer, but does not."""
    return not (_answers(gpu) or gpu.snapshot.away)


def _answers(gpu: GpuView) -> bool:
    """Returns whether the values of the GPU are current."""
    return gpu.snapshot.up and not gpu.withheld and not gpu.hung


def _silence(gpu: GpuView) -> str:
    if gpu.hung:
        return "the driver does not answer calls about this GPU"
    return gpu.snapshot.error or f"last answer {gpu.age_s:.0f} s ago"
