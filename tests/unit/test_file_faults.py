"""A file that is torn, empty, foreign, endless or no file gives the same answer as before, or none, and a line says so."""

from __future__ import annotations

import ast
import importlib
import os
import signal
import stat
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.testbed.file_programs import CLOSED, Look, Refused
from tests.testbed.file_rows import EXEMPT, ROWS, Row
from tests.testbed.full_disk import size_limited

import gpu_exporter
from gpu_exporter.agent.attribution.identity import KeyUnusable
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reconciler.marks import MarkError
from gpu_exporter.reconciler.pause import PauseUnreadable

PACKAGE = Path(gpu_exporter.__file__).parent
# What the callers of these functions turn into a line.
ERRORS = (OSError, EOFError, ValueError, SourceError, KeyUnusable, PauseUnreadable, AnswerError, MarkError, Refused)
READ = [pytest.param(row, id=row.name) for row in ROWS if row.start is not None]
WRITTEN = [pytest.param(row, id=row.name) for row in ROWS if row.write is not None]
MEMORY_MAX = 8 * 2**20
HANG_S = 30.0
SPARSE = 3 * 2**30
STRANGER = 4711


@pytest.fixture(autouse=True, scope="module")
def kubernetes_client() -> None:
    """On a busy machine with a cold cache, its import alone takes HANG_S."""
    importlib.import_module("gpu_exporter.reconciler.kubernetes.client.api")


class Hangs(BaseException):
    """An answer took longer than HANG_S."""


def _give_up(*_: object) -> None:
    raise Hangs


@contextmanager
def within_time() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _give_up)
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


class Asked:
    """Asks a program, and keeps what it said."""

    def __init__(self, row: Row, caplog: pytest.LogCaptureFixture) -> None:
        assert row.start is not None
        self._row, self._start, self._caplog = row, row.start, caplog
        self.said = ""

    def start(self, path: Path) -> object:
        """The answer of a program that starts now."""
        return self.look(lambda: self._start(path)())

    def begin(self, path: Path) -> Look:
        """What gives the answers of a program that runs."""
        look = self._start(path)
        return lambda: self.look(look)

    def look(self, look: Look) -> object:
        self._caplog.clear()
        try:
            with within_time():
                answer = look()
        except ERRORS as exc:
            self.said = str(exc)
            return CLOSED
        self.said = self._caplog.text
        return answer

    def check(self, answer: object, whole: object, what: str) -> None:
        """The answer must be that of the whole file, or none, with a line."""
        assert answer in (whole, CLOSED), f"{self._row.name}, {what}: {answer}"
        if answer == CLOSED and not self._row.silent:
            assert self.said.strip(), f"{self._row.name}, {what}: no line says that the file is not used"


@pytest.fixture
def asked(row: Row, caplog: pytest.LogCaptureFixture) -> Asked:
    return Asked(row, caplog)


