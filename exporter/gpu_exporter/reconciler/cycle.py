"""One cycle that acts: read the marks that stand, read evidence, decide, withdraw, mark.

Withdrawals come first and are never limited. Marks are written where evidence supports them, so many a cycle. A mark
that evidence neither supports nor contradicts stays for `policy.unsupported_max`, then goes. What the live objects
carry is the only memory: a reconciler that starts anew takes over what it finds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from gpu_exporter.defaults import Policy
from gpu_exporter.reconciler.evidence import EvidenceError, EvidenceSource, HolderName
from gpu_exporter.reconciler.marks import Mark, Marker, MarkError, Refused
from gpu_exporter.reconciler.policy import LABELLED, UNDERUSED, Decision, decide

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


class Observer(Protocol):
    """Counts what happened."""

    def count_write(self, result: str) -> None:
        """A write that was asked for: written, withdrawn, replaced, conflict, throttled, error."""

    def count_skip(self, reason: str) -> None:
        """A mark that was not set, for this reason."""


class Withdrawal(NamedTuple):
    """A mark to remove, and why."""

    mark: Mark
    reason: str


class Plan(NamedTuple):
    """What a cycle has to do. `kept`: marks that evidence supports, with the decision that does.

    A holder is in `kept` and in `writes` when its mark is to rise, in `withdrawals` and `writes` when it is to fall.
    """

    withdrawals: list[Withdrawal]
    kept: list[tuple[Mark, Decision]]
    writes: list[Decision]


def plan(decisions: Sequence[Decision], marks: Sequence[Mark], unsupported: Callable[[Mark], bool]) -> Plan:
    """Compare what should stand with what stands. `unsupported` tells which marks have been without evidence too long.

    Writes are sorted by the length of the idle run, longest first.
    """
    wanted = {decision.name: decision for decision in decisions}
    result = Plan([], [], [])
    for mark in marks:
        decision = wanted.pop(mark.name, None)
        if mark.ended:
            result.withdrawals.append(Withdrawal(mark, "it runs no more"))
        elif decision is None or decision.stage == "unknown":
            if decision is not None and decision.active and mark.stage != "partial":
                result.withdrawals.append(Withdrawal(mark, f"one of its GPUs is active; of others: {decision.reason}"))
            elif unsupported(mark):
                known = "no series tells of it" if decision is None else decision.reason
                result.withdrawals.append(Withdrawal(mark, f"no evidence any more: {known}"))
        elif decision.stage not in LABELLED:
            result.withdrawals.append(Withdrawal(mark, decision.reason))
        elif mark.stage == UNDERUSED != decision.stage:  # on its own, so that no limit or refusal can hold it up
            result.withdrawals.append(Withdrawal(mark, decision.reason))
            result.writes.append(decision)
        else:
            result.kept.append((mark, decision))
            if decision.stage != mark.stage:
                result.writes.append(decision)
    result.writes.extend(decision for decision in wanted.values() if decision.stage in LABELLED)
    result.writes.sort(key=lambda decision: decision.idle_since_wall or 0.0)
    return result


def guard(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Call; what one live object causes, unforeseen, becomes a MarkError, and costs no other its withdrawal."""
    try:
        return function(*arguments, **options)
    except (MarkError, Refused):
        raise
    except Exception as exc:
        log.exception("unforeseen")
        raise MarkError("error", f"unforeseen {type(exc).__name__}: {exc}") from exc


