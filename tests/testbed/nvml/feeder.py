"""Writes the shared table: from a scenario as it runs, or by hand from a test.

python -m tests.testbed.nvml.feeder SCENARIO TABLE     feeds until it is ended
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import mmap
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from gpu_exporter.clock import Clock, SystemClock
from gpu_exporter.devices.nvml import constants
from gpu_exporter.devices.scenario import Scenario, ScenarioGpu, load_scenario
from gpu_exporter.devices.simulated import SimulatedDevice, Stage
from tests.testbed.nvml import layout

PERIOD_S = 1 / 6  # an A100 renews its utilization each 0.2 s, a V100 each 1/6 s (measured in the recordings)
FEED_S = 0.05
ERROR_NUMBERS = {name: number for number, name in constants.ERROR_NAMES.items()}
THROTTLE_REASONS = tuple(constants.THROTTLE_FIELDS)


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

    @contextlib.contextmanager
    def writing(self, index: int) -> Iterator[layout.Device]:
        """One device for a consistent write: readers wait or see it before or after, never half."""
        device = self.table.devices[index]
        device.sequence += 1
        try:
            yield device
        finally:
            device.sequence += 1

    def set_call(self, index: int, call: str, error: str = "", delay_s: float = 0.0) -> None:
        """From now on `call` ("*" is every call) of one device sleeps, then fails with NVML's `error` ("" succeeds)."""
        for position, name in enumerate(layout.CALLS):
            if call in ("*", name):
                entry = self.table.devices[index].calls[position]
                entry.rc = ERROR_NUMBERS[error] if error else 0
                entry.delay_us = int(delay_s * 1e6)

    def push_sample(self, index: int, wall: float, percent: int) -> None:
        """Append to the device's utilization ring; the oldest entry falls out. Call inside `writing`."""
        device = self.table.devices[index]
        if device.sample_count == layout.MAX_SAMPLES:
            ctypes.memmove(
                device.samples,
                ctypes.byref(device.samples, ctypes.sizeof(layout.RingSample)),
                ctypes.sizeof(layout.RingSample) * (layout.MAX_SAMPLES - 1),
            )
            device.sample_count -= 1
        entry = device.samples[device.sample_count]
        entry.time_us, entry.percent = int(wall * 1e6), percent
        device.sample_count += 1


class ScenarioFeeder:
    """Plays a scenario into a table."""

    def __init__(self, scenario: Scenario, table: NvmlTable, clock: Clock | None = None) -> None:
        self._scenario = scenario
        self._table = table
        # Faults are the table's business: the values themselves are always there.
        clean = Scenario(tuple(dataclasses.replace(gpu, faults=()) for gpu in scenario.gpus), scenario.holders)
        self._clock = clock or SystemClock()
        self.stage = Stage(clean, self._clock, PERIOD_S)
        self._devices = [SimulatedDevice(self.stage, gpu) for gpu in clean.gpus]
        self._sampled_until = [0.0] * len(self._devices)
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
        """Write the present moment of every device."""
        for index, device in enumerate(self._devices):
            self._feed_device(index, device, self._scenario.gpus[index])

    def _feed_device(self, index: int, device: SimulatedDevice, gpu: ScenarioGpu) -> None:
        identity, memory, clocks = device.identity, device.read_memory(), device.read_clocks()
        with self._table.writing(index) as out:
            out.uuid, out.name = identity.uuid.encode(), identity.name.encode()
            out.bus_id, out.minor = identity.pci_bus_id.encode(), identity.minor
            out.mig_mode = int(gpu.mig)
            out.encoder = round(device.read_encoder_utilization() * 100)
            out.temperature = round(device.read_temperature())
            out.sm_clock_mhz, out.sm_clock_max_mhz = round(clocks.sm / 1e6), round(clocks.sm_max / 1e6)
            out.memory_clock_mhz = round(clocks.memory / 1e6)
            out.power_mw, out.power_limit_mw = round(device.read_power() * 1e3), round(device.read_power_limit() * 1e3)
            out.energy_mj = round(device.read_energy() * 1e3)
            out.memory_total, out.memory_used = memory.total, memory.used
            out.memory_free, out.memory_reserved = memory.free, memory.reserved
            self._feed_throttle(out, device)
            self._feed_processes(out, gpu)
            self._feed_instances(out, gpu)
            if not gpu.mig:
                out.utilization = round(device.read_utilization() * 100)
                for sample in device.read_utilization_samples(self._sampled_until[index]):
                    self._table.push_sample(index, sample.wall, round(sample.ratio * 100))
                    self._sampled_until[index] = sample.wall
        if gpu.faults:
            self._feed_faults(index, gpu)

    @staticmethod
    def _feed_throttle(out: layout.Device, device: SimulatedDevice) -> None:
        seconds, active = device.read_throttle_seconds(), device.read_throttle_active()
        out.throttle_supported = 0
        for position, reason in enumerate(THROTTLE_REASONS):
            if reason in seconds:
                out.throttle_supported |= 1 << position
                out.throttle_ns[position] = round(seconds[reason] * 1e9)
        out.reasons = sum(constants.THROTTLE_BITS[reason] for reason, on in active.items() if on)
        out.reasons_supported = sum(constants.THROTTLE_BITS[reason] for reason in active)

    def _feed_processes(self, out: layout.Device, gpu: ScenarioGpu) -> None:
        count = 0
        for holder in self.stage.scenario.holders_at(self.stage.now()):
            for _ in range(holder.processes if holder.unit.uuid == gpu.uuid else 0):
                process = out.processes[count]
                process.pid, process.memory = 4000 + gpu.index * 100 + count, holder.memory
                process.gpu_instance = process.compute_instance = 0xFFFFFFFF
                count += 1
        out.process_count = count

    def _feed_instances(self, out: layout.Device, gpu: ScenarioGpu) -> None:
        for position, instance in enumerate(gpu.instances):
            entry = out.instances[position]
            entry.uuid = instance.uuid.encode()
            entry.name = f"{gpu.product.name} MIG {instance.profile}".encode()
            entry.gpu_instance, entry.compute_instance = (int(part) for part in instance.mig.split("/"))
            entry.slices = instance.sm_slices
            entry.memory_total = instance.memory
            entry.memory_used = sum(
                holder.memory
                for holder in self.stage.scenario.holders_at(self.stage.now())
                if holder.unit.mig_uuid == instance.uuid
            )
            entry.memory_free = entry.memory_total - entry.memory_used
        out.instance_count = len(gpu.instances)

    def _feed_faults(self, index: int, gpu: ScenarioGpu) -> None:
        now = self.stage.now()
        for name in layout.CALLS:
            fault = gpu.fault(name, now)
            self._table.set_call(index, name, fault.error if fault else "", fault.hang_s if fault else 0.0)


def main(scenario: str, table: str) -> None:
    feeder = ScenarioFeeder(load_scenario(Path(scenario)), NvmlTable(Path(table)))
    feeder.start()
    print("feeding", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
