"""A collector's files: their content for a cluster, and the files that a node accepts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.memory_slurm import row_of_22_05, row_of_24_11

from gpu_exporter.attribution import registry
from gpu_exporter.attribution.slurm.collected import AGE_MAX_S, AHEAD_MAX_S, ANSWERS
from gpu_exporter.attribution.slurm.pace import Pace
from gpu_exporter.attribution.slurm.parse import Job, JobGpus, NodeRecord, SlurmConfig
from gpu_exporter.attribution.slurm.picture import Picture, parse_picture, render_picture
from gpu_exporter.attribution.slurm.source import SlurmOptions, SlurmSource
from gpu_exporter.attribution.source import Answer, SourceError
from gpu_exporter.clock import ManualClock
from gpu_exporter.cluster.answers import parse_cluster_jobs, parse_cluster_nodes
from gpu_exporter.cluster.collector import CollectorRun, SlurmCollector
from gpu_exporter.cluster.command_line import CommandLine
from gpu_exporter.cluster.site import CollectorSite
from gpu_exporter.slurm.gres import Gres
from gpu_exporter.web.request import Request, parse_head
from gpu_exporter.web.server import Reply

NODE = "NodeName={name} Arch=x86_64\n   Gres={gres}\n   GresUsed={used}\n   BootTime=1 SlurmdStartTime=4000000000\n\n"


class Cluster:
    """Two nodes with four GPUs each, and a third node without GPUs."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.directory = directory / "shared"
        self.directory.mkdir(mode=0o755)
        self.jobs: list[dict[str, Any]] = []
        self.used = {"n0": "gpu:h100:0(IDX:N/A)", "n1": "gpu:h100:0(IDX:N/A)"}
        self.private = "none"
        self.fault = ""
        self.asked: list[str] = []
        self.here: dict[str, int] = {}  # the jobs with a step on the node, and a process of each
        self.gres_conf = directory / "gres.conf"
        self.gres_conf.write_text("Name=gpu Type=h100 File=/dev/nvidia[0-3]\n", "utf-8")
        self.round = CollectorRun(SlurmCollector(CommandLine(self.run), self.clock, 90.0), self.directory, self.clock)

    def run(self, command: Sequence[str], timeout_s: float) -> str:
        text = " ".join(command)
        self.asked.append(text)
        if "listpids" in text:
            lines = [f"{pid} {job} batch - -" for job, pid in self.here.items()]
            return "\n".join(["PID JOBID STEPID LOCALID GLOBALID", *lines])
        if self.fault:
            raise SourceError(self.fault)
        if text == "scontrol show config":
            return f"ClusterName = lab\nPrivateData = {self.private}\nSLURM_CONF = /etc/slurm/slurm.conf\nPrologFlags = Contain\n"
        if text == "scontrol show node -d":
            nodes = [NODE.format(name=name, gres="gpu:h100:4", used=used) for name, used in self.used.items()]
            return "".join([*nodes, NODE.format(name="login", gres="(null)", used="gpu:0")])
        assert text.startswith("squeue --json -a --local -t RUNNING,"), text
        return json.dumps({"jobs": self.jobs, "errors": [], "meta": {"job_id": 1}})

    def source(self, node: str = "n0", each_s: float = 15.0, job_files: Path | None = None) -> SlurmSource:
        return SlurmSource(
            SlurmOptions(node=node, gres_conf=self.gres_conf, job_files=job_files, collected=str(self.directory)),
            run=self.run,
            clock=self.clock,
            pace=Pace(each_s, lambda: 0.0),
        )

    def begin(self, job: int, **fields: Any) -> None:
        """Start a job that runs for long; its GPUs are in use."""
        row = {"user_name": "ada", "user_id": 1000, "nodes": "n0", "gres_detail": ["gpu:h100:1(IDX:0)"], **fields}
        self.jobs.append(row_of_24_11(job_id=job, **{"start_time": 1_000, **row}))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def held(answer: Answer) -> list[tuple[str, str]]:
    return sorted((grant.holder.job_id, grant.device) for grant in answer.grants)


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
    assert answer.notice == "not in the collector's last round: job 7, so no GPU is reported as free"
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


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [(AGE_MAX_S + 1, "s old; check that"), (-AHEAD_MAX_S - 1, "in the future: check that the clocks")],
)
def test_a_file_with_a_time_too_old_or_too_far_ahead_is_refused(cluster: Cluster, seconds: float, reason: str) -> None:
    assert cluster.round()
    cluster.clock.advance(seconds)
    with pytest.raises(SourceError, match=reason):
        cluster.source().poll()


def test_files_are_refused_if_other_users_may_write_in_the_directory(cluster: Cluster) -> None:
    assert cluster.round()
    path = cluster.directory / "n0.json"
    cluster.source().poll()
    path.chmod(0o666)
    with pytest.raises(SourceError, match="other users may write there"):
        cluster.source().poll()
    path.chmod(0o644)
    cluster.directory.chmod(0o777)
    with pytest.raises(SourceError, match="other users may write there"):
        cluster.source().poll()
    cluster.directory.chmod(0o755)
    path.rename(path.with_name("real"))
    path.symlink_to(path.with_name("real"))
    with pytest.raises(SourceError, match="symbolic link"):
        cluster.source().poll()


