"""Builds the parts that act on underused holders, according to the settings and flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.config.defaults import Policy, Settings
from gpu_exporter.common.promql.client import Client
from gpu_exporter.reconciler.actions.acts import Acts
from gpu_exporter.reconciler.actions.ends import Ends
from gpu_exporter.reconciler.actions.gates import Gates
from gpu_exporter.reconciler.actions.journal import Journal
from gpu_exporter.reconciler.actions.proofs import Proofs
from gpu_exporter.reconciler.actions.propose import allowed_kinds
from gpu_exporter.reconciler.actions.record import Record
from gpu_exporter.reconciler.actions.runner import ActionRunner, Parts
from gpu_exporter.reconciler.actor import Actor
from gpu_exporter.reconciler.audit import AuditLog
from gpu_exporter.reconciler.evidence.records import HostLimits
from gpu_exporter.reconciler.judge import Judge
from gpu_exporter.reconciler.marks import Marker
from gpu_exporter.reconciler.slurm.actor import JobActor
from gpu_exporter.reconciler.slurm.marker import JobMarker
from gpu_exporter.reconciler.telemetry import Telemetry
from gpu_exporter.reconciler.texts import TextPlace

NONE, ACT = "none", "act"


class ProofPlaces(NamedTuple):
    """The servers from which proofs are read. `filters`: matchers for the alerts of Alertmanager."""

    prometheus: Address | None
    matcher: str
    alertmanager: Address | None
    filters: Sequence[str]


def check_actions(settings: Settings, places: ProofPlaces, *, has_audit: bool, keeps_texts: bool) -> None:
    """Raises ValueError if the settings request actions that cannot be proven or recorded."""
    actions = settings.actions
    if actions.mode == NONE:
        return
    missing = [
        flag
        for flag, is_there in (
            ("--source.prometheus, to read the host activity of holders", places.prometheus is not None),
            ("--alertmanager.url, to check that owners were alerted", places.alertmanager is not None),
            ("--audit.file, to record actions and their reasons", has_audit or actions.mode != ACT),
            (
                "--kubernetes.lease or --state.directory, to keep decisions and actions across restarts",
                keeps_texts,
            ),
        )
        if not is_there
    ]
    if missing:
        raise ValueError(f"actions.mode is {actions.mode}: it needs {'; '.join(missing)}")
    if not actions.kinds:
        raise ValueError(
            f"actions.mode is {actions.mode}, but actions.kinds is empty: list the kinds of action that are allowed"
        )


class ActionPlan(NamedTuple):
    """The plan for actions on underused holders, from settings and flags.

    `clients`: one for the PromQL API and one for Alertmanager. `texts`: the place of the journal, which mode act needs.
    """

    settings: Settings
    places: ProofPlaces
    clients: tuple[Client, Client]
    texts: TextPlace | None

    def build(
        self,
        markers: Sequence[Marker],
        judge: Judge,
        record: Record,
        telemetry: Telemetry,
        audit: AuditLog | None,
        may_write: Callable[[], bool],
    ) -> ActionRunner | None:
        """Builds the runner of the actions; None in mode none. `may_write`: whether this process may write now. Raises
        MarkError.
        """
        actions, policy, places = self.settings.actions, self.settings.policy, self.places
        if actions.mode == NONE or places.prometheus is None or places.alertmanager is None:  # see check_actions
            return None
        actors = {marker.scheduler: _actor(marker, policy) for marker in markers}
        interval_s = self.settings.alerts.interval
        proofs = Proofs(
            places.prometheus, places.alertmanager, places.filters, places.matcher, interval_s, *self.clients
        )
        telemetry.note_actions(allowed_kinds(actions.kinds))
        acts = None
        if actions.mode == ACT and self.texts is not None:
            ends = Ends(actors, proofs)
            journal = Journal(self.texts)
            acts = Acts(journal, actors, ends, record, audit, telemetry, SYSTEM_CLOCK, actions.grace_max)
        host = HostLimits(policy.host_busy_ratio, policy.host_busy_io)
        parts = Parts(
            proofs,
            Gates(actions, proofs, record, host, SYSTEM_CLOCK),
            acts,
            actors,
            {marker.scheduler: marker for marker in markers},
            judge.look_again,
            may_write,
        )
        return ActionRunner(actions, parts, telemetry, SYSTEM_CLOCK)


def _actor(marker: Marker, policy: Policy) -> Actor:
    """Returns the actor for the objects that this marker marks."""
    if isinstance(marker, JobMarker):
        return JobActor(marker, policy)
    from gpu_exporter.reconciler.kubernetes.actor import PodActor
    from gpu_exporter.reconciler.kubernetes.marker import PodMarker

    assert isinstance(marker, PodMarker)
    return PodActor(marker.api, policy, SYSTEM_CLOCK, marker.resources)
