"""Starts threads, with a clear error if the host allows no further thread, and runs calls in several threads."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class NoThread(OSError):
    """The host refuses to start another thread for this process."""


def start(thread: threading.Thread) -> None:
    """Starts `thread`. Raises NoThread; the caller may retry after that."""
    try:
        thread.start()
    except RuntimeError as exc:
        raise NoThread(
            f"cannot start a thread ({exc}): raise the limit of tasks (TasksMax= of the unit, the pod's pids "
            "limit, ulimit -u), or end the process that uses them up"
        ) from exc


class _Failure(NamedTuple):
    reason: Exception


class _End:
    """Marks that a thread has no items left."""


def run_ahead(call: Callable[[T], R], items: Iterable[T], workers: int, name: str, *, ahead: int = 2) -> Iterator[R]:
    """Yields the result of `call` for each item, in any order. Each worker stays at most `ahead` results ahead of the
    caller.

    Raises NoThread, and each error that `call` raises. The threads are daemons: a call that hangs does not keep the
    program alive.
    """
    results: queue.SimpleQueue[R | _Failure | _End] = queue.SimpleQueue()
    source, lock = iter(items), threading.Lock()
    room, is_over = threading.Semaphore(ahead * workers), threading.Event()
    end = _End()

    def work() -> None:
        while True:
            room.acquire()
            with lock:
                item = next(source, end)
            if isinstance(item, _End) or is_over.is_set():
                results.put(end)
                return
            try:
                results.put(call(item))
            except Exception as exc:  # handed to the thread that waits for it
                results.put(_Failure(exc))

    running = 0
    try:
        for _ in range(workers):
            try:
                start(threading.Thread(target=work, name=name, daemon=True))
            except NoThread:
                if not running:
                    raise
                break  # fewer threads are enough
            running += 1
        while running:
            result = results.get()
            if isinstance(result, _Failure):
                raise result.reason
            if isinstance(result, _End):
                running -= 1
                continue
            room.release()
            yield result
    finally:
        is_over.set()
        for _ in range(running):
            room.release()
