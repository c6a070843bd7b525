"""Chooses the policy for a holder from the site's ordered policies. Pure.

A match may be unknown, e.g. if the series lack the account, or the pod cannot be read. Then no later policy is tried,
because this policy may be the more careful one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import translate
from functools import cache
from typing import NamedTuple

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.config.rules import JOB_LISTS, LIVE_LISTS, OF_SURROUNDINGS, Match, PolicyRule
from gpu_exporter.common.plain import shorten
from gpu_exporter.reconciler.decision.surroundings import Surroundings
from gpu_exporter.reconciler.evidence.records import HolderEvidence

NO_LABEL = "the series do not name the {what}"
NOT_READ = "its live object is not read here"
SHOWN_MAX = 40  # characters of a value that a user may have chosen


class Chosen(NamedTuple):
    """The policy for a holder. `rule`: None if no ordered policy matches. `why`: the values of a job that match it."""

    policy: Policy
    rule: PolicyRule | None = None
    why: str = ""

    @property
    def name(self) -> str:
        return self.rule.name if self.rule is not None else ""


class NotKnown(NamedTuple):
    """It is unknown which policy applies to a holder. `why`: the reason."""

    why: str


class Rulebook:
    """The section `policy`, and the ordered policies that change it."""

    def __init__(self, site: Policy, rules: Sequence[PolicyRule] = ()) -> None:
        self.site = site
        self.rules = tuple(rules)
        self.policies = [site, *(rule.over(site) for rule in rules if not rule.exempt)]
        """The policies in force: those by which some holder may be judged."""
        self.asks_models = any(rule.match.models for rule in rules)
        """Whether any policy matches on GPU models, which costs the source one more query."""
        self.asks_surroundings = any(getattr(rule.match, key) for rule in rules for key in OF_SURROUNDINGS)
        """Whether any policy matches on the surroundings of a holder."""
        self.loosest = site._replace(
            candidate_after=min(each.candidate_after for each in self.policies),
            underused_after=min(each.underused_after for each in self.policies),
            startup_grace=min(each.startup_grace for each in self.policies),
            coverage_min=min(each.coverage_min for each in self.policies),
        )
        """A policy with the shortest windows. A holder that is idle by its own policy is idle by this one too."""

    @property
    def longest_s(self) -> float:
        """The longest idle time that any class, any policy or any owner's wish can require (seconds)."""
        return max(
            max(
                each.underused_after,
                each.interactive_after,
                each.gap_max,
                each.host_delay_max,
                max(each.idle_after_max, each.exempt_max) + each.underused_after - each.candidate_after,  # by a wish
            )
            for each in self.policies
        )

    def choose(self, holder: HolderEvidence, around: Surroundings | None) -> Chosen | NotKnown:
        """Returns the first policy that matches. `around`: None if the live objects cannot be reached."""
        for rule in self.rules:
            answer = matches(rule.match, holder, around)
            if isinstance(answer, str):
                return NotKnown(f"it is not known whether policy {rule.name} matches: {answer}")
            if answer:
                return Chosen(rule.over(self.site), rule, _why(rule.match, holder, around))
        return Chosen(self.site)


def matches(match: Match, holder: HolderEvidence, around: Surroundings | None) -> bool | str:
    """Returns whether a policy matches a holder. If this is unknown, returns the reason as a text.

    A policy with a failed criterion does not match, even if other criteria are unknown.
    """
    unknown = ""
    for answer in _criteria(match, holder, around):
        if answer is False:
            return False
        if isinstance(answer, str):
            unknown = unknown or answer
    return unknown or True


def _why(match: Match, holder: HolderEvidence, around: Surroundings | None) -> str:
    live = around.job_facts if around is not None else {}
    values = {
        _what(key): live[key] if key in LIVE_LISTS else sorted(holder.facts[_what(key)])
        for key in JOB_LISTS
        if getattr(match, key)
    }
    return ", ".join(f"{what} {shorten(','.join(found), SHOWN_MAX)!r}" for what, found in values.items())


def _criteria(match: Match, holder: HolderEvidence, around: Surroundings | None) -> Iterable[bool | str]:
    is_job = holder.name.scheduler == "slurm"
    if match.namespaces:
        yield not is_job and _fits(match.namespaces, holder.name.namespace)
    for key in JOB_LISTS:
        if patterns := getattr(match, key):
            what = _what(key)
            if not is_job:
                yield False
            elif key not in LIVE_LISTS:
                yield _fit_all(patterns, holder.facts.get(what, frozenset()), what)
            else:
                yield NOT_READ if around is None else _fit_live(patterns, around.job_facts.get(key), what)
    if match.mig is not None:
        yield any(bool(unit.mig) is match.mig for unit in holder.units)
    if match.models:
        models = tuple(pattern.lower() for pattern in match.models)
        known = [_fits(models, unit.model.lower()) for unit in holder.units if unit.model]
        yield any(known) or (len(known) < len(holder.units) and NO_LABEL.format(what="model of each GPU"))
    if (match.labels or match.owner_kinds) and is_job:
        yield False
    elif (match.labels or match.owner_kinds or match.classes) and around is None:
        yield NOT_READ
    elif around is not None:
        if match.classes:
            yield around.kind in match.classes
        for label, pattern in match.labels:
            yield label in around.labels and _fits((pattern,), around.labels[label])
        if match.owner_kinds:
            yield any(_fits(match.owner_kinds, kind) for kind in around.owner_kinds)


def _what(key: str) -> str:
    """Returns the word for one value of a criterion of JOB_LISTS."""
    return key if key == "qos" else key.removesuffix("s").replace("_", " ")


def _fit_live(patterns: Sequence[str], values: Sequence[str] | None, what: str) -> bool | str:
    """Returns whether a value of the live job fits a pattern. Returns the reason if Slurm does not show the values, or
    if only some of several fit: the job uses one of them, and Slurm does not show which.
    """
    if values is None:
        return f"Slurm does not show its {what}"
    fit = [_fits(patterns, value) for value in values]
    if any(fit) and not all(fit):
        return f"Slurm does not show which {what} it uses: {shorten(','.join(values), SHOWN_MAX)!r}"
    return any(fit)


def _fit_all(patterns: Sequence[str], values: frozenset[str], what: str) -> bool | str:
    """Returns whether the only value in the series fits a pattern. Returns the reason for none or several."""
    if len(values) != 1 or not min(values):
        return (
            NO_LABEL.format(what=what) if len(values) < 2 else f"its series have more than one {what}: {sorted(values)}"
        )
    return _fits(patterns, min(values))


def _fits(patterns: Sequence[str], value: str) -> bool:
    return _compiled(tuple(patterns)).match(value) is not None


@cache
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)))
