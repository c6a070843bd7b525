"""Pods start, wait, complete and go in any order, on a node whose kubelet lists completed pods. The exporter restarts,
and its mount shows all of the host's cgroups or a part: a living pod never counts as ended, and an ended pod soon does.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.testbed.podresources import begin_container, messages

from gpu_exporter.agent.attribution.kubelet.alive import LOOK_S, PodLives
from gpu_exporter.agent.attribution.kubelet.source import KubeletOptions, KubeletSource
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.vendor import NVIDIA
from gpu_exporter.diagnosis.host.cgroups import Cgroups

OWN = "00000000-0000-4000-8000-000000000000"
SLOTS = 4  # names of pods
SOON_S = 3 * LOOK_S  # an ended pod is known by then: two checks, and one that fell between two events
CLASSES = ("guaranteed", "burstable", "besteffort")
LAYOUTS = {  # the folder of the kubelet, and whether it writes names as systemd does
    "systemd": ("kubepods.slice", True),
    "cgroupfs": ("kubepods", False),
    "foreign root": ("site/kubepods", False),
    "foreign slice": ("site.slice/site-kubepods.slice", True),
    "kind": (f"system.slice/docker-{'a' * 64}.scope/kubelet.slice/kubelet-kubepods.slice", True),
}
VIEWS = ("host", "kubelet", "class", "own")  # what the mount shows: down to the exporter's own cgroup namespace
Step: TypeAlias = tuple[str, Any]


@dataclass
class Pod:
    """A pod of the node. `watched_s`: how long this exporter could see that it lives. `logs`: it has a folder of logs."""

    uid: str
    folder: Path
    ended_at: float | None = None
    watched_s: float = 0.0
    logs: bool = True
    waits: bool = False  # for a restart after a crash: no process, but a cgroup


class Node:
    """A kubelet before 1.34, the tree of cgroups, and an exporter that is a pod of the class `own_class`."""

    def __init__(self, folder: Path, layout: str, version: int, own_class: str) -> None:
        self._logs, self._layout, self._version = folder / "logs", layout, version
        self._tree = folder / "tree"
        self.pods: dict[int, Pod] = {}
        self.clock = ManualClock()
        self._count = 0
        self._hidden: Path | None = None
        self._shows_processes = False
        self._clear_since = 0.0  # since then this exporter has seen what it sees now
        self._own = self._make_cgroup(OWN, own_class)
        self._logs.mkdir()
        self.restart("host")

    def _make_cgroup(self, uid: str, of: str) -> Path:
        base, is_systemd = LAYOUTS[self._layout]
        stem = base.rsplit("/", 1)[-1].removesuffix(".slice")
        middle = [] if of == "guaranteed" else [of]
        if is_systemd:
            steps = ["-".join([stem, *middle[:at]]) + ".slice" for at in range(1, len(middle) + 1)]
            steps.append("-".join([stem, *middle, f"pod{uid.replace('-', '_')}"]) + ".slice")
        else:
            steps = [*middle, f"pod{uid}"]
        pod = self._tree.joinpath(base, *steps)
        (pod / ("b" * 64)).mkdir(parents=True)
        return pod

    def restart(self, view: str) -> None:
        """Start the exporter anew, perhaps with another mount."""
        self._lives = PodLives(self._find, OWN, self._list_running, self._list_inside)
        self._source = KubeletSource(
            self.clock, KubeletOptions(Path("/none"), self._logs), vendor=NVIDIA, lives=self._lives
        )
        self.remount(view)

    def remount(self, view: str) -> None:
        kubelet = self._tree / LAYOUTS[self._layout][0]
        self.view = view
        self._base = {"host": self._tree, "kubelet": kubelet, "class": self._own.parent, "own": self._own}[view]
        self._reset()

    def _reset(self) -> None:
        self._clear_since = self.clock.monotonic()
        for pod in self.pods.values():
            pod.watched_s = 0.0

    def hide(self, folder: int) -> None:
        """Make one folder unreadable, or all readable again."""
        there = [each for each in sorted(self._tree.rglob("*")) if each.is_dir()]
        self._hidden = None if self._hidden else there[folder % len(there)]
        self._clear_since = self.clock.monotonic()

    def show_processes(self, shows: bool) -> None:
        self._shows_processes = shows

    def start(self, slot: int, of: str, waits_for_volumes: bool = False) -> None:
        if slot not in self.pods:
            self._count += 1
            uid = f"00000000-0000-4000-8000-{self._count:012d}"
            self.pods[slot] = Pod(uid, self._make_cgroup(uid, of), logs=not waits_for_volumes)
            if not waits_for_volumes:
                begin_container(self._logs, f"ml_p{slot}_{uid}")

    def mount(self, slot: int) -> None:
        """The volumes of a pod are there: its sandbox and its first container begin."""
        pod = self.pods.get(slot)
        if pod is not None and not pod.logs and pod.ended_at is None:
            pod.logs = True
            begin_container(self._logs, f"ml_p{slot}_{pod.uid}")

    def wait(self, slot: int) -> None:
        if slot in self.pods:
            self.pods[slot].waits = not self.pods[slot].waits

    def end(self, slot: int) -> None:
        pod = self.pods.get(slot)
        if pod is not None and pod.ended_at is None:
            shutil.rmtree(pod.folder)
            pod.ended_at = self.clock.monotonic()

    def delete(self, slot: int, keeps_logs: bool) -> None:
        self.end(slot)
        pod = self.pods.pop(slot, None)
        if pod is not None and pod.logs and not keeps_logs:
            shutil.rmtree(self._logs / f"ml_p{slot}_{pod.uid}")

    def _find(self, uids: Any) -> Any:
        return self._see(lambda cgroups: cgroups.list_pods(uids))

    def _list_inside(self, folder: Any) -> Any:
        return self._see(lambda cgroups: cgroups.list_pods_inside(folder))

    def _see(self, ask: Callable[[Cgroups], Any]) -> Any:
        """The exporter's view of the tree, as one of the two versions mounts it."""
        with tempfile.TemporaryDirectory() as mount, mock.patch("os.scandir", self._scan):
            root = Path(mount)
            if self._version == 1:
                (root / "cpu,cpuacct").symlink_to(self._base)
                return ask(Cgroups(root))
            with mock.patch.object(Path, "exists", lambda path: True):  # cgroup.controllers
                return ask(Cgroups(self._base))

    def _scan(self, path: Any, real: Any = os.scandir) -> Any:
        if self._hidden is not None and Path(path).resolve() == self._hidden:
            raise PermissionError(13, "Permission denied")
        return real(path)

    def _list_running(self) -> set[str] | None:
        alive = {pod.uid for pod in self.pods.values() if pod.ended_at is None and not pod.waits}
        return alive | {OWN} if self._shows_processes else None

    def run(self, polls: int) -> None:
        for _ in range(polls):
            self.clock.advance(15.0)
            for pod in self.pods.values():
                if pod.ended_at is None and self._hidden is None and pod.folder.is_relative_to(self._base):
                    pod.watched_s += 15.0
            response = messages().ListPodResourcesResponse()
            for slot in (*self.pods, SLOTS):  # the last one always runs, so that the answer is never empty
                container = response.pod_resources.add(name=f"p{slot}", namespace="ml").containers.add(name="main")
                container.devices.add(resource_name="nvidia.com/gpu", device_ids=[f"GPU-{slot}"])
            with mock.patch(
                "gpu_exporter.agent.attribution.kubelet.source.call", return_value=response.SerializeToString()
            ):
                grants = {grant.holder.pod: grant for grant in self._source.poll().grants}
            for slot, pod in self.pods.items():
                grant = grants[f"p{slot}"]
                if pod.ended_at is None:
                    assert not grant.ended or (grant.why and not pod.logs), "it lives, and its GPU is not free"
                elif pod.logs and self._must_know(pod, pod.ended_at):
                    assert grant.ended, "it has ended, and what the exporter sees proves it"

    def _must_know(self, pod: Pod, ended_at: float) -> bool:
        if self._hidden is not None or self.clock.monotonic() - max(ended_at, self._clear_since) <= SOON_S:
            return False
        return self.view == "host" or (self.view != "own" and pod.watched_s > LOOK_S + 15.0)


