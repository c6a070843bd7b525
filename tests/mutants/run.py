"""Change one operator, number or word at a time and see which changes no unit test notices (`make mutants`).

Outside CI: some thousand mutants take most of an hour on two cores. mutmut wants the package below `src`, so it works on
a copy of the tree in out/mutants. Survivors that are equal in effect are listed in equal.txt, each with the reason; any
other survivor is printed, and ends the run with status 1.

    make mutants                                     all of ROOMS
    make mutants ONLY=ledger/ledger.py,attribution/resolve.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "out" / "mutants"
EQUAL = Path(__file__).with_name("equal.txt")
# Where a wrong operator makes a busy GPU look idle, or gives it to the wrong holder.
ROOMS = (
    "sampling/activity.py",
    "ledger",
    "attribution",
    "reconciler/policy.py",
    "reconciler/plan.py",
    "reconciler/cycle.py",
)
TESTS = (
    "tests/unit/sampling",
    "tests/unit/ledger",
    "tests/unit/attribution",
    "tests/unit/reconciler",
    "tests/unit/app",
)


def copy_tree(modules: list[str]) -> None:
    """The tracked files, with the package below `src` and mutmut's settings."""
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
        f'\n[tool.mutmut]\nsource_paths = ["src"]\nonly_mutate = [{chosen}]\nalso_copy = ["tests", "exporter", "docs"]\n'
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


def main() -> int:
    wanted = [name for argument in sys.argv[1:] for name in argument.split(",") if name] or list(ROOMS)
    copy_tree(list_modules(wanted))
    mutmut = [sys.executable, "-m", "mutmut"]
    subprocess.run([*mutmut, "run", "--max-children", "2"], cwd=COPY, check=False, stdout=subprocess.DEVNULL)
    results = subprocess.run([*mutmut, "results"], cwd=COPY, capture_output=True, text=True, check=True).stdout
    survived = [line.partition(":")[0].strip() for line in results.splitlines() if line.strip().endswith("survived")]
    equal = {line.partition(" ")[0] for line in EQUAL.read_text("utf-8").splitlines() if line and line[0] != "#"}
    unknown = [name for name in survived if name not in equal]
    for name in unknown:
        print(subprocess.run([*mutmut, "show", name], cwd=COPY, capture_output=True, text=True, check=False).stdout)
    print(f"{len(survived)} survived, {len(survived) - len(unknown)} of them listed as equal in effect")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
