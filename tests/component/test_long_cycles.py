"""A cycle every five seconds detects short work at any moment. Uses the fake NVML library, whose ring is finite."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.devices.nvml.backend import NvmlBackend
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.runtime.wiring import activity_rules
from gpu_exporter.agent.sampling.sampler import DeviceSampler
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.config.values import LEAST
from gpu_exporter.common.model.readings import Span
from tests.testbed.nvml.feeder import NvmlTable, ScenarioFeeder

RUN_S = 600.0
WORK_S = 0.2
SETTLED_S = 5.0  # from the start until the cycles are long
EDGE_S = 0.14  # docs/decisions/0010: how far idle may overlap work at its ends, with a period of 0.2 s


class Run(NamedTuple):
    """The result of ten minutes with one short piece of work. Times are seconds since the start."""

    spans: list[Span]
    intervals: list[float]
    calls: int


@pytest.fixture(scope="module")
def table(nvml_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NvmlTable]:
    ctypes.CDLL(str(nvml_directory / "libnvidia-ml.so.1"), mode=ctypes.RTLD_GLOBAL)
    table = NvmlTable(tmp_path_factory.mktemp("nvml") / "table")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPU_EXPORTER_NVML_TABLE", str(table.path))
        yield table


@pytest.mark.slow
@pytest.mark.parametrize("model", ["V100", "A100", "H100"])
@pytest.mark.parametrize("interval_s", [LEAST["sampling.interval"][0], 0.3, 1.0])
def test_an_idle_gpu_is_known_at_the_shortest_allowed_interval(table: NvmlTable, model: str, interval_s: float) -> None:
    run = play(table, "", RUN_S + 1.0, [0.0], interval_s, interval_s, model)
    assert overlap(run.spans, 0.0, RUN_S) > 0.98 * RUN_S


def play(
    table: NvmlTable,
    part: str,
    begin: float,
    late: list[float],
    interval_max_s: float = 5.0,
    interval_s: float = 1.0,
    model: str = "A100",
) -> Run:
    """Simulate work of WORK_S on `part` ("" is a kernel) from `begin`. The exporter chooses the interval.

    `late`: the delay of each cycle in seconds; the list is repeated.
    """
    points = [[0, 0], [begin, 0], [begin, 1], [begin + WORK_S, 1], [begin + WORK_S, 0]]
    work, rest = {"kind": "curve", "points": points}, {"kind": "constant", "value": 0.0}
    load: dict[str, object] = {part: work, "load": rest} if part else {"load": work}
    rules = activity_rules(Settings())._replace(interval_s=interval_s, interval_max_s=interval_max_s)
    clock = ManualClock()
    table.table.devices[0].sample_count = 0
    feeder = ScenarioFeeder(parse_scenario({"gpus": [{"model": model, **load}]}), table, clock)
    backend = NvmlBackend(None, clock)
    backend.open()
    start = clock.monotonic()
    try:
        device = backend.find(0)
        sampler = DeviceSampler(device, registry.DEFAULT, clock, rules)
        run, answers, cycle = Run([], [], 0), device.answers, 0
        while clock.monotonic() - start < RUN_S:
            clock.advance(sampler.interval_s + late[cycle % len(late)])
            feeder.feed()
            snapshot = sampler.sample()
            cycle += 1
            run.intervals.append(sampler.interval_s)
            run.spans.extend(
                span._replace(start=span.start - start, end=span.end - start)
                for span in (snapshot.activity.spans if snapshot.activity else ())
            )
        return run._replace(calls=device.answers - answers)
    finally:
        backend.close()


def overlap(spans: list[Span], begin: float, end: float) -> float:
    return sum(max(0.0, min(span.end, end) - max(span.start, begin)) for span in spans)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    part=st.sampled_from(["", "encoder", "decoder", "jpeg", "ofa"]),
    begin=st.floats(SETTLED_S, RUN_S - 15.0),
    late=st.lists(st.floats(0.0, 0.3), min_size=1, max_size=7),
)
def test_short_work_is_detected_at_any_moment(table: NvmlTable, part: str, begin: float, late: list[float]) -> None:
    run = play(table, part, begin, late)
    idle = [span for span in run.spans if not span.ratio and not span.other]
    seen = [span for span in run.spans if (part in span.other if part else span.ratio)]
    assert overlap(seen, begin, begin + WORK_S) > 0.0
    assert overlap(idle, begin, begin + WORK_S) <= EDGE_S
    if not part:
        assert sum((span.end - span.start) * span.ratio for span in seen) == pytest.approx(WORK_S, abs=0.01)
    assert overlap(idle, 0.0, RUN_S) > 0.96 * RUN_S
    # Where a cycle may hide a burst on the link, the next ten are short.
    assert sum(interval for interval in run.intervals if interval == 5.0) > 0.9 * sum(run.intervals)


def test_long_cycles_call_the_driver_less_than_half_as_often(table: NvmlTable) -> None:
    long, short = (play(table, "", 300.0, [0.0], interval_max_s) for interval_max_s in (5.0, 1.0))
    assert set(long.intervals[20:]) == {5.0}
    assert set(short.intervals) == {1.0}
    # The state of each of 18 NVLinks is read every 10 s in both.
    assert long.calls < 0.45 * short.calls
