"""Slurm clusters and nodes of the tests. The variables of the machine's own Slurm are removed for each test."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.unit.attribution.slurm_cluster import Cluster
from tests.unit.attribution.slurm_quiet_node import Filing, Node

from gpu_exporter.common.clock import ManualClock


@pytest.fixture(autouse=True)
def without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.fixture
def filing(tmp_path: Path) -> Filing:
    found = Filing(tmp_path)
    found.steps = {}
    found.settle()
    return found


@pytest.fixture
def now(filing: Filing) -> float:
    """The exporter's clock is that of the file system."""
    filing.clock = ManualClock(wall=time.time() - 0.2)
    filing.slurmd_start = int(time.time()) + 1
    filing.restart()
    filing.source.poll()
    return filing.clock.wall()
