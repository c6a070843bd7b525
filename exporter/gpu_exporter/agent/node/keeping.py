"""Writes the state file at intervals while the exporter runs, and a record of each job that ended.

Counters are published only after they were written.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.agent.node.ended import JobRecords
from gpu_exporter.agent.node.state import NodeState
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.tasks import Task

log = logging.getLogger(__name__)
LATE_S = 60.0  # a write takes milliseconds; a disk that hangs delays it without limit


class StateKeeper:
    """Writes the state file at intervals. Logs a failure once, until a write succeeds."""

    def __init__(self, node: NodeState, state: StateFile, clock: Clock) -> None:
        self._node = node
        self._state = state
        self._clock = clock
        self._records = JobRecords(state.path.parent / "jobs")
        self._warned = False
        self.task = Task("state", LATE_S)

    def run(self, stop: threading.Event) -> None:
        """Writes the counters in every interval, and right after a long idle run has ended, until `stop` is set."""
        due = 0.0
        while not stop.is_set():
            with self.task:
                now = self._clock.monotonic()
                if now >= due or self._node.ledger.long_run_ended:
                    due = now + self._state.interval_s
                    self._write()
                self.write_records()
            self._clock.wait(stop, min(1.0, self._state.interval_s))

    def write_records(self, *, at_once: bool = False) -> None:
        """Writes the records of ended jobs. `at_once`: the exporter stops now."""
        self._records.write(self._node.take_ended(at_once=at_once))

    def _write(self) -> None:
        try:
            self._node.write_state()
            self._warned = False
        except OSError as exc:
            if not self._warned:
                log.warning("%s", describe_unwritten(self._state.path, str(exc)))
            self._warned = True


def describe_unwritten(path: Path, error: str) -> str:
    """Returns a message about a state file that cannot be written: the effect and the remedy."""
    return (
        f"{path}: the state file cannot be written ({error}). Counters stand still until a write succeeds: free "
        f"space in {path.parent}, make it writable, or set another --state.directory"
    )
