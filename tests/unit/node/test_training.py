"""What the reports of a holder's ranks become: totals on the right GPU, shares of the last minutes, the late rank."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.node.node_bench import GPU, JOB, node_of, only, values

from gpu_exporter.common.model.training import RankReport, TrainingView
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.diagnosis.training.files import TrainingFiles
from gpu_exporter.diagnosis.training.pace import GROUPS_MAX, PROCESSES_MAX, REPORTS_MAX, NodeTraining

WHO = ("job", "42")
A, B = UnitId("GPU-a"), UnitId("GPU-b")


def rank(steps: int, *, each_s: float = 0.1, wait: float = 0.5, number: int = 0, **other: Any) -> RankReport:
    whole = steps * each_s
    values: dict[str, Any] = {
        "run": f"r{number}",
        "rank": number,
        "world_size": 2,
        "measured": steps,
        "step_s": whole,
        "wait_s": whole * wait,
        "gpus": (f"GPU-{'ab'[number]}",) if number < 2 else (),
    }
    return RankReport(steps=steps, **values | other)


def watching(since: float = 0.0) -> NodeTraining:
    """The trainings of a node that the exporter has watched since long before they began."""
    training = NodeTraining()
    training.keep((), since)
    return training


def look(training: NodeTraining, at: float, *reports: RankReport) -> int | None:
    found = training.note(WHO, TrainingFiles(at, reports))
    return None if found is None else found.steps


def view(training: NodeTraining, unit: UnitId = A, now: float = 1000.0, idle_run_s: float | None = 0.0) -> TrainingView:
    found = training.view(WHO, unit, (A, B), now, idle_run_s)
    assert found is not None
    return found


def test_totals_belong_to_the_gpu_that_the_rank_names_and_its_holder_has() -> None:
    training = watching()
    look(training, 1000.0, rank(100), rank(90, number=1), rank(500, number=2, gpus=("GPU-of-another-job",)))
    assert (view(training, A).steps, view(training, B).steps) == (100, 90)
    assert view(training, A).seconds == pytest.approx({"step": 10.0, "wait": 5.0})


def test_a_rank_that_names_no_gpu_counts_only_where_there_is_no_choice() -> None:
    training = NodeTraining()
    look(training, 1000.0, rank(100, gpus=()))
    assert training.view(WHO, A, (A, B), 1000.0, 0.0) is None
    assert training.view(WHO, A, (A,), 1000.0, 0.0) is not None


def test_shares_are_of_the_last_minutes_not_of_the_whole_training() -> None:
    training = NodeTraining()
    look(training, 1000.0, rank(10_000, wait=0.9))
    old = 10_000 * 0.1
    new = RankReport("r0", 10_100, rank=0, world_size=2, measured=10_100, step_s=old + 10.0, wait_s=old * 0.9 + 1.0)
    look(training, 1015.0, new._replace(gpus=("GPU-a",)))
    pace = view(training, now=1015.0).pace
    assert (pace.steps, pace.wait) == (100, pytest.approx(0.1))


def test_the_gpus_own_time_line_decides_what_is_wait() -> None:
    training = NodeTraining()
    look(training, 1000.0, rank(100, wait=0.8, starved_s=0.5, worked_s=9.5, is_gpu=True))
    pace = view(training).pace
    assert (pace.wait, pace.is_gpu) == (pytest.approx(0.05), True)


def test_below_twenty_steps_no_share_is_known() -> None:
    training = NodeTraining()
    look(training, 1000.0, rank(19))
    assert view(training).pace.wait is None
    assert view(training).step_s is None


def test_three_long_steps_say_as_much_as_twenty_short_ones() -> None:
    """The longest steps are those of the largest jobs: 13 steps of 45 s fill the ten minutes that are kept."""
    training = watching()
    for at in range(0, 601, 15):
        look(training, at, rank(20 + at // 45, each_s=45.0, wait=0.6))
    pace = view(training, now=600.0).pace
    assert (pace.steps, pace.step_s, pace.wait) == (13, pytest.approx(45.0), pytest.approx(0.6))


def test_two_loops_of_one_process_add_up_by_their_time() -> None:
    """A training that hardly waits, and an evaluation in a tenth of the time that waits: their process waits 9 %."""
    train = rank(900, wait=0.01, process="p0")
    evaluation = rank(100, wait=0.80, run="e0", process="p0")
    training = watching()
    look(training, 1000.0, train, evaluation)
    pace = view(training).pace
    assert (pace.steps, pace.wait) == (1000, pytest.approx(0.089))
    two = watching()
    look(two, 1000.0, train, evaluation._replace(process="p1"))
    assert view(two).pace.wait == pytest.approx(0.8), "of two processes the longest wait counts"


def test_the_rank_that_waits_longest_for_data_is_late() -> None:
    training = NodeTraining()
    look(training, 1000.0, rank(100, wait=0.05), rank(100, number=1, wait=0.61))
    pace = view(training).pace
    assert (pace.waiting_rank, pace.late_share) == (1, pytest.approx(0.56))
    assert pace.late == "rank 1 is late by 56 ms of each step (56%): it waits longest for its data"


def test_the_rank_that_waits_least_in_the_collective_is_late() -> None:
    training = NodeTraining()
    waits = {0: 0.40, 1: 0.02, 2: 0.42}
    reports = [
        rank(100, number=number, wait=0.1, phases={"collective": 10.0 * share}) for number, share in waits.items()
    ]
    look(training, 1000.0, *reports)
    assert view(training).pace.late == (
        "rank 1 is late by 39 ms of each step (39%): it waits least in the collective operations"
    )


def test_trainings_of_one_process_each_do_not_wait_for_each_other() -> None:
    training = NodeTraining()
    look(training, 1000.0, rank(100, wait=0.05, world_size=1), rank(100, number=1, wait=0.61, world_size=1))
    assert (view(training).pace.late, view(training).pace.late_share) == ("", None)


def test_counters_never_fall_and_count_each_process_once() -> None:
    training = watching()
    steps = []
    for at, reports in enumerate(
        [
            (rank(100, run="a"), rank(50, number=1)),
            (rank(180, run="a", has_ended=True), rank(90, number=1)),
            (rank(10, run="b"), rank(95, number=1)),  # the first rank starts again
            (rank(20, run="b"), rank(95, number=1)),
            (rank(4, run="b"), rank(95, number=1)),  # a counter that falls
            (rank(30, run="b"),),  # a file is missing for a moment
            (rank(30, run="b"), rank(96, number=1)),
        ]
    ):
        look(training, 1000.0 + 15.0 * at, *reports)
        other = training.view(WHO, B, (A, B), 1000.0, 0.0)
        steps.append((view(training, A).steps, None if other is None else other.steps))
    assert steps == [(100, 50), (180, 90), (190, 95), (200, 95), (200, 95), (226, None), (226, 96)]


def test_after_a_restart_of_the_exporter_an_old_process_counts_from_now_on() -> None:
    training = watching(990.0)
    look(training, 1000.0, rank(50_000))
    assert view(training).steps == 0
    look(training, 1015.0, rank(50_150))
    assert view(training).steps == 150


def test_a_run_that_has_ended_or_is_no_longer_written_says_nothing_of_the_present() -> None:
    training = watching()
    dead = rank(10_000, wait=0.9, run="dead", world_size=1, has_ended=True)
    silent = rank(10_000, wait=0.9, run="silent", world_size=1, age_s=2000.0)
    look(training, 1000.0, rank(100, wait=0.0, world_size=1), dead, silent)
    look(training, 1015.0, rank(300, wait=0.0, world_size=1), dead, silent._replace(age_s=2015.0))
    pace = view(training, now=1015.0).pace
    assert (pace.ranks, pace.wait, pace.step_s) == (1, 0.0, pytest.approx(0.1))


def test_an_ended_training_is_silent_and_no_contradiction() -> None:
    training = watching()
    for number in range(200):
        look(training, 1000.0 + 15.0 * number, rank(500, has_ended=True, age_s=15.0 * number))
    found = view(training, now=4000.0, idle_run_s=2900.0)
    assert found.contradiction == ""
    assert found.pace.silent_s > 2000.0


@pytest.mark.parametrize(("minutes", "step_s"), [(6, None), (11, 60.0)])
def test_a_loop_that_became_slow_has_no_share_before_its_steps_are_enough(minutes: int, step_s: float | None) -> None:
    """Twenty steps, or 400 s of them."""
    training = watching()
    look(training, 1000.0, rank(10_000, wait=0.4))
    for number in range(1, minutes + 1):
        fast = 10_000 * 0.1
        slow = rank(10_000 + number, step_s=fast + 60.0 * number, wait_s=fast * 0.4)
        look(training, 1000.0 + 60.0 * number, slow)
    now = 1000.0 + 60.0 * minutes
    assert view(training, now=now).step_s == step_s
    assert view(training, now=now).pace.wait == (None if step_s is None else 0.0)


def test_a_process_that_does_not_have_to_write_yet_is_not_silent() -> None:
    training = watching()
    look(training, 1000.0, rank(100))
    assert look(training, 1015.0, rank(100, age_s=200.0, interval_s=300.0)) is None
    assert look(training, 1030.0, rank(100, age_s=320.0, interval_s=300.0)) == 0


def test_an_instance_is_found_by_its_own_uuid_with_any_prefix_and_by_its_board_if_it_is_all() -> None:
    unit = UnitId("GPU-board", "MIG-part")
    for named in ("MIG-part", "GPU-part", "GPU-board"):
        training = watching()
        look(training, 1000.0, rank(100, gpus=(named,)))
        assert training.view(WHO, unit, (unit,), 1000.0, 0.0) is not None
    other = UnitId("GPU-board", "MIG-other")
    assert training.view(WHO, unit, (unit, other), 1000.0, 0.0) is None


def test_what_only_some_ranks_say_is_not_diluted_and_what_none_says_is_unknown() -> None:
    training = watching()
    looks = [
        rank(100, number=number, wait_s=None, phases={"logging": 4.0} if not number else {}) for number in range(8)
    ]
    look(training, 1000.0, *looks)
    pace = view(training).pace
    assert pace.phases == {"logging": pytest.approx(0.4)}
    assert (pace.late_share, pace.late) == (None, "")


def test_ranks_that_are_alike_have_no_late_one() -> None:
    training = NodeTraining()
    look(training, 1000.0, rank(100, wait=0.10), rank(100, number=1, wait=0.15))
    assert (view(training).pace.late, view(training).pace.late_share) == ("", 0.0)


def test_steps_between_two_looks_and_how_long_it_is_silent() -> None:
    training = NodeTraining()
    assert look(training, 1000.0, rank(100, age_s=4.0)) is None
    assert look(training, 1015.0, rank(160, age_s=1.0)) == 60
    assert look(training, 1030.0, rank(160, age_s=16.0)) == 0
    assert view(training, now=1060.0).pace.silent_s == pytest.approx(45.0)
    assert look(training, 1045.0, rank(3, run="new")) is None  # another process
    assert look(training, 1060.0, rank(3, run="new", has_ended=True)) is None


def test_a_counter_that_falls_is_no_step() -> None:
    training = NodeTraining()
    look(training, 1000.0, rank(100))
    assert look(training, 1015.0, rank(50)) is None


def test_steps_without_any_work_of_the_gpu_are_a_contradiction() -> None:
    training = NodeTraining()
    look(training, 1000.0, rank(100))
    look(training, 1015.0, rank(200))
    assert view(training, now=1015.0, idle_run_s=1700.0).contradiction == ""
    assert view(training, now=1015.0, idle_run_s=None).contradiction == ""
    said = view(training, now=1015.0, idle_run_s=1900.0).contradiction
    assert said.startswith("its training reports steps, but this GPU has done nothing for 32 min")


def test_steps_make_no_gpu_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's claim changes neither its time nor its state."""
    idle = {"model": "H100", "load": {"kind": "constant", "value": 0.0}}
    quiet, claims = (node_of(idle, holders=[JOB]) for _ in range(2))
    for _ in range(80):
        quiet.run(15)
        claims.run(15)
        steps = int(claims.clock.monotonic())
        files = TrainingFiles(claims.clock.monotonic(), (rank(steps, gpus=()),))
        claims.diagnosis.host_node().note_training(WHO, files)
    before, after = quiet.view(), claims.view()
    assert only(after).training is not None and only(before).training is None
    assert only(after).totals == only(before).totals
    assert only(after).verdict == only(before).verdict
    assert only(after).verdict.state == "held_no_process" or only(after).verdict.state == "held_idle"
    assert values(after, "gpu_training_steps_total") == [float(steps - 1015)]  # it was older than the first look
    assert values(before, "gpu_training_steps_total") == []


