"""The numbers of the fleet dashboard against a simulated truth: real sampling, ledger and rules, with disturbances.

Pods shorter than a scrape, two targets for one node, a scrape that fails, exporters that are killed and restarted, MIG.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.version_info < (3, 11):
    assert not os.environ.get("CI"), "CI runs Python 3.11 or newer"
    pytest.skip("grafana-foundation-sdk needs Python 3.11", allow_module_level=True)

from grafana.queries import Fleet

from gpu_exporter.agent.devices.scenario import parse_scenario
from gpu_exporter.agent.exposition.series import list_series
from gpu_exporter.agent.ledger.state import StateFile
from gpu_exporter.common.config.defaults import Settings
from tests.rules.promtool import Case, Dumper, as_file, build
from tests.rules.world import World
from tests.testbed.servers import require
from tests.testbed.simulated_node import SimulatedNode

pytestmark = pytest.mark.servers

MINUTES = 150
BEGIN, END = 600.0, 8000.0  # seconds; the recordings look back over five minutes
KILLED = (35, 93)  # the minute in which the exporter of each node is killed
FAILED = (70, 71)  # minutes whose scrapes fail on the second node
IDLE, BUSY = {"kind": "constant", "value": 0}, {"kind": "constant", "value": 0.9}
HALF = {"kind": "curve", "points": [[0, 0.9], [4000, 0.9], [4000.1, 0]]}  # works until then
VARIABLES = {"$cluster": ".*", "$namespace": ".*", "$account": ".*", "$__range": f"{MINUTES}m"}


def held(gpu: int, name: str, kind: str = "pod", begin: float = BEGIN, end: float = END, **more: Any) -> dict[str, Any]:
    return {"gpu": gpu, "kind": kind, "name": name, "from": begin, "to": end, **more}


SHORT = [held(2, f"short/p{i}/main", begin=BEGIN + 40 * i, end=BEGIN + 40 * i + 35) for i in range(180)]
NODES = [
    {
        "gpus": [{"model": "H100", "load": IDLE}, {"model": "H100", "load": HALF}, {"model": "H100", "load": IDLE},
                 {"model": "H100", "mig": [{"profile": "3g.40gb", "load": BUSY}, {"profile": "1g.10gb", "load": IDLE}]}],
        "holders": [held(0, "ml/idle/main"), held(1, "41", "job", user="mira", account="phys"), *SHORT,
                    held(3, "serve/busy/main", mig=0), held(3, "serve/idle/main", mig=1)],
    },
    {
        "gpus": [{"model": "A100", "load": BUSY}, {"model": "A100", "load": IDLE}, {"model": "A100", "load": IDLE}],
        "holders": [held(0, "ml/busy/main"), held(1, "42", "job", user="lea", account="phys")],
    },
]  # fmt: skip
HOUR = 3600.0
LASTS = END - BEGIN
TRUTH = {  # GPU-hours by namespace or user: held, idle
    "ml": (2 * LASTS / HOUR, LASTS / HOUR),
    "mira": (LASTS / HOUR, (END - 4000.0) / HOUR),
    "lea": (LASTS / HOUR, LASTS / HOUR),
    "short": (180 * 35 / HOUR, 180 * 35 / HOUR),
    "serve": (4 / 7 * LASTS / HOUR, 1 / 7 * LASTS / HOUR),
}


def scrape(world: World, node: SimulatedNode, name: str, minute: int, instance: str) -> None:
    place = {"job": "gpu-exporter", "node": name, "instance": instance}
    for family, names, rows in list_series(node.view()):
        for values, value in rows:
            world.set(family.name, {**place, **dict(zip(names, values, strict=True))}, minute, value)


def run_a_minute(node: SimulatedNode, state: StateFile, *, is_killed: bool) -> None:
    """The state is written every 15 s. An exporter that is killed is down for ten of the last twenty seconds."""
    for _ in range(2 if is_killed else 4):
        node.run(15)
        node.state.write_state()
    if is_killed:
        node.run(10)  # which the state file does not contain
        node.restart(10, state)
        node.run(10)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The series that a Prometheus has scraped. The clocks of promtool and of the nodes start at 0."""
    made = World(MINUTES)
    for number, each in enumerate(NODES):
        state = StateFile(tmp_path_factory.mktemp("state"), 15.0, "boot")
        node = SimulatedNode(parse_scenario(each), state=state)
        node.clock.step_wall(-node.clock.wall())
        for minute in range(1, MINUTES + 1):
            run_a_minute(node, state, is_killed=minute == KILLED[number])
            if number == 0:
                scrape(made, node, "n0", minute, "n0")
                scrape(made, node, "n0", minute, "twin")
            elif minute not in FAILED:
                scrape(made, node, "n1", minute, "n1")
    for namespace, pod, workload in (("ml", "idle", "train"), ("ml", "busy", "train"), ("serve", "idle", "server")):
        owner = {"namespace": namespace, "pod": pod, "workload": workload, "workload_type": "job"}
        made.put("namespace_workload_pod:kube_pod_owner:relabel", owner, 1)
    return made


