"""One collector queries the real slurmctld for the whole cluster, and the nodes send no request to it."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_exporter.agent.attribution.slurm.collected import ANSWERS
from gpu_exporter.agent.attribution.slurm.source import SlurmOptions, SlurmSource
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.agent.slurm_collector.collector import MAX_ANSWER, CollectorRun, SlurmCollector
from gpu_exporter.agent.slurm_collector.command_line import CommandLine
from gpu_exporter.agent.slurm_collector.rest import Rest
from gpu_exporter.common.address import parse_address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.model.holders import Grant
from gpu_exporter.common.vendor import NVIDIA
from tests.component.slurm_host import requests, run_as
from tests.testbed.clocks import StoppableClock
from tests.testbed.processes import GPU_EXPORTER, Processes, fetch, free_port, wait_for
from tests.testbed.slurm import JWT_KEY, Layout, Slurm, chroot_of, start_slurm

pytestmark = pytest.mark.slurm
NODES = 200


@pytest.fixture(params=["22.05", "24.11", "26.05"])
def slurm(request: pytest.FixtureRequest, processes: Processes) -> Iterator[Slurm]:
    chroot = chroot_of(request.param)
    with start_slurm(processes, chroot, Layout(nodes=2)) as started:
        yield started


def facts(grants: list[Grant]) -> list[tuple[object, ...]]:
    """All facts of a node about its holders, except for the time of the answer."""
    return sorted(
        (grant.holder, *grant._replace(confirmed=0.0, renewed_s=0.0)[:2], grant.running, grant.why) for grant in grants
    )


def test_a_collector_gives_nodes_the_same_facts_as_slurmctld(
    slurm: Slurm, processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    ask = run_as(slurm)
    gres_conf = slurm.root / "etc" / "gres.conf"
    clock = StoppableClock()

    def collect() -> None:
        command = [*GPU_EXPORTER, "slurm-collector", f"--directory={tmp_path / 'shared'}", "--once"]
        done = subprocess.run(command, env=slurm.environment, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr

    def answers(node: str) -> list[list[tuple[object, ...]]]:
        collect()
        asking = SlurmSource(
            SlurmOptions(node=node, timeout_s=60.0, gres_conf=gres_conf), run=ask, clock=clock, vendor=NVIDIA
        ).poll()
        reading = SlurmSource(
            SlurmOptions(node=node, timeout_s=60.0, gres_conf=gres_conf, collected=tmp_path / "shared"),
            run=ask,
            clock=clock,
            vendor=NVIDIA,
        ).poll()
        assert (asking.problem, reading.problem) == ("", "")
        return [facts(list(answer.grants)) for answer in (asking, reading)]

    assert answers("n0") == [[], []]
    stopped = slurm.submit("--gres=gpu:1", "-w", "n0", "-N1", "-J", '"}],"jobs":[{"job_id":1')
    slurm.submit("--gres=gpu:1", "--array=7-7", "-w", "n0", "-N1")
    slurm.submit("--gres=gpu:1", "-w", "n[0-1]", "-N2", "-n2", "--account=phys")
    slurm.submit("-w", "n0", "-N1")
    slurm.run("scontrol", "suspend", stopped)
    for node, held in (("n0", 3), ("n1", 1)):
        asked, read = answers(node)
        assert read == asked
        assert len(read) == held
    nowhere = "http://127.0.0.1:1/"
    for command in (["slurm-collector"], ["reconcile", "--slurm.collector", f"--source.exporter={nowhere}"]):
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        collector = [*GPU_EXPORTER, *command, f"--web.listen-address=127.0.0.1:{port}"]
        processes.start(collector, environment=slurm.environment)
        wait_for(lambda url=url: fetch(f"{url}{ANSWERS}n1"), "the collector's first round")
        overheard = SlurmSource(
            SlurmOptions(node="n0", timeout_s=60.0, gres_conf=gres_conf, collected=parse_address(f"{url}/")),
            run=ask,
            clock=clock,
            vendor=NVIDIA,
        ).poll()
        assert (facts(list(overheard.grants)), overheard.problem) == (answers("n0")[1], "")
        metrics = fetch(f"{url}/metrics") or ""
        assert "\ngpu_slurm_collector_nodes 2.0\n" in metrics
        assert ("\ngpu_reconciler_cycles_total " in metrics) == (command[0] == "reconcile")
    with pytest.raises(
        SourceError, match=r"/nodes/n7: HTTP status 404; check that `gpu-exporter slurm-collector` runs"
    ):
        SlurmSource(
            SlurmOptions(node="n7", timeout_s=60.0, collected=parse_address(url)), run=ask, clock=clock, vendor=NVIDIA
        ).poll()

    name = tmp_path / "shared" / "n0.json"
    assert '"jobs":[{"job_id":1' not in name.read_text()
    assert len(json.loads(name.read_text())["jobs"]) == 4
    with pytest.raises(SourceError, match=r"n7\.json: no such file; check that `gpu-exporter slurm-collector"):
        SlurmSource(
            SlurmOptions(node="n7", timeout_s=60.0, collected=tmp_path / "shared"),
            run=ask,
            clock=clock,
            vendor=NVIDIA,
        ).poll()


@pytest.mark.parametrize("release", ["22.05", "24.11", "26.05"])
def test_slurmrestd_and_the_commands_give_the_same_facts(release: str, processes: Processes, tmp_path: Path) -> None:
    layout = Layout(
        files={JWT_KEY: "0123456789abcdef0123456789abcdef"},
        settings=f"AuthAltTypes=auth/jwt\nAuthAltParameters=jwt_key={{root}}/etc/{JWT_KEY}\n",
    )
    with start_slurm(processes, chroot_of(release), layout) as slurm:
        slurm.submit("--gres=gpu:1", "--account=phys", "-J", '","cluster":"mine","x":"')
        slurm.submit("--gres=gpu:2", "--array=7-7")
        slurm.run("scontrol", "update", "nodename=n0", "state=drain", "reason=bad | fan")
        token = tmp_path / "token"
        token.write_text(slurm.run("scontrol", "token", "username=root"))
        rest = Rest(parse_address(slurm.start_rest(processes)), token, MAX_ANSWER)

        def answers() -> bool:
            try:
                return bool(rest.read_nodes())
            except SourceError as exc:
                assert "efused" in str(exc), exc  # slurmrestd does not listen yet
                return False

        wait_for(answers, "slurmrestd")
        commands = CommandLine(run_as(slurm))
        assert rest.read_nodes() == commands.read_nodes()
        assert [(node.closed, node.reason) for node in rest.read_nodes().values()] == [("drained", "bad | fan")]
        assert sorted(rest.read_jobs()) == sorted(commands.read_jobs())
        assert rest.read_config().cluster == commands.read_config().cluster == "lab"
        token.write_text(token.read_text().strip()[:-2])
        with pytest.raises(
            SourceError, match=r"slurmrestd: http.*: HTTP status \d+.*; is the token valid\? write a new token"
        ):
            rest.read_nodes()


@pytest.mark.parametrize("slurm", ["22.05"], indirect=True)
def test_a_cluster_with_a_collector_asks_three_times_a_minute(slurm: Slurm, tmp_path: Path) -> None:
    """Ten minutes with 200 nodes that poll every 5 s. A new job is known after one round of the collector."""
    clock = ManualClock(wall=time.time())
    ask = run_as(slurm)
    run = CollectorRun(SlurmCollector(CommandLine(ask), clock, 90.0), tmp_path, clock)
    first = slurm.submit("--gres=gpu:1", "-w", "n0", "-N1")
    assert run()
    nodes = [
        SlurmSource(
            SlurmOptions(node="n0", timeout_s=60.0, gres_conf=slurm.root / "etc" / "gres.conf", collected=tmp_path),
            run=ask,
            clock=clock,
            vendor=NVIDIA,
        )
        for _ in range(NODES)
    ]
    nodes[0].poll()
    steps = [nodes[0]._presence._steps.read()]  # all 200 are exporters of one node
    for node in nodes:
        node._presence._steps.read = lambda: steps[-1]  # type: ignore[method-assign]
    before = requests(slurm)
    held, asked = [first], Counter[str]()
    seen = []
    for poll in range(120):
        clock.advance(5.0)
        if poll == 60:
            asked = requests(slurm) - before
            held.append(slurm.submit("--gres=gpu:1", "-w", "n0", "-N1"))
            steps.append(
                SlurmSource(
                    SlurmOptions(node="n0", timeout_s=60.0, collected=tmp_path),
                    run=ask,
                    clock=clock,
                    vendor=NVIDIA,
                )._presence._steps.read()
            )
            before = requests(slurm)
        if poll % 18 == 17:
            assert run()
        for node in nodes:
            answer = node.poll()
            assert answer.problem == ""
        seen.append(sorted(grant.holder.job_id for grant in answer.grants))
    asked += requests(slurm) - before
    assert seen[59] == [first]
    assert seen[-1] == sorted(held)
    assert asked.total() <= 30, asked


@pytest.mark.parametrize("slurm", ["22.05", "24.11"], indirect=True)
def test_private_data_counts_from_the_round_after_a_reconfigure(slurm: Slurm, tmp_path: Path) -> None:
    clock = ManualClock(wall=time.time())
    run = CollectorRun(SlurmCollector(CommandLine(run_as(slurm)), clock, 90.0), tmp_path, clock)
    run.is_open = lambda: True
    conf = slurm.root / "etc" / "slurm.conf"
    before = conf.read_text("utf-8")
    assert run()
    for text, is_private in ((f"{before}PrivateData=jobs,users\n", True), (before, False)):
        conf.write_text(text, "utf-8")
        slurm.run("scontrol", "reconfigure")
        wait_for(
            lambda hides=is_private: run() is not hides, f"PrivateData {is_private}"
        )  # 24.11 starts a new slurmctld
        assert bool(run.answers) is not is_private
        assert bool((tmp_path / "n0.json").stat().st_mode & 0o004) is not is_private
