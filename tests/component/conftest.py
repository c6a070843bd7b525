"""Processes in cgroups, a node that has them on its GPUs, and a control plane with a namespace whose pods are marked."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.component.pods_bench import Bench
from tests.testbed.cgroups import Places, ProcFiles, RealCgroups
from tests.testbed.control_plane import ControlPlane, start_control_plane
from tests.testbed.nvml.feeder import NvmlTable
from tests.testbed.process_node import Node
from tests.testbed.processes import Processes
from tests.testbed.report_sites import Truth, serve


@pytest.fixture(scope="module", autouse=True)
def nobodys_slurm(request: pytest.FixtureRequest) -> Iterator[None]:
    """Disable Slurm in other tests: the tests of Slurm run at the same time, and an exporter would detect their slurmd."""
    with pytest.MonkeyPatch.context() as patch:
        if getattr(request.module, "pytestmark", None) != pytest.mark.slurm:
            patch.setenv("GPU_EXPORTER_ATTRIBUTION_SLURM", "false")
        yield


@pytest.fixture(params=[pytest.param("cgroups", marks=pytest.mark.slow), "files"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Places]:
    made: Places = RealCgroups() if request.param == "cgroups" else ProcFiles(tmp_path)
    yield made
    made.close()


@pytest.fixture
def cgroups() -> Iterator[RealCgroups]:
    made = RealCgroups("cpuacct")
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


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    directory = tmp_path_factory.mktemp("control-plane")
    with Processes(directory) as processes, start_control_plane(processes, directory) as started:
        yield started


@pytest.fixture
def bench(plane: ControlPlane, request: pytest.FixtureRequest) -> Iterator[Bench]:
    name = re.sub("[^a-z0-9]+", "-", request.node.name)
    name = f"{name[:40].strip('-')}-{name[-15:].strip('-')}"
    made = Bench(plane, name)
    yield made
    plane.core.delete_collection_namespaced_pod(name, grace_period_seconds=0)


@pytest.fixture(scope="module")
def sites(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Mapping[str, Truth]]]:
    """A server with the sites of the module's CASES, and their truths."""
    with serve(tmp_path_factory.mktemp("sites"), request.module.CASES) as found:
        yield found
