"""The interface between diagnosis and agent: the data of the node, the results, and the shared records."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.evidence import HostEvidence
from gpu_exporter.common.model.holders import Allocation, Who, identify
from gpu_exporter.common.model.readings import DeviceSnapshot, HostProgress
from gpu_exporter.common.model.records import HolderRecord, NodeRecords
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.model.views import HostWork
from gpu_exporter.diagnosis.cases import NodeCases
from gpu_exporter.diagnosis.causes.case import HostLook
from gpu_exporter.diagnosis.hold import IDLE_STATES, NOT_JUDGED, STALLED
from gpu_exporter.diagnosis.host.loop import TICK_S, HostNode
from gpu_exporter.diagnosis.host.progress import Suspect
from gpu_exporter.diagnosis.host.subject import HostSubject
from gpu_exporter.diagnosis.host.work import HostWorks
from gpu_exporter.diagnosis.looks import NodeEvidence, list_subjects
from gpu_exporter.diagnosis.loop import DiagnosisInput, DiagnosisLoop, Findings, Subject
from gpu_exporter.diagnosis.stalls.boards import SILENT, Boards, HeldBoard
from gpu_exporter.diagnosis.stalls.rules import StallRules, stall_rules
from gpu_exporter.diagnosis.stalls.run import SpinMemory
from gpu_exporter.diagnosis.stalls.waits import Waited
from gpu_exporter.diagnosis.stalls.watch import SpinWatch
from gpu_exporter.diagnosis.state import Window
from gpu_exporter.diagnosis.training.files import TrainingFiles
from gpu_exporter.diagnosis.training.pace import NodeTraining

__all__ = [
    "IDLE_STATES",
    "NOT_JUDGED",
    "SILENT",
    "STALLED",
    "TICK_S",
    "Boards",
    "Findings",
    "HeldBoard",
    "HeldNow",
    "HostNode",
    "HostWorks",
    "JudgedNode",
    "NodeDiagnosis",
    "SpinMemory",
    "SpinWatch",
    "StallRules",
    "Standings",
    "Subject",
    "Suspect",
    "TrainingFiles",
    "Waited",
    "Window",
    "stall_rules",
]


class HeldNow(NamedTuple):
    """The present allocations, the last answer of each GPU by UUID, and whether processes are visible here."""

    allocations: Sequence[Allocation]
    answered: Mapping[str, DeviceSnapshot]
    sees_processes: bool


class Standings(NamedTuple):
    """The input of one judgement: the node at one moment, and every shown allocation.

    `running_s`: seconds since every source of holders had answered at least once.
    """

    records: NodeRecords
    subjects: Sequence[Subject]
    running_s: float


class JudgedNode(Protocol):
    """The functions of the node that diagnosis calls."""

    def list_held(self) -> HeldNow:
        """Returns the present allocations and the last answers of the GPUs."""

    def list_suspects(self) -> Sequence[Suspect]:
        """Returns the holders with a GPU in a run without progress, whose hosts must be read."""

    def hear_host(self, who: Who, progress: HostProgress) -> None:
        """Takes a holder's activity on its host, such as disk traffic or steps of its training loop."""

    def mean_of(self, units: Sequence[UnitId], start: float, end: float) -> float | None:
        """Returns the mean utilization of these units between two times (monotonic seconds), None if it is unknown."""

    def touch(self) -> None:
        """Notes that published data have changed."""


class NodeDiagnosis:
    """Judges the allocations of one node. Thread-safe: holds no lock while it calls the node."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        node: JudgedNode,
        gather: Callable[[], Standings],
        works: HostWorks | None = None,
    ) -> None:
        """`gather`: returns the present state of the node. `works`: holders' use of CPUs and disks, None if unread."""
        self._node, self._gather, self._clock, self._works = node, gather, clock, works
        self.loop = DiagnosisLoop(settings, self._describe, clock)
        self._looks = NodeEvidence()
        self._training = NodeTraining()
        self._lock = threading.Lock()

    def host_node(self) -> HostNode:
        """Returns the functions that HostLoop calls."""
        return HostNode(
            self._count_held,
            self._node.list_suspects,
            self._node.hear_host,
            self._list_subjects,
            self._note_evidence,
            self._note_training,
        )

    def keep(self, present: Iterable[Allocation]) -> None:
        """Forgets the holders that are not in `present`, the allocations of a new poll."""
        now, present = self._clock.monotonic(), list(present)
        with self._lock:
            self._looks.keep(present)
            self._training.keep(present, now)

    def complete(self, records: NodeRecords) -> NodeRecords:
        """Adds the holders' work on the host, and the reports of their training loops, to the records."""
        works = self._works.works if self._works is not None else {}
        with self._lock:
            if not works and not self._training.is_used:
                return records
            units: dict[Who | None, list[UnitId]] = {}
            for each in records.holders:
                units.setdefault(identify(each.allocation.holder), []).append(each.allocation.unit)
            holders = tuple(self._complete(each, works, units, records.monotonic) for each in records.holders)
        return records._replace(holders=holders)

    def _complete(
        self,
        record: HolderRecord,
        works: Mapping[Who, HostWork],
        units: Mapping[Who | None, Sequence[UnitId]],
        now: float,
    ) -> HolderRecord:
        who, totals = identify(record.allocation.holder), record.totals
        work = works.get(who) if who is not None else None
        idle_run_s = totals.idle_run_s if totals.known else None
        training = self._training.view(who, record.allocation.unit, units[who], now, idle_run_s)
        return record._replace(host=work, training=training)

    def _count_held(self) -> tuple[Sequence[Allocation], int]:
        held = self._node.list_held()
        return held.allocations, len(held.answered)

    def _list_subjects(self) -> Sequence[HostSubject]:
        held, unwell = self._node.list_held(), self.loop.findings.unwell
        return list_subjects(held.allocations, unwell, held.answered, processes_proven=held.sees_processes)

    def _note_evidence(self, who: Who, evidence: HostEvidence) -> None:
        """Keeps one reading of a holder's host, with the mean utilization of its GPUs over the same time."""
        held = [each for each in self._node.list_held().allocations if identify(each.holder) == who]
        units = [] if any(each.is_shared for each in held) else [each.unit for each in held]
        look = HostLook(evidence, self._node.mean_of(units, evidence.start, evidence.end))
        with self._lock:
            self._looks.note(who, look)

    def _note_training(self, who: Who, files: TrainingFiles) -> None:
        """Keeps the reports of a holder's training loop. New steps end a run without progress."""
        with self._lock:
            found = self._training.note(who, files)
        self._node.touch()
        if found is not None and found.steps is not None:
            self._node.hear_host(who, HostProgress(found.start, found.end, steps=found.steps))

    def _describe(self) -> DiagnosisInput:
        records, subjects, running_s = self._gather()
        windows = {subject.id: subject.window for subject in subjects}
        cases = NodeCases(records, windows, self._find_looks, running_s, len(records.gpus))
        snapshots = [gpu.snapshot for gpu in records.gpus.values() if gpu.snapshot.up]
        return DiagnosisInput(snapshots, subjects, cases.describe)

    def _find_looks(self, who: Who | None) -> tuple[HostLook, ...]:
        with self._lock:
            return self._looks.looks(who)
