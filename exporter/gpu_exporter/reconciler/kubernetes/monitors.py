"""Compares the monitors and rules of gpu-exporter with the selectors of the Prometheus operator's servers. Writes
nothing.

In the operator's API (monitoring.coreos.com), a server has two selectors for each kind of object: one for the object's
labels, and one for its namespace. A missing label selector selects nothing, an empty one selects all. A missing
namespace selector selects only the server's own namespace.

Reading these objects needs an administrator's kubeconfig, or the account of `helm test`. The reconciler's own service
account may not read them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from gpu_exporter.common.plain import REASON_MAX, one_line
from gpu_exporter.common.promql.absence import Absence
from gpu_exporter.reconciler.kubernetes.client.api import Api, Json
from gpu_exporter.reconciler.kubernetes.shapes import selects
from gpu_exporter.reconciler.marks import MarkError

GROUP = "monitoring.coreos.com"
OURS = "app.kubernetes.io/name=gpu-exporter"
SERVERS = {
    "Prometheus": ("v1", "prometheuses"),
    "PrometheusAgent": ("v1alpha1", "prometheusagents"),
    "ThanosRuler": ("v1", "thanosrulers"),
}
SCRAPING, EVALUATING = ("Prometheus", "PrometheusAgent"), ("Prometheus", "ThanosRuler")
SHOWN_MAX = 3
NAME = "kubernetes.io/metadata.name"  # of namespaces: the API server sets it, and resets another value
CLAUSES = {"In": "is one of", "NotIn": "is none of", "Exists": "is set", "DoesNotExist": "is not set"}
OBJECTS_MAX = 100  # monitors and rules that are compared


class MonitorKind(NamedTuple):
    """A kind of object. `field`: prefix of the server fields with its selectors. `value`: key of the chart's values
    with its labels and namespace. `servers`: kinds of servers that read it.
    """

    plural: str
    field: str
    value: str
    servers: Sequence[str]


KINDS = {
    "PodMonitor": MonitorKind("podmonitors", "podMonitor", "podMonitor", SCRAPING),
    "ServiceMonitor": MonitorKind("servicemonitors", "serviceMonitor", "podMonitor", SCRAPING),
    "PrometheusRule": MonitorKind("prometheusrules", "rule", "prometheusRule", EVALUATING),
}
MONITORS = ("PodMonitor", "ServiceMonitor")
FIELDS = [f"{kind.field}{part}" for kind in KINDS.values() for part in ("Selector", "NamespaceSelector")]


class Selection(NamedTuple):
    """The result for one object.

    - `object`: kind, namespace and name. `state`: "selected", "unselected", or "unknown" if not everything could be
      read.
    - `seen`: the servers that select it, or why no server does. `to_do`: the remedy, "" if none is needed.
    """

    object: str
    state: str
    seen: str
    to_do: str


def explain_monitors(api: Api) -> Absence | None:
    """Explains why no server selects the monitors of gpu-exporter; None if objects cannot be read."""
    try:
        findings = compare(api, MONITORS)
    except MarkError:
        return None
    if not findings:
        return Absence(
            "unmonitored",
            "the cluster has neither a PodMonitor nor a ServiceMonitor of gpu-exporter",
            "Install the chart with --set podMonitor.enabled=true",
        )
    selected = [each for each in findings if each.state == "selected"]
    if selected:
        return Absence(
            "selected",
            "; ".join(f"{each.object} is {each.seen}" for each in selected[:SHOWN_MAX]),
            "Check the log of the Prometheus operator, and Status > Targets of this Prometheus",
        )
    lacking = [each for each in findings if each.state == "unselected"]
    if len(lacking) < len(findings):
        return None
    remedies = dict.fromkeys(each.to_do for each in lacking)
    seen = "; ".join(f"{each.object} is {each.seen}" for each in lacking[:SHOWN_MAX])
    return Absence("unselected", seen, ". ".join(list(remedies)[:SHOWN_MAX]))


def compare(
    api: Api, kinds: Collection[str] = tuple(KINDS), namespaces: Sequence[str] = (), labels: str = OURS
) -> list[Selection]:
    """Finds for each object of gpu-exporter the servers that select it.

    `namespaces`: the namespaces of the objects, by default all. `labels`: the selector of gpu-exporter's objects.
    Raises MarkError if objects of gpu-exporter cannot be read.
    """
    lists = {kind: _read(api, "v1", KINDS[kind].plural, kind, namespaces, labels) for kind in kinds}
    if all(rows is None for rows in lists.values()):
        raise MarkError("error", f"the custom resources of the Prometheus operator ({GROUP}) are not installed")
    found = [(kind, each) for kind, rows in lists.items() for each in rows or ()]
    if not found:
        return []
    servers: dict[str, list[Json]] = {}
    gaps: dict[str, str] = {}
    for kind, (version, plural) in SERVERS.items():
        odd: list[str] = []
        try:
            servers[kind] = _read(api, version, plural, kind, odd=odd) or []
        except MarkError as exc:
            odd.append(str(exc))
        if odd:
            gaps[kind] = f"objects of kind {kind} cannot be read: {one_line(odd[0], REASON_MAX)}"
    places = _Places(api)
    return [_judge(kind, each, servers, gaps, places) for kind, each in islice(found, OBJECTS_MAX)]


def _read(
    api: Api,
    version: str,
    plural: str,
    kind: str,
    namespaces: Sequence[str] = (),
    labels: str = "",
    odd: list[str] | None = None,
) -> list[Json] | None:
    """Reads the objects of one kind. None if the cluster does not have the kind. Adds a reason to `odd` for each object
    that is omitted. Raises MarkError.
    """

    def note(name: str, reason: str, why: str) -> None:
        if odd is not None:
            odd.append(f"{name}: {why}")

    custom = api.custom
    asks: list[tuple[Any, tuple[str, ...]]] = [
        (custom.list_namespaced_custom_object, (GROUP, version, each, plural)) for each in namespaces
    ]
    rows: list[Json] = []
    for ask, where in asks or [(custom.list_cluster_custom_object, (GROUP, version, plural))]:
        try:
            rows += api.pages(ask, *where, kind=kind, keep=_keep, odd=note, label_selector=labels)
        except MarkError as exc:
            if exc.status == 404:
                return None
            raise
    return rows


def _keep(found: Json) -> Json:
    spec, metadata = found.get("spec") or {}, found["metadata"]
    return {
        "namespace": str(metadata["namespace"]),
        "name": one_line(f"{metadata['namespace']}/{metadata['name']}", REASON_MAX),
        "labels": dict(metadata.get("labels") or {}),
        **{field: _selector(spec.get(field)) for field in FIELDS},
    }


def _selector(found: Any) -> Json | None:
    """Returns a LabelSelector with both of its parts, None if it is not set. Raises ValueError if it is malformed."""
    if found is None:
        return None
    labels, rules = found.get("matchLabels") or {}, found.get("matchExpressions") or []
    if not isinstance(labels, dict) or not all(isinstance(rule.get("values") or [], list) for rule in rules):
        raise ValueError("a selector is not a valid LabelSelector")
    return {"matchLabels": labels, "matchExpressions": rules}


class _Places:
    """The labels of namespaces, each read once."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._known: dict[str, Json | None] = {}

    def labels(self, namespace: str) -> Json | None:
        """Returns the labels of a namespace; None if they cannot be read."""
        if namespace not in self._known:
            try:
                kept = self._api.call(self._api.core.read_namespace, namespace, keep=_labels_of)
            except MarkError:
                kept = None
            self._known[namespace] = kept
        return self._known[namespace]


