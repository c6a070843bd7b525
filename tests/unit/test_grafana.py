"""Rules over the generated dashboard, in the manner of kubernetes-mixin; tests/component/test_grafana.py runs it."""

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

import pytest
import yaml

if sys.version_info < (3, 11):
    assert not os.environ.get("CI"), "CI runs Python 3.11 or newer"
    pytest.skip("grafana-foundation-sdk needs Python 3.11", allow_module_level=True)

from grafana.panels import HOLDER_COLUMNS, HOLDER_HIDDEN, STATE_COLORS
from grafana_foundation_sdk.models.dashboard import Dashboard
from tools.dashboard import build_all, render

from gpu_exporter.collectors import registry
from gpu_exporter.defaults import Settings
from gpu_exporter.durations import format_duration
from gpu_exporter.exposition.catalog import ALLOCATION_LABELS, MIG_LABELS, fixed_groups

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "grafana" / "dashboards" / "gpu-allocation.json"
STORED = PATH.read_text("utf-8")
DASHBOARD: dict[str, Any] = json.loads(STORED)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = [(f"{panel['title']}: {target['refId']}", target) for panel in PANELS for target in panel["targets"]]
EXPRESSIONS = [(name, target["expr"]) for name, target in TARGETS]
each_expression = pytest.mark.parametrize(("name", "expression"), EXPRESSIONS, ids=[name for name, _ in EXPRESSIONS])
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
LABELS = {"cluster", "node", "instance", "holder", "tenant", *MIG_LABELS, *ALLOCATION_LABELS}
LABELS |= {label for family in FAMILIES for label in family.labels}
GROUPING = re.compile(r"\b(?:by|on|group_left) ?\(([^)]*)\)")
WORDS = {"and", "or", "unless", "bool"}


def metric_names(expression: str) -> set[str]:
    """Identifiers that are neither label, function, keyword nor part of a text or a window."""
    bare = re.sub(r'"[^"]*"', " ", expression)
    bare = GROUPING.sub(" ", bare)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", bare)
    bare = re.sub(r"\b\w+\s*\(", "(", bare)
    return set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - WORDS


def test_it_is_what_the_code_builds() -> None:
    assert build_all(Settings()) == {PATH.name: STORED}, "run `make generate`"


def test_check_tells_a_stale_file(tmp_path: Path) -> None:
    (tmp_path / PATH.name).write_text(STORED.replace("Held and used", "Held and abused"), encoding="utf-8")
    command = [sys.executable, "-m", "tools.dashboard", "--check", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"{tmp_path / PATH.name} is stale: run `make generate`\n")
    done = subprocess.run([*command[:3], "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_survives_the_round_trip_through_the_schema() -> None:
    """The SDK drops keys that Grafana 11.6 does not know."""
    assert render(Dashboard.from_json(json.loads(STORED))) == STORED


def test_ids_are_unique_and_the_uid_is_stable() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids)) and all(isinstance(number, int) and number > 0 for number in ids)
    assert DASHBOARD["uid"] == "gpu-exporter-allocation"
    assert all(len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) for panel in PANELS)


def test_panels_stand_in_the_grid_and_do_not_overlap() -> None:
    cells: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        x, y = place.get("x", 0), place.get("y", 0)
        assert x >= 0 and place["w"] > 0 and place["h"] > 0 and x + place["w"] <= 24, panel["title"]
        for cell in itertools.product(range(x, x + place["w"]), range(y, y + place["h"])):
            assert cell not in cells, f"{panel['title']} lies over {cells.get(cell)}"
            cells[cell] = panel["title"]
    height = max(y for _, y in cells) + 1
    assert len(cells) == 24 * height, "there is a hole in the grid"


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_every_panel_explains_itself(panel: dict[str, Any]) -> None:
    assert panel["title"] and len(panel["description"]) > 30 and panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["targets"]


def test_every_datasource_is_the_variable() -> None:
    variable = {"type": "prometheus", "uid": "${datasource}"}
    for name, target in TARGETS:
        assert target["datasource"] == variable, name
    assert all(panel["datasource"] == variable for panel in PANELS)
    assert all(v["datasource"] == variable for v in DASHBOARD["templating"]["list"] if v["type"] == "query")


def test_every_variable_is_defined_and_used() -> None:
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z_]\w*)", json.dumps(DASHBOARD)))  # not $1 of a label_replace
    assert used - {"__rate_interval", "__range", "__all"} == defined == {"datasource", "node", "namespace"}


def test_all_namespaces_includes_jobs_without_one() -> None:
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    for name in ("node", "namespace"):
        assert variables[name]["allValue"] == ".*" and variables[name]["multi"] and variables[name]["includeAll"]
    for name, expression in EXPRESSIONS:
        assert not re.search(r'(?<!~)"\$(node|namespace)"', expression), f"{name}: several values need =~"


