"""Holders of whole GPUs for which a MIG instance would be enough: many hours, little work, little memory.

The list is only displayed: no program acts on it. It reads one value every 30 minutes, the window of the recordings, so
that each moment counts once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from gpu_exporter.common.promql.vector import VectorRow
from gpu_exporter.reconciler.evidence.records import HolderName, holder_name, title, users_id_of

HOURS_MIN = 24.0  # GPU-hours of known utilization
MEAN_MAX = 0.2
PEAK_MAX = 10e9  # bytes
UNIT = "cluster, node, uuid"
GIB = 1024.0**3
Key: TypeAlias = tuple[str, HolderName]  # with the cluster: two clusters may have pods of one name
# The two smallest profiles of each product, with gigabytes of memory and share of the slices: NVIDIA's MIG user guide,
# table of supported profiles.
PROFILES = (
    (re.compile(r"A100.*40GB"), ("1g.5gb", 5, 1 / 7), ("2g.10gb", 10, 2 / 7)),
    (re.compile(r"(A100|A800|H100|H800).*80GB"), ("1g.10gb", 10, 1 / 7), ("2g.20gb", 20, 2 / 7)),
    (re.compile(r"H100 (NVL|.*9[46]GB)"), ("1g.12gb", 12, 1 / 7), ("2g.24gb", 24, 2 / 7)),
    (re.compile(r"H200"), ("1g.18gb", 18, 1 / 7), ("2g.35gb", 35, 2 / 7)),
    (re.compile(r"A30\b"), ("1g.6gb", 6, 1 / 4), ("2g.12gb", 12, 2 / 4)),
)


class Oversized(NamedTuple):
    """A pod or job: GPU-hours, mean utilization (0 to 1), peak memory on one GPU (bytes), and a size that would do."""

    name: HolderName
    title: str
    owner: str
    hours: float
    mean: float
    peak: float
    would_do: str
    cluster: str = ""


def queries(holder: str, owner: str, window: str, matchers: str = "") -> Iterator[tuple[str, str]]:
    """Yields name and PromQL of each query. `holder`, `owner`: labels. `window`: a duration."""

    def over(recording: str) -> str:
        return f"{recording}{f'{{{matchers}}}' if matchers else ''}[{window}:30m]"

    whole = f"(last_over_time({over('allocation:gpu_share:ratio')}) == 1)"
    held = f"sum by ({holder}) (sum_over_time({over('allocation:gpu_observed_seconds:increase30m')}))"
    busy = f"sum by ({holder}) (sum_over_time({over('allocation:gpu_busy_seconds:increase30m')}))"
    peak = f"max by ({holder}) (max_over_time({over('allocation:gpu_memory_used_bytes:max30m')}))"
    long = f"({held} > {HOURS_MIN * 3600:g})"
    owners = f"last_over_time(allocation:owner:info[{window}:30m])"
    who = f"topk by ({holder}) (1, max by ({holder}, {owner}) ({owners}))"
    yield "over_hours", f"{long} / 3600 * on ({holder}) group_left ({owner}) {who}"
    yield "over_mean", f"({busy} / ({held} > 0) <= {MEAN_MAX:g}) and on ({holder}) {long}"
    yield "over_peak", f"({peak} <= {PEAK_MAX:.0f}) and on ({holder}) {long}"
    model = f"topk by ({UNIT}) (1, last_over_time(unit:gpu_model:info[{window}:30m]))"
    models = f"group by ({holder}, name) ({whole} * on ({UNIT}) group_left (name) {model})"
    yield "over_model", f"{models} and on ({holder}) {long}"


def find(rows: Mapping[str, list[VectorRow]], owner_of: Callable[[Mapping[str, str]], str]) -> list[Oversized]:
    """Holders that are in all answers, most hours first. `owner_of`: returns the owner of a row's labels."""
    mean = {_key(row): row.value for row in rows["over_mean"]}
    peak = {_key(row): row.value for row in rows["over_peak"]}
    models: dict[Key, set[str]] = {}
    for row in rows["over_model"]:
        models.setdefault(_key(row), set()).add(row.labels.get("name", ""))
    found = []
    for row in rows["over_hours"]:
        key = cluster, name = _key(row)
        if key not in mean or key not in peak or len(models.get(key, ())) != 1:
            continue
        (model,) = models[key]
        known_as, advice = title(name, users_id_of(row.labels)), would_do(model, mean[key], peak[key])
        known_as = f"{cluster}: {known_as}" if cluster else known_as
        owner = owner_of(row.labels)
        found.append(Oversized(name, known_as, owner, row.value, mean[key], peak[key], advice, cluster))
    return sorted(found, key=lambda each: -each.hours)


def _key(row: VectorRow) -> Key:
    return row.labels.get("cluster", ""), holder_name(row.labels)


def would_do(model: str, mean: float, peak: float) -> str:
    """The smallest MIG profile of the product with enough memory and slices; "a smaller GPU" if none fits."""
    for pattern, *profiles in PROFILES:
        if pattern.search(model):
            for profile, gigabytes, share in profiles:
                # A program cannot use a twentieth of the instance's memory.
                if peak <= 0.95 * gigabytes * GIB and mean <= share:
                    return profile
    return "a smaller GPU"
