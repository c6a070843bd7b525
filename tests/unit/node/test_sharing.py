"""A whole node with shared GPUs: a working holder is never idle, for any work of the others and any report of the
driver.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from tests.testbed.simulated_node import SimulatedNode

from gpu_exporter.agent.attribution.processes import OwnedPeriod, ProcessOwners
from gpu_exporter.agent.devices import loads
from gpu_exporter.agent.devices.protocol import ProcessUtilization
from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.node.sharing import NO_SOURCE, OTHERS, REST
from gpu_exporter.common.cgroup import ProcessOwner
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.model.holders import Grant, Holder, HolderKey
from gpu_exporter.common.model.readings import ProcessPeriod
from gpu_exporter.common.model.views import AllocationView

SEEDS = 40
STRANGER, GONE = 900, 901  # a process without a holder, and a process that cannot be looked up


class Owners(ProcessOwners):
    """Pid N is a process of job N."""

    def __init__(self) -> None:
        super().__init__(Path("/nonexistent"), ManualClock())

    def own(self, period: ProcessPeriod) -> OwnedPeriod:
        return OwnedPeriod(
            period.start, period.end, tuple((_owner(each.pid), each.ratio) for each in period.shares), period.problem
        )


def _owner(pid: int) -> ProcessOwner | None:
    return None if pid == GONE else ProcessOwner() if pid == STRANGER else ProcessOwner(slurm=True, job=str(pid))


Works = Mapping[int, Sequence[tuple[float, float]]]
"""By pid: (from, share) of its time, seconds since the start."""


class Tellers:
    """The driver's report about processes that do `works`: the mean of each process since the last question."""

    def __init__(self, node: SimulatedNode, works: Works, hidden: frozenset[int] = frozenset()) -> None:
        self._curves = {pid: loads.Curve(_steps(points)) for pid, points in works.items() if pid not in hidden}
        self._node, self._start = node, node.clock.wall()
        device = node.samplers[0].device
        device.read_process_utilization = self.tell  # type: ignore[method-assign]

    def tell(self, since_wall: float) -> Sequence[ProcessUtilization]:
        """The report over whole samples, which are those of the utilization ring."""
        period_s = self._node.sample_period_s
        since = period_s * round((since_wall - self._start) / period_s)
        now = period_s * int((self._node.clock.wall() - self._start) / period_s + 1e-9)
        means = {pid: loads.mean(curve, max(0.0, since), now) for pid, curve in self._curves.items()}
        return [
            ProcessUtilization(pid, self._start + now, int(100 * mean) / 100, is_active=True)
            for pid, mean in means.items()
            if mean > 1e-9
        ]


