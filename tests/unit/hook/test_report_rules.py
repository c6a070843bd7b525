"""One set of reports, and one answer: what the hook prints in the job is what the exporter publishes on the node."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.hook.fakes import FakeGpu, FakeOptimizer

from gpu_exporter.common import report_rules as exporters_rules
from gpu_exporter.common.model.training import TrainingPace
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.diagnosis.causes.inside import judge_phase
from gpu_exporter.diagnosis.causes.numbers import CauseRules
from gpu_exporter.diagnosis.training.files import TrainingFiles
from gpu_exporter.diagnosis.training.pace import NodeTraining
from gpu_exporter.diagnosis.training.reports import parse_report
from gpu_exporter_torch import observe, prometheus, report_rules
from gpu_exporter_torch.facts import LoopFacts
from gpu_exporter_torch.report_rules import (
    CPUS,
    FORMAT,
    KEYS,
    NUMBERS,
    PHASE_LEFT,
    PHASE_MIN,
    PHASES,
    STEP_HELP,
    STEP_METRIC,
    SWITCHES,
    TAKING,
    WAIT_MIN,
    WORDS,
    Loading,
    Workers,
    advise_phase,
    propose_workers,
)
from gpu_exporter_torch.summary import advise, find_late_rank, find_proposal, spent_time

WHO, UNITS = ("job", "42"), tuple(UnitId(f"GPU-{number}") for number in range(8))


def make_report(rank: int = 0, **other: Any) -> dict[str, Any]:
    report = {
        "format": FORMAT,
        "run": f"r{rank}",
        "rank": rank,
        "world_size": 2,
        "gpus": [f"GPU-{rank}"],
        "steps": 100,
        "measured_steps": 100,
        "step_seconds": 10.0,
        "wait_seconds": 0.5,
        "gpu_wait_seconds": None,
        "gpu_work_seconds": None,
        "phases": None,
        "facts": {},
        "epochs": 1,
        "start_seconds": 0.0,
    }
    return report | other


def publish(*reports: dict[str, Any]) -> TrainingPace:
    """What the exporter makes of these reports."""
    training = NodeTraining()
    parsed = tuple(parse_report(json.dumps(each).encode(), 1.0) for each in reports)
    training.note(WHO, TrainingFiles(1000.0, parsed))
    view = training.view(WHO, UNITS[reports[0]["rank"]], UNITS, 1000.0, 0.0)
    assert view is not None
    return view.pace


def test_a_wait_that_earlier_work_of_the_gpu_hides_makes_no_rank_late() -> None:
    """The loop of rank 1 waits in 40 % of its time, and its GPU has work meanwhile."""
    known = {"gpu_wait_seconds": 0.1, "gpu_work_seconds": 9.9}
    reports = [make_report(0, **known), make_report(1, wait_seconds=4.0, **known)]
    late = find_late_rank(reports)
    assert late is not None and (late.rank, late.share, late.text) == (None, 0.0, "")
    assert (publish(*reports).late, publish(*reports).late_share) == ("", 0.0)


def test_the_time_of_a_gpu_is_not_compared_with_that_of_a_loop() -> None:
    """A loop only launches a collective, and goes on: it is not the rank that waits least in it."""
    gpu = {"gpu_wait_seconds": 0.0, "gpu_work_seconds": 10.0}
    reports = [
        make_report(0, phases={"collective": {"seconds": 0.1, "gpu_seconds": 4.0}}, **gpu),
        make_report(1, phases={"collective": {"seconds": 0.1, "gpu_seconds": None}}),
    ]
    assert find_late_rank(reports) is None
    assert (publish(*reports).late, publish(*reports).late_share) == ("", None)


SECONDS = st.floats(0.0, 10.0, allow_nan=False)
UNKNOWN_OR_SECONDS = st.none() | SECONDS
PHASE = st.fixed_dictionaries({"seconds": UNKNOWN_OR_SECONDS, "gpu_seconds": UNKNOWN_OR_SECONDS})


@st.composite
def report_sets(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Reports of up to eight ranks: of one kind, as those of a training are, or each of another."""
    alike = draw(st.booleans())
    chosen = {"is_gpu": draw(st.booleans()), "has_collective": draw(st.booleans())}
    made = []
    for rank in draw(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True)):
        kind = chosen if alike else {name: draw(st.booleans()) for name in chosen}
        phases = draw(st.none() | st.dictionaries(st.sampled_from(PHASES), PHASE, max_size=4))
        if kind["has_collective"]:
            phases = {**(phases or {}), "collective": {"seconds": draw(SECONDS), "gpu_seconds": draw(SECONDS)}}
        step_s = draw(SECONDS)
        measured = draw(st.integers(0, 200))
        made.append(
            make_report(
                rank,
                world_size=8 if alike else draw(st.sampled_from((1, 2, 8))),
                steps=200,
                measured_steps=measured,
                step_seconds=step_s,
                wait_seconds=step_s * draw(st.floats(0.0, 1.0)),
                gpu_wait_seconds=draw(SECONDS) if kind["is_gpu"] else draw(st.sampled_from((None, 0.0))),
                gpu_work_seconds=draw(SECONDS) if kind["is_gpu"] else None,
                phases=phases,
            )
        )
    return made


