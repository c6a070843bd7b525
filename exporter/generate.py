"""Writes what is generated from one source: gpu_exporter/defaults.py and docs/metrics.md.

Run by `make generate`; a test compares the files with what this would write. Usage: generate.py [--check]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml

EXPORTER = Path(__file__).resolve().parent
ROOT = EXPORTER.parent
DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def render_defaults(text: str) -> str:
    """Turn defaults.yaml into named tuples, so that a start needs no YAML parser and mypy sees every key."""
    comments, section = {}, ""
    for line in text.splitlines():
        if heading := re.match(r"(\w+):", line):
            section = heading[1]
        elif entry := re.match(r"  (\w+):[^#]*#\s*(.*)$", line):
            comments[section, entry[1]] = entry[2]
    sections = yaml.safe_load(text)
    out = [
        '"""Generated from defaults.yaml by exporter/generate.py: do not edit.',
        "",
        "Durations are seconds, ratios 0 to 1.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "from typing import NamedTuple",
    ]
    durations = sorted(
        f"{section}.{key}"
        for section, keys in sections.items()
        for key, value in keys.items()
        if DURATION.fullmatch(str(value))
    )
    for section, keys in sections.items():
        out += ["", "", f"class {section.capitalize()}(NamedTuple):"]
        out.append(f'    """Keys of the section `{section}`."""')
        out.append("")
        for key, value in keys.items():
            match = DURATION.fullmatch(str(value))
            if match:
                annotation, default = "float", repr(float(match[1]) * SECONDS[match[2]])
                reason = "seconds; " + comments.get((section, key), "")
            else:
                annotation, default, reason = (
                    type(value).__name__,
                    repr(value),
                    comments.get((section, key), ""),
                )
            out += [f"    {key}: {annotation} = {default}", f'    """{reason.strip("; ")}"""']
    out += ["", "", "class Settings(NamedTuple):"]
    out += ['    """Every window and threshold."""', ""]
    out += [f"    {name}: {name.capitalize()} = {name.capitalize()}()" for name in sections]
    out += ["", "", "DURATIONS = frozenset(", "    ("]
    out += [f'        "{name}",' for name in durations]
    out += ["    )", ")", '"""Keys that are written with a unit, e.g. 90s."""']
    return "\n".join(out) + "\n"


def render_reference() -> str:
    """The metrics reference page, from the families that the code declares."""
    from gpu_exporter import collectors
    from gpu_exporter.exposition.catalog import DEVICE_LABELS, MIG_LABELS, fixed_groups
    from gpu_exporter.model import Family

    out = [
        "# Metrics",
        "",
        "Generated from the code by `make generate`; a test compares. Base units throughout; a series that the",
        "hardware or the privilege does not allow is absent, never 0.",
    ]
    groups: list[tuple[str, tuple[str, ...], tuple[Family, ...]]] = []
    for collector in collectors.ALL:
        if collector.families:
            groups.append((f"GPU: collector `{collector.name}`", DEVICE_LABELS, collector.families))
        if collector.instance_families:
            title = f"MIG instance: collector `{collector.name}`"
            groups.append((title, MIG_LABELS, collector.instance_families))
    for title, labels, families in (*groups, *fixed_groups()):
        out += ["", f"## {title}", ""]
        if labels:
            out += [f"Labels on every series: {', '.join(f'`{label}`' for label in labels)}.", ""]
        out += ["| name | type | more labels | meaning | source |", "| --- | --- | --- | --- | --- |"]
        for family in families:
            more = ", ".join(f"`{label}`" for label in family.labels) or "-"
            out.append(f"| `{family.name}` | {family.type} | {more} | {family.help} | {family.source or '-'} |")
    return "\n".join(out) + "\n"


def outputs() -> dict[Path, str]:
    """Every generated file with its content."""
    package = EXPORTER / "gpu_exporter"
    return {
        package / "defaults.py": render_defaults((package / "defaults.yaml").read_text("utf-8")),
        ROOT / "docs" / "metrics.md": render_reference(),
    }


def main(arguments: list[str]) -> int:
    sys.path.insert(0, str(EXPORTER))
    package = EXPORTER / "gpu_exporter"
    if "--check" not in arguments:  # the reference imports the package, which needs its defaults first
        (package / "defaults.py").write_text(
            render_defaults((package / "defaults.yaml").read_text("utf-8")), encoding="utf-8"
        )
    stale = 0
    for path, content in outputs().items():
        if "--check" in arguments:
            if not path.exists() or path.read_text("utf-8") != content:
                print(f"{path.relative_to(ROOT)} is stale: run `make generate`", file=sys.stderr)
                stale = 1
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
