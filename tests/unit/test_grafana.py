"""Rules over the generated dashboards, in the manner of kubernetes-mixin; tests/component/test_grafana.py runs it."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

if sys.version_info < (3, 11):
    assert not os.environ.get("CI"), "CI runs Python 3.11 or newer"
    pytest.skip("grafana-foundation-sdk needs Python 3.11", allow_module_level=True)

from grafana.panels import STATES
from grafana.queries import STAGES, STATE_NUMBERS
from grafana_foundation_sdk.models.dashboard import Dashboard
from tools.dashboard import build_all, render

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.exposition.catalog import ALLOCATION_LABELS, MIG_LABELS, fixed_groups
from gpu_exporter.common.config.defaults import Settings
from gpu_exporter.common.durations import format_duration
from gpu_exporter.reconciler.decision.policy import MARKED
from gpu_exporter.reconciler.telemetry import Telemetry
from grafana import fleet, holder, node, operations

ROOT = Path(__file__).resolve().parents[2]
PATHS = {
    name: ROOT / "grafana" / "dashboards" / f"gpu-{name}.json" for name in ("fleet", "holder", "node", "operations")
}
STORED = {name: path.read_text("utf-8") for name, path in PATHS.items()}
DASHBOARDS: dict[str, dict[str, Any]] = {name: json.loads(text) for name, text in STORED.items()}
PANELS = [(name, panel) for name, board in DASHBOARDS.items() for panel in board["panels"] if panel["type"] != "row"]
TARGETS = [
    (f"{board} {panel['title']}: {target['refId']}", target) for board, panel in PANELS for target in panel["targets"]
]
EXPRESSIONS = [(name, target["expr"]) for name, target in TARGETS]
each_board = pytest.mark.parametrize("board", DASHBOARDS)
each_expression = pytest.mark.parametrize(("name", "expression"), EXPRESSIONS, ids=[name for name, _ in EXPRESSIONS])
VARIABLES = {
    "fleet": {"datasource", "cluster", "namespace", "account"},
    "holder": {"datasource", "cluster", "job", "node", "namespace", "pod", "jobid"},
    "node": {"datasource", "cluster", "job", "node"},
    "operations": {"datasource", "cluster", "job", "node"},
}
FAMILIES = [
    *(family for _, _, families in fixed_groups() for family in families),
    *(family for collector in registry.ALL for family in (*collector.families, *collector.instance_families)),
]
RECORDED = {
    rule["record"]
    for path in (ROOT / "alerts" / "rules").glob("*.yaml")
    for group in yaml.safe_load(path.read_text("utf-8"))["groups"]
    for rule in group["rules"]
    if "record" in rule
}
LABELS = {
    "cluster",
    "node",
    "instance",
    "job",
    "holder",
    "tenant",
    "part",
    "pool",
    "le",
    *MIG_LABELS,
    *ALLOCATION_LABELS,
}
LABELS |= {"scheduler", "user", "account", "team", "workload", "stage", "policy", "class", "action", "result", "reason"}
LABELS |= {"outcome", "kind"}
LABELS |= {"alertname", "alertstate", "severity"}
LABELS |= {label for family in FAMILIES for label in family.labels}
RECONCILER = {
    name
    for family in Telemetry().registry.collect()
    for name in {family.name, *(sample.name for sample in family.samples), f"{family.name}_total"}
}
KNOWN = {family.name for family in FAMILIES} | RECORDED | RECONCILER | {"ALERTS"}
GROUPING = re.compile(r"\b(?:by|on|group_left) ?\(([^)]*)\)")
WORDS = {"and", "or", "unless", "bool", "group_left"}


def metric_names(expression: str) -> set[str]:
    """Identifiers that are neither label, function, keyword nor part of a text or a window."""
    bare = re.sub(r'"[^"]*"', " ", expression)
    bare = GROUPING.sub(" ", bare)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|offset \w+", " ", bare)
    bare = re.sub(r"\b\w+\s*\(", "(", bare)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - WORDS


def test_they_are_what_the_code_builds() -> None:
    assert build_all(Settings()) == {PATHS[name].name: text for name, text in STORED.items()}, "run `make generate`"
    assert {path.name for path in PATHS["fleet"].parent.iterdir()} == {path.name for path in PATHS.values()}


def test_check_names_a_stale_file(tmp_path: Path) -> None:
    for name, path in PATHS.items():
        (tmp_path / path.name).write_text(STORED[name].replace("Use unknown", "Use known"), encoding="utf-8")
    command = [sys.executable, "-m", "tools.dashboard", "--check", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"{tmp_path / PATHS['fleet'].name} is stale: run `make generate`\n")
    done = subprocess.run([*command[:3], "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@each_board
def test_it_survives_the_round_trip_through_the_schema(board: str) -> None:
    """The SDK drops keys that Grafana 11.6 does not know."""
    assert render(Dashboard.from_json(json.loads(STORED[board]))) == STORED[board]


@each_board
def test_ids_are_unique_and_the_uid_is_stable(board: str) -> None:
    ids = [panel["id"] for panel in DASHBOARDS[board]["panels"]]
    assert sorted(ids) == list(range(1, len(ids) + 1)), "an id is never given to another panel"
    assert DASHBOARDS[board]["uid"] == f"gpu-exporter-{board}"


def test_targets_of_a_panel_have_names_of_their_own() -> None:
    assert all(len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) for _, panel in PANELS)


@each_board
def test_panels_stand_in_the_grid_and_do_not_overlap(board: str) -> None:
    cells: dict[tuple[int, int], str] = {}
    for panel in DASHBOARDS[board]["panels"]:
        place = panel["gridPos"]
        x, y = place.get("x", 0), place.get("y", 0)
        assert x >= 0 and place["w"] > 0 and place["h"] > 0 and x + place["w"] <= 24, panel["title"]
        for cell in itertools.product(range(x, x + place["w"]), range(y, y + place["h"])):
            assert cell not in cells, f"{panel['title']} lies over {cells.get(cell)}"
            cells[cell] = panel["title"]
    height = max(y for _, y in cells) + 1
    holes = {(x, y) for x, y in itertools.product(range(24), range(height)) if (x, y) not in cells}
    assert not holes, f"there is a hole in the grid at {min(holes, key=lambda cell: (cell[1], cell[0]))}"


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=lambda each: each if isinstance(each, str) else each["title"])
def test_every_panel_explains_itself(board: str, panel: dict[str, Any]) -> None:
    assert panel["title"] and len(panel["description"]) > 20 and panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]
    if panel["type"] in ("timeseries", "state-timeline", "heatmap"):
        assert panel["interval"] == "1m", "nothing is recorded more often"


def test_the_fleet_is_asked_for_seldom_and_the_links_lead_on() -> None:
    assert DASHBOARDS["fleet"]["refresh"] == "5m"
    for name, board in DASHBOARDS.items():
        assert any(link["type"] == "dashboards" and link["includeVars"] and link["keepTime"] for link in board["links"])
        for url in re.findall(r"/d/([\w-]+)\?([^\"]*)", STORED[name]):
            target = url[0].removeprefix("gpu-exporter-")
            variables = set(re.findall(r"var-(\w+)=", url[1]))
            assert variables <= VARIABLES[target] and "datasource" in variables
            fields = re.findall(r"__data.fields.(\w+)", url[1])
            assert set(fields) <= {"Namespace"}, "a field that no row has would stay in the address as it is"


def test_every_datasource_is_the_variable() -> None:
    variable = {"type": "prometheus", "uid": "${datasource}"}
    assert all(target["datasource"] == variable for _, target in TARGETS)
    assert all(panel["datasource"] == variable for _, panel in PANELS)
    for board in DASHBOARDS.values():
        assert all(v["datasource"] == variable for v in board["templating"]["list"] if v["type"] == "query")
        assert all(each["datasource"] == variable for each in board["annotations"]["list"])


@each_board
def test_every_variable_is_defined_and_used(board: str) -> None:
    defined = {variable["name"] for variable in DASHBOARDS[board]["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z_]\w*)", STORED[board]))  # not $1 of a label_replace
    assert used - {"__rate_interval", "__range", "__all", "__data", "__value"} == defined == VARIABLES[board]


@each_board
def test_all_includes_series_without_the_label(board: str) -> None:
    for variable in DASHBOARDS[board]["templating"]["list"]:
        if variable["type"] == "query" and (board, variable["name"]) != ("node", "node"):  # exactly one
            # Of a holder's nodes all are those that it has, so that no other node is read.
            every = None if (board, variable["name"]) == ("holder", "node") else ".*"
            assert variable.get("allValue") == every and variable["multi"] and variable["includeAll"]
    for target in (target for name, target in TARGETS if name.startswith(board)):
        exact = {"namespace", "pod", "jobid"} if board == "holder" else set()
        assert set(re.findall(r'(?<!~)"\$(\w+)"', target["expr"])) <= exact, "several values need =~"


def test_every_expression_is_of_the_chosen_cluster() -> None:
    for name, expression in EXPRESSIONS:
        bare = re.sub(
            r"last_over_time\((allocation:owner|unit:gpu_model):info\[[^\]]*\]\)", "", expression
        )  # joined to
        for selector in re.findall(r"[a-zA-Z_:]\w*:?\w*(\{[^}]*\})", bare):
            assert 'cluster=~"$cluster"' in selector, f"{name}: {selector}"


@each_expression
def test_only_names_that_exist(name: str, expression: str) -> None:
    names = metric_names(expression)
    assert names, "no metric found: does this test still parse the expression?"
    assert names <= KNOWN, names - KNOWN
    for list_of_labels in GROUPING.findall(expression):
        assert {label.strip() for label in list_of_labels.split(",")} <= LABELS
    for matchers in re.findall(r"\{([^}]*)\}", expression):
        assert {matcher[0] for matcher in re.findall(r'(\w+)(=~|!~|!=|=)"', matchers)} <= LABELS


@each_expression
def test_it_is_promql(name: str, expression: str) -> None:
    """Syntax, functions and types; a site's own Prometheus would refuse the rest of the panel too."""
    for window in re.findall(r"\$__\w+", expression):
        expression = expression.replace(window, "5m")
    promql_parser.parse(expression)


