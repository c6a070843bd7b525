"""The threads that read the holders' hosts: their work, their progress and evidence for causes; and their training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import NamedTuple, Protocol

from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.evidence import HostEvidence
from gpu_exporter.common.model.holders import Allocation, Who, identify
from gpu_exporter.common.model.readings import HostProgress
from gpu_exporter.diagnosis.host.progress import ProgressReader, Suspect
from gpu_exporter.diagnosis.host.subject import HostSubject
from gpu_exporter.diagnosis.host.work import HostWorks
from gpu_exporter.diagnosis.training.files import TrainingFiles, TrainingReader

log = logging.getLogger(__name__)
TICK_S = 15.0  # between two looks for evidence
END_S = 0.2  # how long the end waits for a training that is being read
TICKS = 2  # work and progress are read in every second one


class Looks(Protocol):
    """Reads evidence. EvidenceReader is the only one; its module loads psutil, which `--once` does without."""

    def read(
        self, subjects: Iterable[HostSubject], places: Mapping[Who, PurePosixPath]
    ) -> Iterator[tuple[Who, HostEvidence]]: ...


class HostNode(NamedTuple):
    """The questions that the loop asks the node, and the takers of its answers.

    `list_held`: the present allocations, and the number of GPUs. `list_suspects`: holders in a run without progress.
    `hear`: takes what such a holder did. `list_subjects`: holders that do not use their GPUs well. `note`: takes the
    evidence for the causes. `note_training`: takes what a holder's training loop says of itself.
    """

    list_held: Callable[[], tuple[Collection[Allocation], int]]
    list_suspects: Callable[[], Iterable[Suspect]]
    hear: Callable[[Who, HostProgress], None]
    list_subjects: Callable[[], Iterable[HostSubject]]
    note: Callable[[Who, HostEvidence], None]
    note_training: Callable[[Who, TrainingFiles], None]


class HostLoop:
    """Each part has its own try: a bug in one must not cost the others."""

    def __init__(
        self,
        works: HostWorks,
        progress: ProgressReader,
        looks: Looks,
        clock: Clock,
        training: TrainingReader | None = None,
    ) -> None:
        """`training`: None if no training is read."""
        self.works = works
        self._progress, self._looks, self._clock, self._training = progress, looks, clock, training

    def run(self, stop: threading.Event, node: HostNode) -> None:
        """Read until `stop`. Training has its own thread: a job that delays the reading of its files must not delay
        what is known of other holders.
        """
        training = self._start_training(stop, node)
        tick = 0
        while not stop.is_set():
            if tick % TICKS == 0:
                self._read_work(node)
            try:
                for who, evidence in self._looks.read(node.list_subjects(), self.works.places):
                    node.note(who, evidence)
            except Exception:  # a bug here costs one look, never the thread: old evidence expires
                log.exception("cannot read the evidence for causes")
            tick += 1
            self._clock.wait(stop, TICK_S)
        if training is not None:
            training.join(END_S)

    def _start_training(self, stop: threading.Event, node: HostNode) -> threading.Thread | None:
        if self._training is None:
            return None
        run = partial(self._run_training, self._training, stop, node)
        thread = threading.Thread(target=run, name="training", daemon=True)
        try:
            thread.start()
        except RuntimeError as exc:  # the limit of tasks: what is known of the holders' hosts counts more
            log.warning("trainings are not read, since no thread can be started: %s", exc)
            return None
        return thread

    def _run_training(self, training: TrainingReader, stop: threading.Event, node: HostNode) -> None:
        while not stop.is_set():
            self._read_training(training, node)
            self._clock.wait(stop, TICK_S)

    @staticmethod
    def _read_training(training: TrainingReader, node: HostNode) -> None:
        whos = (identify(allocation.holder) for allocation in node.list_held()[0])
        try:
            for who, files in training.read(who for who in whos if who is not None):
                try:
                    node.note_training(who, files)
                except Exception:  # a bug that one holder's report shows must not cost the others
                    log.exception("cannot keep what a job writes about its training")
        except Exception:  # a bug here costs one look, never the thread
            log.exception("cannot read what jobs write about their training")

    def _read_work(self, node: HostNode) -> None:
        try:
            self.works.read(*node.list_held())
        except Exception:  # after a bug in the exporter, old values must not remain published
            log.exception("cannot read the holders' cgroups")
            self.works.works = {}
        try:
            for who, progress in self._progress.read(node.list_suspects(), self.works.places):
                node.hear(who, progress)
        except Exception:  # a bug here costs one reading, never the thread: without it, no run of a stall is proven
            log.exception("cannot read whether holders make progress")