def evaluate(world: World, directory: Path, expressions: Mapping[str, tuple[str, int]]) -> dict[str, dict[str, float]]:
    """The values of each expression at its minute, by name and labels, from promtool's report."""
    require("promtool")
    test = Case("fleet", world).test()
    rules = build(directory / "rules", {})
    for unused in [path for path in rules.iterdir() if path.stem not in ("seam", "fleet", "tenants")]:
        unused.unlink()
    checks = []
    for expression, minute in expressions.values():
        for variable, text in VARIABLES.items():
            expression = expression.replace(variable, text)
        # No series has this label, so promtool prints the actual result of each check.
        wrong = [{"labels": '{x="x"}', "value": 0}]
        checks.append({"expr": expression, "eval_time": f"{minute}m", "exp_samples": wrong})
    path = directory / "fleet.yaml"
    tests = as_file([{**test, "promql_expr_test": checks}], rules)
    path.write_text(yaml.dump(tests, width=10_000_000, Dumper=Dumper))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    got = re.findall(r"got: ?(.*)", done.stdout + done.stderr)
    assert len(got) == len(checks), done.stdout + done.stderr
    found = {}
    for name, each in zip(expressions, got, strict=True):
        pairs = re.findall(r"(\{[^}]*\}) ([-+0-9.eE]+)", each)
        found[name] = {
            re.sub(r'.*(?:namespace|user)="([^"]*)".*', r"\1", labels): float(value) for labels, value in pairs
        }
    return found


def test_held_and_idle_hours_are_correct_within_one_percent(world: World, tmp_path: Path) -> None:
    fleet = Fleet(Settings())
    asked = {
        "held": (fleet.hours("used|idle|unknown", "namespace, user"), MINUTES),
        "idle": (fleet.hours("idle", "namespace, user"), MINUTES),
        "all": (fleet.hours("used|idle|unknown"), MINUTES),
        "idle share": (fleet.idle_share(), MINUTES),
        "workloads": (fleet.workload_hours(), MINUTES),
    }
    found = evaluate(world, tmp_path, asked)
    assert found["held"] == pytest.approx({name: hours for name, (hours, _) in TRUTH.items()}, rel=0.01)
    # The first of the 35 seconds are unknown, not idle, until the holder was seen twice.
    assert 0.8 * TRUTH["short"][1] < found["idle"].pop("short") < TRUTH["short"][1]
    assert found["idle"] == pytest.approx(
        {name: hours for name, (_, hours) in TRUTH.items() if name != "short"}, rel=0.01
    )
    lasts = LASTS - Settings().alerts.idle_short
    assert found["workloads"] == pytest.approx({"ml": lasts / HOUR, "serve": lasts / HOUR / 7}, rel=0.02)
    total, idle = (sum(column) for column in zip(*TRUTH.values(), strict=True))
    assert found["all"] == pytest.approx({"{}": total}, rel=0.01)
    assert found["idle share"] == pytest.approx({"{}": idle / total}, rel=0.02)


@pytest.mark.parametrize(
    ("minute", "used", "idle_short", "idle_long"),
    [
        (60, 2 + 3 / 7, 2 + 1 / 7, 0.0),  # held for 50 minutes
        (100, 1 + 3 / 7, 1.0, 2 + 1 / 7),  # the job has done nothing for 33 minutes
        (FAILED[0], None, None, None),  # a scrape fails: the node's GPUs have no data, and none of them counts as idle
    ],
)
def test_the_parts_at_a_given_time_are_correct(
    world: World, tmp_path: Path, minute: int, used: float | None, idle_short: float | None, idle_long: float | None
) -> None:
    fleet = Fleet(Settings())
    parts = ("used", "idle_short", "idle_long", "unknown", "free", "closed", "outside", "no_data")
    found = evaluate(world, tmp_path, {part: (fleet.part(part), minute) for part in parts})
    shown = {part: value["{}"] for part, value in found.items()}
    assert sum(shown.values()) == pytest.approx(7.0)
    if used is None:
        assert shown["no_data"] == pytest.approx(3.0)
        return
    # A pod that holds its GPU for 35 of every 40 seconds is in most scrapes, and too young to be judged.
    young = shown["unknown"]
    assert 0.0 <= young <= 1.0
    assert (shown["used"], shown["idle_short"], shown["idle_long"]) == pytest.approx(
        (used, idle_short, idle_long), abs=1.01 - young
    )
    assert shown["free"] == pytest.approx(1 + 3 / 7, abs=1.01)
