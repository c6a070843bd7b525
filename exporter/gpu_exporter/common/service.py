"""Repeats the work of a program until a signal ends the program."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache

from gpu_exporter.common.tasks import Task
from gpu_exporter.common.threads import start

LAST_TICK_S = 0.5  # for a tick that runs when the signal arrives; a longer tick ends with the process


class _Follower:
    """Runs the actions of signals in a separate thread. One per process: Python has one pipe for all signals."""

    def __init__(self) -> None:
        self.actions: dict[int, Callable[[], object]] = {}
        self.task = Task("signal")
        self._read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write, False)
        # The thread starts before the handlers are set, because the host may have no thread left when a signal arrives.
        start(threading.Thread(target=self._act, name=self.task.name, daemon=True))
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def _act(self) -> None:
        while True:
            with self.task:
                self.actions.get(os.read(self._read, 1)[0], _nothing)()


@lru_cache(maxsize=1)
def _follower() -> _Follower:
    return _Follower()


def _nothing(*_: object) -> None:
    """The handler of a followed signal. Does nothing: Python needs a handler, but the follower's thread acts."""


def follow_signals(actions: Mapping[signal.Signals, Callable[[], object]]) -> Task:
    """Calls `actions[number]` in a separate thread for each signal that arrives. Returns the thread's task.

    Raises NoThread. Python runs a signal handler only between two steps of the main thread, which may then wait for a
    lock. A handler may even need a lock that the interrupted code holds, as in Event.set. So the interpreter writes the
    signal's number into a pipe (signal.set_wakeup_fd), and the thread reads it.
    """
    follower = _follower()
    for number, action in actions.items():
        follower.actions[number] = action
        signal.signal(number, _nothing)
    return follower.task


def stop_on_signal() -> threading.Event:
    """Returns an event that is set after SIGTERM or SIGINT. Raises NoThread."""
    stop = threading.Event()
    follow_signals({signal.SIGTERM: stop.set, signal.SIGINT: stop.set})
    return stop


def repeat(tick: Callable[[], object], each_s: float, stop: threading.Event, task: Task) -> None:
    """Calls `tick` every `each_s` until `stop`."""
    while not stop.is_set():
        with task:
            tick()
        stop.wait(each_s)


def repeat_aside(tick: Callable[[], object], each_s: float, stop: threading.Event, task: Task) -> None:
    """Calls `repeat` in a separate thread, so that the program ends soon after `stop`, even if a tick waits."""
    thread = threading.Thread(target=repeat, args=(tick, each_s, stop, task), name=task.name, daemon=True)
    start(thread)
    stop.wait()
    thread.join(LAST_TICK_S)
