"""Which folders of jobs lie on file systems that may never answer, as the mount table shows.

A user may mount a file system of his own (FUSE) at a folder of his own, and a request to it waits for his program, also
one of statfs. The kernel answers for the mount table without a question to any file system.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpu_exporter.common.plain import one_line

TYPE_MAX = 32  # characters of a type that are shown: the user chooses what follows "fuse."
# File systems that the kernel serves from memory or from devices of the host. All others ask a program (fuse, virtiofs,
# autofs) or another machine (nfs, cifs, 9p, ceph, lustre), which may not answer.
LOCAL = frozenset(("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"))
ESCAPED = re.compile(rb"\\([0-7]{3})")


class ForeignMount(NamedTuple):
    """A mount of a file system that is not LOCAL."""

    point: bytes
    type: str


def list_foreign(table: bytes) -> list[ForeignMount]:
    """The mounts in a text of /proc/PID/mountinfo that are not LOCAL; proc(5) describes its lines."""
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
    """The type of a mount between `root` and the folder at `parts` below it, at this folder, or inside of it; "" if
    there is none. `root`: without links.
    """
    start = root.rstrip(b"/") + b"/"
    for mount in mounts:
        if mount.point.startswith(start):
            way = mount.point[len(start) :].split(b"/")
            if all(mine == other for mine, other in zip(parts, way, strict=False)):
                return mount.type
    return ""
