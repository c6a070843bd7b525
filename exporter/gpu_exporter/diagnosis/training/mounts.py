"""Finds job folders on file systems that may never answer, from the mount table.

Users can mount FUSE file systems at their own folders, where every request, even statfs, waits for the user's program.
The kernel returns the mount table without a request to any file system.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpu_exporter.common.plain import one_line

TYPE_MAX = 32  # characters of a type that are shown: users choose the text after "fuse."
# File systems that the kernel serves from memory or from devices of the host. All others ask a program (fuse, virtiofs,
# autofs) or another machine (nfs, cifs, 9p, ceph, lustre), which may not answer.
LOCAL = frozenset(("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"))
ESCAPED = re.compile(rb"\\([0-7]{3})")


class ForeignMount(NamedTuple):
    """A mount of a file system that is not LOCAL."""

    point: bytes
    type: str


def list_foreign(table: bytes) -> list[ForeignMount]:
    """Returns the mounts with a file system that is not in LOCAL. `table`: content of /proc/PID/mountinfo (proc(5))."""
    found = []
    for line in table.split(b"\n"):
        fields = line.split(b" ")
        if b"-" not in fields[6:-1]:
            continue
        kind = fields[fields.index(b"-", 6) + 1].decode("utf-8", "replace")
        if kind not in LOCAL:
            point = ESCAPED.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), fields[4])
            found.append(ForeignMount(point, one_line(kind)[:TYPE_MAX]))
    return found


def find_foreign(mounts: Iterable[ForeignMount], root: bytes, parts: Sequence[bytes]) -> str:
    """Returns the type of the first foreign mount between `root` and a folder, or inside the folder; "" without one.

    `root`: a path without symbolic links; a mount at `root` itself does not count. `parts`: the folder's path below it.
    """
    start = root.rstrip(b"/") + b"/"
    for mount in mounts:
        if mount.point.startswith(start):
            way = mount.point[len(start) :].split(b"/")
            if all(mine == other for mine, other in zip(parts, way, strict=False)):
                return mount.type
    return ""
