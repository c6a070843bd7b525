"""Decisions by metrics: `unknown` takes precedence over idle, and all GPUs of a holder count."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.reconciler.decision.policy import LABELLED, Decision, decide, merge_units
from gpu_exporter.reconciler.decision.spared import why_spared
from gpu_exporter.reconciler.evidence.records import Evidence, HolderEvidence, HolderName, PublishedCause, UnitEvidence
from gpu_exporter.reconciler.kubernetes.notice import event_note
from gpu_exporter.reconciler.preview import Outlook
from gpu_exporter.reconciler.report import decisions_json, explain, format_time, render_decisions

NOW = 1_700_000_000.0
POLICY = Policy()
UNIT = UnitEvidence(
    node="n1",
    gpu="0",
    uuid="GPU-0",
    mig="",
    start_wall=NOW - 4 * 3600,
    idle_run_s=3 * 3600.0,
    sample_age_s=5.0,
    coverage=1.0,
    witnesses=4,
)
POD = HolderName("kubernetes", "ml", "train-0")


def judge(*units: UnitEvidence, held: int | None = None) -> Decision:
    holder = HolderEvidence(POD, "ada/phys", units, held if held is not None else len(units))
    (decision,) = decide(Evidence(NOW, (holder,)), POLICY)
    return decision


def test_work_on_the_host_of_one_node_delays_the_whole_holder() -> None:
    busy = unit(uuid="GPU-1", node="n2", host_cpu_ratio=0.9)
    assert judge(unit(), busy).stage == "candidate"
    assert (
        judge(unit(host_cpu_ratio=0.0), unit(host_cpu_ratio=0.9), held=1).stage == "candidate"
    )  # two targets for one GPU
    assert judge(unit(), busy._replace(host_cpu_ratio=None)).stage == "underused"


def unit(**changes: Any) -> UnitEvidence:
    return UNIT._replace(**changes)


def test_a_report_of_work_counts_although_another_report_of_the_gpu_is_old() -> None:
    """One of two exporters of a node hangs. The mark is then withdrawn at once, and not when evidence is too old."""
    works, hangs = unit(idle_run_s=5.0), unit(sample_age_s=300.0)
    assert (judge(works, hangs, held=1).stage, judge(works, hangs, held=1).active) == ("unknown", True)
    assert not judge(unit(), hangs, held=1).active


def test_a_report_from_the_future_is_a_wrong_clock_although_another_report_is_older() -> None:
    found = judge(unit(), unit(sample_age_s=-1000.0), held=1)
    assert (found.stage, "a clock is wrong" in found.reason) == ("unknown", True)


@pytest.mark.parametrize("runs_s", [(4000.0,), (3000.0, 7000.0), (4000.0, 100.0), (-math.inf,)])
def test_restarts_at_any_time_are_counted_if_no_unit_worked(runs_s: tuple[float, ...]) -> None:
    """Two containers that restart in turn: at each moment one of the idle runs is short."""
    units = [
        unit(uuid=f"GPU-{at}", idle_run_s=run_s, quiet_s=3 * 3600.0)
        if run_s >= 0
        else unit(uuid=f"GPU-{at}", idle_run_s=None, obstacle="no_process", quiet_s=3 * 3600.0)
        for at, run_s in enumerate(runs_s)
    ]
    assert why_spared(judge(*units)) == "interrupted"
    assert why_spared(judge(*(each._replace(quiet_s=100.0) for each in units))) == ""


@pytest.mark.parametrize(
    ("mark", "stage"), [("partial", "unknown"), ("sharing-candidate", "unknown"), ("candidate", "candidate")]
)
def test_the_slack_of_a_mark_sets_no_other_mark(mark: str, stage: str) -> None:
    holder = HolderEvidence(POD, "", (unit(coverage=0.87),), 1, mark=mark)
    (decision,) = decide(Evidence(NOW, (holder,)), POLICY)
    assert decision.stage == stage


@pytest.mark.parametrize(
    ("changes", "stage", "reason"),
    [
        ({}, "underused", "its one GPU idle for 3.0 h"),
        ({"idle_run_s": 3600.0}, "candidate", "its one GPU idle for 60 min"),
        ({"idle_run_s": 7199.0}, "candidate", "its one GPU idle for 119 min"),
        (
            {"host_cpu_ratio": 0.62},
            "candidate",
            "its one GPU idle for 3.0 h, but the holder uses 62% of its CPUs, so it stays a candidate until it has been idle for 6.0 h",
        ),
        (
            {"host_cpu_ratio": 0.1, "host_io_bytes_per_s": 2.1e8},
            "candidate",
            "its one GPU idle for 3.0 h, but the holder moves 210 MB/s to and from disks, so it stays a candidate until it has been idle for 6.0 h",
        ),
        (
            {"causes": (PublishedCause("far_numa", "medium"), PublishedCause("starting", "high"))},
            "candidate",
            "its one GPU idle for 3.0 h, but the holder is busy outside its GPUs (cause starting), so it stays a candidate until it has been idle for 6.0 h",
        ),
        ({"causes": (PublishedCause("no_process", "high"),)}, "underused", "its one GPU idle for 3.0 h"),
        (  # published only where the site trusts the steps of trainings
            {"causes": (PublishedCause("steps_elsewhere", "medium"),)},
            "candidate",
            "its one GPU idle for 3.0 h, but the holder is busy outside its GPUs (cause steps_elsewhere), so it stays a candidate until it has been idle for 6.0 h",
        ),
        (
            {"causes": (PublishedCause("remote_io", "high"),), "idle_run_s": 6 * 3600.0, "start_wall": NOW - 9 * 3600},
            "underused",
            "its one GPU idle for 6.0 h",
        ),
        ({"host_cpu_ratio": 0.25, "host_io_bytes_per_s": 2e7}, "underused", "its one GPU idle for 3.0 h"),
        ({"host_cpu_ratio": math.nan}, "underused", "its one GPU idle for 3.0 h"),
        (  # a thread that only polls looks the same
            {"host_cpu_ratio": 0.0625, "host_cores": 1.0, "host_cpus": 16.0},
            "underused",
            "its one GPU idle for 3.0 h; the holder uses 1.0 of its 16 CPU cores",
        ),
        ({"host_cores": 0.89, "host_cpus": 16.0}, "underused", "its one GPU idle for 3.0 h"),
        ({"host_cores": math.nan, "host_cpus": math.nan}, "underused", "its one GPU idle for 3.0 h"),
        (
            {"host_cores": 1.0, "idle_run_s": 3600.0},
            "candidate",
            "its one GPU idle for 60 min; the holder uses 1.0 CPU cores",
        ),
        (
            {"host_cpu_ratio": 0.62, "host_cores": 9.92, "host_cpus": 16.0},
            "candidate",
            "its one GPU idle for 3.0 h, but the holder uses 9.9 of its 16 CPU cores, so it stays a candidate until it has been idle for 6.0 h",
        ),
        (
            {"host_cpu_ratio": 1.0, "idle_run_s": 6 * 3600.0, "start_wall": NOW - 9 * 3600},
            "underused",
            "its one GPU idle for 6.0 h; the holder uses 100% of its CPUs, so the reconciler takes none of its GPUs back",
        ),
        ({"host_cpu_ratio": 1.0, "idle_run_s": 3600.0}, "candidate", "its one GPU idle for 60 min"),
        ({"idle_run_s": 3599.0}, "active", "longest idle run 59 min, below 60 min"),
        ({"idle_run_s": 0.0}, "active", "longest idle run 0 s, below 60 min"),
        ({"idle_run_s": None}, "unknown", "the idle time of n1 gpu 0 is unknown: its activity is not known"),
        (
            {"idle_run_s": None, "obstacle": "no_answer"},
            "unknown",
            "the idle time of n1 gpu 0 is unknown: the GPU does not answer",
        ),
        ({"idle_run_s": None, "obstacle": "suspended"}, "not_running", "the job is SUSPENDED"),
        ({"idle_run_s": None, "obstacle": "not_started"}, "not_running", "its container has not started"),
        (
            {"idle_run_s": None, "obstacle": "suspended", "sample_age_s": 121.0},
            "unknown",
            "no sample in the last 2 min",
        ),
        ({"sample_age_s": None}, "unknown", "no sample in the last 2 min"),
        ({"sample_age_s": 121.0}, "unknown", "no sample in the last 2 min"),
        ({"sample_age_s": -300.0}, "unknown", "the newest sample is 5 min in the future: a clock is wrong"),
        ({"start_wall": None}, "unknown", "the start of the allocation is not known"),
        ({"start_wall": NOW - 600}, "starting", "held for 10 min; it gets no mark in its first 30 min (startup grace)"),
        ({"coverage": 0.89}, "unknown", "only 89% of the time was observed; the policy requires 90%"),
        ({"coverage": None}, "unknown", "an unknown part of the time was observed; the policy requires 90%"),
        ({"coverage": math.nan}, "unknown", "an unknown part of the time was observed; the policy requires 90%"),
        ({"idle_run_s": math.nan}, "unknown", "the idle time of n1 gpu 0 is unknown: its activity is not known"),
        ({"start_wall": math.nan}, "unknown", "the start of the allocation is not known"),
        ({"sample_age_s": math.nan}, "unknown", "no sample in the last 2 min"),
        (
            {"witnesses": None},
            "candidate",
            "its one GPU idle for 3.0 h, but the number of its witnesses is unknown, so it stays a candidate",
        ),
        (
            {"witnesses": 1},
            "candidate",
            (
                "its one GPU idle for 3.0 h, but only one witness shows it for a part of this time, so it "
                "stays a candidate"
            ),
        ),
        ({"witnesses": 2}, "underused", "its one GPU idle for 3.0 h"),
        ({"idle_run_s": 7200.0}, "underused", "its one GPU idle for 120 min"),
        ({"coverage": 0.9}, "underused", "its one GPU idle for 3.0 h"),
        ({"sample_age_s": 119.0}, "underused", "its one GPU idle for 3.0 h"),
        ({"sample_age_s": 120.0}, "unknown", "no sample in the last 2 min"),
        ({"sample_age_s": -120.0}, "underused", "its one GPU idle for 3.0 h"),
        ({"sample_age_s": 119.0, "sample_interval_s": 15.0}, "underused", "its one GPU idle for 3.0 h"),
        ({"sample_age_s": 239.0, "sample_interval_s": 60.0}, "underused", "its one GPU idle for 3.0 h"),
        ({"sample_age_s": 240.0, "sample_interval_s": 60.0}, "unknown", "no sample in the last 4 min"),
        ({"sample_age_s": -240.0, "sample_interval_s": 60.0}, "underused", "its one GPU idle for 3.0 h"),
        (
            {"sample_age_s": -241.0, "sample_interval_s": 60.0},
            "unknown",
            "the newest sample is 4 min in the future: a clock is wrong",
        ),
        ({"idle_run_s": 1800.0, "start_wall": NOW - 1800}, "active", "longest idle run 30 min, below 60 min"),
        (
            {"idle_run_s": 0.0, "start_wall": NOW - 1799},
            "starting",
            "held for 29 min; it gets no mark in its first 30 min (startup grace)",
        ),
        ({"start_wall": NOW - 3 * 3600 + 120}, "underused", "its one GPU idle for 3.0 h"),
        (
            {"start_wall": NOW - 3 * 3600 + 121},
            "unknown",
            "its idle run is 2 min longer than its allocation: a clock was changed, or two holders have the same name",
        ),
        (
            {"start_wall": NOW - 2 * 3600},
            "unknown",
            "its idle run is 60 min longer than its allocation: a clock was changed, or two holders have the same name",
        ),
        (
            {"start_wall": NOW + 7200},
            "unknown",
            "its start is 120 min in the future: the clock of its node was set back, or the clock of Slurm is wrong",
        ),
        (
            {"idle_run_s": 0.0, "start_wall": NOW + 60},
            "starting",
            "held for -60 s; it gets no mark in its first 30 min (startup grace)",
        ),
    ],
)
def test_the_stage_and_the_reason_of_a_holder_with_one_gpu(changes: dict[str, Any], stage: str, reason: str) -> None:
    decision = judge(unit(**changes))
    assert (decision.stage, decision.reason) == (stage, reason)


def test_all_gpus_of_a_holder_must_be_idle() -> None:
    def other(**changes: Any) -> UnitEvidence:
        return unit(gpu="1", uuid="GPU-1", **changes)

    assert judge(unit(), other(idle_run_s=3700.0)).stage == "candidate"
    assert judge(unit(), other(idle_run_s=0.0)).stage == "partial"
    assert judge(unit(), other(idle_run_s=3600.0)).stage == "candidate"
    assert judge(unit(), other(idle_run_s=3599.0)).stage == "partial"
    assert judge(unit(idle_run_s=0.0), other(idle_run_s=0.0)).stage == "active"
    assert judge(unit(), other(idle_run_s=None)).stage == "unknown"
    assert judge(unit(), other(coverage=0.5)).stage == "unknown"
    assert judge(unit(), other(start_wall=NOW - 60)).stage == "starting"
    assert judge(unit(), other(witnesses=1)).stage == "candidate"
    assert judge(unit(), other(sample_age_s=500.0)).stage == "unknown"


def test_every_gpu_that_the_scheduler_counts_must_be_seen() -> None:
    decision = judge(unit(), held=2)
    assert (decision.stage, decision.reason) == (
        "unknown",
        "exporters report 1 GPUs for the holder, but its scheduler reports 2",
    )
    assert judge(unit(), unit(), held=2).stage == "unknown"  # one GPU reported twice is one GPU


@pytest.mark.parametrize(
    "changes",
    [{"idle_run_s": 0.0}, {"coverage": 0.5}, {"sample_age_s": 900.0}, {"idle_run_s": None}, {"witnesses": None}],
    ids=lambda changes: next(iter(changes)),
)
def test_if_two_sources_report_one_gpu_the_more_careful_value_counts(changes: dict[str, Any]) -> None:
    assert judge(unit(), unit(), held=1).stage == "underused"
    for units in ((unit(), unit(**changes)), (unit(**changes), unit())):
        assert judge(*units, held=1).stage != "underused"


def test_the_long_interval_of_one_exporter_does_not_make_samples_of_others_fresh() -> None:
    decision = judge(unit(sample_age_s=290.0), unit(gpu="1", uuid="GPU-1", sample_interval_s=120.0))
    assert (decision.stage, decision.reason) == ("unknown", "no sample in the last 2 min")


@pytest.mark.parametrize("other", [{}, {"idle_run_s": 0.0}, {"idle_run_s": None}])
@pytest.mark.parametrize("turned", [False, True])
def test_a_gpu_that_does_not_answer_is_unknown_and_never_active(other: dict[str, Any], turned: bool) -> None:
    """A lost GPU publishes no idle run, and its last sample is as fresh as its exporter."""
    units = [unit(idle_run_s=None), unit(gpu="1", uuid="GPU-1", **other)]
    decision = judge(*(reversed(units) if turned else units))
    assert decision.stage == "unknown"
    assert decision.active == (other == {"idle_run_s": 0.0})
    assert "the idle time of n1 gpu" in decision.reason


@pytest.mark.parametrize(
    ("changes", "active"),
    [
        ({"idle_run_s": 0.0}, True),
        ({"idle_run_s": 3599.0}, True),
        ({"idle_run_s": 3600.0}, False),
        ({"idle_run_s": 0.0, "sample_age_s": 120.0}, False),  # activity that was seen too long ago
        ({"idle_run_s": 0.0, "sample_age_s": None}, False),
        ({"idle_run_s": 0.0, "sample_age_s": 239.0, "sample_interval_s": 60.0}, True),
        ({"idle_run_s": None}, False),
        ({"idle_run_s": math.nan}, False),
        ({"idle_run_s": -1.0}, False),
    ],
)
def test_only_a_fresh_sample_shows_activity(changes: dict[str, Any], active: bool) -> None:
    decision = judge(unit(gpu="1", uuid="GPU-1", sample_age_s=9999.0), unit(**changes))
    assert (decision.stage, decision.active) == ("unknown", active)


def test_a_decision_contains_the_start_of_its_idle_time_and_the_time_that_its_stage_needs() -> None:
    two = [unit(idle_run_s=8000.0), unit(gpu="1", uuid="GPU-1", idle_run_s=7300.0, start_wall=NOW - 9000)]
    decision = judge(*two)
    assert (decision.idle_since_wall, decision.start_wall) == (NOW - 7300.0, NOW - 9000)
    assert (decision.stage, decision.needed_s, decision.observed_wall) == ("underused", 7200.0, NOW)
    decision = judge(two[0], two[1]._replace(idle_run_s=3700.0))
    assert (decision.stage, decision.needed_s, decision.idle_since_wall) == ("candidate", 3600.0, NOW - 3700.0)
    decision = judge(two[0], two[1]._replace(idle_run_s=3600.0))
    assert decision.idle_since_wall == NOW - 3600.0
    decision = judge(two[0], two[1]._replace(idle_run_s=10.0))
    assert (decision.stage, decision.needed_s, decision.idle_since_wall) == ("partial", 3600.0, NOW - 8000.0)
    assert judge(unit(idle_run_s=None)).idle_since_wall is None


def test_the_reason_for_a_holder_of_several_gpus_names_the_worst_gpu() -> None:
    def reason(*changes: dict[str, Any]) -> str:
        return judge(*(unit(gpu=str(i), uuid=f"GPU-{i}", **change) for i, change in enumerate(changes))).reason

    assert reason({"coverage": 0.7}, {"coverage": 0.5}) == "only 50% of the time was observed; the policy requires 90%"
    assert reason({"coverage": 0.5}, {"coverage": None}).startswith("an unknown part of the time was observed")
    assert reason({"idle_run_s": 60.0}, {"idle_run_s": 59.0}) == "longest idle run 1 min, below 60 min"
    assert reason({"idle_run_s": 0.0}, {"idle_run_s": 59.0}) == "longest idle run 59 s, below 60 min"
    assert reason({"start_wall": NOW - 900}, {"start_wall": NOW - 600}).startswith(
        "held for 10 min; it gets no mark in its first"
    )
    assert reason({"witnesses": 4}, {"witnesses": None}).endswith(
        "the number of its witnesses is unknown, so it stays a candidate"
    )
    assert reason({"witnesses": 4}, {"witnesses": 1}).endswith(
        "only one witness shows it for a part of this time, so it stays a candidate"
    )
    silent = {"idle_run_s": None}
    assert (
        reason(silent, silent, silent) == "the idle time of n1 gpu 0 and 2 more is unknown: its activity is not known"
    )
    assert reason({}, silent) == "the idle time of n1 gpu 1 is unknown: its activity is not known"


def test_an_unknown_gpu_takes_precedence_over_a_gpu_whose_holder_cannot_run() -> None:
    lost = unit(idle_run_s=None, obstacle="no_answer", gpu="1", uuid="GPU-1")
    halted = unit(idle_run_s=None, obstacle="suspended")
    for units in ((lost, halted), (halted, lost)):
        decision = judge(*units)
        assert (decision.stage, "n1 gpu 1 is unknown: the GPU does not answer" in decision.reason) == ("unknown", True)
    twins = [halted, unit(idle_run_s=9000.0)]  # two targets for one GPU
    assert [judge(*order).stage for order in (twins, twins[::-1])] == ["not_running"] * 2
    text = explain(judge(halted), POLICY)
    assert ": stage not_running: the job is SUSPENDED\n" in text
    assert "  next: when it runs again, its idle time restarts at zero\n" in text


def test_a_holder_whose_idle_run_is_longer_than_an_allocation_is_unknown() -> None:
    young = unit(gpu="1", uuid="GPU-1", idle_run_s=7200.0, start_wall=NOW - 7300)
    for units in ((unit(), young), (young, unit())):
        assert "longer than its allocation" in judge(*units).reason
    assert judge(unit(idle_run_s=7420.0), young).stage == "underused"


def test_a_candidate_that_one_witness_shows_is_never_announced_as_underused() -> None:
    """Neither in its series, nor in explain, nor in the Event."""
    for witnesses, rises in ((1, False), (2, True)):
        decision = judge(unit(idle_run_s=5400.0, start_wall=NOW - 5500, witnesses=witnesses))
        assert decision.stage == "candidate" and (decision.underused_wall is not None) == rises
        assert ("next: underused at" in explain(decision, POLICY)) == rises
        assert ("only one witness shows it for a part of this time" in explain(decision, POLICY)) == (not rises)
        note = event_note(decision, POLICY, NOW)
        assert ("It becomes underused when" in note, "It stays at this stage" in note) == (rises, not rises)


def test_a_decision_unknown_has_no_start_of_idle_time() -> None:
    assert judge(unit(coverage=0.5)).idle_since_wall is None
    assert judge(unit(), held=2).idle_since_wall is None


def test_merging_a_number_with_nan_gives_no_number() -> None:
    for rows in ((unit(coverage=math.nan), unit()), (unit(), unit(coverage=math.nan))):
        (merged,) = merge_units(rows)
        assert merged.coverage is None


MERGED = st.one_of(st.none(), st.floats(0, 1e9))


@given(
    st.lists(st.tuples(MERGED, MERGED, MERGED, MERGED, st.one_of(st.none(), st.integers(0, 9))), min_size=1, max_size=4)
)
def test_merging_any_rows_of_one_unit_takes_the_most_careful_values(rows: list[tuple]) -> None:
    names = ("start_wall", "idle_run_s", "sample_age_s", "coverage", "witnesses")
    (merged,) = merge_units([unit(**dict(zip(names, row, strict=True))) for row in rows])
    for i, (name, worst) in enumerate(zip(names, (max, min, max, min, min), strict=True)):
        values = [row[i] for row in rows]
        assert getattr(merged, name) == (None if None in values else worst(values)), name


def test_if_two_sources_report_one_gpu_the_shorter_sample_interval_counts() -> None:
    slow, quick = unit(sample_interval_s=60.0, sample_age_s=200.0), unit(sample_interval_s=1.0)
    assert judge(slow, held=1).stage == "underused"
    assert judge(slow, quick, held=1).stage == judge(quick, slow, held=1).stage == "unknown"


def test_a_holder_whose_size_is_not_published_is_unknown() -> None:
    holder = HolderEvidence(POD, "", (unit(),), None)
    (decision,) = decide(Evidence(NOW, (holder,)), POLICY)
    assert (decision.stage, decision.reason) == (
        "unknown",
        "the number of GPUs of the holder is unknown",
    )


NUMBERS = st.one_of(st.none(), st.floats(-10, 20_000))


@given(
    st.lists(st.tuples(NUMBERS, NUMBERS, st.one_of(st.none(), st.floats(0, 1)), NUMBERS), min_size=1, max_size=4),
    st.integers(0, 2),
)
def test_a_holder_is_underused_only_if_every_gpu_is_proven_idle(rows: list[tuple], missing: int) -> None:
    units = [
        unit(
            uuid=f"GPU-{i}",
            idle_run_s=run,
            sample_age_s=age,
            coverage=coverage,
            start_wall=None if held is None else NOW - held,
        )
        for i, (run, age, coverage, held) in enumerate(rows)
    ]
    decision = judge(*units, held=len(units) + missing)
    if decision.stage == "underused":
        assert missing == 0
        for run, age, coverage, held in rows:
            assert run is not None
            assert run >= POLICY.underused_after
            assert age is not None
            assert -120 <= age < 120
            assert coverage is not None
            assert coverage >= POLICY.coverage_min
            assert held is not None
            assert held >= POLICY.startup_grace
    assert bool(decision.label) == (decision.stage in LABELLED)


def test_the_mark_is_a_label_on_pods_and_a_text_on_jobs() -> None:
    assert judge(unit()).label == "gpu-exporter.io/utilization=underused"
    job = HolderEvidence(HolderName("slurm", "", "42"), "", (unit(),), 1)
    (decision,) = decide(Evidence(NOW, (job,)), POLICY)
    assert decision.label == "AdminComment=gpu-exporter.io/utilization=underused"


def test_the_reports_of_decisions_are_unchanged(golden) -> None:
    holders = (
        HolderEvidence(POD, "", (unit(), unit(gpu="1", uuid="GPU-1")), 2),
        HolderEvidence(HolderName("slurm", "", "42"), "ada/phys", (unit(idle_run_s=None),), 1),
        HolderEvidence(HolderName("kubernetes", "ml", "busy"), "", (unit(idle_run_s=0.0),), 1),
        HolderEvidence(HolderName("kubernetes", "ml", "agent"), "", (unit(uuid="GPU-2"),), 1),
        HolderEvidence(
            HolderName("slurm", "", "3013"), "ada/phys", (unit(),), 1, users_id="3010_1", clusters=frozenset({"lab"})
        ),
        HolderEvidence(HolderName("slurm", "", "3012"), "ada/phys", (unit(),), 1, users_id="3011+1"),
    )
    seen = Evidence(NOW, holders, 2, 8, hidden=4)
    decisions = decide(seen, POLICY)
    outlooks = {
        POD: Outlook("gpu-exporter.io/utilization=underused", checked=True),
        holders[3].name: Outlook(
            "gpu-exporter.io/utilization=underused",
            "daemonset",
            "the pod belongs to a DaemonSet: it is a part of its node",
            True,
        ),
        holders[4].name: Outlook("Comment=gpu-exporter.io/utilization=underused"),
    }
    text = (
        render_decisions(decisions, seen, outlooks)
        + "\n"
        + "".join(explain(decision, POLICY, outlooks.get(decision.name)) for decision in decisions)
    )
    golden("decisions.txt", text)
    golden("decisions.json", decisions_json(decisions, seen, outlooks))
    assert format_time(None) == "-"


@pytest.mark.parametrize(
    ("hidden", "said"),
    [
        (0, ""),
        (1, "; 1 GPU is held by jobs that Slurm hides"),
        (4, "; 4 GPUs are held by jobs that Slurm hides"),
    ],
)
def test_gpus_of_hidden_jobs_are_reported_also_if_no_holder_is_idle(hidden: int, said: str) -> None:
    text = render_decisions([], Evidence(NOW, (), 2, 4, hidden=hidden))
    assert text == f"2 exporters and 4 allocations seen{said}; no holder has been idle for long enough\n"
