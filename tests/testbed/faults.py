"""A running exporter on the fake NVML library, its view from outside, and the table of faults that tests write."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.common.clock import ManualClock
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder
from tests.testbed.processes import Processes, Running, fastest, fetch, wait_for

QUIET = ("--no-attribution.slurm", "--no-attribution.kubelet")


@dataclass(frozen=True)
class Seen:
    """The result of one scrape. Values by GPU index as text."""

    text: str
    values: dict[str, dict[str, float]]  # family: {gpu: value}, only families without further labels
    errors: dict[tuple[str, str], float]

    def __getitem__(self, family: str) -> dict[str, float]:
        return self.values.get(family, {})

    def one(self, family: str) -> float | None:
        """The value of a family that has no labels."""
        return self.values.get(family, {}).get("")


def look(url: str) -> Seen:
    """Scrape and parse the page. Fails if the scrape is not answered."""
    text = fetch(f"{url}/metrics", timeout_s=4.5)
    assert text is not None, "the scrape was not answered"
    values: dict[str, dict[str, float]] = defaultdict(dict)
    errors: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "gpu_exporter_driver_errors_total":
                errors[sample.labels["call"], sample.labels["error"]] = sample.value
            elif sample.labels.keys() <= {"gpu", "uuid"}:
                values[sample.name][sample.labels.get("gpu", "")] = sample.value
    return Seen(text, dict(values), errors)


def scrape_ms(url: str) -> float:
    """The fastest of several scrapes in milliseconds."""

    def measure() -> float:
        begin = time.perf_counter()
        assert fetch(f"{url}/metrics", timeout_s=4.5) is not None
        return (time.perf_counter() - begin) * 1000

    return fastest(measure, 5.0)


def threads_of(running: Running) -> int:
    return len(os.listdir(f"/proc/{running.process.pid}/task"))


class Rig:
    """`count` GPUs whose values do not change until the test changes state A to state B."""

    def __init__(
        self, table: NvmlTable, environment: dict[str, str], processes: Processes, directory: Path, count: int
    ) -> None:
        self.table = table
        self.environment = environment
        self.processes = processes
        self.directory = directory
        self.count = count
        self.feeder = ScenarioFeeder(
            parse_scenario({"gpus": [{"model": "H100", "load": {"kind": "constant", "value": 0.5}}] * count}),
            table,
            ManualClock(),
        )
        self.sysfs = directory / "sys"
        self.set_state("A")

    def set_state(self, state: str) -> None:
        """Set the state: every GPU has its own power, which differs between the states."""
        for index in range(self.count):
            with self.table.writing(index) as out:
                out.power_mw = self._power_w(index, state) * 1000
                out.utilization = 40 if state == "A" else 60

    @staticmethod
    def _power_w(index: int, state: str) -> int:
        return 200 + 10 * index + (5 if state == "B" else 0)

    def start(self, *flags: str, settings: str = "", environment: dict[str, str] | None = None) -> tuple[Running, str]:
        """Start the exporter with short intervals, unless `settings` change them."""
        path = self.directory / "settings.yaml"
        quick = "sampling: {interval: 200ms, deadline: 500ms, withhold_min: 1s}\nattribution: {interval: 200ms}\n"
        path.write_text(settings or quick, encoding="utf-8")
        return self.processes.start_exporter(
            *QUIET,
            f"--path.sysfs={self.sysfs}",
            f"--config.file={path}",
            *flags,
            environment=environment or self.environment,
        )

    def fresh(self, seen: Seen, state: str) -> set[str]:
        """The GPUs that show this state's values."""
        return {gpu for gpu, watts in seen["gpu_power_watts"].items() if watts == self._power_w(int(gpu), state)}

    def all(self, *but: int) -> set[str]:
        return {str(index) for index in range(self.count)} - {str(index) for index in but}

    def wait_until(self, url: str, what: str, condition, timeout_s: float = 60.0) -> Seen:  # type: ignore[no-untyped-def]
        """Scrape until `condition(seen)` is true."""

        def ask() -> Seen | None:
            seen = look(url)
            return seen if condition(seen) else None

        return wait_for(ask, what, timeout_s)

    def hold(self, url: str, seconds: float, check: Callable[[Seen], None]) -> None:
        """Scrape repeatedly for some time, and check each scrape: the check must hold at every moment."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            check(look(url))


HEADER = """# What happens when something breaks

Each row is a test (`tests/component/faults`), which causes one fault in a running exporter with {count} simulated GPUs.
During a fault of one GPU (GPU 3, or a ninth GPU), all other GPUs stay fresh.

- *fresh*: current values.
- *lost*: `gpu_up` is 0, the counters of the GPU stop, and its gauges are absent.
- *nothing*: no series of the GPU.
- *visible 7 of 8*: `gpu_devices_visible` is 7, and `gpu_devices_expected` is 8.
- *next cycle*: in the first cycle after the end of the fault.
- *page*: the status page. *row*: the row of the GPU on this page. *JSON*: `/api/v1/status`.
- *GpuUnusable*, *GpuLost*, *GpuMissing*: [alerts](../alerts/runbook.md).

If a row names no other step, the process continues, and recovers by itself. The exporter answers every scrape, within
10 ms on a quiet machine. It never publishes an old value as a present value, and counts no time of the fault as idle.

| fault | GPUs with the fault | signs | recovery |
| --- | --- | --- | --- |
"""


class FaultTable:
    """Rows with the results of the tests."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[str, ...]] = {}

    def add(self, fault: str, shows: str, signs: str, recovery: str) -> None:
        assert fault not in self.rows, fault
        self.rows[fault] = (fault, shows, signs, recovery)

    def render(self, order: list[str], count: int, page: str) -> str:
        """The table. Rows of tests that did not run, or that ran in another process, are those of `page`."""
        known = {line[2:].partition(" | ")[0]: line for line in page.splitlines() if line.startswith("| ")}
        known |= {fault: f"| {' | '.join(row)} |" for fault, row in self.rows.items()}
        lines = [known.get(fault, f"| {fault} | its test has not run |") for fault in order]
        return HEADER.format(count=count) + "\n".join(lines) + "\n"
