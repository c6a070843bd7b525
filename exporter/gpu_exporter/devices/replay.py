"""A backend that replays nvidia-smi logs: one file is one GPU, at the clock's speed, once, from the first question.

Format: the CSV that `nvidia-smi --query-gpu=... --format=csv` writes, plain or gzip, with the columns timestamp,
utilization.gpu [%], pstate, temperature.gpu, clocks.current.sm [MHz], power.draw [W], power.draw.instant [W]; column
order is free, other columns are ignored. After its last row a recording knows nothing more: reads answer no data.
Energy is the trapezoid of power.draw.instant, since these logs hold no energy counter.
"""

from __future__ import annotations

import bisect
import csv
import gzip
import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

from gpu_exporter.clock import Clock
from gpu_exporter.devices.errors import DriverUnavailable, NotSupported
from gpu_exporter.devices.protocol import (
    Clocks,
    Device,
    EventWatch,
    Rates,
    UtilizationSample,
)
from gpu_exporter.files import read_gzip
from gpu_exporter.model import DeviceIdentity
from gpu_exporter.vendor import NVIDIA

MERGE_S = 0.5  # rows of equal utilization become one sample, up to this length
LOG_MAX = 256 * 2**20  # bytes of text: a row a second for two weeks


class RecordingError(ValueError):
    """The file is no such log. The text names file, line and fault."""


