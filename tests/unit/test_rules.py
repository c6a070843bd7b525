"""Checks of the parsed rules for mistakes that were measured (docs/decisions/0012)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from tools.rules import BuildError, read_parameters

from gpu_exporter.agent.attribution.slurm import commands as slurm_commands
from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.exposition.catalog import fixed_groups
from gpu_exporter.agent.slurm_collector.collector import CollectorRun, SlurmCollector
from gpu_exporter.agent.slurm_collector.command_line import CommandLine
from gpu_exporter.agent.slurm_collector.site import CollectorMetrics
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Alerts
from gpu_exporter.common.vendor import NVIDIA
from gpu_exporter.reconciler.telemetry import Telemetry

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = (ROOT / "alerts" / "runbook.md").read_text("utf-8")
RULES: list[dict[str, Any]] = [
    rule
    for path in sorted((ROOT / "alerts" / "rules").rglob("*.yaml"))
    for group in yaml.safe_load(path.read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule}
# From kube-state-metrics, from kube-prometheus, and from the site.
FOREIGN = re.compile(
    r"kube_\w+|(?:DCGM_FI|nvidia_smi)_\w+|namespace_workload_pod:kube_pod_owner:relabel|model:gpu_price:per_hour"
)
INFO = ("pod:owner:info", "unit:dcgm_labels:info", "node:node_pool:info")  # one row per key
PARTS = ("Meaning", "Impact", "Diagnosis", "Mitigation", "False positives")


GROUPS = [
    pytest.param(group, id=f"{path.relative_to(ROOT)}-{group['name']}")
    for folder in ("alerts/rules", "alerts/grafana", "helm/gpu-exporter/files/rules", "helm/gpu-exporter/files/grafana")
    for path in sorted((ROOT / folder).rglob("*.yaml"))
    for group in yaml.safe_load(path.read_text("utf-8")).get("groups", ())
]
RULES_MAX = 20  # default of ruler.max-rules-per-rule-group of Mimir; Grafana Cloud has it too (grafana/mimir#1885)


@pytest.mark.parametrize("group", GROUPS)
def test_a_hosted_ruler_takes_every_group(group: dict[str, Any]) -> None:
    assert 0 < len(group["rules"]) <= RULES_MAX, "move rules whose order does not matter into a group of facts"


@pytest.mark.parametrize("group", [group for group in GROUPS if group.values[0]["name"].endswith("-facts")])
def test_the_order_between_a_group_of_facts_and_its_file_does_not_matter(group: Any) -> None:
    """Groups are evaluated at different times of an interval: a rule reads older values of another group."""
    base = group["name"].removesuffix("-facts")
    (main,) = [each.values[0] for each in GROUPS if each.values[0]["name"] == base and each.id.startswith("alerts/")]
    facts = {rule["record"] for rule in group["rules"]}
    recorded = re.compile(r"\b[a-z_]+:[a-z]\w*(?::\w+)?")
    assert not [name for rule in group["rules"] for name in recorded.findall(rule["expr"])]
    assert not facts.intersection(name for rule in main["rules"] for name in recorded.findall(rule["expr"]))


@pytest.mark.parametrize("name", ["interval", "owners_interval"])
def test_an_interval_beyond_the_lookback_of_prometheus_is_refused(name: str) -> None:
    read_parameters(Alerts(), {name: "4m"})
    with pytest.raises(BuildError, match=f"^{name}: must be below 300s: Prometheus forgets"):
        read_parameters(Alerts(), {name: "5m"})


def own_types() -> dict[str, str]:
    """The type of every metric that the exporter or the reconciler publishes, by name."""
    families = [family for _, _, group in fixed_groups() for family in group]
    families += [f for collector in registry.ALL for f in (*collector.families, *collector.instance_families)]
    types = {family.name: family.type for family in families}
    collector = CollectorRegistry()
    run = CollectorRun(SlurmCollector(CommandLine(slurm_commands.run), ManualClock(), 90.0), None, ManualClock())
    collector.register(CollectorMetrics(run))
    published = generate_latest(Telemetry().registry) + generate_latest(collector)
    for line in published.decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            types[name] = kind
    return types | {"up": "gauge", "gpu_demand_pending_gpus": "gauge"}


TYPES = own_types()


def name_of(rule: dict[str, Any]) -> str:
    """The name of a rule, with the origin of another exporter's data, e.g. `unit:gpu_known:bool, dcgm`."""
    name, origin = str(rule.get("alert") or rule["record"]), rule.get("labels", {}).get("origin", "exporter")
    return name if origin == "exporter" else f"{name}, {origin}"


def expressions(node: Any) -> Iterator[Any]:
    """An expression and all its sub-expressions."""
    yield node
    match node:
        case promql.BinaryExpr():
            children = [node.lhs, node.rhs]
        case promql.AggregateExpr():
            children = [node.expr, *([node.param] if node.param else [])]
        case promql.Call():
            children = list(node.args)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            children = [node.expr]
        case promql.MatrixSelector():
            children = [node.vector_selector]
        case _:
            children = []
    for child in children:
        yield from expressions(child)


