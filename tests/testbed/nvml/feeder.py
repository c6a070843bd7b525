"""Writes the shared table: from a running scenario, or directly from a test.

python -m tests.testbed.nvml.feeder SCENARIO TABLE     feeds until it is ended
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import mmap
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gpu_exporter.agent.devices import loads
from gpu_exporter.agent.devices.nvml import constants
from gpu_exporter.agent.devices.protocol import ENGINES
from gpu_exporter.agent.devices.scenario import Scenario, ScenarioGpu, ScenarioInstance, load_scenario
from gpu_exporter.agent.devices.simulated import Partitioned, ScenarioTime, SimulatedDevice, resolve_parts
from gpu_exporter.common.clock import Clock, SystemClock
from tests.testbed.nvml import layout

PERIOD_S = 1 / 6  # an A100 updates its utilization every 0.2 s, a V100 every 1/6 s (measured in the recordings)
FEED_S = 0.05
ERROR_NUMBERS = {name: number for number, name in constants.ERROR_NAMES.items()}
UINT, ULONGLONG = 1, 3  # nvmlValueType_t
MIB = 1024.0**2
PROFILE_IDS = {1: 19, 2: 14, 3: 9, 4: 5, 7: 0}  # by compute slices, as `nvidia-smi mig -lgip` of an A100 lists them
FIRST_PID = 5_000_000  # above the largest pid of Linux (4,194,304), so no process of this machine has it
NO_INSTANCE = 0xFFFFFFFF
# Percent by GPM metric: the part from which it is computed (traffic: see _rates).
GPM_PERCENT = {metric: name for name, metric in (constants.GPM_RATIOS | constants.GPM_PIPES).items()}
GPM_ENGINES = {30: "decoder", 40: "jpeg", 50: "ofa", 166: "encoder"}
SM_CLOCK_CYCLES = 1e9  # cycles of all SMs together in a second; the ratio matters, not the number


class NvmlTable:
    """The mapped file. Create one, fill it, and point GPU_EXPORTER_NVML_TABLE at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(ctypes.sizeof(layout.Table)))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.table = layout.Table.from_buffer(self._map)
        self.table.magic = layout.MAGIC
        self.table.version = layout.VERSION
        self.table.driver_version = b"580.00.00"
        for device in self.table.devices:
            for field in layout.NUMBERS.values():
                setattr(device, field, layout.UNSET)

    def push_event(self, index: int, xid: int, kind: int = constants.nvmlEventTypeXidCriticalError) -> None:
        """Make the driver report an event of one device."""
        entry = self.table.events[self.table.event_count % layout.MAX_EVENTS]
        entry.device, entry.type, entry.data = index, kind, xid
        self.table.event_count += 1

    def set_field(
        self, index: int, field: int, value: float, scope: int = 0, kind: int = ULONGLONG, error: str = ""
    ) -> None:
        """Set one answer of nvmlDeviceGetFieldValues; with `error` the field fails."""
        device = self.table.devices[index]
        for position in range(device.field_count + 1):
            entry = device.fields[position]
            if position == device.field_count or (entry.id, entry.scope) == (field, scope):
                entry.id, entry.scope, entry.type, entry.value = field, scope, kind, int(value)
                entry.rc = ERROR_NUMBERS[error] if error else 0
                device.field_count = max(device.field_count, position + 1)
                return

    @contextlib.contextmanager
    def writing(self, index: int) -> Iterator[layout.Device]:
        """One device for a consistent write: readers wait, or see the state before or after, never a part."""
        device = self.table.devices[index]
        device.sequence += 1
        try:
            yield device
        finally:
            device.sequence += 1

    def set_call(self, index: int, call: str, error: str = "", delay_s: float = 0.0) -> None:
        """Make `call` ("*" is every call) of one device sleep, and then fail with NVML's `error` ("" succeeds)."""
        for position, name in enumerate(layout.CALLS):
            if call in ("*", name):
                entry = self.table.devices[index].calls[position]
                entry.rc = ERROR_NUMBERS[error] if error else 0
                entry.delay_us = int(delay_s * 1e6)

    def push_work(self, index: int, wall: float, pid: int, percent: int, decoder: int = 0) -> None:
        """Add the work of one process in the period that ends at `wall`; a full table drops the oldest entry.

        Call inside `writing`.
        """
        device = self.table.devices[index]
        if device.work_count == layout.MAX_WORK:
            size = ctypes.sizeof(layout.Work)
            ctypes.memmove(device.work, ctypes.byref(device.work, size), size * (layout.MAX_WORK - 1))
            device.work_count -= 1
        entry = device.work[device.work_count]
        entry.time_us, entry.pid, entry.sm, entry.decoder = int(wall * 1e6), pid, percent, decoder
        device.work_count += 1

    def push_sample(self, index: int, wall: float, percent: int, **engines: int) -> None:
        """Append to the device's ring: utilization and percent by engine; a full ring drops the oldest entry.

        Call inside `writing`.
        """
        device = self.table.devices[index]
        if device.sample_count == layout.MAX_SAMPLES:
            ctypes.memmove(
                device.samples,
                ctypes.byref(device.samples, ctypes.sizeof(layout.RingSample)),
                ctypes.sizeof(layout.RingSample) * (layout.MAX_SAMPLES - 1),
            )
            device.sample_count -= 1
        entry = device.samples[device.sample_count]
        entry.time_us, entry.gpu = int(wall * 1e6), percent
        for engine in ENGINES:
            setattr(entry, engine, engines.get(engine, 0))
        device.sample_count += 1


