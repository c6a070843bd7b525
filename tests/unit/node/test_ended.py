"""Each job that ends leaves one record with its last values, which its user may read and others may not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.testbed.simulated_node import SimulatedNode
from tests.unit.node.node_bench import GPU, job, node_of

from gpu_exporter.agent.exposition.holders import render_holders
from gpu_exporter.agent.exposition.json_format import render_json
from gpu_exporter.agent.exposition.page import render_page
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.agent.node.ended import RUNS_MAX, USERS_MAX, EndedRun, JobRecords
from gpu_exporter.common.model.holders import Grant
from gpu_exporter.reports.jobs.entries import read_records
from gpu_exporter.reports.jobs.names import AskedJob

STARTED = 1_700_000_005.0  # of the clock of SimulatedNode: five seconds after its start


def of_user(number: str, index: int, uid: str = "1000") -> Grant:
    grant = job(number, index)
    return grant._replace(holder=grant.holder._replace(uid=uid, account="chem", start_wall=STARTED))


def live(node: SimulatedNode, seconds: int, *grants: Grant, ended: tuple[Grant, ...] = ()) -> None:
    """Lets time pass, with a poll every five seconds."""
    for second in range(seconds):
        node.clock.advance(1.0)
        node.sample()
        if second % 5 == 4:
            now = node.clock.monotonic()
            present = [each._replace(confirmed=now) for each in grants]
            node.state.on_poll(present, node.placed(), ended=ended)
            ended = ()


def taken(node: SimulatedNode, *, at_once: bool = False) -> list[dict[str, Any]]:
    return [json.loads(run.line) | {"uid": run.uid} for run in node.state.take_ended(at_once=at_once)]


def test_an_ended_job_has_one_record_with_all_of_its_gpus(tmp_path: Path) -> None:
    node = node_of(GPU, GPU, GPU, holders=[], state=StateFile(tmp_path, 10.0, "boot"))
    live(node, 60, of_user("42", 0), of_user("42", 1), of_user("43", 2))
    assert taken(node) == []
    live(node, 30, of_user("43", 2))
    (record,) = taken(node)
    assert record["uid"] == "1000"
    assert [each["gpu"] for each in record["allocations"]] == [0, 1]
    for each in record["allocations"]:
        assert (each["job_id"], each["account"]) == ("42", "chem")
        assert each["held_seconds"] == pytest.approx(55.0)
        assert each["busy_seconds"] / each["observed_seconds"] == pytest.approx(0.5, abs=0.02)
        assert each["observed_seconds"] > 53.0
        assert each["memory_max_bytes"] is not None and each["energy_joules"] > 0.0
    assert taken(node) == []


def test_the_report_reads_the_record_of_a_run_and_no_other(tmp_path: Path) -> None:
    node = node_of(GPU, GPU, holders=[], state=StateFile(tmp_path, 10.0, "boot"))
    task = of_user("43", 1)
    live(node, 60, of_user("42", 0), task._replace(holder=task.holder._replace(array_job_id="40", array_task_id="3")))
    live(node, 30)
    JobRecords(tmp_path).write(node.state.take_ended())
    (path,) = tmp_path.glob("*.jsonl")
    path.rename(tmp_path / f"{os.geteuid()}.jsonl")
    ((run,), _) = read_records(AskedJob("42"), tmp_path)
    assert (run.name, run.use.held_s, run.use.mean) == ("42", pytest.approx(55.0), pytest.approx(0.5, abs=0.02))
    for asked in (AskedJob("43"), AskedJob("40"), AskedJob("40", "_", "3")):
        assert [run.name for run in read_records(asked, tmp_path)[0]] == ["40_3"]
    others = (AskedJob("4"), AskedJob("40", "_", "4"), AskedJob("40", "+", "3"))
    assert [read_records(asked, tmp_path) for asked in others] == 3 * [([], [])]


def test_a_task_is_also_found_by_its_own_id_in_slurms_record(tmp_path: Path) -> None:
    """A short task shows no array. Nothing but a name may show another job, or the memory of others on a shared GPU."""
    node = node_of(GPU, GPU, GPU, holders=[], state=StateFile(tmp_path, 10.0, "boot"))
    named, shared = of_user("44", 1), of_user("45", 2)._replace(share="mps")
    live(node, 30, of_user("43", 0), named._replace(holder=named.holder._replace(identity="name")), shared)
    live(node, 30)
    records = {record["allocations"][0]["job_id"]: record["allocations"][0] for record in taken(node)}
    assert records.keys() == {"43", "45"}
    assert records["43"]["memory_max_bytes"] is not None and records["45"]["memory_max_bytes"] is None
    assert AskedJob("40", raws=frozenset({"43"})).has(records["43"])
    assert not AskedJob("40", raws=frozenset({"43"})).has(records["45"])


def test_no_output_shows_the_uid_that_may_read_the_record(tmp_path: Path) -> None:
    node = node_of(GPU, holders=[], state=StateFile(tmp_path, 10.0, "boot"))
    live(node, 20, of_user("42", 0, uid="1234567"))
    view = node.view()
    pages = (
        render_json(view),
        str(list(list_series(view))),
        render_holders(view),
        render_page(view, node.state.history),
    )
    assert all("42" in page and "1234567" not in page for page in pages)
    live(node, 30)
    (record,) = node.state.take_ended()
    assert record.uid == "1234567" and "1234567" not in record.line


def test_a_job_that_began_and_ended_between_two_polls_has_a_record(tmp_path: Path) -> None:
    node = node_of(GPU, holders=[], state=StateFile(tmp_path, 10.0, "boot"))
    live(node, 20)
    now, wall = node.clock.monotonic(), node.clock.wall()
    short = of_user("42", 0)._replace(confirmed=now + 4.0, start_here=wall + 1.0)
    live(node, 30, ended=(short,))
    (record,) = taken(node)
    assert record["allocations"][0]["held_seconds"] == pytest.approx(3.0)
    assert record["allocations"][0]["busy_seconds"] == pytest.approx(1.5, rel=0.05)
    assert record["end_timestamp_seconds"] == pytest.approx(wall + 4.0)


def test_a_job_that_has_just_ended_is_recorded_before_the_exporter_stops(tmp_path: Path) -> None:
    node = node_of(GPU, GPU, holders=[], state=StateFile(tmp_path, 10.0, "boot"))
    live(node, 20, of_user("42", 0), of_user("43", 1))
    live(node, 5, of_user("43", 1))
    assert taken(node) == []
    assert [each["allocations"][0]["job_id"] for each in taken(node, at_once=True)] == ["42"]


def test_without_a_state_directory_no_job_is_kept_in_memory() -> None:
    node = node_of(GPU, holders=[])
    live(node, 20, of_user("42", 0))
    live(node, 30)
    assert node.state.take_ended(at_once=True) == ()


def line(number: int) -> str:
    entry = {"scheduler": "slurm", "job_id": str(number), "array_job_id": "", "het_job_id": "", "gpu": 0}
    entry |= {"uuid": "GPU-0", "mig_uuid": "", "start_timestamp_seconds": number, "held_seconds": 3.0}
    return json.dumps({"end_timestamp_seconds": number + 3.0, "allocations": [entry]})


def test_the_files_are_bounded_and_keep_the_newest(tmp_path: Path) -> None:
    records = JobRecords(tmp_path / "jobs")
    records.write([EndedRun("1000", line(number)) for number in range(RUNS_MAX + 7)])
    records.write([EndedRun("1000", line(1000))])
    kept = [
        json.loads(each)["end_timestamp_seconds"]
        for each in (tmp_path / "jobs" / "1000.jsonl").read_text().splitlines()
    ]
    assert (len(kept), kept[0], kept[-1]) == (RUNS_MAX, 11.0, 1003.0)
    for uid in range(2000, 2000 + USERS_MAX):
        records.write([EndedRun(str(uid), line(uid))])
    files = {path.stem for path in (tmp_path / "jobs").iterdir()}
    assert len(files) == USERS_MAX and "1000" not in files


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")
def test_only_the_user_of_a_job_reads_its_record(tmp_path: Path) -> None:
    for place in (tmp_path, *list(tmp_path.parents)[:3]):
        place.chmod(0o755)
    JobRecords(tmp_path / "jobs").write([EndedRun("65534", line(7)), EndedRun("", line(8))])

    def read(uid: int, name: str) -> str:
        script = f"import os; os.setgroups([]); os.setgid({uid}); os.setuid({uid}); print(open('{tmp_path}/jobs/{name}').read())"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        return done.stdout or done.stderr.strip().rpartition("\n")[2]

    assert '"job_id": "7"' in read(65534, "65534.jsonl")
    assert "PermissionError" in read(1, "65534.jsonl")
    assert "PermissionError" in read(65534, "0.jsonl")
    listing = f"import os; os.setgid(1); os.setuid(1); os.listdir('{tmp_path}/jobs')"
    done = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr


def test_a_full_disk_costs_records_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "jobs").write_text("a file in place of the directory")
    records = JobRecords(tmp_path / "jobs")
    for _ in range(3):
        records.write([EndedRun("1000", line(1))])
    assert (tmp_path / "jobs").read_text() == "a file in place of the directory"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("torn", "found"),
    [("", 1), ("{", 1), ("null", 1), ('{"end_timestamp_seconds": NaN, "allocations": [{}]}', 1), (line(7)[:-9], 1)],
)
def test_a_damaged_line_costs_only_itself(torn: str, found: int, tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text(f"{torn}\n{line(7)}\n")
    runs, problems = read_records(AskedJob("7"), tmp_path)
    assert problems == []
    assert [(run.raw, run.start, run.end) for run in runs] == [("7", 7.0, 10.0)] * found


def test_a_file_that_is_not_read_costs_only_itself(tmp_path: Path) -> None:
    (tmp_path / "0.jsonl").write_text(line(7))
    (tmp_path / "1.jsonl").mkdir()
    runs, problems = read_records(AskedJob("7"), tmp_path)
    assert [run.raw for run in runs] == ["7"]
    assert problems == [f"{tmp_path}/1.jsonl: [Errno 22] it is not a regular file: '{tmp_path}/1.jsonl'"]


def test_an_odd_uid_or_file_costs_no_other_user_a_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "1000.jsonl").mkdir()
    uids = ("1000", "4294967296", "-1", "x", "1001")
    JobRecords(tmp_path).write([EndedRun(uid, line(number)) for number, uid in enumerate(uids)])
    lines = {path.stem: path.read_text().count("\n") for path in tmp_path.glob("*.jsonl") if path.is_file()}
    assert lines == {"0": 3, "1001": 1}
    assert len(caplog.records) == 1
