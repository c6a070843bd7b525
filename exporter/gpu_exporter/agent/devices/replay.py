"""A backend that replays logs of nvidia-smi once, in real time from the first read on. Each file is one GPU.

The format is the output of `nvidia-smi --query-gpu=... --format=csv`, with or without `nounits`, plain or gzip.

- Required columns: timestamp, utilization.gpu [%].
- Optional columns: temperature.gpu, clocks.current.sm [MHz], power.draw.instant [W] or else power.draw [W].
- The columns may have any order. Other columns are ignored.
- A cell without a value (`[N/A]`, `[Not Supported]`, `[GPU is lost]`) counts as no data.
- An incomplete last line is dropped. After the last row, reads return no data.
- Energy is the trapezoidal integral of the power, because these logs have no energy counter.
"""

from __future__ import annotations

import bisect
import csv
import gzip
import math
import re
import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime
from operator import itemgetter
from pathlib import Path

from gpu_exporter.agent.devices.errors import DriverUnavailable, NotSupported
from gpu_exporter.agent.devices.protocol import (
    Clocks,
    Device,
    EventWatch,
    Rates,
    UtilizationSample,
)
from gpu_exporter.common.clock import Clock
from gpu_exporter.common.files import read_gzip, read_named
from gpu_exporter.common.model.units import DeviceIdentity
from gpu_exporter.common.vendor import NVIDIA

MERGE_S = 0.5  # rows of equal utilization become one sample, up to this length
LOG_MAX = 256 * 2**20  # bytes of text: a row per second for two weeks

TIMESTAMP = "timestamp"
UTILIZATION = "utilization.gpu [%]"
TEMPERATURE = "temperature.gpu"
SM_CLOCK = "clocks.current.sm [MHz]"
POWER = ("power.draw.instant [W]", "power.draw [W]")  # the second is an average over a second on newer boards
KEYS = ("uuid", "index", "pci.bus_id", "serial", "name")  # columns that distinguish the GPUs of one log
MESSAGE = re.compile(r"Unable to determine|No devices|Failed to|NVIDIA-SMI has failed|Terminating|GPU is lost", re.I)
NO_VALUE = re.compile(r"\[[^\]]*\]|N/A")  # nvidia-smi writes the reason for a missing value in brackets


class ReplayError(ValueError):
    """The file is not an nvidia-smi log. The text contains the file, the line and the error."""


