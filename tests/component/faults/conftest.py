"""A running exporter with eight GPUs that a test breaks, and the table of faults in docs/faults.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.component.faults.fault_bench import COUNT
from tests.testbed.faults import FaultTable, Rig
from tests.testbed.nvml.feeder import NvmlTable
from tests.testbed.processes import Processes

PAGE = Path(__file__).resolve().parents[3] / "docs" / "faults.md"
ORDER = [
    "no libnvidia-ml",
    "driver not loaded",
    "driver is loaded later",
    "driver hangs at its start",
    "GPU lost before the start",
    "GPU lost while running",
    "GPU needs a reset",
    "GPU hangs at its start",
    "a call hangs on one GPU",
    "a call hangs on all GPUs",
    "a call fails on all GPUs",
    "one GPU answers no call (access to its device revoked)",
    "no permission for a call",
    "a call about a GPU's identity fails",
    "GPU asks for a reset and answers",
    "GPU gone from the driver's list after a restart",
    "GPU gone after a boot; another GPU has its index",
    "GPU that this container may not use",
    "two GPUs report one UUID",
    "all NVLinks of a GPU are gone",
    "GPU on the bus that the driver does not list",
    "the driver cannot start a GPU",
    "GPU asleep (runtime power management)",
    "GPU given to a virtual machine",
    "driver released on request (SIGUSR1)",
    "driver replaced, in a container",
    "driver replaced, on a host",
    "XID, then the GPU is lost",
    "state directory full or read-only",
]


@pytest.fixture(scope="package")
def matrix(request: pytest.FixtureRequest) -> Iterator[FaultTable]:
    """Collects the rows, and compares them with the page, or writes the page."""
    table = FaultTable()
    yield table
    before, mark, attacks = PAGE.read_text("utf-8").partition("\n## ")  # the tests of attacks write the second table
    text = table.render(ORDER, COUNT, before)
    if request.config.getoption("--update-golden"):
        PAGE.write_text(text + mark + attacks, encoding="utf-8")
        return
    assert text == before, "docs/faults.md is stale: run `make faults` and review it"


@pytest.fixture
def rig(nvml_table: NvmlTable, nvml_environment: dict[str, str], processes: Processes, tmp_path: Path) -> Rig:
    return Rig(nvml_table, nvml_environment, processes, tmp_path, COUNT)
