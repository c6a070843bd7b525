"""Makes the first line of an explanation for a holder's owner: the use of the GPUs, the cause, and the advice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gpu_exporter.common.config.defaults import Diagnosis
from gpu_exporter.common.model.causes import HIGH, MEDIUM
from gpu_exporter.common.model.meanings import CAUSES, STATES
from gpu_exporter.common.plain import shorten
from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.evidence.records import PublishedCause, UnitEvidence, UnitUse, UseOfUnits
from gpu_exporter.reconciler.evidence.use import complete

NO_USE: UseOfUnits = {}
NAMED_MAX = 2
NOT_JUDGED = "not judged yet"
JUDGED_S = Diagnosis().window + Diagnosis().hold  # an exporter that has seen a holder for this long publishes its state
PART_MAX = 160  # characters of the evidence and of the advice, each


def headline(decision: Decision, use: UseOfUnits, causes: Sequence[PublishedCause]) -> str:
    """Returns the state of a holder's GPUs, their utilization, the most certain cause and its advice, without unknown
    parts.

    Returns "" if nothing is known.
    """
    seen = [use[unit.uuid, unit.mig] for unit in decision.units if (unit.uuid, unit.mig) in use]
    if not any(each.state for each in seen) and not causes:
        return ""
    parts = [f"{_states(decision, use)}{_utilization(seen, len(decision.units))}"]
    first = _most_certain(causes)
    if first is not None:
        parts.append(shorten(first.evidence or first.name, PART_MAX))
    if advice := first.advice if first is not None else _advise_by_state(decision, seen):
        parts.append(f"to change: {shorten(advice, PART_MAX)}")
    return "; ".join(parts)


def causes_of(decision: Decision, unit: UnitEvidence, use: UseOfUnits = NO_USE) -> Sequence[PublishedCause]:
    """Returns the causes of a unit with their texts, which contain no numbers if the unit's use is unknown."""
    found = use.get((unit.uuid, unit.mig))
    known = found.causes if found is not None and found.causes else [complete(cause, {}) for cause in unit.causes]
    return [_for_server(cause, decision) for cause in known]


def say_cause(decision: Decision) -> str:
    """Describes the most certain cause for a mark: its evidence, name and advice; "" without a cause."""
    first = _most_certain([cause for unit in decision.units for cause in causes_of(decision, unit)])
    if first is None:
        return ""
    advice = f"; to change: {first.advice}" if first.advice else ""
    return f"{first.evidence} ({first.name}, {first.confidence} confidence){advice}"


def _most_certain(causes: Sequence[PublishedCause]) -> PublishedCause | None:
    return next((each for wanted in (HIGH, MEDIUM) for each in causes if each.confidence == wanted), None)


def _for_server(cause: PublishedCause, decision: Decision) -> PublishedCause:
    """Returns the cause as it applies to the holder: without advice about training if it serves requests."""
    around, meaning = decision.around, CAUSES.get(cause.name)
    if around is None or around.kind != "serving" or meaning is None or not meaning.is_training:
        return cause
    against = f"it serves requests ({around.kind_why}), and the advice is for training"
    return cause._replace(against="; ".join(filter(None, (cause.against, against))), advice="", gain="")


def _advise_by_state(decision: Decision, seen: Sequence[UnitUse]) -> str:
    """Returns the advice for the state of the GPUs, if no cause is known; "" for a server, which may wait."""
    states = {each.state for each in seen}
    if len(states) != 1 or (decision.around is not None and decision.around.kind == "serving"):
        return ""
    (state,) = states
    return STATES[state].owner if state in STATES else ""


def _states(decision: Decision, use: UseOfUnits) -> str:
    """Returns the states of the GPUs. If they differ, each state has the names of its GPUs, or their number if there
    are more than NAMED_MAX.
    """
    by_state: dict[str, list[str]] = defaultdict(list)
    nodes = {unit.node for unit in decision.units}
    for unit in decision.units:
        found = use.get((unit.uuid, unit.mig))
        name = f"GPU {unit.gpu}" + (f" of {unit.node}" if len(nodes) > 1 else "")
        state = (found.state if found is not None else "") or "state not known"
        is_new = state == "unknown" and unit.seen_s is not None and unit.seen_s < JUDGED_S
        by_state[NOT_JUDGED if is_new else state].append(name)
    units = len(decision.units)
    if len(by_state) == 1:
        return f"{min(by_state)} on its {'GPU' if units == 1 else f'{units} GPUs'}"
    parts = sorted(by_state.items(), key=lambda each: -len(each[1]))
    return ", ".join(
        f"{state} on {' and '.join(names) if len(names) <= NAMED_MAX else f'{len(names)} of {units} GPUs'}"
        for state, names in parts
    )


def _utilization(seen: Sequence[UnitUse], units: int) -> str:
    """Returns the present and the mean utilization over all GPUs, each only if it is known for every GPU."""
    now, means = [each.now for each in seen], [each.mean for each in seen]
    parts = []
    if len(seen) == units and None not in now:
        parts.append(f"{sum(filter(None, now)) / units:.0%} now")
    if len(seen) == units and None not in means:
        parts.append(f"{sum(filter(None, means)) / units:.0%} {seen[0].over}")
    return f", used {' and '.join(parts)}" if parts else ""
