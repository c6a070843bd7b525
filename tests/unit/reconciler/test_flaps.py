"""Labels of holders over a day, read from exporters' pages: noise near a limit changes none of them again and again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator

from tests.testbed.marker_book import POLICY, UNDERUSED, WALL, A, Bench, Book, holder

from gpu_exporter.common.address import Address
from gpu_exporter.reconciler.decision.policy import decide
from gpu_exporter.reconciler.decision.spared import why_spared
from gpu_exporter.reconciler.decision.surroundings import INTERACTIVE, Surroundings
from gpu_exporter.reconciler.evidence.exporters import ExporterSource, parse_exporter
from gpu_exporter.reconciler.evidence.records import Evidence, HolderName, HostLimits

CYCLE_S, DAY_S = 120.0, 86_400.0
HELD_S = 20_000.0  # before the day begins
LADDER = 2  # changes without noise: candidate, and then underused
SLACK = 2
STAGES = ("", "candidate", "underused")
HOST = HostLimits(POLICY.host_busy_ratio, POLICY.host_busy_io, POLICY.host_delay_max - POLICY.underused_after)


def noise(rng: random.Random, mean: float, deviation: float, memory: float) -> Iterator[float]:
    """A value that returns to its mean. `memory`: correlation of two cycles."""
    value = mean
    while True:
        value = mean + memory * (value - mean) + rng.gauss(0.0, deviation * (1.0 - memory**2) ** 0.5)
        yield max(0.0, value)


def until(hours: float) -> Iterator[float]:
    """Work on the host until this time after the start of the day."""
    cycles = int(hours * 3600.0 / CYCLE_S)
    return itertools.chain(itertools.repeat(0.6, cycles), itertools.repeat(0.02))


class Pod:
    """A pod on one GPU that is idle since the start of the day, with noise in its other values."""

    def __init__(self, name: str, **values: Iterator[float]) -> None:
        self.name = HolderName("kubernetes", "ml", name)
        self.values = values
        self.observed_s = HELD_S
        self.start = WALL - HELD_S
        self.changes: list[tuple[float, str]] = []

    def lines(self, wall: float) -> list[str]:
        place = f'gpu="0",uuid="GPU-{self.name.name}",scheduler="kubernetes",namespace="ml",pod="{self.name.name}"'
        now = {key: next(value) for key, value in self.values.items()}
        self.observed_s += CYCLE_S * min(1.0, now.pop("observed", 1.0))
        since = max(WALL, self.start)
        values = {
            "start_timestamp_seconds": self.start,
            "idle_run_seconds": wall - since,
            "last_active_timestamp_seconds": since,
            "held_seconds_total": wall - self.start,
            "observed_seconds_total": min(self.observed_s, wall - self.start),
            "holder_units": 1,
            "idle_run_witnesses": 3,
            **now,
        }
        cause = 'cause="remote_io",confidence="high"'
        causes = [f"gpu_allocation_cause{{{place},{cause}}} 1"] * (values.pop("cause", 0.0) > 0.5)
        rows = [f"gpu_allocation_{key}{{{place}}} {value:.3f}" for key, value in values.items()]
        return [f'gpu_allocation_info{{{place},pod_uid="uid"}} 1', *rows, *causes]


class Day(Bench):
    """Cycles over a day. `late`: pods of a node whose samples are old."""

    def __init__(self, pods: Collection[Pod], late: Collection[Pod] = (), age: Iterator[float] | None = None) -> None:
        self.book, self.pods, self.late, self.age = Book(), list(pods), list(late), age
        super().__init__(self.book, policy=POLICY._replace(freeze_share=1.0))
        exporters = [parse_exporter("n1"), parse_exporter("n2")]
        self.source = ExporterSource(exporters, POLICY.underused_after, self.clock, self.page, host=HOST)

    def page(self, address: Address) -> str:
        wall = self.clock.wall()
        pods, age_s = (
            (self.pods, 1.0) if address.host == "n1" else (self.late, next(self.age) if self.age is not None else 1.0)
        )
        lines = [line for pod in pods for line in pod.lines(wall)]
        return "\n".join([*lines, f"gpu_exporter_last_sample_timestamp_seconds {wall - age_s:.3f}", ""])

    def read_evidence(self, marked: Collection[HolderName] = ()) -> Evidence:
        return self.source.read_evidence(marked)

    def cycle_once(self) -> None:
        self.clock.advance(CYCLE_S)
        before = dict(self.book.marks)
        self.run()
        assert self.problem == ""
        for pod in (*self.pods, *self.late):
            if (stage := self.book.marks.get(pod.name, "")) != before.get(pod.name, ""):
                pod.changes.append((self.clock.wall() - WALL, stage))


def when(pod: Pod, stage: str) -> float:
    """Hours after the start of its idle run at which a pod got this stage for the last time."""
    return max((at for at, found in pod.changes if found == stage), default=float("inf")) / 3600.0


def test_noise_near_any_limit_changes_a_label_at_most_twice_a_day_and_idle_holders_are_marked() -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    quiet = Pod("quiet", host_activity_ratio=noise(rng, 0.02, 0.01, 0.9))
    cpu = [
        Pod(f"cpu-{mean * 100:.0f}-{memory}", host_activity_ratio=noise(rng, mean, 0.1, memory))
        for mean in (0.05, 0.15, 0.25)
        for memory in (0.0, 0.8)
    ]
    others = [
        Pod("io", host_io_bytes_per_second=noise(rng, 15e6, 8e6, 0.8)),
        Pod("cause", cause=noise(rng, 0.3, 0.15, 0.5)),
        *(Pod(f"coverage-{mean}", observed=noise(rng, mean, 0.015, 0.99)) for mean in (0.9, 0.92)),
    ]
    kernels = [
        Pod(
            f"kernel-{memory}", host_activity_ratio=noise(rng, 0.9 / 16, 0.01, memory), host_cpus=itertools.repeat(16.0)
        )
        for memory in (0.0, 0.8)
    ]
    worked = {hours: Pod(f"worked-{hours}", host_activity_ratio=until(hours)) for hours in (1.0, 1.9)}
    late = Pod("late")
    day = Day([quiet, *cpu, *others, *kernels, *worked.values()], [late], noise(rng, POLICY.fresh_min, 30.0, 0.5))
    day.book.around = {pod.name: Surroundings(kind=INTERACTIVE) for pod in kernels}
    for _ in range(int(DAY_S / CYCLE_S)):
        day.cycle_once()
    for pod in (*day.pods, late):
        assert len(pod.changes) <= LADDER + SLACK, f"seed {seed}: {pod.name}: {pod.changes}"
    assert [stage for _, stage in quiet.changes] == ["candidate", "underused"]
    assert when(quiet, "underused") < 2.1
    assert when(worked[1.0], "underused") < 2.1 and 2.3 < when(worked[1.9], "underused") < 2.5
    for pod in (*cpu, *others[:2], *kernels):
        assert day.book.marks[pod.name] == "underused", f"seed {seed}: {pod.name}: {pod.changes}"
        assert when(pod, "underused") <= POLICY.host_delay_max / 3600.0 + 0.1, "work on the host only delays"


def test_a_mark_that_exists_remains_with_a_little_less_evidence_and_does_not_rise() -> None:
    """The coverage is 87 %, and the sample is 170 s old."""
    one = holder(A, [UNDERUSED])
    short = one._replace(units=(one.units[0]._replace(coverage=0.87),))
    late = one._replace(units=(one.units[0]._replace(sample_age_s=170.0),))
    for each in (short, late):
        found = {mark: decide(Evidence(WALL, (each._replace(mark=mark),)), POLICY)[0] for mark in STAGES}
        assert [found[mark].stage for mark in STAGES] == ["unknown", "candidate", "underused"]
        assert why_spared(found["candidate"]) == "unknown" and "so it stays a candidate" in found["candidate"].reason
    lost = one._replace(mark="underused", units=(one.units[0]._replace(coverage=0.84),))
    assert decide(Evidence(WALL, (lost,)), POLICY)[0].stage == "unknown"


def test_pods_that_come_and_go_each_hour_change_no_label_of_a_lasting_pod() -> None:
    lasting = [Pod(f"lasting-{number}") for number in range(6)]
    day = Day(lasting)
    for number in range(int(DAY_S / CYCLE_S)):
        minute = number * CYCLE_S % 3600.0 / 60.0
        if minute == 0.0:
            day.late = [Pod(f"spot-{number}-{each}") for each in range(4)]
            for pod in day.late:
                pod.start = day.clock.wall() + CYCLE_S
        if minute == 20.0:
            day.late = []
        day.cycle_once()
    for pod in lasting:
        assert [stage for _, stage in pod.changes] == ["candidate", "underused"]
        assert when(pod, "underused") < 2.1