def test_a_holder_that_left_is_forgotten() -> None:
    node = node_of(GPU, holders=[JOB | {"to": 60}])
    node.run(30)
    node.diagnosis.host_node().note_training(WHO, TrainingFiles(node.clock.monotonic(), (rank(100, gpus=()),)))
    assert node.diagnosis._training.is_used
    node.run(120)
    assert not node.diagnosis._training.is_used


@given(
    st.lists(
        st.tuples(st.floats(1.0, 900.0), st.integers(0, 3000), st.floats(0.0, 1e5), st.floats(0.0, 1.0), st.booleans()),
        min_size=1,
        max_size=60,
    )
)
def test_no_series_of_reports_gives_an_impossible_share(looks: list[tuple[float, int, float, float, bool]]) -> None:
    training, now = NodeTraining(), 0.0
    for later, steps, seconds, wait, is_gpu in looks:
        now += later
        report = rank(steps, step_s=seconds, wait_s=seconds * wait, phases={"forward": seconds})
        if is_gpu:
            report = report._replace(starved_s=seconds * wait, worked_s=seconds, is_gpu=True)
        look(training, now, report)
        pace = view(training, now=now).pace
        assert pace.wait is None or 0.0 <= pace.wait <= 1.0
        assert all(0.0 <= share <= 1.0 for share in pace.phases.values())
        assert pace.silent_s >= 0.0
        assert len(training._kept[WHO].looks) <= 41


