"""The replay of a policy on lives whose truth is known: the same as the reconciler's cycle of every minute."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.config.rules import Match, PolicyRule
from gpu_exporter.reconciler.decision.policy import LABELLED
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reports.backtest.lives import LEFT, LOST, OPEN, UNSEEN, WORK, HolderLife, IdleRun, PastGang, Tenure
from gpu_exporter.reports.backtest.replay import Replayed, Replayer
from gpu_exporter.reports.backtest.sums import Figures, Sums, measure

MINUTE = 60.0
T0 = 1_700_000_040.0  # a full minute
BOOKS = (
    Rulebook(Policy()),
    Rulebook(Policy(candidate_after=1800.0, underused_after=1800.0, startup_grace=0.0)),
    Rulebook(
        Policy(),
        [
            PolicyRule("short", Match(owner_kinds=("Job",)), (("candidate_after", 900.0), ("underused_after", 2700.0))),
            PolicyRule("warned", Match(namespaces=("warned",)), ceiling="candidate"),
        ],
    ),
)


def tenure(*parts: tuple[str, float], start: float = 0.0, uuid: str = "GPU-1", ended: str = LEFT) -> Tenure:
    """A unit whose holder was idle, at work or unseen for so many minutes each."""
    at = T0 + start * MINUTE
    begin, runs, gaps, host = at, list[IdleRun](), list[tuple[float, float]](), list[tuple[float, float]]()
    for number, (kind, minutes) in enumerate(parts):
        end = at + minutes * MINUTE
        after = parts[number + 1][0] if number + 1 < len(parts) else ""
        if kind in ("idle", "host"):
            runs.append(IdleRun(at, end, {"": ended, "gap": UNSEEN}.get(after, WORK)))
        if kind == "gap":
            gaps.append((at, end))
        if kind == "host":
            host.append((at, min(end, at + 20 * MINUTE)))
        at = end
    of = (tuple(runs),) * 3
    return Tenure("n1", uuid, "", "H100", begin, at, ended, of, gaps=tuple(gaps), host_work=tuple(host))


def pod(name: str, *tenures: Tenure, held: int | None = None, namespace: str = "ml") -> HolderLife:
    return HolderLife("", HolderName("kubernetes", namespace, name), list(tenures), held=held)


def each_minute(judge: Replayer, gang: PastGang) -> dict[float, dict[HolderName, str]]:
    """The marks of every minute, as the cycle of the reconciler decides."""
    before: dict[HolderName, str] = {}
    found = {}
    wall, end = min(each.start for each in gang.lives), max(each.end for each in gang.lives)
    while wall <= end:
        judge.stages(gang, wall, before)
        found[wall] = {name: stage for name, stage in before.items() if stage in LABELLED}
        wall += MINUTE
    return found


def at_events(judge: Replayer, gang: PastGang, walls: Sequence[float]) -> dict[float, dict[HolderName, str]]:
    """The marks of these times, decided at the events alone."""
    before: dict[HolderName, str] = {}
    found: dict[float, dict[HolderName, str]] = {}
    events = list(judge.moments(gang))
    for wall in walls:
        while events and events[0] <= wall:
            judge.stages(gang, events.pop(0), before)
        found[wall] = {name: stage for name, stage in before.items() if stage in LABELLED}
    return found


IDLE = ("idle", "host")
PARTS = st.lists(
    st.tuples(
        st.sampled_from(("idle", "idle", "host", "work", "gap")),
        st.sampled_from((1, 5, 15, 30, 45, 61, 90, 130, 250, 400)),
    ),
    min_size=1,
    max_size=7,
).map(lambda parts: [part for n, part in enumerate(parts) if not n or (parts[n - 1][0] in IDLE) != (part[0] in IDLE)])


@st.composite
def gangs(draw: st.DrawFn) -> PastGang:
    lives = []
    for number in range(draw(st.integers(1, 3))):
        units = [
            tenure(*draw(PARTS), start=draw(st.sampled_from((0, 0, 7, 40))), uuid=f"GPU-{number}-{unit}")
            for unit in range(draw(st.integers(1, 2)))
        ]
        held = draw(st.sampled_from((None, len(units), len(units) + 1)))
        lives.append(pod(f"train-{number}", *units, held=held, namespace=draw(st.sampled_from(("ml", "warned")))))
    kind = draw(st.sampled_from(("Job", "StatefulSet")))
    title = f"{kind}/train" if len(lives) > 1 else ""
    return PastGang(lives, title, (kind,), draw(st.sampled_from(("batch", "interactive", "unclear"))))


@settings(max_examples=150, deadline=None)
@given(gangs(), st.sampled_from(BOOKS))
def test_events_find_the_marks_of_every_minute(gang: PastGang, book: Rulebook) -> None:
    judge = Replayer(book, 1)
    minutes = each_minute(judge, gang)
    events = at_events(judge, gang, list(minutes))
    assert events == minutes


def decisions(
    *lives: HolderLife, book: Rulebook = BOOKS[0], kind: str = "", starts: Sequence[float] = ()
) -> list[Replayed]:
    title = f"{kind}/train" if len(lives) > 1 else ""
    return Replayer(book, 1).replay(PastGang(list(lives), title, (kind,) if kind else (), starts=starts)).decisions


def one_fate(*parts: tuple[str, float], ended: str = LEFT, starts: Sequence[float] = ()) -> tuple[str, float | None]:
    (found,) = decisions(pod("a", tenure(*parts, ended=ended)), starts=starts)
    assert found.wall == T0 + (30 + 120) * MINUTE
    return found.fate, found.back_s


@pytest.mark.parametrize(
    ("parts", "fate"),
    [
        ((("work", 30), ("idle", 150), ("work", 5)), ("returned", 30 * MINUTE)),
        ((("work", 30), ("idle", 180), ("work", 5)), ("returned", 60 * MINUTE)),
        ((("work", 30), ("idle", 181), ("work", 5)), ("later", 61 * MINUTE)),
        ((("work", 30), ("idle", 200)), ("idle", None)),
        ((("work", 30), ("idle", 150)), ("ended", None)),
        ((("work", 30), ("idle", 150), ("gap", 20), ("idle", 20)), ("unknown", None)),
        (
            (("work", 30), ("idle", 150), ("gap", 5), ("work", 20)),
            ("returned", 35 * MINUTE),
        ),  # it worked within the hour
        ((("work", 30), ("idle", 150), ("gap", 90), ("work", 20)), ("unknown", 120 * MINUTE)),
        ((("work", 30), ("idle", 190), ("gap", 90), ("idle", 20)), ("idle", None)),
    ],
)
def test_the_fate_of_a_decision(parts: tuple[tuple[str, float], ...], fate: tuple[str, float | None]) -> None:
    assert one_fate(*parts) == fate


def test_a_gap_that_may_hide_work_proves_no_end_without_work() -> None:
    """Neither after the hour, which was seen, nor within it, nor at the end of what was seen."""
    idle = (("work", 30.0), ("idle", 190.0))
    figures = Figures()
    for parts, ended in (
        (idle, LEFT),
        ((*idle, ("work", 5.0)), LEFT),
        ((*idle, ("gap", 90.0), ("idle", 20.0)), LEFT),
        ((*idle[:1], ("idle", 150.0), ("gap", 20.0), ("idle", 20.0)), LEFT),
        (idle, UNSEEN),
        (idle, LOST),
    ):
        (found,) = decisions(pod("a", tenure(*parts, ended=ended)))
        figures.add(measure(found, lambda _model, _cluster: None))
    assert (figures.decisions, figures.ever) == (6, 0.5)
    assert figures.sure_hours == pytest.approx(70 / 60)


def test_preemptions_lost_nodes_and_the_end_of_the_history_are_told_apart() -> None:
    parts = (("work", 30.0), ("idle", 150.0))
    end = T0 + 180 * MINUTE
    assert one_fate(*parts, ended=LOST) == ("lost", None)
    assert one_fate(*parts, ended=UNSEEN) == ("unknown", None)
    assert one_fate(*parts, ended=OPEN) == ("open", None)
    assert one_fate(*parts, starts=(T0, end + 5 * MINUTE)) == ("taken", None)
    assert one_fate(*parts, starts=(T0, end + 61 * MINUTE)) == ("ended", None)


def test_a_gang_is_one_decision_and_waits_for_its_last_member() -> None:
    early = pod("a", tenure(("work", 10), ("idle", 400), ("work", 9)))
    late = pod("b", tenure(("work", 100), ("idle", 310), ("work", 9), uuid="GPU-2"))
    (found,) = decisions(early, late, kind="Job")
    assert found.wall == T0 + 220 * MINUTE and len(found.lives) == 2
    assert len(decisions(early, kind="ReplicaSet") + decisions(late, kind="ReplicaSet")) == 2


def test_a_holder_that_worked_again_is_another_decision_after_twice_its_gap() -> None:
    found = decisions(pod("a", tenure(("work", 40), ("idle", 150), ("work", 5), ("idle", 400), ("work", 1))))
    assert [(each.wall - T0) / MINUTE for each in found] == [160, 195 + 300]


def test_a_ceiling_warns_and_decides_nothing() -> None:
    life = pod("a", tenure(("work", 40), ("idle", 400)), namespace="warned")
    found = Replayer(BOOKS[2], 1).replay(PastGang([life]))
    assert found.decisions == [] and [(wall - T0) / MINUTE for wall in found.warned] == [100]
    assert set(found.spared.values()) == {"capped"}


def test_a_pod_whose_scheduler_gave_it_more_than_is_seen_is_not_idle() -> None:
    life = pod("a", tenure(("work", 40), ("idle", 400)), held=2)
    found = Replayer(BOOKS[0], 1).replay(PastGang([life]))
    assert found.decisions == [] and found.warned == []


def test_doubts_hold_a_holder_at_candidate_until_they_are_trusted() -> None:
    unit = tenure(("work", 40), ("idle", 400))
    unit.doubts = ((unit.start + 60 * MINUTE, unit.start + 70 * MINUTE),)
    gang = PastGang([pod("a", unit)])
    assert Replayer(BOOKS[0], 1).replay(gang).decisions == []
    assert len(Replayer(BOOKS[0], 1, is_trusted=True).replay(gang).decisions) == 1


def test_a_burst_would_have_delayed_marks_and_changes_no_decision() -> None:
    """Twelve pods become idle together, one an hour later."""
    parts = (("work", 40.0), ("idle", 400.0), ("work", 1.0))
    together = [PastGang([pod(f"a{n}", tenure(*parts, uuid=f"GPU-{n}"))]) for n in range(12)]
    alone = PastGang([pod("b", tenure(("work", 140), ("idle", 300), ("work", 1), uuid="GPU-b"))])
    tally = Sums([*together, alone], T0, lambda _model, _cluster: None).tally(BOOKS[0], 1)
    assert tally.total.decisions == 13 and tally.braked.decisions == 12 and tally.limited == 0
    few = Rulebook(Policy(new_marks_hour_max=5))
    assert Sums(together, T0, lambda _model, _cluster: None).tally(few, 1).limited == 7