def selectors(rule: dict[str, Any]) -> list[Any]:
    return [each for each in expressions(promql.parse(rule["expr"])) if isinstance(each, promql.VectorSelector)]


each_rule = pytest.mark.parametrize("rule", RULES, ids=name_of)
each_alert = pytest.mark.parametrize("rule", ALERTS, ids=name_of)


def test_names_of_rules_are_unique() -> None:
    names = [name_of(rule) for rule in RULES]
    assert sorted(names) == sorted(set(names))


@each_rule
def test_every_series_of_gpu_exporter_exists_and_is_selected_by_job(rule: dict[str, Any]) -> None:
    """A foreign job with the same metric names must fire no alert. A misspelt name would never fire."""
    for selector in selectors(rule):
        if re.match("DCGM_FI|nvidia_smi", selector.name):
            names = {matcher.name for matcher in selector.matchers.matchers}
            assert names & {"job", "origin"}, f"{selector.name} has no job and no origin"
        if FOREIGN.fullmatch(selector.name) or selector.name in RECORDED:
            continue
        assert selector.name in TYPES, selector.name
        jobs = [matcher for matcher in selector.matchers.matchers if matcher.name == "job"]
        honoured = any(
            matcher.name.startswith("exported_") and matcher.value == "" for matcher in selector.matchers.matchers
        )
        assert jobs or (honoured and name_of(rule) == "GpuScrapeConfigWrong"), f"{selector.name} without a job"


@each_rule
def test_the_cluster_is_in_every_grouping_and_match(rule: dict[str, Any]) -> None:
    """Two clusters behind one ruler may have nodes of the same name. The price of a model is the same in all clusters."""
    for each in expressions(promql.parse(rule["expr"])):
        if isinstance(each, promql.AggregateExpr):
            assert each.modifier is not None, f"{each} over everything"
            assert "cluster" in each.modifier.labels or "model:gpu_price" in str(each.expr), str(each)
        if isinstance(each, promql.BinaryExpr) and each.modifier is not None and each.modifier.matching is not None:
            assert "cluster" in each.modifier.matching.labels or "model:gpu_price" in str(each.rhs), str(each)


@each_rule
def test_rate_and_increase_read_only_counters(rule: dict[str, Any]) -> None:
    for each in expressions(promql.parse(rule["expr"])):
        if isinstance(each, promql.Call) and each.func.name in ("rate", "increase", "irate"):
            name = each.args[0].vector_selector.name
            assert TYPES[name] == "counter", name


@each_rule
def test_no_recording_has_the_name_of_a_published_metric(rule: dict[str, Any]) -> None:
    """A rule that writes the series that it reads would keep a lost GPU alive for ever."""
    if "record" in rule:
        assert ":" in rule["record"] or rule["record"].startswith("DCGM_FI_")
        assert rule["record"] not in TYPES
    for selector in selectors(rule):
        if selector.name == rule.get("record"):
            wanted = [str(matcher.value) for matcher in selector.matchers.matchers if matcher.name == "origin"]
            assert wanted and wanted[0] != rule["labels"]["origin"], f"{selector.name} feeds itself"


@each_rule
def test_info_series_are_joined_through_one_row(rule: dict[str, Any]) -> None:
    """`group_left` on two series for one key is an error that ends the whole rule."""
    for each in expressions(promql.parse(rule["expr"])):
        if isinstance(each, promql.BinaryExpr) and each.modifier is not None:
            labels = each.modifier.group_labels
            right = each.rhs
            while isinstance(right, promql.ParenExpr):
                right = right.expr
            while isinstance(right, promql.BinaryExpr):  # `or` with a fallback for the same key
                right = right.lhs
            if labels:
                ok = isinstance(right, promql.AggregateExpr) or (
                    isinstance(right, promql.VectorSelector) and right.name in INFO
                )
                assert ok, str(each.rhs)


@each_alert
def test_an_alert_survives_a_restart_and_a_failed_scrape(rule: dict[str, Any]) -> None:
    """Prometheus does not restore a `for` below 10m (--rules.alert.for-grace-period)."""
    if "for" in rule:
        assert re.fullmatch(r"[1-9][0-9]m|[1-9][0-9]*h", rule["for"]), rule["for"]
        keeps = rule.get("keep_firing_for", "no keep_firing_for, which a rule with `for` needs")
        assert re.fullmatch(r"[1-9][0-9]m|[1-9][0-9]*h", keeps), keeps


@each_alert
def test_every_alert_contains_a_comparison(rule: dict[str, Any]) -> None:
    found = list(expressions(promql.parse(rule["expr"])))
    compares = any(
        isinstance(each, promql.BinaryExpr) and str(each.op) in ("==", ">", "<", ">=", "<=") for each in found
    )
    assert compares or any(isinstance(each, promql.Call) and each.func.name == "absent" for each in found)


