"""Files that others read: written whole or not at all, and never through what somebody else has put in their place."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

READABLE = 0o644  # whatever the umask is: node_exporter runs as another user
PRIVATE = 0o600
DIRECTORY = 0o755


def write_atomically(path: Path, body: bytes, mode: int = READABLE) -> None:
    """Write beside `path` and rename over it, so that a reader sees the old or the new file, never half.

    Raises OSError: PermissionError for a directory in which any user may put or rename files. The old file then stays,
    and nothing is left beside it. Everything is done on descriptors: who owns the directory may exchange a name for a
    link between two steps, and a change by name would then be one of another file.
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
    """What a gzip file holds. Raises ValueError for one that holds more than `most` bytes; OSError, EOFError.

    A file of 3 MB can hold 3 GB.
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
    """What a file holds. Raises ValueError for more than `most` bytes, OSError."""
    with path.open("rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise ValueError(f"holds more than {most // 2**20} MiB")
    return data


def refuse_shared(directory: int, path: Path) -> None:
    """Raise PermissionError for an open directory in which every user may rename files, which a sticky bit prevents."""
    mode = os.fstat(directory).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        reason = f"every user may write in it (mode {stat.S_IMODE(mode):04o}): chmod o-w"
        raise PermissionError(errno.EPERM, reason, str(path))


def make_directory(path: Path) -> None:
    """Make it and what is missing above it, with DIRECTORY's permissions whatever the umask is.

    Raises OSError, PermissionError for one that is there and in which every user may write.
    """
    for missing in [place for place in (*reversed(path.parents), path) if not place.exists()]:
        with contextlib.suppress(FileExistsError):
            missing.mkdir(DIRECTORY)
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        refuse_shared(directory, path)
    finally:
        os.close(directory)
