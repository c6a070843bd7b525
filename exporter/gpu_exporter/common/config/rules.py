"""The ordered `policies` of a configuration file. Each policy selects holders, and changes keys of the section `policy`
for them.

The first policy that matches a holder decides. A holder that matches no policy is judged by the section `policy` alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from gpu_exporter.common.config.defaults import DURATIONS, Policy
from gpu_exporter.common.config.values import parse_value, unknown_key
from gpu_exporter.common.durations import format_duration

RULES_MAX = 200
SECTION = "policy"  # the section that decides if no policy matches
NAME = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"  # as Kubernetes object names: the name becomes a label value
PATTERN_MAX = 200  # characters
CLASSES = ("serving", "interactive", "batch", "unclear")
CEILINGS = ("candidate",)  # highest stages to which a policy may limit its holders
CHANGES = (  # keys of the section `policy` that a policy may change for its holders
    "candidate_after",
    "underused_after",
    "interactive_after",
    "startup_grace",
    "coverage_min",
    "new_marks_max",
)
POD_LISTS = ("namespaces", "owner_kinds")
LIVE_LISTS = ("job_names", "reservations")
JOB_LISTS = ("partitions", "accounts", "qos", "users", *LIVE_LISTS)
OF_SURROUNDINGS = ("labels", "owner_kinds", "classes", *LIVE_LISTS)  # criteria that the series do not contain
OF_PODS = (*POD_LISTS, "labels")  # criteria that only pods have
LISTS = (*POD_LISTS, "classes", "models", *JOB_LISTS)


class Match(NamedTuple):
    """The criteria by which a policy selects holders. All given criteria must match. A list matches if one of its
    patterns (`*`, `?`, `[abc]`) matches.

    `labels`: labels of the pod itself, all of which must match. `owner_kinds`: kinds of any controller above the pod,
    KIND or GROUP/KIND, or `Pod` for a pod without a controller. `models`, `mig`: at least one of the GPUs must match.
    None and () set no criterion.
    """

    namespaces: tuple[str, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    owner_kinds: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    mig: bool | None = None
    partitions: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    job_names: tuple[str, ...] = ()
    reservations: tuple[str, ...] = ()


class PolicyRule(NamedTuple):
    """One policy. `changes`: pairs of a key of CHANGES and its value. `ceiling`: one of CEILINGS, "" for no limit.
    `exempt`: why its holders are never marked, "" if they may be marked.
    """

    name: str
    match: Match = Match()
    changes: tuple[tuple[str, float], ...] = ()
    ceiling: str = ""
    exempt: str = ""

    def over(self, policy: Policy) -> Policy:
        """Returns the given policy settings with the changes of this policy."""
        changes: dict[str, Any] = dict(self.changes)
        return policy._replace(**changes)


class RuleFaults(ValueError):
    """Invalid policies. `faults` has one line per fault, with its file and line."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = list(faults)


def read_rules(place: str, node: Any, policy: Policy) -> tuple[PolicyRule, ...]:
    """Reads the policies from a node of yaml.compose. `place`: the file, for errors. Raises RuleFaults."""
    faults: list[str] = []
    reader = _RulesReader(place, faults)
    rules: list[PolicyRule] = []
    places: list[tuple[Any, str]] = []
    for index, item in enumerate(reader.items(node, "policies")):
        if rule := reader.rule(item, f"policies[{index}]"):
            rules.append(rule)
            places.append((item, f"policies[{index}]"))
            faults += _check_rule(rule, reader.where(item, f"policies[{index}]"), policy)
    faults += _check_list(rules, [f"{reader.where(node, name)}" for node, name in places])
    if faults:
        raise RuleFaults(faults)
    return tuple(rules)


def _check_list(rules: Sequence[PolicyRule], places: Sequence[str]) -> list[str]:
    """Returns the faults of the whole list: too many policies, equal names, policies that no holder reaches. `places`:
    file and line of each policy.
    """
    faults = [f"{places[RULES_MAX]}: more than {RULES_MAX} policies"] if len(rules) > RULES_MAX else []
    names: set[str] = set()
    for rule, place in zip(rules, places, strict=True):
        if rule.name in names:
            faults.append(f"{place}: the name {rule.name} is given twice")
        if rule.name == SECTION:
            faults.append(f"{place}: the name {SECTION} is reserved: it means the section")
        names.add(rule.name)
    for (rule, _), (_, place) in pairwise(zip(rules, places, strict=True)):
        if rule.match == Match():
            faults.append(f"{place}: is never reached, because {rule.name} before it matches all holders")
    return faults


def _check_rule(rule: PolicyRule, where: str, policy: Policy) -> list[str]:
    """Returns the faults of keys that are valid alone, but not together."""
    over, faults = rule.over(policy), []
    if over.candidate_after > over.underused_after:
        first, then = (format_duration(each) for each in (over.candidate_after, over.underused_after))
        faults.append(f"{where}: candidate_after ({first}) must not be above underused_after ({then})")
    asks_pods = any(getattr(rule.match, key) for key in OF_PODS)
    if asks_pods and any(getattr(rule.match, key) for key in JOB_LISTS):
        faults.append(f"{where}: matches nothing: pods have {', '.join(OF_PODS)}, jobs {', '.join(JOB_LISTS)}")
    if rule.exempt and (rule.changes or rule.ceiling):
        faults.append(f"{where}: exempt holders are not judged, so the other keys have no effect")
    return faults


