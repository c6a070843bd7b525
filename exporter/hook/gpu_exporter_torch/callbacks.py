"""Common code of the callbacks for Lightning and for the Hugging Face Trainer.

The framework owns the loop and its loader, and calls the callback when a batch begins and ends. The time from the end
of a batch to the beginning of the next batch is counted as wait. This time includes the framework's own work.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter_ns
from typing import Any, NamedTuple

from gpu_exporter_torch.facts import Fact
from gpu_exporter_torch.observation import TrainingObservation, observe

log = logging.getLogger("gpu_exporter_torch")


class FrameworkTraining(NamedTuple):
    """The objects of a framework's training. `loader`: only its settings are read. `facts`: as in docs/torch.md."""

    loader: Any
    optimizers: Any
    model: object | None
    facts: Mapping[str, Fact]


class FrameworkLoop:
    """Reports the batches of a framework to an observation, as an observed loader would report them.

    Work that the framework announces between two batches (evaluations, checkpoints, logs) is not counted as wait.
    """

    def __init__(self, **options: Any) -> None:
        """`options`: as for `observe`, without loader, optimizer and model. Raises TypeError for other options."""
        inspect.signature(observe).bind((), optimizer=(), model=None, **options)
        self._options = options
        self._observation: TrainingObservation | None = None
        self._loader: Iterable[Any] = ()
        self._asked = 0
        self._is_first = True

    def begin(self, describe: Callable[[], FrameworkTraining]) -> None:
        """Begins to observe a training. `describe` reads the framework's objects. If it fails, because another version
        of the framework has other objects, the training continues without observation.
        """
        try:
            loader, optimizers, model, facts = describe()
        except Exception as exc:
            log.warning("the training continues, but is not observed: %s: %s (docs/torch.md)", type(exc).__name__, exc)
            return
        self._loader = loader
        self._observation = observe(loader, optimizer=optimizers, model=model, **self._options)
        self._observation.note_facts(**facts)

    def begin_epoch(self) -> None:
        if self._observation is not None:
            self._observation.make_iterator(self._loader)
            self._is_first = True
            self._ask()

    def begin_batch(self) -> None:
        if self._observation is not None:
            now = perf_counter_ns()
            self._observation.get(self._loader, self._asked, now, None, is_first=self._is_first)
            self._is_first = False

    def end_batch(self) -> None:
        if self._observation is not None:
            self._ask()

    def interrupt(self, *, is_over: bool = True) -> None:
        """Notes other work of the framework since the last batch. `is_over`: false if this work still continues."""
        if self._observation is not None:
            self._asked = perf_counter_ns()
            self._observation.restart(self._asked, is_over=is_over)

    def end_epoch(self) -> None:
        if self._observation is not None:
            self._observation.end(self._loader)

    def finish(self) -> None:
        if self._observation is not None:
            self._observation.close()
            self._observation = None

    def _ask(self) -> None:
        self._asked = perf_counter_ns()
        if self._observation is not None:
            self._observation.ask(self._loader, self._asked, is_first=self._is_first)
