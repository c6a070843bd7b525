"""The time that a reading covers, and the witnesses that contradict idleness."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_exporter.agent.collectors.contract import Cycle, Totals
from gpu_exporter.agent.devices.protocol import Gpm, Traffic, UtilizationSample
from gpu_exporter.agent.sampling.activity.spans import ActivityReader
from gpu_exporter.agent.sampling.activity.witnesses import ActivityRules, PowerFloor
from gpu_exporter.common.model.readings import Span
from gpu_exporter.common.model.units import UnitId

RULES = ActivityRules(interval_s=1.0, gap_intervals=3, power_floor_max_ratio=0.3, power_active_step=0.25)
WALL = 1_700_000_000.0


class Bench:
    """One device's reader with its own clock; wall = monotonic + WALL until the clock is stepped."""

    def __init__(self) -> None:
        self.reader = ActivityReader(UnitId("GPU-0"), RULES)
        self.offset = WALL

    def read(self, now: float, samples: list[tuple[float, float]] = (), **facts: Any) -> tuple[Span, ...] | None:  # type: ignore[assignment]
        cycle = Cycle(None, self.reader.samples_since, lambda: now, Totals())  # type: ignore[arg-type]
        cycle.utilization_at = cycle.pcie_at = cycle.nvlink_at = cycle.energy_at = now
        cycle.driver_samples = [UtilizationSample(WALL + t, ratio) for t, ratio in samples]
        for name, value in facts.items():
            setattr(cycle, name, value)
        activity = self.reader.read(cycle, now, now + self.offset)
        return None if activity is None else activity.spans


@pytest.fixture
def bench() -> Bench:
    return Bench()


def rounded(spans: tuple[Span, ...] | None) -> list[tuple[float, float, float, bool]]:
    assert spans is not None
    return [(round(s.start, 3), round(s.end, 3), s.ratio, bool(s.other)) for s in spans]


def test_each_driver_sample_covers_the_time_since_the_sample_before(bench: Bench) -> None:
    bench.read(10.0, [(9.8, 0.5)])
    assert rounded(bench.read(10.5, [(10.0, 1.0), (10.2, 0.25)])) == [
        (9.8, 10.0, 1.0, False),
        (10.0, 10.2, 0.25, False),
    ]


def test_a_driver_sample_never_covers_more_than_the_drivers_longest_period(bench: Bench) -> None:
    bench.read(10.0, [(10.0, 0.5)])
    assert rounded(bench.read(30.0, [(30.0, 0.5)])) == [(28.9, 30.0, 0.5, False)]


def test_zeros_before_the_first_read_of_a_witness_are_unknown(bench: Bench) -> None:
    bench.read(10.0, [(9.5, 0.0), (10.0, 0.0)])
    # The engines, read at 30, cover one period of the driver (1.1 s); no witness was read before that.
    spans = bench.read(30.0, [(28.5, 0.0), (29.0, 0.0), (29.5, 0.0), (30.0, 0.0)])
    assert rounded(spans) == [(29.0, 29.5, 0.0, False), (29.5, 30.0, 0.0, False)]
    assert rounded(bench.read(31.0, [(30.5, 0.0), (31.0, 0.0)])) == [(30.0, 31.0, 0.0, False)]


def test_a_slow_interval_does_not_lengthen_the_time_that_a_reading_covers() -> None:
    """If a one-second value is read every half minute, only one second of each half minute is known."""
    bench = Bench()
    bench.reader = ActivityReader(UnitId("GPU-0"), RULES._replace(interval_s=30.0))
    bench.read(10.0, utilization=0.0)
    assert rounded(bench.read(40.0, utilization=0.0)) == [(38.9, 40.0, 0.0, False)]


def test_samples_from_the_future_and_samples_read_before_are_dropped(bench: Bench) -> None:
    bench.read(10.0, [(10.0, 0.5)])
    assert rounded(bench.read(11.0, [(9.9, 1.0), (10.0, 1.0), (10.5, 0.5), (12.5, 1.0)])) == [(10.0, 10.5, 0.5, False)]


