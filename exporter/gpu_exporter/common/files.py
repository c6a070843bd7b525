"""Writes files that other programs read: completely or not at all, and never through a link of another user.

Reads files in one of two patterns. `read_own`: what the program wrote, or what lies where other users may write: only a
regular file of a known user, and no link. `read_named`: what an administrator names: links are followed, since every
file of a mounted Secret is one, but the target is regular, and not every user may write to it. Both limit the size, and
neither waits for the writer of a FIFO nor opens a device.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection
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


def read_own(path: Path, most: int, uids: Collection[int] = ()) -> bytes:
    """The content of a file that this program wrote, or that lies where other users may write.

    Raises OSError: also for a link, for anything but a regular file, for more than `most` bytes, and for the file of a
    user who is neither root nor the user of this process nor in `uids`.
    """
    handle = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if stat.S_ISLNK(status.st_mode):
            raise OSError(errno.ELOOP, "it is a link, and links are not followed here", str(path))
        if status.st_uid not in (0, os.geteuid(), *uids):
            raise PermissionError(errno.EPERM, f"it belongs to another user (uid {status.st_uid})", str(path))
        return _read_regular(handle, status, path, most)
    finally:
        os.close(handle)


def read_named(path: Path, most: int) -> bytes:
    """The content of a file that an administrator names, or to which a named link leads.

    Raises OSError: also for anything but a regular file, for more than `most` bytes, and for a file that every user may
    write to.
    """
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IWOTH:
            reason = f"every user may write to it (mode {stat.S_IMODE(status.st_mode):04o}): chmod o-w"
            raise PermissionError(errno.EPERM, reason, str(path))
        return _read_regular(handle, status, path, most)
    finally:
        os.close(handle)


def _read_regular(handle: int, status: os.stat_result, path: Path, most: int) -> bytes:
    """The content of what a descriptor of O_PATH names: only then is it known that opening it does nothing else."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    # Without O_NONBLOCK, open waits up to lease-break-time (45 s) for the holder of a lease: fcntl(2).
    opened = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(opened, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is longer than {most} bytes", str(path))
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
