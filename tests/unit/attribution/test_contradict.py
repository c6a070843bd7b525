"""The result of processes for a mapping: confirmed, contradicted, or neither."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.attribution.contradict import ProcessNet, Relation, relate
from gpu_exporter.agent.attribution.resolve import Resolution
from gpu_exporter.common.cgroup import ProcessOwner
from gpu_exporter.common.model.holders import Allocation, Grant, Holder, HolderKey
from gpu_exporter.common.model.units import UnitId

A, B, C = (UnitId(f"GPU-{name}") for name in "abc")
PLACES = {A: "gpu 0", B: "gpu 1", C: "gpu 2"}
UID = {name: f"{name * 8}-0000-4000-8000-000000000000" for name in "123"}
HASH = "eab5a3348cf1d0f9a6f1a3c5a7b2d4e6"
SYSTEM, CONTAINER, LOGIN = ProcessOwner(), ProcessOwner(container="f" * 64), ProcessOwner(login=True)


def pod(name: str, uid: str = "", container: str = "main") -> Holder:
    return Holder(
        HolderKey("kubernetes", f"{uid or name}/{container}"),
        namespace="ml",
        pod=name,
        container=container,
        pod_uid=uid,
        source="kubelet",
    )


def job(number: str) -> Holder:
    return Holder(HolderKey("slurm", f"lab/{number}/0/1"), job_id=number, source="slurm")


def of_job(number: str, **more: str) -> ProcessOwner:
    return ProcessOwner(slurm=True, job=number, **more)


def of_pod(*uids: str) -> ProcessOwner:
    return ProcessOwner(pods=uids, container="f" * 64)


def resolved(*pairs: tuple[UnitId, Holder], unresolved: tuple[Holder, ...] = ()) -> Resolution:
    return Resolution(
        [(Allocation(unit, holder), Grant("uuid", unit.uuid, holder)) for unit, holder in pairs],
        [(Grant("index", "9", holder), "not proven") for holder in unresolved],
        [],
    )


def texts(resolution: Resolution) -> list[str]:
    return [allocation.contradiction for allocation, _ in resolution.allocations]


@pytest.mark.parametrize(
    ("holder", "owner", "relation"),
    [
        (job("42"), of_job("42", step="0"), "own"),
        (job("42"), of_job("43"), "other"),
        (job("42"), ProcessOwner(slurm=True), "unknown"),
        (job("42"), of_pod(UID["1"]), "other"),
        (job("42"), ProcessOwner((UID["1"],), slurm=True, job="42"), "own"),
        (job("3010_1"), of_job("3011"), "unknown"),
        (job("42"), SYSTEM, "unknown"),
        (job("42"), CONTAINER, "unknown"),
        (job("42"), LOGIN, "unknown"),
        (pod("a", UID["1"]), of_pod(UID["1"]), "own"),
        (pod("a", UID["1"], "sidecar"), of_pod(UID["1"]), "own"),
        (pod("a", UID["1"]), of_pod(UID["2"]), "other"),
        (pod("a", UID["1"]), of_pod(UID["1"], UID["2"]), "own"),
        (pod("a", UID["1"]), of_pod(UID["2"], UID["1"]), "own"),
        (pod("a"), of_pod(UID["2"]), "unknown"),
        (pod("a", HASH), of_pod(HASH), "own"),
        (pod("a", UID["1"]), of_pod(HASH), "unknown"),
        (pod("a", HASH), of_pod(UID["1"]), "unknown"),
        (pod("a", UID["1"]), of_job("42"), "other"),
        (pod("a", UID["1"]), ProcessOwner(slurm=True), "other"),
        (pod("a"), of_job("42"), "other"),
        (pod("a", UID["1"]), SYSTEM, "unknown"),
        (pod("a", UID["1"]), CONTAINER, "unknown"),
        (pod("a", UID["1"]), LOGIN, "unknown"),
    ],
)
def test_a_process_is_other_only_if_it_is_proven_to_belong_to_another_holder(
    holder: Holder, owner: ProcessOwner, relation: Relation
) -> None:
    assert relate(holder, owner) == relation


def test_processes_of_another_job_contradict_and_count_for_the_source_of_the_grant() -> None:
    net = ProcessNet()
    checked = net.check(resolved((A, job("42")), (B, job("44"))), {A: [of_job("43")], B: [of_job("44")]}, PLACES)
    assert texts(checked) == ["processes of job 43 run here, but slurm reports job 42", ""]
    assert [grant.holder.job_id for grant in checked.conflicts] == ["42"]


def test_pods_have_their_name_if_a_source_knows_them_and_otherwise_their_uid() -> None:
    mapping = resolved((A, pod("trainer-0", UID["1"])), (B, pod("trainer-1", UID["2"])))
    swapped = {A: [of_pod(UID["2"])], B: [of_pod(UID["3"]), of_pod(UID["2"])]}
    assert texts(ProcessNet().check(mapping, swapped, PLACES)) == [
        "processes of pod ml/trainer-1 run here, but kubelet reports pod ml/trainer-0",
        f"processes of pod {UID['3']} run here, but kubelet reports pod ml/trainer-1",
    ]


@pytest.mark.parametrize(("count", "more"), [(3, ""), (4, " and 1 more"), (6, " and 3 more")])
def test_a_long_list_of_owners_is_shortened(count: int, more: str) -> None:
    many = {A: [of_job(str(50 + number)) for number in range(count)]}
    (text,) = texts(ProcessNet().check(resolved((A, job("42"))), many, PLACES))
    assert text == f"processes of job 50, job 51, job 52{more} run here, but slurm reports job 42"


@pytest.mark.parametrize(
    "seen", [[SYSTEM], [CONTAINER], [ProcessOwner(slurm=True)], [], [of_job("42"), SYSTEM, CONTAINER]]
)
def test_processes_that_may_be_the_holders_contradict_nothing(seen: list[ProcessOwner]) -> None:
    checked = ProcessNet().check(resolved((A, job("42"))), {A: seen}, PLACES)
    assert (texts(checked), checked.conflicts) == ([""], [])


def test_holders_that_share_a_unit_do_not_contradict_each_other() -> None:
    mapping = resolved((A, pod("a", UID["1"])), (A, pod("b", UID["2"])))
    assert texts(ProcessNet().check(mapping, {A: [of_pod(UID["1"]), of_pod(UID["2"])]}, PLACES)) == ["", ""]
    both = texts(ProcessNet().check(mapping, {A: [of_pod(UID["1"]), of_pod(UID["3"])]}, PLACES))
    assert both == [
        f"processes of pod {UID['3']} run here, but kubelet reports pod ml/a",
        f"processes of pod {UID['3']} run here, but kubelet reports pod ml/b",
    ]


def test_one_foreign_process_among_the_holders_own_contradicts() -> None:
    assert texts(ProcessNet().check(resolved((A, job("42"))), {A: [of_job("42"), of_job("43")]}, PLACES)) != [""]


def test_a_holder_that_works_on_another_unit_is_not_idle_on_its_own_unit() -> None:
    """A renumbered GPU: Slurm reports that job 42 holds gpu 1, but the job works on gpu 0, which has no holder."""
    net = ProcessNet()
    checked = net.check(resolved((B, job("42"))), {A: [of_job("42")]}, PLACES)
    assert texts(checked) == ["processes of job 42 run on gpu 0, which slurm did not allocate to it"]
    assert len(checked.conflicts) == 1
    assert net.in_use == {A: "in use by job 42, but slurm did not allocate it to job 42"}


@pytest.mark.parametrize("elsewhere", [UnitId("GPU-x"), UnitId("GPU-a", "MIG-x")])
def test_a_unit_without_a_name_for_people_is_named_by_its_uuid(elsewhere: UnitId) -> None:
    checked = ProcessNet().check(resolved((B, job("42"))), {elsewhere: [of_job("42")]}, PLACES)
    uuid = elsewhere.mig_uuid or elsewhere.uuid
    assert texts(checked) == [f"processes of job 42 run on {uuid}, which slurm did not allocate to it"]


def test_the_text_names_each_source_that_knows_a_user_of_a_free_unit() -> None:
    net = ProcessNet()
    assert net.in_use == {}
    mapping = resolved((A, job("42")), (B, pod("a", UID["1"])))
    net.check(mapping, {A: [of_job("42")], B: [of_pod(UID["1"])], C: [of_job("42"), of_pod(UID["1"])]}, PLACES)
    assert net.in_use == {
        C: "in use by job 42, pod ml/a, but kubelet and slurm did not allocate it to job 42, pod ml/a"
    }


def test_a_holder_that_works_on_its_own_unit_is_confirmed_even_if_it_works_elsewhere_too() -> None:
    mapping = resolved((A, job("42")), (B, job("42")))
    assert texts(ProcessNet().check(mapping, {A: [of_job("42")], C: [of_job("42")]}, PLACES)) == [
        "",
        "processes of job 42 run on gpu 2, which slurm did not allocate to it",
    ]


def test_a_holder_with_an_unresolved_grant_is_not_contradicted_by_its_work_elsewhere() -> None:
    mapping = resolved((A, job("42")), unresolved=(job("42"),))
    net = ProcessNet()
    assert texts(net.check(mapping, {B: [of_job("42")]}, PLACES)) == [""]
    assert net.in_use == {B: "in use by job 42, but slurm did not allocate it to job 42"}


def test_a_pod_with_two_containers_holds_the_units_of_both() -> None:
    mapping = resolved((A, pod("a", UID["1"], "one")), (B, pod("a", UID["1"], "two")))
    assert texts(ProcessNet().check(mapping, {A: [of_pod(UID["1"])]}, PLACES)) == ["", ""]


def test_a_contradiction_remains_until_only_the_holders_own_processes_are_seen() -> None:
    net, mapping = ProcessNet(), resolved((A, job("42")))
    assert texts(net.check(mapping, {A: [of_job("43")]}, PLACES)) == [
        "processes of job 43 run here, but slurm reports job 42"
    ]
    past = ["processes of job 43 ran here, but slurm reports job 42"]
    for seen in ({}, {A: []}, {A: [SYSTEM]}, {A: [ProcessOwner(slurm=True)]}, {B: [of_job("43")]}):
        checked = net.check(mapping, seen, PLACES)
        assert texts(checked) == past
        assert len(checked.conflicts) == 1
    assert texts(net.check(mapping, {A: [of_job("42"), of_job("43")]}, PLACES)) != [""]
    assert texts(net.check(mapping, {A: [of_job("42")]}, PLACES)) == [""]
    assert texts(net.check(mapping, {}, PLACES)) == [""]


def test_work_elsewhere_is_remembered_as_a_contradiction() -> None:
    net, mapping = ProcessNet(), resolved((B, job("42")))
    net.check(mapping, {A: [of_job("42")]}, PLACES)
    assert texts(net.check(mapping, {}, PLACES)) == [
        "processes of job 42 ran on gpu 0, which slurm did not allocate to it"
    ]
    assert texts(net.check(mapping, {B: [of_job("42")]}, PLACES)) == [""]


def test_a_new_holder_starts_without_the_contradictions_of_the_previous_holder() -> None:
    net = ProcessNet()
    net.check(resolved((A, job("42"))), {A: [of_job("43")]}, PLACES)
    assert texts(net.check(resolved((A, job("44"))), {}, PLACES)) == [""]


HIDDEN = job("")._replace(identity="hidden")


@pytest.mark.parametrize(
    ("previous", "left"),
    [(job("41"), of_job("41")), (pod("a", UID["1"]), of_pod(UID["1"]))],
    ids=["job", "pod"],
)
@pytest.mark.parametrize(
    "between",
    [(), ((B, job("44")),), ((A, pod("static")),), ((A, HIDDEN),)],
    ids=["at-once", "after-a-pause", "after-a-pod-known-by-name", "after-a-hidden-job"],
)
def test_processes_left_by_the_previous_holder_contradict_only_while_they_run(
    previous: Holder, left: ProcessOwner, between: tuple[tuple[UnitId, Holder], ...]
) -> None:
    net = ProcessNet()
    net.check(resolved((A, previous)), {A: [left]}, PLACES)
    if between:
        net.check(resolved(*between), {}, PLACES)
    mapping = resolved((A, job("42")))
    (text,) = texts(net.check(mapping, {A: [left]}, PLACES))
    assert text.endswith(" run here, but slurm reports job 42")
    assert texts(net.check(mapping, {}, PLACES)) == [""]


def test_processes_of_a_job_without_a_number_do_not_count_as_left_by_a_hidden_holder() -> None:
    net, mapping = ProcessNet(), resolved((A, pod("a", UID["1"])))
    net.check(resolved((A, HIDDEN)), {}, PLACES)
    net.check(mapping, {A: [ProcessOwner(slurm=True)]}, PLACES)
    assert texts(net.check(mapping, {}, PLACES)) == [
        "processes of a Slurm job whose id is unknown ran here, but kubelet reports pod ml/a"
    ]


def test_processes_of_a_previous_holder_that_still_holds_a_unit_are_not_leftovers() -> None:
    net = ProcessNet()
    net.check(resolved((A, job("41"))), {}, PLACES)
    mapping = resolved((A, job("42")), (B, job("41")))
    net.check(mapping, {A: [of_job("41")]}, PLACES)
    assert "" not in texts(net.check(mapping, {}, PLACES))


def test_leftover_processes_do_not_excuse_processes_of_a_stranger() -> None:
    net = ProcessNet()
    net.check(resolved((A, job("41"))), {}, PLACES)
    net.check(resolved((A, job("42"))), {A: [of_job("41"), of_job("43")]}, PLACES)
    assert texts(net.check(resolved((A, job("42"))), {}, PLACES)) != [""]


@pytest.mark.parametrize(
    ("owner", "text"),
    [
        (of_job("43"), "in use by job 43, which no source reports"),
        (ProcessOwner(slurm=True), "in use by a Slurm job whose id is unknown, which no source reports"),
        (of_pod(UID["3"]), f"in use by pod {UID['3']}, which no source reports"),
        (CONTAINER, "in use by container ffffffffffff, which no source reports"),
        (LOGIN, "in use by a login, which no source reports"),
        (LOGIN._replace(container="f" * 64), "in use by container ffffffffffff, which no source reports"),
        (SYSTEM, None),
    ],
)
def test_a_unit_without_a_holder_is_not_free_while_a_job_pod_container_or_login_uses_it(
    owner: ProcessOwner, text: str | None
) -> None:
    net = ProcessNet()
    net.check(resolved((A, job("42"))), {B: [owner]}, PLACES)
    assert net.in_use == ({} if text is None else {B: text})
    net.check(resolved((A, job("42"))), {}, PLACES)
    assert net.in_use == {}


def test_each_finding_is_logged_once_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    net, mapping = ProcessNet(), resolved((A, job("42")))
    with caplog.at_level(logging.WARNING):
        for seen in ({A: [of_job("43")]}, {}, {A: [of_job("43")]}, {A: [of_job("42")]}, {A: [of_job("43")]}):
            net.check(mapping, seen, PLACES)
        assert [record.getMessage() for record in caplog.records] == [
            "gpu 0: processes of job 43 run here, but slurm reports job 42. The time of job 42 on gpu 0 counts as "
            "unknown until only the processes of job 42 run on gpu 0. To do: compare the order of gres.conf with "
            "`nvidia-smi -L` and with `scontrol show node -d`"
        ]
        net.check(mapping, {A: [of_job("44")]}, PLACES)
    assert len(caplog.records) == 2


@pytest.mark.parametrize(("unit", "place"), [(UnitId("GPU-x"), "GPU-x"), (UnitId("GPU-a", "MIG-x"), "MIG-x")])
def test_a_finding_without_a_remedy_or_a_name_for_the_unit_is_logged_too(
    caplog: pytest.LogCaptureFixture, unit: UnitId, place: str
) -> None:
    mapping = resolved((unit, job("42")._replace(source="scenario")))
    with caplog.at_level(logging.WARNING):
        ProcessNet().check(mapping, {A: [of_job("42")]}, PLACES)
    assert [record.getMessage() for record in caplog.records] == [
        f"{place}: processes of job 42 run on gpu 0, which scenario did not allocate to it. The time of job 42 on "
        f"{place} counts as unknown until only the processes of job 42 run on {place}. To do: check the reports of "
        "scenario"
    ]


def test_findings_are_forgotten_with_their_units_and_holders() -> None:
    net = ProcessNet()
    for number in range(100):
        unit = UnitId("GPU-a", f"MIG-{number}")
        net.check(resolved((unit, job(str(number)))), {unit: [of_job("x")], A: []}, {unit: "gpu 0:1/0"})
        net.check(resolved((unit, job("0"))), {unit: [of_job("999")]}, {unit: "gpu 0:1/0"})
    net.check(resolved(), {}, {})
    assert not any((net._found, net._logged, net._held, net._before, net.in_use))


OWNERS = st.sampled_from(
    [
        of_job("1"),
        of_job("2"),
        of_job("3"),
        of_pod(UID["1"]),
        of_pod(UID["2"]),
        SYSTEM,
        CONTAINER,
        ProcessOwner(slurm=True),
    ]
)
HOLDERS = st.sampled_from([job("1"), job("2"), pod("a", UID["1"]), pod("b", UID["2"]), pod("c")])
LOOKS = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from([A, B, C]), HOLDERS),
        st.dictionaries(st.sampled_from([A, B, C]), st.lists(OWNERS, max_size=3)),
    ),
    min_size=1,
    max_size=6,
)


@given(LOOKS)
def test_a_mapping_counts_only_if_no_process_of_another_holder_is_seen(looks: list) -> None:
    net = ProcessNet()
    before: dict[tuple[UnitId, HolderKey], str] = {}
    for holders, owners in looks:
        checked = net.check(resolved(*holders.items()), owners, PLACES)
        now: dict[tuple[UnitId, HolderKey], str] = {}
        for allocation, _ in checked.allocations:
            relations = {relate(allocation.holder, owner) for owner in owners.get(allocation.unit, [])}
            key = (allocation.unit, allocation.holder.key)
            now[key] = allocation.contradiction
            assert ("other" not in relations) or allocation.contradiction
            if relations and "other" not in relations and "own" in relations:
                assert not allocation.contradiction
            elif before.get(key) and not allocation.contradiction:
                assert "own" in relations or net._before[allocation.unit]
        assert not net.in_use.keys() & holders.keys()
        assert len(checked.conflicts) == sum(bool(text) for text in now.values())
        before = now
