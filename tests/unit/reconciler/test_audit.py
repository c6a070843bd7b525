"""The audit log: a line for every mark that was set or withdrawn, and reading it later."""

from __future__ import annotations

import fcntl
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.full_disk import size_limited
from tests.testbed.marker_book import CANDIDATE, POLICY, UNDERUSED, A, Bench, Book

from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.version import VERSION
from gpu_exporter.reconciler import audit
from gpu_exporter.reconciler.audit import AuditLog, describe, policy_hash, read_transitions
from gpu_exporter.reconciler.cycle import CycleHooks, ReconcileCycle
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.marks import MarkError

JOB = HolderName("slurm", "", "3013")


class Audited(Bench):
    """A cycle with an audit log."""

    def __init__(self, *books: Book, path: Path) -> None:
        self.path, self.errors = path, 0
        super().__init__(*books)

    def restart(self) -> None:
        judge = judge_of(self, self.books, Rulebook(self.policy))
        self.audit = AuditLog(self.path, Rulebook(self.policy), self.clock, self._count)
        self.cycle = ReconcileCycle(judge, self.books, self.policy, self, self.clock, CycleHooks(audit=self.audit))

    def _count(self) -> None:
        self.errors += 1

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.path.read_text("utf-8").splitlines()]


def test_each_transition_of_a_mark_is_one_line_with_its_evidence(tmp_path: Path) -> None:
    bench = Audited(Book(), path=tmp_path / "audit.jsonl")
    for run in (CANDIDATE, CANDIDATE, UNDERUSED, 0.0):
        bench.runs = {A: [run, UNDERUSED]}
        bench.run()
    marked, rose, partial, gone, *rest = bench.lines()
    assert [line["action"] for line in (marked, rose)] == ["marked", "marked"]
    assert marked == {
        "time": "1970-01-12T13:46:40Z",
        "version": VERSION,
        "policy": policy_hash(Rulebook(POLICY)),
        "action": "marked",
        "scheduler": "kubernetes",
        "namespace": "ml",
        "name": "a",
        "job": "",
        "incarnation": "uid",
        "owner": "",
        "stage": "candidate",
        "reason": "all 2 GPUs idle for 60 min",
        "rule": "",
        "rule_why": "",
        "field": "label",
        "decided": "candidate",
        "class": "unclear",
        "group": "",
        "gpus_expected": 2,
        "gpus_observed": 2,
        "observed": "1970-01-12T13:46:40Z",
        "units": [
            {
                "node": "n",
                "gpu": str(index),
                "uuid": f"GPU-{index}",
                "mig": "",
                "idle_run_seconds": run,
                "coverage": 1.0,
                "witnesses": 2,
                "sample_age_seconds": 1.0,
            }
            for index, run in enumerate((CANDIDATE, UNDERUSED))
        ],
    }
    assert (rose["stage"], partial["action"], partial["stage"]) == ("underused", "withdrawn", "underused")
    assert (gone["action"], gone["stage"], rest) == ("marked", "partial", [])
    assert partial["decided"] == "partial"
    units: list[dict[str, object]] = partial["units"]  # type: ignore[assignment]
    assert [unit["idle_run_seconds"] for unit in units] == [0.0, UNDERUSED], "the evidence that ended the mark"


def test_a_mark_whose_write_failed_or_was_refused_has_no_line(tmp_path: Path) -> None:
    book = Book()
    bench = Audited(book, path=tmp_path / "audit.jsonl")
    bench.runs = {A: [UNDERUSED]}
    book.fail = MarkError("conflict", "changed")
    bench.run()
    book.fail, book.refuse = None, {A: "foreign"}
    bench.run()
    assert bench.lines() == []


def test_unknown_numbers_of_a_unit_are_null_in_the_audit_log(tmp_path: Path) -> None:
    bench = Audited(Book(), path=tmp_path / "audit.jsonl")
    bench.runs = {A: [UNDERUSED]}
    bench.run()
    (decision,) = bench.cycle.decisions
    unit = decision.units[0]._replace(idle_run_s=math.nan, coverage=None, sample_age_s=math.inf)
    bench.audit.note_marked(decision._replace(units=(unit,)), "label")
    (found,) = bench.lines()[-1]["units"]  # type: ignore[misc]
    assert [found[key] for key in ("idle_run_seconds", "coverage", "sample_age_seconds")] == [None] * 3


def test_an_audit_file_that_cannot_be_written_is_an_error_at_the_start_and_counted_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(OSError, match="No such file"):
        AuditLog(tmp_path / "nowhere" / "audit", Rulebook(POLICY), ManualClock(), lambda: None)
    folder = tmp_path / "logs"
    folder.mkdir()
    book = Book()
    bench = Audited(book, path=folder / "audit.jsonl")
    (folder / "audit.jsonl").rename(tmp_path / "rotated")
    folder.rmdir()
    bench.runs = {A: [CANDIDATE]}
    bench.run()
    bench.runs = {A: [UNDERUSED]}
    bench.run()
    assert (bench.errors, book.marks) == (2, {A: "underused"})
    assert caplog.text.count("audit log: cannot be written: ") == 1
    folder.mkdir()
    bench.runs = {A: [0.0]}
    bench.run()
    assert [line["action"] for line in bench.lines()] == ["withdrawn"], "a file that was moved away is created again"


