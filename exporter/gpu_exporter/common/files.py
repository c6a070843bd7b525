"""Writes files that other programs read: completely or not at all, and never through a link of another user.

There are two ways to read a file. `read_own` is for files that the program wrote, or whose directory other users can
write to. It accepts only a regular file of a known user, and no link. `read_named` is for files that an administrator
names. It follows links, because every file of a mounted Secret is a link. The target must be a regular file that not
every user can write to. Both ways limit the size, open no device, and never wait for the writer of a FIFO.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

if TYPE_CHECKING:
    import gzip

READABLE = 0o644  # regardless of the umask: node_exporter runs as another user
PRIVATE = 0o600
DIRECTORY = 0o755
LINK = "it is a link, and links are not followed here"
CHUNK = 256 * 1024
ACL = "system.posix_acl_access"
NOBODY = 0xFFFFFFFF  # the id of an entry that has none
Check: TypeAlias = Callable[[os.stat_result], None]
"""Looks at a file before it is opened. Raises an error to refuse the file."""


class SharedDirectory(PermissionError):
    """A directory is not safe, because every user can write in it."""

    def __init__(self, mode: int, path: Path) -> None:
        reason = f"every user can write in it (mode {stat.S_IMODE(mode):04o}): chmod o-w"
        super().__init__(errno.EPERM, reason, str(path))


def accept(status: os.stat_result) -> None:
    """The Check that refuses nothing."""
    del status


def write_atomically(
    path: Path, body: bytes, mode: int = READABLE, *, is_durable: bool = False, reader: int = 0
) -> None:
    """Writes a new file beside `path` and renames it to `path`, so that a reader sees the old or the new file, never a
    part. With `is_durable`, returns only after the new file is safe against a power failure. `reader`: the uid of
    another user who may read it, if the file system has access control lists.

    Raises OSError; PermissionError if any user may create or rename files in the directory. After an error, the old
    file remains, and no other file is left beside it. Every step uses descriptors: between two steps by name, the owner
    of the directory could replace a name by a link to another file.
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
                if reader:
                    _let_read(handle, reader)
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


def _let_read(handle: int, uid: int) -> None:
    """Lets one more user read an open file of mode PRIVATE. Does nothing without access control lists.

    The attribute has a version, then tag, permissions and id of each entry (linux/posix_acl_xattr.h): the owner, the
    user, the group, the mask of the two, and others.
    """
    entries = ((0x01, 6, NOBODY), (0x02, 4, uid), (0x04, 0, NOBODY), (0x10, 4, NOBODY), (0x20, 0, NOBODY))
    with contextlib.suppress(OSError):
        os.setxattr(handle, ACL, struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *each) for each in entries))


def open_log(path: Path, mode: int) -> int:
    """Opens a file to which this program appends lines, and creates it if it is missing. Returns the descriptor.

    Raises OSError if the file cannot be opened, is a link or not a regular file, or belongs to a user who is neither
    root nor the user of this process.
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
    """Appends a line to a file that `open_log` opens. Several processes may append at the same time.

    Raises OSError, also if only a part of the line was written. The next line then begins on a new line.
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
    """Writes in one call, so that the data of two processes do not mix. Raises OSError if only a part was written."""
    written = os.write(handle, data)
    if written != len(data):
        raise OSError(errno.EIO, f"only {written} of {len(data)} bytes were written")


def read_gzip(path: Path, most: int) -> bytes:
    """Unpacks a gzip file. Raises ValueError for more than `most` bytes; also OSError, EOFError.

    The limit is needed because a file of 3 MB can contain 3 GB.
    """
    import gzip
    import zlib

    try:
        with open_named(path) as packed, gzip.open(packed) as file:
            is_longer = os.fstat(packed.fileno()).st_size > most  # gzip reads zeros behind the data byte by byte
            data = None if is_longer else _read_up_to(file, most)
    except zlib.error as exc:
        raise OSError(f"damaged: {exc}") from exc
    if data is None:
        raise ValueError(f"holds more than {most // 2**20} MiB")
    return data


def read_own(path: Path | str, most: int, uids: Collection[int] = (), check: Check = accept) -> bytes:
    """Reads a file that this program wrote, or whose directory other users can write to.

    Raises OSError if the file cannot be read, is a link or not a regular file, has more than `most` bytes, or belongs
    to a user who is neither root nor the user of this process nor in `uids`. Raises each error that `check` raises.
    """

    def is_ours(status: os.stat_result) -> None:
        _refuse_foreign(status, path, uids)
        check(status)

    with open_regular(path, is_ours) as file:
        return read_within(file, path, most)


def read_kept(path: Path, most: int, check: Check = accept) -> bytes:
    """Reads like `read_own`, from a state directory. Also accepts files of the directory's owner.

    Raises PermissionError too if every user can write in the directory.
    """
    return read_own(path, most, (check_kept(path.parent),), check)