@each_expression
def test_windows_are_grafanas_but_for_the_deliberate_ones(name: str, expression: str) -> None:
    state_window = format_duration(Settings().diagnosis.window)  # utilization of the present holder
    lately = format_duration(Settings().alerts.idle_for)  # who was there, and is silent now
    for function, window in re.findall(r"(\w+)\([^()\[]*\[([^\]]*)\]", expression):
        allowed = {
            "rate": {"$__rate_interval"},
            "increase": {"$__range", state_window},
            "last_over_time": {"$__range:30m", lately, "$__range"},  # the last one of a single holder
            "sum_over_time": {"$__range", "$__range:30m"},  # of recordings; the latter each look back over 30 minutes
            "max_over_time": {"$__range:30m"},
        }
        assert window in allowed[function], f"{function}[{window}]"
    assert expression.count("[") == len(re.findall(r"\w+\([^()\[]*\[", expression))


@each_expression
def test_over_more_than_an_hour_only_recordings_of_the_fleet_are_read(name: str, expression: str) -> None:
    if name.startswith("fleet"):
        raw = {each for each in metric_names(expression) if ":" not in each}
        assert raw <= {"gpu_reconciler_allocation_stage", "gpu_allocation_state"}, raw  # of the present


@pytest.mark.parametrize("board", ["holder", "node", "operations"])
def test_curves_of_raw_series_are_of_one_holder_some_nodes_or_one_series_a_node(board: str) -> None:
    of_itself = ("gpu_exporter_", "gpu_reconciler_")
    mine = {"holder": ('pod="$pod"', 'node=~"$node"'), "node": ('node=~"$node"',), "operations": ()}[board]
    curves = [
        (panel["title"], target["expr"])
        for panel in DASHBOARDS[board]["panels"]
        for target in panel.get("targets", [])
        if not target.get("instant")
    ]
    assert curves
    for title, expression in curves:
        for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", expression):
            if name.startswith("gpu_") and not name.startswith(of_itself):
                assert any(matcher in matchers for matcher in mine), f"{title} reads {name} of every node"


