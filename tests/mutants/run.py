"""Changes one operator, number or word at a time, and lists the changes that no unit test detects (`make mutants`).

This is not part of CI: some thousand mutants take most of an hour on two cores. mutmut needs the package below `src`, so it
works on a copy of the tree in out/mutants. equal.txt lists survivors that change nothing important, with the reason. Any
other survivor is printed, and the exit status is then 1.

    make mutants                                     all of PLACES
    make mutants ONLY=agent/ledger/ledger.py,agent/attribution/resolve.py
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "out" / "mutants"
EQUAL = Path(__file__).with_name("equal.txt")
# Modules in which a wrong operator makes a busy GPU look idle, or assigns it to the wrong holder.
PLACES = (
    "agent/sampling/activity/spans.py",
    "agent/ledger",
    "agent/attribution",
    "common/commands.py",
    "diagnosis",
    "agent/inventory/inventory.py",
    "agent/node",
    "reconciler/decision/policy.py",
    "reconciler/plan.py",
    "reconciler/cycle.py",
    "reconciler/decision/brakes.py",
    "reconciler/decision/target.py",
    "reconciler/decision/outcomes.py",
    "reconciler/actions/record.py",
    "reconciler/actions/gates.py",
)
TESTS = (
    "tests/unit/sampling",
    "tests/unit/ledger",
    "tests/unit/attribution",
    "tests/unit/diagnosis",
    "tests/unit/inventory",
    "tests/unit/node",
    "tests/unit/reconciler",
    "tests/unit/app",
    "tests/unit/test_files.py",
)


def copy_tree(modules: list[str]) -> None:
    """Copy the tracked files, with the package below `src` and mutmut's settings."""
    shutil.rmtree(COPY, ignore_errors=True)
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        target = COPY / name.replace("exporter/gpu_exporter/", "src/gpu_exporter/", 1)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    settings = (ROOT / "pyproject.toml").read_text("utf-8")
    settings = settings.replace('pythonpath = [".", "exporter", "tests"]', 'pythonpath = [".", "src", "tests"]')
    chosen = ", ".join(f'"src/gpu_exporter/{module}"' for module in modules)
    selection = ", ".join(f'"{folder}"' for folder in TESTS)
    settings += (
        f'\n[tool.mutmut]\nsource_paths = ["src"]\nonly_mutate = [{chosen}]\nalso_copy = ["tests", "exporter", "docs", "alerts"]\n'
        f"pytest_add_cli_args_test_selection = [{selection}]\n"
    )
    (COPY / "pyproject.toml").write_text(settings, "utf-8")


def list_modules(wanted: list[str]) -> list[str]:
    """Modules below the package, of files and folders."""
    package = ROOT / "exporter" / "gpu_exporter"
    found: list[str] = []
    for name in wanted:
        path = package / name
        files = sorted(path.glob("*.py")) if path.is_dir() else [path]
        found += [str(file.relative_to(package)) for file in files if file.name != "__init__.py"]
    return found


def read_equal() -> list[tuple[re.Pattern[str], re.Pattern[str]]]:
    """The entries of equal.txt: regular expressions for the function's name and the changed line. The reason follows `#`."""
    pairs: list[tuple[re.Pattern[str], re.Pattern[str]]] = []
    for line in EQUAL.read_text("utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, rest = line.partition(" :: ")
            pairs.append((re.compile(name.strip()), re.compile(rest.partition("  # ")[0].strip())))
    return pairs


def main() -> int:
    wanted = [name for argument in sys.argv[1:] for name in argument.split(",") if name] or list(PLACES)
    copy_tree(list_modules(wanted))
    mutmut = [sys.executable, "-m", "mutmut"]

    def ask(*words: str) -> str:
        return subprocess.run([*mutmut, *words], cwd=COPY, capture_output=True, text=True, check=False).stdout

    run = subprocess.run([*mutmut, "run", "--max-children", "2"], cwd=COPY, check=False, capture_output=True, text=True)
    if not re.search(r"(\d+)/\1 ", run.stdout):
        print(f"mutmut did not come to its end:\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}")
        return 2
    survived = [line.partition(":")[0].strip() for line in ask("results").splitlines() if line.endswith("survived")]
    equal = read_equal()
    unknown = 0
    for name in survived:
        change = ask("show", name)
        lines = [
            line[1:].strip() for line in change.splitlines() if line.startswith("+") and not line.startswith("+++")
        ]
        if not any(where.search(name) and all(what.search(line) for line in lines) for where, what in equal):
            unknown += 1
            print(f"{name}\n{change}")
    print(f"{len(survived)} survived, {len(survived) - unknown} of them listed in {EQUAL.name}")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
