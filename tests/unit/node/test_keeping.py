"""When the state file is written, and that neither a full disk nor a fault in the exporter ends the writing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.agent.node.keeping import StateKeeper
from gpu_exporter.agent.node.state import NodeState
from gpu_exporter.common.clock import ManualClock

INTERVAL_S = 10.0


class Node:
    """Notes the time of each write, and then does what a test asks for."""

    def __init__(self, clock: ManualClock, after: Callable[[int], None] = lambda writes: None) -> None:
        self.times: list[float] = []
        self.run_ended_at = float("inf")
        self._clock, self._after = clock, after

    def write_state(self) -> None:
        self.times.append(self._clock.monotonic())
        self._after(len(self.times))

    def take_ended(self, *, at_once: bool) -> tuple[()]:
        return ()

    @property
    def ledger(self) -> Node:
        return self

    @property
    def long_run_ended(self) -> bool:
        return self._clock.monotonic() >= self.run_ended_at > (self.times[-1] if self.times else 0.0)


class StoppingClock(ManualClock):
    """Ends the loop when its time is over."""

    def wait(self, event: threading.Event, seconds: float) -> bool:
        super().wait(event, seconds)
        if self.monotonic() >= 35.0:
            event.set()
        return event.is_set()


def run(node: Node, clock: ManualClock, tmp_path: Path) -> list[float]:
    state = StateFile(tmp_path, INTERVAL_S, "boot")
    StateKeeper(cast(NodeState, node), state, clock).run(threading.Event())
    return node.times


def test_it_is_written_once_in_each_interval(tmp_path: Path) -> None:
    clock = StoppingClock(monotonic=0.0)
    assert run(Node(clock), clock, tmp_path) == [0.0, 10.0, 20.0, 30.0]


def test_it_is_written_at_once_when_a_long_idle_run_has_ended(tmp_path: Path) -> None:
    clock = StoppingClock(monotonic=0.0)
    node = Node(clock)
    node.run_ended_at = 13.5
    assert run(node, clock, tmp_path) == [0.0, 10.0, 14.0, 24.0, 34.0]


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyError("a bug")])
def test_a_fault_is_logged_once_and_the_writing_goes_on(
    fault: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(writes: int) -> None:
        if writes < 3:
            raise fault

    clock = StoppingClock(monotonic=0.0)
    with caplog.at_level(logging.WARNING):
        assert run(Node(clock, fail), clock, tmp_path) == [0.0, 10.0, 20.0, 30.0]
    assert len(caplog.records) == 1
