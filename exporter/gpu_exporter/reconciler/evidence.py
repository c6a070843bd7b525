"""What the reconciler knows of one holder, whatever the source."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, Protocol

KEY_LABELS = ("uuid", "mig_uuid", "scheduler", "namespace", "pod", "container", "job_id")


class HolderName(NamedTuple):
    """A pod (all of its containers together) or a Slurm job."""

    scheduler: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"job {self.name}" if self.scheduler == "slurm" else f"{self.namespace}/{self.name}"


class UnitEvidence(NamedTuple):
    """One GPU or MIG instance that a holder holds. None means that the source does not tell.

    `coverage`: observed share of the time, 0 to 1, over the policy's window. `sample_interval_s`: its exporter's.
    """

    node: str
    gpu: str
    uuid: str
    mig: str
    start_wall: float | None
    idle_run_s: float | None
    sample_age_s: float | None
    coverage: float | None
    witnesses: int | None
    sample_interval_s: float = 1.0


class HolderEvidence(NamedTuple):
    """Everything seen of one holder.

    `held`: how many units it holds in all, as its scheduler counts them, seen or not; None when that is not told.
    `incarnations`: the pod UIDs that its series name, which must be one; empty for jobs, whose start tells them apart.
    """

    name: HolderName
    owner: str
    units: tuple[UnitEvidence, ...]
    held: int | None
    incarnations: frozenset[str] = frozenset()


class Evidence(NamedTuple):
    """One reading of the source at `wall` (Unix seconds).

    `exporters` and `allocations` say how much was seen; `problems` names what was not.
    """

    wall: float
    holders: tuple[HolderEvidence, ...]
    exporters: int = 1
    allocations: int = 0
    problems: tuple[str, ...] = ()


class EvidenceError(Exception):
    """The source did not answer, or not usably. The text says where and why."""


class EvidenceSource(Protocol):
    """A PromQL API, or the exporters themselves."""

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        """The present evidence, of the holders in `marked` in any case. Raises EvidenceError."""


def holder_name(labels: dict[str, str]) -> HolderName:
    """The holder that an allocation series names."""
    if labels.get("scheduler") == "slurm":
        return HolderName("slurm", "", labels.get("job_id", ""))
    return HolderName("kubernetes", labels.get("namespace", ""), labels.get("pod", ""))


def owner_of(labels: dict[str, str]) -> str:
    """`user/account` of an info series, as far as it says."""
    return "/".join(part for part in (labels.get("user", ""), labels.get("account", "")) if part)