def test_windows_and_thresholds_come_from_the_settings() -> None:
    """With odd ones, none of the defaults is left."""
    defaults = Settings()
    odd = defaults._replace(
        policy=defaults.policy._replace(candidate_after=77 * 60.0),
        diagnosis=defaults.diagnosis._replace(window=13 * 60.0),
        alerts=defaults.alerts._replace(fresh_max=131.0, idle_for=78 * 60.0, idle_short=14 * 60.0, interval=120.0),
    )
    boards = build_all(odd)
    text = "\n".join(boards.values())
    expressions = [
        target["expr"]
        for board in boards.values()
        for panel in json.loads(board)["panels"]
        for target in panel.get("targets", [])
    ]
    assert not re.search(r"\[(1h|10m)\]|>= 600\b|>= 3600\b|\* 0\.01666", "\n".join(expressions))
    assert not re.search(r"\b1h\b|\b60m\b", text.replace("[1w]", ""))
    assert all(part in text for part in ("78m", "[13m]", ">= 840", "14m", "131", "* 0.0333333", "4620"))


@each_expression
def test_identity_is_joined_through_topk(name: str, expression: str) -> None:
    """Two series of one GPU (a driver update, two scrape jobs) must not break a join."""
    if name.startswith(("operations", "holder Its GPUs: model")) or "count_values" in expression:
        return  # counted, not joined
    for match in re.finditer(r"gpu_(allocation_|mig_|exporter_build_)?info\b", expression):
        before = expression[: match.start()].removesuffix("last_over_time(")
        assert re.search(
            r"(^|group_left \([\w, ]+\) \(?|group by \([\w, ]+\) \()topk by \([\w, ]+\) \(1, max by \([\w, ]+\) \($",
            before,
        ), before[-200:]
    for many in re.finditer(r"group_right", expression):
        raise AssertionError(f"the allocation side is the many side: {expression[many.start() :]}")