@given(report_sets())
def test_the_hook_and_the_exporter_give_one_answer(reports: list[dict[str, Any]]) -> None:
    late, pace = find_late_rank(reports), publish(*reports)
    assert (pace.late, pace.late_share) == (("", None) if late is None else (late.text, late.share))
    for each in reports:
        spent, alone = spent_time(each), publish(each)
        if not spent.is_enough:
            assert (alone.step_s, alone.wait, alone.phases) == (None, None, {})
            continue
        assert (alone.step_s, alone.wait, alone.is_gpu) == (spent.each_s, spent.wait, spent.is_gpu)
        assert alone.phases == spent.phases


def test_of_two_ranks_that_are_equally_late_the_first_one_is_named_in_any_order_of_the_files() -> None:
    waits = {0: 0.0, 1: 5.0, 2: 5.0, 3: 0.0, 4: 0.0}
    reports = [make_report(rank, world_size=5, wait_seconds=seconds) for rank, seconds in waits.items()]
    for order in permutations(reports):
        late = find_late_rank(order)
        assert late is not None and (late.rank, late.share) == (1, 0.5)


def test_the_exporter_has_the_hooks_file() -> None:
    hooks, exporters = Path(report_rules.__file__), Path(exporters_rules.__file__)
    assert exporters.is_symlink() and not exporters.readlink().is_absolute()
    assert exporters.resolve() == hooks.resolve()


def test_the_hook_writes_what_the_exporter_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu().install(monkeypatch)
    with observe(range(40), optimizer=FakeOptimizer(), phases=True, directory=tmp_path, summary=False) as observed:
        list(observed)
    (path,) = tmp_path.glob("*.json")
    written = json.loads(path.read_text())
    assert set(KEYS) <= set(written)
    assert set(written["phases"]) == set(PHASES)
    assert set(written["facts"]) <= {*WORDS, *NUMBERS, *SWITCHES}
    parameter = SimpleNamespace(dtype="torch.bfloat16", device=None)
    loader = SimpleNamespace(num_workers=NUMBERS["num_workers"], prefetch_factor=2, batch_size=2**40, pin_memory=True)
    model = SimpleNamespace(parameters=lambda: iter([parameter]))
    facts = {**LoopFacts(loader, (), model).read(), "dance": 1}
    read = parse_report(json.dumps(written | {"facts": facts}).encode(), 0.0).facts
    assert dict(read) == {name: value for name, value in facts.items() if name != "dance"}
    assert "batch_size" not in facts and facts["parameters"] == "bfloat16"


def test_the_defaults_of_the_site_are_the_limits_of_the_summary() -> None:
    causes = CauseRules()
    assert causes.wait_min == WAIT_MIN
    assert {causes.phase_min} == {PHASE_MIN["checkpoint"], PHASE_MIN["logging"]}


