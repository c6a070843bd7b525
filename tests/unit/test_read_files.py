"""The two patterns in which the program reads files."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_exporter.common.files import read_named, read_own

MOST = 100
READERS = (read_own, read_named)
Reader = Callable[[Path, int], bytes]


@pytest.mark.parametrize("read", READERS)
def test_a_whole_file_is_read_and_a_longer_one_refused(read: Reader, tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (0, 1, MOST):
        path.write_bytes(b"x" * size)
        assert read(path, MOST) == b"x" * size
    path.write_bytes(b"x" * (MOST + 1))
    with pytest.raises(OSError, match="longer than 100 bytes"):
        read(path, MOST)
    with path.open("r+b") as file:
        file.truncate(3 * 2**30)  # sparse
    with pytest.raises(OSError, match="longer than 100 bytes"):
        read(path, MOST)


@pytest.mark.parametrize("read", READERS)
def test_nothing_but_a_regular_file_is_opened(read: Reader, tmp_path: Path) -> None:
    fifo, listening = tmp_path / "fifo", tmp_path / "socket"
    os.mkfifo(fifo)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(listening))
        for path in (fifo, listening, tmp_path, Path("/dev/zero")):
            with pytest.raises(OSError, match="not a regular file"):
                read(path, MOST)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "missing", MOST)


def test_links_are_followed_only_where_an_administrator_names_the_file(tmp_path: Path) -> None:
    """A mounted Secret: its file leads to ..data/FILE, and ..data to the folder of the moment."""
    whole = tmp_path / "..2026"
    whole.mkdir()
    (whole / "token").write_bytes(b"secret")
    (tmp_path / "..data").symlink_to(whole.name)
    (tmp_path / "token").symlink_to("..data/token")
    assert read_named(tmp_path / "token", MOST) == b"secret"
    with pytest.raises(OSError, match="links are not followed"):
        read_own(tmp_path / "token", MOST)


def test_a_named_file_that_every_user_may_write_to_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "web.yaml"
    path.write_bytes(b"{}")
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_named(link, MOST) == b"{}"  # the mode of a link says nothing
    path.chmod(0o646)
    with pytest.raises(PermissionError, match="0646"):
        read_named(link, MOST)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_of_another_user_counts_only_where_that_user_is_expected(tmp_path: Path) -> None:
    path = tmp_path / "report"
    path.write_bytes(b"x")
    os.chown(path, 1234, -1)
    assert read_own(path, MOST, (1234,)) == b"x"
    with pytest.raises(PermissionError, match="uid 1234"):
        read_own(path, MOST, (1235,))
