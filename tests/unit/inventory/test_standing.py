"""Missing, away, asleep or foreign: every combination of facts from the kernel, the list and the log."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tests.testbed.sysfs import add_function, remove_function

from gpu_exporter.agent.inventory.expected import ExpectedDevice, ExpectedDevices, forget
from gpu_exporter.agent.inventory.inventory import FELL_OFF, Inventory, InventoryKeeper, Missing
from gpu_exporter.agent.inventory.pci import UNBOUND, PciFunction, is_subset
from gpu_exporter.agent.inventory.standing import PROVEN_S, TABLE, Case, judge
from gpu_exporter.common.model.units import NO_PLACE, DeviceIdentity
from gpu_exporter.common.vendor import NVIDIA

ADDRESSES = [f"0000:{0x10 + number:02x}:00.0" for number in range(8)]


def identity(number: int) -> DeviceIdentity:
    return DeviceIdentity(number, f"GPU-{number}", "NVIDIA L40S", "580", f"0000{ADDRESSES[number]}", number)


class Host:
    """A /sys tree, and a daemon that has read it."""

    def __init__(self, folder: Path, *, boot: str = "now", subset: bool = False) -> None:
        self.sysfs, self.state, self.boot, self.subset = folder / "sys", folder / "state", boot, subset
        self.state.mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        expected = ExpectedDevices(self.state, self.boot)
        self.keeper = InventoryKeeper(
            expected, self.sysfs, boot_id=self.boot, subset=lambda bound: self.subset, vendor=NVIDIA
        )
        self.keeper.look()

    def put(self, number: int, driver: str, **more: str) -> None:
        add_function(self.sysfs, ADDRESSES[number], driver, **more)

    def load_module(self) -> None:
        (self.sysfs / "module" / "nvidia").mkdir(parents=True, exist_ok=True)

    def answers(self, *numbers: int, seconds: float = 0.0) -> list[Missing]:
        """These GPUs are listed and answer, now and `seconds` later. Returns the GPUs that are missing then."""
        for now in (0.0, seconds):
            self.keeper.look()
            self.keeper.note([identity(number) for number in numbers], now)
        listed = [ADDRESSES[number] for number in numbers]
        found = {f"GPU-{number}" for number in numbers}
        missing = self.keeper.value.missing(found, {}, "" if numbers else "no driver", listed)
        assert self.keeper.value.count(listed, found) == len(numbers) + sum(not each.away for each in missing)
        return missing


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def said(missing: list[Missing]) -> dict[str, str]:
    """By address: away, and the reason."""
    return {each.identity.pci_bus_id: "away: " * each.away + each.reason for each in missing}


def test_a_node_whose_gpus_all_answer_misses_no_gpu(host: Host) -> None:
    host.put(0, "nvidia")
    host.put(1, "nvidia")
    assert host.answers(0, 1) == []


def test_a_card_whose_probe_failed_at_boot_is_missing(host: Host) -> None:
    """On the bus and unbound; it was seen before this boot. NVIDIA/NVSentinel#155, #684, #833."""
    before = Host(host.state.parent, boot="before")
    before.put(0, "nvidia")
    before.put(1, "nvidia")
    assert before.answers(0, 1) == []
    host.start()
    host.put(1, "")
    assert said(host.answers(0)) == {ADDRESSES[1]: "bound to no kernel driver; it answered here before the last boot"}
    host.keeper.note_failed_probes([ADDRESSES[1]])
    assert "its probe failed" in said(host.answers(0))[ADDRESSES[1]]


def test_a_card_that_was_never_seen_is_missing_after_a_failed_probe(host: Host) -> None:
    host.put(0, "nvidia")
    host.put(1, "")
    assert host.answers(0) == []
    host.keeper.note_failed_probes(["00000000:11:00.0"])
    (missing,) = host.answers(0)
    assert (missing.identity.uuid, missing.identity.index, missing.identity.pci_bus_id) == ("", NO_PLACE, ADDRESSES[1])


def test_an_unbound_card_is_missing_once_its_sibling_has_answered_for_ten_minutes(host: Host) -> None:
    host.put(0, "nvidia", device="0x2330")
    host.put(1, "", device="0x2330")
    host.put(2, "", device="0x1b06")  # another model, perhaps one that the driver does not support
    assert host.answers(0, seconds=PROVEN_S - 1.0) == []
    assert said(host.answers(0, seconds=PROVEN_S)) == {
        ADDRESSES[1]: "bound to no kernel driver, while others of its kind work"
    }


