"""Which jobs may be marked: live jobs against a decision, their texts, and squeue's JSON of two releases."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.marker_book import Bench
from tests.testbed.memory_slurm import MemorySlurm, row_of_22_05, row_of_24_11

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.reconciler.apply import ApplyRuns
from gpu_exporter.reconciler.decision.policy import LABEL, Decision
from gpu_exporter.reconciler.decision.surroundings import Reference
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.marks import MarkError, Refused
from gpu_exporter.reconciler.slurm import marker as jobs
from gpu_exporter.reconciler.slurm.actor import JobActor
from gpu_exporter.reconciler.slurm.live import FIELDS
from gpu_exporter.reconciler.slurm.survey import describe
from gpu_exporter.reconciler.telemetry import Telemetry

WALL = 1_800_000_000.0
JOB = Decision(
    HolderName("slurm", "", "7"),
    "",
    "underused",
    "idle",
    (),
    2,
    WALL - 8000,
    "",
    WALL - 9000,
    7200.0,
    observed_wall=WALL,
    cluster="lab",
)


@pytest.mark.parametrize(("make", "field"), [(row_of_22_05, "Comment"), (row_of_24_11, "Extra")])
def test_jobs_of_two_releases_are_parsed_alike(make: Any, field: str) -> None:
    (job,) = jobs.parse_jobs(json.dumps({"jobs": [make()]}), [field])
    assert job == jobs.LiveJob("7", "7", "RUNNING", 1_799_991_000.0, 1, "", field)
    jobs.check_markable(job, JOB, "lab")
    jobs.check_markable(job._replace(gpus=JOB.held), JOB, "lab")
    with pytest.raises(Refused, match="Slurm gave the job 3 GPUs, but exporters report 2 for it"):
        jobs.check_markable(job._replace(gpus=3), JOB, "lab")
    array = (
        {"array_job_id": 5, "array_task_id": 3}
        if field == "Comment"
        else {
            "array_job_id": {"set": True, "number": 5},
            "array_task_id": {"set": True, "number": 3},
        }
    )
    (task,) = jobs.parse_jobs(json.dumps({"jobs": [make(**array)]}), [field])
    assert (task.job_id, task.target) == ("7", "5_3")


@pytest.mark.parametrize("make", [row_of_22_05, row_of_24_11])
@pytest.mark.parametrize(
    ("fields", "title", "reservations"),
    [
        ({}, None, None),
        ({"name": None, "resv_name": None}, None, None),
        ({"name": 3, "resv_name": ["a"]}, None, None),
        ({"name": "", "resv_name": ""}, "", ()),
        ({"name": "a*b\n", "resv_name": "course-1"}, "a*b\n", ("course-1",)),
        ({"name": "\ud800" * 8192, "resv_name": "a,b,"}, "\ud800" * 8192, ("a", "b")),
    ],
)
def test_names_and_reservations_are_as_slurm_shows_them_or_unknown(
    make: Any, fields: dict[str, Any], title: str | None, reservations: tuple[str, ...] | None
) -> None:
    text = json.dumps({"jobs": [make(job_id=8, name="train", resv_name=""), make(**fields)]})
    plain, job = jobs.parse_jobs(text, ["Comment"])
    assert (plain.title, plain.reservations) == ("train", ())
    assert (job.title, job.reservations) == (title, reservations)
    facts = describe(job, [plain, job], Policy()).job_facts
    shown = {"job_names": None if title is None else (title,), "reservations": reservations}
    assert facts == {key: values for key, values in shown.items() if values is not None}


@pytest.mark.parametrize("text", ["", "{}", '{"jobs": [{}]}', '{"jobs": 3}', '{"jobs": [{"job_id": "x"}]}'])
def test_a_text_that_is_no_answer_of_squeue_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cannot parse|malformed"):
        jobs.parse_jobs(text, ["Extra"])


def test_a_component_of_a_heterogeneous_job_has_its_own_target() -> None:
    (plain,) = jobs.parse_jobs(json.dumps({"jobs": [row_of_22_05(het_job_id=6, het_job_offset=1)]}), ["Comment"])
    assert plain.target == "6+1"
    leader = row_of_24_11(het_job_id={"set": True, "number": 7}, het_job_offset={"set": True, "number": 0})
    (later,) = jobs.parse_jobs(json.dumps({"jobs": [leader]}), ["Extra"])
    assert later.target == "7+0"


@pytest.mark.parametrize(
    ("fields", "user"),
    [
        ({"user_name": "ada", "user_id": 1001}, "ada"),
        ({"user_name": "nobody", "user_id": 1001}, "uid:1001"),
        ({"user_name": "", "user_id": {"set": True, "infinite": False, "number": 1001}}, "uid:1001"),
        ({"user_name": None}, ""),
    ],
)
def test_two_users_without_a_name_are_two_users_for_the_jobs_that_wait(fields: dict[str, Any], user: str) -> None:
    (job,) = jobs.parse_jobs(json.dumps({"jobs": [row_of_24_11(**fields)]}), ["Extra"])
    assert job.user == user


def test_a_malformed_job_does_not_hide_other_jobs() -> None:
    text = json.dumps({"jobs": [{"job_id": None}, row_of_22_05()]})
    assert [job.job_id for job in jobs.parse_jobs(text, ["Comment"])] == ["7"]


def test_an_answer_of_squeue_with_errors_is_refused() -> None:
    text = json.dumps({"jobs": [], "errors": [{"error": "Unable to contact slurm controller"}]})
    with pytest.raises(ValueError, match="Unable to contact"):
        jobs.parse_jobs(text, ["Comment"])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"state": "RUNNING,COMPLETING"}, "not_running"),
        ({"state": "SUSPENDED"}, "not_running"),
        ({"start": WALL - 8000}, "replaced"),
        ({"start": 0.0}, "replaced"),
        ({"text": "mine"}, "foreign"),
        ({"text": f"x{LABEL}=underused"}, "foreign"),
        ({"text": f"{LABEL}=underused mine"}, "foreign"),
    ],
)
def test_a_job_that_does_not_fit_its_decision_is_refused(change: dict[str, Any], reason: str) -> None:
    job = jobs.LiveJob("7", "7", "RUNNING", WALL - 9000, 0, "")._replace(**change)
    with pytest.raises(Refused) as caught:
        jobs.check_markable(job, JOB, "lab")
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ("beta", "the evidence is about a job of cluster beta, but the live job is of cluster lab"),
        ("", "the evidence names no Slurm cluster, but the live job is of cluster lab"),
    ],
)
def test_evidence_of_another_cluster_marks_no_job_of_this_cluster(named: str, text: str) -> None:
    """Every cluster counts its jobs from 1, and two jobs may start in the same second."""
    marker = MemorySlurm()
    (mark, *_) = marker.list_marks()
    decision = JOB._replace(name=mark.name, cluster=named)
    for refused in (
        lambda: marker.write(decision, WALL),
        lambda: marker.inspect(decision, WALL),
        lambda: marker.check(mark, decision, WALL),
    ):
        with pytest.raises(Refused) as caught:
            refused()
        assert (caught.value.reason, str(caught.value)) == ("cluster", text)
    marker.check(mark, decision._replace(cluster="lab"), WALL)


def test_the_start_of_another_clusters_job_does_not_end_the_mark_of_a_job_here() -> None:
    marker = MemorySlurm()
    (mark, *_) = marker.list_marks()
    unknown = JOB._replace(name=mark.name, stage="unknown", start_wall=WALL - 60)
    marker.check_alone(mark, unknown._replace(cluster="beta"), 7200.0, WALL)
    with pytest.raises(Refused, match="restarted the job after the evidence"):
        marker.check_alone(mark, unknown, 7200.0, WALL)


@pytest.mark.parametrize("settings", ["", "ClusterName =\nSlurmUser = slurm\n", "ClusterName = (null)\n"])
def test_no_job_is_marked_if_slurm_has_no_cluster_name(settings: str) -> None:
    with pytest.raises(MarkError, match="ClusterName is missing.*marks none: set ClusterName in slurm.conf"):
        MemorySlurm(settings=settings)


def marked_job(**change: Any) -> jobs.LiveJob:
    """Job 7 with a mark that was set while its start was WALL - 9000."""
    job = jobs.LiveJob("7", "5_3", "RUNNING", WALL - 9000, 0, "")
    text = jobs.render_mark(JOB, "underused", job.start)
    return job._replace(text=text)._replace(**change)


def test_the_text_on_a_job_contains_all_parts_of_its_mark() -> None:
    job = marked_job()
    assert job.text == (
        "gpu-exporter.io/utilization=underused;since=2027-01-15T05:46:40Z;gpus=2;start=2027-01-15T05:30:00Z;"
        "observed-until=2027-01-15T08:00:00Z"
    )
    mark = job.mark
    assert mark is not None
    assert (mark.name, mark.stage, mark.observed_wall, mark.title) == (JOB.name, "underused", WALL, "job 5_3 [7]")
    assert not mark.ended


@pytest.mark.parametrize("text", [f"{LABEL}=underused", f"{LABEL}=underused;since=2027-01-15T05:46:40Z;gpus=2"])
def test_a_mark_that_an_older_release_wrote_has_no_time_of_evidence(text: str) -> None:
    mark = marked_job(text=text).mark
    assert mark is not None
    assert (mark.stage, mark.observed_wall) == ("underused", None)


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_on_a_job_is_parsed_without_an_error(text: str) -> None:
    for candidate in (text, f"{LABEL}={text}", f"{LABEL}=underused;{text}"):
        mark = marked_job(text=candidate).mark
        assert mark is None or mark.observed_wall is None or math.isfinite(mark.observed_wall)


@pytest.mark.parametrize(
    ("change", "start_wall", "reason"),
    [
        ({}, None, ""),
        ({}, WALL - 9000, ""),
        ({"text": f"{LABEL}=underused"}, None, ""),
        ({"state": "RUNNING,COMPLETING"}, None, "not_running"),
        ({"start": WALL - 60}, None, "replaced"),  # requeued, with the text of the last run
        ({"start": WALL - 60, "text": f"{LABEL}=underused"}, WALL - 9000, "replaced"),
    ],
)
def test_a_marked_job_without_evidence_is_checked_against_its_own_mark(
    change: dict[str, Any], start_wall: float | None, reason: str
) -> None:
    marker = MemorySlurm()
    mark = marked_job(**change).mark
    assert mark is not None
    decision = JOB._replace(stage="unknown", start_wall=start_wall)
    try:
        marker.check_alone(mark, decision, 7200.0, WALL)
    except Refused as exc:
        assert exc.reason == reason
    else:
        assert reason == ""


def test_variables_of_the_environment_do_not_filter_the_output_of_slurm_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SQUEUE_STATES", "SQUEUE_USERS", "SLURM_CLUSTERS", "SCONTROL_ALL", "SLURM_CONF", "SLURM_JWT"):
        monkeypatch.setenv(name, "x")
    seen = set(jobs.run_slurm("env").split("\n"))
    assert {line for line in seen if line.startswith(("SQUEUE", "SLURM", "SCONTROL"))} == {
        "SLURM_CONF=x",
        "SLURM_JWT=x",
        "SLURM_TIME_FORMAT=%s",  # set by the reconciler
    }


def test_output_of_a_slurm_command_without_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_ANSWER", 100_000)
    with pytest.raises(MarkError, match="yes printed more than 100000 bytes"):
        jobs.run_slurm("yes")


def test_on_22_05_one_list_of_all_jobs_serves_many_renewals_and_is_then_read_again() -> None:
    """On 22.05 every list contains all jobs of the cluster."""
    marker = MemorySlurm("22.05.8")
    marks = marker.list_marks()
    marker.calls.clear()
    for mark in marks[:-1]:
        marker.renew(mark, JOB)
    assert marker.calls == ["squeue --json", *["scontrol update"] * 49]
    marker.clock.advance(jobs.RECENT_S)
    marker.renew(marks[-1], JOB)
    assert marker.calls[50:] == ["squeue --json", "scontrol update"]


def test_on_22_05_a_renewal_is_not_compared_with_a_list_from_before_the_last_renewal() -> None:
    """Two cycles run within the few seconds in which one list serves."""
    marker = MemorySlurm("22.05.8")
    for later in (0.0, 1.0):
        (mark, *_) = marker.list_marks()
        marker.renew(mark, JOB._replace(observed_wall=WALL + later))
    assert marker.text(1).endswith("observed-until=2027-01-15T08:00:01Z")


def test_from_23_02_a_job_is_read_directly_before_each_renewal() -> None:
    marker = MemorySlurm()
    marks = marker.list_marks()
    marker.calls.clear()
    for mark in marks:
        marker.renew(mark, JOB)
    assert marker.calls == ["squeue --json", "scontrol update"] * 50
    marks = marker.list_marks()
    marker.renew(marks[0], JOB)
    marker.rows[1]["extra"] = "mine"  # changed by its owner between two renewals
    with pytest.raises(Refused, match="text changed after the reconciler listed"):
        marker.renew(marks[1], JOB)
    assert marker.text(2) == "mine"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"extra": "mine"}, "foreign"),
        ({"extra": ""}, "foreign"),
        ({"extra": f"{LABEL}=underused;since=x;my note"}, "foreign"),
        ({"restart_cnt": 2}, "replaced"),
        ({"job_id": 99}, "replaced"),
    ],
)
@pytest.mark.parametrize("release", ["22.05.8", "24.11.5"])
def test_a_text_that_changed_since_it_was_listed_is_not_renewed(
    change: dict[str, Any], reason: str, release: str
) -> None:
    marker = MemorySlurm(release)
    (mark, *_) = marker.list_marks()
    marker.rows[0].update({FIELDS[marker.own] if key == "extra" else key: value for key, value in change.items()})
    marker.calls.clear()
    with pytest.raises(Refused) as caught:
        marker.renew(mark, JOB)
    assert caught.value.reason == reason
    assert marker.calls == ["squeue --json"]


@pytest.mark.parametrize("release", ["22.05.8", "24.11.5"])
@pytest.mark.parametrize("stage", ["candidate", "partial", "underused"])
def test_a_renewal_writes_the_evidence_and_keeps_the_stage(release: str, stage: str) -> None:
    marker = MemorySlurm(release, text=f"{LABEL}={stage};since=x;gpus=1")
    (mark, *_) = marker.list_marks()
    marker.renew(mark, JOB)
    assert marker.text(1) == (
        f"{LABEL}={stage};since=2027-01-15T05:46:40Z;gpus=2;start=2027-01-15T05:30:00Z;"
        "observed-until=2027-01-15T08:00:00Z"
    )


MARK, OLD = f"{LABEL}=underused;since=x", f"{LABEL}=candidate;since=x"


@pytest.mark.parametrize(
    ("release", "texts", "place", "marked"),
    [
        ("24.11", {}, "AdminComment", ()),
        ("24.11", {"AdminComment": "JS1:None"}, "Extra", ()),
        ("24.11", {"AdminComment": "JS1:None", "Extra": "mine"}, "", ()),
        ("24.11", {"AdminComment": MARK}, "AdminComment", ("AdminComment",)),
        ("24.11", {"Extra": OLD}, "AdminComment", ("Extra",)),
        ("24.11", {"AdminComment": "JS1:None", "Comment": OLD}, "Extra", ("Comment",)),
        ("24.11", {"AdminComment": MARK, "Extra": OLD}, "AdminComment", ("AdminComment", "Extra")),
        ("22.05", {"AdminComment": "JS1:None"}, "Comment", ()),
        ("22.05", {"Comment": "mine"}, "AdminComment", ()),
    ],
)
def test_the_field_for_the_mark_of_a_job_depends_on_release_and_other_texts(
    release: str, texts: dict[str, str], place: str, marked: tuple[str, ...]
) -> None:
    marker = MemorySlurm(release, text="", field=jobs.AUTO)
    marker.rows = [{**marker.rows[6], **{FIELDS[field]: text for field, text in texts.items()}}]
    job = marker.read("7")
    assert (job.field, tuple(job.marked)) == (place, marked)
    if not place:
        with pytest.raises(Refused, match="contains a text that the reconciler did not write"):
            marker.write(JOB._replace(held=job.gpus or 2), WALL)
        return
    marker.write(JOB, WALL)
    assert marker.text(7, place).startswith(f"{LABEL}=underused;since=2027")
    after = {field: marker.text(7, field) for field in FIELDS if field != place}
    assert after == {field: "" if field in marked else texts.get(field, "") for field in after}, "no other mark is left"
    (mark,) = marker.list_marks()
    marker.renew(mark, JOB._replace(observed_wall=WALL + 60))
    assert marker.text(7, place).endswith("observed-until=2027-01-15T08:01:00Z")
    marker.withdraw(mark, "over", WALL)
    assert [field for field in FIELDS if marker.text(7, field).startswith(LABEL)] == []
    assert marker.label(JOB) == f"{place}={LABEL}=underused"


def test_a_renewal_moves_a_mark_from_extra_to_admin_comment() -> None:
    marker = MemorySlurm(text=OLD, field=jobs.AUTO)
    (mark, *_) = marker.list_marks()
    marker.renew(mark, JOB)
    assert marker.text(1, "AdminComment").startswith(f"{LABEL}=candidate;since=2027")
    assert marker.text(1, "Extra") == ""


def test_if_admin_comment_is_denied_marks_are_written_to_the_next_field() -> None:
    marker = MemorySlurm(text="", field=jobs.AUTO)
    marker.denied = {"AdminComment"}
    with pytest.raises(
        MarkError,
        match=(
            "only an Administrator .* may write AdminComment; from the next cycle on, the reconciler writes marks to Extra"
        ),
    ):
        marker.write(JOB, WALL)
    marker.write(JOB, WALL)
    assert marker.text(7).startswith(f"{LABEL}=underused")
    marker.denied = {"Extra"}
    with pytest.raises(MarkError, match="denied"):
        marker.write(JOB._replace(name=HolderName("slurm", "", "8")), WALL)
    assert marker.fields == ["Extra"]
    only = MemorySlurm(text="", field="AdminComment")
    only.denied = {"AdminComment"}
    with pytest.raises(MarkError, match="or choose another --slurm.field"):
        only.write(JOB, WALL)


def test_extra_is_not_written_where_it_is_a_node_filter() -> None:
    settings = "ClusterName = lab\nSchedulerParameters = bf_continue,extra_constraints\n"
    assert MemorySlurm(settings=settings, field=jobs.AUTO).fields == ["AdminComment"]
    with pytest.raises(MarkError, match="Slurm filters nodes by Extra"):
        MemorySlurm(settings=settings, field="Extra")
    with pytest.raises(MarkError, match="slurm-wlm 22.05 has no field Extra: set --slurm.field=Comment"):
        MemorySlurm("22.05.8", field="Extra")


@pytest.mark.parametrize(
    ("fields", "gpus", "asks"),
    [
        ({}, None, False),
        ({"tres_alloc_str": "cpu=1,gres/gpu=4,gres/gpu:h100=4"}, 4, False),
        ({"tres_alloc_str": "cpu=1,node=1", "gres_detail": ["gpu:h100:2(IDX:0-1)", "gpu:h100:3(IDX:0-1,3)"]}, 5, False),
        ({"gres_detail": ["gpu:1(IDX:0),shard:h100:2(0/2)"]}, None, True),
        ({"gres_detail": ["shard:h100:2(0/2)"]}, None, True),
        ({"gres_detail": ["gpu:4(IDX:0-3),nic:2(IDX:0,2)"]}, 4, False),
        ({"gres_detail": ["gpu:4(IDX:0-3)", "odd("]}, None, True),
        ({"gres_detail": [], "tres_alloc_str": "cpu=1,gres/shard=1"}, None, True),
        ({"gres_detail": ["shard:h100:2(2/2)", "shard:3(IDX:0-1)"], "tres_per_node": "gres/shard:3"}, 3, True),
        ({"gres_detail": ["gpu:1(IDX:0),shard:3(0/4,3/4)"], "tres_alloc_str": "gres/gpu=1,gres/shard=3"}, 2, True),
        ({"gres_detail": ["mps:50(50/100,0/100)"], "tres_per_node": "gres:mps:50"}, 1, True),
        ({"gres_detail": ["gpu:2(IDX:0-"], "tres_alloc_str": "cpu=1,gres/gpu=2"}, 2, True),
        ({"gres_detail": "x", "tres_per_node": "gres:gpu:1"}, None, True),
        ({"gres_detail": [None, 3], "tres_per_job": "gres/gpu:h100:8"}, None, True),
        ({"tres_per_task": "cpu=2,gres/gpu=1"}, None, True),
        ({"tres_per_node": "gres/gpumem:1,gres/nogpu:2"}, None, False),
    ],
)
def test_the_gpus_of_a_job_are_known_also_if_accounting_does_not_name_them(
    fields: dict[str, Any], gpus: int | None, asks: bool
) -> None:
    """By default AccountingStorageTRES does not contain gres/gpu."""
    (job,) = jobs.parse_jobs(json.dumps({"jobs": [row_of_24_11(**fields)]}), ["Extra"])
    assert (job.gpus, job.asks) == (gpus, asks)


@pytest.mark.parametrize(
    ("fields", "units", "reason"),
    [
        ({"gres_detail": ["gpu:h100:1(IDX:0)"]}, 1, ""),
        ({"gres_detail": ["shard:1(1/4,0/4)"]}, 1, "part"),
        ({"gres_detail": ["shard:1(IDX:0)"]}, 1, "part"),
        ({"gres_detail": ["mps:50(50/100)"]}, 1, "part"),
        ({"gres_detail": None, "tres_alloc_str": "cpu=1,gres/shard=1"}, None, "part"),
        ({"gres_detail": ["shard:1(1/4)", "odd("], "tres_alloc_str": "gres/gpu=1,gres/shard=1"}, None, "part"),
        ({"gres_detail": ["shard:1(1/4),odd("], "tres_per_node": "gres/shard:1"}, None, "part"),
        ({"gres_detail": ["gpu:1(IDX:0),odd("]}, None, "members"),
        ({"gres_detail": None, "tres_per_node": "gres/gpu:1"}, None, "members"),
    ],
)
def test_an_act_on_a_job_needs_whole_gpus_of_known_number(
    fields: dict[str, Any], units: int | None, reason: str
) -> None:
    """Jobs wait for whole GPUs, and other jobs may work on the rest of a shared GPU."""
    slurm = MemorySlurm(text=f"{LABEL}=underused;since=x", field="AdminComment")
    slurm.rows = [row_of_24_11(batch_flag=True, admin_comment=f"{LABEL}=underused;since=x", **fields)]
    slurm.list_marks()
    target = JobActor(slurm, Policy()).read(Reference("", "", "", "7", ""), "", ("cancel",), 9000.0, WALL)
    assert [each.units for each in target.ends] == [units]
    assert (target.obstacle.reason if target.obstacle is not None else "") == reason


@pytest.mark.parametrize("other", [{"gpus": 1}, {"asks": True}, {}])
def test_a_component_that_may_hold_gpus_is_a_member(other: dict[str, Any]) -> None:
    one = jobs.LiveJob("7", "7+0", "RUNNING", WALL - 9000, 0, "", leader="7", gpus=2)
    two = jobs.LiveJob("8", "7+1", "RUNNING", WALL - 9000, 0, "", leader="7", **other)
    members = describe(one, [one, two], Policy()).members
    assert [member.name.name for member in members] == (["7", "8"] if other else [])


@pytest.mark.parametrize("added", [",my note", ";my note", ",a=1, b"])
def test_text_that_others_add_after_a_mark_is_kept_by_renewals_and_withdrawals(added: str) -> None:
    text = jobs.render_mark(JOB, "underused", 1_799_991_000.0) + added
    marker = MemorySlurm(text="", field=jobs.AUTO)
    marker.rows = [{**marker.rows[6], "admin_comment": text}]
    (mark,) = marker.list_marks()
    assert (mark.stage, mark.observed_wall) == ("underused", WALL)
    marker.renew(mark, JOB._replace(observed_wall=WALL + 60))
    kept = added.lstrip(",;")
    assert marker.text(7, "AdminComment").endswith(f"observed-until=2027-01-15T08:01:00Z,{kept}")
    (mark,) = marker.list_marks()
    marker.withdraw(mark, "over", WALL)
    assert marker.text(7, "AdminComment") == kept
    assert marker.list_marks() == []


def test_a_mark_that_cannot_be_removed_is_reported_and_does_not_prevent_a_mark_in_another_field() -> None:
    marker = MemorySlurm(text=OLD, field=jobs.AUTO)
    marker.rows = [{**marker.rows[6], "admin_comment": MARK}]
    (mark,) = marker.list_marks()
    marker.denied = {"AdminComment"}
    with pytest.raises(MarkError, match="denied.*only an Administrator .* may write AdminComment"):
        marker.withdraw(mark, "over", WALL)
    assert (marker.text(7, "Extra"), marker.text(7, "AdminComment")) == ("", MARK)
    with pytest.raises(MarkError, match="leaves AdminComment unchanged"):
        marker.write(JOB, WALL)
    marker.write(JOB, WALL)
    assert marker.text(7, "Extra").startswith(f"{LABEL}=underused;since=2027")
    (mark,) = marker.list_marks()
    marker.withdraw(mark, "over", WALL)
    assert marker.text(7, "Extra") == ""


@pytest.mark.parametrize(("slow_s", "runs"), [(0.0, 8), (1.0, 8), (2.0, 4), (4.0, 4)])
def test_a_slow_slurmctld_is_asked_less_often(slow_s: float, runs: int) -> None:
    """The interval is 30 s. A pause longer than a minute would make the liveness probe fail."""
    marker = MemorySlurm(text="")
    bench = Bench(marker)  # type: ignore[arg-type]
    bench.clock = marker.clock
    bench.restart()
    cycles = ApplyRuns(bench.cycle, Telemetry(marker.clock), marker.clock)
    marker.slow_s = slow_s
    marker.calls.clear()
    began = marker.clock.monotonic()
    for start in range(0, 240, 30):
        marker.clock.advance(began + start - marker.clock.monotonic())
        cycles.run()
    assert marker.calls.count("squeue --json") == runs


def test_a_job_lives_while_squeue_lists_this_run_of_it() -> None:
    marker = MemorySlurm()
    begun = 1_799_991_000
    marker.rows[1]["job_state"] = ["COMPLETED"]
    marker.rows[2]["start_time"]["number"] = begun + 60  # requeued
    marker.rows[3]["start_time"]["number"] = begun + 1
    asked = {(HolderName("slurm", "", str(job)), start) for job in (1, 2, 3, 4, 99) for start in (str(begun), "")}
    marker.list_marks()
    lists = len(marker.calls)
    found = marker.find_living(asked)
    assert {name.name for name, start in found if start} == {"1", "4"}
    assert {name.name for name, start in found if not start} == {"1", "3", "4"}
    assert len(marker.calls) == lists, "the list of this cycle is enough"
    marker.rows.append({"job_id": None})
    marker.clock.advance(3600.0)
    marker._run = lambda *command: "no answer"  # type: ignore[method-assign]
    assert marker.find_living(asked) == asked
