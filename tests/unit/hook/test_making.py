"""The CPU time of making batches: of worker processes, of the loop's own thread, and unknown where it cannot be read."""

from __future__ import annotations

import itertools
import os
import time
from types import SimpleNamespace

import pytest

from gpu_exporter_torch import making
from gpu_exporter_torch.making import EVERY_NS, FIRST_NS, MakingCpu, Used, read_used

BATCH_NS = 10_000_000


def iterate(cpu: MakingCpu, inner: object, batches: int, now: int = 0) -> int:
    cpu.begin(inner)
    for number in range(batches):
        cpu.ask()
        now += BATCH_NS
        cpu.get(now, is_first=number == 0)
    return now


def spin(cpu_ns: int) -> None:
    until = time.thread_time_ns() + cpu_ns
    while time.thread_time_ns() < until:
        pass


def workers(number: int) -> SimpleNamespace:
    return SimpleNamespace(_workers=[SimpleNamespace(pid=pid) for pid in range(number)])


@pytest.mark.parametrize(("number", "each_ns"), [(1, 2_000_000), (4, 2_000_000), (32, 2_000_000)])
def test_the_cpu_time_of_workers_is_divided_by_the_batches_of_the_same_time(
    number: int, each_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 32 workers, 16 are looked at. Each look adds what the time since the last one costs."""
    looks: list[int] = []
    clock = [0]

    def read(pid: int) -> Used:
        looks.append(pid)
        used = clock[0] * each_ns // BATCH_NS // number
        return Used(used, 3 * used)

    monkeypatch.setattr(making, "read_used", read)
    cpu = MakingCpu()
    cpu.begin(workers(number))
    for position in range(1000):
        cpu.ask()
        clock[0] += BATCH_NS
        cpu.get(clock[0], is_first=position == 0)
    assert cpu.seconds()["make_cpu_seconds"] == pytest.approx(each_ns / 1e9, rel=0.01)
    assert cpu.seconds()["make_delay_seconds"] == pytest.approx(3 * each_ns / 1e9, rel=0.01)
    assert cpu.batches > 850
    assert set(looks) == set(range(min(number, 16)))
    assert len(looks) / min(number, 16) < 3 + 1000 * BATCH_NS / EVERY_NS + 4, "looks become rare"


def test_a_short_epoch_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(making, "read_used", lambda _: Used(next(ticks) * 1000, None))
    cpu = MakingCpu()
    iterate(cpu, workers(1), 2 + FIRST_NS // BATCH_NS)
    assert cpu.batches == FIRST_NS // BATCH_NS
    assert cpu.seconds()["make_delay_seconds"] is None, "the kernel does not count it"


def test_a_worker_that_has_ended_makes_nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "read_used", lambda pid: None if pid == 1 else Used(0, 0))
    cpu = MakingCpu()
    iterate(cpu, workers(2), 1000)
    assert cpu.seconds()["make_cpu_seconds"] is cpu.seconds()["make_delay_seconds"] is None


def test_a_loop_that_makes_its_batches_itself_is_measured_by_its_thread() -> None:
    cpu = MakingCpu()
    cpu.begin(iter([1, 2, 3]))
    for number in range(3):
        cpu.ask()
        spin(2_000_000)
        cpu.get(0, is_first=number == 0)
    assert cpu.batches == 2, "the first one is a start"
    assert 2e6 <= cpu.cpu_ns / cpu.batches < 1e7
    assert cpu.seconds()["make_delay_seconds"] is None
    assert cpu.loop_ns >= cpu.take_ns == cpu.cpu_ns


def test_what_the_loop_uses_to_take_a_batch_and_in_all() -> None:
    """2 ms in `next`, 4 ms in the step, and nothing before the first batch."""
    cpu = MakingCpu()
    cpu.begin(workers(0))
    for number in range(5):
        cpu.ask()
        spin(2_000_000)
        cpu.get(0, is_first=number == 0)
        spin(4_000_000)
    used = cpu.seconds()
    assert used["take_cpu_seconds"] == pytest.approx(0.002, rel=0.3)
    assert used["loop_cpu_seconds"] == pytest.approx(0.006, rel=0.3)


@pytest.mark.parametrize("workers", [3, "text", [object()], {1: 2}, [SimpleNamespace(pid="7")], SimpleNamespace(pid=7)])
def test_what_another_library_calls_workers_is_no_error(workers: object) -> None:
    iterate(MakingCpu(), SimpleNamespace(_workers=workers), 30)


def test_the_batches_of_an_unknown_loader_have_no_cpu_time() -> None:
    cpu = MakingCpu()
    iterate(cpu, None, 1000)
    assert cpu.batches == 0


def test_the_cpu_time_of_a_process_is_that_of_the_kernel() -> None:
    used = read_used(os.getpid())
    assert used is not None
    assert used.cpu_ns / 1e9 == pytest.approx(time.process_time(), abs=0.1)
    assert used.delay_ns is None or used.delay_ns > 0
    assert read_used(2**22 + 1) is None
