"""Adjusts decisions to the surroundings of their holders. Pure. Surroundings never raise a stage.

First, each holder is judged by itself. A holder that serves requests or is exempt gets no mark. Its class or a wish of
its owner may extend the windows. An annotation of another tool keeps it at `candidate`.

Then gangs are judged: the least idle member decides for all members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.durations import describe_duration
from gpu_exporter.common.model.readings import CORE
from gpu_exporter.reconciler.decision.policy import (
    LABELLED,
    NOT_RUNNING,
    SHARING,
    UNDERUSED,
    Decision,
    Windows,
    decide_holder,
    windows_for,
)
from gpu_exporter.reconciler.decision.rulebook import Chosen, NotKnown, Rulebook
from gpu_exporter.reconciler.decision.surroundings import (
    INTERACTIVE,
    SERVING,
    Exemption,
    Member,
    Surroundings,
    Unreadable,
)
from gpu_exporter.reconciler.evidence.records import Evidence, HolderEvidence, HolderName

Around: TypeAlias = Mapping[HolderName, Surroundings | Unreadable]
IDLE = ("candidate", UNDERUSED)


def settle(evidence: Evidence, decisions: Sequence[Decision], around: Around, book: Rulebook) -> list[Decision]:
    """Returns the adjusted decisions, in the same order.

    `decisions`: made from metrics alone, by the loosest of all policies. `around`: the surroundings of all holders that
    may get a mark, if their live objects can be reached.
    """
    holders = {holder.name: holder for holder in evidence.holders}
    alone = {d.name: _settle_alone(d, holders[d.name], around.get(d.name), book) for d in decisions}
    gangs: dict[int, _Gang] = {}  # by the identity of the list of members; a surveyor makes one list for each gang
    settled: list[Decision] = []
    for decision in alone.values():
        its = decision.around
        if its is None or decision.stage not in LABELLED or not (its.members or its.missing):
            settled.append(decision)
            continue
        if id(its.members) not in gangs:
            gangs[id(its.members)] = _Gang(its.members, alone)
        settled.append(_settle_gang(decision, gangs[id(its.members)], book.site.waiting_max))
    return [_share(each, holders[each.name], around.get(each.name), evidence, book) for each in settled]


def members_of(around: Around) -> set[HolderName]:
    gangs = (each.members for each in around.values() if isinstance(each, Surroundings))
    return {member.name for members in gangs for member in members}


def windows_around(windows: Windows, around: Surroundings, policy: Policy) -> Windows:
    """Adjusts the windows of a holder to its surroundings. `windows`: its windows from metrics alone."""
    if around.kind == INTERACTIVE:
        # A kernel computes in one thread. A server may poll in one thread for ever, so this counts for no other class.
        windows = windows._replace(underused_s=max(windows.underused_s, policy.interactive_after), cores=CORE)
    if around.idle_after_s > windows.candidate_s:  # the time from `candidate` to `underused` stays the same
        warned_s = policy.underused_after - policy.candidate_after
        limit_s = max(windows.underused_s, around.idle_after_s + warned_s)
        windows = windows._replace(candidate_s=around.idle_after_s, underused_s=limit_s)
    return windows


def _settle_alone(
    decision: Decision, holder: HolderEvidence, around: Surroundings | Unreadable | None, book: Rulebook
) -> Decision:
    if decision.stage not in LABELLED:
        return _by_its_own(decision, holder, None if isinstance(around, Unreadable) else around, book)
    if isinstance(around, Unreadable):
        own = _by_its_own(decision, holder, None, book)
        return own if own.stage not in LABELLED else _lowered(own, "unknown", f"{own.reason}, but {around.why}")
    chosen = book.choose(holder, around)
    if isinstance(chosen, NotKnown):
        return _lowered(decision, "unknown", f"{decision.reason}, but {chosen.why}")
    policy, rule, why = chosen
    decision = decision._replace(around=around, rule=rule, rule_why=why)
    if around is not None and around.exemption is not None:
        return _exempt(decision, around.exemption)
    if rule is not None and rule.exempt:
        return _exempt(decision, Exemption("policy", f"policy {rule.name} exempts it: {rule.exempt}"))
    if around is not None and around.kind == SERVING:
        return _lowered(decision, "serving", f"{decision.reason}, but it serves requests ({around.kind_why})")
    settled, windows = decision, decision.windows
    if windows is None or policy != book.loosest:  # the first decision was made by `loosest`
        windows = windows_for(holder, policy)
        settled = _again(decision, holder, policy, windows)
    if settled.stage not in LABELLED:
        return settled
    ceilings = [f"policy {rule.name} allows no later stage"] if rule is not None and rule.ceiling else []
    if around is not None:
        wanted = windows_around(windows, around, policy)
        if wanted != windows:
            settled = _again(decision, holder, policy, wanted)
        if settled.stage not in LABELLED and around.idle_after_by is not None:
            return _exempt(settled, around.idle_after_by)
        ceilings += [around.ceiling] if around.ceiling else []
    asked = settled.windows
    is_by_gap = asked is not None and asked.underused_s == windows.underused_s > policy.underused_after
    if settled.stage == "candidate" and asked and is_by_gap and not settled.has_lasted(asked.underused_s):
        gap = describe_duration(asked.underused_s / 2)
        needed = describe_duration(asked.underused_s)
        why = f"it once worked again after {gap} or more, so it becomes underused only after {needed} of idle time"
        settled = settled._replace(reason=f"{settled.reason}; {why}")
    if settled.stage == UNDERUSED and ceilings:
        why = f"{settled.reason}; it stays a candidate, because {'; '.join(ceilings)}"
        return _lowered(settled, "candidate", why, "capped")
    return settled


def _by_its_own(decision: Decision, holder: HolderEvidence, around: Surroundings | None, book: Rulebook) -> Decision:
    """Decides again by the policy of this holder, if this policy is known. The first decision used the loosest policy,
    which may accept a shorter idle run. So its reason may contain other numbers.
    """
    if not book.rules:
        return decision
    chosen = book.choose(holder, around)
    policy, rule, why = chosen if isinstance(chosen, Chosen) else Chosen(book.site, why=chosen.why)
    decision = decision._replace(rule=rule, rule_why=why)
    if policy == book.loosest:
        return decision
    again = _again(decision, holder, policy, windows_for(holder, policy))
    return again if again.stage not in LABELLED else decision


def _again(decision: Decision, holder: HolderEvidence, policy: Policy, windows: Windows) -> Decision:
    """Decides again by other windows. The surroundings and the chosen policy remain."""
    again = decide_holder(holder, decision.observed_wall, policy, windows)
    return again._replace(around=decision.around, rule=decision.rule, rule_why=decision.rule_why)


class _Gang:
    """A summary of the decisions on all members of a gang. The summary is made once, and used for every member."""

    def __init__(self, members: Sequence[Member], alone: Mapping[HolderName, Decision]) -> None:
        seen = {member: alone.get(member.name) for member in members}
        known = [decision for decision in seen.values() if decision is not None]
        self.members = len(members)
        self.idle = sum(decision.stage in IDLE for decision in known)
        self.spared = [decision for decision in known if decision.stage in ("exempt", "serving")]
        self.waits = next((member for member in members if member.waits), None)
        self.halted = [decision for decision in known if decision.stage == NOT_RUNNING]
        self.busy = [each for each in known if each.active or each.stage in ("active", "starting", "partial")]
        self.unknown = [(member.name, why) for member, each in seen.items() if (why := _unknown(member, each))]
        self.late = [decision for decision in known if decision.stage != UNDERUSED]


def _settle_gang(decision: Decision, gang: _Gang, waiting_max_s: float) -> Decision:
    """Returns the decision on one member of a gang, which follows from the decisions on all members.

    First come the reasons that end a mark immediately: a wish, a member that waits, a member that works. Unknown
    members come next. If a gang has waited for longer than `waiting_max_s` (seconds), its idle members become
    `candidate` at most.
    """
    around = decision.around
    assert around is not None
    title = around.group or "its group"
    if of := next(iter(gang.spared), None):  # another member, since the member of this decision would be marked
        lowered = _lowered(decision, of.stage, f"{decision.reason}, but member {of.title} of {title}: {of.reason}")
        return lowered._replace(exempt_by=of.exempt_by)
    if why := _waits(gang, around.missing, title):
        if decision.stage in IDLE and decision.has_lasted(waiting_max_s):
            longest = describe_duration(waiting_max_s)
            return _lowered(
                decision,
                "candidate",
                f"{decision.reason}; after {longest} or more of waiting it becomes a candidate at most: {why}",
                "waiting",
            )
        return _lowered(decision, "waiting", f"{decision.reason}, but {why}")
    if busy := _other(gang.busy, decision):
        idle = gang.idle + (decision.stage not in IDLE)
        text = f"{idle} of {gang.members} members of {title} are idle, but {busy.title}: {busy.reason}"
        return _lowered(decision, "partial", text, "members")
    if unknown := next((each for each in gang.unknown if each[0] != decision.name), None):
        return _lowered(decision, "unknown", f"{decision.reason}, but member {unknown[0]} of {title}: {unknown[1]}")
    if decision.stage == UNDERUSED and (late := _other(gang.late, decision)):
        why = f"{decision.reason}, but member {late.title} of {title}: {late.reason}"
        return _lowered(decision, "candidate", why, "members")
    if decision.stage == "partial" or gang.members < 2:
        return decision
    others = "is the other member" if gang.members == 2 else f"are the other {gang.members - 1} members"
    return decision._replace(reason=f"{decision.reason}, and so {others} of {title}")


def _waits(gang: _Gang, missing: int, title: str) -> str:
    """Returns the reason why a gang waits; "" if it does not wait."""
    if missing:
        return f"{title} still waits for {_members(missing)}"
    if gang.waits is not None:
        return f"{gang.waits.name} of {title} {gang.waits.waits}"
    halted = next(iter(gang.halted), None)
    return f"member {halted.title} of {title}: {halted.reason}" if halted is not None else ""


def _other(found: Sequence[Decision], decision: Decision) -> Decision | None:
    """Returns the first decision on another holder."""
    return next((each for each in found if each.name != decision.name), None)


def _unknown(member: Member, decision: Decision | None) -> str:
    """Returns why the evidence does not show that a member is idle; "" for a member that is shown to be idle."""
    if decision is None:
        return "it has no series"
    if decision.stage not in IDLE:
        return decision.reason
    if member.incarnation and decision.incarnation != member.incarnation:
        return "the evidence is about another pod of this name"
    if member.units is not None and not decision.holds(member.units):
        return f"exporters report {decision.held} GPUs for this member, but its scheduler allocated {member.units}"
    return ""


def _share(
    decision: Decision,
    holder: HolderEvidence,
    around: Surroundings | Unreadable | None,
    evidence: Evidence,
    book: Rulebook,
) -> Decision:
    """Turns a server into a sharing candidate if it uses little even in its busiest hour, unless it is exempt."""
    little = evidence.sharing.get(decision.name)
    if little is None or decision.stage not in ("active", "serving") or not isinstance(around, Surroundings):
        return decision
    chosen = book.choose(holder, around)
    if around.kind != SERVING or around.members or around.exemption is not None or isinstance(chosen, NotKnown):
        return decision
    if chosen.rule is not None and chosen.rule.exempt:
        return decision
    # The sharing evidence is by pod name, and may be about an earlier pod with this name.
    if decision.start_wall is None or decision.observed_wall - decision.start_wall < book.site.sharing_window:
        return decision
    reason = f"{little}, and it serves requests ({around.kind_why})"
    return _lowered(decision, SHARING, reason)._replace(around=around, rule=chosen.rule, rule_why=chosen.why)


def _exempt(decision: Decision, exemption: Exemption) -> Decision:
    lowered = _lowered(decision, "exempt", f"{decision.reason}, but {exemption.why}")
    return lowered._replace(exempt_by=exemption.source)


def _lowered(decision: Decision, stage: str, reason: str, kept: str = "") -> Decision:
    """Returns the decision with another stage. The caller must choose a stage that is not higher.

    `kept`: as in Decision, if the new stage is not the reason.
    """
    windows = decision.windows
    needed_s = windows.needed_s(stage) if windows is not None else decision.needed_s
    since = decision.idle_since_wall if stage in LABELLED else None
    return decision._replace(stage=stage, reason=reason, needed_s=needed_s, idle_since_wall=since, kept=kept)


def _members(count: int) -> str:
    return "one member" if count == 1 else f"{count} members"
