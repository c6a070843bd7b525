"""A real API server with the real controllers, and a namespace with a reconciler that acts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.component.taken_back.team import NOTEBOOK, PIPELINE, VALUES, Team
from tests.testbed.chart import Helm
from tests.testbed.control_plane import ControlPlane
from tests.testbed.operators import start_with_operators


@pytest.fixture(scope="package")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One for all files: the controllers start slowly."""
    with start_with_operators(tmp_path_factory.mktemp("operators")) as started:
        yield started


@pytest.fixture(scope="package")
def kinds(plane: ControlPlane) -> None:
    """Kinds of objects whose controllers do not run here."""
    plane.define(NOTEBOOK, PIPELINE)


@pytest.fixture
def team(plane: ControlPlane, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Team]:
    name = re.sub("[^a-z0-9]+", "-", request.node.name.lower().removeprefix("test_"))
    made = Team(plane, f"{name[:40].strip('-')}-{name[-15:].strip('-')}", tmp_path)
    yield made
    made.clear()


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return Helm(tmp_path_factory.mktemp("helm")).objects(VALUES)
