"""Runs one cycle that writes: reads the existing marks and the evidence, decides, withdraws, marks, renews.

Withdrawals come first and are never limited. Two kinds of marks are withdrawn before the source is queried:

- marks on live objects that must not carry a mark;
- marks that no evidence has supported for too long. If the source answered in the last cycle, these wait for its next
  answer (at most EVIDENCE_S), which may support them again.

A cycle sets the marks that evidence supports, up to its limits. Every marked object carries the time of its evidence,
which is renewed while the evidence lasts. Without evidence for or against it, a mark remains until
`policy.unsupported_max` after that time. Marks are stored only on the live objects, so a restarted reconciler takes
over the marks that it finds, with their age.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.plain import describe_bug
from gpu_exporter.common.tasks import Task
from gpu_exporter.reconciler.audit import AuditLog
from gpu_exporter.reconciler.decision.brakes import SOURCE, Freeze
from gpu_exporter.reconciler.decision.outcomes import tenant_of
from gpu_exporter.reconciler.decision.policy import SHARING, UNDERUSED, Decision, Windows, windows_of
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.judge import Judge
from gpu_exporter.reconciler.marks import Mark, Marker, MarkError, Refused, guard, sum_odd
from gpu_exporter.reconciler.plan import Limits, Withdrawal, evidence_age, holder_of, is_due, plan
from gpu_exporter.reconciler.telemetry import Telemetry

log = logging.getLogger(__name__)
HOUR_S = 3600.0
ENDED_MAX = 200  # withdrawals per cycle of marks on ended holders; these marks are harmless and can wait
RENEWALS_MAX = 200  # per cycle, the oldest first: at 4 ms for a patch, a second of the API server's time


class CycleHooks(NamedTuple):
    """The functions that a cycle calls, beside those of its markers.

    `may_write`: called before each write; False while another process writes. `audit`: None for no audit log. `act`:
    called at the end of a cycle with the decisions on marked underused holders; None for no actions.
    """

    may_write: Callable[[], bool] = lambda: True
    audit: AuditLog | None = None
    act: Callable[[Sequence[Decision]], None] | None = None


HOOKS = CycleHooks()


class ReconcileCycle:
    """Runs cycles. Remembers the existing marks and the logged refusals from one cycle to the next."""

    def __init__(
        self,
        judge: Judge,
        markers: Sequence[Marker],
        policy: Policy,
        telemetry: Telemetry,
        clock: Clock,
        hooks: CycleHooks = HOOKS,
        *,
        once: bool = False,
    ) -> None:
        """`once`: this process runs a single cycle. It reads the evidence first, and then immediately withdraws every
        mark that the evidence does not support. It does not judge the age of a mark before that, because in a cron job
        this age is only the time since the last run.
        """
        self._once = once
        self._may_write = hooks.may_write
        self._audit = hooks.audit
        self._act = hooks.act
        self._judge = judge
        self._markers = {marker.scheduler: marker for marker in markers}
        self._policy = policy
        self._telemetry = telemetry
        self._clock = clock
        self._refusals: dict[HolderName, str] = {}
        self._failed = 0
        self._windows: dict[HolderName, Windows] = {}  # of the last decision on each holder
        self._set_at: dict[tuple[HolderName, str], tuple[float, str]] = {}  # first mark; its tenant
        self._patient_until: dict[str, float] = {}  # by scheduler: it asked for no requests until then (monotonic)
        # Whether the last cycle had evidence. False at first, unless `once`: a process that crashes while it reads
        # evidence must still withdraw marks.
        self._had_evidence = once
        self.standing: dict[HolderName, str] = {}
        """Stage of every mark that exists after the cycle."""
        self.frozen: dict[str, Freeze] = {}
        """The active brakes, by reason. The brake `source` is active while there is no evidence."""
        self.decisions: Sequence[Decision] = ()
        """The decisions of the last cycle on every holder of the evidence; empty if there was no evidence."""
        self.unmarked: dict[HolderName, str] = {}
        """Holders whose mark the last cycle withdrew or did not set, each with the reason in one word."""
        self.surveyed = 0
        self.unreadable: Sequence[tuple[str, str]] = ()
        """For each holder whose pod, owner or namespace cannot be read, the reason and the kind of that object."""
        self.task = Task("cycle")  # ReconcilerSite reports cycles that do not end

    @property
    def rest_s(self) -> float:
        """Pause after the start of a cycle (seconds) before the next cycle may start; 0 unless a scheduler was slow."""
        return max((marker.rest_s for marker in self._markers.values()), default=0.0)

    @property
    def foreign(self) -> int:
        """The sum of Marker.foreign over all markers."""
        return sum(marker.foreign for marker in self._markers.values())

    @property
    def odd(self) -> Mapping[tuple[str, str], int]:
        """The sum of Marker.odd over all markers."""
        return sum_odd(self._markers.values())

    def run(self) -> str:
        """Runs one cycle. Returns its problems, "" for none.

        Returns an unexpected error as a problem, so that the process continues: later cycles have to withdraw marks.
        """
        try:
            return "; ".join(self._run())
        except Exception as exc:
            self.task.note(exc)
            return describe_bug(exc)

    def _run(self) -> list[str]:
        self._failed, self.unmarked = 0, {}
        marks, unlisted = self._list_marks()
        problems = list(unlisted.values())
        wall = self._clock.wall()
        unlisted_marks = {name: stage for name, stage in self.standing.items() if name.scheduler in unlisted}
        self.standing = unlisted_marks | {mark.name: mark.stage for mark in marks}
        gone = self._withdraw_at_once(marks, wall)
        decisions = [d for d in self._decide(marks, unlisted, problems) if d.name not in gone]
        policy = self._policy._replace(unsupported_max=0.0) if self._once else self._policy
        work = plan(decisions, [mark for mark in marks if mark.name not in gone], wall, policy)
        for withdrawal in work.withdrawals:
            self._withdraw(withdrawal)
        refused = self._check_all([*work.kept, *work.waiting])
        writes = [decision for decision in work.writes if decision.name not in refused]
        if any(freeze.names is None for freeze in self.frozen.values()):  # existing sharing marks may remain
            writes = [decision for decision in writes if decision.stage != SHARING]
        written = self._write_all(writes, wall)
        kept = [(mark, decision) for mark, decision in work.kept if mark.name not in refused | written]
        self._renew_all(kept, wall)
        if self._act is not None:
            self._act([each for mark, each in kept if mark.stage == each.stage == UNDERUSED])
        if self._failed:
            problems.append(f"{self._failed} marks could not be withdrawn")
        return problems

    def _withdraw_at_once(self, marks: Sequence[Mark], wall: float) -> set[HolderName]:
        """Withdraws the marks that can be withdrawn without evidence. Returns their holders, which get no other mark in
        this cycle.
        """
        withdrawals, running = plan([], marks, wall, self._policy).withdrawals, [m for m in marks if not m.ended]
        if self._had_evidence:
            withdrawals = [each for each in withdrawals if each.mark.ended]
        gone = {withdrawal.mark.name for withdrawal in withdrawals}
        self.unmarked |= {each.mark.name: "ended" if each.mark.ended else "stale" for each in withdrawals}
        ended = [each for each in withdrawals if each.mark.ended]
        for withdrawal in (*(each for each in withdrawals if not each.mark.ended), *ended[:ENDED_MAX]):
            self._withdraw(withdrawal)
        return gone | self._check_all([(mark, None) for mark in running if mark.name not in gone])

    def _decide(self, marks: Sequence[Mark], unlisted: Collection[str], problems: list[str]) -> list[Decision]:
        """Returns the decisions on holders whose marks can be written. After any error, the list is empty.

        Adds a text to `problems` for missing evidence. Without decisions, marks age as if their holders had no series.
        """
        self._had_evidence, self.decisions, self.frozen = False, (), {SOURCE: Freeze("no evidence")}
        try:
            judged = self._judge.judge(marks={mark.name: mark.stage for mark in marks})
            decisions, self.frozen = judged.decisions, judged.frozen
            problems += judged.problems
            self.surveyed, self.unreadable = judged.surveyed, judged.unreadable
            self._had_evidence, self.decisions = True, decisions
            self._windows = {each.name: each.windows for each in decisions if each.windows is not None}
        except AnswerError as exc:
            problems.append(str(exc))
            return []
        except Exception as exc:  # a fault of the reconciler must not leave marks in place
            self.task.note(exc)
            problems.append(describe_bug(exc))
            return []
        for decision in decisions:
            if decision.label and decision.name.scheduler not in self._markers:
                self._telemetry.count_skip("no_marker")
                self.unmarked[decision.name] = "no_marker"
            elif decision.name.scheduler in unlisted:
                self.unmarked[decision.name] = "error"
        return [d for d in decisions if d.name.scheduler in self._markers and d.name.scheduler not in unlisted]

    def _list_marks(self) -> tuple[list[Mark], dict[str, str]]:
        """All marks, and the error of each scheduler whose marks cannot be read. Nothing is written there."""
        marks: list[Mark] = []
        unlisted: dict[str, str] = {}
        for marker in self._markers.values():
            try:
                marks += guard(marker.list_marks)
            except MarkError as exc:
                self._telemetry.count_write(exc.result)
                unlisted[marker.scheduler] = f"{marker.scheduler} marks cannot be read: {exc}"
        return marks, unlisted

    def _check_all(self, pairs: Sequence[tuple[Mark, Decision | None]]) -> set[HolderName]:
        """Compares live objects with the evidence, if there is any. Withdraws marks that these objects must not carry.

        Returns the holders of the withdrawn marks. A mark must meet the conditions of its own stage. The conditions of
        a higher stage are checked when the higher mark is written.
        """
        wall = self._clock.wall()
        refused: set[HolderName] = set()
        for mark, decision in pairs:
            marker = self._markers[mark.name.scheduler]
            windows = decision.windows if decision is not None else self._windows.get(mark.name)
            needed = (windows or windows_of(self._judge.book.loosest)).needed_s(mark.stage)
            try:
                if decision is None or decision.stage == "unknown":
                    guard(marker.check_alone, mark, decision, needed, wall)
                else:
                    guard(marker.check, mark, decision._replace(needed_s=needed), wall)
            except Refused as exc:
                self._withdraw(Withdrawal(mark, str(exc), decision))
                refused.add(mark.name)
                self.unmarked[mark.name] = exc.reason
            except MarkError as exc:
                log.warning("%s: %s", mark.title, exc)
        return refused

    def _withdraw(self, withdrawal: Withdrawal) -> None:
        mark, reason, decision = withdrawal
        if not self._may_write():
            self._telemetry.count_write("fenced")
            self._failed += 1
            return
        try:
            guard(self._markers[mark.name.scheduler].withdraw, mark, reason, self._clock.wall())
        except MarkError as exc:
            self._telemetry.count_write(exc.result)
            log.warning("%s: %s not withdrawn: %s", mark.title, mark.stage, exc)
            if exc.result != "replaced":
                self._failed += 1
                return
        else:
            self._telemetry.count_write("withdrawn")
            if self._audit is not None:
                self._audit.note_withdrawn(mark, reason, decision)
            log.info("%s: withdrew %s: %s", mark.title, mark.stage, reason)
        self.standing.pop(mark.name, None)

    def _write_all(self, decisions: Sequence[Decision], wall: float) -> set[HolderName]:
        """Sets marks while the evidence of `wall` is fresh; slow writes make it stale. Returns the marked holders."""
        written: set[HolderName] = set()
        refusals: dict[HolderName, str] = {}
        now = self._clock.monotonic()
        self._set_at = {holder: seen for holder, seen in self._set_at.items() if now - seen[0] < HOUR_S}
        marked = Counter(tenant for _, tenant in self._set_at.values())
        limits = Limits(self._policy, frozenset(self._set_at))
        stopped = ""

        def turn(decision: Decision) -> tuple[bool, bool, int]:
            # A tenant can remove its marks again and again, so others come first.
            return decision.stage == SHARING, holder_of(decision) in limits.hour, marked[tenant_of(decision)]

        for decision in sorted(decisions, key=turn):
            if why := stopped or self._why_not_now(decision, limits, wall):
                self.unmarked[decision.name] = why
                if not stopped:
                    self._telemetry.count_skip(why)
                continue
            if not self._may_write():
                self._telemetry.count_write("fenced")
                self.unmarked[decision.name] = stopped = "fenced"
                continue
            try:
                field = guard(self._markers[decision.name.scheduler].write, decision, self._clock.wall())
            except Refused as exc:
                self._telemetry.count_skip(exc.reason)
                self.unmarked[decision.name] = refusals[decision.name] = exc.reason
                if self._refusals.get(decision.name) != exc.reason:  # logged once, not in every cycle
                    log.info("%s: not marked %s: %s", decision.title, decision.stage, exc)
                continue
            except MarkError as exc:
                self._telemetry.count_write(exc.result)
                self.unmarked[decision.name] = exc.result
                log.warning("%s: %s not written: %s", decision.title, decision.stage, exc)
                if exc.result == "throttled":
                    self._be_patient(decision.name, exc)
                    stopped = "throttled"  # the next cycle tries again
                continue
            self.unmarked.pop(decision.name, None)
            written.add(decision.name)
            limits.count(decision)
            self._set_at.setdefault(holder_of(decision), (self._clock.monotonic(), tenant_of(decision)))
            self._telemetry.count_write("written")
            if self._audit is not None:
                self._audit.note_marked(decision, field)
            self.standing[decision.name] = decision.stage
            log.info("%s: marked %s: %s", decision.title, decision.stage, decision.reason)
        self._refusals = refusals
        return written

    def _why_not_now(self, decision: Decision, limits: Limits, wall: float) -> str:
        """Why a mark must wait for a later cycle, in one word; "" if it need not."""
        if self._is_patient(decision.name):
            return "throttled"
        if not limits.allow(decision):
            return "limit"
        return "" if self._is_fresh(wall) else "stale"

    def _renew_all(self, kept: Sequence[tuple[Mark, Decision]], wall: float) -> None:
        """Renews the time of the evidence on marked objects, the oldest first.

        A failed renewal has no effect while evidence lasts. If the evidence then ends, the mark is withdrawn earlier.
        """
        due = [(mark, decision) for mark, decision in kept if is_due(mark, wall, self._policy)]
        due.sort(key=lambda pair: evidence_age(pair[0], wall, self._policy), reverse=True)
        for mark, decision in due[:RENEWALS_MAX]:
            if not (self._is_fresh(wall) and self._may_write()):
                return
            if self._is_patient(mark.name):
                continue
            try:
                guard(self._markers[mark.name.scheduler].renew, mark, decision)
            except Refused as exc:
                log.warning("%s: evidence not renewed: %s", mark.title, exc)
            except MarkError as exc:
                self._telemetry.count_write(exc.result)
                log.warning("%s: evidence not renewed: %s", mark.title, exc)
                if exc.result == "throttled":
                    self._be_patient(mark.name, exc)
                    return
            else:
                self._telemetry.count_write("renewed")

    def _be_patient(self, name: HolderName, error: MarkError) -> None:
        self._patient_until[name.scheduler] = self._clock.monotonic() + error.patience_s

    def _is_patient(self, name: HolderName) -> bool:
        return self._clock.monotonic() < self._patient_until.get(name.scheduler, -math.inf)

    def _is_fresh(self, wall: float) -> bool:
        return self._clock.wall() - wall < self._policy.fresh_min
