"""A backend that simulates a scenario in the exporter's process, on the given clock. For demo and tests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from gpu_exporter.agent.devices import loads
from gpu_exporter.agent.devices.errors import NotSupported, device_error
from gpu_exporter.agent.devices.protocol import (
    ENGINES,
    Clocks,
    Device,
    EventWatch,
    Fabric,
    Gpm,
    Instance,
    InstanceIdentity,
    Memory,
    Pcie,
    PcieLink,
    Processes,
    Rates,
    RowRemaps,
    Traffic,
    UtilizationSample,
    XidEvent,
)
from gpu_exporter.agent.devices.scenario import Scenario, ScenarioGpu, ScenarioInstance
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.units import DeviceIdentity, UnitId
from gpu_exporter.common.vendor import NVIDIA

DRIVER_VERSION = "580.00.00"
RESERVED = 512 * 1024**2
# The main load times this factor is the load of a part that the scenario omits: ratios of a typical training.
FOLLOWS = {
    "graphics": 1.0,
    "sm": 0.8,
    "occupancy": 0.5,
    "tensor": 0.4,
    "dram": 0.3,
    "fp64": 0.0,
    "fp32": 0.1,
    "fp16": 0.1,
    "power": 1.0,
    "pcie": 0.01,
}
GPM_RATIOS = ("graphics", "sm", "occupancy", "tensor", "dram", "fp64", "fp32", "fp16")
THROTTLE_COUNTERS = (
    "power_cap",
    "thermal",
    "sync_boost",
    "board_limit",
    "low_utilization",
    "reliability",
    "sw_thermal",
    "hw_thermal",
    "hw_power_brake",
)
TEMPERATURE_LIMITS = {"shutdown": 95.0, "slowdown": 92.0, "gpu_max": 89.0}
LINK_GENERATION, LINK_WIDTH = 5, 16
LINK_RATE, LINK_RATE_BLACKWELL = 25e9, 50e9  # bytes per second of one NVLink in one direction
CPUS_PER_NODE = 32  # of a NUMA node of the simulated host
SLOWDOWN_AT = 87.0  # at this temperature the margin of newer boards is 0


class Scaled:
    def __init__(self, load: loads.Load, factor: float) -> None:
        self._load, self._factor = load, factor

    def integral(self, t: float) -> float:
        return self._factor * self._load.integral(t)


class ScenarioTime:
    """The present time in the scenario, and state that several GPUs share."""

    def __init__(self, scenario: Scenario, clock: Clock, sample_period_s: float = 0.2) -> None:
        self.scenario = scenario
        self.clock = clock
        self.sample_period_s = sample_period_s
        self._start = clock.monotonic()
        self.gpm_seen: dict[str, float] = {}  # when each GPU and MIG instance was last read

    def now(self) -> float:
        return self.clock.monotonic() - self._start

    def to_wall(self, t: float) -> float:
        return self.clock.wall() - self.now() + t

    def used_memory(self, unit: UnitId) -> int:
        return sum(h.memory for h in self.scenario.holders_at(self.now()) if h.unit == unit)

    def processes(self, uuid: str) -> int:
        return sum(h.processes for h in self.scenario.holders_at(self.now()) if h.unit.uuid == uuid)

    def read_gpm(
        self, uuid: str, parts: Mapping[str, loads.Load], rates: Mapping[str, float], *, with_engines: bool = False
    ) -> Gpm | None:
        """Returns mean GPM values since the last read of `uuid`. `rates`: bytes per second at full load, both ways."""
        now = self.now()
        since = self.gpm_seen.get(uuid)
        self.gpm_seen[uuid] = now
        if since is None or since >= now:
            return None
        parts_now = {name: loads.mean(parts[name], since, now) for name in GPM_RATIOS}
        parts_now |= {name: rate * loads.mean(parts[name], since, now) for name, rate in rates.items()}
        if with_engines:
            parts_now["engines"] = max(loads.mean(parts[engine], since, now) for engine in ENGINES)
        return Gpm(now - since)._replace(**parts_now)  # type: ignore[arg-type]


def resolve_parts(load: loads.Load, given: Mapping[str, loads.Load]) -> dict[str, loads.Load]:
    """Returns the load of every part: its own load in the scenario, else one derived from the main load, else 0."""
    parts: dict[str, loads.Load] = {name: loads.Constant(0.0) for name in ("encoder", "decoder", "jpeg", "ofa")}
    parts["nvlink"] = loads.Constant(0.0)
    parts.update((name, Scaled(load, factor)) for name, factor in FOLLOWS.items())
    parts.update(given)
    return parts


class SimulatedInstance:
    def __init__(self, stage: ScenarioTime, gpu: ScenarioGpu, instance: ScenarioInstance) -> None:
        self._stage, self._gpu, self._instance = stage, gpu, instance
        slices = max(1, round(gpu.memory_slices * instance.memory / gpu.product.memory))
        self.identity = InstanceIdentity(instance.uuid, instance.mig, instance.profile, instance.sm_slices, slices)

    def read_memory(self) -> Memory:
        used = self._stage.used_memory(UnitId(self._gpu.uuid, self._instance.uuid))
        return Memory(self._instance.memory, used, self._instance.memory - used, 0)

    def read_gpm(self) -> Gpm | None:
        if not self._gpu.product.gpm:
            raise NotSupported("nvmlGpmMetricsGet", "NVML_ERROR_NOT_SUPPORTED")
        return self._stage.read_gpm(
            self._instance.uuid, resolve_parts(self._instance.load, self._instance.parts), {}, with_engines=True
        )


class SimulatedDevice(Device):
    def __init__(self, stage: ScenarioTime, gpu: ScenarioGpu) -> None:
        self._stage, self._gpu = stage, gpu
        self.parts = resolve_parts(gpu.load, gpu.parts)
        self._answered: set[str] = set()
        first_cpu = CPUS_PER_NODE * gpu.health.get("numa_node", 0)
        self.identity = DeviceIdentity(
            index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.product.name,
            driver_version=DRIVER_VERSION,
            pci_bus_id=f"0000:{0x10 + gpu.index:02x}:00.0",
            minor=gpu.index,
            mig_mode=self._mig_mode(stage.now()),
            cpus=frozenset(range(first_cpu, first_cpu + CPUS_PER_NODE)),
        )

    def _mig_mode(self, now: float) -> str:
        if not self._gpu.product.mig:
            return "unsupported"
        return "enabled" if self._gpu.has_mig(now) else "disabled"

    def _meet_faults(self, call: str, has_it: bool = True) -> float:
        """Applies the scenario's present fault for `call`: raises or waits. Returns the scenario's time in seconds.

        Raises NotSupported after that if the board does not have the value (`has_it`).
        """
        fault = self._gpu.fault(call, self._stage.now())
        if fault is None:
            self.answers += 1
            self._answered.add(call)
        elif fault.hang_s:
            threading.Event().wait(fault.hang_s)
        else:
            error = device_error(call, fault.error)
            error.once_answered = call in self._answered
            raise error
        self._require(has_it, call)
        return self._stage.now()

    def _load(self, now: float) -> loads.Load:
        """Returns the load of the whole board. With MIG, the combined load of its instances."""
        if not self._gpu.has_mig(now):
            return self._gpu.load
        return Partitioned(self._gpu.instances, self.identity.mig_slices)

    def _require(self, has_it: bool, call: str) -> None:
        if not has_it:
            raise NotSupported(call, "NVML_ERROR_NOT_SUPPORTED")

    def read_utilization(self) -> Rates:
        now = self._meet_faults("nvmlDeviceGetUtilizationRates")
        self._require(not self._gpu.has_mig(now), "nvmlDeviceGetUtilizationRates")
        gpu = loads.mean(self._gpu.load, max(0.0, now - self._stage.sample_period_s), now)
        return Rates(gpu, 0.5 * gpu)

    def read_utilization_samples(self, since_wall: float) -> Sequence[UtilizationSample]:
        now = self._meet_faults("nvmlDeviceGetSamples")
        self._require(not self._gpu.has_mig(now), "nvmlDeviceGetSamples")
        period = self._stage.sample_period_s
        zero = self._stage.to_wall(0.0)
        last = int(now / period)
        first = max(1, last - 100, int((since_wall - zero) / period) + 1)
        return [
            UtilizationSample(zero + i * period, loads.mean(self._gpu.load, (i - 1) * period, i * period))
            for i in range(first, last + 1)
            if zero + i * period > since_wall
        ]

    def read_engine(self, engine: str) -> float:
        call = f"nvmlDeviceGet{'Jpg' if engine == 'jpeg' else engine.capitalize()}Utilization"
        now = self._meet_faults(call, engine in ("encoder", "decoder") or self._gpu.product.jpeg_ofa)
        return loads.mean(self.parts[engine], max(0.0, now - 1.0), now)

    def read_gpm(self) -> Gpm | None:
        now = self._meet_faults("nvmlGpmMetricsGet", self._gpu.product.gpm)
        parts = resolve_parts(self._load(now), self._gpu.parts)
        rates = {"pcie": 2 * self._gpu.product.pcie, "nvlink": 2 * self._gpu.product.nvlink}
        return self._stage.read_gpm(self._gpu.uuid, parts, {name: rate for name, rate in rates.items() if rate})

    def reopen_gpm(self, subject: str) -> None:
        self._stage.gpm_seen.pop(subject or self._gpu.uuid, None)

    def read_memory(self) -> Memory:
        self._meet_faults("nvmlDeviceGetMemoryInfo")
        units = [UnitId(self._gpu.uuid)] + [UnitId(self._gpu.uuid, i.uuid) for i in self._gpu.instances]
        used = self._gpu.kept_memory + sum(self._stage.used_memory(unit) for unit in units)
        total = self._gpu.product.memory
        return Memory(total, used, total - RESERVED - used, RESERVED)

    def _mean_power(self, start: float, end: float) -> float:
        product = self._gpu.product
        load = self._gpu.parts.get("power", self._load(end))
        return product.idle_power + (0.9 * product.power_limit - product.idle_power) * loads.mean(load, start, end)

    def read_power(self) -> float:
        now = self._meet_faults("nvmlDeviceGetPowerUsage")
        return self._mean_power(max(0.0, now - 1.0), now)

    def read_power_limit(self) -> float:
        self._meet_faults("nvmlDeviceGetEnforcedPowerLimit")
        return self._gpu.product.power_limit

    def read_default_power_limit(self) -> float:
        self._meet_faults("nvmlDeviceGetPowerManagementDefaultLimit")
        return self._gpu.product.power_limit

    def read_energy(self) -> float:
        now = self._meet_faults("nvmlDeviceGetTotalEnergyConsumption")
        return self._mean_power(0.0, now) * now

    def _temperature(self, now: float) -> float:
        hot = 10.0 if self._gpu.throttle else 0.0
        return round(30.0 + hot + 45.0 * loads.mean(self._load(now), max(0.0, now - 30.0), now))

    def read_temperature(self) -> float:
        return self._temperature(self._meet_faults("nvmlDeviceGetTemperature"))

    def read_memory_temperature(self) -> float:
        now = self._meet_faults("nvmlDeviceGetFieldValues", self._gpu.product.memory_sensor)
        return self._temperature(now) + 8.0

    def read_temperature_margin(self) -> float:
        now = self._meet_faults("nvmlDeviceGetMarginTemperature", self._gpu.product.margin)
        return SLOWDOWN_AT - self._temperature(now)

    def read_temperature_limits(self) -> Mapping[str, float]:
        self._meet_faults("nvmlDeviceGetTemperatureThreshold")
        return {} if self._gpu.product.margin else dict(TEMPERATURE_LIMITS)

    def read_clocks(self) -> Clocks:
        self._meet_faults("nvmlDeviceGetClockInfo")
        product = self._gpu.product
        slow = 0.5 if self._gpu.throttle else 1.0
        return Clocks(product.sm_clock * slow, product.memory_clock, product.sm_clock)

    def read_performance_state(self) -> int:
        now = self._meet_faults("nvmlDeviceGetPerformanceState")
        return 0 if loads.mean(self._load(now), max(0.0, now - 1.0), now) else 8

    def read_throttle_seconds(self) -> Mapping[str, float]:
        now = self._meet_faults("nvmlDeviceGetFieldValues")
        return {reason: self._gpu.throttle.get(reason, 0.0) * now for reason in THROTTLE_COUNTERS}

    def read_throttle_active(self) -> Mapping[str, bool]:
        self._meet_faults("nvmlDeviceGetCurrentClocksEventReasons")
        reasons = ("power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake", "sync_boost")
        return {reason: reason in self._gpu.throttle for reason in reasons}

    def _traffic(self, part: str, rate: float) -> Traffic:
        now = self._meet_faults("nvmlDeviceGetFieldValues", rate > 0)
        one_way = rate * self.parts[part].integral(now)
        return Traffic(rx=one_way, tx=one_way / 2)

    def read_pcie(self) -> Pcie:
        rate = self._gpu.product.pcie
        return Pcie(self._traffic("pcie", rate) if rate else None, self._gpu.health.get("pcie_replays", 0))

    def read_pcie_link(self) -> PcieLink:
        now = self._meet_faults("nvmlDeviceGetCurrPcieLinkWidth")
        works = loads.mean(self._load(now), max(0.0, now - 1.0), now) > 0.0
        generation = self._gpu.health.get("pcie_generation") or LINK_GENERATION
        return PcieLink(
            generation if works else 1, LINK_GENERATION, self._gpu.health.get("pcie_width") or LINK_WIDTH, LINK_WIDTH
        )

    def read_nvlink(self) -> Traffic:
        return self._traffic("nvlink", self._gpu.product.nvlink)

    def read_nvlinks_active(self) -> int:
        self._meet_faults("nvmlDeviceGetNvLinkState")
        product = self._gpu.product
        self._require(product.nvlink > 0 and self.identity.mig_mode != "enabled", "nvmlDeviceGetNvLinkState")
        links = round(product.nvlink / (LINK_RATE_BLACKWELL if product.link_bytes else LINK_RATE))
        return links - self._gpu.health.get("nvlinks_down", 0)

    def read_fabric(self) -> Fabric:
        self._meet_faults("nvmlDeviceGetGpuFabricInfoV")
        status = self._gpu.health.get("fabric_status", 0)
        self._require(status > 0, "nvmlDeviceGetGpuFabricInfoV")
        return Fabric(status)

    def read_ecc_errors(self) -> Mapping[str, int]:
        self._meet_faults("nvmlDeviceGetTotalEccErrors")
        health = self._gpu.health
        return {severity: health.get(f"ecc_{severity}", 0) for severity in ("corrected", "uncorrected")}

    def read_row_remaps(self) -> RowRemaps:
        now = self._meet_faults("nvmlDeviceGetRemappedRows")
        # Not reported while MIG instances exist (API reference).
        self._require(self._gpu.product.remap and not self._gpu.instances_at(now), "nvmlDeviceGetRemappedRows")
        health = self._gpu.health
        return RowRemaps(
            health.get("remapped_corrected", 0),
            health.get("remapped_uncorrected", 0),
            bool(health.get("remap_pending")),
            bool(health.get("remap_failed")),
        )

    def read_retired_pages(self) -> Mapping[str, int]:
        self._meet_faults("nvmlDeviceGetFieldValues")
        if self._gpu.product.remap:
            return {}
        return {cause: self._gpu.health.get(f"retired_{cause}", 0) for cause in ("single_bit", "double_bit")}

    def read_recovery_action(self) -> int:
        self._meet_faults("nvmlDeviceGetFieldValues")
        return self._gpu.health.get("recovery_action", 0)

    def read_processes(self) -> Processes:
        self._meet_faults("nvmlDeviceGetComputeRunningProcesses")
        return Processes(self._stage.processes(self._gpu.uuid), 0)

    def read_persistence_mode(self) -> bool:
        return True

    def list_instances(self) -> Sequence[Instance]:
        now = self._meet_faults("nvmlDeviceGetMigMode")
        mode = self._mig_mode(now)
        if mode != self.identity.mig_mode:
            self.identity = self.identity._replace(mig_mode=mode)
        found = [SimulatedInstance(self._stage, self._gpu, instance) for instance in self._gpu.instances_at(now)]
        parts = [instance.identity.mig.partition("/")[0] for instance in found]
        for position, (part, instance) in enumerate(zip(parts, found, strict=True)):
            if parts.count(part) > 1:  # several compute instances share the memory of their GPU instance
                memory: Literal["first", "none"] = "none" if part in parts[:position] else "first"
                instance.identity = instance.identity._replace(memory=memory)
        return found


class Partitioned:
    """The load of a board with MIG: the sum of its instances' loads, each times its share of the board's slices."""

    def __init__(self, instances: Sequence[ScenarioInstance], board_slices: int) -> None:
        self._instances = instances
        self._board_slices = board_slices

    def integral(self, t: float) -> float:
        total = 0.0
        for instance in self._instances:
            end = min(max(t, instance.start), instance.end)
            total += instance.sm_slices * (instance.load.integral(end) - instance.load.integral(instance.start))
        return total / self._board_slices


class SimulatedEvents:
    """The scenario's XIDs. Each is returned once, at its time."""

    def __init__(self, stage: ScenarioTime, devices: Iterable[Device]) -> None:
        self._stage = stage
        self.covered = frozenset(device.identity.uuid for device in devices)
        self.complete = True
        self._pending = sorted(
            (at, gpu.uuid, xid) for gpu in stage.scenario.gpus for at, xid in gpu.xids if gpu.uuid in self.covered
        )

    def wait(self, timeout_s: float) -> XidEvent | None:
        if not self._pending or self._pending[0][0] > self._stage.now():
            self._stage.clock.wait(threading.Event(), timeout_s)
        if not self._pending or self._pending[0][0] > self._stage.now():
            return None
        _, uuid, xid = self._pending.pop(0)
        return XidEvent(uuid, xid)

    def close(self) -> None:
        return


class SimulatedBackend:
    name = "simulated"
    vendor = NVIDIA
    is_live = False

    def __init__(self, stage: ScenarioTime) -> None:
        self._stage = stage
        self._devices = [SimulatedDevice(stage, gpu) for gpu in stage.scenario.gpus]

    def open(self) -> None:
        return

    def count(self) -> int:
        return len(self._devices)

    def find(self, position: int) -> Device:
        return self._devices[position]

    def watch_events(self, devices: Iterable[Device]) -> EventWatch:
        return SimulatedEvents(self._stage, devices)

    def close(self) -> None:
        return