class Recording:
    """The columns of one log. `times` are seconds since its first row."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.utilization: list[float] = []
        self.temperature: list[float] = []
        self.sm_clock: list[float] = []
        self.power: list[float] = []
        self.energy: list[float] = []
        self.merged: list[tuple[float, float]] = []

    @property
    def duration_s(self) -> float:
        return self.times[-1]

    def at(self, column: Sequence[float], t: float) -> float:
        """The value of the newest row not after `t`."""
        return column[max(0, bisect.bisect_right(self.times, t) - 1)]

    def energy_at(self, t: float) -> float:
        """Joules over (0, t], interpolated between rows."""
        i = bisect.bisect_right(self.times, t)
        if i == len(self.times):
            return self.energy[-1]
        past = (t - self.times[i - 1]) / (self.times[i] - self.times[i - 1])
        return self.energy[i - 1] + past * (self.energy[i] - self.energy[i - 1])


def read_recording(path: Path) -> Recording:
    """Read one log. Raises RecordingError, OSError."""
    try:
        text = read_gzip(path, LOG_MAX).decode() if path.suffix == ".gz" else path.read_text("utf-8")
    except (gzip.BadGzipFile, EOFError, ValueError) as exc:
        raise RecordingError(f"{path}: not a gzip or text file: {exc}") from exc
    return parse_recording(text, str(path))


def parse_recording(text: str, place: str = "recording") -> Recording:
    """Turn the text of a log into columns. Rows that repeat or run back in time are dropped."""
    try:
        rows = list(csv.reader(text.splitlines()))
    except csv.Error as exc:  # NUL bytes, before Python 3.11
        raise RecordingError(f"{place}: {exc}") from exc
    header = [name.strip() for name in rows[0]] if rows else []
    wanted = (
        "timestamp",
        "utilization.gpu [%]",
        "temperature.gpu",
        "clocks.current.sm [MHz]",
        "power.draw.instant [W]",
    )
    missing = [name for name in wanted if name not in header]
    if missing:
        raise RecordingError(f"{place}:1: column {missing[0]!r} is missing")
    columns = [header.index(name) for name in wanted]
    recording = Recording()
    start: datetime | None = None
    for number, row in enumerate(rows[1:], start=2):
        try:
            stamp, *cells = (row[i].strip() for i in columns)
            when = datetime.strptime(stamp, "%Y/%m/%d %H:%M:%S.%f")
            utilization, temperature, clock, power = map(float, cells)
        except (IndexError, ValueError) as exc:
            raise RecordingError(f"{place}:{number}: {exc}") from exc
        start = start or when
        t = (when - start).total_seconds()
        if recording.times and t <= recording.times[-1]:
            continue
        _append(recording, t, utilization / 100.0, temperature, clock * 1e6, power)  # percent, MHz
    if len(recording.times) < 2:
        raise RecordingError(f"{place}: fewer than two rows")
    return recording


def _append(rec: Recording, t: float, utilization: float, temperature: float, clock: float, power: float) -> None:
    if rec.times:
        trapezoid = (t - rec.times[-1]) * (power + rec.power[-1]) / 2
        rec.energy.append(rec.energy[-1] + trapezoid)
        end, ratio = rec.merged[-1]
        started = rec.merged[-2][0] if len(rec.merged) > 1 else 0.0
        if ratio == utilization and t - started <= MERGE_S and end > 0:
            rec.merged[-1] = (t, ratio)
        else:
            rec.merged.append((t, utilization))
    else:
        rec.energy.append(0.0)
        rec.merged.append((t, utilization))
    rec.times.append(t)
    rec.utilization.append(utilization)
    rec.temperature.append(temperature)
    rec.sm_clock.append(clock)
    rec.power.append(power)


class ReplayDevice(Device):
    """One recording as a GPU."""

    reason = "NVML_ERROR_NO_DATA"

    def __init__(self, recording: Recording, index: int, name: str, clock: Clock) -> None:
        self._recording = recording
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

    def _now(self, call: str) -> float:
        if self._start is None:
            self._start = self._clock.monotonic()
        t = self._clock.monotonic() - self._start
        if t > self._recording.duration_s:
            raise NotSupported(call, "NVML_ERROR_NO_DATA")
        return t

    def read_utilization(self) -> Rates:
        now = self._now("nvmlDeviceGetUtilizationRates")
        return Rates(self._recording.at(self._recording.utilization, now), None)

    def read_utilization_samples(self, since_wall: float) -> Sequence[UtilizationSample]:
        if self._start is None:
            self._start = self._clock.monotonic()
        now = self._clock.monotonic() - self._start
        zero = self._clock.wall() - now
        # Past the end the last samples are still handed out, once, as a driver's ring would.
        if now > self._recording.duration_s and since_wall - zero >= self._recording.duration_s - 1e-3:
            raise NotSupported("nvmlDeviceGetSamples", "NVML_ERROR_NO_DATA")
        samples = self._recording.merged
        first = bisect.bisect_right(samples, (since_wall - zero + 1e-6, float("inf")))
        last = bisect.bisect_right(samples, (now, float("inf")))
        begins = [samples[first - 1][0] if first else 0.0] + [t for t, _ in samples[first:last]]
        return [
            UtilizationSample(zero + t, ratio, t - begin)
            for begin, (t, ratio) in zip(begins, samples[first:last], strict=False)
        ]

    def read_power(self) -> float:
        return self._recording.at(self._recording.power, self._now("nvmlDeviceGetPowerUsage"))

    def read_energy(self) -> float:
        if self._start is None:
            self._start = self._clock.monotonic()
        return self._recording.energy_at(self._clock.monotonic() - self._start)

    def read_temperature(self) -> float:
        return self._recording.at(self._recording.temperature, self._now("nvmlDeviceGetTemperature"))

    def read_clocks(self) -> Clocks:
        sm = self._recording.at(self._recording.sm_clock, self._now("nvmlDeviceGetClockInfo"))
        return Clocks(sm, None, None)


class ReplayBackend:
    """Recordings as the GPUs of one node, in the order given."""

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
        except (OSError, RecordingError) as exc:
            raise DriverUnavailable(str(exc)) from exc

    def count(self) -> int:
        return len(self._devices)

    def find(self, position: int) -> Device:
        return self._devices[position]

    def watch_events(self, devices: Iterable[Device]) -> EventWatch:
        raise NotSupported("nvmlEventSetCreate", "NVML_ERROR_NO_DATA")

    def close(self) -> None:
        return
