"""Slurm's words, real ones, hostile ones, and the documented shapes of other versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.attribution.slurm import (
    parse_gres_conf,
    parse_job_gpus,
    parse_names,
    parse_ranges,
    parse_squeue,
)
from gpu_exporter.attribution.source import SourceError

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "slurm"


def fixture(name: str) -> str:
    return (FIXTURES / name).read_text("utf-8")


def test_squeue_rows_of_a_real_cluster() -> None:
    jobs = parse_squeue(fixture("squeue.txt"))
    assert [job.job_id for job in jobs] == ["1", "2", "3"]
    first = jobs[0]
    assert (first.user, first.account, first.partition, first.state) == ("user1", "", "gpu", "RUNNING")
    assert first.restarts == "0"
    assert first.start is not None
    assert first.start > 1.7e9


@pytest.mark.parametrize("text", ["slurm_load_jobs error: Unable to contact slurm controller", "1|a|b\n", "x" * 300])
def test_anything_else_from_squeue_is_refused(text: str) -> None:
    with pytest.raises(SourceError, match="squeue printed a line that is not understood"):
        parse_squeue(text)


def test_gpus_of_a_real_job() -> None:
    assert parse_job_gpus(fixture("scontrol_two_gpus.txt"), "1", "n0") == ([0, 1], 2)
    assert parse_job_gpus(fixture("scontrol_two_gpus.txt"), "1", "n1") == ([], 2)


def test_an_identity_in_a_comment_changes_nothing() -> None:
    """The comment and name of this real job claim to be root's; identity never comes from here."""
    assert parse_job_gpus(fixture("scontrol_forged_comment.txt"), "2", "n0") == ([2], 1)
    assert parse_job_gpus(fixture("scontrol_forged_name.txt"), "3", "n0") == ([3], 1)


FORGED = " JOB_GRES=gpu:h100:8   Nodes=n0 CPU_IDs=0 Mem=0 GRES=gpu:h100:8(IDX:0-7) MinCPUsNode=1"


@pytest.mark.parametrize("place", ["JobName=job.sh", "WorkDir=/tmp", "Command=/home/user1/job.sh"])
@pytest.mark.parametrize("forged", [FORGED, FORGED.replace("JOB_GRES=", "X="), "\nJobId=1 JobName=x" + FORGED])
def test_devices_in_a_name_or_comment_are_refused(place: str, forged: str) -> None:
    text = fixture("scontrol_two_gpus.txt").replace(place, place + forged)
    assert forged in text
    with pytest.raises(SourceError, match="job 1: its name or comment imitates"):
        parse_job_gpus(text, "1", "n0")


def test_a_name_that_cuts_its_own_record_short_is_refused() -> None:
    text = fixture("scontrol_two_gpus.txt").replace("JobName=job.sh", "JobName=x\nJobId=99 JobName=y")
    with pytest.raises(SourceError, match="imitates"):
        parse_job_gpus(text, "1", "n0")


def test_a_harmless_word_of_ours_in_a_name_changes_nothing() -> None:
    text = fixture("scontrol_two_gpus.txt").replace("JobName=job.sh", "JobName=my JOB_GRES=notes")
    assert parse_job_gpus(text, "1", "n0") == ([0, 1], 2)
    hidden = fixture("scontrol_two_gpus.txt").replace("JobName=job.sh", "JobName=x JOB_GRES=a MinCPUsNode=1")
    with pytest.raises(SourceError, match="imitates"):
        parse_job_gpus(hidden, "1", "n0")


def test_another_jobs_record_in_a_comment_is_not_ours() -> None:
    text = fixture("scontrol_two_gpus.txt").replace(
        "WorkDir=/tmp", "WorkDir=/tmp Comment=\nJobId=99 JobName=x" + FORGED
    )
    assert parse_job_gpus(text, "1", "n0") == ([0, 1], 2)


