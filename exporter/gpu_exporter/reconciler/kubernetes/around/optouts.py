"""Reads the wishes of pod owners in annotations: to keep idle GPUs for some time, or to be judged later. Pure.

The nearest wish counts: on the pod, then on its controllers from the nearest to the highest, then on its namespace. An
ended wish is ignored, so a longer wish further up still counts. A wish that cannot be read keeps the pod at
`candidate`, because its owner wanted something.

The API server records in managedFields when an annotation was set. Without this record, the creation time of the object
counts. Clients can write the record, so a time in the future is ignored.

If nothing sends requests to the pod, its label `class: serving` is treated as a wish, and ends after
`policy.exempt_max`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.config.rules import CLASSES
from gpu_exporter.common.durations import describe_duration, format_duration, parse_duration
from gpu_exporter.common.outside import parse_timestamp
from gpu_exporter.common.plain import one_line, shorten
from gpu_exporter.reconciler.decision.surroundings import Exemption
from gpu_exporter.reconciler.kubernetes.client.keys import CLASS, OTHERS
from gpu_exporter.reconciler.marks import EXEMPT_UNTIL, PREFIX, timestamp

EXEMPT_REASON, EXEMPT, IDLE_AFTER = (PREFIX + name for name in ("exempt-reason", "exempt", "idle-after"))
REASON_MAX = 120  # characters of an owner's words


class OptOut(NamedTuple):
    """The wishes in the annotations of a pod, its controllers and its namespace.

    `exemption`: the wish to keep idle GPUs. `idle_after_s`: the minimum idle time that the owner asked for (seconds); 0
    for no wish. `idle_after_by`: the source of this wish. `ceiling`: why the pod must not rise above `candidate`; "" if
    it may.
    """

    exemption: Exemption | None = None
    idle_after_s: float = 0.0
    idle_after_by: Exemption | None = None
    ceiling: str = ""

    def also(self, other: OptOut) -> OptOut:
        """Adds another wish. The exemption of this wish has priority. The ceilings of both apply."""
        ceiling = "; ".join(filter(None, (self.ceiling, other.ceiling)))
        return self._replace(exemption=self.exemption or other.exemption, ceiling=ceiling)


class Place(NamedTuple):
    """An object whose annotations count. `source`: pod, owner or namespace. `title`: its name for people."""

    source: str
    title: str
    metadata: Mapping[str, Any]

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.metadata.get("annotations") or {}

    @property
    def labelled_class(self) -> str:
        """The class in the object's label `class`; "" if the label is missing or invalid."""
        said = (self.metadata.get("labels") or {}).get(CLASS, "")
        return said if said in CLASSES else ""


def read_wish(places: Sequence[Place], policy: Policy, wall: float) -> OptOut:
    """Returns the opt-out at `wall` (Unix seconds). `places`: objects that may request it, from pod to namespace."""
    exemption: Exemption | None = None
    ceilings: list[str] = []
    idle_after_s, idle_after_by = 0.0, None
    for place in places:
        if exemption is None:
            exemption = _exemption(place, policy, wall, ceilings)
        if not idle_after_s and IDLE_AFTER in place.annotations:
            try:
                wanted_s = parse_duration(place.annotations[IDLE_AFTER].strip())
                idle_after_s = min(wanted_s, policy.idle_after_max)
                idle_after_by = Exemption(place.source, f"{IDLE_AFTER} of {place.title} is {format_duration(wanted_s)}")
            except ValueError as exc:
                ceilings.append(f"{IDLE_AFTER} of {place.title} cannot be read: {exc}")
        ceilings += _signs_of_others(place)
    return OptOut(exemption, idle_after_s, idle_after_by, "; ".join(dict.fromkeys(ceilings)))


def _exemption(place: Place, policy: Policy, wall: float, ceilings: list[str]) -> Exemption | None:
    annotations = place.annotations
    reason = one_line(annotations.get(EXEMPT_REASON, ""), REASON_MAX)
    because = f": {reason}" if reason else ""
    if EXEMPT in annotations:
        if place.source == "namespace" and annotations[EXEMPT] == "true":
            return Exemption("namespace", f"{place.title} is exempt{because}")
        if annotations[EXEMPT] != "false":
            hint = f'it is only for namespaces, with the value "true"; set {EXEMPT_UNTIL} to a time'
            ceilings.append(f"{EXEMPT} of {place.title} has no effect: {hint}")
    text = annotations.get(EXEMPT_UNTIL)
    if text is None:
        return None
    until = parse_timestamp(text)
    if until is None:
        hint = f"write it as {timestamp(wall + policy.exempt_max)}"
        ceilings.append(f"{EXEMPT_UNTIL} of {place.title} cannot be read: {shorten(text, 40)!r}; {hint}")
        return None
    if place.source != "namespace":
        set_wall = when_set(place.metadata, "annotations", EXEMPT_UNTIL, wall + policy.fresh_min)
        if set_wall is None:
            ceilings.append(f"{EXEMPT_UNTIL} of {place.title}: the time of its last change is unknown")
            return None
        limit = set_wall + policy.exempt_max
        if until > limit and wall >= limit:
            longest = describe_duration(policy.exempt_max)
            ceilings.append(
                f"{EXEMPT_UNTIL} of {place.title} ended after {longest}, the most that the policy allows: set it again"
            )
            return None
        until = min(until, limit)
    if wall >= until:
        return None
    return Exemption(place.source, f"{place.title} is exempt until {timestamp(until)}{because}")


def read_serving_label(place: Place, policy: Policy, wall: float) -> OptOut:
    """Reads the wish in the label `class: serving` at `wall`, if no other sign shows that the pod serves."""
    said = f"{place.title} has the label {CLASS}=serving, but no Service, InferencePool or autoscaler in front of it"
    set_wall = when_set(place.metadata, "labels", CLASS, wall + policy.fresh_min)
    if set_wall is None or wall >= set_wall + policy.exempt_max:
        longest = describe_duration(policy.exempt_max)
        return OptOut(ceiling=f"{said}: the label alone counts for {longest}, set it again")
    return OptOut(Exemption(place.source, f"{said}: it counts until {timestamp(set_wall + policy.exempt_max)}"))


def when_set(metadata: Mapping[str, Any], field: str, key: str, latest: float) -> float | None:
    """Returns the Unix time of the last write to an annotation or label (managedFields), else of the object's creation.

    `field`: annotations or labels. `latest`: a later time is ignored.
    """
    times = [
        parse_timestamp(entry.get("time"))
        for entry in metadata.get("managedFields") or ()
        if f"f:{key}" in _fields_of(entry, field)
    ]
    known = [moment for moment in times if moment is not None and moment <= latest]
    return max(known) if known else parse_timestamp(metadata.get("creationTimestamp"))


def _fields_of(entry: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    fields = (entry.get("fieldsV1") or {}).get("f:metadata") or {}
    return fields.get(f"f:{field}") or {}


def _signs_of_others(place: Place) -> list[str]:
    return [
        f"{place.title} has {key}: {shorten(place.annotations[key], 20)!r}"
        for key, value in OTHERS.items()
        if key in place.annotations and value in (None, place.annotations[key])
    ]