def test_what_hostile_holders_write_has_a_limit_in_all() -> None:
    """20 pods with 64 ranks each, which change at every look."""
    training = watching()
    for turn in range(60):
        for number in range(20):
            reports = tuple(
                RankReport(f"{turn}x{rank}", turn, rank=rank, gpus=(f"GPU-{turn}-{rank}",), measured=turn, step_s=1.0)
                for rank in range(64)
            )
            training.note(("pod", str(number)), TrainingFiles(1000.0 + 15.0 * turn, reports))
    kept = training._kept.values()
    assert sum(len(look.reports) for each in kept for look in each.looks) <= REPORTS_MAX
    assert max(len(each.booked) for each in kept) <= GROUPS_MAX
    assert max(len(each._last) for each in kept) <= PROCESSES_MAX


def test_a_node_of_56_holders_keeps_the_looks_of_ten_minutes() -> None:
    training = watching()
    for turn in range(41):
        for number in range(56):
            training.note(("pod", str(number)), TrainingFiles(1000.0 + 15.0 * turn, (rank(turn),)))
    assert {len(each.looks) for each in training._kept.values()} == {41}


def test_a_sweep_of_many_short_processes_counts_all_their_steps() -> None:
    training = watching()
    for number in range(1500):
        look(training, 1000.0 + number, rank(100, run=f"r{number}"))
    assert view(training).steps == 150_000