def read_named(path: Path, most: int) -> bytes:
    """Reads a file that `open_named` accepts. Raises OSError, e.g. if it has more than `most` bytes."""
    with open_named(path) as file:
        return read_within(file, path, most)


def open_named(path: Path) -> BinaryIO:
    """Opens for reading a file that an administrator names. Follows links.

    Raises OSError if the file cannot be opened or is not a regular file, or if every user can write to it.
    """

    def is_safe(status: os.stat_result) -> None:
        if status.st_mode & stat.S_IWOTH:
            reason = f"every user can write to it (mode {stat.S_IMODE(status.st_mode):04o}): chmod o-w"
            raise PermissionError(errno.EPERM, reason, str(path))

    return open_regular(path, is_safe, follows=True)


def open_regular(
    path: Path | str, check: Check = accept, *, follows: bool = False, directory: int | None = None
) -> BinaryIO:
    """Opens a regular file for reading.

    `check`: gets the file's status before the file is opened, and raises an error to refuse the file. `follows`:
    whether `path` may be a link. `directory`: descriptor of the directory in which `path` is looked up.

    Raises OSError if the file cannot be opened or is not a regular file, or if another process holds a file
    lease on it (fcntl F_SETLEASE).
    """
    flags = os.O_PATH | os.O_CLOEXEC | (0 if follows else os.O_NOFOLLOW)
    handle = os.open(path, flags, dir_fd=directory)
    try:  # only now is it known that opening the file does nothing else: the open of a device may act
        status = os.fstat(handle)
        _refuse_irregular(status, path)
        check(status)
        # Without O_NONBLOCK, open waits up to lease-break-time (45 s) for the holder of a lease: fcntl(2).
        return os.fdopen(os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except BlockingIOError as exc:
        raise OSError(errno.EBUSY, "another process holds a file lease on it (fcntl F_SETLEASE)", str(path)) from exc
    finally:
        os.close(handle)


def read_within(file: BinaryIO, path: Path | str, most: int) -> bytes:
    """Reads an open file to its end. Raises OSError if it cannot be read or has more than `most` bytes."""
    is_longer = os.fstat(file.fileno()).st_size > most
    data = None if is_longer else _read_up_to(file, most)
    if data is None:
        raise OSError(errno.EFBIG, f"it is longer than {most} bytes", str(path))
    return data


def _read_up_to(file: BinaryIO | gzip.GzipFile, most: int) -> bytes | None:
    """Returns the content, None if it is longer than `most` bytes. Reads in parts, because one read of `most` bytes
    would reserve that memory even for a short file.
    """
    parts: list[bytes] = []
    while part := file.read(CHUNK):
        most -= len(part)
        if most < 0:
            return None
        parts.append(part)
    return b"".join(parts)


def lock_kept(path: Path) -> int:
    """Locks a file, and creates it if it is missing. Returns the descriptor; closing it ends the lock.

    Raises OSError: BlockingIOError if another process has the lock; also for a file that `open_log` refuses.
    """
    handle = open_log(path, PRIVATE)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(handle)
        raise
    return handle


@contextlib.contextmanager
def in_memory(content: bytes) -> Iterator[str]:
    """Yields a path to this content in memory, which only this process can use. OpenSSL reads certificates only from
    paths, and the original files may have changed since they were read.
    """
    with os.fdopen(os.memfd_create("content"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _refuse_irregular(status: os.stat_result, path: Path | str) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, LINK, str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def _refuse_foreign(status: os.stat_result, path: Path | str, uids: Collection[int]) -> None:
    if status.st_uid not in (0, os.geteuid(), *uids):
        raise PermissionError(errno.EPERM, f"it belongs to another user (uid {status.st_uid})", str(path))


def refuse_shared(directory: int, path: Path) -> None:
    """Raises PermissionError if every user may rename files in an open directory.

    A directory with a sticky bit is accepted, because write_atomically creates a new file, and opens no file of another
    user.
    """
    mode = os.fstat(directory).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise SharedDirectory(mode, path)


def check_kept(directory: Path) -> int:
    """Returns the owner of a state directory. Raises SharedDirectory if every user can write in it, even with a sticky
    bit.

    Another user could create a file there first, and this program would read it, lock it or connect to it.
    """
    status = directory.stat()
    if status.st_mode & stat.S_IWOTH:
        raise SharedDirectory(status.st_mode, directory)
    return status.st_uid


def make_directory(path: Path) -> None:
    """Creates a state directory and its missing parents, with DIRECTORY's permissions regardless of the umask.

    Raises OSError; PermissionError if the directory exists and another user can write in it. The directory's group may
    write, because a pod's volume belongs to the pod's group.
    """
    for missing in [place for place in (*reversed(path.parents), path) if not place.exists()]:
        with contextlib.suppress(FileExistsError):
            missing.mkdir(DIRECTORY)
    owner = check_kept(path)
    if owner not in (0, os.geteuid()):
        reason = f"it belongs to another user (uid {owner}), who can write in it: chown it to uid {os.geteuid()}"
        raise PermissionError(errno.EPERM, reason, str(path))
