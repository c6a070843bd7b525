"""The Slurm source: what it grants, what it only knows to be held, and when it reports that holders are unknown."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_exporter.attribution import registry
from gpu_exporter.attribution.slurm.controller import (
    CONFIG_EACH_S,
    DOUBT_EACH_S,
    JOB_EACH_S,
    LIST_EACH_S,
    SINGLES_MAX,
)
from gpu_exporter.attribution.slurm.gres.epochs import BEFORE
from gpu_exporter.attribution.slurm.pace import INTERVAL_MAX_S, Pace
from gpu_exporter.attribution.slurm.parse import COLUMNS, SINFO_FORMAT, SQUEUE_FORMAT
from gpu_exporter.attribution.slurm.source import SlurmOptions, SlurmSource
from gpu_exporter.attribution.source import Answer, CommandFailed, SlowSource, SourceError
from gpu_exporter.clock import ManualClock
from gpu_exporter.model.holders import Holder, HolderKey


class Cluster:
    """Answers the commands of one cluster. Its node `n0` has four typed GPUs, unless a test sets otherwise."""

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
        self.job_start = 4_000_000_500
        self.private = "none"
        self.flags = "(null)"
        self.hidden: set[str] = set()
        self.json = "all"  # which commands support JSON: all, squeue, none
        self.ambiguous = False  # whether a job's name makes the plain text ambiguous
        self.squeue_fault = ""  # error of `squeue --json`
        self.asked: list[str] = []
        self.limits: set[float] = set()  # time limits in seconds that commands got
        self.after_node: list[dict[str, object]] = []  # changes that take effect after the next question for the node
        self.gres_conf = directory / "gres.conf"
        self.gres_conf.write_text("Name=gpu Type=h100 File=/dev/nvidia[0-3]\n", "utf-8")
        self.steps: dict[str, set[int]] | None = None  # processes by job id; without a value, one process of every job
        self.blind = ""  # error of listpids
        self.left: dict[str, set[int]] | None = None  # what listpids lists before it fails
        self.source = self.new_source(Pace(0.0))

    def new_source(self, pace: Pace) -> SlurmSource:
        return SlurmSource(
            SlurmOptions(node="n0", procfs=self.directory / "proc"), run=self.run, clock=self.clock, pace=pace
        )

    def run(self, command: Sequence[str], timeout_s: float) -> str:
        text = " ".join(command)
        self.asked.append(text)
        self.limits.add(timeout_s)
        if text == "scontrol listpids * n0":
            return self._list_steps()
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
            if "-j" in command:
                asked = command[command.index("-j") + 1]
                if asked not in self.jobs or asked in self.hidden:
                    raise SourceError("squeue ended with status 1: slurm_load_jobs error: Invalid job id specified")
                shown = [self._row(asked)]
            return "".join(shown)
        if command[0] == "sinfo":
            used = "" if self.used is None else self.used or "(null)"
            self._change()
            return f"{used:8192}|\n" * 2  # a node in two partitions
        if text.startswith("scontrol show config"):
            return (
                f"ClusterName = lab\nPrivateData = {self.private}\nSLURM_CONF = {self.directory}/slurm.conf\n"
                f"SlurmdSpoolDir = {self.directory}/spool/%n\nPrologFlags = {self.flags}\n"
            )
        if text.startswith("scontrol show node"):
            used = "" if self.used is None else f"   GresUsed={self.used}\n"
            self._change()
            return f"NodeName=n0\n   Gres={self.configured}\n{used}   BootTime=1 SlurmdStartTime={self.slurmd_start}\n"
        assert text.startswith("scontrol -o show job -d")
        gres = self.jobs[command[-1]][0]
        name = "MinCPUsNode=1" if self.ambiguous else "x"
        return f"JobId={command[-1]} JobName={name} JOB_GRES=gpu   Nodes=n0 CPU_IDs=0 Mem=0 GRES={gres} MinCPUsNode=1 Comment=y"

    def _change(self) -> None:
        for name, value in (self.after_node.pop(0) if self.after_node else {}).items():
            setattr(self, name, value)

    def _list_steps(self) -> str:
        steps = {job: {1000 + int(job)} for job in self.jobs} if self.steps is None else self.steps
        if self.blind or not steps:
            reason = self.blind or "No job steps exist on this node."
            out = self._print_steps(self.left) if self.left is not None else ""
            raise CommandFailed(f"scontrol ended with status 1: {reason}", out)
        return self._print_steps(steps)

    @staticmethod
    def _print_steps(steps: dict[str, set[int]]) -> str:
        lines = [f"{pid}\t {job} batch - -" for job, pids in steps.items() for pid in pids]
        return "\n".join(["PID JOBID STEPID LOCALID GLOBALID", *lines]) + "\n"

    def _row(self, job: str) -> str:
        values = dict.fromkeys(COLUMNS, "N/A") | {
            "JobID": job,
            "UserName": "ada",
            "UserID": "1000",
            "State": self.states.get(job, "RUNNING"),
            "StartTime": str(self.job_start),
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
        ("squeue", ["scontrol -o show job -d 1", "scontrol -o show job -d 2"]),
        ("none", ["scontrol -o show job -d 1", "scontrol -o show job -d 2"]),
    ],
)
def test_jobs_hold_the_gpus_that_the_node_confirms(cluster: Cluster, speaks: str, asked: list[str]) -> None:
    cluster.json = speaks
    cluster.jobs = {"1": ["gpu:h100:2(IDX:0,3)"], "2": [""]}
    cluster.used = "gpu:h100:2(IDX:0,3)"
    cluster.source.poll()
    assert [text for text in cluster.asked if "show job" in text and "--json" in text][-2:] == (
        asked if speaks == "all" else ["scontrol show job 1 --json"]
    )
    assert [text for text in cluster.asked if "show job" in text][-2:] == asked
    answer = cluster.source.poll()
    assert [(c.kind, c.device, c.number, c.running, c.why, c.among) for c in answer.grants] == [
        ("minor", "0", "IDX 0", True, "", ()),
        ("minor", "3", "IDX 3", True, "", ()),
    ]
    holder = answer.grants[0].holder
    assert (holder.job_id, holder.user, holder.uid, holder.cluster, holder.units) == ("1", "ada", "1000", "lab", 2)
    assert (answer.problem, answer.notice, answer.conflicts, answer.hides_users) == ("", "", 0, False)


SINFO = f"sinfo -h -N -n n0 -O {SINFO_FORMAT}"
COLUMNS_OF = f"-t RUNNING,CONFIGURING,SUSPENDED,STOPPED -O {SQUEUE_FORMAT}"


def test_an_idle_node_asks_about_no_job(cluster: Cluster) -> None:
    cluster.jobs = {"1": [""], "2": [""]}  # jobs without a GPU
    cluster.source.poll()
    assert cluster.asked == ["scontrol listpids * n0", "scontrol show config", "scontrol show node n0 -d"]


def test_for_a_job_with_a_step_here_only_this_job_is_requested(cluster: Cluster) -> None:
    """The client filters `squeue -w`: every node would download the jobs of the whole cluster."""
    hold(cluster)
    assert cluster.asked[2:] == [
        "scontrol show node n0 -d",
        f"squeue -h -a --local -j 42 {COLUMNS_OF}",
        "scontrol show job 42 --json",
    ]


def test_jobs_are_listed_if_no_job_with_a_step_explains_a_gpu_in_use(cluster: Cluster) -> None:
    cluster.steps = {}
    hold(cluster)
    assert cluster.asked[2:] == [
        "scontrol show node n0 -d",
        f"squeue -h -a --local -w n0 {COLUMNS_OF}",
        "scontrol show job 42 --json",
    ]
    cluster.asked.clear()
    cluster.source.poll()  # known by now
    assert cluster.asked[1:] == [SINFO, f"squeue -h -a --local -j 42 {COLUMNS_OF}"]


def test_a_job_that_the_node_contradicts_is_requested_again_early(cluster: Cluster) -> None:
    """As after `scontrol update` gave the job another GPU, while its row remains the same."""
    assert hold(cluster) == "minor"
    cluster.clock.advance(DOUBT_EACH_S)
    cluster.jobs, cluster.used = {"42": ["gpu:h100:1(IDX:2)"]}, "gpu:h100:1(IDX:2)"
    assert cluster.grants() == [("job 42", "minor", "2")]


def test_up_to_the_limit_jobs_are_requested_singly(cluster: Cluster) -> None:
    cluster.jobs = {str(number): [""] for number in range(1, SINGLES_MAX)} | {"42": ["gpu:h100:1(IDX:0)"]}
    cluster.used = "gpu:h100:1(IDX:0)"
    assert cluster.grants() == [("job 42", "minor", "0")]
    assert len([text for text in cluster.asked if " -j " in text]) == SINGLES_MAX
    assert not [text for text in cluster.asked if " -w " in text]


def test_many_new_jobs_are_requested_with_one_question(cluster: Cluster) -> None:
    cluster.jobs = {str(number): [""] for number in range(1, SINGLES_MAX + 1)} | {"42": ["gpu:h100:1(IDX:0)"]}
    cluster.used = "gpu:h100:1(IDX:0)"
    assert cluster.grants() == [("job 42", "minor", "0")]
    assert [text for text in cluster.asked if "squeue" in text] == [f"squeue -h -a --local -w n0 {COLUMNS_OF}"]


@pytest.mark.parametrize(
    ("given", "slurmd", "asked"), [("n7", "n8", "n7"), ("", "n8", "n8"), ("", None, "gpu-12"), ("", "", "gpu-12")]
)
def test_the_node_name_comes_from_the_flag_else_slurmd_else_the_short_host_name(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, given: str, slurmd: str | None, asked: str
) -> None:
    if slurmd is not None:
        monkeypatch.setenv("SLURMD_NODENAME", slurmd)
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="gpu-12.cluster.example"))
    with contextlib.suppress(AssertionError):  # the cluster knows only n0
        SlurmSource(SlurmOptions(node=given), run=cluster.run, clock=cluster.clock).poll()
    assert cluster.asked == [f"scontrol listpids * {asked}"]


def test_every_command_gets_the_configured_timeout(cluster: Cluster) -> None:
    SlurmSource(SlurmOptions(node="n0", timeout_s=2.5), run=cluster.run, clock=cluster.clock).poll()
    assert cluster.limits == {2.5}


@pytest.mark.parametrize("place", ["/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf", "/opt/slurm.conf", ""])
def test_a_host_with_a_slurm_configuration_belongs_to_a_cluster(
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
            {"key": HolderKey("slurm", "lab/42/2/4000000500"), "array_job_id": "40", "array_task_id": "7"},
        ),
        ({"HetJobID": "41", "HetJobOffset": "1"}, {"het_job_id": "41", "het_job_offset": "1"}),
        ({"StartTime": "N/A"}, {"key": HolderKey("slurm", "lab/42/0/"), "start_wall": None}),
    ],
)
def test_a_holder_has_all_fields_of_the_jobs_squeue_row(
    cluster: Cluster, columns: dict[str, str], expected: dict[str, Any]
) -> None:
    cluster.columns = {"Account": "chem", "Partition": "gpu", "QOS": "high", **columns}
    hold(cluster)
    (grant,) = cluster.source.poll().grants
    holder = Holder(
        key=HolderKey("slurm", "lab/42/0/4000000500"),
        job_id="42",
        cluster="lab",
        user="ada",
        uid="1000",
        account="chem",
        partition="gpu",
        qos="high",
        source="slurm",
        resource="gres/gpu",
        start_wall=4000000500.0,
        units=1,
    )
    assert grant.holder == holder._replace(**expected)


def test_two_hidden_jobs_are_two_holders_without_a_name(cluster: Cluster) -> None:
    cluster.used = "gpu:h100:2(IDX:1,3)"
    nobody = Holder(HolderKey("slurm", ""), cluster="lab", source="slurm", resource="gres/gpu", identity="hidden")
    assert [grant.holder for grant in cluster.source.poll().grants] == [
        nobody._replace(key=HolderKey("slurm", f"lab/hidden/{index}")) for index in (1, 3)
    ]


@pytest.mark.parametrize(
    ("private", "hides"), [("jobs", True), ("users", True), ("accounts,Users", True), ("accounts,nodes", False)]
)
def test_a_cluster_that_hides_jobs_or_users_hides_the_users_of_gpus(
    cluster: Cluster, private: str, hides: bool
) -> None:
    cluster.private = private
    assert cluster.source.poll().hides_users == hides


def test_a_gpu_in_use_without_a_listed_job_is_held_without_a_name(cluster: Cluster) -> None:
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
    # It is unknown which of the two is wrong, so the GPU is not reported as free.
    assert answer.problem == "job 1 claims IDX 0, which node n0 does not have in use"
    cluster.used = "gpu:h100:1(IDX:2)"
    assert cluster.source.poll().conflicts == 2


def test_a_job_that_begins_between_two_questions_is_found_by_asking_again(cluster: Cluster) -> None:
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:0)"]}, "gpu:h100:1(IDX:0)"
    cluster.steps = {}
    both = {"1": ["gpu:h100:1(IDX:0)"], "2": ["gpu:h100:1(IDX:1)"]}
    cluster.after_node = [{"jobs": both, "used": "gpu:h100:2(IDX:0-1)"}]
    assert cluster.grants() == [("job 1", "minor", "0"), ("job 2", "minor", "1")]


def test_a_lasting_disagreement_is_not_asked_about_twice_at_each_poll(cluster: Cluster) -> None:
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:0)"]}, "gpu:h100:2(IDX:0-1)"
    cluster.steps = {}
    cluster.source.poll()
    cluster.asked.clear()
    cluster.source.poll()
    # One question for the node, and one for the only job without a step: no second look, and no list of all jobs.
    assert cluster.asked[1:] == [SINFO, f"squeue -h -a --local -j 1 {COLUMNS_OF}"]
    cluster.asked.clear()
    cluster.clock.advance(LIST_EACH_S)
    cluster.source.poll()
    assert f"squeue -h -a --local -w n0 {COLUMNS_OF}" in cluster.asked


def test_gpus_without_a_type_are_confirmed_by_their_number(cluster: Cluster) -> None:
    """GresUsed of such a node names no position."""
    cluster.gres_conf.write_text("Name=gpu File=/dev/nvidia[0-3]\n", "utf-8")
    cluster.configured = "gpu:4"
    cluster.jobs, cluster.used = {"1": ["gpu:2(IDX:1-2)"]}, "gpu:2"
    assert cluster.grants() == [("job 1", "minor", "1"), ("job 1", "minor", "2")]
    assert len([asked for asked in cluster.asked if asked.startswith("squeue")]) == 1  # no second question
    cluster.used = "gpu:3"
    answer = cluster.source.poll()
    assert [c.device for c in answer.grants] == ["1", "2"]
    assert answer.problem == "1 GPUs in use by jobs that squeue does not list, so no GPU is reported as free"
    cluster.used = "gpu:1"
    with pytest.raises(SourceError, match="the jobs of node n0 have 1 GPUs more than the node has in use"):
        cluster.source.poll()


def test_a_job_whose_gpus_are_not_known_yet_is_asked_about_again(cluster: Cluster) -> None:
    cluster.jobs, cluster.used = {"1": [""]}, ""
    assert cluster.grants() == []
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:3)"]}, "gpu:h100:1(IDX:3)"
    cluster.clock.advance(DOUBT_EACH_S)
    assert cluster.grants() == [("job 1", "minor", "3")]


def test_a_resized_job_is_asked_about_again_when_its_row_shows_it(cluster: Cluster) -> None:
    cluster.steps = {}  # so that its row is requested at each look
    cluster.jobs, cluster.used, cluster.nodes = (
        {"1": ["gpu:h100:1(IDX:0)", "gpu:h100:4(IDX:0-3)"]},
        "gpu:h100:1(IDX:0)",
        "n[0-1]",
    )
    assert cluster.source.poll().grants[0].holder.units == 5
    # the job gave back the other node, which n0 does not show
    cluster.jobs, cluster.nodes = {"1": ["gpu:h100:1(IDX:0)"]}, "n0"
    assert cluster.source.poll().grants[0].holder.units == 5
    cluster.size = "cpu=2"
    assert cluster.source.poll().grants[0].holder.units == 1


def test_gpus_of_a_job_whose_record_is_no_longer_understood_have_a_holder_without_a_name(cluster: Cluster) -> None:
    cluster.steps = {}
    assert hold(cluster) == "minor"
    cluster.jobs, cluster.size = {"42": ["gpu:h100:1(IDX:"]}, "cpu=2"
    for _ in range(2):
        assert cluster.grants() == [("a hidden job", "minor", "0")]


def test_a_job_whose_record_was_never_understood_affects_no_other_job(cluster: Cluster) -> None:
    cluster.jobs = {"1": ["gpu:h100:1(IDX:"], "2": ["gpu:h100:1(IDX:1)"]}
    cluster.used = "gpu:h100:2(IDX:0-1)"
    assert cluster.grants() == [("job 2", "minor", "1"), ("a hidden job", "minor", "0")]


def test_a_resize_that_no_column_shows_is_detected_within_minutes(cluster: Cluster) -> None:
    cluster.jobs, cluster.used, cluster.nodes = (
        {"1": ["gpu:h100:1(IDX:0)", "gpu:h100:4(IDX:0-3)"]},
        "gpu:h100:1(IDX:0)",
        "n[0-1]",
    )
    cluster.source.poll()
    cluster.jobs, cluster.nodes = {"1": ["gpu:h100:1(IDX:0)"]}, "n0"
    cluster.clock.advance(JOB_EACH_S)
    assert cluster.source.poll().grants[0].holder.units == 1


def test_known_jobs_cause_no_extra_question(cluster: Cluster) -> None:
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:0)"]}, "gpu:h100:1(IDX:0)"
    cluster.source.poll()
    cluster.asked.clear()
    for _ in range(3):
        cluster.source.poll()
    assert not [text for text in cluster.asked if "show job" in text or "config" in text]


@pytest.mark.parametrize("state", ["SUSPENDED", "STOPPED", "CONFIGURING"])
def test_a_stopped_job_holds_its_gpus_and_does_not_run(cluster: Cluster, state: str) -> None:
    cluster.jobs, cluster.used, cluster.states = {"1": ["gpu:h100:1(IDX:0)"]}, "gpu:h100:1(IDX:0)", {"1": state}
    (grant,) = cluster.source.poll().grants
    assert (grant.running, grant.why, grant.obstacle) == (False, f"the job is {state}", state.lower())


def test_a_job_state_that_is_not_a_word_is_not_published(cluster: Cluster) -> None:
    cluster.jobs, cluster.used, cluster.states = {"1": ["gpu:h100:1(IDX:0)"]}, "gpu:h100:1(IDX:0)", {"1": "A" * 31}
    (grant,) = cluster.source.poll().grants
    assert (grant.running, grant.obstacle) == (False, "other")


def test_autodetect_counts_in_nvmls_order_and_needs_the_same_number_of_gpus(cluster: Cluster) -> None:
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
def test_a_gres_conf_that_proves_no_order_resolves_no_gpu_and_gives_the_reason(
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


def test_only_lines_of_gres_conf_for_this_node_count(cluster: Cluster) -> None:
    other = "NodeName=n1 Name=gpu Type=h100 File=/dev/nvidia[0-3]\n"
    cluster.gres_conf.write_text(f"{other}NodeName=n0 Name=gpu Type=h100 File=/dev/nvidia[3,2,1,0]\n", "utf-8")
    assert hold(cluster) == "minor"
    assert cluster.grants() == [("job 42", "minor", "3")]


def test_an_idle_node_without_a_gres_conf_has_no_problem(cluster: Cluster) -> None:
    cluster.gres_conf.unlink()
    assert cluster.source.poll() == Answer([])


def test_gpus_are_counted_if_the_record_and_the_present_file_agree(cluster: Cluster) -> None:
    """An administrator may drain a node with too few GPUs, and slurmctld's report about its configuration may be an
    hour old.
    """
    assert cluster.source.poll().devices == 4
    fail(cluster, "sinfo", "Unable to contact slurm controller")
    assert cluster.source.poll().devices is None
    for text, counted in (("AutoDetect=nvml\n", None), ("Name=gpu Type=h100 File=/dev/nvidia[0-2]\n", None)):
        cluster.source = cluster.new_source(Pace(0.0))
        cluster.gres_conf.write_text(text, "utf-8")
        assert cluster.source.poll().devices is counted


def test_two_files_that_disagree_prove_no_order(cluster: Cluster) -> None:
    cached = cluster.directory / "spool" / "n0" / "conf-cache"
    cached.mkdir(parents=True)
    (cached / "gres.conf").write_text("Name=gpu Type=h100 File=/dev/nvidia[0-3]\n", "utf-8")
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:2)"]}, "gpu:h100:1(IDX:2)"
    assert cluster.grants() == [("job 1", "minor", "2")]
    (cached / "gres.conf").write_text("Name=gpu Type=h100 File=/dev/nvidia[2-3],/dev/nvidia[0-1]\n", "utf-8")
    answer = cluster.source.poll()
    assert answer.grants[0].kind == "unproven"
    assert "give the GPUs different orders" in answer.problem
    named = SlurmSource(SlurmOptions(node="n0", gres_conf=cached / "gres.conf"), run=cluster.run, clock=cluster.clock)
    assert [(c.kind, c.device) for c in named.poll().grants] == [("minor", "0")]


def test_the_copy_of_a_configless_slurmd_is_found(cluster: Cluster) -> None:
    cached = cluster.directory / "spool" / "n0" / "conf-cache"
    cached.mkdir(parents=True)
    cluster.gres_conf.rename(cached / "gres.conf")
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:2)"]}, "gpu:h100:1(IDX:2)"
    assert cluster.grants() == [("job 1", "minor", "2")]


HELD: Mapping[str, object] = {"jobs": {"42": ["gpu:h100:1(IDX:0)"]}, "used": "gpu:h100:1(IDX:0)"}
REVERSED = "Name=gpu Type=h100 File=/dev/nvidia[3,2,1,0]\n"


def hold(cluster: Cluster, **more: object) -> str:
    """The basis of the only job's grant."""
    for name, value in {**HELD, **more}.items():
        setattr(cluster, name, value)
    (grant,) = cluster.source.poll().grants
    return grant.kind


