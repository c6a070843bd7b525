"""The whole hook around loops without torch: what it reports, and that no error of its own reaches the loop."""

from __future__ import annotations

import gc
import inspect
import json
import logging
import os
import pickle
import queue
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tests.unit.hook.fakes import FakeGpu, FakeOptimizer

from gpu_exporter_torch import (
    callbacks,
    facts,
    file,
    gpu_time,
    loaders,
    observation,
    observe,
    phases,
    ranks,
    report,
    siblings,
    steps,
    summary,
)
from gpu_exporter_torch.observation import TrainingObservation

BATCHES = range(30)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "GPU_EXPORTER_")):
            monkeypatch.delenv(name)


def train(observed: Any, optimizer: FakeOptimizer, epochs: int = 2) -> list[int]:
    """A loop; what it has computed."""
    seen = []
    for _ in range(epochs):
        for batch in observed:
            seen.append(batch * 2)
            optimizer.step()
    return seen


def run(loader: Any = BATCHES, **options: Any) -> tuple[list[int], TrainingObservation, FakeOptimizer]:
    optimizer = FakeOptimizer()
    with observe(loader, optimizer=optimizer, summary=False, **options) as observed:
        return train(observed, optimizer), observed, optimizer


def test_the_report_counts_steps_and_is_written_at_the_end(tmp_path: Path) -> None:
    seen, _, optimizer = run(directory=tmp_path)
    assert seen == [2 * each for each in range(30)] * 2
    (path,) = tmp_path.glob("run-*.json")
    written = json.loads(path.read_text())
    assert written["format"] == "gpu-exporter-training/1"
    assert (written["steps"], written["batches"], written["epochs"], written["state"]) == (60, 60, 2, "ended")
    assert written["samples"] is None and written["phases"] is None and written["gpu_wait_seconds"] is None
    assert optimizer.hooks == []


def test_phases_that_are_not_placed_are_null(tmp_path: Path) -> None:
    optimizer = FakeOptimizer()
    with observe(range(40), optimizer=optimizer, phases=True, summary=False, directory=tmp_path) as observed:
        for _ in observed:
            with observed.phase("forward"), observed.phase("collective"):
                pass
            optimizer.step()
        found = observed.report()["phases"]
    assert {name for name, phase in found.items() if phase["seconds"] is not None} == {"forward", "collective"}


def test_samples_are_counted_only_by_the_users_own_function() -> None:
    assert run(samples=lambda batch: 4)[1]._sample_count == 240
    assert run(samples=lambda batch: None)[1]._sample_count is None
    assert run(samples=lambda batch: 1 / 0)[1]._sample_count is None
    assert run(samples=lambda batch: True)[1]._sample_count is None


def test_the_observed_loader_is_the_loader_in_all_else() -> None:
    class Loader:
        dataset = "data"
        batch_size = 4

        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Iterator[int]:
            return iter((1, 2, 3))

        def set_epoch(self, epoch: int) -> str:
            return f"epoch {epoch}"

    observed = observe(Loader(), summary=False)
    assert (len(observed), observed.dataset, observed.set_epoch(2)) == (3, "data", "epoch 2")
    assert list(observed) == list(observed.loader) == [1, 2, 3]
    with pytest.raises(AttributeError, match="nothing"):
        _ = observed.nothing
    endless = observe(iter(range(3)), summary=False)
    assert endless and endless.loader and not observe([], summary=False)
    with pytest.raises(TypeError):
        len(endless)
    assert pickle.loads(pickle.dumps(observe(range(3), summary=False).loader)) == range(3)


