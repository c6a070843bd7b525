"""Marks on pods: one label and up to seven annotations, written by merge patch, with an Event that contains the reason.

A pod is read before it is marked. The patch carries its UID and resourceVersion, so the API server refuses the patch if
the pod was since replaced (422, cause metadata.uid) or changed (409). A renewal carries the resourceVersion of the
list, so it never overwrites a later change by the owner; the next cycle tries again. A withdrawal carries only the UID,
so that no change of the pod can delay it.

On a pod that has started and requests devices, the label belongs to the reconciler. If an owner has removed the
reconciler's annotations, the reconciler restores them by evidence; without evidence, it removes the label, because its
age is unknown. On any other pod, the label is foreign: the reconciler only counts it.

If a site allows it, the reconciler also sets a pod condition with a heartbeat while the label is `underused`, so that
other tools can require a recent mark. The label remains the mark. It is set and removed before the condition.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from gpu_exporter.common.clock import SYSTEM_CLOCK, Clock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.outside import parse_timestamp
from gpu_exporter.reconciler.decision.outcomes import ENDED as OVER
from gpu_exporter.reconciler.decision.outcomes import LOST, RUNS
from gpu_exporter.reconciler.decision.policy import LABEL, UNDERUSED, Decision
from gpu_exporter.reconciler.decision.surroundings import Incarnation, Surroundings, Unreadable
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.headline import say_cause
from gpu_exporter.reconciler.kubernetes.around.survey import PodSurveyor
from gpu_exporter.reconciler.kubernetes.checks import (
    CAUSE,
    EVIDENCE,
    GPUS,
    HELP,
    OBSERVED,
    OURS,
    OWNER,
    SINCE,
    Resources,
    check_markable,
    is_foreign,
    is_own,
    object_to_containers,
    object_to_identity,
    object_to_kind,
)
from gpu_exporter.reconciler.kubernetes.client.api import METADATA_LIST, Api, Budget, OddAnswer
from gpu_exporter.reconciler.kubernetes.client.lean import DISRUPTED, ODD_KEY, trim, trim_pod
from gpu_exporter.reconciler.kubernetes.client.namespace import ENDED
from gpu_exporter.reconciler.kubernetes.events import EventWriter
from gpu_exporter.reconciler.kubernetes.living import find_living
from gpu_exporter.reconciler.kubernetes.notice import CONDITION, condition, event_note
from gpu_exporter.reconciler.marks import Mark, MarkError, Refused, timestamp

log = logging.getLogger(__name__)
PENDING = "Pending"
ALONE_MAX = 50  # odd pods per cycle whose metadata is read one by one
PENDING_S, PENDING_MAX = 5.0, 512 * 1024 * 1024  # seconds and bytes for counting pods that have not started
# The reconciler's own manager: an owner's wish is as old as the last write by the manager that wrote it.
FIELD_MANAGER = "gpu-exporter-reconciler"


class PodMarker:
    """The marks on the pods of one API server."""

    scheduler = "kubernetes"
    rest_s = 0.0  # the API server itself asks for pauses (429)

    def __init__(
        self,
        api: Api,
        policy: Policy,
        clock: Clock = SYSTEM_CLOCK,
        instance: str = "",
        *,
        resources: Resources,
        sets_condition: bool = False,
    ) -> None:
        """`resources`: resources whose devices are GPUs, as in --attribution.resource of the exporter.

        `sets_condition`: sets a pod condition in addition to the label. This needs `patch` on pods/status.
        """
        self._policy = policy
        self._system = frozenset(policy.system_namespaces.replace(",", " ").split())
        self._sets_condition = sets_condition
        self._clock = clock
        self._surveyor = PodSurveyor(api, policy, clock, resources)
        self.resources = resources
        self.api = api
        self._events = EventWriter(api, instance)
        self.foreign = 0

    @property
    def odd(self) -> Mapping[tuple[str, str], int]:
        return self.api.odd

    def survey(
        self, names: Collection[HolderName], fresh: Collection[HolderName], wall: float
    ) -> Mapping[HolderName, Surroundings | Unreadable]:
        return self._surveyor.survey(names, fresh, wall)

    def find_living(self, holders: Collection[Incarnation]) -> Collection[Incarnation]:
        return find_living(self.api, self._clock, holders)

    def read_fate(self, name: HolderName, incarnation: str) -> str:
        """See Surveyor.read_fate. A pod that ended by itself exists for a while, with a phase that shows its end."""
        try:
            pod = self._read(name)
        except (Refused, OddAnswer):
            return LOST
        except MarkError:
            return RUNS
        if pod["metadata"]["uid"] != incarnation:
            return LOST
        status = pod.get("status") or {}
        if status.get("phase") not in ENDED:
            return RUNS
        conditions = {each.get("type"): each.get("status") for each in status.get("conditions") or ()}
        was_taken = conditions.get(DISRUPTED) == "True" or status.get("reason")  # neither is set if it ended by itself
        return LOST if was_taken else OVER

    def list_marks(self) -> Sequence[Mark]:
        large: list[str] = []
        # A pod that has not started has no mark of the reconciler, even with the label. There may be thousands of them.
        listed = self.api.pages(
            self.api.core.list_pod_for_all_namespaces,
            kind="Pod",
            keep=lambda pod: None if is_foreign(pod) else trim_pod(pod),
            odd=lambda name, reason, why: large.append(name),
            label_selector=LABEL,
            field_selector="status.phase!=Pending",
        )
        foreign, marks = 0, list[Mark]()
        for pod in listed:
            if pod is None:
                foreign += 1
            else:
                marks.append(read_mark(pod))
        for metadata in self._metadata_of(large):
            if is_own(metadata):
                marks.append(read_mark({"metadata": metadata, "spec": {}, "status": {}, ODD_KEY: True}))
            else:
                foreign += LABEL in (metadata.get("labels") or {})
        again, others = self._list_pending()
        self.foreign = foreign + others
        return [*marks, *again]

    def _metadata_of(self, names: Sequence[str]) -> Iterator[Mapping[str, Any]]:
        """Returns the metadata of pods that are malformed or too large. This is enough to withdraw a mark."""
        for namespace, _, name in (full.partition("/") for full in names[:ALONE_MAX]):
            try:
                yield trim(self.api.read_metadata(namespace, name))
            except (MarkError, ValueError, LookupError, TypeError, AttributeError) as exc:
                log.warning("pod %s/%s: its mark cannot be read: %s", namespace, name, exc)

    def _list_pending(self) -> tuple[list[Mark], int]:
        """Returns the marks of pods that are pending again, e.g. after a node restart; and the number of other pods
        with the label.

        The list contains only metadata, and stops at its limits, because thousands of pods may still be waiting to
        start.
        """
        marks, others = list[Mark](), 0
        most = Budget(PENDING_MAX, self._clock.monotonic() + PENDING_S, self._clock)
        try:
            for metadata in self.api.pages(
                self.api.core.list_pod_for_all_namespaces,
                kind="Pod",
                keep=lambda pod: trim(pod["metadata"]) if is_own(pod["metadata"]) else None,
                most=most,
                label_selector=LABEL,
                field_selector="status.phase=Pending",
                _headers=METADATA_LIST,
            ):
                if metadata is not None and len(marks) < ALONE_MAX:
                    marks.append(read_mark({"metadata": metadata, "spec": {}, "status": {"phase": PENDING}}))
                else:
                    others += 1
        except MarkError as exc:
            if not most.is_spent:
                raise
            log.warning("cannot count all pods with the label %s that have not started: %s", LABEL, exc)
        return marks, others

    def check(self, mark: Mark, decision: Decision, wall: float) -> None:
        object_to_odd(mark.live)
        self._check_markable(mark.live, decision, wall)

    def check_alone(self, mark: Mark, decision: Decision | None, needed_s: float, wall: float) -> None:
        object_to_odd(mark.live)
        object_to_kind(mark.live, self._system, decision.around if decision is not None else None)
        if decision is not None and decision.incarnation:
            object_to_identity(mark.live, decision)
        object_to_containers(mark.live, needed_s, wall, self.resources)

    def inspect(self, decision: Decision, wall: float) -> None:
        self._check_markable(self._read(decision.name), decision, wall)

    def _check_markable(self, pod: Mapping[str, Any], decision: Decision, wall: float) -> None:
        check_markable(pod, decision, wall, self.resources, self._system)

    def label(self, decision: Decision) -> str:
        return f"{LABEL}={decision.stage}"

    def write(self, decision: Decision, wall: float) -> str:
        pod = self._read(decision.name)
        self._check_markable(pod, decision, wall)
        metadata = pod["metadata"]
        uid = metadata["uid"]
        change = {"labels": {LABEL: decision.stage}, "annotations": annotate(decision, self._policy.help_url)}
        self._patch(decision.name, uid, {**change, "resourceVersion": metadata["resourceVersion"]})
        if self._sets_condition and decision.stage == UNDERUSED:
            self._patch_condition(decision.name, uid, condition(decision, wall, wall))
        note = event_note(decision, self._policy, wall)
        self._record(decision.name, uid, wall, f"Gpu{decision.stage.title().replace('-', '')}", note)
        return LABEL

    def renew(self, mark: Mark, decision: Decision) -> None:
        version = mark.live["metadata"]["resourceVersion"]
        change = annotate(decision, self._policy.help_url)
        self._patch(mark.name, mark.incarnation, {"annotations": change, "resourceVersion": version})
        if self._sets_condition and mark.stage == UNDERUSED:
            seen = decision.observed_wall
            first = None if _has_condition(mark.live) else seen
            self._patch_condition(mark.name, mark.incarnation, condition(decision, seen, first))

    def withdraw(self, mark: Mark, reason: str, wall: float) -> None:
        change = {"labels": {LABEL: None}, "annotations": dict.fromkeys(OURS)}
        self._patch(mark.name, mark.incarnation, change)
        is_odd = self._sets_condition and mark.live is not None and bool(mark.live.get(ODD_KEY))
        if is_odd or _has_condition(mark.live):  # perhaps set by an earlier run
            self._patch_condition(mark.name, mark.incarnation, {"$patch": "delete", "type": CONDITION})
        if not mark.ended:
            self._record(mark.name, mark.incarnation, wall, "GpuMarkWithdrawn", reason)

    def _read(self, name: HolderName) -> dict[str, Any]:
        try:
            return self.api.call(self.api.core.read_namespaced_pod, name.name, name.namespace, keep=trim_pod)
        except MarkError as exc:
            if exc.result == "replaced":
                raise Refused("replaced", f"{name} is gone") from exc
            raise

    def _patch(self, name: HolderName, uid: str, change: Mapping[str, Any]) -> None:
        """Changes the metadata of the pod with this UID. Raises MarkError."""
        self.api.send(
            self.api.core.patch_namespaced_pod,
            name.name,
            name.namespace,
            {"metadata": {**change, "uid": uid}},
            _content_type="application/merge-patch+json",
            field_manager=FIELD_MANAGER,
        )

    def _patch_condition(self, name: HolderName, uid: str, change: Mapping[str, Any]) -> None:
        """Changes the reconciler's condition on the pod with this UID. Only logs a failure: the label is the mark."""
        try:
            self.api.send(
                self.api.core.patch_namespaced_pod_status,
                name.name,
                name.namespace,
                {"metadata": {"uid": uid}, "status": {"conditions": [change]}},
                _content_type="application/strategic-merge-patch+json",
                field_manager=FIELD_MANAGER,
            )
        except MarkError as exc:
            if exc.result != "replaced":
                hint = ": give the reconciler `patch` on pods/status (chart: reconciler.condition)"
                text = "%s: the condition %s was not updated: %s; the label, which is the mark, is not affected%s"
                log.warning(text, name, CONDITION, exc, hint if exc.status == 403 else "")

    def _record(self, name: HolderName, uid: str, wall: float, reason: str, note: str) -> None:
        pod = {"apiVersion": "v1", "kind": "Pod", "namespace": name.namespace, "name": name.name, "uid": uid}
        self._events.record(pod, wall, reason, note)


