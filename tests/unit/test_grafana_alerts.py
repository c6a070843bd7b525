"""Grafana's copies of the alerts: the same annotations as in Prometheus, and further queries whose rows match the alert."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from alerts.parameters import HOLDER, SECOND, number_slots
from tools import grafana_alerts

from gpu_exporter.common.model.meanings import CAUSES

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT: dict[str, str] = {}  # annotations that Grafana's copies lack, and why: none now


def rules_of(*paths: Path) -> list[dict[str, Any]]:
    files = [yaml.safe_load(path.read_text("utf-8")) for path in paths]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


RULES = rules_of(*(ROOT / "alerts" / "rules").glob("*.yaml"))
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
PROMETHEUS = {rule["alert"]: rule for rule in RULES if "alert" in rule}
GRAFANA = {rule["title"]: rule for rule in rules_of(ROOT / "alerts" / "grafana" / "gpu-exporter.yaml")}
SECONDS = [
    pytest.param(rule, query["model"]["expr"], id=f"{name}-{query['refId']}")
    for name, rule in GRAFANA.items()
    for query in rule["data"][2:]
]


def labels_of(node: Any) -> set[str]:
    """The labels of the rows of an expression. Fails for a series as it is scraped, which may have any."""
    many = promql.VectorMatchCardinality.ManyToOne
    modifier: Any = getattr(node, "modifier", None)
    match node:
        case promql.ParenExpr():
            return labels_of(node.expr)
        case promql.NumberLiteral():
            return set()
        case promql.Call() if node.func.name == "time":
            return set()
        case promql.VectorSelector():
            return labels_of(promql.parse(RECORDED[node.name]))
        case promql.AggregateExpr() if str(node.op) == "topk":
            return labels_of(node.expr)
        case promql.AggregateExpr():
            return set(modifier.labels)
        case promql.BinaryExpr() if str(node.op) in ("and", "unless"):
            return labels_of(node.lhs)
        case promql.BinaryExpr() if modifier is None or modifier.matching is None:
            return labels_of(node.lhs) | labels_of(node.rhs)
        case promql.BinaryExpr() if modifier.card == many:
            return labels_of(node.lhs) | set(modifier.group_labels or ())
        case promql.BinaryExpr():
            return set(modifier.matching.labels)
    raise AssertionError(f"not known: {node}")


def words(text: str) -> set[str]:
    return {each.strip() for each in text.split(",")} - {""}


@pytest.mark.parametrize("name", PROMETHEUS)
def test_an_alert_has_the_same_annotations_in_grafana(name: str) -> None:
    ours, theirs = (list(each[name]["annotations"]) for each in (PROMETHEUS, GRAFANA))
    assert theirs == [each for each in ours if each not in LEFT_OUT]
    assert "query " not in "".join(GRAFANA[name]["annotations"].values())
    assert len(PROMETHEUS) == len(GRAFANA)


@pytest.mark.parametrize(("rule", "expression"), SECONDS)
def test_a_second_query_has_one_row_for_each_alert_with_all_its_labels(rule: dict[str, Any], expression: str) -> None:
    """Each row has the alert's labels and those that its text reads, and there is always one row more."""
    whole: Any = promql.parse(expression)
    assert (str(whole.op), whole.modifier.matching) == ("or", None)
    assert str(whole.rhs) == 'label_replace(vector(0), "row", "of no alert", "", "")'
    joined = whole.lhs
    assert str(joined.lhs) == str(promql.parse(f"0 * ({rule['data'][0]['model']['expr']})"))
    assert joined.modifier.card == promql.VectorMatchCardinality.ManyToOne, "each alert has at most one row"
    alert = labels_of(joined.lhs)
    assert set(joined.modifier.matching.labels) == words(HOLDER) < alert
    assert not set(joined.modifier.group_labels or ()) & alert, "a label of the alert would change"
    fact: Any = joined.rhs.expr
    while isinstance(fact, promql.BinaryExpr):
        fact = fact.rhs if isinstance(fact.lhs, promql.NumberLiteral) or fact.modifier is not None else fact.lhs
    assert (type(fact), set(fact.modifier.labels)) == (promql.AggregateExpr, words(HOLDER)), "one row for each holder"


@pytest.mark.parametrize("name", GRAFANA)
def test_a_value_is_read_only_where_it_is_known_to_exist(name: str) -> None:
    """Grafana prints a missing value as [no value], and a function of it fails: then the whole template is printed."""
    refs = {query["refId"] for query in GRAFANA[name]["data"]}
    read = set()
    for text in GRAFANA[name]["annotations"].values():
        uses = re.findall(r"\$values\.(\w+)", text.replace("$values.A.Value", ""))
        assert uses == re.findall(r"{{ with \$values\.(\w+) }}", text)
        read |= set(uses)
    assert read == refs - {"A", "B"}, "each second query is read"


def test_every_label_that_a_text_reads_is_in_its_row() -> None:
    for name, second in SECOND.items():
        known = set().union(*(words(fact.labels) for fact in second.facts.values()))
        assert set(re.findall(r"\.Labels\.(\w+)", second.text)) <= known, name


def test_a_sites_own_parameters_are_in_the_alerts_and_in_their_second_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "alerts.yaml"
    monkeypatch.setattr(grafana_alerts, "PATH", path)
    (tmp_path / "site.yaml").write_text("alerts: {exclude: 'pod!=\"x\"'}\n", encoding="utf-8")
    site = ["--config.file", str(tmp_path / "site.yaml"), "--set", "low_over=3h", "--datasource", "mimir"]
    assert grafana_alerts.main(site) == 0
    (low,) = (rule for rule in rules_of(path) if rule["title"] == "GpuHolderLow")
    seconds = [low["data"][0], *low["data"][2:]]
    assert all('allocation:owner:info{pod!="x"}' in query["model"]["expr"] for query in seconds)
    assert "allocation:gpu_memory_used_bytes:max30m[3h]" in "".join(query["model"]["expr"] for query in seconds)
    assert {query["datasourceUid"] for query in seconds} == {"mimir"}
    assert grafana_alerts.main(["--set", "low_over"]) == 2
    assert capsys.readouterr().err.endswith("--set low_over: expected NAME=VALUE\n")


@pytest.mark.parametrize("name", CAUSES)
def test_the_numbers_of_a_cause_are_in_different_slots_in_the_order_of_their_names(name: str) -> None:
    slots = [slot for slot, names in enumerate(number_slots()) for each in CAUSES[name].quantities if each in names]
    assert len(slots) == len(set(slots)) == len(CAUSES[name].quantities)
    ordered = [each for names in number_slots() for each in names if each in CAUSES[name].quantities]
    assert ordered == sorted(ordered)