@contextmanager
def node(layout: str, version: int, own_class: str) -> Iterator[Node]:
    with tempfile.TemporaryDirectory() as folder:
        yield Node(Path(folder).resolve(), layout, version, own_class)


SLOT = st.integers(0, SLOTS - 1)
STEPS = st.one_of(
    st.tuples(st.just("start"), st.tuples(SLOT, st.sampled_from(CLASSES), st.booleans())),
    st.tuples(st.just("mount"), st.tuples(SLOT)),
    st.tuples(st.just("end"), st.tuples(SLOT)),
    st.tuples(st.just("wait"), st.tuples(SLOT)),
    st.tuples(st.just("delete"), st.tuples(SLOT, st.booleans())),
    st.tuples(st.just("restart"), st.tuples(st.sampled_from(VIEWS))),
    st.tuples(st.just("remount"), st.tuples(st.sampled_from(VIEWS))),
    st.tuples(st.just("hide"), st.tuples(st.integers(0, 30))),
    st.tuples(st.just("show_processes"), st.tuples(st.booleans())),
    st.tuples(st.just("run"), st.tuples(st.integers(1, 20))),
)
# A mount that shows the burstable pods only: there, many pods live, and the guaranteed one is invisible.
PART = [*[("start", (slot, "burstable")) for slot in range(3)], ("start", (3, "guaranteed"))]