def _labels_of(found: Json) -> Json:
    return dict(found["metadata"].get("labels") or {})


def _judge(kind: str, each: Json, servers: dict[str, list[Json]], gaps: dict[str, str], places: _Places) -> Selection:
    about = KINDS[kind]
    name = f"{kind} {each['name']}"
    asked = [(server_kind, server) for server_kind in about.servers for server in servers.get(server_kind, ())]
    unknown = [gaps[server_kind] for server_kind in about.servers if server_kind in gaps]
    by: list[str] = []
    lacks: list[tuple[str, str]] = []
    for server_kind, server in asked:
        shown = f"{server_kind} {server['name']}"
        try:
            lacking = next(_lacks(about, each, server, shown, places), None)
        except LookupError as exc:
            unknown.append(str(exc.args[0]))
            continue
        if lacking is None:
            by.append(shown)
        else:
            lacks.append(lacking)
    if by:
        return Selection(name, "selected", f"selected by {', '.join(by[:SHOWN_MAX])}", "")
    if unknown or not asked:
        why = unknown[0] if unknown else f"the cluster has no object of kind {' or '.join(about.servers)}"
        return Selection(name, "unknown", why, "")
    seen = "; ".join(text for text, _ in lacks[:SHOWN_MAX])
    return Selection(name, "unselected", f"selected by no server: {seen}", lacks[0][1])


