"""The collector's answers: jobs and nodes of a cluster, and what a node makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.testbed.memory_slurm import row_of_22_05, row_of_24_11
from tests.unit.cluster.collector_bench import NODE, Cluster, held

from gpu_exporter.agent.attribution.slurm.parse import JobGpus, NodeRecord
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.agent.slurm_collector.answers import parse_cluster_jobs, parse_cluster_nodes
from gpu_exporter.common.slurm.gres import Gres


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.mark.parametrize("make", [row_of_22_05, row_of_24_11])
def test_jobs_of_both_json_formats_are_read(make: Any) -> None:
    number = int if make is row_of_22_05 else lambda value: {"set": True, "infinite": False, "number": value}
    row = make(
        job_id=9,
        user_name="ada",
        user_id=1000,
        account="phys",
        partition="gpu",
        qos="high",
        array_job_id=number(7),
        array_task_id=number(0),
        het_job_id=number(5),
        het_job_offset=number(1),
        nodes="n[0-1]",
        gres_detail=["gpu:h100:2(IDX:0,3)", "gpu:h100:1(IDX:1)"],
        name='"}],"jobs":[{"job_id": 1',
    )
    ((job, gpus),) = parse_cluster_jobs(json.dumps({"jobs": [row]}))
    assert job._asdict() == {
        "job_id": "9",
        "user": "ada",
        "account": "phys",
        "partition": "gpu",
        "qos": "high",
        "state": "RUNNING",
        "start": 1_799_991_000.0,
        "restarts": "1",
        "array_job_id": "7",
        "array_task_id": "0",
        "het_job_id": "5",
        "het_job_offset": "1",
        "size": (),
        "uid": "1000",
    }
    assert gpus == {"n0": JobGpus((0, 3), 3), "n1": JobGpus((1,), 3)}


def test_an_unset_number_is_missing() -> None:
    """24.11 prints a number although it is not set; some releases set the array of a single job to the job itself."""
    unset = {"set": False, "infinite": False, "number": 3}
    row = row_of_24_11(job_id=7, array_job_id=7, array_task_id=unset, start_time=unset, nodes="n0", gres_detail=[])
    ((job, _),) = parse_cluster_jobs(json.dumps({"jobs": [row]}))
    assert (job.array_job_id, job.array_task_id, job.start) == ("", "", None)


@pytest.mark.parametrize(
    ("fields", "user", "uid"),
    [
        ({"user_name": "", "user_id": 1001}, "", "1001"),
        ({"user_name": None, "user_id": {"set": True, "infinite": False, "number": 1001}}, "", "1001"),
        ({"user_name": "root", "user_id": 0}, "root", "0"),
        ({"user_name": "ada", "user_id": {"set": False, "infinite": False, "number": 0}}, "ada", ""),
        ({"user_name": "ada"}, "ada", ""),
    ],
)
def test_a_missing_uid_is_unknown_and_not_root(fields: dict[str, Any], user: str, uid: str) -> None:
    row = row_of_24_11(job_id=7, nodes="n0", gres_detail=[])
    row = {key: value for key, value in row.items() if not key.startswith("user_")} | fields
    ((job, _),) = parse_cluster_jobs(json.dumps({"jobs": [row]}))
    assert (job.user, job.uid) == (user, uid)


@pytest.mark.parametrize(
    ("state", "holds"),
    [
        ("RUNNING", "RUNNING"),
        (["RUNNING", "CONFIGURING"], "CONFIGURING"),
        (["SUSPENDED"], "SUSPENDED"),
        (["RUNNING", "STOPPED"], "STOPPED"),
        (["COMPLETED", "COMPLETING"], None),
        (["RUNNING", "COMPLETING"], None),
        ("PENDING", None),
        (["FAILED"], None),
    ],
)
def test_a_job_holds_its_gpus_only_in_certain_states(state: object, holds: str | None) -> None:
    row = row_of_24_11(job_state=state, nodes="n0", gres_detail=[])
    assert [job.state for job, _ in parse_cluster_jobs(json.dumps({"jobs": [row]}))] == ([holds] if holds else [])


@pytest.mark.parametrize(
    "wrong",
    [
        {"job_id": None},
        {"nodes": "n[0-1]"},
        {"nodes": "n[0-99999999]"},
        {"nodes": 7},
        {"gres_detail": "gpu:1"},
        {"gres_detail": ["gpu:1(IDX:0,0)"]},
        {"user_name": ["ada"]},
        {"start_time": "yesterday"},
        {"job_state": None},
    ],
)
def test_a_job_that_cannot_be_parsed_affects_no_other_job(wrong: dict[str, Any]) -> None:
    good = {"nodes": "n0", "gres_detail": ["gpu:1(IDX:0)"]}
    rows = [{**row_of_24_11(job_id=1, **good), **wrong}, row_of_24_11(job_id=2, **good)]
    assert [job.job_id for job, _ in parse_cluster_jobs(json.dumps({"jobs": rows}))] == ["2"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"jobs": 7}', '{"jobs": [], "errors": ["down"]}', "[" * 100_000])
def test_an_invalid_answer_for_jobs_is_an_error(text: str) -> None:
    with pytest.raises(SourceError, match="Slurm's JSON|Slurm answered with errors"):
        parse_cluster_jobs(text)


def test_only_nodes_with_gpus_are_read_and_a_node_that_cannot_be_parsed_affects_no_other() -> None:
    good = NODE.format(name="n0", gres="gpu:h100:4", used="gpu:h100:1(IDX:2)")
    odd = NODE.format(name="n1", gres="gpu:h100:4", used="gpu:h100:1(IDX:2")
    none = NODE.format(name="login", gres="(null)", used="gpu:0")
    nodes = parse_cluster_nodes(good + odd + none)
    assert nodes == {"n0": NodeRecord((("h100", 4),), Gres((2,)), 4_000_000_000.0)}
    assert parse_cluster_nodes(none) == {}
    with pytest.raises(SourceError, match="node n1: scontrol show node -d: "):
        parse_cluster_nodes(odd)
    with pytest.raises(SourceError, match="names no node"):
        parse_cluster_nodes("")


def test_a_node_reads_the_collectors_answer_and_does_not_ask_slurmctld(cluster: Cluster) -> None:
    cluster.begin(7)
    cluster.begin(8, nodes="n[0-1]", gres_detail=["gpu:h100:1(IDX:2)", "gpu:h100:1(IDX:3)"])
    cluster.used = {"n0": "gpu:h100:2(IDX:0,2)", "n1": "gpu:h100:1(IDX:3)"}
    cluster.here = {"7": 70, "8": 80}
    assert cluster.round()
    assert sorted(path.name for path in cluster.directory.iterdir()) == ["n0.json", "n1.json"]
    cluster.asked.clear()
    assert held(cluster.source().poll()) == [("7", "0"), ("8", "2")]
    assert held(cluster.source("n1").poll()) == [("8", "3")]
    assert {text.split()[1] for text in cluster.asked} == {"listpids"}


def test_a_job_that_is_not_yet_in_the_picture_is_searched_again_soon(cluster: Cluster) -> None:
    assert cluster.round()
    source = cluster.source(each_s=60.0)
    assert source.poll().grants == []
    cluster.begin(7)
    cluster.used["n0"] = "gpu:h100:1(IDX:0)"
    cluster.here = {"7": 70}
    cluster.clock.advance(5.0)
    answer = source.poll()
    assert (answer.grants, answer.problem, answer.is_late) == ([], "", True)
    assert answer.notice == "the collector's last round lacks job 7, so no GPU is reported as free"
    assert cluster.round()
    cluster.clock.advance(5.0)
    answer = source.poll()
    assert (held(answer), answer.is_late) == ([("7", "0")], False)


def test_a_job_requeued_since_the_round_is_not_confirmed_as_the_earlier_run(cluster: Cluster) -> None:
    cluster.begin(7)
    cluster.used["n0"] = "gpu:h100:1(IDX:0)"
    cluster.here = {"7": 70}
    assert cluster.round()
    asked = cluster.clock.monotonic()
    source = cluster.source()
    cluster.clock.advance(5.0)
    (grant,) = source.poll().grants
    assert grant.confirmed == 0.0, "its step confirms it now"
    cluster.here = {"7": 71}
    for _ in range(4):
        cluster.clock.advance(5.0)
        (grant,) = source.poll().grants
        assert grant.confirmed == asked
    cluster.jobs[0]["restart_cnt"] = 2
    assert cluster.round()
    for _ in range(5):
        cluster.clock.advance(5.0)
        (grant,) = source.poll().grants
    assert (grant.confirmed, grant.holder.key.incarnation) == (0.0, "lab/7/2/1000")


def test_where_a_prolog_writes_files_only_jobs_with_a_file_may_have_gpus(cluster: Cluster, tmp_path: Path) -> None:
    files = tmp_path / "jobs"
    files.mkdir(mode=0o755)
    assert cluster.round()
    source = cluster.source(job_files=files)
    assert not source.poll().is_late
    cluster.here = {"7": 70}
    assert not source.poll().is_late, "a job without GPUs"
    cluster.here = {"7": 70, "8": 80}
    (files / "8").write_text("gpus=0\n")
    assert source.poll().is_late


def test_a_job_that_began_after_the_nodes_were_read_holds_its_gpus(cluster: Cluster) -> None:
    cluster.begin(7, start_time=int(cluster.clock.wall()))
    assert cluster.round()
    answer = cluster.source().poll()
    assert (held(answer), answer.problem, answer.conflicts) == ([("7", "0")], "", 0)
    cluster.jobs.clear()
    cluster.begin(7, start_time=int(cluster.clock.wall()) - 60)
    assert cluster.round()
    answer = cluster.source().poll()
    assert (held(answer), answer.conflicts) == ([], 1), "a node record that is much newer than the job contradicts it"


def test_a_job_known_only_from_the_picture_is_as_old_as_the_picture(cluster: Cluster) -> None:
    cluster.begin(7)
    cluster.used["n0"] = "gpu:h100:1(IDX:0)"
    assert cluster.round()
    asked = cluster.clock.monotonic()
    cluster.clock.advance(40.0)
    (grant,) = cluster.source().poll().grants
    assert (grant.confirmed, grant.renewed_s) == (asked, pytest.approx(92.5, abs=15.0))
    assert grant.renewed_s >= 90.0
