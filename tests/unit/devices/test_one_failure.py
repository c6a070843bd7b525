"""Every NVML call fails alone with every code: other values remain, and no value is invented."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.testbed.board import FIELDS, GIB, Board, Boards, Question, healthy, with_mig

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.devices.errors import DeviceError, DeviceLost, DriverUnavailable
from gpu_exporter.agent.devices.nvml import constants as nvml
from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.readings import DeviceSnapshot

MAKERS: dict[str, Callable[[], Board]] = {"whole": healthy, "MIG": with_mig}
CODES = [*nvml.ERROR_NAMES.values()]
# If one of these calls fails there is no device: its position in the list has a row with the error.
NEEDED = ("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex")
Key = tuple[str, str, tuple[str, ...]]  # family, MIG instance, labels


def values(snapshot: DeviceSnapshot) -> dict[Key, float]:
    found = {(sample.family.name, "", sample.labels): sample.value for sample in snapshot.samples}
    for instance in snapshot.instances:
        found |= {(sample.family.name, instance.uuid, sample.labels): sample.value for sample in instance.samples}
    return found


def cycles(boards: Boards, breaks: Callable[[int], None], count: int = 3) -> list[DeviceSnapshot]:
    """The snapshots of `count` cycles of the one GPU; `breaks` is called before each cycle."""
    clock = ManualClock()
    backend = NvmlBackend(boards, clock)
    breaks(0)
    device = backend.find(0)
    sampler = DeviceSampler(device, registry.ALL, clock, activity_rules(Settings()))
    found = []
    for cycle in range(count):
        breaks(cycle)
        if (energy := boards.boards[0].answers["nvmlDeviceGetTotalEnergyConsumption"]) != "none":
            boards.boards[0].answers["nvmlDeviceGetTotalEnergyConsumption"] = energy + 600_000
        clock.advance(5.0)
        found.append(sampler.sample())
    return found


def sources() -> dict[str, str]:
    """The source of each family, as in the reference of metrics."""
    families = [family for each in registry.ALL for family in (*each.families, *each.instance_families)]
    return {family.name: family.source for family in families}


SOURCES = sources()
# Families that depend on a call although their source does not name it.
MORE = {
    "nvmlDeviceGetMigMode": ("gpu_mig_",),
    "nvmlDeviceGetMigDeviceHandleByIndex": ("gpu_mig_",),
    "nvmlDeviceGetUUID": ("gpu_mig_",),
    "nvmlDeviceGetGpuInstanceId": ("gpu_mig_",),
    "nvmlDeviceGetComputeInstanceId": ("gpu_mig_",),
    "nvmlDeviceGetAttributes_v2": ("gpu_mig_info", "gpu_mig_power", "gpu_mig_energy"),
    "nvmlDeviceGetName": ("gpu_mig_info",),
    "nvmlDeviceGetMemoryInfo": ("gpu_memory_", "gpu_mig_memory_", "gpu_mig_info"),
    "nvmlGpmQueryDeviceSupport": ("gpu_graphics", "gpu_sm_", "gpu_tensor", "gpu_dram", "gpu_mig_"),
    "nvmlGpmMetricsGet": ("gpu_mig_",),
    "nvmlDeviceGetTemperatureV": ("gpu_mig_temperature",),
    "nvmlDeviceGetSupportedClocksEventReasons": ("gpu_throttle",),
    "nvmlDeviceGetTotalEnergyConsumption": ("gpu_mig_", "gpu_unassigned"),
    "nvmlDeviceGetPowerUsage": ("gpu_mig_power",),
    "nvmlDeviceGetComputeRunningProcesses_v3": ("gpu_graphics_processes",),
    "nvmlDeviceGetGraphicsRunningProcesses_v3": ("gpu_compute_processes",),
}


def rests_on(question: Question, key: Key) -> bool:
    """Whether a value may be missing if this question fails."""
    (call, place, arguments), (family, instance, _) = question, key
    if "/" in place and not instance and not family.endswith("_processes"):
        return False  # the question is about an instance, the value is the board's
    if call == FIELDS and f"{call} {arguments[0]}" not in SOURCES[family] and "throttle" not in family:
        pair = (197, 198, 138, 139)  # both directions of a link are one witness
        return (arguments[0] == 30 and family == "gpu_retired_pages") or (
            arguments[0] in pair and family.startswith(("gpu_pcie", "gpu_nvlink"))
        )
    if family.startswith(MORE.get(call, ("-",))):
        return True
    return call.removesuffix("_v3") in SOURCES[family]


def questions(kind: str) -> Mapping[Question, Any]:
    boards = Boards(MAKERS[kind]())
    cycles(boards, lambda _: None)
    return {
        question: answer
        for question, answer in boards.asked.items()
        if not (isinstance(answer, str) and answer.startswith("NVML_ERROR"))
    }


ASKED = {kind: questions(kind) for kind in MAKERS}
HEALTHY = {kind: [values(each) for each in cycles(Boards(make()), lambda _: None)] for kind, make in MAKERS.items()}
ALL = [(kind, question) for kind, asked in ASKED.items() for question in asked]


@pytest.mark.parametrize(("kind", "question"), ALL, ids=[f"{kind} {call} {a}" for kind, (call, _, a) in ALL])
@pytest.mark.parametrize("first", [0, 2], ids=["from the first call on", "later"])
def test_a_failing_call_costs_only_its_own_values(kind: str, question: Question, first: int) -> None:
    call, place, _ = question
    for code in CODES:
        boards = Boards(MAKERS[kind]())

        def breaks(cycle: int, boards: Boards = boards, code: str = code) -> None:
            if cycle >= first:
                boards.set[question] = code

        if first == 0 and (call in NEEDED or (call == "nvmlDeviceGetUUID" and "/" not in place)):
            with pytest.raises(DeviceError, match=code):
                cycles(boards, breaks)
            continue
        *_, last = cycles(boards, breaks)
        assert last.up, f"{code}: {last.error}"
        found, before = values(last), HEALTHY[kind][-1]
        missing = {key for key in before.keys() - found.keys() if not rests_on(question, key)}
        assert not missing, f"{code} costs {sorted(missing)}"
        zeros = {key for key, value in found.items() if value == 0.0 != before.get(key, 1.0)}
        assert {family for family, _, _ in zeros} <= {"gpu_mig_activity_supported"}, (
            f"{code} makes 0 of {sorted(zeros)}"
        )
        assert last.identity.uuid and (last.identity.name or call == "nvmlDeviceGetName")


def test_a_failed_identity_fact_is_retried_until_it_is_known() -> None:
    boards = Boards(healthy())
    calls = ("nvmlDeviceGetName", "nvmlDeviceGetPciInfo", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetMigMode")
    broken = dict.fromkeys(((call, "0", ()) for call in calls), "NVML_ERROR_UNKNOWN")

    def breaks(cycle: int) -> None:
        boards.set = {} if cycle else dict(broken)

    first, *_, last = cycles(boards, breaks, 4)
    assert (first.identity.name, first.identity.pci_bus_id, first.identity.minor) == ("", "", -1)
    assert first.up
    assert (last.identity.name, last.identity.pci_bus_id) == ("NVIDIA L40S", "00000000:10:00.0")
    assert (last.identity.minor, last.identity.mig_mode) == (0, "disabled")


def test_a_gpu_is_lost_if_most_calls_report_it() -> None:
    for code in ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED"):
        boards = Boards(healthy())

        def breaks(cycle: int, boards: Boards = boards, code: str = code) -> None:
            if cycle == 2:
                boards.set = {question: code for question in boards.asked if question[1] == "0"}

        *_, before, last = cycles(boards, breaks)
        assert before.up and not last.up and code in last.error


@pytest.mark.parametrize("code", ["NVML_ERROR_UNKNOWN", "NVML_ERROR_NO_PERMISSION"])
def test_an_unreadable_mig_mode_does_not_count_as_unsupported(code: str) -> None:
    board = with_mig()
    board.answers["nvmlDeviceGetMigMode"] = code
    for snapshot in cycles(Boards(board), lambda cycle: None, 12):
        assert (snapshot.identity.mig_mode, snapshot.instances_known) == ("unknown", False)


def test_a_board_keeps_its_mig_mode_while_the_driver_denies_mig() -> None:
    boards = Boards(with_mig())

    def breaks(cycle: int) -> None:
        boards.set = {("nvmlDeviceGetMigMode", "0", ()): "NVML_ERROR_NOT_SUPPORTED"} if cycle == 2 else {}

    for cycle, snapshot in enumerate(cycles(boards, breaks, 5)):
        assert snapshot.identity.mig_mode == "enabled"
        assert snapshot.instances_known == (cycle != 2)


def test_invalid_values_of_an_instance_are_no_data() -> None:
    board = with_mig()
    board.instances[0]["nvmlDeviceGetMemoryInfo"] = [0, 0, 0, 0]
    board.instances[0]["nvmlDeviceGetAttributes_v2"] = [2**32 - 1, 2**64 - 1, 2**32 - 1]
    *_, last = cycles(Boards(board), lambda cycle: None)
    first, second = last.instances
    assert (first.facts.memory_total_bytes, first.facts.memory_used_bytes) == (None, None)
    assert (first.sm_slices, second.facts.memory_total_bytes) == (2, 10 * GIB)


def test_sentinels_are_neither_row_remaps_nor_a_recovery_action() -> None:
    ones = [0xFFFFFFFF] * 4
    *_, last = cycles(Boards(healthy(nvmlDeviceGetRemappedRows=ones)), lambda cycle: None)
    assert not [sample for sample in last.samples if sample.family.name.startswith("gpu_remapped_rows")]
    board = healthy()
    board.fields[230] = 255
    *_, last = cycles(Boards(board), lambda cycle: None)
    assert last.facts.recovery_action is None


def test_another_gpu_at_the_same_index_is_never_read_as_this_gpu() -> None:
    boards = Boards(healthy())
    device = NvmlBackend(boards, ManualClock()).find(0)
    boards.boards[0].answers["nvmlDeviceGetUUID"] = "GPU-other"
    with pytest.raises(DeviceLost, match="another GPU"):
        device.renew()


def test_an_implausible_number_of_gpus_is_refused() -> None:
    boards = Boards(healthy())
    for count in (2**32 - 1, -1):
        boards.set = {("nvmlDeviceGetCount", "", ()): count}
        with pytest.raises(DriverUnavailable, match="which is not a valid number"):
            NvmlBackend(boards, ManualClock()).count()


EXTREMES = (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


def spoilt(answer: Any, extreme: int) -> list[Any]:
    """Variants of the answer: all numbers replaced by this value, and each number replaced alone."""
    if isinstance(answer, bool | str) or answer is None:
        return []
    if isinstance(answer, int | float):
        return [extreme]
    if (
        isinstance(answer, list) and answer and isinstance(answer[1], list)
    ):  # a GPM window: code and value of each metric
        return [[answer[0], [[metric, 0, float(extreme)] for metric, *_ in answer[1]]]]
    numbers = [at for at, each in enumerate(answer) if isinstance(each, int | float)]
    each = [[extreme if at == place else value for at, value in enumerate(answer)] for place in numbers]
    return [[extreme if at in numbers else value for at, value in enumerate(answer)], *each]


@pytest.mark.parametrize(("kind", "question"), ALL, ids=[f"{kind} {call} {a}" for kind, (call, _, a) in ALL])
def test_no_value_of_the_driver_breaks_a_sampling_cycle(kind: str, question: Question) -> None:
    ranges = {
        family.name: family.plausible
        for each in registry.ALL
        for family in (*each.families, *each.instance_families)
        if family.plausible is not None
    }
    if question[0] in NEEDED:
        return
    for extreme in EXTREMES:
        for answer in spoilt(ASKED[kind][question], extreme):
            boards = Boards(MAKERS[kind]())
            first = EXTREMES.index(extreme) % 2  # from the first call on, and later

            def breaks(cycle: int, boards: Boards = boards, answer: Any = answer, first: int = first) -> None:
                if cycle >= first:
                    boards.set[question] = answer

            for snapshot in cycles(boards, breaks):
                assert snapshot.up, snapshot.error
                assert ("gpu_memory_total_bytes", "", ()) not in values(snapshot) or (
                    values(snapshot)["gpu_memory_total_bytes", "", ()] > 0
                ), "a board always has memory"
                for (family, _, _), value in values(snapshot).items():
                    assert math.isfinite(value)
                    assert family not in ranges or ranges[family].holds(value), f"{family} {value}"
                for activity in (snapshot.activity, *(each.activity for each in snapshot.instances)):
                    for span in activity.spans if activity is not None else ():
                        assert 0.0 <= span.ratio <= 1.0 and span.end >= span.start
