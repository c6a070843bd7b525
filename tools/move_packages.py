"""Moves every module into the package of its product, and changes the imports: `python -m tools.move_packages`, once.

Products are the first level of exporter/gpu_exporter; today's packages keep their names one level below.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "exporter" / "gpu_exporter"
PLACES = {  # folders and files of the package, by the one that they move into
    "agent": "attribution collectors devices exposition inventory ledger node sampling",
    "diagnosis": "host stalls",
    "reports": "digest top",
    "common": "config model web slurm clock.py commands.py durations.py exits.py fetch.py files.py logs.py outside.py "
    "plain.py shares.py threads.py vendor.py version.py",
}
MOVES = {old: f"{product}/{old}" for product, names in PLACES.items() for old in names.split()}
# The longer places first: what lies in a folder that moves too goes another way.
MOVES |= {
    "cluster": "agent/slurm_collector",
    "defaults.py": "common/config/defaults.py",
    "defaults.yaml": "common/config/defaults.yaml",
    "attribution/procfs.py": "common/procfs.py",
    "attribution/cgroup.py": "common/cgroup.py",
    "node/cases.py": "diagnosis/cases.py",
    "node/evidence.py": "diagnosis/looks.py",
    "node/training.py": "diagnosis/training/pace.py",
    "host/training.py": "diagnosis/training/files.py",
    "host/training_report.py": "diagnosis/training/reports.py",
    "app": "agent/runtime",
    "app/reconciler": "reconciler/runtime",
    "app/digest.py": "reports/digest/run.py",
    "app/demo.py": "cli/run_demo.py",
    "demo.yaml": "cli/demo.yaml",
}
NEW = {
    "agent": "The agent of a node: reads GPUs and their holders, counts, and publishes.",
    "common": "What several products need.",
    "reports": "What people read: the digest, and the table on a terminal.",
    "diagnosis/training": "What the training loops of holders report of themselves.",
}
TEXTS = ("*.py", "*.yaml", "*.toml", "*.txt", "*.md", "Makefile", "Dockerfile", "*.json")


def dotted(place: str) -> str:
    return place.removesuffix(".py").replace("/", ".")


def read_names() -> dict[str, str]:
    """By the dotted name of each module and package of today, its new one."""
    names: dict[str, str] = {}
    for path in [*PACKAGE.rglob("*.py"), *(path.parent for path in PACKAGE.rglob("__init__.py"))]:
        place = path.relative_to(PACKAGE).as_posix()
        if place.endswith("__init__.py") or place == ".":
            continue
        old = max((old for old in MOVES if place == old or place.startswith(f"{old}/")), key=len, default=place)
        names[dotted(place)] = dotted(MOVES.get(old, old) + place.removeprefix(old))
    return names


def rewrite(text: str, names: dict[str, str]) -> str:
    def change(found: re.Match[str]) -> str:
        parts = found[1].split(".")[1:]
        for length in range(len(parts), 0, -1):
            if (new := names.get(".".join(parts[:length]))) is not None:
                return "gpu_exporter." + ".".join([new, *parts[length:]])
        return found[0]

    def change_from(found: re.Match[str]) -> str:  # from gpu_exporter import commands
        new = names.get(found[1])
        return found[0] if new is None else f"from gpu_exporter.{new.rpartition('.')[0]} import {found[1]}"

    text = re.sub(r"from gpu_exporter import (\w+)", change_from, text)
    text = re.sub(r"\bgpu_exporter((?:\.\w+)+)", change, text)
    places = [(old, new) for old, new in MOVES.items() if old not in ("node", "host", "app", "top", "digest")]
    for old, new in sorted(places, key=lambda each: -len(each[0])):
        text = re.sub(rf"\bgpu_exporter/{re.escape(old)}(?![\w.])(?!-)", f"gpu_exporter/{new}", text)
    return text


def main() -> None:
    names = read_names()
    listed = subprocess.run(["git", "ls-files", *TEXTS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split():
        path = ROOT / name
        if name.startswith(("docs/decisions", "CHANGELOG", "tools/move_packages")) or path.is_symlink():
            continue
        before = path.read_text("utf-8")
        if (after := rewrite(before, names)) != before:
            path.write_text(after, "utf-8")
    for place, purpose in NEW.items():
        (PACKAGE / place).mkdir(parents=True, exist_ok=True)
        (PACKAGE / place / "__init__.py").write_text(f'"""{purpose}"""\n')
    # A module before its folder, and a folder before what moves into it.
    for old, new in sorted(MOVES.items(), key=lambda each: (each[0] != "digest", -each[0].count("/"))):
        (PACKAGE / new).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["git", "mv", f"exporter/gpu_exporter/{old}", f"exporter/gpu_exporter/{new}"], cwd=ROOT, check=True
        )


if __name__ == "__main__":
    main()
