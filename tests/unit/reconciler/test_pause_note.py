"""A pause that a person asks for: its effect on evidence and marks, and pauses that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.marker_book import UNDERUSED, WALL, A, B, Bench, Book, holder

from gpu_exporter.common.clock import SYSTEM_CLOCK
from gpu_exporter.common.exits import Exit
from gpu_exporter.reconciler.decision.brakes import Freeze
from gpu_exporter.reconciler.evidence.records import Evidence
from gpu_exporter.reconciler.pause import (
    REASON,
    UNTIL,
    PauseFile,
    PauseNote,
    PauseUnreadable,
    note_facts,
    parse_note,
    pause,
)
from gpu_exporter.reconciler.runtime.pause import end_pause, show_pause, start_pause

EVIDENCE = Evidence(WALL, (holder(A, [1.0]), holder(B, [1.0])._replace(counts_from=WALL - 50)))


class Noted:
    def __init__(self, note: PauseNote | Exception | None) -> None:
        self.note = note

    def read_pause(self) -> PauseNote | None:
        if isinstance(self.note, Exception):
            raise self.note
        return self.note


@pytest.mark.parametrize(
    ("until", "counts_from", "paused"),
    [
        (WALL + 60, (WALL, WALL), "paused until 1970-01-12T13:47:40Z: storage"),
        (WALL, (WALL, WALL), ""),
        (WALL - 20, (WALL - 20, WALL - 20), ""),
        (WALL - 80, (WALL - 80, WALL - 50), ""),  # another pause ended later
    ],
)
def test_idle_time_before_the_end_of_a_pause_does_not_count(
    until: float, counts_from: tuple[float, float], paused: str
) -> None:
    found = pause(EVIDENCE, Noted(PauseNote(until, "storage")))
    assert tuple(each.counts_from for each in found.holders) == counts_from
    assert found.paused == paused


def test_without_a_pause_the_evidence_is_unchanged_and_with_two_pauses_both_are_named() -> None:
    assert pause(EVIDENCE, Noted(None)) is EVIDENCE
    both = pause(EVIDENCE._replace(paused="policy.pause_when has 1 series"), Noted(PauseNote(WALL + 60, "")))
    assert both.paused == "policy.pause_when has 1 series; paused until 1970-01-12T13:47:40Z"


def test_a_pause_that_cannot_be_read_counts_as_a_pause_and_names_the_command_to_end_it(tmp_path: Path) -> None:
    file = tmp_path / "pause"
    for text in ("", "{", "[]", '"x"', "[" * 5000, json.dumps({UNTIL: "tomorrow"}), json.dumps({UNTIL: 5})):
        file.write_text(text)
        found = pause(EVIDENCE, PauseFile(file))
        assert found.paused.startswith(f"an unreadable pause counts as active: {file}: ")
        assert found.paused.endswith("; end the pause with gpu-exporter pause --end")
    file.write_text("{}")
    assert pause(EVIDENCE, PauseFile(file)) is EVIDENCE
    assert pause(EVIDENCE, PauseFile(tmp_path / "none")) is EVIDENCE
    assert "it is not a regular file" in pause(EVIDENCE, PauseFile(tmp_path)).paused


def test_a_pause_withdraws_marks_and_new_marks_follow_a_full_window_after_its_end(tmp_path: Path) -> None:
    place = PauseFile(tmp_path / "pause")
    bench = Bench(book := Book())
    bench.pauses = [place]
    bench.restart()
    bench.runs = {A: [UNDERUSED]}
    bench.run()
    assert book.marks == {A: "underused"}
    until = bench.clock.wall() + 3600
    place.write_pause(PauseNote(until, "storage"))
    bench.run()
    assert bench.cycle.frozen == {"paused": Freeze(bench.problem.removeprefix("frozen: "))}
    assert "storage" in bench.problem
    assert book.marks == {A: "underused"}, "a pause withdraws a mark only after unsupported_max"
    bench.clock.advance(bench.policy.unsupported_max)
    bench.run()
    assert book.marks == {}
    bench.restart()  # a reconciler that starts later knows the pause too
    for after_s, stages in (
        (60.0, []),
        (bench.policy.candidate_after - 60, []),
        (bench.policy.candidate_after, ["candidate"]),
        (bench.policy.underused_after - 60, ["candidate"]),
        (bench.policy.underused_after, ["underused"]),
    ):
        bench.clock.advance(until + after_s - bench.clock.wall())
        bench.runs = {A: [90_000.0]}
        bench.run()
        assert list(book.marks.values()) == stages, after_s


def test_the_command_begins_shows_and_ends_a_pause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = PauseFile(tmp_path / "pause")
    assert (show_pause(place), capsys.readouterr().out) == (0, "not paused\n")
    assert (end_pause(place), capsys.readouterr().out) == (0, "not paused\n")
    assert not (tmp_path / "pause").exists()
    before = SYSTEM_CLOCK.wall()
    assert start_pause(place, 3600.0, "storage\x1b[2J") == 0
    assert capsys.readouterr().out.endswith("Z: storage\N{REPLACEMENT CHARACTER}[2J\n")
    note = place.read_pause()
    assert note is not None
    assert before + 3599 <= note.until_wall <= SYSTEM_CLOCK.wall() + 3600
    assert end_pause(place) == 0
    assert capsys.readouterr().out.startswith("not paused; the last pause ended ")
    ended = place.read_pause()
    assert ended is not None
    assert before - 1 <= ended.until_wall <= SYSTEM_CLOCK.wall()
    end_pause(place)
    assert place.read_pause() == ended, "a second end does not change the end of a pause"
    (tmp_path / "pause").write_text("?")
    assert (show_pause(place), end_pause(place), show_pause(place)) == (Exit.PARTIAL, 0, 0)


def test_the_pause_as_json_says_whether_until_when_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said() -> tuple[object, ...]:
        facts = json.loads(capsys.readouterr().out)
        return facts["paused"], facts["until_timestamp_seconds"], facts["reason"], facts["problem"]

    place = PauseFile(tmp_path / "pause")
    show_pause(place, "json")
    assert said() == (False, None, "", "")
    start_pause(place, 3600.0, "storage", "json")
    begun = said()
    assert (begun[0], begun[2:]) == (True, ("storage", ""))
    show_pause(place, "json")
    assert said()[1] == pytest.approx(begun[1], abs=1.0), "the file has whole seconds"
    end_pause(place, "json")
    paused, until, *_ = said()
    assert paused is False and isinstance(until, float) and until < SYSTEM_CLOCK.wall() + 1
    (tmp_path / "pause").write_text("?")
    assert show_pause(place, "json") == Exit.PARTIAL
    paused, until, _, problem = said()
    assert (paused, until) == (True, None) and str(tmp_path / "pause") in str(problem)


@given(st.dictionaries(st.sampled_from([UNTIL, REASON, "other"]), st.one_of(st.none(), st.integers(), st.text())))
def test_any_annotations_are_a_pause_or_no_pause_or_a_clear_error(facts: dict[str, object]) -> None:
    try:
        note = parse_note(facts, "here")
    except PauseUnreadable as exc:
        assert str(exc).startswith("here: ")
        assert "\n" not in str(exc)
        return
    assert (note is None) == (facts.get(UNTIL) is None)


@given(st.integers(0, 4_000_000_000), st.text(max_size=300))
def test_a_pause_is_read_as_it_was_written(until: int, reason: str) -> None:
    facts = json.loads(json.dumps(note_facts(PauseNote(float(until), reason))))
    note = parse_note(facts, "here")
    assert note is not None
    assert note.until_wall == until
    assert note_facts(note) == facts


def test_the_pause_command_shows_what_it_wrote_also_without_the_right_to_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Written:
        note: PauseNote | None = None

        def read_pause(self) -> PauseNote | None:
            raise PauseUnreadable("Lease a/b: status 403")

        def write_pause(self, note: PauseNote) -> None:
            self.note = note

    place = Written()
    assert start_pause(place, 3600.0, "storage") == 0
    assert capsys.readouterr().out.endswith("Z: storage\n")
    assert end_pause(place) == 0
    assert capsys.readouterr().out.startswith("not paused; the last pause ended ")
    assert place.note is not None