@pytest.mark.parametrize("error", [ValueError("worker died"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_errors_of_the_loader_and_of_the_loop_pass_unchanged(error: BaseException) -> None:
    def loader() -> Iterator[int]:
        yield 1
        raise error

    with pytest.raises(type(error)) as caught:
        run(loader())
    assert caught.value is error


def test_a_second_loader_is_observed_too() -> None:
    optimizer = FakeOptimizer()
    with observe(range(30), optimizer=optimizer, summary=False) as observed:
        second = observed.add(range(100))
        seen = []
        for pair in zip(observed, second, strict=False):
            seen.append(pair)
            optimizer.step()
        assert observed.report()["batches"] == 30
    assert seen == list(zip(range(30), range(100), strict=False))


OURS = (facts, file, gpu_time, loaders, observation, phases, ranks, report, siblings, steps, summary)
# What runs while the loop is set up, in it, and at its end. Names that the standard library gives are not ours.
NOT_OURS = {"observe", "_ignore", "_ignore_end", "_give"}


def functions_of(module: ModuleType) -> Iterator[tuple[Any, str]]:
    """Every function and method that a module defines, with its owner."""
    for name, each in vars(module).items():
        if getattr(each, "__module__", None) != module.__name__ or name in NOT_OURS:
            continue
        if inspect.isfunction(each):
            yield module, name
        elif inspect.isclass(each) and each.__name__ not in ("TrainingObservation", "LoopListener", "Event"):
            yield from ((each, method) for method, body in vars(each).items() if inspect.isfunction(body))
    if module is observation:
        for method, body in vars(TrainingObservation).items():
            if inspect.isfunction(body) and method in METHODS:
                yield TrainingObservation, method


METHODS = {
    "_set_up", "_begin_epoch", "_ask", "_get", "_end", "_mark", "_after_close", "_add_samples", "_enter_phase",
    "_change_phase", "_report", "_finish",
}  # fmt: skip
# What they read is left out of the report; and what happens after the end.
UNKNOWN_FACTS = {
    *("_read_parameter", "_of_loader", "_of_model", "_read_matmul", "_first_parameter", "count_cpus"),
    *("_read_quota", "_read"),
}
# The loop's own iteration: an error there would be an error of Python's, and nothing lies between it and the loop.
PASSES = {
    "end",
    "__bool__",
    "__iter__",
    "__next__",
    "__len__",
    "__getattr__",
    "__reduce__",
    "__enter__",
    "__exit__",
    "__init__",
}
TARGETS = [
    (owner, name)
    for module in OURS
    for owner, name in functions_of(module)
    if not (inspect.isclass(owner) and name in PASSES)
]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target[0].__name__.rpartition('.')[2]}.{target[1]}")
@pytest.mark.parametrize("after", [0, 7])
def test_a_fault_in_any_function_leaves_the_loop_as_it_was(
    target: tuple[Any, str],
    after: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    FakeGpu().install(monkeypatch)
    owner, name = target
    original, calls = getattr(owner, name), []

    def broken(*arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        if len(calls) > after:
            raise RuntimeError("injected")
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, broken)
    optimizer, seen = FakeOptimizer(), []
    with (
        caplog.at_level(logging.WARNING),
        observe(range(30), optimizer=optimizer, phases=True, directory=tmp_path, samples=lambda batch: 1) as observed,
    ):
        for _ in range(2):
            for batch in observed:
                with observed.phase("forward"):
                    seen.append(batch * 2)
                optimizer.step()
    assert seen == [2 * each for each in range(30)] * 2
    assert optimizer.steps == 60
    said = [each for each in caplog.records if "no longer observed" in each.message]
    assert len(said) <= 1
    if name not in UNKNOWN_FACTS:
        assert len(said) == (len(calls) > after), f"{name} failed in silence"
    else:
        assert not said, "a setting that cannot be read is only unknown"


def test_a_logging_handler_that_raises_does_not_reach_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise OSError("disk full")

    handler = Broken()
    observation.log.addHandler(handler)
    monkeypatch.setattr(steps.StepCounter, "ask", lambda *each: 1 / 0)
    try:
        assert run()[0] == [2 * each for each in range(30)] * 2
    finally:
        observation.log.removeHandler(handler)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": object()},
        {"optimizer": [None]},
        {"directory": "/dev/null"},
        {"directory": 3},
        {"registry": object()},
    ],
)
def test_arguments_that_cannot_be_used_switch_the_hook_off(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with observe(range(10), summary=False, **options) as observed:
        assert list(observed) == list(range(10))
        with observed.phase("forward"):
            observed.mark_step()
    assert len([each for each in caplog.records if "no longer observed" in each.message]) == 1


def test_an_unknown_phase_switches_the_hook_off_and_names_those_that_exist(caplog: pytest.LogCaptureFixture) -> None:
    with observe(range(3), phases=True, summary=False) as observed:
        with observed.phase("forwards"):
            pass
        assert list(observed) == [0, 1, 2]
    assert "'forwards' is not one of host_to_device, forward" in caplog.text


def test_a_forked_process_neither_writes_nor_prints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    observed = observe(range(50), directory=tmp_path)
    list(observed)
    child = os.fork()
    if child == 0:
        observed.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    (path,) = tmp_path.glob("run-*.json")
    assert json.loads(path.read_text())["state"] == "running"
    assert capfd.readouterr().err == ""
    observed.close()
    assert json.loads(path.read_text())["state"] == "ended"
    assert "50 steps" in capfd.readouterr().err


def test_closed_observations_are_forgotten() -> None:
    gc.collect()
    before = sum(isinstance(each, TrainingObservation) for each in gc.get_objects())
    for _ in range(20):
        run()
    gc.collect()
    assert sum(isinstance(each, TrainingObservation) for each in gc.get_objects()) == before


def test_memory_is_flat_over_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    gpu.install(monkeypatch)
    optimizer = FakeOptimizer()

    def loader(number: int) -> Iterator[int]:
        for batch in range(number):
            gpu.now += 0.001
            yield batch

    with observe(loader(200_000), optimizer=optimizer, phases=True, summary=False) as observed:
        iterator = iter(observed)
        for _ in range(2_000):
            next(iterator)
            optimizer.step()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(20_000):
                next(iterator)
                with observed.phase("forward"):
                    gpu.work(0.0005)
                optimizer.step()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
    assert grown < 20_000  # bytes; one byte kept of each step would be as much


def test_the_prometheus_names_are_those_of_the_exporter(tmp_path: Path) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    run(registry=registry)
    assert generate_latest(registry) == b""  # closed
    optimizer = FakeOptimizer()
    registry = CollectorRegistry()
    with observe(range(40), optimizer=optimizer, registry=registry, summary=False) as observed:
        train(observed, optimizer, 1)
        text = generate_latest(registry).decode()
    assert 'gpu_training_steps_total{rank="0"} 40.0' in text
    assert 'gpu_training_phase_seconds_total{phase="wait",rank="0"}' in text


class Node:
    """What a loop must not keep alive."""


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("published", [True, False])
def test_models_optimizers_and_loaders_are_not_kept_alive(ends: bool, published: bool, tmp_path: Path) -> None:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry() if published else None

    def fold() -> list[weakref.ref[Any]]:
        model, optimizer, loader = Node(), FakeOptimizer(), [Node(), Node()]
        observed = observe(
            loader, optimizer=optimizer, model=model, directory=tmp_path, registry=registry, summary=False
        )
        for _ in observed:
            optimizer.step()
        if ends:
            observed.close()
        return [weakref.ref(model), weakref.ref(optimizer), weakref.ref(loader[0])]

    left = [each for _ in range(3) for each in fold()]
    gc.collect()
    assert [each() for each in left] == [None] * 9
    states = {json.loads(path.read_text())["state"] for path in tmp_path.glob("run-*.json")}
    assert states == {"ended"}, "a file of a loop that is gone must not look as if its loop were silent"


def test_a_hook_that_gave_up_leaves_a_report_that_has_ended(tmp_path: Path) -> None:
    optimizer = FakeOptimizer()
    observed = observe(range(40), optimizer=optimizer, phases=True, directory=tmp_path, summary=False)
    for number in observed:
        optimizer.step()
        if number == 20:
            with observed.phase("optimiser"):
                pass
    (path,) = tmp_path.glob("run-*.json")
    assert json.loads(path.read_text())["state"] == "ended"


def test_a_setting_that_torch_refuses_to_read_is_only_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu().install(monkeypatch)
    torch: Any = sys.modules["torch"]

    def refuse() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    torch.get_float32_matmul_precision = refuse
    torch.backends = SimpleNamespace(cuda=SimpleNamespace(matmul=SimpleNamespace(fp32_precision="tf32")))
    with observe(range(3), summary=False) as observed:
        assert observed.report()["facts"]["matmul"] == "high"
        del torch.backends
        assert "matmul" not in observed.report()["facts"]


def test_the_last_step_before_the_end_and_a_pass_over_the_loader_inside_of_an_epoch_lose_no_step() -> None:
    optimizer = FakeOptimizer()
    with observe(range(10), optimizer=optimizer, summary=False) as observed:
        for number in observed:
            optimizer.step()
            if number == 3:
                list(observed)  # accuracy on the training data
        assert observed.report()["steps"] == 10
    with observe(range(10), optimizer=optimizer, summary=False) as observed:
        for number in observed:
            optimizer.step()
            if number == 6:
                break
        observed._finish()
        assert observed._counter.steps == 7


class Clocked:
    """A loop on the clock of a fake GPU, and what the hook measured, in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.gpu = FakeGpu()
        self.gpu.install(monkeypatch)
        for module in (observation, loaders, callbacks):
            monkeypatch.setattr(module, "perf_counter_ns", lambda: round(self.gpu.now * 1e9))
        self.options = options

    def load(self, number: int, wait: float, start: float = 0.0) -> Any:
        gpu = self.gpu

        class Loader:
            def __iter__(self) -> Iterator[int]:
                gpu.now += start
                for batch in range(number):
                    gpu.now += wait
                    yield batch

        return Loader()

    def work(self, seconds: float) -> None:
        self.gpu.work(seconds)
        self.gpu.now = max(self.gpu.now, self.gpu.free_at)


def test_the_start_of_an_epoch_is_no_wait_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Clocked(monkeypatch)
    with observe(loop.load(10, 0.0, start=10.0), summary=False) as observed:
        for _ in range(10):
            for _ in observed:
                loop.work(1.0)
        report = observed.report()
    assert report["gpu_wait_seconds"] == pytest.approx(0.0, abs=0.1)
    assert report["gpu_work_seconds"] == pytest.approx(94.0, abs=3.0)
    assert (report["wait_seconds"], report["start_seconds"]) == (0.0, pytest.approx(100.0))


def test_what_follows_a_break_is_no_work_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Clocked(monkeypatch)
    with observe(loop.load(100, 1.0), summary=False) as observed:
        for _ in range(5):
            for number in observed:
                loop.work(1.0)
                if number == 9:
                    break
            loop.gpu.now += 100.0  # an evaluation on the CPU
        report = observed.report()
    assert report["gpu_work_seconds"] < 45.0
    assert report["gpu_wait_seconds"] == pytest.approx(40.0, abs=5.0)


def test_many_phases_in_one_step_lose_no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Clocked(monkeypatch)
    with observe(loop.load(64 * 30, 0.0), phases=True, summary=False) as observed:
        for number in observed:
            for phase in ("forward", "backward", "collective"):
                with observed.phase(phase):
                    loop.work(0.3)
            if number % 64 == 63:
                observed.mark_step()
        report = observed.report()
    parts = [phase["gpu_seconds"] for phase in report["phases"].values() if phase["gpu_seconds"] is not None]
    assert len(parts) == 3
    assert parts == pytest.approx([parts[0]] * 3, rel=0.02)


def test_what_a_framework_does_between_two_batches_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Clocked(monkeypatch)
    framework = callbacks.FrameworkLoop(summary=False)
    framework.begin(lambda: callbacks.FrameworkTraining((), (), None, {}))
    framework.begin_epoch()
    for number in range(100):
        loop.gpu.now += 0.1
        framework.begin_batch()
        loop.work(0.9)
        framework.end_batch()
        if number % 10 == 9:
            loop.gpu.now += 30.0
            framework.interrupt()
        if number % 10 == 4:
            framework.interrupt(is_over=False)
            loop.gpu.now += 20.0  # a checkpoint is written, and the framework says nothing more
    assert framework._observation is not None
    report = framework._observation.report()
    assert report["wait_seconds"] / report["step_seconds"] == pytest.approx(0.1)
    waited, worked = report["gpu_wait_seconds"], report["gpu_work_seconds"]
    assert waited / (waited + worked) == pytest.approx(0.1, abs=0.02)
    framework.finish()


def test_a_wrong_option_of_a_callback_is_an_error_before_the_training() -> None:
    with pytest.raises(TypeError, match="phase"):
        callbacks.FrameworkLoop(phase=True)
    with pytest.raises(TypeError, match="optimizer"):
        callbacks.FrameworkLoop(optimizer=None)


def test_old_reports_are_removed_and_the_users_own_files_are_kept(tmp_path: Path) -> None:
    run(directory=tmp_path)
    (old,) = tmp_path.glob("run-*.json")
    own = [tmp_path / name for name in ("run-2026-03-01.json", "run-0123456789abcdef.json", "run-x.json")]
    for path in own:
        path.write_text('{"accuracy": 0.9}')
    pipe = tmp_path / "run-fedcba9876543210.json"
    os.mkfifo(pipe)
    for path in (old, pipe, *own):
        os.utime(path, (1.0, 1.0))
    run(directory=tmp_path)
    assert all(path.exists() for path in (pipe, *own))
    assert not old.exists()


def test_a_pipe_among_the_reports_of_other_ranks_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    os.mkfifo(tmp_path / "run-fedcba9876543210.json")
    with observe(BATCHES, directory=tmp_path) as observed:
        list(observed)
    assert "rank 0 of 2" in capsys.readouterr().err


@pytest.mark.parametrize("marks", [False, True])
def test_a_thread_that_reads_ahead_switches_the_hook_off(marks: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It would be timed in place of the loop, and its waits be called waits of the loop."""
    optimizer = FakeOptimizer()
    observed = observe(BATCHES, optimizer=optimizer if marks else (), summary=False)
    batches: queue.Queue[int | None] = queue.Queue()

    def read() -> None:
        for batch in observed:
            batches.put(batch)
        batches.put(None)

    reader = threading.Thread(target=read)
    reader.start()
    seen = []
    while (batch := batches.get()) is not None:
        seen.append(batch)
        if marks:
            optimizer.step()
    reader.join()
    assert seen == list(BATCHES)
    assert observed.report() == {}
    assert caplog.text.count("another thread reads the batches") == 1


def test_a_loop_in_a_thread_of_its_own_is_observed() -> None:
    found: list[TrainingObservation] = []
    thread = threading.Thread(target=lambda: found.append(run()[1]))
    thread.start()
    thread.join()
    assert found[0]._counter.steps == 60


def test_what_stands_for_an_iterator_or_a_list_is_used_like_one() -> None:
    observed: Any = observe(iter(range(5)), summary=False)
    assert [next(observed), next(observed), *observed] == [0, 1, 2, 3, 4]
    listed: Any = observe([7, 8, 9], summary=False)
    assert (listed[0], listed[-1], listed[:2]) == (7, 9, [7, 8])
    with pytest.raises(TypeError):
        next(listed)


def test_an_attribute_that_is_set_reaches_the_loader() -> None:
    class Loader(list[int]):
        epoch = 0

    loader = Loader(range(3))
    observed: Any = observe(loader, summary=False)
    observed.epoch = 7
    assert (loader.epoch, observed.epoch) == (7, 7)


def test_at_the_end_of_the_data_the_report_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a `with`, the process may go on for hours."""
    monkeypatch.setattr(file, "COST_MAX", 1e9)
    optimizer = FakeOptimizer()
    observed = observe(BATCHES, optimizer=optimizer, directory=tmp_path, summary=False)
    train(observed, optimizer, epochs=1)
    (path,) = tmp_path.glob("run-*.json")
    assert json.loads(path.read_text())["state"] == "between"
    observed.close()
    assert json.loads(path.read_text())["state"] == "ended"


def test_short_passes_are_not_each_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr(file.ReportFile, "write", lambda self, report: written.append(report))
    optimizer = FakeOptimizer()
    observed = observe(range(2), optimizer=optimizer, directory=tmp_path, summary=False)
    observed._file._due = observed._file._soon = time.monotonic() + 10.0
    train(observed, optimizer, epochs=500)
    assert written == []


def test_a_framework_with_other_objects_than_expected_trains_unobserved(caplog: pytest.LogCaptureFixture) -> None:
    """The next version of Lightning or of the Trainer may have renamed what the callback reads."""
    framework = callbacks.FrameworkLoop(summary=False)
    trainer: Any = SimpleNamespace()
    framework.begin(lambda: callbacks.FrameworkTraining(trainer.train_dataloader, (), None, {}))
    for step in (
        framework.begin_epoch,
        framework.begin_batch,
        framework.end_batch,
        framework.interrupt,
        framework.end_epoch,
        framework.finish,
    ):
        step()
    assert caplog.text.count("the training continues, but is not observed: AttributeError") == 1
