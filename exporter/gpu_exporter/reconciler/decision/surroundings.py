"""What a holder is part of, as its scheduler shows it now: its group, its class, and who asked to keep its GPUs.

Metrics say that GPUs are idle. Whether that means anything, the surroundings say: an idle member of a working group is
not idle, a serving pod waits for requests, and owners may know of reasons that nobody sees.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from gpu_exporter.config.rules import CLASSES
from gpu_exporter.reconciler.evidence.records import HolderName

EXEMPT_BY = ("pod", "owner", "namespace", "job", "policy")  # who asked that holders keep their GPUs
SERVING, INTERACTIVE, BATCH, UNCLEAR = CLASSES
NO_LABELS: Mapping[str, str] = MappingProxyType({})


class Member(NamedTuple):
    """One pod or job of a group that holds GPUs, alive now.

    `incarnation`: the pod's UID, "" for jobs. `units`: GPUs and MIG instances that its scheduler gave it; None where
    that cannot be counted. `waits`: why it cannot work yet, e.g. Pending; "" when it can.
    """

    name: HolderName
    incarnation: str
    units: int | None
    waits: str = ""


class Exemption(NamedTuple):
    """Somebody asked to keep the GPUs. `source`: one of EXEMPT_BY; `why`: in words, who and until
    when.
    """

    source: str
    why: str


class Reference(NamedTuple):
    """What an act would be done to: an object, as API group, version, kind, name and UID say, or a job by its id."""

    group: str
    version: str
    kind: str
    name: str
    uid: str

    @property
    def title(self) -> str:
        """As the annotation `owner` of a mark has it: batch/v1/Job/train; `job 42`."""
        if not self.kind:
            return f"job {self.name}"
        return "/".join(part for part in (self.group, self.version, self.kind, self.name) if part)


class Surroundings(NamedTuple):
    """Of one holder.

    `group`: what it is part of, as consumers name it, e.g. batch/v1/Job/train; "" for a holder by itself. `members`:
    of its gang, itself among them; empty for a holder by itself. `missing`: members that the gang waits for and that do
    not exist yet. `kind`: one of CLASSES, `kind_why` what it was taken from. `idle_after_s`: how long it must have been
    idle at least, by a wish of its owner; 0 for no wish. `idle_after_by`: whose wish that is. `ceiling`: why it may not
    rise above `candidate`; "" when it may. `labels`: the pod's own. `owner_kinds`: of the controllers above it, each as
    KIND and as GROUP/KIND; Pod for none. `target`: what an act on it would be done to; None where nothing is ever done.
    `possible`: of ACTIONS, what that may be. `shown`: its class by what it shows, whatever a label says.
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
    """The surroundings of a holder are not known, for this reason, which names the remedy.

    `is_failure`: the scheduler did not answer, or not enough; it is not the holder that is gone. `reason`, `kind`: why
    an object cannot be read, in one word, and its kind (an owner's, Pod or Namespace); "" for anything else.
    """

    why: str
    is_failure: bool = False
    reason: str = ""
    kind: str = ""


class Surveyor(Protocol):
    """One scheduler's live objects around its holders."""

    def survey(
        self, names: Collection[HolderName], fresh: Collection[HolderName], wall: float
    ) -> Mapping[HolderName, Surroundings | Unreadable]:
        """The surroundings of each of these holders at `wall` (Unix seconds). Raises nothing.

        `fresh`: those of them that are about to rise: what was read earlier does not do for them.
        """

    def read_fate(self, name: HolderName, incarnation: str) -> str:
        """What became of a holder that has no series any more: `runs`, `ended` by itself, or `lost`: taken away, or not
        known how. Raises nothing.
        """
