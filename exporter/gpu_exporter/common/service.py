"""What a program does until a signal: it repeats its work."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from gpu_exporter.common.tasks import Task
from gpu_exporter.common.threads import start

LAST_TICK_S = 0.5  # for a tick that runs when the signal arrives; a longer tick ends with the process


def follow_signals(actions: Mapping[signal.Signals, Callable[[], object]]) -> Task:
    """Call `actions[number]` in a separate thread for each signal that arrives. Returns its task. Raises NoThread.

    The handler itself only puts the number into a queue, because a handler may interrupt any other code, another
    handler too. So it must not take a lock that the interrupted code may hold, as those of Event.set and of log.info.
    SimpleQueue.put takes none. It is the handler without Python code around it, which the next signal could interrupt.
    The thread starts before the handlers are set, because the host may have no thread left when a signal arrives.
    """
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()
    task = Task("signal")

    def act() -> None:
        while True:
            with task:
                actions[signal.Signals(arrived.get())]()

    start(threading.Thread(target=act, name=task.name, daemon=True))
    handler: Any = arrived.put  # its second parameter, `block`, takes the frame, and is ignored
    for number in actions:
        signal.signal(number, handler)
    return task


def stop_on_signal() -> threading.Event:
    """An event that is set after SIGTERM or SIGINT. Raises NoThread."""
    stop = threading.Event()
    follow_signals({signal.SIGTERM: stop.set, signal.SIGINT: stop.set})
    return stop


def repeat(tick: Callable[[], object], each_s: float, stop: threading.Event, task: Task) -> None:
    """Call `tick` every `each_s` until `stop`."""
    while not stop.is_set():
        with task:
            tick()
        stop.wait(each_s)


def repeat_aside(tick: Callable[[], object], each_s: float, stop: threading.Event, task: Task) -> None:
    """Call `repeat` in a separate thread, so that the program ends soon after `stop`, even if a tick waits for
    something.
    """
    thread = threading.Thread(target=repeat, args=(tick, each_s, stop, task), name=task.name, daemon=True)
    start(thread)
    stop.wait()
    thread.join(LAST_TICK_S)
