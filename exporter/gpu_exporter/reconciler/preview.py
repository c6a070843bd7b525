"""In the dry run, reads the live objects to find the marks that --apply would write or refuse.

The preview uses the markers and checks of --apply, and writes nothing. If it cannot reach the live objects, it reports
this once, and shows no refusals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import Marker, MarkError, Refused, guard, sum_odd

FAILURES_MAX = 2  # failures of one scheduler per look: further requests would fail too
INSPECTIONS_MAX = 500  # live objects per cycle, at 4 ms each; those with the oldest inspection come first


class Outlook(NamedTuple):
    """The expected result of one decision.

    `label`: the mark. `refused`: the reason of a refusal in one word; "" if the mark would be written. `why`: the same
    in a sentence. `checked`: whether the live object was read; if not, a refusal is still possible.
    """

    label: str
    refused: str = ""
    why: str = ""
    checked: bool = False


class Preview:
    """Checks the marks that --apply would write. `notices`: failures for the log, each once."""

    def __init__(self, makers: Mapping[str, Callable[[], Marker]], made: Mapping[str, Marker] | None = None) -> None:
        """`makers`: for each scheduler, a function that makes its marker at the first use; it may raise MarkError."""
        self._makers = makers
        self._markers = dict(made or {})
        self._known: dict[HolderName, tuple[str, int, Outlook]] = {}  # stage, number of the look, and its result
        self._looks = 0
        self._said: set[str] = set()
        self.notices: list[str] = []

    @property
    def odd(self) -> Mapping[tuple[str, str], int]:
        """The sum of Marker.odd over all markers."""
        return sum_odd(self._markers.values())

    def look(self, decisions: Sequence[Decision], wall: float) -> dict[HolderName, Outlook]:
        """Returns the outlook of every decision that leads to a mark."""
        self._looks += 1
        wanted = {decision.name: decision for decision in decisions if decision.label}
        self._known = {
            name: known for name, known in self._known.items() if name in wanted and known[0] == wanted[name].stage
        }
        looks = {name: known[1] for name, known in self._known.items()}
        due = sorted(wanted.values(), key=lambda decision: (looks.get(decision.name, 0), decision.name))
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
                    self.notices.append(
                        f"{exc}; so the report does not show which {HOLDERS[scheduler]} --apply would refuse"
                    )
        return {
            name: self._known[name][2] if name in self._known else Outlook(decision.label)
            for name, decision in wanted.items()
        }

    def surveyor(self, scheduler: str) -> Marker | None:
        """Returns the marker that surveys the holders of a scheduler; None if the scheduler cannot be reached."""
        try:
            return self._marker(scheduler)
        except MarkError:
            return None  # `look` reports the error

    def _inspect(self, decision: Decision, wall: float) -> Outlook:
        """Returns the outlook of one decision. Raises MarkError if the live object cannot be read."""
        marker = self._marker(decision.name.scheduler)
        label = marker.label(decision)
        try:
            guard(marker.inspect, decision, wall)
        except Refused as exc:
            return Outlook(label, exc.reason, str(exc), True)
        return Outlook(label, checked=True)

    def _marker(self, scheduler: str) -> Marker:
        """Returns the marker of a scheduler, made when it is first used. Raises MarkError if this fails."""
        if scheduler not in self._markers:
            if scheduler not in self._makers:
                raise MarkError("error", NO_WAY[scheduler])
            self._markers[scheduler] = guard(self._makers[scheduler])
        return self._markers[scheduler]


HOLDERS = {"kubernetes": "pods", "slurm": "jobs"}
NO_WAY = {
    "kubernetes": "cannot connect to the API server: no service account, and no --kubernetes.kubeconfig",
    "slurm": "cannot query Slurm: squeue and scontrol are not on PATH",
}
