"""PromQL for nodes with several targets: the hours of the targets either add up, or are the same hours twice.

If the address of a target changes within a day (a pod that was replaced, another port), two series follow each other:
their hours add up. If two targets scrape one exporter at the same time (a PodMonitor beside a ServiceMonitor), both
series have the same hours: only one of them counts.
"""

from __future__ import annotations

STEP_S = 300.0
TWICE = 1.1  # targets on average: after a change of address, Prometheus keeps the old series for five minutes
NODE = "cluster, node"
OF_TENANTS = "scheduler, namespace, account, user"


def nodes_scraped_twice(matcher: str, span_s: float, ago_s: float) -> str:
    """PromQL: one row for each node whose tenants were counted by several targets for over a tenth of the time."""
    named = ",".join(filter(None, (matcher, 'node!=""')))  # without the label all nodes would count as a single node
    targets = f"count without ({OF_TENANTS}) (gpu_tenant_held_gpu_seconds_total{{{named}}})"
    window = f"[{span_s:.0f}s:{STEP_S:.0f}s]" + (f" offset {ago_s:.0f}s" if ago_s else "")
    return f"avg_over_time((count by ({NODE}) ({targets})){window}) > {TWICE}"


def total(grown: str, by: str, twice: str) -> str:
    """PromQL: the sum of `grown` by the labels `by`. `twice`: from nodes_scraped_twice, "" without such nodes."""
    if not twice:
        return f"sum by ({by}) ({grown})"
    once = f"sum by (node, {by}) ({grown}) unless on ({NODE}) ({twice})"
    larger = f"max by (node, {by}) ({grown}) and on ({NODE}) ({twice})"
    return f"sum by ({by}) ({once} or {larger})"
