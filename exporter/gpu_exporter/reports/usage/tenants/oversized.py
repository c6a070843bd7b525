"""Holders of whole GPUs for which a MIG instance would be enough: many hours, little work, little memory.

The list is only displayed: no program acts on it. The queries read one value every 30 minutes, the window of the
recordings, so that each moment counts once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from gpu_exporter.common.promql.vector import VectorRow
from gpu_exporter.reconciler.evidence.records import HolderName, holder_name
from gpu_exporter.reports.usage.model import PARTS, GpuHours, HolderHours
from gpu_exporter.reports.usage.tenants.hours import who_of

HOURS_MIN = 24.0  # GPU-hours of known utilization
MEAN_MAX = 0.2
PEAK_MAX = 10e9  # bytes
UNIT = "cluster, node, uuid"
GIB = 1024.0**3
Key: TypeAlias = tuple[str, HolderName]  # with the cluster: two clusters may have pods of one name
# The two smallest profiles of each product, with gigabytes of memory and share of the slices. Sources: NVIDIA's MIG
# user guide, table of supported profiles; GB200: mig-parted#227; GH200 with 144 GB: mig-parted#139; H20: mig-parted's
# config-default.yaml; B300: aws/sagemaker-hyperpod-cli#403; GB300: NVIDIA's playbook for DGX Station. Some drivers name
# a profile of GB200 or GB300 one gigabyte differently. Where the smallest instance is half a board, the next is all of
# it.
PROFILES = (
    (re.compile(r"\bA100.*40GB"), ("1g.5gb", 5, 1 / 7), ("2g.10gb", 10, 2 / 7)),
    (re.compile(r"\b((A100|A800|H100|H800)\b.*\b80GB|H100 PCIe$)"), ("1g.10gb", 10, 1 / 7), ("2g.20gb", 20, 2 / 7)),
    (re.compile(r"\bH100 (NVL|.*9[46]GB)"), ("1g.12gb", 12, 1 / 7), ("2g.24gb", 24, 2 / 7)),
    (re.compile(r"\b(H20$|GH200 (120|480)GB)"), ("1g.12gb", 12, 1 / 7), ("2g.24gb", 24, 2 / 7)),
    (re.compile(r"\bGH200 144G"), ("1g.18gb", 18, 1 / 7), ("2g.36gb", 36, 2 / 7)),
    (re.compile(r"\bH200\b"), ("1g.18gb", 18, 1 / 7), ("2g.35gb", 35, 2 / 7)),
    (re.compile(r"\bB200\b"), ("1g.23gb", 23, 1 / 7), ("2g.45gb", 45, 2 / 7)),
    (re.compile(r"\bGB200\b"), ("1g.23gb", 23, 1 / 7), ("2g.47gb", 47, 2 / 7)),
    (re.compile(r"\bB300\b"), ("1g.34gb", 34, 1 / 7), ("2g.67gb", 67, 2 / 7)),
    (re.compile(r"\bGB300\b"), ("1g.35gb", 35, 1 / 7), ("2g.70gb", 70, 2 / 7)),
    (re.compile(r"\bRTX PRO 6000 Blackwell\b"), ("1g.24gb", 24, 1 / 4), ("2g.48gb", 48, 2 / 4)),
    (re.compile(r"\bRTX PRO 5000 Blackwell$"), ("1g.24gb", 24, 1 / 2)),
    (re.compile(r"\bRTX PRO 4500 Blackwell( Server Edition)?$"), ("1g.16gb", 16, 1 / 2)),
    (re.compile(r"\bA30\b"), ("1g.6gb", 6, 1 / 4), ("2g.12gb", 12, 2 / 4)),
)


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


def find(rows: Mapping[str, list[VectorRow]]) -> list[HolderHours]:
    """The holders that are in all answers, most hours first."""
    mean = {_key(row): row.value for row in rows["over_mean"]}
    peak = {_key(row): row.value for row in rows["over_peak"]}
    models: dict[Key, set[str]] = {}
    for row in rows["over_model"]:
        models.setdefault(_key(row), set()).add(row.labels.get("name", ""))
    found = []
    for row in rows["over_hours"]:
        key = _key(row)
        if key not in mean or key not in peak or len(models.get(key, ())) != 1:
            continue
        (model,) = models[key]
        use = GpuHours(row.value, dict.fromkeys(PARTS), mean[key] * row.value, row.value)
        advice = would_do(model, mean[key], peak[key])
        who = who_of(row, key[1], model)
        found.append(HolderHours(who, use, mean=mean[key], peak_memory=peak[key], sufficient=advice))
    return sorted(found, key=lambda each: -each.use.held)


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
