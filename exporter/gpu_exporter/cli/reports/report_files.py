"""Reads the files of `report --source.file`: logs of nvidia-smi, and recordings of `gpu-exporter record`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpu_exporter.agent.devices.errors import DriverUnavailable
from gpu_exporter.agent.devices.nvml.recording import is_recording
from gpu_exporter.agent.devices.smi_log import SmiLog, SmiLogError, read_smi_logs
from gpu_exporter.agent.runtime.playback import play_back
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.common.model.readings import WITNESSES_MIN, Span
from gpu_exporter.reports.usage.cells import Unit
from gpu_exporter.reports.usage.files import check_period
from gpu_exporter.reports.usage.model import IDLE, UNPROVEN, ReportSource
from gpu_exporter.reports.usage.sources.logs import LogTime, Stretch, of_gauge, with_unknown

if TYPE_CHECKING:
    from gpu_exporter.common.config.defaults import Settings

ENDINGS = (".csv", ".csv.gz", ".rec.gz")  # of the files that are read in a folder
LOGS, RECORDINGS = "logs of nvidia-smi", "recordings of gpu-exporter"
HOLDERS = "holders, and whether a GPU was held: all of its time counts as held"
CANNOT = {
    LOGS: (
        HOLDERS,
        "whether a GPU at zero was idle between two rows: those hours are to be investigated; record the GPUs with "
        "`gpu-exporter record`",
    ),
    RECORDINGS: (HOLDERS,),
}


class FileTimes:
    """Collects the time of all GPUs in all files. `failures`: texts about unreadable files. `notes`: texts about
    omitted data.
    """

    def __init__(self, settings: Settings) -> None:
        self.time, self.notes, self.failures = LogTime(), list[str](), list[str]()
        self._settings = settings
        self._counts: Counter[str] = Counter()

    def read(self, paths: Sequence[Path]) -> None:
        found = {given: list(_files(given)) for given in paths}
        self.failures += [
            f"{given}: no file in this folder ends in {', '.join(ENDINGS)}"
            for given, files in found.items()
            if not files
        ]
        for path in dict.fromkeys(each.resolve() for files in found.values() for each in files):
            try:
                if is_recording(path):
                    self._add_recording(path)
                else:
                    self._add_logs(path)
            except (OSError, SmiLogError, DriverUnavailable, AnswerError) as exc:
                text = str(exc)
                self.failures.append(text if str(path) in text else f"{path}: {text}")

    @property
    def sources(self) -> list[ReportSource]:
        return [
            ReportSource(f"{name} ({count:,})", "utilization of GPUs", CANNOT[name])
            for name, count in sorted(self._counts.items())
        ]

    def _add_logs(self, path: Path) -> None:
        for log in read_smi_logs(path):
            try:
                began = log.began.timestamp()  # of the local time here
            except (ValueError, OverflowError):  # in the years 1 and 9999
                began = -1.0
            times = [began + row.t for row in log.rows]
            check_period(times[0], times[-1], str(path))
            self.time.add(_unit(path, log), of_gauge(times, [row.utilization for row in log.rows]))
            self.notes += log.notes
        self._counts[LOGS] += 1

    def _add_recording(self, path: Path) -> None:
        played = play_back(path, self._settings)
        check_period(played.start, played.end, str(path))
        for unit, spans in played.units.items():
            known = with_unknown(map(_stretch, spans), played.start, played.end)
            self.time.add(Unit("", "", unit.uuid, unit.mig, unit.profile, unit.model), known)
        self.notes += played.notes
        self._counts[RECORDINGS] += 1


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    yield from sorted(each for each in path.iterdir() if each.name.endswith(ENDINGS) and each.is_file())


def _unit(path: Path, log: SmiLog) -> Unit:
    """Identifies the GPU of a log. Without a UUID, its other columns identify the GPU only within this file."""
    names = log.names
    place = names.get("index") or names.get("pci.bus_id") or names.get("serial") or ""
    return Unit("", "", names.get("uuid") or f"{path} {place}".rstrip(), model=names.get("name", ""))


def _stretch(span: Span) -> Stretch:
    """Converts a span by the ledger's rule: a zero that only one witness shows proves nothing."""
    if span.ratio or span.other:
        return Stretch(span.start, span.end, span.ratio)
    return Stretch(span.start, span.end, 0.0, IDLE if span.witnesses >= WITNESSES_MIN else UNPROVEN)
