"""An exporter that starts while slurmctld is silent: running jobs keep their GPUs by proof, not by number."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.attribution.slurm_cluster import Cluster, fail
from tests.unit.attribution.slurm_quiet_node import KTHREADD, Filing, Node

from gpu_exporter.agent.attribution.slurm.memory import FILE, SAVE_EACH_S
from gpu_exporter.agent.attribution.slurm.pace import Pace
from gpu_exporter.agent.attribution.slurm.source import SlurmOptions, SlurmSource
from gpu_exporter.agent.attribution.source import Answer, SourceError
from gpu_exporter.common.vendor import NVIDIA

AWAY = "Unable to contact slurm controller"
BOTH = {"j1": "gpu:h100:1(IDX:0)", "j2": "gpu:h100:1(IDX:1)"}


def start(cluster: Cluster, *, writes: bool = True, files: Path | None = None, each_s: float = 60.0) -> None:
    """An exporter that has just started, with the memory of the previous exporter."""
    cluster.source = SlurmSource(
        SlurmOptions(
            node="n0",
            procfs=cluster.directory / "proc",
            job_files=files,
            state=cluster.directory / "state",
            keeps_state=writes,
        ),
        run=cluster.run,
        clock=cluster.clock,
        pace=Pace(each_s, lambda: 0.0),
        vendor=NVIDIA,
    )


def restart(cluster: Cluster, files: Path | None = None) -> None:
    """Restart the exporter some seconds later, while slurmctld does not answer."""
    cluster.clock.advance(20.0)
    start(cluster, files=files)
    fail(cluster, "config", AWAY)


def held(answer: Answer) -> dict[str, str]:
    return {grant.holder.job_id: grant.device for grant in answer.grants if grant.holder.job_id}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    found = Node(tmp_path)
    (tmp_path / "state").mkdir()
    (tmp_path / "proc" / "stat").write_text("cpu 1 2\nbtime 1700000000\n", "utf-8")
    found.begin(**BOTH)
    for pid in (1001, 1002):
        found.run_job(pid, "S")
    start(found)
    found.source.poll()
    return found


def test_a_job_with_a_running_process_keeps_its_gpu_while_slurmctld_is_silent(node: Node) -> None:
    answered = node.clock.monotonic()
    restart(node)
    answer = node.source.poll()
    assert (held(answer), answer.problem) == ({"1": "0", "2": "1"}, AWAY)
    assert (answer.is_old, answer.as_of) == (True, answered)
    assert all(grant.confirmed == 0.0 for grant in answer.grants), "its step proves at this poll that the job is here"
    assert answer.grants[0].holder.user == "ada"
    node.clock.advance(3600.0)
    assert held(node.source.poll()) == {"1": "0", "2": "1"}


def test_a_job_number_alone_proves_nothing(node: Node) -> None:
    """Without a look in between, job 1 was requeued, job 2 has ended, and job 3 is new."""
    node.put(1001, "1001 (python) S 1 1 1 0 -1 64 " + "0 " * 12 + "99 " + "0 " * 17)
    node.steps = {"1": {1001}, "3": {1003}}
    restart(node)
    answer = node.source.poll()
    assert held(answer) == {}
    assert [(grant.holder.identity, grant.running) for grant in answer.grants] == [("hidden", False)] * 2
    assert answer.problem, "so no GPU is reported as free"


def test_another_boot_proves_nothing(node: Node) -> None:
    (node.directory / "proc" / "stat").write_text("btime 1700009000\n", "utf-8")
    restart(node)
    assert held(node.source.poll()) == {}


def test_pids_of_another_proc_prove_nothing(node: Node) -> None:
    node.put(2, KTHREADD.replace("kthreadd", "sh"))
    restart(node)
    assert held(node.source.poll()) == {}


def test_an_answer_of_slurmctld_replaces_the_memory(node: Node) -> None:
    restart(node)
    node.source.poll()
    node.source._controller._run_command = node.run
    node.begin(j1="gpu:h100:1(IDX:3)")
    node.clock.advance(300.0)
    answer = node.source.poll()
    assert (held(answer), answer.problem, answer.is_old) == ({"1": "3"}, "", False)


def test_processes_that_start_after_the_last_look_are_remembered_too(node: Node) -> None:
    """A job whose first processes have ended is recognized by its later processes."""
    start(node, each_s=1000.0)
    node.source.poll()
    node.steps = {"1": {1001, 1005}, "2": {1002}}
    node.run_job(1005, "S")
    node.clock.advance(SAVE_EACH_S / 2)
    node.source.poll()
    node.clock.advance(SAVE_EACH_S / 2)
    node.source.poll()
    node.steps = {"1": {1005}, "2": {1002}}
    restart(node)
    assert held(node.source.poll()) == {"1": "0", "2": "1"}


def test_the_prologs_file_proves_a_job_without_a_process(tmp_path: Path, node: Node) -> None:
    (tmp_path / "filing").mkdir()
    filing = Filing(tmp_path / "filing")
    (filing.directory / "state").mkdir()
    (filing.directory / "proc" / "stat").write_text("btime 1700000000\n", "utf-8")
    filing.begin(**BOTH)
    filing.steps = {"1": set(), "2": set()}
    for job in ("1", "2"):
        filing.file(job, f"gpus={int(job) - 1}\nvisible=\n")
    start(filing, files=filing.files)
    filing.source.poll()
    filing.clock.advance(30.0)
    filing.file("2", "gpus=3\nvisible=\n")  # another run of that job
    restart(filing, filing.files)
    assert held(filing.source.poll()) == {"1": "0"}


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"version": 9}', '{"version":1,"node":"n7"}', "\xff", "9" * 5_000_000]
)
def test_a_memory_that_is_not_understood_is_ignored(node: Node, text: str) -> None:
    (node.directory / "state" / FILE).write_bytes(text.encode("latin-1"))
    restart(node)
    with pytest.raises(SourceError, match=AWAY):
        node.source.poll()


def test_the_memory_is_private_and_only_the_daemon_writes_it(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    path = node.directory / "state" / FILE
    assert path.stat().st_mode & 0o777 == 0o600
    for file in path.parent.iterdir():
        file.unlink()
    start(node, writes=False)
    node.source.poll()
    assert not list(path.parent.iterdir())
    path.parent.rmdir()
    start(node)
    for _ in range(3):
        node.clock.advance(SAVE_EACH_S)
        node.source.poll()
    assert caplog.text.count("a restart of the exporter loses the holders of GPUs") == 1
