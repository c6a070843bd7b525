"""The ledger's records: one for each unit, and one for each holder on a unit. A record is dropped as a whole."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from gpu_exporter.agent.ledger.accounts import HolderAccount, UnitAccount
from gpu_exporter.agent.ledger.division import Charge, Division, Listed, Waiting
from gpu_exporter.agent.ledger.ring import Ring


@dataclass(slots=True)
class Pending:
    """Readings of one unit that wait until the next poll shows its holders.

    `rest_w`: the lowest power that was measured, in watts. `listed`: the work of the unit's processes, if it is shared.
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

    - `is_restored`: the account is from the state file, and the unit has not been read since the start.
    - `pending`, `ring`: None before the unit's first reading.
    - `active_by`, `other_s`: as in UnitTotals; a restart resets them.
    """

    account: UnitAccount
    is_restored: bool = False
    pending: Pending | None = None
    ring: Ring | None = None
    active_by: tuple[str, ...] = ()
    other_s: dict[str, float] = field(default_factory=dict)

    def wait(self) -> Pending:
        """Returns the waiting readings of this unit, and creates an empty record of them if needed."""
        if self.pending is None:
            self.pending = Pending()
        return self.pending


class HolderPresence(Enum):
    """The presence of a holder in the polls.

    - PRESENT: the last poll shows the holder.
    - LEAVING: the holder disappeared less than LATE_S ago. Late readings may still be its own.
    - ABSENT: the holder disappeared earlier, or is from the state file and no poll has shown it since the start.
    """

    PRESENT = "present"
    LEAVING = "leaving"
    ABSENT = "absent"


@dataclass(slots=True)
class Holding:
    """The record of one holder on one unit. `ring`: the holder's own utilization, only if it shares the unit."""

    account: HolderAccount
    presence: HolderPresence = HolderPresence.PRESENT
    ring: Ring | None = None