def test_a_gpu_with_another_driver_or_a_driver_override_is_away(host: Host) -> None:
    host.put(0, "nvidia", device="0x2330")
    host.put(1, "nvidia", device="0x2330")
    host.answers(0, 1)
    for driver in ("vfio-pci", "nouveau"):
        host.put(1, driver, device="0x2330")
        assert said(host.answers(0, seconds=PROVEN_S)) == {ADDRESSES[1]: f"away: bound to kernel driver {driver}"}
    host.put(1, "", device="0x2330", driver_override="vfio-pci")
    assert said(host.answers(0)) == {ADDRESSES[1]: "away: its driver_override is vfio-pci"}
    host.put(2, "vfio-pci", device="0x2330")  # never expected here: it is not missed
    assert ADDRESSES[2] not in said(host.answers(0))


def test_a_gpu_that_was_up_in_this_boot_and_then_unbound_is_away(host: Host) -> None:
    host.put(0, "nvidia", device="0x2330")
    host.put(1, "nvidia", device="0x2330")
    host.answers(0, 1)
    host.put(1, "", device="0x2330")
    assert said(host.answers(0, seconds=PROVEN_S)) == {ADDRESSES[1]: "away: bound to no kernel driver"}
    host.start()  # also for the next process of this boot
    assert said(host.answers(0)) == {ADDRESSES[1]: "away: bound to no kernel driver"}


def test_a_bound_card_that_is_not_listed_is_missing_except_in_a_container_with_a_part_of_the_gpus(host: Host) -> None:
    for number in range(8):
        host.put(number, "nvidia")
    assert len(host.answers(0)) == 7
    assert all("but not in the driver's list" in reason for reason in said(host.answers(0)).values())
    host.subset = True  # docker run --gpus device=0
    assert host.answers(0) == []
    host.answers(0, 1)
    assert said(host.answers(0)) == {ADDRESSES[1]: FELL_OFF}, "a GPU that was seen here is still missed"


def test_a_sleeping_card_is_neither_lost_nor_expected(host: Host) -> None:
    host.put(0, "nvidia")
    host.put(1, "nvidia")
    host.answers(0, 1)
    host.put(1, "nvidia", runtime_status="suspended")
    assert said(host.answers(0)) == {ADDRESSES[1]: "away: asleep: suspended by runtime power management"}


def test_a_missing_driver_is_only_one_fault(host: Host) -> None:
    host.load_module()
    for number in range(8):
        host.put(number, "nvidia")
    host.answers(*range(8))
    (host.sysfs / "module" / "nvidia").rmdir()
    for number in range(8):
        host.put(number, "")
    missing = host.answers()
    assert {each.reason for each in missing} == {"no driver"} and len(missing) == 8
    assert host.keeper.value.count([]) == 8
    host.load_module()  # loaded again, and every card was unbound on purpose
    assert all(each.away for each in host.answers())


@pytest.mark.parametrize("driver", ["", "nouveau", "ast"])
def test_a_node_with_a_display_card_expects_nothing(host: Host, driver: str) -> None:
    host.put(0, driver, kind="0x030000")
    assert host.keeper.value.count([]) == 0
    assert host.answers() == []


def test_virtual_functions_are_not_separate_gpus(host: Host) -> None:
    host.put(0, "nvidia")
    for number in (1, 2, 3):
        host.put(number, "", physfn=ADDRESSES[0], device="0x2235")
    assert host.answers(0, seconds=PROVEN_S) == []


def test_a_gpu_behind_another_domain_is_another_gpu(host: Host) -> None:
    add_function(host.sysfs, "0000:01:00.0", "nvidia")
    add_function(host.sysfs, "10000:01:00.0", "nvidia")
    a = DeviceIdentity(0, "GPU-a", "L4", "580", "00000000:01:00.0", 0)
    b = DeviceIdentity(1, "GPU-b", "L4", "580", "00010000:01:00.0", 1)
    host.keeper.look()
    host.keeper.note([a, b])
    assert {device.pci_bus_id for device in host.keeper.value.devices} == {"0000:01:00.0", "10000:01:00.0"}
    host.keeper.note([a])
    missing = host.keeper.value.missing({"GPU-a"}, {}, "", ["0000:01:00.0"])
    assert [(each.identity.uuid, each.away) for each in missing] == [("GPU-b", False)]
    host.start()
    assert {device.uuid for device in host.keeper.value.devices} == {"GPU-a", "GPU-b"}


