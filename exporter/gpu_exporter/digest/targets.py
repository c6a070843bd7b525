"""One node under several targets: the hours of each target add up, or are the same hours twice.

A target whose address changed within a day (a pod that was replaced, another port) leaves two series that follow each
other: their hours add up. Two targets that scrape one exporter at once (a PodMonitor beside a ServiceMonitor) leave two
that are the same: one of them counts.
"""

from __future__ import annotations

STEP_S = 300.0
TWICE = 1.1  # targets on average: while an address changes, the old one is believed for five minutes
NODE = "cluster, node"
OF_TENANTS = "scheduler, namespace, account, user"


def nodes_scraped_twice(matcher: str, span_s: float, ago_s: float) -> str:
    """PromQL: one row for each node whose tenants were counted by several targets for over a tenth of the time."""
    named = ",".join(filter(None, (matcher, 'node!=""')))  # without that label every node would be one
    targets = f"count without ({OF_TENANTS}) (gpu_tenant_held_gpu_seconds_total{{{named}}})"
    window = f"[{span_s:.0f}s:{STEP_S:.0f}s]" + (f" offset {ago_s:.0f}s" if ago_s else "")
    return f"avg_over_time((count by ({NODE}) ({targets})){window}) > {TWICE}"


def total(grown: str, by: str, twice: str) -> str:
    """PromQL: the sum of `grown` by the labels `by`. `twice`: of nodes_scraped_twice, "" where no node is."""
    if not twice:
        return f"sum by ({by}) ({grown})"
    once = f"sum by (node, {by}) ({grown}) unless on ({NODE}) ({twice})"
    larger = f"max by (node, {by}) ({grown}) and on ({NODE}) ({twice})"
    return f"sum by ({by}) ({once} or {larger})"
