"""Observes one training loop. After any error in the hook, the hook logs one warning and switches itself off, and the
loop continues.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Literal, NamedTuple

from gpu_exporter_torch.facts import Fact, LoopFacts, is_autocast, is_profiled
from gpu_exporter_torch.file import ReportFile, find_directory
from gpu_exporter_torch.gpu_time import NOTHING, WAIT, WORK, GpuTimeline
from gpu_exporter_torch.loaders import mimic, observe_loader
from gpu_exporter_torch.making import MakingCpu
from gpu_exporter_torch.phases import Phase, PhaseClock
from gpu_exporter_torch.ranks import find_rank
from gpu_exporter_torch.report import make_report
from gpu_exporter_torch.report_rules import BETWEEN, ENDED, PHASES
from gpu_exporter_torch.siblings import read_siblings
from gpu_exporter_torch.steps import StepCounter
from gpu_exporter_torch.summary import find_proposal, render_summary

log = logging.getLogger("gpu_exporter_torch")
SAMPLES_MAX = 2**31
PROCESS = {os.getpid(): os.urandom(8).hex()}  # a forked process makes its own


def observe(
    loader: Iterable[Any],
    *,
    optimizer: object | Sequence[object] = (),
    model: object | None = None,
    phases: bool = False,
    samples: Callable[[Any], int] | None = None,
    directory: str | os.PathLike[str] | None = None,
    registry: Any = None,
    summary: bool = True,
) -> TrainingObservation:
    """Observes the loop over `loader`. The loop must iterate over the result instead.

    `optimizer`: one or several optimizers. A step of the loop ends after an optimizer's step or a call of
    `mark_step()`. Without both, each batch is a step. `model`: only its type and its first parameter are read.
    `phases`: whether `phase(...)` measures. `samples`: function that returns the number of samples in a batch; without
    it, this number is unknown. `directory`: where the report is written, by default the directory that the site
    provides (docs/torch.md). `registry`: a prometheus_client registry in which the same values are published.
    `summary`: whether to print the summary to stderr at the end.

    Raises nothing: an invalid argument switches the hook off with a warning.
    """
    kind = IteratorObservation if hasattr(type(loader), "__next__") else TrainingObservation
    options = _Options(optimizer, model, phases, samples, directory, registry, summary)
    observation: TrainingObservation = mimic(kind, type(loader), "_plain")(loader, options)
    return observation


class _Options(NamedTuple):
    """The parameters of `observe`, as the caller gave them."""

    optimizer: Any
    model: object | None
    phases: bool
    samples: Callable[[Any], int] | None
    directory: str | os.PathLike[str] | None
    registry: Any
    summary: bool


# By id, since an observation has a hash only if its loader has one.
OPEN: weakref.WeakValueDictionary[int, TrainingObservation] = weakref.WeakValueDictionary()


@atexit.register
def _close_all() -> None:
    """Prints the summary of loops that are still open when the program ends."""
    for observation in list(OPEN.values()):
        observation.close()


class TrainingObservation:
    """An observed loader. It is iterable, and a context manager that prints the summary when it ends.

    Reading or setting any other attribute is forwarded to the original loader. `loader`: the observed loader, for a
    framework that needs a DataLoader.
    """

    def __init__(self, loader: Iterable[Any], options: _Options) -> None:
        self.loader: Any = loader
        self._plain = loader
        self._is_off = False
        self._is_closed = False
        self._pid = os.getpid()
        self._thread = threading.get_ident()
        self._facts: dict[str, Fact] = {}
        self._file: ReportFile | None = None
        self._unregister: Callable[[], None] = _ignore_end
        self._hooks: list[Any] = []
        self._counter = StepCounter(marked=False)
        self._gpu = GpuTimeline()
        self._making = MakingCpu()
        self._phases: PhaseClock | None = None
        self._phase_objects: dict[str, Phase] = {}
        try:
            self._set_up(options)
        except Exception as exc:
            self._switch_off(exc)

    def _set_up(self, options: _Options) -> None:
        optimizer, model, phases, samples, directory, registry, summary = options
        optimizers: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        self._samples, self._prints = samples, summary
        self._counter.marked = bool(optimizers)
        self._settings = LoopFacts(self._plain, optimizers, model)
        self._gpu.device, self._gpu.follows = self._settings.device, not self._settings.is_placed
        self._sample_count: int | None = 0 if samples is not None else None
        if phases:
            self._phases = PhaseClock(perf_counter_ns, self._change_phase)
        self._phase_objects = {name: Phase(name, self._enter, self._leave) for name in PHASES}
        self._run = os.urandom(8).hex()
        folder = find_directory() if directory is None else Path(directory)
        self._folder = folder
        if folder is not None:
            self._file = ReportFile(folder, self._run)
            weakref.finalize(self, self._file.end)  # an observation that is dropped without an end
        self._began: int | None = None
        self.loader = observe_loader(self._plain, self)
        for each in optimizers:
            self._hooks.append(each.register_step_post_hook(self._after_step))
        if registry is not None:
            from gpu_exporter_torch.prometheus import TrainingCollector

            collector = TrainingCollector(self.report)
            registry.register(collector)
            self._unregister = functools.partial(registry.unregister, collector)
        OPEN[id(self)] = self

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name == "loader":
            object.__setattr__(self, name, value)
        else:
            setattr(self._plain, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":  # not set: set-up has failed
            raise AttributeError(name)
        return getattr(self._plain, name)

    def __enter__(self) -> TrainingObservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self.close()
        return False

    def add(self, loader: Iterable[Any]) -> Any:
        """Observes a second loader of the same loop. The loop's waits for it are counted, its batches are not."""
        if self._is_off:
            return loader
        try:
            return observe_loader(loader, self)
        except Exception as exc:
            self._switch_off(exc)
            return loader

    def mark_step(self) -> None:
        """Marks that the optimizer has made its step. Not needed for the optimizers that were passed to `observe`."""
        self._guard(self._mark)

    def phase(self, name: str) -> Phase:
        """Returns a context manager around one phase of a step. `name`: one of the phases in docs/torch.md.

        Without `phases=True` it measures nothing. An unknown name switches the hook off.
        """
        found = self._phase_objects.get(name)
        if found is None:
            self._guard(_refuse_phase, name)
            return Phase(name, _ignore, _ignore_end)
        return found

    def report(self) -> dict[str, Any]:
        """Returns the present report (docs/torch.md). Empty after an error in the hook."""
        try:
            return self._report("running") if not self._is_off else {}
        except Exception as exc:
            self._switch_off(exc)
            return {}

    def close(self) -> None:
        """Writes the last report, prints the summary, and stops observing. Later calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() == self._pid:  # not in a process that was forked from this one
            self._guard(self._finish)
        self._is_off = True
        self._guard_end()

    def note_facts(self, **facts: Fact) -> None:
        """Adds facts about the loop that only a framework can provide. Names as in docs/torch.md."""
        self._facts |= facts

    # Calls from the loaders. Each call is guarded: no error of the hook reaches the loop.

    def make_iterator(self, loader: object, inner: object | None = None) -> None:
        if loader is self._plain:
            self._guard(self._begin_epoch, inner)

    def ask(self, loader: object, now: int, *, is_first: bool) -> None:
        self._guard(self._ask, loader, now, is_first)

    def restart(self, now: int, *, is_over: bool = True) -> None:
        """Notes that a framework did other work between two batches. `is_over`: false if this work continues until the
        next batch.
        """
        self._guard(self._restart, now, is_over)

    def get(self, loader: object, asked: int, now: int, batch: object, *, is_first: bool) -> None:
        self._guard(self._get, loader, asked, now, batch, is_first)

    def end(self, loader: object) -> None:
        if loader is self._plain:
            self._guard(self._end)

    def _guard(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._is_off:
            return
        try:
            work(*arguments)
        except Exception as exc:
            self._switch_off(exc)

    def _switch_off(self, error: Exception) -> None:
        """Stops observing after an error in the hook. Must not raise."""
        was_off, self._is_off = self._is_off, True
        try:
            self._guard_end()
            if not was_off:
                log.warning(
                    "the training continues, but is no longer observed: %s: %s (docs/torch.md)",
                    type(error).__name__,
                    error,
                )
        except Exception:  # noqa: S110  -- a logging handler of the program that raises
            pass

    def _guard_end(self) -> None:
        """Removes the hooks from the optimizers, and all other references to this object."""
        try:
            hooks, self._hooks = self._hooks, []
            for hook in hooks:
                hook.remove()
            unregister, self._unregister = self._unregister, _ignore_end
            unregister()
            if self._file is not None:
                self._file.end()
            OPEN.pop(id(self), None)
        except Exception as exc:
            log.debug("cannot remove the hook from an optimizer: %s", exc)

    def _begin_epoch(self, inner: object | None = None) -> None:
        self._counter.begin_epoch()
        self._making.begin(inner)
        self._gpu.cancel()  # what came after the last batch may be anything
        if self._phases is not None:  # the time between two epochs is not part of any step
            self._phases.close_step(is_measured=False)

    def _restart(self, now: int, is_over: bool) -> None:
        self._counter.restart(now)
        if not is_over:
            self._counter.skip()
        self._gpu.cancel()
        self._gpu.mark(WAIT if self._counter.measures and is_over else NOTHING)

    def _ask(self, loader: object, now: int, is_first: bool) -> None:
        counter = self._counter
        if counter.marked and is_first and loader is self._plain:
            self._thread = threading.get_ident()  # the one whose steps must be marked
        elif not counter.marked or loader is self._plain:
            self._refuse_other_threads()
        if loader is self._plain:
            if self._began is None:
                self._began = now
            before, measured = counter.steps, counter.measured
            counter.ask(now)
            if counter.steps != before:
                self._after_close(is_measured=counter.measured != measured)
        if is_profiled():
            counter.skip()
        self._gpu.mark(WAIT if counter.measures and not is_first else NOTHING)
        if loader is self._plain:
            self._making.ask()

    def _get(self, loader: object, asked: int, now: int, batch: object, is_first: bool) -> None:
        if loader is self._plain:
            self._making.get(now, is_first=is_first)
            self._counter.get(asked, now, is_first=is_first)
            if self._samples is not None and self._sample_count is not None:
                self._add_samples(batch)
        else:
            self._counter.add_wait(asked, now)
        self._gpu.mark(WORK if self._counter.measures else NOTHING)

    def _end(self) -> None:
        self._counter.end_epoch()
        self._gpu.mark(NOTHING)
        if self._file is not None:  # perhaps the last pass, and without a `with`
            self._file.write_soon(lambda: self._report(BETWEEN))

    def _refuse_other_threads(self) -> None:
        """Raises RuntimeError if another thread reads the batches, because a thread that reads ahead would be timed
        instead of the loop.
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "another thread reads the batches: call observe on the loader that the loop's thread reads"
            )

    def _mark(self) -> None:
        self._refuse_other_threads()
        self._counter.mark(perf_counter_ns())
        if is_profiled():
            self._counter.skip()

    def _after_step(self, optimizer: object, arguments: object, keywords: object) -> None:
        self._guard(self._mark)

    def _after_close(self, *, is_measured: bool) -> None:
        self._gpu.read()
        if self._phases is not None:
            self._phases.close_step(is_measured=is_measured)
        if self._file is not None and self._file.is_due:
            self._file.write(self._report("running"))

    def _add_samples(self, batch: object) -> None:
        """Counts the samples of a batch with the user's function. If it fails or returns no valid number, the count is
        then unknown.
        """
        try:
            number = self._samples(batch) if self._samples is not None else None
        except Exception:
            number = None
        is_number = isinstance(number, int) and not isinstance(number, bool) and 0 <= number <= SAMPLES_MAX
        if is_number and self._sample_count is not None and number is not None:
            self._sample_count += number
        else:
            self._sample_count = None

    def _enter(self, name: str) -> None:
        if self._phases is not None:
            self._guard(self._enter_phase, self._phases, name)

    def _enter_phase(self, phases: PhaseClock, name: str) -> None:
        phases.enter(name)
        if is_autocast():
            self._facts["precision"] = "mixed"

    def _leave(self) -> None:
        if self._phases is not None:
            self._guard(self._phases.leave)

    def _change_phase(self, name: str) -> None:
        self._gpu.mark((name or WORK) if self._counter.measures else NOTHING)

    def _report(self, state: str) -> dict[str, Any]:
        torch = sys.modules.get("torch")
        rank = find_rank()
        report = make_report(
            self._counter,
            self._gpu,
            self._phases,
            rank,
            self._settings.read() | self._facts,
            writer="gpu_exporter_torch" if torch is None else f"gpu_exporter_torch (torch {torch.__version__})",
            run=self._run,
            process=PROCESS.setdefault(os.getpid(), self._run),
            state=state,
            local_world_size=rank.local_world_size,
            gpus=self._settings.find_gpus(),
            samples=self._sample_count,
            **self._making.seconds(),
        )
        report["facts"] |= find_proposal(report)
        return report

    def _finish(self) -> None:
        self._begin_epoch()  # the last step ends with its mark
        self._gpu.read()
        report = self._report(ENDED)
        if self._file is not None:
            self._file.write(report)
        if self._prints and find_rank().speaks:
            loop_s = 0.0 if self._began is None else (perf_counter_ns() - self._began) / 1e9
            others = [] if self._folder is None else read_siblings(self._folder, report)
            print(render_summary(report, others, loop_s), end="", file=sys.stderr, flush=True)  # noqa: T201


class IteratorObservation(TrainingObservation):
    """The observation of an iterator, e.g. of a generator. It also supports `next`."""

    def __next__(self) -> Any:
        if "_iterator" not in self.__dict__:
            self._iterator = iter(self)
        return next(self._iterator)


def _refuse_phase(name: str) -> None:
    raise ValueError(f"phase {name!r} is not one of {', '.join(PHASES)}")


def _ignore(name: str) -> None:
    """Enters a phase that is not measured."""


def _ignore_end() -> None:
    """Leaves a phase that is not measured."""
