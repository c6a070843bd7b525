"""Plans the writes of a cycle from the existing marks and the new decisions. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.reconciler.decision.outcomes import tenant_of
from gpu_exporter.reconciler.decision.policy import MARKED, SHARING, UNDERUSED, Decision
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import Mark

RENEW_SHARE = 0.25  # of policy.unsupported_max: while there is evidence, its time on objects is renewed at this age


class Withdrawal(NamedTuple):
    """A mark to remove, with the reason. `decision`: the decision from present evidence; None without evidence."""

    mark: Mark
    reason: str
    decision: Decision | None = None


class Plan(NamedTuple):
    """The work of a cycle.

    `kept`: marks that evidence supports, each with its decision.
    `waiting`: marks that evidence neither supports nor contradicts, each with its decision of stage `unknown`, or None.
    A holder whose mark rises is in `kept` and `writes`; a holder whose mark falls is in `withdrawals` and `writes`.
    """

    withdrawals: list[Withdrawal]
    kept: list[tuple[Mark, Decision]]
    waiting: list[tuple[Mark, Decision | None]]
    writes: list[Decision]


class Limits:
    """Limits new marks in a cycle (in total, per tenant on Kubernetes, per policy of the site) and in an hour.

    A holder counts once in an hour, so a tenant that removes its own marks cannot use up the limit of the hour.
    """

    def __init__(self, policy: Policy, hour: Collection[tuple[HolderName, str]] = ()) -> None:
        """`hour`: the holders that cycles have marked in the last hour, as `holder_of` returns them."""
        self._policy = policy
        self.hour = hour
        self._set: Counter[tuple[str, str]] = Counter()

    def allow(self, decision: Decision) -> bool:
        return all(self._set[key] < most for key, most in self._limits(decision).items())

    def count(self, decision: Decision) -> None:
        self._set.update(self._limits(decision).keys())

    def _limits(self, decision: Decision) -> dict[tuple[str, str], int]:
        limits = {("all", ""): self._policy.new_marks_max}
        if holder_of(decision) not in self.hour:
            limits["hour", ""] = self._policy.new_marks_hour_max - len(self.hour)
        if decision.name.namespace:
            limits["tenant", tenant_of(decision)] = self._policy.new_marks_namespace_max
        if decision.rule is not None:
            limits["rule", decision.rule.name] = decision.rule.over(self._policy).new_marks_max
        return limits


def holder_of(decision: Decision) -> tuple[HolderName, str]:
    """Returns the name of a holder, and its UID: another pod with its name is another holder."""
    return decision.name, decision.incarnation


def evidence_age(mark: Mark, wall: float, policy: Policy) -> float:
    """Returns the seconds since evidence last supported the mark, by the time on its object; infinite without a time.

    A time in the future counts as missing, because it would keep the mark for ever. But a time that is ahead by less
    than `policy.fresh_min` counts as now, because the clocks of two hosts may differ.
    """
    if mark.observed_wall is None or mark.observed_wall > wall + policy.fresh_min:
        return math.inf
    return max(0.0, wall - mark.observed_wall)


def is_due(mark: Mark, wall: float, policy: Policy) -> bool:
    """Returns whether the evidence on the object is old enough to be renewed."""
    return evidence_age(mark, wall, policy) >= RENEW_SHARE * policy.unsupported_max


def plan(decisions: Sequence[Decision], marks: Sequence[Mark], wall: float, policy: Policy) -> Plan:
    """Compares the decisions with the existing marks at `wall` (Unix seconds).

    Writes are sorted by the length of the idle run, longest first. Sharing candidates come last.
    """
    wanted = {decision.name: decision for decision in decisions}
    result = Plan([], [], [], [])
    for mark in marks:
        decision = wanted.pop(mark.name, None)
        if mark.ended:
            result.withdrawals.append(Withdrawal(mark, "it no longer runs"))
        elif decision is None or decision.stage == "unknown":
            if decision is not None and decision.active and mark.stage not in ("partial", SHARING):
                result.withdrawals.append(
                    Withdrawal(mark, f"one of its GPUs is active; the others: {decision.reason}", decision)
                )
            elif evidence_age(mark, wall, policy) >= policy.unsupported_max:
                known = "it has no series" if decision is None else decision.reason
                result.withdrawals.append(Withdrawal(mark, f"no recent evidence supports the mark: {known}", decision))
            else:
                result.waiting.append((mark, decision))
        elif decision.stage not in MARKED:
            result.withdrawals.append(Withdrawal(mark, decision.reason, decision))
        elif decision.stage != mark.stage and (mark.stage in (UNDERUSED, SHARING) or decision.stage == SHARING):
            # Withdrawn separately, so that no limit or refusal can delay it.
            result.withdrawals.append(Withdrawal(mark, decision.reason, decision))
            result.writes.append(decision)
        else:
            result.kept.append((mark, decision))
            if decision.stage != mark.stage:
                result.writes.append(decision)
    result.writes.extend(decision for decision in wanted.values() if decision.stage in MARKED)
    # Idle holders come before sharing candidates, which are only hints and could use up the limits.
    result.writes.sort(key=lambda decision: (decision.stage == SHARING, decision.idle_since_wall or 0.0))
    return result
