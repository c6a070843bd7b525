"""The Slurm source: what it grants, what it only knows to be held, and when it says that it does not know."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_exporter.attribution import registry
from gpu_exporter.attribution.slurm import CONFIG_EACH_S, DOUBT_EACH_S, GPUS_EACH_S, SlurmSource
from gpu_exporter.attribution.slurm_words import COLUMNS, SQUEUE_FORMAT
from gpu_exporter.attribution.source import SourceError
from gpu_exporter.clock import ManualClock
from gpu_exporter.model import Holder, HolderKey


class Cluster:
    """Answers the commands of one cluster whose node `n0` has four typed GPUs, unless a test says otherwise."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = ManualClock()
        self.jobs: dict[str, list[str]] = {}  # by job id: gres_detail
        self.states: dict[str, str] = {}
        self.columns: dict[str, str] = {}  # of squeue, for every job
        self.nodes = "n0"
        self.size = "cpu=1"
        self.used: str | None = ""
        self.configured = "gpu:h100:4"
        self.slurmd_start: object = 4_000_000_000
        self.private = "none"
        self.hidden: set[str] = set()
        self.json = "all"  # which commands speak JSON: all, squeue, none
        self.squeue_fault = ""  # what `squeue --json` fails with
        self.asked: list[str] = []
        self.limits: set[float] = set()  # seconds that commands were given
        self.between: list[dict[str, object]] = []  # changes that take effect after the next squeue
        self.gres_conf = directory / "gres.conf"
        self.gres_conf.write_text("Name=gpu Type=h100 File=/dev/nvidia[0-3]\n", "utf-8")
        self.source = SlurmSource("n0", run=self.run, clock=self.clock)

    def run(self, command: Sequence[str], timeout_s: float) -> str:
        text = " ".join(command)
        self.asked.append(text)
        self.limits.add(timeout_s)
        if self.squeue_fault and text.startswith("squeue --json"):
            raise SourceError(self.squeue_fault)
        if "--json" in command:
            if self.json == "none" or (self.json == "squeue" and command[0] == "scontrol"):
                raise SourceError(f"{command[0]} ended with status 1: {command[0]}: unrecognized option '--json'")
            wanted = [command[3]] if command[0] == "scontrol" else list(self.jobs)
            rows = [
                {"job_id": int(j), "nodes": self.nodes, "gres_detail": self.jobs[j]} for j in wanted if j in self.jobs
            ]
            return json.dumps({"jobs": rows})
        if command[0] == "squeue":
            shown = [self._row(job) for job in self.jobs if job not in self.hidden]
            for name, value in (self.between.pop(0) if self.between else {}).items():
                setattr(self, name, value)
            return "".join(shown)
        if text.startswith("scontrol show config"):
            return (
                f"ClusterName = lab\nPrivateData = {self.private}\nSLURM_CONF = {self.directory}/slurm.conf\n"
                f"SlurmdSpoolDir = {self.directory}/spool/%n\n"
            )
        if text.startswith("scontrol show node"):
            used = "" if self.used is None else f"   GresUsed={self.used}\n"
            return f"NodeName=n0\n   Gres={self.configured}\n{used}   BootTime=1 SlurmdStartTime={self.slurmd_start}\n"
        assert text.startswith("scontrol -o show job -d")
        gres = self.jobs[command[-1]][0]
        return (
            f"JobId={command[-1]} JobName=x JOB_GRES=gpu   Nodes=n0 CPU_IDs=0 Mem=0 GRES={gres} MinCPUsNode=1 Comment=y"
        )

    def _row(self, job: str) -> str:
        values = dict.fromkeys(COLUMNS, "N/A") | {
            "JobID": job,
            "UserName": "ada",
            "UserID": "1000",
            "State": self.states.get(job, "RUNNING"),
            "StartTime": "1700000000",
            "RestartCnt": "0",
            "tres-alloc": self.size,
            **self.columns,
        }
        return "".join(f"{values[column]}|" for column in COLUMNS) + "\n"

    def grants(self) -> list[tuple[str, str, str]]:
        """(holder, kind, device) of each grant."""
        return [(grant.holder.label, grant.kind, grant.device) for grant in self.source.poll().grants]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    return Cluster(tmp_path)


