"""A task for ever survives its errors, counts them, logs each kind once, and is reported when it no longer turns."""

from __future__ import annotations

import logging
import threading

import pytest

from gpu_exporter.common import tasks
from gpu_exporter.common.tasks import KINDS_MAX, SAY_AGAIN_S, Task, Tasks


class Time:
    """Stands for the module `time`."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    monkeypatch.setattr(tasks, "time", fake)
    return fake


def fail(task: Task, error: Exception) -> None:
    with task:
        raise error


def test_an_error_costs_one_turn_and_is_counted_and_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    task = Task("host")
    turns = []
    for number in range(3):
        with task:
            turns.append(number)
            if number == 1:
                raise KeyError("odd")
    assert turns == [0, 1, 2] and task.failures == 1
    (record,) = caplog.records
    assert record.getMessage() == "one turn of the task host failed; the task continues"
    assert record.exc_info and record.exc_info[0] is KeyError


def test_each_kind_is_logged_once_an_hour(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    task = Task("host")
    for _ in range(10):
        fail(task, KeyError("a"))
        fail(task, ValueError("a"))
        with task:
            raise KeyError("the same class at another line")
    assert (task.failures, len(caplog.records)) == (30, 3)
    time.now += SAY_AGAIN_S
    fail(task, KeyError("b"))
    assert len(caplog.records) == 4


def test_the_number_of_kinds_in_the_log_is_limited(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    task = Task("host")
    for number in range(2 * KINDS_MAX):
        fail(task, type(f"Error{number}", (Exception,), {})())
    assert (task.failures, len(caplog.records)) == (2 * KINDS_MAX, KINDS_MAX)


def test_a_log_that_fails_does_not_end_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(tasks.log, "error", full)
    task = Task("host")
    fail(task, KeyError("odd"))
    assert task.failures == 1


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_a_wanted_end_is_no_error(end: type[BaseException]) -> None:
    task = Task("host")
    with pytest.raises(end), task:
        raise end
    assert task.failures == 0


def test_threads_that_share_a_task_lose_no_count() -> None:
    task = Task("gpu")
    threads = [threading.Thread(target=lambda: [fail(task, KeyError("odd")) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert task.failures == 800


def test_a_task_that_no_longer_turns_is_reported_until_it_turns(time: Time, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    slow, endless, fresh = Task("state", 60.0), Task("gpu"), Task("lease", 60.0)
    all_tasks = Tasks()
    all_tasks.add(slow, endless, fresh)
    for task in (slow, endless):
        with task:
            pass
    time.now += 60.0
    all_tasks.watch()
    assert all_tasks.list_late() == [] and caplog.records == []
    time.now += 15.0
    for _ in range(3):
        all_tasks.watch()
    (text,) = all_tasks.list_late()
    assert text.startswith("the task state has not worked for 75 s")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    with slow:
        all_tasks.watch()
    assert caplog.records[-1].getMessage() == "the task state works again"
    time.now += 75.0
    assert all_tasks.list_late()
    slow.rest()
    assert all_tasks.list_late() == []
    assert all_tasks.failures() == {"state": 0, "gpu": 0, "lease": 0}