@each_expression
def test_only_names_that_exist(name: str, expression: str) -> None:
    names = metric_names(expression)
    assert names, "no metric found: does this test still parse the expression?"
    assert names <= {family.name for family in FAMILIES} | RECORDED
    for list_of_labels in GROUPING.findall(expression):
        assert {label.strip() for label in list_of_labels.split(",")} <= LABELS
    for matchers in re.findall(r"\{([^}]*)\}", expression):
        assert {matcher[0] for matcher in re.findall(r'(\w+)(=~|!~|!=|=)"', matchers)} <= LABELS


@each_expression
def test_windows_are_grafanas_but_for_the_deliberate_ones(name: str, expression: str) -> None:
    state_window = format_duration(Settings().diagnosis.window)  # utilization of the present holder
    lately = format_duration(Settings().policy.candidate_after)  # who was there, and is silent now
    for function, window in re.findall(r"(\w+)\([^()\[]*\[([^\]]*)\]", expression):
        allowed = {
            "rate": {"$__rate_interval"},
            "increase": {"$__range", state_window},
            "avg_over_time": {"$__range"},
            "last_over_time": {"$__range", "$__range:30m", lately},
            "sum_over_time": {"$__range:30m"},  # of recordings that each look back over 30 minutes
            "max_over_time": {"$__range:30m"},
        }
        assert window in allowed[function], f"{function}[{window}]"
    assert expression.count("[") == len(re.findall(r"\w+\([^()\[]*\[", expression))


def test_windows_and_thresholds_come_from_the_settings() -> None:
    """With odd ones, none of the defaults is left."""
    defaults = Settings()
    odd = defaults._replace(
        policy=defaults.policy._replace(candidate_after=77 * 60.0),
        diagnosis=defaults.diagnosis._replace(window=13 * 60.0),
        alerts=defaults.alerts._replace(fresh_max=131.0),
    )
    (text,) = build_all(odd).values()
    expressions = [target["expr"] for panel in json.loads(text)["panels"] for target in panel.get("targets", [])]
    assert not re.search(r"\[(1h|10m)\]|\b600\b|>= 3600\b|\b120\)", "\n".join(expressions))
    assert not re.search(r"\b1h\b|\b10m\b|\b8m\b", text)
    assert all(part in text for part in ("77m", "[13m]", ">= 4620", "> 780", ", 131)"))


@each_expression
def test_identity_is_joined_through_topk(name: str, expression: str) -> None:
    """Two series of one GPU (a driver update, two scrape jobs) must not break a join."""
    if name.startswith("Exporters"):
        return  # counted, not joined
    for match in re.finditer(r"gpu_(allocation_|mig_|exporter_build_)?info\b", expression):
        before = expression[: match.start()].removesuffix("last_over_time(")
        assert re.search(r"group_left \([\w, ]+\) topk by \([\w, ]+\) \(1, max by \([\w, ]+\) \($", before), before[
            -200:
        ]
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
    for panel in PANELS:
        defaults = panel["fieldConfig"]["defaults"]
        if panel["type"] == "stat":
            assert defaults["noValue"] == "unknown", panel["title"]
        if panel["type"] == "timeseries":
            assert defaults["custom"]["spanNulls"] is False, panel["title"]


def test_the_table_of_holders_shows_or_hides_every_label() -> None:
    """A label that is neither named nor hidden would appear as a column at the end."""
    labels = {"node", "instance", *ALLOCATION_LABELS, "holder", "user", "account", "state", "name", "Time"}
    values = {column for column in HOLDER_COLUMNS if column.startswith("Value #")}
    assert set(HOLDER_COLUMNS) - values | set(HOLDER_HIDDEN) == labels
    assert not set(HOLDER_COLUMNS) & set(HOLDER_HIDDEN)
    (table,) = (panel for panel in PANELS if panel["title"].startswith("Holders"))
    assert values == {f"Value #{target['refId']}" for target in table["targets"]}
    assert table["options"]["sortBy"] == [{"displayName": "Idle for", "desc": True}]


def test_the_states_are_those_of_the_diagnosis() -> None:
    code = (ROOT / "exporter" / "gpu_exporter" / "diagnosis" / "state.py").read_text("utf-8")
    assert set(STATE_COLORS) == set(re.findall(r'Verdict\("(\w+)"', code))
    named = {
        state for name in re.findall(r'state[=!]~?"([^"]+)"', STORED.replace('\\"', '"')) for state in name.split("|")
    }
    assert named <= set(STATE_COLORS)


def overridden(panel: dict[str, Any]) -> Iterator[str]:
    for override in panel["fieldConfig"].get("overrides", []):
        yield override["matcher"]["options"]


def test_overrides_name_fields_that_exist() -> None:
    for panel in PANELS:
        renamed: set[str] = set()
        for transformation in panel.get("transformations", []):
            renamed |= set(transformation["options"].get("renameByName", {}).values())
        legends = {target.get("legendFormat") for target in panel["targets"]}
        for name in overridden(panel):
            assert name in renamed | legends, f"{panel['title']}: {name}"