class Cycle:
    """Holds what must last from one cycle to the next: since when a mark has been without evidence."""

    def __init__(
        self,
        source: EvidenceSource,
        markers: Sequence[Marker],
        policy: Policy,
        observer: Observer,
        read_monotonic: Callable[[], float],
        read_wall: Callable[[], float],
    ) -> None:
        self._source = source
        self._markers = {marker.scheduler: marker for marker in markers}
        self._policy = policy
        self._observer = observer
        self._read_monotonic = read_monotonic
        self._read_wall = read_wall
        self._supported: dict[HolderName, float] = {}  # monotonic seconds
        self._refusals: dict[HolderName, str] = {}
        self._failed = 0
        self.standing: dict[HolderName, str] = {}
        """Stage of every mark that stands after the cycle."""

    def run(self) -> str:
        """One cycle; what was missing for it, "" when all went well. Raises nothing."""
        self._failed = 0
        marks, unlisted = self._list_marks()
        problems = list(unlisted.values())
        decisions: list[Decision] = []
        wall = self._read_wall()
        try:
            evidence = self._source.read_evidence([mark.name for mark in marks])
            decisions = [d for d in decide(evidence, self._policy) if d.name.scheduler not in unlisted]
            problems += evidence.problems[:3]
        except EvidenceError as exc:  # marks then age as if their holders had no series
            problems.append(str(exc))
        except Exception as exc:  # a fault of ours must not leave marks standing
            log.exception("unforeseen")
            problems.append(f"unforeseen {type(exc).__name__}: {exc}")
        now = self._read_monotonic()
        before = {name: since for name, since in self._supported.items() if name.scheduler in unlisted}
        self._supported = before | {mark.name: self._supported.get(mark.name, now) for mark in marks}
        standing = {name: stage for name, stage in self.standing.items() if name.scheduler in unlisted}
        self.standing = standing | {mark.name: mark.stage for mark in marks}
        work = plan(decisions, marks, lambda mark: now - self._supported[mark.name] >= self._policy.unsupported_max)
        for withdrawal in work.withdrawals:
            self._withdraw(withdrawal)
        refused: set[HolderName] = set()
        for mark, decision in work.kept:
            self._supported[mark.name] = now
            if reason := self._objection(mark, decision):
                self._withdraw(Withdrawal(mark, reason))
                refused.add(mark.name)
        self._write_all([decision for decision in work.writes if decision.name not in refused], now, wall)
        if self._failed:
            problems.append(f"{self._failed} marks could not be withdrawn")
        return "; ".join(problems)

    def _list_marks(self) -> tuple[list[Mark], dict[str, str]]:
        """Every mark, and why it is not known of some schedulers what stands: there nothing is written."""
        marks: list[Mark] = []
        unlisted: dict[str, str] = {}
        for marker in self._markers.values():
            try:
                marks += guard(marker.list_marks)
            except MarkError as exc:
                self._observer.count_write(exc.result)
                unlisted[marker.scheduler] = f"{marker.scheduler} marks cannot be read: {exc}"
        return marks, unlisted

    def _objection(self, mark: Mark, decision: Decision) -> str:
        """Why the live object must not carry its mark any longer; "" when it may."""
        try:
            guard(self._markers[mark.name.scheduler].check, mark, decision, self._read_wall())
        except Refused as exc:
            return str(exc)
        except MarkError as exc:
            log.warning("%s: %s", mark.name, exc)
        return ""

    def _withdraw(self, withdrawal: Withdrawal) -> None:
        mark, reason = withdrawal
        try:
            guard(self._markers[mark.name.scheduler].withdraw, mark, reason, self._read_wall())
        except MarkError as exc:
            self._observer.count_write(exc.result)
            log.warning("%s: %s not withdrawn: %s", mark.name, mark.stage, exc)
            if exc.result != "replaced":
                self._failed += 1
                return
        else:
            self._observer.count_write("withdrawn")
            log.info("%s: withdrew %s: %s", mark.name, mark.stage, reason)
        self.standing.pop(mark.name, None)

    def _write_all(self, decisions: Sequence[Decision], now: float, wall: float) -> None:
        """Set marks on evidence of `wall`, while it is fresh: a slow API server must not make it old."""
        written = 0
        refusals: dict[HolderName, str] = {}
        for decision in decisions:
            if written >= self._policy.new_marks_max:
                self._observer.count_skip("limit")
                continue
            if not self._read_wall() - wall < self._policy.fresh_min:
                self._observer.count_skip("stale")
                continue
            try:
                guard(self._markers[decision.name.scheduler].write, decision, self._read_wall())
            except Refused as exc:
                self._observer.count_skip(exc.reason)
                refusals[decision.name] = exc.reason
                if self._refusals.get(decision.name) != exc.reason:  # once, not in every cycle
                    log.info("%s: not marked %s: %s", decision.name, decision.stage, exc)
                continue
            except MarkError as exc:
                self._observer.count_write(exc.result)
                log.warning("%s: %s not written: %s", decision.name, decision.stage, exc)
                if exc.result == "throttled":
                    break  # the next cycle is soon enough
                continue
            written += 1
            self._observer.count_write("written")
            self.standing[decision.name] = decision.stage
            self._supported[decision.name] = now
            log.info("%s: marked %s: %s", decision.name, decision.stage, decision.reason)
        self._refusals = refusals
