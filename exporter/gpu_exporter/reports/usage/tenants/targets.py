"""PromQL for nodes with several targets: the hours of the targets either add up, or are the same hours twice.

If the address of a target changes within a day (a pod that was replaced, another port), two series follow each other:
their hours add up. If two targets scrape one exporter at the same time (a PodMonitor beside a ServiceMonitor), both
series are one counter: the larger value of each moment counts.
"""

from __future__ import annotations

from collections.abc import Collection

from gpu_exporter.common.promql.vector import literal
from gpu_exporter.reports.usage.tenants.parts import PeriodPart

STEP_S = 300.0
TWICE = 1.005  # targets on average: seven minutes of a day
MOMENTS_S = 60.0  # between two values of that counter
NODES_MAX = 500  # names in a query; with more nodes, the query treats every node in this way
NODE = "cluster, node"
OF_TENANTS = "scheduler, namespace, account, user"


def nodes_scraped_twice(matcher: str, part: PeriodPart) -> str:
    """PromQL: one row for each node for which several targets counted tenants at the same time."""
    named = ",".join(filter(None, (matcher, 'node!=""')))  # without the label all nodes would count as a single node
    targets = f"count without ({OF_TENANTS}) (gpu_tenant_held_gpu_seconds_total{{{named}}})"
    return f"avg_over_time((count by ({NODE}) ({targets})){part.steps(STEP_S)}) > {TWICE}"


def total(counter: str, matcher: str, part: PeriodPart, by: str, twice: Collection[str]) -> str:
    """PromQL: the growth of a counter by the labels `by`. `twice`: nodes that several targets scraped."""
    if not twice:
        return f"sum by ({by}) (increase({counter}{{{matcher}}}{part.window}))"
    named = "|".join(map(literal, sorted(twice))) if len(twice) <= NODES_MAX else ".+"
    once, often = (",".join(filter(None, (matcher, f'node{sign}"{named}"'))) for sign in ("!~", "=~"))
    added = f"sum by (node, {by}) (increase({counter}{{{once}}}{part.window}))"
    one = f"increase((max by (node, {by}) ({counter}{{{often}}})){part.steps(MOMENTS_S)})"
    return f"sum by ({by}) ({added} or {one})"
