"""Writes files that other programs read: completely or not at all, and never through a link of another user."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

READABLE = 0o644  # regardless of the umask: node_exporter runs as another user
PRIVATE = 0o600
DIRECTORY = 0o755


def write_atomically(path: Path, body: bytes, mode: int = READABLE) -> None:
    """Write a new file beside `path` and rename it to `path`, so that a reader sees the old or the new file, never a
    part.

    Raises OSError; PermissionError if any user may create or rename files in the directory. After an error the old file
    remains, and no other file is left beside it. Every step uses descriptors: the owner of the directory may replace a
    name by a link between two steps, and a change by name would then change another file.
    """
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        refuse_shared(directory, path.parent)
        fresh = f".{path.name}.{os.urandom(6).hex()}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(fresh, flags, PRIVATE, dir_fd=directory)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(body)
                os.fchmod(handle, mode)
            os.replace(fresh, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(fresh, dir_fd=directory)
            raise
    finally:
        os.close(directory)


def read_gzip(path: Path, most: int) -> bytes:
    """The content of a gzip file. Raises ValueError if it is longer than `most` bytes; OSError, EOFError.

    The limit is needed because a file of 3 MB can contain 3 GB.
    """
    import gzip
    import zlib

    try:
        with gzip.open(path) as file:
            data = file.read(most + 1)
    except zlib.error as exc:
        raise OSError(f"damaged: {exc}") from exc
    if len(data) > most:
        raise ValueError(f"holds more than {most // 2**20} MiB")
    return data


def read_plain(path: Path, most: int) -> bytes:
    """The content of a file. Raises ValueError if it is longer than `most` bytes; OSError."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"holds more than {most // 2**20} MiB")
    return data


def refuse_shared(directory: int, path: Path) -> None:
    """Raise PermissionError if every user may rename files in an open directory; a sticky bit prevents that."""
    mode = os.fstat(directory).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        reason = f"every user may write in it (mode {stat.S_IMODE(mode):04o}): chmod o-w"
        raise PermissionError(errno.EPERM, reason, str(path))


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, with DIRECTORY's permissions regardless of the umask.

    Raises OSError; PermissionError if the directory exists and every user may write in it.
    """
    for missing in [place for place in (*reversed(path.parents), path) if not place.exists()]:
        with contextlib.suppress(FileExistsError):
            missing.mkdir(DIRECTORY)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        refuse_shared(directory, path)
    finally:
        os.close(directory)
