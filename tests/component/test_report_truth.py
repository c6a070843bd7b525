"""`gpu-exporter report` about a simulated cluster in real servers: its hours and money are those of the truth.

The cluster (history_worlds.small) has gaps, counters that restart, targets that move or report a GPU twice, replaced pods,
noise, bursts, MIG instances and time-sliced GPUs. Each source tells a part of it, and never more than it knows.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.testbed.history import HOUR, Cluster, Gap, Holder, Hours, Phase, Target, bursts
from tests.testbed.history_series import Dcgm, dcgm, jobstats, kube_state, nvidia_smi, without_profiling
from tests.testbed.history_servers import Line, VictoriaMetrics, prometheus, write_blocks
from tests.testbed.history_worlds import A100, DAY, H100, L4, small
from tests.testbed.processes import Processes, run_exporter

pytestmark = pytest.mark.servers
NODES = ("gpu-00", "gpu-01", "gpu-02", "gpu-03", "gpu-14", "gpu-19", "l4-0", "mig-0", "sliced-0")
UNTIL = "2025-06-02T00:00Z"
PRICES = {H100: 4.0, A100: 2.0, L4: 1.0}
EXACT = 0.02
SCRAPE, BLOCK, MINUTES_5 = 30 / 3600, 120 / 3600, 300 / 3600  # hours
FALSE = 0.02  # share of confirmed idle hours that a holder may have that is never idle
Series = Callable[[Cluster], Iterable[Iterable[Line]]]
Report = Mapping[str, Any]


def make_cluster(*, name: str = "", jobs: bool = False, days: float = 2) -> Cluster:
    """Nine nodes of small(), and what happens in small() only on later days."""
    cluster = small(days=days, name=name, jobs=jobs)
    for unit in [unit for unit in cluster.holds if unit.node not in NODES]:
        del cluster.holds[unit]
    for node in [node for node in cluster.nodes if node not in NODES]:
        del cluster.nodes[node]
    start = cluster.start
    for each in cluster.nodes.values():  # the server itself restarted
        each.gaps.append(Gap(start + 17 * HOUR, start + 17.2 * HOUR, failed=False))
    moved = start + 11.3 * HOUR
    cluster.nodes["gpu-02"].targets[:] = [Target("10.9.9.1:9400", end=moved), Target("10.9.9.2:9400", start=moved)]
    cluster.nodes["gpu-03"].resets[:] = [start + 13 * HOUR]
    cluster.nodes["gpu-14"].gaps.append(Gap(start + 6.4 * HOUR, start + 9.1 * HOUR))
    for number, unit in enumerate(cluster.nodes["gpu-19"].units):  # short work in bursts: an edge is a large part of it
        for turn in range(4):
            name = f"{9000 + 10 * number + turn}"
            holder = Holder(name, user="u1") if jobs else Holder(f"bursts-{name}", "ml")
            cluster.hold(holder, [unit], start + (2 + 3 * turn) * HOUR + 97 * number, bursts(20 * 60.0))
    return cluster


class Life(NamedTuple):
    """A holder in the truth. `turns`: its starts, ends and changes, once for each of its `units`."""

    hours: Hours
    turns: int
    units: int
    is_never_idle: bool

    @property
    def is_seen(self) -> bool:
        """Whether it has two scrapes for sure."""
        return self.hours.held - self.hours.unseen > 3 * SCRAPE


def lives(cluster: Cluster, without: Iterable[str] = ()) -> dict[tuple[str, str], Life]:
    """By cluster and title, of the period. `without`: nodes."""
    kept = {title(hold.holder.namespace, hold.holder.name) for hold in holds(cluster) if hold.unit.node not in without}
    found: dict[tuple[str, str], Hours] = defaultdict(Hours)
    truth = cluster.truth()
    for key in truth.holders:
        for part, hours in vars(truth.total(key)).items():
            mine = found[key.cluster, title(key.namespace, key.name)]
            setattr(mine, part, getattr(mine, part) + hours)
    turns: dict[str, int] = defaultdict(int)
    units: dict[str, int] = defaultdict(int)
    is_never: dict[str, bool] = defaultdict(lambda: True)
    for hold in holds(cluster):
        name = title(hold.holder.namespace, hold.holder.name)
        turns[name] += len(hold.phases) + 1
        units[name] += 1
        is_never[name] &= all(phase.mean > 0.0 for phase in _within(cluster, hold.start, hold.phases))
    return {
        key: Life(hours, turns[key[1]], units[key[1]], is_never[key[1]])
        for key, hours in found.items()
        if key[1] in kept
    }


def holds(cluster: Cluster) -> Iterator[Any]:
    for each in cluster.holds.values():
        yield from each


def _within(cluster: Cluster, start: float, phases: Iterable[Phase]) -> Iterator[Phase]:
    """The phases in the period."""
    for phase in phases:
        if start < cluster.end and start + phase.seconds > cluster.start:
            yield phase
        start += phase.seconds


def title(namespace: str, name: str) -> str:
    return f"{namespace}/{name}" if namespace else f"job {name}"


def ask(url: str, *flags: str, days: float = 2, form: str = "json") -> str:
    """Runs the command."""
    prices = [f"--price={model}={price}" for model, price in PRICES.items()]
    done = run_exporter(
        "report", f"--source.prometheus={url}", f"--since={days * 24:.0f}h", f"--until={UNTIL}", f"--format={form}",
        "--no-trend", "--rest=0", *prices, *flags,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def report_of(directory: Path, cluster: Cluster, series: Series, *flags: str, days: float = 2) -> Report:
    """The report of a Prometheus with these series."""
    write_blocks(directory, *series(cluster))
    with Processes(directory) as processes:
        found: Report = json.loads(ask(prometheus(processes, directory).url, *flags, days=days))
        return found


def holders(report: Report) -> dict[tuple[str, str], Mapping[str, float]]:
    return {
        (each["cluster"], each["holder"]): {name: each[name] or 0.0 for name in FIGURES} for each in report["holders"]
    }


FIGURES = ("cost", *(f"{part}_hours" for part in ("held", "used", "low", "idle", "unproven", "unknown")))


def check_sums(report: Report) -> None:
    """The parts add up to the hours held, everywhere; and idle hours need a witness of more than moments."""
    for row in (report["total"], *report["groups"], *report["holders"]):
        parts = sum(row[f"{part}_hours"] or 0.0 for part in ("used", "low", "idle", "unproven", "unknown"))
        assert parts == pytest.approx(row["held_hours"], abs=1e-6)
    for each in report["capacity"]:
        assert each["held_hours"] + each["free_hours"] <= each["present_hours"] * (1 + 1e-9)
    in_use = sum(each["present_hours"] - each["held_hours"] - each["free_hours"] for each in report["capacity"])
    told = next(
        (line for line in report["left_out"] if line.endswith("without a pod or job, in use or unknown")), "0.0"
    )
    assert float(told.split()[0].replace(",", "")) >= in_use - 0.06  # more, if it may be that of pods
    assert sum(each["held_hours"] for each in report["groups"]) == pytest.approx(report["total"]["held_hours"])
    assert sum(each["held_hours"] or 0.0 for each in report["hours"]) == pytest.approx(report["total"]["held_hours"])
    capacity = sum(each["held_hours"] for each in report["capacity"])  # without gaps, in which no unit is seen
    held, unknown = report["total"]["held_hours"], report["total"]["unknown_hours"]
    assert (held - unknown) * (1 - EXACT) <= capacity <= held * (1 + EXACT)


def check_holders(
    report: Report,
    truth: Mapping[tuple[str, str], Life],
    *,
    has_use: bool = True,
    gap: float = 0.0,
    edge: float = SCRAPE,
) -> None:
    """Every holder has its hours, and is in the right column. `gap`: share of the unseen hours that may be reported.
    `edge`: hours that may be missing or too many at each turn.
    """
    found = holders(report)
    for key, life in truth.items():
        if not life.is_seen:
            continue
        row, hours = found[key], life.hours
        seen, least = hours.held - hours.unseen, life.turns * edge
        assert seen * (1 - EXACT) - least <= row["held_hours"] <= seen * (1 + EXACT) + least + gap * hours.unseen, key
        if has_use:
            turn = life.turns * 2 * BLOCK + (life.units + hours.unseen if hours.unseen else 0.0)
            zero = row["idle_hours"] + row["unproven_hours"]
            # An hour that the samples do not cover whole is to be investigated, also between bursts.
            most = turn + EXACT * hours.held + life.units
            assert hours.idle - EXACT * hours.held - turn <= zero <= hours.idle + most, key
            assert row["idle_hours"] <= hours.idle + EXACT * hours.held + turn, key
            work, true = row["used_hours"] + row["low_hours"], hours.used + hours.low
            assert true - most <= work <= true + EXACT * hours.held + turn, key


def check_free(capacity: Mapping[str, float], truth: float) -> None:
    """Within 2 %, and 1 % of the capacity: in the minute in which a holder ends, a GPU is neither held nor at zero."""
    assert capacity["free_hours"] == pytest.approx(truth, rel=EXACT, abs=0.01 * capacity["present_hours"]), capacity


def check_never_idle(report: Report, truth: Mapping[tuple[str, str], Life]) -> None:
    """No holder that always works has confirmed idle hours."""
    found = holders(report)
    workers = [key for key, life in truth.items() if life.is_never_idle and key in found]
    assert len(workers) > 20
    wrong = {key: found[key] for key in workers if found[key]["idle_hours"] > FALSE * found[key]["held_hours"]}
    assert not wrong


class Expected(NamedTuple):
    """GPU-hours of the truth: `held` with the hours of gaps, `seen` without; `work`: used and low."""

    held: float
    seen: float
    work: float
    idle: float
    money: float
    free: Mapping[str, float]


def expected(cluster: Cluster) -> Expected:
    truth = cluster.truth()
    total = truth.total()
    money = truth.money(PRICES) - truth.money(PRICES, "unseen")
    return Expected(total.held, total.held - total.unseen, total.used + total.low, total.idle, money, truth.free)


def with_pods(how: Dcgm) -> Series:
    return lambda cluster: (dcgm(cluster, how), kube_state(cluster))


def figures(report: Report) -> Mapping[str, float]:
    return {name: report["total"][name] or 0.0 for name in FIGURES}


def test_dcgm_exporter_with_pod_labels_and_kube_state_metrics(tmp_path: Path) -> None:
    cluster = make_cluster()
    truth, hours = lives(cluster, without=["sliced-0"]), expected(cluster)
    write_blocks(tmp_path, *with_pods(Dcgm())(cluster))
    with Processes(tmp_path) as processes:
        url = prometheus(processes, tmp_path).url
        keep = f"--keep={tmp_path / 'kept'}"
        text = ask(url, keep)
        assert text == ask(url)  # whether answers are kept or not
        assert ask(url, keep, form="text") == ask(url, keep, form="text")
        coarse = json.loads(ask(url, keep, "--floor=0.01"))
    report = json.loads(text)
    check_sums(report)
    check_holders(report, truth, gap=1.0)
    check_never_idle(report, lives(cluster))
    found = figures(report)
    assert found["held_hours"] == pytest.approx(hours.held, rel=EXACT)
    assert found["unknown_hours"] <= hours.held - hours.seen + cluster_hours(cluster, "sliced-0")
    assert found["cost"] == pytest.approx(cluster.truth().money(PRICES), rel=EXACT)
    for each in report["capacity"]:
        check_free(each, hours.free[each["model"]])
    # Noise up to 0.008 is to be investigated at the floor 0.001, and idle at 0.01.
    noisy = noisy_hours(cluster)
    assert noisy > 20
    assert found["unproven_hours"] == pytest.approx(noisy, rel=0.1)
    assert figures(coarse)["idle_hours"] == pytest.approx(found["idle_hours"] + noisy, rel=0.05)
    assert figures(coarse)["unproven_hours"] < 0.25 * found["unproven_hours"]  # hours that samples do not cover whole
    check_never_idle(coarse, lives(cluster))
    # A gap is neither idle nor free; it has its own account.
    unseen = sum(cluster.truth().free_unseen.values()) + hours.held - hours.seen
    gaps = next(line for line in report["left_out"] if "between the first and the last sample" in line)
    assert float(gaps.split()[0]) == pytest.approx(unseen, rel=0.05)
    assert any("while no exporter showed their GPUs" in line for line in report["missing"])


def cluster_hours(cluster: Cluster, node: str) -> float:
    return len(cluster.nodes[node].units) * (cluster.end - cluster.start) / HOUR


def noisy_hours(cluster: Cluster) -> float:
    total = 0.0
    for hold in holds(cluster):
        at = hold.start
        for phase in hold.phases:
            inside = min(cluster.end, at + phase.seconds) - max(cluster.start, at)
            total += max(0.0, inside) * bool(phase.noise) * hold.unit.share / HOUR
            at += phase.seconds
    return total


@pytest.mark.parametrize(
    ("series", "jobs", "has_slices"),
    [
        (lambda cluster: [dcgm(cluster, Dcgm(holders="honoured", host="hostname"))], False, False),
        (lambda cluster: [dcgm(cluster, Dcgm(holders="honoured", copies=True))], False, True),
        (lambda cluster: [dcgm(cluster, Dcgm(holders="hpc_job"))], True, True),
    ],
    ids=["honor_labels", "copies", "hpc_job"],
)
def test_dcgm_exporter_alone(series: Series, jobs: bool, has_slices: bool, tmp_path: Path) -> None:
    """Without kube-state-metrics. Only a series per holder shows the holders of a shared GPU."""
    cluster = make_cluster(jobs=jobs)
    hours = expected(cluster)
    report = report_of(tmp_path, cluster, series)
    check_sums(report)
    check_holders(report, lives(cluster, without=["sliced-0"]))
    check_never_idle(report, lives(cluster))
    found = figures(report)
    assert found["held_hours"] == pytest.approx(hours.seen, rel=EXACT)
    assert found["cost"] == pytest.approx(hours.money, rel=EXACT)
    zero, work = found["idle_hours"] + found["unproven_hours"], found["used_hours"] + found["low_hours"]
    alone = sum(life.hours.idle for life in lives(cluster, without=["sliced-0"]).values())
    least = hours.idle if has_slices else alone  # a pod that shares a GPU may be idle while that GPU works
    assert zero + found["unknown_hours"] >= least * (1 - EXACT)
    assert zero <= hours.idle * (1 + EXACT)
    assert work + found["unknown_hours"] >= hours.work * (1 - EXACT)
    for each in report["capacity"]:
        check_free(each, hours.free[each["model"]])
    if has_slices:  # four pods on one GPU have a quarter each
        shared = {key: life for key, life in lives(cluster).items() if key not in lives(cluster, without=["sliced-0"])}
        assert len(shared) == 20
        check_holders(report, shared, has_use=False)


@pytest.mark.parametrize(
    ("series", "jobs", "has_holders"),
    [
        (lambda cluster: (dcgm(cluster, without_profiling()), kube_state(cluster)), False, True),
        (lambda cluster: [jobstats(cluster)], True, True),
        (lambda cluster: (nvidia_smi(cluster), kube_state(cluster)), False, False),
    ],
    ids=["dcgm-without-profiling", "jobstats", "nvidia_gpu_exporter"],
)
def test_gauges_alone_confirm_no_idle_hours(series: Series, jobs: bool, has_holders: bool, tmp_path: Path) -> None:
    """Zeros at all samples are to be investigated, with their money there only. MIG instances have no utilization."""
    cluster = make_cluster(jobs=jobs)
    truth = lives(cluster, without=["sliced-0", "mig-0"])
    report = report_of(tmp_path, cluster, series)
    check_sums(report)
    check_holders(report, truth, has_use=False, gap=1.0, edge=SCRAPE if has_holders else MINUTES_5)
    total = report["total"]
    assert total["idle_hours"] == total["cost_idle"] == 0.0
    assert all(each["idle_hours"] == 0.0 for each in report["holders"])
    assert total["unproven_hours"] > 0.0 and total["cost_unproven"] > 0.0
    assert not report["floors"]
    source = next(each for each in report["sources"] if "kube" not in each["name"])
    assert "to be investigated" in str(source["cannot"])
    assert "MIG instances" in str(source["cannot"])
    if has_holders:  # bursts are zero at samples, so there is more than idle time, never less
        found = holders(report)
        for key, life in truth.items():
            if life.is_seen:
                rest = 2 * BLOCK * life.turns + EXACT * life.hours.held
                assert found[key]["unproven_hours"] >= life.hours.idle - rest, key
                assert found[key]["used_hours"] + found[key]["low_hours"] >= life.hours.used - rest, key


def test_dcgm_exporter_without_pod_labels(tmp_path: Path) -> None:
    """The requests tell who holds GPUs of a node, but not which; so a part of the hours is unknown, never idle."""
    cluster = make_cluster()
    truth = lives(cluster, without=["sliced-0", "mig-0"])
    report = report_of(tmp_path, cluster, with_pods(Dcgm(holders="")))
    check_sums(report)
    check_holders(report, truth, has_use=False, gap=1.0, edge=MINUTES_5)
    check_never_idle(report, truth)
    found = holders(report)
    for key, life in truth.items():
        if life.is_seen:
            assert found[key]["idle_hours"] <= life.hours.idle + 2 * BLOCK * life.turns + EXACT * life.hours.held, key
    assert figures(report)["unknown_hours"] > 0.0
    assert figures(report)["idle_hours"] > 0.0


SERVERS: Mapping[str, Callable[[Processes, Path, list[Iterable[Line]]], str]] = {
    "2.42": lambda processes, directory, series: of_blocks(processes, directory, series, "prometheus"),
    "3": lambda processes, directory, series: of_blocks(processes, directory, series, "prometheus-3"),
    "victoria-metrics": lambda processes, directory, series: VictoriaMetrics(processes, directory, *series).url,
}


def of_blocks(processes: Processes, directory: Path, series: list[Iterable[Line]], program: str) -> str:
    write_blocks(directory, *series)
    return prometheus(processes, directory, program).url


@pytest.mark.parametrize("server", SERVERS)
def test_two_clusters_with_the_same_names_in_every_server(server: str, tmp_path: Path) -> None:
    """East and west have the same nodes and pods; the server has forgotten the first hours of west."""
    clusters = [make_cluster(name=name, days=1) for name in ("east", "west")]
    clusters[1].retained_from = clusters[1].start + 7 * HOUR
    for each in clusters:
        for node in ("gpu-01", "gpu-02", "gpu-03", "mig-0"):
            for unit in each.nodes.pop(node).units:
                each.holds.pop(unit, None)
    series = [part for each in clusters for part in with_pods(Dcgm(holders="honoured", copies=True))(each)]
    with Processes(tmp_path) as processes:
        report = json.loads(ask(SERVERS[server](processes, tmp_path, series), days=1))
    check_sums(report)
    for each in clusters:
        check_holders(report, lives(each, without=["sliced-0"]), gap=1.0)
    for each in report["capacity"]:
        cluster = clusters[each["cluster"] == "west"]
        check_free(each, expected(cluster).free[each["model"]])


def test_a_retention_shorter_than_the_period_is_told(tmp_path: Path) -> None:
    cluster = make_cluster(days=1)
    cluster.retained_from = cluster.start + 7 * HOUR
    report = report_of(
        tmp_path, cluster, lambda cluster: [dcgm(cluster, Dcgm(holders="honoured", copies=True))], days=2
    )
    check_sums(report)
    check_holders(report, lives(cluster, without=["sliced-0"]))
    assert figures(report)["held_hours"] == pytest.approx(expected(cluster).seen, rel=EXACT)
    assert report["seen"] == {
        "seconds": 17 * HOUR,
        "period_seconds": 48 * HOUR,
        "since": "2025-06-01T07:00:00+00:00",
        "failed_scrapes_ratio": None,
    }
    assert any("the time before 2025-06-01" in line for line in report["left_out"])
    first = [each["held_hours"] for each in report["hours"][:31]]
    assert first == [None] * 31


def test_counts_of_the_world() -> None:
    """What the tests above are about is in the cluster."""
    cluster = make_cluster()
    kinds = {(phase.part, bool(phase.noise), bool(phase.burst_s)) for hold in holds(cluster) for phase in hold.phases}
    assert {("idle", False, False), ("idle", True, False), ("low", False, True), ("used", False, False)} <= kinds
    assert cluster_hours(cluster, "gpu-00") == 2 * DAY / HOUR * 8
