"""`gpu-exporter backtest` on histories whose truth is known, in a real Prometheus."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from gpu_exporter.cli.commands import COMMANDS
from gpu_exporter.common.address import parse_address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Alerts, Policy
from gpu_exporter.common.exits import Exit
from gpu_exporter.common.fetch import fetch_text
from gpu_exporter.reconciler.decision.policy import LABELLED, decide
from gpu_exporter.reconciler.decision.rulebook import Rulebook
from gpu_exporter.reconciler.decision.settle import settle
from gpu_exporter.reconciler.evidence.promql import PromQLOptions, PromQLSource
from gpu_exporter.reconciler.evidence.records import HolderName
from gpu_exporter.reports.backtest.gather import read_gangs
from gpu_exporter.reports.backtest.lives import PastGang
from gpu_exporter.reports.backtest.replay import Replayed, Replayer
from gpu_exporter.reports.backtest.run import LEAD_S
from gpu_exporter.reports.backtest.sums import Figures, Sums, Tally
from gpu_exporter.reports.history.asking import History, WindowSpan
from gpu_exporter.reports.usage.run import Progress
from gpu_exporter.reports.usage.site import find_site
from tests.testbed.history import HOUR, Cluster, Gap, Holder, Phase, idle, used
from tests.testbed.history_lives import true_gangs
from tests.testbed.history_own import own
from tests.testbed.history_series import Dcgm, dcgm, jobstats, kube_state, without_profiling
from tests.testbed.history_servers import Line, prometheus, write_blocks
from tests.testbed.history_worlds import END
from tests.testbed.processes import Processes

pytestmark = pytest.mark.servers
HOURS = 42.0
START = END - HOURS * HOUR
UNTIL = "2025-06-02T00:00Z"
EXACT = 0.02  # of the regret
NEAR_S = 300.0  # a block at each edge of an idle run, and a scrape
BOOK = Rulebook(Policy())


def world(name: str, *, jobs: bool = False) -> Cluster:
    """40 GPUs whose holders are often idle. Some work again, some end, some are preempted, one node is lost."""
    cluster = Cluster(START - LEAD_S, END, name)
    chance = Random(62)
    for number in range(8):
        node = cluster.node(f"n{number}")
        for unit in node.units:
            at, turn = cluster.start, 0
            while at < cluster.end:
                phases = [used(chance.uniform(0.6, 1.5) * HOUR)]
                for _ in range(chance.choice((1, 1, 2))):
                    phases += [idle(chance.uniform(1.0, 7.0) * HOUR), used(chance.uniform(0.2, 1.0) * HOUR)]
                if chance.random() < 0.5:
                    phases.append(idle(chance.uniform(1.0, 4.0) * HOUR))
                pod = f"{unit.node}-{unit.gpu}-{turn}"
                kind = chance.choice(("Job", "ReplicaSet", ""))
                owner = (kind, f"own-{pod}") if kind else ("", "")
                holder = (
                    Holder(f"{1000 * number + 100 * unit.gpu + turn}", user=f"u{unit.gpu}", account=f"a{number}")
                    if jobs
                    else Holder(pod, ("ml", "bio")[unit.gpu % 2], owner)
                )
                at = cluster.hold(holder, [unit], at, *phases, pending_s=60) + chance.uniform(60, 900)
                turn += 1
    nodes = cluster.nodes
    nodes["n1"].gaps.append(Gap(START + 20 * HOUR, START + 22 * HOUR))
    nodes["n2"].gaps += [Gap(START + n * HOUR, START + n * HOUR + 200.0) for n in range(3, 40, 6)]
    for node in nodes.values():
        node.gaps.append(Gap(START + 30 * HOUR, START + 30.2 * HOUR, failed=False))
    for turn in range(8):  # a lost node each: idle until it vanishes
        node = cluster.node(f"lost-{turn}", gpus=1)
        end = START + (8 + turn) * HOUR
        holder = (
            Holder(f"9{turn}", user="u0", account="lost")
            if jobs
            else Holder(f"lost-{turn}", "lost", ("Job", f"lost-{turn}"))
        )
        cluster.hold(holder, node.units, end - 4.2 * HOUR, used(1.5 * HOUR), idle(2.7 * HOUR))
        node.gaps.append(Gap(end, cluster.end))
    for unit in cluster.node("noisy", gpus=4).units:  # idle, with noise of the profiling counters
        holder = Holder(f"7{unit.gpu}", user="u2", account="noisy") if jobs else Holder(f"noisy-{unit.gpu}", "noisy")
        cluster.hold(holder, [unit], START, used(HOUR), Phase(6 * HOUR, noise=0.008))
    if not jobs:  # of two Jobs of a JobSet, one waits for the other; a notebook
        units = cluster.node("sets", gpus=3).units
        for unit, each, work in zip(units, "ab", (used(HOUR), used(9 * HOUR)), strict=False):
            member = Holder(f"set-{each}-0", "sets", ("Job", f"set-{each}"), above=("JobSet", "set"))
            cluster.hold(member, [unit], START, work, idle(10 * HOUR - work.seconds))
        notebook = Holder("nb-0", "sets", ("StatefulSet", "nb"), labels=(("label_notebook_name", "nb"),))
        cluster.hold(notebook, units[2:], START, used(HOUR), idle(2.5 * HOUR))
    spare = cluster.node("spare", gpus=8)
    for turn, unit in enumerate(spare.units):  # preempted while idle; its controller makes another pod
        at = START + (5 + turn) * HOUR
        first, second = (Holder(f"taken-{turn}-{n}", "taken", ("Job", f"taken-{turn}")) for n in "ab")
        if jobs:
            first = second = Holder(f"8{turn}", user="u1", account="taken")
        end = cluster.hold(first, [unit], at, used(HOUR), idle(2.4 * HOUR))
        cluster.hold(second, [unit], end + 600.0, used(2 * HOUR))
    return cluster


class Case(NamedTuple):
    """A source of series, and whether it proves its zeros."""

    series: Callable[[Cluster], Iterable[Iterable[Line]]]
    jobs: bool = False


CASES = {
    "own": Case(lambda made: [own(made), kube_state(made)]),
    "dcgm": Case(lambda made: [dcgm(made), kube_state(made)]),
    "hpc": Case(lambda made: [dcgm(made, Dcgm(holders="hpc_job"))], jobs=True),
    "jobstats": Case(lambda made: [jobstats(made)], jobs=True),
    "noprof": Case(lambda made: [dcgm(made, without_profiling()), kube_state(made)]),
}
PROVEN = ("own", "dcgm", "hpc")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("backtest")
    series = [each for name, case in CASES.items() for each in case.series(world(name, jobs=case.jobs))]
    write_blocks(directory, *series)
    with Processes(directory) as processes:
        yield prometheus(processes, directory).url


def read(url: str, name: str) -> list[PastGang]:
    """The gangs that the backtest sees."""
    progress, matcher = Progress("backtest"), f'cluster="{name}"'
    history = History(parse_address(url), fetch_text, progress=progress)
    span = WindowSpan(START - LEAD_S, END, HOUR)
    site = find_site(history, matcher, span)
    return read_gangs(history, matcher, Alerts().team_label, Policy(), site, span, progress)[0]


def tally(gangs: list[PastGang]) -> Tally:
    return Sums(gangs, START, lambda _model, _cluster: None).tally(BOOK, 1)


def key(each: Replayed) -> tuple[HolderName, ...]:
    return tuple(life.name for life in each.lives)


@pytest.mark.parametrize("name", PROVEN)
def test_the_regret_is_that_of_the_truth(url: str, name: str) -> None:
    """Also with gaps. Owners that return, preemptions and lost nodes are told apart, decision by decision."""
    gangs = {life.name: gang for gang in true_gangs(world(name, jobs=CASES[name].jobs)) for life in gang.lives}
    found, sums, true = tally(read(url, name)), Sums([], START, lambda _model, _cluster: None), Figures()
    judge, fates = Replayer(BOOK, 1), Counter[tuple[str, str]]()
    for each in found.decided:
        gang = gangs[each.lives[0].name]
        alive = [life for life in gang.lives if life.name in key(each) and life.start <= each.wall < life.end]
        same = judge.follow(gang, tuple(alive), each.wall, "")
        sums.add(true, same)
        fates[same.fate, each.fate] += 1
    assert true.known > 150 and true.fates["returned"] > 30
    assert found.total.regret == pytest.approx(true.regret, abs=EXACT)
    assert found.total.ever == pytest.approx(true.ever, abs=EXACT)
    assert found.total.hours == pytest.approx(true.hours, rel=0.08)
    right = {"later", "idle", "ended"}  # a gap may hide work after the hour
    wrong = {
        pair: number
        for pair, number in fates.items()
        if pair[0] != pair[1] and pair[1] not in ("unknown", "open") and not set(pair) <= right
    }
    assert sum(wrong.values()) <= EXACT * sum(fates.values()), wrong
    assert fates["lost", "lost"] == found.total.fates["lost"] == 8
    assert fates["taken", "taken"] == found.total.fates["taken"] == 8


@pytest.mark.parametrize("name", PROVEN)
def test_decisions_are_those_of_the_truth(url: str, name: str) -> None:
    """Except on the nodes with gaps, whose idle runs are shorter for the agent too."""

    def walls(decided: Iterable[Replayed]) -> set[tuple[HolderName, int]]:
        quiet = [each for each in decided if each.lives[0].tenures[0].node not in ("n1", "n2")]
        return {(each.lives[0].name, round(each.wall)) for each in quiet if not 29.5 < (each.wall - START) / HOUR < 36}

    true = walls(tally(true_gangs(world(name, jobs=CASES[name].jobs))).decided)
    found = walls(tally(read(url, name)).decided)
    missed = [one for one in true if not any(one[0] == two[0] and abs(one[1] - two[1]) < NEAR_S for two in found)]
    extra = [one for one in found if not any(one[0] == two[0] and abs(one[1] - two[1]) < NEAR_S for two in true)]
    assert len(true) > 150
    assert len(missed) <= EXACT * len(true), missed
    assert len(extra) <= EXACT * len(true), extra


@pytest.mark.parametrize("name", PROVEN)
def test_no_holder_at_work_is_decided_on(url: str, name: str) -> None:
    """In truth, each holder was idle for the whole window before its decision."""
    lives = {life.name: life for gang in true_gangs(world(name, jobs=CASES[name].jobs)) for life in gang.lives}
    found = tally(read(url, name)).decided
    assert found
    for each in found:
        for unit in lives[each.lives[0].name].tenures:
            if unit.start <= each.wall < unit.end:
                run = unit.run_at(each.wall - NEAR_S, 1)
                assert run is not None and each.wall - run.start >= BOOK.site.underused_after - NEAR_S


def test_the_live_dry_run_decides_alike(url: str) -> None:
    """The reconciler reads what Prometheus had at each of these times. Edges differ by a scrape, and where it had none."""
    gangs = read(url, "own")
    judge, address = Replayer(BOOK, 1), parse_address(url)
    wrong, marks = [], 0
    for number in range(2, 120):
        wall = START + number * 1200.0 + 37.0
        options = PromQLOptions(address, 3600.0, 7200.0, 'cluster="own"', at=wall)
        source = PromQLSource(options, ManualClock(wall=wall), fetch_text)
        evidence = source.read_evidence()
        decisions = settle(evidence, decide(evidence, BOOK.loosest), {}, BOOK)  # a brake delays marks only
        # Without surroundings: no controller joins pods, and no pod is a notebook.
        live = {each.name: each.stage for each in decisions if each.name.namespace != "sets"}
        here: dict[HolderName, str] = {}
        for gang in gangs:
            if gang.lives[0].name.namespace == "sets":
                continue
            before: dict[HolderName, str] = {}
            judge.stages(gang, wall, before)
            here |= before
        shown = {name: stage for name, stage in live.items() if stage in LABELLED}
        marks += len(shown)
        wrong += [
            (number, name, shown.get(name), here.get(name)) for name in {*shown, *here} if differs(shown, here, name)
        ]
    assert marks > 300
    assert len(wrong) <= EXACT * marks, wrong


def differs(live: Mapping[HolderName, str], here: Mapping[HolderName, str], name: HolderName) -> bool:
    stage = here.get(name, "")
    return live.get(name, "") != (stage if stage in LABELLED else "")


def backtest(url: str, name: str, tmp_path: Path, *flags: str, form: str = "json") -> str:
    """Runs the command."""
    output = tmp_path / f"{name}.{form}"
    code = COMMANDS["backtest"].run([
        f"--source.prometheus={url}", f"--source.matcher=cluster=\"{name}\"", f"--since={HOURS:.0f}h",
        f"--until={UNTIL}", "--rest=0", f"--format={form}", f"--output={output}", *flags,
    ])  # fmt: skip
    assert code == Exit.DONE
    return output.read_text("utf-8")


@pytest.mark.parametrize("name", ["own", "dcgm"])
def test_controllers_above_the_next_one_join_pods(url: str, name: str) -> None:
    """As for the reconciler: a Job of a JobSet is idle together with the others only. A notebook has its own window."""
    gangs = {life.name.name: gang for gang in read(url, name) for life in gang.lives}
    jobs, notebook = gangs["set-a-0"], gangs["nb-0"]
    assert jobs is gangs["set-b-0"]
    assert (jobs.title, jobs.owner_kinds, jobs.kind) == ("JobSet/set", ("Job", "JobSet"), "batch")
    assert (notebook.owner_kinds, notebook.kind) == (("StatefulSet",), "interactive")
    assert {str(life.name) for each in tally([jobs, notebook]).decided for life in each.lives} == set()


@pytest.mark.parametrize("name", ["own", "dcgm"])
def test_the_curves_show_the_work_around_idle_stretches(url: str, name: str, tmp_path: Path) -> None:
    found = json.loads(backtest(url, name, tmp_path))["longest"]
    assert len(found) == 10
    beside = []
    for each in found:
        start, curve = datetime.fromisoformat(each["start"]).timestamp(), each["curve"]
        first, window = datetime.fromisoformat(curve["start"]).timestamp(), curve["window_seconds"]
        assert 20 <= len(curve["utilization"]) <= 40
        for number, value in enumerate(curve["utilization"]):
            at = first + number * window
            if start <= at - 60 and at + window <= start + each["seconds"] - 300:
                assert value in (0.0, None), (each, at)
            elif at + window < start - 60:
                beside.append(value)
    assert len(beside) > 20 and min(filter(None, beside)) > 0.1
    text = backtest(url, name, tmp_path, form="text")
    assert sum("\u00b7" * 4 in line for line in text.splitlines()) == 10


@pytest.mark.parametrize("name", ["jobstats", "noprof"])
def test_gauges_alone_decide_nothing(url: str, name: str, tmp_path: Path) -> None:
    """Their zeros are samples. What they would mean is listed separately, at each floor."""
    found = json.loads(backtest(url, name, tmp_path))
    (policy,) = found["policies"]
    true = tally(true_gangs(world(name, jobs=CASES[name].jobs))).total
    assert policy["total"]["decisions"] == 0 and policy["candidates"] > 150
    assert [each["floor"] for each in policy["unproven"]] == [0.0, 0.001, 0.01]
    for each in policy["unproven"]:  # without engine activity, no floor makes a difference
        assert each["decisions"] == pytest.approx(true.decisions, rel=0.1)
    assert not found["windows_are_proven"]
    assert found["suggested"] == ["# no decision is proven, so none is a reason for a policy"]
    text = backtest(url, name, tmp_path, form="text")
    assert "TO BE INVESTIGATED, not proven" in text and "0 decisions `underused`" in text


def test_noise_counts_at_its_floor_only(url: str, tmp_path: Path) -> None:
    found = json.loads(backtest(url, "dcgm", tmp_path, "--price=2.5", "--currency=EUR"))
    decisions = {(each["window_seconds"], each["floor"]): each["decisions"] for each in found["windows"]}
    # The table gives each of its windows to notebooks too.
    assert decisions[7200.0, 0.001] == found["policies"][0]["total"]["decisions"] + 1
    assert decisions[7200.0, 0.01] == decisions[7200.0, 0.001] + 4 == decisions[7200.0, 0.0] + 4
    windows = [number for (_, floor), number in decisions.items() if floor == 0.001]
    assert windows == sorted(windows, reverse=True) and windows[0] > windows[-1]
    total = found["policies"][0]["total"]
    assert total["money"] == pytest.approx(2.5 * total["idle_gpu_hours"]) and found["currency"] == "EUR"
    rows = found["policies"][0]["rows"]
    assert {name: sum(row["decisions"] for row in of) for name, of in rows.items()} == dict.fromkeys(
        rows, total["decisions"]
    )
    assert {row["value"] for row in rows["tenant"]} == {"ml", "bio", "lost", "taken"}
    assert {row["value"] for row in rows["owner_kind"]} == {"Job", "ReplicaSet", "Pod"}


def test_two_policies_and_the_same_bytes_again(url: str, tmp_path: Path) -> None:
    short, long = tmp_path / "short.yaml", tmp_path / "long.yaml"
    short.write_text(
        "policy: {underused_after: 90m}\npolicies:\n- {name: bio, match: {namespaces: [bio]}, ceiling: candidate}\n"
    )
    long.write_text("policy: {underused_after: 180m}\n")
    kept = tmp_path / "kept"
    flags = (f"--policy={short}", f"--policy={long}", f"--keep={kept}")
    texts = [backtest(url, "dcgm", tmp_path, *flags, form=form) for form in ("json", "text", "csv")]
    found = json.loads(texts[0])
    one, two = (each["total"]["decisions"] for each in found["policies"])
    overlap = {name: each["decisions"] for name, each in found["overlap"].items()}
    assert one == overlap["both"] + overlap["first"] and two >= overlap["second"] > 30 and overlap["both"] > 30
    assert [each["value"] for each in found["policies"][0]["rows"]["tenant"] if each["value"] == "bio"] == []
    assert f"only {short}" in texts[1] and texts[2].startswith("policy,dimension,value,decisions")
    answers = sorted(path.name for path in kept.iterdir())
    assert backtest(url, "dcgm", tmp_path, *flags) == texts[0]
    assert sorted(path.name for path in kept.iterdir()) == answers


def test_the_suggested_policy_is_a_valid_file_and_holds_what_it_says(url: str, tmp_path: Path) -> None:
    found = json.loads(backtest(url, "own", tmp_path))
    path = tmp_path / "suggested.yaml"
    path.write_text("\n".join(found["suggested"]) + "\n")
    again = json.loads(backtest(url, "own", tmp_path, f"--policy={path}"))
    total = again["policies"][0]["total"]
    assert total["decisions"] == 0 or total["regret_ratio"] <= 0.05


def test_a_site_without_holders_has_no_backtest(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "none.txt"
    code = COMMANDS["backtest"].run(
        [
            f"--source.prometheus={url}",
            '--source.matcher=cluster="none"',
            "--since=6h",
            f"--until={UNTIL}",
            f"--output={output}",
        ]
    )
    assert code == Exit.NO_DATA and not output.exists()
    assert "gpu-exporter backtest: " in capsys.readouterr().err
