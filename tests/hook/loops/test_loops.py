"""The hook around loops of a real torch: it sees the truth, and changes nothing."""

from __future__ import annotations

import functools
import itertools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset

from gpu_exporter_torch import observe
from gpu_exporter_torch.report_rules import CPUS_FULL
from gpu_exporter_torch.steps import WARMUP, StepCounter
from gpu_exporter_torch.summary import advise, find_late_rank, read_loading, spent_time

torch.set_num_threads(1)
WITHIN = 0.02  # share of a step


class Slow(Dataset[Any]):
    """Samples that take `seconds` each to make."""

    def __init__(self, number: int, seconds: float, bad: int | None = None) -> None:
        self.number, self.seconds, self.bad = number, seconds, bad

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        if index == self.bad:
            raise ValueError("a bad sample")
        return torch.full((8,), float(index)), torch.zeros(1)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.full((8,), float(number)), torch.zeros(1)) for number in range(40)])


class Truth:
    """What a loop waits, by clocks of its own in the loop's body."""

    def __init__(self) -> None:
        self.gets: list[tuple[int, int]] = []  # begin and end of each body
        self.report: dict[str, Any] = {}

    def body(self, work: Callable[[], None]) -> None:
        begin = time.perf_counter_ns()
        work()
        self.gets.append((begin, time.perf_counter_ns()))

    def shares(self, first: int) -> tuple[float, float]:
        """Share of waiting, and seconds of all steps, from the batch `first` on; of one epoch."""
        pairs = list(zip(self.gets, self.gets[1:]))[first - 1 :]
        waits = sum(after[0] - before[1] for before, after in pairs[:-1])
        whole = sum(after[0] - before[0] for before, after in pairs[:-1])
        return waits / whole, whole / 1e9