def test_an_unreadable_address_makes_no_gpu_away(host: Host) -> None:
    host.put(0, "nvidia")
    host.put(1, "nvidia")
    host.answers(0, 1)
    blind = [identity(number)._replace(pci_bus_id="") for number in range(2)]
    host.keeper.note(blind)
    assert {device.pci_bus_id for device in host.keeper.value.devices} == {*ADDRESSES[:2]}
    assert host.keeper.value.missing({"GPU-0", "GPU-1"}, {}, "", [None, None]) == []
    assert host.keeper.value.count([None, None]) == 2


@pytest.mark.parametrize(
    ("environ", "files", "cgroup", "given"),
    [
        ({}, ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], "0::/", False),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, ["nvidia0", "nvidia1"], "0::/", False),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, ["nvidia0", "nvidia1"], "0::/", False),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-1"}, ["nvidia0", "nvidia1"], "0::/", True),
        ({"NVIDIA_VISIBLE_DEVICES": "0"}, [], "0::/", True),
        ({}, ["nvidia1"], "0::/", True),
        ({}, [], "0::/", False),
        ({}, ["nvidia0", "nvidia1"], "0::/system.slice/slurmstepd.scope/job_42/step_0", True),
    ],
)
def test_a_container_or_job_with_a_part_of_the_gpus_is_detected(
    environ: dict[str, str], files: list[str], cgroup: str, given: bool, tmp_path: Path
) -> None:
    (tmp_path / "cgroup").write_text(cgroup)
    assert is_subset(2, NVIDIA, environ, files, tmp_path / "cgroup") is given


DRIVERS = ("nvidia", "nouveau", "vfio-pci", UNBOUND)
SEEN: tuple[Any, ...] = ("now", "before", "never")


def test_the_table_decides_every_combination_and_uses_each_row() -> None:
    used = set()
    for driver, override, asleep, gone, seen, failed, sibling, subset in itertools.product(
        DRIVERS, ("", "vfio-pci"), (False, True), (False, True), SEEN, *[(False, True)] * 3
    ):
        function = PciFunction("0000:10:00.0", driver, "0x1", override, asleep)
        case = Case(function, "nvidia", gone, seen, failed, sibling, subset)
        found = judge(case)
        used.add(next(at for at, (fits, _) in enumerate(TABLE) if fits(case)))
        if driver in ("nouveau", "vfio-pci") or (override and driver != "nvidia"):
            assert found.kind == "away"
        if found.kind == "missing" and seen == "never":
            assert found.reason and (driver == "nvidia" or (driver == UNBOUND and (failed or sibling)))
        if driver == UNBOUND and gone and not override:
            assert found.kind == ("foreign" if seen == "never" else "missing")
    used |= {0} if judge(Case(None, "nvidia")).kind == "foreign" else set()
    assert judge(Case(None, "nvidia", seen="before")).kind == "missing"
    assert used == set(range(len(TABLE)))


def test_a_gpu_that_does_not_start_again_is_missing(host: Host) -> None:
    """It was removed from the bus and found again, as in a reset: it was up in this boot, but its probe fails now."""
    for number in range(2):
        host.put(number, "nvidia")
    assert host.answers(0, 1) == []
    host.put(1, "")
    host.keeper.note_failed_probes({ADDRESSES[1]})
    assert "its probe failed" in said(host.answers(0))[ADDRESSES[1]]
    assert host.keeper.value.given_away(ADDRESSES[1]) == ""
    host.put(1, "nvidia")
    assert host.answers(0, 1) == []
    host.put(1, "")
    assert said(host.answers(0)) == {ADDRESSES[1]: "away: bound to no kernel driver"}, "unbound on purpose, later"


def test_a_gpu_with_an_override_that_is_still_bound_is_missing(host: Host) -> None:
    """driver_override defines the next binding, not the present one."""
    host.put(0, "nvidia")
    host.put(1, "nvidia", driver_override="vfio-pci")
    assert host.answers(0, 1) == []
    assert said(host.answers(0)) == {ADDRESSES[1]: FELL_OFF}


