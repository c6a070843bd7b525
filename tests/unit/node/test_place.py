"""Which GPUs are shown, and with which status: each change of a GPU or the driver, tested with the same pure function."""

from __future__ import annotations

from gpu_exporter.agent.inventory.expected import ExpectedDevice
from gpu_exporter.agent.inventory.inventory import FELL_OFF, Inventory
from gpu_exporter.agent.inventory.pci import PciFunction
from gpu_exporter.agent.node.place import (
    HANGS,
    NOT_READ,
    Placed,
    count_answering,
    count_expected,
    place,
)
from gpu_exporter.agent.sampling.driver import RELEASED_TEXT, DriverView, Position
from gpu_exporter.common.model.readings import DeviceSnapshot
from gpu_exporter.common.model.units import DeviceIdentity
from gpu_exporter.common.vendor import NVIDIA

A = DeviceIdentity(0, "GPU-a", "NVIDIA H100", "570.1", "00000000:10:00.0", 0)
B = DeviceIdentity(1, "GPU-b", "NVIDIA H100", "570.1", "00000000:11:00.0", 1)
ADDRESS = {"GPU-a": "0000:10:00.0", "GPU-b": "0000:11:00.0"}
UP = Position(A, DeviceSnapshot(A, 90.0, 1000.0, up=True))
LOST = Position(A, DeviceSnapshot(A, 90.0, 1000.0, up=False, error="GPU is lost"))


def expected(*identities: DeviceIdentity, **fields: object) -> Inventory:
    """An inventory with GPUs that were seen here before."""
    devices = (ExpectedDevice(i.uuid, ADDRESS[i.uuid], i.index, i.name) for i in identities)
    return Inventory(tuple(devices), managed=NVIDIA.kernel_driver)._replace(**fields)


def bound(**drivers: str) -> tuple[PciFunction, ...]:
    """The PCI bus: kernel drivers by GPU."""
    return tuple(PciFunction(ADDRESS[f"GPU-{name}"], driver) for name, driver in drivers.items())


def shown(driver: DriverView, inventory: Inventory, known: dict[str, DeviceIdentity] | None = None) -> dict[str, str]:
    """The status of each GPU: up, hung or away, and why it does not answer."""

    def say(placed: Placed) -> str:
        words = ["hung"] * placed.hung + ["away"] * placed.snapshot.away
        return " ".join([*words, "up" if placed.snapshot.up else placed.snapshot.error])

    return {key: say(placed) for key, placed in place(driver, inventory, known or {}, 100.0, 1010.0).items()}


def test_a_gpu_that_answers_hangs_or_is_lost_is_shown_so() -> None:
    for position, said in (
        (UP, "up"),
        (UP._replace(hung=True), "hung up"),
        (LOST, "GPU is lost"),
        (LOST._replace(hung=True), "hung GPU is lost"),
    ):
        driver = DriverView({0: position})
        assert shown(driver, expected(A)) == {"GPU-a": said}
        assert count_answering(driver) == (said == "up")
        assert count_expected(driver, expected(A)) == 1


def test_a_gpu_whose_first_reading_hangs_is_shown_and_a_gpu_that_is_being_read_is_not() -> None:
    for hung, complete, said in (
        (True, True, {"GPU-a": f"hung {HANGS}"}),
        (True, False, {"GPU-a": f"hung {HANGS}"}),
        (False, False, {}),
        (False, True, {"GPU-a": NOT_READ}),
    ):
        assert shown(DriverView({0: Position(A, None, hung)}, complete=complete), Inventory()) == said


def test_a_gpu_of_a_virtual_machine_is_away_and_not_expected() -> None:
    inventory = expected(A, functions=bound(a="vfio-pci", b="nvidia"))
    driver = DriverView({0: LOST})
    other = {"@0000:11:00.0": "bound to kernel driver nvidia, but not in the driver's list"}
    assert shown(driver, inventory) == {"GPU-a": "away bound to kernel driver vfio-pci", **other}
    assert count_expected(driver, inventory) == 1  # the other GPU
    assert shown(DriverView({0: UP}), inventory) == {"GPU-a": "up", **other}  # a GPU that answers is here


def test_a_gpu_without_a_kernel_driver_is_away_only_beside_a_gpu_with_nvidias_driver() -> None:
    beside = expected(A, functions=bound(a="none", b="nvidia"))
    assert shown(DriverView({0: LOST}), beside)["GPU-a"] == "away bound to no kernel driver"
    alone = expected(A, functions=bound(a="none", b="none"))
    assert shown(DriverView({0: LOST}), alone) == {"GPU-a": "GPU is lost"}


def test_a_gpu_that_left_the_drivers_list_is_lost_and_keeps_its_name() -> None:
    driver = DriverView({0: Position(B, DeviceSnapshot(B, 90.0, 1000.0, up=True))})
    assert shown(driver, expected(A, B)) == {"GPU-a": FELL_OFF, "GPU-b": "up"}
    assert count_expected(driver, expected(A, B)) == 2
    placed = place(driver, expected(A, B), {"GPU-a": A}, 100.0, 1010.0)
    assert placed["GPU-a"].snapshot.identity == A  # with everything that was known about it
    assert (placed["GPU-a"].snapshot.monotonic, placed["GPU-a"].snapshot.wall) == (100.0, 1010.0)


