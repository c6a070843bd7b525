"""Hours by hour of the period, and the capacity, from the recordings of alerts/rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gpu_exporter.common.promql.vector import VectorRow
from gpu_exporter.reports.history.asking import History, WindowSpan
from gpu_exporter.reports.usage.model import IDLE, PARTS, STALLED, UNKNOWN, UNPROVEN, USED, Capacity, GpuHours

HOUR_S = 3600.0
WINDOW = "3599s"  # in Prometheus 2, a window contains the samples at both of its ends: 61 of an hour
RECORDED_MIN = 0.95  # share of an hour that the rules must have recorded, otherwise the hour is unknown
TOLD = frozenset((IDLE, STALLED, UNKNOWN, UNPROVEN, USED))  # values of the label `part` of tenant:gpu_gpus:rate5m
FREE, NOT_HELD = "free", frozenset(("free", "closed", "outside", "no_data"))  # ... of namespace:gpu_gpus:sum


def read_hours(
    history: History, recording: str, interval_s: float, start: float, end: float
) -> dict[float, GpuHours | None]:
    """Returns the hours of the period between two times (Unix seconds). An hour that the rules did not record is None.
    `recording`: tenant:gpu_gpus:rate5m with the site's matchers. `interval_s`: seconds between two of its values.
    """
    span = WindowSpan(-(-start // HOUR_S) * HOUR_S, end // HOUR_S * HOUR_S, HOUR_S)
    if span.windows < 1:
        return {}
    answers = history.ask_tables(
        {
            "hours": f"sum by (part) (sum_over_time({recording}[{WINDOW}])) * {interval_s / HOUR_S:g}",
            "recorded": f"max(count_over_time({recording}[{WINDOW}])) * {interval_s / HOUR_S:g}",
        },
        span,
    )
    recorded: Mapping[float, float] = next(iter(answers["recorded"].values()), {})
    by_part = {dict(labels).get("part", ""): values for labels, values in answers["hours"].items()}
    starts = [span.start + at * HOUR_S for at in range(span.windows)]
    return {
        at: _use_of({part: values.get(at, 0.0) for part, values in by_part.items()})
        if recorded.get(at, 0.0) >= RECORDED_MIN
        else None
        for at in starts
    }


def _use_of(parts: dict[str, float]) -> GpuHours:
    hours = {part: parts.get(part, 0.0) if part in TOLD else None for part in PARTS}
    held = sum(parts.values())
    return GpuHours(held, hours, None, held - (hours[UNKNOWN] or 0.0))


def query_capacity(recording: str, window: str, interval_s: float) -> str:
    """Returns PromQL for GPU-hours by cluster, model and part. `recording`: namespace:gpu_gpus:sum with the site's
    matchers.
    """
    return f"sum by (cluster, name, part) (sum_over_time({recording}{window})) * {interval_s / HOUR_S:g}"


def add_capacity(rows: Iterable[VectorRow]) -> Iterator[Capacity]:
    """Yields the capacity of each model in each cluster. A GPU that works without a holder is neither held nor
    free.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        parts = found.setdefault((row.labels.get("cluster", ""), row.labels.get("name", "")), {})
        part = row.labels.get("part", "")
        parts[part] = parts.get(part, 0.0) + row.value
    for (cluster, model), parts in sorted(found.items()):
        held = sum(hours for part, hours in parts.items() if part not in NOT_HELD)
        yield Capacity(cluster, model, sum(parts.values()), held, parts.get(FREE, 0.0))