NAMESAKE = [("end", (0,)), ("run", (10,)), ("delete", (0, True)), ("start", (0, "guaranteed", True)), ("run", (1,))]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(sorted(LAYOUTS)), st.sampled_from([1, 2]), st.sampled_from(CLASSES), st.lists(STEPS, max_size=25)
)
@example("systemd", 2, "burstable", [*PART, ("restart", ("class",)), ("run", (20,))])
@example("systemd", 2, "burstable", [*PART, ("run", (10,)), ("remount", ("class",)), ("run", (20,))])
@example("cgroupfs", 1, "guaranteed", [*PART, ("run", (1,)), *NAMESAKE])
def test_in_any_order_no_living_pod_is_dropped_and_no_ended_pod_holds(
    layout: str, version: int, own_class: str, steps: Sequence[Step]
) -> None:
    with node(layout, version, own_class) as it:
        for name, arguments in steps:
            getattr(it, name)(*arguments)
        it.run(20)


@pytest.mark.parametrize("ended", range(SLOTS + 1))
@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_share_of_the_pods_may_have_ended(layout: str, restarts: bool, ended: int) -> None:
    with node(layout, 2, "burstable") as it:
        for slot in range(SLOTS):
            it.start(slot, CLASSES[slot % 3])
        it.run(1)
        for slot in range(ended):
            it.end(slot)
        if restarts:
            it.restart("host")
        it.run(15)


@pytest.mark.parametrize("view", VIEWS[1:])
def test_a_mount_that_shows_a_part_ends_only_the_pods_that_were_seen_in_it(view: str) -> None:
    with node("systemd", 2, "burstable") as it:
        it.restart(view)
        for slot, of in enumerate(CLASSES):
            it.start(slot, of)
        it.run(20)
        it.end(1)
        it.run(20)
        it.delete(1, keeps_logs=True)
        it.start(1, "guaranteed", waits_for_volumes=True)  # no mount but the host's can show it
        it.run(1)
        it.restart(view)
        it.run(20)


def test_a_process_of_a_pod_without_a_cgroup_shows_that_cgroups_are_hidden() -> None:
    with node("systemd", 2, "burstable") as it:
        it.start(0, "guaranteed")
        it.start(1, "guaranteed")
        it.show_processes(True)
        shutil.rmtree(it.pods[0].folder)  # as if it were elsewhere: its process runs
        it.run(20)