@each_expression
def test_ratios_have_a_sum_above_zero_below_the_line(name: str, expression: str) -> None:
    for rest in re.findall(r" / (.*)", expression):
        assert rest.startswith("3600") or denominator(rest).endswith("> 0)"), rest
    for function in ("avg", "avg by", "quantile"):
        assert f"{function} (" not in expression and f"{function}(" not in expression


def denominator(text: str) -> str:
    """The expression in brackets that the text starts with."""
    assert text.startswith("("), text
    for position, depth in enumerate(itertools.accumulate({"(": 1, ")": -1}.get(sign, 0) for sign in text)):
        if depth == 0:
            return text[: position + 1]
    raise AssertionError(f"brackets do not close: {text}")


def test_unknown_is_never_shown_as_zero() -> None:
    for name, expression in EXPRESSIONS:
        assert "vector(" not in expression, name
    for _, panel in PANELS:
        defaults = panel["fieldConfig"]["defaults"]
        if panel["type"] == "stat":
            assert defaults["noValue"] in ("unknown", "none"), panel["title"]
        if panel["type"] == "timeseries":
            assert defaults["custom"]["spanNulls"] is False, panel["title"]


@pytest.mark.parametrize(
    ("columns", "hidden", "board", "title"),
    [
        (fleet.HOLDER_COLUMNS, fleet.HOLDER_HIDDEN, "fleet", "Holders, longest idle first"),
        (fleet.TENANT_COLUMNS, ("Time",), "fleet", "GPU-hours by namespace, account and user"),
        (fleet.SMALLER_COLUMNS, fleet.SMALLER_HIDDEN, "fleet", "Candidates for a smaller GPU"),
        (holder.UNIT_COLUMNS, holder.UNIT_HIDDEN, "holder", "Its GPUs"),
        (node.NODE_COLUMNS, ("Time",), "node", "Nodes"),
        (node.HEALTH_COLUMNS, ("Time", "cluster", "uuid"), "node", "Health"),
        (node.INSTANCE_COLUMNS, node.INSTANCE_HIDDEN, "node", "MIG instances"),
        (operations.ALERT_COLUMNS, ("Time",), "operations", "Firing alerts"),
        (operations.VERSION_COLUMNS, ("Time",), "operations", "Versions"),
    ],
)
def test_a_table_shows_or_hides_every_column(
    columns: dict[str, str], hidden: tuple[str, ...], board: str, title: str
) -> None:
    """A label that is neither named nor hidden would appear as a column at the end."""
    (table,) = (panel for name, panel in PANELS if (name, panel["title"]) == (board, title))
    values = {f"Value #{target['refId']}" for target in table["targets"]}
    named = {column for column in columns if column.startswith("Value #")}
    assert named | {column for column in hidden if column.startswith("Value #")} == values
    labels = set()
    for target in table["targets"]:  # the labels of the outermost aggregation and what is joined to it
        for kind in re.findall(r"(?:by|group_left) ?\(([^)]*)\)", target["expr"]):
            labels |= {label.strip() for label in kind.split(",") if label.strip()}
    unseen = labels - set(columns) - set(hidden) - {"Time", "job"}
    assert unseen <= {"container", "part", "instance", "cluster", "scheduler"} | IN_JOINS, unseen
    assert not set(columns) & set(hidden)
    assert table["options"]["sortBy"][0]["displayName"] in columns.values()


