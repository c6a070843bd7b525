"""The use of the holders' own processes: each process belongs to one holder, or no value is reported."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.agent.attribution.processes import OwnedPeriod, UnitOwners
from gpu_exporter.agent.attribution.usage import divide_period, measure
from gpu_exporter.common.cgroup import ProcessOwner
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey, Use
from gpu_exporter.common.model.units import UnitId

UNIT = UnitId("GPU-a")
GIB = 2**30


def job(number: int) -> Holder:
    return Holder(HolderKey("slurm", f"lab/{number}/0/1"), job_id=str(number), source="slurm")


def pod(uid: str, container: str = "main") -> Holder:
    key = HolderKey("kubernetes", f"{uid}/{container}")
    return Holder(key, pod_uid=uid, container=container, source="kubelet")


def of_job(number: int, step: str = "0") -> ProcessOwner:
    return ProcessOwner(slurm=True, job=str(number), step=step)


def of_pod(uid: str) -> ProcessOwner:
    return ProcessOwner(pods=(uid,), container="f" * 64)


UID, OTHER = "12345678-0000-4000-8000-000000000000", "87654321-0000-4000-8000-000000000000"


def use(
    holders: Sequence[Holder], uses: dict[ProcessOwner, Use], is_complete: bool = True, contradiction: str = ""
) -> dict[str, Use]:
    """The use by incarnation."""
    allocations = [Allocation(UNIT, holder, contradiction=contradiction) for holder in holders]
    found = measure(allocations, {UNIT: UnitOwners(uses, is_complete)})
    return {key.incarnation.split("/")[1 if key.scheduler == "slurm" else 0]: each for (_, key), each in found.items()}


def test_each_holder_has_the_use_of_its_own_processes_of_all_its_steps() -> None:
    found = use(
        [job(1), job(2)], {of_job(1): Use(2, 3 * GIB), of_job(1, "batch"): Use(1, GIB), of_job(2): Use(1, 8 * GIB)}
    )
    assert found == {"1": Use(3, 4 * GIB), "2": Use(1, 8 * GIB)}


def test_a_holder_without_a_process_uses_nothing() -> None:
    assert use([job(1), job(2)], {of_job(2): Use(1, GIB)}) == {"1": Use(0, 0), "2": Use(1, GIB)}


def test_the_use_of_processes_without_a_holder_counts_for_no_holder() -> None:
    """A previous holder left a process running. The uses of the other holders are still separated."""
    assert use([job(1)], {of_job(9): Use(1, GIB)}) == {"1": Use(0, 0)}
    assert use([pod(UID)], {of_pod(OTHER): Use(1, GIB)}) == {UID: Use(0, 0)}


@pytest.mark.parametrize(
    ("holders", "owner"),
    [
        ([job(1)], ProcessOwner()),  # with proctrack/linuxproc a job's processes look like this
        ([job(1)], ProcessOwner(slurm=True)),  # a SLUID: some job's process
        ([pod(UID), pod(UID, "sidecar")], of_pod(UID)),  # two containers of one pod
        ([pod("")], of_pod(UID)),  # the pod's UID is unknown
        ([pod(UID)], ProcessOwner(container="f" * 64)),
    ],
)
def test_all_uses_are_unknown_if_a_process_may_belong_to_several_holders(
    holders: list[Holder], owner: ProcessOwner
) -> None:
    assert use(holders, {owner: Use(1, GIB)}) == {}


def test_all_uses_are_unknown_if_a_process_could_not_be_looked_up() -> None:
    assert use([job(1)], {of_job(1): Use(1, GIB)}, is_complete=False) == {}
    assert measure([Allocation(UNIT, job(1))], {}) == {}


def test_a_contradicted_mapping_has_no_use() -> None:
    assert use([job(1)], {of_job(1): Use(1, GIB)}, contradiction="processes of job 2 run here") == {}


def test_memory_that_the_driver_does_not_report_is_not_0() -> None:
    assert use([job(1)], {of_job(1): Use(1, GIB).plus(Use(1, None))}) == {"1": Use(2, None)}


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2), st.integers(0, GIB)), max_size=20), st.integers(1, 4))
def test_holders_never_use_more_than_exists(processes: list[tuple[int, int, int]], holders: int) -> None:
    uses: dict[ProcessOwner, Use] = {}
    for number, step, memory in processes:
        owner = of_job(number, str(step))
        uses[owner] = uses.get(owner, Use()).plus(Use(1, memory))
    found = use([job(number) for number in range(1, holders + 1)], uses)
    held = [(memory, number) for number, _, memory in processes if number <= holders]
    assert sum(each.processes for each in found.values()) == len(held)
    assert sum(each.memory_bytes or 0 for each in found.values()) == sum(memory for memory, _ in held)


def split(
    holders: Sequence[Holder], *shares: tuple[ProcessOwner | None, float]
) -> tuple[dict[str, float], float | None]:
    """The shares by incarnation, and the share of others."""
    found = divide_period(OwnedPeriod(10.0, 15.0, shares), holders)
    assert (found.start, found.end, found.problem) == (10.0, 15.0, "")
    assert found.slack == pytest.approx(0.05 + min(0.05, 0.01 * len(shares)))
    ratios = {
        key.incarnation.split("/")[1 if key.scheduler == "slurm" else 0]: ratio for key, ratio in found.ratios.items()
    }
    return ratios, found.others


def test_the_work_of_a_holders_processes_is_added_up() -> None:
    shares = ((of_job(1), 0.25), (of_job(1, "batch"), 0.25), (of_job(2), 0.125))
    assert split([job(1), job(2), job(3)], *shares) == ({"1": 0.5, "2": 0.125}, None)
    assert split([pod(UID), pod(OTHER)], (of_pod(UID), 0.5)) == ({UID: 0.5}, None)
    assert split([job(1)]) == ({}, None)


@pytest.mark.parametrize(
    "owner",
    [
        None,  # an ended process, or an MPS server
        ProcessOwner(),  # the system
        ProcessOwner(container="a" * 64),  # a container that a job has started
        of_job(3),
        of_pod(OTHER),
        ProcessOwner(slurm=True),  # a job of unknown number
    ],
)
def test_work_without_a_single_holder_counts_as_others(owner: ProcessOwner | None) -> None:
    assert split([job(1), job(2)], (of_job(1), 0.5), (owner, 0.25), (owner, 0.125)) == ({"1": 0.5}, 0.375)


def test_a_process_of_a_pod_with_two_containers_on_the_gpu_belongs_to_neither() -> None:
    assert split([pod(UID, "main"), pod(UID, "side")], (of_pod(UID), 0.5)) == ({}, 0.5)


def test_many_processes_do_not_hide_a_process_that_works() -> None:
    """The rounding of all shares must not add up to another process, and neither must pids of unknown processes."""
    ghosts: list[tuple[ProcessOwner | None, float | None]] = [(None, None)] * 95
    shares: list[tuple[ProcessOwner | None, float | None]] = [(None, 0.01)]
    assert divide_period(OwnedPeriod(10.0, 15.0, (*shares, *ghosts)), [job(1)]).slack == pytest.approx(0.06)
    assert divide_period(OwnedPeriod(10.0, 15.0, tuple(shares * 100)), [job(1)]).slack == pytest.approx(0.1)


def test_a_period_without_known_work_remains_unknown() -> None:
    found = divide_period(OwnedPeriod(10.0, 15.0, (), "the driver does not tell"), [job(1)])
    assert (found.problem, found.ratios) == ("the driver does not tell", {})
