"""Lines that are appended to a file: a part never counts as written, and never swallows the next line."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.testbed.full_disk import size_limited

from gpu_exporter.common.files import append_line, open_log, write_atomically
from gpu_exporter.reconciler.texts import TextFiles

MODE = 0o640
LINE = b'{"time": "x"}\n'
WRITER = """
import sys
from pathlib import Path
from gpu_exporter.common.files import append_line
for number in range(300):
    append_line(Path(sys.argv[1]), f"{sys.argv[2]} {number} {'x' * 500}\\n".encode(), 0o640)
"""


@pytest.mark.parametrize("kept", range(len(LINE) + 1))
def test_a_line_that_is_cut_is_an_error_and_the_next_one_begins_on_its_own(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "log"
    append_line(path, LINE, MODE)
    with size_limited(len(LINE) + kept):
        if kept < len(LINE):
            with pytest.raises(OSError, match=f"only {kept} of 14 bytes|File too large"):
                append_line(path, LINE, MODE)
        else:
            append_line(path, LINE, MODE)
    assert path.stat().st_size == len(LINE) + kept
    append_line(path, b"next\n", MODE)
    assert path.read_bytes().splitlines() == [LINE.strip(), *([LINE[:kept].rstrip(b"\n")] if kept else []), b"next"]


def test_a_part_that_an_earlier_process_left_ends_before_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"time": "x')
    append_line(path, LINE, MODE)
    assert path.read_bytes() == b'{"time": "x\n' + LINE


def test_while_another_process_writes_the_line_has_a_line_of_its_own_in_any_case(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append_line(path, LINE, MODE)
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        append_line(path, LINE, MODE)
    assert path.read_bytes() == LINE + b"\n" + LINE


def test_between_the_look_at_the_end_and_the_line_no_other_process_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write, tried = tmp_path / "log", os.write, []

    def try_lock(handle: int, data: bytes) -> int:
        with path.open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        tried.append(data)
        return write(handle, data)

    monkeypatch.setattr(os, "write", try_lock)
    append_line(path, LINE, MODE)
    assert tried == [LINE]


def test_the_lines_of_several_processes_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, path, name]) for name in "abc"]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    lines = [line for line in path.read_text().split("\n") if line]
    assert sorted(lines) == sorted(f"{name} {number} {'x' * 500}" for name in "abc" for number in range(300))


def test_only_a_regular_file_without_a_link_is_appended_to(tmp_path: Path) -> None:
    fifo, link, listening = tmp_path / "fifo", tmp_path / "link", tmp_path / "socket"
    os.mkfifo(fifo)
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="links are not followed"):
        append_line(link, LINE, MODE)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(listening))
        for path, said in (
            (fifo, "not a regular file"),
            (Path("/dev/null"), "not a regular file"),
            (listening, "No such device"),
        ):
            with pytest.raises(OSError, match=said):
                append_line(path, LINE, MODE)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_the_file_of_another_user_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"")
    os.chown(path, 1234, -1)
    with pytest.raises(PermissionError, match="uid 1234"):
        open_log(path, MODE)
    assert path.read_bytes() == b""


def test_a_text_that_an_act_follows_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names, **places: (done.append("replace"), replace(*names, **places)))
    TextFiles(tmp_path).write_text("journal", "x")
    assert done == ["fsync", "replace", "fsync"], "the file, its name, the folder"
    done.clear()
    write_atomically(tmp_path / "t.prom", b"x")
    assert done == ["replace"]
