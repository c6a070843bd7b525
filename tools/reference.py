"""Generates docs/metrics.md from the metric families that the code declares."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_exporter.agent.collectors import registry
from gpu_exporter.agent.collectors.names import COLLECTORS
from gpu_exporter.agent.exposition.catalog import DEVICE_LABELS, MIG_LABELS, fixed_groups
from gpu_exporter.common.model.metrics import Family
from tools.questions import render_questions

# Unit by the suffix of a name, following the Prometheus conventions.
UNITS = {
    "_gpu_seconds_total": "GPU-seconds",
    "_seconds_total": "seconds",
    "_timestamp_seconds": "Unix seconds",
    "_seconds": "seconds",
    "_bytes_total": "bytes",
    "_bytes": "bytes",
    "_joules_total": "joules",
    "_watts": "watts",
    "_celsius": "°C",
    "_hertz": "hertz",
    "_ratio": "0 to 1",
    "_bytes_per_second": "bytes per second",
    "_info": "1",
    "_state": "number",
    "_up": "0 or 1",
    "_success": "0 or 1",
    "_supported": "0 or 1",
    "_pending": "0 or 1",
    "_failed": "0 or 1",
    "_nvlinks_active": "count",
    "_active": "0 or 1",
    "_allocated": "0 or 1",
    "_action": "number",
    "_fabric_status": "number",
    "_allocatable": "0 or 1",
    "_complete": "0 or 1",
    "_condition": "1",
    "_missing": "1",
    "_cause": "1",
    "_unknown": "1",
}


def unit_of(name: str) -> str:
    """Returns the unit that the suffix of a name shows, otherwise a count."""
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), "count")


def _list(labels: Sequence[str]) -> str:
    return ", ".join(f"`{label}`" for label in labels)


def _meaning(family: Family, shown: dict[str, str]) -> str:
    """Returns the help text. If another family has the same help, refers to that family. `shown`: by help text, the
    first family.
    """
    first = shown.setdefault(family.help, family.name)
    return family.help if first == family.name else f"As `{first}`"


def render_reference() -> str:
    """Returns the text of the page."""
    out = [
        "# Metrics",
        "",
        "Generated from the code by `make generate`. All units are base units. If hardware or rights do not allow a",
        "series, it is absent, never 0. `--collector.NAME` and `--no-collector.NAME` switch a collector. The exporter",
        "reads its values in every cycle, unless a note names another interval.",
        "",
        f"Every series of a section `GPU:` has the labels {_list(DEVICE_LABELS)}, and of a section `MIG instance:`",
        f"{_list(MIG_LABELS)}. An empty cell means: no more labels, no single source, all generations.",
    ]
    groups: list[tuple[str, str, tuple[str, ...], tuple[Family, ...]]] = []
    for collector in registry.ALL:
        notes = []
        if not COLLECTORS[collector.name][0]:
            notes.append(f"Off by default: `--collector.{collector.name}`.")
        if collector.every_s:
            notes.append(f"Read every {collector.every_s:g} s.")
        note = " ".join(notes)
        if collector.families:
            groups.append((f"GPU: collector `{collector.name}`", note, DEVICE_LABELS, collector.families))
        if collector.instance_families:
            title = f"MIG instance: collector `{collector.name}`"
            groups.append((title, note, MIG_LABELS, collector.instance_families))
    groups += [(title, "", labels, families) for title, labels, families in fixed_groups()]
    shown: dict[str, str] = {}
    for title, note, labels, families in groups:
        out += ["", f"## {title}", ""]
        if note:
            out += [note, ""]
        if labels and labels not in (DEVICE_LABELS, MIG_LABELS):
            out += [f"Labels of every series: {_list(labels)}.", ""]
        out.append("| name | type | unit | more labels | meaning | source | generations |")
        out.append("| --- | --- | --- | --- | --- | --- | --- |")
        for family in families:
            cells = (
                f"`{family.name}`",
                family.type,
                unit_of(family.name),
                _list(family.labels),
                _meaning(family, shown),
                family.source or "",
                family.generations or "",
            )
            out.append(f"| {' | '.join(cells)} |")
    return "\n".join([*out, *render_questions()]) + "\n"
