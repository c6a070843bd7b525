"""What a program does until a signal: it repeats its work."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from gpu_exporter.common.threads import start

LAST_TICK_S = 0.5  # for a tick that runs when the signal arrives; a longer tick ends with the process


def stop_on_signal() -> threading.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def repeat(tick: Callable[[], object], each_s: float, stop: threading.Event) -> None:
    """Call `tick` every `each_s` until `stop`."""
    while not stop.is_set():
        tick()
        stop.wait(each_s)


def repeat_aside(tick: Callable[[], object], each_s: float, stop: threading.Event) -> None:
    """Call `repeat` in a separate thread, so that the program ends soon after `stop`, even if a tick waits for
    something.

    Raises the exception that ended the ticks.
    """
    faults: list[BaseException] = []

    def run() -> None:
        try:
            repeat(tick, each_s, stop)
        except BaseException as exc:
            faults.append(exc)
            stop.set()

    thread = threading.Thread(target=run, name="cycle", daemon=True)
    start(thread)
    stop.wait()
    thread.join(LAST_TICK_S)
    if faults:
        raise faults[0]
