"""The series of jobs on simulated GPUs, with their truth: what a Prometheus has that scrapes gpu-exporter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tests.testbed.history import HOUR
from tests.testbed.site_series import Busy, Site, uuid

H100 = "NVIDIA H100 80GB HBM3"
MEMORY = 80 * 2**30


class Run(NamedTuple):
    """One run of a job on one GPU: hours since the beginning of the site. `missed`: hours in which its exporter did not
    read the GPU. `causes`: from the second to the last hour of each, by name. `labels`: further ones of its holder.
    """

    job: str
    node: str
    number: int
    start: float
    end: float
    busy: Busy
    missed: tuple[tuple[float, float], ...] = ()
    states: Sequence[tuple[str, float, float]] = ()
    causes: Sequence[tuple[str, float, float]] = ()
    labels: Mapping[str, str] = {}


def put_run(site: Site, run: Run) -> None:
    """Adds the series of one run, as the exporter publishes them."""
    holder = {"scheduler": "slurm", "job_id": run.job} if "pod" not in run.labels else {"scheduler": "kubernetes"}
    own = {name: run.labels[name] for name in ("namespace", "pod", "container") if name in run.labels}
    given: dict[str, Any] = {"job": "gpu-exporter", "instance": run.node, "node": run.node, "gpu": str(run.number % 4)}
    given |= {"uuid": uuid(run.number), **holder, **own}
    begin = site.start + run.start * HOUR

    def known(at: float) -> list[tuple[float, float]]:
        """The parts of the run until `at` in which the GPU was read."""
        parts, upto = [], begin
        for first, last in ((site.start + a * HOUR, site.start + b * HOUR) for a, b in run.missed):
            if upto < min(first, at):
                parts.append((upto, min(first, at)))
            upto = max(upto, last)
        return [*parts, (upto, at)] if upto < at else parts

    def total(of: Callable[[float, float], float]) -> Callable[[float], float]:
        return lambda at: sum(of(first, last) for first, last in known(at))

    def busy_s(first: float, last: float) -> float:
        return run.busy(first, last) * (last - first)

    def idle_s(first: float, last: float) -> float:
        """Whole seconds without work."""
        edges = [*(first + 15.0 * step for step in range(math.ceil((last - first) / 15.0))), last]
        return sum(b - a for a, b in itertools.pairwise(edges) if run.busy(a, b) == 0.0)

    def add(name: str, value: Callable[[float], float] | float, first: float, last: float, **more: str) -> None:
        site.add(f"gpu_allocation_{name}", value, first, last, **{**given, **more})

    about = {name: text for name, text in run.labels.items() if name not in own}
    add("info", 1.0, run.start, run.end, slurm_cluster="lab" if "pod" not in own else "", **about)
    add("start_timestamp_seconds", begin, run.start, run.end)
    add("held_seconds_total", lambda at: at - begin, run.start, run.end)
    add("observed_seconds_total", total(lambda first, last: last - first), run.start, run.end)
    add("busy_seconds_total", total(busy_s), run.start, run.end)
    add("idle_seconds_total", total(idle_s), run.start, run.end)
    add("stalled_seconds_total", 0.0, run.start, run.end)
    energy = total(lambda first, last: 100.0 * (last - first) + 500.0 * busy_s(first, last))
    add("energy_joules_total", energy, run.start, run.end, method="board")
    add("memory_used_bytes", 0.25 * MEMORY, run.start, run.end)
    for state, first, last in run.states or (("healthy", run.start, run.end),):
        add("state", 1.0, first, last, state=state)
    for cause, first, last in run.causes:
        add("cause", 1.0, first, last, cause=cause, confidence="high")
        add("cause_value", 12.0, first, last, cause=cause, quantity="workers_to_try")
        add("cause_value", 3.0, first, last, cause=cause, quantity="free_cpus")


def put_board(site: Site, node: str, number: int) -> None:
    """Adds the series of a GPU."""
    given: dict[str, Any] = {"job": "gpu-exporter", "instance": node, "node": node, "gpu": str(number % 4)}
    site.add("gpu_info", 1.0, uuid=uuid(number), name=H100, **given)
    site.add("gpu_memory_total_bytes", float(MEMORY), uuid=uuid(number), **given)
