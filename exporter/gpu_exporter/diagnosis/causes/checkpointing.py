"""The GPU pauses whenever the holder writes much data: the training waits for its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

from gpu_exporter.common.model.causes import HIGH, MEDIUM, Cause, numbers
from gpu_exporter.diagnosis.causes.case import CauseCase, HostLook, Needs, need, rule

WORKS = 0.3  # mean utilization between the bursts
COPY = 0.5  # received or read bytes, as a share of the written and sent ones
FALLS = 0.5  # utilization in a burst, as a share of that between bursts: less is a pause
OTHERS = 0.5  # pauses without a burst, as a share of the bursts: from here on, writing does not explain the pauses


@rule(
    states=frozenset(("low", "bursty")),
    needs=(
        "three bursts of writes in ten minutes, to block devices or over the holder's own network, with a lower"
        " utilization during these bursts; pauses without a burst are rare"
    ),
    against="bursts during which the GPUs worked. Checkpoints on NFS, Lustre and similar file systems are not visible",
)
def judge(case: CauseCase) -> Cause | Needs | None:
    known = [look for look in case.looks if look.utilization is not None]
    if len(known) < case.rules.looks_min:
        return need(case)
    least = case.rules.burst_bytes
    bursts = _group([look for look in known if not _is_copy(look)], lambda look: _written(look) >= least)
    loud = [look for burst in bursts for look in burst]
    quiet = [look for look in known if _written(look) < least]
    if len(bursts) < case.rules.bursts_min or len(quiet) < case.rules.looks_min:
        return None
    between, within = _mean(quiet), _mean(loud)
    middle = (between + within) / 2
    others = _group(known, lambda look: _written(look) < least and (look.utilization or 0.0) <= middle)
    if between < WORKS or within > FALLS * between or len(others) >= OTHERS * len(bursts):
        return None
    always = all((look.utilization or 0.0) < between for look in loud)
    sent = any((look.evidence.sent or 0.0) >= least for look in loud)
    rate = sum(_written(look) for look in loud) / len(loud)
    return Cause(
        "checkpointing",
        HIGH if always and len(bursts) > case.rules.bursts_min else MEDIUM,
        f"in {len(bursts)} bursts it wrote or sent {rate / 1e6:.0f} MB/s, and utilization fell from {between:.0%} to "
        f"{within:.0%}",
        against="" if always else "the GPUs worked in some of these bursts",
        advice="write checkpoints asynchronously (torch.distributed.checkpoint.async_save; a copy needs host memory)"
        + (", or to a local disk first" if sent else ""),
        gain="1.2 to 1.5 times with asynchronous checkpoints (ICSE'24, BERT); 1.02 to 1.12 times (Swin)",
        values=numbers(bursts=float(len(bursts)), before_ratio=between, within_ratio=within),
    )


def _written(look: HostLook) -> float:
    return (look.evidence.written or 0.0) + (look.evidence.sent or 0.0)


def _is_copy(look: HostLook) -> bool:
    """Returns whether the holder also received or read much data. If so, it copies data or exchanges gradients."""
    taken = (look.evidence.received or 0.0) + (look.evidence.read or 0.0)
    return taken >= COPY * _written(look) > 0.0


def _mean(looks: Sequence[HostLook]) -> float:
    return sum(look.utilization or 0.0 for look in looks) / len(looks)


def _group(looks: Sequence[HostLook], belongs: Callable[[HostLook], bool]) -> list[list[HostLook]]:
    """Groups the consecutive looks for which `belongs` is true."""
    return [list(group) for is_one, group in groupby(looks, belongs) if is_one]
