"""Trims objects to the few fields that the reconciler uses. Each field has a size limit. Pure.

Without these limits, a tenant could fill the memory with thousands of objects of 1.5 MiB each (the limit of etcd).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_exporter.common.outside import need_name
from gpu_exporter.common.plain import shorten
from gpu_exporter.reconciler.kubernetes.client.keys import GANG_SIGN, GROUP_LISTS, READ, SIGNS_MAX
from gpu_exporter.reconciler.kubernetes.client.stream import MALFORMED, TOO_LARGE, Odd
from gpu_exporter.reconciler.marks import PREFIX

STAMPS = ("namespace", "resourceVersion", "creationTimestamp", "deletionTimestamp")
TEXT_MAX = 512  # characters of an annotation, or of a word of a reference; a shortened text keeps its digest
LIST_MAX = 16 * 1024  # characters of a list of groups; the members of groups that are cut off are judged alone
LABELS_MAX = 16 * 1024  # characters of all labels of an object
REFERENCES_MAX = 32  # pods that an object may name as its owners
FIELDS_MAX = 64  # entries of managedFields for annotations or labels that the reconciler reads
VALUE_BYTES = 64  # approximate memory of a value in addition to its characters
CONTROLLER_KIB = 256
CONTROLLER_MAX = CONTROLLER_KIB * 1024  # bytes of the spec and status of one controller, without pod templates
SPEC_GROUP = "group"
"""Key of trimmed metadata: the group of pods in the pod's spec, if the spec names a group."""
DISRUPTED = "DisruptionTarget"  # condition of a pod that was taken away, e.g. by eviction or preemption
ODD_KEY = "odd"
"""Key of trimmed metadata that could not be kept completely: one of REASONS, and why. No decision uses the object."""


