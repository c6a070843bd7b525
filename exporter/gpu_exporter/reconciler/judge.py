"""Makes the decisions for the dry run and for --apply: first from metrics, then from the surroundings of holders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.common.clock import Clock
from gpu_exporter.reconciler.decision.brakes import Brakes, Freeze, hold
from gpu_exporter.reconciler.decision.outcomes import LOST, AskFate
from gpu_exporter.reconciler.decision.policy import LABELLED, MARKED, Decision, decide
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.settle import Around, members_of, settle
from gpu_exporter.reconciler.decision.stalls import has_stall, with_stalls
from gpu_exporter.reconciler.decision.surroundings import Surroundings, Surveyor, Unreadable
from gpu_exporter.reconciler.evidence.records import Evidence, EvidenceSource, HolderName
from gpu_exporter.reconciler.marks import Refused
from gpu_exporter.reconciler.pause import PauseSource, pause

PROBLEMS_MAX = 3  # problems of one kind in a log line


class Judgement(NamedTuple):
    """One reading of the source, and the decisions from it, sorted by the holders' names.

    `problems`: evidence or surroundings that were missing.
    `frozen`: active brakes, as in Brakes.check.
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
        """The holders that the next query must include."""

    def note(self, decisions: Sequence[Decision], wall: float, ask_fate: AskFate) -> None:
        """Takes the decisions of a cycle, before brakes are applied. `wall`: time of the evidence (Unix seconds).
        Raises nothing.
        """


class Judge:
    """Reads the evidence and decides. Remembers the members of gangs and the stages of holders between cycles."""

    def __init__(
        self,
        source: EvidenceSource,
        find_surveyor: Callable[[str], Surveyor | None],
        book: Rulebook,
        clock: Clock,
        pauses: Sequence[PauseSource] = (),
        record: DecisionLog | None = None,
    ) -> None:
        """`find_surveyor`: returns the surveyor of a scheduler; None if its live objects cannot be reached.
        `pauses`: places where people request a pause.
        `record`: None if there is only one cycle.
        """
        self._record = record
        self._pauses = tuple(pauses)
        self._source = source
        self._find_surveyor = find_surveyor
        self.book = book
        self._brakes = Brakes(book.site, clock)
        self._members: set[HolderName] = set()
        self._stages: dict[HolderName, str] = {}

    def judge(self, marked: Collection[HolderName] = ()) -> Judgement:
        """Reads the evidence and decides. Raises AnswerError.

        `marked`: holders that are always included. Members of gangs are included too, because a list of idle holders
        does not contain a member that works.
        """
        watched = self._record.names() if self._record is not None else set()
        evidence = self._read([*marked, *sorted((self._members | watched).difference(marked))])
        decisions = decide(evidence, self.book.loosest)
        around = self._survey(evidence, decisions, ())
        members = members_of(around)
        if members - self._members - {decision.name for decision in decisions}:
            evidence = self._read(sorted(members.union(marked, watched)))
            decisions = decide(evidence, self.book.loosest)
            around = self._survey(evidence, decisions, ())
        settled = settle(evidence, decisions, around, self.book)
        rising = [d.name for d in settled if d.stage in MARKED and self._stages.get(d.name) != d.stage]
        if rising:
            around = self._survey(evidence, decisions, rising)
            settled = settle(evidence, decisions, around, self.book)
        settled = with_stalls(evidence, settled, around, self.book.site)
        self._stages = {decision.name: decision.stage for decision in settled}
        self._members = members_of(around)
        failures = [each.why for each in around.values() if isinstance(each, Unreadable) and each.is_failure]
        problems = [*evidence.problems[:PROBLEMS_MAX], *list(dict.fromkeys(failures))[:PROBLEMS_MAX]]
        frozen = self._brakes.check(evidence, settled)
        problems += [f"frozen: {freeze.text}" for freeze in frozen.values() if freeze.names is None]
        if self._record is not None:
            self._record.note(settled, evidence.wall, self._ask_fate)
        unreadable = [
            (each.reason, each.kind) for each in around.values() if isinstance(each, Unreadable) and each.reason
        ]
        return Judgement(evidence, hold(settled, frozen), problems, frozen, len(around), unreadable)

    def look_again(self, names: Collection[HolderName]) -> Mapping[HolderName, Decision]:
        """New decisions on these holders from new evidence and new surroundings, without the brakes.

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

    def _ask_fate(self, name: HolderName, incarnation: str) -> str:
        surveyor = self._find_surveyor(name.scheduler)
        return surveyor.read_fate(name, incarnation) if surveyor is not None else LOST

    def _read(self, names: Collection[HolderName]) -> Evidence:
        evidence = self._source.read_evidence(names)
        for place in self._pauses:
            evidence = pause(evidence, place)
        return evidence

    def _survey(self, evidence: Evidence, decisions: Collection[Decision], rising: Collection[HolderName]) -> Around:
        """The surroundings of all holders that could be marked or are stalled."""
        by_scheduler: defaultdict[str, list[HolderName]] = defaultdict(list)
        stalled = {holder.name for holder in evidence.holders if has_stall(holder)}
        for decision in decisions:
            may_share = decision.stage == "active" and decision.name in evidence.sharing
            if decision.stage in LABELLED or may_share or decision.name in stalled:
                by_scheduler[decision.name.scheduler].append(decision.name)
        around: dict[HolderName, Surroundings | Unreadable] = {}
        for scheduler, names in by_scheduler.items():
            surveyor = self._find_surveyor(scheduler)
            if surveyor is not None:
                around |= surveyor.survey(names, rising, evidence.wall)
        return around


class Named(Surveyor, Protocol):
    """A surveyor that names its scheduler."""

    scheduler: str


def judge_of(
    source: EvidenceSource,
    surveyors: Sequence[Named],
    book: Rulebook,
    clock: Clock,
    pauses: Sequence[PauseSource] = (),
    record: DecisionLog | None = None,
) -> Judge:
    """A judge that uses these surveyors for their schedulers."""
    return Judge(source, {each.scheduler: each for each in surveyors}.get, book, clock, pauses, record)
