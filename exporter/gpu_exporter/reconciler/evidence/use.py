"""Reads the use of a holder's GPUs and causes, from an exporter's status (docs/status.schema.json) or from series."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from gpu_exporter.common.model.meanings import advise, describe_cause
from gpu_exporter.common.outside import load_json, real
from gpu_exporter.common.plain import one_line
from gpu_exporter.common.promql.vector import VectorRow
from gpu_exporter.reconciler.evidence.records import (
    OBSTACLE,
    HolderName,
    PublishedCause,
    UnitUse,
    UseOfUnits,
    cause_of,
    holder_name,
)

STATUS = "/api/v1/status"
STATUS_MAX = 4 * 1024 * 1024  # characters; the status of 128 allocations has less than a tenth of that
TEXT_MAX = 400  # characters
CAUSES_MAX = 32  # of one allocation: there are fewer rules
VALUE_MAX = 1e15  # limit of a number in a sentence: no cause has a larger number, NaN or infinity
PREFIX = "gpu_allocation_"
# PromQL by name. `{which}` selects the holder's series, `{all}` all of the source's, `{window}` is the time.
SUMS = {
    "busy": "sum by (uuid, mig) (increase(gpu_allocation_busy_seconds_total{which}[{window}]))",
    "observed": "sum by (uuid, mig) (increase(gpu_allocation_observed_seconds_total{which}[{window}]))",
    "peak": "max by (uuid, mig) (max_over_time(gpu_allocation_memory_used_bytes{which}[{window}]))",
    "memory": "max by (uuid, mig) (gpu_memory_total_bytes{all} or gpu_mig_memory_total_bytes{all}) "
    "and on (uuid, mig) group by (uuid, mig) (gpu_allocation_info{which})",
}
SERIES = ("state", "utilization_ratio", "cause", "cause_value")


def parse_use(text: str, name: HolderName, uuids: Collection[str]) -> UseOfUnits:
    """Returns the use of these GPUs and their MIG instances by a holder. Empty if the text is not a valid status."""
    found: dict[tuple[str, str], UnitUse] = {}
    if len(text) > STATUS_MAX:  # several are parsed at a time, and parsed JSON takes many times its text
        return {}
    try:
        allocations = list(load_json(text)["allocations"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}
    for allocation in allocations:
        try:
            unit = str(allocation["uuid"]), str(allocation["mig"])
            if unit[0] in uuids and holder_name(allocation) == name:
                found[unit] = _use(allocation)
        except (LookupError, TypeError, AttributeError):  # an invalid allocation is skipped, the others are not
            continue
    return found


def _use(values: Mapping[str, Any]) -> UnitUse:
    busy, observed = real(values.get("busy_seconds")), real(values.get("observed_seconds"))
    return UnitUse(
        state=_state(values.get("state")),
        now=_share(values.get("utilization_ratio")),
        mean=_share(busy / observed) if busy is not None and observed else None,
        over="since it started",
        causes=tuple(_cause(each) for each in values.get("causes", [])[:CAUSES_MAX]),
    )


def _cause(values: Mapping[str, Any]) -> PublishedCause:
    texts = {name: one_line(str(values.get(name, "")), TEXT_MAX) for name in PublishedCause._fields}
    return PublishedCause(**texts)


def collect_use(rows: Iterable[VectorRow], sums: Mapping[str, Iterable[VectorRow]], over: str) -> UseOfUnits:
    """Returns the use of each unit from series. `rows`: the series of SERIES. `sums`: one row per unit for each of
    SUMS, over the time `over`.

    If a unit has two targets, their causes are joined. If the targets contradict each other, the unit has no state.
    """
    states: dict[tuple[str, str], set[str]] = defaultdict(set)
    now: dict[tuple[str, str], float | None] = {}
    causes: dict[tuple[str, str], dict[PublishedCause, None]] = defaultdict(dict)
    values: dict[tuple[tuple[str, str], str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        unit = _unit(row.labels)
        series = row.labels.get("__name__", "").removeprefix(PREFIX)
        if series == "state":
            states[unit].add(_state(row.labels.get("state")))
        elif series == "utilization_ratio":
            now[unit] = _share(row.value)
        elif series == "cause" and len(causes[unit]) < CAUSES_MAX:
            causes[unit].update(dict.fromkeys(cause_of(row.labels)))
        elif series == "cause_value" and 0.0 <= row.value <= VALUE_MAX:
            values[unit, row.labels.get("cause", "")][row.labels.get("quantity", "")] = row.value
    of = {
        name: {_unit(row.labels): row.value for row in found if 0.0 <= row.value <= VALUE_MAX}
        for name, found in sums.items()
    }
    busy, observed = of.get("busy", {}), of.get("observed", {})
    return {
        unit: UnitUse(
            state=min(states[unit]) if len(states[unit]) == 1 else "",
            now=now.get(unit),
            mean=_share(busy[unit] / observed[unit]) if unit in busy and observed.get(unit) else None,
            over=over,
            peak=of.get("peak", {}).get(unit),
            memory=of.get("memory", {}).get(unit),
            causes=tuple(complete(cause, values.get((unit, cause.name), {})) for cause in causes[unit]),
        )
        for unit in {*states, *now, *causes, *observed}
    }


def complete(cause: PublishedCause, values: Mapping[str, float]) -> PublishedCause:
    """Adds to a named cause its evidence and advice from the table of meanings, filled with these numbers."""
    return cause._replace(evidence=describe_cause(cause.name, values), advice=advise(cause.name, values))


def _unit(labels: Mapping[str, str]) -> tuple[str, str]:
    return labels.get("uuid", ""), labels.get("mig", "")


def _state(value: object) -> str:
    return value if isinstance(value, str) and OBSTACLE.fullmatch(value) else ""


def _share(value: object) -> float | None:
    number = real(value)
    return number if number is not None and 0.0 <= number <= 1.0 + 1e-6 else None
