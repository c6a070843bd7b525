"""Finds gangs: pods that work together, and so can only be judged together. Pure.

Pods belong to one gang if they name the same group in a label or annotation, or if they have a common owner at any
level. Replicas of a Deployment and runs of a CronJob are not a gang, because each of them works by itself.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from gpu_exporter.reconciler.decision.surroundings import LOOSE
from gpu_exporter.reconciler.kubernetes.client.keys import (
    GANG_SIGN,
    GROUP_LISTS,
    GROUPS,
    NO_GROUP,
    domain_of,
    names_gang,
)
from gpu_exporter.reconciler.kubernetes.client.lean import SPEC_GROUP
from gpu_exporter.reconciler.kubernetes.owners import Link, controller_of, pods_above

Key: TypeAlias = tuple[str, str]
LISTED = re.compile(r"/([A-Za-z0-9.-]{1,253})")  # the names in one of GROUP_LISTS
SCHEDULES = frozenset(("CronJob", "ScaledJob", "Node"))  # their runs or pods do not work together


def group_keys(metadata: Mapping[str, Any], ancestry: Sequence[Link]) -> frozenset[Key]:
    """Keys that a pod shares with the other members of its gang. `ancestry`: references to its controllers.

    Labels and unverified references count too, because a gang that is too large can only delay a mark.
    """
    keys = _named(metadata)
    keys |= {("uid", uid) for uid in (str(metadata.get("uid") or ""), *pods_above(metadata)) if uid}
    for link in ancestry:
        if link.kind in LOOSE:
            break
        keys.add(("uid", link.uid))
    return frozenset(keys)


def is_member(metadata: Mapping[str, Any]) -> bool:
    """Returns whether a pod's metadata may make it a member of a gang. Raises any exception for malformed metadata."""
    own = controller_of(metadata)
    return len(group_keys(metadata, [] if own is None else [own])) > 1  # the first key is its own UID


def _named(metadata: Mapping[str, Any]) -> set[Key]:
    """Returns the groups that labels, annotations or the spec name, by a known key or by any key that means a gang.

    One scheduler may use several keys, so only the names count: two groups with the same name are one group.
    """
    keys = {("group", value) for _, value in _names(metadata)}
    for place in _places(metadata):
        for name in GROUP_LISTS:
            if listed := place.get(name):
                keys |= {("group", each) for each in LISTED.findall(listed)}
                keys.add(("groups", listed))  # all its groups carry the same list; a shortened list keeps its digest
    if group := metadata.get(SPEC_GROUP):
        keys.add((SPEC_GROUP, str(group)))
    return keys


def _places(metadata: Mapping[str, Any]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    return metadata.get("labels") or {}, metadata.get("annotations") or {}


def _names(metadata: Mapping[str, Any]) -> list[Key]:
    """Returns the labels and annotations that name the gang of the pod, with their values."""
    return [
        (name, value)
        for place in _places(metadata)
        for name, value in place.items()
        if value and (name in GROUPS or names_gang(name)) and not NO_GROUP.fullmatch(value)
    ]


def unnamed_gang(metadata: Mapping[str, Any], ancestry: Sequence[Link]) -> str:
    """Returns the label or annotation that shows that a pod belongs to a gang of unknown members; "" for none.

    A sign does not count if the pod's own controller defines the gang (its kind is not in LOOSE), or if the pod has a
    group name of the same scheduler.
    """
    if any(link.kind not in LOOSE for link in ancestry[:1]) or metadata.get(SPEC_GROUP):
        return ""
    named = {domain_of(name) for name, _ in _names(metadata)}
    signs = {name for place in _places(metadata) for name in place if GANG_SIGN.search(name)}
    return min((name for name in signs if domain_of(name) not in named), default="")


def gangs(keys: Mapping[str, frozenset[Key]]) -> dict[str, frozenset[str]]:
    """Returns, by pod, all pods of its gang, including the pod itself. A pod without keys is alone."""
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