@pytest.mark.skipif(os.geteuid() != 0, reason="files of another user need root")
def test_files_of_another_users_collector_are_accepted_in_that_users_directory(cluster: Cluster) -> None:
    assert cluster.round()
    os.chown(cluster.directory, 65534, 65534)
    os.chown(cluster.directory / "n0.json", 65534, 65534)
    cluster.source().poll()
    os.chown(cluster.directory / "n0.json", 1234, 1234)
    with pytest.raises(SourceError, match="other users may write there"):
        cluster.source().poll()


@pytest.mark.parametrize(("private", "mode"), [("none", 0o644), ("jobs", 0o640), ("users", 0o640), ("accounts", 0o644)])
def test_files_are_not_world_readable_if_slurm_hides_jobs_or_users(cluster: Cluster, private: str, mode: int) -> None:
    cluster.private = private
    assert cluster.round()
    assert (cluster.directory / "n0.json").stat().st_mode & 0o777 == mode


def test_hidden_jobs_are_not_served_without_a_password(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    run = CollectorRun(SlurmCollector(CommandLine(cluster.run), cluster.clock, 90.0), cluster.directory, cluster.clock)
    is_open = True
    run.is_open = lambda: is_open
    site = CollectorSite(run)

    def status() -> int:
        reply = site.answer_at_once(parse_head(f"GET {ANSWERS}n0 HTTP/1.1\r\nHost: x\r\n\r\n".encode()))
        assert reply is not None
        return reply.status

    assert run()
    assert status() == 200
    cluster.private = "users"
    cluster.clock.advance(3600.0)
    assert not run()
    assert run.answers == {}
    assert status() == 403
    assert "set basic_auth_users, or client_auth_type RequireAndVerifyClientCert" in caplog.text
    is_open = False  # a password was set, and the next reload applies it
    assert status() == 200
    is_open = True  # a reload without the password takes effect at once, not only in the next round
    assert status() == 403


def test_a_round_without_an_answer_keeps_the_files_and_is_logged_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert cluster.round()
    before = (cluster.directory / "n0.json").read_text()
    cluster.fault = "slurmctld is away"
    assert [cluster.round() for _ in range(3)] == [False] * 3
    assert (cluster.directory / "n0.json").read_text() == before
    cluster.fault = ""
    assert cluster.round()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "2 nodes with GPUs have an answer",
        "no new answers for the nodes",
        "2 nodes with GPUs have an answer",
    ]


def test_an_unknown_cluster_name_is_asked_for_again(cluster: Cluster) -> None:
    """slurmrestd before Slurm 24.05 reports the name only with jobs."""
    names = iter(["", "lab"])

    class Asked(CommandLine):
        def read_config(self) -> SlurmConfig:
            return super().read_config()._replace(cluster=next(names))

    collector = SlurmCollector(Asked(cluster.run), cluster.clock, 90.0)
    assert [collector.collect()["n0"].config.cluster for _ in range(3)] == ["", "lab", "lab"]


def test_a_collector_inside_another_site_serves_only_its_answers(cluster: Cluster) -> None:
    other = Reply(200, "text/plain", b"another's")

    class Host:
        def answer_at_once(self, request: Request) -> Reply | None:
            return other if request.path != "/metrics" else None

        def answer(self, request: Request) -> Reply:
            return other

    cluster.round()
    site = CollectorSite(cluster.round, Host())
    asked = {path: Request("GET", path, "", {}, keeps=True) for path in ("/-/ready", "/metrics", "/", f"{ANSWERS}n0")}
    found = {path: site.answer_at_once(request) or site.answer(request) for path, request in asked.items()}
    assert found.pop(f"{ANSWERS}n0").body.decode() == cluster.round.answers["n0"]
    assert set(found.values()) == {other}


def test_a_collector_serves_answers_metrics_and_probes(cluster: Cluster) -> None:
    site = CollectorSite(cluster.round)

    def get(path: str) -> tuple[int, str]:
        request = Request("GET", path, "", {}, keeps=True)
        reply = site.answer_at_once(request) or site.answer(request)
        return reply.status, reply.body.decode()

    assert get("/-/ready") == (503, "Slurm has not answered yet\n")
    assert "\ngpu_slurm_collector_last_success" not in get("/metrics")[1]
    cluster.fault = "slurmctld is away"
    cluster.round()
    assert get("/-/healthy")[0] == 200, "a restart would not bring slurmctld back"
    cluster.fault = ""
    cluster.round()
    assert get("/-/ready")[0] == 200
    assert get(f"{ANSWERS}n0") == (200, cluster.round.answers["n0"])
    assert [get(path)[0] for path in (f"{ANSWERS}n9", f"{ANSWERS}../n0", ANSWERS, "/")] == [404] * 4
    metrics = get("/metrics")[1].splitlines()
    (success,) = (line for line in metrics if line.startswith("gpu_slurm_collector_last_success"))
    assert float(success.split()[1]) == cluster.clock.wall()
    assert [line for line in metrics if line.startswith("gpu_slurm_collector_rounds_total")] == [
        'gpu_slurm_collector_rounds_total{result="success"} 1.0',
        'gpu_slurm_collector_rounds_total{result="error"} 1.0',
    ]


