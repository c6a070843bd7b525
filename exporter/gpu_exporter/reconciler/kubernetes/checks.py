"""Whether a live pod may carry a mark: pure, on the pod as the API server sends it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from gpu_exporter.outside import parse_timestamp, quantity, whole
from gpu_exporter.plain import shorten
from gpu_exporter.reconciler.decision.policy import LABEL, MARKED, Decision
from gpu_exporter.reconciler.kubernetes.keys import MIRROR
from gpu_exporter.reconciler.kubernetes.lean import is_sidecar
from gpu_exporter.reconciler.marks import PREFIX, Refused
from gpu_exporter.vendor import NVIDIA

SINCE, GPUS, EVIDENCE, OBSERVED, OWNER, HELP = OURS = tuple(
    PREFIX + name for name in ("since", "gpus", "evidence", "observed-until", "owner", "help")
)
GPU_RESOURCES = NVIDIA.resources()
Resources: TypeAlias = Sequence[re.Pattern[str]]  # names of the resources whose devices are GPUs
CRITICAL = ("system-cluster-critical", "system-node-critical")


def is_foreign(pod: Mapping[str, Any]) -> bool:
    """Whether our label on a pod is not a mark of ours, so that it is left alone.

    A mark is only ever set on a pod that has begun and asks for devices of a plugin. So whoever writes our label on
    pods by the thousand makes no work: marks are as many as the devices of the cluster at most.
    """
    if LABEL not in (pod["metadata"].get("labels") or {}):
        return False
    status = pod.get("status") or {}
    has_begun = bool(status.get("startTime")) or status.get("phase") not in (None, "Pending")
    return not (has_begun and asks_for_devices(pod["spec"])) or has_foreign_value(pod)


def is_own(metadata: Mapping[str, Any]) -> bool:
    """Whether metadata has our label and annotations of ours."""
    annotations, labels = metadata.get("annotations"), metadata.get("labels")
    is_ours = isinstance(annotations, dict) and any(key in OURS for key in annotations)
    return is_ours and isinstance(labels, dict) and LABEL in labels


def has_foreign_value(pod: Mapping[str, Any]) -> bool:
    """Whether the pod has our label with a value that is not ours, and no annotation of ours."""
    metadata = pod["metadata"]
    stage = (metadata.get("labels") or {}).get(LABEL)
    return (
        stage is not None and stage not in MARKED and not any(key in OURS for key in metadata.get("annotations") or ())
    )


def check_markable(
    pod: Mapping[str, Any], decision: Decision, wall: float, resources: Resources = GPU_RESOURCES
) -> None:
    """Raise Refused when a live pod must not carry the mark of this decision at `wall`."""
    object_to_kind(pod)
    object_to_identity(pod, decision)
    if has_foreign_value(pod):
        raise Refused("foreign", f"{LABEL} has a value that is not ours")
    asked = gpus_asked(pod["spec"], resources)
    if asked is None:
        raise Refused("gpus", f"how many GPUs the pod asks for is not understood: {odd_limit(pod['spec'], resources)}")
    if pod["spec"].get("resourceClaims"):  # which say how many more: the kubelet counted them
        if decision.held is None or asked > decision.held:
            beside = f"the pod asks for {asked} GPUs beside its claims"
            raise Refused("gpus", f"{beside}, the evidence is of {decision.held}")
    elif not decision.holds(asked):
        hint = "" if asked else "; if its GPUs have a resource of another name, set --attribution.resource"
        raise Refused("gpus", f"the pod asks for {asked} GPUs, the evidence is of {decision.held}{hint}")
    object_to_containers(pod, decision.needed_s, wall, resources)


def object_to_identity(pod: Mapping[str, Any], decision: Decision) -> None:
    """Raise Refused when a live pod is not the one that the evidence is of."""
    if not decision.incarnation:
        raise Refused("identity", "the evidence names no pod UID: mount /var/log/pods into the agent")
    uid = pod["metadata"]["uid"]
    if uid != decision.incarnation:
        raise Refused("replaced", f"the live pod is {uid}, the evidence is of {decision.incarnation}")
    node = pod["spec"].get("nodeName", "")
    others = sorted({unit.host for unit in decision.units} - {node, ""})
    if others:
        raise Refused("node", f"the pod runs on {node or 'no node'}, the evidence is of {', '.join(others)}")


def object_to_kind(pod: Mapping[str, Any]) -> None:
    """Raise Refused when a live pod must not carry any mark."""
    metadata = pod["metadata"]
    if MIRROR in (metadata.get("annotations") or {}):
        raise Refused("static", "a static pod belongs to its node")
    if metadata.get("deletionTimestamp"):
        raise Refused("terminating", "the pod is being deleted")
    if metadata["namespace"] == "kube-system" or pod["spec"].get("priorityClassName") in CRITICAL:
        raise Refused("critical", "a part of the cluster itself")
    if any(owner.get("kind") == "DaemonSet" for owner in metadata.get("ownerReferences") or ()):
        raise Refused("daemonset", "a DaemonSet's pod belongs to its node")


def object_to_containers(
    pod: Mapping[str, Any], needed_s: float, wall: float, resources: Resources = GPU_RESOURCES
) -> None:
    """Raise Refused unless every container that holds GPUs has run for `needed_s` at `wall`.

    A holder whose container had not started, or was restarted, could not have worked for so long.
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
        if started is None or not wall - started >= needed_s:  # before, it could not have worked
            raise Refused("restarted", f"container {name} started at {state['startedAt']}, within the idle time")


def gpus_asked(spec: Mapping[str, Any], resources: Resources = GPU_RESOURCES) -> int | None:
    """GPUs and MIG instances that a pod's containers ask for together; None where that is not understood."""
    counts = [_gpus(container, resources) for container in long_running(spec)]
    return None if None in counts else sum(filter(None, counts))


def asks_for_devices(spec: Mapping[str, Any]) -> bool:
    """Whether a pod asks for any resource of a device plugin, or has claims."""
    return bool(spec.get("resourceClaims")) or any("/" in name for each in long_running(spec) for name in limits(each))


def odd_limit(spec: Mapping[str, Any], resources: Resources) -> str:
    """The first limit of GPUs that is not understood, in words; "" for none."""
    for container in long_running(spec):
        for name, count in _gpu_limits(container, resources):
            if whole(quantity(count)) is None:
                return f"container {container['name']} has the limit {name}: {shorten(str(count), 40)!r}"
    return ""


def long_running(spec: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Containers, and the init containers that stay."""
    return [*spec["containers"], *(each for each in spec.get("initContainers") or () if is_sidecar(each))]


def limits(container: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a container may use at most, by resource."""
    found = (container.get("resources") or {}).get("limits") or {}
    return found if isinstance(found, dict) else {}


def _has_claims(container: Mapping[str, Any]) -> bool:
    return bool((container.get("resources") or {}).get("claims"))


def _gpu_limits(container: Mapping[str, Any], resources: Resources) -> Iterator[tuple[str, Any]]:
    """Resources of device plugins have a domain in their name."""
    for name, count in limits(container).items():
        if "/" in name and any(resource.fullmatch(name) for resource in resources):
            yield name, count


def _gpus(container: Mapping[str, Any], resources: Resources) -> int | None:
    """GPUs and MIG instances that a container asks for; None where that is not understood."""
    counts = [whole(quantity(count)) for _, count in _gpu_limits(container, resources)]
    return None if None in counts else sum(filter(None, counts))
