"""What --apply would write, and what it would refuse: for the dry run, by reading the live objects.

The dry run is what people judge the reconciler by before they let it write. So it asks the same marker the same
questions, and writes nothing. Where there is no way to the live objects, that is said once, and nothing is guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import Marker, MarkError, Refused, guard, sum_odd

FAILURES_MAX = 2  # of one scheduler in a look: the next one would wait for the same answer
INSPECTIONS_MAX = 500  # live objects a cycle, those first that were not looked at for longest; 4 ms each


class Outlook(NamedTuple):
    """What would become of one decision.

    `label`: the mark. `refused`: the reason in one word, "" when it would be written; `why`: in a sentence. `checked`:
    the live object was read; otherwise nothing is known of a refusal.
    """

    label: str
    refused: str = ""
    why: str = ""
    checked: bool = False


class Preview:
    """Asks the markers about decisions that would be written. `notices` collects what could not be asked, once."""

    def __init__(self, makers: Mapping[str, Callable[[], Marker]], made: Mapping[str, Marker] | None = None) -> None:
        """`makers`: by scheduler, what makes its marker when it is first needed; may raise MarkError."""
        self._makers = makers
        self._markers = dict(made or {})
        self._known: dict[HolderName, tuple[str, int, Outlook]] = {}  # stage, look, and what was seen in it
        self._looks = 0
        self._said: set[str] = set()
        self.notices: list[str] = []

    @property
    def odd(self) -> Mapping[tuple[str, str], int]:
        """As Marker, of all of them."""
        return sum_odd(self._markers.values())

    def look(self, decisions: Sequence[Decision], wall: float) -> dict[HolderName, Outlook]:
        """The outlook of each decision that would leave a mark."""
        self._looks += 1
        wanted = {decision.name: decision for decision in decisions if decision.label}
        self._known = {
            name: known for name, known in self._known.items() if name in wanted and known[0] == wanted[name].stage
        }
        due = sorted(wanted.values(), key=lambda decision: (self._last_look(decision.name), decision.name))
        failures: Counter[str] = Counter()
        for decision in due[:INSPECTIONS_MAX]:
            scheduler = decision.name.scheduler
            if failures[scheduler] >= FAILURES_MAX:
                continue
            try:
                self._known[decision.name] = (decision.stage, self._looks, self._inspect(decision, wall))
                self._said.discard(scheduler)
            except MarkError as exc:
                failures[scheduler] += 1
                self._known.pop(decision.name, None)
                if scheduler not in self._said:
                    self._said.add(scheduler)
                    self.notices.append(f"{exc}; what --apply would refuse of {HOLDERS[scheduler]} is not shown")
        return {
            name: self._known[name][2] if name in self._known else Outlook(decision.label)
            for name, decision in wanted.items()
        }

    def _last_look(self, name: HolderName) -> int:
        return self._known[name][1] if name in self._known else 0

    def surveyor(self, scheduler: str) -> Marker | None:
        """The marker of a scheduler, which can say what surrounds its holders; None where there is no way to it."""
        try:
            return self._marker(scheduler)
        except MarkError:
            return None  # said by `look`

    def _inspect(self, decision: Decision, wall: float) -> Outlook:
        """Raises MarkError when the live object cannot be read."""
        marker = self._marker(decision.name.scheduler)
        label = marker.label(decision)
        try:
            guard(marker.inspect, decision, wall)
        except Refused as exc:
            return Outlook(label, exc.reason, str(exc), True)
        return Outlook(label, checked=True)

    def _marker(self, scheduler: str) -> Marker:
        """Made when it is first needed. Raises MarkError when it cannot be."""
        if scheduler not in self._markers:
            if scheduler not in self._makers:
                raise MarkError("error", NO_WAY[scheduler])
            self._markers[scheduler] = guard(self._makers[scheduler])
        return self._markers[scheduler]


HOLDERS = {"kubernetes": "pods", "slurm": "jobs"}
NO_WAY = {
    "kubernetes": "no way to the API server: neither a service account nor --kubernetes.kubeconfig",
    "slurm": "no way to Slurm: squeue and scontrol are not on PATH",
}