def _steps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A curve that changes in steps."""
    out = [(0.0, points[0][1])]
    for (_, before), (at, after) in pairwise(points):
        out += [(at, before), (at, after)]
    return out


def _sum_of(works: Works) -> list[tuple[float, float]]:
    """The work of the whole GPU: its processes take turns."""
    times = sorted({at for points in works.values() for at, _ in points})
    return _steps([(at, sum(_at(points, at) for points in works.values())) for at in times])


def _at(points: Sequence[tuple[float, float]], at: float) -> float:
    return [share for begin, share in points if begin <= at][-1]


MakeNode = Callable[..., SimulatedNode]


def make(
    works: Works,
    holders: Sequence[int],
    hidden: frozenset[int] = frozenset(),
    mig: bool = False,
    period_s: float = 0.2,
    **more: object,
) -> SimulatedNode:
    """One GPU that these jobs share, with processes that do `works`."""
    curve = {"kind": "curve", "points": [list(point) for point in _sum_of(works)]} if works else None
    gpu = {"model": "H100", **({"load": curve} if curve else {}), **more}
    if mig:
        gpu = {"model": "H100", "mig": [{"profile": "1g.10gb", "gi": 7, "load": curve}]}
    held = [{"gpu": 0, "kind": "job", "name": str(job), **({"mig": 0} if mig else {})} for job in holders]
    node = SimulatedNode(parse_scenario({"gpus": [gpu], "holders": held}), sample_period_s=period_s, processes=Owners())
    Tellers(node, works, hidden)
    return node


def by_job(node: SimulatedNode, seconds: float) -> dict[int, AllocationView]:
    return {int(view.allocation.holder.job_id): view for view in node.run(seconds).allocations}


ALWAYS = ((0.0, 0.4),)


def test_sharers_are_judged_like_holders_of_whole_gpus() -> None:
    seen = by_job(make({1: ALWAYS, 2: ((0.0, 0.2),)}, (1, 2, 3)), 900)
    assert [(seen[job].verdict.state, seen[job].utilization) for job in (1, 2, 3)] == [
        ("healthy", pytest.approx(0.4, abs=0.011)),  # more than its third
        ("healthy", pytest.approx(0.2, abs=0.011)),
        ("held_idle", 0.0),
    ]
    assert seen[3].totals.idle_run_s == pytest.approx(895, abs=10)
    # Three may have a third each: 0.12 of the GPU is low.
    assert by_job(make({1: ALWAYS, 2: ((0.0, 0.12),)}, (1, 2, 3)), 900)[2].verdict.state == "low"


@pytest.mark.parametrize("begin", [0, 400])
def test_without_the_drivers_ring_sharers_are_judged_by_its_rates(begin: float) -> None:
    """The ring never existed, or disappears after a while."""
    ring = [{"at": begin, "call": "nvmlDeviceGetSamples", "error": "NVML_ERROR_NOT_SUPPORTED"}]
    seen = by_job(make({1: ALWAYS, 2: ((0.0, 0.2),)}, (1, 2, 3), faults=ring), 1500)
    assert [seen[job].verdict.state for job in (1, 2, 3)] == ["healthy", "healthy", "held_idle"]
    assert seen[3].totals.idle_s == pytest.approx(1495, rel=0.05)


@pytest.mark.parametrize(("model", "period_s"), [("T4", 0.2), ("T4", 0.7), ("A100", 0.2), ("A100", 0.9), ("H100", 0.2)])
def test_an_idle_holder_is_detected_beside_a_neighbour_that_works_now_and_then(model: str, period_s: float) -> None:
    now_and_then = [(float(at), 0.9 * (number % 2)) for number, at in enumerate(range(0, 1200, 13))]
    idle = by_job(make({1: now_and_then}, (1, 2), period_s=period_s, model=model), 900)[2]
    assert idle.verdict.state == "held_idle"
    assert idle.totals.idle_run_s == pytest.approx(895, rel=0.08)


@pytest.mark.parametrize("hidden", [frozenset({1}), frozenset[int]()])
def test_a_sharer_that_works_a_little_is_never_idle_if_processes_are_not_visible(hidden: frozenset[int]) -> None:
    """Four seconds every minute are less than the unknown time that an idle run may bridge."""
    now_and_then = [
        (0.0, 0.0),
        *((at, share) for begin in range(57, 1200, 60) for at, share in ((float(begin), 1.0), (begin + 4.0, 0.0))),
    ]
    node = make({1: now_and_then}, (1, 2), hidden)
    if not hidden:
        node.state._processes = None  # as without hostPID
    for _ in range(20):
        for view in by_job(node, 60).values():
            assert (view.totals.idle_run_s or 0.0) < 65
            assert view.verdict.state == "unknown"


def test_a_shared_gpu_at_rest_is_idle_for_each_holder() -> None:
    seen = by_job(make({}, (1, 2)), 900)
    assert {view.verdict.state for view in seen.values()} == {"held_idle"}


@pytest.mark.parametrize(
    ("works", "hidden", "reason"),
    [
        ({1: ALWAYS, STRANGER: ((0.0, 0.1),)}, frozenset(), OTHERS),
        ({1: ALWAYS, GONE: ((0.0, 0.1),)}, frozenset(), OTHERS),
        ({1: ALWAYS, 77: ((0.0, 0.2),)}, frozenset({77}), REST),
    ],
)
def test_no_holder_is_idle_while_an_unknown_process_works(works: Works, hidden: frozenset[int], reason: str) -> None:
    seen = by_job(make(works, (1, 2), hidden), 900)
    assert seen[2].verdict == ("unknown", reason)
    assert (seen[2].totals.idle_run_s or 0.0, seen[2].utilization) == (0.0, None)
    if reason == OTHERS:
        assert seen[1].totals.busy_s == pytest.approx(0.4 * 895, rel=0.03)
    else:  # the list may contain only a fraction of its work
        assert (seen[1].totals.busy_s, seen[1].verdict) == (0.0, ("unknown", reason))


@pytest.mark.parametrize("told", [0.0, 0.01, 0.05, 0.2])
def test_shares_that_explain_too_little_prove_nothing_about_any_holder(told: float) -> None:
    """Two jobs keep a GPU at 100 %, and the driver reports a fraction of it: HAMi#2015, nvtop#177."""
    node = make({1: ((0.0, 0.5),), 2: ((0.0, 0.5),)}, (1, 2))
    device, start = node.samplers[0].device, node.clock.wall()

    def tell(since: float) -> list[ProcessUtilization]:
        now = start + node.sample_period_s * int((node.clock.wall() - start) / node.sample_period_s + 1e-9)
        return [ProcessUtilization(pid, now, told, is_active=True) for pid in (1, 2)]

    device.read_process_utilization = tell  # type: ignore[method-assign]
    for view in by_job(node, 900).values():
        assert view.verdict == ("unknown", REST)
        assert (view.utilization, view.totals.low_s, view.totals.busy_s, view.totals.idle_run_s or 0.0) == (
            None,
            0,
            0,
            0,
        )


