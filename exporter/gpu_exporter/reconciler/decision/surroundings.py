"""The surroundings of a holder, as its scheduler shows them: its group, its class, and wishes to keep its GPUs.

Metrics show that GPUs are idle. The surroundings show whether the holder still needs them. An idle member may wait for
a working member of its group. A server waits for requests. Owners may have reasons that metrics do not show.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from gpu_exporter.common.config.rules import CLASSES
from gpu_exporter.reconciler.evidence.records import HolderName

EXEMPT_BY = ("pod", "owner", "namespace", "job", "policy")  # sources of an exemption
SERVING, INTERACTIVE, BATCH, UNCLEAR = CLASSES
NO_LABELS: Mapping[str, str] = MappingProxyType({})


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
    """A wish to keep idle GPUs. `source`: one of EXEMPT_BY. `why`: the owner of the wish and its end, in words."""

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
    `ceiling`: why it may not rise above `candidate`; "" if it may.
    `labels`: the labels of the pod itself.
    `owner_kinds`: the kinds of the controllers above it, each as KIND and as GROUP/KIND; Pod for no controller.
    `target`: the object that an action would end; None if the reconciler never acts on it.
    `possible`: the actions of ACTIONS that are possible on this target.
    `shown`: the class that it would have without the label `class`.
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
    shown: str = UNCLEAR


class Unreadable(NamedTuple):
    """The surroundings of a holder are not known.

    `why`: the reason, with the remedy.
    `is_failure`: the scheduler did not answer completely; false if the holder is gone.
    `reason`: why an object cannot be read, in one word. `kind`: the kind of this object (of an owner, or Pod or
    Namespace). Both are "" for any other reason.
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
        """The surroundings of each of these holders at `wall` (Unix seconds). Raises nothing.

        `fresh`: holders that are about to get a higher stage. Their surroundings are read again.
        """

    def read_fate(self, name: HolderName, incarnation: str) -> str:
        """The fate of a holder that no longer has series: `runs`, `ended` (by itself) or `lost`. Raises nothing.

        `lost`: the holder was taken away, or it is not known how it ended.
        """
