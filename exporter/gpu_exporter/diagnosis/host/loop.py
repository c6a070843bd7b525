"""Runs the threads that read the holders' hosts (work, progress, evidence for causes) and their training reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, NamedTuple

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.evidence import HostEvidence
from gpu_exporter.common.model.holders import Allocation, Who, identify
from gpu_exporter.common.model.readings import HostProgress
from gpu_exporter.common.tasks import Task
from gpu_exporter.common.threads import NoThread, start
from gpu_exporter.diagnosis.host.progress import ProgressReader, Suspect
from gpu_exporter.diagnosis.host.subject import HostSubject
from gpu_exporter.diagnosis.host.work import HostWorks
from gpu_exporter.diagnosis.training.files import TrainingFiles, TrainingReader

if TYPE_CHECKING:  # it loads psutil, which `--once` does not need
    from gpu_exporter.diagnosis.host.evidence import EvidenceReader

TICK_S = 15.0  # between two looks for evidence
END_S = 0.2  # how long a shutdown waits for the thread that reads trainings
LATE_S = 120.0  # for a look at the hosts, which takes milliseconds
TRAINING_LATE_S = 240.0  # for the trainings: a reader that is stuck is replaced earlier, up to a number of times
TICKS = 2  # work and progress are read in every second one


class HostNode(NamedTuple):
    """Functions of the node that the threads call. Some return the holders to read, the others take the results.

    - `list_held`: the present allocations, and the number of GPUs. `list_suspects`: holders in a run without progress.
    - `hear`: takes the progress of such a holder. `list_subjects`: holders that do not use their GPUs well.
    - `note`: takes the evidence for the causes. `note_training`: takes the reports of a holder's training loop.
    """

    list_held: Callable[[], tuple[Collection[Allocation], int]]
    list_suspects: Callable[[], Iterable[Suspect]]
    hear: Callable[[Who, HostProgress], None]
    list_subjects: Callable[[], Iterable[HostSubject]]
    note: Callable[[Who, HostEvidence], None]
    note_training: Callable[[Who, TrainingFiles], None]


class HostLoop:
    """Reads hosts and training reports. Each part runs separately, so that a bug in one does not stop the others."""

    def __init__(
        self,
        works: HostWorks,
        progress: ProgressReader,
        looks: EvidenceReader,
        clock: Clock,
        training: TrainingReader | None = None,
    ) -> None:
        """`training`: None if no training reports are read."""
        self.works = works
        self._progress, self._looks, self._clock, self._training = progress, looks, clock, training
        self._host, self._reading = Task("host", LATE_S), Task("training", TRAINING_LATE_S)
        self.tasks = (self._host, *([self._reading] if training is not None else []))
        self._reader: threading.Thread | None = None  # the present reader of trainings

    def run(self, stop: threading.Event, node: HostNode) -> None:
        """Reads until `stop`. A separate thread reads the training reports: a job can delay the reading of its report
        files, and this must not delay the reading of hosts.
        """
        tick = 0
        while not stop.is_set():
            self._keep_training(stop, node)
            if tick % TICKS == 0:
                self._read_work(node)
            with self._host:  # a bug here costs one look: old evidence expires
                for who, evidence in self._looks.read(node.list_subjects(), self.works.places):
                    node.note(who, evidence)
            tick += 1
            self._clock.wait(stop, TICK_S)
        if self._reader is not None:
            self._reader.join(END_S)

    def _keep_training(self, stop: threading.Event, node: HostNode) -> None:
        """Runs the thread that reads training reports. If a job's folder blocks it, starts a new thread."""
        training = self._training
        if training is None or not (self._reader is None or training.leave_behind()):
            return
        reader = threading.Thread(target=self._run_training, args=(training, stop, node), name="training", daemon=True)
        self._reader = reader
        try:
            start(reader)
        except NoThread as exc:  # the reading of hosts continues without it
            self._host.note(exc)
            self._reader = None

    def _run_training(self, training: TrainingReader, stop: threading.Event, node: HostNode) -> None:
        while not stop.is_set() and self._reader is threading.current_thread():
            with self._reading:
                self._read_training(training, node)
            self._clock.wait(stop, TICK_S)

    def _read_training(self, training: TrainingReader, node: HostNode) -> None:
        whos = (identify(allocation.holder) for allocation in node.list_held()[0])
        for who, files in training.read(who for who in whos if who is not None):
            try:
                node.note_training(who, files)
            except Exception as exc:  # a bug that one holder's report shows must not cost the others
                self._reading.note(exc)

    def _read_work(self, node: HostNode) -> None:
        with self._host:
            try:
                self.works.read(*node.list_held())
            except Exception:  # after a bug in the exporter, old values must not remain published
                self.works.works = {}
                raise
        with self._host:  # a bug here costs one reading: without it, no run of a stall is proven
            for who, progress in self._progress.read(node.list_suspects(), self.works.places):
                node.hear(who, progress)
