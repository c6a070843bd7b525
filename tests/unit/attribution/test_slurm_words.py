"""Texts of Slurm: real texts of two releases, hostile texts, and random texts."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.attribution.slurm.parse import (
    COLUMNS,
    SINFO_WIDTH,
    JobGpus,
    NodeRecord,
    parse_config,
    parse_job_gpus,
    parse_job_text,
    parse_listpids,
    parse_node,
    parse_sinfo,
    parse_squeue,
)
from gpu_exporter.agent.attribution.source import SourceError
from gpu_exporter.common.slurm.gres import Gres

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "slurm"
RELEASES = ("2205", "2411")


def fixture(name: str) -> str:
    return (FIXTURES / name).read_text("utf-8")


@pytest.mark.parametrize("release", RELEASES)
def test_the_rows_of_a_real_cluster_are_read(release: str) -> None:
    first, second, task = sorted(parse_squeue(fixture(f"squeue_{release}.txt")))
    assert (first.job_id, first.user, first.uid, first.account, first.partition) == (
        "1",
        "nobody",
        "65534",
        "chem",
        "gpu",
    )
    assert (first.state, first.restarts, first.qos) == ("RUNNING", "0", "")
    assert first.start is not None
    assert first.start > 1.7e9
    assert first.size == ("1", "1", "cpu=1,node=1,billing=1")
    assert [(j.job_id, j.array_job_id, j.array_task_id, j.het_job_id) for j in (first, second, task)] == [
        ("1", "", "", ""),
        ("2", "", "", ""),
        ("3", "3", "7", ""),
    ]


def squeue_row(**changed: str) -> str:
    """A row of squeue in which named columns are changed; `tres-alloc` is `tres_alloc`."""
    cells = ["12", "u", "a", "p", "q", "RUNNING", "1795304877", "0", "12", "N/A", "N/A", "N/A", "1", "1", "cpu=1", "7"]
    row = dict(zip(COLUMNS, cells, strict=True)) | changed
    return "|".join(row.values()) + "|\n"


@pytest.mark.parametrize(
    ("array", "het", "expected"),
    [
        (("12", "N/A"), ("11", "1"), ("", "", "11", "1")),  # a component has a leader and an offset
        (("9", "3"), ("0", "0"), ("9", "3", "", "")),  # a task; job 0 leads nothing
        (("9", "3-5"), ("N/A", "N/A"), ("", "", "", "")),  # tasks that have not started
        (("12", "N/A"), ("N/A", "0"), ("", "", "", "")),
    ],
)
def test_tasks_of_arrays_and_components_of_heterogeneous_jobs_are_read(
    array: tuple[str, str], het: tuple[str, str], expected: tuple[str, ...]
) -> None:
    row = squeue_row(ArrayJobID=array[0], ArrayTaskID=array[1], HetJobID=het[0], HetJobOffset=het[1])
    (job,) = parse_squeue(row)
    assert (job.array_job_id, job.array_task_id, job.het_job_id, job.het_job_offset) == expected


@pytest.mark.parametrize(
    ("start", "restarts", "expected"),
    [
        ("N/A", "2", (None, "2")),
        ("Unknown", "0", (None, "0")),
        ("1795304877", "(null)", (1795304877.0, "0")),
    ],
)
def test_an_unknown_start_is_left_out_and_restarts_are_counted(
    start: str, restarts: str, expected: tuple[float | None, str]
) -> None:
    (job,) = parse_squeue(squeue_row(StartTime=start, RestartCnt=restarts))
    assert (job.start, job.restarts) == expected


@pytest.mark.parametrize("text", ["slurm_load_jobs error: Unable to contact slurm controller", "1|a|b\n", "x" * 300])
def test_any_other_text_from_squeue_is_refused(text: str) -> None:
    with pytest.raises(SourceError, match="cannot parse a line of squeue"):
        parse_squeue(text)


@pytest.mark.parametrize("release", RELEASES)
def test_the_gpus_of_real_jobs_are_read(release: str) -> None:
    found = parse_job_gpus(fixture(f"jobs_{release}.json"), "n0")
    assert found["1"] == JobGpus((0, 1), 2)
    if release == "2205":  # lists every job; the name of job 2 claims eight GPUs
        assert found == {"1": JobGpus((0, 1), 2), "2": JobGpus((), 0), "3": JobGpus((2,), 1)}
    assert parse_job_gpus(fixture(f"jobs_{release}.json"), "n9")["1"] == JobGpus((), 2)


def jobs(*rows: dict[str, Any]) -> str:
    return json.dumps({"jobs": rows, "errors": []})


def test_a_job_on_several_nodes_gets_the_devices_of_each_node() -> None:
    text = jobs({"job_id": 5, "nodes": "n[0-1],m3", "gres_detail": ["gpu:2(IDX:1-2)", "gpu:1(IDX:0)", "gpu:3"]})
    assert parse_job_gpus(text, "n0")["5"] == JobGpus((1, 2), 6)
    assert parse_job_gpus(text, "n1")["5"] == JobGpus((0,), 6)
    assert parse_job_gpus(text, "m3")["5"] == JobGpus((), 6, unnamed=3)


def test_a_job_may_have_shares_of_gpus_and_whole_gpus() -> None:
    text = jobs({"job_id": 5, "nodes": "n0", "gres_detail": ["gpu:a100:1(IDX:3),shard:4(IDX:1)"]})
    assert parse_job_gpus(text, "n0") == {"5": JobGpus((3,), 2, 0, ((1, "shard"),))}


@pytest.mark.parametrize(
    "row",
    [
        {"job_id": 6, "nodes": "n[0-1]", "gres_detail": ["gpu:1(IDX:0)"]},  # it is unknown which of the two nodes
        {"job_id": 6, "nodes": "n[0", "gres_detail": ["gpu:1(IDX:0)"]},
        {"job_id": 6, "nodes": "n0", "gres_detail": ["gpu:1(IDX:x)"]},
        {"job_id": 6, "nodes": "n0"},
        {"job_id": 6, "nodes": ["n0"], "gres_detail": []},
        {"job_id": 6, "nodes": "n0", "gres_detail": ""},
        {"job_id": 6, "nodes": "", "gres_detail": []},  # the job has no nodes yet
    ],
)
def test_a_record_that_is_not_understood_affects_no_other_job(row: dict[str, Any]) -> None:
    good = {"job_id": 5, "nodes": "n0", "gres_detail": ["gpu:1(IDX:0)"]}
    assert parse_job_gpus(jobs(row, good), "n0") == {"5": JobGpus((0,), 1)}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "cannot parse Slurm's JSON: JSONDecodeError"),
        ("{}", "cannot parse Slurm's JSON: KeyError"),
        ("[]", "cannot parse Slurm's JSON: TypeError"),
        ('{"jobs": 3}', "cannot parse Slurm's JSON: TypeError"),
        ('{"jobs": [1]}', "cannot parse Slurm's JSON: TypeError"),
        ("[" * 100_000, "cannot parse Slurm's JSON: "),
        ('{"jobs": [], "errors": [{"error": "down"}]}', "Slurm answered with errors: [{'error': 'down'}]"),
    ],
    ids=["empty", "no-jobs", "list", "number", "no-row", "deep", "errors"],
)
def test_a_text_that_is_not_an_answer_is_refused(text: str, problem: str) -> None:
    with pytest.raises(SourceError, match=re.escape(problem)):
        parse_job_gpus(text, "n0")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=8)
    | st.sampled_from(["n0", "n[0-1]", "gpu:2(IDX:0-1)"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["jobs", "job_id", "nodes", "gres_detail", "errors"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_json_gives_gpus_or_a_source_error(value: Any) -> None:
    for text in (json.dumps(value), json.dumps({"jobs": value})):
        try:
            found = parse_job_gpus(text, "n0")
        except SourceError:
            continue
        assert all(isinstance(gpus, JobGpus) for gpus in found.values())


@pytest.mark.parametrize("release", RELEASES)
def test_a_nodes_record_has_its_gpus_and_the_gpus_in_use(release: str) -> None:
    node = parse_node(fixture(f"node_{release}.txt"))
    assert (node.configured, node.used) == ((("h100", 4),), Gres((0, 1, 2)))
    assert node.slurmd_start is not None
    assert node.slurmd_start > 1.7e9


@pytest.mark.parametrize(
    ("gres", "configured"),
    [
        ("gpu:h100:4(S:0-1),shard:h100:16,craynetwork:2", (("h100", 4),)),
        ("gpu:(null):4", (("", 4),)),
        ("gpu:A100:1,gpu:H100", (("a100", 1), ("h100", 1))),  # a missing count means one
        ("(null)", ()),
    ],
)
def test_the_configured_gpus_of_a_node_are_read(gres: str, configured: tuple[tuple[str, int], ...]) -> None:
    assert parse_node(f"NodeName=n0\n   Gres={gres}\n   GresUsed=gpu:0\n").configured == configured


def test_a_node_record_without_gres_in_use_is_refused() -> None:
    with pytest.raises(SourceError, match="prints no GresUsed, so the exporter cannot see which GPUs are free"):
        parse_node("NodeName=n0\n   Gres=gpu:4\n")


@pytest.mark.parametrize("release", RELEASES)
def test_the_settings_of_a_real_cluster_are_read(release: str) -> None:
    config = parse_config(fixture(f"config_{release}.txt"))
    assert config[:4] == ("lab", "/slurm/etc/slurm.conf", "/slurm/spool/%n", frozenset({"none"}))
    assert parse_config("PrivateData = accounts,Jobs, users\n").private >= {"jobs", "users"}


def test_without_json_a_plain_record_is_read_and_an_imitation_in_a_name_is_refused() -> None:
    honest = fixture("scontrol_two_gpus.txt")
    assert parse_job_text(honest, "1", "n0") == JobGpus((0, 1), 2)
    assert parse_job_text(honest, "1", "n1") == JobGpus((), 2)
    assert parse_job_text(fixture("scontrol_forged_name.txt"), "2", "n0") is None


def test_a_plain_record_of_a_job_with_different_gpus_on_its_nodes_is_read() -> None:
    details = (
        "JOB_GRES=gpu:14   Nodes=n0 CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:1-2),shard:4(IDX:1)"
        "   Nodes=n[1-3] CPU_IDs=0 Mem=0 GRES=gpu:3(IDX:0),gpu:v100:1"
    )
    text = fixture("scontrol_two_gpus.txt")
    text = text.replace("JOB_GRES=gpu:h100:2   Nodes=n0 CPU_IDs=7 Mem=0 GRES=gpu:h100:2(IDX:0-1)", details)
    assert parse_job_text(text, "1", "n0") == JobGpus((1, 2), 14, 0, ((1, "shard"),))
    assert parse_job_text(text, "1", "n3") == JobGpus((0,), 14, 3)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("job.sh", JobGpus((), 0)),
        ("job.sh MinCPUsNode=1", None),
        ("job.sh Nodes=n0 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)", None),
    ],
)
def test_a_record_without_a_device_list_counts_if_no_name_could_imitate_it(name: str, expected: JobGpus | None) -> None:
    text = fixture("scontrol_two_gpus.txt").replace("JobName=job.sh", f"JobName={name}")
    before, _, after = text.partition(" JOB_GRES=")
    text = f"{before} {after[after.index('MinCPUsNode=') :]}"
    assert parse_job_text(text, "1", "n0") == expected


def test_a_record_that_was_cut_off_before_its_devices_is_refused() -> None:
    assert parse_job_text(fixture("scontrol_two_gpus.txt").partition(" JOB_GRES=")[0], "1", "n0") is None


FORGED = " JOB_GRES=gpu:h100:8   Nodes=n0 CPU_IDs=0 Mem=0 GRES=gpu:h100:8(IDX:0-7) MinCPUsNode=1"


@pytest.mark.parametrize("place", ["JobName=job.sh", "WorkDir=/tmp", "Command=/slurm/job.sh"])
@pytest.mark.parametrize(
    "forged",
    [
        FORGED,
        FORGED.replace("JOB_GRES=", "X="),
        FORGED.removesuffix(" MinCPUsNode=1"),
        " JOB_GRES=(null)",
        FORGED.replace(" MinCPUsNode=1", " Nodes=n1"),
        "\nJobId=1 JobName=x" + FORGED,
        " MinCPUsNode=1",
    ],
)
def test_devices_in_a_name_or_comment_never_count(place: str, forged: str) -> None:
    text = fixture("scontrol_two_gpus.txt").replace(place, place + forged)
    assert forged in text
    assert parse_job_text(text, "1", "n0") is None


@given(st.text(alphabet="JOB_GRES= Nodes=n0 CPU_IDs=Mem=0(IDX:0-7)MinCPUsNode=1\n", max_size=80), st.booleans())
def test_no_job_name_can_claim_a_device_that_is_not_in_its_record(name: str, has_gpus: bool) -> None:
    text = fixture("scontrol_two_gpus.txt")
    if not has_gpus:
        text = text.replace("JOB_GRES=gpu:h100:2", "JOB_GRES=(null)").replace("GRES=gpu:h100:2(IDX:0-1)", "GRES=")
    found = parse_job_text(text.replace("JobName=job.sh", "JobName=" + name), "1", "n0")
    assert found in (None, JobGpus((0, 1), 2) if has_gpus else JobGpus((), 0))


def sinfo(*cells: str, state: str = "idle", reason: str = "none") -> str:
    return "".join(f"{cell:{SINFO_WIDTH}}|{state:256}|{reason:256}|\n" for cell in cells)


RECORD = NodeRecord((("h100", 4),), Gres((3,)), 1_700_000_000.0)


def test_the_gpus_in_use_are_the_same_in_each_partition_of_a_node() -> None:
    used = "gpu:h100:2(IDX:0,2),shard:h100:1(IDX:1)"
    assert parse_sinfo(sinfo(used, used), RECORD) == RECORD._replace(used=Gres((0, 2), 0, ((1, "shard"),)))
    assert parse_sinfo(sinfo("(null)"), RECORD).used == Gres()


@pytest.mark.parametrize(
    "text", ["", "\n", sinfo(""), sinfo("gpu:1(IDX:0)", "gpu:1(IDX:1)"), sinfo("x" * SINFO_WIDTH), sinfo("gpu:1(IDX:")]
)
def test_an_ambiguous_answer_of_sinfo_is_refused(text: str) -> None:
    with pytest.raises(SourceError, match="sinfo"):
        parse_sinfo(text, RECORD)


@pytest.mark.parametrize(
    ("state", "closed"),
    [
        ("IDLE", ""),
        ("MIXED+PLANNED", ""),
        ("IDLE+CLOUD+POWERED_DOWN", ""),  # Slurm powers it up for a job
        ("IDLE+REBOOT_REQUESTED", ""),
        ("IDLE+DRAIN", "drained"),
        ("MIXED+DRAIN", "drained"),
        ("IDLE+RESERVED", "reserved"),
        ("IDLE+MAINTENANCE+RESERVED", "reserved"),
        ("DOWN", "down"),
        ("DOWN*+DRAIN", "down"),
        ("IDLE*", "down"),
        ("IDLE+NOT_RESPONDING", "down"),
        ("IDLE+DRAIN+INVALID_REG", "down"),
        ("UNKNOWN", "down"),
        ("FUTURE", "down"),
        ("IDLE+BLOCKED", "reserved"),
        ("", ""),
    ],
)
def test_a_node_is_closed_in_states_in_which_no_job_may_start(state: str, closed: str) -> None:
    """As sinfo, scontrol and slurmrestd print them on 22.05, 24.11 and 26.05."""
    text = f"   Gres=gpu:h100:4\n   GresUsed=gpu:h100:0(IDX:N/A)\n   State={state} ThreadsPerCore=1\n"
    reason = "bad | fan [bay 3], State=IDLE"
    long = parse_node(f"{text}   Reason={reason} [root@1700000000]\n")
    short = parse_sinfo(sinfo("(null)", "(null)", state=state.lower(), reason=reason), RECORD)
    assert (long.closed, long.reason) == (short.closed, short.reason) == (closed, reason if closed else "")
    assert parse_node(text).reason == parse_sinfo(sinfo("(null)", state=state), RECORD).reason == ""


@pytest.mark.parametrize("reason", ["bad\nsee ticket 17", "\n", "a\n\n  b | c\nd", "x\n" * 100])
def test_a_reason_of_several_lines_is_one_reason(reason: str) -> None:
    """sinfo 22.05 prints the line breaks of a reason as they are."""
    used, drained = "gpu:h100:1(IDX:2)", {"state": "unknown+drain", "reason": reason}
    node = parse_sinfo(sinfo(used, **drained) + sinfo(used, **drained), RECORD)
    assert (node.used, node.closed) == (Gres((2,)), "down")
    assert node.reason == reason.replace("\n", " ").strip()[:200].strip()


@given(st.text(max_size=60), st.text(max_size=300))
def test_no_text_about_a_node_changes_its_gpus_in_use(state: str, reason: str) -> None:
    used = "gpu:h100:1(IDX:2)"
    with contextlib.suppress(SourceError):
        assert parse_sinfo(sinfo(used, state=state, reason=reason), RECORD).used == Gres((2,))
    record = parse_node(f"   Gres=gpu:4\n   GresUsed={used}\n   State=IDLE\n   Reason={reason} [root@1]\n")
    assert (record.used, record.closed) == (Gres((2,)), "")


LISTPIDS = """PID      JOBID    STEPID   LOCALID GLOBALID
9483     3        batch    0       0
9484     3        batch    -       -
-1       3        extern   0       0
9471     3        extern   -       -
-1       4294967294 extern 0       0
"""


def test_the_processes_of_each_jobs_steps_are_read() -> None:
    assert parse_listpids(LISTPIDS) == {"3": frozenset({9483, 9484, 9471}), "4294967294": frozenset()}
    assert parse_listpids("PID JOBID STEPID LOCALID GLOBALID\n\n") == {}


@pytest.mark.parametrize("line", ["1 2", "x 2 batch - -", "1 job batch - -", "1 2x batch - -", "--1 2 batch - -"])
def test_a_line_of_listpids_in_another_form_is_refused(line: str) -> None:
    with pytest.raises(SourceError, match="cannot parse a line of scontrol listpids"):
        parse_listpids(f"PID JOBID STEPID LOCALID GLOBALID\n{line}\n")


@given(st.text(alphabet="PID 0123456789-\nbatchx", max_size=60))
def test_any_text_of_listpids_gives_steps_or_a_source_error(text: str) -> None:
    with contextlib.suppress(SourceError):
        assert all(pid > 0 for pids in parse_listpids(text).values() for pid in pids)
