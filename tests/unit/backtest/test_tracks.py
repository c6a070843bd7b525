"""Tenures from sightings: who left a unit, who was lost with it, and which time no source saw."""

from __future__ import annotations

from gpu_exporter.reports.backtest.lives import LEFT, LOST, OPEN, UNSEEN, WORK, Tenure
from gpu_exporter.reports.backtest.tracks import Board, Key, SeenPart, UnitTrack, build_tenures
from gpu_exporter.reports.usage.cells import HolderId, Unit

T0, END = 1_700_000_400.0, 1_700_000_400.0 + 100 * 600.0
BOARD: Board = ("", "GPU-1", "")
POD = HolderId("", "kubernetes", "ml", "train-0")
Spans = list[tuple[float, float]]


def at(window: float) -> float:
    return T0 + 600.0 * window


def track(seen: Spans, idle: Spans = [], parts: dict[float, SeenPart] | None = None) -> UnitTrack:  # noqa: B006
    """Times in windows of ten minutes."""
    found = UnitTrack(Unit("", "n1", "GPU-1"), 30.0, [(at(a), at(b)) for a, b in seen])
    found.add_idle([[(at(a), at(b)) for a, b in idle]] * 3)
    found.parts = {at(window): part for window, part in (parts or {}).items()}
    return found


def tenures(own: UnitTrack, other: UnitTrack | None = None, cuts: tuple[float, ...] = ()) -> list[Tenure]:
    tracks: dict[Key, UnitTrack] = {(POD, BOARD): own}
    if other is not None:
        tracks[None, BOARD] = other
    return build_tenures(tracks, END, {POD: [at(cut) for cut in cuts]})[POD]


def test_a_unit_that_is_seen_without_its_holder_was_left() -> None:
    (one,) = tenures(track([(0, 10)]), track([(10, 100)]))
    assert (one.start, one.end, one.ended) == (at(0), at(10), LEFT)
    first, second = tenures(track([(0, 10), (12, 100)]), track([(10, 12)]))
    assert (first.end, first.ended, second.start, second.ended) == (at(10), LEFT, at(12), OPEN)


def test_a_unit_that_works_without_a_holder_may_have_its_own() -> None:
    """dcgm-exporter loses the names of pods with its connection to the kubelet, while they work on."""
    for idle, ended in (([(10.4, 100)], LEFT), ([(13, 100)], UNSEEN), ([(10, 50)], LEFT)):
        own, free = track([(0, 10)], [(2, 10)]), track([(10, 100)], idle)
        (one,) = build_tenures({(POD, BOARD): own, (None, BOARD): free}, END, {}, has_free=True)[POD]
        assert one.ended == one.runs[0][-1].ended == ended


def test_a_unit_that_is_never_seen_again_was_lost() -> None:
    (one,) = tenures(track([(0, 10)], [(2, 10)]))
    assert one.ended == LOST and one.runs[0][0].ended == LOST


def test_a_unit_that_comes_back_without_its_holder_was_not_lost() -> None:
    """The time at which its holder ended is unknown."""
    (one,) = tenures(track([(0, 10)], [(2, 10)]), track([(20, 100)]))
    assert one.ended == UNSEEN and one.runs[0][0].ended == UNSEEN


def test_a_holder_goes_on_while_its_unit_is_not_seen() -> None:
    (one,) = tenures(track([(0, 10), (14, 100)], [(5, 10), (14, 20)]))
    assert one.gaps == ((at(10), at(14)),)
    assert [(run.end, run.ended) for run in one.runs[0]] == [(at(10), UNSEEN), (at(20), WORK)]
    assert one.first_work(at(6), 0) == at(20)  # not the gap


def test_another_pod_of_its_name_is_another_holder() -> None:
    first, second = tenures(track([(0, 100)], [(0, 100)]), cuts=(-5, 40))
    assert (first.start, first.end, second.start) == (at(0), at(40), at(40))
    assert first.runs[0][0].end == at(40) and second.runs[0][0].start == at(40)


def test_a_window_in_part_ends_where_its_samples_do() -> None:
    (one,) = tenures(track([(2, 10)], parts={1: SeenPart(240.0, False), 10: SeenPart(120.0, True)}), track([(11, 100)]))
    assert (one.start, one.end) == (at(2) - 240.0, at(10) + 120.0)


def test_a_break_without_samples_is_a_gap_and_a_break_with_work_is_not() -> None:
    idle = [(5, 10.2), (10.8, 20)]
    (quiet,) = tenures(track([(0, 10), (11, 100)], idle, {10: SeenPart(240.0, False)}))
    (busy,) = tenures(track([(0, 10), (11, 100)], idle, {10: SeenPart(240.0, True)}))
    assert [run.ended for run in quiet.runs[0]] == [UNSEEN, WORK] and quiet.gap_at(at(10.5)) is not None
    assert [run.ended for run in busy.runs[0]] == [WORK, WORK] and busy.gap_at(at(10.5)) is None
    assert busy.unseen_s(at(0), at(20)) == 360.0  # its place in the window is not known, but it lowers the coverage


def test_short_pauses_between_work_are_not_idle_runs() -> None:
    (one,) = tenures(track([(0, 100)], [(5, 6), (20, 22), (99, 100)]))
    assert [(run.start, run.ended) for run in one.runs[0]] == [(at(20), WORK), (at(99), OPEN)]


def test_holders_at_the_same_time_share_a_unit() -> None:
    other = HolderId("", "kubernetes", "ml", "b")
    tracks: dict[Key, UnitTrack] = {(POD, BOARD): track([(0, 100)]), (other, BOARD): track([(0, 50)])}
    found = build_tenures(tracks, END, {})
    assert [found[each][0].share for each in (POD, other)] == [0.5, 0.5] and found[POD][0].is_shared


def test_a_source_that_divides_units_is_not_divided_again() -> None:
    tracks: dict[Key, UnitTrack] = {}
    for name in "ab":
        tracks[HolderId("", "kubernetes", "ml", name), BOARD] = own = track([(0, 100)])
        own.share = 0.5
    assert [each.share for (each,) in build_tenures(tracks, END, {}).values()] == [0.5, 0.5]
