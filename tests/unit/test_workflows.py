"""The workflows pin every action by its hash, give each job only named rights, and use parts that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.release import STEPS

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
USES = re.compile(r"uses: (?P<name>[^\s#]+)(?P<comment> # v[0-9]+(\.[0-9]+)*)?$", re.MULTILINE)
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}")


def read(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(path.read_text("utf-8"))
    return loaded


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_is_pinned_and_every_job_names_its_rights(path: Path) -> None:
    text, workflow = path.read_text("utf-8"), read(path)
    assert workflow["permissions"] == {}
    assert all("permissions" in job for job in workflow["jobs"].values())
    assert all("timeout-minutes" in job or "uses" in job for job in workflow["jobs"].values())
    found = list(USES.finditer(text))
    assert len(found) == text.count("uses: ")
    for each in found:
        assert each["name"].startswith("./") or (PINNED.fullmatch(each["name"]) and each["comment"]), each[0]
    assert "pull_request_target" not in text


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_no_script_contains_a_text_from_outside(path: Path) -> None:
    """An expression in a script is replaced before the shell reads it; a variable is not."""
    for job in read(path)["jobs"].values():
        for step in job.get("steps", ()):
            assert "${{" not in step.get("run", "")


def test_the_targets_that_workflows_call_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    called = {name for path in WORKFLOWS for name in re.findall(r"make ([a-z0-9-]+)", path.read_text("utf-8"))}
    assert {"test", "demo", "release-dry-run"} <= called
    assert called - {"python3"} <= targets  # Debian's packages "make python3"


def test_nothing_is_published_before_everything_was_checked() -> None:
    """Each job that writes outside needs the checks and the build, directly or through others."""
    jobs = read(ROOT / ".github" / "workflows" / "release.yaml")["jobs"]

    def needed(name: str) -> set[str]:
        direct = set(jobs[name].get("needs", ()))
        return direct | {each for other in direct for each in needed(other)}

    writers = {name for name, job in jobs.items() if "write" in str(job["permissions"])}
    assert writers == {"images", "manifests", "provenance", "publish"}
    assert all({"checks", "build"} <= needed(name) for name in writers)
    agreed = {name for name, job in jobs.items() if job.get("environment") == "release"}
    pushers = {name for name in writers if "packages" in jobs[name]["permissions"]}
    assert pushers == {"images", "manifests", "publish"}
    assert all(agreed & {name, *needed(name)} for name in pushers), "a maintainer agrees before the first push"
    assert {"build", "images", "manifests", "provenance"} <= needed("publish")
    assert list(STEPS) == ["pictures", "download", "dist", "packages", "chart", "sbom", "use", "images", "sums"], (
        "the order in which a release is made"
    )


def test_a_bot_proposes_renewals_of_all_that_is_pinned() -> None:
    updates = read(ROOT / ".github" / "dependabot.yml")["updates"]
    found = {
        (each["package-ecosystem"], path.relative_to(ROOT).as_posix())
        for each in updates
        for place in each.get("directories", [each.get("directory")])
        for path in (ROOT.glob(place.strip("/")) if "*" in place else [ROOT / place.strip("/")])
    }
    wanted = {("github-actions", "."), ("docker", "."), ("pip", "."), ("pip", "exporter/locks")}
    wanted |= {
        ("gomod", path.parent.relative_to(ROOT).as_posix()) for path in (ROOT / "tests/testbed/go").rglob("go.mod")
    }
    assert wanted <= found
