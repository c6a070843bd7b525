"""The mount table tells which folders may never answer, whatever names and types users choose."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.diagnosis.training.mounts import LOCAL, TYPE_MAX, find_foreign, list_foreign

ROOT, PARTS = b"/run/jobs", (b"42", b"volumes", b"training")
FOREIGN = ("fuse", "fuse.sshfs", "fuseblk", "virtiofs", "nfs", "nfs4", "cifs", "9p", "ceph", "lustre", "autofs", "gpfs")


def line(point: bytes, kind: str, options: str = "shared:7 master:2 ") -> bytes:
    escaped = b"".join(b"\\%03o" % byte if byte in b" \t\n\\" else bytes([byte]) for byte in point)
    return b"36 35 98:0 / %s rw,relatime %s- %s none rw,user_id=1000\n" % (escaped, options.encode(), kind.encode())


def find(table: bytes) -> str:
    return find_foreign(list_foreign(table), ROOT, PARTS)


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("options", ["", "shared:7 "])
def test_a_file_system_that_asks_a_program_or_another_machine_is_found(kind: str, options: str) -> None:
    assert find(line(b"/run/jobs/42/volumes/training", kind, options)) == kind


@pytest.mark.parametrize("kind", sorted(LOCAL))
def test_a_file_system_of_this_host_is_read(kind: str) -> None:
    assert find(line(b"/run/jobs/42/volumes/training", kind)) == ""


@pytest.mark.parametrize(
    ("point", "is_found"),
    [
        (b"/run/jobs/42", True),
        (b"/run/jobs/42/volumes", True),
        (b"/run/jobs/42/volumes/training/rank-0.json", True),
        (b"/", False),
        (b"/run/jobs", False),  # the folder of all jobs is the site's choice
        (b"/run/jobs/421", False),
        (b"/run/jobs/4", False),
        (b"/run/jobs/42/volumes/training-2", False),
        (b"/run/jobs/42/volumes/other/mount", False),
        (b"/run/jobs2/42", False),
        (b"/home/run/jobs/42", False),
    ],
)
def test_only_a_mount_on_the_way_to_the_folder_or_inside_of_it_counts(point: bytes, is_found: bool) -> None:
    assert (find(line(point, "fuse")) == "fuse") is is_found


NAMES = st.binary(min_size=1, max_size=20).filter(lambda name: not {0, ord("/")} & set(name))


@given(NAMES, st.lists(st.tuples(NAMES, st.sampled_from(sorted(LOCAL))), max_size=5))
def test_no_name_hides_a_mount(name: bytes, others: list[tuple[bytes, str]]) -> None:
    table = b"".join(line(b"/run/jobs/" + other, kind) for other, kind in others)
    table = table + line(b"/run/jobs/42/volumes/training/" + name, "fuse") + table
    assert find(table) == "fuse"


@pytest.mark.parametrize("name", [b"a\rb\r-\rtmpfs", b"a - tmpfs", b"a\n", b"\x0b- -", b"\x85"])
def test_no_white_space_in_a_name_hides_its_mount(name: bytes) -> None:
    assert find(line(b"/run/jobs/42/volumes/training/" + name, "fuse")) == "fuse"


@given(st.binary(max_size=300))
def test_any_text_is_survived(text: bytes) -> None:
    for mount in list_foreign(text + b" - " + text):
        assert len(mount.type) <= TYPE_MAX and mount.type.isprintable()


def test_the_table_of_this_machine_has_its_proc() -> None:
    assert (b"/proc", "proc") in list_foreign(Path("/proc/self/mountinfo").read_bytes())
