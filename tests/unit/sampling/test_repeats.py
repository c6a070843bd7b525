"""Every repetition is counted in exactly one line, and no subject has two lines within a minute."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.sampling.activity.repeats import MAX_SUBJECTS, QUIET_S, Repeats
from gpu_exporter.common.clock import ManualClock


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 90)), max_size=60))
def test_each_repetition_is_counted_in_one_line_and_lines_are_a_minute_apart(happened: list[tuple[str, int]]) -> None:
    clock = ManualClock()
    repeats: Repeats[str] = Repeats(clock)
    lines: dict[str, list[float]] = {"a": [], "b": []}
    counted: dict[str, int] = {"a": 0, "b": 0}

    def write(subject: str, times: int) -> None:
        lines[subject].append(clock.monotonic())
        counted[subject] += times

    def turn(seconds: int) -> None:
        for _ in range(seconds):
            clock.advance(1.0)
            for subject, times in repeats.take_due():
                write(subject, times)

    for subject, seconds in happened:
        if repeats.is_due(subject):
            write(subject, 1)
        turn(seconds)
    turn(int(QUIET_S))
    assert counted == {name: sum(subject == name for subject, _ in happened) for name in "ab"}
    for at in lines.values():
        assert all(later - earlier >= QUIET_S for earlier, later in pairwise(at))


def test_a_subject_is_logged_at_once_and_again_after_a_quiet_minute() -> None:
    clock = ManualClock()
    repeats: Repeats[str] = Repeats(clock)
    assert repeats.is_due("a")
    assert not repeats.is_due("a")
    assert repeats.is_due("b")
    for _ in range(2):
        clock.advance(QUIET_S)
        repeats.take_due()
    assert repeats.is_due("a")


def test_the_number_of_logged_subjects_is_limited() -> None:
    clock = ManualClock()
    repeats: Repeats[int] = Repeats(clock)
    assert sum(repeats.is_due(subject) for subject in range(3 * MAX_SUBJECTS)) == MAX_SUBJECTS
    clock.advance(QUIET_S)
    assert repeats.take_due() == []
    assert repeats.is_due(-1)