def test_samples_in_flight_across_a_wall_clock_step_are_dropped(bench: Bench) -> None:
    bench.read(10.0, [(10.0, 0.5)])
    bench.offset += 3600.0
    assert bench.read(11.0, [(11.0, 0.0)]) == ()
    assert bench.read(12.0, [(12.0, 0.0)]) == ()  # stamped before the new epoch


def test_without_a_ring_the_reported_rate_covers_the_interval(bench: Bench) -> None:
    bench.read(10.0, utilization=0.5)
    assert rounded(bench.read(11.0, utilization=0.75)) == [(10.0, 11.0, 0.75, False)]


def test_a_ring_with_stamps_of_another_clock_is_not_used(bench: Bench) -> None:
    """The stamps count from boot instead of wall time: the reported rate is used, and nothing is booked in the past."""
    boot = 5_000.0 - WALL
    bench.read(10.0, [(boot + 10.0, 0.0)], utilization=0.5)
    assert rounded(bench.read(11.0, [(boot + 11.0, 0.0)], utilization=0.5)) == [(10.0, 11.0, 0.5, False)]


def test_a_gap_of_more_than_three_intervals_is_unknown(bench: Bench) -> None:
    bench.read(10.0, utilization=0.0)
    assert bench.read(13.5, utilization=0.0) == ()


def test_the_reported_rate_is_not_counted_while_the_ring_answers(bench: Bench) -> None:
    bench.read(10.0, [(10.0, 0.0)], utilization=0.0)
    bench.read(11.0, [(11.0, 0.0)], utilization=0.0)
    assert bench.read(12.0, [], utilization=0.0) == ()  # the ring is only late
    for second in range(13, 42):
        assert bench.read(second, [], utilization=0.0) == ()  # it may still deliver buffered entries
    assert rounded(bench.read(42.0, [], utilization=0.0)) == [(41.0, 42.0, 0.0, False)]  # now the ring counts as gone


@pytest.mark.parametrize(
    "silence", ["first cycle", "after a gap", "ring is late", "clock was stepped", "no utilization"]
)
def test_a_sign_of_activity_is_reported_even_if_it_covers_no_time(bench: Bench, silence: str) -> None:
    busy = {"utilization": 1.0, "power_w": 690.0, "power_limit_w": 700.0}
    if silence != "first cycle":
        for second in (9.0, 10.0):
            bench.read(second, [(second, 0.0)], utilization=0.0, power_w=70.0, power_limit_w=700.0)
    if silence == "clock was stepped":
        bench.offset += 3600.0
    if silence == "no utilization":
        del busy["utilization"]
    now = 60.0 if silence == "after a gap" else 11.0
    (span,) = bench.read(now, [], **busy) or ()
    assert (span.start, span.end, span.other) == (now, now, ("power",))


def test_without_a_source_there_is_no_activity(bench: Bench) -> None:
    assert bench.read(10.0) is None


@pytest.mark.parametrize(
    ("witness", "facts"),
    [
        ("encoder", {"engines": {"encoder": 0.1}}),
        ("decoder", {"engines": {"decoder": 0.1}}),
        ("power", {"power_w": 300.0, "power_limit_w": 400.0}),
    ],
    ids=["encoder", "decoder", "power"],
)
def test_utilization_zero_with_another_witness_active_is_other_activity(
    bench: Bench, witness: str, facts: dict[str, float]
) -> None:
    bench.read(10.0, utilization=0.0, **facts)
    spans = bench.read(11.0, utilization=0.0, **facts)
    assert rounded(spans) == [(10.0, 11.0, 0.0, True)]
    assert [span.other for span in spans or ()] == [(witness,)]
    bench = Bench()
    bench.read(10.0, [(10.0, 0.0)], utilization=0.0, **facts)
    assert rounded(bench.read(11.0, [(10.5, 0.0), (11.0, 0.0)], utilization=0.0, **facts)) == [
        (10.0, 10.5, 0.0, True),
        (10.5, 11.0, 0.0, True),
    ]


