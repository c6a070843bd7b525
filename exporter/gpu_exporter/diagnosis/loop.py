"""Judges every allocation at a fixed interval, in a thread of its own. Scrapes only read the results."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.causes import Causes
from gpu_exporter.common.model.holders import AllocationId
from gpu_exporter.common.model.readings import DeviceSnapshot
from gpu_exporter.common.model.views import Throttling, Verdict
from gpu_exporter.common.tasks import Task
from gpu_exporter.diagnosis.causes.case import CauseCase
from gpu_exporter.diagnosis.causes.numbers import cause_rules
from gpu_exporter.diagnosis.hold import StateHold
from gpu_exporter.diagnosis.links import LinkHistory
from gpu_exporter.diagnosis.state import Window, judge_state, state_rules
from gpu_exporter.diagnosis.throttling import ThrottleHistory

LATE_S = 60.0  # a judgement takes milliseconds


class Subject(NamedTuple):
    """One allocation to be judged. `unknown`: why its state is unknown, "" if `window` can be judged."""

    id: AllocationId
    unknown: str
    window: Window


class DiagnosisInput(NamedTuple):
    """The input of one judgement: snapshots of the GPUs that answer, and all allocations.

    `describe`: takes an allocation, and returns the input of the rules for causes, None if it is no longer shown.
    """

    snapshots: Sequence[DeviceSnapshot]
    subjects: Sequence[Subject]
    describe: Callable[[AllocationId], CauseCase | None] = lambda subject: None


class Findings(NamedTuple):
    """The results of the last judgement.

    `throttling`: the throttling of each GPU where it is known, by UUID. `causes`: causes of the published states.
    `unwell`: allocations with a present state other than healthy, even if the state is not published yet.
    """

    verdicts: Mapping[AllocationId, Verdict] = {}
    throttling: Mapping[str, Throttling] = {}
    causes: Mapping[AllocationId, Causes] = {}
    unwell: frozenset[AllocationId] = frozenset()


class DiagnosisLoop:
    """Judges at intervals. Any thread may read `findings`: a judgement replaces it as a whole."""

    def __init__(self, settings: Settings, gather: Callable[[], DiagnosisInput], clock: Clock) -> None:
        self.findings = Findings()
        self._rules = state_rules(settings)
        self._interval_s = settings.diagnosis.interval
        self._gather = gather
        self._clock = clock
        self._hold = StateHold(settings.diagnosis.hold)
        self._throttling: dict[str, ThrottleHistory] = {}
        self._cause_rules = cause_rules(settings)
        self._links: dict[str, LinkHistory] = {}
        self.task = Task("diagnosis", LATE_S + 3 * self._interval_s)

    def run(self, stop: threading.Event) -> None:
        """Judges at the configured interval until `stop`."""
        while not stop.is_set():
            with self.task:
                try:
                    self.judge()
                except Exception:  # after a bug in the exporter, old findings must not remain published
                    self.findings = Findings()
                    raise
            self._clock.wait(stop, self._interval_s)

    def judge(self) -> None:
        evidence = self._gather()
        for snapshot in evidence.snapshots:
            uuid = snapshot.identity.uuid
            self._throttling.setdefault(uuid, ThrottleHistory(self._rules.window_s)).add(snapshot)
            self._links.setdefault(uuid, LinkHistory(self._rules.window_s)).add(snapshot)
        worst = {uuid: history.worst() for uuid, history in self._throttling.items()}
        throttling = {uuid: found for uuid, found in worst.items() if found is not None}
        judged = {subject.id: self._judge(subject, throttling) for subject in evidence.subjects}
        verdicts = self._hold.publish(self._clock.monotonic(), judged)
        causes = self._find_all_causes(evidence, verdicts)
        unwell = frozenset(key for key, verdict in judged.items() if verdict.state != "healthy")
        self.findings = Findings(verdicts, throttling, causes, unwell)

    def _find_all_causes(
        self, evidence: DiagnosisInput, verdicts: Mapping[AllocationId, Verdict]
    ) -> dict[AllocationId, Causes]:
        known = [each.id for each in evidence.subjects if not each.unknown]
        if not known:
            return {}
        # Imported here, because a node without holders does not need these 27 modules.
        from gpu_exporter.diagnosis.causes.rules import STATES, find_causes

        found: dict[AllocationId, Causes] = {}
        for key in known:
            case = evidence.describe(key) if verdicts[key].state in STATES else None
            if case is None:
                continue
            history = self._links.get(case.uuid)
            link, text = (history.best() if history is not None else None) or (None, "")
            case = case._replace(state=verdicts[key].state, link=link, link_text=text, rules=self._cause_rules)
            try:
                found[key] = find_causes(case)
            except Exception as exc:  # a bug in one rule must not cost the states of all holders
                self.task.note(exc)
                found[key] = Causes()
        return found

    def _judge(self, subject: Subject, throttling: Mapping[str, Throttling]) -> Verdict:
        if subject.unknown:
            return Verdict("unknown", subject.unknown)
        unit, _ = subject.id
        worst, window = throttling.get(unit.uuid), subject.window
        if worst is not None:
            window = window._replace(throttled_reason=worst.reason, throttled_share=worst.ratio)
        return judge_state(window, self._rules)
