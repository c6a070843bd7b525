"""gres.conf is edited while jobs run on real Slurm: no job gets another job's GPU, or loses its GPU because of a date.

The truth is slurmd's own log: the device files in the order of IDX, as it read them when it started.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_exporter.agent.attribution.slurm.gres import boot as boots
from gpu_exporter.agent.attribution.slurm.gres import files
from gpu_exporter.agent.attribution.slurm.gres.epochs import BEFORE, SKEW_S
from gpu_exporter.agent.attribution.slurm.pace import Pace
from gpu_exporter.agent.attribution.slurm.source import SlurmSource
from gpu_exporter.agent.attribution.source import Answer
from tests.component.slurm_host import source_of
from tests.testbed.processes import Processes, wait_for
from tests.testbed.slurm import GPUS, Layout, Slurm, chroot_of, start_slurm

pytestmark = pytest.mark.slurm
REVERSED = "AutoDetect=off\nName=gpu Type=h100 File={root}/dev/nvidia[3,2,1,0]\n"
RELEASES = ["22.05", "24.11", "26.05"]


class Node:
    """The exporter on node n0, with its stored state."""

    def __init__(self, slurm: Slurm, state: Path, gres_conf: Path | None = None) -> None:
        self.slurm, self.state = slurm, state
        self.gres_conf = gres_conf or slurm.root / "etc" / "gres.conf"
        self.text = self.gres_conf.read_text("utf-8")
        self.source = self.begin()

    def begin(self, state: Path | None = None, procfs: Path = Path("/proc")) -> SlurmSource:
        """Start the exporter again."""
        about = {"gres_conf": self.gres_conf, "state": state or self.state, "procfs": procfs}
        return source_of(self.slurm, pace=Pace(1.0), **about)

    def submit(self, *flags: str) -> str:
        """Submit a job, and wait until the exporter has seen it: a slow slurmctld is asked less often."""
        job = self.slurm.submit(*flags)
        wait_for(lambda: job in self.held(), f"job {job} to be seen", each_s=0.5)
        return job

    def edit(self, text: str) -> Answer:
        """Write gres.conf, in a later second than slurmd's start. Returns the exporter's report."""
        wait_for(lambda: time.time() > self.slurm.started() + 2, "a later second than slurmd's start")
        self.gres_conf.write_text(text.replace("{root}", str(self.slurm.root)), "utf-8")
        return self.source.poll()

    def pass_skew(self) -> None:
        """Advance the clock until no clock difference between hosts can change the order of past events."""
        until = time.time() + SKEW_S + 1
        wait_for(lambda: time.time() > until, "the clocks to be past it", SKEW_S + 10, 0.5)

    def held(self, answer: Answer | None = None) -> dict[str, str]:
        """Minor numbers by job, "" if the GPU of a job is not proven."""
        grants = (answer or self.source.poll()).grants
        return {grant.holder.job_id: grant.device if grant.kind == "minor" else "" for grant in grants}


@pytest.fixture(params=RELEASES)
def node(request: pytest.FixtureRequest, processes: Processes, tmp_path: Path) -> Iterator[Node]:
    (tmp_path / "state").mkdir()
    with start_slurm(processes, chroot_of(request.param)) as slurm:
        yield Node(slurm, tmp_path / "state")


def test_a_job_keeps_its_gpu_when_gres_conf_changes(node: Node, processes: Processes) -> None:
    slurm = node.slurm
    first = node.submit("--gres=gpu:1")
    old = [str(minor) for minor in slurm.minors()]
    assert node.held() == {first: old[0]}
    for text in (node.text, f"# a comment\n{node.text}", f"{node.text}NodeName=n7 Name=gpu File=/dev/nvidia9\n"):
        answer = node.edit(text)
        assert (node.held(answer), answer.problem) == ({first: old[0]}, "")
    node.gres_conf.chmod(0o640)
    assert node.held() == {first: old[0]}

    node.pass_skew()
    answer = node.edit(REVERSED)
    assert "lists the GPUs in another order than when slurmd started: restart slurmd" in answer.problem
    node.pass_skew()
    second = node.submit("--gres=gpu:1")
    assert node.held() == {first: old[0], second: ""}
    node.source = node.begin()
    assert node.held() == {first: old[0], second: ""}

    slurm.restart_slurmd(processes)
    new = [str(minor) for minor in slurm.minors()]
    assert new == old[::-1]
    wait_for(lambda: not node.source.poll().problem, "the new order to be known", each_s=1.0)
    node.pass_skew()
    third = node.submit("--gres=gpu:2")
    assert node.held()[first] == old[0] and node.held()[second] == ""
    assert {grant.device for grant in node.source.poll().grants if grant.holder.job_id == third} == {new[2], new[3]}
    forgetful = node.begin(node.state / "none").poll()
    assert [grant.reason for grant in forgetful.grants if grant.holder.job_id == first] == [BEFORE]


def test_a_first_install_after_a_restart_of_slurmd_knows_every_job_of_this_boot(
    node: Node, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter keeps nothing, and gres.conf is older than the boot."""
    boot = math.ceil(node.gres_conf.stat().st_ctime) + 1.0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "stat").write_text(f"btime {boot:.0f}\n")
    monkeypatch.setattr(files, "BEFORE_S", 0.0)
    monkeypatch.setattr(boots, "EARLY_S", math.inf)  # this host was booted earlier
    wait_for(lambda: time.time() > boot + 1, "the boot to be past")

    def install() -> dict[str, str]:
        return node.held(node.begin(tmp_path / "none", tmp_path / "proc").poll())

    first = node.submit("--gres=gpu:1")
    before = node.slurm.started()
    wait_for(lambda: time.time() > before + 2, "a later second")
    node.slurm.restart_slurmd(processes)
    second = node.submit("--gres=gpu:1")
    assert install() == {first: "0", second: "1"}
    text = node.gres_conf.read_text("utf-8")
    node.gres_conf.unlink()
    node.gres_conf.write_text(text, "utf-8")
    os.utime(node.gres_conf, (1.0, 1.0))
    node.pass_skew()
    node.slurm.restart_slurmd(processes)
    third = node.submit("--gres=gpu:1")
    assert install() == {first: "", second: "", third: "2"}, "a restored file is younger than the boot"


