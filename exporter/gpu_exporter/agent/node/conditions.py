"""Lists what is wrong with a GPU, each with its severity. Table, JSON, exit code, series and alerts use this one list.

A GPU that answers NVML may still be unusable: without the NVLink fabric CUDA fails. Only an unusable GPU fails a health
check. A degraded GPU still works, e.g. with a pending row remap (NVIDIA, GPU memory error management: unaffected
applications continue, and new work may start).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from gpu_exporter.agent.devices.protocol import COMPLETED, FAILED, NOT_STARTED
from gpu_exporter.common.model.readings import Facts
from gpu_exporter.common.model.views import GpuView

# Fabric Manager registers the GPUs of a node within minutes of its boot.
FABRIC_PATIENCE_S = 600.0
# After a boot or a reset, the links train for seconds.
LINKS_PATIENCE_S = 60.0
RECOVERY, DRAIN_AND_RESET = "recovery_action", 4
# nvmlDeviceGpuRecoveryAction_t: the action of each number. An unlisted number also is an action.
ACTIONS = {
    1: "a reset",
    2: "a reboot of the node",
    3: "a drain of its peers",
    DRAIN_AND_RESET: "a drain and a reset",
    5: "a restart of IMEX",
    6: "a reset of its bus",
    7: "a reboot of the system",
}
NOT_READY = "not in ready state; with confidential computing: nvidia-smi conf-compute -srs 1"


class Condition(NamedTuple):
    """One thing that is wrong with a GPU. `text`: a clause for people, without the name of the GPU."""

    name: str
    severity: Literal["unusable", "degraded"]
    text: str

    def say_of(self, label: str) -> str:
        """Returns the text, preceded by the name of the GPU."""
        return f"gpu {label}{' ' if self.name == RECOVERY else ': '}{self.text}"


def list_conditions(gpu: GpuView) -> list[Condition]:
    """Returns the conditions of a GPU, the unusable ones first. A GPU that was taken away on purpose has none."""
    if gpu.snapshot.away:
        return []
    if gpu.hung:
        return [Condition("hung", "unusable", "the driver does not answer calls about this GPU")]
    if not gpu.snapshot.up:
        return [Condition("lost", "unusable", gpu.snapshot.error or "it does not answer")]
    if gpu.withheld:
        return [Condition("stale", "unusable", f"last answer {gpu.age_s:.0f} s ago")]
    return sorted(_judge(gpu), key=lambda condition: condition.severity == "degraded")


def why_unusable(gpu: GpuView) -> str:
    """Returns why work on the GPU fails or may fail, "" if it should work."""
    return next((each.text for each in list_conditions(gpu) if each.severity == "unusable"), "")


def _judge(gpu: GpuView) -> Iterator[Condition]:
    facts = gpu.snapshot.facts
    if action := facts.recovery_action:
        # The driver asks for action 4 after a row remap: the GPU works on, with less memory until its reset. With MIG
        # instances, the driver does not report remaps.
        works = action == DRAIN_AND_RESET and facts.remap_pending != 0
        text = f"asks for {ACTIONS.get(int(action), f'recovery action {action:g}')}"
        yield Condition(RECOVERY, "degraded" if works else "unusable", text)
    if facts.remap_failed:
        yield Condition("row_remap_failed", "unusable", "a row remap failed: replace the board")
    if facts.remap_pending:
        yield Condition("row_remap_pending", "degraded", "a row remap waits for a reset")
    if gpu.snapshot.not_ready:
        yield Condition("not_ready", "unusable", NOT_READY)
    yield from _judge_links(facts, gpu.links)
    yield from _judge_fabric(facts, has_mig=gpu.snapshot.identity.mig_mode == "enabled")


def _judge_links(facts: Facts, most: int) -> Iterator[Condition]:
    if facts.nvlinks is not None and facts.nvlinks < most:
        are_gone = (facts.nvlinks_gone_s or 0.0) >= LINKS_PATIENCE_S
        severity: Literal["unusable", "degraded"] = "unusable" if are_gone else "degraded"
        yield Condition("nvlinks_down", severity, f"{facts.nvlinks:.0f} of {most} NVLinks are up")


def _judge_fabric(facts: Facts, *, has_mig: bool) -> Iterator[Condition]:
    because = f" ({facts.fabric_problem})" if facts.fabric_problem else ""
    if facts.fabric == FAILED:
        # MIG instances have no NVLink, so they do not need the fabric.
        yield Condition("fabric_failed", "degraded" if has_mig else "unusable", f"NVLink fabric failed{because}")
    elif facts.fabric is not None and facts.fabric < COMPLETED:
        state = "not started" if facts.fabric == NOT_STARTED else "in progress"
        is_late = (facts.fabric_wait_s or 0.0) >= FABRIC_PATIENCE_S
        severity: Literal["unusable", "degraded"] = "unusable" if is_late and not has_mig else "degraded"
        yield Condition("fabric_not_ready", severity, f"NVLink fabric not ready ({state})")
    elif because:
        yield Condition("fabric_degraded", "degraded", f"NVLink fabric degraded{because}")