def test_a_gres_conf_with_another_order_counts_after_slurmd_has_read_it(cluster: Cluster) -> None:
    now = int(time.time())
    cluster.clock = ManualClock(wall=now + 60.0)
    cluster.source = cluster.new_source(Pace(0.0))
    assert hold(cluster, slurmd_start=now + 1, job_start=now + 20) == "minor"
    os.utime(cluster.gres_conf, (now + 50, now + 50))
    assert cluster.source.poll().grants[0].kind == "minor", "the file has the same content"
    cluster.gres_conf.write_text(REVERSED, "utf-8")
    os.utime(cluster.gres_conf, (now + 60, now + 60))
    cluster.jobs = {"42": ["gpu:h100:1(IDX:0)"], "43": ["gpu:h100:1(IDX:1)"]}
    cluster.used = "gpu:h100:2(IDX:0-1)"
    answer = cluster.source.poll()
    assert {grant.kind for grant in answer.grants} == {"minor"}, "both jobs began before that"
    assert "gives the GPUs another order than when slurmd started: restart slurmd" in answer.problem
    cluster.job_start = now + 90
    cluster.source = cluster.new_source(Pace(0.0))
    assert {grant.kind for grant in cluster.source.poll().grants} == {"unproven"}
    cluster.slurmd_start, cluster.job_start = now + 120, now + 150
    cluster.jobs = {"44": ["gpu:h100:1(IDX:0)"], "45": ["gpu:h100:1(IDX:1)"]}
    for _ in range(20):
        cluster.clock.advance(5.0)
        answer = cluster.source.poll()
    assert [(grant.kind, grant.device) for grant in answer.grants] == [("minor", "3"), ("minor", "2")]
    assert answer.problem == ""


