"""Hook and exporter are two distributions: neither needs the other, and removing one takes nothing from the other."""

from __future__ import annotations

import email
import json
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import pytest

from gpu_exporter.common.version import VERSION
from gpu_exporter.diagnosis.training.reports import parse_report

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
SHIPPED = ("pyproject.toml", "README.md", "LICENSE", "exporter")
EXPORTER, HOOK = "gpu-exporter", "gpu-exporter-torch"
FOLDERS = {EXPORTER: Path(), HOOK: Path("exporter") / "hook"}
MODULES = {EXPORTER: "gpu_exporter", HOOK: "gpu_exporter_torch"}
SHARED = {EXPORTER: "gpu_exporter/common/report_rules.py", HOOK: "gpu_exporter_torch/report_rules.py"}
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel('dist'); build_meta.build_sdist('dist')"
TRAIN = """
import sys
from gpu_exporter_torch import observe
with observe(range(60), directory=sys.argv[1], summary=False) as batches:
    for _ in batches:
        pass
"""
READ = """
import sys, pathlib
from gpu_exporter.diagnosis.training.reports import parse_report
print(parse_report(pathlib.Path(sys.argv[1]).read_bytes(), 0.0).steps)
"""


class Distribution(NamedTuple):
    wheel: Path
    sdist: Path


def build(source: Path) -> Distribution:
    subprocess.run([sys.executable, "-c", BUILD], cwd=source, check=True, capture_output=True)
    (wheel,), (sdist,) = (source / "dist").glob("*.whl"), (source / "dist").glob("*.tar.gz")
    return Distribution(wheel, sdist)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Distribution]:
    source = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("*.egg-info", "__pycache__", "build", "dist")
    for name in SHIPPED:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(path, source / name)
    return {name: build(source / folder) for name, folder in FOLDERS.items()}


def files_of(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata_of(wheel: Path) -> Message:
    (text,) = [data for name, data in files_of(wheel).items() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(text)


def test_they_share_no_path_and_no_dependency(built: dict[str, Distribution]) -> None:
    tops = {name: {path.partition("/")[0] for path in files_of(each.wheel)} for name, each in built.items()}
    assert tops[EXPORTER] == {"gpu_exporter", f"gpu_exporter-{VERSION}.dist-info"}
    assert tops[HOOK] == {"gpu_exporter_torch", f"gpu_exporter_torch-{VERSION}.dist-info"}
    about = {name: metadata_of(each.wheel) for name, each in built.items()}
    assert about[HOOK].get_all("Requires-Dist") is None
    assert not any("torch" in each for each in about[EXPORTER].get_all("Requires-Dist") or ())
    assert (about[HOOK]["Name"], about[HOOK]["Requires-Python"]) == (HOOK, ">=3.9")
    assert {each["Version"] for each in about.values()} == {VERSION}


def test_each_has_the_shared_rules_as_real_text_and_a_wheel_from_the_sdist_is_the_same(
    built: dict[str, Distribution], tmp_path: Path
) -> None:
    rules = (ROOT / FOLDERS[HOOK] / SHARED[HOOK]).read_bytes()
    for name, each in built.items():
        with tarfile.open(each.sdist) as archive:
            assert all(member.isfile() or member.isdir() for member in archive)
            archive.extractall(tmp_path, filter="data")
        files = files_of(each.wheel)
        assert files[SHARED[name]] == rules
        again = files_of(build(tmp_path / each.sdist.name.removesuffix(".tar.gz")).wheel)
        own = MODULES[name]
        assert {path: data for path, data in again.items() if path.startswith(f"{own}/")} == {
            path: data for path, data in files.items() if path.startswith(f"{own}/")
        }


class Environment:
    """Without pip, setuptools and the checkout."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"

    def pip(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python, *arguments]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)

    def run(self, code: str, *arguments: object) -> str:
        command = [self.python, "-I", "-c", code, *arguments]
        return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout

    def has(self, module: str) -> bool:
        code = f"import importlib.util; print(importlib.util.find_spec({module!r}) is not None)"
        return self.run(code).strip() == "True"


@pytest.mark.parametrize("removed", [EXPORTER, HOOK])
def test_one_is_removed_and_the_other_is_used(removed: str, built: dict[str, Distribution], tmp_path: Path) -> None:
    kept = HOOK if removed == EXPORTER else EXPORTER
    environment = Environment(tmp_path / "venv")
    wheels = [built[name].wheel for name in (removed, kept)]
    environment.pip("install", "--no-deps", "--no-index", "--no-compile", *wheels)
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    environment.run(TRAIN, before)
    (path,) = before.glob("run-*.json")
    assert environment.run(READ, path).strip() == "60"

    environment.pip("uninstall", "--yes", removed)
    assert (environment.has(MODULES[removed]), environment.has(MODULES[kept])) == (False, True)
    if kept == EXPORTER:
        assert environment.run(READ, path).strip() == "60"
    else:
        environment.run(TRAIN, after)
        (path,) = after.glob("run-*.json")
        assert parse_report(path.read_bytes(), 0.0).steps == json.loads(path.read_text())["steps"] == 60
