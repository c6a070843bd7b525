"""Grafana's copies of the owners' alerts: what their further queries return in the real engine, and the texts of it.

Grafana itself does not run here. `values` is what it does with the rows of these queries, as its documentation and its
source say (docs/other-exporters.md).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from tools.grafana_alerts import render
from tools.rules import read_parameters

from gpu_exporter.common.config.defaults import Alerts
from tests.rules.promtool import Case, as_file, build
from tests.rules.world import BUSY, IDLE, RECONCILER, Node, World, until
from tests.testbed.servers import require

pytestmark = pytest.mark.servers

Row = tuple[dict[str, str], float]
SETTINGS = {"low_over": "2h"}
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Alert(NamedTuple):
    """One alert: what Grafana's $values has, and its annotations in Grafana and in Prometheus."""

    values: dict[str, Row]
    grafana: dict[str, str]
    prometheus: dict[str, str]


def values(alert: Mapping[str, str], rows: Mapping[str, list[Row]]) -> dict[str, Row]:
    """For each query, the row with equal labels, or else one that has more or fewer labels. Of several, Grafana takes any."""
    found: dict[str, Row] = {}
    for ref, answer in rows.items():
        assert answer, f"{ref} has no row: the whole rule has no data then"
        equal = [row for row in answer if row[0] == alert]
        near = [row for row in answer if row[0].items() <= alert.items() or alert.items() <= row[0].items()]
        assert len(equal or near) <= 1, f"{ref}: {equal or near}"
        found.update((ref, row) for row in equal or near)
    return found


def template(text: str, refs: list[str]) -> str:
    """An annotation of Grafana for Prometheus, with $values.C read from a recording of that query."""
    read = '{{ $own := "" }}{{ range $key, $label := $labels }}{{ $own = printf "%s,%s=%q" $own $key $label }}{{ end }}'
    for ref in refs:
        rows = f'query (printf "second:{ref}{{row=\\"\\"%s}}" $own)'
        read += f'{{{{ ${ref} := "" }}}}{{{{ range {rows} }}}}{{{{ ${ref} = . }}}}{{{{ end }}}}'
    return read + text.replace("$values.A.Value", "$value").replace("$values.", "$")


def alerts_of(name: str, minute: int, world: World, directory: Path) -> list[Alert]:
    """The alerts of the rule `name`, sorted by their labels."""
    require("promtool")
    text = render(read_parameters(Alerts(), SETTINGS), "prometheus")
    (rule,) = [each for group in yaml.safe_load(text)["groups"] for each in group["rules"] if each["title"] == name]
    queries = {query["refId"]: query["model"]["expr"] for query in rule["data"] if query["refId"] != "B"}
    refs = [ref for ref in queries if ref != "A"]
    second: list[dict[str, Any]] = []
    for ref, expression in queries.items():
        second.append({"record": f"second:{ref}", "expr": expression})
        second.append({"alert": f"Row{ref}", "expr": f"second:{ref}", "annotations": {"value": "{{ $value }}"}})
    annotations = {key: template(each, refs) for key, each in rule["annotations"].items()}
    second.append({"alert": "Copy", "expr": queries["A"], "annotations": annotations})
    rules = build(directory / "rules", SETTINGS)
    (rules / "zz.yaml").write_text(yaml.safe_dump({"groups": [{"name": "second", "rules": second}]}), encoding="utf-8")
    test = Case("second queries", world).test()
    asked = [name, "Copy", *(f"Row{ref}" for ref in queries)]
    test["alert_rule_test"] = [{"eval_time": f"{minute}m", "alertname": each, "exp_alerts": []} for each in asked]
    path = directory / "cases.yaml"
    path.write_text(yaml.safe_dump(as_file([test], rules)), encoding="utf-8")
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    found = read_alerts(done.stderr)
    assert found[name], done.stderr
    rows = {ref: [(own, float(each["value"])) for own, each in found.get(f"Row{ref}", [])] for ref in queries}
    own = {"severity", "audience"}
    copies = sorted(found["Copy"], key=lambda each: list(each[0].items()))
    prometheus = {tuple({k: v for k, v in each.items() if k not in own}.items()): texts for each, texts in found[name]}
    return [Alert(values(labels, rows), texts, prometheus[tuple(labels.items())]) for labels, texts in copies]


def read_alerts(report: str) -> dict[str, list[tuple[dict[str, str], dict[str, str]]]]:
    """Labels and annotations of the alerts that promtool reports, by the alert's name."""
    found: dict[str, list[tuple[dict[str, str], dict[str, str]]]] = {}
    for labels, texts in re.findall(r"^ +Labels:{(.*)}\n +Annotations:{(.*)}", report, re.MULTILINE):
        read = dict(LABEL.findall(labels))
        found.setdefault(read.pop("alertname"), []).append((read, dict(LABEL.findall(texts))))
    return found