def test_a_copy_that_a_configless_slurmd_reads_again_counts_for_later_jobs(cluster: Cluster) -> None:
    """As Slurm before 23.11 does at `scontrol reconfigure`, without a restart."""
    cached = cluster.directory / "spool" / "n0" / "conf-cache"
    cached.mkdir(parents=True)
    copy = cached / "gres.conf"
    cluster.gres_conf.rename(copy)
    began = int(copy.stat().st_ctime)
    cluster.clock = ManualClock(wall=began + 60.0)
    cluster.source = cluster.new_source(Pace(0.0))
    assert hold(cluster, slurmd_start=began + 1, job_start=began + 5) == "minor"
    cluster.clock.advance(110.0)
    copy.write_text(REVERSED, "utf-8")
    os.utime(copy, (began + 150, began + 150))
    cluster.jobs = {"42": ["gpu:h100:1(IDX:0)"], "43": ["gpu:h100:1(IDX:1)"]}
    cluster.used, cluster.job_start = "gpu:h100:2(IDX:0-1)", began + 165
    answer = cluster.source.poll()
    assert [(grant.holder.job_id, grant.kind, grant.device) for grant in answer.grants] == [
        ("42", "minor", "0"),
        ("43", "minor", "2"),
    ]
    assert answer.problem == ""
    cluster.source = cluster.new_source(Pace(0.0))
    cluster.job_start = began + 5
    assert {grant.kind for grant in cluster.source.poll().grants} == {"unproven"}, "the earlier order is not remembered"


