"""Files that other programs read: written completely or not at all, and never through another user's link."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_exporter.agent.inventory.expected import ExpectedDevice, ExpectedDevices
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.common.files import PRIVATE, make_directory, read_kept, write_atomically


@pytest.fixture(params=[0o000, 0o077], ids=["umask 000", "umask 077"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("umask")
def test_file_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.prom", b"up 1\n")
    write_atomically(tmp_path / "state", b"x", PRIVATE)
    assert (mode(tmp_path / "a.prom"), mode(tmp_path / "state")) == (0o644, 0o600)


def test_with_a_umask_of_0_no_other_user_may_change_the_exporters_files(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        directory = tmp_path / "a" / "b"
        state = StateFile(directory, 10.0, "boot")
        state.acquire()
        state.commit(state.prepare(Ledger(LedgerRules(5.0, 3, 0.1, 0.7, 60.0), 0.0)))
        devices = ExpectedDevices(directory, "boot")
        devices.note([ExpectedDevice("GPU-a", "0000:10:00.0", 0, "H100")])
        devices.save()
        state.release()
    finally:
        os.umask(before)
    found = {path.name: mode(path) for path in (directory.parent, directory, *directory.iterdir())}
    assert found == {"a": 0o755, "b": 0o755, "state": 0o600, "lock": 0o600, "devices.json": 0o644}


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.prom"
    for body in (b"one", b"two"):
        write_atomically(path, body)
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.prom"]


@pytest.mark.parametrize("call", ["fchmod", "replace"])
def test_if_a_step_fails_only_the_old_file_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "a.prom"
    write_atomically(path, b"old")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.prom"]


def test_a_link_at_the_path_of_the_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    secret, path = tmp_path / "secret", tmp_path / "a.prom"
    secret.write_text("secret")
    secret.chmod(0o600)
    path.symlink_to(secret)
    write_atomically(path, b"up 1\n")
    assert not path.is_symlink()
    assert (secret.read_text(), mode(secret)) == ("secret", 0o600)


@pytest.mark.parametrize(
    ("permissions", "textfile", "state"), [(0o777, False, False), (0o1777, True, False), (0o2775, True, True)]
)
def test_a_directory_in_which_every_user_may_rename_or_make_files_is_refused(
    tmp_path: Path, permissions: int, textfile: bool, state: bool
) -> None:
    """With a sticky bit nobody may rename the files of others: enough for textfiles, but not for what is read there."""
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(permissions)

    def expected(accepted: bool) -> contextlib.AbstractContextManager[object]:
        refusal = f"every user can write in it .mode {permissions:04o}.: chmod o-w"
        return contextlib.nullcontext() if accepted else pytest.raises(PermissionError, match=refusal)

    with expected(textfile):
        write_atomically(directory / "a.prom", b"x")
    with expected(state):
        make_directory(directory)
    (directory / "state").write_bytes(b"x")
    with expected(state):
        assert read_kept(directory / "state", 10) == b"x"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_a_directory_of_state_that_belongs_to_another_user_is_read_by_tools_and_refused_by_its_writer(
    tmp_path: Path,
) -> None:
    """`--once` of root asks in the directory of an exporter that runs as another user."""
    directory = tmp_path / "state"
    directory.mkdir()
    path = directory / "devices.json"
    path.write_bytes(b"{}")
    os.chown(directory, 1234, -1)
    os.chown(path, 1234, -1)
    assert read_kept(path, 10) == b"{}"
    with pytest.raises(PermissionError, match="belongs to another user .uid 1234., who can write in it: chown"):
        make_directory(directory)
    os.chown(path, 1235, -1)
    with pytest.raises(PermissionError, match="uid 1235"):
        read_kept(path, 10)


EXCHANGE = """
import os, sys
directory, secret = sys.argv[1:]
os.setuid(65534)
print("ready", flush=True)
while True:
    for name in os.listdir(directory):
        if name.startswith("."):
            try:
                os.unlink(f"{directory}/{name}")
                os.symlink(secret, f"{directory}/{name}")
            except OSError:
                pass
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")
def test_the_owner_of_the_directory_cannot_make_the_exporter_change_another_file() -> None:
    """The owner replaces each new file by a link at full speed; with a chmod by path the other file is opened in 8 s."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        secret, directory = place / "secret", place / "textfile"
        secret.write_text("secret")
        secret.chmod(0o600)
        directory.mkdir()
        os.chown(directory, 65534, 65534)
        command = [sys.executable, "-c", EXCHANGE, str(directory), str(secret)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as attacker:
            assert attacker.stdout is not None
            assert attacker.stdout.readline() == b"ready\n"
            exchanged = 0
            for _ in range(5000):
                with contextlib.suppress(OSError):
                    write_atomically(directory / "a.prom", b"up 1\n" * 100)
                exchanged += (directory / "a.prom").is_symlink()
            assert attacker.poll() is None
            attacker.kill()
        assert (secret.read_text(), mode(secret)) == ("secret", 0o600)
    print(f"{exchanged} of 5000 files were exchanged for a link")