def test_a_missing_driver_makes_no_gpu_away(host: Host) -> None:
    host.put(0, "nvidia")
    assert host.answers(0) == []
    host.put(0, "")
    host.keeper.look()
    assert host.keeper.value.given_away(ADDRESSES[0]) == "", "the driver's absence is the fault"
    host.load_module()
    host.keeper.look()
    assert host.keeper.value.given_away(ADDRESSES[0]) == "bound to no kernel driver"


def test_a_forgotten_gpu_remains_forgotten_while_it_is_on_the_bus(host: Host) -> None:
    for number in range(2):
        host.put(number, "nvidia")
    assert host.answers(0, 1) == []
    assert len(host.answers(0)) == 1
    assert forget(host.state, "GPU-1")
    assert host.answers(0) == []
    host.start()
    assert host.answers(0) == [], "after a restart too"
    assert host.answers(0, 1) == []
    assert len(host.answers(0)) == 1, "it has answered since"
    assert forget(host.state, "GPU-1")
    assert host.answers(0) == []
    assert len(Host(host.state.parent, boot="next").answers(0)) == 1, "another card may be at that address now"


def test_a_gpu_that_was_lost_while_the_bus_was_renumbered_remains_missing(host: Host) -> None:
    for number in range(4):
        host.put(number, "nvidia")
    assert host.answers(0, 1, 2, 3) == []
    after = Host(host.state.parent, boot="next")
    remove_function(after.sysfs, ADDRESSES[3])
    moved = [identity(number)._replace(pci_bus_id=f"0000{ADDRESSES[number - 1]}") for number in (1, 2, 3)]
    for _ in range(3):
        after.keeper.look()
        after.keeper.note(moved)
        found, listed = {each.uuid for each in moved}, ADDRESSES[:3]
        assert [each.identity.uuid for each in after.keeper.value.missing(found, {}, "", listed)] == ["GPU-0"]
        assert after.keeper.value.count(listed, found) == 4
        assert after.keeper.value.count([*listed, None], found) == 4, "it may be the GPU without a name"


def test_a_gpu_without_an_address_may_be_any_of_the_missing_gpus(host: Host) -> None:
    """Its position in the list has no address: one card less on the bus is known to be missing."""
    for number in range(3):
        host.put(number, "nvidia")
    host.keeper.look()
    listed = [ADDRESSES[0], None]
    assert len(host.keeper.value.missing({"GPU-0", "GPU-x"}, {}, "", listed)) == 1
    assert len(host.keeper.value.missing({"GPU-0", "GPU-x"}, {}, "", [*listed, None])) == 0


def test_failed_probes_and_cards_that_worked_are_remembered(host: Host) -> None:
    for number in range(4):
        host.put(number, "nvidia" if number == 0 else "", device="0x1" if number < 2 else "0x2")
    host.keeper.note_failed_probes({ADDRESSES[1]})
    host.keeper.note_failed_probes({ADDRESSES[2]})
    assert set(said(host.answers(0))) == {ADDRESSES[1], ADDRESSES[2]}
    host.put(3, "nvidia", device="0x2")
    assert host.answers(0, 3, seconds=PROVEN_S) != []
    host.put(3, "", device="0x2")
    host.answers(0, seconds=PROVEN_S)
    assert host.keeper.value.proven == {"0x1", "0x2"}


def test_an_unknown_boot_equals_no_other_boot(host: Host) -> None:
    nowhere = Host(host.state.parent, boot="")
    nowhere.put(0, "nvidia")
    nowhere.put(1, "nvidia")
    assert nowhere.answers(0, 1) == []
    nowhere.put(1, "")
    assert [each.away for each in nowhere.answers(0)] == [False]


def test_a_virtual_function_is_not_a_separate_gpu(host: Host) -> None:
    host.put(0, "nvidia")
    host.put(1, "nvidia", physfn=ADDRESSES[0])
    assert host.answers(0) == []


def test_a_list_position_without_a_name_may_be_any_bound_card() -> None:
    functions = tuple(PciFunction(address, "nvidia") for address in ADDRESSES[:3])
    inventory = Inventory((ExpectedDevice("GPU-0", ADDRESSES[0], 0, "L4"),), functions, managed="nvidia")
    missing = inventory.missing({"GPU-0"}, {1: "handle: UNKNOWN"}, "", [ADDRESSES[0]])
    assert len(missing) == 1, "one of the two cards has the row with the error"
