"""The rules in promtool: alerts that must fire, or must not, in every case of cases.py."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from tests.rules.cases import SHIFTED, all_cases
from tests.rules.crowd import GOLDEN, bare, record
from tests.rules.promtool import Case, as_file, build, merge, run
from tests.rules.world import BUSY, IDLE, Node, World, always, throttled, until
from tests.testbed.programs import built
from tests.testbed.servers import require

pytestmark = pytest.mark.servers

ROOT = Path(__file__).resolve().parents[2]


def failures(cases: Sequence[Case], program: str, factory: pytest.TempPathFactory) -> str:
    """promtool's report about cases that do not hold."""
    whole = factory.mktemp("cases")  # two threads must not make the first folder of the process
    merged = sorted(merge(cases), key=lambda case: -case.world.minutes * (100 + len(case.world.series)))

    def run_one(case: Case) -> str:
        directory = Path(tempfile.mkdtemp(dir=whole))
        holds, text = run([case], directory, build(directory / "rules", case.settings, case.optional), program)
        return "" if holds else text

    with ThreadPoolExecutor(2) as pool:
        return "\n".join(filter(None, pool.map(run_one, merged)))[:20_000]


def alerts_at(minute: int, alert: str, world: World, directory: Path) -> str:
    """All labels and annotations of an alert in a world: promtool prints them if the test expects no alert."""
    require("promtool")
    test = Case("texts for people", world).test()
    test["alert_rule_test"] = [{"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": []}]
    path = directory / "cases.yaml"
    path.write_text(yaml.safe_dump(as_file([test], build(directory / "rules", {}))), encoding="utf-8")
    return subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False).stderr


def test_every_case_fires_its_expected_alerts_and_no_others(tmp_path_factory: pytest.TempPathFactory) -> None:
    require("promtool")
    assert failures(all_cases(), "promtool", tmp_path_factory) == ""


def test_crowds_match_their_golden_files(request: pytest.FixtureRequest) -> None:
    """--update-golden writes the files; test_every_case_fires_its_expected_alerts_and_no_others compares them."""
    require("promtool")
    for case in bare():
        path = GOLDEN / f"{case.name}.txt"
        if request.config.getoption("--update-golden"):
            path.write_text(record(case), encoding="utf-8")
        assert path.read_text("utf-8").count("\n") > 50


def test_an_owner_sees_the_gpus_their_idle_hours_and_their_memory(tmp_path: Path) -> None:
    world = World(100)
    first, second = Node(world, gpus=12), Node(world, "n2")
    for index in range(12):
        first.hold(index, IDLE, units=13, mig="1/0" if index == 3 else "", host=(0.05, 0.0))
        gpu = {"gpu": str(index), "uuid": first.uuids[index]}
        holder = {"scheduler": "kubernetes", "namespace": "ml", "pod": "train-0", "container": "main"}
        first.put("gpu_allocation_memory_used_bytes", {**gpu, **holder}, (index + 1) * 2**30)
    second.hold(0, IDLE, units=13)
    second.hold(0, IDLE, mig="2/0", pod="other-0", share=2 / 7, host=(0.0625, 0.0))
    world.put("model:gpu_price:per_hour", {}, 3.5)
    text = alerts_at(90, "GpuHolderIdle", world, tmp_path)
    one, many = sorted(re.findall(r'gpus="((?:MIG|GPU) [^"]*)"', text), key=len)
    assert one == (
        "MIG 2/0 of GPU 0 of n2. Idle GPU-hours so far: 0.4, at the site's price 1.50. It uses 1.0 of its 16 CPU cores now."
    )
    named = ", ".join(f"{'MIG 1/0 of ' if i == 3 else ''}GPU {i} of n1" for i in (0, 1, 10, 11, *range(2, 8)))
    assert many == (
        f"{named} and others. Idle GPU-hours so far: 19.5, at the site's price 68.25. Highest memory use on one GPU in the last 6h: 12GiB."
    )