@pytest.mark.parametrize(
    ("speaks", "asked"),
    [
        ("all", ["scontrol show job 1 --json", "scontrol show job 2 --json"]),
        ("squeue", ["squeue --json -a"]),
        ("none", ["scontrol -o show job -d 1", "scontrol -o show job -d 2"]),
    ],
)
def test_jobs_hold_what_the_node_confirms(cluster: Cluster, speaks: str, asked: list[str]) -> None:
    cluster.json = speaks
    cluster.jobs = {"1": ["gpu:h100:2(IDX:0,3)"], "2": [""]}
    cluster.used = "gpu:h100:2(IDX:0,3)"
    cluster.source.poll()
    assert sorted(cluster.asked[-len(asked) :]) == asked
    answer = cluster.source.poll()
    assert [(c.kind, c.device, c.number, c.running, c.why, c.among) for c in answer.grants] == [
        ("minor", "0", "IDX 0", True, "", ()),
        ("minor", "3", "IDX 3", True, "", ()),
    ]
    holder = answer.grants[0].holder
    assert (holder.job_id, holder.user, holder.uid, holder.cluster, holder.units) == ("1", "ada", "1000", "lab", 2)
    assert (answer.problem, answer.notice, answer.conflicts, answer.hides_users) == ("", "", 0, False)


def test_every_job_of_this_node_is_asked_for_in_the_columns_that_are_read(cluster: Cluster) -> None:
    cluster.source.poll()
    assert cluster.asked == [
        "scontrol show config",
        f"squeue -h -a -w n0 -t RUNNING,CONFIGURING,SUSPENDED,STOPPED -O {SQUEUE_FORMAT}",
        "scontrol show node n0 -d",
    ]


@pytest.mark.parametrize(
    ("given", "slurmd", "asked"), [("n7", "n8", "n7"), ("", "n8", "n8"), ("", None, "gpu-12"), ("", "", "gpu-12")]
)
def test_the_node_is_the_one_given_else_slurmds_else_this_host_by_its_short_name(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, given: str, slurmd: str | None, asked: str
) -> None:
    if slurmd is not None:
        monkeypatch.setenv("SLURMD_NODENAME", slurmd)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="gpu-12.cluster.example"))
    SlurmSource(given, run=cluster.run, clock=cluster.clock).poll()
    assert f"scontrol show node {asked} -d" in cluster.asked


def test_every_command_has_the_time_that_was_given(cluster: Cluster) -> None:
    SlurmSource("n0", 2.5, run=cluster.run, clock=cluster.clock).poll()
    assert cluster.limits == {2.5}


@pytest.mark.parametrize("place", ["/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/opt/slurm.conf", ""])
def test_a_host_with_a_configuration_of_slurm_belongs_to_a_cluster(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(registry, "runs_slurmd", lambda _: False)
    monkeypatch.setattr(Path, "is_file", lambda path: str(path) == place)
    if place.startswith("/opt"):
        monkeypatch.setenv("SLURM_CONF", place)
    assert registry.is_slurm_node() == bool(place)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (
            {"ArrayJobID": "40", "ArrayTaskID": "7", "RestartCnt": "2"},
            {"key": HolderKey("slurm", "lab/42/2/1700000000"), "array_job_id": "40", "array_task_id": "7"},
        ),
        ({"HetJobID": "41", "HetJobOffset": "1"}, {"het_job_id": "41", "het_job_offset": "1"}),
        ({"StartTime": "N/A"}, {"key": HolderKey("slurm", "lab/42/0/"), "start_wall": None}),
    ],
)
def test_a_holder_is_all_that_squeue_says_of_the_job(
    cluster: Cluster, columns: dict[str, str], expected: dict[str, Any]
) -> None:
    cluster.columns = {"Account": "chem", "Partition": "gpu", "QOS": "high", **columns}
    hold(cluster)
    (grant,) = cluster.source.poll().grants
    holder = Holder(
        key=HolderKey("slurm", "lab/42/0/1700000000"),
        job_id="42",
        cluster="lab",
        user="ada",
        uid="1000",
        account="chem",
        partition="gpu",
        qos="high",
        source="slurm",
        resource="gres/gpu",
        start_wall=1700000000.0,
        units=1,
    )
    assert grant.holder == holder._replace(**expected)