def test_every_setting_of_the_policy_changes_its_hash() -> None:
    for key, value in Policy()._asdict().items():
        other = f"{value}x" if isinstance(value, str) else value + 1
        assert policy_hash(Rulebook(Policy()._replace(**{key: other}))) != policy_hash(Rulebook(Policy())), key


def line(**facts: object) -> str:
    base = {"time": "2027-01-15T08:00:00Z", "action": "marked", "stage": "candidate", "reason": "idle"}
    return json.dumps({**base, **A._asdict(), **facts}) + "\n"


def test_reading_returns_the_newest_transitions_of_the_asked_holder_only(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    others = [line(name="b"), line(namespace="other"), line(scheduler="slurm", namespace="", name="a")]
    job = line(**JOB._asdict(), job="3010_1", gpus_expected=2, gpus_observed=1)
    path.write_text("".join([job, *(line(reason=str(index)) for index in range(30)), *others]))
    assert [record["reason"] for record in read_transitions(path, A).records] == [str(index) for index in range(10, 30)]
    for name in ("3013", "3010_1"):
        (record,) = read_transitions(path, HolderName("slurm", "", name)).records
        assert describe(record) == "2027-01-15T08:00:00Z marked candidate: idle (1 of 2 GPUs seen)"


@given(
    st.lists(
        st.one_of(st.text(max_size=40), st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps))
    )
)
def test_lines_that_are_no_audit_records_are_skipped(
    tmp_path_factory: pytest.TempPathFactory, foreign: list[str]
) -> None:
    path = tmp_path_factory.mktemp("audit") / "audit.jsonl"
    path.write_text("\n".join([*foreign, ""]) + line() + "{" * 50_000 + "\n" + line(time="soon"), "utf-8")
    (record,) = read_transitions(path, A).records
    assert describe(record) == "2027-01-15T08:00:00Z marked candidate: idle"


def test_a_line_that_is_cut_is_not_written_and_explain_reports_it(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    bench = Audited(Book(), path=path)
    bench.runs = {A: [UNDERUSED]}
    bench.run()
    (decision,) = bench.cycle.decisions
    whole = path.stat().st_size
    with size_limited(whole + 100):
        assert not bench.audit.note_action(decision, {"act": "suspend", "result": "begins"})
    assert (path.stat().st_size, bench.errors) == (whole + 100, 1)
    assert bench.audit.note_action(decision, {"act": "suspend", "result": "later"})
    records, gap = read_transitions(path, A)
    assert [record.get("result") for record in records] == [None, "later"]
    assert gap == f"{path}: 1 incomplete lines were skipped"


def test_standard_output_that_takes_a_part_of_a_line_gets_the_next_one_on_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, its = os.pipe()
    os.set_blocking(its, False)
    monkeypatch.setattr(audit, "STDOUT_NUMBER", its)
    bench = Audited(Book(), path=audit.STDOUT)
    bench.runs = {A: [UNDERUSED]}
    bench.run()
    (decision,) = bench.cycle.decisions
    os.read(ours, 2**20)
    capacity = fcntl.fcntl(its, fcntl.F_GETPIPE_SZ)
    assert not bench.audit.note_action(decision, {"note": "x" * capacity}), "longer than what the pipe takes"
    assert (len(os.read(ours, 2**20)), bench.errors) == (capacity, 1)
    assert bench.audit.note_action(decision, {})
    empty, whole, rest = os.read(ours, 2**20).split(b"\n")
    assert (empty, json.loads(whole)["action"], rest) == (b"", "action", b"")
    os.close(ours)
    os.close(its)


def test_a_torn_last_line_and_one_that_never_ends_cost_only_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.jsonl"
    endless = b'{"time":"' + b"x" * (2 * audit.LINE_MAX) + b"\n"
    long = b"x" * audit.LINE_MAX + line(reason="the end of a longer line").encode()
    path.write_bytes(
        line(reason="first").encode() + endless + long + line(reason="second").encode() + line().encode()[:-1]
    )
    records, gap = read_transitions(path, A)
    assert [record["reason"] for record in records] == ["first", "second"]
    assert gap.endswith(": 2 incomplete lines were skipped")
    monkeypatch.setattr(audit, "READ_MAX", 2**20)
    with path.open("r+b") as file:
        file.truncate(3 * 2**30)  # sparse
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + line(reason="newest").encode())
    records, gap = read_transitions(path, A)
    assert [record["reason"] for record in records] == ["newest"]
    assert gap.endswith("only its last 1 MiB were read")


@pytest.mark.parametrize("kind", ["fifo", "directory"])
def test_an_audit_log_that_is_no_file_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    """A FIFO without a reader made the reconciler wait for ever."""
    path = tmp_path / "audit.jsonl"
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    for use in (
        lambda: AuditLog(path, Rulebook(POLICY), ManualClock(), lambda: None),
        lambda: read_transitions(path, A),
    ):
        with pytest.raises(OSError, match="not a regular file|Is a directory"):
            use()


def test_a_reason_with_control_characters_is_shown_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text(line(reason="a\nb\x1b[2J"))
    (record,) = read_transitions(path, A).records
    assert "\n" not in describe(record) and "\x1b" not in describe(record)
