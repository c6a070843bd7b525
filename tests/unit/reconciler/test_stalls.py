"""Gangs without progress: one stalled member, and what every other member must show."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
from prometheus_client import CollectorRegistry
from tests.testbed.marker_book import Book

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.reconciler.decision.policy import decide
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.stalls import with_stalls
from gpu_exporter.reconciler.decision.surroundings import SERVING, Member, Surroundings, Unreadable
from gpu_exporter.reconciler.evidence.records import Evidence, HolderEvidence, HolderName, PublishedCause, UnitEvidence
from gpu_exporter.reconciler.judge import judge_of
from gpu_exporter.reconciler.series import Stages

NOW = 1_800_000_000.0
Unit = tuple[float | None, float | None]  # idle run and stall, in seconds
STALL: Unit = (0.0, 1320.0)
REST: Unit = (1300.0, 0.0)
WORK: Unit = (0.0, 0.0)
UNKNOWN: Unit = (None, None)
LOW: Unit = (0.0, None)  # a run of low confidence


def pod(name: str, *units: Unit, held: int | None = None, age_s: float = 5.0, **host: float) -> HolderEvidence:
    found = tuple(
        UnitEvidence(
            f"node-{name}",
            str(gpu),
            f"GPU-{name}-{gpu}",
            "",
            NOW - 9000,
            idle,
            age_s,
            1.0,
            3,
            stalled_run_s=stall,
            **host,
        )
        for gpu, (idle, stall) in enumerate(units)
    )
    return HolderEvidence(HolderName("kubernetes", "ml", name), "", found, len(units) if held is None else held)


def judge(*pods: HolderEvidence, around: Surroundings | Unreadable | None = None) -> list[tuple[str, str]]:
    """Stall and reason of each pod. All pods are one gang."""
    members = tuple(Member(each.name, "", each.held) for each in pods)
    its = around or (Surroundings("batch/v1/Job/train", members) if len(pods) > 1 else None)
    evidence = Evidence(NOW, pods)
    surroundings = {} if its is None else {each.name: its for each in pods}
    decided = with_stalls(evidence, decide(evidence, Policy()), surroundings, Policy())
    return [(each.stall, each.stall_why) for each in decided]


def stalls(found: Sequence[tuple[str, str]]) -> list[str]:
    return [stall for stall, _ in found]


def test_one_stalled_member_and_others_at_rest_are_a_stalled_gang_and_the_late_come_first() -> None:
    found = judge(pod("a", STALL, STALL), pod("b", REST, STALL))
    assert stalls(found) == ["stalled", "stalled"]
    late = "GPU 0 on node-b at 0 %, so the others may wait for it; "
    assert found[0][1] == f"{late}3 of 4 GPUs have stalled, the longest for 22m"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (pod("b", WORK), "ml/b works on GPU 0 of node-b"),
        (pod("b", (3.0, 0.0)), "ml/b works on GPU 0 of node-b"),
        (pod("b", WORK, age_s=500.0), "ml/b works on GPU 0 of node-b"),
        (pod("b", REST, host_io_bytes_per_s=3e7), "ml/b works on the host of its GPU 0 (30 MB/s of its disks)"),
        (pod("b", REST, host_cpu_ratio=0.5), "ml/b works on the host of its GPU 0 (50% of its CPUs)"),
    ],
)
def test_one_member_that_works_is_enough_against_it(other: HolderEvidence, why: str) -> None:
    found = judge(pod("a", STALL, STALL, STALL), other)
    assert stalls(found) == ["", ""]
    assert why in found[0][1]


@pytest.mark.parametrize(
    ("cause", "confidence", "stall"),
    [("lost_rank", "high", "stalled"), ("lost_rank", "medium", ""), ("late_rank", "high", "")],
)
def test_five_minutes_at_rest_are_enough_if_a_member_of_the_gang_cannot_go_on(
    cause: str, confidence: str, stall: str
) -> None:
    proven = pod("a", STALL)
    proven = proven._replace(units=(proven.units[0]._replace(causes=(PublishedCause(cause, confidence),)),))
    assert stalls(judge(proven, pod("b", (400.0, 0.0)))) == [stall, stall]


def test_the_processes_of_a_stalled_gpu_are_no_work_on_the_host_of_a_gpu_at_rest_beside_it() -> None:
    """A process that hangs in a collective keeps a CPU busy."""
    ((stall, why),) = judge(pod("a", STALL, REST, host_cpu_ratio=0.4))
    assert (stall, "GPU 1 on node-a at 0 %" in why) == ("stalled", True)


@pytest.mark.parametrize("host", [{"host_cpu_ratio": 0.97}, {"host_io_bytes_per_s": 3e7}])
def test_more_than_processes_that_spin_need_is_work_beside_a_stalled_gpu_too(host: dict[str, float]) -> None:
    ((stall, why),) = judge(pod("a", STALL, REST, **host))
    assert (stall, "the stalled GPUs may wait for that work" in why) == ("", True)


@pytest.mark.parametrize("other", [UNKNOWN, LOW])
@pytest.mark.parametrize(("stalled", "stall"), [(4, "stalled"), (3, "unknown")])
def test_a_fifth_of_a_gang_may_be_unknown(other: Unit, stalled: int, stall: str) -> None:
    assert stalls(judge(pod("a", *[STALL] * stalled), pod("b", other))) == [stall, stall]


@pytest.mark.parametrize(
    "other",
    [pod("b", STALL, age_s=500.0), pod("b", STALL, held=4)],
    ids=["stale", "more-held-than-seen"],
)
def test_what_is_not_seen_is_unknown(other: HolderEvidence) -> None:
    assert stalls(judge(pod("a", STALL), other))[0] == "unknown"


def test_a_member_without_evidence_counts_with_its_gpus() -> None:
    seen = pod("a", *[STALL] * 4)
    members = (Member(seen.name, "", 4), Member(HolderName("kubernetes", "ml", "b"), "", 8))
    assert stalls(judge(seen, around=Surroundings("group", members))) == ["unknown"]


def test_a_server_is_spinning() -> None:
    found = judge(pod("a", STALL), around=Surroundings(kind=SERVING, kind_why="Service chat"))
    assert found[0][0] == "spinning" and "Service chat" in found[0][1]


def test_an_unreadable_gang_is_unknown_and_only_where_a_gpu_is_stalled() -> None:
    lost = Unreadable("the API server does not answer")
    assert judge(pod("a", STALL), around=lost) == [("unknown", lost.why)]
    assert judge(pod("a", WORK), around=lost) == [("", "")]


def test_a_stall_changes_no_stage_and_is_published_beside_it() -> None:
    gang = (pod("a", STALL), pod("b", REST))
    evidence = Evidence(NOW, gang)
    decided = decide(evidence, Policy())
    members = tuple(Member(each.name, "", each.held) for each in gang)
    around = {each.name: Surroundings("group", members) for each in gang}
    found = with_stalls(evidence, decided, around, Policy())
    assert [each.stage for each in found] == [each.stage for each in decided]
    series = Stages(CollectorRegistry())
    series.note(found)
    (family,) = series.stages.collect()
    assert {(s.labels["pod"], s.labels["stage"]) for s in family.samples} == {("a", "stalled"), ("b", "stalled")}


def test_a_gang_that_may_be_stalled_is_not_published() -> None:
    gang = (pod("a", STALL), pod("b", UNKNOWN))
    evidence = Evidence(NOW, gang)
    around = Surroundings("group", tuple(Member(each.name, "", each.held) for each in gang))
    found = with_stalls(evidence, decide(evidence, Policy()), {each.name: around for each in gang}, Policy())
    assert [each.stall for each in found] == ["unknown", "unknown"]
    series = Stages(CollectorRegistry())
    series.note(found)
    (family,) = series.stages.collect()
    assert family.samples == []


class Source:
    """A source with fixed evidence."""

    def __init__(self, *pods: HolderEvidence) -> None:
        self._evidence = Evidence(NOW, pods)

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        return self._evidence

    def read_holders(self, names: Collection[HolderName]) -> Evidence:
        return self._evidence


@pytest.mark.parametrize(("other", "stall"), [(REST, "stalled"), (WORK, "")])
def test_the_gang_of_a_stalled_holder_is_read_although_no_member_is_idle_for_long(other: Unit, stall: str) -> None:
    gang, book = (pod("a", STALL), pod("b", other)), Book()
    around = Surroundings("group", tuple(Member(each.name, "", each.held) for each in gang))
    book.around = {each.name: around for each in gang}
    first = judge_of(Source(*gang), [book], Rulebook(Policy())).judge().decisions[0]
    assert (first.name, first.stage, first.stall) == (gang[0].name, "active", stall)
    assert book.surveyed == [([gang[0].name], [])]