class Recording:
    """The columns of one log. `times`: seconds since the first row. A cell without a value is None."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.utilization: list[float | None] = []
        self.temperature: list[float | None] = []
        self.sm_clock: list[float | None] = []
        self.power: list[float | None] = []
        self.merged: list[tuple[float, float | None]] = []
        self.energy_times: list[float] = []  # of the rows that have a power value
        self.energy: list[float] = []
        self.last_power = 0.0

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
    """Reads one log. Raises ReplayError, OSError."""
    try:
        data = read_gzip(path, LOG_MAX) if path.suffix == ".gz" else read_named(path, LOG_MAX)
        text = data.decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, ValueError) as exc:
        raise ReplayError(f"{path}: not a gzip or text file: {exc}") from exc
    return parse_recording(text, str(path))


def parse_recording(text: str, place: str = "recording") -> Recording:
    """Converts the text of a log to columns. Drops rows that repeat the row before or go back in time.

    Raises ReplayError if a cell is neither a number in the column's unit nor marked as missing. Raises it for a log of
    several GPUs, because their rows would be mixed into one GPU.
    """
    try:
        rows = list(csv.reader(text.splitlines(), skipinitialspace=True))
    except csv.Error as exc:  # NUL bytes, before Python 3.11
        raise ReplayError(f"{place}: {exc}") from exc
    header = [name.strip() for name in rows[0]] if rows else []
    for name in (TIMESTAMP, UTILIZATION):
        if name not in header:
            raise ReplayError(f"{place}:1: column {name!r} is missing")
    if len(rows) > 1 and (len(rows[-1]) < len(header) or not text.endswith(("\n", "\r"))):
        rows.pop()  # nvidia-smi ends each line with a newline: this line was cut, and 40 may have been 400
    power = next((name for name in POWER if name in header), "")
    columns = [header.index(name) if name in header else None for name in (UTILIZATION, TEMPERATURE, SM_CLOCK, power)]
    keys = [header.index(name) for name in KEYS if name in header]
    recording = Recording()
    start: datetime | None = None
    previous: tuple[datetime, list[str]] | None = None
    known: dict[int, str] = {}  # the identity of the GPU, by column
    for number, row in enumerate(rows[1:], start=2):
        row = [cell.strip() for cell in row]
        if _is_no_row(row, header, rows[number] if number < len(rows) else None):
            continue
        names = {i: row[i] for i in keys if i < len(row) and not NO_VALUE.fullmatch(row[i])}
        try:
            if len(row) < len(header):
                raise ValueError(f"{len(row)} cells, but the header has {len(header)}")
            when = datetime.strptime(row[header.index(TIMESTAMP)], "%Y/%m/%d %H:%M:%S.%f")
            if any(known.setdefault(i, name) != name for i, name in names.items()) or (
                previous is not None and when == previous[0] and row != previous[1]
            ):
                raise ValueError("the log has a second GPU: write one log per GPU, with nvidia-smi --id=INDEX")
            utilization, temperature, clock, watts = (
                None if i is None else _parse_cell(row[i], header[i]) for i in columns
            )
        except ValueError as exc:
            raise ReplayError(f"{place}:{number}: {exc}") from exc
        previous = when, row
        start = start or when
        t = (when - start).total_seconds()
        if recording.times and t <= recording.times[-1]:
            continue
        ratio = None if utilization is None or utilization > 100 else utilization / 100.0
        _append(recording, t, ratio, temperature, None if clock is None else clock * 1e6, watts)
    if len(recording.times) < 2:
        raise ReplayError(f"{place}: fewer than two rows")
    return recording


def _is_no_row(row: Sequence[str], header: Sequence[str], following: Sequence[str] | None) -> bool:
    """Returns whether a line is not a data row. Such a line is one of four:

    - an empty line
    - a message of nvidia-smi
    - a repeated header, if nvidia-smi appended to an existing log
    - an incomplete line before a repeated header
    """
    if not any(row) or row == header:
        return True
    if len(row) >= len(header):
        return False
    is_cut = following is not None and [cell.strip() for cell in following] == header
    return is_cut or MESSAGE.match(",".join(row)) is not None


def _parse_cell(cell: str, column: str) -> float | None:
    """Returns the number in a cell, None if the cell has no value. Raises ValueError.

    >>> _parse_cell("1980 MHz", "clocks.current.sm [MHz]"), _parse_cell("37", "utilization.gpu [%]")
    (1980.0, 37.0)
    """
    if NO_VALUE.fullmatch(cell):
        return None
    _, _, unit = column.rstrip("]").partition(" [")
    number = cell.removesuffix(f" {unit}") if unit else cell
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if value < 0:
        return None  # only a failed sensor has a negative value
    if not value < math.inf:
        raise ValueError(f"{column}: {cell!r} is not a number" + (f" of {unit}" if unit else ""))
    return value


def _append(
    rec: Recording, t: float, ratio: float | None, temperature: float | None, clock: float | None, power: float | None
) -> None:
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
    rec.temperature.append(temperature)
    rec.sm_clock.append(clock)
    rec.power.append(power)


class ReplayDevice(Device):
    """One recording, presented as a GPU."""

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

    def _now(self) -> float:
        """Returns the seconds since the first read, which starts the replay."""
        if self._start is None:
            self._start = self._clock.monotonic()
        return self._clock.monotonic() - self._start

    def _read(self, call: str, column: Sequence[float | None]) -> float:
        now = self._now()
        value = self._recording.at(column, now) if now <= self._recording.duration_s else None
        if value is None:
            raise NotSupported(call, self.reason)
        return value

    def read_utilization(self) -> Rates:
        return Rates(self._read("nvmlDeviceGetUtilizationRates", self._recording.utilization), None)

    def read_utilization_samples(self, since_wall: float) -> Sequence[UtilizationSample]:
        now = self._now()
        zero = self._clock.wall() - now
        # After the end, the last samples are returned once more, as from a driver's ring.
        if now > self._recording.duration_s and since_wall - zero >= self._recording.duration_s - 1e-3:
            raise NotSupported("nvmlDeviceGetSamples", self.reason)
        samples = self._recording.merged
        first = bisect.bisect_right(samples, since_wall - zero + 1e-6, key=itemgetter(0))
        last = bisect.bisect_right(samples, now, key=itemgetter(0))
        begins = [samples[first - 1][0] if first else 0.0] + [t for t, _ in samples[first:last]]
        return [
            UtilizationSample(zero + t, ratio, t - begin)
            for begin, (t, ratio) in zip(begins, samples[first:last], strict=False)
            if ratio is not None
        ]

    def read_power(self) -> float:
        return self._read("nvmlDeviceGetPowerUsage", self._recording.power)

    def read_energy(self) -> float:
        energy = self._recording.energy_at(self._now())
        if energy is None:
            raise NotSupported("nvmlDeviceGetTotalEnergyConsumption", self.reason)
        return energy

    def read_temperature(self) -> float:
        return self._read("nvmlDeviceGetTemperature", self._recording.temperature)

    def read_clocks(self) -> Clocks:
        return Clocks(self._read("nvmlDeviceGetClockInfo", self._recording.sm_clock), None, None)


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
        except (OSError, ReplayError) as exc:
            raise DriverUnavailable(str(exc)) from exc

    def count(self) -> int:
        return len(self._devices)

    def find(self, position: int) -> Device:
        return self._devices[position]

    def watch_events(self, devices: Iterable[Device]) -> EventWatch:
        raise NotSupported("nvmlEventSetCreate", "NVML_ERROR_NO_DATA")

    def close(self) -> None:
        return
