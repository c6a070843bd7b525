"""What the callbacks of Lightning and of the Hugging Face Trainer have in common.

A framework owns the loop and its loader. It tells when a batch begins and ends, so the time between the end of a batch
and the begin of the next one is the wait, with the framework's own work in it.
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
    """What a framework trains. `loader`: only its settings are read. `facts`: by the names in docs/torch.md."""

    loader: Any
    optimizers: Any
    model: object | None
    facts: Mapping[str, Fact]


class FrameworkLoop:
    """Turns begins and ends of batches into what an observed loader would tell.

    What the framework does between two batches, and tells of (evaluations, checkpoints, logs), is no wait.
    """

    def __init__(self, **options: Any) -> None:
        """`options`: as for `observe`, without loader, optimizer and model. Raises TypeError for others."""
        inspect.signature(observe).bind((), optimizer=(), model=None, **options)
        self._options = options
        self._observation: TrainingObservation | None = None
        self._loader: Iterable[Any] = ()
        self._asked = 0
        self._is_first = True

    def begin(self, describe: Callable[[], FrameworkTraining]) -> None:
        """The training begins. `describe`: reads the framework's own objects. If another version of the framework has
        other ones, the training goes on unobserved.
        """
        try:
            loader, optimizers, model, facts = describe()
        except Exception as exc:
            log.warning("the training is not observed, and goes on: %s: %s (docs/torch.md)", type(exc).__name__, exc)
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
        """The framework has done something else since the last batch. `is_over`: false if it goes on."""
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
