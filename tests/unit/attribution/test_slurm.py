"""The Slurm source: what it claims, what it only knows to be held, and when it says that it does not know."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from gpu_exporter.attribution.slurm import CONFIG_EACH_S, DOUBT_EACH_S, GPUS_EACH_S, SlurmSource
from gpu_exporter.attribution.slurm_words import COLUMNS
from gpu_exporter.attribution.source import SourceError
from gpu_exporter.clock import ManualClock


class Cluster:
    """Answers the commands of one cluster whose node `n0` has four typed GPUs, unless a test says otherwise."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = ManualClock()
        self.jobs: dict[str, list[str]] = {}  # by job id: gres_detail
        self.states: dict[str, str] = {}
        self.nodes = "n0"
        self.size = "cpu=1"
        self.used: str | None = ""
        self.configured = "gpu:h100:4"
        self.slurmd_start: object = 4_000_000_000
        self.private = "none"
        self.hidden: set[str] = set()
        self.json = "all"  # which commands speak JSON: all, squeue, none
        self.asked: list[str] = []
        self.between: list[dict[str, object]] = []  # changes that take effect after the next squeue
        self.gres_conf = directory / "gres.conf"
        self.gres_conf.write_text("Name=gpu Type=h100 File=/dev/nvidia[0-3]\n", "utf-8")
        self.source = SlurmSource("n0", run=self.run, monotonic=self.clock.monotonic)

    def run(self, command: Sequence[str], timeout_s: float) -> str:
        text = " ".join(command)
        self.asked.append(text)
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
        }
        return "".join(f"{values[column]}|" for column in COLUMNS) + "\n"

    def claims(self) -> list[tuple[str, str, str]]:
        """(holder, kind, device) of each claim."""
        return [(claim.holder.label, claim.kind, claim.device) for claim in self.source.poll().claims]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    return Cluster(tmp_path)


@pytest.mark.parametrize("speaks", ["all", "squeue", "none"])
def test_jobs_hold_what_the_node_confirms(cluster: Cluster, speaks: str) -> None:
    cluster.json = speaks
    cluster.jobs = {"1": ["gpu:h100:2(IDX:0,3)"], "2": [""]}
    cluster.used = "gpu:h100:2(IDX:0,3)"
    answer = cluster.source.poll()
    assert [(c.kind, c.device, c.number, c.running) for c in answer.claims] == [
        ("minor", "0", "IDX 0", True),
        ("minor", "3", "IDX 3", True),
    ]
    holder = answer.claims[0].holder
    assert (holder.job_id, holder.user, holder.uid, holder.cluster, holder.units) == ("1", "ada", "1000", "lab", 2)
    assert (answer.problem, answer.notice, answer.conflicts, answer.hides_users) == ("", "", 0, False)


def test_a_gpu_in_use_that_no_listed_job_has_is_held_without_a_name(cluster: Cluster) -> None:
    cluster.private = "jobs,users"
    cluster.jobs = {"1": ["gpu:h100:1(IDX:0)"], "2": ["gpu:h100:1(IDX:2)"]}
    cluster.hidden = {"2"}
    cluster.used = "gpu:h100:2(IDX:0,2)"
    answer = cluster.source.poll()
    assert [(c.holder.label, c.device, c.running) for c in answer.claims] == [
        ("job 1", "0", True),
        ("a hidden job", "2", False),
    ]
    hidden = answer.claims[1]
    assert (hidden.holder.identity, hidden.holder.job_id, hidden.holder.units) == ("hidden", "", None)
    assert hidden.why == "held by a job that Slurm does not show"
    assert answer.notice == (
        "IDX 2 in use by jobs that squeue does not list: PrivateData=jobs hides them from uid 0; run as SlurmUser or root"
    ).replace("uid 0", f"uid {os.geteuid()}")
    assert (answer.problem, answer.hides_users) == ("", True)


def test_a_claim_that_the_node_does_not_confirm_is_dropped_and_counted(cluster: Cluster) -> None:
    cluster.jobs = {"1": ["gpu:h100:2(IDX:0-1)"], "2": ["gpu:h100:1(IDX:2)"]}
    cluster.used = "gpu:h100:2(IDX:1-2)"
    answer = cluster.source.poll()
    assert sorted((c.holder.label, c.device) for c in answer.claims) == [("job 1", "1"), ("job 2", "2")]
    assert answer.conflicts == 1
    # Whichever of the two is wrong: the GPU is not called free.
    assert answer.problem == "job 1 claims IDX 0, which node n0 does not have in use"