def places(data: bytes, most: int) -> list[int]:
    """Where a file is cut: at every byte, of a long one at `most` bytes, and at every end of a line."""
    step = max(1, len(data) // most)
    ends = [at for at in range(len(data)) if data[at : at + 1] == b"\n"]
    return sorted({*range(0, len(data), step), *ends[:most], *(end + 1 for end in ends[:most])} - {len(data)})


@pytest.mark.parametrize("when", ["at the start", "while it runs"])
@pytest.mark.parametrize("row", READ)
def test_a_torn_file_gives_the_same_answer_or_none(row: Row, when: str, asked: Asked, tmp_path: Path) -> None:
    path = row.make(tmp_path)
    data, whole = path.read_bytes(), asked.start(path)
    assert whole != CLOSED, asked.said
    runs = when == "while it runs"
    for place in places(data, row.places):
        running = asked.begin(path) if runs else lambda: asked.start(path)
        if runs:
            assert running() == whole
        path.write_bytes(data[:place])
        answer = running()
        if not (row.cut and place) or (runs and row.only_at_start):
            asked.check(answer, whole, f"the first {place} bytes, {when}")
        path.unlink()
        row.make(tmp_path)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o644)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def device(path: Path) -> None:
    """A node of /dev/zero; a link to it where no node can be made."""
    path.unlink()
    try:
        os.mknod(path, 0o644 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        path.symlink_to("/dev/zero")


def endless_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    os.truncate(path, SPARSE)


def twice(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def from_the_future(path: Path) -> None:
    os.utime(path, (time.time() + 86_400, time.time() + 86_400))


def open_to_all(path: Path) -> None:
    path.chmod(0o666)


FAULTS = (empty, fifo, folder, device, endless_link, sparse, twice, from_the_future, open_to_all)


@pytest.mark.parametrize("row", READ)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_gives_the_same_answer_or_none_within_time_and_memory(
    row: Row, asked: Asked, fault: Callable[[Path], None], tmp_path: Path
) -> None:
    path = row.make(tmp_path)
    whole, running = asked.start(path), asked.begin(path)
    assert running() == whole
    fault(path)
    tracemalloc.start()
    try:
        asked.check(running(), whole, "running")
        found = asked.start(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    asked.check(found, whole, "at the start")
    assert peak < MEMORY_MAX


@pytest.mark.parametrize("row", READ)
def test_a_link_is_followed_only_where_an_administrator_names_the_file(row: Row, asked: Asked, tmp_path: Path) -> None:
    path = row.make(tmp_path)
    whole, running = asked.start(path), asked.begin(path)
    target = tmp_path / "target"
    path.rename(target)
    path.symlink_to(target)
    for answer in (running(), asked.start(path)):
        asked.check(answer, whole, "a link")
        if row.name not in ("gres.conf", "devices.json"):  # its order is older; what is known remains
            assert answer == (whole if row.named else CLOSED)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("row", READ)
def test_a_file_of_another_user_counts_only_where_an_administrator_names_it(
    row: Row, asked: Asked, tmp_path: Path
) -> None:
    path = row.make(tmp_path)
    whole = asked.start(path)
    os.chown(path, STRANGER, -1)
    answer = asked.start(path)
    asked.check(answer, whole, "of another user")
    assert answer == CLOSED or row.named


@pytest.mark.parametrize("row", WRITTEN)
@pytest.mark.parametrize("room", [0, 1, 50])
def test_what_a_full_disk_cannot_take_leaves_the_old_file_and_says_so(
    row: Row, room: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert row.write is not None
    path = row.make(tmp_path)
    before, beside = path.read_bytes(), {each.name for each in tmp_path.iterdir()}
    caplog.clear()
    said = ""
    with size_limited(room):
        try:
            row.write(path)
        except ERRORS as exc:
            said = str(exc)
    assert said or caplog.text
    if path.exists():
        assert path.read_bytes() == before
    else:
        assert row.name == "identity.key"  # there was none: a key is only made where there is none
    assert {each.name for each in tmp_path.iterdir()} | {path.name} == beside
    row.write(row.make(tmp_path))
    assert path.read_bytes() != before


OPENS = {
    *("open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes", "memfd_create", "mkstemp"),
    *("load_cert_chain", "load_verify_locations", "create_default_context"),
    *("load_kube_config", "load_incluster_config"),
    *("read_own", "read_kept", "read_named", "open_named", "open_regular", "read_gzip", "in_memory"),
    *("lock_kept", "open_log", "append_line", "write_atomically"),
}


def functions_that_open(node: ast.AST, name: str) -> Iterator[str]:
    """The functions below a node in which something is opened, by name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from functions_that_open(child, f"{name}.{child.name}".removeprefix("."))
            continue
        if isinstance(child, ast.Call):
            called = child.func.id if isinstance(child.func, ast.Name) else getattr(child.func, "attr", "")
            if called in OPENS:
                yield name
        yield from functions_that_open(child, name)


def test_every_file_that_is_opened_has_a_row_or_a_reason_why_not() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{name}"
        for path in PACKAGE.rglob("*.py")
        for name in functions_that_open(ast.parse(path.read_text("utf-8")), "")
    }
    listed = [*(site for row in ROWS for site in row.sites), *EXEMPT]
    assert len(listed) == len(set(listed))
    assert sorted(found - set(listed)) == []
    assert sorted(set(listed) - found) == []