def test_work_between_two_reads_is_detected_by_its_energy(bench: Bench) -> None:
    """Busy for 0.8 of every second, but quiet at each read, without a ring: every value of a moment is idle."""
    quiet = {"utilization": 0.0, "power_w": 60.0, "power_limit_w": 400.0}
    bench.read(10.0, energy_j=1_000.0, **quiet)
    assert rounded(bench.read(11.0, energy_j=1_300.0, **quiet)) == [(10.0, 11.0, 0.0, True)]
    assert rounded(bench.read(12.0, energy_j=1_360.0, **quiet)) == [(11.0, 12.0, 0.0, False)]
    assert rounded(bench.read(13.0, energy_j=5.0, **quiet)) == [(12.0, 13.0, 0.0, False)]  # the driver was reloaded


def test_a_reported_rate_above_zero_contradicts_a_ring_of_zeros(bench: Bench) -> None:
    bench.read(10.0, [(10.0, 0.0)], utilization=0.0)
    assert rounded(bench.read(11.0, [(11.0, 0.0)], utilization=0.4)) == [(10.0, 11.0, 0.0, True)]


def test_witnesses_are_counted() -> None:
    bench = Bench()
    cycle = Cycle(None, {}, lambda: 10.0, Totals())  # type: ignore[arg-type]
    cycle.utilization, cycle.engines = 0.0, {"encoder": 0.0, "decoder": 0.0}
    cycle.power_w, cycle.power_limit_w = 60.0, 400.0
    activity = bench.reader.read(cycle, 10.0, 10.0 + WALL)
    assert activity is not None
    assert activity.witnesses == 2, "an engine for video does not see computation"


def test_a_witness_that_needs_two_readings_is_not_counted_after_one(bench: Bench) -> None:
    """A quiet GPM rate does not replace it: the bytes of that moment are unknown."""
    counts = []
    for second in (10.0, 11.0):
        cycle = Cycle(None, {}, lambda: 10.0, Totals())  # type: ignore[arg-type]
        cycle.utilization = cycle.utilization_at = 0.0
        cycle.engines = {"encoder": 0.0}
        cycle.pcie, cycle.pcie_at = Traffic(5.0, 5.0), second
        cycle.gpm = Gpm(1.0, pcie=0.0)
        activity = bench.reader.read(cycle, second, second + WALL)
        assert activity is not None
        counts.append(activity.witnesses)
    assert counts == [1, 2]


def test_traffic_after_a_missing_reading_is_unknown_although_gpm_is_quiet(bench: Bench) -> None:
    quiet = {"utilization": 0.0, "gpm": Gpm(1.0, pcie=0.0)}
    for second in (10.0, 11.0):
        spans = bench.read(second, pcie=Traffic(5.0, 5.0), **quiet)
    assert rounded(spans) == [(10.0, 11.0, 0.0, False)]
    bench.read(12.0, witness_missing=True, **quiet)
    assert bench.read(13.0, pcie=Traffic(9e9, 5.0), **quiet) == ()
    assert bench.read(14.0, pcie=Traffic(99e9, 5.0), **quiet) == (Span(13.0, 14.0, 0.0, ("pcie",)),)


@pytest.mark.parametrize("missing", [11.0, 12.0])
def test_an_entry_over_two_cycles_is_unknown_if_a_witness_was_missing_in_either_cycle(
    bench: Bench, missing: float
) -> None:
    bench.read(10.0, [(10.0, 0.0)], utilization=0.0)
    for now in (11.0, 12.0):
        bench.read(now, utilization=0.0, witness_missing=now == missing)
    assert bench.read(12.5, [(11.5, 0.0)], utilization=0.0) == ()


def test_a_ring_is_waited_for_after_a_pause_in_sampling(bench: Bench) -> None:
    """The reported rate may be older than the work, so it proves no rest while a ring is expected."""
    bench.read(1010.0, [(1009.0, 0.0), (1010.0, 0.0)], utilization=0.0)
    bench.read(1011.0, [(1011.0, 0.0)], utilization=0.0)
    for now in (1071.0, 1072.0, 1073.0):
        assert not bench.read(now, utilization=0.0)
    for now in range(1074, 1106):
        spans = bench.read(float(now), utilization=0.0)
    assert rounded(spans) == [(1104.0, 1105.0, 0.0, False)]  # but not for ever