class _RulesReader:
    """Reads YAML nodes. Adds a fault with its line for every error."""

    def __init__(self, path: str, faults: list[str]) -> None:
        self._path = path
        self._faults = faults

    def where(self, node: Any, name: str) -> str:
        return f"{self._path}:{node.start_mark.line + 1}: {name}"

    def fault(self, node: Any, name: str, text: str) -> None:
        self._faults.append(f"{self.where(node, name)}: {text}")

    def items(self, node: Any, name: str) -> list[Any]:
        if node.id == "sequence":
            return list(node.value)
        self.fault(node, name, "expected a list")
        return []

    def pairs(self, node: Any, name: str, known: Sequence[str]) -> dict[str, Any]:
        """Returns the values of a YAML mapping by key. If `known` is empty, every key is allowed."""
        found: dict[str, Any] = {}
        if node.id != "mapping":
            self.fault(node, name, "expected keys below it")
            return found
        for key, value in node.value:
            text = str(key.value)
            if text in found:
                self.fault(key, f"{name}.{text}", "given twice")
            elif known and text not in known:
                self._faults.append(unknown_key(self.where(key, f"{name}.{text}"), text, known))
            else:
                found[text] = value
        return found

    def text(self, node: Any, name: str, form: str, meaning: str) -> str:
        if node.id == "scalar" and re.fullmatch(form, str(node.value)):
            return str(node.value)
        shown = f"{node.value!r} is" if node.id == "scalar" else "this is"
        self.fault(node, name, f"{shown} not {meaning}")
        return ""

    def rule(self, node: Any, name: str) -> PolicyRule | None:
        before = len(self._faults)
        pairs = self.pairs(node, name, ("name", "match", *CHANGES, "ceiling", "exempt"))
        if "name" not in pairs and len(self._faults) == before:
            self.fault(node, name, "has no name")
        changes: list[tuple[str, float]] = []
        match, texts = Match(), dict.fromkeys(("name", "ceiling", "exempt"), "")
        for key, value in pairs.items():
            place = f"{name}.{key}"
            if key == "match":
                match = self.match(value, place)
            elif key == "name":
                texts[key] = self.text(value, place, NAME, "lower-case letters, digits and dashes, 63 at most")
            elif key == "ceiling":
                texts[key] = self.text(value, place, "|".join(CEILINGS), f"one of {', '.join(CEILINGS)}")
            elif key == "exempt":
                texts[key] = self.text(value, place, rf".{{1,{PATTERN_MAX}}}", "a reason in one line")
            else:
                changes += self.change(value, place, key)
        return PolicyRule(match=match, changes=tuple(changes), **texts) if len(self._faults) == before else None

    def change(self, node: Any, name: str, key: str) -> list[tuple[str, float]]:
        try:
            value = parse_value("policy", key, str(node.value))
        except ValueError as exc:
            self.fault(node, name, str(exc))
            return []
        assert not isinstance(value, str)  # the values of all CHANGES are numbers
        return [(key, value)]

    def match(self, node: Any, name: str) -> Match:
        found: dict[str, Any] = {}
        for key, value in self.pairs(node, name, Match._fields).items():
            place = f"{name}.{key}"
            if key == "mig":
                found[key] = self.text(value, place, "true|false", "true or false") == "true"
            elif key == "labels":
                pairs = self.pairs(value, place, ())
                found[key] = tuple((label, self.pattern(each, f"{place}.{label}")) for label, each in pairs.items())
            elif key == "classes":
                form, meaning = "|".join(CLASSES), f"one of {', '.join(CLASSES)}"
                found[key] = tuple(self.text(each, place, form, meaning) for each in self.items(value, place))
            else:
                found[key] = tuple(self.pattern(each, place) for each in self.items(value, place))
            if found[key] == ():
                self.fault(value, place, "is empty, so it matches nothing; omit it to match all")
        return Match(**found)

    def pattern(self, node: Any, name: str) -> str:
        return self.text(node, name, rf".{{1,{PATTERN_MAX}}}", f"a pattern of 1 to {PATTERN_MAX} characters")


def plain_rules(rules: Sequence[PolicyRule]) -> list[dict[str, Any]]:
    """Returns the policies in the form of a configuration file, for yaml or json."""
    found: list[dict[str, Any]] = []
    for rule in rules:
        match: dict[str, Any] = {key: value for key, value in rule.match._asdict().items() if value not in ((), None)}
        match = {key: list(value) if isinstance(value, tuple) else value for key, value in match.items()}
        if rule.match.labels:
            match["labels"] = dict(rule.match.labels)
        changes: Mapping[str, Any] = {
            key: format_duration(value) if f"policy.{key}" in DURATIONS else value for key, value in rule.changes
        }
        texts = {key: value for key, value in (("ceiling", rule.ceiling), ("exempt", rule.exempt)) if value}
        found.append({"name": rule.name, **({"match": match} if match else {}), **changes, **texts})
    return found