def test_two_hidden_jobs_are_two_holders_who_are_nobody(cluster: Cluster) -> None:
    cluster.used = "gpu:h100:2(IDX:1,3)"
    nobody = Holder(HolderKey("slurm", ""), cluster="lab", source="slurm", resource="gres/gpu", identity="hidden")
    assert [grant.holder for grant in cluster.source.poll().grants] == [
        nobody._replace(key=HolderKey("slurm", f"lab/hidden/{index}")) for index in (1, 3)
    ]


@pytest.mark.parametrize(
    ("private", "hides"), [("jobs", True), ("users", True), ("accounts,Users", True), ("accounts,nodes", False)]
)
def test_a_cluster_that_hides_jobs_or_users_hides_who_runs_what(cluster: Cluster, private: str, hides: bool) -> None:
    cluster.private = private
    assert cluster.source.poll().hides_users == hides


def test_a_gpu_in_use_that_no_listed_job_has_is_held_without_a_name(cluster: Cluster) -> None:
    cluster.private = "jobs,users"
    cluster.jobs = {"1": ["gpu:h100:1(IDX:0)"], "2": ["gpu:h100:1(IDX:2)"]}
    cluster.hidden = {"2"}
    cluster.used = "gpu:h100:2(IDX:0,2)"
    answer = cluster.source.poll()
    assert [(c.holder.label, c.device, c.running) for c in answer.grants] == [
        ("job 1", "0", True),
        ("a hidden job", "2", False),
    ]
    hidden = answer.grants[1]
    assert (hidden.holder.identity, hidden.holder.job_id, hidden.holder.units) == ("hidden", "", None)
    assert hidden.why == "held by a job that Slurm does not show"
    assert answer.notice == (
        "IDX 2 in use by jobs that squeue does not list: PrivateData=jobs hides them from uid 0; run as SlurmUser or root"
    ).replace("uid 0", f"uid {os.geteuid()}")
    assert (answer.problem, answer.hides_users) == ("", True)


def test_a_grant_that_the_node_does_not_confirm_is_dropped_and_counted(cluster: Cluster) -> None:
    cluster.jobs = {"1": ["gpu:h100:2(IDX:0-1)"], "2": ["gpu:h100:1(IDX:2)"]}
    cluster.used = "gpu:h100:2(IDX:1-2)"
    answer = cluster.source.poll()
    assert sorted((c.holder.label, c.device) for c in answer.grants) == [("job 1", "1"), ("job 2", "2")]
    assert answer.conflicts == 1
    # Whichever of the two is wrong: the GPU is not called free.
    assert answer.problem == "job 1 claims IDX 0, which node n0 does not have in use"
    cluster.used = "gpu:h100:1(IDX:2)"
    assert cluster.source.poll().conflicts == 2


def test_a_job_that_begins_between_the_two_questions_is_seen_by_asking_once_more(cluster: Cluster) -> None:
    cluster.jobs = {"1": ["gpu:h100:1(IDX:0)"]}
    cluster.between = [
        {"jobs": {"1": ["gpu:h100:1(IDX:0)"], "2": ["gpu:h100:1(IDX:1)"]}, "used": "gpu:h100:2(IDX:0-1)"}
    ]
    assert cluster.grants() == [("job 1", "minor", "0"), ("job 2", "minor", "1")]


def test_a_lasting_disagreement_is_not_asked_about_twice_at_each_poll(cluster: Cluster) -> None:
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:0)"]}, "gpu:h100:2(IDX:0-1)"
    cluster.source.poll()
    cluster.asked.clear()
    cluster.source.poll()
    assert [text.split()[0] for text in cluster.asked] == ["squeue", "scontrol"]


