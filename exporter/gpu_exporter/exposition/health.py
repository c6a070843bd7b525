"""Whether a view is the whole picture: what `--once` turns into its exit code, and JSON into `health`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeAlias

from gpu_exporter.model.views import GpuView, View

Health: TypeAlias = Literal["ok", "partial", "no_data", "none_expected"]
# nvmlDeviceGpuRecoveryAction_t: what each asks for. A number that is not here asks for something too.
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
    """`no_data` when no GPU answers, `partial` when there are gaps, else `ok`.

    `none_expected`: none answers and none should, which is not a fault: a node without a GPU, or a driver that was
    released on request. `devices_only` as for `list_gaps`.
    """
    if not view.status.driver_up or not any(_answers(gpu) for gpu in view.gpus):
        return "no_data" if view.status.expects_gpus else "none_expected"
    return "partial" if list_gaps(view, devices_only=devices_only) else "ok"


def list_gaps(view: View, *, devices_only: bool = False) -> list[str]:
    """What is missing of the whole picture, one line each: GPUs that do not answer, ask for a reset, or that only a
    scheduler counts; and unless `devices_only` calls and sources of holders that fail.
    """
    gaps = [f"gpu {label_of(gpu)}: {_silence(gpu)}" for gpu in view.gpus if is_missed(gpu)]
    shown = sum(not gpu.snapshot.away for gpu in view.gpus)
    if (more := view.status.devices_expected - shown) > 0:
        gaps.append(f"{more} more GPU{'s' if more > 1 else ''} should answer here, and the driver does not list them")
    answering = [gpu for gpu in view.gpus if _answers(gpu)]
    gaps += [f"gpu {label_of(gpu)} {wish}" for gpu in answering if (wish := describe_recovery(gpu))]
    number = sum(len(gpu.snapshot.instances) or 1 for gpu in answering)
    gaps += [
        f"{source.name} counts {source.devices} GPUs here, and {number} answer"
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
            yield f"holders by {source.name}: {source.error or 'no answer'}"


def label_of(gpu: GpuView) -> str:
    """Its index, or the address of one that has no place in the driver's list."""
    identity = gpu.snapshot.identity
    return str(identity.index) if identity.index >= 0 else identity.pci_bus_id


def describe_recovery(gpu: GpuView) -> str:
    """`asks for a reset`, "" for a GPU that asks for nothing."""
    action = gpu.snapshot.facts.recovery_action
    return f"asks for {ACTIONS.get(int(action), f'recovery action {action:g}')}" if action else ""


def is_missed(gpu: GpuView) -> bool:
    """Whether it should answer, and does not."""
    return not (_answers(gpu) or gpu.snapshot.away)


def _answers(gpu: GpuView) -> bool:
    """Whether its values are those of now."""
    return gpu.snapshot.up and not gpu.withheld and not gpu.hung


def _silence(gpu: GpuView) -> str:
    if gpu.hung:
        return "the driver does not answer about it"
    return gpu.snapshot.error or f"last answer {gpu.age_s:.0f} s ago"
