"""A backend that replays logs of nvidia-smi (smi_log.py) in real time, starting at the first read, without repetition.
Each file is one GPU.

- After the last row, reads return no data.
- Where rows are missing (a gap of more than two intervals and a minute), reads return no data: a gap is not idle time.
- Energy is the trapezoidal integral of the power, because these logs have no energy counter.
"""

from __future__ import annotations

import bisect
import logging
import uuid
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path

from gpu_exporter.agent.devices.errors import DriverUnavailable, NotSupported
from gpu_exporter.agent.devices.log_text import LATE
from gpu_exporter.agent.devices.protocol import (
    Clocks,
    Device,
    EventWatch,
    Rates,
    UtilizationSample,
)
from gpu_exporter.agent.devices.smi_log import SmiLog, SmiLogError, SmiRow, parse_smi_logs, read_smi_logs
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.model.units import DeviceIdentity
from gpu_exporter.common.vendor import NVIDIA

log = logging.getLogger(__name__)
MERGE_S = 0.5  # rows of equal utilization become one sample, up to this length


class Recording:
    """The columns of one log. `times`: seconds since the first row. A cell without a value is None.

    `notes`: dropped and corrected rows, as texts for the exporter's log.
    """

    def __init__(self, of: SmiLog) -> None:
        self.notes = of.notes
        self.times: list[float] = []
        self.utilization: list[float | None] = []
        self.temperature: list[float | None] = []
        self.sm_clock: list[float | None] = []
        self.power: list[float | None] = []
        self.merged: list[tuple[float, float | None]] = []
        self.energy_times: list[float] = []  # of the rows that have a power value
        self.energy: list[float] = []
        self.last_power = 0.0
        for row in of.rows:
            _add_gap(self, row.t)
            _append(self, row)

    @property
    def duration_s(self) -> float:
        return self.times[-1]

    def at(self, column: Sequence[float | None], t: float) -> float | None:
        """Returns the value of the newest row that is not after `t`."""
        return column[max(0, bisect.bisect_right(self.times, t) - 1)]

    def energy_at(self, t: float) -> float | None:
        """Returns the joules over (0, t], interpolated between rows. None before the first row with a power value."""
        i = bisect.bisect_right(self.energy_times, t)
        if i == 0:
            return None
        if i == len(self.energy_times):
            return self.energy[-1]
        past = (t - self.energy_times[i - 1]) / (self.energy_times[i] - self.energy_times[i - 1])
        return self.energy[i - 1] + past * (self.energy[i] - self.energy[i - 1])


def read_recording(path: Path) -> Recording:
    """Reads one log. Raises SmiLogError, OSError."""
    return Recording(*read_smi_logs(path, is_one=True))


def parse_recording(text: str, place: str = "recording") -> Recording:
    """Converts the text of a log to columns. Raises SmiLogError, also for a log of several GPUs, because their rows
    would be mixed into one GPU.
    """
    return Recording(*parse_smi_logs(text, place, is_one=True))


def _add_gap(rec: Recording, t: float) -> None:
    """If rows are missing between the last row and `t`, adds two rows without values as the gap."""
    if len(rec.times) < 2:
        return
    last, step = rec.times[-1], rec.times[-1] - rec.times[-2]
    if t - last > 2 * step + LATE.total_seconds():
        for at in (last + step, t - step):  # a row counts until the next row, and a sample from the sample before it
            _append(rec, SmiRow(at, None, None, None, None))


def _append(rec: Recording, row: SmiRow) -> None:
    t, ratio, power = row.t, row.utilization, row.power
    end, merged = rec.merged[-1] if rec.merged else (0.0, None)
    started = rec.merged[-2][0] if len(rec.merged) > 1 else 0.0
    if end > 0 and merged == ratio and t - started <= MERGE_S:
        rec.merged[-1] = (t, ratio)
    else:
        rec.merged.append((t, ratio))
    if power is not None:
        between = (t - rec.energy_times[-1]) * (power + rec.last_power) / 2 if rec.energy else 0.0
        rec.energy.append(rec.energy[-1] + between if rec.energy else 0.0)
        rec.energy_times.append(t)
        rec.last_power = power
    rec.times.append(t)
    rec.utilization.append(ratio)
    rec.temperature.append(row.temperature)
    rec.sm_clock.append(row.sm_clock)
    rec.power.append(power)


