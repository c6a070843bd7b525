"""What the exporter's own rules make of a recording of known loads: the ledger's hours, the witnesses, the stall rule.

Plays a recording of `make gpu-check` back on a virtual clock, so the same figures come out on a machine without a GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.agent.devices.nvml.recording import RecordedLibrary, read_recording
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.holders import HolderKey
from gpu_exporter.common.model.readings import DeviceSnapshot, Effort, HostProgress
from gpu_exporter.common.model.units import UnitId
from gpu_exporter.common.model.views import Spin
from gpu_exporter.diagnosis.stalls.boards import Boards, HeldBoard
from gpu_exporter.diagnosis.stalls.rules import StallRules

EDGE_S = 1.5  # at both ends of a load: the driver's samples are means of up to a second
# The rule's durations are shortened to the length of a load. Its thresholds stay.
SHORT: dict[str, Any] = {"after": 15.0, "flat_over": 10.0, "work_min": 10.0}
KEY = HolderKey("slurm", "1")
WITNESSES = tuple(Effort._fields[2:])


class Mark(NamedTuple):
    """A load of a recording: seconds from the start of the recording. `truth`: share of the time with a kernel."""

    name: str
    start: float
    end: float
    truth: float | None


class Row(NamedTuple):
    """One load. Seconds of known utilization, of busy and of idle time in it, and of the longest idle time without a
    break; `others`: seconds by witness beside the utilization. `witnesses`: 5th percentile, median and 95th percentile by field of Effort, without unknown values.
    `spin`: the stall rule at the end of the load, with a quiet host; `ended_by`: what ended its last run.
    """

    name: str
    truth: float | None
    known_s: float
    busy_s: float
    idle_s: float
    longest_idle_s: float
    others: dict[str, float]
    witnesses: dict[str, tuple[float, float, float]]
    spin: Spin
    ended_by: str


class _Tally:
    def __init__(self) -> None:
        self.known_s = self.busy_s = self.idle_s = self.longest_idle_s = self._run_s = 0.0
        self.others: dict[str, float] = {}
        self.efforts: list[Effort] = []

    def add(self, snapshot: DeviceSnapshot, start: float, end: float) -> None:
        for span in snapshot.activity.spans if snapshot.activity is not None else ():
            length_s = min(span.end, end) - max(span.start, start)
            if length_s <= 0.0:
                continue
            self.known_s += length_s
            self.busy_s += length_s * span.ratio
            self._run_s = 0.0 if span.ratio or span.other else self._run_s + length_s
            self.idle_s += length_s if self._run_s else 0.0
            self.longest_idle_s = max(self.longest_idle_s, self._run_s)
            for name in span.other:
                self.others[name] = self.others.get(name, 0.0) + length_s
        if snapshot.effort is not None and snapshot.effort.start >= start and snapshot.effort.end <= end:
            self.efforts.append(snapshot.effort)

    def witnesses(self) -> dict[str, tuple[float, float, float]]:
        found = {}
        for name in WITNESSES:
            values = sorted(value for effort in self.efforts if (value := getattr(effort, name)) is not None)
            if values:
                aside = len(values) // 20
                found[name] = (values[aside], statistics.median(values), values[-1 - aside])
        return found


def read(path: Path, clock: ManualClock, step_s: float | None = 1.0) -> Iterator[DeviceSnapshot]:
    """The snapshots of the first GPU, one every `step_s`, until the recording ends. Moves the clock.

    Without `step_s` the sampler chooses, as in the exporter. But a window of GPM has the length that it was recorded with.
    """
    _, duration_s, _ = read_recording(path)
    backend = NvmlBackend(RecordedLibrary(path, clock), clock)
    backend.open()
    sampler = DeviceSampler(backend.find(0), registry.ALL, clock, activity_rules(Settings()))
    begin = clock.monotonic()
    while clock.monotonic() - begin < duration_s - (step_s or sampler.interval_s):
        yield sampler.sample()
        clock.advance(step_s or sampler.interval_s)


def review(path: Path, marks: Sequence[Mark], step_s: float | None = 1.0) -> list[Row]:
    """A row for each load, in the order of time; `step_s` as in `read`."""
    clock = ManualClock()
    zero = clock.monotonic()
    rules = StallRules()._replace(**SHORT)
    boards = Boards(rules)
    unit: UnitId | None = None
    tallies, spins = {mark: _Tally() for mark in marks}, {}
    for snapshot in read(path, clock, step_s):
        if unit is None:
            unit = UnitId(snapshot.identity.uuid)
            # A load is too short to learn the power at rest, so the first reading, without a context, gives it.
            watts = _power(snapshot)
            boards.restore({} if watts is None else {unit: watts})
            boards.hold([HeldBoard(unit, KEY)])
        boards.read(snapshot, without_process=False)
        if snapshot.effort is not None:
            quiet = HostProgress(snapshot.effort.start, snapshot.effort.end, 0.0, False, 0.0, 0.0)
            boards.hear(unit, KEY, quiet)
        watch = boards.watch_of(unit, KEY)
        at = snapshot.monotonic - zero
        for mark, tally in tallies.items():
            tally.add(snapshot, zero + mark.start + EDGE_S, zero + mark.end - EDGE_S)
            if watch is not None and mark.start <= at <= mark.end - EDGE_S:
                spins[mark] = (watch.report(), watch.ended_by)
    return [_row(mark, tally, *spins[mark]) for mark, tally in tallies.items() if mark in spins]


def _row(mark: Mark, tally: _Tally, spin: Spin, ended_by: str) -> Row:
    return Row(
        mark.name,
        mark.truth,
        tally.known_s,
        tally.busy_s,
        tally.idle_s,
        tally.longest_idle_s,
        tally.others,
        tally.witnesses(),
        spin,
        ended_by,
    )


def render(rows: Sequence[Row]) -> list[str]:
    """A table in Markdown."""
    names = ("power_w", "sm", "pipes", "dram", "pcie", "nvlink")
    lines = [f"| load | known s | busy | idle s | other signs of work | {' | '.join(names)} | stall rule |"]
    lines.append("| --- " * (len(names) + 6) + "|")
    for row in rows:
        busy = f"{row.busy_s / row.known_s:.3f}" if row.known_s else "-"
        others = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in sorted(row.others.items()))
        values = [_span(name, row.witnesses.get(name)) for name in names]
        spin = row.spin
        verdict = f"{spin.confidence}: {spin.evidence}" if spin.run_s else spin.unknown or f"no run: {row.ended_by}"
        lines.append(
            f"| {row.name} | {row.known_s:.0f} | {busy} | {row.idle_s:.1f} | {others} | {' | '.join(values)} | {verdict} |"
        )
    return lines


def _span(name: str, values: tuple[float, float, float] | None) -> str:
    if values is None:
        return "unknown"
    low, middle, high = values
    if name == "power_w":
        return f"{middle:.0f} ({low:.0f} to {high:.0f})"
    if name in ("pcie", "nvlink"):
        return f"{middle / 1e6:.1f} ({low / 1e6:.1f} to {high / 1e6:.1f}) MB/s"
    return f"{middle:.4f} ({low:.4f} to {high:.4f})"


def _power(snapshot: DeviceSnapshot) -> float | None:
    return next((each.value for each in snapshot.samples if each.family.name == "gpu_power_watts"), None)


def as_marks(found: Sequence[dict[str, Any]]) -> list[Mark]:
    """Marks as `make gpu-check` writes them."""
    return [Mark(**entry) for entry in found]
