"""The surroundings of a holder, as its scheduler shows them: its group, its class, and wishes to keep its GPUs.

Metrics show that GPUs are idle. The surroundings show whether the holder still needs them. An idle member may wait for
a working member of its group. A server waits for requests. Owners may have reasons that metrics do not show.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias

from gpu_exporter.common.config.rules import CLASSES
from gpu_exporter.reconciler.evidence.records import HolderName

EXEMPT_BY = ("pod", "owner", "namespace", "job", "policy")  # sources of an exemption
SERVING, INTERACTIVE, BATCH, UNCLEAR = CLASSES
# Pods below one of these kinds do not wait for each other, and neither do pods below its owner.
LOOSE = frozenset(
    ("ReplicaSet", "ReplicationController", "Deployment", "Rollout", "CronJob", "ScaledJob", "DaemonSet", "Node")
)
Incarnation: TypeAlias = tuple[HolderName, str]  # a holder, and its incarnation as in Unseen
NO_LABELS: Mapping[str, str] = MappingProxyType({})
NOT_HELD: Mapping[str, tuple[str, str]] = MappingProxyType({})


class Member(NamedTuple):
    """A live pod or job of a group that holds GPUs.

    `incarnation`: the pod's UID, "" for jobs.
    `units`: GPUs and MIG instances that its scheduler assigned; None if they cannot be counted.
    `waits`: why it cannot work yet, e.g. "is Pending"; "" if it can work.
    """

    name: HolderName
    incarnation: str
    units: int | None
    waits: str = ""


class Exemption(NamedTuple):
    """A wish to keep idle GPUs. `source`: one of EXEMPT_BY. `why`: its owner and its end, in words."""

    source: str
    why: str


class Reference(NamedTuple):
    """The target of an action: a Kubernetes object, or a Slurm job with its id in `name`."""

    group: str
    version: str
    kind: str
    name: str
    uid: str

    @property
    def title(self) -> str:
        """The name as in the annotation `owner` of a mark: batch/v1/Job/train; `job 42` for a job."""
        if not self.kind:
            return f"job {self.name}"
        return "/".join(part for part in (self.group, self.version, self.kind, self.name) if part)


class Surroundings(NamedTuple):
    """The surroundings of one holder.

    `group`: the title of its group, e.g. batch/v1/Job/train; "" for a single holder.
    `members`: all members of its gang, including the holder; empty for a single holder.
    `missing`: how many members of the gang do not exist yet.
    `kind`: its class, one of CLASSES. `kind_why`: the object or label that shows the class.
    `idle_after_s`: the minimum idle time that its owner asked for (seconds); 0 for no wish.
    `idle_after_by`: the source of this wish.
    `ceiling`: why the holder must not rise above `candidate`; "" if it may.
    `labels`: the labels of the pod itself.
    `owner_kinds`: the kinds of the controllers above it, each as KIND and as GROUP/KIND; Pod for no controller.
    `target`: the object that an action would end; None if the reconciler never acts on it.
    `possible`: the actions of ACTIONS that are possible on this target.
    `held`: why some of these actions are not done on it now, by action: the reason in one word, and in a sentence.
    `shown`: the class that it would have without the label `class`.
    `tenant`: the team or person that its namespace names in the label of `policy.tenant_label`; "" if it names none.
    `is_daemon`: whether a DaemonSet of the group apps controls the pod itself; the DaemonSet was read.
    `job_facts`: the values of a job for the criteria of LIVE_LISTS. A criterion whose values Slurm does not show is
    missing.
    """

    group: str = ""
    members: tuple[Member, ...] = ()
    missing: int = 0
    kind: str = UNCLEAR
    kind_why: str = ""
    exemption: Exemption | None = None
    idle_after_s: float = 0.0
    idle_after_by: Exemption | None = None
    ceiling: str = ""
    labels: Mapping[str, str] = NO_LABELS
    owner_kinds: tuple[str, ...] = ()
    target: Reference | None = None
    possible: tuple[str, ...] = ()
    held: Mapping[str, tuple[str, str]] = NOT_HELD
    shown: str = UNCLEAR
    tenant: str = ""
    is_daemon: bool = False
    job_facts: Mapping[str, tuple[str, ...]] = MappingProxyType({})


class Unreadable(NamedTuple):
    """Stands for surroundings that are unknown.
    `why`: the reason, with the remedy. `is_failure`: the scheduler did not answer completely; false if the holder is
    gone.
    `reason`: why an object cannot be read, in one word. `kind`: the kind of this object. Both are "" if every object
    was read.
    """

    why: str
    is_failure: bool = False
    reason: str = ""
    kind: str = ""


class Surveyor(Protocol):
    """Reads the live objects around the holders of one scheduler."""

    def survey(
        self, names: Collection[HolderName], fresh: Collection[HolderName], wall: float
    ) -> Mapping[HolderName, Surroundings | Unreadable]:
        """Returns the surroundings of each of these holders at `wall` (Unix seconds). Raises nothing.

        `fresh`: holders that are about to get a higher stage. Their surroundings are read again.
        """

    def find_living(self, holders: Collection[Incarnation]) -> Collection[Incarnation]:
        """Returns the holders that have not ended, or whose scheduler does not answer. Raises nothing."""

    def read_fate(self, name: HolderName, incarnation: str) -> str:
        """Finds the fate of a holder without series: `runs`, `ended` (by itself) or `lost`. Raises nothing.

        `lost`: someone ended the holder, or it is unknown how it ended.
        """
