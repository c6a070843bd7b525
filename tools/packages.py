"""Draws the diagram of the code's packages in docs/architecture.md, from their imports."""

from __future__ import annotations

import re
from pathlib import Path

OPEN = "agent"  # the product whose packages the picture shows one by one
LEFT_OUT = ("contrib", "common")  # without code; and what all others import


def read_imports(package: Path) -> dict[str, set[str]]:
    """Returns for each product, and for each package of the agent, the packages that it imports at any time."""
    folders = [path for path in package.iterdir() if (path / "__init__.py").exists() and path.name not in LEFT_OUT]
    opened = [path for path in (package / OPEN).iterdir() if (path / "__init__.py").exists()]
    named = {path.relative_to(package).as_posix(): path for path in [*folders, *opened] if path.name != OPEN}
    imports: dict[str, set[str]] = {name: set() for name in sorted(named)}
    for name, folder in named.items():
        for path in folder.rglob("*.py"):
            for found in re.findall(r"^\s*(?:from|import) gpu_exporter\.([\w.]+)", path.read_text("utf-8"), re.M):
                product, *below = found.split(".")
                other = "/".join([product, *below[:1]]) if product == OPEN else product
                if other in named and other != name:
                    imports[name].add(other)
    return imports


def draw_packages(imports: dict[str, set[str]]) -> str:
    """Draws a mermaid diagram with an arrow from each package to its importers. Omits arrows that others imply."""

    def reach(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
        others = imports[name] - seen
        return others.union(*(reach(other, seen | others) for other in others))

    lines = ["```mermaid", "flowchart LR"]
    if inside := [name for name in imports if name.startswith(f"{OPEN}/")]:
        lines += [f"  subgraph {OPEN}", *(f"    {name}[{name.partition('/')[2]}]" for name in inside), "  end"]
    for name, direct in imports.items():
        implied = set().union(*(reach(other) for other in direct))
        lines += [f"  {other} --> {name}" for other in sorted(direct - implied)]
    return "\n".join([*lines, "```"])


def render_architecture(text: str, package: Path) -> str:
    """Returns the page with a new diagram."""
    before, _, rest = text.partition("<!-- packages -->\n")
    after = rest.partition("<!-- /packages -->")[2]
    return f"{before}<!-- packages -->\n{draw_packages(read_imports(package))}\n<!-- /packages -->{after}"
