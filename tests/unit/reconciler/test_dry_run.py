"""The dry run shows in every output format what --apply would write and refuse, and goes on after errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import pytest
from tests.testbed.marker_book import CANDIDATE, POLICY, UNDERUSED, WALL, A, B, Book, holder

from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.fetch import FetchError
from gpu_exporter.reconciler.decision.policy import decide
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.dry_run import DryRun, StageTracker
from gpu_exporter.reconciler.evidence.asked import FORMS, Wanted, parse_asked
from gpu_exporter.reconciler.evidence.exporters import ExporterSource, parse_exporter
from gpu_exporter.reconciler.evidence.records import (
    Evidence,
    HolderEvidence,
    HolderName,
    OtherActivity,
    PublishedCause,
    UnitEvidence,
    UnitUse,
    Unseen,
    UseOfUnits,
    title,
)
from gpu_exporter.reconciler.judge import Judge
from gpu_exporter.reconciler.marks import MarkError, timestamp
from gpu_exporter.reconciler.preview import FAILURES_MAX, INSPECTIONS_MAX, Outlook, Preview
from gpu_exporter.reconciler.report import explain
from gpu_exporter.reconciler.runtime.explain import ExplainRequest, explain_once, explain_past
from gpu_exporter.reconciler.telemetry import Telemetry

TASK = HolderName("slurm", "", "3013")


class Source:
    """Answers with the suspects and with the holders that it is asked for, as a PromQL API does."""

    def __init__(self, *suspects: HolderEvidence, others: tuple[HolderEvidence, ...] = ()) -> None:
        self.suspects, self.others = suspects, others
        self.error: Exception | None = None
        self.unreadable = False
        self.asked: list[str] = []
        self.gaps: list[str] = []

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        if self.error:
            raise self.error
        asked = {name.name for name in marked}
        found = (each for each in self.others if asked & {each.name.name, each.users_id})
        return Evidence(WALL, (*self.suspects, *found), 1, 5)

    def find_holders(self, unit_of: Callable[[Mapping[str, str], str], str]) -> Collection[tuple[HolderName, str]]:
        labels = (
            (each.name, {"pod": each.name.name, "uuid": unit.uuid, "node": unit.node, "gpu": unit.gpu})
            for each in (*self.suspects, *self.others)
            for unit in each.units
        )
        return sorted({(name, unit) for name, each in labels if (unit := unit_of(each, ""))})

    def read_waiting(self, name: HolderName) -> Mapping[str, float]:
        if self.unreadable:
            raise AnswerError("Prometheus is slow")
        return {"h100": 3.0}

    def read_gaps(self) -> Sequence[str]:
        return self.gaps

    def read_last_seen(self, name: HolderName) -> float | None:
        if self.unreadable:
            raise AnswerError("Prometheus is slow")
        return WALL - 3600.0 if name.name == "gone" else None

    def read_use(self, name: HolderName, units: Collection[UnitEvidence]) -> UseOfUnits:
        if self.unreadable:
            raise AnswerError("Prometheus is slow")
        return {(unit.uuid, unit.mig): UnitUse("held_idle", 0.0, 0.0, "in the last 1h") for unit in units}

    def read_other_activity(self, uuids: Collection[str]) -> OtherActivity:
        if self.unreadable:
            raise AnswerError("Prometheus is slow")
        self.asked = sorted(uuids)
        return {(uuid, ""): {"power": 3.4, "pcie": 540.0} for uuid in uuids}


def look(book: Book, *holders: HolderEvidence) -> dict[HolderName, Outlook]:
    return Preview({"kubernetes": lambda: book}).look(decide(Evidence(WALL, holders), POLICY), WALL)


def test_a_preview_shows_the_refusals_of_apply_and_writes_nothing() -> None:
    book = Book()
    other = HolderName("kubernetes", "ml", "b")
    book.refuse[other] = "daemonset"
    seen = look(book, holder(A, (UNDERUSED,)), holder(other, (UNDERUSED,)))
    assert seen == {
        A: Outlook("mark=underused", checked=True),
        other: Outlook("mark=underused", "daemonset", "refused", True),
    }
    assert book.calls == ["inspect a", "inspect b"]


def test_the_live_object_of_a_holder_without_a_new_mark_is_not_read() -> None:
    book = Book()
    assert look(book, holder(A, (0.0,))) == {}
    assert book.calls == []


def test_a_scheduler_that_cannot_be_reached_is_reported_once_and_no_refusal_is_shown() -> None:
    preview = Preview({})
    decisions = decide(Evidence(WALL, (holder(A, (UNDERUSED,)), holder(B, (UNDERUSED,)))), POLICY)
    for _ in range(2):
        assert preview.look(decisions, WALL) == {
            A: Outlook("gpu-exporter.io/utilization=underused"),
            B: Outlook("AdminComment=gpu-exporter.io/utilization=underused"),
        }
    assert preview.notices == [
        "cannot connect to the API server: no service account, and no --kubernetes.kubeconfig; "
        "so the report does not show which pods --apply would refuse",
        "cannot query Slurm: squeue and scontrol are not on PATH; so the report does not show which jobs --apply would refuse",
    ]


def test_a_server_that_does_not_answer_is_not_asked_for_every_holder() -> None:
    book = Book()
    book.fail = MarkError("error", "API server: timed out")
    many = [holder(HolderName("kubernetes", "ml", str(i)), (UNDERUSED,)) for i in range(9)]
    preview = Preview({"kubernetes": lambda: book})
    seen = preview.look(decide(Evidence(WALL, tuple(many)), POLICY), WALL)
    assert len(book.calls) == FAILURES_MAX
    assert not any(outlook.checked for outlook in seen.values())
    assert preview.notices == ["API server: timed out; so the report does not show which pods --apply would refuse"]
    book.fail = None
    seen = preview.look(decide(Evidence(WALL, tuple(many)), POLICY), WALL)
    assert all(outlook.checked for outlook in seen.values())


def test_very_many_holders_are_inspected_in_turns() -> None:
    book = Book()
    many = [holder(HolderName("kubernetes", "ml", str(i)), (UNDERUSED,)) for i in range(INSPECTIONS_MAX + 3)]
    decisions = decide(Evidence(WALL, tuple(many)), POLICY)
    preview = Preview({"kubernetes": lambda: book})
    assert sum(outlook.checked for outlook in preview.look(decisions, WALL).values()) == INSPECTIONS_MAX
    assert all(outlook.checked for outlook in preview.look(decisions, WALL).values())


def test_a_refusal_of_one_stage_does_not_count_for_the_next_stage() -> None:
    book = Book()
    preview = Preview({"kubernetes": lambda: book})
    book.able_s[A] = POLICY.candidate_after
    for run, refused in ((CANDIDATE, ""), (UNDERUSED, "restarted"), (CANDIDATE, "")):
        seen = preview.look(decide(Evidence(WALL, (holder(A, (run,)),)), POLICY), WALL)
        assert seen[A].refused == refused


def test_the_preview_forgets_a_holder_that_is_gone() -> None:
    book, other = Book(), HolderName("kubernetes", "ml", "b")
    preview = Preview({"kubernetes": lambda: book})
    for holders in ((holder(A, (UNDERUSED,)), holder(other, (UNDERUSED,))), (holder(other, (UNDERUSED,)),), ()):
        seen = preview.look(decide(Evidence(WALL, holders), POLICY), WALL)
        assert set(seen) == {each.name for each in holders}


def test_the_log_of_a_dry_run_names_each_change_and_each_refusal_once() -> None:
    tracker = StageTracker()
    idle, more, busy = (decide(Evidence(WALL, (holder(A, (run,)),)), POLICY) for run in (CANDIDATE, UNDERUSED, 0.0))
    refused = {A: Outlook("x=underused", "daemonset", "a DaemonSet's pod", True)}
    assert tracker.changes(idle) == [
        "ml/a: would write gpu-exporter.io/utilization=candidate: its one GPU idle for 60 min"
    ]
    assert tracker.changes(idle) == []
    assert tracker.changes(more, refused) == [
        "ml/a: would not write x=underused: REFUSED (daemonset): a DaemonSet's pod"
    ]
    assert tracker.changes(more, refused) == []
    assert tracker.changes(busy) == []
    assert tracker.changes(more) == [
        "ml/a: would write gpu-exporter.io/utilization=underused: its one GPU idle for 120 min"
    ]
    assert tracker.changes([]) == [
        "ml/a: would withdraw gpu-exporter.io/utilization=underused: it is active or gone, or there is no evidence"
    ]
    assert tracker.changes([]) == []


def test_the_log_names_a_task_of_an_array_by_the_id_that_users_write() -> None:
    task = holder(TASK, (CANDIDATE,))._replace(users_id="3010_1")
    (line,) = StageTracker().changes(decide(Evidence(WALL, (task,)), POLICY))
    assert line.startswith("job 3010_1 [3013]: would write")


def test_a_dry_run_goes_on_after_any_fault(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    source, telemetry = Source(holder(A, (UNDERUSED,))), Telemetry()
    clock = ManualClock(wall=WALL)
    last = "gpu_reconciler_last_success_timestamp_seconds"
    dry = DryRun(Judge(source, Preview({}).surveyor, Rulebook(POLICY)), POLICY, telemetry, Preview({}), clock)
    for error in (AnswerError("Prometheus is down"), KeyError("odd"), None):
        source.error = error
        dry.run()
        once = len(caplog.records)
        dry.run()
        assert len(caplog.records) == once > 0
        assert (telemetry.registry.get_sample_value(last) is not None) == (error is None)
        frozen = telemetry.registry.get_sample_value("gpu_reconciler_frozen", {"reason": "source"})
        assert frozen == (error is not None)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:2] == [
        "dry run: the reconciler made no decisions in this cycle: Prometheus is down",
        "one turn of the task cycle failed; the task continues",
    ]
    assert dry.task.failures == 2
    assert sum("no decisions" in line for line in lines) == 1
    assert sum("would write" in line for line in lines) == 1
    assert sum("--apply would refuse" in line for line in lines) == 1
    assert telemetry.registry.get_sample_value("gpu_reconciler_cycles_total") == 6
    source.error = AnswerError("Prometheus is down")
    clock.advance(POLICY.unsupported_max)
    dry.run()
    assert "would withdraw" not in caplog.messages[-1]
    clock.advance(1.0)
    dry.run()
    assert caplog.messages[-1].startswith("dry run: ml/a: would withdraw")


NO_PROCESS = PublishedCause("no_process", "high")
ACTIVE = holder(HolderName("kubernetes", "ml", "busy"), (3.0,))
ARRAY = holder(TASK, (4.0,))._replace(users_id="3010_1")
HET = holder(HolderName("slurm", "", "3012"), (5.0,))._replace(users_id="3011+1")


@pytest.mark.parametrize(
    ("asked", "first"),
    [
        ("ml/busy", "ml/busy: active"),
        ("job/3013", "job 3010_1 [3013]: active"),
        ("job/3010_1", "job 3010_1 [3013]: active"),
        ("3010_1", "job 3010_1 [3013]: active"),
        ("job 3013", "job 3010_1 [3013]: active"),
        ("job/3011+1", "job 3011+1 [3012]: active"),
        ("job/3012", "job 3011+1 [3012]: active"),
        ("ml/a", "ml/a: underused"),
        ("a", "ml/a: underused"),
    ],
)
def test_explain_finds_a_holder_by_any_of_its_names(asked: str, first: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = Source(holder(A, (UNDERUSED,)), others=(ACTIVE, ARRAY, HET))
    book = Book()
    book.refuse[A] = "daemonset"
    assert (
        explain_once(source, Rulebook(POLICY), ExplainRequest(asked, "table"), Preview({"kubernetes": lambda: book}))
        == 0
    )
    text = capsys.readouterr().out
    name, _, stage = first.rpartition(": ")
    assert text.startswith(f"{name}: held_idle on its GPU, used 0% now and 0% in the last 1h; to change: release")
    assert text.count(f"\n  stage {stage}: ") == text.count("stage") == 1
    assert ("REFUSED: daemonset: refused" in text) == (first == "ml/a: underused")
    assert (
        explain_once(source, Rulebook(POLICY), ExplainRequest(asked, "json"), Preview({"kubernetes": lambda: book}))
        == 0
    )
    (row,) = json.loads(capsys.readouterr().out)["holders"]
    assert row["refused"] == ("daemonset" if first == "ml/a: underused" else None)
    assert {(unit["state"], unit["utilization_ratio"], *unit["causes"]) for unit in row["units"]} == {
        ("held_idle", 0.0)
    }


def test_an_explanation_names_the_witnesses_that_kept_its_gpus_from_being_idle(
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = Source(others=(ACTIVE,))
    assert explain_once(source, Rulebook(POLICY), ExplainRequest("ml/busy", "table"), Preview({})) == 0
    text = capsys.readouterr().out
    said = "\n    utilization 0, but other activity in the last 1h, by witness: pcie 540 s, power 3 s\n"
    assert text.count(said) == len(source.asked) == len(ACTIVE.units)
    source.unreadable = True
    assert explain_once(source, Rulebook(POLICY), ExplainRequest("ml/busy", "table"), Preview({})) == 0
    shown = capsys.readouterr()
    assert shown.err == "".join(
        f"gpu-exporter: it is unknown {what}: Prometheus is slow\n"
        for what in ("how its GPUs are used", "which witnesses were active")
    )
    first, _, rest = text.replace(said, "\n").partition("\n  stage active: ")
    assert shown.out == f"{first.partition(':')[0]}: stage active: {rest}"


def test_an_explanation_of_idle_gpus_says_how_many_such_gpus_are_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    source = Source(holder(A, (UNDERUSED,)), others=(ACTIVE,))
    assert explain_once(source, Rulebook(POLICY), ExplainRequest("ml/a", "table"), Preview({})) == 0
    assert "  pods or jobs wait for 3 GPUs of its pool h100\n" in capsys.readouterr().out
    source.unreadable = True
    assert explain_once(source, Rulebook(POLICY), ExplainRequest("ml/a", "table"), Preview({})) == 0
    shown = capsys.readouterr()
    assert "gpu-exporter: it is unknown how many GPUs others wait for: Prometheus is slow\n" in shown.err
    assert "wait for" not in shown.out


def test_explain_reports_a_name_without_a_holder(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        explain_once(Source(holder(A, (UNDERUSED,))), Rulebook(POLICY), ExplainRequest("job/9", "table"), Preview({}))
        == 2
    )
    assert capsys.readouterr().err == (
        f"gpu-exporter: job/9: there is no such holder in the evidence, which has 5 allocations; {FORMS}\n"
    )


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("ml/train-0", HolderName("kubernetes", "ml", "train-0")),
        ("ml/train-0/main", HolderName("kubernetes", "ml", "train-0")),
        ("job/train-0", HolderName("kubernetes", "job", "train-0")),
        ("job/7", HolderName("slurm", "", "7")),
        ("JOB/7", HolderName("slurm", "", "7")),
        ("job 7", HolderName("slurm", "", "7")),
        ("job/3010_1", HolderName("slurm", "", "3010_1")),
        ("job 3010_1 [3013]", HolderName("slurm", "", "3010_1")),
        ("3011+1", HolderName("slurm", "", "3011+1")),
        ("train-0", Wanted(pod="train-0")),
        ("GPU-c88f…", Wanted(uuid="GPU-c88f")),
        ("GPU-C88F-1", Wanted(uuid="GPU-c88f-1")),
        ("MIG-5e", Wanted(uuid="MIG-5e")),
        ("gpu-17:4", Wanted(node="gpu-17", gpu="4")),
        ("GPU-17:4", Wanted(node="GPU-17", gpu="4")),
        (" ", None),
    ],
)
def test_a_holder_is_found_by_every_form_that_a_program_prints(text: str, asked: HolderName | Wanted | None) -> None:
    assert parse_asked(text) == asked


def test_titles_of_holders_show_the_id_that_users_write_and_slurms_own_id() -> None:
    assert [title(A), title(B), title(B, "7"), title(TASK, "3010_1")] == ["ml/a", "job 7", "job 7", "job 3010_1 [3013]"]


def test_explain_says_when_a_holder_that_is_not_found_last_held_a_gpu_and_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = Source(holder(A, (UNDERUSED,)))
    source.gaps = ["1 target does not answer (up is 0): n2"]
    asked = ExplainRequest("ml/gone", "table")
    assert explain_once(source, Rulebook(POLICY), asked, Preview({})) == 2
    said = capsys.readouterr().err
    assert "it last held a GPU at 1970-01-12 12:46:40Z: --at=1970-01-12T12:46:40Z; for a report" in said
    assert "of all its time: gpu-exporter job ml/gone; write a pod as" in said
    assert said.endswith("gpu-exporter: 1 target does not answer (up is 0): n2\n")
    source.unreadable = True
    assert explain_once(source, Rulebook(POLICY), asked, Preview({})) == 2
    assert "last held" not in capsys.readouterr().err
    source.unreadable = False
    assert explain_once(source, Rulebook(POLICY), ExplainRequest("ml/a", "table"), Preview({})) == 0
    assert "does not answer" not in capsys.readouterr().err, "the holder is known, so nothing is missing"


def test_explain_names_the_address_that_does_not_answer_and_no_reconciler(capsys: pytest.CaptureFixture[str]) -> None:
    source = Source()
    for error, said in (
        (FetchError("http://p:9090/api/v1/query: Connection refused"), "cannot ask http://p:9090/api/v1/query: Conn"),
        (AnswerError("series of several clusters"), "cannot explain ml/a: series of several clusters"),
    ):
        source.error = error
        assert explain_once(source, Rulebook(POLICY), ExplainRequest("ml/a", "table"), Preview({})) == 3
        shown = capsys.readouterr().err
        assert shown.startswith(f"gpu-exporter: explain: {said}")
        assert "reconciler" not in shown

    def refuse(address: Address) -> str:
        raise FetchError(f"{address}: Connection refused")

    exporters = ExporterSource([parse_exporter("n1")], 7200.0, ManualClock(wall=WALL), refuse)
    assert explain_once(exporters, Rulebook(POLICY), ExplainRequest("ml/a", "table"), Preview({})) == 3
    assert capsys.readouterr().err == "gpu-exporter: explain: cannot ask http://n1/metrics: Connection refused\n"


def test_explain_finds_the_holder_of_a_gpu_by_uuid(capsys: pytest.CaptureFixture[str]) -> None:
    source = Source(holder(A, (UNDERUSED,)), others=(ACTIVE,))
    source.others = (ACTIVE._replace(units=tuple(unit._replace(uuid="GPU-9") for unit in ACTIVE.units)),)
    assert explain_once(source, Rulebook(POLICY), ExplainRequest("GPU-9", "table"), Preview({})) == 0
    assert "\n  stage active: " in capsys.readouterr().out
    assert explain_once(source, Rulebook(POLICY), ExplainRequest("GPU-0", "table"), Preview({})) == 0
    assert "\n  stage underused: " in capsys.readouterr().out
    assert explain_once(source, Rulebook(POLICY), ExplainRequest("GPU-7", "table"), Preview({})) == 2
    said = f"gpu-exporter: GPU-7: there is no such holder in the evidence, which has 5 allocations; {FORMS}\n"
    assert capsys.readouterr().err == said


def test_explain_for_a_past_time_shows_only_what_was_known_then(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    audit = tmp_path / "audit"
    lines = [
        {"time": timestamp(WALL - 60), "action": "marked", "stage": "candidate", "reason": "then"},
        {"time": timestamp(WALL + 60), "action": "withdrawn", "stage": "candidate", "reason": "later"},
    ]
    audit.write_text("".join(json.dumps({**line, **A._asdict()}) + "\n" for line in lines), "utf-8")
    source = Source(holder(A, (UNDERUSED,)))
    assert explain_past(source, Rulebook(POLICY), ExplainRequest("ml/a", "table", audit), WALL) == 0
    shown = capsys.readouterr()
    assert shown.err == "gpu-exporter: the objects around the holder at that time are unknown\n"
    assert "\n  stage underused: " in shown.out
    assert "then" in shown.out
    assert "later" not in shown.out
    assert explain_past(source, Rulebook(POLICY), ExplainRequest("ml/x", "table", audit), WALL) == 2
    assert "no such holder in the evidence of 1970-01-12 13:46:40Z, which" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("stage", "run", "following"),
    [
        (
            "candidate",
            CANDIDATE,
            "underused at 1970-01-12 14:46:39Z, if its GPUs stay idle and its host does no work; work on a GPU ends the mark",
        ),
        ("underused", UNDERUSED, "any work ends the mark within one cycle"),
        ("active", 5.0, "candidate after 1h without any work"),
    ],
)
def test_an_explanation_names_the_next_step_of_the_stage(stage: str, run: float, following: str) -> None:
    (decision,) = decide(Evidence(WALL, (holder(A, (run,)),)), POLICY)
    assert decision.stage == stage
    assert f"  next: {following}\n" in explain(decision, POLICY)


def test_a_name_that_several_holders_have_is_answered_with_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    """A pod of this name in two namespaces, and the beginning of the UUIDs of two GPUs. None of them is chosen."""
    one = holder(HolderName("kubernetes", "ml", "train"), (UNDERUSED,))
    other = holder(HolderName("kubernetes", "dev", "train"), (UNDERUSED,))
    other = other._replace(units=tuple(each._replace(uuid="GPU-01") for each in other.units))
    for asked in ("train", "GPU-"):
        assert explain_once(Source(one, other), Rulebook(POLICY), ExplainRequest(asked, "table"), Preview({})) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert "several holders match, so name one: dev/train on GPU-01, ml/train on GPU-0" in shown.err
    for asked in ("ml/train/main", "GPU-0", "n:0"):
        only = Source(one) if ":" in asked else Source(one, other)
        assert explain_once(only, Rulebook(POLICY), ExplainRequest(asked, "table"), Preview({})) == 0
        assert capsys.readouterr().out.startswith("ml/train: ")


def test_a_misspelled_holder_is_answered_by_the_nearest_one_that_holds_a_gpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = Source(holder(A, (UNDERUSED,)), others=(ACTIVE, ARRAY, HET))
    for asked, meant in (("ml/bussy", "ml/busy"), ("job/3031", "job 3013"), ("completely/different", "")):
        assert explain_once(source, Rulebook(POLICY), ExplainRequest(asked, "table"), None) == 2
        error = capsys.readouterr().err
        assert "no such holder in the evidence" in error
        assert (f"did you mean {meant}?" in error) == bool(meant), error


def test_a_node_that_has_gone_silent_shows_no_present_use(capsys: pytest.CaptureFixture[str]) -> None:
    """Prometheus returns its last values for five minutes more."""
    known = holder(A, (UNDERUSED,))
    stale = known._replace(units=(known.units[0]._replace(sample_age_s=200.0, causes=(NO_PROCESS,)),))
    explain_once(Source(others=(stale,)), Rulebook(POLICY), ExplainRequest("ml/a", "table"), None)
    assert capsys.readouterr().out.startswith("ml/a: stage unknown: no sample in the last 2 min\n")
    explain_once(Source(others=(stale,)), Rulebook(POLICY), ExplainRequest("ml/a", "json"), None)
    (row,) = json.loads(capsys.readouterr().out)["holders"]
    assert (row["units"][0]["state"], row["units"][0]["utilization_ratio"]) == ("", None)


@pytest.mark.parametrize("form", ["table", "json"])
def test_what_is_missing_from_the_answer_is_said_in_every_format(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = Source(others=(ACTIVE,))
    assert explain_once(source, Rulebook(POLICY), ExplainRequest("ml/busy", form), None) == 0
    assert "the objects around the holder at that time are unknown" in capsys.readouterr().err


def test_explain_names_the_missing_exporter_of_a_holder(capsys: pytest.CaptureFixture[str]) -> None:
    source, preview = Source(holder(A, (UNDERUSED,))), Preview({"kubernetes": Book})
    read = source.read_evidence
    lost = HolderName("kubernetes", "ml", "lost")
    source.read_evidence = lambda marked=(): read(marked)._replace(unseen=[Unseen("n3", lost, "uid")])  # type: ignore[method-assign]
    assert explain_once(source, Rulebook(POLICY), ExplainRequest("ml/lost", "table"), preview) == 2
    gone = "1 holder may still run"
    said = f"gpu-exporter: frozen: no data from n3, where {gone}\n"
    assert capsys.readouterr().err.startswith(said)
    assert explain_once(source, Rulebook(POLICY), ExplainRequest("ml/a", "table"), preview) == 0
    assert "no data from" not in capsys.readouterr().err, "it is about another holder"