def test_a_gres_conf_with_another_count_proves_nothing_for_later_jobs(node: Node, processes: Processes) -> None:
    job = node.submit("--gres=gpu:1")
    assert node.held() == {job: "0"}
    node.pass_skew()
    answer = node.edit(node.text.replace(f"[0-{GPUS - 1}]", "[0-2]"))
    assert "names 3 GPUs, but slurm.conf gives the node Gres=gpu:h100:4" in answer.problem
    assert node.held(answer) == {job: "0"}
    answer = node.edit(node.text)
    assert (node.held(answer), answer.problem) == ({job: "0"}, "")


def test_reconfigure_does_not_prove_which_gres_conf_slurmd_has_read(node: Node) -> None:
    """Before 23.11 slurmd reads gres.conf again without a restart. Since 23.11 slurmd restarts."""
    job = node.submit("--gres=gpu:1")
    assert node.held() == {job: "0"}
    node.pass_skew()
    node.edit(REVERSED)
    before = node.slurm.started()
    node.slurm.run("scontrol", "reconfigure")
    node.pass_skew()
    later = node.submit("--gres=gpu:1")
    idle = node.slurm.started() > before
    wait_for(lambda: not idle or node.held().get(later), "the order of a slurmd that has restarted", each_s=1.0)
    held = node.held()
    assert held[job] == "0"
    assert held[later] == ("2" if idle else "")


@pytest.mark.parametrize("release", RELEASES[1:])
def test_a_job_keeps_its_gpu_if_slurmd_fetches_its_configuration(
    release: str, processes: Processes, tmp_path: Path
) -> None:
    """slurmd uses its own copy. The file of slurmctld is usually on another host."""
    with start_slurm(processes, chroot_of(release), Layout(configless=True)) as slurm:
        copy = slurm.root / "spool" / "n0" / "conf-cache" / "gres.conf"
        node = Node(slurm, tmp_path, copy)
        job = node.submit("--gres=gpu:1")
        assert node.held() == {job: "0"}
        node.pass_skew()
        assert node.held() == {job: "0"}
        before = slurm.started()
        (slurm.root / "etc" / "gres.conf").write_text(REVERSED.replace("{root}", str(slurm.root)), "utf-8")
        slurm.run("scontrol", "reconfigure")
        wait_for(lambda: "nvidia[3,2,1,0]" in copy.read_text("utf-8"), "slurmd to fetch it")
        slurm.wait_until_registered()
        wait_for(lambda: slurm.started() > before, "slurmd to restart")
        wait_for(lambda: not node.source.poll().problem, "the new order to be known", each_s=1.0)
        node.pass_skew()
        later = node.submit("--gres=gpu:1")
        assert node.held() == {job: "0", later: "2"}
        forgetful = node.begin(tmp_path / "none").poll()
        assert [grant.reason for grant in forgetful.grants if grant.holder.job_id == job] == [BEFORE]