def test_a_process_of_unknown_age_counts_from_now_on() -> None:
    training = watching(since=900.0)
    look(training, 1000.0, rank(1_000_000, step_s=None, wait_s=None))
    look(training, 1015.0, rank(1_000_010, step_s=None, wait_s=None))
    assert view(training).steps == 10


@pytest.mark.parametrize("each_s", [0.1, 40.0])
@pytest.mark.parametrize("is_measured", [True, False])
def test_steps_beside_a_gpu_at_rest_are_a_contradiction_however_slow_they_are(each_s: float, is_measured: bool) -> None:
    training = watching()
    unknown: dict[str, Any] = {} if is_measured else {"step_s": None, "wait_s": None}
    for at in range(0, 3600, 15):
        look(training, 1000.0 + at, rank(int(at / each_s), each_s=each_s, age_s=at % each_s, **unknown))
    assert "reports steps" in view(training, now=4600.0, idle_run_s=3600.0).contradiction
    assert view(training, now=4600.0, idle_run_s=1700.0).contradiction == ""


def test_steps_on_one_gpu_contradict_no_rest_of_another() -> None:
    training = watching()
    for at in range(0, 3600, 15):
        look(training, 1000.0 + at, rank(at), rank(500, number=1, age_s=float(at)))
    assert view(training, A, now=4600.0, idle_run_s=3600.0).contradiction
    assert view(training, B, now=4600.0, idle_run_s=3600.0).contradiction == ""


def test_a_loop_at_the_end_of_its_data_is_not_silent() -> None:
    """Its process may do anything then, also for hours: that it makes no step shows no stall."""
    for is_between, steps in ((False, 0), (True, None)):
        training = watching()
        look(training, 1000.0, rank(100))
        assert look(training, 1600.0, rank(100, age_s=600.0, is_between=is_between)) == steps
