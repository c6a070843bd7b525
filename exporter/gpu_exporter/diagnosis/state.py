"""The state of an allocation over the last window: first match wins, unknown comes first.

docs/concepts.md lists them for users; the windows and thresholds come from defaults.yaml.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gpu_exporter.model import Verdict


class StateRules(NamedTuple):
    """Ratios are 0 to 1, `window_s` seconds."""

    window_s: float
    coverage_min: float
    low_mean: float
    low_ratio: float
    high_ratio: float
    throttled_share: float


class Window(NamedTuple):
    """What the last window showed of one allocation.

    `values`: mean utilization per bucket, None unknown. `held_s`: how long we have seen this holder.
    `processes`: contexts on the unit now, None while unproven.
    `throttled_share`: worst share of the window in one harmful throttle reason, None unknown.
    """

    values: Sequence[float | None]
    held_s: float
    idle_run_s: float
    processes: float | None = None
    throttled_share: float | None = None
    throttled_reason: str = ""
    shared: bool = False


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of a non-empty sequence; `share` 0 to 1."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def judge_state(window: Window, rules: StateRules) -> Verdict:
    """The state of one allocation with its evidence in words."""
    known = [value for value in window.values if value is not None]
    if window.shared:
        return Verdict("unknown", "the GPU is shared and its holders cannot be told apart")
    if window.held_s < rules.coverage_min * rules.window_s:
        seen, whole = format_duration(window.held_s), format_duration(rules.window_s)
        return Verdict("unknown", f"seen for {seen}, judged over {whole}")
    if not known:
        return Verdict("unknown", "no source of activity")
    coverage = len(known) / len(window.values)
    if coverage < rules.coverage_min:
        return Verdict("unknown", f"only {coverage:.0%} of the window is known")
    mean = sum(known) / len(known)
    low, high = percentile(known, 0.05), percentile(known, 0.95)
    idle = format_duration(window.idle_run_s)
    if mean == 0.0 and window.idle_run_s > 0.0:
        if window.processes == 0.0:
            return Verdict("held_no_process", f"idle for {idle}, no process on the GPU")
        return Verdict("held_idle", f"idle for {idle}")
    if mean == 0.0:
        return Verdict("unknown", "utilization 0, but another witness is active")
    if window.throttled_share is not None and window.throttled_share > rules.throttled_share:
        return Verdict("throttled", f"{window.throttled_reason} for {window.throttled_share:.0%} of the time")
    if high >= rules.high_ratio and low < rules.low_ratio:
        return Verdict("bursty", f"p5 {low:.0%}, p95 {high:.0%}, mean {mean:.0%}")
    if mean <= rules.low_mean:
        return Verdict("low", f"mean {mean:.0%}")
    return Verdict("healthy", f"mean {mean:.0%}")


def format_duration(seconds: float) -> str:
    """`75` to `1m15s`, `7500` to `2h5m`: two largest units."""
    whole = int(seconds)
    parts = [(whole // 86400, "d"), (whole // 3600 % 24, "h"), (whole // 60 % 60, "m"), (whole % 60, "s")]
    first = next((i for i, (value, _) in enumerate(parts) if value), len(parts) - 1)
    return "".join(f"{value}{unit}" for i, (value, unit) in enumerate(parts[first : first + 2]) if value or not i)
