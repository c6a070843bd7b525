"""Every case that looks like a stall or hides one, with its verdict: docs/stalls.md lists the most important.

Levels are published ones (devices/levels.py). The host is read every 30 s where the case does not say otherwise.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from tests.testbed.spins import BLIND, HOST_S, QUIET, Host, Stage, Trace, first_stall, strongest

from gpu_exporter.agent.devices.levels import LEVELS, Level
from gpu_exporter.common.model.holders import HolderKey

HOUR, QUARTER = 3600.0, 900.0
AT_ONCE = QUARTER + 120.0  # a stall is named within two minutes after the fifteen
STEPS, SILENT = Host(steps=3), Host(steps=0)
SAVING = Host(loaders=0.3, disk=2e8)


class Case(NamedTuple):
    """`verdict`: the highest confidence in the last stage. `why`: a part of what ended the run, or of the doubts."""

    model: str
    stages: tuple[Stage, ...]
    verdict: str
    why: str = ""


def work(model: str, hours: float = 1.0) -> tuple[Stage, ...]:
    rest = "rest" if (model, "rest") in LEVELS else "hang"
    return (
        Stage(120, rest)._replace(level=LEVELS[model, rest]._replace(utilization=0.0)),
        Stage(hours * HOUR, "train"),
    )


def stepping(model: str) -> tuple[Stage, ...]:
    """Work whose training loop reports its steps; the last minutes look idle to power, so that the host is read."""
    return (*work(model), Stage(60, "hang", STEPS))


CASES = {
    "hang-after-work": Case("H100", (*work("H100"), Stage(HOUR, "hang")), "medium"),
    "hang-at-152-watts": Case("H100", (*work("H100"), Stage(HOUR, "hang-152")), "medium"),
    "hang-over-a-network": Case("H100", (*work("H100"), Stage(HOUR, LEVELS["H100", "hang-polls"])), "medium"),
    "hang-over-a-network-of-few-channels": Case("H100", (*work("H100"), Stage(HOUR, LEVELS["H100", "hang-two-sms"])), "medium"),
    "hang-over-a-network-without-gpm": Case("A100", (*work("A100"), Stage(HOUR, Level(1.0, 80, 1, pcie=1.2e8))), "none", "MB/s over PCIe"),
    "collective-that-moves-data": Case("H100", (*work("H100"), Stage(HOUR, LEVELS["H100", "hang-polls"]._replace(pcie=1.8e9))), "none", "MB/s over PCIe"),
    "two-blocks-without-polling": Case("H100", (*work("H100"), Stage(HOUR, LEVELS["H100", "hang-two-sms"]._replace(pcie=1e6))), "none", "W is above"),
    "one-block-that-polls": Case("H100", (*work("H100"), Stage(HOUR, LEVELS["H100", "hang-two-sms"]._replace(sm=0.0076))), "none", "MB/s over PCIe"),
    "hang-without-gpm": Case("A100", (*work("A100"), Stage(HOUR, "hang")), "medium", "the power of the GPU"),
    "hang-of-a-v100": Case("V100", (*work("V100"), Stage(HOUR, "hang")), "none", "W is above"),
    "hang-of-a-small-board": Case("T4", (*work("T4"), Stage(HOUR, "hang")), "none", "limit is 70 W"),
    "hang-with-an-unknown-host": Case("H100", (*work("H100"), Stage(HOUR, "hang", BLIND)), "medium", "not known"),
    "hang-without-gpm-on-the-hosts-network": Case(
        "A100", (*work("A100"), Stage(HOUR, "hang", Host(network=None))), "low", "not known: network"
    ),
    "its-loop-makes-steps": Case("A100", (*work("A100"), Stage(HOUR, "hang", STEPS)), "none", "made 3 steps"),
    "its-loop-stops-with-the-hang": Case("A100", (*stepping("A100"), Stage(HOUR, "hang", SILENT)), "medium"),
    "its-loop-ends-and-one-block-follows": Case("H100", (*stepping("H100"), Stage(72 * HOUR, "integer", SILENT)), "low", "look the same"),
    "its-loop-had-stopped-long-before": Case("A100", (*work("A100"), Stage(HOUR, "hang", SILENT)), "medium", "the power of the GPU"),
    "its-loop-is-not-read-any-more": Case("A100", (*stepping("A100"), Stage(HOUR, "hang")), "medium", "the power of the GPU"),
    "low-power-that-wobbles": Case("A100", (*work("A100"), Stage(4 * HOUR, LEVELS["A100", "llm-100"]._replace(pcie=1e7))), "none", "W is above"),
    "start-of-the-exporter-under-250-watts": Case("H100", (Stage(4 * HOUR, "steady-250"),), "none"),
    "start-of-the-exporter-under-a-hang": Case("H100", (Stage(4 * HOUR, "hang"),), "none", "since its start"),
    "saves-a-checkpoint": Case("H100", (*work("H100"), Stage(1500, "hang", SAVING)), "none", "other processes"),
    "saves-over-the-hosts-network": Case("A100", (*work("A100"), Stage(1500, "hang", Host(network=None))), "low"),
    "zero3-over-pcie": Case("A100", (*work("A100"), Stage(4 * HOUR, "zero3")), "none", "MB/s over PCIe"),
    "evaluates-after-training": Case("H100", (*work("H100"), Stage(4 * HOUR, "evaluate")), "none"),
    "decodes": Case("H100", (*work("H100"), Stage(4 * HOUR, "decode")), "none"),
    "small-kernels": Case("H100", (*work("H100"), Stage(72 * HOUR, "small-kernel")), "none", "active"),
    "one-block-for-three-days": Case("H100", (Stage(120, "rest"), Stage(6 * HOUR, "one-block")), "none", "active"),
    "integers-from-the-start": Case("H100", (Stage(120, "rest"), Stage(72 * HOUR, "integer")), "low", "look the same"),
    "hung-at-its-start": Case("H100", (Stage(120, "rest"), Stage(HOUR, "hang")), "medium"),
    "hung-at-its-start-without-gpm": Case("A100", (Stage(120, "rest"), Stage(HOUR, "hang")), "low", "at work"),
    "hang-under-a-power-cap": Case(
        "H100",
        (Stage(120, "rest", cap_w=300.0), Stage(HOUR, "train", cap_w=300.0), Stage(HOUR, "hang", cap_w=300.0)),
        "medium",
    ),
    "changes-its-power": Case("H100", (*work("H100"), Stage(HOUR, LEVELS["H100", "hang"]._replace(wobble_w=10))), "none", "the power changes"),
    "changes-its-power-without-gpm": Case("A100", (*work("A100"), Stage(HOUR, Level(1.0, 70, 7))), "none", "the power changes"),
    "pauses-for-a-moment": Case("H100", (*work("H100"), Stage(HOUR, LEVELS["H100", "hang"]._replace(utilization=0.97))), "none", "over a minute"),
    "changes-its-sms": Case("H100", (*work("H100"), *(Stage(100, LEVELS["H100", "hang"]._replace(sm=sm)) for sm in (0.06, 0.12) * 9)), "none", "SM activity changes"),
    "few-sms-at-200-watts": Case("H100", (*work("H100"), Stage(HOUR, Level(1.0, 200, 1, 0.01))), "none", "W is above"),
    "few-sms-at-100-watts-after-work": Case("H100", (*work("H100"), Stage(HOUR, Level(1.0, 100, 1, 0.01))), "low", "1.0% of the SMs"),
    "one-block-after-work": Case("H100", (*work("H100"), Stage(HOUR, "one-block")), "none", "active"),
    "integers-after-work": Case("H100", (*work("H100"), Stage(HOUR, "integer")), "low", "0.8% of the SMs"),
    "pipes-of-few-sms": Case("H100", (*work("H100"), Stage(HOUR, Level(1.0, 122, 0.5, 0.05, fp64=0.005))), "none", "0.50% active"),
    "memory-of-few-sms": Case("H100", (*work("H100"), Stage(HOUR, Level(1.0, 122, 0.5, 0.05, dram=0.0006))), "none", "active"),
    "hang-with-a-trace-of-arithmetic": Case("H100", (*work("H100"), Stage(HOUR, Level(1.0, 122, 0.5, 0.1212, fp64=5e-6))), "medium", "waits or hangs"),
    "hang-with-silent-gpm": Case("H100", (*work("H100"), Stage(HOUR, Level(1.0, 100, 1, 0.0))), "medium", "the power of the GPU"),
    "less-than-half-of-little-work": Case("A100", (Stage(120, "context"), Stage(HOUR, Level(1.0, 172, 9)), Stage(HOUR, Level(1.0, 88, 1))), "none", "W is above"),
    "little-work-without-the-half": Case("A100", (Stage(120, "context"), Stage(HOUR, Level(1.0, 230, 9)), Stage(HOUR, Level(1.0, 82, 1))), "medium"),
    "mean-power-above-the-reading": Case("A100", (*work("A100"), Stage(HOUR, Level(1.0, 120, 1), reading_w=60.0)), "none", "W is above"),
    "a-witness-is-no-longer-read": Case("H100", (*work("H100"), Stage(300, "hang"), Stage(HOUR, "hang", hidden=frozenset(("pcie",)))), "none", "PCIe was known before"),
    "the-host-is-no-longer-read": Case("H100", (*work("H100"), Stage(300, "hang"), Stage(HOUR, "hang", BLIND)), "none", "was known before"),
    "integers-on-all-sms": Case("H100", (Stage(120, "rest"), Stage(HOUR, Level(1.0, 220, 1, 1.0))), "none", "W is above"),
    "power-is-read-now-and-then": Case("A100", (*work("A100"), *(Stage(5, Level(1.0, 150, 7), reading_w=70.0, hidden=frozenset(("power_w",) if i % 2 else ())) for i in range(400))), "none"),
    "seen-at-rest-with-a-context-only": Case("H100", (Stage(120, "context"), Stage(HOUR, "train"), Stage(HOUR, Level(1.0, 150, 1, 0.0076))), "none", "W is above"),
    "hang-under-locked-clocks": Case("H100", (Stage(120, "rest"), Stage(HOUR, Level(1.0, 300, 10, 0.8, 0.4)), Stage(HOUR, Level(1.0, 90, 1, 0.12))), "medium"),
    "compiles": Case("H100", (*work("H100"), Stage(HOUR, "hang", Host(loaders=0.9))), "none", "other processes"),
    "starts-a-process": Case("H100", (*work("H100"), Stage(800, "hang"), Stage(60, "hang", Host(new_process=True)), Stage(800, "hang")), "none"),
    "memory-grows": Case("H100", (*work("H100"), *(Stage(300, "hang", memory=40 + i) for i in range(12))), "none"),
    "without-a-process": Case("H100", (*work("H100"), Stage(HOUR, "hang", without_process=True)), "none", "without a process"),
    "draws-after-work": Case("H100", (*work("H100"), Stage(HOUR, Level(1.0, 128, 0, 0.03), draws=True)), "none", "graphics"),
    "hangs-as-if-it-drew": Case("H100", (*work("H100"), Stage(HOUR, Level(1.0, 128, 0, 0.03))), "medium"),
    "draws-for-a-moment-in-a-hang": Case("H100", (*work("H100"), Stage(800, "hang"), Stage(5, "hang", draws=True), Stage(850, "hang")), "none"),
    "trains-on-gb200": Case("GB200", (*work("GB200"), Stage(4 * HOUR, "train")), "none", "active"),
    "tunes-on-b300": Case("B300", (Stage(120, "rest"), Stage(4 * HOUR, "tune")), "none", "active"),
    "decodes-under-a-power-brake": Case("GB300", (Stage(120, "rest"), Stage(4 * HOUR, Level(1.0, 240, 5))), "low", "has not seen the holder at work"),
    "counter-that-is-stuck": Case("H100", (*work("H100"), Stage(HOUR, "hang", contradiction="the counter is stuck")), "none", "stuck"),
    "sleeps-in-its-collective": Case("H100", (*work("H100"), Stage(HOUR, "context")), "none", ""),
    "gap-of-61-seconds": Case("H100", (*work("H100"), Stage(800, "hang"), Stage(66, "hang", lost=True), Stage(850, "hang")), "none"),
    "gap-of-30-seconds": Case("H100", (*work("H100"), Stage(800, "hang"), Stage(30, "hang", lost=True), Stage(300, "hang")), "medium"),
    "no-energy-counter": Case("H100", tuple(stage._replace(hidden=frozenset(("power_w",))) for stage in (*work("H100"), Stage(HOUR, "hang"))), "none", "energy counter"),
}  # fmt: skip


LONG = [name for name, case in CASES.items() if sum(stage.seconds for stage in case.stages) > 24 * HOUR]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in CASES])
@pytest.mark.parametrize("seed", range(3))
def test_a_case_gets_its_verdict(name: str, seed: int) -> None:
    case = CASES[name]
    trace = Trace(case.model, seed=seed)
    early = trace.play(*case.stages[:-1])
    assert strongest(early) == "none", "work before it is not accused"
    reports = trace.play(case.stages[-1])
    assert strongest(reports) == case.verdict
    assert any(case.why in f"{spin.against} {spin.unknown}" for _, spin in reports)
    if case.verdict == "medium" and case.stages[-1].seconds >= HOUR:
        at = first_stall(reports)
        assert at is not None and QUARTER <= at <= AT_ONCE


def test_a_change_of_the_power_limit_begins_the_run_again() -> None:
    trace = Trace("H100")
    trace.play(*work("H100"), Stage(800, "hang"))
    assert first_stall(trace.play(Stage(850, "hang", cap_w=500.0))) is None
    assert first_stall(trace.play(Stage(200, "hang", cap_w=500.0))) is not None


def test_progress_ends_a_stall_at_once() -> None:
    trace = Trace("H100")
    trace.play(*work("H100"), Stage(HOUR, "hang"))
    assert trace.report().is_stall
    trace.play(Stage(15, "train"))
    assert trace.report().run_s == 0.0
    trace.play(Stage(300, "train"))
    trace.play(Stage(1800, "hang"))
    assert trace.report().is_stall
    trace.play(Stage(45, "hang", Host(disk=5e6)))
    assert "MB/s over its disk" in trace.report().against


def test_a_short_restart_continues_a_run_and_a_long_one_begins_none() -> None:
    trace = Trace("A100")
    trace.play(*work("A100"), Stage(600, "hang"))
    trace.restart(20.0)
    reports = trace.play(Stage(600, "hang"))
    at = first_stall(reports)
    assert at is not None and 280 < at < 420, "the run goes on where it was"
    assert strongest(reports) == "medium"
    trace.restart(90.0)
    assert first_stall(trace.play(Stage(6 * HOUR, "hang"))) is None, "this process has seen nothing else"
    trace.play(Stage(1200, "train"), Stage(1100, "hang"))
    assert trace.report().is_stall


def test_a_serving_process_that_spins_is_found_like_any_other() -> None:
    """Only the reconciler knows the class of a holder: it calls this spinning."""
    trace = Trace("H100")
    assert first_stall(trace.play(*work("H100"), Stage(HOUR, "hang", QUIET))) is not None


def test_work_at_high_power_is_no_run_for_a_moment() -> None:
    """Otherwise the busy counter of every healthy holder would lag."""
    trace = Trace("A100")
    trace.play(Stage(120, "rest"))
    assert all(spin.run_s == 0.0 for _, spin in trace.play(Stage(600, "steady-150")))


def test_a_restart_after_a_minute_shows_no_stall_before_it_has_read_the_utilization() -> None:
    trace = Trace("H100")
    trace.play(*work("H100"), Stage(HOUR, "hang"))
    trace.restart(90.0)
    assert strongest(trace.play(Stage(30, "hang", hidden=frozenset(("utilization",))))) == "none"


def test_a_restart_does_not_make_a_witness_known_that_was_not() -> None:
    trace = Trace("A100")
    trace.play(*work("A100"), Stage(600, "hang", BLIND))
    trace.restart(20.0)
    assert strongest(trace.play(Stage(1200, "hang", QUIET))) == "low"


def test_a_holder_that_is_gone_is_not_watched_and_the_next_one_has_its_own_work() -> None:
    trace = Trace("A100")
    trace.play(*work("A100"), Stage(1200, "hang"))
    assert trace.report().is_stall
    trace.hold_another()
    assert strongest(trace.play(Stage(1200, "hang"))) == "low", "it never worked"


def test_a_doubt_about_the_holder_begins_the_run_again() -> None:
    trace = Trace("H100")
    trace.play(*work("H100"), Stage(800, "hang"))
    trace.doubt()
    assert first_stall(trace.play(Stage(850, "hang"))) is None
    assert first_stall(trace.play(Stage(200, "hang"))) is not None


def test_what_another_holder_did_ends_no_run() -> None:
    """The look at its host may end after the next job began on the GPU."""
    trace = Trace("H100")
    trace.play(*work("H100"), Stage(1000, "hang"))
    trace.hear_of(HolderKey("slurm", "6"), SAVING)
    assert trace.report().is_stall
    trace.hear_of(trace.key, SAVING)
    assert not trace.report().is_stall


def test_after_a_restart_no_run_becomes_a_stall_before_every_witness_was_read_again() -> None:
    trace = Trace("A100")
    trace.play(*work("A100"), Stage(885, "hang"))
    trace.restart(20.0)
    reports = trace.play(Stage(40, "hang"))
    assert first_stall(reports) == HOST_S, "the utilization of 15 s is enough, but the host is read later"


def test_after_a_restart_a_witness_must_be_read_again() -> None:
    trace = Trace("H100")
    trace.play(*work("H100"), Stage(600, "hang"))
    trace.restart(20.0)
    assert strongest(trace.play(Stage(1200, "hang", BLIND))) == "none"


def test_after_a_restart_the_memory_must_still_be_the_same() -> None:
    trace = Trace("A100")
    trace.play(*work("A100"), Stage(800, "hang"))
    trace.restart(20.0)
    assert first_stall(trace.play(Stage(600, "hang", memory=50.0))) is None


def test_a_run_ends_when_the_utilization_cannot_be_read() -> None:
    trace = Trace("H100")
    trace.play(*work("H100"), Stage(1000, "hang"))
    assert trace.report().is_stall
    trace.play(Stage(70, "hang", hidden=frozenset(("utilization",))))
    assert trace.report().run_s == 0.0


def test_a_start_under_a_hang_is_unknown_and_not_work() -> None:
    trace = Trace("H100")
    trace.play(Stage(600, "hang"))
    assert trace.report().unknown == "since its start, the exporter has only seen this GPU fully busy at low power"
    assert not trace.report().is_below


def test_a_gpu_that_cannot_be_watched_but_is_not_full_is_no_stall() -> None:
    trace = Trace("T4")
    trace.play(Stage(60, "train"))
    assert (trace.report().unknown != "", trace.report().is_below) == (True, False)
    trace.play(Stage(60, Level(0.9, 60)))
    assert (trace.report().unknown != "", trace.report().is_below) == (True, True)


def test_a_restart_does_not_make_two_blocks_a_collective() -> None:
    """Their traffic over PCIe is unknown, so nothing shows that they poll."""
    trace = Trace("H100")
    blind = frozenset(("pcie",))
    trace.play(Stage(120, "rest", hidden=blind))
    trace.play(Stage(HOUR, Level(1.0, 90, 0.5, 0.0152), hidden=blind))
    assert trace.report().confidence == "low"
    trace.restart(20.0)
    reports = trace.play(Stage(HOUR, Level(1.0, 90, 0.5, 0.0152), hidden=blind))
    assert max(spin.run_s for _, spin in reports) > HOUR, "the run goes on"
    assert strongest(reports) == "low"


def test_a_stall_of_two_channels_goes_on_over_a_restart() -> None:
    trace = Trace("H100")
    trace.play(*work("H100"), Stage(HOUR, "hang-two-sms"))
    assert trace.report().confidence == "medium"
    trace.restart(20.0)
    reports = trace.play(Stage(600, "hang-two-sms"))
    assert {spin.confidence for _, spin in reports} == {"medium"}


def test_after_a_restart_the_first_window_of_gpm_may_be_missing() -> None:
    trace = Trace("H100")
    trace.play(*work("H100"), Stage(600, "hang-152"))
    trace.restart(20.0)
    reports = trace.play(Stage(10, "hang-152", hidden=frozenset(("sm", "pipes"))), Stage(500, "hang-152"))
    assert strongest(reports) == "medium"


def test_gpm_windows_may_be_missing_now_and_then() -> None:
    trace = Trace("H100")
    trace.play(*work("H100"))
    missing = frozenset(("sm", "pipes"))
    stages = (Stage(5, "hang-152", hidden=missing if i % 7 == 0 else frozenset()) for i in range(200))
    assert strongest(trace.play(*stages)) == "medium"


def test_power_that_is_known_half_of_the_time_is_not_called_flat() -> None:
    trace = Trace("A100")
    trace.play(*work("A100"))
    missing = frozenset(("power_w",))
    stages = (Stage(20, "hang", hidden=missing if i % 2 else frozenset()) for i in range(60))
    assert strongest(trace.play(*stages)) == "low"
    assert trace.report().run_s > QUARTER, "the run itself goes on"


def test_readings_of_fifteen_seconds_are_enough() -> None:
    trace = Trace("H100", step_s=15.0)
    trace.play(*work("H100"))
    assert first_stall(trace.play(Stage(HOUR, "hang"))) is not None


def test_a_stall_ends_when_the_gpu_is_divided_into_mig_instances() -> None:
    trace = Trace("H100")
    trace.play(*work("H100"), Stage(1000, "hang"))
    assert trace.report().is_stall
    trace.enable_mig()
    trace.play(Stage(10, "hang"))
    assert (trace.report().run_s, trace.report().unknown) == (0.0, "the GPU is divided into MIG instances")


def test_a_loop_that_ended_long_before_the_run_says_nothing_of_it() -> None:
    """The exporter reads reports also while a GPU works."""
    trace = Trace("A100")
    trace.play(*work("A100"))
    for steps in (5, 0):
        trace.hear_of(trace.key, Host(None, None, None, None, steps))
    trace.play(Stage(HOUR, "train"))
    assert strongest(trace.play(Stage(HOUR, "hang", SILENT))) == "medium"
