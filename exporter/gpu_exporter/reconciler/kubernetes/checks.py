"""Checks whether a live pod may carry a mark. Pure. The pod has the form in which the API server sends it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from gpu_exporter.common.outside import parse_timestamp, quantity, whole
from gpu_exporter.common.plain import shorten
from gpu_exporter.reconciler.decision.policy import LABEL, MARKED, Decision
from gpu_exporter.reconciler.decision.spared import SYSTEM
from gpu_exporter.reconciler.decision.surroundings import Surroundings
from gpu_exporter.reconciler.kubernetes.client.keys import MIRROR
from gpu_exporter.reconciler.kubernetes.client.lean import is_sidecar
from gpu_exporter.reconciler.marks import PREFIX, Refused

SINCE, GPUS, EVIDENCE, OBSERVED, OWNER, HELP, CAUSE = OURS = tuple(
    PREFIX + name for name in ("since", "gpus", "evidence", "observed-until", "owner", "help", "cause")
)
Resources: TypeAlias = Sequence[re.Pattern[str]]  # names of the resources whose devices are GPUs
CRITICAL = ("system-cluster-critical", "system-node-critical")


def is_foreign(pod: Mapping[str, Any]) -> bool:
    """Returns whether a pod has the label of a mark that the reconciler did not set.

    The reconciler ignores the label unless the pod has started and requests devices of a plugin. So the cluster's
    devices limit the number of marks, even if a user writes the label on thousands of pods.
    """
    if LABEL not in (pod["metadata"].get("labels") or {}):
        return False
    status = pod.get("status") or {}
    has_begun = bool(status.get("startTime")) or status.get("phase") not in (None, "Pending")
    return not (has_begun and asks_for_devices(pod["spec"])) or has_foreign_value(pod)


def is_own(metadata: Mapping[str, Any]) -> bool:
    """Returns whether metadata has the mark label and annotations of the reconciler."""
    annotations, labels = metadata.get("annotations"), metadata.get("labels")
    is_ours = isinstance(annotations, dict) and any(key in OURS for key in annotations)
    return is_ours and isinstance(labels, dict) and LABEL in labels


def has_foreign_value(pod: Mapping[str, Any]) -> bool:
    """Returns whether the mark label's value is no stage, and the pod has no annotation of the reconciler."""
    metadata = pod["metadata"]
    stage = (metadata.get("labels") or {}).get(LABEL)
    return (
        stage is not None and stage not in MARKED and not any(key in OURS for key in metadata.get("annotations") or ())
    )


def check_markable(
    pod: Mapping[str, Any], decision: Decision, wall: float, resources: Resources, system: Collection[str]
) -> None:
    """Raises Refused if a live pod must not carry the mark of this decision at `wall`.

    `system`: namespaces whose DaemonSets and critical pods belong to the cluster.
    """
    object_to_kind(pod, system, decision.around)
    object_to_identity(pod, decision)
    if has_foreign_value(pod):
        raise Refused("foreign", f"{LABEL} has a value that the reconciler never sets")
    asked = gpus_asked(pod["spec"], resources)
    if asked is None:
        raise Refused("gpus", f"cannot parse the number of GPUs in the pod's spec: {odd_limit(pod['spec'], resources)}")
    if pod["spec"].get("resourceClaims"):  # these add GPUs, which the kubelet counts
        if decision.held is None or asked > decision.held:
            beside = f"the pod requests {asked} GPUs beside its claims"
            raise Refused("gpus", f"{beside}, but exporters report {decision.held} for it")
    elif not decision.holds(asked):
        hint = "" if asked else "; if its GPUs have another resource name, set --attribution.resource"
        raise Refused("gpus", f"the pod requests {asked} GPUs, but exporters report {decision.held} for it{hint}")
    object_to_containers(pod, decision.needed_s, wall, resources)


def object_to_identity(pod: Mapping[str, Any], decision: Decision) -> None:
    """Raises Refused if a live pod is not the pod of the evidence."""
    if not decision.incarnation:
        raise Refused("identity", "the evidence names no pod UID: mount /var/log/pods into the agent")
    uid = pod["metadata"]["uid"]
    if uid != decision.incarnation:
        raise Refused("replaced", f"the live pod has UID {uid}, but the evidence is about UID {decision.incarnation}")
    node = pod["spec"].get("nodeName", "")
    others = sorted({unit.host for unit in decision.units} - {node, ""})
    if others:
        raise Refused("node", f"the pod runs on {node or 'no node'}, but the evidence is from {', '.join(others)}")


