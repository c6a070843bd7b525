"""What the callbacks of Lightning and of the Hugging Face Trainer have in common.

A framework owns the loop and its loader. It tells when a batch begins and ends, so the time between the end of a batch
and the begin of the next one is the wait, with the framework's own work in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter_ns
from typing import Any

from gpu_exporter.torch.observation import TrainingObservation, observe


class FrameworkLoop:
    """Turns begins and ends of batches into what an observed loader would tell."""

    def __init__(self, **options: Any) -> None:
        """`options`: as for `observe`."""
        self._options = options
        self.observation: TrainingObservation | None = None
        self._loader: Iterable[Any] = ()
        self._asked: int | None = None
        self._is_first = True

    def begin(self, loader: Any, optimizers: Any, model: object | None, **facts: int | float | bool | str) -> None:
        """The training begins. `loader`: only its settings are read."""
        self._loader = loader
        self.observation = observe(loader, optimizer=optimizers, model=model, **self._options)
        self.observation.note_facts(**facts)

    def begin_epoch(self) -> None:
        if self.observation is not None:
            self.observation.make_iterator(self._loader)
            self._is_first, self._asked = True, perf_counter_ns()
            self.observation.ask(self._loader, self._asked)

    def begin_batch(self) -> None:
        if self.observation is not None and self._asked is not None:
            now, is_first = perf_counter_ns(), self._is_first
            self.observation.get(self._loader, self._asked, now, None, is_first=is_first)
            self._is_first = False

    def end_batch(self) -> None:
        if self.observation is not None:
            self._asked = perf_counter_ns()
            self.observation.ask(self._loader, self._asked)

    def end_epoch(self) -> None:
        if self.observation is not None:
            self.observation.end(self._loader)

    def finish(self) -> None:
        if self.observation is not None:
            self.observation.close()
            self.observation = None