def test_gpus_without_a_type_are_confirmed_by_their_number(cluster: Cluster) -> None:
    """GresUsed of such a node names no position."""
    cluster.gres_conf.write_text("Name=gpu File=/dev/nvidia[0-3]\n", "utf-8")
    cluster.configured = "gpu:4"
    cluster.jobs, cluster.used = {"1": ["gpu:2(IDX:1-2)"]}, "gpu:2"
    assert cluster.grants() == [("job 1", "minor", "1"), ("job 1", "minor", "2")]
    assert len([asked for asked in cluster.asked if asked.startswith("squeue")]) == 1  # nothing to ask again
    cluster.used = "gpu:3"
    answer = cluster.source.poll()
    assert [c.device for c in answer.grants] == ["1", "2"]
    assert answer.problem == "1 GPUs in use by jobs that squeue does not list, so no GPU is called free"
    cluster.used = "gpu:1"
    with pytest.raises(SourceError, match="the jobs of node n0 have 1 GPUs more than the node has in use"):
        cluster.source.poll()


def test_a_job_whose_gpus_are_not_there_yet_is_asked_again(cluster: Cluster) -> None:
    cluster.jobs, cluster.used = {"1": [""]}, ""
    assert cluster.grants() == []
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:3)"]}, "gpu:h100:1(IDX:3)"
    cluster.clock.advance(DOUBT_EACH_S)
    assert cluster.grants() == [("job 1", "minor", "3")]


def test_a_resized_job_is_asked_again_at_once(cluster: Cluster) -> None:
    cluster.jobs, cluster.used, cluster.nodes = (
        {"1": ["gpu:h100:1(IDX:0)", "gpu:h100:4(IDX:0-3)"]},
        "gpu:h100:1(IDX:0)",
        "n[0-1]",
    )
    assert cluster.source.poll().grants[0].holder.units == 5
    cluster.jobs, cluster.nodes = {"1": ["gpu:h100:1(IDX:0)"]}, "n0"  # gave back the other node, which n0 does not show
    assert cluster.source.poll().grants[0].holder.units == 5
    cluster.size = "cpu=2"
    assert cluster.source.poll().grants[0].holder.units == 1


def test_gpus_of_a_job_whose_record_is_no_longer_understood_have_a_holder_without_a_name(cluster: Cluster) -> None:
    assert hold(cluster) == "minor"
    cluster.jobs, cluster.size = {"42": ["gpu:h100:1(IDX:"]}, "cpu=2"
    for _ in range(2):
        assert cluster.grants() == [("a hidden job", "minor", "0")]


def test_a_job_whose_record_was_never_understood_costs_no_other_its_attribution(cluster: Cluster) -> None:
    cluster.jobs = {"1": ["gpu:h100:1(IDX:"], "2": ["gpu:h100:1(IDX:1)"]}
    cluster.used = "gpu:h100:2(IDX:0-1)"
    assert cluster.grants() == [("job 2", "minor", "1"), ("a hidden job", "minor", "0")]


def test_a_resize_that_no_column_shows_is_seen_within_minutes(cluster: Cluster) -> None:
    cluster.jobs, cluster.used, cluster.nodes = (
        {"1": ["gpu:h100:1(IDX:0)", "gpu:h100:4(IDX:0-3)"]},
        "gpu:h100:1(IDX:0)",
        "n[0-1]",
    )
    cluster.source.poll()
    cluster.jobs, cluster.nodes = {"1": ["gpu:h100:1(IDX:0)"]}, "n0"
    cluster.clock.advance(GPUS_EACH_S)
    assert cluster.source.poll().grants[0].holder.units == 1


def test_known_jobs_cost_the_controller_no_question_of_their_own(cluster: Cluster) -> None:
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:0)"]}, "gpu:h100:1(IDX:0)"
    cluster.source.poll()
    cluster.asked.clear()
    for _ in range(3):
        cluster.source.poll()
    assert not [text for text in cluster.asked if "show job" in text or "config" in text]


@pytest.mark.parametrize("state", ["SUSPENDED", "STOPPED", "CONFIGURING"])
def test_a_stopped_job_holds_and_does_not_run(cluster: Cluster, state: str) -> None:
    cluster.jobs, cluster.used, cluster.states = {"1": ["gpu:h100:1(IDX:0)"]}, "gpu:h100:1(IDX:0)", {"1": state}
    (grant,) = cluster.source.poll().grants
    assert (grant.running, grant.why) == (False, f"the job is {state}")


