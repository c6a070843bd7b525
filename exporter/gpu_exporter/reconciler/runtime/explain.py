"""`explain`: prints why a holder has its stage, now or in the past, and the history of its marks."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.common.clock import SYSTEM_CLOCK, Clock, ManualClock
from gpu_exporter.common.config.defaults import Actions, Policy
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.fetch import FetchError
from gpu_exporter.common.plain import nearest, one_line, utc
from gpu_exporter.reconciler.actions.propose import what_may_follow
from gpu_exporter.reconciler.audit import describe, read_transitions
from gpu_exporter.reconciler.decision.policy import LABELLED, Decision, is_fresh
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.evidence.asked import FORMS, Wanted, parse_asked
from gpu_exporter.reconciler.evidence.records import ExplainingSource, HolderName, OtherActivity, UseOfUnits
from gpu_exporter.reconciler.judge import Judge
from gpu_exporter.reconciler.pause import PauseSource
from gpu_exporter.reconciler.preview import Preview
from gpu_exporter.reconciler.report import decisions_json, explain, format_time

NO_ACTIONS = Actions()
SHOWN_MAX = 8  # holders that a text lists, so that the user can name one of them


class ExplainRequest(NamedTuple):
    """The question: which holder to explain, and how.

    `holder`: the holder to explain, in one of FORMS.
    `form`: table or json.
    `audit`: file with the history of marks, None for no history.
    """

    holder: str
    form: str
    audit: Path | None = None


def explain_past(source: ExplainingSource, book: Rulebook, question: ExplainRequest, at_wall: float) -> int:
    """Explains the stage at `at_wall` (Unix seconds). The live objects of that time are no longer known.

    Returns the exit code. Raises OSError.
    """
    return explain_once(source, book, question, None, clock=ManualClock(wall=at_wall))


def explain_once(
    source: ExplainingSource,
    book: Rulebook,
    question: ExplainRequest,
    preview: Preview | None,
    pauses: Sequence[PauseSource] = (),
    clock: Clock = SYSTEM_CLOCK,
    actions: Actions = NO_ACTIONS,
) -> int:
    """Prints every number behind the stage of the requested holders. Returns the exit code. Raises OSError.

    `preview`: reads the live objects; None for a time in the past. `clock`: shows the time to explain.
    """
    holder, asked = question.holder, parse_asked(question.holder)
    try:
        names = [asked] if isinstance(asked, HolderName) else []
        if isinstance(asked, Wanted):
            found = source.find_holders(asked.unit)
            found = [each for each in found if each[1] == asked.uuid] or found  # one UUID may be a prefix of another
            names = list(dict.fromkeys(name for name, _ in found))
            if len(names if asked.pod else {unit for _, unit in found}) > 1:
                several = ", ".join(f"{name} on {unit}" for name, unit in list(found)[:SHOWN_MAX])
                complain(f"{holder}: several holders match, so name one: {several}")
                return Exit.USAGE
        find = preview.surveyor if preview is not None else lambda _scheduler: None
        evidence, decisions, problems, frozen, *_ = Judge(source, find, book, pauses).judge(names)
    except AnswerError as exc:
        failed = "cannot ask" if isinstance(exc, FetchError) else f"cannot explain {holder}:"
        complain(f"explain: {failed} {exc}")
        return Exit.NO_DATA
    for problem in problems:
        complain(f"the evidence is incomplete: {problem}")
    why_frozen = [freeze.names or {} for freeze in frozen.values()]
    for why in dict.fromkeys(whys[name] for whys in why_frozen for name in names if name in whys):
        complain(f"frozen: {why}")
    if isinstance(asked, HolderName):
        chosen = [decision for decision in decisions if decision.is_named(holder, asked)]
    else:
        chosen = [decision for decision in decisions if decision.name in names]
    past = _read_past(question.audit, names, clock.wall())
    if not chosen and not (past and question.form != "json"):
        seen = f"in the evidence of {format_time(clock.wall())}" if preview is None else "in the evidence"
        has = f"{seen}, which has {evidence.allocations} allocations"
        complain(
            f"{holder}: there is no such holder {has}; "
            f"{_say_last_seen(source, names) or _say_nearest(source, holder)}{FORMS}"
        )
        _say_gaps(source)
        return Exit.USAGE
    if not chosen:
        shown = one_line(", ".join(map(str, names)))
        print(f"{shown}: not in the evidence. Earlier marks of this holder:")  # noqa: T201
    outlooks = preview.look(chosen, clock.wall()) if preview is not None else {}
    uses = {decision.name: _read_use(source, decision, book.site) for decision in chosen}
    if question.form == "json":
        sys.stdout.write(decisions_json(chosen, evidence, outlooks, uses))
    else:
        for decision in chosen:
            other, waiting = _other_activity(source, decision), _read_waiting(source, decision)
            outlook, action = outlooks.get(decision.name), what_may_follow(decision, actions)
            over_s, use = book.loosest.candidate_after, uses[decision.name]
            sys.stdout.write(explain(decision, book.site, outlook, other, over_s, action, use, waiting))
        sys.stdout.writelines(f"  {one_line(line)}\n" for line in past)
    sys.stdout.flush()  # the answer comes first, also where both go to one terminal
    notices = preview.notices if preview is not None else ["the objects around the holder at that time are unknown"]
    for notice in notices:
        complain(notice)
    if any(decision.stage in ("unknown", "starting") for decision in chosen):
        _say_gaps(source)
    return Exit.PARTIAL if problems else Exit.DONE


def _say_last_seen(source: ExplainingSource, names: Sequence[HolderName]) -> str:
    """Returns the last time at which any of these holders held a GPU, in words; "" if unknown."""
    try:
        last = source.read_last_seen(names[0]) if names else None
    except AnswerError:
        return ""
    if last is None:
        return ""
    at = f"it last held a GPU at {format_time(last)}: --at={utc(last):%Y-%m-%dT%H:%M:%SZ}"
    return f"{at}; for a report of all its time: gpu-exporter job {str(names[0]).removeprefix('job ')}; "


def _say_nearest(source: ExplainingSource, holder: str) -> str:
    """Returns the holder with the most similar name; "" if no name is similar."""
    try:
        found = {name for name, _ in source.find_holders(lambda labels, _host: labels.get("uuid", ""))}
    except AnswerError:
        return ""
    near = nearest(holder, {text for name in found for text in (str(name), name.name)})
    return f"did you mean {near}? " if near else ""


def _say_gaps(source: ExplainingSource) -> None:
    for gap in source.read_gaps():
        complain(gap)


def _read_past(audit: Path | None, names: Collection[HolderName], until_wall: float) -> list[str]:
    if audit is None:
        return []
    read = [read_transitions(audit, name, until_wall) for name in names]
    for gap in {each.gap for each in read if each.gap}:
        complain(gap)
    return [describe(record) for each in read for record in each.records]


def _other_activity(source: ExplainingSource, decision: Decision) -> OtherActivity:
    try:
        return source.read_other_activity({unit.uuid for unit in decision.units})
    except AnswerError as exc:
        complain(f"it is unknown which witnesses were active: {exc}")
        return {}


def _read_use(source: ExplainingSource, decision: Decision, policy: Policy) -> UseOfUnits:
    """Returns the holder's use of its units. Omits units whose last sample is old, as their node may be silent now."""
    try:
        found = source.read_use(decision.name, decision.units)
    except AnswerError as exc:
        complain(f"it is unknown how its GPUs are used: {exc}")
        return {}
    fresh = {(unit.uuid, unit.mig) for unit in decision.units if is_fresh(unit, policy)}
    return {unit: use for unit, use in found.items() if unit in fresh}


def _read_waiting(source: ExplainingSource, decision: Decision) -> Mapping[str, float]:
    """Returns the GPUs that others wait for, by pool. Queried only for a holder that uses its GPUs poorly."""
    if decision.stage not in LABELLED and not any(unit.causes for unit in decision.units):
        return {}
    try:
        return source.read_waiting(decision.name)
    except AnswerError as exc:
        complain(f"it is unknown how many GPUs others wait for: {exc}")
        return {}


def complain(text: str) -> None:
    """Prints a problem, such as missing evidence, to standard error."""
    print(f"gpu-exporter: {one_line(text)}", file=sys.stderr)  # noqa: T201