@each_alert
def test_labels_and_annotations_of_an_alert_are_complete(rule: dict[str, Any]) -> None:
    labels, annotations = rule["labels"], rule["annotations"]
    assert set(labels) == {"severity", "audience"}
    assert labels["severity"] in ("info", "warning", "critical")
    assert labels["audience"] in ("owner", "operations")
    wanted = {"summary", "description", "runbook_url", "dashboard_url"}
    asked = {"gpus", "cause", "stage"} if labels["audience"] == "owner" else set()
    if rule["alert"] in ("GpuHolderStalled", "GpuHolderLow"):  # no mark follows, so there is nothing to keep
        asked -= {"stage"}
    assert set(annotations) == wanted | asked
    assert "{{" not in annotations["summary"], "the summary must be the same for every alert of a group"
    queries = sum(text.count("(query ") for text in annotations.values())
    assert queries == len(asked), "each query in an annotation runs for each active alert in each evaluation"
    named = set(re.findall(r"\$labels\.(\w+)", annotations["description"]))
    assert named <= set(re.findall(r"\w+", rule["expr"])), "the result of the expression lacks the label"


@each_alert
def test_every_alert_has_a_section_in_the_runbook(rule: dict[str, Any]) -> None:
    page = re.search(rf"^## {rule['alert']}\n(.*?)(?=^## |\Z)", RUNBOOK, re.M | re.S)
    assert page is not None, f"alerts/runbook.md needs `## {rule['alert']}` with {', '.join(PARTS)}"
    assert rule["annotations"]["runbook_url"].endswith(f"/alerts/runbook.md#{rule['alert'].lower()}")
    assert [part for part in PARTS if f"**{part}.**" not in page[1]] == []


def test_the_runbook_has_no_section_of_a_removed_alert() -> None:
    assert set(re.findall(r"^## (\w+)$", RUNBOOK, re.M)) == {rule["alert"] for rule in ALERTS}


QUERIES = re.findall(r"^```promql\n(.*?)^```", RUNBOOK, re.M | re.S)


@pytest.mark.parametrize("query", QUERIES)
def test_queries_of_the_runbook_can_be_pasted(query: str) -> None:
    for each in expressions(promql.parse(query)):
        if isinstance(each, promql.VectorSelector):
            of_name = [matcher.value for matcher in each.matchers.matchers if matcher.name == "__name__"]
            for name in [each.name] if each.name else of_name[0].split("|"):
                assert name in TYPES or name in RECORDED or FOREIGN.fullmatch(name), name


def test_the_names_of_alerts_are_stable() -> None:
    """The runbook, dashboards and other tools depend on the names."""
    assert {rule["alert"] for rule in ALERTS} == {
        *("GpuHolderIdle", "GpuHolderPartlyIdle", "GpuHolderLow", "GpuHolderStalled", "GpuGangStalled"),
        "GpuBusyWithoutProcess",
        "GpuNotAllocatable",
        *(
            "GpuThrottled",
            "GpuXid",
            "GpuUnusable",
            "GpuDegraded",
            "GpuEccUncorrected",
        ),
        *("GpuLost", "GpuMissing", "GpuDriverDown", "GpuExporterDown", "GpuExporterBlind", "GpuNodeWithoutExporter"),
        *("GpuScrapeConfigWrong", "GpuNodeClockWrong", "GpuWasteWhileQueued"),
        *("GpuFleetDegraded", "GpuThrottledMany", "GpuMonitoringAbsent"),
        *("GpuReconcilerStuck", "GpuReconcilerDown", "GpuReconcilerFrozen", "GpuReconcilerActionFailed"),
        "GpuSlurmCollectorDown",
        "GpuReconcilerUnreadable",
    }


@pytest.mark.parametrize(
    "name",
    [
        *("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb", "nvidia.com/mig-1c.3g.20gb"),
        *("nvidia.com/gpumem", "nvidia.com/hostdev", "nvidia.com/GA102GL_A10", "nvidia.com/rdma_shared_device_a"),
        *("amd.com/gpu", "cpu", "example.com/nvidia.com/gpu"),
    ],
)
def test_the_rules_and_the_kubelet_source_accept_the_same_gpu_resources(name: str) -> None:
    is_gpu = NVIDIA.resource.fullmatch(name) is not None
    in_kube_state_metrics = re.sub(r"[^a-zA-Z0-9_]", "_", name)
    assert (re.fullmatch(Alerts().resources, in_kube_state_metrics) is not None) == is_gpu


def test_no_rule_contains_a_fixed_resource_name() -> None:
    for path in (ROOT / "alerts" / "src").rglob("*.yaml"):
        text = path.read_text("utf-8")
        assert not re.search(r'resource=~?"(?!\$\{resources\})', text), path
    for path in (ROOT / "grafana" / "dashboards").glob("*.json"):
        assert "nvidia_com" not in path.read_text("utf-8"), path
