"""gres.conf from before the boot of its node: when its date proves the order of GPUs for every job of this boot."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path

import pytest

from gpu_exporter.agent.attribution.slurm.gres import files
from gpu_exporter.agent.attribution.slurm.gres.boot import EARLY_S, find_boot
from gpu_exporter.agent.attribution.slurm.gres.files import ConfPlace, read_order
from gpu_exporter.agent.attribution.slurm.parse import NodeRecord
from gpu_exporter.common.procfs import Procfs
from gpu_exporter.common.slurm.gres import Gres
from gpu_exporter.common.vendor import NVIDIA

NODE = NodeRecord((("h100", 4),), Gres(), slurmd_start=4_000_000_000.0)
FOUR = "NodeName=n9 Name=gpu File=/dev/nvidia9\nNodeName=n0 Name=gpu Type=h100 File=/dev/nvidia[0-3]\n"


class Old:
    """A gres.conf that was last changed before the node's boot, and a slurmd that started after the boot."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "BEFORE_S", 0.0)
        self.folder, self.path = folder, folder / "gres.conf"
        self.write("gres.conf", FOUR)
        self.boot = time.time()

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text, "utf-8")
        return path

    def later(self) -> None:
        """Waits until a change of a file has a later date than the boot."""
        while True:
            self.write("now", "")
            if (self.folder / "now").stat().st_ctime > self.boot:
                return
            time.sleep(0.001)

    def since(self, path: Path | None = None, record: NodeRecord = NODE) -> float | None:
        return read_order([ConfPlace(path or self.path)], "n0", record, NVIDIA, self.boot).boot


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Old:
    found = Old(tmp_path, monkeypatch)
    found.boot = found.path.stat().st_ctime + 0.001
    found.later()
    return found


def test_a_file_from_before_the_boot_was_read_by_every_slurmd_since(old: Old, monkeypatch: pytest.MonkeyPatch) -> None:
    assert old.since() == old.boot
    monkeypatch.setattr(files, "BEFORE_S", 3600.0)
    assert old.since() is None, "the clock at boot may have been behind by minutes"
    assert read_order([ConfPlace(old.path)], "n0", NODE, NVIDIA).boot is None


@pytest.mark.parametrize("how", ["restored", "chmod", "renamed", "a later file beside it", "a copy in another place"])
def test_a_file_that_was_put_there_after_the_boot_proves_nothing(old: Old, how: str) -> None:
    if how == "restored":  # as `cp -p`, tar and rsync do
        old.path.unlink()
        old.write("gres.conf", FOUR)
        os.utime(old.path, (1.0, 1.0))
    elif how == "renamed":
        old.path.rename(old.folder / "other")
        (old.folder / "other").rename(old.path)
    elif how == "chmod":
        old.path.chmod(0o640)
    elif how == "a later file beside it":
        old.write("more", "")
        assert old.since() == old.boot
        old.write("gres.conf", f"{FOUR}Include more\n")
    places = [ConfPlace(old.path)]
    if how == "a copy in another place":
        places.append(ConfPlace(old.write("copy.conf", FOUR), fetched=True))
    assert read_order(places, "n0", NODE, NVIDIA, old.boot).boot is None


def test_a_file_that_is_gone_from_its_directory_proves_no_order(old: Old) -> None:
    """As after a mount of the file alone, when the host has replaced the file."""
    with old.path.open() as file:
        mounted = Path(f"/proc/self/fd/{file.fileno()}")
        assert read_order([ConfPlace(mounted)], "n0", NODE, NVIDIA, old.boot).order.kind == "minor"
        old.write("new", FOUR).rename(old.path)
        order = read_order([ConfPlace(mounted)], "n0", NODE, NVIDIA, old.boot).order
    assert (order.kind, order.problem) == (
        "unknown",
        f"{mounted}: the host has replaced this file: mount its directory instead of the file",
    )


def test_links_on_the_path_and_their_targets_are_judged(old: Old) -> None:
    target = old.folder / "real"
    target.mkdir()
    (old.folder / "gres.conf").rename(target / "gres.conf")
    old.write("real/more", "NodeName=n9 Name=gpu File=/dev/nvidia9\n")
    old.write("real/gres.conf", f"{FOUR}Include {target}/more\n")
    (old.folder / "a").symlink_to("b/../real")
    (old.folder / "b").symlink_to(target)  # b/.. is the parent of the target
    (old.folder / "file").symlink_to(old.folder / "a" / "gres.conf")
    paths = [old.folder / "file", old.folder / "a" / "gres.conf", old.folder / "b" / ".." / "a" / "gres.conf"]

    def since() -> list[bool]:
        return [old.since(path) == old.boot for path in paths]

    old.boot = (old.folder / "file").lstat().st_ctime + 0.001
    old.later()
    assert since() == [True] * 3
    for name, expected in (("b", [False] * 3), ("file", [False, True, True]), ("a", [False] * 3)):
        link = (old.folder / name).readlink()
        (old.folder / name).unlink()
        (old.folder / name).symlink_to(link)
        assert since() == expected, name
        old.boot = (old.folder / name).lstat().st_ctime + 0.001
        old.later()
    (old.folder / "a").unlink()
    (old.folder / "a").symlink_to("a")
    assert old.since(paths[1]) is None


@pytest.mark.parametrize(
    ("text", "record"),
    [
        ("AutoDetect=nvml\n", NODE),
        ("AutoDetect=nvml\nName=gpu Type=h100 File=/dev/nvidia[0-3]\n", NODE),
        (
            "Name=gpu Type=h100 File=/dev/nvidia[0-1]\nName=gpu Type=a100 File=/dev/nvidia[2-3]\n",
            NODE._replace(configured=(("a100", 2), ("h100", 2))),
        ),
    ],
    ids=["AutoDetect", "AutoDetect and files", "types in the order of slurm.conf"],
)
def test_an_order_that_is_not_in_the_file_alone_is_not_proven_by_its_date(
    old: Old, text: str, record: NodeRecord
) -> None:
    old.write("gres.conf", text)
    old.boot = old.path.stat().st_ctime + 0.001
    found = read_order([ConfPlace(old.path)], "n0", record, NVIDIA, old.boot)
    assert found.order.kind != "unknown"
    assert found.boot is None


def test_a_device_file_behind_a_link_is_not_proven_by_the_date_of_gres_conf(
    old: Old, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_minor_of", lambda name, vendor: {"/dev/nvidia0": 1, "/dev/nvidia1": 0}.get(name))
    found = read_order([ConfPlace(old.path)], "n0", NODE, NVIDIA, old.boot)
    assert found.order.minors == ("1", "0", "2", "3")
    assert found.boot is None


@pytest.mark.parametrize(
    ("clock_at_boot", "known"),
    [(2.0, True), (-300.0, True), (EARLY_S + 1, False), (-EARLY_S - 1, False), (-7 * 3600.0, False), (None, False)],
    ids=["as now", "NTP corrected it", "ahead, or a container", "behind", "another time zone", "no link"],
)
def test_dates_are_compared_with_the_boot_only_if_the_clock_was_not_set_since(
    tmp_path: Path, clock_at_boot: float | None, known: bool
) -> None:
    witness = tmp_path / "fd"
    boot = 1_700_000_000.0
    if clock_at_boot is not None:
        witness.symlink_to("/proc/self/fd")
        boot = math.floor(witness.lstat().st_ctime) - clock_at_boot
    (tmp_path / "stat").write_text(f"cpu 1\nbtime {boot:.0f}\n")
    assert find_boot(Procfs(tmp_path), witness) == (boot if known else None)
    assert find_boot(Procfs(tmp_path / "none"), witness) is None