@pytest.mark.parametrize("phase", ["checkpoint", "logging"])
def test_both_give_the_same_advice(phase: str) -> None:
    report = make_report(phases={phase: {"seconds": 3.0, "gpu_seconds": None}}, wait_seconds=0.0)
    case: Any = SimpleNamespace(training=publish(report), rules=SimpleNamespace(window=900.0, **limits()))
    cause = judge_phase(case, "a_cause", phase)
    text, gain = advise_phase(phase, 0.3)
    assert cause is not None and (cause.advice, cause.gain) == (text, gain)
    assert advise(report) == [f"{text}; {phase} takes 30% of the steps; {gain} as fast"]


@pytest.mark.parametrize("share", [0.2, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("phase", PHASE_LEFT)
def test_who_does_it_as_many_times_less_often_has_the_share_and_the_gain_that_were_named(
    phase: str, share: float
) -> None:
    text, gain = advise_phase(phase, share)
    times = int(text.split(" times less often")[0].split()[-1])
    rest, after = 1.0 - min(share, 0.99), min(share, 0.99) / times
    assert after / (rest + after) <= PHASE_LEFT[phase]
    assert float(gain.split()[1]) == pytest.approx(1.0 / (rest + after), rel=0.05)
    before = min(share, 0.99) / (times - 1)
    assert before / (rest + before) > PHASE_LEFT[phase], "no less often than it must be"


def limits() -> dict[str, float]:
    return {"phase_min": PHASE_MIN["logging"], "wait_high": 0.2}


def test_the_step_in_the_job_is_the_mean_of_the_last_ten_minutes_as_in_the_exporter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from prometheus_client import CollectorRegistry

    from gpu_exporter.agent.exposition.training import STEP

    now, totals = 1000.0, make_report(steps=0, measured_steps=0, step_seconds=0.0)
    monkeypatch.setattr(prometheus, "time", SimpleNamespace(monotonic=lambda: now))

    class Loop:
        def report(self) -> dict[str, Any]:
            return totals

    loop, registry, training = Loop(), CollectorRegistry(), NodeTraining()
    looks: list[tuple[int, float]] = []
    both: list[tuple[float | None, float | None]] = []
    registry.register(prometheus.TrainingCollector(loop.report))
    for number in range(200):
        text = json.dumps(totals | {"world_size": 1})
        training.note(WHO, TrainingFiles(now, (parse_report(text.encode(), 1.0),)))
        view = training.view(WHO, UNITS[0], UNITS, now, 0.0)
        assert view is not None
        looks.append((totals["measured_steps"], totals["step_seconds"]))
        both.append((registry.get_sample_value(STEP_METRIC, {"rank": "0"}), view.step_s))
        each_s = 0.5 if number % 60 == 59 else 0.1  # slow where checkpoints are written, which a median leaves out
        steps = 4 if number < 100 else 20
        totals["steps"] = totals["measured_steps"] = totals["measured_steps"] + steps
        totals["step_seconds"] += steps * each_s
        now += 15.0
    assert both[:5] == [(None, None)] * 5, "fewer than 20 steps"
    for (job, node), (steps, whole), (old_steps, old_whole) in zip(both[40:], looks[40:], looks, strict=False):
        assert job == pytest.approx((whole - old_whole) / (steps - old_steps))
        assert job == node
    assert len(registry._collector_to_names) == 1
    assert (STEP.name, STEP.help) == (STEP_METRIC, STEP_HELP)


def loads(workers: int, batch_s: float, wait_s: float, **more: float) -> Loading:
    """Seconds for each batch: from one to the next, and waited; the rest is work."""
    return Loading(workers, batch_s, wait_s, batch_s - wait_s, **more)


@pytest.mark.parametrize(
    ("loading", "expected"),
    [
        # Each sample waits for a disk.
        (loads(0, 0.048, 0.040, cpu_s=0.001, cpus=2.0), Workers(6, 0.0095)),  # and the loop has to take each batch
        (loads(2, 0.020, 0.012, cpu_s=0.001, cpus=2.0), Workers(7, 0.008)),
        (loads(7, 0.010, 0.002, cpu_s=0.001, cpus=2.0), Workers(11, 0.008)),  # as many as would do wait for a slow one
        # Each sample needs a CPU.
        (loads(0, 0.048, 0.040, cpu_s=0.040, cpus=8.0), Workers(6, 0.0095)),
        (loads(0, 0.048, 0.040, cpu_s=0.040, cpus=4.0), Workers(4, 0.0495 / 3.4)),  # which are never quite full
        (loads(0, 0.048, 0.040, cpu_s=0.040, loop_cpu_s=0.0, cpus=4.0), Workers(5, 0.0415 / 3.4)),
        (loads(3, 0.014, 0.006, cpu_s=0.040, cpus=4.0), Workers(None, 0.014, CPUS)),
        # The loop's threads spin while they wait for each other: they need no more than one CPU for its work.
        (loads(0, 0.048, 0.040, cpu_s=0.040, loop_cpu_s=0.096, cpus=4.0), Workers(4, 0.0495 / 3.4)),
        # Nearly as fast as the CPUs allow: they are the limit, and not the taking of batches.
        (loads(8, 0.010, 0.002, cpu_s=0.0243, take_s=0.0005, cpus=4.0), Workers(None, 0.010, CPUS)),
        # Four workers that wait for a CPU half of their time: eight would wait too.
        (loads(4, 0.020, 0.012, cpu_s=0.038, delay_s=0.040, cpus=4.0), Workers(5, 0.046 / 3.4)),
        # The loop's own work to take a batch is no lack of workers.
        (loads(8, 0.010, 0.002, cpu_s=0.001, take_s=0.0015, cpus=8.0), Workers(None, 0.010, TAKING)),
        # Unknown: as many as there are CPUs.
        (loads(2, 0.020, 0.012, cpus=8.0), Workers(7, 0.008)),
        (loads(0, 0.108, 0.100, cpus=8.0), Workers(7, 0.1 / 7)),
        (loads(7, 0.020, 0.012, cpus=8.0), None),
        (loads(1, 1.0, 0.9999, cpu_s=0.0, loop_cpu_s=0.0, cpus=8.0), Workers(80, 1.0 / 64)),  # not ten thousand
    ],
)
def test_as_many_workers_are_proposed_as_make_batches_as_fast_as_the_loop_takes_them(
    loading: Loading, expected: Workers | None
) -> None:
    found = propose_workers(loading)
    if found is None or expected is None:
        assert found == expected
    else:
        assert found == expected._replace(batch_s=pytest.approx(expected.batch_s))


SOME = st.one_of(st.none(), st.floats(0.0, 10.0))


@given(st.integers(0, 64), st.floats(1e-4, 10.0), st.floats(0.1, 1.0), SOME, SOME, SOME, SOME, st.floats(0.1, 256.0))
def test_a_proposal_is_more_workers_and_a_faster_loop(
    workers: int, batch_s: float, wait: float, cpu_s: float, delay_s: float, take_s: float, loop_s: float, cpus: float
) -> None:
    work_s = max(1e-6, batch_s * (1.0 - wait))
    found = propose_workers(Loading(workers, batch_s, batch_s * wait, work_s, cpu_s, delay_s, take_s, loop_s, cpus))
    if found is not None and found.number is not None:
        assert workers < found.number <= 10_000
        assert found.batch_s > 0.0
        if workers:
            assert found.batch_s <= batch_s / 1.09


def test_the_mail_of_the_exporter_has_the_number_that_the_loop_has_measured() -> None:
    facts = {"num_workers": 2, "cpus": 2.0}
    slow = make_report(facts=facts, batches=100, unfinished_batches=0, wait_seconds=6.0, make_cpu_seconds=0.001)
    assert find_proposal(slow) == {"workers_to_try": 7}
    assert find_proposal(slow | {"wait_seconds": 0.5}) == {}
    assert find_proposal(slow | {"measured_steps": 10}) == {}
    (text,) = [each for each in advise(slow) if each.startswith("num_workers 2 -> 7: ")]
    assert text.endswith(
        "making a batch takes 200 ms (1 ms on a CPU), using it 40 ms; about 2.5 times as fast, and more memory"
    )