def trim(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of metadata that the reconciler uses.

    Raises Odd, or for malformed metadata any other exception.
    """
    odd: list[tuple[str, str]] = []
    labels, annotations = (_texts(metadata.get(key), key, odd) for key in ("labels", "annotations"))
    if (length := sum(len(key) + len(value) for key, value in labels.items())) > LABELS_MAX:
        labels = {key: value for key, value in labels.items() if is_read(key) or GANG_SIGN.search(key)}
        odd.append((TOO_LARGE, f"its labels have {length} characters, more than {LABELS_MAX}"))
    references = _rows(metadata.get("ownerReferences"), "owner references", odd)
    if sum(reference.get("kind") == "Pod" for reference in references) > REFERENCES_MAX:
        odd.append((TOO_LARGE, f"it names more than {REFERENCES_MAX} pods as its owners"))
    signs = sorted(key for key in annotations if GANG_SIGN.search(key) and not is_read(key))[:SIGNS_MAX]
    texts = {
        "labels": {shorten(key, TEXT_MAX): shorten(value, TEXT_MAX) for key, value in labels.items()},
        "annotations": {
            key: shorten(annotations[key], LIST_MAX if key in GROUP_LISTS else TEXT_MAX)
            for key in (*filter(is_read, annotations), *signs)
        },
        "managedFields": _written(_rows(metadata.get("managedFields"), "managed fields", odd)),
        "ownerReferences": _references(references),
        ODD_KEY: odd[0] if odd else None,
    }
    return {
        "name": need_name(metadata["name"]),
        "uid": need_name(metadata["uid"]),
        **{key: value for key, value in texts.items() if value},  # empty values of 20,000 pods would cost 10 MiB
        **{key: need_name(metadata[key]) for key in STAMPS if metadata.get(key)},
    }


def is_read(key: str) -> bool:
    """Returns whether the reconciler reads the label or annotation with this key."""
    return key.startswith(PREFIX) or key in READ


def _texts(value: Any, what: str, odd: list[tuple[str, str]]) -> Mapping[str, str]:
    """Labels or annotations. Omits values that are not texts, and records them in `odd`."""
    if value is None:
        return {}
    texts = {key: text for key, text in value.items() if isinstance(text, str)} if isinstance(value, dict) else {}
    if not isinstance(value, dict) or len(texts) < len(value):
        odd.append((MALFORMED, f"its {what} are not texts"))
    return texts


def _rows(value: Any, what: str, odd: list[tuple[str, str]]) -> list[Mapping[str, Any]]:
    """Returns a list of JSON objects. Omits other values, and records them in `odd`."""
    if value is None:
        return []
    rows: list[Mapping[str, Any]] = []
    if isinstance(value, list):
        rows = [row for row in value if isinstance(row, dict)]
    if not isinstance(value, list) or len(rows) < len(value):
        odd.append((MALFORMED, f"its {what} cannot be parsed"))
    return rows


def _references(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the owner references that matter: the controller first, then pods."""
    controller = next((row for row in rows if row.get("controller")), None)
    pods = [row for row in rows if row.get("kind") == "Pod" and row is not controller]
    chosen = [row for row in (controller, *pods[:REFERENCES_MAX]) if row is not None]
    words = ("apiVersion", "kind", "name", "uid")
    return [
        {**{key: shorten(str(row.get(key) or ""), TEXT_MAX) for key in words}, "controller": row is controller}
        for row in chosen
    ]


def _written(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the entries of managedFields for the labels and annotations that the reconciler reads."""
    kept = []
    for entry in entries:
        written = (entry.get("fieldsV1") or {}).get("f:metadata") or {}
        fields: dict[str, dict[str, Any]] = {
            part: {key: {} for key in written.get(part) or {} if is_read(key.removeprefix("f:"))}
            for part in ("f:annotations", "f:labels")
        }
        if any(fields.values()):
            kept.append({"time": shorten(str(entry.get("time") or ""), 64), "fieldsV1": {"f:metadata": fields}})
    return kept[-FIELDS_MAX:]


def trim_pod(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Reduces a pod to the fields that its mark needs. Raises Odd, or for a malformed pod any other exception."""
    spec, status = pod["spec"], pod.get("status") or {}
    return {
        "metadata": trim(pod["metadata"]),
        "spec": {
            **{key: need_name(spec[key]) for key in ("nodeName", "priorityClassName") if spec.get(key)},
            "containers": [_trim_container(each) for each in spec["containers"]],
            "initContainers": [_trim_container(each) for each in spec.get("initContainers") or () if is_sidecar(each)],
            "resourceClaims": bool(spec.get("resourceClaims")),
        },
        "status": {
            # Reasons of the kubelet may contain a slash: OutOfnvidia.com/gpu.
            **{key: shorten(str(status[key]), TEXT_MAX) for key in ("phase", "reason", "startTime") if status.get(key)},
            **{
                key: [_trim_status(each) for each in status.get(key) or ()]
                for key in ("containerStatuses", "initContainerStatuses")
            },
            "conditions": [
                {"type": each["type"], "status": str(each.get("status"))[:TEXT_MAX]}
                for each in status.get("conditions") or ()
                if each.get("type") == DISRUPTED or str(each.get("type")).startswith(PREFIX)
            ],
        },
    }


def group_of(spec: Mapping[str, Any]) -> str:
    """Returns the group that the spec of a pod names; "" for none.

    The gang scheduling of Kubernetes itself (KEP-4671) uses the field `workloadRef` in 1.35, and `schedulingGroup`
    later.
    """
    reference, group = spec.get("workloadRef"), spec.get("schedulingGroup")
    words = [reference.get(key) for key in ("name", "podGroup", "podGroupReplicaKey")] if reference else []
    words += [group.get("podGroupName")] if group else []
    return shorten("/".join(str(word or "") for word in words), TEXT_MAX)


def is_sidecar(container: Mapping[str, Any]) -> bool:
    """Returns whether an init container keeps running beside the containers."""
    return container.get("restartPolicy") == "Always"


def _trim_container(container: Mapping[str, Any]) -> dict[str, Any]:
    """Reduces a container to its name, restart policy, limits of device plugins, and whether it has claims.

    Names of device plugin resources contain a domain.
    """
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    devices = {name: shorten(str(count), TEXT_MAX) for name, count in limits.items() if "/" in name}
    policy = {"restartPolicy": "Always"} if is_sidecar(container) else {}
    asked = {"limits": devices, "claims": bool(resources.get("claims"))}
    return {"name": need_name(container["name"]), "resources": asked, **policy}


def _trim_status(status: Mapping[str, Any]) -> dict[str, Any]:
    running = (status.get("state") or {}).get("running")
    state = {} if running is None else {"running": {"startedAt": shorten(str(running.get("startedAt")), TEXT_MAX)}}
    return {"name": need_name(status["name"]), "state": state}


class Room:
    """The memory that is still free, in bytes (approximate)."""

    def __init__(self, left: int, text: str) -> None:
        """`left`: free memory in bytes. `text`: the text of Odd if no memory is left."""
        self._left = left
        self._text = text

    def take(self, cost: int) -> None:
        """Uses `cost` bytes. Raises Odd if they exceed the free memory."""
        self._left -= cost
        if self._left < 0:
            raise Odd(TOO_LARGE, self._text)


def weigh(value: Any) -> int:
    """Returns the approximate memory of a value, in bytes."""
    if isinstance(value, str):
        return VALUE_BYTES + len(value)
    if isinstance(value, Mapping):
        return VALUE_BYTES + sum(weigh(key) + weigh(each) for key, each in value.items())
    return VALUE_BYTES + (sum(map(weigh, value)) if isinstance(value, Sequence | frozenset) else 0)


def trim_controller(found: Mapping[str, Any], *, is_counted: bool) -> dict[str, Any]:
    """Removes a controller's pod templates. `is_counted`: keeps its spec and status. Raises Odd, ValueError."""
    kept: dict[str, Any] = {"metadata": trim(found["metadata"])}
    if odd := kept["metadata"].get(ODD_KEY):
        raise Odd(*odd)
    if is_counted:
        room = Room(
            CONTROLLER_MAX, f"its spec and status are larger than {CONTROLLER_MAX // 1024} KiB without its pods"
        )
        for key in ("spec", "status"):
            if not isinstance(part := found.get(key) or {}, dict):
                raise Odd(MALFORMED, f"its {key} cannot be parsed")
            kept[key] = _without_pods(part, room)
    return kept


def _without_pods(value: Any, room: Room) -> Any:
    room.take(VALUE_BYTES)
    if isinstance(value, dict):
        if "containers" in value:  # the spec of a pod
            return {}
        room.take(sum(map(len, value)))
        return {key: _without_pods(each, room) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_pods(each, room) for each in value]
    if isinstance(value, str):
        room.take(len(value))  # never shortened: a shortened list of indexes would be wrong
    return value
