"""The Slurm source: slow, missing and unusual answers of Slurm."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.unit.attribution.slurm_cluster import HELD, SLOW, Cluster, fail, hold

from gpu_exporter.agent.attribution.slurm.controller import (
    CONFIG_EACH_S,
    DOUBT_EACH_S,
    JOB_EACH_S,
    LIST_EACH_S,
)
from gpu_exporter.agent.attribution.slurm.pace import INTERVAL_MAX_S, Pace
from gpu_exporter.agent.attribution.slurm.source import SlurmOptions, SlurmSource
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.common.vendor import NVIDIA


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
        f"{part} is in use, but Slurm does not name the GPU, so no GPU is reported as free"
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

    source = SlurmSource(SlurmOptions(node="n0"), run=run, clock=cluster.clock, pace=Pace(0.0), vendor=NVIDIA)
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

    source = SlurmSource(SlurmOptions(node="n0"), run=run, clock=cluster.clock, pace=Pace(60.0), vendor=NVIDIA)
    assert sorted(grant.holder.job_id for grant in source.poll().grants) == ["7", "8"]
