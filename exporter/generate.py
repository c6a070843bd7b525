"""Writes what is generated: gpu_exporter/defaults.py, docs/metrics.md and the picture in docs/architecture.md.

Run by `make generate`; a test compares the files with what this would write. Usage: generate.py [--check]
"""

from __future__ import annotations

import json
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
                    json.dumps(value) if isinstance(value, str) and '"' not in value else repr(value),
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


# Unit by the end of a name, as the Prometheus conventions have it.
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
    "_info": "1",
    "_state": "number",
    "_up": "0 or 1",
    "_success": "0 or 1",
    "_supported": "0 or 1",
    "_pending": "0 or 1",
    "_failed": "0 or 1",
    "_active": "0 or 1",
    "_allocated": "0 or 1",
    "_action": "number",
}


def unit_of(name: str) -> str:
    """The unit that a name ends in; a count where it ends in none."""
    return next((unit for end, unit in UNITS.items() if name.endswith(end)), "count")


def render_reference() -> str:
    """The metrics reference page, from the families that the code declares."""
    from gpu_exporter import collectors
    from gpu_exporter.exposition.catalog import DEVICE_LABELS, MIG_LABELS, fixed_groups
    from gpu_exporter.model import Family

    out = [
        "# Metrics",
        "",
        "Generated from the code by `make generate`; a test compares. Base units throughout; a series that the",
        "hardware or the privilege does not allow is absent, never 0. Each collector has its flag, `--collector.NAME`",
        "and `--no-collector.NAME`; what it reads less often than each cycle says so.",
    ]
    groups: list[tuple[str, str, tuple[str, ...], tuple[Family, ...]]] = []
    for collector in collectors.ALL:
        notes = []
        if not collector.default:
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
    for title, note, labels, families in groups:
        out += ["", f"## {title}", ""]
        if note:
            out += [note, ""]
        if labels:
            out += [f"Labels on every series: {', '.join(f'`{label}`' for label in labels)}.", ""]
        out.append("| name | type | unit | more labels | meaning | source | generations |")
        out.append("| --- | --- | --- | --- | --- | --- | --- |")
        for family in families:
            more = ", ".join(f"`{label}`" for label in family.labels) or "-"
            cells = (
                f"`{family.name}`",
                family.type,
                unit_of(family.name),
                more,
                family.help,
                family.source or "-",
                family.generations or "all",
            )
            out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out) + "\n"


def read_imports(package: Path) -> dict[str, set[str]]:
    """By room, a folder of the package, the rooms that it imports while its modules are loaded or later."""
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    imports: dict[str, set[str]] = {room: set() for room in sorted(rooms)}
    for room, found in imports.items():
        for path in (package / room).rglob("*.py"):
            names = re.findall(r"^\s*(?:from|import) gpu_exporter\.(\w+)", path.read_text("utf-8"), re.M)
            found.update(name for name in names if name in rooms and name != room)
    return imports


def draw_rooms(imports: dict[str, set[str]]) -> str:
    """A mermaid picture: an arrow from each room to those that import it, without arrows that others imply."""

    def reach(room: str) -> set[str]:
        return imports[room].union(*(reach(other) for other in imports[room]))

    lines = ["```mermaid", "flowchart LR"]
    for room, direct in imports.items():
        implied = set().union(*(reach(other) for other in direct))
        lines += [f"  {other} --> {room}" for other in sorted(direct - implied)]
    return "\n".join([*lines, "```"])


def render_architecture(text: str, package: Path) -> str:
    """The page with its picture drawn again."""
    before, _, rest = text.partition("<!-- rooms -->\n")
    after = rest.partition("<!-- /rooms -->")[2]
    return f"{before}<!-- rooms -->\n{draw_rooms(read_imports(package))}\n<!-- /rooms -->{after}"


def outputs() -> dict[Path, str]:
    """Every generated file with its content."""
    package = EXPORTER / "gpu_exporter"
    page = ROOT / "docs" / "architecture.md"
    return {
        package / "defaults.py": render_defaults((package / "defaults.yaml").read_text("utf-8")),
        ROOT / "docs" / "metrics.md": render_reference(),
        page: render_architecture(page.read_text("utf-8"), package),
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
