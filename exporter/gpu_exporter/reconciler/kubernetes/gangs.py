"""Which pods work together, so that one of them says nothing by itself. Pure.

Pods that name one group in a label or annotation are together, and pods below one owner, whatever lies in between.
Replicas of a Deployment, and the runs of a CronJob, are not: each works for itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from gpu_exporter.reconciler.kubernetes.keys import GROUPS
from gpu_exporter.reconciler.kubernetes.owners import Link, pods_above

Key: TypeAlias = tuple[str, str]
SCHEDULES = frozenset(("CronJob", "ScaledJob", "Node"))  # their runs, or pods, have nothing in common
# What is above one of these is not a group of pods that wait for each other, nor is it itself.
LOOSE = frozenset(
    ("ReplicaSet", "ReplicationController", "Deployment", "Rollout", "CronJob", "ScaledJob", "DaemonSet", "Node")
)


def group_keys(metadata: Mapping[str, Any], ancestry: Sequence[Link]) -> frozenset[Key]:
    """What a pod has in common with the others of its gang. `ancestry`: references to its controllers.

    Labels and a reference that is not proven count too: a gang that is too large can only delay a mark.
    """
    named = (metadata.get("labels") or {}, metadata.get("annotations") or {})
    keys = {(name, place[name]) for name in GROUPS for place in named if place.get(name)}
    keys |= {("uid", uid) for uid in (str(metadata.get("uid") or ""), *pods_above(metadata)) if uid}
    for link in ancestry:
        if link.kind in LOOSE:
            break
        keys.add(("uid", link.uid))
    return frozenset(keys)


def gangs(keys: Mapping[str, frozenset[Key]]) -> dict[str, frozenset[str]]:
    """By pod, all pods of its gang, itself among them. Pods without keys are alone."""
    by_key: defaultdict[Key, list[str]] = defaultdict(list)
    for pod, its in keys.items():
        for key in its:
            by_key[key].append(pod)
    found: dict[str, frozenset[str]] = {}
    for pod in keys:
        if pod in found:
            continue
        together, left = {pod}, [pod]
        while left:
            for key in keys[left.pop()]:
                fresh = [each for each in by_key.pop(key, ()) if each not in together]
                together.update(fresh)
                left.extend(fresh)
        whole = frozenset(together)
        found |= dict.fromkeys(whole, whole)
    return found