class ScenarioFeeder:
    """Plays a scenario into a table."""

    def __init__(self, scenario: Scenario, table: NvmlTable, clock: Clock | None = None) -> None:
        self._scenario = scenario
        self._table = table
        # The table applies the faults: the values themselves are always present.
        clean = Scenario(tuple(dataclasses.replace(gpu, faults=()) for gpu in scenario.gpus), scenario.holders)
        self._clock = clock or SystemClock()
        self.stage = ScenarioTime(clean, self._clock, PERIOD_S)
        self._devices = [SimulatedDevice(self.stage, gpu) for gpu in clean.gpus]
        self._sampled_until = [0.0] * len(self._devices)
        self._refused = [False] * len(self._devices)  # calls that the product lacks are written once
        # By GPU (pid, MIG ids or ""): listed in place of the invented processes of its holders.
        self.pids: dict[int, tuple[tuple[int, str], ...]] = {}
        self.memory: dict[int, int] = {}  # memory of these processes in bytes, by pid
        self.work: dict[int, loads.Load] = {}  # work of each of these processes on its GPU, by pid
        self._pushed: set[tuple[int, float, int]] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        table.table.device_count = len(self._devices)
        self.feed()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(FEED_S):
            self.feed()

    def feed(self) -> None:
        """Write the present values of every device."""
        for index, device in enumerate(self._devices):
            self._feed_device(index, device, self._scenario.gpus[index])

    def _feed_device(self, index: int, device: SimulatedDevice, gpu: ScenarioGpu) -> None:
        now = self.stage.now()
        device.list_instances()  # this updates the present MIG mode
        identity, memory, clocks = device.identity, device.read_memory(), device.read_clocks()
        has_mig = gpu.has_mig(now)
        with self._table.writing(index) as out:
            out.uuid, out.name = identity.uuid.encode(), identity.name.encode()
            out.bus_id, out.minor = identity.pci_bus_id.encode(), identity.minor
            out.mig_mode, out.persistence, out.gpm_supported = int(has_mig), 1, int(gpu.product.gpm)
            link = device.read_pcie_link()
            out.link[:] = [value or 0 for value in link]
            bits = sum(1 << cpu for cpu in identity.cpus)
            out.cpus[:] = [bits & 2**64 - 1, bits >> 64]
            out.temperature = round(device.read_temperature())
            megahertz = [round(hertz / 1e6) for hertz in clocks if hertz is not None]
            out.sm_clock_mhz, out.memory_clock_mhz, out.sm_clock_max_mhz = megahertz
            out.performance_state = device.read_performance_state()
            out.power_mw, out.power_limit_mw = round(device.read_power() * 1e3), round(device.read_power_limit() * 1e3)
            out.default_limit_mw = round(device.read_default_power_limit() * 1e3)
            out.energy_mj = round(device.read_energy() * 1e3)
            out.memory_total, out.memory_used = memory.total, memory.used
            out.memory_free, out.memory_reserved = memory.free, memory.reserved
            for engine in ENGINES:
                if engine in ("encoder", "decoder") or gpu.product.jpeg_ofa:
                    setattr(out, engine, round(device.read_engine(engine) * 100))
            self._feed_health(index, out, device, gpu)
            self._feed_throttle(index, out, device)
            self._feed_traffic(index, device, gpu)
            self._feed_processes(out, gpu)
            self._feed_instances(out, gpu, now)
            self._feed_gpm(out, device, gpu, now)
            if not has_mig:
                rates = device.read_utilization()
                out.utilization, out.memory_utilization = round(rates.gpu * 100), round((rates.memory or 0) * 100)
                out.engine_rings = 2 if gpu.product.jpeg_ofa else 1
                # Half a period of tolerance, since wall and monotonic clock drift apart by microseconds.
                for sample in device.read_utilization_samples(self._sampled_until[index] + PERIOD_S / 2):
                    end = sample.wall - self.stage.to_wall(0.0)
                    engines = {name: loads.mean(load, end - PERIOD_S, end) for name, load in device.parts.items()}
                    percent = {name: math.ceil(100 * engines[name]) for name in ENGINES if name in engines}
                    self._table.push_sample(index, sample.wall, round(sample.ratio * 100), **percent)
                    for pid, _ in self.pids.get(index, ()):
                        share = loads.mean(self.work[pid], end - PERIOD_S, end) if pid in self.work else 0.0
                        if share > 0.0:
                            self._table.push_work(index, sample.wall, pid, round(share * 100))
                    self._sampled_until[index] = sample.wall
        if gpu.faults or not self._refused[index]:
            self._feed_calls(index, gpu, now)
        for at, xid in gpu.xids:
            if at <= now and (index, at, xid) not in self._pushed:
                self._pushed.add((index, at, xid))
                self._table.push_event(index, xid)

    def _feed_health(self, index: int, out: layout.Device, device: SimulatedDevice, gpu: ScenarioGpu) -> None:
        health = gpu.health
        out.ecc[0], out.ecc[1] = health.get("ecc_corrected", 0), health.get("ecc_uncorrected", 0)
        for position, name in enumerate(
            ("remapped_corrected", "remapped_uncorrected", "remap_pending", "remap_failed")
        ):
            out.remapped[position] = health.get(name, 0)
        if status := health.get("fabric_status", 0):
            # The driver reports a failure as completed, with an error.
            out.fabric[:] = (
                (3, ERROR_NUMBERS["NVML_ERROR_INSUFFICIENT_RESOURCES"], 0) if status == 4 else (status, 0, 0)
            )
        down = health.get("nvlinks_down", 0)
        if gpu.product.nvlink and not gpu.has_mig(self.stage.now()) and (down or not gpu.product.link_bytes):
            up = round(device.read_nvlinks_active())
            out.nvlinks[: up + down] = [2] * up + [1] * down
        if not gpu.product.remap:
            self._table.set_field(index, constants.NVML_FI_DEV_RETIRED_SBE, health.get("retired_single_bit", 0))
            self._table.set_field(index, constants.NVML_FI_DEV_RETIRED_DBE, health.get("retired_double_bit", 0))
        if gpu.product.margin:
            out.margin = round(device.read_temperature_margin())
        for name, celsius in device.read_temperature_limits().items():
            out.thresholds[constants.TEMPERATURE_LIMITS[name]] = round(celsius)
        if gpu.product.memory_sensor:
            celsius = round(device.read_memory_temperature())
            self._table.set_field(index, constants.NVML_FI_DEV_MEMORY_TEMP, celsius, kind=UINT)
        action = health.get("recovery_action", 0)
        self._table.set_field(index, constants.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, action, kind=UINT)
        replays = health.get("pcie_replays", 0)
        self._table.set_field(index, constants.NVML_FI_DEV_PCIE_REPLAY_COUNTER, replays, kind=UINT)

    def _feed_throttle(self, index: int, out: layout.Device, device: SimulatedDevice) -> None:
        for reason, seconds in device.read_throttle_seconds().items():
            self._table.set_field(index, constants.THROTTLE_FIELDS[reason], round(seconds * 1e9))
        active = device.read_throttle_active()
        out.reasons = sum(constants.THROTTLE_BITS[reason] for reason, on in active.items() if on)
        out.reasons_supported = sum(constants.THROTTLE_BITS[reason] for reason in active)

    def _feed_traffic(self, index: int, device: SimulatedDevice, gpu: ScenarioGpu) -> None:
        pcie = device.read_pcie().traffic
        if pcie is not None:
            self._table.set_field(index, constants.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, pcie.rx)
            self._table.set_field(index, constants.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, pcie.tx)
        if not gpu.product.nvlink:
            return
        nvlink = device.read_nvlink()
        if gpu.product.link_bytes:
            for link in range(constants.NVLINKS):
                share = 1 / constants.NVLINKS
                for field, total in (
                    (constants.NVML_FI_DEV_NVLINK_COUNT_RCV_BYTES, nvlink.rx),
                    (constants.NVML_FI_DEV_NVLINK_COUNT_XMIT_BYTES, nvlink.tx),
                ):
                    self._table.set_field(index, field, total * share, scope=link)
            return
        scope = constants.NVML_VALUE_ALL_LINKS
        self._table.set_field(index, constants.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, nvlink.rx / 1024, scope=scope)
        self._table.set_field(index, constants.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvlink.tx / 1024, scope=scope)

    def _feed_gpm(self, out: layout.Device, device: SimulatedDevice, gpu: ScenarioGpu, now: float) -> None:
        out.gpm_time = now
        parts = resolve_parts(
            Partitioned(gpu.instances, device.identity.mig_slices) if gpu.has_mig(now) else gpu.load, gpu.parts
        )
        out.gpm_count = _fill_gpm(out.gpm, parts, now, {"pcie": gpu.product.pcie, "nvlink": gpu.product.nvlink})

    def _feed_processes(self, out: layout.Device, gpu: ScenarioGpu) -> None:
        count = 0
        for pid, mig in self.pids.get(gpu.index, ()):
            out.processes[count].pid, out.processes[count].memory = pid, self.memory.get(pid, 0)
            out.processes[count].gpu_instance, out.processes[count].compute_instance = _instance_ids(mig)
            count += 1
        for holder in self.stage.scenario.holders_at(self.stage.now()):
            if holder.unit.uuid != gpu.uuid or gpu.index in self.pids:
                continue
            mig = next((i.mig for i in gpu.instances if i.uuid == holder.unit.mig_uuid), "")
            for _ in range(holder.processes):
                process = out.processes[count]
                process.pid, process.memory = FIRST_PID + gpu.index * 100 + count, holder.memory
                process.gpu_instance, process.compute_instance = _instance_ids(mig)
                count += 1
        out.process_count = count

    def _feed_instances(self, out: layout.Device, gpu: ScenarioGpu, now: float) -> None:
        """Write the instances in order without gaps: after one has ended, later handles mean other instances."""
        present = gpu.instances_at(now)
        for position, instance in enumerate(present):
            entry = out.instances[position]
            entry.uuid = instance.uuid.encode()
            entry.name = f"{gpu.product.name} MIG {instance.profile}".encode()
            entry.gpu_instance, entry.compute_instance = (int(part) for part in instance.mig.split("/"))
            entry.slices, entry.compute_slices = instance.gpu_slices, instance.sm_slices
            entry.profile_id, entry.start = PROFILE_IDS.get(instance.gpu_slices, 0), _first_slice(present, position)
            entry.memory_total = instance.memory
            entry.memory_used = sum(
                holder.memory for holder in self.stage.scenario.holders_at(now) if holder.unit.mig_uuid == instance.uuid
            )
            entry.memory_free = entry.memory_total - entry.memory_used
            entry.gpm_count = _fill_gpm(entry.gpm, resolve_parts(instance.load, instance.parts), now, {})
        out.instance_count = len(present)

    def _feed_calls(self, index: int, gpu: ScenarioGpu, now: float) -> None:
        """Write the calls that the product does not support, and the scenario's faults, which override them."""
        self._refused[index] = True
        product = gpu.product
        missing = {
            "nvmlDeviceGetMigMode": not product.mig,
            "nvmlDeviceGetJpgUtilization": not product.jpeg_ofa,
            "nvmlDeviceGetOfaUtilization": not product.jpeg_ofa,
            "nvmlDeviceGetMarginTemperature": not product.margin,
            "nvmlDeviceGetRemappedRows": not product.remap,
        }
        for name in layout.CALLS:
            fault = gpu.fault(name, now)
            error = "NVML_ERROR_NOT_SUPPORTED" if missing.get(name) else ""
            if fault is not None:
                error = fault.error
            self._table.set_call(index, name, error, fault.hang_s if fault else 0.0)


