"""Finds out which pods have not ended: one list of the metadata of pods for each of their namespaces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.threads import NoThread, run_ahead
from gpu_exporter.reconciler.decision.surroundings import Incarnation
from gpu_exporter.reconciler.kubernetes.client.api import METADATA_LIST, Api, Budget, Json
from gpu_exporter.reconciler.kubernetes.client.namespace import ALIVE
from gpu_exporter.reconciler.marks import MarkError

ALL_S, NAMESPACE_S = 10.0, 5.0  # for all namespaces, and for one of them: 20,000 pods take a second
BYTES_MAX = 256 * 1024 * 1024  # of one list, which is read as a stream
WORKERS = 4


def find_living(api: Api, clock: Clock, pods: Collection[Incarnation]) -> set[Incarnation]:
    """Returns the pods that have not ended, and all pods of a namespace that is not read in time.

    A pod that is being deleted has not ended: a finalizer or a silent kubelet can keep it. A pod of a deleted node gets
    the phase Failed from the controller manager, and has ended even if a finalizer keeps it.
    """
    by_namespace: defaultdict[str, set[Incarnation]] = defaultdict(set)
    for pod in pods:
        by_namespace[pod[0].namespace].add(pod)
    until = clock.monotonic() + ALL_S

    def read(namespace: str) -> set[Incarnation]:
        wanted = by_namespace[namespace]
        most = Budget(BYTES_MAX, min(until, clock.monotonic() + NAMESPACE_S), clock)
        return _living_of(api, namespace, wanted, most) if clock.monotonic() < until else wanted

    try:
        return set().union(*run_ahead(read, sorted(by_namespace), WORKERS, "living"))
    except NoThread:
        return set(pods)


def _living_of(api: Api, namespace: str, wanted: set[Incarnation], most: Budget) -> set[Incarnation]:
    uids = {(name.name, uid) for name, uid in wanted} | {(name.name, "") for name, uid in wanted if not uid}
    found: set[tuple[str, str]] = set()
    odd: set[str] = set()  # pods whose UID cannot be read

    def keep(pod: Json) -> None:
        name, uid = str(pod["metadata"]["name"]), str(pod["metadata"]["uid"])
        found.update(key for key in ((name, uid), (name, "")) if key in uids)

    try:
        for _ in api.pages(
            api.core.list_namespaced_pod,
            namespace,
            kind="Pod",
            keep=keep,
            odd=lambda name, reason, why: odd.add(name.rpartition("/")[2]),
            most=most,
            field_selector=ALIVE,
            _headers=METADATA_LIST,
        ):
            pass
    except MarkError:
        return wanted
    return {pod for pod in wanted if (pod[0].name, pod[1]) in found or pod[0].name in odd or "" in odd}
