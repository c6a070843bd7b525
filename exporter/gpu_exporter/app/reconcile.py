"""`reconcile`: read evidence, decide, print what would be written; with --apply write it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence

from gpu_exporter.app.serve import repeat, stop_on_signal
from gpu_exporter.defaults import Policy
from gpu_exporter.reconciler.cycle import Cycle, guard
from gpu_exporter.reconciler.direct import ExporterSource
from gpu_exporter.reconciler.evidence import EvidenceError, EvidenceSource
from gpu_exporter.reconciler.jobs import JobMarker
from gpu_exporter.reconciler.marks import Marker, MarkError
from gpu_exporter.reconciler.policy import Decision, decide
from gpu_exporter.reconciler.promql import PromQLSource
from gpu_exporter.reconciler.report import decisions_json, explain, render_decisions
from gpu_exporter.reconciler.telemetry import Telemetry

log = logging.getLogger(__name__)


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


def build_markers(kubernetes: bool | None, kubeconfig: str, slurm: bool | None) -> list[Marker]:
    """Where marks go: None means wherever there is a way. Raises ValueError when there is none, MarkError."""
    markers: list[Marker] = []
    if kubernetes is not False:
        try:
            from gpu_exporter.reconciler.pods import PodMarker, connect, is_in_cluster
        except ModuleNotFoundError as exc:
            if kubernetes or kubeconfig:
                hint = "pip install 'gpu-exporter[reconciler]'"
                raise ValueError(f"pods need the kubernetes client: {hint} ({exc})") from exc
        else:
            if kubernetes or kubeconfig or is_in_cluster():
                markers.append(PodMarker(connect(kubeconfig)))
    if slurm or (slurm is None and JobMarker.is_present()):
        markers.append(JobMarker())
    if not markers:
        raise ValueError("--apply finds neither a service account or --kubernetes.kubeconfig nor squeue and scontrol")
    return markers


def apply_forever(
    source: EvidenceSource, markers: Sequence[Marker], policy: Policy, interval_s: float, telemetry: Telemetry
) -> int:
    """Cycle and write until a signal."""
    cycle = Cycle(source, markers, policy, telemetry, time.monotonic, time.time)
    last_problem = ""

    def tick() -> None:
        nonlocal last_problem
        problem = _apply_cycle(cycle, telemetry)
        if problem != last_problem:  # once, not in every cycle
            if problem:
                log.warning("cycle incomplete: %s", problem)
            else:
                log.info("cycles are complete again")
        last_problem = problem

    repeat(tick, interval_s, stop_on_signal())
    return 0


def apply_once(source: EvidenceSource, markers: Sequence[Marker], policy: Policy, telemetry: Telemetry) -> int:
    """One cycle that writes; the exit code. Marks without evidence go at once: a single cycle cannot wait for it."""
    policy = policy._replace(unsupported_max=0.0)
    problem = _apply_cycle(Cycle(source, markers, policy, telemetry, time.monotonic, time.time), telemetry)
    if problem:
        log.warning("cycle incomplete: %s", problem)
    return 4 if problem else 0


def _apply_cycle(cycle: Cycle, telemetry: Telemetry) -> str:
    began = time.monotonic()
    problem = cycle.run()
    telemetry.note_cycle(began, not problem, cycle.standing)
    return problem


def remove_all(markers: Sequence[Marker], apply: bool) -> int:
    """Print every mark, withdraw it when told to; the exit code. Raises MarkError when they cannot be listed."""
    code = 0
    for marker in markers:
        for mark in guard(marker.list_marks):
            outcome = "would be withdrawn with --apply"
            if apply:
                try:
                    guard(marker.withdraw, mark, "all marks are removed", time.time())
                    outcome = "withdrawn"
                except MarkError as exc:
                    outcome = f"not withdrawn: {exc}"
                    code = 4
            print(f"{mark.name}: {mark.stage}: {outcome}")  # noqa: T201
    return code


def reconcile_forever(source: EvidenceSource, policy: Policy, interval_s: float, telemetry: Telemetry) -> int:
    """Cycle until a signal; log each holder's change of stage."""
    tracker = StageTracker()
    last_good = time.monotonic()
    last_problem = ""

    def tick() -> None:
        nonlocal last_good, last_problem
        began = time.monotonic()
        try:
            evidence = source.read_evidence()
            decisions = decide(evidence, policy)
        except EvidenceError as exc:
            if str(exc) != last_problem:
                log.warning("nothing decided: %s", exc)
            last_problem = str(exc)
            telemetry.note_cycle(began, False, {})
            if time.monotonic() - last_good > policy.unsupported_max:
                for line in tracker.changes([]):
                    log.info("dry run: %s", line)
            return
        telemetry.note_cycle(began, not evidence.problems, {})
        last_good, last_problem = time.monotonic(), ""
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