def _first_slice(present: Sequence[ScenarioInstance], position: int) -> int:
    """The first slice of the GPU instance, if the instances follow one another without gaps."""
    before: dict[str, int] = {}
    for instance in present:
        gpu_instance = instance.mig.partition("/")[0]
        if gpu_instance == present[position].mig.partition("/")[0]:
            break
        before[gpu_instance] = instance.gpu_slices
    return sum(before.values())


def _instance_ids(mig: str) -> tuple[int, int]:
    """`7/0` as two numbers; without MIG, NVML's value for no instance."""
    gpu_instance, _, compute_instance = mig.partition("/")
    return (int(gpu_instance), int(compute_instance)) if mig else (NO_INSTANCE, NO_INSTANCE)


def _fill_gpm(
    out: ctypes.Array[layout.GpmMetric], parts: Mapping[str, loads.Load], now: float, rates: Mapping[str, float]
) -> int:
    """Fill in integrals of percent and MiB/s until `now`, and the SM counters; returns their number."""
    metrics = [(metric, 0, 100 * parts[name].integral(now)) for metric, name in GPM_PERCENT.items()]
    metrics += [(metric, 0, 100 * parts[name].integral(now)) for metric, name in GPM_ENGINES.items()]
    for name, rate in rates.items():
        for metric in constants.GPM_RATES[name] if rate else ():
            metrics.append((metric, 0, rate / MIB * parts[name].integral(now)))
    metrics.append((constants.NVML_GPM_METRIC_SM_CYCLES_ELAPSED, 1, SM_CLOCK_CYCLES * now))
    metrics.append((constants.NVML_GPM_METRIC_SM_CYCLES_ACTIVE, 1, SM_CLOCK_CYCLES * parts["sm"].integral(now)))
    for position, (metric, counts, integral) in enumerate(metrics):
        out[position].id, out[position].counts, out[position].integral = metric, counts, integral
    return len(metrics)


def main(scenario: str, table: str) -> None:
    feeder = ScenarioFeeder(load_scenario(Path(scenario)), NvmlTable(Path(table)))
    feeder.start()
    print("feeding", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
