"""Copies of the alerts that Grafana itself evaluates, for sites whose Prometheus may not alert.

    python -m tools.grafana_alerts [--datasource UID]      writes alerts/grafana/gpu-exporter.yaml from alerts/src

A site's own parameters are given as to tools.rules (--set, --config.file).

A site loads either these alerts or those of alerts/rules, never both: each incident would be reported twice. The
recordings always remain in Prometheus; the chart then omits the alerts there (prometheusRule.alertsIn: grafana).

Grafana's templates cannot query. An annotation that queries in Prometheus reads further queries of the rule here
(alerts.parameters.SECOND). docs/other-exporters.md links the places of Grafana that show how it treats them. Hence:

- A row has all labels of its alert, and those that the text reads; each alert has at most one row. $values has the row
  with the alert's labels, or any row that has more or fewer.
- Each query has one row more, whose labels match no alert. Without a row of any query, the whole rule has no data.
- The text reads a value only after `with`: one that is missing fails in a function.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import string
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

import yaml
from alerts.parameters import HOLDER, SECOND, Fact

from gpu_exporter.common.config.load import ConfigError
from tools.files import ROOT, write_or_check
from tools.rules import (
    HEADER,
    PARAMETER,
    SOURCES,
    Blocks,
    BuildError,
    add_parameters,
    build_rules,
    chosen_parameters,
    fill_text,
    read_parameters,
)

PATH = ROOT / "alerts" / "grafana" / "gpu-exporter.yaml"
DATASOURCE = "prometheus"


def render(parameters: Mapping[str, tuple[str, str]], datasource: str) -> str:
    """Returns a file for Grafana's provisioning/alerting. `datasource`: UID of the Prometheus."""
    kept = {name: (f"${{{name}}}",) * 2 for name in SECOND}
    groups = []
    for path in sorted(SOURCES.glob("*.yaml")):
        for group in yaml.safe_load(build_rules(path.read_text("utf-8"), {**parameters, **kept}, path.name))["groups"]:
            if rules := [_convert(rule, parameters, datasource) for rule in group["rules"] if "alert" in rule]:
                groups.append(
                    {"orgId": 1, "name": group["name"], "folder": "GPU", "interval": group["interval"], "rules": rules}
                )
    body = yaml.dump({"apiVersion": 1, "groups": groups}, sort_keys=False, width=10_000, Dumper=Blocks)
    return HEADER.format(name="*.yaml").replace("rules.py", "grafana_alerts.py") + body


def second_query(alert: str, fact: Fact) -> str:
    """Returns PromQL for the rows of `fact`, each with all labels of the same holder's alert. Adds one row that matches
    no alert.
    """
    return (
        f"0 * (\n{textwrap.indent(alert.strip(), '  ')}\n)\n+ on ({HOLDER}) group_left ({fact.labels}) (\n"
        f'  {fact.query}\n)\nor label_replace(vector(0), "row", "of no alert", "", "")\n'
    )


def _query(ref: str, expression: str, datasource: str) -> dict[str, Any]:
    return {
        "refId": ref,
        "relativeTimeRange": {"from": 600, "to": 0},
        "datasourceUid": datasource,
        "model": {"refId": ref, "expr": expression, "instant": True, "range": False},
    }


def _convert(rule: Mapping[str, Any], parameters: Mapping[str, tuple[str, str]], datasource: str) -> dict[str, Any]:
    seconds, annotations = [], {}
    refs = iter(string.ascii_uppercase[2:])
    for name, text in rule["annotations"].items():
        kept = PARAMETER.fullmatch(text)
        if kept is None or kept[1] not in SECOND:
            annotations[name] = text.replace("$value", "$values.A.Value")
            continue
        read = SECOND[kept[1]].text
        for fact, second in SECOND[kept[1]].facts.items():
            ref = next(refs)
            expression = fill_text(second_query(rule["expr"], second), parameters, rule["alert"])
            seconds.append(_query(ref, expression, datasource))
            read = re.sub(rf"\$fact\.{fact}\b", f"$values.{ref}", read)
        annotations[name] = fill_text(read, parameters, rule["alert"])
    # Every row of the query is an alert, even if its value is 0, as in Prometheus.
    condition = {
        "refId": "B",
        "datasourceUid": "__expr__",
        "model": {"refId": "B", "type": "math", "expression": "1 + 0 * $A"},
    }
    return {
        "uid": "gpu-" + hashlib.sha256(rule["alert"].encode()).hexdigest()[:16],
        "title": rule["alert"],
        "condition": "B",
        "data": [_query("A", rule["expr"], datasource), condition, *seconds],
        "noDataState": "OK",  # without rows there is no alert
        "execErrState": "KeepLast",  # if Prometheus does not answer, no alert is raised or resolved
        "for": rule.get("for", "0s"),
        "keepFiringFor": rule.get("keep_firing_for", "0s"),
        "labels": dict(rule["labels"]),
        "annotations": annotations,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Build Grafana's copies of the alerts.", allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--datasource", default=DATASOURCE, metavar="UID", help=f"default {DATASOURCE}")
    add_parameters(parser)
    options = parser.parse_args(arguments)
    try:
        text = render(read_parameters(*chosen_parameters(options)), options.datasource)
    except (BuildError, ConfigError) as exc:
        print(f"tools.grafana_alerts: {exc}", file=sys.stderr)
        return 2
    return write_or_check({PATH: text}, options.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
