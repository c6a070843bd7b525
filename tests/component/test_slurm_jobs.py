"""Jobs of every shape on two nodes, compared with the GPUs that slurmd gave to the steps."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil
import pytest

from gpu_exporter.agent.attribution.slurm.on_node.steps import StepReader
from gpu_exporter.agent.attribution.slurm.pace import Pace
from gpu_exporter.agent.attribution.slurm.source import SlurmOptions, SlurmSource
from gpu_exporter.common.procfs import Procfs
from gpu_exporter.common.vendor import NVIDIA
from gpu_exporter.reconciler.slurm.live import parse_jobs
from tests.component.slurm_host import run_as
from tests.testbed.clocks import StoppableClock
from tests.testbed.processes import Processes, wait_for
from tests.testbed.slurm import GPUS, Layout, Slurm, chroot_of, start_slurm

pytestmark = pytest.mark.slurm
NODES = ("n0", "n1")
RELEASES = ["22.05", "24.11", "26.05"]
# Minors are not positions: IDX 0 is /dev/nvidia2.
FILES = "".join(f"Name=gpu Type=h100 File={{root}}/dev/nvidia[{first}-{first + 1}]\n" for first in (2, 0))
LAYOUT = Layout(
    gres=f"gpu:h100:{GPUS},shard:{4 * GPUS}",
    conf=FILES + "".join(f"Name=shard Count=4 File={{root}}/dev/nvidia{minor}\n" for minor in (2, 3, 0, 1)),
    settings="GresTypes=gpu,shard\n",
    nodes=2,
)
# Each step prints its node and its GPUs. SLURM_JOB_GPUS cannot be used: on every node it has the value of the first node.
SCRIPT = """#!/bin/sh
srun --mpi=none {groups} sh -c 'echo "$SLURM_STEP_GPUS" > {seen}/$SLURM_JOB_ID.$SLURMD_NODENAME.$$; sleep 600'
"""


class Jobs:
    """Jobs, the GPUs that they got, and the report of the exporter on both nodes."""

    def __init__(self, slurm: Slurm, processes: Processes, release: str) -> None:
        self.slurm = slurm
        self.release = release
        self.processes = processes
        self.seen = slurm.root / "seen"
        self.seen.mkdir()
        self.seen.chmod(0o777)
        self._minors = slurm.minors()
        self._clock = StoppableClock()
        self._sources = {}
        for node in NODES:
            (slurm.root / "exporter" / node).mkdir(parents=True)
            self.start(node)

    def start(self, node: str) -> None:
        """Start an exporter on the node, with the state of the exporter before."""
        self._sources[node] = SlurmSource(
            SlurmOptions(
                node=node,
                timeout_s=60.0,
                gres_conf=self.slurm.root / "etc" / "gres.conf",
                state=self.slurm.root / "exporter" / node,
            ),
            run=run_as(self.slurm),
            clock=self._clock,
            pace=Pace(5.0),
            vendor=NVIDIA,
        )

    def submit(self, *flags: str, steps: int = 1, groups: str = "") -> str:
        """Submit a job with this many tasks in total, and wait until every task has printed its GPUs."""
        script = self.slurm.root / "shape.sh"
        script.write_text(SCRIPT.format(seen=self.seen, groups=groups), encoding="utf-8")
        script.chmod(0o755)
        before = len(list(self.seen.iterdir()))
        job = self.slurm.submit_script(script, *flags)
        wait_for(lambda: len([p for p in self.seen.iterdir() if p.read_text()]) >= before + steps, f"{flags}")
        return job

    def cancel(self, job: str) -> None:
        self.slurm.run("scancel", job)
        wait_for(lambda: not self.slurm.run("squeue", "-h", "-t", "R,CG", "-j", job).strip(), "its end")
        for path in self.seen.glob(f"{job}.*"):
            path.unlink()

    def truth(self) -> dict[str, set[tuple[str, str]]]:
        """Jobs and the minor numbers of their GPUs by node, as the steps printed them."""
        found: dict[str, set[tuple[str, str]]] = {node: set() for node in NODES}
        for path in self.seen.iterdir():
            job, node, _ = path.name.split(".")
            for position in re.findall(r"\d+", path.read_text()):
                found[node].add((job, str(self._minors[int(position)])))
        return found

    def found(self) -> dict[str, set[tuple[str, str]]]:
        """The same as the exporter reports it."""
        self._clock.later += 300.0
        answers = {node: source.poll() for node, source in self._sources.items()}
        assert {(grant.kind, grant.why) for answer in answers.values() for grant in answer.grants} <= {("minor", "")}
        return {node: {(g.holder.job_id, g.device) for g in answer.grants} for node, answer in answers.items()}


@pytest.fixture(params=RELEASES)
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    path = tmp_path_factory.mktemp("slurm")
    with Processes(path) as processes, start_slurm(processes, chroot_of(request.param), LAYOUT) as slurm:
        yield Jobs(slurm, processes, request.param)


def test_jobs_of_every_shape_have_the_gpus_that_slurmd_gave_them(jobs: Jobs) -> None:
    singles = [jobs.submit("--gres=gpu:1", "-w", "n0", "-N1", "-n1") for _ in range(3)]
    jobs.cancel(singles[1])
    jobs.submit("--gres=gpu:2", "-w", "n0", "-N1", "-n1")  # positions 1 and 3, with a gap
    assert len(jobs.truth()["n0"]) == GPUS
    assert jobs.found() == jobs.truth()
    jobs.slurm.cancel_all()
    for job in {name for held in jobs.truth().values() for name, _ in held}:
        jobs.cancel(job)
    assert jobs.found() == {"n0": set(), "n1": set()}

    jobs.submit("--gres=gpu:1", "-w", "n0", "-N1", "-n1")
    spread = jobs.submit(
        "--gres=gpu:2", "-N2", "-n2", "--ntasks-per-node=1", steps=2
    )  # different positions on each node
    found = jobs.found()
    assert found == jobs.truth()
    assert {node: {minor for job, minor in held if job == spread} for node, held in found.items()} == {
        "n0": {"3", "0"},
        "n1": {"2", "3"},
    }
    jobs.cancel(spread)
    jobs.submit("--gpus=1", "-w", "n1", "-N1", "-n1")
    jobs.submit("--gpus-per-task=1", "-n2", "-w", "n0", "-N1", steps=2)
    leader = jobs.submit(
        *("--gres=gpu:1", "-w", "n0", "-N1", "-n1", ":", "--gres=gpu:1", "-w", "n1", "-N1", "-n1"),
        steps=2,
        groups="--het-group=0,1",
    )
    second = str(int(leader) + 1)
    truth = jobs.truth()  # a step of a heterogeneous job has the leader's number on every node
    truth["n1"] = {(second if job == leader else job, minor) for job, minor in truth["n1"]}
    assert jobs.found() == truth
    holders = {
        grant.holder.job_id: grant.holder.label
        for source in jobs._sources.values()
        for grant in source.poll().grants
        if grant.holder.het_job_id
    }
    assert holders == {leader: f"job {leader}+0", second: f"job {leader}+1"}


def test_jobs_with_shards_share_the_gpu_that_slurmd_gave_them(jobs: Jobs) -> None:
    whole = jobs.submit("--gres=gpu:1", "-w", "n0", "-N1", "-n1")
    parts = [jobs.submit(f"--gres=shard:{number}", "-w", "n0", "-N1", "-n1") for number in (1, 3, 2)]
    assert jobs.found() == jobs.truth()
    grants = jobs._sources["n0"].poll().grants
    assert {grant.holder.job_id: grant.share for grant in grants} == {whole: "", **dict.fromkeys(parts, "shard")}
    assert {grant.holder.units for grant in grants} == {1}
    live = {each.job_id: each for each in parse_jobs(jobs.slurm.run("squeue", "--json"), ["AdminComment"])}
    told = {job: (live[job].gpus, live[job].has_part) for job in (whole, *parts)}
    assert told == {whole: (1, False), **dict.fromkeys(parts, (1, True))}, "as the reconciler counts them"
    devices = {grant.holder.job_id: grant.device for grant in grants}
    assert devices[parts[0]] == devices[parts[1]] != devices[parts[2]]  # 1 and 3 of 4 shards fill one GPU


def test_jobs_keep_their_gpus_while_slurmctld_is_down_and_a_requeued_job_is_a_new_holder(
    jobs: Jobs,
) -> None:
    job = jobs.submit("--gres=gpu:2", "-w", "n0", "-N1", "-n1", "--requeue")
    before = {grant.holder.key for grant in jobs._sources["n0"].poll().grants}
    assert jobs.found() == jobs.truth()
    jobs.slurm.requeue(job)
    state = ("squeue", "-h", "-j", job, "-o", "%T")
    wait_for(lambda: jobs.slurm.run(*state).strip() == "PENDING", "the job to wait")
    for path in jobs.seen.iterdir():
        path.unlink()
    assert jobs.found()["n0"] == set()
    jobs.slurm.run_again(job)
    wait_for(lambda: any(path.read_text() for path in jobs.seen.iterdir()), "its step")
    assert jobs.found() == jobs.truth()
    after = {grant.holder.key for grant in jobs._sources["n0"].poll().grants}
    assert before.isdisjoint(after)
    jobs.slurm.controller.stop()
    for _ in range(2):
        answer = jobs._sources["n0"].poll()
        assert {(grant.holder.job_id, grant.device) for grant in answer.grants} == jobs.truth()["n0"]
        assert {grant.holder.key for grant in answer.grants} == after
        jobs.start("n0")  # also while slurmctld is unavailable
    assert (answer.is_old, bool(answer.problem)) == (True, True)
    jobs.slurm.start_controller()


def test_a_job_of_a_dead_node_is_a_new_holder_on_another_node(jobs: Jobs) -> None:
    """The step still runs: slurmd died, but the job did not."""
    job = jobs.submit("--gres=gpu:1", "-N1", "-n1", "--requeue")
    assert jobs.found() == jobs.truth()
    before = {grant.holder.key for grant in jobs._sources["n0"].poll().grants}
    assert len(before) == 1, "Slurm begins with the first node"
    jobs.slurm.node.stop(signal.SIGKILL)
    for state in ("DOWN", "DRAIN"):  # also if slurmctld gets the state a second time
        jobs.slurm.run("scontrol", "update", "NodeName=n0", f"State={state}", "Reason=died")
    try:
        where = ("squeue", "-h", "-j", job, "-o", "%T %N")
        wait_for(lambda: jobs.slurm.run(*where).split() == ["RUNNING", "n1"], "the job to run elsewhere", each_s=0.5)
        wait_for(lambda: list(jobs.seen.glob(f"{job}.n1.*")), "its step")
        jobs._clock.later += 300.0
        holders = {node: [grant.holder for grant in source.poll().grants] for node, source in jobs._sources.items()}
        (holder,) = holders["n1"]
        assert (holder.job_id, holder.units, holder.key in before) == (job, 1, False)
        assert holders["n0"] == [], "what is left there holds no GPU for Slurm"
    finally:
        jobs.slurm.node = jobs.processes.start(["slurmd", "-D", "-N", "n0"], jobs.slurm.environment)


def test_a_dead_slurmstepd_does_not_hide_other_jobs(jobs: Jobs) -> None:
    """The dead slurmstepd leaves its sockets in SlurmdSpoolDir, so `scontrol listpids` ends with status 1."""
    kept, dead = (jobs.submit("--gres=gpu:1", "-w", "n0", "-N1", "-n1") for _ in range(2))
    reader = StepReader("n0", lambda command: run_as(jobs.slurm)(command, 5.0), Procfs(Path("/proc")))
    steps = wait_for(lambda: found if len((found := reader.read()).pids) == 2 else None, "the first step of both jobs")
    assert (steps.pids.keys(), steps.unseen) == ({kept, dead}, "")
    daemons = daemons_of(steps.pids[dead])
    assert daemons
    for pid in daemons:
        os.kill(pid, signal.SIGKILL)
    steps = wait_for(lambda: found if (found := reader.read()).unseen else None, "a step that is not seen")
    assert "Unable to connect to slurmstepd" in steps.unseen
    # 24.11 then prints no step.
    assert steps.pids.keys() == (set() if jobs.release == "24.11" else {kept})


def daemons_of(pids: Collection[int]) -> set[int]:
    """The slurmstepd above each of a job's processes.

    Not those whose name has the job's number: a cluster of another test has the same numbers.
    """
    parents = {psutil.Process(pid).parent() for pid in pids}
    return {each.pid for each in parents if each is not None and each.name() == "slurmstepd"}