def test_a_ring_is_waited_for_after_its_first_entry(bench: Bench) -> None:
    """The first entry has no span, since the time that it covers is unknown; the next entries may be lost."""
    bench.read(10.0, [], utilization=0.0)
    bench.read(11.0, [(11.0, 0.0)], utilization=0.0)
    assert bench.read(12.0, [], utilization=0.0) == ()


def test_work_at_a_stamp_that_was_read_as_rest_is_a_sign_of_activity(bench: Bench) -> None:
    bench.read(10.0, [(9.8, 0.0), (10.0, 0.0)], utilization=0.0)
    bench.read(10.2, [(10.2, 0.0)], utilization=0.0)
    spans = bench.read(10.4, [(10.2, 1.0), (10.4, 0.0)], utilization=0.0) or ()
    assert Span(10.4, 10.4, 0.0, ("utilization",)) in spans


RING = [(8.0 + i / 5, 0.0) for i in range(40)]


def read_slowly(bench: Bench, begin: float, now: float, **facts: Any) -> list[tuple[float, float]]:
    """The idle spans after a cycle from `begin` to `now` that read entries of zeros up to its end."""
    newest = bench.reader.samples_since.get("utilization", 0.0) - WALL
    known = [entry for entry in RING if newest < entry[0] - 1e-3 and entry[0] <= now]
    spans = bench.read(now, known, **{"begin": begin, "engines": {"encoder": 0.0}, "utilization": 0.0} | facts)
    return [(round(s.start, 3), round(s.end, 3)) for s in spans or () if not s.other]


def entries(*begins: float) -> list[tuple[float, float]]:
    return [(begin, round(begin + 0.2, 3)) for begin in begins]


def test_time_without_witnesses_during_a_slow_call_is_not_idle(bench: Bench) -> None:
    """Ring entries after the first witness wait for the next cycle, in which their time has been watched."""
    read_slowly(bench, 10.0, 10.0)
    assert read_slowly(bench, 11.0, 11.9, witnessed_at=11.0) == entries(10.0, 10.2, 10.4, 10.6, 10.8)
    assert read_slowly(bench, 12.0, 12.0) == [(11.0, 12.0)]


@pytest.mark.parametrize("stamp", [11.9, None])
def test_a_late_read_of_an_engine_covers_only_its_own_period(bench: Bench, stamp: float | None) -> None:
    read_slowly(bench, 10.0, 10.0)
    assert read_slowly(bench, 11.0, 11.9, witnessed_at=stamp) == entries(10.8)


def test_activity_seen_late_in_a_cycle_may_be_after_the_first_witness(bench: Bench) -> None:
    read_slowly(bench, 10.0, 10.0)
    assert read_slowly(bench, 11.0, 11.7, engines={"encoder": 0.5}, witnessed_at=11.7) == []
    assert read_slowly(bench, 12.2, 12.2) == entries(11.8, 12.0)


def test_a_rate_read_before_a_slow_call_covers_the_time_before_the_call(bench: Bench) -> None:
    read_slowly(bench, 10.0, 10.0)
    assert read_slowly(bench, 11.0, 11.9, utilization=0.3, utilization_at=11.0, witnessed_at=11.0) == []


def test_a_board_that_has_worked_since_the_start_does_not_count_as_resting() -> None:
    floor = PowerFloor(RULES)
    assert floor.is_active(350.0, 400.0)  # the first reading is at work: the floor is capped, not learned from it


@pytest.mark.parametrize(
    ("idle", "limit"),
    [(82.0, 300.0), (60.0, 400.0), (120.0, 700.0), (28.0, 70.0)],
    ids=["V100 with a context", "A100", "H100 with a context", "T4 with a context"],
)
def test_a_board_at_rest_is_quiet(idle: float, limit: float) -> None:
    floor = PowerFloor(RULES)
    assert not floor.is_active(idle, limit)


LONG = RULES._replace(interval_max_s=5.0)


