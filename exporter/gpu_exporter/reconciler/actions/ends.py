"""Finds out whether everything that an action ended is gone, so that its GPUs are free for others.

A pod or job is gone if its scheduler no longer shows this incarnation of it, and if the exporter of each of its nodes
has a fresh sample and does not name this incarnation as a holder. A silent exporter confirms nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reconciler.actions.gates import ACT_FRESH_S
from gpu_exporter.reconciler.actions.proofs import Proofs, Shown
from gpu_exporter.reconciler.actor import Actor, Entry
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import MarkError, Refused, guard


class Ends:
    """Reads the ends of actions from the exporters' series and from the schedulers."""

    def __init__(self, actors: Mapping[str, Actor], proofs: Proofs) -> None:
        """`actors`: the actor of each scheduler."""
        self._actors = actors
        self._proofs = proofs

    def read_left(self, entries: Sequence[Entry]) -> dict[str, str]:
        """Returns, by ident of the action, the reason why its end is not confirmed; "" if it is confirmed."""
        if not entries:
            return {}
        held = [(entry, ended) for entry in entries for ended in entry.ends if ended.nodes]
        try:
            shown = self._proofs.read_shown({_holder(entry, ended.name) for entry, ended in held})
            fresh = self._proofs.read_fresh({node for _, ended in held for node in ended.nodes}, ACT_FRESH_S)
        except AnswerError as exc:
            return {entry.ident: f"the exporters' series cannot be read: {exc}" for entry in entries}
        return {entry.ident: _still_shown(entry, shown, fresh) or self._ask_scheduler(entry) for entry in entries}

    def _ask_scheduler(self, entry: Entry) -> str:
        actor = self._actors.get(entry.scheduler)
        if actor is None:
            return f"the reconciler is not set up for {entry.scheduler}"
        try:
            return guard(actor.read_left, entry)
        except (MarkError, Refused) as exc:
            return f"cannot check whether its pods or jobs are gone: {exc}"


def _still_shown(entry: Entry, shown: Mapping[HolderName, Shown], fresh: Collection[str]) -> str:
    """Why the exporters do not confirm the end of an action, in words; "" if they do."""
    for ended in (each for each in entry.ends if each.nodes):
        if silent := sorted(set(ended.nodes).difference(fresh)):
            return f"the exporter of node {silent[0]} has no fresh sample"
        name = _holder(entry, ended.name)
        found = shown.get(name)
        if found is None:
            continue
        # Without a UID, only a later start shows another holder of that name: a new pod, or a requeued job.
        is_later = found.start_wall is not None and found.start_wall > entry.wall
        if ended.incarnation in found.uids or ("" in found.uids and not is_later):
            return f"an exporter still shows {name} as a holder"
    return ""


def _holder(entry: Entry, name: str) -> HolderName:
    return HolderName(entry.scheduler, entry.namespace, name)
