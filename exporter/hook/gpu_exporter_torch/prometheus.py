"""Publishes the report by the program's own prometheus_client. Names and units as in the exporter."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class TrainingCollector:
    """A collector for a registry. After an error of the hook it publishes nothing."""

    def __init__(self, report: Callable[[], dict[str, Any]]) -> None:
        """`report`: a bound method; its object is not kept alive."""
        self._report = weakref.WeakMethod(report)

    def describe(self) -> list[Metric]:
        """Nothing, so that registering reads no report."""
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
        if report["median_step_seconds"] is not None:
            step = GaugeMetricFamily(
                "gpu_training_step_seconds", "Median duration of the last 128 steps.", labels=labels
            )
            step.add_metric(values, report["median_step_seconds"])
            yield step
        phases = CounterMetricFamily(
            "gpu_training_phase_seconds",
            "Seconds of the measured steps by what the loop did: step is all of them, wait is waiting for data.",
            labels=[*labels, "phase"],
        )
        seconds = {"step": report["step_seconds"], "wait": report["wait_seconds"]}
        seconds |= {name: each["seconds"] for name, each in (report["phases"] or {}).items()}
        for name, value in seconds.items():
            if value is not None:
                phases.add_metric([*values, name], value)
        yield phases
