"""Draws the picture of the code's packages in docs/architecture.md from their imports."""

from __future__ import annotations

import re
from pathlib import Path


def read_imports(package: Path) -> dict[str, set[str]]:
    """By package (a folder), the packages that it imports, when its modules are loaded or later."""
    rooms = {path.parent.name for path in package.glob("*/__init__.py")}
    imports: dict[str, set[str]] = {room: set() for room in sorted(rooms)}
    for room, found in imports.items():
        for path in (package / room).rglob("*.py"):
            names = re.findall(r"^\s*(?:from|import) gpu_exporter\.(\w+)", path.read_text("utf-8"), re.M)
            found.update(name for name in names if name in rooms and name != room)
    return imports


def draw_rooms(imports: dict[str, set[str]]) -> str:
    """A mermaid picture: an arrow from each package to those that import it, without arrows that others imply."""

    def reach(room: str) -> set[str]:
        return imports[room].union(*(reach(other) for other in imports[room]))

    lines = ["```mermaid", "flowchart LR"]
    for room, direct in imports.items():
        implied = set().union(*(reach(other) for other in direct))
        lines += [f"  {other} --> {room}" for other in sorted(direct - implied)]
    return "\n".join([*lines, "```"])


def render_architecture(text: str, package: Path) -> str:
    """The page with a new picture."""
    before, _, rest = text.partition("<!-- rooms -->\n")
    after = rest.partition("<!-- /rooms -->")[2]
    return f"{before}<!-- rooms -->\n{draw_rooms(read_imports(package))}\n<!-- /rooms -->{after}"