def test_a_gpu_of_a_hidden_job_is_resolved_only_while_there_was_one_order(cluster: Cluster) -> None:
    now = int(time.time())
    assert hold(cluster, slurmd_start=now + 1) == "minor"
    cluster.jobs, cluster.used = {}, "gpu:h100:1(IDX:1)"
    assert [grant.kind for grant in cluster.source.poll().grants] == ["minor"]
    cluster.gres_conf.write_text(REVERSED, "utf-8")
    os.utime(cluster.gres_conf, (now + 60, now + 60))
    cluster.slurmd_start = now + 120
    for _ in range(20):
        cluster.clock.advance(5.0)
        answer = cluster.source.poll()
    assert [grant.kind for grant in answer.grants] == ["unproven"], "it is unknown which order the hidden job used"


def test_a_job_that_began_before_slurmd_is_resolved_only_if_the_order_of_its_time_is_known(
    cluster: Cluster,
) -> None:
    now = int(time.time())
    assert hold(cluster, slurmd_start=now + 100, job_start=now + 20) == "unproven"
    (grant,) = cluster.source.poll().grants
    assert grant.reason == BEFORE and cluster.source.poll().problem == ""


def test_a_changed_file_that_kept_its_date_counts_as_changed(cluster: Cluster) -> None:
    """As rsync -a and cp -p do."""
    cluster.gres_conf.write_text(REVERSED, "utf-8")
    os.utime(cluster.gres_conf, (1, 1))
    assert hold(cluster, slurmd_start=int(time.time()) - 60) == "unproven"


