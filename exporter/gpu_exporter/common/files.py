"""Writes files that other programs read: completely or not at all, and never through a link of another user.

Reads files in one of two patterns. `read_own`: what the program wrote, or what lies where other users may write: only a
regular file of a known user, and no link. `read_named`: what an administrator names: links are followed, since every
file of a mounted Secret is one, but the target is regular, and not every user may write to it. Both limit the size, and
neither waits for the writer of a FIFO nor opens a device.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

READABLE = 0o644  # regardless of the umask: node_exporter runs as another user
PRIVATE = 0o600
DIRECTORY = 0o755
LINK = "it is a link, and links are not followed here"


def write_atomically(path: Path, body: bytes, mode: int = READABLE, *, is_durable: bool = False) -> None:
    """Write a new file beside `path` and rename it to `path`, so that a reader sees the old or the new file, never a
    part. With `is_durable`, return only when the new file would outlive a power failure.

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
                if is_durable:
                    file.flush()
                    os.fsync(handle)
            os.replace(fresh, path.name, src_dir_fd=directory, dst_dir_fd=directory)
            if is_durable:
                os.fsync(directory)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(fresh, dir_fd=directory)
            raise
    finally:
        os.close(directory)


def open_log(path: Path, mode: int) -> int:
    """The descriptor of a file to which this program appends lines; a missing file is created.

    Raises OSError: also for a link, for anything but a regular file, and for the file of a user who is neither root nor
    the user of this process.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, mode)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, LINK, str(path)) from exc
        raise
    try:
        status = os.fstat(handle)
        _refuse_foreign(status, path, ())
        _refuse_irregular(status, path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def append_line(path: Path, line: bytes, mode: int) -> None:
    """Append a line to the file of `open_log`. Several processes may do so.

    Raises OSError: also if only a part was written. A line after such a part begins on a line of its own.
    """
    handle = open_log(path, mode)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(handle).st_size
            is_torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        except OSError:  # another process writes, or the file system has no locks: rather an empty line
            is_torn = True
        write_whole(handle, b"\n" + line if is_torn else line)
    finally:
        os.close(handle)


def write_whole(handle: int, data: bytes) -> None:
    """Write in one call, so that the data of two processes do not mix. Raises OSError if only a part was written."""
    written = os.write(handle, data)
    if written != len(data):
        raise OSError(errno.EIO, f"only {written} of {len(data)} bytes were written")


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
            raise OSError(errno.ELOOP, LINK, str(path))
        _refuse_foreign(status, path, uids)
        with _open_regular(handle, status, path) as file:
            return _read_within(file, path, most)
    finally:
        os.close(handle)


def read_named(path: Path, most: int) -> bytes:
    """The content of the file of `open_named`. Raises OSError; also for more than `most` bytes."""
    with open_named(path) as file:
        return _read_within(file, path, most)


def open_named(path: Path) -> BinaryIO:
    """A file that an administrator names, or to which a named link leads, to be read.

    Raises OSError: also for anything but a regular file, and for a file that every user may write to.
    """
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if stat.S_ISREG(status.st_mode) and status.st_mode & stat.S_IWOTH:
            reason = f"every user may write to it (mode {stat.S_IMODE(status.st_mode):04o}): chmod o-w"
            raise PermissionError(errno.EPERM, reason, str(path))
        return _open_regular(handle, status, path)
    finally:
        os.close(handle)


def _refuse_foreign(status: os.stat_result, path: Path, uids: Collection[int]) -> None:
    if status.st_uid not in (0, os.geteuid(), *uids):
        raise PermissionError(errno.EPERM, f"it belongs to another user (uid {status.st_uid})", str(path))


def _refuse_irregular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def _open_regular(handle: int, status: os.stat_result, path: Path) -> BinaryIO:
    """Open what a descriptor of O_PATH names: only then is it known that opening it does nothing else."""
    _refuse_irregular(status, path)
    # Without O_NONBLOCK, open waits up to lease-break-time (45 s) for the holder of a lease: fcntl(2).
    return os.fdopen(os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def _read_within(file: BinaryIO, path: Path, most: int) -> bytes:
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
