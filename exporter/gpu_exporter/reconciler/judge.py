"""Makes the decisions for the dry run and for --apply: first from metrics, then from the surroundings of holders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.reconciler.decision.brakes import Brakes, Freeze, hold
from gpu_exporter.reconciler.decision.outcomes import LOST, AskFate
from gpu_exporter.reconciler.decision.policy import LABELLED, MARKED, Decision, decide
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.settle import Around, members_of, settle
from gpu_exporter.reconciler.decision.stalls import has_stall, with_stalls
from gpu_exporter.reconciler.decision.surroundings import Incarnation, Surroundings, Surveyor, Unreadable
from gpu_exporter.reconciler.evidence.records import Evidence, EvidenceSource, HolderName, Unseen
from gpu_exporter.reconciler.marks import Marker, Refused
from gpu_exporter.reconciler.pause import PauseSource, pause

PROBLEMS_MAX = 3  # problems of one kind in a log line


class Judgement(NamedTuple):
    """One reading of the source, and the decisions from it, sorted by the holders' names.

    `problems`: evidence or surroundings that were missing.
    `frozen`: the active brakes, by reason.
    `surveyed`: the number of holders whose surroundings were read.
    `unreadable`: for each holder whose pod, owner or namespace cannot be read, the reason and the kind of that object.
    """

    evidence: Evidence
    decisions: list[Decision]
    problems: list[str]
    frozen: dict[str, Freeze]
    surveyed: int = 0
    unreadable: Sequence[tuple[str, str]] = ()


class DecisionLog(Protocol):
    """Records the outcomes of decisions. Record implements this Protocol, in the package of the actions."""

    def names(self) -> set[HolderName]:
        """Returns the holders that the next query must include."""

    def note(self, decisions: Sequence[Decision], wall: float, ask_fate: AskFate) -> None:
        """Takes the decisions of a cycle, before the brakes. `wall`: of the evidence (Unix seconds). Raises nothing."""


class Judge:
    """Reads the evidence and decides. Remembers the members of gangs and the stages of holders between cycles."""

    def __init__(
        self,
        source: EvidenceSource,
        find_surveyor: Callable[[str], Surveyor | None],
        book: Rulebook,
        pauses: Sequence[PauseSource] = (),
        record: DecisionLog | None = None,
    ) -> None:
        """`find_surveyor`: returns the surveyor of a scheduler; None if its live objects cannot be reached.
        `pauses`: places where people request a pause.
        `record`: records the outcomes of the decisions; None if there is only one cycle.
        """
        self._record = record
        self._pauses = tuple(pauses)
        self._source = source
        self._find_surveyor = find_surveyor
        self.book = book
        self._brakes = Brakes(book.site)
        self._members: set[HolderName] = set()
        self._stages: dict[HolderName, str] = {}
        self._ended: set[Incarnation] = set()  # unseen holders that have ended, which nothing can change

    def judge(self, asked: Collection[HolderName] = (), marks: Mapping[HolderName, str] | None = None) -> Judgement:
        """Reads the evidence and decides. Raises AnswerError.

        `asked`: holders that are always included. `marks`: the stages of existing marks, whose holders are included
        too; None in a dry run, which uses the stages of its last cycle. Members of gangs are always included, because a
        list of idle holders omits a member that works.
        """
        watched = self._record.names() if self._record is not None else set()
        marked = [*asked, *(marks or ())]
        standing = marks if marks is not None else {name: of for name, of in self._stages.items() if of in MARKED}
        evidence = _with_marks(self._read([*marked, *sorted((self._members | watched).difference(marked))]), standing)
        decisions = decide(evidence, self.book.loosest)
        around = self._survey(evidence, decisions, (), asked)
        members = members_of(around)
        if members - self._members - {decision.name for decision in decisions}:
            evidence = _with_marks(self._read(sorted(members.union(marked, watched))), standing)
            decisions = decide(evidence, self.book.loosest)
            around = self._survey(evidence, decisions, (), asked)
        settled = settle(evidence, decisions, around, self.book)
        rising = [d.name for d in settled if d.stage in MARKED and self._stages.get(d.name) != d.stage]
        if rising:
            around = self._survey(evidence, decisions, rising, asked)
            settled = settle(evidence, decisions, around, self.book)
        settled = with_stalls(evidence, settled, around, self.book.site)
        self._stages = {decision.name: decision.stage for decision in settled}
        self._members = members_of(around)
        failures = [each.why for each in around.values() if isinstance(each, Unreadable) and each.is_failure]
        problems = [*evidence.problems[:PROBLEMS_MAX], *list(dict.fromkeys(failures))[:PROBLEMS_MAX]]
        evidence = evidence._replace(unseen=self._find_missing(evidence.unseen))
        frozen = self._brakes.check(evidence, settled)
        problems += [f"frozen: {freeze.text}" for freeze in frozen.values() if freeze.names is None]
        if self._record is not None:
            self._record.note(settled, evidence.wall, self._ask_fate)
        unreadable = [
            (each.reason, each.kind) for each in around.values() if isinstance(each, Unreadable) and each.reason
        ]
        return Judgement(evidence, hold(settled, frozen), problems, frozen, len(around), unreadable)

    def look_again(self, names: Collection[HolderName]) -> Mapping[HolderName, Decision]:
        """Makes new decisions on these holders from new evidence and new surroundings, without the brakes.

        Raises AnswerError, and Refused during a pause.
        """
        evidence = self._source.read_holders(names)
        for place in self._pauses:
            evidence = pause(evidence, place)
        if evidence.paused:
            raise Refused("paused", evidence.paused)
        decisions = decide(evidence, self.book.loosest)
        around = self._survey(evidence, decisions, names)
        return {decision.name: decision for decision in settle(evidence, decisions, around, self.book)}

    def _find_missing(self, unseen: Collection[Unseen]) -> Collection[Unseen]:
        """Omits the holders that have ended: their exporters are away, e.g. with their nodes, and not missing."""
        by_scheduler: defaultdict[str, set[Incarnation]] = defaultdict(set)
        for each in unseen:
            if (each.name, each.incarnation) not in self._ended:
                by_scheduler[each.name.scheduler].add((each.name, each.incarnation))
        living: set[Incarnation] = set()
        for scheduler, holders in by_scheduler.items():
            surveyor = self._find_surveyor(scheduler)
            living.update(holders if surveyor is None else surveyor.find_living(holders))
        self._ended = {(each.name, each.incarnation) for each in unseen} - living
        return [each for each in unseen if (each.name, each.incarnation) in living]

    def _ask_fate(self, name: HolderName, incarnation: str) -> str:
        surveyor = self._find_surveyor(name.scheduler)
        return surveyor.read_fate(name, incarnation) if surveyor is not None else LOST

    def _read(self, names: Collection[HolderName]) -> Evidence:
        evidence = self._source.read_evidence(names)
        for place in self._pauses:
            evidence = pause(evidence, place)
        return evidence

    def _survey(
        self,
        evidence: Evidence,
        decisions: Collection[Decision],
        rising: Collection[HolderName],
        asked: Collection[HolderName] = (),
    ) -> Around:
        """Reads the surroundings of all holders that could be marked or are stalled. If policies match surroundings, it
        also reads those of the `asked` holders, whose policy would otherwise be unknown.
        """
        by_scheduler: defaultdict[str, list[HolderName]] = defaultdict(list)
        wanted = {holder.name for holder in evidence.holders if has_stall(holder)}
        wanted.update(asked if self.book.asks_surroundings else ())
        for decision in decisions:
            may_share = decision.stage == "active" and decision.name in evidence.sharing
            if decision.stage in LABELLED or may_share or decision.name in wanted:
                by_scheduler[decision.name.scheduler].append(decision.name)
        around: dict[HolderName, Surroundings | Unreadable] = {}
        for scheduler, names in by_scheduler.items():
            surveyor = self._find_surveyor(scheduler)
            if surveyor is not None:
                around |= surveyor.survey(names, rising, evidence.wall)
        return around


def _with_marks(evidence: Evidence, marks: Mapping[HolderName, str]) -> Evidence:
    """Returns the evidence, with the stage of each existing mark."""
    holders = (each._replace(mark=marks[each.name]) if each.name in marks else each for each in evidence.holders)
    return evidence._replace(holders=tuple(holders))


def judge_of(
    source: EvidenceSource,
    markers: Sequence[Marker],
    book: Rulebook,
    pauses: Sequence[PauseSource] = (),
    record: DecisionLog | None = None,
) -> Judge:
    """Makes a judge that reads surroundings through these markers."""
    return Judge(source, {each.scheduler: each for each in markers}.get, book, pauses, record)
