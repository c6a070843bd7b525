"""Publishes the report with the program's own prometheus_client. Names, units and statistics are the exporter's."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gpu_exporter_torch.report_rules import STEP_HELP, STEP_METRIC, WINDOW_S, are_enough

LOOK_S = 15.0  # time between two looks that are kept, so that scrapes do not fill the memory


class StepLook(NamedTuple):
    """Totals of the measured steps at a time, monotonic seconds."""

    at: float
    steps: int
    step_s: float


class RecentMean:
    """The mean duration of a step over the last WINDOW_S, or since the beginning if this is shorter."""

    def __init__(self, now: float) -> None:
        self._looks = deque([StepLook(now, 0, 0.0)])

    def add(self, look: StepLook) -> float | None:
        """Adds the totals of a moment, and returns the mean until then. None if there are too few steps."""
        if look.at - self._looks[-1].at >= LOOK_S:
            self._looks.append(look)
        while len(self._looks) > 2 and look.at - self._looks[1].at >= WINDOW_S:
            self._looks.popleft()
        steps = look.steps - self._looks[0].steps
        seconds = look.step_s - self._looks[0].step_s
        return seconds / steps if are_enough(steps, seconds) else None


class TrainingCollector:
    """A collector for a prometheus_client registry. After an error in the hook it publishes nothing."""

    def __init__(self, report: Callable[[], dict[str, Any]]) -> None:
        """`report`: a bound method; its object is not kept alive."""
        self._report = weakref.WeakMethod(report)
        self._mean = RecentMean(time.monotonic())

    def describe(self) -> list[Metric]:
        """Describes no metric, so that registering reads no report."""
        return []

    def collect(self) -> Iterator[Metric]:
        read = self._report()
        report = read() if read is not None else {}
        if not report:
            return
        labels, values = ["rank"], [str(report["rank"])]
        steps = CounterMetricFamily("gpu_training_steps", "Steps of the training loop.", labels=labels)
        steps.add_metric(values, report["steps"])
        yield steps
        look = StepLook(time.monotonic(), report["measured_steps"], report["step_seconds"])
        if (mean_s := self._mean.add(look)) is not None:
            step = GaugeMetricFamily(STEP_METRIC, STEP_HELP, labels=labels)
            step.add_metric(values, mean_s)
            yield step
        phases = CounterMetricFamily(
            "gpu_training_phase_seconds",
            "Seconds of the measured steps by phase. step: the whole step. wait: waiting for data.",
            labels=[*labels, "phase"],
        )
        seconds = {"step": report["step_seconds"], "wait": report["wait_seconds"]}
        seconds |= {name: each["seconds"] for name, each in (report["phases"] or {}).items()}
        for name, value in seconds.items():
            if value is not None:
                phases.add_metric([*values, name], value)
        yield phases
