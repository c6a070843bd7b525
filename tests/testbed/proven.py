"""Proofs and a record with scripted answers, and texts and counters in memory.

At first everything is proven, and there is demand for eight GPUs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from gpu_exporter.common.config.defaults import Actions
from gpu_exporter.reconciler.actions.proofs import Shown, Warned, Work
from gpu_exporter.reconciler.actions.record import PolicyStanding
from gpu_exporter.reconciler.actor import Entry
from gpu_exporter.reconciler.decision.outcomes import Account, key_of
from gpu_exporter.reconciler.decision.policy import Decision
from gpu_exporter.reconciler.decision.target import Skipped
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import MarkError

AT_REST = Work(0.0, 0.0)


class Texts:
    """A storage of texts in memory that survives a restart of the process."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.fail: MarkError | None = None

    def read_text(self, key: str) -> str:
        if self.fail:
            raise self.fail
        return self.kept.get(key, "")

    def write_text(self, key: str, text: str) -> None:
        if self.fail:
            raise self.fail
        self.kept[key] = text


class Tally:
    """Counts decisions and their outcomes."""

    def __init__(self) -> None:
        self.decided: Counter[Account] = Counter()
        self.outcomes: Counter[tuple[Account, str]] = Counter()
        self.dropped: Counter[str] = Counter()

    def count_decision(self, account: Account) -> None:
        self.decided[account] += 1

    def count_outcome(self, account: Account, outcome: str) -> None:
        self.outcomes[account, outcome] += 1

    def count_dropped(self, what: str, number: int) -> None:
        self.dropped[what] += number

    def restore(self, policy: str, kind: str, decisions: int, outcomes: Mapping[str, int]) -> None:
        self.decided[Account(policy, kind, "")] += decisions

    def forget(self) -> None:
        self.decided.clear()

    def counts(self) -> tuple[int, dict[str, int]]:
        by_outcome: Counter[str] = Counter()
        for (_, outcome), count in self.outcomes.items():
            by_outcome[outcome] += count
        return sum(self.decided.values()), dict(by_outcome)


class SaidRecord:
    """The record's answers by policy and class; a class that is missing here has no decisions."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], Skipped | PolicyStanding] = {("policy", "batch"): PolicyStanding(50.0, 2.0)}
        self.open: set[Any] = set()
        self.watches = self
        self.acts: list[Entry] = []
        self.due: list[Entry] = []
        self.resumed: list[Entry] = []
        self.gone: list[Entry] = []

    def is_open(self, decisions: Collection[Decision]) -> bool:
        return any(key_of(each) in self.open for each in decisions)

    def why_not(self, account: Account, settings: Actions) -> Skipped | PolicyStanding:
        return self.answers.get(account[:2], Skipped("shadow", "no decisions"))

    def note_act(self, entry: Entry) -> None:
        if all(entry.ident != each.ident for each in self.acts):
            self.acts.append(entry)

    def acts_due(self) -> list[Entry]:
        return self.due

    def note_resumed(self, entry: Entry) -> None:
        self.resumed.append(entry)

    def note_gone(self, entry: Entry) -> None:
        self.gone.append(entry)


class SaidProofs:
    """All holders were warned except `unwarned`; no holder works beside its GPUs except those in `works`, by name."""

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.waiting = 8.0
        self.unwarned: set[str] = set()
        self.works: dict[str, Work] = {}  # work of holders beside their GPUs
        self.beside: dict[str, Work] = {}  # work of members that hold no GPUs
        self.shown: dict[HolderName, Shown] = {}  # what exporters show of holders whose end is awaited
        self.silent: set[str] = set()  # nodes whose exporter is silent

    def read_warnings(self, names: Collection[HolderName]) -> Mapping[HolderName, Warned]:
        now = time.time() - 1.0  # later than the start of any holder
        return {name: Warned(now, ("gpu-owners",)) for name in names if name.name not in self.unwarned}

    def read_demand(self, names: Collection[HolderName]) -> Mapping[HolderName, Mapping[str, float]]:
        return {name: {self.pool: self.waiting} for name in names} if self.waiting else {}

    def read_pending(self, pools: Collection[str]) -> Mapping[str, float]:
        return dict.fromkeys(pools, self.waiting)

    def read_host_work(self, names: Collection[HolderName]) -> Mapping[HolderName, Mapping[str, Work]]:
        return {name: Everywhere(self.works.get(name.name, AT_REST)) for name in names}

    def read_rest(self, namespace: str, pods: Collection[str], idle_s: float) -> Mapping[str, Work]:
        return {pod: self.beside.get(pod, AT_REST) for pod in pods}

    def read_shown(self, names: Collection[HolderName]) -> Mapping[HolderName, Shown]:
        return {name: shown for name, shown in self.shown.items() if name in names}

    def read_fresh(self, nodes: Collection[str], within_s: float) -> set[str]:
        return set(nodes) - self.silent


class Everywhere(dict[str, Work]):
    """The same work on every node."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def get(self, node: str, default: Any = None) -> Any:
        return self._work
