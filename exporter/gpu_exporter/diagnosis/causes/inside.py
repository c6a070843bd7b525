"""Evidence for the rules from the training loop's report (docs/torch.md). The job writes it, so it is no proof."""

from __future__ import annotations

from gpu_exporter.common.model.causes import HIGH, LOW, MEDIUM, Cause, numbers
from gpu_exporter.common.model.training import TrainingPace
from gpu_exporter.common.report_rules import advise_phase, are_enough
from gpu_exporter.diagnosis.causes.case import CauseCase

OF_INPUT = frozenset(("cpu_quota", "cpu_bound_input", "pinned_loaders", "too_few_workers", "small_file_io"))
ORDER = (LOW, MEDIUM, HIGH)


def find_pace(case: CauseCase) -> TrainingPace | None:
    """Returns the pace (time of each step and its parts) in the last minutes. None with too few steps."""
    pace = case.training
    if pace is None or pace.silent_s > case.rules.window:
        return None
    return pace if are_enough(pace.steps, pace.steps * (pace.step_s or 0.0)) else None


def find_compute(case: CauseCase) -> TrainingPace | None:
    """Returns the pace if the loop hardly waits for data, so that the GPU waits for something else; else None."""
    pace = find_pace(case)
    return pace if pace is not None and pace.wait is not None and pace.wait < case.rules.wait_min else None


def describe_wait(pace: TrainingPace) -> str:
    """Describes the share of each step in which the loop waits for data."""
    rank = "" if pace.waiting_rank is None or pace.ranks < 2 else f" on rank {pace.waiting_rank}"
    unseen = "" if pace.is_gpu else " (the GPU may work during this time)"
    workers = pace.facts.get("num_workers")
    has = "" if workers is None else f"; its DataLoader has {workers} worker{'s' * (workers != 1)}"
    return f"its loop waits for data in {pace.wait or 0.0:.0%} of each step{rank}{unseen}{has}"


def judge_phase(case: CauseCase, name: str, phase: str) -> Cause | None:
    """Returns the cause `name` if the loop spends much of its time in `phase`, otherwise None."""
    pace = find_pace(case)
    share = None if pace is None else pace.phases.get(phase)
    if share is None or share < case.rules.phase_min:
        return None
    advice, gain = advise_phase(phase, share)
    return Cause(
        name,
        HIGH if share >= case.rules.wait_high else MEDIUM,
        f"its loop spends {share:.0%} of its time in the phase {phase}",
        advice=advice,
        gain=gain,
        values=numbers(phase_ratio=share),
    )


def add_inside(case: CauseCase, cause: Cause) -> Cause:
    """Adds the loop's report to a cause of slow input: a wait for data raises the confidence, no wait lowers it.

    The report never raises the confidence of a cause that delays a mark, because a job could write a false report.
    """
    pace = find_pace(case)
    if pace is None or pace.wait is None or cause.name not in OF_INPUT or describe_wait(pace) in cause.evidence:
        return cause
    step = ORDER.index(cause.confidence)
    if pace.wait >= case.rules.wait_min:
        is_proof = pace.is_gpu and pace.wait >= case.rules.wait_high
        confidence = ORDER[min(step + is_proof, len(ORDER) - 1)]
        return cause._replace(confidence=confidence, evidence=f"{cause.evidence}; {describe_wait(pace)}")
    if cause.name == "cpu_quota":
        return cause
    against = "; ".join(filter(None, (cause.against, f"its loop waits for data in only {pace.wait:.0%} of each step")))
    return cause._replace(confidence=LOW, against=against)
