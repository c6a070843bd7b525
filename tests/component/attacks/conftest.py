"""The programs under attack, and the table of attacks in docs/faults.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.component.attacks.attack_bench import ORDER, SCENARIO
from tests.testbed.cgroups import MemoryLimit
from tests.testbed.chart import CHART
from tests.testbed.odd_host import OddHost
from tests.testbed.processes import GPU_EXPORTER, Processes, Running, fetch, free_port, wait_for

PAGE = Path(__file__).resolve().parents[3] / "docs" / "faults.md"
MARK = "\n## Attacks\n"
HEADER = """
Each row is a test (`tests/component/attacks`) on two cores that also run other tests. GPUs are simulated; clients and
peers use loopback. A *source* is a server that the reconciler or a report asks for data. *Peak 67 of 128 MiB* is the
peak memory and the chart's limit. [security.md](security.md) explains the defences.

| attack | result |
| --- | --- |
"""


@pytest.fixture(scope="package")
def seen(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """The results of attacks, which are compared with the page, or written to it. Other results are those of the page."""
    rows: dict[str, str] = {}
    yield rows
    first, _, before = PAGE.read_text("utf-8").partition(MARK)
    known = dict(line[2:-2].split(" | ", 1) for line in before.splitlines() if line.startswith("| "))
    known |= rows
    table = HEADER + "".join(f"| {attack} | {known.get(attack, 'its test has not run')} |\n" for attack in ORDER)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(first + MARK + table, encoding="utf-8")
        return
    assert _without_figures(table) == _without_figures(before), (
        "docs/faults.md is stale: run `make faults` and review it"
    )


def _without_figures(text: str) -> str:
    return re.sub(r"\d[\d.,]*", "#", text)


@pytest.fixture
def start(processes: Processes, tmp_path: Path) -> Callable[..., tuple[Running, int]]:
    """An exporter of simulated GPUs."""
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(SCENARIO)

    def start(*flags: str, host: OddHost | None = None, **limits: int) -> tuple[Running, int]:
        port = free_port()
        listen = f"--web.listen-address=127.0.0.1:{port}"
        command = [*GPU_EXPORTER, f"--devices.scenario={scenario}", "--state.directory=", listen, *flags]
        if limits:
            command = ["prlimit", *(f"--{name}={value}" for name, value in limits.items()), "--", *command]
        running = processes.start(command, host.environment if host is not None else None)
        wait_for(lambda: fetch(f"http://127.0.0.1:{port}/-/ready"), "the exporter")
        return running, port

    return start


def limit_of(part: str) -> int:
    """The chart's memory limit for a component, in bytes."""
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    return int(values[part]["resources"]["limits"]["memory"].removesuffix("Mi")) * 2**20


@pytest.fixture
def limit(request: pytest.FixtureRequest) -> Iterator[MemoryLimit]:
    """A cgroup with the chart's memory limit for the component in the test's parameter."""
    made = MemoryLimit(limit_of(request.param))
    yield made
    made.close()
