"""The effect of surroundings on a decision: they never raise a stage, and the least idle member decides for a gang."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.testbed.marker_book import CANDIDATE, POLICY, UNDERUSED, WALL, Bench, Book, holder

from gpu_exporter.common.config.rules import CLASSES, PolicyRule
from gpu_exporter.common.model.readings import CORE
from gpu_exporter.reconciler.apply import ApplyRuns
from gpu_exporter.reconciler.decision import settle as settle_module
from gpu_exporter.reconciler.decision.policy import LABELLED, MARKED, Decision, decide
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.settle import settle
from gpu_exporter.reconciler.decision.spared import why_spared
from gpu_exporter.reconciler.decision.surroundings import Exemption, Member, Surroundings, Unreadable
from gpu_exporter.reconciler.evidence.records import Evidence, HolderName, UnitEvidence
from gpu_exporter.reconciler.pause import PauseFile, PauseNote
from gpu_exporter.reconciler.report import explain
from gpu_exporter.reconciler.telemetry import Telemetry

NAMES = [HolderName("kubernetes", "ml", f"train-{i}") for i in range(4)]
ORDER = ["unknown", "waiting", "exempt", "serving", "starting", "active", "partial", "candidate", "underused"]


def evidence_of(runs: Sequence[Sequence[float] | None]) -> Evidence:
    """Evidence on NAMES. `runs`: for each pod the idle runs of its GPUs; None for a pod without series."""
    holders = [holder(name, its) for name, its in zip(NAMES, runs, strict=False) if its is not None]
    return Evidence(WALL, tuple(holders))


def gang(count: int = 4, waits: str = "", missing: int = 0, units: int = 1, uid: str = "uid") -> Surroundings:
    members = tuple(Member(name, uid, units, waits if name == NAMES[-1] else "") for name in NAMES[:count])
    return Surroundings("batch/v1/Job/train", members, missing, "batch", "batch/v1/Job/train")


def decided(runs: Sequence[Sequence[float] | None], around: Surroundings | Unreadable) -> list[Decision]:
    """The decisions on NAMES, all in the same surroundings."""
    evidence = evidence_of(runs)
    return settle(evidence, decide(evidence, POLICY), dict.fromkeys(NAMES, around), Rulebook(POLICY))


IDLE = [UNDERUSED]


def test_a_gang_whose_members_are_all_idle_is_marked_and_the_reason_names_them() -> None:
    decisions = decided([IDLE] * 4, gang())
    assert [decision.stage for decision in decisions] == ["underused"] * 4
    assert decisions[0].reason.endswith("and so are the other 3 members of batch/v1/Job/train")


def test_members_that_requested_several_replicas_of_one_gpu_are_not_unknown() -> None:
    evidence = evidence_of([IDLE] * 4)
    shared = [
        each._replace(units=tuple(unit._replace(is_shared=True) for unit in each.units)) for each in evidence.holders
    ]
    evidence = evidence._replace(holders=tuple(shared))
    around = dict.fromkeys(NAMES, gang(units=4))
    decisions = settle(evidence, decide(evidence, POLICY), around, Rulebook(POLICY))
    assert [decision.stage for decision in decisions] == ["underused"] * 4


@pytest.mark.parametrize(
    ("runs", "around", "stage", "reason"),
    [
        (
            [IDLE, IDLE, IDLE, [5.0]],
            gang(),
            "partial",
            "3 of 4 members of batch/v1/Job/train are idle, but ml/train-3: ",
        ),
        ([IDLE, IDLE, IDLE, [UNDERUSED, 5.0]], gang(), "partial", "ml/train-3: 1 of 2 GPUs idle"),
        ([IDLE, IDLE, IDLE, None], gang(), "unknown", "member ml/train-3 of batch/v1/Job/train: it has no series"),
        (
            [IDLE, IDLE, None, [5.0]],
            gang(),
            "partial",
            "2 of 4 members",
        ),  # work ends a mark, even if another member is unknown
        ([IDLE, IDLE, IDLE, [CANDIDATE]], gang(), "candidate", "member ml/train-3 of batch/v1/Job/train: "),
        ([IDLE] * 4, gang(waits="is Pending"), "waiting", "ml/train-3 of batch/v1/Job/train is Pending"),
        ([IDLE] * 3, gang(3, missing=2), "waiting", "batch/v1/Job/train still waits for 2 members"),
        ([IDLE] * 1, gang(1, missing=1), "waiting", "batch/v1/Job/train still waits for one member"),
        (
            [IDLE] * 4,
            gang(units=2),
            "unknown",
            "exporters report 1 GPUs for this member, but its scheduler allocated 2",
        ),
        ([IDLE] * 4, gang(uid="other"), "unknown", "the evidence is about another pod of this name"),
    ],
)
def test_the_least_idle_member_decides_for_all_members_of_a_gang(
    runs: Sequence[Sequence[float] | None], around: Surroundings, stage: str, reason: str
) -> None:
    first = decided(runs, around)[0]
    assert (first.stage, reason in first.reason) == (stage, True), first.reason
    assert first.needed_s == (UNDERUSED - 1 if stage == "underused" else CANDIDATE - 1)
    assert (first.idle_since_wall is not None) == (stage in LABELLED)


@pytest.mark.parametrize(
    ("around", "stage", "reason"),
    [
        (Surroundings(), "underused", "its one GPU idle for"),
        (Surroundings(kind="serving", kind_why="Service/web"), "serving", "it serves requests (Service/web)"),
        (Surroundings(kind="interactive"), "candidate", "its one GPU idle for 120 min"),
        (Surroundings(exemption=Exemption("pod", "pod train is exempt until noon")), "exempt", "exempt until noon"),
        (
            Surroundings(ceiling="pod train has x: 'y'"),
            "candidate",
            "it stays a candidate, because pod train has x: 'y'",
        ),
        (Unreadable("no rights"), "unknown", "but no rights"),
        (Surroundings(idle_after_s=9000.0, idle_after_by=Exemption("owner", "idle-after is 150m")), "exempt", "150m"),
        (Surroundings(idle_after_s=7000.0, idle_after_by=Exemption("owner", "x")), "candidate", "idle for 120 min"),
        (Surroundings(idle_after_s=60.0, idle_after_by=Exemption("owner", "x")), "underused", "idle for 120 min"),
    ],
)
def test_class_and_wishes_lower_a_stage_and_never_raise_it(
    around: Surroundings | Unreadable, stage: str, reason: str
) -> None:
    (decision,) = decided([IDLE], around)
    assert (decision.stage, reason in decision.reason) == (stage, True), decision.reason
    (working,) = decided([[5.0]], around)
    assert working.stage == "active"


SERVES = Surroundings(kind="serving", kind_why="Service/web")
DAY = POLICY._replace(sharing_window=80_000.0)  # shorter than the time for which all GPUs have been held


@pytest.mark.parametrize(
    ("runs", "around", "stage"),
    [
        ([[5.0]], SERVES, "sharing-candidate"),
        ([IDLE], SERVES, "sharing-candidate"),  # at night
        ([[UNDERUSED, 5.0]], SERVES, "sharing-candidate"),
        ([[5.0]], Surroundings(kind="batch"), "active"),
        ([IDLE], Surroundings(kind="batch"), "underused"),
        ([[5.0]], Unreadable("no rights"), "active"),
        ([[float("nan")]], SERVES, "unknown"),
        ([[5.0]], SERVES._replace(exemption=Exemption("pod", "until noon")), "active"),
        ([IDLE], SERVES._replace(exemption=Exemption("pod", "until noon")), "exempt"),
        ([IDLE] * 2, SERVES._replace(members=gang(2).members), "serving"),  # a server of several pods
    ],
)
def test_a_server_that_uses_little_in_its_busiest_hour_is_a_sharing_candidate(
    runs: Sequence[Sequence[float]], around: Surroundings | Unreadable, stage: str
) -> None:
    evidence = evidence_of(runs)._replace(sharing=dict.fromkeys(NAMES, "in its busiest hour it used 3% of its GPUs"))
    decision = settle(evidence, decide(evidence, DAY), dict.fromkeys(NAMES, around), Rulebook(DAY))[0]
    assert decision.stage == stage
    young = settle(evidence, decide(evidence, POLICY), dict.fromkeys(NAMES, around), Rulebook(POLICY))[0]
    assert young.stage != "sharing-candidate", "a pod that is younger than the sharing window"
    assert (decision.label != "") == (stage in MARKED)
    if stage == "sharing-candidate":
        assert decision.reason == "in its busiest hour it used 3% of its GPUs, and it serves requests (Service/web)"
        text = explain(decision, DAY)
        assert (
            "next: this is only a hint; a MIG instance or a shared GPU may be enough, if it has enough memory" in text
        )


def test_a_server_that_a_policy_of_the_site_exempts_is_no_sharing_candidate() -> None:
    evidence = evidence_of([[5.0]])._replace(sharing={NAMES[0]: "little"})
    for rule, stage in ((PolicyRule("x", exempt="why"), "active"), (PolicyRule("x"), "sharing-candidate")):
        book = Rulebook(DAY, [rule])
        (decision,) = settle(evidence, decide(evidence, book.loosest), {NAMES[0]: SERVES}, book)
        assert decision.stage == stage


def test_a_working_server_is_surveyed_and_marked_and_a_brake_does_not_end_its_mark(tmp_path: Path) -> None:
    book, place = Book(), PauseFile(tmp_path / "pause")
    bench = Bench(book, policy=DAY)
    bench.pauses = [place]
    bench.restart()
    bench.runs, bench.sharing = {NAMES[0]: [5.0]}, {NAMES[0]: "little"}
    book.around[NAMES[0]] = SERVES
    assert bench.run() == ["write train-0 sharing-candidate"]
    assert book.surveyed[-1] == ([NAMES[0]], [NAMES[0]]), "the surroundings were read again before the mark was set"
    bench.runs = {NAMES[0]: [5.0, float("nan")]}
    assert bench.run() == [], "work on one GPU does not end this mark"
    bench.runs = {NAMES[0]: [5.0]}
    bench.clock.advance(3600.0)
    place.write_pause(PauseNote(bench.clock.wall() + 60.0, "storage"))
    bench.runs[NAMES[1]] = [5.0]
    book.around[NAMES[1]] = SERVES
    bench.sharing = dict.fromkeys(NAMES[:2], "little")
    assert (bench.run(), set(bench.cycle.frozen)) == (["renew train-0"], {"paused"}), (
        "the mark is renewed, and no new mark is set"
    )
    bench.sharing = {}
    assert bench.run() == ["withdraw train-0"]


def test_a_candidate_that_turns_out_to_serve_loses_its_mark_also_if_the_next_mark_is_refused() -> None:
    book = Book()
    bench = Bench(book, policy=DAY)
    bench.runs, bench.sharing = {NAMES[0]: [CANDIDATE]}, {NAMES[0]: "little"}
    assert bench.run() == ["write train-0 candidate"]
    bench.runs, book.around[NAMES[0]], book.refuse[NAMES[0]] = {NAMES[0]: [5.0]}, SERVES, "foreign"
    assert bench.run() == ["withdraw train-0", "write train-0 sharing-candidate"]
    assert book.marks == {}


def test_idle_holders_are_marked_before_sharing_candidates() -> None:
    book = Book()
    bench = Bench(book, policy=DAY)
    servers = [HolderName("kubernetes", f"ns-{i}", "server") for i in range(30)]
    bench.runs = {name: [5.0] for name in servers} | {NAMES[0]: [CANDIDATE]}
    book.around = dict.fromkeys(servers, SERVES)
    bench.sharing = dict.fromkeys(servers, "little")
    assert bench.run()[0] == "write train-0 candidate"


def test_a_notebook_is_underused_after_its_longer_window() -> None:
    around = Surroundings(kind="interactive")
    assert decided([[POLICY.interactive_after]], around)[0].stage == "underused"
    late = decided([[POLICY.interactive_after]], around)[0]
    assert late.needed_s == POLICY.interactive_after, "its container must have run for this time too"


def test_a_member_that_cannot_work_now_keeps_its_gang_waiting() -> None:
    holders = [holder(name, IDLE) for name in NAMES]
    (unit,) = holders[2].units
    holders[2] = holders[2]._replace(units=(unit._replace(idle_run_s=None, obstacle="not_started"),))
    evidence = Evidence(WALL, tuple(holders))
    around: dict[HolderName, Surroundings | Unreadable] = dict.fromkeys(NAMES, gang())
    decisions = settle(evidence, decide(evidence, POLICY), around, Rulebook(POLICY))
    assert [decision.stage for decision in decisions] == ["waiting", "waiting", "not_running", "waiting"]
    assert "but member ml/train-2 of batch/v1/Job/train: its container has not started" in decisions[0].reason


@pytest.mark.parametrize(("run_s", "stage"), [(POLICY.waiting_max - 1, "waiting"), (POLICY.waiting_max, "candidate")])
def test_a_gang_that_waits_for_ever_becomes_candidate_and_no_higher_stage(run_s: float, stage: str) -> None:
    """The gang asks for 99 members, so it is never complete."""
    holders = [holder(name, [run_s]) for name in NAMES]
    evidence = Evidence(WALL, tuple(holders))
    around: dict[HolderName, Surroundings | Unreadable] = dict.fromkeys(NAMES, gang()._replace(missing=95))
    decisions = settle(evidence, decide(evidence, POLICY), around, Rulebook(POLICY))
    assert {decision.stage for decision in decisions} == {stage}
    assert "still waits for 95 members" in decisions[0].reason
    if stage == "candidate":
        assert why_spared(decisions[0]) == "waiting", "it keeps its GPUs for the same reason as before"


def test_idle_gpus_that_stay_with_their_holder_are_counted_by_reason_and_tenant() -> None:
    telemetry = Telemetry()
    holders = [holder(name, [UNDERUSED]) for name in NAMES]
    evidence = Evidence(WALL, tuple(holders))
    around: dict[HolderName, Surroundings | Unreadable] = {
        NAMES[0]: Surroundings(kind="serving", kind_why="Service/web"),
        NAMES[1]: Surroundings(kind="batch", ceiling="do-not-disrupt"),
        NAMES[2]: Unreadable("Pipeline/x cannot be read", reason="forbidden", kind="Pipeline"),
        NAMES[3]: Surroundings(kind="batch"),
    }
    decisions = settle(evidence, decide(evidence, POLICY), around, Rulebook(POLICY))
    telemetry.note_spared([decisions[3]], "beside")
    telemetry.note_cycle(0.0, True, {NAMES[3]: "underused"}, decisions)
    value = telemetry.registry.get_sample_value
    for reason in ("serving", "capped", "unknown", "beside"):
        assert value("gpu_reconciler_spared_gpus", {"reason": reason, "tenant": "ml"}) == 1, reason
    telemetry.note_cycle(0.0, True, {}, [])
    assert value("gpu_reconciler_spared_gpus", {"reason": "beside", "tenant": "ml"}) is None


def test_holders_whose_controllers_cannot_be_read_are_counted_by_reason_and_kind() -> None:
    book = Book()
    bench = Bench(book)
    telemetry = Telemetry(bench.clock)
    runs = ApplyRuns(bench.cycle, telemetry, bench.clock)
    book.around[NAMES[0]] = Unreadable("Pipeline/x cannot be read", reason="forbidden", kind="Pipeline")
    bench.runs = {name: [UNDERUSED] for name in NAMES}
    runs.run()
    value = telemetry.registry.get_sample_value
    assert value("gpu_reconciler_unreadable", {"reason": "forbidden", "kind": "Pipeline"}) == 1
    assert value("gpu_reconciler_surveyed") == len(NAMES)
    book.around.clear()
    runs.run()
    assert value("gpu_reconciler_unreadable", {"reason": "forbidden", "kind": "Pipeline"}) is None


def test_if_one_member_of_a_gang_is_exempt_all_members_are_exempt() -> None:
    evidence = evidence_of([IDLE] * 4)
    around: dict[HolderName, Surroundings | Unreadable] = dict.fromkeys(NAMES, gang())
    around[NAMES[2]] = gang()._replace(exemption=Exemption("pod", "pod train-2 is exempt until noon"))
    decisions = settle(evidence, decide(evidence, POLICY), around, Rulebook(POLICY))
    assert [decision.stage for decision in decisions] == ["exempt"] * 4
    assert "member ml/train-2 of batch/v1/Job/train" in decisions[0].reason


RUNS = st.none() | st.lists(st.sampled_from([0.0, 5.0, CANDIDATE, UNDERUSED, float("nan")]), min_size=1, max_size=2)
AROUND = st.sampled_from(
    [
        gang(),
        gang(waits="is Pending"),
        gang(missing=1),
        Surroundings(),
        Surroundings(ceiling="x"),
        Surroundings(kind="interactive"),
        Surroundings(kind="serving"),
        Unreadable("x"),
    ]
)


@given(st.lists(RUNS, min_size=4, max_size=4), st.lists(AROUND, min_size=4, max_size=4))
def test_no_surroundings_raise_a_stage_and_no_member_is_underused_while_another_works(
    runs: list[list[float] | None], arounds: list[Surroundings | Unreadable]
) -> None:
    evidence = evidence_of(runs)
    alone = decide(evidence, POLICY)
    around = dict(zip(NAMES, arounds, strict=True))
    settled = {decision.name: decision for decision in settle(evidence, alone, around, Rulebook(POLICY))}
    for before in alone:
        after = settled[before.name]
        if after.stage in LABELLED:
            assert before.stage in LABELLED
            assert ORDER.index(after.stage) <= ORDER.index(before.stage)
        mine = around[before.name]
        if after.stage == "underused" and isinstance(mine, Surroundings):
            for member in mine.members:
                its = runs[NAMES.index(member.name)]
                assert its is not None and len(its) == 1 and its[0] >= POLICY.underused_after


def test_a_gang_with_a_member_that_begins_to_work_loses_all_its_marks_in_that_cycle() -> None:
    book = Book()
    bench = Bench(book)
    book.around = dict.fromkeys(NAMES, gang())
    bench.runs = dict.fromkeys(NAMES, IDLE)
    assert sorted(bench.run()) == [f"write train-{i} underused" for i in range(4)]
    bench.runs[NAMES[1]] = [3.0]
    calls = bench.run()
    assert [call for call in calls if call.startswith("withdraw")] == [f"withdraw train-{i}" for i in range(4)]
    assert bench.run() == []
    assert book.marks == {name: "partial" for name in NAMES if name != NAMES[1]}


def test_members_that_work_are_asked_for_although_the_source_lists_only_idle_holders() -> None:
    book = Book()
    bench = Bench(book)
    book.around = dict.fromkeys(NAMES, gang())
    bench.only_asked = True  # as PromQL: idle holders, and those that are asked for
    bench.runs = {**dict.fromkeys(NAMES, IDLE), NAMES[3]: [3.0]}
    bench.run()
    assert book.marks == dict.fromkeys(NAMES[:3], "partial"), (
        "in the first cycle, since the source is asked again at once"
    )
    assert set(bench.asked) == set(NAMES)
    reads = bench.reads
    bench.run()
    assert (bench.reads - reads, set(bench.asked)) == (1, set(NAMES))


def test_only_holders_that_are_about_to_rise_are_surveyed_again() -> None:
    book = Book()
    bench = Bench(book)
    a, b = NAMES[:2]
    bench.runs = {a: [CANDIDATE], b: [UNDERUSED]}
    bench.run()
    assert book.surveyed == [([a, b], []), ([a, b], [a, b])]
    book.surveyed.clear()
    bench.run()
    assert book.surveyed == [([a, b], [])]
    bench.runs[a] = [UNDERUSED]
    book.surveyed.clear()
    bench.run()
    assert book.surveyed == [([a, b], []), ([a, b], [a])]


def test_an_existing_mark_is_checked_against_the_longer_window_of_its_class() -> None:
    """The container was restarted within this window. Before its restart it could not work."""
    book = Book()
    bench = Bench(book)
    a, window_s = NAMES[0], POLICY.interactive_after
    book.around[a], bench.runs = Surroundings(kind="interactive"), {a: [window_s + 1]}
    book.able_s[a] = window_s
    assert bench.run() == ["write train-0 underused"]
    book.able_s[a] = window_s - 1
    assert bench.run() == ["withdraw train-0"]


def test_active_brakes_and_exempt_gpus_are_published() -> None:
    book = Book()
    bench = Bench(book)
    telemetry = Telemetry(bench.clock)
    runs = ApplyRuns(bench.cycle, telemetry, bench.clock)
    value = telemetry.registry.get_sample_value
    book.around[NAMES[0]] = Surroundings(exemption=Exemption("owner", "Job/train is exempt until noon"))
    bench.runs = {NAMES[0]: [UNDERUSED, UNDERUSED], NAMES[1]: [UNDERUSED]}
    runs.run()
    assert value("gpu_reconciler_exempt", {"source": "owner"}) == 2
    assert value("gpu_reconciler_exempt", {"source": "job"}) == 0
    assert value("gpu_reconciler_frozen", {"reason": "source"}) == 0
    bench.error = "Prometheus is down"
    runs.run()
    assert value("gpu_reconciler_frozen", {"reason": "source"}) == 1
    assert value("gpu_reconciler_frozen", {"reason": "correlated"}) == 0


def test_explain_names_group_class_windows_and_how_to_keep_the_gpus() -> None:
    text = explain(decided([IDLE] * 4, gang()._replace(kind="interactive", kind_why="label notebook-name"))[0], POLICY)
    assert "underused after 4h" in text
    assert "  class interactive, by label notebook-name; part of batch/v1/Job/train, 4 members with GPUs\n" in text
    assert "  to keep its GPUs: the annotation gpu-exporter.io/exempt-until" in text
    working = explain(decided([[5.0]], Surroundings())[0], POLICY)
    assert "to keep" not in working and "class" not in working


H = 3600.0


@pytest.mark.parametrize(
    ("gap_h", "run_h", "stage"),
    [
        (0.0, 2.1, "underused"),
        (0.9, 2.1, "underused"),  # twice this gap is less than the usual window
        (1.5, 2.1, "candidate"),
        (1.5, 3.1, "underused"),
        (20.0, 11.9, "candidate"),
        (20.0, 12.1, "underused"),  # policy.gap_max
    ],
)
def test_a_holder_that_worked_again_after_a_gap_is_underused_after_twice_this_gap(
    gap_h: float, run_h: float, stage: str
) -> None:
    seen = holder(NAMES[0], [run_h * H, run_h * H])
    units = (seen.units[0]._replace(longest_gap_s=gap_h * H), seen.units[1])
    evidence = Evidence(WALL, (seen._replace(units=units),))
    for around in ({}, {NAMES[0]: Surroundings(kind="batch")}):
        (decision,) = settle(evidence, decide(evidence, POLICY), around, Rulebook(POLICY))
        assert decision.stage == stage, decision.reason
        said = "it once worked again after 1h30m or more, so it becomes underused only after 3h of idle time"
        assert (said in decision.reason) == (stage == "candidate" and gap_h == 1.5)


def test_the_reason_does_not_name_a_past_gap_when_only_work_on_the_host_delays_the_holder() -> None:
    seen = holder(NAMES[0], [3.5 * H])
    unit = seen.units[0]._replace(longest_gap_s=1.5 * H, host_cpu_ratio=0.9)
    evidence = Evidence(WALL, (seen._replace(units=(unit,)),))
    (decision,) = settle(evidence, decide(evidence, POLICY), {}, Rulebook(POLICY))
    assert decision.stage == "candidate"
    assert (
        decision.reason
        == "its one GPU idle for 3.5 h, but the holder uses 90% of its CPUs, so it stays a candidate until it has been idle for 6.0 h"
    )


@given(
    idle_h=st.floats(0.5, 30.0),
    ratio=st.floats(0.0, 1.0),
    cpus=st.floats(0.5, 512.0),
    kind=st.sampled_from(CLASSES),
    idle_after_h=st.sampled_from([0.0, 5.0]),
)
def test_one_busy_cpu_core_delays_only_interactive_holders_and_only_for_a_time(
    idle_h: float, ratio: float, cpus: float, kind: str, idle_after_h: float
) -> None:
    seen = holder(NAMES[0], [idle_h * H])
    cores = ratio * cpus if ratio * cpus >= CORE else None
    works = seen.units[0]._replace(host_cpu_ratio=ratio, host_cores=cores, host_cpus=cpus, start_wall=WALL - 40 * H)

    def stage(unit: UnitEvidence) -> Decision:
        evidence = Evidence(WALL, (seen._replace(units=(unit,)),))
        around = {NAMES[0]: Surroundings(kind=kind, idle_after_s=idle_after_h * H)}
        (decision,) = settle(evidence, decide(evidence, POLICY), around, Rulebook(POLICY))
        return decision

    found, quiet = stage(works), stage(works._replace(host_cpu_ratio=None, host_cores=None, host_cpus=None))
    counts = ratio > POLICY.host_busy_ratio or (kind == "interactive" and cores is not None)
    is_delayed = quiet.stage == "underused" and counts and idle_h * H < POLICY.host_delay_max
    assert found.stage == ("candidate" if is_delayed else quiet.stage)
    if cores is not None and found.stage in ("candidate", "underused"):
        assert f"uses {cores:.1f} of its {cpus:.3g} CPU cores" in found.reason


def test_a_notebook_that_computes_in_one_thread_is_told_so_and_stays_a_candidate() -> None:
    seen = holder(NAMES[0], [4.5 * H])
    unit = seen.units[0]._replace(host_cpu_ratio=0.0625, host_cores=1.0, host_cpus=16.0)
    said = {}
    for kind in ("interactive", "batch"):
        evidence = Evidence(WALL, (seen._replace(units=(unit,)),))
        around = {NAMES[0]: Surroundings(kind=kind)}
        (decision,) = settle(evidence, decide(evidence, POLICY), around, Rulebook(POLICY))
        said[kind] = (decision.stage, decision.reason)
    assert said == {
        "interactive": (
            "candidate",
            "its one GPU idle for 4.5 h, but the holder uses 1.0 of its 16 CPU cores, so it stays a candidate until it has been idle for 6.0 h",
        ),
        "batch": ("underused", "its one GPU idle for 4.5 h; the holder uses 1.0 of its 16 CPU cores"),
    }


def test_the_longest_window_of_wish_class_and_gap_counts() -> None:
    seen = holder(NAMES[0], [5 * H])
    evidence = Evidence(WALL, (seen._replace(units=(seen.units[0]._replace(longest_gap_s=3 * H),)),))
    around = {NAMES[0]: Surroundings(kind="interactive")}
    (decision,) = settle(evidence, decide(evidence, POLICY), around, Rulebook(POLICY))
    assert (decision.stage, decision.windows and decision.windows.underused_s) == ("candidate", 6 * H)
    wish = around[NAMES[0]]._replace(idle_after_s=4 * H)
    (decision,) = settle(evidence, decide(evidence, POLICY), {NAMES[0]: wish}, Rulebook(POLICY))
    assert decision.windows == (4 * H, 6 * H, CORE)
    assert (
        "it once worked again after 3h or more, so it becomes underused only after 6h of idle time" in decision.reason
    )
    short = evidence.holders[0]._replace(units=(evidence.holders[0].units[0]._replace(longest_gap_s=1.5 * H),))
    evidence = Evidence(WALL, (short._replace(units=tuple(u._replace(idle_run_s=3.5 * H) for u in short.units)),))
    (decision,) = settle(evidence, decide(evidence, POLICY), around, Rulebook(POLICY))
    assert (decision.stage, "its limit is" in decision.reason) == ("candidate", False), "its class asks for 4 h"


def test_every_member_of_a_large_gang_is_checked_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """If every member checked all others, there would be a million checks."""
    names = [HolderName("kubernetes", "ml", f"train-{i:04d}") for i in range(1000)]
    members = tuple(Member(name, "uid", 1) for name in names)
    around = dict.fromkeys(names, Surroundings("batch/v1/Job/train", members, kind="batch"))
    evidence = Evidence(WALL, tuple(holder(name, IDLE) for name in names))
    looks: list[Member] = []
    unknown = settle_module._unknown

    def counted(member: Member, decision: Decision | None) -> str:
        looks.append(member)
        return unknown(member, decision)

    monkeypatch.setattr(settle_module, "_unknown", counted)
    decisions = settle(evidence, decide(evidence, POLICY), around, Rulebook(POLICY))
    assert {decision.stage for decision in decisions} == {"underused"}
    assert len(looks) == len(names)
