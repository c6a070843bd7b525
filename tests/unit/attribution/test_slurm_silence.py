"""Jobs that begin and end while slurmctld or a command of Slurm does not answer get their hours, each second once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.attribution.slurm_histories import compare, draw, draw_parts
from tests.unit.attribution.slurm_silence import Job, Silence, SilentNode

ALL = ("sinfo", "squeue", "show")
WORDS = {
    "slurmctld": ALL,
    "squeue": ("squeue",),
    "scontrol": ("show",),
    "steps": ("listpids",),
    "all": (*ALL, "listpids"),
}
TIMES = (  # of the jobs of each GPU: into the silence, out of it, through it, one after the other
    ((12.2, 30.3),),
    ((28.4, 70.2),),
    ((10.1, 70.2),),
    ((10.1, 26.2), (26.4, 29.1), (29.3, 33.9), (34.1, 60.4)),
)
SILENCE = (20.0, 45.0)
KINDS = {
    "whole": ("", "whole", 1),
    "gang": ("", "whole", 2),
    "shard": ("shard", "shard", 1),
    "beside mps": ("mps", "whole", 1),
}


def make_node(directory: Path, kind: str, silent: str, late_s: float = 0.1) -> SilentNode:
    shared, part, nodes = KINDS[kind]
    jobs = [
        Job(10 * gpu + number, begin + late_s * number, end + late_s * number, part, nodes, late_s, gpu)
        for gpu, times in enumerate(TIMES)
        for number, (begin, end) in enumerate(times, 1)
    ]
    return SilentNode(directory, jobs, [Silence(*SILENCE, WORDS[silent])], shared)


def check(node: SilentNode) -> None:
    """Each job has the time between its prolog and its epilog, or up to the next job. Their dates are whole seconds."""
    held = node.held()
    for user, (begin, end) in node.spans.items():
        nexts = [first for other, (first, _) in node.spans.items() if other[:-1] == user[:-1] and first > begin]
        assert -0.3 <= held.get(user, 0.0) - (min([end, *nexts]) - begin) <= 1.0, (user, held, node.spans)
    assert (node.missed, sum(held.values())) == (0, pytest.approx(sum(held[user] for user in node.spans)))


@pytest.mark.parametrize("late_s", [0.1, 12.0], ids=["", "slow epilogs"])
@pytest.mark.parametrize("silent", WORDS)
@pytest.mark.parametrize("kind", KINDS)
def test_jobs_around_a_silence_get_their_hours(tmp_path: Path, kind: str, silent: str, late_s: float) -> None:
    node = make_node(tmp_path, kind, silent, late_s)
    node.run_until(140.0)
    check(node)
    node.stop(saves=False)


@pytest.mark.parametrize("saves", [False, True], ids=["killed", "stopped"])
@pytest.mark.parametrize("silent", ["slurmctld", "squeue"])
@pytest.mark.parametrize("kind", ["whole", "shard"])
def test_jobs_around_a_silence_in_which_the_exporter_restarts_get_their_hours(
    tmp_path: Path, kind: str, silent: str, saves: bool
) -> None:
    node = make_node(tmp_path, kind, silent)
    node.run_until(14.0)
    node.node.state.write_state()
    node.run_until(24.0)
    node.stop(saves=saves)
    node.clock.advance(6.0)
    node.start()
    node.run_until(100.0)
    check(node)
    node.stop(saves=False)


def test_a_job_that_is_requeued_during_a_silence_is_the_holder_again(tmp_path: Path) -> None:
    """Its file does not prove its GPUs, because it has two nodes, and slurmctld's row is of the first run."""
    first, again = Job(3, 8.0, 50.0, nodes=2), Job(3, 58.8, 72.9, nodes=2, restarts=1)
    node = SilentNode(tmp_path, [first, Job(4, 50.1, 58.6), again], [Silence(48.5, 58.5, ALL, refuses=True)])
    node.run_until(100.0)
    assert node.held() == {
        "u3": pytest.approx(42.0, abs=1.1),
        "u4": pytest.approx(8.0, abs=1.1),
        "u3r1": pytest.approx(15.0, abs=1.1),
    }
    node.stop(saves=False)


@pytest.mark.parametrize(("seed", "disturbed"), [(2, False), (1, True), (4, True), (6, True), (7, True)])
def test_random_histories_give_each_job_its_hours_or_count_it_as_missed(
    tmp_path: Path, seed: int, disturbed: bool
) -> None:
    """One epilog in three is 3 to 20 s late. Each of these histories once gave hours to another job."""
    over, under, missed = compare(tmp_path, draw(seed, late=True, disturbed=disturbed))
    assert over == {}
    assert len(under) <= missed, under


@pytest.mark.parametrize("disturbed", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_histories_of_parts_of_gpus_give_each_job_its_part_of_each_second(
    tmp_path: Path, seed: int, disturbed: bool
) -> None:
    over, under, missed = compare(tmp_path, draw_parts(seed, late=True, disturbed=disturbed))
    assert over == {}
    assert len(under) <= missed, under


@pytest.mark.parametrize("has_state", [False, True])
def test_time_before_the_first_start_counts_as_missed_and_is_never_booked(tmp_path: Path, has_state: bool) -> None:
    """As when the state directory is lost: nothing proves that an earlier process has not counted this time."""
    node = SilentNode(tmp_path, [Job(1, 10.0, 60.0), Job(2, 12.0, 20.0, gpu=1), Job(3, 45.0, 60.0, gpu=2)], [])
    node.run_until(18.0)
    node.stop(saves=True)
    if not has_state:
        (tmp_path / "state" / "state").unlink()
    node.clock.advance(22.0)
    node.start()
    node.run_until(90.0)
    held = node.held()
    expected = {"u1": 50.0, "u2": 8.0, "u3": 15.0} if has_state else {"u1": 20.0, "u3": 15.0}
    assert (held, node.missed) == (pytest.approx(expected, abs=1.0), 0 if has_state else 2)
    node.stop(saves=False)