def test_autodetect_counts_in_nvmls_order_and_needs_as_many_gpus(cluster: Cluster) -> None:
    cluster.gres_conf.write_text("AutoDetect=nvml\nName=gpu Type=h100 File=/dev/nvidia[3,1,0,2]\n", "utf-8")
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:2)"]}, "gpu:h100:1(IDX:2)"
    (grant,) = cluster.source.poll().grants
    assert (grant.kind, grant.device, grant.among, grant.total) == ("index", "2", ("3", "1", "0", "2"), 4)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "GPUs in use cannot be resolved: no gres.conf at "),
        (
            "Name=gpu File=/dev/nvidia[0",
            "gres.conf:1: File: '/dev/nvidia[0': brackets do not match; name the file with",
        ),
        ("Name=gpu Type=h100 File=/dev/nvidia0", "gres.conf:1: names 1 GPUs for the node's Gres=gpu:h100:4"),
        ("AutoDetect=rsmi", "gres.conf: AutoDetect=rsmi does not list GPUs"),
    ],
)
def test_a_gres_conf_that_proves_no_order_resolves_nothing_and_says_why(
    cluster: Cluster, text: str | None, problem: str
) -> None:
    cluster.gres_conf.unlink() if text is None else cluster.gres_conf.write_text(text, "utf-8")
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:2)"]}, "gpu:h100:1(IDX:2)"
    answer = cluster.source.poll()
    assert [(c.kind, c.device, c.number) for c in answer.grants] == [("unproven", "2", "IDX 2")]
    assert problem in answer.problem
    assert answer.problem == f"GPUs in use cannot be resolved: {answer.grants[0].reason}"


def test_a_position_that_gres_conf_does_not_have_is_not_resolved(cluster: Cluster) -> None:
    assert hold(cluster, jobs={"42": ["gpu:h100:1(IDX:4)"]}, used="gpu:h100:1(IDX:4)") == "unproven"
    (grant,) = cluster.source.poll().grants
    assert (grant.device, grant.number, grant.reason) == ("", "IDX 4", "gres.conf names no whole GPU at IDX 4")


def test_only_this_nodes_lines_of_gres_conf_count(cluster: Cluster) -> None:
    other = "NodeName=n1 Name=gpu Type=h100 File=/dev/nvidia[0-3]\n"
    cluster.gres_conf.write_text(f"{other}NodeName=n0 Name=gpu Type=h100 File=/dev/nvidia[3,2,1,0]\n", "utf-8")
    assert hold(cluster) == "minor"
    assert cluster.grants() == [("job 42", "minor", "3")]


def test_an_idle_node_without_a_gres_conf_has_no_problem(cluster: Cluster) -> None:
    cluster.gres_conf.unlink()
    assert cluster.source.poll() == ([], "", "", 0, False)


def test_two_files_that_disagree_prove_nothing(cluster: Cluster) -> None:
    cached = cluster.directory / "spool" / "n0" / "conf-cache"
    cached.mkdir(parents=True)
    (cached / "gres.conf").write_text("Name=gpu Type=h100 File=/dev/nvidia[0-3]\n", "utf-8")
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:2)"]}, "gpu:h100:1(IDX:2)"
    assert cluster.grants() == [("job 1", "minor", "2")]
    (cached / "gres.conf").write_text("Name=gpu Type=h100 File=/dev/nvidia[2-3],/dev/nvidia[0-1]\n", "utf-8")
    answer = cluster.source.poll()
    assert answer.grants[0].kind == "unproven"
    assert "give the GPUs different orders" in answer.problem
    named = SlurmSource("n0", gres_conf=cached / "gres.conf", run=cluster.run, clock=cluster.clock)
    assert [(c.kind, c.device) for c in named.poll().grants] == [("minor", "0")]


def test_the_copy_that_a_configless_slurmd_keeps_is_found(cluster: Cluster) -> None:
    cached = cluster.directory / "spool" / "n0" / "conf-cache"
    cached.mkdir(parents=True)
    cluster.gres_conf.rename(cached / "gres.conf")
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:2)"]}, "gpu:h100:1(IDX:2)"
    assert cluster.grants() == [("job 1", "minor", "2")]