def object_to_kind(pod: Mapping[str, Any], system: Collection[str], around: Surroundings | None) -> None:
    """Raises Refused if a live pod must not carry any mark.

    `system`: namespaces whose DaemonSets and critical pods belong to the cluster, and are not counted as spared. In any
    other namespace such a pod keeps its GPUs too, but it is counted, because a tenant may have made it to keep GPUs.
    `around`: None if the controller of the pod was not read; it is then not verified.
    """
    metadata = pod["metadata"]
    if MIRROR in (metadata.get("annotations") or {}):
        raise Refused("static", "static pods belong to their node and get no mark")
    if metadata.get("deletionTimestamp"):
        raise Refused("terminating", "the pod is being deleted")
    namespace, name = metadata["namespace"], pod["spec"].get("priorityClassName")
    found = [Refused("critical", f"pods of priority class {name} get no mark")] if name in CRITICAL else []
    if around is not None and around.is_daemon:
        found.append(Refused("daemonset", "pods of a DaemonSet get no mark"))
    if namespace in system:
        why = f"namespace {namespace} is in policy.system_namespaces"
        raise Refused(SYSTEM, f"{found[0]}; {why}") if found else Refused("critical", f"{why}, so its pods get no mark")
    if found:
        raise found[0]


def object_to_containers(pod: Mapping[str, Any], needed_s: float, wall: float, resources: Resources) -> None:
    """Raises Refused unless every container that holds GPUs has run for `needed_s` (seconds) at `wall`.

    A holder could not work before its container started or restarted.
    """
    spec, status = pod["spec"], pod.get("status", {})
    holding = [each for each in long_running(spec) if _gpus(each, resources) != 0 or _has_claims(each)]
    names = {container["name"] for container in holding or spec["containers"]}
    running = {
        each["name"]: (each.get("state") or {}).get("running")
        for key in ("containerStatuses", "initContainerStatuses")
        for each in status.get(key) or ()
    }
    for name in sorted(names):
        state = running.get(name)
        if status.get("phase") != "Running" or not state:
            raise Refused("not_running", f"container {name} does not run")
        started = parse_timestamp(state["startedAt"])
        if started is None or not wall - started >= needed_s:
            raise Refused("restarted", f"container {name} started at {state['startedAt']}, after its GPUs became idle")


def gpus_asked(spec: Mapping[str, Any], resources: Resources) -> int | None:
    """Returns the number of GPUs and MIG instances that all containers of a pod request; None if a limit is invalid."""
    counts = [_gpus(container, resources) for container in long_running(spec)]
    return None if None in counts else sum(filter(None, counts))


def asks_for_devices(spec: Mapping[str, Any]) -> bool:
    """Returns whether a pod requests any resource of a device plugin, or has resource claims."""
    return bool(spec.get("resourceClaims")) or any("/" in name for each in long_running(spec) for name in limits(each))


def odd_limit(spec: Mapping[str, Any], resources: Resources) -> str:
    """Returns the first invalid limit of GPUs, in words; "" if all limits are valid."""
    for container in long_running(spec):
        for name, count in _gpu_limits(container, resources):
            if whole(quantity(count)) is None:
                return f"container {container['name']} has the limit {name}: {shorten(str(count), 40)!r}"
    return ""


def long_running(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the containers, and the init containers that keep running."""
    return [*spec["containers"], *(each for each in spec.get("initContainers") or () if is_sidecar(each))]


def limits(container: Mapping[str, Any]) -> Mapping[str, Any]:
    found = (container.get("resources") or {}).get("limits") or {}
    return found if isinstance(found, dict) else {}


def _has_claims(container: Mapping[str, Any]) -> bool:
    return bool((container.get("resources") or {}).get("claims"))


def _gpu_limits(container: Mapping[str, Any], resources: Resources) -> Iterator[tuple[str, Any]]:
    """Returns the limits of GPU resources. Names of device plugin resources contain a domain."""
    for name, count in limits(container).items():
        if "/" in name and any(resource.fullmatch(name) for resource in resources):
            yield name, count


def _gpus(container: Mapping[str, Any], resources: Resources) -> int | None:
    """Returns the number of GPUs and MIG instances that a container requests; None if a limit is invalid."""
    counts = [whole(quantity(count)) for _, count in _gpu_limits(container, resources)]
    return None if None in counts else sum(filter(None, counts))
