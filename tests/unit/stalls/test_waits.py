"""What a job that waits is called: before its waits have taught anything, afterwards, and with proof that it cannot go on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from tests.testbed.lives import HANGS, WAITS, WORKS, Life, Phase, Player, Said
from tests.testbed.spins import BLIND, QUIET, Host

from gpu_exporter.agent.devices.levels import LEVELS, Level

MINUTE, HOUR = 60.0, 3600.0
TRAIN, SPIN, CONTEXT, REST = (LEVELS["H100", name] for name in ("train", "hang", "context", "rest"))
NOTHING = REST._replace(utilization=0.0)


def alike(level: Level, gpus: int = 4) -> tuple[Level, ...]:
    return (level,) * gpus


def start(minutes: float = 60.0) -> tuple[Phase, ...]:
    return Phase(120, alike(NOTHING), WORKS), Phase(minutes * MINUTE, alike(TRAIN), WORKS)


def wait(minutes: float, *, host: Host = QUIET, cores: float = 3.0, event: str = "", memory: float = 40.0) -> Phase:
    """GPU 0 rests, and the others wait for it."""
    return Phase(minutes * MINUTE, (CONTEXT, *alike(SPIN, 3)), WAITS, host, cores, memory, event)


def work(minutes: float = 3.0, *, host: Host = QUIET, event: str = "", memory: float = 40.0) -> Phase:
    return Phase(minutes * MINUTE, alike(TRAIN), WORKS, host, event=event, memory=memory)


def rounds(lengths: Iterable[float], host: Host = QUIET) -> tuple[Phase, ...]:
    return tuple(phase for minutes in lengths for phase in (wait(minutes, host=host), work(host=host)))


def play(phases: Sequence[Phase], *, visible: bool = True) -> list[Said]:
    return list(Player(Life("", "H100", tuple(phases), visible), step_s=5.0, seed=1).play())


def named(said: Sequence[Said], phase: int) -> float | None:
    """Seconds until the first report at medium or high confidence in a phase, None without one."""
    return next((each.at for each in said if each.phase == phase and each.confidence in ("medium", "high")), None)


def test_the_first_three_waits_are_named_at_medium_and_later_ones_not_at_all() -> None:
    said = play((*start(), *rounds([25] * 8)))
    assert {each.confidence for each in said} == {"medium"}
    assert [named(said, phase) is not None for phase in range(2, 18, 2)] == [True] * 3 + [False] * 5


def test_short_work_between_waits_adds_up() -> None:
    said = play((*start(), *((wait(25), work(0.5)) * 10)))
    seen = [named(said, phase) is not None for phase in range(2, 22, 2)]
    assert seen[:4] == [True] * 4 and not any(seen[6:])


def test_a_hang_after_learned_waits_is_named_at_three_times_the_longest() -> None:
    said = play((*start(), *rounds([20, 25, 22, 18]), wait(180)))
    at = named(said, 10)
    assert at == pytest.approx(75 * MINUTE, abs=90)
    assert {each.confidence for each in said if each.phase == 10} == {"medium"}, "nothing proves it"


def test_a_hang_is_never_named_later_than_after_twelve_hours() -> None:
    said = play((*start(), *rounds([400] * 3), wait(13 * 60)))
    assert named(said, 8) == pytest.approx(12 * HOUR, abs=90)


def test_short_waits_teach_nothing_that_changes_the_rule() -> None:
    said = play((*start(), *rounds([2] * 30), wait(20)))
    assert named(said, 62) == pytest.approx(15 * MINUTE, abs=90)
    assert {each.confidence for each in said} == {"medium"}


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (work(event="restart"), "its processes are others"),
        (Phase(3 * MINUTE, (NOTHING, *alike(TRAIN, 3)), WORKS), "one GPU is left behind"),
    ],
)
def test_what_does_not_go_on_by_itself_teaches_nothing(after: Phase, why: str) -> None:
    said = play((*start(), *((wait(25), after) * 6)))
    assert all(named(said, phase) is not None for phase in range(2, 14, 2)), why


def test_where_processes_are_not_visible_memory_that_stays_shows_that_they_live() -> None:
    said = play((*start(), *rounds([25] * 5, BLIND)), visible=False)
    assert [named(said, phase) is not None for phase in range(2, 12, 2)] == [True] * 3 + [False] * 2
    loading = work(1, host=BLIND, memory=2.0)
    restarted = (*start(), *((wait(25, host=BLIND), loading, work(host=BLIND)) * 5))
    said = play(restarted, visible=False)
    assert all(named(said, phase) is not None for phase in range(2, 17, 3))


@pytest.mark.parametrize("event", ["gone 0", "stopped 0", "xid 0"])
def test_a_member_that_cannot_go_on_is_proof_after_five_minutes(event: str) -> None:
    said = play((*start(), *rounds([25] * 4), wait(60, event=event)))
    hang = [each for each in said if each.phase == 10 and each.confidence != "none"]
    assert {each.confidence for each in hang} == {"high"}
    assert named(said, 10) == pytest.approx(5 * MINUTE, abs=90)


def test_a_gpu_that_does_not_answer_is_proof_until_it_answers_again() -> None:
    said = play((*start(), wait(30, event="silent 0"), wait(30, event="answers")))
    assert {each.confidence for each in said if each.phase == 2} == {"high"}
    assert {each.confidence for each in said if each.phase == 3 and each.at > MINUTE} == {"medium"}


@pytest.mark.parametrize("event", ["gone 0", "stopped 0", "xid 0"])
def test_a_gpu_that_works_meanwhile_is_stronger_than_any_proof(event: str) -> None:
    """Four programs side by side: one ends or fails, one works on, and two wait."""
    phase = Phase(30 * MINUTE, (NOTHING, TRAIN, *alike(SPIN, 2)), WAITS, event=event)
    assert {each.confidence for each in play((*start(), phase))} == {"low"}


def test_a_process_that_was_stopped_long_before_proves_nothing() -> None:
    """The others have worked since."""
    stopped = Phase(10 * MINUTE, (NOTHING, *alike(TRAIN, 3)), WORKS, event="stopped 0")
    assert {each.confidence for each in play((*start(), stopped, wait(30)))} == {"medium"}


def test_a_member_that_ended_long_before_proves_nothing() -> None:
    """Another program may have run on that GPU."""
    ended = Phase(10 * MINUTE, (NOTHING, *alike(TRAIN, 3)), WORKS, event="gone 0")
    said = play((*start(), ended, wait(30)))
    assert {each.confidence for each in said} == {"medium"}


@pytest.mark.parametrize(("cores", "is_named"), [(31.0, False), (11.5, False), (10.0, True)])
def test_cpu_of_the_whole_cgroup_is_progress_where_its_processes_are_not_visible(cores: float, is_named: bool) -> None:
    """Rank 0 tokenizes, and three ranks spin with up to three cores each, and two beside them."""
    said = play((*start(), wait(100, host=BLIND, cores=cores)), visible=False)
    assert (named(said, 2) is not None) == is_named


def test_where_its_processes_are_visible_those_that_spin_may_use_any_cpu() -> None:
    said = play((*start(), wait(30, cores=31.0)))
    assert named(said, 2) is not None


WAITED = {
    "never": [],
    "once": [25],
    "three times": [25] * 3,
    "growing": [16, 40, 100, 250],
    "by restart": [25] * 6,
}


@pytest.mark.parametrize("name", WAITED)
def test_a_job_cannot_hide(name: str) -> None:
    """The delay that a job gains by waits on purpose is bounded by what it has waited before."""
    lengths = WAITED[name]
    restarts = name == "by restart"
    waits = [each for minutes in lengths for each in (wait(minutes), work(event="restart" if restarts else ""))]
    said = play((*start(), *waits, Phase(13 * HOUR, (CONTEXT, *alike(SPIN, 3)), HANGS)))
    at = named(said, 2 + len(waits))
    learned = 0.0 if restarts or len(lengths) < 3 else max(lengths)
    print(f"{name}: named after {at} s")
    assert at == pytest.approx(MINUTE * max(15, min(720, 3 * learned)), abs=90)


@pytest.mark.parametrize(("level", "confidence"), [("hang", "low"), ("hang-polls", "medium")])
def test_a_single_gpu_takes_part_in_a_collective_only_if_it_polls_over_a_network(level: str, confidence: str) -> None:
    spin = LEVELS["H100", level]
    phases = Phase(120, (NOTHING,), WORKS), Phase(HOUR, (TRAIN,), WORKS), Phase(HOUR, (spin,), HANGS)
    assert {each.confidence for each in play(phases)} == {confidence}