def test_the_configuration_is_asked_for_once_an_hour(cluster: Cluster) -> None:
    for _ in range(80):
        assert cluster.round()
        cluster.clock.advance(90.0)
    assert cluster.asked.count("scontrol show config") == 2
    assert len(cluster.asked) == 2 * 80 + 2


@pytest.mark.parametrize("node", ["../n0", "n0/..", "", ".n0", "n0\n", "a" * 300])
def test_an_invalid_node_name_is_refused(cluster: Cluster, node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "is_slurm_node", lambda *_: True)
    if not node:
        monkeypatch.setenv("SLURMD_NODENAME", "../n0")
    with pytest.raises(ValueError, match="is not the name of a node"):
        cluster.source(node)


numbers = st.integers(0, 64)
words = st.text(max_size=12)
shared = st.lists(st.tuples(numbers, words), max_size=3).map(tuple)
indexes = st.lists(numbers, max_size=4).map(tuple)
times = st.none() | st.floats(0, 4e9)
jobs = st.builds(
    Job,
    **dict.fromkeys(set(Job._fields) - {"start", "size"}, words),
    start=times,
    size=st.lists(words, max_size=3).map(tuple),
)
gpus = st.builds(JobGpus, indexes, numbers, numbers, shared, words)
pictures = st.builds(
    Picture,
    st.floats(0, 4e9),
    st.floats(1, 600),
    st.builds(SlurmConfig, words, words, words, st.frozensets(words, max_size=3), st.frozensets(words, max_size=3)),
    st.builds(
        NodeRecord,
        st.lists(st.tuples(words, numbers), max_size=3).map(tuple),
        st.builds(Gres, indexes, numbers, shared, words),
        times,
    ),
    st.lists(st.tuples(jobs, gpus), max_size=3).map(lambda pairs: {job.job_id: (job, own) for job, own in pairs}),
)


@given(pictures)
def test_a_written_answer_is_read_back_unchanged(picture: Picture) -> None:
    assert parse_picture(render_picture(picture)) == picture
    assert render_picture(picture).isascii()


@given(pictures, st.data())
def test_any_other_content_of_the_file_is_an_error(picture: Picture, data: st.DataObject) -> None:
    whole = json.loads(render_picture(picture))

    def spoil(value: Any) -> Any:
        if isinstance(value, dict) and value:
            key = data.draw(st.sampled_from(sorted(value)))
            return {**value, key: spoil(value[key])}
        if isinstance(value, list) and value:
            place = data.draw(st.integers(0, len(value) - 1))
            return [*value[:place], spoil(value[place]), *value[place + 1 :]]
        return data.draw(st.sampled_from([None, {}, [[]], float("nan"), "x", -1, [7]]))

    with contextlib.suppress(
        ValueError
    ):  # without an error the changed part does not matter, such as another valid number
        assert isinstance(parse_picture(json.dumps(spoil(whole))), Picture)


@pytest.mark.parametrize(("key", "value"), [("schema", 2), ("asked", float("nan")), ("interval", float("inf"))])
def test_an_answer_of_another_version_or_of_no_time_is_an_error(cluster: Cluster, key: str, value: float) -> None:
    assert cluster.round()
    path = cluster.directory / "n0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(SourceError, match="run the same version|is not a number"):
        cluster.source().poll()


@pytest.mark.parametrize("text", ["", "7", "[]", "{}", '{"schema": 2}', "[" * 100_000, '{"schema": 1}'])
def test_a_text_that_no_collector_writes_is_an_error(cluster: Cluster, text: str) -> None:
    (cluster.directory / "n0.json").write_text(text)
    with pytest.raises(SourceError, match=r"n0\.json: "):
        cluster.source().poll()


@pytest.mark.parametrize("name", ["../n9", "..", "a/../../n9", "n 9", ".n9", "n" * 300, ""])
def test_no_file_is_written_for_an_impossible_node_name(cluster: Cluster, name: str) -> None:
    """The server at slurmrestd's address must not choose where a root process writes."""

    class Asked(CommandLine):
        def read_nodes(self) -> dict[str, NodeRecord]:
            record = super().read_nodes()["n0"]
            return {"n0": record, name: record}

    collector = SlurmCollector(Asked(cluster.run), cluster.clock, 90.0)
    assert CollectorRun(collector, cluster.directory, cluster.clock)()
    assert [path.name for path in cluster.directory.parent.rglob("*.json")] == ["n0.json"]
