"""The Slurm source: which GPU a position means, by gres.conf and its changes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tests.unit.attribution.slurm_cluster import REVERSED, Cluster, fail, hold

from gpu_exporter.agent.attribution.slurm.gres.epochs import BEFORE
from gpu_exporter.agent.attribution.slurm.pace import Pace
from gpu_exporter.agent.attribution.slurm.source import SlurmOptions, SlurmSource
from gpu_exporter.agent.attribution.source import Answer
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.vendor import NVIDIA


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
        (
            "Name=gpu Type=h100 File=/dev/nvidia0",
            "gres.conf:1: names 1 GPUs, but slurm.conf gives the node Gres=gpu:h100:4",
        ),
        ("AutoDetect=rsmi", "gres.conf: with AutoDetect=rsmi, the driver cannot confirm"),
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
    named = SlurmSource(
        SlurmOptions(node="n0", gres_conf=cached / "gres.conf"), run=cluster.run, clock=cluster.clock, vendor=NVIDIA
    )
    assert [(c.kind, c.device) for c in named.poll().grants] == [("minor", "0")]


def test_the_copy_of_a_configless_slurmd_is_found(cluster: Cluster) -> None:
    cached = cluster.directory / "spool" / "n0" / "conf-cache"
    cached.mkdir(parents=True)
    cluster.gres_conf.rename(cached / "gres.conf")
    cluster.jobs, cluster.used = {"1": ["gpu:h100:1(IDX:2)"]}, "gpu:h100:1(IDX:2)"
    assert cluster.grants() == [("job 1", "minor", "2")]


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
    assert "lists the GPUs in another order than when slurmd started: restart slurmd" in answer.problem
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