def test_an_idle_holders_gpus_hours_price_memory_cause_and_stage_are_as_in_prometheus(tmp_path: Path) -> None:
    world = World(100)
    node = Node(world, gpus=3)
    numbers = {("cpu_quota", "cpus"): 4.0, ("cpu_quota", "throttled_ratio"): 0.4}
    owner = {"user": "ada", "account": "phys"}
    node.hold(0, IDLE, units=2, job_id="7", info=owner)
    node.hold(1, IDLE, units=2, job_id="7", info=owner, causes={"cpu_quota": "high"}, numbers=numbers)
    # Each holds a half of a GPU: neither is named as the other's.
    causes, used = {"no_process": "medium"}, {("no_process", "used_cpus"): 0.02}
    node.hold(2, IDLE, share=0.5, pod="a", causes=causes, numbers=used, host=(0.0625, 0.0))
    node.hold(2, IDLE, share=0.5, pod="b", mig="1/0")
    node.put("gpu_allocation_memory_used_bytes", {"uuid": node.uuids[0], "scheduler": "slurm", "job_id": "7"}, 2**31)
    world.put("model:gpu_price:per_hour", {}, 3.5)
    for holder in (
        {"scheduler": "slurm", "job_id": "7"},
        {"namespace": "ml", "pod": "a"},
        {"namespace": "ml", "pod": "b"},
    ):
        stage = {"scheduler": "kubernetes", **RECONCILER, **holder, "stage": "candidate"}
        world.put("gpu_reconciler_allocation_stage", stage, 1)
    rising = {"scheduler": "kubernetes", **RECONCILER, "namespace": "ml", "pod": "b"}
    world.put("gpu_reconciler_allocation_underused_timestamp_seconds", rising, 1_796_000_000.0)
    job, first, second = alerts_of("GpuHolderIdle", 90, world, tmp_path)
    assert job.prometheus["gpus"].startswith(
        "GPU 0 of n1, GPU 1 of n1. Idle GPU-hours so far: 3.0, at the site's price"
    )
    named = job.prometheus["gpus"].replace("GPU 0 of n1, GPU 1 of n1.", "GPU {} of n1 and others, 2 in all.")
    assert job.grafana["gpus"] in [named.format(0), named.format(1)]
    assert job.grafana["cause"] == "cpu_quota (high confidence) cpus=4 throttled_ratio=40%"
    assert {**job.grafana, "gpus": ""} == {**job.prometheus, "gpus": ""}
    assert first.grafana == first.prometheus
    assert first.grafana["gpus"] == (
        "GPU 2 of n1. Idle GPU-hours so far: 0.8, at the site's price 2.62. It uses 1.0 of its 16 CPU cores now."
    )
    assert first.grafana["cause"] == "no_process (medium confidence) used_cpus=0.02"
    assert second.grafana == second.prometheus
    assert second.grafana["gpus"].startswith("MIG 1/0 of GPU 2 of n1. ")
    assert (second.grafana["cause"], second.grafana["stage"]) == ("", "at=2026-11-30 00:53 UTC; candidate ")
    assert second.values["D"] == ({"gpus": "1", "namespace": "ml", "pod": "b", "scheduler": "kubernetes"}, 0.75)


@pytest.mark.parametrize("shared", [0, 1])
def test_a_gpu_on_which_only_another_holder_is_idle_is_not_named(shared: int, tmp_path: Path) -> None:
    world = World(100)
    node = Node(world, gpus=2)
    node.hold(shared, IDLE, share=0.5, pod="a")
    node.hold(shared, BUSY, share=0.5, units=2, pod="b")
    node.hold(1 - shared, IDLE, units=2, pod="b")
    (partly,) = alerts_of("GpuHolderPartlyIdle", 95, world, tmp_path)
    assert partly.grafana == partly.prometheus
    assert partly.grafana["gpus"] == f"GPU {1 - shared} of n1. Idle GPU-hours so far: 1.6."


def test_a_little_used_holders_gpu_memory_and_cause_are_as_in_prometheus(tmp_path: Path) -> None:
    world = World(170)
    node = Node(world, gpus=2)
    numbers = {("input_wait", "wait_ratio"): 0.7}
    node.hold(0, lambda _: 0.1, causes={"input_wait": "high"}, numbers=numbers, pod="low-0")
    node.hold(1, BUSY, causes={"cpu_quota": "high"}, pod="busy-0")
    (low,) = alerts_of("GpuHolderLow", 165, world, tmp_path)
    assert low.grafana == low.prometheus
    assert low.grafana["gpus"] == "GPU 0 of n1."
    assert low.grafana["cause"] == "input_wait (high confidence) wait_ratio=70%"
    assert "10%" in low.grafana["description"]


def test_a_stalled_holders_gpus_are_those_at_rest_and_those_that_wait(tmp_path: Path) -> None:
    world = World(100)
    node = Node(world, gpus=3)
    for index in range(2):
        node.hold(index, lambda _: 1.0, units=3, stalled=lambda t: 900.0 + 60 * (t - 60) if t >= 60 else 0.0)
    node.hold(2, until(45, BUSY, IDLE), units=3, host=(0.0, 0.0))
    (stalled,) = alerts_of("GpuHolderStalled", 90, world, tmp_path)
    late = "At 0 %: GPU 2 of n1: the others may wait for it. Stalled: "
    assert stalled.prometheus["gpus"] == f"{late}GPU 0 of n1, GPU 1 of n1."
    assert stalled.grafana["gpus"] in [f"{late}GPU {index} of n1 and others, 2 in all." for index in range(2)]
    assert {**stalled.grafana, "gpus": ""} == {**stalled.prometheus, "gpus": ""}


def test_a_value_of_which_grafana_would_take_any_is_found() -> None:
    """The model refuses what the rules must not return."""
    alert = {"scheduler": "slurm", "job_id": "7", "user": "ada"}
    none = ({"row": "of no alert"}, 0.0)
    bare = ({"scheduler": "slurm", "job_id": "7"}, 3.0)
    gpus = [({**alert, "gpu": str(gpu)}, 1.0) for gpu in range(2)]
    assert values(alert, {"C": [none], "D": [bare, none], "E": [(alert, 1.0), *gpus]}) == {"D": bare, "E": (alert, 1.0)}
    for rows in ([], gpus):
        with pytest.raises(AssertionError):
            values(alert, {"C": rows})
