"""A backend that plays a scenario, in the process and on the given clock. For the demo, development and tests."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from gpu_exporter.clock import Clock
from gpu_exporter.devices import loads
from gpu_exporter.devices.errors import DeviceError, DeviceLost, NotSupported
from gpu_exporter.devices.protocol import (
    Clocks,
    Discovered,
    Instance,
    InstanceIdentity,
    Memory,
    Processes,
    UtilizationSample,
)
from gpu_exporter.devices.scenario import Scenario, ScenarioGpu, ScenarioInstance
from gpu_exporter.model import DeviceIdentity, UnitId

DRIVER_VERSION = "580.00.00"
RESERVED = 512 * 1024**2
LOST = ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED")


class Stage:
    """The scenario's time on a clock, and its questions that concern more than one GPU."""

    def __init__(self, scenario: Scenario, clock: Clock, sample_period_s: float = 0.2) -> None:
        self.scenario = scenario
        self.clock = clock
        self.sample_period_s = sample_period_s
        self._start = clock.monotonic()
        self.gpm_seen: dict[str, float] = {}  # when each MIG instance was last read

    def now(self) -> float:
        return self.clock.monotonic() - self._start

    def to_wall(self, t: float) -> float:
        return self.clock.wall() - self.now() + t

    def used_memory(self, unit: UnitId) -> int:
        return sum(h.memory for h in self.scenario.holders_at(self.now()) if h.unit == unit)

    def processes(self, uuid: str) -> int:
        return sum(h.processes for h in self.scenario.holders_at(self.now()) if h.unit.uuid == uuid)


class SimulatedInstance:
    """One MIG instance of the scenario."""

    def __init__(self, stage: Stage, gpu: ScenarioGpu, instance: ScenarioInstance) -> None:
        self._stage, self._gpu, self._instance = stage, gpu, instance
        self.identity = InstanceIdentity(instance.uuid, instance.mig, instance.profile, instance.sm_slices)

    def read_memory(self) -> Memory:
        used = self._stage.used_memory(UnitId(self._gpu.uuid, self._instance.uuid))
        return Memory(self._instance.memory, used, self._instance.memory - used, 0)

    def read_graphics_active(self) -> float:
        if not self._gpu.product.gpm:
            raise NotSupported("nvmlGpmMetricsGet", "NVML_ERROR_NOT_SUPPORTED")
        now = self._stage.now()  # GPM tells the mean between two samples
        since = self._stage.gpm_seen.get(self._instance.uuid, now - self._stage.sample_period_s)
        self._stage.gpm_seen[self._instance.uuid] = now
        return loads.mean(self._instance.load, max(0.0, since), now)


