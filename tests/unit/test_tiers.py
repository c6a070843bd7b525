"""Each test is run by one of `make test` and `make verify`, and CI runs both, except tests of a release."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIERS = {"quick": {"quick"}, "not quick": {"long"}}  # what an expression of pytest selects
# In an environment with torch; and before a release (make packages-check, hours-check), because an interpreter takes minutes
# to build, and the jobs take four to seven.
SEPARATE = ("hook", "release")


class Call(NamedTuple):
    """One start of pytest: what it selects."""

    folders: list[str]
    tiers: set[str]

    def runs(self, file: str, tier: str) -> bool:
        return tier in self.tiers and any(file.startswith(f"{folder}/") for folder in self.folders)


def calls_of(target: str, testpaths: list[str]) -> list[Call]:
    """The calls of pytest that `make` would start for the target."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True)
    calls = []
    for line in done.stdout.splitlines():
        words = shlex.split(line.partition(" -m pytest ")[2])
        if words:
            folders = [word for word in words if (ROOT / word).is_dir()]
            calls.append(Call(folders or testpaths, TIERS[words[words.index("-m") + 1]]))
    return calls


def stages_of(script: str) -> set[str]:
    """The targets that a call of .ci/stages names."""
    (call,) = re.findall(r'/stages"? (.*)', script)
    return set(re.split(r"[ ,+]", call))


def test_each_test_is_in_one_tier(pytestconfig: pytest.Config) -> None:
    recipes = dict(re.findall(r"^([a-z0-9-]+):[^\n]*\n((?:\t[^\n]*\n)+)", (ROOT / "Makefile").read_text("utf-8"), re.M))
    tiers = {"make test": stages_of(recipes["test"]), "make verify": stages_of(recipes["verify"])}
    assert stages_of((ROOT / ".ci" / "run").read_text("utf-8")) >= {"test", "verify"}
    assert "hook" in tiers["make verify"]
    calls = [
        (name, call)
        for name, targets in tiers.items()
        for target in targets - {"hook"}
        for call in calls_of(target, pytestconfig.getini("testpaths"))
    ]
    for path in (ROOT / "tests").rglob("test_*.py"):
        file = str(path.relative_to(ROOT))
        if file.split("/")[1] not in SEPARATE:
            assert [name for name, call in calls if call.runs(file, "quick")] == ["make test"], file
            assert [name for name, call in calls if call.runs(file, "long")] == ["make verify"], file


@pytest.mark.slow
def test_one_process_runs_all_tests_of_a_file() -> None:
    """Otherwise each process starts a server of its own for them."""
    command = [sys.executable, "-m", "pytest", "-v", "-n", "3", "--dist=loadscope", "tests/unit/web/test_request.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    processes = re.findall(r"^\[(gw\d)\] .* PASSED", done.stdout, re.M)
    assert len(processes) > 3, done.stdout
    assert len(set(processes)) == 1
