"""Converts the Alertmanager configuration to an object of the Prometheus operator:
alerts/alertmanager/alertmanagerconfig.yaml.

The API is monitoring.coreos.com/v1alpha1, which every operator since 0.43 serves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tools.files import ROOT
from tools.rules import Blocks

FOLDER = ROOT / "alerts" / "alertmanager"
HEADER = """\
# Generated from alertmanager.yaml by tools/alertmanager_config.py: do not edit. For sites whose Alertmanager belongs to
# the Prometheus operator. Change the addresses of operations and of your pager.
#
#   kubectl -n monitoring create configmap gpu-exporter-templates \\
#     --from-file=gpu-exporter.tmpl --from-file=meanings.tmpl --from-file=owners.tmpl
#   kubectl -n monitoring apply -f alertmanagerconfig.yaml
#
# An AlertmanagerConfig has no place for templates and the mail server. By default it gets only the alerts of its own
# namespace. So the Alertmanager object must name it, or all mails to owners are missing:
#
#   spec:
#     alertmanagerConfiguration:
#       name: gpu-exporter
#       global: {smtp: {smartHost: {host: mail.example.org, port: "25"}, from: gpu-exporter@example.org}}
#       templates:
#         - configMap: {name: gpu-exporter-templates, key: gpu-exporter.tmpl}
#         - configMap: {name: gpu-exporter-templates, key: meanings.tmpl}
#         - configMap: {name: gpu-exporter-templates, key: owners.tmpl}
#
# If the Alertmanager has another configuration already, select this object with alertmanagerConfigSelector instead, set
# alertmanagerConfigMatcherStrategy.type to None, and add the templates to that configuration.
"""
ROUTE = ("receiver", "group_by", "group_wait", "group_interval", "repeat_interval", "active_time_intervals", "continue")
MATCHER = re.compile(r'\s*(?P<name>[a-zA-Z_]\w*)\s*(?P<type>=~|!~|!=|=)\s*"(?P<value>[^"\\]*)"\s*')


def build_page() -> Mapping[Path, str]:
    """Returns the generated file. Raises ValueError for a matcher or key that cannot be converted."""
    return {FOLDER / "alertmanagerconfig.yaml": render((FOLDER / "alertmanager.yaml").read_text("utf-8"))}


def render(text: str) -> str:
    """Returns an AlertmanagerConfig with the routes, receivers, intervals and inhibitions of a configuration."""
    config = yaml.safe_load(text)
    known = ("global", "templates", "route", "time_intervals", "inhibit_rules", "receivers")  # the first two: HEADER
    _refuse_others(config, known, "the file")
    spec = {
        "route": _route(config["route"]),
        "inhibitRules": [_inhibit(rule) for rule in config["inhibit_rules"]],
        "muteTimeIntervals": [_interval(each) for each in config["time_intervals"]],
        "receivers": [_receiver(each) for each in config["receivers"]],
    }
    body = {
        "apiVersion": "monitoring.coreos.com/v1alpha1",
        "kind": "AlertmanagerConfig",
        "metadata": {"name": "gpu-exporter"},
        "spec": spec,
    }
    return HEADER + yaml.dump(body, sort_keys=False, width=10_000, Dumper=Blocks)


def _refuse_others(given: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raises ValueError for a key that is not converted, because the object could otherwise lack a route or a mute."""
    if unknown := sorted(given.keys() - known):
        raise ValueError(
            f"alertmanager.yaml: {where} has {', '.join(unknown)}: tools/alertmanager_config.py must convert it"
        )


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def _route(route: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    _refuse_others(route, (*ROUTE, "matchers", "routes"), f"the route to {route.get('receiver')}")
    for key, value in route.items():
        if key == "routes":
            found[key] = [_route(child) for child in value]
        elif key == "matchers":
            found[key] = _matchers(value)
        else:
            found[_camel(key)] = value
    return found


def _matchers(texts: Sequence[str]) -> list[dict[str, str]]:
    found = []
    for text in texts:
        match = MATCHER.fullmatch(text)
        if match is None:
            raise ValueError(f'alertmanager.yaml: {text!r} cannot be read: write it as name=~"value"')
        found.append({"name": match["name"], "matchType": match["type"], "value": match["value"]})
    return found


def _inhibit(rule: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_others(rule, ("source_matchers", "target_matchers", "equal"), "an inhibition")
    return {
        "sourceMatch": _matchers(rule["source_matchers"]),
        "targetMatch": _matchers(rule["target_matchers"]),
        "equal": rule["equal"],
    }


def _interval(interval: Mapping[str, Any]) -> dict[str, Any]:
    parts = []
    for part in interval["time_intervals"]:
        _refuse_others(part, ("weekdays", "times"), f"the time interval {interval['name']}")
        times = [{"startTime": each["start_time"], "endTime": each["end_time"]} for each in part["times"]]
        parts.append({"weekdays": part["weekdays"], "times": times})
    return {"name": interval["name"], "timeIntervals": parts}


def _receiver(receiver: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_others(receiver, ("name", "email_configs"), f"the receiver {receiver['name']}")
    found: dict[str, Any] = {"name": receiver["name"]}
    if "email_configs" in receiver:
        found["emailConfigs"] = [_mail(mail) for mail in receiver["email_configs"]]
    return found


def _mail(mail: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_others(mail, ("to", "headers", "text", "html", "send_resolved"), f"a mail to {mail.get('to')}")
    found = {_camel(key): value for key, value in mail.items() if key != "headers"}
    found["headers"] = [{"key": key, "value": value} for key, value in mail["headers"].items()]
    return found
