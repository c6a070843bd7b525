"""Single values of the configuration file: how each value is parsed and checked."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpu_exporter.common.config.defaults import DURATIONS, Settings
from gpu_exporter.common.durations import format_duration, parse_duration
from gpu_exporter.common.plain import nearest

CHOICES = {  # settings that are words, with their allowed values
    "identity.user": ("auto", "name", "uid", "hmac", "none"),
    "actions.mode": ("none", "shadow", "act"),
    "actions.demand": ("needed", "ignored"),
    "causes.files": ("none", "trace"),
    "causes.steps": ("shown", "delay"),
    "training.files": ("none", "read"),
}
ACTIONS = ("suspend", "deactivate", "stop", "requeue", "cancel")  # actions on a holder (docs/actions.md)
MATCHER = r'''[A-Za-z_]\w*(?:=|!=|=~|!~)"[^"\\{}$]*"'''  # PromQL, without escapes
MATCHERS = f"(?:{MATCHER}(?:, ?{MATCHER})*)?"
# Published to everyone, so without a user and password.
ADDRESS = r"""(?:https?://[^\s"'`{}$<>\\@/?#]+(?:[/?#][^\s"'`{}$<>\\]*[^\s"'`{}$<>\\/])?)?"""
LABEL = r"[A-Za-z_]\w*"
POD = r"[\w.*?-]+/[\w.*?-]+"
DOMAIN = r"[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?"
KIND = rf"(?:{DOMAIN}/)?[A-Za-z][A-Za-z0-9-]*"
LABEL_KEY = rf"(?:{DOMAIN}/)?[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?"
POD_LABEL = rf"{LABEL_KEY}(?:=(?:[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?)?)?"
PATTERNS = {  # settings that are texts: their format, and its description for errors
    "attribution.slurm_pods": (
        f"(?:{POD}(?:, ?{POD})*)?",
        "pods as NAMESPACE/POD with * and ?, such as slurm/*-worker-*",
    ),
    "actions.kinds": (
        f"(?:(?:{'|'.join(ACTIONS)})(?:, ?(?:{'|'.join(ACTIONS)}))*)?",
        f"a list of {', '.join(ACTIONS)}",
    ),
    "diagnosis.without": (r"(?:[a-z_]+(?:, ?[a-z_]+)*)?", "a list of causes, or stalls, such as interactive, stalls"),
    "actions.override": (r"[\x20-\x7e]{0,200}", "one line of at most 200 characters"),
    "policy.serving_kinds": (f"(?:{KIND}(?:, ?{KIND})*)?", "a list of kinds such as example.com/ModelServer, Bot"),
    "policy.serving_labels": (
        f"(?:{POD_LABEL}(?:, ?{POD_LABEL})*)?",
        "a list of labels such as example.com/role=server, serves",
    ),
    "policy.tenant_label": (f"(?:{LABEL_KEY})?", "the key of a label such as example.org/team"),
    "policy.pause_when": (r"[\x20-\x7e]*", "one expression of PromQL, without line breaks"),
    "policy.system_namespaces": (
        r"(?:[a-z0-9-]+(?:, ?[a-z0-9-]+)*)?",
        "a list of namespaces, such as kube-system, gpu-operator",
    ),
    "policy.help_url": (ADDRESS, "an address such as https://docs.example.org/gpu, without a slash at its end"),
    "alerts.selector": (MATCHERS, 'matchers of PromQL such as job="gpu-exporter"'),
    "alerts.reconciler": (MATCHERS, 'matchers of PromQL such as job="gpu-exporter-reconciler"'),
    "alerts.slurm_collector": (MATCHERS, 'matchers of PromQL such as job="gpu-exporter-slurm-collector"'),
    "alerts.dcgm": (MATCHERS, 'matchers of PromQL such as job="dcgm-exporter"'),
    "alerts.nvidia_smi": (MATCHERS, 'matchers of PromQL such as job="nvidia-gpu-exporter"'),
    "alerts.grafana": (ADDRESS, "an address such as https://grafana.example.org, without a slash at its end"),
    "alerts.exclude": (MATCHERS, 'matchers of PromQL such as namespace!="ops", account!~"class-.*"'),
    "alerts.team_label": (LABEL, "a label of Prometheus"),
    "alerts.queue_label": (LABEL, "a label of Prometheus"),
    "alerts.pod_labels": (
        r"(?:label_\w+(?:, ?label_\w+){0,2})?",
        "at most three labels such as label_project",
    ),
    "alerts.pool_label": (LABEL, "a label of Prometheus"),
    "alerts.resources": (
        r"[\w|().+*?]+",
        "a regular expression for resources as kube-state-metrics writes them, such as nvidia_com_gpu|example_com_.+",
    ),
}

# Durations that may be 0s, which switches them off.
MAY_BE_ZERO = frozenset(("policy.host_delay_max", "actions.host_work_max"))
MOST = {  # upper limits of numbers, with the reason
    "actions.hour_max": (16, "the journal keeps this many actions"),
    "alerts.dcgm_idle_max_ratio": (
        0.01,
        "higher activity is work, and no second witness would show this work on a MIG instance",
    ),
}
LEAST = {  # lower limits of durations in seconds, with the reason
    "sampling.interval": (0.2, "GPM compares two moments over 100 ms apart; otherwise every second cycle is unknown"),
}


def parse_value(section: str, key: str, text: str) -> float | str:
    """Returns the value of a setting. Raises ValueError with the reason as text."""
    kind = type(getattr(getattr(Settings(), section), key))
    is_duration = f"{section}.{key}" in DURATIONS
    try:
        value: float | str = parse_duration(text) if is_duration else kind(text)
    except ValueError as exc:
        wanted = "a duration with its unit, e.g. 90s" if is_duration else f"a number ({kind.__name__})"
        raise ValueError(f"{text!r} is not {wanted}") from exc
    if fault := check_value(section, key, value):
        raise ValueError(fault)
    return value


def check_value(section: str, key: str, value: float | str) -> str:
    """Returns why a value is invalid, "" if it is valid. Numbers other than durations and counts must be 0 to 1."""
    if isinstance(value, str):
        if pattern := PATTERNS.get(f"{section}.{key}"):
            if not re.fullmatch(pattern[0], value):
                if pattern[0] == ADDRESS:  # not quoted, since it may contain a password
                    return f"expected {pattern[1]}, and without a user"
                return f"{value!r} is not {pattern[1]}"
            if f"{section}.{key}" == "alerts.resources":
                try:
                    re.compile(value)
                except re.error as exc:
                    return f"{value!r} is not a regular expression: {exc}"
            return ""
        choices = CHOICES[f"{section}.{key}"]
        return "" if value in choices else f"{value!r} is not one of {', '.join(choices)}"
    if value <= 0 and not (value == 0 and f"{section}.{key}" in MAY_BE_ZERO):
        return "must be above 0"
    if (most := MOST.get(f"{section}.{key}")) and value > most[0]:
        return f"must be at most {most[0]}: {most[1]}"
    if f"{section}.{key}" not in DURATIONS and isinstance(value, float) and value > 1:
        return f"{value:g} is not a share between 0 and 1"
    if (least := LEAST.get(f"{section}.{key}")) and value < least[0]:
        return f"must be at least {format_duration(least[0])}: {least[1]}"
    return ""


def unknown_key(place: str, key: str, known: Sequence[str]) -> str:
    """Returns the error for an unknown key, with the known key that was probably meant."""
    close = nearest(key, known)
    return f"{place}: unknown key" + (f", did you mean {close}?" if close else f"; known: {', '.join(known)}")
