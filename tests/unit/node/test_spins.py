"""Which holders are watched for stalls, and which of their processes spin."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_exporter.agent.ledger.accounts import ConfirmedAllocation, UnitAccount
from gpu_exporter.agent.ledger.ledger import Ledger, LedgerRules
from gpu_exporter.agent.ledger.records import UnitRecord
from gpu_exporter.agent.node.spins import NodeSpins
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.holders import Allocation, Holder, HolderKey
from gpu_exporter.common.model.readings import DeviceSnapshot, Facts, GpuProcess, ProcessList
from gpu_exporter.common.model.units import DeviceIdentity, UnitId
from gpu_exporter.diagnosis.stalls.rules import StallRules, stall_rules

JOB = Holder(HolderKey("slurm", "42"), job_id="42")
OTHER = Holder(HolderKey("slurm", "43"), job_id="43")


@pytest.fixture
def spins() -> NodeSpins:
    return NodeSpins(StallRules(), Ledger(LedgerRules(5.0, 3, 0.1, 0.7, 60.0), 0.0))


def confirm(unit: str = "GPU-0", holder: Holder = JOB, mig: str = "", **more: Any) -> ConfirmedAllocation:
    return ConfirmedAllocation(Allocation(UnitId(unit, mig), holder, **more), 1.0, None)


@pytest.mark.parametrize(
    ("present", "watched"),
    [
        ([confirm()], 1),
        ([confirm(), confirm("GPU-1")], 2),
        ([confirm(), confirm(holder=OTHER)], 0),
        ([confirm(share="time_slice")], 0),
        ([confirm(share="mps")], 0),
        ([confirm(mig="MIG-1", share="mig")], 0),
        ([confirm(contradiction="processes of another job run here")], 0),
        ([confirm(running=False)], 0),
    ],
    ids=["alone", "two-gpus", "two-holders", "time-slice", "mps", "mig", "contradicted", "suspended"],
)
def test_only_a_proven_holder_of_a_whole_gpu_is_watched(
    spins: NodeSpins, present: list[ConfirmedAllocation], watched: int
) -> None:
    assert len(spins.drop_others(present, 1.0)) == watched


def test_a_site_that_switches_stalls_off_watches_nobody() -> None:
    settings = Settings()
    off = stall_rules(settings._replace(diagnosis=settings.diagnosis._replace(without="interactive, stalls")))
    spins = NodeSpins(off, Ledger(LedgerRules(5.0, 3, 0.1, 0.7, 60.0), 0.0))
    assert spins.drop_others([confirm()], 1.0) == []
    assert stall_rules(settings) == StallRules()


def snapshot(uuid: str, utilization: float | None, *pids: int, listed: bool = True) -> DeviceSnapshot:
    identity = DeviceIdentity(0, uuid, "H100", "580", "0", 0)
    processes = ProcessList(1.0, tuple(GpuProcess(pid) for pid in pids)) if listed else None
    return DeviceSnapshot(identity, 1.0, 1.0, up=True, processes=processes, facts=Facts(utilization=utilization))


@pytest.mark.parametrize(
    ("other", "proven", "pids"),
    [
        (snapshot("GPU-1", 1.0, 11), True, (10, 11)),
        (snapshot("GPU-1", 0.0, 11), True, (10,)),
        (snapshot("GPU-1", None, 11), True, (10,)),
        (snapshot("GPU-1", 1.0, listed=False), True, None),
        (snapshot("GPU-1", 1.0, 11), False, None),
    ],
    ids=["spins-too", "at-rest", "not-read", "not-listed", "processes-hidden"],
)
def test_the_processes_of_fully_busy_gpus_spin_also_where_a_gpu_cannot_be_watched(
    spins: NodeSpins, monkeypatch: pytest.MonkeyPatch, other: DeviceSnapshot, proven: bool, pids: tuple[int, ...] | None
) -> None:
    """Otherwise the spinning process of the other GPU would look like a loader, and end the run of the first."""
    monkeypatch.setattr(spins.boards, "suspects", lambda: {(UnitId("GPU-0"), JOB.key)})
    held = [Allocation(UnitId("GPU-0"), JOB), Allocation(UnitId("GPU-1"), JOB), Allocation(UnitId("GPU-2"), OTHER)]
    answered = {"GPU-0": snapshot("GPU-0", 1.0, 10), "GPU-1": other, "GPU-2": snapshot("GPU-2", 1.0, 12)}
    (suspect,) = spins.list_suspects(held, answered, processes_proven=proven)
    assert suspect.who == ("job", "42")
    assert suspect.pids is None or set(suspect.pids) == set(pids or ())
    assert (suspect.pids is None) == (pids is None)


def test_the_power_of_a_board_at_rest_survives_a_restart() -> None:
    ledger, unit = Ledger(LedgerRules(5.0, 3, 0.1, 0.7, 60.0), 0.0), UnitId("GPU-0")
    before = NodeSpins(StallRules(), ledger)
    ledger.units[unit] = UnitRecord(UnitAccount(0.0))
    before.boards.restore({unit: 71.0})
    before.remember()
    after = NodeSpins(StallRules(), ledger)
    after.restore()
    assert after.boards.floors() == {unit: 71.0}
