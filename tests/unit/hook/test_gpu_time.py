"""The GPU's own time line: a wait that its work hides counts nothing."""

from __future__ import annotations

import pytest
from tests.unit.hook.fakes import FakeGpu

from gpu_exporter_torch.gpu_time import NOTHING, PENDING_MAX, WAIT, WORK, GpuTimeline


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    found = FakeGpu()
    found.install(monkeypatch)
    return found


def timeline() -> GpuTimeline:
    line = GpuTimeline()
    line.follows = True
    return line


def run(gpu: FakeGpu, line: GpuTimeline, steps: int, wait: float, launch: float, work: float) -> None:
    """Steps that wait for data, launch work of the GPU, and go on without waiting for it, two steps ahead at most."""
    for _ in range(steps):
        line.read()
        line.mark(WAIT)
        gpu.now += wait
        line.mark(WORK)
        gpu.now += launch
        gpu.work(work)
        gpu.now = max(gpu.now, gpu.free_at - 2 * work)


def test_a_wait_that_the_gpu_works_through_is_no_wait_of_the_gpu(gpu: FakeGpu) -> None:
    line = timeline()
    run(gpu, line, 200, wait=0.006, launch=0.001, work=0.010)
    assert line.seconds[WAIT] / sum(line.seconds.values()) < 0.02


def test_a_wait_that_starves_the_gpu_counts(gpu: FakeGpu) -> None:
    line = timeline()
    run(gpu, line, 200, wait=0.015, launch=0.001, work=0.005)
    assert line.seconds[WAIT] / sum(line.seconds.values()) == pytest.approx((15 - 5) / 16, abs=0.02)


def test_nothing_is_recorded_inside_of_a_capture(gpu: FakeGpu) -> None:
    line = timeline()
    run(gpu, line, 5, wait=0.01, launch=0.001, work=0.001)
    before = gpu.recorded
    gpu.is_capturing = True
    line.mark(WAIT)
    line.mark(WORK)
    assert gpu.recorded == before
    gpu.is_capturing = False
    run(gpu, line, 50, wait=0.01, launch=0.001, work=0.001)
    assert line.seconds[WAIT] > 0.0


def test_a_gpu_that_never_answers_costs_no_memory(gpu: FakeGpu) -> None:
    line = timeline()
    gpu.work(1e9)
    for _ in range(3 * PENDING_MAX):
        line.read()
        line.mark(WORK)
    assert len(line._pending) <= PENDING_MAX
    assert line.dropped == 2
    assert not line.is_known


def test_events_are_used_again(gpu: FakeGpu) -> None:
    line = timeline()
    run(gpu, line, 1000, wait=0.001, launch=0.001, work=0.001)
    assert len(line._free) + len(line._pending) < 10


def test_an_event_is_read_at_least_a_step_after_it_was_recorded(gpu: FakeGpu) -> None:
    line = timeline()
    line.mark(WAIT)
    gpu.now += 1.0
    line.mark(WORK)
    gpu.now += 1.0
    line.read()
    assert not line.is_known  # the GPU has reached it, but this step has not ended
    line.mark(NOTHING)
    line.read()
    assert line.seconds == {WAIT: 1.0}


def test_another_device_ends_the_interval(gpu: FakeGpu) -> None:
    line = timeline()
    run(gpu, line, 10, wait=0.01, launch=0.001, work=0.001)
    line.read()
    known = dict(line.seconds)
    gpu.device = 1
    run(gpu, line, 10, wait=0.01, launch=0.001, work=0.001)
    assert line.seconds == known


def test_without_torch_there_is_no_time_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
    line = timeline()
    line.mark(WORK)
    line.read()
    assert not line.is_known and not line._pending
