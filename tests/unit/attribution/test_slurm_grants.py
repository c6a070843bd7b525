"""The Slurm source: what it grants, and what it only knows to be held."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.attribution.slurm_cluster import COLUMNS_OF, SINFO, Cluster, hold

from gpu_exporter.agent.attribution import registry
from gpu_exporter.agent.attribution.slurm.controller import (
    DOUBT_EACH_S,
    JOB_EACH_S,
    LIST_EACH_S,
    SINGLES_MAX,
)
from gpu_exporter.agent.attribution.slurm.source import SlurmOptions, SlurmSource
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.common.model.holders import Holder, HolderKey
from gpu_exporter.common.vendor import NVIDIA


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
        SlurmSource(SlurmOptions(node=given), run=cluster.run, clock=cluster.clock, vendor=NVIDIA).poll()
    assert cluster.asked == [f"scontrol listpids * {asked}"]


def test_every_command_gets_the_configured_timeout(cluster: Cluster) -> None:
    SlurmSource(SlurmOptions(node="n0", timeout_s=2.5), run=cluster.run, clock=cluster.clock, vendor=NVIDIA).poll()
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
    assert answer.problem == "job 1 has IDX 0, but node n0 does not list IDX 0 as in use"
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
    with pytest.raises(
        SourceError, match="the jobs of node n0 have 1 more GPUs than the node's record shows as in use"
    ):
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
