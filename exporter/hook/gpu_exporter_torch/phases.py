"""Measures the phases of a step that the user marks in the code. Each moment counts only for the innermost phase."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Literal

from gpu_exporter_torch.report_rules import PHASES


class PhaseClock:
    """Times of phases on the CPU, in nanoseconds. `spent_ns`: the time of each phase in measured steps. `entered`: how
    often each phase was entered, in all steps.

    `on_change` is called with the name of the innermost phase, "" outside of phases.
    """

    def __init__(self, now: Callable[[], int], on_change: Callable[[str], None]) -> None:
        self.spent_ns = dict.fromkeys(PHASES, 0)
        self.entered = dict.fromkeys(PHASES, 0)
        self._now, self._on_change = now, on_change
        self._stack: list[str] = []
        self._since = 0
        self._step_ns: dict[str, int] = {}  # of the present step, which may turn out not to be measured

    def enter(self, name: str) -> None:
        self._book()
        self._stack.append(name)
        self.entered[name] += 1
        self._on_change(name)

    def leave(self) -> None:
        self._book()
        self._stack.pop()
        self._on_change(self._stack[-1] if self._stack else "")

    def close_step(self, *, is_measured: bool) -> None:
        """Ends the present step. Its times count only if it is measured."""
        if is_measured:
            for name, spent in self._step_ns.items():
                self.spent_ns[name] += spent
        self._step_ns = {}

    @property
    def placed(self) -> tuple[str, ...]:
        """The phases that were entered at least once."""
        return tuple(name for name, number in self.entered.items() if number)

    def _book(self) -> None:
        now = self._now()
        if self._stack:
            name = self._stack[-1]
            self._step_ns[name] = self._step_ns.get(name, 0) + now - self._since
        self._since = now


class Phase:
    """A context manager that reports when a phase begins and ends. It does not suppress exceptions."""

    __slots__ = ("_enter", "_leave", "_name")

    def __init__(self, name: str, enter: Callable[[str], None], leave: Callable[[], None]) -> None:
        self._name, self._enter, self._leave = name, enter, leave

    def __enter__(self) -> None:
        self._enter(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self._leave()
        return False
