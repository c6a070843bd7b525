"""Base class of all loops: a daemon thread that ends on request, unless it hangs in the driver."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from gpu_exporter.common.tasks import Task
from gpu_exporter.common.threads import start


class Worker(ABC):
    """A loop in its own thread, which is never replaced. `_run` must check `_stop`."""

    def __init__(self, name: str, task: Task) -> None:
        """`task`: counts each turn of `_run` and catches its errors. All workers of one kind may share it."""
        self.task = task
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread. Raises NoThread."""
        start(self._thread)

    def ask_to_stop(self) -> None:
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Waits for the end of the thread. Returns False if the thread hangs in a call."""
        self._thread.join(max(0.0, timeout_s))
        return not self._thread.is_alive()

    @abstractmethod
    def _run(self) -> None:
        """Does the work of the thread, until `_stop` is set."""
