"""The oldest versions in docs/interfaces.md follow from what the rules and the Alertmanager configuration use.

Sources: the changelogs of Prometheus, Alertmanager and the Prometheus operator. A new function needs its line here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import promql_parser as promql
import yaml
from tests.unit.test_rules import RULES, expressions

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "interfaces.md").read_text("utf-8")
Version: TypeAlias = tuple[int, int]
OLD: Version = (0, 0)  # older than any version of the table

QUERIES: dict[str, Version] = {
    "clamp": (2, 26),
    "last_over_time": (2, 26),
    "group": (2, 20),
    **dict.fromkeys(
        [
            *(
                "absent",
                "clamp_max",
                "clamp_min",
                "increase",
                "label_join",
                "label_replace",
                "rate",
                "time",
                "timestamp",
            ),
            *("avg_over_time", "count_over_time", "max_over_time", "min_over_time", "sum_over_time"),
            *("avg", "count", "count_values", "max", "min", "sum", "topk", "offset"),
        ],
        OLD,
    ),
}
FIELDS: dict[str, Version] = {
    "keep_firing_for": (2, 42),
    **dict.fromkeys(["alert", "annotations", "expr", "for", "labels", "record", "name", "interval", "rules"], OLD),
}
TEMPLATES: dict[str, Version] = {
    "humanizePercentage": (2, 11),
    **dict.fromkeys(["humanize", "humanize1024", "humanizeDuration", "humanizeTimestamp", "match", "query"], OLD),
    **dict.fromkeys(["reReplaceAll", "sortByLabel"], OLD),
    **dict.fromkeys(["and", "else", "end", "eq", "ge", "if", "len", "lt", "ne", "or", "printf", "range", "with"], OLD),
}
ALERTMANAGER: dict[str, Version] = {
    "active_time_intervals": (0, 24),
    "time_intervals": (0, 24),
    **dict.fromkeys(["matchers", "source_matchers", "target_matchers", "start_time", "end_time", "weekdays"], (0, 22)),
    **dict.fromkeys(["global", "templates", "route", "routes", "inhibit_rules", "receivers", "name", "receiver"], OLD),
    **dict.fromkeys(["group_by", "group_wait", "group_interval", "repeat_interval", "equal", "times"], OLD),
    **dict.fromkeys(["smtp_from", "smtp_require_tls", "smtp_smarthost", "email_configs", "headers", "Subject"], OLD),
    **dict.fromkeys(["to", "text", "html", "send_resolved"], OLD),
}
MAILS = {
    "reReplaceAll",
    "match",
    *("and", "define", "else", "end", "eq", "if", "len", "or", "range", "template", "with"),
}


def used_in(expression: str) -> Iterator[str]:
    """The functions, aggregations and modifiers of an expression."""
    for each in expressions(promql.parse(expression)):
        match each:
            case promql.Call():
                yield each.func.name
            case promql.AggregateExpr():
                yield str(each.op)
            case promql.VectorSelector() | promql.SubqueryExpr():
                if isinstance(each, promql.SubqueryExpr):
                    yield "subquery"
                if each.offset:
                    yield "offset"
                if each.at:
                    yield "@"


def words(text: str) -> set[str]:
    """Functions and keywords of the templates in a text."""
    inner = " ".join(re.findall(r"{{(.*?)}}", text, flags=re.DOTALL))
    inner = re.sub(r'"(?:[^"\\]|\\.)*"|`[^`]*`|/\*.*?\*/|[$.][\w.]*', " ", inner, flags=re.DOTALL)
    return set(re.findall(r"[A-Za-z]\w*", inner))


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys(each)


def told(program: str) -> Version:
    """The oldest version of a program in the table."""
    found = re.search(rf"^\| {program} \| (\d+)\.(\d+) \|", GUIDE, flags=re.MULTILINE)
    assert found, program
    return int(found[1]), int(found[2])


def test_the_oldest_prometheus_is_that_of_the_newest_part_of_the_rules() -> None:
    files = [yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / "alerts" / "rules").rglob("*.yaml")]
    fields = {key for each in files for group in each["groups"] for key in group} | {key for r in RULES for key in r}
    assert fields == FIELDS.keys()
    assert {name for rule in RULES for name in used_in(rule["expr"])} == QUERIES.keys()
    annotated = (text for rule in RULES for part in ("labels", "annotations") for text in rule.get(part, {}).values())
    assert words(" ".join(annotated)) == TEMPLATES.keys()
    needed = max(version for part in (QUERIES, FIELDS, TEMPLATES) for version in part.values())
    assert told("Prometheus") == needed == (2, 42)


def test_the_oldest_alertmanager_is_that_of_the_newest_part_of_its_configuration() -> None:
    folder = ROOT / "alerts" / "alertmanager"
    assert set(keys(yaml.safe_load((folder / "alertmanager.yaml").read_text("utf-8")))) == ALERTMANAGER.keys()
    assert words("".join(path.read_text("utf-8") for path in folder.glob("*.tmpl"))) == MAILS
    assert told("Alertmanager") == max(ALERTMANAGER.values()) == (0, 24)


def test_the_oldest_vmalert_is_the_one_that_reads_the_rules_in_the_tests() -> None:
    module = (ROOT / "tests" / "testbed" / "go" / "vmalert" / "go.mod").read_text("utf-8")
    assert f"github.com/VictoriaMetrics/VictoriaMetrics v{'.'.join(map(str, told('vmalert')))}.0 " in module
