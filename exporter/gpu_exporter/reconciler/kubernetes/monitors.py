"""Explains why the Prometheus operator does not scrape the exporters, from their monitors and what Prometheus selects.

Monitors are objects of kind PodMonitor or ServiceMonitor. Reading them needs an administrator's kubeconfig: the
reconciler's service account has no right to them. Writes nothing.
"""

from __future__ import annotations

from typing import Any

from gpu_exporter.common.plain import REASON_MAX, one_line
from gpu_exporter.common.promql.absence import Absence
from gpu_exporter.reconciler.kubernetes.client.api import Api, Json
from gpu_exporter.reconciler.marks import MarkError

GROUP = "monitoring.coreos.com"
KINDS = {
    "PodMonitor": ("podmonitors", "podMonitorSelector"),
    "ServiceMonitor": ("servicemonitors", "serviceMonitorSelector"),
}
OURS = "app.kubernetes.io/name=gpu-exporter"
SHOWN_MAX = 3


def explain_monitors(api: Api) -> Absence | None:
    """The finding about the monitors of gpu-exporter; None if they, or the Prometheus objects, cannot be read."""
    try:
        monitors = [(kind, found) for kind, (plural, _) in KINDS.items() for found in _list(api, plural, kind, OURS)]
        if not monitors:
            return Absence(
                "unmonitored",
                "the cluster has neither a PodMonitor nor a ServiceMonitor of gpu-exporter",
                "Install the chart with --set podMonitor.enabled=true",
            )
        servers = _list(api, "prometheuses", "Prometheus")
    except MarkError:
        return None
    lacking = [text for kind, found in monitors for server in servers if (text := _lacks(kind, found, server))]
    if not servers:
        return None
    if len(lacking) < len(monitors) * len(servers):
        named = ", ".join(f"{kind} {found['name']}" for kind, found in monitors[:SHOWN_MAX])
        return Absence(
            "selected",
            f"a Prometheus selects the labels of {named}",
            "Check podMonitorNamespaceSelector of Prometheus, and the log of the Prometheus operator",
        )
    return Absence(
        "unselected",
        "; ".join(lacking[:SHOWN_MAX]),
        "Set missing labels with podMonitor.labels or serviceMonitor.labels of the chart, and a missing selector in "
        "Prometheus",
    )


def _list(api: Api, plural: str, kind: str, selector: str = "") -> list[Json]:
    ask = api.custom.list_cluster_custom_object
    return list(api.pages(ask, GROUP, "v1", plural, kind=kind, keep=_keep, label_selector=selector))


def _keep(found: Json) -> Json:
    spec, metadata = found.get("spec") or {}, found["metadata"]
    selectors = {name: spec.get(name) for _, name in KINDS.values()}
    name = one_line(f"{metadata['namespace']}/{metadata['name']}", REASON_MAX)
    return {"name": name, "labels": dict(metadata.get("labels") or {}), **selectors}


def _lacks(kind: str, monitor: Json, server: Json) -> str:
    """The labels that this Prometheus selects and the monitor lacks; "" if it lacks none. Ignores matchExpressions."""
    field = KINDS[kind][1]
    selector: Any = server[field]
    if selector is None:  # unlike an empty one, it selects nothing (API of the Prometheus operator)
        return f"Prometheus {server['name']} selects no {kind}, since its {field} is not set"
    labels = selector.get("matchLabels") if isinstance(selector, dict) else None
    wanted = labels if isinstance(labels, dict) else {}
    missing = [f"{name}={value}" for name, value in sorted(wanted.items()) if monitor["labels"].get(name) != value]
    if not missing:
        return ""
    named = one_line(", ".join(missing), REASON_MAX)
    return f"{kind} {monitor['name']} lacks labels that Prometheus {server['name']} selects: {named}"