HELD: Mapping[str, object] = {"jobs": {"42": ["gpu:h100:1(IDX:0)"]}, "used": "gpu:h100:1(IDX:0)"}
REVERSED = "Name=gpu Type=h100 File=/dev/nvidia[3,2,1,0]\n"


def hold(cluster: Cluster, **more: object) -> str:
    """What the grant of the one job rests on."""
    for name, value in {**HELD, **more}.items():
        setattr(cluster, name, value)
    (grant,) = cluster.source.poll().grants
    return grant.kind


def test_a_gres_conf_newer_than_slurmd_is_not_what_slurmd_goes_by(cluster: Cluster) -> None:
    now = int(time.time())
    assert hold(cluster, slurmd_start=now + 1) == "minor"
    cluster.slurmd_start = now - 60
    answer = cluster.source.poll()
    assert answer.grants[0].kind == "unproven"
    assert "was changed after slurmd started, which still counts as before: restart slurmd" in answer.problem


def test_a_file_that_kept_its_date_was_changed_all_the_same(cluster: Cluster) -> None:
    """As rsync -a and cp -p leave it."""
    cluster.gres_conf.write_text(REVERSED, "utf-8")
    os.utime(cluster.gres_conf, (1, 1))
    assert hold(cluster, slurmd_start=int(time.time()) - 60) == "unproven"


def test_an_included_file_that_was_changed_counts_too(cluster: Cluster) -> None:
    cluster.gres_conf.write_text("Include gpus.conf\n", "utf-8")
    (cluster.directory / "gpus.conf").write_text(REVERSED, "utf-8")
    assert hold(cluster, slurmd_start=int(time.time()) + 1) == "minor"
    later = int(time.time()) + 100
    os.utime(cluster.directory / "gpus.conf", (later, later))
    assert cluster.source.poll().grants[0].kind == "unproven"