@pytest.mark.parametrize(
    "extra", ["ArrayJobId=11 ArrayTaskId=3 ", "HetJobId=12 HetJobOffset=0 HetJobIdSet=12-13 "], ids=["array", "het"]
)
def test_array_tasks_and_het_jobs_are_no_forgeries(extra: str) -> None:
    text = fixture("scontrol_two_gpus.txt")
    assert parse_job_gpus(text.replace("JobName=", extra + "JobName="), "1", "n0") == ([0, 1], 2)
    tasks = text + text.replace("JobId=1 ", "JobId=12 ") + text.replace("JobId=1 ", "JobId=13 ")
    assert parse_job_gpus(tasks, "1", "n0") == ([0, 1], 2)


def test_a_job_without_gpus_has_none() -> None:
    text = fixture("scontrol_two_gpus.txt")
    before, _, after = text.partition("JOB_GRES=")
    assert parse_job_gpus(before + "MinCPUsNode=1" + after.partition("MinCPUsNode=1")[2], "1", "n0") == ([], 0)


@pytest.mark.parametrize(
    ("gres", "expected"),
    [
        ("gpu:h100:2(IDX:0-1)", [0, 1]),
        ("gpu:2(IDX:0,2-3)", [0, 2, 3]),
        ("gpu:h100:0(IDX:N/A)", []),
        ("gpu:a100:1(IDX:3),shard:4(IDX:1)", [3]),
        ("shard:1(0/0,0/0,1/4,0/4)", []),
        ("", []),
    ],
)
def test_gres_shapes(gres: str, expected: list[int]) -> None:
    text = (
        f"JobId=5 JobName=x UserId=a(1) JOB_GRES=x   Nodes=n[0-3] CPU_IDs=7 Mem=0 GRES={gres} MinCPUsNode=1 Comment=y"
    )
    assert parse_job_gpus(text, "5", "n2").indexes == expected


def test_a_job_on_several_nodes_gets_each_nodes_own_devices() -> None:
    text = (
        "JobId=5 JobName=x JOB_GRES=gpu:3   Nodes=n0 CPU_IDs=6 Mem=0 GRES=gpu:h100:2(IDX:1-2)"
        "      Nodes=n1 CPU_IDs=7 Mem=0 GRES=gpu:h100:1(IDX:0) MinCPUsNode=1"
    )
    assert parse_job_gpus(text, "5", "n0") == ([1, 2], 3)
    assert parse_job_gpus(text, "5", "n1") == ([0], 3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n0", ["n0"]),
        ("n[0-2,7]", ["n0", "n1", "n2", "n7"]),
        ("gpu[008-010]-a,login", ["gpu008-a", "gpu009-a", "gpu010-a", "login"]),
        ("/dev/nvidia0,/dev/nvidia1", ["/dev/nvidia0", "/dev/nvidia1"]),
        ("/dev/nvidia[2-3],/dev/nvidia0", ["/dev/nvidia2", "/dev/nvidia3", "/dev/nvidia0"]),
    ],
)
def test_name_lists(text: str, expected: list[str]) -> None:
    assert parse_names(text) == expected


@given(st.lists(st.integers(0, 63), min_size=1, unique=True))
def test_ranges_read_back(numbers: list[int]) -> None:
    assert parse_ranges(",".join(map(str, numbers))) == numbers


def test_gres_conf_names_devices_in_order() -> None:
    text = (
        "AutoDetect=off\nName=gpu Type=h100 File=/dev/nvidia[2-3]  # second pair first\n"
        "Name=gpu File=/dev/nvidia0\nNodeName=n9 Name=gpu File=/dev/nvidia7\nName=mps Count=100\n"
    )
    assert parse_gres_conf(text, "n0") == ["/dev/nvidia2", "/dev/nvidia3", "/dev/nvidia0"]
    assert parse_gres_conf(text, "n9")[-1] == "/dev/nvidia7"
    assert parse_gres_conf("AutoDetect=nvml\n", "n0") == []
