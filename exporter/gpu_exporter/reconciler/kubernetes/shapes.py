"""The kinds of objects that may be suspended or stopped: for each kind, the pods that it controls, wants and adopts.
Pure.

The table has one row per kind. The reconciler never acts on a kind without a row. Each row was compared with the real
controller: tests/component/test_shapes.py suspends an object of each kind and checks which pods end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from gpu_exporter.common.config.values import ACTIONS
from gpu_exporter.common.outside import whole
from gpu_exporter.reconciler.kubernetes.client.api import Json
from gpu_exporter.reconciler.kubernetes.client.keys import (
    JOB,
    JOB_NAME,
    JOB_ROLE,
    REPLICA_TYPE,
    REPLICATED_JOB,
    STATEFUL_SET,
    STOPPED,
    Kind,
)
from gpu_exporter.reconciler.kubernetes.owners import Link, pods_wanted

SUSPEND, DEACTIVATE, STOP = ACTIONS[:3]
Wanted: TypeAlias = Mapping[str, int] | None  # pods by role; None where they cannot be counted


class Found(NamedTuple):
    """An object on which an action is possible. `between`: by UID, the objects between this object and its pods."""

    target: Json
    between: Mapping[str, Json]


class Shape(NamedTuple):
    """The properties of one kind.

    `chains`: the possible kinds between a pod and the object, nearest first; () if the object itself controls pods.

    `wants`: the pods that the object keeps running now, by role, given the object and the objects between.

    `role`: the role of a pod, given the labels of the pod and of its controller.

    `adopts`: whether the object would adopt a pod with these labels and no controller.

    `shares_name`: the object's controller finds the objects between by name, even if they have another owner.

    `rest`: the path of the field that suspends or stops the object.

    `verbs`: the possible actions on the object, from ACTIONS.
    """

    kind: Kind
    chains: tuple[tuple[Kind, ...], ...]
    wants: Callable[[Found], Wanted]
    role: Callable[[Mapping[str, Any], Mapping[str, Any]], str]
    adopts: Callable[[Mapping[str, Any], Found], bool]
    rest: tuple[str, ...]
    verbs: tuple[str, ...] = (SUSPEND, DEACTIVATE)
    shares_name: bool = False

    @property
    def between(self) -> frozenset[Kind]:
        """The kinds between a pod and the object."""
        return frozenset(kind for chain in self.chains for kind in chain)


def match(chain: Sequence[Link]) -> tuple[Shape, int] | None:
    """Finds the shape and position of the highest possible target in a verified chain of controllers.

    None if there is no such controller. A controller counts only if all kinds below it in the chain fit its shape.
    """
    found = None
    for at in range(len(chain)):
        shape = SHAPES.get((chain[at].group, chain[at].kind))
        if shape is not None and tuple((link.group, link.kind) for link in chain[:at]) in shape.chains:
            found = shape, at
    return found


def one_role(labels: Mapping[str, Any], owner_labels: Mapping[str, Any]) -> str:
    """Returns the same role, "", for every pod. For kinds whose pods are all alike."""
    return ""


def _job_wants(found: Found) -> Wanted:
    try:
        wanted = pods_wanted("Job", {**found.target, "spec": {"parallelism": 1, **_spec(found.target)}})
    except ValueError:
        return None
    return None if wanted is None else {"": wanted}


def _jobset_wants(found: Found) -> Wanted:
    """Returns the number of pods that a JobSet wants, by replicated job.

    Counts the pods that the existing Jobs want, plus all pods of Jobs that do not exist yet.
    """
    wanted: Counter[str] = Counter()
    there: Counter[str] = Counter()
    for job in found.between.values():
        count, role = _job_wants(Found(job, {})), _jobset_role({}, job["metadata"].get("labels") or {})
        if count is None:
            return None
        there[role] += 1
        wanted[role] += count[""]
    statuses = _rows(_status(found.target), "replicatedJobsStatus")
    ended = {str(each.get("name")): whole(each.get("succeeded") or 0) for each in statuses}
    for each in _rows(_spec(found.target), "replicatedJobs"):
        role, template = str(each.get("name")), _spec(_mapping(each.get("template")))
        replicas, done = whole(each.get("replicas", 1)), ended.get(role, 0)
        pods = _job_wants(Found({"spec": template}, {}))
        if replicas is None or done is None or pods is None:
            return None
        wanted[role] += max(0, replicas - done - there[role]) * pods[""]
    return wanted


def _replicas_of(field: str) -> Callable[[Found], Wanted]:
    """Makes the function `wants` of a Kubeflow kind. `field`: the field of the spec that contains the replicas."""

    def wants(found: Found) -> Wanted:
        specs = _mapping(_spec(found.target).get(field))
        statuses = _mapping(_status(found.target).get("replicaStatuses"))
        wanted: dict[str, int] = {}
        for role, each in specs.items():
            replicas = whole(_mapping(each).get("replicas", 1))
            ended = whole(_mapping(statuses.get(role)).get("succeeded") or 0)
            if replicas is None or ended is None:
                return None
            wanted[role.lower()] = max(0, replicas - ended)
        return wanted or None

    return wants


def _one(found: Found) -> Wanted:
    return {"": 1}


def _jobset_role(labels: Mapping[str, Any], owner_labels: Mapping[str, Any]) -> str:
    return str(owner_labels.get(REPLICATED_JOB, ""))


def _kubeflow_role(labels: Mapping[str, Any], owner_labels: Mapping[str, Any]) -> str:
    return str(labels.get(REPLICA_TYPE) or labels.get(JOB_ROLE) or "").lower()


def _by_selector(labels: Mapping[str, Any], found: Found) -> bool:
    """Returns whether the selector of an existing Job or StatefulSet selects these labels."""
    return any(selects(_spec(each).get("selector"), labels) for each in (found.target, *found.between.values()))


def _by_job_name(labels: Mapping[str, Any], found: Found) -> bool:
    return bool(labels.get(JOB_NAME) == found.target["metadata"]["name"]) or _by_selector(labels, found)


def selects(selector: Any, labels: Mapping[str, Any]) -> bool:
    """Returns whether a LabelSelector of the API selects these labels. A missing or empty selector selects nothing.

    To be safe, a rule with an unknown operator is treated as matching.
    """
    wanted, rules = _mapping(_mapping(selector).get("matchLabels")), _rows(_mapping(selector), "matchExpressions")
    if not wanted and not rules:
        return False
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _holds(str(rule.get("operator")), labels.get(str(rule.get("key"))), rule.get("values") or ()) for rule in rules
    )


def _holds(operator: str, value: Any, values: Sequence[Any]) -> bool:
    if operator == "In":
        return value in values
    if operator == "NotIn":
        return value not in values
    return (value is None) if operator == "DoesNotExist" else operator != "Exists" or value is not None


def _spec(found: Json) -> Json:
    return _mapping(found.get("spec"))


def _status(found: Json) -> Json:
    return _mapping(found.get("status"))


def _mapping(value: Any) -> Json:
    """Returns a part of an object, if it is a mapping. Otherwise empty, because the definition of its kind may allow
    other values.
    """
    return value if isinstance(value, dict) else {}


def _rows(found: Json, key: str) -> Sequence[Json]:
    rows = found.get(key)
    return [_mapping(row) for row in rows] if isinstance(rows, list) else ()


def _kubeflow(kind: str, field: str, *chains: tuple[Kind, ...]) -> Shape:
    rest = ("spec", "runPolicy", "suspend")
    return Shape(("kubeflow.org", kind), ((), *chains), _replicas_of(field), _kubeflow_role, _by_job_name, rest)


SHAPES: Mapping[Kind, Shape] = {
    shape.kind: shape
    for shape in (
        Shape(JOB, ((),), _job_wants, one_role, _by_selector, ("spec", "suspend")),
        Shape(("jobset.x-k8s.io", "JobSet"), ((JOB,),), _jobset_wants, _jobset_role, _by_selector, ("spec", "suspend")),
        _kubeflow("PyTorchJob", "pytorchReplicaSpecs"),
        _kubeflow("TFJob", "tfReplicaSpecs"),
        _kubeflow("XGBoostJob", "xgbReplicaSpecs"),
        _kubeflow("PaddleJob", "paddleReplicaSpecs"),
        _kubeflow("JAXJob", "jaxReplicaSpecs"),
        # The MPI operator creates a Job for the launcher. The training operator itself controls the launcher's pod.
        _kubeflow("MPIJob", "mpiReplicaSpecs", (JOB,)),
        Shape(
            ("kubeflow.org", "Notebook"),
            ((STATEFUL_SET,),),
            _one,
            one_role,
            _by_selector,
            ("metadata", "annotations", STOPPED),
            (STOP,),
            shares_name=True,
        ),
    )
}
