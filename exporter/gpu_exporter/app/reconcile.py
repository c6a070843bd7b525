"""`reconcile`: read evidence, decide, print what would be written. Nothing is written."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence

from gpu_exporter.app.serve import repeat, stop_on_signal
from gpu_exporter.defaults import Policy
from gpu_exporter.reconciler.direct import ExporterSource
from gpu_exporter.reconciler.evidence import EvidenceError, EvidenceSource
from gpu_exporter.reconciler.policy import Decision, decide
from gpu_exporter.reconciler.promql import PromQLSource
from gpu_exporter.reconciler.report import decisions_json, explain, render_decisions

log = logging.getLogger(__name__)
EVIDENCE_MAX_AGE_S = 600.0  # without evidence for this long every label is withdrawn


def build_source(prometheus: str, exporters: Sequence[str], matcher: str, policy: Policy) -> EvidenceSource:
    """The PromQL API when one is given, else the exporters. Raises ValueError."""
    if bool(prometheus) == bool(exporters):
        raise ValueError("exactly one of --source.prometheus and --source.exporter is needed")
    if prometheus:
        return PromQLSource(prometheus, policy.candidate_after, policy.underused_after, time.time, matcher)
    return ExporterSource(exporters, policy.underused_after, time.time)


def reconcile_once(source: EvidenceSource, policy: Policy, form: str, explained: str) -> int:
    """One cycle; the exit code. With `explained`, only that holder, in full."""
    try:
        evidence = source.read_evidence()
    except EvidenceError as exc:
        print(f"gpu-exporter: nothing decided: {exc}", file=sys.stderr)  # noqa: T201
        return 3
    decisions = decide(evidence, policy)
    for problem in evidence.problems:
        print(f"gpu-exporter: not seen: {problem}", file=sys.stderr)  # noqa: T201
    code = 4 if evidence.problems else 0
    if explained:
        chosen = [d for d in decisions if explained in (str(d.name), d.name.name, f"job/{d.name.name}")]
        if not chosen:
            print(  # noqa: T201
                f"gpu-exporter: {explained}: no such holder in the evidence; "
                f"{len(decisions)} others are (a PromQL source lists only holders with a long idle run)",
                file=sys.stderr,
            )
            return 2
        sys.stdout.write("".join(explain(decision, policy) for decision in chosen))
        return code
    sys.stdout.write(decisions_json(decisions) if form == "json" else render_decisions(decisions, evidence))
    return code


def reconcile_forever(source: EvidenceSource, policy: Policy, interval_s: float) -> int:
    """Cycle until a signal; log each holder's change of stage."""
    tracker = StageTracker()
    last_good = time.monotonic()

    def tick() -> None:
        nonlocal last_good
        try:
            decisions = decide(source.read_evidence(), policy)
        except EvidenceError as exc:
            log.warning("nothing decided: %s", exc)
            if time.monotonic() - last_good > EVIDENCE_MAX_AGE_S:
                for line in tracker.changes([]):
                    log.info("dry run: %s", line)
            return
        last_good = time.monotonic()
        for line in tracker.changes(decisions):
            log.info("dry run: %s", line)

    repeat(tick, interval_s, stop_on_signal())
    return 0


class StageTracker:
    """Remembers each holder's stage and tells what changed."""

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}

    def changes(self, decisions: Sequence[Decision]) -> list[str]:
        """One sentence per label that would be written or withdrawn now."""
        lines: list[str] = []
        present = {str(decision.name): decision for decision in decisions}
        for name, decision in present.items():
            before = self._labels.get(name, "")
            if decision.label != before:
                action = f"would write {decision.label}" if decision.label else f"would withdraw {before}"
                lines.append(f"{name}: {action}: {decision.reason}")
        for name in self._labels.keys() - present.keys():
            lines.append(f"{name}: would withdraw {self._labels[name]}: active, gone, or no evidence")
        self._labels = {name: d.label for name, d in present.items() if d.label}
        return lines