class SimulatedDevice:
    """One GPU of the scenario."""

    def __init__(self, stage: Stage, gpu: ScenarioGpu) -> None:
        self._stage, self._gpu = stage, gpu
        self.identity = DeviceIdentity(
            index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.product.name,
            driver_version=DRIVER_VERSION,
            pci_bus_id=f"0000:{0x10 + gpu.index:02x}:00.0",
            minor=gpu.index,
            mig_mode="enabled" if gpu.mig else "disabled",
        )

    def _meet_faults(self, call: str) -> float:
        """Suffer the fault that the scenario has for `call` now; the scenario's time otherwise."""
        now = self._stage.now()
        fault = self._gpu.fault(call, now)
        if fault is None:
            return now
        if fault.hang_s:
            threading.Event().wait(fault.hang_s)
            return self._stage.now()
        kind = {"NVML_ERROR_NOT_SUPPORTED": NotSupported}.get(
            fault.error, DeviceLost if fault.error in LOST else DeviceError
        )
        raise kind(call, fault.error)

    def _load(self) -> loads.Load:
        """Load of the whole board: a partitioned GPU is as busy as its busiest slices together."""
        if not self._gpu.mig:
            return self._gpu.load
        return _Partitioned(self._gpu.instances)

    def read_utilization(self) -> float:
        now = self._meet_faults("nvmlDeviceGetUtilizationRates")
        if self._gpu.mig:
            raise NotSupported("nvmlDeviceGetUtilizationRates", "NVML_ERROR_NOT_SUPPORTED")
        return loads.mean(self._gpu.load, max(0.0, now - self._stage.sample_period_s), now)

    def read_utilization_samples(self, since_wall: float) -> Sequence[UtilizationSample]:
        now = self._meet_faults("nvmlDeviceGetSamples")
        if self._gpu.mig:
            raise NotSupported("nvmlDeviceGetSamples", "NVML_ERROR_NOT_SUPPORTED")
        period = self._stage.sample_period_s
        zero = self._stage.to_wall(0.0)
        last = int(now / period)
        first = max(1, last - 100, int((since_wall - zero) / period) + 1)
        return [
            UtilizationSample(zero + i * period, loads.mean(self._gpu.load, (i - 1) * period, i * period))
            for i in range(first, last + 1)
            if zero + i * period > since_wall
        ]

    def read_encoder_utilization(self) -> float:
        now = self._meet_faults("nvmlDeviceGetEncoderUtilization")
        if self._gpu.encoder is None:
            return 0.0
        return loads.mean(self._gpu.encoder, max(0.0, now - 1.0), now)

    def read_decoder_utilization(self) -> float:
        self._meet_faults("nvmlDeviceGetDecoderUtilization")
        return 0.0

    def read_memory(self) -> Memory:
        self._meet_faults("nvmlDeviceGetMemoryInfo")
        units = [UnitId(self._gpu.uuid)] + [UnitId(self._gpu.uuid, i.uuid) for i in self._gpu.instances]
        used = sum(self._stage.used_memory(unit) for unit in units)
        total = self._gpu.product.memory
        return Memory(total, used, total - RESERVED - used, RESERVED)

    def _mean_power(self, start: float, end: float) -> float:
        product = self._gpu.product
        return product.idle_power + (0.9 * product.power_limit - product.idle_power) * loads.mean(
            self._load(), start, end
        )

    def read_power(self) -> float:
        now = self._meet_faults("nvmlDeviceGetPowerUsage")
        return self._mean_power(max(0.0, now - 1.0), now)

    def read_power_limit(self) -> float:
        self._meet_faults("nvmlDeviceGetEnforcedPowerLimit")
        return self._gpu.product.power_limit

    def read_energy(self) -> float:
        now = self._meet_faults("nvmlDeviceGetTotalEnergyConsumption")
        return self._mean_power(0.0, now) * now

    def read_temperature(self) -> float:
        now = self._meet_faults("nvmlDeviceGetTemperature")
        hot = 10.0 if self._gpu.throttle else 0.0
        return round(30.0 + hot + 45.0 * loads.mean(self._load(), max(0.0, now - 30.0), now))

    def read_clocks(self) -> Clocks:
        self._meet_faults("nvmlDeviceGetClockInfo")
        product = self._gpu.product
        slow = 0.5 if self._gpu.throttle else 1.0
        return Clocks(product.sm_clock * slow, product.memory_clock, product.sm_clock)

    def read_throttle_seconds(self) -> Mapping[str, float]:
        now = self._meet_faults("nvmlDeviceGetFieldValues")
        reasons = ("power_cap", "thermal", "sw_thermal", "hw_thermal", "hw_power_brake", "sync_boost")
        return {reason: self._gpu.throttle.get(reason, 0.0) * now for reason in reasons}

    def read_throttle_active(self) -> Mapping[str, bool]:
        self._meet_faults("nvmlDeviceGetCurrentClocksEventReasons")
        reasons = ("power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake", "sync_boost")
        return {reason: reason in self._gpu.throttle for reason in reasons}

    def read_processes(self) -> Processes:
        self._meet_faults("nvmlDeviceGetComputeRunningProcesses")
        return Processes(self._stage.processes(self._gpu.uuid), 0)

    def list_instances(self) -> Sequence[Instance]:
        self._meet_faults("nvmlDeviceGetMigMode")
        return [SimulatedInstance(self._stage, self._gpu, instance) for instance in self._gpu.instances]


class _Partitioned:
    """Load of a board as the slice-weighted load of its instances; a board has seven compute slices."""

    def __init__(self, instances: Sequence[ScenarioInstance]) -> None:
        self._instances = instances

    def integral(self, t: float) -> float:
        return sum(i.load.integral(t) * i.sm_slices for i in self._instances) / 7.0


class SimulatedBackend:
    """All GPUs of a scenario."""

    name = "simulated"

    def __init__(self, stage: Stage) -> None:
        self._devices = [SimulatedDevice(stage, gpu) for gpu in stage.scenario.gpus]

    def open(self) -> None:
        return

    def discover(self) -> Sequence[Discovered]:
        return [Discovered(device.identity.index, device) for device in self._devices]

    def close(self) -> None:
        return