def test_a_lost_gpu_whose_index_another_gpu_has_is_named_by_its_address() -> None:
    renumbered = B._replace(index=0)
    driver = DriverView({0: Position(renumbered, DeviceSnapshot(renumbered, 90.0, 1000.0, up=True))})
    placed = place(driver, expected(A, B), {}, 100.0, 1010.0)
    assert [each.snapshot.identity.label for each in placed.values()] == ["0", ADDRESS["GPU-a"]]


def test_a_gpu_of_others_is_not_shown_also_if_it_was_known() -> None:
    others = Position(error="nvmlDeviceGetHandleByIndex answered NVML_ERROR_NO_PERMISSION", denied=True)
    driver = DriverView({0: others, 1: Position(B, DeviceSnapshot(B, 90.0, 1000.0, up=True))})
    for inventory in (Inventory(), expected(A, B), expected(A, B, functions=bound(a="nvidia", b="nvidia"))):
        assert shown(driver, inventory) == {"GPU-b": "up"}
        assert count_expected(driver, inventory) == 1
    refused = DriverView({**driver.positions, 1: LOST._replace(identity=B)})
    assert count_expected(refused, expected(A, B)) == 1, "the other GPU is still expected"


def test_the_bus_decides_which_gpu_is_at_a_denied_position() -> None:
    """A is gone, and B got its position, which this process may not use."""
    driver = DriverView({0: Position(error="NVML_ERROR_NO_PERMISSION", denied=True)})
    gone = expected(A, B, functions=bound(b="nvidia"), seen=frozenset(("GPU-a", "GPU-b")))
    assert shown(driver, gone) == {"GPU-a": FELL_OFF}
    assert count_expected(driver, gone) == 1


def test_a_name_from_before_a_second_gpu_had_the_uuid_is_no_lost_gpu() -> None:
    twin = A.told_apart
    driver = DriverView({0: Position(twin, DeviceSnapshot(twin, 90.0, 1000.0, up=True))})
    assert shown(driver, expected(A)) == {twin.uuid: "up"}


def test_a_place_without_a_name_explains_a_missing_gpu_or_is_shown_alone() -> None:
    driver = DriverView({0: Position(error="handle: GPU is lost")})
    assert shown(driver, expected(A)) == {"GPU-a": "handle: GPU is lost"}
    assert shown(driver, Inventory()) == {"#0": "handle: GPU is lost"}
    assert shown(DriverView({0: Position(hung=True)}), Inventory()) == {"#0": HANGS}
    assert count_expected(driver, Inventory()) == 1


def test_no_gpu_is_missing_before_the_drivers_list_is_known() -> None:
    driver = DriverView({}, "the driver has not been asked yet", complete=False)
    assert shown(driver, expected(A)) == {}
    assert shown(driver._replace(complete=True, error="no driver"), expected(A)) == {"GPU-a": "no driver"}


def test_while_the_driver_is_released_every_gpu_is_away_and_no_gpu_is_expected() -> None:
    driver = DriverView({}, "", released=True)
    assert shown(driver, expected(A, B)) == {"GPU-a": f"away {RELEASED_TEXT}", "GPU-b": f"away {RELEASED_TEXT}"}
    stuck = DriverView({0: Position(error="a call still hangs")}, RELEASED_TEXT, released=True)
    assert shown(stuck, expected(A)) == {"GPU-a": f"away {RELEASED_TEXT}"}
    assert (count_expected(stuck, expected(A)), count_answering(stuck)) == (0, 0)
    just_found = shown(DriverView({}, "", released=True), Inventory(), {"GPU-a": A})  # and not expected yet
    assert just_found == {"GPU-a": f"away {RELEASED_TEXT}"}
    forgotten = Inventory(forgotten=frozenset((A.uuid,)))
    assert shown(DriverView({}, "", released=True), forgotten, {"GPU-a": A}) == {}
    ending = DriverView({0: UP}, "", released=True)  # the GPU's loop has not ended yet
    assert shown(ending, expected(A)) == {"GPU-a": f"away {RELEASED_TEXT}"}


def test_a_forgotten_gpu_is_shown_again_when_it_answers() -> None:
    inventory = Inventory(forgotten=frozenset((A.uuid,)))
    assert shown(DriverView({0: LOST}), inventory) == {}
    assert count_expected(DriverView({0: LOST}), inventory) == 0
    assert shown(DriverView({0: UP}), inventory) == {"GPU-a": "up"}


def test_gpus_are_in_the_drivers_order_even_after_renumbering() -> None:
    positions = {1: LOST, 0: Position(B, DeviceSnapshot(DeviceIdentity(0, *_rest(B)), 90.0, 1000.0, up=True))}
    assert list(shown(DriverView(positions), Inventory())) == ["GPU-a", "GPU-b"]


def _rest(identity: DeviceIdentity) -> tuple[str, str, str, str, int]:
    return identity.uuid, identity.name, identity.driver_version, identity.pci_bus_id, identity.minor