class LongBench(Bench):
    """A driver that buffers everything: rings of utilization and of the encoder, and an energy counter."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = ActivityReader(UnitId("GPU-0"), LONG)
        self.now = 30.0

    def cycle(self, after: float, **facts: Any) -> list[tuple[float, float]]:
        """The idle spans of a cycle `after` seconds later; its rings hold a zero every 0.2 s, over sixteen seconds."""
        self.now += after
        stamps = [i / 5 for i in range(int((self.now - 16.0) * 5), int(self.now * 5) + 1)]
        since = {name: wall - WALL for name, wall in self.reader.samples_since.items()}
        known = {
            "power_w": 70.0,
            "power_limit_w": 700.0,
            "energy_j": 70.0 * self.now,
            "engines": {"encoder": 0.0},
            "engine_samples": {
                "encoder": [UtilizationSample(WALL + t, 0.0) for t in stamps if t > since.get("encoder", 0.0) + 1e-3]
            },
        }
        zeros = [(t, 0.0) for t in stamps if t > since.get("utilization", 0.0) + 1e-3]
        spans = self.read(self.now, zeros, **(known | facts)) or ()
        return [(round(span.start, 1), round(span.end, 1)) for span in spans if not span.ratio and not span.other]


@pytest.fixture
def long_bench() -> LongBench:
    """A bench after three cycles, which have made the interval long."""
    bench = LongBench()
    for _ in range(3):
        bench.cycle(1.0)
    assert bench.reader.interval_s == 5.0
    return bench


def test_a_long_cycle_is_known_if_the_driver_buffers_everything(long_bench: LongBench) -> None:
    assert long_bench.cycle(5.0) == [(33.0, 38.0)]
    assert long_bench.reader.interval_s == 5.0


@pytest.mark.parametrize(
    "missing",
    [
        {"engine_samples": {}},
        {"engine_samples": {"encoder": []}},
        {"energy_j": None},
        {"energy_j": 1.0},
        {"witness_missing": True},
        {"instances": [object()]},
    ],
    ids=[
        "an engine without a ring",
        "an empty ring",
        "no energy",
        "an energy counter that fell",
        "a witness that failed",
        "MIG",
    ],
)
def test_the_long_interval_ends_if_the_driver_does_not_buffer_everything(
    long_bench: LongBench, missing: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_bench.reader._trust, "review", lambda *_: None)  # the review would read the instances
    long_bench.cycle(5.0, **missing)
    assert long_bench.reader.interval_s == 1.0


@pytest.mark.parametrize(
    ("interval_max_s", "asleep_s", "covered"), [(5.0, 9.0, True), (5.0, 11.0, False), (60.0, 40.0, False)]
)
def test_after_a_cycle_that_hung_only_the_time_in_the_rings_is_known(
    interval_max_s: float, asleep_s: float, covered: bool
) -> None:
    """The limit is twice the effective interval, which is half of the time that the rings keep, for any setting."""
    bench = LongBench()
    bench.reader = ActivityReader(UnitId("GPU-0"), LONG._replace(interval_max_s=interval_max_s))
    for _ in range(3):
        bench.cycle(1.0)
    began = bench.now
    idle = bench.cycle(asleep_s)
    assert (idle == [(began, bench.now)]) is covered
    assert covered or min(start for start, _ in idle) >= bench.now - 1.2


def test_at_a_longer_interval_than_the_longest_only_the_time_of_a_reading_is_known() -> None:
    """Half a minute of zeros in every ring, with sums over it: too coarse for a burst that only power shows."""
    bench = LongBench()
    bench.reader = ActivityReader(UnitId("GPU-0"), LONG._replace(interval_s=30.0))
    for _ in range(4):
        idle = bench.cycle(30.0)
    assert min(start for start, _ in idle) >= bench.now - 1.2


def test_without_a_ring_of_an_engine_only_the_last_period_of_a_long_cycle_is_idle(long_bench: LongBench) -> None:
    idle = long_bench.cycle(5.0, engine_samples={})
    assert min(start for start, _ in idle) >= 36.8


def test_work_of_an_engine_within_a_long_cycle_is_found_at_its_time(long_bench: LongBench) -> None:
    ring = [UtilizationSample(WALL + t / 10, 1.0 if t == 354 else 0.0) for t in range(332, 382, 2)]
    idle = long_bench.cycle(5.0, engine_samples={"encoder": ring})
    assert all(end <= 35.2 + 1e-6 or start >= 35.4 - 1e-6 for start, end in idle)
    assert sum(end - start for start, end in idle) > 4.0