def make_model(seed: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(loader: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, epochs: int = 2) -> list[float]:
    losses = []
    for _ in range(epochs):
        for inputs, targets in loader:
            loss = ((model(inputs) - targets) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def data(**options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    samples = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(
        TensorDataset(samples, samples.sum(1, keepdim=True)), 4, shuffle=True, generator=generator, **options
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", [None, "ask", "get", "mark", "begin_epoch"])
def test_results_are_bit_for_bit_those_without_the_hook(
    workers: int, fault: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, optimizer = make_model()
    plain = train(data(num_workers=workers), model, optimizer)
    weights = [each.clone() for each in model.parameters()]
    if fault is not None:
        original, calls = getattr(StepCounter, fault), itertools.count()

        def broken(*arguments: Any, **keywords: Any) -> Any:
            if next(calls) == 1:
                raise RuntimeError("injected")
            return original(*arguments, **keywords)

        monkeypatch.setattr(StepCounter, fault, broken)
    model, optimizer = make_model()
    with observe(
        data(num_workers=workers), optimizer=optimizer, model=model, phases=True, directory=tmp_path
    ) as observed:
        assert train(observed, model, optimizer) == plain
    after = list(model.parameters())
    assert len(after) == len(weights) and all(map(torch.equal, weights, after))


def test_an_observed_dataloader_is_a_dataloader() -> None:
    class Stateful(DataLoader[Any]):
        def state_dict(self) -> dict[str, int]:
            return {"position": 3}

    samples = TensorDataset(torch.arange(12.0))
    loader = Stateful(samples, batch_size=3, sampler=DistributedSampler(samples, 2, 0))
    observed = observe(loader, summary=False)
    assert isinstance(observed.loader, DataLoader) and isinstance(observed.loader, Stateful)
    assert len(observed) == len(observed.loader) == 2
    assert observed.loader.dataset is observed.dataset is samples
    assert observed.loader.state_dict() == {"position": 3}
    observed.loader.sampler.set_epoch(4)
    assert loader.sampler.epoch == 4
    assert observed.loader.batch_size == 3
    again = type(observed.loader)(samples, batch_size=6)  # as Lightning makes it from the class and the attributes
    list(again)
    assert observed.report()["batches"] == 2
    with pytest.raises(ValueError, match="batch_size"):
        observed.loader.batch_size = 5  # torch refuses this on a DataLoader in use


def test_persistent_workers_stay_and_the_gap_between_epochs_is_no_wait() -> None:
    loader = DataLoader(Slow(40, 0.001), batch_size=1, num_workers=1, persistent_workers=True)
    with observe(loader, summary=False) as observed:
        began = time.perf_counter()
        list(observed)
        workers = {each.pid for each in loader._iterator._workers}
        time.sleep(0.5)
        list(observed)
        passes_s = time.perf_counter() - began - 0.5
        assert {each.pid for each in loader._iterator._workers} == workers
        report = observed.report()
    assert (report["epochs"], report["steps"]) == (2, 80)
    assert report["step_seconds"] < passes_s


def test_an_iterable_dataset_has_no_length_and_is_counted() -> None:
    with observe(DataLoader(Stream(), batch_size=4), summary=False) as observed:
        assert len(list(observed)) == 10
        assert observed.report()["batches"] == 10
        with pytest.raises(TypeError):
            len(observed)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_in_a_worker_is_the_loops_error(workers: int) -> None:
    with (
        pytest.raises(ValueError, match="a bad sample"),
        observe(DataLoader(Slow(20, 0.0, bad=11), batch_size=2, num_workers=workers), summary=False) as observed,
    ):
        list(observed)
    assert observed._counter.batches == 5


def run_truth(
    loader: Any, work: Callable[[], None], *, every: int = 1, second: Any = None
) -> tuple[Truth, dict[str, Any]]:
    truth = Truth()
    with observe(loader, summary=False) as observed:
        more = itertools.repeat(None) if second is None else observed.add(second)
        for number, _ in enumerate(zip(observed, more), 1):
            truth.body(work)
            if number % every == 0:
                observed.mark_step()
        report = observed.report()
    return truth, report


def sleep(seconds: float) -> Callable[[], None]:
    return functools.partial(time.sleep, seconds)


CASES: dict[str, Callable[[], tuple[Any, Callable[[], None], int, Any]]] = {
    "loading in the loop": lambda: (DataLoader(Slow(80, 0.006), batch_size=1), sleep(0.004), 1, None),
    "prefetch hides it": lambda: (
        DataLoader(Slow(80, 0.002), batch_size=1, num_workers=1, prefetch_factor=4), sleep(0.010), 1, None,
    ),
    "prefetch cannot keep up": lambda: (
        DataLoader(Slow(80, 0.012), batch_size=1, num_workers=1), sleep(0.004), 1, None,
    ),
    "accumulation": lambda: (DataLoader(Slow(120, 0.004), batch_size=1), sleep(0.006), 4, None),
    "two loaders": lambda: (
        DataLoader(Slow(80, 0.002), batch_size=1), sleep(0.004), 1, DataLoader(Slow(80, 0.004), batch_size=1),
    ),
}  # fmt: skip


class Computed(Slow):
    """Samples that need a CPU for so many seconds each."""

    def __getitem__(self, index: int) -> Any:
        until = time.thread_time() + self.seconds
        while time.thread_time() < until:
            pass
        return torch.full((8,), float(index)), torch.zeros(1)


def measure(dataset: Slow, workers: int) -> dict[str, Any]:
    """The report of a loop of its own work of 4 ms for each batch of eight samples."""
    loader = DataLoader(dataset, batch_size=8, num_workers=workers)
    model, optimizer = make_model()
    with observe(loader, optimizer=optimizer, model=model, summary=False) as observed:
        for _ in observed:
            time.sleep(0.004)
            optimizer.step()
        return observed.report()


def each_s(report: dict[str, Any]) -> float:
    """The usual time of a step: others may have used the CPUs in some."""
    return float(report["median_step_seconds"])


def test_who_follows_the_advice_twice_is_as_fast_as_the_best_number_of_workers() -> None:
    """Samples that wait for a disk, on any number of CPUs. A count of CPUs would end at one worker on two of them."""
    samples = Slow(600, 0.004)
    workers, seen = 0, [0]
    for _ in range(2):
        workers = measure(samples, workers)["facts"].get("workers_to_try", workers)
        seen.append(workers)
    best = min(each_s(measure(samples, number)) for number in (2, 4, 8, 16))
    assert each_s(measure(samples, workers)) <= 1.3 * best + 0.001, seen


def test_workers_that_use_all_cpus_are_told_that_the_cpus_are_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_exporter_torch.facts.count_cpus", lambda: 2.0)
    report = measure(Computed(400, 0.002), 1)
    assert report["make_cpu_seconds"] == pytest.approx(0.016, rel=0.3)
    # Other programs may take the CPU on which the worker computes. Then it is not the CPUs of the job that are short.
    loading = read_loading(report, spent_time(report))
    assert loading is not None
    assert loading.by_cpu_s == pytest.approx(0.020 / (CPUS_FULL * 2.0), rel=0.4), "making and the loop on two CPUs"
    is_full = loading.by_cpu_s >= loading.batch_s
    (text,) = [each for each in advise(report) if "CPU" in each]
    assert text.startswith("ask for more CPUs: 1 workers and the loop share 2 CPUs") == is_full, text
    assert ("workers_to_try" not in report["facts"]) == is_full


LONGEST_S = 0.03  # of one batch: if it takes longer, the machine was busy with something else
TRIES = 5


@pytest.mark.parametrize("name", CASES)
def test_wait_and_step_are_those_of_clocks_in_the_loop(name: str) -> None:
    for _ in range(TRIES):
        loader, work, every, second = CASES[name]()
        truth, report = run_truth(loader, work, every=every, second=second)
        each = [after[0] - before[0] for before, after in zip(truth.gets, truth.gets[1:])][WARMUP * every :]
        # A pause between a clock of the hook and one of the loop is in one of the two alone. Such a run is void; that is
        # decided before the hook's result is looked at.
        if max(each) <= LONGEST_S * 1e9:
            break
    wait, _ = truth.shares(first=WARMUP * every)
    assert report["wait_seconds"] / report["step_seconds"] == pytest.approx(wait, abs=WITHIN)
    mean = sum(each) / len(each) * every / 1e9
    assert report["step_seconds"] / report["measured_steps"] == pytest.approx(mean, rel=WITHIN)


def test_a_break_an_interrupt_and_a_new_epoch() -> None:
    with observe(DataLoader(Slow(30, 0.0), batch_size=1), summary=False) as observed:
        for number, _ in enumerate(observed):
            if number == 9:
                break
        with pytest.raises(KeyboardInterrupt):
            for number, _ in enumerate(observed):
                if number == 4:
                    raise KeyboardInterrupt
        list(observed)
        report = observed.report()
    assert report["batches"] == 10 + 5 + 30
    assert report["steps"] + report["unfinished_batches"] == report["batches"]


class Scaler:
    """Skips a step whose gradients are not finite, as torch.amp.GradScaler does; before torch 2.3 that needs CUDA."""

    def scale(self, loss: Any) -> Any:
        return loss

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [each.grad for group in optimizer.param_groups for each in group["params"]]
        if all(bool(torch.isfinite(each).all()) for each in gradients):
            optimizer.step()

    def update(self) -> None:
        pass


def test_a_scaler_that_skips_steps_and_a_closure() -> None:
    model, optimizer = make_model()
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0) if hasattr(torch.amp, "GradScaler") else Scaler()
    with observe(data(), optimizer=optimizer, summary=False) as observed:
        for number, (inputs, targets) in enumerate(observed):
            optimizer.zero_grad()
            loss = ((model(inputs) - targets) ** 2).mean()
            scaler.scale(loss * (float("inf") if number == 6 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        report = observed.report()
    assert (report["batches"], report["optimizer_steps"]) == (16, 15)
    model, _ = make_model()
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=4)
    with observe(data(), optimizer=lbfgs, summary=False) as observed:
        for inputs, targets in observed:

            def closure(inputs: Any = inputs, targets: Any = targets) -> Any:
                lbfgs.zero_grad()
                loss = ((model(inputs) - targets) ** 2).mean()
                loss.backward()
                return loss

            lbfgs.step(closure)
        assert observed.report()["steps"] == 16
        list(observed)
    assert not lbfgs._optimizer_step_post_hooks


def test_steps_under_a_profiler_are_marked() -> None:
    with observe(data(), summary=False) as observed:
        for number, _ in enumerate(observed):
            if number == 8:
                profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                profiler.start()
            if number == 11:
                profiler.stop()
        report = observed.report()
    assert 3 <= report["skipped_steps"] <= 4
    assert report["measured_steps"] == report["steps"] - WARMUP - report["skipped_steps"]


def test_facts_of_model_optimizer_and_loader() -> None:
    model, optimizer = make_model()
    parallel = torch.nn.DataParallel(model)
    compiled = torch.compile(model, backend="eager")
    for each, name in ((parallel, "data_parallel"), (compiled, "compiled")):
        with observe(data(num_workers=2), optimizer=optimizer, model=each, summary=False) as observed:
            facts = observed.report()["facts"]
        assert facts[name] is True
        assert (facts["parameters"], facts["num_workers"], facts["prefetch_factor"]) == ("float32", 2, 2)
        assert (facts["matmul"], facts["pin_memory"], facts["batch_size"]) == ("highest", False, 4)


def test_a_compiled_step_is_not_broken_into_several_graphs() -> None:
    model, optimizer = make_model()
    graphs: list[int] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    step = torch.compile(lambda inputs, targets: ((model(inputs) - targets) ** 2).mean(), backend=count)
    with observe(data(), optimizer=optimizer, phases=True, summary=False) as observed:
        for inputs, targets in observed:
            with observed.phase("forward"):
                loss = step(inputs, targets)
            loss.backward()
            optimizer.step()
    assert len(graphs) == 1


def test_memory_is_flat_over_a_million_steps() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with observe(itertools.repeat(None, 1_000_000), optimizer=optimizer, summary=False) as observed:
        for number, _ in enumerate(observed):
            observed.mark_step()
            if number == 50_000:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert observed.report()["steps"] == 1_000_000
    assert grown < 1024  # KiB


@pytest.mark.parametrize("phases", [False, True])
def test_the_late_rank_is_found_by_durations(phases: bool, tmp_path: Path) -> None:
    script = Path(__file__).with_name("rank.py")
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), str(tmp_path), "1", str(int(phases))]) for rank in range(2)
    ]
    try:
        assert [each.wait(120) for each in ranks] == [0, 0]
    finally:
        for each in ranks:  # the other rank waits for one that failed
            each.kill()
    reports = [json.loads(path.read_text()) for path in tmp_path.glob("run-*.json")]
    assert sorted(each["rank"] for each in reports) == [0, 1]
    late = find_late_rank(reports)
    assert late is not None and late.rank == 1
    assert ("waits least in the collective" in late.text) == phases
