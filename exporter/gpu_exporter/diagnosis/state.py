"""Judges the state of an allocation over the last window. The first matching rule decides; unknown comes first.

docs/concepts.md lists the states for users; windows and most thresholds come from defaults.yaml.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.model.readings import WITNESSES_MIN
from gpu_exporter.common.model.views import HourOfWork, Spin, Verdict
from gpu_exporter.diagnosis.stalls.hour import HOUR_S
from gpu_exporter.diagnosis.stalls.rules import StallRules


class StateRules(NamedTuple):
    """Thresholds of the states. Ratios are 0 to 1, `window_s` is in seconds."""

    window_s: float
    coverage_min: float
    low_mean: float
    low_ratio: float
    high_ratio: float
    throttled_share: float
    inefficient_sm: float = 0.25
    """In the state busy_inefficient, SM activity is below this, and utilization above diagnosis.low_mean."""
    inefficient_dram: float = 0.5
    """In the state busy_inefficient, memory activity is below this. Above it, the kernel waits for memory."""
    inefficient_over_s: float = HOUR_S
    """Seconds over which the state busy_inefficient is judged."""
    spin_min: float = StallRules().utilization_min
    """A GPU with at least this utilization may only be waiting."""


def state_rules(settings: Settings) -> StateRules:
    return StateRules(
        window_s=settings.diagnosis.window,
        coverage_min=settings.diagnosis.coverage_min,
        low_mean=settings.diagnosis.low_mean,
        low_ratio=settings.ledger.low_ratio,
        high_ratio=settings.ledger.high_ratio,
        throttled_share=settings.diagnosis.throttled_share,
    )


class Window(NamedTuple):
    """The last window of one allocation. None is unknown.

    - `values`: mean utilization per bucket. `held_s`: how long the exporter has seen this holder.
    - `idle_run_s`: length of the present idle run. `witnesses`: the fewest witnesses that were read in any part of this
      run.
    - `active_by`: the witnesses of the unit's last activity (UnitTotals). `processes`: number of contexts on the unit
      now.
    - `throttled_share`: share of the window with the longest harmful throttle reason.
    - `lag_s`: the age of the newest readings here; later readings wait until the holder is confirmed.
    - `gap`: why a part of the time is unknown, "" without a reason. `note`: why the GPU's power is not used, "" if it
      is.
    - `spin`: the run without progress. `hour`: means of the last hour.
    """

    values: Sequence[float | None]
    held_s: float
    idle_run_s: float | None
    active_by: Sequence[str] = ()
    processes: float | None = None
    throttled_share: float | None = None
    throttled_reason: str = ""
    lag_s: float = 15.0
    gap: str = ""
    note: str = ""
    witnesses: int = WITNESSES_MIN
    spin: Spin | None = None
    hour: HourOfWork | None = None


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the nearest-rank percentile of a non-empty sequence. `share`: 0 to 1."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def judge_state(window: Window, rules: StateRules) -> Verdict:
    """Returns the state of one allocation, with its evidence as text."""
    verdict = _judge(window, rules)
    return verdict._replace(evidence=f"{verdict.evidence}; {window.note}") if window.note else verdict


def _judge(window: Window, rules: StateRules) -> Verdict:
    known = [value for value in window.values if value is not None]
    if window.held_s < rules.coverage_min * rules.window_s:
        seen, whole = describe_duration(window.held_s), describe_duration(rules.window_s)
        return Verdict("unknown", f"seen for only {seen}; a state needs {whole}")
    if not known:
        return Verdict("unknown", window.gap or "no source of activity")
    coverage = len(known) / len(window.values)
    if coverage < rules.coverage_min:
        return Verdict(
            "unknown", f"only {coverage:.0%} of the window is known{f': {window.gap}' if window.gap else ''}"
        )
    mean = sum(known) / len(known)
    low, high = percentile(known, 0.05), percentile(known, 0.95)
    if mean == 0.0:
        return _judge_zero(window, coverage * min(window.held_s, rules.window_s) - window.lag_s)
    if window.spin is not None and window.spin.is_stall:
        return Verdict("stalled", _describe_stall(window.spin))
    if window.throttled_share is not None and window.throttled_share > rules.throttled_share:
        return Verdict("throttled", f"{window.throttled_reason} for {window.throttled_share:.0%} of the time")
    if high >= rules.high_ratio and low < rules.low_ratio:
        return Verdict("bursty", f"p5 {low:.0%}, p95 {high:.0%}, mean {mean:.0%}")
    if mean <= rules.low_mean:
        return Verdict("low", f"mean {mean:.0%}")
    if low >= rules.spin_min and window.spin is not None and window.spin.is_blind:
        return Verdict(
            "unknown", f"mean {mean:.0%}, but it is unknown whether the holder makes progress: {window.spin.unknown}"
        )
    if window.hour is not None and _is_inefficient(window.hour, rules):
        hour, over = window.hour, describe_duration(rules.inefficient_over_s)
        few = f"{hour.sm:.0%} of the SMs had work and {hour.dram:.0%} of the memory bandwidth was used"
        return Verdict("busy_inefficient", f"mean {hour.utilization:.0%} over {over}, but {few}")
    return Verdict("healthy", f"mean {mean:.0%}")


def _is_inefficient(hour: HourOfWork, rules: StateRules) -> bool:
    """Whether few SMs have work while the GPU is busy. If it uses much memory bandwidth, it is not inefficient."""
    return hour.utilization > rules.low_mean and hour.sm < rules.inefficient_sm and hour.dram < rules.inefficient_dram


def _describe_stall(spin: Spin) -> str:
    which = "it hangs" if spin.confidence == "high" else "it waits or hangs"  # first: a row's WHY is cut at its end
    text = f"no progress for {describe_duration(spin.run_s)}, {which} ({spin.confidence} confidence): {spin.evidence}"
    return f"{text}; against it: {spin.against}" if spin.against else text


def _judge_zero(window: Window, needed_s: float) -> Verdict:
    """The state if utilization was 0 in all known time. The state is idle only if all witnesses were quiet as long."""
    run_s = window.idle_run_s or 0.0
    idle = describe_duration(run_s)
    witnesses = f"{' and '.join(window.active_by)} showed activity" if window.active_by else ""
    if run_s <= 0.0:
        return Verdict("unknown", f"utilization 0, but {witnesses or 'not all witnesses are known'}")
    if run_s < needed_s:
        before = f"{witnesses} before" if witnesses else "the time before the idle time is unknown"
        return Verdict("unknown", f"utilization 0, but idle only for {idle}: {before}")
    if window.witnesses < WITNESSES_MIN:
        return Verdict("unknown", f"idle for {idle}, but only one witness shows it: this GPU reports no other witness")
    if window.processes == 0.0:
        return Verdict("held_no_process", f"idle for {idle}, no process on the GPU")
    return Verdict("held_idle", f"idle for {idle}")
