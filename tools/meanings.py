"""Generates the table of meanings for Alertmanager: alerts/alertmanager/meanings.tmpl.

An alert's annotation `cause` looks like `cpu_quota (high confidence) cpus=4 throttled_ratio=40%`. The templates turn it
into the sentence of the table with these numbers, and into the changes for owner and site.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from gpu_exporter.common.model.meanings import CAUSES, QUANTITY, sentence
from tools.files import ROOT

PATH = ROOT / "alerts" / "alertmanager" / "meanings.tmpl"
COMMENT = (
    "{{/* Generated from the table of meanings by tools/meanings.py: do not edit. Each gets the annotation cause. */}}"
)
NAME = '{{ define "gpu.cause.name" }}{{ reReplaceAll "^([a-z_]+) .([a-z]+) .*$" "${1}, ${2} confidence" . }}{{ end }}'


def build_page() -> Mapping[Path, str]:
    why = [(name, text) for name, each in CAUSES.items() for text in (each.says, each.title)]
    owner = [(name, text) for name, each in CAUSES.items() for text in (each.number, each.owner) if text]
    site = [(name, each.site) for name, each in CAUSES.items() if each.site]
    parts = [
        NAME,
        _define("gpu.cause.why", why, "{{ . }}"),
        _define("gpu.cause.owner", owner),
        _define("gpu.cause.site", site),
    ]
    return {PATH: "\n".join([COMMENT, *parts]) + "\n"}


def _define(name: str, texts: list[tuple[str, str]], otherwise: str = "") -> str:
    """Returns a template that finds the cause in the annotation, and prints its first text for which the annotation has
    all numbers.
    """
    branches = [
        f'{{{{ {"else " if at else ""}if match "{_pattern(cause, text)}" . }}}}{_replace(cause, text)}'
        for at, (cause, text) in enumerate(texts)
    ]
    return f'{{{{ define "{name}" }}}}{"".join(branches)}{{{{ else }}}}{otherwise}{{{{ end }}}}{{{{ end }}}}'


def _pattern(cause: str, text: str) -> str:
    """Returns a regular expression (RE2) for annotations with this cause and all numbers of the text, by name."""
    names = sorted(set(QUANTITY.findall(text)))
    return f"^{cause} .*" + "".join(f" {name}=([^ ]+).*" for name in names) + "$" if names else f"^{cause} "


def _replace(cause: str, text: str) -> str:
    names = sorted(set(QUANTITY.findall(text)))
    if not names:
        return sentence(text)
    numbered = QUANTITY.sub(lambda match: f"${{{names.index(match[1]) + 1}}}", text.replace("$", "$$"))
    first = numbered if re.match(r"\$\{", numbered) else f"{numbered[0].upper()}{numbered[1:]}"
    return f'{{{{ reReplaceAll "{_pattern(cause, text)}" "{first}." . }}}}'