def object_to_odd(pod: Mapping[str, Any]) -> None:
    """Raises Refused for a pod if only its metadata could be read."""
    if (pod.get("status") or {}).get("phase") == PENDING:
        raise Refused("not_running", "the pod has not started, or is starting again")
    if pod.get(ODD_KEY):
        raise Refused("odd", "the pod is malformed or too large, so only its metadata can be read")


def read_mark(pod: Mapping[str, Any]) -> Mark:
    metadata = pod["metadata"]
    return Mark(
        HolderName(PodMarker.scheduler, metadata["namespace"], metadata["name"]),
        metadata["labels"][LABEL],
        metadata["uid"],
        pod["status"].get("phase") in ENDED,
        pod,
        parse_timestamp((metadata.get("annotations") or {}).get(OBSERVED)),
    )


def _has_condition(pod: Mapping[str, Any] | None) -> bool:
    conditions = ((pod or {}).get("status") or {}).get("conditions") or ()
    return any(each.get("type") == CONDITION for each in conditions)


def annotate(decision: Decision, help_url: str = "") -> dict[str, str | None]:
    """Returns the evidence of a decision as annotations; the value None removes an annotation. The annotation `owner`
    names the object that a user or tool must end to free the GPUs.

    `help_url`: the site's page about marks, "" for no page.
    """
    group = decision.around.group if decision.around is not None else ""
    return {
        **({OWNER: group} if group else {}),
        **({HELP: help_url} if help_url else {}),
        SINCE: timestamp(decision.idle_since_wall or decision.observed_wall),
        GPUS: str(decision.held),
        EVIDENCE: decision.reason,
        CAUSE: say_cause(decision) or None,
        OBSERVED: timestamp(decision.observed_wall),
    }
