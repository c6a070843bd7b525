"""Judges a recording as the exporter would have judged the GPUs, but without waiting in real time."""

from __future__ import annotations

import statistics
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.devices.errors import DeviceError, DriverUnavailable
from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.agent.devices.nvml.device import NvmlDevice
from gpu_exporter.agent.devices.nvml.recording import RecordedLibrary
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.model.readings import DeviceSnapshot, Span

# What a value of another type than the driver's causes in the reader that gets it.
MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class PlayedUnit(NamedTuple):
    """A GPU, or a MIG instance (`mig`, `profile`) of it. `model`: the name of the GPU."""

    uuid: str
    model: str
    mig: str = ""
    profile: str = ""


class Playback(NamedTuple):
    """The activity of all units of a recording, from `start` to `end` (Unix seconds). Time outside the spans is
    unknown. `notes`: texts about GPUs that could not be read.
    """

    start: float
    end: float
    units: dict[PlayedUnit, list[Span]]
    notes: list[str]


def play_back(path: Path, settings: Settings) -> Playback:
    """Reads a file of `gpu-exporter record`, in the cycles in which it was recorded. Raises DriverUnavailable."""
    library = RecordedLibrary(path, clock := ManualClock())
    backend = NvmlBackend(library, clock)
    backend.open()
    begin, found = clock.monotonic(), defaultdict[PlayedUnit, list[Span]](list)
    samplers: dict[int, DeviceSampler] = {}
    moments: list[tuple[float, int]] = []
    notes: list[str] = []
    try:
        count = backend.count()
    except MALFORMED as exc:
        raise DriverUnavailable(f"{path}: the number of GPUs is malformed: {exc}") from exc
    for position in range(count):
        try:
            device = backend.find(position)
        except (DeviceError, *MALFORMED) as exc:
            notes.append(_describe(path, position, exc))
            continue
        assert isinstance(device, NvmlDevice)
        cycles = library.cycles(device.handle)
        step = statistics.median(after - before for before, after in pairwise(cycles)) if len(cycles) > 1 else 1.0
        sampling = settings.sampling._replace(interval=step)
        rules = activity_rules(settings._replace(sampling=sampling))
        samplers[position] = DeviceSampler(device, registry.ALL, clock, rules)
        # Between two cycles, all answers of the first one are there.
        moments += [(at + step / 2, position) for at in cycles if at + step / 2 <= library.duration_s]
    for at, position in sorted(moments):
        clock.advance(max(0.0, begin + at - clock.monotonic()))
        if position in samplers:
            try:
                snapshot = samplers[position].sample()
            except (DeviceError, *MALFORMED) as exc:
                notes.append(f"{_describe(path, position, exc)}; after {at:.0f} s, it is unknown")
                del samplers[position]
                continue
            _add(found, snapshot, library.wall - begin)
    return Playback(library.wall, library.wall + library.duration_s, found, notes)


def _describe(path: Path, position: int, error: Exception) -> str:
    return f"{path}: GPU {position}: {'' if isinstance(error, DeviceError) else 'an answer is malformed: '}{error}"


def _add(found: defaultdict[PlayedUnit, list[Span]], snapshot: DeviceSnapshot, to_wall: float) -> None:
    """Adds the spans of the GPU's MIG instances. Without instances, adds the spans of the GPU."""
    uuid, model = str(snapshot.identity.uuid), str(snapshot.identity.name)
    parts = [(PlayedUnit(uuid, model, each.mig, each.profile), each.activity) for each in snapshot.instances]
    for unit, activity in parts or [(PlayedUnit(uuid, model), snapshot.activity)]:
        spans = found[unit]
        if activity is None:
            continue
        for span in activity.spans:
            spans.append(Span(span.start + to_wall, span.end + to_wall, span.ratio, span.other, activity.witnesses))
