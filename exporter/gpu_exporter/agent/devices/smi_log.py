"""Parses logs of nvidia-smi, which it writes with `--query-gpu=... --format=csv`.

- With or without `nounits`, plain or gzip. The text is UTF-8, or UTF-16 with its byte order mark.
- Required columns: timestamp, utilization.gpu [%].
- Optional columns: temperature.gpu, clocks.current.sm [MHz], power.draw.instant [W] or else power.draw [W].
- The columns may have any order. Other columns are ignored.
- A cell without a value (`[N/A]`, `[Not Supported]`, `[GPU is lost]`) counts as no data.
- An incomplete last line is dropped.
- Times are local. Where summer time begins or ends while the rows continue, the hour is removed or added, and noted.
  Other rows that go back in time are dropped, and their number is noted.
- Rows of several GPUs are told apart by the columns in KEYS.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.agent.devices.log_text import LocalTimes, decode_log
from gpu_exporter.common.files import read_gzip, read_named

LOG_MAX = 256 * 2**20  # bytes: a row per second for two weeks
GZIP = b"\x1f\x8b"

TIMESTAMP = "timestamp"
UTILIZATION = "utilization.gpu [%]"
TEMPERATURE = "temperature.gpu"
SM_CLOCK = "clocks.current.sm [MHz]"
POWER = ("power.draw.instant [W]", "power.draw [W]")  # the second is an average over a second on newer boards
KEYS = ("uuid", "index", "pci.bus_id", "serial", "name")  # columns that distinguish the GPUs of one log
MESSAGE = re.compile(r"Unable to determine|No devices|Failed to|NVIDIA-SMI has failed|Terminating|GPU is lost", re.I)
NO_VALUE = re.compile(r"\[[^\]]*\]|N/A")  # nvidia-smi writes the reason for a missing value in brackets


class SmiLogError(ValueError):
    """The file is not an nvidia-smi log. The text contains the file, the line and the error."""


class SmiRow(NamedTuple):
    """A row. `t`: seconds since the first row of the GPU. `utilization`: 0 to 1. A cell without a value is None."""

    t: float
    utilization: float | None
    temperature: float | None
    sm_clock: float | None
    power: float | None


@dataclass
class SmiLog:
    """The rows of one GPU. `began`: local time of the first row. `names`: the values of KEYS that the log has.

    `notes`: dropped and corrected rows, as texts for people.
    """

    began: datetime
    names: dict[str, str] = field(default_factory=dict)
    rows: list[SmiRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_smi_logs(path: Path, *, is_one: bool = False) -> list[SmiLog]:
    """Reads a file. `is_one`: refuses the rows of a second GPU. Raises SmiLogError, OSError."""
    try:
        data = read_named(path, LOG_MAX)
        text = decode_log(read_gzip(path, LOG_MAX) if data.startswith(GZIP) else data)
    except (gzip.BadGzipFile, EOFError, ValueError) as exc:
        raise SmiLogError(f"{path}: not a gzip or text file: {exc}") from exc
    return parse_smi_logs(text, str(path), is_one=is_one)


def parse_smi_logs(text: str, place: str, *, is_one: bool = False) -> list[SmiLog]:
    """Converts the text of a log to rows, by GPU. Drops rows that repeat the row before or go back in time (see
    LocalTimes).

    Raises SmiLogError if a cell is neither a number in the column's unit nor marked as missing, if rows of two GPUs
    cannot be told apart, and if no GPU has two rows. `is_one` as in read_smi_logs.
    """
    lines = csv.reader(text.splitlines(), skipinitialspace=True)
    try:
        header = [name.strip() for name in next(lines, [])]
        for name in (TIMESTAMP, UTILIZATION):
            if name not in header:
                raise SmiLogError(f"{place}:1: column {name!r} is missing")
        parser = _LogParser(place, header, is_one=is_one)
        row = next(lines, None)
        while row is not None:
            following = next(lines, None)
            # nvidia-smi ends each line with a newline. A last line without one was cut, and 40 may have been 400.
            if following is not None or (len(row) >= len(header) and text.endswith(("\n", "\r"))):
                parser.add(row, following)
            row = following
    except csv.Error as exc:  # NUL bytes, before Python 3.11
        raise SmiLogError(f"{place}: {exc}") from exc
    return parser.finish()


@dataclass
class _LogGpu:
    """One GPU of a log that is being parsed. `headers`: number of header lines above the GPU's last row. `had_header`:
    there was a header between the GPU's last two rows. `dropped`: line numbers of dropped rows.
    """

    log: SmiLog
    local: LocalTimes = field(default_factory=LocalTimes)
    previous: tuple[datetime, list[str]] | None = None
    headers: int = -1
    had_header: bool = True
    dropped: list[int] = field(default_factory=list)

    def agrees(self, names: Mapping[str, str]) -> bool:
        """Returns whether a row with these names may belong to this GPU."""
        return all(self.log.names.get(name, text) == text for name, text in names.items())


class _LogParser:
    def __init__(self, place: str, header: list[str], *, is_one: bool) -> None:
        self._place, self._header, self._is_one = place, header, is_one
        power = next((name for name in POWER if name in header), "")
        columns = (UTILIZATION, TEMPERATURE, SM_CLOCK, power)
        self._columns = [header.index(name) if name in header else None for name in columns]
        self._time = header.index(TIMESTAMP)
        self._keys = {name: header.index(name) for name in KEYS if name in header}
        self._gpus: list[_LogGpu] = []
        self._named: dict[tuple[str, ...], _LogGpu] = {}  # by the cells of KEYS
        self._second: tuple[str, datetime] = ("", datetime.min)
        self._number = 1
        self._headers = 0
        self._unnamed: list[int] = []  # lines that do not show their GPU

    def add(self, cells: Sequence[str], following: Sequence[str] | None) -> None:
        """Parses one line. Raises SmiLogError."""
        self._number += 1
        row = [cell.strip() for cell in cells]
        if _is_no_row(row, self._header, following):
            self._headers += row == self._header
            return
        try:
            if len(row) < len(self._header):
                raise ValueError(f"{len(row)} cells, but the header has {len(self._header)}")
            when = self._read_time(row[self._time])
            gpu = self._find(row, when)
            if gpu is None:
                self._unnamed.append(self._number)
                return
            values = [None if i is None else _parse_cell(row[i], self._header[i]) for i in self._columns]
        except ValueError as exc:
            raise SmiLogError(f"{self._place}:{self._number}: {exc}") from exc
        if (when, row) != gpu.previous:
            gpu.previous = (when, row)
            self._add_row(gpu, when, values)

    def _read_time(self, text: str) -> datetime:
        """Parses a time. Raises ValueError. Parses each second once, because that is slow."""
        second, _, fraction = text.partition(".")
        if second != self._second[0] or not (fraction.isascii() and fraction.isdigit() and len(fraction) <= 6):
            when = datetime.strptime(text, "%Y/%m/%d %H:%M:%S.%f")
            self._second = second, when.replace(microsecond=0)
            return when
        return self._second[1].replace(microsecond=int(fraction.ljust(6, "0")))

    def _find(self, row: list[str], when: datetime) -> _LogGpu | None:
        """Finds the GPU of a row. None if several GPUs match. Raises ValueError if the row shows a second GPU that
        cannot be told apart or is not allowed.
        """
        cells = tuple(row[i] for i in self._keys.values())
        gpu = self._named.get(cells)
        if gpu is None:
            names = {name: cell for name, cell in zip(self._keys, cells, strict=True) if not NO_VALUE.fullmatch(cell)}
            found = [each for each in self._gpus if each.agrees(names)]
            if len(found) > 1:
                return None
            if not found and (not self._gpus or not self._is_one):
                self._gpus.append(_LogGpu(SmiLog(when)))
                found = self._gpus[-1:]
            if found:
                gpu = self._named[cells] = found[0]
                gpu.log.names.update(names)
        if gpu is None or (gpu.previous is not None and gpu.previous[0] == when and gpu.previous[1] != row):
            remedy = "" if self._is_one else ", or add uuid to --query-gpu"
            raise ValueError(f"the log has a second GPU: write one log per GPU, with nvidia-smi --id=INDEX{remedy}")
        return gpu

    def _add_row(self, gpu: _LogGpu, when: datetime, values: Sequence[float | None]) -> None:
        # A log may repeat the header for each row. Only a header after rows without one begins another log.
        has_header = self._headers > gpu.headers
        before = gpu.local.shift
        t = gpu.local.convert(when, joined=has_header and not gpu.had_header)
        gpu.headers, gpu.had_header = self._headers, has_header
        if t is None:
            gpu.dropped.append(self._number)
            return
        if change := gpu.local.shift - before:
            gpu.log.notes.append(_describe_change(f"{self._place}:{self._number}", change.total_seconds()))
        utilization, temperature, clock, watts = values
        ratio = None if utilization is None or utilization > 100 else utilization / 100.0
        gpu.log.rows.append(SmiRow(t, ratio, temperature, None if clock is None else clock * 1e6, watts))

    def finish(self) -> list[SmiLog]:
        """Returns the logs of all GPUs. Raises SmiLogError if no GPU has two rows."""
        for gpu in self._gpus:
            if gpu.dropped:
                gpu.log.notes.append(
                    f"{self._place}:{gpu.dropped[0]}: the time goes back, so {len(gpu.dropped)} rows are ignored; if "
                    "the file joins several logs, sort its rows by time"
                )
        logs = [gpu.log for gpu in self._gpus]
        if self._unnamed:
            logs[0].notes.append(
                f"{self._place}:{self._unnamed[0]}: {len(self._unnamed)} rows are ignored, because they name no GPU"
            )
        if not any(len(log.rows) > 1 for log in logs):
            notes = [note for log in logs for note in log.notes]
            raise SmiLogError("; ".join([f"{self._place}: fewer than two rows", *notes]))
        return logs


def _describe_change(place: str, seconds: float) -> str:
    verb, done = ("back", "added to") if seconds > 0 else ("forward", "subtracted from")
    minutes = f"{abs(seconds) / 60:.0f} minutes"
    return f"{place}: summer time set the clock {verb} by {minutes}, which are {done} all times from this line on"


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
