"""Learns how long a holder's GPUs wait before they continue. Ranks wait in a collective, e.g. for a barrier.

Such a wait looks like a hang until it ends. Only a wait that ended by itself counts: the same processes still run, and
every GPU of the holder on this node then works for a minute in total. An end by a restart, a smaller gang or a
framework's timeout does not count. After `stalls.waits_min` counted waits, only a much longer run becomes a stall.

Pure: no clock, no lock, no file.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from gpu_exporter.common.model.readings import HostProgress
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.diagnosis.stalls.rules import MINUTE_S, StallRules

KEPT = 20  # the last waits that count, so that older and longer ones are forgotten
LIVES_RATIO = 0.9  # share of a GPU's memory that remains in use if no process ended


class Waited(NamedTuple):
    """A holder's last waits that ended by themselves: their number (at most KEPT), and the longest (seconds)."""

    number: int = 0
    longest_s: float = 0.0


NOT_YET = Waited()


class Around(NamedTuple):
    """Evidence beside the GPU itself for a run without progress.

    `proof`: why a member of the gang cannot continue, "" without proof. `alone`: why the GPU cannot wait for another
    GPU, "" if it may. `expected_s`: a run of this length clearly exceeds the holder's waits, None while too few waits
    are known. `waited`: these waits.
    """

    proof: str = ""
    alone: str = ""
    expected_s: float | None = None
    waited: Waited = NOT_YET


NOTHING_KNOWN = Around()


class HolderWaits:
    def __init__(self, rules: StallRules, waited: Waited = NOT_YET) -> None:
        """`waited`: the waits that were saved before a restart."""
        self._rules = rules
        self._lengths: deque[float] = deque([waited.longest_s] * waited.number, KEPT)
        self._since: dict[UnitId, float] = {}  # of GPUs that spin: since when they have not worked
        self._worked_s: dict[UnitId, float] = {}  # since the first of these waits
        self._memory: dict[UnitId, float | None] = {}  # in use while they spun
        self._length_s = 0.0  # of the present wait: the longest of its GPUs
        self._lengths_s: list[float] = []  # of the waits that seem to have ended
        self._ended_at = 0.0
        self._is_known = True  # whether all looks showed which processes ended
        self._is_broken = self._is_freed = False

    @property
    def is_open(self) -> bool:
        """Whether GPUs wait, or have waited and have possibly not continued yet."""
        return bool(self._since or self._lengths_s)

    @property
    def waited(self) -> Waited:
        return Waited(len(self._lengths), max(self._lengths, default=0.0))

    def expected_s(self) -> float | None:
        """Returns after how many seconds a run clearly exceeds the holder's waits. None with too few known waits."""
        rules = self._rules
        if len(self._lengths) < rules.waits_min:
            return None
        return max(rules.after, min(rules.wait_max, rules.wait_factor * max(self._lengths)))

    def spin(self, unit: UnitId, begin: float, memory: float | None) -> None:
        """Notes that a GPU is in a run without progress since `begin`. `memory`: bytes in use."""
        if not self.is_open:
            self._is_known, self._is_broken, self._is_freed = True, False, False
        if unit not in self._since:
            self._since[unit] = begin
            self._memory[unit] = memory

    def work(self, unit: UnitId, seconds: float, at: float) -> None:
        """Notes that a GPU has worked for `seconds` until `at` (monotonic)."""
        if not self.is_open:
            return
        began = self._since.pop(unit, None)
        if began is not None:
            self._length_s, self._ended_at = max(self._length_s, at - seconds - began), at
            if not self._since:
                self._lengths_s = [*self._lengths_s[-KEPT:], self._length_s]
                self._length_s = 0.0
        self._worked_s[unit] = self._worked_s.get(unit, 0.0) + seconds

    def note_memory(self, unit: UnitId, memory: float | None) -> None:
        """Notes the bytes in use on a GPU of the holder."""
        if not self.is_open or unit not in self._memory:
            return
        before = self._memory[unit]
        if memory is None or before is None or memory < LIVES_RATIO * before:
            self._is_freed = True

    def hear(self, host: HostProgress, members: set[UnitId]) -> None:
        """Takes one reading of the holder's host. `members`: the holder's GPUs here that may have a process."""
        if not self.is_open or host.steps is not None:
            return
        if host.ended is None:
            self._is_known = False
        elif host.ended:
            self._is_broken = True
        if self._since or host.end <= self._ended_at:
            return
        if any(self._worked_s.get(unit, 0.0) < MINUTE_S for unit in members):
            return
        lives = not self._is_broken and (self._is_known or not self._is_freed)
        if lives:
            shortest_s = self._rules.after / self._rules.wait_factor  # a shorter one changes nothing
            self._lengths.extend(length for length in self._lengths_s if length >= shortest_s)
        self._lengths_s = []
        self._worked_s.clear()
        self._memory.clear()
