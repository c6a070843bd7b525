"""What a cycle has to do: the marks that exist against the decisions that were made. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from gpu_exporter.defaults import Policy
from gpu_exporter.reconciler.decision.policy import MARKED, SHARING, UNDERUSED, Decision
from gpu_exporter.reconciler.marks import Mark

RENEW_SHARE = 0.25  # of policy.unsupported_max: an object's time of evidence is never older while there is evidence


class Withdrawal(NamedTuple):
    """A mark to remove, and why. `decision`: the one that its evidence led to, None for none."""

    mark: Mark
    reason: str
    decision: Decision | None = None


class Plan(NamedTuple):
    """What a cycle has to do.

    `kept`: marks that evidence supports, with the decision that does. `waiting`: marks that it neither supports nor
    contradicts, with the unknown decision if there is one. A holder is in `kept` and in `writes` when its mark is to
    rise, in `withdrawals` and `writes` when it is to fall.
    """

    withdrawals: list[Withdrawal]
    kept: list[tuple[Mark, Decision]]
    waiting: list[tuple[Mark, Decision | None]]
    writes: list[Decision]


class Limits:
    """How many marks one cycle may set: in all, in a namespace, and by one of the site's policies."""

    def __init__(self, policy: Policy, hour: int = 0) -> None:
        """`hour`: marks that the cycles of the last hour have set."""
        self._policy = policy
        self._most = min(policy.new_marks_max, policy.new_marks_hour_max - hour)
        self._set: Counter[tuple[str, str]] = Counter()

    def allow(self, decision: Decision) -> bool:
        """Whether one more fits."""
        return all(self._set[key] < most for key, most in self._limits(decision).items())

    def count(self, decision: Decision) -> None:
        """A mark was set."""
        self._set.update(self._limits(decision).keys())

    def _limits(self, decision: Decision) -> dict[tuple[str, str], int]:
        limits = {("all", ""): self._most}
        if decision.name.namespace:
            limits["namespace", decision.name.namespace] = self._policy.new_marks_namespace_max
        if decision.rule is not None:
            limits["rule", decision.rule.name] = decision.rule.over(self._policy).new_marks_max
        return limits


def evidence_age(mark: Mark, wall: float, policy: Policy) -> float:
    """Seconds since evidence supported the mark, as its object says; infinite when it does not say.

    Neither does a time in the future, which would make the mark immortal. A little of it is another host's clock.
    """
    if mark.observed_wall is None or mark.observed_wall > wall + policy.fresh_min:
        return math.inf
    return max(0.0, wall - mark.observed_wall)


def is_due(mark: Mark, wall: float, policy: Policy) -> bool:
    """Whether the evidence on the object is so old that it is to be renewed, while there is evidence."""
    return evidence_age(mark, wall, policy) >= RENEW_SHARE * policy.unsupported_max


def plan(decisions: Sequence[Decision], marks: Sequence[Mark], wall: float, policy: Policy) -> Plan:
    """Compare what should be marked with what is, at `wall` (Unix seconds).

    Writes are sorted by the length of the idle run, longest first.
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
                    Withdrawal(mark, f"one of its GPUs is active; of others: {decision.reason}", decision)
                )
            elif evidence_age(mark, wall, policy) >= policy.unsupported_max:
                known = "it has no series" if decision is None else decision.reason
                result.withdrawals.append(Withdrawal(mark, f"no evidence any more: {known}", decision))
            else:
                result.waiting.append((mark, decision))
        elif decision.stage not in MARKED:
            result.withdrawals.append(Withdrawal(mark, decision.reason, decision))
        elif decision.stage != mark.stage and (mark.stage in (UNDERUSED, SHARING) or decision.stage == SHARING):
            # On its own, so that no limit or refusal can hold it up.
            result.withdrawals.append(Withdrawal(mark, decision.reason, decision))
            result.writes.append(decision)
        else:
            result.kept.append((mark, decision))
            if decision.stage != mark.stage:
                result.writes.append(decision)
    result.writes.extend(decision for decision in wanted.values() if decision.stage in MARKED)
    # What is idle before what is only a hint, which would use up the limits.
    result.writes.sort(key=lambda decision: (decision.stage == SHARING, decision.idle_since_wall or 0.0))
    return result