def test_a_directory_that_is_called_conf_is_no_copy_of_slurmds(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    assert hold(Cluster(tmp_path / "conf"), slurmd_start=int(time.time()) - 60) == "unproven"


def test_a_node_that_does_not_say_when_slurmd_started_proves_nothing(cluster: Cluster) -> None:
    assert hold(cluster, slurmd_start="None") == "unproven"


def fail(cluster: Cluster, word: str, text: str, times: int = 10**9) -> list[Sequence[str]]:
    """Let commands with this word among theirs fail; which, is listed as they do."""
    real, failed = cluster.run, list[Sequence[str]]()

    def run(command: Sequence[str], timeout_s: float) -> str:
        if word in command and len(failed) < times:
            failed.append(command)
            raise SourceError(text)
        return real(command, timeout_s)

    cluster.source._run_command = run
    return failed


@pytest.mark.parametrize(
    "text", ["scontrol did not answer within 5 s", "slurm_load_jobs error: Invalid job id specified"]
)
def test_a_job_that_cannot_be_asked_about_costs_no_other_its_attribution(cluster: Cluster, text: str) -> None:
    failed = fail(cluster, "43", text)
    cluster.jobs = {"42": ["gpu:h100:1(IDX:0)"], "43": ["gpu:h100:1(IDX:1)"]}
    cluster.used = "gpu:h100:2(IDX:0-1)"
    for _ in range(5):
        cluster.clock.advance(5.0)
        assert [(c.holder.label, c.device) for c in cluster.source.poll().grants] == [
            ("job 42", "0"),
            ("a hidden job", "1"),
        ]
    assert len([asked for asked in cluster.asked if "show job 42" in asked]) <= 2
    assert len(failed) == 1
    cluster.clock.advance(DOUBT_EACH_S)
    cluster.source.poll()
    assert len(failed) == 2


def test_a_fault_of_another_kind_does_not_end_the_use_of_json(cluster: Cluster) -> None:
    fail(cluster, "--json", "scontrol ended with status 1: fatal: failed to initialize auth plugin", times=2)
    for name, value in HELD.items():
        setattr(cluster, name, value)
    cluster.source.poll()
    cluster.clock.advance(DOUBT_EACH_S)
    cluster.source.poll()
    cluster.clock.advance(DOUBT_EACH_S)
    assert [c.holder.label for c in cluster.source.poll().grants] == ["job 42"]
    assert not [asked for asked in cluster.asked if "-o show job" in asked]


def test_a_cluster_whose_json_is_too_long_is_asked_in_plain_text(cluster: Cluster) -> None:
    cluster.json, cluster.squeue_fault = "squeue", "squeue printed more than 16777216 bytes"
    assert hold(cluster) == "minor"
    assert cluster.grants() == [("job 42", "minor", "0")]
    assert cluster.asked[-3] == "scontrol -o show job -d 42"


def test_squeue_that_does_not_answer_in_json_is_asked_so_again(cluster: Cluster) -> None:
    cluster.json, cluster.squeue_fault = "squeue", "squeue did not answer within 5 s"
    cluster.jobs, cluster.used = {"42": ["gpu:h100:1(IDX:0)"]}, "gpu:h100:1(IDX:0)"
    with pytest.raises(SourceError, match="squeue did not answer within 5 s"):
        cluster.source.poll()
    cluster.squeue_fault = ""
    assert cluster.grants() == [("job 42", "minor", "0")]
    assert cluster.asked[-1] == "squeue --json -a"


def test_a_slurm_that_was_upgraded_is_asked_in_json_again(cluster: Cluster) -> None:
    cluster.json = "none"
    assert hold(cluster) == "minor"
    cluster.json = "all"
    cluster.asked.clear()
    cluster.clock.advance(CONFIG_EACH_S)
    cluster.source.poll()
    assert [asked for asked in cluster.asked if "show job" in asked] == ["scontrol show job 42 --json"]


@pytest.mark.parametrize(
    "used", ["gpu:(null):1(IDX:0)", "gpu:h100:1(IDX:0),nic:(null):0(IDX:N/A),bandwidth:lustre:no_consume:0"]
)
def test_types_that_are_null_and_other_resources_are_understood(cluster: Cluster, used: str) -> None:
    assert hold(cluster, used=used) == "minor"


@pytest.mark.parametrize("used", ["gpu:h100:0(IDX:N/A),shard:h100:2(IDX:1)", "gpu:h100:0(IDX:N/A),mps:50(IDX:1)"])
def test_shards_and_mps_leave_no_gpu_free(cluster: Cluster, used: str) -> None:
    cluster.used = used
    assert "shards and MPS are not attributed, so no GPU is called free" in cluster.source.poll().problem


def test_gpus_without_an_index_leave_no_gpu_free(cluster: Cluster) -> None:
    cluster.jobs, cluster.used = {"1": ["gpu:h100:2"]}, "gpu:h100:2"
    assert cluster.source.poll().problem == (
        "job 1 has 2 GPUs without an index: File= in gres.conf must name device files"
    )


def test_without_a_list_of_what_is_in_use_nothing_is_believed(cluster: Cluster) -> None:
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:2)"]}, None
    with pytest.raises(SourceError, match="prints no GresUsed"):
        cluster.source.poll()


def test_a_job_that_was_requeued_is_another_holder(cluster: Cluster) -> None:
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:2)"]}, "gpu:h100:1(IDX:2)"
    assert cluster.source.poll().grants[0].holder.key.incarnation == "lab/1/0/1700000000"


def test_a_poll_of_a_slow_slurm_has_one_deadline_however_many_jobs_there_are(cluster: Cluster) -> None:
    cluster.jobs = {str(number): ["gpu:h100:1(IDX:1)"] for number in range(100, 120)}
    given: list[float] = []
    slow = 4.0

    def run(command: Sequence[str], timeout_s: float) -> str:
        given.append(timeout_s)
        cluster.clock.advance(slow)
        return cluster.run(command, timeout_s)

    source = SlurmSource("n0", run=run, clock=cluster.clock)
    assert source.poll().grants == []
    assert given == [5.0, 5.0, 2.0]
    slow = 11.0
    with pytest.raises(SourceError, match="^Slurm takes longer than 10 s for the answers of one poll$"):
        source.poll()
    slow = 0.0
    cluster.asked.clear()
    source.poll()
    # None of the jobs is left alone for what was not its fault.
    assert len({text for text in cluster.asked if text.startswith("scontrol show job")}) == 20
