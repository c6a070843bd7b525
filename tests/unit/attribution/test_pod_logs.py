"""When containers started, by the folders of their logs. Unchanged folders are not listed again."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from gpu_exporter.agent.attribution.kubelet.pod_logs import SETTLED_S, PodLogs
from gpu_exporter.common.clock import ManualClock

POD = ("ml", "train-0")
FOLDER = "ml_train-0_uid"


class Node:
    """One pod with one container."""

    def __init__(self, path: Path) -> None:
        self.clock = ManualClock()
        self.folder = path / FOLDER / "main"
        self.folder.mkdir(parents=True)
        self.logs = PodLogs(path, self.clock)

    def begin(self, number: int, wall: float) -> None:
        (self.folder / f"{number}.log").touch()
        os.utime(self.folder, (wall, wall))

    def poll(self) -> tuple[int, float]:
        (uid,) = self.logs.begin_poll({POD}, set()).values()
        start = self.logs.read_start(POD, uid, "main")
        return start.number, start.wall


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_an_unchanged_folder_is_not_listed_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    began = node.clock.wall() - 60.0
    node.begin(0, began)
    assert node.poll() == (0, began)
    listed: list[str] = []
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(str(path)) or real(path))
    assert [node.poll() for _ in range(3)] == [(0, began)] * 3
    assert str(node.folder) not in listed
    node.begin(1, began + 30.0)
    assert node.poll() == (1, began + 30.0)


def test_a_start_within_one_tick_of_the_file_systems_clock_is_seen(node: Node) -> None:
    """Its folder has the same time as at the previous look, so a recently changed folder is listed at each look."""
    now = node.clock.wall()
    node.begin(0, now)
    assert node.poll() == (0, now)
    node.begin(1, now)
    assert node.poll() == (1, now)
    node.clock.advance(SETTLED_S + 1.0)
    assert node.poll() == (1, now)


def test_a_container_without_logs_counts_as_not_started(node: Node) -> None:
    node.begin(0, node.clock.wall() - 60.0)
    assert node.poll()[0] == 0
    (node.folder / "0.log").unlink()
    assert node.poll() == (-1, math.inf)
    node.folder.rmdir()
    assert node.poll() == (-1, math.inf)


def test_the_newest_folder_counts_and_never_the_folder_of_a_replaced_pod(node: Node, tmp_path: Path) -> None:
    other = tmp_path / "ml_train-0_older"
    other.mkdir()
    os.utime(other, (1.0, 1.0))
    assert node.logs.begin_poll({POD}, set()) == {POD: "uid"}
    assert node.logs.begin_poll(set(), {POD}) == {}
    assert node.logs.begin_poll({POD}, set()) == {POD: "older"}