def test_a_change_of_an_included_file_counts_too(cluster: Cluster) -> None:
    cluster.gres_conf.write_text("Include gpus.conf\n", "utf-8")
    included, now = cluster.directory / "gpus.conf", int(time.time())
    included.write_text(REVERSED, "utf-8")
    assert hold(cluster, slurmd_start=now + 1) == "minor"
    included.write_text(REVERSED.replace("3,2", "2,3"), "utf-8")
    os.utime(included, (now + 100, now + 100))
    assert cluster.source.poll().grants[0].kind == "unproven"


def test_a_directory_named_conf_is_not_a_copy_of_slurmd(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    assert hold(Cluster(tmp_path / "conf"), slurmd_start=int(time.time()) - 60) == "unproven"


def test_no_order_is_proven_if_the_start_of_slurmd_is_unknown(cluster: Cluster) -> None:
    assert hold(cluster, slurmd_start="None") == "unproven"


def fail(cluster: Cluster, word: str, fault: str | SourceError, times: int = 10**9) -> list[Sequence[str]]:
    """Let commands that contain this word fail. Returns a list to which each failed command is added."""
    real, failed = cluster.run, list[Sequence[str]]()

    def run(command: Sequence[str], timeout_s: float) -> str:
        if word in command and len(failed) < times:
            failed.append(command)
            if isinstance(fault, SlowSource):
                cluster.clock.advance(timeout_s + 0.01)
            raise fault if isinstance(fault, SourceError) else SourceError(fault)
        return real(command, timeout_s)

    cluster.source._controller._run_command = run
    return failed


SLOW = SlowSource("scontrol did not answer within 5 s")


@pytest.mark.parametrize(
    ("fault", "at_once"), [(SLOW, 2), (SourceError("slurm_load_jobs error: Invalid job id specified"), 1)]
)
def test_a_job_that_cannot_be_asked_about_affects_no_other_job(
    cluster: Cluster, fault: SourceError, at_once: int
) -> None:
    failed = fail(cluster, "43", fault)
    cluster.jobs = {"42": ["gpu:h100:1(IDX:0)"], "43": ["gpu:h100:1(IDX:1)"]}
    cluster.used = "gpu:h100:2(IDX:0-1)"
    tries: list[int] = []
    cluster.source.poll()
    for _ in range(5):
        cluster.clock.advance(5.0)
        assert [(c.holder.label, c.device) for c in cluster.source.poll().grants] == [
            ("job 42", "0"),
            ("a hidden job", "1"),
        ]
        tries.append(len(failed))
    assert len([asked for asked in cluster.asked if "show job 42" in asked]) <= 2
    assert tries == [at_once] * 5
    cluster.clock.advance(JOB_EACH_S)
    cluster.source.poll()
    assert len(failed) > tries[-1]


@pytest.mark.parametrize("word", ["--json", "-j"])
def test_after_a_slow_answer_about_a_job_the_next_look_asks_again(cluster: Cluster, word: str) -> None:
    """slurmctld 24.11.5 sometimes takes 5 s for an answer."""
    cluster.jobs = {"42": ["gpu:h100:1(IDX:0)"], "43": ["gpu:h100:1(IDX:1)"]}
    cluster.used = "gpu:h100:2(IDX:0-1)"
    cluster.source.poll()
    for fault in (1, 2, 3):  # a first failure each time, because a success lies in between
        failed = fail(cluster, word, SLOW, times=1)
        cluster.clock.advance(JOB_EACH_S)
        assert [c.holder.label for c in cluster.source.poll().grants] == ["job 42", "job 43"]
        assert len(failed) == 1
        asked = len(cluster.asked)
        cluster.clock.advance(INTERVAL_MAX_S)  # a slow controller is not asked while the node agrees with its jobs
        assert [c.holder.label for c in cluster.source.poll().grants] == ["job 42", "job 43"]
        assert [text for text in cluster.asked[asked:] if word in text and "42" in text], fault
        assert not cluster.source._controller._slow


@pytest.mark.parametrize("ends", [True, False])
def test_a_job_that_was_never_answered_for_is_forgotten_when_it_ends(cluster: Cluster, ends: bool) -> None:
    fail(cluster, "42", SLOW)
    cluster.jobs, cluster.used = {"42": ["gpu:h100:1(IDX:0)"]}, "gpu:h100:1(IDX:0)"
    cluster.source.poll()
    if ends:
        cluster.jobs, cluster.used = {}, "gpu:h100:0(IDX:N/A)"
    cluster.clock.advance(JOB_EACH_S)
    cluster.source.poll()
    assert cluster.source._controller._slow == (set() if ends else {"42"})


@pytest.mark.parametrize("word", ["--json", "-j"])
def test_a_job_that_began_while_slurm_was_slow_has_its_gpus_at_the_next_look(cluster: Cluster, word: str) -> None:
    fail(cluster, word, SLOW, times=1)
    for name, value in HELD.items():
        setattr(cluster, name, value)
    cluster.source.poll()
    cluster.clock.advance(5.0)
    assert [c.holder.label for c in cluster.source.poll().grants] == ["job 42"]


def test_one_slow_job_delays_the_others_for_two_looks_at_most(cluster: Cluster) -> None:
    fail(cluster, "42", SLOW)
    cluster.jobs = {"42": ["gpu:h100:1(IDX:0)"], "43": ["gpu:h100:1(IDX:1)"]}
    cluster.used = "gpu:h100:2(IDX:0-1)"
    for _ in range(3):
        answer = cluster.source.poll()
        cluster.clock.advance(5.0)
    assert {c.holder.label for c in answer.grants} == {"a hidden job", "job 43"}


def test_other_errors_do_not_stop_the_use_of_json(cluster: Cluster) -> None:
    fail(cluster, "--json", "scontrol ended with status 1: fatal: failed to initialize auth plugin", times=2)
    for name, value in HELD.items():
        setattr(cluster, name, value)
    cluster.source.poll()
    cluster.clock.advance(DOUBT_EACH_S)
    cluster.source.poll()
    cluster.clock.advance(DOUBT_EACH_S)
    assert [c.holder.label for c in cluster.source.poll().grants] == ["job 42"]
    assert not [asked for asked in cluster.asked if "-o show job" in asked]


def test_a_job_known_only_from_json_has_no_name_if_the_answer_is_too_long(cluster: Cluster) -> None:
    cluster.json, cluster.squeue_fault = "squeue", "squeue printed more than 16777216 bytes"
    cluster.ambiguous = True
    assert hold(cluster, ambiguous=True) == "minor"
    assert cluster.grants() == [("a hidden job", "minor", "0")]


def test_squeue_json_is_retried_after_a_failure_but_not_at_each_look(cluster: Cluster) -> None:
    cluster.json, cluster.squeue_fault = "squeue", "squeue did not answer within 5 s"
    cluster.jobs, cluster.used = {"42": ["gpu:h100:1(IDX:0)"]}, "gpu:h100:1(IDX:0)"
    cluster.ambiguous = True
    assert cluster.grants() == [("a hidden job", "minor", "0")]
    cluster.squeue_fault = ""
    cluster.clock.advance(DOUBT_EACH_S)
    assert cluster.grants() == [("a hidden job", "minor", "0")]
    # requests all jobs of the cluster
    assert len([text for text in cluster.asked if text.startswith("squeue --json")]) == 1
    cluster.clock.advance(LIST_EACH_S)
    assert cluster.grants() == [("job 42", "minor", "0")]
    assert cluster.asked[-1] == "squeue --json -a"


def test_json_is_tried_again_after_an_upgrade_of_slurm(cluster: Cluster) -> None:
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
def test_null_types_and_other_resources_are_understood(cluster: Cluster, used: str) -> None:
    assert hold(cluster, used=used) == "minor"


@pytest.mark.parametrize(
    ("used", "jobs", "share"),
    [
        ("gpu:h100:0(IDX:N/A),shard:h100:1(IDX:1)", ["shard:2(IDX:1)", "shard:1(IDX:1)"], "shard"),  # 22.05
        ("gpu:h100:0(IDX:N/A),shard:h100:3(0/4,3/4,0/4,0/4)", ["shard:2(0/4,2/4,0/4,0/4)", "shard:1(IDX:1)"], "shard"),
        ("gpu:h100:0(IDX:N/A),shard:h100:3(-/4,3/4,0/4,0/4)", ["shard:h100:3(0/4,3/4,0/4,0/4)"], "shard"),  # 26.05
        ("gpu:h100:0(IDX:N/A),mps:h100:50(IDX:1)", ["mps:h100:50(IDX:1)"], "mps"),
    ],
)
def test_jobs_with_parts_of_a_gpu_share_it(cluster: Cluster, used: str, jobs: list[str], share: str) -> None:
    cluster.used, cluster.jobs = used, {str(number): [gres] for number, gres in enumerate(jobs, 1)}
    answer = cluster.source.poll()
    assert [(grant.holder.job_id, grant.device, grant.share) for grant in answer.grants] == [
        (str(number), "1", share) for number in range(1, len(jobs) + 1)
    ]
    assert {grant.holder.units for grant in answer.grants} == {1}
    assert (answer.problem, answer.notice) == ("", "")


def test_a_part_of_a_gpu_without_a_listed_job_is_held_without_a_name(cluster: Cluster) -> None:
    cluster.used = "gpu:h100:1(IDX:0),shard:h100:2(IDX:1)"
    answer = cluster.source.poll()
    assert [(grant.holder.label, grant.device, grant.share) for grant in answer.grants] == [
        ("a hidden job", "0", ""),
        ("a hidden job", "1", "shard"),
    ]


@pytest.mark.parametrize("used", ["gpu:h100:0(IDX:N/A),shard:h100:2", "gpu:h100:0(IDX:N/A),mps:50(IDX:N/A)"])
def test_parts_of_unnamed_gpus_leave_no_gpu_free(cluster: Cluster, used: str) -> None:
    cluster.used = used
    part = used.rpartition(",")[2]
    assert cluster.source.poll().problem == (
        f"{part} is in use, but Slurm does not report of which GPU, so no GPU is reported as free"
    )


def test_gpus_without_an_index_leave_no_gpu_free(cluster: Cluster) -> None:
    cluster.jobs, cluster.used = {"1": ["gpu:h100:2"]}, "gpu:h100:2"
    assert cluster.source.poll().problem == (
        "job 1 has 2 GPUs without an index: File= in gres.conf must name device files"
    )


def test_without_a_list_of_gpus_in_use_the_answer_is_refused(cluster: Cluster) -> None:
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:2)"]}, None
    with pytest.raises(SourceError, match="prints no GresUsed"):
        cluster.source.poll()