def test_a_job_that_begins_between_the_two_questions_is_seen_by_asking_once_more(cluster: Cluster) -> None:
    cluster.jobs = {"1": ["gpu:h100:1(IDX:0)"]}
    cluster.between = [
        {"jobs": {"1": ["gpu:h100:1(IDX:0)"], "2": ["gpu:h100:1(IDX:1)"]}, "used": "gpu:h100:2(IDX:0-1)"}
    ]
    assert cluster.claims() == [("job 1", "minor", "0"), ("job 2", "minor", "1")]


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
    assert cluster.claims() == [("job 1", "minor", "1"), ("job 1", "minor", "2")]
    cluster.used = "gpu:3"
    answer = cluster.source.poll()
    assert [c.device for c in answer.claims] == ["1", "2"]
    assert answer.problem == "1 GPUs in use by jobs that squeue does not list, so no GPU is called free"
    cluster.used = "gpu:1"
    with pytest.raises(SourceError, match="the jobs of node n0 have 1 GPUs more than the node has in use"):
        cluster.source.poll()


def test_a_job_whose_gpus_are_not_there_yet_is_asked_again(cluster: Cluster) -> None:
    cluster.jobs, cluster.used = {"1": [""]}, ""
    assert cluster.claims() == []
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:3)"]}, "gpu:h100:1(IDX:3)"
    cluster.clock.advance(DOUBT_EACH_S)
    assert cluster.claims() == [("job 1", "minor", "3")]


def test_a_resized_job_is_asked_again_at_once(cluster: Cluster) -> None:
    cluster.jobs, cluster.used, cluster.nodes = (
        {"1": ["gpu:h100:1(IDX:0)", "gpu:h100:4(IDX:0-3)"]},
        "gpu:h100:1(IDX:0)",
        "n[0-1]",
    )
    assert cluster.source.poll().claims[0].holder.units == 5
    cluster.jobs, cluster.nodes = {"1": ["gpu:h100:1(IDX:0)"]}, "n0"  # gave back the other node, which n0 does not show
    assert cluster.source.poll().claims[0].holder.units == 5
    cluster.size = "cpu=2"
    assert cluster.source.poll().claims[0].holder.units == 1


def test_a_resize_that_no_column_shows_is_seen_within_minutes(cluster: Cluster) -> None:
    cluster.jobs, cluster.used, cluster.nodes = (
        {"1": ["gpu:h100:1(IDX:0)", "gpu:h100:4(IDX:0-3)"]},
        "gpu:h100:1(IDX:0)",
        "n[0-1]",
    )
    cluster.source.poll()
    cluster.jobs, cluster.nodes = {"1": ["gpu:h100:1(IDX:0)"]}, "n0"
    cluster.clock.advance(GPUS_EACH_S)
    assert cluster.source.poll().claims[0].holder.units == 1


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
    (claim,) = cluster.source.poll().claims
    assert (claim.running, claim.why) == (False, f"the job is {state}")


def test_autodetect_counts_in_nvmls_order_and_needs_as_many_gpus(cluster: Cluster) -> None:
    cluster.gres_conf.write_text("AutoDetect=nvml\nName=gpu Type=h100 File=/dev/nvidia[3,1,0,2]\n", "utf-8")
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:2)"]}, "gpu:h100:1(IDX:2)"
    (claim,) = cluster.source.poll().claims
    assert (claim.kind, claim.device, claim.among, claim.total) == ("index", "2", ("3", "1", "0", "2"), 4)


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
    assert [(c.kind, c.device, c.number) for c in answer.claims] == [("unproven", "2", "IDX 2")]
    assert problem in answer.problem
    assert answer.claims[0].reason in answer.problem


def test_an_idle_node_without_a_gres_conf_has_no_problem(cluster: Cluster) -> None:
    cluster.gres_conf.unlink()
    assert cluster.source.poll() == ([], "", "", 0, False)


