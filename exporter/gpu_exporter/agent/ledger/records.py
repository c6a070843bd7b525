"""The ledger's records, one for each unit and for each holder on a unit. A record is dropped as a whole."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from gpu_exporter.agent.ledger.accounts import HolderAccount, UnitAccount
from gpu_exporter.agent.ledger.division import Charge, Division, Listed, Waiting
from gpu_exporter.agent.ledger.ring import Ring


@dataclass(slots=True)
class Pending:
    """Readings of one unit that wait until the next poll shows its holders. `rest_w`: the lowest power ever drawn.
    `listed`: what processes of a shared unit were seen to do.
    """

    spans: deque[Waiting] = field(default_factory=deque)
    energy: deque[Charge] = field(default_factory=deque)
    divisions: deque[Division] = field(default_factory=deque)
    energy_at: float | None = None
    rest_w: float | None = None
    listed: Listed = field(default_factory=Listed)


@dataclass(slots=True)
class UnitRecord:
    """The record of one unit.

    `pending`, `ring`: None before the unit's first reading. `is_restored`: the account is from the state file, and the
    unit has not been read since the start. `active_by`, `other_s`: as in UnitTotals; a restart resets them.
    """

    account: UnitAccount
    is_restored: bool = False
    pending: Pending | None = None
    ring: Ring | None = None
    active_by: tuple[str, ...] = ()
    other_s: dict[str, float] = field(default_factory=dict)

    def wait(self) -> Pending:
        """The waiting readings of this unit."""
        if self.pending is None:
            self.pending = Pending()
        return self.pending


class HolderPresence(Enum):
    """Whether polls show a holder.

    PRESENT: the last poll shows the holder. LEAVING: the holder disappeared a moment ago, so late readings may be its
    own. ABSENT: the holder disappeared earlier, or it comes from the state file and no poll has shown it since the
    start.
    """

    PRESENT = "present"
    LEAVING = "leaving"
    ABSENT = "absent"


@dataclass(slots=True)
class Holding:
    """The record of one holder on one unit. `ring`: utilization by its own processes, if it shares the unit."""

    account: HolderAccount
    presence: HolderPresence = HolderPresence.PRESENT
    ring: Ring | None = None
