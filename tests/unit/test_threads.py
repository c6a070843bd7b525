"""Several threads that read ahead: every item arrives, no call hangs, and errors are raised to the caller."""

from __future__ import annotations

import threading

import pytest
from tests.testbed.processes import wait_for

from gpu_exporter.common.threads import NoThread, run_ahead


def test_every_item_is_returned_once() -> None:
    assert sorted(run_ahead(lambda x: x * x, range(100), 3, "t")) == [x * x for x in range(100)]
    assert list(run_ahead(lambda x: x, (), 3, "t")) == []


@pytest.mark.parametrize("ahead", [1, 2])
def test_items_are_read_ahead_only_up_to_the_limit(ahead: int) -> None:
    begun: list[int] = []
    results = run_ahead(lambda x: begun.append(x) or x, range(100), 2, "t", ahead=ahead)
    next(results)
    wait_for(lambda: len(begun) == 2 * ahead + 1 or None, "the items in advance, and one in place of the taken one")
    results.close()
    assert sum(thread.name == "t" and thread.is_alive() for thread in threading.enumerate()) <= 2


def test_an_exception_of_a_call_is_raised_to_the_caller_and_ends_the_threads() -> None:
    def call(x: int) -> int:
        if x == 3:
            raise ValueError("three")
        return x

    with pytest.raises(ValueError, match="three"):
        list(run_ahead(call, range(1000), 2, "broken"))
    for thread in threading.enumerate():
        if thread.name == "broken":
            thread.join(60.0)
            assert not thread.is_alive()


def test_calls_run_in_parallel() -> None:
    meeting = threading.Barrier(3, timeout=60.0)
    assert len(list(run_ahead(lambda _: meeting.wait(), range(3), 3, "t"))) == 3


@pytest.mark.parametrize("allowed", [0, 1])
def test_fewer_threads_are_enough_but_no_thread_is_an_error(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    left = [allowed]
    true_start = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        true_start(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    if allowed:
        assert sorted(run_ahead(lambda x: x, range(9), 3, "t")) == list(range(9))
    else:
        with pytest.raises(NoThread, match="raise the limit of tasks"):
            list(run_ahead(lambda x: x, range(9), 3, "t"))