class ReplayDevice(Device):
    """One recording, presented as a GPU."""

    reason = "NVML_ERROR_NO_DATA"

    def __init__(self, recording: Recording, index: int, name: str, clock: Clock) -> None:
        self.recording = recording
        self._clock = clock
        self._start: float | None = None
        self.identity = DeviceIdentity(
            index=index,
            uuid=f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'replay/{index}/{name}')}",
            name=name,
            driver_version="replay",
            pci_bus_id=f"0000:{0x10 + index:02x}:00.0",
            minor=index,
        )

    def _now(self) -> float:
        """Returns the seconds since the first read, which starts the replay."""
        if self._start is None:
            self._start = self._clock.monotonic()
        return self._clock.monotonic() - self._start

    def _read(self, call: str, column: Sequence[float | None]) -> float:
        now = self._now()
        value = self.recording.at(column, now) if now <= self.recording.duration_s else None
        if value is None:
            raise NotSupported(call, self.reason)
        return value

    def read_utilization(self) -> Rates:
        return Rates(self._read("nvmlDeviceGetUtilizationRates", self.recording.utilization), None)

    def read_utilization_samples(self, since_wall: float) -> Sequence[UtilizationSample]:
        now = self._now()
        zero = self._clock.wall() - now
        # After the end, the last samples are returned once more, as from a driver's ring.
        if now > self.recording.duration_s and since_wall - zero >= self.recording.duration_s - 1e-3:
            raise NotSupported("nvmlDeviceGetSamples", self.reason)
        samples = self.recording.merged
        first = bisect.bisect_right(samples, since_wall - zero + 1e-6, key=itemgetter(0))
        last = bisect.bisect_right(samples, now, key=itemgetter(0))
        begins = [samples[first - 1][0] if first else 0.0] + [t for t, _ in samples[first:last]]
        return [
            UtilizationSample(zero + t, ratio, t - begin)
            for begin, (t, ratio) in zip(begins, samples[first:last], strict=False)
            if ratio is not None
        ]

    def read_power(self) -> float:
        return self._read("nvmlDeviceGetPowerUsage", self.recording.power)

    def read_energy(self) -> float:
        rec, now = self.recording, self._now()
        energy = rec.energy_at(now)
        columns = rec.utilization, rec.temperature, rec.sm_clock, rec.power
        if energy is None or all(rec.at(column, now) is None for column in columns):
            raise NotSupported("nvmlDeviceGetTotalEnergyConsumption", self.reason)
        return energy

    def read_temperature(self) -> float:
        return self._read("nvmlDeviceGetTemperature", self.recording.temperature)

    def read_clocks(self) -> Clocks:
        return Clocks(self._read("nvmlDeviceGetClockInfo", self.recording.sm_clock), None, None)


class ReplayBackend:
    """Recordings, presented as the GPUs of one node, in the order of `paths`."""

    name = "replay"
    vendor = NVIDIA
    is_live = False

    def __init__(self, paths: Sequence[Path], clock: Clock) -> None:
        self._paths = paths
        self._clock = clock
        self._devices: list[ReplayDevice] = []

    def open(self) -> None:
        if self._devices:
            return
        try:
            self._devices = [
                ReplayDevice(read_recording(path), index, path.name.split(".")[0], self._clock)
                for index, path in enumerate(self._paths)
            ]
        except (OSError, SmiLogError) as exc:
            raise DriverUnavailable(str(exc)) from exc
        for device in self._devices:
            for note in device.recording.notes:
                log.warning("%s", note)

    def count(self) -> int:
        return len(self._devices)

    def find(self, position: int) -> Device:
        return self._devices[position]

    def watch_events(self, devices: Iterable[Device]) -> EventWatch:
        raise NotSupported("nvmlEventSetCreate", "NVML_ERROR_NO_DATA")

    def close(self) -> None:
        return
