"""What must hold for any history: missing data, more progress and a restart never move a holder toward a stall."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.testbed.spins import BLIND, QUIET, Host, Stage, Trace, first_stall, strongest

from gpu_exporter.agent.devices.levels import LEVELS, Level

ORDER = ("none", "low", "medium", "high")
VALUES = ("power_w", "limit_w", "memory_bytes", "pcie", "nvlink", "sm", "pipes", "utilization")
BEFORE = {"H100": (Stage(120, "rest"), Stage(1200, "train")), "A100": (Stage(120, "rest"), Stage(1200, "train"))}
MODELS = st.sampled_from(sorted(BEFORE))
SEEDS = st.integers(0, 4)  # of a board's own error and noise
RUN_S = 1300.0
NEVER = float("inf")
LEVEL_OF = {model: sorted(name for of, name in LEVELS if of == model) for model in BEFORE}


@cache
def outcome(model: str, seed: int, *stages: Stage) -> tuple[int, float]:
    """The highest confidence, and when the stall was first reported."""
    trace = Trace(model, seed=seed)
    trace.play(*BEFORE[model])
    reports = trace.play(*stages)
    at = first_stall(reports)
    return ORDER.index(strongest(reports)), NEVER if at is None else at


@settings(max_examples=60, deadline=None)
@given(MODELS, SEEDS, st.sets(st.sampled_from(VALUES), min_size=1), st.sampled_from([QUIET, BLIND]))
def test_values_that_are_never_read_lower_the_confidence_or_leave_it(
    model: str, seed: int, hidden: set[str], host: Host
) -> None:
    full = outcome(model, seed, Stage(RUN_S, "hang", host))
    less = outcome(model, seed, Stage(RUN_S, "hang", host, hidden=frozenset(hidden)))
    assert less[0] <= full[0] and less[1] >= full[1]


@settings(max_examples=60, deadline=None)
@given(
    MODELS,
    SEEDS,
    st.sets(st.sampled_from(VALUES), min_size=1),
    st.floats(0.0, RUN_S - 10),
    st.floats(10.0, 400.0),
    st.booleans(),
)
def test_values_that_go_missing_for_a_while_never_bring_a_stall_nearer(
    model: str, seed: int, hidden: set[str], start: float, length: float, lost: bool
) -> None:
    full = outcome(model, seed, Stage(RUN_S, "hang"))
    rest_s = max(0.0, RUN_S - start - length)
    part = Stage(length, "hang", hidden=frozenset(hidden), lost=lost)
    less = outcome(model, seed, Stage(start, "hang"), part, Stage(rest_s, "hang"))
    assert less[0] <= full[0] and less[1] >= full[1]


@settings(max_examples=60, deadline=None)
@given(
    MODELS,
    SEEDS,
    st.floats(0.0, 0.2),
    st.floats(0.0, 300.0),
    st.floats(0.0, 3e8),
    st.floats(0.0, 3e8),
    st.floats(0.0, 0.2),
    st.floats(0.0, 0.3),
    st.floats(0.0, 5e6),
)
def test_less_utilization_more_power_and_more_progress_never_bring_a_stall_nearer(
    model: str, seed: int, idle: float, watts: float, pcie: float, nvlink: float, dram: float, cores: float, disk: float
) -> None:
    level = LEVELS[model, "hang"]
    more = Level(1.0 - idle, level.watts + watts, level.wobble_w, level.sm, pcie=pcie, nvlink=nvlink, dram=dram)
    full = outcome(model, seed, Stage(RUN_S, level))
    less = outcome(model, seed, Stage(RUN_S, more, Host(loaders=cores, disk=disk)))
    assert less[0] <= full[0] and less[1] >= full[1]


@settings(max_examples=60, deadline=None)
@given(MODELS, st.data(), SEEDS, st.floats(61.0, 5000.0))
def test_a_start_of_the_exporter_under_any_load_begins_no_run(
    model: str, data: st.DataObject, seed: int, away_s: float
) -> None:
    before, level = (data.draw(st.sampled_from(LEVEL_OF[model])) for _ in range(2))
    trace = Trace(model, seed=seed)
    trace.play(*BEFORE[model], Stage(data.draw(st.floats(0.0, 2000.0)), before))
    trace.restart(away_s)
    steady = LEVELS[model, level]._replace(wobble_w=0.0)
    reports = trace.play(Stage(3000.0, steady))
    assert first_stall(reports) is None