IN_JOINS = {"uuid", "mig_uuid", "mig", "gpu", "node", "namespace", "pod", "job_id", "holder", "name", "user", "account"}


def test_the_states_and_stages_are_those_of_the_code() -> None:
    code = (ROOT / "exporter" / "gpu_exporter" / "diagnosis" / "state.py").read_text("utf-8")
    assert set(STATES) == set(STATE_NUMBERS) == set(re.findall(r'Verdict\("(\w+)"', code))
    assert set(STAGES) == set(MARKED) == set(holder.STAGE_COLORS)


def overridden(panel: dict[str, Any]) -> Iterator[str]:
    for override in panel["fieldConfig"].get("overrides", []):
        yield override["matcher"]["options"]


def test_overrides_name_fields_that_exist() -> None:
    for board, panel in PANELS:
        renamed: set[str] = set()
        for transformation in panel.get("transformations", []):
            renamed |= set(transformation["options"].get("renameByName", {}).values())
        legends = {target.get("legendFormat") for target in panel["targets"]}
        for name in overridden(panel):
            assert name in renamed | legends, f"{board} {panel['title']}: {name}"


def test_compose_mounts_what_is_there_and_listens_on_loopback() -> None:
    place = ROOT / "grafana"
    compose = yaml.safe_load((place / "compose.yaml").read_text("utf-8"))
    mounted = [each.split(":") for service in compose["services"].values() for each in service["volumes"]]
    assert {source for source, *_ in mounted if not source.startswith(".")} == set(compose["volumes"])
    assert all((place / source).exists() and mode == ["ro"] for source, _, *mode in mounted if source.startswith("."))
    assert (place / compose["services"]["exporter"]["build"]["context"] / "Dockerfile").exists()
    for service in compose["services"].values():
        address = re.search(r"127\.0\.0\.1", json.dumps([service.get("command"), service.get("environment")]))
        assert service["network_mode"] == "host" and address and "ports" not in service
    targets = {source: target for source, target, *_ in mounted}
    prometheus = yaml.safe_load((place / "prometheus.yaml").read_text("utf-8"))
    assert prometheus["rule_files"] == [f"{targets['../alerts/rules']}/*.yaml"]
    (provider,) = yaml.safe_load((place / "provisioning" / "dashboards" / "gpu-exporter.yaml").read_text("utf-8"))[
        "providers"
    ]
    assert provider["options"]["path"] == targets["./dashboards"]
    (source,) = yaml.safe_load((place / "provisioning" / "datasources" / "prometheus.yaml").read_text("utf-8"))[
        "datasources"
    ]
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    assert (
        f"--web.listen-address={source['url'].removeprefix('http://')}" in compose["services"]["prometheus"]["command"]
    )
    alerts = (ROOT / "alerts" / "grafana" / "gpu-exporter.yaml").read_text("utf-8")
    assert set(re.findall(r"datasourceUid: (\w+)", alerts)) - {"__expr__"} <= {source["uid"]}, (
        "may be mounted beside them"
    )
