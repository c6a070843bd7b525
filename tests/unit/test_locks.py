"""The images install what pyproject.toml asks for, in versions that it allows, and each file by its hash."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

LOCKS = Path(__file__).resolve().parents[2] / "exporter" / "locks"
EXTRAS = {"agent": ("", "web-auth"), "reconciler": ("", "web-auth", "reconciler")}


def locked(part: str) -> dict[str, tuple[str, int]]:
    """By name, the version and the number of its hashes. A name may have one line for each Python."""
    text = (LOCKS / f"{part}.txt").read_text("ascii").replace("\\\n", " ")
    found: dict[str, tuple[str, int]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            match = re.match(r"([a-z0-9-]+)==([^ ;]+)", line)
            assert match, line
            found[match[1]] = (match[2], line.count("--hash=sha256:"))
    return found


@pytest.mark.parametrize("part", EXTRAS)
def test_each_dependency_is_locked_in_an_allowed_version_with_its_hashes(part: str) -> None:
    versions = locked(part)
    assert all(hashes for _, hashes in versions.values())
    every = [Requirement(each) for each in importlib.metadata.requires("gpu-exporter") or ()]
    wanted = [
        each
        for each in every
        if each.marker is None or any(each.marker.evaluate({"extra": extra}) for extra in EXTRAS[part])
    ]
    assert len(wanted) >= 6
    for requirement in wanted:
        name = requirement.name.lower().replace("_", "-")
        assert requirement.specifier.contains(versions[name][0]), requirement


def test_the_agent_installs_nothing_of_the_reconciler() -> None:
    assert "kubernetes" not in locked("agent")
    assert set(locked("build")) == {"setuptools"}
