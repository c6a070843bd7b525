"""Lists every collector, in the order of names.py.

A user can switch off each collector by its name. Each has its own metrics of success and duration.
"""

from __future__ import annotations

from importlib import import_module

from gpu_exporter.agent.collectors.contract import Collector
from gpu_exporter.agent.collectors.names import COLLECTORS


def _load(name: str) -> Collector:
    module = import_module(f"gpu_exporter.agent.collectors.{name.replace('-', '_')}")
    return next(each for each in vars(module).values() if isinstance(each, Collector) and each.name == name)


ALL: tuple[Collector, ...] = tuple(map(_load, COLLECTORS))
DEFAULT: tuple[Collector, ...] = tuple(collector for collector in ALL if COLLECTORS[collector.name][0])
