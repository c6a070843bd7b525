"""The dry run: its cycles write nothing, and log each mark that --apply would write, refuse or withdraw."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.plain import describe_bug
from gpu_exporter.common.tasks import Task
from gpu_exporter.reconciler.decision.brakes import SOURCE, Freeze
from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.judge import Judge
from gpu_exporter.reconciler.preview import Outlook, Preview
from gpu_exporter.reconciler.telemetry import Telemetry

log = logging.getLogger(__name__)


class DryRun:
    def __init__(
        self,
        judge: Judge,
        policy: Policy,
        telemetry: Telemetry,
        preview: Preview,
        clock: Clock,
    ) -> None:
        self._judge = judge
        self._policy = policy
        self._telemetry = telemetry
        self._preview = preview
        self._clock = clock
        self._tracker = StageTracker()
        self._last_good = clock.monotonic()
        self._last_problem = ""
        self._outlooks: Mapping[HolderName, Outlook] = {}
        self.task = Task("cycle")  # ReconcilerSite reports cycles that do not end

    def run(self) -> None:
        """Runs one cycle. Raises nothing, so that the dry run continues after any error."""
        began = self._clock.monotonic()
        problem = ""
        self._decisions: Sequence[Decision] = ()
        self._frozen = {SOURCE: Freeze("no evidence")}
        self._outlooks = {}
        try:
            problem = self._run()
            if problem and problem != self._last_problem:
                log.warning("dry run: the evidence is incomplete: %s", problem)
        except AnswerError as exc:
            problem = str(exc)
            if problem != self._last_problem:
                log.warning("dry run: the reconciler made no decisions in this cycle: %s", problem)
            if self._clock.monotonic() - self._last_good > self._policy.unsupported_max:
                self._log(self._tracker.changes([]))
        except Exception as exc:
            problem = describe_bug(exc)
            self.task.note(exc)
        self._last_problem = problem
        self._note(began, problem)

    def _note(self, began: float, problem: str) -> None:
        refused = {name: each.refused for name, each in self._outlooks.items() if each.refused}
        stands = {each.name: each.stage for each in self._decisions if each.label and each.name not in refused}
        self._telemetry.note_cycle(began, not problem, {}, self._decisions, self._frozen, refused, stands)

    def _run(self) -> str:
        judged = self._judge.judge()
        decisions, problems, self._frozen = judged.decisions, judged.problems, judged.frozen
        self._telemetry.note_odd(self._preview.odd)
        self._telemetry.note_surveyed(judged.surveyed, judged.unreadable)
        self._decisions = decisions
        outlooks = self._outlooks = self._preview.look(decisions, self._clock.wall())
        self._last_good = self._clock.monotonic()
        for notice in self._preview.notices:
            log.warning("dry run: %s", notice)
        self._preview.notices.clear()
        self._log(self._tracker.changes(decisions, outlooks))
        return "; ".join(problems)

    @staticmethod
    def _log(lines: Sequence[str]) -> None:
        for line in lines:
            log.info("dry run: %s", line)


class StageTracker:
    """Remembers for each holder the mark that --apply would write, and reports changes."""

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}

    def changes(self, decisions: Sequence[Decision], outlooks: Mapping[HolderName, Outlook] | None = None) -> list[str]:
        """Returns one sentence for each mark that --apply would now write, refuse or withdraw, if this has changed."""
        lines: list[str] = []
        labels: dict[str, str] = {}
        seen = {decision.title for decision in decisions}
        for decision in decisions:
            outlook = (outlooks or {}).get(decision.name, Outlook(decision.label))
            label = f"REFUSED: {outlook.refused}" if outlook.refused else outlook.label
            before = self._labels.get(decision.title, "")
            if label:
                labels[decision.title] = label
            if label == before:
                continue
            if outlook.refused:
                lines.append(
                    f"{decision.title}: would not write {outlook.label}: REFUSED ({outlook.refused}): {outlook.why}"
                )
            elif label:
                lines.append(f"{decision.title}: would write {label}: {decision.reason}")
            elif not before.startswith("REFUSED"):
                lines.append(f"{decision.title}: would withdraw {before}: {decision.reason}")
        for title, before in self._labels.items():
            if title not in seen and not before.startswith("REFUSED"):
                lines.append(f"{title}: would withdraw {before}: it is active or gone, or there is no evidence")
        self._labels = labels
        return lines
