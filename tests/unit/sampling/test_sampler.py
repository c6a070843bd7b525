"""One cycle over one device: a failure affects as little as possible."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise

from tests.testbed.processes import wait_for
from tests.testbed.samples import value

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.devices.errors import DeviceError
from gpu_exporter.agent.devices.protocol import Processes, Rates
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.devices.simulated import ScenarioTime, SimulatedDevice
from gpu_exporter.agent.sampling.activity.witnesses import ActivityRules
from gpu_exporter.agent.sampling.loop import DeviceLoop, LoopEvents
from gpu_exporter.agent.sampling.reader import GPM_WINDOW_S
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock, SystemClock
from gpu_exporter.common.model.readings import DeviceSnapshot, GpuProcess

RULES = ActivityRules(1.0, 3, 0.3, 0.25)


def make(faults: list[dict], clock: ManualClock | SystemClock, **gpu: object) -> DeviceSampler:
    scenario = parse_scenario(
        {"gpus": [{"model": "H100", "load": {"kind": "constant", "value": 0.5}, "faults": faults, **gpu}]}
    )
    return DeviceSampler(SimulatedDevice(ScenarioTime(scenario, clock), scenario.gpus[0]), registry.ALL, clock, RULES)


def test_a_failed_call_affects_only_its_field_and_is_counted() -> None:
    clock = ManualClock()
    sampler = make([{"at": 0, "call": "nvmlDeviceGetTemperature", "error": "NVML_ERROR_UNKNOWN"}], clock)
    clock.advance(5)
    snapshot = sampler.sample()
    assert snapshot.up
    assert value(snapshot, "gpu_temperature_celsius") is None
    assert value(snapshot, "gpu_power_watts") is not None
    assert value(snapshot, "gpu_sm_clock_hertz") == 1980e6
    assert sampler.error_counts == {("nvmlDeviceGetTemperature", "NVML_ERROR_UNKNOWN"): 1}
    assert {o.name for o in snapshot.outcomes if not o.success} == {"thermal"}


def test_a_value_that_the_hardware_does_not_report_is_absent_without_an_error() -> None:
    clock = ManualClock()
    sampler = make(
        [{"at": 0, "call": "nvmlDeviceGetTotalEnergyConsumption", "error": "NVML_ERROR_NOT_SUPPORTED"}], clock
    )
    clock.advance(5)
    snapshot = sampler.sample()
    assert value(snapshot, "gpu_energy_joules_total") is None
    assert not sampler.error_counts
    assert all(outcome.success for outcome in snapshot.outcomes)


def test_a_failed_utilization_is_unknown_activity_and_never_zero() -> None:
    clock = ManualClock()
    faults = [
        {"at": 10, "call": call, "error": "NVML_ERROR_UNKNOWN"}
        for call in ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetSamples")
    ]
    sampler = make(faults, clock)
    clock.advance(5)
    assert sampler.sample().activity is not None
    clock.advance(6)
    snapshot = sampler.sample()
    assert value(snapshot, "gpu_utilization_ratio") is None
    assert snapshot.activity is not None  # the power draw still shows activity, but books no time
    assert snapshot.activity.witnesses == 0
    assert all(span.start == span.end and span.other for span in snapshot.activity.spans)


def test_an_invalid_rate_is_discarded_and_contradicts_zeros() -> None:
    """Seen with zombie processes: 255 percent, while the ring reads 0."""
    clock = ManualClock()
    sampler = make([], clock, load={"kind": "constant", "value": 0})
    sampler.device.read_utilization = lambda: Rates(2.55, None)  # type: ignore[method-assign]
    for _ in range(5):
        clock.advance(1.0)
        snapshot = sampler.sample()
        assert value(snapshot, "gpu_utilization_ratio") is None
        assert snapshot.activity is not None
        assert snapshot.activity.spans == ()
    assert sampler.error_counts["nvmlDeviceGetUtilizationRates", "OUT_OF_RANGE"] == 5


def test_a_lost_gpu_has_only_its_identity_until_it_comes_back() -> None:
    clock = ManualClock()
    sampler = make([{"at": 10, "for": 10, "call": "*", "error": "NVML_ERROR_GPU_IS_LOST"}], clock)
    clock.advance(5)
    assert sampler.sample().up
    clock.advance(10)
    lost = sampler.sample()
    assert (lost.up, lost.samples, lost.activity) == (False, (), None)
    assert lost.identity.uuid.startswith("GPU-")
    clock.advance(10)
    assert sampler.sample().up


def test_mig_instances_have_no_values_of_the_board_and_the_board_has_no_utilization() -> None:
    clock = ManualClock()
    sampler = make([], clock, mig=[{"profile": "3g.40gb", "load": {"kind": "constant", "value": 0.5}}])
    clock.advance(5)
    sampler.sample()
    clock.advance(1)
    snapshot = sampler.sample()
    assert value(snapshot, "gpu_utilization_ratio") is None
    assert snapshot.activity is not None  # GPM shows activity of the board, but books no time for the board
    assert snapshot.activity.witnesses == 0
    assert all(span.start == span.end for span in snapshot.activity.spans)
    (instance,) = snapshot.instances
    assert {sample.family.name for sample in instance.samples} == {
        "gpu_mig_info",
        "gpu_mig_activity_supported",
        "gpu_mig_memory_used_bytes",
        "gpu_mig_memory_total_bytes",
        "gpu_mig_temperature_celsius",
        "gpu_mig_graphics_active_ratio",
        "gpu_mig_sm_active_ratio",
        "gpu_mig_tensor_active_ratio",
        "gpu_mig_dram_active_ratio",
        "gpu_mig_power_watts",
        "gpu_mig_energy_joules_total",
    }
    assert instance.activity is not None
    assert [span.ratio for span in instance.activity.spans] == [0.5]


def test_mig_instances_without_gpm_have_no_activity() -> None:
    clock = ManualClock()
    scenario = parse_scenario({"gpus": [{"model": "A100", "mig": [{"profile": "1g.10gb"}]}]})
    sampler = DeviceSampler(
        SimulatedDevice(ScenarioTime(scenario, clock), scenario.gpus[0]), registry.ALL, clock, RULES
    )
    clock.advance(5)
    (instance,) = sampler.sample().instances
    assert instance.activity is None
    assert {s.family.name: s.value for s in instance.samples}["gpu_mig_activity_supported"] == 0.0


def make_loop(
    sampler: DeviceSampler,
    clock: ManualClock | SystemClock,
    interval_s: float,
    deadline_s: float,
    deliver: Callable[[DeviceSnapshot], None],
) -> tuple[DeviceLoop, threading.Event]:
    """A loop, and the event that it sets after its first cycle."""

    def changed(reason: str) -> None:
        raise AssertionError(reason)

    first = threading.Event()
    events = LoopEvents(deliver, changed, first.set)
    return DeviceLoop(0, lambda _: sampler.device, lambda _: sampler, clock, interval_s, deadline_s, events), first


def test_a_hung_call_is_reported_while_it_hangs_and_the_loop_continues_after_it() -> None:
    clock = SystemClock()
    sampler = make([], clock)
    seen: list[DeviceSnapshot] = []
    done, released = threading.Event(), threading.Event()
    original = sampler.sample
    sampler.sample = lambda: (released.wait(), original())[1]  # type: ignore[method-assign]

    def deliver(snapshot: DeviceSnapshot) -> None:
        seen.append(snapshot)
        if len(seen) == 3:
            done.set()

    loop, first = make_loop(sampler, clock, 0.05, 0.1, deliver)
    loop.start()
    wait_for(loop.is_hung, "the hang to be reported")
    assert loop.latest is None
    assert not first.is_set()
    released.set()
    assert done.wait(60.0)
    assert first.is_set()
    assert not loop.is_hung()
    loop.ask_to_stop()
    assert loop.join(60.0)


def test_the_second_cycle_follows_at_once_and_later_cycles_as_the_device_allows() -> None:
    """GPM compares two moments, so the first scrapes have GPM values."""
    begun: list[float] = []
    clock = ManualClock()
    sampler = make([], clock)
    original = sampler.sample

    def sample() -> DeviceSnapshot:
        begun.append(clock.monotonic())
        snapshot = original()
        sampler._activity.interval_s = 2.0 if len(begun) < 4 else 5.0
        return snapshot

    def deliver(_snapshot: DeviceSnapshot) -> None:
        if len(begun) == 6:
            loop.ask_to_stop()

    sampler.sample = sample  # type: ignore[method-assign]
    loop, _ = make_loop(sampler, clock, 1.0, 5.0, deliver)
    loop.start()
    assert loop.join(60.0)
    assert [round(later - earlier, 3) for earlier, later in pairwise(begun)] == [GPM_WINDOW_S, 2.0, 2.0, 5.0, 5.0]


def test_a_bug_in_the_exporter_does_not_end_the_sampling_loop() -> None:
    clock = SystemClock()
    sampler = make([], clock)
    broken = [True]
    original = sampler.sample

    def sample() -> DeviceSnapshot:
        if broken.pop() if broken else False:
            raise ZeroDivisionError("a bug")
        return original()

    sampler.sample = sample  # type: ignore[method-assign]
    done = threading.Event()
    loop, first = make_loop(sampler, clock, 0.01, 5.0, lambda _snapshot: done.set())
    loop.start()
    assert first.wait(60.0)
    assert done.wait(60.0)
    loop.ask_to_stop()
    assert loop.join(60.0)
    assert loop.task.failures == 1


def test_a_process_list_is_kept_with_its_time_until_the_next_list_or_a_failure() -> None:
    clock = ManualClock()
    answers: list[Processes | DeviceError] = [
        Processes(1, 0, (GpuProcess(4711),)),
        Processes(1, 0, (GpuProcess(4712),)),
        DeviceError("nvmlDeviceGetComputeRunningProcesses_v3", "NVML_ERROR_UNKNOWN"),
        Processes(1, 0, None),
    ]

    class Listing(SimulatedDevice):
        def read_processes(self) -> Processes:
            answer = answers.pop(0)
            if isinstance(answer, DeviceError):
                raise answer
            return answer

    scenario = parse_scenario({"gpus": [{"model": "H100"}]})
    device = Listing(ScenarioTime(scenario, clock), scenario.gpus[0])
    sampler = DeviceSampler(device, registry.ALL, clock, RULES)
    seen: list[tuple[float, int] | None] = []
    for _ in range(16):
        listed = sampler.sample().processes
        seen.append(None if listed is None else (listed.monotonic, listed.processes[0].pid))
        clock.advance(1.0)
    start = clock.monotonic() - 16.0
    assert seen == [(start, 4711)] * 5 + [(start + 5.0, 4712)] * 5 + [None] * 6