def test_an_owner_sees_the_cause_that_most_gpus_have_with_the_numbers_of_one_of_them(tmp_path: Path) -> None:
    """The numbers belong to one sentence: those of two GPUs are never mixed."""
    world = World(100)
    node = Node(world, gpus=4)
    for index, (threads, cpus) in enumerate(((96.0, 4.0), (64.0, 2.0), (96.0, 4.0))):
        of = "cpu_oversubscribed"
        numbers = {
            (of, "runnable_threads"): threads,
            (of, "cpus"): cpus,
            (of, "busy_ratio"): 0.4,
            (of, "a_bytes"): 2**31,
        }
        node.hold(index, IDLE, units=4, causes={of: "high", "shm_full": "medium"}, numbers=numbers)
    node.hold(3, IDLE, units=4, causes={"no_process": "high"}, numbers={("no_process", "used_cpus"): 0.02})
    text = alerts_at(90, "GpuHolderIdle", world, tmp_path)
    (cause,) = re.findall(r'cause="([^"]*)"', text)
    assert cause in (
        f"cpu_oversubscribed (high confidence) a_bytes=2GiB busy_ratio=40% cpus={cpus} runnable_threads={threads}"
        for cpus, threads in ((4, 96), (2, 64))
    )
    assert re.findall(r'stage="([^"]*)"', text) == [""] or "stage=" not in text, "no reconciler runs here"


def test_an_owner_sees_which_gpus_are_at_rest_while_the_others_are_stalled(tmp_path: Path) -> None:
    world = World(100)
    node = Node(world, gpus=3)
    for index in range(2):
        node.hold(index, lambda _: 1.0, units=3, stalled=lambda t: 900.0 + 60 * (t - 60) if t >= 60 else 0.0)
    node.hold(2, until(45, BUSY, IDLE), units=3, host=(0.0, 0.0))
    text = alerts_at(90, "GpuHolderStalled", world, tmp_path)
    assert re.findall(r'gpus="([^"]*)"', text) == [
        "At 0 %: GPU 2 of n1: the others may wait for it. Stalled: GPU 0 of n1, GPU 1 of n1."
    ]


def test_an_owner_sees_since_when_all_gpus_are_idle(tmp_path: Path) -> None:
    world = World(100)
    node = Node(world, gpus=2)
    node.hold(0, IDLE, units=2)
    node.hold(1, until(20, BUSY, IDLE), units=2)
    text = alerts_at(95, "GpuHolderIdle", world, tmp_path)
    assert re.findall(r"used none of them since ([^.]*)\. Stop it", text) == ["1970-01-01 00:20 UTC"]


def test_a_counter_that_catches_up_shows_at_most_100_percent(tmp_path: Path) -> None:
    """An hour of heat that the driver reports at once is not 200 % of half an hour."""
    world = World(60)
    throttled(Node(world), 0, "thermal", until(29, always(0.0), until(30, always(60.0), always(1.0))))
    text = alerts_at(50, "GpuThrottled", world, tmp_path)
    assert re.findall(r"\(thermal\) for (\S+) of the last 30m", text) == ["100%"]


@pytest.fixture
def newest() -> Path:
    """promtool of Prometheus 3."""
    path = built("promtool-3")
    if path is None:
        assert not os.environ.get("CI"), "promtool-3 is not built: `make programs`"
        pytest.skip("promtool-3 is not built: `make programs`")
    return path


def test_rules_load_in_the_newest_prometheus(newest: Path) -> None:
    files = sorted((ROOT / "alerts" / "rules").rglob("*.yaml"))
    command = [str(newest), "check", "rules", "--lint=all", "--lint-fatal", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS") == len(files) > 7


def test_the_newest_prometheus_gives_the_same_results(newest: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every sixth case: the others would show no more."""
    alike = [case for case in all_cases() if case.name.partition(";")[0] not in SHIFTED and not case.is_golden]
    cases = alike[::6]
    assert len(cases) > 25
    assert failures(cases, str(newest), tmp_path_factory) == ""
