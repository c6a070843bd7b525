"""docs/limits.md lists what is dropped when something is full: its numbers are those of the code, and nothing is missing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "exporter" / "gpu_exporter"
PAGE = (ROOT / "docs" / "limits.md").read_text("utf-8")
ROW = re.compile(
    r"\| [^|]+ \| `(?P<path>[\w./]+)` `(?P<name>[A-Z_]+)` = (?P<number>[\d,]+)(?: (?P<unit>KiB|MiB))? \| [^|]+ \|(?: [^|]+ \|)?"
)
ROWS = [match for line in PAGE.splitlines() if (match := ROW.fullmatch(line))]
UNITS = {None: 1, "KiB": 2**10, "MiB": 2**20}
# Ways to drop what was kept, with the name of the limit.
DROPS = (
    re.compile(r"maxlen=(?:self\.)?(\w+)"),
    re.compile(r"\[:?-([A-Z]{2}[A-Z_]+):?\]"),
    re.compile(r"len\([^\n]+\) >=? ([A-Z_]+)[^\n]*:\n(?:[^\n]+\n)?[^\n]+(?:\.clear\(\)|next\(iter\()"),
)
WINDOWS = {"READINGS", "SPACINGS"}  # the newest readings of a witness, which need no earlier ones


def value_of(path: Path, name: str) -> object:
    """The value of a constant of a module, without an import."""
    names = {"MIB": 2**20}
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and any(
            isinstance(each, ast.Name) and each.id == name for each in node.targets
        ):
            return eval(compile(ast.Expression(node.value), "", "eval"), names)
    raise LookupError(f"{path} has no {name}")


def test_every_row_of_the_page_can_be_read() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) == len(ROWS) >= 40


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['path']}-{row['name']}")
def test_the_page_has_the_numbers_of_the_code(row: re.Match[str]) -> None:
    assert value_of(PACKAGE / row["path"], row["name"]) == int(row["number"].replace(",", "")) * UNITS[row["unit"]]


def drops() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for pattern in DROPS:
            yield from (
                (path.relative_to(PACKAGE).as_posix(), name) for name in pattern.findall(path.read_text("utf-8"))
            )


def test_the_page_lists_every_place_that_drops_what_is_old() -> None:
    listed, found = {(row["path"], row["name"]) for row in ROWS}, set(drops())
    assert len(found) > 15, "the patterns find the places"
    assert {each for each in found if each[1] not in WINDOWS} - listed == set()