def test_two_files_that_disagree_prove_nothing(cluster: Cluster) -> None:
    cached = cluster.directory / "spool" / "n0" / "conf-cache"
    cached.mkdir(parents=True)
    (cached / "gres.conf").write_text("Name=gpu Type=h100 File=/dev/nvidia[0-3]\n", "utf-8")
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:2)"]}, "gpu:h100:1(IDX:2)"
    assert cluster.claims() == [("job 1", "minor", "2")]
    (cached / "gres.conf").write_text("Name=gpu Type=h100 File=/dev/nvidia[2-3],/dev/nvidia[0-1]\n", "utf-8")
    answer = cluster.source.poll()
    assert answer.claims[0].kind == "unproven"
    assert "give the GPUs different orders" in answer.problem
    named = SlurmSource("n0", gres_conf=cached / "gres.conf", run=cluster.run, monotonic=cluster.clock.monotonic)
    assert [(c.kind, c.device) for c in named.poll().claims] == [("minor", "0")]


def test_the_copy_that_a_configless_slurmd_keeps_is_found(cluster: Cluster) -> None:
    cached = cluster.directory / "spool" / "n0" / "conf-cache"
    cached.mkdir(parents=True)
    cluster.gres_conf.rename(cached / "gres.conf")
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:2)"]}, "gpu:h100:1(IDX:2)"
    assert cluster.claims() == [("job 1", "minor", "2")]


HELD: Mapping[str, object] = {"jobs": {"42": ["gpu:h100:1(IDX:0)"]}, "used": "gpu:h100:1(IDX:0)"}
REVERSED = "Name=gpu Type=h100 File=/dev/nvidia[3,2,1,0]\n"


def hold(cluster: Cluster, **more: object) -> str:
    """What the claim of the one job rests on."""
    for name, value in {**HELD, **more}.items():
        setattr(cluster, name, value)
    (claim,) = cluster.source.poll().claims
    return claim.kind


def test_a_gres_conf_newer_than_slurmd_is_not_what_slurmd_goes_by(cluster: Cluster) -> None:
    now = int(time.time())
    assert hold(cluster, slurmd_start=now + 1) == "minor"
    cluster.slurmd_start = now - 60
    answer = cluster.source.poll()
    assert answer.claims[0].kind == "unproven"
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
    assert cluster.source.poll().claims[0].kind == "unproven"


def test_a_directory_that_is_called_conf_is_no_copy_of_slurmds(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    assert hold(Cluster(tmp_path / "conf"), slurmd_start=int(time.time()) - 60) == "unproven"


def test_a_node_that_does_not_say_when_slurmd_started_proves_nothing(cluster: Cluster) -> None:
    assert hold(cluster, slurmd_start="None") == "unproven"


def fail(cluster: Cluster, word: str, text: str, times: int = 10**9) -> None:
    """Let commands with this word among theirs fail."""
    real, left = cluster.run, [times]

    def run(command: Sequence[str], timeout_s: float) -> str:
        if word in command and left[0]:
            left[0] -= 1
            raise SourceError(text)
        return real(command, timeout_s)

    cluster.source._run_command = run


@pytest.mark.parametrize(
    "text", ["scontrol did not answer within 5 s", "slurm_load_jobs error: Invalid job id specified"]
)
def test_a_job_that_cannot_be_asked_about_costs_no_other_its_attribution(cluster: Cluster, text: str) -> None:
    fail(cluster, "43", text)
    cluster.jobs = {"42": ["gpu:h100:1(IDX:0)"], "43": ["gpu:h100:1(IDX:1)"]}
    cluster.used = "gpu:h100:2(IDX:0-1)"
    for _ in range(5):
        cluster.clock.advance(5.0)
        assert [(c.holder.label, c.device) for c in cluster.source.poll().claims] == [
            ("job 42", "0"),
            ("a hidden job", "1"),
        ]
    assert len([asked for asked in cluster.asked if "show job 42" in asked]) <= 2


def test_a_fault_of_another_kind_does_not_end_the_use_of_json(cluster: Cluster) -> None:
    fail(cluster, "--json", "scontrol ended with status 1: fatal: failed to initialize auth plugin", times=2)
    for name, value in HELD.items():
        setattr(cluster, name, value)
    cluster.source.poll()
    cluster.clock.advance(DOUBT_EACH_S)
    cluster.source.poll()
    cluster.clock.advance(DOUBT_EACH_S)
    assert [c.holder.label for c in cluster.source.poll().claims] == ["job 42"]
    assert not [asked for asked in cluster.asked if "-o show job" in asked]


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
    assert cluster.source.poll().claims[0].holder.key.incarnation == "lab/1/0/1700000000"