def test_a_process_that_is_listed_with_zeros_is_not_idle() -> None:
    """The driver lists only working processes, so this process is unknown; its neighbour explains all work of the GPU."""
    node = make({1: ALWAYS}, (1, 2, 3))
    device, tell = node.samplers[0].device, node.samplers[0].device.read_process_utilization

    def tell_more(since: float) -> list[ProcessUtilization]:
        told = list(tell(since))
        return [*told, *(ProcessUtilization(2, each.wall, 0.0, is_active=False) for each in told)]

    device.read_process_utilization = tell_more  # type: ignore[method-assign]
    seen = by_job(node, 900)
    assert (seen[2].verdict.state, seen[2].totals.idle_run_s or 0.0, seen[2].totals.idle_s) == ("unknown", 0.0, 0.0)
    assert (seen[1].verdict.state, seen[3].verdict.state) == ("healthy", "held_idle")


def test_a_job_that_holds_a_gpu_alone_is_charged_for_all_its_work() -> None:
    """A container that the job has started is not a process of its cgroup."""
    node = make({STRANGER: ((0.0, 0.3),)}, (1,))
    seen = by_job(node, 900)
    assert (seen[1].verdict.state, seen[1].totals.idle_s) == ("low", 0.0)
    assert seen[1].totals.busy_s == pytest.approx(0.3 * 895, rel=0.03)


def test_per_holder_usage_is_unavailable_on_a_shared_mig_instance() -> None:
    node = make({1: ALWAYS}, (1, 2), mig=True)
    seen = by_job(node, 900)
    assert not node.state.is_shared(node.unit(0).uuid)  # this would cost a call that NVML does not support there
    assert {view.verdict for view in seen.values()} == {("unknown", NO_SOURCE)}
    assert {view.totals.busy_s for view in seen.values()} == {0.0}


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_holder_is_idle_while_it_works(seed: int) -> None:
    """Random jobs that work now and then: some are unknown, some are left out by the driver."""
    dice = random.Random(seed)
    holders = tuple(range(1, dice.randint(3, 6)))
    pids = [*holders, *dice.sample((STRANGER, GONE, 77), dice.randint(0, 2))]
    works = {pid: _random_work(dice, len(pids)) for pid in pids}
    hidden = frozenset({77}) if dice.random() < 0.7 else frozenset()
    node = make(works, holders, hidden)
    for _ in range(20):
        views = by_job(node, 30)
        now = node.clock.wall() - node.samplers[0].device._stage.to_wall(0.0)  # type: ignore[attr-defined]
        for job, view in views.items():
            last = _last_work(works[job], now)
            # Readings wait for the next poll, and a period has the borders of the driver's samples.
            assert (view.totals.idle_run_s or 0.0) <= now - last + 1.0, (job, works[job])
            true_idle = now - loads_time(works[job], now)
            assert view.totals.idle_s <= true_idle + 1.0
            true_busy = loads.Curve(_steps(works[job])).integral(now)
            assert view.totals.busy_s <= true_busy * 1.05 + 3.0


def _random_work(dice: random.Random, number: int) -> list[tuple[float, float]]:
    points = [(0.0, 0.0)]
    at = 0.0
    while at < 600:
        at += dice.choice((1.0, 2.5, 7.0, 40.0, 150.0))
        points.append((at, dice.choice((0.0, 0.0, 0.02, 0.5, 1.0)) / number))
    return points


def _last_work(points: Sequence[tuple[float, float]], now: float) -> float:
    """When the process last worked, 0 if never."""
    ends = [*(at for at, _ in points[1:]), 1e9]
    return max(
        (min(now, end) for (at, share), end in zip(points, ends, strict=True) if share and at < now), default=0.0
    )


def loads_time(points: Sequence[tuple[float, float]], now: float) -> float:
    """Seconds of work until now."""
    ends = [*(at for at, _ in points[1:]), 1e9]
    return sum(max(0.0, min(now, end) - at) for (at, share), end in zip(points, ends, strict=True) if share)


class Hosts(Owners):
    """A host on which only this pod has processes."""

    def list_pods(self) -> set[str]:
        return {NEXT}


DONE, NEXT = (f"2c9f8a79-5391-454b-88cb-86190881cb9{number}" for number in (0, 1))


def test_an_ended_pod_does_not_share_its_gpu() -> None:
    node = SimulatedNode(parse_scenario({"gpus": [{"model": "H100"}]}), processes=Hosts())
    node.run(5)
    shares: list[list[tuple[str, str]]] = []
    for _ in range(3):
        node.clock.advance(61)
        node.sample()
        grants = [
            Grant(
                "uuid",
                node.unit(0).uuid,
                Holder(HolderKey("kubernetes", f"{uid}/main"), "ml", pod, "main", pod_uid=uid, source="kubelet"),
                working_wall=node.clock.wall() - 100.0,
                confirmed=node.clock.monotonic(),
            )
            for uid, pod in ((DONE, "done-0"), (NEXT, "next-0"))
        ]
        node.state.on_poll(grants, node.placed())
        held = [view.allocation for view in node.view().allocations]
        shares.append([(each.holder.pod, each.share) for each in held])
    assert shares[0] == [("done-0", "time_slice"), ("next-0", "time_slice")]
    assert shares[2] == [("next-0", "none")]
