"""Images and releases install what they ask for, in versions that pyproject.toml allows, and each file by its hash."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from tools import locks, release

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


def test_a_lock_names_no_registry() -> None:
    for path in LOCKS.glob("*.txt"):
        assert not re.search(r"://|--(extra-)?index-url|--find-links", path.read_text("ascii")), path.name


def test_the_tools_of_a_release_are_locked_with_all_that_they_install() -> None:
    tools, built_by = locked("release"), locked("build")
    assert all(hashes for _, hashes in tools.values())
    for line in locks.RELEASE.split():
        name, _, version = line.partition("==")
        assert tools[name][0] == version
    assert tools["setuptools"] == built_by["setuptools"], "the wheel and the images are built by one version"
    assert {"packaging", "pyproject-hooks", "cyclonedx-python-lib", "jsonschema"} <= set(tools), (
        "and their dependencies"
    )


def test_a_release_installs_only_what_has_a_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The job builds the wheel that is attested: no program without a hash may run in it."""
    commands: list[list[str]] = []

    def run(command: list[object], *_: object, **__: str) -> str:
        commands.append(list(map(str, command)))
        (tmp_path / "WHEELS").mkdir(exist_ok=True)
        return ""

    for name in ("OUT", "TOOLS", "WHEELS"):
        monkeypatch.setattr(release, name, tmp_path / name)
    release.OUT.mkdir()
    monkeypatch.setattr(release, "run", run)
    monkeypatch.setattr(release, "make_venv", lambda folder: folder / "python")
    release.download()
    assert len(commands) == 1 + len(release.PARTS) * (1 + len(release.MACHINES))
    for command in commands:
        assert "--require-hashes" in command and "-r" in command
    assert str(LOCKS / "release.txt") in commands[0] and "--only-binary=:all:" in commands[0]
    makefile = (LOCKS.parents[1] / "Makefile").read_text("utf-8")
    assert re.search(r"^release-dry-run: ##", makefile, re.MULTILINE), "it needs no environment without hashes"
