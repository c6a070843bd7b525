"""Fixtures for every test: the comparison with golden files, and the parts of the test bed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.limits import Advice
from tests.testbed.nvml.build import build_library
from tests.testbed.nvml.feeder import NvmlTable
from tests.testbed.processes import Processes
from tests.testbed.programs import QUICK

ROOT = Path(__file__).parent
GOLDEN = ROOT / "golden"
# No deadline: the duration of an example depends on the machine, not on the code.
settings.register_profile(
    "gpu-exporter", deadline=None, print_blob=True
)  # the blob reproduces a failure on another machine
settings.load_profile("gpu-exporter")
FAILED = pytest.StashKey[bool]()


# What makes a test too long for `make test`, or needs a server. Every other test is `quick`.
LONG = {"slow", "servers", "slurm", "kubelet", "kubernetes", "browser", "realtime"}
# What is started once for all tests of a folder.
SHARED = {"taken_back"}
SLURM_RELEASES = ("22.05", "24.11", "26.05")
# Their files take longest. They begin first, so that no process is left alone with one at the end.
LONGEST_FILE = "test_rules.py"
LONGEST = ("realtime", "slurm", "kubernetes", "servers")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files instead of comparing")


def pytest_configure(config: pytest.Config) -> None:
    """Every other warning is an error (pyproject.toml). The programs under test start with signals that are not ignored,
    also below `nohup` or `&` in a script, where SIGINT is: a program leaves that so.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("filterwarnings", f"always::{Advice.__module__}.{Advice.__name__}")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give each test its tier."""
    if not LONG.intersection(mark.name for mark in item.iter_markers()):
        item.add_marker("quick")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    (QUICK.clear if item.get_closest_marker("quick") is None else QUICK.set)()


def group_of(test: str) -> str:
    """The group of a test by its id. One process runs a group, since its tests share what the first of them starts."""
    file, _, name = test.partition("::")
    folder = str(Path(file).parent)
    release = next((each for each in SLURM_RELEASES if re.search(rf"[\[-]{re.escape(each)}[]-]", name)), "")
    return f"{folder if Path(folder).name in SHARED else file} {release}".strip()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups of `group_of`. The marks of --dist=loadgroup do not work: xdist 3.8 writes them into a part of the test's
    id that pytest 9.2 no longer reads.
    """
    from xdist.scheduler import LoadScopeScheduling  # only where processes run tests

    class Groups(LoadScopeScheduling):  # type: ignore[misc,unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Groups(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        marks = (i for i, name in enumerate(LONGEST) if item.get_closest_marker(name))
        return -1 if item.path.name == LONGEST_FILE else next(marks, len(LONGEST))

    items.sort(key=rank)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with tests/golden/NAME, byte for byte."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run `make golden` and review it"
        assert text == path.read_text("utf-8"), f"{path} differs: run `make golden` and review the diff"

    return compare


@pytest.fixture(scope="session")
def nvml_directory() -> Path:
    """The directory of the fake libnvidia-ml.so.1."""
    return build_library()


@pytest.fixture
def nvml_table(tmp_path: Path) -> NvmlTable:
    """An empty table for the fake library."""
    return NvmlTable(tmp_path / "nvml-table")


@pytest.fixture
def nvml_environment(nvml_directory: Path, nvml_table: NvmlTable) -> dict[str, str]:
    """The environment in which the fake library replaces the driver's."""
    return {
        **os.environ,
        "LD_LIBRARY_PATH": str(nvml_directory),
        "GPU_EXPORTER_NVML_TABLE": str(nvml_table.path),
    }


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Tell fixtures whether the test failed."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture
def processes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Processes]:
    """Starts programs, and ends them with the test. Prints their logs if the test failed."""
    with Processes(tmp_path) as started:
        yield started
        if request.node.stash.get(FAILED, False):
            started.print_logs()