def _lacks(about: MonitorKind, each: Json, server: Json, shown: str, places: _Places) -> Iterator[tuple[str, str]]:
    """Yields reason and remedy for each selector with which this server excludes the object. Raises LookupError with
    the reason if this is unknown.
    """
    field = f"{about.field}Selector"
    selector = server[field]
    if selector is None:
        yield f"{shown} has no {field}, so it selects nothing", f"Set {field} of {shown}: {{}} selects all"
    elif missing := _missing(selector, each["labels"]):
        text, exact, _ = missing[0]
        remedy = f": {{labels: {text}}}" if exact else f".labels so that {text}"
        wanted = text if exact else f"objects whose {text}"
        yield f"{shown} selects {wanted}", f"Set in the chart's values {about.value}{remedy}"
    field = f"{about.field}NamespaceSelector"
    selector, namespace = server[field], each["namespace"]
    if selector is None:
        if server["namespace"] != namespace:
            own = server["namespace"]
            yield (
                f"{shown} has no {field}, so it selects only in its own namespace {own}",
                f"Set in the chart's values {about.value}: {{namespace: {own}}}",
            )
        return
    if selector["matchLabels"] or selector["matchExpressions"]:
        labels = places.labels(namespace)
        if labels is None:
            raise LookupError(f"the labels of namespace {namespace} cannot be read")
        if missing := _missing(selector, labels):
            fixed = next((part for part in missing if NAME in part.keys), None)
            text, exact, _ = fixed or missing[0]
            if not fixed:
                remedy = (
                    f"Give namespace {namespace} these labels: {text}"
                    if exact
                    else f"Label namespace {namespace} so that {text}"
                )
            elif exact:
                own = one_line(str(selector["matchLabels"][NAME]), REASON_MAX)
                remedy = f"Set in the chart's values {about.value}: {{namespace: {own}}}"
            else:
                remedy = f"Set in the chart's values {about.value}.namespace to a namespace whose {text}"
            yield f"{shown} selects namespaces {'with' if exact else 'whose'} {text}", remedy


class _Misfit(NamedTuple):
    """A part of a selector that excludes an object. `text`: if `exact`, the required labels as YAML; otherwise a clause
    about a label. `keys`: keys of these labels.
    """

    text: str
    exact: bool
    keys: Collection[str]


def _missing(selector: Json, labels: Json) -> list[_Misfit]:
    """Returns the parts of the selector that exclude these labels: missing labels first, then failed expressions. Empty
    if the selector selects the labels.
    """
    missing = {key: value for key, value in selector["matchLabels"].items() if labels.get(key) != value}
    found: list[_Misfit] = []
    if missing:
        pairs = (f"{key}: {json.dumps(value)}" for key, value in sorted(missing.items()))  # "true" would be no text
        found.append(_Misfit(one_line("{" + ", ".join(pairs) + "}", REASON_MAX), True, missing))
    for rule in selector["matchExpressions"]:
        if not selects({"matchExpressions": [rule]}, labels):
            key, values = str(rule.get("key")), ", ".join(json.dumps(value) for value in rule.get("values") or ())
            clause = f"label {key} {CLAUSES[rule['operator']]} {values}"
            found.append(_Misfit(one_line(clause.strip(), REASON_MAX), False, (key,)))
    return found
