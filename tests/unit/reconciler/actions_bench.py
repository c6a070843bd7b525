"""What the tests of this subject share: the gates before an act, each by itself, with a scheduler in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tests.testbed.marker_book import Book
from tests.testbed.proven import SaidRecord, Texts

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Actions
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reconciler.actions import warnings as warnings_module
from gpu_exporter.reconciler.actions.acts import Acts
from gpu_exporter.reconciler.actions.ends import Ends
from gpu_exporter.reconciler.actions.gates import Gates
from gpu_exporter.reconciler.actions.journal import KEY, Journal, parse
from gpu_exporter.reconciler.actions.proofs import Shown, Warned, Work
from gpu_exporter.reconciler.actions.runner import (
    ActionRunner,
    Parts,
)
from gpu_exporter.reconciler.actor import DONE, Entry
from gpu_exporter.reconciler.audit import AuditLog
from gpu_exporter.reconciler.decision.policy import Decision, Windows
from gpu_exporter.reconciler.decision.surroundings import Member, Reference, Surroundings
from gpu_exporter.reconciler.decision.target import Part, Target
from gpu_exporter.reconciler.evidence.records import HolderName, HostLimits, UnitEvidence
from gpu_exporter.reconciler.marks import MarkError, Refused

ROOT = Path(__file__).resolve().parents[3]
WALL = 1_000_000.0
ALL = ("suspend", "deactivate", "stop", "requeue", "cancel")
SHAPES = {"Notebook": ("stop",), "": ("requeue", "cancel")}


def reference(group: str) -> Reference | None:
    """The target of an act on a member of a group, as a survey returns it."""
    parts = group.split("/")
    if len(parts) == 2:
        return Reference("", "", "", parts[1], "")
    kinds = (("batch", "Job"), ("kubeflow.org", "MPIJob"), ("kubeflow.org", "Notebook"))
    return Reference(*parts, "uid") if len(parts) == 4 and (parts[0], parts[2]) in kinds else None


def decision(
    pod: str = "a", group: str = "batch/v1/Job/train", kind: str = "batch", members: Sequence[str] = (), **more: Any
) -> Decision:
    name = HolderName("kubernetes", "ml", pod)
    lot = tuple(Member(HolderName("kubernetes", "ml", each), "uid", 1) for each in members)
    unit = UnitEvidence("n", "0", f"GPU-{pod}", "", WALL - 90_000, 11_000.0, 5.0, 1.0, 2)
    target = reference(group)
    possible = SHAPES.get(target.kind, ("suspend", "deactivate")) if target is not None else ()
    around = Surroundings(group, lot, kind=kind, target=target, possible=possible, shown=kind)
    facts = {"incarnation": "uid", "observed_wall": WALL, "around": around, "windows": Windows(3600.0, 7200.0), **more}
    return Decision(name, "", "underused", "idle", (unit,), 1, WALL - 11_000, **facts)


def job(number: str = "7", kind: str = "batch", **more: Any) -> Decision:
    name = HolderName("slurm", "", number)
    return decision(group=f"job/{number}", kind=kind, **more)._replace(name=name)


class Bench:
    """A runner whose sources, scheduler and target answer as a test wants."""

    scheduler = "kubernetes"

    def __init__(self, **settings: Any) -> None:
        self.settings = Actions(mode="act", kinds="suspend, stop", **settings)
        self.clock = ManualClock(wall=WALL)
        self.book = Book()
        self.record = SaidRecord()
        self.texts = Texts()
        self.audit: AuditLog | None = None
        self.warned_s = 7200.0
        self.waiting: dict[str, float] = {"pool": 8.0}
        self.trouble = ""
        self.asked = self.asked_about = 0
        self.result: Exception | None = None  # of the act
        self.sights: list[str] = []  # results of `look`, one per call; then DONE
        self.left = ""  # what the scheduler still shows of what was ended
        self.shown: dict[HolderName, Shown] = {}  # what the exporters still show
        self.silent: set[str] = set()  # nodes whose exporter is silent
        self.untold: list[Exception] = []  # errors of `tell`, one per call; then none
        self.target: dict[str, Any] = {}  # further fields of its target
        self.parts: Sequence[Part] | None = None
        self.now: dict[HolderName, dict[str, Any]] = {}  # changes of a decision when it is read again
        self.works: dict[HolderName, Work] = {}
        self.rest: dict[str, Work] = {}
        self.paused = ""
        self.was_read: list[str] = []
        self.acted: list[str] = []
        self.told: list[str] = []
        self.done: list[tuple[str, str]] = []
        self.held: list[str] = []
        self.spared: list[str] = []
        self.leads = True
        self.read_s = 0.0
        self.has_watched = True
        self.unwarned = False
        self.pools: dict[HolderName, Mapping[str, float]] = {}
        self.cycle: dict[HolderName, Decision] = {}
        self.restart()

    def restart(self) -> None:
        """Start another process, which has only the texts."""
        actors: Any = {"kubernetes": self}
        proofs: Any = self
        record: Any = self.record
        self.acts = Acts(
            Journal(self.texts),
            actors,
            Ends(actors, proofs),
            record,
            self.audit,
            self,
            self.clock,
            self.settings.grace_max,
        )
        gates = Gates(self.settings, proofs, record, HostLimits(0.25, 20e6), self.clock)
        parts = Parts(
            proofs,
            gates,
            self.acts if self.settings.mode == "act" else None,
            actors,
            {"kubernetes": self.book},
            self.look_again,
            lambda: self.leads,
        )
        self.runner = ActionRunner(self.settings, parts, self, self.clock)

    def read_warnings(self, names: Collection[HolderName]) -> Mapping[HolderName, Warned]:
        self.asked += 1
        if self.trouble:
            raise AnswerError(self.trouble)
        self.asked_about = len(names)
        if self.unwarned:
            return {}
        return dict.fromkeys(names, Warned(self.clock.wall() - self.warned_s, ("owners",)))

    def read_demand(self, names: Collection[HolderName]) -> Mapping[HolderName, Mapping[str, float]]:
        return self.pools or dict.fromkeys(names, self.waiting)

    def read_pending(self, pools: Collection[str]) -> Mapping[str, float]:
        return {pool: self.waiting[pool] for pool in pools if pool in self.waiting}

    def read_host_work(self, names: Collection[HolderName]) -> Mapping[HolderName, Mapping[str, Work]]:
        return {name: {"n": self.works.get(name, Work(0.0, 0.0))} for name in names}

    def read_rest(self, namespace: str, pods: Collection[str], idle_s: float) -> Mapping[str, Work]:
        return {pod: self.rest[pod] for pod in pods if pod in self.rest}

    def look_again(self, names: Collection[HolderName]) -> Mapping[HolderName, Decision]:
        if self.paused:
            raise Refused("paused", self.paused)
        wall = self.clock.wall() - self.read_s
        return {
            name: self.cycle[name]._replace(observed_wall=wall)._replace(**self.now.get(name, {}))
            for name in names
            if name in self.cycle
        }

    def read(self, reference: Reference, namespace: str, verbs: Sequence[str], idle_s: float, wall: float) -> Target:
        self.was_read.append(reference.title)
        self.clock.advance(self.read_s)
        parts = self.parts
        if parts is None:
            known = [self.cycle[name] for name in sorted(self.cycle) if name.namespace == namespace]
            below = [each for each in known if each.around is not None and each.around.target == reference]
            parts = [Part(each.name, each.incarnation, 1) for each in below]
        verb = "stop" if reference.kind == "Notebook" else "suspend"
        facts = {"wants": {"": len(parts)}, "undo": "undo", **self.target}
        return Target(reference, namespace, verb, tuple(parts), **facts)

    def open_entry(self, target: Target, ident: str, wall: float) -> Entry:
        where = target.reference, target.reference
        return Entry(ident, wall, self.scheduler, target.namespace, target.verb, *where, f"note {ident}", undo="undo")

    def rehearse(self, target: Target) -> None:
        pass

    def act(self, target: Target, entry: Entry) -> None:
        self.acted.append(target.reference.title)
        if self.result is not None:
            raise self.result

    def look(self, entry: Entry) -> str:
        return self.sights.pop(0) if self.sights else DONE

    def read_left(self, entry: Entry) -> str:
        return self.left

    def read_shown(self, names: Collection[HolderName]) -> Mapping[HolderName, Shown]:
        if self.trouble:
            raise AnswerError(self.trouble)
        return {name: shown for name, shown in self.shown.items() if name in names}

    def read_fresh(self, nodes: Collection[str], within_s: float) -> set[str]:
        return set(nodes) - self.silent

    def tell(self, entry: Entry, text: str) -> None:
        if self.untold:
            raise self.untold.pop(0)
        self.told.append(entry.target.title)

    def count_action(self, action: str, result: str) -> None:
        self.done.append((action, result))

    def count_not_acted(self, reason: str) -> None:
        self.held.append(reason)

    def note_spared(self, decisions: Sequence[Decision], reason: str) -> None:
        self.spared += [reason] * len(decisions)

    def entries(self) -> tuple[Entry, ...]:
        return parse(self.texts.kept.get(KEY, ""))

    def run(self, *decisions: Decision) -> tuple[list[tuple[str, str]], list[str]]:
        """Run a cycle of a process that has seen the warnings all the time, unless a test changes that. Then look for the
        ends of its actions, as the next cycle does first.
        """
        self.done, self.held, self.spared = [], [], []
        self.cycle = {each.name: each for each in decisions}
        if self.has_watched:
            now = self.clock.monotonic()
            self.runner._asker._seen._sights = {each.name: warnings_module._Sight(now - 1e6, now) for each in decisions}
        self.runner.run(decisions)
        self.acts._confirm()
        return self.done, self.held


def later(bench: Bench, each: Decision) -> Decision:
    """The decision as it is now."""
    return each._replace(observed_wall=bench.clock.wall())


NAME = decision().name
LOST = MarkError("error", "API server: timed out")  # an answer that never arrived
REFUSED = MarkError("conflict", "API server: status 409", status=409)


def journal_entry(number: int, **more: Any) -> Entry:
    where = Reference("batch", "v1", "Job", f"job-{number}", "uid")
    return Entry(f"{number:08x}", WALL + number, "kubernetes", "ml", "suspend", where, where, "note", **more)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=20,
)
