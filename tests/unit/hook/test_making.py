"""The CPU time of making batches: of worker processes, of the loop's own thread, and unknown where it cannot be read."""

from __future__ import annotations

import itertools
import os
import time
from types import SimpleNamespace

import pytest

from gpu_exporter_torch import making
from gpu_exporter_torch.making import EVERY_NS, FIRST_NS, MakingCpu, read_cpu_ns

BATCH_NS = 10_000_000


def iterate(cpu: MakingCpu, inner: object, batches: int, now: int = 0) -> int:
    cpu.begin(inner)
    for number in range(batches):
        cpu.ask()
        now += BATCH_NS
        cpu.get(now, is_first=number == 0)
    return now


def workers(number: int) -> SimpleNamespace:
    return SimpleNamespace(_workers=[SimpleNamespace(pid=pid) for pid in range(number)])


@pytest.mark.parametrize(("number", "each_ns"), [(1, 2_000_000), (4, 2_000_000), (32, 2_000_000)])
def test_the_cpu_time_of_workers_is_divided_by_the_batches_of_the_same_time(
    number: int, each_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 32 workers, 16 are looked at. Each look adds what the time since the last one costs."""
    looks: list[int] = []
    clock = [0]

    def read(pid: int) -> int:
        looks.append(pid)
        return clock[0] * each_ns // BATCH_NS // number

    monkeypatch.setattr(making, "read_cpu_ns", read)
    cpu = MakingCpu()
    cpu.begin(workers(number))
    for position in range(1000):
        cpu.ask()
        clock[0] += BATCH_NS
        cpu.get(clock[0], is_first=position == 0)
    assert cpu.cpu_ns / cpu.batches == pytest.approx(each_ns, rel=0.01)
    assert cpu.batches > 850
    assert set(looks) == set(range(min(number, 16)))
    assert len(looks) / min(number, 16) < 3 + 1000 * BATCH_NS / EVERY_NS + 4, "looks become rare"


def test_a_short_epoch_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(making, "read_cpu_ns", lambda _: next(ticks) * 1000)
    cpu = MakingCpu()
    iterate(cpu, workers(1), 2 + FIRST_NS // BATCH_NS)
    assert cpu.batches == FIRST_NS // BATCH_NS


def test_a_worker_that_has_ended_makes_nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "read_cpu_ns", lambda pid: None if pid == 1 else 0)
    cpu = MakingCpu()
    iterate(cpu, workers(2), 1000)
    assert (cpu.cpu_ns, cpu.batches) == (0, 0)


def test_a_loop_that_makes_its_batches_itself_is_measured_by_its_thread() -> None:
    cpu = MakingCpu()
    cpu.begin(iter([1, 2, 3]))
    for number in range(3):
        cpu.ask()
        until = time.thread_time_ns() + 2_000_000
        while time.thread_time_ns() < until:
            pass
        cpu.get(0, is_first=number == 0)
    assert cpu.batches == 2, "the first one is a start"
    assert 2e6 <= cpu.cpu_ns / cpu.batches < 1e7


@pytest.mark.parametrize("workers", [3, "text", [object()], {1: 2}, [SimpleNamespace(pid="7")], SimpleNamespace(pid=7)])
def test_what_another_library_calls_workers_is_no_error(workers: object) -> None:
    iterate(MakingCpu(), SimpleNamespace(_workers=workers), 30)


def test_the_batches_of_an_unknown_loader_have_no_cpu_time() -> None:
    cpu = MakingCpu()
    iterate(cpu, None, 1000)
    assert cpu.batches == 0


def test_the_cpu_time_of_a_process_is_that_of_the_kernel() -> None:
    used = read_cpu_ns(os.getpid())
    assert used is not None
    assert used / 1e9 == pytest.approx(time.process_time(), abs=0.1)
    assert read_cpu_ns(2**22 + 1) is None
