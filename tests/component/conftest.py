"""Processes in cgroups, and a node that has them on its GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.cgroups import Places, ProcFiles, RealCgroups
from tests.testbed.nvml.feeder import NvmlTable
from tests.testbed.process_node import Node
from tests.testbed.processes import Processes


@pytest.fixture(scope="module", autouse=True)
def nobodys_slurm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Disable Slurm in other tests: the tests of Slurm run at the same time, and an exporter would detect their slurmd."""
    with pytest.MonkeyPatch.context() as patch:
        if getattr(request.module, "pytestmark", None) != pytest.mark.slurm:
            patch.setenv("GPU_EXPORTER_ATTRIBUTION_SLURM", "false")
        yield


@pytest.fixture(params=["cgroups", "files"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Places]:
    made: Places = RealCgroups() if request.param == "cgroups" else ProcFiles(tmp_path)
    yield made
    made.close()


@pytest.fixture
def children(places: Places, tmp_path: Path) -> Iterator[Processes]:
    """Processes that end before their cgroups are removed."""
    with Processes(tmp_path) as started:
        yield started


@pytest.fixture
def make_node(
    processes: Processes,
    nvml_environment: dict[str, str],
    nvml_table: NvmlTable,
    places: Places,
    children: Processes,
    tmp_path: Path,
) -> Iterator[Callable[..., Node]]:
    """Makes a node with these GPUs and settings, by default idle and quick."""
    made: list[Node] = []

    def make(**about: Any) -> Node:
        made.append(Node(processes, nvml_environment, nvml_table, places, children, tmp_path, **about))
        return made[-1]

    yield make
    for node in made:
        node.close()


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    return make_node()