def test_a_requeued_job_is_another_holder(cluster: Cluster) -> None:
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:2)"]}, "gpu:h100:1(IDX:2)"
    assert cluster.source.poll().grants[0].holder.key.incarnation == "lab/1/0/4000000500"


def test_a_look_at_a_slow_slurm_has_one_deadline_for_any_number_of_jobs(cluster: Cluster) -> None:
    cluster.jobs = {str(number): ["gpu:h100:1(IDX:1)"] for number in range(100, 120)}
    cluster.used = "gpu:h100:1(IDX:1)"
    given: list[float] = []
    slow = 4.0

    def run(command: Sequence[str], timeout_s: float) -> str:
        given.append(timeout_s)
        cluster.clock.advance(slow)
        return cluster.run(command, timeout_s)

    source = SlurmSource(SlurmOptions(node="n0"), run=run, clock=cluster.clock, pace=Pace(0.0))
    assert [grant.holder.identity for grant in source.poll().grants] == ["hidden"]
    assert given == [5.0, 5.0, 5.0, 2.0]  # steps; configuration, node and jobs together
    slow = 11.0
    assert source.poll().problem == "Slurm took longer than 10 s for all answers of one poll"
    slow = 0.0
    cluster.asked.clear()
    source.poll()
    # All jobs are asked about again, because Slurm was slow, and no job caused this.
    assert len({text for text in cluster.asked if text.startswith("scontrol show job")}) == 20


def test_one_slow_answer_does_not_leave_a_job_without_its_gpus_for_long(cluster: Cluster) -> None:
    """slurmctld 24.11.5 sometimes takes five seconds for an answer, although it is otherwise idle."""
    cluster.jobs = {"7": ["gpu:h100:1(IDX:0)"], "8": ["gpu:h100:1(IDX:1)"]}
    cluster.used = "gpu:h100:2(IDX:0-1)"

    def run(command: Sequence[str], timeout_s: float) -> str:
        answer = cluster.run(command, timeout_s)
        if command[0] == "squeue" and cluster.asked[-2].startswith("scontrol show node"):
            cluster.clock.advance(5.02)
        return answer

    source = SlurmSource(SlurmOptions(node="n0"), run=run, clock=cluster.clock, pace=Pace(60.0))
    assert sorted(grant.holder.job_id for grant in source.poll().grants) == ["7", "8"]
